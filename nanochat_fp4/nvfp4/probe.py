"""A known answer before a GEMM is trusted.

Libraries for FP4 tensor cores have returned zeros without an error, on some shapes alone. Here a GEMM multiplies
operands whose product is known: codes and block scales are random numbers, and the reference decodes them on the CPU.
Nothing here knows a library by name; dispatch.py does.

On a GPU the comparison runs in a child process (`in_child`). A library that reads an illegal address ends every later
CUDA call of its process, and a library that crashes ends the process.
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
# A key divides M, N and K of its shape. The shapes need several tiles, padding in N and K, padding in all dimensions.
PROBE_SHAPES = {128: (512, 384, 1024), 64: (192, 320, 192), 1: (144, 160, 96)}
# Relative square error: a rounding to BF16 gives 3e-6, whatever the order of summation. Wrong scales give 1.
PROBE_ERROR = 1e-4
LAUNCHES = 20  # of a product, whose bits must agree
SAMPLED_TILE, SAMPLED_LINES = 128, 4  # Of a large product each tile has 4 rows and 4 columns compared.


def relative_square_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want|^2 / |want|^2, summed in FP64."""
    return float((got - want).double().square().sum() / want.double().square().sum())


class Verdict(NamedTuple):
    """What is known of a GEMM.

    multiple: it is right if this number divides M, N and K; None if it is wrong everywhere
    problem:  its first failure, or ""
    note:     what a user should know though nothing is refused, or ""
    """

    multiple: int | None
    problem: str = ""
    note: str = ""


def examine(device: torch.device, function: Multiply, dtypes: Sequence[torch.dtype] = OUTPUT_DTYPES) -> Verdict:
    """Compares a GEMM of NVFP4 operands with known products on the shapes of PROBE_SHAPES."""
    found, note = None, ""
    for multiple, shape in PROBE_SHAPES.items():
        if problem := problem_of_shape(device, function, shape, dtypes):
            return Verdict(found, f"{problem} on {' x '.join(map(str, shape))}", note)
        if found is None and not keeps_nan(device, function, shape, dtypes[0]):
            # No reason to refuse it: a number that is not finite reaches the loss by the tensor scale as well.
            note = "makes a number of a NaN block scale"
        found = multiple
    return Verdict(found, "", note)


def random_operand(device: torch.device, rows: int, k: int, lowest: int = 8, highest: int = 127) -> NVFP4Tensor:
    """Random codes (rows, K), and scales with E4M3 bytes from lowest to highest - 1, row-major.

    Bytes from 8 to 126 are 2^-6 to 448: no two scales of a tile need be the same. Below are zero and subnormal numbers.
    """
    codes = torch.randint(0, 256, (rows, k // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(lowest, highest, (rows, k // 16), device=device, dtype=torch.uint8)
    return NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.rand((), device=device) + 0.5)


def tiled(t: NVFP4Tensor) -> NVFP4Tensor:
    """The same with scales in tiles, as the GEMMs get them."""
    return NVFP4Tensor(t.codes, swizzle_scales(t.scales), t.tensor_scale)


def _lines(size: int, included: int) -> torch.Tensor:
    """Rows (or columns) of a product to look at: all of a small one, some of each tile of a large one."""
    first = torch.arange(0, size, SAMPLED_TILE)
    if size <= 512:
        return torch.arange(size)
    some = first[:, None] + torch.randint(0, SAMPLED_TILE, (len(first), SAMPLED_LINES))
    return torch.cat((some.flatten().clamp(max=size - 1), torch.tensor([included, size - 1]))).unique()


def problem_of_shape(
    device: torch.device, function: Multiply, shape: tuple[int, int, int], dtypes: Sequence[torch.dtype] = OUTPUT_DTYPES
) -> str | None:
    """The first failure of a GEMM on operands of this shape (M, N, K), or None.

    The block scales of one product are usual, those of another zero and subnormal. LAUNCHES of a product must have the
    same bits: a missing fence in a compiler shows in some launches alone. torch's generators keep their states.
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
                except Exception as error:  # whatever a library or a compiler raises: another implementation is tried
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
    """The first failure of function(a, a_scale, b, b_scale, dtype), a product of E4M3 numbers with one scale each, or
    None. FP8 units keep fewer bits of a sum: the bound is PROBE_ERROR, for numbers of both signs."""
    with _own_random_numbers(device):
        for m, n, k in PROBE_SHAPES.values():
            a, b = (torch.randn(rows, k, device=device).to(torch.float8_e4m3fn) for rows in (m, n))
            scales = [torch.rand((), device=device) + 0.5 for _ in range(2)]
            want = (a.double() @ b.double().T * scales[0] * scales[1]).cpu()
            for dtype in OUTPUT_DTYPES:
                try:
                    results = [function(a, scales[0], b, scales[1], dtype) for _ in range(LAUNCHES)]
                except Exception as error:  # whatever a library raises
                    lines = str(error).splitlines() or [type(error).__name__]
                    return f"raises {lines[0][:200]}"
                error = relative_square_error(results[0].cpu(), want)
                if not error < PROBE_ERROR:
                    return f"has a relative square error of {error:.1e} on {m} x {n} x {k}"
                if any(not torch.equal(result, results[0]) for result in results):
                    return f"has other bits in some of {LAUNCHES} launches"
    return None


def keeps_nan(device: torch.device, function: Multiply, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
    """Whether a NaN block scale makes NaN of its row of the product, and of nothing else."""
    m, n, k = shape
    with _own_random_numbers(device):
        a, b = random_operand(device, m, k), random_operand(device, n, k)
        a.scales.view(torch.uint8)[m // 2, 1] = 127
        bad = function(tiled(a), tiled(b), dtype).isnan().cpu()
    return bool(bad[m // 2].all()) and int(bad.sum()) == n


@contextlib.contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """Inside, torch's generators begin with one seed; afterwards they go on as before."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(4)
        yield


def _rows_of(t: NVFP4Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Float32 (len(rows), K) on the CPU."""
    scales = t.scales.view(torch.uint8)[rows].view(t.scales.dtype)
    return NVFP4Tensor(t.codes[rows], scales, t.tensor_scale).dequantize().cpu()


COMPUTE_MODE = 20  # of CUdevice_attribute
COMPUTE_MODES = {0: "DEFAULT", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}  # CUcomputemode
EXCLUSIVE = (
    "the GPU is in compute mode EXCLUSIVE_PROCESS, in which no child process can try an FP4 GEMM; "
    "set it to DEFAULT (nvidia-smi -c 0)"
)


@functools.cache
def driver() -> ctypes.CDLL | None:
    """The CUDA driver's library, or None."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None


def compute_mode() -> str:
    """The compute mode of torch's current GPU, of COMPUTE_MODES; "" without a GPU or where the driver does not say."""
    if driver() is None or not torch.cuda.is_available():
        return ""
    device, mode = ctypes.c_int(), ctypes.c_int()
    failed = driver().cuInit(0) or driver().cuDeviceGet(ctypes.byref(device), torch.cuda.current_device())
    failed = failed or driver().cuDeviceGetAttribute(ctypes.byref(mode), COMPUTE_MODE, device)
    return "" if failed else COMPUTE_MODES.get(mode.value, "")


def in_child(module: str, call: str, timeout: float = 600) -> tuple[list, str]:
    """([each result of `call`], "") from a new process; where that process dies, the results until then, and how.

    call: an iterable of results of the module's functions, as Python code. Results are JSON.
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
