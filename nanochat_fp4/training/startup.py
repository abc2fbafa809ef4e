"""The time up to a run's first step: what its phases took, and fewer searches for garbage meanwhile."""

import contextlib
import gc
import os
import time
from collections.abc import Iterator

_IMPORTED = time.monotonic()


def process_age() -> float:
    """Seconds since this process began, or since the import of this module if the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


class Phases:
    """The named phases of this process's start and their seconds, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"start of Python": process_age()}
        self.last = time.monotonic()

    def end(self, name: str) -> None:
        """Ends the phase that began with the last call, and names it."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Python collects cyclic garbage a hundred times less often inside.

    The compiler's modules and objects stay alive, and searching them for garbage takes a tenth of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
