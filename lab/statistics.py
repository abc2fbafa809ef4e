"""Statistics of the runs of a sweep: gaps, differences and shares of clover's gap, with 95% intervals.

Every contrast is computed for each seed by itself, and its interval comes from these values, by Student's t with one
degree of freedom less than there are seeds. Nothing else is assumed of the scatter of runs, which differs between
methods: a seed moves those with a 4-bit forward pass together, and the others another way. An interval that is pooled
over such a family is secondary, and no verdict rests on it.
"""

import math
import statistics
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
    """A number with its 95% interval from low to high, of n seeds. The ends are NaN if there is no interval, as of a
    single seed."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return self.shown()

    def shown(self, digits: int = 2, sign: str = "+") -> str:
        """Formats the number and its interval with so many digits, as ± if both sides are equal in them. `sign` is "-"
        if a number above zero shall have none."""
        mean = f"{self.mean:{sign}.{digits}f}"
        if math.isnan(self.low):
            return mean
        below, above = (f"{side:.{digits}f}" for side in (self.mean - self.low, self.high - self.mean))
        return f"{mean} ± {above}" if below == above else f"{mean} ({self.low:.{digits}f} to {self.high:.{digits}f})"

    @property
    def decided(self) -> bool:
        """True if there is an interval and it excludes zero."""
        return self.low > 0 or self.high < 0

    @property
    def above_zero(self) -> bool:
        """True if the number is above zero. With an interval, its lower end must be above zero too."""
        return self.mean > 0 if math.isnan(self.low) else self.low > 0


def around(mean: float, half: float, n: int) -> Estimate:
    """Returns the estimate mean ± half."""
    return Estimate(mean, mean - half, mean + half, n)


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of a contrast's values, one of each seed, with its interval."""
    n = len(values)
    if n < 2:
        return around(values[0] if values else math.nan, math.nan, n)
    return around(statistics.fmean(values), t95(n - 1) * statistics.stdev(values) / n**0.5, n)


def p_value(values: Sequence[float]) -> float:
    """Returns the two-sided p of the hypothesis that the mean of a contrast is zero. It is NaN for a single seed."""
    if len(values) < 2:
        return math.nan
    mean, error = statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5
    return two_sided_p(mean / error if error else math.inf, len(values) - 1)


def ratio(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Returns the ratio of the means of paired values, with Fieller's interval.

    A ratio r is in the interval if the mean of values - r * others does not differ from zero by Student's t. The
    interval is not symmetric in general. It has no ends, and is therefore left out, if the mean of `others` does not
    differ from zero itself.
    """
    n, mean, other = len(values), statistics.fmean(values), statistics.fmean(others)
    if n < 2:
        return Estimate(mean / other, math.nan, math.nan, n)
    (v, c), (_, o) = t95(n - 1) ** 2 / n * np.cov(values, others)
    a, b = other**2 - o, mean * other - c
    if a <= 0:
        return Estimate(mean / other, math.nan, math.nan, n)
    root = math.sqrt(max(0.0, b**2 - a * (mean**2 - v)))
    return Estimate(mean / other, (b - root) / a, (b + root) / a, n)


def verdict(share: Estimate, target: float, end: float = 0.0) -> str:
    """Judges a share that should be at most `target`. It is met if it is and the upper end of its interval is at most
    `end` (by default the target), missed if the whole interval is above the target, and otherwise not decided."""
    if share.mean <= target and share.high <= (end or target):
        return "met"
    return "missed" if share.low > target else "not decided"


# ----------------------------------------------------------------------------------------------------------------------
# Contrasts of runs


def by_seed(results: Iterable[dict], size: str, method: str, value: str = "val_bpb") -> dict[int, float]:
    """Returns a method's values of one size by seed, of the runs that have this value."""
    return {r["seed"]: r[value] for r in results if r["size"] == size and r["method"] == method and value in r}


def gaps_by_seed(
    results: Sequence[dict], size: str, method: str, value: str = "val_bpb", base: str = "bf16"
) -> dict[int, float]:
    """Returns for each seed the increase over `base` of the same seed, in percent. BF16 has one forward for all."""
    a, b = by_seed(results, size, method, value), by_seed(results, size, base, "val_bpb" if base == "bf16" else value)
    return {s: 100 * (a[s] / b[s] - 1) for s in sorted(a.keys() & b.keys())}


def pairs(
    results: Sequence[dict], size: str, method: str, other: str, value: str = "val_bpb"
) -> tuple[list[float], list[float]]:
    """Returns the gaps of two methods on the seeds that both have, in the order of the seeds."""
    mine, theirs = (gaps_by_seed(results, size, m, value) for m in (method, other))
    both = sorted(mine.keys() & theirs.keys())
    return [mine[s] for s in both], [theirs[s] for s in both]


def gap(results: Sequence[dict], size: str, method: str, value: str = "val_bpb", base: str = "bf16") -> Estimate:
    """Returns the gap: by how many percent validation bits per byte are above those of `base`, paired by seed."""
    return estimate([*gaps_by_seed(results, size, method, value, base).values()])


def difference(results: Sequence[dict], size: str, method: str, other: str, value: str = "val_bpb") -> Estimate:
    """Returns the gap of `method` minus the gap of `other`, in percentage points, paired by seed."""
    return estimate([a - b for a, b in zip(*pairs(results, size, method, other, value))])


def share(
    results: Sequence[dict], size: str, method: str, other: str = "clover", value: str = "val_bpb"
) -> Estimate | None:
    """Returns the share of the gap of `other` that `method` has, on the seeds of both, with Fieller's interval. It is
    None without such seeds, and if `other` has no gap above zero of which there could be a share."""
    mine, theirs = pairs(results, size, method, other, value)
    return ratio(mine, theirs) if mine and gap(results, size, other, value).above_zero else None


# ----------------------------------------------------------------------------------------------------------------------
# The scatter of several methods together


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


def in_4_bits(results: Sequence[dict], size: str) -> dict[str, bool]:
    """Tells the two families of methods apart: whether more than half of the forward pass is in 4 bits.

    Two thirds of clover's work in 4 bits are its backward pass, so such a method has more than 5/6 of clover's.
    """
    work = {r["method"]: r["gemm_work"]["4"] for r in results if r["size"] == size}
    return {method: share > 5 / 6 * work.get("clover", 1.0) for method, share in work.items() if method != "bf16"}


def pooled_gap(results: Sequence[dict], size: str, method: str, value: str = "val_bpb") -> Estimate:
    """Returns a gap with a secondary interval: the variance between seeds is the mean of that of all methods of the
    family of in_4_bits.

    The gaps of a seed have bf16's run in common, so the family's methods add hardly any degrees of freedom. t keeps
    those of the method's own seeds.
    """
    families, own = in_4_bits(results, size), gap(results, size, method, value)
    gaps = [[*gaps_by_seed(results, size, m, value).values()] for m in families if families[m] == families[method]]
    variances = [statistics.variance(of) for of in gaps if len(of) > 1]
    if own.n < 2:
        return own
    return around(own.mean, t95(own.n - 1) * (statistics.fmean(variances) / own.n) ** 0.5, own.n)
