"""lab/predict/scaling.py: known effective parameters are found again; one size gives none, with the reason."""

import json
import math

import numpy as np
import pytest

from lab.predict import scaling
from lab.predict.scaling import Law, Run
from nanochat_fp4.errors import UserError

LAW = Law((1.2, 1.5, 0.4, 0.9, 0.5, 0.6), 0.0)
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


def test_runs_of_one_size_say_why_there_is_nothing(tmp_path, capsys):
    results = [
        {"method": m, "num_params": 5_000, "tokens": 60_000, "val_bpb": v} for m, v in (("bf16", 1.0), ("clover", 1.01))
    ]
    (tmp_path / "d6.json").write_text(json.dumps({"results": results}))
    scaling.main([f"--runs={tmp_path / 'd6.json'}"])
    said = capsys.readouterr().out.strip()
    assert "\n" not in said and said.startswith("no effective parameters: bf16 has 1 runs of one size (N = 5,000)")
    with pytest.raises(UserError, match="no effective parameters"):
        scaling.fit_law(scaling.read_runs(tmp_path / "d6.json"))
    with pytest.raises(UserError, match="holds no runs"):
        scaling.main([f"--runs={tmp_path / 'none.json'}"])


def test_the_papers_runs_lose_parameters():
    """The numbers of docs/results.md."""
    runs = scaling.read_runs(scaling.PAPER_RUNS)
    law = scaling.fit_law(runs)
    n, d = (scaling.effective(law, runs, "clover", of) for of in ("parameters", "tokens"))
    assert (n.runs, round(law.rms, 2), round(n.share, 2), round(n.rms, 2)) == (21, 0.10, 0.74, 0.17)
    assert d.rms > 5 * n.rms
    assert scaling.trend(runs, "clover")["ratio"] == pytest.approx((0.146, 0.031), abs=1e-3)


def test_the_papers_gaps_are_printed_by_size_and_ratio():
    """Gaps that the paper's Figure 4 shows; 25 and 24.3 tokens per parameter are one column."""
    lines = scaling.gap_table(scaling.read_runs(scaling.PAPER_RUNS), ["nvidia", "clover"]).splitlines()
    assert lines[0].split() == ["N", "method", "25", "50", "100", "200", "400", "800"]
    assert lines[2].split() == ["30M", "nvidia", "1.60", "2.07", "2.45", "2.88", "3.33", "3.42"]
    assert lines[-1].split() == ["203M", "clover", "1.46", "1.60", "1.67", "-", "-", "-"]
