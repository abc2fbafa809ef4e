"""A block whose backward pass recomputes tensors from the kept 4-bit codes (`GPT.recompute`, docs/memory.md).

    residual stream after the lambdas   from the stream before them, the output of the block before
    queries, keys, values               from the codes of their input, one GEMM
    stream into the second norm         from attention's codes, one GEMM, and the first stream
    relu(x), "codes-mlp" alone          from the codes of c_fc's input, one GEMM

Recomputed tensors have the forward pass's bits, so the gradients have the bits that they have without recomputation.
Only the derivative of ReLU^2 differs. The recomputed one is exact, the 8 bits that are kept otherwise are unbiased.
Attention is not recomputed. Its result and log-sum-exp are kept.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.models import flash_attention
from nanochat_fp4.models.elementwise import norm_gradient, rms_norm, rotate, rotate_back
from nanochat_fp4.nvfp4.epilogue import linear_with_epilogue
from nanochat_fp4.nvfp4.fused import can_be_fused
from nanochat_fp4.nvfp4.gemm import after
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.relu_squared import relu_squared_gradient
from nanochat_fp4.nvfp4.relu_squared_linear import relu_squared_linear


class _MixedNorm(torch.autograd.Function):
    """(y, norm(y)) of y = a x + b x0. x and x0 are kept for the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, x0: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        y = a * x + b * x0
        normed, r = rms_norm(y)
        ctx.save_for_backward(x, x0, a, b, r)
        return y, normed

    @staticmethod
    def backward(ctx, grad_y: Tensor, grad_normed: Tensor) -> tuple[Tensor, ...]:
        x, x0, a, b, r = ctx.saved_tensors
        y = _depending_on(grad_y, a) * x + b * x0
        g = grad_y + norm_gradient(grad_normed, y.float() * r, r)
        return a * g, b * g, (g * x).sum().to(a.dtype), (g * x0).sum().to(b.dtype)


class _Attention(NamedTuple):
    """Attention of q, k, v side by side, (M, N). others: the rotary tables."""

    heads: int
    kv_heads: int
    left: int  # the window

    def _qkv(self, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """([q, k, v], [1 / rms of q, of k]). q and k are rotated and normalized."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = y.view(-1, cos.size(1), sum(heads), 2 * cos.size(-1)).split(heads, dim=-2)
        (q, q_r), (k, k_r) = (rms_norm(rotate(t, cos, sin)) for t in (q, k))
        return [q, k, v], [q_r, k_r]

    def forward(self, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor], tuple[Tensor, ...]]:
        qkv, _ = self._qkv(y, cos, sin)
        out, statistics = flash_attention.forward(*qkv, self.left)
        return (out.flatten(2),), (cos, sin, out, *statistics)

    def backward(self, y: Tensor, kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, out, *statistics = kept
        qkv, r = self._qkv(y, cos, sin)
        *grads, grad_v = flash_attention.backward(grad.view(out.shape), *qkv, self.left, out, statistics)
        grads = [rotate_back(norm_gradient(*of_one), cos, sin) for of_one in zip(grads, qkv, r)]
        return torch.cat((*grads, grad_v), dim=-2).view(y.shape), None, None


class _ResidualNorm(NamedTuple):
    """(x1 + y, norm(x1 + y)), with x1 = a x + b x0. The backward pass keeps x, x0, a and b, not x1."""

    def forward(self, y: Tensor, x1: Tensor, *parts: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        x2 = x1 + y.view(x1.shape)
        normed, r = rms_norm(x2)
        return (x2, normed), (*parts, r)

    def backward(
        self, y: Tensor, kept: Sequence[Tensor], grad_x2: Tensor, grad_normed: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, x0, a, b, r = kept
        x2 = _depending_on(grad_x2, a) * x + b * x0 + y.view(x.shape)
        g = grad_x2 + norm_gradient(grad_normed, x2.float() * r, r)
        return g.view(y.shape).to(y.dtype), g, None, None, None, None


class _ReluSquaredDerivative(NamedTuple):
    """The identity of y, for a gradient of relu(y)^2. The gradient of y is 2 relu(y) times that. Nothing is kept."""

    def forward(self, y: Tensor) -> tuple[tuple[Tensor], tuple[()]]:
        return (y,), ()

    def backward(self, y: Tensor, kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor]:
        return (relu_squared_gradient(grad, y),)


def _depending_on(grad: Tensor, scalar: Tensor) -> Tensor:
    """Makes a compiler recompute the results of this scalar in the backward pass, instead of keeping them."""
    return after(scalar, grad) if torch.compiler.is_compiling() else scalar


def can_recompute(block: Any) -> bool:
    """Whether a gpt.Block can be recomputed: QuantLinear layers of one process, no hooks, q, k and v fused."""
    attn, mlp = block.attn, block.mlp
    groups = (attn.c_q, attn.c_k, attn.c_v), (attn.c_proj,), (mlp.c_fc,), (mlp.c_proj,)
    return bool(attn.fused_linears) and all(
        isinstance(layers[0], QuantLinear) and layers[0].part_number is None and can_be_fused(layers)
        for layers in groups
    )


def attention_part(
    block: Any, x: Tensor, x0: Tensor, a: Tensor, b: Tensor, cos_sin: tuple[Tensor, Tensor], left: int
) -> tuple[Tensor, Tensor]:
    """(stream after attention, its norm) of a gpt.Block. x, x0 have the shape (B, T, C); a, b are the two lambdas."""
    attn = block.attn
    x1, normed = _MixedNorm.apply(x, x0, a, b)
    attention = _Attention(attn.n_head, attn.n_kv_head, left)
    (y,) = linear_with_epilogue(attention, normed, (attn.c_q, attn.c_k, attn.c_v), *cos_sin)
    parts = (t.detach() for t in (x, x0, a, b))
    return linear_with_epilogue(_ResidualNorm(), y, (attn.c_proj,), x1, *parts)


def mlp_part(block: Any, normed: Tensor) -> Tensor:
    """The MLP of a gpt.Block, without its residual."""
    (y,) = linear_with_epilogue(_ReluSquaredDerivative(), normed, (block.mlp.c_fc,))
    return relu_squared_linear(y.view(*normed.shape[:-1], -1), block.mlp.c_proj, derivative=False)
