"""`python -m nanochat_fp4.doctor`: does this machine compute what the paper says, with which kernels, and how fast?

FP4 software has failed silently before: a GEMM library returned zeros on one GPU, and a recipe's gradients were all
zero for three releases. The doctor therefore compares with the PyTorch reference on the CPU. The reference shares no
code with the kernels and the GEMM of a GPU.

* layers     QuantLinear of every method, forward and backward, against products of the reference's quantized operands.
* kernels    Quantization on random shapes. Without a rotation all bits must be equal, with one at least 99.9% of the
             values. The tensor cores add 128 terms in their own order, so a value next to a rounding boundary may tip.
* repeats    Each rotating kernel 200 times at a training step's size, on a GPU: the same bits each time.
* attention  Forward and gradients, with a window and without, of each backend that is there.
* speed      Copy and quantization bandwidth and the BF16 GEMM, on a GPU.

A problem ends in exit status 2 and one line on stderr. A training run calls `self_check`, a short
check, at its start.
"""

import contextlib
import functools
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import autodetect_device_type, get_base_dir, set_cpu_threads
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.devices import median_ms
from nanochat_fp4.errors import UserError, one_line, run_main
from nanochat_fp4.hardware import usable_cpus
from nanochat_fp4.models import flash_attention
from nanochat_fp4.nvfp4.dispatch import has_fp8_tensor_cores, use_kernels, uses_mxfp8
from nanochat_fp4.nvfp4.format import BLOCK, BYTES
from nanochat_fp4.nvfp4.gemm import GemmOperand
from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.methods import METHODS, get_recipe
from nanochat_fp4.nvfp4.operands import Codes, Quantization, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.probe import EXCLUSIVE, compute_mode, relative_square_error
from nanochat_fp4.nvfp4.quantizers import ROUNDINGS, Rounding, quantize_reference
from nanochat_fp4.nvfp4.recipes import Operand, Recipe

# Tokens, in_features and out_features. None is a multiple of 128, so that padding is part of the check.
LAYER = (144, 96, 160)
# The same where all layers of a model are multiples of 128, so that training compiles no other kernels.
ALIGNED_LAYER = (256, 128, 384)
SHAPES = ((1000, 528), (144, 160), (2048, 2048))
SHAPES_INTERPRETED = ((40, 144),)
TIPPED = 1e-3  # The largest share of codes, and of scales, that may differ after a rotation; four in a small tensor.
LAUNCHES = 20  # at the start of a run
REPEATS, REPEATED = 200, (8192, 5120)  # times, and the tokens and features of d20's widest grad_output
ATTENTION = (2, 256, 4, 2, 64)  # rows, tokens, heads, key heads, head dimension
ATTENTION_ERROR = 1e-3  # BF16 products and sums give 1e-5.
# SUM_ERROR and ROUNDING_ERROR are relative square errors |got - want|^2 / |want|^2.
SUM_ERROR = 1e-4  # One rounding to BF16 and another order of summation give 3e-6.
ROUNDING_ERROR = 0.1  # Two stochastically rounded operands of a gradient give up to 0.05.
MOST_PROCESSES = 8  # Processes that compile and check at once. Each takes some 500 MB of a GPU's memory.
MOST_METHODS = 12  # With more methods the kernels are checked on several shapes.


def self_check(
    device: torch.device | str, method: str | Recipe = "clover", model: torch.nn.Module | None = None
) -> str:
    """Checks the chosen backend once, forward and backward, on a known answer. Returns one line for the log.

    model: converted; the check then compiles the kernels that this model needs and no others.
    Takes a few milliseconds once the kernels are compiled, and leaves torch's generators as they were. On sm_10x the
    rotating kernels run LAUNCHES times: Triton before 3.7.1 may miss a fence there (triton#10590).
    Raises UserError with one line that says what is wrong.
    """
    device = torch.device(device)
    recipe = get_recipe(method)
    layer = LAYER if model is None else layer_like(model)
    problem = None
    if recipe.quantizes and use_kernels(device):
        for rounding in dict.fromkeys(rounding for rounding, _ in _kernels([recipe])):
            problem = problem or (
                training_problem(device, rounding, layer[::2])
                if rounding.ms_eden
                else kernel_problem(device, rounding, 0, layer[::2])
            )
        for rounding, rht_dim in _kernels([recipe]):
            if rht_dim and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10:
                problem = problem or repeat_problem(device, rounding, REPEATED, LAUNCHES, rht_dim)
    problem = problem or layer_problem(device, recipe, layer)
    if problem:
        raise UserError(
            f"self-check failed on {device}: {problem}; training would be wrong. See `python -m nanochat_fp4.doctor`, "
            "or set NVFP4_KERNELS=reference"
        )
    said = f"self-check passed: {recipe.name} forward and backward as the reference, on {device}"
    operands = [o for part in recipe.parts for o in (part.output.a, part.output.b)]
    if any(o.rounding and o.rounding.fp8 == "tensor" for o in operands):
        native = has_fp8_tensor_cores(device.type)
        how = "MXFP8 with block scales of 1" if native and uses_mxfp8(device.type) else "FP8 tensor cores"
        said += f"; FP8 products: {how if native else 'decoded, which is exact and no faster than BF16'}"
    return said


# ----------------------------------------------------------------------------------------------------------------------
# A layer


def layer_like(model: torch.nn.Module) -> tuple[int, int, int]:
    """Tokens, in_features and out_features of a small layer that runs the same kernels as the model's layers."""
    sizes = [n for m in model.modules() if isinstance(m, nf.QuantLinear) for n in (m.in_features, m.out_features)]
    return LAYER if any(n % 128 for n in sizes) else ALIGNED_LAYER


def layer_problem(device: torch.device, method: str | Recipe, layer: tuple[int, int, int] | None = None) -> str | None:
    """Names the problem of a layer of this method, or None. BF16 activations and FP32 weights, as in training.

    layer: tokens, in_features and out_features, or None for LAYER

    A method that treats kinds of layers differently is checked on a layer of each kind.
    """
    problems = (_problem_of_part(device, part, layer or LAYER) for part in get_recipe(method).parts)
    return next(filter(None, problems), None)


def _problem_of_part(device: torch.device, recipe: Recipe, shape: tuple[int, int, int]) -> str | None:
    tokens, in_features, out_features = shape
    generator = torch.Generator().manual_seed(1234)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float()

    x, w, e = normal(tokens, in_features), normal(out_features, in_features), normal(tokens, out_features)
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(1234)
            layer = nf.QuantLinear(in_features, out_features, method=recipe, device=device)
            layer.weight.data.copy_(w)
            leaf = x.to(device, torch.bfloat16).requires_grad_()
            output = layer(leaf)
            gradients = torch.autograd.grad(output, (leaf, layer.weight), e.to(device, torch.bfloat16))
    except Exception as error:  # a kernel that does not compile or launch
        return f"{recipe.name}: {one_line(error)[:200]}"

    def used(t: torch.Tensor, operand: Operand) -> list[torch.Tensor]:
        """The terms that stand for t in the output GEMM; t itself where they are drawn."""
        if recipe.output.random:
            return [t]
        return [term.dequantize() for term in operand_of(t, operand).terms]

    def operand_of(t: torch.Tensor, operand: Operand) -> GemmOperand:
        return quantize_operand(t, Quantization(operand.rounding, terms=operand.terms, kept=operand.kept))

    def for_backward(t: torch.Tensor, operand: Operand) -> torch.Tensor:
        """What the backward pass takes for t: codes of its own, where the recipe keeps them, else the terms' sum."""
        return operand_of(t, operand).for_backward().dequantize() if operand.kept else sum(used(t, operand))

    x_terms, w_terms = used(x, recipe.output.a), used(w, recipe.output.b)
    output_of_terms = sum(a @ b.T for i, a in enumerate(x_terms) for j, b in enumerate(w_terms) if i + j < 2)
    grad_input = e @ (w if recipe.grad_input.b.raw else for_backward(w, recipe.output.b))
    grad_weight = e.T @ (x if recipe.grad_weight.b.raw else for_backward(x, recipe.output.a))
    for name, got, want, gemm in (
        ("output", output.detach(), output_of_terms, recipe.output if recipe.output.random else None),
        ("grad_input", gradients[0], grad_input, recipe.grad_input),
        ("grad_weight", gradients[1], grad_weight, recipe.grad_weight),
    ):
        rounded = gemm is not None and (gemm.a.rounding or gemm.b.rounding)
        limit = ROUNDING_ERROR if rounded else SUM_ERROR
        got = got.float().cpu()
        if not torch.isfinite(got).all():
            return f"{recipe.name}: {name} has values that are not finite"
        if not got.any():
            return f"{recipe.name}: {name} is all zeros"
        error = relative_square_error(got, want)
        if not error < limit:
            return f"{recipe.name}: {name} has a relative square error of {error:.1e}, expected below {limit:.0e}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Kernels


def _kernels(recipes: Iterable[Recipe]) -> list[tuple[Rounding, int]]:
    """The kernels' roundings for these methods, each with the group size of its rotation, sorted by name."""
    gemms = [g for r in recipes for p in (*r.parts, *r.final.parts) for g in (p.output, p.grad_input, p.grad_weight)]
    found = {(o.rounding, g.rht_dim) for g in gemms for o in (g.a, g.b) if o.rounding and o.rounding.has_kernels}
    found |= {(o.kept, 0) for g in gemms for o in (g.a, g.b) if o.kept}
    return sorted(found, key=lambda pair: (pair[0].name, pair[1]))


def kernel_problem(device: torch.device, rounding: Rounding, rht_dim: int, shape: tuple[int, int]) -> str | None:
    """Names a wrong result for a random tensor, in its codes or in the GEMM's operand, or None. Needs use_kernels."""
    x = _uneven(shape)
    random = {"stream": 3, "rht_dim": rht_dim, "rht_stream": 2}
    where = f"{rounding.name}{f' after an RHT of {rht_dim}' if rht_dim else ''}, {shape[0]} x {shape[1]}"
    for transpose in (False, True) if rht_dim else (False,):
        padded = x.T if transpose else x
        padded = torch.nn.functional.pad(padded.float(), (0, -padded.shape[1] % (rht_dim or 16)))
        want = quantize_reference(padded, rounding, seed=7, rht_seed=8, **random)
        try:
            seeds = {"seed": torch.tensor(7, device=device), "rht_seed": torch.tensor(8, device=device)}
            how = Quantization(rounding, **(seeds if rounding.random or rht_dim else {}), **random)
            codes, operand = (
                quantize_operand(x.to(device), how, transpose=transpose, keep_codes=keep) for keep in (True, False)
            )
        except Exception as error:
            return f"{where}: {one_line(error)[:200]}"
        if rht_dim == 0 and codes.tensor_scale.cpu() != want.tensor_scale:
            return f"{where}: tensor_scale is {float(codes.tensor_scale):.6e}, expected {float(want.tensor_scale):.6e}"
        for name, got, expected in (("codes", codes.codes, want.codes), ("scales", codes.scales, want.scales)):
            wrong = int((got.cpu().view(torch.uint8) != expected.view(torch.uint8)).sum())
            if wrong > (max(4, TIPPED * got.numel()) if rht_dim else 0):
                return f"{where}: {wrong} of {got.numel()} {name} differ from the reference"
        if (codes.without_cache().dequantize() != operand.dequantize()).any():
            return f"{where}: the operand that the GEMM reads is not the value of the codes"
    return None


def training_problem(device: torch.device, rounding: Rounding, shape: tuple[int, int]) -> str | None:
    """Like kernel_problem after a rotation, with exactly the launches of a training step.

    The launches make both operands of a grad_output at once, and one operand of codes. Training needs every kernel that
    is compiled here, and no other.
    """
    x = _uneven(shape)
    random = {"stream": 3, "rht_dim": RHT_DIM, "rht_stream": 2}
    t = quantize_reference(x.float(), ROUNDINGS["four_over_six"])
    try:
        seeds = {"seed": torch.tensor(7, device=device), "rht_seed": torch.tensor(8, device=device)}
        how = Quantization(rounding, **seeds, **random)
        row, col = quantize_grad_output(x.to(device), how, how)
        codes = Codes(*(part.to(device) for part in (t.codes, t.scales, t.tensor_scale)))
        again = quantize_operand(codes, how, transpose=True)
    except Exception as error:
        return f"{rounding.name} after an RHT of {RHT_DIM}: {one_line(error)[:200]}"
    for name, operand, source in (
        ("grad_output", row, x.float()),
        ("transposed grad_output", col, x.float().T),
        ("transposed codes", again, t.dequantize().T),
    ):
        padded = torch.nn.functional.pad(source, (0, -source.shape[1] % RHT_DIM))
        want = quantize_reference(padded, rounding, seed=7, rht_seed=8, **random).dequantize()
        wrong = int((operand.dequantize().cpu() != want).sum())
        if wrong > max(4 * BLOCK, 4 * TIPPED * want.numel()):  # one tipped scale changes its whole block
            of = f"{wrong} of {want.numel()} values of a {name}, {shape[0]} x {shape[1]}"
            return f"{rounding.name} after an RHT of {RHT_DIM}: {of}, differ from the reference"
    return None


def repeat_problem(
    device: torch.device, rounding: Rounding, shape: tuple[int, int], times: int, rht_dim: int = RHT_DIM
) -> str | None:
    """Names an operand of a backward pass whose bits differ between launches with the same random numbers, or None.

    A missing fence in a compiler shows in some launches of a full GPU alone (triton#10590 on sm_100).
    """
    x = _uneven(shape).to(device)
    seeds = {"seed": torch.tensor(7, device=device), "rht_seed": torch.tensor(8, device=device)}
    how = Quantization(rounding, **seeds, stream=3, rht_dim=rht_dim, rht_stream=2)
    codes = quantize_operand(x, Quantization(ROUNDINGS["four_over_six"]), keep_codes=True).without_cache()
    first: list[torch.Tensor] = []
    for i in range(times):
        made = [*quantize_grad_output(x, how, how), quantize_operand(codes, how, transpose=True)]
        tensors = [t for operand in made for t in vars(operand).values() if isinstance(t, torch.Tensor)]
        bits = [t.reshape(-1).view(torch.uint8) for t in tensors]
        first = first or bits
        if not all(map(torch.equal, first, bits)):
            return f"{rounding.name}, {shape[0]} x {shape[1]}: launch {i + 1} has other bits than the first"
    return None


def attention_problem(device: torch.device, backend: str) -> str | None:
    """Names a wrong output or gradient of an attention backend in BF16 (FP32 on a CPU), or None."""
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
                    out = flash_attention.flash_attn_func(*leaves, window_size=(left, 0))
                    found = [out, *torch.autograd.grad(out, leaves, grad)]
            except Exception as error:
                return f"attention, {backend}: {one_line(error)[:200]}"
        for name, got, expectation in zip(("output", "grad of q", "grad of k", "grad of v"), found, expected):
            error = relative_square_error(got.detach().float().cpu(), expectation.detach())
            if not error < ATTENTION_ERROR:
                window = f"a window of {left + 1}" if left >= 0 else "no window"
                return f"attention, {backend}, {window}: {name} has a relative square error of {error:.1e}"
    return None


def _uneven(shape: tuple[int, int]) -> torch.Tensor:
    """A random BF16 tensor whose rows have magnitudes from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * torch.logspace(-6, 0, shape[0]).unsqueeze(1)).bfloat16()


# ----------------------------------------------------------------------------------------------------------------------
# Speed


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """GB/s (10^9 bytes, read and written) of copying a tensor that no cache holds."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median_ms(lambda: target.copy_(source)) / 1e6


def gemm_tflops(device: torch.device, size: int = 8192) -> float:
    """TFLOP/s of a square BF16 product of random numbers. Zeros would take less power and be faster."""
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / median_ms(lambda: a @ b.T, repeats=10) / 1e9


def quantize_bandwidth(device: torch.device, rows: int = 16384, columns: int = 8192) -> float:
    """GB/s of 4/6: BF16 read twice (amax, then quantization), codes and scales, and what is decoded of them."""
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=device)
    how = Quantization(ROUNDINGS["four_over_six"])
    decoded = quantize_operand(x, how, keep_codes=True).decoded  # None on FP4 tensor cores
    num_bytes = x.numel() * (2 + 2 + BYTES + (0 if decoded is None else decoded.element_size()))
    return num_bytes / median_ms(lambda: quantize_operand(x, how, keep_codes=True)) / 1e6


# ----------------------------------------------------------------------------------------------------------------------


def examine(
    device: torch.device, methods: tuple[str, ...], say: Callable[[str], None] = print, processes: int = 0
) -> list[str]:
    """Every check, one line each through `say`; returns the problems.

    processes: number of processes that check at once, or 0 for this process. Nearly all of the time goes into compiling
    kernels, some 80 for nf.METHODS.
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

    kernels, shapes = [], SHAPES_INTERPRETED
    if use_kernels(device):
        kernels = _kernels(map(get_recipe, methods))
        if device.type == "cuda":
            shapes = SHAPES[: 3 if len(methods) > MOST_METHODS else 1]
    with _checks(processes) as start:
        layers = {method: start(layer_problem, device, method) for method in methods}
        started = [(how, start(_kernel_problem_of_shapes, device, *how, shapes)) for how in kernels]
        say("layers, forward and backward, against products of the reference's operands")
        for method, check in layers.items():
            report(method, check)
        if started:
            say(f"kernels against the reference, {', '.join(f'{r} x {c}' for r, c in shapes)}")
        else:
            say("kernels against the reference: nothing to compare, this machine quantizes with the reference")
        for (rounding, rht_dim), check in started:
            report(f"{rounding.name}{f' after an RHT of {rht_dim}' if rht_dim else ''}", check)
    say("attention, forward and backward, against softmax(q k^T) v in FP32")
    backends = [b for b in flash_attention.BACKENDS if b != "flex" and flash_attention.available(b)]
    for backend in backends:
        report(backend, functools.partial(attention_problem, device, backend))
    if device.type == "cuda":
        for rounding in dict.fromkeys(rounding for rounding, rht_dim in kernels if rht_dim == RHT_DIM):
            name = f"{rounding.name}: the same bits in {REPEATS} launches, {REPEATED[0]} x {REPEATED[1]}"
            report(name, functools.partial(repeat_problem, device, rounding, REPEATED, REPEATS))
        copy = copy_bandwidth(device)
        quantize = quantize_bandwidth(device)
        say("speed")
        say(f"        copy      {copy:6.0f} GB/s")
        say(f"        quantize  {quantize:6.0f} GB/s, {quantize / copy:.0%} of copy (4/6: amax, codes, scales)")
        say(f"        BF16 GEMM {gemm_tflops(device):6.0f} TFLOP/s")
    return problems


def _kernel_problem_of_shapes(device: torch.device, rounding: Rounding, rht_dim: int, shapes) -> str | None:
    return next((p for p in (kernel_problem(device, rounding, rht_dim, shape) for shape in shapes) if p), None)


@contextlib.contextmanager
def _checks(processes: int) -> Iterator[Callable[..., Callable]]:
    """start(function, *arguments). Calling its result, without arguments, waits for the function's result."""
    if not processes:
        yield functools.partial
        return
    context = multiprocessing.get_context("spawn")  # a process that has begun with CUDA cannot be forked
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (1,)) as pool:
        yield lambda *what: pool.submit(*what).result


def operations(device: torch.device) -> list[str]:
    """One line for each operation, with its backend and the reason."""
    backend = nf.backend()
    kernels = use_kernels(device)
    lines = [f"{name:10s} {backend.quantize}" for name in ("quantize", "rotate", "requantize")]
    decode = "Triton" if kernels and device.type == "cuda" else "PyTorch"
    lines += [f"{'decode':10s} {decode}", f"{'GEMM':10s} {backend.gemm}", f"{'because':10s} {backend.reason}"]
    return [*lines, f"{'note':10s} {EXCLUSIVE}"] if compute_mode() == "EXCLUSIVE_PROCESS" else lines


def versions() -> str:
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = "not installed"
    python = ".".join(map(str, sys.version_info[:3]))
    return f"Python {python}, torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, Triton {triton_version}"


def what_to_send(folder: Path) -> str:
    """How to report what dev/measure.sh found on a card. Raises UserError where the folder has no such file."""
    file = folder / "my_card.json"
    if not file.is_file():
        raise UserError(
            f"there is no {file}; run `bash dev/measure.sh` first in a checkout (20 minutes), or give --send the "
            "folder that OUT named"
        )
    what = "numbers, versions and the names of GPU and methods; no path, no host name, no text of yours"
    where = "to the project's issues, with the form 'My card' (.github/ISSUE_TEMPLATE/my_card.yml)"
    return f"send {file} ({what})\nand the table in {folder / 'my_card.txt'}\n{where}"


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--method", default="", help="check this method only (default: those of nf.METHODS)")
    which.add_argument(
        "--send", nargs="?", const="", metavar="FOLDER",
        help="check nothing: say what to send of dev/measure.sh's folder (default: measurements/ in the base "
        "directory), and where",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if args.send is not None:
        print(what_to_send(Path(args.send or Path(get_base_dir()) / "measurements")))
        return
    methods = (get_recipe(args.method).name,) if args.method else tuple(METHODS)
    device = torch.device(autodetect_device_type())
    if device.type == "mps":
        device = torch.device("cpu")
    set_cpu_threads(device, 1)  # the checks' tensors are small
    print(f"nanochat_fp4 doctor: {versions()}")
    print(f"device     {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    print("\n".join(operations(device)))
    processes = min(MOST_PROCESSES, usable_cpus()) if device.type == "cuda" and len(methods) > 1 else 0
    problems = examine(device, methods, processes=processes)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"this machine computes wrong results: {problems[0]}{more}; try NVFP4_KERNELS=reference")
    print("everything agrees")


def cli() -> None:
    """The command of the installed package."""
    run_main(main)


if __name__ == "__main__":
    cli()
