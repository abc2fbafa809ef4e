"""The settings that the context managers of contexts.py have given a layer, and the weights that the settings hold for.

Codes that were made before a pass, and memory that gradients are added to, belong to weights and not to layers, because
a layer may compute with another weight in between (torch.func.functional_call, a parametrization). Both are therefore
stored together with the Parameters that they were made for, and are used for these Parameters only.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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


@dataclass
class LayerContext:
    """The settings that a layer has from the contexts that it is inside of. Outside of all contexts the layer has the
    defaults. A LayerContext is never changed in place. It is replaced by another one, so that other threads read a
    consistent state.

    full_precision: whether the layer computes like nn.Linear
    per_token:      whether each row of the input has a tensor_scale of its own
    weights:        the prepared weights of this layer, and of the fused groups of layers that begin with this layer
    gradients:      the gradient memory of this layer, and of the same groups
    entered:        the contexts that were entered and not yet left, each with the fields above that it asks for
    """

    full_precision: bool = False
    per_token: bool = False
    weights: tuple[PreparedWeight, ...] = ()
    gradients: tuple[GradientMemory, ...] = ()
    entered: dict[object, dict[str, Any]] = field(default_factory=dict)

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


_LOCK = threading.Lock()  # threads enter and leave contexts of one model side by side
_entered: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # the layers inside of a context


def change_context(layer: torch.nn.Module, change: Callable[[dict], dict]) -> None:
    """Changes the contexts that a layer is inside of, and with them its settings. The function `change` maps the
    present LayerContext.entered to the new one."""
    with _LOCK:
        entered = change(layer.context.entered)
        asked = {name: value for fields in entered.values() for name, value in fields.items()}
        if entered:
            vars(layer)["context"] = LayerContext(**asked, entered=entered)
            _entered.add(layer)
        else:
            vars(layer).pop("context", None)
            _entered.discard(layer)


# ----------------------------------------------------------------------------------------------------------------------
# The settings of one moment, for a function that runs again later (checkpointing.py)


def settings_now() -> "weakref.WeakKeyDictionary[torch.nn.Module, tuple[bool, bool]]":
    """Returns (full_precision, per_token) for each layer that is inside of a context at this moment."""
    with _LOCK:
        found = {layer: (layer.context.full_precision, layer.context.per_token) for layer in _entered}
    return weakref.WeakKeyDictionary(found)


@contextlib.contextmanager
def with_settings(settings: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[bool, bool]]") -> Iterator[None]:
    """Inside this context, layers have the settings that settings_now returned earlier. A layer that is not among them
    has the defaults."""
    now, token = settings_now(), object()
    other = {}
    for layer in {*settings, *now}:
        wanted = settings.get(layer, (False, False))
        if now.get(layer, (False, False)) != wanted:
            other[layer] = dict(zip(("full_precision", "per_token"), wanted))
    with entered_by(token, other):
        yield


@contextlib.contextmanager
def entered_by(context: object, asked: dict[torch.nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Inside this context, layers have the settings that `context` asks for. `asked` maps each layer to the fields of
    LayerContext that are set for it."""
    try:
        for layer, fields in asked.items():
            change_context(layer, lambda entered, fields=fields: entered | {context: fields})
        yield
    finally:
        for layer in asked:
            change_context(layer, lambda entered: {c: fields for c, fields in entered.items() if c is not context})
