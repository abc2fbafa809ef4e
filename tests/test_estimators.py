"""Quartet's rotated forward and the gradient masks; and the rows of the other systems."""

import pytest
import torch
from _assertions import assert_unbiased, concentrate, relative_square_error

import nanochat_fp4 as nf
from nanochat_fp4 import doctor
from nanochat_fp4.nvfp4.estimators import FIXED_SEED, trusted
from nanochat_fp4.nvfp4.hadamard import rotate, rotation_matrix
from nanochat_fp4.nvfp4.quantizers import ROUNDINGS, quantize
from nanochat_fp4.nvfp4.recipes import METHOD_TABLE, Gemm, Operand, Recipe, both

BLOCKS_OF_32 = [m for m in METHOD_TABLE if METHOD_TABLE[m].block > 16]


def layer(method, in_features=128, out_features=128):
    torch.manual_seed(1)
    return nf.QuantLinear(in_features, out_features, method=method)


def backward(linear, x, e, seed=7):
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = linear(x)
    return y.detach(), *torch.autograd.grad(y, (x, linear.weight), e)


def unrotated(x, dim):
    return (x.unflatten(-1, (-1, dim)) @ rotation_matrix(FIXED_SEED, dim=dim).T).flatten(-2) * dim**-0.5


@pytest.mark.parametrize("method", BLOCKS_OF_32)
@pytest.mark.parametrize("tokens", [1, 7, 129])
def test_any_number_of_tokens_is_finite_and_close(method, tokens):
    linear = layer(method, 128, 96)
    x, e = torch.randn(tokens, 128), torch.randn(tokens, linear.out_features)
    y, grad_input, grad_weight = backward(linear, x, e)
    w = linear.weight.detach()
    for got, want in ((y, x @ w.T), (grad_input, e @ w), (grad_weight, e.T @ x)):
        assert got.shape == want.shape
        # Quartet's scale is a power of two below its MSE-optimal one: up to a half of it; the others are closer.
        assert relative_square_error(got, want) < (0.25 if method == "quartet" else 0.15)


@pytest.mark.parametrize("method", ["fp8", "quartet", "mxfp4_nvidia", "clover_fp8_input", "clover_fp8_weight"])
def test_beside_kernels(method, monkeypatch):
    """Where NVFP4 has kernels, MXFP4 and MXFP8 still take the reference, alone and with an NVFP4 operand beside them;
    the kernels' rotation sums in another order and tips a few codes."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there interpreted
    x, e, results = torch.randn(40, 64).to(device), torch.randn(40, 96).to(device), []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        results.append(backward(layer(method, 64, 96).to(device), x, e))
        assert method in doctor.probe(device, method)
    for got, want in zip(*results):
        assert relative_square_error(got, want) < 1e-4


def test_quartet_by_hand():
    """The forward: MXFP4 of both rotated operands. The mean of many backward passes: E times the quantized operands,
    without the elements that were clipped, rotated back."""
    x, e, linear = torch.randn(32, 128), torch.randn(32, 64), layer("quartet", 128, 64)
    x[:, 3] *= 6  # something to clip
    xr, wr = rotate(x, FIXED_SEED, dim=32), rotate(linear.weight.detach(), FIXED_SEED, dim=32)
    xq, wq = (quantize(v, "mxfp4_quest") for v in (xr, wr))
    y = backward(linear, x, e)[0]
    assert torch.allclose(y, xq.dequantize() @ wq.dequantize().T, atol=1e-5)
    kept = []
    for rotated, q in ((xr, xq), (wr, wq)):
        scale = q.scales.float().repeat_interleave(32, dim=-1)
        kept.append((rotated.abs() < 6 * scale).float())
        assert 0.01 < 1 - kept[-1].mean() < 0.3
    want = unrotated((e @ wq.dequantize()) * kept[0], 32), unrotated((e.T @ xq.dequantize()) * kept[1], 32)
    draws = concentrate(lambda b: backward(linear, x, e, b)[1:], tuple(w.double() for w in want), 128)
    for name, c in zip(("grad_input", "grad_weight"), draws):
        assert_unbiased(name, c)


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
        return raw if ROUNDINGS[o.rounding].stochastic else quantize(raw.T, o.rounding).dequantize().T

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


def test_uncertain_elements_get_no_gradient():
    """Only where the grid is coarse, above 4 scales, can rounding miss by more than half of a scale."""
    x = torch.zeros(1, 32)
    x[0, :8] = torch.tensor([6.0, 5.4, 4.6, 4.4, 3.4, 2.6, 1.3, 0.2])  # rtn: scale 1 with amax 6 and tensor_scale 1/448
    t = quantize(x, "rtn")
    scale = float(t.scales.float()[0, 0] * t.tensor_scale)
    assert scale == pytest.approx(1.0)
    assert trusted(x, "rtn", "uncertain")[0, :8].tolist() == [True, False, False, True, True, True, True, True]
    assert trusted(x, "rtn", "clipped")[0, :8].tolist() == [False] + [True] * 7  # 6 itself: not less than 6 scales


def test_the_mask_is_on_input_and_weight_and_changes_nothing_else():
    x, e = torch.randn(64, 128), torch.randn(64, 128)
    plain, masked = (backward(layer(m), x, e) for m in ("clover", "clover_masked"))
    assert torch.equal(plain[0], masked[0])
    for got, want, operand in zip(masked[1:], plain[1:], (x, layer("clover").weight.detach())):
        keep = trusted(operand, "four_over_six", "uncertain")
        assert 0.5 < keep.float().mean() < 0.99
        assert torch.equal(got, want * keep)


def test_a_forward_rotation_leaves_the_exact_product():
    """With an unquantized backward the gradients are exact but for the forward's rounding of the other operand."""
    recipe = Recipe("mine", output=both("mxfp8"), forward_rht_dim=128)
    x, e, linear = torch.randn(64, 128), torch.randn(64, 128), layer(recipe)
    w = linear.weight.detach()
    for got, want in zip(backward(linear, x, e), (x @ w.T, e @ w, e.T @ x)):
        assert relative_square_error(got, want) < 3e-3  # two operands in FP8: 1.4e-3


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"mask": "lucky", "output": both("rtn")}, "unknown mask 'lucky'; known: clipped, uncertain"),
        ({"mask": "clipped"}, "mask and forward_rht_dim need both operands of output rounded"),
        ({"forward_rht_dim": 32, "output": Gemm(Operand("rtn"), Operand())}, "need both operands of output rounded"),
        ({"forward_rht_dim": 24, "output": both("rtn")}, "rht_dim is 24, expected 0, 16, 32, 64 or 128"),
        ({"output": both("mxfp4_sr_prescaled")}, "output: a prescaled rounding is for backward operands"),
    ],
)
def test_impossible_recipes_say_why(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe("mine", **fields)


def test_dimensions_must_fit_the_blocks():
    with pytest.raises(ValueError, match="in_features is 48, expected a multiple of 32"):
        nf.QuantLinear(48, 64, method="fp8")
