"""QuantLinear: a linear layer whose three GEMMs take their operands as a Recipe says; one autograd function for all.

    output       Y  = Qx(X) . Qw(W)^T
    grad_input   dX = Qe(E) . Qwt(W^T)^T
    grad_weight  dW = Qet(E^T) . Qxt(X^T)^T

Shapes: M tokens (all leading dimensions of the input), K in_features, N out_features. How an operand is made, what of
it is kept and how it multiplies is its kind's to say (operands.py).

Kept for the backward pass: the codes of input and weight, 4.5 bits an element (the paper, Section 5); the unquantized
tensors only where the recipe's forward does not quantize them.

Layers that read the same tensor (q, k, v) share its codes by fused_linear, which computes them as one layer whose
weight is their weights, one below the other (the paper, Appendix D.2): one quantized input, one weight with one
tensor_scale, one grad_output. To the bit a QuantLinear with that weight. It differs from the layers one by one in the
weights' and grad_outputs' tensor scale, and in drawing once instead of three times.

The backward GEMMs take the values that the forward used, whatever they are: of an operand of two terms, X ~ X1 + X2
with X1 = Q(X) and X2 = Q(X - X1), and W alike, so that Y = X1 W1^T + X1 W2^T + X2 W1^T, they take the sums requantized
to one term, dX = E (W1 + W2), dW = E^T (X1 + X2). That is the gradient of this very Y. Rounding counts as the identity
in a gradient, so dX1/dX = 1 and dX2/dX = 1 - 1 = 0; and dY/dX1 is all of W1 + W2.

The weights' forward codes can be made once for several passes: convert.quantize_weights_once. What a method takes from
the inputs' Gram matrix (gram.py) is None until training has made one (training.update_gram_matrices).

Any number of tokens works. In wgrad the tokens are the contraction dimension, and in dgrad the out_features: where they
are not a multiple of the rotation's group (128), or of 16, they are padded with zeros. Zeros add nothing to a product,
and a rotated group that holds some is quantized like any other, so SR stays unbiased. So does MS-EDEN from about 24
values a group on: it needs a rotation that mixes many values. A group of 2 to 16 tokens (say, the last one of 133) gets
a gradient whose mean is off by up to 0.5% of its square, a quarter of the noise of a single step; one token is exact.

Randomness: one 64-bit seed per layer and pass, drawn from the default generator of the layer's device, so that saving
and restoring torch's generators resumes rotations and roundings to the bit. Passes without gradients draw nothing. No
state is kept outside of the layers, so threads may call them side by side.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from nanochat_fp4.nvfp4.dispatch import left_out_of_graphs
from nanochat_fp4.nvfp4.divided import Shard
from nanochat_fp4.nvfp4.gemm import GemmOperand, gemm
from nanochat_fp4.nvfp4.gram import OLD_NAME, InputStatistics, set_gram_matrix
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.operands import (
    Codes,
    Quantization,
    Stacked,
    after,
    quantize_grad_output,
    quantize_operand,
    quantize_relu_squared,
    quantize_weights,
    takes_relu_squared,
)
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.recipes import Gemm, Recipe
from nanochat_fp4.nvfp4.relu_squared import ReluSquared, relu_squared_gradient

# One stream of random numbers for each operand, so that no two share noise: a of a GEMM has this one, b the next.
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = 0, 2, 4
# (rows, contracted dimension) of its operands a and b; M, N and K as above.
DIMENSIONS = {OUTPUT: ("MK", "NK"), GRAD_INPUT: ("MN", "KN"), GRAD_WEIGHT: ("NM", "KM")}
UNQUANTIZED = Recipe("bf16")


def _quantizations(
    spec: Gemm,
    stream: int,
    seed: torch.Tensor | None,
    rht_seed: torch.Tensor | None,
    device: torch.device,
    shard: Shard | None = None,
) -> tuple[Quantization, Quantization]:
    """How the operands a and b of a GEMM are made: rotated with the same signs, rounded with different noise."""
    if spec.fixed_signs:
        rht_seed = torch.zeros((), dtype=torch.int64, device=device)
    parts = shard.parts(DIMENSIONS[stream]) if shard else (None, None)
    a, b = (
        Quantization(o.rounding, seed, stream + i, spec.rht_dim, rht_seed, stream, o.terms, o.outer, part=part)
        for i, (o, part) in enumerate(zip((spec.a, spec.b), parts))
    )
    return a, b


def _of_output(recipe: Recipe, layer: "_Layer", seed: torch.Tensor | None, device: torch.device):
    """How the operands of the output GEMM are made: of a layer and what it knows of its inputs."""
    for_x, for_w = _quantizations(recipe.output, OUTPUT, seed, seed, device, layer.shard)
    factor, channels = layer.statistics
    unrotated = for_x.rounding and for_x.rounding.has_kernels and not for_x.rht_dim
    amax = layer.amax if unrotated and not layer.per_token else None
    return (
        for_x._replace(per_token=layer.per_token, channels=channels, amax=amax),
        for_w._replace(factor=factor, channels=channels),
    )


class _Layer(NamedTuple):
    """What _QuantLinear computes with, besides input and weights.

    dtype:        in which unquantized operands are multiplied, and of the output
    grad_enabled: the caller's torch.is_grad_enabled(); needs_input_grad does not know of no_grad
    weight:       the weight operand of the output GEMM where it was made already (quantize_weights_once)
    grad_buffer:  float32 (N, K): what the gradient of all weights is added to instead of being returned to autograd
                  (accumulate_gradients)
    values:       the weights where they are not the function's arguments, which only get the gradients (sharding.py)
    amax:         max |input|, FP32 (), where the caller knows it
    squares:      the input is relu(x)^2 of what is given
    shard:        which part of the layer this is, where several processes compute it together (divided.py)
    """

    recipe: Recipe
    dtype: torch.dtype
    grad_enabled: bool
    per_token: bool
    statistics: InputStatistics
    weight: GemmOperand | None
    grad_buffer: torch.Tensor | None = None
    values: tuple[torch.Tensor, ...] | None = None
    amax: torch.Tensor | None = None
    squares: bool = False
    shard: Shard | None = None


class _QuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, layer: _Layer, x: torch.Tensor, *weights: torch.Tensor):
        """x (M, K), weights (N_i, K), N = sum of N_i -> (M, N) in layer.dtype."""
        recipe = layer.recipe
        needs_dgrad = ctx.needs_input_grad[1] and layer.grad_enabled
        needs_wgrad = any(ctx.needs_input_grad[2:]) and layer.grad_enabled
        square_seed = new_seed(x.device) if layer.squares else None
        shard = layer.shard
        seed = new_seed(x.device) if recipe.draws_in_forward and (needs_dgrad or needs_wgrad) else None
        weight = _stacked(layer.values or weights) if layer.weight is None or recipe.grad_input.b.raw else None
        for_x, for_w = _of_output(recipe, layer, seed, x.device)
        square = ()
        if layer.squares:
            xq, *square = quantize_relu_squared(x, for_x, square_seed)
        else:
            xq = quantize_operand(x, for_x, keep_codes=True)
        if shard is not None:
            xq = shard.gathered_codes(xq)
        wq = quantize_operand(weight, for_w, keep_codes=True) if layer.weight is None else layer.weight

        # The backward GEMMs take the values used here, or ("raw") codes made now of the unquantized tensor.
        backward_w, backward_x = wq if needs_dgrad else None, xq if needs_wgrad else None
        if needs_dgrad and recipe.grad_input.b.raw:
            _, for_w = _quantizations(recipe.grad_input, GRAD_INPUT, seed, seed, x.device, shard)
            backward_w = quantize_operand(weight, for_w, transpose=True, keep_codes=True)
        if needs_wgrad and recipe.grad_weight.b.raw:
            _, for_x = _quantizations(recipe.grad_weight, GRAD_WEIGHT, seed, seed, x.device, shard)
            backward_x = quantize_operand(x, for_x, transpose=True, keep_codes=True)
        _save(ctx, backward_w, backward_x, *square, seed)
        ctx.recipe, ctx.dtype, ctx.x_dtype, ctx.weight_dtype = recipe, layer.dtype, x.dtype, weights[0].dtype
        ctx.needs_wgrad, ctx.rows, ctx.shard = needs_wgrad, [w.shape[0] for w in weights], shard
        ctx.grad_buffer = layer.grad_buffer  # not saved: saved tensors must not change before the backward pass
        return gemm(xq, _output_needs(seed, wq), compute_dtype=layer.dtype, out_dtype=layer.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        recipe, dtype, shard = ctx.recipe, ctx.dtype, ctx.shard
        w, x, *square, forward_seed = _saved(ctx)
        seed = _backward_seed(grad_output) if recipe.draws_in_backward else None
        dgrad, wgrad = recipe.grad_input, recipe.grad_weight
        # A GEMM whose b was rotated in the forward pass goes on with that pass's signs.
        device = grad_output.device
        for_e, for_w = _quantizations(dgrad, GRAD_INPUT, seed, forward_seed if dgrad.b.raw else seed, device, shard)
        for_et, for_x = _quantizations(wgrad, GRAD_WEIGHT, seed, forward_seed if wgrad.b.raw else seed, device, shard)
        needs_dgrad = ctx.needs_input_grad[1]
        e, et = quantize_grad_output(grad_output, for_e if needs_dgrad else None, for_et if ctx.needs_wgrad else None)
        grad_x, grad_ws = None, [None] * len(ctx.rows)
        if needs_dgrad:
            wt = w if dgrad.b.raw else quantize_operand(w, for_w, transpose=True)
            grad_x = gemm(e, wt, compute_dtype=dtype, out_dtype=ctx.x_dtype)
            if square:
                grad_x = relu_squared_gradient(grad_x, *square)
            if shard is not None:
                grad_x = shard.scattered_gradient(grad_x)
        if ctx.needs_wgrad:
            xt = x if wgrad.b.raw else quantize_operand(x, for_x, transpose=True)
            if ctx.grad_buffer is None:
                grad_ws = x.grad_weight(et, xt, grad_output, dtype, ctx.weight_dtype).split(ctx.rows)
            else:
                x.add_grad_weight(et, xt, grad_output, dtype, ctx.grad_buffer)
        return None, grad_x, *grad_ws


# torch.compile decides anew what runs in which pass. A seed that neither the forward's outputs nor the backward's
# inputs seem to need may be drawn in both, that is, twice: the two operands of a GEMM would be rotated with different
# signs, and its result be noise. So under a compiler the output depends on the forward's seed, and the backward's seed
# on grad_output.


def _output_needs(seed: torch.Tensor | None, wq: GemmOperand) -> GemmOperand:
    return wq if seed is None or not torch.compiler.is_compiling() else wq.depending_on(seed)


def _backward_seed(grad_output: torch.Tensor) -> torch.Tensor:
    seed = new_seed(grad_output.device)
    return after(seed, grad_output) if torch.compiler.is_compiling() else seed


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _save(ctx, w: GemmOperand | None, x: GemmOperand | None, *more: torch.Tensor | None) -> None:
    parts = [() if operand is None else operand.tensors() for operand in (w, x)]
    ctx.kinds = [(type(operand), len(part)) for operand, part in zip((w, x), parts)]
    ctx.save_for_backward(*parts[0], *parts[1], *more)


def _saved(ctx) -> tuple:
    """w, x, and what more was saved."""
    tensors = iter(ctx.saved_tensors)  # asked for once: recomputed tensors can be had only once
    parts = [(kind, list(itertools.islice(tensors, count))) for kind, count in ctx.kinds]
    return *(kind.from_tensors(*part) if part else None for kind, part in parts), *tensors


class QuantLinear(torch.nn.Linear):
    """nn.Linear with the same parameters and state-dict keys, computed as `method` says.

    method: a name of METHODS or a Recipe. in_features and out_features must be multiples of 16 unless the method
    quantizes nothing; input (..., in_features) in FP32 or BF16, weights in FP32 or BF16, autocast on or off.
    Raises ValueError for an unknown method or dimensions that do not divide.
    """

    recipe: Recipe
    quantization = True  # False inside full_precision(model): computes like nn.Linear
    per_token = False  # True inside per_token_scale(model): each row of the input has a tensor_scale of its own
    per_token_in_eval = False  # the same wherever the layer is in eval mode and no gradient is wanted (convert)
    # Inside quantize_weights_once(model): the operand that the weight is in the forward GEMM, and the operand of this
    # weight with those of the layers that are computed with it by fused_linear below it.
    weight_operand: GemmOperand | None = None
    stacked_operand: GemmOperand | None = None
    # Inside accumulate_gradients(model): weight.grad, and that of this weight with those of the layers that are
    # computed with it by fused_linear, which are one tensor there.
    grad_buffer: torch.Tensor | None = None
    stacked_grad_buffer: torch.Tensor | None = None
    gathered: GemmOperand | None = None  # what FSDP gathers of the weight, into which buffers (sharding.py)
    outside: dict[str, object] = {}  # inside these contexts: what the attributes that they change are outside
    gram_matrix: torch.Tensor | None = None  # of the inputs (gram.py), None: not known yet
    statistics = InputStatistics()  # what the recipe takes from it
    shard: Shard | None = None  # which part of the layer this process has (divided.py); sizes are the whole's

    def __init__(self, in_features: int, out_features: int, bias: bool = False, method: str | Recipe = "clover", **kw):
        super().__init__(in_features, out_features, bias=bias, **kw)
        self.set_recipe(get_recipe(method))

    def set_recipe(self, recipe: Recipe) -> None:
        """Changes the recipe in place. Raises ValueError if the dimensions do not allow it."""
        reason = unsupported_reason(self, recipe)
        if reason:
            raise ValueError(f"QuantLinear: {reason}; use nn.Linear here, or skip this layer in convert")
        self.recipe = recipe
        if self.gram_matrix is not None:
            set_gram_matrix(self, self.gram_matrix)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as (out_features, in_features); where it is divided, what this process has."""
        return self.weight if self.shard is None else self.weight.to_local()

    def _apply(self, fn, recurse: bool = True) -> "QuantLinear":
        super()._apply(fn, recurse)
        if self.gram_matrix is not None and self.gram_matrix.device != self.weight.device:
            set_gram_matrix(self, self.gram_matrix)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args) -> None:
        old = state_dict.pop(prefix + OLD_NAME, None)
        if old is not None:
            set_gram_matrix(self, old)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def quantizes_input(self) -> bool:
        """Whether codes of the input are kept for the backward pass and not the input itself."""
        return self.quantization and self.recipe.output.a.rounding is not None

    def __getstate__(self) -> dict:
        """A copy or pickle made inside one of the contexts of convert.py is not inside it."""
        return vars(self) | self.outside | {"outside": {}}

    def forward(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features) -> (..., out_features). amax: max |x|, float32 (), where what made x has found it, which
        saves to read x once more for it."""
        return self._compute(x, (self,), amax)

    def _compute(
        self,
        x: torch.Tensor,
        layers: "tuple[QuantLinear, ...]",
        amax: torch.Tensor | None = None,
        squares: bool = False,
    ) -> torch.Tensor:
        """The outputs of layers like this one (itself the first), side by side."""
        device = x.device.type
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and left_out_of_graphs(device):
            from nanochat_fp4.nvfp4.uncompiled import compute

            return compute(self, x, layers)
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        grad_enabled = torch.is_grad_enabled()
        grad_buffer = self.grad_buffer if len(layers) == 1 else self.stacked_grad_buffer
        quantizes = self.quantization and self.recipe.quantizes
        accumulates = (
            grad_buffer is not None
            and grad_enabled
            and not self.recipe.quantizes
            and dtype in (torch.float32, torch.bfloat16)
        )
        gathered = self._gathered(layers)
        weights = [layer.matrix for layer in layers]
        per_token = self._per_token_now(grad_enabled)
        shard = self.shard
        if shard is not None:
            shard = shard.of_pass(x, self.recipe if quantizes and not per_token else UNQUANTIZED, weights)
            x, amax = shard.enter(x, amax)
        if not ((quantizes or accumulates or gathered) and x.numel()):
            if self.weight.is_meta and not x.is_meta:
                raise ValueError("QuantLinear: of this weight only the codes were kept (prepare); load the model anew")
            # Outside autocast too the weight follows the input, so that FP32 master weights serve BF16 activations.
            weight = _stacked([weight.to(dtype) for weight in weights])
            if shard is not None:
                return shard.leave(torch.nn.functional.linear(x, weight), self.bias)
            return torch.nn.functional.linear(x, weight, self.bias if self.bias is None else self.bias.to(dtype))
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"QuantLinear computes in float32 or bfloat16 and got {str(dtype).removeprefix('torch.')}; use "
                "model.bfloat16(), model.float(), or autocast to bfloat16"
            )
        # Autocast stays on: where a product must be FP32 (rotate, gemm on a CPU), it is off around it. A context around
        # the whole would be traced by torch.compile into the backward, which CUDA's autocast does not survive.
        rows = x.reshape(-1, x.shape[-1])
        operand = self.weight_operand if len(layers) == 1 else self.stacked_operand
        recipe, values = self.recipe if quantizes else UNQUANTIZED, None
        if not quantizes:
            rows = rows.to(dtype)  # which is what is kept of it
        if gathered is not None:
            whole = gathered if len(layers) > 1 else self.gathered
            if not isinstance(gathered.parts[0], Codes):
                operand, values = (operand, gathered.values) if quantizes else (whole, None)
            elif quantizes:
                operand = whole if operand is None else operand
            else:
                raise ValueError("QuantLinear: FSDP gathered the codes alone; enter full_precision around unsharded")
        layer = _Layer(
            recipe, dtype, grad_enabled, per_token, self.statistics, operand, grad_buffer, values, amax, squares, shard
        )
        y = _QuantLinear.apply(layer, rows, *weights)
        if shard is not None:
            return shard.leave(y.view(*shard.leading(x.shape), y.shape[-1]), self.bias)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(dtype)

    def _per_token_now(self, grad_enabled: bool) -> bool:
        return self.per_token or (self.per_token_in_eval and not (self.training or grad_enabled))

    def _gathered(self, layers: "tuple[QuantLinear, ...]") -> Stacked | None:
        """The weights of these layers where FSDP has gathered them and the Parameters are not to be read."""
        if self.gathered is None or self.weight.stride(0):
            return None
        return Stacked(tuple(layer.gathered for layer in layers))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


class QuantConv1D(QuantLinear):
    """transformers' Conv1D, a linear layer with a weight (in_features, out_features), computed as QuantLinear does."""

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight.T.contiguous()


def as_quantized(linear: torch.nn.Module) -> None:
    """Turns an nn.Linear or a Conv1D into the QuantLinear with its parameters, in place; it has no recipe yet."""
    if isinstance(linear, QuantLinear):
        return
    if isinstance(linear, torch.nn.Linear):
        linear.__class__ = QuantLinear
    else:
        linear.in_features, linear.out_features = linear.weight.shape
        linear.__class__ = QuantConv1D


def unsupported_reason(linear: torch.nn.Module, recipe: Recipe) -> str | None:
    """Why this layer cannot be computed with this recipe, or None."""
    if not recipe.quantizes:
        return None
    if not isinstance(linear, torch.nn.Linear):
        sizes = dict(zip(("in_features", "out_features"), linear.weight.shape))
    else:
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
    for name, size in sizes.items():
        if size % recipe.block:
            return f"{name} is {size}, expected a multiple of {recipe.block}"
    shard = getattr(linear, "shard", None)
    return None if shard is None else shard.problem(recipe, linear.weight.shape[shard.dim])


def can_be_fused(linears: Sequence[torch.nn.Module]) -> bool:
    """Whether fused_linear computes these layers as one: without bias, hooks, or a forward of their own, and alike."""
    first = linears[0]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return all(
        type(linear) is type(first)
        and type(linear) in (torch.nn.Linear, QuantLinear)
        and linear.bias is None
        and "forward" not in vars(linear)
        and not any(getattr(linear, name) for name in hooks)
        and [getattr(linear, name, None) for name in ("recipe", "quantization", "per_token", "shard")]
        == [getattr(first, name, None) for name in ("recipe", "quantization", "per_token", "shard")]
        for linear in linears
    )


def fused_linear(x: torch.Tensor, *linears: torch.nn.Linear, head_dim: int | None = None) -> tuple[torch.Tensor, ...]:
    """[linear(x) for each linear], computed as one layer; see the top of this file for what that changes.

    With head_dim the last dimension of each result is split into (heads, head_dim). That is done before the layers are
    told apart, so that in the backward pass torch.compile can write each one's gradient where it belongs.

    The results are views of one tensor. Layers that are not alike, have a bias, or have hooks or a replaced forward,
    which want to see each of them, are called one by one.
    """
    if not can_be_fused(linears):
        outputs = tuple(linear(x) for linear in linears)
        return outputs if head_dim is None else tuple(y.unflatten(-1, (-1, head_dim)) for y in outputs)
    if isinstance(linears[0], QuantLinear):
        y = linears[0]._compute(x, linears)
    else:
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else linears[0].weight.dtype
        y = torch.nn.functional.linear(x, _stacked([linear.weight.to(dtype) for linear in linears]))
    sizes = [linear.out_features for linear in linears]
    processes = sum(sizes) // y.shape[-1]  # that the layers are divided among
    sizes = [size // processes for size in sizes]
    if head_dim is None:
        return y.split(sizes, dim=-1)
    return y.unflatten(-1, (-1, head_dim)).split([size // head_dim for size in sizes], dim=-2)


def weight_quantization(layer: QuantLinear, device: torch.device) -> Quantization:
    """How the weight operand of the layer's output GEMM is made, where that is the same in each pass."""
    shard = layer.shard and layer.shard._replace(extent=layer.matrix.shape[layer.shard.dim])
    unused = _Layer(layer.recipe, torch.float32, False, False, layer.statistics, None, shard=shard)
    return _of_output(layer.recipe, unused, None, device)[1]


def relu_squared_linear(x: torch.Tensor, linear: QuantLinear) -> torch.Tensor:
    """linear(relu(x)^2) of a layer that quantizes its input: of relu(x) 8 bits are kept for the derivative
    (relu_squared.py). x (..., in_features) in FP32 or BF16.

    Where the kernels can, relu(x)^2 is quantized as it is made and never written; to the bit the same. A layer with
    hooks, which want to see it, is called with it.
    """
    per_token = linear._per_token_now(torch.is_grad_enabled())
    alone = can_be_fused([linear]) and not per_token and linear.shard is None
    if alone and x.numel() and takes_relu_squared(linear.recipe, x.device):
        return linear._compute(x, (linear,), squares=True)
    y, amax = ReluSquared.apply(x, linear.shard.rank if linear.shard else 0)
    return linear(y, amax)


def quantized_weights(groups: Sequence[Sequence[QuantLinear]]) -> list[GemmOperand | None]:
    """The weight operand of the output GEMM of each group of layers that are computed as one; None where it is not the
    same in each pass."""
    made: list[GemmOperand | None] = [None] * len(groups)
    weights = {}
    for i, layers in enumerate(groups):
        if not layers[0].recipe.fixed_weight:
            continue
        gathered = layers[0]._gathered(layers)
        if gathered is not None and isinstance(gathered.parts[0], Codes):
            made[i] = gathered.joined
            continue
        weight = _stacked([layer.matrix.detach() for layer in layers] if gathered is None else gathered.values)
        weights[i] = weight, weight_quantization(layers[0], weight.device)
    for i, operand in zip(weights, quantize_weights(list(weights.values()))):
        made[i] = operand
    return made
