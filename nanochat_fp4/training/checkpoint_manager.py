"""
Saving, finding, loading and deleting checkpoints. A checkpoint is a folder of nanochat's files, in its run's folder:

    step_000100/model_000100.pt         the weights (rank 0)
                optim_000100_rank0.pt   a rank's optimizers, random state and data position (every rank)
                meta_000100.json        model config, settings, losses, and the SHA-256 of these files (rank 0)

A save writes step_000100.tmp and renames it, so a checkpoint is there as a whole or not at all. If the step was saved
before, its old folder is step_000100.old until the new one is there, and is read as long as the new one is missing. The
next save deletes what a killed save or deletion has left. nanochat reads such a folder by --model-tag TAG/step_000100.

nanochat's own checkpoints are the same files without a folder of the step and without checksums, and so are checkpoints
of this package up to version 0.3. They can be read, and are never deleted one by one. All calls of torch.load have
weights_only=True, so that a checkpoint cannot run code.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.cli import UserError, logger, one_line
from nanochat_fp4.common import get_dist_info, of_all_ranks
from nanochat_fp4.files import atomic_open, atomic_write, fsync_dir, sha256_file

FORMAT = "nanochat_fp4 checkpoint, version 2"


class NoCheckpointError(UserError, FileNotFoundError):
    """The error for a folder that has no checkpoint at all. A damaged checkpoint raises UserError instead."""


def check_model_tag(model_tag: str | None, flag: str = "--model-tag") -> None:
    """Raises UserError unless the model tag, the value of `flag`, is the name of one folder. The tag may be None.

    The tag becomes a part of paths, and some of these paths are deleted.
    """
    if model_tag is None:
        return
    long = len(os.fsencode(model_tag)) > 100
    if long or Path(model_tag).name != model_tag or model_tag in ("", ".", "..") or not model_tag.isprintable():
        raise UserError(
            f"{flag}={model_tag[:100]!r} is not the name of one folder; use up to 100 characters without slashes"
        )


def _name(kind: str, step: int, rank: int = 0) -> str:
    """The name of a step's file: of its model, optim or meta."""
    return f"{kind}_{step:06d}" + {"model": ".pt", "optim": f"_rank{rank:d}.pt", "meta": ".json"}[kind]


def _place(folder: Path, step: int) -> Path:
    """The folder with a step's files. For nanochat's own checkpoints it is the run's folder itself."""
    own = folder / f"step_{step:06d}"
    return next((p for p in (own, own.with_suffix(".old")) if p.is_dir()), folder)


def _seal(meta: dict[str, Any]) -> str:
    """The SHA-256 of metadata without their own checksum."""
    content = json.dumps({k: v for k, v in meta.items() if k != "sha256"}, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


# ----------------------------------------------------------------------------------------------------------------------
# Saving


def save_checkpoint(
    checkpoint_dir: str | os.PathLike,
    step: int,
    model_data: dict[str, torch.Tensor] | None,
    optimizer_data: Any,
    meta_data: dict[str, Any] | None,
    rank: int = 0,
) -> bool:
    """
    Saves a checkpoint. All ranks of a process group must call this function together. Returns whether all of the
    checkpoint is on the disk.

    - model_data and meta_data are used on rank 0 only.
    - optimizer_data is this rank's, made of tensors, numbers, strings, lists and dicts, which
      torch.load(weights_only=True) can read. None gets no file.

    If the disk is full or the folder is read-only, a warning says so, and the result is False on every rank. The
    checkpoints of other steps stay as they are.
    """
    folder = Path(checkpoint_dir)
    place = folder / f"step_{step:06d}"
    tmp, old = place.with_suffix(".tmp"), place.with_suffix(".old")
    parts = {_name("model", step): model_data if rank == 0 else None, _name("optim", step, rank): optimizer_data}
    files: dict[str, str] = {}
    problem = None
    try:
        tmp.mkdir(parents=True, exist_ok=True)
        for name, data in parts.items():
            if data is not None:
                with atomic_open(tmp / name) as f:
                    torch.save(data, f)
                files[name] = sha256_file(tmp / name)
    except (OSError, RuntimeError) as e:
        hidden = "a file could not be written whole (is the disk full?)"  # torch.save raises RuntimeError without it.
        problem = f"rank {rank}: {one_line(e) if isinstance(e, OSError) else hidden}"
    of_ranks = of_all_ranks((files, problem))
    problem = next((problem for _, problem in of_ranks if problem), None)
    try:
        if rank == 0 and problem is None:
            files = {name: digest for of_rank, _ in of_ranks for name, digest in of_rank.items()}
            meta = {**(meta_data or {}), "step": step, "format": FORMAT, "world_size": len(of_ranks), "files": files}
            meta = json.loads(json.dumps(meta, default=str))
            atomic_write(tmp / _name("meta", step), json.dumps({**meta, "sha256": _seal(meta)}, indent=2))
            if place.exists():
                place.rename(old)
            tmp.rename(place)
            fsync_dir(folder)
            delete(old)
    except OSError as e:
        problem = one_line(e)
    problem = of_all_ranks(problem)[0]
    if rank == 0 and problem is not None:
        delete(tmp)
        logger.warning(
            f"checkpoint of step {step} NOT saved in {folder}: {problem}; older checkpoints are as they were"
        )
    elif rank == 0:
        logger.info(f"Saved checkpoint of step {step} in {folder}")
    return problem is None


# ----------------------------------------------------------------------------------------------------------------------
# Deleting

# A killed save leaves one with the name that files.atomic_open has given it.
_CHECKPOINT_FILE = re.compile(r"\.?(model|optim|meta)_\d{6,}(_rank\d+)?\.(pt|json)(\.[0-9a-f]{8}\.tmp)?")
# What a run writes into its folder besides checkpoints: its log, and the results and parts of its evaluations.
_RUN_FILE = re.compile(
    _CHECKPOINT_FILE.pattern + r"|metrics\.jsonl|(eval|unfinished|method|manifest)_\d{6,}(_\w+)?\.(json|pt)"
)


def delete(place: Path) -> None:
    """Deletes the files of a checkpoint's folder, and the folder if nothing else is in it. A killed deletion leaves a
    folder that is no checkpoint any more."""
    tmp = place.with_suffix(".tmp")
    if place != tmp and place.is_dir():
        delete(tmp)
        with contextlib.suppress(OSError):  # Files of others may be left there.
            place = place.rename(tmp)
    try:
        for path in _checkpoint_files(place):
            path.unlink()
        with contextlib.suppress(OSError):
            place.rmdir()
    except OSError as e:
        logger.warning(f"cannot delete {e.filename} ({e.strerror})")


def delete_remains(folder: Path) -> None:
    """Deletes what killed saves and deletions have left. An old folder whose new one is missing gets its name back."""
    for place in folder.glob("step_*.old"):
        if place.with_suffix("").exists():
            delete(place)
        else:
            place.rename(place.with_suffix(""))
    for place in folder.glob("step_*.tmp"):
        delete(place)


def delete_steps(checkpoint_dir: Path, steps: Iterable[int]) -> None:
    """Deletes the checkpoints of these steps. nanochat's own checkpoints are never deleted."""
    for step in steps:
        if (place := _place(checkpoint_dir, step)) != checkpoint_dir:
            delete(place)


def prune_checkpoints(checkpoint_dir: Path, keep_last: int, step: int, forget_later: bool = False) -> None:
    """
    Deletes all checkpoints but the newest `keep_last` up to `step`, which was saved last. Only one rank must call this
    function.

    If keep_last is less than 1, none of these is deleted. Later steps are deleted with `forget_later` alone. nanochat's
    own checkpoints do not count, and stay.
    """
    own = [s for s in list_steps(checkpoint_dir) if _place(checkpoint_dir, s) != checkpoint_dir]
    delete_steps(checkpoint_dir, [s for s in own if s > step] if forget_later else ())
    delete_steps(checkpoint_dir, [s for s in own if s <= step][keep_last:] if keep_last > 0 else ())


def delete_run(folder: Path) -> list[str]:
    """Deletes what a run has written into its folder, and returns the names of other files, which stay. Raises
    UserError if a checkpoint cannot be deleted."""
    delete_steps(folder, list_steps(folder))
    for path in folder.iterdir() if folder.is_dir() else ():
        if _RUN_FILE.fullmatch(path.name) and not path.is_dir():
            with contextlib.suppress(OSError):
                path.unlink()
    if list_steps(folder):  # Otherwise 'latest' would find a checkpoint of the old run.
        raise UserError(f"--overwrite cannot delete {folder}; delete it, or choose another --model-tag")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ----------------------------------------------------------------------------------------------------------------------
# Finding


_TYPES: dict[str, type] = dict.fromkeys(("model_config", "user_config", "run_config", "parent"), dict)
_TYPES |= {"recipes": list, "world_size": int}


def read_meta(checkpoint_dir: str | os.PathLike, step: int) -> dict[str, Any]:
    """Returns the metadata of a checkpoint. If they are missing or damaged, the result is empty, and load_checkpoint
    says what is damaged."""
    folder = Path(checkpoint_dir)
    place = _place(folder, step)
    path = place / _name("meta", step)
    try:
        # A pipe or a device in the place of a file would be read for ever.
        meta = json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict) or (place != folder and meta.get("sha256") != _seal(meta)):
        return {}
    # Metadata without a checksum may have been edited.
    return {k: v for k, v in meta.items() if isinstance(v, _TYPES.get(k, object))} | {"step": step}


def _problem(folder: Path, step: int, wanted: tuple[str, ...] = ()) -> str | None:
    """The reason why a checkpoint cannot be used, or None. If `wanted` has names, only these files are checked."""
    place, meta = _place(folder, step), read_meta(folder, step)
    if not meta:
        return f"{_name('meta', step)} is missing or damaged"
    # nanochat's own checkpoints have no checksums.
    files = meta["files"] if place != folder else dict.fromkeys(wanted or [_name("model", step)])
    for name in wanted or files:
        try:
            if name not in files or not (place / name).is_file():
                return f"{name} is missing"
            if files[name] and sha256_file(place / name) != files[name]:
                return f"{name} differs from its checksum"
        except OSError as e:
            return f"{name} cannot be read ({e.strerror})"
    return None


def _checkpoint_files(place: Path) -> list[Path]:
    return [p for p in place.iterdir() if _CHECKPOINT_FILE.fullmatch(p.name)] if place.is_dir() else []


def list_steps(checkpoint_dir: str | os.PathLike) -> list[int]:
    """Returns the steps that have a checkpoint, intact or damaged, the newest first. If the folder does not exist,
    the result is empty."""
    names = os.listdir(checkpoint_dir) if os.path.isdir(checkpoint_dir) else []
    own = (re.fullmatch(r"step_(\d{6,})(\.old)?", name) for name in names)
    steps = {int(m[1]) for m in own if m and _checkpoint_files(Path(checkpoint_dir, m[0]))}
    flat = (re.fullmatch(r"model_(\d{6,})\.pt", name) for name in names)
    return sorted(steps | {int(m[1]) for m in flat if m}, reverse=True)


def find_last_step(checkpoint_dir: str | os.PathLike) -> int:
    """
    Returns the step of the newest intact checkpoint. A warning names each newer checkpoint that is damaged.

    Every file of every rank is hashed. In a process group rank 0 does so, and all ranks get its result; they must call
    this function together. Raises NoCheckpointError if there is no checkpoint, and UserError if none is intact.
    """
    folder, answer, problems = Path(checkpoint_dir), None, []
    for step in list_steps(folder) if get_dist_info()[1] == 0 else ():
        if (problem := _problem(folder, step)) is None:
            answer = step
            break
        problems.append(f"step {step}: {problem}")
    answer, problems = of_all_ranks((answer, problems))[0]
    if answer is None and not problems:
        raise NoCheckpointError(f"there are no checkpoints in {folder}; train a model first, or check --model-tag")
    if answer is None:
        raise UserError(
            f"no checkpoint in {folder} is intact ({'; '.join(problems[:5])}); restore a copy of one, or start a new "
            "run under another --model-tag"
        )
    for problem in problems if get_dist_info()[1] == 0 else ():
        logger.warning(f"damaged checkpoint in {folder} passed over: {problem}; falling back to step {answer}")
    return answer


def weights_digest(checkpoint_dir: Path, step: int | None) -> str | None:
    """Returns the SHA-256 of a checkpoint's weights, or None for nanochat's own checkpoints, which have none."""
    files = {} if step is None else read_meta(checkpoint_dir, step).get("files", {})
    return files.get(_name("model", step or 0))


# ----------------------------------------------------------------------------------------------------------------------
# Loading


def load_checkpoint(
    checkpoint_dir: str | os.PathLike,
    step: int | None,
    device: str | torch.device,
    load_optimizer: bool = False,
    rank: int = 0,
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]], dict[str, Any]]:
    """
    Returns (model_data, optimizer_data, meta_data) of a step, checked against its checksums, with tensors on `device`.

    step=None takes the newest intact checkpoint (find_last_step), and meta_data["step"] is its step. A given step is
    never replaced by another one: if it is damaged, the UserError names the damaged file and the newest intact step.
    Raises NoCheckpointError if the step has no checkpoint.

    optimizer_data is empty without load_optimizer. Otherwise it is a list of this rank's data alone if as many ranks
    train now as wrote the checkpoint (meta_data["world_size"]), or else of all ranks' data, on the CPU.
    """
    folder = Path(checkpoint_dir)
    step = find_last_step(folder) if step is None else step
    if step not in (steps := list_steps(folder)):
        known = f"steps {steps[:10]}" if steps else "none: train a model first, or check --model-tag"
        raise NoCheckpointError(f"there is no checkpoint of step {step} in {folder}; it has {known}")
    meta, place, world_size = read_meta(folder, step), _place(folder, step), get_dist_info()[3]
    saved = meta.get("world_size", world_size)
    ranks = [] if not load_optimizer else [rank] if saved == world_size else range(saved)
    names = [_name("optim", step, r) for r in ranks]
    if problem := _problem(folder, step, wanted=(_name("model", step), *names)):
        others = (s for s in steps if s != step and _problem(folder, s) is None)
        way_out = next((f"step {s} is intact (--resume-from-step {s}, --model-step {s})" for s in others), None)
        raise UserError(
            f"checkpoint of step {step} in {folder}: {problem}; "
            f"{way_out or 'there is no other; restore a copy, or start a new run'}"
        )
    if place == folder and rank == 0:
        logger.warning(f"the checkpoint of step {step} in {folder} has no checksums, so damage to it would not be seen")
    model_data = _load(place / _name("model", step), device)
    if not isinstance(model_data, dict):
        raise UserError(f"{place / _name('model', step)} holds no state dict; restore a copy, or use another step")
    of_one = len(ranks) == 1 and saved == world_size
    return model_data, [_load(place / name, device if of_one else "cpu", mmap=not of_one) for name in names], meta


def _load(path: Path, device: str | torch.device, mmap: bool = False) -> Any:
    try:
        return torch.load(str(path), map_location=device, weights_only=True, mmap=mmap)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as e:  # For a damaged file torch.load raises exceptions of nearly any type.
        raise UserError(f"{path} cannot be read as weights ({one_line(e)[:120]}); use another step") from e
