"""relu(x)^2, for which the backward pass keeps relu(x) in 8 bits, and the quantized layer after it.

The derivative of relu(x)^2 is 2 relu(x). Keeping relu(x) in 8 bits instead of 16 saves memory, and rounding it
stochastically keeps the gradient unbiased. Random numbers come from Philox, as in the quantizers, so that the Triton
kernel gives the same bits. One call of Philox serves eight elements. torch.rand under torch.compile would take a call
for each element. This file has the reference, and calls the kernel.

relu_squared_linear computes relu(x)^2 and the layer as one operation. Its kernels read x and write the codes of
relu(x)^2, and relu(x) in 8 bits. They do not write relu(x)^2 itself. The result has the bits of the two operations one
after the other.
"""

import torch

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.fused import can_be_fused
from nanochat_fp4.nvfp4.gemm import once_differentiable
from nanochat_fp4.nvfp4.layer_pass import Pass, check_input
from nanochat_fp4.nvfp4.linear import QuantLinear, gradients, output
from nanochat_fp4.nvfp4.makers import quantize_relu_squared
from nanochat_fp4.nvfp4.philox import new_seed, uniform_elements
from nanochat_fp4.nvfp4.quantizers import divide
from nanochat_fp4.nvfp4.recipes import INPUT

STEPS = 255  # The largest value of a row, in units of the row's step.


class EightBitReluSquared(torch.autograd.Function):
    """Computes (relu(x)^2, its largest value). The derivative is computed from the 8-bit tensor of relu_squared."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, kept, step, amax = relu_squared(x)
        ctx.save_for_backward(kept, step)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        return relu_squared_gradient(grad_y, *ctx.saved_tensors)


class UndifferentiatedReluSquared(torch.autograd.Function):
    """Computes relu(x)^2 without its derivative: the gradient of the result is passed on as the gradient of x."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).square()

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor) -> torch.Tensor:
        return grad_y


def relu_squared_gradient(grad_y: torch.Tensor, kept: torch.Tensor, step: torch.Tensor | None = None) -> torch.Tensor:
    """Returns grad_y * 2 relu(x), in grad_y's dtype. kept and step are results of relu_squared. Without step, kept is x
    itself."""
    return (grad_y * (2 * torch.relu(kept) if step is None else 2 * step * kept)).to(grad_y.dtype)


def relu_squared(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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


def relu_squared_reference(
    x: torch.Tensor, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes relu_squared of x (R, C) with the random numbers of the seed, int64 (). Each row begins with a new call
    of Philox, so that a kernel can compute rows independently."""
    rows, columns = x.shape
    positive = torch.relu(x)
    # Without the lower bound, a row of zeros would cause a division by 0.
    step = divide(positive.amax(-1, keepdim=True).float(), STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    padded = -(-columns // 16) * 16
    noise = uniform_elements(seed, 0, rows * padded, 0, 0, x.device).view(rows, padded)[:, :columns] - 0.5
    kept = (positive.float() * (1 / step) + noise).clamp_max(STEPS).round().to(torch.uint8)
    y = positive * positive
    return y, kept, step, y.amax().float() if y.numel() else step.new_zeros(())


class _OfReluSquared(torch.autograd.Function):
    """Computes relu(x)^2 . W^T. With derivative, backward returns the gradient of x, otherwise the one of relu(x)^2."""

    @staticmethod
    def forward(ctx, p: Pass, derivative: bool, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        needs = p.needs(*ctx.needs_input_grad[2:])
        seed_of_bits = new_seed(x.device)
        seed = p.forward_seed(needs, x.device)
        how = p.quantization(INPUT, seed, seed, x.device)
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

    For the derivative, relu(x) is kept in 8 bits. If derivative is false, nothing is kept. Backward
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
    y, amax = EightBitReluSquared.apply(x)
    return linear(y, amax)


def _quantizes_as_it_is_made(linear: QuantLinear, x: torch.Tensor) -> bool:
    recipe = linear.recipe
    alone = can_be_fused([linear]) and linear.largest is None and not linear.scales_each_token
    kernel = recipe.input_is_codes and recipe.output.a.rounding.block_rows == 1 and use_kernels(x.device)
    return bool(alone and x.numel() and kernel)
