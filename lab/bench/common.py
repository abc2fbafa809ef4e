"""What the benchmarks share: command lines, timing, sampling of clocks and power, results and their files."""

import contextlib
import ctypes
import functools
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lab import table
from lab.recipes import RECIPES
from nanochat_fp4.cli import ArgumentParser, UserError
from nanochat_fp4.common import add_recipes_argument, get_base_dir
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import environment_info
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4.methods import METHODS, get_recipe

# --------------------------------------------------------------------------------------------------------------------
# Timing

# The reasons for a lower clock that NVML reports (nvml.h, nvmlClocksEventReason...). An idle GPU is not among them.
LIMITS = {0x04: "power", 0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake", 0x02: "set", 0x100: "set"}


class Monitor:
    """Samples a GPU's SM clock, its power and the limits of the clock ten times a second, inside each `with` block.

    The numbers come from NVML, which is part of the driver. On a Hopper NVML's power is the mean of the last second.
    Without NVML or CUDA there are no samples.
    """

    def __init__(self, interval: float = 0.1):
        self.interval = interval
        self.samples: list[tuple[float, float, int]] = []  # Each is MHz, W and bits of LIMITS.
        self._questions: list[Callable] = []  # Each one writes a value to a reference, and returns 0 or an error.
        if torch.cuda.is_available():
            with contextlib.suppress(OSError, AttributeError):
                nvml, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
                uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
                if nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0:
                    self._questions = [
                        functools.partial(nvml.nvmlDeviceGetClockInfo, handle, 1),  # 1 is the clock of the SMs.
                        functools.partial(nvml.nvmlDeviceGetPowerUsage, handle),
                        functools.partial(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle),
                    ]

    def __enter__(self) -> "Monitor":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            mhz, milliwatts, limits = values = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
            failed = [ask(ctypes.byref(value)) for ask, value in zip(self._questions, values)]
            if failed and not any(failed):
                self.samples.append((float(mhz.value), milliwatts.value / 1000, limits.value))

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, float | str | None]:
        """Returns {"mhz", "watts": means, "limit": the reasons for a lower clock, with their shares of the samples}.
        Values are None if there are no samples."""
        if not self.samples:
            return {"mhz": None, "watts": None, "limit": None}
        mhz, watts, limits = zip(*self.samples)
        named = [{LIMITS[bit] for bit in LIMITS if bits & bit} for bits in limits]
        counts = {name: sum(name in names for names in named) for name in LIMITS.values()}
        shares = [f"{name} {count / len(limits):.0%}" for name, count in counts.items() if count]
        means = {"mhz": statistics.fmean(mhz), "watts": statistics.fmean(watts)}
        return means | {"limit": ", ".join(shares) or "none"}


def timed(function: Callable[[], object], calls: int) -> list[float]:
    """Returns the milliseconds of each of so many calls, measured by CUDA events on a GPU and by the processor's clock
    without one."""
    if not torch.cuda.is_available():
        times = [time.perf_counter()]
        for _ in range(calls):
            function()
            times.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in zip(times, times[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def steady(functions: dict[str, Callable[[], object]], seconds: float) -> dict:
    """Times each function in its own steady state. Returns {name: {ms, spread, mhz, watts, limit}}.

    Each function is visited twice, in opposite orders of the functions. A visit consists of `seconds` of calls to warm
    up and as many calls that are timed.
    """
    visits: dict[str, list[list[float]]] = {name: [] for name in functions}
    monitors = {name: Monitor() for name in functions}
    for order in (list(functions), list(reversed(functions))):
        for name in order:
            start, count = time.perf_counter(), 0
            while time.perf_counter() - start < seconds:
                timed(functions[name], 5)
                count += 5
            calls = math.ceil(count * seconds / (time.perf_counter() - start))
            with monitors[name]:
                visits[name].append(timed(functions[name], max(5, calls)))
    result = {}
    for name, (first, second) in visits.items():
        a, b = statistics.median(first), statistics.median(second)
        result[name] = {"ms": statistics.median(first + second), "spread": abs(a - b) / min(a, b)}
        result[name] |= monitors[name].summary()
    return result


# --------------------------------------------------------------------------------------------------------------------
# Command lines, results and their files


def argument_parser(doc: str) -> ArgumentParser:
    """Returns the parser of a benchmark, described by the first line of its docstring. It has the flag --json. The
    caller adds the others."""
    parser = ArgumentParser(description=doc.strip().split("\n")[0])
    add_recipes_argument(parser)
    parser.add_argument("--json", default="", help="where to write the numbers (default: bench/ in the base directory)")
    return parser


def some_of(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """Returns the names in a flag's value, which are separated by commas. Raises UserError if there are none, and for
    an unknown name."""
    names, known = [name for name in text.split(",") if name], list(known)
    if not names or not set(names) <= set(known):
        raise UserError(f"{flag} is {text!r}, expected some of {', '.join(known)}, with commas")
    return names


def methods_of(text: str) -> list[str]:
    """Returns "bf16" and then the methods in a flag's value, each once. "all" stands for every method. Raises
    ValueError for an unknown method."""
    names = METHODS | RECIPES if text == "all" else [get_recipe(m).name for m in text.split(",") if m]
    return list(dict.fromkeys(["bf16", *names]))


def new_model(config: GPTConfig, device: torch.device) -> GPT:
    """Returns nanochat's model with new weights."""
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    return model


def need_cuda(what: str) -> torch.device:
    """Returns the CUDA device. Raises UserError if there is none."""
    if not torch.cuda.is_available():
        raise UserError(f"lab.bench {what} times CUDA kernels and there is no CUDA device; run it on a GPU")
    return torch.device("cuda")


def show(records: Iterable[dict], columns: dict[str, tuple[str, str]]) -> str:
    """Returns a table of records as text. `columns` has for each title the key of a record and a format. A cell is "-"
    if a record has no such number."""

    def cell(value: Any, form: str) -> Any:
        return "-" if value is None else form.format(value) if form else value

    return table(list(columns), [[cell(r.get(key), form) for key, form in columns.values()] for r in records])


@dataclass
class Results:
    """The measurements of a benchmark so far, and their file."""

    name: str
    path: str  # "" stands for bench/<name>.json in the base directory.
    settings: dict
    records: list[dict] = field(default_factory=list)
    environment: dict = field(default_factory=environment_info)

    def write(self) -> Path:
        """Writes the records, the settings and the machine. Returns the path of the file."""
        target = Path(self.path or Path(get_base_dir()) / "bench" / f"{self.name}.json")
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": self.name, "settings": self.settings, "environment": self.environment}
        content["records"] = self.records
        atomic_write(target, json.dumps(content, indent=1, default=str) + "\n")
        return target

    def finish(self, problems: Iterable[str] = ()) -> None:
        """Writes the file and prints its path. Raises UserError if results were wrong."""
        print(f"written to {self.write()}")
        if problems := list(problems):
            raise UserError(f"not timed, because the result is wrong: {'; '.join(problems)}")
