"""Intervals and shares against numbers by hand, and that they cover the truth as often as they say."""

import math
import random

import pytest

from lab import statistics


def result(method: str, seed: int, bpb: float) -> dict:
    return {"method": method, "size": "tiny", "seed": seed, "val_bpb": bpb, "val_bpb_bf16": bpb}


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (2, 4.303), (5, 2.571), (30, 2.042), (120, 1.980)])
def test_quantiles_are_those_of_a_table(freedom, quantile):
    assert statistics.t95(freedom) == pytest.approx(quantile, abs=5e-4)
    assert statistics.two_sided_p(statistics.t95(freedom), freedom) == pytest.approx(0.05)


def test_p_values_and_their_correction():
    """Against tables of Student's t, and Holm's procedure by hand."""
    p, holm = statistics.two_sided_p, statistics.holm
    assert p(-1.0, 1) == pytest.approx(0.5) and p(0.0, 7) == pytest.approx(1.0)
    assert p(math.inf, 3) == 0 and math.isnan(p(1.0, 0))
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    corrected = holm([0.6, math.nan, 0.02])
    assert corrected[::2] == pytest.approx([0.6, 0.04]) and math.isnan(corrected[1])


def test_estimate_by_hand():
    e = statistics.estimate([1.0, 2.0, 3.0, 4.0])
    # Mean 2.5, standard deviation 1.2910, t(3) = 3.182: 3.182 * 1.2910 / 2.
    assert e.mean == 2.5 and (e.low, e.high) == pytest.approx((2.5 - 2.0540, 2.5 + 2.0540), abs=1e-3) and e.decided
    assert str(e) == "+2.50 ± 2.05"
    assert statistics.p_value([v - e.low for v in (1.0, 2.0, 3.0, 4.0)]) == pytest.approx(0.05)
    assert math.isnan(statistics.p_value([1.0]))
    one = statistics.estimate([0.5])
    assert one.mean == 0.5 and math.isnan(one.high) and not one.decided and str(one) == "+0.50"
    assert not statistics.estimate([-1.0, 1.0]).decided and statistics.estimate([]).n == 0
    assert one.above_zero and not statistics.estimate([0.1, 0.5]).above_zero
    # An interval is written with its ends where they are at different distances in the digits that are shown.
    assert statistics.Estimate(0.409, 0.339, 0.5, 3).shown(sign="-") == "0.41 (0.34 to 0.50)"
    assert statistics.Estimate(0.409, 0.339, 0.478, 3).shown(sign="-") == "0.41 ± 0.07"


def test_gaps_and_differences_are_paired():
    """Seeds differ by far more than methods: only pairs of a seed see the gap of exactly 2%, and 1 point less."""
    gaps = {"bf16": 1, "nvidia": 1.02, "clover": 1.01}
    results = [result(m, s, base * gap) for s, base in ((1, 1.0), (2, 1.7), (3, 0.4)) for m, gap in gaps.items()]
    gap = statistics.gap(results, "tiny", "nvidia")
    assert (gap.mean, gap.low, gap.high) == pytest.approx((2.0, 2.0, 2.0)) and gap.n == 3
    d = statistics.difference(results, "tiny", "clover", "nvidia")
    assert d.mean == pytest.approx(-1.0) and d.decided
    # A seed that one of them lacks does not count.
    assert statistics.gap(results[:-3] + results[-3:-2], "tiny", "nvidia").n == 2


def of_seeds(gaps: dict[str, dict[int, float]]) -> list[dict]:
    """Results with these gaps in percent, by method and seed, bf16's to 1 bit per byte."""
    return [result(m, seed, 1 + gap / 100) for m, by_seed in gaps.items() for seed, gap in by_seed.items()]


def test_the_scatter_of_a_run_is_pooled_over_methods():
    """Second minus first seed: 0, 0, 2, 0, the mean 0.5; squares of residuals 3 * 0.5^2 / 2 + 1.5^2 / 2 = 1.5."""
    results = of_seeds({"bf16": {1: 0, 2: 0}, "clover": {1: 1, 2: 1}, "a": {1: 1, 2: 3}, "b": {1: 1, 2: 1}})
    assert statistics.scatter(results, "tiny") == (pytest.approx(0.5**0.5), 3)


def test_a_pooled_interval_has_the_variance_of_its_family():
    """Of the 4-bit forwards one method does not scatter and one has a variance of 2; FP8's 50 are another family's."""
    work = {"bf16": 0.0, "clover": 0.7, "a": 0.7, "fp8": 0.4}
    gaps = {"bf16": {1: 0, 2: 0}, "clover": {1: 1, 2: 1}, "a": {1: 1, 2: 3}, "fp8": {1: 0, 2: 10}}
    results = [r | {"gemm_work": {"4": work[r["method"]]}} for r in of_seeds(gaps)]
    assert statistics.in_4_bits(results, "tiny") == {"clover": True, "a": True, "fp8": False}
    for method, variance in (("clover", 1), ("a", 1), ("fp8", 50)):
        pooled = statistics.pooled_gap(results, "tiny", method)
        assert pooled.high - pooled.mean == pytest.approx(statistics.t95(1) * (variance / 2) ** 0.5)


def test_fieller_by_hand():
    """Means 1 and 2, variances 0.01 and 0.04, covariance 0.01 of three pairs; t(2)^2 / 3 = 6.1707. The ends are the
    roots of (4 - 0.2468) r^2 - 2 (2 - 0.0617) r + 1 - 0.0617."""
    share = statistics.ratio([0.9, 1.0, 1.1], [2.0, 1.8, 2.2])
    assert share.mean == pytest.approx(0.5) and share.n == 3
    root = math.sqrt(1.93829**2 - 3.75317 * 0.93829)
    assert (share.low, share.high) == pytest.approx(((1.93829 - root) / 3.75317, (1.93829 + root) / 3.75317), abs=1e-4)
    assert math.isnan(statistics.ratio([1.0], [2.0]).low)
    undecided = statistics.ratio([1.0, 1.2, 0.8], [0.1, 2.0, 0.4])  # a denominator that may be zero
    assert math.isnan(undecided.low) and str(undecided) == f"{undecided.mean:+.2f}"


def test_a_share_is_of_a_gap_and_of_pairs():
    gaps = {"bf16": {1: 0, 2: 0, 3: 0}, "clover": {1: 1.5, 2: 1.6, 3: 1.7}, "a": {1: 0.5, 3: 0.7}}
    share = statistics.share(of_seeds(gaps), "tiny", "a")
    assert share.mean == pytest.approx(1.2 / 3.2) and share.n == 2
    assert statistics.difference(of_seeds(gaps), "tiny", "clover", "a").n == 2
    none = gaps | {"clover": {1: -1.0, 2: 1.0, 3: 0.5}}
    assert statistics.share(of_seeds(none), "tiny", "a") is None


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(0.2, 0.33, "met"), (0.34, 0.5, "missed"), (0.2, 0.34, "not decided"), (math.nan, math.nan, "not decided")],
)
def test_a_verdict_is_of_the_whole_interval(low, high, said):
    assert statistics.verdict(statistics.Estimate(0.3, low, high, 3), 0.33) == said


def test_a_seed_or_a_method_has_no_scatter_of_itself():
    """Seeds that shift every method alike scatter nothing, nor does a method of one seed; branches do not count."""
    gaps = {"bf16": {1: 0, 2: 0, 3: 0}, "clover": {1: 1, 2: 1, 3: 1}, "late": {1: 0.2, 2: 0.9}, "one": {2: 0.7}}
    results = of_seeds(gaps)
    for r in results:
        r["val_bpb"] *= 1 + 0.1 * r["seed"]
        r["flags"] = ["--branch-from=clover@10"] if r["method"] == "late" else []
    assert statistics.scatter(results, "tiny") == (pytest.approx(0, abs=1e-9), 2)
    for few in (results[:3], [r for r in results if r["seed"] == 2]):
        deviation, freedom = statistics.scatter(few, "tiny")
        assert math.isnan(deviation) and freedom == 0


def test_intervals_cover_the_truth_95_times_of_100():
    """Two families of methods that a seed moves apart, as it does at d6, and one that scatters little by itself."""
    generator, truth = random.Random(0), {"clover": 1.6, "a": 0.8, "b": 0.2}
    covered, seeds = [0, 0, 0], range(3)
    for _ in range(1000):
        of_seed = [{family: generator.gauss(0, 0.06) for family in (True, False)} for _ in seeds]
        gaps = {
            m: {s: mean + of_seed[s][m == "clover"] + generator.gauss(0, 0.04) for s in seeds}
            for m, mean in {"bf16": 0.0, **truth}.items()
        }
        results = of_seeds(gaps)
        share = statistics.share(results, "tiny", "a")
        covered[0] += share is not None and share.low <= 0.5 <= share.high
        gap, difference = (statistics.gap(results, "tiny", "a"), statistics.difference(results, "tiny", "a", "b"))
        covered[1] += gap.low <= 0.8 <= gap.high
        covered[2] += difference.low <= 0.6 <= difference.high
    assert all(0.936 < n / 1000 < 0.964 for n in covered), covered  # two standard errors of 0.7%
