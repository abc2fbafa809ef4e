"""Reentrant activation checkpointing (torch.utils.checkpoint with use_reentrant=True) of quantized layers.

Such a checkpoint runs its function twice: in the forward pass without gradients, and again with gradients in the
backward pass. torch puts the random generators back for the second run. Two things must therefore hold that torch
cannot know of.

- A run without gradients draws nothing elsewhere. The first run must draw what the second one draws, or the layers of
  all checkpoints would begin with one state of the generator, and would have one seed.
- The second run must compute what the first one did, although contexts (contexts.py) may have been left in between.

Both runs are seen here: CheckpointFunction.forward is given a function that knows its run.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from nanochat_fp4.nvfp4.layer_context import settings_now, with_settings

# The number of runs in progress, in all threads: a thread of its own computes the backward pass on a GPU. A plain
# number, because torch.compile reads it.
_runs = 0


def inside_checkpoint() -> bool:
    """Whether a reentrant checkpoint runs its function, the first or the second time."""
    return _runs > 0


def gradients_are_wanted() -> bool:
    """torch.is_grad_enabled(), of a checkpoint's first run as well, whose second run has gradients."""
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
    """The function of one checkpoint. Its first call remembers the layers' settings, and later calls have them."""

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
