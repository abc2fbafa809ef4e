"""A block whose backward pass recomputes tensors from the kept 4-bit codes (`GPT.recompute`, docs/memory.md).

    recomputed tensor                         is computed from
    residual stream after the lambdas         the residual stream before them, which is the output of the block before
    queries, keys, values                     the codes of their input, by one GEMM
    residual stream before the second norm    the codes of attention's output, by one GEMM, and the first stream
    relu(x), only with "codes-mlp"            the codes of c_fc's input, by one GEMM

The recomputed tensors have the bits of the forward pass, so the gradients have the bits that they have without
recomputation. Only the derivative of ReLU^2 differs: the recomputed one is exact, and the 8 bits that are kept
otherwise are only unbiased. Attention is not recomputed. Its result and its log-sum-exp are kept.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.models import flash_attention
from nanochat_fp4.models.elementwise import norm_gradient, rms_norm, rotate, rotate_back
from nanochat_fp4.nvfp4.epilogue import can_be_fused
from nanochat_fp4.nvfp4.gemm import after
from nanochat_fp4.nvfp4.layer import QuantLinear


class MixedNorm(torch.autograd.Function):
    """Computes y = a x + b x0 and returns (y, norm(y)). The backward pass keeps x and x0, and computes y again."""

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
    """The epilogue that computes attention of q, k and v, which stand side by side in y (M, N). Its further arguments
    are the rotary tables."""

    heads: int
    kv_heads: int
    left: int  # the window
    recomputes = True

    def _qkv(self, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns [q, k, v], with q and k rotated and normalized, and [1 / rms of q, 1 / rms of k]."""
        heads = [self.heads, self.kv_heads, self.kv_heads]
        q, k, v = y.view(-1, cos.size(1), sum(heads), 2 * cos.size(-1)).split(heads, dim=-2)
        (q, q_r), (k, k_r) = (rms_norm(rotate(t, cos, sin)) for t in (q, k))
        return [q, k, v], [q_r, k_r]

    def forward(self, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        qkv, _ = self._qkv(y, cos, sin)
        out, statistics = flash_attention.forward(*qkv, self.left)
        return (out.flatten(2),), (), (cos, sin, out, *statistics)

    def backward(self, y: Tensor, kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin, out, *statistics = kept
        qkv, r = self._qkv(y, cos, sin)
        *grads, grad_v = flash_attention.backward(grad.view(out.shape), *qkv, self.left, out, statistics)
        grads = [rotate_back(norm_gradient(*of_one), cos, sin) for of_one in zip(grads, qkv, r)]
        return torch.cat((*grads, grad_v), dim=-2).view(y.shape), None, None


class _ResidualNorm(NamedTuple):
    """The epilogue that returns (x1 + y, norm(x1 + y)), with x1 = a x + b x0. The backward pass keeps x, x0, a and b,
    and computes x1 again."""

    recomputes = True

    def forward(self, y: Tensor, x1: Tensor, *parts: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        x2 = x1 + y.view(x1.shape)
        normed, r = rms_norm(x2)
        return (x2, normed), (), (*parts, r)

    def backward(
        self, y: Tensor, kept: Sequence[Tensor], grad_x2: Tensor, grad_normed: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, x0, a, b, r = kept
        x2 = _depending_on(grad_x2, a) * x + b * x0 + y.view(x.shape)
        g = grad_x2 + norm_gradient(grad_normed, x2.float() * r, r)
        return g.view(y.shape).to(y.dtype), g, None, None, None, None


def _depending_on(grad: Tensor, scalar: Tensor) -> Tensor:
    """Returns the scalar in a form with which a compiler cannot keep results of the forward pass, and has to compute
    them again in the backward pass."""
    return after(scalar, grad) if torch.compiler.is_compiling() else scalar


def can_recompute(block: Any) -> bool:
    """Whether a gpt.Block can be recomputed. All of its layers must be QuantLinear layers without hooks that one
    process computes alone, and q, k and v must be fused."""
    attn, mlp = block.attn, block.mlp
    groups = (attn.c_q, attn.c_k, attn.c_v), (attn.c_proj,), (mlp.c_fc,), (mlp.c_proj,)
    return bool(attn.fused_linears) and all(
        isinstance(layers[0], QuantLinear) and layers[0].largest is None and can_be_fused(layers) for layers in groups
    )


def attention_part(
    block: Any, x: Tensor, x0: Tensor, a: Tensor, b: Tensor, cos_sin: tuple[Tensor, Tensor], left: int
) -> tuple[Tensor, Tensor]:
    """Computes the attention of a gpt.Block. x and x0 are (B, T, C), a and b are the two lambdas, and left is the
    window. Returns the residual stream after attention and its norm, both (B, T, C)."""
    attn = block.attn
    x1, normed = MixedNorm.apply(x, x0, a, b)
    attention = _Attention(attn.n_head, attn.n_kv_head, left)
    (y,) = attn.c_q.outputs(normed, (attn.c_q, attn.c_k, attn.c_v), others=cos_sin, after=attention)
    parts = (t.detach() for t in (x, x0, a, b))
    return attn.c_proj.outputs(y, (attn.c_proj,), others=(x1, *parts), after=_ResidualNorm())
