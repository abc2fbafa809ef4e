"""Signals that ask a run to save and stop."""

import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from nanochat_fp4.common import is_ddp_initialized


class StopRequested(Exception):
    """Raised inside an evaluation that a signal cuts short."""


class StopSignals:
    """
    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 ask the run to save and stop; nothing is interrupted half-way.

        with StopSignals() as signals:
            for step in ...:
                if signals.received(device): save and leave
        sys.exit(signals.exit_code)

    Exit status: 143 after SIGTERM and 130 after Ctrl-C, as a shell has it, and 0 after SIGUSR1, which a scheduler sends
    to have the job saved and queued again. A second Ctrl-C, two seconds or more after the first, stops at once without
    saving (checkpoints are replaced in one piece, so those on disk stay good).
    """

    HANDLED = (signal.SIGTERM, signal.SIGINT) + ((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ())

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in self.HANDLED:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.signum is None:
            self.signum, self.since = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since >= 2.0:
            raise KeyboardInterrupt

    def received(self, device: torch.device | None = None) -> bool:
        """Whether any rank got a signal. Under torchrun all ranks must call this together, and all agree."""
        if is_ddp_initialized():
            number = torch.tensor(self.signum or 0, device=device)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            self.signum = int(number) or None
        return self.signum is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name if self.signum is not None else "no signal"

    @property
    def exit_code(self) -> int:
        if self.signum is None or self.signum == getattr(signal, "SIGUSR1", None):
            return 0
        return 128 + self.signum

    def watch(self, batches: Iterator, device: torch.device | None = None) -> Iterator:
        """`batches`, until a signal comes: then StopRequested. So that a long evaluation does not delay the stop."""
        for batch in batches:
            if self.received(device):
                raise StopRequested
            yield batch
