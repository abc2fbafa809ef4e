"""
The loss of a language model without its logits: linear, soft cap and cross-entropy, some tokens at a time.

With a vocabulary of 65,536 the logits of one 2048-token sequence take 0.5 GiB in FP32, and plain PyTorch keeps several
copies until the backward pass. Here only one chunk of them exists at any time:

    logits = x @ weight^T                         in the compute dtype (BF16 under autocast)
    z      = softcap * tanh(logits / softcap)     in FP32
    loss_i = logsumexp(z_i) - z_i[target_i]

For a known reduction (mean, sum) the forward pass also makes the gradients of x and weight, chunk by chunk, and nothing
is computed twice. Two tensors of the sizes of x and weight stay for the backward pass. Per-token losses (reduction
"none") do not know their weights yet: their backward pass runs the same sweep a second time.

The sweep is a custom operator, so torch.compile(fullgraph=True) of a model around it sees one opaque node and cannot
decide to keep the logits after all. On CUDA a kernel makes losses and gradient (nvfp4_kernels/cross_entropy.py), with
6 bytes of traffic a logit. The functions here are its reference.

HEADS: the three products are in the compute dtype, or in training in FP8, as with nanochat's --fp8. FP8 has one scale a
tensor, E4M3 for x and weight, E5M2 for the logits' gradient. An element of this gradient is at most its token's weight.
The scale is therefore known before the gradient is made, and no pass looks for the largest element.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_fp4.nvfp4.checkpointing import gradients_are_wanted
from nanochat_fp4.nvfp4.dispatch import has_fp8_tensor_cores, use_kernels
from nanochat_fp4.nvfp4.gemm import gemm
from nanochat_fp4.nvfp4.operands import FP8
from nanochat_fp4.nvfp4.quantizers import E5M2_MAX, FP8_AMAX_MIN, ROUNDINGS, quantize_reference

HEADS = ("bf16", "fp8")
FP8_MULTIPLE = 16  # of the dimensions that FP8 tensor cores take
# Elements of one chunk of logits. On a GPU: 8192 tokens at 65,536 entries, 1 GiB in BF16. Every chunk adds its part to
# the weight's whole gradient, with 12 bytes of traffic an element. On an H200 the traffic takes 4% of the time of the
# chunk's products at 8192 tokens, and 16% at 2048 tokens. Moreover 2048 rows are too few to keep the multiprocessors
# busy. On a CPU: 8 MiB, which stays close to the caches.
CHUNK_ELEMENTS = {"cuda": 2**29}
CHUNK_ELEMENTS_ELSEWHERE = 2**21
# Keeps the products large enough also for a very large vocabulary.
MIN_CHUNK_TOKENS = 512
# Up to this soft cap the exp of a capped logit and the sum over a row stay within FP32 (e^88).
SAFE_SOFTCAP = 60.0


def head_problem(head: str, rows: int, width: int, device_type: str) -> str | None:
    """Why a weight of (rows, width) cannot have such a head on this kind of device, in one line; None where it can.

    CPUs emulate FP8, for tests.
    """
    if head not in HEADS:
        return f"unknown head {head!r}; use one of {', '.join(HEADS)}"
    if head == "bf16":
        return None
    if rows % FP8_MULTIPLE or width % FP8_MULTIPLE:
        return f"an FP8 head of {rows} x {width} needs multiples of {FP8_MULTIPLE}; change the shape, or use head bf16"
    if device_type != "cpu" and not has_fp8_tensor_cores(device_type):
        return f"this {device_type} device has no FP8 tensor cores (sm_89 and newer have); use head bf16"
    return None


def _capped(logits: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """tanh(logits / softcap) FP32 (C, vocab_size), without the columns that are padding."""
    return torch.tanh(logits[:, :vocab_size].float() / softcap)


def chunk_losses(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> tuple[Tensor, Tensor]:
    """
    Losses `(C,)` FP32, 0 where ignored, and logsumexp `(C, 1)` FP32 of one chunk.

    logits is `(C, V)` in any float dtype, targets `(C,)`. Columns from vocab_size on are padding and take no part.
    A soft cap of up to SAFE_SOFTCAP bounds the exponents. No maximum is needed then, and the compiled function is one
    pass over the chunk.
    """
    z = softcap * _capped(logits, vocab_size, softcap)
    largest = z.amax(-1, keepdim=True) if softcap > SAFE_SOFTCAP else 0.0
    log_sum = torch.exp(z - largest).sum(-1, keepdim=True).log()
    # Gathered from the logits. Gathering from z would write all of z, twice the size of the chunk, for one column.
    at_target = logits[:, :vocab_size].gather(1, targets.clamp_min(0).unsqueeze(1))
    losses = log_sum - (softcap * _capped(at_target, 1, softcap) - largest)
    return torch.where(targets >= 0, losses.squeeze(1), 0.0), log_sum + largest


def chunk_gradient(
    logits: Tensor, targets: Tensor, logsumexp: Tensor, token_weight: Tensor, vocab_size: int, softcap: float
) -> None:
    """
    Replace the logits by the gradient of sum(token_weight * losses) with respect to them; token_weight is (C,) FP32.

    Element by element, and separate from chunk_losses: compiled together with the losses, torch 2.11 read the target's
    logit after its replacement.
    """
    capped = _capped(logits, vocab_size, softcap)
    # A comparison instead of a scatter: it fuses with the rest, so that no FP32 copy of the chunk is written.
    one_hot = torch.arange(vocab_size, device=logits.device) == targets.unsqueeze(1)
    scale = torch.where(targets >= 0, token_weight, 0.0).unsqueeze(1)
    grad = (torch.exp(softcap * capped - logsumexp) - one_hot.float()) * (1 - capped * capped) * scale
    logits.copy_(F.pad(grad, (0, logits.size(1) - vocab_size)))


@functools.cache
def _compiled(function: Callable) -> Callable:
    """Eagerly the functions are ten passes over the chunk, fused three. The compiler is slow to import."""
    return torch.compile(function, fullgraph=True)


def _on(device: torch.device, function: Callable) -> Callable:
    return _compiled(function) if device.type == "cuda" else function


def _fp8(x: Tensor, element: str, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (R, C), the same transposed (C, R), and tensor_scale () of x `(R, C)` as E4M3 or E5M2.

    amax: float32 (), of a larger tensor that x is a part of, or a bound of it; None: x's own.
    """
    t = quantize_reference(x, ROUNDINGS[element], amax=amax)
    return t.codes, t.codes.T.contiguous(), t.tensor_scale


def _losses(
    logits: Tensor, targets: Tensor, token_weight: Tensor | None, vocab_size: int, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """(losses (C,) FP32, the gradient (C, V) in the logits' place) of a chunk. No gradient without weights."""
    if use_kernels(logits.device) and softcap <= SAFE_SOFTCAP:
        from nvfp4_kernels import cross_entropy

        losses, _ = cross_entropy.losses(logits, targets, token_weight, vocab_size, softcap)
    else:
        losses, logsumexp = _on(logits.device, chunk_losses)(logits, targets, vocab_size, softcap)
        if token_weight is not None:
            _on(logits.device, chunk_gradient)(logits, targets, logsumexp, token_weight, vocab_size, softcap)
    return losses, logits if token_weight is not None else None


class _Products:
    """The head's three products, of one chunk of tokens after another, in compute_dtype."""

    def __init__(self, x: Tensor, weight: Tensor, token_weight: Tensor | None, compute_dtype: torch.dtype):
        self.x, self.dtype, self.weight = x, compute_dtype, weight.to(compute_dtype)

    def logits(self, part: slice) -> Tensor:
        self.x_part = self.x[part].to(self.dtype)
        return self.x_part @ self.weight.T

    losses = staticmethod(_losses)

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Of the chunk's x, and the chunk's part of the weight's."""
        return grad @ self.weight, grad.T @ self.x_part


class _FP8Products:
    """The same in FP8: x and weight in E4M3, grad in E5M2, the results in compute_dtype.

    Tensor cores contract over the last dimension of both operands. Each operand has therefore a transposed copy.
    """

    def __init__(self, x: Tensor, weight: Tensor, token_weight: Tensor | None, compute_dtype: torch.dtype):
        self.x, self.dtype = x, compute_dtype
        self.x_amax = torch.linalg.vector_norm(x, torch.inf).float()
        self.largest = None if token_weight is None else torch.linalg.vector_norm(token_weight, torch.inf)
        self.weight, self.weight_t, self.weight_scale = _on(x.device, _fp8)(weight, "e4m3", None)

    def _product(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        return gemm(FP8(a, a_scale), FP8(b, b_scale), compute_dtype=self.dtype, out_dtype=self.dtype)

    def logits(self, part: slice) -> Tensor:
        x, self.x_t, self.x_scale = _on(self.x.device, _fp8)(self.x[part], "e4m3", self.x_amax)
        return self._product(x, self.x_scale, self.weight, self.weight_scale)

    def losses(
        self, logits: Tensor, targets: Tensor, token_weight: Tensor | None, vocab_size: int, softcap: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor] | None]:
        """(losses (C,) FP32, the gradient as of _fp8) of a chunk. No gradient without weights."""
        if token_weight is not None and use_kernels(logits.device) and softcap <= SAFE_SOFTCAP:
            from nvfp4_kernels import cross_entropy

            losses, logsumexp = cross_entropy.losses(logits, targets, None, vocab_size, softcap)
            scale = (E5M2_MAX / self.largest.double().clamp(min=FP8_AMAX_MIN)).float()
            arguments = logits, targets, token_weight, logsumexp, scale, vocab_size, softcap
            return losses, (*cross_entropy.gradient_codes(*arguments), scale.reciprocal())
        losses, grad = _losses(logits, targets, token_weight, vocab_size, softcap)
        return losses, None if grad is None else _on(logits.device, _fp8)(grad, "e5m2", self.largest)

    def gradients(self, grad: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        codes, transposed, scale = grad
        grad_x = self._product(codes, scale, self.weight_t, self.weight_scale)
        return grad_x, self._product(transposed, scale, self.x_t, self.x_scale)


def _sweep(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weight: Tensor | None,
    vocab_size: int,
    softcap: float,
    compute_dtype: torch.dtype,
    fp8: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses (N,) FP32 and, where token_weight (N,) is given, the gradients of sum(token_weight * losses)."""
    num_tokens, num_rows = x.size(0), weight.size(0)
    fp8 = fp8 and num_tokens > 0
    # In FP8 a chunk's logits have their gradient beside them, as codes and as transposed codes: twice the memory.
    limit = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS_ELSEWHERE) // (2 if fp8 else 1)
    num_chunks = max(1, -(-num_tokens // max(limit // num_rows, MIN_CHUNK_TOKENS)))
    chunk = max(1, -(-num_tokens // num_chunks))  # chunks of equal size: one compiled graph
    chunk = -(-chunk // FP8_MULTIPLE) * FP8_MULTIPLE if fp8 else chunk

    losses = torch.zeros(num_tokens, dtype=torch.float32, device=x.device)
    grad_x = grad_weight = None
    if token_weight is not None:
        grad_x = torch.zeros_like(x)
    with torch.autocast(x.device.type, enabled=False):  # dtypes are chosen here
        products = (_FP8Products if fp8 else _Products)(x, weight, token_weight, compute_dtype)
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            part_weight = None if token_weight is None else token_weight[part]
            logits = products.logits(part)
            losses[part], grad = products.losses(logits, targets[part], part_weight, vocab_size, softcap)
            if grad is not None:
                grad_x[part], grad_part = products.gradients(grad)
                grad_weight = grad_part.float() if grad_weight is None else grad_weight.add_(grad_part)
    if token_weight is not None:
        grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
    return losses, grad_x, grad_weight


@torch.library.custom_op("nanochat_fp4::linear_cross_entropy_sum", mutates_args=())
def _weighted_sum(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_weight: Tensor,
    vocab_size: int,
    softcap: float,
    compute_dtype: torch.dtype,
    fp8: bool,
    want_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """sum(token_weight * losses) () FP32 and its gradients for x and weight (empty unless want_grad)."""
    losses, grad_x, grad_weight = _sweep(
        x, weight, targets, token_weight if want_grad else None, vocab_size, softcap, compute_dtype, fp8
    )
    loss = (losses * token_weight).sum()
    if not want_grad:
        grad_x, grad_weight = x.new_empty(0), weight.new_empty(0)
    return loss, grad_x, grad_weight


@_weighted_sum.register_fake
def _(x, weight, targets, token_weight, vocab_size, softcap, compute_dtype, fp8, want_grad):
    loss = x.new_empty((), dtype=torch.float32)
    if not want_grad:
        return loss, x.new_empty(0), weight.new_empty(0)
    return loss, torch.empty_like(x), torch.empty_like(weight)


def _save_gradients(ctx, inputs, output):
    _, grad_x, grad_weight = output
    if not inputs[8]:
        raise RuntimeError("linear_cross_entropy_sum was called with want_grad=False where a gradient is needed")
    ctx.save_for_backward(grad_x, grad_weight)


def _scale_gradients(ctx, grad_loss, _grad_x, _grad_weight):
    grad_x, grad_weight = ctx.saved_tensors
    return grad_x * grad_loss, grad_weight * grad_loss, *[None] * 7


_weighted_sum.register_autograd(_scale_gradients, setup_context=_save_gradients)


@torch.library.custom_op("nanochat_fp4::linear_cross_entropy_none", mutates_args=())
def _per_token(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, softcap: float, compute_dtype: torch.dtype, fp8: bool
) -> Tensor:
    """Losses (N,) FP32."""
    return _sweep(x, weight, targets, None, vocab_size, softcap, compute_dtype, fp8)[0]


@_per_token.register_fake
def _(x, weight, targets, vocab_size, softcap, compute_dtype, fp8):
    return x.new_empty(x.size(0), dtype=torch.float32)


def _save_inputs(ctx, inputs, output):
    x, weight, targets, *ctx.rest = inputs
    ctx.save_for_backward(x, weight, targets)


def _sweep_again(ctx, grad_losses):
    _, grad_x, grad_weight = _weighted_sum(*ctx.saved_tensors, grad_losses.contiguous(), *ctx.rest, True)
    return grad_x, grad_weight, *[None] * 5


_per_token.register_autograd(_sweep_again, setup_context=_save_inputs)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
    softcap: float = 15.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    head: Literal["bf16", "fp8"] = "bf16",
) -> Tensor:
    """
    F.cross_entropy(softcap * tanh(x @ weight.T / softcap), targets, ignore_index=-1), the logits never kept.

    Args:
        x: (..., D), float. weight: (rows, D), rows >= vocab_size; further rows are padding and get a zero gradient.
        targets: (...) int64; negative ones (nanochat: -1) are ignored.
        vocab_size: entries that count (default: all rows).
        reduction: "mean" over the targets that count, "sum", or "none" for all losses, flattened, 0 where ignored.
            A batch without any target that counts has mean 0 and no gradient. F.cross_entropy gives NaN there: one row
            without an answer would end a fine-tuning run.
        head: of HEADS. "fp8" needs D and rows that are multiples of 16. Without gradients, in evaluation, it is "bf16".

    Products are taken in autocast's dtype where autocast is on, else in x's; soft cap, softmax and sums in FP32.
    Returns FP32: () or (N,) for "none". Raises ValueError for shapes that do not fit, an unknown reduction or head.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"unknown loss reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit x {tuple(x.shape)}; expected one target a token")
    if head != "bf16" and (problem := head_problem(head, *weight.shape, x.device.type)):
        raise ValueError(problem)
    fp8 = head == "fp8" and gradients_are_wanted()
    vocab_size = weight.size(0) if vocab_size is None else vocab_size
    compute_dtype = _compute_dtype(x)
    x, targets = x.reshape(-1, x.size(-1)).contiguous(), targets.reshape(-1)
    if reduction == "none":
        return _per_token(x, weight, targets, vocab_size, softcap, compute_dtype, fp8)
    token_weight = (targets >= 0).float() if reduction == "sum" else _equal_weights(targets)
    args = (x, weight, targets, token_weight, vocab_size, softcap, compute_dtype, fp8)
    return _weighted_sum(*args, torch.is_grad_enabled())[0]


def _compute_dtype(x: Tensor) -> torch.dtype:
    autocast = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def _equal_weights(targets: Tensor) -> Tensor:
    counts = (targets >= 0).float()
    return counts / counts.sum().clamp_min(1)
