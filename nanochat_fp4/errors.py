"""Errors in one line: UserError, checks that raise it, and run_main, the entry point of every script."""

import contextlib
import errno
import importlib.util
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nanochat_fp4.console import print_error, setup_default_logging
from nanochat_fp4.packages import missing_package, remedy


class UserError(Exception):
    """An error that the user can correct. Its message is one line: what was wrong, what was expected, what to do."""


# The user can correct a full or read-only disk, or a limit of file sizes (EFBIG). Any other OSError is a bug and keeps
# its traceback.
USER_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG}
# This is the message of torch's RuntimeError.
_NOT_DETERMINISTIC = re.compile(r"(\S+) does not have a deterministic implementation")
# The user gave a path that cannot be used. EBUSY means that a file cannot replace `..`.
_PATH_ERRNOS = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EBUSY}


def one_line(error: BaseException | str) -> str:
    """Returns the message of `error` on a single line, or the name of its class if it has no message."""
    text = " ".join(str(error).split())
    return text if text or isinstance(error, str) else type(error).__name__


def require(*modules: str) -> None:
    """Raises UserError, with the `pip install` command, if any of the modules is not installed."""
    if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
        problem = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        raise UserError(f"{problem}, which this needs; {remedy(*missing)}")


def switched_on(name: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether an environment variable that is a switch is on. dev/setup.sh has the same function.

    Raises UserError for a value that is neither of the words."""
    text = environment.get(name, "")
    if text.lower() in ("", "0", "no", "false"):
        return False
    if text.lower() in ("1", "yes", "true"):
        return True
    raise UserError(f"{name}={text}: expected 1 (yes, true) or 0 (no, false); set it to one of these or unset it")


def _allow_interrupts() -> None:
    """
    Makes Ctrl-C raise KeyboardInterrupt again.

    If there are several ranks, a rank still dies of SIGINT. It may be waiting for the others in C++, where no exception
    ends the wait.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL and "RANK" not in os.environ:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_main(main: Callable[[], Any]) -> None:
    """
    The entry point of every script: `if __name__ == "__main__": run_main(main)`.

    Errors that a user can correct print `error: <one line>` on stderr and end in exit status 2:
    - UserError, and the ValueError of library code
    - a missing package
    - a full or read-only disk, and a path that cannot be used
    - a GPU or CPU out of memory
    - a number that is too large for the machine

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
    setup_default_logging()
    status, with_traceback = 2, False
    try:
        _allow_interrupts()
        with_traceback = switched_on("NANOCHAT_TRACEBACK")
        main()
        return
    except (KeyboardInterrupt, Exception) as e:
        # A Ctrl-C that comes inside of compiled code (the tokenizer's training) can be the cause of another exception.
        if isinstance(e, KeyboardInterrupt) or isinstance(e.__cause__, KeyboardInterrupt):
            message, status = "interrupted", 130
        elif is_out_of_memory(e):
            where = "GPU memory" if isinstance(e, torch.OutOfMemoryError) else "memory"
            message = f"out of {where} ({one_line(e).split('. ')[0][:200]}); lower --device-batch-size and run again"
        elif isinstance(e, UserError | ValueError):
            message = one_line(e)
        elif missing := missing_package(e):
            message = missing
        elif isinstance(e, OverflowError) or "Overflow when unpacking" in str(e):
            # These are Python's error, and torch's TypeError.
            message = f"a number is too large ({one_line(e)[:150]}); see the command's --help"
        elif isinstance(e, RuntimeError) and (name := _NOT_DETERMINISTIC.match(str(e))):
            message = f"{name[1]} has no deterministic form on this device; train without --deterministic"
        elif isinstance(e, BrokenPipeError) and _reader_has_gone():
            sys.exit(128 + signal.SIGPIPE)
        elif isinstance(e, OSError) and e.errno in USER_ERRNOS:
            message = f"{one_line(e)}; free some space or choose a writable folder (NANOCHAT_BASE_DIR)"
        elif isinstance(e, OSError) and e.errno in _PATH_ERRNOS:
            message = f"{one_line(e)[:300]}; choose another path"
        else:
            raise
        if with_traceback:
            traceback.print_exc()
    finally:
        _let_go_of_stdout()
    if status != 130 or os.environ.get("RANK", "0") == "0":  # Ctrl-C reaches all ranks, but only rank 0 prints.
        print_error(message)
    sys.exit(status)


def _reader_has_gone() -> bool:
    """Returns whether stdout is a pipe whose reader is gone."""
    pipe = select.poll()
    with contextlib.suppress(OSError, ValueError):  # stdout may have no file.
        pipe.register(sys.stdout.fileno(), 0)
    return bool(pipe.poll(0))


def _let_go_of_stdout() -> None:
    """Flushes stdout now. If its reader is gone, drops the rest, because Python would fail at exit otherwise."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):  # stdout may have no file.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception says that memory ran out, on the GPU or (a RuntimeError of torch) on the CPU."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )
