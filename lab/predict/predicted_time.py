"""Predicted milliseconds of a mean training step, for a run whose method changes on the way.

A step with one recipe is step_time's. Nothing here was timed on the cards that it speaks of.
"""

from dataclasses import replace
from functools import cache

from lab.predict.machines import MACHINES, Machine
from lab.predict.step_time import Shape, is_predictable, step_ms
from lab.study.sweep_runs import method_plan
from nanochat_fp4.nvfp4.recipes import Recipe

BATCH = 524288  # tokens of a step
CARD, DEPTH = "rtx5090", 20  # that tables name
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
    if recipe.quantizes and not is_predictable(recipe):
        return None
    return step_ms(Shape(depth), recipe, machine, micro_batch=micro_batch_of(machine), total_batch=BATCH, band=band)


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
