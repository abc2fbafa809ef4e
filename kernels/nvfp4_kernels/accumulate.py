"""Rounds numbers to BF16 stochastically, or adds them to BF16 numbers and rounds the sum.

The arithmetic is that of nanochat_fp4.models.optim8bit, bit for bit. Adding BF16 numbers reads 4 bytes per element and
writes 2.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION

GROUPS = 128  # The number of groups of 8 elements in a program.


@triton.jit(do_not_specialize=["first_row"])
def round_kernel(
    into_ptr, x_ptr, seed_ptr, stream_ptr, first_row, columns, row_groups, groups,
    ADD: tl.constexpr, FLAT: tl.constexpr, NG: tl.constexpr,
):  # fmt: skip
    """Rounds NG groups of 8 elements, one Philox call each.

    row_groups: ceil(columns / 8), the number of groups of a row
    groups:     the number of groups of all rows
    ADD:        x is added to the numbers in `into`
    FLAT:       columns is a multiple of 8, so no group is cut at a row's end
    """
    group = tl.program_id(0).to(tl.int64) * NG + tl.arange(0, NG)
    index = group + first_row.to(tl.int64) * row_groups
    lane = tl.arange(0, 8)[None, :]
    if FLAT:
        place, mask = group[:, None] * 8 + lane, (group < groups)[:, None]
    else:
        column = (group % row_groups)[:, None] * 8 + lane
        place, mask = (group // row_groups)[:, None] * columns + column, (column < columns) & (group < groups)[:, None]
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x = tl.load(into_ptr + place, mask=mask, other=0.0).to(tl.float32) + x
    a, b, c, d = m.philox4(tl.load(seed_ptr), index, m.SR_ELEMENT, tl.load(stream_ptr).to(tl.uint32))
    word = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.int32, bitcast=True)
    half = tl.reshape(tl.join(word & 0xFFFF, (word >> 16) & 0xFFFF), (NG, 8))
    # A carry out of the lower 16 bits rounds the magnitude up.
    rounded = m.from_bits((m.bits(x) + half) & -65536)
    finite = (m.bits(x) & 0x7F800000) != 0x7F800000
    tl.store(into_ptr + place, tl.where(finite, rounded, x).to(tl.bfloat16), mask=mask)


def round_into(
    into: torch.Tensor, x: torch.Tensor, seed: torch.Tensor, stream: torch.Tensor, first_row: int, add: bool
) -> None:
    """Replaces `into` by x, or by into + x if `add` is set, rounded stochastically.

    into:      BF16 (R, C), contiguous
    x:         FP32 or BF16 (R, C), contiguous
    seed:      int64 ()
    stream:    int64 (). It lies in memory, so that a CUDA graph can be replayed with another one.
    first_row: the number of into's first row in the whole parameter. The random numbers depend on it.
    Raises ValueError for tensors of another dtype, shape or layout.
    """
    if into.dtype != torch.bfloat16 or into.dim() != 2 or into.shape != x.shape:
        raise ValueError(f"round_into: got {into.dtype} {tuple(into.shape)} and {tuple(x.shape)}, expected BF16 (R, C)")
    if not (into.is_contiguous() and x.is_contiguous()):
        raise ValueError("round_into: got a tensor with gaps; expected contiguous rows; call .contiguous()")
    rows, columns = into.shape
    row_groups = triton.cdiv(columns, 8)
    groups = rows * row_groups
    if groups:
        grid = (triton.cdiv(groups, GROUPS),)
        options = dict(ADD=add, FLAT=columns % 8 == 0, NG=GROUPS, num_warps=4, **NO_FUSION)
        round_kernel[grid](into, x, seed, stream, first_row, columns, row_groups, groups, **options)
