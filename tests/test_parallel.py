"""--parallel: sharded runs are the same runs, and send what the cost model says."""

import json

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf
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


def one_rank():
    """A Llama and a GPT, whose two processes have the same rows: with shards and without, three steps."""
    from nanochat_fp4.common import compute_cleanup, compute_init
    from nanochat_fp4.gpt import GPT, config_from_depth
    from nanochat_fp4.llama import Llama, LlamaConfig

    compute_init("cpu")
    rates = dict(unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, weight_decay=0.1)
    llama = LlamaConfig(sequence_len=32, vocab_size=256, n_layer=2, n_head=2, n_kv_head=2, n_embd=128)
    for cls, config in ((Llama, llama), (GPT, config_from_depth(2, 256, 32, 64, 64, "L"))):
        losses = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = cls(config)
            model.init_weights()
            nf.convert(model, "clover", verbose=False)
            if sharded:
                parallel.shard(model)
            optimizers, schedule = model.setup_finetuning(rates, 1.0, lambda progress: 1.0)
            x = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
            for step in range(3):
                schedule(step, 0.0)
                torch.manual_seed(step)
                loss = model(x[:, :-1], x[:, 1:])
                loss.backward()
                norm = model.clip_gradients()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad(set_to_none=True)
                losses.append((loss.item(), norm.item()))
        # The norm is that of all shards, added up in another order.
        assert losses[3:] == [pytest.approx(pair, rel=1e-4) for pair in losses[:3]], (cls, losses)
    compute_cleanup()


def test_llama_and_gpt_train_alike_with_shards(run_ranks):
    run_ranks("import test_parallel; test_parallel.one_rank()")
