"""The operands of a GEMM, and their product Y = A . B^T.

`quantize_operand` makes an operand of a tensor, or of an operand of another product, by the Triton kernels where they
can and by the reference otherwise. `quantize_grad_output` makes both operands of grad_output. `gemm` multiplies two
operands on FP4 or FP8 tensor cores if dispatch.library finds some that take them.

Any other product is emulated: the codes are decoded, which is exact in BF16, and multiplied with sums in FP32. The sums
are multiplied by the two tensor scales before they are rounded once to the output dtype. This is the arithmetic of FP4
tensor cores, up to the order of summation. On CUDA one call of cuBLAS computes it, which reads the factor alpha from
GPU memory (nvfp4_kernels/cublas.py). If cuBLAS cannot be called in this way, the product is written in FP32 and
multiplied by the scales in a second pass, which gives the same result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import function

from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.format import BLOCK, NVFP4Tensor, swizzle_scales, transpose_square
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.recipes import Operand


@dataclass
class Quantized(NVFP4Tensor):
    """An operand of a product: a matrix (R, K) that is contracted over K. It has one of four forms.

        codes, scales, tensor_scale     NVFP4, 4.5 bits an element. `decoded` is a cache.
        codes, tensor_scale             FP8. tensor_scale is float32 (), or (R, 1) per token.
        decoded, tensor_scale           exact values in BF16 or FP32, for a product that follows at once or in a format
                                        of a user's own. Without a tensor_scale it is 1.
        decoded                         a plain tensor, which is not rounded, and is cast to a layer's compute dtype

    length: the number of contracted elements, without the zeros that pad K to whole blocks or rotated groups
    square: whether 16 neighbouring rows share their scales, so that the codes can be transposed
    plain:  whether the tensor is not rounded
    kept:   the operand that the backward pass uses instead: 4-bit codes of a tensor whose 8 bits the forward multiplies
    """

    codes: Tensor | None = None
    scales: Tensor | None = None
    tensor_scale: Tensor | None = None
    length: int = 0
    square: bool = False
    plain: bool = False
    kept: "Quantized | None" = None

    @property
    def stored(self) -> Tensor:
        """The tensor of R rows that holds the values."""
        return self.decoded if self.codes is None else self.codes

    @property
    def is_fp8(self) -> bool:
        return self.codes is not None and self.scales is None

    @property
    def has_row_scales(self) -> bool:
        return self.tensor_scale is not None and self.tensor_scale.dim() > 0

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns the values (R, K), rounded to dtype."""
        values = self.decode(torch.float32)
        return (values if self.tensor_scale is None else values * self.tensor_scale).to(dtype)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Returns the factor of a dense product, without tensor_scale. Rounded values are in BF16 on a GPU and in FP32
        on a CPU, and a plain tensor is in dtype."""
        if self.plain:
            return self.decoded.to(dtype)
        if not self.stored.is_cuda:
            return self.decode(torch.float32)
        if self.decoded is None and not self.is_fp8 and dispatch.kernels_unavailable_reason() is None:
            from nvfp4_kernels.decode import decode

            return decode(self.codes, self.scales)
        return self.decode(torch.bfloat16)

    def transposed(self) -> "Quantized":
        """Returns the same values, contracted over the other dimension, without another rounding."""
        rows = self.stored.shape[0]
        if self.plain or self.has_row_scales:
            # Scales of rows cannot be applied after a product that contracts the rows, so they are multiplied in.
            return Quantized(decoded=(self.decoded if self.plain else self.dequantize()).T, length=rows, plain=True)
        if self.is_fp8:  # FP8 tensor cores contract both operands over their last dimension, so the codes are moved.
            return Quantized(self.codes.T.contiguous(), tensor_scale=self.tensor_scale, length=rows)
        if self.square and rows % BLOCK == 0 and dispatch.native_gemm(self.codes.device.type):
            transpose = transpose_square
            if dispatch.use_kernels(self.codes.device):
                from nvfp4_kernels.decode import transpose_square as transpose
            codes, scales = transpose(self.codes, self.scales)
            return replace(self, codes=codes, scales=scales, decoded=None, length=rows)
        return Quantized(decoded=self.matrix(torch.float32).T, tensor_scale=self.tensor_scale, length=rows)

    def without_cache(self) -> "Quantized":
        """Returns the operand without decoded values, which take four times the memory of the codes."""
        return self if self.codes is None else replace(self, decoded=None)

    def depending_on(self, other: Tensor | None) -> "Quantized":
        """Returns the operand in a form that a compiler takes for a function of `other`.

        torch.compile decides by itself which operation runs in which of the two passes. If neither the forward's
        outputs nor the backward's inputs seemed to depend on a seed, the compiler could draw the seed once in each
        pass. The two operands of a GEMM would then be rotated with different signs, and their product would be noise.
        Under a compiler, therefore, the output is made to depend on the forward's seed, and the backward's seed depends
        on grad_output.
        """
        if other is None or not torch.compiler.is_compiling():
            return self
        # A kernel that decodes does not read tensor_scale, and a product of decoded values does not read the scales.
        names = ("scales", "tensor_scale") if self.codes is not None else ("decoded",)
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: after(t, other) for name, t in tensors.items() if t is not None})


def taken_apart(operands: Sequence[Quantized]) -> tuple[list[tuple[int, bool, bool]], list[Tensor | None]]:
    """Takes operands apart for autograd: four tensors each, some of which are None, and what else is theirs.
    put_together makes them again."""
    tensors: list[Tensor | None] = []
    for o in operands:
        tensors += [o.codes, o.scales, o.tensor_scale, o.decoded if o.codes is None else None]
    return [(o.length, o.square, o.plain) for o in operands], tensors


def put_together(
    about: Sequence[tuple[int, bool, bool]], tensors: Sequence[Tensor | None]
) -> tuple[list[Quantized], Sequence[Tensor | None]]:
    """Makes the operands that taken_apart was given. Returns them, and the tensors that follow theirs."""
    operands = [Quantized(*tensors[4 * i : 4 * i + 4], *rest) for i, rest in enumerate(about)]
    return operands, tensors[4 * len(about) :]


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Returns the parts of a weight, one below the other, as one operand. They have one tensor_scale."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.plain:
        return replace(first, decoded=torch.cat([part.decoded for part in parts]))
    # Older releases of torch cannot join E4M3 tensors, so their bytes are joined.
    codes, scales = (
        torch.cat([t.view(torch.uint8) for t in some]) for some in zip(*((p.codes, p.scales) for p in parts))
    )
    return replace(first, codes=codes, scales=scales.view(first.scales.dtype), decoded=None)


# ----------------------------------------------------------------------------------------------------------------------
# Making operands


def quantize_operand(
    value: Tensor | Quantized, how: Quantization, *, transpose: bool = False, keep_codes: bool = False
) -> Quantized:
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
    if not isinstance(value, Quantized):
        value = Quantized(decoded=value, length=value.shape[1], plain=True)
    r, device = how.rounding, value.stored.device
    if r is None:
        return value.transposed() if transpose else value
    length = value.stored.shape[0] if transpose else value.length
    # The kernels that quantize codes or E4M3 numbers again can read only a single tensor_scale.
    codes = value.codes is not None and value.codes.dtype != torch.float8_e5m2 and not value.has_row_scales
    x = value if codes else value.decoded if value.plain else value.dequantize()
    # The kernels can compute a scale per token, a rotation, or square blocks, but no two of these together.
    two = how.per_token + (how.rht_dim > 0) + (r.block_rows > 1) > 1
    kernels = dispatch.use_kernels(device) and r.has_kernels and not two
    if kernels and how.rht_dim and (transpose or not codes):
        emulated = not keep_codes and dispatch.native_gemm(device.type) is None
        source = (x.codes, x.scales, x.tensor_scale) if codes else (x, None, None)
        made = _rotate_quantize(source, *((None, how) if transpose else (how, None)), emulated)[int(transpose)]
    else:
        x = x.dequantize() if codes else x
        x = x.T if transpose else x
        if missing := -length % max(how.rht_dim, r.block):  # pad would copy x even if nothing is missing.
            x = torch.nn.functional.pad(x, (0, missing))
        both = how.kept and made_in_rows(how) and not how.per_token and dispatch.use_kernels(device)
        if both or (kernels and not how.rht_dim):
            made = operand_of_rows(quantize_rows(x, how), how)
        else:
            made = _by_reference(x, how, length)
            if how.kept:
                made.kept = quantize_operand(x, how._replace(rounding=how.kept, kept=None)).without_cache()
    made.length = length
    return made


def _by_reference(x: Tensor, how: Quantization, length: int) -> Quantized:
    r, t = how.rounding, quantize_reference(x, how)
    if r.fp8:
        return Quantized(t.codes, tensor_scale=t.tensor_scale)
    if r.quantize:
        values = t.decode(torch.bfloat16 if x.is_cuda else torch.float32)
        # The backward pass makes its operands from this one, and must not see the padding.
        return Quantized(decoded=values if how.rht_dim else values[:, :length], tensor_scale=t.tensor_scale)
    scales = swizzle_scales(t.scales) if how.tiles and not how.per_token else t.scales
    return Quantized(t.codes, scales, t.tensor_scale, t.decoded, square=r.block_rows == BLOCK)


def relu_squared_gradient(grad_y: Tensor, kept: Tensor, step: Tensor | None = None) -> Tensor:
    """Returns grad_y * 2 relu(x), in grad_y's dtype. kept and step are results of epilogue.relu_squared. Without step,
    kept is x itself."""
    return (grad_y * (2 * torch.relu(kept) if step is None else 2 * step * kept)).to(grad_y.dtype)


def quantize_grad_output(
    e: Tensor, for_dgrad: Quantization | None, for_wgrad: Quantization | None, factors: Sequence[Tensor] = ()
) -> tuple[Quantized | None, Quantized | None]:
    """Makes both operands of grad_output (M, N): E (M, N) for grad_input, and E^T (N, M) for grad_weight. An operand
    whose Quantization is None is not made, and None is returned for it.

    The kernels read grad_output once for both operands. With factors, which are kept and step of epilogue.relu_squared,
    grad_output is relu_squared_gradient(e, *factors). It is not written if the kernel that rotates computes it.
    """
    both = for_dgrad is not None and for_wgrad is not None
    a, b = (for_dgrad.rounding, for_wgrad.rounding) if both else (None, None)
    kernels = a and b and a.has_kernels and b.has_kernels and a.block_rows == b.block_rows == 1
    rotate = kernels and for_wgrad.rht_dim and dispatch.use_kernels(e.device)
    if factors and not (rotate and dispatch.multiplies_as_it_rotates()):
        e, factors = relu_squared_gradient(e, *factors), ()
    if rotate:
        source = e, *(factors or (None, None))
        row, col = _rotate_quantize(source, for_dgrad, for_wgrad, dispatch.native_gemm(e.device.type) is None)
        row.length, col.length = e.shape[1], e.shape[0]
        return row, col
    if a and a == b and a.fp8 and not (for_dgrad.rht_dim or for_wgrad.rht_dim):
        if a.element == "e5m2" and not e.shape[0] % 4 and dispatch.use_kernels(e.device):
            from nvfp4_kernels.quantize import quantize_both

            row, col, scale = quantize_both(e, amax_of(e, for_dgrad))
            return Quantized(row, None, scale, length=e.shape[1]), Quantized(col, None, scale, length=e.shape[0])
        quantized = quantize_operand(e, for_dgrad)
        return quantized, quantized.transposed()
    return (
        None if for_dgrad is None else quantize_operand(e, for_dgrad),
        None if for_wgrad is None else quantize_operand(e, for_wgrad, transpose=True),
    )


def made_in_rows(how: Quantization | Operand) -> bool:
    """Whether one pass over rows makes the operand, to nearest: codes in blocks of 1x16, E4M3 numbers, or both."""
    roundings = [r for r in (how.rounding, how.kept) if r]
    known = [r.has_kernels or (r.fp8 and r.element == "e4m3") for r in roundings]
    return bool(known) and all(known) and not any(r.random or r.block_rows > 1 for r in roundings)


def quantize_rows(x: Tensor, how: Quantization, squared: Tensor | None = None) -> tuple[Tensor, ...]:
    """Makes the operand x (R, K) by the kernel for rows. Returns the six tensors that operand_of_rows takes. If
    `squared` is a seed, the operand is relu(x)^2, which is not written itself, and kept and step of
    epilogue.relu_squared follow.

    The kernel reads a tensor once for its amax, and once more for 8-bit numbers and 4-bit codes alike. It also writes
    the decoded values of codes, if this machine's GEMM multiplies decoded values.
    """
    from nvfp4_kernels.quantize import quantize
    from nvfp4_kernels.relu_squared import quantize_relu_squared

    fp8, r = how.rounding.fp8, how.kept or how.rounding
    constants, eight = (r.grid_max, r.scale_cap, list(r.candidates)), how.rounding.grid_max if fp8 else 0.0
    decode = not fp8 and (how.per_token or dispatch.native_gemm(x.device.type) is None)
    if squared is not None:
        return quantize_relu_squared(x, squared, *constants, decode, how.tiles, eight, not r.fp8)
    layout = decode, how.per_token, how.tiles and not how.per_token
    return quantize(x, amax_of(x, how), how.seed, how.stream, *constants, r.stochastic, r.block_rows, *layout, eight)


def operand_of_rows(made: Sequence[Tensor], how: Quantization) -> Quantized:
    """Returns the operand whose tensors quantize_rows has made."""
    codes, scales, tensor_scale, decoded, numbers, number_scale = made
    r = how.kept or how.rounding
    decoded, length = decoded if decoded.dim() > 1 else None, 2 * codes.shape[-1]
    four = Quantized(codes, scales, tensor_scale, decoded, length, square=r.block_rows == BLOCK)
    if not how.rounding.fp8:
        return four
    return Quantized(numbers, tensor_scale=number_scale, length=numbers.shape[1], kept=None if r.fp8 else four)


def amax_of(x: Tensor, how: Quantization) -> Tensor | None:
    """Returns the amax that x (R, K) is scaled by, or None if a kernel finds it by a pass of its own."""
    amax, fused = how.amax, torch.compiler.is_compiling() and not how.per_token
    if amax is None and (fused or how.largest is not None):
        # A compiler fuses this with the kernel that makes x, such as a norm. It finds the maximum before x is rounded
        # to BF16, and rounds it: to the bit the maximum of the rounded x, for rounding keeps the order.
        amax = x.abs().amax(-1)
        amax = amax if how.per_token else amax.amax()
    return amax if how.largest is None else how.largest(amax.float())


def _rotate_quantize(
    source: Sequence[Tensor | None], row: Quantization | None, col: Quantization | None, emulated: bool
) -> tuple[Quantized | None, Quantized | None]:
    """Makes up to two operands of a tensor (R, C) by the kernel that rotates and quantizes, which takes the tensor as
    three (rotate.rotate_quantize). `row` describes the operand that is contracted over C, and `col` the one that is
    contracted over R. The result has None for an operand whose description is None.

    With emulated, the operands have decoded values alone, which only the emulated GEMM can multiply.
    """
    from nvfp4_kernels.rotate import RotatedOperand, rotate_quantize

    def described(how: Quantization | None) -> tuple:
        if how is None:
            return None, None, None
        r = how.rounding
        limits, random = (r.grid_max, r.scale_cap, r.candidates), (how.rht_dim, how.stream, how.rht_stream)
        operand = RotatedOperand(*limits, r.stochastic, r.ms_eden, *random, emulated, how.tiles)
        return operand, how.seed, how.rht_seed

    tensors = iter(rotate_quantize(*source, *described(row), *described(col), (row or col).largest))

    def operand(how: Quantization | None) -> Quantized | None:
        if how is None:
            return None
        if not emulated:
            return Quantized(next(tensors), next(tensors), next(tensors))
        # MS-EDEN's tensor_scale is a power of two and is contained in the values.
        return Quantized(decoded=next(tensors), tensor_scale=None if how.rounding.ms_eden else next(tensors))

    return operand(row), operand(col)


# ----------------------------------------------------------------------------------------------------------------------
# The product


def gemm(
    a: Quantized,
    b: Quantized,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype = torch.float32,
    into: Tensor | None = None,
    nonnegative: bool = False,
) -> Tensor | None:
    """Computes a (M, K) . b (N, K)^T. Returns (M, N) in out_dtype, or adds it to `into`, float32 (M, N) with contiguous
    rows, and returns None.

    compute_dtype: the dtype that a plain operand is cast to, in which the layer would compute without quantization
    nonnegative:   whether a has no negative values, so that the sums of FP8 tensor cores must be exact (dispatch.mm)

    The sum in `into` has the bits of the sum that autograd computes. If cuBLAS, or cuBLASLt for FP4, reads alpha from
    GPU memory, the GEMM itself computes alpha * sum + into. No product is written, and the result is rounded once
    instead of twice.

    One operand may be padded along K and the other one not, because the padding consists of zeros. Raises ValueError if
    K differs in any other way.
    """
    if a.length != b.length:
        raise ValueError(
            f"gemm: a is contracted over {a.length} elements and b over {b.length}; give two operands of one length"
        )
    if (name := dispatch.library(a, b)) is not None:
        return dispatch.mm(a, b, out_dtype, name, nonnegative) if into is None else dispatch.mm_add(a, b, into, name)
    scales = [v.tensor_scale for v in (a, b) if v.tensor_scale is not None]
    alpha = (scales[0] if len(scales) == 1 else scales[0] * scales[1]) if scales else None
    x, y = a.matrix(compute_dtype), b.matrix(compute_dtype)
    k = min(x.shape[-1], y.shape[-1])
    x, y = x[:, :k], y[:, :k]
    in_bf16 = x.is_cuda and x.dtype == y.dtype == torch.bfloat16
    if in_bf16 and alpha is None and out_dtype == torch.bfloat16:
        return x @ y.T
    if in_bf16 and (alpha is None or alpha.dim() == 0) and dispatch.cublas_unavailable_reason() is None:
        from nvfp4_kernels.cublas import mm_alpha, mm_alpha_add

        return mm_alpha(x, y, alpha, out_dtype) if into is None else mm_alpha_add(x, y, alpha, into)
    if in_bf16:
        product = torch.mm(x, y.T, out_dtype=torch.float32)
    else:
        # On a CPU decoded values are multiplied in FP32. This loses nothing, and CPUs are not faster in BF16.
        dtype = torch.float32 if x.is_cuda or not (a.plain and b.plain) else compute_dtype
        with torch.autocast(x.device.type, enabled=False):
            product = x.to(dtype) @ y.to(dtype).T
    product = product if alpha is None else product * alpha
    if into is not None:
        into.add_(product)
        return None
    # torch.compile of torch 2.11 makes the gradients of an autograd function zero if its forward ends in a call of `to`
    # that returns its input.
    return product if product.dtype == out_dtype else product.to(out_dtype)


# ----------------------------------------------------------------------------------------------------------------------
# Autograd and compilers


@torch.library.custom_op("nanochat_fp4::after", mutates_args=())
def after(value: Tensor, other: Tensor) -> Tensor:
    """Returns a copy of value. A compiler cannot look into this operator, so it takes the copy for a function of both
    tensors, and computes the copy only after `other`."""
    return value.clone()


@after.register_fake
def _(value: Tensor, other: Tensor) -> Tensor:
    return torch.empty_like(value)


def once_differentiable(backward: Callable) -> Callable:
    """A decorator for the backward of an autograd function: a second derivative raises an error.

    torch's decorator of this name raises the error only if the incoming gradients require grad. Other gradients, such
    as those of y.sum(), would get a second derivative of zero without an error."""
    once = function.once_differentiable(backward)

    def differentiated(ctx, *grads: Tensor | None):
        if torch.is_grad_enabled():  # create_graph=True
            grads = tuple(None if grad is None else grad.detach().requires_grad_() for grad in grads)
        return once(ctx, *grads)

    return differentiated
