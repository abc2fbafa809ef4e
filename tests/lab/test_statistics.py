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
    assert e.mean == 2.5 and e.half == pytest.approx(2.0540, abs=1e-3) and e.decided
    assert str(e) == "+2.50 ± 2.05"
    one = statistics.estimate([0.5])
    assert one.mean == 0.5 and math.isnan(one.half) and not one.decided and str(one) == "+0.50"
    assert not statistics.estimate([-1.0, 1.0]).decided and statistics.estimate([]).n == 0
    # Of one seed no interval is shown, even where others' scatter would give one; nor one that is not known.
    assert [str(statistics.Estimate(1.26, half, n)) for half, n in ((0.14, 1), (math.nan, 2))] == ["+1.26"] * 2


def test_gaps_and_differences_are_paired():
    """Seeds differ by far more than methods: only pairs of a seed see the gap of exactly 2%, and 1 point less."""
    gaps = {"bf16": 1, "nvidia": 1.02, "clover": 1.01}
    results = [result(m, s, base * gap) for s, base in ((1, 1.0), (2, 1.7), (3, 0.4)) for m, gap in gaps.items()]
    gap = statistics.gap(results, "tiny", "nvidia")
    assert gap.mean == pytest.approx(2.0) and gap.half == pytest.approx(0.0, abs=1e-9) and gap.n == 3
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
    deviation, freedom = statistics.scatter(results, "tiny")
    assert (deviation, freedom) == (pytest.approx(0.5**0.5), 3)
    for other, means in (("clover", (1, 0)), ("bf16", (2, 1))):  # of two runs a difference, the scatter of both
        pooled = statistics.pooled_differences(results, "tiny", other)
        assert (pooled["a"].mean, pooled["b"].mean) == (pytest.approx(means[0]), pytest.approx(means[1], abs=1e-9))
        assert pooled["a"].half == pooled["b"].half == pytest.approx(statistics.t95(3) * 0.5**0.5)
    # Gap minus half of clover's: method - clover / 2 - bf16 / 2.
    half = statistics.pooled_differences(results, "tiny", "clover", share=0.5)["a"]
    assert half.mean == pytest.approx(1.5) and half.half == pytest.approx(statistics.t95(3) * (0.5 * 1.5 / 2) ** 0.5)
    own = [r for r in results if r["method"] != "b"]
    wider = statistics.pooled_differences(own, "tiny", "clover")["a"]
    assert wider.half > half.half
    assert statistics.pooled_differences(own, "tiny", "clover", scatter_of=results)["a"].half < wider.half


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
        assert all(math.isnan(d.half) for d in statistics.pooled_differences(few, "tiny", "bf16").values())


@pytest.mark.parametrize("other, share", [("bf16", 1.0), ("clover", 0.5)])
def test_pooled_intervals_cover_the_truth_95_times_of_100(other, share):
    """bf16 and clover are in the difference of every method: their scatter counts once, not once for each method."""
    generator = random.Random(0)
    seeds = {"bf16": 3, "clover": 3, "a": 3, "b": 3, "c": 3, "d": 2}
    covered = 0
    for _ in range(1000):
        common = [generator.gauss(0, 1) for _ in range(3)]
        gaps = {m: {s: 0.01 * (common[s] + generator.gauss(0, 1)) for s in range(n)} for m, n in seeds.items()}
        d = statistics.pooled_differences(of_seeds(gaps), "tiny", other, share)["a"]
        covered += abs(d.mean) <= d.half
    assert 0.936 < covered / 1000 < 0.964  # two standard errors of 0.7%; the generator's seed is fixed
