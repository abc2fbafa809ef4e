"""Computes a layer and the operation after it as one autograd function that does not keep the layer's output.

The backward pass computes the output again, by one more GEMM of the layer's two operands, which it keeps anyway. The
result has the same bits. Tensors that depend only on the output therefore need not be kept (docs/memory.md).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from nanochat_fp4.nvfp4.gemm import GemmOperand, gemm, once_differentiable
from nanochat_fp4.nvfp4.layer_pass import Pass, check_input
from nanochat_fp4.nvfp4.linear import QuantLinear, gradients, output
from nanochat_fp4.nvfp4.operands import operands_of, tensors_of


class Epilogue(Protocol):
    """The operation that follows a layer's product, with a gradient of its own.

    Under torch.compile, everything that `backward` computes again must depend on the gradients that it is given.
    Otherwise the compiler would move the computation into the forward pass and keep its result (gemm.after).
    """

    def forward(
        self, y: torch.Tensor, *others: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Computes the operation on y (M, N). Returns the results, and the tensors besides y that `backward` needs."""
        ...

    def backward(
        self, y: torch.Tensor, kept: Sequence[torch.Tensor], *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of y and of each of `others`. grads holds the gradients of the results."""
        ...


class _WithEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Pass, epilogue: Epilogue, layers: int, x: torch.Tensor, *tensors: torch.Tensor):
        weights, others = tensors[:layers], tensors[layers:]
        needs = p.needs(*ctx.needs_input_grad[3 : 4 + layers])
        y, both, ctx.state, saved = output(p, needs, x, weights, p.forward_seed(needs, x.device))
        results, kept = epilogue.forward(y, *others)
        ctx.both, operands = tensors_of(*both)
        ctx.epilogue, ctx.of_layer = epilogue, len(saved)
        ctx.save_for_backward(*saved, *operands, *kept)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        saved, rest = ctx.saved_tensors[: ctx.of_layer], ctx.saved_tensors[ctx.of_layer :]
        both, kept = operands_of(ctx.both, rest)
        a, b = (_again(operand, grads[0]) for operand in both)
        p = ctx.state.p
        y = gemm(a, b, compute_dtype=p.dtype, out_dtype=p.dtype)
        grad_output, *grad_others = ctx.epilogue.backward(y, kept, *grads)
        grad_x, grad_weights = gradients(ctx.state, saved, grad_output)
        return None, None, None, grad_x, *grad_weights, *grad_others


def _again(operand: GemmOperand, grad: torch.Tensor) -> GemmOperand:
    """Returns the operand in a form that a compiler takes for a new one. The compiler would otherwise see that the
    forward pass has computed the same product, and would keep that product."""
    return operand.depending_on(grad) if torch.compiler.is_compiling() else operand


def linear_with_epilogue(
    epilogue: Epilogue, x: torch.Tensor, linears: Sequence[QuantLinear], *others: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Computes epilogue(x . W^T, *others) and returns the epilogue's results.

    x is (..., K). W (N, K) is made of the weights of `linears`, stacked one below the other. The layers must be ones
    for which can_be_fused is true, so they have no biases. Raises ValueError if x has another size or dtype than the
    layers take.
    """
    first = linears[0]
    check_input(x, first.in_features)
    p = first.new_pass(x, linears)
    weights = [layer.matrix for layer in linears]
    return _WithEpilogue.apply(p, epilogue, len(weights), p.rows(x), *weights, *others)
