"""The formats of other systems that lab registers, against their definitions."""

import math

import _scalar_reference as scalar
import numpy as np
import pytest
import torch
from _assertions import assert_unbiased, concentrate

import lab.recipes  # noqa: F401  It registers the formats.
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

MX = [name for name in ROUNDINGS if name.startswith("mx")]


def mx_by_definition(x: np.ndarray, name: str) -> np.ndarray:
    """To nearest, one block of 32 at a time, from the formats' definitions: numpy, FP64, lists of grid values."""
    grid = np.array([float(v) for v in (scalar.E4M3 if name == "mxfp8" else scalar.E2M1)])
    out = np.empty_like(x, dtype=np.float64)
    size = 32 if name == "mxfp4_32x32" else 1
    for r in range(0, x.shape[0], size):
        for c in range(0, x.shape[1], 32):
            block = x[r : r + size, c : c + 32].astype(np.float64)
            largest = np.abs(block).max()
            if name == "mxfp4_ocp":  # the exponent of the largest value, less that of the format's largest, 4
                exponent = math.floor(math.log2(largest)) - 2
            else:  # the smallest scale with which nothing is clipped
                exponent = math.ceil(math.log2(largest / grid[-1]))
            y = np.abs(block) / 2.0**exponent
            nearest = np.abs(y[..., None] - grid).argmin(-1)  # random numbers meet no ties
            out[r : r + size, c : c + 32] = np.sign(block) * grid[nearest] * 2.0**exponent
    return out


@pytest.mark.parametrize("name", [n for n in MX if not ROUNDINGS[n].stochastic])
def test_mx_by_definition(name):
    x = torch.randn(64, 128) * torch.logspace(-3, 3, 64).unsqueeze(1)
    x[:, 1::2] *= 2.0**-12  # down to where E4M3's spacing stops shrinking
    t = quantize(x, name)
    assert t.scales.dtype == torch.float8_e8m0fnu and t.tensor_scale == 1
    assert torch.equal(t.dequantize().double(), torch.from_numpy(mx_by_definition(x.numpy(), name)))
    assert torch.equal(type(t)(t.codes, t.scales, t.tensor_scale).dequantize(), t.dequantize())  # from the codes alone
    assert torch.equal(t.dequantize(torch.bfloat16).float(), t.dequantize()) and t.shape == x.shape


@pytest.mark.parametrize("name", ["mxfp4_sr", "mxfp4_sr_prescaled"])
def test_mx_stochastic_rounding_is_unbiased_and_never_clips(name):
    x = torch.randn(16, 64) * torch.logspace(-2, 2, 16).unsqueeze(1)
    x[:, 0], x[:, 32] = 7.999, -8.001  # the worst places for a scale that is a power of two
    scale = x.abs().amax(-1, keepdim=True).double()
    draws = [(quantize(x, name, seed=s).dequantize().double() / scale,) for s in range(256)]
    assert_unbiased(name, concentrate(lambda b: draws[b - 1], (x.double() / scale,), 256)[0])


def test_mx_prescaled_by_definition():
    """Tseng et al.: 3/4 of the values on the grid of OCP's own scale, so that 8 becomes 6, and 4/3 of the result."""
    x = torch.randn(16, 64) * torch.logspace(-2, 2, 16).unsqueeze(1)
    t = quantize(x, "mxfp4_sr_prescaled", seed=1)
    exponent = torch.floor(torch.log2(x.unflatten(-1, (-1, 32)).abs().amax(-1))) - 2
    assert torch.equal(t.scales.float(), torch.exp2(exponent)) and t.tensor_scale == torch.tensor(4 / 3)
    wanted = (x * 0.75).unflatten(-1, (-1, 32)) / t.scales.float().unsqueeze(-1)
    rounded = t.decode().unflatten(-1, (-1, 32)) / t.scales.float().unsqueeze(-1)
    assert wanted.abs().max() < 6 and (wanted - rounded).abs().max() <= 2  # a neighbour on the grid


@pytest.mark.parametrize("name, rows", [("e4m3_1x128", 1), ("e4m3_128x128", 128)])
def test_fp8_in_blocks_by_definition(name, rows):
    x = torch.randn(160, 256) * torch.logspace(-3, 3, 160).unsqueeze(1)
    grid = np.array([float(v) for v in scalar.E4M3])
    want = np.empty(x.shape)
    for r in range(0, 160, rows):
        for c in (0, 128):
            block = x[r : r + rows, c : c + 128].double().numpy()
            scale = np.abs(block).max() / grid[-1]
            nearest = np.abs(np.abs(block)[..., None] / scale - grid).argmin(-1)
            want[r : r + rows, c : c + 128] = np.sign(block) * grid[nearest] * scale
    got = quantize(x, name).dequantize().double().numpy()
    close = np.abs(got - want) <= 1e-6 * np.abs(want)
    assert close.mean() > 0.9995  # a value between two numbers may fall either way with an FP32 scale
    assert np.abs(got - want).max() <= np.abs(want).max() / 8


@pytest.mark.parametrize("name", MX)
def test_mx_zeros_and_bad_values(name):
    assert (quantize(torch.zeros(3, 64), name).dequantize() == 0).all()
    x = torch.randn(32, 64)
    x[3, 7] = math.nan
    assert not torch.isfinite(quantize_reference(x, Quantization(ROUNDINGS[name])).decode()).all()
