"""Decides which quantizers and which GEMMs this machine uses, and says why.

Quantizers. The PyTorch reference (quantizers.py) runs on every machine. On CUDA the Triton kernels compute the same
numbers faster. The environment variable NVFP4_KERNELS chooses one of them, "reference" or "triton". On a CPU the
kernels run only under Triton's interpreter (TRITON_INTERPRET=1).

GEMMs. Libraries for the FP4 tensor cores of a Blackwell GPU have returned zeros without an error. On sm_100 and later
each library is therefore tested on known operands (probe.py), and the first one that is right on all shapes is used:
cuBLASLt called directly, or torch's scaled_mm (the same cuBLASLt with one more pass over the result). The last resort
is the emulated GEMM (gemm.py), which computes the same numbers without FP4 tensor cores. NVFP4_GEMM takes one of these
names, or "emulated". A run tests the shapes of its model once, for all ranks (`decide`). Otherwise the first layer that
quantizes tests some shapes.

If a user asks for a library that cannot run here, an error gives the reason. Nothing else is used silently.

torch.compile treats the kernels as opaque operators. On a CPU it leaves the reference uncompiled, because compiling it
takes minutes. NVFP4_COMPILE=1 compiles it.
"""

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nanochat_fp4.nvfp4.format import NVFP4Tensor

# The libraries for products of two NVFP4 operands, best first, and how each applies the tensor scales.
LIBRARIES = {
    "cublaslt": "tensor scales and gradient accumulation inside",
    "scaled_mm": "tensor scales in a second pass over an FP32 product",
}
# The operands of FP8 products that MXFP8 units may compute: those of the forward pass, and a gradient first or second.
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
MXFP8 = tuple(f"mxfp8 {a} {b}" for a, b in ((E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)))


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
    libraries' products.

    Raises ValueError if NVFP4_KERNELS or NVFP4_GEMM names an implementation that cannot run here.

    >>> print(nf.backend())  # doctest: +ELLIPSIS
    quantize: ...; GEMM: ... (...)
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = use_kernels(device)
    found = verdict(device.type)
    if device.type == "cpu":
        reason = "no CUDA device" + (", kernels under Triton's interpreter" if kernels else "")
        return Backend("Triton" if kernels else "PyTorch reference", "decode + FP32 matmul", reason)
    major, minor = torch.cuda.get_device_capability()
    reason = f"{torch.cuda.get_device_name()}, sm_{major}{minor}" + (f"; {found.reason}" if found.reason else "")
    if found.library:
        gemm = f"FP4 tensor cores ({found.library}: {LIBRARIES[found.library]})"
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


@constant_when_compiled
def use_kernels(device: torch.device) -> bool:
    """Whether operands on this device are quantized by the Triton kernels."""
    wanted = os.environ.get("NVFP4_KERNELS") or "auto"
    if wanted not in ("auto", "reference", "triton"):
        raise ValueError(f"NVFP4_KERNELS is {wanted!r}, expected auto, reference or triton")
    reason = no_kernels_reason(device.type)
    if wanted == "triton" and reason:
        raise ValueError(f"NVFP4_KERNELS=triton, but {reason}; unset it, or set NVFP4_KERNELS=reference")
    if wanted == "auto" and device.type == "cuda" and (problem := triton_problem()):
        raise ValueError(f"{problem}, or set NVFP4_KERNELS=reference, which is slow, and do not compile")
    return wanted == "triton" or (wanted == "auto" and reason is None and device.type == "cuda")


@constant_when_compiled
def stays_eager(device_type: str) -> bool:
    """Whether torch.compile leaves the quantized layers uncompiled on this kind of device. The first call that returns
    true also warns of it."""
    asked = os.environ.get("NVFP4_COMPILE", "0") not in ("", "0")
    left = device_type == "cpu" and not asked and not use_kernels(torch.device(device_type))
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
def multiplies_as_it_rotates() -> bool:
    """Whether the kernel that rotates grad_output also computes the gradient of ReLU^2. On GPUs with wgmma or tcgen05
    its instructions would take as long as the memory that it saves, and its registers would not suffice."""
    from nvfp4_kernels.rotate import rotates_by_butterflies

    return rotates_by_butterflies()


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


class Verdict(NamedTuple):
    """What this process has found out about the products of libraries.

    library: the library of NVFP4 products, one of LIBRARIES, or None for the emulated product
    reason:  why it is not another one, or ""
    mxfp8:   the FP8 products that are computed as MXFP8 products, of MXFP8
    """

    library: str | None
    reason: str = ""
    mxfp8: tuple[str, ...] = ()


VERDICTS: dict[str, Verdict] = {}  # type of device -> its verdict


def verdict(device_type: str) -> Verdict:
    """Returns the verdict for this type of device. If `decide` was not called, the first call tests the libraries on
    probe.SHAPES.

    Raises ValueError if NVFP4_GEMM names a library that cannot run here.
    """
    if device_type not in VERDICTS:
        VERDICTS[device_type] = _judge(device_type)
    return VERDICTS[device_type]


def decide(device_type: str, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Tests the libraries on these shapes (M, N, K), once for all ranks. All ranks call this function together, before
    convert.

    Rank 0 tests, and the others take its verdict. Raises ValueError on all ranks if NVFP4_GEMM names a library that
    cannot run here, and if the ranks' GPUs differ in their compute capability.
    """
    found: list[Any] = [None, ""]
    several = dist.is_available() and dist.is_initialized()
    if not several or dist.get_rank() == 0:
        try:
            found[0] = _judge(device_type, shapes)
        except ValueError as error:
            found[1] = str(error)
    if several:
        capabilities: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(capabilities, torch.cuda.get_device_capability() if device_type == "cuda" else None)
        if len(set(capabilities)) > 1:
            raise ValueError(
                f"the GPUs of the ranks differ (compute capabilities {capabilities}); use GPUs of one kind"
            )
        dist.broadcast_object_list(found, src=0)
    if found[0] is None:
        raise ValueError(found[1])
    VERDICTS[device_type] = Verdict(*found[0])


def _judge(device_type: str, shapes: Sequence[tuple[int, int, int]] = ()) -> Verdict:
    """The verdict of this process. Warns if no library is right."""
    wanted = os.environ.get("NVFP4_GEMM") or "auto"
    if wanted not in ("auto", "emulated", *LIBRARIES):
        raise ValueError(f"NVFP4_GEMM is {wanted!r}, expected auto, emulated, {', '.join(LIBRARIES)}")
    reason = no_tensor_cores_reason(device_type)
    if reason and wanted in LIBRARIES:
        raise ValueError(f"NVFP4_GEMM={wanted}, but {reason}; unset it, or set NVFP4_GEMM=emulated")
    if reason:
        return Verdict(None, reason)
    from nanochat_fp4.nvfp4 import probe

    names = {"auto": [*LIBRARIES], "emulated": []}.get(wanted, [wanted])
    names += MXFP8 if fp8_is_slow(device_type) else ()
    problems: dict[str, str | None] = {name: why for name in names if (why := missing_reason(name))}
    device = torch.device(device_type, torch.cuda.current_device() if device_type == "cuda" else None)
    tested, note = probe.examine([name for name in names if name not in problems], device, shapes or probe.SHAPES)
    problems |= tested
    mxfp8 = tuple(name for name in MXFP8 if problems.get(name, "") is None)
    library = next((name for name in LIBRARIES if problems.get(name, "") is None), None)
    why = "; ".join([f"{name} {why}" for name, why in problems.items() if why] + [note] * bool(note))
    if library or wanted == "emulated":
        return Verdict(library, why if library else "NVFP4_GEMM=emulated", mxfp8)
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (12, 1):
        why += f"; cuBLASLt is known to have FP4 for sm_121 from CUDA 13.4 on, and torch has {torch.version.cuda}"
    if wanted != "auto":
        raise ValueError(f"NVFP4_GEMM={wanted}, but {why}; unset it, or set NVFP4_GEMM=emulated")
    warnings.warn(
        "no FP4 GEMM works on this GPU: every product is decoded to BF16, and training is slower than method bf16 "
        f"({why}). Run `python -m nanochat_fp4.doctor`, or train with QAT_METHOD=bf16",
        stacklevel=3,
    )
    return Verdict(None, why, mxfp8)


@constant_when_compiled
def native_gemm(device_type: str) -> str | None:
    """Returns the library of FP4 GEMMs for this kind of device. None means the emulated GEMM."""
    return verdict(device_type).library


def no_tensor_cores_reason(device_type: str) -> str | None:
    """Returns the reason why FP4 tensor cores cannot be used here, or None."""
    if device_type != "cuda":
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        return f"sm_{major}{minor} has no FP4 tensor cores"
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no FP4 type"
    return kernels_unavailable_reason()


def missing_reason(name: str) -> str | None:
    """Returns the reason why a product cannot run here, if it can be known without a test, or None."""
    if name == "scaled_mm":
        missing = not hasattr(torch.nn.functional, "scaled_mm")
        return f"is not in torch {torch.__version__}; install torch 2.10 or later" if missing else None
    from nvfp4_kernels import cublas

    library = cublas.library()
    return f"is not there: {library}" if isinstance(library, str) else None


@constant_when_compiled
def has_fp8_tensor_cores(device_type: str) -> bool:
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def fp8_is_slow(device_type: str) -> bool:
    """Whether this GPU halves the rate of FP8 products that sum in FP32."""
    return device_type == "cuda" and torch.cuda.get_device_capability()[0] == 12


# ----------------------------------------------------------------------------------------------------------------------
# The products of tensor cores


def library(a: NVFP4Tensor, b: NVFP4Tensor) -> str | None:
    """Returns the name of the product a (M, K) . b (N, K)^T for `mm`: one of LIBRARIES for NVFP4 operands, "fp8" or
    "mxfp8" for FP8 operands. None means the emulated product.

    Tensor cores need codes with one tensor_scale for each operand, rows of codes that are multiples of 16 bytes, and N
    a multiple of 16. At least one of two FP8 operands must be E4M3.
    """
    if a.codes is None or b.codes is None or a.tensor_scale.dim() or b.tensor_scale.dim():
        return None
    (n, columns), dtypes, device_type = b.codes.shape, (a.codes.dtype, b.codes.dtype), a.codes.device.type
    if a.codes.shape[1] != columns or columns % 16 or n % 16:
        return None
    if torch.uint8 in dtypes:
        return native_gemm(device_type) if dtypes[0] == dtypes[1] else None
    if torch.float8_e4m3fn not in dtypes or not has_fp8_tensor_cores(device_type):
        return None
    return "mxfp8" if columns % 32 == 0 and uses_mxfp8(device_type, *dtypes) else "fp8"


def mm(a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, name: str, nonnegative: bool = False) -> torch.Tensor:
    """Computes the product `name` of `library`. Returns (M, N) in out_dtype, BF16 or FP32.

    If both operands of "fp8" are E4M3, as in the forward, the sums are less exact (use_fast_accum), as in nanochat. On
    an H100 the relative square error of a product of N(0, 1) operands is 7e-7 for K = 2048 and 4e-6 for K = 8192. With
    exact sums it is 2e-8, but rounding the operands to E4M3 alone causes 7e-4. Sums of terms of one sign lose more:
    1.2e-3 and 1.6e-2, and 4e-7 with exact sums. If an operand is known to be nonnegative, the sums are exact.
    """
    if name == "fp8":
        # A Hopper multiplies rows by rows alone. Codes that were made of a transposed tensor are copied.
        x, y = a.codes.contiguous(), b.codes.contiguous()
        settings = {"scale_a": a.tensor_scale, "scale_b": b.tensor_scale, "out_dtype": out_dtype}
        return torch._scaled_mm(x, y.T, **settings, use_fast_accum=x.dtype == y.dtype and not nonnegative)
    from nvfp4_kernels import cublas

    if name == "mxfp8":
        return cublas.mxfp8(a.codes.contiguous(), a.tensor_scale, b.codes.contiguous(), b.tensor_scale, out_dtype)
    return cublas.FP4[name](a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, out_dtype)


def mm_add(a: NVFP4Tensor, b: NVFP4Tensor, into: torch.Tensor, name: str) -> None:
    """Adds the product to `into`, float32 (M, N). cuBLASLt adds NVFP4 products inside the GEMM, with one rounding. Any
    other product is computed first."""
    if name != "cublaslt":
        into.add_(mm(a, b, torch.float32, name))
        return
    from nvfp4_kernels.cublas import cublaslt_add

    cublaslt_add(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, into)


def fp8_products(device_type: str) -> str:
    """Returns words for how products of two FP8 operands are computed."""
    if not has_fp8_tensor_cores(device_type):
        return "decoded, which is exact and no faster than BF16"
    others = [name for name in MXFP8 if name not in verdict(device_type).mxfp8] if fp8_is_slow(device_type) else MXFP8
    return "MXFP8 with block scales of 1" if not others else "FP8 tensor cores"


@constant_when_compiled
def uses_mxfp8(device_type: str, a: torch.dtype, b: torch.dtype) -> bool:
    """Whether FP8 products of operands of these dtypes are computed as MXFP8 products whose block scales are 1. On
    sm_12x FP8 with sums in FP32 has a quarter of FP4's rate, and MXFP8 has half of it."""
    name = f"mxfp8 {a} {b}".replace("torch.", "")
    return fp8_is_slow(device_type) and name in verdict(device_type).mxfp8
