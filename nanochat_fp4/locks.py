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
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from nanochat_fp4.cli import UserError, logger, one_line
from nanochat_fp4.common import fail_together, get_dist_info
from nanochat_fp4.files import atomic_write

# What a file system without locks answers.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
# A run waits for its lock for this time, because a process that asks whether the run exists has the lock for a moment.
ASKED_SECONDS = 0.3


@contextlib.contextmanager
def held_run(folder: str | os.PathLike) -> Iterator[None]:
    """
    A context in which the run's folder belongs to this run, until the end of the process, whatever ends it. All ranks
    must enter it together.

    The lock belongs to the kernel (flock), so a killed process leaves none. Its file .<name>.lock is beside the folder,
    because --overwrite deletes the folder. .<name>.lock.txt names the process that has the lock. The lock works as far
    as the locks of the file system do. Linux's NFS client passes flock on to the server, and so does Lustre if it is
    mounted with flock. If there are no locks, a warning says so. Raises UserError on every rank if another run has the
    lock.
    """
    folder, problem = Path(folder).absolute(), None
    lock, holder = lock_of(folder), folder.with_name(f".{folder.name}.lock.txt")
    if get_dist_info()[1] == 0:
        busy = f"another run is training in {folder}: {_holder(folder)}; wait for it or stop it, or choose another "
        try:
            take(lock, folder, f"{busy}--model-tag", ASKED_SECONDS)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            with contextlib.suppress(OSError):  # The disk may be full. check_writable explains this better.
                if lock.is_locked:
                    atomic_write(holder, f"process {os.getpid()} on {socket.gethostname()} since {since}")
        except UserError as e:
            problem = str(e)
    fail_together(problem)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                holder.unlink()
            lock.release()


def running(folder: str | os.PathLike) -> str | None:
    """Returns a description of the process that trains in a folder. Returns None if there is none, or if the file
    system has no locks."""
    folder = Path(folder).absolute()
    lock = lock_of(folder)
    if Path(lock.lock_file).exists():
        try:
            with lock.acquire(timeout=0):
                return None
        except filelock.Timeout:
            return _holder(folder)
        except OSError:
            return None
    return None


def running_runs(base_dir: str | os.PathLike) -> list[str]:
    """Returns the runs of all stages that train in a base directory now, each with a description of its process."""
    folders = [path.parent / path.name[1 : -len(".lock")] for path in Path(base_dir).glob("*_checkpoints/.*.lock")]
    return [f"{folder.parent.name}/{folder.name} ({who})" for folder in sorted(folders) if (who := running(folder))]


def lock_of(folder: Path) -> filelock.FileLock:
    """Returns the lock of a folder. Its file .<name>.lock is beside the folder, and stays after the lock is released,
    because deleting it would let two processes in."""
    return filelock.FileLock(folder.with_name(f".{folder.name}.lock"), fallback_to_soft=False)


def take(lock: filelock.FileLock, folder: Path, busy: str, seconds: float = 0.0) -> None:
    """Takes the lock of a folder, for which it waits so long. If the file system has no locks, a warning says so.
    Raises UserError, which says `busy`, if another process has the lock, and if no lock can be made there."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=seconds)
    except OSError as e:
        # filelock waits for a file that cannot be made, too. A Timeout is an OSError.
        if isinstance(e, filelock.Timeout) and os.path.exists(lock.lock_file):
            raise UserError(busy) from None
        if e.errno not in _NO_LOCKS:
            why = one_line(e.strerror or e)
            raise UserError(f"{folder} cannot be written ({why}); choose a writable folder") from e
        logger.warning(f"the file system of {folder} has no locks: nothing keeps another process out of it")


def _holder(folder: Path) -> str:
    file = folder.with_name(f".{folder.name}.lock.txt")
    with contextlib.suppress(OSError, UnicodeError):
        if file.is_file():
            return one_line(file.read_text(encoding="utf-8"))[:200]
    return "a process that is just beginning"  # It has the lock and has not written its name yet.
