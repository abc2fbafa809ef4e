"""Layers that are computed together with other layers, or with the operation before or after them.

fused_linear: several layers that read the same tensor, such as q, k and v (the paper, Appendix D.2). It computes one
layer whose weight is made of the layers' weights, stacked one below the other. The result has the bits of one
QuantLinear with this weight. Calling the layers one after the other gives slightly different numbers, for two reasons:
each weight and each grad_output then has a tensor scale of its own, and each layer draws its own random numbers.

linear_with_epilogue: a layer and the operation after it, without keeping the layer's output. The backward pass computes
the output again, with the same bits. Tensors that depend only on the output therefore need not be kept
(docs/memory.md).

relu_squared_linear: relu(x)^2, for which the backward pass keeps relu(x) in 8 bits, and the layer after it. The
derivative of relu(x)^2 is 2 relu(x). Keeping relu(x) in 8 bits instead of 16 saves memory, and rounding it
stochastically keeps the gradient unbiased. Random numbers come from Philox, as in the quantizers, so that the Triton
kernel gives the same bits. One call of Philox serves eight elements. torch.rand under torch.compile would take a call
for each element. The kernels read x and write the codes of relu(x)^2, and relu(x) in 8 bits. They do not write
relu(x)^2 itself. The result has the bits of the two operations one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.nvfp4.checkpointing import gradients_are_wanted
from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.gemm import Quantized, made_in_rows, once_differentiable, quantize_rows
from nanochat_fp4.nvfp4.layer import QuantLinear, stacked
from nanochat_fp4.nvfp4.philox import Noise, new_seed
from nanochat_fp4.nvfp4.quantizers import Quantization, divide

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
# The operation after a layer


def linear_with_epilogue(
    epilogue: Any, x: Tensor, linears: Sequence[QuantLinear], *others: Tensor
) -> tuple[Tensor, ...]:
    """Computes epilogue(x . W^T, *others) and returns the epilogue's results.

    x is (..., K). W (N, K) is made of the weights of `linears`, stacked one below the other. The layers must be ones
    for which can_be_fused is true, so they have no biases. Raises ValueError if x has another size or dtype than the
    layers take.
    """
    return linears[0].outputs(x, linears, others=others, after=epilogue)


# ----------------------------------------------------------------------------------------------------------------------
# relu(x)^2 before a layer

STEPS = 255  # The largest value of a row, in units of the row's step.


class EightBitReluSquared(torch.autograd.Function):
    """Computes (relu(x)^2, its largest value). The derivative is computed from the 8-bit tensor of relu_squared."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:
        y, kept, step, amax = relu_squared(x)
        ctx.save_for_backward(kept, step)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: Tensor, _: Tensor | None) -> Tensor:
        return relu_squared_gradient(grad_y, *ctx.saved_tensors)


class UndifferentiatedReluSquared(torch.autograd.Function):
    """Computes relu(x)^2 without its derivative: the gradient of the result is passed on as the gradient of x."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return torch.relu(x).square()

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> Tensor:
        return grad_y


def relu_squared_gradient(grad_y: Tensor, kept: Tensor, step: Tensor | None = None) -> Tensor:
    """Returns grad_y * 2 relu(x), in grad_y's dtype. kept and step are results of relu_squared. Without step, kept is x
    itself."""
    return (grad_y * (2 * torch.relu(kept) if step is None else 2 * step * kept)).to(grad_y.dtype)


def relu_squared(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes relu(x)^2 of x, FP32 or BF16 (..., C), and relu(x) in 8 bits. Returns (y, kept, step, amax).

    - y is relu(x)^2, (..., C), in x's dtype.
    - kept is uint8 (..., C), and the expected value of kept * step is relu(x). kept is rounded stochastically with 16
      random bits, which gives a bias of at most 2^-16 of a step.
    - step is float32 (..., 1): 1/255 of the row's largest value.
    - amax is the largest value of y, float32 (). The quantization of y needs it.
    """
    seed, rows = new_seed(x.device), x.reshape(-1, x.shape[-1])
    if use_kernels(x.device):
        from nvfp4_kernels.relu_squared import relu_squared as kernel

        y, kept, step, amax = kernel(rows, seed)
    else:
        y, kept, step, amax = relu_squared_reference(rows, seed)
    return y.view(x.shape), kept.view(x.shape), step.view(*x.shape[:-1], 1), amax


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
    """For Pass.before: quantizes relu(x)^2 by a kernel that does not write relu(x)^2 to memory, with the 8 bits that
    relu_squared draws from this seed. Without `derivative`, the gradient is the one of relu(x)^2."""

    seed: Tensor
    derivative: bool

    def forward(self, x: Tensor, how: Quantization) -> tuple[Quantized, tuple[Tensor, ...]]:
        operand, kept = quantize_rows(x, how, self.seed)
        return operand, kept if self.derivative else ()

    def backward(self, grad: Tensor, kept: Sequence[Tensor]) -> Tensor:
        return relu_squared_gradient(grad, *kept) if kept else grad


def relu_squared_linear(x: Tensor, linear: QuantLinear, derivative: bool = True) -> Tensor:
    """Computes linear(relu(x)^2). x is FP32 or BF16 (..., in_features), and the result is (..., out_features).

    For the derivative, relu(x) is kept in 8 bits. If derivative is false, nothing is kept. Backward
    then returns the gradient of relu(x)^2, and the caller multiplies it by 2 relu(x).

    If the kernels cannot compute both at once, for example because the layer has hooks, relu(x)^2 is computed first and
    the layer is called with it.
    """
    if not gradients_are_wanted():  # Nothing is drawn and nothing is kept.
        return linear(torch.relu(x).square(), nonnegative=True)
    recipe = linear.recipe
    alone = can_be_fused([linear]) and linear.largest is None and not linear.scales_each_token and x.numel()
    other = recipe.output.rht_dim or recipe.grad_weight.b.raw  # The kernel does not rotate, and writes no relu(x)^2.
    if alone and not other and made_in_rows(recipe.output.a) and use_kernels(x.device):
        return linear.outputs(x, (linear,), before=_ReluSquared(new_seed(x.device), derivative), nonnegative=True)
    if not derivative:
        if linear.quantizes_input:
            # The seed that relu(x)'s 8 bits would have used is drawn, so that all later random numbers stay the same.
            new_seed(x.device)
        return linear(UndifferentiatedReluSquared.apply(x), nonnegative=True)
    y, amax = EightBitReluSquared.apply(x)
    return linear(y, amax, nonnegative=True)
