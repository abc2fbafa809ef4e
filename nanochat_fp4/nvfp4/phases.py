"""The plan of a run's methods: which method each layer computes with at each point of the run. A plan is one method, or
it varies between layers and over time.

    MethodPlan.parse("clover", layers="*.c_fc=fp8", phases="0.85=bf16")

This plan computes with clover, except for the first layers of the MLPs, which compute with fp8. After 85% of the steps
all layers compute in BF16. Other common plans are these:

- phases="0.85=bf16" switches both passes to BF16 late in the run.
- phases="0.85=fig1e_ms_eden" switches only the forward to BF16, because this method of lab/recipes.py quantizes only
  the backward.
- method="bf16" with phases="0.1=clover" warms up in BF16.

A plan can also quantize only one kind of layer, or only one phase.
"""

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

import torch
from torch import nn

from nanochat_fp4.nvfp4.convert import KEPT
from nanochat_fp4.nvfp4.heads import output_heads
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Recipe
from nanochat_fp4.nvfp4.roundings import Rounding


def _pairs(text: str, what: str, form: str) -> list[tuple[str, Recipe]]:
    pairs = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, method = item.partition("=")
        if not (key and equals and method):
            raise ValueError(f"{what}: {item!r} is not of the form {form}")
        pairs.append((key.strip(), get_recipe(method.strip())))
    return pairs


@dataclass(frozen=True)
class MethodPlan:
    """The methods of a run by phase and by layer.

    - method is the method of all layers from the first step on, unless layers or phases say otherwise.
    - layers are pairs of a glob pattern of layer names and a method. The first pattern that matches a name counts.
    - phases are pairs of a fraction of the run's steps and the method from that step on, in rising order.

    In a phase whose method is unquantized, no layer is quantized, not even those named in layers.
    """

    method: Recipe
    layers: tuple[tuple[str, Recipe], ...] = ()
    phases: tuple[tuple[float, Recipe], ...] = ()

    @classmethod
    def parse(cls, method: str | Recipe, layers: str = "", phases: str = "") -> "MethodPlan":
        """Makes a plan of layers written as "pattern=method,..." and phases written as "fraction=method,...".

        If the last method of the run is one that changes late in a run (Recipe.late), this change becomes a phase.
        Raises ValueError, with a message of one line, for text of another form, an unknown method, or fractions that do
        not rise from 0 to 1.
        """
        steps = []
        for key, recipe in _pairs(phases, "phases", "fraction=method"):
            try:
                fraction = float(key)
            except ValueError:
                fraction = -1.0
            if not 0 <= fraction <= 1 or (steps and fraction <= steps[-1][0]):
                raise ValueError(f"phases: {key!r} is not a fraction of the steps, from 0 to 1 and rising: 0.85=bf16")
            steps.append((fraction, recipe))
        of_layers, method = tuple(_pairs(layers, "layers", "pattern=method")), get_recipe(method)
        others = [recipe for _, recipe in (*steps, *of_layers)]
        if odd := next((r for r in others if r.kept_blocks not in (0.0, method.kept_blocks)), None):
            raise ValueError(
                f"{odd.name} keeps the last blocks in BF16 from the first step on; make it the method of the run, or "
                "use nvidia"
            )
        start, last = steps[-1] if steps else (0.0, method)
        if last.late and last.late[0] > start:
            steps.append((last.late[0], last.final))
        return cls(method, of_layers, tuple(steps))

    @property
    def recipes(self) -> list[Recipe]:
        """All recipes that the plan names."""
        return [self.method, *(recipe for _, recipe in (*self.layers, *self.phases))]

    def at(self, progress: float) -> Recipe:
        """The method of the phase at `progress`, the fraction of the run's steps that are done (0 to 1)."""
        return [self.method, *(recipe for fraction, recipe in self.phases if progress >= fraction)][-1]

    def of_layer(self, name: str, progress: float) -> Recipe:
        """The method of a layer of this name."""
        current = self.at(progress)
        of_layers = self.layers if current.quantizes or not self.method.quantizes else ()
        return next((recipe for pattern, recipe in of_layers if fnmatch.fnmatchcase(name, pattern)), current)

    def apply(self, model: nn.Module, progress: float) -> bool:
        """Gives each QuantLinear of the model its recipe for this point of the run.

        Returns whether any recipe changed. If so, compiled code is out of date, because it contains recipes as
        constants. Raises ValueError for a pattern that matches no layer, and for a layer whose sizes do not suit its
        recipe.
        """
        if hasattr(model, "nf_report"):
            model.nf_report.progress = progress
        layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
        for pattern, _ in self.layers:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in layers):
                raise ValueError(f"layers: {pattern!r} matches no layer; there are: {', '.join(list(layers)[:6])}, ...")
        return _set_recipes({layer: self.of_layer(name, progress) for name, layer in layers.items()})

    def work(self, model: nn.Module, heads: bool = True) -> dict[int, float]:
        """Returns the shares of the run's multiply-adds that are done in 4, 8 and 16 bits, as
        `{4: ..., 8: ..., 16: ...}`.

        The shares hold for a machine that has tensor cores for each of these formats. The wider operand of a GEMM
        decides its number of bits. The linear layers count that convert reaches, and those that it would reach if
        their blocks were not kept in BF16. With `heads` the output heads count, too, in 16 bits unless they say
        otherwise (`bits`).
        """
        edges = [0.0, *[fraction for fraction, _ in self.phases], 1.0]
        kept = [name for name, why in model.nf_report.left_alone if why == KEPT] if hasattr(model, "nf_report") else ()
        shares = {4: 0.0, 8: 0.0, 16: 3.0 * sum(model.get_submodule(name).weight.numel() for name in kept)}
        for head in output_heads(model) if heads else ():
            if not isinstance(head, QuantLinear):
                shares[getattr(head, "bits", 16)] += 3.0 * head.weight.numel()
        for start, end in zip(edges, edges[1:]):
            for name, layer in model.named_modules():
                if isinstance(layer, QuantLinear):
                    recipe, work = self.of_layer(name, start), (end - start) * layer.weight.numel()
                    for bits in gemm_bits(recipe):
                        shares[bits] += work
        total = sum(shares.values())
        return {bits: share / total for bits, share in shares.items()} if total else shares


def _set_recipes(recipes: Mapping[QuantLinear, Recipe]) -> bool:
    """Gives each layer its recipe, and returns whether any recipe changed."""
    changed = [layer for layer, recipe in recipes.items() if layer.recipe != recipe]
    for layer in changed:
        layer.set_recipe(recipes[layer])
    return bool(changed)


def gemm_bits(recipe: Recipe) -> tuple[int, int, int]:
    """Returns the number of bits of the wider operand in each of output, grad_input and grad_weight. An operand that is
    not quantized has 16 bits."""

    def bits(rounding: Rounding | None) -> int:
        return 16 if rounding is None else 4 if rounding.element == "e2m1" else 8

    def wider(gemm, kept: Rounding | None = None) -> int:
        return max(bits(gemm.a.rounding), bits(gemm.b.rounding or (None if gemm.b.raw else kept)))

    grad_input = wider(recipe.grad_input, recipe.output.b.rounding)
    return wider(recipe.output), grad_input, wider(recipe.grad_weight, recipe.output.a.rounding)


# ----------------------------------------------------------------------------------------------------------------------
# In a training loop


def set_progress(model: nn.Module, progress: float) -> bool:
    """Gives the layers the method of the present phase. A training loop calls this function before each step if its
    method changes in the course of a run (nvidia_full).

    model:    the converted model, or a module that contains it (DistributedDataParallel, a compiled model, an average)
    progress: the number of steps done divided by the number of steps of the run, from 0 to 1

    Returns whether any layer's method changed. If so, compiled code is discarded and compiled again. For methods
    without phases the call does nothing. It also leaves alone layers that have been given another method since convert.
    Raises ValueError for a progress outside 0 to 1, and for a model that was not converted.

    >>> model = nf.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "nvidia_full", verbose=False)
    >>> nf.set_progress(model, 0.5), nf.set_progress(model, 0.9)  # nvidia_full changes from 82% of the steps on
    (False, True)
    """
    converted = [m for m in model.modules() if "nf_report" in vars(m)] if isinstance(model, nn.Module) else []
    if not converted:
        raise ValueError("set_progress: the model was not converted; call nanochat_fp4.convert(model, method) first")
    number = isinstance(progress, Real) or (isinstance(progress, torch.Tensor) and progress.numel() == 1)
    if not number or not 0 <= progress <= 1:
        raise ValueError(f"set_progress: progress is {progress!r}, expected the share of the run's steps, from 0 to 1")
    # Each layer's method, and the method of its present phase. Of nested parts that were converted, the innermost one
    # comes last and decides.
    phases = {}
    for part in converted:
        part.nf_report.progress, method = float(progress), part.nf_report.recipe
        phase = method, MethodPlan.parse(method).at(progress)
        phases |= {m: phase for m in part.modules() if isinstance(m, QuantLinear)}
    changed = _set_recipes({m: now for m, (method, now) in phases.items() if m.recipe in (method, method.final)})
    if changed and (torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules):
        torch.compiler.reset()  # Compiled code contains recipes as constants.
    return changed
