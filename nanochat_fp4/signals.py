"""Signals that ask a run to save and stop."""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nanochat_fp4.common import is_ddp_initialized


class StopRequested(Exception):
    """Raised inside of an evaluation that a signal cuts short."""


class StopSignals:
    """
    A context in which SIGTERM, SIGINT (Ctrl-C) and SIGHUP (a closed terminal) ask the run to save and stop.

    Nothing is interrupted half-way. A SIGHUP that nohup had ignored stays ignored.

        with StopSignals() as signals:
            for step in ...:
                if signals.received(device): save and leave
        sys.exit(128 + signals.signum)

    The exit status is 143 after SIGTERM, 130 after Ctrl-C and 129 after SIGHUP, as a shell reports it. The first signal
    prints a line at once, and later ones say that the save goes on, because shells, `timeout` and torchrun repeat
    signals. Only a third Ctrl-C, two seconds or more after the first signal, stops at once without saving. Checkpoints
    are replaced in one piece, so those on the disk stay intact.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = self.said = 0.0  # when the first signal came, and when the last line was printed
        self.interrupts = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        now, what = time.monotonic(), "again: the save goes on; a third Ctrl-C ends the run without it"
        self.interrupts += number == signal.SIGINT
        if self.signum is None:
            self.signum, self.since, what = number, now, "saving after this step"
        elif self.interrupts > 2 and now - self.since >= 2.0:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        # One line for a signal that is passed on in several ways. A handler must not call print() inside of a print().
        if now - self.said >= 0.2 and os.environ.get("RANK", "0") == "0":
            self.said = now
            with contextlib.suppress(OSError):
                os.write(2, f"{signal.Signals(number).name} {what}\n".encode())

    def received(self, device: torch.device | None = None) -> bool:
        """Returns whether any rank has received a signal. Under torchrun all ranks must call this method together,
        and all get the same answer."""
        if is_ddp_initialized():
            number = torch.tensor(self.signum or 0, device=device)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            self.signum = int(number) or None
        return self.signum is not None

    def watch(self, batches: Iterator, device: torch.device | None = None) -> Iterator:
        """Yields `batches` until a signal comes, and then raises StopRequested, so that a long evaluation does not
        delay the stop."""
        for batch in batches:
            if self.received(device):
                raise StopRequested
            yield batch
