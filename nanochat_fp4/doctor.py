"""Checks whether this machine computes what the paper says, and with which kernels.

    python -m nanochat_fp4.doctor

FP4 software has failed silently before: a GEMM library returned zeros on one GPU, and a recipe's gradients were all
zero for three releases. The doctor therefore compares with the PyTorch reference on the CPU, which shares no code with
the kernels and the GEMM of a GPU.

- methods: these are the checks that a training run makes at its start (self_check.py). The kernels' operands of a
  training step are compared with the reference's. Without a rotation all values must be equal. With a rotation at
  least 99.6% of them must be equal, because the tensor cores add 128 terms in their own order, so that a value next to
  a rounding boundary may tip. On a GPU each rotating kernel runs 200 times at the size of a training step, and must
  give the same bits each time. A QuantLinear, forward and backward, is compared with products of the reference's
  quantized operands.
- attention: each available backend computes forward and gradients, with a window and without.

A problem ends in exit status 2 and one line on stderr.
"""

import contextlib
import itertools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, one_line, run_main
from nanochat_fp4.common import add_recipes_argument, autodetect_device_type, resolve_method, set_cpu_threads
from nanochat_fp4.hardware import about_versions, environment_info, usable_cpus
from nanochat_fp4.models import flash_attention
from nanochat_fp4.nvfp4.methods import METHODS, get_recipe
from nanochat_fp4.nvfp4.probe import relative_square_error
from nanochat_fp4.self_check import problems

LAYER, LAYER_INTERPRETED = (1000, 96, 528), (40, 48, 144)  # tokens, in_features and out_features
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


def method_problem(device: torch.device, method: str) -> str | None:
    """Returns the first problem of a method's kernels and layers, or None."""
    on_gpu = device.type == "cuda"
    layer, launches = (LAYER, REPEATS) if on_gpu else (LAYER_INTERPRETED, 0)
    return next(filter(None, problems(device, get_recipe(method), layer, launches, every=True)), None)


def examine(
    device: torch.device, methods: tuple[str, ...], say: Callable[[str], None] = print, processes: int = 0
) -> list[str]:
    """Makes every check, and says one line about each through `say`. Returns the problems.

    `processes` is the number of processes that check methods at once, or 0 to check in this process. Nearly all of the
    time is spent in compiling kernels, some 80 of them for nf.METHODS. Raises UserError if one of the processes dies.
    """
    found = []

    def report(name: str, problem: str | None) -> None:
        say(f"  {'FAIL' if problem else 'ok':4s}  {problem or name}")
        found.extend([problem] if problem else [])

    say("methods: the kernels of a step, and layers forward and backward, against the PyTorch reference")
    with contextlib.ExitStack() as stack:
        each = map
        if processes:
            context = multiprocessing.get_context("spawn")  # A process that has used CUDA cannot be forked.
            pool = ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,))
            each = stack.enter_context(pool).map
        try:
            for method, problem in zip(methods, each(method_problem, itertools.repeat(device), methods)):
                report(method, problem)
        except BrokenProcessPool as e:
            raise UserError("a process that checked a method died; check them one by one: --method NAME") from e
    say("attention, forward and backward, against softmax(q k^T) v in FP32")
    for backend in (b for b in flash_attention.BACKENDS if b != "flex" and flash_attention.available(b)):
        report(backend, attention_problem(device, backend))
    return found


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
    print(f"backend    {nf.backend()}")
    processes = min(MOST_PROCESSES, usable_cpus()) if device.type == "cuda" and len(methods) > 1 else 0
    if found := examine(device, methods, processes=processes):
        and_others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"this machine computes wrong results: {found[0]}{and_others}; try NVFP4_KERNELS=reference")
    print("everything agrees")


if __name__ == "__main__":
    run_main(main)
