"""The base directory, devices, ranks, seeds, the process group."""

import os
import random
import types

import pytest
import torch

from nanochat_fp4 import common, hardware
from nanochat_fp4.cli import UserError, run_main


def test_base_dir_is_created(base_dir):
    assert common.get_base_dir() == str(base_dir) and base_dir.is_dir()


def test_base_dir_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="NANOCHAT_BASE_DIR"):
        common.get_base_dir()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / os.fsdecode(b"caf\xe9")))  # pyarrow could not read below it
    with pytest.raises(UserError, match="the name is not UTF-8\\); set NANOCHAT"):
        common.get_base_dir()


def test_compute_init_returns_nanochats_tuple():
    assert common.compute_init("cpu") == (False, 0, 0, 1, torch.device("cpu"))
    a = torch.rand(4)
    common.compute_init("cpu")
    assert torch.equal(a, torch.rand(4))
    common.compute_cleanup()


def test_deterministic_kernels_or_one_line(monkeypatch, capsys):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        common.use_deterministic_kernels()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(SystemExit):  # warned of only, flash attention's backward pass would stay as it was
            run_main(lambda: torch.zeros(3).put_(torch.tensor([0]), torch.ones(1)))
        assert "error: put_ " in capsys.readouterr().err
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cuda.enable_cudnn_sdp(before)
        torch.utils.deterministic.fill_uninitialized_memory = True


def test_compiled_kernels_are_kept_in_the_base_directory(tmp_path, monkeypatch):
    """Unless the user has named a folder, or the base directory is read-only; the compiler goes there."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    for name in names:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    common.keep_compiled(str(tmp_path / "missing"))
    assert not any(name in os.environ for name in names)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    common.keep_compiled(str(tmp_path))
    assert [os.environ[name] for name in names] == [
        str(tmp_path / "compiled" / f"torch-{torch.__version__}" / "inductor"),
        "/elsewhere",
    ]
    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_unknown_device_type():
    with pytest.raises(UserError, match="'tpu'.*cuda, mps or cpu"):
        common.compute_init("tpu")


@pytest.mark.parametrize("version, text", [("12.8", "sees no GPU"), (None, "built without CUDA")])
def test_cuda_without_a_gpu(monkeypatch, version, text):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(UserError, match=f"--device-type cuda.*{text}.*--device-type cpu"):
        common.compute_init("cuda")


def test_autodetect_prefers_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert common.autodetect_device_type() == "cuda"
    assert "cuda" in capsys.readouterr().out


def test_a_text_is_said_once_by_all_stages_of_a_speedrun(base_dir, monkeypatch, capsys):
    def stage(*texts):
        common.SAID.clear()  # another process
        for text in texts * 2:
            common.say_once(text)
        return capsys.readouterr().out.splitlines()

    (base_dir / "report").mkdir(parents=True)
    assert stage("on a CPU") == stage("on a CPU") == ["on a CPU"]
    monkeypatch.setenv("NANOCHAT_BEGAN", "1")
    assert stage("on a CPU", "a\nmixture") == ["on a CPU", "a", "mixture"]
    assert stage("a\nmixture", "on", "on a CPU") == ["on"]
    (base_dir / "report/said.txt").write_text("")  # by the next speedrun
    assert stage("on") == ["on"]
    (base_dir / "report/said.txt").unlink()
    (base_dir / "report/said.txt").mkdir()  # A memory that cannot be read says all.
    assert stage("on") == ["on"]


@pytest.mark.parametrize(
    "env", [{"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}]
)
def test_bad_torchrun_variables(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun"):
        common.get_dist_info()


def test_seeds():
    def draw(seed, *args):
        common.seed_everything(seed)
        first = random.random()
        if args:
            common.seed_micro_batch(seed, *args)
        return first, *torch.rand(3).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert draw(1, 0, 1) == draw(1, 0, 1)
    assert len({draw(seed, *more) for seed in (1, 2) for more in ((0, 0), (0, 1), (1, 0), ())}) == 8


@pytest.mark.parametrize("integrated, free", [(False, 10), (True, 70)])
def test_free_memory_of_a_gpu_that_shares_the_systems(integrated, free, monkeypatch):
    """A GB10's driver counts the page cache as used."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (10, 100))
    properties = types.SimpleNamespace(is_integrated=integrated)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(hardware, "available_memory", lambda: 70)
    assert hardware.gpu_memory() == (free, 100)
