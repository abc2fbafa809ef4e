"""examples/: what they show runs, and is short."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import _models
import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.export.weights import forward_weights, served

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TRAINER = ("transformers", "accelerate")
NEEDS = {
    "hf_trainer": (*TRAINER, "compressed_tensors"),
    "lightning_module": ("lightning",),
    "lora": ("peft", "transformers"),
}


def load(name: str):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} (pip install '.[examples]')")
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    if name in NEEDS:
        _models.package(NEEDS[name][0])
    spec.loader.exec_module(module)
    return module


FILES = sorted(EXAMPLES.glob("[!_]*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_is_short_and_tested(file):
    assert len(file.read_text().splitlines()) <= 48
    assert f"def test_{file.stem}(" in Path(__file__).read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_python_without_the_package_is_one_line(file):
    done = subprocess.run([sys.executable, "-IS", file], capture_output=True, text=True)
    assert done.returncode and done.stderr.count("\n") == 1 and "pip install -e ." in done.stderr, done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_arguments_train_nothing(file, tmp_path):
    """--help says what the example does, if its packages are there. Without one it is a line, as for a command."""
    there = all(importlib.util.find_spec(package) for package in NEEDS.get(file.stem, ()))
    for argument in ("--help", "clover"):
        done = subprocess.run([sys.executable, file, argument], capture_output=True, text=True, cwd=tmp_path)
        assert not os.listdir(tmp_path) and "Traceback" not in done.stderr
        if there and argument == "--help":
            assert done.returncode == 0 and "Trains" in done.stdout or "training loop" in done.stdout
        else:
            assert done.returncode and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_an_example_that_needs_torchrun_says_so():
    alone = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, EXAMPLES / "fsdp2.py"], capture_output=True, text=True, env=alone)
    assert done.returncode and done.stderr.count("\n") == 1, done.stderr
    assert f"torchrun --nproc_per_node=2 {EXAMPLES / 'fsdp2.py'}" in done.stderr


def test_they_write_where_git_does_not_look():
    ignored = (EXAMPLES.parent / ".gitignore").read_text().split()
    written = [m[1] for file in EXAMPLES.glob("*.py") for m in re.finditer(r'folder: str = "(\w+)"', file.read_text())]
    assert written and all(f"/{name}/" in ignored for name in written)


def test_plain_loop(capsys):
    losses = load("plain_loop").main("clover_fp8_forward", 20)
    assert len(losses) == 20 and losses[-1] < losses[0]
    out = capsys.readouterr().out
    assert "converted 4 linear layers" in out
    # The loss of the same weights, on the rows of the last one: one step of AdamW and BF16 for 4 bits lie between them.
    assert abs(float(out.split()[-1]) - losses[-1]) < 0.1


def test_fsdp2(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        losses = load("fsdp2").main("clover", 6)
    finally:
        dist.destroy_process_group()
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.slow
def test_hf_trainer(tmp_path, caplog):
    """transformers reads the weights of the trained forward pass. No line says that something was to be passed."""
    example = load("hf_trainer")
    trainer, read = example.main(str(tmp_path), "clover", 12)
    assert "common" in caplog.text and "tokenizer=" not in caplog.text and "calibration=" not in caplog.text
    model, losses = trainer.model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < losses[0]
    ids = torch.arange(32).view(1, 32)
    model.cpu().eval()
    about = example.transformers.AutoConfig.from_pretrained(tmp_path / "nvfp4")
    about.quantization_config = {**about.quantization_config, "dequantize": True}
    decoded = type(model).from_pretrained(tmp_path / "nvfp4", config=about)
    with torch.no_grad(), served(model, forward_weights(model)[0]) as copied:
        want, got = copied(ids).logits, decoded.eval()(ids).logits.float()
        torch.testing.assert_close(got, want, atol=0.03, rtol=0.02)
        assert 0.03 < (read.eval()(ids).logits.float() - want).norm() / want.norm() < 0.2  # its inputs are rounded, too
    late, _ = example.main(str(tmp_path), "clover_late", 4)
    assert {m.recipe.name for m in late.model.modules() if isinstance(m, nf.QuantLinear)} == {"clover_search"}
    with pytest.raises(ValueError, match="nvidia_full ends.*model.save_pretrained"):
        example.main(str(tmp_path / "bf16"), "nvidia_full", 8)
    assert (tmp_path / "bf16/unquantized/model.safetensors").exists()  # what was trained is not lost


@pytest.mark.slow
def test_lightning_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = load("lightning_module").main("clover_late", 10)
    assert len(losses) == 10 and losses[-1] < losses[0]


@pytest.mark.slow
def test_lora(capsys):
    losses = load("lora").main(10)
    assert len(losses) == 10 and losses[-1] < losses[0]
    assert "an adapter's low-rank factor (" in capsys.readouterr().out
