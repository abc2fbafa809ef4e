"""What fits a card: memory of a nanochat's training by count, for each state of the optimizer and each recomputation.

    python -m lab.predict.fits                    # cards of 8 to 32 GB: the table of README
    python -m lab.predict.fits --gpu rtx5060      # d20 on one card; --memory 16 for another, in GiB

The counts are docs/memory.md's. A card gives SHARE of its memory to the tensors, as --device-batch-size=auto does.
"""

import argparse
from typing import NamedTuple

import torch

from lab.predict.machines import MACHINES, Machine
from lab.predict.step_time import (
    BF16,
    CODES,
    DECODE_INSTRUCTIONS,
    SEQUENCE,
    VOCABULARY,
    Shape,
    Step,
    gemm_step,
    predicted_ms,
    step_ms,
)  # fmt: skip
from nanochat_fp4.console import ArgumentParser, parse_finite, table
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.models.cross_entropy import CHUNK_ELEMENTS
from nanochat_fp4.models.optim import STACK_BYTES, STACK_ELEMENTS
from nanochat_fp4.models.optim8bit import BLOCK, STEP_BYTES
from nanochat_fp4.nvfp4.format import BYTES
from nanochat_fp4.nvfp4.methods import get_recipe

SHARE = 0.94  # 6% for fragmentation and libraries
CARDS = (8, 12, 16, 24, 32)  # GiB
MEMORY = {"rtx5060": 8, "rtx5070ti": 16, "rtx5080": 16, "rtxpro4000": 24, "rtx5090": 32, "rtxpro6000": 96, "gb10": 119,
          "h100": 79, "h200": 139, "b200": 178, "gb200": 184, "b300": 268}  # fmt: skip
DEPTHS = (40, 36, 32, 28, 26, 24, 20, 16, 12)
ROWS = 4  # of a micro-batch: with fewer a GEMM is too small for a large GPU
# Bytes a token and block: of each unit of the width, of each head, and besides (bench_memory counts the same).
BLOCK_BYTES = {
    "bf16": {"none": (26.0, 12, 8), "codes": (16.0, 4, 8), "codes-mlp": (16.0, 4, 8), "mlp": (16.0, 12, 4),
             "all": (6.0, 0, 0)},
    "codes": {"none": (21.9375, 12, 12), "codes": (11.9375, 4, 12), "codes-mlp": (7.9375, 4, 8),
              "mlp": (15.125, 12, 4), "all": (6.0, 0, 0)},
}  # fmt: skip
# Bytes a parameter of blocks, head and embedding: weight, gradient, moments. On a GPU an embedding is BF16.
MOMENT = 1 + 4 / BLOCK  # in 8 bits
STATE_BYTES = {"fp32": (12.0, 16.0, 8.0), "lean": (4 + MOMENT, 4 + 2 * MOMENT, 4 + 2 * MOMENT)}
HEAD = 2 + 2 * 4  # bytes a weight of the head: in BF16, its gradient twice
# What codes determine and a backward pass computes again (models/recompute.py). Three numbers for each tensor:
# units of the width that are not kept; columns of its product, in widths; more bytes of glue for each token and unit of
# width (lab.predict.glue, sm_120). torch.compile computes the first tensor again anyway.
AGAIN = {
    "stream after the lambdas": (2, 0, 0.0),
    "queries, keys, values": (6, 3, 4.2),
    "stream into the second norm": (2, 1, 6.0),
    "relu(x)": (4, 4, 4.0),
}
OF_RECOMPUTE = {"none": (), "codes": tuple(AGAIN)[:3], "codes-mlp": tuple(AGAIN)}
LEAN_UPDATE = 100.0  # bytes a parameter that an update in lean takes more: 22.8 ms of d26 on an H200 (dev/LOG.md)
# Cheapest first: (state, recompute). The first one with ROWS rows is taken, else the one with most rows.
LEVELS = [(state, again) for state in STATE_BYTES for again in ("none", "codes", "codes-mlp")]


def activation_bytes(depth: int, recompute: str = "none", kind: str = "codes") -> float:
    """Bytes a token that a d`depth`'s forward pass keeps. kind: "codes" of methods like clover, or "bf16"."""
    shape = Shape(depth)
    per_width, per_head, rest = BLOCK_BYTES[kind][recompute]
    return depth * (per_width * shape.width + per_head * shape.width // 128 + rest) + 6 * shape.width + 16


def again_ms(shape: Shape, method: str, tensor: str, machine: Machine, tokens: float) -> float:
    """Predicted milliseconds for a tensor of AGAIN in one micro-batch: a product, glue, and decoding without FP4."""
    quantized, w, (_, columns, glue) = get_recipe(method).quantizes, shape.width, AGAIN[tensor]
    native, n = quantized and machine.fp4 is not None, columns * shape.width
    steps = [Step("glue", glue * w * tokens)] if glue else []
    if n:
        steps.append(gemm_step("again", tokens, n, w, "fp4" if native else "bf16"))
    if n and quantized and not native:
        sizes = tokens * w, n * w
        steps += [Step("decode", size * (CODES + BF16), size * DECODE_INSTRUCTIONS) for size in sizes]
    return shape.depth * sum(predicted_ms(step, machine) for step in steps)


class Plan(NamedTuple):
    """A training of a d`depth` on one card."""

    depth: int
    state: str
    recompute: str
    rows: float
    kind: str = "codes"

    @property
    def at_rest(self) -> float:
        """Bytes between the passes of a step."""
        shape = Shape(self.depth)
        blocks, head, embedding = STATE_BYTES[self.state]
        codes = BYTES * shape.block_weights if self.kind == "codes" else 2.0 * shape.block_weights  # a cast
        return blocks * shape.block_weights + (head + embedding) * shape.head_weights + codes

    @property
    def peak(self) -> float:
        """Bytes at the peak of a step: a micro-batch's or the update's."""
        shape, tokens = Shape(self.depth), self.rows * SEQUENCE
        loss = HEAD * shape.head_weights + 2.0 * min(CHUNK_ELEMENTS["cuda"], tokens * VOCABULARY)
        stack = min(STACK_ELEMENTS, shape.block_weights) * STACK_BYTES
        if self.state == "lean":  # the stack takes what is free, one matrix at least
            stack = 4 * shape.width**2 * STEP_BYTES
        return self.at_rest + max(tokens * activation_bytes(self.depth, self.recompute, self.kind) + loss, stack)

    @property
    def at_one(self) -> float:
        """The peak of one row."""
        return self._replace(rows=1).peak

    def most_rows(self, memory: float) -> "Plan":
        """With the largest power of two of rows, up to 32, that fits so many bytes; 0 rows where none fits."""
        fitting = (n for n in (32, 16, 8, 4, 2, 1) if self._replace(rows=n).peak <= SHARE * memory)
        return self._replace(rows=next(fitting, 0))

    def tokens_per_second(self, method: str, machine: Machine, total: int = 524288) -> float:
        """Predicted, of a step of so many tokens; recompute as in OF_RECOMPUTE."""
        shape, tokens = Shape(self.depth), int(self.rows * SEQUENCE)
        again = sum(again_ms(shape, method, tensor, machine, tokens) for tensor in OF_RECOMPUTE[self.recompute])
        ms = step_ms(shape, method, machine, micro_batch=tokens, total_batch=total) + total / tokens * again
        if self.state == "lean":
            ms += predicted_ms(Step("update", LEAN_UPDATE * (shape.block_weights + shape.head_weights)), machine)
        return 1e3 * total / ms

    @property
    def flags(self) -> str:
        """base_train's."""
        state = "" if self.state == "fp32" else f"--state={self.state} "
        return (state + ("" if self.recompute == "none" else f"--recompute={self.recompute}")).strip()


def best(depth: int, memory: float) -> Plan:
    """The cheapest plan with ROWS rows, or the one with most rows (0: none fits)."""
    plans = [Plan(depth, *level, 0).most_rows(memory) for level in LEVELS]
    most = max(plans, key=lambda plan: plan.rows)
    if not most.rows:
        return min(plans, key=lambda plan: plan.at_one)._replace(rows=0)
    return next((plan for plan in plans if plan.rows >= ROWS), most)


def next_lever(depth: int, state: str, recompute: str, rows: float, kind: str = "codes") -> str:
    """The next flag of base_train that lowers the peak of a micro-batch, with the GiB it saves by count; or ""."""
    now = Plan(depth, state, recompute, rows, kind)
    for level in [(state, "codes"), (state, "codes-mlp"), ("lean", recompute), (state, "all")]:
        saved = now.peak - now._replace(state=level[0], recompute=level[1]).peak
        if saved > 0.01 * now.peak:
            flag = f"--state={level[0]}" if level[0] != state else f"--recompute={level[1]}"
            return f"{flag} saves {saved / 2**30:.1f} GiB"
    return ""


def cards() -> str:
    """The table of README."""
    lines = ["| card | d20 | deepest |", "|---|---|---|"]
    for card in CARDS:
        plan = best(20, card * 2**30)
        deepest = next((p for depth in DEPTHS if (p := best(depth, card * 2**30)).rows), plan)
        d20, other = (", ".join([rows_of(p), p.state, *{p.recompute} - {"none"}]) for p in (plan, deepest))
        lines.append(f"| {card} GB | {d20} | d{deepest.depth}: {other} |")
    return "\n".join(lines)


def rows_of(plan: Plan) -> str:
    return f"{plan.rows} row{'s' * (plan.rows > 1)}"


def describe(plan: Plan) -> str:
    if not plan.rows:
        return f"needs {plan._replace(rows=1).peak / SHARE / 2**30:.1f} GiB"
    return f"{rows_of(plan)}, {plan.peak / 2**30:.1f} GiB" + (f", `{plan.flags}`" if plan.flags else "")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="", help=f"one card: {', '.join(MEMORY)}")
    parser.add_argument("--memory", type=parse_finite, default=0.0, help="one card, by its GiB")
    parser.add_argument("--depth", type=int, default=20, help="of a nanochat, for one card")
    parser.add_argument("--this", action="store_true", help="this machine's GPU; nothing is printed without one")
    parser.add_argument("--flags", action="store_true", help="print base_train's flags alone")
    args = parser.parse_args(argv)
    if args.depth < 1 or args.memory < 0:
        raise UserError("--depth must be at least 1 and --memory positive")
    if args.gpu and args.gpu not in MEMORY:
        raise UserError(f"--gpu: the memory of {args.gpu} is not known; use one of {', '.join(MEMORY)}, or --memory")
    memory = args.memory or MEMORY.get(args.gpu, 0)
    if args.this and not memory and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    if not memory:
        print("" if args.this else cards())
        return
    plan = best(args.depth, memory * 2**30)
    if args.flags:
        print(plan.flags)
        return
    plans = [Plan(args.depth, *level, 0).most_rows(memory * 2**30) for level in LEVELS]
    other = [d for d in DEPTHS if not plan.rows and d < args.depth and best(d, memory * 2**30).rows]
    print(f"d{args.depth} on {memory:.0f} GiB: {describe(plan)}" + (f"; d{other[0]} fits" if other else ""))
    machine = MACHINES.get(args.gpu)
    lines = [[p.state, p.recompute, p.rows, f"{p._replace(rows=max(1, p.rows)).peak / 2**30:.1f}"] for p in plans]
    names = ["state", "recompute", "rows", "GiB at the peak, of 1 row at least"]
    if machine is not None:
        names.append("clover tokens/s, predicted")
        for line, p in zip(lines, plans):
            line.append(f"{p.tokens_per_second('clover', machine):,.0f}" if p.rows else "-")
    print(table(names, lines))
    paper = min((Plan(20, *level, 1) for level in LEVELS), key=lambda p: p.peak)
    print(
        f"the paper's d20 needs {paper.peak / SHARE / 2**30:.1f} GiB at least, for {rows_of(paper)} with {paper.flags}"
    )


if __name__ == "__main__":
    run_main(main)
