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


class Bar(tqdm):
    monitor_interval = 0  # tqdm makes no thread, because this process may fork.


class Progress:
    """
    The progress of `total` units of work (None if unknown), on stderr and from rank 0 only.

        with Progress(total=num_steps, desc="train", unit="step") as progress:
            for ...:
                progress.update(1, loss="2.31")

    On a terminal it is tqdm's bar. In a log it is a line every `every` seconds, and one at the end. The work does not
    end if the terminal is closed or the disk is full.
    """

    def __init__(
        self, total: int | None = None, desc: str = "", unit: str = "it", every: float = 10.0, initial: int = 0
    ):
        self.every, self.last_line = every, time.monotonic()
        self.silent = os.environ.get("RANK", "0") != "0"
        self.terminal = not self.silent and sys.stderr is not None and sys.stderr.isatty()
        lines = LINE if total else LINE_WITHOUT_TOTAL
        self.bar = Bar(
            total=total,
            desc=desc,
            unit=unit,
            initial=initial,
            unit_scale=unit == "char",
            dynamic_ncols=True,
            file=sys.stderr if self.terminal else NOWHERE,
            bar_format=None if self.terminal else lines,
        )

    def update(self, n: int = 1, **info: Any) -> None:
        """Counts `n` more units as done. `info` (for example loss="2.31") is shown beside them until the next info."""
        with contextlib.suppress(OSError):
            if info:
                self.bar.set_postfix(info, refresh=False)
            self.bar.update(n)
        if time.monotonic() - self.last_line >= self.every:
            self.line()

    def line(self) -> None:
        """Prints the line of a log. On a terminal, and on other ranks than 0, it prints nothing."""
        self.last_line = time.monotonic()
        if not (self.terminal or self.silent):
            print_safely(self.bar, file=sys.stderr, flush=True)

    def write(self, text: str) -> None:
        """Writes a line of text without breaking the bar."""
        with contextlib.suppress(OSError):
            if not self.silent:
                Bar.write(text, file=sys.stderr)
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
        if not self.bar.disable:
            self.line()
        with contextlib.suppress(OSError):
            self.bar.close()  # close also disables the bar.

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()


def progress_iter(iterable: Iterable, total: int | None = None, **kwargs: Any) -> Iterator:
    """Iterates with a Progress, which gets the keyword arguments. `total` is by default len(iterable), if it has a
    length."""
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)
    with Progress(total=total, **kwargs) as progress:
        for item in iterable:
            progress.update(1)
            yield item
