"""Device functions that the kernels share. They repeat the roundings of nanochat_fp4.nvfp4.quantizers, operation for
operation.

Everything is computed in FP32 and int32. One source therefore serves every GPU, including those that cannot convert to
FP8 or FP4. Two techniques recur:

* Rounding to a grid by a magic number. If e is a power of two, (y + e * C) - e * C rounds y to a multiple of
  e * ulp(C), ties to even. C = 1.5 * 2^22 gives E2M1's spacing e / 2, and C = 1.5 * 2^20 gives E4M3's spacing e / 8.
* Fixed-point sums. The sum v + M has v, rounded to M's ulp, in its low mantissa bits. As integers these bits add up
  exactly in any order, so the result does not depend on how a block is distributed over threads.

Triton's `/` is an approximate division. Every division here that must be exact is therefore div_rn, or is corrected by
fma (`reciprocal`, `divide`). The kernels are compiled without fused multiply-add, except where fma is written.
"""

import functools
import os

import torch
import triton
import triton.language as tl

# Some functions need another path in Triton's interpreter. It multiplies BF16 operands of a dot as if they were
# integers, and it takes seconds for a reduction with a combine function of one's own.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

E2M1_MAX = tl.constexpr(6.0)
E2M1_OVERFLOW = tl.constexpr(6.875)
E4M3_MAX = tl.constexpr(448.0)
TENSOR_SCALE_MIN = tl.constexpr(2.0**-116)
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
E5M2_MAX = tl.constexpr(57344.0)
E5M2_MIN_NORMAL = tl.constexpr(2.0**-14)
FP8_AMAX_MIN = tl.constexpr(1e-30)  # This is quantizers.FP8_AMAX_MIN.
ROUND_MAGIC = tl.constexpr(1.5 * 2.0**23)  # Its ulp is 1 on [2^23, 2^24): the sum's low bits are the rounded integer.
E2M1_MAGIC = tl.constexpr(1.5 * 2.0**22)
E4M3_MAGIC = tl.constexpr(1.5 * 2.0**20)
E5M2_MAGIC = tl.constexpr(1.5 * 2.0**21)
ERROR_MAGIC = tl.constexpr(48.0)  # Its ulp is 2^-18 on [32, 64). Squared errors are below 16.
ERROR_MAGIC_BITS = tl.constexpr(0x42400000)
PRODUCT_MAGIC = tl.constexpr(192.0)  # Its ulp is 2^-16 on [128, 256). Products are below 64.
PRODUCT_MAGIC_BITS = tl.constexpr(0x43400000)
INTEGER_MAGIC = tl.constexpr(1.5 * 2.0**23)  # Its ulp is 1 on [2^23, 2^24).
INTEGER_MAGIC_BITS = tl.constexpr(0x4B400000)
# Values of HARDWARE. With CONVERTS_E4M3 an instruction converts to E4M3 (sm_89 and later). With CONVERTS_E2M1 another
# one converts to E2M1, too (sm_100a, sm_120a).
CONVERTS_E4M3, CONVERTS_E2M1 = tl.constexpr(1), tl.constexpr(2)
# What random numbers are drawn for (philox.py): signs of a rotation, scales, and elements.
SIGN, SCALE, SR_ELEMENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@functools.cache
def inverse(constant: float) -> float:
    """Returns 1 / constant. The constant and the quotient are rounded to FP32."""
    return float(torch.tensor(1.0) / torch.tensor(constant, dtype=torch.float32))


@triton.jit
def bits(x):
    """Returns the bits of float32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(x):
    """Returns the float32 that has these bits, int32."""
    return x.to(tl.float32, bitcast=True)


@triton.jit
def rounded_to(x, dtype: tl.constexpr):
    """Converts float32 to dtype, BF16 or FP32, rounding to nearest. The interpreter's own conversion would truncate."""
    if INTERPRETED and dtype == tl.bfloat16:
        word = bits(x)
        x = tl.where(x == x, from_bits((word + 0x7FFF + ((word >> 16) & 1)) & ~0xFFFF), x)
    return x.to(dtype)


@triton.jit
def power_of_two_floor(x):
    """Returns 2^floor(log2 |x|), and 0 for zero."""
    return from_bits(bits(x) & 0x7F800000)


@triton.jit
def power_of_two_ceil(x):
    """Returns the smallest power of two that is not below x, for x >= 0, and 0 for zero."""
    floor = power_of_two_floor(x)
    return tl.where(floor == x, x, floor * 2.0)


@triton.jit
def scale_address(row, group, groups, TILES: tl.constexpr):
    """Returns the address of the scale of block `group` in a row of `groups` blocks. Scales are row-major, or in tiles
    of 128x4 as format.swizzle_scales orders them (TILES)."""
    if TILES:
        tile = row // 128 * ((groups + 3) // 4) + group // 4
        return tile * 512 + row % 32 * 16 + row // 32 % 4 * 4 + group % 4
    return row * groups + group


@triton.jit
def power_of_two_reciprocal(x):
    """Returns 1 / x exactly for a power of two, by negating its exponent."""
    return from_bits(0x7F000000 - bits(x))


@triton.jit
def reciprocal(scale):
    """Returns 1 / scale, correctly rounded, for scales with 4 significant bits, and 0 for 0.

    It is an approximate reciprocal and one Newton step. The result is correct for all 8 significands (tested), and it
    takes a third of the instructions of a true division.
    """
    safe = tl.maximum(scale, TENSOR_SCALE_MIN)
    r = 1.0 / safe
    if not INTERPRETED:
        r = tl.fma(r, tl.fma(-safe, r, 1.0), r)
    return tl.where(scale > 0, r, 0.0)


@triton.jit
def divide(x, CONSTANT: tl.constexpr, INVERSE: tl.constexpr):
    """Returns x / CONSTANT, correctly rounded, by Markstein's method. All significands are tested for the constants in
    use. INVERSE is 1 / CONSTANT in FP32 (`inverse`).
    """
    if INTERPRETED:
        return tl.math.div_rn(x, CONSTANT)
    quotient = x * INVERSE
    return tl.fma(tl.fma(-quotient, CONSTANT, x), INVERSE, quotient)


@triton.jit
def tensor_scale_of(amax, DIVISOR: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Returns the tensor_scale of a tensor with this amax: amax / DIVISOR, but at least TENSOR_SCALE_MIN. With
    POWER_OF_TWO it is rounded up to a power of two."""
    scale = tl.maximum(tl.math.div_rn(amax, DIVISOR), TENSOR_SCALE_MIN, propagate_nan=tl.PropagateNan.ALL)
    return power_of_two_ceil(scale) if POWER_OF_TWO else scale


@triton.jit
def round_e2m1(y):
    """Rounds y to the nearest E2M1 value, ties to even, as float32. Block scales keep |y| below 7. The sign of zero is
    lost, and `pack` takes it from x."""
    e = tl.maximum(power_of_two_floor(y), 1.0)
    return tl.fma(e, -E2M1_MAGIC, tl.fma(e, E2M1_MAGIC, y))


@triton.jit
def stochastic_round_e2m1(y, noise):
    """Rounds y to E2M1 stochastically. The noise is in (-1/2, 1/2), in units of the grid's spacing."""
    e = tl.minimum(tl.maximum(power_of_two_floor(y), 1.0), 4.0)
    q = tl.fma(e, -E2M1_MAGIC, tl.fma(e, E2M1_MAGIC, tl.fma(0.5 * e, noise, y)))
    return tl.minimum(tl.maximum(q, -E2M1_MAX), E2M1_MAX)


@triton.jit
def decode_e2m1(code):
    """Converts a 4-bit code, int32 from 0 to 15, to the E2M1 value in float32."""
    return from_bits(((code & 7) << 22) | ((code & 8) << 28)) * 2.0**126


@triton.jit
def round_e4m3(scale, HARDWARE: tl.constexpr):
    """Rounds a non-negative float32 to the nearest E4M3 value, as float32. Values above 448 become 448."""
    scale = tl.minimum(scale, E4M3_MAX)
    if HARDWARE >= CONVERTS_E4M3:
        return scale.to(tl.float8e4nv).to(tl.float32)
    e = tl.maximum(power_of_two_floor(scale), E4M3_MIN_NORMAL)
    return tl.fma(e, -E4M3_MAGIC, tl.fma(e, E4M3_MAGIC, scale))


@triton.jit
def round_e8m3(scale):
    """Rounds a non-negative float32 to 3 mantissa bits. Values below 2^-116 become 0."""
    word = bits(tl.where(scale < TENSOR_SCALE_MIN, 0.0, scale))
    return from_bits((word + 0x7FFFF + ((word >> 20) & 1)) & ~0xFFFFF)


@triton.jit
def stochastic_round_m3(scale, word):
    """Rounds a non-negative scale to 3 mantissa bits stochastically.

    It is rounded up if the random `word`, as a fraction of 2^32, is below the part that is cut off, as a fraction of
    the spacing. To compare the two, the complement of word's 20 highest bits is added to the mantissa, whose carry
    rounds up. Lower bits of word cannot change the comparison.
    """
    rounded = from_bits((bits(scale) + ((word ^ 0xFFFFFFFF) >> 12).to(tl.int32)) & ~0xFFFFF)
    return tl.where(scale == scale, rounded, scale)


@triton.jit
def stochastic_round_e4m3(scale, word):
    """Rounds a non-negative scale to E4M3 stochastically, by the random `word`, as float32. Scales above 448 become
    448."""
    scale = tl.minimum(scale, E4M3_MAX)
    e = tl.maximum(power_of_two_floor(scale), E4M3_MIN_NORMAL)
    n = scale * (8.0 * power_of_two_reciprocal(e))
    floor = tl.floor(n)
    up = tl.where(unit_interval(word) < n - floor, 1.0, 0.0)
    return (floor + up) * (0.125 * e)


@triton.jit
def encode_e4m3(scale, HARDWARE: tl.constexpr):
    """Returns the byte, uint8, of a non-negative E4M3 value that is given as float32. NaN stays NaN (0x7F)."""
    if HARDWARE >= CONVERTS_E4M3:
        return scale.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    byte = bits(scale * 2.0**-120) >> 20
    return tl.where(scale == scale, byte, 0x7F).to(tl.uint8)


@triton.jit
def to_e4m3(x, HARDWARE: tl.constexpr):
    """Rounds float32 to the nearest E4M3 number and returns its byte, uint8. Numbers beyond 448 become 448 with their
    sign, and NaN stays NaN."""
    if HARDWARE >= CONVERTS_E4M3:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), E4M3_MAX)
    e = tl.maximum(power_of_two_floor(magnitude), E4M3_MIN_NORMAL)
    q = tl.fma(e, -E4M3_MAGIC, tl.fma(e, E4M3_MAGIC, magnitude))
    byte = tl.where(x == x, bits(q * 2.0**-120) >> 20, 0x7F)
    return (byte | ((bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def clip_e5m2(x):
    """Clips float32 to the largest E5M2 numbers. NaN stays NaN."""
    x = tl.maximum(x, -E5M2_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, E5M2_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def to_e5m2(x):
    """Rounds float32, clipped, to the nearest E5M2 number. Triton's interpreter truncates: there x is rounded first."""
    if INTERPRETED:
        e = tl.maximum(power_of_two_floor(x), E5M2_MIN_NORMAL)
        magnitude = tl.fma(e, -E5M2_MAGIC, tl.fma(e, E5M2_MAGIC, tl.abs(x)))
        x = from_bits(bits(magnitude) | (bits(x) & (-1 << 31)))
    return x.to(tl.float8e5)


@triton.jit
def e5m2_byte(x):
    """Rounds float32, clipped, to E5M2. Returns the number's byte in an int32."""
    if INTERPRETED:
        return to_e5m2(x).to(tl.uint8, bitcast=True).to(tl.int32)
    # ptxas 12.8 crashes on words that are made of bytes. An E5M2 number is the upper byte of an FP16.
    return (to_e5m2(x).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) >> 8) & 0xFF


@triton.jit
def fp8_factor(amax, LARGEST: tl.constexpr):
    """Returns what a tensor with this amax is multiplied by before it is rounded to FP8 numbers up to LARGEST. The
    reference divides in FP64 and rounds to FP32. For FP32 operands this gives the quotient that is rounded once."""
    return tl.where(amax < FP8_AMAX_MIN, LARGEST / FP8_AMAX_MIN, tl.math.div_rn(LARGEST, amax))


@triton.jit
def decode_e4m3(byte):
    """Converts an E4M3 byte, uint8 with a clear sign bit, to float32."""
    value = byte.to(tl.int32)
    return tl.where(value == 0x7F, float("nan"), from_bits(value << 20) * 2.0**120)


@triton.jit
def half_of_e4m3(byte, HARDWARE: tl.constexpr):
    """Converts an E4M3 byte, uint8, to float16. It is exact, but for the sign of 0."""
    if HARDWARE >= CONVERTS_E4M3:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    magnitude = decode_e4m3(byte & 0x7F)
    return tl.where(byte < 0x80, magnitude, -magnitude).to(tl.float16)


@triton.jit
def next_e4m3(scale):
    """Returns the E4M3 value that follows scale, an E4M3 value below 448."""
    return scale + 0.125 * tl.maximum(power_of_two_floor(scale), E4M3_MIN_NORMAL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_with_nan(x):
    """Returns max |x| over the last axis of (NB, 16). The result is NaN if one of the values is NaN. tl.max would
    ignore it."""
    if INTERPRETED:
        return from_bits(tl.max(bits(x) & 0x7FFFFFFF, axis=1))
    return tl.reduce(tl.abs(x), 1, _larger)


@triton.jit
def fma(x, y, z):
    """Returns x * y + z with one rounding. The interpreter's own fma rounds twice, so there the product is computed in
    FP64, in which it is exact."""
    if INTERPRETED:
        return (x.to(tl.float64) * y.to(tl.float64) + z).to(tl.float32)
    return tl.fma(x, y, z)


@triton.jit
def error_sum(difference, L: tl.constexpr):
    """Returns the sum of squares over each block of (NB, L), as int32 (NB,) in units of 2^-18. Each square must be
    below 16."""
    fixed = bits(fma(difference, difference, ERROR_MAGIC))
    # The bits of L magic numbers are subtracted. Their sum is taken modulo 2^32, because int32 wraps around.
    return tl.sum(fixed, axis=1) - ((L * ERROR_MAGIC_BITS + 2**31) % 2**32 - 2**31)


@triton.jit
def product_sum(x, y):
    """Returns the sum of x * y over each block of (NB, 16), as float32 (NB,) in units of 2^-16. Each product is in
    [0, 64)."""
    fixed = bits(fma(x, y, PRODUCT_MAGIC))
    return (tl.sum(fixed, axis=1) - ((16 * PRODUCT_MAGIC_BITS + 2**31) % 2**32 - 2**31)).to(tl.float32)


@triton.jit
def convert_e2m1(y, NB: tl.constexpr):
    """Rounds y (NB, 16) to the nearest E2M1 values, ties to even. Returns codes int32 (NB, 2), packed as by `pack`, and
    the values as float32 (NB, 16).

    One instruction of sm_100a and sm_120a converts two values, and another one converts them back. NaN becomes 6.
    """
    even, odd = tl.split(tl.reshape(y, (NB, 2, 2, 2, 2)))
    y0, y2 = tl.split(even)
    y1, y3 = tl.split(odd)
    a, e = tl.split(y0)
    b, f = tl.split(y1)
    c, g = tl.split(y2)
    d, h = tl.split(y3)
    word, a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
        """{
        .reg .b8 p, q, r, s; .reg .b32 v; .reg .b16 l, u;
        cvt.rn.satfinite.e2m1x2.f32 p, $10, $9;
        cvt.rn.satfinite.e2m1x2.f32 q, $12, $11;
        cvt.rn.satfinite.e2m1x2.f32 r, $14, $13;
        cvt.rn.satfinite.e2m1x2.f32 s, $16, $15;
        mov.b32 $0, {p, q, r, s};
        cvt.rn.f16x2.e2m1x2 v, p; mov.b32 {l, u}, v; cvt.f32.f16 $1, l; cvt.f32.f16 $2, u;
        cvt.rn.f16x2.e2m1x2 v, q; mov.b32 {l, u}, v; cvt.f32.f16 $3, l; cvt.f32.f16 $4, u;
        cvt.rn.f16x2.e2m1x2 v, r; mov.b32 {l, u}, v; cvt.f32.f16 $5, l; cvt.f32.f16 $6, u;
        cvt.rn.f16x2.e2m1x2 v, s; mov.b32 {l, u}, v; cvt.f32.f16 $7, l; cvt.f32.f16 $8, u;
        }""",
        "=r,=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f",
        [a, b, c, d, e, f, g, h],
        dtype=(tl.int32,) + (tl.float32,) * 8,
        is_pure=True,
        pack=1,
    )
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return word, tl.reshape(tl.join(even, odd), (NB, 16))


@triton.jit
def decode_pairs(byte, scale):
    """Decodes the two codes of each byte, uint8, and multiplies them by the two FP16 halves of scale, int32. Returns
    pairs of FP16 as int32. All tensors have one shape.

    One instruction of sm_100a and sm_120a converts a byte.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b8 p, q, r, s; .reg .b32 v;
        mov.b32 {p, q, r, s}, $4;
        cvt.rn.f16x2.e2m1x2 v, p; mul.rn.f16x2 $0, v, $5;
        cvt.rn.f16x2.e2m1x2 v, q; mul.rn.f16x2 $1, v, $6;
        cvt.rn.f16x2.e2m1x2 v, r; mul.rn.f16x2 $2, v, $7;
        cvt.rn.f16x2.e2m1x2 v, s; mul.rn.f16x2 $3, v, $8;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r",
        [byte, scale],
        dtype=tl.int32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def row_sum(x, weight):
    """Returns the sums of x * weight over every 8 blocks of (512,), as float32 (64,). Each product is in [0, 2^22) and
    is rounded to an integer."""
    fixed = tl.reshape(bits(fma(x, weight, INTEGER_MAGIC)) - INTEGER_MAGIC_BITS, (64, 8))
    return tl.sum(fixed, axis=1).to(tl.float32)


@triton.jit
def pack(q, x, NB: tl.constexpr):
    """Packs E2M1 values q (NB, 16) into codes int32 (NB, 2). Element 8 i + j of a block is in bits 4 j to 4 j + 3 of
    word i. The signs are those of x, because q has lost the sign of zero.
    """
    # |q| * 2^-126 has the bits of E2M1's exponent and mantissa below the sign. 0.5 becomes an FP32 subnormal number, as
    # it is a subnormal number of E2M1.
    magnitude = tl.reshape(bits(tl.abs(q) * 2.0**-126), (NB, 2, 8))
    sign = tl.reshape(bits(x), (NB, 2, 8))
    shift = tl.arange(0, 8)[None, None, :] * 4
    code = ((magnitude >> 22) | ((sign >> 28) & 8)) << shift
    return tl.sum(code, axis=2)


@triton.jit
def philox4(seed, index, PURPOSE: tl.constexpr, stream):
    """Returns four random words, uint32, for each index, int64."""
    low = (index & 0xFFFFFFFF).to(tl.uint32)
    high = (index >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0 + PURPOSE, low * 0 + stream)


@triton.jit
def scale_words(seed, row16, pair, pairs, stream, ROWS: tl.constexpr, PAIRS: tl.constexpr):
    """Returns random words uint32 (ROWS, 2 PAIRS), one for each scale. They are those of philox.Noise.scales.

    The scales belong to ROWS rows, a multiple of 16, from row 16 row16 on, and to PAIRS pairs of blocks from `pair` on.
    A whole row has `pairs` pairs.

    One call of Philox makes the words of a pair in two rows that are 8 apart, because in a tensor core's accumulator
    the same thread holds both rows.
    """
    line = tl.arange(0, ROWS // 2 * PAIRS)
    row = row16.to(tl.int64) * 8 + line // PAIRS
    a, b, c, d = philox4(seed, row * pairs + pair + line % PAIRS, SCALE, stream)
    words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS // 16, 8, PAIRS, 2, 2))
    return tl.reshape(tl.permute(words, (0, 3, 1, 2, 4)), (ROWS, 2 * PAIRS))


@triton.jit
def unit_interval(word):
    """Converts 32 random bits, uint32, to a multiple of 2^-24 in [0, 1)."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 2.0**-24


@triton.jit
def element_noise(seed, index, CANDIDATE: tl.constexpr, stream, NB: tl.constexpr):
    """Returns a uniform random number minus 1/2 for each element, float32 (NB, 16). An index, int64 (NB, 2), stands for
    the eight elements from 8 * index to 8 * index + 7."""
    a, b, c, d = philox4(seed, index, SR_ELEMENT + CANDIDATE, stream)
    word = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.int32, bitcast=True)
    half = tl.reshape(tl.join(word & 0xFFFF, (word >> 16) & 0xFFFF), (NB, 16))
    # k is put into the mantissa of 1 + k / 2^16, so that no integer is converted to a float.
    return from_bits(0x3F800000 | (half << 7)) - (1.5 - 2.0**-17)


@triton.jit
def keep_eight_bits(x, inverse_step, seed, index, NB: tl.constexpr):
    """Rounds x >= 0 (NB, 16) to a whole number of steps stochastically, as uint8. relu_squared keeps relu(x) this way.
    `index` is that of element_noise."""
    rounded = tl.minimum(x * inverse_step + element_noise(seed, index, 0, 0, NB), 255.0) + ROUND_MAGIC
    return bits(rounded).to(tl.uint8)
