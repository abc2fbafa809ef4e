"""A second, slow implementation of the quantizers, one element at a time: what the tests compare the first one with.

It shares no code and no torch operation with nanochat_fp4: grids are lists of exact fractions, rounding is a search for
the nearest entry, Philox works on Python integers, and the FP32 operations that the specification names are numpy
scalars. Only the specification is common to both (the docstrings of quantizers.py and philox.py, the paper).
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

f32 = np.float32
TENSOR_SCALE_MIN = f32(2.0**-116)  # also of E8M3: the end of what the format promises


# --------------------------------------------------------------------------------------------------------------------
# Grids, from the definitions of the formats.


def minifloat(bits: int, exponent_bits: int, mantissa_bits: int) -> Fraction:
    """The value of an unsigned minifloat with IEEE's bias and subnormals, and no infinities."""
    bias = 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = bits >> mantissa_bits, bits & (2**mantissa_bits - 1)
    if exponent == 0:
        return Fraction(mantissa, 2**mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 2**mantissa_bits)) * Fraction(2) ** (exponent - bias)


E2M1 = [minifloat(code, 2, 1) for code in range(8)]
E4M3 = [minifloat(code, 4, 3) for code in range(127)]  # 0x7F is NaN


def nearest(value: Fraction, grid: list[Fraction]) -> int:
    """Index of the nearest entry, the even one on a tie; beyond the last entry, the last."""
    if value >= grid[-1]:
        return len(grid) - 1
    above = next(i for i, entry in enumerate(grid) if entry > value)
    low, high = value - grid[above - 1], grid[above] - value
    if low == high:
        return above - 1 if (above - 1) % 2 == 0 else above
    return above - 1 if low < high else above


def floor_log2(value: Fraction) -> int:
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= value else exponent - 1


def round_e8m3(scale: np.float32) -> np.float32:
    """To 4 significant bits, ties to even, any exponent down to 2^-116, 0 below."""
    if scale < TENSOR_SCALE_MIN:
        return f32(0)
    step = Fraction(2) ** (floor_log2(Fraction(float(scale))) - 3)
    return f32(float(round(Fraction(float(scale)) / step) * step))  # round(Fraction) takes ties to even


# --------------------------------------------------------------------------------------------------------------------
# Philox4x32-10 on Python integers.


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return tuple(c)


def draw(seed: int, index: int, purpose: int, stream: int) -> tuple[int, int, int, int]:
    seed &= 2**64 - 1
    return philox((index & 0xFFFFFFFF, index >> 32, purpose, stream), (seed & 0xFFFFFFFF, seed >> 32))


def element_uniform(seed: int, element: int, stream: int, candidate: int) -> Fraction:
    """16 bits each, eight to a call, the low half of a word first; (k + 1/2) / 2^16."""
    word = draw(seed, element // 8, 2 + candidate, stream)[element % 8 // 2]
    return (Fraction(word >> 16 if element % 2 else word & 0xFFFF) + Fraction(1, 2)) / 2**16


def scale_uniform(seed: int, row: int, block: int, blocks: int, stream: int) -> Fraction:
    """The upper 24 bits of a word, four to a call: neighbours in two rows that are 8 apart; `blocks` in a row."""
    call = (row // 16 * 8 + row % 8) * (blocks // 2) + block // 2
    return Fraction(draw(seed, call, 1, stream)[row // 8 % 2 * 2 + block % 2] >> 8, 2**24)


# --------------------------------------------------------------------------------------------------------------------
# The quantizers.


@dataclass
class Spec:
    grid_max: float
    cap: float
    candidates: tuple[float, ...] = (1.0,)
    stochastic: bool = False
    square: bool = False
    eden: bool = False


SIX = (1.0, 3 / 2, 15 / 16, 11 / 8, 13 / 8, 17 / 16)
SPECS = {  # the table of the design, written down a second time
    "rtn": Spec(6, 448),
    "four_over_six": Spec(6, 256, (1.0, 1.5)),
    "rtn_16x16": Spec(6, 448, square=True),
    "four_over_six_16x16": Spec(6, 256, (1.0, 1.5), square=True),
    "sr": Spec(6 * 16 / 17, 448, stochastic=True),
    "sr_four_over_six": Spec(6 * 16 / 17, 256, (1.0, 1.5), stochastic=True),
    "scale_search_3": Spec(6, 256, SIX[:3]),
    "scale_search_6": Spec(6, 256, SIX),
    "ms_eden": Spec(6 / (17 / 16 * 0.93), 256, eden=True),
    "ms_eden_search_3": Spec(6, 256, SIX[:3], eden=True),
    "ms_eden_search_6": Spec(6, 256, SIX, eden=True),
}


def power_of_two_below(value: np.float32) -> np.float32:
    """The power of two at or below value, at least 2^-116."""
    if value < TENSOR_SCALE_MIN:
        return TENSOR_SCALE_MIN
    return f32(float(Fraction(2) ** floor_log2(Fraction(float(value)))))


def fixed(x: np.float32, y: np.float32, bits: int) -> int:
    """x * y in units of 2^-bits, to nearest, ties to even."""
    return round(Fraction(float(x)) * Fraction(float(y)) * 2**bits)


def round_element(y: np.float32, uniform: Fraction | None) -> np.float32:
    """To E2M1: nearest, or stochastically with a uniform."""
    sign = f32(np.copysign(1, y))
    magnitude = Fraction(float(abs(y)))
    if uniform is None:
        return sign * f32(float(E2M1[nearest(magnitude, E2M1)]))
    spacing = Fraction(1, 2) if magnitude < 2 else Fraction(1) if magnitude < 4 else Fraction(2)
    # FP32 adds the noise, centred, to the signed value in units of the spacing.
    noisy = f32(f32(float(y) / float(spacing)) + f32(float(uniform - Fraction(1, 2))))
    return sign * f32(float(min(abs(round(Fraction(float(noisy))) * spacing), E2M1[-1])))


def code_of(q: np.float32) -> int:
    return E2M1.index(Fraction(float(abs(q)))) | (8 if np.signbit(q) else 0)


def quantize(rows: np.ndarray, name: str, *, seed: int = 0, stream: int = 0, norm: float = 1.0):
    """rows: float32 (R, K); where they were rotated, the sums without the factor 1 / sqrt(128), which is norm.

    Returns codes (R, K) 0..15, scales as E4M3 bytes (R, K/16), tensor_scale as a numpy float32.
    """
    assert name in SPECS, f"add {name!r} to SPECS in tests/_scalar_reference.py (CONTRIBUTING, a rounding, step 2)"
    spec = SPECS[name]
    count, width = rows.shape
    groups = width // 16
    with np.errstate(all="ignore"):
        norm = f32(norm)
        tensor_scale = f32(f32(np.abs(rows).max()) * norm) / f32(spec.grid_max * spec.cap)
        tensor_scale = max(tensor_scale, TENSOR_SCALE_MIN)
        if spec.eden:
            below = power_of_two_below(tensor_scale)
            tensor_scale = below if below == tensor_scale else f32(below * 2)
        inverse = f32(1) / tensor_scale

        codes = np.zeros((count, width), dtype=np.uint8)
        scale_bytes = np.zeros((count, groups), dtype=np.uint8)
        height = 16 if spec.square else 1
        for top in range(0, count, height):
            block_rows = range(top, min(top + height, count))
            per_group = []
            for g in range(groups):
                block = {(r, g * 16 + i): rows[r, g * 16 + i] for r in block_rows for i in range(16)}
                factor = norm if spec.eden else f32(inverse * norm)
                q, y, scale = best_candidate(block, factor, spec, seed, stream, width)
                for (r, c), value in q.items():
                    codes[r, c] = code_of(value)
                if spec.eden:
                    per_group.append((y, q, scale))
                else:
                    for r in block_rows:
                        scale_bytes[r, g] = nearest(Fraction(float(scale)), E4M3)
            if spec.eden:
                for start in range(0, groups, 8):
                    correction = eden_correction(per_group[start : start + 8])
                    for g in range(start, start + 8):
                        aligned = f32(f32(per_group[g][2] * inverse) * correction)
                        uniform = scale_uniform(seed, top, g, groups, stream)
                        scale_bytes[top, g] = stochastic_e4m3(aligned, uniform)
    return codes, scale_bytes, tensor_scale


def best_candidate(block: dict, factor: np.float32, spec: Spec, seed: int, stream: int, width: int):
    """(element -> E2M1 value, element -> the value it was rounded from, scale) of the candidate with the lowest squared
    error, the first on a tie. What is rounded is factor times an element of the block, over the scale.

    Errors are summed in units of the candidate's scale, and compared in units of a power of two.
    """
    amax = f32(max(abs(v) for v in block.values()) * factor)
    base = f32(amax / f32(spec.grid_max))
    best = None
    for number, multiple in enumerate(spec.candidates):
        target = f32(base * f32(multiple))
        if spec.eden:
            scale = round_e8m3(target)
        else:
            at = nearest(Fraction(float(target)), E4M3)
            if amax > f32(6 if spec.stochastic else 6.875) * f32(float(E4M3[at])):  # only subnormal scales
                at += 1
            scale = f32(float(E4M3[at]))
        reciprocal = f32((f32(1) / scale if scale > 0 else f32(0)) * factor)
        y = {at: f32(value * reciprocal) for at, value in block.items()}
        q, error = {}, 0
        for (r, c), value in y.items():
            uniform = element_uniform(seed, r * width + c, stream, number) if spec.stochastic else None
            q[r, c] = round_element(value, uniform)
            difference = f32(q[r, c] - value)
            error += fixed(difference, difference, 18)
        relative = f32(scale * (f32(1) / power_of_two_below(base)))
        error = f32(f32(error) * f32(relative * relative))
        if best is None or error < best[0]:
            best = (error, q, y, scale)
    return best[1:]


def eden_correction(blocks: list) -> np.float32:
    """S of one rotation group: 8 blocks of (y, q, scale), summed in units of their scale and weighted with its square
    over that of eight times the power of two below the largest."""
    eighth_of_largest = f32(0.125) / power_of_two_below(max(scale for _, _, scale in blocks))
    xx = xq = 0
    for y, q, scale in blocks:
        weight = f32(scale * eighth_of_largest)
        weight = f32(weight * weight)
        xx += fixed(f32(sum(fixed(v, v, 16) for v in y.values())), weight, 0)
        xq += fixed(f32(sum(fixed(v, q[at], 16) for at, v in y.items())), weight, 0)
    return f32(f32(xx) / f32(xq)) if xq > 0 else f32(1)


def stochastic_e4m3(scale: np.float32, uniform: Fraction) -> int:
    """To one of the two neighbouring E4M3 values: up with the probability that makes the mean right."""
    exact = min(Fraction(float(scale)), E4M3[-1])
    below = max(i for i, entry in enumerate(E4M3) if entry <= exact)
    if below == len(E4M3) - 1:
        return below
    return below + (uniform < (exact - E4M3[below]) / (E4M3[below + 1] - E4M3[below]))
