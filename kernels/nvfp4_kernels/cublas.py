"""BF16 matrix products whose alpha stays on the GPU: alpha * A . B^T, or C + alpha * A . B^T in place, with one
rounding of the FP32 accumulator.

torch.mm takes alpha from the host, which needs a synchronization, or rounds to BF16 before a later multiplication. In
pointer mode "device", cuBLAS takes alpha from device memory. The handle is torch's, with the current stream and a
workspace. The kernel is therefore the one of torch.mm, and a CUDA graph can capture it.
"""

import ctypes
import functools

import torch

from nvfp4_kernels._ops import operator

R_32F, R_16BF = 0, 14  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t
OP_N, OP_T = 0, 1
ALGO_DEFAULT = -1
POINTER_MODE_HOST, POINTER_MODE_DEVICE = 0, 1
_DATA_TYPES = {torch.bfloat16: R_16BF, torch.float32: R_32F}


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The cuBLAS that torch has loaded, or why there is none."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    name = f"libcublas.so.{torch.version.cuda.split('.')[0]}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return f"{name} cannot be loaded ({error})"
    library.cublasGemmEx.restype = library.cublasSetPointerMode_v2.restype = ctypes.c_int
    return library


def unavailable_reason() -> str | None:
    """Why `mm_alpha` cannot be used, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    library = _library()
    return library if isinstance(library, str) else None


@functools.cache
def _constant(value: float, device: torch.device) -> torch.Tensor:
    return torch.full((), value, dtype=torch.float32, device=device)


@operator("mm_alpha(Tensor a, Tensor b, Tensor? alpha, ScalarType out_dtype) -> Tensor")
def mm_alpha(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """alpha * a . b^T, (M, N) in out_dtype.

    a, b:      BF16 (M, K) and (N, K), with contiguous rows or columns
    alpha:     float32 () on the GPU, or None for 1
    out_dtype: torch.bfloat16 or torch.float32
    Raises RuntimeError with cuBLAS's status if cuBLAS refuses.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    _gemm(a, b, alpha, 0.0, out)
    return out


@mm_alpha.register_fake
def _(a, b, alpha, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@operator("mm_alpha_add(Tensor a, Tensor b, Tensor? alpha, Tensor(c!) into) -> ()")
def mm_alpha_add(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, into: torch.Tensor) -> None:
    """into += alpha * a . b^T, with the arguments of mm_alpha.

    into: FP32 or BF16 (M, N), contiguous
    Raises ValueError if into is not contiguous, and RuntimeError as mm_alpha.
    """
    if not into.is_contiguous():
        raise ValueError(f"mm_alpha_add: into has strides {into.stride()}, expected a contiguous matrix")
    _gemm(a, b, alpha, 1.0, into)


@mm_alpha_add.register_fake
def _(a, b, alpha, into):
    return None


def _gemm(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, beta: float, out: torch.Tensor) -> None:
    (m, k), n = a.shape, b.shape[0]
    # Column-major cuBLAS computes C^T (N, M) = B . A^T. A row-major matrix here is a transposed one there.
    op_b, ldb = (OP_T, b.stride(0)) if b.stride(1) == 1 else (OP_N, b.stride(1))
    op_a, lda = (OP_N, a.stride(0)) if a.stride(1) == 1 else (OP_T, a.stride(1))
    library = _library()
    handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
    beta = _constant(beta, a.device)
    alpha = _constant(1.0, a.device) if alpha is None else alpha

    def pointer(t: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(t.data_ptr())

    library.cublasSetPointerMode_v2(handle, POINTER_MODE_DEVICE)
    status = library.cublasGemmEx(
        handle, op_b, op_a, n, m, k, pointer(alpha), pointer(b), R_16BF, ldb, pointer(a), R_16BF, lda,
        pointer(beta), pointer(out), _DATA_TYPES[out.dtype], n, COMPUTE_32F, ALGO_DEFAULT,
    )  # fmt: skip
    library.cublasSetPointerMode_v2(handle, POINTER_MODE_HOST)
    if status:
        raise RuntimeError(
            f"cublasGemmEx returned status {status} for {tuple(a.shape)} x {tuple(b.shape)} -> {out.dtype}"
        )
