"""The harness of the benchmarks: command lines, clocks and power, results and their files."""

import contextlib
import ctypes
import dataclasses
import json
import statistics
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lab.predict.blackwell import LAYER_SETS  # noqa: F401  of the paper's Table 6
from nanochat_fp4.common import get_base_dir
from nanochat_fp4.console import ArgumentParser, table  # noqa: F401  the table: of all benchmarks
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError
from nanochat_fp4.files import atomic_write
from nanochat_fp4.nvfp4.methods import METHOD_TABLE, get_recipe
from nanochat_fp4.step_time import MACHINES, Machine

# --------------------------------------------------------------------------------------------------------------------
# Clocks and power.

# What NVML says holds the clock down (nvml.h, nvmlClocksEventReason...). An idle GPU is none of them.
LIMITS = {0x04: "power", 0x08: "hardware", 0x20: "heat", 0x40: "heat", 0x80: "power brake", 0x02: "set", 0x100: "set"}


class Monitor:
    """Samples a GPU's SM clock, power and what limits the clock ten times a second, inside each `with` of it.

    Read from NVML, which comes with the driver; nothing is set. Power is what NVML gives, on a Hopper the mean of the
    last second. Without NVML (or CUDA) there are no samples.
    """

    def __init__(self, interval: float = 0.1):
        self.interval = interval
        self.samples: list[tuple[float, float, int]] = []  # MHz, W, bits of LIMITS
        self._library = self._handle = None
        if torch.cuda.is_available():
            with contextlib.suppress(OSError, AttributeError):
                self._library = ctypes.CDLL("libnvidia-ml.so.1")
                self._limits = self._library.nvmlDeviceGetCurrentClocksThrottleReasons
                uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
                handle = ctypes.c_void_p()
                found = self._library.nvmlInit_v2() == 0
                if found and self._library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) == 0:
                    self._handle = handle

    def read(self) -> tuple[float, float, int] | None:
        """One sample; None where there is nothing to be had."""
        if self._handle is None:
            return None
        mhz, milliwatts, limits = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        library, handle = self._library, self._handle
        failed = library.nvmlDeviceGetClockInfo(handle, 1, ctypes.byref(mhz))  # 1: the SMs
        failed = failed or library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
        failed = failed or self._limits(handle, ctypes.byref(limits))
        return None if failed else (float(mhz.value), milliwatts.value / 1000, limits.value)

    def __enter__(self) -> "Monitor":
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(self.interval):
            sample = self.read()
            if sample is not None:
                self.samples.append(sample)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def summary(self) -> dict[str, float | str | None]:
        """{mhz, watts: means; limit: what held the clock down, and in which share of the samples}; None if unknown."""
        if not self.samples:
            return {"mhz": None, "watts": None, "limit": None}
        mhz, watts, limits = zip(*self.samples)
        shares = {}
        for name in dict.fromkeys(LIMITS.values()):
            count = sum(any(bits & bit for bit, n in LIMITS.items() if n == name) for bits in limits)
            if count:
                shares[name] = f"{name} {count / len(limits):.0%}"
        limit = ", ".join(shares.values()) or "none"
        return {"mhz": statistics.fmean(mhz), "watts": statistics.fmean(watts), "limit": limit}


# --------------------------------------------------------------------------------------------------------------------
# Command lines, tables, JSON


def argument_parser(doc: str, roofline: bool = True) -> ArgumentParser:
    """A benchmark's parser: its flags are the caller's, but for --json and --roofline."""
    parser = ArgumentParser(description=doc.strip().split("\n")[0])
    parser.add_argument("--json", default="", help="where to write the numbers (default: bench/ in the base directory)")
    if roofline:
        what = "predict for this machine from byte and FLOP counts; no GPU needed"
        parser.add_argument("--roofline", choices=sorted(MACHINES), help=what)
    return parser


def some_of(flag: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a flag's value, with commas. Raises UserError for none, and for one that is not known."""
    names, known = [name for name in text.split(",") if name], list(known)
    if not names or not set(names) <= set(known):
        raise UserError(f"{flag} is {text!r}, expected some of {', '.join(known)}, with commas")
    return names


def methods_of(text: str) -> list[str]:
    """ "bf16", then the methods in a flag's value (all: every one), each once. Raises ValueError for an unknown one."""
    names = METHOD_TABLE if text == "all" else [get_recipe(m).name for m in text.split(",") if m]
    return list(dict.fromkeys(["bf16", *names]))


def need_cuda(script: str) -> torch.device:
    """Raises UserError where there is no GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            f"{script} measures CUDA kernels and there is no CUDA device; on this machine only "
            f"`--roofline {'|'.join(MACHINES)}` works"
        )
    return torch.device("cuda")


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


@dataclass
class Results:
    """What a benchmark has measured so far, and its file.

    path: "" for bench/<name>.json in the base directory
    machine: of a prediction (--roofline); the name and the settings say so
    """

    name: str
    path: str
    settings: dict
    machine: Machine | None = None
    records: list[dict] = field(default_factory=list)
    environment: dict = field(default_factory=environment_info)

    def __post_init__(self):
        if self.machine is not None:
            self.name += f"_{next(k for k, m in MACHINES.items() if m is self.machine)}_predicted"
            self.settings["prediction_for"] = dataclasses.asdict(self.machine)

    def header(self, gemm: bool = True) -> str:
        """A prediction's first line. gemm: of GEMMs as well."""
        how = "native NVFP4 GEMM" if self.machine.fp4 else "emulated: decode to BF16, BF16 GEMM"
        return f"PREDICTION for {self.machine.name}, not a measurement: {f'{how}; ' * gemm}{self.machine.source}"

    def write(self, more: Iterable[dict] = ()) -> Path:
        """The records, the settings and the machine; returns where."""
        target = Path(self.path) if self.path else Path(get_base_dir()) / "bench" / f"{self.name}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": self.name, "settings": self.settings, "environment": self.environment}
        content["records"] = [*self.records, *more]
        atomic_write(target, json.dumps(content, indent=1, default=str) + "\n")
        return target


def write_json(name: str, path: str, settings: dict, records: list[dict]) -> Path:
    """Results of a benchmark that writes once."""
    return Results(name, path, settings, records=records).write()


def finish(results: Results, problems: Iterable[str]) -> None:
    """Writes the file and says where. Raises UserError if a result was wrong."""
    print(f"written to {results.write()}")
    if problems := list(problems):
        raise UserError(f"not timed, because the result is wrong: {'; '.join(problems)}")
