"""What runs on this machine, and why: the quantizers, the GEMM of two 4-bit operands, the emulated GEMM.

Quantizers: the reference (quantizers.py) runs everywhere; the Triton kernels, which are compared with it, take over on
CUDA. NVFP4_KERNELS=reference|triton asks for one of them (on a CPU triton needs TRITON_INTERPRET=1).

GEMM: where a Blackwell's tensor cores multiply NVFP4, libraries have returned zeros without an error. So
each implementation multiplies operands whose product is known before it is used, once a process, in a child process on
a GPU. An implementation that fails on some shapes is not used for these. One that fails on all is named with the
reason, and the next one is tried: torch's scaled_mm (cuBLAS), Triton's dot_scaled, and then the emulated
GEMM (gemm.py), which computes the same. NVFP4_GEMM=scaled_mm|dot_scaled|emulated asks for one of them.

torch.compile: the kernels are operators of a graph. The reference on a CPU is left out of it (but for
NVFP4_COMPILE=1).

What is asked for and cannot run raises with the reason instead of falling back.
"""

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanochat_fp4.nvfp4.format import NVFP4Tensor

IMPLEMENTATIONS = ("scaled_mm", "dot_scaled")  # of the NVFP4 GEMM: torch's (cuBLAS), Triton's
# M, N, K to try, under what these are multiples of: several tiles, then padding in N and K, then in every dimension.
PROBE_SHAPES = {128: (512, 384, 1024), 64: (192, 320, 192), 1: (144, 160, 96)}
# Relative square error: a rounding to BF16 gives 3e-6, whatever the order of summation. Wrong scales give 1.
PROBE_ERROR = 1e-4


@dataclass(frozen=True)
class Backend:
    """What this machine uses for each operation; str() is one line for logs and the report."""

    quantize: str
    gemm: str
    reason: str

    def __str__(self) -> str:
        return f"quantize: {self.quantize}; GEMM: {self.gemm} ({self.reason})"


def backend() -> Backend:
    """Which kernels this machine uses, and why. On a Blackwell this runs the probe of its FP4 GEMMs.

    Raises ValueError if NVFP4_KERNELS or NVFP4_GEMM asks for what cannot run here.

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
        gemm = f"FP4 tensor cores ({name})"
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
    wanted = os.environ.get("NVFP4_KERNELS", "auto")
    if wanted not in ("auto", "reference", "triton"):
        raise ValueError(f"NVFP4_KERNELS is {wanted!r}, expected auto, reference or triton")
    reason = _no_kernels_reason(device_type)
    if wanted == "triton" and reason:
        raise ValueError(f"NVFP4_KERNELS=triton, but {reason}; unset it, or set NVFP4_KERNELS=reference")
    return wanted == "triton" or (wanted == "auto" and reason is None and device_type == "cuda")


@constant_when_compiled
def left_out_of_graphs(device_type: str) -> bool:
    """Whether torch.compile leaves the quantized layers alone on this kind of device; says so the first time."""
    left = device_type == "cpu" and os.environ.get("NVFP4_COMPILE", "0") in ("", "0") and not _use_kernels(device_type)
    if left:
        _say_what_is_left_out()
    return left


@functools.cache
def _say_what_is_left_out() -> None:
    warnings.warn(
        "torch.compile leaves the quantized layers alone: on a CPU they are computed by the PyTorch reference, which "
        "would take minutes to compile (NVFP4_COMPILE=1 does)",
        stacklevel=2,
    )


@functools.cache
def _no_kernels_reason(device_type: str) -> str | None:
    reason = kernels_unavailable_reason()
    if reason:
        return reason
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80, which the kernels need for BF16"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device (on a CPU they run under TRITON_INTERPRET=1)"
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
    """Of IMPLEMENTATIONS the one to use on this kind of device, or None for the emulated GEMM."""
    return native_choice(device_type)[0]


@functools.cache
def native_choice(device_type: str) -> tuple[str | None, str]:
    """(implementation or None, why not the ones before it).

    Raises ValueError if NVFP4_GEMM asks for what cannot run.
    """
    wanted = os.environ.get("NVFP4_GEMM", "auto")
    if wanted not in ("auto", "emulated", *IMPLEMENTATIONS):
        raise ValueError(f"NVFP4_GEMM is {wanted!r}, expected auto, emulated, {' or '.join(IMPLEMENTATIONS)}")
    if wanted == "emulated":
        return None, "NVFP4_GEMM=emulated"
    reason = no_tensor_cores_reason(device_type)
    if reason and wanted != "auto":
        raise ValueError(f"NVFP4_GEMM={wanted}, but {reason}; unset it, or set NVFP4_GEMM=emulated")
    if reason:
        return None, reason
    reasons = []
    for name in IMPLEMENTATIONS if wanted == "auto" else (wanted,):
        multiple, problem = _look(device_type, name)
        reasons += [f"{name} {problem}"] if problem else []
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


def relative_square_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want|^2 / |want|^2, summed in FP64."""
    return float((got - want).double().square().sum() / want.double().square().sum())


def probe(device: torch.device, function: Callable[..., torch.Tensor]) -> tuple[int | None, str]:
    """Compares function(a, b, out_dtype), a GEMM of NVFP4 operands on this device, with known products.

    Returns (multiple, problem): function is right where M, N and K are multiples of the number; 1 where it is right on
    every shape that `takes` knows, None where it is wrong everywhere. problem says what the first failure was, or "".
    """
    found: int | None = None
    for multiple, shape in PROBE_SHAPES.items():
        problem = _problem_of_shape(device, function, shape)
        if problem:
            return found, f"{problem} on {' x '.join(map(str, shape))}"
        found = multiple
    return found, ""


def _problem_of_shape(device: torch.device, function: Callable, shape: tuple[int, int, int]) -> str | None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(4)

    def operand(rows: int, lowest: int, highest: int) -> NVFP4Tensor:
        codes = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(lowest, highest, (rows, k // 16), generator=generator, dtype=torch.uint8)
        tensor_scale = torch.rand((), generator=generator) + 0.5
        return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), tensor_scale)

    # E4M3 bytes of 2^-6 to 448: no two scales of a tile need be the same. Then zeros and subnormal numbers.
    for what, lowest, highest in (("", 8, 127), (" with subnormal scales", 0, 8), (" with a NaN scale", 8, 127)):
        a, b = operand(m, lowest, highest), operand(n, 8, 127)
        if "NaN" in what:
            a.scales.view(torch.uint8)[m // 2, 1] = 127
        want = a.dequantize() @ b.dequantize().T
        there = [NVFP4Tensor(*(t.to(device) for t in (v.codes, v.scales, v.tensor_scale))) for v in (a, b)]
        for dtype in (torch.bfloat16, torch.float32):
            try:
                got = function(*there, dtype).float().cpu()
            except Exception as error:  # whatever a library or a compiler raises: another implementation is tried
                lines = str(error).splitlines() or [type(error).__name__]
                return f"raises {lines[0][:200]}"
            if not torch.equal(got.isnan(), want.isnan()):
                return f"has NaN where none belongs, or none where one does,{what}"
            if not got.any():
                return f"returns zeros{what}"
            error = relative_square_error(got.nan_to_num(), want.nan_to_num())
            if not error < PROBE_ERROR:
                return f"has a relative square error of {error:.1e}, expected below {PROBE_ERROR:.0e},{what}"
    return None


@functools.cache
def _look(device_type: str, name: str) -> tuple[int | None, str]:
    """`probe` of an implementation. On a GPU a child process does it: an illegal address ends every later CUDA call."""
    if device_type != "cuda":
        return probe_implementation(device_type, name)
    device = f"cuda:{torch.cuda.current_device()}"
    return in_child(f"probe_implementation({device!r}, {name!r})")


def probe_implementation(device: str, name: str) -> tuple[int | None, str]:
    """`probe` of one of IMPLEMENTATIONS on this device, in this process."""
    return probe(torch.device(device), lambda a, b, dtype: mm(a, b, dtype, name))


def in_child(call: str, timeout: float = 600) -> tuple[int | None, str]:
    """What `call`, of a function of this module, returns in a new process; (None, reason) where that process dies."""
    code = (
        f"from nanochat_fp4.nvfp4.dispatch import probe_implementation; import json; print('FOUND', json.dumps({call}))"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return None, f"had no result after {timeout:.0f} s"
    for line in child.stdout.splitlines():
        if line.startswith("FOUND "):
            multiple, problem = json.loads(line.removeprefix("FOUND "))
            return multiple, problem
    last = (child.stderr.strip().splitlines() or ["no message"])[-1]
    return None, f"ended its process with status {child.returncode} ({last[:200]})"


# ----------------------------------------------------------------------------------------------------------------------
# Their GEMMs, and the operands that each takes


def takes(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    """Whether tensor cores multiply these operands: one tensor_scale each, whole 16-byte rows, N a multiple of 16."""
    same_k = a.codes.shape[1] == b.codes.shape[1]
    if not (same_k and a.codes.shape[1] % 16 == 0 and b.codes.shape[0] % 16 == 0 and a.tensor_scale.dim() == 0):
        return False
    m, n, k, multiple = a.codes.shape[0], b.codes.shape[0], a.codes.shape[1] * 2, native_multiple(a.codes.device.type)
    if not (m % multiple or n % multiple or k % multiple):
        return True
    if asked_for_native():
        raise ValueError(
            f"NVFP4_GEMM asks for FP4 tensor cores, which do not multiply {m} x {n} x {k} right on this GPU (shapes of "
            f"multiples of {multiple} alone); use such sizes, or unset NVFP4_GEMM"
        )
    return False


@constant_when_compiled
def native_multiple(device_type: str) -> int:
    """What M, N and K must be multiples of for native_gemm's implementation."""
    name = native_gemm(device_type)
    return (name and _look(device_type, name)[0]) or 1


@constant_when_compiled
def asked_for_native() -> bool:
    return os.environ.get("NVFP4_GEMM") in IMPLEMENTATIONS


def mm(a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, name: str) -> torch.Tensor:
    """a (M, K) . b (N, K)^T by the implementation `name` -> (M, N) in out_dtype, BF16 or FP32."""
    from nvfp4_kernels import matmul

    function = {"scaled_mm": matmul.scaled_mm, "dot_scaled": matmul.dot_scaled}[name]
    return function(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, out_dtype)


def takes_fp8(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> bool:
    """Whether FP8 tensor cores multiply these: one scale each, K and N multiples of 16, not both E5M2."""
    one_scale = a_scale.dim() == b_scale.dim() == 0 and a.shape[1] == b.shape[1]
    e4m3 = torch.float8_e4m3fn in (a.dtype, b.dtype)
    return one_scale and e4m3 and not (a.shape[1] % 16 or b.shape[0] % 16)


def mm_fp8(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a (M, K) . b (N, K)^T in FP8 -> (M, N) in out_dtype.

    Where both are E4M3, as in the forward alone, sums are a little less exact: as nanochat's fp8.py has it.
    """
    fast = a.dtype == b.dtype
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=fast)
