"""Checks whether this machine computes what the paper says, with which kernels, and how fast.

    python -m nanochat_fp4.doctor

FP4 software has failed silently before: a GEMM library returned zeros on one GPU, and a recipe's gradients were all
zero for three releases. The doctor therefore compares with the PyTorch reference on the CPU, which shares no code with
the kernels and the GEMM of a GPU.

- layers: QuantLinear of every method, forward and backward, is compared with products of the reference's quantized
  operands.
- kernels: the operands of a training step are compared. Without a rotation all values must be equal. With a rotation
  at least 99.6% of them must be equal, because the tensor cores add 128 terms in their own order, so that a value
  next to a rounding boundary may tip.
- repeats: on a GPU, each rotating kernel runs 200 times at the size of a training step, and must give the same bits
  each time.
- attention: each available backend computes forward and gradients, with a window and without.
- speed: on a GPU, the bandwidths of copy and quantization and the speed of the BF16 GEMM are measured.

A problem ends in exit status 2 and one line on stderr. The checks of layers, kernels and repeats are those of
self_check.py, which a training run makes for its own method at its start.
"""

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, one_line, run_main
from nanochat_fp4.common import add_recipes_argument, autodetect_device_type, resolve_method, set_cpu_threads
from nanochat_fp4.hardware import about_versions, environment_info, usable_cpus
from nanochat_fp4.models import flash_attention
from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.format import BYTES
from nanochat_fp4.nvfp4.gemm import Quantization, quantize_operand
from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.methods import METHODS, get_recipe
from nanochat_fp4.nvfp4.probe import relative_square_error
from nanochat_fp4.nvfp4.roundings import ROUNDINGS
from nanochat_fp4.self_check import REPEATED, kernel_problem, kernels_of, layer_problem, repeat_problem

SHAPE, SHAPE_INTERPRETED = (1000, 528), (40, 144)  # of the tensors that the kernels quantize
COPIED, GEMM_SIZE = 1 << 30, 8192  # the bytes of a copy, which is too large for caches, and the size of a BF16 product
REPEATS = 200  # The number of launches of each rotating kernel.
ATTENTION = (2, 256, 4, 2, 64)  # The numbers of rows, tokens, heads and key heads, and the head dimension.
ATTENTION_ERROR = 1e-3  # BF16 products and sums give 1e-5.
# The number of processes that compile and check at once. Each of them takes some 500 MB of a GPU's memory.
MOST_PROCESSES = 8


def attention_problem(device: torch.device, backend: str) -> str | None:
    """Returns a description of a wrong output or gradient of an attention backend in BF16 (FP32 on a CPU), or None."""
    rows, length, heads, kv_heads, dim = ATTENTION
    generator = torch.Generator().manual_seed(5)
    sizes = (heads, kv_heads, kv_heads, heads)
    values = [torch.randn(rows, length, h, dim, generator=generator).bfloat16().float() for h in sizes]
    position = torch.arange(length)
    for left in (-1, length // 4):
        distance = position.unsqueeze(1) - position
        hidden = (distance < 0) | (distance > (left if left >= 0 else length))
        with torch.enable_grad():
            q, k, v = (t.clone().requires_grad_() for t in values[:3])
            keys, vectors = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
            scores = torch.einsum("bqhd,bkhd->bhqk", q, keys) * dim**-0.5
            want = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), vectors)
            expected = [want, *torch.autograd.grad(want, (q, k, v), values[3])]
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            *leaves, grad = (t.to(device, dtype).requires_grad_() for t in values)
            try:
                with flash_attention.use(backend):
                    out = flash_attention.flash_attn_func(*leaves, left)
                    results = [out, *torch.autograd.grad(out, leaves, grad)]
            except Exception as error:
                return f"attention, {backend}: {one_line(error)[:200]}"
        for name, got, expectation in zip(("output", "grad of q", "grad of k", "grad of v"), results, expected):
            error = relative_square_error(got.detach().float().cpu(), expectation.detach())
            if not error < ATTENTION_ERROR:
                window = f"a window of {left + 1}" if left >= 0 else "no window"
                return f"attention, {backend}, {window}: {name} has a relative square error of {error:.1e}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Speed


def median_ms(function: Callable[[], object]) -> float:
    """Measures the median GPU time of a call in milliseconds, with a cold cache."""
    from triton.testing import do_bench

    return do_bench(function, return_mode="median")


def quantize_bandwidth(device: torch.device, rows: int = 16384, columns: int = 8192) -> float:
    """Measures the GB/s of quantizing with 4/6. BF16 values are read twice (amax, then quantization), and codes,
    scales and decoded values are written."""
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    how = Quantization(ROUNDINGS["four_over_six"])
    decoded = quantize_operand(x, how, keep_codes=True).decoded  # This is None on FP4 tensor cores.
    num_bytes = x.numel() * (2 + 2 + BYTES + (0 if decoded is None else decoded.element_size()))
    return num_bytes / median_ms(lambda: quantize_operand(x, how, keep_codes=True)) / 1e6


# ----------------------------------------------------------------------------------------------------------------------


def examine(
    device: torch.device, methods: tuple[str, ...], say: Callable[[str], None] = print, processes: int = 0
) -> list[str]:
    """Makes every check, and says one line about each through `say`. Returns the problems.

    `processes` is the number of processes that check at once, or 0 to check in this process. Nearly all of the time is
    spent in compiling kernels, some 80 of them for nf.METHODS.
    """
    problems = []

    def report(name: str, check: Callable[[], str | None]) -> None:
        try:
            problem = check()
        except BrokenProcessPool:
            problem = f"{name}: the process that checked it died"
        say(f"  {'FAIL' if problem else 'ok':4s}  {problem or name}")
        if problem:
            problems.append(problem)

    kernels = kernels_of(map(get_recipe, methods)) if use_kernels(device) else []
    shape = SHAPE if device.type == "cuda" else SHAPE_INTERPRETED
    with _checks(processes) as start:
        layers = {method: start(layer_problem, device, method) for method in methods}
        started = {
            f"{rounding.name}{f' after an RHT of {rht_dim}' if rht_dim else ''}": start(
                kernel_problem, device, rounding, rht_dim, shape
            )
            for rounding, rht_dim in kernels
        }
        say("layers, forward and backward, against products of the reference's operands")
        for name, check in layers.items():
            report(name, check)
        compared = f"{shape[0]} x {shape[1]}" if kernels else "nothing to compare, this machine quantizes with it"
        say(f"kernels against the reference: {compared}")
        for name, check in started.items():
            report(name, check)
    say("attention, forward and backward, against softmax(q k^T) v in FP32")
    backends = [b for b in flash_attention.BACKENDS if b != "flex" and flash_attention.available(b)]
    for backend in backends:
        report(backend, functools.partial(attention_problem, device, backend))
    if device.type == "cuda":
        for rounding in dict.fromkeys(rounding for rounding, rht_dim in kernels if rht_dim == RHT_DIM):
            name = f"{rounding.name}: the same bits in {REPEATS} launches, {REPEATED[0]} x {REPEATED[1]}"
            report(name, functools.partial(repeat_problem, device, rounding, REPEATED, REPEATS))
        source = torch.empty(COPIED, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copy, quantize = 2 * COPIED / median_ms(lambda: target.copy_(source)) / 1e6, quantize_bandwidth(device)
        # Zeros would take less power and be faster.
        a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
        tflops = 2 * GEMM_SIZE**3 / median_ms(lambda: a @ b.T) / 1e9
        say("speed")
        say(f"        copy      {copy:6.0f} GB/s")
        say(f"        quantize  {quantize:6.0f} GB/s, {quantize / copy:.0%} of copy (4/6: amax, codes, scales)")
        say(f"        BF16 GEMM {tflops:6.0f} TFLOP/s")
    return problems


@contextlib.contextmanager
def _checks(processes: int) -> Iterator[Callable[..., Callable]]:
    """Yields start(function, *arguments), which returns a function without arguments that waits for the function's
    result."""
    if not processes:
        yield functools.partial
        return
    context = multiprocessing.get_context("spawn")  # A process that has used CUDA cannot be forked.
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        yield lambda *job: pool.submit(*job).result


def operations(device: torch.device) -> list[str]:
    """Returns one line for each operation, with its backend and the reason for it."""
    backend = nf.backend()
    lines = [f"{name:10s} {backend.quantize}" for name in ("quantize", "rotate", "requantize")]
    decode = "Triton" if use_kernels(device) and device.type == "cuda" else "PyTorch"
    return [*lines, f"{'decode':10s} {decode}", f"{'GEMM':10s} {backend.gemm}", f"{'because':10s} {backend.reason}"]


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add_recipes_argument(parser)
    parser.add_argument("--method", default="", help="check this method only (default: those of nf.METHODS)")
    args = parser.parse_args(argv)
    methods = (resolve_method(args.method),) if args.method else tuple(METHODS)
    device = torch.device(autodetect_device_type())
    if device.type == "mps":
        device = torch.device("cpu")
    set_cpu_threads(device, 1)  # The tensors of the checks are small.
    environment = environment_info()
    versions = ", ".join(f"{name} {environment[name] or 'none'}" for name in ("python", "torch", "cuda", "triton"))
    print(f"nanochat_fp4 doctor: {versions}")
    print(f"device     {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    if pair := about_versions(environment):
        print(f"versions   {pair}")
    print("\n".join(operations(device)))
    processes = min(MOST_PROCESSES, usable_cpus()) if device.type == "cuda" and len(methods) > 1 else 0
    problems = examine(device, methods, processes=processes)
    if problems:
        and_others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"this machine computes wrong results: {problems[0]}{and_others}; try NVFP4_KERNELS=reference")
    print("everything agrees")


if __name__ == "__main__":
    run_main(main)
