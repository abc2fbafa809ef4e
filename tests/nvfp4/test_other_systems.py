"""The rows of the other systems."""

import pytest
import torch
from _assertions import assert_unbiased, concentrate
from _rows import METHOD_TABLE

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.quantizers import quantize


def layer(method, in_features=128, out_features=128):
    torch.manual_seed(1)
    return nf.QuantLinear(in_features, out_features, method=method)


def backward(linear, x, e, seed=7):
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = linear(x)
    return y.detach(), *torch.autograd.grad(y, (x, linear.weight), e)


@pytest.mark.parametrize("method", ["tseng", "chmiel", "fig1e_sr", "nvidia_1d"])
def test_stochastic_backwards_are_unbiased(method):
    """Around the product of what their roundings to nearest give: the forward's operands, or codes of raw ones."""
    x, e, linear = torch.randn(32, 64), torch.randn(32, 128), layer(method, 64)
    recipe, w = METHOD_TABLE[method], linear.weight.detach()
    forward_w, forward_x = w, x
    if recipe.output.a.rounding:
        forward_w, forward_x = (quantize(v, "rtn").dequantize() for v in (w, x))

    def operand(o, kept, raw):
        if not o.raw:
            return kept
        return raw if o.rounding.stochastic else quantize(raw.T, o.rounding.name).dequantize().T

    targets = [e @ operand(recipe.grad_input.b, forward_w, w)]
    if method != "nvidia_1d":  # its wgrad rounds to nearest under a rotation that changes: no single target
        targets.append(e.T @ operand(recipe.grad_weight.b, forward_x, x))
    count = len(targets)
    draws = concentrate(lambda b: backward(linear, x, e, b)[1 : 1 + count], tuple(t.double() for t in targets), 128)
    for name, c in zip(("grad_input", "grad_weight"), draws):
        assert_unbiased(f"{method} {name}", c)


def test_nearest_rounding_of_gradients_is_biased():
    x, e, linear = torch.randn(64, 128), torch.randn(64, 128), layer("nvidia_no_sr")
    target = (e @ quantize(linear.weight.detach(), "rtn_16x16").dequantize()).double()
    (c,) = concentrate(lambda b: backward(linear, x, e, b)[1:2], (target,), 16)
    assert c.gain < 2
