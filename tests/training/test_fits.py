"""What fits a card, by count: against the count of the model's own tensors, and the tables that say it."""

import itertools
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.measure import bench_memory
from lab.predict import fits
from nanochat_fp4.errors import UserError
from nanochat_fp4.models.gpt import GPT, RECOMPUTE, config_from_depth
from nanochat_fp4.training import micro_batch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("method", ["bf16", "clover"])
def test_activations_are_those_of_a_real_d4(method, recompute):
    """Saved tensors of a d4 on a CPU, within 3% of the formula."""
    block, rest = bench_memory.per_token_and_layer(config_from_depth(4, vocab_size=64), method, recompute, tokens=16)
    sum_of_layers = sum(block.values()) * 4 + rest
    expected = fits.activation_bytes(4, recompute, "bf16" if method == "bf16" else "codes")
    assert sum_of_layers == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [20, 26, 32, 40])
def test_activations_of_large_models_are_the_formula(depth):
    """Saved tensors of fake forward passes: the very numbers."""
    for method, recompute in itertools.product(("bf16", "clover"), ("none", "codes", "codes-mlp")):
        with FakeTensorMode():
            block, rest = bench_memory.per_token_and_layer(config_from_depth(depth, vocab_size=64), method, recompute)
        expected = fits.activation_bytes(depth, recompute, "bf16" if method == "bf16" else "codes")
        assert depth * sum(block.values()) + rest == expected, (method, recompute)


@pytest.mark.parametrize("depth", [20, 26, 32, 40])
def test_parameters_are_those_of_the_model(depth):
    with torch.device("meta"):
        model = GPT(config_from_depth(depth, vocab_size=fits.VOCABULARY))
    shape = fits.Shape(depth)
    assert sum(p.numel() for p in model.transformer.h.parameters()) == shape.block_weights
    assert model.lm_head.weight.numel() == model.transformer.wte.weight.numel() == shape.head_weights


def test_the_peak_is_what_the_document_adds_up():
    for depth, rows, peak in (26, 8, 31.4), (32, 2, 31.3):
        assert fits.Plan(depth, "fp32", "none", rows).peak / 1e9 == pytest.approx(peak, abs=0.05)


def test_cards_train_what_they_should():
    for depth, memory in (20, 6), (26, 10), (32, 16), (40, 32):
        assert fits.best(depth, memory * 2**30).rows >= 1, depth
    assert fits.best(20, 139 * 2**30).flags == ""  # nothing is given up where everything fits
    assert fits.best(40, 8 * 2**30).rows == 0


def test_readme_has_the_table(capsys):
    fits.main([])
    assert capsys.readouterr().out in (ROOT / "README.md").read_text()


def test_one_card(capsys):
    fits.main(["--gpu", "rtx5060", "--flags"])
    assert capsys.readouterr().out == "--state=lean --recompute=codes\n"
    fits.main(["--memory", "4", "--depth", "26"])
    assert capsys.readouterr().out.startswith("d26 on 4 GiB: needs 8.1 GiB; d16 fits\n")
    with pytest.raises(UserError, match="the memory of rtx9090 is not known"):
        fits.main(["--gpu", "rtx9090"])


def test_the_next_lever_follows_what_is_on_already():
    with torch.device("meta"):
        model = GPT(config_from_depth(26, vocab_size=fits.VOCABULARY))
    said = micro_batch.memory_lever(model, 8, 2048)
    assert said.startswith("one more row takes 2.17 GiB, and --recompute=codes saves ")
    model.recompute = "codes-mlp"
    assert "--state=lean saves " in micro_batch.memory_lever(model, 8, 2048)
    assert "--recompute=all saves " in micro_batch.memory_lever(model.bfloat16(), 8, 2048)
