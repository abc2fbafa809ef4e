"""Operations on codes and scales that round nothing.

`decode` makes BF16 numbers. It reads 0.5625 bytes per element and writes 2. `transpose_square` makes the codes of the
transposed tensor, for blocks of 16x16. It reads 0.5625 bytes per element and writes 0.5625. `swizzle` brings scales
into the layout that tensor cores read.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, empty_scales, operator

BC = tl.constexpr(128)  # The number of columns in a program of transpose_square_kernel.


@triton.jit
def decode_kernel(codes_ptr, scales_ptr, values_ptr, blocks, NB: tl.constexpr, COLUMNS: tl.constexpr):
    """Decodes NB blocks of 16 numbers. COLUMNS is the number of blocks in a row if the scales are in tiles of 128x4,
    and 0 if they are row-major."""
    block = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    mask = block < blocks
    place = block
    if COLUMNS:
        place = m.scale_address(block // COLUMNS, block % COLUMNS, COLUMNS, True)
    scale = m.decode_e4m3(tl.load(scales_ptr + place, mask=mask, other=0))
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    code = tl.load(codes_ptr + byte, mask=mask[:, None], other=0).to(tl.int32)
    value = m.decode_e2m1(tl.reshape(tl.join(code & 0xF, code >> 4), (NB, 16))) * scale[:, None]
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(values_ptr + element, value.to(tl.bfloat16), mask=mask[:, None])


@operator("decode(Tensor codes, Tensor scales) -> Tensor")
def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns code * scale, BF16 (R, K). The tensor_scale is not multiplied in.

    codes:  uint8 (R, K/2)
    scales: float8_e4m3fn (R, K/16), or flat in tiles of 128x4
    Raises ValueError for codes or scales that are not contiguous.
    """
    for name, tensor in (("codes", codes), ("scales", scales)):
        if not tensor.is_contiguous():
            raise ValueError(
                f"decode: the {name} have strides {tensor.stride()}, expected contiguous rows; call .contiguous()"
            )
    values = torch.empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16, device=codes.device)
    nb = 256
    groups = codes.shape[1] // 8
    blocks, columns = codes.shape[0] * groups, groups if scales.dim() == 1 else 0
    decode_kernel[(triton.cdiv(blocks, nb),)](codes, scales.view(torch.uint8), values, blocks, nb, columns, **NO_FUSION)
    return values


@decode.register_fake
def _(codes, scales):
    return codes.new_empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16)


@triton.jit
def transpose_square_kernel(
    codes_ptr, scales_ptr, to_codes_ptr, to_scales_ptr, rows, columns, BR: tl.constexpr, TILES: tl.constexpr
):
    """Transposes BR x BC values. With TILES the scales are in tiles of 128x4, before and after."""
    r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    byte = tl.program_id(1) * (BC // 2) + tl.arange(0, BC // 2)
    mask = (r < rows)[:, None] & (byte < columns // 2)[None, :]
    code = tl.load(codes_ptr + r[:, None] * (columns // 2) + byte[None, :], mask=mask, other=0).to(tl.int32)
    code = tl.trans(tl.reshape(tl.join(code & 0xF, code >> 4), (BR, BC)))
    even, odd = tl.split(tl.reshape(code, (BC, BR // 2, 2)))
    c = tl.program_id(1).to(tl.int64) * BC + tl.arange(0, BC)
    to_byte = tl.program_id(0) * (BR // 2) + tl.arange(0, BR // 2)
    mask = (c < columns)[:, None] & (to_byte < rows // 2)[None, :]
    tl.store(to_codes_ptr + c[:, None] * (rows // 2) + to_byte[None, :], (even | (odd << 4)).to(tl.uint8), mask=mask)
    block = tl.program_id(0).to(tl.int64) * (BR // 16) + tl.arange(0, BR // 16)
    mask = (c < columns)[:, None] & (block < rows // 16)[None, :]
    at = m.scale_address(block[None, :] * 16, (c // 16)[:, None], columns // 16, TILES)
    scale = tl.load(scales_ptr + at, mask=mask, other=0)
    tl.store(to_scales_ptr + m.scale_address(c[:, None], block[None, :], rows // 16, TILES), scale, mask=mask)


@operator("transpose_square(Tensor codes, Tensor scales) -> (Tensor, Tensor)")
def transpose_square(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the codes and scales of the transposed tensor, as format.transpose_square makes them.

    codes:  uint8 (R, K/2), which become (K, R/2). R and K are multiples of 16.
    scales: float8_e4m3fn (R, K/16), equal in all rows of a block of 16x16 values, which become (K, R/16). Scales in
            tiles of 128x4, flat, become such.
    """
    rows, columns = codes.shape[0], codes.shape[1] * 2
    to_codes, to_scales = _transposed(codes, scales)
    br, tiles = 64, scales.dim() == 1
    grid = (triton.cdiv(rows, br), triton.cdiv(columns, BC.value))
    source, target = scales.contiguous().view(torch.uint8), to_scales.view(torch.uint8)
    transpose_square_kernel[grid](codes.contiguous(), source, to_codes, target, rows, columns, br, tiles, **NO_FUSION)
    return to_codes, to_scales


@transpose_square.register_fake
def _(codes, scales):
    return _transposed(codes, scales)


def _transposed(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = codes.shape[0], codes.shape[1] * 2
    to_scales = empty_scales(columns, rows // 16, scales.dim() == 1, codes)
    return codes.new_empty(columns, rows // 2), to_scales.view(scales.dtype)


@triton.jit
def swizzle_kernel(scales_ptr, swizzled_ptr, rows, columns, column_tiles, TILES: tl.constexpr):
    """Brings the scales of 128 rows and of TILES tiles side by side into tiles of 128x4."""
    lane = tl.arange(0, 128)
    r = tl.program_id(0).to(tl.int64) * 128 + lane
    c = tl.program_id(1) * (4 * TILES) + tl.arange(0, 4 * TILES)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    scale = tl.load(scales_ptr + r[:, None] * columns + c[None, :], mask=mask, other=0)
    tile = tl.program_id(0).to(tl.int64) * column_tiles + c // 4
    within = (lane % 32 * 16 + lane // 32 * 4)[:, None] + (c % 4)[None, :]
    tl.store(swizzled_ptr + tile[None, :] * 512 + within, scale, mask=(c // 4 < column_tiles)[None, :])


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Brings row-major scales, float8_e4m3fn (R, G), into the layout of format.swizzle_scales, flat."""
    rows, columns = scales.shape
    row_tiles, column_tiles, tiles = triton.cdiv(rows, 128), triton.cdiv(columns, 4), 16
    swizzled = torch.empty(row_tiles * column_tiles * 512, dtype=torch.uint8, device=scales.device)
    grid = (row_tiles, triton.cdiv(column_tiles, tiles))
    source = scales.contiguous().view(torch.uint8)
    swizzle_kernel[grid](source, swizzled, rows, columns, column_tiles, TILES=tiles, **NO_FUSION)
    return swizzled.view(scales.dtype)


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales in tiles, flat. Flat scales are in tiles already, and row-major ones (R, G) are brought there."""
    return swizzle(scales) if scales.dim() == 2 else scales
