"""What all commands share: errors in one line, flags, numbers as text, the log, and tables.

`run_main` is the entry point of every script. It turns an error that the user can correct into one line. This module
imports neither torch nor any other package that may be missing, because nanochat_fp4/__init__.py imports it first.
"""

import argparse
import contextlib
import difflib
import errno
import importlib.util
import io
import json
import logging
import math
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

logger = logging.getLogger("nanochat_fp4")
BEGAN = time.monotonic()  # when the program began, but for the start of Python itself

# ----------------------------------------------------------------------------------------------------------------------
# Errors


class UserError(Exception):
    """An error that the user can correct. Its message is one line: what was wrong, what was expected, what to do."""


# The user can correct a full or read-only disk, or a limit of file sizes (EFBIG). Any other OSError is a bug and keeps
# its traceback.
USER_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG}
# The user gave a path that cannot be used. EBUSY means that a file cannot replace `..`.
PATH_ERRNOS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EBUSY}
OTHER_RANKS_WAIT = 3.0  # seconds


def one_line(error: BaseException | str) -> str:
    """Returns the message of `error` on a single line, or the name of its class if it has no message."""
    text = re.sub(r"^<urlopen error (?:\[Errno -?\d+\] )?(.*)>$", r"\1", " ".join(str(error).split()))
    return text if text or isinstance(error, str) else type(error).__name__


def switched_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether an environment variable that is a switch is on. dev/setup.sh has the same function.

    Raises UserError for a value that is neither of the words."""
    text = environment.get(name, "")
    if text.lower() in ("", "0", "no", "false"):
        return False
    if text.lower() in ("1", "yes", "true"):
        return True
    raise UserError(f"{name}={text}: expected 1 (yes, true) or 0 (no, false); set it to one of these or unset it")


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that memory ran out, on the GPU or (a RuntimeError of torch) on the CPU."""
    import torch

    of_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return of_torch or isinstance(error, torch.OutOfMemoryError | MemoryError)


def user_message(error: BaseException) -> str:
    """Returns the line about an error that the user can correct, or "" for a bug."""
    text = one_line(error)
    if is_out_of_memory(error):
        return f"out of memory ({text.split('. ')[0][:200]}); lower --device-batch-size and run again"
    if isinstance(error, UserError | ValueError):
        return text
    if isinstance(error, OverflowError) or "Overflow when unpacking" in text:  # Python's error, and torch's TypeError
        return f"a number is too large ({text[:150]}); see the command's --help"
    if isinstance(error, RuntimeError) and (found := re.match(r"(\S+) does not have a deterministic implement", text)):
        return f"{found[1]} has no deterministic form on this device; train without --deterministic"
    if isinstance(error, OSError) and error.errno in USER_ERRNOS:
        return f"{text}; free some space or choose a writable folder (NANOCHAT_BASE_DIR)"
    if isinstance(error, OSError) and error.errno in PATH_ERRNOS:
        return f"{text[:300]}; choose another path"
    return missing_package(error)


def print_error(message: str) -> None:
    """
    Prints `error: <message>` on stderr, before this process ends.

    An error of the user ends all processes in the same way, and torchrun ends the others when the first one has ended.
    The other ranks therefore wait until rank 0 has printed the message. A rank that is still alive after the wait had
    an error of its own, and prints its message. torchrun repeats the message at the end of its own report.
    """
    rank, file = os.environ.get("RANK", "0"), os.environ.get("TORCHELASTIC_ERROR_FILE")
    message = f"error: {message}" if rank == "0" else f"error (rank {rank}): {message}"
    if rank != "0" and "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(OTHER_RANKS_WAIT)
    if file:
        with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as f:
            details = {"timestamp": str(int(time.time())), "py_callstack": message}
            json.dump({"message": {"message": message, "extraInfo": details}}, f)
    print_safely(message, file=sys.stderr, flush=True)


def run_main(main: Callable[[], Any]) -> None:
    """
    The entry point of every script: `if __name__ == "__main__": run_main(main)`.

    An error that the user can correct (user_message) prints `error: <one line>` on stderr and ends in exit status 2.
    Ctrl-C ends in exit status 130. A `print` whose reader is gone (`| head`) ends in 141 without a message, but print0
    goes on. Any other exception is a bug and keeps its traceback. With NANOCHAT_TRACEBACK=1 the errors of a user print
    their traceback as well.
    """
    if sys.stdout is None:  # stdout was closed when Python started.
        sys.stdout = open(os.devnull, "w")
    # No character ends a run, whatever the encoding, as on Python's stderr.
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # reconfigure flushes stdout, whose reader may be gone.
            sys.stdout.reconfigure(errors="backslashreplace")
    if not logger.handlers:
        logger.addHandler(StderrHandler())
    logger.setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    # Ctrl-C raises KeyboardInterrupt again (begin_program), but a rank still dies of it: it may be waiting for the
    # others in C++, where no exception ends the wait.
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL and "RANK" not in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with_traceback = False
    try:
        with_traceback = switched_on("NANOCHAT_TRACEBACK")
        main()
        return
    except (KeyboardInterrupt, Exception) as error:
        # A Ctrl-C that comes inside of compiled code (the tokenizer's training) can be the cause of another exception.
        interrupted = isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            sys.exit(128 + signal.SIGPIPE)
        if not (message := "interrupted" if interrupted else user_message(error)):
            raise
        if with_traceback:
            traceback.print_exc()
    finally:
        _flush_stdout()
    if not interrupted or os.environ.get("RANK", "0") == "0":  # Ctrl-C reaches all ranks, but only rank 0 prints.
        print_error(message)
    sys.exit(130 if interrupted else 2)


def _reader_has_gone() -> bool:
    """Whether stdout is a pipe whose reader is gone."""
    pipe = select.poll()
    with contextlib.suppress(OSError, ValueError):  # stdout may have no file.
        pipe.register(sys.stdout.fileno(), 0)
    return bool(pipe.poll(0))


def _flush_stdout() -> None:
    """Drops what stdout still holds if its reader is gone. Python would fail at exit otherwise."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # stdout may have no file.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ----------------------------------------------------------------------------------------------------------------------
# Packages that are not installed

ROOT = Path(__file__).resolve().parent.parent  # This is the root of a checkout, or site-packages.
EXTRAS = "train,export,web,examples"  # all that have packages of a program here
OURS = ("nanochat_fp4", "scripts", "eval", "lab", "examples")


def missing_package(error: BaseException) -> str:
    """Returns one line about a ModuleNotFoundError, with what to type so that the package is found, otherwise "".

    This is to activate the checkout's .venv, if it has one that is not in use. Otherwise it is a `pip install`, which
    names the extras that have the package, and the folder of a checkout, because no package index has ours.
    """
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if not name or name in OURS:
        return ""
    text = "".join(path.read_text() for path in ROOT.glob("pyproject.toml"))
    having = re.findall(rf'^({EXTRAS.replace(",", "|")}) = \[[^\]]*"{name.replace("_", ".")}', text, re.M)
    package = f"-e '{ROOT}" if text else "'nanochat_fp4"
    how = f"pip install {package}[{','.join(having) or EXTRAS}]'"
    if (ROOT / ".venv").is_dir() and Path(sys.prefix) != ROOT / ".venv":
        how = f'type `source "{ROOT}/.venv/bin/activate"` and run it again'
    return f"the package {name} is not installed in {sys.executable}, which this needs; {how}"


def require(*modules: str) -> None:
    """Raises ModuleNotFoundError, with what to type, if one of the modules is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(missing_package(ModuleNotFoundError(name=module)), name=module)


def begin_program() -> None:
    """
    Lets signals end this process by their default action, without a traceback, until run_main changes this. The error
    for a package that is not installed becomes one line.

    Does nothing in a program that only imports this package. A program of ours was started with one of our modules by
    `-m`, or is a file of examples/.
    """
    module = sys.orig_argv[sys.orig_argv.index("-m") + 1] if "-m" in sys.orig_argv[:-1] else ""
    ours = module.partition(".")[0] in OURS or Path(*sys.argv[:1]).resolve().parent == ROOT / "examples"
    if sys.argv[:1] == ["-c"] or not ours:
        return
    sys.excepthook = _say_what_is_missing
    # A shell may have let this process ignore the signal.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _say_what_is_missing(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not (message := missing_package(error)):
        return sys.__excepthook__(kind, error, trace)
    print_error(message)
    raise SystemExit(2)


begin_program()

# ----------------------------------------------------------------------------------------------------------------------
# Flags

# What a user types before the name of a stage. The wheel has the programs inside of the package (__main__.py).
INSTALLED = (Path(__file__).parent / "programs").is_dir()
STAGE = "nanochat-fp4 " if INSTALLED else "python -m scripts."
PROGRAM: str | None = None  # nanochat_fp4/__main__.py sets this to "nanochat-fp4 base_train" and the like.


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the question whether a name that nobody knows is meant to be the nearest known one, or "". A prefix that
    all of them have makes none alike."""
    alike = difflib.get_close_matches(name.removeprefix(prefix), [k.removeprefix(prefix) for k in known], n=1)
    return f"did you mean {prefix}{alike[0]}?" if alike else ""


class ArgumentParser(argparse.ArgumentParser):
    """The argument parser of all commands. Flags cannot be abbreviated (--dept is not --depth), and errors are one
    line. The program's name is what a user types to start it: `python -m scripts.base_train`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        spec = getattr(sys.modules.get("__main__"), "__spec__", None)
        module = f"python -m {spec.name.removesuffix('.__main__')}" if spec else f"python {sys.argv[0]}"
        super().__init__(*args, **{"allow_abbrev": False, "prog": PROGRAM or module} | kwargs)

    def error(self, message: str) -> NoReturn:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        wrong = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        if message.startswith("unrecognized arguments") and wrong:
            message = "; ".join(filter(None, [message, did_you_mean(wrong[0], flags, "--")]))
        print_error(f"{message} (see {self.prog} --help)")
        self.exit(2)


def number_type(kind: type, holds: Callable[[float], bool], expected: str) -> Callable[[str], Any]:
    """Returns an argparse type for numbers of a kind (int or float) for which holds() is true. No comparison holds for
    NaN. `expected` says what such a number is."""

    def parse(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if holds(value := kind(text)):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return parse


parse_finite = number_type(float, math.isfinite, "a finite number")
parse_rate = number_type(float, lambda value: 0 <= value < math.inf, "a finite number of at least 0")
parse_count = number_type(int, lambda value: value >= 0, "a whole number of at least 0")
parse_positive = number_type(int, lambda value: value >= 1, "a whole number of at least 1")

# ----------------------------------------------------------------------------------------------------------------------
# Text


def format_bytes(num: float) -> str:
    """Formats a number of bytes: 1536 becomes '1.5 KB'. All prefixes are powers of 1024."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(num) < 1024:
            return f"{num:.0f} byte{'s' * (num != 1)}" if unit == "bytes" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} TB"


def amount(count: float) -> str:
    """Formats a count in words of three digits: 246 thousand, 11.2 billion."""
    for size, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """Formats a time: 75 becomes '1m15s', and 7500 becomes '2h05m'."""
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


def print_safely(*args: Any, **kwargs: Any) -> None:
    """Prints, and never ends a run, not even with a closed pipe, a closed terminal or a full disk."""
    with contextlib.suppress(OSError):
        print(*args, **kwargs)


class StderrHandler(logging.StreamHandler):
    """Writes `HH:MM:SS message`, with the level of a warning, on one line of the present sys.stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        error = record.exc_info[1] if record.exc_info else None
        cause = f": {type(error).__name__}: {one_line(error)}" if error else ""
        time_of_day = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{time_of_day} {level}{one_line(record.getMessage())}{cause}"
