"""The GEMM of two operands, Y = A . B^T. The operands may be of any two kinds of operands.py, and this file has the
base class of all kinds.

FP4 tensor cores multiply two operands of codes, and FP8 tensor cores multiply two FP8 operands with one scale each, on
GPUs that have them (dispatch.py). Any other product is emulated: the codes are decoded, which is exact in BF16, and
multiplied with sums in FP32. The sums are multiplied by the two tensor scales before they are rounded once to the
output dtype. This is the arithmetic of FP4 tensor cores, up to the order of summation. On CUDA one call of cuBLAS
computes it, which reads the factor alpha from GPU memory (nvfp4_kernels/cublas.py). If cuBLAS cannot be called in this
way, the product is written in FP32 and multiplied by the scales in a second pass, which gives the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch.autograd import function

from nanochat_fp4.nvfp4.dispatch import cublas_unavailable_reason


class TensorCoreProduct(Protocol):
    """A product (M, N) that FP4 or FP8 tensor cores compute: dispatch.FP4Product or dispatch.FP8Product."""

    def result(self, out_dtype: torch.dtype) -> torch.Tensor: ...

    def add_to(self, into: torch.Tensor) -> None: ...


@dataclass
class GemmOperand:
    """The base class of all kinds of operand. operands.py has the other kinds, and lists the methods of a kind.

    padding: the number of zeros at the end of the contracted dimension that are not the tensor's own elements
    """

    padding: int = field(default=0, kw_only=True)
    tensor_scale = None  # Kinds with a tensor scale have a field of this name.
    exact = True  # `matrix` returns a dtype that holds all values exactly, whatever dtype it was asked for.

    @property
    def multiplied(self) -> "GemmOperand":
        """The operand that a product multiplies: the 8-bit numbers of an FP8WithCodes, otherwise itself."""
        return self

    @property
    def shape(self) -> torch.Size:
        """The shape (R, K), with the padding."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """The number of contracted elements, without the padding."""
        return self.shape[-1] - self.padding

    def padded_from(self, length: int) -> "GemmOperand":
        """Sets the padding of an operand that was made of a tensor with this number of contracted elements, and returns
        the operand."""
        self.padding = self.shape[-1] - length
        return self

    @classmethod
    def from_tensors(cls, *tensors: torch.Tensor) -> "GemmOperand":
        return cls(*tensors)

    def on_tensor_cores(self, b: "GemmOperand", out_dtype: torch.dtype) -> "TensorCoreProduct | None":
        """Returns the product with b, if tensor cores of this machine can compute it in out_dtype, or None."""
        return None

    def for_backward(self) -> "GemmOperand":
        """Returns the operand that the backward pass keeps and uses instead of this operand of the forward product."""
        return self

    def without_cache(self) -> "GemmOperand":
        """Returns the operand without cached values that can be computed again from its tensors."""
        return self


@dataclass
class Plain(GemmOperand):
    """A tensor in FP32 or BF16."""

    values: torch.Tensor
    exact = False

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.values,)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)

    def source(self) -> torch.Tensor:
        return self.values

    def transposed(self) -> "Plain":
        return Plain(self.values.T)

    def dequantize(self) -> torch.Tensor:
        return self.values.float()

    def depending_on(self, seed: torch.Tensor) -> "Plain":
        return Plain(after(self.values, seed))


@dataclass
class Decoded(GemmOperand):
    """The values code * scale in BF16 or FP32, and a tensor_scale, float32 () or (R, 1), or None for 1. Only the values
    of a user's own format are kept for the backward pass."""

    values: torch.Tensor
    tensor_scale: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values

    def dequantize(self) -> torch.Tensor:
        return self.values.float() if self.tensor_scale is None else self.values.float() * self.tensor_scale

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.values, self.tensor_scale

    def source(self) -> torch.Tensor:
        return self.dequantize()

    def transposed(self) -> "Decoded":
        return Decoded(self.values.T, self.tensor_scale)

    def depending_on(self, seed: torch.Tensor) -> "Decoded":
        return Decoded(after(self.values, seed), self.tensor_scale)


@torch.library.custom_op("nanochat_fp4::after", mutates_args=())
def after(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Returns a copy of value. A compiler cannot look into this operator, so it takes the copy for a function of both
    tensors, and computes the copy only after `other`."""
    return value.clone()


@after.register_fake
def _(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def once_differentiable(backward: Callable) -> Callable:
    """A decorator for the backward of an autograd function: a second derivative raises an error.

    torch's decorator of this name raises the error only if the incoming gradients require grad. Other gradients, such
    as those of y.sum(), would get a second derivative of zero without an error."""
    once = function.once_differentiable(backward)

    def differentiated(ctx, *grads: torch.Tensor | None):
        if torch.is_grad_enabled():  # create_graph=True
            grads = tuple(None if grad is None else grad.detach().requires_grad_() for grad in grads)
        return once(ctx, *grads)

    return differentiated


class _Dense(NamedTuple):
    """The factors of a dense product alpha * x . y^T, with x (M, K) and y (N, K).

    alpha: float32 (), or (M, 1) if a is quantized per token, or None for 1
    dtype: the dtype in which a product is computed that cuBLAS does not compute in BF16
    """

    x: torch.Tensor
    y: torch.Tensor
    alpha: torch.Tensor | None
    dtype: torch.dtype

    @property
    def in_bf16(self) -> bool:
        return self.x.is_cuda and self.x.dtype == self.y.dtype == torch.bfloat16

    @property
    def scaled_by_cublas(self) -> bool:
        """Whether cuBLAS computes the product and reads alpha from GPU memory."""
        one_scale = self.alpha is None or self.alpha.dim() == 0
        return self.in_bf16 and one_scale and cublas_unavailable_reason() is None

    def result(self, out_dtype: torch.dtype) -> torch.Tensor:
        if not self.in_bf16:
            with torch.autocast(self.x.device.type, enabled=False):
                product = self.x.to(self.dtype) @ self.y.to(self.dtype).T
        elif self.alpha is None and out_dtype == torch.bfloat16:
            return self.x @ self.y.T
        elif self.scaled_by_cublas:
            from nvfp4_kernels.cublas import mm_alpha

            return mm_alpha(self.x, self.y, self.alpha, out_dtype)
        else:
            product = torch.mm(self.x, self.y.T, out_dtype=torch.float32)
        return _cast(product if self.alpha is None else product * self.alpha, out_dtype)

    def add_to(self, into: torch.Tensor) -> None:
        if not self.scaled_by_cublas:
            into.add_(self.result(torch.float32))
            return
        from nvfp4_kernels.cublas import mm_alpha_add

        mm_alpha_add(self.x, self.y, self.alpha, into)


def _dense(a: GemmOperand, b: GemmOperand, compute_dtype: torch.dtype) -> _Dense:
    scales = [v.tensor_scale for v in (a, b) if v.tensor_scale is not None]
    alpha = (scales[0] if len(scales) == 1 else scales[0] * scales[1]) if scales else None
    x, y = a.matrix(compute_dtype), b.matrix(compute_dtype)
    k = min(x.shape[-1], y.shape[-1])
    # On a CPU decoded values are multiplied in FP32. This loses nothing, and CPUs are not faster in BF16.
    dtype = torch.float32 if x.is_cuda or a.exact or b.exact else compute_dtype
    return _Dense(x[:, :k], y[:, :k], alpha, dtype)


def _product(
    a: GemmOperand, b: GemmOperand, compute_dtype: torch.dtype, out_dtype: torch.dtype
) -> TensorCoreProduct | _Dense:
    """Returns the product of two operands, ready to be computed."""
    on_tensor_cores = a.on_tensor_cores(b, out_dtype)
    return _dense(a, b, compute_dtype) if on_tensor_cores is None else on_tensor_cores


def _check_lengths(a: GemmOperand, b: GemmOperand) -> None:
    if a.length != b.length:
        raise ValueError(
            f"gemm: a is contracted over {a.length} elements and b over {b.length}; give two operands of one length"
        )


def gemm(
    a: GemmOperand,
    b: GemmOperand,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Computes a (M, K) . b (N, K)^T. Returns (M, N) in out_dtype.

    compute_dtype: the dtype that an unquantized operand is cast to, in which the layer would compute without
                   quantization

    One operand may be padded along K and the other one not, because the padding consists of zeros. Raises ValueError if
    K differs in any other way.
    """
    _check_lengths(a, b)
    return _product(a.multiplied, b.multiplied, compute_dtype, out_dtype).result(out_dtype)


def gemm_add(
    a: GemmOperand,
    b: GemmOperand,
    into: torch.Tensor,
    *,
    compute_dtype: torch.dtype,
) -> None:
    """Adds a (M, K) . b (N, K)^T to `into`, float32 (M, N) with contiguous rows. The other arguments are gemm's.

    The reference is `into += gemm(...)` in FP32, which has the bits of the sum that autograd computes. CPUs compute it
    in this way. Where cuBLAS, or cuBLASLt for FP4, reads alpha from GPU memory, the
    GEMM itself computes alpha * sum + into. No product is written, and the result is rounded once instead of twice.
    """
    _check_lengths(a, b)
    _product(a.multiplied, b.multiplied, compute_dtype, torch.float32).add_to(into)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns x in this dtype. x.to is not called if x has the dtype already, because torch.compile of torch 2.11 makes
    the gradients of an autograd function zero if its forward ends in a call of `to` that returns its input."""
    return x if x.dtype == dtype else x.to(dtype)
