"""
torchrun for the pipeline: the same arguments, but it passes on SIGUSR1, and ends with the status of what failed first.

    python -m nanochat_fp4.launch --standalone --nproc_per_node=2 -m scripts.base_train --depth=4

torchrun itself leaves its processes behind at a SIGUSR1. It ends with status 1 whatever has happened, and with a
traceback of its own below the line that says what.
"""

import logging
import signal
import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from nanochat_fp4.console import print_safely


def main(argv: list[str] | None = None) -> None:
    """Exits like a shell: 128 + number after a signal, its own or that of the process that failed first. After SIGUSR1,
    0: all processes were told to save and stop."""
    logging.disable(logging.ERROR)  # torchrun's, about what is said here
    signal.signal(signal.SIGUSR1, _stop)
    try:
        run.main(argv)
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        if failure.exitcode >= 0:
            sys.exit(failure.exitcode)  # it has said why
        name = signal.Signals(-failure.exitcode).name
        print_safely(f"error: rank {rank} (process {failure.pid}) was ended by {name}", file=sys.stderr, flush=True)
        sys.exit(128 - failure.exitcode)
    except SignalException as e:
        sys.exit(0 if e.sigval == signal.SIGUSR1 else 128 + e.sigval)


def _stop(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SignalException("", signal.Signals(number))


if __name__ == "__main__":
    main()
