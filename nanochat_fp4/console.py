"""Flags and output: numbers in flags, bytes and seconds as text, the log, progress."""

import argparse
import contextlib
import difflib
import gc
import json
import logging
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TextIO

logger = logging.getLogger("nanochat_fp4")

# ----------------------------------------------------------------------------------------------------------------------
# Flags


PROGRAM: str | None = None  # "nanochat-fp4 base_train", set by __main__.py; else argparse's name of the file


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, for all commands. Flags are not abbreviated (--dept is not --depth); errors are one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": PROGRAM} | kwargs)

    def error(self, message: str) -> NoReturn:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        wrong = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and wrong:
            alike = difflib.get_close_matches(wrong[0], flags, n=1)
            message += f"; did you mean {alike[0]}?" if alike else ""
        if message.startswith("argument ") and message.endswith("expected one argument"):
            message += f"; one that begins with a dash is given as {message.split()[1].rstrip(':')}=..."
        print_error(f"{message} (see {self.prog} --help)")
        self.exit(2)

    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers as text


def parse_finite(text: str) -> float:
    """argparse type of every flag with a fractional number. Refuses NaN and infinity."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _finite_if(holds: Callable[[float], bool], problem: str) -> Callable[[str], float]:
    """argparse type of a finite number that holds() is true for."""

    def parse(text: str) -> float:
        if not holds(value := parse_finite(text)):
            raise argparse.ArgumentTypeError(f"{text!r} {problem}")
        return value

    return parse


parse_rate = _finite_if(lambda value: value >= 0, "is negative; it must be at least 0")  # or a weight decay
parse_share = _finite_if(lambda value: 0 <= value <= 1, "is not from 0 to 1")  # of the whole
parse_beta = _finite_if(lambda value: 0 <= value < 1, "is not at least 0 and below 1")  # what a moving average keeps


def format_bytes(num: float) -> str:
    """1536 -> '1.5 KB'. All prefixes are powers of 1024."""
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


_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process began, or since the import of this module if the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


class Phases:
    """The named phases of this process's start and their seconds, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"start of Python": process_age()}
        self.last = time.monotonic()

    def end(self, name: str) -> None:
        """Ends the phase that began with the last call, and names it."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Python collects cyclic garbage a hundred times less often inside.

    The compiler's modules and objects stay alive, and searching them for garbage takes a tenth of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# ----------------------------------------------------------------------------------------------------------------------
# Printing, logging


def print_safely(*args: Any, **kwargs: Any) -> None:
    """print that never ends a run, not even with a closed pipe, a closed terminal or a full disk."""
    with contextlib.suppress(OSError):
        print(*args, **kwargs)


OTHER_RANKS_WAIT = 3.0  # seconds


def print_error(message: str) -> None:
    """
    `error: <message>` on stderr, before this process ends.

    A user's error ends all processes alike, and torchrun ends the others when the first has ended. The other ranks
    therefore wait until rank 0 has printed the message. A rank that is alive after the wait had trouble of its own, and
    prints its message. torchrun repeats the message at the end of its own report.
    """
    rank, file = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if rank != "0":
        time.sleep(OTHER_RANKS_WAIT if "TORCHELASTIC_RUN_ID" in os.environ else 0)
        message = f"error (rank {rank}): {message}"
    else:
        message = f"error: {message}"
    if file:
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as f:
            about = {"timestamp": str(int(time.time())), "py_callstack": message}
            json.dump({"message": {"message": message, "extraInfo": about}}, f)
    print_safely(message, file=sys.stderr, flush=True)


class _StderrHandler(logging.StreamHandler):
    """`HH:MM:SS message`, and the level of a warning, to the sys.stderr of the moment: it may be redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{record.getMessage()}"


def setup_default_logging() -> None:
    """Send this package's log to stderr: information from rank 0, warnings from every rank. Safe to call twice."""
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


# ----------------------------------------------------------------------------------------------------------------------
# Progress

RECENT = 50  # the time left is estimated from the median of this many updates
FIRST_ESTIMATE = 3  # no estimate before this many updates: the first step of a run compiles and fills caches


class Progress:
    """
    How far a long piece of work has come: a bar on a terminal, one plain line every `every` seconds in a log.

        with Progress(total=num_steps, desc="train", unit="step") as progress:
            for ...:
                progress.update(1, loss="2.31")

    Lines go to `file` (default stderr), from rank 0 only, with the rate and the time left. The time left comes from the
    median of recent steps, so one step that compiles or evaluates does not change it. `total=None`: the total is
    unknown. Work that ends within `every` seconds leaves exactly one line in a log, the last.
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
        self.start = self.last_line = self.last_update = time.monotonic()
        self.recent: deque[float] | None = deque(maxlen=RECENT)  # seconds; None after an update of several units
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
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}, {rate_fmt}{postfix}]" if total else None,
            )

    def update(self, n: int = 1, **info: Any) -> None:
        """`n` more units are done; `info` (e.g. loss="2.31") is shown beside them until it is replaced."""
        with self.lock:
            now = time.monotonic()
            if n != 1:
                self.recent = None
            elif self.recent is not None:
                self.recent.append(now - self.last_update)
            self.last_update = now
            self.n += n
            self.info.update(info)
            if self.bar is not None:
                with contextlib.suppress(OSError):  # work goes on without its terminal
                    left = self.seconds_left()
                    shown = {} if left is None else {"ETA": format_seconds(left)}
                    self.bar.set_postfix(shown | {k: str(v) for k, v in self.info.items()}, refresh=False)
                    self.bar.update(n)
            elif time.monotonic() - self.last_line >= self.every:
                self._line()

    def seconds_left(self) -> float | None:
        """None for unknown and for finished work."""
        done, elapsed = self.n - self.initial, time.monotonic() - self.start
        if not self.total or not 0 < self.n < self.total or not done or elapsed <= 0:
            return None
        if self.recent is None:
            return (self.total - self.n) * elapsed / done
        return (self.total - self.n) * statistics.median(self.recent) if done >= FIRST_ESTIMATE else None

    def line(self) -> str:
        """The plain line: description, count and percentage, rate and time left, and info."""
        elapsed = time.monotonic() - self.start
        rate = (self.n - self.initial) / elapsed if elapsed > 0 else 0.0
        as_bytes = self.unit == "bytes"
        show = format_bytes if as_bytes else lambda num: f"{num:,.0f}"
        parts = [f"{show(self.n)}/{show(self.total)} ({self.n / self.total:.0%})" if self.total else show(self.n)]
        if not as_bytes:
            parts[0] += f" {self.unit}"
        parts.append(f"{show(rate)}/s" if as_bytes else f"{rate:.4g} {self.unit}/s")
        left = self.seconds_left()
        parts.append(f"{format_seconds(elapsed)} elapsed" if left is None else f"ETA {format_seconds(left)}")
        parts += [f"{k} {v}" for k, v in self.info.items()]
        return (f"{self.desc}: " if self.desc else "") + " | ".join(parts)

    def _line(self) -> None:
        self.last_line = time.monotonic()
        if not self.silent:
            print_safely(self.line(), file=self.file, flush=True)

    def write(self, text: str) -> None:
        """A line of its own that does not tear the bar."""
        if self.bar is not None:
            with contextlib.suppress(OSError):
                self.bar.write(text, file=self.file)
        elif not self.silent:
            print_safely(text, file=self.file, flush=True)

    def meanwhile(self, batches: Iterable, total: int, what: str) -> Iterator:
        """`batches` of other work that happens between two units: a line every `every` seconds, none for short work."""
        last_line = time.monotonic()
        for done, batch in enumerate(batches):
            if time.monotonic() - last_line >= self.every:
                last_line = time.monotonic()
                self.write(f"{what}: {done:,}/{total:,} batches")
            yield batch

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
            progress.update(1)
            yield item


def table(header: list[str], rows: list[list[object]]) -> str:
    """Columns aligned, numbers to the right."""
    cells = [header, *[[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(v.rjust(w) if n else v.ljust(w) for v, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])
