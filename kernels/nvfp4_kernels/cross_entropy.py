"""Cross-entropy of softly capped logits, and its gradient in the logits' place or as FP8 operands.

With r = 1 / (1 + e^(2 x / softcap)), of which a cap has three uses:

    z = softcap * tanh(x / softcap) = softcap * (1 - 2 r)
    dz/dx = 1 - tanh(x / softcap)^2 = 4 r (1 - r)

Exponents are of two. z is bounded, so no maximum is subtracted; a cap beyond 60 would overflow. The absolute error of z
is softcap * 2^-22. Bytes a logit in BF16: 2 read, then 2 read (from the cache: a row is 128 KiB) and 2 written. As FP8:
2 read, then 2 read, 1 written and 1 written transposed.
"""

import math

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m

E5M2_MAX = tl.constexpr(57344.0)
E5M2_MIN_NORMAL = tl.constexpr(2.0**-14)
E5M2_MAGIC = tl.constexpr(1.5 * 2.0**21)  # of _math.py's idioms: spacing e / 4
LN2 = tl.constexpr(math.log(2))
ROW_BLOCK = 4096  # elements of a row that a program takes at a time
TILE = 128  # rows and columns of a tile of codes


@triton.jit
def sigmoid(x, SCALE: tl.constexpr):
    """r. SCALE: 2 log2(e) / softcap."""
    return 1.0 / (1.0 + tl.exp2(x * SCALE))


@triton.jit
def capped(r, CAP: tl.constexpr):
    """z log2(e). CAP: softcap log2(e)."""
    return CAP - (2.0 * CAP) * r


@triton.jit
def gradient(x, is_target, logsumexp, weight, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Of weight * loss with respect to logits x. logsumexp: to base two."""
    r = sigmoid(x, SCALE)
    return (tl.exp2(capped(r, CAP) - logsumexp) - tl.where(is_target, 1.0, 0.0)) * (4.0 * r * (1.0 - r)) * weight


@triton.jit
def to_e5m2(x):
    """To the nearest E5M2 number, larger ones clipped. Triton's interpreter would cut off, so x is rounded before."""
    x = tl.minimum(tl.maximum(x, -E5M2_MAX, propagate_nan=tl.PropagateNan.ALL), E5M2_MAX, tl.PropagateNan.ALL)
    if m.INTERPRETED:
        e = tl.maximum(m.power_of_two_floor(x), E5M2_MIN_NORMAL)
        x = tl.fma(e, -E5M2_MAGIC, tl.fma(e, E5M2_MAGIC, x))
    return x.to(tl.float8e5)


@triton.jit
def losses_kernel(
    logits_ptr, targets_ptr, weight_ptr, losses_ptr, logsumexp_ptr, vocab, columns,
    SCALE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr, IN_PLACE: tl.constexpr
):  # fmt: skip
    """A program takes a row. vocab: columns that count. IN_PLACE: the gradient replaces the logits."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * columns
    target = tl.load(targets_ptr + row).to(tl.int32)
    counts = target >= 0
    # Before the sum, whose barrier parts it from the replacement.
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
    """The gradient times scale as E5M2: (rows, columns) and (columns, rows), a tile of both for each program."""
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
    codes = to_e5m2(grad)
    tl.store(codes_ptr + row[:, None] * columns + column[None, :], codes, mask=inside)
    tl.store(transposed_ptr + column[:, None] * rows + row[None, :], tl.trans(codes), mask=tl.trans(inside))


def _constants(softcap: float) -> dict[str, float]:
    return {"SCALE": 2 / softcap / math.log(2), "CAP": softcap / math.log(2)}


def losses(
    logits: torch.Tensor, targets: torch.Tensor, token_weight: torch.Tensor | None, vocab_size: int, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses float32 (C,), 0 where ignored, and log2 of the sum of exponentials, float32 (C,).

    logits:       FP32 or BF16 (C, V), contiguous. Columns from vocab_size on are padding.
    targets:      int64 (C,), negative where ignored
    token_weight: float32 (C,): the logits are replaced by the gradient of sum(token_weight * losses). None: they stay.
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
    """The gradient of `losses` times scale, float32 (), to nearest: float8_e5m2 (C, V), and its transpose (V, C).

    The other arguments and logsumexp are those of `losses`, which has left the logits as they were.
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
