"""The list of open runs: every study is one that a sweep takes, and a visit goes on where the last one stopped."""

import json

import pytest

from lab import visits
from nanochat_fp4.errors import UserError


def test_two_visits_cover_the_evaluations(capsys):
    visits.main([])  # plans every run, so that no bad flag waits for a GPU
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    early = {row[1] for row in rows if row[0] in ("1", "2", "done")}
    early |= {row[3] for row in rows if row[:3] == ["1", "to", "2"]}
    wanted = {f"d4_forwards_s{s}" for s in range(1, 6)} | {f"d6_forwards_s{s}" for s in (1, 2, 3)}
    assert wanted <= early


def test_minutes_by_hand():
    study = next(s for s in visits.studies() if s.name == "d8_lean")
    # 3 seeds of 488 steps of 65,536 tokens: BF16, and five second halves.
    assert study.minutes(study.runs()) == pytest.approx(3 * (1.15 * 0.065536 * (488 + 5 * 244) + 6 * 30 / 6) / 60)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(visits, "autodetect_device_type", lambda: "cuda")


def test_a_study_is_trained_evaluated_and_tabulated_again(tmp_path, monkeypatch, gpu):
    calls = []
    monkeypatch.setattr(visits.sweep, "main", lambda argv: calls.append(["sweep", *argv]))
    monkeypatch.setattr(visits.forwards, "main", lambda argv: calls.append(["forwards", *argv]))
    (tmp_path / "v8192/base_checkpoints/d4_bf16_s2_0").mkdir(parents=True)
    (tmp_path / "v8192/base_checkpoints/d4_bf16_s2_0/model_000001.pt").touch()
    visits.main(["d4_forwards_s2", f"--folder={tmp_path}", "--data-dir=text"])
    assert [call[0] for call in calls] == ["sweep", "forwards", "sweep"] and calls[0] == calls[2]
    where = [f"--folder={tmp_path}/v8192", "--tags=d4_*_s2_*", "--eval-tokens=1048576", "--device-batch-size=64"]
    assert calls[1] == ["forwards", *where, "--data-dir=text"]
    assert {"--first-seed=2", "--seeds=1", f"--keep={visits.SETTLED}", "--data-dir=text"} <= set(calls[0])
    assert json.dumps(calls[0]).count("--vocab-size=8192") == 1


def test_an_unknown_study_is_named():
    with pytest.raises(UserError, match="no study is named d5_"):
        visits.main(["d5_x"])


def test_what_is_stored_is_not_trained_again(tmp_path, monkeypatch):
    """BF16, clover and feedback of d6_longer are those of d6_forwards_s1, but for the checkpoints that they save."""
    named = {s.name: s for s in visits.studies()}
    assert named["d6_longer"].open_runs() == named["d8_lean"].open_runs() == []
    assert {(run.method, run.seed) for run in named["ladder_192_wide_25"].open_runs()} == {
        (m, seed) for m in ("nvidia", "clover", "clover_feedback") for seed in (1, 2, 3)
    }
    assert {run.data for run in named["d4_once"].stored()} == {"132fe07d9460"}  # not BF16's of d4_forwards_s1
    monkeypatch.setattr(visits.sweep, "main", lambda argv: None)
    visits.do(named["ladder_192_wide_25"], str(tmp_path), None)
    assert len(list((tmp_path / "v1024/runs").glob("*.json"))) == 3


def test_without_a_gpu_nothing_is_begun(monkeypatch):
    monkeypatch.setattr(visits, "autodetect_device_type", lambda: "cpu")
    monkeypatch.setattr(visits, "do", lambda *args: pytest.fail("a study was begun"))
    with pytest.raises(UserError, match="no GPU here, and these runs take one for 2 minutes"):
        visits.main(["ladder_192_wide_25"])
