"""The Gram matrices of the layers' inputs, which error feedback needs, measured in the course of a training run.

feedback.py says what a Gram matrix is for, and rounds with it.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.nvfp4.contexts import full_precision
from nanochat_fp4.nvfp4.feedback import factor_for, gram_matrix, products_of_rows
from nanochat_fp4.nvfp4.fused import groups_computed_as_one
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.reminders import was_called

GRAM_EVERY = 10  # steps between two measurements of the layers' inputs
GRAM_TOKENS = 8192  # of a rank, in a measurement


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
    layers = [group[0] for group in groups_computed_as_one(model) if group[0].recipe.uses_feedback]
    was_called(model, "update_gram_matrices")
    if not layers:
        return
    seen = _over_ranks(layers, _products_of_inputs(layers, model, forward))
    if not seen:
        raise ValueError(
            f"update_gram_matrices: forward() called none of the {len(layers)} layers with error feedback; "
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

    def add(layer: QuantLinear, args: tuple) -> None:
        nonlocal last, made
        if args[0] is not last:
            rows = args[0].reshape(-1, layer.in_features)
            last, made = args[0], {id(None): (None, _Inputs(products_of_rows(rows), len(rows)))}
        before = seen.get(layer)
        if id(before) not in made:
            made[id(before)] = before, _Inputs(*(a + b for a, b in zip(before, made[id(None)][1])))
        seen[layer] = made[id(before)][1]

    hooks = [layer.register_forward_pre_hook(add) for layer in layers]
    try:
        # Under torch.compile the hooks would cause a compilation, and `seen` another one at each measurement.
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
