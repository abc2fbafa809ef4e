"""The beginning of a run: from which step it is resumed, and whether the checkpoint is one of this run."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanochat_fp4.cli import UserError, format_bytes, one_line
from nanochat_fp4.common import fail_together, get_dist_info, restarts
from nanochat_fp4.data.dataloader import join_positions
from nanochat_fp4.locks import running
from nanochat_fp4.training import checkpoint_manager as checkpoints
from nanochat_fp4.training.load_model import SOURCES

# A run that branches from another run may differ from it in these settings, in the method, and in the head.
BRANCH_SETTINGS = ("layer_methods", "method_phases", "branch_from", "separate_qkv")


def find_resume_step(checkpoint_dir: Path, resume_from_step: int | str, overwrite: bool) -> int | None:
    """
    Returns the step whose checkpoint is resumed, or None for a new run. All ranks must call this function together.

    `resume_from_step` is -1, a step, or 'latest'. Nothing is deleted here. Raises UserError if a new
    run would be mixed with a run that exists already, or if --overwrite would delete a model with which a run of a
    later stage has begun that is still running.
    """
    resume_from = "latest" if resume_from_step == -1 and restarts() else resume_from_step
    if resume_from == "latest":
        try:
            return checkpoints.find_last_step(checkpoint_dir)
        except checkpoints.NoCheckpointError:
            return None
    if resume_from != -1:
        return resume_from
    problem, steps = None, checkpoints.list_steps(checkpoint_dir)
    if steps and not overwrite:
        problem = (
            f"{checkpoint_dir} already holds a run (checkpoint of step {steps[0]}); go on with --resume-from-step "
            "latest, start over with --overwrite, or choose another --model-tag"
        )
    elif steps and get_dist_info()[1] == 0:
        places = [place for place, _ in SOURCES.values()]
        later = places[places.index(checkpoint_dir.parent.name) + 1 :]
        folders = [checkpoint_dir.parent.parent / place / checkpoint_dir.name for place in later]
        for folder, who in ((folder, running(folder)) for folder in folders):
            if who:
                problem = (
                    f"the run in {folder} ({who}) began with the model in {checkpoint_dir}; wait for it or stop it"
                )
    fail_together(problem)  # All ranks have looked for checkpoints when it returns, so from here on one may save.
    return None


def branch_point(text: str, checkpoint_dir: Path) -> tuple[Path, int]:
    """Returns (folder, step) of the run that --branch-from names, which must be another run beside checkpoint_dir.
    Raises UserError for any other text."""
    tag, at, step = text.rpartition("@")
    if not (tag and at and step.isdecimal()):
        raise UserError(f"--branch-from={text!r}: expected '<model tag>@<step>', for example d20_bf16@5000")
    checkpoints.check_model_tag(tag, "--branch-from")
    if tag == checkpoint_dir.name:
        raise UserError(f"--branch-from={text!r} is this run itself; give the new run a --model-tag of its own")
    return checkpoint_dir.parent / tag, int(step)


def check_disk(folder: Path, model: nn.Module, overwrite: bool) -> None:
    """Raises UserError on every rank if the folder's disk has no room for a checkpoint of the model: its weights, and
    two moments for each of them. With `overwrite` the files of the old run count as free."""
    size, problem = 3 * sum(p.numel() * p.element_size() for p in model.parameters()), None
    try:
        if get_dist_info()[1] == 0:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
            freed = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if overwrite else 0
            if (free := shutil.disk_usage(folder).free) + freed < size:
                problem = f"its disk has {format_bytes(free)} free"
    except OSError as e:
        problem = one_line(e.strerror or e)
    fail_together(
        problem
        and f"{folder} cannot take a checkpoint of {format_bytes(size)} ({problem}); free some space, or choose a "
        "writable folder (NANOCHAT_BASE_DIR, --model-tag)"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The run of a checkpoint, and this run

_LOSES = {
    "lean": "; weights are rounded to BF16 and moments to 8 bits, and their lower bits are lost",
    "fp32": "; lower bits that --state=lean has not kept do not come back",
}
_OF_THE_CALL = {"resume_from_step", "overwrite", "run", "model_tag", "model_step", "branch_from", "dry_run", "recipes"}


def check_same_run(now: dict[str, Any], before: dict[str, Any] | None, checkpoint_dir: Path) -> None:
    """Raises UserError, which names the differences, unless the checkpoint has this run's settings that decide the
    bits."""
    if not before:
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


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """
    Returns the changes of settings that a resumed run may have, like 'matrix_lr was 0.02 so far and is 0.01 from here
    on'. `before` and `now` are the metadata of both runs. A setting that only one of them has is left out.
    """

    def settings(meta: dict[str, Any]) -> dict[str, Any]:
        flat = {k: v for k, v in meta["user_config"].items() if k not in _OF_THE_CALL}
        return flat | ({"commit": meta["commit"]} if meta["commit"] else {})

    old, new = settings(before), settings(now)
    different = [k for k in old if k in new and old[k] != new[k]]
    loses = {"state": _LOSES.get(new.get("state"), "")}
    return [f"{k} was {old[k]} so far and is {new[k]} from here on{loses.get(k, '')}" for k in different]


def restore_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], parts: list[dict[str, Any]], meta: dict[str, Any], folder: Path
) -> None:
    """
    Gives the optimizers the state that a checkpoint has. Their options (rates, betas, ...) stay those of this run.

    `parts` is what load_checkpoint returns. Raises UserError if the state is not one of this run. Checksums cannot show
    this, because they only prove that the files are as they were written.
    """
    try:
        states = [part["optimizers"] for part in parts]
        if meta["world_size"] == get_dist_info()[3]:
            (states,) = states
        else:  # A run with another number of processes saved the checkpoint.
            of_each = zip(*states, strict=True)
            states = [o.resharded(list(parts)) for o, parts in zip(optimizers, of_each, strict=True)]
        for optimizer, state in zip(optimizers, states, strict=True):
            options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, own_options in zip(optimizer.param_groups, options):
                group.update(own_options)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as e:
        raise UserError(
            f"the optimizer state of the checkpoint in {folder} is not one of this run "
            f"({type(e).__name__}: {one_line(e)[:150]}); resume from another step"
        ) from e


def position_of(parts: list[dict[str, Any]]) -> Any:
    """Returns the position in the data. If a run with another number of processes saved the checkpoint, it joins the
    positions of all these processes."""
    positions = [part["dataloader"] for part in parts]
    return join_positions(positions) if len(positions) > 1 and any(positions) else positions[0]
