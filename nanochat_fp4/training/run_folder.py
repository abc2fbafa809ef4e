"""The lock of a run's folder, and the look whether a checkpoint can be written there, before the run begins."""

import contextlib
import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import torch.distributed as dist
from torch import nn

from nanochat_fp4.common import get_dist_info, is_ddp_initialized
from nanochat_fp4.console import format_bytes, logger
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.files import atomic_write

# ----------------------------------------------------------------------------------------------------------------------
# One run at a time

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
# Mount options under which flock() succeeds but is told to nobody else.
_LOCAL_LOCKS = {"nolock", "local_lock=all", "local_lock=flock", "localflock"}


@contextlib.contextmanager
def held_run(
    folder: str | os.PathLike, doing: str = "another run is training in", flag: str = "--model-tag"
) -> Iterator[None]:
    """
    Inside, the run's folder is this run's, until the end of the process, whatever ends it. All ranks enter it together.

    The lock is the kernel's own (flock, on .<name>.lock beside the folder, which --overwrite would delete with it), so
    a killed process leaves none. .<name>.lock.json says who holds it. It reaches as far as the file system's locks do:
    over NFS (Linux's client passes flock on to the server) and Lustre mounted with flock; where they end at this host,
    or there are none, a warning says so. Raises UserError on every rank where another run holds it. `doing` and `flag`
    are words of the message: what is done to the folder, and which flag chooses another.
    """
    folder = Path(folder).absolute()
    lock = filelock.FileLock(folder.with_name(f".{folder.name}.lock"), fallback_to_soft=False)
    problem = _take(lock, folder, doing, flag) if get_dist_info()[1] == 0 else None
    _fail_together(problem)
    try:
        yield
    finally:
        if lock.is_locked:
            with contextlib.suppress(OSError):
                _holder_file(folder).unlink()
            lock.release()  # its file stays: to delete it would let two runs in


def _holder_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock.json")


def _take(lock: filelock.FileLock, folder: Path, doing: str, flag: str) -> str | None:
    """Take the lock; why it cannot be had otherwise."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return f"{doing} {folder}: {_describe_holder(folder)}; wait for it or stop it, or choose another {flag}"
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            return _cannot_write(folder, e, flag=flag)
        logger.warning(f"the file system of {folder} has no locks: nothing keeps a second run out of it")
        return None
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
    with contextlib.suppress(OSError):  # a full disk, which check_writable tells better
        atomic_write(_holder_file(folder), json.dumps(holder) + "\n")
    with contextlib.suppress(OSError):
        option = local_locks(folder, Path("/proc/self/mountinfo").read_text())
        if option:
            logger.warning(f"{folder} is mounted with {option}: a second run on another host is not kept out of it")
    return None


def _describe_holder(folder: Path) -> str:
    try:
        holder = json.loads(_holder_file(folder).read_bytes())
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since"]))
        return f"process {int(holder['pid'])} on {str(holder['host'])[:100]} since {since}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "a process that is just beginning"  # it has the lock, and has not said yet who it is


def local_locks(folder: Path, mountinfo: str) -> str | None:
    """The option of the folder's mount (/proc/self/mountinfo) that keeps its locks on this host; None without one."""
    found, longest = None, -1
    for line in mountinfo.splitlines():
        fields, _, options = line.partition(" - ")
        mount_point = Path(fields.split()[4].replace("\\040", " "))
        if folder.is_relative_to(mount_point) and len(mount_point.parts) >= longest:
            longest = len(mount_point.parts)
            found = next((o for o in options.rpartition(" ")[2].split(",") if o in _LOCAL_LOCKS), None)
    return found


# ----------------------------------------------------------------------------------------------------------------------
# A folder that can be written


def save_bytes(model: nn.Module) -> int:
    """About what a checkpoint of this rank takes: the weights (rank 0), and its share of two moments for each."""
    _, rank, _, world_size = get_dist_info()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    return (weights if rank == 0 else 0) + 2 * weights // world_size


def check_writable(folder: str | os.PathLike, size: int, overwrite: bool = False) -> None:
    """
    Raise UserError on every rank unless each can write, flush and rename a file of its `size` bytes in the folder.

    To be called before anything is deleted or trained. overwrite: the run that is there will be deleted, so its bytes
    count as free. All ranks call it together, and write at the same time, as in a save.
    """
    folder = Path(folder)
    problem = None
    made = not folder.exists()
    # As a save names its files: what a kill leaves here is deleted by the next one.
    names = [folder / f"model_000000.pt.{secrets.token_hex(4)}.staged" for _ in range(2)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        freed = sum(p.stat().st_size for p in folder.iterdir() if p.is_file()) if overwrite else 0
        with open(names[0], "xb") as f:
            _fill(f.fileno(), max(size - freed, 1 << 20))
            os.fsync(f.fileno())
        os.replace(*names)
    except OSError as e:
        problem = _cannot_write(folder, e, size)
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                name.unlink()
    try:
        _fail_together(problem)
    except UserError:
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _fill(fd: int, size: int) -> None:
    """Make the file `size` bytes long, with blocks of the disk behind all of them."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(fd, 0, size)
            return
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):  # a file system that cannot do this
                raise
    for start in range(0, size, 1 << 20):
        os.write(fd, bytes(min(1 << 20, size - start)))


def _cannot_write(folder: Path, error: OSError, size: int | None = None, flag: str = "--model-tag") -> str:
    what = "" if size is None else f" of {format_bytes(size)}"
    return (
        f"{folder} cannot take a checkpoint{what} ({one_line(error.strerror or error)}); free some space, or choose a "
        f"writable folder ({'NANOCHAT_BASE_DIR, ' if flag == '--model-tag' else ''}{flag})"
    )


def _fail_together(problem: str | None) -> None:
    """Raise the first problem of any rank on all of them."""
    problems = [problem]
    if is_ddp_initialized():
        problems = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
    if first := next((p for p in problems if p), None):
        raise UserError(first)
