"""
torchrun for the pipeline, with the same arguments. SIGUSR1 is passed on. A SIGHUP that nohup ignores stays ignored. The
exit status is that of the process that failed first.

    python -m nanochat_fp4.training.launch --standalone --nproc_per_node=2 -m scripts.base_train --depth=4

torchrun itself leaves its processes behind at a SIGUSR1. Its exit status is always 1, and its own traceback follows the
line that names the failure.
"""

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from nanochat_fp4.console import print_error, print_safely
from nanochat_fp4.errors import one_line


def main(argv: list[str] | None = None) -> None:
    """Exits like a shell: 128 + number after a signal, its own or that of the process that failed first. After SIGUSR1,
    0: all processes were told to save and stop."""
    logging.disable(logging.ERROR)  # torchrun's, about what is said here
    signal.signal(signal.SIGUSR1, _pass_on)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # torchrun would handle it all the same
        argv = ["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", *(sys.argv[1:] if argv is None else argv)]
    try:
        run.main(argv)
    except ValueError as e:  # of its own flags
        print_error(one_line(e))
        sys.exit(2)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode >= 0:
            sys.exit(failure.exitcode)  # the process has said why
        if failure.exitcode == -signal.SIGUSR1:
            sys.exit(0)  # the process was still starting and had nothing to save
        name = signal.Signals(-failure.exitcode).name
        print_safely(f"error: rank {rank} (process {failure.pid}) was ended by {name}", file=sys.stderr, flush=True)
        sys.exit(128 - failure.exitcode)
    except SignalException as e:
        _pass_on(e.sigval)  # torchrun forgets those that it was starting when the signal came
        with contextlib.suppress(ChildProcessError):  # none is left
            while True:
                os.wait()
        sys.exit(128 + e.sigval)


def _pass_on(number: int, frame: Any = None) -> None:
    """To all processes that this one has started, as Linux lists them; when they have saved and ended with 0, so
    does torchrun."""
    for thread in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, thread.read_text().split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


if __name__ == "__main__":
    main()
