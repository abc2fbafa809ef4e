"""How fast a method's kernels can be: a prediction from the bytes, instructions and FLOPs that they take, and what a
GPU can do. For GPUs that are not here, and for the question at which width 4 bits begin to pay.

Bytes are what a kernel must move if every tensor is read or written once (the caches only help within a tile). Here are
the linear layers; step_time.py has whole steps, and blackwell.py fits the constants of two machines to what others have
published of them. Our own kernels are bound by instructions: they take as long as their instructions at the share of
the issue rate that such kernels reach on an H200, with a band around it (BAND).
"""

import math
import re
from dataclasses import dataclass

from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import get_rounding
from nanochat_fp4.nvfp4.recipes import Operand, Recipe

# The paper's Table 6: [in_features, out_features] of a model's linear layers.
LAYER_SETS: dict[str, dict[str, tuple[int, int]]] = {
    "800M": {"qkv": (2048, 6144), "out": (2048, 2048), "upgate": (2048, 11264), "down": (5632, 2048)},
    "3B": {"qkv": (3072, 9216), "out": (3072, 3072), "upgate": (3072, 16384), "down": (8192, 3072)},
    "7B": {"qkv": (4096, 12288), "out": (4096, 4096), "upgate": (4096, 22016), "down": (11008, 4096)},
    "22B": {"qkv": (6144, 18432), "out": (6144, 6144), "upgate": (6144, 32768), "down": (16384, 6144)},
}


TOKENS = 8 * 2048  # the paper, Appendix D.1: batch 8, sequence 2048

# ----------------------------------------------------------------------------------------------------------------------
# Budgets, per element

CODES = 0.5 + 1 / 16  # 4-bit codes and an E4M3 scale for 16 of them
BF16 = 2.0
PSEUDO = 2 / 16 + 4 / 128  # MS-EDEN: a BF16 pseudo-scale for 16 elements and S for 128

# Instructions per element and output of a kernel, as `python -m lab.measure.instructions 90` counts them in SASS for
# sm_90. Compiled with Triton 3.6.
# Rounding with one candidate: along rows as they lie, in 16x16 blocks, after a rotation to BF16 (to codes: PACK more).
ROWS_INSTRUCTIONS, SQUARE_INSTRUCTIONS, ROTATED_INSTRUCTIONS, PACK_INSTRUCTIONS = 19.5, 49.0, 15.0, 4.0
EDEN_INSTRUCTIONS = 7.0
STOCHASTIC_INSTRUCTIONS = 18.0
CANDIDATE_INSTRUCTIONS, STOCHASTIC_CANDIDATE_INSTRUCTIONS = 14.0, 32.0  # each further one
DECODE_INSTRUCTIONS, ROTATED_DECODE_INSTRUCTIONS = 12.0, 8.0  # to memory; before a rotation
AMAX_INSTRUCTIONS = 5.0
FINISH_INSTRUCTIONS = 60.0  # of a scale

# Shares of the issue rate that kernels reach on an H200 (dev/LOG.md, 2026-11-22): along rows 0.75, those that rotate
# 0.42 to 0.44. On a machine that has not run them the truth lies between a full issue rate and BAND.
ROWS_ISSUE, ROTATED_ISSUE = 0.76, 0.43
BAND = 0.7  # of these shares, at worst
GEMM_TILE = 128  # rows and columns of a tensor-core kernel's tile: its last wave is whole, however few tiles it has
FP8_ELEMENT = 5.0  # bytes to make an FP8 operand and its transpose: read in BF16, written; read and written again


@dataclass(frozen=True)
class Step:
    """One kernel: what it is, the bytes it must move, its instructions, and FLOPs on the tensor cores.

    issue: the share of the issue rate that it is expected to reach; tiles: of a GEMM's output, 0 if they do not count
    """

    name: str
    num_bytes: float
    instructions: float = 0.0
    bf16_flops: float = 0.0
    fp4_flops: float = 0.0
    fp8_flops: float = 0.0
    issue: float = 1.0
    tiles: int = 0


@dataclass(frozen=True)
class Machine:
    """GB/s and TFLOP/s as programs reach them, and the instructions (10^12 a second) of all lanes.

    longer: a kernel's instructions there over sm_90's; those of the rotating kernel that makes clover's codes.
    fp8:    TFLOP/s, None: twice those of BF16, as in the data sheets
    launch: microseconds that a kernel takes for itself
    multiprocessors: 0 where idle ones cost nothing: at 145 W power is the limit, and the others run faster
    """

    name: str
    bandwidth: float
    bf16: float
    fp4: float | None
    instructions: float
    source: str
    longer: float = 1.0
    fp8: float | None = None
    launch: float = 0.0
    multiprocessors: int = 132


# Achieved on an H200: 4250 of 4800 GB/s, 700 of 989 TFLOP/s. The same shares are assumed of a B200.
COPY_SHARE, GEMM_SHARE = 4250 / 4800, 700 / 989
# `python -m lab.predict.blackwell` fits these (GB/s, BF16 and FP4 TFLOP/s, microseconds) and compares.
RTX5090_FIT, PRO4000_FIT = (1262, 238, 1510, 5.1), (609, 85, 340, 14.3)
FITTED = "fitted to published times (lab/predict/blackwell.py)"
MACHINES = {
    "h200": Machine("H200", 4250, 700, None, 132 * 128 * 1.755e9 / 1e12, "measured copy and GEMM"),
    "b200": Machine(
        "B200", 8000 * COPY_SHARE, 2250 * GEMM_SHARE, 9000 * GEMM_SHARE, 148 * 128 * 1.85e9 / 1e12,
        "data sheet (8000 GB/s, 2250 and 9000 TFLOP/s dense) times an H200's achieved shares", 0.75,
        launch=5.0, multiprocessors=148,
    ),
    "rtx5090": Machine(
        "RTX 5090", *RTX5090_FIT[:3], 170 * 128 * 2.41e9 / 1e12, FITTED, 1.7,
        launch=RTX5090_FIT[3], multiprocessors=170,
    ),
    "rtxpro4000": Machine(
        "RTX PRO 4000", *PRO4000_FIT[:3], 70 * 128 * 2.41e9 / 1e12, FITTED, 1.7,
        launch=PRO4000_FIT[3], multiprocessors=0,
    ),
    # The same chip as the RTX 5090 with 188 of its multiprocessors and the same memory.
    "rtxpro6000": Machine(
        "RTX PRO 6000", RTX5090_FIT[0], *(188 / 170 * v for v in RTX5090_FIT[1:3]), 188 * 128 * 2.41e9 / 1e12,
        "the RTX 5090's, times 188 / 170 multiprocessors where they count", 1.7,
        launch=RTX5090_FIT[3], multiprocessors=188,
    ),
}  # fmt: skip


def predicted_ms(step: Step, machine: Machine, band: str = "") -> float:
    """A kernel takes as long as the slowest of memory, instructions and tensor cores.

    band: "" for what is expected, "best" for instructions at the full issue rate, "worst" for BAND of what is expected
    """
    fp8 = machine.fp8 or 2 * machine.bf16
    gemm = step.bf16_flops / machine.bf16 + step.fp8_flops / fp8
    gemm += step.fp4_flops / machine.fp4 if machine.fp4 else 0.0
    if 0 < machine.multiprocessors <= step.tiles:  # fewer tiles are split along K
        gemm *= math.ceil(step.tiles / machine.multiprocessors) * machine.multiprocessors / step.tiles
    issue = {"": step.issue, "best": 1.0, "worst": step.issue * BAND}[band]
    instructions = step.instructions * machine.longer / (machine.instructions * issue)
    return max(step.num_bytes / machine.bandwidth / 1e6, instructions / 1e9, gemm / 1e9) + machine.launch / 1e3


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
        Step(f"{name}: amax", elements * source, elements * AMAX_INSTRUCTIONS, issue=ROWS_ISSUE),
        Step(
            f"{name}: {get_rounding(rounding).name}",
            elements * (source + written),
            elements * _instructions(rounding, base),
            issue=ROWS_ISSUE,
        ),
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
        steps.append(Step(f"{name}: amax", elements * source, work, issue=ROTATED_ISSUE))
    work = elements * instructions
    what = f"{name}: {' and '.join(get_rounding(r).name for r in roundings)}"
    steps.append(Step(what, elements * (source + written), work, issue=ROTATED_ISSUE))
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
    return Step(name, num_bytes, 0.0, 0.0 if fp4 else flops, flops if fp4 else 0.0, tiles=output_tiles(m, n))


def output_tiles(m: int, n: int) -> int:
    return math.ceil(m / GEMM_TILE) * math.ceil(n / GEMM_TILE)


def fp8_steps(m: int, k: int, n: int) -> list[Step]:
    """Of method fp8: both GEMM operands of every product in FP8, transposed copies of those of the forward."""
    made = {"input": m * k * FP8_ELEMENT, "weight": n * k * (FP8_ELEMENT + 2), "grad_output": m * n * FP8_ELEMENT}
    shapes = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}
    return [Step(f"{name}: to FP8", num_bytes) for name, num_bytes in made.items()] + [
        Step(name, a * c + b * c + BF16 * a * b, fp8_flops=2.0 * a * b * c, tiles=output_tiles(a, b))
        for name, (a, b, c) in shapes.items()
    ]


def layer_steps(recipe: Recipe, m: int, k: int, n: int, *, backward: bool, native: bool) -> list[Step]:
    """The kernels of a layer (m tokens, k in_features, n out_features) as linear.py launches them.

    native: operands stay 4-bit (a Blackwell's GEMM), else they are made in BF16 as well.
    """
    if recipe.name == "fp8" and backward:
        return fp8_steps(m, k, n)
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


def block_ms(method: str, width: int, tokens: int, machine: Machine) -> float:
    """Predicted time of forward and backward of the linear layers of a block."""
    recipe = get_recipe(method)
    native = machine.fp4 is not None and recipe.quantizes
    layers = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
    steps = [s for k, n in layers for s in layer_steps(recipe, tokens, k, n, backward=True, native=native)]
    return sum(predicted_ms(step, machine) for step in steps)


def is_predictable(method: str) -> bool:
    """Whether a method quantizes, by kernels alone and alike all the time: other budgets are not known."""
    recipe = get_recipe(method)
    if recipe.name == "fp8":
        return True
    operands = [o for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight) for o in (gemm.a, gemm.b)]
    if not recipe.quantizes or recipe.late or any(o.terms > 1 for o in operands):
        return False
    return all(get_rounding(o.rounding).has_kernels for o in operands if o.rounding)


def machine_of(gpu: str) -> Machine | None:
    """The machine that a GPU's name (torch.cuda.get_device_name) is; None where there are no numbers for it."""
    # "RTX 5090 Laptop GPU" and "RTX 5090 D" are other chips, or the same with less power.
    return next((m for m in MACHINES.values() if re.search(rf"\b{m.name}\b(?! (Laptop|D)\b)", gpu)), None)


def predict(machine: Machine, methods: list[str], tokens: int = TOKENS) -> list[dict]:
    """For each method its ratio to BF16 by width, and the first width (a multiple of 128) from where it is faster.

    Raises ValueError for a method that is not known.
    """
    widths = list(range(128, 16384 + 1, 128))
    records = []
    for method in methods:
        ratios = {w: block_ms(method, w, tokens, machine) / block_ms("bf16", w, tokens, machine) for w in widths}
        slower = [w for w, ratio in ratios.items() if ratio >= 1]
        first = next((w for w in widths if not slower or w > slower[-1]), None)
        shown = {w: ratios[w] for w in (768, 1280, 1664, 2048, 4096, 8192)}
        records.append({"machine": machine.name, "method": method, "tokens": tokens, "ratios": shown, "width": first})
    return records
