"""The helpers that the training scripts share, without training anything."""

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.common import resolve_method
from nanochat_fp4.evaluation.metrics import LossMonitor, MetricsLog, read_jsonl
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.models.optim import gradient_norm, lr_multiplier, muon_momentum, weight_decay_at
from nanochat_fp4.training.load_model import check_same_run
from nanochat_fp4.training.memory import auto_device_batch_size, largest_micro_batch, plan_accumulation
from nanochat_fp4.training.telemetry import layer_telemetry, name_nonfinite, summarize_telemetry
from nanochat_fp4.training.trainer import Trainer
from scripts.base_train import parse_device_batch_size


def test_method_flag_then_environment_then_clover(monkeypatch):
    assert resolve_method(None) == "clover"
    monkeypatch.setenv("QAT_METHOD", "nvidia")
    assert resolve_method(None) == "nvidia"
    assert resolve_method("bf16") == "bf16"
    assert resolve_method("quartet2") == "clover"  # the alias, so that both names are one run
    monkeypatch.setenv("QAT_METHOD", "fp3")
    with pytest.raises(UserError, match="QAT_METHOD: .*'fp3'.* bf16, .*clover"):
        resolve_method(None)
    with pytest.raises(UserError, match="--method: .*'clover_hot'.*--recipes"):
        resolve_method("clover_hot")  # what mid-training, SFT and evaluations ask of a checkpoint, too


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batch


def test_accumulation_keeps_the_total_batch():
    assert plan_accumulation(524288, 32, 2048, 8) == 1
    assert plan_accumulation(524288, 8, 2048, 1) == 32
    for bad in ((1000, 1, 64, 1), (64, 2, 64, 1), (64, 0, 64, 1)):
        with pytest.raises(UserError, match="is not a multiple of"):
            plan_accumulation(*bad)


@pytest.mark.parametrize("fits", [1, 2, 5, 8, 31, 64, 300])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: no")]
)
def test_largest_micro_batch(fits, error):
    """Every size that memory allows is found, whatever the constant part; and it was really tried out."""
    sizes, tried = [2**n for n in range(8, -1, -1)], []

    def peak_bytes(size):
        tried.append(size)
        if size > fits:
            raise error
        return 1000 + 10 * size

    assert largest_micro_batch(sizes, peak_bytes, budget=10**9) == 2 ** int(math.log2(min(fits, 256)))
    assert max(size for size in tried if size <= fits) == 2 ** int(math.log2(min(fits, 256)))


def test_largest_micro_batch_limits():
    linear = lambda size: 100 + 10 * size  # noqa: E731
    assert largest_micro_batch([64, 32, 16, 8], linear, budget=100 + 10 * 20) == 16
    assert largest_micro_batch([64, 32], linear, budget=105) is None
    with pytest.raises(ZeroDivisionError):  # only a lack of memory is an answer
        largest_micro_batch([8], lambda size: 1 // 0, budget=100)


def test_automatic_size_on_a_cpu_is_bounded_by_memory():
    model = GPT(GPTConfig(sequence_len=8, vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=8))
    size = lambda seq_len, **kw: auto_device_batch_size(model, 256, seq_len, **kw)  # noqa: E731
    assert size(8) == 32 and size(2**40) == 1 and size(8, below=32) == 16  # nothing is tried out
    assert auto_device_batch_size(model, 45, 8) == 15 and auto_device_batch_size(model, 48, 8) == 24  # divisors
    with pytest.raises(UserError, match="not even one row fits"):
        size(8, below=1)


def test_device_batch_size_flag():
    assert parse_device_batch_size("auto") == "auto" and parse_device_batch_size("8") == 8
    for bad in ("0", "-1", "x", "1.5", ""):
        with pytest.raises(Exception, match="at least 1"):
            parse_device_batch_size(bad)


# ----------------------------------------------------------------------------------------------------------------------
# Schedules


def test_schedules_are_nanochats():
    lr = [lr_multiplier(i, 100) for i in range(101)]
    assert lr[:61] == [1.0] * 61 and lr[80] == 0.5 and lr[100] == 0.0
    assert lr[60:] == sorted(lr[60:], reverse=True)
    warm = [lr_multiplier(i, 100, warmup_ratio=0.1, final_lr_frac=0.2) for i in range(101)]
    assert warm[:3] == [0.1, 0.2, 0.3] and warm[9] == 1.0 and warm[100] == pytest.approx(0.2)
    assert lr_multiplier(3, 100, warmdown_ratio=0.0) == 1.0
    assert [muon_momentum(i) for i in (0, 150, 300, 9999)] == pytest.approx([0.85, 0.9, 0.95, 0.95])
    assert [weight_decay_at(i, 10, 0.2) for i in (0, 5, 10)] == pytest.approx([0.2, 0.1, 0.0])


# ----------------------------------------------------------------------------------------------------------------------
# Loss


def test_smoothed_loss_has_no_bias_at_the_start_and_resumes():
    monitor = LossMonitor()
    assert math.isnan(monitor.smoothed)
    for _ in range(3):
        assert not monitor.update(2.5)
        assert monitor.smoothed == pytest.approx(2.5)
    other = LossMonitor(json.loads(json.dumps(monitor.state)))
    for loss in (2.4, 2.3):
        monitor.update(loss), other.update(loss)
    assert monitor.state == other.state


def test_spikes_are_seen_and_noise_is_not():
    generator = torch.Generator().manual_seed(1)
    noise = (torch.randn(400, generator=generator) * 0.05).tolist()
    monitor = LossMonitor()
    spikes = [i for i in range(400) if monitor.update(4 - i / 200 + noise[i] + (2.0 if i in (150, 300) else 0.0))]
    assert spikes == [150, 300] and monitor.state["spikes"] == 2


# ----------------------------------------------------------------------------------------------------------------------
# Non-finite numbers


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, in_b=None):
        y = self.b(self.a(x))
        y = y if in_b is None else in_b(y)
        return self.c(y).sum()


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


def test_first_bad_value_is_named():
    model, x = Chain(), torch.randn(3, 4)
    finite = lambda: model(x).backward()  # noqa: E731
    assert name_nonfinite(model, finite).startswith("the loss itself")
    assert name_nonfinite(model, lambda: model(x * float("inf")).backward()) == "output of a"
    assert name_nonfinite(model, lambda: model(x, BadGradient.apply).backward()) == "gradient that reaches b"

    handle = model.b.register_forward_hook(lambda m, a, out: out * float("nan"))
    assert name_nonfinite(model, finite) == "output of b"
    handle.remove()

    handle = model.b.weight.register_hook(lambda g: g * float("nan"))
    assert name_nonfinite(model, finite) == "gradient of b.weight"
    handle.remove()

    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    with torch.no_grad():
        model.c.weight[0, 0] = float("nan")
    assert name_nonfinite(model, finite) == "weight of c.weight"


def test_gradient_norm_shows_any_bad_gradient():
    model = Chain()
    model(torch.randn(3, 4)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert gradient_norm(model) == pytest.approx(float(expected), rel=1e-5)
    model.a.bias.grad[1] = float("inf")
    assert not torch.isfinite(gradient_norm(model))


# ----------------------------------------------------------------------------------------------------------------------
# Metrics


def test_metrics_rewind_to_a_checkpoint(tmp_path):
    log = MetricsLog(tmp_path / "run")
    log.rewind(3)  # nothing there yet
    log.append("start", 0, method="clover")
    for step in range(6):
        if step % 2 == 0:
            log.append("val", step, bpb=1.0)
        log.append("train", step, loss=float(step))
    with open(log.path, "a") as f:
        f.write('{"event": "train", "st')  # a killed process
    log.rewind(4)
    records = [(r["event"], r["step"]) for r in read_jsonl(log.path)]
    # Checkpoint 4 was made by train steps 0 to 3; the evaluation of step 4 may be part of it.
    assert records == [
        ("start", 0), ("val", 0), ("train", 0), ("train", 1), ("val", 2), ("train", 2), ("train", 3), ("val", 4),
    ]  # fmt: skip
    log.rewind(4, {"val"})  # A signal had it saved before its evaluation, which the resume makes, and logs.
    assert [(r["event"], r["step"]) for r in read_jsonl(log.path)] == records[:-1]
    log.append("train", 4, loss=1.0)
    assert read_jsonl(log.path)[-1]["step"] == 4
    log.rewind(0)  # the run was saved before its first step, and evaluated already
    assert [(r["event"], r["step"]) for r in read_jsonl(log.path)] == [("start", 0), ("val", 0)]
    log.rewind(None)
    assert not log.path.exists()
    MetricsLog(tmp_path / "other", enabled=False).append("train", 0)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/full"), Path.mkdir])
def test_special_files_in_run_folder_end_no_log(tmp_path, make):
    """Nobody reads the pipe, so opening it would wait for ever, and the device has no end."""
    log = MetricsLog(tmp_path)
    make(log.path)
    log.append("train", 0)
    assert read_jsonl(log.path) == []
    if not log.path.is_dir():
        log.rewind(1)
        log.append("train", 1)
        assert [r["step"] for r in read_jsonl(log.path)] == [1]


def test_full_disk_leaves_a_gap_in_the_metrics_and_nothing_else(tmp_path, monkeypatch, caplog):
    log = MetricsLog(tmp_path / "run")
    log.append("train", 0)
    write = os.write
    with monkeypatch.context() as m:
        m.setattr(os, "write", lambda fd, data: write(fd, data[:7]))  # what still fits
        log.append("train", 1)
        m.setattr(os, "write", lambda fd, data: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        log.append("train", 2)
    log.append("train", 3)
    log.append("train", 4)
    assert [r["step"] for r in read_jsonl(log.path)] == [0, 3, 4]


# ----------------------------------------------------------------------------------------------------------------------
# Telemetry


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.lm_head = nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 8)

    def forward(self, x):
        return self.lm_head(self.down(self.up(x).relu())).square().mean()


def test_telemetry_orders_methods_by_their_error():
    x = torch.randn(2, 128, 128)
    found = {}
    for method in ("bf16", "clover", "clover_search"):
        torch.manual_seed(0)
        model = nf.convert(Mlp(), method, verbose=False)
        found[method] = layer_telemetry(model, lambda model=model: model(x).backward())
        assert all(p.grad is None for p in model.parameters())
    assert found["bf16"] == {}
    assert set(found["clover"]) == {"up", "down"}  # not the head, which is not quantized
    clover, search = found["clover"]["up"], found["clover_search"]["up"]
    # 4/6 on Gaussian input and weight: relative squared errors of 7.6e-3 each, so sqrt(2 * 7.6e-3) = 0.123 together.
    assert 0.11 < clover["output_error"] < 0.135 and search["output_error"] < clover["output_error"]
    assert 0.97 < clover["grad_weight_cosine"] < 1 and 0.97 < clover["grad_input_cosine"] < 1
    assert "output error" in summarize_telemetry(found["clover"])


def test_telemetry_leaves_out_what_cannot_be_compared():
    model = nf.convert(Mlp(), "clover", verbose=False)
    nn.init.zeros_(model.down.weight)
    nn.init.zeros_(model.lm_head.weight)
    numbers = layer_telemetry(model, lambda: model(torch.randn(1, 128, 128)).backward())
    assert "output_error" in numbers["up"] and "grad_weight_cosine" not in numbers["up"]
    assert summarize_telemetry(numbers)


@pytest.mark.parametrize("method", ["fp8", "integers"])
def test_telemetry_of_other_formats(method):
    model = nf.convert(Mlp(), method, verbose=False)
    numbers = layer_telemetry(model, lambda: model(torch.randn(1, 128, 128)).backward())["up"]
    assert 0.001 < numbers["output_error"] < 0.3


def test_the_best_loss_is_the_least_and_the_best_accuracy_the_greatest(tmp_path):
    run = object.__new__(Trainer)
    run.step, run.position, run.step_tokens, run.warned_of_repetition = 3, None, None, False
    run.state = {"best": {}, "numbers": {}, "training_seconds": 0.0}
    run.metrics = MetricsLog(tmp_path)
    run.progress = SimpleNamespace(write=lambda line: None)
    run.tracker = SimpleNamespace(log=lambda numbers, step: None)
    for loss, bpb, accuracy in ((2.0, 1.0, 0.25), (1.0, 1.5, 0.5), (1.5, 1.25, 0.125)):
        run.take_evaluation({"val_loss": loss, "val_bpb": bpb, "mmlu_acc": accuracy})
    assert run.state["best"] == {"val_loss": 1.0, "val_bpb": 1.0, "mmlu_acc": 0.5}
    assert run.state["numbers"] == {"val_loss": 1.5, "val_bpb": 1.25, "mmlu_acc": 0.125}


# ----------------------------------------------------------------------------------------------------------------------
# Resuming


def test_check_same_run_names_what_differs(tmp_path):
    check_same_run({"a": 1}, {"a": 1, "b": 2}, tmp_path)
    with pytest.raises(UserError, match="a was 2 .* 1; b was None .* 3"):
        check_same_run({"a": 1, "b": 3, "c": 4}, {"a": 2, "c": 4}, tmp_path)
    with pytest.raises(UserError, match="how it was trained"):
        check_same_run({"a": 1}, {}, tmp_path)
