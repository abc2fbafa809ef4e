"""The base directory, devices, ranks, seeds, the process group."""

import os
import random
import socket
import subprocess
import sys

import pytest
import torch

from nanochat_fp4 import common
from nanochat_fp4.errors import UserError


def test_base_dir_is_created(base_dir):
    assert common.get_base_dir() == str(base_dir) and base_dir.is_dir()


def test_base_dir_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(UserError, match="NANOCHAT_BASE_DIR"):
        common.get_base_dir()


def test_compute_init_returns_nanochats_tuple():
    assert common.compute_init("cpu") == (False, 0, 0, 1, torch.device("cpu"))
    a = torch.rand(4)
    common.compute_init("cpu")
    assert torch.equal(a, torch.rand(4))
    common.compute_cleanup()


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


@pytest.mark.parametrize(
    "env", [{"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}]
)
def test_bad_torchrun_variables(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="torchrun"):
        common.get_dist_info()


def test_seeds():
    def draw(*args):
        common.seed_everything(*args)
        return random.random(), *torch.rand(3).tolist()

    assert draw(1) == draw(1) != draw(2)
    assert draw(1, 0) == draw(1, 0)
    assert len({draw(seed, rank) for seed in (1, 2) for rank in (0, 1, None)}) == 6


def test_two_processes_join_over_gloo():
    code = (
        "import torch, torch.distributed as dist\n"
        "from nanochat_fp4.common import *\n"
        "ddp, rank, local_rank, world_size, device = compute_init('cpu')\n"
        "same = torch.rand(1)\n"
        "seed_everything(42, rank)\n"
        "t = torch.cat([same, torch.rand(1)])\n"
        "out = [torch.empty(2) for _ in range(2)]\n"
        "dist.all_gather(out, t)\n"
        "assert out[0][0] == out[1][0] and out[0][1] != out[1][1]\n"
        "print0('rank', rank, 'of', world_size, dist.get_backend())\n"
        "compute_cleanup()\n"
    )
    outputs = run_ranks(code, 2)
    assert outputs == ["rank 0 of 2 gloo\n", ""]


def run_ranks(code, world_size, env=None):
    """stdout of `python -c code` as every rank of a gloo group; fails with stderr where one does not exit with 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    common_env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common_env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    procs = []
    for rank in range(world_size):
        rank_env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        procs.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env={**common_env, **rank_env, **(env or {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    results = [p.communicate(timeout=300) for p in procs]
    for p, (_, err) in zip(procs, results):
        assert p.returncode == 0, err
    return [out for out, _ in results]
