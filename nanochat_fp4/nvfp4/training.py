"""A training loop's duties to the quantized layers of its model, and the look at their inputs for error feedback.

quantized = QuantizedTraining(model, plan, num_steps)
for step in ...:
    quantized.set_progress(step)                    # the methods of this step
    with quantized.weights_once(micro_batches):     # forward and backward passes
        ...
    ...                                             # the optimizers' steps
    quantized.after_update(step, forward)           # a look at the inputs, for methods that want one
"""

import contextlib
import sys
import warnings
import weakref
from collections.abc import Callable
from numbers import Real
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanochat_fp4.nvfp4.contexts import full_precision, quantize_weights_once
from nanochat_fp4.nvfp4.feedback import factor_for, gram_matrix, gram_state, products_of_rows
from nanochat_fp4.nvfp4.fused import groups_computed_as_one
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.nvfp4.recipes import Recipe

LOOK_EVERY = 10  # steps between looks at the layers' inputs
LOOK_TOKENS = 8192  # of a rank, for a look


class QuantizedTraining:
    """
    plan is the method of each layer at each point of the run. None, for post-training, leaves the layers' methods and
    Gram matrices as they are. num_steps is the length of the whole run.
    """

    def __init__(self, model: nn.Module, plan: MethodPlan | None = None, num_steps: int = 0):
        self.model, self.plan, self.num_steps = model, plan, num_steps
        expect_calls(model, None)  # no reminders: QuantizedTraining makes the calls that a method needs

    def set_progress(self, step: int) -> str | None:
        """Gives the layers the methods of this step.

        Returns the new methods if one changed. Methods are constants of compiled code, which is then out of date.
        """
        if self.plan is None or not self.plan.apply(self.model, step / self.num_steps):
            return None
        return str(self.plan.at(step / self.num_steps))

    def quantizes(self) -> bool:
        """Whether any layer quantizes at the moment."""
        return any(isinstance(m, QuantLinear) and m.recipe.quantizes for m in self.model.modules())

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        """A context that makes the weights' codes once for `passes` passes, if that is less work."""
        layers = (m for m in self.model.modules() if isinstance(m, QuantLinear))
        often = passes > 1 or any(layer.recipe.looks_at_inputs for layer in layers)  # rounding with feedback is long
        return quantize_weights_once(self.model) if often else contextlib.nullcontext()

    def after_update(self, step: int, forward: Callable[[], object]) -> None:
        """forward() calls the model on some thousand tokens. All ranks must call this together."""
        if self.plan is not None and step % LOOK_EVERY == 0:
            update_gram_matrices(self.model, forward)


@torch.no_grad()
def update_gram_matrices(model: nn.Module, forward: Callable[[], object]) -> None:
    """For a training loop of a method with error feedback (clover_feedback), after every few steps.

    Runs forward(), which calls the model on some thousand tokens. The model computes in full precision, uncompiled and
    without gradients. Dropout and batch statistics are those of the model's present mode. The Gram matrix of each layer
    with feedback moves a part of the way (feedback.STEP) to the Gram matrix of its inputs in all calls, the first time
    all of the way. Does nothing if no layer has feedback, as in the last phase of clover_feedback_late.

    The mean is over the tokens of all ranks, which must call together. Inputs that are not finite change nothing. A run
    that goes on needs gram_state, and so does a copy (an EMA) before its evaluation. A copy has the Gram matrices and
    the phase of its own moment.

    Raises ValueError for a model that is no module, and a forward that is not a function or calls none of these layers.

    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    >>> model, x = nf.convert(model, "clover_feedback", verbose=False), torch.randn(64, 32)
    >>> nf.update_gram_matrices(model, lambda: model(x))
    >>> sorted(nf.gram_state(model))
    ['0', '2']
    """
    if not isinstance(model, nn.Module) or not callable(forward):
        got = f"{type(model).__name__} and {type(forward).__name__}"
        raise ValueError(
            f"update_gram_matrices: got {got}, expected the model and a function that calls it: lambda: model(x)"
        )
    layers = [group[0] for group in groups_computed_as_one(model) if group[0].recipe.looks_at_inputs]
    was_called(model, "update_gram_matrices")
    if not layers:
        return
    seen = _over_ranks(layers, _products_of_inputs(layers, model, forward))
    if not seen:
        raise ValueError(
            f"update_gram_matrices: forward() called none of the {len(layers)} layers that look at their inputs; "
            "let it call this model: lambda: model(x)"
        )
    made = {}  # layers that read the same tensor share a Gram matrix
    for layer, inputs in seen.items():
        before = layer.gram_matrix
        key = id(inputs), id(before), layer.recipe
        if key not in made:
            gram = gram_matrix(inputs.products / inputs.rows, before)
            made[key] = gram, factor_for(gram), before
        layer.gram_matrix, layer.feedback_factor, _ = made[key]


class _Inputs(NamedTuple):
    """The sum of x x^T over the rows that a layer has read, float32 (K, K), and their number."""

    products: torch.Tensor
    rows: int


def _products_of_inputs(
    layers: list[QuantLinear], model: nn.Module, forward: Callable[[], object]
) -> dict[QuantLinear, _Inputs]:
    """The inputs of these layers in all their calls in forward(). Layers with the same input share one object."""
    seen: dict[QuantLinear, _Inputs] = {}
    last, made = None, {}  # the last input, and its updates of the layers' sums: id -> (before, now)

    def look(layer: QuantLinear, args: tuple) -> None:
        nonlocal last, made
        if args[0] is not last:
            rows = args[0].reshape(-1, layer.in_features)
            last, made = args[0], {id(None): (None, _Inputs(products_of_rows(rows), len(rows)))}
        before = seen.get(layer)
        if id(before) not in made:
            made[id(before)] = before, _Inputs(*(a + b for a, b in zip(before, made[id(None)][1])))
        seen[layer] = made[id(before)][1]

    hooks = [layer.register_forward_pre_hook(look) for layer in layers]
    try:
        # Under torch.compile the hooks would cause a compilation, and `seen` another one at each look.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        with full_precision(model), eager:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: inputs for layer, inputs in seen.items() if inputs.rows}


def _over_ranks(layers: list[QuantLinear], seen: dict[QuantLinear, _Inputs]) -> dict[QuantLinear, _Inputs]:
    """The inputs that all ranks have seen. A rank may not have called a layer (an expert) that another one has."""
    if not (dist.is_available() and dist.is_initialized()):
        return seen
    # The inputs' device comes first, because weights may be offloaded.
    device = next((inputs.products.device for inputs in seen.values()), layers[0].weight.device)
    first: dict[int, int] = {}  # id of shared inputs -> number of the first layer
    numbers = [first.setdefault(id(seen[m]), i) if m in seen else -1 for i, m in enumerate(layers)]
    shared = torch.tensor(numbers, device=device)
    rows = torch.tensor([seen[m].rows if m in seen else 0 for m in layers], device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    dist.all_reduce(rows)
    result: dict[QuantLinear, _Inputs] = {}
    for i, (layer, number, count) in enumerate(zip(layers, shared.tolist(), rows.tolist())):
        if number == i:
            size = layer.in_features
            products = seen[layer].products.clone() if layer in seen else torch.zeros(size, size, device=device)
            dist.all_reduce(products)
            result[layer] = _Inputs(products, count)
        elif number >= 0:
            result[layer] = result[layers[number]]
    return result


def set_progress(model: nn.Module, progress: float) -> bool:
    """Tells a method that changes in the course of a run (clover_feedback_late, nvidia_full) the place of a step.

    A training loop calls this before each step. Gives the layers the method of the present phase. Returns whether one
    changed; torch.compile then looks at the layers again. Methods without phases ignore the call, and so do layers that
    have been given another method since convert.

    model:    the converted model, or a module that holds it (DistributedDataParallel, a compiled model, an average)
    progress: steps done over steps of the run, from 0 to 1
    Raises ValueError for a progress outside 0 to 1 and a model that was not converted.

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
    was_called(model, "set_progress")
    phases = {}  # layer -> (its method, the method now). The innermost converted part comes last and wins.
    for part in converted:
        method = part.nf_report.recipe
        phase = method, MethodPlan.parse(method).at(progress)
        phases |= {m: phase for m in part.modules() if isinstance(m, QuantLinear)}
    changed = False
    for layer, (method, recipe) in phases.items():
        recipe, begun = recipe.of(layer.kind), (method.of(layer.kind), method.final.of(layer.kind))
        if layer.recipe != recipe and layer.recipe in begun:
            layer.set_recipe(recipe)
            changed = True
    if not changed:
        return False
    if torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # recipes are constants of compiled code
    return True


PATIENCE = LOOK_EVERY + 2  # steps without a needed call before the warning; a run of 40 steps must hear of it
_reminders: "weakref.WeakKeyDictionary[nn.Module, _Reminder]" = weakref.WeakKeyDictionary()


class _Reminder:
    """Warns once if PATIENCE optimizer steps pass without a call that the method needs.

    The steps are an optimizer's. A hook of the model would be compiled with the model, and would not count.
    """

    def __init__(self, model: nn.Module, recipe: Recipe):
        self.model, self.recipe, self.steps = weakref.ref(model), recipe, 0
        self.missing = {}  # call -> the reason why the method needs it
        if recipe.late:
            self.missing["set_progress(model, done)"] = f"changes from {100 * recipe.late[0]:.0f}% of the steps on"
        if recipe.looks_at_inputs:
            self.missing["update_gram_matrices(model, lambda: model(x))"] = "looks at the layers' inputs"
        self.handle = register_optimizer_step_post_hook(self)
        weakref.finalize(model, self.handle.remove)

    def __call__(self, optimizer: torch.optim.Optimizer, *_) -> None:
        model = self.model()
        if model is None or self.steps == PATIENCE or torch.compiler.is_compiling():
            return
        own = {id(p) for p in model.parameters()}
        self.steps += any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if self.steps != PATIENCE:
            return
        for call, what in self.missing.items():
            if call.startswith("set_progress") or not gram_state(model):
                warnings.warn(
                    f"{self.recipe.name} {what}, and {PATIENCE} steps have not called nanochat_fp4.{call}: "
                    "what is trained is the method without it",
                    stacklevel=2,
                )


def expect_calls(model: nn.Module, recipe: Recipe | None) -> None:
    """Reminds of the calls that this recipe needs from a training loop. None ends the reminders."""
    was_called(model, "")
    if recipe is not None and (recipe.late or recipe.looks_at_inputs):
        _reminders[model] = _Reminder(model, recipe)


def was_called(model: nn.Module, name: str) -> None:
    """Ends the reminder of the call of that name, or with "" of all calls."""
    for module in model.modules() if _reminders else ():
        if reminder := _reminders.get(module):
            reminder.missing = {c: what for c, what in reminder.missing.items() if not c.startswith(name)}
            if not reminder.missing:
                reminder.handle.remove()
                del _reminders[module]
