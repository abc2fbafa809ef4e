"""A short check that the chosen backend computes what the paper says. A training run makes it at its start.

FP4 software has failed silently before: a GEMM library returned zeros on one GPU, and a recipe's gradients were all
zero for three releases. The checks therefore compare with the PyTorch reference on the CPU, which shares no code with
the kernels and the GEMM of a GPU. Each check returns one line that names the problem, or None. nanochat_fp4.doctor
makes the same checks for all methods, and reports them.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.nvfp4.dispatch import fp8_products, use_kernels
from nanochat_fp4.nvfp4.format import BLOCK
from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.makers import Quantization, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.operands import Codes
from nanochat_fp4.nvfp4.probe import relative_square_error
from nanochat_fp4.nvfp4.quantizers import quantize_reference
from nanochat_fp4.nvfp4.recipes import Operand, Recipe
from nanochat_fp4.nvfp4.roundings import ROUNDINGS, Rounding

# The numbers of tokens, in_features and out_features. None of them is a multiple of 128, so that the check includes
# padding.
LAYER = (144, 96, 160)
# The same numbers if all layers of a model are multiples of 128, so that the check compiles no other kernels than
# training.
ALIGNED_LAYER = (256, 128, 384)
# The largest fraction of codes, and of scales, that may differ after a rotation. In a small tensor four may differ.
TIPPED = 1e-3
# The launches of a rotating kernel, and the tokens and features of d20's widest grad_output.
LAUNCHES, REPEATED = 20, (8192, 5120)
# SUM_ERROR and ROUNDING_ERROR are relative square errors |got - want|^2 / |want|^2.
SUM_ERROR = 1e-4  # One rounding to BF16 and another order of summation give 3e-6.
ROUNDING_ERROR = 0.1  # Two stochastically rounded operands of a gradient give up to 0.05.


def self_check(
    device: torch.device | str, method: str | Recipe = "clover", model: torch.nn.Module | None = None
) -> str:
    """Checks the chosen backend once, forward and backward, on a known result. Returns one line for the log.

    The model must be converted. If it is given, the check compiles the kernels that this model needs and no others.

    The check takes a few milliseconds once the kernels are compiled, and does not change the states of torch's
    generators. On sm_10x the rotating kernels run LAUNCHES times, because Triton before 3.7.1 may miss a fence there
    (triton#10590). Raises UserError with one line that says what is wrong.
    """
    device = torch.device(device)
    recipe = get_recipe(method)
    layer = LAYER if model is None else layer_like(model)
    with one_thread() if device.type == "cuda" else contextlib.nullcontext():
        problem = _problem(device, recipe, layer)
    if problem:
        raise UserError(
            f"self-check failed on {device}: {problem}; training would be wrong. See `python -m nanochat_fp4.doctor`, "
            "or set NVFP4_KERNELS=reference"
        )
    line = f"self-check passed: {recipe.name} forward and backward as the reference, on {device}"
    if any(o.rounding and o.rounding.fp8 for o in (recipe.output.a, recipe.output.b)):
        line += f"; FP8 products: {fp8_products(device.type)}"
    return line


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Inside this context torch computes on the CPU in one thread. At a run's start torch.compile's processes take all
    cores. A thread that waits for others then waits longer than the small tensors of a check take in one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _problem(device: torch.device, recipe: Recipe, layer: tuple[int, int, int]) -> str | None:
    problem = None
    if recipe.quantizes and use_kernels(device):
        for rounding in dict.fromkeys(rounding for rounding, _ in kernels_of([recipe])):
            problem = problem or (
                training_problem(device, rounding, layer[::2])
                if rounding.ms_eden
                else kernel_problem(device, rounding, 0, layer[::2])
            )
        for rounding, rht_dim in kernels_of([recipe]):
            if rht_dim and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10:
                problem = problem or repeat_problem(device, rounding, REPEATED, LAUNCHES, rht_dim)
    return problem or layer_problem(device, recipe, layer)


# ----------------------------------------------------------------------------------------------------------------------
# A layer


def layer_like(model: torch.nn.Module) -> tuple[int, int, int]:
    """Returns the tokens, in_features and out_features of a small layer that runs the same kernels as the model's
    layers."""
    sizes = [n for m in model.modules() if isinstance(m, QuantLinear) for n in (m.in_features, m.out_features)]
    return LAYER if any(n % 128 for n in sizes) else ALIGNED_LAYER


def layer_problem(device: torch.device, method: str | Recipe, layer: tuple[int, int, int] | None = None) -> str | None:
    """Returns a description of the problem of a layer of this method, or None. Activations are BF16 and weights are
    FP32, as in training.

    `layer` has tokens, in_features and out_features, or is None for LAYER.
    """
    recipe = get_recipe(method)
    tokens, in_features, out_features = layer or LAYER
    generator = torch.Generator().manual_seed(1234)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16().float()

    x, w, e = normal(tokens, in_features), normal(out_features, in_features), normal(tokens, out_features)
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(1234)
            layer = QuantLinear(in_features, out_features, method=recipe, device=device)
            layer.weight.data.copy_(w)
            leaf = x.to(device, torch.bfloat16).requires_grad_()
            output = layer(leaf)
            gradients = torch.autograd.grad(output, (leaf, layer.weight), e.to(device, torch.bfloat16))
    except Exception as error:  # A kernel does not compile or launch.
        return f"{recipe.name}: {one_line(error)[:200]}"

    def used(t: torch.Tensor, operand: Operand, backward: bool = False) -> torch.Tensor:
        """Returns the values that stand for t in the output GEMM, or in the backward pass. They are t itself if they
        are drawn randomly."""
        if recipe.output.random:
            return t
        made = quantize_operand(t, Quantization(operand.rounding, kept=operand.kept))
        return (made.for_backward() if backward else made.multiplied).dequantize()

    product = used(x, recipe.output.a) @ used(w, recipe.output.b).T
    grad_input = e @ (w if recipe.grad_input.b.raw else used(w, recipe.output.b, backward=True))
    grad_weight = e.T @ (x if recipe.grad_weight.b.raw else used(x, recipe.output.a, backward=True))
    for name, got, want, gemm in (
        ("output", output.detach(), product, recipe.output if recipe.output.random else None),
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


def kernels_of(recipes: Iterable[Recipe]) -> list[tuple[Rounding, int]]:
    """Returns the roundings of these methods that have kernels, each with the group size of its rotation, sorted by
    name."""
    gemms = [g for r in recipes for p in (r, r.final) for g in (p.output, p.grad_input, p.grad_weight)]
    pairs = {(o.rounding, g.rht_dim) for g in gemms for o in (g.a, g.b) if o.rounding and o.rounding.has_kernels}
    pairs |= {(o.kept, 0) for g in gemms for o in (g.a, g.b) if o.kept}
    return sorted(pairs, key=lambda pair: (pair[0].name, pair[1]))


def kernel_problem(device: torch.device, rounding: Rounding, rht_dim: int, shape: tuple[int, int]) -> str | None:
    """Returns a description of a wrong result for a random tensor, in its codes or in the GEMM's operand, or None.
    It needs use_kernels."""
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
    """Does the same as kernel_problem after a rotation, with exactly the launches of a training step.

    The launches make both operands of a grad_output at once, and one operand from codes. Training needs every kernel
    that is compiled here, and no other.
    """
    x = _uneven(shape)
    random = {"stream": 3, "rht_dim": RHT_DIM, "rht_stream": 2}
    t = quantize_reference(x.float(), ROUNDINGS["four_over_six"])
    try:
        seeds = {"seed": torch.tensor(7, device=device), "rht_seed": torch.tensor(8, device=device)}
        how = Quantization(rounding, **seeds, **random)
        row, col = quantize_grad_output(x.to(device), how, how)
        codes = Codes(*(part.to(device) for part in (t.codes, t.scales, t.tensor_scale)))
        transposed_codes = quantize_operand(codes, how, transpose=True)
    except Exception as error:
        return f"{rounding.name} after an RHT of {RHT_DIM}: {one_line(error)[:200]}"
    for name, operand, source in (
        ("grad_output", row, x.float()),
        ("transposed grad_output", col, x.float().T),
        ("transposed codes", transposed_codes, t.dequantize().T),
    ):
        padded = torch.nn.functional.pad(source, (0, -source.shape[1] % RHT_DIM))
        want = quantize_reference(padded, rounding, seed=7, rht_seed=8, **random).dequantize()
        wrong = int((operand.dequantize().cpu() != want).sum())
        if wrong > max(4 * BLOCK, 4 * TIPPED * want.numel()):  # A single tipped scale changes its whole block.
            of = f"{wrong} of {want.numel()} values of a {name}, {shape[0]} x {shape[1]}"
            return f"{rounding.name} after an RHT of {RHT_DIM}: {of}, differ from the reference"
    return None


def repeat_problem(
    device: torch.device, rounding: Rounding, shape: tuple[int, int], times: int, rht_dim: int = RHT_DIM
) -> str | None:
    """Returns a description of an operand of a backward pass whose bits differ between launches with the same random
    numbers, or None.

    A fence that a compiler has missed shows only in some launches, on a full GPU (triton#10590 on sm_100).
    """
    x = _uneven(shape).to(device)
    seeds = {"seed": torch.tensor(7, device=device), "rht_seed": torch.tensor(8, device=device)}
    how = Quantization(rounding, **seeds, stream=3, rht_dim=rht_dim, rht_stream=2)
    codes = quantize_operand(x, Quantization(ROUNDINGS["four_over_six"]), keep_codes=True).without_cache()
    first: list[torch.Tensor] = []
    for i in range(times):
        operands = [*quantize_grad_output(x, how, how), quantize_operand(codes, how, transpose=True)]
        tensors = [t for operand in operands for t in vars(operand).values() if isinstance(t, torch.Tensor)]
        bits = [t.reshape(-1).view(torch.uint8) for t in tensors]
        first = first or bits
        if not all(map(torch.equal, first, bits)):
            return f"{rounding.name}, {shape[0]} x {shape[1]}: launch {i + 1} has other bits than the first"
    return None


def _uneven(shape: tuple[int, int]) -> torch.Tensor:
    """Returns a random BF16 tensor whose rows have magnitudes from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * torch.logspace(-6, 0, shape[0]).unsqueeze(1)).bfloat16()
