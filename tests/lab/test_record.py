"""The leaderboard: records of runs, what is refused, and that the page is what the records say."""

import json
import re
from pathlib import Path

import pytest
from _training import BASE

from lab import ROOT, record
from nanochat_fp4.environment import get_commit
from nanochat_fp4.errors import UserError
from scripts import base_train


def test_the_place_is_interpolated():
    curve = [(0, 4.0, 4.1), (10, 3.0, 3.1), (20, 2.0, 2.1)]
    assert record.reached(curve, 2.5) == 15
    assert record.reached(curve, 3.0) == 10
    assert record.reached(curve, 9.0) == 0
    assert record.reached(curve, 1.9) is None


@pytest.fixture
def run(tiny_base) -> Path:
    base_train.main([*BASE, "--method=bf16", "--num-iterations=4", "--eval-every=2", "--model-tag=mine"])
    return tiny_base / "base_checkpoints" / "mine"


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_becomes_a_record_and_a_row(run, tmp_path, capsys):
    docs = tmp_path / "docs"
    values = [r for r in lines(run) if r["event"] == "val"]
    assert [r["step"] for r in values] == [0, 2, 4]
    target = (values[1]["bpb"] + values[2]["bpb"]) / 2
    record.main([str(run), f"--to={target}", f"--docs={docs}", "--note=a busy machine", "--commit=1234567"])
    made = json.loads((docs / "records/mine.json").read_text())
    assert made["commit"] == (get_commit() or "1234567")  # what the run knows itself comes first
    seconds = [r["dt"] for r in lines(run) if r["event"] == "train"]
    # Half way between steps 2 and 4 of 128 tokens: as far as the loss goes, after the third of four steps.
    assert made["tokens"] == 3 * 128 and made["seconds"] == pytest.approx(sum(seconds[:3]))
    assert (made["method"], made["steps"], made["bpb"]) == ("bf16", 4, values[2]["bpb"])
    log = (docs / made["log"]).read_text()
    assert len(log.splitlines()) == 4 + 3 and str(run.parent) not in log + json.dumps(made)
    record.main(["--table", f"--docs={docs}"])
    table, note = (docs / "leaderboard.md").read_text().split("\n\n")[-2:]
    (row,) = [line for line in table.splitlines() if line.startswith("| `")]
    assert row.startswith("| `bf16` | 384 | ") and row.endswith(" | [log](records/mine.jsonl) | 1 |")
    assert note == "1. a busy machine\n"
    record.main([str(run), "--to=0.001", f"--docs={docs}"])
    record.main(["--table", f"--docs={docs}"])
    assert "| not reached | - | - |" in (docs / "leaderboard.md").read_text()


def test_a_log_that_disagrees_with_its_checkpoint_is_refused(run, tmp_path):
    good = lines(run)
    changes = {
        "trained steps": lambda r: None if r["event"] == "train" and r["step"] == 2 else r,
        "training seconds": lambda r: r | {"dt": 0.0} if r["event"] == "train" else r,
        "last validation": lambda r: r | {"bpb": 1.0} if r["event"] == "val" else r,
        "method": lambda r: r | {"method": "clover"} if r["event"] == "start" else r,
        "seed": lambda r: r | {"config": r["config"] | {"seed": 43}} if r["event"] == "start" else r,
        "tokens of a step": lambda r: r | {"total_batch_size": 64} if r["event"] == "start" else r,
        "number of parameters": lambda r: r | {"num_params": 1} if r["event"] == "start" else r,
    }
    for what, change in changes.items():
        changed = [c for r in good if (c := change(r))]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in changed))
        with pytest.raises(UserError, match=f"the checkpoint's {what} is"):
            record.main([str(run), "--to=3", f"--docs={tmp_path}"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in good))
    for newest in run.glob("*_000004*"):
        newest.unlink()
    with pytest.raises(UserError):  # the end of the run is not there any more
        record.main([str(run), "--to=3", f"--docs={tmp_path}"])
    assert not list((tmp_path / "records").glob("*.json"))


def test_of_a_sweep_only_whole_runs_count(tmp_path):
    record.main([str(ROOT / "docs/results/d6_fresh.json"), "--to=1.27", "--seed=3", f"--docs={tmp_path}"])
    made = {r["method"]: r for p in tmp_path.rglob("*.json") if (r := json.loads(p.read_text()))}
    assert set(made) == {"bf16", "clover", "clover_feedback"}  # the others branch from a run of clover_feedback
    assert 2196 < made["clover"]["tokens"] / 65536 < 2440 and made["bf16"]["tokens"] < made["clover"]["tokens"]
    with pytest.raises(UserError, match="no run with seed 9"):
        record.main([str(ROOT / "docs/results/d6_fresh.json"), "--to=1.27", "--seed=9", f"--docs={tmp_path}"])
    with pytest.raises(UserError, match="either a run with --to"):
        record.main([str(ROOT / "docs/results/d6_fresh.json")])


def test_the_page_is_what_the_records_say():
    records = [json.loads(p.read_text()) for p in sorted((ROOT / "docs/records").glob("*.json"))]
    text = (ROOT / "docs/leaderboard.md").read_text()
    assert text == record.page(records)
    assert len(re.findall(r"^\| `", text, re.M)) == len(records) > 10
