"""Decides which quantizers and which GEMMs this machine uses, and says why.

Quantizers. The PyTorch reference (quantizers.py) runs on every machine. On CUDA the Triton kernels compute the same
numbers faster. The environment variable NVFP4_KERNELS chooses one of them, "reference" or "triton". On a CPU the
kernels run only under Triton's interpreter (TRITON_INTERPRET=1).

GEMMs. Libraries for the FP4 tensor cores of a Blackwell GPU have returned zeros without an error. Each implementation
is therefore tested on known operands before its first use (probe.py), and is not used for shapes that it gets wrong.
If an implementation is wrong on all shapes, the next one is tried, in the order of IMPLEMENTATIONS: cuBLASLt called
directly, torch's scaled_mm (cuBLAS with one more pass over the result), Triton's dot_scaled, and flashinfer's mm_fp4.
The last resort is the emulated GEMM (gemm.py), which computes the same numbers without FP4 tensor cores. NVFP4_GEMM
takes one of these names, or "emulated". Training times the implementations on the shapes of the model and tells the
layers which to use (training/gemms.py, `Libraries`).

If a user asks for an implementation that cannot run here, an error gives the reason. Nothing else is used silently.

torch.compile treats the kernels as opaque operators. On a CPU it leaves the reference uncompiled, because compiling it
takes minutes. NVFP4_COMPILE=1 compiles it.
"""

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4 import probe
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.probe import OUTPUT_DTYPES

IMPLEMENTATIONS = ("cublaslt", "scaled_mm", "dot_scaled", "flashinfer")  # GEMMs of two NVFP4 operands, best first.
# How each implementation applies the tensor scales and adds to a weight's gradient. `backend` and the report print it.
PATHS = {
    "cublaslt": "tensor scales and gradient accumulation inside",
    "scaled_mm": "tensor scales in a second pass over an FP32 product",
    "dot_scaled": "tensor scales inside",
    "flashinfer": "tensor scales inside",
}
BF16_ALONE = ("flashinfer",)  # These write BF16 only, so they cannot compute weight gradients, which are FP32.


@dataclass(frozen=True)
class Backend:
    """The implementation of each operation on this machine. str() gives one line for logs and for the report."""

    quantize: str
    gemm: str
    reason: str

    def __str__(self) -> str:
        return f"quantize: {self.quantize}; GEMM: {self.gemm} ({self.reason})"


def backend() -> Backend:
    """Returns the implementations that this machine uses, with the reason. On a Blackwell GPU the first call tests the
    FP4 GEMMs.

    Raises ValueError if NVFP4_KERNELS or NVFP4_GEMM names an implementation that cannot run here.

    >>> print(nf.backend())  # doctest: +ELLIPSIS
    quantize: ...; GEMM: ... (...)
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = use_kernels(device)
    name, why_not = native_choice(device.type)
    if device.type == "cpu":
        reason = "no CUDA device" + (", kernels under Triton's interpreter" if kernels else "")
        return Backend("Triton" if kernels else "PyTorch reference", "decode + FP32 matmul", reason)
    major, minor = torch.cuda.get_device_capability()
    reason = f"{torch.cuda.get_device_name()}, sm_{major}{minor}" + (f"; {why_not}" if why_not else "")
    if name:
        gemm = f"FP4 tensor cores ({name}: {PATHS[name]})"
    else:
        why = cublas_unavailable_reason()
        after = " with the tensor scales as alpha" if why is None else f", scaled after ({why})"
        gemm = f"decode to BF16 + cuBLAS{after}"
    return Backend("Triton" if kernels else "PyTorch reference", gemm, reason)


def constant_when_compiled(function: Callable) -> Callable:
    """A decorator that makes torch.compile treat the function's result as a constant of the graph.

    torch.compiler.assume_constant_result does the same, but it imports the whole compiler, which takes two seconds."""
    function._dynamo_marked_constant = True
    return function


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


def use_kernels(device: torch.device) -> bool:
    """Whether operands on this device are quantized by the Triton kernels."""
    return _use_kernels(device.type)


@constant_when_compiled
def _use_kernels(device_type: str) -> bool:
    wanted = os.environ.get("NVFP4_KERNELS") or "auto"
    if wanted not in ("auto", "reference", "triton"):
        raise ValueError(f"NVFP4_KERNELS is {wanted!r}, expected auto, reference or triton")
    reason = no_kernels_reason(device_type)
    if wanted == "triton" and reason:
        raise ValueError(f"NVFP4_KERNELS=triton, but {reason}; unset it, or set NVFP4_KERNELS=reference")
    if wanted == "auto" and device_type == "cuda" and (problem := triton_problem()):
        raise ValueError(f"{problem}, or set NVFP4_KERNELS=reference, which is slow, and do not compile")
    return wanted == "triton" or (wanted == "auto" and reason is None and device_type == "cuda")


@constant_when_compiled
def stays_eager(device_type: str) -> bool:
    """Whether torch.compile leaves the quantized layers uncompiled on this kind of device. The first call that returns
    true also warns of it."""
    left = device_type == "cpu" and os.environ.get("NVFP4_COMPILE", "0") in ("", "0") and not _use_kernels(device_type)
    if left:
        say_what_is_left_out()
    return left


@functools.cache
def say_what_is_left_out() -> None:
    warnings.warn(
        "torch.compile leaves the quantized layers alone: on a CPU they are computed by the PyTorch reference, which "
        "would take minutes to compile (NVFP4_COMPILE=1 does)",
        stacklevel=2,
    )


@functools.cache
def no_kernels_reason(device_type: str) -> str | None:
    reason = kernels_unavailable_reason()
    if reason:
        return reason
    if device_type == "cuda" and (problem := triton_problem()):
        return problem
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80, which the kernels need for BF16"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device (on a CPU they run under TRITON_INTERPRET=1)"
    return None


def triton_problem() -> str | None:
    """Returns the reason why the installed release of Triton must not compile for this GPU, or None."""
    with contextlib.suppress(ImportError):
        import triton

        if triton.__version__ == "3.8.0" and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 12:
            return (
                "Triton 3.8.0 computes wrong results on sm_12x (triton#11733, #11735), in torch.compile's kernels too; "
                "install another release of torch and Triton (torch 2.14 brings 3.8.0)"
            )
    return None


@constant_when_compiled
def kernels_unavailable_reason() -> str | None:
    """Returns the reason why the Triton kernels cannot be imported here, or None."""
    try:
        import nvfp4_kernels.rotate  # noqa: F401
    except ImportError as error:
        return f"the Triton kernels cannot be imported ({error})"
    return None


@constant_when_compiled
def cublas_unavailable_reason() -> str | None:
    """Returns the reason why cuBLAS cannot be called with its factor alpha in GPU memory, or None."""
    try:
        from nvfp4_kernels import cublas
    except ImportError as error:
        return f"the kernels cannot be imported ({error})"
    return cublas.unavailable_reason()


# ----------------------------------------------------------------------------------------------------------------------
# Tensor cores


@constant_when_compiled
def native_gemm(device_type: str) -> str | None:
    """Returns the implementation of FP4 GEMMs for this kind of device. None means the emulated GEMM."""
    return native_choice(device_type)[0]


def gemm_asked_for() -> str:
    """Returns the value of NVFP4_GEMM, or "auto" if it is not set or empty."""
    return os.environ.get("NVFP4_GEMM") or "auto"


@functools.cache
def native_choice(device_type: str) -> tuple[str | None, str]:
    """Returns the implementation, or None for the emulated GEMM, and the problems of the implementations before it.

    Raises ValueError if NVFP4_GEMM names an implementation that cannot run here.
    """
    wanted = gemm_asked_for()
    if wanted not in ("auto", "emulated", *IMPLEMENTATIONS):
        raise ValueError(f"NVFP4_GEMM is {wanted!r}, expected auto, emulated, {', '.join(IMPLEMENTATIONS)}")
    if wanted == "emulated":
        return None, "NVFP4_GEMM=emulated"
    reason = no_tensor_cores_reason(device_type)
    if reason and wanted != "auto":
        raise ValueError(f"NVFP4_GEMM={wanted}, but {reason}; unset it, or set NVFP4_GEMM=emulated")
    if reason:
        return None, reason
    reasons = []
    for name in IMPLEMENTATIONS if wanted == "auto" else (wanted,):
        multiple, problem, note = verdict(device_type, name)
        reasons += [f"{name} {what}" for what in (problem, note) if what]
        if multiple:
            if multiple > 1:
                only = f"{name} multiplies shapes of multiples of {multiple} alone here"
                _warn(f"{only}; other products are decoded to BF16, and no faster than there ({problem})")
                reasons.append(only)
            return name, "; ".join(reasons)
    if wanted != "auto":
        raise ValueError(f"NVFP4_GEMM={wanted}, but {reasons[0]}; unset it, or set NVFP4_GEMM=emulated")
    _warn(
        "no FP4 GEMM works on this GPU: every product is decoded to BF16, and training is slower than method bf16 "
        f"({'; '.join(reasons)}). Run `python -m nanochat_fp4.doctor`, or train with QAT_METHOD=bf16"
    )
    return None, "; ".join(reasons)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def no_tensor_cores_reason(device_type: str) -> str | None:
    """Returns the reason why FP4 tensor cores cannot be used here, or None."""
    if device_type != "cuda":
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        return f"sm_{major}{minor} has no FP4 tensor cores"
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no FP4 type"
    return None


@constant_when_compiled
def has_fp8_tensor_cores(device_type: str) -> bool:
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


@functools.cache
def verdict(device_type: str, name: str) -> probe.Verdict:
    """Tests an implementation on this device and returns the result. On a GPU a child process runs the test
    (probe.in_child)."""
    if missing := missing_reason(device_type, name):
        return probe.Verdict(None, missing)
    if device_type != "cuda":
        return probe_implementation(device_type, name)
    device = f"cuda:{torch.cuda.current_device()}"
    found, problem = probe.in_child(__name__, f"[probe_implementation({device!r}, {name!r})]")
    known = probe.Verdict(*found[0]) if found else probe.Verdict(None, problem)
    return known._replace(problem=f"{known.problem}{_hint(name)}") if known.problem else known


def _sm_121() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (12, 1)


def missing_reason(device_type: str, name: str) -> str | None:
    """Returns the reason why an implementation cannot run here, if it can be known without a test, or None."""
    if name == "cublaslt":
        from nvfp4_kernels import cublaslt

        library = cublaslt.library()
        return f"is not there: {library}" if isinstance(library, str) else None
    if name == "scaled_mm" and not hasattr(torch.nn.functional, "scaled_mm"):
        return f"is not in torch {torch.__version__}; install torch 2.10 or later"
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "is not installed (pip install flashinfer-python)"
    if name == "dot_scaled" and device_type == "cuda" and _sm_121():
        import triton

        if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
            return f"has no FP4 for sm_121 in Triton {triton.__version__}; install one after 3.8.0"
    return None


def _hint(name: str) -> str:
    """Returns a known remedy for a failure of this implementation on this GPU, or ""."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if name in ("cublaslt", "scaled_mm") and _sm_121() and version < (13, 4):
        return f"; cuBLASLt is known to have FP4 for sm_121 from CUDA 13.4 on, and this torch has {torch.version.cuda}"
    return ""


def output_dtypes(name: str) -> tuple[torch.dtype, ...]:
    """Returns the output dtypes of an implementation."""
    return (torch.bfloat16,) if name in BF16_ALONE else OUTPUT_DTYPES


def probe_implementation(device: str, name: str) -> probe.Verdict:
    """Applies probe.examine to one of IMPLEMENTATIONS on this device, in this process."""
    return probe.examine(torch.device(device), lambda a, b, dtype: mm(a, b, dtype, name), output_dtypes(name))


# ----------------------------------------------------------------------------------------------------------------------
# The GEMMs of tensor cores, and the operands that each of them takes


class Libraries:
    """Chooses the implementation of each FP4 product of a layer. This class chooses the first one of IMPLEMENTATIONS
    that is right on the product's shape."""

    def name_for(self, device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
        """Returns the implementation of the product (M, K) . (N, K)^T, or "emulated".

        Raises ValueError if NVFP4_GEMM names an implementation that is wrong on this shape.
        """
        return _first_right(device_type, m, n, k, out_dtype)


FIRST_RIGHT = Libraries()


class ChosenLibraries(Libraries):
    """Chooses the implementations that training has measured to be the fastest (training/gemms.py).

    chosen: a dictionary from (M, N, K, output dtype) to a name of IMPLEMENTATIONS, or "emulated". For products that are
            not in it, the first right implementation is chosen.
    """

    def __init__(self, chosen: Mapping[tuple[int, int, int, torch.dtype], str]):
        self.chosen = dict(chosen)

    def name_for(self, device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
        return self.chosen.get((m, n, k, out_dtype)) or _first_right(device_type, m, n, k, out_dtype)


class RecordingLibraries(Libraries):
    """Chooses the first right implementation, and records the products that FP4 tensor cores could compute, in order.
    Products of compiled code are not recorded."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int, int, torch.dtype]] = []

    def name_for(self, device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
        self.products.append((m, n, k, out_dtype))
        return _first_right(device_type, m, n, k, out_dtype)


def implementation(
    a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, libraries: Libraries = FIRST_RIGHT
) -> str | None:
    """Returns the implementation that multiplies these operands. None means the emulated GEMM.

    FP4 tensor cores need one tensor_scale for each operand, rows of codes that are multiples of 16 bytes, and N a
    multiple of 16. Raises ValueError like Libraries.name_for.
    """
    (m, half_k), (n, half_k_of_b) = a.codes.shape, b.codes.shape
    if half_k != half_k_of_b or half_k % 16 or n % 16 or a.tensor_scale.dim():
        return None
    name = libraries.name_for(a.codes.device.type, m, n, 2 * half_k, out_dtype)
    return None if name == "emulated" else name


@constant_when_compiled
def _first_right(device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
    name = native_gemm(device_type)
    if out_dtype not in output_dtypes(name):
        others = [other for other in IMPLEMENTATIONS if out_dtype in output_dtypes(other)]
        name = next((other for other in others if verdict(device_type, other).multiple), "emulated")
    multiple = 1 if name == "emulated" else verdict(device_type, name).multiple
    if not (m % multiple or n % multiple or k % multiple):
        return name
    if asked_for_native():
        raise ValueError(
            f"NVFP4_GEMM asks for FP4 tensor cores, which do not multiply {m} x {n} x {k} right on this GPU (shapes of "
            f"multiples of {multiple} alone); use such sizes, or unset NVFP4_GEMM"
        )
    return "emulated"


@constant_when_compiled
def asked_for_native() -> bool:
    return gemm_asked_for() in IMPLEMENTATIONS


def mm(a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, name: str) -> torch.Tensor:
    """Computes a (M, K) . b (N, K)^T with the implementation `name`. Returns (M, N) in out_dtype, BF16 or FP32."""
    return _function(name)(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, out_dtype)


def mm_add(a: NVFP4Tensor, b: NVFP4Tensor, into: torch.Tensor, name: str) -> None:
    """Adds a . b^T to `into`, float32 (M, N). cuBLASLt adds inside the GEMM, with one rounding. The other
    implementations compute the product, which is then added."""
    if name != "cublaslt":
        into.add_(mm(a, b, torch.float32, name))
        return
    from nvfp4_kernels.cublaslt import cublaslt_add

    cublaslt_add(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, into)


def _function(name: str) -> Callable[..., torch.Tensor]:
    from nvfp4_kernels import cublaslt, matmul

    return {
        "cublaslt": cublaslt.cublaslt,
        "scaled_mm": matmul.scaled_mm,
        "dot_scaled": matmul.dot_scaled,
        "flashinfer": matmul.mm_fp4,
    }[name]


class FP4Product(NamedTuple):
    """The product a (M, K) . b (N, K)^T of NVFP4 tensors, which the implementation `name` computes."""

    a: NVFP4Tensor
    b: NVFP4Tensor
    name: str

    def result(self, out_dtype: torch.dtype) -> torch.Tensor:
        return mm(self.a, self.b, out_dtype, self.name)

    def add_to(self, into: torch.Tensor) -> None:
        mm_add(self.a, self.b, into, self.name)


class FP8Product(NamedTuple):
    """The product a (M, K) . b (N, K)^T of 8-bit tensors with one float32 scale () each."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor

    def result(self, out_dtype: torch.dtype) -> torch.Tensor:
        return mm_fp8(*self, out_dtype)

    def add_to(self, into: torch.Tensor) -> None:
        into.add_(self.result(torch.float32))


@constant_when_compiled
def uses_mxfp8(device_type: str) -> bool:
    """Whether products of two E4M3 operands are computed as MXFP8 products whose block scales are 1."""
    return mxfp8_problem(device_type) is None


@functools.cache
def mxfp8_problem(device_type: str) -> str | None:
    """Returns the reason why such products stay in FP8 with one scale a tensor, or None. On a GPU a child process tests
    the MXFP8 product.

    Both ways compute the same arithmetic. On sm_12x, FP8 with sums in FP32 has a quarter of FP4's rate, and MXFP8 has
    half of it. On other GPUs MXFP8 is not faster.
    """
    if not fp8_is_slow(device_type):
        return "FP8 with one scale a tensor is as fast here"
    if missing := missing_reason(device_type, "cublaslt"):
        return f"cublaslt {missing}"
    if device_type != "cuda":
        return probe_mxfp8(device_type)
    device = f"cuda:{torch.cuda.current_device()}"
    found, problem = probe.in_child(__name__, f"[probe_mxfp8({device!r})]")
    return found[0] if found else f"cublaslt {problem}"


def fp8_is_slow(device_type: str) -> bool:
    """Whether this GPU halves the rate of FP8 products that sum in FP32."""
    return device_type == "cuda" and torch.cuda.get_device_capability()[0] == 12


def probe_mxfp8(device: str) -> str | None:
    """Applies probe.problem_of_fp8 to nvfp4_kernels.cublaslt.mxfp8 on this device, in this process."""
    from nvfp4_kernels.cublaslt import mxfp8

    return probe.problem_of_fp8(torch.device(device), mxfp8)


def takes_fp8(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> bool:
    """Whether FP8 tensor cores can multiply these operands. Each operand must have one scale, K and N must be multiples
    of 16, and at least one operand must be E4M3."""
    one_scale = a_scale.dim() == b_scale.dim() == 0 and a.shape[1] == b.shape[1]
    e4m3 = torch.float8_e4m3fn in (a.dtype, b.dtype)
    return one_scale and e4m3 and not (a.shape[1] % 16 or b.shape[0] % 16)


def mm_fp8(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """Computes a (M, K) . b (N, K)^T on FP8 tensor cores. Returns (M, N) in out_dtype.

    If both operands are E4M3, as in the forward, the sums are less exact (use_fast_accum), as in nanochat. On an H100
    the relative square error of a product of N(0, 1) operands is 7e-7 for K = 2048 and 4e-6 for K = 8192. With exact
    sums it is 2e-8, but rounding the operands to E4M3 alone causes 7e-4. Sums whose terms all have one sign lose more:
    3% for K = 2048 and 13% for K = 8192. Where uses_mxfp8 is true, the same product is computed with block scales of 1.
    """
    # A Hopper multiplies rows by rows alone. Codes that were made of a transposed tensor are copied.
    a, b = a.contiguous(), b.contiguous()
    if a.dtype == b.dtype and not a.shape[1] % 32 and uses_mxfp8(a.device.type):
        from nvfp4_kernels.cublaslt import mxfp8

        return mxfp8(a, a_scale, b, b_scale, out_dtype)
    fast = a.dtype == b.dtype
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=fast)
