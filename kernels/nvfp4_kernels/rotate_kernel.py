"""The kernel that rotates and quantizes. rotate.py launches it and says what it makes.

A program makes several strips of one operand, one after another, so that it reads the Hadamard matrix H once. A strip
is 64 rows of a group of 128 columns. The programs of both operands go through the tensor side by side. The operand that
comes second to a tile finds it in the L2 cache.

On GPUs with wgmma or tcgen05, the rotation is one product with H, 128 x 128. Other GPUs have mma.sync, for which every
warp would read all 128 columns of H from shared memory. There H is factored, H128 = H16 x H8 (BUTTERFLIES). A product
with a 16 x 16 matrix transforms the bits 6, 5, 4 and 0 of a column's number, and three butterflies in registers
transform the bits 3, 2 and 1. In both cases a thread ends with whole blocks.

After the rotation the arithmetic is that of nanochat_fp4.nvfp4.quantizers, bit for bit. The rotation sums in FP32, in
the tensor cores' order. The error of a sum is at most 128 ulps of the sum of magnitudes with one product, and 19 with a
product of 16 and butterflies. A value may therefore differ from the reference's in its last bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels.quantize import fit_blocks

TILE = 128  # The size of a group of the rotation.
# The kinds of output, which rotate.py describes.
AMAX, ALIGNED, EDEN, EDEN_EMULATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


class Buffers(NamedTuple):
    """The tensors of one operand, and its streams of random numbers. Any tensor may be passed for one that the kernel
    does not use.

    hadamard:   the matrix of rotate._hadamard, BF16 as int16 (128, 128) or (16, 16)
    seeds:      int64 ()
    amax:       int32 (), the bits of a float32
    codes:      int32 (R, K/8), eight codes in a word
    scales:     E4M3 bytes (R, K/16), or pseudo-scales in BF16
    correction: float32 (R, K/128), EDEN's S
    decoded:    BF16 (R, K)
    """

    hadamard: Any
    rht_seed: Any
    amax: Any
    seed: Any
    codes: Any
    scales: Any
    correction: Any
    decoded: Any
    stream: int
    rht_stream: int


class Constants(NamedTuple):
    """The compile-time arguments of one operand.

    KIND:    AMAX, ALIGNED, EDEN or EDEN_EMULATED
    NORM:    the factor that makes the rotation orthogonal
    INVERSE: 1 / GRID_MAX in FP32
    PADDING: the contracted dimension is padded to a multiple of this number. It is 0 if the dimension is a multiple of
             128.
    TILES:   scales are stored in tiles of 128x4. Pseudo-scales never are.
    """

    KIND: int
    RHT_DIM: int
    NORM: float
    DIVISOR: float
    GRID_MAX: float
    INVERSE: float
    CANDIDATES: tuple[float, ...]
    STOCHASTIC: bool
    STORE_CODES: bool
    PADDING: int
    TILES: bool


@triton.jit
def _flips(seed_ptr, stream, j):
    """Returns the signs of elements j (128,) as sign bits, int16. They are the random signs of philox.random_signs."""
    a, b, c, d = m.philox4(tl.load(seed_ptr), j.to(tl.int64) * 0, m.SIGN, stream)
    word = tl.where(j < 32, a, tl.where(j < 64, b, tl.where(j < 96, c, d)))
    return ((word >> (j % 32).to(tl.uint32)) & 1).to(tl.int16) << 15


@triton.jit
def _rotation(hadamard_ptr, flips):
    """Returns diag(signs) H, BF16 (128, 128), as hadamard.rotation_matrix does. The flips are the sign bits of H's
    rows."""
    k = tl.arange(0, 128)
    h = tl.load(hadamard_ptr + k[:, None] * 128 + k[None, :])
    return (h ^ flips[:, None]).to(tl.bfloat16, bitcast=True)


@triton.jit
def _blocks(accumulator):
    """Returns an accumulator (64, 128) with permuted columns as blocks (512, 16) in their true order.

    On the tensor cores of sm_80 to sm_120 a thread holds the columns 8 j + 2 q + i of its rows. `rotate._hadamard` put
    whole blocks there. The permutation therefore moves no data, and sums and maxima over a block stay inside a thread.
    """
    x = tl.reshape(accumulator, (64, 2, 8, 4, 2))
    return tl.reshape(tl.permute(x, (0, 3, 1, 2, 4)), (512, 16))


@triton.jit
def _flipped(x, flips, COL: tl.constexpr):
    """Multiplies x, BF16 or FP16, by the signs of the rotation, which are given as flips, int16 (128,)."""
    dtype = x.dtype
    flips = tl.broadcast_to(flips[:, None] if COL else flips[None, :], x.shape)
    x = x.to(tl.int16, bitcast=True)
    if m.INTERPRETED:
        x = x ^ flips
    else:
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, flips], dtype=tl.int16, is_pure=True, pack=2)
    return x.to(dtype, bitcast=True)


@triton.jit
def _interleaved(x, COL: tl.constexpr):
    """Returns a strip, (64, 128), or (128, 64) with COL, as (512, 16) for the product with the 16 x 16 matrix. A row of
    the result stands for bits 3, 2 and 1 of the strip's column and for the strip's row. A column of the result stands
    for bits 6, 5, 4 and 0 of the strip's column."""
    if COL:
        return tl.reshape(tl.permute(tl.reshape(x, (8, 8, 2, 64)), (1, 3, 0, 2)), (512, 16))
    return tl.reshape(tl.permute(tl.reshape(x, (64, 8, 8, 2)), (2, 0, 1, 3)), (512, 16))


@triton.jit
def _butterfly(x, LEFT: tl.constexpr):
    """Divides x, 8192 elements, into LEFT equal parts, and replaces each part by the sum of its two halves, followed by
    their difference."""
    x = tl.reshape(x, (LEFT, 2, 4096 // LEFT))
    odd = tl.arange(0, 2)[None, :, None]
    sums = tl.sum(x, axis=1)[:, None, :]
    differences = tl.sum(x * (1 - 2 * odd).to(tl.float32), axis=1)[:, None, :]
    return tl.where(odd == 0, sums, differences)


@triton.jit
def _butterflies(y):
    """Transforms bits 3, 2 and 1 of the column in a product of `_interleaved`. Returns blocks (512, 16)."""
    y = _butterfly(_butterfly(_butterfly(y, 1), 2), 4)
    y = tl.reshape(y, (8, 64, 2, 4, 2))
    return tl.reshape(tl.permute(y, (1, 3, 2, 0, 4)), (512, 16))


@triton.jit
def _dot(a, b, accumulator, TRANSPOSE: tl.constexpr):
    if TRANSPOSE:
        a = tl.trans(a)
    if m.INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator)


@triton.jit
def _rotate(
    hi, mid, lo, matrix, flips,
    THREE_PARTS: tl.constexpr, TRANSPOSE: tl.constexpr, BUTTERFLIES: tl.constexpr,
):  # fmt: skip
    """Returns the rotated strip as blocks (512, 16).

    THREE_PARTS: the input is FP32, given as three BF16 numbers hi, mid and lo that add up to it. Three products keep
                 FP32's precision. Without THREE_PARTS only hi counts.
    """
    if BUTTERFLIES:
        y = tl.zeros((512, 16), tl.float32)
        y = _dot(_interleaved(_flipped(hi, flips, TRANSPOSE), TRANSPOSE), matrix, y, False)
        if THREE_PARTS:
            y = _dot(_interleaved(_flipped(mid, flips, TRANSPOSE), TRANSPOSE), matrix, y, False)
            y = _dot(_interleaved(_flipped(lo, flips, TRANSPOSE), TRANSPOSE), matrix, y, False)
        y = _butterflies(y)
    else:
        y = _dot(hi, matrix, tl.zeros((64, 128), tl.float32), TRANSPOSE)
        if THREE_PARTS:
            y = _dot(mid, matrix, y, TRANSPOSE)
            y = _dot(lo, matrix, y, TRANSPOSE)
        y = _blocks(y)
    return y


@triton.jit
def _emit(x, factor, row0, group, rows, groups, contraction, buffers, C: tl.constexpr, HARDWARE: tl.constexpr):
    """Quantizes x * factor (512, 16) and stores the outputs of C.KIND.

    x holds the rows from row0 to row0 + 63 of group `group`, which is 128 columns. The output has `rows` rows and
    `groups` groups.
    Returns the largest magnitude of each block (512,).
    """
    # The fields are named here, because Triton 3.6 does not take a field of a constant as an argument.
    GRID_MAX: tl.constexpr = C.GRID_MAX
    INVERSE: tl.constexpr = C.INVERSE
    CANDIDATES: tl.constexpr = C.CANDIDATES
    STOCHASTIC: tl.constexpr = C.STOCHASTIC
    line = tl.arange(0, 512)
    row = row0 + line // 8
    block_in_group = line % 8
    blocks_per_row = groups * 8
    if C.PADDING:
        PADDING: tl.constexpr = C.PADDING
        blocks_per_row = tl.cdiv(contraction, PADDING) * (PADDING // 16)
    mask = (row < rows) & (group * 8 + block_in_group < blocks_per_row)
    block = row.to(tl.int64) * blocks_per_row + group * 8 + block_in_group
    absolute = m.max_with_nan(x) * factor
    q = x
    # If no codes are stored, arithmetic takes fewer instructions on sm_120 than the conversion to E2M1, which spills.
    CONVERSIONS: tl.constexpr = HARDWARE if C.STORE_CODES or HARDWARE == 0 else m.CONVERTS_E4M3
    if C.KIND == ALIGNED:
        seed = 0
        if STOCHASTIC:
            seed = tl.load(buffers.seed)
        noise_index = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        q, _, scale, codes = fit_blocks(
            x, absolute, factor, seed, noise_index, buffers.stream,
            GRID_MAX, INVERSE, CANDIDATES, STOCHASTIC, False, CONVERSIONS, 512, 16,
        )  # fmt: skip
        if C.STORE_CODES:
            at = block
            if C.TILES:
                at = m.scale_address(row.to(tl.int64), group * 8 + block_in_group, blocks_per_row, True)
            tl.store(buffers.scales + at, m.encode_e4m3(scale, HARDWARE), mask=mask)
        else:
            _store_decoded(q * scale[:, None], buffers.decoded, row0, group, rows, blocks_per_row)
    elif C.KIND != AMAX:
        q, y, scale, codes = fit_blocks(
            x, absolute, factor, 0, line, buffers.stream,
            GRID_MAX, INVERSE, CANDIDATES, False, True, CONVERSIONS, 512, 16,
        )  # fmt: skip

        # S = <x, x> / <x, q> in units of the blocks' scales, as in quantizers._eden_correction.
        largest = tl.max(tl.reshape(scale, (64, 8)), axis=1)
        largest = tl.maximum(m.power_of_two_floor(largest), m.TENSOR_SCALE_MIN)
        unit = 0.125 * m.power_of_two_reciprocal(largest)
        weight = scale * tl.reshape(tl.broadcast_to(unit[:, None], (64, 8)), (512,))
        weight = weight * weight
        xx = m.row_sum(m.product_sum(y, y), weight)
        xq = m.row_sum(m.product_sum(y, q), weight)
        s = tl.where(xq > 0, tl.math.div_rn(xx, tl.where(xq > 0, xq, 1.0)), 1.0)
        s_row = row0 + tl.arange(0, 64)
        tl.store(buffers.correction + s_row.to(tl.int64) * groups + group, s, mask=s_row < rows)
        tl.store(buffers.scales + block, scale.to(tl.bfloat16), mask=mask)

        if C.KIND == EDEN_EMULATED:
            words = m.scale_words(
                tl.load(buffers.seed), row0 // 16, group * 4, blocks_per_row // 2, buffers.stream, 64, 4
            )
            corrected = scale * tl.reshape(tl.broadcast_to(s[:, None], (64, 8)), (512,))
            final = m.stochastic_round_m3(corrected, tl.reshape(words, (512,)))
            _store_decoded(q * final[:, None], buffers.decoded, row0, group, rows, blocks_per_row)
    if C.STORE_CODES:
        word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(buffers.codes + word, codes, mask=mask[:, None])
    return absolute


@triton.jit
def _store_decoded(value, decoded_ptr, row0, group, rows, blocks_per_row):
    """Stores value (512, 16), the blocks of rows row0 to row0 + 63, in BF16.

    A warp holds 16 rows and stores two of them at a time, so no warp waits for another.
    """
    value = tl.permute(tl.reshape(value, (4, 8, 16, 16)), (1, 0, 2, 3))
    k = tl.arange(0, 32)[:, None]
    line = tl.arange(0, 16)[None, :]
    row = row0 + k % 4 * 16 + k // 4 * 2 + line // 8
    block = group * 8 + line % 8
    mask = (row < rows) & (block < blocks_per_row)
    element = (row.to(tl.int64) * blocks_per_row + block)[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    tl.store(decoded_ptr + element, tl.reshape(value, (32, 16, 16)).to(tl.bfloat16), mask=mask[:, :, None])


@triton.jit
def _decoded(byte, scale, HARDWARE: tl.constexpr):
    """Returns codes (128, 32), two in a byte, times scale (128, 4), as (128, 64). The dtype is FP16 if an instruction
    converts codes to FP16, and otherwise BF16. Both are exact, because a product has 6 significant bits and is 0 or
    from 2^-10 to 2688."""
    if HARDWARE >= m.CONVERTS_E2M1:
        half = scale.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        pair = tl.reshape(tl.broadcast_to((half | half << 16)[:, :, None], (128, 4, 8)), (128, 32))
        word = m.decode_pairs(byte, pair)
        value = tl.join((word & 0xFFFF).to(tl.int16), (word >> 16).to(tl.int16))
        value = tl.reshape(value, (128, 64)).to(tl.float16, bitcast=True)
    else:
        byte = byte.to(tl.int32)
        value = m.decode_e2m1(tl.reshape(tl.join(byte & 0xF, byte >> 4), (128, 4, 16)))
        value = tl.reshape((value * scale[:, :, None]).to(tl.bfloat16), (128, 64))
    return value


@triton.jit
def _make(
    first,
    step,
    x_ptr,
    x_scales_ptr,
    x_tensor_scale_ptr,
    rows,
    columns,
    buffers,
    COL: tl.constexpr,
    FROM_CODES: tl.constexpr,
    FROM_TILES: tl.constexpr,
    FROM_E4M3: tl.constexpr,
    FACTORS: tl.constexpr,
    FP32: tl.constexpr,
    HARDWARE: tl.constexpr,
    BUTTERFLIES: tl.constexpr,
    C: tl.constexpr,
):
    """Makes the strips first, first + step, ... of the operand that is contracted over the columns, or over the rows
    with COL.

    Both operands go through x in the same order. Two strips are the halves of a 128 x 128 tile. Tiles follow from left
    to right, and then in the next 128 rows.
    """
    RHT_DIM: tl.constexpr = C.RHT_DIM
    DIVISOR: tl.constexpr = C.DIVISOR
    column_tiles = tl.cdiv(columns, 128)
    row_tiles = tl.cdiv(rows, 128)
    TCGEN05: tl.constexpr = HARDWARE >= m.CONVERTS_E2M1 and not BUTTERFLIES
    factor = C.NORM
    if FROM_CODES or FROM_E4M3:
        factor = tl.load(x_tensor_scale_ptr) * C.NORM
    if C.KIND == ALIGNED:
        tensor_scale = m.tensor_scale_of(m.from_bits(tl.load(buffers.amax)), DIVISOR, False)
        factor = tl.math.div_rn(1.0, tensor_scale) * factor
    if RHT_DIM:
        j = tl.arange(0, 128)
        flips = _flips(buffers.rht_seed, buffers.rht_stream, j % RHT_DIM)
        if BUTTERFLIES:
            k = tl.arange(0, 16)
            matrix = tl.load(buffers.hadamard + k[:, None] * 16 + k[None, :]).to(tl.bfloat16, bitcast=True)
        else:
            matrix = _rotation(buffers.hadamard, flips)
    largest = tl.zeros((512 if TCGEN05 else 128,), tl.float32)
    for strip in range(first, 2 * row_tiles * column_tiles, step):
        tile_row = strip // 2 // column_tiles
        tile_column = strip // 2 % column_tiles
        if COL:
            r = tile_row * 128 + tl.arange(0, 128)
            c = tile_column * 128 + strip % 2 * 64 + tl.arange(0, 64)
        else:
            r = tile_row * 128 + strip % 2 * 64 + tl.arange(0, 64)
            c = tile_column * 128 + tl.arange(0, 128)
        if FROM_CODES:  # Codes are always contracted over the rows.
            half = tile_column * 64 + strip % 2 * 32 + tl.arange(0, 32)
            byte_mask = (r < rows)[:, None] & (half < columns // 2)[None, :]
            byte = tl.load(x_ptr + r.to(tl.int64)[:, None] * (columns // 2) + half[None, :], mask=byte_mask, other=0)
            g = tile_column * 8 + strip % 2 * 4 + tl.arange(0, 4)
            at = m.scale_address(r.to(tl.int64)[:, None], g[None, :], columns // 16, FROM_TILES)
            scale = tl.load(x_scales_ptr + at, mask=(r < rows)[:, None] & (g < columns // 16)[None, :], other=0)
            hi = _decoded(byte, m.decode_e4m3(scale), HARDWARE)
            y = _rotate(hi, hi, hi, matrix.to(hi.dtype), flips, False, True, BUTTERFLIES)
        else:
            mask = (r < rows)[:, None] & (c < columns)[None, :]
            at = r.to(tl.int64)[:, None] * columns + c[None, :]
            x = tl.load(x_ptr + at, mask=mask, other=0.0)
            if FACTORS:
                kept = tl.load(x_scales_ptr + at, mask=mask, other=0).to(tl.float32)
                twice = 2 * tl.load(x_tensor_scale_ptr + r, mask=r < rows, other=0.0)
                x = m.rounded_to(x.to(tl.float32) * (twice[:, None] * kept), x.dtype)
            if FROM_E4M3:
                x = m.half_of_e4m3(x, HARDWARE)
            if RHT_DIM:
                hi = x if FROM_E4M3 else x.to(tl.bfloat16)
                mid = hi
                lo = hi
                if FP32:
                    rest = x - hi.to(tl.float32)
                    mid = rest.to(tl.bfloat16)
                    lo = (rest - mid.to(tl.float32)).to(tl.bfloat16)
                y = _rotate(hi, mid, lo, matrix.to(hi.dtype), flips, FP32, COL, BUTTERFLIES)
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
            buffers,
            C,
            HARDWARE,
        )
        if C.KIND != ALIGNED:
            if not TCGEN05:  # A thread keeps the largest of its four blocks. NaN is the largest as an integer.
                four = tl.reshape(m.bits(absolute), (4, 2, 8, 4, 2))
                absolute = m.from_bits(tl.reshape(tl.max(tl.max(four, axis=4), axis=1), (128,)))
            largest = tl.maximum(largest, absolute, propagate_nan=tl.PropagateNan.ALL)
    if C.KIND != ALIGNED:
        tl.atomic_max(buffers.amax, tl.max(m.bits(largest), axis=0), sem="relaxed")


@triton.jit
def rotate_quantize_kernel(
    x_ptr,
    x_scales_ptr,
    x_tensor_scale_ptr,
    rows,
    columns,
    row_buffers,
    col_buffers,
    FROM_CODES: tl.constexpr,
    FROM_TILES: tl.constexpr,
    FROM_E4M3: tl.constexpr,
    FACTORS: tl.constexpr,
    FP32: tl.constexpr,
    HARDWARE: tl.constexpr,
    BUTTERFLIES: tl.constexpr,
    ROW: tl.constexpr,
    COL: tl.constexpr,
):
    """Makes one or both operands. ROW and COL are Constants, or None for an operand that is not made.

    FACTORS: x is the gradient of relu(y)^2 and becomes that of y, as in gemm.relu_squared_gradient. x_scales and
             x_tensor_scale are then kept, uint8 (R, C), and step, float32 (R, 1), of y.

    If both are made, two programs make strips of row, the next two make strips of col, and so on. Alternating single
    programs is 9% slower on an H200 because of instruction stalls (dev/LOG.md). The number of programs is a multiple of
    4.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    if ROW is not None and COL is not None:
        side = program // 2 % 2
        first = program // 4 * 2 + program % 2
        step = programs // 2
    else:
        side = 0 if ROW is not None else 1
        first = program
        step = programs
    if ROW is not None:
        if side == 0:
            _make(
                first, step, x_ptr, x_scales_ptr, x_tensor_scale_ptr, rows, columns, row_buffers,
                False, FROM_CODES, FROM_TILES, FROM_E4M3, FACTORS, FP32, HARDWARE, BUTTERFLIES, ROW,
            )  # fmt: skip
    if COL is not None:
        if side == 1:
            _make(
                first, step, x_ptr, x_scales_ptr, x_tensor_scale_ptr, rows, columns, col_buffers,
                True, FROM_CODES, FROM_TILES, FROM_E4M3, FACTORS, FP32, HARDWARE, BUTTERFLIES, COL,
            )  # fmt: skip
