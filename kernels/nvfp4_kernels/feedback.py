"""Rounds weights with error feedback. One launch rounds the blocks of a group of columns one after the other, in all
rows.

The arithmetic is that of nanochat_fp4.nvfp4.feedback.round_with_feedback between two of its matrix products, bit for
bit. Per element the kernel reads 2 or 4 bytes of the weight and 4 of the correction from the groups before. It writes
codes, scales, and 4 bytes of the rounding error. Each row reads its rounding errors again from the cache.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION
from nvfp4_kernels.quantize import fit_blocks, hardware, load_blocks

ROWS = 32  # The number of rows in a program: one for each thread of a warp.


@triton.jit
def feedback_kernel(
    weights_ptr,
    inverse_ptr,
    before_ptr,
    factor_ptr,
    missed_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    columns,
    start,
    width,
    factor_rows,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rounds the columns from start to start + width - 1 in ROWS rows of one layer, which is program_id(1).

    weights: (L, N, K)
    before:  (L, N, width)
    factor:  (L, factor_rows, width). Its last `width` rows belong to these columns.
    missed:  (L, K, N). A weight's columns are its rows, so that a warp reads and writes whole lines.
    TILES:   scales are written in tiles of 128x4, and each layer has tiles of its own
    """
    layer = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    line = layer * rows + row
    inverse = tl.load(inverse_ptr + layer)
    factor_ptr += (layer * factor_rows + factor_rows - width) * width
    missed_ptr += (layer * columns + start) * rows
    LIMIT: tl.constexpr = m.E2M1_MAX * m.E4M3_MAX
    zero, column = tl.arange(0, 1), tl.arange(0, 16)
    for done in range(0, width, 16):
        u = load_blocks(weights_ptr, line * columns + start + done, mask) * inverse
        wanted = u + load_blocks(before_ptr, line * width + done, mask)
        for k in tl.range(0, done, loop_unroll_factor=4):
            error = tl.load(missed_ptr + k * rows + row, mask=mask, other=0.0)
            wanted += error[:, None] * load_blocks(factor_ptr, k * width + done + zero, zero == 0)
        wanted = tl.maximum(wanted, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        wanted = tl.minimum(wanted, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        amax = tl.max(tl.abs(wanted), axis=1)
        q, _, scale, codes = fit_blocks(
            wanted, amax, 1.0, 0, 0, 0, GRID_MAX, INVERSE, CANDIDATES, False, False, HARDWARE, ROWS, 16
        )
        block = line * (columns // 16) + (start + done) // 16
        place = block
        if TILES:
            tiles = layer * ((rows + 127) // 128) * ((columns + 63) // 64)
            place = tiles * 512 + m.scale_address(row, (start + done) // 16, columns // 16, True)
        tl.store(scales_ptr + place, m.encode_e4m3(scale, HARDWARE), mask=mask)
        tl.store(codes_ptr + block[:, None] * 2 + tl.arange(0, 2)[None, :], codes, mask=mask[:, None])
        at = (done + column)[None, :] * rows + row[:, None]
        tl.store(missed_ptr + at, u - q * scale[:, None], mask=mask[:, None])
        tl.debug_barrier()  # The next block reads the error.


def round_group(
    weights: torch.Tensor,
    inverse: torch.Tensor,
    before: torch.Tensor,
    factor: torch.Tensor,
    missed: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    start: int,
    grid_max: float,
    candidates: tuple[float, ...],
) -> None:
    """Rounds the columns from start to start + C - 1 of weights, and writes these columns of missed, codes and scales.

    All tensors are contiguous.
    weights:    FP32 or BF16 (L, N, K)
    inverse:    float32 (L,), 1 / tensor_scale
    before:     float32 (L, N, C), the correction from the columns before
    factor:     float32 (L, end, C), the feedback factor that round_with_feedback passes
    missed:     float32 (L, K, N), the rounding errors
    codes:      uint8 (L, N, K/2)
    scales:     uint8 (L, N, K/16), or (L, bytes) for tiles of 128x4
    grid_max, candidates: the fields of roundings.Rounding
    """
    layers, rows, columns = weights.shape
    feedback_kernel[(triton.cdiv(rows, ROWS), layers)](
        weights,
        inverse,
        before,
        factor,
        missed,
        codes.view(torch.int32),
        scales,
        rows,
        columns,
        start,
        before.shape[2],
        factor.shape[1],
        grid_max,
        m.inverse(grid_max),
        tuple(candidates),
        hardware(),
        scales.dim() == 2,
        ROWS,
        num_warps=ROWS // 32,
        **NO_FUSION,
    )
