"""A quantized layer of relu(x)^2, which is quantized as it is made.

The kernels read x once, and write the codes of relu(x)^2 and 8 bits of relu(x) for the derivative (relu_squared.py).
relu(x)^2 itself is never written. The result has the bits of the two operations one after the other.
"""

import torch

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.fused import can_be_fused
from nanochat_fp4.nvfp4.gemm import once_differentiable
from nanochat_fp4.nvfp4.layer_pass import Pass, check_input
from nanochat_fp4.nvfp4.linear import QuantLinear, gradients, output
from nanochat_fp4.nvfp4.makers import quantize_relu_squared
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.recipes import INPUT
from nanochat_fp4.nvfp4.relu_squared import EightBitReluSquared, UndifferentiatedReluSquared, relu_squared_gradient


class _OfReluSquared(torch.autograd.Function):
    """relu(x)^2 . W^T. derivative: the gradient is that of x, not of relu(x)^2."""

    @staticmethod
    def forward(ctx, p: Pass, derivative: bool, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        needs = p.needs(*ctx.needs_input_grad[2:])
        seed_of_bits = new_seed(x.device)
        seed = p.forward_seed(needs, x.device)
        how = p.operands.quantization(INPUT, seed, seed, x.device)
        xq, *bits = quantize_relu_squared(x, how, seed_of_bits)
        y, _, ctx.state, saved = output(p, needs, x, (weight,), seed, xq)
        ctx.kept = len(saved)
        ctx.save_for_backward(*saved, *(bits if derivative else ()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        saved, bits = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
        grad_x, (grad_weight,) = gradients(ctx.state, saved, grad_output)
        if grad_x is not None and bits:
            grad_x = relu_squared_gradient(grad_x, *bits)
        return None, None, grad_x, grad_weight


def relu_squared_linear(x: torch.Tensor, linear: QuantLinear, derivative: bool = True) -> torch.Tensor:
    """linear(relu(x)^2) of a layer that quantizes its input. x (..., in_features) is in FP32 or BF16.

    8 bits of relu(x) are kept for the derivative (relu_squared.py). Without derivative nothing is kept, and the
    gradient is that of relu(x)^2: the caller multiplies by 2 relu(x).

    A layer with hooks, which want to see relu(x)^2, is called with it.
    """
    if _quantizes_as_it_is_made(linear, x):
        check_input(x, linear.in_features)
        p = linear.new_pass(x, (linear,))
        return _OfReluSquared.apply(p, derivative, p.rows(x), linear.matrix).view(*x.shape[:-1], -1)
    if not derivative:
        if linear.quantizes_input:
            new_seed(x.device)  # that of relu(x)'s 8 bits: all other random numbers stay the same
        return linear(UndifferentiatedReluSquared.apply(x))
    y, amax = EightBitReluSquared.apply(x, linear.part_number or 0)
    return linear(y, amax)


def _quantizes_as_it_is_made(linear: QuantLinear, x: torch.Tensor) -> bool:
    recipe = linear.recipe
    alone = can_be_fused([linear]) and linear.part_number is None and not linear.scales_each_token
    kernel = recipe.input_is_codes and recipe.output.a.rounding.block_rows == 1 and use_kernels(x.device)
    return bool(alone and x.numel() and kernel)
