"""--parallel: sharded runs are the same runs, and send what the cost model says."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _training import BASE, SFT
from torch import nn

import nanochat_fp4 as nf
from eval.local import LocalArithmetic, LocalChoice
from eval.run import run_task
from nanochat_fp4 import parallel
from nanochat_fp4.cli import UserError
from nanochat_fp4.common import compute_cleanup, compute_init
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.evaluation.core_eval import evaluate_task
from nanochat_fp4.generation.engine import draw_samples
from nanochat_fp4.models.gpt import GPT, compile_layers, config_from_depth
from nanochat_fp4.models.llama import Llama, LlamaConfig
from scripts import base_train


def test_bytes_are_those_of_the_cost_model(run_ranks, tmp_path):
    """Counted on two gloo processes, where head and embedding travel in FP32."""
    path = tmp_path / "rows.jsonl"
    shape, said = "depth=2, width=128, head_dim=64, rows=1", []
    for mode, gather, method in (
        ("ddp", "codes", "clover"), ("fsdp", "codes", "clover"), ("fsdp", "bf16", "clover"), ("fsdp", "codes", "bf16"),
    ):  # fmt: skip
        how = f"mode={mode!r}, gather={gather!r}, method={method!r}, {shape}"
        first, *_ = run_ranks(f"import _communication as c; c.write_counted_step({str(path)!r}, {how})")
        said += [line.partition(": ")[2] for line in first.splitlines() if line.startswith("FSDP over 2")]
    assert [line.split()[3] for line in said] == ["12", "0"]  # layers whose weights are gathered as codes
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["mode"] for r in rows] == ["ddp", "fsdp_codes", "fsdp_bf16", "fsdp_bf16"]
    for row in rows:
        assert row["sent_bytes"] == row["predicted_bytes"] > 0, row
    ddp, codes, raw, _ = rows
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
    for flag in ("--device-batch-size=auto", "--telemetry-every=5"):
        with pytest.raises(UserError, match=f"{flag.split('=')[0]}.* --parallel=fsdp"):
            check(flag)
    args = base_train.parse_args(["--parallel=fsdp"])
    assert parallel.check_parallel(args) and args.sample_every == args.core_metric_every == 2000
    model = nn.ModuleDict({"odd": nn.Linear(16, 33, bias=False)})
    with pytest.raises(UserError, match="33 rows of odd.weight"):
        parallel.shard(model, torch.bfloat16)


def one_rank():
    """A Llama and a GPT, whose two processes have the same rows: with shards and without, two steps."""
    compute_init("cpu")
    rates = dict(unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, weight_decay=0.1)
    llama = LlamaConfig(sequence_len=32, vocab_size=256, n_layer=2, n_head=2, n_kv_head=2, n_embd=128)
    steps = 2
    for cls, config in ((Llama, llama), (GPT, config_from_depth(1, 256, 32, 64, 128, "L"))):
        losses = []
        for sharded in (False, True):
            torch.manual_seed(0)
            model = cls(config)
            model.init_weights()
            model.lm_head.precision = "fp8" if cls is GPT else "bf16"
            nf.convert(model, "clover", verbose=False)
            if sharded:
                model.recompute = "codes"
                parallel.shard(model)
            optimizers, schedule = model.setup_finetuning(rates, 1.0, lambda progress: 1.0)
            x = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(1))
            for step in range(steps):
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
        assert losses[steps:] == [pytest.approx(pair, rel=1e-4) for pair in losses[:steps]], (cls, losses)
    compute_cleanup()


def test_llama_and_gpt_train_alike_with_shards(run_ranks):
    run_ranks("import test_parallel; test_parallel.one_rank()")


QUESTIONS = [{"query": f"{i}", "choices": ["a", "the", "of"], "gold": i} for i in range(3)]
CORE = {"task_type": "multiple_choice", "num_fewshot": 0, "continuation_delimiter": " "}


class Letters(LocalChoice):
    """Three short problems, of which one process gets two."""

    def __getitem__(self, i: int) -> dict:
        letters = ("A", "B", "C")
        return {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": letters[i]}],
                "letters": letters}  # fmt: skip


class Words(LocalArithmetic):
    def __getitem__(self, i: int) -> dict:
        return {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "x"}]}

    def evaluate(self, conversation: dict, answer: str) -> bool:
        ANSWERS.append(answer)
        return False


ANSWERS = []


def trained_and_evaluated(method: str, sharded: bool, evaluates: bool = True) -> tuple[list, list]:
    """Losses of three steps; what is evaluated after the first, in both precisions."""
    tokenizer, rank = get_tokenizer(), dist.get_rank()
    torch.manual_seed(0)
    model = GPT(config_from_depth(1, tokenizer.get_vocab_size(), 32, 64, 64, "L"))
    model.init_weights()
    for layer in (model.transformer.h[0].attn.c_proj, model.transformer.h[0].mlp.c_proj):
        nn.init.normal_(layer.weight, std=0.1)  # zeros would leave nothing of the block
    nf.convert(model, method, verbose=False)
    if sharded:
        parallel.shard(model)
    forward = compile_layers(model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randint(tokenizer.get_vocab_size(), (2, 9), generator=torch.Generator().manual_seed(1))
    losses, results = [], []
    for step in range(3):
        torch.manual_seed(step)
        loss = forward(x[:, :-1], x[:, 1:])
        loss.backward()
        sgd.step()
        sgd.zero_grad()
        losses.append(loss.item())
        if step or not evaluates:
            continue
        model.eval()
        compiled = torch._dynamo.utils.counters["frames"]["total"]
        for precision in (contextlib.nullcontext(), nf.full_precision(model)):
            ANSWERS.clear()
            with precision, parallel.unsharded(model), torch.no_grad():
                samples = draw_samples(model, tokenizer, ("the", "of a"), max_tokens=2) if rank == 0 else []
                core = evaluate_task(model, tokenizer, QUESTIONS, torch.device("cpu"), CORE)
                solved = run_task(Letters(size=3), model, tokenizer).outcomes
                run_task(Words(size=3), model, tokenizer, max_new_tokens=2, batch_size=1)
                results.append((samples, core, solved, list(ANSWERS), model(x[:1, : 4 + rank]).tolist()))
            # CORE's errors are caught, and training goes on: those before the blocks and those inside one.
            with pytest.raises(ValueError, match="position 401"), parallel.unsharded(model):
                model(x.new_zeros(1, 401))
            hook = model.transformer.h[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError), parallel.unsharded(model):
                model(x)
            hook.remove()
        assert torch._dynamo.utils.counters["frames"]["total"] == compiled, "a shape of its own would be compiled anew"
        model.train()
    return losses, results


def one_rank_that_evaluates():
    compute_init("cpu")
    compile_, torch.compile = torch.compile, lambda f, **_: compile_(f, backend="eager")  # on a CPU no graph is full
    losses, results = trained_and_evaluated("clover", sharded=True)
    # The mean of two equal gradients is exact, so that processes with shards make the bits of those without.
    assert (losses, results) == trained_and_evaluated("clover", sharded=False)
    assert trained_and_evaluated("clover", sharded=True, evaluates=False)[0] == losses
    assert results[0] != results[1], "there are two precisions"
    model = nf.convert(nn.Sequential(nn.Linear(64, 64, bias=False)), "clover", verbose=False)
    torch.distributed.fsdp.fully_shard(model)
    nf.gather_codes(model)
    model.unshard()
    with nf.full_precision(model), pytest.raises(ValueError, match="full_precision around unsharded"):
        model(torch.ones(1, 64))
    compute_cleanup()


@pytest.mark.slow
def test_each_process_evaluates_by_itself_and_training_goes_on(tiny_base, tmp_path):
    """Problems are dealt unevenly and only the first process generates samples: no two call the model as often. In
    processes of their own, since torch.compile waits for ever in forks."""
    (tmp_path / "rank.py").write_text("import test_parallel; test_parallel.one_rank_that_evaluates()")
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(str(root / folder) for folder in (".", "kernels", "tests", "tests/training"))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NANOCHAT_BASE_DIR": str(tiny_base)}
    for slow in ("TRITON_INTERPRET", "NVFP4_COMPILE"):  # interpreted kernels and graphs of the reference
        environment.pop(slow, None)
    argv = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", tmp_path / "rank.py"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def test_samples_and_accuracies_of_sharded_runs(fork_server, tiny_base):
    """The scripts: base training with samples, then SFT with accuracies, with shards and without."""
    records = {}
    longer = ["--method=bf16", "--max-seq-len=128", "--total-batch-size=512", "--eval-every=-1"]
    for mode in ("ddp", "fsdp"):
        flags, env = [f"--parallel={mode}", "--overwrite"], {"NANOCHAT_BASE_DIR": str(tiny_base)}
        accuracies = ["--source=base", "--num-iterations=2", "--eval-metrics-every=1", "--eval-metrics-max-problems=3"]
        for script, argv, folder in (
            ("base_train", [*BASE, *longer, "--num-iterations=2", "--sample-every=2"], "base_checkpoints"),
            ("chat_sft", [*SFT, *accuracies], "chatsft_checkpoints"),
        ):
            run = fork_server.run(f"scripts.{script}", [*argv, *flags, "--model-tag=tag"], env=env, ranks=2)
            assert run.status == 0, run.log
            lines = (tiny_base / folder / "tag" / "metrics.jsonl").read_text().splitlines()
            kept = ("samples", "local_choice_acc")
            found = [{k: r[k] for k in kept if k in r} for r in map(json.loads, lines)]
            records.setdefault(mode, []).append([r for r in found if r])
    assert records["ddp"] == records["fsdp"] and all(records["ddp"]), records
