"""Beyond the paper: runs long enough to decide. Gaps along the run, and the frontier of gap against GEMM work.

Both take the runs of one size from --results; statistics are of differences paired by seed, their scatter pooled over
the methods, for the scatter between seeds is of the training and not of a method, and two seeds alone say nothing.
"""

from typing import Any

from nanochat_fp4.errors import UserError
from scripts import sweep_results
from scripts.reproduce_common import Context, Outcome

# What a multiply-add costs in units of one in 4 bits: the rates of a B200's tensor cores.
COST = {"4": 1.0, "8": 2.0, "16": 4.0}
PARTS = (0.3, 0.5, 0.7, 0.8, 0.9)  # of the run: where the table shows the gap on the way


def stored_runs(context: Context) -> tuple[list[dict], dict]:
    """The runs of --results, of --sizes if that is given, and what else the file says. Raises UserError."""
    if not context.args.results:
        raise UserError("this item takes its runs from a sweep: add --results=<folder>/<name>.json of scripts.sweep")
    content = sweep_results.stored(context.args.results)
    size = context.args.sizes or content["results"][0]["size"]
    runs = [r for r in content["results"] if r["size"] == size]
    if not any(r["method"] == "bf16" for r in runs):
        raise UserError(f"{context.args.results} has no bf16 run of size {size!r}; gaps are to bf16")
    return runs, content


def steps_of(runs: list[dict]) -> int:
    """The usual number of steps: bf16's."""
    return next(r["steps"] for r in runs if r["method"] == "bf16")


def gemm_work(run: dict, steps: int) -> float:
    """GEMM work of a run in units of all GEMMs of `steps` steps in 4 bits."""
    return sum(COST[bits] * share for bits, share in run["gemm_work"].items()) * run["steps"] / steps


def along(runs: list[dict]) -> dict[str, dict[int, dict[int, float]]]:
    """method -> seed -> step -> gap to bf16 in percent at that step."""
    base = {r["seed"]: {c[0]: c[1] for c in r["curve"]} for r in runs if r["method"] == "bf16"}
    gaps: dict[str, dict[int, dict[int, float]]] = {}
    for r in runs:
        if r["method"] != "bf16" and r["seed"] in base and r["steps"] == steps_of(runs):
            bf16 = base[r["seed"]]
            at = {c[0]: 100 * (c[1] / bf16[c[0]] - 1) for c in r["curve"] if c[0] and c[0] in bf16}
            gaps.setdefault(r["method"], {})[r["seed"]] = at
    return gaps


def summary(runs: list[dict]) -> list[dict[str, Any]]:
    """A record for each method, the best last: its GEMM work, gaps by seed, with a BF16 forward, and minus clover."""
    (size,), steps = {r["size"] for r in runs}, steps_of(runs)
    methods = [m for m in dict.fromkeys(r["method"] for r in runs) if m != "bf16"]
    minus = sweep_results.pooled_differences(runs, size, methods, "clover")
    records = []
    for method in methods:
        own = sweep_results.gaps_by_seed(runs, size, method)
        forward = sweep_results.gaps_by_seed(runs, size, method, "val_bpb_bf16")
        clover = sweep_results.gaps_by_seed(runs, size, "clover")
        both = sorted(own.keys() & clover.keys())
        if not own:
            continue
        records.append(
            {
                "method": method,
                "work": gemm_work(next(r for r in runs if r["method"] == method), steps),
                "gaps": own,
                "gap": sum(own.values()) / len(own),
                "forward": sum(forward.values()) / len(forward),
                "minus_clover": minus.get(method),
                "share": sum(own[s] for s in both) / sum(clover[s] for s in both) if both else None,
            }
        )
    return sorted(records, key=lambda r: -r["gap"])


def measured_on(runs: list[dict], content: dict) -> str:
    tokens, seeds = sorted({r["tokens"] for r in runs}), sorted({r["seed"] for r in runs})
    return f"{runs[0]['size']}, data {content['data']}, {'/'.join(f'{t:,}' for t in tokens)} tokens, seeds {seeds}"


def horizon(context: Context) -> Outcome:
    runs, content = stored_runs(context)
    steps, curves, records = steps_of(runs), along(runs), summary(runs)
    rows = []
    for r in records:
        cells = []
        for part in PARTS:
            values = [g[s] for g in curves.get(r["method"], {}).values() for s in g if abs(s / steps - part) < 0.01]
            cells.append(" / ".join(f"{v:.2f}" for v in values) or "-")
        last = " / ".join(f"{v:.2f}" for v in r["gaps"].values())
        minus = "-" if r["method"] == "clover" or r["minus_clover"] is None else str(r["minus_clover"])
        share = "-" if r["share"] is None else f"{r['share']:.2f}x"
        rows.append([r["method"], f"{r['work']:.3f}", *cells, last, f"{r['forward']:.2f}", minus, share])

    def plot(axes) -> None:
        for method, seeds in curves.items():
            shared = set.intersection(*(set(g) for g in seeds.values()))
            points = [(s, sum(g[s] for g in seeds.values()) / len(seeds)) for s in sorted(shared)]
            axes.plot([100 * s / steps for s, _ in points], [g for _, g in points], marker=".", label=method)
        axes.set_xlabel("steps, %")
        axes.set_ylabel("increase of validation BPB over bf16, %")
        axes.legend(fontsize=5, ncols=2)

    numbers = [r | {"minus_clover": r["minus_clover"] and str(r["minus_clover"])} for r in records]
    ways = [f"{100 * p:.0f}%" for p in PARTS]
    return Outcome(
        "Gap to BF16 along the run",
        ["method", "GEMM work", *ways, "end", "BF16 forward", "minus clover", "of clover's"],
        rows,
        [
            "each seed's gap in percent; BF16 forward: mean of the seeds, the trained weights evaluated in BF16",
            "minus clover: points, 95%, paired by seed, the scatter between seeds pooled over the methods "
            "trained from scratch",
            "GEMM work: 1 is every GEMM of the run in 4 bits; 8 bits count 2 and 16 bits 4",
        ],
        {"methods": numbers},
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
        axes.scatter([r["work"] for r in shown], [r["gap"] for r in shown], s=12)
        edge = [r for r in shown if r["method"] in on_it]
        axes.step([r["work"] for r in edge], [r["gap"] for r in edge], where="post", lw=0.8)
        for r in shown:
            axes.annotate(r["method"], (r["work"], r["gap"]), fontsize=5, xytext=(2, 2), textcoords="offset points")
        axes.set_xlabel("GEMM work of the run, all in 4 bits = 1 (8 bits count 2, 16 bits 4)")
        axes.set_ylabel("increase of validation BPB over bf16, %")

    return Outcome(
        "The frontier of gap against GEMM work",
        ["method", "GEMM work", "gap, %", "BF16 forward", "seeds", "nothing is better for less"],
        rows,
        ["runs with more than 1.5 are in the table alone"],
        {"methods": [{k: v for k, v in r.items() if k != "minus_clover"} for r in records]},
        plot,
        measured_on(runs, content),
        content["environment"],
    )
