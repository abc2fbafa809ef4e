"""The second step of post hoc range alignment (the paper, Section 7), which reads and writes little besides scales.

`finish` aligns the pseudo-scales with the amax that the first kernel found, applies EDEN's correction S, and rounds
them stochastically to E4M3. Per 16 elements it reads 2.5 bytes and writes 1.

`repair` follows a first kernel that has already written the BF16 operand, and reads the same pseudo-scales and
corrections. It rounds only those blocks again whose scale falls into E4M3's subnormal range. The first kernel could not
know them, because it did not know the amax. Most programs find no such block. A program therefore first looks at the
smallest scale of each group.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, empty_scales
from nvfp4_kernels.quantize import hardware

# A program processes 16 rows of this many groups of a rotation. A group has 8 scales.
GROUPS = 8
REPAIR = {"GROUPS": 32, "num_warps": 4}


@triton.jit
def tensor_scale_kernel(amax_ptr, tensor_scale_ptr, DIVISOR: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Computes a tensor_scale from the bits of an amax, in a single program."""
    scale = m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, POWER_OF_TWO)
    tl.store(tensor_scale_ptr, scale)


# Triton should not compile special kernels for some numbers of groups, because addresses are multiples of eight groups.
@triton.jit(do_not_specialize=["groups"])
def finish_kernel(
    pseudo_ptr,
    correction_ptr,
    amax_ptr,
    seed_ptr,
    scales_ptr,
    tensor_scale_ptr,
    rows,
    groups,
    stream,
    DIVISOR: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILES: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Finishes the scales of 16 rows of GROUPS groups of 8 scales. With TILES they are written in tiles of 128x4."""
    tensor_scale = m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, True)
    row16 = tl.program_id(0)
    first = tl.program_id(1) * GROUPS
    if row16 + first == 0:
        tl.store(tensor_scale_ptr, tensor_scale)
    at, mask, corrected = _corrected(
        pseudo_ptr, correction_ptr, m.power_of_two_reciprocal(tensor_scale), row16, first, rows, groups, GROUPS
    )
    words = m.scale_words(tl.load(seed_ptr), row16, first * 4, groups * 4, stream, 16, 4 * GROUPS)
    if TILES:
        row = (row16 * 16 + tl.arange(0, 16)).to(tl.int64)[:, None]
        at = m.scale_address(row, first * 8 + tl.arange(0, 8 * GROUPS)[None, :], groups * 8, True)
    tl.store(scales_ptr + at, m.encode_e4m3(m.stochastic_round_e4m3(corrected, words), HARDWARE), mask=mask)


class Repaired(NamedTuple):
    """The tensors of an operand that repair_kernel repairs: decoded, BF16 (R, K), and those of `finish`."""

    decoded: torch.Tensor
    pseudo: torch.Tensor
    correction: torch.Tensor
    amax: torch.Tensor
    seed: torch.Tensor
    stream: int


@triton.jit(do_not_specialize=["row_groups", "col_groups"])
def repair_kernel(
    row_buffers,
    row_rows,
    row_groups,
    col_buffers,
    col_rows,
    col_groups,
    ROW_DIVISOR: tl.constexpr,
    COL_DIVISOR: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Repairs one or both operands of a rotation. The first programs repair parts of row, and the others parts of col.
    A DIVISOR of None stands for an operand that is not there."""
    program = tl.program_id(0)
    if ROW_DIVISOR is not None:
        of_row = tl.cdiv(row_rows, 16) * tl.cdiv(row_groups, GROUPS)
        if program < of_row:
            _repair(program, row_buffers, row_rows, row_groups, ROW_DIVISOR, GROUPS)
        program -= of_row
    if COL_DIVISOR is not None:
        if program >= 0:
            _repair(program, col_buffers, col_rows, col_groups, COL_DIVISOR, GROUPS)


@triton.jit
def _repair(program, buffers, rows, groups, DIVISOR: tl.constexpr, GROUPS: tl.constexpr):
    """Repairs 16 rows of GROUPS groups. Most programs find nothing to repair. The rare work is done group by group,
    because that needs few registers."""
    pseudo_ptr, correction_ptr, decoded_ptr = buffers.pseudo, buffers.correction, buffers.decoded
    tensor_scale = m.tensor_scale_of(m.from_bits(tl.load(buffers.amax)), DIVISOR, True)
    shift = m.power_of_two_reciprocal(tensor_scale)  # This is negative if the amax is not finite.
    row16 = program // tl.cdiv(groups, GROUPS)
    first = program % tl.cdiv(groups, GROUPS) * GROUPS
    row = (row16 * 16 + tl.arange(0, 16)).to(tl.int64)[:, None]
    looked_at = first + tl.arange(0, GROUPS)[None, :]
    here = (row < rows) & (looked_at < groups)
    of_group = row * groups + looked_at
    of_block = of_group[:, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    pseudo = tl.load(pseudo_ptr + of_block, mask=here[:, :, None], other=0.0).to(tl.float32)
    smallest = tl.min(tl.where(pseudo > 0, pseudo, float("inf")), axis=2)
    smallest = smallest * shift * tl.load(correction_ptr + of_group, mask=here, other=1.0)
    low = tl.where(shift > 0, smallest, 1.0) < m.E4M3_MIN_NORMAL
    if tl.max(tl.max(low.to(tl.int32), axis=1), axis=0) > 0:
        for group in range(first, tl.minimum(first + GROUPS, groups)):
            at, mask, corrected = _corrected(pseudo_ptr, correction_ptr, shift, row16, group, rows, groups, 1)
            subnormal = (corrected > 0) & (corrected < m.E4M3_MIN_NORMAL)
            if tl.max(tl.max(subnormal.to(tl.int32), axis=1), axis=0) > 0:
                words = m.scale_words(tl.load(buffers.seed), row16, group * 4, groups * 4, buffers.stream, 16, 4)
                # `before` is the first kernel's rounding, which ignores E4M3's range. `after` is the right one.
                before = m.stochastic_round_m3(corrected, words)
                after = m.stochastic_round_e4m3(corrected, words)
                wrong = mask & (before != after)
                element = at[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
                value = tl.load(decoded_ptr + element, mask=wrong[:, :, None], other=0.0).to(tl.float32)
                # The decoded number divided by `before` is exactly the E2M1 value times tensor_scale.
                q = tl.math.div_rn(value, tl.where(wrong, before, 1.0)[:, :, None])
                tl.store(decoded_ptr + element, (q * after[:, :, None]).to(tl.bfloat16), mask=wrong[:, :, None])


@triton.jit
def _corrected(pseudo_ptr, correction_ptr, shift, row16, group, rows, groups, GROUPS: tl.constexpr):
    """Returns the addresses, a mask, and the aligned and corrected pseudo-scales of 16 rows, each (16, 8 GROUPS)."""
    row = (row16 * 16 + tl.arange(0, 16)).to(tl.int64)[:, None]
    block = group * 8 + tl.arange(0, 8 * GROUPS)[None, :]
    mask = (row < rows) & (block < groups * 8)
    at = row * (groups * 8) + block
    pseudo = tl.load(pseudo_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return at, mask, pseudo * shift * tl.load(correction_ptr + at // 8, mask=mask, other=1.0)


def finish(pseudo: torch.Tensor, correction: torch.Tensor, amax: torch.Tensor, seed: torch.Tensor, operand):
    """Makes the E4M3 scales of an MS-EDEN operand from its pseudo-scales.

    pseudo:     the pseudo-scales, BF16 (R, K/16)
    correction: EDEN's S, float32 (R, K/128)
    amax:       int32 (), the bits of a float32
    seed:       int64 ()
    operand:    a rotate.RotatedOperand
    Returns scales float8_e4m3fn (R, K/16), or flat if operand.tiles is set, and tensor_scale float32 (), a power of
    two.
    """
    scales = empty_scales(*pseudo.shape, operand.tiles, pseudo)
    tensor_scale = torch.empty((), dtype=torch.float32, device=pseudo.device)
    if not pseudo.numel():  # No program runs, so the tensor_scale of zeros is set here.
        tensor_scale.fill_(m.TENSOR_SCALE_MIN.value)
    finish_kernel[_grid(correction, GROUPS)](
        pseudo,
        correction,
        amax,
        seed,
        scales,
        tensor_scale,
        *correction.shape,
        operand.stream,
        DIVISOR=operand.divisor,
        HARDWARE=hardware(),
        TILES=operand.tiles,
        GROUPS=GROUPS,
        **NO_FUSION,
    )
    return scales.view(torch.float8_e4m3fn), tensor_scale


def repair(row: tuple | None, col: tuple | None) -> None:
    """Rounds the blocks with subnormal scales again, in place, of one or two operands in one launch.

    Each operand is (decoded, pseudo, correction, amax, seed, operand): decoded is BF16 (R, K), and the others are the
    arguments of `finish`. None stands for an operand that is not there.
    """
    given = [side for side in (row, col) if side is not None]
    programs, arguments, divisors = 0, [], []
    for side in (row, col):
        *tensors, operand = given[0] if side is None else side
        correction = tensors[2]
        arguments += [Repaired(*tensors, operand.stream), *correction.shape]
        divisors.append(None if side is None else operand.divisor)
        programs += 0 if side is None else math.prod(_grid(correction, REPAIR["GROUPS"]))
    repair_kernel[(programs,)](*arguments, ROW_DIVISOR=divisors[0], COL_DIVISOR=divisors[1], **REPAIR, **NO_FUSION)


def _grid(correction: torch.Tensor, groups_of_a_program: int) -> tuple[int, int]:
    rows, groups = correction.shape
    return -(-rows // 16), -(-groups // groups_of_a_program)
