"""The environment of a measurement: versions, GPU, CPU, driver and commit."""

import contextlib
import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.hardware import usable_cpus


def _command_output(*command: str, cwd: str | None = None) -> str | None:
    """Returns the stdout of a short command, stripped. Returns None if the command is missing, fails or takes more
    than 10 seconds."""
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith(("model name", "Hardware")):
                return line.split(":", 1)[1].strip()
    if sys.platform == "darwin":
        return _command_output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _driver_version() -> str | None:
    with contextlib.suppress(OSError):
        if match := re.search(r"(\d+\.\d+(?:\.\d+)?)  ", Path("/proc/driver/nvidia/version").read_text()):
            return match.group(1)
    output = _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return output.splitlines()[0] if output else None


@functools.cache
def get_commit() -> str | None:
    """Returns the commit of this package's checkout, with '+changes' if tracked files differ. Returns None outside
    of git.

    The commit is read at the first call and stored, because the process has loaded the code of this time.
    """
    root = str(Path(__file__).resolve().parent.parent)
    top, _, commit = (_command_output("git", "rev-parse", "--show-toplevel", "HEAD", cwd=root) or "").partition("\n")
    if top != root:
        return None  # This is an installed copy inside of another repository.
    if _command_output("git", "status", "--porcelain", "--untracked-files=no", cwd=root):
        commit += "+changes"
    return commit


def environment_info() -> dict[str, Any]:
    """
    Returns the environment of a measurement as a dict that JSON can represent. Unknown values are None. The keys are:

        python platform torch triton cuda gpu gpu_count gpu_memory_gb compute_capability driver cpu cpu_count
        memory_gb commit
    """
    try:
        import triton

        triton_version = triton.__version__
    except Exception:  # Triton is missing, or broken on this platform. No kernel can be compiled then.
        triton_version = None
    info: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "gpu": None,
        "gpu_count": 0,
        "gpu_memory_gb": None,
        "compute_capability": None,
        "driver": None,
        "cpu": _cpu_name(),
        "cpu_count": usable_cpus(),
        "memory_gb": None,
        "commit": get_commit(),
    }
    with contextlib.suppress(OSError, ValueError, AttributeError):
        info["memory_gb"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        info["gpu"] = properties.name
        info["gpu_count"] = torch.cuda.device_count()
        info["gpu_memory_gb"] = round(properties.total_memory / 2**30, 1)
        info["compute_capability"] = f"{properties.major}.{properties.minor}"
        info["driver"] = _driver_version()
    return info
