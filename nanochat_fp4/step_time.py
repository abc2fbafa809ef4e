"""How long a training step takes on a GPU that is not here: a prediction from bytes, instructions and FLOPs.

    python -m nanochat_fp4.step_time --gpu rtx5090 --depth 20 --methods clover,fp8      # tokens/s, hours, a day

A kernel must move each of its tensors once. Our own kernels are bound by instructions: their number at the share of
the issue rate that such kernels reach on an H200, with a BAND around it. For the rest of a step:

    attention    7 products of 2 * keys * width for each token and layer, at ATTENTION_SHARE of the BF16 rate
    glue         GLUE bytes for each token, layer and unit of width, at GLUE_SHARE of a copy's bandwidth: norms,
                 residuals, rotary, ReLU^2, both passes, and the largest values that the quantization of inputs needs
    loss         LOGIT bytes for each token and entry of the vocabulary, and the head's three products in BF16
    weights      for each micro-batch: the cast of the FP32 weights to BF16, and the gradients' accumulation in FP32
    optimizer    Muon's Newton-Schulz steps, then UPDATE bytes a parameter, once a step

GLUE is counted (`python -m lab.predict.glue`). GLUE_SHARE and UPDATE are measured, from the profile of our BF16 step of
d26 on an H200 (docs/results/bench_train.json, 32 rows): 89 ms of norms, ReLU^2 and other element-wise kernels, 30 ms of
the update outside of its products. lab.predict compares the predictions with measured and published times.
"""

import argparse
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import get_rounding
from nanochat_fp4.nvfp4.recipes import Operand, Recipe

TOKENS = 8 * 2048  # the paper, Appendix D.1: batch 8, sequence 2048
BF16, CODES = 2.0, 0.5 + 1 / 16  # Bytes of an element in BF16, and as a code. 16 codes share an E4M3 scale.
PSEUDO = 2 / 16 + 4 / 128  # MS-EDEN has a BF16 pseudo-scale for 16 elements and S for 128.

# Instructions per element and output of a kernel, as `python -m lab.measure.instructions 90` counts them in SASS for
# sm_90. Compiled with Triton 3.6.
# The counts are for one candidate. After a rotation, codes take PACK more than BF16.
ROWS_INSTRUCTIONS, SQUARE_INSTRUCTIONS, ROTATED_INSTRUCTIONS, PACK_INSTRUCTIONS = 19.5, 49.0, 15.0, 4.0
EDEN_INSTRUCTIONS, STOCHASTIC_INSTRUCTIONS = 7.0, 18.0
CANDIDATE_INSTRUCTIONS, STOCHASTIC_CANDIDATE_INSTRUCTIONS = 14.0, 32.0  # of each further candidate
DECODE_INSTRUCTIONS, ROTATED_DECODE_INSTRUCTIONS = 12.0, 8.0  # to memory, and before a rotation
AMAX_INSTRUCTIONS, FINISH_INSTRUCTIONS = 5.0, 60.0  # of an element, and of a scale

# Shares of the issue rate that kernels reach on an H200 (dev/LOG.md, 2026-11-22): along rows 0.75, those that rotate
# 0.42 to 0.44. On other machines the truth lies between a full issue rate and BAND of these shares.
ROWS_ISSUE, ROTATED_ISSUE, BAND = 0.76, 0.43, 0.7
GEMM_TILE = 128  # rows and columns of a tensor-core kernel's tile. The last wave is whole, however few tiles it has.
FP8_ELEMENT = 5.0  # bytes to make an FP8 operand (2 read, 1 written) and its transpose (1 read, 1 written)


@dataclass(frozen=True)
class Step:
    """One kernel: bytes to move, instructions, FLOPs on the tensor cores. Its issue is the expected share of the issue
    rate. Its tiles are those of a GEMM's output, or 0 where they do not count."""

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
    """GB/s and TFLOP/s (fp8: None is twice BF16's) as programs reach them, 10^12 instructions a second of all lanes.
    longer is the ratio of instructions to sm_90's, for clover's codes. launch is the microseconds of an empty kernel.
    multiprocessors: 0 where idle ones cost nothing (at 145 W power is the limit, and the others run faster).
    cublaslt is (expected, worst) of fp4 in the library that torch calls, where fp4 is another one's, and the best case.
    doubt is a sentence: what would make the prediction wrong."""

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
    doubt: str = field(default="", repr=False)


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
    rest = {"source": "data sheet, at the RTX 5090's shares", "longer": 1.7, "launch": RTX5090_FIT[3]}
    return Machine(name, **{**rest, **rates, "instructions": multiprocessors * 128 * ghz / 1e3, **known})


def _datacenter(name: str, bf16: float, fp4: float, cublaslt: tuple[float, float], multiprocessors: int) -> Machine:
    """A card of sm_100 by its data sheet (dense TFLOP/s), at the shares of it that an H200 reaches."""
    rates = bf16 * GEMM_SHARE, fp4 * GEMM_SHARE, multiprocessors * 128 * 1.85e9 / 1e12
    source = f"data sheet (8000 GB/s, {bf16} and {fp4} TFLOP/s dense) times an H200's achieved shares"
    doubt = f"Wrong wherever an H200's shares of a data sheet do not carry over: no time of a {name} was fitted."
    more = {"multiprocessors": multiprocessors, "cublaslt": tuple(v * GEMM_SHARE for v in cublaslt), "doubt": doubt}
    return Machine(name, 8000 * COPY_SHARE, *rates, source, 0.75, None, 5.0, **more)


MACHINES = {
    "h200": Machine("H200", 4250, 700, None, 132 * 128 * 1.755e9 / 1e12, "measured copy and GEMM"),
    "b200": _datacenter("B200", 2250, 9000, (9000, B300_RATIO * 2250), 148),
    "gb200": _datacenter("GB200", 2500, 10000, (10000, B300_RATIO * 2500), 148),
    "b300": _datacenter("B300", 2250, 13500, (B300_RATIO * 2250,) * 2, 148),
    "rtx5090": Machine(
        "RTX 5090", *RTX5090_FIT[:3], 170 * 128 * 2.41e9 / 1e12, FITTED, 1.7, None, RTX5090_FIT[3], 170,
        cublaslt=RTX5090_LIBRARIES,
        doubt="Wrong if cuBLASLt's FP4 is slower than Triton's 874 TFLOP/s here, or if our rotating kernels issue less "
        "than 0.7 of an H200's share: neither was timed at these shapes.",
    ),
    "rtx5080": _geforce("RTX 5080", 960, 900.5, 84, 2.617),
    "rtx5070ti": _geforce("RTX 5070 Ti", 896, 703, 70, 2.452),
    "rtx5060": _geforce("RTX 5060", 448, 307, 30, 2.497, bf16=32, cublaslt=(237, 160),
        source="data sheet at the RTX 5090's shares; BF16 and cuBLAS FP4 as Not4right/nvfp4-training measured them"),
    "rtxpro4000": Machine(
        "RTX PRO 4000", *PRO4000_FIT[:3], 70 * 128 * 2.41e9 / 1e12, FITTED, 1.7, None, PRO4000_FIT[3], 0,
    ),
    # The same chip as the RTX 5090 with 188 of its multiprocessors and the same memory. cuBLASLt: 1,010 to 1,137
    # TFLOP/s, where CUTLASS has 1,420 to 1,595 (Infatoshi/nvfp4-pretrain).
    "rtxpro6000": Machine(
        "RTX PRO 6000", RTX5090_FIT[0], *(188 / 170 * v for v in RTX5090_FIT[1:3]), 188 * 128 * 2.41e9 / 1e12,
        "the RTX 5090's, times 188 / 170 multiprocessors where they count", 1.7, None, RTX5090_FIT[3], 188,
        cublaslt=(1073.5, 1010),
        doubt="Wrong if its power limit slows its multiprocessors below the RTX 5090's: the model has no power.",
    ),
    # BF16 (87 to 98 TFLOP/s) and TransformerEngine's FP4 GEMM (117 to 133) as apstenku123/nanochat measured them.
    "gb10": _geforce("GB10", 273, 500, 48, 2.418, bf16=92.5, cublaslt=(125, 117),
        source="data sheet at the RTX 5090's shares; BF16 and FP4 GEMMs as apstenku123/nanochat measured them",
        doubt="Wrong if its memory gives less than 0.7 of 273 GB/s, or if a cuBLASLt from CUDA 13.4 on multiplies FP4 "
        "faster than 133 TFLOP/s; others' d20 made 14,400 to 17,000 tokens/s in BF16 and NVFP4."),
}  # fmt: skip


def predicted_ms(step: Step, machine: Machine, band: str = "") -> float:
    """A kernel takes as long as the slowest of memory, instructions and tensor cores. The band is "" for the expected
    time, "best" for a full issue rate and the fastest FP4 GEMM, or "worst" for BAND of the expected issue rate and the
    slowest FP4 GEMM."""
    gemm = step.bf16_flops / machine.bf16 + step.fp8_flops / (machine.fp8 or 2 * machine.bf16)
    if machine.fp4:
        best = band == "best" or machine.cublaslt is None
        gemm += step.fp4_flops / (machine.fp4 if best else machine.cublaslt[band == "worst"])
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
    what, work = f"{name}: {get_rounding(rounding).name}", elements * _instructions(rounding, base)
    return [
        Step(f"{name}: amax", elements * source, elements * AMAX_INSTRUCTIONS, issue=ROWS_ISSUE),
        Step(what, elements * (source + written), work, issue=ROWS_ISSUE),
    ]


def rotate_steps(name: str, elements: float, source: float, roundings: list[str], emulated: bool) -> list[Step]:
    """One pass that makes len(roundings) operands of a tensor; before it one for amax where a rounding needs that."""
    steps = []
    decode, written, instructions = (ROTATED_DECODE_INSTRUCTIONS if source == CODES else 0.0), 0.0, 0.0
    for rounding in roundings:
        ms_eden = get_rounding(rounding).ms_eden
        written += (BF16 if emulated else CODES) + (PSEUDO if ms_eden else 0.0)
        pack = 0.0 if emulated or ms_eden else PACK_INSTRUCTIONS
        instructions += _instructions(rounding, ROTATED_INSTRUCTIONS + decode + pack)
    aligned = [r for r in roundings if not get_rounding(r).ms_eden]
    if aligned:
        work = elements * (AMAX_INSTRUCTIONS + decode) * len(aligned)
        steps.append(Step(f"{name}: amax", elements * source, work, issue=ROTATED_ISSUE))
    what = f"{name}: {' and '.join(get_rounding(r).name for r in roundings)}"
    steps.append(Step(what, elements * (source + written), elements * instructions, issue=ROTATED_ISSUE))
    if not emulated and len(aligned) < len(roundings):
        blocks = elements / 16 * (len(roundings) - len(aligned))
        steps.append(Step(f"{name}: scales", 16 * blocks * (PSEUDO + 1 / 16), blocks * FINISH_INSTRUCTIONS))
    return steps


def gemm_step(name: str, m: int, n: int, k: int, a: bool, b: bool, native: bool) -> Step:
    """a, b: whether the operand is quantized."""
    fp4 = native and a and b
    operand, flops = CODES if fp4 else BF16, 2.0 * m * n * k
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
    """The kernels of a layer (m tokens, k in_features, n out_features) as linear.py launches them. native: operands
    stay 4-bit (a Blackwell's GEMM), else they are made in BF16 as well."""
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


def block_layers(w: int, fused: bool = True) -> tuple[tuple[int, int], ...]:
    """(in_features, out_features) of the linear layers of a block of width w, q, k and v as one or as three."""
    return (*(((w, 3 * w),) if fused else ((w, w),) * 3), (w, w), (w, 4 * w), (4 * w, w))


def block_steps(method: str | Recipe, width: int, tokens: int, machine: Machine) -> list[Step]:
    """The kernels of the linear layers of a block, forward and backward."""
    recipe = get_recipe(method)
    native, layers = machine.fp4 is not None and recipe.quantizes, block_layers(width)
    return [s for k, n in layers for s in layer_steps(recipe, tokens, k, n, backward=True, native=native)]


def block_ms(method: str, width: int, tokens: int, machine: Machine) -> float:
    return sum(predicted_ms(step, machine) for step in block_steps(method, width, tokens, machine))


def is_counted(method: str | Recipe) -> bool:
    """Whether a method quantizes, by kernels alone and alike all the time: block_steps has all of its kernels."""
    recipe = get_recipe(method)
    if recipe.name == "fp8":
        return True
    operands = [o for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight) for o in (gemm.a, gemm.b)]
    if not recipe.quantizes or recipe.late or any(o.terms > 1 or o.feedback for o in operands):
        return False
    return all(get_rounding(o.rounding).has_kernels for o in operands if o.rounding)


def _plain(recipe: Recipe) -> Recipe:
    """Without second terms and feedback. FEEDBACK_MS is over the rounding of clover's weight, rounded as its input."""
    a, b = recipe.output.a, recipe.output.b
    output = replace(recipe.output, a=replace(a, terms=1), b=replace(a if b.feedback else b, terms=1))
    return replace(recipe, output=output, late=None, kept_blocks=0.0)


def is_predictable(method: str | Recipe) -> bool:
    """Whether step_ms knows a method: second terms, feedback, phases and blocks in BF16 included."""
    recipe = get_recipe(method)
    phases = [_plain(r) for r in (recipe, recipe.final)]
    return recipe.quantizes and all(is_counted(r) for r in phases if r.quantizes)


def machine_of(gpu: str) -> Machine | None:
    """The machine that a GPU's name (torch.cuda.get_device_name) is; None where there are no numbers for it."""
    # "RTX 5090 Laptop GPU" and "RTX 5090 D" are other chips, or the same with less power; "MIG" is a part of one.
    other = r"(?!.*\b(Laptop|Max-Q|MIG|Ti|SUPER|D)\b)"
    return next((m for m in MACHINES.values() if re.search(rf"\b{m.name}\b{other}", gpu)), None)


def predict(machine: Machine, methods: list[str], tokens: int = TOKENS) -> list[dict]:
    """For each method its ratio to BF16 by width, and the first width (a multiple of 128) from where it is faster.
    Raises ValueError for an unknown method."""
    widths = list(range(128, 16384 + 1, 128))
    records = []
    for method in methods:
        ratios = {w: block_ms(method, w, tokens, machine) / block_ms("bf16", w, tokens, machine) for w in widths}
        slower = [w for w, ratio in ratios.items() if ratio >= 1]
        first = next((w for w in widths if w > max(slower, default=0)), None)
        shown = {w: ratios[w] for w in (768, 1280, 1664, 2048, 4096, 8192)}
        records.append({"machine": machine.name, "method": method, "tokens": tokens, "ratios": shown, "width": first})
    return records


# A whole step

SEQUENCE, VOCABULARY = 2048, 65536
SHARD_BYTES = 100e6  # of FineWeb-Edu as nanochat packs it
LOGIT, UPDATE = 20.0, 132.0  # bytes
# "codes" has 92 of the schedule, and 12 of ReLU^2's kernel besides codes: its input for the largest value, 8 bits kept.
GLUE, GLUE_SHARE = {"bf16": 110.0, "fp8": 110.0, "codes": 104.0}, 110 / 134
# Bytes of the glue of a forward pass that is not compiled, counted in gpt.py: residual scalars 14, norms 16, rotary 36,
# v 4, sums 12, ReLU^2 32. The second validation, in BF16, is one.
UNCOMPILED = 114.0
DISK = 1e9  # bytes a second of a checkpoint's writing, an ASSUMPTION
# What feedback adds to a d26 step of 524,288 tokens on an H200: codes take 63.4 ms where clover's take 5.5, the Gram
# matrices every tenth step 446.7 (docs/results/bench_train_feedback.json). Feedback reads the errors of all columns
# before a block of 16, so its time grows as weights times width and with the memory's time a byte. Best: no slower on
# another card. Worst: no faster for a smaller width.
FEEDBACK_MS = 63.4 - 5.5 + 446.7 / 10
# A tuned FP8 over an untuned one (sm_89's kernels on sm_120), mdhorton/nanochat_sm120: 1.18 at d16, 1.33 at d12.
TUNED_FP8 = {"": 1.18, "best": 240_038 / 180_890, "worst": 1.0}
# --head: bytes of the loss kernel for a logit, tokens of a chunk at VOCABULARY, bytes to add an element of a chunk to
# the gradient of the weight. "" is the head that LOGIT was fitted to: products in BF16, a compiled loss.
FUSED_LOGIT, CHUNKS, ADDITION = 6.0, {"bf16": 8192, "fp8": 4096}, 12.0
CAST, ACCUMULATE = 6.0, 10.0  # bytes a weight: FP32 to BF16, and BF16 added to FP32
ATTENTION_SHARE = 0.6
NEWTON_SCHULZ = 5  # iterations of Muon, of three products each


@dataclass(frozen=True)
class Shape:
    """A nanochat of this depth: its width, parameters of the blocks and of the head."""

    depth: int
    vocabulary: int = VOCABULARY

    @property
    def width(self) -> int:
        return 64 * self.depth

    @property
    def block_weights(self) -> int:
        return 12 * self.width**2 * self.depth

    @property
    def head_weights(self) -> int:
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.block_weights + 2 * self.head_weights


MEASURED = Shape(26)  # of FEEDBACK_MS


def mean_keys(sequence: int, windowed: bool, share: int = 2) -> float:
    """Mean keys of a causal query. windowed: three layers of four (SSSL) look at one `share`th of the sequence: half of
    it in gpt.py, a quarter in the newest nanochat."""
    short = sequence / share - (sequence / share) ** 2 / (2 * sequence)
    return (3 * short + sequence / 2) / 4 if windowed else sequence / 2


def attention_step(shape: Shape, tokens: float, keys: float) -> Step:
    return Step("attention", 0.0, bf16_flops=14 * keys * shape.width * shape.depth * tokens / ATTENTION_SHARE)


def optimizer_step(shape: Shape, processes: int = 1) -> Step:
    """Muon is sharded over the processes."""
    w = shape.width
    small, large = 3 * 2 * w**3, 2 * (2 * w * w * 4 * w) + 2 * w**3
    flops = NEWTON_SCHULZ * (4 * small + 2 * large) * shape.depth / processes
    return Step("optimizer", 0.0, bf16_flops=flops)


def head_steps(shape: Shape, tokens: float, head: str) -> tuple[list[Step], float]:
    """The products of the output head for a micro-batch, and bytes of the loss for a logit. Raises KeyError."""
    m, k, n = tokens, shape.width, shape.vocabulary
    if head == "fp8":  # the loss's kernel makes the codes of grad_output
        products = [step for step in fp8_steps(m, k, n) if not step.name.startswith("grad_output")]
    else:
        products = [gemm_step("head", *dims, False, False, False) for dims in ((m, n, k), (m, k, n), (n, k, m))]
    return products, FUSED_LOGIT + ADDITION * k / min(CHUNKS[head], m) if head else LOGIT


def groups(
    shape: Shape,
    method: str | Recipe,
    machine: Machine,
    *,
    micro_batch: int,
    total_batch: int,
    windowed: bool = False,
    head: str = "",
) -> dict[str, list[Step]]:
    """The kernels of an optimizer step, by group. micro_batch, total_batch: in tokens. head: of CHUNKS, or ""."""
    count, weights = total_batch / micro_batch, shape.block_weights + shape.head_weights
    # In a whole model the kernels that make inputs find their largest values.
    blocks = [s for s in block_steps(method, shape.width, micro_batch, machine) if s.name != "input: amax"]
    recipe = get_recipe(method)
    glue = GLUE[("fp8" if recipe.name == "fp8" else "codes") if recipe.quantizes else "bf16"] / GLUE_SHARE
    products, logit = head_steps(shape, micro_batch, head)
    return {
        "linear layers": [step for _ in range(shape.depth) for step in blocks] * round(count),
        "head": products * round(count),
        "attention": [attention_step(shape, total_batch, mean_keys(SEQUENCE, windowed))],
        "glue": [Step("glue", glue * shape.width * shape.depth * total_batch)],
        "loss": [Step("loss", logit * shape.vocabulary * total_batch)],
        "weights": [Step("weights", (CAST + ACCUMULATE) * weights * count)],
        "optimizer": [optimizer_step(shape), Step("update", UPDATE * weights)],
    }


def step_ms(shape: Shape, method: str | Recipe, machine: Machine, *, band: str = "", **batch) -> float:
    """Milliseconds of a mean optimizer step of a run. Takes the arguments of `groups`, and predicted_ms's band."""
    recipe = get_recipe(method)
    if recipe.late:
        start, last = recipe.late
        before, after = (step_ms(shape, r, machine, band=band, **batch) for r in (replace(recipe, late=None), last))
        return start * before + (1 - start) * after
    if recipe.kept_blocks:
        kept = max(1, round(recipe.kept_blocks * shape.depth)) / shape.depth
        parts = replace(recipe, kept_blocks=0.0), "bf16"
        rest, bf16 = (step_ms(shape, part, machine, band=band, **batch) for part in parts)
        return (1 - kept) * rest + kept * bf16
    steps = [*itertools.chain.from_iterable(groups(shape, _plain(recipe), machine, **batch).values())]
    times = {i: predicted_ms(s, machine, band) for i, s in {id(s): s for s in steps}.items()}  # few differ
    total = 0.0
    for step in steps:
        total += times[id(step)]
    extra = _second_terms(recipe.output.a, recipe.output.b, shape, batch["micro_batch"])
    total += batch["total_batch"] / batch["micro_batch"] * sum(predicted_ms(step, machine, band) for step in extra)
    if recipe.output.b.feedback:
        slower, wider = MACHINES["h200"].bandwidth / machine.bandwidth, shape.width / MEASURED.width
        slower, wider = min(slower, 1.0) if band == "best" else slower, max(wider, 1.0) if band == "worst" else wider
        total += FEEDBACK_MS * shape.block_weights / MEASURED.block_weights * wider * slower
    return total


def _second_terms(a: Operand, b: Operand, shape: Shape, micro_batch: int) -> Iterator[Step]:
    """Of each operand with two terms: what its rounding left is rounded, and one more product of 4-bit operands."""
    for k, n in block_layers(shape.width) * shape.depth:
        for operand, name, elements, source in ((a, "input", micro_batch * k, BF16), (b, "weight", n * k, 4.0)):
            if operand.terms == 2:
                yield from quantize_steps(name, elements, source + CODES, operand.rounding, decode=False)
                yield gemm_step("output", micro_batch, n, k, True, True, True)


def tokens_per_second(shape: Shape, method: str, machine: Machine, *, micro_batch: int, **kwargs) -> dict[str, float]:
    """Expected ("") speed, and its band: "best", "worst". Takes the arguments of `groups`, and fp8_tuned."""
    total = kwargs.setdefault("total_batch", 524288)
    sm_120 = machine.longer > 1  # elsewhere no FP8 ran on another GPU's kernels
    tuned = TUNED_FP8 if method == "fp8_tuned" and sm_120 else dict.fromkeys(TUNED_FP8, 1.0)
    method = method.removesuffix("_tuned")
    return {
        band: total * 1e3 * ratio / step_ms(shape, method, machine, micro_batch=micro_batch, band=band, **kwargs)
        for band, ratio in tuned.items()
    }


@dataclass(frozen=True)
class Pauses:
    """Of a run: tokens between two validations, of a validation, and between two checkpoints; 0: none."""

    eval_every: float = 0.0
    eval_tokens: float = 0.0
    save_every: float = 0.0

    def hours(self, shape: Shape, machine: Machine, tokens: float, speed: float) -> tuple[float, float]:
        """Of validations and of checkpoints. A validation's first forward takes a third of training's time, the second
        is in BF16 and not compiled."""
        validations = tokens // self.eval_every + 1 if self.eval_every > 0 else 0.0
        second = sum(predicted_ms(step, machine) for step in uncompiled_forward(shape, 8192)) / 8192 / 1e3
        saves = tokens // self.save_every + 1 if self.save_every > 0 else 0.0
        saving = saves * checkpoint_bytes(shape) / DISK
        return validations * self.eval_tokens * (1 / (3 * speed) + second) / 3600, saving / 3600


SPEEDRUN = Pauses(250 * 524288, 20 * 524288, 1000 * 524288)  # of speedrun_fp4.sh


def uncompiled_forward(shape: Shape, tokens: int) -> list[Step]:
    """The kernels of a forward pass in BF16 that is not compiled."""
    layers = [*(block_layers(shape.width, fused=False) * shape.depth), (shape.width, shape.vocabulary)]
    glue = UNCOMPILED * shape.width * shape.depth + LOGIT * shape.vocabulary
    attention = attention_step(shape, tokens * 2 / 7, mean_keys(SEQUENCE, False))  # two of seven products
    rest = Step("glue, loss, weights", glue * tokens + CAST * (shape.block_weights + shape.head_weights))
    return [*(gemm_step("output", tokens, n, k, False, False, False) for k, n in layers), attention, rest]


def checkpoint_bytes(shape: Shape) -> float:
    """FP32 weights and Muon's momentum; AdamW has two moments of embedding and output head."""
    return 8 * shape.block_weights + 12 * 2 * shape.head_weights


def run_hours(
    shape: Shape, method: str, machine: Machine, tokens: float, pauses: Pauses, **batch
) -> dict[str, tuple[float, float, float]]:
    """(all, validation, checkpoints) in hours of a run, by band. Takes the arguments of tokens_per_second."""
    speeds = tokens_per_second(shape, method, machine, **batch)
    parts = {band: pauses.hours(shape, machine, tokens, speed) for band, speed in speeds.items()}
    return {band: (tokens / speeds[band] / 3600 + sum(two), *two) for band, two in parts.items()}


def estimate(
    machine: Machine,
    depth: int,
    method: str,
    tokens: float,
    pauses: Pauses = Pauses(),
    **batch,  # noqa: B008
) -> str:
    """One line: how fast a run would be, how long it takes, and what fits in a day. A prediction, and labelled so.
    Takes the arguments of tokens_per_second."""
    shape = Shape(depth)
    speed = tokens_per_second(shape, method, machine, **batch)[""]
    hours = run_hours(shape, method, machine, tokens, pauses, **batch)
    low, high = sorted((hours["best"][0], hours["worst"][0]))
    all_of_it, validation, saving = hours[""]
    band = f" ({low:.3g} to {high:.3g})" if high > 1.01 * low else ""
    parts = f", {validation:.2g} of them validation and {saving:.1g} checkpoints" if validation + saving else ""
    day = 86400 * tokens / (3600 * all_of_it)
    return (
        f"{machine.name}, d{depth}, {method}: {speed:,.0f} tokens/s predicted, {all_of_it:.3g} hours{band} "
        f"for {tokens / 1e9:.3g}B tokens{parts}; a day has {day / 1e9:.3g}B, {day / shape.parameters:.1f} per parameter"
    )


def needs(depth: int, shards: int) -> str:
    """One line: memory and disk of a run. FP32 weights, gradients and Muon's momentum; AdamW has two moments."""
    shape = Shape(depth)
    state = 12 * shape.block_weights + 16 * 2 * shape.head_weights
    return (
        f"memory: {state / 2**30:.1f} GiB for weights, gradients and optimizer, activations besides; disk: "
        f"{shards * SHARD_BYTES / 1e9:.0f} GB of text, {checkpoint_bytes(shape) / 1e9:.1f} GB for each checkpoint"
    )


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", default="", help=f"{', '.join(MACHINES)}, or a GPU's name (default: this machine's)")
    add("--depth", type=int, default=20, help="of a nanochat")
    add("--methods", default="bf16,fp8,fp8_tuned,nvidia,tetrajet_v2,clover,clover_search,clover_feedback_late")
    add("--tokens", type=float, default=0.0, help="of the run (default: --ratio)")
    add("--ratio", type=float, default=20.0, help="tokens for each parameter")
    add("--micro-batch", type=int, default=8192, help="tokens of a micro-batch")
    add("--shards", type=int, default=0, help="of text: also print memory and disk")
    add("--eval-every", type=float, default=0.0, help="tokens between two validations: their hours count")
    add("--eval-tokens", type=float, default=0.0, help="of a validation")
    add("--save-every", type=float, default=0.0, help="tokens between two checkpoints: their hours count")
    add("--head", choices=("", *CHUNKS), default="", help="with base_train's --head (default: before it was there)")
    add("--windowed", action="store_true", help="a window pattern SSSL, by a kernel that skips what it leaves out")
    args = parser.parse_args(argv)
    if args.depth < 1 or args.micro_batch < 1 or args.tokens < 0 or args.ratio <= 0:
        raise UserError("--depth and --micro-batch must be at least 1, --tokens and --ratio positive")
    gpu = args.gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    machine = MACHINES.get(gpu) or machine_of(gpu)
    if machine is None:
        raise UserError(f"--gpu: nothing is predicted for {gpu or 'a CPU'}; use one of: {', '.join(MACHINES)}")
    tokens = args.tokens or args.ratio * Shape(args.depth).parameters
    pauses = Pauses(args.eval_every, args.eval_tokens, args.save_every)
    for method in args.methods.split(","):
        if method not in ("bf16", "fp8_tuned") and not is_predictable(method):
            print(f"{machine.name}, d{args.depth}, {method}: not predicted (its kernels are not counted)")
            continue
        batch = {"micro_batch": args.micro_batch, "windowed": args.windowed, "head": args.head}
        print(estimate(machine, args.depth, method, tokens, pauses, **batch))
    if args.shards:
        print(needs(args.depth, args.shards))


if __name__ == "__main__":
    run_main(main)
