"""Bits per byte, which is a loss that does not depend on the tokenizer."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat_fp4.common import is_ddp_initialized


@torch.no_grad()
def evaluate_bpb(
    model: torch.nn.Module, batches: Iterable[tuple[Any, ...]], steps: int, token_bytes: Tensor,
    done: Callable[[], Any] = lambda: None,
) -> float:  # fmt: skip
    """
    Computes the model's loss in bits per byte of text, sum of nats / (ln 2 * sum of bytes), on `steps` batches of each
    rank.

    Args:
        model: is called as model(x, y, loss_reduction="none") and returns the loss of each target in nats
        batches: (x, y, ...), both (B, T) int64. Negative targets do not count.
        token_bytes: (vocab_size,) integer, the length of each token's text in UTF-8. Special tokens such as <|bos|>
            have length 0 and do not count.
        done: is called after each batch

    All ranks of the process group must call this function together, each with its own batches. They get the same float,
    which is infinity if no byte was counted. Sums are FP64, or FP32 on MPS, which has no FP64. They are in the order of
    the batches, so the same batches give the same result. Raises ValueError if `batches` has fewer than `steps`
    batches.
    """
    device = token_bytes.device
    nats = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    num_bytes = torch.zeros((), dtype=torch.int64, device=device)
    batches = iter(batches)
    for step in range(steps):
        batch = next(batches, None)
        if batch is None:
            raise ValueError(f"validation data ended after {step} of {steps} batches; lower --eval-tokens or add data")
        x, y, *_ = batch
        losses = model(x, y, loss_reduction="none").flatten()
        y = y.flatten()
        lengths = torch.where(y >= 0, token_bytes[y.clamp_min(0)], 0)
        # torch.where leaves out the loss of a target that does not count, because this loss may be NaN or infinite.
        nats += torch.where(lengths > 0, losses, 0).to(nats.dtype).sum()
        num_bytes += lengths.sum()
        done()
    if is_ddp_initialized():
        dist.all_reduce(nats)
        dist.all_reduce(num_bytes)
    total = num_bytes.item()
    return nats.item() / (math.log(2) * total) if total else math.inf
