"""Measures the Gram matrices of the layers' inputs in the course of a training run. Error feedback needs them.

feedback.py explains what a Gram matrix is for, and rounds weights with it.
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

GRAM_EVERY = 10  # The number of steps from one measurement of the layers' inputs to the next.
GRAM_TOKENS = 8192  # The number of tokens that a rank uses in a measurement.


@torch.no_grad()
def update_gram_matrices(model: nn.Module, forward: Callable[[], object]) -> None:
    """Updates the Gram matrices of the layers' inputs. A training loop calls this function after every few steps if its
    method has error feedback (clover_feedback).

    `forward` is a function without arguments that calls the model on some thousand tokens. update_gram_matrices runs it
    once. Meanwhile the model computes in full precision, uncompiled and without gradients. Whether dropout and batch
    statistics are active depends on the model's present mode.

    From the inputs of each layer with feedback, in all calls of the layer, the function computes a Gram matrix. The
    layer's own Gram matrix moves a part of the way to it (feedback.STEP), and all of the way the first time. The mean
    is over the tokens of all ranks, so all ranks must call this function together. If inputs are not finite, the Gram
    matrix stays as it is. If no layer has feedback, as in the last phase of clover_feedback_late, nothing is done.

    Gram matrices are no part of the state dict. A run that is resumed needs the result of gram_state besides its
    checkpoint, and so does a copy of the weights, such as an EMA, that is evaluated later. A deep copy has the
    model's Gram matrices and its phase as they are at that moment.

    Raises ValueError if model is no torch.nn.Module or was not converted, if forward is no function, and if forward
    calls no layer that has feedback.

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
    if not any(isinstance(module, QuantLinear) for module in model.modules()):
        raise ValueError(
            f"update_gram_matrices: {type(model).__name__} was not converted; pass the model that nf.convert was given"
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
    groups: dict[object, list[QuantLinear]] = {}  # layers that read the same tensor share a Gram matrix
    for layer, inputs in seen.items():
        groups.setdefault((id(inputs), id(layer.gram_matrix), layer.recipe), []).append(layer)
    for group in groups.values():
        # The sums of all layers are the largest tensors of a look, so they are freed one after the other.
        inputs = [seen.pop(layer) for layer in group][0]
        gram = gram_matrix(inputs.products / inputs.rows, group[0].gram_matrix)
        factor = factor_for(gram)
        for layer in group:
            layer.gram_matrix, layer.feedback_factor = gram, factor


class _Inputs(NamedTuple):
    """The sum of x x^T over the rows x that a layer has read, float32 (K, K), and the number of these rows."""

    products: torch.Tensor
    rows: int


def _products_of_inputs(
    layers: list[QuantLinear], model: nn.Module, forward: Callable[[], object]
) -> dict[QuantLinear, _Inputs]:
    """Returns the inputs of these layers in all of their calls in forward(). Layers that read the same tensors share
    one object, so that its products are computed once."""
    seen: dict[QuantLinear, _Inputs] = {}
    # The last input, and the sums that have been updated with it: id of the sum before -> (sum before, sum after).
    last, made = None, {}

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
        # The model runs eagerly, because torch.compile would compile it for the hooks, and again for `seen` at each
        # measurement.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
        with full_precision(model), eager:
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {layer: inputs for layer, inputs in seen.items() if inputs.rows}


def _over_ranks(layers: list[QuantLinear], seen: dict[QuantLinear, _Inputs]) -> dict[QuantLinear, _Inputs]:
    """Returns the sums over all ranks. A layer that only some ranks have called, such as an expert, is included."""
    if not (dist.is_available() and dist.is_initialized()):
        return seen
    # The device is the inputs' one if there are inputs, because weights may be offloaded to another device.
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
