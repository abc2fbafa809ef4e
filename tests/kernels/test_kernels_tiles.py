"""Scales in the tiles of tensor cores: written by each kernel, read by each kernel, and swizzled."""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels.decode import swizzle  # noqa: E402

from nanochat_fp4.nvfp4.format import decode, swizzle_scales  # noqa: E402
from nanochat_fp4.nvfp4.format import transpose_square as transposed  # noqa: E402
from nanochat_fp4.nvfp4.quantizers import quantize  # noqa: E402
from nanochat_fp4.nvfp4.roundings import ROUNDINGS  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


@pytest.mark.parametrize("rows, columns", [(128, 4), (1, 1), (300, 70), (129, 8)])
def test_swizzle(rows, columns):
    scales = torch.randint(0, 127, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = swizzle(scales.to(DEVICE)).cpu()
    assert torch.equal(got.view(torch.uint8), swizzle_scales(scales).view(torch.uint8))


# --------------------------------------------------------------------------------------------------------------------
# Scales written in tiles are the row-major ones, swizzled afterwards, to the bit. So are zeros around them.


def assert_in_tiles(tiles, rows) -> None:
    """Operands [codes, scales, tensor_scale, ...] of the same values, with scales in tiles and row-major."""
    assert len(tiles) == len(rows) > 1
    for got, want in zip(tiles, rows):
        if want.dtype == torch.float8_e4m3fn:
            assert want.view(torch.uint8).any()
            want = swizzle_scales(want)
        assert_same_bits("with tiles", got, want)


@pytest.mark.parametrize("rows, columns", [(144, 144), (16, 64)])
@pytest.mark.parametrize("name", ["four_over_six", "sr", "rtn_16x16"])
def test_rows_are_quantized_into_tiles(rows, columns, name):
    from nvfp4_kernels.quantize import quantize as kernel

    r, x = ROUNDINGS[name], torch.randn(rows, columns, device=DEVICE)
    how = (r.grid_max, r.scale_cap, list(r.candidates), r.stochastic, r.block_rows, True, False)
    tiles, row_major = (kernel(x, None, torch.tensor(5, device=DEVICE), 0, *how, t)[:4] for t in (True, False))
    assert_in_tiles(tiles, row_major)


def test_relu_squared_is_quantized_into_tiles():
    from nvfp4_kernels.relu_squared import quantize_relu_squared as kernel

    how = torch.randn(136, 80, device=DEVICE), torch.tensor(5, device=DEVICE), 6.0, 256.0, [1.0, 1.5], False
    assert_in_tiles(*([t for t in kernel(*how, tiles) if t.numel()] for tiles in (True, False)))


@pytest.mark.parametrize("rows, columns, name, rht_dim", [(136, 48, "ms_eden", 128), (40, 336, "sr", 16)])
def test_both_operands_of_grad_output_are_made_in_tiles(rows, columns, name, rht_dim):
    """Contracted over the columns and over the rows; 336 columns rotated by 16 are 21 blocks, five tiles and a part."""
    x = torch.randn(rows, columns, device=DEVICE)
    tiles, row_major = (rotated(x, None, None, name, rht_dim, (True, True), t) for t in (True, False))
    assert_in_tiles(tiles, row_major)


@pytest.mark.parametrize("rows, columns, name, rht_dim", [(40, 336, "ms_eden", 128), (136, 48, "sr", 16)])
def test_codes_with_scales_in_tiles_are_requantized(rows, columns, name, rht_dim):
    """Reading tiles changes nothing; what is made of codes is written in tiles as well."""
    t = quantize(torch.randn(rows, columns), "four_over_six")
    t.scales.view(torch.uint8)[3, 2] = 0
    codes, tensor_scale, scales = t.codes.to(DEVICE), t.tensor_scale.to(DEVICE), t.scales.to(DEVICE)
    want = rotated(codes, scales, tensor_scale, name, rht_dim, (False, True), False)
    for into_tiles in (True, False):
        got = rotated(codes, swizzle_scales(scales), tensor_scale, name, rht_dim, (False, True), into_tiles)
        if into_tiles:
            assert_in_tiles(got, want)
        else:
            for g, w in zip(got, want):
                assert_same_bits("from tiles", g, w)


def rotated(x, scales, tensor_scale, name, rht_dim, sides, tiles):
    from nvfp4_kernels.rotate import RotatedOperand, rotate_quantize

    r, seed = ROUNDINGS[name], torch.tensor(7, device=DEVICE)
    how = (r.grid_max, r.scale_cap, r.candidates, r.stochastic, r.ms_eden, rht_dim)
    row, col = (
        RotatedOperand(*how, 2 + i, 3, emulated=False, tiles=tiles) if side else None for i, side in enumerate(sides)
    )
    return rotate_quantize(x, scales, tensor_scale, row, seed, seed, col, seed, seed)


@pytest.mark.parametrize("rows, columns", [(128, 64), (48, 336)])
def test_decoding_and_transposing_read_tiles(rows, columns):
    from nvfp4_kernels.decode import decode as kernel
    from nvfp4_kernels.decode import transpose_square

    t = quantize(torch.randn(rows, columns), "rtn_16x16")
    codes, scales = t.codes.to(DEVICE), t.scales.to(DEVICE)
    want = decode(t.codes, t.scales)
    assert torch.equal(kernel(codes, swizzle_scales(scales)).cpu().float(), want)
    assert torch.equal(decode(t.codes, swizzle_scales(t.scales)), want)
    row_major = transposed(t.codes, t.scales)
    assert_in_tiles([v.cpu() for v in transpose_square(codes, swizzle_scales(scales))], row_major)
    assert_in_tiles(transposed(t.codes, swizzle_scales(t.scales)), row_major)
