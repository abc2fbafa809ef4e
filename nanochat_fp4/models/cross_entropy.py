"""
Computes the loss of a language model without keeping its logits. Linear layer, soft cap and cross-entropy are computed
for a chunk of tokens at a time.

With a vocabulary of 65,536 the logits of a sequence of 2048 tokens take 0.5 GiB in FP32, and plain PyTorch keeps
several copies of them until the backward pass. Here only the logits of one chunk exist at any time:

    logits = x @ weight^T                         in the compute dtype (BF16 under autocast)
    z      = softcap * tanh(logits / softcap)     in FP32
    loss_i = logsumexp(z_i) - z_i[target_i]

If the reduction is "mean" or "sum", the forward pass also computes the gradients of x and weight, chunk by chunk, so
that nothing is computed twice. Two tensors of the sizes of x and weight are kept for the backward pass. With the
reduction "none" the weights of the tokens' losses are not known yet, so the backward pass goes over all chunks a second
time.

The pass over all chunks is a custom operator. torch.compile cannot look into it, and therefore cannot decide to keep
the logits. On CUDA a kernel computes losses and gradient (nvfp4_kernels/cross_entropy.py), with 6 bytes of memory
traffic a logit. The functions of this file are its reference.

The three products of the head are in the compute dtype, or in FP8, as with nanochat's --fp8 (HEADS). FP8 has one scale
for a tensor. x and weight are in E4M3, and the logits' gradient is in E5M2. An element of this gradient is at most its
token's weight, so its scale is known in advance, without a pass that looks for the largest element.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.gemm import Quantized, gemm
from nanochat_fp4.nvfp4.layer import InContext, QuantLinear
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

HEADS = ("bf16", "fp8")
FP8_HEADS = ("fp8", "clover_fp8_forward")  # The methods with an FP8 head by default. Those of all others are in BF16.
FP8_MULTIPLE = 16  # FP8 tensor cores take dimensions that are multiples of this number.
# The number of elements in a chunk of logits. On a GPU it is 8192 tokens at a vocabulary of 65,536, or 1 GiB in BF16.
# Each chunk adds its part to the weight's whole gradient, which costs 12 bytes of memory traffic an element. On an H200
# this takes 4% of the time of the chunk's products at 8192 tokens, and 16% at 2048 tokens. 2048 rows are also too few
# to keep the multiprocessors busy. On a CPU a chunk has 8 MiB, which is about the size of the caches.
CHUNK_ELEMENTS = {"cuda": 2**29}
CHUNK_ELEMENTS_ELSEWHERE = 2**21
# A chunk has at least this number of tokens, so that the products are large enough for a very large vocabulary, too.
MIN_CHUNK_TOKENS = 512
# Up to this soft cap, the exp of a capped logit and the sum of a row stay below FP32's largest number, about e^88.
SAFE_SOFTCAP = 60.0


def default_head(method: str) -> str:
    """Returns the precision, one of HEADS, of the output head of a run with this method."""
    return "fp8" if method in FP8_HEADS else "bf16"


def head_problem(head: str, rows: int, width: int) -> str | None:
    """Returns the reason, in one line, why a weight (rows, width) cannot have this head, or None."""
    if head not in HEADS:
        return f"unknown head {head!r}; use one of {', '.join(HEADS)}"
    if head == "fp8" and (rows % FP8_MULTIPLE or width % FP8_MULTIPLE):
        return f"an FP8 head of {rows} x {width} needs multiples of {FP8_MULTIPLE}; change the shape, or use head bf16"
    return None


def _capped(logits: Tensor, vocab_size: int, softcap: float) -> Tensor:
    """Returns tanh(logits / softcap), FP32 (C, vocab_size), without the columns that are padding."""
    return torch.tanh(logits[:, :vocab_size].float() / softcap)


def chunk_losses(logits: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> tuple[Tensor, Tensor]:
    """
    Returns the losses of a chunk, FP32 `(C,)`, and its logsumexp, FP32 `(C, 1)`. The loss of an ignored token is 0.

    logits is `(C, V)` in any float dtype, and targets is `(C,)`. Columns from vocab_size on are padding and are
    ignored. A soft cap of up to SAFE_SOFTCAP bounds the exponents, so that no maximum needs to be subtracted. The
    compiled function then is one pass over the chunk.
    """
    z = softcap * _capped(logits, vocab_size, softcap)
    largest = z.amax(-1, keepdim=True) if softcap > SAFE_SOFTCAP else 0.0
    log_sum = torch.exp(z - largest).sum(-1, keepdim=True).log()
    # The targets are gathered from the logits and capped again. Gathering from z would write all of z, which is twice
    # as large as the chunk, for one column.
    at_target = logits[:, :vocab_size].gather(1, targets.clamp_min(0).unsqueeze(1))
    losses = log_sum - (softcap * _capped(at_target, 1, softcap) - largest)
    return torch.where(targets >= 0, losses.squeeze(1), 0.0), log_sum + largest


def chunk_gradient(
    logits: Tensor, targets: Tensor, logsumexp: Tensor, token_weight: Tensor, vocab_size: int, softcap: float
) -> None:
    """
    Replaces the logits by the gradient of sum(token_weight * losses) with respect to them. token_weight is FP32 (C,).

    This function is separate from chunk_losses, because torch 2.11, if it compiles both together, reads the target's
    logit after it was replaced.
    """
    capped = _capped(logits, vocab_size, softcap)
    # A comparison is used instead of a scatter, because the compiler fuses it with the other operations. No FP32 copy
    # of the chunk is written then.
    one_hot = torch.arange(vocab_size, device=logits.device) == targets.unsqueeze(1)
    scale = torch.where(targets >= 0, token_weight, 0.0).unsqueeze(1)
    grad = (torch.exp(softcap * capped - logsumexp) - one_hot.float()) * (1 - capped * capped) * scale
    logits.copy_(F.pad(grad, (0, logits.size(1) - vocab_size)))


@functools.cache
def _compiled(function: Callable) -> Callable:
    """Compiles a function at its first use, because the compiler is slow to import. The eager functions make ten passes
    over a chunk, and the compiled ones three."""
    return torch.compile(function, fullgraph=True)


def _on(device: torch.device, function: Callable) -> Callable:
    return _compiled(function) if device.type == "cuda" else function


def _fp8(x: Tensor, element: str, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantizes x `(R, C)` to E4M3 or E5M2. Returns the codes (R, C), the transposed codes (C, R), and tensor_scale ().

    amax is the amax of a larger tensor that x is a part of, or a bound of it, float32 (). With None it is x's own amax.
    """
    t = quantize_reference(x, Quantization(ROUNDINGS[element], amax=amax))
    return t.codes, t.codes.T.contiguous(), t.tensor_scale


def _losses(logits: Tensor, targets: Tensor, token_weight: Tensor | None, vocab_size: int, softcap: float) -> Tensor:
    """Returns the losses of a chunk, FP32 (C,). With token_weight the logits are replaced by their gradient."""
    if use_kernels(logits.device) and softcap <= SAFE_SOFTCAP:
        from nvfp4_kernels import cross_entropy

        return cross_entropy.losses(logits, targets, token_weight, vocab_size, softcap)
    losses, logsumexp = _on(logits.device, chunk_losses)(logits, targets, vocab_size, softcap)
    if token_weight is not None:
        _on(logits.device, chunk_gradient)(logits, targets, logsumexp, token_weight, vocab_size, softcap)
    return losses


class _Products:
    """The three products of the head in compute_dtype. `logits` and `gradients` are called for one chunk of tokens
    after another."""

    def __init__(self, x: Tensor, weight: Tensor, token_weight: Tensor | None, compute_dtype: torch.dtype):
        self.x, self.dtype, self.weight = x, compute_dtype, weight.to(compute_dtype)

    def logits(self, part: slice) -> Tensor:
        self.x_part = self.x[part].to(self.dtype)
        return self.x_part @ self.weight.T

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the chunk's x, and the chunk's part of the weight's gradient."""
        return grad @ self.weight, grad.T @ self.x_part


class _FP8Products:
    """The three products of the head in FP8. x and weight are in E4M3, the logits' gradient is in E5M2, and the results
    are in compute_dtype.

    Tensor cores contract both operands over their last dimension, so each operand also has a transposed copy.
    """

    def __init__(self, x: Tensor, weight: Tensor, token_weight: Tensor | None, compute_dtype: torch.dtype):
        self.x, self.dtype = x, compute_dtype
        self.x_amax = torch.linalg.vector_norm(x, torch.inf).float()
        self.largest = None if token_weight is None else torch.linalg.vector_norm(token_weight, torch.inf)
        self.weight, self.weight_t, self.weight_scale = _on(x.device, _fp8)(weight, "e4m3", None)

    def _product(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        operands = (Quantized(t, tensor_scale=s, length=t.shape[1]) for t, s in ((a, a_scale), (b, b_scale)))
        return gemm(*operands, compute_dtype=self.dtype, out_dtype=self.dtype)

    def logits(self, part: slice) -> Tensor:
        x, self.x_t, self.x_scale = _on(self.x.device, _fp8)(self.x[part], "e4m3", self.x_amax)
        return self._product(x, self.x_scale, self.weight, self.weight_scale)

    def gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        if use_kernels(grad.device) and len(grad) % 4 == 0:
            from nvfp4_kernels.quantize import quantize_both

            codes, transposed, scale = quantize_both(grad, self.largest)
        else:
            codes, transposed, scale = _on(grad.device, _fp8)(grad, "e5m2", self.largest)
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
    """Goes over all chunks. Returns the losses, FP32 (N,), and the gradients of sum(token_weight * losses) for x and
    weight. Without token_weight (N,) the gradients are None."""
    num_tokens, num_rows = x.size(0), weight.size(0)
    fp8 = fp8 and num_tokens > 0
    # In FP8 a chunk's logits and their gradient, as codes and as transposed codes, exist together. This takes twice the
    # memory, so chunks are half as large.
    limit = CHUNK_ELEMENTS.get(x.device.type, CHUNK_ELEMENTS_ELSEWHERE) // (2 if fp8 else 1)
    num_chunks = max(1, -(-num_tokens // max(limit // num_rows, MIN_CHUNK_TOKENS)))
    chunk = max(1, -(-num_tokens // num_chunks))  # Chunks of equal size need only one compiled graph.
    chunk = -(-chunk // FP8_MULTIPLE) * FP8_MULTIPLE if fp8 else chunk

    losses = torch.zeros(num_tokens, dtype=torch.float32, device=x.device)
    grad_x = grad_weight = None
    if token_weight is not None:
        grad_x = torch.zeros_like(x)
    with torch.autocast(x.device.type, enabled=False):  # All dtypes are chosen in this file.
        products = (_FP8Products if fp8 else _Products)(x, weight, token_weight, compute_dtype)
        for start in range(0, num_tokens, chunk):
            part = slice(start, min(start + chunk, num_tokens))
            part_weight = None if token_weight is None else token_weight[part]
            logits = products.logits(part)
            losses[part] = _losses(logits, targets[part], part_weight, vocab_size, softcap)
            if token_weight is not None:
                grad_x[part], grad_part = products.gradients(logits)
                grad_weight = grad_part.float() if grad_weight is None else grad_weight.add_(grad_part)
            del logits  # They would stand beside those of the next chunk until its product is made.
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
    """Returns sum(token_weight * losses), FP32 (), and its gradients for x and weight. Without want_grad the gradients
    are empty tensors."""
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
    """Returns the losses, FP32 (N,)."""
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
    Computes F.cross_entropy(softcap * tanh(x @ weight.T / softcap), targets, ignore_index=-1) without keeping the
    logits.

    Args:
        x: (..., D), of any float dtype
        weight: (rows, D), with at least vocab_size rows. Rows from vocab_size on are padding and get a gradient of
        zero.
        targets: (...), int64. Negative targets (-1 in nanochat) are ignored.
        vocab_size: the number of vocabulary entries, by default the number of rows
        reduction: "mean" is the mean over all targets that are not ignored, "sum" is the sum, and "none" returns the
            losses of all targets, flattened, with 0 for ignored ones. If all targets of a batch are ignored, the mean
            is 0, without a gradient. F.cross_entropy would give NaN, so that a row without an answer would end a
            fine-tuning run.
        head: one of HEADS. "fp8" needs D and rows that are multiples of 16. Without FP8 tensor cores it is decoded.

    The products are computed in autocast's dtype, or in x's dtype without autocast. Soft cap, softmax and sums are in
    FP32. Returns FP32 (), or (N,) for the reduction "none". Raises ValueError for shapes that do not match, an unknown
    reduction or head, a soft cap that is not positive and finite, and an FP8 head that these shapes do not allow.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"unknown loss reduction {reduction!r}; use 'mean', 'sum' or 'none'")
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"targets {tuple(targets.shape)} do not fit x {tuple(x.shape)}; expected one target a token")
    if not 0 < softcap < math.inf:  # NaN is in no range.
        raise ValueError(f"softcap is {softcap}, expected a positive finite number; a cap of 1e5 caps nothing")
    if problem := head_problem(head, *weight.shape):
        raise ValueError(problem)
    fp8 = head == "fp8"
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


class Head(InContext, nn.Linear):
    """The output head of a model: an nn.Linear without a bias, whose products are in BF16 or in FP8.

    precision is one of HEADS. A model evaluates with the head that trains it, and with a BF16 head inside of
    nf.full_precision. The losses of an FP8 head have one scale for a tensor, as in training. If logits are computed
    without gradients, each row of the input has its own scale, so that a token's logits do not depend on the others.
    """

    precision: Literal["bf16", "fp8"] = "bf16"

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    @property
    def quantizes(self) -> bool:
        """Whether products are in FP8 at the moment."""
        return self.precision == "fp8" and not any(context.full_precision for context in self.contexts)

    @property
    def bits(self) -> int:
        """The number of bits of the products outside of all contexts."""
        return 8 if self.precision == "fp8" else 16

    def forward(self, x: Tensor) -> Tensor:
        """Computes the logits (..., out_features) of x (..., in_features)."""
        if not self.quantizes:
            return super().forward(x)
        layer = QuantLinear(self.in_features, self.out_features, method="fp8", device="meta").train(self.training)
        layer.per_token_in_eval = True
        return torch.func.functional_call(layer, {"weight": self.weight}, x)

    def losses(self, x: Tensor, targets: Tensor, vocab_size: int, softcap: float, reduction: str) -> Tensor:
        """Computes linear_cross_entropy with the head's weight and its precision."""
        head = "fp8" if self.quantizes else "bf16"
        return linear_cross_entropy(x, self.weight, targets, vocab_size, softcap, reduction, head)
