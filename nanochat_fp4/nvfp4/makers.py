"""Makes the operands of a GEMM, by the Triton kernels where they can and by the reference otherwise.

A Quantization says how an operand is made. `quantize_operand` makes one operand, `quantize_grad_output` makes both
operands of grad_output, and `quantize_weights` makes the weight operands of several layers. For each kind of operand
(operands.py) there is a function that makes it, its maker. `maker_of` chooses the maker for a recipes.Operand when the
recipe is built.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nanochat_fp4.nvfp4.dispatch import native_gemm, use_kernels
from nanochat_fp4.nvfp4.format import BLOCK, NVFP4Tensor, swizzle_scales
from nanochat_fp4.nvfp4.gemm import Decoded, GemmOperand, Plain
from nanochat_fp4.nvfp4.operands import FP8, Codes, FP8WithCodes, codes_of
from nanochat_fp4.nvfp4.quantizers import quantize_reference
from nanochat_fp4.nvfp4.roundings import Rounding


class Quantization(NamedTuple):
    """How one operand is made: how it is rounded and rotated, and which random numbers it draws.

    rounding:    how the values are rounded. None leaves them as they are.
    seed, stream: the seed, int64 (), and the number of the stream that stochastic rounding draws from
    rht_dim, rht_seed, rht_stream: the group size, the seed and the stream of the rotation along the contraction
                 dimension. With rht_dim 0 nothing is rotated.
    kept:        the field of recipes.Operand with this name
    per_token:   whether each row has a tensor_scale of its own, so that a row does not depend on the others
    amax:        the largest magnitude to scale by, a scalar tensor. With None it is computed. A caller gives it if the
                 operation that made the tensor has found it, or if the tensor is a part of a larger one. It can be
                 given for operands without a rotation.
    tiles:       whether block scales are laid out in tiles of 128x4, the layout of FP4 tensor cores (not with
                 per_token)
    largest:     a function from an amax to that over all processes that have a part of the layer, or None
    make:        the maker that recipes.Operand has chosen. With None, maker_of chooses it.
    """

    rounding: Rounding | None = None
    seed: torch.Tensor | None = None
    stream: int = 0
    rht_dim: int = 0
    rht_seed: torch.Tensor | None = None
    rht_stream: int = 0
    per_token: bool = False
    amax: torch.Tensor | None = None
    tiles: bool = False
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None
    make: "Maker | None" = None
    kept: Rounding | None = None


class Maker(Protocol):
    """A function that makes one kind of operand (R, C) from value, (R, C), or (C, R) with transpose. The other
    arguments are those of quantize_operand."""

    def __call__(
        self, value: torch.Tensor | GemmOperand, how: Quantization, transpose: bool, keep_codes: bool
    ) -> GemmOperand: ...


def maker_of(rounding: Rounding | None, kept: Rounding | None = None) -> Maker:
    """Returns the maker for these fields of a recipes.Operand."""
    if rounding is None:
        return make_plain
    if kept is not None:
        return make_fp8_with_codes
    if rounding.fp8:
        return make_fp8
    return make_by_function if rounding.quantize else make_codes


def quantize_operand(
    value: torch.Tensor | GemmOperand, how: Quantization, *, transpose: bool = False, keep_codes: bool = False
) -> GemmOperand:
    """Makes one operand of a GEMM, which is contracted over its last dimension, from value (R, C), or from the
    transpose of value (C, R) with transpose.

    keep_codes says whether the codes will be kept. If not, the kernels make only the form that this machine's GEMM
    reads: codes for FP4 tensor cores, and the decoded BF16 values otherwise.

    The contraction dimension is padded with zeros to a multiple of 16, or of rht_dim. Zeros add nothing to a product. A
    rotated group with zeros of the padding is quantized like any other group, so stochastic rounding stays unbiased for
    any number of tokens. MS-EDEN is unbiased only if the rotation mixes many values, from about 24 in a group. With 2
    to 16 tokens in a group, the gradient's mean is wrong by up to 0.5% of its square, which is a quarter of the noise
    of a single step. A single token is exact.
    """
    if isinstance(value, torch.Tensor):
        length = value.shape[0 if transpose else 1]
    else:
        length = value.shape[0] if transpose else value.length
    return _maker(how)(value, how, transpose, keep_codes).padded_from(length)


def _maker(how: Quantization) -> Maker:
    return how.make or maker_of(how.rounding, how.kept)


def make_plain(value: torch.Tensor | GemmOperand, how: Quantization, transpose: bool, keep_codes: bool) -> GemmOperand:
    """Makes an operand of the unrounded values of a tensor or of another operand."""
    if isinstance(value, torch.Tensor):
        return Plain(value.T if transpose else value)
    return value.transposed() if transpose else value


def make_codes(value: torch.Tensor | GemmOperand, how: Quantization, transpose: bool, keep_codes: bool) -> GemmOperand:
    """Makes NVFP4 codes, by the kernels if they can compute this operand."""
    value, rounding = value.source() if isinstance(value, GemmOperand) else value, how.rounding
    codes = isinstance(value, NVFP4Tensor)
    device = (value.codes if codes else value).device
    # The kernels can compute a scale per token, a rotation, or square blocks, but no two of these together.
    two = how.per_token + (how.rht_dim > 0) + (rounding.block_rows > 1) > 1
    if not (use_kernels(device) and rounding.has_kernels) or two or (codes and how.rht_dim and not transpose):
        x = _contracted_last(value, transpose, max(how.rht_dim, rounding.block))
        t = quantize_reference(x, rounding, **_draws(how))
        scales = swizzle_scales(t.scales) if how.tiles and not how.per_token else t.scales
        return codes_of(rounding)(t.codes, scales, t.tensor_scale, t.decoded)
    emulated = not keep_codes and native_gemm(device.type) is None
    if how.rht_dim:
        return _rotate_quantize(value, *((None, how) if transpose else (how, None)), emulated)[1 if transpose else 0]
    x = _contracted_last(value, transpose, BLOCK)
    return _quantize_rows(x, how)


def make_fp8(value: torch.Tensor | GemmOperand, how: Quantization, transpose: bool, keep_codes: bool) -> GemmOperand:
    x = _contracted_last(_source(value), transpose, max(how.rht_dim, how.rounding.block))
    t = quantize_reference(x, how.rounding, **_draws(how))
    return FP8(t.codes, t.tensor_scale)


def make_fp8_with_codes(
    value: torch.Tensor | GemmOperand, how: Quantization, transpose: bool, keep_codes: bool
) -> FP8WithCodes:
    """Makes the 8-bit numbers and the 4-bit codes of one tensor. The kernels read the tensor once for its amax, and
    once more for both results."""
    x, kept, eight = _contracted_last(_source(value), transpose, how.rounding.block), how.kept, how.rounding
    if how.amax is None and not how.per_token:
        amax = _amax_for_a_compiler(x)
        how = how._replace(amax=largest_magnitude(x) if amax is None else amax.float())
    kernels = use_kernels(x.device)
    if kernels and eight.element == "e4m3" and kept.block_rows == 1 and not how.per_token:
        from nvfp4_kernels.fp8 import fp8_with_codes

        amax = how.amax if how.largest is None else how.largest(how.amax)
        made = fp8_with_codes(x, amax, kept.grid_max, kept.scale_cap, list(kept.candidates), how.tiles)
        return FP8WithCodes.from_tensors(*made)
    t = quantize_reference(x, eight, **_draws(how))
    how = how._replace(rounding=kept, make=None)
    codes = _quantize_rows(x, how, decode=False) if kernels else make_codes(x, how, False, True).without_cache()
    return FP8WithCodes(FP8(t.codes, t.tensor_scale), codes)


def make_by_function(
    value: torch.Tensor | GemmOperand, how: Quantization, transpose: bool, keep_codes: bool
) -> GemmOperand:
    """Makes an operand in a format of a user's own. Its values are multiplied in BF16 on a GPU."""
    value, rounding = _source(value), how.rounding
    x = _contracted_last(value, transpose, max(how.rht_dim, rounding.block))
    t = quantize_reference(x, rounding, **_draws(how))
    values = t.decode(torch.bfloat16 if x.is_cuda else torch.float32)
    # The backward pass makes its operands from this one, and must not see the padding.
    return Decoded(values if how.rht_dim else values[:, : value.shape[0 if transpose else 1]], t.tensor_scale)


def _source(value: torch.Tensor | GemmOperand) -> torch.Tensor | NVFP4Tensor:
    """Returns the values or codes from which an operand is quantized again. A tensor is returned as it is."""
    return value.source() if isinstance(value, GemmOperand) else value


def _draws(how: Quantization) -> dict[str, Any]:
    """Returns the arguments of quantize_reference for the rotation, the random numbers and the scales."""
    seed = 0 if how.seed is None else how.seed
    return {
        "seed": seed,
        "stream": how.stream,
        "rht_dim": how.rht_dim,
        "rht_seed": seed if how.rht_seed is None else how.rht_seed,
        "rht_stream": how.rht_stream,
        "per_token": how.per_token,
        "amax": how.amax,
        "largest": how.largest,
    }


def quantize_grad_output(
    e: torch.Tensor, for_dgrad: Quantization | None, for_wgrad: Quantization | None
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """Makes both operands of grad_output (M, N): E (M, N) for grad_input, and E^T (N, M) for grad_weight. An operand
    whose Quantization is None is not made, and None is returned for it.

    The kernels read grad_output once for both operands.
    """
    if for_dgrad is not None and for_wgrad is not None:
        a, b = for_dgrad.rounding, for_wgrad.rounding
        if a and a == b and a.fp8:
            quantized = quantize_operand(e, for_dgrad)
            return quantized, quantized.transposed()
        kernels = a and b and a.has_kernels and b.has_kernels and a.block_rows == b.block_rows == 1
        kernels = kernels and for_wgrad.rht_dim
        if kernels and use_kernels(e.device):
            a, b = _rotate_quantize(e, for_dgrad, for_wgrad, native_gemm(e.device.type) is None)
            return a.padded_from(e.shape[1]), b.padded_from(e.shape[0])
    return (
        None if for_dgrad is None else quantize_operand(e, for_dgrad),
        None if for_wgrad is None else quantize_operand(e, for_wgrad, transpose=True),
    )


@torch.no_grad()
def quantize_weights(weights: Sequence[tuple[torch.Tensor, Quantization]]) -> list[GemmOperand]:
    """Applies quantize_operand to each weight (N, K) and returns the operands without cached values."""
    return [quantize_operand(weight, how, keep_codes=True).without_cache() for weight, how in weights]


def _contracted_last(value: torch.Tensor | NVFP4Tensor, transpose: bool, multiple: int) -> torch.Tensor:
    x = value.dequantize() if isinstance(value, NVFP4Tensor) else value
    x = x.T if transpose else x
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x  # pad would copy x even if nothing is missing.


# ----------------------------------------------------------------------------------------------------------------------
# The kernels


def _quantize_rows(x: torch.Tensor, how: Quantization, decode: bool = True) -> Codes:
    """Makes the codes of x (R, K) by the kernel for rows. With decode, the kernel also writes the decoded values, if
    this machine's GEMM multiplies decoded values."""
    from nvfp4_kernels.quantize import quantize

    r = how.rounding
    constants = (r.grid_max, r.scale_cap, list(r.candidates), r.stochastic, r.block_rows)
    decode = decode and (how.per_token or native_gemm(x.device.type) is None)
    amax = how.amax
    if amax is None and not how.per_token:
        amax = _amax_for_a_compiler(x)
    if how.largest is not None:
        if amax is None:
            amax = x.abs().amax(-1) if how.per_token else largest_magnitude(x)
        amax = how.largest(amax.float())
    layout = how.per_token, how.tiles and not how.per_token
    codes, scales, tensor_scale, decoded = quantize(x, amax, how.seed, how.stream, *constants, decode, *layout)
    return codes_of(r)(codes, scales, tensor_scale, decoded if decode else None)


def quantize_relu_squared(
    x: torch.Tensor, how: Quantization, seed: torch.Tensor
) -> tuple[Codes, torch.Tensor, torch.Tensor]:
    """Quantizes relu(x)^2 of x (R, K) by a kernel that does not write relu(x)^2 to memory. Returns the operand, and
    `kept` and `step`, which relu_squared.relu_squared would draw from the same seed.

    The recipe must have input_is_codes, and its blocks must have one row."""
    from nvfp4_kernels.relu_squared import quantize_relu_squared as kernel

    r, decode = how.rounding, native_gemm(x.device.type) is None
    *codes, decoded, kept, step = kernel(x, seed, r.grid_max, r.scale_cap, list(r.candidates), decode, how.tiles)
    return Codes(*codes, decoded if decode else None), kept, step


def largest_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Returns max |x|, float32 ()."""
    if use_kernels(x.device):
        from nvfp4_kernels.quantize import amax

        return amax(x)
    return x.abs().amax().float()


def _amax_for_a_compiler(x: torch.Tensor) -> torch.Tensor | None:
    """Under torch.compile, returns max |x|, a scalar in x's dtype. The compiler fuses this computation with the kernel
    that makes x, such as a norm. Without a compiler the result is None, and a kernel of this project finds the maximum.

    The fused kernel computes the maximum before x is rounded to BF16, and rounds the maximum. The result is the maximum
    of the rounded x to the bit, because rounding keeps the order of numbers.
    """
    return x.abs().amax(-1).amax() if torch.compiler.is_compiling() else None


def _rotate_quantize(
    value: torch.Tensor | NVFP4Tensor,
    row: Quantization | None,
    col: Quantization | None,
    emulated: bool,
) -> tuple[GemmOperand | None, GemmOperand | None]:
    """Makes up to two operands of value (R, C) by the kernel that rotates and quantizes: `row` describes the operand
    that is contracted over value's last dimension, and `col` the one that is contracted over its first dimension. The
    result has None for an operand whose description is None.

    With emulated, the operands are made as Decoded, which only the emulated GEMM can multiply.
    """
    from nvfp4_kernels.rotate import RotatedOperand, rotate_quantize

    def described(how: Quantization | None) -> tuple:
        if how is None:
            return None, None, None
        r = how.rounding
        limits, random = (r.grid_max, r.scale_cap, r.candidates), (how.rht_dim, how.stream, how.rht_stream)
        operand = RotatedOperand(*limits, r.stochastic, r.ms_eden, *random, emulated, how.tiles)
        return operand, how.seed, how.rht_seed

    codes = isinstance(value, NVFP4Tensor)
    source = (value.codes, value.scales, value.tensor_scale) if codes else (value, None, None)
    tensors = rotate_quantize(*source, *described(row), *described(col), (row or col).largest)
    results: list[GemmOperand | None] = []
    for how in (row, col):
        if how is None:
            results.append(None)
        elif not emulated:
            results.append(Codes(*tensors[:3]))
            tensors = tensors[3:]
        elif how.rounding.ms_eden:  # MS-EDEN's tensor_scale is a power of two and is contained in the values.
            results.append(Decoded(tensors[0]))
            tensors = tensors[1:]
        else:
            results.append(Decoded(tensors[0], tensors[1]))
            tensors = tensors[2:]
    return results[0], results[1]
