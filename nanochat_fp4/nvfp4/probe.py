"""Tests a GEMM on operands whose product is known, before the GEMM is trusted.

The test is needed because libraries for FP4 tensor cores have returned zeros without an error, some of them only on
some shapes. The operands have random codes and random block scales, and the reference product is computed on the CPU
from the decoded operands. This file knows no library by name. dispatch.py calls it for each library.

On a GPU the test runs in a child process (`in_child`), for two reasons. After a library has read an illegal address,
every later CUDA call of the process fails. A library that crashes ends its process.
"""

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4.format import NVFP4Tensor, swizzle_scales

Multiply = Callable[[NVFP4Tensor, NVFP4Tensor, torch.dtype], torch.Tensor]
OUTPUT_DTYPES = (torch.bfloat16, torch.float32)
# The key divides M, N and K of its shape. The first shape consists of several whole tiles, the second one needs padding
# in N and K, and the third one needs padding in all dimensions.
PROBE_SHAPES = {128: (512, 384, 1024), 64: (192, 320, 192), 1: (144, 160, 96)}
# The largest relative square error that passes. Rounding to BF16 causes 3e-6 for any order of summation, and wrong
# scales cause about 1.
PROBE_ERROR = 1e-4
LAUNCHES = 20  # Each product is computed so often, and all results must have the same bits.
SAMPLED_TILE, SAMPLED_LINES = 128, 4  # In a large product, 4 rows and 4 columns of each tile of 128 are compared.


def relative_square_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns |got - want|^2 / |want|^2. The sums are computed in FP64."""
    return float((got - want).double().square().sum() / want.double().square().sum())


class Verdict(NamedTuple):
    """The result of testing a GEMM.

    multiple: the GEMM is right if this number divides M, N and K. None means that it is wrong on all shapes.
    problem:  the first failure, or ""
    note:     a remark for the user that is no reason to refuse the GEMM, or ""
    """

    multiple: int | None
    problem: str = ""
    note: str = ""


def examine(device: torch.device, function: Multiply, dtypes: Sequence[torch.dtype] = OUTPUT_DTYPES) -> Verdict:
    """Compares a GEMM of NVFP4 operands with known products, on each of PROBE_SHAPES and for each output dtype."""
    found, note = None, ""
    for multiple, shape in PROBE_SHAPES.items():
        if problem := problem_of_shape(device, function, shape, dtypes):
            return Verdict(found, f"{problem} on {' x '.join(map(str, shape))}", note)
        if found is None and not keeps_nan(device, function, shape, dtypes[0]):
            # This is no reason to refuse the GEMM, because a number that is not finite also reaches the loss through
            # the tensor scale.
            note = "makes a number of a NaN block scale"
        found = multiple
    return Verdict(found, "", note)


def random_operand(device: torch.device, rows: int, k: int, lowest: int = 8, highest: int = 127) -> NVFP4Tensor:
    """Returns an operand (rows, K) with random codes and random row-major scales. The bytes of the E4M3 scales are from
    lowest to highest - 1.

    The bytes 8 to 126 are the normal numbers from 2^-6 to 448, so that the scales of a tile differ and a wrong order
    is noticed. The bytes below 8 are zero and the subnormal numbers.
    """
    codes = torch.randint(0, 256, (rows, k // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(lowest, highest, (rows, k // 16), device=device, dtype=torch.uint8)
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.rand((), device=device) + 0.5)


def tiled(t: NVFP4Tensor) -> NVFP4Tensor:
    """Returns the same operand with its scales in tiles (swizzle_scales), which is the layout that the GEMMs take."""
    return NVFP4Tensor(t.codes, swizzle_scales(t.scales), t.tensor_scale)


def _lines(size: int, included: int) -> torch.Tensor:
    """Returns the numbers of the rows, or columns, of a product to compare: all of them in a small product, and some of
    each tile in a large one. The number `included` is always among them."""
    first = torch.arange(0, size, SAMPLED_TILE)
    if size <= 512:
        return torch.arange(size)
    some = first[:, None] + torch.randint(0, SAMPLED_TILE, (len(first), SAMPLED_LINES))
    return torch.cat((some.flatten().clamp(max=size - 1), torch.tensor([included, size - 1]))).unique()


def problem_of_shape(
    device: torch.device, function: Multiply, shape: tuple[int, int, int], dtypes: Sequence[torch.dtype] = OUTPUT_DTYPES
) -> str | None:
    """Returns the first failure of a GEMM on operands of this shape (M, N, K), as text, or None.

    One product has normal block scales, and another one has zero and subnormal scales. Each product is launched
    LAUNCHES times and must have the same bits each time, because a race that a compiler has caused shows only in some
    launches. torch's random generators keep their states.
    """
    m, n, k = shape
    with _own_random_numbers(device):
        rows, columns = _lines(m, m // 2), _lines(n, 0)
        for what, lowest, highest in (("", 8, 127), (" with subnormal scales", 0, 8)):
            a, b = random_operand(device, m, k, lowest, highest), random_operand(device, n, k)
            want = _rows_of(a, rows) @ _rows_of(b, columns).T
            for dtype in dtypes:
                try:
                    results = [function(tiled(a), tiled(b), dtype) for _ in range(LAUNCHES)]
                    got = results[0][rows][:, columns].float().cpu()
                except Exception as error:  # Libraries and compilers may raise anything. Another one is tried then.
                    lines = str(error).splitlines() or [type(error).__name__]
                    return f"raises {lines[0][:200]}"
                if tuple(results[0].shape) != (m, n):
                    return f"returns the shape {tuple(results[0].shape)}"
                if not got.any():
                    return f"returns zeros{what}"
                error = relative_square_error(got, want)
                if not error < PROBE_ERROR:  # NaN included
                    return f"has a relative square error of {error:.1e}, expected below {PROBE_ERROR:.0e},{what}"
                if other := [i for i, result in enumerate(results, 1) if not torch.equal(result, results[0])]:
                    return f"has other bits in launch {other[0]} of {LAUNCHES} than in the first{what}"
    return None


def problem_of_fp8(device: torch.device, function: Callable[..., torch.Tensor]) -> str | None:
    """Returns the first failure of function(a, a_scale, b, b_scale, dtype), as text, or None. The function multiplies
    E4M3 tensors a (M, K) and b (N, K) with one scale each.

    FP8 units keep fewer bits of a sum. Numbers of both signs still pass with the bound PROBE_ERROR.
    """
    with _own_random_numbers(device):
        for m, n, k in PROBE_SHAPES.values():
            a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
            scales = [torch.rand((), device=device) + 0.5 for _ in range(2)]
            want = (a.double() @ b.double().T * scales[0] * scales[1]).cpu()
            for dtype in OUTPUT_DTYPES:
                try:
                    results = [function(a, scales[0], b, scales[1], dtype) for _ in range(LAUNCHES)]
                except Exception as error:  # A library may raise anything.
                    lines = str(error).splitlines() or [type(error).__name__]
                    return f"raises {lines[0][:200]}"
                error = relative_square_error(results[0].cpu(), want)
                if not error < PROBE_ERROR:
                    return f"has a relative square error of {error:.1e} on {m} x {n} x {k}"
                if any(not torch.equal(result, results[0]) for result in results):
                    return f"has other bits in some of {LAUNCHES} launches"
    return None


def keeps_nan(device: torch.device, function: Multiply, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
    """Whether a NaN block scale makes its row of the product NaN, and nothing else."""
    m, n, k = shape
    with _own_random_numbers(device):
        a, b = random_operand(device, m, k), random_operand(device, n, k)
        a.scales.view(torch.uint8)[m // 2, 1] = 127
        bad = function(tiled(a), tiled(b), dtype).isnan().cpu()
    return bool(bad[m // 2].all()) and int(bad.sum()) == n


@contextlib.contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Inside this context, torch's generators start from a fixed seed. Afterwards they continue as if nothing had been
    drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(4)
        yield


def _rows_of(t: NVFP4Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the dequantized rows of t with these numbers, float32 (len(rows), K), on the CPU."""
    scales = t.scales.view(torch.uint8)[rows].view(t.scales.dtype)
    return NVFP4Tensor(t.codes[rows], scales, t.tensor_scale).dequantize().cpu()


COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE of the CUDA driver
COMPUTE_MODES = {0: "DEFAULT", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}  # CUcomputemode of the CUDA driver
EXCLUSIVE = (
    "the GPU is in compute mode EXCLUSIVE_PROCESS, in which no child process can try an FP4 GEMM; "
    "set it to DEFAULT (nvidia-smi -c 0)"
)


@functools.cache
def driver() -> ctypes.CDLL | None:
    """Returns the CUDA driver's library, or None if there is none."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None


def compute_mode() -> str:
    """Returns the compute mode of torch's current GPU, one of COMPUTE_MODES, or "" if there is no GPU or the driver
    does not tell."""
    if driver() is None or not torch.cuda.is_available():
        return ""
    device, mode = ctypes.c_int(), ctypes.c_int()
    failed = driver().cuInit(0) or driver().cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
    failed = failed or driver().cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, device)
    return "" if failed else COMPUTE_MODES.get(mode.value, "")


def in_child(module: str, call: str, timeout: float = 600) -> tuple[list, str]:
    """Evaluates `call` in a new Python process and returns (results, problem).

    module:  the module whose names `call` uses
    call:    Python code of an iterable, whose items can be written as JSON
    timeout: the longest time to wait, in seconds

    problem is "" if the process ends well. If the process dies or takes too long, problem says how, and the results are
    those that it had until then.
    """
    code = f"import json; from {module} import *\nfor result in {call}: print('FOUND', json.dumps(result), flush=True)"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
        out, status = child.stdout, child.returncode
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"ended its process with status {status} ({last[:200]})" if status else ""
        if status and compute_mode() == "EXCLUSIVE_PROCESS":
            problem += f"; {EXCLUSIVE}"
    except subprocess.TimeoutExpired as expired:
        out = expired.stdout or b""
        out, problem = out if isinstance(out, str) else out.decode(), f"had no result after {timeout:.0f} s"
    return [json.loads(line.removeprefix("FOUND ")) for line in out.splitlines() if line.startswith("FOUND ")], problem
