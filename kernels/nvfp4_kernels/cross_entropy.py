"""Cross-entropy of softly capped logits, whose gradient replaces them.

With r = 1 / (1 + e^(2 x / softcap)), a logit x is capped to z:

    z = softcap * tanh(x / softcap) = softcap * (1 - 2 r)
    dz/dx = 1 - tanh(x / softcap)^2 = 4 r (1 - r)

Exponentials are powers of two. No maximum is subtracted from the logits, because z is bounded. A cap beyond 60 would
overflow. The absolute error of z is softcap * 2^-22.

The losses read 2 bytes per BF16 logit. Their gradient reads 2 bytes again, from the cache (a row is 128 KiB), and
writes 2.
"""

import math

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m

LN2 = tl.constexpr(math.log(2))
ROW_BLOCK = 4096  # The elements of a row that a program processes at a time.


@triton.jit
def sigmoid(x, SCALE: tl.constexpr):
    """Returns r of logits x. SCALE is 2 log2(e) / softcap."""
    return 1.0 / (1.0 + tl.exp2(x * SCALE))


@triton.jit
def capped(r, CAP: tl.constexpr):
    """Returns z log2(e). CAP is softcap log2(e)."""
    return CAP - (2.0 * CAP) * r


@triton.jit
def gradient(x, is_target, logsumexp, weight, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Returns the gradient of weight * loss with respect to logits x. logsumexp is a logarithm to base two."""
    r = sigmoid(x, SCALE)
    return (tl.exp2(capped(r, CAP) - logsumexp) - tl.where(is_target, 1.0, 0.0)) * (4.0 * r * (1.0 - r)) * weight


@triton.jit
def losses_kernel(
    logits_ptr, targets_ptr, weight_ptr, losses_ptr, vocab, columns,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr
):  # fmt: skip
    """Computes the loss of one row. Only the first `vocab` columns count. With IN_PLACE the gradient replaces the
    logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    target = tl.load(targets_ptr + row).to(tl.int32)
    counts = target >= 0
    # The target's logit is read before the sum, because the sum's barrier separates this read from the replacement.
    at_target = capped(sigmoid(tl.load(logits_ptr + tl.maximum(target, 0)).to(tl.float32), SCALE), CAP)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
        total += tl.where(column < vocab, tl.exp2(capped(sigmoid(x, SCALE), CAP)), 0.0)
    logsumexp = tl.log2(tl.sum(total, axis=0))
    tl.store(losses_ptr + row, tl.where(counts, LN2 * (logsumexp - at_target), 0.0))
    if IN_PLACE:
        weight = tl.where(counts, tl.load(weight_ptr + row), 0.0)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
            grad = tl.where(column < vocab, gradient(x, column == target, logsumexp, weight, SCALE, CAP), 0.0)
            tl.store(logits_ptr + column, m.rounded_to(grad, logits_ptr.dtype.element_ty), mask=column < columns)


def losses(
    logits: torch.Tensor, targets: torch.Tensor, token_weight: torch.Tensor | None, vocab_size: int, softcap: float
) -> torch.Tensor:
    """Computes the losses, float32 (C,), which are 0 for ignored targets.

    logits:       FP32 or BF16 (C, V), contiguous. Columns from vocab_size on are padding.
    targets:      int64 (C,). Negative targets are ignored.
    token_weight: float32 (C,). The logits are replaced by the gradient of sum(token_weight * losses). With None they
                  stay as they are.
    softcap:      at most 60
    """
    rows, columns = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(ROW_BLOCK, triton.next_power_of_2(columns))
    options = dict(BLOCK=block, IN_PLACE=token_weight is not None, num_warps=8)
    constants = dict(SCALE=2 / softcap / math.log(2), CAP=softcap / math.log(2))
    pointers = logits, targets, found if token_weight is None else token_weight, found
    losses_kernel[(rows,)](*pointers, vocab_size, columns, **constants, **options)
    return found
