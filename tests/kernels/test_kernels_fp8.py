"""A tensor in 8 bits and in codes by one kernel, against the references of both; on a CPU in Triton's interpreter."""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels.quantize import quantize

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
