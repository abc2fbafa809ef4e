"""Training end to end on a tiny model: resume to the bit, signals, bad numbers, bad input, several processes."""

import contextlib
import functools
import gc
import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from _assertions import assert_same, final_state, wait_until
from _training import BASE, MID, after_steps, in_step, out_of_memory, stopped_in_step

import nanochat_fp4 as nf
from nanochat_fp4 import cli
from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.models import optim
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.training import trainer
from nanochat_fp4.training.checkpoint_manager import find_last_step, list_steps, load_checkpoint
from nanochat_fp4.training.flags import changed_flags
from nanochat_fp4.training.load_model import load_model
from scripts import base_loss, base_train, mid_train


def train(*flags: str, method: str = "clover", steps: int = 8) -> None:
    base_train.main([*BASE, "--eval-every=4", f"--method={method}", f"--num-iterations={steps}", *flags])


# ----------------------------------------------------------------------------------------------------------------------
# Resume


@pytest.mark.parametrize(
    "method, flags",
    [
        ("nvidia_full", []),  # other methods are killed and resumed in test_reliability.py
        ("clover", ["--layer-methods=*.c_fc=clover", "--method-phases=0.6=fp8", "--head=fp8"]),
    ],
)
def test_resume_is_exact(tiny_base, method, flags):
    flags = ["--eval-tokens=64", *flags]
    train("--save-every=1", "--keep-last=-1", *flags, method=method, steps=3)
    folder = tiny_base / "base_checkpoints" / f"d1_{method}"
    assert list_steps(folder) == [3, 2, 1]
    expected = final_state(folder, 3)
    # Every loss moved: a model that does not train would resume exactly too.
    losses = [r["loss"] for r in expected["records"] if r["event"] == "train"]
    assert len(losses) == len(set(losses)) == 3

    train("--resume-from-step=1", *flags, method=method, steps=3)
    assert_same(final_state(folder, 3), expected)


def test_a_run_is_validated_on_the_same_text_to_its_end(tiny_base, tmp_path, monkeypatch):
    """A shard that arrives during the run sorts last, and would be the validation text of the next evaluation."""
    folder = tmp_path / "own"
    shutil.copytree(os.environ["DATA_DIR"], folder)
    monkeypatch.setenv("DATA_DIR", str(folder))
    train("--model-tag=alone", method="bf16", steps=2)
    with in_step(0, lambda: shutil.copy(folder / "shard_00000.parquet", folder / "shard_99999.parquet")):
        train("--model-tag=beside", method="bf16", steps=2)
    logs = [read_jsonl(tiny_base / "base_checkpoints" / tag / "metrics.jsonl") for tag in ("alone", "beside")]
    losses = [[r["bpb"] for r in records if r["event"] == "val"] for records in logs]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_run_looks_at_its_folder_once(tiny_base, tmp_path, monkeypatch, capsys):
    """A walk through 100,000 files takes seconds, and all that a run says of its text is of one moment."""
    folder, walked, real = tmp_path / "own", [], Path.rglob
    folder.mkdir()
    (folder / "a.txt").write_text("the small model reads words. " * 3000)
    monkeypatch.setenv("DATA_DIR", str(folder))
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: (walked.append(self), real(self, pattern))[1])
    train(method="bf16", steps=1)
    assert walked.count(folder) == 1 and capsys.readouterr().out.count("a.txt") == 1


def test_the_head_is_the_runs_own(tiny_base):
    """FP8 is in its losses and its own forward; a resume with another head is refused, a branch may have one."""
    train("--save-every=2", "--keep-last=-1", method="bf16", steps=3)
    train("--head=fp8", "--model-tag=fp8", method="bf16", steps=3)
    folder = tiny_base / "base_checkpoints"
    plain, fp8 = (read_jsonl(folder / tag / "metrics.jsonl") for tag in ("d1_bf16", "fp8"))
    first, last = ([r for r in fp8 if r["event"] == "val"][i] for i in (0, -1))
    assert first["bpb"] != first["bpb_bf16"] == next(r for r in plain if r["event"] == "val")["bpb"]
    losses = [[r["loss"] for r in records if r["event"] == "train"] for records in (plain, fp8)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert plain[0]["config_key"] == fp8[0]["config_key"]
    assert plain[0]["gemm_work"] == {"4": 0.0, "8": 0.0, "16": 1.0} and fp8[0]["gemm_work"]["8"] == 320 / (320 + 1536)

    base_loss.main(["--model-tag=fp8", "--device-batch-size=2", "--split-tokens=128", "--device-type=cpu"])
    measured = read_jsonl(folder / "fp8" / "metrics.jsonl")[-1]
    assert measured["bpb"] == pytest.approx(last["bpb"], rel=1e-7) != measured["bpb_bf16"]
    mid_train.main([*MID, "--model-tag=fp8", "--num-iterations=1"])
    assert load_model("mid", "cpu", "eval", "fp8")[0].lm_head.precision == "fp8"
    mid_train.main([*MID, "--model-tag=fp8", "--num-iterations=1", "--quantization=none", "--overwrite"])
    assert load_model("mid", "cpu", "eval", "fp8")[0].lm_head.precision == "bf16"

    train(method="fp8", steps=1)
    train("--head=bf16", "--model-tag=bf16_head", method="fp8", steps=1)
    heads = [read_jsonl(folder / tag / "metrics.jsonl")[0]["head"] for tag in ("d1_bf16", "d1_fp8", "bf16_head")]
    assert heads == ["bf16", "fp8", "bf16"]
    with pytest.raises(UserError, match="head was None"):
        train("--head=fp8", "--resume-from-step=2", method="bf16", steps=3)
    train("--head=fp8", "--branch-from=d1_bf16@2", "--model-tag=branch", method="bf16", steps=3)


def test_the_numbers_of_a_step_do_not_depend_on_what_was_drawn_before(tiny_base, monkeypatch):
    """So a checkpoint needs no generators, and an evaluation may draw as many numbers as it likes."""
    train("--save-every=1", "--keep-last=-1", steps=2)
    folder = tiny_base / "base_checkpoints" / "d1_clover"
    expected = final_state(folder, 2)
    monkeypatch.setattr(trainer.Trainer, "before_step", lambda run, last: torch.rand(7 + run.step))
    for flag in ("--resume-from-step=1", "--telemetry-every=1"):
        train(flag, *["--overwrite"] * ("telemetry" in flag), steps=2)
        assert_same(final_state(folder, 2), expected)


def test_resume_continues_what_a_signal_stopped(tiny_base, capsys):
    """After the step in progress; test_reliability.py sends every signal to every stage."""
    usual, seen = gc.get_threshold()[0], []
    with in_step(0, lambda: seen.append(gc.get_threshold()[0])), in_step(1, lambda: seen.append(gc.get_threshold()[0])):
        train("--model-tag=whole", steps=4, method="bf16")
    assert seen == [100 * usual, usual], "few collections of garbage up to the first step, and only then"
    whole, folder = (tiny_base / "base_checkpoints" / tag for tag in ("whole", "d1_bf16"))

    handler = signal.getsignal(signal.SIGTERM)
    with in_step(2, functools.partial(os.kill, os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit) as stopped:
        train(steps=4, method="bf16")
    assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) == handler
    out, err = capsys.readouterr()
    assert "step 3 of 4" in out and "--resume-from-step latest" in out
    assert re.search(r"time to the first step: [\d.]+ s", out + err)
    assert list_steps(folder) == [3]
    train("--resume-from-step=latest", steps=4, method="bf16")
    assert_same(final_state(folder, 4), final_state(whole, 4))


def test_the_time_of_the_first_value_is_told_apart(tiny_base, monkeypatch, capsys):
    """It is computed before the first update."""
    slow, order = base_train.evaluate_bpb, []

    def evaluate(*args):
        order.append("value")
        time.sleep(0.6)
        return slow(*args)

    monkeypatch.setattr(base_train, "evaluate_bpb", evaluate)
    ended: list[float] = []
    with in_step(0, lambda: order.append("step")), after_steps(lambda run: ended.append(time.monotonic())):
        train(steps=1, method="bf16")
    assert order == ["value", "step", "value"]
    found = re.search(r"first step: ([\d.]+) s; evaluation before it: ([\d.]+) s", capsys.readouterr().err)
    step, evaluation = map(float, found.groups())
    assert evaluation >= 0.6 and step + evaluation == pytest.approx(ended[0] - cli.BEGAN, abs=0.4)


def test_layers_of_several_methods_are_named(tiny_base, capsys):
    train("--depth=2", "--layer-methods=*.h.1.attn.c_q=fp8,*.c_fc=fp8", steps=1)
    out = capsys.readouterr().out
    assert re.search(r"  fp8 +in mlp.c_fc, attn.c_q of block 1\n", out) and "attn.c_q of block 0" in out
    train("--overwrite", "--depth=2", steps=1)
    assert "of block" not in capsys.readouterr().out


def test_a_run_of_another_release_is_refused_in_one_line(tiny_base, monkeypatch):
    real = trainer.checkpoints.save_checkpoint

    def former(folder, step, model, optimizer, meta, rank):
        return real(folder, step, model, optimizer, meta | {"loop_state": {"evaluated_at": -1}}, rank)

    with monkeypatch.context() as m:
        m.setattr(trainer.checkpoints, "save_checkpoint", former)
        train(steps=2, method="bf16")
    with pytest.raises(UserError, match="release") as e:
        train("--resume-from-step=latest", steps=3, method="bf16")
    assert "\n" not in str(e.value)


def test_signal_cuts_an_evaluation_short(tiny_base, monkeypatch):
    real, calls = base_train.evaluate_bpb, []

    def evaluate(model, batches, steps, token_bytes):
        calls.append(1)
        if len(calls) == 2:  # that of step 4
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, batches, steps, token_bytes)

    with monkeypatch.context() as m:
        m.setattr(base_train, "evaluate_bpb", evaluate)
        with pytest.raises(SystemExit):
            train(steps=6, method="bf16")
    folder = tiny_base / "base_checkpoints" / "d1_bf16"
    assert list_steps(folder) == [4] and len(calls) == 2
    assert load_checkpoint(folder, 4, "cpu")[2]["loop_state"]["looked"] == [3, False]

    train("--resume-from-step=latest", steps=6, method="bf16")  # evaluates step 4 after all
    train("--model-tag=whole", steps=6, method="bf16")
    assert_same(final_state(folder, 6), final_state(tiny_base / "base_checkpoints" / "whole", 6))


def test_a_run_that_was_stopped_at_a_change_of_the_method_evaluates_as_an_undisturbed_one(tiny_base):
    """With the method of the step before: it made the weights."""
    flags = ["--method-phases=0.5=bf16", "--eval-every=1"]
    train(*flags, "--model-tag=whole", steps=4)
    with stopped_in_step(1):
        train(*flags, steps=4)
    folder = tiny_base / "base_checkpoints"
    assert list_steps(folder / "d1_clover") == [2]  # not yet evaluated
    train(*flags, "--resume-from-step=latest", steps=4)
    assert_same(final_state(folder / "d1_clover", 4), final_state(folder / "whole", 4))


def test_a_signal_in_the_last_step_leaves_the_report_to_the_resume(tiny_base, capsys):
    """Else the report and the checkpoint would have an earlier evaluation as the final one, for ever."""
    train("--eval-every=3", "--matrix-lr=0.01", steps=4, method="bf16")  # its report is not the next run's
    with stopped_in_step(3):
        train("--eval-every=3", "--overwrite", steps=4, method="bf16")
    assert "step 4 of 4" in capsys.readouterr().out
    train("--eval-every=3", "--resume-from-step=latest", steps=4, method="bf16")
    records = read_jsonl(tiny_base / "base_checkpoints" / "d1_bf16" / "metrics.jsonl")
    section = json.loads((tiny_base / "report" / "d1_bf16" / "base-model-training.json").read_text())["data"][0]
    final = section["Final validation bpb"]
    assert [final] == [r["bpb"] for r in records if r["event"] == "val" and r["step"] == 4]
    _, _, meta = load_checkpoint(tiny_base / "base_checkpoints" / "d1_bf16", 4, "cpu")
    assert meta["val_bpb"] == final


@pytest.mark.parametrize("stopped", [True, False])
def test_samples_and_telemetry_of_the_step_of_a_resume_are_made_once(tiny_base, monkeypatch, stopped):
    """They come before a checkpoint of their step, unless a signal made the checkpoint."""
    drawn: list[int] = []
    monkeypatch.setattr(base_train, "draw_samples", lambda *of: drawn.append(1) or ["a sample"])
    flags = ["--sample-every=2", "--telemetry-every=2", "--save-every=2", "--keep-last=-1"]
    with stopped_in_step(1) if stopped else contextlib.nullcontext():
        train(*flags, steps=4)
    drawn.clear()
    train(*flags, "--resume-from-step=2", steps=4)
    assert len(drawn) == 1 + stopped
    records = read_jsonl(tiny_base / "base_checkpoints" / "d1_clover" / "metrics.jsonl")
    made = [[r["step"] for r in records if r["event"] == event] for event in ("sample", "telemetry")]
    assert made == [[2, 4], [0, 2]]


def test_keep_last_keeps_no_damaged_checkpoint_in_place_of_the_newest(tiny_base):
    train("--save-every=2", "--keep-last=-1", steps=4, method="bf16")
    folder = tiny_base / "base_checkpoints" / "d1_bf16"
    path = folder / "step_000004/model_000004.pt"
    path.write_bytes(bytes(path.stat().st_size))
    train("--resume-from-step=latest", "--keep-last=1", steps=3, method="bf16")
    assert list_steps(folder) == [4, 3] and find_last_step(folder) == 3


def test_going_back_forgets_the_later_checkpoints(tiny_base):
    """Else 'latest' would find a checkpoint of the abandoned run, and keep-last would keep that one."""
    train("--save-every=1", "--keep-last=-1", steps=5, method="bf16")
    folder = tiny_base / "base_checkpoints" / "d1_bf16"
    assert list_steps(folder) == [5, 4, 3, 2, 1]
    train("--resume-from-step=1", "--keep-last=2", "--save-every=1", "--matrix-lr=0.01", steps=3, method="bf16")
    assert list_steps(folder) == [3, 2]
    steps = [r["step"] for r in read_jsonl(folder / "metrics.jsonl") if r["event"] == "train"]
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("how", ["--resume-from-step=3", "--branch-from=d1_bf16@3"])
def test_rates_are_those_of_the_flags_also_after_a_resume(tiny_base, how):
    """One more step with twice Muon's rate moves its matrices twice as far, and all else as it would have moved."""
    folder = tiny_base / "base_checkpoints"
    train("--save-every=3", "--keep-last=-1", "--weight-decay=0", method="bf16", steps=4)
    before, after = (final_state(folder / "d1_bf16", step)["model"] for step in (3, 4))
    tag = "d1_bf16" if "resume" in how else "other"
    train(how, f"--model-tag={tag}", "--weight-decay=0", "--matrix-lr=0.04", method="bf16", steps=4)
    faster = final_state(folder / tag, 4)["model"]
    for name, start in before.items():
        factor = 2 if name.startswith("transformer.h.") else 1
        moved = after[name] - start
        tolerance = 1e-7 + 1e-3 * float(moved.abs().max())
        torch.testing.assert_close(faster[name] - start, factor * moved, rtol=0, atol=tolerance)
    name = "transformer.h.0.attn.c_q.weight"
    assert (after[name] - before[name]).abs().max() > 1e-5


def test_a_branch_goes_on_as_a_change_of_the_method_does(tiny_base, monkeypatch, capsys):
    train("--method-phases=0.5=clover", "--model-tag=phases", method="bf16", steps=4)
    checkpoints = tiny_base / "base_checkpoints"
    expected = final_state(checkpoints / "phases", 4)
    expected["records"] = [r for r in expected["records"] if r["step"] >= 2]

    train("--save-at=1,2", "--keep-last=-1", method="bf16", steps=4)
    trunk = final_state(checkpoints / "d1_bf16", 4)
    train("--branch-from=d1_bf16@2", "--save-every=3", "--keep-last=-1", steps=4)
    assert "Resuming from step 2 of d1_bf16" in capsys.readouterr().out
    assert_same(final_state(checkpoints / "d1_clover", 4), expected)
    assert expected["model"]["lm_head.weight"].ne(trunk["model"]["lm_head.weight"]).any()
    # Interrupted, it goes on from its own checkpoint; and what it branched from is as it was.
    shutil.rmtree(checkpoints / "d1_clover/step_000004")
    train("--branch-from=d1_bf16@2", "--resume-from-step=latest", steps=4)
    assert_same(final_state(checkpoints / "d1_clover", 4), expected)
    assert_same(final_state(checkpoints / "d1_bf16", 4), trunk)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite


@contextlib.contextmanager
def broken_layer(where: str, name: str, steps: set[int]):
    """NaN in what a layer computes ("forward") or infinity in its input's gradient ("backward") in these steps."""
    now = 0
    real_forward = GPT.forward

    def infinite(x):
        x = x.clone()
        x.register_hook(lambda gradient: gradient * math.inf)
        return x

    def forward(self, *args, **kwargs):
        if not (self.training and torch.is_grad_enabled() and now in steps):
            return real_forward(self, *args, **kwargs)
        layer = self.get_submodule(name)
        own = layer.forward
        if where == "forward":
            layer.forward = lambda x, *more: own(x, *more) * math.nan
        else:
            layer.forward = lambda x, *more: own(infinite(x), *more)
        try:
            return real_forward(self, *args, **kwargs)
        finally:
            del layer.forward

    def over(run):
        nonlocal now
        now += 1

    with pytest.MonkeyPatch.context() as m, after_steps(over):
        m.setattr(GPT, "forward", forward)
        yield


@pytest.mark.parametrize(
    "where, layer", [("forward", "transformer.h.0.mlp.c_fc"), ("backward", "transformer.h.0.attn.c_v")]
)
def test_nan_stops_and_names_step_and_layer(tiny_base, where, layer):
    named = f"{'output of' if where == 'forward' else 'gradient computed by'} {layer}"
    with broken_layer(where, layer, {1}), pytest.raises(UserError) as error:
        train("--eval-every=-1", steps=2)
    assert "step 1" in str(error.value) and named in str(error.value) and "--on-nonfinite skip" in str(error.value)
    folder = tiny_base / "base_checkpoints" / "d1_clover"
    assert list_steps(folder) == [1]  # as it was before the bad step; how it goes on: test_reliability.py
    assert all(torch.isfinite(t).all() for t in load_checkpoint(folder, 1, "cpu")[0].values())


def test_skipping_gives_up_when_nothing_else_happens(tiny_base):
    with broken_layer("forward", "transformer.h.0.mlp.c_proj", set(range(2, 40))), pytest.raises(UserError) as error:
        train("--eval-every=-1", "--on-nonfinite=skip", steps=30, method="bf16")
    assert "step 11" in str(error.value)
    assert list_steps(tiny_base / "base_checkpoints" / "d1_bf16") == [11]


@contextlib.contextmanager
def infinite_weight(update: int):
    """A bit of one weight flips in this update, and it is infinite."""
    real, count = optim.AdamW.step, [0]

    def step(self) -> None:
        real(self)
        count[0] += 1
        if count[0] == update:
            self.param_groups[0]["params"][0].data.view(-1)[7] = float("inf")

    with pytest.MonkeyPatch.context() as m:
        m.setattr(optim.AdamW, "step", step)
        yield


@pytest.mark.parametrize("update, good", [(3, 2), (4, 3)])  # in the middle, and in the last update
def test_a_weight_that_is_not_finite_is_neither_saved_nor_skipped(tiny_base, update, good):
    flags = ["--eval-every=-1", "--save-every=1", "--keep-last=1", "--on-nonfinite=skip"]
    with infinite_weight(update), pytest.raises(UserError, match=f"not finite.*step {good}"):
        train(*flags, steps=4, method="bf16")
    folder = tiny_base / "base_checkpoints" / "d1_bf16"
    assert list_steps(folder) == [good]
    assert all(torch.isfinite(t).all() for t in load_checkpoint(folder, good, "cpu")[0].values())
    train(*flags, "--resume-from-step=latest", steps=4, method="bf16")


def test_a_weight_that_is_not_finite_ends_a_run_that_saves_nothing_before(tiny_base):
    with infinite_weight(1), pytest.raises(UserError, match="weight of .*start over"):
        train("--eval-every=-1", "--on-nonfinite=skip", steps=4, method="bf16")
    with infinite_weight(4), pytest.raises(UserError, match="not finite"):  # seen by the evaluation at the end
        train("--eval-every=4", steps=4, method="bf16")


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def test_out_of_memory_names_the_size_that_fits_and_saves(tiny_base):
    train("--device-batch-size=1", "--model-tag=whole", "--eval-every=-1", steps=4, method="bf16")
    expected = "out of memory at step 2 with --device-batch-size=2; --device-batch-size=1"
    with in_step(2, out_of_memory), pytest.raises(UserError, match=f"{expected}.*d1_bf16 goes on with it .BASE_ARGS"):
        train("--eval-every=-1", steps=4, method="bf16")
    assert list_steps(tiny_base / "base_checkpoints" / "d1_bf16") == [2]
    train("--eval-every=-1", "--device-batch-size=1", "--resume-from-step=latest", steps=4, method="bf16")
    with in_step(0, out_of_memory), pytest.raises(UserError, match="out of memory at step 0"):
        train("--overwrite", steps=1, method="bf16")
    train("--device-batch-size=1", "--resume-from-step=latest", steps=1, method="bf16")
    records = read_jsonl(tiny_base / "base_checkpoints" / "d1_bf16" / "metrics.jsonl")
    assert [r["step"] for r in records if r["event"] == "val"] == [0, 1]


def test_a_half_made_update_is_not_saved(tiny_base, monkeypatch):
    """Memory ends in Muon's part, after AdamW's: weights that are saved then would get AdamW's update twice."""
    monkeypatch.setattr(optim.Muon, "step", lambda muon: out_of_memory())
    with pytest.raises(UserError, match="out of memory at step 0") as error:
        train("--eval-every=-1", steps=2, method="bf16")
    assert list_steps(tiny_base / "base_checkpoints" / "d1_bf16") == [] and "goes on" not in str(error.value)


def test_another_number_of_processes_goes_on_with_what_was_saved_before_the_first_step(fork_server, tiny_base):
    with in_step(0, out_of_memory), pytest.raises(UserError):
        train("--eval-every=-1", steps=1, method="bf16")
    argv = [*BASE, "--eval-every=-1", "--method=bf16", "--num-iterations=1", "--resume-from-step=latest"]
    run = fork_server.run("scripts.base_train", argv, env={"NANOCHAT_BASE_DIR": str(tiny_base)}, ranks=2)
    assert run.status == 0 and "world_size was 1 " in run.log, run.log


def test_automatic_batch_size_is_kept_when_resuming(tiny_base, monkeypatch, capsys):
    train("--device-batch-size=auto", "--save-every=2", "--keep-last=-1", "--eval-every=-1", steps=4, method="bf16")
    assert "4 x 32 tokens, 1 process(es), 1 micro-batch(es)" in capsys.readouterr().out
    monkeypatch.setattr(base_train, "auto_device_batch_size", lambda *args, **kwargs: 1)
    train("--device-batch-size=auto", "--resume-from-step=2", "--eval-every=-1", steps=4, method="bf16")
    assert "4 x 32 tokens, 1 process(es), 1 micro-batch(es)" in capsys.readouterr().out


def test_micro_batches_do_not_change_what_is_learned(tiny_base):
    """Without quantization one micro-batch of 4 rows and four of 1 differ only in the order of sums (FP32)."""
    for size in (1, 4):
        train(f"--device-batch-size={size}", f"--model-tag=b{size}", method="bf16", steps=4)
    a, b = (final_state(tiny_base / "base_checkpoints" / f"b{size}", 4) for size in (1, 4))
    assert len(a["records"]) == 6
    for x, y in zip(a["records"], b["records"]):
        key = "loss" if x["event"] == "train" else "bpb"
        assert x["event"] == y["event"] and x[key] == pytest.approx(y[key], rel=1e-4), (x, y)
        # Optimizers are blind to the scale of a gradient, so losses would not show a wrong share of a micro-batch.
        assert x.get("grad_norm", 0) == pytest.approx(y.get("grad_norm", 0), rel=1e-3), (x, y)


def test_weights_are_quantized_once_a_step(tiny_base, monkeypatch):
    entered = []
    real = nf.quantize_weights_once
    monkeypatch.setattr(nf, "quantize_weights_once", lambda model: entered.append(model) or real(model))
    train("--eval-every=-1", steps=2)  # two micro-batches a step
    assert len(entered) == 2
    train("--eval-every=-1", "--device-batch-size=4", "--overwrite", steps=2)  # one: nothing to save
    assert len(entered) == 2


# ----------------------------------------------------------------------------------------------------------------------
# Several processes


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_to_torchrun_saves_on_all_ranks(fork_server, tiny_base, name):
    flags = ["--method=bf16", "--num-iterations=2000", "--eval-every=-1"]
    code = f"""
import os, signal
from _forking import torchrun
from _training import BASE, in_step
from scripts import base_train
def terminate():
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.{name})
def train():
    with in_step(3, terminate):
        base_train.main([*BASE, *{flags}])
try:
    torchrun(train)
except BaseException as e:
    print("torchrun:", repr(e), flush=True)
"""
    (out,) = fork_server.run_ranks(code, 1, env={"NANOCHAT_BASE_DIR": str(tiny_base)})
    assert "torchrun: SignalException" in out
    folder = tiny_base / "base_checkpoints" / "d1_bf16"
    (step,) = list_steps(folder)
    assert f"{name}: stopped at step {step} of 2000" in out
    assert find_last_step(folder) == step  # both ranks' files are there and intact
    assert len(list(folder.glob("step_*/optim_*_rank?.pt"))) == 2


def test_torchrun_starts_again_where_it_was(fork_server, tiny_base):
    """One of two ranks is killed in step 2; torchrun starts both again, and the run ends as an undisturbed one."""
    flags = [*BASE, "--method=bf16", "--num-iterations=3", "--save-every=2", "--eval-every=-1"]
    code = f"""
import os, signal
from _forking import torchrun
from _training import in_step
from scripts import base_train
def die():
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
def train():
    with in_step(2, die):
        base_train.main([*{flags}, "--model-tag=killed"])
torchrun(train, max_restarts=1)
"""
    base = {"NANOCHAT_BASE_DIR": str(tiny_base)}
    fork_server.run_ranks(code, 1, env=base)
    whole = fork_server.run("scripts.base_train", [*flags, "--model-tag=whole"], ranks=2, env=base)
    assert whole.status == 0, whole.log
    folders = [tiny_base / "base_checkpoints" / tag for tag in ("killed", "whole")]
    assert [r["step"] for r in read_jsonl(folders[0] / "metrics.jsonl") if r["event"] == "start"] == [0, 2]
    assert_same(*(final_state(folder, 3) for folder in folders))


# ----------------------------------------------------------------------------------------------------------------------
# Bad input, and the rest


def test_a_long_evaluation_says_how_far_it_is(tiny_base, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "Progress", functools.partial(trainer.Progress, every=0))  # every batch is long
    train(method="bf16", steps=1)
    assert "evaluation: 1/2 batches" in capsys.readouterr().err


def test_the_reports_flags_can_be_typed_again():
    argv = "--seed=7 --data-seed=3 --no-compile --recompute=all --on-nonfinite=skip --telemetry-every=5 --save-at=3,4"
    argv += " --layer-methods=*.c_fc=fp8 --method-phases=0.85=bf16 --separate-qkv"
    args, defaults = base_train.parse_args(argv.split()), base_train.parse_args([])
    assert base_train.parse_args(changed_flags(args, defaults).split()) == args
    assert set(changed_flags(args, defaults).split()) == set(argv.split())


def test_another_run_is_not_overwritten_or_resumed(tiny_base, monkeypatch):
    train(steps=2, method="bf16")
    with pytest.raises(UserError, match="--overwrite"):
        train(steps=2, method="bf16")
    for flags, method, named in (
        (["--model-tag=d1_bf16"], "clover", "method was 'bf16' .*'clover'"),
        (["--seed=7"], "bf16", "seed was 42 .* 7"),
        (["--branch-from=d1_bf16@2", "--seed=7"], "clover", "seed was 42 .* 7"),
        (["--branch-from=d1_bf16@5"], "clover", "step 5"),
        (["--branch-from=d1_bf16@2", "--num-iterations=1"], "clover", "step 2 in .* 1 steps"),
        (["--num-iterations=1"], "bf16", "step 2 in .* 1 steps"),
        (["--max-seq-len=64"], "bf16", "sequence_len was 32 .* 64"),
    ):
        with pytest.raises(UserError, match=named):
            train(*flags, "--resume-from-step=latest", steps=4, method=method)
    for flag in ("--device-batch-size=3", "--branch-from=d1_none@1"):
        with pytest.raises(UserError):
            train("--overwrite", flag, steps=1, method="bf16")
    with monkeypatch.context() as m, pytest.raises(UserError, match="cannot be read"):
        m.setattr(trainer.Trainer, "fetch", lambda run: (_ for _ in ()).throw(UserError("row group 0 cannot be read")))
        train("--overwrite", steps=1, method="bf16")
    assert list_steps(tiny_base / "base_checkpoints" / "d1_bf16") == [2]  # a mistake deletes nothing
    train("--overwrite", steps=1, method="bf16")
    assert list_steps(tiny_base / "base_checkpoints" / "d1_bf16") == [1]


def test_core_metric_that_cannot_be_had_does_not_end_a_run(tiny_base, monkeypatch, capsys):
    def missing(*args, **kwargs):
        raise UserError("no network")

    monkeypatch.setattr(base_train, "evaluate_model", missing)
    train("--core-metric-every=1", "--eval-every=-1", method="bf16", steps=3)
    assert capsys.readouterr().err.count("no network") == 1
    monkeypatch.setattr(base_train, "evaluate_model", lambda *args, **kwargs: {"core_metric": 0.25, "notes": []})
    train("--core-metric-every=1", "--eval-every=-1", "--model-tag=other", method="bf16", steps=3)
    records = read_jsonl(tiny_base / "base_checkpoints" / "other" / "metrics.jsonl")
    assert [(r["step"], r["core_metric"]) for r in records if r["event"] == "core"] == [(1, 0.25), (2, 0.25), (3, 0.25)]


def test_loss_stage_evaluates_little_on_a_cpu(tiny_base, monkeypatch):
    """With a GPU's 21 million tokens a model of any size would take an hour."""
    train(steps=1)

    def rows_of(tokens, *_):
        raise UserError(f"{tokens} tokens")

    monkeypatch.setattr(base_loss, "evaluation_rows", rows_of)
    with pytest.raises(UserError, match="^65536 tokens"):
        base_loss.main(["--model-tag=d1_clover", "--device-batch-size=2", "--device-type=cpu"])


def test_how_much_validation_text_there_is_is_logged(tiny_base, tmp_path, monkeypatch):
    """Fewer tokens than are evaluated, which the report says."""
    (tmp_path / "own").mkdir()
    for name, count in (("a", 400), ("valid", 60)):
        (tmp_path / "own" / f"{name}.txt").write_text(" ".join(map(str, range(1000, 1000 + count))))
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "own"))
    train(steps=1, method="bf16")
    base_loss.main(["--model-tag=d1_bf16", "--device-batch-size=2", "--split-tokens=1024", "--device-type=cpu"])
    start, *_, measured = read_jsonl(tiny_base / "base_checkpoints" / "d1_bf16" / "metrics.jsonl")
    assert start["val_text_tokens"] == measured["val_text_tokens"] < measured["tokens"] == 1024
    assert 100 < start["val_text_tokens"] <= 60 * 5
    assert start["text_tokens"] > start["val_text_tokens"]


def test_loss_stage_reports_both_forwards(tiny_base, capsys):
    train(steps=1)
    capsys.readouterr()
    base_loss.main(["--model-tag=d1_clover", "--device-batch-size=2", "--split-tokens=128", "--device-type=cpu"])
    out, err = capsys.readouterr()
    assert err.count(" 2/2 (100%) batch") == 4
    train_line, val_line = (line for line in out.splitlines() if " bpb: " in line)
    assert "first rows" in train_line and "rows" not in val_line
    assert val_line.endswith(" (FP32)")  # as a CPU computes what a GPU computes in BF16
    results = read_jsonl(tiny_base / "base_checkpoints" / "d1_clover" / "metrics.jsonl")[-1]
    assert results["event"] == "base_loss" and (results["step"], results["tokens"]) == (1, 128)
    assert results["bpb"] != results["bpb_bf16"] and results["bpb"] == pytest.approx(3.7, abs=0.5)
    assert len(results["samples"]) == 7
    base_loss.main(
        ["--model-tag=d1_clover", "--method=bf16", "--device-batch-size=2", "--split-tokens=128", "--device-type=cpu"]
    )
    other = read_jsonl(tiny_base / "base_checkpoints" / "d1_clover" / "metrics.jsonl")[-1]
    assert other["event"] != "base_loss" and other["bpb"] == results["bpb_bf16"]  # it is not the run's own forward
    # The training loop and the loss stage measure the same thing.
    folder = tiny_base / "base_checkpoints" / "d1_clover"
    meta = load_checkpoint(folder, 1, "cpu")[2]
    assert results["bpb"] == pytest.approx(meta["loop_state"]["numbers"]["val_bpb"], rel=1e-6)
    with pytest.raises(UserError, match="--split-tokens=100 .*32"):
        base_loss.main(["--model-tag=d1_clover", "--device-batch-size=2", "--split-tokens=100", "--device-type=cpu"])


def test_faulty_backend_ends_the_run_before_it_begins(tiny_base, monkeypatch):
    """A GEMM that returns zeros, as one has on a new GPU: without the self-check the loss would just not fall."""
    from nanochat_fp4.nvfp4 import layer

    real = layer.gemm
    monkeypatch.setattr(layer, "gemm", lambda *args, **kwargs: real(*args, **kwargs) * 0)
    monkeypatch.setattr(base_train, "auto_device_batch_size", None)  # comes after the self-check
    with pytest.raises(UserError, match="clover: output is all zeros"):
        train("--device-batch-size=auto", steps=1)
    assert list_steps(tiny_base / "base_checkpoints" / "d1_clover") == []


def test_an_fp8_head_is_checked_in_a_bf16_run_too(tiny_base, monkeypatch):
    def check(device, method, model):
        raise UserError(f"{method} {model.lm_head.precision}")

    monkeypatch.setattr(base_train, "self_check", check)
    with pytest.raises(UserError, match="bf16 fp8"):
        train("--head=fp8", method="bf16", steps=1)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(steps: int, method: str) -> float:
    """MB that the process grew between a quarter of the run and its end."""
    seen = []
    files = len(os.listdir("/proc/self/fd"))
    with after_steps(lambda run: seen.append(resident_mb())):
        train("--eval-every=10", "--save-every=10", "--telemetry-every=10", method=method, steps=steps)
    # The loader's thread may still read the batch after the last one, and nobody waits for it.
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)
    assert len(seen) == steps
    return seen[-1] - seen[steps // 4]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_and_file_descriptors_do_not_grow(tiny_base):
    # Evaluation, checkpoint and telemetry every 10 steps. The model and its optimizers are 3 MB, the gradients 1 MB.
    assert growth(40, "bf16") < 2.5


@pytest.mark.soak
def test_memory_does_not_grow_over_5000_steps(tiny_base):
    grown = growth(5000, "clover")
    print(f"{grown:.1f} MB from step 1250 to 5000")
    assert grown < 12
