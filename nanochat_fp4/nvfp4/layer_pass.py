"""The settings of one pass through a quantized layer, which the three products of linear.py need besides tensors."""

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4.checkpointing import inside_checkpoint
from nanochat_fp4.nvfp4.gemm import GemmOperand, after
from nanochat_fp4.nvfp4.makers import Quantization
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.recipes import INPUT, WEIGHT, Recipe

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
UNQUANTIZED = Recipe("bf16")


class Pass(NamedTuple):
    """The settings of one forward pass of a layer and of its backward pass. The tensors that autograd differentiates
    are not among them.

    recipe:       the recipe of this pass
    dtype:        the dtype of the output, in which unquantized operands are multiplied
    grad_enabled: the caller's torch.is_grad_enabled(). It is stored because needs_input_grad ignores torch.no_grad.
    per_token:    whether each row of the input has a tensor_scale of its own
    amax:         max |input|, float32 (), if the caller knows it
    prepared_weight: the weight operand of the output GEMM, if it was made before this pass (quantize_weights_once)
    gradient:     the memory that the gradient of the weights is added to, float32 (N, K), or None. If it is given,
                  backward returns no gradient of the weights. It is stored here and not by autograd, because autograd
                  refuses saved tensors that change.
    largest:      a function from an amax to that over all processes that have a part of the layer, or None
    """

    recipe: Recipe
    dtype: torch.dtype
    grad_enabled: bool
    per_token: bool = False
    amax: torch.Tensor | None = None
    prepared_weight: GemmOperand | None = None
    gradient: torch.Tensor | None = None
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None

    def quantization(
        self, operand: int, seed: torch.Tensor | None, signs: torch.Tensor | None, device: torch.device
    ) -> Quantization:
        return self.recipe.quantization(operand, seed, signs, device)._replace(largest=self.largest)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (..., K) as (M, K). An input that is not quantized is kept for the backward pass, so it is
        converted to the dtype of the product here."""
        rows = x.reshape(-1, x.shape[-1])
        return rows if self.recipe.quantizes else rows.to(self.dtype)

    def needs(self, x: bool, *weights: bool) -> tuple[bool, bool]:
        """Whether the gradients of the input and of the weights are wanted. The arguments are the entries of
        ctx.needs_input_grad for them."""
        return x and self.grad_enabled, any(weights) and self.grad_enabled

    def forward_seed(self, needs: tuple[bool, bool], device: torch.device) -> torch.Tensor | None:
        """Draws the seed of this forward pass, int64 (). Returns None if the pass draws no random numbers."""
        drawn = self.recipe.draws_in_forward and (any(needs) or inside_checkpoint())
        return new_seed(device) if drawn else None

    def of_input(self, seed: torch.Tensor | None, device: torch.device) -> Quantization:
        """Says how Qx(X), the input operand of the output GEMM, is made."""
        how = self.quantization(INPUT, seed, seed, device)
        knows_amax = how.rounding and how.rounding.takes_amax and not (how.rht_dim or self.per_token)
        return how._replace(per_token=self.per_token, amax=self.amax if knows_amax else None)

    def of_weight(self, seed: torch.Tensor | None, device: torch.device) -> Quantization:
        """Says how Qw(W), the weight operand of the output GEMM, is made."""
        return self.quantization(WEIGHT, seed, seed, device)


# torch.compile decides by itself which operation runs in which of the two passes. If neither the forward's outputs nor
# the backward's inputs seemed to depend on a seed, the compiler could draw the seed once in each pass. The two operands
# of a GEMM would then be rotated with different signs, and their product would be noise. Under a compiler, therefore,
# the output is made to depend on the forward's seed, and the backward's seed is made to depend on grad_output.


def needing(wq: GemmOperand, seed: torch.Tensor | None) -> GemmOperand:
    """Returns the weight operand in a form that a compiler takes for a function of the seed."""
    return wq if seed is None or not torch.compiler.is_compiling() else wq.depending_on(seed)


def backward_seed(grad_output: torch.Tensor) -> torch.Tensor:
    """Draws the seed of a backward pass, int64 ()."""
    seed = new_seed(grad_output.device)
    return after(seed, grad_output) if torch.compiler.is_compiling() else seed


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Returns the dtype in which nn.Linear would multiply x: autocast's dtype if autocast is on, otherwise x's."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def check_compute_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError if quantized layers do not compute in this dtype."""
    if dtype not in COMPUTE_DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"QuantLinear computes in float32 or bfloat16 and got {name}; {other_dtype([name])}")


def other_dtype(refused: Collection[str]) -> str:
    """Returns words for what a user does about weights in these dtypes. Autocast does not change float64."""
    if "float64" in refused:
        return "use model.float() or model.bfloat16()"
    return "use model.bfloat16(), model.float(), or autocast to bfloat16"


def check_input(x: torch.Tensor, features: int) -> None:
    """Raises ValueError if x is not (..., features) or has no floating-point dtype."""
    if x.dim() and x.shape[-1] == features and x.is_floating_point():
        return
    dtype = str(x.dtype).removeprefix("torch.")
    right = x.dim() and x.shape[-1] == features
    remedy = "convert it with x.float(), or embed token ids first" if right else "give it the layer's in_features"
    raise ValueError(
        f"QuantLinear: the input is {tuple(x.shape)} in {dtype}, expected (..., {features}) in float32 or bfloat16; "
        f"{remedy}"
    )
