"""The start of a run: measures the time up to the first step by phases, makes Python collect garbage less often during
this time, and starts torch's compiler while the data are read."""

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Iterator

import torch

_IMPORTED = time.monotonic()


def process_age() -> float:
    """Returns the seconds since this process began, or since this module was imported if the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic() - _IMPORTED


class Phases:
    """The phases of this process's start, with their names and seconds, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"start of Python": process_age()}
        self.last = time.monotonic()

    def end(self, name: str) -> None:
        """Ends the phase that began with the last call, and gives it its name."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s ({parts})"


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """A context in which Python searches for cyclic garbage a hundred times less often.

    The modules and objects of the compiler stay alive. Searching them for garbage takes a tenth of the compiler's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def start_compiler(device: torch.device) -> None:
    """Starts the processes that compile kernels for torch.compile on a GPU, as its first call would do, and imports the
    compiler. The processes need seconds until they answer, which pass while the run reads its data."""
    # Kernels of this project are not launched here. Triton's launchers are modules of one name, so kernels that are
    # launched for the first time in several threads can get each other's launcher.
    if device.type == "cuda":
        with contextlib.suppress(ImportError):  # A release of torch without this function starts them later.
            from torch._inductor.async_compile import maybe_warm_pool

            maybe_warm_pool()
        importlib.import_module("torch._inductor.compile_fx")
