"""Makes quantized layers draw their seeds inside reentrant activation checkpoints (use_reentrant=True).

A reentrant checkpoint runs its function twice: in the forward pass without gradients, and in the backward pass with
gradients. torch restores the state of the random generators before the second run. The first run must therefore draw
the random numbers that the second run draws, although a quantized layer draws nothing in other passes without
gradients. Otherwise the generators would not advance between checkpoints, and all checkpoints would use the same seed.

This module replaces CheckpointFunction.forward by one that counts the runs in progress. The second run computes with
the layers' settings of its own time, so a backward pass belongs inside the contexts of its forward pass (contexts.py).
"""

import functools
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

# The number of runs in progress in all threads. It is not kept by thread, because autograd computes the backward pass
# of a GPU in a thread of its own. It is a plain number, because torch.compile reads it.
_runs = 0


def inside_checkpoint() -> bool:
    return _runs > 0


def gradients_are_wanted() -> bool:
    """Whether gradients will be computed for the present pass. torch.is_grad_enabled() is false in the first run of a
    checkpoint, although its second run computes gradients, so this function also returns true inside a checkpoint."""
    return torch.is_grad_enabled() or inside_checkpoint()


def _counting_runs(forward: Any) -> Any:
    @functools.wraps(forward)
    def checkpoint(ctx: Any, function: Any, *args: Any) -> Any:
        def run(*args: Any) -> Any:
            global _runs
            _runs += 1
            try:
                return function(*args)
            finally:
                _runs -= 1

        return forward(ctx, run, *args)

    return checkpoint


CheckpointFunction.forward = staticmethod(_counting_runs(CheckpointFunction.forward))
