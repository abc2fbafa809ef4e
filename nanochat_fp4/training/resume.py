"""
The beginning of a run: whether its folder can take a checkpoint, from which step it is resumed, and with which state.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.cli import UserError, format_bytes, one_line
from nanochat_fp4.common import fail_together, get_dist_info, is_ddp_initialized, restarts, set_rng_state
from nanochat_fp4.data.dataloader import join_positions
from nanochat_fp4.data.tokenizer import get_tokenizer, tokenizer_lock
from nanochat_fp4.locks import running
from nanochat_fp4.training.checkpoint import Checkpoint, Metadata
from nanochat_fp4.training.checkpoint_manager import NoCheckpointError, check_model_tag, find_last_step, list_steps
from nanochat_fp4.training.load_model import SOURCES


def starts_over(resume_from_step: int | str, overwrite: bool) -> bool:
    """Returns whether --overwrite deletes the old run. It does not if torchrun starts all ranks again after one has
    died."""
    return overwrite and resume_from_step == -1 and not restarts()


def find_resume_step(checkpoint_dir: Path, resume_from_step: int | str, overwrite: bool) -> int | None:
    """
    Returns the step whose checkpoint is resumed, or None for a new run. All ranks must call this function together.

    `resume_from_step` is -1, a step, or 'latest'. Nothing is deleted here (see start_over). Raises UserError if a new
    run would be mixed with a run that exists already.
    """
    resume_from = "latest" if resume_from_step == -1 and restarts() else resume_from_step
    if resume_from != -1:
        if resume_from != "latest":
            return resume_from
        try:
            return find_last_step(checkpoint_dir)
        except NoCheckpointError:
            return None
    steps = list_steps(checkpoint_dir)
    if overwrite and steps:
        check_unused(checkpoint_dir)
    elif steps:
        raise UserError(
            f"{checkpoint_dir} already holds a run (checkpoint of step {steps[0]}); go on with --resume-from-step "
            "latest, start over with --overwrite, or choose another --model-tag"
        )
    if is_ddp_initialized():
        dist.barrier()  # No rank may save before all ranks have looked for checkpoints.
    return None


def branch_point(text: str, checkpoint_dir: Path) -> tuple[Path, int]:
    """Returns (folder, step) of the run that --branch-from names, which must be another run beside checkpoint_dir.
    Raises UserError for any other text."""
    tag, at, step = text.rpartition("@")
    if not (tag and at and step.isdecimal()):
        raise UserError(f"--branch-from={text!r}: expected '<model tag>@<step>', for example d20_bf16@5000")
    check_model_tag(tag, "--branch-from")
    if tag == checkpoint_dir.name:
        raise UserError(f"--branch-from={text!r} is this run itself; give the new run a --model-tag of its own")
    return checkpoint_dir.parent / tag, int(step)


def check_unused(checkpoint_dir: Path) -> None:
    """Raises UserError on every rank if a run of a later stage that began with this folder's model is still running.

    Such a run could not be resumed any more. Call this function before the model is replaced.
    """
    places = [place for place, _ in SOURCES.values()]
    later = places[places.index(checkpoint_dir.parent.name) + 1 :] if checkpoint_dir.parent.name in places else []
    base, users = checkpoint_dir.parent.parent, []
    if get_dist_info()[1] == 0:
        folders = [base / place / checkpoint_dir.name for place in later]
        users = [f"{folder} ({who})" for folder in folders if (who := running(folder))]
    fail_together(
        f"the run in {users[0]} began with the model in {checkpoint_dir}; wait for it or stop it" if users else None
    )


def check_tokenizer(fingerprint: str) -> None:
    """Raises UserError on every rank if the stored tokenizer is not the one that this run has loaded.

    Call this function when the run has its lock. From then on nobody replaces the tokenizer, but before it can have
    been replaced.
    """
    problem = None
    if get_dist_info()[1] == 0:
        with tokenizer_lock():
            if get_tokenizer().fingerprint() != fingerprint:
                problem = "the tokenizer was replaced while this run began; start it again"
    fail_together(problem)


_LOSES = {
    "lean": "; weights are rounded to BF16 and moments to 8 bits, and their lower bits are lost",
    "fp32": "; lower bits that --state=lean has not kept do not come back",
}
_OF_THE_CALL = {"resume_from_step", "overwrite", "run", "model_tag", "model_step", "branch_from", "dry_run", "recipes"}


def changed_settings(before: Metadata, now: Metadata) -> list[str]:
    """
    Returns the changes of settings that a resumed run may have, like 'matrix_lr was 0.02 so far and is 0.01 from here
    on'.

    A setting that only one of the two runs has is left out.
    """

    def settings(meta: Metadata) -> dict[str, Any]:
        flat = {k: v for k, v in (meta.user_config | meta.tunable).items() if k not in _OF_THE_CALL}
        before_there_was_a_choice = {"state": "fp32", "orthogonalizer": "polar_express"}
        return before_there_was_a_choice | flat | ({"commit": meta.commit} if meta.commit else {})

    old, new = settings(before), settings(now)
    loses = {"state": _LOSES[new["state"]]}
    different = [k for k in old if k in new and old[k] != new[k]]
    return [f"{k} was {old[k]} so far and is {new[k]} from here on{loses.get(k, '')}" for k in different]


def start_over(checkpoint_dir: Path, rank: int) -> None:
    """Deletes the run in the folder. All ranks must call this function together, when nothing else can refuse the
    new run. Raises UserError if the run cannot be deleted."""
    if rank == 0:
        shutil.rmtree(checkpoint_dir, ignore_errors=True)
        if list_steps(checkpoint_dir):  # Otherwise 'latest' would find a checkpoint of the old run.
            raise UserError(f"--overwrite cannot delete {checkpoint_dir}; delete it, or choose another --model-tag")
    if is_ddp_initialized():
        dist.barrier()


def check_same_run(now: dict[str, Any], before: Any, checkpoint_dir: str | os.PathLike) -> None:
    """Raises UserError, which names the differences, unless the checkpoint has this run's settings that decide the
    bits."""
    if not isinstance(before, dict):
        raise UserError(
            f"the checkpoint in {checkpoint_dir} does not say how it was trained (nanochat's own?), so it cannot be "
            "resumed; choose another --model-tag for a new run"
        )
    different = [f"{k} was {before.get(k)!r} and is now {v!r}" for k, v in now.items() if before.get(k) != v]
    if different:
        raise UserError(
            f"the checkpoint in {checkpoint_dir} belongs to another run: {'; '.join(different)}. Resume it with the "
            "settings it has, start over with --overwrite in place of --resume-from-step, or choose another --model-tag"
        )


def restore_state(optimizers: Sequence[torch.optim.Optimizer], checkpoint: Checkpoint, device: torch.device) -> None:
    """
    Gives the optimizers and torch's random generators the state that a checkpoint has. The options of the optimizers
    (rates, betas, ...) stay those of this run.

    Raises UserError if the state is not one of this run. The checksums of a checkpoint cannot show this, because they
    only prove that the files are as they were written.
    """
    try:
        states = checkpoint.optimizers
        if checkpoint.of_ranks:  # A run with another number of processes saved the checkpoint.
            of_each = zip(*(parts for parts, _ in checkpoint.of_ranks), strict=True)
            states = [o.resharded(list(parts)) for o, parts in zip(optimizers, of_each, strict=True)]
        for optimizer, state in zip(optimizers, states, strict=True):
            groups = getattr(optimizer, "param_groups", ())
            options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            optimizer.load_state_dict(state)
            for group, own_options in zip(getattr(optimizer, "param_groups", ()), options):
                group.update(own_options)
        set_rng_state(checkpoint.rng, device)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as e:
        raise UserError(
            f"the optimizer state of the checkpoint in {checkpoint.folder} is not one of this run "
            f"({type(e).__name__}: {one_line(e)[:150]}); resume from another step"
        ) from e


def restore_position(checkpoint: Checkpoint) -> Any:
    """Returns the position of the data loader. If a run with another number of processes saved the checkpoint, the
    positions of all these processes are joined."""
    positions = [position for _, position in checkpoint.of_ranks if position]
    return join_positions(positions) if positions else checkpoint.position


def restored(new: dict[str, Any], saved: Any, what: str, folder: Path) -> dict[str, Any]:
    """
    Returns `new`, the state of a run that begins, with the values of `saved`, the state in a checkpoint.

    Raises UserError if a saved value has another type than in `new`. Dictionaries must have numbers only.
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def fits(value: Any, like: Any) -> bool:
        if isinstance(like, dict):
            return isinstance(value, dict) and all(map(is_number, value.values()))
        return is_number(value) if is_number(like) else type(value) is type(like)

    if not isinstance(saved, dict) or not all(fits(saved[k], like) for k, like in new.items() if k in saved):
        raise UserError(
            f"the {what} in the metadata of the checkpoint in {folder} is not one of this run; resume from another step"
        )
    return new | {k: saved[k] for k in new if k in saved}


# ----------------------------------------------------------------------------------------------------------------------
# A folder that can be written


def save_bytes(model: nn.Module) -> int:
    """Estimates the bytes of this rank's files of a checkpoint: the weights (rank 0 only), and this rank's share of
    two moments for each weight."""
    _, rank, _, world_size = get_dist_info()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return (weights if rank == 0 else 0) + 2 * weights // world_size


def check_writable(folder: str | os.PathLike, size: int, overwrite: bool = False) -> None:
    """
    Raises UserError on every rank unless each rank can write and flush a file of `size` bytes in the folder.

    Call this function before anything is deleted or trained. All ranks must call it together, and they write at the
    same time, as in a save. With `overwrite` the run in the folder will be deleted, so its bytes count as free.
    """
    folder = Path(folder)
    problem = None
    made_folder = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        freed = sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) if overwrite else 0
        # The name has the form of a save's temporary file. If this process is killed, the next save deletes the file.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".model_000000.pt.", suffix=".tmp") as f:
            _fill(f.fileno(), max(size - freed, 1 << 20))
            os.fsync(f.fileno())
    except OSError as e:
        problem = _cannot_write(folder, e, size)
    try:
        fail_together(problem)
    except UserError:
        if made_folder:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _fill(fd: int, size: int) -> None:
    """Makes the file `size` bytes long. The disk has allocated blocks for all of these bytes afterwards."""
    if hasattr(os, "posix_fallocate"):  # macOS does not have this function.
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as e:
            # These errors mean that the file system cannot allocate in this way.
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    for start in range(0, size, 1 << 20):
        os.write(fd, bytes(min(1 << 20, size - start)))


def _cannot_write(folder: Path, error: OSError, size: int) -> str:
    return (
        f"{folder} cannot take a checkpoint of {format_bytes(size)} ({one_line(error.strerror or error)}); free some "
        "space, or choose a writable folder (NANOCHAT_BASE_DIR, --model-tag)"
    )
