"""What a training loop does for the quantized layers of its model, whatever their method needs; and the look at their
inputs, of which some methods learn (gram.py).

quantized = QuantizedTraining(model, plan, num_steps)
for step in ...:
    quantized.set_progress(step)                    # the methods of this step
    with quantized.weights_once(micro_batches):     # forward and backward passes
        ...
    with quantized.update(step):                    # the optimizers
        ...
    quantized.after_update(step, forward)           # a look at the inputs, for methods that want one
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.nvfp4 import oscillation
from nanochat_fp4.nvfp4.convert import (
    expect_calls,
    full_precision,
    groups_computed_as_one,
    quantize_weights_once,
    was_called,
)
from nanochat_fp4.nvfp4.gram import gram_matrix, input_statistics, products_of_rows
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.plan import MethodPlan

LOOK_EVERY = 10  # steps between looks at the layers' inputs


class QuantizedTraining:
    """
    plan:      which method each layer has when; None leaves the layers as they are, and also what their method has
               learned of their inputs (post-training)
    num_steps: of the whole run, for the plan and the remedy
    remedy:    what --method-changes=reset asks for, of oscillation.FORM
    Raises ValueError for a plan or remedy that does not fit.
    """

    def __init__(self, model: nn.Module, plan: MethodPlan | None = None, num_steps: int = 0, remedy: str = ""):
        self.model, self.plan, self.num_steps = model, plan, num_steps
        expect_calls(model, None)  # what a method wants of a training loop is done here
        self.remedies = oscillation.remedies(remedy, model, num_steps)  # with state_dict() and load_state_dict()

    def set_progress(self, step: int) -> str | None:
        """Gives the layers the methods of this step. What they are from here on, if one changed: compiled code, in
        which they are constants, is then out of date."""
        if self.plan is None or not self.plan.apply(self.model, step / self.num_steps):
            return None
        return str(self.plan.at(step / self.num_steps))

    def quantizes(self) -> bool:
        """Whether any layer quantizes at the moment."""
        return any(isinstance(m, QuantLinear) and m.recipe.quantizes for m in self.model.modules())

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        """The weights' codes made once for so many passes, where making them for each is more work."""
        often = passes > 1 or rounds_with_feedback(self.model)
        return quantize_weights_once(self.model) if often else contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the optimizers' steps."""
        with contextlib.ExitStack() as stack:
            for remedy in self.remedies:
                stack.enter_context(remedy.optimizer_step(step))
            yield

    def after_update(self, step: int, forward: Callable[[], object]) -> None:
        """forward() calls the model on some thousand tokens. All ranks must call this together."""
        if self.plan is not None and step % LOOK_EVERY == 0:
            update_gram_matrices(self.model, forward)


def rounds_with_feedback(model: nn.Module) -> bool:
    """Whether the method of a layer rounds its weight with error feedback."""
    return any(isinstance(m, QuantLinear) and m.recipe.output.b.feedback for m in model.modules())


@torch.no_grad()
def update_gram_matrices(model: nn.Module, forward: Callable[[], object]) -> None:
    """For a training loop of a method with error feedback or outliers (clover_feedback), after every few steps.

    Runs forward(), which calls the model on some thousand tokens, in full precision, uncompiled, without gradients and
    in the mode that the model is in (dropout and batch statistics with it), and moves the Gram matrix of the layers
    that compute with it a part of the way (gram.STEP) to what their inputs were in all calls, at first all of it; does
    nothing where there are none, as in the last phase of clover_feedback_late. The mean over the tokens of all ranks,
    which must call together. Inputs that are not finite change nothing. A run that goes on needs gram_state, and so
    does a copy (an EMA) before it is evaluated: it has the Gram matrices and the phase of the moment it was made.
    Raises ValueError for a model that is no module, and a forward that is not a function or calls none of these layers.
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
    made = {}  # layers that read the same tensor share what is made of it
    for layer, inputs in seen.items():
        before = layer.gram_matrix
        key = id(inputs), id(before), layer.recipe
        if key not in made:
            gram = gram_matrix(inputs.products / inputs.rows, before)
            made[key] = gram, input_statistics(layer.recipe, gram), before
        layer.gram_matrix, layer.statistics, _ = made[key]


class _Inputs(NamedTuple):
    """The sum of x x^T over rows that a layer has read, float32 (K, K), and how many these are."""

    products: torch.Tensor
    rows: int


def _products_of_inputs(
    layers: list[QuantLinear], model: nn.Module, forward: Callable[[], object]
) -> dict[QuantLinear, _Inputs]:
    """What these layers read in forward(), in all their calls: one object for layers whose inputs are one object."""
    seen: dict[QuantLinear, _Inputs] = {}
    last, made = None, {}  # an input, and what it made of what was seen before: id -> (before, now)

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
        # Compiled code would be compiled again for the hooks, and at each look once more for what they have seen.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        with full_precision(model), eager:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: inputs for layer, inputs in seen.items() if inputs.rows}


def _over_ranks(layers: list[QuantLinear], seen: dict[QuantLinear, _Inputs]) -> dict[QuantLinear, _Inputs]:
    """What all ranks have seen. A rank may not have called a layer (an expert) that another one has."""
    if not (dist.is_available() and dist.is_initialized()):
        return seen
    # Of the inputs, if there were any: weights may be offloaded.
    device = next((inputs.products.device for inputs in seen.values()), layers[0].weight.device)
    first: dict[int, int] = {}  # of layers with the same inputs the first one's number
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
