"""How long a training step takes on a GPU that is not here: a prediction from bytes, instructions and FLOPs.

    python -m nanochat_fp4.step_time --gpu rtx5090 --depth 20 --methods clover,fp8      # tokens/s, hours, a day

A kernel must move each of its tensors once. Our own kernels are bound by instructions: their number at the share of
the issue rate that such kernels reach on an H200, with a BAND around it. For the rest of a step:

    attention    7 products of 2 * keys * width for each token and layer, at ATTENTION_SHARE of the BF16 rate
    glue         GLUE bytes for each token, layer and unit of width: norms, residuals, rotary, ReLU^2, both passes
    loss         LOGIT bytes for each token and entry of the vocabulary, and the head's three products in BF16
    weights      for each micro-batch: the cast of the FP32 weights to BF16, and the gradients' accumulation in FP32
    optimizer    Muon's Newton-Schulz steps, and UPDATE bytes a parameter, once a step

GLUE is measured: our BF16 step on an H200 (d26, 780.7 ms for 65,536 tokens, docs/results/bench_train.json of d3bf343)
less the other lines. lab.predict compares the predictions with measured and published times.
"""

import argparse
import itertools
import math
import re
from dataclasses import dataclass

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
    multiprocessors: 0 where idle ones cost nothing (at 145 W power is the limit, and the others run faster)."""

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
        "data sheet (8000 GB/s, 2250 and 9000 TFLOP/s dense) times an H200's achieved shares", 0.75, None, 5.0, 148,
    ),
    "rtx5090": Machine(
        "RTX 5090", *RTX5090_FIT[:3], 170 * 128 * 2.41e9 / 1e12, FITTED, 1.7, None, RTX5090_FIT[3], 170,
    ),
    "rtxpro4000": Machine(
        "RTX PRO 4000", *PRO4000_FIT[:3], 70 * 128 * 2.41e9 / 1e12, FITTED, 1.7, None, PRO4000_FIT[3], 0,
    ),
    # The same chip as the RTX 5090 with 188 of its multiprocessors and the same memory.
    "rtxpro6000": Machine(
        "RTX PRO 6000", RTX5090_FIT[0], *(188 / 170 * v for v in RTX5090_FIT[1:3]), 188 * 128 * 2.41e9 / 1e12,
        "the RTX 5090's, times 188 / 170 multiprocessors where they count", 1.7, None, RTX5090_FIT[3], 188,
    ),
}  # fmt: skip


def predicted_ms(step: Step, machine: Machine, band: str = "") -> float:
    """A kernel takes as long as the slowest of memory, instructions and tensor cores. The band is "" for the expected
    time, "best" for a full issue rate, or "worst" for BAND of the expected rate."""
    gemm = step.bf16_flops / machine.bf16 + step.fp8_flops / (machine.fp8 or 2 * machine.bf16)
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
GLUE, LOGIT, UPDATE = 168.0, 20.0, 30.0  # bytes
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


def mean_keys(sequence: int, windowed: bool, share: int = 4) -> float:
    """Mean keys of a causal query. windowed: three layers of four (SSSL) look at one `share`th of the sequence."""
    short = sequence / share - (sequence / share) ** 2 / (2 * sequence)
    return (3 * short + sequence / 2) / 4 if windowed else sequence / 2


def attention_step(shape: Shape, tokens: float, keys: float) -> Step:
    return Step("attention", 0.0, bf16_flops=14 * keys * shape.width * shape.depth * tokens / ATTENTION_SHARE)


def optimizer_step(shape: Shape, processes: int = 1) -> Step:
    """Muon is sharded over the processes."""
    w = shape.width
    small, large = 3 * 2 * w**3, 2 * (2 * w * w * 4 * w) + 2 * w**3
    flops = NEWTON_SCHULZ * (4 * small + 2 * large) * shape.depth / processes
    return Step("optimizer", UPDATE * (shape.block_weights + shape.head_weights), bf16_flops=flops)


def groups(
    shape: Shape, method: str | Recipe, machine: Machine, *, micro_batch: int, total_batch: int, windowed: bool = False
) -> dict[str, list[Step]]:
    """The kernels of an optimizer step, by group. micro_batch, total_batch: in tokens."""
    count, weights = total_batch / micro_batch, shape.block_weights + shape.head_weights
    m, k, n = micro_batch, shape.width, shape.vocabulary
    blocks = block_steps(method, k, m, machine)
    head = [gemm_step("head", *dims, False, False, False) for dims in ((m, n, k), (m, k, n), (n, k, m))]
    return {
        "linear layers": [step for _ in range(shape.depth) for step in blocks] * round(count),
        "head": head * round(count),
        "attention": [attention_step(shape, total_batch, mean_keys(SEQUENCE, windowed))],
        "glue": [Step("glue", GLUE * shape.width * shape.depth * total_batch)],
        "loss": [Step("loss", LOGIT * shape.vocabulary * total_batch)],
        "weights": [Step("weights", (CAST + ACCUMULATE) * weights * count)],
        "optimizer": [optimizer_step(shape)],
    }


def step_ms(*args, band: str = "", **kwargs) -> float:
    """Milliseconds of an optimizer step. Takes the arguments of `groups`, and predicted_ms's band."""
    times: dict[Step, float] = {}
    total = 0.0
    for step in itertools.chain.from_iterable(groups(*args, **kwargs).values()):
        if step not in times:
            times[step] = predicted_ms(step, args[2], band)
        total += times[step]
    return total


def tokens_per_second(shape: Shape, method: str, machine: Machine, *, micro_batch: int, **kwargs) -> dict[str, float]:
    """Expected ("") speed, and its band: "best", "worst". Takes the arguments of `groups`."""
    total = kwargs.setdefault("total_batch", 524288)
    return {
        band: total * 1e3 / step_ms(shape, method, machine, micro_batch=micro_batch, band=band, **kwargs)
        for band in ("", "best", "worst")
    }


def estimate(machine: Machine, depth: int, method: str, tokens: float, micro_batch: int, windowed: bool = False) -> str:
    """One line: how fast a run would be, how long it takes, and what fits in a day. A prediction, and labelled so."""
    shape = Shape(depth)
    speed = tokens_per_second(shape, method, machine, micro_batch=micro_batch, windowed=windowed)
    hours, day = {name: tokens / rate / 3600 for name, rate in speed.items()}, speed[""] * 86400
    low, high = sorted((hours["best"], hours["worst"]))
    band = f" ({low:.3g} to {high:.3g})" if high > 1.01 * low else ""
    return (
        f"{machine.name}, d{depth}, {method}: {speed['']:,.0f} tokens/s predicted, {hours['']:.3g} hours{band} "
        f"for {tokens / 1e9:.3g}B tokens; a day has {day / 1e9:.3g}B, {day / shape.parameters:.1f} per parameter"
    )


def needs(depth: int, shards: int) -> str:
    """One line: memory and disk of a run. FP32 weights, gradients and Muon's momentum; AdamW has two moments."""
    shape = Shape(depth)
    tables = 2 * shape.head_weights  # embedding and output head
    state, saved = 12 * shape.block_weights + 16 * tables, 8 * shape.block_weights + 12 * tables
    return (
        f"memory: {state / 2**30:.1f} GiB for weights, gradients and optimizer, activations besides; "
        f"disk: {shards * SHARD_BYTES / 1e9:.0f} GB of text, {saved / 1e9:.1f} GB for each checkpoint"
    )


def evaluation_hours(machine: Machine, depth: int, method: str, tokens: float, every: float, evaluated: float) -> float:
    """Hours of the validations of a run, one each `every` tokens, of `evaluated` tokens in two forwards.

    A forward pass counts as a third of a step.
    """
    shape = Shape(depth)
    rates = [tokens_per_second(shape, m, machine, micro_batch=8192)[""] for m in (method, "bf16")]
    return (tokens // every + 1) * evaluated / 3 * sum(1 / rate for rate in rates) / 3600


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", default="", help=f"{', '.join(MACHINES)}, or a GPU's name (default: this machine's)")
    add("--depth", type=int, default=20, help="of a nanochat")
    add("--methods", default="bf16,fp8,nvidia,tetrajet_v2,clover,clover_search")
    add("--tokens", type=float, default=0.0, help="of the run (default: --ratio)")
    add("--ratio", type=float, default=20.0, help="tokens for each parameter")
    add("--micro-batch", type=int, default=8192, help="tokens of a micro-batch")
    add("--shards", type=int, default=0, help="of text: also print memory and disk")
    add("--eval-every", type=float, default=0.0, help="tokens between two validations: also print their hours")
    add("--eval-tokens", type=float, default=0.0, help="of a validation")
    add("--windowed", action="store_true", help="a window pattern SSSL, by a kernel that skips what it leaves out")
    args = parser.parse_args(argv)
    if args.depth < 1 or args.micro_batch < 1 or args.tokens < 0 or args.ratio <= 0:
        raise UserError("--depth and --micro-batch must be at least 1, --tokens and --ratio positive")
    gpu = args.gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    machine = MACHINES.get(gpu) or machine_of(gpu)
    if machine is None:
        raise UserError(f"--gpu: nothing is predicted for {gpu or 'a CPU'}; use one of: {', '.join(MACHINES)}")
    tokens = args.tokens or args.ratio * Shape(args.depth).parameters
    for method in args.methods.split(","):
        if method != "bf16" and not is_predictable(method):
            print(f"{machine.name}, d{args.depth}, {method}: not predicted (its kernels are not counted)")
            continue
        print(estimate(machine, args.depth, method, tokens, args.micro_batch, args.windowed))
        if args.eval_every > 0:
            hours = evaluation_hours(machine, args.depth, method, tokens, args.eval_every, args.eval_tokens)
            print(f"  and {hours:.2g} hours for validation; mid-training, SFT and benchmarks are not predicted")
    if args.shards:
        print(needs(args.depth, args.shards))


if __name__ == "__main__":
    run_main(main)
