"""The runs of sweeps long enough to decide: read from files, refused where they cannot be compared, and summed up.

Gaps are to the bf16 run of a seed. Statistics are of differences paired by seed, with the scatter of a run pooled over
the methods (two-way analysis of variance): it is of the training and not of a method, and two seeds alone say nothing.
"""

import math
import re
import statistics
from typing import Any

from lab.study import sweep_results
from lab.study.reproduce_common import Context
from nanochat_fp4.errors import UserError


def stored_runs(context: Context) -> tuple[list[dict], dict]:
    """The runs of --results (several files with commas: of the same data, other seeds or methods), of --sizes if that
    is given, and what else the first file says; each run with its "file". Raises UserError."""
    paths = [path for path in context.args.results.split(",") if path]
    if not paths:
        raise UserError("this item takes its runs from a sweep: add --results=<folder>/<name>.json of lab.study.sweep")
    contents = [sweep_results.stored(path) for path in paths]
    content = contents[0]
    sizes = list(dict.fromkeys(r["size"] for c in contents for r in c["results"]))
    if len(sizes) > 1 and not context.args.sizes:
        raise UserError(f"--results has runs of {', '.join(sizes)}; choose one of them, --sizes={sizes[0]}")
    size = context.args.sizes or sizes[0]
    runs = [r | {"file": i} for i, c in enumerate(contents) for r in c["results"] if r["size"] == size]
    for path, other in zip(paths, contents):
        if other["data"] != content["data"]:
            raise UserError(
                f"{path} is of {other['data']}, {paths[0]} of {content['data']}: give sweeps of the same text"
            )
    keys = [(r["method"], r["seed"]) for r in runs]
    if twice := sorted({k for k in keys if keys.count(k) > 1}):
        raise UserError(f"--results has {twice[0][0]} of seed {twice[0][1]} twice; give files of different runs")
    seeds = {r["seed"] for r in runs if r["method"] == "bf16"}
    if not seeds:
        raise UserError(f"{context.args.results} has no bf16 run of size {size!r}; gaps are to bf16")
    runs = [r for r in runs if r["seed"] in seeds]  # of an interrupted sweep the last seed may have none
    for i, path in enumerate(paths):
        if i not in {r["file"] for r in runs}:
            raise UserError(f"no run of {path} has size {size!r} and a bf16 run of its seed in --results; add its file")
    if {r["method"] for r in runs} == {"bf16"}:
        raise UserError(f"{context.args.results} has bf16 runs of size {size!r} alone; gaps are those of other methods")
    refuse_unlike(runs)
    commits = dict.fromkeys(c["environment"].get("commit") or "unknown" for c in contents)
    return runs, content | {"environment": content["environment"] | {"commit": ", ".join(commits)}}


def refuse_unlike(runs: list[dict]) -> None:
    """UserError where a method's runs are not of one length, or a run had other text than the bf16 run of its seed."""
    length: dict[str, int] = {}
    for r in runs:
        if (steps := length.setdefault(r["method"], r["steps"])) != r["steps"]:
            both = f"{r['method']} of {steps:,} and of {r['steps']:,} steps"
            raise UserError(f"--results has runs of {both}; give files of one, or name the others by a --variant")

    def text(run: dict) -> tuple:
        flags = run.get("flags", ())  # --data-seed: until 2026-11-23
        return [f for f in flags if f.startswith("--data-seed") or re.match("--seed=.*,", f)], run.get("eval_tokens")

    base = {r["seed"]: text(r) for r in runs if r["method"] == "bf16"}
    for r in runs:
        if text(r) != base[r["seed"]]:
            raise UserError(
                f"{r['method']} and bf16 of seed {r['seed']} in --results read the text in different orders or are "
                "evaluated on different parts of it; give files of sweeps with the same --vary-data and --eval-tokens"
            )


def steps_of(runs: list[dict]) -> int:
    """The usual number of steps: bf16's."""
    return next(r["steps"] for r in runs if r["method"] == "bf16")


def methods_of(runs: list[dict]) -> list[str]:
    """All but bf16, in the order of the runs."""
    return [m for m in dict.fromkeys(r["method"] for r in runs) if m != "bf16"]


def lengths(runs: list[dict]) -> list[str]:
    """A note of methods of other lengths than bf16's, if there are any."""
    note = sweep_results.other_lengths(runs, runs[0]["size"])
    return [f"{note}; GEMM work counts their steps"] if note else []


def gemm_work(run: dict, steps: int) -> float:
    """GEMM work of a run in units of all GEMMs of `steps` steps in 4 bits."""
    return sum(sweep_results.COST[bits] * share for bits, share in run["gemm_work"].items()) * run["steps"] / steps


def along(runs: list[dict], curve: str = "curve") -> dict[str, dict[int, dict[int, float]]]:
    """method -> seed -> step -> gap to bf16 in percent at that step: of the validation text's "curve", or "loss_curve",
    that of the training text, where a step is the last of those that its number is the mean of."""
    base = {r["seed"]: {c[0]: c[1] for c in r.get(curve, ())} for r in runs if r["method"] == "bf16"}
    gaps: dict[str, dict[int, dict[int, float]]] = {}
    for r in runs:
        if r["method"] != "bf16" and r["seed"] in base and r["steps"] == steps_of(runs):
            bf16 = base[r["seed"]]
            at = {c[0]: 100 * (c[1] / bf16[c[0]] - 1) for c in r.get(curve, ()) if c[0] and c[0] in bf16}
            gaps.setdefault(r["method"], {})[r["seed"]] = at
    return gaps


def summary(runs: list[dict]) -> list[dict[str, Any]]:
    """A record for each method, the best last: its GEMM work, gaps by seed, with a BF16 forward, and minus clover."""
    (size,), steps, methods = {r["size"] for r in runs}, steps_of(runs), methods_of(runs)
    minus = sweep_results.pooled_differences(runs, size, "clover")
    gaps = sweep_results.pooled_differences(runs, size, "bf16")
    shares, records = "clover" in gaps and gaps["clover"].above_zero, []
    for method in methods:
        own = sweep_results.gaps_by_seed(runs, size, method)
        forward = sweep_results.gaps_by_seed(runs, size, method, "val_bpb_bf16")
        clover = sweep_results.gaps_by_seed(runs, size, "clover")
        both = sorted(own.keys() & clover.keys())
        if not own:
            continue
        whole = sum(clover[s] for s in both)
        share = sum(own[s] for s in both) / whole if whole and shares else None
        # Seeds differ in their gaps: a method's share of clover's, on the seeds of both, is of clover's mean of all.
        beside = statistics.fmean(own.values()) if share is None else share * statistics.fmean(clover.values())
        records.append(
            {
                "method": method,
                "work": gemm_work(next(r for r in runs if r["method"] == method), steps),
                "gaps": own,
                "gap": beside,
                "pooled": gaps[method],
                "forward": sum(forward.values()) / len(forward),
                "minus_clover": minus.get(method),
                "share": share,
            }
        )
    return sorted(records, key=lambda r: -r["gap"])


def measured_on(runs: list[dict], content: dict) -> str:
    tokens, seeds = sorted({r["tokens"] for r in runs}), sorted({r["seed"] for r in runs})
    return f"{runs[0]['size']}, data {content['data']}, {'/'.join(f'{t:,}' for t in tokens)} tokens, seeds {seeds}"


def has_gap(runs: list[dict], value: str = "val_bpb") -> bool:
    """Whether clover's gap is above zero beyond its interval: a share of nothing means nothing."""
    (size,) = {r["size"] for r in runs}
    clover = sweep_results.pooled_differences(runs, size, "bf16", value=value).get("clover")
    return clover is not None and clover.above_zero


def share_of(
    runs: list[dict], method: str, target: float, value: str, scatter_of: list[dict] | None = None
) -> tuple[float, float]:
    """(share of clover's gap, half of its 95% interval), by the method minus target times clover; scatter_of: the runs
    whose scatter it is of, if not these."""
    (size,) = {r["size"] for r in runs}
    difference = sweep_results.pooled_differences(runs, size, "clover", target, value, scatter_of)[method]
    mine, clover = (sweep_results.gaps_by_seed(runs, size, m, value) for m in (method, "clover"))
    mean = statistics.fmean(clover[s] for s in mine.keys() & clover.keys())
    return target + difference.mean / mean, difference.half / mean


def with_half(mean: float, half: float, digits: int) -> str:
    """A mean and half of its interval, which one seed of each method does not have."""
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
