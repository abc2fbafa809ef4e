"""--parallel: sharded runs are the same runs, and send what the cost model says."""

import json

import pytest
import torch
from torch import nn

from nanochat_fp4 import parallel
from nanochat_fp4.errors import UserError
from scripts import base_train

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


def test_what_does_not_go_with_shards(monkeypatch, capsys):
    def check(*flags):
        return parallel.check_parallel(base_train.parse_args(["--parallel=fsdp", *flags]))

    assert check() is False and "one process" in capsys.readouterr().out
    monkeypatch.setattr(parallel, "is_ddp_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda *_: 2)
    for flag in ("--oscillation=reset", "--device-batch-size=auto", "--telemetry-every=5"):
        with pytest.raises(UserError, match=f"{flag.split('=')[0]}.* does not go with --parallel=fsdp"):
            check(flag)
    args = base_train.parse_args(["--parallel=fsdp"])
    assert parallel.check_parallel(args) and args.sample_every == args.core_metric_every == -1
    assert "there is no --sample-every and no --core-metric-every" in capsys.readouterr().out
    model = nn.ModuleDict({"odd": nn.Linear(16, 33, bias=False)})
    with pytest.raises(UserError, match="the 33 rows of odd.weight do not divide by 2 processes"):
        parallel.shard(model, torch.bfloat16)
