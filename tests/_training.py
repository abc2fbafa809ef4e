"""The training stages as tests run them, and things that happen inside a step of training."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nanochat_fp4.gpt import GPT
from nanochat_fp4.trainer import Trainer


@contextlib.contextmanager
def in_step(step: int, do: Callable[[], Any]) -> Iterator[None]:
    """do() inside each training step `step` (from 0, of those that are tried) of the GPTs in this block."""
    real, calls = GPT.clip_gradients, []

    def clip_gradients(model: GPT) -> torch.Tensor:
        calls.append(model)
        if len(calls) == step + 1:
            do()
        return real(model)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(GPT, "clip_gradients", clip_gradients)
        yield


@contextlib.contextmanager
def after_steps(do: Callable[[Trainer], Any]) -> Iterator[None]:
    """do(trainer) after every step, trained or skipped, in this block."""
    real = Trainer.train_step

    def train_step(trainer: Trainer) -> None:
        real(trainer)
        do(trainer)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Trainer, "train_step", train_step)
        yield


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")
