"""
The training loop, the only one: steps of micro-batches, the health of their numbers, evaluations, checkpoints, resume.

    trainer = Trainer(stage, step, options, process, start)
    if trainer.run():          # False: a signal stopped it, and it is saved
        report(trainer.loop, trainer.monitor)

What differs between stages (data, schedule, evaluation, what is written into checkpoints) is a Stage. TrainingStep is
one optimizer step in parts, which lab.measure.bench_train times one by one.

A run goes on from its checkpoints as if nothing had been: whatever a step depends on is the model's, the optimizers',
the generators', the data position's, or in `loop` and the monitor, and all of that is in every checkpoint.
"""

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
    first_message,
    get_rng_state,
    mean_over_ranks,
    peak_memory,
    preserved_rng,
    print0,
    seed_micro_batch,
    set_rng_state,
)
from nanochat_fp4.console import Progress
from nanochat_fp4.data.dataloader import merge_states
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, is_out_of_memory
from nanochat_fp4.evaluation.metrics import LossMonitor, MetricsLog
from nanochat_fp4.hardware import get_peak_flops
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.optim import Schedule
from nanochat_fp4.nvfp4.training import QuantizedTraining
from nanochat_fp4.parallel import full_state_dict, is_sharded
from nanochat_fp4.signals import StopRequested
from nanochat_fp4.training.checkpoint_manager import forget_later_checkpoints, prune_checkpoints, save_checkpoint
from nanochat_fp4.training.micro_batch import auto_device_batch_size
from nanochat_fp4.training.resume import Start, changed_settings, restore_dict, restore_state, start_over, starts_over
from nanochat_fp4.training.stage import Process, RunOptions
from nanochat_fp4.training.telemetry import layer_telemetry, name_nonfinite, summarize_telemetry
from nanochat_fp4.training.wandb_run import setup_tracker

MAX_SKIPPED_IN_A_ROW = 10  # --on-nonfinite=skip gives up after so many
LOOK_TOKENS = 8192  # of a rank, for a look at the layers' inputs
WANDB_EVERY = 10  # steps

Batch = tuple[Tensor, ...]  # tokens, targets (negative: none), and whatever else the loss takes


class TrainingStep:
    """
    One optimizer step in parts: the weights' codes made once, micro-batches whose gradients add up, the update.

    model: not compiled; forward: its compiled form, or itself. dtype: of matrix products, see gpt.autocast.
    loss: (model or its compiled form, *batch) -> mean loss of a micro-batch, ().
    accumulates: whether gradients are added where they are made (nf.accumulate_gradients).
    """

    accumulates = True

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        forward: Callable[..., Tensor] | None = None,
        quantized: QuantizedTraining | None = None,
        dtype: torch.dtype | None = None,
        loss: Callable[..., Tensor] = lambda forward, x, y: forward(x, y),
    ):
        self.model, self.optimizers, self.dtype, self.loss = model, list(optimizers), dtype, loss
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
    def micro_batches(self, count: int) -> Iterator[None]:
        """Around so many micro-batches of one step: what they share is made once."""
        accumulates = self.accumulates and count > 1
        with self.weights_once(count), nf.accumulate_gradients(self.model) if accumulates else contextlib.nullcontext():
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


@dataclass
class Stage:
    """What distinguishes one stage's training from another's."""

    name: str  # base, mid, sft, rl
    method: str
    make_loader: Callable[[Any], Iterator]  # saved position or None -> endless iterator over (*batch, position)
    schedule: Schedule
    device_batch_size: int
    seq_len: int
    grad_accum_steps: int
    num_iterations: int  # less than 1: until one epoch of `conversations` is consumed
    evaluate: Callable[[int, bool], dict[str, float]]  # (step, last step) -> numbers: val_bpb, val_loss, mmlu_acc, ...
    evaluate_due: Callable[[int, bool], bool]
    also: Sequence[Callable[["Trainer", bool], None]] = ()  # looked at before each step: samples, benchmarks
    seed: int = 42  # of rotations and rounding noise
    conversations: int = 0  # in the training data, where an epoch of them is the run
    tokens_per_step: int | None = None  # where it is the same in every step
    val_tokens: int | None = None
    user_config: dict[str, Any] = field(default_factory=dict)  # all flags, for people; into checkpoints and W&B
    meta: dict[str, Any] = field(default_factory=dict)  # more of a checkpoint's metadata
    start_record: dict[str, Any] = field(default_factory=dict)  # more of the "start" record in metrics.jsonl
    lower: str = "the learning rates"  # what to lower where the numbers are bad
    prefetch: bool = True  # False: a batch depends on the weights, and is made when it is trained on
    numbers: Callable[[], dict[str, float]] = dict  # more of a step's, asked for after each

    @property
    def by_epoch(self) -> bool:
        return self.num_iterations < 1


@dataclass
class Outcome:
    """What an optimizer step came to, over all ranks. bad_here: not finite on this rank; bad: on any."""

    loss: float
    grad_norm: float
    lrm: float | None  # None where nothing was updated
    tokens: int
    consumed: float  # conversations so far, of all ranks
    bad: bool
    bad_here: bool


def due(every: int, step: int, last: bool) -> bool:
    """Whether something is to be done before `step`, and at the end, that is done every so many steps (-1: never)."""
    return every > 0 and (last or step % every == 0)


class Trainer:
    """
    A run of a stage. State: step; loop, a dict that JSON can hold; monitor (the loss); loader_state.

    begin() deletes what --overwrite names and takes up the state of a checkpoint; run() does that and trains.
    Raises UserError where the run must end: numbers that are not finite, memory or disk that are full.
    """

    def __init__(self, stage: Stage, parts: TrainingStep, options: RunOptions, process: Process, start: Start):
        self.stage, self.parts, self.options, self.process, self.start = stage, parts, options, process, start
        self.model, self.quantized, self.device = parts.model, parts.quantized, process.device
        self.folder, self.step = start.folder, start.step
        self.loop: dict[str, Any] = {
            "numbers": {},  # of the last evaluation
            "best": {},
            "evaluated_at": -1,
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
        # What checkpoints say of the run itself.
        commit = self.environment and self.environment["commit"]
        self.meta = {**stage.meta, "user_config": stage.user_config, "commit": commit}
        self.metrics = MetricsLog(self.folder, enabled=process.rank == 0 and not options.dry_run)
        self.flops_per_token = self.model.estimate_flops()
        on_gpu = self.device.type == "cuda"
        self.peak_flops = get_peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None

    # ------------------------------------------------------------------------------------------------------------------
    # Beginning

    def begin(self) -> None:
        """Everything up to the first step."""
        stage, start, options = self.stage, self.start, self.options
        self.process.phases.end("model")
        if start.source is not None:
            self.restore()
        self.loader = stage.make_loader(self.loader_state)
        if starts_over(options.resume_from_step, options.overwrite) and not options.dry_run:
            start_over(self.folder, self.process.rank)
        self.metrics.rewind(start.resumed_step or 0)
        record = {
            "stage": stage.name, "method": stage.method, "num_iterations": stage.num_iterations,
            "backend": str(nf.backend()), "world_size": self.process.world_size, "config": stage.user_config,
            "environment": self.environment,
        }  # fmt: skip
        self.metrics.append("start", self.step, **record | stage.start_record)
        project = "nanochat" if stage.name == "base" else f"nanochat-{stage.name}"
        self.wandb_run = setup_tracker(options.tracker, options.run, project, stage.user_config)
        self.progress = Progress(
            total=None if stage.by_epoch else stage.num_iterations,
            desc="train" if stage.name == "base" else stage.name,
            unit="step",
            initial=self.step,
        )
        if not self.finished() and self.stage.prefetch:
            self.fetch()
        self.process.phases.end("first batch")

    def restore(self) -> None:
        """The state of the checkpoint that the run goes on from."""
        start = self.start
        restore_state([*self.parts.optimizers], start.rank_state, self.device, start.source)
        # Mid-training and SFT of earlier versions called it "loader".
        self.loader_state = start.rank_state.get("dataloader", start.rank_state.get("loader"))
        if "dataloaders" in start.rank_state:  # of another number of processes
            self.loader_state = merge_states(start.rank_state["dataloaders"])
            if self.process.rank:
                self.loader_state |= {"consumed": 0} if "consumed" in self.loader_state else {}
        meta = start.meta | {"loop_state": _loop_state(start.meta.get("loop_state"))}
        self.loop = restore_dict(self.loop, meta, "loop_state", start.source)
        self.monitor = LossMonitor(restore_dict(self.monitor.state, meta, "loss_state", start.source))
        start.rank_state.clear()
        branch = f" of {start.source.name}" if start.resumed_step is None else ""
        print0(f"Resuming from step {self.step}{branch}")
        for change in changed_settings(start.meta, self.meta):
            print0(f"  note: {change}")

    def finished(self) -> bool:
        return self.loop["progress"] >= 1 if self.stage.by_epoch else self.step >= self.stage.num_iterations

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
            if self.step != self.start.resumed_step and (must or self.save_due()):
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
        if stopping and not last:
            of = "" if self.stage.by_epoch else f" of {self.stage.num_iterations}"
            print0(f"{self.process.signals.name}: stopped at step {self.step}{of}, saved in {self.folder}")
            if self.options.resume_from_step != "latest":  # else the same command goes on
                print0("go on with: --resume-from-step latest")
        return last

    def train_step(self) -> None:
        """One optimizer step, or the attempt at one."""
        if not self.made_first_step:
            self.process.phases.end("evaluation")
        if changed := self.quantized.set_progress(self.step):
            self.progress.write(f"step {self.step:05d} | from here on {changed}")
            if self.parts.compiled:
                torch._dynamo.reset()  # recipes are constants of compiled code
        self.parts.synchronize()
        began = time.monotonic()
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
            outcome.consumed / self.stage.conversations
            if self.stage.by_epoch
            else (self.step + 1) / self.stage.num_iterations
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
        stage, parts = self.stage, self.parts
        losses, counted = [], 0
        with parts.micro_batches(stage.grad_accum_steps):
            for i in range(stage.grad_accum_steps):
                if not stage.prefetch:
                    self.fetch()
                batch = self.batch
                # Of the step's micro-batches this rank has numbers rank, rank + world size, ...: see dataloader.py.
                seed_micro_batch(stage.seed, self.step, i * self.process.world_size + self.process.rank)
                tried.append((batch, get_rng_state(self.device)))
                losses.append(parts.micro_batch(*batch, count=stage.grad_accum_steps))
                counted = counted + (batch[1] >= 0).sum()
                self.loader_state = self.next_loader_state
                if stage.prefetch:
                    self.fetch()
        grad_norm = self.model.clip_gradients()
        loss = torch.stack(losses).mean()
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        consumed = self.loader_state.get("consumed", 0)
        shared = torch.stack([loss, bad.float(), counted.float(), torch.full_like(loss, consumed)])
        loss, any_bad, counted, consumed = mean_over_ranks(shared).tolist()
        lrm = None
        if any_bad == 0:
            lrm = stage.schedule(self.step, self.progress_before())
            parts.update()
            with parts.autocast():
                self.quantized.after_update(self.step, self.forward_of_few)
        return Outcome(
            loss=loss,
            grad_norm=float(grad_norm),
            lrm=lrm,
            tokens=stage.tokens_per_step or round(counted * self.process.world_size),
            consumed=round(consumed * self.process.world_size),
            bad=any_bad > 0,
            bad_here=bool(bad),
        )

    def progress_before(self) -> float:
        return self.loop["progress"] if self.stage.by_epoch else self.step / self.stage.num_iterations

    def forward_of_few(self) -> None:
        x, y, *_ = self.batch
        rows = max(1, LOOK_TOKENS // self.stage.seq_len)
        self.model(x[:rows], y[:rows])

    # ------------------------------------------------------------------------------------------------------------------
    # What ends a run

    def failure(self, text: str) -> UserError:
        self.progress.close()
        return UserError(text)

    def out_of_memory(self, tried: list, before: tuple[dict, Any]) -> UserError:
        """The line that ends a run whose memory ran out, naming the micro-batch that fits."""
        tried.clear()
        self.batch = None
        self.model.zero_grad(set_to_none=True)
        saved = self.save(self.step, *before)
        size = self.stage.device_batch_size
        try:
            rows = size * self.stage.grad_accum_steps
            fits = auto_device_batch_size(self.model, rows, self.stage.seq_len, self.parts.dtype, below=size)
            advice = f"--device-batch-size={fits} fits (the batch of a step stays the same)"
        except UserError:
            advice = "no smaller batch fits either"
        go_on = "; go on with it and --resume-from-step latest" if saved else ""
        return self.failure(f"out of memory at step {self.step} with --device-batch-size={size}; {advice}{go_on}")

    def skip(self, outcome: Outcome, tried: list, before: tuple[dict, Any]) -> None:
        """A step whose numbers are not finite: nothing was updated. Raises UserError unless it may be passed over."""
        if is_sharded(self.model):  # one process alone cannot compute it again
            place = "a process that shares the weights; --parallel=ddp names the layer"
        else:
            place = first_message(self.name_the_layer(tried) if outcome.bad_here else None)
        self.model.zero_grad(set_to_none=True)
        what = f"step {self.step}: loss {outcome.loss:.4g}, first not finite: {place}"
        self.skipped_in_a_row += 1
        self.metrics.append("skip", self.step, place=place, loss=str(outcome.loss))
        if self.options.on_nonfinite == "stop" or self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self.save(self.step, *before)
            raise self.failure(
                f"{what}. Saved as it was before this step in {self.folder}; lower {self.stage.lower} and start over, "
                "or skip such steps: --resume-from-step latest --on-nonfinite skip"
            )
        self.monitor.state["skipped"] += 1
        self.progress.write(f"warning: {what}; update skipped")

    def name_the_layer(self, tried: list[tuple[Batch, dict]]) -> str:
        """Where the first bad number of these micro-batches comes from; they are computed again."""
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
        if self.peak_flops and self.stage.tokens_per_step:
            peak = self.peak_flops * self.process.world_size
            self.mfu = 100 * self.flops_per_token * self.tok_per_sec / peak
        more = self.stage.numbers()
        numbers = {
            **more, "lrm": outcome.lrm, "dt": seconds, "tok_per_sec": self.tok_per_sec, "mfu": self.mfu,
            "grad_norm": outcome.grad_norm, "tokens": outcome.tokens,
        }  # fmt: skip
        self.metrics.append("train", self.step, loss=loss, smoothed_loss=self.monitor.smoothed, **numbers)
        if self.step % WANDB_EVERY == 0:
            numbers |= {"loss": self.monitor.smoothed} | {k: self.monitor.state[k] for k in ("spikes", "skipped")}
            numbers["peak_memory_mib"] = peak_memory(self.device) / 2**20
            self.log_to_wandb("train", numbers)
        shown = {"loss": f"{self.monitor.smoothed:.4f}", "lrm": f"{outcome.lrm:.2f}"}
        shown |= {key: f"{value:.4g}" for key, value in more.items()}
        shown["tok/s"] = f"{self.tok_per_sec:,.0f}"
        if self.mfu is not None:
            shown["mfu"] = f"{self.mfu:.1f}%"
        if self.stage.by_epoch:
            shown["epoch"] = f"{100 * self.loop['progress']:.1f}%"
        return shown

    def log_to_wandb(self, event: str, numbers: dict[str, Any]) -> None:
        """Under nanochat's names, the same in every stage: train/loss, train/dt, val/bpb, total_training_time, ..."""
        values = {f"{event}/{key}": value for key, value in numbers.items() if value is not None}
        if self.stage.tokens_per_step:
            values["total_training_tokens"] = self.stage.tokens_per_step * self.step
            values["total_training_flops"] = self.flops_per_token * self.stage.tokens_per_step * self.step
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
        if self.loop["evaluated_at"] != self.step and self.stage.evaluate_due(self.step, last):
            self.evaluate(last)
        for look in self.stage.also:
            look(self, last)
        every = self.options.telemetry_every
        again = self.step == self.start.resumed_step
        if self.batch and not (last or again) and due(every, self.step, last) and self.quantized.quantizes():
            self.measure_layers()

    def evaluate(self, last: bool) -> None:
        with self.evaluating():
            numbers = self.stage.evaluate(self.step, last)
        self.warn_of_repetition(numbers)
        for key, value in numbers.items():
            best = min if "loss" in key or "bpb" in key else max
            self.loop["best"][key] = best(self.loop["best"].get(key, value), value)
        self.loop["numbers"] |= numbers
        self.loop["evaluated_at"] = self.step
        self.progress.write(f"step {self.step:05d} | " + ", ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
        named = {key.removeprefix("val_"): value for key, value in numbers.items()}
        tokens = {"tokens": self.stage.val_tokens} if self.stage.val_tokens else {}
        self.metrics.append("val", self.step, **named, **tokens)
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

    def save_due(self) -> bool:
        options = self.options
        return self.step > 0 and (due(options.save_every, self.step, False) or self.step in options.save_at)

    def save(self, step: int, rng: dict[str, Tensor], loader_state: Any) -> bool:
        """True once the checkpoint is on the disk as a whole. All ranks call this together."""
        if self.options.dry_run:
            return True
        saved = save_checkpoint(
            self.folder,
            step,
            full_state_dict(self.model, self.process.rank),
            {"optimizers": [o.state_dict() for o in self.parts.optimizers], "rng": rng, "dataloader": loader_state},
            {
                "step": step,
                **self.loop["numbers"],
                **self.meta,
                "loop_state": self.loop,
                "loss_state": self.monitor.state,
            },
            rank=self.process.rank,
            method_data=nf.gram_state(self.model),
        )
        if saved and self.process.rank == 0:
            if self.options.resume_from_step != "latest":
                forget_later_checkpoints(self.folder, step)  # of the run that this one left at an earlier step
            prune_checkpoints(self.folder, self.options.keep_last)
        return saved


def _loop_state(saved: Any) -> Any:
    """The loop_state of a checkpoint; that of an earlier version's base_train in the form that it has now."""
    if not isinstance(saved, dict) or "min_val_bpb" not in saved:
        return saved
    numbers = {k: saved.get(k) for k in ("val_bpb", "val_bpb_bf16") if saved.get(k) is not None}
    best = {"val_bpb": saved["min_val_bpb"]} if saved["min_val_bpb"] is not None else {}
    return {**saved, "numbers": numbers, "best": best}
