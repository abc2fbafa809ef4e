"""The stored runs: a sweep's file comes back as it was, and nothing is compared with a run of another text."""

import json

import pytest

from lab import runs
from lab.study.sweep_runs import computed, known, left_code, own_recipes
from nanochat_fp4.cli import UserError

RUN = {
    "method": "mine", "size": "tiny", "seed": 1, "flags": ["--depth=2", "--method=clover"], "steps": 8, "tokens": 4096,
    "num_params": 9, "val_bpb": 1.5, "val_bpb_bf16": 1.25, "gemm_work": {"4": 1.0, "8": 0.0, "16": 0.0},
    "vocab_size": 512, "eval_tokens": 64, "train_loss": 2.0, "curve": [[0, 3.0, 3.5], [8, 1.5, 1.25]],
    "loss_curve": [[4, 2.5], [8, 2.0]], "forwards": {"clover": 1.5, "bf16": 1.25},
}  # fmt: skip
ENVIRONMENT = {"gpu": "NVIDIA H100", "gpu_count": 2, "cpu": "some", "torch": "2.11", "commit": "1234567"}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Two empty tables."""
    monkeypatch.setattr(runs, "RUNS", tmp_path / "runs.parquet")
    monkeypatch.setattr(runs, "CURVES", tmp_path / "curves.parquet")
    return tmp_path


def write(path, *results) -> str:
    path.write_text(json.dumps({"data": "text (0123)", "environment": ENVIRONMENT, "results": results}))
    return str(path)


def test_a_sweep_becomes_a_study_and_replaces_the_one_of_its_name(store, capsys):
    runs.main(["add", write(store / "a.json", RUN), write(store / "b.json", RUN | {"seed": 2, "forwards": {}})])
    study = runs.stored("a")
    (run,) = study["results"]
    assert {name: run[name] for name in RUN} == RUN | {"method": "mine"}
    assert study["data"] == "text (0123)" and study["environment"]["gpu_count"] == 2
    assert run["commit"] == "1234567"
    runs.main(["add", write(store / "a.json", RUN | {"val_bpb": 1.4}, RUN | {"method": "other"})])
    assert [r["val_bpb"] for r in runs.stored("a")["results"]] == [1.4, 1.5]
    assert [r["seed"] for r in runs.stored("b")["results"]] == [2] and runs.studies() == ["a", "b"]
    said = capsys.readouterr().out.rpartition("added to ")[2].splitlines()  # What the last call added.
    assert [line.split()[0] for line in said if "NVIDIA H100" in line] == ["a"] and "d6_stored" not in " ".join(said)


def test_a_run_names_the_commit_that_made_it(store, capsys):
    """A sweep may go on with other code than it began with. An older file names one commit for all."""
    runs.main(["add", write(store / "a.json", RUN | {"commit": "abcdef0" * 5}, RUN | {"seed": 2, "commit": None})])
    study = runs.stored("a")
    assert [r["commit"] for r in study["results"]] == ["abcdef0" * 5, "1234567"]
    assert study["environment"]["commit"] == "abcdef0a, 1234567" and "abcdef0a, 1234567" in capsys.readouterr().out


def test_the_line_below_a_table_has_commits_as_the_lists_have_them():
    """All of them, with eight digits, and whether the code was changed."""
    commits = "abcdef0" * 5, "abcdef0" * 5 + "+changes", "1234567", "7654321" * 5 + " and 1234567", None
    content = {"environment": ENVIRONMENT | {"commit": None}, "results": [RUN | {"commit": c} for c in commits]}
    shown = "abcdef0a, abcdef0a+changes, 1234567, 76543217 and 1234567, not recorded"
    assert runs.pooled([content])["commit"] == ", ".join(map(runs.shown_commit, commits)) == shown


def test_names_are_groups_patterns_and_files():
    assert runs.names_of("d6_shuffled,x.json") == [*(f"d6_forwards_s{seed}" for seed in (1, 2, 3)), "x.json"]
    assert "ladder_128_wide_25" in runs.names_of("ladder_*")
    assert all(set(group) <= set(runs.studies()) for group in runs.GROUPS.values())
    with pytest.raises(UserError, match="'mine'; .*the path of its file"):
        runs.stored("mine")
    for wrong, meant in (("d6_mixd", "d6_mixed"), ("d6_storedd", "d6_stored")):
        with pytest.raises(UserError, match=rf"did you mean {meant}\? .*lab.runs"):
            runs.stored(wrong)


def test_the_runs_of_a_study_a_group_and_a_file_are_listed(store, capsys):
    path = write(store / "a.json", RUN | {"head": "fp8"}, RUN | {"seed": 2, "commit": "abcdef0" * 5})
    runs.main(["add", path])
    for name in ("a", path, "a,a"):
        capsys.readouterr()
        runs.main([name])
        lines = [line.split() for line in capsys.readouterr().out.splitlines() if "mine" in line]
        assert [line[1:] for line in lines[:2]] == [
            ["mine", "tiny", "1", "1.5000", "1.2500", "fp8", "1234567"],
            ["mine", "tiny", "2", "1.5000", "1.2500", "-", "abcdef0a"],
        ]
        assert len(lines) == 2 * len(name.split(","))
    for wrong in ("b", "ad"):
        with pytest.raises(UserError, match=f"'{wrong}'"):
            runs.main([wrong])


def test_the_list_has_the_studies_and_their_groups():
    first = [line.split()[0] for line in runs.listed().splitlines() if line.strip()]
    assert set(runs.studies()) | set(runs.GROUPS) <= set(first) and "runs.parquet" in runs.listed()


def test_a_label_that_names_a_method_is_its_method_and_every_key_is_of_what_the_flags_compute_now():
    """Otherwise --again would train another method under the label of a stored run, as it did for 25 runs."""
    stored = [r for r in runs.read(runs.RUNS, runs.studies()) if not (left_code(r["flags"]) or own_recipes(r["flags"]))]
    named = [r for r in stored if known(r["label"]) and r["flags"]]
    assert len(named) > 300
    assert not [r for r in named if r["method"] != r["label"] or f"--method={r['label']}" not in r["flags"]]
    assert not {r["label"] for r in stored if computed(r["label"], r["flags"]) != r["computed"]}
