"""What the results of a sweep say: gaps and differences paired by seed, with 95% intervals, and the table of them."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

import numpy as np

from lab.study.sweep_runs import data_key
from nanochat_fp4.errors import UserError, one_line

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom (any table).
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def t95(freedom: int) -> float:
    """The two-sided 95% quantile of Student's t; beyond the table the normal's, 1.96, expanded in 1 / freedom
    (Cornish-Fisher: within 1e-4 from 31 on)."""
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.372 / freedom + 2.82 / freedom**2


def two_sided_p(t: float, freedom: int) -> float:
    """The probability of a Student's t at least as far from zero; NaN without degrees of freedom."""
    if freedom < 1 or math.isnan(t):
        return math.nan
    if math.isinf(t):
        return 0.0
    # With t = sqrt(freedom) tan(angle) the density is cos(angle)^(freedom - 1), and the tail's range is finite.
    angles = np.linspace(math.atan(abs(t) / freedom**0.5), math.pi / 2, 20001)
    density = np.cos(angles) ** (freedom - 1)
    area = float(np.sum((density[1:] + density[:-1]) / 2) * (angles[1] - angles[0]))
    return 2 * area * math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.pi**0.5


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's correction: adjusted p-values, in the same order; all below 0.05 hold together at 95%. NaN stays NaN."""
    adjusted, largest = [math.nan] * len(p_values), 0.0
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted


@dataclass(frozen=True)
class Estimate:
    """The mean of n numbers and half of its 95% interval (Student's t); the half is NaN for a single number."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return self.shown(2)

    def shown(self, digits: int) -> str:
        half = f" ± {self.half:.{digits}f}" if self.n > 1 and not math.isnan(self.half) else ""
        return f"{self.mean:+.{digits}f}{half}"

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.n > 1 and abs(self.mean) > self.half

    @property
    def above_zero(self) -> bool:
        """Whether the mean is, and where there is an interval all of it."""
        return self.mean > (0 if math.isnan(self.half) else self.half)


def estimate(values: Sequence[float]) -> Estimate:
    n = len(values)
    if n < 2:
        return Estimate(values[0] if values else math.nan, math.nan, n)
    return Estimate(statistics.fmean(values), t95(n - 1) * statistics.stdev(values) / n**0.5, n)


def by_seed(results: Iterable[dict], size: str, method: str, value: str = "val_bpb") -> dict[int, float]:
    return {r["seed"]: r[value] for r in results if r["size"] == size and r["method"] == method}


def gap(results: Sequence[dict], size: str, method: str, baseline: str = "bf16", value: str = "val_bpb") -> Estimate:
    """Increase of validation bits per byte over the baseline, percent of the baseline, paired by seed."""
    a, b = by_seed(results, size, method, value), by_seed(results, size, baseline)
    return estimate([100 * (a[s] / b[s] - 1) for s in sorted(a.keys() & b.keys())])


def difference(results: Sequence[dict], size: str, method: str, other: str, baseline: str = "bf16") -> Estimate:
    """Gap of method minus gap of other in percentage points, paired by seed."""
    a, b, base = (by_seed(results, size, m) for m in (method, other, baseline))
    return estimate([100 * (a[s] - b[s]) / base[s] for s in sorted(a.keys() & b.keys() & base.keys())])


def gaps_by_seed(
    results: Sequence[dict], size: str, method: str, value: str = "val_bpb", baseline: str = "bf16"
) -> dict[int, float]:
    """seed -> increase over the baseline of that seed in percent."""
    a, b = by_seed(results, size, method, value), by_seed(results, size, baseline)
    return {s: 100 * (a[s] / b[s] - 1) for s in sorted(a.keys() & b.keys())}


def scatter(results: Sequence[dict], size: str, value: str = "val_bpb") -> tuple[float, int]:
    """(standard deviation of one run in percent, degrees of freedom), around what its method and its seed make of it.

    Of the residuals of a two-way analysis of variance of the gaps, methods x seeds, where not every method has every
    seed; NaN where it leaves none. Only of methods trained from scratch: branches of one run (sweep --share-until) have
    its scatter in common.
    """
    mine = [r for r in results if r["size"] == size]
    branches = {r["method"] for r in mine if any(f.startswith("--branch-from") for f in r.get("flags", ()))}
    methods = [m for m in dict.fromkeys(r["method"] for r in mine) if m not in branches]
    gaps = {(m, s): gap for m in methods for s, gap in gaps_by_seed(mine, size, m, value).items()}
    effects = list(dict.fromkeys(effect for run in gaps for effect in run))  # methods and seeds
    design = np.array([[effect in run for effect in effects] for run in gaps], dtype=float)
    design, y = design.reshape(len(gaps), len(effects)), np.array(list(gaps.values()))
    fit, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(y) - int(rank)
    return (float(np.sum((y - design @ fit) ** 2) / freedom) ** 0.5 if freedom else math.nan), freedom


def pooled_differences(
    results: Sequence[dict],
    size: str,
    other: str,
    share: float = 1.0,
    value: str = "val_bpb",
    scatter_of: Sequence[dict] | None = None,
) -> dict[str, Estimate]:
    """method -> gap of the method minus `share` times that of the other, in percentage points, paired by seed.

    Intervals are of the scatter of a run, pooled over all methods of the results, or of `scatter_of`. value: of the
    gaps.
    """
    deviation, freedom = scatter(scatter_of or results, size, value)
    theirs = gaps_by_seed(results, size, other, value)
    differences: dict[str, Estimate] = {}
    for method in dict.fromkeys(r["method"] for r in results if r["size"] == size):
        mine = gaps_by_seed(results, size, method, value)
        if both := sorted(mine.keys() & theirs.keys()):
            # What each run of a seed counts for in the difference: gaps are to bf16, whose scatter is in both.
            weights = Counter({method: 1.0})
            weights.subtract({other: share})
            weights.subtract({"bf16": 1 - share})
            error = deviation * math.hypot(*weights.values()) / len(both) ** 0.5
            half = t95(freedom) * error if freedom else math.nan
            differences[method] = Estimate(statistics.fmean(mine[s] - share * theirs[s] for s in both), half, len(both))
    return differences


def summary(results: Sequence[dict], methods: Sequence[str], sizes: Sequence[str], baseline: str, other: str):
    """(header, rows) of the table: BPB, gap to the baseline and paired difference to another method."""
    header = ["size", "method", "seeds", "val BPB", f"gap to {baseline}, %", "BF16 fwd", f"minus {other}", "minutes"]
    rows = []
    for size in sizes:
        for method in methods:
            mine = [r for r in results if r["size"] == size and r["method"] == method]
            if not mine:
                continue
            bpb = statistics.fmean(r["val_bpb"] for r in mine)
            minutes = statistics.fmean(r["training_seconds"] for r in mine) / 60
            row = [size, method, len(mine), f"{bpb:.4f}"]
            for value, missing in (
                (gap(results, size, method, baseline), method == baseline),
                (gap(results, size, method, baseline, "val_bpb_bf16"), method == baseline),
                (difference(results, size, method, other, baseline), method == other),
            ):
                row.append("-" if missing or not value.n else str(value))
            rows.append([*row, f"{minutes:.1f}"])
    return header, rows


def other_lengths(results: Sequence[dict], size: str, baseline: str = "bf16") -> str:
    """A note that names the methods that were trained for more or fewer steps than the baseline; "" without any."""
    steps = {r["method"]: r["steps"] for r in results if r["size"] == size}
    usual = steps.get(baseline)
    others = [f"{method} {n:,}" for method, n in steps.items() if usual and n != usual]
    said = f"of other lengths than {baseline}'s {usual:,} steps, compared with it at their ends: " if others else ""
    return said + ", ".join(others)


def data_name(data_dir: str) -> str:
    """What a table says of its text: the folder's name, and data_key."""
    return f"{Path(data_dir).name} ({data_key(data_dir)})"


# The paper's runs, as its published code and nanochat's speedrun say: text, the name that a folder of it has here,
# vocabulary, and flags of base_train. A micro-batch shares a tensor_scale; of nanochat's it is not published.
PAPER_RUNS = {
    "llama": ("C4", "c4_", 32_000, {"total-batch-size": 262144, "max-seq-len": 512, "device-batch-size": 128}),
    "nanochat": (
        "FineWeb-Edu", "base_data", 65_536, {"total-batch-size": 524288, "max-seq-len": 2048, "window-pattern": "SSSL"}
    ),
}  # fmt: skip


def difference_from_paper(result: dict, data: str) -> str:
    """How a run differs from the paper's with its kind of model, in words; data: data_name of its text."""
    text, folder, vocabulary, wanted = PAPER_RUNS["llama" if result["size"].startswith("llama-") else "nanochat"]
    if "flags" not in result:
        return ""
    flags = {name.removeprefix("--"): value for name, _, value in (flag.partition("=") for flag in result["flags"])}
    said = [] if data.startswith(folder) else [f"text {data.rpartition(' (')[0]}, not {text}"]
    if (size := result.get("vocab_size")) is not None and size != vocabulary:
        said.append(f"vocabulary {size:,}, not {vocabulary:,}")
    defaults = {"device-batch-size": "32", "window-pattern": "SSSL"}
    for name, value in wanted.items():
        if (mine := flags.get(name, defaults.get(name))) != str(value):
            said.append(f"{name} {mine}, not {value}")
    return "; ".join(said)


# What a multiply-add costs in units of one in 4 bits: the rates of a B200's tensor cores.
COST = {"4": 1.0, "8": 2.0, "16": 4.0}

# What every table takes of a run.
NEEDED = {
    "method": str, "size": str, "seed": int, "steps": int, "tokens": int,
    "val_bpb": float, "val_bpb_bf16": float, "gemm_work": dict,
}  # fmt: skip


def check_run(run: dict) -> None:
    """Raises ValueError, KeyError or TypeError where this is not what a run of a sweep has written."""
    for name, kind in NEEDED.items():
        value = run[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(f"{name} is {value!r}, expected {kind.__name__}")
        if kind in (int, float) and name != "seed" and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, expected a positive number")
    if not all(bits in COST and isinstance(share, int | float) for bits, share in run["gemm_work"].items()):
        raise ValueError(f"gemm_work is {run['gemm_work']!r}, expected shares of {', '.join(COST)} bits")
    points = [*run.get("curve", ()), *run.get("loss_curve", ())]
    if not all(isinstance(number, int | float) for point in points for number in point[:2]):
        raise ValueError("its curves are not pairs of numbers")
    if not all(isinstance(flag, str) for flag in run.get("flags", ())):
        raise ValueError("its flags are not text")


def stored(path: str | Path) -> dict:
    """What `report` wrote: at least "data", "environment" and "results". Raises UserError."""
    try:
        content = json.loads(Path(path).read_text())
        for run in content["results"]:
            check_run(run)
        if content["results"] and content["data"]:
            itemgetter("gpu", "gpu_count", "torch")(content["environment"])  # for the line below a table
            return content
    except (OSError, ValueError, KeyError, TypeError) as e:
        problem = f"{path} is not a file of lab.study.sweep ({type(e).__name__}: {one_line(e)[:80]})"
        raise UserError(f"{problem}; give <folder>/<name>.json of a sweep") from None
    raise UserError(f"{path} holds no results; run its sweep first")
