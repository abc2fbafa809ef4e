"""What is known of a layer's inputs: their Gram matrix, E[x x^T] (GPTQ's H), and what a method takes from it.

It is state of the training, not of the model: layers hold it beside their parameters and buffers, so that state dicts,
EMA copies and `model.to(dtype)` know nothing of it. training.update_gram_matrices makes it; gram_state and
load_gram_state save and load it.

FP16, in units of the inputs' mean square, so that no entry is beyond K. docs/memory.md has what that takes, and why not
blocks of channels.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from nanochat_fp4.nvfp4.feedback import feedback_factor
from nanochat_fp4.nvfp4.recipes import Recipe

OLD_NAME = "second_moment"  # of a layer's Gram matrix in state dicts, where it was until 2026-11, in FP32
STEP = 0.2  # of the exponential average of Gram matrices: one over five looks at the inputs or so


class InputStatistics(NamedTuple):
    """factor: of feedback.feedback_factor, FP16 (K, K); channels: the in_features with the largest inputs, int64 (H,),
    rising. None: the method takes no such thing, or the inputs are not known yet."""

    factor: torch.Tensor | None = None
    channels: torch.Tensor | None = None


def products_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum of x x^T over rows (T, K), float32 (K, K)."""
    with torch.autocast(rows.device.type, enabled=False):
        rows = rows.float()
        return rows.T @ rows


def gram_matrix(mean: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Of the mean of x x^T (K, K), moved from the one before a STEP of the way. Not finite, it changes nothing."""
    new = in_units_of_its_mean(mean)
    moved = new if before is None else before.float().lerp(new, STEP)
    return torch.where(torch.isfinite(mean).all(), moved, 0.0 if before is None else before).half()


def in_units_of_its_mean(gram: torch.Tensor) -> torch.Tensor:
    return gram / gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)


def input_statistics(recipe: Recipe, gram: torch.Tensor) -> InputStatistics:
    """gram: of gram_matrix. No host sync."""
    factor = channels = None
    if recipe.output.b.feedback:
        factor = feedback_factor(gram.float()).half()
    if recipe.outliers:
        largest = gram.diagonal().float().topk(recipe.outlier_channels(gram.shape[0])).indices
        channels = largest.sort().values
    return InputStatistics(factor, channels)


def gram_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name of a layer -> Gram matrix of its inputs, float16 (K, K); empty where the method wants none, or has none yet.

    What a run that goes on needs besides state dicts. Layers that read the same tensor share one, and torch.save and
    torch.load keep it so.
    """
    return {n: m.gram_matrix for n, m in model.named_modules() if getattr(m, "gram_matrix", None) is not None}


def load_gram_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Gives the layers what gram_state returned, on the device of their weights; before or after convert.

    Also takes what state dicts had as <layer>.second_moment until 2026-11, in FP32. Raises ValueError for a state of
    another kind, and where a layer is not there or has inputs of another size.
    """
    layers = dict(model.named_modules())
    if not isinstance(state, Mapping) or not all(isinstance(gram, torch.Tensor) for gram in state.values()):
        raise ValueError(
            f"load_gram_state: got {type(state).__name__}, expected what gram_state returned, tensors by name of layer"
        )
    for name, gram in state.items():
        size = getattr(layers.get(name), "in_features", None)
        if not isinstance(size, int) or not gram.is_floating_point() or gram.shape != (size, size):
            raise ValueError(
                f"load_gram_state: {name!r} has {str(gram.dtype).removeprefix('torch.')} {tuple(gram.shape)}, expected "
                + (f"float16 {(size, size)}" if isinstance(size, int) else "the name of a linear layer of this model")
            )
    for name, gram in state.items():
        set_gram_matrix(layers[name], gram)


def set_gram_matrix(layer: nn.Module, gram: torch.Tensor) -> None:
    """gram: of gram_matrix, or in FP32 and in any units. A layer that quantizes takes from it what its recipe wants;
    another one keeps it until it is converted."""
    gram = gram.to(layer.weight.device)
    layer.gram_matrix = gram if gram.dtype == torch.float16 else in_units_of_its_mean(gram.float()).half()
    if hasattr(layer, "recipe"):
        layer.statistics = input_statistics(layer.recipe, layer.gram_matrix)
