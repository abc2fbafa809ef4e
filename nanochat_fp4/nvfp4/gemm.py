"""The GEMM of two operands, Y = A . B^T, with A and B in NVFP4, in a float dtype, or mixed.

Where a Blackwell's tensor cores multiply NVFP4 (native.py), two operands with codes go there, and FP8 operands with one
scale go to FP8 tensor cores (sm_89 and later). Otherwise it is emulated:
the product of decoded codes (exact in BF16) with FP32 accumulation, and the product of the tensor scales applied to the
accumulator before the one rounding to the output dtype: the arithmetic of the tensor cores up to the order of
summation. On CUDA that is one cuBLAS call whose alpha stays on the device (nvfp4_kernels/cublas.py); where cuBLAS
cannot be reached this way, the product is kept in FP32 and scaled in a second step, with the same result and more
traffic.

An operand that is the sum of two NVFP4 terms is multiplied term by term, A1 . B1 + A1 . B2 + A2 . B1: every product is
one of 4-bit operands. A2 . B2 is left out; it is of the size of the error that the two terms have anyway.
"""

import functools
from dataclasses import dataclass

import torch

from nanochat_fp4.nvfp4 import native
from nanochat_fp4.nvfp4.format import NVFP4Tensor, TwoTerms, terms


@dataclass
class Decoded:
    """An operand for the emulated GEMM alone: code * scale in BF16 (R, K), and its tensor_scale, or None for 1."""

    values: torch.Tensor
    tensor_scale: torch.Tensor | None = None


Value = torch.Tensor | NVFP4Tensor | Decoded | TwoTerms


def gemm(a: Value, b: Value, *, compute_dtype: torch.dtype, out_dtype: torch.dtype) -> torch.Tensor:
    """a (M, K) . b (N, K)^T -> (M, N) in out_dtype.

    compute_dtype: what an operand that is not NVFP4 is cast to (the dtype that the layer computes in without us).
    An operand that was padded along K (zeros, so nothing changes) may meet one that was not.
    """
    if isinstance(a, TwoTerms) or isinstance(b, TwoTerms):
        (a_first, *a_rest), (b_first, *b_rest) = terms(a), terms(b)
        pairs = [(a_first, b_first), *((a_first, rest) for rest in b_rest), *((rest, b_first) for rest in a_rest)]
        products = [gemm(x, y, compute_dtype=compute_dtype, out_dtype=torch.float32) for x, y in pairs]
        return _cast(functools.reduce(torch.add, products), out_dtype)
    if isinstance(a, NVFP4Tensor) and isinstance(b, NVFP4Tensor) and a.is_fp8 and b.is_fp8 and _fp8_takes(a, b):
        # Summed a little less exactly in the forward alone, which has no E5M2: as nanochat's fp8.py.
        fast = a.codes.dtype == b.codes.dtype
        scales = {"scale_a": a.tensor_scale, "scale_b": b.tensor_scale}
        return torch._scaled_mm(a.codes, b.codes.T, **scales, out_dtype=out_dtype, use_fast_accum=fast)
    if isinstance(a, NVFP4Tensor) and isinstance(b, NVFP4Tensor) and native.takes(a, b):
        name = native.implementation(a.codes.device.type)
        if name is not None:
            return native.mm(a, b, out_dtype, name)
    alpha = _product_of_tensor_scales(a, b)
    x, y = _decoded(a, compute_dtype), _decoded(b, compute_dtype)
    k = min(x.shape[-1], y.shape[-1])
    x, y = x[:, :k], y[:, :k]
    if not x.is_cuda:  # decoded values in FP32: nothing is lost, and CPUs are not faster in BF16
        plain = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        product = _matmul(x, y, compute_dtype if plain else torch.float32)
        return _cast(product if alpha is None else product * alpha, out_dtype)
    if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        product = _matmul(x, y, torch.float32)
        return _cast(product if alpha is None else product * alpha, out_dtype)
    if alpha is None and out_dtype == torch.bfloat16:
        return x @ y.T
    if (alpha is None or alpha.dim() == 0) and cublas_unavailable_reason() is None:
        from nvfp4_kernels.cublas import mm_alpha

        return mm_alpha(_dense(x), _dense(y), alpha, out_dtype)
    product = torch.mm(x, y.T, out_dtype=torch.float32)
    return _cast(product if alpha is None else product * alpha, out_dtype)


def _fp8_takes(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    """Whether FP8 tensor cores multiply these operands: a tensor_scale each, K and N multiples of 16, not both E5M2."""
    sizes = (a.codes.shape[1], b.codes.shape[0])
    one_scale = a.tensor_scale.dim() == b.tensor_scale.dim() == 0 and a.codes.shape[1] == b.codes.shape[1]
    e4m3 = torch.float8_e4m3fn in (a.codes.dtype, b.codes.dtype)
    return a.codes.is_cuda and one_scale and e4m3 and not any(s % 16 for s in sizes) and _has_fp8()


@torch.compiler.assume_constant_result
def _has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= (8, 9)


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x.to(dtype), not called where it would return x itself: where an autograd function's forward pass ends in such a
    call, torch 2.11's torch.compile makes its gradients zero."""
    return x if x.dtype == dtype else x.to(dtype)


def _matmul(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x.to(dtype) @ y.to(dtype).T


def _decoded(value: Value, compute_dtype: torch.dtype) -> torch.Tensor:
    """Decoded codes are exact in BF16, which a GPU multiplies; a plain operand is rounded to compute_dtype."""
    if isinstance(value, NVFP4Tensor):
        return decoded_codes(value)
    return value.values if isinstance(value, Decoded) else value.to(compute_dtype)


def decoded_codes(value: NVFP4Tensor) -> torch.Tensor:
    """code * scale (R, K), exact: BF16 on a GPU, by a kernel where Triton is there, FP32 on a CPU."""
    if not value.codes.is_cuda:
        return value.decode(torch.float32)
    if value.decoded is None and value.codes.dtype == torch.uint8 and kernels_unavailable_reason() is None:
        from nvfp4_kernels.decode import decode

        return decode(value.codes, value.scales)
    return value.decode(torch.bfloat16)


@torch.compiler.assume_constant_result
def kernels_unavailable_reason() -> str | None:
    """Why the Triton kernels cannot be imported here, or None."""
    try:
        import nvfp4_kernels.rotate  # noqa: F401
    except ImportError as error:
        return f"the Triton kernels cannot be imported ({error})"
    return None


@torch.compiler.assume_constant_result
def cublas_unavailable_reason() -> str | None:
    """Why cuBLAS cannot be called with alpha on the device, or None."""
    try:
        from nvfp4_kernels import cublas
    except ImportError as error:
        return f"the kernels cannot be imported ({error})"
    return cublas.unavailable_reason()


def _dense(x: torch.Tensor) -> torch.Tensor:
    """With contiguous rows or columns, which is what cuBLAS takes."""
    return x if 1 in x.stride() else x.contiguous()


def _product_of_tensor_scales(a: Value, b: Value) -> torch.Tensor | None:
    """FP32 () or, with a quantized per token, (M, 1); None if there is none to apply."""
    scales = [v.tensor_scale for v in (a, b) if not isinstance(v, torch.Tensor) and v.tensor_scale is not None]
    if not scales:
        return None
    return scales[0] if len(scales) == 1 else scales[0] * scales[1]
