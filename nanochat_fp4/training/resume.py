"""Where a run begins: anew, at a checkpoint of its own, or at one of another run; and its state from there."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat_fp4.common import is_ddp_initialized, set_rng_state
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.training.checkpoint_manager import NoCheckpointError, find_last_step, finish_killed_saves, list_steps


@dataclass
class Start:
    """
    What a run goes on from.

    folder: of the run's own checkpoints. source: the folder of the checkpoint that it goes on from; None for a new run,
    another one than `folder` for a branch. rank_state, meta: of that checkpoint.
    """

    folder: Path
    source: Path | None = None
    step: int = 0
    rank_state: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def resumed_step(self) -> int | None:
        """The step that this very run has a checkpoint of already; None for a new run and for a branch."""
        return self.step if self.source == self.folder else None


def starts_over(resume_from_step: int | str, overwrite: bool) -> bool:
    """Whether what is in the folder is to be deleted: not when torchrun starts all ranks again after one died."""
    return overwrite and resume_from_step == -1 and not _started_again()


def _started_again() -> bool:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def find_resume_step(checkpoint_dir: Path, resume_from_step: int | str, overwrite: bool, rank: int) -> int | None:
    """
    The step whose checkpoint to go on from; None to start anew. All ranks must call this together.

    resume_from_step: -1, a step, or 'latest'. Deletes nothing: see start_over. Raises UserError where a new run would
    mix with one that is there.
    """
    wanted = "latest" if resume_from_step == -1 and _started_again() else resume_from_step
    if wanted != -1:
        if rank == 0:
            finish_killed_saves(checkpoint_dir)
        if is_ddp_initialized():
            dist.barrier()  # nobody reads before files have their names
        if wanted != "latest":
            return wanted
        try:
            return find_last_step(checkpoint_dir)
        except NoCheckpointError:
            return None
    steps = [] if overwrite else list_steps(checkpoint_dir)
    if steps:
        raise UserError(
            f"{checkpoint_dir} already holds a run (checkpoint of step {steps[0]}); go on with --resume-from-step "
            "latest, start over with --overwrite, or choose another --model-tag"
        )
    if is_ddp_initialized():
        dist.barrier()  # nobody saves before everybody has looked
    return None


_OF_THE_CALL = {"resume_from_step", "overwrite", "run", "model_tag", "model_step", "branch_from", "dry_run"}


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """
    'matrix_lr was 0.02 so far and is 0.01 from here on', ...: what may change in a resume, and did.

    before, now: metadata of a checkpoint, whose "tunable", "user_config" and "commit" are compared; what only one of
    them has is left out.
    """

    def settings(meta: dict[str, Any]) -> dict[str, Any]:
        parts = [meta.get(key) for key in ("user_config", "tunable")]
        flat = {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if k not in _OF_THE_CALL}
        return flat | ({"commit": meta["commit"]} if meta.get("commit") else {})

    old, new = settings(before), settings(now)
    return [f"{k} was {old[k]} so far and is {new[k]} from here on" for k in old if k in new and old[k] != new[k]]


def start_over(checkpoint_dir: Path, rank: int) -> None:
    """Delete the run in the folder. All ranks must call this together, when nothing else can refuse the new run."""
    if rank == 0:
        shutil.rmtree(checkpoint_dir, ignore_errors=True)
        if list_steps(checkpoint_dir):  # else the new run's "latest" would be one of the old one's
            raise UserError(f"--overwrite cannot delete {checkpoint_dir}; delete it, or choose another --model-tag")
    if is_ddp_initialized():
        dist.barrier()


def check_same_run(now: dict[str, Any], before: Any, checkpoint_dir: str | os.PathLike) -> None:
    """Raise UserError, naming what differs, unless a checkpoint's settings that decide the bits are this run's."""
    if not isinstance(before, dict):
        raise UserError(
            f"the checkpoint in {checkpoint_dir} does not say how it was trained (nanochat's own?), so it cannot be "
            "resumed; choose another --model-tag for a new run"
        )
    different = [f"{k} was {before.get(k)!r} and is now {v!r}" for k, v in now.items() if before.get(k) != v]
    if different:
        raise UserError(
            f"the checkpoint in {checkpoint_dir} belongs to another run: {'; '.join(different)}. Resume it with the "
            "settings it has, or choose another --model-tag"
        )


def restore_state(
    optimizers: Sequence[torch.optim.Optimizer],
    rank_state: Any,
    device: torch.device,
    checkpoint_dir: str | os.PathLike,
) -> None:
    """
    Put the optimizers and torch's generators where a checkpoint left them; the optimizers' options (rates, betas, ...)
    stay this run's. Raises UserError where it holds something else: its checksums only say that it is what was written.
    """
    try:
        states = rank_state["optimizers"]
        if "all_ranks" in rank_state:  # of another number of processes
            of_each = zip(*rank_state["all_ranks"], strict=True)
            states = [o.resharded(list(parts)) for o, parts in zip(optimizers, of_each, strict=True)]
        for optimizer, state in zip(optimizers, states, strict=True):
            groups = getattr(optimizer, "param_groups", ())
            options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            optimizer.load_state_dict(state)
            for group, own in zip(getattr(optimizer, "param_groups", ()), options):
                group.update(own)
        set_rng_state(rank_state["rng"], device)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as e:
        raise UserError(
            f"the optimizer state of the checkpoint in {checkpoint_dir} is not one of this run "
            f"({type(e).__name__}: {one_line(e)[:150]}); resume from another step"
        ) from e


def restore_dict(new: dict[str, Any], meta: dict[str, Any], key: str, checkpoint_dir: str | os.PathLike) -> dict:
    """
    `new`, the state of a run that begins, updated with meta[key] of a checkpoint. Raises UserError where a value there
    is not of the kind that `new` has; dictionaries in it hold numbers.
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def fits(value: Any, like: Any) -> bool:
        if isinstance(like, dict):
            return isinstance(value, dict) and all(map(is_number, value.values()))
        return is_number(value) if is_number(like) else type(value) is type(like)

    saved = meta.get(key)
    if not isinstance(saved, dict) or not all(fits(saved[k], like) for k, like in new.items() if k in saved):
        raise UserError(
            f"the {key} in the metadata of the checkpoint in {checkpoint_dir} is not one of this run; resume from "
            "another step"
        )
    return new | {k: saved[k] for k in new if k in saved}
