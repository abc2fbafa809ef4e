"""The settings that the context managers of contexts.py have given a layer, and the weights that the settings hold for.

Codes that were made before a pass, and memory that gradients are added to, belong to weights and not to layers, because
a layer may compute with another weight in between (torch.func.functional_call, a parametrization). Both are therefore
stored together with the Parameters that they were made for, and are used for these Parameters only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4.collectives import local
from nanochat_fp4.nvfp4.gemm import GemmOperand
from nanochat_fp4.nvfp4.recipes import Recipe

WEIGHTS_CHANGED = (
    "quantize_weights_once: weights changed inside the context, so gradients would be computed for the old ones; leave "
    "it before optimizer.step()"
)


def version_of(weight: torch.Tensor) -> tuple[int, int]:
    """Returns PyTorch's version counter of the weight and the address of its memory. A weight with the same two numbers
    has not changed.

    There are two exceptions. PyTorch does not count changes of an inference tensor, nor changes through `.data`.
    """
    weight = local(weight)
    changes = 0 if weight.is_inference() else weight._version
    return changes, 0 if weight.is_meta else weight.untyped_storage().data_ptr()


class PreparedWeight(NamedTuple):
    """A weight operand of the output GEMM that was made before the passes that use it.

    operand:  the operand of the weights, stacked one below the other
    weights:  the layers' weights that the operand was made of
    versions: version_of each weight when the operand was made
    recipe:   the layers' recipe when the operand was made
    """

    operand: GemmOperand
    weights: tuple[torch.Tensor, ...]
    versions: tuple[tuple[int, int], ...]
    recipe: Recipe

    def is_of(self, weights: Sequence[torch.Tensor], recipe: Recipe) -> bool:
        """Whether a pass with these weights and this recipe may use this operand.

        Raises RuntimeError if the operand was made of these weights and one of them has changed since.
        """
        if not _same(self.weights, weights) or self.recipe != recipe:
            return False
        # A graph has no versions. The context compares them when it is left.
        if not torch.compiler.is_compiling() and self.versions != tuple(version_of(w) for w in weights):
            raise RuntimeError(WEIGHTS_CHANGED)
        return True


class GradientMemory(NamedTuple):
    """The memory, float32 (N, K), that the gradients of these weights are added to, stacked one below the other."""

    memory: torch.Tensor
    weights: tuple[torch.Tensor, ...]

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        return _same(self.weights, weights)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


@dataclass(frozen=True)
class LayerContext:
    """The settings that a layer has from the contexts that it is inside of. Outside of all contexts the layer has the
    defaults.

    full_precision: whether the layer computes like nn.Linear
    per_token:      whether each row of the input has a tensor_scale of its own
    weights:        the prepared weights of this layer, and of the fused groups of layers that begin with this layer
    gradients:      the gradient memory of this layer, and of the same groups
    """

    full_precision: bool = False
    per_token: bool = False
    weights: tuple[PreparedWeight, ...] = ()
    gradients: tuple[GradientMemory, ...] = ()

    def weight_of(self, weights: Sequence[torch.Tensor], recipe: Recipe) -> GemmOperand | None:
        """Returns the operand that was made of these weights, or None if there is none.

        Raises RuntimeError if a weight has changed since.
        """
        return next((made.operand for made in self.weights if made.is_of(weights, recipe)), None)

    def gradient_of(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Returns the memory that the gradients of these weights are added to. None means that autograd adds them."""
        return next((gradient.memory for gradient in self.gradients if gradient.is_of(weights)), None)


OUTSIDE = LayerContext()


class InContext(torch.nn.Module):
    """A module that full_precision and per_token_scale change. It reads its settings from `context`."""

    context: LayerContext = OUTSIDE

    def __getstate__(self) -> dict:
        """Leaves the context out, so that a copy or a pickle that is made inside a context is outside of it."""
        return {name: value for name, value in vars(self).items() if name != "context"}
