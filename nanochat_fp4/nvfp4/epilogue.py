"""Layers that are computed together with other layers, or with the operation before or after them.

fused_linear: several layers that read the same tensor, such as q, k and v (the paper, Appendix D.2). It computes one
layer whose weight is made of the layers' weights, stacked one below the other. The result has the bits of one
QuantLinear with this weight. Calling the layers one after the other gives slightly different numbers, for two reasons:
each weight and each grad_output then has a tensor scale of its own, and each layer draws its own random numbers.

relu_squared_linear: two layers with relu(x)^2 between them, for which the backward pass keeps relu(x) in 8 bits. The
derivative of relu(x)^2 is 2 relu(x). Keeping relu(x) in 8 bits instead of 16 saves memory, and rounding it
stochastically keeps the gradient unbiased. Random numbers come from Philox, as in the quantizers, so that the Triton
kernel gives the same bits. One call of Philox serves eight elements. torch.rand under torch.compile would take a call
for each element. The kernels read x and write the codes of relu(x)^2, and relu(x) in 8 bits. They do not write
relu(x)^2 itself. The result has the bits of the two operations one after the other.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.nvfp4 import dispatch, gemm
from nanochat_fp4.nvfp4.checkpointing import gradients_are_wanted
from nanochat_fp4.nvfp4.layer import Pass, QuantLinear, stacked
from nanochat_fp4.nvfp4.philox import Noise, new_seed
from nanochat_fp4.nvfp4.quantizers import Quantization, divide
from nanochat_fp4.nvfp4.recipes import INPUT

# ----------------------------------------------------------------------------------------------------------------------
# Layers that share an input


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


def groups_of(
    model: torch.nn.Module, wanted: Callable[[QuantLinear], bool] = lambda layer: layer.quantizes
) -> list[tuple[QuantLinear, ...]]:
    """Returns the layers for which `wanted` is true, by default those that quantize, in groups: the layers that
    fused_linear computes as one form a group, and any other layer is a group of its own.

    A module lists the names of the children that it passes to fused_linear in its attribute `fused_linears`, a tuple.
    """
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and wanted(m)]
    parents = [[getattr(m, name) for name in getattr(m, "fused_linears", ())] for m in model.modules()]
    groups = [tuple(g) for g in parents if g and set(layers).issuperset(g) and can_be_fused(g)]
    fused = {layer for group in groups for layer in group}
    return groups + [(layer,) for layer in layers if layer not in fused]


def fused_linear(x: Tensor, *linears: torch.nn.Linear, head_dim: int | None = None) -> tuple[Tensor, ...]:
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
        y = linears[0].outputs(x, linears)
    else:
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else linears[0].weight.dtype
        y = torch.nn.functional.linear(x, stacked([linear.weight.to(dtype) for linear in linears]))
    sizes = [linear.out_features for linear in linears]
    if head_dim is None:
        return y.split(sizes, dim=-1)
    return y.unflatten(-1, (-1, head_dim)).split([size // head_dim for size in sizes], dim=-2)


# ----------------------------------------------------------------------------------------------------------------------
# relu(x)^2 before a layer

STEPS = 255  # The largest value of a row, in units of the row's step.


class EightBitReluSquared(torch.autograd.Function):
    """Computes (relu(x)^2, its largest value). The derivative is computed from the 8-bit tensor of relu_squared."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        y, amax, kept, step = relu_squared(x)
        ctx.save_for_backward(kept, step)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @gemm.once_differentiable
    def backward(ctx, grad_y: Tensor, _: Tensor | None) -> Tensor:
        return gemm.relu_squared_gradient(grad_y, *ctx.saved_tensors)


def relu_squared(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes relu(x)^2 of x, FP32 or BF16 (..., C), and relu(x) in 8 bits. Returns (y, amax, kept, step).

    - y is relu(x)^2, (..., C), in x's dtype.
    - amax is the largest value of y, float32 (). The quantization of y needs it.
    - kept is uint8 (..., C), and the expected value of kept * step is relu(x). kept is rounded stochastically with 16
      random bits, which gives a bias of at most 2^-16 of a step.
    - step is float32 (..., 1): 1/255 of the row's largest value.
    """
    seed, rows = new_seed(x.device), x.reshape(-1, x.shape[-1])
    if dispatch.use_kernels(x.device):
        from nvfp4_kernels.relu_squared import relu_squared as kernel

        y, kept, step, amax = kernel(rows, seed)
    else:
        y, kept, step, amax = relu_squared_reference(rows, seed)
    return y.view(x.shape), amax, kept.view(x.shape), step.view(*x.shape[:-1], 1)


def relu_squared_reference(x: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes relu_squared of x (R, C) with the random numbers of the seed, int64 (). Each row begins with a new call
    of Philox, so that a kernel can compute rows independently."""
    rows, columns = x.shape
    positive = torch.relu(x)
    # Without the lower bound, a row of zeros would cause a division by 0.
    step = divide(positive.amax(-1, keepdim=True).float(), STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    padded = -(-columns // 16) * 16
    noise = Noise(seed).elements(0, rows, padded, 0, x.device).view(rows, padded)[:, :columns] - 0.5
    kept = (positive.float() * (1 / step) + noise).clamp_max(STEPS).round().to(torch.uint8)
    y = positive * positive
    return y, kept, step, y.amax().float() if y.numel() else step.new_zeros(())


class _ReluSquared(NamedTuple):
    """For Pass.after: returns a tensor whose gradient is that of relu(y)^2, and what the next layer reads with it: the
    tensors of its input operand, if a kernel makes them as `how` says, and otherwise the largest value. The tensor is
    then y, of which only the gradient counts, and otherwise relu(y)^2. For the derivative relu(y) is kept in 8 bits, or
    y is computed again."""

    how: Quantization | None
    recomputes: bool

    def forward(self, y: Tensor) -> tuple[tuple[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        if self.how is None:
            y, *made = relu_squared(y)
        else:
            made = gemm.quantize_rows(y, self.how, new_seed(y.device))
        return (y,), made[:-2], () if self.recomputes else made[-2:]

    def backward(self, y: Tensor, kept: Sequence[Tensor], grad: Tensor, *_: Tensor) -> tuple[Tensor]:
        return (gemm.relu_squared_gradient(grad, y),)


def relu_squared_linear(x: Tensor, first: torch.nn.Linear, second: QuantLinear, recompute: bool = False) -> Tensor:
    """Computes second(relu(first(x))^2). x is FP32 or BF16 (..., in_features of first), and the result is
    (..., out_features of second).

    For the derivative of ReLU^2 its input is kept in 8 bits. With recompute it is computed again from the operands of
    the first layer instead, and the derivative is exact. If the layers have hooks or biases, or the kernels cannot
    compute ReLU^2 with the second layer's operand, relu(x)^2 is computed as a tensor.
    """
    if not gradients_are_wanted():  # Nothing is drawn and nothing is kept.
        return second(torch.relu(first(x)).square(), nonnegative=True)
    if not (isinstance(first, QuantLinear) and can_be_fused([first]) and first.largest is None and x.numel()):
        y, amax = EightBitReluSquared.apply(first(x))
        return second(y, amax, nonnegative=True)
    recipe, how = second.recipe, None
    alone = can_be_fused([second]) and second.largest is None and not second.scales_each_token
    other = recipe.output.rht_dim or recipe.grad_weight.b.raw  # The kernel does not rotate, and writes no relu(x)^2.
    if alone and not other and gemm.made_in_rows(recipe.output.a) and dispatch.use_kernels(x.device):
        how = Pass(recipe, x.dtype, True).how(INPUT, None, None, x.device)
    y, *made = first.outputs(x, (first,), after=_ReluSquared(how, recompute))
    y = y.view(*x.shape[:-1], -1)
    if how is None:
        return second(y, *made, nonnegative=True)
    return second.outputs(y, (second,), input=gemm.operand_of_rows(made, how), nonnegative=True)
