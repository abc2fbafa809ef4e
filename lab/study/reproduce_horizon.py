"""Beyond the paper: runs long enough to decide (long_runs.py), of one size, from --results.

Gaps along the run, the targets of this project and the paper's claims, and the frontier of gap against GEMM work.
"""

import math
from dataclasses import asdict
from statistics import fmean
from typing import Any

from lab.study import long_runs
from lab.study import statistics as stats
from lab.study.long_runs import VALUES
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

Curves = dict[str, dict[int, dict[int, float]]]  # method -> seed -> step -> gap


# ----------------------------------------------------------------------------------------------------------------------
# The targets


def verdict(share: float, target: float, p: float) -> str:
    """p: corrected for the number of targets."""
    return "not decided" if math.isnan(p) or p >= 0.05 else "reached" if share < target else "missed"


def judge(found: list[dict]) -> None:
    """Adds to targets that are tested together each one's p, corrected by Holm, and verdict."""
    for of, corrected in zip(found, stats.holm([of["p"] for of in found])):
        of |= {"p_holm": corrected, "verdict": verdict(of["share"], of["target"], corrected)}


def shown_p(p: float) -> str:
    return "-" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def claims(context: Context) -> Outcome:
    """The targets, on the seeds of the last file of --results, which are fresh: one verdict each, corrected by Holm."""
    runs, content = long_runs.stored_runs(context)
    seeds = sorted({r["seed"] for r in runs if r["file"] == max(r["file"] for r in runs)})
    fresh = [r for r in runs if r["seed"] in seeds]
    methods = {r["method"] for r in fresh}
    if missing := {"bf16", "clover"} - methods:
        which = f"no {min(missing)} run of seeds {seeds}, which the last file is of"
        raise UserError(f"--results has {which}; add its file")
    targets = [t for t in TARGETS if t[0] in methods]
    if not targets:
        known = ", ".join(dict.fromkeys(t[0] for t in TARGETS))
        raise UserError(f"--results has no run of seeds {seeds} of a method with a target: {known}")
    found = []
    for method, target, value in targets:
        share = half = p = whole = whole_half = math.nan
        if stats.has_gap(fresh, value) and stats.has_gap(runs, value):
            share, half, p = stats.against_target(fresh, method, target, value, runs)
            whole, whole_half, _ = stats.against_target(runs, method, target, value)
        found.append({"method": method, "target": target, "value": value, "share": share, "half": half, "p": p})
        found[-1] |= {"all_seeds": whole, "all_seeds_half": whole_half}
    judge(found)
    rows = []
    for of in found:
        cost = long_runs.cost_cells(fresh, of["method"], long_runs.steps_of(runs))
        shares = ["clover has no gap", "-"]
        if not math.isnan(of["share"]):
            pairs = (of["share"], of["half"]), (of["all_seeds"], of["all_seeds_half"])
            shares = [stats.with_half(*pair, 3) for pair in pairs]
        forward, p_values = long_runs.FORWARD_NAMES[of["value"]], [shown_p(of[k]) for k in ("p", "p_holm")]
        row = [of["method"], *cost, forward, f"{of['target']:.2f}x", shares[0], *p_values, of["verdict"], shares[1]]
        rows.append(row)
    header = ["method", "GEMM work", long_runs.TIME, "forward", "target", f"share, seeds {seeds}", "p", "p, Holm"]
    notes = [
        f"{len(targets)} targets are tested together. p is of the hypothesis that the share is the target, two-sided; "
        "Holm's correction is for all of this table",
        "reached: the share is below its target and the corrected p below 0.05; missed: above it, and the same; not "
        "decided: all others",
        "shares are of clover's gap with the same forward. Intervals (95%, without the correction) and p are of method "
        "minus target times clover, paired by seed, with the pooled scatter of all seeds' runs from scratch",
        "clover has no gap: none above zero beyond its interval, and so no share of it",
        "no target is of plain NVFP4 (one term); lab.reproduce forwards has those",
        long_runs.TIME_NOTE,
        *long_runs.lengths(runs),
    ]
    title, header = "Shares of clover's gap, and the targets", [*header, "verdict", "share, all seeds"]
    return long_runs.outcome(runs, content, title, header, rows, notes, {"claims": found})


# ----------------------------------------------------------------------------------------------------------------------
# Gaps along the run


def verdicts(runs: list[dict]) -> list[str]:
    """What the paper claims of these methods and whether the runs agree, by differences with pooled scatter."""
    (size,), methods = {r["size"] for r in runs}, long_runs.methods_of(runs)
    known = [c for c in CLAIMS if {c.better, c.worse} <= set(methods)]
    lines = [f"the paper: {c.text}. Here: {c.verdict(runs, size, pooled=True)}" for c in known]
    others = [m for m in SYSTEMS if m in methods]
    if "clover" in methods and others:
        gaps = stats.pooled_differences(runs, size, "bf16")
        best = min(others, key=lambda m: gaps[m].mean)
        minus = stats.pooled_differences(runs, size, best)["clover"]
        below, half = -100 * minus.mean / gaps[best].mean, 100 * minus.half / gaps[best].mean
        here = f"{stats.with_half(below, half, 0)}%, {best}"
        if not gaps[best].above_zero:
            here = f"undecided, {best} has no gap above zero beyond its interval"
        lines.append(f"the paper: Clover's gap is 15% to 25% below the best other. Here: {here}")
    return lines


def last_phase(runs: list[dict], early: str = "clover_feedback", late: str = "clover_feedback_late") -> list[str]:
    """The parts of the difference to clover of a method with a last phase, in points, paired by seed."""
    (size,) = {r["size"] for r in runs}
    of = stats.gaps_by_seed
    own, bf16 = ({m: of(runs, size, m, value) for m in ("clover", early, late)} for value in VALUES.values())
    seeds = sorted(set.intersection(*(set(of) for of in own.values())))
    if not seeds:
        return []
    parts = (
        (f"{early} trains and rounds", own[early], own["clover"]),
        (f"{early}'s weights are evaluated in BF16", bf16[early], own[early]),
        ("the last phase trains", bf16[late], bf16[early]),
        ("its own forward instead of BF16", own[late], bf16[late]),
        (f"{late} minus clover", own[late], own["clover"]),
    )
    *shown, whole = [f"{what} {stats.estimate([a[s] - b[s] for s in seeds]).shown(3)}" for what, a, b in parts]
    return [f"{whole}, of which: {'; '.join(shown)}"]


def on_training_text(curves: Curves, method: str, steps: int) -> str:
    """The gap at a run's end on the text that it is trained on, and its share of clover's; "-": not known."""
    own, clover = ({s: g[steps] for s, g in curves.get(m, {}).items() if steps in g} for m in (method, "clover"))
    both = own.keys() & clover.keys()
    share = ""
    if both and min(clover[s] for s in both) > 0:  # of no gap there is no share
        share = f" ({sum(own[s] for s in both) / sum(clover[s] for s in both):.2f}x)"
    return f"{fmean(own.values()):.2f}{share}" if own else "-"


def draw_curves(axes: Any, shown: list[str], curves: dict[str, Curves], training: Curves, steps: int) -> None:
    """Two panels, one for each forward, at one scale."""
    axes.set_axis_off()
    panels = [axes.inset_axes((0.52 * i, 0.0, 0.48, 0.96)) for i in range(2)]
    for panel, (name, of) in zip(panels, curves.items()):
        for i, method in enumerate(shown):
            seeds = of[method].values()
            late = [[(100 * s / steps, g) for s, g in sorted(at.items()) if s > 0.15 * steps] for at in seeds]
            if lines := [tuple(zip(*points)) for points in late if points]:
                plots.curve(panel, method, lines, "-" if i < len(plots.COLORS) else "--")
        panel.set_title(f"evaluated with {'its own' if name == 'own' else 'a BF16'} forward", fontsize=9)
        panel.set_xlabel("steps, %")
    text = list(training.get("clover", {}).values())
    if "clover" in shown and text:
        at = [s for s in sorted(set.intersection(*map(set, text))) if s > 0.2 * steps]
        means, line = [fmean(g[s] for g in text) for s in at], panels[0].lines[shown.index("clover")]
        style = {"color": line.get_color(), "linewidth": 1, "label": "clover, on the text it is trained on"}
        panels[0].plot([100 * s / steps for s in at], means, ":", **style)
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


def horizon(context: Context) -> Outcome:
    runs, content = long_runs.stored_runs(context)
    steps, records = long_runs.steps_of(runs), long_runs.summary(runs)
    curves = {name: long_runs.along(runs, column=column) for name, column in (("own", 1), ("BF16", 2))}
    training = long_runs.along(runs, "loss_curve")
    rows = []
    for r in records:
        method, own = r["method"], r["own"]
        at = [(s / steps, gap) for of in curves["own"].get(method, {}).values() for s, gap in of.items()]
        near = [[gap for s, gap in at if abs(s - part) < 0.01] for part in PARTS]
        ways = [f"{fmean(gaps):.2f}" if gaps else "-" for gaps in near]
        end = " / ".join(f"{v:.2f}" for v in own.by_seed.values())
        row = [method, *long_runs.cost_cells(runs, method, steps), ", ".join(map(str, own.by_seed)), *ways, end]
        row += [on_training_text(training, method, steps)]
        row += [cell for forward in VALUES for cell in r[forward].cells(method == "clover")]
        rows.append([*row, r["deployed"]])
    late = {r["method"] for r in runs if any(f.startswith("--branch-from") for f in r["flags"])}
    shown = [r["method"] for r in records if any(curves["own"].get(r["method"], {}).values())]
    shown = [m for m in shown if m not in late or m in METHODS]

    scatter = (
        "intervals: 95%; minus clover in points and of clover's paired by seed; the scatter of a run is that of the "
        "methods trained from scratch, without what methods and seeds have in common (two-way analysis of variance)"
    )
    if all(math.isnan(r["own"].gap.half) for r in records):
        scatter = "no intervals, and so nothing is decided: no method has several seeds trained from scratch; table5 "
        scatter += "and fig4 take branches of --bf16-until"
    header = ["method", "GEMM work", long_runs.TIME, "seeds", *(f"{p:.0%}" for p in PARTS), "end", "training text"]
    header += [f"{forward}: {what}" for forward in VALUES for what in ("gap", "minus clover", "of clover's")]
    notes = [
        *verdicts(runs),
        *last_phase(runs),
        "gap in percent; own: the method's own forward; BF16: the same weights evaluated in BF16; of clover's: share "
        "of clover's gap with the same forward; along the run and at the end of each seed the own forward",
        long_runs.DEPLOYED_NOTE,
        "training text: the loss of the last fiftieth of the steps, by the method's own forward; far above the gap on "
        "other text where BF16 has learnt by heart a text that it read several times",
        scatter,
        "GEMM work: 1 is every GEMM of the run in 4 bits; 8 bits count 2 and 16 bits 4",
        long_runs.TIME_NOTE,
        *long_runs.lengths(runs),
    ]
    numbers = {"methods": [r | {name: r[name] and asdict(r[name]) for name in VALUES} for r in records]}
    return long_runs.outcome(
        runs, content, "Gap to BF16 along the run, with two forwards", [*header, long_runs.DEPLOYED_COLUMN], rows,
        notes, numbers | {"curves": curves}, lambda axes: draw_curves(axes, shown, curves, training, steps),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------------
# The frontier


def frontier(context: Context) -> Outcome:
    runs, content = long_runs.stored_runs(context)
    records = sorted(long_runs.summary(runs), key=lambda r: (r["work"], r["own"].level))
    on_it: dict[str, list[str]] = {name: [] for name in VALUES}
    for name, edge in on_it.items():
        best = math.inf
        for r in sorted(records, key=lambda r: (r["work"], r[name].level)):
            if r[name].level < best:
                best = r[name].level
                edge.append(r["method"])
    rows = []
    for r in records:
        levels = [f"{r[name].level:.2f}" + "*" * (r["method"] in on_it[name]) for name in VALUES]
        time = "-" if r["time"] is None else f"{r['time']:.3f}"
        rows.append([r["method"], f"{r['work']:.3f}", time, *levels, r["deployed"], len(r["own"].by_seed)])

    def plot(axes: Any) -> None:
        shown = [r for r in records if r["work"] < 1.5]
        for (name, edge), color, fill in zip(on_it.items(), plots.COLORS, (plots.COLORS[0], "none")):
            points = [(r["work"], r[name].level, r["method"]) for r in shown]
            work, gap, _ = zip(*points)
            label = "own forward" if name == "own" else "BF16 forward"
            axes.scatter(work, gap, s=12, zorder=4, facecolors=fill, edgecolors=color, label=label)
            work, gap, _ = zip(*sorted((p for p in points if p[2] in edge), key=lambda p: p[0]))
            axes.step(work, gap, where="post", lw=0.8, color=color)
        plots.names(axes, [(r["work"], r["own"].level, r["method"]) for r in shown])
        axes.set_xlabel("GEMM work of the run, all in 4 bits = 1 (8 bits count 2, 16 bits 4)")
        axes.set_ylabel("increase of validation BPB over bf16, %")

    header = ["method", "GEMM work", long_runs.TIME, "own forward, %", "BF16 forward, %", long_runs.DEPLOYED_COLUMN]
    notes = [
        "*: no method has less of this gap for less work",
        "gap: clover's mean of all seeds, times the method's share of it on the seeds of both (where clover has none "
        "above zero beyond its interval, the mean of the method's own)",
        long_runs.DEPLOYED_NOTE,
        long_runs.TIME_NOTE,
        "runs with more than 1.5 are in the table alone",
        *long_runs.lengths(runs),
    ]
    numbers = {"methods": [r | {name: asdict(r[name]) for name in VALUES} for r in records], "frontier": on_it}
    title, header = "The frontier of gap against GEMM work, with two forwards", [*header, "seeds"]
    return long_runs.outcome(runs, content, title, header, rows, notes, numbers, plot)
