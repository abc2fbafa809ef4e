"""The input and output of commands: flags, numbers as text, the one line of an error, the log, and tables."""

import argparse
import contextlib
import difflib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

logger = logging.getLogger("nanochat_fp4")

# ----------------------------------------------------------------------------------------------------------------------
# Flags


PROGRAM: str | None = None  # nanochat_fp4/__main__.py sets this to "nanochat-fp4 base_train" and the like.


def typed_program() -> str:
    """What a user types to start this program, without arguments: `python -m scripts.base_train`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return PROGRAM or (f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}")


class ArgumentParser(argparse.ArgumentParser):
    """The argument parser of all commands. Flags cannot be abbreviated (--dept is not --depth), and errors are one
    line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "prog": typed_program()} | kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        self._typed = [str(word) for word in (sys.argv[1:] if args is None else args)]
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        flags = {flag.removeprefix("--"): flag for flag in self._option_string_actions if flag.startswith("--")}
        if message.startswith("the following arguments are required"):
            # A flag that does not exist is more often the reason than one that was forgotten.
            unknown = [w for w in self._typed if w.startswith("--") and w[2:].partition("=")[0] not in flags and w[2:]]
            message = f"unrecognized arguments: {' '.join(unknown)}" if unknown and not self._subparsers else message
        wrong = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and wrong:
            similar = difflib.get_close_matches(wrong[0].removeprefix("--"), flags, n=1)
            message += f"; did you mean {flags[similar[0]]}?" if similar else ""
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
    """The argparse type of every flag with a fractional number. It refuses NaN and infinity."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value


def _finite_if(holds: Callable[[float], bool], problem: str) -> Callable[[str], float]:
    """Returns an argparse type for finite numbers for which holds() is true."""

    def parse(text: str) -> float:
        if not holds(value := parse_finite(text)):
            raise argparse.ArgumentTypeError(f"{text!r} {problem}")
        return value

    return parse


# A learning rate or a weight decay.
parse_rate = _finite_if(lambda value: value >= 0, "is negative; it must be at least 0")
parse_share = _finite_if(lambda value: 0 <= value <= 1, "is not from 0 to 1")  # A fraction of a whole.
# The factor by which a moving average keeps its old value.
parse_beta = _finite_if(lambda value: 0 <= value < 1, "is not at least 0 and below 1")


def format_bytes(num: float) -> str:
    """Formats a number of bytes: 1536 becomes '1.5 KB'. All prefixes are powers of 1024."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(num) < 1024:
            return f"{num:.0f} {unit}" if unit == "bytes" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} TB"


def format_seconds(seconds: float) -> str:
    """Formats a time: 75 becomes '1m15s', and 7500 becomes '2h05m'."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


# ----------------------------------------------------------------------------------------------------------------------
# Printing, logging


def print_safely(*args: Any, **kwargs: Any) -> None:
    """Prints, and never ends a run, not even with a closed pipe, a closed terminal or a full disk."""
    with contextlib.suppress(OSError):
        print(*args, **kwargs)


OTHER_RANKS_WAIT = 3.0  # The time in seconds.


def print_error(message: str) -> None:
    """
    Prints `error: <message>` on stderr, before this process ends.

    An error of the user ends all processes in the same way, and torchrun ends the others when the first one has ended.
    The other ranks therefore wait until rank 0 has printed the message. A rank that is still alive after the wait had
    an error of its own, and prints its message. torchrun repeats the message at the end of its own report.
    """
    rank, file = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if rank != "0":
        time.sleep(OTHER_RANKS_WAIT if "TORCHELASTIC_RUN_ID" in os.environ else 0)
        message = f"error (rank {rank}): {message}"
    else:
        message = f"error: {message}"
    if file:
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as f:
            details = {"timestamp": str(int(time.time())), "py_callstack": message}
            json.dump({"message": {"message": message, "extraInfo": details}}, f)
    print_safely(message, file=sys.stderr, flush=True)


class _StderrHandler(logging.StreamHandler):
    """Writes `HH:MM:SS message`, with the level of a warning, to the present sys.stderr, because it may be
    redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {level}{record.getMessage()}"


def setup_default_logging() -> None:
    """Sends the log of this package to stderr: information from rank 0, and warnings from every rank. It may be
    called twice."""
    if not logger.handlers:
        logger.addHandler(_StderrHandler())
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)


# ----------------------------------------------------------------------------------------------------------------------
# Tables


def table(header: list[str], rows: list[list[object]]) -> str:
    """Returns the lines of a table with aligned columns, in which numbers are on the right."""
    cells = [header, *[[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(v.rjust(w) if n else v.ljust(w) for v, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])
