"""Computes relu(x)^2 and the quantized layer after it as one operation.

The kernels read x and write the codes of relu(x)^2, and relu(x) in 8 bits for the derivative (relu_squared.py). They do
not write relu(x)^2 itself. The result has the bits of the two operations one after the other.
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
    """Computes relu(x)^2 . W^T. With derivative, backward returns the gradient of x, otherwise the one of relu(x)^2."""

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
    """Computes linear(relu(x)^2). x is FP32 or BF16 (..., in_features), and the result is (..., out_features).

    For the derivative, relu(x) is kept in 8 bits (relu_squared.py). If derivative is false, nothing is kept. Backward
    then returns the gradient of relu(x)^2, and the caller multiplies it by 2 relu(x).

    If the kernels cannot compute both at once, for example because the layer has hooks, relu(x)^2 is computed first and
    the layer is called with it.
    """
    if _quantizes_as_it_is_made(linear, x):
        check_input(x, linear.in_features)
        p = linear.new_pass(x, (linear,))
        return _OfReluSquared.apply(p, derivative, p.rows(x), linear.matrix).view(*x.shape[:-1], -1)
    if not derivative:
        if linear.quantizes_input:
            # The seed that relu(x)'s 8 bits would have used is drawn, so that all later random numbers stay the same.
            new_seed(x.device)
        return linear(UndifferentiatedReluSquared.apply(x))
    y, amax = EightBitReluSquared.apply(x, linear.part_number or 0)
    return linear(y, amax)


def _quantizes_as_it_is_made(linear: QuantLinear, x: torch.Tensor) -> bool:
    recipe = linear.recipe
    alone = can_be_fused([linear]) and linear.part_number is None and not linear.scales_each_token
    kernel = recipe.input_is_codes and recipe.output.a.rounding.block_rows == 1 and use_kernels(x.device)
    return bool(alone and x.numel() and kernel)
