"""How long a training step takes on a GPU that is not here: a prediction from bytes, instructions and FLOPs.

    python -m lab.predict.step_time --gpu rtx5090 --depth 20 --methods clover,fp8      # tokens/s, hours, a day

A kernel moves each of its tensors once. Our own kernels are bound by instructions: their number at the share of the
issue rate that they reach on an H200, with a BAND around it. The rest of a step are bytes and FLOPs (`groups`).
lab.predict compares with measured and published times.
"""

import argparse
import math
from dataclasses import dataclass, replace

import torch

from lab.predict.machines import LONGER, MACHINES, Machine, machine_of
from nanochat_fp4.console import ArgumentParser, parse_finite
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import get_rounding
from nanochat_fp4.nvfp4.recipes import Recipe

TOKENS = 8 * 2048  # the paper, Appendix D.1: batch 8, sequence 2048
BF16, CODES = 2.0, 0.5 + 1 / 16  # Bytes of an element in BF16, and as a code. 16 codes share an E4M3 scale.
ELEMENT = {"bf16": BF16, "fp8": 1.0, "fp4": CODES}
PSEUDO = 2 / 16 + 4 / 128  # MS-EDEN has a BF16 pseudo-scale for 16 elements and S for 128.

# Instructions per element, output and candidate of a kernel: `python -m lab.measure.instructions 90`, with Triton 3.6.
# After a rotation, codes take PACK more than BF16.
ROWS_INSTRUCTIONS, SQUARE_INSTRUCTIONS, ROTATED_INSTRUCTIONS, PACK_INSTRUCTIONS = 19.5, 49.0, 15.0, 4.0
EDEN_INSTRUCTIONS, STOCHASTIC_INSTRUCTIONS = 7.0, 18.0
CANDIDATE_INSTRUCTIONS, STOCHASTIC_CANDIDATE_INSTRUCTIONS = 14.0, 32.0  # of each further candidate
DECODE_INSTRUCTIONS, ROTATED_DECODE_INSTRUCTIONS = 12.0, 8.0  # to memory, and before a rotation
AMAX_INSTRUCTIONS, DERIVATIVE_INSTRUCTIONS, FINISH_INSTRUCTIONS = 5.0, 8.9, 60.0  # ReLU^2's: 8.0 on sm_120; a scale's

# Shares of the issue rate that kernels reach on an H200 (dev/LOG.md, 2026-11-22): along rows 0.75, those that rotate
# 0.42 to 0.44, but 0.76 for their search (2026-11-25). Elsewhere the truth lies between a full rate and BAND of these.
ROWS_ISSUE, ROTATED_ISSUE, BAND = 0.76, 0.43, 0.7
GEMM_TILE = 128  # rows and columns of a tensor-core kernel's tile. The last wave is whole, however few tiles it has.
FP8_ELEMENT = 5.0  # bytes to make an FP8 operand (2 read, 1 written) and its transpose (1 read, 1 written)


@dataclass(frozen=True)
class Step:
    """One kernel. issue: the expected share of the issue rate. tiles: of a GEMM's output, 0 where they do not count."""

    name: str
    num_bytes: float
    instructions: float = 0.0
    bf16_flops: float = 0.0
    fp4_flops: float = 0.0
    fp8_flops: float = 0.0
    issue: float = 1.0
    tiles: int = 0


def predicted_ms(step: Step, machine: Machine, band: str = "") -> float:
    """A kernel takes as long as the slowest of memory, instructions and tensor cores. band: "" is the expected time,
    "best" a full issue rate and the fastest FP4 GEMM, "worst" BAND of the expected issue rate and the slowest GEMM."""
    gemm = step.bf16_flops / machine.bf16 + step.fp8_flops / (machine.fp8 or 2 * machine.bf16)
    if machine.fp4:
        best = band == "best" or machine.cublaslt is None
        gemm += step.fp4_flops / (machine.fp4 if best else machine.cublaslt[band == "worst"])
    if 0 < machine.multiprocessors <= step.tiles:  # fewer tiles are split along K
        gemm *= math.ceil(step.tiles / machine.multiprocessors) * machine.multiprocessors / step.tiles
    issue = {"": step.issue, "best": 1.0, "worst": step.issue * BAND}[band]
    instructions = step.instructions * machine.longer / (machine.instructions * issue)
    return max(step.num_bytes / machine.bandwidth / 1e6, instructions / 1e9, gemm / 1e9) + machine.launch / 1e3


def _search(rounding: str) -> float:
    spec = get_rounding(rounding)
    more = STOCHASTIC_CANDIDATE_INSTRUCTIONS if spec.stochastic else CANDIDATE_INSTRUCTIONS
    return more * (len(spec.candidates) - 1)


def _instructions(rounding: str, base: float) -> float:
    spec = get_rounding(rounding)
    base += EDEN_INSTRUCTIONS * spec.ms_eden + STOCHASTIC_INSTRUCTIONS * spec.stochastic
    return base + _search(rounding)


def quantize_steps(name: str, elements: float, source: float, rounding: str, decode: bool) -> list[Step]:
    """Along the rows as they lie in memory, from `source` bytes an element: amax, then codes (and the decode)."""
    spec, num_bytes = get_rounding(rounding), elements * (source + CODES + (BF16 if decode else 0.0))
    work = elements * _instructions(rounding, SQUARE_INSTRUCTIONS if spec.block_rows > 1 else ROWS_INSTRUCTIONS)
    amax = Step(f"{name}: amax", elements * source, elements * AMAX_INSTRUCTIONS, issue=ROWS_ISSUE)
    return [amax, Step(f"{name}: {spec.name}", num_bytes, work, issue=ROWS_ISSUE)]


def rotate_steps(name: str, elements: float, source: float, roundings: list[str], emulated: bool) -> list[Step]:
    """One pass that makes len(roundings) operands of a tensor; before it one for amax where a rounding needs that."""
    decode = {CODES: ROTATED_DECODE_INSTRUCTIONS, BF16 + 1: DERIVATIVE_INSTRUCTIONS}.get(source, 0.0)
    written, instructions, aligned = 0.0, 0.0, 0
    for rounding in roundings:
        ms_eden = get_rounding(rounding).ms_eden
        written += (BF16 if emulated else CODES) + (PSEUDO if ms_eden else 0.0)
        pack = 0.0 if emulated or ms_eden else PACK_INSTRUCTIONS
        instructions += _instructions(rounding, ROTATED_INSTRUCTIONS + decode + pack)
        aligned += not ms_eden
    work = elements * (AMAX_INSTRUCTIONS + decode) * aligned
    steps = [Step(f"{name}: amax", elements * source, work, issue=ROTATED_ISSUE)] if aligned else []
    others = instructions - (search := sum(map(_search, roundings)))
    issue = instructions / (others / ROTATED_ISSUE + search / ROWS_ISSUE)
    what = f"{name}: {' and '.join(get_rounding(r).name for r in roundings)}"
    steps.append(Step(what, elements * (source + written), elements * instructions, issue=issue))
    if not emulated and aligned < len(roundings):
        blocks = elements / 16 * (len(roundings) - aligned)
        steps.append(Step(f"{name}: scales", 16 * blocks * (PSEUDO + 1 / 16), blocks * FINISH_INSTRUCTIONS))
    return steps


def gemm_step(name: str, m: int, n: int, k: int, kind: str = "bf16") -> Step:
    num_bytes = ELEMENT[kind] * (m * k + n * k) + BF16 * m * n
    return Step(name, num_bytes, tiles=output_tiles(m, n), **{f"{kind}_flops": 2.0 * m * n * k})


def output_tiles(m: int, n: int) -> int:
    return math.ceil(m / GEMM_TILE) * math.ceil(n / GEMM_TILE)


def fp8_steps(m: int, k: int, n: int) -> list[Step]:
    """Of method fp8: both GEMM operands of every product in FP8, transposed copies of those of the forward."""
    made = {"input": m * k * FP8_ELEMENT, "weight": n * k * (FP8_ELEMENT + 2), "grad_output": m * n * FP8_ELEMENT}
    steps = [Step(f"{name}: to FP8", num_bytes) for name, num_bytes in made.items()]
    shapes = {"output": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}
    return steps + [gemm_step(name, *dims, "fp8") for name, dims in shapes.items()]


def layer_steps(recipe: Recipe, m: int, k: int, n: int, *, backward: bool, native: bool, square=False) -> list[Step]:
    """The kernels of a layer (m tokens, k in_features, n out_features) as linear.py launches them. native: operands
    stay 4-bit (a Blackwell's GEMM), else they are made in BF16 as well. square: grad_output is that of ReLU^2."""
    if recipe.name == "fp8" and backward:
        return fp8_steps(m, k, n)
    forward, dgrad, wgrad = recipe.output, recipe.grad_input, recipe.grad_weight
    fp4 = "fp4" if native else "bf16"  # of a product of two quantized operands
    steps: list[Step] = []
    for name, elements, source, o in (("input", m * k, BF16, forward.a), ("weight", n * k, 4.0, forward.b)):
        if o.rounding:
            steps += quantize_steps(name, elements, source, o.rounding, decode=not native)
        elif source > BF16:
            steps.append(Step(f"{name}: to BF16", elements * (source + BF16)))
    if backward and wgrad.b.raw:
        steps += rotate_steps("input^T", m * k, BF16, [wgrad.b.rounding], emulated=False)
    steps.append(gemm_step("output", m, n, k, fp4 if forward.a.rounding and forward.b.rounding else "bf16"))
    if not backward:
        return steps
    if e := [g.a.rounding for g in (dgrad, wgrad) if g.a.rounding]:
        steps += rotate_steps("grad_output", m * n, BF16 + square, e, emulated=not native)
    products = []
    for name, elements, unquantized, gemm, kept, product in (
        ("weight^T", n * k, 4.0, dgrad, forward.b.rounding, ("grad_input", m, k, n)),
        ("input^T", m * k, BF16, wgrad, forward.a.rounding, ("grad_weight", n, k, m)),
    ):
        if gemm.b.raw or (gemm.b.rounding is None and kept):
            if not native:  # the codes are decoded for the GEMM
                steps.append(Step(f"{name}: decode", elements * (CODES + BF16), elements * DECODE_INSTRUCTIONS))
        elif gemm.b.rounding:
            source = CODES if kept else unquantized
            steps += rotate_steps(name, elements, source, [gemm.b.rounding], emulated=not native)
        products.append(gemm_step(*product, fp4 if gemm.a.rounding and (gemm.b.rounding or kept) else "bf16"))
    return steps + products


def block_layers(w: int, fused: bool = True) -> tuple[tuple[int, int], ...]:
    """(in_features, out_features) of the linear layers of a block of width w, q, k and v as one or as three."""
    return (*(((w, 3 * w),) if fused else ((w, w),) * 3), (w, w), (w, 4 * w), (4 * w, w))


def block_steps(method: str | Recipe, width: int, tokens: int, machine: Machine, square: bool = False) -> list[Step]:
    """The kernels of the linear layers of a block, forward and backward. square: of c_fc's layer_steps."""
    recipe, layers = get_recipe(method), [(k, n, square and n == 4 * width) for k, n in block_layers(width)]
    how = {"backward": True, "native": machine.fp4 is not None and recipe.quantizes}
    return [step for k, n, own in layers for step in layer_steps(recipe, tokens, k, n, square=own, **how)]


def is_counted(method: str | Recipe) -> bool:
    """Whether a method quantizes, by kernels alone and alike all the time: block_steps has all of its kernels."""
    recipe = get_recipe(method)
    operands = [o for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight) for o in (gemm.a, gemm.b)]
    changes = recipe.late or any(o.terms > 1 or o.feedback for o in operands)
    kernels = all(get_rounding(o.rounding).has_kernels for o in operands if o.rounding)
    return recipe.name == "fp8" or (recipe.quantizes and not changes and kernels)


def _plain(recipe: Recipe) -> Recipe:
    """Without second terms and feedback. FEEDBACK_MS is over the rounding of clover's weight, rounded as its input."""
    a, b = recipe.output.a, recipe.output.b
    output = replace(recipe.output, a=replace(a, terms=1), b=replace(a if b.feedback else b, terms=1))
    return replace(recipe, output=output, late=None, kept_blocks=0.0)


def is_predictable(method: str | Recipe) -> bool:
    """Whether step_ms knows a method: second terms, feedback, phases and blocks in BF16 included."""
    recipe = get_recipe(method)
    return recipe.quantizes and all(is_counted(_plain(r)) for r in (recipe, recipe.final) if r.quantizes)


def break_even(machine: Machine, method: str) -> int | None:
    """The first width, a multiple of 128, from where on a block's linear layers are faster than in BF16."""
    widths = list(range(128, 16384 + 1, 128))
    ms = [[sum(predicted_ms(s, machine) for s in block_steps(of, w, TOKENS, machine)) for w in widths]
          for of in (method, "bf16")]  # fmt: skip
    slower = max((w for w, mine, bf16 in zip(widths, *ms) if mine >= bf16), default=0)
    return slower + 128 if slower < widths[-1] else None


SEQUENCE, VOCABULARY, SHARD_BYTES = 2048, 65536, 100e6  # a shard of FineWeb-Edu as nanochat packs it
LOGIT, UPDATE, CAST, ACCUMULATE = 20.0, 132.0, 6.0, 10.0  # bytes a logit, and a weight (FP32 to BF16, BF16 to FP32)
# GLUE is counted by `python -m lab.predict.glue`. GLUE_SHARE and UPDATE come from a profile of BF16's d26 on an H200
# (docs/results/bench_train.json, 32 rows). Element-wise kernels take 89 ms there. The update takes 30 ms outside of its
# products. "codes" is 92 bytes of the schedule and 12 of ReLU^2's kernel. These 12 are its input and 8 kept bits.
# In "rotated" the rotating kernel computes ReLU^2's derivative (dispatch.multiplies_squares).
GLUE, GLUE_SHARE = {"bf16": 110.0, "fp8": 110.0, "codes": 104.0, "rotated": 84.0}, 110 / 134
# Bytes of the glue of a forward pass that is not compiled, counted in gpt.py: residual scalars 14, norms 16, rotary 36,
# v 4, sums 12, ReLU^2 32. The second validation, in BF16, is one.
UNCOMPILED, DISK = 114.0, 1e9  # DISK: bytes a second of a checkpoint's writing, an ASSUMPTION
# What feedback adds to a d26 step of 524,288 tokens on an H200: codes take 63.4 ms where clover's take 5.5, the Gram
# matrices every tenth step 446.7 (docs/results/bench_train_feedback.json). Feedback reads the errors of all columns
# before a block of 16, so its time grows as weights times width and with the memory's time a byte. Best: no slower on
# another card. Worst: no faster for a smaller width.
FEEDBACK_MS = 63.4 - 5.5 + 446.7 / 10
# A tuned FP8 over an untuned one (sm_89's kernels on sm_120), mdhorton/nanochat_sm120: 1.18 at d16, 1.33 at d12.
TUNED_FP8 = {"": 1.18, "best": 240_038 / 180_890, "worst": 1.0}
ATTENTION_SHARE, NEWTON_SCHULZ = 0.6, 5  # of the BF16 rate; iterations of Muon, of three products each


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

    @property
    def checkpoint_bytes(self) -> int:
        """FP32 weights and Muon's momentum; AdamW has two moments of embedding and output head."""
        return 8 * self.block_weights + 12 * 2 * self.head_weights


def mean_keys(sequence: int, windowed: bool, share: int = 2) -> float:
    """Mean keys of a causal query. windowed: three layers of four (SSSL) look at one `share`th of the sequence: half of
    it in gpt.py, a quarter in the newest nanochat."""
    short = sequence / share - (sequence / share) ** 2 / (2 * sequence)
    return (3 * short + sequence / 2) / 4 if windowed else sequence / 2


def attention_step(shape: Shape, tokens: float, keys: float) -> Step:
    return Step("attention", 0.0, bf16_flops=14 * keys * shape.width * shape.depth * tokens / ATTENTION_SHARE)


def optimizer_step(shape: Shape, processes: int = 1) -> Step:
    """Muon, sharded. In its iterations a weight of attention has 3 products of 2 w^3 FLOPs, one of the MLP has 9."""
    return Step("optimizer", 0.0, bf16_flops=NEWTON_SCHULZ * 60 * shape.width**3 * shape.depth / processes)


def groups(
    shape: Shape, recipe: Recipe, machine: Machine, *, micro_batch: int, total_batch: int, windowed: bool = False
) -> dict[str, tuple[float, list[Step]]]:
    """The kernels of an optimizer step, by group, and how often they run. micro_batch, total_batch: in tokens."""
    count, weights = total_batch / micro_batch, shape.block_weights + shape.head_weights
    square = recipe.input_is_codes and machine.longer == LONGER[120]
    blocks = block_steps(_plain(recipe), shape.width, micro_batch, machine, square)
    second: list[Step] = []  # what a first term's rounding left is rounded, and one more product of 4-bit operands
    for k, n in block_layers(shape.width):
        for o, elements, source in ((recipe.output.a, micro_batch * k, BF16), (recipe.output.b, n * k, 4.0)):
            if o.terms == 2:
                second += quantize_steps("second", elements, source + CODES, o.rounding, decode=False)
                second.append(gemm_step("output", micro_batch, n, k, "fp4"))
    glue = GLUE["rotated" if square else recipe.name if recipe.name in GLUE else "codes"] / GLUE_SHARE
    m, k, n = micro_batch, shape.width, shape.vocabulary
    return {
        "linear layers": (shape.depth * round(count), [s for s in blocks if s.name != "input: amax"]),  # it is in glue
        "second terms": (shape.depth * count, second),
        "head": (round(count), [gemm_step("head", *dims) for dims in ((m, n, k), (m, k, n), (n, k, m))]),
        "attention": (1, [attention_step(shape, total_batch, mean_keys(SEQUENCE, windowed))]),
        "glue": (1, [Step("glue", glue * shape.width * shape.depth * total_batch)]),
        "loss": (1, [Step("loss", LOGIT * shape.vocabulary * total_batch)]),
        "weights": (1, [Step("weights", (CAST + ACCUMULATE) * weights * count)]),
        "optimizer": (1, [optimizer_step(shape), Step("update", UPDATE * weights)]),
    }


def step_ms(shape: Shape, method: str | Recipe, machine: Machine, *, band: str = "", **batch) -> float:
    """Milliseconds of a mean optimizer step of a run. Takes the arguments of `groups`, and predicted_ms's band."""
    recipe = get_recipe(method)
    if recipe.late or recipe.kept_blocks:
        if recipe.late:
            (start, other), rest = recipe.late, replace(recipe, late=None)
        else:
            start, other = 1 - max(1, round(recipe.kept_blocks * shape.depth)) / shape.depth, "bf16"
            rest = replace(recipe, kept_blocks=0.0)
        first, then = (step_ms(shape, r, machine, band=band, **batch) for r in (rest, other))
        return start * first + (1 - start) * then
    kernels = groups(shape, recipe, machine, **batch).values()
    total = sum(times * sum(predicted_ms(step, machine, band) for step in steps) for times, steps in kernels)
    if recipe.output.b.feedback:
        d26, slower = Shape(26), MACHINES["h200"].bandwidth / machine.bandwidth
        slower, wider = min(slower, 1.0) if band == "best" else slower, shape.width / d26.width
        wider = max(wider, 1.0) if band == "worst" else wider
        total += FEEDBACK_MS * shape.block_weights / d26.block_weights * wider * slower
    return total


def tokens_per_second(
    shape: Shape, method: str, machine: Machine, *, total_batch: int = 524288, **batch
) -> dict[str, float]:
    """Expected ("") speed, and its band: "best", "worst". Takes the arguments of `groups`, and fp8_tuned."""
    tuned = TUNED_FP8 if method == "fp8_tuned" and machine.longer == LONGER[120] else dict.fromkeys(TUNED_FP8, 1.0)
    of, batch = method.removesuffix("_tuned"), {**batch, "total_batch": total_batch}
    return {b: total_batch * 1e3 * ratio / step_ms(shape, of, machine, band=b, **batch) for b, ratio in tuned.items()}


def run_hours(
    shape: Shape, method: str, machine: Machine, tokens: float, *,
    eval_every: float = 0.0, eval_tokens: float = 0.0, save_every: float = 0.0, **batch,
) -> dict[str, tuple[float, float, float]]:  # fmt: skip
    """(all, validation, checkpoints) in hours, by band. Takes the arguments of tokens_per_second too. Every 0: none. A
    validation's first forward takes a third of training's time, the second is in BF16 and not compiled."""
    validations, saves = (tokens // every + 1 if every > 0 else 0.0 for every in (eval_every, save_every))
    layers = [*(block_layers(shape.width, fused=False) * shape.depth), (shape.width, shape.vocabulary)]
    num_bytes = (UNCOMPILED * shape.width * shape.depth + LOGIT * shape.vocabulary) * 8192
    second = [gemm_step("output", 8192, n, k) for k, n in layers]
    second.append(attention_step(shape, 8192 * 2 / 7, mean_keys(SEQUENCE, False)))  # two of seven products
    second.append(Step("glue, loss, weights", num_bytes + CAST * (shape.block_weights + shape.head_weights)))
    uncompiled = sum(predicted_ms(step, machine) for step in second) / 8192 / 1e3
    found = {}
    for band, speed in tokens_per_second(shape, method, machine, **batch).items():
        parts = validations * eval_tokens * (1 / (3 * speed) + uncompiled), saves * shape.checkpoint_bytes / DISK
        found[band] = (tokens / speed + sum(parts)) / 3600, parts[0] / 3600, parts[1] / 3600
    return found


def digits(number: float, count: int = 3) -> str:
    """So many significant digits, or all before the point."""
    return f"{number:,.0f}" if number >= 10**count - 0.5 else f"{number:.{count}g}"


def estimate(machine: Machine, depth: int, method: str, tokens: float, **run) -> str:
    """One line: how fast a run would be, how long it takes, and what fits in a day. Takes run_hours's arguments."""
    shape = Shape(depth)
    hours = run_hours(shape, method, machine, tokens, **run)
    low, high, (all_of_it, validation, saving) = *sorted((hours["best"][0], hours["worst"][0])), hours[""]
    band = f" ({digits(low)} to {digits(high)})" if high > 1.01 * low else ""
    parts = f", {digits(validation, 2)} of them validation and {digits(saving, 1)} checkpoints"
    text = f"{digits(all_of_it)} hours{band} for {tokens / 1e9:.3g}B tokens{parts if validation + saving else ''}"
    speed, day = tokens / (all_of_it - validation - saving) / 3600, 24 * tokens / all_of_it
    return (
        f"{machine.name}, d{depth}, {method}: {speed:,.0f} tokens/s predicted, {text}; "
        f"a day has {day / 1e9:.3g}B, {day / shape.parameters:.1f} per parameter"
    )


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--gpu", default="", help=f"{', '.join(MACHINES)}, or a GPU's name (default: this machine's)")
    add("--depth", type=int, default=20, help="of a nanochat")
    add("--methods", default="bf16,fp8,fp8_tuned,nvidia,tetrajet_v2,clover,clover_search,clover_feedback_late")
    add("--tokens", type=parse_finite, default=0.0, help="of the run (default: --ratio)")
    add("--ratio", type=parse_finite, default=20.0, help="tokens for each parameter")
    add("--micro-batch", type=int, default=8192, help="tokens of a micro-batch")
    add("--shards", type=int, default=0, help="of text: also print memory and disk")
    add("--eval-every", type=parse_finite, default=0.0, help="tokens between two validations: their hours count")
    add("--eval-tokens", type=parse_finite, default=0.0, help="of a validation")
    add("--save-every", type=parse_finite, default=0.0, help="tokens between two checkpoints: their hours count")
    add("--windowed", action="store_true", help="a window pattern SSSL, by a kernel that skips what it leaves out")
    args = parser.parse_args(argv)
    if args.depth < 1 or args.micro_batch < 1 or args.tokens < 0 or args.ratio <= 0:
        raise UserError("--depth and --micro-batch must be at least 1, --tokens and --ratio positive")
    gpu = args.gpu or (torch.cuda.get_device_name() if torch.cuda.is_available() else "")
    machine = MACHINES.get(gpu) or machine_of(gpu)
    if machine is None:
        raise UserError(f"--gpu: nothing is predicted for {gpu or 'a CPU'}; use one of: {', '.join(MACHINES)}")
    shape = Shape(args.depth)
    tokens = args.tokens or args.ratio * shape.parameters
    run = {name: vars(args)[name] for name in ("micro_batch", "windowed", "eval_every", "eval_tokens", "save_every")}
    for method in args.methods.split(","):
        if method in ("bf16", "fp8_tuned") or is_predictable(method):
            print(estimate(machine, args.depth, method, tokens, **run))
        else:
            print(f"{machine.name}, d{args.depth}, {method}: not predicted (its kernels are not counted)")
    if args.shards:
        state, saved = (shape.checkpoint_bytes + 4 * shape.parameters) / 2**30, shape.checkpoint_bytes / 1e9
        print(f"memory: {state:.1f} GiB for weights, gradients and optimizer, activations besides; disk: "
              f"{args.shards * SHARD_BYTES / 1e9:.0f} GB of text, {saved:.1f} GB for each checkpoint")  # fmt: skip


if __name__ == "__main__":
    run_main(main)
