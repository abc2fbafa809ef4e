"""
Saving, finding, loading and deleting checkpoints. A checkpoint is a set of nanochat's files with a manifest of their
checksums. Either all of the files exist, or the checkpoint does not exist.

    model_000100.pt         the weights (rank 0)
    optim_000100_rank0.pt   a rank's optimizers, random state and data position (every rank)
    method_000100.pt        what the QAT method has learned besides the weights, if anything (rank 0; nf.gram_state)
    meta_000100.json        model config, method, settings, losses (rank 0)
    manifest_000100.json    size and SHA-256 of the files above, and how many ranks wrote them

A save first makes the empty file unfinished_000100.json. Then it writes each file under a temporary name, flushes it to
the disk and renames it. It writes the manifest last, and from then on the checkpoint exists. A step that has an
unfinished file and no manifest is not a checkpoint, because a save or a deletion was killed. The next save deletes the
files of such a step.

Files that have neither an unfinished file nor a manifest are nanochat's own checkpoints, or checkpoints of this package
whose manifest was lost. They can be read, and reading them gives a warning. All calls of torch.load have
weights_only=True, so that a checkpoint cannot run code.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat_fp4.cli import UserError, logger, one_line
from nanochat_fp4.common import get_dist_info, is_ddp_initialized, of_all_ranks
from nanochat_fp4.files import atomic_open, sha256_file

FORMAT = "nanochat_fp4 checkpoint, version 1"


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
    """Returns the name of a step's file. kind is model, optim, method, meta, manifest or unfinished."""
    ends = {"optim": f"_rank{rank:d}.pt", "model": ".pt", "method": ".pt"}
    return f"{kind}_{step:06d}{ends.get(kind, '.json')}"


# ----------------------------------------------------------------------------------------------------------------------
# Saving


class _HashingFile:
    """A file object for torch.save that computes the size and the SHA-256 of the data that it writes."""

    def __init__(self, f: Any):
        self.f, self.sha256, self.size = f, hashlib.sha256(), 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.size += len(data)
        try:
            return self.f.write(data)
        except OSError as e:
            self.error = self.error or e
            raise

    def flush(self) -> None:
        self.f.flush()


def _write(folder: Path, name: str, content: Any) -> dict[str, Any]:
    """Writes `content`, which is bytes or an object for torch.save. Returns the file's entry in the manifest."""
    with atomic_open(folder / name) as f:
        hashing = _HashingFile(f)
        if isinstance(content, bytes):
            hashing.write(content)
        else:
            try:
                torch.save(content, hashing)
            except RuntimeError as e:  # torch.save hides the reason of a failed write.
                raise hashing.error or e from e
    return {"name": name, "size": hashing.size, "sha256": hashing.sha256.hexdigest()}


def _plain(value: Any) -> Any:
    """Makes a value fit for JSON. A number of torch or NumPy becomes a number of Python, and anything else becomes
    text."""
    return value.item() if hasattr(value, "item") and getattr(value, "numel", lambda: 1)() == 1 else str(value)


def save_checkpoint(
    checkpoint_dir: str | os.PathLike,
    step: int,
    model_data: dict[str, torch.Tensor] | None,
    optimizer_data: Any,
    meta_data: dict[str, Any] | None,
    rank: int = 0,
    method_data: dict[str, torch.Tensor] | None = None,
) -> bool:
    """
    Saves a checkpoint. All ranks of a process group must call this function together. Returns whether all of the
    checkpoint is on the disk.

    - model_data, meta_data and method_data are used on rank 0 only. An empty method_data gets no file.
    - optimizer_data is this rank's, made of tensors, numbers, strings, lists and dicts, which
      torch.load(weights_only=True) can read. None gets no file.

    If the disk is full or the folder is read-only, a warning says so, and the result is False on every rank. The
    checkpoints of other steps stay as they are.
    """
    folder = Path(checkpoint_dir)
    entries: list[dict[str, Any]] = []

    def begin() -> None:
        """Marks the step as unfinished, and writes the metadata."""
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            _delete_remains(folder)
            _write(folder, _name("unfinished", step), b"")
            (folder / _name("manifest", step)).unlink(missing_ok=True)
            meta = {**(meta_data or {}), "step": step, "format": FORMAT}
            entries.append(_write(folder, _name("meta", step), json.dumps(meta, indent=2, default=_plain).encode()))

    def write_files() -> None:
        if rank == 0:
            entries.insert(0, _write(folder, _name("model", step), model_data))
            if method_data:
                entries.insert(1, _write(folder, _name("method", step), method_data))
        if optimizer_data is not None:
            entries.append(_write(folder, _name("optim", step, rank), optimizer_data))

    def write_manifest() -> None:
        manifest = {"format": FORMAT, "step": step, "world_size": len(files), "files": sum(files, [])}
        if rank == 0:
            _write(folder, _name("manifest", step), f"{json.dumps(manifest, indent=2)}\n".encode())
            (folder / _name("unfinished", step)).unlink(missing_ok=True)

    problem = _problem_of_any_rank(begin, rank) or _problem_of_any_rank(write_files, rank)
    files = of_all_ranks(entries)
    problem = problem or _problem_of_any_rank(write_manifest, rank)
    if rank == 0 and problem:
        _delete(folder, step)
        logger.warning(
            f"checkpoint of step {step} NOT saved in {folder}: {problem}; older checkpoints are as they were"
        )
    elif rank == 0:
        logger.info(f"Saved checkpoint of step {step} in {folder}")
    return problem is None


def _problem_of_any_rank(work: Callable[[], None], rank: int) -> str | None:
    """Calls work() on every rank. Returns the problem of the first rank on which it failed, or None."""
    problem = None
    try:
        work()
    except (OSError, RuntimeError) as e:
        problem = f"rank {rank}: {one_line(e)}"
    return next(filter(None, of_all_ranks(problem)), None)


def _delete_remains(folder: Path) -> None:
    """Deletes what killed saves and deletions have left: temporary files, and the files of unfinished steps."""
    for path in folder.iterdir():
        if re.fullmatch(r"\.?(model|method|optim|meta|manifest|unfinished)_\d+[_.].*\.(staged|tmp)", path.name):
            with contextlib.suppress(OSError):
                path.unlink()
    for step in _named_steps(folder, "unfinished"):
        if (folder / _name("manifest", step)).exists():  # Either everything was written, or nothing was deleted yet.
            (folder / _name("unfinished", step)).unlink(missing_ok=True)
        else:
            _delete(folder, step)


def prune_checkpoints(checkpoint_dir: str | os.PathLike, keep_last: int, step: int | None = None) -> None:
    """
    Deletes all complete checkpoints but the newest `keep_last`. Only one rank must call this function.

    If keep_last is less than 1, nothing is deleted. Incomplete checkpoints do not count, and nanochat's own, which have
    no manifest, are never deleted. `step` is the step that was saved last. Checkpoints of later steps do not count
    either: they are damaged, because --resume-from-step=latest has passed over them.
    """
    if keep_last < 1:
        return
    folder = Path(checkpoint_dir)
    steps = [s for s in _named_steps(folder, "manifest") if step is None or s <= step]
    for old in [s for s in steps if _problem(folder, s, hashes=False) is None][keep_last:]:
        _delete(folder, old)


def forget_later_checkpoints(checkpoint_dir: str | os.PathLike, step: int) -> None:
    """Deletes the checkpoints of later steps than `step`. They belong to a run that was resumed from an earlier
    step, and --resume-from-step=latest must not find them."""
    for later in (s for s in list_steps(checkpoint_dir) if s > step):
        _delete(Path(checkpoint_dir), later)


def _delete(folder: Path, step: int) -> None:
    """Deletes the files of a step. If the process is killed meanwhile, the step is left unfinished."""
    unfinished = folder / _name("unfinished", step)
    try:
        if any(folder.glob(f"*_{step:06d}[._]*")):
            unfinished.touch()
            for kind in ("manifest", "optim", "model", "method", "meta"):
                for path in sorted(folder.glob(f"{kind}_{step:06d}[._]*")):
                    path.unlink(missing_ok=True)
        unfinished.unlink(missing_ok=True)
    except OSError as e:
        logger.warning(f"cannot delete {e.filename} ({e.strerror})")


# ----------------------------------------------------------------------------------------------------------------------
# Finding


def _named_steps(folder: Path, kind: str) -> list[int]:
    """Returns the steps of all files <kind>_<step>.<suffix>, the newest first."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(rf"{kind}_(\d{{6,}})\.(?:pt|json)", name) for name in os.listdir(folder))
    return sorted({int(m.group(1)) for m in matches if m}, reverse=True)


def _read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """Reads the manifest of a step. Raises UserError if it cannot be read or is not of the form of a manifest."""
    path = folder / _name("manifest", step)
    try:
        manifest = json.loads(path.read_bytes())
        good = manifest["format"] == FORMAT and manifest["step"] == step and manifest["world_size"] >= 1
        for entry in manifest["files"]:
            # Only names that a save makes are accepted, because a manifest must not lead out of the folder.
            kind = re.fullmatch(
                rf"((model|method)_{step:06d}\.pt|meta_{step:06d}\.json|optim_{step:06d}_rank\d+\.pt)", entry["name"]
            )
            good &= bool(kind and isinstance(entry["size"], int) and isinstance(entry["sha256"], str))
        names = {entry["name"] for entry in manifest["files"]}
        good &= {_name("model", step), _name("meta", step)} <= names
    except OSError as e:
        raise UserError(f"{path.name} cannot be read ({e.strerror})") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path.name} is damaged") from e
    if not good:
        raise UserError(f"{path.name} is damaged")
    return manifest


def _entries(folder: Path, step: int) -> dict[str, dict[str, Any]]:
    """Returns the manifest's entries by name. Without an intact manifest the result is empty."""
    try:
        return {entry["name"]: entry for entry in _read_manifest(folder, step)["files"]}
    except UserError:
        return {}


def _file_problem(folder: Path, entry: dict[str, Any], hashes: bool) -> str | None:
    path = folder / entry["name"]
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
        if size != entry["size"]:
            return f"{entry['name']} has {size:,} bytes instead of {entry['size']:,}"
        if hashes and sha256_file(path) != entry["sha256"]:
            return f"{entry['name']} differs from its checksum"
    except FileNotFoundError:
        return f"{entry['name']} is missing"
    except OSError as e:
        return f"{entry['name']} cannot be read ({e.strerror})"
    return None


def _problem(folder: Path, step: int, hashes: bool = True, wanted: Sequence[str] = ()) -> str | None:
    """Returns the reason why the checkpoint of a step cannot be used, or None. If `wanted` has names, only these
    files are checked. hashes=False compares the sizes of files and not their checksums."""
    # Without a manifest, which was lost or which nanochat did not write, a model and its metadata are enough.
    if not (folder / _name("manifest", step)).exists():
        names = (_name("model", step), _name("meta", step))
        return next((f"{name} is missing" for name in names if not (folder / name).is_file()), None)
    try:
        entries = {entry["name"]: entry for entry in _read_manifest(folder, step)["files"]}
    except UserError as e:
        return str(e)
    for name in wanted or entries:
        if name not in entries:
            return f"{name} was not saved"
        if problem := _file_problem(folder, entries[name], hashes):
            return problem
    return None


def list_steps(checkpoint_dir: str | os.PathLike) -> list[int]:
    """Returns the steps that have a checkpoint, intact or damaged, the newest first. If the folder does not exist,
    the result is empty. The files of an unfinished step are not a checkpoint."""
    folder = Path(checkpoint_dir)
    steps = set(_named_steps(folder, "manifest"))
    steps |= set(_named_steps(folder, "model")) - set(_named_steps(folder, "unfinished"))
    return sorted(steps, reverse=True)


def find_last_step(checkpoint_dir: str | os.PathLike) -> int:
    """
    Returns the step of the newest intact checkpoint. A warning names each newer checkpoint that is damaged.

    Every file of every rank that the manifest lists is hashed. In a process group rank 0 does so, and all ranks get its
    result; they must call this function together. Raises NoCheckpointError if there is no checkpoint, and UserError if
    none is intact.
    """
    folder = Path(checkpoint_dir)
    answer: Any = None
    if not is_ddp_initialized() or dist.get_rank() == 0:
        problems = []
        for step in list_steps(folder):
            problem = _problem(folder, step)
            if problem is None:
                answer = step
                break
            problems.append(f"step {step}: {problem}")
        for problem in problems if answer is not None else []:
            logger.warning(f"damaged checkpoint in {folder} passed over: {problem}; falling back to step {answer}")
        if answer is None and problems:
            answer = (
                f"no checkpoint in {folder} is intact ({'; '.join(problems[:5])}); restore a copy of one, or start a "
                "new run under another --model-tag"
            )
    if is_ddp_initialized():
        box = [answer]
        dist.broadcast_object_list(box, src=0)
        answer = box[0]
    if answer is None:
        raise NoCheckpointError(f"there are no checkpoints in {folder}; train a model first, or check --model-tag")
    if isinstance(answer, str):
        raise UserError(answer)
    return answer


# ----------------------------------------------------------------------------------------------------------------------
# Loading


def _torch_load(path: Path, device: Any, mmap: bool = False) -> Any:
    """Loads a file. With mmap the file is read on demand, for a caller that needs little of it."""
    try:
        return torch.load(str(path), map_location=device, weights_only=True, mmap=mmap)
    except FileNotFoundError as e:
        raise UserError(f"{path} is missing; restore a copy, or use another step") from e
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as e:  # For a damaged file torch.load raises exceptions of nearly any type.
        raise UserError(f"{path} cannot be read as weights ({one_line(e)[:120]}); use another step") from e


def load_checkpoint(
    checkpoint_dir: str | os.PathLike,
    step: int | None,
    device: str | torch.device,
    load_optimizer: bool = False,
    rank: int = 0,
) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    """
    Returns (model_data, optimizer_data or None, meta_data) of a step, checked against the manifest, with tensors on
    `device`.

    step=None takes the newest intact checkpoint (find_last_step), and meta_data["step"] is its step. A given step is
    never replaced by another one: if it is damaged, the UserError names the damaged file and the newest intact step.
    Raises NoCheckpointError if the step has no checkpoint.

    load_optimizer says whether to load this rank's file as well. If another number of ranks wrote the checkpoint,
    optimizer_data is that of one rank and has one more entry: "ranks" is the list of all ranks' data, with tensors on
    the CPU.
    """
    folder = Path(checkpoint_dir)
    step = find_last_step(folder) if step is None else step
    if step not in (steps := list_steps(folder)):
        known = ", ".join(map(str, steps[:10]))
        raise NoCheckpointError(
            f"there is no checkpoint of step {step} in {checkpoint_dir}; "
            + (f"it has steps {known}" if known else "it has none: train a model first, or check --model-tag")
        )
    entries = _entries(folder, step)
    world_size = dist.get_world_size() if is_ddp_initialized() else get_dist_info()[3]
    saved = _read_manifest(folder, step)["world_size"] if entries else world_size
    ranks = [] if not load_optimizer else [rank] if saved == world_size else list(range(saved))
    model_name, meta_name = _name("model", step), _name("meta", step)
    wanted = [model_name, meta_name, *(_name("optim", step, r) for r in ranks)]
    if problem := _problem(folder, step, wanted=wanted):
        raise UserError(f"checkpoint of step {step} in {folder}: {problem}; {_way_out(folder, step)}")
    if not entries:
        logger.warning(f"the checkpoint of step {step} in {folder} has no manifest, so nothing vouches for its files")
    try:
        meta = json.loads((folder / meta_name).read_bytes())
        if not isinstance(meta, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{folder / meta_name} is damaged ({one_line(e)[:100]}); {_way_out(folder, step)}") from e
    meta.setdefault("step", step)
    model_data = _torch_load(folder / model_name, device)
    if not isinstance(model_data, dict):
        raise UserError(f"{folder / model_name} holds no state dict; {_way_out(folder, step)}")
    optimizer_data = None
    if ranks and saved == world_size:
        optimizer_data = _torch_load(folder / _name("optim", step, rank), device)
    elif ranks:
        parts = [_torch_load(folder / _name("optim", step, r), "cpu", mmap=True) for r in ranks]
        optimizer_data = dict(parts[rank] if rank < len(parts) else parts[0])
        optimizer_data["ranks"] = parts
    return model_data, optimizer_data, meta


def load_method_data(checkpoint_dir: str | os.PathLike, step: int, device: str | torch.device) -> dict[str, Any]:
    """Returns what the QAT method has learned besides the weights (nf.gram_state), checked against the manifest. The
    result is empty if the checkpoint has no such file. Raises UserError if the file is damaged."""
    folder = Path(checkpoint_dir)
    entry = _entries(folder, step).get(_name("method", step))
    if entry is None:
        return {}
    if problem := _file_problem(folder, entry, hashes=True):
        raise UserError(f"checkpoint of step {step} in {folder}: {problem}; {_way_out(folder, step)}")
    return _torch_load(folder / entry["name"], device)


def weights_digest(checkpoint_dir: Path, step: int | None) -> str | None:
    """Returns the SHA-256 of the weights from the manifest, or None without a manifest (nanochat's own checkpoints)."""
    return None if step is None else _entries(checkpoint_dir, step).get(_name("model", step), {}).get("sha256")


def _way_out(folder: Path, step: int) -> str:
    """Returns the last part of an error message, which names the newest other step that is intact."""
    for other in list_steps(folder):
        if other != step and _problem(folder, other) is None:
            return f"step {other} is intact (--resume-from-step {other}, --model-step {other})"
    return "there is no other; restore a copy, or start a new run"
