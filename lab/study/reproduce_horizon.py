"""Beyond the paper: runs long enough to decide (long_runs.py), of one size, from --results.

Gaps along the run, the targets of this project and the paper's claims, and the frontier of gap against GEMM work.
"""

import math
import statistics
from dataclasses import asdict

from lab.study.long_runs import (
    DEPLOYED_COLUMN,
    DEPLOYED_NOTE,
    FORWARD_NAMES,
    TIME,
    TIME_NOTE,
    VALUES,
    along,
    cost_cells,
    lengths,
    methods_of,
    outcome,
    steps_of,
    stored_runs,
    summary,
)
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_training import FULL_CLAIMS, SYSTEMS, Claim
from lab.study.statistics import (
    against_target,
    estimate,
    gaps_by_seed,
    has_gap,
    holm,
    pooled_differences,
    share_of,
    with_half,
)
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


def verdict(share: float, target: float, p: float) -> str:
    """p: corrected for the number of targets."""
    return "not decided" if math.isnan(p) or p >= 0.05 else "reached" if share < target else "missed"


def claims(context: Context) -> Outcome:
    """The targets, on the seeds of the last file of --results, which are fresh: one verdict each, corrected by Holm."""
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
    found = []
    for method, target, value in targets:
        share = half = p = whole = whole_half = math.nan
        if has_gap(fresh, value) and has_gap(runs, value):
            share, half, p = against_target(fresh, method, target, value, runs)
            whole, whole_half = share_of(runs, method, target, value)
        found.append({"method": method, "target": target, "value": value, "share": share, "half": half, "p": p})
        found[-1] |= {"all_seeds": whole, "all_seeds_half": whole_half}
    rows = []
    for of, corrected in zip(found, holm([of["p"] for of in found])):
        of |= {"p_holm": corrected, "verdict": verdict(of["share"], of["target"], corrected)}
        run = next(r for r in fresh if r["method"] == of["method"])
        cells = [of["method"], *cost_cells(run, steps_of(runs)), FORWARD_NAMES[of["value"]], f"{of['target']:.2f}x"]
        if math.isnan(of["share"]):
            rows.append([*cells, "clover has no gap", "-", "-", of["verdict"], "-"])
            continue
        shares = [with_half(of["share"], of["half"], 3), with_half(of["all_seeds"], of["all_seeds_half"], 3)]
        rows.append([*cells, shares[0], *(shown_p(of[k]) for k in ("p", "p_holm")), of["verdict"], shares[1]])
    return outcome(
        runs,
        content,
        "Shares of clover's gap, and the targets",
        ["method", "GEMM work", TIME, "forward", "target", f"share, seeds {seeds}", "p", "p, Holm", "verdict"]
        + ["share, all seeds"],
        rows,
        [
            f"{len(targets)} targets are tested together. p is of the hypothesis that the share is the target, "
            "two-sided; Holm's correction is for all of this table",
            "reached: the share is below its target and the corrected p below 0.05; missed: above it, and the same; "
            "not decided: all others",
            "shares are of clover's gap with the same forward. Intervals (95%, without the correction) and p are of "
            "method minus target times clover, paired by seed, with the pooled scatter of all seeds' runs from scratch",
            "clover has no gap: none above zero beyond its interval, and so no share of it",
            "deployed in plain NVFP4 (one term) no method that ends in two terms is measured: no target is of it",
            TIME_NOTE,
            *lengths(runs),
        ],
        {"claims": found},
    )


def shown_p(p: float) -> str:
    return "-" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


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
        gaps = pooled_differences(runs, size, "bf16")
        best = min(others, key=lambda m: gaps[m].mean)
        minus = pooled_differences(runs, size, best)["clover"]
        below, half = -100 * minus.mean / gaps[best].mean, 100 * minus.half / gaps[best].mean
        here = f"{with_half(below, half, 0)}%, {best}"
        if not gaps[best].above_zero:
            here = f"undecided, {best} has no gap above zero beyond its interval"
        lines.append(f"the paper: Clover's gap is 15% to 25% below the best other. Here: {here}")
    return lines


def last_phase(runs: list[dict], early: str = "clover_feedback", late: str = "clover_feedback_late") -> list[str]:
    """The parts of the difference to clover of a method with a last phase, in points, paired by seed."""
    (size,) = {r["size"] for r in runs}
    own, bf16 = ({m: gaps_by_seed(runs, size, m, value) for m in ("clover", early, late)} for value in VALUES.values())
    seeds = sorted(set.intersection(*(set(of) for of in own.values())))
    if not seeds:
        return []
    parts = (
        (f"{early} trains and rounds", own[early], own["clover"]),
        (f"{early}'s weights are evaluated in BF16", bf16[early], own[early]),
        ("the last phase trains", bf16[late], bf16[early]),
        ("its own forward instead of BF16", own[late], bf16[late]),
    )
    shown = [f"{what} {estimate([a[s] - b[s] for s in seeds]).shown(3)}" for what, a, b in parts]
    whole = estimate([own[late][s] - own["clover"][s] for s in seeds]).shown(3)
    return [f"{late} minus clover {whole}, of which: {'; '.join(shown)}"]


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
    steps, records = steps_of(runs), summary(runs)
    curves = {name: along(runs, column=column) for name, column in (("own", 1), ("BF16", 2))}
    training = along(runs, "loss_curve")
    rows = []
    for r in records:
        method, own, bf16 = r["method"], r["own"], r["BF16"]
        cells = []
        for part in PARTS:
            values = [g[s] for g in curves["own"].get(method, {}).values() for s in g if abs(s / steps - part) < 0.01]
            cells.append(f"{statistics.fmean(values):.2f}" if values else "-")
        last = " / ".join(f"{v:.2f}" for v in own.by_seed.values())
        run = next(run for run in runs if run["method"] == method)
        rows.append(
            [method, *cost_cells(run, steps), ", ".join(map(str, own.by_seed)), *cells, last]
            + [on_training_text(training, method, steps)]
            + [cell for forward in (own, bf16) for cell in forward.cells(method == "clover")]
            + [r["deployed"]]
        )
    late = {r["method"] for r in runs if any(f.startswith("--branch-from") for f in r.get("flags", ()))}

    def plot(axes) -> None:
        axes.set_axis_off()
        panels = [axes.inset_axes((0.52 * i, 0.0, 0.48, 0.96)) for i in range(2)]
        shown = [r["method"] for r in records if any(curves["own"].get(r["method"], {}).values())]
        shown = [m for m in shown if m not in late or m in METHODS]
        for panel, (name, of) in zip(panels, curves.items()):
            for i, method in enumerate(shown):
                lines = [tuple(zip(*[(100 * s / steps, g) for s, g in sorted(at.items()) if s > 0.15 * steps]))
                         for at in of[method].values() if at]  # fmt: skip
                if lines:
                    plots.curve(panel, method, lines, "-" if i < len(plots.COLORS) else "--")
            panel.set_title(f"evaluated with {'its own' if name == 'own' else 'a BF16'} forward", fontsize=9)
            panel.set_xlabel("steps, %")
        text = list(training.get("clover", {}).values())
        if "clover" in shown and text:
            at = [s for s in sorted(set.intersection(*map(set, text))) if s > 0.2 * steps]
            means, color = [statistics.fmean(g[s] for g in text) for s in at], panels[0].lines[shown.index("clover")]
            label = "clover, on the text it is trained on"
            panels[0].plot([100 * s / steps for s in at], means, ":", color=color.get_color(), linewidth=1, label=label)
        # While the learning rate is high, seeds may differ by ten times the methods' differences at the end.
        lines = [line for panel in panels for line in panel.lines]
        second = [0.0, *(y for line in lines for x, y in zip(*line.get_data()) if x >= 50)]
        margin = 0.2 * (max(second) - min(second)) or 1
        for panel in panels:
            panel.set_ylim(min(second) - margin, max(second) + margin)
        panels[0].set_ylabel("increase of validation BPB over bf16, %", fontsize=8)
        for line in panels[0].lines:
            if not line.get_label().startswith("_"):
                axes.plot([], [], line.get_linestyle(), color=line.get_color(), label=line.get_label())

    scatter = (
        "intervals: 95%; minus clover in points and of clover's paired by seed; the scatter of a run is that of the "
        "methods trained from scratch, without what methods and seeds have in common (two-way analysis of variance)"
    )
    if all(math.isnan(r["own"].gap.half) for r in records):
        scatter = "no intervals, and so nothing is decided: no method has several seeds trained from scratch; table5 "
        scatter += "and fig4 take branches of --bf16-until"
    numbers = [r | {name: r[name] and asdict(r[name]) for name in VALUES} for r in records]
    ways = [f"{100 * p:.0f}%" for p in PARTS]
    return outcome(
        runs,
        content,
        "Gap to BF16 along the run, with two forwards",
        ["method", "GEMM work", TIME, "seeds", *ways, "end", "training text"]
        + [f"{forward}: {what}" for forward in ("own", "BF16") for what in ("gap", "minus clover", "of clover's")]
        + [DEPLOYED_COLUMN],
        rows,
        [
            *verdicts(runs),
            *last_phase(runs),
            "gap in percent; own: the method's own forward; BF16: the same weights evaluated in BF16; of clover's: "
            "share of clover's gap with the same forward; along the run and at the end of each seed the own forward",
            DEPLOYED_NOTE,
            "training text: the loss of the last fiftieth of the steps, by the method's own forward; far above the gap "
            "on other text where BF16 has learnt by heart a text that it read several times",
            scatter,
            "GEMM work: 1 is every GEMM of the run in 4 bits; 8 bits count 2 and 16 bits 4",
            TIME_NOTE,
            *lengths(runs),
        ],
        {"methods": numbers, "curves": curves},
        plot,
    )


def frontier(context: Context) -> Outcome:
    runs, content = stored_runs(context)
    records = sorted(summary(runs), key=lambda r: (r["work"], r["own"].level))
    on_it: dict[str, list[str]] = {name: [] for name in VALUES}
    for name, edge in on_it.items():
        best = float("inf")
        for r in sorted(records, key=lambda r: (r["work"], r[name].level)):
            if r[name].level < best:
                best = r[name].level
                edge.append(r["method"])
    rows = [
        [
            r["method"],
            f"{r['work']:.3f}",
            "-" if r["time"] is None else f"{r['time']:.3f}",
            *[f"{r[name].level:.2f}" + ("*" if r["method"] in on_it[name] else "") for name in VALUES],
            r["deployed"],
            len(r["own"].by_seed),
        ]
        for r in records
    ]

    def plot(axes) -> None:
        shown = [r for r in records if r["work"] < 1.5]
        for (name, edge), color, fill in zip(on_it.items(), plots.COLORS, (plots.COLORS[0], "none")):
            work, gap = [r["work"] for r in shown], [r[name].level for r in shown]
            label = "own forward" if name == "own" else "BF16 forward"
            axes.scatter(work, gap, s=12, zorder=4, facecolors=fill, edgecolors=color, label=label)
            best = [r for r in shown if r["method"] in edge]
            best.sort(key=lambda r: r["work"])
            axes.step([r["work"] for r in best], [r[name].level for r in best], where="post", lw=0.8, color=color)
        plots.names(axes, [(r["work"], r["own"].level, r["method"]) for r in shown])
        axes.set_xlabel("GEMM work of the run, all in 4 bits = 1 (8 bits count 2, 16 bits 4)")
        axes.set_ylabel("increase of validation BPB over bf16, %")

    return outcome(
        runs,
        content,
        "The frontier of gap against GEMM work, with two forwards",
        ["method", "GEMM work", TIME, "own forward, %", "BF16 forward, %", DEPLOYED_COLUMN, "seeds"],
        rows,
        [
            "*: no method has less of this gap for less work",
            "gap: clover's mean of all seeds, times the method's share of it on the seeds of both (where clover has "
            "none above zero beyond its interval, the mean of the method's own)",
            DEPLOYED_NOTE,
            TIME_NOTE,
            "runs with more than 1.5 are in the table alone",
            *lengths(runs),
        ],
        {"methods": [r | {name: asdict(r[name]) for name in VALUES} for r in records], "frontier": on_it},
        plot,
    )
