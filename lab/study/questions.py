"""Makes the tables of stored runs that are more than a table of gaps: which method to take, targets, other forward
passes, extra steps, equal time, the ladder of sizes, and the leaderboard."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from lab import RESULTS, cards, scaling
from lab import runs as kept_runs
from lab import statistics as stats
from lab.study import gaps
from lab.study.context import Context, Outcome
from lab.study.gaps import VALUES, methods_of, steps_of, stored_runs
from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.models.cross_entropy import default_head

FORWARD_NAMES = {"val_bpb": "own forward", "val_bpb_bf16": "BF16 forward"}


def outcome(runs: list[dict], content: dict, title: str, header: list[str], *args: Any) -> Outcome:
    """Makes an Outcome with the line that names what the runs were measured on, and what their GEMM work is of."""
    where = gaps.measured_on(runs, content["data"])
    if "GEMM work" in header:
        where += f"; GEMM work {gaps.counted(runs)}"
    return Outcome(title, header, *args, measured_on=where, environment=content["environment"])


# ----------------------------------------------------------------------------------------------------------------------
# Which method?

PUBLIC = "d6_public"  # The study on the text that anyone can make.
WHEN = {  # A method -> the situation in which one should take it.
    "bf16": "where 4 bits are neither faster nor needed to fit",
    "fp8": "on a Hopper, where it is faster and loses less than 4 bits; not tuned",
    "nvidia": "to compare with NVIDIA's recipe, every GEMM in 4 bits",
    "nvidia_full": "to compare with NVIDIA's recipe as published, but for the first blocks: they keep 4 bits",
    "four_over_six": "to compare with Four-over-Six",
    "tetrajet_v2": "to compare with TetraJet-v2",
    "clover": "to reproduce the paper; the default",
    "clover_fp8_forward": "recommended with 4 bits: forward in FP8, backward in 4",
    "clover_fp8_forward_4bit": "to compare: the same with 4-bit codes kept (lab/recipes.py)",
    "clover_feedback": "for pure NVFP4 that is evaluated or served in BF16",
    "clover_feedback_late": "for an evaluation in two terms; exported to plain NVFP4 it is no better than clover",
    "clover_mixed": "FP8 in the forward of attention and of the MLP's first matrix alone",
}
# The format of the blocks' weights that scripts.export writes, where it is not NVFP4 alone.
EXPORTED = {"bf16": "BF16", "clover_mixed": "FP8, NVFP4"}
EXPORTED |= dict.fromkeys(("fp8", "clover_fp8_forward", "clover_fp8_forward_4bit"), "FP8")


def time_of_steps() -> dict[str, tuple[str, str]]:
    """Returns for each method the time of a step of d26 (8 rows, one H100) over BF16's time in the same measurement,
    and the part of lab/results/bench.json that has the measurement. The last such part counts."""
    found: dict[str, tuple[str, str]] = {}
    for name, part in json.loads((RESULTS / "bench.json").read_text(encoding="utf-8")).items():
        if isinstance(part, dict) and part["benchmark"] == "bench_train" and "H100" in part["environment"]["gpu"]:
            records = [r for r in part["records"] if r.get("tokens_per_second") and r["depth"] == 26]
            speed = {r["method"]: r["tokens_per_second"] for r in records if r["micro_batch"] == 8}
            found |= {method: (f"{speed['bf16'] / of:.2f}", name) for method, of in speed.items()}
    return found


def exported(runs: list[dict], method: str) -> str:
    """Returns the gap of the model that scripts.export writes, as the text of a cell. Of two terms the export keeps
    one, and the weights of a BF16 run are rounded by 4/6."""
    if method == "bf16":
        found = rounded_afterwards(runs, "clover")
        return "not measured" if found == "-" else found
    if not gaps.ends_in_two_terms(runs, method):
        mine = next(r for r in runs if r["method"] == method)
        of_head = min(r["gemm_work"]["16"] for r in runs if r.get("head") == mine.get("head"))
        return "not measured" if mine["gemm_work"]["16"] > of_head + 1e-9 else "as own forward"
    base = {r["seed"]: r["val_bpb"] for r in runs if r["method"] == "bf16"}
    mine = {r["seed"]: r[gaps.ONE_TERM] for r in runs if r["method"] == method and gaps.ONE_TERM in r}
    return str(stats.estimate([100 * (bpb / base[s] - 1) for s, bpb in mine.items()])) if mine else "not measured"


def with_default_head(of: gaps.Rows, method: str) -> str:
    """Returns a method's share of clover's gap, own forward, with the output head that base_train gives the method."""
    label = f"{method}_head_{default_head(method)}"
    label = label if label in methods_of(of.runs) else method
    return "0" if method == "bf16" else of.share(label, "val_bpb") if label in methods_of(of.runs) else "-"


def methods(context: Context) -> Outcome:
    """Makes README's table of methods. It has a row for each method that the study has or --rows names. Without
    --results it is README's, with its studies, rows and columns."""
    args, header = context.args, ["QAT_METHOD", "share of clover's gap: own; BF16 forward", "the same, public text"]
    header += ["gap, own forward, %", "GEMM work", "exported as", "take it"]
    if not args.results:
        args.results, args.columns = ",".join(cards.STUDIES), args.columns or " | ".join(header)
        args.rows = args.rows or "bf16 | fp8 | clover_fp8_forward | clover"
    time = "step time on one H100, BF16 = 1"
    header += ["gap, BF16 forward, %", "gap as exported, %", time, "seeds"]
    header += ["share, default head", "the same head, public text"]
    runs, content = stored_runs(context)
    times, known = time_of_steps(), methods_of(runs)
    texts = [gaps.Rows(of_text, gaps.Item("")) for of_text in (runs, kept_runs.stored(PUBLIC)["results"])]
    rows, asked = [], [name.strip() for name in context.args.rows.split("|")]
    for method in [m for m in dict.fromkeys([*WHEN, *known]) if m in ("bf16", *known, *asked)]:
        shares, both = (["0; 0"] * 2, ["0"] * 2) if method == "bf16" else (["not measured"] * 2, ["not measured"] * 2)
        for i, of in enumerate(texts):
            if method in methods_of(of.runs):
                shares[i] = "; ".join(of.share(method, value) for value in VALUES.values())
        if method in known:
            both = [texts[0].gap(method, value).shown(sign="-") for value in VALUES.values()]
        seeds = len({r["seed"] for r in runs if r["method"] == method})
        as_exported = exported(runs, method) if seeds else "not measured"
        work = gaps.gemm_work(runs, method, steps_of(runs)) if seeds else "not measured"
        default = [with_default_head(of_text, method) for of_text in texts]
        as_what, when = EXPORTED.get(method, "NVFP4"), WHEN.get(method)
        row = [method, *shares, both[0], work, *((as_what, when) if when else ("-", "-"))]
        rows.append([*row, both[1], as_exported, times.get(method, ("not measured",))[0], seeds, *default])
    runs = gaps.runs_of_rows(runs, args.rows)
    parts = ", ".join(dict.fromkeys(times[row[0]][1] for row in rows if row[0] in times))
    notes = [
        "gap: the increase of validation bits per byte over BF16 of the same seed; a share's interval is Fieller's",
        gaps.INTERVALS,
        gaps.NOTES["GEMM work"].format(work=gaps.counted(runs)),
    ]
    if any("public text" in name for name in context.chosen_columns(header)):
        public = kept_runs.stored(PUBLIC)
        where, machines = gaps.measured_on(public["results"], public["data"]), kept_runs.pooled([public])["machines"]
        notes.append(f"public text: {machines}; {where}")
    if time in context.chosen_columns(header):
        notes.append(f"time: d26, 8 rows, --cuda-graph, where 4 bits are emulated (lab/results/bench.json: {parts})")
    return outcome(runs, content, "Which method? Gaps to BF16 from scratch", header, rows, notes, {})


# ----------------------------------------------------------------------------------------------------------------------
# Figure 5, and the losses of each seed


def along_the_run(context: Context, item: gaps.Item) -> Outcome:
    """Makes Figure 5: a table of gaps at some steps, and a plot of all. If all runs were evaluated only at their ends,
    the gaps are those of the mean training loss of parts of the run, on the same batches."""
    papers = item.methods
    header = ["method", "gap in % at steps"]
    context.chosen_columns(header)
    item = replace(item, methods=(), also=()) if context.args.results else item  # Of stored runs all are in the table.
    runs, _, content = gaps.runs_of(context, "table5", item)
    runs = gaps.runs_of_rows(runs, context.args.rows)
    found, what = gaps.along(runs), "validation BPB"
    losses = gaps.along(runs, "loss_curve")
    if max(len(of) for seeds in found.values() for of in seeds.values()) < 4 and any(
        of for seeds in losses.values() for of in seeds.values()
    ):
        found, what = losses, "training loss"
    rows, lines = [], {}
    for method in (m for m in methods_of(runs) if any(found.get(m, {}).values())):
        seeds = [of for of in found[method].values() if of]
        at = {step: [of[step] for of in seeds if step in of] for step in sorted(set().union(*seeds))}
        points = [(step, fmean(values)) for step, values in at.items()]
        lines[method] = [tuple(zip(*of.items())) for of in seeds]
        rows.append([method, "  ".join(f"{s}: {g:+.2f}" for s, g in points[:: max(1, len(points) // 6)])])

    title = f"Figure 5: increase of the {what} over BF16 in the course of training, own forward"
    absent = [m for m in methods_of(runs) if m not in lines]
    notes = [f"not evaluated on the way, or of another length than bf16: {', '.join(absent)}"] if absent else []
    drawn = lines
    if len(lines) > 2 * len(plots.COLORS):  # More lines than colours and styles could not be told apart.
        drawn = {m: of for m, of in lines.items() if m in papers} or dict(list(lines.items())[: len(plots.COLORS)])
        notes.append(f"the picture has {len(drawn)} of these {len(lines)} methods; --rows chooses others")

    def plot(axes: Any) -> None:
        gaps.draw_lines(axes, drawn)
        gaps.scale_of_second_half([axes], max(axes.get_xlim()) / 2)
        axes.set_xlabel("step")
        axes.set_ylabel(f"increase of the {what}\nover bf16, %")

    return outcome(runs, content, title, header, rows, notes, {"curves": found}, plot)


def losses(context: Context) -> Outcome:
    """Makes a table of the bits per byte of every seed, with both forwards, from which gaps are computed."""
    runs, content = stored_runs(context)
    seeds, rows = sorted({r["seed"] for r in runs}), []
    for method in dict.fromkeys(r["method"] for r in runs):
        of = {r["seed"]: f"{r['val_bpb']:.4f}; {r['val_bpb_bf16']:.4f}" for r in runs if r["method"] == method}
        rows.append([method, *(of.get(seed, "-") for seed in seeds)])
    header = ["method", *(f"seed {seed}: own; BF16" for seed in seeds)]
    return outcome(runs, content, "Bits per byte by seed", header, rows, [], {})


# ----------------------------------------------------------------------------------------------------------------------
# Targets

TARGETS = (
    ("clover_mixed", 0.33, "val_bpb"),
    ("clover_mixed", 0.4, "val_bpb_bf16"),
    ("clover_feedback_late", 0.5, "val_bpb"),
    ("both_from_92.5%", 0.5, "val_bpb"),
    ("both_from_85%", 1 / 3, "val_bpb"),
    ("clover_feedback_late", 0.4, "val_bpb_bf16"),
    ("both_from_85%", 0.4, "val_bpb_bf16"),
    # These methods also have more, or fewer, steps than BF16.
    ("clover_feedback_late_2.9%_longer", 0.5, "val_bpb"),
    ("clover_feedback_late_2.9%_longer", 0.4, "val_bpb_bf16"),
    ("clover_feedback_late_7.8%_longer", 1 / 3, "val_bpb"),
    ("clover_feedback_late_7.8%_longer", 0.4, "val_bpb_bf16"),
    ("search_feedback_late_1%_shorter", 0.5, "val_bpb"),
)  # The method, the target for its share of clover's gap, and the forward.


def tested(runs: list[dict], method: str, target: float, value: str) -> dict[str, Any]:
    """Returns a method's share of clover's gap (or None), its target, and the p of the hypothesis that the share is the
    target: that the method's gap minus target times clover's is zero, paired by seed."""
    (size,) = {r["size"] for r in runs}
    share = stats.share(runs, size, method, value=value)
    mine, clover = stats.pairs(runs, size, method, "clover", value)
    p = stats.p_value([m - target * c for m, c in zip(mine, clover)]) if share else math.nan
    return {"method": method, "target": target, "value": value, "share": share, "p": p}


def judge(found: list[dict]) -> None:
    """Adds a corrected p and a verdict to each of the targets. They are tested together, with Holm's correction."""
    for of, corrected in zip(found, stats.holm([of["p"] for of in found])):
        decided = not math.isnan(corrected) and corrected < 0.05
        verdict = "not decided" if not decided else "met" if of["share"].mean < of["target"] else "missed"
        of |= {"p_holm": corrected, "verdict": verdict}


NO_GAP = "clover has no gap"  # The cell in the place of a share.


def shown_p(p: float) -> str:
    """Formats a p-value."""
    return "-" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def claims(context: Context) -> Outcome:
    """Makes the table of targets, with a verdict for each. It is decided by the seeds of the last study of --results,
    on which nothing was chosen."""
    runs, content = stored_runs(context)
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
    found = [tested(fresh, *target) for target in targets]
    judge(found)
    rows = []
    for of, target in zip(found, targets):
        cost, whole = gaps.gemm_work(fresh, of["method"], steps_of(runs)), tested(runs, *target)["share"]
        shares = [share.shown(3, "-") if share else NO_GAP for share in (of["share"], whole)]
        forward, p_values = FORWARD_NAMES[of["value"]], [shown_p(of[k]) for k in ("p", "p_holm")]
        row = [of["method"], cost, forward, f"{of['target']:.2f}x", shares[0], *p_values, of["verdict"], shares[1]]
        rows.append(row)
    header = ["method", "GEMM work", "forward", "target", f"share, seeds {seeds}", "p", f"p, Holm of {len(targets)}"]
    notes = [
        f"{len(targets)} targets are tested together. p is of the hypothesis that the share is the target, two-sided; "
        "Holm's correction is for all of this table",
        "met: the corrected p is below 0.05 and the share below its target; missed: p is, and the share above it; "
        "otherwise not decided",
        "shares are of clover's gap with the same forward, with Fieller's interval (95%, without the correction); it "
        "and p are paired by seed, Student's t with seeds - 1 degrees of freedom",
        *gaps.length_notes(runs),
    ]
    if any(NO_GAP in row for row in rows):
        notes.append(f'"{NO_GAP}" in a cell: clover\'s gap is not above zero with its whole interval')
    title, header = "Shares of clover's gap, and the targets", [*header, "verdict", "share, all seeds"]
    return outcome(runs, content, title, header, rows, notes, {"claims": found})


# The targets of an FP8 forward: a method -> for each forward the target of its share of clover's gap, and the end that
# its interval must not pass. 0.41 and 0.43 are the shares of clover_mixed.
SHARES_OF_FP8 = {
    "clover_fp8_forward_4bit": ((0.33, 0.41), (0.37, 0.43)),
    "clover_fp8_forward": ((0.33, 0.41), (0.37, 0.43)),
    "clover_fp8_forward_dgrad_but_down": ((0.20, 0.20), (0.22, 0.22)),
    "clover_fp8_forward_wgrad_but_down": ((0.20, 0.20), (0.22, 0.22)),
}
MOST_BYTES = 0.57  # Of an element of the input.
# Contrasts: what each shows, a row, and the row that it is compared with. FP8 in dgrad keeps the codes of its other
# row, and FP8 in wgrad more than those.
GAINS_OF_FP8 = (
    ("FP8 in dgrad over 4 bits", "clover_fp8_forward_dgrad", "clover_fp8_forward_4bit_input"),
    ("FP8 in wgrad over 4 bits", "clover_fp8_forward_wgrad", "clover_fp8_forward_4bit"),
)
SIGNS_OF_FP8 = (
    ("FP8 in dgrad over FP8 in wgrad", "clover_fp8_forward_dgrad", "clover_fp8_forward_wgrad"),
    *GAINS_OF_FP8,
    ("FP8 head over BF16 head", "clover_fp8_forward_head_fp8", "clover_fp8_forward"),
    ("FP8 head over BF16 head, bf16", "bf16_head_fp8", "bf16"),
    ("FP8 head over BF16 head, fp8", "fp8_head_fp8", "fp8"),
    ("E4M3 gradients by row over E5M2, fp8", "fp8_e4m3_rows", "fp8"),
)


def fp8_forward(context: Context) -> Outcome:
    """Makes the table of the targets of an FP8 forward: shares, which codes are kept, and FP8 in one backward GEMM."""
    runs, content = stored_runs(context, all_seeds=True)
    of, row, rows = gaps.Rows(runs, gaps.Item("")), "clover_fp8_forward", []
    for method, targets in SHARES_OF_FP8.items():
        for (name, value), (target, end) in zip(VALUES.items(), targets):
            if share := stats.share(runs, of.size, method, value=value):
                wanted = f"mean at most {target:.2f}, upper end at most {end:.2f}"
                verdict = stats.verdict(share, target, end)
                rows.append([f"share of {method}", name, share.shown(sign="-"), share.n, wanted, verdict])
    codes = stats.gap(runs, of.size, f"{row}_4bit", base=row)
    if codes.n:
        verdict = "missed" if codes.low > 0 else "met" if codes.low <= 0 else "not decided"
        rows.append(["4-bit over 8-bit codes kept, %", "own", str(codes), codes.n, "not above zero", verdict])
    for (text, method, other), (name, value) in itertools.product(SIGNS_OF_FP8, VALUES.items()):
        sign = stats.gap(runs, of.size, method, value, other)
        if sign.n:
            verdict = ("below" if sign.mean < 0 else "above") + " zero" if sign.decided else "not decided"
            rows.append([f"{text}, %", name, str(sign), sign.n, "the sign", verdict])
    if not rows:
        raise UserError(f"{context.args.results} has no run of {', '.join(SHARES_OF_FP8)} beside clover's and bf16's")
    for method in (method for method in (f"{row}_4bit", row) if of.of(method)):
        size = gaps.COLUMNS["bytes kept"](of, method)
        verdict = "met" if float(size) <= MOST_BYTES else "missed"
        rows.append([f"bytes kept by {method} of an input's element", "-", size, "-", f"at most {MOST_BYTES}", verdict])
    targets = len(rows)
    for name, value in VALUES.items():  # No target: it was added after the runs.
        dgrad, wgrad = (stats.gaps_by_seed(runs, of.size, row, value, other) for _, row, other in GAINS_OF_FP8)
        gain = stats.estimate([wgrad[seed] - dgrad[seed] for seed in dgrad if seed in wgrad])
        if gain.n:
            rows.append(["dgrad's gain minus wgrad's, points", name, str(gain), gain.n, "none", "-"])
    header = ["quantity", "forward", "value", "seeds", "target", f"verdict, {targets} targets"]
    notes = [
        f"{targets} targets, each judged by itself, without a correction for their number",
        "a share: met if its mean and its upper end are at most the numbers of the target, missed if its lower end is "
        "above the first, and otherwise not decided; a sign is decided if the interval excludes zero",
        "% is of the loss of the second row of a contrast, on the seeds that both rows have",
        "a gain: what FP8 in this GEMM alone takes away over 4 bits in it; the difference was added after the runs",
        gaps.INTERVALS,
    ]
    return outcome(runs, content, "Targets of an FP8 forward", header, rows, notes, {})


# ----------------------------------------------------------------------------------------------------------------------
# The same weights in several forwards (lab.study.forwards evaluates them)

# A column of the table -> the method whose forward pass it shows. Other methods are columns by their own names.
IN_FORWARD = {"4/6, one term": "clover", "feedback, one term": "clover_feedback", "two terms": "clover_refined"}
# The comparisons: what is compared, the target for the share of clover's gap, and the name of the bits per byte in a
# run. "deployed" has one term. It is the own forward, or that of feedback if the method ends in two terms.
OF_FORWARDS = ("both in BF16", 0.5, "val_bpb_bf16"), ("deployed in plain NVFP4", 0.6, "deployed")
WITH_TARGETS = "clover_feedback", "clover_search_feedback", "clover_feedback_late"


def with_value(runs: list[dict], name: str) -> list[dict]:
    """Keeps the runs that were evaluated with this forward pass, and stores that loss in r[name]. BF16 runs keep their
    own loss, because gaps are measured against it."""
    found = [r | {name: r["forwards"][name]} for r in runs if r["method"] != "bf16" and name in r.get("forwards", ())]
    return found + [r | {name: r["val_bpb"]} for r in runs if r["method"] == "bf16"]


def with_deployed(runs: list[dict]) -> list[dict]:
    """Returns the runs that can be deployed in one term, with their bits per byte in r["deployed"]."""
    feedback = with_value(runs, "clover_feedback")
    two_terms = {m for m in methods_of(runs) if gaps.ends_in_two_terms(runs, m)}
    one_term = [r | {"deployed": r["val_bpb"]} for r in runs if r["method"] not in two_terms]
    return one_term + [r | {"deployed": r["clover_feedback"]} for r in feedback if r["method"] in two_terms]


def rounded_afterwards(runs: list[dict], name: str) -> str:
    """Returns the gap of BF16's weights in another forward, paired by seed, or "-" if no run has it."""
    base = [r for r in runs if r["method"] == "bf16" and name in r.get("forwards", ())]
    found = [100 * (r["forwards"][name] / r["val_bpb"] - 1) for r in base]
    return stats.estimate(found).shown(2) if found else "-"


def forwards(context: Context) -> Outcome:
    """Makes a table of the gaps of each method's weights in each forward, and judges their targets with one correction
    by Holm."""
    runs, content = stored_runs(context)
    (size,), methods = {r["size"] for r in runs}, methods_of(runs)
    evaluated = dict.fromkeys(name for r in runs for name in r.get("forwards", ()) if name != "bf16")
    if not evaluated:
        mend = "type python -m lab.study.forwards --folder FOLDER, and then the sweep's command again"
        raise UserError(f"no run of --results was evaluated in several forwards; {mend}")
    shown = {column: name for column, name in IN_FORWARD.items() if name in evaluated}
    shown |= {name: name for name in evaluated if name not in shown.values()}
    values = {"own": "val_bpb", **shown, "BF16": "val_bpb_bf16"}
    cells: dict[str, dict[str, str]] = {m: {} for m in methods}
    for column, name in values.items():
        having = runs if name.startswith("val_bpb") else with_value(runs, name)
        for method in methods_of(having):
            gap = stats.gap(having, size, method, name)
            cells[method][column] = f"{gap} [{gap.n}]"
    steps = steps_of(runs)
    rows = [[m, gaps.gemm_work(runs, m, steps), *(cells[m].get(c, "-") for c in values)] for m in methods]
    afterwards = (rounded_afterwards(runs, name) for name in shown.values())
    rows.insert(0, ["bf16", gaps.gemm_work(runs, "bf16", steps), "0", *afterwards, "0"])
    found = []
    for what, target, value in OF_FORWARDS:
        having = with_deployed(runs) if value == "deployed" else runs
        known = [m for m in WITH_TARGETS if m in methods_of(having)]
        found += [tested(having, method, target, value) | {"what": what} for method in known]
    judge(found)
    notes = []
    for of in found:
        share = of["share"].shown(3, "-") if of["share"] else f"none, {NO_GAP}"
        said = f"share {share}, target {of['target']:.2f}, p by Holm {shown_p(of['p_holm'])}: {of['verdict']}"
        notes.append(f"{of['method']}, {of['what']}: {said}")
    if found:
        notes += [
            f"{len(found)} targets are tested together, two-sided, paired by seed, with Holm's correction; shares are "
            "of clover's gap with the same forward, with Fieller's interval (95%, without the correction)",
            "deployed in plain NVFP4: the own forward, or feedback of one term for a method that ends in two; "
            "clover's is 4/6, its own",
        ]
    notes += [
        "gaps in percent of BF16's bits per byte, [seeds]; bf16: its weights, rounded after training",
        gaps.INTERVALS,
    ]
    header, title = (
        ["weights of", "GEMM work", *values],
        "The same weights in several forward passes",
    )
    return outcome(runs, content, title, header, rows, notes, {"gaps": cells, "targets": found})


# ----------------------------------------------------------------------------------------------------------------------
# More steps, and equal time


def more_tokens(gap: float, b: float) -> float:
    """Returns how many percent more tokens make up for a gap in percent."""
    return 100 * ((1 + gap / 100) ** (1 / b) - 1)


def extra_steps(context: Context) -> Outcome:
    """Makes a table that compares runs of other lengths with BF16 of its usual length, and with a BF16 run that has the
    same steps."""
    runs, content = stored_runs(context)
    usual, (b, single) = steps_of(runs), scaling.exponent(runs)
    of, rows, numbers = gaps.Rows(runs, gaps.Item("")), [], []
    for method in ["bf16", *methods_of(runs)]:
        mine = of.of(method)
        steps = mine[0]["steps"]
        longer: dict[str, Any] = {"method": method, "steps": steps / usual}
        cells = [method, f"{100 * (steps / usual - 1):+.1f}%", gaps.gemm_work(mine, method, usual)]
        for name, value in VALUES.items():
            gap = of.gap(method, value)
            alike = 100 * ((1 + gap.mean / 100) * (steps / usual) ** b - 1)
            longer[name] = {"gap": gap, "same_steps": alike, "more_tokens": more_tokens(alike, b)}
            cells += [str(gap), f"{alike:+.2f}", f"{more_tokens(alike, b):+.0f}%"]
        rows.append([*cells, len(mine)])
        numbers.append(longer)
    shown = ", ".join(f"{name} {of:.3f}" for name, of in single.items())
    what = [f"{name}: {w}" for name in VALUES for w in ("gap", "same steps", "tokens")]
    header = ["method", "steps", "GEMM work", *what, "seeds"]
    notes = [
        "gap: over bf16 of its usual length, percent; same steps: over a bf16 with as many steps as the method, whose "
        "loss is bf16's times (steps / usual)^-b, not measured",
        "tokens: by how much longer the method must train than bf16 to be level, by the same b; tokens and same steps "
        "are of the mean gap, without an interval",
        f"b = {b:.3f}, of all methods with several lengths: {shown}",
        "runs of other lengths end on other text, and read more of it",
        gaps.INTERVALS,
    ]
    numbers_of = {"exponent": b, "exponents": single, "methods": numbers}
    return outcome(runs, content, "Extra steps, and gaps as tokens", header, rows, notes, numbers_of)


# A ratio from a later note, which gives no rates: (where, method, its time over that of NVFP4, depth).
RATIO = ("mdhorton/nanochat_sm120, d12, 2 x RTX PRO 4000, FP8 tuned, a later note", "fp8", 1.015, 12)
IN_4_BITS = ("clover", "clover_feedback", "clover_feedback_late", "clover_mixed")


def measured_by_others() -> list[tuple[str, str, float, int]]:
    """Returns the whole steps of nanochat's sizes that others measured (lab/results/published_steps.json): (where,
    method, its time over that of NVFP4 in the same program on the same cards, depth)."""
    found = []
    for card in cards.published():
        for rate in (rate for rate in card["rates"] if "depth" in rate and "part" not in rate):
            program = "/".join(rate["source"].split(",")[0].split("/")[1:])
            where = f"{program}, d{rate['depth']}, {rate['gpus']} x {card['name']}, {rate['note']}"
            alike = [method for method in ("bf16", "fp8") if {method, "nvfp4"} <= set(rate["equal"])]
            found += [(where, method, rate["nvfp4"] / rate[method], rate["depth"]) for method in alike]
    return [*found, RATIO]


def equal_time(context: Context) -> Outcome:
    """Makes a table of the gaps at equal time. 8 and 16 bits train for no longer than NVFP4, by the times of whole
    steps that others measured.

    A method whose steps take t times as long makes 1/t of the steps, and its loss is larger by the factor t^b. b is
    d6's own, or comes from the law of the paper's runs at the size and length of the model. The gap is always d6's.
    """
    runs, content = stored_runs(context)
    two_lengths = len({r["steps"] for r in runs}) > 1
    own_b = scaling.exponent(runs if two_lengths else kept_runs.stored(scaling.OF_TWO_LENGTHS)["results"])[0]
    law = scaling.fit_law(scaling.read_runs("paper"))
    four = [m for m in IN_4_BITS if m in methods_of(runs)]
    trained = ("bf16", "fp8", *four)
    seeds = set.intersection(*({r["seed"] for r in runs if r["method"] == m} for m in trained))
    if not seeds or not four:
        raise UserError(f"--results has no seed of all of bf16, fp8, {', '.join(four or IN_4_BITS)}; add their study")
    mean = {}
    for method in trained:
        of = [r for r in runs if r["method"] == method and r["seed"] in seeds]
        mean[method] = {name: fmean(r[value] for r in of) for name, value in VALUES.items()}
    gap = {m: {name: mean[m][name] / mean["bf16"][name] - 1 for name in VALUES} for m in trained}
    rows, numbers = [], []
    for where, method, time, depth in measured_by_others():
        blocks, ends = 12 * (64 * depth) ** 2 * depth, 2 * 65536 * 64 * depth
        b_of_law = scaling.exponent_of_tokens(law, blocks, 20 * (blocks + ends))
        cells = []
        for b in (own_b, b_of_law):
            cells.append("; ".join(f"{100 * ((1 + gap[method][name]) * time**b - 1):.2f}" for name in VALUES))
        rows.append([where, method, f"{time:.2f}", f"{b_of_law:.3f}", *cells])
        numbers.append({"measured": where, "method": method, "time": time, "b": [own_b, b_of_law]})
    for method in four:
        rows.append(["-", method, "1.00", "-", *["; ".join(f"{100 * gap[method][name]:.2f}" for name in VALUES)] * 2])
    header = [
        "measured by",
        "method",
        "time over NVFP4's",
        "b of the law",
        f"gap, b = {own_b:.3f}",
        "gap, b of the law",
    ]
    notes = [
        "gap over a BF16 that trains for as many steps as NVFP4, with the own forward; with the BF16 forward; percent",
        "ASSUMPTIONS: d6's gap at every size; clover is as fast as the measured NVFP4, which has no MS-EDEN in "
        "nanochat-cpp; feedback and a last phase take 2% more each on an H200, clover_mixed's 8 bits take more, too",
        f"b = {own_b:.3f} is d6's, of {'these runs' if two_lengths else scaling.OF_TWO_LENGTHS}; b of the law is that "
        "of the paper's runs at 20 tokens per parameter. Speed, text and b move a difference by 0.3 to 1.3, so no "
        "interval of seeds is given",
    ]
    title = "At equal time: gaps of d6, and whole steps that others measured"
    return outcome(runs, content, title, header, rows, notes, {"rows": numbers})


def break_even(context: Context) -> Outcome:
    """Makes the table of R, the ratio of tokens per second from which clover_fp8_forward ends ahead of fp8 after equal
    time, by depth, and of a ladder of ratios that others measured. Both are in nanochat_fp4/cards.json."""
    studies = kept_runs.names_of(context.args.results) or cards.STUDIES
    found, ladder = cards.break_even(studies), cards.lora()
    if not found:
        raise UserError(f"no stored study of {', '.join(studies)} has runs of fp8 and of {cards.RIVAL}")
    rows = []
    for of in found:
        own_r, r, b = (f"{v:.3f}" for v in (*of["ratio"], of["b"][1]))
        ends = " ({:.2f} to {:.2f})".format(*of["interval"]) if of["interval"] else ""
        rows.append([f"d{of['depth']}", own_r, r + ends, b, "-", "-"])
    rows += [[name, "-", "-", "-", *(f"{v:.2f}" for v in ratios)] for name, ratios in ladder["ratio"].items()]
    over = f"{cards.RIVAL} over fp8"
    own = f"R, b = {found[0]['b'][0]:.3f}"
    header = ["model", own, "R, b of the law", "b of the law", "NVFP4 over FP8, measured", f"{over}, by count"]
    notes = [
        f"R: {over} in tokens/s, from which {cards.RIVAL} ends ahead after the same hours: (1 + the difference of the "
        "two gaps at d6, own forward, paired by seed)^(1/b), with the interval of that difference, which is taken "
        "to be the same at every size",
        f"measured: {ladder['source']}, {ladder['card']}; {ladder['what']}",
        "by count: two thirds of its products are in 4 bits and gain as much",
    ]
    title = "From which speed on does clover_fp8_forward end ahead of fp8?"
    where, environment = f"gaps of {', '.join(studies)}", kept_runs.pooled(map(kept_runs.stored, studies))
    return Outcome(title, header, rows, notes, {"R": found}, None, where, environment)


# ----------------------------------------------------------------------------------------------------------------------
# Sizes and lengths; the leaderboard

LADDER = ("nvidia", "clover", "clover_feedback")


def ladder(context: Context) -> Outcome:
    """Makes a table of the gaps of each study of --results, with both forwards. The studies are sweeps of small models
    of several widths and lengths."""
    rows, numbers = [], {}
    names = kept_runs.names_of(context.args.results or "ladder_*")
    contents = [kept_runs.stored(name) for name in names]
    for name, content in zip(names, contents):
        runs = content["results"]
        size, first = runs[0]["size"], runs[0]
        blocks = scaling.runs_of(first)[0].parameters
        head = (first["num_params"] - blocks) // 2
        gap = {(m, v): stats.gap(runs, size, m, v) for m in LADDER for v in VALUES.values()}
        cells = ["; ".join(str(gap[m, v]) for v in VALUES.values()) if gap[m, "val_bpb"].n else "-" for m in LADDER]
        ratios = [f"{first['tokens'] / n:.0f}" for n in (blocks + head, blocks)]
        scatter = stats.scatter(runs, size)[0]
        seeds = len({r["seed"] for r in runs if r["method"] == "bf16"})
        rows.append([name, f"{blocks / 1e6:.2f}M", *ratios, seeds, "-" if math.isnan(scatter) else f"{scatter:.2f}"])
        rows[-1] += cells
        numbers[name] = {"blocks": blocks, "tokens": first["tokens"]}
    header = ["study", "N, blocks", "tokens / (N + head)", "tokens / N", "seeds", "scatter, %"]
    notes = [
        "gaps to BF16 in percent, own forward; BF16 forward; 95%, paired by seed",
        "scatter: of one run, pooled over the methods, own forward",
        "python -m lab.reproduce effective --results 'ladder_*' fits lost parameters, lost tokens and a constant gap",
    ]
    title = "The ladder: gaps of small models by size and length"
    where = f"data {', '.join(dict.fromkeys(content['data'] for content in contents))}"
    return Outcome(title, [*header, *LADDER], rows, notes, numbers, None, where, kept_runs.pooled(contents))


def of_scaling(context: Context, name: str) -> Outcome:
    """Makes a table of lab.scaling for the paper's 21 runs, or for the studies of --results, which must have several
    sizes and lengths."""
    runs = scaling.read_runs(context.args.results or "paper")
    title, make = scaling.TABLES[name]
    methods = [m for m in dict.fromkeys(r.method for r in runs) if m != "bf16" and scaling.pairs(runs, m)]
    header, rows = make(runs, methods)
    notes = ["N counts the parameters of the blocks; c of the law is fitted, or 1"]
    named = context.args.results or "paper"
    environment = None if named == "paper" else kept_runs.pooled(map(kept_runs.stored, kept_runs.names_of(named)))
    return Outcome(title, header, rows, notes, {}, None, f"runs: {named}", environment)


# The studies whose runs were validated often enough -> the bits per byte that a run must reach.
TO_REACH = {"d6_stored": 1.27, "d6_mixed": 1.08, "d2_embedded": 2.6}


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """Returns the step at which the loss of a curve of (step, loss, ...) first reaches `target`, or None if it never
    does. Between two validations the step is interpolated.
    """
    for i, (step, loss, *_) in enumerate(curve):
        if loss <= target:
            before, higher = curve[i - 1][:2] if i else (step, loss)
            return step if higher == loss else before + (step - before) * (higher - target) / (higher - loss)
    return None


def leaderboard(context: Context) -> Outcome:
    """Makes the leaderboard: a row for each method of --results. The method that needs the fewest tokens, relative to
    BF16 with the same seed, comes first."""
    group = context.args.results or next(iter(TO_REACH))
    if group not in TO_REACH:
        raise UserError(f"--results={group}: the leaderboard has {', '.join(TO_REACH)}; others validate too rarely")
    context.args.results = group
    runs, content = stored_runs(context)
    target, tokens = TO_REACH[group], {}
    for r in runs:
        step = reached(r["curve"], target)
        if step is not None and not any(flag.startswith("--branch-from") for flag in r["flags"]):
            tokens.setdefault(r["method"], {})[r["seed"]] = round(step * r["tokens"] / r["steps"])
    seeds = sorted({seed for of in tokens.values() for seed in of})
    over = {m: fmean(n / tokens["bf16"][seed] for seed, n in of.items()) for m, of in tokens.items()}
    rows = []
    for method in sorted(over, key=over.__getitem__):
        cells = [f"{tokens[method][seed]:,}" if seed in tokens[method] else "-" for seed in seeds]
        rows.append([method, f"{over[method]:.4f}", *cells])
    header = ["method", "over bf16", *(f"seed {seed}" for seed in seeds)]
    notes = ["over bf16: the mean over the seeds of both, of the tokens over bf16's", "runs from scratch alone"]
    title = f"Leaderboard: training tokens to {target:g} bits per byte, own forward"
    return outcome(runs, content, title, header, rows, notes, {"tokens": tokens})
