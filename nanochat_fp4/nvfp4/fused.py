"""Several QuantLinear computed as one.

Layers that read the same tensor (q, k, v) share its codes by fused_linear (the paper, Appendix D.2). fused_linear
computes one layer whose weight consists of their weights, one below the other. The result has the bits of one
QuantLinear with that weight. Calling the layers one by one gives another result for two reasons: each weight and each
grad_output then has a tensor scale of its own, and random numbers are drawn once for each layer.
"""

from collections.abc import Callable, Sequence

import torch

from nanochat_fp4.nvfp4.gemm import GemmOperand
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.makers import quantize_weights
from nanochat_fp4.nvfp4.operands import stacked


def can_be_fused(linears: Sequence[torch.nn.Module]) -> bool:
    """Whether fused_linear computes these layers as one: without bias, hooks, or a forward of their own, and alike."""
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
    """The layers that quantize, each with those that fused_linear computes as one with it, or alone."""
    return groups_of(model, lambda layer: layer.quantizes)


def groups_of(model: torch.nn.Module, wanted: Callable[[QuantLinear], bool]) -> list[tuple[QuantLinear, ...]]:
    """The layers that are wanted, each with those that fused_linear computes as one with it, or alone.

    Layers that are computed as one are found by their parent's attribute `fused_linears`, a tuple of names.
    """
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and wanted(m)]
    parents = [[getattr(m, name) for name in getattr(m, "fused_linears", ())] for m in model.modules()]
    groups = [tuple(g) for g in parents if g and set(layers).issuperset(g) and can_be_fused(g)]
    fused = {layer for group in groups for layer in group}
    return groups + [(layer,) for layer in layers if layer not in fused]


def fused_linear(x: torch.Tensor, *linears: torch.nn.Linear, head_dim: int | None = None) -> tuple[torch.Tensor, ...]:
    """[linear(x) for each linear], computed as one layer; see the top of this file for what that changes.

    With head_dim the last dimension of each result is split into (heads, head_dim), before the layers are told apart.
    torch.compile can then write each layer's gradient where it belongs in the backward pass.

    The results are views of one tensor. Layers are called one by one if they are not alike or have a bias. So are
    layers with hooks or a replaced forward, which want to see each of them.
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
    processes = sum(sizes) // y.shape[-1]  # that the layers are divided among
    sizes = [size // processes for size in sizes]
    if head_dim is None:
        return y.split(sizes, dim=-1)
    return y.unflatten(-1, (-1, head_dim)).split([size // head_dim for size in sizes], dim=-2)


def quantized_weights(groups: Sequence[Sequence[QuantLinear]], tiles: bool = False) -> list[GemmOperand | None]:
    """The weight operand of the output GEMM of each group of layers that are computed as one; None where it is not the
    same in each pass. tiles: with block scales as this machine's GEMM reads them."""
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
