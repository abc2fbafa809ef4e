"""Signals that ask a run to save and stop."""

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
        sys.exit(signals.exit_code)

    The exit status is 143 after SIGTERM, 130 after Ctrl-C and 129 after SIGHUP, as a shell reports it. A second Ctrl-C
    stops at once without saving. Checkpoints are replaced in one piece, so those on the disk stay intact. torchrun
    repeats signals, so under torchrun the second Ctrl-C counts only after two seconds.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = 0.0
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
        if self.signum is None:
            self.signum, self.since = number, time.monotonic()
        if number != signal.SIGINT:
            return
        if "RANK" not in os.environ:
            # The kernel then acts on the next Ctrl-C, also inside of a C function.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        elif time.monotonic() - self.since >= 2.0:
            raise KeyboardInterrupt

    def received(self, device: torch.device | None = None) -> bool:
        """Returns whether any rank has received a signal. Under torchrun all ranks must call this method together,
        and all get the same answer."""
        if is_ddp_initialized():
            number = torch.tensor(self.signum or 0, device=device)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            self.signum = int(number) or None
        return self.signum is not None

    @property
    def name(self) -> str:
        """The name of the signal that came."""
        return signal.Signals(self.signum).name if self.signum is not None else "no signal"

    @property
    def exit_code(self) -> int:
        """The exit status of the program, which is 0 if no signal came."""
        return 0 if self.signum is None else 128 + self.signum

    def watch(self, batches: Iterator, device: torch.device | None = None) -> Iterator:
        """Yields `batches` until a signal comes, and then raises StopRequested, so that a long evaluation does not
        delay the stop."""
        for batch in batches:
            if self.received(device):
                raise StopRequested
            yield batch
