"""The progress of a long piece of work: tqdm's bar on a terminal, or its numbers as plain lines in a log."""

import contextlib
import os
import sys
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm

from nanochat_fp4.cli import print_safely

LINE = "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%) {unit} | {rate_fmt} | {elapsed}<{remaining}{postfix}"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt} {unit} | {rate_fmt} | {elapsed}{postfix}"
NOWHERE = types.SimpleNamespace(write=lambda text: None, flush=lambda: None)


class Progress(tqdm):
    """
    The progress of `total` units of work (None if unknown), on stderr and from rank 0 only.

        with Progress(total=num_steps, desc="train", unit="step") as progress:
            for ...:
                progress.update(1, loss="2.31")
        for batch in Progress(batches, desc="evaluation", unit="batch"):
            ...

    On a terminal it is tqdm's bar. In a log it is a line every `every` seconds, and one when the work is done. The work
    does not end if the terminal is closed or the disk is full.
    """

    monitor_interval = 0  # tqdm makes no thread, because this process may fork.

    def __init__(
        self, iterable: Iterable | None = None, total: int | None = None, desc: str = "", unit: str = "it",
        every: float = 10.0, initial: int = 0,
    ):  # fmt: skip
        self.every, self.shown = every, initial  # `shown` is the number of units in the last line.
        self.terminal = sys.stderr is not None and sys.stderr.isatty()
        how = {"mininterval": 0.1, "file": sys.stderr} if self.terminal else {"mininterval": every, "file": NOWHERE}
        how |= {"disable": os.environ.get("RANK", "0") != "0", "unit_scale": unit == "char", "dynamic_ncols": True}
        super().__init__(iterable, desc, total, unit=unit, initial=initial, miniters=1, **how)

    def update(self, n: int = 1, **info: Any) -> None:
        """Counts `n` more units as done. `info` (for example loss="2.31") is shown beside them until the next info."""
        if self.disable:
            return
        if info:
            self.set_postfix(info, refresh=False)
        with contextlib.suppress(OSError):
            super().update(n)
            if self.total and self.n >= self.total:  # The last line comes before the results of the work.
                self.display()

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Draws the bar, or prints the line of a log if it has something new to say."""
        if self.terminal:
            super().display(msg, pos)
        elif self.n != self.shown:
            self.shown = self.n
            self.bar_format = LINE if self.total and self.n <= self.total else LINE_WITHOUT_TOTAL
            print_safely(str(self).replace(f"{self.unit}/s", f" {self.unit}/s"), file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Writes a line of text without breaking the bar."""
        with contextlib.suppress(OSError):
            if not self.disable:
                super().write(text, file=sys.stderr)
                sys.stderr.flush()

    def meanwhile(self, batches: Iterable, total: int, what: str) -> Iterator:
        """Yields `batches` of other work that is done between two units. Writes a line every `every` seconds, and
        none for short work."""
        last_line = time.monotonic()
        for done, batch in enumerate(batches):
            if time.monotonic() - last_line >= self.every:
                last_line = time.monotonic()
                self.write(f"{what}: {done:,}/{total:,} batches")
            yield batch

    def close(self) -> None:
        """Prints the last line, and ends the bar."""
        with contextlib.suppress(OSError):
            super().close()
