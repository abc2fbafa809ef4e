"""
What GPUs reach, by their names; the bytes of memory and the CPUs that this process may use.

    python nanochat_fp4/hardware.py     prints usable_cpus(), for shell scripts; it imports no torch
"""

import contextlib
import os
import re
import warnings
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

# Dense BF16 tensor-core peak with FP32 accumulation, FLOP/s, from the vendors' data sheets. First match wins, so
# longer names come first.
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
    (r"rtx 5090", 209.5e12),
    (r"rtx 4090", 165.2e12),
    (r"rtx 3090", 71e12),
]


def get_peak_flops(device_name: str) -> float | None:
    """Dense BF16 peak of a GPU in FLOP/s from its name (torch.cuda.get_device_name); None where it is not known.

    The BF16 peak is the yardstick for every method, so that MFU above 100% is possible in FP4 on a Blackwell.
    A caller that gets None shows no MFU rather than a wrong one.
    """
    name = device_name.lower()
    if re.search(r"\b(laptop|max-q|mig)\b", name):  # the same name, and less power or a part of the chip
        return None
    for pattern, flops in _PEAK_FLOPS:
        if re.search(pattern, name):
            return flops
    return None


@dataclass(frozen=True)
class Machine:
    """GB/s and TFLOP/s (fp8: None is twice BF16's) as programs reach them, 10^12 instructions a second of all lanes.
    longer is of LONGER. launch is the microseconds of an empty kernel.
    multiprocessors: 0 where idle ones cost nothing (at 145 W power is the limit, and the others run faster).
    cublaslt is (expected, worst) of fp4 in the library that torch calls, where fp4 is another one's: the best case."""

    name: str
    bandwidth: float
    bf16: float
    fp4: float | None
    instructions: float
    source: str = field(repr=False)
    longer: float = 1.0
    fp8: float | None = None
    launch: float = 0.0
    multiprocessors: int = 132
    cublaslt: tuple[float, float] | None = None


# Instructions over sm_90's: the largest ratio of clover's kernels (`python -m lab.measure.instructions`, Triton 3.7.1).
LONGER = {100: 0.68, 120: 0.9}
# Achieved on an H200: 4250 of 4800 GB/s, 700 of 989 TFLOP/s. The same shares are assumed of a B200.
COPY_SHARE, GEMM_SHARE = 4250 / 4800, 700 / 989
# `python -m lab.predict.blackwell` fits these (GB/s, BF16 and FP4 TFLOP/s, microseconds) and compares.
RTX5090_FIT, PRO4000_FIT = (1262, 238, 1510, 5.1), (609, 85, 340, 14.3)
# Of the RTX 5090: data sheet (GB/s, dense BF16 and FP4 TFLOP/s); FP4 of cuBLASLt (xinyang-zhou/sm120_nvfp4_ops) and of
# Triton's dot_scaled (vllm#38338). The fit's FP4 is cuDNN's, as Quartet II calls it.
RTX5090_SHEET, RTX5090_LIBRARIES = (1792, 209.5, 1676), (1154, 874)
B300_RATIO = 3.48  # FP4 over BF16 GEMMs of a 5B model on a B300 (TransformerEngine#2863)
FITTED = "fitted to published times (lab/predict/blackwell.py)"


def _geforce(name: str, bandwidth: float, fp4: float, multiprocessors: int, ghz: float, **known) -> Machine:
    """A card of sm_12x by its data sheet (GB/s, dense FP4 TFLOP/s; BF16 has an eighth), at the RTX 5090's shares."""
    of_5090, share = fp4 / RTX5090_SHEET[2], [fit / sheet for fit, sheet in zip(RTX5090_FIT, RTX5090_SHEET)]
    rates = {"bandwidth": bandwidth * share[0], "bf16": fp4 / 8 * share[1], "fp4": fp4 * share[2]}
    rates |= {"cublaslt": tuple(v * of_5090 for v in RTX5090_LIBRARIES), "multiprocessors": multiprocessors}
    rest = {"source": "data sheet, at the RTX 5090's shares", "longer": LONGER[120], "launch": RTX5090_FIT[3]}
    return Machine(name, **{**rest, **rates, "instructions": multiprocessors * 128 * ghz / 1e3, **known})


def _datacenter(name: str, bf16: float, fp4: float, cublaslt: tuple[float, float], multiprocessors: int) -> Machine:
    """A card of sm_100 by its data sheet (dense TFLOP/s), at the shares of it that an H200 reaches."""
    rates = bf16 * GEMM_SHARE, fp4 * GEMM_SHARE, multiprocessors * 128 * 1.85e9 / 1e12
    source = f"data sheet (8000 GB/s, {bf16} and {fp4} TFLOP/s dense) times an H200's achieved shares"
    more = {"multiprocessors": multiprocessors, "cublaslt": tuple(v * GEMM_SHARE for v in cublaslt)}
    return Machine(name, 8000 * COPY_SHARE, *rates, source, LONGER[100], None, 5.0, **more)


MACHINES = {
    "h200": Machine("H200", 4250, 700, None, 132 * 128 * 1.755e9 / 1e12, "measured copy and GEMM"),
    "b200": _datacenter("B200", 2250, 9000, (9000, B300_RATIO * 2250), 148),
    "gb200": _datacenter("GB200", 2500, 10000, (10000, B300_RATIO * 2500), 148),
    "b300": _datacenter("B300", 2250, 13500, (B300_RATIO * 2250,) * 2, 148),
    "rtx5090": Machine(
        "RTX 5090", *RTX5090_FIT[:3], 170 * 128 * 2.41e9 / 1e12, FITTED, LONGER[120], None, RTX5090_FIT[3], 170,
        cublaslt=RTX5090_LIBRARIES,
    ),
    "rtx5080": _geforce("RTX 5080", 960, 900.5, 84, 2.617),
    "rtx5070ti": _geforce("RTX 5070 Ti", 896, 703, 70, 2.452),
    "rtx5060": _geforce("RTX 5060", 448, 307, 30, 2.497, bf16=32, cublaslt=(237, 160),
        source="data sheet at the RTX 5090's shares; BF16 and cuBLAS FP4 as Not4right/nvfp4-training measured them"),
    "rtxpro4000": Machine(
        "RTX PRO 4000", *PRO4000_FIT[:3], 70 * 128 * 2.41e9 / 1e12, FITTED, LONGER[120], None, PRO4000_FIT[3], 0,
    ),
    # The same chip as the RTX 5090 with 188 of its multiprocessors and the same memory. cuBLASLt: 1,010 to 1,137
    # TFLOP/s, where CUTLASS has 1,420 to 1,595 (Infatoshi/nvfp4-pretrain).
    "rtxpro6000": Machine(
        "RTX PRO 6000", RTX5090_FIT[0], *(188 / 170 * v for v in RTX5090_FIT[1:3]), 188 * 128 * 2.41e9 / 1e12,
        "the RTX 5090's, times 188 / 170 multiprocessors where they count", LONGER[120], None, RTX5090_FIT[3], 188,
        cublaslt=(1073.5, 1010),
    ),
    # BF16 (87 to 98 TFLOP/s) and TransformerEngine's FP4 GEMM (117 to 133) as apstenku123/nanochat measured them.
    "gb10": _geforce("GB10", 273, 500, 48, 2.418, bf16=92.5, cublaslt=(125, 117),
        source="data sheet at the RTX 5090's shares; BF16 and FP4 GEMMs as apstenku123/nanochat measured them"),
}  # fmt: skip


def machine_of(gpu: str) -> Machine | None:
    """The machine that a GPU's name (torch.cuda.get_device_name) is; None where there are no numbers for it."""
    # "RTX 5090 Laptop GPU" and "RTX 5090 D" are other chips, or the same with less power; "MIG" is a part of one.
    other = r"(?!.*\b(Laptop|Max-Q|MIG|Ti|SUPER|D)\b)"
    return next((m for m in MACHINES.values() if re.search(rf"\b{m.name}\b{other}", gpu)), None)


def physical_memory() -> int:
    """Bytes of memory in this machine; 8 GB if the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that programs can still take, the page cache included (MemAvailable); 0 if the system does not tell."""
    with contextlib.suppress(OSError):
        if found := re.search(r"^MemAvailable:\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE):
            return 1024 * int(found.group(1))
    return 0


def ignore_false_warnings() -> None:
    """torch before 2.13 warns that it ends at 12.0. A GB10 (12.1) runs what was compiled for 12.0."""
    supported = (
        r"Minimum and Maximum cuda capability supported by this version of PyTorch is\s+\(\d+\.\d+\) - \(12\.0\)"
    )
    warnings.filterwarnings("ignore", rf"\s*Found GPU\d+ .* which is of cuda capability 12\.1\.\s+{supported}")


# Models narrower than this run on one CPU thread: their operations are short, and threads mostly wait for one another.
NARROW_WIDTH = 512


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups (v1 or v2) of this process may use; None where no cgroup sets a quota.

    root: the folder that holds proc and sys. The smallest quota of the cgroup and its parents counts.
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
        # A container sees the host's path in /proc and its own cgroup at the root of the mount.
        inner = PurePosixPath(path.lstrip("/"))
        for mount in ("cpu", controllers) if controllers else ("", "unified"):
            for folder in (inner, *inner.parents):
                quotas += _quota(root / "sys/fs/cgroup" / mount / folder)
    return min(quotas, default=None)


def _quota(folder: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):  # v2: "max 100000" has no quota
        quota, period = (folder / "cpu.max").read_text().split()
        return [int(quota) / int(period)]
    with contextlib.suppress(OSError, ValueError):  # v1: -1 is no quota
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        return [quota / int((folder / "cpu.cfs_period_us").read_text())] if quota > 0 else []
    return []


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may keep busy, at least 1: its affinity, bounded by the quota of its cgroups."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_quota(root)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


def cpu_threads(width: int) -> int:
    """Threads for a model of this width on a CPU."""
    return 1 if width < NARROW_WIDTH else usable_cpus()


if __name__ == "__main__":
    print(usable_cpus())
