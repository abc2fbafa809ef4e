"""What some methods do to input and weight before the layer's GEMMs, as differentiable functions around them.

rotated        x -> x R with an orthonormal block-diagonal R, the same for input and weight, so that the product stays
               what it is; autograd rotates the gradients back (Quartet's forward)
masked         x -> x, with a gradient only where the forward's rounding is trusted (QuEST, Panferov et al., 2025):
               clipped     not where it clipped: |x| >= 6 scales
               uncertain   not where it misses by more than half of the block's scale, which only happens above 4
                           scales, where the E2M1 grid is coarse
"""

import torch

from nanochat_fp4.nvfp4.format import E2M1_MAX
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.quantizers import get_rounding, quantize_reference
from nanochat_fp4.nvfp4.recipes import Recipe

FIXED_SEED = 0  # of the forward's signs: one rotation for all layers and the whole run
TRUSTED_ERROR = 0.5  # in units of the block's scale


def trusted(x: torch.Tensor, rounding: str, mask: str) -> torch.Tensor:
    """Where the gradient of x (R, K) may pass, bool (R, K); mask: a name of recipes.MASKS."""
    t = quantize_reference(x, get_rounding(rounding))
    scale = t.scales.to(torch.float32) * t.tensor_scale
    x = x.to(torch.float32).unflatten(-1, (scale.shape[-1], -1))
    if mask == "clipped":
        far = x.abs() < E2M1_MAX * scale.unsqueeze(-1)
    else:
        error = (x - t.dequantize().unflatten(-1, (scale.shape[-1], -1))).abs()
        far = error <= TRUSTED_ERROR * scale.unsqueeze(-1)
    return far.flatten(-2)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, rounding: str, mask: str) -> torch.Tensor:
        ctx.save_for_backward(trusted(x, rounding, mask))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return grad * ctx.saved_tensors[0], None, None


def prepare(x: torch.Tensor, weight: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """x (M, K) and weight (N, K) as the recipe's GEMMs get them, differentiable; FP32 where they are rotated."""
    if recipe.forward_rht_dim:
        x, weight = (rotate(v, FIXED_SEED, dim=recipe.forward_rht_dim) for v in (x, weight))
    if recipe.mask:
        x = _Masked.apply(x, recipe.output.a.rounding, recipe.mask)
        weight = _Masked.apply(weight, recipe.output.b.rounding, recipe.mask)
    return x, weight
