"""One pass through a quantized layer: what the three products of linear.py need to know besides their tensors."""

from typing import NamedTuple, Protocol

import torch

from nanochat_fp4.nvfp4.checkpointing import inside_checkpoint
from nanochat_fp4.nvfp4.dispatch import FIRST_RIGHT, Libraries
from nanochat_fp4.nvfp4.gemm import GemmOperand, after
from nanochat_fp4.nvfp4.makers import Quantization
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.recipes import INPUT, WEIGHT, Recipe

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
UNQUANTIZED = Recipe("bf16")


class LayerOperands(Protocol):
    """The operands of a layer: WholeOperands, or those of a process that has a part of the layer (tensor_parallel.py).

    recipe:       of this pass
    quantization: how an operand (INPUT to INPUT_T) is made; arguments as Recipe.quantization
    gathered:     the input operand of all tokens, of the one that was made of this process's tokens
    scattered:    the gradient (M, K) of this process's tokens, of the product with all tokens
    """

    @property
    def recipe(self) -> Recipe: ...

    def quantization(
        self, operand: int, seed: torch.Tensor | None, signs: torch.Tensor | None, device: torch.device
    ) -> Quantization: ...

    def gathered(self, xq: GemmOperand) -> GemmOperand: ...

    def scattered(self, grad_x: torch.Tensor) -> torch.Tensor: ...


class WholeOperands(NamedTuple):
    """The operands of a layer that this process computes alone, of all its tokens."""

    recipe: Recipe

    def quantization(
        self, operand: int, seed: torch.Tensor | None, signs: torch.Tensor | None, device: torch.device
    ) -> Quantization:
        return self.recipe.quantization(operand, seed, signs, device)

    def gathered(self, xq: GemmOperand) -> GemmOperand:
        return xq

    def scattered(self, grad_x: torch.Tensor) -> torch.Tensor:
        return grad_x


class Pass(NamedTuple):
    """One forward pass of a layer and its backward pass, but for the tensors that autograd follows.

    operands:     how the operands are made, by the recipe of this pass
    dtype:        in which unquantized operands are multiplied, and of the output
    grad_enabled: the caller's torch.is_grad_enabled(). needs_input_grad does not know of no_grad.
    per_token:    each row of the input has a tensor_scale of its own
    amax:         max |input|, float32 (), where the caller knows it
    factor:       of the weight's error feedback, float16 (K, K), or None
    prepared_weight: the weight operand of the output GEMM, where it was made before this pass (quantize_weights_once)
    gradient:     float32 (N, K), to which the gradient of the weights is added. Autograd then gets none. Autograd does
                  not save this tensor, because it takes no tensor that changes.
    libraries:    which implementation makes each FP4 product
    """

    operands: LayerOperands
    dtype: torch.dtype
    grad_enabled: bool
    per_token: bool = False
    amax: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    prepared_weight: GemmOperand | None = None
    gradient: torch.Tensor | None = None
    libraries: Libraries = FIRST_RIGHT

    @property
    def recipe(self) -> Recipe:
        return self.operands.recipe

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., K) as (M, K). What is not quantized is kept for the backward pass, so in the dtype of the product."""
        rows = x.reshape(-1, x.shape[-1])
        return rows if self.recipe.quantizes else rows.to(self.dtype)

    def needs(self, x: bool, *weights: bool) -> tuple[bool, bool]:
        """Whether the gradients of the input and of the weights are wanted. Arguments: of needs_input_grad."""
        return x and self.grad_enabled, any(weights) and self.grad_enabled

    def forward_seed(self, needs: tuple[bool, bool], device: torch.device) -> torch.Tensor | None:
        """The seed of this forward pass, int64 (), or None if nothing is drawn."""
        drawn = self.recipe.draws_in_forward and (any(needs) or inside_checkpoint())
        return new_seed(device) if drawn else None

    def of_input(self, seed: torch.Tensor | None, device: torch.device) -> Quantization:
        """How Qx(X), the input operand of the output GEMM, is made."""
        how = self.operands.quantization(INPUT, seed, seed, device)
        knows_amax = how.rounding and how.rounding.takes_amax and not (how.rht_dim or self.per_token)
        return how._replace(per_token=self.per_token, amax=self.amax if knows_amax else None)

    def of_weight(self, seed: torch.Tensor | None, device: torch.device) -> Quantization:
        """How Qw(W), the weight operand of the output GEMM, is made."""
        return self.operands.quantization(WEIGHT, seed, seed, device)._replace(factor=self.factor)


# torch.compile chooses anew which operation runs in which pass. A seed may be drawn in both passes, if neither the
# forward's outputs nor the backward's inputs seem to need the seed. The two operands of a GEMM would then be rotated
# with different signs, and the result would be noise. Under a compiler, therefore, the output depends on the forward's
# seed, and the backward's seed on grad_output.


def needing(wq: GemmOperand, seed: torch.Tensor | None) -> GemmOperand:
    """The weight operand, which a compiler must take for a function of the seed."""
    return wq if seed is None or not torch.compiler.is_compiling() else wq.depending_on(seed)


def backward_seed(grad_output: torch.Tensor) -> torch.Tensor:
    """The seed of a backward pass, int64 ()."""
    seed = new_seed(grad_output.device)
    return after(seed, grad_output) if torch.compiler.is_compiling() else seed


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype in which nn.Linear would multiply x: autocast's where autocast is on, else x's."""
    device = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def check_compute_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError unless layers multiply in this dtype."""
    if dtype not in COMPUTE_DTYPES:
        raise ValueError(
            f"QuantLinear computes in float32 or bfloat16 and got {str(dtype).removeprefix('torch.')}; use "
            "model.bfloat16(), model.float(), or autocast to bfloat16"
        )


def check_input(x: torch.Tensor, features: int) -> None:
    """Raises ValueError unless x is (..., features) in a float dtype."""
    if x.dim() and x.shape[-1] == features and x.is_floating_point():
        return
    dtype = str(x.dtype).removeprefix("torch.")
    raise ValueError(
        f"QuantLinear: the input is {tuple(x.shape)} in {dtype}, expected (..., {features}) in float32 or bfloat16; "
        "give it the layer's in_features"
    )
