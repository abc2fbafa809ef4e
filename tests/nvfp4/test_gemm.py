"""The emulated GEMM: the product of the decoded operands in FP32, tensor scales on the accumulator, one rounding."""

from dataclasses import replace

import pytest
import torch
from _assertions import assert_within_ulps, relative_square_error

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.epilogue import relu_squared_linear
from nanochat_fp4.nvfp4.gemm import Quantized, gemm, joined, quantize_operand
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS


def exact(a, b) -> torch.Tensor:
    """In FP64 from the codes, the scales and the tensor scales."""

    def value(t):
        if isinstance(t, torch.Tensor):
            return t.double()
        return t.decode(torch.float64) * t.tensor_scale.double()

    k = min(value(a).shape[-1], value(b).shape[-1])
    return value(a)[:, :k] @ value(b)[:, :k].T


def run(a, b, dtype=torch.float32, compute=torch.float32):
    return gemm(operand(a), operand(b), compute_dtype=compute, out_dtype=dtype)


def operand(t):
    if isinstance(t, torch.Tensor):
        return Quantized(decoded=t, length=t.shape[1], plain=True)
    return t if isinstance(t, Quantized) else Quantized(**vars(t), length=t.shape[1])


@pytest.mark.parametrize("m, n, k", [(1, 16, 16), (7, 48, 128), (129, 33, 272)])
def test_two_quantized_operands(m, n, k):
    a, b = quantize(torch.randn(m, k), "four_over_six"), quantize(torch.randn(n, k), "rtn")
    got = run(a, b)
    assert got.shape == (m, n) and got.dtype == torch.float32
    # FP32 accumulation of exact products: relative error of the order of 1e-7, squared 1e-14.
    assert relative_square_error(got, exact(a, b)) < 1e-13


def test_bf16_output_is_rounded_once():
    """The FP32 result, rounded: at most one BF16 ulp from the exact product rounded once, where FP32's own error tips
    the last bit; and no more than that for one element in a thousand."""
    a, b = quantize(torch.randn(64, 256), "four_over_six"), quantize(torch.randn(96, 256), "four_over_six")
    got, want = run(a, b, torch.bfloat16, torch.bfloat16), exact(a, b).to(torch.bfloat16)
    assert got.dtype == torch.bfloat16
    big = want.abs() > want.abs().mean() / 100  # near zero, cancellation makes FP32's error many BF16 ulps
    assert_within_ulps("output", got[big], want[big], 1)
    assert (got != want).double().mean() < 1e-3


def test_scales_far_from_one_meet_in_the_accumulator():
    """Decoded values times 1e30 and 1e-30: the product of the tensor scales is applied, never one of them alone."""
    x, w = torch.randn(8, 64), torch.randn(8, 64)
    a, b = quantize(x * 1e30, "rtn"), quantize(w * 1e-30, "rtn")
    assert relative_square_error(run(a, b), exact(a, b)) < 1e-13
    assert relative_square_error(run(a, b), x @ w.T) < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_operands_are_rounded_to_the_compute_dtype(dtype):
    a, b, w = torch.randn(5, 64), torch.randn(7, 64), quantize(torch.randn(7, 64), "rtn")
    assert torch.equal(run(a, b, dtype, dtype), a.to(dtype) @ b.to(dtype).T)
    assert relative_square_error(run(a, w, compute=dtype), exact(a.to(dtype), w)) < 1e-13
    assert relative_square_error(run(w, a, compute=dtype), exact(w, a.to(dtype))) < 1e-13


def test_padding_of_one_operand_along_k_is_ignored():
    x, w = torch.randn(3, 32), torch.randn(4, 32)
    padded = quantize(torch.nn.functional.pad(x, (0, 96)), "rtn")
    padded = replace(operand(padded), length=32)
    assert relative_square_error(run(padded, w), quantize(x, "rtn").dequantize() @ w.T) < 1e-12
    assert relative_square_error(run(w, padded), w @ quantize(x, "rtn").dequantize().T) < 1e-12


@pytest.mark.parametrize("kind", ["plain", "codes", "fp8", "made"])
def test_operands_of_different_lengths_are_refused(kind):
    """A product of the columns that both have would be garbage that looks like a result."""
    x, w = torch.randn(3, 32), torch.randn(4, 48)
    make = {
        "plain": operand,
        "codes": lambda t: operand(quantize(t, "rtn")),
        "fp8": lambda t: quantize_operand(t, Quantization(ROUNDINGS["e4m3"])),
        "made": lambda t: quantize_operand(
            t.T, Quantization(ROUNDINGS["sr"], torch.tensor(1), rht_dim=128), transpose=True
        ),
    }[kind]
    into = torch.zeros(3, 4)
    for a, b in ((make(x), make(w)), (make(x), operand(w)), (operand(x), make(w))):
        with pytest.raises(ValueError, match="32 .* 48"):
            run(a, b)
        with pytest.raises(ValueError, match="32 .* 48"):
            gemm(a, b, compute_dtype=torch.float32, into=into)
    assert not into.any()


def test_per_token_scales():
    x = torch.randn(6, 64) * torch.logspace(-3, 3, 6).unsqueeze(1)
    a = quantize_reference(x, Quantization(ROUNDINGS["rtn"], per_token=True))
    w = quantize(torch.randn(9, 64), "rtn")
    assert a.tensor_scale.shape == (6, 1)
    got = run(a, w)
    for i in range(6):
        assert relative_square_error(got[i], exact(a, w)[i]) < 1e-13


def test_parts_of_a_weight_are_joined_with_all_of_their_rows():
    """Each part may hold its decoded values, which are not those of the whole."""
    x = torch.randn(32, 64)
    parts = [
        operand(quantize_reference(rows, Quantization(ROUNDINGS["rtn"], amax=x.abs().amax()))) for rows in x.split(16)
    ]
    whole = joined(parts)
    assert whole.length == 64 and torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_what_goes_to_cublas_has_rows_or_columns_of_its_own():
    """cuBLAS refuses a leading dimension below the length of a row: the gradient of a sum over tokens has 0."""
    rows_or_columns = pytest.importorskip("nvfp4_kernels.cublas").rows_or_columns
    row, x = torch.arange(8.0), torch.arange(32.0).view(4, 8)
    for operand in (row.expand(4, 8), row[:4, None].expand(4, 8), row.unfold(0, 4, 1), row[:, None].T, x[:, ::2]):
        dense = rows_or_columns(operand)
        assert dense.is_contiguous() and dense.stride(0) >= dense.shape[1] and torch.equal(dense, operand)
    for operand in (x, x.T, x[:, :4], x[:2].T):
        assert rows_or_columns(operand) is operand


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 2048, 8192])
def test_fp8_tensor_cores_add_with_the_error_that_is_stated(k):
    """FP8's own rounding has a relative square error of 7e-4."""
    if not dispatch.has_fp8_tensor_cores("cuda"):
        pytest.skip("no FP8 tensor cores here")
    x, w = (torch.randn(256, k, device="cuda").bfloat16() for _ in range(2))
    a, b = (quantize_operand(t, Quantization(ROUNDINGS["e4m3"])) for t in (x, w))
    got = dispatch.mm(a, b, torch.float32, "fp8")
    want = a.dequantize().double() @ b.dequantize().double().T
    assert relative_square_error(got.double(), want) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fp8", "clover_fp8_forward"])
def test_fp8_tensor_cores_sum_relu_squared_exactly(method):
    """Of terms that are all positive, where fast sums lose 1.6e-2 of the square."""
    if not dispatch.has_fp8_tensor_cores("cuda"):
        pytest.skip("no FP8 tensor cores here")
    layer, x = nf.QuantLinear(8192, 256, method=method, device="cuda"), torch.randn(256, 8192, device="cuda")
    with torch.no_grad():
        layer.weight.abs_()
    e4m3 = Quantization(ROUNDINGS["e4m3"])
    a, b = (quantize_operand(t, e4m3).dequantize().double() for t in (x.relu().square(), layer.weight.detach()))
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            y = relu_squared_linear(x, torch.nn.Identity(), layer)
            assert relative_square_error(y.double(), a @ b.T) <= 1e-5


def test_gradients_in_fp8_may_be_rotated():
    """Each along the dimension that its own product contracts, so one is not the other's transpose."""
    gemms = {
        name: nf.Gemm(nf.Operand("e5m2"), nf.Operand("e4m3"), rht_dim=128) for name in ("grad_input", "grad_weight")
    }
    layer = nf.QuantLinear(128, 256, method=nf.Recipe("rotated_fp8", **gemms))
    x, e = torch.randn(256, 128, requires_grad=True), torch.randn(256, 256)
    layer(x).backward(e)
    assert relative_square_error(x.grad, e @ layer.weight.detach()) < 0.01
    assert relative_square_error(layer.weight.grad, e.T @ x.detach()) < 0.01
