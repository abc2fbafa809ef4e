"""Figures 1, 2, 4, 5 and Table 5: training runs, their gaps to BF16, and what the paper claims about them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lab.study import sweep, sweep_results, sweep_runs
from lab.study.reproduce_common import Context, Outcome
from nanochat_fp4.errors import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.models import llama


@dataclass(frozen=True)
class Claim:
    """The paper says that the gap of `better` is smaller than that of `worse`."""

    text: str
    better: str
    worse: str

    def verdict(self, results: list[dict], size: str, pooled: bool = False) -> str:
        """pooled: by the scatter of a run, pooled over all methods; without, by that of this difference alone."""
        d = sweep_results.difference(results, size, self.better, self.worse)
        if pooled and d.n:
            d = sweep_results.pooled_differences(results, size, self.worse)[self.better]
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
    models: Sequence[str] = (),
) -> tuple[Outcome, list[dict]]:
    """Trains the methods, or takes their runs from --results, and tabulates their gaps to bf16 beside the paper's
    numbers: of bf16 the BPB, of the others the gaps in percent, for several of its models."""
    environment, data = None, ""
    if context.args.results:
        content = sweep_results.stored(context.args.results)
        environment, data = content["environment"], content["data"]
        wanted = [s for s in context.args.sizes.split(",") if s]
        results = [r for r in content["results"] if r["size"] in wanted or not wanted]
        results = [r for r in results if r["method"] in sweep_runs.labels(methods)]
        if not results:
            raise UserError(f"{context.args.results} has no run of {name}'s methods (of these sizes)")
    else:
        where, plan = context.runs(methods, sizes, ratio)
        results, data = sweep.run_sweep(where, f"{name}_runs", plan), sweep_results.data_name(where.data_dir)
    names = [m for m in sweep_runs.labels(methods) if any(r["method"] == m for r in results)]
    found = list(dict.fromkeys(r["size"] for r in results))
    rows, gaps = [], {}
    for size in found:
        for method in names:
            bpb = sweep_results.by_seed(results, size, method)
            if not bpb:
                continue
            value = sweep_results.gap(results, size, method)
            gaps[size, method] = value
            shown = "-" if method == "bf16" else str(value)
            mean = sum(bpb.values()) / len(bpb)
            form = "{:.4f}" if method == "bf16" else "{:+.2f}"
            said = " / ".join(form.format(v) for v in (paper or {}).get(method, ())) or "-"
            rows.append([size, method, said, f"{mean:.4f}", shown, len(bpb)])
    for size in found:
        run = next(r for r in results if r["size"] == size)
        if differs := sweep_results.difference_from_paper(run, data):
            notes = [*notes, f"{size} differs from the paper's runs: {differs}"]
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
        for marker, model, values in zip("os", models, zip(*published.values())):
            axes.plot(list(published), values, f"k{marker}", mfc="none", label=f"{model}, paper: other text")
        seeds = {m: max(v.n for (_, name), v in gaps.items() if name == m) for m in others}
        shown = [m if len(set(seeds.values())) == 1 else f"{m}, {n} seed{'s' * (n > 1)}" for m, n in seeds.items()]
        axes.set_xticks(range(len(others)), shown, rotation=45, ha="right", fontsize=7)
        axes.set_ylabel("increase of validation BPB over bf16, %")

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


def one_size(context: Context) -> str:
    """The size of an item whose layers are named one by one. Raises UserError for several."""
    size = context.args.sizes or ("tiny" if context.quick else "d8")
    if "," in size:
        raise UserError(f"--sizes={size}: this item is of one size at a time, for example d8")
    return size


def depth_of(size: str) -> int:
    """Blocks of a size of the sweeps. Raises UserError."""
    sweep_runs.size_flags(size)
    return {"tiny": 2}.get(size) or (llama.SIZES[size[6:]].layers if size.startswith("llama-") else int(size[1:]))


def ends_in_bf16(method: str, size: str) -> str:
    """The variant "label: flags" of a method with its first and last block in BF16; NVIDIA keeps some at the ends."""
    blocks = f"transformer.h.0.*=bf16,transformer.h.{depth_of(size) - 1}.*=bf16"
    return f"{method}_ends_bf16: {' '.join(sweep_runs.changed(method, blocks))}"


# ----------------------------------------------------------------------------------------------------------------------
# The paper's figures and its table


def compare(outcome: Outcome, results: Sequence[dict], other: str) -> None:
    """Two more columns: the gap with a BF16 forward after training, and the paired difference to another method."""
    outcome.header += ["BF16 forward: gap", f"minus {other}"]
    for row in outcome.rows:
        size, method = row[:2]
        forward = sweep_results.gap(results, size, method, value="val_bpb_bf16")
        difference = sweep_results.difference(results, size, method, other)
        row += [
            "-" if method == "bf16" else str(forward),
            "-" if method == other or not difference.n else str(difference),
        ]


# Increase of the validation loss over BF16 in percent, 30M parameters, C4 (Quartet-II, for_plots/runs.json); other
# sizes and lengths are in docs/results/paper_runs.json.
LLAMA_MODELS = ("30M, 25 tokens a parameter", "30M, 800")
FIGURE_1 = {
    "fig1a_sr": (0.19, 0.04), "fig1a_ms_eden": (0.03, 0.03), "fig1b_sr": (0.04, 0.11), "fig1c_sr": (0.19, 0.27),
    "fig1c_ms_eden": (0.0, 0.16), "fig1d_sr": (0.29, 0.30), "fig1e_sr": (0.44, 0.35), "fig1e_ms_eden": (0.19, 0.17),
}  # fmt: skip
FIGURE_2 = {
    "fig2_1x16_rtn": (1.19, 2.69), "fig2_1x16_four_over_six": (1.12, 2.36),
    "fig2_16x16_rtn": (1.43, 3.15), "fig2_16x16_four_over_six": (1.31, 2.98),
}  # fmt: skip
FIGURE_4 = {
    "nvidia": (1.60, 3.42), "four_over_six": (1.65, 3.27), "tetrajet_v2": (1.58, 2.86), "clover": (1.26, 2.45)
}  # fmt: skip
OF_LLAMAS: dict[str, Any] = {
    "notes": [
        f"the paper, %: {' / '.join(LLAMA_MODELS)}; of another text and length, so not to be compared in magnitude"
    ],
    "models": LLAMA_MODELS,
}


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
    return training(context, "fig1", title, methods, claims, ["llama-30M"], 25.0, FIGURE_1, **OF_LLAMAS)[0]


def fig2(context: Context) -> Outcome:
    claims = [
        Claim("4/6 improves native 1x16 scales", "fig2_1x16_four_over_six", "fig2_1x16_rtn"),
        Claim("4/6 improves 16x16 weight scales", "fig2_16x16_four_over_six", "fig2_16x16_rtn"),
        Claim("native scales beat square blocks (RTN)", "fig2_1x16_rtn", "fig2_16x16_rtn"),
        Claim("native scales beat square blocks (4/6)", "fig2_1x16_four_over_six", "fig2_16x16_four_over_six"),
    ]
    methods = ["bf16", *[f"fig2_{b}_{r}" for r in ("rtn", "four_over_six") for b in ("1x16", "16x16")]]
    title = "Figure 2: quantization of the forward pass"
    return training(context, "fig2", title, methods, claims, ["llama-30M"], 25.0, FIGURE_2, **OF_LLAMAS)[0]


FULL_METHODS = ("bf16", "nvidia", "four_over_six", "tetrajet_v2", "clover", "clover_search")
WITH_OTHERS = (
    *FULL_METHODS, "four_over_six_biased", "tetrajet_v2_rht128", "nvidia_full", "clover_feedback",
    "clover_feedback_late", "clover_late",
)  # fmt: skip  # where there are runs of them already
SYSTEMS = {
    "nvidia": "NVIDIA",
    "four_over_six": "4/6",
    "tetrajet_v2": "TetraJet-v2",
    "four_over_six_biased": "4/6 (in both passes)",
    "tetrajet_v2_rht128": "TetraJet-v2 (rotated by 128)",
}
FULL_CLAIMS = [Claim(f"Clover beats {name}", "clover", method) for method, name in SYSTEMS.items()]


def reduction(outcome: Outcome, results: list[dict], said: str) -> None:
    """Adds by how much clover's mean gap is below the best of the other systems, where all gaps are clear of zero."""
    for size in dict.fromkeys(r["size"] for r in results):
        gaps = {m: sweep_results.gap(results, size, m) for m in (*SYSTEMS, "clover")}
        gaps = {m: g for m, g in gaps.items() if g.n}
        if len(gaps) > 1 and "clover" in gaps and all(g.decided and g.mean > 0 for g in gaps.values()):
            best = min(v.mean for m, v in gaps.items() if m != "clover")
            below = 100 * (1 - gaps["clover"].mean / best)
            outcome.notes.insert(
                0, f"clover's mean gap is {abs(below):.0f}% {'below' if below >= 0 else 'ABOVE'} the best of "
                f"{', '.join(m for m in gaps if m != 'clover')} ({size}); the paper: {said}",
            )  # fmt: skip


def fig4(context: Context) -> Outcome:
    title = "Figure 4: fully quantized Llama-like models"
    methods = WITH_OTHERS if context.args.results else FULL_METHODS
    outcome, results = training(
        context, "fig4", title, methods, FULL_CLAIMS, ["llama-30M"], 25.0, FIGURE_4, **OF_LLAMAS
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
    methods = WITH_OTHERS if context.args.results else FULL_METHODS
    outcome, results = training(
        context, "table5", title, methods, FULL_CLAIMS, ["d8"], 20.0, TABLE_5, models=PAPER_MODELS
    )
    reduction(outcome, results, "15% to 25%")
    outcome.notes.append(
        "the paper's rows after SFT come from the whole pipeline: COMPARE=1 QAT_METHOD=clover bash speedrun_fp4.sh"
    )
    return outcome


def fig5(context: Context) -> Outcome:
    methods = WITH_OTHERS if context.args.results else FULL_METHODS
    outcome, results = training(
        context, "table5", "Figure 5", methods, FULL_CLAIMS, ["d8"], 20.0, TABLE_5, models=PAPER_MODELS,
    )  # fmt: skip
    # Runs that were evaluated at the ends alone: the mean training loss of parts of the run, on the same batches.
    loss = any(len(r["curve"]) < 4 for r in results) and all("loss_curve" in r for r in results)
    what = "training loss" if loss else "validation BPB"
    curves: dict[str, dict[str, list]] = {}
    runs: dict[str, list[tuple[list, list]]] = {}  # of each line, one for each seed
    for size in dict.fromkeys(r["size"] for r in results):
        of_size = {(r["method"], r["seed"]): r["loss_curve" if loss else "curve"] for r in results if r["size"] == size}
        base = {seed: {c[0]: c[1] for c in curve} for (method, seed), curve in of_size.items() if method == "bf16"}
        for method in methods[1:]:
            points: dict[int, list[float]] = {}
            for seed in base:
                gaps = [
                    (step, 100 * (value / base[seed][step] - 1))
                    for step, value, *_ in of_size.get((method, seed), ())
                    if step and step in base[seed]
                ]
                for step, value in gaps:
                    points.setdefault(step, []).append(value)
                if gaps:
                    runs.setdefault(f"{method}, {size}", []).append(tuple(zip(*gaps)))
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
        for name, seeds in runs.items():
            plots.curve(axes, name if len(curves) > 1 else name.partition(",")[0], seeds)
        axes.set_xlabel("step")
        axes.set_ylabel(f"increase of the {what} over bf16, %")

    outcome.plot = plot
    return outcome
