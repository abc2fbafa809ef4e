"""The operations of a block between its matrix products, with their gradients: norm, rotary positions and ReLU^2.

The gradients are also functions of their own, because a backward pass may compute their inputs again (recompute.py).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The default eps of F.rms_norm for FP32 and BF16. It is written out because other releases have another default.
NORM_EPS = torch.finfo(torch.float32).eps


def rms_norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """
    Computes RMSNorm over the last dimension. Returns (y, r) with r = 1 / rms(x), float32 `(..., 1)`, and y = r x in x's
    dtype.

    The result is cast to x's dtype because autocast of newer releases returns FP32, and the whole residual stream would
    then be FP32.
    """
    y, r = torch.ops.aten._fused_rms_norm(x, [x.size(-1)], None, NORM_EPS)
    return (y if y.dtype == x.dtype else y.to(x.dtype)), r


def norm_gradient(grad_y: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """Returns the gradient of rms_norm's input, r (grad_y - y mean(grad_y * y)), in grad_y's dtype."""
    g, y = grad_y.float(), y.float()
    return (r * (g - y * (g * y).mean(-1, keepdim=True))).to(grad_y.dtype)


class _Norm(torch.autograd.Function):
    """
    rms_norm, which keeps r and either x or y for its gradient. It should keep the tensor that another operator keeps
    anyway. This is y for queries and keys, which attention keeps, and x otherwise.
    """

    @staticmethod
    def forward(ctx, x: Tensor, keep_output: bool) -> Tensor:
        y, r = rms_norm(x)
        ctx.save_for_backward(y if keep_output else x, r)
        ctx.keep_output = keep_output
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, None]:
        kept, r = ctx.saved_tensors
        return norm_gradient(grad_y, kept if ctx.keep_output else kept.float() * r, r), None


def norm(x: Tensor, keep_output: bool = False) -> Tensor:
    """Computes RMSNorm over the last dimension without weights. The statistics are in FP32, and the result is in x's
    dtype. With keep_output, the gradient is computed from the result instead of from x."""
    with torch.autocast(x.device.type, enabled=False):
        return _Norm.apply(x, keep_output)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the halves (a, b) of the last dimension to (a cos + b sin, b cos - a sin)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def rotate_back(grad_y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Returns the gradient of rotate, which is written as (a, b) cos + (b, a) (-sin, sin).

    If this form is compiled together with the gradient of a norm, the kernel reads a row at two places. A concatenation
    of two halves would read it four times under masks, with twice the instructions, and the kernel would no longer be
    as fast as memory allows.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    pairs = grad_y.unflatten(-1, (2, -1))
    sign = 2 * torch.arange(2, dtype=sin.dtype, device=sin.device).unsqueeze(-1) - 1
    return (pairs * cos + pairs.flip(-2) * (sin * sign)).flatten(-2)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin)

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, None, None]:
        return rotate_back(grad_y, *ctx.saved_tensors), None, None


def rotary_tables(positions: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of position * base^(-2i / head_dim), each `(1, positions, 1, head_dim / 2)`, FP32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    position = torch.arange(positions, dtype=torch.float32, device=device)
    angle = torch.outer(position, 1.0 / base**exponent)[None, :, None, :]
    return angle.cos(), angle.sin()


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + D/2}) of x `(B, T, H, D)` by the angles of cos and sin, both `(1, T, 1, D/2)`."""
    return _Rotate.apply(x, cos, sin)


class ReluSquared(torch.autograd.Function):
    """
    Computes y = relu(x)^2. Its derivative 2 relu(x) is computed as 2 sqrt(y).

    The next linear layer keeps y anyway, so the derivative needs no further memory. Autograd's own version would also
    keep relu(x). In BF16 the rounding of y adds a relative error of at most 2^-9, which is no more than the rounding of
    the gradient adds.

    A quantized next layer keeps only 4-bit codes of y. They are too coarse for the derivative, because rounding to
    nearest would bias the gradient. relu_squared_linear is used in this case. It keeps relu(x) in steps of 1/255 of
    each token's largest value, rounded stochastically, so that the gradient is right on average. This takes half the
    memory of y in BF16. The error is 4e-5 of the gradient's square, far below that of the gradient's quantization
    (1e-2).
    """

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        positive = F.relu(x)
        y = positive * positive
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad_y * (2 * y.sqrt())
