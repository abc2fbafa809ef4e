"""The NVFP4 GEMM of a Blackwell's tensor cores: which implementation, if any, this machine may be trusted with.

Libraries have returned zeros here without an error. So each implementation multiplies operands whose product is known
before it is used, once a process; one that fails is named with the reason, and the next one is tried: torch's scaled_mm
(cuBLAS), Triton's dot_scaled, and then the emulated GEMM, which computes the same. NVFP4_GEMM=scaled_mm|dot_scaled
|emulated asks for one of them; what cannot run raises with the reason instead of falling back.
"""

import functools
import os
from collections.abc import Callable

import torch

from nanochat_fp4.nvfp4.format import NVFP4Tensor

IMPLEMENTATIONS = ("scaled_mm", "dot_scaled")
PROBE_SHAPES = ((144, 160, 96), (512, 384, 1024))  # M, N, K: one with padding in every dimension, one of several tiles
# Relative square error: a rounding to BF16 gives 3e-6, whatever the order of summation. Wrong scales give 1.
PROBE_ERROR = 1e-4


def takes(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    """Whether tensor cores multiply these operands: one tensor_scale each, whole 16-byte rows, N a multiple of 16."""
    same_k = a.codes.shape[1] == b.codes.shape[1] and a.codes.dtype == b.codes.dtype == torch.uint8
    return same_k and a.codes.shape[1] % 16 == 0 and b.codes.shape[0] % 16 == 0 and a.tensor_scale.dim() == 0


def mm(a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, name: str) -> torch.Tensor:
    """a (M, K) . b (N, K)^T by the implementation `name` -> (M, N) in out_dtype, BF16 or FP32."""
    from nvfp4_kernels import matmul

    function = {"scaled_mm": matmul.scaled_mm, "dot_scaled": matmul.dot_scaled}[name]
    return function(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, out_dtype)


@torch.compiler.assume_constant_result
def implementation(device_type: str) -> str | None:
    """The implementation to use on this kind of device, or None for the emulated GEMM. See `choice`."""
    return choice(device_type)[0]


@functools.cache
def choice(device_type: str) -> tuple[str | None, str]:
    """(implementation or None, why not the ones before it).

    Raises ValueError if NVFP4_GEMM asks for what cannot run.
    """
    wanted = os.environ.get("NVFP4_GEMM", "auto")
    if wanted not in ("auto", "emulated", *IMPLEMENTATIONS):
        raise ValueError(f"NVFP4_GEMM is {wanted!r}, expected auto, emulated, {' or '.join(IMPLEMENTATIONS)}")
    if wanted == "emulated":
        return None, "NVFP4_GEMM=emulated"
    reason = no_hardware_reason(device_type)
    if reason and wanted != "auto":
        raise ValueError(f"NVFP4_GEMM={wanted}, but {reason}; unset it, or set NVFP4_GEMM=emulated")
    if reason:
        return None, reason
    reasons = []
    for name in IMPLEMENTATIONS if wanted == "auto" else (wanted,):
        problem = probe(torch.device(device_type), lambda a, b, dtype, name=name: mm(a, b, dtype, name))
        if problem is None:
            return name, "; ".join(reasons)
        reasons.append(f"{name} {problem}")
    if wanted != "auto":
        raise ValueError(f"NVFP4_GEMM={wanted}, but {reasons[0]}; unset it, or set NVFP4_GEMM=emulated")
    return None, "; ".join(reasons)


def no_hardware_reason(device_type: str) -> str | None:
    """Why there are no FP4 tensor cores to use here, or None."""
    if device_type != "cuda":
        return "no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        return f"sm_{major}{minor} has no FP4 tensor cores"
    if not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no FP4 type"
    return None


def relative_square_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want|^2 / |want|^2, summed in FP64."""
    return float((got - want).double().square().sum() / want.double().square().sum())


def probe(device: torch.device, function: Callable[..., torch.Tensor]) -> str | None:
    """What is wrong with function(a, b, out_dtype), a GEMM of NVFP4 operands on this device, or None."""
    generator = torch.Generator().manual_seed(4)

    def operand(rows: int, k: int) -> NVFP4Tensor:
        codes = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
        # E4M3 bytes of 2^-6 to 448: no two scales of a tile need be the same.
        scales = torch.randint(8, 127, (rows, k // 16), generator=generator, dtype=torch.uint8)
        tensor_scale = torch.rand((), generator=generator) + 0.5
        return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), tensor_scale)

    for m, n, k in PROBE_SHAPES:
        a, b = operand(m, k), operand(n, k)
        want = a.dequantize() @ b.dequantize().T
        there = [NVFP4Tensor(*(t.to(device) for t in (v.codes, v.scales, v.tensor_scale))) for v in (a, b)]
        for dtype in (torch.bfloat16, torch.float32):
            try:
                got = function(*there, dtype).float().cpu()
            except Exception as error:  # whatever a library or a compiler raises: another implementation is tried
                lines = str(error).splitlines() or [type(error).__name__]
                return f"raises {lines[0][:200]}"
            if not got.any():
                return "returns zeros"
            error = relative_square_error(got, want)
            if not error < PROBE_ERROR:
                return (
                    f"has a relative square error of {error:.1e} on {m} x {n} x {k}, expected below {PROBE_ERROR:.0e}"
                )
    return None
