"""The only training loop. A step has micro-batches; between steps come evaluations, telemetry and checkpoints.

    trainer = Trainer(spec, step, args, process, start)
    if trainer.run():          # False: a signal stopped the run, and the run is saved
        report(trainer.loop, trainer.monitor)

RunSpec says how the stages differ: data, schedule, evaluation, a checkpoint's metadata. TrainingStep is one optimizer
step in parts, which lab.bench steps times one by one.

A resumed run equals an undisturbed one. A checkpoint has everything that a step depends on: model and optimizers,
generators and data position, `loop` and the monitor.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import nanochat_fp4 as nf
from nanochat_fp4.common import (
    get_rng_state,
    mean_over_ranks,
    of_all_ranks,
    preserved_rng,
    print0,
    seed_micro_batch,
    set_rng_state,
)
from nanochat_fp4.data.packing import merge_states
from nanochat_fp4.devices import peak_memory
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, is_out_of_memory
from nanochat_fp4.evaluation.metrics import LossMonitor, MetricsLog
from nanochat_fp4.hardware import get_peak_flops
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.optim import Schedule
from nanochat_fp4.models.optim8bit import LeanState
from nanochat_fp4.nvfp4.training import LOOK_TOKENS, QuantizedTraining
from nanochat_fp4.parallel import full_state_dict, is_sharded
from nanochat_fp4.progress import Progress
from nanochat_fp4.signals import StopRequested, StopSignals
from nanochat_fp4.training.checkpoint_manager import forget_later_checkpoints, prune_checkpoints, save_checkpoint
from nanochat_fp4.training.gemms import choose_gemms
from nanochat_fp4.training.micro_batch import auto_device_batch_size, memory_lever
from nanochat_fp4.training.resume import Start, changed_settings, restore_dict, restore_state, start_over, starts_over
from nanochat_fp4.training.startup import Phases
from nanochat_fp4.training.telemetry import layer_telemetry, name_nonfinite, summarize_telemetry
from nanochat_fp4.training.wandb_run import setup_tracker

MAX_SKIPPED_IN_A_ROW = 10  # --on-nonfinite=skip gives up after so many

Batch = tuple[Tensor, ...]  # tokens, targets (negative: none), and whatever else the loss takes


class TrainingStep:
    """One optimizer step in parts: the weights' codes made once, micro-batches whose gradients add up, the update.

    model: not compiled. forward: the compiled model, or the model itself. dtype: of matrix products (gpt.autocast).
    loss: (model or its compiled form, *batch) -> mean loss of a micro-batch, ().
    lean: of --state=lean. Else gradients are added where they are made (nf.accumulate_gradients).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        forward: Callable[..., Tensor] | None = None,
        quantized: QuantizedTraining | None = None,
        dtype: torch.dtype | None = None,
        loss: Callable[..., Tensor] = lambda forward, x, y: forward(x, y),
        lean: LeanState | None = None,
    ):
        self.model, self.optimizers, self.dtype, self.loss, self.lean = model, list(optimizers), dtype, loss, lean
        self.forward = model if forward is None else forward
        self.quantized = quantized or QuantizedTraining(model)
        self.device = model.get_device()

    @property
    def compiled(self) -> bool:
        return self.forward is not self.model

    def autocast(self) -> contextlib.AbstractContextManager:
        return autocast(self.device.type, self.dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        return self.quantized.weights_once(passes)

    @contextlib.contextmanager
    def micro_batches(self, count: int, step: int = 0) -> Iterator[None]:
        """Around so many micro-batches of one step: what they share is made once."""
        if self.lean is not None:
            adding = self.lean.gradients(count, step)
        else:
            adding = nf.accumulate_gradients(self.model) if count > 1 else contextlib.nullcontext()
        with self.weights_once(count), adding:
            yield

    def micro_batch(self, *batch: Tensor, count: int = 1) -> Tensor:
        """Adds the gradients of one of `count` micro-batches, with its share; its mean loss, ()."""
        with record_function("phase: forward"), self.autocast():
            loss = self.loss(self.forward, *batch)
        with record_function("phase: backward"):
            (loss / count).backward()
        return loss.detach()

    def update(self) -> None:
        """The optimizers' steps; the gradients are dropped."""
        with record_function("phase: update"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Process:
    """A process of a run, and its open contexts."""

    device: torch.device
    rank: int
    world_size: int
    signals: StopSignals
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed at exit: the folder's lock
    starting: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closed after the first step
    phases: Phases = field(default_factory=Phases)  # parts of the time to the first step


@dataclass
class RunSpec:
    """A run as its stage wants it. The loop is the same for all."""

    stage: str  # base, mid, sft, rl
    method: str
    make_loader: Callable[[Any], Iterator]  # saved position or None -> endless iterator over (*batch, position)
    schedule: Schedule
    device_batch_size: int
    seq_len: int
    grad_accum_steps: int
    num_iterations: int  # less than 1: one epoch of `conversations`
    evaluate: Callable[[int, bool], dict[str, float]]  # (step, last step) -> val_bpb, mmlu_acc, ...
    evaluate_due: Callable[[int, bool], bool]
    also: Sequence[Callable[["Trainer", bool], None]] = ()  # called before each step
    seed: int = 42  # rotations and rounding noise
    conversations: int = 0  # of the training data, if a run is an epoch
    tokens_per_step: int | None = None  # None: not the same in every step
    val_tokens: int | None = None
    user_config: dict[str, Any] = field(default_factory=dict)  # all flags
    meta: dict[str, Any] = field(default_factory=dict)  # of checkpoints
    start_record: dict[str, Any] = field(default_factory=dict)  # for metrics.jsonl
    lower: str = "the learning rates"  # advice after bad numbers
    prefetch: bool = True  # False: the weights decide the batch (RL)
    numbers: Callable[[], dict[str, float]] = dict  # further numbers of the last step

    @property
    def by_epoch(self) -> bool:
        return self.num_iterations < 1


@dataclass
class Outcome:
    """An optimizer step's result over all ranks. bad: a number of any rank is not finite, bad_here of this one."""

    loss: float
    grad_norm: float
    lrm: float | None  # None where nothing was updated
    tokens: int
    consumed: float  # conversations so far, of all ranks
    bad: bool
    bad_here: bool


def due(every: int, step: int, last: bool) -> bool:
    """Whether a thing with this period in steps is due before `step`, or at the end. Period -1: never."""
    return every > 0 and (last or step % every == 0)


class Trainer:
    """A run. Its state is step, loop (a dict for JSON), monitor (of the loss) and loader_state.

    args: the flags of setup.add_run_arguments.

    begin() deletes what --overwrite names and takes up the state of a checkpoint; run() does that and trains.
    Raises UserError where the run must end: numbers that are not finite, memory or disk that are full.
    """

    def __init__(self, spec: RunSpec, parts: TrainingStep, args: argparse.Namespace, process: Process, start: Start):
        self.spec, self.parts, self.args, self.process, self.start = spec, parts, args, process, start
        self.model, self.quantized, self.device = parts.model, parts.quantized, process.device
        self.folder, self.step = start.folder, start.step
        self.saved_step = start.resumed_step  # the newest in the folder
        self.dry_run = getattr(args, "dry_run", False)  # only mid_train has the flag
        self.loop: dict[str, Any] = {
            "numbers": {},  # the last evaluation's
            "best": {},
            "evaluated_at": -1,
            "looked_at": -1,  # all of look()
            "progress": 0.0,  # from 0 to 1
            "training_seconds": 0.0,
        }
        self.monitor = LossMonitor()
        self.loader_state: Any = None
        self.made_first_step = False  # by this process
        self.skipped_in_a_row = 0
        self.warned_of_repetition = False
        self.batch: Batch | None = None  # the one that is trained on next, and the position after it
        self.next_loader_state: Any = None
        self.tok_per_sec = self.mfu = None
        self.telemetry: str | None = None  # the newest summary
        self.environment = environment_info() if process.rank == 0 else None
        # Metadata of checkpoints, without the state of the loop.
        commit = self.environment and self.environment["commit"]
        self.meta = {**spec.meta, "user_config": spec.user_config, "commit": commit}
        self.metrics = MetricsLog(self.folder, enabled=process.rank == 0 and not self.dry_run)
        self.flops_per_token = self.model.estimate_flops()
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        self.peak_flops = get_peak_flops(gpu) if gpu else None

    # ------------------------------------------------------------------------------------------------------------------
    # Beginning

    def begin(self) -> None:
        """Everything up to the first step."""
        spec, start, args = self.spec, self.start, self.args
        self.process.phases.end("model")
        if start.source is not None:
            self.restore()
        size, stored = spec.device_batch_size, start.meta.get("gemms")
        self.gemms = choose_gemms(self.model, size, spec.seq_len, self.parts.dtype, stored)
        if self.gemms is not None:
            self.meta["gemms"] = self.gemms.record
        self.loader = spec.make_loader(self.loader_state)
        if not self.finished() and spec.prefetch:
            self.fetch()
        project = "nanochat" if spec.stage == "base" else f"nanochat-{spec.stage}"
        self.wandb_run = setup_tracker(args.run, project, spec.user_config)
        if starts_over(args.resume_from_step, args.overwrite) and not self.dry_run:
            start_over(self.folder, self.process.rank)
        self.metrics.rewind(start.resumed_step)
        record = {
            "stage": spec.stage, "method": spec.method, "num_iterations": spec.num_iterations,
            "backend": str(nf.backend()), "world_size": self.process.world_size, "config": spec.user_config,
            "environment": self.environment,
        }  # fmt: skip
        self.metrics.append("start", self.step, **record | spec.start_record)
        self.progress = Progress(
            total=None if spec.by_epoch else spec.num_iterations,
            desc="train" if spec.stage == "base" else spec.stage,
            unit="step",
            initial=self.step,
        )
        self.process.phases.end("first batch")

    def restore(self) -> None:
        """The state of the checkpoint that the run goes on from."""
        start = self.start
        restore_state(self.parts.optimizers, start.rank_state, self.device, start.source)
        self.loader_state = start.rank_state.get("dataloader")
        if any(start.rank_state.get("dataloaders", ())):  # the saving run had another number of processes
            self.loader_state = merge_states(start.rank_state["dataloaders"])
            if self.process.rank:
                self.loader_state |= {"consumed": 0} if "consumed" in self.loader_state else {}
        self.loop = restore_dict(self.loop, start.meta, "loop_state", start.source)
        self.monitor = LossMonitor(restore_dict(self.monitor.state, start.meta, "loss_state", start.source))
        start.rank_state.clear()
        branch = f" of {start.source.name}" if start.resumed_step is None else ""
        print0(f"Resuming from step {self.step}{branch}")
        for change in changed_settings(start.meta, self.meta):
            print0(f"  note: {change}")

    def finished(self) -> bool:
        return self.loop["progress"] >= 1 if self.spec.by_epoch else self.step >= self.spec.num_iterations

    def fetch(self) -> None:
        """The next batch, made on the CPU while the GPU works; `loader_state` stays that of the batch before it."""
        *batch, self.next_loader_state = next(self.loader)
        self.batch = tuple(batch)

    # ------------------------------------------------------------------------------------------------------------------
    # The loop

    def run(self) -> bool:
        """Trains to the end, or until a signal. True where it came to the end."""
        self.begin()
        while True:
            last = self.finished()
            stopping = self.process.signals.received(self.device)
            if not stopping:
                try:
                    self.look(last)
                except StopRequested:
                    stopping = True
            must = last or stopping
            due_now = due(self.args.save_every, self.step, False) or self.step in self.args.save_at
            if must or (self.step > 0 and due_now):
                saved = self.save(self.step, get_rng_state(self.device), self.loader_state)
                if must and not saved:
                    raise self.failure(
                        f"step {self.step} could not be saved (see the warning above); free some disk space and go on "
                        "from the checkpoint before it with --resume-from-step latest"
                    )
            if must:
                break
            self.train_step()
        self.progress.close()
        self.wandb_run.finish()
        if stopping:
            of = "" if self.spec.by_epoch else f" of {self.spec.num_iterations}"
            print0(f"{self.process.signals.name}: stopped at step {self.step}{of}, saved in {self.folder}")
            if self.args.resume_from_step != "latest":  # else the same command goes on
                print0("go on with: --resume-from-step latest")
        return not stopping

    def train_step(self) -> None:
        """One optimizer step, or the attempt at one."""
        if not self.made_first_step:
            self.process.phases.end("evaluation")
        if changed := self.quantized.set_progress(self.step):
            self.progress.write(f"step {self.step:05d} | from here on {changed}")
            if self.parts.compiled:
                torch._dynamo.reset()  # recipes are constants of compiled code
        self.parts.synchronize()
        self.updating, began = False, time.monotonic()
        before = get_rng_state(self.device), self.loader_state
        tried: list[tuple[Batch, dict]] = []
        outcome = None
        try:
            outcome = self.optimize(tried)
        except Exception as e:
            if not is_out_of_memory(e) or self.process.world_size > 1:
                raise
        if outcome is None:  # here the exception is gone, and with it the frames that hold activations
            raise self.out_of_memory(tried, before)
        self.parts.synchronize()
        seconds = time.monotonic() - began
        if outcome.bad:
            self.skip(outcome, tried, before)
        self.loop["progress"] = (
            outcome.consumed / self.spec.conversations
            if self.spec.by_epoch
            else (self.step + 1) / self.spec.num_iterations
        )
        shown = {} if outcome.bad else self.account(outcome, seconds)
        self.step += 1
        self.progress.update(1, **shown)
        if not self.made_first_step:
            self.made_first_step = True
            self.process.starting.close()
            self.process.phases.end("first step, compiling" if self.parts.compiled else "first step")
            self.progress.write(f"time to the first step: {self.process.phases}")

    def optimize(self, tried: list[tuple[Batch, dict]]) -> Outcome:
        """Micro-batches and, where all numbers are finite, the update. tried: gets (batch, generators before)."""
        spec, parts = self.spec, self.parts
        losses, counted = [], 0
        with parts.micro_batches(spec.grad_accum_steps, self.step):
            for i in range(spec.grad_accum_steps):
                if not spec.prefetch:
                    self.fetch()
                batch = self.batch
                # Rank r has the step's micro-batches r, r + world size, ... (dataloader.py).
                seed_micro_batch(spec.seed, self.step, i * self.process.world_size + self.process.rank)
                tried.append((batch, get_rng_state(self.device)))
                losses.append(parts.micro_batch(*batch, count=spec.grad_accum_steps))
                counted = counted + (batch[1] >= 0).sum()
                self.loader_state = self.next_loader_state
                if spec.prefetch:
                    self.fetch()
        grad_norm = self.model.clip_gradients()
        loss = torch.stack(losses).mean()
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        consumed = self.loader_state.get("consumed", 0)
        shared = torch.stack([loss, bad.float(), counted.float(), torch.full_like(loss, consumed)])
        loss, any_bad, counted, consumed = mean_over_ranks(shared).tolist()
        lrm = None
        if any_bad == 0:
            lrm = spec.schedule(self.step, self.loop["progress"] if spec.by_epoch else self.step / spec.num_iterations)
            self.updating = True  # to the end of the step
            parts.update()
            with parts.autocast():
                self.quantized.after_update(self.step, self.forward_of_few)
        return Outcome(
            loss=loss,
            grad_norm=float(grad_norm),
            lrm=lrm,
            tokens=spec.tokens_per_step or round(counted * self.process.world_size),
            consumed=round(consumed * self.process.world_size),
            bad=any_bad > 0,
            bad_here=bool(bad),
        )

    def forward_of_few(self) -> None:
        x, y, *_ = self.batch
        rows = max(1, LOOK_TOKENS // self.spec.seq_len)
        self.model(x[:rows], y[:rows])

    # ------------------------------------------------------------------------------------------------------------------
    # Ends of a run

    def failure(self, text: str) -> UserError:
        self.progress.close()
        return UserError(text)

    def out_of_memory(self, tried: list, before: tuple[dict, Any]) -> UserError:
        """The line that ends a run whose memory ran out, naming the micro-batch that fits."""
        tried.clear()
        self.batch = None
        self.model.zero_grad(set_to_none=True)
        saved = not self.updating and self.save(self.step, *before)  # the weights may be half updated
        size = self.spec.device_batch_size
        try:
            rows = size * self.spec.grad_accum_steps
            fits = auto_device_batch_size(self.model, rows, self.spec.seq_len, self.parts.dtype, below=size)
            advice = f"--device-batch-size={fits} fits (the batch of a step stays the same)"
        except UserError:
            advice = "no smaller batch fits either"
        lever = memory_lever(self.model, size, self.spec.seq_len)
        advice += f"; by count, {lever}" if lever else ""
        go_on = "; go on with it and --resume-from-step latest" if saved else ""
        if self.spec.stage in ("sft", "rl"):  # a micro-batch's rows are padded to one length, which decides the bits
            go_on = "; start over with it and --overwrite"
        return self.failure(f"out of memory at step {self.step} with --device-batch-size={size}; {advice}{go_on}")

    def skip(self, outcome: Outcome, tried: list, before: tuple[dict, Any]) -> None:
        """A step whose numbers are not finite: nothing was updated. Raises UserError unless it may be passed over."""
        if is_sharded(self.model):  # one process alone cannot compute it again
            place = "a process that shares the weights; --parallel=ddp names the layer"
        else:
            places = enumerate(of_all_ranks(self.name_the_layer(tried) if outcome.bad_here else None))
            place = min((p.startswith("the loss itself"), r, f"{p} (rank {r})") for r, p in places if p)[2]
        self.model.zero_grad(set_to_none=True)
        what = f"step {self.step}: loss {outcome.loss:.4g}, first not finite: {place}"
        self.skipped_in_a_row += 1
        self.metrics.append("skip", self.step, place=place, loss=str(outcome.loss))
        if self.args.on_nonfinite == "stop" or self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self.save(self.step, *before)
            raise self.failure(
                f"{what}. Saved as it was before this step in {self.folder}; lower {self.spec.lower} and start over, "
                "or skip such steps: --resume-from-step latest --on-nonfinite skip"
            )
        self.monitor.state["skipped"] += 1
        self.progress.write(f"warning: {what}; update skipped")

    def name_the_layer(self, tried: list[tuple[Batch, dict]]) -> str:
        """The source of the first bad number of these micro-batches, which are computed again."""
        place = ""
        for batch, rng in tried:

            def forward_backward(batch=batch, rng=rng) -> None:
                set_rng_state(rng, self.device)
                with self.parts.autocast():
                    self.parts.loss(self.model, *batch).backward()

            with preserved_rng(self.device):
                place = name_nonfinite(self.model, forward_backward)
            if not place.startswith("the loss itself"):
                break
        return place

    # ------------------------------------------------------------------------------------------------------------------
    # Numbers

    def account(self, outcome: Outcome, seconds: float) -> dict[str, str]:
        """A step's numbers go to the log; what is shown of them."""
        self.skipped_in_a_row = 0
        average, loss = self.monitor.state["mean"], outcome.loss
        if self.monitor.update(loss):
            self.progress.write(f"warning: step {self.step}: loss {loss:.4f} is a spike (average {average:.4f})")
            self.metrics.append("spike", self.step, loss=loss, average=average)
        self.loop["training_seconds"] += seconds
        self.tok_per_sec = outcome.tokens / seconds
        if self.peak_flops and self.spec.tokens_per_step:
            peak = self.peak_flops * self.process.world_size
            self.mfu = 100 * self.flops_per_token * self.tok_per_sec / peak
        more = self.spec.numbers()
        numbers = {
            **more, "lrm": outcome.lrm, "dt": seconds, "tok_per_sec": self.tok_per_sec, "mfu": self.mfu,
            "grad_norm": outcome.grad_norm, "tokens": outcome.tokens,
        }  # fmt: skip
        self.metrics.append("train", self.step, loss=loss, smoothed_loss=self.monitor.smoothed, **numbers)
        if self.step % 10 == 0:
            numbers |= {"loss": self.monitor.smoothed} | {k: self.monitor.state[k] for k in ("spikes", "skipped")}
            numbers["peak_memory_mib"] = peak_memory(self.device) / 2**20
            self.log_to_wandb("train", numbers)
        shown = {"loss": f"{self.monitor.smoothed:.4f}", "lrm": f"{outcome.lrm:.2f}"}
        shown |= {key: f"{value:.4g}" for key, value in more.items()}
        shown["tok/s"] = f"{self.tok_per_sec:,.0f}"
        if self.mfu is not None:
            shown["mfu"] = f"{self.mfu:.1f}%"
        if self.spec.by_epoch:
            shown["epoch"] = f"{100 * self.loop['progress']:.1f}%"
        return shown

    def log_to_wandb(self, event: str, numbers: dict[str, Any]) -> None:
        """Logs under nanochat's names, the same in every stage: train/loss, val/bpb, total_training_time, ..."""
        values = {f"{event}/{key}": value for key, value in numbers.items() if value is not None}
        if self.spec.tokens_per_step:
            values["total_training_tokens"] = self.spec.tokens_per_step * self.step
            values["total_training_flops"] = self.flops_per_token * self.spec.tokens_per_step * self.step
        values["total_training_time"] = self.loop["training_seconds"]
        self.wandb_run.log({"step": self.step, **values})

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, the model evaluates and may draw random numbers; afterwards training goes on as if it had not."""
        self.model.eval()
        try:
            with preserved_rng(self.device):
                yield
        finally:
            self.model.train()

    def look(self, last: bool) -> None:
        """Evaluation, samples, telemetry: what is due before the next step. Raises StopRequested on a signal."""
        if self.loop["evaluated_at"] != self.step and self.spec.evaluate_due(self.step, last):
            self.evaluate(last)
        again, every = self.loop["looked_at"] == self.step, self.args.telemetry_every
        for look in self.spec.also if last or not again else ():
            look(self, last)
        if self.batch and not (last or again) and due(every, self.step, last) and self.quantized.quantizes():
            self.measure_layers()
        self.loop["looked_at"] = self.step

    def evaluate(self, last: bool) -> None:
        with self.evaluating():
            numbers = self.spec.evaluate(self.step, last)
        self.warn_of_repetition(numbers)
        for key, value in numbers.items():
            best = min if "loss" in key or "bpb" in key else max
            self.loop["best"][key] = best(self.loop["best"].get(key, value), value)
        self.loop["numbers"] |= numbers
        self.loop["evaluated_at"] = self.step
        self.progress.write(f"step {self.step:05d} | " + ", ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
        named = {key.removeprefix("val_"): value for key, value in numbers.items()}
        self.metrics.append("val", self.step, **named, **({"tokens": n} if (n := self.spec.val_tokens) else {}))
        self.log_to_wandb("val", named)

    def warn_of_repetition(self, numbers: dict[str, float]) -> None:
        """Says once that the text is read again and again and validation gets worse."""
        epoch = self.loader_state.get("epoch", 1) if isinstance(self.loader_state, dict) else 1
        best = self.loop["best"]
        rising = [k for k, v in numbers.items() if ("loss" in k or "bpb" in k) and v > best.get(k, v)]
        if epoch > 2 and rising and not self.warned_of_repetition:
            self.warned_of_repetition = True
            key = rising[0]
            self.progress.write(
                f"warning: step {self.step}: the data has been seen {epoch - 1} times, and {key} is rising: "
                f"{best[key]:.4f} -> {numbers[key]:.4f}; train on more text (--data-dir), or fewer steps"
            )

    def measure_layers(self) -> None:
        """Telemetry of every quantized layer on the first row that is trained on next."""
        batch = [part[:1] for part in self.batch]

        def forward_backward() -> None:
            with self.parts.autocast():
                self.parts.loss(self.model, *batch).backward()

        with preserved_rng(self.device):
            telemetry = layer_telemetry(self.model, forward_backward)
        self.telemetry = f"step {self.step}: {summarize_telemetry(telemetry)}"
        self.progress.write(self.telemetry)
        self.metrics.append("telemetry", self.step, layers=telemetry)
        self.log_to_wandb("telemetry", {f"{n}/{k}": v for n, t in telemetry.items() for k, v in t.items()})

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoints

    def save(self, step: int, rng: dict[str, Tensor], loader_state: Any) -> bool:
        """True once the checkpoint is on the disk as a whole. All ranks call this together."""
        if self.dry_run or step == self.saved_step:
            return True
        saved = save_checkpoint(
            self.folder,
            step,
            full_state_dict(self.model, self.process.rank),
            {"optimizers": [o.state_dict() for o in self.parts.optimizers], "rng": rng, "dataloader": loader_state},
            {
                **self.loop["numbers"],
                **self.meta,
                "loop_state": self.loop,
                "loss_state": self.monitor.state,
            },
            rank=self.process.rank,
            method_data=nf.gram_state(self.model),
        )
        self.saved_step = step if saved else self.saved_step
        if saved and self.process.rank == 0:
            if self.args.resume_from_step != "latest":
                forget_later_checkpoints(self.folder, step)  # an earlier step's resume left them behind
            prune_checkpoints(self.folder, self.args.keep_last, step)
        return saved
