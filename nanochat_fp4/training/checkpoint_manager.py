"""
Saving, finding, loading and pruning checkpoints: nanochat's files and a manifest of their checksums, all there or not.

    model_000100.pt         weights (rank 0)
    optim_000100_rank0.pt   whatever a rank needs to go on: optimizer, random state, data position (every rank)
    method_000100.pt        what the QAT method has learned besides the weights, where it has (rank 0; nf.gram_state)
    meta_000100.json        model config, method, settings, losses (rank 0)
    manifest_000100.json    size and SHA-256 of the files above, and how many ranks wrote them

A save first writes every file under a temporary name (`model_000100.pt.<random>.staged`) and flushes it to the disk.
Then the manifest, which lists these names, appears in one rename: at that moment the checkpoint exists. Only after it
the files get their own names. A process killed before that moment leaves an older checkpoint of the same step, if
there was one, as it was; killed after it, readers find the files under their temporary names. So there is no moment at
which a kill loses a checkpoint that existed, or makes one that is not complete.

Files without a manifest are nanochat's own checkpoints; they are read with a warning that nothing vouches for them.
Everything is loaded with weights_only=True: a checkpoint cannot run code.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from nanochat_fp4.common import get_base_dir, get_dist_info, is_ddp_initialized, set_cpu_threads
from nanochat_fp4.console import format_bytes, logger
from nanochat_fp4.data.tokenizer import RustBPETokenizer, get_tokenizer
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.files import atomic_write, fsync_dir
from nanochat_fp4.hardware import physical_memory
from nanochat_fp4.models.gpt import GPT, ROTARY_FACTOR, GPTConfig
from nanochat_fp4.models.llama import Llama, LlamaConfig
from nanochat_fp4.nvfp4.feedback import load_gram_state

FORMAT = "nanochat_fp4 checkpoint, version 1"

SOURCES = {
    "base": "base_checkpoints",
    "mid": "mid_checkpoints",
    "sft": "chatsft_checkpoints",
    "rl": "chatrl_checkpoints",
}


class NoCheckpointError(UserError, FileNotFoundError):
    """There is no checkpoint at all (rather than a damaged one)."""


def check_model_tag(model_tag: str | None) -> None:
    """Raise UserError unless a --model-tag names one folder (None: no tag was given).

    The tag becomes part of paths, also of paths that are deleted.
    """
    if model_tag is None:
        return
    long = len(os.fsencode(model_tag)) > 100
    if long or Path(model_tag).name != model_tag or model_tag in ("", ".", "..") or not model_tag.isprintable():
        raise UserError(
            f"--model-tag={model_tag[:100]!r} is not the name of one folder; use up to 100 characters without slashes"
        )


def checkpoint_folder(source: str, model_tag: str) -> Path:
    """The folder of a tag's checkpoints of base, mid, sft or rl. Raises UserError for a tag that is no name."""
    check_model_tag(model_tag)
    return Path(get_base_dir()) / SOURCES[source] / model_tag


def _model_name(step: int) -> str:
    return f"model_{step:06d}.pt"


def _optim_name(step: int, rank: int) -> str:
    return f"optim_{step:06d}_rank{rank:d}.pt"


def _method_name(step: int) -> str:
    return f"method_{step:06d}.pt"


def _meta_name(step: int) -> str:
    return f"meta_{step:06d}.json"


def _manifest_name(step: int) -> str:
    return f"manifest_{step:06d}.json"


# ----------------------------------------------------------------------------------------------------------------------
# Saving


class _HashingFile:
    """A file object for torch.save that computes the SHA-256 and size of what passes through."""

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


def _stage(folder: Path, name: str, content: Any) -> dict[str, Any]:
    """Write `content` (bytes, or an object for torch.save) under a temporary name; returns the manifest's entry."""
    staged = f"{name}.{secrets.token_hex(4)}.staged"
    try:
        with open(folder / staged, "xb") as f:
            hashing = _HashingFile(f)
            if isinstance(content, bytes):
                hashing.write(content)
            else:
                try:
                    torch.save(content, hashing)
                except RuntimeError as e:  # what torch.save makes of a failed write does not say why it failed
                    raise hashing.error or e from e
            f.flush()
            os.fsync(f.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(folder / staged)
        raise
    return {"name": name, "staged": staged, "size": hashing.size, "sha256": hashing.sha256.hexdigest()}


def _settle(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Give staged files their own names. What fails here is found under the temporary name by every reader."""
    for entry in entries:
        with contextlib.suppress(OSError):
            os.replace(folder / entry["staged"], folder / entry["name"])
    fsync_dir(folder)


def _exchange(value: Any) -> list[Any]:
    """`value` of every rank, by rank."""
    if not is_ddp_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _plain(value: Any) -> Any:
    """For json: numbers from torch and numpy as Python's, everything else as text."""
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
    Save a checkpoint; to be called by all ranks of a process group together. True once it is on the disk as a whole.

    model_data, meta_data, method_data: used on rank 0; of method_data only what is not empty. optimizer_data: of this
    rank, anything that torch.load(weights_only=True) reads (tensors, numbers, strings, lists, dicts); None saves none.
    A full disk or a read-only folder is reported (by a warning) and gives False on every rank; nothing that was there
    before changes.
    """
    folder = Path(checkpoint_dir)
    entries: list[dict[str, Any]] = []
    problem = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            # Other ranks may have begun with this step, but with no other: the rest is a killed save's. Before, because
            # it may be what fills the disk.
            _sweep(folder, lambda s: s != step)
            meta = {**(meta_data or {}), "step": step, "format": FORMAT}
            entries.append(_stage(folder, _model_name(step), model_data))
            if method_data:
                entries.append(_stage(folder, _method_name(step), method_data))
            entries.append(_stage(folder, _meta_name(step), json.dumps(meta, indent=2, default=_plain).encode()))
        if optimizer_data is not None:
            entries.append(_stage(folder, _optim_name(step, rank), optimizer_data))
    except (OSError, RuntimeError) as e:
        problem = f"rank {rank}: {one_line(e)}"

    results = _exchange((problem, entries))
    problem = next((p for p, _ in results if p), None)
    if rank == 0 and problem is None:
        files = [entry for _, rank_entries in results for entry in rank_entries]
        manifest = {"format": FORMAT, "step": step, "world_size": len(results), "files": files}
        try:
            atomic_write(folder / _manifest_name(step), json.dumps(manifest, indent=2) + "\n")
        except OSError as e:
            problem = one_line(e)
    problem = _exchange(problem)[0]
    if problem is not None:
        for entry in entries:
            with contextlib.suppress(OSError):
                os.unlink(folder / entry["staged"])
        if rank == 0:
            logger.warning(
                f"checkpoint of step {step} NOT saved in {folder}: {problem}; older checkpoints are as they were"
            )
        return False
    _settle(folder, entries)
    if rank == 0:
        _sweep(folder, lambda s: s == step)
        logger.info(f"Saved checkpoint of step {step} in {folder}")
    return True


def _sweep(folder: Path, which: Callable[[int], bool]) -> None:
    """Finish what killed saves of some steps left: settle what a manifest lists, delete what none does."""
    listed: set[str] = set()
    for step in _manifest_steps(folder):
        with contextlib.suppress(UserError):
            entries = _read_manifest(folder, step)["files"]
            listed |= {entry["staged"] for entry in entries}
            if which(step):
                _settle(folder, [entry for entry in entries if (folder / entry["staged"]).exists()])
    for path in folder.iterdir():
        staged = re.fullmatch(r"(?:model|method|optim|meta)_(\d+)[_.].*\.staged", path.name)
        unfinished = re.fullmatch(r"\.manifest_(\d+)\.json\..*\.tmp", path.name)
        match = staged or unfinished
        if match and which(int(match.group(1))) and path.name not in listed:
            with contextlib.suppress(OSError):
                path.unlink()


def finish_killed_saves(checkpoint_dir: str | os.PathLike) -> None:
    """
    What the next save would do after a kill; for rank 0 of a run that resumes, since after the last step no save comes.

    For nobody who only reads: a run may be saving. What is newer than every manifest is left to the next save, for it
    may be that of a process which is still ending.
    """
    folder = Path(checkpoint_dir)
    if steps := _manifest_steps(folder):
        _sweep(folder, lambda s: s <= steps[0])


def prune_checkpoints(checkpoint_dir: str | os.PathLike, keep_last: int) -> None:
    """
    Delete all but the newest `keep_last` complete checkpoints; nothing where keep_last < 1. Rank 0 does the work.

    Checkpoints that are not complete do not count, and nanochat's own (without a manifest) are never deleted.
    """
    if keep_last < 1 or get_dist_info()[1] != 0:
        return
    folder = Path(checkpoint_dir)
    complete = [step for step in _manifest_steps(folder) if _problem(folder, step, hashes=False) is None]
    doomed = complete[keep_last:]
    for step in _named_steps(folder, "meta"):
        # The rest of a deletion that was cut short: ours, and without a manifest.
        if not (folder / _manifest_name(step)).exists() and _is_ours(folder, step):
            doomed.append(step)
    for step in doomed:
        # The manifest goes first, for without it the checkpoint no longer counts; the metadata goes last, because it
        # is what tells the rest from a checkpoint of nanochat's.
        names = [_manifest_name(step)]
        names += sorted(p.name for p in folder.glob(f"optim_{step:06d}_rank*.pt")) + [
            _model_name(step),
            _method_name(step),
            _meta_name(step),
        ]
        for name in names:
            try:
                os.unlink(folder / name)
            except FileNotFoundError:
                continue
            except OSError as e:
                logger.warning(f"cannot delete {folder / name} ({e.strerror})")
                break


def forget_later_checkpoints(checkpoint_dir: str | os.PathLike, step: int) -> None:
    """
    Delete the checkpoints after `step`: they belong to a run that was continued from an earlier step instead, and
    'latest' must not find them. The manifest goes first, so that what is half deleted no longer counts.
    """
    folder = Path(checkpoint_dir)
    for later in (s for s in list_steps(folder) if s > step):
        for kind in ("manifest", "model", "method", "optim", "meta"):
            for path in folder.glob(f"{kind}_{later:06d}*"):
                path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------------
# Looking


def _named_steps(folder: Path, kind: str) -> list[int]:
    """Steps of all files <kind>_<step>.<suffix>, the newest first."""
    if not folder.is_dir():
        return []
    matches = (re.fullmatch(rf"{kind}_(\d{{6,}})\.(?:pt|json)", name) for name in os.listdir(folder))
    return sorted({int(m.group(1)) for m in matches if m}, reverse=True)


def _manifest_steps(folder: Path) -> list[int]:
    return _named_steps(folder, "manifest")


def _is_ours(folder: Path, step: int) -> bool:
    """False for a checkpoint that nanochat wrote."""
    try:
        meta = json.loads((folder / _meta_name(step)).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(meta, dict) and meta.get("format") == FORMAT


def _read_manifest(folder: Path, step: int) -> dict[str, Any]:
    """The manifest of a step, checked for its form. Raises UserError."""
    path = folder / _manifest_name(step)
    try:
        manifest = json.loads(path.read_bytes())
        good = manifest["format"] == FORMAT and manifest["step"] == step and manifest["world_size"] >= 1
        for entry in manifest["files"]:
            # Only names that a save makes: a manifest must not lead out of the folder.
            kind = re.fullmatch(
                rf"((model|method)_{step:06d}\.pt|meta_{step:06d}\.json|optim_{step:06d}_rank\d+\.pt)", entry["name"]
            )
            staged = re.fullmatch(re.escape(entry["name"]) + r"\.[0-9a-f]+\.staged", entry["staged"])
            good &= bool(kind and staged and isinstance(entry["size"], int) and isinstance(entry["sha256"], str))
        names = {entry["name"] for entry in manifest["files"]}
        good &= {_model_name(step), _meta_name(step)} <= names
    except OSError as e:
        raise UserError(f"{path.name} cannot be read ({e.strerror})") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{path.name} is damaged") from e
    if not good:
        raise UserError(f"{path.name} is damaged")
    return manifest


def _open(folder: Path, entry: dict[str, Any]) -> BinaryIO:
    """A listed file, under its temporary name as long as it has that: the run that saves it may rename it any time."""
    try:
        return open(folder / entry["staged"], "rb")
    except FileNotFoundError:
        return open(folder / entry["name"], "rb")


def _file_problem(folder: Path, entry: dict[str, Any], hashes: bool) -> str | None:
    try:
        with _open(folder, entry) as f:
            size = os.fstat(f.fileno()).st_size
            if size != entry["size"]:
                return f"{entry['name']} has {size:,} bytes instead of {entry['size']:,}"
            if hashes and hashlib.file_digest(f, "sha256").hexdigest() != entry["sha256"]:
                return f"{entry['name']} differs from its checksum"
    except FileNotFoundError:
        return f"{entry['name']} is missing"
    except OSError as e:
        return f"{entry['name']} cannot be read ({e.strerror})"
    return None


def _problem(folder: Path, step: int, hashes: bool = True) -> str | None:
    """Why the checkpoint of a step cannot be used, or None. Without `hashes`, a quick look at sizes."""
    if not (folder / _manifest_name(step)).exists():
        # nanochat's own need a model and readable metadata; ours without a manifest were being deleted, or lost it.
        if _is_ours(folder, step):
            return f"{_manifest_name(step)} is missing"
        for name in (_model_name(step), _meta_name(step)):
            if not (folder / name).is_file():
                return f"{name} is missing"
        return None
    try:
        manifest = _read_manifest(folder, step)
    except UserError as e:
        return str(e)
    return next((p for p in (_file_problem(folder, entry, hashes) for entry in manifest["files"]) if p), None)


def list_steps(checkpoint_dir: str | os.PathLike) -> list[int]:
    """Steps that have a checkpoint, intact or not, the newest first. Empty where the folder does not exist."""
    folder = Path(checkpoint_dir)
    return sorted(set(_manifest_steps(folder)) | set(_named_steps(folder, "model")), reverse=True)


def find_last_step(checkpoint_dir: str | os.PathLike) -> int:
    """
    Step of the newest intact checkpoint. Damaged ones that are newer are named in warnings and passed over.

    Every listed file of every rank is hashed. Under a process group rank 0 looks and all ranks get its answer (they
    must call together). Raises NoCheckpointError where there is none, UserError where none is intact.
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


def _saved_world_size(folder: Path, step: int) -> int | None:
    """How many ranks wrote a checkpoint; None where its manifest is damaged."""
    try:
        return _read_manifest(folder, step)["world_size"]
    except UserError:
        return None


def _torch_load(folder: Path, entry: dict[str, Any], device: Any, mmap: bool = False) -> Any:
    """mmap: of a file of which most is not needed; it is read as it is asked for."""
    path = folder / entry["name"]
    try:
        if mmap:
            staged = folder / entry["staged"]
            name = str(staged if staged.exists() else path)
            return torch.load(name, map_location=device, weights_only=True, mmap=True)
        with _open(folder, entry) as f:
            return torch.load(f, map_location=device, weights_only=True)
    except FileNotFoundError as e:
        raise UserError(f"{path} is missing; restore a copy, or use another step") from e
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as e:  # a damaged file makes torch.load raise nearly anything
        raise UserError(f"{path} cannot be read as weights ({one_line(e)[:120]}); use another step") from e


def check_step(checkpoint_dir: str | os.PathLike, step: int) -> None:
    """Raise NoCheckpointError, naming the steps that are there, unless the folder has a checkpoint of that step."""
    steps = list_steps(checkpoint_dir)
    if step not in steps:
        known = ", ".join(map(str, steps[:10]))
        raise NoCheckpointError(
            f"there is no checkpoint of step {step} in {checkpoint_dir}; "
            + (f"it has steps {known}" if known else "it has none: train a model first, or check --model-tag")
        )


def load_checkpoint(
    checkpoint_dir: str | os.PathLike,
    step: int | None,
    device: str | torch.device,
    load_optimizer: bool = False,
    rank: int = 0,
) -> tuple[dict[str, torch.Tensor], Any, dict[str, Any]]:
    """
    (model_data, optimizer_data or None, meta_data) of a step, checked against the manifest; tensors on `device`.

    step=None takes the newest intact one (find_last_step); meta_data["step"] says which. A step that was asked for is
    never replaced by another: where it is damaged, the UserError names the file and the newest intact step.
    load_optimizer: also this rank's file. Where another number of ranks wrote the checkpoint, those of all of them:
    optimizer_data is then one of them, with "all_ranks", the optimizers' states of each, on the CPU (resume.py gives
    every optimizer its part), and "dataloaders", the data positions of each.
    """
    folder = Path(checkpoint_dir)
    if step is None:
        step = find_last_step(folder)
    check_step(folder, step)
    has_manifest = (folder / _manifest_name(step)).exists()
    ranks = [rank] if load_optimizer else []
    world_size = dist.get_world_size() if is_ddp_initialized() else get_dist_info()[3]
    saved = _saved_world_size(folder, step) if load_optimizer and has_manifest else None
    if saved not in (None, world_size):
        ranks = list(range(saved))
    wanted = [_model_name(step), _meta_name(step), *(_optim_name(step, r) for r in ranks)]
    if has_manifest:
        problem = _listed_problem(folder, step, wanted)
    else:
        problem = _problem(folder, step)
    if problem is not None:
        raise UserError(f"checkpoint of step {step} in {folder}: {problem}; {_way_out(folder, step)}")
    if has_manifest:
        entries = {entry["name"]: entry for entry in _read_manifest(folder, step)["files"]}
    else:
        logger.warning(f"the checkpoint of step {step} in {folder} has no manifest, so nothing vouches for its files")
        entries = {name: {"name": name, "staged": name} for name in wanted}
    try:
        with _open(folder, entries[_meta_name(step)]) as f:
            meta = json.load(f)
        if not isinstance(meta, dict):
            raise ValueError("not an object")
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(
            f"{folder / _meta_name(step)} is damaged ({one_line(e)[:100]}); {_way_out(folder, step)}"
        ) from e
    model_data = _torch_load(folder, entries[_model_name(step)], device)
    if not isinstance(model_data, dict):
        raise UserError(f"{folder / _model_name(step)} holds no state dict; {_way_out(folder, step)}")
    optimizer_data = None
    if ranks and saved in (None, world_size):
        optimizer_data = _torch_load(folder, entries[_optim_name(step, rank)], device)
    elif ranks:
        parts = [_torch_load(folder, entries[_optim_name(step, r)], "cpu", mmap=True) for r in ranks]
        optimizer_data = dict(parts[rank] if rank < len(parts) else parts[0])
        optimizer_data["all_ranks"] = [part["optimizers"] for part in parts]
        optimizer_data["dataloaders"] = [part.get("dataloader", part.get("loader")) for part in parts]
    return model_data, optimizer_data, meta


def load_method_data(checkpoint_dir: str | os.PathLike, step: int, device: str | torch.device) -> dict[str, Any]:
    """What the QAT method had learned besides the weights (nf.gram_state), checked against the manifest; empty where
    it had nothing. Raises UserError where the file is damaged."""
    folder = Path(checkpoint_dir)
    if not (folder / _manifest_name(step)).exists():
        return {}
    for entry in _read_manifest(folder, step)["files"]:
        if entry["name"] == _method_name(step):
            if problem := _file_problem(folder, entry, hashes=True):
                raise UserError(f"checkpoint of step {step} in {folder}: {problem}; {_way_out(folder, step)}")
            return _torch_load(folder, entry, device)
    return {}


def _listed_problem(folder: Path, step: int, wanted: list[str]) -> str | None:
    try:
        manifest = _read_manifest(folder, step)
    except UserError as e:
        return str(e)
    entries = {entry["name"]: entry for entry in manifest["files"]}
    for name in wanted:
        if name not in entries:
            return f"{name} was not saved"
        if problem := _file_problem(folder, entries[name], hashes=True):
            return problem
    return None


def _way_out(folder: Path, step: int) -> str:
    for other in list_steps(folder):
        if other != step and _problem(folder, other) is None:
            return f"step {other} is intact (--resume-from-step {other}, --model-step {other})"
    return "there is no other; restore a copy, or start a new run"


# ----------------------------------------------------------------------------------------------------------------------
# Models


SWITCHES = ("separate_qkv", "exact_relu_squared")  # of GPTConfig, which nanochat's does not have


def config_record(config: GPTConfig | LlamaConfig) -> dict[str, Any]:
    """A model's config as metadata has it: without switches that are off, so that nanochat can read it."""
    return {k: v for k, v in asdict(config).items() if v or k not in SWITCHES}


def _patch_old_nanochat(model_data: dict[str, torch.Tensor], model_config: dict[str, Any]) -> None:
    """Checkpoints from before nanochat had windows and per-layer scalars: full context, scalars that do nothing."""
    model_config.setdefault("window_pattern", "L")
    n_layer = model_config.get("n_layer", 0)
    model_data.setdefault("resid_lambdas", torch.ones(n_layer))
    model_data.setdefault("x0_lambdas", torch.zeros(n_layer))


def build_model(
    checkpoint_dir: str | os.PathLike, step: int | None, device: str | torch.device, phase: str
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """
    (model, tokenizer, meta) of a checkpoint; the model is neither compiled nor converted, whatever it was trained with.

    phase: 'train' or 'eval'. The method that it was trained with is in the meta data, where the script that trained it
    put it. BF16 weights become FP32 on a CPU (and on mps), as in nanochat. Raises UserError (damaged checkpoint, config
    that does not fit, another tokenizer than the one in the base directory).
    """
    if phase not in ("train", "eval"):
        raise ValueError(f"phase must be 'train' or 'eval', not {phase!r}")
    device = torch.device(device)
    model_data, _, meta = load_checkpoint(checkpoint_dir, step, device)
    where = f"checkpoint of step {meta.get('step', step)} in {checkpoint_dir}"
    model_data = {name.removeprefix("_orig_mod."): tensor for name, tensor in model_data.items()}
    if device.type in ("cpu", "mps"):
        model_data = {
            name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in model_data.items()
        }
    try:
        model_config = dict(meta["model_config"])
        is_llama = model_config.pop("family", None) == "llama"
        if not is_llama:
            _patch_old_nanochat(model_data, model_config)
        config = LlamaConfig(**model_config) if is_llama else GPTConfig(**model_config)
        numbers = {k: v for k, v in asdict(config).items() if k not in ("window_pattern", "family", *SWITCHES)}
        if not all(isinstance(getattr(config, k, False), bool) for k in SWITCHES):
            raise ValueError(f"{' and '.join(SWITCHES)} must be true or false")
        if not all(isinstance(v, int) and v > 0 for v in numbers.values()):
            raise ValueError(f"these must be positive whole numbers: {numbers}")
        # Before anything is made of these numbers: a wrong one could ask for more memory or time than there is.
        layers = len({name.split(".")[2] for name in model_data if name.startswith("transformer.h.")})
        if config.n_layer != layers:
            raise UserError(f"{where}: its weights do not fit its model config ({layers} layers, not {config.n_layer})")
        check_model_fits(config, device)
        set_cpu_threads(device, config.n_embd)
        with torch.device("meta"):
            model = Llama(config) if is_llama else GPT(config)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as e:
        raise UserError(f"{where}: its model config is not one of this GPT ({one_line(e)[:150]})") from e
    model.to_empty(device=device)
    model.init_weights()  # for what is not in the state dict: the rotary tables
    load_weights(model, model_data, checkpoint_dir, meta.get("step", step))
    model.train(phase == "train")
    tokenizer = get_tokenizer()
    check_tokenizer(meta, tokenizer, where)
    return model, tokenizer, meta


def check_model_fits(config: GPTConfig, device: torch.device) -> None:
    """Raise UserError where the weights alone are more than the device's memory, before anything is allocated."""
    matrices = 12 * config.n_layer * config.n_embd**2 + 2 * config.vocab_size * config.n_embd
    tables = 2 * ROTARY_FACTOR * config.sequence_len * (config.n_embd // config.n_head)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = physical_memory()
    if 4 * (matrices + tables) > memory:
        raise UserError(
            f"a model of {config.n_layer} layers of width {config.n_embd} for {config.sequence_len} tokens has weights "
            f"of {format_bytes(4 * (matrices + tables))}, and this device has {format_bytes(memory)} of memory; lower "
            "--depth, --aspect-ratio or --max-seq-len"
        )


def load_weights(model: GPT, model_data: dict[str, torch.Tensor], checkpoint_dir: str | os.PathLike, step: int) -> None:
    """
    model.load_state_dict that takes the checkpoint's tensors over, and nf.load_gram_state of what its method had
    learned. Raises UserError where they do not fit.
    """
    learned = load_method_data(checkpoint_dir, step, model.get_device())
    try:
        shapes = {name: p.shape for name, p in model.state_dict().items()}
        model.load_state_dict(model_data, strict=True, assign=True)
        if any(p.shape != shapes[name] or not p.is_floating_point() for name, p in model.state_dict().items()):
            raise TypeError("a weight that is no floating-point tensor")
        load_gram_state(model, learned)
    except (RuntimeError, AttributeError, TypeError, ValueError) as e:
        raise UserError(
            f"checkpoint of step {step} in {checkpoint_dir}: its weights do not fit its model config "
            f"({one_line(e)[:200]})"
        ) from e


def check_tokenizer(meta: dict[str, Any], tokenizer: RustBPETokenizer, where: str = "the checkpoint") -> None:
    """Raise UserError unless the model was trained with this tokenizer (its fingerprint, or at least its size)."""
    remedy = "use the base directory (NANOCHAT_BASE_DIR) in which it was trained, or train a new model"
    run_config = meta.get("run_config")
    before = (run_config.get("tokenizer") if isinstance(run_config, dict) else None) or meta.get("tokenizer")
    if isinstance(before, str) and before != tokenizer.fingerprint():
        raise UserError(
            f"{where} was trained with the tokenizer {before}, but the one here is {tokenizer.fingerprint()}; {remedy}"
        )
    size = meta.get("model_config", {}).get("vocab_size")
    if size is not None and size != tokenizer.get_vocab_size():
        raise UserError(
            f"{where} has a vocabulary of {size} tokens, the tokenizer here {tokenizer.get_vocab_size()}; {remedy}"
        )


def checkpoints_made_with(tokenizer: RustBPETokenizer) -> list[str]:
    """'base_checkpoints/d20_clover', ...: the runs in the base directory whose newest checkpoint fits the tokenizer."""
    found = []
    for place in SOURCES.values():
        for folder in sorted(Path(get_base_dir(), place).glob("*/")):
            for step in list_steps(folder):
                try:
                    meta = json.loads((folder / _meta_name(step)).read_bytes())
                    check_tokenizer(meta, tokenizer)
                    found.append(f"{place}/{folder.name}")
                except (OSError, ValueError, AttributeError, RecursionError, UserError):
                    continue  # damaged, or made with another one
                break
    return found


def find_largest_model(checkpoints_dir: str | os.PathLike) -> str:
    """The model tag to take where none is given: the deepest of d<number>..., the newest of those; else the newest."""
    folder = Path(checkpoints_dir)
    tags = [p for p in folder.iterdir() if p.is_dir() and list_steps(p)] if folder.is_dir() else []
    if not tags:
        raise NoCheckpointError(f"there are no checkpoints in {folder}; train a model first")

    def rank(path: Path) -> tuple[int, float]:
        match = re.match(r"d(\d+)", path.name)
        return (int(match.group(1)) if match else -1, path.stat().st_mtime)

    return max(tags, key=rank).name


def load_model_from_dir(
    checkpoints_dir: str | os.PathLike,
    device: str | torch.device,
    phase: str,
    model_tag: str | None = None,
    step: int | None = None,
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """build_model of a tag (default: find_largest_model) and step (default: the newest intact one)."""
    check_model_tag(model_tag)
    if model_tag is None:
        model_tag = find_largest_model(checkpoints_dir)
        if get_dist_info()[1] == 0:
            logger.info(f"no model tag given: taking {model_tag}")
    model, tokenizer, meta = build_model(os.path.join(checkpoints_dir, model_tag), step, device, phase)
    meta.setdefault("model_tag", model_tag)
    return model, tokenizer, meta


def load_model(
    source: str, device: str | torch.device, phase: str, model_tag: str | None = None, step: int | None = None
) -> tuple[GPT, RustBPETokenizer, dict[str, Any]]:
    """(model, tokenizer, meta) from the base directory; source: base | mid | sft | rl. See build_model."""
    if source not in SOURCES:
        raise UserError(f"unknown source {source!r}; use one of {', '.join(SOURCES)}")
    return load_model_from_dir(os.path.join(get_base_dir(), SOURCES[source]), device, phase, model_tag, step)
