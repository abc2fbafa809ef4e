"""BF16 matrix products whose factor alpha stays on the GPU.

They compute alpha * A . B^T, or C + alpha * A . B^T in place, and round the FP32 accumulator once.

torch.mm cannot do this. It takes alpha from the host, which needs a synchronization, or rounds the product to BF16
before a later multiplication by alpha. cuBLAS reads alpha from device memory in its pointer mode "device". The handle
is torch's, with torch's current stream and workspace. The kernel is therefore the one that torch.mm would run, and a
CUDA graph can capture it.
"""

import contextlib
import ctypes
import functools

import torch

from nvfp4_kernels._ops import is_captured, operator

R_32F, R_16BF = 0, 14  # cudaDataType_t
COMPUTE_32F = 68  # cublasComputeType_t
OP_N, OP_T = 0, 1
ALGO_DEFAULT = -1
POINTER_MODE_HOST, POINTER_MODE_DEVICE = 0, 1
DATA_TYPES = {torch.bfloat16: R_16BF, torch.float32: R_32F}


def loaded(name: str) -> ctypes.CDLL | str:
    """Returns the library lib<name> of the CUDA release that torch has loaded, or the reason why there is none."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    file = f"lib{name}.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(file)
    except OSError as error:
        return f"{file} cannot be loaded ({error})"


@functools.cache
def _library() -> ctypes.CDLL | str:
    library = loaded("cublas")
    if not isinstance(library, str):  # With the argument types declared, Python's numbers can be passed.
        pointer, number = ctypes.c_void_p, ctypes.c_int
        library.cublasSetPointerMode_v2.argtypes = [pointer, number]
        library.cublasGemmEx.argtypes = [
            pointer, *[number] * 5, pointer, pointer, number, number, pointer, number, number, pointer, pointer,
            *[number] * 4,
        ]  # fmt: skip
    return library


def unavailable_reason() -> str | None:
    """Returns the reason why `mm_alpha` cannot be used on this machine, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    library = _library()
    return library if isinstance(library, str) else None


_constants: dict[tuple[float, torch.device, tuple[int, ...], torch.dtype], torch.Tensor] = {}


def constant(
    value: float, device: torch.device, size: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns a tensor of this size that holds `value` everywhere. Each call returns the same tensor, so nobody may
    write to it.

    The capture of a CUDA graph records the kernel that fills a tensor, and does not run it. A constant that is made
    during a capture therefore belongs to that graph, and later calls do not get it. A constant that is made at another
    time is complete before any other stream can read it.
    """
    key = value, device, size, dtype
    if key not in _constants:
        made = torch.full(size, value, dtype=dtype, device=device)
        if is_captured(device):
            return made
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        _constants[key] = made
    return _constants[key]


def current(device: torch.device) -> contextlib.AbstractContextManager:
    """Returns a context in which the device is torch's current device. cuBLAS then uses this device's handle and
    stream."""
    is_current = device.type != "cuda" or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if is_current else torch.cuda.device(device)


@operator("mm_alpha(Tensor a, Tensor b, Tensor? alpha, ScalarType out_dtype) -> Tensor")
def mm_alpha(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """Returns alpha * a . b^T, (M, N) in out_dtype.

    a, b:      BF16 (M, K) and (N, K). An operand is copied if neither its rows nor its columns are contiguous.
    alpha:     float32 () on the GPU, or None for 1
    out_dtype: torch.bfloat16 or torch.float32
    Raises RuntimeError with cuBLAS's status if cuBLAS refuses the product.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    _gemm(a, b, alpha, 0.0, out)
    return out


@mm_alpha.register_fake
def _(a, b, alpha, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@operator("mm_alpha_add(Tensor a, Tensor b, Tensor? alpha, Tensor(c!) into) -> ()")
def mm_alpha_add(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, into: torch.Tensor) -> None:
    """Adds alpha * a . b^T to `into` in place. The other arguments are those of mm_alpha.

    into: FP32 or BF16 (M, N), contiguous
    Raises ValueError if `into` is not contiguous, and RuntimeError as mm_alpha does.
    """
    if not into.is_contiguous():
        raise ValueError(f"mm_alpha_add: into has strides {into.stride()}, expected a contiguous matrix")
    _gemm(a, b, alpha, 1.0, into)


@mm_alpha_add.register_fake
def _(a, b, alpha, into):
    return None


def rows_or_columns(x: torch.Tensor) -> torch.Tensor:
    """Returns x (R, C) itself if its rows or its columns are contiguous and do not overlap, and otherwise a contiguous
    copy."""
    (rows, columns), (down, along) = x.shape, x.stride()
    taken = down >= columns if along == 1 else down == 1 and along >= rows
    return x if taken else x.clone(memory_format=torch.contiguous_format)


def _gemm(a: torch.Tensor, b: torch.Tensor, alpha: torch.Tensor | None, beta: float, out: torch.Tensor) -> None:
    a, b = rows_or_columns(a), rows_or_columns(b)
    (m, k), n = a.shape, b.shape[0]
    # cuBLAS is column-major: a row-major matrix here is a transposed one there. It computes C^T (N, M) = B . A^T.
    op_b, ldb = (OP_T, b.stride(0)) if b.stride(1) == 1 else (OP_N, b.stride(1))
    op_a, lda = (OP_N, a.stride(0)) if a.stride(1) == 1 else (OP_T, a.stride(1))
    library = _library()
    beta = constant(beta, a.device)
    alpha = constant(1.0, a.device) if alpha is None else alpha

    with current(a.device):
        handle = torch.cuda.current_blas_handle()
        library.cublasSetPointerMode_v2(handle, POINTER_MODE_DEVICE)
        status = library.cublasGemmEx(
            handle, op_b, op_a, n, m, k, alpha.data_ptr(), b.data_ptr(), R_16BF, ldb, a.data_ptr(), R_16BF, lda,
            beta.data_ptr(), out.data_ptr(), DATA_TYPES[out.dtype], n, COMPUTE_32F, ALGO_DEFAULT,
        )  # fmt: skip
        library.cublasSetPointerMode_v2(handle, POINTER_MODE_HOST)
    if status:
        raise RuntimeError(
            f"cublasGemmEx returned status {status} for {tuple(a.shape)} x {tuple(b.shape)} -> {out.dtype}"
        )
