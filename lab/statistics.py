"""Statistics of the runs of a sweep: gaps, differences paired by seed, 95% intervals, shares of clover's gap.

The scatter of a run is pooled over the methods (two-way analysis of variance), because the scatter belongs to the
training and not to a method. Two seeds of one method alone would leave its interval too wide to say anything.
"""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from mpmath import betainc, findroot  # torch depends on mpmath, so it is installed even without a network.


def two_sided_p(t: float, freedom: int) -> float:
    """Returns the probability that a Student's t is at least as far from zero as t. It is NaN without degrees of
    freedom."""
    if freedom < 1 or math.isnan(t):
        return math.nan
    return 0.0 if math.isinf(t) else float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


@cache
def t95(freedom: int) -> float:
    """Returns the two-sided 95% quantile of Student's t, which is the t whose two_sided_p is 0.05."""

    def too_likely(angle: float) -> float:  # With t = sqrt(freedom) tan(angle) the root is in a finite range.
        return betainc(freedom / 2, 0.5, 0, math.cos(angle) ** 2, regularized=True) - 0.05

    angle = findroot(too_likely, (0.01, math.pi / 2 - 1e-6), solver="illinois", tol=1e-22)
    return freedom**0.5 * math.tan(angle)


def holm(p_values: Sequence[float]) -> list[float]:
    """Applies Holm's correction. Returns adjusted p-values in the same order. All hypotheses with a value below 0.05
    are rejected together at 95%. NaN stays NaN."""
    adjusted, largest = [math.nan] * len(p_values), 0.0
    known = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[i] = largest
    return adjusted


@dataclass(frozen=True)
class Estimate:
    """The mean of n numbers, and half of its 95% interval by Student's t. The half is NaN for a single number."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return self.shown(2)

    def shown(self, digits: int) -> str:
        """Formats the mean and half of the interval with so many digits."""
        half = f" ± {self.half:.{digits}f}" if self.n > 1 and not math.isnan(self.half) else ""
        return f"{self.mean:+.{digits}f}{half}"

    @property
    def decided(self) -> bool:
        """True if the interval excludes zero."""
        return self.n > 1 and abs(self.mean) > self.half

    @property
    def above_zero(self) -> bool:
        """True if the mean is above zero. With an interval, its lower end must be above zero too."""
        return self.mean > (0 if math.isnan(self.half) else self.half)


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of some numbers with its interval."""
    n = len(values)
    if n < 2:
        return Estimate(values[0] if values else math.nan, math.nan, n)
    return Estimate(statistics.fmean(values), t95(n - 1) * statistics.stdev(values) / n**0.5, n)


def by_seed(results: Iterable[dict], size: str, method: str, value: str = "val_bpb") -> dict[int, float]:
    """Returns a method's values of one size by seed."""
    return {r["seed"]: r[value] for r in results if r["size"] == size and r["method"] == method}


def gaps_by_seed(results: Sequence[dict], size: str, method: str, value: str = "val_bpb") -> dict[int, float]:
    """Returns for each seed the increase over bf16 of the same seed, in percent."""
    a, b = by_seed(results, size, method, value), by_seed(results, size, "bf16")
    return {s: 100 * (a[s] / b[s] - 1) for s in sorted(a.keys() & b.keys())}


def gap(results: Sequence[dict], size: str, method: str, value: str = "val_bpb") -> Estimate:
    """Returns the gap: the increase of validation bits per byte over bf16, in percent of bf16's, paired by seed."""
    return estimate([*gaps_by_seed(results, size, method, value).values()])


def difference(results: Sequence[dict], size: str, method: str, other: str, value: str = "val_bpb") -> Estimate:
    """Returns the gap of `method` minus the gap of `other`, in percentage points, paired by seed."""
    a, b = (by_seed(results, size, m, value) for m in (method, other))
    base = by_seed(results, size, "bf16")
    return estimate([100 * (a[s] - b[s]) / base[s] for s in sorted(a.keys() & b.keys() & base.keys())])


def scatter(results: Sequence[dict], size: str, value: str = "val_bpb") -> tuple[float, int]:
    """Returns the standard deviation of one run, in percent, around the effects of its method and its seed, and the
    degrees of freedom.

    The deviation is that of the residuals of a two-way analysis of variance of the gaps, methods by seeds. Not every
    method needs every seed. The deviation is NaN if no degree of freedom is left. Only methods that were trained from
    scratch count, because the branches of one run (sweep --share-until) have its scatter in common.
    """
    mine = [r for r in results if r["size"] == size]
    branches = {r["method"] for r in mine if any(f.startswith("--branch-from") for f in r.get("flags", ()))}
    methods = [m for m in dict.fromkeys(r["method"] for r in mine) if m not in branches]
    gaps = {(m, s): gap for m in methods for s, gap in gaps_by_seed(mine, size, m, value).items()}
    effects = list(dict.fromkeys(effect for run in gaps for effect in run))  # The methods and the seeds.
    design = np.array([[effect in run for effect in effects] for run in gaps], dtype=float)
    design, y = design.reshape(len(gaps), len(effects)), np.array(list(gaps.values()))
    fit, _, rank, _ = np.linalg.lstsq(design, y, rcond=None)
    freedom = len(y) - int(rank)
    return (float(np.sum((y - design @ fit) ** 2) / freedom) ** 0.5 if freedom else math.nan), freedom


def pooled_differences(
    results: Sequence[dict], size: str, other: str, share: float = 1.0, value: str = "val_bpb",
    scatter_of: Sequence[dict] | None = None,
) -> dict[str, Estimate]:  # fmt: skip
    """Returns for each method its gap minus `share` times the gap of `other`, in percentage points, paired by seed.

    The intervals are computed from the scatter of a run, pooled over all methods of `results`, or of `scatter_of` if it
    is given. `value` is the name of the bits per byte whose gaps are taken.
    """
    deviation, freedom = scatter(scatter_of or results, size, value)
    theirs = gaps_by_seed(results, size, other, value)
    differences: dict[str, Estimate] = {}
    for method in dict.fromkeys(r["method"] for r in results if r["size"] == size):
        mine = gaps_by_seed(results, size, method, value)
        if both := sorted(mine.keys() & theirs.keys()):
            # The weight of each run of a seed in the difference. Both gaps are to bf16, whose scatter is in both.
            weights = Counter({method: 1.0})
            weights.subtract({other: share})
            weights.subtract({"bf16": 1 - share})
            error = deviation * math.hypot(*weights.values()) / len(both) ** 0.5
            half = t95(freedom) * error if freedom else math.nan
            differences[method] = Estimate(statistics.fmean(mine[s] - share * theirs[s] for s in both), half, len(both))
    return differences


def has_gap(runs: list[dict], value: str) -> bool:
    """Returns True if clover's gap is above zero by more than half of its interval. Otherwise a share of it would mean
    nothing."""
    (size,) = {r["size"] for r in runs}
    clover = pooled_differences(runs, size, "bf16", value=value).get("clover")
    return clover is not None and clover.above_zero


def against_target(
    runs: list[dict], method: str, target: float, value: str, scatter_of: list[dict] | None = None
) -> tuple[float, float, float]:
    """Compares a method's share of clover's gap with a target. Returns (the share, half of its 95% interval, the
    two-sided p of the hypothesis that the share is the target).

    The test is of the method's gap minus target times clover's gap. `scatter_of` are the runs whose scatter is taken.
    By default it is `runs`.
    """
    (size,) = {r["size"] for r in runs}
    difference = pooled_differences(runs, size, "clover", target, value, scatter_of)[method]
    mine, clover = (gaps_by_seed(runs, size, m, value) for m in (method, "clover"))
    mean = statistics.fmean(clover[s] for s in mine.keys() & clover.keys())
    freedom = scatter(scatter_of or runs, size, value)[1]
    p = math.nan
    if freedom and not math.isnan(difference.half):
        error = difference.half / t95(freedom)
        p = two_sided_p(difference.mean / error if error else math.inf, freedom)
    return target + difference.mean / mean, difference.half / mean, p


def with_half(mean: float, half: float, digits: int) -> str:
    """Formats a mean and half of its interval. The half is left out if it is NaN, as with a single seed."""
    return f"{mean:.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")
