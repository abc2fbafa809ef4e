"""The GEMM of two operands, Y = A . B^T, of any two kinds of operands.py, and what all kinds share.

Where a Blackwell's tensor cores multiply NVFP4, two operands with codes go there, and FP8 operands with one scale go to
FP8 tensor cores (dispatch.py). Otherwise the product is emulated.
Decoded codes, exact in BF16, are multiplied with FP32 accumulation. The product of the tensor scales is applied to the
accumulator before the one rounding to the output dtype, which is the arithmetic of the tensor cores up to the order of
summation. On CUDA one cuBLAS call does it, whose alpha stays on the device (nvfp4_kernels/cublas.py). Where cuBLAS
cannot be reached this way, the product is kept in FP32 and scaled in a second step. The result is the same, with more
traffic.

An operand of two terms is multiplied term by term, A1 . B1 + A1 . B2 + A2 . B1: every product is one of 4-bit operands.
A2 . B2, of the residuals, is left out; it is of the size of the error that the operands have anyway.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from nanochat_fp4.nvfp4.dispatch import cublas_unavailable_reason


class GemmOperand:
    """The common part of all kinds of operand. operands.py has the other kinds, and a kind's methods."""

    tensor_scale: ClassVar[torch.Tensor | None] = None
    single = True  # one term
    exact = True  # the matrix has a dtype that holds all values, not the dtype that was asked for

    @property
    def terms(self) -> "tuple[GemmOperand, ...]":
        return (self,)

    @classmethod
    def from_tensors(cls, *tensors: torch.Tensor) -> "GemmOperand":
        return cls(*tensors)

    def tensor_core_product(self, b: "GemmOperand", out_dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def without_cache(self) -> "GemmOperand":
        """Itself without what can be made again from its tensors."""
        return self


@dataclass
class Plain(GemmOperand):
    """A tensor in FP32 or BF16."""

    values: torch.Tensor
    exact = False

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
    """code * scale in BF16 or FP32, and a tensor_scale of its own, or None for 1."""

    values: torch.Tensor
    tensor_scale: torch.Tensor | None = None

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values

    def dequantize(self) -> torch.Tensor:
        return self.values.float() if self.tensor_scale is None else self.values.float() * self.tensor_scale


@torch.library.custom_op("nanochat_fp4::after", mutates_args=())
def after(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy of value that a compiler must take for a function of both."""
    return value.clone()


@after.register_fake
def _(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


def gemm(
    a: GemmOperand,
    b: GemmOperand,
    *,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """a (M, K) . b (N, K)^T -> (M, N) in out_dtype.

    compute_dtype: what a plain operand is cast to (the dtype that the layer computes in without us).
    into:          of gemm_add. The result is None if the product was added to it here.
    An operand that was padded along K (zeros, so nothing changes) may meet one that was not.
    """
    if not (a.single and b.single):
        return _sum_of_products(a, b, compute_dtype, out_dtype)
    product = a.tensor_core_product(b, out_dtype)
    if product is not None:
        return product
    scales = [v.tensor_scale for v in (a, b) if v.tensor_scale is not None]
    # FP32 () or, with a quantized per token, (M, 1)
    alpha = (scales[0] if len(scales) == 1 else scales[0] * scales[1]) if scales else None
    x, y = a.matrix(compute_dtype), b.matrix(compute_dtype)
    k = min(x.shape[-1], y.shape[-1])
    x, y = x[:, :k], y[:, :k]
    if not x.is_cuda or x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        # On a CPU decoded values are in FP32: nothing is lost, and CPUs are not faster in BF16.
        dtype = torch.float32 if x.is_cuda or a.exact or b.exact else compute_dtype
        with torch.autocast(x.device.type, enabled=False):
            product = x.to(dtype) @ y.to(dtype).T
        return _cast(product if alpha is None else product * alpha, out_dtype)
    if alpha is None and out_dtype == torch.bfloat16:
        return x @ y.T
    if (alpha is None or alpha.dim() == 0) and cublas_unavailable_reason() is None:
        from nvfp4_kernels.cublas import mm_alpha, mm_alpha_add

        if into is not None:
            return mm_alpha_add(_dense(x), _dense(y), alpha, into)
        return mm_alpha(_dense(x), _dense(y), alpha, out_dtype)
    product = torch.mm(x, y.T, out_dtype=torch.float32)
    return _cast(product if alpha is None else product * alpha, out_dtype)


def gemm_add(a: GemmOperand, b: GemmOperand, into: torch.Tensor, *, compute_dtype: torch.dtype) -> None:
    """Adds a (M, K) . b (N, K)^T to `into`, float32 (M, N) with contiguous rows.

    The reference is `into += gemm(...)` in FP32: to the bit the sum that autograd makes. CPUs do that, and FP4 tensor
    cores (torch's scaled_mm has no C), and operands of two terms. If cuBLAS takes alpha from the device, it adds in
    the GEMM itself, alpha * accumulator + into. No product is written, and the sum is rounded once instead of twice.
    """
    product = gemm(a, b, compute_dtype=compute_dtype, out_dtype=torch.float32, into=into)
    if product is not None:
        into.add_(product)


def _sum_of_products(
    a: GemmOperand, b: GemmOperand, compute_dtype: torch.dtype, out_dtype: torch.dtype
) -> torch.Tensor:
    """Term by term."""
    (a_first, *a_rest), (b_first, *b_rest) = a.terms, b.terms
    pairs = [(a_first, b_first), *((a_first, rest) for rest in b_rest), *((rest, b_first) for rest in a_rest)]
    total = gemm(*pairs[0], compute_dtype=compute_dtype, out_dtype=torch.float32)
    for x, y in pairs[1:]:
        product = gemm(x, y, compute_dtype=compute_dtype, out_dtype=torch.float32, into=total)
        total = total if product is None else total + product
    return _cast(total, out_dtype)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.to(dtype), not called where it would return x itself: where an autograd function's forward pass ends in such a
    call, torch 2.11's torch.compile makes its gradients zero."""
    return x if x.dtype == dtype else x.to(dtype)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """With contiguous rows or columns that do not overlap, which is what cuBLAS takes."""
    (rows, columns), (down, along) = x.shape, x.stride()
    taken = down >= columns if along == 1 else down == 1 and along >= rows
    return x if taken else x.clone(memory_format=torch.contiguous_format)
