"""
A training run: one loop for all four stages. A stage is a subclass of Trainer.

    class MyStage(Trainer):
        def __init__(self, args, until_exit):
            super().__init__("mine", args, until_exit)
            ...                                     # the model, its method, its optimizers and its data, in this order:
                                                    # open_folder, adopt, convert, make_step, record
        def batches(self, position): ...            # (*batch, position) for ever, from a saved position on
        def evaluate(self, last): ...               # {"val_bpb": ...} before this step, {} if none is due
        def report(self): ...

    run_stage(args, MyStage)

A step consists of micro-batches and an update. A resumed run computes the same bits as an uninterrupted one. A
checkpoint therefore has everything that a step depends on: weights, optimizers, the position in the data, `state` and
`monitor`. The random generators are no part of it, because every micro-batch seeds them with its own number.
"""

import argparse
import contextlib
import functools
import gc
import importlib
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanochat_fp4 as nf
from nanochat_fp4.cli import BEGAN, UserError, format_seconds, is_out_of_memory, require
from nanochat_fp4.common import (
    aligned,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    mean_over_ranks,
    of_all_ranks,
    print0,
    seed_micro_batch,
    use_deterministic_kernels,
)
from nanochat_fp4.data.tokenizer import RustBPETokenizer, tokenizer_lock
from nanochat_fp4.evaluation.metrics import LossMonitor, MetricsLog
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.hardware import environment_info, get_peak_flops, peak_memory
from nanochat_fp4.locks import held_run
from nanochat_fp4.models.families import config_record
from nanochat_fp4.models.gpt import compile_layers
from nanochat_fp4.models.optim8bit import LeanState, set_state
from nanochat_fp4.nvfp4.dispatch import decide
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.heads import product_shapes
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.recipes import Recipe, to_record
from nanochat_fp4.parallel import check_parallel, full_state_dict, is_sharded, shard
from nanochat_fp4.progress import Progress
from nanochat_fp4.signals import StopRequested, StopSignals
from nanochat_fp4.training import checkpoint_manager as checkpoints
from nanochat_fp4.training import load_model as loading
from nanochat_fp4.training.memory import auto_device_batch_size, next_lever
from nanochat_fp4.training.step import Batch, TrainingStep, mean_loss
from nanochat_fp4.training.telemetry import layer_telemetry, name_nonfinite, not_finite, summarize_telemetry
from nanochat_fp4.training.wandb_run import setup_tracker

MAX_SKIPPED_IN_A_ROW = 10  # --on-nonfinite=skip stops after so many skipped updates in a row.


def run_stage(args: argparse.Namespace, make: "Callable[[argparse.Namespace, contextlib.ExitStack], Trainer]") -> None:
    """Runs a stage as a program: trains what make(args, until_exit) returns, and writes its report.

    If a signal has stopped the training, the signal determines the exit status, which is 143 after SIGTERM.
    """
    with contextlib.ExitStack() as until_exit:
        trainer = make(args, until_exit)
        if trainer.train():
            trainer.report()
    if trainer.signals.signum:
        sys.exit(128 + trainer.signals.signum)


def start_compiler(device: torch.device) -> None:
    """Starts the processes that compile kernels for torch.compile on a GPU, as its first call would do, and imports the
    compiler. The processes need seconds until they answer, which pass while the run reads its data."""
    # Kernels of this project are not launched here. Triton's launchers are modules of one name, so kernels that are
    # launched for the first time in several threads can get each other's launcher.
    if device.type == "cuda":
        with contextlib.suppress(ImportError):  # A release of torch without this function starts them later.
            from torch._inductor.async_compile import maybe_warm_pool

            maybe_warm_pool()
        importlib.import_module("torch._inductor.compile_fx")


def due(every: int, step: int, last: bool) -> bool:
    """Returns whether something that comes every `every` steps is due before `step`, or at the end of the run. It is
    never due if `every` is -1."""
    return every > 0 and (last or step % every == 0)


class Trainer:
    """A run of a stage (base, mid, sft or rl). `args` has the flags of flags.add_run_arguments and those of the stage.

    A subclass sets these attributes besides those that the methods below set:

    - tokenizer
    - rows, seq_len: the rows of a micro-batch, and the tokens of a row
    - micro_batches: the number of micro-batches of this process in a step
    - num_steps: the number of steps, or below 1 for one epoch of `conversations`
    - step_tokens: the tokens in a step of all processes, or None if steps differ in the number of tokens
    """

    model: nn.Module
    tokenizer: RustBPETokenizer
    rows: int
    seq_len: int
    micro_batches: int
    num_steps: int
    step_tokens: int | None = None
    conversations: int = 0
    ahead = True  # The next batch is made while a step computes. RL makes batches with the newest weights.
    loss: Callable[..., Tensor] = staticmethod(mean_loss)  # of (forward, *batch)
    rate_flags = "the learning rates"  # The advice after numbers that are not finite names these flags.
    eval_tokens: int | None = None  # the number of tokens that a validation reads, if it is known

    def __init__(self, stage: str, args: argparse.Namespace, until_exit: contextlib.ExitStack):
        self.stage, self.args, self.until_exit = stage, args, until_exit
        if args.orthogonalizer == "newton_schulz":
            require("muon")  # The error must come before the data are prepared, which takes long.
        # torch reads this variable when CUDA starts.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if args.deterministic:
            use_deterministic_kernels()
        until_exit.callback(compute_cleanup)
        device_type = args.device_type or autodetect_device_type()
        _, self.rank, _, self.world_size, self.device = compute_init(device_type, args.seed)
        self.signals = until_exit.enter_context(StopSignals())
        # Searching the compiler's objects, which stay alive, for garbage takes a tenth of its time.
        self.until_first_step = until_exit.enter_context(contextlib.ExitStack())
        self.until_first_step.callback(gc.set_threshold, *gc.get_threshold())
        gc.set_threshold(100 * gc.get_threshold()[0], *gc.get_threshold()[1:])
        compiled = getattr(args, "compile", False)  # SFT and RL have no such flag.
        self.compiled = self.device.type == "cuda" if compiled is None else compiled
        if self.compiled:
            start_compiler(self.device)
        self.dry_run = getattr(args, "dry_run", False)  # Only mid_train has this flag.
        # The dtype of matrix products (gpt.autocast). None stands for BF16 on a GPU.
        self.dtype = torch.float32 if getattr(args, "dtype", "") == "float32" else None
        # The dense BF16 peak of the GPU in FLOP/s, or None if it is not known.
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        self.peak_flops = get_peak_flops(gpu) if gpu else None
        self.sharded = check_parallel(args)
        self.step, self.monitor = 0, LossMonitor()
        # What a checkpoint keeps of the loop: the newest and the best results by name, before which step evaluations,
        # samples and telemetry were made (and whether as those of the last step), the part of the run that is done,
        # from 0 to 1, and the time that steps have taken.
        self.state: dict[str, Any] = {
            "numbers": {}, "best": {}, "looked": [-1, False], "progress": 0.0, "training_seconds": 0.0
        }  # fmt: skip
        self.position: Any = None  # in the data, after the last batch that was trained on
        self.meta: dict[str, Any] = {}  # what every checkpoint says of this run
        self.trained: dict[str, Any] = {}  # the metadata of the checkpoint that the weights came from
        self.start_record: dict[str, Any] = {}  # the stage's entries in the first record of metrics.jsonl
        self.source: Path | None = None  # the folder of the checkpoint that is resumed, of this run or of its branch
        self.loaded: list[Any] = []  # its weights and optimizers, until the model has them
        self.saved: tuple | None = None  # the step and state["looked"] of the newest checkpoint
        self.batch: Batch | None = None  # the batch that is trained on next; next_position is the position after it
        self.next_position: Any = None
        self.replay: list[Batch] = []  # the step's batches
        self.updating = self.made_first_step = False
        self.skipped_in_a_row = 0
        self.mfu: float | None = None
        self.telemetry: str | None = None  # the newest summary of the layers' errors
        self.environment = environment_info() if self.rank == 0 else None

    # ------------------------------------------------------------------------------------------------------------------
    # What a stage has of its own

    def batches(self, position: Any) -> Iterator:
        """An endless iterator over (*batch, position), from a saved position or None on."""
        raise NotImplementedError

    def evaluate(self, last: bool) -> dict[str, float]:
        """Returns results by name (val_bpb, mmlu_acc, ...), or {} if no evaluation is due before this step."""
        return {}

    def before_step(self, last: bool) -> None:
        """Whatever else the stage does before a step."""

    def further_numbers(self) -> Mapping[str, float]:
        """Further results of the last step, for the log."""
        return {}

    def report(self) -> None:
        """Prints the results of the run, and writes them into the report (log_report)."""

    # ------------------------------------------------------------------------------------------------------------------
    # The model and its folder

    def open_folder(self, model_tag: str, branch_from: str = "") -> None:
        """Takes the lock of the run's folder, and reads the checkpoint that is resumed, if there is one."""
        self.model_tag, self.folder = model_tag, loading.checkpoint_folder(self.stage, model_tag)
        source, step = self.folder, None
        if not self.dry_run:
            self.until_exit.enter_context(held_run(self.folder))
            if self.rank == 0:
                checkpoints.delete_remains(self.folder)
                with tokenizer_lock():  # A program that replaces the tokenizer finds this run, or ends here.
                    pass
            of_all_ranks(None)  # The others look for checkpoints when the remains of a killed save are gone.
            step = loading.find_resume_step(self.folder, self.args.resume_from_step, self.args.overwrite)
        self.starts_over = self.args.overwrite and step is None and not self.dry_run
        if step is None and branch_from:
            source, step = loading.branch_point(branch_from, self.folder)
        if step is not None:
            self.step, self.source, self.trained = step, source, checkpoints.read_meta(source, step)
            # A lean state is smaller than the FP32 weights that it was saved as, so it is made on the CPU.
            device = torch.device("cpu") if self.lean_or_fp32 == "lean" else self.device
            *self.loaded, self.trained = checkpoints.load_checkpoint(source, step, device, True, self.rank)
        self.metrics = MetricsLog(self.folder, enabled=self.rank == 0 and not self.dry_run)

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint of its own, and not from one that it branches from."""
        return self.source is not None and self.source == self.folder

    def adopt(self, model: nn.Module, tokenizer: RustBPETokenizer, settings: dict[str, Any], steps: int) -> None:
        """Gives the run a model that was made from flags. The model gets the weights of the checkpoint, if there is
        one.

        Raises UserError if the checkpoint has other settings, or if it has more than `steps` steps.
        """
        self.model, self.tokenizer = model, tokenizer
        if self.source is not None:
            where = f"checkpoint of step {self.step} in {self.source}"
            if not self.resumes:  # A branch may have another method than the run that it leaves.
                settings = {k: v for k, v in settings.items() if k not in ("method", "head", *loading.BRANCH_SETTINGS)}
            loading.check_same_run(settings, self.trained.get("run_config", {}), self.source)
            loading.load_weights(model, self.loaded.pop(0), where)
            set_state(model, self.lean_or_fp32, self.trained_with("state", "fp32"))
            model.to(self.device)
            if self.step > steps:
                raise UserError(
                    f"the {where} is beyond this run's {steps} steps; lengthen the run (--num-iterations), or begin at "
                    "an earlier step"
                )

    def trained_with(self, flag: str, default: Any = None) -> Any:
        """The value of a flag with which the weights were trained."""
        return self.trained.get("user_config", {}).get(flag) or default

    @property
    def lean_or_fp32(self) -> str:
        """The --state of the run."""
        return self.args.state or self.trained_with("state", "fp32")

    @functools.cached_property
    def lean(self) -> LeanState | None:
        """The lean optimizer state, or None without --state=lean."""
        return LeanState(self.model, self.args.seed) if self.lean_or_fp32 == "lean" else None

    # ------------------------------------------------------------------------------------------------------------------
    # From the model to a step

    def convert(self, method: str, recipe: Recipe | str, plan: MethodPlan | None = None, **options: Any) -> None:
        """Gives the layers the recipe. `plan` says which methods follow each other in the run. `options` are further
        arguments of nf.convert."""
        self.method, self.plan = method, plan
        if self.device.type == "cuda":
            decide(self.device.type, product_shapes(self.model, self.model.config.sequence_len))
        nf.convert(self.model, recipe, per_token_in_eval=False, **options)
        self.flops_per_token = self.model.estimate_flops()
        # The layers get the method of the step before. train_step changes it after the evaluation before a step.
        self.change_method(max(self.step - 1, 0))

    def change_method(self, step: int) -> bool:
        """Gives the layers their methods for this step. Returns whether any changed."""
        return self.plan is not None and self.plan.apply(self.model, step / self.num_steps)

    def make_step(self, setup: Callable[[], tuple], kind: type[TrainingStep] = TrainingStep) -> None:
        """Spreads the weights over the processes under --parallel=fsdp, and makes training_step, an object of `kind`,
        which is TrainingStep or a subclass. setup() returns the optimizers and the schedule of the model."""
        if self.sharded:
            shard(self.model, torch.bfloat16 if self.device.type == "cuda" and self.dtype is None else None)
        forward = compile_layers(self.model) if self.compiled else self.model
        optimizers, self.schedule = setup()
        how = self.dtype, self.loss, self.lean
        self.training_step = kind(self.model, optimizers, forward, *how)

    def record(
        self, settings: dict[str, Any], recipes: Sequence[Recipe], changes: dict[str, Any], **metadata: Any
    ) -> None:
        """Sets the metadata that every checkpoint of this run will have.

        - settings decide the bits of the run, so a resumed run must have the same ones.
        - changes are values beside those of the flags, or in their place, such as the one for --device-batch-size=auto.
          A resumed run may have others, as it may have other values of flags, with a note that names the change.
        - metadata are further entries.
        """
        spread = {"world_size": self.world_size, "head": self.model.lm_head.precision, "method": self.method}
        self.meta = {
            "model_config": config_record(self.model.config),  # the arguments of the model's class, nanochat's names
            "run_config": settings,
            "user_config": {**vars(self.args), **spread, **changes},
            "recipes": [to_record(recipe) for recipe in dict.fromkeys(recipes)],
            "commit": self.environment and self.environment["commit"],
            **metadata,
        }

    # ------------------------------------------------------------------------------------------------------------------
    # The loop

    def train(self) -> bool:
        """Trains until the end of the run or until a signal. Returns whether the end was reached.

        Raises UserError if the run cannot go on, because numbers are not finite, or because memory or the disk is full.
        """
        self.begin()
        while True:
            last = self.state["progress"] >= 1
            stopping = self.signals.received(self.device)
            if not stopping:
                try:
                    self.look(last)
                except StopRequested:
                    stopping = True
            end = last or stopping
            is_due = due(self.args.save_every, self.step, False) or self.step in self.args.save_at
            if end or (self.step > 0 and is_due):
                saved = self.save()
                if end and not saved:
                    raise UserError(
                        f"step {self.step} could not be saved (see the warning above); free some disk space and go on "
                        "from the checkpoint before it with --resume-from-step latest"
                    )
            if end:
                break
            self.train_step()
        self.progress.close()
        self.tracker.finish()
        if stopping:
            of_total = "" if self.by_epoch else f" of {self.num_steps}"
            name = signal.Signals(self.signals.signum).name
            print0(f"{name}: stopped at step {self.step}{of_total}, saved in {self.folder}")
            if self.args.resume_from_step != "latest":  # With latest, the same command resumes the run.
                print0("go on with: --resume-from-step latest")
        return not stopping

    def begin(self) -> None:
        """Does everything that comes before the first step. --overwrite deletes the old run as late as possible, when
        nothing can refuse the new run any more."""
        if self.source is not None:
            self.restore()
        if not self.by_epoch:
            self.state["progress"] = self.step / self.num_steps
        self.loader, finished = self.batches(self.position), self.state["progress"] >= 1
        if not finished and self.ahead:
            self.fetch()
        project = "nanochat" if self.stage == "base" else f"nanochat-{self.stage}"
        if not self.dry_run:
            loading.check_disk(self.folder, self.model, self.starts_over)
        self.tracker = setup_tracker(self.args.run, project, self.meta["user_config"])
        if self.starts_over:
            others = checkpoints.delete_run(self.folder) if self.rank == 0 else []
            of_all_ranks(None)
            if others:
                print0(f"note: {self.folder} has files that no run wrote, which stay: {', '.join(others[:5])}")
        undone = () if self.looked_before(finished) else ("val", "core", "sample", "telemetry")
        self.metrics.rewind(self.step if self.resumes else None, undone)
        record = {
            "stage": self.stage, "method": self.method, "num_iterations": self.num_steps, "backend": str(nf.backend()),
            "world_size": self.world_size, "config": self.meta["user_config"], "environment": self.environment,
        }  # fmt: skip
        self.metrics.append("start", self.step, **record | self.start_record)
        self.progress = Progress(
            total=None if self.by_epoch else self.num_steps,
            desc="train" if self.stage == "base" else self.stage,
            unit="step",
            initial=self.step,
        )
        self.until_exit.callback(self.progress.close)  # before the message of an error
        self.begun = time.monotonic()

    def restore(self) -> None:
        """Restores optimizers, data position, loop and loss monitor. The model has its weights already, because they
        must be there before the layers are converted and the weights divided."""
        parts = self.loaded.pop()
        loading.restore_optimizers(self.training_step.optimizers, parts, self.trained, self.source)
        self.position = loading.position_of(parts)
        if self.trained["loop_state"].keys() != self.state.keys():
            raise UserError(
                f"the run in {self.folder} is of another release, whose loop had another state; finish it with that "
                "release, or begin a new run with another --model-tag"
            )
        self.state, self.monitor = {**self.trained["loop_state"]}, LossMonitor(self.trained["loss_state"])
        self.saved = (self.step, self.state["looked"]) if self.resumes else None
        branch = "" if self.resumes else f" of {self.source.name}"
        print0(f"Resuming from step {self.step}{branch}")
        for change in loading.changed_settings(self.trained, self.meta):
            print0(f"  note: {change}")

    @property
    def by_epoch(self) -> bool:
        """Whether the length of the run is one epoch."""
        return self.num_steps < 1

    def looked_before(self, last: bool) -> bool:
        """Whether evaluations, samples and telemetry of this step were made by the process that saved the
        checkpoint."""
        return self.state["looked"] in ([self.step, last], [self.step, True])

    def fetch(self) -> None:
        """Makes the next batch on the CPU while the GPU computes. self.position stays that of the batch before."""
        *batch, self.next_position = next(self.loader)
        self.batch = tuple(batch)

    def save(self) -> bool:
        """Saves a checkpoint, and returns whether all of it is on the disk. All processes must call this function
        together. Raises UserError if a weight or a moment is not finite."""
        # A step can have been saved before its last evaluation, because of a signal. It is then saved again.
        now = self.step, self.state["looked"]
        if self.dry_run or now == self.saved:
            return True
        optimizers = [optimizer.state_dict() for optimizer in self.training_step.optimizers]
        of_rank = {"optimizers": optimizers, "dataloader": self.position}
        loop = {"loop_state": self.state, "loss_state": self.monitor.state}
        weights = full_state_dict(self.model)
        bad_here = next(not_finite({"weight": weights, **of_rank}), None)
        if bad := next(filter(None, of_all_ranks(bad_here)), None):
            raise self.lost(f"step {self.step}: {bad} is not finite, so nothing is saved")
        meta = self.state["numbers"] | self.meta | loop
        if not checkpoints.save_checkpoint(self.folder, self.step, weights, of_rank, meta, self.rank):
            return False
        self.saved = now
        if self.rank == 0:
            # Later checkpoints belong to a run that was resumed from an earlier step. 'latest' must not find them.
            forget_later = self.args.resume_from_step != "latest"
            checkpoints.prune_checkpoints(self.folder, self.args.keep_last, self.step, forget_later)
        return True

    def lost(self, problem: str) -> UserError:
        """Returns the error that ends a run whose weights are not finite any more."""
        good = checkpoints.list_steps(self.folder)[:1]
        remedy = f"go on from the newest checkpoint, --resume-from-step {good[0]}" if good else "start over"
        return UserError(f"{problem}. No step can follow; lower {self.rate_flags} and {remedy}")

    # ------------------------------------------------------------------------------------------------------------------
    # A step

    def train_step(self) -> None:
        """Attempts one optimizer step. If numbers of the step are not finite, the step updates nothing."""
        if self.change_method(self.step):
            self.progress.write(f"step {self.step:05d} | from here on {self.plan.at(self.step / self.num_steps)}")
            if self.compiled:
                torch._dynamo.reset()  # Recipes are constants of compiled code.
        self.replay, self.updating, numbers = [], False, None
        self.training_step.synchronize()
        began = time.monotonic()
        try:
            numbers = self.optimize()
        except Exception as e:
            if not is_out_of_memory(e) or self.world_size > 1:
                raise
        # Outside of the except block the exception is gone, and with it the frames that keep the activations.
        if numbers is None:
            raise self.out_of_memory()
        self.training_step.synchronize()
        now = time.monotonic()
        shown = self.log(numbers, now - began) if numbers else {}
        self.step += 1
        self.progress.update(1, **shown)
        if not self.made_first_step:
            self.made_first_step = True
            self.until_first_step.close()
            evaluation = began - self.begun
            line = f"time to the first step: {now - BEGAN - evaluation:.1f} s"
            self.progress.write(line + f"; evaluation before it: {evaluation:.1f} s" * (evaluation >= 0.1))

    def optimize(self) -> dict[str, float]:
        """Computes the micro-batches. Updates the weights if all numbers of all processes are finite, and returns the
        numbers of the step for the log. Otherwise the result is empty.

        If this method raises an exception, `position` is still that before the step."""
        parts, count = self.training_step, self.micro_batches
        losses, tokens = [], 0
        with parts.micro_batches(count, self.step):
            for i in range(count):
                self.seed(i)
                if not self.ahead:
                    self.fetch()
                batch, position = self.batch, self.next_position
                self.replay.append(batch)
                losses.append(parts.micro_batch(*batch, count=count))
                tokens = tokens + (batch[1] >= 0).sum()
                if self.ahead:
                    self.fetch()
        grad_norm = self.model.clip_gradients()
        loss = torch.stack(losses).mean()
        bad = ~(torch.isfinite(loss) & torch.isfinite(grad_norm))
        consumed = torch.full_like(loss, position.get("consumed", 0))
        shared = mean_over_ranks(torch.stack([loss, bad.float(), tokens.float(), consumed])).tolist()
        tokens, consumed = (round(number * self.world_size) for number in shared[2:])
        numbers = {}
        if shared[1] > 0:
            self.skip(shared[0], bool(bad))
        else:
            rate = self.schedule(self.step, self.state["progress"])
            self.updating = True  # The flag stays set to the end of the step.
            parts.update()
            self.skipped_in_a_row = 0
            numbers = {"loss": shared[0], "lrm": rate, "grad_norm": float(grad_norm)}
            numbers["tokens"] = self.step_tokens or tokens
        self.position = position
        self.state["progress"] = consumed / self.conversations if self.by_epoch else (self.step + 1) / self.num_steps
        return numbers

    def seed(self, micro_batch: int) -> None:
        """Seeds the random generators for a micro-batch of this process in this step."""
        # Rank r has the micro-batches r, r + world size, ... of the step (data/dataloader.py).
        seed_micro_batch(self.args.seed, self.step, micro_batch * self.world_size + self.rank)

    # ------------------------------------------------------------------------------------------------------------------
    # Before a step

    def look(self, last: bool) -> None:
        """Evaluates, draws samples and measures the layers, if they are due. Raises StopRequested after a signal."""
        if not self.looked_before(last):
            if numbers := self.evaluate(last):
                self.take_evaluation(numbers)
            self.before_step(last)
            if not last and due(self.args.telemetry_every, self.step, last) and groups_of(self.model):
                self.measure_layers()
            self.state["looked"] = [self.step, last]

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which the model evaluates."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def take_evaluation(self, numbers: dict[str, float]) -> None:
        """Keeps the newest and the best results, and logs them. Raises UserError for a number that is not finite."""
        if bad := [f"{k} is {v}" for k, v in numbers.items() if not math.isfinite(v)]:
            raise self.lost(f"step {self.step}: {bad[0]}")
        best = self.state["best"]
        for key, value in numbers.items():
            better = min if "loss" in key or "bpb" in key else max
            best[key] = better(best.get(key, value), value)
        self.state["numbers"] |= numbers
        self.progress.write(f"step {self.step:05d} | " + ", ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
        named = {key.removeprefix("val_"): value for key, value in numbers.items()}
        tokens = {"tokens": self.eval_tokens} if self.eval_tokens else {}
        self.metrics.append("val", self.step, **named, **tokens)
        self.track("val", named)

    def forward_backward(self, batch: Batch, micro_batch: int = 0) -> None:
        """Computes a pass with a micro-batch's random numbers, without the compiler. It changes nothing but
        gradients."""
        self.seed(micro_batch)
        with self.training_step.autocast():
            self.training_step.loss(self.model, *batch).backward()

    def measure_layers(self) -> None:
        """Measures the quantization error of every layer on the first row of the next batch."""
        if not self.batch:
            return
        batch = tuple(part[:1] for part in self.batch)
        telemetry = layer_telemetry(self.model, lambda: self.forward_backward(batch))
        self.telemetry = f"step {self.step}: {summarize_telemetry(telemetry)}"
        self.progress.write(self.telemetry)
        self.metrics.append("telemetry", self.step, layers=telemetry)
        self.track("within layers", {f"{n}/{k}": v for n, t in telemetry.items() for k, v in t.items()})

    # ------------------------------------------------------------------------------------------------------------------
    # After a step

    def skip(self, loss: float, bad_here: bool) -> None:
        """Names the layer with the first number of a step that is not finite. Raises UserError unless such steps may be
        skipped. A step is never skipped because of a weight, which the next step would have again."""
        if is_sharded(self.model):  # A process that has a shard of the weights cannot compute the step again by itself.
            place = "a process that shares the weights; --parallel=ddp names the layer"
        else:
            places = enumerate(of_all_ranks(self.first_bad_layer() if bad_here else None))
            place = min((p.startswith("the loss itself"), r, f"{p} (rank {r})") for r, p in places if p)[2]
        self.model.zero_grad(set_to_none=True)
        problem = f"step {self.step}: loss {loss:.4g}, first not finite: {place}"
        self.skipped_in_a_row += 1
        self.metrics.append("skip", self.step, place=place, loss=str(loss))
        if place.startswith("weight of"):
            raise self.lost(problem)
        if self.args.on_nonfinite == "stop" or self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self.save()
            raise UserError(
                f"{problem}. Saved as it was before this step in {self.folder}; lower {self.rate_flags} and start "
                "over, or skip such steps: --resume-from-step latest --on-nonfinite skip"
            )
        self.monitor.state["skipped"] += 1
        self.progress.write(f"warning: {problem}; update skipped")

    def first_bad_layer(self) -> str:
        """Computes the micro-batches of the step again, and returns the source of the first number that is not
        finite."""
        self.training_step.drop_graphs()  # A pass without graphs needs the memory of their activations.
        for again in (functools.partial(self.forward_backward, batch, i) for i, batch in enumerate(self.replay)):
            place = name_nonfinite(self.model, again)
            if not place.startswith("the loss itself"):
                break
        return place

    def log(self, numbers: dict[str, Any], seconds: float) -> dict[str, str]:
        """Writes the numbers of a step to metrics.jsonl and to the tracker. Returns those beside the progress bar."""
        average, loss = self.monitor.state["mean"], numbers["loss"]
        if self.monitor.update(loss):
            self.progress.write(f"warning: step {self.step}: loss {loss:.4f} is a spike (average {average:.4f})")
            self.metrics.append("spike", self.step, loss=loss, average=average)
        self.state["training_seconds"] += seconds
        speed, further = numbers["tokens"] / seconds, self.further_numbers()
        if self.peak_flops and self.step_tokens:
            self.mfu = 100 * self.flops_per_token * speed / (self.peak_flops * self.world_size)
        smoothed, progress = self.monitor.smoothed, self.state["progress"]
        numbers = {**numbers, **further, "dt": seconds, "tok_per_sec": speed, "mfu": self.mfu}
        self.metrics.append("train", self.step, **numbers, smoothed_loss=smoothed, progress=progress)
        if self.step % 10 == 0:
            numbers |= {"loss": smoothed} | {k: self.monitor.state[k] for k in ("spikes", "skipped")}
            self.track("train", numbers | {"peak_memory_mib": peak_memory(self.device) / 2**20})
        shown = {"loss": f"{smoothed:.4f}", "lrm": f"{numbers['lrm']:.2f}"}
        shown |= {key: f"{value:.4g}" for key, value in further.items()} | {"tok/s": f"{speed:,.0f}"}
        if self.mfu is not None:
            shown["mfu"] = f"{self.mfu:.1f}%"
        if self.by_epoch:
            shown["epoch"] = f"{100 * progress:.1f}%"
        return shown

    def track(self, event: str, numbers: dict[str, Any]) -> None:
        """Logs numbers to wandb. Their names are nanochat's and the same in every stage: train/loss,
        val/bpb, ..."""
        values = {f"{event}/{key}": value for key, value in numbers.items() if value is not None}
        if self.step_tokens:
            values["total_training_tokens"] = self.step_tokens * self.step
            values["total_training_flops"] = self.flops_per_token * self.step_tokens * self.step
        values["total_training_time"] = self.state["training_seconds"]
        self.tracker.log({"step": self.step, **values}, step=self.step)

    def out_of_memory(self) -> UserError:
        """Saves the run if possible. Returns the error that ends the run, which names the micro-batch that fits."""
        self.replay, self.batch = [], None
        graphed = self.training_step.drop_graphs()
        self.model.zero_grad(set_to_none=True)
        # In the middle of an update, only some of the weights may be updated.
        saved, rows = not self.updating and self.save(), self.rows
        try:
            fitting_rows = auto_device_batch_size(
                self.model, rows * self.micro_batches, self.seq_len, self.training_step.dtype, below=rows + graphed
            )
            size = "no-cuda-graph" if fitting_rows == rows else f"device-batch-size={fitting_rows}"
            advice = f"--{size} fits (the batch of a step stays the same)"
        except UserError:
            advice = "no smaller batch fits either"
        lever = next_lever(self.model, rows, self.seq_len)
        advice += f"; by count, {lever}" if lever else ""
        go_on = f"; {self.folder} goes on with it ({self.stage.upper()}_ARGS, --resume-from-step latest)" * saved
        # The rows of a micro-batch are padded to one length, so the micro-batch's size decides the bits.
        if self.stage in ("sft", "rl"):
            go_on = "; start over with it and --overwrite"
        return UserError(f"out of memory at step {self.step} with --device-batch-size={rows}; {advice}{go_on}")

    # ------------------------------------------------------------------------------------------------------------------
    # The report

    def log_report(self, section: str, about: dict[str, Any], outcome: dict[str, Any]) -> None:
        """Prints the outcome of the run, and writes it together with `about` into the report under `section`."""
        done_before = self.resumes and self.trained["loop_state"]["looked"] == [self.step, True]
        if done_before:
            print0(f"Nothing to do: {self.model_tag} is through this stage ({self.step} steps)")
        outcome = outcome | {
            "Number of iterations": self.step,
            "DDP world size": self.world_size,
            "Training time": format_seconds(self.state["training_seconds"]),
            "Peak memory usage": f"{peak_memory(self.device) / 2**20:.2f}MiB" if self.device.type == "cuda" else None,
            "Training loss (smoothed)": self.monitor.smoothed,
            "Loss spikes": self.monitor.state["spikes"],
            "Skipped updates": self.monitor.state["skipped"],
            "Quantization error": self.telemetry,
        }
        outcome = {k: v for k, v in outcome.items() if v is not None}
        print0(aligned({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in outcome.items()}))
        report = get_report(self.model_tag)
        # Otherwise the run was killed before it could report.
        if self.dry_run or (done_before and report.path(section).exists()):
            return
        report.log(section, [about | outcome])
