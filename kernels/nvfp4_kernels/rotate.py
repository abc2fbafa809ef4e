"""Quantization along a contraction dimension that is rotated first: the operands of the backward GEMMs.

Of grad_output (BF16 or FP32), or of an operand's 4-bit codes, one launch makes, as asked, the operand contracted over
the columns ("row": E of dgrad) and the one contracted over the rows ("col": E^T of wgrad, and requantized from their
codes W^T of dgrad and X^T of wgrad), each rotated by one matrix product on the tensor cores. A program makes strips of
one of them, 64 rows by a group of 128, one after another, so that it reads H once. The programs of both operands go
through the tensor side by side: the second to come finds its tile in the L2 cache. In MS-EDEN nothing is read from
memory or rotated twice (post hoc range alignment, the paper, Section 7).

Three kinds of output:

* EDEN       codes, pseudo-scales (E8M3, stored as BF16), S per 128, the amax; `scales.finish` makes the E4M3 scales.
* EDEN, emulated: the finished operand in BF16, tensor_scale included, in the same pass. That is possible because the
             tensor_scale is a power of two: above E4M3's subnormal range rounding S * p does not depend on it. The
             blocks that end below are rounded again by `scales.repair`, which leaves at once where a tile has none.
* ALIGNED    for roundings that need tensor_scale first (SR, RTN): codes and scales, or the BF16 decode, from the amax
             that a first launch of kind AMAX has found.

The arithmetic after the rotation is nanochat_fp4.nvfp4.quantizers, bit for bit. The rotation itself sums 128 BF16
products in FP32 in the tensor cores' order, so that a value may differ in its last bits from the reference's.

An FP32 input is split into three BF16 numbers that add up to it, and rotated by three products: FP32's precision.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, operator
from nvfp4_kernels.quantize import fit_blocks, hardware
from nvfp4_kernels.scales import PLACE, finish, repair, tensor_scale_kernel

TILE = 128  # a group of the rotation
STRIP = 64  # rows of an operand that a program makes at a time: what one warp group multiplies
AMAX, ALIGNED, EDEN, EDEN_EMULATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@functools.cache
def _launch_options() -> dict:
    """sm_90: with 128 registers four programs fit a multiprocessor, of which three compute while one waits for memory.
    From sm_100 on the compiler would spill there."""
    arch = 90 if m.INTERPRETED.value else triton.runtime.driver.active.get_current_target().arch
    return {"num_warps": 4, "num_stages": 1, "maxnreg": 128 if arch < 100 else None, **NO_FUSION}


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs share the strips: four for each multiprocessor."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 6


@functools.cache
def _hadamard(dim: int, device: torch.device) -> torch.Tensor:
    """Sylvester's H of order dim, along the diagonal up to 128, BF16 (128, 128), columns in `_blocks`' order."""
    k, c = torch.arange(TILE)[:, None], torch.arange(TILE)[None, :]
    # Column c of a tensor-core accumulator holds element (c // 8 % 8) * 2 + c % 2 of block c // 2 % 4 * 2 + c // 64.
    j = (c // 2 % 4 * 2 + c // 64) * 16 + c // 8 % 8 * 2 + c % 2
    parity = sum(((k & j) >> bit) & 1 for bit in range(dim.bit_length() - 1)) % 2
    return ((1 - 2 * parity) * (k // dim == j // dim)).to(torch.bfloat16).to(device)


@triton.jit
def _rotation(hadamard_ptr, seed_ptr, stream, DIM: tl.constexpr):
    """diag(signs) H (128, 128) of hadamard.rotation_matrix: philox.random_signs flips the sign bits of H's rows."""
    k = tl.arange(0, 128)
    j = k % DIM
    a, b, c, d = m.philox4(tl.load(seed_ptr), j.to(tl.int64) * 0, m.SIGN, stream)
    word = tl.where(j < 32, a, tl.where(j < 64, b, tl.where(j < 96, c, d)))
    flips = ((word >> (j % 32).to(tl.uint32)) & 1).to(tl.int16) << 15
    h = tl.load(hadamard_ptr + k[:, None] * 128 + k[None, :])
    return (h ^ flips[:, None]).to(tl.bfloat16, bitcast=True)


@triton.jit
def _blocks(accumulator):
    """(64, 128) with permuted columns -> blocks (512, 16) in their true order.

    On tensor cores of sm_80 to sm_120 a thread holds columns 8 j + 2 q + i of its rows. `_hadamard` put whole blocks
    there, so that this is a renaming, and sums and maxima over a block stay inside a thread.
    """
    x = tl.reshape(accumulator, (64, 2, 8, 4, 2))
    return tl.reshape(tl.permute(x, (0, 3, 1, 2, 4)), (512, 16))


@triton.jit
def _dot(a, b, accumulator, TRANSPOSE: tl.constexpr):
    if TRANSPOSE:
        a = tl.trans(a)
    if m.INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator)


@triton.jit
def _rotate(hi, mid, lo, matrix, THREE_PARTS: tl.constexpr, TRANSPOSE: tl.constexpr):
    y = _dot(hi, matrix, tl.zeros((64, 128), tl.float32), TRANSPOSE)
    if THREE_PARTS:
        y = _dot(mid, matrix, y, TRANSPOSE)
        y = _dot(lo, matrix, y, TRANSPOSE)
    return _blocks(y)


@triton.jit
def _emit(
    x,
    factor,
    row0,
    group,
    rows,
    groups,
    contraction,
    place_row,
    place_block,
    place_blocks,
    seed_ptr,
    codes_ptr,
    scales_ptr,
    correction_ptr,
    decoded_ptr,
    stream,
    KIND: tl.constexpr,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
    STORE_CODES: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Quantizes x * factor (512, 16), the rows row0 .. row0 + 63 of group `group` of 128 columns, and stores what KIND
    says.

    `rows` and `groups` are the output's extent; PADDING: 0 where the groups are whole, or what `contraction` is a
    multiple of.
    place: where the output is in what it is a part of, its first row and block, and how many blocks a row of that has.
    Returns the blocks' largest magnitudes (512,).
    """
    line = tl.arange(0, 512)
    row = row0 + line // 8
    block_in_group = line % 8
    blocks_per_row = groups * 8
    if PADDING:
        blocks_per_row = tl.cdiv(contraction, PADDING) * (PADDING // 16)
    mask = (row < rows) & (group * 8 + block_in_group < blocks_per_row)
    block = row.to(tl.int64) * blocks_per_row + group * 8 + block_in_group
    absolute = m.max_with_nan(x) * factor
    q = x
    # Where no codes are wanted their conversion takes more instructions than arithmetic on sm_120, and spills.
    CONVERSIONS: tl.constexpr = HARDWARE if STORE_CODES or HARDWARE == 0 else m.CONVERTS_E4M3
    if KIND == ALIGNED:
        seed = 0
        if STOCHASTIC:
            seed = tl.load(seed_ptr)
        placed = (place_row + row).to(tl.int64) * place_blocks + place_block + group * 8 + block_in_group
        noise_index = placed[:, None] * 2 + tl.arange(0, 2)[None, :]
        q, _, scale, codes = fit_blocks(
            x, absolute, factor, seed, noise_index, stream,
            GRID_MAX, INVERSE, CANDIDATES, STOCHASTIC, False, CONVERSIONS, 512, 16,
        )  # fmt: skip
        if STORE_CODES:
            tl.store(scales_ptr + block, m.encode_e4m3(scale, HARDWARE), mask=mask)
        else:
            _store_decoded(q * scale[:, None], decoded_ptr, row0, group, rows, blocks_per_row)
    elif KIND != AMAX:
        q, y, scale, codes = fit_blocks(
            x, absolute, factor, 0, line, stream,
            GRID_MAX, INVERSE, CANDIDATES, False, True, CONVERSIONS, 512, 16,
        )  # fmt: skip

        # S = <x, x> / <x, q>, in units of the blocks' scales: quantizers._eden_correction.
        largest = tl.max(tl.reshape(scale, (64, 8)), axis=1)
        largest = tl.maximum(m.power_of_two_floor(largest), m.TENSOR_SCALE_MIN)
        unit = 0.125 * m.power_of_two_reciprocal(largest)
        weight = scale * tl.reshape(tl.broadcast_to(unit[:, None], (64, 8)), (512,))
        weight = weight * weight
        xx = m.row_sum(m.product_sum(y, y), weight)
        xq = m.row_sum(m.product_sum(y, q), weight)
        s = tl.where(xq > 0, tl.math.div_rn(xx, tl.where(xq > 0, xq, 1.0)), 1.0)
        s_row = row0 + tl.arange(0, 64)
        tl.store(correction_ptr + s_row.to(tl.int64) * groups + group, s, mask=s_row < rows)
        tl.store(scales_ptr + block, scale.to(tl.bfloat16), mask=mask)

        if KIND == EDEN_EMULATED:
            row16, pair = (place_row + row0) // 16, place_block // 2 + group * 4
            words = m.scale_words(tl.load(seed_ptr), row16, pair, place_blocks // 2, stream, 64, 4)
            corrected = scale * tl.reshape(tl.broadcast_to(s[:, None], (64, 8)), (512,))
            final = m.stochastic_round_m3(corrected, tl.reshape(words, (512,)))
            _store_decoded(q * final[:, None], decoded_ptr, row0, group, rows, blocks_per_row)
    if STORE_CODES:
        word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(codes_ptr + word, codes, mask=mask[:, None])
    return absolute


@triton.jit
def _store_decoded(value, decoded_ptr, row0, group, rows, blocks_per_row):
    """Stores value (512, 16), blocks of rows row0 .. row0 + 63, in BF16: two rows after another by each warp, which
    holds 16 of them, so that no warp waits for another."""
    value = tl.permute(tl.reshape(value, (4, 8, 16, 16)), (1, 0, 2, 3))
    k = tl.arange(0, 32)[:, None]
    line = tl.arange(0, 16)[None, :]
    row = row0 + k % 4 * 16 + k // 4 * 2 + line // 8
    block = group * 8 + line % 8
    mask = (row < rows) & (block < blocks_per_row)
    element = (row.to(tl.int64) * blocks_per_row + block)[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(decoded_ptr + element, tl.reshape(value, (32, 16, 16)).to(tl.bfloat16), mask=mask[:, :, None])


@triton.jit
def _make(
    first,
    step,
    x_ptr,
    x_scales_ptr,
    x_tensor_scale_ptr,
    rows,
    columns,
    hadamard_ptr,
    rht_seed_ptr,
    amax_ptr,
    seed_ptr,
    codes_ptr,
    scales_ptr,
    correction_ptr,
    decoded_ptr,
    stream,
    rht_stream,
    place_row,
    place_block,
    place_blocks,
    COL: tl.constexpr,
    FROM_CODES: tl.constexpr,
    FP32: tl.constexpr,
    KIND: tl.constexpr,
    RHT_DIM: tl.constexpr,
    NORM: tl.constexpr,
    DIVISOR: tl.constexpr,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
    STORE_CODES: tl.constexpr,
    PADDING: tl.constexpr,
):
    """Strips first, first + step, ... of the operand contracted over the columns, or (COL) over the rows.

    Strips are numbered so that both operands go through x in one order: the two halves of a 128 x 128 tile, the tiles
    of 128 rows from left to right, then the next rows.
    """
    column_tiles = tl.cdiv(columns, 128)
    row_tiles = tl.cdiv(rows, 128)
    factor = NORM
    if FROM_CODES:
        factor = tl.load(x_tensor_scale_ptr) * NORM
    if KIND == ALIGNED:
        factor = tl.math.div_rn(1.0, m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, False)) * factor
    if RHT_DIM:
        matrix = _rotation(hadamard_ptr, rht_seed_ptr, rht_stream, RHT_DIM)
    largest = tl.zeros((512,), tl.float32)
    for strip in range(first, 2 * row_tiles * column_tiles, step):
        tile_row = strip // 2 // column_tiles
        tile_column = strip // 2 % column_tiles
        if COL:
            r = tile_row * 128 + tl.arange(0, 128)
            c = tile_column * 128 + strip % 2 * 64 + tl.arange(0, 64)
        else:
            r = tile_row * 128 + strip % 2 * 64 + tl.arange(0, 64)
            c = tile_column * 128 + tl.arange(0, 128)
        if FROM_CODES:  # contracted over the rows
            half = tile_column * 64 + strip % 2 * 32 + tl.arange(0, 32)
            byte_mask = (r < rows)[:, None] & (half < columns // 2)[None, :]
            byte = tl.load(x_ptr + r.to(tl.int64)[:, None] * (columns // 2) + half[None, :], mask=byte_mask, other=0)
            byte = byte.to(tl.int32)
            value = m.decode_e2m1(tl.reshape(tl.join(byte & 0xF, byte >> 4), (128, 4, 16)))
            g = tile_column * 8 + strip % 2 * 4 + tl.arange(0, 4)
            at = r.to(tl.int64)[:, None] * (columns // 16) + g[None, :]
            scale = tl.load(x_scales_ptr + at, mask=(r < rows)[:, None] & (g < columns // 16)[None, :], other=0)
            hi = tl.reshape((value * m.decode_e4m3(scale)[:, :, None]).to(tl.bfloat16), (128, 64))
            y = _rotate(hi, hi, hi, matrix, False, True)
        else:
            mask = (r < rows)[:, None] & (c < columns)[None, :]
            x = tl.load(x_ptr + r.to(tl.int64)[:, None] * columns + c[None, :], mask=mask, other=0.0)
            if RHT_DIM:
                hi = x.to(tl.bfloat16)
                mid = hi
                lo = hi
                if FP32:
                    rest = x - hi.to(tl.float32)
                    mid = rest.to(tl.bfloat16)
                    lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
                y = _rotate(hi, mid, lo, matrix, FP32, COL)
            else:
                y = tl.reshape(x.to(tl.float32), (512, 16))
        absolute = _emit(
            y,
            factor,
            (tile_column if COL else tile_row) * 128 + strip % 2 * 64,
            tile_row if COL else tile_column,
            columns if COL else rows,
            row_tiles if COL else column_tiles,
            rows if COL else columns,
            place_row,
            place_block,
            place_blocks,
            seed_ptr,
            codes_ptr,
            scales_ptr,
            correction_ptr,
            decoded_ptr,
            stream,
            KIND,
            GRID_MAX,
            INVERSE,
            CANDIDATES,
            STOCHASTIC,
            HARDWARE,
            STORE_CODES,
            PADDING,
        )
        if KIND != ALIGNED:
            largest = tl.maximum(largest, absolute, propagate_nan=tl.PropagateNan.ALL)
    if KIND != ALIGNED:
        tl.atomic_max(amax_ptr, tl.max(m.bits(largest), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=[f"{side}_{place}" for side in ("row", "col") for place in PLACE])
def rotate_quantize_kernel(
    x_ptr,
    x_scales_ptr,
    x_tensor_scale_ptr,
    rows,
    columns,
    row_hadamard_ptr,
    row_rht_seed_ptr,
    row_amax_ptr,
    row_seed_ptr,
    row_codes_ptr,
    row_scales_ptr,
    row_correction_ptr,
    row_decoded_ptr,
    row_stream,
    row_rht_stream,
    row_place_row,
    row_place_block,
    row_place_blocks,
    col_hadamard_ptr,
    col_rht_seed_ptr,
    col_amax_ptr,
    col_seed_ptr,
    col_codes_ptr,
    col_scales_ptr,
    col_correction_ptr,
    col_decoded_ptr,
    col_stream,
    col_rht_stream,
    col_place_row,
    col_place_block,
    col_place_blocks,
    FROM_CODES: tl.constexpr,
    FP32: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROW: tl.constexpr,
    ROW_KIND: tl.constexpr,
    ROW_RHT_DIM: tl.constexpr,
    ROW_NORM: tl.constexpr,
    ROW_DIVISOR: tl.constexpr,
    ROW_GRID_MAX: tl.constexpr,
    ROW_INVERSE: tl.constexpr,
    ROW_CANDIDATES: tl.constexpr,
    ROW_STOCHASTIC: tl.constexpr,
    ROW_STORE_CODES: tl.constexpr,
    ROW_PADDING: tl.constexpr,
    COL: tl.constexpr,
    COL_KIND: tl.constexpr,
    COL_RHT_DIM: tl.constexpr,
    COL_NORM: tl.constexpr,
    COL_DIVISOR: tl.constexpr,
    COL_GRID_MAX: tl.constexpr,
    COL_INVERSE: tl.constexpr,
    COL_CANDIDATES: tl.constexpr,
    COL_STOCHASTIC: tl.constexpr,
    COL_STORE_CODES: tl.constexpr,
    COL_PADDING: tl.constexpr,
):
    """Where both operands are wanted, two programs make row's strips, the next two col's, and so on: in turns of one an
    H200 takes 9% longer, its warps waiting for instructions (dev/LOG.md). The number of programs is a multiple of 4.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ROW and COL:
        side = program // 2 % 2
        first = program // 4 * 2 + program % 2
        step = programs // 2
    else:
        side = 0 if ROW else 1
        first = program
        step = programs
    if ROW:
        if side == 0:
            _make(
                first, step, x_ptr, x_scales_ptr, x_tensor_scale_ptr, rows, columns,
                row_hadamard_ptr, row_rht_seed_ptr, row_amax_ptr, row_seed_ptr, row_codes_ptr,
                row_scales_ptr, row_correction_ptr, row_decoded_ptr, row_stream, row_rht_stream,
                row_place_row, row_place_block, row_place_blocks,
                False, FROM_CODES, FP32, ROW_KIND, ROW_RHT_DIM, ROW_NORM, ROW_DIVISOR, ROW_GRID_MAX, ROW_INVERSE,
                ROW_CANDIDATES, ROW_STOCHASTIC, HARDWARE, ROW_STORE_CODES, ROW_PADDING,
            )  # fmt: skip
    if COL:
        if side == 1:
            _make(
                first, step, x_ptr, x_scales_ptr, x_tensor_scale_ptr, rows, columns,
                col_hadamard_ptr, col_rht_seed_ptr, col_amax_ptr, col_seed_ptr, col_codes_ptr,
                col_scales_ptr, col_correction_ptr, col_decoded_ptr, col_stream, col_rht_stream,
                col_place_row, col_place_block, col_place_blocks,
                True, FROM_CODES, FP32, COL_KIND, COL_RHT_DIM, COL_NORM, COL_DIVISOR, COL_GRID_MAX, COL_INVERSE,
                COL_CANDIDATES, COL_STOCHASTIC, HARDWARE, COL_STORE_CODES, COL_PADDING,
            )  # fmt: skip


class Operand(NamedTuple):
    """One operand to make: the fields of quantizers.Rounding, its rotation and its streams of random numbers.

    emulated: make the BF16 operand for a decoding GEMM instead of codes and scales.
    group, row, column, columns: where the operand is a part of one: of nanochat_fp4.nvfp4.part.Part
    """

    grid_max: float = 6.0
    scale_cap: float = 448.0
    candidates: tuple[float, ...] = (1.0,)
    stochastic: bool = False
    ms_eden: bool = False
    rht_dim: int = 128
    stream: int = 0
    rht_stream: int = 0
    emulated: bool = True
    group: str = ""
    row: int = 0
    column: int = 0
    columns: int = 0

    def place(self, blocks: int) -> tuple[int, int, int]:
        """Its first row and block in what it is a part of, and the blocks of a row of that; blocks: of its own."""
        return self.row, self.column // 16, self.columns // 16 or blocks

    def padded(self, contraction: int) -> int:
        multiple = self.rht_dim or 16
        return -(-contraction // multiple) * multiple

    @property
    def divisor(self) -> float:
        return self.grid_max * self.scale_cap


@functools.cache
def _constants(prefix: str, operand: Operand | None, columns: int, amax_only: bool) -> dict:
    """The kernel's compile-time arguments for one operand; in a launch for amax MS-EDEN has nothing to do."""
    o = operand or Operand()
    kind = AMAX if amax_only else (EDEN_EMULATED if o.emulated else EDEN) if o.ms_eden else ALIGNED
    return {
        prefix: operand is not None and not (amax_only and o.ms_eden),
        f"{prefix}_KIND": kind.value,
        f"{prefix}_RHT_DIM": o.rht_dim,
        f"{prefix}_NORM": float(o.rht_dim) ** -0.5 if o.rht_dim else 1.0,
        f"{prefix}_DIVISOR": o.divisor,
        f"{prefix}_GRID_MAX": o.grid_max,
        f"{prefix}_INVERSE": m.inverse(o.grid_max),
        f"{prefix}_CANDIDATES": o.candidates,
        f"{prefix}_STOCHASTIC": o.stochastic,
        f"{prefix}_STORE_CODES": not o.emulated and not amax_only,
        f"{prefix}_PADDING": 0 if columns % TILE == 0 else o.rht_dim or 16,
    }


class _Output:
    """Buffers of one operand (rows, K), K padded, and the kernel arguments that point at them."""

    def __init__(self, operand: Operand | None, rows: int, contraction: int, x: torch.Tensor, seed, rht_seed, amax):
        self.operand, self.amax = operand, amax
        self.columns = operand.padded(contraction) if operand else 16
        self.codes = self.scales = self.correction = self.decoded = self.hadamard = x
        self.seed, self.rht_seed = (x if s is None else s for s in (seed, rht_seed))
        if operand is None:
            return
        o, groups = operand, -(-self.columns // TILE)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=x.device)

        if o.rht_dim:
            self.hadamard = _hadamard(o.rht_dim, x.device).view(torch.int16)
        if o.emulated:
            self.decoded = empty(rows, self.columns, dtype=torch.bfloat16)
        else:
            self.codes = empty(rows, self.columns // 2, dtype=torch.uint8)
        if o.ms_eden:
            self.scales = empty(rows, self.columns // 16, dtype=torch.bfloat16)
            self.correction = empty(rows, groups, dtype=torch.float32)
        elif not o.emulated:
            self.scales = empty(rows, self.columns // 16, dtype=torch.uint8)

    def arguments(self) -> tuple:
        buffers = (self.codes.view(torch.int32), self.scales, self.correction, self.decoded)
        o = self.operand or Operand()
        scalars = (o.stream, o.rht_stream, *o.place(self.columns // 16))
        return (self.hadamard, self.rht_seed, self.amax, self.seed, *buffers, *scalars)

    def finish(self) -> list[torch.Tensor]:
        """[decoded], [decoded, tensor_scale] or [codes, scales, tensor_scale]: see rotate_quantize."""
        o = self.operand
        if o is None:
            return []
        if o.ms_eden and o.emulated:
            repair(self.decoded, self.scales, self.correction, self.amax, self.seed, o)
            return [self.decoded]
        if o.ms_eden:
            return [self.codes, *finish(self.scales, self.correction, self.amax, self.seed, o)]
        tensor_scale = torch.empty((), dtype=torch.float32, device=self.amax.device)
        tensor_scale_kernel[(1,)](self.amax, tensor_scale, o.divisor, False, **NO_FUSION)
        if o.emulated:
            return [self.decoded, tensor_scale]
        return [self.codes, self.scales.view(torch.float8_e4m3fn), tensor_scale]


def rotate_quantize(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    x_tensor_scale: torch.Tensor | None,
    row: Operand | None,
    row_seed: torch.Tensor | None,
    row_rht_seed: torch.Tensor | None,
    col: Operand | None,
    col_seed: torch.Tensor | None,
    col_rht_seed: torch.Tensor | None,
) -> list[torch.Tensor]:
    """One or both operands that a tensor (R, C) gives: contracted over C ("row") and over R ("col").

    x: BF16 or FP32 (R, C), or codes uint8 (R, C/2) with x_scales float8_e4m3fn (R, C/16) and x_tensor_scale.
    row, col: None for none. Seeds: int64 ().
    Returns the tensors of row (R, C'), then of col (C, R'), the contraction dimension padded to a multiple of 16 or
    the rotation: [codes uint8, scales float8_e4m3fn, tensor_scale] of an operand; [decoded BF16, tensor_scale] of an
    emulated one, and [decoded] alone of an emulated MS-EDEN operand, whose tensor_scale is multiplied in.
    Raises ValueError for what the kernel does not do.
    """
    row_fields = row_seed, row_rht_seed, row is not None, *(row or Operand())
    col_fields = col_seed, col_rht_seed, col is not None, *(col or Operand())
    return rotate_quantize_sides(x, x_scales, x_tensor_scale, *row_fields, *col_fields)


def _side(name: str) -> str:
    """An operand in the schema of an operator, which knows no records: its seeds, whether it is wanted, its fields."""
    kinds = {float: "float", int: "int", bool: "bool", tuple[float, ...]: "float[]", str: "str"}
    fields = [f"{kinds[kind]} {name}_{field}" for field, kind in Operand.__annotations__.items()]
    return ", ".join([f"Tensor? {name}_seed", f"Tensor? {name}_rht_seed", f"bool {name}", *fields])


def _operands(sides: tuple) -> Iterator[tuple[Operand | None, torch.Tensor | None, torch.Tensor | None]]:
    """(operand, seed, rht_seed) of row and of col, from the operator's arguments."""
    half = len(sides) // 2
    for seed, rht_seed, wanted, *fields in (sides[:half], sides[half:]):
        operand = Operand(*fields)
        yield operand._replace(candidates=tuple(operand.candidates)) if wanted else None, seed, rht_seed


@operator(
    f"rotate_quantize_sides(Tensor x, Tensor? x_scales, Tensor? x_tensor_scale, {_side('row')}, {_side('col')}) "
    "-> Tensor[]"
)
def rotate_quantize_sides(
    x: torch.Tensor, x_scales: torch.Tensor | None, x_tensor_scale: torch.Tensor | None, *sides
) -> list[torch.Tensor]:
    """rotate_quantize with the fields of both operands one after the other."""
    from_codes = x_scales is not None
    x = x.contiguous()
    rows, columns = x.shape[0], x.shape[1] * (2 if from_codes else 1)
    (row_operand, *row_seeds), (col_operand, *col_seeds) = _operands(sides)
    if (from_codes and row_operand) or (col_operand and not col_operand.rht_dim):
        raise ValueError("nvfp4::rotate_quantize: a col operand must be rotated, and codes are requantized as col only")
    amax = torch.zeros(2, dtype=torch.int32, device=x.device)
    outputs = (
        _Output(row_operand, rows, columns, x, *row_seeds, amax[0]),
        _Output(col_operand, columns, rows, x, *col_seeds, amax[1]),
    )
    tiles = triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    sources = (x, x_scales.view(torch.uint8), x_tensor_scale) if from_codes else (x, x, x)

    def launch(amax_only: bool) -> None:
        row_constants = _constants("ROW", row_operand, outputs[0].columns, amax_only)
        col_constants = _constants("COL", col_operand, outputs[1].columns, amax_only)
        sides = row_constants["ROW"] + col_constants["COL"]
        programs = min(2 * tiles * sides, max(_programs(x.device) // 4 * 4, 4))
        rotate_quantize_kernel[(programs,)](
            *sources,
            rows,
            columns,
            *outputs[0].arguments(),
            *outputs[1].arguments(),
            FROM_CODES=from_codes,
            FP32=x.dtype == torch.float32,
            HARDWARE=hardware(),
            **row_constants,
            **col_constants,
            **_launch_options(),
        )

    if any(o is not None and not o.ms_eden for o in (row_operand, col_operand)):
        launch(amax_only=True)
        _reduce_over_group(amax, [o is not None and not o.ms_eden and o.group for o in (row_operand, col_operand)])
    launch(amax_only=False)
    _reduce_over_group(amax, [o is not None and o.ms_eden and o.group for o in (row_operand, col_operand)])
    return [*outputs[0].finish(), *outputs[1].finish()]


def _reduce_over_group(amax: torch.Tensor, groups: list) -> None:
    """amax int32 (2,), in place: the largest that the processes of each one's group have; none where that is empty."""
    for group in {group for group in groups if group}:
        from torch.distributed.distributed_c10d import _resolve_process_group

        mine = [i for i, g in enumerate(groups) if g == group]
        part = amax if len(mine) == 2 else amax[mine[0]]
        dist.all_reduce(part, op=dist.ReduceOp.MAX, group=_resolve_process_group(group))


@rotate_quantize_sides.register_fake
def _(x, x_scales, x_tensor_scale, *sides):
    rows, columns = x.shape[0], x.shape[1] * (1 if x_scales is None else 2)
    result = []
    for (operand, *_), r, c in zip(_operands(sides), (rows, columns), (columns, rows)):
        if operand is None:
            continue
        k = operand.padded(c)
        if operand.emulated:
            result.append(x.new_empty(r, k, dtype=torch.bfloat16))
        else:
            result.append(x.new_empty(r, k // 2, dtype=torch.uint8))
            result.append(x.new_empty(r, k // 16, dtype=torch.float8_e4m3fn))
        if not (operand.emulated and operand.ms_eden):
            result.append(x.new_empty((), dtype=torch.float32))
    return result
