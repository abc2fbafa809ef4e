"""The training stages as tests run them, and things that happen inside a step of training."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.optim import AdamW, Muon
from nanochat_fp4.training.trainer import Trainer

# One layer of width 128 (the smallest whose every GEMM can be rotated in groups of 128), two micro-batches a step.
BASE = (
    "--depth=1 --aspect-ratio=128 --head-dim=64 --max-seq-len=32 --device-batch-size=2 --total-batch-size=128 "
    "--eval-tokens=128 --eval-every=3 --core-metric-every=-1 --sample-every=-1 --device-type=cpu"
).split()
MID = (
    "--data=local --device-type=cpu --device-batch-size=2 --total-batch-size=512 --eval-every=3 --eval-tokens=512"
).split()
SFT = (
    "--data=local --device-type=cpu --device-batch-size=2 --target-examples-per-step=4 --eval-every=3 --eval-steps=2 "
    "--eval-metrics-every=-1"
).split()
# stage -> module, its flags, where its checkpoints go, the stage whose model it takes
STAGES = {
    "base": ("scripts.base_train", BASE, "base_checkpoints", None),
    "mid": ("scripts.mid_train", MID, "mid_checkpoints", "base_checkpoints"),
    "sft": ("scripts.chat_sft", SFT, "chatsft_checkpoints", "mid_checkpoints"),
}


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
def stopped_in_step(step: int) -> Iterator[None]:
    """The training in this block gets SIGTERM inside of this step, and must save, stop and exit with 143."""
    with in_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM)), pytest.raises(SystemExit) as stopped:
        yield
    assert stopped.value.code == 143


@contextlib.contextmanager
def after_steps(do: Callable[[Trainer], Any]) -> Iterator[None]:
    """do(run) after every step, trained or skipped, in this block."""
    real = Trainer.train_step

    def train_step(run: Trainer) -> None:
        real(run)
        do(run)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(Trainer, "train_step", train_step)
        yield


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


# 5 square ones and 3 wide ones for 2 processes: neither divides; (6, 40) makes a group smaller than the processes.
MATRICES = [(24, 24)] * 5 + [(16, 48)] * 3 + [(48, 16)] * 2 + [(6, 40)]
OTHERS = [(64, 32), (33, 32), (7,)]  # split by rows over 2 processes, not divisible, too small


def parameters(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]


def make(params, orthogonalizer="polar_express", lean=None):
    """The two optimizers on parameters of MATRICES + OTHERS."""
    matrices, others = params[: len(MATRICES)], params[len(MATRICES) :]
    groups = [dict(params=others[:1], lr=0.1), dict(params=others[1:])]
    adamw = AdamW(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1, lean=lean)
    return [Muon(matrices, weight_decay=0.1, orthogonalizer=orthogonalizer, lean=lean), adamw]
