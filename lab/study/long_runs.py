"""The runs of sweeps long enough to decide: read from files, refused where they cannot be compared, and summed up.

Gaps are to the bf16 run of a seed. The statistics are those of lab.study.statistics.
"""

import statistics
from dataclasses import dataclass
from typing import Any

from lab import runs as kept_runs
from lab.predict.machines import MACHINES
from lab.predict.predicted_time import CARD, DEPTH, over_clover
from lab.study import sweep_results
from lab.study.reproduce_common import Context, Outcome
from lab.study.statistics import Estimate, against_target, gaps_by_seed, has_gap, pooled_differences, with_half
from nanochat_fp4.errors import UserError

# The forward that is evaluated, and what a run calls its bits per byte with it.
VALUES = {"own": "val_bpb", "BF16": "val_bpb_bf16"}
FORWARD_NAMES = {"val_bpb": "own forward", "val_bpb_bf16": "BF16 forward"}
DEPLOYED = "val_bpb_one_term"  # plain NVFP4, as export writes it, of runs that end in two terms

DEPLOYED_COLUMN = "plain NVFP4, one term"
DEPLOYED_NOTE = (
    "plain NVFP4, one term: the gap and its share of clover's, where a run that ends in two terms is deployed as "
    "export writes it; with its own forward such a model takes three products for each forward GEMM at inference"
)
TIME = f"time, {MACHINES[CARD].name}, d{DEPTH}"
TIME_NOTE = (
    f"time: of the run, PREDICTED for d{DEPTH} on one {MACHINES[CARD].name}, over clover's (predicted_time.py); with "
    "rounding, Gram matrices and the rounding with feedback; -: kernels that are not counted"
)


def stored_runs(context: Context) -> tuple[list[dict], dict]:
    """The runs of --results (several files with commas: of the same data, other seeds or methods), of --sizes if that
    is given, and what else the first file says; each run with its "file". Raises UserError."""
    paths = kept_runs.names_of(context.args.results)
    if not paths:
        problem = "this item takes its runs from a study; name one of python -m lab.runs"
        raise UserError(f"{problem}, or a JSON file of lab.study.sweep: --results=NAME")
    content, *_ = contents = [kept_runs.stored(path) for path in paths]
    sizes = list(dict.fromkeys(r["size"] for c in contents for r in c["results"]))
    if len(sizes) > 1 and not context.args.sizes:
        raise UserError(f"--results has runs of {', '.join(sizes)}; choose one of them, --sizes={sizes[0]}")
    size = context.args.sizes or sizes[0]
    runs = [r | {"file": i} for i, c in enumerate(contents) for r in c["results"] if r["size"] == size]
    for path, other in zip(paths, contents):
        if other["data"] != content["data"]:
            both = f"{path} is of {other['data']}, {paths[0]} of {content['data']}"
            raise UserError(f"{both}: give sweeps of the same text")
    seen: dict[tuple, dict] = {}
    for r in runs:  # studies may have a run in common
        first = seen.setdefault((r["method"], r["seed"]), r)
        if (first["val_bpb"], first["steps"]) != (r["val_bpb"], r["steps"]):
            raise UserError(f"--results has {r['method']} of seed {r['seed']} twice; give files of different runs")
    seeds = {r["seed"] for r in runs if r["method"] == "bf16"}
    if not seeds:
        raise UserError(f"{context.args.results} has no bf16 run of size {size!r}; gaps are to bf16")
    runs = [r for r in runs if r["seed"] in seeds]  # of an interrupted sweep the last seed may have none
    if unused := [path for i, path in enumerate(paths) if i not in {r["file"] for r in runs}]:
        problem = f"no run of {unused[0]} has size {size!r} and a bf16 run of its seed in --results"
        raise UserError(f"{problem}; add its file")
    runs = [r for r in runs if r is seen[r["method"], r["seed"]]]
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
        order = [f for f in run["flags"] if f.startswith("--data-seed=")]
        return order, run.get("eval_tokens")

    base = {r["seed"]: text(r) for r in runs if r["method"] == "bf16"}
    for r in runs:
        if text(r) != base[r["seed"]]:
            both = f"{r['method']} and bf16 of seed {r['seed']} in --results read the text in different orders"
            mend = "give files of sweeps with the same --vary-data and --eval-tokens"
            raise UserError(f"{both} or are evaluated on different parts of it; {mend}")


def steps_of(runs: list[dict]) -> int:
    """The usual number of steps: bf16's."""
    return next(r["steps"] for r in runs if r["method"] == "bf16")


def methods_of(runs: list[dict]) -> list[str]:
    """All but bf16, in the order of the runs."""
    return [m for m in dict.fromkeys(r["method"] for r in runs) if m != "bf16"]


def lengths(runs: list[dict]) -> list[str]:
    """Notes of methods of other lengths than bf16's, and of other models, if there are any."""
    note = sweep_results.other_lengths(runs, runs[0]["size"])
    notes = [f"{note}; GEMM work counts their steps"] if note else []
    parameters = {r["method"]: r.get("num_params") for r in runs}
    if other := {m: n for m, n in parameters.items() if n != parameters["bf16"]}:
        sizes = ", ".join(f"{m} {n:,}" for m, n in other.items())
        notes += [f"bf16 has {parameters['bf16']:,} parameters, {sizes}; GEMM work and time do not count that"]
    return notes


def gemm_work(run: dict, steps: int) -> float:
    """GEMM work of a run in units of all GEMMs of `steps` steps in 4 bits."""
    return sum(sweep_results.COST[bits] * share for bits, share in run["gemm_work"].items()) * run["steps"] / steps


def along(runs: list[dict], curve: str = "curve", column: int = 1) -> dict[str, dict[int, dict[int, float]]]:
    """method -> seed -> step -> gap to bf16 in percent at that step.

    curve: "curve" of the validation text, or "loss_curve" of the training text, whose numbers are means up to a step.
    column: of "curve", 1 for the own forward and 2 for the BF16 forward.
    """
    base = {r["seed"]: {c[0]: c[1] for c in r.get(curve, ())} for r in runs if r["method"] == "bf16"}
    gaps: dict[str, dict[int, dict[int, float]]] = {}
    for r in runs:
        if r["method"] != "bf16" and r["seed"] in base and r["steps"] == steps_of(runs):
            bf16 = base[r["seed"]]
            known = [c for c in r.get(curve, ()) if c[0] in bf16 and c[0] and c[column:]]
            gaps.setdefault(r["method"], {})[r["seed"]] = {c[0]: 100 * (c[column] / bf16[c[0]] - 1) for c in known}
    return gaps


@dataclass(frozen=True)
class Beside:
    """A method's gaps in percent with one forward, beside clover's with the same forward."""

    by_seed: dict[int, float]  # seed -> gap
    gap: Estimate  # their mean
    level: float  # the share times clover's mean of all seeds, to compare methods of different seeds
    minus_clover: Estimate | None  # in points, paired by seed; None without a common seed
    share: tuple[float, float] | None  # of clover's gap, and half of its 95% interval; None where clover has none

    def cells(self, is_clover: bool) -> list[str]:
        """Gap, minus clover, and share, for a table."""
        minus = "-" if is_clover or self.minus_clover is None else str(self.minus_clover)
        share = "-" if self.share is None else "1" if is_clover else with_half(*self.share, 2)
        return [str(self.gap), minus, share]


def beside(runs: list[dict], method: str, value: str) -> Beside | None:
    """A method's gaps by one value of the runs (VALUES or DEPLOYED). None where no run of it has the value."""
    runs = [r for r in runs if value in r]
    size = next((r["size"] for r in runs), "")
    own, clover = (gaps_by_seed(runs, size, m, value) for m in (method, "clover"))
    if not own:
        return None
    gap = pooled_differences(runs, size, "bf16", value=value)[method]
    minus = pooled_differences(runs, size, "clover", value=value).get(method)
    both, share, level = own.keys() & clover.keys(), None, statistics.fmean(own.values())
    if both and has_gap(runs, value):
        mean = sum(own[s] for s in both) / sum(clover[s] for s in both)
        share = mean, against_target(runs, method, mean, value)[1]
        level = mean * statistics.fmean(clover.values())
    return Beside(own, gap, level, minus, share)


def ends_in_two_terms(runs: list[dict], method: str) -> bool:
    return max(r["gemm_work"].get("4", 0) for r in runs if r["method"] == method) >= 1.001


def deployed(runs: list[dict], method: str) -> str:
    """The gap where a run that ends in two terms is deployed in plain NVFP4, one term each; "-" for other methods.

    Its share is of clover's gap with clover's own forward, which is plain NVFP4.
    """
    if not ends_in_two_terms(runs, method):
        return "-"
    plain = [r | {DEPLOYED: r[VALUES["own"]]} if r["method"] in ("bf16", "clover") else r for r in runs]
    found = beside(plain, method, DEPLOYED)
    gap, _, share = found.cells(False) if found else ("", "", "")
    return f"{gap} ({share} of clover's)" if found else "not measured"


def summary(runs: list[dict]) -> list[dict[str, Any]]:
    """A record for each method, the best with its own forward last: cost, and its gaps with both forwards."""
    steps, records = steps_of(runs), []
    for method in methods_of(runs):
        run = next(r for r in runs if r["method"] == method)
        forwards = {name: beside(runs, method, value) for name, value in VALUES.items()}
        if forwards["own"]:
            cost = {"work": gemm_work(run, steps), "time": over_clover(run, steps)}
            records.append({"method": method, **cost, **forwards, "deployed": deployed(runs, method)})
    return sorted(records, key=lambda r: -r["own"].level)


def cost_cells(runs: list[dict], method: str, steps: int) -> list[str]:
    """GEMM work and predicted time of a method's run, for a table."""
    run = next(r for r in runs if r["method"] == method)
    time = over_clover(run, steps)
    return [f"{gemm_work(run, steps):.2f}", "-" if time is None else f"{time:.3f}"]


def outcome(runs: list[dict], content: dict, title: str, header: list[str], *args: Any) -> Outcome:
    """An outcome with the text, the lengths and the seeds of stored runs, and the machine that trained them."""
    tokens, seeds = sorted({r["tokens"] for r in runs}), sorted({r["seed"] for r in runs})
    said = f"{runs[0]['size']}, data {content['data']}, {'/'.join(f'{t:,}' for t in tokens)} tokens, seeds {seeds}"
    return Outcome(title, header, *args, measured_on=said, environment=content["environment"])
