"""The rows of the other systems."""

import pytest
import torch
from _assertions import assert_unbiased, concentrate, relative_square_error
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


@pytest.mark.parametrize("method", ["fp8", "tseng", "clover_fp8_input"])
def test_beside_kernels(method, monkeypatch):
    """Where NVFP4 has kernels, MXFP4 and MXFP8 still take the reference, alone and with an NVFP4 operand beside them;
    the kernels' rotation sums in another order and tips a few codes."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there interpreted
    x, e, results = torch.randn(40, 64).to(device), torch.randn(40, 96).to(device), []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        results.append(backward(layer(method, 64, 96).to(device), x, e))
    for got, want in zip(*results):
        assert relative_square_error(got, want) < 1e-4


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


def test_dimensions_must_fit_the_blocks():
    with pytest.raises(ValueError, match="in_features is 48, .*32"):
        nf.QuantLinear(48, 64, method="mxfp8")
