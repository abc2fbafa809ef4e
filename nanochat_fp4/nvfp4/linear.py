"""QuantLinear: a linear layer whose three GEMMs take their operands as a Recipe says; one autograd function for all.

    output       Y  = Qx(X) . Qw(W)^T
    grad_input   dX = Qe(E) . Qwt(W^T)^T
    grad_weight  dW = Qet(E^T) . Qxt(X^T)^T

Shapes: M tokens (all leading dimensions of the input), K in_features, N out_features.

Kept for the backward pass: the codes of input and weight, 4.5 bits an element (the paper, Section 5); the unquantized
tensors only where the recipe's forward does not quantize them.

Any number of tokens works. In wgrad the tokens are the contraction dimension, and in dgrad the out_features: where they
are not a multiple of the rotation's group (128), or of 16, they are padded with zeros. Zeros add nothing to a product,
and a rotated group that holds some is quantized like any other, so SR stays unbiased. So does MS-EDEN from about 24
values a group on: it needs a rotation that mixes many values. A group of 2 to 16 tokens (say, the last one of 133) gets
a gradient whose mean is off by up to 0.5% of its square, a quarter of the noise of a single step; one token is exact.

Randomness: one 64-bit seed per layer and pass, drawn from the default generator of the layer's device, so that saving
and restoring torch's generators resumes rotations and roundings to the bit. Passes without gradients draw nothing.
"""

import torch
from torch.autograd.function import once_differentiable

from nanochat_fp4.nvfp4.backends import new_seed, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.format import BLOCK, NVFP4Tensor
from nanochat_fp4.nvfp4.gemm import Value, gemm
from nanochat_fp4.nvfp4.recipes import Gemm, Recipe, get_recipe

# One stream of random numbers for each operand, so that no two share noise: a of a GEMM has this one, b the next.
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = 0, 2, 4


def _operands(
    spec: Gemm, stream: int, seed: torch.Tensor | None, rht_seed: torch.Tensor | None, device: torch.device
) -> tuple[dict, dict]:
    """Arguments of quantize_operand for the operands a and b of a GEMM: the same signs, different noise."""
    if spec.fixed_signs:
        rht_seed = torch.zeros((), dtype=torch.int64, device=device)
    shared = {"seed": seed, "rht_dim": spec.rht_dim, "rht_seed": rht_seed, "rht_stream": stream}
    return (
        {"rounding": spec.a.rounding, "stream": stream, **shared},
        {"rounding": spec.b.rounding, "stream": stream + 1, **shared},
    )


@torch.library.custom_op("nanochat_fp4::after", mutates_args=())
def _after(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy of value that a compiler must take for a function of both."""
    return value.clone()


@_after.register_fake
def _(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


# torch.compile decides anew what runs in which pass. A seed that neither the forward's outputs nor the backward's
# inputs seem to need may be drawn in both, that is, twice: the two operands of a GEMM would be rotated with different
# signs, and its result be noise. So under a compiler the output depends on the forward's seed, and the backward's seed
# on grad_output.


def _output_needs(seed: torch.Tensor | None, wq: Value) -> Value:
    if seed is None or not torch.compiler.is_compiling():
        return wq
    if isinstance(wq, NVFP4Tensor):
        return NVFP4Tensor(wq.codes, wq.scales, _after(wq.tensor_scale, seed), wq.decoded)
    return _after(wq, seed)


def _backward_seed(grad_output: torch.Tensor) -> torch.Tensor:
    seed = new_seed(grad_output.device)
    return _after(seed, grad_output) if torch.compiler.is_compiling() else seed


class _QuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        weight: torch.Tensor,
        recipe: Recipe,
        dtype: torch.dtype,
        per_token: bool,
        grad_enabled: bool,
    ):
        """x (M, K), weight (N, K) -> (M, N) in dtype, which is also what unquantized operands are multiplied in.

        grad_enabled: the caller's torch.is_grad_enabled(); needs_input_grad does not know of no_grad.
        """
        needs_dgrad, needs_wgrad = (needed and grad_enabled for needed in ctx.needs_input_grad[:2])
        seed = new_seed(x.device) if recipe.draws_in_forward and (needs_dgrad or needs_wgrad) else None
        for_x, for_w = _operands(recipe.output, OUTPUT, seed, seed, x.device)
        xq = quantize_operand(x, keep_codes=True, per_token=per_token, **for_x)
        wq = quantize_operand(weight, keep_codes=True, **for_w)

        # The backward GEMMs take the values used here, or ("raw") codes made now of the unquantized tensor.
        backward_w, backward_x = wq, xq
        if needs_dgrad and recipe.grad_input.b.raw:
            _, for_w = _operands(recipe.grad_input, GRAD_INPUT, seed, seed, x.device)
            backward_w = quantize_operand(weight, transpose=True, keep_codes=True, **for_w)
        if needs_wgrad and recipe.grad_weight.b.raw:
            _, for_x = _operands(recipe.grad_weight, GRAD_WEIGHT, seed, seed, x.device)
            backward_x = quantize_operand(x, transpose=True, keep_codes=True, **for_x)
        _save(ctx, backward_w if needs_dgrad else None, backward_x if needs_wgrad else None, seed)
        ctx.recipe, ctx.dtype, ctx.x_dtype, ctx.weight_dtype = recipe, dtype, x.dtype, weight.dtype
        return gemm(xq, _output_needs(seed, wq), compute_dtype=dtype, out_dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        recipe, dtype = ctx.recipe, ctx.dtype
        w, x, forward_seed = _saved(ctx)
        seed = _backward_seed(grad_output) if recipe.draws_in_backward else None
        dgrad, wgrad = recipe.grad_input, recipe.grad_weight
        # A GEMM whose b was rotated in the forward pass goes on with that pass's signs.
        device = grad_output.device
        e_dgrad, for_w = _operands(dgrad, GRAD_INPUT, seed, forward_seed if dgrad.b.raw else seed, device)
        e_wgrad, for_x = _operands(wgrad, GRAD_WEIGHT, seed, forward_seed if wgrad.b.raw else seed, device)
        e, et = quantize_grad_output(
            grad_output, e_dgrad if ctx.needs_input_grad[0] else None, e_wgrad if ctx.needs_input_grad[1] else None
        )
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            wt = w if dgrad.b.raw else quantize_operand(w, transpose=True, **for_w)
            grad_x = gemm(e, wt, compute_dtype=dtype, out_dtype=ctx.x_dtype)
        if ctx.needs_input_grad[1]:
            xt = x if wgrad.b.raw else quantize_operand(x, transpose=True, **for_x)
            grad_w = gemm(et, xt, compute_dtype=dtype, out_dtype=ctx.weight_dtype)
        return grad_x, grad_w, None, None, None, None


def _save(ctx, *values: Value | None) -> None:
    """Saves tensors as they are and NVFP4 tensors as codes, scales and tensor_scale."""
    tensors: list[torch.Tensor | None] = []
    for value in values:
        quantized = isinstance(value, NVFP4Tensor)
        tensors += [value.codes, value.scales, value.tensor_scale] if quantized else [value, None, None]
    ctx.save_for_backward(*tensors)


def _saved(ctx) -> list[Value | None]:
    tensors = ctx.saved_tensors
    triples = [tensors[i : i + 3] for i in range(0, len(tensors), 3)]
    return [first if scales is None else NVFP4Tensor(first, scales, ts) for first, scales, ts in triples]


class QuantLinear(torch.nn.Linear):
    """nn.Linear with the same parameters and state-dict keys, computed as `method` says.

    method: a name of METHODS or a Recipe. in_features and out_features must be multiples of 16 unless the method
    quantizes nothing; input (..., in_features) in FP32 or BF16, weights in FP32 or BF16, autocast on or off.
    Raises ValueError for an unknown method or dimensions that do not divide.
    """

    recipe: Recipe
    quantization = True  # False inside full_precision(model): computes like nn.Linear
    per_token = False  # True inside per_token_scale(model): each row of the input has a tensor_scale of its own

    def __init__(self, in_features: int, out_features: int, bias: bool = False, method: str | Recipe = "clover", **kw):
        super().__init__(in_features, out_features, bias=bias, **kw)
        self.set_recipe(get_recipe(method))

    def set_recipe(self, recipe: Recipe) -> None:
        """Changes the recipe in place. Raises ValueError if the dimensions do not allow it."""
        reason = unsupported_reason(self, recipe)
        if reason:
            raise ValueError(f"QuantLinear: {reason}; use nn.Linear here, or skip this layer in convert")
        self.recipe = recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        if not (self.quantization and self.recipe.quantizes and x.numel()):
            # Outside autocast the weight follows the input, so that FP32 master weights serve BF16 activations.
            weight = self.weight if autocast else self.weight.to(dtype)
            bias = self.bias if autocast or self.bias is None else self.bias.to(dtype)
            return torch.nn.functional.linear(x, weight, bias)
        # Autocast stays on: where a product must be FP32 (rotate, gemm on a CPU), it is off around it. A context around
        # the whole would be traced by torch.compile into the backward, which CUDA's autocast does not survive.
        rows = x.reshape(-1, self.in_features)
        y = _QuantLinear.apply(rows, self.weight, self.recipe, dtype, self.per_token, torch.is_grad_enabled())
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


def unsupported_reason(linear: torch.nn.Linear, recipe: Recipe) -> str | None:
    """Why this layer cannot be computed with this recipe, or None."""
    if not recipe.quantizes:
        return None
    for name, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
        if size % BLOCK:
            return f"{name} is {size}, expected a multiple of {BLOCK}"
    return None
