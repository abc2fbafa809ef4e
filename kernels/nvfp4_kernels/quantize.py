"""Quantizes tensors along their rows, without a rotation.

A first pass finds the amax. A second one makes codes, scales and, if wanted, the BF16 values. Rounding is to nearest or
stochastic. Scales are static, those of Four-over-Six, or searched. Blocks are 1x16 or 16x16. The arithmetic is that of
nanochat_fp4.nvfp4.quantizers.search_scales, bit for bit.

The same pass makes E4M3 numbers with one scale for the tensor, for a forward product in 8 bits. Gradients of 8 bits are
made in E5M2 by a kernel of their own (quantize_both), with their transpose.

Per BF16 element the first pass reads 2 bytes. The second one reads 2 bytes and writes 0.5625 for codes and scales, and
2 more for the BF16 values, or 1 for the E4M3 numbers.
"""

import functools
import warnings

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, empty_scales, is_captured, operator

GROUPS, COLUMNS = tl.constexpr(32), tl.constexpr(128)  # of a tile of quantize_both_kernel


@triton.jit
def fit_blocks(
    x,
    amax,
    factor,
    seed,
    noise_index,
    stream,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    E8M3: tl.constexpr,
    HARDWARE: tl.constexpr,
    NB: tl.constexpr,
    L: tl.constexpr,
):
    """Chooses the scales of NB blocks of L values and rounds the blocks. This is quantizers.search_scales, and returns
    (q, y, scale, codes).

    x:     (NB, L)
    amax:  (NB,), the largest magnitude in each block of x * factor
    y:     (NB, L), x * factor / scale
    q:     (NB, L), y rounded
    scale: (NB,)
    codes: int32 (NB * L / 16, 2)
    """
    LIMIT: tl.constexpr = m.E2M1_MAX if STOCHASTIC else m.E2M1_OVERFLOW
    # With many candidates, rounding once more with the best scale is cheaper than keeping its codes in registers. The
    # same holds for the rotating kernel (E8M3), where a thread holds 64 values and registers are scarce.
    KEEP_Q: tl.constexpr = STOCHASTIC or (len(CANDIDATES) <= 3 and not E8M3)
    CONVERT: tl.constexpr = HARDWARE >= m.CONVERTS_E2M1 and not STOCHASTIC
    base = m.divide(amax, GRID_MAX, INVERSE)
    unit = m.power_of_two_reciprocal(tl.maximum(m.power_of_two_floor(base), m.TENSOR_SCALE_MIN))
    best_q = x
    best_y = x
    best_scale = base
    best_error = base
    best_codes = 0
    for i in tl.static_range(len(CANDIDATES)):
        if E8M3:
            scale = m.round_e8m3(base * CANDIDATES[i])
        else:
            scale = m.round_e4m3(base * CANDIDATES[i], HARDWARE)
            scale = tl.where(amax > scale * LIMIT, m.next_e4m3(scale), scale)
        y = x * (m.reciprocal(scale) * factor)[:, None]
        if STOCHASTIC:
            q = m.stochastic_round_e2m1(y, m.element_noise(seed, noise_index, i, stream, NB))
            codes = 0
        else:
            q, codes = _round(y, CONVERT, NB, L)
        if len(CANDIDATES) == 1:
            best_q, best_y, best_scale, best_codes = q, y, scale, codes
        else:
            relative = scale * unit
            error = m.error_sum(q - y, L).to(tl.float32) * (relative * relative)
            if i == 0:
                best_q, best_scale, best_error, best_codes = q, scale, error, codes
            else:
                better = error < best_error
                if KEEP_Q:
                    best_q = tl.where(better[:, None], q, best_q)
                    if CONVERT:
                        chosen = tl.reshape(tl.broadcast_to(better[:, None], (NB, L // 16)), (NB * L // 16,))
                        best_codes = tl.where(chosen[:, None], codes, best_codes)
                best_scale = tl.where(better, scale, best_scale)
                best_error = tl.minimum(error, best_error)
    if len(CANDIDATES) > 1 and not KEEP_Q:
        best_y = x * (m.reciprocal(best_scale) * factor)[:, None]
        best_q, best_codes = _round(best_y, CONVERT, NB, L)
    if not CONVERT:
        best_codes = m.pack(tl.reshape(best_q, (NB * L // 16, 16)), tl.reshape(x, (NB * L // 16, 16)), NB * L // 16)
    return best_q, best_y, best_scale, best_codes


@triton.jit
def _round(y, CONVERT: tl.constexpr, NB: tl.constexpr, L: tl.constexpr):
    """Rounds y (NB, L) to the nearest E2M1 values. Returns the values, and the codes if the conversion instruction
    makes them (CONVERT), otherwise 0."""
    if CONVERT:
        codes, q = m.convert_e2m1(tl.reshape(y, (NB * L // 16, 16)), NB * L // 16)
        q = tl.reshape(q, (NB, L))
    else:
        q = m.round_e2m1(y)
        codes = 0
    return q, codes


@triton.jit
def amax_kernel(x_ptr, amax_ptr, numel, PER_PROGRAM: tl.constexpr, BLOCK: tl.constexpr):
    """Finds max |x| as the bits of a float32. Bits of non-negative floats have the same order as the floats, and NaN is
    the largest."""
    start = tl.program_id(0).to(tl.int64) * PER_PROGRAM * BLOCK
    largest = tl.zeros((BLOCK,), tl.int32)
    for i in range(PER_PROGRAM):
        offset = start + i * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offset, mask=offset < numel, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, m.bits(x) & 0x7FFFFFFF)
    tl.atomic_max(amax_ptr, tl.max(largest, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["stream"])
def quantize_kernel(
    x_ptr,
    amax_ptr,
    seed_ptr,
    codes_ptr,
    scales_ptr,
    tensor_scale_ptr,
    decoded_ptr,
    step_ptr,
    kept_ptr,
    numbers_ptr,
    number_scale_ptr,
    blocks,
    columns,
    stream,
    DIVISOR: tl.constexpr,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
    DECODE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SQUARE: tl.constexpr,
    TILES: tl.constexpr,
    EIGHT: tl.constexpr,
    FOUR: tl.constexpr,
    NB: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    """Quantizes PER_PROGRAM times NB blocks of 16 contiguous elements. x is FP32 or BF16. Scales are E4M3 bytes.

    PER_TOKEN: each row of `columns` elements has an amax and a tensor_scale of its own
    SQUARE:    relu(x)^2 is quantized, and relu(x) is kept in units of its row's step (relu_squared.py)
    TILES:     scales are written in tiles of 128x4
    EIGHT:     the largest of the E4M3 numbers that are made of x, too, with one scale for the tensor, or 0 for none
    FOUR:      whether codes and scales are made
    """
    if not PER_TOKEN:
        whole = m.from_bits(tl.load(amax_ptr))
        tensor_scale = m.tensor_scale_of(whole, DIVISOR, False)
        if tl.program_id(0) == 0:
            tl.store(tensor_scale_ptr, tensor_scale)
        if EIGHT > 0:
            factor = m.fp8_factor(whole, EIGHT)
            if tl.program_id(0) == 0:
                tl.store(number_scale_ptr, tl.math.div_rn(1.0, factor))
        inverse_tensor_scale = tl.math.div_rn(1.0, tensor_scale)

    seed = 0
    if STOCHASTIC or SQUARE:
        seed = tl.load(seed_ptr)
    for i in range(PER_PROGRAM):
        first = (tl.program_id(0).to(tl.int64) * PER_PROGRAM + i) * NB
        block = first + tl.arange(0, NB)
        mask = block < blocks
        x = load_blocks(x_ptr, block * 16, mask)
        noise_index = block[:, None] * 2 + tl.arange(0, 2)[None, :]
        element = block[:, None] * 16 + tl.arange(0, 16)[None, :]

        if SQUARE:
            step = tl.load(step_ptr + block // (columns // 16), mask=mask, other=1.0)
            x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
            kept = m.keep_eight_bits(x, tl.math.div_rn(1.0, step)[:, None], seed, noise_index, NB)
            tl.store(kept_ptr + element, kept, mask=mask[:, None])
            x = m.rounded_to(x * x, x_ptr.dtype.element_ty).to(tl.float32)
        if EIGHT > 0:
            tl.store(numbers_ptr + element, m.to_e4m3(x * factor, HARDWARE), mask=mask[:, None])
        if PER_TOKEN:
            row = block // (columns // 16)
            row_amax = m.from_bits(tl.load(amax_ptr + row, mask=mask, other=0))
            row_scale = m.tensor_scale_of(row_amax, DIVISOR, False)
            tl.store(tensor_scale_ptr + row, row_scale, mask=mask & (block % (columns // 16) == 0))
            inverse_tensor_scale = tl.math.div_rn(1.0, row_scale)
        if FOUR:
            amax = tl.max(tl.abs(x), axis=1) * inverse_tensor_scale
            q, _, scale, codes = fit_blocks(
                x, amax, inverse_tensor_scale, seed, noise_index, stream,
                GRID_MAX, INVERSE, CANDIDATES, STOCHASTIC, False, HARDWARE, NB, 16,
            )  # fmt: skip
            store_blocks(codes_ptr, scales_ptr, codes, scale, block, mask, columns, TILES, HARDWARE)
        if DECODE:
            # Values are stored in the order in which a warp holds the blocks. It then writes whole lines by itself,
            # without an exchange with other warps.
            value = tl.reshape(q * scale[:, None], (4, NB // 64, 16, 16))
            value = tl.reshape(tl.permute(value, (1, 0, 2, 3)), (NB // 16, 16, 16))
            k = tl.arange(0, NB // 16)
            line = first + ((k % 4 * (NB // 64) + k // 4) * 16)[:, None] + tl.arange(0, 16)[None, :]
            element = line[:, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            tl.store(decoded_ptr + element, value.to(tl.bfloat16), mask=(line < blocks)[:, :, None])


@triton.jit
def quantize_both_kernel(x_ptr, amax_ptr, codes_ptr, words_ptr, tensor_scale_ptr, groups, columns):
    """Makes one tile of x in E5M2, and the same tile of its transpose (columns, 4 groups) in words of four rows.

    A thread has four rows of 16 columns, so that a word needs no exchange. The tile is then transposed in words: in
    single bytes it waits for shared memory four times as often.
    """
    factor = m.fp8_factor(m.from_bits(tl.load(amax_ptr)), m.E5M2_MAX)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(tensor_scale_ptr, tl.math.div_rn(1.0, factor))
    group, column = tl.program_id(1) * GROUPS, tl.program_id(0) * COLUMNS
    g, c = tl.arange(0, GROUPS)[:, None], tl.arange(0, COLUMNS)[None, :]
    inside = (group + g < groups) & (column + c < columns)
    at = group.to(tl.int64) * 4 * columns + column + g * 4 * columns + c
    rows, words = (), tl.zeros((GROUPS, COLUMNS), tl.int32)
    for row in tl.static_range(4):
        rows += (tl.load(x_ptr + at + row * columns, mask=inside, other=0.0),)
    for row in tl.static_range(4):
        x = m.clip_e5m2(rows[row].to(tl.float32) * factor)
        tl.store(codes_ptr + at + row * columns, m.to_e5m2(x), mask=inside)
        # ptxas 12.8 and 12.9 lose a number for sm_90 that is stored and becomes a part of a word. -x is another number.
        words |= m.e5m2_byte(x * -1.0) << row * 8
    words ^= -0x7F7F7F80  # the four signs
    tl.store(words_ptr + column.to(tl.int64) * groups + group + c * groups + g, words, mask=inside)


@triton.jit
def load_blocks(x_ptr, first, mask):
    """Loads blocks of 16 contiguous values as float32 (NB, 16). A thread loads a block in pieces of 16 bytes.

    first: (NB,), the index of each block's first value
    mask:  (NB,), whether a block is read. A block that is not read is filled with zeros.
    """
    mask = mask[:, None]
    first = first[:, None]
    if x_ptr.dtype.element_ty == tl.float32:
        at = x_ptr + first + tl.arange(0, 4)[None, :]
        a = tl.load(at, mask=mask, other=0.0)
        b = tl.load(at + 4, mask=mask, other=0.0)
        c = tl.load(at + 8, mask=mask, other=0.0)
        d = tl.load(at + 12, mask=mask, other=0.0)
        x = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (0, 2, 3, 1))
    else:
        at = x_ptr + first + tl.arange(0, 8)[None, :]
        low = tl.load(at, mask=mask, other=0.0)
        x = tl.permute(tl.join(low, tl.load(at + 8, mask=mask, other=0.0)), (0, 2, 1))
    return tl.reshape(x, (first.shape[0], 16)).to(tl.float32)


@triton.jit
def store_blocks(
    codes_ptr, scales_ptr, codes, scale, block, mask, columns, TILES: tl.constexpr, HARDWARE: tl.constexpr
):
    """Stores the codes and scales that fit_blocks has made. The blocks have the numbers `block` (NB,) in a tensor with
    `columns` columns."""
    place = block
    if TILES:
        narrow = block.to(tl.int32)  # A 64-bit division is slow, and no GPU has memory for 2^31 blocks.
        row = narrow // (columns // 16)
        place = m.scale_address(row.to(tl.int64), narrow - row * (columns // 16), columns // 16, True)
    tl.store(scales_ptr + place, m.encode_e4m3(scale, HARDWARE), mask=mask)
    word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(codes_ptr + word, codes, mask=mask[:, None])


@triton.jit
def quantize_16x16_kernel(
    x_ptr,
    amax_ptr,
    seed_ptr,
    codes_ptr,
    scales_ptr,
    tensor_scale_ptr,
    decoded_ptr,
    step_ptr,
    kept_ptr,
    numbers_ptr,
    number_scale_ptr,
    blocks,
    columns,
    stream,
    DIVISOR: tl.constexpr,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr,
    DECODE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    SQUARE: tl.constexpr,
    TILES: tl.constexpr,
    EIGHT: tl.constexpr,
    FOUR: tl.constexpr,
    NB: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    """Quantizes NB square blocks, which are numbered row by row. `blocks` is the number of 1x16 blocks, and `columns`
    is K."""
    tensor_scale = m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, False)
    if tl.program_id(0) == 0:
        tl.store(tensor_scale_ptr, tensor_scale)
    inverse_tensor_scale = tl.math.div_rn(1.0, tensor_scale)

    per_row = columns // 16
    rows = blocks // per_row
    square = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    r = tl.arange(0, 256) // 16
    row = (square // per_row)[:, None] * 16 + r[None, :]
    column = (square % per_row)[:, None] * 16 + (tl.arange(0, 256) % 16)[None, :]
    mask = row < rows
    element = row * columns + column
    x = tl.load(x_ptr + element, mask=mask, other=0.0).to(tl.float32)

    amax = tl.max(tl.abs(x), axis=1) * inverse_tensor_scale
    q, _, scale, codes = fit_blocks(
        x, amax, inverse_tensor_scale, 0, square, stream,
        GRID_MAX, INVERSE, CANDIDATES, False, False, HARDWARE, NB, 256,
    )  # fmt: skip

    line = tl.arange(0, NB * 16)
    square = tl.program_id(0).to(tl.int64) * NB + line // 16
    row = square // per_row * 16 + line % 16
    line_mask = row < rows
    block = row * per_row + square % per_row
    tl.store(codes_ptr + block[:, None] * 2 + tl.arange(0, 2)[None, :], codes, mask=line_mask[:, None])
    repeated = tl.reshape(tl.broadcast_to(scale[:, None], (NB, 16)), (NB * 16,))
    place = block
    if TILES:
        place = m.scale_address(row, square % per_row, per_row, True)
    tl.store(scales_ptr + place, m.encode_e4m3(repeated, HARDWARE), mask=line_mask)
    if DECODE:
        tl.store(decoded_ptr + element, (q * scale[:, None]).to(tl.bfloat16), mask=mask)


@functools.cache
def architecture() -> int:
    """Returns the GPU's compute capability, for example 120 for sm_120, and 0 in the interpreter."""
    return 0 if m.INTERPRETED.value else triton.runtime.driver.active.get_current_target().arch


def hardware() -> int:
    """Returns the conversion instructions that kernels use on this GPU, for their argument HARDWARE. 0 stands for none,
    as in the interpreter.

    From sm_89 on it is _math.CONVERTS_E4M3. From sm_100 on it is CONVERTS_E2M1, if the instruction agrees with the
    arithmetic that it replaces. During the capture of a CUDA graph no kernel runs, so the two cannot be compared. If
    they have not been compared before, the kernels use the arithmetic, which gives the same results.
    """
    if architecture() < 100:
        return m.CONVERTS_E4M3.value if architecture() >= 89 else 0
    if not compared_conversion.cache_info().currsize and is_captured():
        return m.CONVERTS_E4M3.value
    return compared_conversion()


@functools.cache
def compared_conversion() -> int:
    """Returns HARDWARE for a Blackwell. The conversion to E2M1 is tested once in a process, and a warning says if it is
    wrong."""
    problem = conversion_problem()
    if problem:
        warnings.warn(f"kernels do without the conversion to E2M1, which {problem}", stacklevel=2)
    return m.CONVERTS_E4M3.value if problem else m.CONVERTS_E2M1.value


@triton.jit
def convert_kernel(y_ptr, codes_ptr, values_ptr, HARDWARE: tl.constexpr, NB: tl.constexpr):
    """Rounds y to E2M1 by the instruction, or by arithmetic, for conversion_problem to compare the two."""
    element = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    y = tl.load(y_ptr + element)
    q, codes = _round(y, HARDWARE >= m.CONVERTS_E2M1, NB, 16)
    if HARDWARE < m.CONVERTS_E2M1:
        codes = m.pack(q, y, NB)
    tl.store(codes_ptr + tl.arange(0, NB)[:, None] * 2 + tl.arange(0, 2)[None, :], codes)
    tl.store(values_ptr + element, q)


def conversion_problem(device: str = "cuda") -> str | None:
    """Tests the instruction that rounds to E2M1 and returns a description of its fault, or None.

    Codes and values must be those of the arithmetic on every tie, its neighbours, both zeros and numbers in between.
    Infinity and numbers beyond the range must become 6 with their sign. NaN must become 6 or -6. That does no harm,
    because NaN reaches the scales, too. Other numbers in the same word must be converted as usual.
    """
    ties = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 6.875])
    near = torch.cat([ties, *(torch.nextafter(ties, torch.tensor(v)) for v in (0.0, 7.0)), torch.linspace(0, 6.9, 98)])
    finite = torch.cat((near, -near))
    inf, nan = float("inf"), float("nan")
    special = torch.tensor([inf, -inf, nan, 0.5, -nan, -1.5, 1e30, -1e30, 7.0, -7.0, 3e38, -0.0, 0.0, inf, -inf, 4.0])
    results = []
    try:
        for numbers, conversions in ((finite, 0), (finite, m.CONVERTS_E2M1.value), (special, m.CONVERTS_E2M1.value)):
            y = numbers.to(device)
            codes = torch.empty(y.numel() // 8, dtype=torch.int32, device=device)
            values = torch.empty_like(y)
            convert_kernel[(1,)](y, codes, values, conversions, y.numel() // 16, num_warps=1, **NO_FUSION)
            results.append((codes.cpu(), values.cpu()))
    except Exception as error:  # A compiler may raise any exception.
        return f"raises {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
    (codes, values), (converted, converted_values), (words, of_special) = results
    if not torch.equal(codes, converted) or not torch.equal(values, converted_values):
        return "does not round as it should"
    want = special.clamp(-6.0, 6.0)
    nans = special.isnan()
    nibbles = (words.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15).flatten()
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    coded = torch.copysign(grid[nibbles & 7], 0.5 - (nibbles >> 3))
    same = torch.equal(coded[~nans], want[~nans]) and torch.equal(of_special[~nans], want[~nans])
    if not same or not torch.equal(coded, of_special) or not (coded[nans].abs() == 6).all():
        return "does not make 6 of NaN and infinity"
    return None


@operator("amax(Tensor x) -> Tensor")
def amax(x: torch.Tensor) -> torch.Tensor:
    """Returns max |x| of an FP32 or BF16 tensor, float32 (). It is NaN if x holds a NaN."""
    return amax_bits(x.contiguous()).view(torch.float32)


def amax_bits(x: torch.Tensor) -> torch.Tensor:
    """Returns max |x| of a contiguous FP32 or BF16 tensor as the bits of a float32, int32 ()."""
    result = torch.zeros((), dtype=torch.int32, device=x.device)
    block, numel = 4096, x.numel()
    per_program = max(1, min(32, numel // (block * 132 * 8)))
    amax_kernel[(triton.cdiv(numel, block * per_program),)](
        x, result, numel, per_program, block, num_warps=8, **NO_FUSION
    )
    return result


@amax.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((), dtype=torch.float32)


@operator(
    "quantize(Tensor x, Tensor? amax, Tensor? seed, int stream, float grid_max, float scale_cap, float[] candidates, "
    "bool stochastic, int block_rows, bool decode, bool per_token=False, bool tiles=False, float eight=0) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def quantize(
    x: torch.Tensor,
    amax: torch.Tensor | None,
    seed: torch.Tensor | None,
    stream: int,
    grid_max: float,
    scale_cap: float,
    candidates: list[float],
    stochastic: bool,
    block_rows: int,
    decode: bool,
    per_token: bool = False,
    tiles: bool = False,
    eight: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    """Quantizes x. Returns (codes, scales, tensor_scale, decoded, numbers, number_scale).

    x:            FP32 or BF16 (R, K), K a multiple of 16
    amax:         max |x|, () in FP32 or x's dtype. With per_token it is float32 (R,), one for each row. With None it is
                  found first.
    seed:         int64 (), for stochastic rounding
    stream:       the number of the stream of random numbers
    decode:       whether decoded is wanted
    per_token:    whether each row has a tensor_scale of its own, so that no row depends on another
    tiles:        whether scales are in tiles, flat (format.swizzle_scales)
    eight:        the largest of numbers in 8 bits that are made of x in the same pass, up to E4M3's 448, or 0 for none
    codes:        uint8 (R, K/2)
    scales:       float8_e4m3fn (R, K/16), or flat in tiles
    tensor_scale: float32 (), or (R, 1) with per_token
    decoded:      BF16 (R, K), code * scale without tensor_scale, or (0,) if it is not wanted
    numbers:      float8_e4m3fn (R, K), x / number_scale, or (0,)
    number_scale: float32 (), or (0,)
    The other arguments are the fields of roundings.Rounding. Raises ValueError for another shape or dtype of x, and
    for per_token or eight with blocks of 16 rows, or both.
    """
    check(x, block_rows)
    if (block_rows != 1) + per_token + (eight > 0) > 1:
        raise ValueError("nvfp4::quantize: two of blocks of 16 rows, a tensor_scale per token, and 8 bits; ask for one")
    x = x.contiguous()
    if amax is None:
        amax = x.abs().amax(-1).float().view(torch.int32) if per_token else amax_bits(x)
    else:
        amax = amax.float().view(torch.int32)
    constants = (stream, grid_max, scale_cap, candidates, stochastic, block_rows, decode, per_token, tiles)
    return quantize_with(x, amax, seed, *constants, eight)


def quantize_with(
    x: torch.Tensor,
    amax: torch.Tensor,
    seed: torch.Tensor | None,
    stream: int,
    grid_max: float,
    scale_cap: float,
    candidates: list[float],
    stochastic: bool,
    block_rows: int,
    decode: bool,
    per_token: bool,
    tiles: bool,
    eight: float = 0.0,
    four: bool = True,
    step: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Quantizes a contiguous x. It takes the amax as the bits of a float32, int32, and otherwise the arguments of
    `quantize`. Without `four`, codes and scales are empty. If step and kept are given, relu(x)^2 is quantized, and
    relu(x) is written to kept (relu_squared.py)."""
    rows, columns = x.shape
    results = empty_results(x, decode, per_token, tiles, eight, four)
    codes, scales, tensor_scale, decoded, numbers, number_scale = results
    blocks = rows * columns // 16
    if block_rows == 1:
        # The interpreter computes masked blocks, too, so programs are small there.
        kernel, nb, per_program = quantize_kernel, 128, 2 if m.INTERPRETED.value else 8
        programs = triton.cdiv(blocks, nb * per_program)
    else:
        kernel, nb, per_program = quantize_16x16_kernel, 8, 1
        programs = triton.cdiv(triton.cdiv(rows, 16) * (columns // 16), nb)
    kernel[(max(1, programs),)](  # Without rows one program still writes the scales of the tensor.
        x,
        amax,
        x if seed is None else seed,
        codes.view(torch.int32),
        scales.view(torch.uint8),
        tensor_scale,
        decoded,
        x if step is None else step,
        x if kept is None else kept,
        numbers.view(torch.uint8),
        number_scale,
        blocks,
        columns,
        stream,
        DIVISOR=grid_max * scale_cap,
        GRID_MAX=grid_max,
        INVERSE=m.inverse(grid_max),
        CANDIDATES=tuple(candidates),
        STOCHASTIC=stochastic,
        HARDWARE=hardware(),
        DECODE=decode,
        PER_TOKEN=per_token,
        SQUARE=step is not None,
        TILES=tiles,
        EIGHT=eight,
        FOUR=four,
        NB=nb,
        PER_PROGRAM=per_program,
        num_warps=4,
        **NO_FUSION,
    )
    return results


def empty_results(
    x: torch.Tensor, decode: bool, per_token: bool, tiles: bool, eight: float, four: bool
) -> tuple[torch.Tensor, ...]:
    """Allocates the results of `quantize`. Those that are not wanted are (0,)."""
    rows, columns = x.shape
    e4m3, codes = torch.float8_e4m3fn, (rows, columns // 2) if four else (0,)
    scales = empty_scales(rows if four else 0, columns // 16, tiles, x)
    return (
        x.new_empty(codes, dtype=torch.uint8),
        scales.view(e4m3),
        x.new_empty((rows, 1) if per_token else (), dtype=torch.float32),
        x.new_empty((rows, columns) if decode else (0,), dtype=torch.bfloat16),
        x.new_empty((rows, columns) if eight else (0,), dtype=e4m3),
        x.new_empty(() if eight else (0,), dtype=torch.float32),
    )


@quantize.register_fake
def _(
    x, amax, seed, stream, grid_max, scale_cap, candidates, stochastic, block_rows, decode, per_token=False,
    tiles=False, eight=0.0,
):  # fmt: skip
    return empty_results(x, decode, per_token, tiles, eight, True)


@operator("quantize_both(Tensor x, Tensor? amax) -> (Tensor, Tensor, Tensor)")
def quantize_both(x: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds x to E5M2 with one scale, for both products of a gradient. Returns (codes, transposed, tensor_scale).

    x:            FP32 or BF16 (R, C), R a multiple of 4 and C of 16
    amax:         max |x|, () in FP32 or x's dtype. With None it is found first.
    codes:        float8_e5m2 (R, C), x / tensor_scale
    transposed:   float8_e5m2 (C, R)
    tensor_scale: float32 ()
    Per BF16 element it reads 2 bytes and writes 1 + 1. Raises ValueError for another shape or dtype of x.
    """
    check(x, 1)
    if x.shape[0] % 4:
        raise ValueError(f"nvfp4::quantize_both: got {x.shape[0]} rows, expected a multiple of 4; pad them with zeros")
    x = x.contiguous()
    amax = amax_bits(x) if amax is None else amax.float().view(torch.int32)
    codes, transposed, tensor_scale = empty_both(x)
    groups, columns = x.shape[0] // 4, x.shape[1]
    # Without rows one program still writes the scale.
    grid = max(1, triton.cdiv(columns, COLUMNS.value)), max(1, triton.cdiv(groups, GROUPS.value))
    results = codes, transposed.view(torch.int32), tensor_scale
    quantize_both_kernel[grid](x, amax, *results, groups, columns, num_warps=8, **NO_FUSION)
    return codes, transposed, tensor_scale


@quantize_both.register_fake
def empty_both(x, amax=None):
    codes, transposed = (x.new_empty(shape, dtype=torch.float8_e5m2) for shape in (x.shape, x.shape[::-1]))
    return codes, transposed, x.new_empty((), dtype=torch.float32)


def check(x: torch.Tensor, block_rows: int) -> None:
    """Raises ValueError if the kernels do not take x or block_rows."""
    if x.dim() != 2 or x.shape[1] % 16 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"nvfp4::quantize: got {x.dtype} {tuple(x.shape)}, expected FP32 or BF16 (R, K), K % 16 == 0")
    if block_rows not in (1, 16):
        raise ValueError(f"nvfp4::quantize: block_rows is {block_rows}, expected 1 or 16")
