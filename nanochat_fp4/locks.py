"""
The locks that say who uses what. A run has the lock of its folder, and a program that replaces something asks for the
locks of all its users.

    with held_run(folder):                  # one run at a time, until the end of the process
        ...
    if users := running_runs(base_dir):     # ["base_checkpoints/d20_clover (process 7 on host since ...)"]
        raise UserError(...)                # they train with the thing that would be replaced
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from nanochat_fp4.cli import UserError, logger, one_line
from nanochat_fp4.common import get_dist_info, of_all_ranks
from nanochat_fp4.files import atomic_write

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
# A run waits for its lock for this time, because a process that asks whether the run exists has the lock for a moment.
ASKED_SECONDS = 0.3


@contextlib.contextmanager
def held_run(folder: str | os.PathLike) -> Iterator[None]:
    """
    A context in which the run's folder belongs to this run, until the end of the process, whatever ends it. All ranks
    must enter it together.

    The lock belongs to the kernel (flock), so a killed process leaves none. Its file .<name>.lock is beside the folder,
    because --overwrite deletes the folder. .<name>.lock.json names the process that has the lock. The lock works as far
    as the locks of the file system do. Linux's NFS client passes flock on to the server, and so does Lustre if it is
    mounted with flock. If there are no locks, a warning says so. Raises UserError on every rank if another run has the
    lock.
    """
    folder = Path(folder).absolute()
    lock = _lock_of(folder)
    problem = _take(lock, folder) if get_dist_info()[1] == 0 else None
    fail_together(problem)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                _holder_file(folder).unlink()
            lock.release()  # The file of the lock stays, because deleting it would let two runs in.


def running(folder: str | os.PathLike) -> str | None:
    """Returns a description of the process that trains in a folder. Returns None if there is none, or if the file
    system has no locks."""
    folder = Path(folder).absolute()
    if not _lock_file(folder).exists():
        return None
    lock = _lock_of(folder)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return _describe_holder(folder)
    except OSError:
        return None
    lock.release()
    return None


def running_runs(base_dir: str | os.PathLike) -> list[str]:
    """Returns the runs of all stages that train in a base directory now, each with a description of its process."""
    folders = [path.parent / path.name[1 : -len(".lock")] for path in Path(base_dir).glob("*_checkpoints/.*.lock")]
    return [f"{folder.parent.name}/{folder.name} ({who})" for folder in sorted(folders) if (who := running(folder))]


def fail_together(problem: str | None) -> None:
    """Raises the first problem of any rank on all ranks, as a UserError. All ranks must call this function together."""
    if first := next(filter(None, of_all_ranks(problem)), None):
        raise UserError(first)


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _lock_of(folder: Path) -> filelock.FileLock:
    return filelock.FileLock(_lock_file(folder), fallback_to_soft=False)


def _holder_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock.json")


def _take(lock: filelock.FileLock, folder: Path) -> str | None:
    """Takes the lock, and returns None, or the reason why it cannot be had."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=ASKED_SECONDS)
    except filelock.Timeout:
        who = _describe_holder(folder)
        return f"another run is training in {folder}: {who}; wait for it or stop it, or choose another --model-tag"
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            why = one_line(e.strerror or e)
            return f"{folder} cannot be written ({why}); choose a writable folder (NANOCHAT_BASE_DIR, --model-tag)"
        logger.warning(f"the file system of {folder} has no locks: nothing keeps a second run out of it")
        return None
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with contextlib.suppress(OSError):  # The disk may be full. check_writable explains this better.
        atomic_write(_holder_file(folder), json.dumps(holder) + "\n")
    return None


def _describe_holder(folder: Path) -> str:
    try:
        holder = json.loads(_holder_file(folder).read_bytes())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {int(holder['pid'])} on {str(holder['host'])[:100]} since {since}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "a process that is just beginning"  # The process has the lock and has not written its name yet.
