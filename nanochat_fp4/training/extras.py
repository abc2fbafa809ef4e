"""
Functions for what the loop does besides training.

The functions in run.before_step take (run, last), where `last` says whether the run ends here. They evaluate the model
and measure quantization errors. The functions in run.after_step take (run, attempt). They handle numbers that are not
finite, and write the log. A stage adds functions of its own to these lists.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import of_all_ranks, preserved_rng, set_rng_state
from nanochat_fp4.hardware import peak_memory
from nanochat_fp4.parallel import is_sharded
from nanochat_fp4.training.micro_batch import auto_device_batch_size, memory_lever
from nanochat_fp4.training.run import Run, due
from nanochat_fp4.training.step import Attempt
from nanochat_fp4.training.telemetry import layer_telemetry, name_nonfinite, summarize_telemetry

MAX_SKIPPED_IN_A_ROW = 10  # --on-nonfinite=skip stops after so many skipped updates in a row.


# ----------------------------------------------------------------------------------------------------------------------
# Before a step


@contextlib.contextmanager
def evaluating(run: Run) -> Iterator[None]:
    """A context in which the model evaluates and may draw random numbers. Afterwards training goes on as if it had
    drawn none."""
    run.model.eval()
    try:
        with preserved_rng(run.device):
            yield
    finally:
        run.model.train()


def evaluate(run: Run, last: bool) -> None:
    """Evaluates the model if an evaluation is due, and keeps the newest and the best results."""
    if run.loop.evaluated_at == run.step or not run.evaluation.due(run.step, last):
        return
    with evaluating(run):
        numbers = run.evaluation.measure(run.step, last)
    warn_of_repetition(run, numbers)
    for key, value in numbers.items():
        best = min if "loss" in key or "bpb" in key else max
        run.loop.best[key] = best(run.loop.best.get(key, value), value)
    run.loop.numbers |= numbers
    run.loop.evaluated_at = run.step
    run.progress.write(f"step {run.step:05d} | " + ", ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
    named = {key.removeprefix("val_"): value for key, value in numbers.items()}
    tokens = {"tokens": run.evaluation.tokens} if run.evaluation.tokens else {}
    run.metrics.append("val", run.step, **named, **tokens)
    track(run, "val", named)


def warn_of_repetition(run: Run, numbers: dict[str, float]) -> None:
    """Warns once if the text has been read at least twice and the validation loss is rising."""
    epoch = run.position.get("epoch", 1) if isinstance(run.position, dict) else 1
    best = run.loop.best
    rising = [k for k, v in numbers.items() if ("loss" in k or "bpb" in k) and v > best.get(k, v)]
    if epoch > 2 and rising and not run.warned_of_repetition:
        run.warned_of_repetition = True
        key = rising[0]
        run.progress.write(
            f"warning: step {run.step}: the data has been seen {epoch - 1} times, and {key} is rising: "
            f"{best[key]:.4f} -> {numbers[key]:.4f}; train on more text (--data-dir), or fewer steps"
        )


def measure_layers(run: Run, last: bool) -> None:
    """Measures the quantization error of every layer on the first row of the next batch, if a measurement is due."""
    is_due = run.batch and not last and not run.before_step_is_done and due(run.args.telemetry_every, run.step, last)
    if not is_due or not run.quantized.quantizes():
        return
    batch = [part[:1] for part in run.batch]

    def forward_backward() -> None:
        with run.training_step.autocast():
            run.training_step.loss(run.model, *batch).backward()

    with preserved_rng(run.device):
        telemetry = layer_telemetry(run.model, forward_backward)
    run.telemetry = f"step {run.step}: {summarize_telemetry(telemetry)}"
    run.progress.write(run.telemetry)
    run.metrics.append("telemetry", run.step, layers=telemetry)
    track(run, "telemetry", {f"{n}/{k}": v for n, t in telemetry.items() for k, v in t.items()})


# ----------------------------------------------------------------------------------------------------------------------
# After a step


def skip_bad_numbers(run: Run, attempt: Attempt) -> None:
    """Names the layer with the first number of a step that is not finite. Raises UserError unless such steps may be
    skipped."""
    if not attempt.bad:
        run.skipped_in_a_row = 0
        return
    if is_sharded(run.model):  # A process that has a shard of the weights cannot compute the step again by itself.
        place = "a process that shares the weights; --parallel=ddp names the layer"
    else:
        places = enumerate(of_all_ranks(first_bad_layer(run, attempt) if attempt.bad_here else None))
        place = min((p.startswith("the loss itself"), r, f"{p} (rank {r})") for r, p in places if p)[2]
    run.model.zero_grad(set_to_none=True)
    problem = f"step {run.step}: loss {attempt.loss:.4g}, first not finite: {place}"
    run.skipped_in_a_row += 1
    run.metrics.append("skip", run.step, place=place, loss=str(attempt.loss))
    if run.args.on_nonfinite == "stop" or run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
        attempt.save_before()
        raise run.failure(
            f"{problem}. Saved as it was before this step in {run.folder}; lower {run.rate_flags} and start over, or "
            "skip such steps: --resume-from-step latest --on-nonfinite skip"
        )
    run.monitor.state["skipped"] += 1
    run.progress.write(f"warning: {problem}; update skipped")


def first_bad_layer(run: Run, attempt: Attempt) -> str:
    """Computes the micro-batches of the step again, and returns the source of the first number that is not finite."""
    place = ""
    for batch, rng in attempt.batches:

        def forward_backward(batch=batch, rng=rng) -> None:
            set_rng_state(rng, run.device)
            with run.training_step.autocast():
                run.training_step.loss(run.model, *batch).backward()

        with preserved_rng(run.device):
            place = name_nonfinite(run.model, forward_backward)
        if not place.startswith("the loss itself"):
            break
    return place


def write_log(run: Run, attempt: Attempt) -> None:
    """Writes the numbers of a step to metrics.jsonl, to the tracker, and beside the progress bar. A step whose
    numbers are not finite is left out."""
    if attempt.bad:
        return
    average, loss = run.monitor.state["mean"], attempt.loss
    if run.monitor.update(loss):
        run.progress.write(f"warning: step {run.step}: loss {loss:.4f} is a spike (average {average:.4f})")
        run.metrics.append("spike", run.step, loss=loss, average=average)
    run.loop.training_seconds += attempt.seconds
    run.tokens_per_second = attempt.tokens / attempt.seconds
    if run.peak_flops and run.size.tokens:
        run.mfu = 100 * run.flops_per_token * run.tokens_per_second / (run.peak_flops * run.process.world_size)
    stage_numbers = run.numbers()
    numbers: dict[str, Any] = {
        **stage_numbers, "lrm": attempt.rate, "dt": attempt.seconds, "tok_per_sec": run.tokens_per_second,
        "mfu": run.mfu, "grad_norm": attempt.grad_norm, "tokens": attempt.tokens,
    }  # fmt: skip
    losses = {"loss": loss, "smoothed_loss": run.monitor.smoothed}
    run.metrics.append("train", run.step, **losses, progress=attempt.progress, **numbers)
    if run.step % 10 == 0:
        numbers |= {"loss": run.monitor.smoothed} | {k: run.monitor.state[k] for k in ("spikes", "skipped")}
        track(run, "train", numbers | {"peak_memory_mib": peak_memory(run.device) / 2**20})
    attempt.shown = {"loss": f"{run.monitor.smoothed:.4f}", "lrm": f"{attempt.rate:.2f}"}
    attempt.shown |= {key: f"{value:.4g}" for key, value in stage_numbers.items()}
    attempt.shown["tok/s"] = f"{run.tokens_per_second:,.0f}"
    if run.mfu is not None:
        attempt.shown["mfu"] = f"{run.mfu:.1f}%"
    if run.by_epoch:
        attempt.shown["epoch"] = f"{100 * attempt.progress:.1f}%"


def track(run: Run, event: str, numbers: dict[str, Any]) -> None:
    """Logs numbers to wandb or trackio. Their names are nanochat's and the same in every stage: train/loss, val/bpb,
    ..."""
    values = {f"{event}/{key}": value for key, value in numbers.items() if value is not None}
    if run.size.tokens:
        values["total_training_tokens"] = run.size.tokens * run.step
        values["total_training_flops"] = run.flops_per_token * run.size.tokens * run.step
    values["total_training_time"] = run.loop.training_seconds
    run.tracker.log({"step": run.step, **values})


# ----------------------------------------------------------------------------------------------------------------------
# When memory runs out


def out_of_memory(run: Run, attempt: Attempt) -> UserError:
    """Saves the run if possible. Returns the error that ends the run, which names the micro-batch that fits."""
    attempt.batches.clear()
    run.batch = None
    run.model.zero_grad(set_to_none=True)
    # In the middle of an update, only some of the weights may be updated.
    saved = not run.updating and attempt.save_before()
    rows = run.size.rows
    try:
        fitting_rows = auto_device_batch_size(
            run.model, rows * run.size.micro_batches, run.size.seq_len, run.training_step.dtype, below=rows
        )
        advice = f"--device-batch-size={fitting_rows} fits (the batch of a step stays the same)"
    except UserError:
        advice = "no smaller batch fits either"
    lever = memory_lever(run.model, rows, run.size.seq_len)
    advice += f"; by count, {lever}" if lever else ""
    go_on = "; go on with it and --resume-from-step latest" if saved else ""
    # The rows of a micro-batch are padded to one length, so the micro-batch's size decides the bits.
    if run.stage in ("sft", "rl"):
        go_on = "; start over with it and --overwrite"
    return run.failure(f"out of memory at step {run.step} with --device-batch-size={rows}; {advice}{go_on}")
