"""
The locks that say who uses what. A run has the lock of its folder, and a program that replaces something asks for the
locks of all its users. Whoever makes or downloads something that others need has a lock meanwhile.

    with held_run(folder):                  # one run at a time, until the end of the process
        ...
    if users := running_runs(base_dir):     # ["base_checkpoints/d20_clover (process 7 on host since ...)"]
        raise ValueError(...)               # they train with the thing that would be replaced
    with locked(base_dir / "data.lock"):    # waits until no other process has it
        ...
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock

from nanochat_fp4.cli import logger, one_line
from nanochat_fp4.common import base_dir_of, fail_together, get_dist_info
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
    with contextlib.ExitStack() as at_end:
        if get_dist_info()[1] == 0:
            busy = f"another run is training in {folder}: {_holder(folder)}; wait for it or stop it, or choose another "
            try:
                at_end.enter_context(locked(lock_of(folder), f"{busy}--model-tag", ASKED_SECONDS))
                at_end.callback(lock_of(folder, ".txt").unlink, missing_ok=True)
                who = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
                with contextlib.suppress(OSError):  # The disk may be full. check_writable explains this better.
                    atomic_write(lock_of(folder, ".txt"), who)
            except ValueError as e:
                problem = str(e)
        fail_together(problem)
        yield


def running(folder: str | os.PathLike) -> str | None:
    """Returns a description of the process that trains in a folder. Returns None if there is none, or if the file
    system has no locks."""
    folder = Path(folder).absolute()
    if lock_of(folder).exists():
        try:
            with filelock.FileLock(lock_of(folder), timeout=0, fallback_to_soft=False):
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


def lock_of(folder: Path, ending: str = "") -> Path:
    """Returns the file of the lock of a folder, .<name>.lock beside it. A run's stays after the lock is released. Only
    who has the lock may delete it, as an export does: filelock 4 takes no lock of a file without a name, where earlier
    releases let two processes in. With the ending .txt it is the file that names who has the lock."""
    return folder.with_name(f".{folder.name}.lock{ending}")


@contextlib.contextmanager
def locked(file: Path, busy: str = "", seconds: float = -1.0) -> Iterator[None]:
    """
    A context in which no other process has the lock of this file. It waits `seconds` for the lock, or for ever.

    If the file system has no locks, a warning says so. Raises ValueError, which says `busy`, if another process has the
    lock for longer, and at once if no file can be made there.
    """
    lock = filelock.FileLock(file, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()  # filelock would wait for a file that cannot be made, too.
        lock.acquire(timeout=seconds)
    except filelock.Timeout:
        raise ValueError(busy) from None
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            which = " (NANOCHAT_BASE_DIR)" * (base_dir_of().absolute() in file.absolute().parents)
            raise ValueError(f"no lock can be made: {one_line(e)}; choose a writable folder{which}") from e
        logger.warning(f"the file system of {file.parent} has no locks: nothing keeps another process out of it")
    try:
        yield
    finally:
        lock.release()


def _holder(folder: Path) -> str:
    with contextlib.suppress(OSError, UnicodeError):
        if (file := lock_of(folder, ".txt")).is_file():
            return one_line(file.read_text(encoding="utf-8"))[:200]
    return "a process that is just beginning"  # It has the lock and has not written its name yet.
