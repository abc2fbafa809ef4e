"""Tests products of libraries on operands whose product is known, before one of them is trusted.

Libraries for FP4 tensor cores have returned zeros without an error, some of them only on some shapes. The operands have
random codes and random block scales, and the reference is computed on the CPU from the decoded operands.

    python -m nanochat_fp4.nvfp4.probe JOB      tests the products of a job, JSON, and prints a line for each

dispatch.py starts this program once in a process (`examine`), for two reasons. After a library has read an illegal
address, every later CUDA call of its process fails. A library that crashes ends its process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from nanochat_fp4.nvfp4.format import NVFP4Tensor, swizzle_scales

Shape = tuple[int, int, int]
# M, N and K without a model: several whole tiles, tiles that need padding in N and K, and padding in all dimensions.
SHAPES: tuple[Shape, ...] = ((512, 384, 1024), (192, 320, 192), (144, 160, 96))
# The largest relative square error that passes. Rounding to BF16 causes 3e-6 for any order of summation, FP8 units keep
# fewer bits of a sum, and wrong scales cause about 1.
LIMIT = 1e-4
LAUNCHES = 20  # A race that a compiler has caused shows only in some launches. All results must have the same bits.
SAMPLED_TILE, SAMPLED_LINES = 128, 4  # In a large product, 4 rows and 4 columns of each tile of 128 are compared.
SECONDS = 300.0  # The longest time that the child process may take.


def relative_square_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns |got - want|^2 / |want|^2. The sums are computed in FP64."""
    return float((got - want).double().square().sum() / want.double().square().sum())


def fp4_operand(device: torch.device, rows: int, k: int, lowest: int = 8, highest: int = 127) -> NVFP4Tensor:
    """Returns an operand (rows, K) with random codes, and random scales in tiles. The bytes of the E4M3 scales are from
    lowest to highest - 1.

    The bytes 8 to 126 are the normal numbers from 2^-6 to 448, so that the scales of a tile differ and a wrong order
    is noticed. The bytes below 8 are zero and the subnormal numbers.
    """
    codes = torch.randint(0, 256, (rows, k // 2), device=device, dtype=torch.uint8)
    scales = torch.randint(lowest, highest, (rows, k // 16), device=device, dtype=torch.uint8)
    scale = torch.rand((), device=device) + 0.5
    return NVFP4Tensor(codes, swizzle_scales(scales.view(torch.float8_e4m3fn)), scale)


def fp8_operand(device: torch.device, rows: int, k: int, dtype: torch.dtype) -> NVFP4Tensor:
    codes = torch.randn(rows, k, device=device).to(dtype)
    return NVFP4Tensor(codes, codes.new_empty(rows, 0), torch.rand((), device=device) + 0.5)


def problem_of(name: str, device: torch.device, shapes: Sequence[Shape]) -> str | None:
    """Returns the first fault of a product on these shapes, as text, or None. The name is a key of cublas.FP4, or
    "mxfp8 DTYPE DTYPE" with the dtypes of its two operands. torch's random generators keep their states."""
    from nvfp4_kernels import cublas

    dtypes = [getattr(torch, dtype) for dtype in name.split()[1:]]

    def product(a: NVFP4Tensor, b: NVFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtypes:
            return cublas.mxfp8(a.codes, a.tensor_scale, b.codes, b.tensor_scale, dtype)
        return cublas.FP4[name](a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, dtype)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(4)
        for m, n, k in shapes:
            if n % 16 or k % 32:  # Such a product is emulated.
                continue
            if dtypes:
                pairs = [[fp8_operand(device, rows, k, dtype) for rows, dtype in zip((m, n), dtypes)]]
            else:
                scales = (8, 127), (0, 8)  # normal ones, then zero and subnormal ones
                pairs = [[fp4_operand(device, m, k, *bounds), fp4_operand(device, n, k)] for bounds in scales]
            for pair in pairs:
                if problem := _problem_of_pair(product, *pair):
                    return f"{problem} on {m} x {n} x {k}"
    return None


def _problem_of_pair(product: Callable[..., torch.Tensor], a: NVFP4Tensor, b: NVFP4Tensor) -> str | None:
    rows, columns = (_lines(t.shape[0]).to(t.codes.device) for t in (a, b))
    want = a.dequantize()[rows].cpu() @ b.dequantize()[columns].cpu().T
    for dtype in (torch.bfloat16, torch.float32):
        try:
            first = product(a, b, dtype)
            same = all(torch.equal(product(a, b, dtype), first) for _ in range(LAUNCHES - 1))
            got = first[rows][:, columns].float().cpu()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Libraries may raise anything. Another one is tried then.
            return f"raises {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
        if not got.any():
            return "returns zeros"
        error = relative_square_error(got, want)
        if not error < LIMIT:  # NaN included
            return f"has a relative square error of {error:.1e}, expected below {LIMIT:.0e},"
        if not same:
            return f"has other bits in some of {LAUNCHES} launches"
    return None


def _lines(size: int) -> torch.Tensor:
    """The numbers of the rows, or columns, of a product to compare: all of a small one, some of each tile of a large
    one."""
    if size <= 512:
        return torch.arange(size)
    first = torch.arange(0, size, SAMPLED_TILE)
    some = first[:, None] + torch.randint(0, SAMPLED_TILE, (len(first), SAMPLED_LINES))
    return torch.cat((some.flatten().clamp(max=size - 1), torch.tensor([size - 1]))).unique()


# ----------------------------------------------------------------------------------------------------------------------
# The child process


def results(names: Sequence[str], device: torch.device, shapes: Sequence[Shape]) -> Iterator[tuple[str, str | None]]:
    """Yields the name and the problem of each product. Of the FP4 libraries, those after the first right one are left
    out."""
    right = False
    for name in names:
        is_fp4 = not name.startswith("mxfp8")
        if not (is_fp4 and right):
            problem = problem_of(name, device, shapes)
            right = right or (is_fp4 and problem is None)
            yield name, problem


def examine(names: Sequence[str], device: torch.device, shapes: Sequence[Shape]) -> tuple[dict[str, str | None], str]:
    """Returns the problem of each product that was tested, and a note about the test, or "".

    A child process tests products of a GPU. If it cannot start, this process does. A product that ends the child has
    this as its problem, and those after it are not tested.
    """
    if device.type != "cuda":
        return dict(results(names, device, shapes)), ""
    job = json.dumps({"names": list(names), "device": str(device), "shapes": list(shapes)})
    lines, problem = run_child([sys.executable, "-m", "nanochat_fp4.nvfp4.probe", job])
    if not lines or "OutOfMemory" in problem:
        note = f"tested in this process, because a child process cannot use the GPU: it {problem}"
        return dict(results(names, device, shapes)), note
    found = dict(json.loads(line) for line in lines[1:])
    untested = [name for name in names if name not in found]
    return found | ({untested[0]: problem} if problem and untested else {}), ""


def run_child(command: list[str]) -> tuple[list[str], str]:
    """Returns the lines that a child process has printed, and how it failed, or ""."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
        out, status = child.stdout, child.returncode
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        problem = f"ended its process with status {status} ({last[:200]})" if status else ""
    except subprocess.TimeoutExpired as expired:
        out = expired.stdout or b""
        out, problem = out if isinstance(out, str) else out.decode(), f"had no result after {SECONDS:.0f} s"
    return [line for line in out.splitlines() if line.startswith("[")], problem


def main() -> None:
    """Prints [] once the GPU can be used, and [name, problem] of each product."""
    job = json.loads(sys.argv[1])
    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.zeros((), device=device)
    print([], flush=True)
    for result in results(job["names"], device, job["shapes"]):
        print(json.dumps(result), flush=True)
        if device.type == "cuda":
            torch.cuda.synchronize()  # Raises after an illegal address, for all later products would seem to fail.


if __name__ == "__main__":
    main()
