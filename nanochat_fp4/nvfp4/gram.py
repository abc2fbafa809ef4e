"""What is known of a layer's inputs: their Gram matrix, E[x x^T] (GPTQ's H), and what a method takes from it.

Training makes it (convert.update_gram_matrices): an exponential average of the inputs' outer products, in a buffer of
the layer, or of the first of the layers that are computed as one.
"""

from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4.feedback import feedback_factor
from nanochat_fp4.nvfp4.recipes import Recipe

STATE_NAME = "second_moment"  # the buffer's name in state dicts, from before it was called a Gram matrix


class InputStatistics(NamedTuple):
    """factor: of feedback.feedback_factor, (K, K); channels: the in_features with the largest inputs, int64 (H,),
    rising. None: the method takes no such thing, or the inputs are not known yet."""

    factor: torch.Tensor | None = None
    channels: torch.Tensor | None = None


def input_statistics(recipe: Recipe, gram: torch.Tensor) -> InputStatistics:
    """gram: float32 (K, K). No host sync."""
    factor = channels = None
    if recipe.output.b.feedback:
        factor = feedback_factor(gram)
    if recipe.outliers:
        largest = gram.diagonal().topk(recipe.outlier_channels(gram.shape[0])).indices
        channels = largest.sort().values
    return InputStatistics(factor, channels)
