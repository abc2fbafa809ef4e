"""Beyond the paper: the same weights in several forward passes, from --results whose runs lab.study.forwards evaluated.

A method's gap to BF16 has two parts. The weights have learned something else, and the forward that is evaluated rounds.
"""

from lab.study import long_runs
from lab.study import statistics as stats
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_horizon import shown_p, verdict
from nanochat_fp4.errors import UserError

# A column, and what a run calls its bits per byte with that forward. "deployed" is one term: the own forward, or that
# of feedback where the method ends in two terms.
IN_FORWARD = {"4/6, one term": "clover", "feedback, one term": "clover_feedback", "two terms": "clover_refined"}
TARGETS = ("both in BF16", 0.5, "val_bpb_bf16"), ("deployed in plain NVFP4", 0.6, "deployed")
WITH_TARGETS = "clover_feedback", "clover_search_feedback", "clover_feedback_late"


def with_value(runs: list[dict], name: str) -> list[dict]:
    """The runs that have bits per byte in a forward, as r[name]. BF16's runs, which gaps are to, keep their own."""
    found = [r | {name: r["forwards"][name]} for r in runs if r["method"] != "bf16" and name in r.get("forwards", ())]
    return found + [r | {name: r["val_bpb"]} for r in runs if r["method"] == "bf16"]


def with_deployed(runs: list[dict]) -> list[dict]:
    """The runs that can be deployed in one term, as r["deployed"]."""
    feedback = with_value(runs, "clover_feedback")
    two_terms = {m for m in long_runs.methods_of(runs) if long_runs.ends_in_two_terms(runs, m)}
    one_term = [r | {"deployed": r["val_bpb"]} for r in runs if r["method"] not in two_terms]
    return one_term + [r | {"deployed": r["clover_feedback"]} for r in feedback if r["method"] in two_terms]


def rounded_afterwards(runs: list[dict], name: str) -> str:
    """The gap of BF16's weights in another forward, paired by seed; "-" where no run has it."""
    base = [r for r in runs if r["method"] == "bf16" and name in r.get("forwards", ())]
    gaps = [100 * (r["forwards"][name] / r["val_bpb"] - 1) for r in base]
    return stats.estimate(gaps).shown(2) if gaps else "-"


def forwards(context: Context) -> Outcome:
    """Gaps of each method's weights in each forward, and the targets of these, with one correction by Holm."""
    runs, content = long_runs.stored_runs(context)
    (size,), methods = {r["size"] for r in runs}, long_runs.methods_of(runs)
    values = {"own": "val_bpb", **IN_FORWARD, "BF16": "val_bpb_bf16"}
    cells = {m: {} for m in methods}
    for column, name in values.items():
        having = runs if name.startswith("val_bpb") else with_value(runs, name)
        for method, gap in stats.pooled_differences(having, size, "bf16", value=name).items():
            if method != "bf16":
                cells[method][column] = f"{gap.shown(2)} [{gap.n}]"
    if not any(column in cells[m] for m in methods for column in IN_FORWARD):
        raise UserError("no run of --results was evaluated in several forwards; run lab.study.forwards, then its sweep")
    steps, shown = long_runs.steps_of(runs), ("own", *IN_FORWARD, "BF16")
    rows = [[m, *long_runs.cost_cells(runs, m, steps), *(cells[m].get(c, "-") for c in shown)] for m in methods]
    rows.insert(0, ["bf16", "4.00", "-", "0", *(rounded_afterwards(runs, name) for name in IN_FORWARD.values()), "0"])
    found = []
    for what, target, value in TARGETS:
        having = with_deployed(runs) if value == "deployed" else runs
        for method in (m for m in WITH_TARGETS if m in methods and stats.has_gap(having, value)):
            share, half, p = stats.against_target(having, method, target, value)
            found.append({"method": method, "what": what, "target": target, "share": share, "half": half, "p": p})
    notes = []
    for of, corrected in zip(found, stats.holm([of["p"] for of in found])):
        of |= {"p_holm": corrected, "verdict": verdict(of["share"], of["target"], corrected)}
        share = stats.with_half(of["share"], of["half"], 3)
        said = f"share {share}, target {of['target']:.2f}, p by Holm {shown_p(corrected)}: {of['verdict']}"
        notes.append(f"{of['method']}, {of['what']}: {said}")
    notes += [
        f"{len(found)} targets are tested together, two-sided, with the pooled scatter of a run; shares are of "
        "clover's gap with the same forward. Intervals are 95%, without the correction",
        "deployed in plain NVFP4: the own forward, or feedback of one term for a method that ends in two; clover's is "
        "4/6, its own",
        "gaps in percent of BF16's bits per byte, [seeds]; bf16: its weights, rounded after training",
        long_runs.TIME_NOTE,
    ]
    header = ["weights of", "GEMM work", long_runs.TIME, *shown]
    title = "The same weights in several forward passes"
    return long_runs.outcome(runs, content, title, header, rows, notes, {"gaps": cells, "targets": found})
