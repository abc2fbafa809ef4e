"""Figure 9: does the mean of many quantized backward passes approach the unquantized one?"""

import functools
import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import nanochat_fp4 as nf
from lab import RESULTS
from lab.study.reproduce_common import Context, Outcome, trained_model
from nanochat_fp4.errors import UserError
from nanochat_fp4.evaluation import plots
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe

FIG9_METHODS = ("nvidia", "four_over_six", "four_over_six_biased", "tetrajet_v2", "clover", "clover_search")
# The authors' curves (Quartet-II, data/*_concentration.json), of Llama-3.2-1B with an unquantized forward. The error is
# of q, k and v of block 0, for B = 1, 4, 16, 64, 256 and 1024.
PUBLISHED = {
    "nvidia": (1.1, 2.0e-1, 5.6e-2, 1.5e-2, 5.4e-3, 9.4e-4),
    "four_over_six_biased": (1.4, 2.8e-1, 1.8e-1, 1.0e-1, 1.1e-1, 1.1e-1),
    "tetrajet_v2": (4.4, 7.7e-1, 2.2e-1, 5.7e-2, 1.4e-2, 3.0e-3),
    "clover": (5.6e-1, 1.9e-1, 6.8e-2, 1.8e-2, 5.6e-3, 1.5e-3),
}


def backward_left_alone(recipe: Recipe) -> Recipe:
    """The recipe with an exact backward pass. An operand is taken from the recipe's source, and is not rounded.

    The source is the forward's values or the unquantized ones.
    """
    gemms = {name: getattr(recipe, name) for name in ("grad_input", "grad_weight")}
    exact = {name: Gemm(Operand(), Operand(raw=gemm.b.raw)) for name, gemm in gemms.items()}
    return replace(recipe, name=f"{recipe.name}, exact backward", **exact)


# "exact": an unquantized forward. The recipe's backward pass takes its tensors instead of codes, as the published
# classes do with disable_forward_quant.
FORWARDS = {
    "quantized": lambda recipe: recipe,
    "exact": lambda recipe: replace(recipe, name=f"{recipe.name}, exact forward", output=Gemm(Operand(), Operand())),
}

STYLES = {"exact": {"marker": "o", "markersize": 3}, "quantized": {"linewidth": 0.8, "alpha": 0.6}}


def block_gradients(model, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the loss for q, k and v of block 0, float64: the furthest from the loss, so that all rounding
    is in them."""
    attention = model.transformer.h[0].attn
    grads = torch.autograd.grad(model(x, y), [attention.c_q.weight, attention.c_k.weight, attention.c_v.weight])
    return [g.double() for g in grads]


def concentration(model, recipe: Recipe, x: torch.Tensor, y: torch.Tensor, draws: Sequence[int]) -> dict:
    """{"single": mean error of one pass, "errors": {B: that of the mean of B passes}} against the unquantized backward
    of the same forward: relative squares, the mean of those of q, k and v, as in the authors' notebook."""
    nf.convert(model, backward_left_alone(recipe), verbose=False)
    targets = block_gradients(model, x, y)

    def error(gradients: list[torch.Tensor]) -> float:
        return sum(float((g - t).square().sum() / t.square().sum()) for g, t in zip(gradients, targets)) / len(targets)

    nf.convert(model, recipe, verbose=False)
    totals, single, errors = [torch.zeros_like(t) for t in targets], 0.0, {}
    torch.manual_seed(0)
    for b in range(1, draws[-1] + 1):
        gradients = block_gradients(model, x, y)
        single += error(gradients)
        for total, gradient in zip(totals, gradients):
            total += gradient
        if b in draws:
            errors[b] = error([total / b for total in totals])
    return {"single": single / draws[-1], "errors": errors}


def slope(errors: dict[int, float]) -> float:
    """Of log error over log B, least squares through the three largest B: -1 without a bias, 0 on a plateau."""
    points = [(math.log(b), math.log(e)) for b, e in sorted(errors.items())][-3:]
    return statistics.linear_regression(*zip(*points)).slope


def fig9(context: Context) -> Outcome:
    draws = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    draws = [b for b in draws if b <= (context.args.draws or (32 if context.quick else 1024))]
    trained = functools.cache(lambda: trained_model(context, "d8"))
    curves: dict[str, dict[str, dict]] = {forward: {} for forward in FORWARDS}
    if context.args.results:
        return outcome_of(*stored_curves(context.args.results))
    for forward, method in itertools.product(FORWARDS, FIG9_METHODS):

        def compute(forward=forward, method=method):
            (model, x, y), tag, data = trained()
            value = concentration(model, FORWARDS[forward](get_recipe(method)), x, y, draws)
            return value | {"measured_on": f"{tag}, data {Path(data).name}, a batch of 4 validation sequences"}

        settings = {"method": method, "draws": draws, "forward": forward}
        value = context.piece("fig9", settings | context.trained_on(), compute)
        value["errors"] = {int(b): e for b, e in value["errors"].items()}
        curves[forward][method] = value
    return outcome_of(curves, curves["exact"][FIG9_METHODS[0]]["measured_on"], None)


def stored_curves(name: str) -> tuple[dict, str, dict]:
    """(curves by forward and method, what they were measured on, where) of lab/results/fig9.json. Raises UserError."""
    content = json.loads((RESULTS / "fig9.json").read_text())
    if name not in content:
        raise UserError(f"--results={name}: lab/results/fig9.json has {', '.join(content)}")
    stored = content[name]
    for value in (value for of in stored["curves"].values() for value in of.values()):
        value["errors"] = {int(b): e for b, e in value["errors"].items()}
    return stored["curves"], stored["measured_on"], stored["environment"]


def outcome_of(curves: dict[str, dict[str, dict]], measured_on: str, environment: dict | None) -> Outcome:
    """The table and the plot."""
    methods = list(next(iter(curves.values())))
    draws = list(next(iter(next(iter(curves.values())).values()))["errors"])
    # The paper's Figure 9 and Appendix A.
    paper = dict.fromkeys(FIG9_METHODS, "1/B")
    paper |= {"four_over_six_biased": "plateau", "four_over_six": "-", "clover_search": "-"}
    rows = []
    for forward, method in itertools.product(curves, methods):
        curve = curves[forward][method]
        last, one = curve["errors"][draws[-1]], curve["single"]
        numbers = [round(slope(curve["errors"]), 2), round(one / last, 1), f"{one:.3g}", f"{last:.2g}"]
        rows.append([forward, method, paper[method], *numbers])

    def plot(axes) -> None:
        for method, color in zip(methods, (*plots.COLORS, "k")):
            for forward, style in ((f, STYLES[f]) for f in curves):
                errors = curves[forward][method]["errors"]
                axes.loglog(list(errors), list(errors.values()), color=color, **style)
            axes.plot([], [], color=color, label=method)
            if method in PUBLISHED:
                axes.loglog([4**i for i in range(6)], PUBLISHED[method], "x--", markersize=4, color=color)
        first = max(c["single"] for of in curves.values() for c in of.values())
        axes.loglog(draws, [first / b for b in draws], "k:", label="1/B")
        axes.set_xlabel("backward passes averaged, B")
        axes.set_ylabel("relative square error, q, k, v of block 0")

    title = "Figure 9: concentration of the mean of B quantized backward passes"
    header = ["forward", "method", "paper", "slope", f"gain of {draws[-1]}", "error of one pass", f"of {draws[-1]}"]
    notes = [
        f"slope of log error over log B through the last points: -1 unbiased, towards 0 a plateau; gain: the mean of "
        f"{draws[-1]} passes against one",
        "the model is trained in bf16 and then converted, as in the paper; forward exact, circles: unquantized, as in "
        "the authors' notebook; quantized, thin lines: the method's own, and the target is its exact backward",
        "crosses: the authors' curves, an unquantized forward of Llama-3.2-1B and one sentence, another model and "
        "text, which do not compare in magnitude",
    ]
    return Outcome(title, header, rows, notes, {"curves": curves}, plot, measured_on, environment)
