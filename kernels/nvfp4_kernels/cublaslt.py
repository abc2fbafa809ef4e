"""NVFP4 and MXFP8 products that call cuBLASLt directly. They compute alpha * A . B^T, or C + alpha * A . B^T in place
in FP32.

torch's scaled_mm reaches the same kernels, but it lacks two things. Up to torch 2.13 it copies alpha into one buffer of
the process, which two streams or threads then share. And it cannot add to C. Here alpha, the product of the two tensor
scales, is a pointer of each call, so that any stream, any thread and a CUDA graph may multiply. With beta = 1 the GEMM
itself adds to a weight's FP32 gradient. This moves 8 bytes per weight, where a product and an addition move 16.

cuBLASLt is column-major. A row-major matrix (R, C) is a column-major one (C, R) there. The product is therefore
computed as C^T (N, M) = op(B) . A, where op transposes and both operands are (K, ...) with K contiguous.

Nobody has run this file on a Blackwell. The tests give it a library that checks every argument and multiplies on the
CPU. The source of the arguments is the cuBLAS documentation, sections "cublasLtMatmul()" and "1D block scaling factors
layout".
"""

import ctypes
import functools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from nvfp4_kernels import cublas
from nvfp4_kernels._ops import operator
from nvfp4_kernels.matmul import gemm_operator, in_tiles

POINTER_MODE, TRANSA, TRANSB = 2, 3, 4  # cublasLtMatmulDescAttributes_t
A_SCALE_POINTER, B_SCALE_POINTER, A_SCALE_MODE, B_SCALE_MODE = 17, 18, 31, 32
MAX_WORKSPACE_BYTES = 1  # cublasLtMatmulPreferenceAttributes_t
WORKSPACE = 32 << 20  # In bytes. torch gives cuBLASLt the same on Hopper and later.
PLANS = 256  # The largest number of plans that a thread keeps.


class Format(NamedTuple):
    """The number format of both operands.

    element: the cudaDataType_t of an element
    scales:  the cublasLtMatmulMatrixScale_t of the block scales
    in_byte: the number of elements in a byte
    """

    element: int
    scales: int
    in_byte: int


NVFP4 = Format(33, 1, 2)  # R_4F_E2M1, VEC16_UE4M3
MXFP8 = Format(28, 2, 1)  # R_8F_E4M3, VEC32_UE8M0
ONE_IN_E8M0 = 127


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
    return cublas.loaded("cublasLt")


def unavailable_reason() -> str | None:
    """Returns the reason why these products cannot be computed on this machine, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    found = library()
    return found if isinstance(found, str) else None


def _check(status: int, call: str) -> None:
    if status:
        raise RuntimeError(f"{call} returned status {status}")


class MatmulPlan:
    """cuBLASLt's descriptors for products of one shape, and the algorithm that it chooses for them.

    m, n, k:   the sizes of (M, K) . (N, K)^T -> (M, N)
    out_dtype: BF16 or FP32
    form:      the format of both operands
    scales:    the block scales of A and of B. cuBLASLt chooses no algorithm before it knows their addresses.
    Raises RuntimeError with cuBLASLt's status if it has no algorithm.
    """

    def __init__(
        self, handle: int, m: int, n: int, k: int, out_dtype: torch.dtype, form: Format, scales: tuple[Tensor, Tensor]
    ):
        self.library, self.matmul = library(), ctypes.c_void_p()
        self.layouts = [ctypes.c_void_p() for _ in range(3)]
        _check(
            self.library.cublasLtMatmulDescCreate(ctypes.byref(self.matmul), cublas.COMPUTE_32F, cublas.R_32F),
            "cublasLtMatmulDescCreate",
        )
        for attribute, value in (
            (POINTER_MODE, cublas.POINTER_MODE_DEVICE),
            (TRANSA, cublas.OP_T),
            (TRANSB, cublas.OP_N),
            (A_SCALE_MODE, form.scales),
            (B_SCALE_MODE, form.scales),
        ):
            self._set(attribute, ctypes.c_int(value))
        self.set_scales(*scales)
        out = cublas.DATA_TYPES[out_dtype]
        # Each layout has a type, rows, columns and a leading dimension.
        sizes = ((form.element, k, n, k), (form.element, k, m, k), (out, n, m, n))
        for layout, (kind, rows, columns, leading) in zip(self.layouts, sizes):
            extent = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(leading)
            status = self.library.cublasLtMatrixLayoutCreate(ctypes.byref(layout), kind, *extent)
            _check(status, "cublasLtMatrixLayoutCreate")
        self.chosen = self._choose(handle)

    def _set(self, attribute: int, value: ctypes.c_int | ctypes.c_void_p) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        status = self.library.cublasLtMatmulDescSetAttribute(self.matmul, attribute, ctypes.byref(value), size)
        _check(status, "cublasLtMatmulDescSetAttribute")

    def set_scales(self, of_a: Tensor, of_b: Tensor) -> None:
        """Sets the block scales of the next product. cuBLASLt's first operand is our B."""
        self._set(A_SCALE_POINTER, ctypes.c_void_p(of_b.data_ptr()))
        self._set(B_SCALE_POINTER, ctypes.c_void_p(of_a.data_ptr()))

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

    def destroy(self) -> None:
        """Frees cuBLASLt's descriptors."""
        for layout in self.layouts:
            self.library.cublasLtMatrixLayoutDestroy(layout)
        self.library.cublasLtMatmulDescDestroy(self.matmul)


# Each thread has plans of its own, because a plan holds the addresses of one product's scales until that is launched.
_plans = threading.local()


def _plan(
    handle: int,
    device: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    form: Format,
    scales: tuple[Tensor, Tensor],
) -> MatmulPlan:
    """Returns this thread's plan for the shape, with these scales set. If a thread has PLANS plans, they are destroyed
    before another one is made."""
    kept: dict[tuple, MatmulPlan] = vars(_plans).get("kept", {})
    key = device, *shape, dtype, form
    if key in kept:
        kept[key].set_scales(*scales)
        return kept[key]
    if len(kept) == PLANS:
        forget_plans()
    made = MatmulPlan(handle, *shape, dtype, form, scales)
    vars(_plans).setdefault("kept", {})[key] = made
    return made


def forget_plans() -> None:
    """Destroys this thread's plans."""
    kept: dict[tuple, MatmulPlan] = vars(_plans).pop("kept", {})
    for plan in kept.values():
        plan.destroy()


def handle_and_stream(device: torch.device) -> tuple[int, int]:
    """Returns cuBLAS's current handle, which serves as cuBLASLt's too, and the current stream of this device."""
    return torch.cuda.current_blas_handle(), torch.cuda.current_stream(device).cuda_stream


def _multiply(
    a: Tensor,
    a_scales: Tensor,
    a_factor: Tensor,
    b: Tensor,
    b_scales: Tensor,
    b_factor: Tensor,
    beta: float,
    out: Tensor,
    form: Format = NVFP4,
) -> None:
    """Computes a_factor * b_factor * a . b^T + beta * out into `out`. The scales are in tiles."""
    if not out.numel():
        return
    a, b = a.contiguous(), b.contiguous()
    scales = a_scales, b_scales
    shape = a.shape[0], b.shape[0], a.shape[1] * form.in_byte
    alpha, beta_there = a_factor * b_factor, cublas.constant(beta, a.device)

    def address(t: Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(t.data_ptr())

    with cublas.current(a.device):
        handle, stream = handle_and_stream(a.device)
        plan = _plan(handle, a.device.index or 0, shape, out.dtype, form, scales)
        workspace = torch.empty(plan.chosen.workspace, dtype=torch.uint8, device=a.device)
        of_b, of_a, of_out = plan.layouts
        status = plan.library.cublasLtMatmul(
            ctypes.c_void_p(handle), plan.matmul, address(alpha), address(b), of_b, address(a), of_a,
            address(beta_there), address(out), of_out, address(out), of_out, ctypes.byref(plan.chosen),
            address(workspace), ctypes.c_size_t(plan.chosen.workspace), ctypes.c_void_p(stream),
        )  # fmt: skip
    if status:
        raise RuntimeError(f"cublasLtMatmul returned status {status} for {shape} -> {out.dtype}")


@gemm_operator
def cublaslt(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Returns the same product as matmul.dot_scaled. K must be a multiple of 32, and N of 16. Raises RuntimeError with
    cuBLASLt's status."""
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    _multiply(a, in_tiles(a_scales), a_factor, b, in_tiles(b_scales), b_factor, 0.0, out)
    return out


@operator("mxfp8(Tensor a, Tensor a_factor, Tensor b, Tensor b_factor, ScalarType out_dtype) -> Tensor")
def mxfp8(a: Tensor, a_factor: Tensor, b: Tensor, b_factor: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Returns a . b^T (M, N) in out_dtype, BF16 or FP32, for 8-bit operands with one scale per tensor.

    a, b:    float8_e4m3fn (M, K) and (N, K), K a multiple of 32 and N of 16
    factors: the tensor scales, float32 ()
    The product is computed as MXFP8 with all block scales equal to 1. A GeForce runs it at twice the rate of an FP8
    product that has one scale per tensor and accumulates in FP32.
    Raises RuntimeError with cuBLASLt's status.
    """
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    ones = [_ones(t) for t in (a, b)]
    _multiply(a, ones[0], a_factor, b, ones[1], b_factor, 0.0, out, MXFP8)
    return out


def _ones(t: Tensor) -> Tensor:
    """Returns block scales of 1 for t (R, K): E8M0 bytes, flat in tiles of 128 rows by 4 blocks of 32."""
    size = -(-t.shape[0] // 128) * -(-t.shape[1] // 128) * 512
    return cublas.constant(ONE_IN_E8M0, t.device, (size,), torch.uint8)


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
