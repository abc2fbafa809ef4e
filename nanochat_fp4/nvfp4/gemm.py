"""The GEMM of two operands, Y = A . B^T, of any two kinds of operands.py, and what all kinds share.

Where a Blackwell's tensor cores multiply NVFP4, two operands with codes go there, and FP8 operands with one scale go to
FP8 tensor cores (native.py). Otherwise the product is emulated:
the product of decoded codes (exact in BF16) with FP32 accumulation, and the product of the tensor scales applied to the
accumulator before the one rounding to the output dtype: the arithmetic of the tensor cores up to the order of
summation. On CUDA that is one cuBLAS call whose alpha stays on the device (nvfp4_kernels/cublas.py); where cuBLAS
cannot be reached this way, the product is kept in FP32 and scaled in a second step, with the same result and more
traffic.

An operand of two terms is multiplied term by term, A1 . B1 + A1 . B2 + A2 . B1: every product is one of 4-bit operands.
A2 . B2, of the residuals, is left out; it is of the size of the error that the operands have anyway.
"""

from typing import ClassVar

import torch

from nanochat_fp4.nvfp4.dispatch import cublas_unavailable_reason


class GemmOperand:
    """What all kinds of operand share; operands.py says what a kind has, and which there are."""

    tensor_scale: ClassVar[torch.Tensor | None] = None
    exact = True  # its matrix is in a dtype that holds its values; False: in the dtype that was asked for

    @property
    def terms(self) -> "tuple[GemmOperand, ...]":
        return (self,)

    @classmethod
    def from_tensors(cls, *tensors: torch.Tensor) -> "GemmOperand":
        return cls(*tensors)

    def grad_weight(
        self,
        et: "GemmOperand",
        xt: "GemmOperand",
        grad_output: torch.Tensor,
        compute_dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """The wgrad GEMM of the operands made of grad_output and of this input, (N, K)."""
        return gemm(et, xt, compute_dtype=compute_dtype, out_dtype=out_dtype)

    def add_grad_weight(
        self,
        et: "GemmOperand",
        xt: "GemmOperand",
        grad_output: torch.Tensor,
        compute_dtype: torch.dtype,
        into: torch.Tensor,
    ) -> None:
        """Adds it to `into`, float32 (N, K)."""
        gemm_add(et, xt, into, compute_dtype=compute_dtype)

    def tensor_core_product(self, b: "GemmOperand", out_dtype: torch.dtype) -> torch.Tensor | None:
        return None

    def without_cache(self) -> "GemmOperand":
        """Itself without what can be made again from its tensors."""
        return self


def gemm(a: GemmOperand, b: GemmOperand, *, compute_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.Tensor:
    """a (M, K) . b (N, K)^T -> (M, N) in out_dtype.

    compute_dtype: what a plain operand is cast to (the dtype that the layer computes in without us).
    An operand that was padded along K (zeros, so nothing changes) may meet one that was not.
    """
    (a_first, *a_rest), (b_first, *b_rest) = a.terms, b.terms
    if not (a_rest or b_rest):
        return _product(a_first, b_first, compute_dtype, out_dtype)
    pairs = [(a_first, b_first), *((a_first, rest) for rest in b_rest), *((rest, b_first) for rest in a_rest)]
    total = _product(*pairs[0], compute_dtype, torch.float32)
    for x, y in pairs[1:]:
        product = _product(x, y, compute_dtype, torch.float32, total)
        total = total if product is None else total + product
    return _cast(total, out_dtype)


def gemm_add(a: GemmOperand, b: GemmOperand, into: torch.Tensor, *, compute_dtype: torch.dtype) -> None:
    """Adds a (M, K) . b (N, K)^T to `into`, float32 (M, N) with contiguous rows.

    The reference is `into += gemm(...)` in FP32: to the bit the sum that autograd makes. CPUs do that, and FP4 tensor
    cores (torch's scaled_mm has no C), and operands of two terms. Where cuBLAS takes alpha from the device it adds in
    the GEMM itself, alpha * accumulator + into: no product is written, and the sum is rounded once instead of twice.
    """
    if len(a.terms) == len(b.terms) == 1:
        product = _product(*a.terms, *b.terms, compute_dtype, torch.float32, into)
    else:
        product = gemm(a, b, compute_dtype=compute_dtype, out_dtype=torch.float32)
    if product is not None:
        into.add_(product)


def _product(
    a: GemmOperand,
    b: GemmOperand,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    into: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Of two single terms. None where it was added to `into`, which not every way of multiplying does."""
    product = a.tensor_core_product(b, out_dtype)
    if product is not None:
        return product
    alpha = _product_of_tensor_scales(a, b)
    x, y = a.matrix(compute_dtype), b.matrix(compute_dtype)
    k = min(x.shape[-1], y.shape[-1])
    x, y = x[:, :k], y[:, :k]
    if not x.is_cuda:  # decoded values in FP32: nothing is lost, and CPUs are not faster in BF16
        product = _matmul(x, y, torch.float32 if a.exact or b.exact else compute_dtype)
        return _cast(product if alpha is None else product * alpha, out_dtype)
    if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        product = _matmul(x, y, torch.float32)
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


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.to(dtype), not called where it would return x itself: where an autograd function's forward pass ends in such a
    call, torch 2.11's torch.compile makes its gradients zero."""
    return x if x.dtype == dtype else x.to(dtype)


def _matmul(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x.to(dtype) @ y.to(dtype).T


def _dense(x: torch.Tensor) -> torch.Tensor:
    """With contiguous rows or columns, which is what cuBLAS takes."""
    return x if 1 in x.stride() else x.contiguous()


def _product_of_tensor_scales(a: GemmOperand, b: GemmOperand) -> torch.Tensor | None:
    """FP32 () or, with a quantized per token, (M, 1); None if there is none to apply."""
    scales = [v.tensor_scale for v in (a, b) if v.tensor_scale is not None]
    if not scales:
        return None
    return scales[0] if len(scales) == 1 else scales[0] * scales[1]
