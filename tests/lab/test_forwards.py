"""lab.study.forwards, on checkpoints of a sweep of a tiny model."""

import json

import pytest

from lab.study import forwards, sweep
from nanochat_fp4.cli import UserError


def test_the_same_weights_in_several_forwards(tiny_base, tmp_path, capsys):
    folder = tmp_path / "sweep"
    small = "--sizes=tiny --seeds=1 --tokens=512 --vocab-size=300 --keep=bf16,mine --extra=--eval-tokens=256"
    mine = "--variant=mine: --method=bf16 --method-phases=0.5=clover"
    sweep.main([*small.split(), "--methods=bf16", mine, f"--folder={folder}"])
    content = json.loads((folder / "sweep.json").read_text())
    assert content["done"] == 2 and content["results"][1]["gemm_work"]["4"] == pytest.approx(24 / 53)
    said = capsys.readouterr().out
    assert str(folder / "sweep.json") in said and f"text {content['data']}\n" in said
    run = [f"--folder={folder}", "--device-type=cpu"]  # Its batches are larger than the evaluation.
    forwards.main(run)
    said = capsys.readouterr().out
    assert f"2 runs on {content['data']}" in said and "run 2 of 2: tiny_mine" in said
    records = [json.loads(path.read_text()) for path in sorted((folder / "forwards").glob("*.json"))]
    assert [r["tag"].split("_")[1] for r in records] == ["bf16", "mine"]
    for record in records:
        bpb = record["bpb"]
        assert (record["eval_tokens"], record["rows"]) == (256, 4)  # as the sweep, which refuses other tokens
        assert list(bpb) == ["clover", "bf16"] and bpb["clover"] != bpb["bf16"]
    trained = json.loads((next((folder / "runs").glob("tiny_mine_*.json"))).read_text())
    # The run measured the same weights on the same tokens, in other batches: FP32 sums in another order.
    assert records[1]["bpb"]["clover"] == pytest.approx(trained["val_bpb"], rel=1e-4)
    assert records[1]["bpb"]["bf16"] == pytest.approx(trained["val_bpb_bf16"], rel=1e-4)
    path = next((folder / "forwards").glob("tiny_mine_*.json"))
    path.write_text(json.dumps(records[1] | {"bpb": {"bf16": 7.0}}))
    forwards.main([*run, "--forwards=bf16,fp8"])  # adds what the record lacks
    bpb = json.loads(path.read_text())["bpb"]
    assert bpb["bf16"] == 7 and list(bpb) == ["bf16", "fp8"] and records[1]["tag"] in capsys.readouterr().out
    forwards.main([*run, "--device-batch-size=2"])  # and measures again on other rows or tokens
    assert (again := json.loads(path.read_text()))["rows"] == 2 and again["bpb"]["bf16"] < 7
    (tmp_path / "other.txt").write_text("\n\n".join(f"Of another text, paragraph {i}." for i in range(2000)))
    with pytest.raises(UserError, match="other.* is not the text of tiny_bf16_s1_.*; give the text"):
        forwards.main([*run, f"--data-dir={tmp_path / 'other.txt'}"])


def test_bad_input_is_one_line(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in .* is named d4"):
        forwards.main([f"--folder={tmp_path}", "--tags=d4*"])
    with pytest.raises(ValueError, match="unknown method"):
        forwards.main([f"--folder={tmp_path}", "--forwards=fp3"])
