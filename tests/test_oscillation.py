"""Remedies for oscillating weights: what the forward pass quantizes, and what the optimizer moves."""

import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4.format import E2M1_VALUES
from nanochat_fp4.nvfp4.linear import quantized_weights
from nanochat_fp4.nvfp4.oscillation import OsciReset, SlowWeights, remedies


def small_model(method: str = "clover") -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=128))
    model.init_weights()
    for parameter in model.transformer.h.parameters():
        parameter.data.normal_()
    return nf.convert(model, method, verbose=False)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, nf.QuantLinear)}


def walk(model, remedy, steps: int, size: float = 0.1, first: int = 0) -> list[dict[str, torch.Tensor]]:
    """Random steps inside optimizer_step; the fast weights from the beginning on."""
    history = [weights(model)]
    for step in range(first, first + steps):
        with remedy.optimizer_step(step), torch.no_grad():
            for m in model.modules():
                if isinstance(m, nf.QuantLinear):
                    m.weight += size * torch.randn_like(m.weight)
            history.append(weights(model))
    return history


def test_the_parameters_are_the_average_of_the_fast_weights():
    model = small_model()
    slow = SlowWeights(model, 7, 0.8, start=2 / 7)
    walk(model, slow, 2)
    assert not slow.state_dict()["fast"]
    history = walk(model, slow, 5, first=2)
    for name, weight in weights(model).items():
        share = [0.8**age for age in reversed(range(6))]
        expected = sum(s * w[name].double() for s, w in zip(share, history)) / sum(share)
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-6)


def test_weights_that_have_no_grid_stay_fast():
    """Layers that are not quantized now, or to two terms; and the slow ones come back with the recipe."""
    model = small_model()
    slow = SlowWeights(model, 3, 0.8)
    fast = walk(model, slow, 3)[-1]
    averages = weights(model)
    for method in ("bf16", "clover_refined", "fp8", "clover_masked"):
        nf.convert(model, method, verbose=False)
        slow.refresh()
        assert all(torch.equal(w, fast[name]) for name, w in weights(model).items()), method
    nf.convert(model, "clover", verbose=False)
    slow.refresh()
    assert all(torch.equal(w, averages[name]) and not torch.equal(w, fast[name]) for name, w in weights(model).items())


def test_q_ema_takes_one_of_the_two_values_around_the_fast_weight():
    """By the grid of the fast weights, q, k and v having one tensor_scale; and the average itself where it is there."""
    model = small_model()
    near, free = SlowWeights(model, 6, 0.9, nearby=True), SlowWeights(model, 6, 0.9)
    fast = walk(model, near, 6)[-1]
    slow, average = weights(model), near.average
    attention = model.transformer.h[0].attn
    group = (attention.c_q, attention.c_k, attention.c_v)
    names = [f"transformer.h.0.attn.c_{x}" for x in "qkv"]
    for layer, name in zip(group, names):
        layer.weight.data.copy_(fast[name])
    (t,) = quantized_weights([group])
    units = (t.scales.double() * t.tensor_scale.double()).repeat_interleave(16, dim=-1)
    grid = torch.tensor(sorted({*E2M1_VALUES, 8.0, -8.0}), dtype=torch.float64)
    f, s, a = (torch.cat([w[name] for name in names]).double() / units for w in (fast, slow, average))
    below = grid[(torch.searchsorted(grid, f, right=True) - 1).clamp(0, len(grid) - 2)]
    above = grid[torch.searchsorted(grid, below, right=True)]
    torch.testing.assert_close(s, torch.maximum(torch.minimum(a, above), below), rtol=1e-6, atol=1e-6)
    assert 0.01 < (s != a).double().mean() < 0.9  # both cases are there
    free.load_state_dict(near.state_dict())
    assert not torch.equal(weights(model)[names[0]], slow[names[0]])


def test_reset_centres_exactly_the_weights_that_oscillate():
    """Steps to and fro: a weight at an edge flips at each, one that is far from the edges never does."""
    model = small_model("fig2_1x16_rtn")
    layer = model.transformer.h[0].mlp.c_fc
    layer.weight.data.zero_()
    # The block's scale is 1: 6 is its largest; 2.48 and 2.52 round to 2 and 3, 1.24 and 1.28 to 1 and 1.5.
    layer.weight.data[:, ::16] = 6.0
    layer.weight.data[:, 1::16], layer.weight.data[:, 2::16], layer.weight.data[:, 3::16] = 2.48, 1.24, 1.0
    reset = OsciReset(model, num_steps=40, period=0.25, window=0.1, start=0.5)
    resets = []
    for step in range(40):
        with reset.optimizer_step(step), torch.no_grad():
            layer.weight[:, 1:4] += 0.04 * (-1) ** step
            layer.weight[:, 33] += 0.04 if step == 22 else 0.0  # crosses before the window
            layer.weight[:, 17] += 0.04 if step == 26 else 0.0  # crosses once, in the window's first step
            layer.weight[:, 18] += 0.3 if step == 26 else 0.0  # crosses because it moves
            expected = layer.weight.clone()
        if not torch.equal(layer.weight, expected):
            resets.append(step)
            changed = (layer.weight != expected).any(0).nonzero().flatten().tolist()
            assert changed == ([1, 2, 17] if step == 29 else changed)
            assert layer.weight[0, 1] in (2.0, 3.0) and layer.weight[0, 2] in (1.0, 1.5)
    assert resets[0] == 29  # not before the start, nor outside of the windows
    assert not reset.state_dict()["excess"]


@pytest.mark.parametrize("text", ["ema:0.9", "q_ema:0.9:0.2", "q_ema:0.9:0.6", "reset:0.5:0.4:0"])
def test_going_on_from_a_state_changes_no_bit(text):
    whole, first, second = small_model(), small_model(), small_model()
    (remedy,) = remedies(text, whole, 10)
    torch.manual_seed(1)
    walk(whole, remedy, 10)
    (before,) = remedies(text, first, 10)
    torch.manual_seed(1)
    walk(first, before, 4)  # inside a window of the reset
    second.load_state_dict(first.state_dict())
    (after,) = remedies(text, second, 10)
    after.load_state_dict(before.state_dict())
    walk(second, after, 6, first=4)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize("text", ["ema", "ema:1", "ema:x", "slow:0.9", "q_ema:0.9:1:1", "reset:2", "reset:1:1:1:1"])
def test_other_forms_are_refused_in_one_line(text):
    with pytest.raises(ValueError, match="^oscillation: .* is none of ema:decay") as error:
        remedies(text, small_model(), 10)
    assert "\n" not in str(error.value)
    assert remedies("", None, 10) == []
