"""The reference quantizers in plain PyTorch: every rounding of the paper's Table 1, and the search over block scales.

A rounding (`roundings.Rounding`) consists of four independent choices:

- Elements are rounded to the E2M1 grid, either to nearest or stochastically.
- Two constants, s (grid_max) and cap (scale_cap), determine the range of the scales.
- One or more multiples of the block scale are tried: one (static), two (4/6), or more (search).
- MS-EDEN corrects the scales after rounding, so that a rotated operand is unbiased if the rotation mixes its values.

    tensor_scale = amax / (s * cap)                                         FP32
    u            = x / tensor_scale                                         so |u| <= s * cap
    scale_b      = RTN_E4M3(m * amax_b(|u|) / s)       for each candidate m, per block b of 16
    q            = RTN_E2M1 or SR_E2M1 (u / scale_b)
    The candidate with the lowest sum of (q * scale_b - u)^2 in its block is used, the first one in a tie.

MS-EDEN (the paper, Algorithm 1, with the post hoc range alignment of Section 7) rotates first. The amax of the rotated
tensor is known only after a pass over the whole tensor. Scales are therefore first rounded to E8M3, which has E4M3's 3
mantissa bits and FP32's exponents. A second step, over scales only, multiplies them by the correction S, shifts them
into E4M3's range, and rounds them stochastically:

    y = RHT(x),  p_b = RTN_E8M3(m * amax_b(|y|) / s),  q = RTN_E2M1(y / p_b)          the search as above
    S = <y, y> / <y, q * p_b>                                               per rotation group of 128
    tensor_scale = amax / (s * cap), rounded up to a power of two
    scale_b = SR_E4M3(S * p_b / tensor_scale)

tensor_scale is a power of two, because only then do the scaled 3 mantissa bits of p_b stay on E4M3's grid. S is close
to 1, so that such a scale is rounded with little noise. If tensor_scale were amax / (s * cap) itself, the error would
be 5% to 12% larger. Algorithm 1 to the letter aligns the scales, rounds them to E4M3, and then corrects them. Both
forms have the same error, as a test shows.

FP8 has only tensor_scale, and a GEMM of its own. Kernels make gradients, and tensors that are also kept in 4 bits. All
others are made by PyTorch, as are formats of other systems, such as MXFP4: functions that a user registers
(roundings.Rounding.quantize).

Bit-exactness. The kernels compute the same FP32 operations as this reference. There is one division for each block, and
elements are multiplied by its result. Sums over a block are computed in fixed point (`_fixed_sum`), so that they do not
depend on the order of summation. The unit of the fixed-point numbers is the block's scale, so that values around 1e30
do not overflow and values around 1e-30 do not vanish.

Unbiasedness. `sr` is unbiased. The ms_eden roundings are unbiased for groups with many values of comparable size, also
if scales are in E4M3's subnormal range. In a group with a few large values, one rotation leads to numbers of only a few
magnitudes, whose rounding errors do not average out: E[x1] = 0 for x = (1, 0.1, 0, ...). If a scale rounded to nearest
would be so small that values are clipped, the next larger E4M3 value is used. MS-EDEN's scales are rounded
stochastically from E8M3, which does not underflow. `sr_four_over_six` takes the better of two stochastic draws, which
is biased (the paper, Section 4.2).
"""

from collections.abc import Callable
from typing import NamedTuple

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
from nanochat_fp4.nvfp4.hadamard import RHT_DIM, rotated_sums
from nanochat_fp4.nvfp4.philox import Noise
from nanochat_fp4.nvfp4.roundings import E2M1_OVERFLOW, Rounding, get_rounding

# The number of fraction bits of sums over a block, in units of the block's scale. A kernel rounds a number below 16 to
# 2^-18 by adding 48 to it, because FP32 numbers near 48 have this spacing, and a number below 64 to 2^-16 by adding
# 192. Squared rounding errors are below 16, and products of values and codes are below 64.
ERROR_BITS, PRODUCT_BITS = 18, 16

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_AMAX_MIN = 1e-30  # Stands for the amax of a tensor of zeros, so that the scale and its inverse are finite in FP32.

CHUNK = 1 << 17  # The number of elements to process at once on a CPU, so that temporary tensors stay in its cache.


# --------------------------------------------------------------------------------------------------------------------
# Rounding to the grids of E2M1, E4M3 and E8M3. These functions work on float32 tensors elementwise.


def round_e2m1(y: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest E2M1 value, and ties to the even code. Values beyond 6 are clipped. -0.0 keeps its sign."""
    step = _e2m1_spacing(y.abs())
    return (torch.round(y / step) * step).clamp(-E2M1_MAX, E2M1_MAX)


def stochastic_round_e2m1(y: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Rounds to one of the two neighbouring E2M1 values. The mean over uniform in (0, 1) is y, if |y| <= 6."""
    step = _e2m1_spacing(y.abs())
    return torch.copysign(torch.round(y / step + (uniform - 0.5)) * step, y).clamp(-E2M1_MAX, E2M1_MAX)


def _e2m1_spacing(magnitude: torch.Tensor) -> torch.Tensor:
    """Returns the distance between the E2M1 values around a magnitude: 1/2 below 2, 1 below 4, and 2 above that."""
    return 0.5 + 0.5 * (magnitude >= 2) + (magnitude >= 4)


def round_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative scales to the nearest E4M3 value, and ties to even. Scales above 448 are clipped. Returns
    float8_e4m3fn."""
    return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)


def stochastic_round_e4m3(scale: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative scales to one of the two neighbouring E4M3 values so that the mean is right, also for
    subnormal numbers. Scales above 448 are clipped. Returns float8_e4m3fn."""
    scale = scale.clamp(max=E4M3_MAX)
    step = power_of_two_floor(scale).clamp(min=2.0**E4M3_MIN_EXPONENT) * 2.0**-E4M3_MANTISSA_BITS
    n = scale / step
    floor = torch.floor(n)
    up = (uniform < n - floor).to(torch.float32)
    return ((floor + up) * step).to(torch.float8_e4m3fn)


def round_e8m3(scale: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative float32 numbers to 3 mantissa bits, and ties to even. The result keeps FP32's exponents and
    is exact in BF16. Numbers below 2^-116, the smallest tensor_scale, become 0.
    """
    bits = torch.where(scale < TENSOR_SCALE_MIN, 0.0, scale).view(torch.int32)
    dropped = 23 - E4M3_MANTISSA_BITS
    odd = (bits >> dropped) & 1
    return (((bits + ((1 << (dropped - 1)) - 1) + odd) >> dropped) << dropped).view(torch.float32)


def power_of_two_floor(x: torch.Tensor) -> torch.Tensor:
    """Returns 2^floor(log2 x) for positive normal float32 numbers, and 0 for zero."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def power_of_two_ceil(x: torch.Tensor) -> torch.Tensor:
    """Returns 2^ceil(log2 x) for positive normal float32 numbers, and Inf for NaN and Inf."""
    floor = power_of_two_floor(x)
    return torch.where(floor == x, x, floor * 2)


# --------------------------------------------------------------------------------------------------------------------
# Sums and scales of blocks


def _fixed_sum(x: torch.Tensor, y: torch.Tensor, fraction_bits: int) -> torch.Tensor:
    """Returns the sum of x * y over the last dimension in fixed point, int32, in units of 2^-fraction_bits. x and y are
    float32.

    Each product is rounded once to a whole number of units, and the whole numbers are added exactly. The result
    therefore does not depend on the order of summation, and every kernel computes the same. A kernel rounds a product
    by one fused multiply-add.
    """
    return _rounded_product(x * 2.0**fraction_bits, y).sum(dim=-1, dtype=torch.int32)


def _rounded_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the whole number nearest to x * y, int32, of float32 tensors. FP64 holds the product exactly."""
    return torch.round(x.to(torch.float64) * y.to(torch.float64)).to(torch.int32)


def block_amax(u: torch.Tensor, block_rows: int) -> torch.Tensor:
    """Returns the largest magnitude of each block of u `(R, G, B)`, repeated for each of the block's rows: `(R, G)`."""
    return _over_rows(u.abs().amax(dim=-1), block_rows, lambda rows: rows.amax(dim=-1))


def _over_rows(x: torch.Tensor, block_rows: int, reduce) -> torch.Tensor:
    """Reduces x (R, G) over each group of block_rows rows, and repeats the result for each of these rows: (R, G). Rows
    that the last group lacks count as 0."""
    if block_rows == 1:
        return x
    rows = x.shape[0]
    padded = torch.cat((x, x.new_zeros(-rows % block_rows, *x.shape[1:])))
    reduced = reduce(padded.unflatten(0, (-1, block_rows)).movedim(1, -1))
    return reduced.repeat_interleave(block_rows, dim=0)[:rows]


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Returns 1 / scale, and 0 for the scale 0 of a block of zeros."""
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def search_scales(x: torch.Tensor, rounding: Rounding, factor: torch.Tensor | float = 1.0, draw=None):
    """Finds the block scales among the rounding's candidates with which x * factor is rounded best. Returns the rounded
    elements q `(R, G, B)` and the scales `(R, G)`, both float32. Scales are E8M3 numbers for MS-EDEN, and E4M3 numbers
    otherwise.

    x is `(R, G, B)`: R rows of G blocks with B values. factor is () or `(R, 1)`. The function draw maps the number of a
    candidate to uniforms of x's shape. Each candidate of a stochastic rounding draws its own numbers.
    """
    amax = block_amax(x, rounding.block_rows) * factor
    base = divide(amax, rounding.grid_max)
    inverse_unit = _reciprocal(power_of_two_floor(base))
    best_q = best_scale = best_error = None
    for candidate, multiple in enumerate(rounding.candidates):
        scale = base * multiple
        scale = round_e8m3(scale) if rounding.ms_eden else round_block_scale(scale, amax, rounding.stochastic)
        y = x * (_reciprocal(scale) * factor).unsqueeze(-1)
        q = stochastic_round_e2m1(y, draw(candidate)) if rounding.stochastic else round_e2m1(y)
        if len(rounding.candidates) == 1:
            return q, scale
        difference = q - y
        error = _fixed_sum(difference, difference, ERROR_BITS)
        error = _over_rows(error, rounding.block_rows, lambda rows: rows.sum(dim=-1, dtype=torch.int32))
        relative = scale * inverse_unit  # This is exact, because the unit is a power of two.
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
    """Rounds to the nearest E4M3 or E5M2 value. Values beyond the largest number are clipped, and NaN stays NaN."""
    limit = torch.finfo(FP8_DTYPES[element]).max
    return x.clamp(-limit, limit).to(FP8_DTYPES[element])


def divide(x: torch.Tensor, constant: float) -> torch.Tensor:
    """Returns x / constant, rounded once. If the divisor were a Python number, a GPU would multiply by its rounded
    reciprocal instead."""
    return x / torch.full((), constant, dtype=torch.float32, device=x.device)


def round_block_scale(wanted: torch.Tensor, amax: torch.Tensor, stochastic: bool) -> torch.Tensor:
    """Rounds the wanted scale of blocks with this amax to E4M3, float32, to nearest. The next larger E4M3 value is used
    if the block would be clipped otherwise.

    In E4M3's normal range rounding lowers a scale by a factor of 16/17 at most, and no element is clipped: with SR the
    choice of s keeps elements within 6, and with RTN all values below 7 are rounded to 6. Only a subnormal scale can be
    rounded to a scale that is too small, or to zero. The block would then lose its largest values, or all of them.
    """
    rounded = round_e4m3(wanted)
    scale, larger = (t.view(rounded.dtype).to(torch.float32) for t in (rounded, rounded.view(torch.uint8) + 1))
    return torch.where(amax > (E2M1_MAX if stochastic else E2M1_OVERFLOW) * scale, larger, scale)


# --------------------------------------------------------------------------------------------------------------------
# Quantization of whole tensors


class Quantization(NamedTuple):
    """How one operand is made: how it is rounded and rotated, and which random numbers it draws.

    rounding:    how the values are rounded. None leaves them as they are.
    seed, stream: the seed, an int or int64 (), and the number of the stream that stochastic rounding draws from. The
                 kernels take no int. None is 0.
    rht_dim, rht_seed, rht_stream: the group size, the seed (by default `seed`) and the stream of the rotation along the
                 contraction dimension. With rht_dim 0 nothing is rotated. MS-EDEN needs 128.
    per_token:   whether each row has a tensor_scale of its own, so that a row does not depend on the others
    amax:        the largest magnitude to scale by, a scalar tensor. With None it is computed. A caller gives it if the
                 operation that made the tensor has found it, or if the tensor is a part of a larger one. It can be
                 given for operands without a rotation.
    tiles:       whether block scales are laid out in tiles of 128x4, the layout of FP4 tensor cores (not with
                 per_token)
    largest:     a function from an amax, after the rotation, to that over all processes that have a part of the layer,
                 or None. MS-EDEN does not ask for it, because its scales are random anyway.
    kept:        the field of recipes.Operand with this name
    """

    rounding: Rounding | None = None
    seed: torch.Tensor | int | None = None
    stream: int = 0
    rht_dim: int = 0
    rht_seed: torch.Tensor | int | None = None
    rht_stream: int = 0
    per_token: bool = False
    amax: torch.Tensor | None = None
    tiles: bool = False
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None
    kept: Rounding | None = None


def quantize_reference(x: torch.Tensor, how: Quantization) -> NVFP4Tensor:
    """Quantizes x (..., K) of any float dtype along its last dimension. K must be a multiple of the rounding's block
    and of the rotation's groups. Returns row-major scales, and `decoded` in float32.

    The arguments are not checked, and the call does not synchronize with the host. If x has NaN or Inf, tensor_scale
    and all results are not finite either.
    """
    rounding, per_token, amax = how.rounding, how.per_token, how.amax
    noise, norm = Noise(0 if how.seed is None else how.seed, how.stream), 1.0
    if how.rht_dim:
        signs_seed = noise.seed if how.rht_seed is None else how.rht_seed
        x = rotated_sums(x, signs_seed, dim=how.rht_dim, stream=how.rht_stream)
        norm = how.rht_dim**-0.5
    leading = x.shape[:-1]
    rows = x.reshape(-1, x.shape[-1]).to(torch.float32)
    if amax is None:
        amax = rows.abs().amax(dim=-1, keepdim=True) if per_token else rows.abs().amax()
    if how.largest is not None and not rounding.ms_eden:
        amax = how.largest(amax)
    if rounding.quantize:
        t = rounding.quantize(rows * norm, rounding, noise)
        if not isinstance(t, NVFP4Tensor):
            name, got = rounding.quantize.__name__, type(t).__name__
            raise ValueError(f"{name}, the function of {rounding.label}, returned a {got}, expected an NVFP4Tensor")
        codes, scales, decoded = (v if v is None else v.view(*leading, -1) for v in (t.codes, t.scales, t.decoded))
        return NVFP4Tensor(codes, scales, t.tensor_scale, decoded)
    if rounding.fp8:
        # With FP64 compiled code computes the same scale, as in nanochat's fp8.py.
        scale = (rounding.grid_max / (amax * norm).double().clamp(min=FP8_AMAX_MIN)).float()
        codes = to_fp8(rows * (scale * norm), rounding.element).view(*leading, -1)
        tensor_scale = scale.reciprocal().view(*leading, 1) if per_token else scale.reciprocal()
        return NVFP4Tensor(codes, codes.new_empty(*leading, 0), tensor_scale)
    tensor_scale = divide(amax * norm, rounding.grid_max * rounding.scale_cap).clamp(min=TENSOR_SCALE_MIN)
    tensor_scale = power_of_two_ceil(tensor_scale) if rounding.ms_eden else tensor_scale
    # MS-EDEN divides its scales by tensor_scale afterwards, so its factor is only the norm of the rotation.
    factor = torch.ones_like(tensor_scale) * norm if rounding.ms_eden else 1.0 / tensor_scale * norm

    q, codes, pseudo_scales, correction = _align_in_chunks(rows, rounding, factor, noise)
    scales = finish_scales(pseudo_scales, correction, rounding, tensor_scale, noise)
    decoded = (q * scales.to(torch.float32).unsqueeze(-1)).flatten(-2)
    return NVFP4Tensor(
        codes=codes.view(*leading, -1),
        scales=scales.view(*leading, -1),
        tensor_scale=tensor_scale.view(*leading, 1) if per_token else tensor_scale,
        decoded=decoded.view(*leading, -1),
    )


def _align_in_chunks(rows, rounding, factor, noise):
    """Returns what _align returns for all rows, with the codes after q. factor is `()`, or `(R, 1)` with a number for
    each row.

    On a CPU the rows are processed in chunks of whole blocks. The result does not depend on the chunks' size.
    """
    chunk = max(rows.shape[0], 1)
    if rows.device.type == "cpu":
        chunk = max(BLOCK, CHUNK // rows.shape[1] // BLOCK * BLOCK)
    chunks = []
    for start in range(0, rows.shape[0], chunk):
        chunk_factor = factor[start : start + chunk] if factor.dim() > 1 else factor
        q, *scales = _align(rows[start : start + chunk], rounding, chunk_factor, noise, start)
        chunks.append((q, pack(encode_e2m1(q.flatten(-2))), *scales))
    return tuple(torch.cat(p) if len(chunks) > 1 else p[0] for p in zip(*chunks))


def _align(rows, rounding, factor, noise, start):
    """Rounds rows. Returns q, the scales in float32, and a correction of the scales.

    The tensor_scale of MS-EDEN is not known yet. This is the work of the first kernel of the paper's Section 7: scales
    are E8M3 pseudo-scales, and the correction is EDEN's S. Other roundings have tensor_scale in factor, and a
    correction of 1.
    """
    x = rows.unflatten(-1, (-1, rounding.block))

    def draw(candidate):
        return noise.elements(start, *rows.shape, candidate, x.device).view(x.shape)

    q, scales = search_scales(x, rounding, factor, draw)
    return q, scales, _eden_correction(x, q, scales, factor) if rounding.ms_eden else torch.ones_like(scales)


def _eden_correction(x, q, scales, factor):
    """Returns S = `<x, x>` / `<x, x_rtn>` (the paper, Algorithm 1) for each rotation group, repeated for the group's
    blocks: `(R, G)`.

    x and q are `(R, G, 16)`, and scales are `(R, G)`. factor is the one of `search_scales`. Each block is summed in
    units of its scale. The sums of a group's blocks are then added with weights, which are the squares of the blocks'
    scales relative to a power of two above the group's largest scale.
    """
    blocks = scales.unflatten(-1, (-1, RHT_DIM // BLOCK))
    largest = power_of_two_floor(blocks.amax(dim=-1, keepdim=True))
    weight = blocks * (0.125 * _reciprocal(largest))  # With this factor a block's sums stay below 2^22.
    weight = weight * weight
    y = x * (_reciprocal(scales) * factor).unsqueeze(-1)

    def sum_over_group(v):
        blocks = _fixed_sum(y, v, PRODUCT_BITS).to(torch.float32).view(weight.shape)
        return _rounded_product(blocks, weight).sum(dim=-1, dtype=torch.int32).to(torch.float32)

    xx, xq = sum_over_group(y), sum_over_group(q)
    correction = torch.where(xq > 0, xx / xq, 1.0)
    return correction.repeat_interleave(RHT_DIM // BLOCK, dim=-1)


def finish_scales(pseudo_scales, correction, rounding, tensor_scale, noise):
    """Returns the final scales, float8_e4m3fn. For MS-EDEN this is the work of the paper's second kernel:
    it aligns and corrects the pseudo-scales and rounds them stochastically. The scales of other roundings are only
    cast."""
    if not rounding.ms_eden:
        return round_e4m3(pseudo_scales)
    uniform = noise.scales(*pseudo_scales.shape, pseudo_scales.device)
    return stochastic_round_e4m3(pseudo_scales * (1.0 / tensor_scale) * correction, uniform)


def quantize(x: torch.Tensor, rounding: str | Rounding, seed: torch.Tensor | int = 0) -> NVFP4Tensor:
    """Quantizes x (..., K) along its last dimension with one of ROUNDINGS (the paper's Table 1) and returns an
    NVFP4Tensor.

    seed is an int or an int64 tensor. It determines rotation and rounding, and deterministic roundings ignore it. With
    the ms_eden roundings the result is rotated: it approximates rotate(x, seed).

    K must be a multiple of the rounding's block, which is 16, and of 128 for ms_eden. All values must be finite in
    FP32, and stay finite after the rotation and the rounding. Raises ValueError if they are not, for another K, for an
    unknown rounding, for a seed of another type, for an integer, empty or meta tensor, and for a function of a rounding
    whose results are not codes * scales.

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
            f"quantize: shape {tuple(x.shape)} for {spec.label}, expected a non-empty (..., K) with K a multiple of "
            f"{multiple}; pad the last dimension with zeros"
        )
    x = x.detach().to(torch.float32)
    bad = x.numel() - int(torch.isfinite(x).sum())
    if bad:
        raise ValueError(f"quantize: {bad} of {x.numel()} values are NaN or Inf in FP32; find where they come from")
    t = quantize_reference(x, Quantization(spec, seed, rht_dim=RHT_DIM if spec.ms_eden else 0))
    if not torch.isfinite(t.tensor_scale):
        done = "rotated" if spec.ms_eden else "scaled"
        raise ValueError(f"quantize: values up to {x.abs().max():.1e} overflow when {done}; scale the tensor down")
    result = NVFP4Tensor(t.codes, t.scales, t.tensor_scale)
    if spec.quantize and (result.shape != x.shape or not torch.allclose(result.decode(), t.decode(), 2**-7, 0)):
        raise ValueError(
            f"quantize: {spec.quantize.__name__}, the function of {spec.label}, returned other values than codes * "
            "scales: codes are the elements' values (uint8: two E2M1 codes a byte), and `decoded` is that product"
        )
    if not torch.isfinite(result.dequantize()).all():  # Rounding up can lead beyond FP32's range.
        raise ValueError(f"quantize: values up to {x.abs().max():.1e} overflow when rounded; scale the tensor down")
    return result
