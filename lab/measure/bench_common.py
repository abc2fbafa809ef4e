"""What the benchmarks share: layer sets, clocks and power, tables and JSON."""

import argparse
import contextlib
import ctypes
import json
import statistics
import threading
from pathlib import Path

import torch

from lab.predict.blackwell import LAYER_SETS  # noqa: F401  of the paper's Table 6
from nanochat_fp4.common import get_base_dir
from nanochat_fp4.console import table  # noqa: F401  of all benchmarks
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError
from nanochat_fp4.files import atomic_write
from nanochat_fp4.step_time import MACHINES

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
# Command lines, tables, JSON.


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", default="", help="where to write the numbers (default: bench/ in the base directory)")
    parser.add_argument(
        "--roofline", choices=sorted(MACHINES), help="predict for this machine from byte and FLOP counts; no GPU needed"
    )


def need_cuda(script: str) -> torch.device:
    """Raises UserError where there is no GPU."""
    if not torch.cuda.is_available():
        raise UserError(
            f"{script} measures CUDA kernels and there is no CUDA device; on this machine only "
            f"`--roofline {'|'.join(MACHINES)}` works"
        )
    return torch.device("cuda")


def write_json(name: str, path: str, settings: dict, records: list[dict], environment: dict | None = None) -> Path:
    """The records, what was asked for and the machine (asked again unless given); returns where."""
    target = Path(path) if path else Path(get_base_dir()) / "bench" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "settings": settings, "environment": environment or environment_info()}
    content["records"] = records
    atomic_write(target, json.dumps(content, indent=1, default=str) + "\n")
    return target
