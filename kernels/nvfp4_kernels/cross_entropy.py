"""Cross-entropy of softly capped logits. Its gradient replaces the logits, or is made as two FP8 operands.

With r = 1 / (1 + e^(2 x / softcap)), a logit x is capped to z:

    z = softcap * tanh(x / softcap) = softcap * (1 - 2 r)
    dz/dx = 1 - tanh(x / softcap)^2 = 4 r (1 - r)

Exponentials are powers of two. No maximum is subtracted from the logits, because z is bounded. A cap beyond 60 would
overflow. The absolute error of z is softcap * 2^-22.

The losses read 2 bytes per BF16 logit. The gradient in place reads 2 bytes again, from the cache (a row is 128 KiB),
and writes 2. The gradient in FP8 reads 2 bytes again, and writes 1, and 1 for the transpose.
"""

import math

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m

LN2 = tl.constexpr(math.log(2))
ROW_BLOCK = 4096  # The elements of a row that a program processes at a time.
TILE = 128  # The rows, and the columns, of a tile of codes.


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
    logits_ptr, targets_ptr, weight_ptr, losses_ptr, logsumexp_ptr, vocab, columns,
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
    tl.store(logsumexp_ptr + row, logsumexp)
    if IN_PLACE:
        weight = tl.where(counts, tl.load(weight_ptr + row), 0.0)
        for first in range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + column, mask=column < vocab, other=0.0).to(tl.float32)
            grad = tl.where(column < vocab, gradient(x, column == target, logsumexp, weight, SCALE, CAP), 0.0)
            tl.store(logits_ptr + column, m.rounded_to(grad, logits_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def gradient_codes_kernel(
    logits_ptr, targets_ptr, weight_ptr, logsumexp_ptr, scale_ptr, codes_ptr, transposed_ptr, rows, vocab, columns,
    SCALE: tl.constexpr, CAP: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Makes one tile of the gradient times scale in E5M2, and the same tile of its transpose (columns, rows)."""
    row = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    target = tl.load(targets_ptr + row, mask=row < rows, other=-1).to(tl.int32)
    weight = tl.load(weight_ptr + row, mask=row < rows, other=0.0) * tl.load(scale_ptr)
    weight = tl.where(target >= 0, weight, 0.0)
    logsumexp = tl.load(logsumexp_ptr + row, mask=row < rows, other=0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    counts = (row < rows)[:, None] & (column < vocab)[None, :]
    x = tl.load(logits_ptr + row[:, None] * columns + column[None, :], mask=counts, other=0.0).to(tl.float32)
    is_target = target[:, None] == column[None, :]
    grad = tl.where(counts, gradient(x, is_target, logsumexp[:, None], weight[:, None], SCALE, CAP), 0.0)
    codes = m.to_e5m2(grad)
    tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=inside)
    tl.store(transposed_ptr + column[:, None] * rows + row[None, :], tl.trans(codes), mask=tl.trans(inside))


def _constants(softcap: float) -> dict[str, float]:
    return {"SCALE": 2 / softcap / math.log(2), "CAP": softcap / math.log(2)}


def losses(
    logits: torch.Tensor, targets: torch.Tensor, token_weight: torch.Tensor | None, vocab_size: int, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the losses, float32 (C,), which are 0 for ignored targets, and log2 of the sum of exponentials, float32
    (C,).

    logits:       FP32 or BF16 (C, V), contiguous. Columns from vocab_size on are padding.
    targets:      int64 (C,). Negative targets are ignored.
    token_weight: float32 (C,). The logits are replaced by the gradient of sum(token_weight * losses). With None they
                  stay as they are.
    softcap:      at most 60
    """
    rows, columns = logits.shape
    found, logsumexp = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    block = min(ROW_BLOCK, triton.next_power_of_2(columns))
    options = dict(BLOCK=block, IN_PLACE=token_weight is not None, num_warps=8, **_constants(softcap))
    pointers = logits, targets, logsumexp if token_weight is None else token_weight, found, logsumexp
    losses_kernel[(rows,)](*pointers, vocab_size, columns, **options)
    return found, logsumexp


def gradient_codes(
    logits: torch.Tensor,
    targets: torch.Tensor,
    token_weight: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: torch.Tensor,
    vocab_size: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradient of sum(token_weight * losses) times scale, rounded to nearest: float8_e5m2 (C, V), and its
    transpose (V, C).

    scale is float32 (). logsumexp is the second result of `losses`, and the other arguments are those of `losses`. That
    call must have left the logits as they were (token_weight=None).
    """
    rows, columns = logits.shape
    codes, transposed = (
        logits.new_empty(shape, dtype=torch.float8_e5m2) for shape in ((rows, columns), (columns, rows))
    )
    grid = triton.cdiv(columns, TILE), triton.cdiv(rows, TILE)
    options = dict(TILE=TILE, num_warps=8, **_constants(softcap))
    pointers = logits, targets, token_weight, logsumexp, scale, codes, transposed
    gradient_codes_kernel[grid](*pointers, rows, vocab_size, columns, **options)
    return codes, transposed
