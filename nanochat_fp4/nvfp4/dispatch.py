"""Which quantizers and which GEMMs this machine uses, and the reason.

Quantizers. The reference (quantizers.py) runs everywhere. On CUDA the Triton kernels do its work.
NVFP4_KERNELS=reference|triton chooses. On a CPU the kernels need TRITON_INTERPRET=1.

GEMMs. Libraries for the FP4 tensor cores of a Blackwell have returned zeros without an error. Each implementation
therefore multiplies known operands before its first use (probe.py), and is not asked again for shapes that it gets
wrong. If all are wrong, the next implementation is tried, in the order of IMPLEMENTATIONS: cuBLASLt called directly,
torch's scaled_mm (cuBLAS with one pass more), Triton's dot_scaled, flashinfer's mm_fp4. The last one is the emulated
GEMM (gemm.py), which computes the same. NVFP4_GEMM takes one of these names, or "emulated". Training times the
implementations on the model's own shapes, and gives layers the choice (training/gemms.py, `Libraries`).

A choice that cannot run raises an error with the reason. There is no silent fallback from it.

torch.compile sees the kernels as operators. It leaves the reference on a CPU alone, unless NVFP4_COMPILE=1.
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

IMPLEMENTATIONS = ("cublaslt", "scaled_mm", "dot_scaled", "flashinfer")  # of a GEMM of two NVFP4 operands
# How each one applies the tensor scales and adds to a weight's gradient, for `backend` and the report.
PATHS = {
    "cublaslt": "tensor scales and gradient accumulation inside",
    "scaled_mm": "tensor scales in a second pass over an FP32 product",
    "dot_scaled": "tensor scales inside",
    "flashinfer": "tensor scales inside",
}
BF16_ALONE = ("flashinfer",)  # cannot make weight gradients, which are FP32


@dataclass(frozen=True)
class Backend:
    """The implementation of each operation. str() is one line for logs and the report."""

    quantize: str
    gemm: str
    reason: str

    def __str__(self) -> str:
        return f"quantize: {self.quantize}; GEMM: {self.gemm} ({self.reason})"


def backend() -> Backend:
    """The implementations that this machine uses, with the reason. On a Blackwell the call probes the FP4 GEMMs.

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
    """Decorator: torch.compile takes what the function returns for a constant of the graph.

    torch.compiler.assume_constant_result does the same, and imports the whole compiler for it: two seconds."""
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
    """Whether torch.compile leaves the quantized layers alone on this kind of device; says so the first time."""
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
    """Why the release of Triton that is installed must not compile for this GPU, or None."""
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
    """Why the Triton kernels cannot be imported here, or None."""
    try:
        import nvfp4_kernels.rotate  # noqa: F401
    except ImportError as error:
        return f"the Triton kernels cannot be imported ({error})"
    return None


@constant_when_compiled
def cublas_unavailable_reason() -> str | None:
    """Why cuBLAS cannot be called with alpha on the device, or None."""
    try:
        from nvfp4_kernels import cublas
    except ImportError as error:
        return f"the kernels cannot be imported ({error})"
    return cublas.unavailable_reason()


# ----------------------------------------------------------------------------------------------------------------------
# Tensor cores


@constant_when_compiled
def native_gemm(device_type: str) -> str | None:
    """The implementation for this kind of device. None is the emulated GEMM."""
    return native_choice(device_type)[0]


def gemm_asked_for() -> str:
    """NVFP4_GEMM, "auto" where it is not set or empty."""
    return os.environ.get("NVFP4_GEMM") or "auto"


@functools.cache
def native_choice(device_type: str) -> tuple[str | None, str]:
    """(implementation or None, problems of the ones before it).

    Raises ValueError if NVFP4_GEMM names an implementation that cannot run.
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
    """Why there are no FP4 tensor cores to use here, or None."""
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
    """What is known of an implementation on this device. On a GPU a child process finds it out (probe.in_child)."""
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
    """The reason why an implementation cannot run here, if no probe is needed to know it."""
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
    """A known remedy for this implementation on this GPU, or ""."""
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if name in ("cublaslt", "scaled_mm") and _sm_121() and version < (13, 4):
        return f"; cuBLASLt is known to have FP4 for sm_121 from CUDA 13.4 on, and this torch has {torch.version.cuda}"
    return ""


def output_dtypes(name: str) -> tuple[torch.dtype, ...]:
    """The dtypes that an implementation makes."""
    return (torch.bfloat16,) if name in BF16_ALONE else OUTPUT_DTYPES


def probe_implementation(device: str, name: str) -> probe.Verdict:
    """probe.examine of one of IMPLEMENTATIONS on this device, in this process."""
    return probe.examine(torch.device(device), lambda a, b, dtype: mm(a, b, dtype, name), output_dtypes(name))


# ----------------------------------------------------------------------------------------------------------------------
# Their GEMMs, and the operands that each takes


class Libraries:
    """Which implementation makes each FP4 product of a layer: the first one of IMPLEMENTATIONS that is right on it."""

    def name_for(self, device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
        """The implementation of (M, K) . (N, K)^T, or "emulated".

        Raises ValueError if NVFP4_GEMM names an implementation that is wrong on this shape.
        """
        return _first_right(device_type, m, n, k, out_dtype)


FIRST_RIGHT = Libraries()


class ChosenLibraries(Libraries):
    """The implementations that training has measured to be the fastest (training/gemms.py).

    chosen: (M, N, K, output dtype) -> a name of IMPLEMENTATIONS, or "emulated". Other products are made by the first
            right one.
    """

    def __init__(self, chosen: Mapping[tuple[int, int, int, torch.dtype], str]):
        self.chosen = dict(chosen)

    def name_for(self, device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
        return self.chosen.get((m, n, k, out_dtype)) or _first_right(device_type, m, n, k, out_dtype)


class RecordingLibraries(Libraries):
    """As the first right ones; lists the products that FP4 tensor cores could make, in order, of code that is not
    compiled."""

    def __init__(self) -> None:
        self.products: list[tuple[int, int, int, torch.dtype]] = []

    def name_for(self, device_type: str, m: int, n: int, k: int, out_dtype: torch.dtype) -> str:
        self.products.append((m, n, k, out_dtype))
        return _first_right(device_type, m, n, k, out_dtype)


def implementation(
    a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, libraries: Libraries = FIRST_RIGHT
) -> str | None:
    """The implementation that multiplies these operands. None is the emulated GEMM.

    Tensor cores need one tensor_scale for each operand, whole 16-byte rows, and N a multiple of 16. Raises ValueError
    as Libraries.name_for.
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
    """a (M, K) . b (N, K)^T by the implementation `name` -> (M, N) in out_dtype, BF16 or FP32."""
    return _function(name)(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, out_dtype)


def mm_add(a: NVFP4Tensor, b: NVFP4Tensor, into: torch.Tensor, name: str) -> None:
    """into += a . b^T, FP32 (M, N): inside the GEMM by cuBLASLt, with one rounding; else a product and an addition."""
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
    """a (M, K) . b (N, K)^T by the implementation `name`."""

    a: NVFP4Tensor
    b: NVFP4Tensor
    name: str

    def result(self, out_dtype: torch.dtype) -> torch.Tensor:
        return mm(self.a, self.b, out_dtype, self.name)

    def add_to(self, into: torch.Tensor) -> None:
        mm_add(self.a, self.b, into, self.name)


class FP8Product(NamedTuple):
    """a (M, K) . b (N, K)^T of 8-bit numbers with one scale each."""

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
    """Whether products of two E4M3 operands are made in MXFP8, with block scales of 1."""
    return mxfp8_problem(device_type) is None


@functools.cache
def mxfp8_problem(device_type: str) -> str | None:
    """Why such products are left to FP8 with one scale a tensor, or None. On a GPU a child process finds it out.

    The two are the same arithmetic. On sm_12x FP8 with sums in FP32 has a quarter of FP4's rate and MXFP8 half of it;
    elsewhere MXFP8 has nothing to gain.
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
    """probe.problem_of_fp8 of nvfp4_kernels.cublaslt.mxfp8 on this device, in this process."""
    from nvfp4_kernels.cublaslt import mxfp8

    return probe.problem_of_fp8(torch.device(device), mxfp8)


def takes_fp8(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> bool:
    """Whether FP8 tensor cores multiply these: one scale each, K and N multiples of 16, not both E5M2."""
    one_scale = a_scale.dim() == b_scale.dim() == 0 and a.shape[1] == b.shape[1]
    e4m3 = torch.float8_e4m3fn in (a.dtype, b.dtype)
    return one_scale and e4m3 and not (a.shape[1] % 16 or b.shape[0] % 16)


def mm_fp8(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a (M, K) . b (N, K)^T in FP8 -> (M, N) in out_dtype.

    Two E4M3 operands, as in the forward, are summed less exactly (use_fast_accum), as nanochat does. Measured on an
    H100, relative square error of the product of N(0, 1) operands: 7e-7 for K = 2048, 4e-6 for 8192 (without it 2e-8).
    E4M3's own rounding has 7e-4. Sums whose terms have one sign lose more: 3% for K = 2048, 13% for 8192.
    Where MXFP8 is used (uses_mxfp8), the same product has block scales of 1.
    """
    if a.dtype == b.dtype and not a.shape[1] % 32 and uses_mxfp8(a.device.type):
        from nvfp4_kernels.cublaslt import mxfp8

        return mxfp8(a.contiguous(), a_scale, b.contiguous(), b_scale, out_dtype)
    fast = a.dtype == b.dtype
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=fast)
