"""What the benchmarks share: layer sets, byte and instruction budgets, machines for predictions, tables and JSON.

Bytes are what a kernel must move if every tensor is read or written once (the caches only help within a tile).
"""

import argparse
import contextlib
import ctypes
import json
import statistics
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanochat_fp4.common import UserError, atomic_write, environment_info, get_base_dir
from nanochat_fp4.nvfp4.quantizers import get_rounding
from nanochat_fp4.nvfp4.recipes import Operand, Recipe

TOKENS = 8 * 2048  # the paper, Appendix D.1: batch 8, sequence 2048

# The paper's Table 6: [in_features, out_features] of a model's linear layers.
LAYER_SETS: dict[str, dict[str, tuple[int, int]]] = {
    "800M": {"qkv": (2048, 6144), "out": (2048, 2048), "upgate": (2048, 11264), "down": (5632, 2048)},
    "3B": {"qkv": (3072, 9216), "out": (3072, 3072), "upgate": (3072, 16384), "down": (8192, 3072)},
    "7B": {"qkv": (4096, 12288), "out": (4096, 4096), "upgate": (4096, 22016), "down": (11008, 4096)},
    "22B": {"qkv": (6144, 18432), "out": (6144, 6144), "upgate": (6144, 32768), "down": (16384, 6144)},
}

# --------------------------------------------------------------------------------------------------------------------
# Budgets, per element.

CODES = 0.5 + 1 / 16  # 4-bit codes and an E4M3 scale for 16 of them
BF16 = 2.0
PSEUDO = 2 / 16 + 4 / 128  # MS-EDEN: a BF16 pseudo-scale for 16 elements and S for 128

# Instructions per element and output of a kernel: those of its loop in SASS for sm_90, which `python
# tests/test_kernels_compile.py 90 default METHODS` prints (of the whole kernel where it has no loop), by the elements
# that a thread has: 64 of a rotating kernel's strip, 16 of the others' tiles. Compiled with Triton 3.6.
# Rounding with one candidate: along rows as they lie, in 16x16 blocks, after a rotation to BF16 (to codes: PACK more).
ROWS_INSTRUCTIONS, SQUARE_INSTRUCTIONS, ROTATED_INSTRUCTIONS, PACK_INSTRUCTIONS = 26.0, 55.0, 19.0, 4.0
EDEN_INSTRUCTIONS = 10.0
STOCHASTIC_INSTRUCTIONS = 18.0
CANDIDATE_INSTRUCTIONS, STOCHASTIC_CANDIDATE_INSTRUCTIONS = 16.0, 34.0  # each further one
DECODE_INSTRUCTIONS, ROTATED_DECODE_INSTRUCTIONS = 12.0, 8.0  # to memory; before a rotation
AMAX_INSTRUCTIONS = 5.0
FINISH_INSTRUCTIONS = 60.0  # of a scale


@dataclass(frozen=True)
class Step:
    """One kernel: what it is, the bytes it must move, its instructions, and FLOPs on the tensor cores."""

    name: str
    num_bytes: float
    instructions: float = 0.0
    bf16_flops: float = 0.0
    fp4_flops: float = 0.0


@dataclass(frozen=True)
class Machine:
    """GB/s and TFLOP/s as programs reach them, and the instructions (10^12 a second) of all lanes.

    longer: a kernel's instructions there over sm_90's; those of the rotating kernel that makes clover's codes.
    """

    name: str
    bandwidth: float
    bf16: float
    fp4: float | None
    instructions: float
    source: str
    longer: float = 1.0


# Achieved on an H200: 4250 of 4800 GB/s, 700 of 989 TFLOP/s. The same shares are assumed for what is not there.
COPY_SHARE, GEMM_SHARE = 4250 / 4800, 700 / 989
MACHINES = {
    "h200": Machine("H200", 4250, 700, None, 132 * 128 * 1.755e9 / 1e12, "measured copy and GEMM"),
    "b200": Machine(
        "B200", 8000 * COPY_SHARE, 2250 * GEMM_SHARE, 9000 * GEMM_SHARE, 148 * 128 * 1.85e9 / 1e12,
        "data sheet (8000 GB/s, 2250 and 9000 TFLOP/s dense) times an H200's achieved shares", 0.75,
    ),
    "rtx5090": Machine(
        "RTX 5090", 1792 * COPY_SHARE, 209.5 * GEMM_SHARE, 1676 * GEMM_SHARE, 170 * 128 * 2.41e9 / 1e12,
        "data sheet (1792 GB/s, 209.5 and 1676 TFLOP/s dense) times an H200's achieved shares", 1.7,
    ),
}  # fmt: skip


def predicted_ms(step: Step, machine: Machine) -> float:
    """A kernel takes as long as the slowest of memory, instructions and tensor cores."""
    gemm = step.bf16_flops / machine.bf16 + (step.fp4_flops / machine.fp4 if machine.fp4 else 0.0)
    instructions = step.instructions * machine.longer / machine.instructions
    return max(step.num_bytes / machine.bandwidth / 1e6, instructions / 1e9, gemm / 1e9)


def _instructions(rounding: str, base: float) -> float:
    spec = get_rounding(rounding)
    candidate = STOCHASTIC_CANDIDATE_INSTRUCTIONS if spec.stochastic else CANDIDATE_INSTRUCTIONS
    extra = (EDEN_INSTRUCTIONS if spec.ms_eden else 0.0) + (STOCHASTIC_INSTRUCTIONS if spec.stochastic else 0.0)
    return base + extra + candidate * (len(spec.candidates) - 1)


def quantize_steps(name: str, elements: float, source: float, rounding: str, decode: bool) -> list[Step]:
    """Along the rows as they lie in memory, from `source` bytes an element: amax, then codes (and the decode)."""
    written = CODES + (BF16 if decode else 0.0)
    base = SQUARE_INSTRUCTIONS if get_rounding(rounding).block_rows > 1 else ROWS_INSTRUCTIONS
    return [
        Step(f"{name}: amax", elements * source, elements * AMAX_INSTRUCTIONS),
        Step(f"{name}: {rounding}", elements * (source + written), elements * _instructions(rounding, base)),
    ]


def rotate_steps(name: str, elements: float, source: float, roundings: list[str], emulated: bool) -> list[Step]:
    """One pass that makes len(roundings) operands of a tensor; before it one for amax where a rounding needs that."""
    steps = []
    decode = ROTATED_DECODE_INSTRUCTIONS if source == CODES else 0.0
    written, instructions = 0.0, 0.0
    for rounding in roundings:
        ms_eden = get_rounding(rounding).ms_eden
        written += (BF16 if emulated else CODES) + (PSEUDO if ms_eden else 0.0)
        pack = 0.0 if emulated or ms_eden else PACK_INSTRUCTIONS
        instructions += _instructions(rounding, ROTATED_INSTRUCTIONS + decode + pack)
    aligned = [r for r in roundings if not get_rounding(r).ms_eden]
    if aligned:
        work = elements * (AMAX_INSTRUCTIONS + decode) * len(aligned)
        steps.append(Step(f"{name}: amax", elements * source, work))
    work = elements * instructions
    steps.append(Step(f"{name}: {' and '.join(roundings)}", elements * (source + written), work))
    if not emulated and any(get_rounding(r).ms_eden for r in roundings):
        count = sum(get_rounding(r).ms_eden for r in roundings)
        blocks = elements / 16 * count
        steps.append(Step(f"{name}: scales", 16 * blocks * (PSEUDO + 1 / 16), blocks * FINISH_INSTRUCTIONS))
    return steps


def gemm_step(name: str, m: int, n: int, k: int, a: bool, b: bool, native: bool) -> Step:
    """a, b: whether the operand is quantized."""
    fp4 = native and a and b
    operand = CODES if fp4 else BF16
    flops = 2.0 * m * n * k
    num_bytes = operand * (m * k + n * k) + BF16 * m * n
    return Step(name, num_bytes, 0.0, 0.0 if fp4 else flops, flops if fp4 else 0.0)


def layer_steps(recipe: Recipe, m: int, k: int, n: int, *, backward: bool, native: bool) -> list[Step]:
    """The kernels of a layer (m tokens, k in_features, n out_features) as linear.py launches them.

    native: operands stay 4-bit (a Blackwell's GEMM), else they are made in BF16 as well.
    """
    forward, dgrad, wgrad = recipe.output, recipe.grad_input, recipe.grad_weight
    steps: list[Step] = []

    def operand(name: str, elements: int, source: float, o: Operand) -> None:
        if o.rounding:
            steps.extend(quantize_steps(name, elements, source, o.rounding, decode=not native))
        elif source > BF16:
            steps.append(Step(f"{name}: to BF16", elements * (source + BF16)))

    operand("input", m * k, BF16, forward.a)
    operand("weight", n * k, 4.0, forward.b)
    if backward and wgrad.b.raw:
        steps += rotate_steps("input^T", m * k, BF16, [wgrad.b.rounding], emulated=False)
    steps.append(gemm_step("output", m, n, k, bool(forward.a.rounding), bool(forward.b.rounding), native))
    if not backward:
        return steps

    e = [g.a.rounding for g in (dgrad, wgrad) if g.a.rounding]
    if e:
        steps += rotate_steps("grad_output", m * n, BF16, e, emulated=not native)
    for name, elements, gemm, kept in (
        ("weight^T", n * k, dgrad, forward.b.rounding),
        ("input^T", m * k, wgrad, forward.a.rounding),
    ):
        source = CODES if kept else (4.0 if name == "weight^T" else BF16)
        if gemm.b.raw or (gemm.b.rounding is None and kept):
            if not native:  # the codes are decoded for the GEMM
                steps.append(Step(f"{name}: decode", elements * (CODES + BF16), elements * DECODE_INSTRUCTIONS))
        elif gemm.b.rounding:
            steps += rotate_steps(name, elements, source, [gemm.b.rounding], emulated=not native)
    for name, gemm, (r, c, d), kept in (
        ("grad_input", dgrad, (m, k, n), forward.b.rounding),
        ("grad_weight", wgrad, (n, k, m), forward.a.rounding),
    ):
        steps.append(gemm_step(name, r, c, d, bool(gemm.a.rounding), bool(gemm.b.rounding or kept), native))
    return steps


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


def table(header: list[str], rows: list[list[object]]) -> str:
    """Columns aligned, numbers to the right."""
    cells = [header, *[[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(v.rjust(w) if n else v.ljust(w) for v, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])


def write_json(name: str, path: str, settings: dict, records: list[dict], environment: dict | None = None) -> Path:
    """The records, what was asked for and the machine (asked again unless given); returns where."""
    target = Path(path) if path else Path(get_base_dir()) / "bench" / f"{name}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    content = {"benchmark": name, "settings": settings, "environment": environment or environment_info()}
    content["records"] = records
    atomic_write(target, json.dumps(content, indent=1, default=str) + "\n")
    return target


def describe(machine: Machine) -> dict:
    return asdict(machine)
