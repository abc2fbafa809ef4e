"""Several QuantLinear computed as one, and what comes before or after the product of one.

Layers that read the same tensor (q, k, v) share its codes by fused_linear (the paper, Appendix D.2). fused_linear
computes one layer whose weight is their weights, one below the other. The result is a QuantLinear's with that weight,
to the bit. The layers one by one differ from it in two things: each weight and grad_output has a tensor scale of its
own, and random numbers are drawn three times.
"""

from collections.abc import Callable, Sequence

import torch

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.gemm import GemmOperand
from nanochat_fp4.nvfp4.linear import QuantLinear, Then, _stacked
from nanochat_fp4.nvfp4.operands import Codes, quantize_weights
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.relu_squared import ReluSquared, StraightReluSquared


def can_be_fused(linears: Sequence[torch.nn.Module]) -> bool:
    """Whether fused_linear computes these layers as one: without bias, hooks, or a forward of their own, and alike."""
    first = linears[0]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return all(
        type(linear) is type(first)
        and (type(linear) is torch.nn.Linear or getattr(linear, "by_rows", False))
        and linear.bias is None
        and "forward" not in vars(linear)
        and not any(getattr(linear, name) for name in hooks)
        and (type(first) is torch.nn.Linear or _alike(linear, first))
        for linear in linears
    )


def _alike(a: QuantLinear, b: QuantLinear) -> bool:
    same = a.recipe == b.recipe and a.quantizes == b.quantizes and a.context.per_token == b.context.per_token
    return same and getattr(a, "shard", None) == getattr(b, "shard", None)


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
        y = linears[0]._compute(x, linears)
    else:
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else linears[0].weight.dtype
        y = torch.nn.functional.linear(x, _stacked([linear.weight.to(dtype) for linear in linears]))
    sizes = [linear.out_features for linear in linears]
    processes = sum(sizes) // y.shape[-1]  # that the layers are divided among
    sizes = [size // processes for size in sizes]
    if head_dim is None:
        return y.split(sizes, dim=-1)
    return y.unflatten(-1, (-1, head_dim)).split([size // head_dim for size in sizes], dim=-2)


def linear_then(
    then: Then, x: torch.Tensor, linears: Sequence[QuantLinear], *more: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """then(the product of x (..., K) and the weights of layers that can_be_fused, *more). The backward pass computes
    the product again, from the operands that it keeps anyway, and the same bits."""
    first = linears[0]
    return first._product(x, tuple(linears), then, more)


def relu_squared_linear(x: torch.Tensor, linear: QuantLinear, straight: bool = False) -> torch.Tensor:
    """linear(relu(x)^2) of a layer that quantizes its input. 8 bits of relu(x) are kept for the derivative
    (relu_squared.py). x (..., in_features) is in FP32 or BF16.

    straight: nothing is kept, and the gradient is that of relu(x)^2. The caller has the derivative.

    The kernels quantize relu(x)^2 as it is made, and never write it, to the bit the same. A layer with hooks, which
    want to see relu(x)^2, is called with it.
    """
    if _takes_squares(linear, x):
        return linear._compute(x, (linear,), squares="straight" if straight else "derivative")
    if straight:
        if linear.quantizes_input:
            new_seed(x.device)  # that of relu(x)'s 8 bits: all other random numbers stay the same
        return linear(StraightReluSquared.apply(x))
    y, amax = ReluSquared.apply(x, linear.rank)
    return linear(y, amax)


def _takes_squares(linear: QuantLinear, x: torch.Tensor) -> bool:
    """Whether kernels quantize relu(x)^2 as it is made."""
    recipe = linear.recipe
    alone = can_be_fused([linear]) and not linear._per_token_now(torch.is_grad_enabled()) and not linear.divided
    kernel = recipe.input_is_codes and recipe.output.a.rounding.block_rows == 1 and use_kernels(x.device)
    return bool(alone and x.numel() and kernel)


def quantized_weights(groups: Sequence[Sequence[QuantLinear]], tiles: bool = False) -> list[GemmOperand | None]:
    """The weight operand of the output GEMM of each group of layers that are computed as one; None where it is not the
    same in each pass. tiles: with block scales as this machine's GEMM reads them."""
    made: list[GemmOperand | None] = [None] * len(groups)
    weights = {}
    for i, layers in enumerate(groups):
        if not layers[0].recipe.fixed_weight:
            continue
        gathered = layers[0]._gathered(layers)
        if gathered is not None and isinstance(gathered.parts[0], Codes):
            made[i] = gathered.joined if tiles else gathered.joined.row_major()
            continue
        weight = _stacked([layer.matrix.detach() for layer in layers] if gathered is None else gathered.values)
        how = layers[0].weight_quantization(weight.device)
        weights[i] = weight, how._replace(tiles=tiles and how.tiles)
    for i, operand in zip(weights, quantize_weights(list(weights.values()))):
        made[i] = operand
    return made
