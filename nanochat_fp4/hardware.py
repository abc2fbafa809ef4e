"""
This machine: the BF16 peak of its GPU, memory, CPUs, and all that a measurement is recorded with. Functions that need
torch import it themselves.

    python nanochat_fp4/hardware.py     prints usable_cpus(), for shell scripts. It does not import torch.
"""

import contextlib
import functools
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CARDS = json.loads(Path(__file__).with_name("cards.json").read_text(encoding="utf-8"))


def get_peak_flops(device_name: str) -> float | None:
    """Returns the dense BF16 peak of a GPU in FLOP/s from its name (torch.cuda.get_device_name), or None if it is
    not known.

    MFU is relative to this peak for every method, so it can be above 100% in FP4 on a Blackwell. If the peak is not
    known, a caller shows no MFU, because a wrong one would be worse.
    """
    # "Laptop" and the like have the same name, but less power or only a part of the chip.
    patterns = () if re.search(r"\b(laptop|max-q|mig)\b", device_name.lower()) else CARDS["bf16_peaks"]
    return next((CARDS["bf16_peaks"][p] * 1e12 for p in patterns if re.search(p, device_name.lower())), None)


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def physical_memory() -> int:
    """Returns the bytes of memory in this machine, or 8 GB if the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30


def available_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that programs can still take, with the page cache (MemAvailable), or 0 if the system does
    not tell."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE):
            return 1024 * int(match.group(1))
    return 0


def gpu_memory(device: "torch.device | None" = None) -> tuple[int, int]:
    """Returns the free and the total bytes of a GPU. An integrated GPU (GB10) counts the page cache as used. Linux
    gives the page cache up if memory is needed, so it is counted as free here."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        free = min(total, max(free, available_memory()))
    return free, total


def peak_memory(device: "torch.device") -> int:
    """Returns the peak bytes of CUDA's allocator, or without a GPU those of this process."""
    import resource  # Windows does not have this module.

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# ----------------------------------------------------------------------------------------------------------------------
# CPUs


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns how many CPUs this process may keep busy, at least 1. This is its affinity, limited by the quota of its
    container (version 2 of cgroups). `root` is the folder with sys."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # "max 100000" is no quota.
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
        cpus = max(1, min(cpus, int(quota) // int(period)))
    return cpus


# ----------------------------------------------------------------------------------------------------------------------
# The environment of a measurement


def _command_output(*command: str, cwd: Path | None = None) -> str:
    """The stdout of a short command, stripped; "" if it is missing, fails or takes more than 10 seconds."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        how = {"capture_output": True, "text": True, "timeout": 10, "stdin": subprocess.DEVNULL}
        return subprocess.run(command, cwd=cwd, check=True, **how).stdout.strip()
    return ""


@functools.cache
def get_commit() -> str | None:
    """Returns the commit of this package's checkout, with '+changes' if tracked files differ. Returns None outside
    of git.

    The commit is read at the first call and stored, because the process has loaded the code of this time.
    """
    root = Path(__file__).resolve().parent.parent
    top, _, commit = _command_output("git", "rev-parse", "--show-toplevel", "HEAD", cwd=root).partition("\n")
    if top != str(root):
        return None  # This is an installed copy inside of another repository.
    changed = _command_output("git", "status", "--porcelain", "--untracked-files=no", cwd=root)
    return f"{commit}+changes" if changed else commit


def environment_info() -> dict[str, Any]:
    """
    Returns the environment of a measurement as a dict that JSON can represent. Unknown values are None. The keys are:

        python platform torch triton cuda gpu gpu_count gpu_memory_gb compute_capability driver cpu cpu_count
        memory_gb commit
    """
    import torch

    keys = "python platform torch triton cuda gpu gpu_count gpu_memory_gb compute_capability driver cpu cpu_count"
    info: dict[str, Any] = dict.fromkeys(f"{keys} memory_gb commit".split())
    with contextlib.suppress(Exception):  # Triton is missing, or broken on this platform. No kernel can be compiled.
        import triton

        info["triton"] = triton.__version__
    cpu = _command_output("sysctl", "-n", "machdep.cpu.brand_string") if sys.platform == "darwin" else ""
    with contextlib.suppress(OSError):
        if found := re.search(r"^(?:model name|Hardware)\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            cpu = found[1]
    info |= {"python": platform.python_version(), "platform": platform.platform(), "torch": torch.__version__}
    info |= {"cuda": torch.version.cuda, "gpu_count": torch.cuda.device_count(), "commit": get_commit()}
    info |= {"cpu": cpu or platform.processor() or platform.machine(), "cpu_count": usable_cpus()}
    info |= {"memory_gb": round(physical_memory() / 2**30, 1)}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        driver = _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        info |= {"gpu": properties.name, "driver": driver.partition("\n")[0] or None}
        info |= {"gpu_memory_gb": round(properties.total_memory / 2**30, 1)}
        info |= {"compute_capability": f"{properties.major}.{properties.minor}"}
    return info


# What the results on GPUs are of, and what dev/setup.sh installs on most GPUs (requirements-gpu.txt).
GPU_RESULTS = {"torch": "2.11", "triton": "3.6"}


def about_versions(environment: dict[str, Any]) -> str:
    """Returns whether the results on GPUs are of this pair of torch and Triton, or "" if the environment (of
    environment_info) has no GPU."""
    if not environment.get("gpu"):
        return ""
    measured = " with ".join(f"{name} {version}" for name, version in GPU_RESULTS.items())
    if all(str(environment.get(name)).startswith(f"{version}.") for name, version in GPU_RESULTS.items()):
        return f"the results on GPUs are of this pair, {measured}"
    now = " with ".join(f"{name} {environment.get(name)}" for name in GPU_RESULTS)
    return f"never run on a GPU with this pair, {now}: the results on GPUs are of {measured}"


if __name__ == "__main__":
    print(usable_cpus())
