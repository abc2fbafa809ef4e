"""A layer and the operation behind it as one autograd function, which computes the layer's output twice.

The backward pass makes the output again from the layer's two operands, which it keeps anyway: to the bit, by one more
GEMM. Tensors that depend on the output alone need not be kept (docs/memory.md).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from nanochat_fp4.nvfp4.gemm import GemmOperand, gemm, once_differentiable
from nanochat_fp4.nvfp4.layer_pass import Pass, check_input
from nanochat_fp4.nvfp4.linear import QuantLinear, gradients, output
from nanochat_fp4.nvfp4.operands import operands_of, tensors_of


class Epilogue(Protocol):
    """What follows a product, with a gradient of its own.

    Under torch.compile the gradients given to `backward` must decide all that it computes again (gemm.after).
    """

    def forward(
        self, y: torch.Tensor, *others: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """y (M, N) -> (results, the tensors to keep for the gradient, but for y)."""
        ...

    def backward(
        self, y: torch.Tensor, kept: Sequence[torch.Tensor], *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of y and of each of `others`. grads: of the results."""
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
        y = gemm(a, b, compute_dtype=p.dtype, out_dtype=p.dtype, libraries=p.libraries)
        grad_output, *grad_others = ctx.epilogue.backward(y, kept, *grads)
        grad_x, grad_weights = gradients(ctx.state, saved, grad_output)
        return None, None, None, grad_x, *grad_weights, *grad_others


def _again(operand: GemmOperand, grad: torch.Tensor) -> GemmOperand:
    """A compiler that knew the operand's product of the forward pass would keep it."""
    return operand.depending_on(grad) if torch.compiler.is_compiling() else operand


def linear_with_epilogue(
    epilogue: Epilogue, x: torch.Tensor, linears: Sequence[QuantLinear], *others: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """epilogue(x . W^T, *others) of x (..., K) and the weights of layers that can_be_fused, without biases.

    Returns the epilogue's results.
    """
    first = linears[0]
    check_input(x, first.in_features)
    p = first.new_pass(x, linears)
    weights = [layer.matrix for layer in linears]
    return _WithEpilogue.apply(p, epilogue, len(weights), p.rows(x), *weights, *others)
