"""A short check that the chosen backend computes what the paper says. A training run makes it at its start.

FP4 software has failed silently before: a GEMM library returned zeros on one GPU, and a recipe's gradients were all
zero for three releases. The checks therefore compare with the PyTorch reference on the CPU, which shares no code with
the kernels and the GEMM of a GPU. Each check returns one line that names the problem, or None. nanochat_fp4.doctor
makes the same checks for all methods, and reports them.
"""

from collections.abc import Iterator

import torch

from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.nvfp4.dispatch import fp8_products, use_kernels
from nanochat_fp4.nvfp4.format import BLOCK
from nanochat_fp4.nvfp4.gemm import Quantized, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.probe import relative_square_error
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
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
    device, recipe, threads = torch.device(device), get_recipe(method), torch.get_num_threads()
    if device.type == "cuda":
        # torch.compile's processes take all cores at a run's start. Threads that wait for each other would then take
        # longer than one thread takes for the small tensors of a check.
        torch.set_num_threads(1)
    on_gpu, layer = device.type == "cuda" and use_kernels(device), LAYER if model is None else layer_like(model)
    launches = LAUNCHES if on_gpu and torch.cuda.get_device_capability(device)[0] == 10 else 0
    try:
        problem = next(filter(None, problems(device, recipe, layer, launches)), None)
    finally:
        torch.set_num_threads(threads)
    if problem:
        raise UserError(
            f"self-check failed on {device}: {problem}; training would be wrong. See `python -m nanochat_fp4.doctor`, "
            "or set NVFP4_KERNELS=reference"
        )
    line = f"self-check passed: {recipe.name} forward and backward as the reference, on {device}"
    if any(o.rounding and o.rounding.fp8 for o in (recipe.output.a, recipe.output.b)):
        line += f"; FP8 products: {fp8_products(device.type)}"
    return line


def problems(
    device: torch.device, recipe: Recipe, layer: tuple[int, int, int], launches: int, every: bool = False
) -> Iterator[str | None]:
    """Makes the checks of a method one after the other. Yields a description of each one's problem, or None.

    `layer` has the numbers of tokens, in_features and out_features. `launches` is the number of launches in which each
    rotating kernel must give the same bits, or 0 to leave that out. Without `every` a rounding other than ms_eden is
    compared without its rotation, which all roundings share.
    """
    kernels = kernels_of(recipe) if recipe.quantizes and use_kernels(device) else []
    for rounding, rht_dim in dict.fromkeys((r, rht_dim if r.ms_eden or every else 0) for r, rht_dim in kernels):
        yield kernel_problem(device, rounding, rht_dim, layer[::2])
    for rounding, rht_dim in ((r, rht_dim) for r, rht_dim in kernels if rht_dim and launches):
        yield repeat_problem(device, rounding, REPEATED, launches, rht_dim)
    yield layer_problem(device, recipe, layer)


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
        return (made.kept if backward and made.kept else made).dequantize()

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


def kernels_of(recipe: Recipe) -> list[tuple[Rounding, int]]:
    """Returns the roundings of a method that have kernels, each with the group size of its rotation, sorted by name."""
    gemms = [g for p in (recipe, recipe.final) for g in (p.output, p.grad_input, p.grad_weight)]
    pairs = {(o.rounding, g.rht_dim) for g in gemms for o in (g.a, g.b) if o.rounding and o.rounding.has_kernels}
    pairs |= {(o.kept, 0) for g in gemms for o in (g.a, g.b) if o.kept}
    return sorted(pairs, key=lambda pair: (pair[0].name, pair[1]))


def operands(
    device: torch.device, rounding: Rounding, rht_dim: int, x: torch.Tensor, noise: dict
) -> dict[str, Quantized]:
    """The operands that a training step makes of x (M, N) with this rounding, by name. Training launches the same
    kernels: it makes both operands of a grad_output at once, and one operand from codes."""
    seeds = {name: torch.tensor(noise[name], device=device) for name in ("seed", "rht_seed")}
    how = Quantization(rounding, **(noise | seeds if rounding.random or rht_dim else {}))
    x = x.to(device)
    if not rht_dim:
        kept = quantize_operand(x, how, keep_codes=True).without_cache()
        return {"the codes": kept, "the operand that the GEMM reads": quantize_operand(x, how)}
    row, col = quantize_grad_output(x, how, how)
    codes = quantize_operand(x, Quantization(ROUNDINGS["four_over_six"]), keep_codes=True).without_cache()
    from_codes = quantize_operand(codes, how, transpose=True)
    return {"a grad_output": row, "a transposed grad_output": col, "transposed codes": from_codes}


def kernel_problem(device: torch.device, rounding: Rounding, rht_dim: int, shape: tuple[int, int]) -> str | None:
    """Returns a description of a wrong operand of a random tensor, or None. It needs use_kernels.

    Without a rotation all values must be the reference's. After one, the sums of 128 terms differ in their last bits.
    """
    x, noise = _uneven(shape), {"seed": 7, "rht_seed": 8, "stream": 3, "rht_dim": rht_dim, "rht_stream": 2}
    where = f"{rounding.name}{f' after an RHT of {rht_dim}' if rht_dim else ''}, {shape[0]} x {shape[1]}"
    try:
        made = operands(device, rounding, rht_dim, x, noise)
    except Exception as error:
        return f"{where}: {one_line(error)[:200]}"
    codes = quantize_reference(x.float(), Quantization(ROUNDINGS["four_over_six"])).dequantize()
    for name, operand in made.items():
        source = codes if name == "transposed codes" else x.float()
        source = source.T if "transposed" in name else source
        padded = torch.nn.functional.pad(source, (0, -source.shape[1] % (rht_dim or BLOCK)))
        want = quantize_reference(padded, Quantization(rounding, **noise)).dequantize()
        wrong = int((operand.dequantize().cpu() != want).sum())
        if wrong > (max(4 * BLOCK, 4 * TIPPED * want.numel()) if rht_dim else 0):  # A tipped scale changes its block.
            return f"{where}: {wrong} of {want.numel()} values of {name} differ from the reference"
    return None


def repeat_problem(
    device: torch.device, rounding: Rounding, shape: tuple[int, int], times: int, rht_dim: int = RHT_DIM
) -> str | None:
    """Returns a description of an operand of a backward pass whose values differ between launches with the same random
    numbers, or None.

    A fence that a compiler has missed shows only in some launches, on a full GPU (triton#10590 on sm_100).
    """
    x, noise = _uneven(shape), {"seed": 7, "rht_seed": 8, "stream": 3, "rht_dim": rht_dim, "rht_stream": 2}
    first: list[torch.Tensor] = []
    for i in range(times):
        values = [operand.dequantize() for operand in operands(device, rounding, rht_dim, x, noise).values()]
        first = first or values
        if not all(map(torch.equal, first, values)):
            return f"{rounding.name}, {shape[0]} x {shape[1]}: launch {i + 1} has other values than the first"
    return None


def _uneven(shape: tuple[int, int]) -> torch.Tensor:
    """Returns a random BF16 tensor whose rows have magnitudes from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * torch.logspace(-6, 0, shape[0]).unsqueeze(1)).bfloat16()
