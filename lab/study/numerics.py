"""Makes Tables 1 and 2 and Figure 9, which show rounding errors, memory traffic and bias. They need no sweep."""

import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch

import nanochat_fp4 as nf
from lab import RESULTS, ROOT
from lab.study.context import Context, Outcome, trained_model
from lab.study.sweep_results import data_name
from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4.hadamard import rotate, rotation_matrix
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize, quantize_reference, search_scales
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe
from nanochat_fp4.nvfp4.roundings import get_rounding

# ----------------------------------------------------------------------------------------------------------------------
# Table 1

# The paper's Table 1: rounding -> (mean squared error over N(0, 1) in 1e-3, whether it is unbiased).
TABLE_1 = {
    "rtn": (9.0, False),
    "four_over_six": (7.6, False),
    "rtn_16x16": (12.4, False),
    "four_over_six_16x16": (12.4, False),
    "sr": (23.5, True),
    "sr_four_over_six": (17.5, False),
    "ms_eden": (9.8, True),
}


def unbiasedness_gain(rounding: str, draws: int) -> float:
    """Returns how many times smaller the squared error of the mean of `draws` products of two quantized Gaussian
    operands (24 x 128) is than that of one product. For an unbiased rounding it is `draws`, up to some scatter. With a
    bias it stops growing."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(24, 128, generator=generator) for _ in range(2))
    spec, target = get_rounding(rounding), a.double() @ b.double().T
    total, single = torch.zeros_like(target), 0.0
    for seed in range(draws):
        kw = {"seed": seed, "rht_dim": 128 if spec.ms_eden else 0}
        qa, qb = (
            quantize_reference(v, Quantization(spec, stream=i, **kw)).dequantize().double()
            for i, v in enumerate((a, b))
        )
        product = qa @ qb.T
        total += product
        single += float((product - target).square().sum()) / draws
    return single / float((total / draws - target).square().sum())


def mean_squared_error(rounding: str, samples: int, seed: int) -> float:
    """Returns E (x - Q(x))^2 for x from N(0, 1), as in the paper's Table 1, measured on rows of 4096 values. For
    ms_eden the rotated tensors are compared."""
    generator = torch.Generator().manual_seed(seed)
    rows = max(16, samples // 4096)
    x = torch.randn(rows, 4096, generator=generator)
    t = quantize(x, rounding, seed=seed)
    target = rotate(x, seed) if get_rounding(rounding).ms_eden else x
    error = (t.dequantize() - target).double()
    return math.fsum((error * error).mean(dim=1).tolist()) / rows


def table1(context: Context) -> Outcome:
    """Makes Table 1: the error of each rounding over N(0, 1), and whether it is unbiased."""
    samples = context.args.samples or (1 << 19 if context.quick else 1 << 22)
    draws = context.args.draws or (128 if context.quick else 1024)
    header = ["rounding", "paper", "here", "off", "unbiased (paper)", f"gain of {draws} draws"]
    context.chosen_columns(header)
    rows, numbers = [], {}
    names = [n for n in nf.ROUNDINGS if n not in ("scale_search", "ms_eden_search")]  # The two are other names.
    for name in context.chosen_rows(names):

        def compute(name=name) -> dict[str, float]:
            mse = 1e3 * mean_squared_error(name, samples=samples, seed=1)
            return {"mse": mse, "gain": unbiasedness_gain(name, draws)}

        constants = repr(dataclasses.asdict(get_rounding(name)))  # A user edits the row of a name.
        settings = {"rounding": constants, "samples": samples, "draws": draws, "seed": 1}
        value = context.piece("table1", settings, compute)
        mse, unbiased = TABLE_1.get(name, (None, None))
        off = f"{100 * (value['mse'] / mse - 1):+.1f}%" if mse else "-"
        said = "-" if unbiased is None else "yes" if unbiased else "no"
        rows.append([name, str(mse or "-"), f"{value['mse']:.2f}", off, said, round(value["gain"])])
        numbers[name] = value
    title = "Table 1: quadratic error over N(0, 1), 1e-3, and unbiasedness"
    notes = [f"gain: the mean of {draws} products is so many times better than one product; {draws} without a bias"]
    labels = {name: get_rounding(name).label for name in numbers}
    notes += [
        f"{label}: a row of the package with the same constants" for name, label in labels.items() if label != name
    ]
    return Outcome(title, header, rows, notes, numbers, measured_on=f"{samples:,} samples, seed 1")


# ----------------------------------------------------------------------------------------------------------------------
# Section 3.2: the correction S, and the size of the rotated groups


def eden(context: Context) -> Outcome:
    """Makes the checks of Section 3.2: the range of EDEN's S, and the bias that is left with groups of d numbers."""
    draws, spec = context.args.draws or (128 if context.quick else 1024), get_rounding("ms_eden")
    header = ["d", "least S", "largest S", f"gain of {draws} draws"]
    context.chosen_columns(header)
    rows, numbers = [], {}
    for d in (16, 32, 64, 128):
        x = torch.randn(256, d, generator=torch.Generator().manual_seed(0))  # 256 groups, which share their signs.
        total, single, factors = torch.zeros_like(x), 0.0, []
        for seed in range(draws):
            y = rotate(x, seed, dim=d)
            q, scales = search_scales(y.unflatten(-1, (-1, 16)), spec)
            q = (q * scales.unsqueeze(-1)).flatten(-2)
            s = y.square().sum(-1, keepdim=True) / (y * q).sum(-1, keepdim=True)
            back = s * q @ rotation_matrix(seed, dim=d).T / math.sqrt(d)
            total += back
            single += float((back - x).square().sum()) / draws
            factors.append(s)
        of = torch.cat(factors)
        gain = single / float((total / draws - x).square().sum())
        rows.append([d, *(f"{v:.3f}" for v in (of.min(), of.max())), round(gain)])
        numbers[str(d)] = {"S": [float(of.min()), float(of.max())], "gain": gain}
    notes = [f"the paper: S in [0.94, 1.06], and d = 64 suffices; gain: {draws} without a bias, up to some scatter"]
    notes.append("Gaussian groups; S is kept in FP32, so this is EDEN before scales are rounded to E4M3")
    title = "Section 3.2: EDEN's correction S and the groups' size d"
    return Outcome(title, header, rows, notes, numbers, measured_on=f"256 groups, {draws} rotations, seed 0")


# ----------------------------------------------------------------------------------------------------------------------
# Table 2: bytes and rotations of MS-EDEN's requantization, counted while Triton's interpreter runs the kernels

# The paper's Table 2: (bits read, bits written) per element by each kernel, and mma.m16n8k16 per group.
TABLE_2 = {"naive": ("4.5 + 4.5", "0 + 4.5", 2), "post hoc": ("4.5 + 1", "5 + 0.5", 1)}
ROWS, COLUMNS = 256, 256  # These are whole tiles, so nothing is padded.
# Arguments that are not counted: the rotation, its seeds and scalars. They have a few KB, and stay in the caches
# however often tiles read them.
OF_ALL_TILES = ("hadamard", "seed", "rht_seed", "amax", "tensor_scale")


@dataclass
class Launch:
    """A kernel launch: the bytes that it reads and writes, by the name of the argument, and the multiply-adds of its
    matrix products."""

    kernel: str
    read: Counter = field(default_factory=Counter)
    written: Counter = field(default_factory=Counter)
    rotated: int = 0


def count_launches(function) -> list[Launch]:
    """Counts the work of the kernels that function() launches. Only elements whose mask is set count, and an element
    that one load asks for several times counts once. TRITON_INTERPRET=1 must have been set before triton was
    imported."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    originals = {name: getattr(builder, name) for name in ("create_masked_load", "create_masked_store", "create_dot")}
    call = executor.__call__
    launches: list[Launch] = []
    ranges: list[tuple[int, int, str]] = []

    def add(counter: Counter, pointers, mask) -> None:
        addresses = np.unique(pointers.data[mask.data.astype(bool)])
        if addresses.size:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            first = int(addresses[0])
            counter[next((name for low, high, name in ranges if low <= first < high), "?")] += addresses.size * size

    def load(self, pointers, mask, *rest):
        add(launches[-1].read, pointers, mask)
        return originals["create_masked_load"](self, pointers, mask, *rest)

    def store(self, pointers, value, mask, *rest):
        add(launches[-1].written, pointers, mask)
        return originals["create_masked_store"](self, pointers, value, mask, *rest)

    def dot(self, a, b, *rest):
        launches[-1].rotated += a.data.shape[-2] * b.data.shape[-1]  # The matrix has 128 rows, or 16 with butterflies.
        return originals["create_dot"](self, a, b, *rest)

    def tensors(named):
        for name, value in named:
            if hasattr(value, "data_ptr"):
                yield name.removesuffix("_ptr"), value
            elif hasattr(value, "_asdict"):  # This is a record of arguments.
                yield from tensors(value._asdict().items())

    def launch(self, *arguments, **keywords):
        launches.append(Launch(self.fn.__name__))
        ranges[:] = [
            (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name)
            for name, t in tensors([*zip(self.arg_names, arguments), *keywords.items()])
        ]
        return call(self, *arguments, **keywords)

    patched = {"create_masked_load": load, "create_masked_store": store, "create_dot": dot}
    with mock.patch.multiple(builder, **patched), mock.patch.object(executor, "__call__", launch):
        function()
    return launches


def requantization() -> dict[str, list[dict]]:
    """Requantizes a tensor from its 4-bit codes along its other dimension, rotated by 128, and counts the work. Returns
    {alignment: launches}.

    naive:    a first pass finds the tensor's maximum, and a second one aligns the scales with it, as for rounding to
              nearest
    post hoc: MS-EDEN in the form in which it trains
    A launch has its kernel, the bits read and written per element by argument, and the rotations per element.
    """
    from nanochat_fp4.nvfp4.gemm import Quantized, quantize_operand

    torch.manual_seed(0)
    t = quantize_reference(torch.randn(ROWS, COLUMNS), Quantization(get_rounding("four_over_six")))
    codes = Quantized(t.codes, t.scales, t.tensor_scale, length=COLUMNS)
    elements, seed = ROWS * COLUMNS, torch.tensor(1)
    result = {}
    for alignment, rounding in (("naive", "rtn"), ("post hoc", "ms_eden")):

        def requantize(rounding=rounding):
            how = Quantization(get_rounding(rounding), seed=seed, rht_dim=128, rht_seed=seed)
            with mock.patch.dict(os.environ, NVFP4_KERNELS="triton"):
                quantize_operand(codes, how, transpose=True, keep_codes=True)

        result[alignment] = []
        for launch in count_launches(requantize):
            ways = {"read": launch.read, "written": launch.written}
            bits = {way: {k: 8 * v / elements for k, v in counter.items()} for way, counter in ways.items()}
            result[alignment].append({"kernel": launch.kernel, **bits, "rotations": launch.rotated / elements})
    return result


def interpreted() -> dict[str, list[dict]]:
    """Runs requantization() in a process that interprets its kernels. Raises UserError if that fails."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    code = "import json; from lab.study.numerics import requantization; print(json.dumps(requantization()))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"the kernels could not be interpreted: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout)


def table2(context: Context) -> Outcome:
    """Makes Table 2: the memory traffic and the rotations of MS-EDEN's requantization."""
    counted = context.piece("table2", {"rows": ROWS, "columns": COLUMNS}, interpreted)

    def of_operand(bits: dict[str, float]) -> float:
        return sum(v for name, v in bits.items() if not any(shared in name for shared in OF_ALL_TILES))

    rows, totals = [], {}
    for alignment, launches in counted.items():
        kernels = [(of_operand(k["read"]), of_operand(k["written"]), k["rotations"]) for k in launches]
        read, written, rotations = zip(*[k for k in kernels if k[0] + k[1] > 0])
        totals[alignment] = sum(read) + sum(written)
        here = [" + ".join(f"{v:g}" for v in bits) for bits in (read, written)] + [f"{sum(rotations):g}"]
        what = ("bits read per element", "bits written per element", "rotations per element")
        rows += [[alignment, *row] for row in zip(what, TABLE_2[alignment], here)]
    saving = 1 - totals["post hoc"] / totals["naive"]
    rows.append(["saving", "of all traffic", "about 20%", f"{100 * saving:.1f}%"])
    notes = [
        "counted while the kernels run in Triton's interpreter; a rotation is what the paper counts as one "
        "mma.m16n8k16 per group of 16 values",
        "0.25 bits more than the paper's in each post hoc kernel: EDEN's S, an FP32 number for 128 values, is written "
        "by the first kernel and read by the second",
    ]
    title, numbers = "Table 2: memory traffic and rotations of MS-EDEN requantization", {"launches": counted}
    numbers |= {"bits": totals, "saving": saving}
    return Outcome(title, ["alignment", "what", "paper", "here"], rows, notes, numbers, measured_on="exact counts")


# ----------------------------------------------------------------------------------------------------------------------
# Figure 9: whether the mean of many quantized backward passes approaches the unquantized one

FIG9_METHODS = ("nvidia", "four_over_six", "four_over_six_biased", "tetrajet_v2", "clover", "clover_search")
# The authors' curves (Quartet-II, data/*_concentration.json) for Llama-3.2-1B with an unquantized forward: the error of
# the gradients of q, k and v of block 0, for B = 1, 4, 16, 64, 256 and 1024.
PUBLISHED = {
    "nvidia": (1.1, 2.0e-1, 5.6e-2, 1.5e-2, 5.4e-3, 9.4e-4),
    "four_over_six_biased": (1.4, 2.8e-1, 1.8e-1, 1.0e-1, 1.1e-1, 1.1e-1),
    "tetrajet_v2": (4.4, 7.7e-1, 2.2e-1, 5.7e-2, 1.4e-2, 3.0e-3),
    "clover": (5.6e-1, 1.9e-1, 6.8e-2, 1.8e-2, 5.6e-3, 1.5e-3),
}
# With "exact" the forward pass is not quantized. The backward pass takes its tensors instead of codes, as the published
# classes do with disable_forward_quant.
FORWARDS = {
    "quantized": lambda recipe: recipe,
    "exact": lambda recipe: replace(recipe, name=f"{recipe.name}, exact forward", output=Gemm(Operand(), Operand())),
}
STYLES = {"exact": {"marker": "o", "markersize": 3}, "quantized": {"linewidth": 0.8, "alpha": 0.6}}


def backward_left_alone(recipe: Recipe) -> Recipe:
    """Returns the recipe with an exact backward pass. Its operands have the same source as the recipe's, which is the
    forward's values or the unquantized tensors, but they are not rounded."""
    gemms = {name: getattr(recipe, name) for name in ("grad_input", "grad_weight")}
    exact = {name: Gemm(Operand(), Operand(raw=gemm.b.raw)) for name, gemm in gemms.items()}
    return replace(recipe, name=f"{recipe.name}, exact backward", **exact)


def block_gradients(model, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Returns the gradients of the loss with respect to the weights of q, k and v of block 0, as float64. They are the
    furthest from the loss, so that the rounding of the whole backward pass is in them."""
    attention = model.transformer.h[0].attn
    grads = torch.autograd.grad(model(x, y), [attention.c_q.weight, attention.c_k.weight, attention.c_v.weight])
    return [g.double() for g in grads]


def concentration(model, recipe: Recipe, x: torch.Tensor, y: torch.Tensor, draws: Sequence[int]) -> dict:
    """Compares quantized backward passes with the unquantized backward pass of the same forward pass. Returns
    {"single": the mean error of one pass, "errors": {B: the error of the mean of B passes}}. An error is a relative
    square, averaged over q, k and v, as in the authors' notebook."""
    nf.convert(model, backward_left_alone(recipe), verbose=False)
    targets = block_gradients(model, x, y)

    def error(gradients: list[torch.Tensor]) -> float:
        return sum(float((g - t).square().sum() / t.square().sum()) for g, t in zip(gradients, targets)) / len(targets)

    nf.convert(model, recipe, verbose=False)
    totals, single, found = [torch.zeros_like(t) for t in targets], 0.0, {}
    torch.manual_seed(0)
    for b in range(1, draws[-1] + 1):
        gradients = block_gradients(model, x, y)
        single += error(gradients)
        for total, gradient in zip(totals, gradients):
            total += gradient
        if b in draws:
            found[b] = error([total / b for total in totals])
    return {"single": single / draws[-1], "errors": found}


def slope(by_draws: dict[int, float]) -> float:
    """Returns the slope of log error over log B, by least squares through the three largest B. It is -1 without a bias
    and 0 on a plateau."""
    points = [(math.log(b), math.log(e)) for b, e in sorted(by_draws.items())][-3:]
    return statistics.linear_regression(*zip(*points)).slope


def stored_curves(name: str) -> tuple[dict, str, dict]:
    """Reads a part of lab/results/fig9.json. Returns (curves by forward and method, the data that they were measured
    on, the machine). Raises UserError for an unknown name."""
    content = json.loads((RESULTS / "fig9.json").read_text())
    if name not in content:
        raise UserError(f"--results={name}: lab/results/fig9.json has {', '.join(content)}")
    return content[name]["curves"], content[name]["measured_on"], content[name]["environment"]


def fig9_header(most: int) -> list[str]:
    """Returns the columns of Figure 9's table, if `most` passes are averaged."""
    return ["forward", "method", "paper", "slope", f"gain of {most}", "error of one pass", f"of {most}"]


def fig9(context: Context) -> Outcome:
    """Makes Figure 9: the error of the mean of B quantized backward passes, by method."""
    draws = [b for b in (2**i for i in range(11)) if b <= (context.args.draws or (32 if context.quick else 1024))]
    trained = functools.cache(lambda: trained_model(context, "d8"))
    curves: dict[str, dict[str, dict]] = {forward: {} for forward in FORWARDS}
    where = environment = None
    if context.args.results:
        curves, where, environment = stored_curves(context.args.results)
    else:
        context.chosen_columns(fig9_header(draws[-1]))
        for forward, method in itertools.product(FORWARDS, FIG9_METHODS):

            def compute(forward=forward, method=method):
                (model, x, y), tag, data = trained()
                value = concentration(model, FORWARDS[forward](nf.get_recipe(method)), x, y, draws)
                return value | {"measured_on": f"{tag}, data {data_name(data)}, a batch of 4 validation sequences"}

            settings = {"method": method, "draws": draws, "forward": forward}
            curves[forward][method] = context.piece("fig9", settings | context.trained_on(), compute)
            where = curves[forward][method]["measured_on"]
    by_draws = {key: {int(b): e for b, e in curves[key[0]][key[1]]["errors"].items()}
                for key in ((forward, method) for forward in curves for method in curves[forward])}  # fmt: skip
    most = max(next(iter(by_draws.values())))
    paper = dict.fromkeys(FIG9_METHODS, "1/B")  # The source is the paper's Figure 9 and Appendix A.
    paper |= {"four_over_six_biased": "plateau", "four_over_six": "-", "clover_search": "-"}
    rows = []
    for (forward, method), found in by_draws.items():
        one, last = curves[forward][method]["single"], found[most]
        numbers = [f"{slope(found):.2f}", f"{one / last:.1f}", f"{one:.3g}", f"{last:.2g}"]
        rows.append([forward, method, paper[method], *numbers])

    def plot(axes: Any) -> None:
        colors = dict(zip(FIG9_METHODS, plots.COLORS))
        for (forward, method), found in by_draws.items():
            axes.loglog(list(found), list(found.values()), color=colors[method], **STYLES[forward])
        for method in dict.fromkeys(method for _, method in by_draws):
            axes.plot([], [], color=colors[method], label=method)
            if method in PUBLISHED:
                axes.loglog([4**i for i in range(6)], PUBLISHED[method], "x--", markersize=4, color=colors[method])
        first = max(c["single"] for of in curves.values() for c in of.values())
        axes.loglog([1, most], [first, first / most], "k:", label="1/B")
        axes.set_xlabel("backward passes averaged, B")
        axes.set_ylabel("relative square error,\nq, k, v of block 0")

    title = "Figure 9: concentration of the mean of B quantized backward passes"
    notes = [
        f"slope of log error over log B through the last points: -1 unbiased, towards 0 a plateau; gain: the mean of "
        f"{most} passes against one",
        "the model is trained in bf16 and then converted, as in the paper; forward exact, circles: unquantized, as in "
        "the authors' notebook; quantized, thin lines: the method's own, and the target is its exact backward",
        "crosses: the authors' curves, an unquantized forward of Llama-3.2-1B and one sentence, another model and "
        "text, which do not compare in magnitude",
    ]
    return Outcome(title, fig9_header(most), rows, notes, {"curves": curves}, plot, where or "", environment)
