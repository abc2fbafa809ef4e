"""The tables and figures of the paper, each by one command, its numbers beside ours; and what goes beyond it.

    python -m scripts.reproduce table1
    python -m scripts.reproduce fig4 --sizes llama-30M,llama-50M --ratio 25 --seeds 3 --data-dir folder
    python -m scripts.reproduce all --quick            # everything in small, about a minute each on two CPU cores
    python -m scripts.reproduce list
    python -m scripts.reproduce attribution           # where Clover's gap comes from; also: operands, remedies, systems

    python -m scripts.reproduce table5 --results docs/results/d6.json    # from that sweep's runs, without training
    python -m scripts.reproduce fig6 --results bench_linear.json         # from that benchmark; table7: bench_train's

Each prints a table, writes <folder>/<name>.json and <name>.png, and says on what hardware, data, tokens, seeds and
commit it was measured. What is done is kept, piece by piece, so that the same command goes on where it was interrupted.
Figures that need training runs share them (scripts/sweep.py).
"""

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4 import llama, roofline
from nanochat_fp4.checkpoint_manager import load_model_from_dir
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.dataloader import tokenizing_distributed_data_loader_bos_bestfit
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_open, atomic_write
from nanochat_fp4.nvfp4.quantizers import get_rounding, mean_squared_error, quantize_reference
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, get_recipe
from scripts import bench_linear, sweep, traffic
from scripts.bench_common import table

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Outcome:
    """What an item of the paper gave: a table (with the paper's numbers in it), notes, all numbers, and a plot.

    plot: draws into a matplotlib Axes. measured_on: data, tokens and seeds, for the last line. environment: of the
    machine that measured, where that is not this one.
    """

    title: str
    header: list[str]
    rows: list[list[Any]]
    notes: list[str] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    plot: Callable[[Any], None] | None = None
    measured_on: str = ""
    environment: dict[str, Any] | None = None


@dataclass
class Context:
    """Where results go, and how much is done: the command line, with defaults that depend on --quick."""

    folder: Path
    quick: bool
    args: argparse.Namespace

    def piece(self, name: str, settings: dict, compute: Callable[[], Any]) -> Any:
        """compute(), or what it returned before with the same settings: JSON in <folder>/pieces."""
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        path = self.folder / "pieces" / f"{name}_{key}.json"
        try:
            return json.loads(path.read_text())["value"]
        except (OSError, ValueError, KeyError):
            pass
        value = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps({"settings": settings, "value": value}) + "\n")
        return value

    def runs(self, methods: Sequence[str], sizes: Sequence[str], ratio: float) -> tuple["sweep.Sweep", list]:
        """The sweep and the runs of some methods; sizes and ratio (tokens per parameter) unless the flags say more."""
        args = self.args
        chosen = ["tiny"] if self.quick and not args.sizes else args.sizes.split(",") if args.sizes else sizes
        length = {"tokens": sweep.parse_number(args.tokens) if args.tokens else 0, "ratio": args.ratio}
        extra = args.extra.split()
        if self.quick:
            length = {"tokens": length["tokens"] or 10 * 512, "ratio": 0.0}
            extra = ["--eval-every=5", *extra]
        elif not any(length.values()):
            length["ratio"] = ratio
        seeds = range(1, (args.seeds or (2 if self.quick else 3)) + 1)
        vocab_size = args.vocab_size or (512 if self.quick else 0)
        where = sweep.prepare(self.folder, args.data_dir, vocab_size, 1.0 if self.quick else None)
        until = args.bf16_until
        early = [m for m in methods if not sweep.begins_late(sweep.method_flags(m), until)]
        if early:
            print0(f"left out, for they change before {until:g} of the steps: {', '.join(sweep.labels(early))}")
        methods = [m for m in methods if m not in early]
        options = {"extra": extra, "data": sweep.data_key(where), "bf16_until": until}
        plan = sweep.plan(methods, chosen, seeds, **length, **options)
        devices = ["cpu"] if self.quick and not args.sizes else sweep.visible_devices(args.jobs)
        return sweep.Sweep(self.folder, where, devices), plan


def footer(context: Context, measured_on: str, info: dict[str, Any]) -> str:
    """Hardware, data, commit: what a number needs beside it."""
    hardware = f"{info['gpu_count']} x {info['gpu']}" if info["gpu"] else f"{info['cpu']}, {info['cpu_count']} cores"
    parts = ["QUICK: small sizes, a check of the command" if context.quick else "", hardware, measured_on]
    return "; ".join(p for p in [*parts, f"torch {info['torch']}", f"commit {info['commit'] or 'unknown'}"] if p)


# ----------------------------------------------------------------------------------------------------------------------
# Table 1: quadratic error of every rounding, and whether it is unbiased

# rounding: (MSE over N(0, 1) in 1e-3, unbiased); the paper's Table 1. Rows that it does not have: None.
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
    """How many times better the mean of `draws` products of two quantized operands (24 x 128) is than one: `draws`
    itself without a bias, up to some scatter; a bias is where it stops growing."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(24, 128, generator=generator) for _ in range(2))
    spec, target = get_rounding(rounding), a.double() @ b.double().T
    total, single = torch.zeros_like(target), 0.0
    for seed in range(draws):
        kw = {"seed": seed, "rht_dim": 128 if spec.ms_eden else 0}
        qa, qb = (quantize_reference(v, spec, stream=i, **kw).dequantize().double() for i, v in enumerate((a, b)))
        product = qa @ qb.T
        total += product
        single += float((product - target).square().sum()) / draws
    return single / float((total / draws - target).square().sum())


def table1(context: Context) -> Outcome:
    samples = context.args.samples or (1 << 19 if context.quick else 1 << 22)
    draws = context.args.draws or (128 if context.quick else 1024)
    rows, numbers = [], {}
    names = [n for n in nf.ROUNDINGS if n not in ("scale_search", "ms_eden_search")]  # names for one of the others
    for name in names:
        settings = {"rounding": name, "samples": samples, "draws": draws, "seed": 1}
        value = context.piece(
            "table1",
            settings,
            lambda name=name: {
                "mse": 1e3 * mean_squared_error(name, samples=samples, seed=1),
                "gain": unbiasedness_gain(name, draws),
            },
        )
        mse, unbiased = TABLE_1.get(name, (None, None))
        off = f"{100 * (value['mse'] / mse - 1):+.1f}%" if mse else "-"
        said = "-" if unbiased is None else "yes" if unbiased else "no"
        rows.append([name, mse or "-", round(value["mse"], 2), off, said, round(value["gain"])])
        numbers[name] = value

    def plot(axes) -> None:
        at = range(len(names))
        axes.bar([i - 0.2 for i in at], [TABLE_1.get(n, (0,))[0] for n in names], 0.4, label="paper")
        axes.bar([i + 0.2 for i in at], [numbers[n]["mse"] for n in names], 0.4, label="here")
        axes.set_xticks(list(at), names, rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("MSE over N(0, 1), 1e-3")
        axes.legend()

    return Outcome(
        "Table 1: quadratic error over N(0, 1), 1e-3, and unbiasedness",
        ["rounding", "paper", "here", "off", "unbiased (paper)", f"gain of {draws} draws"],
        rows,
        [f"gain: the mean of {draws} products is so many times better than one product; {draws} without a bias"],
        numbers,
        plot,
        f"{samples:,} samples, seed 1",
    )


# ----------------------------------------------------------------------------------------------------------------------
# Table 2: traffic of range alignment


# (bits read, bits written, mma.m16n8k16 per group) of each kernel; the paper's Table 2.
TABLE_2 = {"naive": ("4.5 + 4.5", "0 + 4.5", 2), "post hoc": ("4.5 + 1", "5 + 0.5", 1)}


def table2(context: Context) -> Outcome:
    counted = context.piece("table2", {"rows": traffic.ROWS, "columns": traffic.COLUMNS}, traffic.measure)
    rows, totals = [], {}
    for alignment, launches in counted.items():
        kernels = [
            (traffic.of_operand(launch["read"]), traffic.of_operand(launch["written"]), launch["rotations"])
            for launch in launches
        ]
        kernels = [k for k in kernels if k[0] + k[1] > 0]
        read, written, rotations = zip(*kernels)
        paper_read, paper_written, paper_rotations = TABLE_2[alignment]
        totals[alignment] = sum(read) + sum(written)
        rows += [
            [alignment, "bits read per element", paper_read, " + ".join(f"{v:g}" for v in read)],
            [alignment, "bits written per element", paper_written, " + ".join(f"{v:g}" for v in written)],
            [alignment, "rotations per element", paper_rotations, f"{sum(rotations):g}"],
        ]
    saving = 1 - totals["post hoc"] / totals["naive"]
    rows.append(["saving", "of all traffic", "about 20%", f"{100 * saving:.1f}%"])
    notes = [
        "counted while the kernels run in Triton's interpreter; a rotation is what the paper counts as one "
        "mma.m16n8k16 per group of 16 values",
        "0.25 bits more than the paper's in each post hoc kernel: EDEN's S, an FP32 number for 128 values, is written "
        "by the first kernel and read by the second",
    ]

    def plot(axes) -> None:
        kinds = ("read", "written")
        for i, alignment in enumerate(counted):
            bottom = 0.0
            for j, kind in enumerate(kinds):
                bits = sum(traffic.of_operand(launch[kind]) for launch in counted[alignment])
                axes.bar(i, bits, 0.5, bottom=bottom, color=f"C{j}", label=kind if i == 0 else None)
                bottom += bits
        axes.set_xticks(range(len(counted)), list(counted))
        axes.set_ylabel("bits moved per element")
        axes.legend()

    title = "Table 2: memory traffic and rotations of MS-EDEN requantization"
    numbers = {"launches": counted, "bits": totals, "saving": saving}
    return Outcome(title, ["alignment", "what", "paper", "here"], rows, notes, numbers, plot, "exact counts")


# ----------------------------------------------------------------------------------------------------------------------
# Figure 9: does the mean of many quantized backward passes approach the unquantized one

FIG9_METHODS = ("nvidia", "four_over_six", "tetrajet_v2", "clover", "clover_search")


def backward_left_alone(recipe: Recipe) -> Recipe:
    """The recipe's forward pass, and the backward that its quantized one estimates: each operand from the tensor that
    the recipe takes it from (the forward's values, or the unquantized ones), not rounded."""

    def exact(gemm: Gemm) -> Gemm:
        return Gemm(Operand(), Operand(raw=gemm.b.raw))

    grads = {"grad_input": exact(recipe.grad_input), "grad_weight": exact(recipe.grad_weight)}
    return replace(recipe, name=f"{recipe.name}, exact backward", **grads)


def block_gradient(model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gradient of the loss for the attention weights of block 0, float64, flat: the furthest from the loss, so that
    all layers' rounding is in it."""
    weights = list(model.transformer.h[0].attn.parameters())
    grads = torch.autograd.grad(model(x, y), weights)
    return torch.cat([g.double().flatten() for g in grads])


def concentration(model, recipe: Recipe, x: torch.Tensor, y: torch.Tensor, draws: Sequence[int]) -> dict:
    """{"single": mean error of one pass, "errors": {B: error of the mean of B passes}}, relative squares, against the
    unquantized backward of the same quantized forward."""
    nf.convert(model, backward_left_alone(recipe), verbose=False)
    target = block_gradient(model, x, y)
    nf.convert(model, recipe, verbose=False)
    norm = float(target.square().sum())
    total, single, errors = torch.zeros_like(target), 0.0, {}
    torch.manual_seed(0)
    for b in range(1, draws[-1] + 1):
        gradient = block_gradient(model, x, y)
        total += gradient
        single += float((gradient - target).square().sum()) / norm
        if b in draws:
            errors[b] = float((total / b - target).square().sum()) / norm
    return {"single": single / draws[-1], "errors": errors}


def slope(errors: dict[int, float], last: int = 3) -> float:
    """Of log error over log B, least squares through the `last` largest B: -1 without a bias, 0 on a plateau."""
    points = [(math.log(b), math.log(e)) for b, e in sorted(errors.items())][-last:]
    mean_x, mean_y = (sum(v) / len(points) for v in zip(*points))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def trained_model(context: Context, size: str) -> tuple[Any, str, str]:
    """(a bf16 model of that size on this machine's device, its checkpoint's tag, the data's folder); trained first if
    it is not there."""
    where, plan = context.runs(["bf16"], [size], ratio=2.0)
    where, run = replace(where, keep=("bf16",)), plan[0]
    checkpoints = where.folder / "base_checkpoints"
    if not list((checkpoints / run.tag).glob("model_*")):
        where.result_path(run).unlink(missing_ok=True)
    sweep.run_sweep(where, "trained_model", [run])
    device = torch.device("cpu" if where.devices == ["cpu"] else "cuda")
    with sweep.base_directory(where.folder):
        model, tokenizer, _ = load_model_from_dir(checkpoints, device, "train", run.tag)
        batches = tokenizing_distributed_data_loader_bos_bestfit(
            tokenizer, 4, model.config.sequence_len, "val", device=device, data_dir=where.data_dir
        )
        x, y = next(iter(batches))
    # FP32 throughout: BF16's rounding of activations and gradients would be a floor under what is measured.
    return (model.float(), x, y), run.tag, where.data_dir


def fig9(context: Context) -> Outcome:
    draws = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    draws = [b for b in draws if b <= (context.args.draws or (32 if context.quick else 1024))]
    model, tag, data = None, None, None
    curves = {}
    for method in FIG9_METHODS:

        def compute(method=method):
            nonlocal model, tag, data
            if model is None:
                model, tag, data = trained_model(context, "d8")
            value = concentration(model[0], get_recipe(method), model[1], model[2], draws)
            return value | {"measured_on": f"{tag}, data {data}, a batch of 4 validation sequences"}

        settings = {"method": method, "draws": draws, "sizes": context.args.sizes, "extra": context.args.extra}
        settings |= {"tokens": context.args.tokens, "ratio": context.args.ratio, "quick": context.quick}
        settings |= {"data_dir": context.args.data_dir}
        value = context.piece("fig9", settings, compute)
        value["errors"] = {int(b): e for b, e in value["errors"].items()}
        curves[method] = value
    # The paper's Figure 9 and Appendix A.
    paper = {m: "1/B" for m in FIG9_METHODS} | {"four_over_six": "plateau", "clover_search": "-"}
    rows = []
    for method, curve in curves.items():
        gain = curve["single"] / curve["errors"][draws[-1]]
        rows.append([method, paper[method], round(slope(curve["errors"]), 2), round(gain, 1), f"{curve['single']:.3g}"])

    def plot(axes) -> None:
        for method, curve in curves.items():
            axes.loglog(list(curve["errors"]), list(curve["errors"].values()), marker="o", markersize=3, label=method)
        first = max(c["single"] for c in curves.values())
        axes.loglog(draws, [first / b for b in draws], "k:", label="1/B")
        axes.set_xlabel("backward passes averaged, B")
        axes.set_ylabel("relative square error, attention of block 0")
        axes.legend(fontsize=7)

    return Outcome(
        "Figure 9: concentration of the mean of B quantized backward passes, attention block 0 of a trained model",
        ["method", "paper", "slope", f"gain of {draws[-1]}", "error of one pass"],
        rows,
        [
            f"slope of log error over log B through the last points: -1 unbiased, towards 0 a plateau; gain: the mean "
            f"of {draws[-1]} passes against one",
            "the model is trained in bf16 and then converted, as in the paper; the target is the unquantized backward "
            "of the method's own forward",
        ],
        {"curves": curves},
        plot,
        curves[FIG9_METHODS[0]]["measured_on"],
    )


# ----------------------------------------------------------------------------------------------------------------------
# Figures 1, 2, 4, 5 and Table 5: training runs


@dataclass(frozen=True)
class Claim:
    """The paper says that the gap of `better` is smaller than that of `worse`."""

    text: str
    better: str
    worse: str

    def verdict(self, results: list[dict], size: str) -> str:
        d = sweep.difference(results, size, self.better, self.worse)
        if not d.n:
            return "no runs"
        if not d.decided:
            return f"undecided ({d} points)"
        return f"{'agrees' if d.mean < 0 else 'DISAGREES'} ({d} points)"


def training(
    context: Context,
    name: str,
    title: str,
    methods: Sequence[str],
    claims: Sequence[Claim],
    sizes: Sequence[str],
    ratio: float,
    paper: dict[str, tuple[float, ...]] | None = None,
    notes: Sequence[str] = (),
) -> tuple[Outcome, list[dict]]:
    """Trains the methods, or takes their runs from --results, and tabulates their gaps to bf16 beside the paper's
    numbers: of bf16 the BPB, of the others the gaps in percent, for several models."""
    environment, data = None, ""
    if context.args.results:
        content = sweep.stored(context.args.results)
        environment, data = content["environment"], content["data"]
        wanted = [s for s in context.args.sizes.split(",") if s]
        results = [r for r in content["results"] if r["size"] in wanted or not wanted]
        results = [r for r in results if r["method"] in sweep.labels(methods)]
        if not results:
            raise UserError(f"{context.args.results} has no run of {name}'s methods (of these sizes)")
    else:
        where, plan = context.runs(methods, sizes, ratio)
        results, data = sweep.run_sweep(where, f"{name}_runs", plan), sweep.data_name(where.data_dir)
    names = [m for m in sweep.labels(methods) if any(r["method"] == m for r in results)]
    found = list(dict.fromkeys(r["size"] for r in results))
    rows, gaps = [], {}
    for size in found:
        for method in names:
            bpb = sweep.by_seed(results, size, method)
            if not bpb:
                continue
            value = sweep.gap(results, size, method)
            gaps[size, method] = value
            shown = "-" if method == "bf16" else str(value)
            mean = sum(bpb.values()) / len(bpb)
            form = "{:.4f}" if method == "bf16" else "{:+.2f}"
            said = " / ".join(form.format(v) for v in (paper or {}).get(method, ())) or "-"
            rows.append([size, method, said, f"{mean:.4f}", shown, len(bpb)])
    claims = [c for c in claims if {c.better, c.worse} <= set(names)]
    said = [f"the paper: {c.text}. Here, {size}: {c.verdict(results, size)}" for c in claims for size in found]

    def plot(axes) -> None:
        others = [m for m in names if m != "bf16"]
        for i, size in enumerate(found):
            at = [j + 0.8 * (i - (len(found) - 1) / 2) / len(found) for j in range(len(others))]
            values = [gaps.get((size, m)) for m in others]
            means = [v.mean if v else 0.0 for v in values]
            errors = [v.half if v and v.n > 1 else 0.0 for v in values]
            axes.bar(at, means, 0.8 / len(found), yerr=errors, capsize=3, alpha=0.6, label=f"{size}, here")
        published = {j: paper[m] for j, m in enumerate(others) if paper and m in paper}
        for marker, model, values in zip("os", PAPER_MODELS, zip(*published.values())):
            axes.plot(list(published), values, f"k{marker}", mfc="none", label=f"{model}, paper")
        seeds = {m: max(v.n for (_, name), v in gaps.items() if name == m) for m in others}
        shown = [m if len(set(seeds.values())) == 1 else f"{m}, {n} seed{'s' * (n > 1)}" for m, n in seeds.items()]
        axes.set_xticks(range(len(others)), shown, rotation=45, ha="right", fontsize=7)
        axes.set_ylabel("increase of validation BPB over bf16, %")
        axes.legend(fontsize=7)

    seeds, tokens = sorted({r["seed"] for r in results}), sorted({r["tokens"] for r in results})
    numbers: dict[str, Any] = {"gaps": {f"{size} {m}": dataclasses.asdict(v) for (size, m), v in gaps.items()}}
    if not context.args.results:
        numbers["results"] = [{k: v for k, v in r.items() if k != "environment"} for r in results]
    outcome = Outcome(
        title,
        ["size", "method", "paper, %", "val BPB", "gap to bf16, %", "seeds"],
        rows,
        [*said, "intervals are 95%, paired by seed: the same initialization and data for all methods", *notes],
        numbers,
        plot,
        f"data {data}, {'/'.join(f'{t:,}' for t in tokens)} training tokens, seeds {seeds}",
        environment,
    )
    return outcome, results


FIGURE_ONLY = "the paper's numbers are in a plot only; its text makes the claims above"


def fig1(context: Context) -> Outcome:
    pairs = (("a", "wgrad"), ("c", "dgrad with weight requantization"), ("e", "both GEMMs"))
    claims = [
        Claim(f"({p}) {what}: MS-EDEN beats SR", f"fig1{p}_ms_eden", f"fig1{p}_sr") for p, what in pairs
    ] + [
        Claim("MS-EDEN with weight requantization (e) beats SR without (d)", "fig1e_ms_eden", "fig1d_sr"),
        Claim("SR without weight requantization (b) beats SR with it (c)", "fig1b_sr", "fig1c_sr"),
    ]  # fmt: skip
    methods = ["bf16", *[f"fig1{p}_sr" for p in "abcde"], *[f"fig1{p}_ms_eden" for p in "ace"]]
    title = "Figure 1: quantization of selected operands of the backward pass"
    return training(context, "fig1", title, methods, claims, ["llama-30M"], 25.0, notes=[FIGURE_ONLY])[0]


def fig2(context: Context) -> Outcome:
    claims = [
        Claim("4/6 improves native 1x16 scales", "fig2_1x16_four_over_six", "fig2_1x16_rtn"),
        Claim("4/6 improves 16x16 weight scales", "fig2_16x16_four_over_six", "fig2_16x16_rtn"),
        Claim("native scales beat square blocks (RTN)", "fig2_1x16_rtn", "fig2_16x16_rtn"),
        Claim("native scales beat square blocks (4/6)", "fig2_1x16_four_over_six", "fig2_16x16_four_over_six"),
    ]
    methods = ["bf16", *[f"fig2_{b}_{r}" for r in ("rtn", "four_over_six") for b in ("1x16", "16x16")]]
    title = "Figure 2: quantization of the forward pass"
    return training(context, "fig2", title, methods, claims, ["llama-30M"], 25.0, notes=[FIGURE_ONLY])[0]


FULL_METHODS = ("bf16", "nvidia", "four_over_six", "tetrajet_v2", "clover", "clover_search")
FULL_CLAIMS = [
    Claim(f"Clover beats {name}", "clover", method)
    for method, name in (("nvidia", "NVIDIA"), ("four_over_six", "4/6"), ("tetrajet_v2", "TetraJet-v2"))
]


def reduction(outcome: Outcome, results: list[dict], said: str) -> None:
    """Adds by how much clover's mean gap is below the best of the other systems, where all gaps are clear of zero."""
    for size in dict.fromkeys(r["size"] for r in results):
        gaps = {m: sweep.gap(results, size, m) for m in ("nvidia", "four_over_six", "tetrajet_v2", "clover")}
        if all(g.decided and g.mean > 0 for g in gaps.values()):
            best = min(v.mean for m, v in gaps.items() if m != "clover")
            outcome.notes.insert(
                0, f"clover's mean gap is {100 * (1 - gaps['clover'].mean / best):.0f}% below the best of nvidia, "
                f"four_over_six and tetrajet_v2 ({size}); the paper: {said}",
            )  # fmt: skip


def fig4(context: Context) -> Outcome:
    title = "Figure 4: fully quantized Llama-like models"
    outcome, results = training(
        context, "fig4", title, FULL_METHODS, FULL_CLAIMS, ["llama-30M"], 25.0, notes=[FIGURE_ONLY]
    )
    reduction(outcome, results, "at least 20%")
    return outcome


# Validation BPB of bf16, and its increase over that in percent; the paper's Table 5.
PAPER_MODELS = ("d20 (560M, 11B tokens)", "d32 (1.9B, 38B tokens)")
TABLE_5 = {
    "bf16": (0.7693, 0.6925),
    "nvidia": (1.57, 1.92),
    "four_over_six": (1.52, 1.76),
    "tetrajet_v2": (1.56, 1.72),
    "clover": (1.22, 1.44),
}


def table5(context: Context) -> Outcome:
    title = "Table 5: nanochat's validation BPB, increase over BF16 (paper: d20 / d32)"
    outcome, results = training(context, "table5", title, FULL_METHODS, FULL_CLAIMS, ["d8"], 20.0, TABLE_5)
    reduction(outcome, results, "15% to 25%")
    outcome.notes.append(
        "the paper's rows after SFT come from the whole pipeline: COMPARE=1 QAT_METHOD=clover bash speedrun_fp4.sh"
    )
    return outcome


def fig5(context: Context) -> Outcome:
    outcome, results = training(
        context, "table5", "Figure 5", FULL_METHODS, FULL_CLAIMS, ["d8"], 20.0, TABLE_5,
    )  # fmt: skip
    # Runs that were evaluated at the ends alone: the mean training loss of parts of the run, on the same batches.
    loss = any(len(r["curve"]) < 4 for r in results) and all("loss_curve" in r for r in results)
    what = "training loss" if loss else "validation BPB"
    curves: dict[str, dict[str, list]] = {}
    for size in dict.fromkeys(r["size"] for r in results):
        of_size = {(r["method"], r["seed"]): r["loss_curve" if loss else "curve"] for r in results if r["size"] == size}
        base = {seed: {c[0]: c[1] for c in curve} for (method, seed), curve in of_size.items() if method == "bf16"}
        for method in FULL_METHODS[1:]:
            points: dict[int, list[float]] = {}
            for seed in base:
                for step, value, *_ in of_size.get((method, seed), ()):
                    if step and step in base[seed]:
                        points.setdefault(step, []).append(100 * (value / base[seed][step] - 1))
            if points:
                curves.setdefault(size, {})[method] = [[s, sum(v) / len(v)] for s, v in sorted(points.items())]
    outcome.numbers["curves"] = curves
    outcome.title = f"Figure 5: increase of the {what} over BF16 in the course of training"
    outcome.header, outcome.rows = (
        ["size", "method", "gap in % at steps"],
        [
            [size, method, "  ".join(f"{s}: {g:+.2f}" for s, g in points[:: max(1, len(points) // 6)])]
            for size, methods in curves.items()
            for method, points in methods.items()
        ],
    )

    def plot(axes) -> None:
        for size, methods in curves.items():
            for method, points in methods.items():
                axes.plot(*zip(*points), label=f"{method}, {size}" if len(curves) > 1 else method)
        axes.set_xlabel("step")
        axes.set_ylabel(f"increase of the {what} over bf16, %")
        axes.legend(fontsize=7)

    outcome.plot = plot
    return outcome


# ----------------------------------------------------------------------------------------------------------------------
# Beyond the paper: the other systems, where Clover's gap comes from, and what can be done about it

OTHER_SYSTEMS = (
    "bf16", "fp8", "clover", "nvidia", "nvidia_fixed_signs", "nvidia_1d", "nvidia_no_rht", "nvidia_no_sr",
    "nvidia_late_forward", "chmiel", "tetrajet_v2", "tetrajet_v2_full", "tseng", "quartet", "mxfp4_nvidia",
)  # fmt: skip


def one_size(context: Context) -> str:
    """The size of an item whose layers are named one by one. Raises UserError for several."""
    size = context.args.sizes or ("tiny" if context.quick else "d8")
    if "," in size:
        raise UserError(f"--sizes={size}: this item is of one size at a time, for example d8")
    return size


def depth_of(size: str) -> int:
    """Blocks of a size of the sweeps. Raises UserError."""
    sweep.size_flags(size)
    return {"tiny": 2}.get(size) or (llama.SIZES[size[6:]].layers if size.startswith("llama-") else int(size[1:]))


def ends_in_bf16(method: str, size: str) -> str:
    """The variant "label: flags" of a method with its first and last block in BF16; NVIDIA keeps some at the ends."""
    blocks = f"transformer.h.0.*=bf16,transformer.h.{depth_of(size) - 1}.*=bf16"
    return f"{method}_ends_bf16: {' '.join(sweep.changed(method, blocks))}"


def systems(context: Context) -> Outcome:
    claims = [
        Claim("NVFP4 has a smaller gap than MXFP4 (NVIDIA: 1.5% and 2.5%)", "nvidia", "mxfp4_nvidia"),
        Claim(
            "a BF16 forward in the last 18% of the steps helps (NVIDIA: 1.5% to 0.5%)", "nvidia_late_forward", "nvidia"
        ),
    ]
    title = "Other systems: FP8, NVIDIA's recipe piece by piece, Chmiel, Tseng, Quartet, MXFP4"
    chosen = [m for m in OTHER_SYSTEMS if m in QUICK or not context.quick]
    chosen.append(ends_in_bf16("nvidia", one_size(context)))
    return training(context, "systems", title, chosen, claims, [one_size(context)], 20.0)[0]


# With --quick one of each sort.
QUICK = ("bf16", "fp8", "clover", "nvidia", "quartet", "mxfp4_nvidia", "clover_masked", "clover_late_forward",
         "clover_up_fp8")  # fmt: skip

REMEDIES = (
    "clover_search", "clover_search_forward", "clover_search_backward", "clover_weight_search", "clover_masked",
    "clover_rotated", "clover_warmup", "clover_late_bf16", "clover_late_forward", "clover_late_backward",
    "clover_refined", "clover_late_refined", "clover_late", "clover_late_fp8", "clover_up_fp8",
    "clover_qkv_fp8", "clover_up_bf16", "clover_fp8_input", "clover_fp8_weight", "clover_fp8_forward",
    "clover_rates_up", "clover_rates_down", "clover_less_decay", "clover_ema", "clover_q_ema", "clover_late_ema",
    "clover_late_q_ema", "clover_reset", "clover_hot", "clover_down_hot", "clover_feedback", "clover_feedback_first",
    "clover_search_feedback", "clover_shifted", "clover_shifted_feedback", "clover_dithered", "clover_search_dithered",
    "clover_late_refined_bf16", "clover_feedback_late_bf16",
)  # fmt: skip


def remedies(context: Context) -> Outcome:
    chosen = [m for m in REMEDIES if m in QUICK or not context.quick]
    size = one_size(context)
    chosen = [*(FULL_METHODS if context.args.results else ("bf16", "clover")), *chosen, ends_in_bf16("clover", size)]
    methods = list(dict.fromkeys(chosen))
    outcome, results = training(context, "remedies", "Remedies on top of Clover", methods, [], [size], 20.0)
    outcome.header = ["size", "method", "work in 4 / 8 / 16 bits, %", *outcome.header[3:]]
    outcome.header += ["minus clover", "of clover's", "BF16 forward: gap", "of clover's"]
    for row in outcome.rows:
        size, method = row[:2]
        work = next(r["gemm_work"] for r in results if (r["size"], r["method"]) == (size, method))
        row[2] = " / ".join(f"{100 * work[bits]:.1f}" for bits in ("4", "8", "16"))
        row.append("-" if method == "clover" else str(sweep.difference(results, size, method, "clover")))
        for value in ("val_bpb", "val_bpb_bf16"):
            gap, clover = (sweep.gap(results, size, m, value=value) for m in (method, "clover"))
            own = [str(gap)] if value != "val_bpb" else []
            row += ["-"] * (1 + len(own)) if method == "bf16" else [*own, f"{gap.mean / clover.mean:.2f}x"]
    outcome.notes += [
        "work: the linear layers' multiply-adds over all steps, by a GEMM's wider operand; more than 100% where "
        "operands have two terms",
        "a run is evaluated with the forward pass that it ends with; BF16 forward: the same weights, evaluated alike",
    ]
    return outcome


def attribution_methods(depth: int) -> list[str]:
    """The runs that take clover apart, as "label: flags": operand, kind of layer, half of the depth, phase."""
    forward = "fig2_1x16_four_over_six"  # the forward of clover alone
    methods = {
        "bf16": sweep.changed("bf16"),
        "all": sweep.changed("clover"),
        "forward": sweep.changed(forward),
        "forward, input": sweep.changed("clover_input"),
        "forward, weight": sweep.changed("clover_weight"),
        "backward": sweep.changed("fig1e_ms_eden"),
        "backward, dgrad": sweep.changed("fig1c_ms_eden"),
        "backward, wgrad": sweep.changed("fig1a_ms_eden"),
    }
    for kind, pattern in sweep.LAYER_KINDS.items():
        methods[f"forward, {kind}"] = sweep.changed("bf16", f"{pattern}={forward}")
        methods[f"input, {kind}"] = sweep.changed("bf16", f"{pattern}=clover_input")
        methods[f"weight, {kind}"] = sweep.changed("bf16", f"{pattern}=clover_weight")
        methods[f"all but {kind}"] = sweep.changed("clover", f"{pattern}=bf16")
    for half, blocks in (("first", range(depth // 2)), ("second", range(depth // 2, depth))):
        patterns = ",".join(f"transformer.h.{i}.*={forward}" for i in blocks)
        methods[f"forward, {half} half"] = sweep.changed("bf16", patterns)
    for first, last in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        end = f",{last}=bf16" if last < 1 else ""
        methods[f"steps {100 * first:.0f}-{100 * last:.0f}%"] = sweep.changed("bf16", "", f"{first}=clover{end}")
    return [f"{label.replace(', ', '-').replace(' ', '_')}: {' '.join(flags)}" for label, flags in methods.items()]


def attribution(context: Context) -> Outcome:
    """Gaps of parts of clover, and what their operands look like."""
    size = one_size(context)
    methods = attribution_methods(depth_of(size))
    if context.quick:  # one of each sort
        wanted = ("bf16", "all", "forward-input", "forward-up", "all_but_up", "steps_75-100%")
        methods = [m for m in methods if m.partition(":")[0] in wanted]
    title = "Where Clover's gap comes from: only this part is quantized"
    outcome, _ = training(context, "attribution", title, methods, [], [size], 20.0)
    outcome.rows = [[row[0], row[1], *row[3:]] for row in outcome.rows]
    outcome.header = ["size", "quantized", *outcome.header[3:]]
    return outcome


def operand_statistics(x: torch.Tensor) -> dict[str, float]:
    """What could make an operand (R, K) hard to quantize along K.

    error: of 4/6, relative square; kurtosis: 3 for a Gaussian; peak: largest magnitude over rms; top channels: share of
    the energy in the 1% of the columns that have most; rank: exp(entropy of the spectrum's shares) over its length.
    """
    x = x.detach().float().reshape(-1, x.shape[-1])
    energy = x.square()
    columns = energy.sum(0).sort(descending=True).values
    shares = torch.linalg.svdvals(x[:4096]).square()
    shares = shares / shares.sum()
    q = nf.quantize(x, "four_over_six").dequantize()
    return {
        "error": float((q - x).square().sum() / energy.sum()),
        "kurtosis": float(energy.square().mean() / energy.mean().square()),
        "peak": float(x.abs().max() / energy.mean().sqrt()),
        "top channels": float(columns[: max(1, len(columns) // 100)].sum() / columns.sum()),
        "rank": float(torch.special.entr(shares).sum().exp() / len(shares)),
    }


def operands(context: Context) -> Outcome:
    def compute() -> dict:
        (model, x, y), tag, data = trained_model(context, "d8")
        seen: dict[str, dict[str, list]] = {kind: {} for kind in sweep.LAYER_KINDS}
        hooks = []
        for name, layer in model.named_modules():
            for kind, pattern in sweep.LAYER_KINDS.items():
                if fnmatch.fnmatchcase(name, pattern):

                    def keep(layer, inputs, output, seen=seen[kind]):
                        seen.setdefault("input", []).append(operand_statistics(inputs[0]))
                        seen.setdefault("weight", []).append(operand_statistics(layer.weight))
                        if output.requires_grad:
                            output.register_hook(
                                lambda e, seen=seen: seen.setdefault("grad_output", []).append(operand_statistics(e))
                            )

                    hooks.append(layer.register_forward_hook(keep))
        model(x, y).backward()
        for hook in hooks:
            hook.remove()
        mean = {
            kind: {o: {k: sum(s[k] for s in many) / len(many) for k in many[0]} for o, many in found.items()}
            for kind, found in seen.items()
        }
        return {"operands": mean, "measured_on": f"{tag}, data {data}, a batch of 4 validation sequences"}

    settings = {"sizes": context.args.sizes, "extra": context.args.extra, "tokens": context.args.tokens}
    settings |= {"data_dir": context.args.data_dir}
    value = context.piece("operands", settings | {"ratio": context.args.ratio, "quick": context.quick}, compute)
    names = ["error", "kurtosis", "peak", "top channels", "rank"]
    found = [(kind, o, s) for kind, by_operand in value["operands"].items() for o, s in by_operand.items()]
    rows = [[kind, o, *(f"{s[n]:.3g}" for n in names)] for kind, o, s in found]

    def plot(axes) -> None:
        axes.bar(range(len(found)), [s["error"] for _, _, s in found])
        axes.set_xticks(range(len(found)), [f"{k} {o}" for k, o, _ in found], rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("relative square error of 4/6")

    notes = [
        "means over the layers of a kind, of a model trained in bf16",
        "error: of 4/6, relative square; kurtosis: 3 for a Gaussian; peak: largest magnitude over rms; top channels: "
        "share of the energy in the 1% largest columns; rank: exp(entropy of the spectrum) over its length",
    ]
    title = "What the operands look like"
    return Outcome(title, ["layers", "operand", *names], rows, notes, value, plot, value["measured_on"])


# ----------------------------------------------------------------------------------------------------------------------
# Figure 6, Table 6: speed of linear layers


def benchmark(path: str) -> tuple[list[dict], dict]:
    """(records, environment) of a file that scripts.bench_* wrote. Raises UserError."""
    try:
        content = json.loads(Path(path).read_text())
        return content["records"], content["environment"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is not the JSON file of a benchmark ({type(e).__name__}: {str(e)[:80]})") from None


def fig6(context: Context) -> Outcome:
    measured, environment = benchmark(context.args.results) if context.args.results else (None, None)
    on_gpu = bool(measured) or (torch.cuda.is_available() and not context.quick)
    machines = ["rtx5090", "h200"]
    if on_gpu:
        machines = [environment["gpu"] if environment else torch.cuda.get_device_name()]
    models = context.args.models or ("800M,3B,7B" if on_gpu else "800M,3B,7B,22B")
    rows, numbers = [], {}

    def measure() -> list[dict]:
        path = context.folder / "bench_linear.json"
        command = [sys.executable, "-m", "scripts.bench_linear", f"--models={models}", f"--json={path}"]
        command.append("--passes=forward+backward")
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"bench_linear failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return json.loads(path.read_text())["records"]

    for machine in machines:
        if on_gpu:
            records = measured or context.piece("fig6", {"models": models, "machine": machine}, measure)
        else:
            methods = ["bf16", *bench_linear.METHODS]
            passes = ["forward+backward"]
            records = bench_linear.predict(
                roofline.MACHINES[machine], models.split(","), methods, roofline.TOKENS, passes
            )
        label = machine if on_gpu else f"predicted, {machine}"
        numbers[label] = records
        for r in records:
            if r["pass"] == "forward+backward" and r["method"] != "bf16" and r["ratio"]:
                paper = "up to 4.2 (RTX 5090)" if r["method"] == "clover" else "-"
                where = label if r["mode"] in ("predicted", "eager") else f"{label}, {r['mode']}"
                rows.append([where, r["model"], r["method"], paper, round(1 / r["ratio"], 2), round(r["ms"], 2)])

    def plot(axes) -> None:
        for where in dict.fromkeys(r[0] for r in rows):
            mine = [r for r in rows if r[0] == where and r[2] == "clover"]
            axes.plot([r[1] for r in mine], [r[4] for r in mine], marker="o", label=f"clover, {where}")
        axes.axhline(1.0, color="k", linewidth=0.5)
        axes.set_ylabel("speedup over BF16, forward + backward")
        axes.legend(fontsize=7)

    notes = ["the paper: more than 4x over BF16, and about 70% more than Quartet's kernels, on an RTX 5090"]
    if not on_gpu:
        notes.append(
            "PREDICTIONS from byte, instruction and FLOP counts (scripts.bench_linear --roofline), no measurement"
        )
    header = ["machine", "model", "method", "paper, x", "here, x BF16", "ms"]
    title = "Figure 6, Table 6: speed of the linear layers of Llama-like models, forward + backward"
    what = "8 x 2048 tokens, the paper's Table 6 shapes"
    return Outcome(title, header, rows, notes, numbers, plot, what, environment)


# ----------------------------------------------------------------------------------------------------------------------
# Table 7: time by operation

# kind of work as scripts.bench_train names it: (forward, backward), percent of the pass; the paper's Table 7, whose
# rows of one kind are added up: LM head and loss; grad quant. and act. requant.
TABLE_7 = {
    "GEMM": (24, 19),
    "attention": (21, 18),
    "LM head and loss": (18, 13),
    "quantize": (8, None),
    "rotate and quantize": (None, 21),
    "abs-max": (5, None),
    "ReLU^2": (7, 4),
    "RMSNorm": (6, 7),
    "gradient accumulation": (None, 3),
}


def table7(context: Context) -> Outcome:
    measured, environment = benchmark(context.args.results) if context.args.results else (None, None)
    on_gpu = bool(measured) or (torch.cuda.is_available() and not context.quick)
    flags = ["--depth=26", "--methods=clover", "--total-batch-size=524288"]
    if not on_gpu:
        flags = (
            "--depth=2 --methods=clover --head-dim=64 --seq-len=64 --vocab-size=256 --total-batch-size=128 "
            "--micro-batch=2 --rounds=1 --calls=1"
        ).split()

    def measure() -> list[dict]:
        path = context.folder / "bench_train.json"
        command = [sys.executable, "-m", "scripts.bench_train", f"--json={path}", *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"bench_train failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        return json.loads(path.read_text())["records"]

    records = measured or context.piece("table7", {"flags": flags, "gpu": environment_info()["gpu"]}, measure)
    ms = {(r["phase"], r["kind"]): r["ms"] for r in records if r.get("variant") == "clover" and "phase" in r}
    sums = {phase: sum(v for (p, _), v in ms.items() if p == phase) for phase in ("forward", "backward")}
    kinds = [*TABLE_7, *sorted({k for p, k in ms if p in sums} - set(TABLE_7))]
    shares = {k: [100 * ms.get((p, k), 0.0) / sums[p] for p in sums] for k in kinds}
    rows = [
        [
            kind,
            *(
                v
                for said, here in zip(TABLE_7.get(kind, (None, None)), shares[kind])
                for v in (said or "-", f"{here:.0f}")
            ),
        ]
        for kind in kinds
    ]

    def plot(axes) -> None:
        at = range(len(kinds))
        for i, phase in enumerate(sums):
            axes.barh([j + 0.2 * (2 * i - 1) for j in at], [shares[k][i] for k in kinds], 0.4, label=phase)
        axes.set_yticks(list(at), kinds, fontsize=7)
        axes.set_xlabel("% of the pass")
        axes.legend()

    what = "d26, micro-batch as large as fits" if on_gpu else "a model of two layers: a check of the command"
    return Outcome(
        "Table 7: time by operation, clover, % of the pass (paper: 1.1B parameters on an RTX 5090)",
        ["operation", "forward, paper", "here", "backward, paper", "here"],
        rows,
        [f"forward {sums['forward']:.1f} ms, backward {sums['backward']:.1f} ms a micro-batch"],
        {"records": records},
        plot,
        what,
        environment,
    )


# ----------------------------------------------------------------------------------------------------------------------
# The command

ITEMS: dict[str, Callable[[Context], Outcome]] = {
    "table1": table1,
    "table2": table2,
    "fig1": fig1,
    "fig2": fig2,
    "fig4": fig4,
    "fig5": fig5,
    "table5": table5,
    "fig6": fig6,
    "table7": table7,
    "fig9": fig9,
    "systems": systems,
    "attribution": attribution,
    "operands": operands,
    "remedies": remedies,
}
SAME = {"table6": "fig6"}


def save(context: Context, name: str, outcome: Outcome) -> None:
    """Prints the item and writes its JSON and its plot."""
    info = outcome.environment or environment_info()
    last = footer(context, outcome.measured_on, info)
    lines = [f"\n{outcome.title}", table(outcome.header, outcome.rows), *[f"- {note}" for note in outcome.notes], last]
    print0("\n".join(lines))
    content = {
        "name": name,
        "quick": context.quick,
        "title": outcome.title,
        "table": [outcome.header, *outcome.rows],
        "notes": outcome.notes,
        "measured_on": last,
        "environment": info,
        "numbers": outcome.numbers,
    }
    path = context.folder / f"{name}.json"
    atomic_write(path, json.dumps(content, indent=1) + "\n")
    if outcome.plot:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
        outcome.plot(axes)
        axes.set_title(outcome.title[:80] + (" (quick)" if context.quick else ""), fontsize=8)
        with atomic_open(path.with_suffix(".png")) as f:
            figure.savefig(f, format="png", dpi=120)
        pyplot.close(figure)
    print0(f"written to {path}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name", help=f"all, list, or one of {', '.join([*ITEMS, *SAME])}")
    parser.add_argument("--quick", action="store_true", help="small sizes, on a CPU: a check of the command")
    parser.add_argument("--samples", type=int, default=0, help="table1: numbers that are rounded")
    parser.add_argument(
        "--draws", type=int, default=0, help="table1: products; fig9: backward passes that are averaged"
    )
    parser.add_argument("--models", default="", help="fig6: of 800M,3B,7B,22B")
    parser.add_argument(
        "--results",
        default="",
        help="train and time nothing: take the runs from this file of scripts.sweep (fig6: of scripts.bench_linear, "
        "table7: of scripts.bench_train)",
    )
    sweep.add_sweep_arguments(parser)
    parser.set_defaults(seeds=0)
    args = parser.parse_args(argv)
    if args.name == "list":
        print0("\n".join([*ITEMS, *[f"{a} (= {b})" for a, b in SAME.items()]]))
        return
    names = list(ITEMS) if args.name == "all" else [SAME.get(args.name, args.name)]
    if names[0] not in ITEMS:
        raise UserError(f"{args.name!r} is no table or figure; use all, list, or one of {', '.join([*ITEMS, *SAME])}")
    if min(args.seeds, args.samples) < 0 or args.jobs < 1 or (args.draws and args.draws < 4):
        raise UserError("--seeds and --samples cannot be negative, --jobs is at least 1 and --draws at least 4")
    default = Path(get_base_dir()) / ("reproduce_quick" if args.quick else "reproduce")
    context = Context(Path(args.folder) if args.folder else default, args.quick, args)
    context.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        try:
            save(context, name, ITEMS[name](context))
        except sweep.Interrupted as e:
            sweep.stopped(e)


if __name__ == "__main__":
    run_main(main)
