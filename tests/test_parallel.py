"""--parallel: sharded runs are the same runs, and send what the cost model says."""

import json

import pytest

SMALL = (
    "--depth 2 --aspect-ratio 64 --head-dim 64 --vocab-size 256 --seq-len 32 --micro-batch 1 --total-batch-size 128 "
    "--seconds 0.01"
).split()


def test_bytes_are_those_of_the_cost_model(run_ranks, tmp_path):
    """Counted on two gloo processes, where head and embedding travel in FP32."""
    path = tmp_path / "rows.jsonl"
    for mode in (["--parallel=ddp"], ["--parallel=fsdp"], ["--parallel=fsdp", "--gather=bf16"]):
        run_ranks(f"from scripts.bench_parallel import main; main({[*SMALL, *mode, f'--json={path}']!r})")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["mode"] for r in rows] == ["ddp", "fsdp_codes", "fsdp_bf16"]
    for row in rows:
        assert row["sent_bytes"] == row["predicted_bytes"] > 0, row
    ddp, codes, raw = rows
    assert codes["state_gib"] < 0.65 * ddp["state_gib"]
    assert codes["sent"]["all_gather"] < 0.5 * raw["sent"]["all_gather"]
    # One rounding of a BF16 weight more or less would be 1e-3; here only the order of sums differs.
    assert ddp["loss"] == pytest.approx(codes["loss"], rel=1e-3)
