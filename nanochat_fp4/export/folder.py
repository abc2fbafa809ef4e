"""The folder of an export: written under a fresh name, renamed whole, replaced without touching anybody else's files.

    with new_export(out, overwrite) as part:  # .<name>.<random>.part beside `out`
        ...                                   # files of FILES
                                              # the old export -> .<name>.<random>.old, part -> out, .old is deleted

Scripts and library write exports in this way alone. One process at a time writes to `out` (the lock .<name>.lock beside
it). export.json lists the files of an export. Only files on this list are ever deleted, and the list is deleted last.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nanochat_fp4.console import logger
from nanochat_fp4.errors import UserError
from nanochat_fp4.files import atomic_write, fsync_dir

LIST = "export.json"
FORMAT = "nanochat_fp4 export, version 1"
# All that any format writes. A folder that is not finished yet lists them all.
FILES = (
    "model.safetensors", "model.gguf", "config.json", "modeling_nanochat_fp4.py",
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md",
    "hf_quant_config.json",  # of earlier versions, in the format of modelopt
    # of transformers' tokenizers
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip


class Words(NamedTuple):
    """What errors call the caller's means: the arguments of a function, or the flags of a command."""

    folder: str = "another folder"
    overwrite: str = "overwrite=True"


ARGUMENTS = Words()


@contextlib.contextmanager
def new_export(
    out: str | os.PathLike, overwrite: bool = False, words: Words = ARGUMENTS, wait: bool = True
) -> Iterator[Path]:
    """An empty folder to write an export into. It gets the name `out` at the end, all at once.

    out:       missing or empty, or with `overwrite` an earlier export, which is replaced whole
    wait:      whether to wait while another process writes to `out`. Otherwise that is an error
    An exception inside leaves `out` as it was. What a killed export left beside `out` is finished or deleted first.
    Raises UserError where `out` is not to be replaced.
    """
    out = Path(out).resolve()  # behind a link, the folder itself is replaced
    with _locked(out, words, wait):
        _finish_killed_exports(out)
        check_replaceable(out, overwrite, words)
        part = _beside(out, "part")
        part.mkdir(parents=True)
        try:
            _write_list(part, FILES)
            yield part
            _publish(part, out, overwrite, words)
        finally:
            _delete(part)


@contextlib.contextmanager
def _locked(out: Path, words: Words, wait: bool) -> Iterator[None]:
    """The lock is the kernel's (flock), so that a killed process leaves none."""
    import filelock  # which torch brings

    out.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out.with_name(f".{out.name}.lock"), fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            if not os.path.exists(lock.lock_file):  # filelock tries for ever where no file can be made
                raise UserError(f"no file can be made in {out.parent}; choose {words.folder}") from None
            if not wait:
                problem = f"another export is writing {out}; wait until it ends, or choose {words.folder}"
                raise UserError(problem) from None
            logger.warning(f"another process is writing {out}; waiting until it ends")
            lock.acquire()
    except OSError as e:
        if e.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
            raise
        logger.warning(f"the file system of {out} has no locks; let no other process write there")
    try:
        yield
    finally:
        lock.release()  # its file stays: to delete it would let two exports in


def own_files(folder: Path) -> set[str] | None:
    """The names on an export's list, the list's own among them; None where there is no such list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        about = json.loads((folder / LIST).read_bytes())
        if about["format"] == FORMAT and set(about["files"]) <= set(FILES):
            return {LIST, *about["files"]}
    return None


def _finish_killed_exports(out: Path) -> None:
    """An old export that was renamed aside gets its name back if nothing has it; the rest is deleted."""
    for old in _left(out, "old"):
        names = own_files(old)
        if not out.exists() and names and all((old / name).is_file() for name in names):
            os.rename(old, out)
        else:
            _delete(old)
    for part in _left(out, "part"):
        _delete(part)


def check_replaceable(out: Path, overwrite: bool, words: Words = ARGUMENTS) -> None:
    """Raise UserError unless `out` is missing or an empty folder, or an export that is to be overwritten."""
    if os.path.ismount(out):
        raise UserError(f"{out} is a mount point, which cannot be renamed; choose a folder inside it")
    if not out.exists():
        return
    found = {path.name for path in out.iterdir()} if out.is_dir() else None
    if found == set():
        return
    own = own_files(out)
    if not overwrite:
        raise UserError(f"{out} is there already; choose {words.folder}, or replace it with {words.overwrite}")
    if found is None or own is None:
        problem = f"{out} is not an export, so {words.overwrite} leaves it alone"
        raise UserError(f"{problem}; choose {words.folder}, or remove it")
    if strangers := ", ".join(sorted(found - own)[:4]):
        problem = f"{out} holds {strangers}, not of the export, so {words.overwrite} leaves it alone"
        raise UserError(f"{problem}; move the file")


def _publish(part: Path, out: Path, overwrite: bool, words: Words) -> None:
    """Rename a complete folder to `out`. An old export there is renamed aside first and deleted last."""
    _write_list(part, sorted(path.name for path in part.iterdir() if path.name != LIST))
    for path in filter(Path.is_file, part.iterdir()):
        shutil.copymode(part / LIST, path)  # safetensors lets the owner alone read
        with path.open("r+b") as file:
            os.fsync(file.fileno())  # the packages of safetensors and GGUF do not
    check_replaceable(out, overwrite, words)
    old = _beside(out, "old")
    if out.exists():
        shutil.copymode(out, part)  # a folder that its owner alone may read stays one
        os.rename(out, old)
    os.rename(part, out)
    fsync_dir(out.parent)
    _delete(old)


def _write_list(folder: Path, names) -> None:
    atomic_write(folder / LIST, json.dumps({"format": FORMAT, "files": list(names)}, indent=2) + "\n")


def _beside(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.{kind}")


def _left(out: Path, kind: str) -> list[Path]:
    """The folders that _beside named."""
    name = re.compile(re.escape(f".{out.name}.") + r"[0-9a-f]{8}\." + kind)
    folders = out.parent.iterdir() if out.parent.is_dir() else ()
    return sorted(path for path in folders if name.fullmatch(path.name) and path.is_dir())


def _delete(folder: Path) -> None:
    """Delete the files on a folder's list, then the list, then the folder. Files of others stay, and their folder."""
    if not folder.is_dir():
        return
    own = own_files(folder) or set()
    unfinished = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")  # of files.atomic_open
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LIST):
        match = unfinished.fullmatch(path.name)
        if path.name in own or match and match[1] in (LIST, *FILES):
            path.unlink()
    try:
        folder.rmdir()
    except OSError:
        logger.warning(f"{folder} is kept: it holds files that no export wrote; move them, then delete the folder")
