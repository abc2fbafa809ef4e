"""relu(x)^2 with relu(x) in 8 bits beside it, for the derivative: the reference, and the choice of the implementation.

The module lies beside the quantizers because, like them, it rounds with Philox's numbers. The Triton kernel gives the
same bits. One Philox call serves eight elements, where torch.compile's torch.rand takes a call for each.
"""

import torch

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.gemm import once_differentiable
from nanochat_fp4.nvfp4.philox import new_seed, uniform_elements
from nanochat_fp4.nvfp4.quantizers import divide

STEPS = 255  # a row's largest value in steps


class EightBitReluSquared(torch.autograd.Function):
    """(relu(x)^2, its largest value). The derivative comes from relu_squared's 8-bit tensor."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        y, kept, step, amax = relu_squared(x, part)
        ctx.save_for_backward(kept, step)
        ctx.mark_non_differentiable(amax)
        return y, amax

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return relu_squared_gradient(grad_y, *ctx.saved_tensors), None


class UndifferentiatedReluSquared(torch.autograd.Function):
    """relu(x)^2 with the gradient of relu(x)^2, which passes as it is."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x).square()

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor) -> torch.Tensor:
        return grad_y


def relu_squared_gradient(grad_y: torch.Tensor, kept: torch.Tensor, step: torch.Tensor | None = None) -> torch.Tensor:
    """grad_y * 2 relu(x), in grad_y's dtype. Without step, kept is x."""
    return (grad_y * (2 * torch.relu(kept) if step is None else 2 * step * kept)).to(grad_y.dtype)


def relu_squared(x: torch.Tensor, part: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x `(..., C)` FP32 or BF16 -> (y, kept, step, max y).

    y = relu(x)^2 is `(..., C)` in x's dtype. kept is uint8 `(..., C)`, and step float32 `(..., 1)`. max y, float32 (),
    is for the quantization of y. On average kept * step is relu(x).

    - step is 1/255 of the row's largest value.
    - kept is rounded stochastically with 16 random bits, with a bias of at most 2^-16 of a step.
    - part is the index of these columns if several processes have some columns each and draw the same seeds.
    """
    seed, rows = new_seed(x.device) + part, x.reshape(-1, x.shape[-1])
    if use_kernels(x.device):
        from nvfp4_kernels.relu_squared import relu_squared as kernel

        y, kept, step, amax = kernel(rows, seed)
    else:
        y, kept, step, amax = relu_squared_reference(rows, seed)
    return y.view(x.shape), kept.view(x.shape), step.view(*x.shape[:-1], 1), amax


def relu_squared_reference(
    x: torch.Tensor, seed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """relu_squared of x (R, C), with the random numbers of seed, int64 (). Every row begins with a Philox call."""
    rows, columns = x.shape
    positive = torch.relu(x)
    # clamp_min: an all-zero row would otherwise divide by 0.
    step = divide(positive.amax(-1, keepdim=True).float(), STEPS).clamp_min(torch.finfo(torch.float32).tiny)
    padded = -(-columns // 16) * 16
    noise = uniform_elements(seed, 0, rows * padded, 0, 0, x.device).view(rows, padded)[:, :columns] - 0.5
    kept = (positive.float() * (1 / step) + noise).clamp_max(STEPS).round().to(torch.uint8)
    y = positive * positive
    return y, kept, step, y.amax().float() if y.numel() else step.new_zeros(())
