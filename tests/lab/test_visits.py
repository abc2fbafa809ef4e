"""The list of open runs: every study is one that a sweep takes, and a visit goes on where the last one stopped."""

import json

import pytest

from lab import visits
from lab.study.sweep_runs import data_key, flag_values
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


def test_without_a_gpu_nothing_is_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(visits, "autodetect_device_type", lambda: "cpu")
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    monkeypatch.setattr(visits, "do", lambda *args: pytest.fail("a study was begun"))
    with pytest.raises(UserError, match="no GPU here, and these runs take one for 17 minutes"):
        visits.main(["d6_width"])


def test_without_a_gpu_a_study_that_is_done_is_not_trained_on_another_text(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(visits, "autodetect_device_type", lambda: "cpu")
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    monkeypatch.setattr(visits, "do", lambda study, folder, data_dir: done.append(study.name))
    (tmp_path / "text").mkdir()
    (tmp_path / "text/shard_00000.parquet").touch()
    key, study = data_key(str(tmp_path / "text")), next(s for s in visits.studies() if s.name == "d6_width")
    (tmp_path / "d6_width.json").write_text(stored_results(study.runs(key), key))
    for text in ([], [f"--data-dir={tmp_path}"]):
        with pytest.raises(UserError, match="no GPU here, and these runs take one for 17 minutes"):
            visits.main(["d6_width", *text])
    visits.main(["d6_width", f"--data-dir={tmp_path}/text"])  # its table alone
    assert done == ["d6_width"]


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


def stored_results(runs, key: str) -> str:
    results = [{"method": r.method, "size": r.size, "seed": r.seed, "flags": r.flags, "val_bpb": 1.0} for r in runs]
    return json.dumps({"data": f"text ({key})", "results": results})


def test_all_means_what_is_open(tmp_path, monkeypatch, gpu):
    done, (first, second, *others) = [], visits.studies()
    (tmp_path / f"{second.name}.json").write_text(stored_results(second.runs("key"), "key"))
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    monkeypatch.setattr(visits, "do", lambda study, folder, data_dir: done.append(study.name))
    for row in (256, 1024):
        (tmp_path / f"pieces/{row}").mkdir(parents=True)
    visits.main(["*", f"--pieces={tmp_path}/pieces"])
    assert done == [first.name, *[s.name for s in others]]
    visits.main([second.name])
    assert done[-1] == second.name
    monkeypatch.setattr(visits, "studies", lambda: [second])
    visits.main(["*"])
    assert len(done) == 2 + len(others)


def test_what_is_stored_is_not_trained_again(tmp_path, monkeypatch):
    """The first half of a study: its minutes are those of the other half, and its runs count in the new folder."""
    study = next(s for s in visits.studies() if s.name == "ladder_128_wide_25")
    runs = study.runs("key")
    monkeypatch.setattr(visits, "RESULTS", tmp_path / "none")
    minutes = study.minutes(study.open_runs())
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    (tmp_path / f"{study.name}.json").write_text(stored_results(runs[: len(runs) // 2], "key"))
    assert (left := study.open_runs()) == runs[len(runs) // 2 :] and study.minutes(left) == pytest.approx(minutes / 2)
    monkeypatch.setattr(visits.sweep, "main", lambda argv: None)
    visits.do(study, str(tmp_path), None)
    found = {path.stem for path in (tmp_path / "v1024/runs").glob("*.json")}
    assert found == {run.tag for run in runs[: len(runs) // 2]}


def test_a_branch_that_is_stored_is_done(tmp_path, monkeypatch):
    """A branch's flags name the run that it begins at, and with it the text."""
    study = next(s for s in visits.studies() if s.name == "d8_lean")
    (tmp_path / "d8_lean.json").write_text(stored_results(study.runs("key"), "key"))
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    assert study.open_runs() == []


def test_studies_of_pieces_read_those_and_every_other_one_the_text(tmp_path, monkeypatch, gpu):
    """Documents longer than a row lose most of their text, so that an epoch would be too short."""
    texts = {}
    monkeypatch.setattr(visits, "RESULTS", tmp_path)  # nothing is done
    monkeypatch.setattr(visits, "do", lambda study, folder, data_dir: texts.update({study.name: data_dir}))
    with pytest.raises(UserError, match="128_wide_50 reads no text twice: .* --max-seq-len 256 --cut-to PIECES/256"):
        visits.main(["ladder_128_wide_50", "--data-dir=text"])
    (tmp_path / "256").mkdir()
    with pytest.raises(UserError, match="d4_once reads no text twice: .* --max-seq-len 1024 --cut-to PIECES/1024, and"):
        visits.main(["d4_once", "--data-dir=text", f"--pieces={tmp_path}"])
    (tmp_path / "1024").mkdir()
    visits.main(["*", "--data-dir=text", f"--pieces={tmp_path}"])
    assert texts.pop("d4_once") == f"{tmp_path}/1024" and texts["ladder_128_wide_50"] == f"{tmp_path}/256"
    assert {data_dir for name, data_dir in texts.items() if not name.startswith("ladder")} == {"text"}
    rows = {s.pieces: flag_values(s.runs()[0].flags)["max-seq-len"] for s in visits.studies() if s.pieces}
    assert rows == {256: "256", 1024: "1024"}
    flags = [s.runs()[0].flags for s in visits.studies() if s.pieces == 256]
    tokens = [int(flag_values(of)["num-iterations"]) * int(flag_values(of)["total-batch-size"]) for of in flags]
    assert 0.9 * visits.LADDER_EPOCH < max(tokens) <= visits.LADDER_EPOCH


def test_results_on_pieces_and_on_the_text_are_kept_apart(tmp_path, monkeypatch):
    """d4_forwards_s1 has BF16's run of d4_once by its flags, on whole documents."""
    named = {s.name: s for s in visits.studies()}
    for name in ("d4_forwards_s1", "d4_once"):
        (tmp_path / f"{name}.json").write_text(stored_results(named[name].runs(name), name))
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    assert {run.data for run in named["d4_once"].stored()} == {"d4_once"}
    assert {run.data for run in named["d4_forwards_s1"].stored()} == {"d4_forwards_s1"}
    (tmp_path / "d4_once.json").rename(tmp_path / "other.json")
    assert not named["d4_once"].stored()
    (tmp_path / "other.json").rename(tmp_path / "d4_once.json")
    (tmp_path / "d4_forwards_s1.json").unlink()
    assert not named["d4_forwards_s1"].stored()


def test_an_unknown_study_is_named():
    with pytest.raises(UserError, match="no study is named d5_"):
        visits.main(["d5_x"])


def test_what_another_study_has_trained_is_not_trained_again(tmp_path, monkeypatch):
    """BF16, clover and feedback of d6_longer are those of d6_forwards_s1: only the checkpoints that they save differ.
    On another text, or of another length, they count for nothing."""
    named = {s.name: s for s in visits.studies()}
    theirs, mine = named["d6_forwards_s1"], named["d6_longer"]
    (tmp_path / "d6_forwards_s1.json").write_text(stored_results(theirs.runs("key"), "key"))
    (tmp_path / "d6_forwards_s2.json").write_text(stored_results(named["d6_forwards_s2"].runs("other")[:1], "other"))
    monkeypatch.setattr(visits, "RESULTS", tmp_path)
    expected = {(m, 1) for m in ("bf16", "clover", "clover_feedback")}
    assert {(run.method, run.seed) for run in mine.stored()} == expected
    assert len(mine.open_runs()) == 24 - 3
    monkeypatch.setattr(visits.sweep, "main", lambda argv: None)
    visits.do(mine, str(tmp_path), None)
    found = {path.stem for path in (tmp_path / "v8192/runs").glob("*.json")}
    assert found == {run.tag for run in mine.runs("key") if (run.method, run.seed) in expected}
