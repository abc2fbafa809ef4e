"""The GEMMs of all experts of a layer at once: each is a QuantLinear's of its tokens, and only the products are made
together.

Each expert's operands are made by QuantLinear's own autograd function, which asks for products and is given none yet
(Product). By default the products are then made one after the other, to the bit QuantLinear's.

On a GPU without FP4 tensor cores NVFP4_EXPERTS=grouped makes all products of a pass in BF16 by one call of torch's
grouped_mm. On an H200 that was slower (dev/LOG.md, 2026-11-24). grouped_mm rounds to BF16 before the tensor scales are
applied, and the scaled result is rounded again. QuantLinear rounds once. The two differ by at most one BF16 ulp, or two
at a tie. Products in FP32 (the gradients of FP32 weights) stay QuantLinear's.
"""

import itertools
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nanochat_fp4.nvfp4.dispatch import native_gemm
from nanochat_fp4.nvfp4.gemm import GemmOperand, gemm
from nanochat_fp4.nvfp4.linear import Gemms, QuantLinear, _compute_dtype, _Pass, _QuantLinear
from nanochat_fp4.nvfp4.operands import Codes, Stacked

# The function of torch 2.10, and that of before; older releases have none.
grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
ALIGNED = 8  # grouped_mm wants rows of a multiple of 16 bytes


class Product(NamedTuple):
    """a (M, K) . b (N, K)^T, still to be made: gemm's arguments."""

    a: GemmOperand
    b: GemmOperand
    compute_dtype: torch.dtype
    out_dtype: torch.dtype

    def made(self) -> Tensor:
        return gemm(self.a, self.b, compute_dtype=self.compute_dtype, out_dtype=self.out_dtype)

    def split(self, rows: Sequence[int]) -> tuple["Product"]:
        """As a gradient's tensor is split into the weights' parts: there is one weight."""
        return (self,)


class _Asked(Gemms):
    """Gemms whose products are made later."""

    def gemm(self, a, b, *, compute_dtype, out_dtype) -> Product:
        return Product(a, b, compute_dtype, out_dtype)


class _Part:
    """What autograd's ctx is to _QuantLinear, for one expert."""

    saved_tensors: Sequence[Tensor] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, passes: Sequence[_Pass], counts: Sequence[int], sizes: Tensor, x: Tensor, weights: Tensor
    ) -> Tensor:
        """x (T, K), sorted by expert, weights (E, N, K) -> (T, N). Some expert has tokens."""
        ctx.counts, ctx.weights, ctx.parts, products, saved = counts, weights.shape, {}, [], []
        ctx.of_parts = sizes if all(counts) else sizes[sizes > 0]
        for e, rows in enumerate(x.split(counts)):
            if len(rows):
                part = ctx.parts[e] = _Part((False, *ctx.needs_input_grad[3:]))
                products.append(_QuantLinear.forward(part, passes[e], rows, weights[e].contiguous()))
                saved.append(part.saved_tensors)
                part.saved_tensors = ()
        ctx.sizes = [len(tensors) for tensors in saved]
        ctx.save_for_backward(*itertools.chain(*saved))
        together = grouped(products, ctx.of_parts)
        return torch.cat([p.made() for p in products]) if together is None else together

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        tensors, products = iter(ctx.saved_tensors), {}
        for part, size in zip(ctx.parts.values(), ctx.sizes):
            part.saved_tensors = list(itertools.islice(tensors, size))
        grads = grad_y.split(ctx.counts)
        for e, part in reversed(ctx.parts.items()):  # the order in which autograd would call them
            products[e] = _QuantLinear.backward(part, grads[e])
            part.saved_tensors = ()
        of_x, of_w = ([products[e][i] for e in ctx.parts] for i in (1, 2))
        grad_x = grad_w = None
        if of_x[0] is not None:
            grad_x = grouped(of_x, ctx.of_parts)
            grad_x = torch.cat([p.made() for p in of_x]) if grad_x is None else grad_x
        if of_w[0] is not None:
            grad_w = grad_y.new_zeros(ctx.weights, dtype=of_w[0].out_dtype)
            together = grouped_over_tokens(of_w, grad_y.device)
            for i, e in enumerate(ctx.parts):
                grad_w[e] = of_w[i].made() if together is None else together[i]
        return None, None, None, grad_x, grad_w


def project(
    x: Tensor, counts: Sequence[int], sizes: Tensor, weights: Tensor, linears: Sequence[QuantLinear]
) -> Tensor | None:
    """Each expert's product of its tokens: x (T, K), sorted by expert, weights (E, N, K) -> (T, N) in the dtype of x or
    autocast. sizes: the counts, (E,) on the device of x, where they are read without a wait.

    None where the linears want to be called one by one: without quantization, unlike one another, or with hooks.
    """
    first = linears[0]
    if not x.numel() or not all(
        layer.quantizes and layer.recipe == first.recipe and not layer._forward_pre_hooks and not layer._forward_hooks
        for layer in linears
    ):
        return None
    dtype, grad_enabled = _compute_dtype(x), torch.is_grad_enabled()
    passes = [
        _Pass(
            _Asked(layer.recipe), dtype, grad_enabled, layer._per_token_now(grad_enabled), layer.feedback_factor,
            layer.made_weight(1), None, None, None, False,
        )
        for layer in linears
    ]  # fmt: skip
    return _Experts.apply(passes, counts, sizes, x, weights)


# ----------------------------------------------------------------------------------------------------------------------
# Several products in one call


def one_by_one(device_type: str) -> str | None:
    """Why the experts' products are made one by one on this kind of device, or None.

    Raises ValueError for an NVFP4_EXPERTS that is not known.
    """
    wanted = os.environ.get("NVFP4_EXPERTS", "one_by_one")
    if wanted not in ("one_by_one", "grouped"):
        raise ValueError(f"NVFP4_EXPERTS is {wanted!r}, expected one_by_one or grouped")
    if device_type != "cuda":
        return "no CUDA device"
    if native_gemm(device_type) is not None:
        return "FP4 tensor cores take one expert at a time"
    if wanted != "grouped":
        return "faster on an H200 where both were timed; NVFP4_EXPERTS=grouped asks for torch's grouped_mm"
    return None if grouped_mm is not None else f"torch {torch.__version__} has no grouped_mm"


def _can_be_grouped(products: Sequence[Product], device: torch.device) -> bool:
    single = all(p.a.single and p.b.single for p in products)
    bf16 = products[0].out_dtype == products[0].compute_dtype == torch.bfloat16
    return single and bf16 and one_by_one(device.type) is None


def grouped(products: Sequence[Product], counts: Tensor) -> Tensor | None:
    """The results one below the other, (T, N) in BF16: of products of some tokens each with a weight. counts (E,): the
    tokens of each. None where they are to be made one by one."""
    if not _can_be_grouped(products, counts.device):
        return None
    x, y = _matrices([p.a for p in products]), _matrices([p.b for p in products])
    if x.dtype != torch.bfloat16 or y.dtype != torch.bfloat16:
        return None
    k = min(x.shape[1], y.shape[1])  # one of the two may be padded
    weights = y[:, :k].unflatten(0, (len(products), -1))
    result = grouped_mm(x[:, :k], weights.mT, offs=counts.cumsum(0).to(torch.int32))
    alpha = _alpha(products, counts, len(x))
    return result if alpha is None else result.mul_(alpha)  # in FP32, rounded once more


def grouped_over_tokens(products: Sequence[Product], device: torch.device) -> Tensor | None:
    """The results (E, N, K) in BF16 of products over the tokens of each expert. None as in `grouped`."""
    if not _can_be_grouped(products, device):
        return None
    x, y = ([operand.matrix(torch.bfloat16) for operand in some] for some in zip(*(p[:2] for p in products)))
    sizes = [min(a.shape[1], b.shape[1]) for a, b in zip(x, y)]
    if any(size % ALIGNED for size in sizes) or {t.dtype for t in (*x, *y)} != {torch.bfloat16}:
        return None
    x, y = (torch.cat([t[:, :size] for t, size in zip(some, sizes)], dim=1) for some in (x, y))
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    result, alpha = grouped_mm(x, y.T, offs=ends), _alpha(products)
    return result if alpha is None else result.mul_(alpha.unsqueeze(-1))


def _matrices(operands: Sequence[GemmOperand]) -> Tensor:
    """Their matrices one below the other. Codes alone are decoded at once."""
    if all(isinstance(operand, Codes) and operand.decoded is None for operand in operands):
        return Stacked.of(tuple(operands)).matrix(torch.bfloat16)
    return torch.cat([operand.matrix(torch.bfloat16) for operand in operands])


def _alpha(products: Sequence[Product], counts: Tensor | None = None, rows: int = 0) -> Tensor | None:
    """The product of each expert's tensor scales: FP32 (T, 1) with counts of tokens, else (E, 1). None for 1."""
    alpha = None
    for operands in zip(*(p[:2] for p in products)):
        scales = [operand.tensor_scale for operand in operands]
        if scales[0] is None:
            continue
        if scales[0].dim():  # of each token
            scale = torch.cat(scales)
        else:
            scale = torch.stack(scales).unsqueeze(-1)
            scale = scale if counts is None else scale.repeat_interleave(counts, dim=0, output_size=rows)
        alpha = scale if alpha is None else alpha * scale
    return alpha
