"""Do step_time's predictions for a Blackwell agree with published times of an RTX 5090 and an RTX PRO 4000?

    python -m lab.predict.blackwell       # the constants, and each point: published, predicted without it, error

A predicted time is linear in four constants of a machine: bandwidth, BF16 rate, FP4 rate, time of a kernel. They are
fitted by least squares. Each point is predicted with constants that fit the other points. The bytes and FLOPs of a
published program are counted from its source:

* Quartet II's 4/6 reads BF16 and writes codes. Its MS-EDEN reads grad_output for each of two operands, at 77% of the
  DRAM's rate (4/6: 85%). It writes codes and BF16 scales. A second kernel converts the scales.
* The saved codes are read again and requantized.
* amax is a pass of its own. The benchmark gives the amax of the input.
* The benchmark calls backward without clearing gradients, so they are accumulated in BF16.
* Layer times of the RTX PRO 4000 include passes that scale the output: OUTPUT bytes per element. OUTPUT comes from
  three times of the lm_head, which are not among the points.
* A GEMM runs in whole waves of 128 x 128 tiles, but not on the RTX PRO 4000: its limit is power (145 W).
* FP8 has twice the rate of BF16.
* The rest of a step is step_time.py's.

Sources for the RTX 5090: Quartet II, notebooks/plots.ipynb (Table 6's layers, 16,384 tokens), and the paper's Appendix
D.2. Source for the RTX PRO 4000: mdhorton/nanochat_sm120, dev/nvfp4-quartet.md. MXFP4 and MXFP8 are left out, because
their backward passes run at a third of their forward's rate. The points were known while the bytes were counted. So
leaving one out tests the four constants, not the counts.
"""

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from lab.predict.machines import MACHINES, Machine
from lab.predict.step_time import (
    ACCUMULATE,
    CAST,
    CODES,
    FP8_ELEMENT,
    LOGIT,
    TOKENS,
    Shape,
    attention_step,
    block_layers,
    mean_keys,
    optimizer_step,
    output_tiles,
)
from nanochat_fp4.errors import run_main

# The paper's Table 6: [in_features, out_features] of a model's linear layers.
LAYER_SETS: dict[str, dict[str, tuple[int, int]]] = {
    "800M": {"qkv": (2048, 6144), "out": (2048, 2048), "upgate": (2048, 11264), "down": (5632, 2048)},
    "3B": {"qkv": (3072, 9216), "out": (3072, 3072), "upgate": (3072, 16384), "down": (8192, 3072)},
    "7B": {"qkv": (4096, 12288), "out": (4096, 4096), "upgate": (4096, 22016), "down": (11008, 4096)},
    "22B": {"qkv": (6144, 18432), "out": (6144, 6144), "upgate": (6144, 32768), "down": (16384, 6144)},
}

GLUE, UPDATED = 168.0, 30.0  # bytes of the published programs, for each token, layer and width; for each parameter
SCALES = 2 / 16  # BF16 scales of MS-EDEN, a byte each after conversion
AMAX, FOUR_SIX = 2.0, 2.0 + CODES
EDEN = 2 * (2.0 + 0.5 + SCALES) * 85 / 77 + 2 * 1.5 * SCALES  # of both operands of grad_output
REQUANTIZE = CODES + 0.5 + SCALES + 1.5 * SCALES
BF16_GRADIENT = 6.0  # read twice and written once
OUTPUT = 19.0  # lm_head's GEMMs, 23.63, 27.97 and 30.13 ms with K = 768, 1280 and 1536: 17.1 ms with K = 0, 32 ps each

# Milliseconds: forward in BF16 and NVFP4, forward and backward in BF16 and NVFP4; BF16 = NVFP4 times its percentage.
RTX5090_LAYERS = {
    "800M": (7.48, 1.80, 24.1, 7.71),
    "3B": (16.5, 3.54, 51.0, 14.01),
    "7B": (28.2, 5.94, 88.2, 22.66),
    "22B": (62.4, 12.78, 193.0, 46.22),
}
RTX5090_TOKENS = {("bf16", 1): 20.8e3, ("nvfp4", 4): 51e3}  # tokens/s of d26, by micro-batch
# in_features, out_features: milliseconds of the three BF16 GEMMs, and of NVFP4 with all quantization.
PRO4000_LAYERS = {
    (768, 768): (0.713, 1.020),
    (768, 3072): (2.945, 3.119),
    (3072, 768): (2.728, 2.206),
    (1280, 1280): (2.157, 1.840),
    (1280, 5120): (7.961, 5.828),
    (5120, 1280): (7.416, 4.223),
    (1536, 1536): (2.721, 2.265),
    (1536, 6144): (11.774, 7.491),
    (6144, 1536): (12.139, 5.459),
}
# A step of d20 in NVFP4, milliseconds; rotate and quantize with the conversion of scales.
PRO4000_STEP = {
    "FP4 GEMMs": 990.1,
    "attention": 501.3,
    "rotate and quantize": 349.6,
    "forward quantize": 114.8,
    "requantize": 104.2,
    "optimizer": 186.8,
    "element-wise and reductions": 1378.3,
}
# FP8 untuned: with CUDA 12.8 its GEMMs ran on sm_89's kernels.
PRO4000_TOKENS = {"bf16": 23_493, "fp8, untuned": 29_040, "nvfp4": 37_532, "nvfp4 without its optimizations": 35_073}
PRO4000_D12 = {"nvfp4": 232_678, "fp8, untuned": 193_025}  # two GPUs, scaling 1.96 of 2


@dataclass(frozen=True)
class Point:
    """A published time, with its bytes, FLOPs and kernels."""

    machine: str
    name: str
    ms: float
    num_bytes: float = 0.0
    bf16: float = 0.0
    fp4: float = 0.0
    kernels: float = 0.0

    def row(self) -> tuple[float, float, float, float]:
        """Factors of the four constants: ns per byte, ns per 1000 BF16 and FP4 FLOPs, ms per kernel."""
        return self.num_bytes / 1e6, self.bf16 / 1e9, self.fp4 / 1e9, self.kernels / 1e3


def _gemms(machine: Machine, m: int, k: int, n: int) -> tuple[float, float]:
    """(forward FLOPs, backward FLOPs) of a layer's GEMMs. The idle tiles of the last wave count."""

    def flops(a: int, b: int, c: int) -> float:
        tiles, at_once = output_tiles(a, b), machine.multiprocessors
        waste = -(-tiles // at_once) * at_once / tiles if 0 < at_once <= tiles else 1.0
        return 2.0 * a * b * c * waste

    return flops(m, n, k), flops(m, k, n) + flops(n, k, m)


def _rtx5090_layers() -> Iterable[Point]:
    machine = MACHINES["rtx5090"]
    for model, times in RTX5090_LAYERS.items():
        shapes = LAYER_SETS[model].values()
        x, e = (TOKENS * sum(s[i] for s in shapes) for i in (0, 1))
        w = sum(k * n for k, n in shapes)
        forward, backward = (sum(_gemms(machine, TOKENS, *s)[i] for s in shapes) for i in (0, 1))
        quantized = x * FOUR_SIX + w * (AMAX + FOUR_SIX)
        accumulated = BF16_GRADIENT * (x + w)
        requantized = e * EDEN + (x + w) * REQUANTIZE
        point = Point("rtx5090", f"{model}, BF16, forward", times[0], 0.0, forward, 0.0, 4)
        yield point
        yield replace(
            point, name=f"{model}, NVFP4, forward", ms=times[1], num_bytes=quantized, bf16=0.0, fp4=forward, kernels=16
        )
        both = forward + backward
        yield Point("rtx5090", f"{model}, BF16, both", times[2], accumulated, both, 0.0, 16)
        all_bytes = quantized + requantized + accumulated
        yield Point("rtx5090", f"{model}, NVFP4, both", times[3], all_bytes, 0.0, both, 64)


def _step(
    machine: str,
    name: str,
    ms: float,
    shape: Shape,
    method: str,
    *,
    tokens: int,
    micro_batch: int,
    keys: float,
    batch: int | None = None,
    fused: bool = False,
    quantized_head: bool = False,
    cached_weights: bool = False,
    fused_accumulation: bool = False,
    processes: int = 1,
) -> Point:
    """A step of `tokens` on each process, or a part of a batch. keys: mean_keys of the published program."""
    w, depth, vocabulary = shape.width, shape.depth, shape.vocabulary
    weights = shape.block_weights + shape.head_weights
    count, updates = tokens / micro_batch, tokens / (batch or tokens)
    attention, update = attention_step(shape, tokens, keys), optimizer_step(shape, processes)
    flops = attention.bf16_flops + update.bf16_flops * updates
    num_bytes = (GLUE * w * depth + LOGIT * vocabulary) * tokens + UPDATED * weights * updates
    num_bytes += weights * count * (CAST + (0.0 if fused_accumulation else ACCUMULATE))
    at = MACHINES[machine]
    blocks = depth * count * sum(sum(_gemms(at, micro_batch, k, n)) for k, n in block_layers(w, fused))
    head = count * sum(_gemms(at, micro_batch, w, vocabulary))
    x, e = (depth * sum(s[i] for s in block_layers(w, fused)) for i in (0, 1))
    fp4 = 0.0
    if method == "bf16":
        flops += blocks + head
    elif method == "fp8":
        flops += (blocks + head) / 2
        num_bytes += FP8_ELEMENT * (x + w + e + vocabulary) * tokens
    else:
        quantized = shape.block_weights
        fp4 = blocks
        if quantized_head:
            x, e, quantized, fp4 = x + w, e + vocabulary, weights, blocks + head
        else:
            flops += head
        num_bytes += (x * (AMAX + FOUR_SIX + REQUANTIZE) + e * EDEN) * tokens
        num_bytes += quantized * (REQUANTIZE * count + (AMAX + FOUR_SIX) * (updates if cached_weights else count))
    return Point(machine, name, ms, num_bytes, flops, fp4)


def _rtx5090_steps() -> Iterable[Point]:
    """Half the context in three layers of four, as in nanochat's revision of the paper."""
    keys = mean_keys(2048, True)
    for (method, micro_batch), speed in RTX5090_TOKENS.items():
        tokens = 2048 * micro_batch
        name = f"d26, {method.upper()}, micro-batch {micro_batch}"
        settings = {"tokens": tokens, "micro_batch": tokens, "keys": keys, "batch": 524288, "fused": True}
        yield _step("rtx5090", name, tokens / speed * 1e3, Shape(26), method, **settings)


def _pro4000_layers() -> Iterable[Point]:
    machine = MACHINES["rtxpro4000"]
    for (k, n), (bf16, nvfp4) in PRO4000_LAYERS.items():
        x, e, w = TOKENS * k, TOKENS * n, k * n
        flops = sum(_gemms(machine, TOKENS, k, n))
        num_bytes = (x + w) * (AMAX + FOUR_SIX + REQUANTIZE) + e * (EDEN + OUTPUT)
        yield Point("rtxpro4000", f"{k} -> {n}, BF16", bf16, 0.0, flops, 0.0, 3)
        yield Point("rtxpro4000", f"{k} -> {n}, NVFP4", nvfp4, num_bytes, 0.0, flops, 18)


def _pro4000_steps() -> Iterable[Point]:
    shape, tokens, micro_batch, keys = Shape(20, 32768), 131072, 8192, mean_keys(2048, True, share=4)
    w, depth, count = shape.width, shape.depth, tokens / micro_batch
    weights = shape.block_weights + shape.head_weights
    x, e = (depth * sum(s[i] for s in block_layers(w, False)) for i in (0, 1))
    x, e = (x + w) * tokens, (e + shape.vocabulary) * tokens
    rest = (GLUE * w * depth + LOGIT * shape.vocabulary) * tokens + weights * count * (CAST + ACCUMULATE) + AMAX * x
    at = MACHINES["rtxpro4000"]
    gemms = depth * count * sum(sum(_gemms(at, micro_batch, k, n)) for k, n in block_layers(w, False))
    gemms += count * sum(_gemms(at, micro_batch, w, shape.vocabulary))
    update = optimizer_step(shape)
    parts: dict[str, dict[str, float]] = {
        "FP4 GEMMs": {"fp4": gemms},
        "attention": {"bf16": attention_step(shape, tokens, keys).bf16_flops},
        "rotate and quantize": {"num_bytes": e * EDEN},
        "forward quantize": {"num_bytes": x * FOUR_SIX},
        "requantize": {"num_bytes": (x + weights * count) * REQUANTIZE},
        "optimizer": {"num_bytes": UPDATED * weights, "bf16": update.bf16_flops},
        "element-wise and reductions": {"num_bytes": rest},
    }
    for name, ms in PRO4000_STEP.items():
        yield Point("rtxpro4000", f"d20 step: {name}", ms, **parts[name])
    settings = {"tokens": tokens, "micro_batch": micro_batch, "keys": keys}
    for name, speed in PRO4000_TOKENS.items():
        best = name == "nvfp4"
        more = {"quantized_head": name.startswith("nvfp4"), "cached_weights": best, "fused_accumulation": best}
        yield _step(
            "rtxpro4000", f"d20, {name}", tokens / speed * 1e3, shape, re.split("[, ]", name)[0], **settings, **more
        )
    share = 262144  # of a batch of 524,288, micro-batch 8
    settings = {"tokens": share, "micro_batch": 16384, "keys": keys, "processes": 2}
    for name, speed in PRO4000_D12.items():
        alone = share / (speed / 1.96) * 1e3  # without what the two lose together
        more = {"quantized_head": True, "cached_weights": True, "fused_accumulation": True} if name == "nvfp4" else {}
        yield _step(
            "rtxpro4000", f"d12, two GPUs, {name}", alone, Shape(12, 32768), name.split(",")[0], **settings, **more
        )


def points() -> list[Point]:
    return [*_rtx5090_layers(), *_rtx5090_steps(), *_pro4000_layers(), *_pro4000_steps()]


def fit(known: list[Point]) -> torch.Tensor:
    """The four constants with the smallest sum of relative errors' magnitudes, FP64 (4,). None is negative.

    Iterated least squares. Magnitudes instead of squares keep a bad point from pulling the others.
    """
    rows = torch.tensor([[v / p.ms for v in p.row()] for p in known], dtype=torch.float64)
    ones = torch.ones(len(known), dtype=torch.float64)
    used = [i for i in range(rows.shape[1]) if rows[:, i].any()]
    constants = torch.zeros(rows.shape[1], dtype=torch.float64)
    weight = ones
    for _ in range(30):
        solution = torch.linalg.lstsq(rows[:, used] * weight[:, None], ones * weight, driver="gelsd").solution
        if (solution <= 0).any():
            used = [i for i, s in zip(used, solution) if s > 0]
            constants.zero_()
            continue
        constants[used] = solution
        weight = (rows @ constants - 1).abs().clamp(min=0.02) ** -0.5
    return constants


def predicted(point: Point, constants: torch.Tensor) -> float:
    return float(torch.tensor(point.row(), dtype=torch.float64) @ constants)


def rates(constants: torch.Tensor) -> tuple[float, float, float, float]:
    """GB/s, BF16 and FP4 TFLOP/s, microseconds a kernel: the order of hardware.Machine's."""
    a, b, c, d = constants.tolist()
    return 1 / a, 1 / b, 1 / c, d


def leave_one_out(machine: str) -> list[tuple[Point, float]]:
    """Each point of the machine with the time that the other points predict."""
    known = [p for p in points() if p.machine == machine]
    return [(p, predicted(p, fit([q for q in known if q is not p]))) for p in known]


def ratios(results: list[tuple[Point, float]]) -> list[tuple[str, float, float]]:
    """(layer, published, predicted): BF16 over NVFP4 of the layers of the RTX PRO 4000."""
    by_name = {p.name: (p.ms, ms) for p, ms in results}
    found = []
    for k, n in PRO4000_LAYERS:
        (a, b), (c, d) = by_name[f"{k} -> {n}, BF16"], by_name[f"{k} -> {n}, NVFP4"]
        found.append((f"{k} -> {n}, speed-up", a / c, b / d))
    return found


def summary(errors: list[float]) -> tuple[float, float]:
    """Median and largest magnitude."""
    magnitudes = [abs(e) for e in errors]
    return statistics.median(magnitudes), max(magnitudes)


def main(argv: list[str] | None = None) -> None:
    print("PREDICTIONS with the constants that fit the other points; nothing here was measured by this project")
    for machine in ("rtx5090", "rtxpro4000"):
        known = [p for p in points() if p.machine == machine]
        bandwidth, bf16, fp4, launch = rates(fit(known))
        print(
            f"\n{MACHINES[machine].name}: {bandwidth:.0f} GB/s, BF16 {bf16:.0f} and FP4 {fp4:.0f} TFLOP/s, "
            f"{launch:.1f} microseconds a kernel"
        )
        results = leave_one_out(machine)
        rows = [(p.name, p.ms, ms, "ms") for p, ms in results]
        if machine == "rtxpro4000":
            rows += [(*r, "x") for r in ratios(results)]
        print(f"| {'point':34} | published | predicted | error |\n|---|---|---|---|")
        for name, published, ms, unit in rows:
            print(f"| {name:34} | {published:8.2f} {unit} | {ms:8.2f} {unit} | {100 * (ms / published - 1):+5.1f}% |")
        median, worst = summary([ms / published - 1 for _, published, ms, _ in rows])
        print(f"median error {100 * median:.1f}%, worst {100 * worst:.1f}%, {len(rows)} points")


if __name__ == "__main__":
    run_main(main)
