"""Makes quantized layers work with reentrant activation checkpointing (torch.utils.checkpoint with use_reentrant=True).

A reentrant checkpoint runs its function twice: in the forward pass without gradients, and in the backward pass with
gradients. torch restores the state of the random generators before the second run. Quantized layers need two more
things, which torch cannot provide.

- The first run must draw the random numbers that the second run draws. Elsewhere a quantized layer draws nothing in a
  pass without gradients. If the first run drew nothing, the generator would not advance between checkpoints, and all
  checkpoints would use the same seed.
- The second run must compute with the settings of the first one, although contexts (contexts.py) may have been left in
  between.

This module therefore replaces CheckpointFunction.forward by one that wraps the checkpoint's function. The wrapper
marks when the function runs, and restores the layers' settings.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from nanochat_fp4.nvfp4.layer_context import settings_now, with_settings

# The number of runs in progress in all threads. It is not kept by thread, because autograd computes the backward pass
# of a GPU in a thread of its own. It is a plain number, because torch.compile reads it.
_runs = 0


def inside_checkpoint() -> bool:
    """Whether a reentrant checkpoint is running its function now, for the first or the second time."""
    return _runs > 0


def gradients_are_wanted() -> bool:
    """Whether gradients will be computed for the present pass. torch.is_grad_enabled() is false in the first run of a
    checkpoint, although its second run computes gradients, so this function also returns true inside a checkpoint."""
    return torch.is_grad_enabled() or _runs > 0


@contextlib.contextmanager
def _running() -> Iterator[None]:
    global _runs
    _runs += 1
    try:
        yield
    finally:
        _runs -= 1


class _Run:
    """The function of one checkpoint. The layers' settings at the time of its making hold in each of its calls."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.settings = settings_now()

    def __call__(self, *args: Any) -> Any:
        with _running(), with_settings(self.settings):
            return self.function(*args)


def _knowing_its_run(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpoint(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        return forward(ctx, _Run(function), *args)

    return checkpoint


CheckpointFunction.forward = staticmethod(_knowing_its_run(CheckpointFunction.forward))
