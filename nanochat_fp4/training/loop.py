"""
The training loop of all four stages.

    if train(run):          # False if a signal stopped the run, which is saved then
        report(run)

A step consists of micro-batches and an update. Before each step the loop calls the functions in run.before_step
(evaluation, samples, telemetry), and saves a checkpoint if one is due. After each step it calls the functions in
run.after_step (numbers that are not finite, the log). extras.py has the functions that all stages have in common.

A resumed run computes the same bits as an uninterrupted one. A checkpoint therefore has everything that a step depends
on: weights, optimizers, random generators, the position in the data, run.loop and run.monitor.
"""

import time
from typing import Any

import torch
from torch import Tensor

import nanochat_fp4 as nf
from nanochat_fp4.cli import is_out_of_memory
from nanochat_fp4.common import get_rng_state, mean_over_ranks, print0, seed_micro_batch
from nanochat_fp4.nvfp4.gram_matrices import GRAM_TOKENS
from nanochat_fp4.parallel import full_state_dict
from nanochat_fp4.progress import Progress
from nanochat_fp4.signals import StopRequested
from nanochat_fp4.training.checkpoint import Checkpoint
from nanochat_fp4.training.checkpoint_manager import forget_later_checkpoints, prune_checkpoints
from nanochat_fp4.training.extras import (
    evaluate,
    measure_layers,
    out_of_memory,
    skip_bad_numbers,
    write_log,
)
from nanochat_fp4.training.gemms import choose_gemms
from nanochat_fp4.training.resume import start_over, starts_over
from nanochat_fp4.training.run import Run, due
from nanochat_fp4.training.step import Attempt
from nanochat_fp4.training.wandb_run import setup_tracker


def train(run: Run) -> bool:
    """Trains until the end of the run or until a signal. Returns whether the end was reached.

    Raises UserError if the run cannot go on, because numbers are not finite, or because memory or the disk is full.
    """
    begin(run)
    while True:
        last = run.finished
        stopping = run.process.signals.received(run.device)
        if not stopping:
            try:
                do_before_step(run, last)
            except StopRequested:
                stopping = True
        end = last or stopping
        is_due = due(run.args.save_every, run.step, False) or run.step in run.args.save_at
        if end or (run.step > 0 and is_due):
            saved = save(run, run.step, get_rng_state(run.device), run.position)
            if end and not saved:
                raise run.failure(
                    f"step {run.step} could not be saved (see the warning above); free some disk space and go on from "
                    "the checkpoint before it with --resume-from-step latest"
                )
        if end:
            break
        train_step(run)
    run.progress.close()
    run.tracker.finish()
    if stopping:
        of_total = "" if run.by_epoch else f" of {run.size.steps}"
        print0(f"{run.process.signals.name}: stopped at step {run.step}{of_total}, saved in {run.folder}")
        if run.args.resume_from_step != "latest":  # With latest, the same command resumes the run.
            print0("go on with: --resume-from-step latest")
    return not stopping


def begin(run: Run) -> None:
    """Does everything that comes before the first step. --overwrite deletes the old run as late as possible, when
    nothing can refuse the new run any more."""
    run.process.phases.end("model")
    run.restore()
    stored = run.checkpoint.meta.gemms if run.checkpoint else None
    run.gemms = choose_gemms(run.model, run.size.rows, run.size.seq_len, run.training_step.dtype, stored)
    if run.gemms is not None:
        run.meta.gemms = run.gemms.record
    run.loader = run.data.make_loader(run.position)
    if not run.finished and run.data.ahead:
        fetch(run)
    project = "nanochat" if run.stage == "base" else f"nanochat-{run.stage}"
    run.tracker = setup_tracker(run.args.run, project, run.meta.user_config)
    if starts_over(run.args.resume_from_step, run.args.overwrite) and not run.dry_run:
        start_over(run.folder, run.process.rank)
    run.metrics.rewind(run.resumed_step)
    record = {
        "stage": run.stage, "method": run.method, "num_iterations": run.size.steps, "backend": str(nf.backend()),
        "world_size": run.process.world_size, "config": run.meta.user_config, "environment": run.environment,
    }  # fmt: skip
    run.metrics.append("start", run.step, **record | run.start_record)
    run.progress = Progress(
        total=None if run.by_epoch else run.size.steps,
        desc="train" if run.stage == "base" else run.stage,
        unit="step",
        initial=run.step,
    )
    run.before_step = [evaluate, *run.before_step, measure_layers]
    run.after_step = [skip_bad_numbers, write_log, *run.after_step]
    run.process.phases.end("first batch")


def do_before_step(run: Run, last: bool) -> None:
    """Calls the functions in run.before_step. `last` says whether the run ends here. Raises StopRequested after a
    signal."""
    for extra in run.before_step:
        extra(run, last)
    run.loop.looked_at = run.step


def train_step(run: Run) -> None:
    """Attempts one optimizer step. If numbers of the step are not finite, the step updates nothing."""
    if not run.made_first_step:
        run.process.phases.end("evaluation")
    if changed := run.quantized.set_progress(run.step):
        run.progress.write(f"step {run.step:05d} | from here on {changed}")
        if run.training_step.compiled:
            torch._dynamo.reset()  # Recipes are constants of compiled code.
    state_before = run.step, get_rng_state(run.device), run.position
    attempt = Attempt(save_before=lambda: save(run, *state_before))
    run.training_step.synchronize()
    run.updating, began, memory_ran_out = False, time.monotonic(), False
    try:
        optimize(run, attempt)
    except Exception as e:
        if not is_out_of_memory(e) or run.process.world_size > 1:
            raise
        memory_ran_out = True
    if (
        memory_ran_out
    ):  # Outside of the except block the exception is gone, and with it the frames that keep the activations.
        raise out_of_memory(run, attempt)
    run.training_step.synchronize()
    attempt.seconds = time.monotonic() - began
    attempt.progress = attempt.consumed / run.data.conversations if run.by_epoch else (run.step + 1) / run.size.steps
    # These functions may save the run as it was before the step. Its state therefore changes only after them.
    for extra in run.after_step:
        extra(run, attempt)
    run.step, run.loop.progress = run.step + 1, attempt.progress
    run.progress.update(1, **attempt.shown)
    if not run.made_first_step:
        run.made_first_step = True
        run.process.until_first_step.close()
        run.process.phases.end("first step, compiling" if run.training_step.compiled else "first step")
        run.progress.write(f"time to the first step: {run.process.phases}")


def optimize(run: Run, attempt: Attempt) -> None:
    """Computes the micro-batches. Updates the weights if all numbers of all processes are finite."""
    parts, count, process = run.training_step, run.size.micro_batches, run.process
    losses, counted = [], 0
    with parts.micro_batches(count, run.step):
        for i in range(count):
            if not run.data.ahead:
                fetch(run)
            batch = run.batch
            # Rank r has the micro-batches r, r + world size, ... of the step (data/dataloader.py).
            seed_micro_batch(run.args.seed, run.step, i * process.world_size + process.rank)
            attempt.batches.append((batch, get_rng_state(run.device)))
            losses.append(parts.micro_batch(*batch, count=count))
            counted = counted + (batch[1] >= 0).sum()
            run.position = run.next_position
            if run.data.ahead:
                fetch(run)
    grad_norm = run.model.clip_gradients()
    loss = torch.stack(losses).mean()
    bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
    consumed = run.position.get("consumed", 0)
    shared = torch.stack([loss, bad.float(), counted.float(), torch.full_like(loss, consumed)])
    loss, any_bad, counted, consumed = mean_over_ranks(shared).tolist()
    attempt.loss, attempt.grad_norm, attempt.bad, attempt.bad_here = loss, float(grad_norm), any_bad > 0, bool(bad)
    attempt.tokens = run.size.tokens or round(counted * process.world_size)
    attempt.consumed = round(consumed * process.world_size)
    if any_bad == 0:
        progress = run.loop.progress if run.by_epoch else run.step / run.size.steps
        attempt.rate = run.schedule(run.step, progress)
        run.updating = True  # The flag stays set to the end of the step.
        parts.update()
        with parts.autocast():
            run.quantized.after_update(run.step, lambda: forward_of_few(run))


def forward_of_few(run: Run) -> None:
    """Makes a forward pass of some thousand tokens, for methods that measure the inputs of layers."""
    x, y, *_ = run.batch
    rows = max(1, GRAM_TOKENS // run.size.seq_len)
    run.model(x[:rows], y[:rows])


def fetch(run: Run) -> None:
    """Makes the next batch on the CPU while the GPU computes. run.position stays that of the batch before."""
    *batch, run.next_position = next(run.loader)
    run.batch = tuple(batch)


def save(run: Run, step: int, rng: dict[str, Tensor], position: Any) -> bool:
    """Saves a checkpoint, and returns whether all of it is on the disk. All processes must call this function
    together."""
    # A step can have been saved before its last evaluation, because of a signal. It is then saved again.
    if run.dry_run or (step, run.loop.looked_at) == (run.saved_step, run.saved_looked_at):
        return True
    weights = full_state_dict(run.model, run.process.rank)
    optimizers = [optimizer.state_dict() for optimizer in run.training_step.optimizers]
    meta = run.meta.at(run.loop, run.monitor.state)
    saved = Checkpoint(run.folder, step, meta, weights, optimizers, rng, position, nf.gram_state(run.model)).save(
        run.process.rank
    )
    if saved:
        run.saved_step, run.saved_looked_at = step, run.loop.looked_at
    if saved and run.process.rank == 0:
        if run.args.resume_from_step != "latest":
            # These checkpoints are left from before the run was resumed from an earlier step.
            forget_later_checkpoints(run.folder, step)
        prune_checkpoints(run.folder, run.args.keep_last, step)
    return saved
