"""The reference quantizers: every rounding of the paper's Table 1, and the scale search, in plain PyTorch.

A rounding is four independent choices (`Rounding`):

- elements are rounded to the E2M1 grid to nearest, or stochastically
- two constants, s and cap, align the scales
- one or more multiples of the block scale are tried (static, 4/6, search)
- MS-EDEN corrects the scales afterwards, so that a rotated operand is unbiased, if the rotation mixes its values

    tensor_scale = amax / (s * cap)                                         FP32
    u            = x / tensor_scale                                         so |u| <= s * cap
    scale_b      = RTN_E4M3(m * amax_b(|u|) / s)       for each candidate m, per block b of 16
    q            = RTN_E2M1 or SR_E2M1 (u / scale_b)
    the candidate with the lowest sum of (q * scale_b - u)^2 in its block wins, the first one on a tie

MS-EDEN (paper, Algorithm 1; post hoc range alignment, Section 7) rotates first, and then cannot know amax without a
second pass. The scale is therefore rounded to E8M3, with 3 mantissa bits and any exponent. A second step over scales
alone shifts the scale into E4M3's range, with the correction S and one stochastic rounding:

    y = RHT(x),  p_b = RTN_E8M3(m * amax_b(|y|) / s),  q = RTN_E2M1(y / p_b)          the search as above
    S = <y, y> / <y, q * p_b>                                               per rotation group of 128
    tensor_scale = amax / (s * cap), rounded up to a power of two
    scale_b = SR_E4M3(S * p_b / tensor_scale)

tensor_scale is a power of two, because only a shift leaves the 3 mantissa bits of p_b on E4M3's grid. S is close to 1,
so a scale that was on the grid is rounded with little noise. With tensor_scale = amax / (s * cap) itself the error is
5% to 12% larger. `ms_eden_direct` is Algorithm 1 to the letter: align, round to E4M3, then correct. Both forms have the
same error.

Other systems, for comparison. MXFP4 and MXFP8 (MX_ROUNDINGS) differ in the scale alone. The scale is a power of two
(E8M0) for 32 values, and tensor_scale is a constant. The Open Compute Project's specification rounds the scale down;
rounding up clips nothing. FP8 (FP8_ROUNDINGS) has tensor_scale alone, or an FP32 scale for each block of 128. All of
these have no kernels and run as this reference on every machine. FP8 with one scale has a GEMM (gemm.py).

Bit-exactness. The kernels compute the same FP32 operations. Division happens once a block, and elements are multiplied
by the reciprocal. Sums over a block are taken in fixed point (`_fixed_sum`), so neither order nor layout can change
them. Their unit is the block's scale, so magnitudes of 1e30 and 1e-30 neither overflow nor vanish.

Unbiasedness. `sr` is unbiased, and so are the ms_eden roundings of groups with many comparable values, E4M3's
subnormal range included. One rotation takes a group with a few large values to numbers of a few magnitudes, and their
rounding is no noise: E[x1] = 0 for x = (1, 0.1, 0, ...). Two rotations in a row repair that (recipes.Gemm.rotations).
A scale that would clip values after rounding to nearest takes the next larger E4M3 value. MS-EDEN's scales are rounded
stochastically from E8M3, which does not underflow. `sr_four_over_six` picks the luckier of two stochastic draws and is
biased (the paper, Section 4.2).
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from nanochat_fp4.nvfp4.format import (
    BLOCK,
    E2M1_MAX,
    E4M3_MANTISSA_BITS,
    E4M3_MAX,
    E4M3_MIN_EXPONENT,
    TENSOR_SCALE_MIN,
    NVFP4Tensor,
    encode_e2m1,
    pack,
)
from nanochat_fp4.nvfp4.hadamard import RHT_DIM, rotate, rotated_sums
from nanochat_fp4.nvfp4.philox import Noise

# Rounding a scale to nearest lowers the scale by a factor 16/17 at most. Elements reach 6 at most; SR never clips.
SR_GRID_MAX = 6.0 * 16 / 17
# Room above the largest scale: for 4/6's x1.5, the search's x1.625 and EDEN's correction (the paper, Section 3.3).
SEARCH_SCALE_CAP = 256.0
# The clipping that minimizes MS-EDEN's error with one candidate (the paper's code; recomputed in the tests).
MS_EDEN_GRID_MAX = 6.0 / (17 / 16 * 0.93)

E2M1_OVERFLOW = 6.875  # between the largest element after a rounded normal scale (6 * 17/15) and 7, which rounds to 8

FOUR_OVER_SIX = (1.0, 3 / 2)  # grid maximum 6, or 4: a scale 1.5 times larger (Cook et al., 2025)
SEARCH_3 = (1.0, 3 / 2, 15 / 16)
SEARCH_6 = (1.0, 3 / 2, 15 / 16, 11 / 8, 13 / 8, 17 / 16)

# Fixed-point resolution of sums over a block, in units of the block's scale. Squared rounding errors are below 16, and
# products of values and codes below 64. An FP32 number near 3/4 of the next power of two has this resolution.
ERROR_BITS, PRODUCT_BITS = 18, 16

MX_BLOCK = 32  # Values that share a power of two in MXFP4 and MXFP8. Source: Open Compute Project, MX 1.0.
FP8_BLOCK = 128  # Values that share a scale; in a weight also rows. Source: DeepSeek-V3, Section 3.3.2.
FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E5M2_MAX = 57344.0
FP8_AMAX_MIN = 1e-30  # The amax of an all-zero tensor. The scale and its inverse are then finite in FP32.

CHUNK = 1 << 17  # Elements at a time on a CPU, so that the intermediate tensors stay in the CPU's cache.


@dataclass(frozen=True)
class Rounding:
    """How one operand is brought to NVFP4; the module's docstring has the formulas.

    grid_max:   s, the value that a block's amax is mapped to with candidate 1
    scale_cap:  the largest E4M3 scale with candidate 1
    candidates: multiples of the block scale that compete
    stochastic: elements are rounded stochastically (SR), else to nearest, ties to even (RTN)
    block_rows: number of rows that share a scale, 1, or 16 for square blocks
    ms_eden:    rotate by an RHT of 128, correct the scales by S, round them stochastically
    mx:         "" for NVFP4's scales. "floor" or "ceil" for the power of two below or above amax / s.
    fp8:        "", or the FP32 scales of FP8. "tensor" is tensor_scale alone, "block" a scale per block.
    block:      number of values that share a scale, 16. MXFP4 and MXFP8 have 32, FP8 with blocks 128.
    prescale:   multiplies elements before they are rounded, and divides them afterwards (mx only)
    element:    "e2m1", or, to nearest, "e4m3" (mx and fp8) or "e5m2" (fp8)
    name:       the key in ROUNDINGS
    """

    grid_max: float = E2M1_MAX
    scale_cap: float = E4M3_MAX
    candidates: tuple[float, ...] = (1.0,)
    stochastic: bool = False
    block_rows: int = 1
    ms_eden: bool = False
    mx: str = ""
    fp8: str = ""
    block: int = BLOCK
    prescale: float = 1.0
    element: str = "e2m1"
    name: str = field(default="", compare=False)

    @property
    def has_kernels(self) -> bool:
        """Whether the Triton kernels compute this rounding. The others run as this reference on every machine."""
        return not (self.mx or self.fp8 or (self.random and self.block_rows > 1))

    @property
    def takes_amax(self) -> bool:
        """Whether the largest value of an input that is not rotated may come from the kernel that makes the input."""
        return self.has_kernels or self.fp8 == "tensor"

    @property
    def random(self) -> bool:
        """Whether the result depends on the seed."""
        return self.stochastic or self.ms_eden


ROUNDINGS: dict[str, Rounding] = {
    "rtn": Rounding(),
    "four_over_six": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=FOUR_OVER_SIX),
    "rtn_16x16": Rounding(block_rows=16),
    "four_over_six_16x16": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=FOUR_OVER_SIX, block_rows=16),
    "sr": Rounding(grid_max=SR_GRID_MAX, stochastic=True),
    "sr_four_over_six": Rounding(SR_GRID_MAX, SEARCH_SCALE_CAP, FOUR_OVER_SIX, stochastic=True),
    "ms_eden": Rounding(MS_EDEN_GRID_MAX, SEARCH_SCALE_CAP, ms_eden=True),
    "scale_search_3": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_3),
    "scale_search_6": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_6),
    "ms_eden_search_3": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_3, ms_eden=True),
    "ms_eden_search_6": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_6, ms_eden=True),
}
# Other systems. With scales rounded down, the largest value of a block may be almost 8 and is clipped to 6. Tseng et
# al. therefore shrink by 3/4 before stochastic rounding. With scales rounded up (NVIDIA), nothing is clipped and up to
# a binade is not used.
_UP = {"mx": "ceil", "block": MX_BLOCK}
MX_ROUNDINGS: dict[str, Rounding] = {
    "mxfp4_ocp": Rounding(grid_max=4.0, mx="floor", block=MX_BLOCK),  # 4: the largest power of two of E2M1
    "mxfp4": Rounding(**_UP),
    "mxfp4_32x32": Rounding(**_UP, block_rows=MX_BLOCK),
    "mxfp4_sr": Rounding(**_UP, stochastic=True),
    "mxfp4_sr_prescaled": Rounding(grid_max=3.0, mx="floor", block=MX_BLOCK, stochastic=True, prescale=3 / 4),
    "mxfp8": Rounding(grid_max=E4M3_MAX, **_UP, element="e4m3"),
}
ROUNDINGS |= MX_ROUNDINGS
# FP8: one scale per tensor (nanochat's --fp8), or FP32 scales for 1x128 and 128x128 blocks (DeepSeek-V3).
_BLOCKS = {"grid_max": E4M3_MAX, "fp8": "block", "element": "e4m3", "block": FP8_BLOCK}
FP8_ROUNDINGS: dict[str, Rounding] = {
    "e4m3": Rounding(grid_max=E4M3_MAX, scale_cap=1.0, fp8="tensor", element="e4m3"),
    "e5m2": Rounding(grid_max=E5M2_MAX, scale_cap=1.0, fp8="tensor", element="e5m2"),
    "e4m3_1x128": Rounding(**_BLOCKS),
    "e4m3_128x128": Rounding(**_BLOCKS, block_rows=FP8_BLOCK),
}
ROUNDINGS |= FP8_ROUNDINGS
# The plain names try 3 candidates. 6 lower the error by another 5%, but a step on an H200 takes 1.5 times as long.
ROUNDINGS["scale_search"] = ROUNDINGS["scale_search_3"]
ROUNDINGS["ms_eden_search"] = ROUNDINGS["ms_eden_search_3"]
ROUNDINGS = {name: replace(rounding, name=name) for name, rounding in ROUNDINGS.items()}


def get_rounding(name: str | Rounding) -> Rounding:
    """The Rounding of a name; a Rounding is returned as it is. Raises ValueError with the known names."""
    if isinstance(name, Rounding):
        return name
    if name not in ROUNDINGS:
        alike = difflib.get_close_matches(str(name).lower(), ROUNDINGS, n=1)
        meant = f"; did you mean {alike[0]}?" if alike else ""
        raise ValueError(f"unknown rounding {name!r}; known: {', '.join(ROUNDINGS)}{meant}")
    return ROUNDINGS[name]


# --------------------------------------------------------------------------------------------------------------------
# Rounding to the three grids. All on float32, elementwise.


def round_e2m1(y: torch.Tensor) -> torch.Tensor:
    """To the nearest E2M1 value, ties to the even code, |y| > 6 clipped. The sign of zero is kept."""
    step = _e2m1_spacing(y.abs())
    return (torch.round(y / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def stochastic_round_e2m1(y: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """To one of the two neighbouring E2M1 values; the mean over uniform in (0, 1) is y. Needs |y| <= 6."""
    step = _e2m1_spacing(y.abs())
    return torch.copysign(torch.round(y / step + (uniform - 0.5)) * step, y).clamp(-E2M1_MAX, E2M1_MAX)


def _e2m1_spacing(magnitude: torch.Tensor) -> torch.Tensor:
    """Distance of the E2M1 values around a magnitude: 1/2 below 2, 1 below 4, 2 from there on."""
    return 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)


def round_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Non-negative scales to the nearest E4M3 value, ties to even, above 448 clipped; returns float8_e4m3fn."""
    return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def stochastic_round_e4m3(scale: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Non-negative scales to a neighbouring E4M3 value with the right mean, subnormals included; above 448 clipped."""
    scale = scale.clamp(max=E4M3_MAX)
    step = power_of_two_floor(scale).clamp(min=2.0**E4M3_MIN_EXPONENT) * 2.0**-E4M3_MANTISSA_BITS
    n = scale / step
    floor = torch.floor(n)
    up = (uniform < n - floor).to(torch.float32)
    return ((floor + up) * step).to(torch.float8_e4m3fn)


def round_e8m3(scale: torch.Tensor) -> torch.Tensor:
    """Non-negative float32 to 3 mantissa bits, ties to even, the exponent of FP32: a pseudo-scale that fits BF16.

    Results below 2^-116, the smallest tensor_scale, are 0.
    """
    bits = torch.where(scale < TENSOR_SCALE_MIN, 0.0, scale).view(torch.int32)
    dropped = 23 - E4M3_MANTISSA_BITS
    odd = (bits >> dropped) & 1
    return (((bits + ((1 << (dropped - 1)) - 1) + odd) >> dropped) << dropped).view(torch.float32)


def power_of_two_floor(x: torch.Tensor) -> torch.Tensor:
    """2^floor(log2 x) for positive normal float32, 0 for zero."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def power_of_two_ceil(x: torch.Tensor) -> torch.Tensor:
    """2^ceil(log2 x) for positive normal float32; NaN and Inf give Inf."""
    floor = power_of_two_floor(x)
    return torch.where(floor == x, x, floor * 2)


# --------------------------------------------------------------------------------------------------------------------
# Blocks.


def _fixed_sum(x: torch.Tensor, y: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    """Sum of x * y over the last dimension in fixed point, float32 -> int32.

    Each product is rounded once, to 2^-fraction_bits, and the integers are added exactly. The result does not depend on
    the order and is the same in every kernel layout. A kernel rounds a product by one fused multiply-add.
    """
    return _rounded_product(x * 2.0**fraction_bits, y).sum(dim=-1, dtype=torch.int32)


def _rounded_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The whole number nearest to x * y, float32 to int32. FP64 holds the product exactly."""
    return torch.round(x.to(torch.float64) * y.to(torch.float64)).to(torch.int32)


def _block_amax(u: torch.Tensor, block_rows: int) -> torch.Tensor:
    """`(R, G, B)` -> `(R, G)`: the largest magnitude of each 1x16 block, or of its block_rows x 16 block."""
    return _over_rows(u.abs().amax(dim=-1), block_rows, lambda rows: rows.amax(dim=-1))


def _over_rows(x: torch.Tensor, block_rows: int, reduce) -> torch.Tensor:
    """Reduces (R, G) over each run of block_rows rows and repeats the result for each row. Missing rows are 0."""
    if block_rows == 1:
        return x
    rows = x.shape[0]
    padded = torch.cat((x, x.new_zeros(-rows % block_rows, *x.shape[1:])))
    reduced = reduce(padded.unflatten(0, (-1, block_rows)).movedim(1, -1))
    return reduced.repeat_interleave(block_rows, dim=0)[:rows]


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 for the scale 0 of an empty block."""
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def search_scales(x: torch.Tensor, rounding: Rounding, round_scale, draw=None, factor: torch.Tensor | float = 1.0):
    """The codes q `(R, G, B)` and scales `(R, G)`, both float32, that fit x * factor best.

    x is `(R, G, B)`, and factor () or `(R, 1)`. The function round_scale maps the wanted scale and the block amax to
    values that the scale may take, all float32 `(R, G)`. The function draw maps a candidate's number to uniforms like
    x. Each candidate of a stochastic rounding draws its own.
    """
    amax = _block_amax(x, rounding.block_rows) * factor
    base = divide(amax, rounding.grid_max)
    unit = power_of_two_floor(base).clamp(min=TENSOR_SCALE_MIN)
    best_q = best_scale = best_error = None
    for candidate, multiple in enumerate(rounding.candidates):
        scale = round_scale(base * multiple, amax)
        y = x * (_reciprocal(scale) * factor).unsqueeze(-1)
        if rounding.element != "e2m1":
            q = to_fp8(y, rounding.element).to(torch.float32)
        else:
            q = stochastic_round_e2m1(y, draw(candidate)) if rounding.stochastic else round_e2m1(y)
        if len(rounding.candidates) == 1:
            return q, scale
        difference = q - y
        error = _fixed_sum(difference, difference, ERROR_BITS)
        error = _over_rows(error, rounding.block_rows, lambda rows: rows.sum(dim=-1, dtype=torch.int32))
        relative = scale * (1.0 / unit)  # exact: by a power of two
        error = error.to(torch.float32) * (relative * relative)
        if best_error is None:
            best_q, best_scale, best_error = q, scale, error
        else:
            better = error < best_error
            best_q = torch.where(better.unsqueeze(-1), q, best_q)
            best_scale = torch.where(better, scale, best_scale)
            best_error = torch.where(better, error, best_error)
    return best_q, best_scale


def to_fp8(x: torch.Tensor, element: str) -> torch.Tensor:
    """To the nearest E4M3 or E5M2 value. Larger values are clipped; NaN stays."""
    limit = torch.finfo(FP8_DTYPES[element]).max
    return x.clamp(-limit, limit).to(FP8_DTYPES[element])


def divide(x: torch.Tensor, constant: float) -> torch.Tensor:
    """x / constant with one rounding. For a Python number a GPU would multiply by the reciprocal instead."""
    return x / torch.full((), constant, dtype=torch.float32, device=x.device)


def block_scale_rounding(rounding: Rounding):
    """RTN_E4M3, but the next larger scale where the block would be clipped; for MX a power of two.

    In E4M3's normal range rounding lowers a scale by a factor 16/17 at most, and nothing is clipped. SR's values stay
    within 6 by SR's choice of s, and nearest rounding takes everything below 7 to 6. Only subnormal scales can be too
    small, or zero. A block with a too small scale would lose its largest values, or all.
    """
    if rounding.fp8:
        return lambda wanted, amax: wanted.clamp(min=TENSOR_SCALE_MIN)
    if rounding.mx:
        power_of_two = power_of_two_floor if rounding.mx == "floor" else power_of_two_ceil
        return lambda wanted, amax: power_of_two(wanted).clamp(min=TENSOR_SCALE_MIN)
    limit = E2M1_MAX if rounding.stochastic else E2M1_OVERFLOW

    def round_scale(wanted: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        scale = round_e4m3(wanted).to(torch.float32)
        return torch.where(amax > limit * scale, _next_e4m3(scale), scale)

    return round_scale


def _next_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """The next larger E4M3 value, float32 to float32."""
    bits = scale.to(torch.float8_e4m3fn).view(torch.uint8) + 1
    return bits.view(torch.float8_e4m3fn).to(torch.float32)


# --------------------------------------------------------------------------------------------------------------------
# The two ways through.


def quantize_reference(
    x: torch.Tensor,
    rounding: Rounding,
    *,
    seed: torch.Tensor | int = 0,
    stream: int = 0,
    rht_dim: int = 0,
    rht_seed: torch.Tensor | int | None = None,
    rht_stream: int = 0,
    rotations: int = 1,
    per_token: bool = False,
    amax: torch.Tensor | None = None,
    noise: Noise | None = None,
    scale: torch.Tensor | None = None,
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> NVFP4Tensor:
    """x (..., K), any float dtype, K a multiple of the block -> NVFP4Tensor with `decoded` in float32.

    Checks nothing; no host sync.

    seed, stream: select the noise of SR.
    rht_dim:      Rotate first by an RHT of rht_dim, which divides K. MS-EDEN needs 128.
    rht_seed:     The rotation's seed, by default seed. rht_stream is its stream.
    rotations:    2 for two RHTs in a row (rotated_sums).
    per_token:    One tensor_scale per row, `(..., 1)`, so that a row does not depend on the others.
    amax:         The amax, float32 (), of a larger tensor that x is a part of. Not for rotated operands.
    noise:        The random numbers to use, by default of seed and stream.
    scale:        Multiplies x after the rotation, float32 (), for MS-EDEN.
    largest:      A function from the amax of the (rotated) x to the amax of a larger tensor that x is a part of.
    NaN and Inf travel into tensor_scale, and from there into all results.
    """
    noise, norm = Noise(seed, stream) if noise is None else noise, 1.0
    if rht_dim:
        signs_seed = seed if rht_seed is None else rht_seed
        x = rotated_sums(x, signs_seed, dim=rht_dim, stream=rht_stream, rotations=rotations)
        norm = rht_dim ** (-0.5 * rotations)
    norm = norm if scale is None else scale * norm
    leading = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    if amax is None:
        amax = rows.abs().amax(dim=-1, keepdim=True) if per_token else rows.abs().amax()
    if largest is not None:
        amax = largest(amax)
    if rounding.fp8 == "tensor":  # FP64 makes the scale the same in compiled code, as in nanochat's fp8.py
        scale = (rounding.grid_max / (amax * norm).double().clamp(min=FP8_AMAX_MIN)).float()
        codes = to_fp8(rows * (scale * norm), rounding.element).view(*leading, -1)
        scales = codes.new_empty(*leading, 0)
        return NVFP4Tensor(codes, scales, scale.reciprocal().view(*leading, 1) if per_token else scale.reciprocal())
    tensor_scale = divide(amax * norm, rounding.grid_max * rounding.scale_cap).clamp(min=TENSOR_SCALE_MIN)
    if rounding.ms_eden:
        tensor_scale = power_of_two_ceil(tensor_scale)
    if rounding.mx or rounding.fp8:
        tensor_scale = torch.full_like(tensor_scale, 1 / rounding.prescale)
    # MS-EDEN aligns afterwards, so its factor holds norm alone.
    factor = torch.ones_like(tensor_scale) * norm if rounding.ms_eden else 1.0 / tensor_scale * norm

    # Chunks of whole blocks of rows; the result does not depend on their size.
    chunk = (
        max(FP8_BLOCK, CHUNK // rows.shape[1] // FP8_BLOCK * FP8_BLOCK)
        if x.device.type == "cpu"
        else max(rows.shape[0], 1)
    )
    align = _align_post_hoc if rounding.ms_eden else _align_first
    chunks = []
    for start in range(0, rows.shape[0], chunk):
        chunk_factor = factor[start : start + chunk] if per_token else factor
        q, *scales = align(rows[start : start + chunk], rounding, chunk_factor, noise, start)
        grid = q.flatten(-2)
        codes = pack(encode_e2m1(grid)) if rounding.element == "e2m1" else grid.to(FP8_DTYPES[rounding.element])
        chunks.append((q, codes, *scales))
    q, codes, pseudo_scales, correction = (torch.cat(p) if len(chunks) > 1 else p[0] for p in zip(*chunks))
    scales = finish_scales(pseudo_scales, correction, rounding, tensor_scale, noise)
    exact = pseudo_scales if rounding.mx or rounding.fp8 else scales.to(torch.float32)  # compilers know little of E8M0
    decoded = (q * exact.unsqueeze(-1)).flatten(-2)
    return NVFP4Tensor(
        codes=codes.view(*leading, -1),
        scales=scales.view(*leading, -1),
        tensor_scale=tensor_scale.view(*leading, 1) if per_token else tensor_scale,
        decoded=decoded.view(*leading, -1),
    )


def _align_first(rows, rounding, factor, noise, start):
    """Aligns by a factor with the known tensor_scale: (q, E4M3 scales in float32, no correction)."""
    x = rows.unflatten(-1, (-1, rounding.block))

    def draw(candidate):
        return noise.elements(start, *rows.shape, candidate, x.device).view(x.shape)

    q, scales = search_scales(x, rounding, block_scale_rounding(rounding), draw, factor)
    return q, scales, torch.ones_like(scales)


def _align_post_hoc(rows, rounding, factor, noise, start):
    """Kernel one of the paper's Section 7: (q, E8M3 pseudo-scales, EDEN's correction S), all without tensor_scale."""
    x = rows.unflatten(-1, (-1, BLOCK))
    q, pseudo_scales = search_scales(x, rounding, lambda scale, _: round_e8m3(scale), factor=factor)
    return q, pseudo_scales, _eden_correction(x, q, pseudo_scales, factor)


def _eden_correction(x, q, scales, factor):
    """S = `<x, x>` / `<x, x_rtn>` (paper, Algorithm 1) for each rotation group, repeated for its blocks: `(R, G)`.

    x and q are `(R, G, 16)`, scales `(R, G)`, and factor as in `search_scales`. A block is summed in units of its
    scale. Its weight is the square of its scale over a power of two above the group's largest scale.
    """
    blocks = scales.unflatten(-1, (-1, RHT_DIM // BLOCK))
    largest = power_of_two_floor(blocks.amax(dim=-1, keepdim=True)).clamp(min=TENSOR_SCALE_MIN)
    weight = blocks * (0.125 / largest)  # a block's sums stay below 2^22
    weight = weight * weight
    y = x * (_reciprocal(scales) * factor).unsqueeze(-1)

    def sum_over_group(v):
        blocks = _fixed_sum(y, v, PRODUCT_BITS).to(torch.float32).view(weight.shape)
        return _rounded_product(blocks, weight).sum(dim=-1, dtype=torch.int32).to(torch.float32)

    xx, xq = sum_over_group(y), sum_over_group(q)
    correction = torch.where(xq > 0, xx / xq, 1.0)
    return correction.repeat_interleave(RHT_DIM // BLOCK, dim=-1)


def finish_scales(pseudo_scales, correction, rounding, tensor_scale, noise):
    """Kernel two of MS-EDEN aligns, corrects and rounds the pseudo-scales. Other roundings have E4M3 scales already."""
    if rounding.fp8:
        return pseudo_scales
    if rounding.mx:
        return pseudo_scales.to(torch.float8_e8m0fnu)
    if not rounding.ms_eden:
        return round_e4m3(pseudo_scales)
    uniform = noise.scales(*pseudo_scales.shape, pseudo_scales.device)
    return stochastic_round_e4m3(pseudo_scales * (1.0 / tensor_scale) * correction, uniform)


def ms_eden_direct(x: torch.Tensor, rounding: Rounding, seed: torch.Tensor | int = 0) -> NVFP4Tensor:
    """Algorithm 1 of the paper to the letter: amax of the rotated tensor first, E4M3 scales, then the correction."""
    y = rotate(x, seed)
    rows = y.reshape(-1, y.shape[-1])
    tensor_scale = divide(rows.abs().amax(), rounding.grid_max * rounding.scale_cap).clamp(min=TENSOR_SCALE_MIN)
    x, factor = rows.unflatten(-1, (-1, BLOCK)), 1.0 / tensor_scale
    q, scales = search_scales(x, rounding, block_scale_rounding(rounding), factor=factor)
    correction = _eden_correction(x, q, scales, factor)
    uniform = Noise(seed).scales(*scales.shape, x.device)
    scales = stochastic_round_e4m3(scales * correction, uniform)
    codes = pack(encode_e2m1(q.flatten(-2))).view(*y.shape[:-1], -1)
    return NVFP4Tensor(codes, scales.view(*y.shape[:-1], -1), tensor_scale)


def quantize(x: torch.Tensor, rounding: str | Rounding, seed: torch.Tensor | int = 0) -> NVFP4Tensor:
    """Quantizes x (..., K) along its last dimension with a rounding of ROUNDINGS (the paper's Table 1): NVFP4, or MX.

    seed (an int, or an int64 tensor) determines rotation and rounding; the deterministic roundings ignore it.
    The ms_eden roundings return the operand in rotated space: it approximates rotate(x, seed).

    Raises ValueError for an unknown rounding, a seed of another type, and an integer, empty or meta tensor. K must be a
    multiple of 16, for ms_eden of 128 and for MX of 32. All values must be finite in FP32, before and after the
    rotation and the rounding.

    >>> t = nf.quantize(torch.tensor([[6.0, 3.2, -1.1] + [0.0] * 13]), "rtn")
    >>> t.dequantize()[0, :3].round(decimals=3).tolist()
    [6.0, 3.0, -1.0]
    """
    spec = get_rounding(rounding)
    if not isinstance(seed, int) and not (isinstance(seed, torch.Tensor) and seed.dtype == torch.int64):
        raise ValueError(f"quantize: the seed is {seed!r}, expected an int or an int64 tensor")
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"quantize: expected a floating-point tensor, got {kind}; convert it with .float()")
    if x.is_meta:
        raise ValueError(
            "quantize: a tensor on the meta device has no values; move it (module.to_empty) and fill it first"
        )
    multiple = RHT_DIM if spec.ms_eden else spec.block
    if x.dim() == 0 or x.numel() == 0 or x.shape[-1] % multiple:
        raise ValueError(
            f"quantize: shape {tuple(x.shape)} for {spec.name!r}, expected a non-empty (..., K) with K a multiple of "
            f"{multiple}; pad the last dimension with zeros"
        )
    x = x.detach().to(torch.float32)
    bad = x.numel() - int(torch.isfinite(x).sum())
    if bad:
        raise ValueError(f"quantize: {bad} of {x.numel()} values are NaN or Inf in FP32; find where they come from")
    t = quantize_reference(x, spec, seed=seed, rht_dim=RHT_DIM if spec.ms_eden else 0)
    if not torch.isfinite(t.tensor_scale):
        raise ValueError(f"quantize: values up to {x.abs().max():.1e} overflow when rotated; scale the tensor down")
    result = NVFP4Tensor(t.codes, t.scales, t.tensor_scale)
    if not torch.isfinite(result.dequantize()).all():  # rounding up may leave FP32's range
        raise ValueError(f"quantize: values up to {x.abs().max():.1e} overflow when rounded; scale the tensor down")
    return result


def mean_squared_error(rounding: str, *, samples: int = 1 << 22, seed: int = 0) -> float:
    """E (x - Q(x))^2 over N(0, 1), the paper's Table 1, on rows of 4096; for ms_eden in rotated space."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(16, samples // 4096)
    x = torch.randn(rows, 4096, generator=generator)
    t = quantize(x, rounding, seed=seed)
    target = rotate(x, seed) if get_rounding(rounding).ms_eden else x
    error = (t.dequantize() - target).double()
    return math.fsum((error * error).mean(dim=1).tolist()) / rows
