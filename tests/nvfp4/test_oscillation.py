"""OsciReset: which weights it moves, and that a state goes on."""

import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4.oscillation import OsciReset, remedies


def small_model(method: str = "clover") -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=2, n_kv_head=2, n_embd=128))
    model.init_weights()
    for parameter in model.transformer.h.parameters():
        parameter.data.normal_()
    return nf.convert(model, method, verbose=False)


def walk(model, remedy, steps: int, size: float = 0.1, first: int = 0) -> None:
    """Random steps inside optimizer_step."""
    for step in range(first, first + steps):
        with remedy.optimizer_step(step), torch.no_grad():
            for m in model.modules():
                if isinstance(m, nf.QuantLinear):
                    m.weight += size * torch.randn_like(m.weight)


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


def test_going_on_from_a_state_changes_no_bit():
    text = "reset:0.5:0.4:0"
    whole, first, second = small_model(), small_model(), small_model()
    (remedy,) = remedies(text, whole, 10)
    torch.manual_seed(1)
    walk(whole, remedy, 10)
    (before,) = remedies(text, first, 10)
    torch.manual_seed(1)
    walk(first, before, 4)  # inside a window
    assert before.state_dict()["excess"]
    second.load_state_dict(first.state_dict())
    (after,) = remedies(text, second, 10)
    after.load_state_dict(before.state_dict())
    walk(second, after, 6, first=4)
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), second.state_dict().values()))


@pytest.mark.parametrize("text", ["slow:0.9", "reset:x", "reset:2", "reset:1:1:1:1"])
def test_other_forms_are_refused_in_one_line(text):
    with pytest.raises(ValueError, match="^oscillation: .* is not reset, with") as error:
        remedies(text, small_model(), 10)
    assert "\n" not in str(error.value)
    assert remedies("", None, 10) == []


def test_weight_averages_were_removed():
    for text in ("ema:0.9", "q_ema:0.9:0.6"):
        with pytest.raises(ValueError, match=f"^oscillation: '{text}' was .* removed; the last commit .* is 880d786$"):
            remedies(text, small_model(), 10)
