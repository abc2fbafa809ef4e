"""dev/compare_trees.py and the table of dev/compare_upstream.py, on toys."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLAGS = (
    "--method=bf16 --depth=1 --aspect-ratio=128 --head-dim=64 --max-seq-len=32 --window-pattern=L --num-iterations=4 "
    "--device-batch-size=2 --total-batch-size=128"
).split()


@pytest.fixture
def dev(fork_server):
    """dev(script, *arguments): the end of a script of dev/, and what it said."""
    base = {"NANOCHAT_BASE_DIR": os.environ["NANOCHAT_BASE_DIR"]}

    def run(script: str, *arguments: object):
        python = {"executable": str(fork_server.python)}  # of the runs that it starts
        return fork_server.run(f"dev.{script}", list(map(str, arguments)), as_main=True, env=base, **python)

    return run


def test_a_tree_equals_itself_and_runs_once(dev, tiny_base, tmp_path):
    arguments = ["--before", ROOT, "--base", tiny_base, "--seeds", 1, "--every", 2, "--window", 2]
    arguments += ["--out", tmp_path / "out", "--", *FLAGS]
    done = dev("compare_trees", *arguments)
    assert done.status == 0, done.log
    rows = [line.split() for line in done.log.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == [("2", "1"), ("4", "1")]
    for row in rows:
        assert row[2] == row[3] and row[5:] == ["+0.0000", "±", "nan", "+0.0000"]
    assert rows[0][2] != rows[1][2]
    assert not list((tmp_path / "out").rglob("*.pt"))
    logs = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("log")}
    assert len(logs) == 2 and dev("compare_trees", *arguments).log == done.log
    assert logs == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("log")}


def test_pairs_and_windows(dev, tmp_path):
    curves = {
        "before_1": (5.0, 4.0, 3.0, 2.0),
        "before_2": (6.0, 5.0, 4.0, 3.0),
        "after_1": (5.0, 4.2, 3.0, 2.4),
        "after_2": (6.0, 5.0, 4.0),  # did not get to the end
    }
    for name, losses in curves.items():
        folder = tmp_path / name / "base_checkpoints" / "d1"
        folder.mkdir(parents=True)
        (tmp_path / name / "complete").touch()
        records = [{"event": "train", "step": i, "loss": loss} for i, loss in enumerate(losses)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    done = dev("compare_trees", "--before", ROOT, "--base", tmp_path, "--out", tmp_path, "--seeds", 1, 2,
               "--every", 2, "--window", 2)  # fmt: skip
    assert done.status == 0, done.log
    lines = done.log.splitlines()[2:]
    assert lines[0].split() == "2 2 5.0000 5.0500 0.7071 +0.0500 ± 0.6353 +0.1000 +0.0000".split()  # t 12.706
    assert lines[1].split() == "4 1 2.5000 2.7000 0.0000 +0.2000 ± nan +0.2000".split()


def test_what_fails_is_named(dev, tmp_path):
    done = dev("compare_trees", "--before", tmp_path, "--base", tmp_path)
    assert done.status == 1 and "is no version of this project" in done.log
    arguments = ["--before", ROOT, "--base", tmp_path, "--seeds", 1, "--out", tmp_path / "out", "--", "--depth=x"]
    done = dev("compare_trees", *arguments)
    assert done.status == 1 and "\nerror: before_1: exit status 2:" in done.log, done.log


LOG = "step {0:05d}/00003 (0%) | loss: {1:.6f} | lrm: 1.00 | dt: {2:.2f}ms | tok/sec: 1\n"


def test_logs_side_by_side(dev, tmp_path):
    for name, losses in (("old_bf16", (3.0, 2.0, 1.5)), ("new_clover", (3.0, 2.25)), ("empty", ())):
        text = "".join(LOG.format(i, loss, 10.0 + i) for i, loss in enumerate(losses))
        (tmp_path / f"{name}.log").write_text("compiling\n" + text)
    logs = [tmp_path / f"{name}.log" for name in ("old_bf16", "new_clover", "empty")]
    done = dev("compare_upstream", "table", *logs, "--every", 1)
    assert done.status == 0, done.log
    note, header, *rows = [line.split() for line in done.log.splitlines()]
    assert note == "no training step in empty".split() and header == ["old_bf16", "new_clover"]
    assert rows[1] == ["step", "1", "2.000000", "2.250000"] and rows[2] == ["step", "2", "1.500000", "-"]
    assert rows[-1] == ["ms", "(median)", "11.0", "11.0"]
    done = dev("compare_upstream", "table", tmp_path / "nothing.log")
    assert done.status == 1 and done.log.startswith("error: there is no ")


def test_losses_in_one_picture(dev, tmp_path):
    pytest.importorskip("matplotlib")
    runs = []
    for name, losses in (("one", (5.0, 4.0, 3.0)), ("two", (5.0, 4.5, 3.25))):
        records = [{"event": "train", "step": i, "loss": loss} for i, loss in enumerate(losses)]
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        runs.append(f"{name} of them={tmp_path / name}")
    done = dev("plot_losses", tmp_path / "losses.png", *runs)
    assert done.status == 0, done.log
    assert "two of them: 3 steps, at most 0.5000 apart, 0.2500 in the last 50" in done.log
    assert (tmp_path / "losses.png").stat().st_size > 5000
    assert "give a picture and runs" in dev("plot_losses").log
    done = dev("plot_losses", tmp_path / "losses.png", f"none={tmp_path / 'nowhere'}")
    assert done.status == 2 and "has no losses of training steps" in done.log
