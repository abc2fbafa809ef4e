"""
What mid_train and chat_sft share: flags, the model of the stage before, data that may be missing, and the loop.

Post-training keeps the forward pass of the method that the base model was trained with and leaves the backward pass
unquantized (the paper, Appendix C); --quantization changes that. Everything that training needs to go on is in the
checkpoint: `--resume-from-step latest` ends with the same bits as a run that was never interrupted.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from eval.common import resolve_eval_dir
from nanochat_fp4.chat_data import Task, TaskMixture
from nanochat_fp4.checkpoint_manager import (
    SOURCES,
    NoCheckpointError,
    build_model,
    check_model_tag,
    find_largest_model,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from nanochat_fp4.common import get_base_dir, print0, seed_everything
from nanochat_fp4.console import Progress, format_seconds, parse_finite
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, is_out_of_memory
from nanochat_fp4.gpt import GPT, autocast
from nanochat_fp4.hardware import get_peak_flops
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.report import get_report
from nanochat_fp4.rows import MissingDataError
from nanochat_fp4.run_folder import check_writable, claim_run, save_bytes
from nanochat_fp4.tokenizer import RustBPETokenizer
from nanochat_fp4.training import (
    MAX_SKIPPED_IN_A_ROW,
    LossMonitor,
    MetricsLog,
    StopRequested,
    StopSignals,
    add_run_arguments,
    announce,
    check_same_run,
    find_resume_step,
    first_message,
    forget_later_checkpoints,
    get_rng_state,
    gradient_norm,
    layer_telemetry,
    mean_over_ranks,
    name_nonfinite,
    preserved_rng,
    resolve_method,
    restore_dict,
    restore_state,
    set_rng_state,
    summarize_telemetry,
)
from nanochat_fp4.wandb_run import setup_wandb

MADE_BY = {
    "base": "python -m scripts.base_train",
    "mid": "python -m scripts.mid_train",
    "sft": "python -m scripts.chat_sft",
}
QUANTIZATIONS = ("forward", "full", "none")


# ----------------------------------------------------------------------------------------------------------------------
# Flags


def add_common_arguments(parser: argparse.ArgumentParser, init_lr_frac: float) -> None:
    """nanochat's flags that both stages have, and ours."""
    add = parser.add_argument
    add_run_arguments(parser)
    add(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16"),
        help="matrix products in float32|bfloat16 on a GPU (a CPU has float32)",
    )
    add("--seed", type=int, default=42, help="seed of rotations and stochastic rounding (--quantization full)")
    # Quantization
    add(
        "--method",
        default=None,
        help=f"QAT method (default: the one the model was trained with): {', '.join(nf.METHODS)}; "
        "or an ablation (nf.ABLATIONS)",
    )
    add(
        "--quantization",
        default="forward",
        choices=QUANTIZATIONS,
        help="quantize the forward pass only, forward and backward, or nothing",
    )
    # Model loading
    add("--model-tag", default=None, help="model tag to load from, and to save under")
    add("--model-step", type=int, default=None, help="model step to load from")
    # Data
    add(
        "--data",
        default="nanochat",
        choices=("nanochat", "local"),
        help="nanochat's mixture, or a small one made on the spot without a network (no benchmark numbers)",
    )
    add("--sft-dir", default=None, help="folder with train.jsonl and test.jsonl of conversations, in place of SmolTalk")
    add(
        "--eval-dir",
        default=None,
        help="folder of benchmark files (default: $NANOCHAT_EVAL_DIR, else the hub); see eval/README.md",
    )
    add("--allow-missing", action="store_true", help="leave out a dataset that is not to be had, instead of stopping")
    # Optimization
    add("--embedding-lr", type=parse_finite, default=0.2, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_finite, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add("--matrix-lr", type=parse_finite, default=0.02, help="learning rate for matrix parameters (Muon)")
    add("--weight-decay", type=parse_finite, default=0.0, help="weight decay of the matrix parameters (Muon)")
    add("--init-lr-frac", type=parse_finite, default=init_lr_frac, help="initial LR as fraction of base LR")


def changed_flags(args: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The flags that differ from their defaults, as they would be typed; for the report."""
    changed = {k: v for k, v in vars(args).items() if v != getattr(defaults, k) and k != "resume_from_step"}
    return " ".join(f"--{k.replace('_', '-')}={v}" for k, v in changed.items())


# ----------------------------------------------------------------------------------------------------------------------
# Data


@dataclass
class Source:
    """One part of a mixture. make() loads it; `missing` says why it was left out."""

    name: str
    make: Callable[[], Task]
    task: Task | None = None
    missing: str | None = None


def load_sources(sources: list[Source], allow_missing: bool, what: str) -> TaskMixture:
    """The mixture of all sources that are there. One that is missing ends the run, or is named and left out."""
    for source in sources:
        try:
            source.task = source.make()
        except MissingDataError as e:
            if not allow_missing:
                raise UserError(
                    f"{source.name}: {e}. To train without it add --allow-missing; without any network, --data local"
                ) from e
            source.missing = str(e)
    print0(f"{what} mixture:")
    announce(describe_sources(sources))
    return TaskMixture([source.task for source in sources if source.task is not None])


def describe_sources(sources: list[Source]) -> dict[str, str]:
    """name -> rows, or why it is missing; the same source twice counts together."""
    lines: dict[str, str] = {}
    rows: dict[str, int] = {}
    for source in sources:
        if source.task is None:
            lines[source.name] = f"left out: {source.missing}"
        else:
            rows[source.name] = rows.get(source.name, 0) + len(source.task)
            lines[source.name] = f"{rows[source.name]:,} conversations"
    return lines


# ----------------------------------------------------------------------------------------------------------------------
# Models


def checkpoint_method(meta: dict[str, Any], flag: str | None = None) -> str:
    """The QAT method of a checkpoint's forward pass, the last one if it changed in training; --method wins.

    nanochat's own checkpoints have none: bf16."""
    config = meta.get("user_config") or {}
    if flag is None and config.get("quantization") == "none":
        return "bf16"
    name = resolve_method(flag or config.get("method") or "bf16")
    return MethodPlan.parse(name, phases="" if flag else config.get("method_phases") or "").at(1.0).name


def find_model_tag(source: str, model_tag: str | None) -> str:
    """The tag to take from a stage. Raises UserError that names the command which makes one."""
    check_model_tag(model_tag)
    folder = Path(get_base_dir()) / SOURCES[source]
    made_by = MADE_BY.get(source)
    try:
        tag = model_tag or find_largest_model(folder)
    except NoCheckpointError as e:
        raise UserError(f"there is no {source} checkpoint in {folder}; make one with {made_by}") from e
    if not (folder / tag).is_dir():
        known = sorted(p.name for p in folder.iterdir() if p.is_dir()) if folder.is_dir() else []
        hint = f"there is {', '.join(known[:8])}" if known else "there is none"
        raise UserError(
            f"there is no {source} checkpoint {tag} in {folder} ({hint}); make it with {made_by} --model-tag={tag}"
        )
    return tag


def load_stage_model(
    source: str, device: torch.device, phase: str, model_tag: str | None, step: int | None
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """checkpoint_manager.load_model, whose error names the command that makes a checkpoint that is not there."""
    tag = find_model_tag(source, model_tag)
    try:
        model, tokenizer, meta = build_model(Path(get_base_dir()) / SOURCES[source] / tag, step, device, phase)
    except NoCheckpointError as e:
        raise UserError(f"{e}; make one with {MADE_BY.get(source)} --model-tag={tag}") from e
    if model_tag is None:
        print0(f"no --model-tag given: taking {tag}")
    return model, tokenizer, {**meta, "model_tag": tag}


def weights_digest(checkpoint_dir: Path, step: int | None) -> str | None:
    """SHA-256 of the weights as the manifest has it; None where there is none (nanochat's own checkpoints)."""
    try:
        manifest = json.loads((checkpoint_dir / f"manifest_{step:06d}.json").read_text(encoding="utf-8"))
        return next(f["sha256"] for f in manifest["files"] if f["name"].startswith("model_"))
    except (OSError, ValueError, KeyError, TypeError, StopIteration, RecursionError):
        return None


# ----------------------------------------------------------------------------------------------------------------------
# The loop


@dataclass
class Plan:
    """What distinguishes one stage's loop from the other's."""

    make_loader: Callable[[Any], Iterator]  # its saved state or None -> iterator over (x, y, state)
    grad_accum_steps: int
    num_iterations: int  # -1: until one epoch of the data is consumed
    conversations: int  # in the training data
    lr_multiplier: Callable[[float], float]  # of the progress in [0, 1]
    evaluate: Callable[[torch.nn.Module, int, bool], dict[str, float]]  # (model, step, last step) -> numbers
    evaluate_due: Callable[[int, bool], bool]
    momentum: Callable[[int], float] | None = None  # of Muon, by step; None leaves it
    batch_config: dict[str, Any] = field(default_factory=dict)  # what decides the batches, beside the data
    setup: dict[str, Any] = field(default_factory=dict)  # for the report
    tokens_per_step: int | None = None  # where it is the same in every step


class PostTraining:
    """One run of a stage: the model it starts from, or goes on with, and the loop."""

    def __init__(
        self,
        name: str,
        source: str,
        args: argparse.Namespace,
        device: torch.device,
        rank: int,
        world_size: int,
        signals: StopSignals,
    ):
        self.name, self.source, self.args, self.signals = name, source, args, signals
        self.device, self.rank, self.world_size, self.master = device, rank, world_size, rank == 0
        dry_run = getattr(args, "dry_run", False)
        args.eval_dir = resolve_eval_dir(args.eval_dir)
        check_model_tag(args.model_tag)
        self.model_tag = args.model_tag or find_model_tag(source, None)
        self.checkpoint_dir = Path(get_base_dir()) / SOURCES[name] / self.model_tag
        # What --overwrite deletes stays until the data and all flags are known to be good: see train.
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
        self.overwrites = args.overwrite and args.resume_from_step == -1 and not restarted and not dry_run
        looks = not (dry_run or self.overwrites)
        if not dry_run:
            claim_run(self.checkpoint_dir)
        self.resumed_step = find_resume_step(args, self.checkpoint_dir, rank) if looks else None
        self.rank_state: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.telemetry: str | None = None  # the newest summary
        if self.resumed_step is None:
            self.model, self.tokenizer, self.parent_meta = load_stage_model(
                source, device, "train", self.model_tag, args.model_step
            )
            parent = {"stage": source, "model_tag": self.model_tag, "step": self.parent_meta.get("step")}
            parent["weights_sha256"] = weights_digest(
                Path(get_base_dir()) / SOURCES[source] / self.model_tag, parent["step"]
            )
        else:
            self.model, self.tokenizer, self.meta = build_model(self.checkpoint_dir, self.resumed_step, device, "train")
            _, self.rank_state, _ = load_checkpoint(
                self.checkpoint_dir, self.resumed_step, device, load_optimizer=True, rank=rank
            )
            self.parent_meta, parent = self.meta, self.meta.get("parent") or {}
            self.check_parent(parent)
        if not dry_run:
            check_writable(self.checkpoint_dir, save_bytes(self.model), self.overwrites)
        self.parent = parent
        self.config = self.model.config
        # Resuming, the method is the run's own; nothing but --method changes it, and that is refused below.
        self.method = resolve_method(args.method or (self.parent_meta.get("user_config") or {}).get("method") or "bf16")
        wished = os.environ.get("QAT_METHOD")
        if wished and not args.method and resolve_method(wished) != self.method:
            print0(f"note: the model was trained with {self.method}, so QAT_METHOD={wished} is not used (--method is)")
        nf.convert(
            self.model,
            "bf16" if args.quantization == "none" else get_recipe(self.method).final,
            backward=args.quantization == "full",
            verbose=self.master,
        )
        seed_everything(args.seed, rank)

    def check_parent(self, parent: dict[str, Any]) -> None:
        """Raise UserError if the model that this run began with has been trained anew in the meantime."""
        folder = Path(get_base_dir()) / SOURCES[self.source] / self.model_tag
        before, now = parent.get("weights_sha256"), weights_digest(folder, parent.get("step"))
        if before is not None and now is not None and before != now:
            raise UserError(
                f"the run in {self.checkpoint_dir} began with another {self.source} model than {self.model_tag} is "
                "now; start it over with --overwrite"
            )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.float32 if self.args.dtype == "float32" else None

    def autocast(self):
        return autocast(self.device.type, self.autocast_dtype)

    def save(self, step: int, rng: dict, loader_state: Any) -> bool:
        if getattr(self.args, "dry_run", False):
            return True
        saved = save_checkpoint(
            self.checkpoint_dir,
            step,
            self.model.state_dict(),
            {"optimizers": [o.state_dict() for o in self.optimizers], "rng": rng, "loader": loader_state},
            {
                "step": step,
                **{k: v for k, v in self.loop["numbers"].items()},
                "model_config": asdict(self.config),
                "user_config": self.user_config,
                "run_config": self.run_config,
                "parent": self.parent,
                "loop_state": self.loop,
                "loss_state": self.monitor.state,
            },
            rank=self.rank,
        )
        if saved and self.master:
            if self.args.resume_from_step != "latest":
                forget_later_checkpoints(self.checkpoint_dir, step)
            prune_checkpoints(self.checkpoint_dir, self.args.keep_last)
        return saved

    def train(
        self, plan: Plan, forward: torch.nn.Module, sources: dict[str, str], section: str
    ) -> dict[str, Any] | None:
        """
        Run the loop to its end, or until a signal. `forward` is the model or its compiled form.

        Returns the last evaluation's numbers; None if the run was stopped early. Logs to the report.
        """
        args, device, model, signals = self.args, self.device, self.model, self.signals
        self.optimizers = model.setup_optimizers(
            unembedding_lr=args.unembedding_lr,
            embedding_lr=args.embedding_lr,
            matrix_lr=args.matrix_lr,
            weight_decay=args.weight_decay,
        )
        muon = self.optimizers[-1]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = group["lr"] * args.init_lr_frac
        self.user_config = {**vars(args), "method": self.method}
        self.run_config = {
            "stage": self.name,
            "method": self.method,
            "quantization": args.quantization,
            **asdict(self.config),
            **plan.batch_config,
            "num_iterations": plan.num_iterations,
            "sources": sources,
            "world_size": self.world_size,
            "seed": args.seed,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        self.loop = {
            "numbers": {},
            "best": {},
            "evaluated_at": -1,
            "progress": 0.0,
            "training_seconds": 0.0,
            "done": False,
        }
        loader_state = None
        monitor = LossMonitor()
        step = self.resumed_step or 0
        if self.resumed_step is not None:
            check_same_run(self.run_config, self.meta.get("run_config"), self.checkpoint_dir)
            restore_state(self.optimizers, self.rank_state, device, self.checkpoint_dir)
            loader_state = self.rank_state.get("loader")
            self.loop = restore_dict(self.loop, self.meta, "loop_state", self.checkpoint_dir)
            monitor = LossMonitor(restore_dict(monitor.state, self.meta, "loss_state", self.checkpoint_dir))
            print0(f"Resuming from step {step}")
        self.monitor = monitor
        self.rank_state.clear()
        loader = plan.make_loader(loader_state)
        if self.overwrites:
            find_resume_step(args, self.checkpoint_dir, self.rank)
        metrics = MetricsLog(self.checkpoint_dir, enabled=self.master and not getattr(args, "dry_run", False))
        metrics.rewind(step)
        metrics.append(
            "start", step, stage=self.name, method=self.method, quantization=args.quantization,
            backend=str(nf.backend()), num_iterations=plan.num_iterations, world_size=self.world_size,
            config=self.user_config, sources=sources,
            environment=environment_info() if self.master else None,
        )  # fmt: skip
        wandb_run = setup_wandb(args.run, f"nanochat-{self.name}", self.user_config)
        peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        by_epoch = plan.num_iterations < 1
        progress = Progress(total=None if by_epoch else plan.num_iterations, desc=self.name, unit="step", initial=step)
        skipped_in_a_row = 0
        ends = lambda: self.loop["progress"] >= 1 if by_epoch else step >= plan.num_iterations  # noqa: E731
        x = None

        while True:
            last_step = ends()
            stopping = signals.received(device)
            if not stopping and self.loop["evaluated_at"] != step and plan.evaluate_due(step, last_step):
                try:
                    self.evaluate(plan, forward, step, last_step, progress, metrics, wandb_run)
                except StopRequested:
                    stopping = True
            due = args.save_every > 0 and step > 0 and step % args.save_every == 0
            if step != self.resumed_step and (last_step or stopping or due):
                saved = self.save(step, get_rng_state(device), loader_state)
                if not saved and (last_step or stopping):
                    progress.close()
                    raise UserError(
                        f"step {step} could not be saved (see the warning above); free some disk space and go on from "
                        "the checkpoint before it with --resume-from-step latest"
                    )
            if last_step or stopping:
                break

            if x is None:
                x, y, next_loader_state = next(loader)
            if args.telemetry_every > 0 and step % args.telemetry_every == 0 and step != self.resumed_step:
                self.measure_layers(x, y, step, progress, metrics, wandb_run)
            synchronize()
            t0 = time.monotonic()
            rng_before, loader_before = get_rng_state(device), loader_state
            micro_batches, losses, counted = [], [], 0
            lrm = plan.lr_multiplier(self.loop["progress"] if by_epoch else step / plan.num_iterations)
            try:
                with nf.quantize_weights_once(model) if plan.grad_accum_steps > 1 else contextlib.nullcontext():
                    for _ in range(plan.grad_accum_steps):
                        micro_batches.append((x, y, get_rng_state(device)))
                        with self.autocast():
                            loss = forward(x, y)
                        losses.append(loss.detach())
                        counted = counted + (y >= 0).sum()
                        (loss / plan.grad_accum_steps).backward()
                        loader_state = next_loader_state
                        x, y, next_loader_state = next(loader)  # made on the CPU while the GPU works
                grad_norm = gradient_norm(model)
                step_loss = torch.stack(losses).mean()
                bad = ~(torch.isfinite(step_loss) & torch.isfinite(grad_norm))
                consumed = loader_state.get("consumed", 0)
                shared = torch.stack([step_loss, bad.float(), counted.float(), torch.full_like(step_loss, consumed)])
                step_loss, any_bad, counted, consumed = mean_over_ranks(shared).tolist()
                if any_bad == 0:
                    for optimizer in self.optimizers:
                        for group in optimizer.param_groups:
                            group["lr"] = group["initial_lr"] * lrm
                    if plan.momentum is not None:
                        for group in muon.param_groups:
                            group["momentum"] = plan.momentum(step)
                    for optimizer in self.optimizers:
                        optimizer.step()
                    model.zero_grad(set_to_none=True)
            except Exception as e:
                if not is_out_of_memory(e) or self.world_size > 1:
                    raise
                x = y = loss = None
                micro_batches.clear()
                model.zero_grad(set_to_none=True)
                progress.close()
                kept = "; go on with --resume-from-step latest" if self.save(step, rng_before, loader_before) else ""
                raise UserError(
                    f"out of memory at step {step} with --device-batch-size={args.device_batch_size}; use a smaller "
                    f"one (the batch of a step stays the same){kept}"
                ) from None
            synchronize()
            dt = time.monotonic() - t0

            if any_bad > 0:
                place = first_message(self.name_the_layer(micro_batches) if bad else None)
                model.zero_grad(set_to_none=True)
                what = f"step {step}: loss {step_loss:.4g}, first not finite: {place}"
                skipped_in_a_row += 1
                metrics.append("skip", step, place=place, loss=str(step_loss))
                if args.on_nonfinite == "stop" or skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                    progress.close()
                    self.save(step, rng_before, loader_before)
                    raise UserError(
                        f"{what}. Saved as it was before this step in {self.checkpoint_dir}; lower --init-lr-frac and "
                        "start over, or skip such steps: --resume-from-step latest --on-nonfinite skip"
                    )
                self.monitor.state["skipped"] += 1
                progress.write(f"warning: {what}; update skipped")
            self.loop["progress"] = (
                round(consumed * self.world_size) / plan.conversations if by_epoch else (step + 1) / plan.num_iterations
            )
            if any_bad > 0:
                step += 1
                progress.update(1)
                continue

            skipped_in_a_row = 0
            average = self.monitor.state["mean"]
            if self.monitor.update(step_loss):
                progress.write(f"warning: step {step}: loss {step_loss:.4f} is a spike (average {average:.4f})")
                metrics.append("spike", step, loss=step_loss, average=average)
            self.loop["training_seconds"] += dt
            tokens = round(counted * self.world_size) if plan.tokens_per_step is None else plan.tokens_per_step
            tokens_per_second = tokens / dt
            mfu = None
            if peak_flops and plan.tokens_per_step:
                mfu = 100 * model.estimate_flops() * tokens_per_second / (peak_flops * self.world_size)
            record = {
                "loss": step_loss, "smoothed_loss": self.monitor.smoothed, "lr_multiplier": lrm, "seconds": dt,
                "grad_norm": float(grad_norm), "tokens": tokens, "tokens_per_second": tokens_per_second, "mfu": mfu,
            }  # fmt: skip
            metrics.append("train", step, **record)
            if step % 10 == 0:
                record |= {k: self.monitor.state[k] for k in ("spikes", "skipped")}
                wandb_run.log({"step": step, **{f"train/{k}": v for k, v in record.items() if v is not None}})
            step += 1
            shown = {"loss": f"{self.monitor.smoothed:.4f}", "lrm": f"{lrm:.2f}", "tok/s": f"{tokens_per_second:,.0f}"}
            if by_epoch:
                shown["epoch"] = f"{100 * self.loop['progress']:.1f}%"
            progress.update(1, **shown)
        progress.close()

        wandb_run.finish()
        if stopping and not last_step:
            print0(f"{signals.name}: stopped at step {step}, saved in {self.checkpoint_dir}")
            print0("go on with: --resume-from-step latest")
            return None
        if self.resumed_step == step:
            print0(f"Nothing to do: {self.model_tag} is through this stage ({step} steps)")
            if get_report(self.model_tag).has(section):
                return self.loop["numbers"]  # else it was killed after its last save, before it could report
        self.report(plan, step, sources, section)
        return self.loop["numbers"]

    def evaluate(
        self,
        plan: Plan,
        forward: torch.nn.Module,
        step: int,
        last: bool,
        progress: Progress,
        metrics: MetricsLog,
        wandb_run: Any,
    ) -> None:
        self.model.eval()
        try:
            with preserved_rng(self.device):
                numbers = plan.evaluate(forward, step, last)
        finally:
            self.model.train()
        for key, value in numbers.items():
            best = min if "loss" in key or "bpb" in key else max
            self.loop["best"][key] = best(self.loop["best"].get(key, value), value)
        self.loop["numbers"] |= numbers
        self.loop["evaluated_at"] = step
        progress.write(f"step {step:05d} | " + ", ".join(f"{k} {v:.4f}" for k, v in numbers.items()))
        metrics.append("val", step, **numbers)
        wandb_run.log({"step": step, **numbers})

    def measure_layers(
        self, x: torch.Tensor, y: torch.Tensor, step: int, progress: Progress, metrics: MetricsLog, wandb_run: Any
    ) -> None:
        """Telemetry of every quantized layer on the first row that is trained on next."""

        def forward_backward() -> None:
            with self.autocast():
                self.model(x[:1], y[:1]).backward()

        with preserved_rng(self.device):
            telemetry = layer_telemetry(self.model, forward_backward)
        self.telemetry = f"step {step}: {summarize_telemetry(telemetry)}"
        progress.write(self.telemetry)
        metrics.append("telemetry", step, layers=telemetry)
        wandb_run.log({"step": step, **{f"telemetry/{n}/{k}": v for n, t in telemetry.items() for k, v in t.items()}})

    def name_the_layer(self, micro_batches: list) -> str:
        place = ""
        for x, y, rng in micro_batches:

            def forward_backward(x=x, y=y, rng=rng) -> None:
                set_rng_state(rng, self.device)
                with self.autocast():
                    self.model(x, y).backward()

            with preserved_rng(self.device):
                place = name_nonfinite(self.model, forward_backward)
            if not place.startswith("the loss itself"):
                break
        return place

    def report(self, plan: Plan, step: int, sources: dict[str, str], section: str) -> None:
        peak = f"{torch.cuda.max_memory_allocated() / 2**20:.2f}MiB" if self.device.type == "cuda" else None
        outcome = {
            "Number of iterations": step,
            "DDP world size": self.world_size,
            "Training time": format_seconds(self.loop["training_seconds"]),
            "Peak memory usage": peak,
            "Training loss (smoothed)": self.monitor.smoothed,
            **{f"Best {key}": value for key, value in self.loop["best"].items()},
            "Loss spikes": self.monitor.state["spikes"],
            "Skipped updates": self.monitor.state["skipped"],
            "Quantization error": self.telemetry,
        }
        outcome = {k: v for k, v in outcome.items() if v is not None}
        announce({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in outcome.items()})
        if getattr(self.args, "dry_run", False):
            return
        results = {
            "method": self.method,
            "quantization": self.args.quantization,
            "train_loss": self.monitor.smoothed,
            "training_seconds": self.loop["training_seconds"],
            **self.loop["numbers"],
        }
        lines = {
            "Model": f"{self.source} model {self.model_tag}, step {self.parent.get('step')}",
            "Layers": " / ".join(str(self.model.nf_report).splitlines()),
            **plan.setup,
            **{f"Data: {name}": rows for name, rows in sources.items()},
        }
        get_report(self.model_tag).log(section, [lines | outcome], results)
