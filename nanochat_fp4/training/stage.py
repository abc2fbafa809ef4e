"""A stage as a program: the flags that all training stages have, its method, and the model of the stage before it."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4 import rank_watch
from nanochat_fp4.common import (
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    get_base_dir,
    print0,
    resolve_method,
    use_deterministic_kernels,
)
from nanochat_fp4.console import Phases, rare_collections
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.errors import LostRankError, UserError, is_lost_rank
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.parallel import add_parallel_argument
from nanochat_fp4.signals import StopSignals
from nanochat_fp4.training.checkpoint_manager import (
    SOURCES,
    NoCheckpointError,
    build_model,
    check_model_tag,
    checkpoint_folder,
    find_largest_model,
)

MADE_BY = {
    "base": "python -m scripts.base_train",
    "mid": "python -m scripts.mid_train",
    "sft": "python -m scripts.chat_sft",
    "rl": "python -m scripts.chat_rl",
}


# ----------------------------------------------------------------------------------------------------------------------
# Flags and processes


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every training stage has, with the same meaning and default."""
    add = parser.add_argument
    # Logging
    add(
        "--run",
        default=os.environ.get("WANDB_RUN") or "dummy",
        help="wandb run name (default: $WANDB_RUN; 'dummy' disables wandb logging)",
    )
    add(
        "--tracker",
        choices=("wandb", "trackio"),
        default=os.environ.get("TRACKER") or "wandb",
        help="where --run is logged (default: $TRACKER): wandb, or trackio's local page, which needs no account",
    )
    add(
        "--telemetry-every",
        type=int,
        default=-1,
        help="measure each layer's quantization error every N steps (-1 = disable)",
    )
    # Runtime
    add_parallel_argument(parser)
    add(
        "--rank-timeout",
        default=None,
        metavar="SECONDS",
        help="how long to wait for a process that does not answer (default: $NANOCHAT_RANK_TIMEOUT, else 120)",
    )
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    add("--deterministic", action="store_true", help="the same bits each time on a GPU, too; slower there")
    add(
        "--on-nonfinite",
        choices=("stop", "skip"),
        default="stop",
        help="NaN or infinity in loss or gradient: save and stop, or skip the update",
    )
    # Checkpoints
    add("--save-every", type=int, default=-1, help="save checkpoints every N steps (-1 = only at end)")
    add("--save-at", type=_steps, default=[], help="save checkpoints at these steps too, with commas")
    add("--keep-last", type=int, default=2, help="keep so many of the newest checkpoints (-1 = all)")
    add(
        "--resume-from-step",
        type=_step_or_latest,
        default=-1,
        help="resume from this step, or from the 'latest' intact checkpoint if there is one (-1 = disable)",
    )
    add("--overwrite", action="store_true", help="start over although this stage has checkpoints under the model tag")


def _steps(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _step_or_latest(text: str) -> int | str:
    return text if text == "latest" else int(text)


@dataclass(frozen=True)
class RunOptions:
    """The flags of add_run_arguments that the training loop asks for, and --dry-run."""

    run: str
    telemetry_every: int
    on_nonfinite: str
    save_every: int
    save_at: list[int]
    keep_last: int
    resume_from_step: int | str
    overwrite: bool
    dry_run: bool = False
    tracker: str = "wandb"

    @classmethod
    def of(cls, args: argparse.Namespace) -> "RunOptions":
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})


def changed_flags(args: argparse.Namespace, defaults: argparse.Namespace) -> str:
    """The flags that differ from their defaults, as they would be typed; for the report."""
    changed = {k: v for k, v in vars(args).items() if v != getattr(defaults, k) and k != "resume_from_step"}
    return " ".join(f"--{k.replace('_', '-')}={v}" for k, v in changed.items())


@dataclass(frozen=True)
class Process:
    """This process of a run. held: what it lets go at the end, the run's folder; starting: what ends with the first
    step; phases: of its time up to then."""

    device: torch.device
    rank: int
    world_size: int
    signals: StopSignals
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    starting: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    phases: Phases = field(default_factory=Phases)


def run_stage(args: argparse.Namespace, train: Callable[[Process], None]) -> None:
    """Calls train in the process group that torchrun asks for, if it does.

    Exits with the status of the signal that stopped it, if one did.
    """
    phases = Phases()
    if args.deterministic:
        use_deterministic_kernels()
    _, rank, _, world_size, device = compute_init(
        args.device_type or autodetect_device_type(), args.seed, args.rank_timeout
    )
    try:
        with contextlib.ExitStack() as held, StopSignals() as signals, contextlib.ExitStack() as starting:
            starting.enter_context(rare_collections())
            train(Process(device, rank, world_size, signals, held, starting, phases))
    except RuntimeError as e:
        if is_lost_rank(e) and (line := rank_watch.lost()):
            raise LostRankError(line) from e
        raise
    finally:
        compute_cleanup()
    if signals.exit_code:
        sys.exit(signals.exit_code)


# ----------------------------------------------------------------------------------------------------------------------
# Methods and models


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
        tag = find_largest_model(folder) if model_tag is None else model_tag
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
        model, tokenizer, meta = build_model(checkpoint_folder(source, tag), step, device, phase)
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
