"""Atomic writes that are flushed to the disk, and hashes of files."""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def fsync_dir(folder: str | os.PathLike) -> None:
    """Makes a rename inside of `folder` survive a power cut. Does nothing if folders cannot be opened (Windows)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def atomic_open(path: str | os.PathLike) -> Iterator[Any]:
    """
    A context with a binary file object, whose content appears under `path` all at once when the block ends without an
    exception.

    The content is written under a temporary name in the same folder, flushed to the disk and renamed. No reader ever
    sees a part of it, not even after a kill half-way. After an exception the old content of `path` stays, and the
    temporary file is deleted. A killed process leaves a file `.<name>.<random>.tmp` behind, which is never read. Raises
    IsADirectoryError if `path` is a folder.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "there is a folder of that name", str(path))
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # O_EXCL and the mode 0666 (minus the umask) give the permissions of an ordinary open(), unlike tempfile's 0600.
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(fd, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(tmp)
        raise
    fsync_dir(path.parent)


def atomic_write(path: str | os.PathLike, data: bytes | str) -> None:
    """Writes `data` (a str as UTF-8) to `path`, so that readers see the old content or the new one, and never a
    mixture."""
    with atomic_open(path) as f:
        f.write(data.encode("utf-8") if isinstance(data, str) else data)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """
    A context with an empty folder `.<name>.nanochat_fp4.part` beside `path`, which gets the name `path` when the block
    ends without an exception. An older folder of this name is deleted then.

    Readers see the old folder, the new one or none, and never a mixture. The old folder is `.<name>.nanochat_fp4.old`
    until the new one is there. After a kill the next call gives it its name back, and deletes what the killed one had
    written, whoever wrote it. Only one process at a time may write to `path`.
    """
    part, old = (path.with_name(f".{path.name}.nanochat_fp4.{kind}") for kind in ("part", "old"))
    shutil.rmtree(part, ignore_errors=True)
    if old.exists():
        old.rename(part if path.exists() else path)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        usual = stat.S_IMODE(part.stat().st_mode) & 0o666
        for file in filter(Path.is_file, part.rglob("*")):
            file.chmod(usual)  # safetensors makes files that only their owner can read.
            with file.open("r+b") as f:
                os.fsync(f.fileno())  # Packages that write models do not do this.
        if path.exists():
            shutil.copymode(path, part)  # The new folder is as private as the old one.
            path.rename(old)
        fsync_dir(part)
        part.rename(path)
        fsync_dir(path.parent)
        if old.exists():
            old.rename(part)  # So that a kill leaves no half of an old folder that would be taken for a whole one.
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sha256_file(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a file's content, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def git_hash(path: str | os.PathLike) -> str:
    """Returns the name that git gives to a file's content, in hex, which is a SHA-1."""
    data = Path(path).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
