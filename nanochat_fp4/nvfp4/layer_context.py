"""What the with-statements of contexts.py have set for a layer, and the weights that this holds for.

Codes that were made before a pass, and memory that gradients are added to, belong to weights and not to layers: a layer
may compute with another weight in between (torch.func.functional_call, a parametrization). Both are therefore kept
together with the Parameters that they were made for, and used for these alone.
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
    """Two numbers, one of which changes with every change of the weight that PyTorch counts, and with its memory.

    PyTorch counts no change of an inference tensor, and none that is made through `.data`.
    """
    weight = local(weight)
    changes = 0 if weight.is_inference() else weight._version
    return changes, 0 if weight.is_meta else weight.untyped_storage().data_ptr()


class PreparedWeight(NamedTuple):
    """The weight operand of the output GEMM, made before the passes that use it.

    operand:  of the weights, one below the other
    weights:  the layers' weights that it was made of
    versions: version_of each of them at that time
    recipe, factor: of the layers at that time (factor: their error feedback, or None)
    """

    operand: GemmOperand
    weights: tuple[torch.Tensor, ...]
    versions: tuple[tuple[int, int], ...]
    recipe: Recipe
    factor: torch.Tensor | None

    def is_of(self, weights: Sequence[torch.Tensor], recipe: Recipe, factor: torch.Tensor | None) -> bool:
        """Whether a pass with these weights computes with this operand. Raises RuntimeError if a weight has changed."""
        if not _same(self.weights, weights) or self.recipe != recipe or self.factor is not factor:
            return False
        # A graph has no versions. The context compares them when it is left.
        if not torch.compiler.is_compiling() and self.versions != tuple(version_of(w) for w in weights):
            raise RuntimeError(WEIGHTS_CHANGED)
        return True


class GradientMemory(NamedTuple):
    """Float32 (N, K), to which the gradients of these weights are added, one below the other."""

    memory: torch.Tensor
    weights: tuple[torch.Tensor, ...]

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        return _same(self.weights, weights)


def _same(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others))


@dataclass
class LayerContext:
    """The settings of a layer by the contexts that it is inside of. Outside of all contexts: the defaults. Never
    changed, only replaced.

    full_precision: compute like nn.Linear
    per_token:      each row of the input has a tensor_scale of its own
    weights:        made for this layer, and for groups of layers computed as one that begin with it
    gradients:      of this layer, and of such groups
    entered:        each context that was entered and not left -> the fields above that it asks for
    """

    full_precision: bool = False
    per_token: bool = False
    weights: tuple[PreparedWeight, ...] = ()
    gradients: tuple[GradientMemory, ...] = ()
    entered: dict[object, dict[str, Any]] = field(default_factory=dict)

    def weight_of(
        self, weights: Sequence[torch.Tensor], recipe: Recipe, factor: torch.Tensor | None
    ) -> GemmOperand | None:
        """The operand that was made of these weights, or None. Raises RuntimeError if a weight has changed since."""
        return next((made.operand for made in self.weights if made.is_of(weights, recipe, factor)), None)

    def gradient_of(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The memory that the gradients of these weights are added to, or None: autograd adds them."""
        return next((gradient.memory for gradient in self.gradients if gradient.is_of(weights)), None)


OUTSIDE = LayerContext()
_LOCK = threading.Lock()  # threads enter and leave contexts of one model side by side
_entered: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # the layers inside of a context


def change_context(layer: torch.nn.Module, change: Callable[[dict], dict]) -> None:
    """Gives the layer the settings of other contexts. change: from LayerContext.entered to another dict."""
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
    """(full_precision, per_token) of each layer that is inside of a context."""
    with _LOCK:
        found = {layer: (layer.context.full_precision, layer.context.per_token) for layer in _entered}
    return weakref.WeakKeyDictionary(found)


@contextlib.contextmanager
def with_settings(settings: "weakref.WeakKeyDictionary[torch.nn.Module, tuple[bool, bool]]") -> Iterator[None]:
    """Inside, layers have the settings that settings_now returned earlier. Layers without one have the defaults."""
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
    """Inside, layers have the settings that `context` asks for. asked: layer -> fields of LayerContext."""
    try:
        for layer, fields in asked.items():
            change_context(layer, lambda entered, fields=fields: entered | {context: fields})
        yield
    finally:
        for layer in asked:
            change_context(layer, lambda entered: {c: fields for c, fields in entered.items() if c is not context})
