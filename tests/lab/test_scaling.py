"""lab/scaling.py: known effective parameters are found again; one size gives none, with the reason."""

import math
import re

import numpy as np
import pytest

from lab import scaling
from lab.scaling import Law, Run
from nanochat_fp4.cli import UserError

LAW = Law((1.2, 1.5, 0.4, 0.9, 0.5, 0.6), 0.0)
LADDER = {  # of N
    "clover": "0.837",
    "clover, BF16 forward": "0.867",
    "clover_feedback": "0.846",
    "clover_feedback, BF16 forward": "0.899",
}
GRID = [(n, n * ratio) for n in (3e7, 1e8, 3e8) for ratio in (12, 50, 200, 800)]


def runs_with(parameters: float = 1.0, tokens: float = 1.0, noise: float = 0.0) -> list[Run]:
    """BF16's runs by LAW, and those of a method that keeps these shares of N and of D."""
    errors = iter(np.random.default_rng(0).normal(scale=noise, size=2 * len(GRID)))
    runs = []
    for n, d in GRID:
        runs.append(Run(n, d, "bf16", LAW.loss(n, d) * (1 + next(errors))))
        runs.append(Run(n, d, "clover", LAW.loss(parameters * n, tokens * d) * (1 + next(errors))))
    return runs


@pytest.mark.parametrize(("n", "d"), [(0.7, 1.0), (1.0, 0.6)])
def test_a_known_share_is_found_again_and_the_other_kind_fits_worse(n, d):
    runs = runs_with(n, d)
    law = scaling.fit_law(runs)
    assert law.rms < 0.01
    found = {of: scaling.effective(law, runs, "clover", of) for of in ("parameters", "tokens")}
    right, wrong, share = ("parameters", "tokens", n) if n < 1 else ("tokens", "parameters", d)
    assert found[right].share == pytest.approx(share, abs=0.005) and found[right].rms < 0.01
    assert found[right].runs == len(GRID) and found[wrong].rms > 10 * found[right].rms


def test_noise_stays_in_the_residual():
    runs = runs_with(0.7, noise=1e-3)
    law = scaling.fit_law(runs)
    share = scaling.effective(law, runs, "clover")
    assert 0.02 < law.rms < 0.15 and share.share == pytest.approx(0.7, abs=0.03) and 0.03 < share.rms < 0.3


def test_the_trend_by_hand():
    """Gaps of 1.2% that do not change with N and grow as the fifth root of tokens per parameter."""
    runs = [Run(n, d, "bf16", 2.0) for n, d in GRID]
    runs += [Run(n, d, "clover", 2.0 * (1 + 0.012 * (d / n / 20) ** 0.2)) for n, d in GRID]
    of = scaling.trend(runs, "clover")
    assert of["level"][0] == pytest.approx(1.2) and of["ratio"][0] == pytest.approx(0.2)
    assert of["size"][0] == pytest.approx(0, abs=1e-9) and of["ratio"][1] < 1e-9
    with pytest.raises(UserError, match="all above zero"):
        scaling.trend([*runs, Run(1e9, 1e10, "bf16", 2.0), Run(1e9, 1e10, "clover", 1.9)], "clover")
    with pytest.raises(UserError, match="of one size"):
        scaling.trend([r for r in runs if r.parameters == 1e8], "clover")


def test_more_steps_undo_lost_parameters_until_nothing_does():
    steps = [scaling.more_steps(LAW, 0.7, 1e8, ratio * 1e8) for ratio in (12, 100)]
    assert 1 < steps[0] < steps[1]
    assert LAW.loss(0.7e8, steps[0] * 12e8) == pytest.approx(LAW.loss(1e8, 12e8))
    assert scaling.more_steps(LAW, 0.01, 1e8, 1e14) == math.inf


def result(method: str, seed: int, bpb: float, bf16_forward: float = 0.0, **more) -> dict:
    """As lab.study.sweep writes it; 3 layers of width 128."""
    flags = ["--depth=3", "--aspect-ratio=40", "--head-dim=64", f"--method={method}"]
    usual = {"num_params": 5_000, "tokens": 60_000, "val_bpb": bpb, "val_bpb_bf16": bf16_forward or bpb}
    return {"method": method, "seed": seed, "flags": flags, **usual, **more}


def test_a_sweeps_runs_count_with_both_forwards_and_the_parameters_of_the_blocks():
    bf16, (own, other) = (scaling.runs_of(result(m, 2, 1.02, 1.01)) for m in ("bf16", "clover"))
    assert bf16 == [Run(12 * 3 * 128**2, 60_000, "bf16", 1.02, seed=2)]
    assert own == Run(12 * 3 * 128**2, 60_000, "clover", 1.02, seed=2)
    assert other == Run(12 * 3 * 128**2, 60_000, "clover, BF16 forward", 1.01, seed=2)
    llama = scaling.runs_of(result("bf16", 1, 1.0, flags=["--llama=30M"]))
    assert llama[0].parameters == 5_000


def test_the_interval_is_of_resampled_seeds():
    """Gaps of a share of 0.8 with a scatter: the interval holds 0.8, and is as wide as means of 9 seeds scatter."""
    noise, runs, scatter = np.random.default_rng(3), [], 3.0
    for n, d in GRID:
        for seed in range(9):
            gap = 100 * (LAW.loss(0.8 * n, d) / LAW.loss(n, d) - 1) + noise.normal(scale=scatter)
            runs.append(Run(n, d, "bf16", LAW.loss(n, d), seed))
            runs.append(Run(n, d, "clover", LAW.loss(n, d) * (1 + gap / 100), seed))
    runs.append(Run(*GRID[0], "clover", 3.0, seed=10))  # no bf16 has that seed
    low, high = map(float, re.findall(r"[\d.]+", scaling.intervals(runs, ["clover"], True)["clover", "parameters"]))
    slopes = [100 * math.log(LAW.loss(0.81 * n, d) / LAW.loss(0.79 * n, d)) / 0.02 for n, d in GRID]
    half = 1.96 * scatter / math.sqrt(9 * sum(slope**2 for slope in slopes))
    assert low < 0.8 < high and high - low == pytest.approx(2 * half, rel=0.4)
    assert scaling.effective(LAW, runs, "clover").runs == 9 * len(GRID)
    assert set(scaling.intervals([r for r in runs if r.seed == 2], ["clover"], True).values()) == {""}


def test_resampled_seeds_keep_their_runs_together():
    runs = [Run(1e8, 2e9, m, seed + ("bf16", "clover").index(m), seed) for seed in range(5) for m in ("bf16", "clover")]
    drawn = scaling.resampled(runs, np.random.default_rng(0))
    gaps = {(r.seed, r.method): r.loss for r in drawn}
    assert len(drawn) == 10 and all(gaps[seed, "clover"] - gaps[seed, "bf16"] == 1 for seed in range(5))
    assert len({r.loss for r in drawn if r.method == "bf16"}) < 5


def test_more_seeds_count_for_more():
    """Two lengths with gaps of 0.7 N and 0.9 N: the share is near that of the eight seeds, not in the middle."""
    runs = []
    for d, share, seeds in ((2e9, 0.7, 8), (4e9, 0.9, 1)):
        for seed in range(seeds):
            runs += [Run(1e8, d, "bf16", LAW.loss(1e8, d), seed), Run(1e8, d, "clover", LAW.loss(share * 1e8, d), seed)]
    assert 0.7 < scaling.effective(LAW, runs, "clover").share < 0.74


def test_shares_of_all_sizes_by_hand():
    """Feedback has 0.8 of clover's gap at one size and 0.6 at the other, where the seeds scatter by a third as much."""
    runs, noise = [], np.random.default_rng(1)
    for n, share, scatter in ((1e6, 0.8, 3e-4), (2e6, 0.6, 1e-4)):
        for seed in range(6):
            for method, gap in (("bf16", 0), ("clover", 0.02), ("clover_feedback", 0.02 * share)):
                runs.append(Run(n, 12 * n, method, (1 + gap) * (1 + scatter * noise.normal()), seed))
    ((ratio, share),) = scaling.shares(runs, "clover_feedback").items()
    half = share.high - share.mean
    assert ratio == 12.5 and 0.55 < share.mean < 0.7 and 0.002 < half < 0.02  # near that of the size known better
    single = [scaling.shares([r for r in runs if r.parameters == n], "clover_feedback")[12.5] for n in (1e6, 2e6)]
    weights = [4 / (of.high - of.low) ** 2 for of in single]
    assert share.mean == pytest.approx(sum(w * of.mean for w, of in zip(weights, single)) / sum(weights))
    assert half == pytest.approx(sum(weights) ** -0.5)
    assert scaling.shares([r for r in runs if r.seed == 1], "clover_feedback") == {}  # one seed has no interval
    longer = [Run(r.parameters, 8 * r.tokens, r.method, r.loss, r.seed) for r in runs]
    header, (row,) = scaling.share_table([*runs, *longer], ["clover_feedback"])
    assert header == ["method", "12.5", "100", "last over first"]
    assert row[-1] == f"1.00 ± {math.sqrt(2) * half / share.mean:.2f}"


def test_a_share_is_of_clovers_gap_with_the_same_forward():
    runs, noise = [], np.random.default_rng(2)
    for seed in range(3):
        for method, gap in (("bf16", 0), ("clover", 2), ("clover_feedback", 1.5)):
            runs.append(Run(1e6, 12e6, method, 1 + gap / 100 + 1e-5 * noise.normal(), seed))
            if gap:
                half = 1 + (gap - 1) / 100 + 1e-5 * noise.normal()
                runs.append(Run(1e6, 12e6, method + scaling.IN_BF16, half, seed))
    assert scaling.shares(runs, "clover_feedback")[12.5].mean == pytest.approx(0.75, abs=0.01)
    assert scaling.shares(runs, "clover_feedback" + scaling.IN_BF16)[12.5].mean == pytest.approx(0.5, abs=0.01)


def test_runs_of_one_size_say_why_there_is_nothing():
    with pytest.raises(UserError, match="3 runs of one size"):
        scaling.fit_law(scaling.read_runs("d6_longer"))


def test_the_ladder_keeps_more_parameters_than_the_papers_models():
    """Lost parameters describe these runs better than lost tokens, too."""
    runs = scaling.read_runs("ladder_*")
    law = scaling.fit_law(runs)
    of = {m: [scaling.effective(law, runs, m, of) for of in ("parameters", "tokens")] for m in LADDER}
    assert {m: f"{n.share:.3f}" for m, (n, _) in of.items()} == LADDER
    assert all(d.rms > 1.7 * n.rms for n, d in of.values())


def test_the_papers_gaps_are_printed_by_size_and_ratio():
    """Gaps that the paper's Figure 4 shows; 25 and 24.3 tokens per parameter are one column."""
    header, rows = scaling.gap_table(scaling.read_runs("paper"), ["nvidia", "clover"])
    assert header == ["N", "method", "25", "50", "100", "200", "400", "800"]
    assert rows[0] == ["30M", "nvidia", "1.60", "2.07", "2.45", "2.88", "3.33", "3.42"]
    assert rows[-1] == ["203M", "clover", "1.46", "1.60", "1.67", "-", "-", "-"]
