"""Computes several QuantLinear layers as one.

Layers that read the same tensor, such as q, k and v, should quantize it once. fused_linear does this (the paper,
Appendix D.2): it computes one layer whose weight is made of the layers' weights, stacked one below the other. The
result has the bits of one QuantLinear with this weight. Calling the layers one after the other gives slightly different
numbers, for two reasons: each weight and each grad_output then has a tensor scale of its own, and each layer draws its
own random numbers.
"""

from collections.abc import Callable, Sequence

import torch

from nanochat_fp4.nvfp4.gemm import GemmOperand
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.makers import quantize_weights
from nanochat_fp4.nvfp4.operands import stacked


def can_be_fused(linears: Sequence[torch.nn.Module]) -> bool:
    """Whether fused_linear computes these layers as one. The layers must be of one class, have the same recipe and
    settings, and have no bias, no hooks, and no forward that was replaced on the instance."""
    first = linears[0]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return all(
        type(linear) is type(first)
        and (type(linear) is torch.nn.Linear or getattr(linear, "stackable", False))
        and linear.bias is None
        and "forward" not in vars(linear)
        and not any(getattr(linear, name) for name in hooks)
        and (type(first) is torch.nn.Linear or first.is_like(linear))
        for linear in linears
    )


def groups_computed_as_one(model: torch.nn.Module) -> list[tuple[QuantLinear, ...]]:
    """Returns the layers that quantize, in groups: the layers that fused_linear computes as one form a group, and any
    other layer is a group of its own."""
    return groups_of(model, lambda layer: layer.quantizes)


def groups_of(model: torch.nn.Module, wanted: Callable[[QuantLinear], bool]) -> list[tuple[QuantLinear, ...]]:
    """Returns the layers for which `wanted` is true, in groups as groups_computed_as_one describes them.

    A module lists the names of the children that it passes to fused_linear in its attribute `fused_linears`, a tuple.
    """
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and wanted(m)]
    parents = [[getattr(m, name) for name in getattr(m, "fused_linears", ())] for m in model.modules()]
    groups = [tuple(g) for g in parents if g and set(layers).issuperset(g) and can_be_fused(g)]
    fused = {layer for group in groups for layer in group}
    return groups + [(layer,) for layer in layers if layer not in fused]


def fused_linear(x: torch.Tensor, *linears: torch.nn.Linear, head_dim: int | None = None) -> tuple[torch.Tensor, ...]:
    """Computes `linear(x)` of each of the layers as one layer. The docstring of this module says how the numbers differ
    from those of separate calls.

    x is (..., in_features), and each result is (..., out_features). With head_dim, each result is
    (..., heads, head_dim) instead. The results of all layers are then reshaped together before they are split, so that
    torch.compile can write each layer's gradient directly into its place in the common gradient.

    The results are views of one tensor. If can_be_fused is false for the layers, each layer is called by itself.
    """
    if not can_be_fused(linears):
        outputs = tuple(linear(x) for linear in linears)
        return outputs if head_dim is None else tuple(y.unflatten(-1, (-1, head_dim)) for y in outputs)
    if isinstance(linears[0], QuantLinear):
        y = linears[0].compute(x, linears)
    else:
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else linears[0].weight.dtype
        y = torch.nn.functional.linear(x, stacked([linear.weight.to(dtype) for linear in linears]))
    sizes = [linear.out_features for linear in linears]
    if head_dim is None:
        return y.split(sizes, dim=-1)
    return y.unflatten(-1, (-1, head_dim)).split([size // head_dim for size in sizes], dim=-2)


def quantized_weights(groups: Sequence[Sequence[QuantLinear]], tiles: bool = False) -> list[GemmOperand | None]:
    """Returns the weight operand of the output GEMM for each group of layers that are computed as one.

    An operand is None if it is not the same in each pass, because its rounding is random. tiles: whether the block
    scales are laid out in the order in which this machine's FP4 tensor cores read them.
    """
    made: list[GemmOperand | None] = [None] * len(groups)
    weights = {}
    for i, layers in enumerate(groups):
        if not layers[0].recipe.fixed_weight:
            continue
        gathered = layers[0].gathered_weight(layers)
        if gathered is not None:
            made[i] = gathered.joined if tiles else gathered.joined.row_major()
            continue
        weight = stacked([layer.matrix.detach() for layer in layers])
        how = layers[0].weight_quantization(weight.device)
        weights[i] = weight, how._replace(tiles=tiles and how.tiles)
    for i, operand in zip(weights, quantize_weights(list(weights.values()))):
        made[i] = operand
    return made
