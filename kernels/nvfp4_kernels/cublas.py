"""Matrix products of cuBLAS, whose factor alpha stays on the GPU: BF16, NVFP4 and MXFP8.

They compute alpha * A . B^T, or C + alpha * A . B^T in place, and round the FP32 accumulator once.

torch cannot do this. torch.mm takes alpha from the host, which needs a synchronization, or rounds the product to BF16
before a later multiplication by alpha. torch's scaled_mm copies alpha into one buffer of the process (up to torch
2.13), which two streams or threads then share, and cannot add to C. cuBLAS reads alpha from device memory in its
pointer mode "device". Here alpha, the product of the two tensor scales, is a pointer of each call, so that any stream,
any thread and a CUDA graph may multiply. With beta = 1 the GEMM itself adds to a weight's FP32 gradient. This moves 8
bytes per weight, where a product and an addition move 16.

BF16 products call cublasGemmEx with torch's handle, stream and workspace, so the kernel is the one that torch.mm would
run. NVFP4 and MXFP8 products call cublasLtMatmul. Nobody has run those on a Blackwell. The tests give them a library
that checks every argument and multiplies on the CPU. The source of the arguments is the cuBLAS documentation, sections
"cublasLtMatmul()" and "1D block scaling factors layout". scaled_mm is torch's way to the same products.

cuBLAS is column-major. A row-major matrix (R, C) is a column-major one (C, R) there. The product is therefore computed
as C^T (N, M) = op(B) . op(A).
"""

import contextlib
import ctypes
import functools
import threading

import torch
from torch import Tensor

from nvfp4_kernels._ops import is_captured, operator
from nvfp4_kernels.decode import in_tiles

R_32F, R_16BF = 0, 14  # cudaDataType_t
DATA_TYPES = {torch.bfloat16: R_16BF, torch.float32: R_32F}
R_4F_E2M1 = 33
EIGHT_BITS = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
COMPUTE_32F = 68  # cublasComputeType_t
OP_N, OP_T = 0, 1
ALGO_DEFAULT = -1
POINTER_MODE_HOST, POINTER_MODE_DEVICE = 0, 1
POINTER_MODE, TRANSA, TRANSB = 2, 3, 4  # cublasLtMatmulDescAttributes_t
A_SCALE_POINTER, B_SCALE_POINTER, A_SCALE_MODE, B_SCALE_MODE = 17, 18, 31, 32
VEC16_UE4M3, VEC32_UE8M0 = 1, 2  # cublasLtMatmulMatrixScale_t
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 << 20  # In bytes. torch gives cuBLASLt the same on Hopper and later.
ONE_IN_E8M0 = 127


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


_constants: dict[tuple[float, torch.device, tuple[int, ...], torch.dtype], Tensor] = {}


def constant(
    value: float, device: torch.device, size: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> Tensor:
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
def mm_alpha(a: Tensor, b: Tensor, alpha: Tensor | None, out_dtype: torch.dtype) -> Tensor:
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
def mm_alpha_add(a: Tensor, b: Tensor, alpha: Tensor | None, into: Tensor) -> None:
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


def rows_or_columns(x: Tensor) -> Tensor:
    """Returns x (R, C) itself if its rows or its columns are contiguous and do not overlap, and otherwise a contiguous
    copy."""
    (rows, columns), (down, along) = x.shape, x.stride()
    taken = down >= columns if along == 1 else down == 1 and along >= rows
    return x if taken else x.clone(memory_format=torch.contiguous_format)


def _gemm(a: Tensor, b: Tensor, alpha: Tensor | None, beta: float, out: Tensor) -> None:
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


# ----------------------------------------------------------------------------------------------------------------------
# cuBLASLt: NVFP4 and MXFP8


class Algorithm(ctypes.Structure):
    """cuBLASLt's struct cublasLtMatmulHeuristicResult_t. Its first 64 bytes are the cublasLtMatmulAlgo_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def library() -> ctypes.CDLL | str:
    """Returns the cuBLASLt that torch has loaded, or the reason why there is none."""
    return loaded("cublasLt")


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} returned status {status}")


class MatmulPlan:
    """cuBLASLt's descriptors for products (M, K) . (N, K)^T -> (M, N) of one shape, and the algorithm that it chooses.

    elements:  the cudaDataType_t of A's and of B's elements
    scales:    the cublasLtMatmulMatrixScale_t of the block scales
    Raises RuntimeError with cuBLASLt's status if it has no algorithm.
    """

    def __init__(self, m: int, n: int, k: int, out_dtype: torch.dtype, elements: tuple[int, int], scales: int):
        self.library, self.matmul = library(), ctypes.c_void_p()
        self.layouts, self.chosen = [ctypes.c_void_p() for _ in range(3)], None
        status = self.library.cublasLtMatmulDescCreate(ctypes.byref(self.matmul), COMPUTE_32F, R_32F)
        _check(status, "cublasLtMatmulDescCreate")
        settings = {POINTER_MODE: POINTER_MODE_DEVICE, TRANSA: OP_T, TRANSB: OP_N}
        for attribute, value in (settings | {A_SCALE_MODE: scales, B_SCALE_MODE: scales}).items():
            self._set(attribute, ctypes.c_int(value))
        # Each layout has a type, rows, columns and a leading dimension. cuBLASLt's first operand is our B.
        sizes = ((elements[1], k, n, k), (elements[0], k, m, k), (DATA_TYPES[out_dtype], n, m, n))
        for layout, (kind, rows, columns, leading) in zip(self.layouts, sizes):
            extent = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
            status = self.library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *extent)
            _check(status, "cublasLtMatrixLayoutCreate")

    def _set(self, attribute: int, value: ctypes.c_int | ctypes.c_void_p) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        status = self.library.cublasLtMatmulDescSetAttribute(self.matmul, attribute, ctypes.byref(value), size)
        _check(status, "cublasLtMatmulDescSetAttribute")

    def algorithm(self, handle: int, of_a: Tensor, of_b: Tensor) -> Algorithm:
        """Sets the block scales of the next product and returns its algorithm. cuBLASLt chooses none before it knows
        the scales' addresses."""
        self._set(A_SCALE_POINTER, ctypes.c_void_p(of_b.data_ptr()))
        self._set(B_SCALE_POINTER, ctypes.c_void_p(of_a.data_ptr()))
        if self.chosen is None:
            self.chosen = self._choose(handle)
        return self.chosen

    def _choose(self, handle: int) -> Algorithm:
        preference, found, count = ctypes.c_void_p(), Algorithm(), ctypes.c_int()
        _check(self.library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "cublasLtMatmulPreferenceCreate")
        limit = ctypes.c_size_t(WORKSPACE)
        size = ctypes.c_size_t(ctypes.sizeof(limit))
        status = self.library.cublasLtMatmulPreferenceSetAttribute(
            preference, MAX_WORKSPACE_BYTES, ctypes.byref(limit), size
        )
        _check(status, "cublasLtMatmulPreferenceSetAttribute")
        b, a, out = self.layouts
        status = self.library.cublasLtMatmulAlgoGetHeuristic(
            ctypes.c_void_p(handle), self.matmul, b, a, out, out, preference, 1, ctypes.byref(found),
            ctypes.byref(count),
        )  # fmt: skip
        self.library.cublasLtMatmulPreferenceDestroy(preference)
        _check(status, "cublasLtMatmulAlgoGetHeuristic")
        if not count.value:
            raise RuntimeError("cublasLtMatmulAlgoGetHeuristic found no algorithm")
        return found

    def __del__(self) -> None:
        for layout in filter(None, self.layouts):
            self.library.cublasLtMatrixLayoutDestroy(layout)
        if self.matmul:
            self.library.cublasLtMatmulDescDestroy(self.matmul)


@functools.lru_cache(maxsize=256)
def plan_of(thread: int, device: int, *product) -> MatmulPlan:
    """Returns the plan of a product on a device. Each thread has plans of its own, because a plan holds the addresses
    of one product's scales until that is launched."""
    return MatmulPlan(*product)


def handle_and_stream(device: torch.device) -> tuple[int, int]:
    """Returns cuBLAS's current handle, which serves as cuBLASLt's too, and the current stream of this device."""
    return torch.cuda.current_blas_handle(), torch.cuda.current_stream(device).cuda_stream


def _multiply(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, beta: float,
    out: Tensor, elements: tuple[int, int] = (R_4F_E2M1, R_4F_E2M1), scales: int = VEC16_UE4M3,
) -> None:  # fmt: skip
    """Computes a_factor * b_factor * a . b^T + beta * out into `out`. The block scales are in tiles."""
    if not out.numel():
        return
    a, b = a.contiguous(), b.contiguous()
    shape = a.shape[0], b.shape[0], a.shape[1] * (2 if a.dtype == torch.uint8 else 1)
    alpha, beta_there = a_factor * b_factor, constant(beta, a.device)

    def address(t: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(t.data_ptr())

    with current(a.device):
        handle, stream = handle_and_stream(a.device)
        plan = plan_of(threading.get_ident(), a.device.index or 0, *shape, out.dtype, elements, scales)
        algorithm = plan.algorithm(handle, a_scales, b_scales)
        workspace = torch.empty(algorithm.workspace, dtype=torch.uint8, device=a.device)
        of_b, of_a, of_out = plan.layouts
        status = plan.library.cublasLtMatmul(
            ctypes.c_void_p(handle), plan.matmul, address(alpha), address(b), of_b, address(a), of_a,
            address(beta_there), address(out), of_out, address(out), of_out, ctypes.byref(algorithm),
            address(workspace), ctypes.c_size_t(algorithm.workspace), ctypes.c_void_p(stream),
        )  # fmt: skip
    if status:
        raise RuntimeError(f"cublasLtMatmul returned status {status} for {shape} -> {out.dtype}")


def fp4_operator(function):
    """A decorator that registers a product of two NVFP4 operands as an operator. a_factor and b_factor are the
    operands' tensor scales."""
    operands = ", ".join(f"Tensor {o}, Tensor {o}_scales, Tensor {o}_factor" for o in "ab")
    call = operator(f"{function.__name__}({operands}, ScalarType out_dtype) -> Tensor")(function)
    call.register_fake(lambda a, x, y, b, z, w, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype))
    return call


@fp4_operator
def cublaslt(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Returns a . b^T, (M, N) in out_dtype, which is BF16 or FP32.

    a, b:    codes uint8 (M, K/2) and (N, K/2), K a multiple of 32 and N of 16
    scales:  float8_e4m3fn, flat in tiles of 128x4, or row-major (M, K/16) and (N, K/16)
    factors: the tensor scales, float32 ()
    Raises RuntimeError with cuBLASLt's status.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    _multiply(a, in_tiles(a_scales), a_factor, b, in_tiles(b_scales), b_factor, 0.0, out)
    return out


@operator("mxfp8(Tensor a, Tensor a_factor, Tensor b, Tensor b_factor, ScalarType out_dtype) -> Tensor")
def mxfp8(a: Tensor, a_factor: Tensor, b: Tensor, b_factor: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Returns a . b^T (M, N) in out_dtype, BF16 or FP32, for 8-bit operands with one scale per tensor.

    a, b:    float8_e4m3fn or float8_e5m2, (M, K) and (N, K), K a multiple of 32 and N of 16
    factors: the tensor scales, float32 ()
    The product is computed as MXFP8 with all block scales equal to 1. A GeForce runs it at twice the rate of an FP8
    product that has one scale per tensor and accumulates in FP32.
    Raises RuntimeError with cuBLASLt's status.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    ones = [_ones(t) for t in (a, b)]
    elements = EIGHT_BITS[a.dtype], EIGHT_BITS[b.dtype]
    _multiply(a, ones[0], a_factor, b, ones[1], b_factor, 0.0, out, elements, VEC32_UE8M0)
    return out


def _ones(t: Tensor) -> Tensor:
    """Returns block scales of 1 for t (R, K): E8M0 bytes, flat in tiles of 128 rows by 4 blocks of 32."""
    size = -(-t.shape[0] // 128) * -(-t.shape[1] // 128) * 512
    return constant(ONE_IN_E8M0, t.device, (size,), torch.uint8)


@mxfp8.register_fake
def _(a, a_factor, b, b_factor, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@operator(
    "cublaslt_add(Tensor a, Tensor a_scales, Tensor a_factor, Tensor b, Tensor b_scales, Tensor b_factor, "
    "Tensor(c!) into) -> ()"
)
def cublaslt_add(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, into: Tensor
) -> None:
    """Adds a . b^T to `into` in place and rounds the sum once. The operands are those of `cublaslt`.

    into: FP32 (M, N), contiguous
    Raises ValueError if `into` has another dtype or is not contiguous, and RuntimeError as `cublaslt` does.
    """
    if into.dtype != torch.float32 or not into.is_contiguous():
        raise ValueError(
            f"cublaslt_add: into is {into.dtype} with strides {into.stride()}, expected a contiguous FP32 matrix"
        )
    _multiply(a, in_tiles(a_scales), a_factor, b, in_tiles(b_scales), b_factor, 1.0, into)


@cublaslt_add.register_fake
def _(a, a_scales, a_factor, b, b_scales, b_factor, into):
    return None


@fp4_operator
def scaled_mm(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Returns the same product as cublaslt, by torch.

    torch could multiply by the tensor scales itself. But up to torch 2.13 it keeps their product in one buffer of the
    process (ATen's get_user_alpha_ptr), which a second stream or thread overwrites. Therefore the product is made in
    FP32 and scaled afterwards. This gives the same bits, and costs one more pass over the output.
    """
    from torch.nn.functional import ScalingType, SwizzleType

    codes = a.contiguous().view(torch.float4_e2m1fn_x2), b.contiguous().view(torch.float4_e2m1fn_x2).T
    recipe, layout = [ScalingType.BlockWise1x16], [SwizzleType.SWIZZLE_32_4_4]
    scales = [in_tiles(a_scales)], [in_tiles(b_scales)]
    options = {"swizzle_a": layout, "swizzle_b": layout, "output_dtype": torch.float32}
    product = torch.nn.functional.scaled_mm(*codes, scales[0], recipe, scales[1], recipe, **options)
    return product.mul_(a_factor * b_factor).to(out_dtype)


# The products of two NVFP4 operands, best first.
FP4 = {"cublaslt": cublaslt, "scaled_mm": scaled_mm}
