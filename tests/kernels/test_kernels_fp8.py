"""A tensor in 8 bits and in codes by one kernel, and a gradient in E5M2 with its transpose, against the references; on
a CPU in the interpreter of Triton."""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels.quantize import quantize, quantize_both

from nanochat_fp4.nvfp4.gemm import quantize_grad_output
from nanochat_fp4.nvfp4.quantizers import FP8_AMAX_MIN, Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(x, name, tiles=False):
    r = ROUNDINGS[name]
    amax, constants = x.abs().amax().to(DEVICE), (r.grid_max, r.scale_cap, list(r.candidates), False, 1, False, False)
    codes, scales, tensor_scale, decoded, *eight = quantize(x.to(DEVICE), amax, None, 0, *constants, tiles, 448.0)
    assert not decoded.numel()
    return [t.cpu() for t in (*eight, codes, scales, tensor_scale)]


def numbers(case: str, dtype) -> torch.Tensor:
    torch.manual_seed(len(case))
    x = torch.randn(9, 272) * torch.exp(3 * torch.randn(9, 1))
    if case == "ties":  # all E4M3 numbers, what lies in the middle between two, and the largest one
        grid = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        x = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
        x = torch.nn.functional.pad(torch.cat([x, -x]), (0, 6), value=448.0).view(-1, 16)
    elif case == "small":
        x = x / x.abs().amax() * FP8_AMAX_MIN * 0.9
    elif case == "zeros":
        x = torch.zeros(2, 32)
    elif case == "large":
        x = x * 1e30
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["normal", "ties", "small", "zeros", "large"])
def test_both_are_the_references_bit_for_bit(case, dtype):
    for name in ("four_over_six", "rtn"):
        x = numbers(case, dtype)
        eight, four = (
            quantize_reference(x, Quantization(ROUNDINGS["e4m3"])),
            quantize_reference(x, Quantization(ROUNDINGS[name])),
        )
        want = eight.codes, eight.tensor_scale, four.codes, four.scales, four.tensor_scale
        parts = ("numbers", "number_scale", "codes", "scales", "tensor_scale")
        for part, got, expected in zip(parts, made(x, name), want, strict=True):
            assert_same_bits(f"{case} {name} {part}", got, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_both(bad):
    x = torch.randn(4, 32)
    x[1, 5] = bad
    eight, _, _, scales, tensor_scale = made(x, "four_over_six")
    assert eight.float()[1, 5].isnan()
    assert scales.float()[1].isnan().any() or not tensor_scale.isfinite()


def gradients(case: str, dtype) -> torch.Tensor:
    if case != "ties":
        x = torch.nn.functional.pad(numbers(case, dtype), (0, 0, 0, 3))[: 4 if case == "zeros" else 12]
        return torch.where(x.abs() < 2.0**-126, 0.0, x)  # The interpreter reads BF16's subnormal numbers wrongly.
    # All E5M2 numbers, what lies in the middle between two, and the next FP32 numbers on both sides
    grid = torch.arange(0x7C, dtype=torch.uint8).view(torch.float8_e5m2).float()
    x = torch.cat([grid, (grid[1:] + grid[:-1]) / 2])
    x = torch.cat([x, *(torch.nextafter(x, torch.tensor(to)) for to in (0.0, 57344.0))])
    x = torch.cat([x, -x])
    return torch.nn.functional.pad(x, (0, -x.numel() % 64)).view(-1, 16).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["normal", "ties", "small", "zeros", "large", "tiles"])
def test_a_gradient_and_its_transpose_are_the_references_bit_for_bit(case, dtype):
    x = torch.randn(260, 144).to(dtype) if case == "tiles" else gradients(case, dtype)
    want = quantize_reference(x, Quantization(ROUNDINGS["e5m2"]))
    for amax in (None, x.abs().amax().to(DEVICE)):
        codes, transposed, tensor_scale = (t.cpu() for t in quantize_both(x.to(DEVICE), amax))
        assert_same_bits(f"{case} codes", codes, want.codes)
        assert_same_bits(f"{case} transposed", transposed, want.codes.T.contiguous())
        assert_same_bits(f"{case} tensor_scale", tensor_scale, want.tensor_scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_stays_so_in_both(bad):
    x = torch.randn(8, 32)
    x[1, 5] = bad
    codes, transposed, _ = quantize_both(x.to(DEVICE), None)
    assert codes.float()[1, 5].isnan() and transposed.float()[5, 1].isnan()


@pytest.mark.parametrize("rows, launched", [(12, True), (14, False)])
def test_layers_take_the_kernel_where_four_rows_are_a_word(rows, launched, monkeypatch):
    calls = []
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    monkeypatch.setattr("nvfp4_kernels.quantize.quantize_both", lambda *a: calls.append(a) or quantize_both(*a))
    x, how = torch.randn(rows, 32, device=DEVICE), Quantization(ROUNDINGS["e5m2"])
    want = quantize_reference(x.cpu(), how)
    row, col = quantize_grad_output(x, how, how)
    assert len(calls) == launched and (row.length, col.length) == (32, rows)
    assert_same_bits("row", row.codes.cpu(), want.codes)
    assert_same_bits("col", col.codes.cpu(), want.codes.T.contiguous())
