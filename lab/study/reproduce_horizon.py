"""Beyond the paper: runs long enough to decide (long_runs.py), of one size, from --results.

Gaps along the run, the targets of this project and the paper's claims, and the frontier of gap against GEMM work.
"""

import math
import statistics

from lab.study import sweep_results
from lab.study.long_runs import (
    along,
    gemm_work,
    has_gap,
    lengths,
    measured_on,
    methods_of,
    share_of,
    steps_of,
    stored_runs,
    summary,
    with_half,
)
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_training import FULL_CLAIMS, SYSTEMS, Claim
from nanochat_fp4.errors import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4.methods import METHODS

TARGETS = (
    ("clover_feedback_late", 0.5, "val_bpb"),
    ("both_from_92.5%", 0.5, "val_bpb"),
    ("both_from_85%", 1 / 3, "val_bpb"),
    ("clover_feedback_late", 0.4, "val_bpb_bf16"),
    ("both_from_85%", 0.4, "val_bpb_bf16"),
    # More work, or no more of it, spent on steps as well.
    ("clover_feedback_late_2.9%_longer", 0.5, "val_bpb"),
    ("clover_feedback_late_2.9%_longer", 0.4, "val_bpb_bf16"),
    ("clover_feedback_late_7.8%_longer", 1 / 3, "val_bpb"),
    ("clover_feedback_late_7.8%_longer", 0.4, "val_bpb_bf16"),
    ("search_feedback_late_1%_shorter", 0.5, "val_bpb"),
)  # method, share of clover's gap, of which forward
# Of whole runs, besides that Clover beats each of the three (Table 5, and Figure 4's data: the longer, the more so).
CLAIMS = (
    *FULL_CLAIMS,
    Claim("4/6 beats NVIDIA", "four_over_six", "nvidia"),
    Claim("TetraJet-v2 beats NVIDIA", "tetrajet_v2", "nvidia"),
)
PARTS = (0.3, 0.5, 0.7, 0.8, 0.9)  # of the run: where the table shows the gap on the way


def verdict(share: float, half: float, target: float) -> str:
    reached = "reached" if share + half < target else "missed" if share > target else "not decided"
    return f"{with_half(share, half, 3)}, {reached}"


def claims(context: Context) -> Outcome:
    """The targets: on the seeds of the last file of --results, which are fresh, and on all."""
    runs, content = stored_runs(context)
    seeds = sorted({r["seed"] for r in runs if r["file"] == max(r["file"] for r in runs)})
    fresh = [r for r in runs if r["seed"] in seeds]
    methods = {r["method"] for r in fresh}
    if missing := {"bf16", "clover"} - methods:
        raise UserError(
            f"--results has no {min(missing)} run of seeds {seeds}, which the last file is of; add its file"
        )
    targets = [t for t in TARGETS if t[0] in methods]
    if not targets:
        known = ", ".join(dict.fromkeys(t[0] for t in TARGETS))
        raise UserError(f"--results has no run of seeds {seeds} of a method with a target: {known}")
    work = {r["method"]: gemm_work(r, steps_of(runs)) for r in runs}
    rows, numbers = [], []
    for method, target, value in targets:
        cells = ["clover has no gap"] * 3
        if has_gap(fresh, value) and has_gap(runs, value):
            of = ((fresh, fresh), (fresh, runs), (runs, runs))
            shares = [share_of(these, method, target, value, scatter_of) for these, scatter_of in of]
            cells = [verdict(*share, target) for share in shares]
            numbers += [{"method": method, "target": target, "value": value, "share": s, "half": h} for s, h in shares]
        forward = "with a BF16 forward" if value == "val_bpb_bf16" else "own forward"
        rows.append([method, f"{work[method]:.2f}", forward, f"{target:.2f}x", *cells])
    return Outcome(
        "Shares of clover's gap, and the targets",
        "method|GEMM work|gap|target".split("|")
        + [f"the last file's seeds, {seeds}", "the same, scatter of all", "all seeds"],
        rows,
        [
            "reached: the upper end of the 95% interval is below the target; not decided: the mean alone is; missed: "
            "not even that",
            "intervals of method minus target times clover over clover's mean gap, paired by seed; the scatter of a "
            "run is that of the methods trained from scratch, of the same seeds or of all",
            "clover has no gap: none above zero beyond its interval, and so no share of it",
            *lengths(runs),
        ],
        {"claims": numbers},
        None,
        measured_on(runs, content),
        content["environment"],
    )


def verdicts(runs: list[dict]) -> list[str]:
    """What the paper claims of these methods and whether the runs agree, by differences with pooled scatter."""
    (size,), methods = {r["size"] for r in runs}, methods_of(runs)
    lines = [
        f"the paper: {c.text}. Here: {c.verdict(runs, size, pooled=True)}"
        for c in CLAIMS
        if {c.better, c.worse} <= set(methods)
    ]
    others = [m for m in SYSTEMS if m in methods]
    if "clover" in methods and others:
        gaps = sweep_results.pooled_differences(runs, size, "bf16")
        best = min(others, key=lambda m: gaps[m].mean)
        minus = sweep_results.pooled_differences(runs, size, best)["clover"]
        below, half = -100 * minus.mean / gaps[best].mean, 100 * minus.half / gaps[best].mean
        here = f"{with_half(below, half, 0)}%, {best}"
        if not gaps[best].above_zero:
            here = f"undecided, {best} has no gap above zero beyond its interval"
        lines.append(f"the paper: Clover's gap is 15% to 25% below the best other. Here: {here}")
    return lines


def on_training_text(curves: dict[str, dict[int, dict[int, float]]], method: str, steps: int) -> str:
    """The gap at a run's end on the text that it is trained on, and its share of clover's; "-": not known."""
    own, clover = ({s: g[steps] for s, g in curves.get(m, {}).items() if steps in g} for m in (method, "clover"))
    both = own.keys() & clover.keys()
    share = ""
    if both and min(clover[s] for s in both) > 0:  # of no gap there is no share
        share = f" ({sum(own[s] for s in both) / sum(clover[s] for s in both):.2f}x)"
    return f"{statistics.fmean(own.values()):.2f}{share}" if own else "-"


def horizon(context: Context) -> Outcome:
    runs, content = stored_runs(context)
    steps, curves, records = steps_of(runs), along(runs), summary(runs)
    training = along(runs, "loss_curve")
    rows = []
    for r in records:
        cells = []
        for part in PARTS:
            values = [g[s] for g in curves.get(r["method"], {}).values() for s in g if abs(s / steps - part) < 0.01]
            cells.append(f"{statistics.fmean(values):.2f}" if values else "-")
        last = " / ".join(f"{v:.2f}" for v in r["gaps"].values())
        clover = r["method"] == "clover"
        minus = "-" if clover or r["minus_clover"] is None else str(r["minus_clover"])
        share = f"{r['share']:.2f}x" if r["share"] is not None else "-"
        if share != "-" and not clover:
            share = with_half(r["share"], share_of(runs, r["method"], r["share"], "val_bpb")[1], 2)
        seeds = ", ".join(map(str, r["gaps"]))
        rows.append(
            [
                r["method"],
                f"{r['work']:.2f}",
                seeds,
                *cells,
                last,
                on_training_text(training, r["method"], steps),
                str(r["pooled"]),
                f"{r['forward']:.2f}",
                minus,
                share,
            ]
        )
    late = {r["method"] for r in runs if any(f.startswith("--branch-from") for f in r.get("flags", ()))}

    def plot(axes) -> None:
        shown = [r["method"] for r in records if any(curves.get(r["method"], {}).values())]
        shown = [m for m in shown if m not in late or m in METHODS]
        for i, method in enumerate(shown):
            lines = [tuple(zip(*[(100 * s / steps, g) for s, g in sorted(at.items()) if s > 0.15 * steps]))
                     for at in curves[method].values()]  # fmt: skip
            plots.curve(axes, method, lines, "-" if i < len(plots.COLORS) else "--")
            if method == "clover" and (text := list(training.get(method, {}).values())):
                at = [s for s in sorted(set.intersection(*map(set, text))) if s > 0.2 * steps]
                means, color = [statistics.fmean(g[s] for g in text) for s in at], axes.lines[-1].get_color()
                label = f"{method}, on the text it is trained on"
                axes.plot([100 * s / steps for s in at], means, ":", color=color, linewidth=1, label=label)
        # While the learning rate is high, seeds may differ by ten times what methods do at the end.
        second = [0.0, *(y for line in axes.lines for x, y in zip(*line.get_data()) if x >= 50)]
        margin = 0.2 * (max(second) - min(second)) or 1
        axes.set_ylim(min(second) - margin, max(second) + margin)
        axes.set_xlabel("steps, %; the scale is that of the second half: before, seeds may differ by more")
        axes.set_ylabel("increase of validation BPB over bf16, %")

    scatter = (
        "intervals: 95%; minus clover in points and of clover's paired by seed; the scatter of a run is that of the "
        "methods trained from scratch, without what methods and seeds have in common (two-way analysis of variance)"
    )
    if all(math.isnan(r["pooled"].half) for r in records):
        scatter = "no intervals, and so nothing is decided: no method has several seeds trained from scratch; table5 "
        scatter += "and fig4 take branches of --bf16-until"
    numbers = [r | {k: r[k] and str(r[k]) for k in ("minus_clover", "pooled")} for r in records]
    ways = [f"{100 * p:.0f}%" for p in PARTS]
    return Outcome(
        "Gap to BF16 along the run",
        "method|GEMM work|seeds".split("|")
        + [*ways, "end", "training text", "gap", "BF16 forward", "minus clover", "of clover's"],
        rows,
        [
            *verdicts(runs),
            "gap in percent: at the end of each seed, before it the mean of the seeds; BF16 forward: their mean, the "
            "trained weights evaluated in BF16",
            "training text: the loss of the last fiftieth of the steps, by the method's own forward; far above the gap "
            "on other text where BF16 has learnt by heart a text that it read several times",
            scatter,
            "GEMM work: 1 is every GEMM of the run in 4 bits; 8 bits count 2 and 16 bits 4",
            *lengths(runs),
        ],
        {"methods": numbers, "curves": curves},
        plot,
        measured_on(runs, content),
        content["environment"],
    )


def frontier(context: Context) -> Outcome:
    runs, content = stored_runs(context)
    records = sorted(summary(runs), key=lambda r: (r["work"], r["gap"]))
    best, on_it = float("inf"), []
    for r in records:
        if r["gap"] < best:
            best = r["gap"]
            on_it.append(r["method"])
    rows = [
        [r["method"], f"{r['work']:.3f}", f"{r['gap']:.2f}", f"{r['forward']:.2f}", len(r["gaps"]),
         "*" if r["method"] in on_it else ""] for r in records
    ]  # fmt: skip

    def plot(axes) -> None:
        shown = [r for r in records if r["work"] < 1.5]
        axes.scatter([r["work"] for r in shown], [r["gap"] for r in shown], s=12, zorder=4)
        edge = [r for r in shown if r["method"] in on_it]
        axes.step([r["work"] for r in edge], [r["gap"] for r in edge], where="post", lw=0.8)
        plots.names(axes, [(r["work"], r["gap"], r["method"]) for r in shown])
        axes.set_xlabel("GEMM work of the run, all in 4 bits = 1 (8 bits count 2, 16 bits 4)")
        axes.set_ylabel("increase of validation BPB over bf16, %")

    return Outcome(
        "The frontier of gap against GEMM work",
        ["method", "GEMM work", "gap, %", "BF16 forward", "seeds", "nothing is better for less"],
        rows,
        [
            "gap: clover's mean of all seeds, times the method's share of it on the seeds of both (where clover has "
            "none above zero beyond its interval, the mean of the method's own)",
            "runs with more than 1.5 are in the table alone",
            *lengths(runs),
        ],
        {"methods": [{k: v for k, v in r.items() if k not in ("minus_clover", "pooled")} for r in records]},
        plot,
        measured_on(runs, content),
        content["environment"],
    )
