"""
The BF16 peak of GPUs by their names, and the bytes of memory and the CPUs that this process may use.

    python nanochat_fp4/hardware.py     prints usable_cpus(), for shell scripts. It does not import torch.
"""

import contextlib
import os
import re
import warnings
from pathlib import Path, PurePosixPath

# The dense BF16 peak of the tensor cores with FP32 accumulation, in FLOP/s, from the vendors' data sheets. The first
# match counts, so longer names come first.
_PEAK_FLOPS = [
    (r"gb200|grace blackwell", 2.5e15),
    (r"b300|\bb200", 2.25e15),
    (r"\bb100", 1.8e15),
    (r"h200.*(nvl|pcie)", 836e12),
    (r"h100.*nvl", 835e12),
    (r"h[18]00.*pcie", 756e12),
    (r"h[128]00", 989e12),
    (r"\bh20\b", 148e12),
    (r"a100|a800", 312e12),
    (r"\ba40\b", 149.7e12),
    (r"\ba30\b", 165e12),
    (r"\ba10\b", 125e12),
    (r"\bl40s", 362e12),
    (r"\bl40\b", 181e12),
    (r"\bl4\b", 121e12),
    (r"mi355", 2.5e15),
    (r"mi325|mi300x", 1.3074e15),
    (r"mi300a", 980.6e12),
    (r"mi250x", 383e12),
    (r"mi250", 362.1e12),
    (r"rtx pro 6000", 503.8e12),  # PRO cards do not halve the rate with FP32 accumulation.
    (r"rtx 5090", 209.5e12),
    (r"rtx 4090", 165.2e12),
    (r"rtx 3090", 71e12),
]


def get_peak_flops(device_name: str) -> float | None:
    """Returns the dense BF16 peak of a GPU in FLOP/s from its name (torch.cuda.get_device_name), or None if it is
    not known.

    MFU is relative to this peak for every method, so it can be above 100% in FP4 on a Blackwell. If the peak is not
    known, a caller shows no MFU, because a wrong one would be worse.
    """
    name = device_name.lower()
    # These have the same name, but less power or only a part of the chip.
    if re.search(r"\b(laptop|max-q|mig)\b", name):
        return None
    for pattern, flops in _PEAK_FLOPS:
        if re.search(pattern, name):
            return flops
    return None


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


def ignore_false_warnings() -> None:
    """Hides a false warning of torch before 2.13, which says that it supports GPUs only up to 12.0. A GB10 (12.1)
    runs code that was compiled for 12.0."""
    supported = (
        r"Minimum and Maximum cuda capability supported by this version of PyTorch is\s+\(\d+\.\d+\) - \(12\.0\)"
    )
    warnings.filterwarnings("ignore", rf"\s*Found GPU\d+ .* which is of cuda capability 12\.1\.\s+{supported}")


# Models narrower than this run on one CPU thread. Their operations are short, and threads would mostly wait for each
# other.
NARROW_WIDTH = 512


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Returns how many CPUs' time the cgroups (v1 or v2) of this process may use, or None if no cgroup sets a quota.

    `root` is the folder with proc and sys. Of the quotas of the cgroup and its parents, the smallest one counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # A container sees the host's path in /proc, and its own cgroup at the root of the mount.
        inner = PurePosixPath(path.lstrip("/"))
        for mount in ("cpu", controllers) if controllers else ("", "unified"):
            for folder in (inner, *inner.parents):
                quotas += _quota(root / "sys/fs/cgroup" / mount / folder)
    return min(quotas, default=None)


def _quota(folder: Path) -> list[float]:
    """Returns the quota of a cgroup in CPUs as a list of one number, or an empty list if it has none."""
    with contextlib.suppress(OSError, ValueError):  # In version 2, "max 100000" is no quota.
        quota, period = (folder / "cpu.max").read_text().split()
        return [int(quota) / int(period)]
    with contextlib.suppress(OSError, ValueError):  # In version 1, -1 is no quota.
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return [quota / int((folder / "cpu.cfs_period_us").read_text())] if quota > 0 else []
    return []


def usable_cpus(root: Path = Path("/")) -> int:
    """Returns how many CPUs this process may keep busy, at least 1. This is its affinity, limited by the quota of
    its cgroups."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(root)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def cpu_threads(width: int) -> int:
    """Returns the number of threads for a model of this width on a CPU."""
    return 1 if width < NARROW_WIDTH else usable_cpus()


if __name__ == "__main__":
    print(usable_cpus())
