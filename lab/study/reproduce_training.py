"""Tables and figures of training runs: their gaps to BF16, and what the paper claims about them.

ITEMS has a row for each. Figures 1, 2, 4, 5 and Table 5 are the paper's. Other systems, attribution and remedies go
beyond the paper.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lab import runs as kept_runs
from lab.study import statistics, sweep, sweep_results, sweep_runs
from lab.study.long_runs import along
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
        d = statistics.difference(results, size, self.better, self.worse)
        if pooled and d.n:
            d = statistics.pooled_differences(results, size, self.worse)[self.better]
        if not d.n:
            return "no runs"
        if not d.decided:
            return f"undecided ({d} points)"
        return f"{'agrees' if d.mean < 0 else 'DISAGREES'} ({d} points)"


@dataclass(frozen=True)
class Item:
    """A table of runs. The methods may depend on --results and --sizes; with --quick a few are taken (QUICK).

    size, ratio: of the runs that it trains; "" for one_size
    paper: numbers of bf16 (BPB) and of the others (gaps in percent), one for each of `models`
    finish: adds to the outcome
    """

    title: str
    methods: Sequence[str] | Callable[[Context], Sequence[str]]
    claims: Sequence[Claim] = ()
    paper: dict[str, tuple[float, ...]] = field(default_factory=dict)
    models: Sequence[str] = ()
    notes: Sequence[str] = ()
    size: str = ""
    ratio: float = 20.0
    finish: Callable[[Context, Outcome, list[dict]], None] | None = None


def training(context: Context, name: str, item: Item) -> Outcome:
    """Trains the methods, or takes their runs from --results, and tabulates their gaps to bf16 beside the paper's."""
    methods = item.methods(context) if callable(item.methods) else item.methods
    if context.quick and name in QUICK:
        methods = [m for m in methods if m.partition(":")[0] in QUICK[name]]
    environment, numbers = None, {}
    if context.args.results:
        content = kept_runs.stored(context.args.results)
        environment, data = content["environment"], content["data"]
        wanted = [s for s in context.args.sizes.split(",") if s]
        results = [r for r in content["results"] if r["size"] in wanted or not wanted]
        results = [r for r in results if r["method"] in sweep_runs.labels(methods)]
        if not results:
            raise UserError(f"{context.args.results} has no run of {name}'s methods (of these sizes)")
    else:
        where, plan = context.runs(methods, [item.size or one_size(context)], item.ratio)
        results, data = sweep.run_sweep(where, f"{name}_runs", plan), sweep_results.data_name(where.data_dir)
        numbers["results"] = [{k: v for k, v in r.items() if k != "environment"} for r in results]
    names = [m for m in sweep_runs.labels(methods) if any(r["method"] == m for r in results)]
    sizes = list(dict.fromkeys(r["size"] for r in results))
    gaps = {(size, m): statistics.gap(results, size, m) for size in sizes for m in names}
    in_bf16 = {(size, m): statistics.gap(results, size, m, "val_bpb_bf16") for size in sizes for m in names}
    rows, notes = [], list(item.notes)
    for size in sizes:
        for method in names:
            if bpb := statistics.by_seed(results, size, method):
                form = "{:.4f}" if method == "bf16" else "{:+.2f}"
                both = ["-", "-"] if method == "bf16" else [str(of[size, method]) for of in (gaps, in_bf16)]
                said = " / ".join(form.format(v) for v in item.paper.get(method, ())) or "-"
                rows.append([size, method, said, f"{sum(bpb.values()) / len(bpb):.4f}", *both, len(bpb)])
        run = next(r for r in results if r["size"] == size)
        if differs := sweep_results.difference_from_paper(run, data):
            notes.append(f"{size} differs from the paper's runs: {differs}")
    claims = [c for c in item.claims if {c.better, c.worse} <= set(names)]
    said = [f"the paper: {c.text}. Here, {size}: {c.verdict(results, size)}" for c in claims for size in sizes]
    gaps = {key: gap for key, gap in gaps.items() if statistics.by_seed(results, *key)}
    numbers["gaps"] = {f"{size} {m}": dataclasses.asdict(gap) for (size, m), gap in gaps.items()}

    def plot(axes) -> None:
        others = [m for m in names if m != "bf16"]
        for i, size in enumerate(sizes):
            at = [j + 0.8 * (i - (len(sizes) - 1) / 2) / len(sizes) for j in range(len(others))]
            values = [gaps.get((size, m)) for m in others]
            means, errors = [v.mean if v else 0.0 for v in values], [v.half if v and v.n > 1 else 0.0 for v in values]
            axes.bar(at, means, 0.8 / len(sizes), yerr=errors, capsize=3, alpha=0.6, label=f"{size}, own forward")
            alike = [in_bf16[size, m].mean for m in others]  # NaN, and so not drawn, where a size has no such run
            axes.plot(at, alike, "_", color=plots.COLORS[1], markersize=12, label=f"{size}, BF16 forward")
        published = {j: item.paper[m] for j, m in enumerate(others) if m in item.paper}
        for marker, model, values in zip("os", item.models, zip(*published.values())):
            axes.plot(list(published), values, f"k{marker}", mfc="none", label=f"{model}, paper: other text")
        seeds = {m: max(v.n for (_, name), v in gaps.items() if name == m) for m in others}
        shown = [m if len(set(seeds.values())) == 1 else f"{m}, {n} seed{'s' * (n > 1)}" for m, n in seeds.items()]
        axes.set_xticks(range(len(others)), shown, rotation=45, ha="right", fontsize=7)
        axes.set_ylabel("increase of validation BPB over bf16, %")

    seeds, tokens = sorted({r["seed"] for r in results}), sorted({r["tokens"] for r in results})
    header = ["size", "method", "paper, %", "val BPB", "own forward: gap, %", "BF16 forward: gap, %", "seeds"]
    notes = [*said, "intervals are 95%, paired by seed: the same initialization and data for all", FORWARDS, *notes]
    measured_on = f"data {data}, {'/'.join(f'{t:,}' for t in tokens)} training tokens, seeds {seeds}"
    outcome = Outcome(item.title, header, rows, notes, numbers, plot, measured_on, environment)
    if item.finish:
        item.finish(context, outcome, results)
    return outcome


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
# What items add to the table


def compare(context: Context, outcome: Outcome, results: list[dict], other: str = "clover") -> None:
    """One more column: the paired difference to another method, own forwards."""
    outcome.header += [f"own forward: minus {other}"]
    for row in outcome.rows:
        difference = statistics.difference(results, *row[:2], other)
        row.append("-" if row[1] == other or not difference.n else str(difference))


def reduction(context: Context, outcome: Outcome, results: list[dict], said: str, more: Sequence[str] = ()) -> None:
    """Adds by how much clover's mean gap is below the best of the other systems, where all gaps are clear of zero."""
    for size in dict.fromkeys(r["size"] for r in results):
        gaps = {m: statistics.gap(results, size, m) for m in (*SYSTEMS, "clover")}
        gaps = {m: g for m, g in gaps.items() if g.n}
        if len(gaps) > 1 and "clover" in gaps and all(g.decided and g.mean > 0 for g in gaps.values()):
            clover = gaps.pop("clover").mean
            below = 100 * (1 - clover / min(g.mean for g in gaps.values()))
            where = f"{abs(below):.0f}% {'below' if below >= 0 else 'ABOVE'} the best of {', '.join(gaps)} ({size})"
            outcome.notes.insert(0, f"clover's mean gap is {where}; the paper: {said}")
    outcome.notes += more


def finish_fig5(context: Context, outcome: Outcome, results: list[dict]) -> None:
    """Gaps along the run in the place of those at its end."""
    # Runs that were evaluated at the ends alone: the mean training loss of parts of the run, on the same batches.
    loss = any(len(r["curve"]) < 4 for r in results) and all("loss_curve" in r for r in results)
    what = "training loss" if loss else "validation BPB"
    curves: dict[str, dict[str, list]] = {}
    runs: dict[str, list[tuple]] = {}  # of each line, one for each seed
    outcome.header, outcome.rows = ["size", "method", "gap in % at steps"], []
    for size in dict.fromkeys(r["size"] for r in results):
        gaps = along([r for r in results if r["size"] == size], "loss_curve" if loss else "curve")
        for method in full_methods(context)[1:]:
            if seeds := [of for of in gaps.get(method, {}).values() if of]:
                at = {step: [of[step] for of in seeds if step in of] for step in sorted(set().union(*seeds))}
                points = curves.setdefault(size, {})[method] = [[step, sum(v) / len(v)] for step, v in at.items()]
                runs[f"{method}, {size}"] = [tuple(zip(*of.items())) for of in seeds]
                few = points[:: max(1, len(points) // 6)]
                outcome.rows.append([size, method, "  ".join(f"{s}: {g:+.2f}" for s, g in few)])
    outcome.numbers["curves"] = curves
    outcome.title = f"Figure 5: increase of the {what} over BF16 in the course of training, own forward"

    def plot(axes) -> None:
        for name, seeds in runs.items():
            plots.curve(axes, name if len(curves) > 1 else name.partition(",")[0], seeds)
        axes.set_xlabel("step")
        axes.set_ylabel(f"increase of the {what} over bf16, %")

    outcome.plot = plot


def finish_attribution(context: Context, outcome: Outcome, results: list[dict]) -> None:
    outcome.rows = [[row[0], row[1], *row[3:]] for row in outcome.rows]
    outcome.header = ["size", "quantized", *outcome.header[3:]]
    compare(context, outcome, results, "all")


def finish_remedies(context: Context, outcome: Outcome, results: list[dict]) -> None:
    """Columns of what each run costs, and of its gaps beside clover's with the same forward."""
    outcome.header = ["size", "method", "work in 4 / 8 / 16 bits, %", *outcome.header[3:]]
    compare(context, outcome, results)
    outcome.header += [f"{forward} forward: of clover's" for forward in ("own", "BF16")]
    for row in outcome.rows:
        size, method = row[:2]
        work = next(r["gemm_work"] for r in results if (r["size"], r["method"]) == (size, method))
        row[2] = " / ".join(f"{100 * work[bits]:.1f}" for bits in ("4", "8", "16"))
        for value in ("val_bpb", "val_bpb_bf16"):
            gap, clover = (statistics.gap(results, size, m, value=value) for m in (method, "clover"))
            row.append("-" if method == "bf16" else f"{gap.mean / clover.mean:.2f}x")
    outcome.notes += [
        "work: the linear layers' multiply-adds over all steps, by a GEMM's wider operand; more than 100% where "
        "operands have two terms",
    ]


# ----------------------------------------------------------------------------------------------------------------------
# Methods, claims and the paper's numbers

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

# Validation BPB of bf16, and its increase over that in percent; the paper's Table 5.
PAPER_MODELS = ("d20 (560M, 11B tokens)", "d32 (1.9B, 38B tokens)")
TABLE_5 = {
    "bf16": (0.7693, 0.6925),
    "nvidia": (1.57, 1.92),
    "four_over_six": (1.52, 1.76),
    "tetrajet_v2": (1.56, 1.72),
    "clover": (1.22, 1.44),
}

# Increase of the validation loss over BF16 in percent, 30M parameters, C4 (Quartet-II, for_plots/runs.json); other
# sizes and lengths are in lab/results/paper_runs.json.
LLAMA_MODELS = ("30M, 25 tokens a parameter", "30M, 800")
FIGURE_1 = {
    "fig1a_sr": (0.19, 0.04), "fig1a_ms_eden": (0.03, 0.03), "fig1b_sr": (0.04, 0.11), "fig1c_sr": (0.19, 0.27),
    "fig1c_ms_eden": (0.0, 0.16), "fig1d_sr": (0.29, 0.30), "fig1e_sr": (0.44, 0.35), "fig1e_ms_eden": (0.19, 0.17),
}  # fmt: skip
FIGURE_2 = {
    "fig2_1x16_rtn": (1.19, 2.69), "fig2_1x16_four_over_six": (1.12, 2.36),
    "fig2_16x16_rtn": (1.43, 3.15), "fig2_16x16_four_over_six": (1.31, 2.98),
}  # fmt: skip
FIGURE_4 = {"nvidia": (1.60, 3.42), "four_over_six": (1.65, 3.27), "tetrajet_v2": (1.58, 2.86), "clover": (1.26, 2.45)}
FORWARDS = "own forward: that which a run ends with; BF16 forward: the same weights, evaluated without quantization"
NOT_COMPARABLE = (
    f"the paper, %: {' / '.join(LLAMA_MODELS)}; of another text and length, so not to be compared in magnitude"
)
OF_LLAMAS: dict[str, Any] = {"notes": [NOT_COMPARABLE], "models": LLAMA_MODELS, "size": "llama-30M", "ratio": 25.0}

OTHER_SYSTEMS = (
    "bf16", "fp8", "clover", "nvidia", "nvidia_fixed_signs", "nvidia_1d", "nvidia_no_rht", "nvidia_no_sr",
    "nvidia_full", "chmiel", "tetrajet_v2", "tetrajet_v2_rht128", "tseng", "mxfp4_nvidia", "mxfp8",
)  # fmt: skip
REMEDIES = (
    "clover_search", "clover_search_forward", "clover_search_backward", "clover_weight_search", "clover_warmup",
    "clover_late_bf16", "clover_late_forward", "clover_late_backward", "clover_refined", "clover_late",
    "clover_late_fp8", "clover_up_fp8", "clover_fp8_input", "clover_fp8_weight", "clover_fp8_forward",
    "clover_less_decay", "clover_feedback", "clover_search_feedback", "clover_late_refined_bf16",
    "clover_feedback_late_bf16",
)  # fmt: skip
QUICK = {  # with --quick one of each sort
    "fig1": ("bf16", "fig1a_sr", "fig1a_ms_eden"),
    "fig2": ("bf16", "fig2_1x16_rtn", "fig2_1x16_four_over_six"),
    "systems": ("bf16", "fp8", "clover", "nvidia", "mxfp4_nvidia", "nvidia_ends_bf16"),
    "remedies": ("bf16", "clover", "clover_feedback", "clover_late_forward", "clover_up_fp8", "clover_ends_bf16"),
    "attribution": ("bf16", "all", "forward-input", "forward-up", "all_but_up", "steps_75-100%"),
}


def full_methods(context: Context) -> Sequence[str]:
    return WITH_OTHERS if context.args.results else FULL_METHODS


def remedies_methods(context: Context) -> list[str]:
    first = WITH_OTHERS if context.args.results else ("bf16", "clover")
    return list(dict.fromkeys([*first, *REMEDIES, ends_in_bf16("clover", one_size(context))]))


def clover_apart(depth: int) -> list[str]:
    """The runs that take clover apart, as "label: flags": operand, kind of layer, half of the depth, phase."""
    forward = "fig2_1x16_four_over_six"  # the forward of clover alone
    methods = {  # label: method, changes
        "bf16": ("bf16",),
        "all": ("clover",),
        "forward": (forward,),
        "forward-input": ("clover_input",),
        "forward-weight": ("clover_weight",),
        "backward": ("fig1e_ms_eden",),
        "backward-dgrad": ("fig1c_ms_eden",),
        "backward-wgrad": ("fig1a_ms_eden",),
    }
    for kind, pattern in sweep_runs.LAYER_KINDS.items():
        methods[f"forward-{kind}"] = ("bf16", f"{pattern}={forward}")
        methods[f"input-{kind}"] = ("bf16", f"{pattern}=clover_input")
        methods[f"weight-{kind}"] = ("bf16", f"{pattern}=clover_weight")
        methods[f"all_but_{kind}"] = ("clover", f"{pattern}=bf16")
    for half, blocks in (("first", range(depth // 2)), ("second", range(depth // 2, depth))):
        methods[f"forward-{half}_half"] = ("bf16", ",".join(f"transformer.h.{i}.*={forward}" for i in blocks))
    for first, last in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        end = f",{last}=bf16" if last < 1 else ""
        methods[f"steps_{100 * first:.0f}-{100 * last:.0f}%"] = ("bf16", f"{first}=clover{end}")
    return [f"{label}: {' '.join(sweep_runs.changed(*how))}" for label, how in methods.items()]


AFTER_SFT = "the paper's rows after SFT come from the whole pipeline: COMPARE=1 QAT_METHOD=clover bash speedrun_fp4.sh"
TABLE_5_ITEM = Item(
    "Table 5: nanochat's validation BPB, increase over BF16 (paper: d20 / d32)", full_methods, FULL_CLAIMS, TABLE_5,
    PAPER_MODELS, size="d8", finish=partial(reduction, said="15% to 25%", more=[AFTER_SFT]),
)  # fmt: skip
ITEMS = {
    "fig1": Item(
        "Figure 1: quantization of selected operands of the backward pass",
        ["bf16", *[f"fig1{p}_sr" for p in "abcde"], *[f"fig1{p}_ms_eden" for p in "ace"]],
        [
            Claim("(a) wgrad: MS-EDEN beats SR", "fig1a_ms_eden", "fig1a_sr"),
            Claim("(c) dgrad with weight requantization: MS-EDEN beats SR", "fig1c_ms_eden", "fig1c_sr"),
            Claim("(e) both GEMMs: MS-EDEN beats SR", "fig1e_ms_eden", "fig1e_sr"),
            Claim("MS-EDEN with weight requantization (e) beats SR without (d)", "fig1e_ms_eden", "fig1d_sr"),
            Claim("SR without weight requantization (b) beats SR with it (c)", "fig1b_sr", "fig1c_sr"),
        ],
        FIGURE_1,
        **OF_LLAMAS,
    ),
    "fig2": Item(
        "Figure 2: quantization of the forward pass",
        ["bf16", *[f"fig2_{b}_{r}" for r in ("rtn", "four_over_six") for b in ("1x16", "16x16")]],
        [
            Claim("4/6 improves native 1x16 scales", "fig2_1x16_four_over_six", "fig2_1x16_rtn"),
            Claim("4/6 improves 16x16 weight scales", "fig2_16x16_four_over_six", "fig2_16x16_rtn"),
            Claim("native scales beat square blocks (RTN)", "fig2_1x16_rtn", "fig2_16x16_rtn"),
            Claim("native scales beat square blocks (4/6)", "fig2_1x16_four_over_six", "fig2_16x16_four_over_six"),
        ],
        FIGURE_2,
        **OF_LLAMAS,
    ),
    "fig4": Item(
        "Figure 4: fully quantized Llama-like models", full_methods, FULL_CLAIMS, FIGURE_4,
        finish=partial(reduction, said="at least 20%"), **OF_LLAMAS,
    ),
    "table5": TABLE_5_ITEM,
    "fig5": dataclasses.replace(TABLE_5_ITEM, title="Figure 5", finish=finish_fig5),
    "systems": Item(
        "Other systems: FP8, NVIDIA's recipe piece by piece, Chmiel, Tseng, MXFP4",
        lambda context: [*OTHER_SYSTEMS, ends_in_bf16("nvidia", one_size(context))],
        [Claim("NVFP4 has a smaller gap than MXFP4 (NVIDIA: 1.5% and 2.5%)", "nvidia", "mxfp4_nvidia")],
        finish=compare,
    ),
    "attribution": Item(
        "Where Clover's gap comes from: only this part is quantized",
        lambda context: clover_apart(depth_of(one_size(context))),
        finish=finish_attribution,
    ),
    "remedies": Item("Remedies on top of Clover", remedies_methods, finish=finish_remedies),
}  # fmt: skip


def made(name: str, context: Context) -> Outcome:
    """An item of ITEMS. Figure 5 is of Table 5's runs."""
    return training(context, "table5" if name == "fig5" else name, ITEMS[name])
