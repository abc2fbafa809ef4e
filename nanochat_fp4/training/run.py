"""
A training run. All four stages build a Run in the same order, and then call loop.train.

    run = Run("mid", args, process)         # refuses flags that exclude each other
    run.begin_with_model_of("base")         # locks the folder; loads the run's own checkpoint, or the base model
    run.convert(...)                        # gives the layers their QAT method
    run.divide(compiled)                    # spreads the weights over the processes, and compiles
    run.make_step(optimizers, schedule)
    run.record_settings(settings, ...)      # what a checkpoint says of the run; a resume must have the same settings
    run.size, run.data, run.evaluation = ...
    finished = loop.train(run)

base_train makes its model from flags. It calls open_folder and adopt instead of begin_with_model_of.
"""

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError, require
from nanochat_fp4.common import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    print0,
    resolve_method,
    use_deterministic_kernels,
)
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.evaluation.metrics import LossMonitor, MetricsLog
from nanochat_fp4.hardware import environment_info, get_peak_flops
from nanochat_fp4.locks import held_run
from nanochat_fp4.models.families import config_record, recompute_problem
from nanochat_fp4.models.gpt import RECOMPUTE, compile_layers
from nanochat_fp4.models.optim import ORTHOGONALIZERS, Schedule
from nanochat_fp4.models.optim8bit import LeanState, set_state
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.quantized_training import QuantizedTraining
from nanochat_fp4.nvfp4.recipes import Recipe, to_record
from nanochat_fp4.parallel import check_parallel, shard
from nanochat_fp4.progress import Progress
from nanochat_fp4.signals import StopSignals
from nanochat_fp4.training.checkpoint import Checkpoint, LoopState, Metadata
from nanochat_fp4.training.checkpoint_manager import weights_digest
from nanochat_fp4.training.flags import BRANCH_SETTINGS
from nanochat_fp4.training.load_model import (
    checkpoint_folder,
    find_model_tag,
    load_model,
    load_weights,
    model_of,
    register_recipes,
)
from nanochat_fp4.training.resume import (
    branch_point,
    changed_settings,
    check_same_run,
    check_tokenizer,
    check_writable,
    find_resume_step,
    restore_position,
    restore_state,
    restored,
    save_bytes,
    starts_over,
)
from nanochat_fp4.training.startup import Phases, rare_collections
from nanochat_fp4.training.step import Attempt, Batch, TrainingStep


@dataclass(frozen=True)
class Process:
    """One process of a run, and the contexts that it has entered.

    - until_exit is closed at exit. It has the lock of the run's folder.
    - until_first_step is closed after the first step.
    - phases are the parts of the time to the first step.
    """

    device: torch.device
    rank: int
    world_size: int
    signals: StopSignals
    until_exit: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    until_first_step: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    phases: Phases = field(default_factory=Phases)


def run_stage(args: argparse.Namespace, train: Callable[[Process], None]) -> None:
    """Runs a stage as a program. Joins torchrun's process group if there is one, and calls train(process).

    If a signal has stopped the training, the signal determines the exit status, which is 143 after SIGTERM.
    """
    phases = Phases()
    if args.orthogonalizer == "newton_schulz":
        require("muon")  # The error must come before the data are prepared, which takes long.
    # torch reads this variable when CUDA starts.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if args.deterministic:
        use_deterministic_kernels()
    _, rank, _, world_size, device = compute_init(args.device_type or autodetect_device_type(), args.seed)
    try:
        with contextlib.ExitStack() as until_exit, StopSignals() as signals, contextlib.ExitStack() as until_first_step:
            until_first_step.enter_context(rare_collections())
            train(Process(device, rank, world_size, signals, until_exit, until_first_step, phases))
    finally:
        compute_cleanup()
    if signals.exit_code:
        sys.exit(signals.exit_code)


@dataclass(frozen=True)
class Size:
    """The size of a step and of the run.

    - rows are the rows of a micro-batch.
    - seq_len is the number of tokens in a row.
    - micro_batches counts the micro-batches of this process in a step.
    - steps is the number of steps. If it is below 1, the run is one epoch of Data.conversations.
    - tokens are the tokens in a step of all processes, or None if steps differ in the number of tokens.
    """

    rows: int
    seq_len: int
    micro_batches: int
    steps: int
    tokens: int | None = None


@dataclass(frozen=True)
class Data:
    """The source of the batches.

    - make_loader takes a saved position or None, and returns an endless iterator over (*batch, position).
    - conversations is the number of conversations in an epoch, for a run whose length is an epoch.
    - ahead says whether the next batch is made while a step computes. It is False for RL, which makes batches with the
      newest weights.
    """

    make_loader: Callable[[Any], Iterator]
    conversations: int = 0
    ahead: bool = True


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of a run.

    - measure takes (step, whether it is the last one), and returns results by name: val_bpb, mmlu_acc, ...
    - due takes the same, and says whether an evaluation comes before this step.
    - tokens is the number of tokens that a validation reads, if it is known.
    """

    measure: Callable[[int, bool], dict[str, float]]
    due: Callable[[int, bool], bool]
    tokens: int | None = None


def due(every: int, step: int, last: bool) -> bool:
    """Returns whether something that comes every `every` steps is due before `step`, or at the end of the run. It is
    never due if `every` is -1."""
    return every > 0 and (last or step % every == 0)


class Run:
    """One run of a stage (base, mid, sft or rl). `args` has the flags of flags.add_run_arguments and those of the
    stage."""

    # The calls that the module's docstring lists set these attributes.
    model: nn.Module
    tokenizer: RustBPETokenizer
    folder: Path
    model_tag: str
    method: str
    quantized: QuantizedTraining
    training_step: TrainingStep
    schedule: Schedule
    size: Size
    data: Data
    evaluation: Evaluation
    meta: Metadata
    progress: Progress
    loader: Iterator

    def __init__(self, stage: str, args: argparse.Namespace, process: Process):
        self.stage, self.args, self.process, self.device = stage, args, process, process.device
        self.dry_run = getattr(args, "dry_run", False)  # Only mid_train has this flag.
        if stage == "rl" and args.parallel != "ddp":
            raise UserError("reinforcement learning generates on each process by itself; leave --parallel out")
        self.sharded = check_parallel(args)
        # The checkpoint that is resumed, of this run or of the run that it branches from.
        self.checkpoint: Checkpoint | None = None
        # The metadata of the checkpoint that the weights came from, which is one of this run or of the stage before.
        self.trained = Metadata()
        self.parent: dict[str, Any] = {}  # A description of the model that the run began with.
        # The loop calls these functions before and after each step. A stage may add functions of its own.
        self.before_step: list[Callable[[Run, bool], None]] = []
        self.after_step: list[Callable[[Run, Attempt], None]] = []
        self.numbers: Callable[[], Mapping[str, float]] = dict  # Returns further results of the last step.
        self.rate_flags = "the learning rates"  # The advice after numbers that are not finite names these flags.
        self.start_record: dict[str, Any] = {}  # The stage's entries in the first record of metrics.jsonl.
        # A checkpoint keeps this state besides weights and optimizers.
        self.step = 0
        self.loop = LoopState()
        self.monitor = LossMonitor()
        self.position: Any = None  # The position of the data loader after the last batch that was trained on.
        # The following state belongs to this process alone.
        self.saved_step: int | None = None  # The step of the newest checkpoint in the folder.
        self.saved_looked_at = -1  # The value of LoopState.looked_at in this checkpoint.
        self.batch: Batch | None = None  # The batch that is trained on next. next_position is the position after it.
        self.next_position: Any = None
        self.updating = self.made_first_step = self.warned_of_repetition = False
        self.skipped_in_a_row = 0
        self.tokens_per_second: float | None = None
        self.mfu: float | None = None
        self.telemetry: str | None = None  # The newest summary of the layers' errors.
        self.gemms: Any = None
        self.tracker: Any = None
        self.environment = environment_info() if process.rank == 0 else None
        self.evaluated_before = -1  # The step of the last evaluation before the checkpoint that is resumed.

    # ------------------------------------------------------------------------------------------------------------------
    # The model and its folder

    def open_folder(self, model_tag: str, branch_from: str = "") -> None:
        """Takes the lock of the run's folder, and reads the checkpoint that is resumed, if there is one."""
        args, process = self.args, self.process
        self.model_tag, self.folder = model_tag, checkpoint_folder(self.stage, model_tag)
        branch = branch_point(branch_from, self.folder) if branch_from else None
        source, step = self.folder, None
        if not self.dry_run:
            process.until_exit.enter_context(held_run(self.folder))
            step = find_resume_step(self.folder, args.resume_from_step, args.overwrite)
        if step is None and branch:
            source, step = branch
        if step is not None:
            lean = (args.state or Metadata.read(source, step).state) == "lean"
            self.checkpoint = Checkpoint.load(source, step, torch.device("cpu") if lean else self.device, process.rank)
            self.trained, self.step = self.checkpoint.meta, step
        self.saved_step = self.resumed_step
        self.metrics = MetricsLog(self.folder, enabled=process.rank == 0 and not self.dry_run)

    @property
    def resumed_step(self) -> int | None:
        """The step of this run's own checkpoint that is resumed. It is None for a new run and for a run that
        branches from another."""
        is_own = self.checkpoint is not None and self.checkpoint.folder == self.folder
        return self.checkpoint.step if is_own and self.checkpoint else None

    def adopt(self, model: nn.Module, tokenizer: RustBPETokenizer, settings: dict[str, Any], steps: int) -> None:
        """Gives the run a model that was made from flags. The model gets the weights of the checkpoint, if there is
        one.

        Raises UserError if the checkpoint has other settings, or if it has more than `steps` steps.
        """
        self.model, self.tokenizer = model, tokenizer
        check_tokenizer(tokenizer.fingerprint())
        if (checkpoint := self.checkpoint) is not None:
            where = f"checkpoint of step {checkpoint.step} in {checkpoint.folder}"
            if self.resumed_step is not None:
                register_recipes(checkpoint.meta, where)
            else:  # A branch may have another method than the run that it leaves.
                settings = {k: v for k, v in settings.items() if k not in ("method", "head", *BRANCH_SETTINGS)}
            check_same_run(settings, checkpoint.meta.run_config, checkpoint.folder)
            load_weights(model, checkpoint.weights, checkpoint.folder, checkpoint.step)
            # The model has the weights now. Another reference would keep them in memory twice after a change of dtype.
            checkpoint.weights = None
            set_state(model, self.state, checkpoint.meta.state)
            model.to(self.device)
            if checkpoint.step > steps:
                raise UserError(
                    f"the {where} is beyond this run's {steps} steps; lengthen the run (--num-iterations), or begin at "
                    "an earlier step"
                )
        check_writable(self.folder, save_bytes(model), self.args.overwrite)

    def begin_with_model_of(self, source: str) -> None:
        """Loads the run's own checkpoint, or the model of the stage `source` if no checkpoint is resumed.

        Raises UserError if the model of `source` was trained again after this run had begun with it.
        """
        args = self.args
        self.open_folder(find_model_tag(source, None) if args.model_tag is None else args.model_tag)
        folder = checkpoint_folder(source, self.model_tag)
        if (checkpoint := self.checkpoint) is None:
            loaded = load_model(source, self.device, "train", self.model_tag, args.model_step)
            self.model, self.tokenizer, self.trained = loaded
            tag = {"stage": source, "model_tag": self.model_tag, "step": self.trained.step}
            self.parent = {**tag, "weights_sha256": weights_digest(folder, self.trained.step)}
        else:
            self.model, self.tokenizer = model_of(
                checkpoint.weights, checkpoint.meta, checkpoint.folder, checkpoint.step, self.device, "train"
            )
            self.parent, checkpoint.weights = checkpoint.meta.parent, None  # The model has the weights now.
            before, now = self.parent.get("weights_sha256"), weights_digest(folder, self.parent.get("step"))
            if before is not None and now is not None and before != now:
                raise UserError(
                    f"the run in {self.folder} began with another {source} model than {self.model_tag} is now; start "
                    "it over with --overwrite"
                )
        set_state(self.model, self.state, self.trained.state)
        self.model.recompute = self.wanted_recompute(args.recompute)
        if not self.dry_run:
            check_tokenizer(self.tokenizer.fingerprint())
            check_writable(self.folder, save_bytes(self.model), starts_over(args.resume_from_step, args.overwrite))

    # ------------------------------------------------------------------------------------------------------------------
    # Settings that a flag gives, or else the checkpoint that the model came from

    @property
    def state(self) -> str:
        return self.args.state or self.trained.state

    @property
    def orthogonalizer(self) -> str:
        trained = self.trained.user_config.get("orthogonalizer")
        return self.args.orthogonalizer or (trained if trained in ORTHOGONALIZERS else "polar_express")

    def wanted_recompute(self, flag: str | None) -> str:
        """Returns `flag`, the value of --recompute, or else the setting that the model was trained with. Raises
        UserError if this machine cannot do what the flag asks for. If it cannot do what the model was trained with, the
        result is "none"."""
        recompute = flag or self.trained.user_config.get("recompute")
        recompute = recompute if recompute in RECOMPUTE else "none"
        if reason := recompute_problem(recompute, self.model.config, self.device):
            if flag:
                raise UserError(f"--recompute={flag}: {reason}")
            print0(f"note: the model was trained with --recompute={recompute}, which is not used here: {reason}")
            return "none"
        return recompute

    def method_of_model(self) -> str:
        """Returns the method of --method, or else the one that the model was trained with. A resumed run must have
        the method that it had before."""
        method = resolve_method(self.args.method or self.trained.user_config.get("method") or "bf16")
        variable = os.environ.get("QAT_METHOD")
        if variable and not self.args.method and resolve_method(None) != method:
            print0(f"note: the model was trained with {method}, so QAT_METHOD={variable} is not used (--method is)")
        return method

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of matrix products (gpt.autocast). None stands for BF16 on a GPU."""
        return torch.float32 if getattr(self.args, "dtype", "") == "float32" else None

    @functools.cached_property
    def lean(self) -> LeanState | None:
        """The lean optimizer state, or None without --state=lean."""
        return LeanState(self.model, self.args.seed) if self.state == "lean" else None

    # ------------------------------------------------------------------------------------------------------------------
    # From the model to a step

    def convert(
        self, method: str, recipe: Recipe | str, plan: MethodPlan | None = None, steps: int = 0, **options: Any
    ) -> None:
        """Gives the layers the recipe. `plan` says which methods follow each other in a run of so many steps.
        `options` are further arguments of nf.convert."""
        self.method = method
        nf.convert(self.model, recipe, per_token_in_eval=False, **options)
        self.quantized = QuantizedTraining(self.model, plan, steps)
        # The layers get the method of the step before. train_step changes it after the functions of before_step have
        # run.
        self.quantized.set_progress(max(self.step - 1, 0))

    def divide(self, compiled: bool) -> None:
        """Spreads the weights over the processes under --parallel=fsdp. Sets the forward pass for training, compiled
        or not."""
        if self.sharded:
            shard(self.model, torch.bfloat16 if self.device.type == "cuda" and self.dtype is None else None)
        self.forward = compile_layers(self.model) if compiled else self.model

    def make_step(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        schedule: Schedule,
        kind: type[TrainingStep] = TrainingStep,
        **loss: Any,
    ) -> None:
        """Makes training_step, an object of `kind`, which is TrainingStep or a subclass. If the stage has another
        loss than the model's, `loss` is the argument of this name."""
        self.schedule = schedule
        self.training_step = kind(
            self.model, optimizers, self.forward, self.quantized, self.dtype, lean=self.lean, **loss
        )

    def record_settings(
        self, settings: dict[str, Any], recipes: Sequence[Recipe], changes: dict[str, Any], **metadata: Any
    ) -> None:
        """Sets the metadata that every checkpoint of this run will have.

        - settings decide the bits of the run, so a resumed run must have the same ones.
        - changes are values that took the place of flags' values, such as the one for --device-batch-size=auto.
        - metadata are further arguments of Metadata.of_run.

        Raises UserError if the checkpoint that is resumed has other settings.
        """
        if self.resumed_step is not None and self.checkpoint:
            check_same_run(settings, self.checkpoint.meta.run_config, self.folder)
        spread = {"world_size": self.process.world_size, "parallel": self.args.parallel}
        self.meta = Metadata.of_run(
            model_config=config_record(self.model.config),
            run_config=settings,
            tunable=spread | metadata.pop("tunable", {}),
            user_config={**vars(self.args), "method": self.method, **changes},
            recipes=[to_record(recipe) for recipe in dict.fromkeys(recipes)],
            commit=self.environment and self.environment["commit"],
            **metadata,
        )

    def restore(self) -> None:
        """Restores the state from the checkpoint that is resumed: optimizers, random generators, data position, loop
        and loss monitor.

        The model has its weights already, because they must be there before the layers are converted and the weights
        divided.
        """
        if (checkpoint := self.checkpoint) is None:
            return
        restore_state(self.training_step.optimizers, checkpoint, self.device)
        self.position = restore_position(checkpoint)
        self.loop = LoopState(
            **restored(asdict(self.loop), checkpoint.meta.loop_state, "loop_state", checkpoint.folder)
        )
        self.evaluated_before = self.loop.evaluated_at
        self.saved_looked_at = self.loop.looked_at
        self.monitor = LossMonitor(
            restored(self.monitor.state, checkpoint.meta.loss_state, "loss_state", checkpoint.folder)
        )
        checkpoint.forget()
        branch = f" of {checkpoint.folder.name}" if self.resumed_step is None else ""
        print0(f"Resuming from step {self.step}{branch}")
        for change in changed_settings(checkpoint.meta, self.meta):
            print0(f"  note: {change}")

    # ------------------------------------------------------------------------------------------------------------------
    # In the loop

    @property
    def by_epoch(self) -> bool:
        """Whether the length of the run is one epoch."""
        return self.size.steps < 1

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end."""
        return self.loop.progress >= 1 if self.by_epoch else self.step >= self.size.steps

    @property
    def before_step_is_done(self) -> bool:
        """Whether the functions of before_step have already run for this step, in the process that saved the
        checkpoint."""
        return self.loop.looked_at == self.step

    @functools.cached_property
    def flops_per_token(self) -> int:
        return self.model.estimate_flops()

    @functools.cached_property
    def peak_flops(self) -> float | None:
        """The dense BF16 peak of the GPU in FLOP/s, or None if it is not known."""
        return get_peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None

    def failure(self, text: str) -> UserError:
        """Ends the progress bar, and returns the error that ends the run."""
        self.progress.close()
        return UserError(text)
