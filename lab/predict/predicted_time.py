"""Predicted milliseconds of a mean training step, for a run whose method changes on the way.

Kernels, rounding included, are step_time's. Feedback's share is measured on an H200 and carried over. Second terms are
two more roundings and two more products of the output GEMM. Nothing here was timed on the cards that it speaks of.
"""

from dataclasses import replace
from functools import cache

from lab.study.sweep_runs import method_plan
from nanochat_fp4.nvfp4.recipes import Operand, Recipe
from nanochat_fp4.step_time import (
    MACHINES,
    Machine,
    Shape,
    block_layers,
    gemm_step,
    is_predictable,
    predicted_ms,
    quantize_steps,
    step_ms,
)

BATCH = 524288  # tokens of a step
CARD, DEPTH = "rtx5090", 20  # that tables name
# What feedback adds to a d26 step of 524,288 tokens on an H200: codes take 63.4 ms where clover's take 5.5, the Gram
# matrices every tenth step 446.7 (docs/results/bench_train_feedback.json). Feedback reads the errors of all columns
# before a block of 16, so its time grows as weights times width and with the memory's time a byte. Best: no slower on
# another card. Worst: no faster for a smaller width.
FEEDBACK_MS, MEASURED = 63.4 - 5.5 + 446.7 / 10, Shape(26)

Phases = tuple[tuple[float, Recipe], ...]


def phases_of(run: dict) -> Phases | None:
    """(fraction of the steps, recipe from there on) of a sweep's run, the first at 0; None where they are not known.

    Not known are removed methods, and layers with methods of their own.
    """
    flags = run.get("flags") or (f"--method={run['method']}",)
    try:
        plan = method_plan(flags)
    except ValueError:
        return None
    if plan.layers:
        return None
    return tuple((start, replace(r, late=None)) for start, r in ((0.0, plan.method), *plan.phases))


def computation(run: dict) -> object:
    """Equal for two runs that compute alike for their whole length, however they are called."""
    phases = phases_of(run)
    return run["method"] if phases is None else tuple((at, replace(r, name="", summary="")) for at, r in phases)


def micro_batch_of(machine: Machine) -> int:
    """Tokens of a micro-batch: 16,384 where the memory has room for them."""
    return 16384 if machine is MACHINES["b200"] else 8192


@cache
def recipe_ms(recipe: Recipe, depth: int, machine: Machine, band: str = "") -> float | None:
    """Milliseconds of a step of a nanochat of this depth with one recipe; None where its kernels are not counted."""
    shape, a, b = Shape(depth), recipe.output.a, recipe.output.b
    if recipe.kept_blocks:
        kept = max(1, round(recipe.kept_blocks * depth)) / depth
        rest, bf16 = (recipe_ms(r, depth, machine, band) for r in (replace(recipe, kept_blocks=0.0), Recipe("bf16")))
        return None if rest is None or bf16 is None else (1 - kept) * rest + kept * bf16
    # FEEDBACK_MS is over the rounding of clover's weight, which is rounded as its input is.
    plain = replace(
        recipe, output=replace(recipe.output, a=replace(a, terms=1), b=replace(a if b.feedback else b, terms=1))
    )
    if plain.quantizes and not is_predictable(plain):
        return None
    ms = step_ms(shape, plain, machine, micro_batch=micro_batch_of(machine), total_batch=BATCH, band=band)
    if b.feedback:
        slower, wider = MACHINES["h200"].bandwidth / machine.bandwidth, shape.width / MEASURED.width
        slower, wider = min(slower, 1.0) if band == "best" else slower, max(wider, 1.0) if band == "worst" else wider
        ms += FEEDBACK_MS * shape.block_weights / MEASURED.block_weights * wider * slower
    return ms + _second_terms_ms(a, b, shape, machine, band)


def _second_terms_ms(a: Operand, b: Operand, shape: Shape, machine: Machine, band: str) -> float:
    """Of each operand with two terms: what its rounding left is rounded, and one more product of 4-bit operands."""
    micro_batch, extra = micro_batch_of(machine), []
    for k, n in block_layers(shape.width):
        for operand, name, elements, source in ((a, "input", micro_batch * k, 2.0), (b, "weight", n * k, 4.0)):
            if operand.terms == 2:
                extra += quantize_steps(name, elements, source + 0.5625, operand.rounding, decode=False)
                extra.append(gemm_step("output", micro_batch, n, k, True, True, True))
    return shape.depth * BATCH / micro_batch * sum(predicted_ms(s, machine, band) for s in extra)


def mean_step_ms(phases: Phases | None, depth: int, machine: Machine, band: str = "") -> float | None:
    """Milliseconds of a mean step of a run; None where a phase is not predicted."""
    if phases is None:
        return None
    edges = [*(start for start, _ in phases), 1.0]
    parts = [(end - start, recipe_ms(r, depth, machine, band)) for start, end, (_, r) in zip(edges, edges[1:], phases)]
    return None if any(ms is None for _, ms in parts) else sum(share * ms for share, ms in parts)


def over_clover(run: dict, steps: int) -> float | None:
    """Predicted time of a run over that of clover for `steps` steps, at DEPTH on CARD; None where not predicted."""
    mine, clover = (mean_step_ms(phases_of(r), DEPTH, MACHINES[CARD]) for r in (run, {"method": "clover"}))
    return None if mine is None else mine * run["steps"] / (clover * steps)
