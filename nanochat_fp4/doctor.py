"""Checks whether this machine computes what the paper says, and with which kernels.

    python -m nanochat_fp4.doctor

FP4 software has failed silently before: a GEMM library returned zeros on one GPU, and a recipe's gradients were all
zero for three releases. All results are therefore compared with the PyTorch reference on the CPU, which shares no code
with the kernels and the GEMM of a GPU. A training run makes the checks of its method at its start (self_check), and the
doctor those of all methods:

- `problems`: the kernels' operands of a training step are compared with the reference's. Without a rotation all values
  must be equal. With a rotation at least 99.6% of them must be equal, because the tensor cores add 128 terms in their
  own order, so that a value next to a rounding boundary may tip. On a GPU each rotating kernel runs 200 times at the
  size of a training step, and must give the same bits each time. A QuantLinear, forward and backward, is compared with
  products of the reference's quantized operands.
- `attention_problem`, which the doctor alone asks for: each available backend computes forward and gradients, with a
  window and without.

Each check returns one line that names the problem, or None. A problem ends the command in exit status 2 and one line on
stderr.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, one_line, run_main
from nanochat_fp4.common import add_recipes_argument, autodetect_device_type, resolve_method, set_cpu_threads
from nanochat_fp4.hardware import about_versions, environment_info
from nanochat_fp4.models import flash_attention
from nanochat_fp4.models.cross_entropy import Head, default_head
from nanochat_fp4.nvfp4.dispatch import fp8_products, use_kernels
from nanochat_fp4.nvfp4.format import BLOCK
from nanochat_fp4.nvfp4.gemm import Quantized, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.methods import METHODS, get_recipe
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
# The largest relative difference of a tensor_scale after a rotation: 8 to 16 units of FP32. An amax is a sum of up to
# 128 terms, which kernels add in their own order, and of codes without the tensor_scale that the reference multiplies
# in first. One unit was seen.
AMAX_ERROR = 2**-20
# The layers of the doctor, on a GPU and on a CPU.
LARGE_LAYER, SMALL_LAYER = (1000, 96, 528), (40, 48, 144)
# The launches of a rotating kernel, and the tokens and features of d20's widest grad_output.
LAUNCHES, REPEATED = 20, (8192, 5120)
NOISE = {"seed": 7, "rht_seed": 8, "stream": 3, "rht_stream": 2}  # of the kernels' operands
# SUM_ERROR and ROUNDING_ERROR are relative square errors |got - want|^2 / |want|^2.
SUM_ERROR = 1e-4  # One rounding to BF16 and another order of summation give 3e-6.
ROUNDING_ERROR = 0.1  # Two stochastically rounded operands of a gradient give up to 0.05.
ATTENTION = (2, 256, 4, 2, 64)  # The numbers of rows, tokens, heads and key heads, and the head dimension.
ATTENTION_ERROR = 1e-3  # BF16 products and sums give 1e-5.


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
    modules = [] if model is None else [*model.modules()]
    head = next((m.precision for m in modules if isinstance(m, Head)), default_head(recipe.name))
    sizes = [n for m in modules if isinstance(m, QuantLinear) for n in (m.in_features, m.out_features)]
    layer = LAYER if not sizes or any(n % 128 for n in sizes) else ALIGNED_LAYER
    on_gpu = device.type == "cuda" and use_kernels(device)
    launches = LAUNCHES if on_gpu and torch.cuda.get_device_capability(device)[0] == 10 else 0
    try:
        problem = next(filter(None, problems(device, recipe, layer, launches, head, every=False)), None)
    finally:
        torch.set_num_threads(threads)
    if problem:
        wrong = f"self-check failed on {device}: {problem}; training would be wrong"
        raise UserError(f"{wrong}. See `python -m nanochat_fp4.doctor`, or set NVFP4_KERNELS=reference")
    line = f"self-check passed: {recipe.name} forward and backward as the reference, on {device}"
    if head == "fp8" or any(o.rounding and o.rounding.fp8 for o in (recipe.output.a, recipe.output.b)):
        line += f"; FP8 products: {fp8_products(device.type)}"
    return line


def problems(
    device: torch.device, recipe: Recipe, layer: tuple[int, int, int], launches: int, head: str, every: bool
) -> Iterator[str | None]:
    """Makes the checks of a method one after the other. Yields a description of each one's problem, or None.

    `layer` has the numbers of tokens, in_features and out_features. `launches` is the number of launches in which each
    rotating kernel must give the same bits, or 0 to leave that out. `head` is the precision of the output head, whose
    operands are those of the method of this name. Without `every` a rounding other than ms_eden is compared without its
    rotation, which all roundings share. Raises ValueError if the function of a rounding returns something else than it
    must.
    """
    # A format of a user's own may have larger blocks.
    layer = layer[0], *(n + -n % max(recipe.block, 1) for n in layer[1:])
    gemms = [g for p in (recipe, recipe.final, get_recipe(head)) for g in (p.output, p.grad_input, p.grad_weight)]
    for rounding in {o.rounding for g in gemms for o in (g.a, g.b) if o.rounding and o.rounding.quantize}:
        nf.quantize(uneven((layer[0], 4 * rounding.block)).to(device), rounding)
    # The roundings that kernels may compute, each with the group size of its rotation.
    pairs = {(r, g.rht_dim) for g in gemms for r in (g.a.rounding, g.b.rounding) if r and (r.has_kernels or r.fp8)}
    pairs |= {(o.kept, 0) for g in gemms for o in (g.a, g.b) if o.kept}
    kernels = sorted(pairs, key=lambda pair: (pair[0].name, pair[1])) if use_kernels(device) else []
    for rounding, rht_dim in dict.fromkeys((r, rht_dim if r.ms_eden or every else 0) for r, rht_dim in kernels):
        yield kernel_problem(device, rounding, rht_dim, layer[::2])
    for rounding, rht_dim in ((r, rht_dim) for r, rht_dim in kernels if rht_dim and launches):
        yield repeat_problem(device, rounding, REPEATED, launches, rht_dim)
    yield layer_problem(device, recipe, layer)


# ----------------------------------------------------------------------------------------------------------------------
# A layer


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
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
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


def operands(rounding: Rounding, rht_dim: int, x: torch.Tensor) -> dict[str, Quantized]:
    """The operands that a training step makes of x (M, N) with this rounding, by name. Training launches the same
    kernels: it makes both operands of a grad_output at once, and one operand from codes."""
    seeds = {name: torch.tensor(NOISE[name], device=x.device) for name in ("seed", "rht_seed")}
    noise = NOISE | seeds | {"rht_dim": rht_dim}
    how = Quantization(rounding, **(noise if rounding.random or rht_dim else {}))
    if not (rht_dim or rounding.fp8):
        kept = quantize_operand(x, how, keep_codes=True).without_cache()
        return {"the codes": kept, "the operand that the GEMM reads": quantize_operand(x, how)}
    made = dict(zip(("a grad_output", "a transposed grad_output"), quantize_grad_output(x, how, how)))
    if not rounding.fp8:
        codes = quantize_operand(x, Quantization(ROUNDINGS["four_over_six"]), keep_codes=True).without_cache()
        made["transposed codes"] = quantize_operand(codes, how, transpose=True)
        # The gradient of a ReLU^2 whose input consists of powers of two, so that the product is x itself.
        row, column = (torch.arange(n, device=x.device) for n in x.shape)
        kept, step = 2 ** ((row[:, None] + column) % 7), 2.0 ** -(row[:, None] % 3)
        e, names = (x / (2 * step * kept)).to(x.dtype), ("a gradient of ReLU^2", "a transposed gradient of ReLU^2")
        made |= zip(names, quantize_grad_output(e, how, how, (kept.to(torch.uint8), step)))
    return made


def kernel_problem(device: torch.device, rounding: Rounding, rht_dim: int, shape: tuple[int, int]) -> str | None:
    """Returns a description of a wrong operand of a random tensor, or None. It needs use_kernels.

    Without a rotation all values must be the reference's. After one, the sums of 128 terms differ in their last bits.
    The amax is the largest of these sums, so tensor_scale, too, may then differ by AMAX_ERROR.
    """
    x, noise = uneven(shape), NOISE | {"rht_dim": rht_dim}
    where = f"{rounding.name}{f' after an RHT of {rht_dim}' if rht_dim else ''}, {shape[0]} x {shape[1]}"
    try:
        made = operands(rounding, rht_dim, x.to(device))
    except Exception as error:
        return f"{where}: {one_line(error)[:200]}"
    codes = quantize_reference(x.float(), Quantization(ROUNDINGS["four_over_six"])).dequantize()
    for name, operand in made.items():
        source = codes if name == "transposed codes" else x.float()
        source = source.T if "transposed" in name else source
        padded = torch.nn.functional.pad(source, (0, -source.shape[1] % (1 if rounding.fp8 else rht_dim or BLOCK)))
        want = quantize_reference(padded, Quantization(rounding, **noise))
        # The reference's codes and scales with the kernel's tensor_scale: one unit of it changes every value. An
        # emulated MS-EDEN operand contains its tensor_scale, a power of two.
        scale = want.tensor_scale if operand.tensor_scale is None else operand.tensor_scale.cpu()
        sound = torch.isclose(scale, want.tensor_scale, AMAX_ERROR if rht_dim else 0, 0)
        wrong = int(((operand.dequantize().cpu() != want.decode() * scale) | ~sound).sum())
        if wrong > (max(4 * BLOCK, 4 * TIPPED * padded.numel()) if rht_dim else 0):  # A tipped scale changes its block.
            return f"{where}: {wrong} of {padded.numel()} values of {name} differ from the reference"
    return None


def repeat_problem(
    device: torch.device, rounding: Rounding, shape: tuple[int, int], times: int, rht_dim: int = RHT_DIM
) -> str | None:
    """Returns a description of an operand of a backward pass whose values differ between launches with the same random
    numbers, or None.

    A fence that a compiler has missed shows only in some launches, on a full GPU (triton#10590 on sm_100).
    """
    x = uneven(shape).to(device)
    first: list[torch.Tensor] = []
    for i in range(times):
        values = [operand.dequantize() for operand in operands(rounding, rht_dim, x).values()]
        first = first or values
        if not all(map(torch.equal, first, values)):
            return f"{rounding.name}, {shape[0]} x {shape[1]}: launch {i + 1} has other values than the first"
    return None


def uneven(shape: tuple[int, int]) -> torch.Tensor:
    """Returns a random BF16 tensor whose rows have magnitudes from 1e-6 to 1."""
    generator = torch.Generator().manual_seed(shape[0])
    return (torch.randn(shape, generator=generator) * torch.logspace(-6, 0, shape[0]).unsqueeze(1)).bfloat16()


# ----------------------------------------------------------------------------------------------------------------------
# Attention


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
# The command


def examine(device: torch.device, methods: tuple[str, ...]) -> list[str]:
    """Makes every check, and prints one line about each. Returns the problems."""
    on_gpu, found = device.type == "cuda", []
    layer, launches = (LARGE_LAYER, 200) if on_gpu else (SMALL_LAYER, 0)

    def report(names: Iterable[str], check: Callable[[str], str | None]) -> None:
        for name in names:
            problem = check(name)
            print(f"  {'FAIL' if problem else 'ok':4s}  {problem or name}")
            found.extend([problem] if problem else [])

    print("methods: the kernels of a step, and layers forward and backward, against the PyTorch reference")
    checks = {m: problems(device, get_recipe(m), layer, launches, default_head(m), every=True) for m in methods}
    report(methods, lambda method: next(filter(None, checks[method]), None))
    print("attention, forward and backward, against softmax(q k^T) v in FP32")
    backends = [b for b in flash_attention.BACKENDS if b != "flex" and flash_attention.available(b)]
    report(backends, lambda backend: attention_problem(device, backend))
    return found


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add_recipes_argument(parser)
    parser.add_argument("--method", default="", help="check this method only (default: those of nf.METHODS)")
    args = parser.parse_args(argv)
    methods = (resolve_method(args.method),) if args.method else tuple(METHODS)
    device = torch.device(autodetect_device_type().replace("mps", "cpu"))
    set_cpu_threads(device, 1)  # The tensors of the checks are small.
    environment = environment_info()
    versions = ", ".join(f"{name} {environment[name] or 'none'}" for name in ("python", "torch", "cuda", "triton"))
    print(f"nanochat_fp4 doctor: {versions}")
    print(f"device     {torch.cuda.get_device_name() if device.type == 'cuda' else device}")
    if pair := about_versions(environment):
        print(f"versions   {pair}")
    print(f"backend    {nf.backend()}")
    if found := examine(device, methods):
        and_others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UserError(f"this machine computes wrong results: {found[0]}{and_others}; try NVFP4_KERNELS=reference")
    print("everything agrees")


if __name__ == "__main__":
    run_main(main)
