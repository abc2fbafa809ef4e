"""
What every script needs: one-line errors, the base directory, devices and ranks, logging, progress, safe writes.

Nothing here knows about models or numerics, and nothing here imports another module of this package.
"""

import argparse
import contextlib
import errno
import hashlib
import logging
import math
import os
import platform
import random
import re
import secrets
import shutil
import subprocess
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

logger = logging.getLogger("nanochat_fp4")

# ----------------------------------------------------------------------------------------------------------------------
# Errors


class UserError(Exception):
    """Something the user can put right. The message is one line: what was wrong, what was expected, what to do."""


# A full or read-only disk is the user's to fix, too; any other OSError is ours and keeps its traceback.
_USER_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
_PATH_ERRNOS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR}  # a path that cannot be what it should


def one_line(error: BaseException | str) -> str:
    """The message of `error` on a single line; its class name where it has no message."""
    text = " ".join(str(error).split())
    return text if text or isinstance(error, str) else type(error).__name__


def run_main(main: Callable[[], Any]) -> None:
    """
    Entry point of every script: `if __name__ == "__main__": run_main(main)`.

    A UserError or ValueError (which is how library code reports bad input), a full or read-only disk, and a GPU or CPU
    out of memory, and a number that no machine has a word for, end in `error: <one line>` on stderr and exit status 2;
    Ctrl-C ends in exit status 130.
    NANOCHAT_TRACEBACK=1 prints the traceback as well. Any other exception is a bug and is left to show itself.
    """
    setup_default_logging()
    status = 2
    try:
        main()
        return
    except (KeyboardInterrupt, Exception) as e:
        if isinstance(e, KeyboardInterrupt):
            message, status = "interrupted", 130
        elif is_out_of_memory(e):
            where = "GPU memory" if isinstance(e, torch.OutOfMemoryError) else "memory"
            message = f"out of {where} ({one_line(e).split('. ')[0][:200]}); lower --device-batch-size and run again"
        elif isinstance(e, UserError | ValueError):
            message = one_line(e)
        elif isinstance(e, OverflowError) or "Overflow when unpacking" in str(e):  # Python's, and torch's TypeError
            message = f"a number is too large ({one_line(e)[:150]}); see the command's --help"
        elif isinstance(e, OSError) and e.errno in _USER_ERRNOS:
            message = f"{one_line(e)}; free some space or choose a writable folder (NANOCHAT_BASE_DIR)"
        elif isinstance(e, OSError) and e.errno in _PATH_ERRNOS:
            message = f"{one_line(e)[:300]}; choose another path"
        else:
            raise
        if os.environ.get("NANOCHAT_TRACEBACK", "0") not in ("", "0"):
            traceback.print_exc()
    finally:
        _let_go_of_stdout()
    rank = os.environ.get("RANK", "0")
    prefix = "error" if rank == "0" else f"error (rank {rank})"
    _print(f"{prefix}: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or (a RuntimeError in torch) on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


# ----------------------------------------------------------------------------------------------------------------------
# Files and folders


def get_base_dir() -> str:
    """Folder of everything that is made or downloaded: NANOCHAT_BASE_DIR, by default ~/.cache/nanochat. Created."""
    base_dir = os.environ.get("NANOCHAT_BASE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "nanochat")
    try:
        os.makedirs(base_dir, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"cannot create the base directory {base_dir} ({e.strerror}); set NANOCHAT_BASE_DIR to a writable folder"
        ) from e
    return base_dir


def fsync_dir(folder: str | os.PathLike) -> None:
    """Make a rename inside `folder` survive a power cut. A no-op where folders cannot be opened (Windows)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextlib.contextmanager
def atomic_open(path: str | os.PathLike) -> Iterator[Any]:
    """
    A binary file object whose content appears under `path` all at once, when the block ends without an exception.

    It is written to a temporary name in the same folder, flushed to the disk and renamed, so a reader (or a process
    killed half-way) never sees a part of it. On an exception the old content of `path` stays and the temporary file
    goes. A killed process leaves a `.<name>.<random>.tmp` behind, which nothing here ever reads.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "there is a folder of that name", str(path))
    tmp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # O_EXCL and mode 0666 (minus the umask): the rights an ordinary open() would give, unlike tempfile's 0600.
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
    """Write `data` (a str as UTF-8) to `path` so that readers see the old content or the new, never a mixture."""
    with atomic_open(path) as f:
        f.write(data.encode("utf-8") if isinstance(data, str) else data)


def sha256_file(path: str | os.PathLike) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def physical_memory() -> int:
    """Bytes of memory in this machine; 8 GB where it does not say."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30


def parse_finite(text: str) -> float:
    """argparse type of every flag that is a number with a fraction: NaN and infinity are refused."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def format_bytes(num: float) -> str:
    """1536 -> '1.5 KB' (decimal prefixes from MB on are not worth the confusion: 1 KB is 1024 bytes here)."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(num) < 1024:
            return f"{num:.0f} {unit}" if unit == "bytes" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} TB"


def format_seconds(seconds: float) -> str:
    """75 -> '1m15s', 7500 -> '2h05m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


# ----------------------------------------------------------------------------------------------------------------------
# Printing, logging, progress


def _print(*args: Any, **kwargs: Any) -> None:
    """print that never ends a run: the log's reader may be gone (a closed pipe or terminal), or its disk full."""
    with contextlib.suppress(OSError):
        print(*args, **kwargs)


def _let_go_of_stdout() -> None:
    """Flush stdout now; where nobody takes it any more, drop the rest, or Python would fail at its very end."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # no file behind it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print0(*args: Any, **kwargs: Any) -> None:
    """print on rank 0 only. A log that cannot be written is no reason to stop: the text is lost, the run goes on."""
    if os.environ.get("RANK", "0") == "0":
        _print(*args, **kwargs)


class _StderrHandler(logging.StreamHandler):
    """Writes to whatever sys.stderr is at that moment, so that redirecting it later works."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _LevelFormatter(logging.Formatter):
    """`HH:MM:SS message`, with the level named (and coloured on a terminal) only where it is not plain information."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno <= logging.INFO:
            return text
        label = record.levelname.lower()
        if sys.stderr.isatty():
            label = f"\033[{'31' if record.levelno >= logging.ERROR else '33'}m{label}\033[0m"
        clock, _, message = text.partition(" ")
        return f"{clock} {label}: {message}"


def setup_default_logging() -> None:
    """Send this package's log to stderr: information from rank 0, warnings from every rank. Safe to call twice."""
    if not logger.handlers:
        handler = _StderrHandler()
        handler.setFormatter(_LevelFormatter())
        logger.addHandler(handler)
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


class Progress:
    """
    How far a long piece of work has come: a bar on a terminal, one plain line every `every` seconds in a log.

        with Progress(total=num_steps, desc="train", unit="step") as progress:
            for ...:
                progress.update(1, loss="2.31")

    Lines go to `file` (default stderr), from rank 0 only, with the rate and the time left. `total=None` where it is
    not known. Work that ends within `every` seconds leaves exactly one line, the last, in a log.
    """

    def __init__(
        self,
        total: int | None = None,
        desc: str = "",
        unit: str = "it",
        every: float = 10.0,
        file: TextIO | None = None,
        initial: int = 0,
    ):
        self.total, self.desc, self.unit, self.every = total, desc, unit, every
        self.file = sys.stderr if file is None else file
        self.n, self.initial = initial, initial
        self.info: dict[str, Any] = {}
        self.start = self.last_line = time.monotonic()
        self.closed = False
        self.lock = threading.Lock()  # downloads report from several threads
        self.silent = os.environ.get("RANK", "0") != "0"
        self.bar = None
        if not self.silent and hasattr(self.file, "isatty") and self.file.isatty():
            from tqdm import tqdm

            self.bar = tqdm(
                total=total,
                desc=desc,
                unit="B" if unit == "bytes" else unit,
                unit_scale=unit == "bytes",
                unit_divisor=1024,
                initial=initial,
                file=self.file,
                dynamic_ncols=True,
            )

    def update(self, n: int = 1, **info: Any) -> None:
        """`n` more units are done; `info` (e.g. loss="2.31") is shown beside them until it is replaced."""
        with self.lock:
            self.n += n
            self.info.update(info)
            if self.bar is not None:
                with contextlib.suppress(OSError):  # the terminal is gone, the work is not
                    if info:
                        self.bar.set_postfix({k: str(v) for k, v in self.info.items()}, refresh=False)
                    self.bar.update(n)
            elif time.monotonic() - self.last_line >= self.every:
                self._line()

    def line(self) -> str:
        """The plain line: description, count, percentage, rate, time left, info."""
        elapsed = time.monotonic() - self.start
        rate = (self.n - self.initial) / elapsed if elapsed > 0 else 0.0
        as_bytes = self.unit == "bytes"
        show = format_bytes if as_bytes else lambda num: f"{num:,.0f}"
        parts = [f"{show(self.n)}/{show(self.total)} ({self.n / self.total:.0%})" if self.total else show(self.n)]
        if not as_bytes:
            parts[0] += f" {self.unit}"
        parts.append(f"{show(rate)}/s" if as_bytes else f"{rate:.4g} {self.unit}/s")
        if self.total and rate > 0 and self.n < self.total:
            parts.append(f"ETA {format_seconds((self.total - self.n) / rate)}")
        else:
            parts.append(f"{format_seconds(elapsed)} elapsed")
        parts += [f"{k} {v}" for k, v in self.info.items()]
        return (f"{self.desc}: " if self.desc else "") + " | ".join(parts)

    def _line(self) -> None:
        self.last_line = time.monotonic()
        if not self.silent:
            _print(self.line(), file=self.file, flush=True)

    def write(self, text: str) -> None:
        """A line of its own that does not tear the bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.write(text, file=self.file)
        elif not self.silent:
            _print(text, file=self.file, flush=True)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.close()
        else:
            self._line()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def progress_iter(iterable: Iterable, total: int | None = None, **kwargs: Any) -> Iterator:
    """Iterate with a Progress (same keyword arguments); `total` defaults to len(iterable) where it has one."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    with Progress(total=total, **kwargs) as progress:
        for item in iterable:
            yield item
            progress.update(1)


# ----------------------------------------------------------------------------------------------------------------------
# Downloads

BACKOFF_SECONDS = 1.0  # before the second attempt; doubled before each further one


class _KeepHubHeaders(urllib.request.HTTPRedirectHandler):
    """Follows redirects as usual; remembers the SHA-256 and size that the hub states on the redirecting answer."""

    def __init__(self) -> None:
        self.sha256: str | None = None
        self.size: int | None = None

    def redirect_request(self, req, fp, code, msg, headers, newurl):  # noqa: ANN001 (the base class has no hints)
        self.note(headers)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def note(self, headers: Any) -> None:
        etag = (headers.get("X-Linked-ETag") or "").strip('"')
        if re.fullmatch(r"[0-9a-f]{64}", etag):
            self.sha256 = etag
        size = headers.get("X-Linked-Size") or ""
        if size.isdigit():
            self.size = int(size)


def _whole_size(response: Any, offset: int) -> int | None:
    """Size of the whole file in bytes from an answer to a request for the bytes from `offset` on."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if not match or int(match.group(1)) != offset:
            raise OSError("the server answered with another range than the one asked for")
        return None if match.group(2) == "*" else int(match.group(2))
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def download_file(
    url: str,
    path: str | os.PathLike,
    *,
    size: int | None = None,
    sha256: str | None = None,
    deadline: float = 1800.0,
    timeout: float = 30.0,
    attempts: int = 5,
    hint: str = "",
    validate: Callable[[str], Any] | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> str:
    """
    Download `url` to `path`, resuming what an earlier call left in `path`.part. Returns the path as a str.

    The size is checked against `size`, or else against what the server states; the SHA-256 against `sha256`, or else
    against the one a Hugging Face hub publishes for its large files; `validate(temporary path)` may raise UserError to
    reject the content. Only then does the file get its name. The size is logged (where no `progress` shows it) and
    compared with the free disk space before the first byte is written. A failed attempt is repeated up to `attempts`
    times with 1, 2, 4, ... seconds between, and continues where it stopped; no answer for `timeout` seconds is a
    failure, and after `deadline` seconds all is over. `progress` is told the bytes as they arrive, `stop` ends the work
    early (both for downloads in threads).
    Raises UserError with what was tried and `hint`, which should name the way around the network.
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    give_up_at = time.monotonic() + deadline
    hint = f"; {hint}" if hint else ""
    problem, attempt, fatal = "", 0, False
    counted = 0  # bytes that `progress` was told of

    def discard() -> None:
        nonlocal counted
        part.unlink()
        if progress is not None:
            progress.update(-counted)
        counted = 0

    while attempt < attempts and not fatal:
        if attempt:
            wait = min(BACKOFF_SECONDS * 2 ** (attempt - 1), 30.0, max(0.0, give_up_at - time.monotonic()))
            logger.warning(f"{path.name}: {problem}; trying again in {wait:.0f} s ({attempt + 1} of {attempts})")
            (stop or threading.Event()).wait(wait)
        if stop is not None and stop.is_set():
            raise UserError(f"download of {url} stopped; run again to continue it{hint}")
        if time.monotonic() >= give_up_at:
            problem = f"not finished within {deadline:g} seconds ({problem or 'too slow'})"
            break
        attempt += 1
        have = part.stat().st_size if part.exists() else 0
        published = _KeepHubHeaders()
        request = urllib.request.Request(url, headers={"User-Agent": "nanochat_fp4", "Accept-Encoding": "identity"})
        if have:
            request.add_header("Range", f"bytes={have}-")
        try:
            with urllib.request.build_opener(published).open(request, timeout=timeout) as response:
                published.note(response.headers)
                if have and response.status != 206:  # the server does not know ranges: from the start
                    discard()
                    have = 0
                whole = size or _whole_size(response, have) or published.size
                free = shutil.disk_usage(path.parent).free
                if whole is not None and whole - have > free:
                    raise UserError(
                        f"{path.name} needs {format_bytes(whole - have)}, but {path.parent} has {format_bytes(free)} "
                        f"left; free some space, or set NANOCHAT_BASE_DIR to a larger disk{hint}"
                    )
                if progress is None and attempt == 1:
                    size_text = "size not stated" if whole is None else format_bytes(whole)
                    logger.info(f"downloading {path.name}: {size_text}, {format_bytes(free)} free in {path.parent}")
                with open(part, "ab" if have else "wb") as f:
                    while chunk := response.read(1 << 20):
                        f.write(chunk)
                        have += len(chunk)
                        counted += len(chunk)
                        if progress is not None:
                            progress.update(len(chunk))
                        if stop is not None and stop.is_set():
                            raise UserError(f"download of {url} stopped; run again to continue it{hint}")
                        if time.monotonic() >= give_up_at:
                            raise OSError(f"not finished within {deadline:g} seconds")
                    f.flush()
                    os.fsync(f.fileno())
        except urllib.error.HTTPError as e:
            stated = re.fullmatch(r"bytes \*/(\d+)", e.headers.get("Content-Range", "").strip())
            whole = size or (int(stated.group(1)) if stated else published.size)
            if e.code == 416 and have:  # no byte beyond `have`: the part is complete, or longer than the file
                whole = whole or -1  # of unknown size: not to be trusted
            else:
                problem = f"the server answered {e.code} {e.reason}"
                fatal = e.code in (400, 401, 403, 404, 410)
                continue
        except OSError as e:  # URLError and timeouts are OSErrors, too
            if getattr(e, "errno", None) in _USER_ERRNOS:
                raise UserError(f"cannot write {part}: {e.strerror}; free some space or choose another folder") from e
            problem = one_line(getattr(e, "reason", e))
            continue
        except Exception as e:  # http.client has a family of its own (IncompleteRead, BadStatusLine, ...)
            if isinstance(e, UserError):
                raise
            problem = one_line(e)
            continue
        if whole is not None and have != whole:
            problem = f"{have} bytes arrived instead of {whole if whole >= 0 else 'an unknown number'}"
            if have > whole:
                discard()
            continue
        want = sha256 or published.sha256
        if want and sha256_file(part) != want:
            problem = "the SHA-256 differs from the published one"
            discard()
            continue
        if validate is not None:
            try:
                validate(str(part))
            except UserError as e:
                problem = one_line(e)
                discard()
                continue
        os.replace(part, path)
        fsync_dir(path.parent)
        return str(path)
    raise UserError(f"could not download {url}: {problem} ({attempt} attempt{'s' * (attempt != 1)}){hint}")


def download_file_with_lock(
    url: str,
    filename: str,
    postprocess_fn: Callable[[str], Any] | None = None,
    **kwargs: Any,
) -> str:
    """
    The path of `filename` in the base directory, downloaded if it is not there; once, even if all ranks ask together.

    `postprocess_fn(temporary path)` runs after the download and before the file gets its name. Keyword arguments are
    those of download_file.
    """
    from filelock import FileLock

    path = os.path.join(get_base_dir(), filename)
    if os.path.exists(path):
        return path
    with FileLock(path + ".lock"):
        if not os.path.exists(path):
            print0(f"Downloading {url}...")
            fresh = path + ".fresh"
            download_file(url, fresh, **kwargs)
            if postprocess_fn is not None:
                postprocess_fn(fresh)
            os.replace(fresh, path)
    return path


# ----------------------------------------------------------------------------------------------------------------------
# Devices, ranks, seeds


def is_ddp_requested() -> bool:
    """True where torchrun started this process (its variables are there), even before anything is initialized."""
    return all(k in os.environ for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def is_ddp_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_dist_info() -> tuple[bool, int, int, int]:
    """(ddp, rank, local_rank, world_size) from torchrun's variables; (False, 0, 0, 1) without them."""
    if not is_ddp_requested():
        return False, 0, 0, 1
    values = []
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        try:
            values.append(int(os.environ[name]))
        except ValueError:
            raise UserError(
                f"{name}={os.environ[name]!r} is not a whole number; unset RANK, LOCAL_RANK and WORLD_SIZE, or start "
                "with torchrun, which sets them"
            ) from None
    rank, local_rank, world_size = values
    if not (0 <= rank < world_size and 0 <= local_rank < world_size):
        raise UserError(
            f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={world_size} do not fit together; start with torchrun"
        )
    return True, rank, local_rank, world_size


DEVICE_TYPES = ("cuda", "mps", "cpu")


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return f"this PyTorch ({torch.__version__}) is built without CUDA"
    return f"this PyTorch ({torch.__version__}) is built for CUDA {torch.version.cuda} but sees no GPU"


def autodetect_device_type() -> str:
    """'cuda' where a GPU is visible, else 'mps' where there is one, else 'cpu'. Prints the choice."""
    if torch.cuda.is_available():
        device_type = "cuda"
    elif torch.backends.mps.is_available():
        device_type = "mps"
    else:
        device_type = "cpu"
    why = f" ({_why_no_cuda()})" if device_type == "cpu" else ""
    print0(f"Autodetected device type: {device_type}{why}")
    return device_type


def check_device_type(device_type: str) -> None:
    """Raise UserError unless this machine has that kind of device."""
    if device_type not in DEVICE_TYPES:
        raise UserError(f"unknown device type {device_type!r}; use --device-type cuda, mps or cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device-type cuda: {_why_no_cuda()}; check nvidia-smi, or use --device-type cpu")
    if device_type == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device-type mps: Metal is not available here; use --device-type cpu")


def seed_everything(seed: int, rank: int | None = None) -> int:
    """
    Seed python's and torch's default generators (CPU, CUDA, MPS). Returns the seed that was used.

    Two steps make a data-parallel run: `seed_everything(seed)` on every rank before the model is made, so that all
    ranks draw the same weights, and `seed_everything(seed, rank)` after it, so that each rank draws its own rounding
    noise and rotations from then on (independent noise averages out over ranks, shared noise would not). The seed of a
    rank is a SHA-256 of (seed, rank), so neighbouring seeds and ranks do not overlap.
    """
    if not -(2**63) <= seed < 2**64:
        raise UserError(f"--seed={seed} does not fit into 64 bits; use a number from 0 to {2**64 - 1}")
    if rank is not None:
        digest = hashlib.sha256(f"nanochat_fp4 seed {seed} rank {rank}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1  # 63 bits: what torch.manual_seed takes without a sign
    random.seed(seed)
    torch.manual_seed(seed)  # seeds every device's default generator as well
    return seed


def _restart_store() -> dist.Store | None:
    """
    Where the ranks meet after torchrun has started all of them again (--max-restarts); None at the first start.

    torchrun's own store lives on, and with it the addresses of the dead processes: a rank that looks before its peer
    has written the new one tries to connect to the old one. Under a prefix for each start there are no old ones. On
    one node only: the nodes of a larger job may count their restarts differently.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"nanochat_fp4/start_{attempt}", store)


def compute_init(device_type: str = "cuda", seed: int = 42) -> tuple[bool, int, int, int, torch.device]:
    """
    Choose the device, seed (the same on all ranks, see seed_everything) and join the process group under torchrun.

    device_type: cuda | mps | cpu, or "" to autodetect. NCCL on CUDA, gloo on the CPU.
    Returns (ddp, rank, local_rank, world_size, device), as nanochat does. Raises UserError.
    """
    device_type = device_type or autodetect_device_type()
    check_device_type(device_type)
    ddp, rank, local_rank, world_size = get_dist_info()
    seed_everything(seed)
    if device_type == "cuda":
        # FP32 matmuls (there are few) in TF32: its 10-bit significand still holds decoded NVFP4 operands exactly.
        torch.set_float32_matmul_precision("high")
    device = torch.device(device_type)
    if ddp:
        if device_type == "mps":
            raise UserError("several processes are not supported on mps; start without torchrun")
        if device_type == "cuda":
            if local_rank >= torch.cuda.device_count():
                raise UserError(
                    f"local rank {local_rank} has no GPU: only {torch.cuda.device_count()} visible; lower "
                    "--nproc_per_node to the number of GPUs"
                )
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        if not is_ddp_initialized():
            try:
                where = {"store": store, "rank": rank, "world_size": world_size} if (store := _restart_store()) else {}
                if device_type == "cuda":
                    dist.init_process_group(backend="nccl", device_id=device, **where)
                else:
                    dist.init_process_group(backend="gloo", **where)
            except (dist.DistError, ValueError) as e:
                raise UserError(f"cannot join the process group: {one_line(e)}; start with torchrun") from e
        dist.barrier()
    if rank == 0:
        logger.info(f"device {device}, world size {world_size}")
    return ddp, rank, local_rank, world_size, device


def compute_cleanup() -> None:
    """Leave the process group, if there is one."""
    if is_ddp_initialized():
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------------------
# Weights & Biases


class DummyWandb:
    """Takes wandb's calls and does nothing, so that training code needs no `if`."""

    summary: dict[str, Any] = {}

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def finish(self, *args: Any, **kwargs: Any) -> None:
        pass


def _has_wandb_account() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    host = re.sub(r"^https?://", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).split("/")[0]
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in names:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(name)).authenticators(host):
                return True
    return False


def setup_wandb(run: str | None, project: str, config: dict[str, Any], timeout: float = 60.0) -> Any:
    """
    A wandb run, or a DummyWandb where `run` is empty or 'dummy', and on ranks other than 0.

    `run` is the --run flag, whose default is $WANDB_RUN. Never prompts and never hangs: without an account, or where
    the server does not answer within `timeout` seconds, the run is kept offline under the base directory and the line
    that uploads it is printed. WANDB_MODE, when set, is obeyed.
    """
    if not run or run == "dummy" or os.environ.get("RANK", "0") != "0":
        return DummyWandb()
    try:
        import wandb
    except ImportError as e:
        raise UserError(f"run {run!r} was asked for, but wandb cannot be imported ({one_line(e)}); pip install wandb, "
                        "or set WANDB_RUN=dummy") from e  # fmt: skip
    mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_account() else "offline")
    for attempt in dict.fromkeys([mode, "offline"]):  # each once
        try:
            settings = wandb.Settings(init_timeout=timeout)
            wandb_run = wandb.init(
                project=project, name=run, config=config, dir=get_base_dir(), mode=attempt, settings=settings
            )
        except Exception as e:  # whatever wandb raises (usage, auth, network): logging must not stop a training run
            logger.warning(f"wandb does not start in mode {attempt} ({one_line(e)[:200]})")
            continue
        if attempt == "offline":
            print0(f"wandb: offline; upload later with: wandb sync {os.path.dirname(wandb_run.dir)}")
        return wandb_run
    logger.warning("going on without wandb")
    return DummyWandb()


# ----------------------------------------------------------------------------------------------------------------------
# Hardware

# Dense BF16 tensor-core peak with FP32 accumulation, FLOP/s, from the vendors' data sheets. First match wins, so
# longer names come first.
_PEAK_FLOPS = [
    (r"gb300|b300", 2.25e15),
    (r"gb200|grace blackwell", 2.5e15),
    (r"\bb200", 2.25e15),
    (r"\bb100", 1.8e15),
    (r"h200.*(nvl|pcie)", 836e12),
    (r"gh200|h200", 989e12),
    (r"h100.*nvl", 835e12),
    (r"h100.*pcie", 756e12),
    (r"h100", 989e12),
    (r"h800.*pcie", 756e12),
    (r"h800", 989e12),
    (r"\bh20\b", 148e12),
    (r"a100|a800", 312e12),
    (r"\ba40\b", 149.7e12),
    (r"\ba30\b", 165e12),
    (r"\ba10\b", 125e12),
    (r"\bl40s", 362e12),
    (r"\bl40\b", 181e12),
    (r"\bl4\b", 121e12),
    (r"mi355", 2.5e15),
    (r"mi325|mi300x", 1.3074e15),
    (r"mi300a", 980.6e12),
    (r"mi250x", 383e12),
    (r"mi250", 362.1e12),
    (r"rtx 5090", 209.5e12),
    (r"rtx 4090", 165.2e12),
    (r"rtx 3090", 71e12),
]


def get_peak_flops(device_name: str) -> float | None:
    """Dense BF16 peak of a GPU in FLOP/s from its name (torch.cuda.get_device_name); None where it is not known.

    The BF16 peak is the yardstick for every method, so that MFU above 100% is possible in FP4 on a Blackwell.
    A caller that gets None shows no MFU rather than a wrong one.
    """
    name = device_name.lower()
    for pattern, flops in _PEAK_FLOPS:
        if re.search(pattern, name):
            return flops
    return None


def _command_output(*command: str, cwd: str | None = None) -> str | None:
    """stdout of a short command, stripped; None where it is missing, fails or takes more than 10 seconds."""
    try:
        out = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip() if out.returncode == 0 else None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        return _command_output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    with contextlib.suppress(OSError):
        if match := re.search(r"(\d+\.\d+(?:\.\d+)?)  ", Path("/proc/driver/nvidia/version").read_text()):
            return match.group(1)
    out = _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return out.splitlines()[0] if out else None


def get_commit() -> str | None:
    """Commit of the checkout this package lies in, with '+changes' where tracked files differ; None outside of git."""
    root = str(Path(__file__).resolve().parent.parent)
    if _command_output("git", "rev-parse", "--show-toplevel", cwd=root) != root:
        return None  # an installed copy that happens to lie in somebody else's repository
    commit = _command_output("git", "rev-parse", "HEAD", cwd=root)
    if commit and _command_output("git", "status", "--porcelain", "--untracked-files=no", cwd=root):
        commit += "+changes"
    return commit


def environment_info() -> dict[str, Any]:
    """
    What a number in a report was measured on, as a JSON-able dict with these keys (None where not known):
    python, platform, torch, triton, cuda, gpu, gpu_count, gpu_memory_gb, compute_capability, driver, cpu, cpu_count,
    memory_gb, commit.
    """
    try:
        import triton

        triton_version = triton.__version__
    except Exception:  # not installed, or broken on this platform: both mean that no kernel can be compiled
        triton_version = None
    info: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "gpu": None,
        "gpu_count": 0,
        "gpu_memory_gb": None,
        "compute_capability": None,
        "driver": None,
        "cpu": _cpu_name(),
        "cpu_count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": None,
        "commit": get_commit(),
    }
    with contextlib.suppress(OSError, ValueError, AttributeError):
        info["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        info["gpu"] = properties.name
        info["gpu_count"] = torch.cuda.device_count()
        info["gpu_memory_gb"] = round(properties.total_memory / 2**30, 1)
        info["compute_capability"] = f"{properties.major}.{properties.minor}"
        info["driver"] = _driver_version()
    return info
