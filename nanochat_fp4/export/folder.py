"""Writes the folder of an export so that it is complete at any moment or absent, and so that files of others are never
deleted.

    with new_export(out, overwrite) as part:  # part is the new folder .<name>.<random>.part beside `out`
        ...                                   # write files with names of FILES into it

At the end of the context an old export is renamed to .<name>.<random>.old, the new folder is renamed to `out`, and the
old export is deleted. The scripts and the library write all exports in this way. Only one process at a time writes to
`out`. Meanwhile it holds the lock .<name>.lock beside `out`. export.json lists the files of an export. Only files on
this list are ever deleted, and the list is deleted last.
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

from nanochat_fp4.cli import UserError, logger
from nanochat_fp4.files import atomic_write, fsync_dir

try:
    import fcntl
except ImportError:  # Windows does not have this module.
    fcntl = None

LIST = "export.json"
FORMAT = "nanochat_fp4 export, version 1"
# The names of all files that any format writes. The list of a folder that is not finished yet has all of them.
FILES = (
    "model.safetensors", "model.gguf", "config.json", "modeling_nanochat_fp4.py",
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md",
    # Tokenizers of transformers write these.
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model",
)  # fmt: skip


class Words(NamedTuple):
    """Words for error messages that name what the caller can change: arguments of a function, or flags of a command."""

    folder: str = "another folder"
    overwrite: str = "overwrite=True"


ARGUMENTS = Words()


@contextlib.contextmanager
def new_export(
    out: str | os.PathLike, overwrite: bool = False, words: Words = ARGUMENTS, wait: bool = True
) -> Iterator[Path]:
    """Gives an empty folder to write an export into. At the end of the context the folder gets the name `out`.

    out:       the folder of the export. It must be missing or empty. With `overwrite` it may be an earlier export,
    which
               is then replaced.
    words:     the words for error messages
    wait:      whether to wait while another process writes to `out`. Otherwise UserError is raised.

    If an exception is raised inside the context, `out` stays as it was. Folders that a killed export left beside `out`
    are first given their name back or deleted. Raises UserError if `out` must not be replaced.
    """
    out = Path(out).expanduser().resolve()  # If `out` is a link, the folder that it points to is replaced.
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
    """Holds the lock of `out`. The kernel keeps the lock (flock), so it is released when the process is killed.

    At the end the lock's file is deleted, while the lock is still held. A process that was waiting for this file gets
    the lock of a file without a name, and _lock_file lets it try again. locks.py has filelock instead. An export does
    without it, because it would be one more package to install, and would wait for ever where no file can be made.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"the folder {out.parent} cannot be made ({e.strerror}); choose {words.folder}") from e
    path = out.with_name(f".{out.name}.lock")
    file = _lock_file(path, out, words, wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _lock_file(path: Path, out: Path, words: Words, wait: bool) -> int:
    """Returns the descriptor of the file `path`, which it makes and locks."""
    waited = False
    while True:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as e:
            problem = f"no file can be made in {out.parent} ({path.name}: {e.strerror})"
            raise UserError(f"{problem}; choose {words.folder}") from e
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "there is no flock")
            fcntl.flock(file, fcntl.LOCK_EX if waited else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still_at(file, path):
                return file
            os.close(file)
        except BlockingIOError:
            os.close(file)
            if not wait:
                problem = f"another export is writing {out}; wait until it ends, or choose {words.folder}"
                raise UserError(problem) from None
            logger.warning(f"another process is writing {out}; waiting until it ends")
            waited = True
        except OSError as e:
            if e.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP):
                os.close(file)
                raise
            logger.warning(f"the file system of {out} has no locks; let no other process write there")
            return file


def _is_still_at(file: int, path: Path) -> bool:
    """Whether this open file is the one at `path`, and was neither deleted nor replaced since it was opened."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def own_files(folder: Path) -> set[str] | None:
    """Returns the names on an export's list and the name of the list, or None if the folder has no list."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        about = json.loads((folder / LIST).read_bytes())
        if about["format"] == FORMAT and set(about["files"]) <= set(FILES):
            return {LIST, *about["files"]}
    return None


def _finish_killed_exports(out: Path) -> None:
    """Cleans up after killed exports. If `out` is missing, a complete old export that was renamed gets this name back.
    All other remains are deleted."""
    for old in _left(out, "old"):
        names = own_files(old)
        if not out.exists() and names and all((old / name).is_file() for name in names):
            os.rename(old, out)
        else:
            _delete(old)
    for part in _left(out, "part"):
        _delete(part)


def check_replaceable(out: Path, overwrite: bool, words: Words = ARGUMENTS) -> None:
    """Raises UserError unless `out` is missing, is an empty folder, or is an export and overwrite is true."""
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
    """Renames a complete folder to `out`. An old export there is renamed first, and deleted last."""
    _write_list(part, sorted(path.name for path in part.iterdir() if path.name != LIST))
    for path in filter(Path.is_file, part.iterdir()):
        shutil.copymode(part / LIST, path)  # safetensors makes files that only their owner can read.
        with path.open("r+b") as file:
            os.fsync(file.fileno())  # The packages safetensors and gguf do not do this.
    check_replaceable(out, overwrite, words)
    old = _beside(out, "old")
    if out.exists():
        shutil.copymode(out, part)  # The new folder is as private as the old one.
        os.rename(out, old)
    os.rename(part, out)
    fsync_dir(out.parent)
    _delete(old)


def _write_list(folder: Path, names) -> None:
    atomic_write(folder / LIST, json.dumps({"format": FORMAT, "files": list(names)}, indent=2) + "\n")


def _beside(out: Path, kind: str) -> Path:
    return out.with_name(f".{out.name}.{secrets.token_hex(4)}.{kind}")


def _left(out: Path, kind: str) -> list[Path]:
    """Returns the folders beside `out` whose names _beside has made."""
    name = re.compile(re.escape(f".{out.name}.") + r"[0-9a-f]{8}\." + kind)
    folders = out.parent.iterdir() if out.parent.is_dir() else ()
    return sorted(path for path in folders if name.fullmatch(path.name) and path.is_dir())


def _delete(folder: Path) -> None:
    """Deletes the files on a folder's list, then the list, and then the folder. If the folder has files of others,
    these files and the folder stay."""
    if not folder.is_dir():
        return
    own = own_files(folder) or set()
    unfinished = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp")  # Names of files.atomic_open.
    for path in sorted(folder.iterdir(), key=lambda path: path.name == LIST):
        match = unfinished.fullmatch(path.name)
        if path.name in own or match and match[1] in (LIST, *FILES):
            path.unlink()
    try:
        folder.rmdir()
    except OSError:
        logger.warning(f"{folder} is kept: it holds files that no export wrote; move them, then delete the folder")
