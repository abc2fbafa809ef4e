"""QuantLinear: a linear layer whose three GEMMs take their operands as a Recipe says; one autograd function for all.

    output       Y  = Qx(X) . Qw(W)^T
    grad_input   dX = Qe(E) . Qwt(W^T)^T
    grad_weight  dW = Qet(E^T) . Qxt(X^T)^T

Shapes: M tokens (all leading dimensions of the input), K in_features, N out_features.

Kept for the backward pass: the codes of input and weight, 4.5 bits an element (the paper, Section 5); the unquantized
tensors only where the recipe's forward does not quantize them.

Layers that read the same tensor (q, k, v) share its codes, in one of two ways:
* fused_linear computes them as one layer whose weight is their weights, one below the other (the paper, Appendix D.2):
  one quantized input, one weight with one tensor_scale, one grad_output. To the bit a QuantLinear with that weight. It
  differs from the layers one by one in the weights' and grad_outputs' tensor scale, and in drawing once instead of
  three times.
* Called one by one they take the codes that the one before them made, to the bit what each would have made, if it is
  the same tensor, unchanged. (Under torch.compile the compiler finds that the operations are the same.)

Where a recipe gives the forward's operands two terms, X ~ X1 + X2 with X1 = Q(X) and X2 = Q(X - X1), and W alike, then
Y = X1 W1^T + X1 W2^T + X2 W1^T, and the backward GEMMs take the sums: dX = E (W1 + W2), dW = E^T (X1 + X2), requantized
to one term. That is the gradient of this very Y. Rounding counts as the identity in a gradient, so dX1/dX = 1 and
dX2/dX = 1 - 1 = 0; and dY/dX1 is all of W1 + W2. Kept then: the codes of both terms, 9 bits an element.

Where it has outliers, the in_features with the largest second moments have MXFP8 values in both operands of the output
GEMM, which the others are rounded without. As they are the same in both, that is one product of both formats. The
backward GEMMs take these values; the outliers' columns of dW are a product of MXFP8 operands.

The weights' forward codes can be made once for several passes: convert.quantize_weights_once. Where a recipe rounds
them with error feedback (feedback.py), or has outliers, they also depend on second_moment, a buffer of the layer, or of
the first of the layers that are computed as one. Training sets it (convert.update_second_moments), and it is in the
state dict from then on; before that the weight is rounded without feedback, and there are no outliers.

Any number of tokens works. In wgrad the tokens are the contraction dimension, and in dgrad the out_features: where they
are not a multiple of the rotation's group (128), or of 16, they are padded with zeros. Zeros add nothing to a product,
and a rotated group that holds some is quantized like any other, so SR stays unbiased. So does MS-EDEN from about 24
values a group on: it needs a rotation that mixes many values. A group of 2 to 16 tokens (say, the last one of 133) gets
a gradient whose mean is off by up to 0.5% of its square, a quarter of the noise of a single step; one token is exact.

Randomness: one 64-bit seed per layer and pass, drawn from the default generator of the layer's device, so that saving
and restoring torch's generators resumes rotations and roundings to the bit. Passes without gradients draw nothing.
"""

import weakref
from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from nanochat_fp4.nvfp4.backends import new_seed, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.feedback import feedback_factor, round_with_feedback
from nanochat_fp4.nvfp4.format import NVFP4Tensor, TwoTerms, terms
from nanochat_fp4.nvfp4.gemm import Value, gemm
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Gemm, Recipe

# One stream of random numbers for each operand, so that no two share noise: a of a GEMM has this one, b the next.
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = 0, 2, 4

OUTLIERS = "mxfp8"  # the rounding of Recipe.outliers


def _operands(
    spec: Gemm, stream: int, seed: torch.Tensor | None, rht_seed: torch.Tensor | None, device: torch.device
) -> tuple[dict, dict]:
    """Arguments of quantize_operand for the operands a and b of a GEMM: the same signs, different noise."""
    if spec.fixed_signs:
        rht_seed = torch.zeros((), dtype=torch.int64, device=device)
    shared = {"seed": seed, "rht_dim": spec.rht_dim, "rht_seed": rht_seed, "rht_stream": stream}
    return (
        {"rounding": spec.a.rounding, "terms": spec.a.terms, "outer": spec.a.outer, "stream": stream, **shared},
        {"rounding": spec.b.rounding, "terms": spec.b.terms, "outer": spec.b.outer, "stream": stream + 1, **shared},
    )


def _forward_operand(
    value: torch.Tensor, arguments: dict, outliers: torch.Tensor | None, per_token: bool = False
) -> Value:
    """value (R, K) as an operand of the output GEMM, these columns of it in MXFP8."""
    if outliers is None:
        return quantize_operand(value, keep_codes=True, per_token=per_token, **arguments)
    others = quantize_operand(value.index_fill(1, outliers, 0.0), **arguments)
    return others.index_copy(1, outliers, quantize_operand(value.index_select(1, outliers), OUTLIERS).to(others.dtype))


@torch.library.custom_op("nanochat_fp4::after", mutates_args=())
def _after(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A copy of value that a compiler must take for a function of both."""
    return value.clone()


@_after.register_fake
def _(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


@torch.library.custom_op("nanochat_fp4::with_feedback", mutates_args=())
def _with_feedback(
    weight: torch.Tensor, factor: torch.Tensor, rounding: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """round_with_feedback of one weight: codes, scales, tensor_scale. A compiler is not to look into its long loop."""
    t = round_with_feedback(weight.unsqueeze(0), factor.unsqueeze(0), rounding)[0]
    return t.codes, t.scales, t.tensor_scale


@_with_feedback.register_fake
def _(weight: torch.Tensor, factor: torch.Tensor, rounding: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    return (
        weight.new_empty(rows, columns // 2, dtype=torch.uint8),
        weight.new_empty(rows, columns // 16, dtype=torch.float8_e4m3fn),
        weight.new_empty((), dtype=torch.float32),
    )


# torch.compile decides anew what runs in which pass. A seed that neither the forward's outputs nor the backward's
# inputs seem to need may be drawn in both, that is, twice: the two operands of a GEMM would be rotated with different
# signs, and its result be noise. So under a compiler the output depends on the forward's seed, and the backward's seed
# on grad_output.


def _output_needs(seed: torch.Tensor | None, wq: Value) -> Value:
    if seed is None or not torch.compiler.is_compiling():
        return wq
    if isinstance(wq, TwoTerms):
        return TwoTerms(_output_needs(seed, wq.first), wq.rest)
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
        recipe: Recipe,
        dtype: torch.dtype,
        per_token: bool,
        grad_enabled: bool,
        xq: Value | None,
        wq: Value | None,
        factor: torch.Tensor | None,
        outliers: torch.Tensor | None,
        *weights: torch.Tensor,
    ):
        """x (M, K), weights (N_i, K), N = sum of N_i -> (M, N) in dtype, in which unquantized operands are multiplied.

        grad_enabled: the caller's torch.is_grad_enabled(); needs_input_grad does not know of no_grad.
        xq, wq: the operands of the output GEMM where they are there already, else None.
        factor: of feedback.feedback_factor, where the weight is rounded with feedback, else None.
        outliers: QuantLinear.outliers.
        """
        needs_dgrad = ctx.needs_input_grad[0] and grad_enabled
        needs_wgrad = any(ctx.needs_input_grad[9:]) and grad_enabled
        seed = new_seed(x.device) if recipe.draws_in_forward and (needs_dgrad or needs_wgrad) else None
        weight = _stacked(weights) if wq is None or recipe.grad_input.b.raw else None
        for_x, for_w = _operands(recipe.output, OUTPUT, seed, seed, x.device)
        if xq is None:
            xq = _forward_operand(x, for_x, outliers, per_token)
        if wq is None:
            if factor is None:
                wq = _forward_operand(weight, for_w, outliers)
            else:
                wq = NVFP4Tensor(*_with_feedback(weight, factor, for_w["rounding"]))

        # The backward GEMMs take the values used here, or ("raw") codes made now of the unquantized tensor.
        backward_w, backward_x = wq, xq
        if needs_dgrad and recipe.grad_input.b.raw:
            _, for_w = _operands(recipe.grad_input, GRAD_INPUT, seed, seed, x.device)
            backward_w = quantize_operand(weight, transpose=True, keep_codes=True, **for_w)
        if needs_wgrad and recipe.grad_weight.b.raw:
            _, for_x = _operands(recipe.grad_weight, GRAD_WEIGHT, seed, seed, x.device)
            backward_x = quantize_operand(x, transpose=True, keep_codes=True, **for_x)
        _save(ctx, backward_w if needs_dgrad else None, backward_x if needs_wgrad else None, seed, outliers)
        ctx.recipe, ctx.dtype, ctx.x_dtype, ctx.weight_dtype = recipe, dtype, x.dtype, weights[0].dtype
        ctx.needs_wgrad, ctx.rows = needs_wgrad, [w.shape[0] for w in weights]
        return gemm(xq, _output_needs(seed, wq), compute_dtype=dtype, out_dtype=dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        recipe, dtype = ctx.recipe, ctx.dtype
        w, x, forward_seed, outliers = _saved(ctx)
        seed = _backward_seed(grad_output) if recipe.draws_in_backward else None
        dgrad, wgrad = recipe.grad_input, recipe.grad_weight
        # A GEMM whose b was rotated in the forward pass goes on with that pass's signs.
        device = grad_output.device
        e_dgrad, for_w = _operands(dgrad, GRAD_INPUT, seed, forward_seed if dgrad.b.raw else seed, device)
        e_wgrad, for_x = _operands(wgrad, GRAD_WEIGHT, seed, forward_seed if wgrad.b.raw else seed, device)
        e, et = quantize_grad_output(
            grad_output, e_dgrad if ctx.needs_input_grad[0] else None, e_wgrad if ctx.needs_wgrad else None
        )
        grad_x, grad_ws = None, [None] * len(ctx.rows)
        if ctx.needs_input_grad[0]:
            wt = w if dgrad.b.raw else quantize_operand(w, transpose=True, **for_w)
            grad_x = gemm(e, wt, compute_dtype=dtype, out_dtype=ctx.x_dtype)
        if ctx.needs_wgrad:
            xt = x if wgrad.b.raw else quantize_operand(x, transpose=True, **for_x)
            grad_w = gemm(et, xt, compute_dtype=dtype, out_dtype=ctx.weight_dtype)
            if outliers is not None:
                pair = (grad_output, x.index_select(1, outliers))
                et, xt = (quantize_operand(v, OUTLIERS, transpose=True) for v in pair)
                columns = gemm(et, xt, compute_dtype=dtype, out_dtype=ctx.weight_dtype)
                grad_w = grad_w.index_copy(1, outliers, columns)
            grad_ws = grad_w.split(ctx.rows)
        return grad_x, None, None, None, None, None, None, None, None, *grad_ws


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _save(ctx, *values: Value | None) -> None:
    """Saves tensors as they are and NVFP4 tensors as codes, scales and tensor_scale, of each term."""
    tensors: list[torch.Tensor | None] = []
    for value in values:
        for term in (*terms(value), None)[:2]:
            quantized = isinstance(term, NVFP4Tensor)
            tensors += [term.codes, term.scales, term.tensor_scale] if quantized else [term, None, None]
    ctx.save_for_backward(*tensors)


def _saved(ctx) -> list[Value | None]:
    tensors = ctx.saved_tensors
    values = []
    for i in range(0, len(tensors), 6):
        triples = tensors[i : i + 3], tensors[i + 3 : i + 6]
        first, rest = (t if scales is None else NVFP4Tensor(t, scales, ts) for t, scales, ts in triples)
        values.append(first if rest is None else TwoTerms(first, rest))
    return values


# What a layer called outside of torch.compile quantized last: (weak reference to the input, its version, rounding,
# per_token, operand, the layers that took it). It lives as long as the input does.
_last_input: tuple | None = None


def _forget(reference: weakref.ref) -> None:
    global _last_input
    if _last_input is not None and _last_input[0] is reference:
        _last_input = None


@torch.no_grad()
def _quantized_input(layer: "QuantLinear", x: torch.Tensor, rows: torch.Tensor) -> Value | None:
    """The forward operand of x, the one that the layer before this one made if it was of the same x; None where that
    is left to the autograd function. A layer that asks twice is in a second pass, and is measured as such."""
    global _last_input
    gemm = layer.recipe.output
    if torch.compiler.is_compiling() or gemm.a.rounding is None or gemm.random or x.is_inference():
        return None
    if layer.outliers is not None:  # each layer has its own
        return None
    key = (x._version, gemm.a, layer.per_token)
    if _last_input is None or _last_input[0]() is not x or _last_input[1] != key or id(layer) in _last_input[3]:
        for_x, _ = _operands(gemm, OUTPUT, None, None, x.device)
        operand = quantize_operand(rows, keep_codes=True, per_token=layer.per_token, **for_x)
        _last_input = (weakref.ref(x, _forget), key, operand, set())
    _last_input[3].add(id(layer))
    return _last_input[2]


class QuantLinear(torch.nn.Linear):
    """nn.Linear with the same parameters and state-dict keys, computed as `method` says.

    method: a name of METHODS or a Recipe. in_features and out_features must be multiples of 16 unless the method
    quantizes nothing; input (..., in_features) in FP32 or BF16, weights in FP32 or BF16, autocast on or off.
    Raises ValueError for an unknown method or dimensions that do not divide.
    """

    recipe: Recipe
    quantization = True  # False inside full_precision(model): computes like nn.Linear
    per_token = False  # True inside per_token_scale(model): each row of the input has a tensor_scale of its own
    # Inside quantize_weights_once(model): the operand that the weight is in the forward GEMM, and the operand of this
    # weight with those of the layers that are computed with it by fused_linear below it.
    weight_operand: NVFP4Tensor | TwoTerms | None = None
    stacked_operand: NVFP4Tensor | TwoTerms | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = False, method: str | Recipe = "clover", **kw):
        super().__init__(in_features, out_features, bias=bias, **kw)
        self.set_recipe(get_recipe(method))

    def set_recipe(self, recipe: Recipe) -> None:
        """Changes the recipe in place. Raises ValueError if the dimensions do not allow it."""
        reason = unsupported_reason(self, recipe)
        if reason:
            raise ValueError(f"QuantLinear: {reason}; use nn.Linear here, or skip this layer in convert")
        self.recipe = recipe
        if "second_moment" in self._buffers:
            self.set_second_moment(self.second_moment)

    def set_second_moment(self, second_moment: torch.Tensor) -> None:
        """E[x x^T] of the inputs, (in_features, in_features) float32: what feedback.py rounds the weight by, and what
        the outliers are chosen by."""
        self.register_buffer("second_moment", second_moment)
        if self.recipe.output.b.feedback:
            self.register_buffer("_factor", feedback_factor(second_moment), persistent=False)
        if self.recipe.outliers:
            largest = second_moment.diagonal().topk(self.recipe.outlier_channels(self.in_features)).indices
            self.register_buffer("_outliers", largest.sort().values, persistent=False)

    @property
    def feedback_factor(self) -> torch.Tensor | None:
        """What the weight is rounded with, or None: the recipe has no feedback, or the inputs are not known yet."""
        return getattr(self, "_factor", None) if self.recipe.output.b.feedback else None

    @property
    def outliers(self) -> torch.Tensor | None:
        """The in_features computed in MXFP8 (Recipe.outliers), int64, rising; None: none, or not known yet."""
        return getattr(self, "_outliers", None) if self.recipe.outliers else None

    @property
    def quantizes_input(self) -> bool:
        """Whether codes of the input are kept for the backward pass and not the input itself."""
        return self.quantization and self.recipe.output.a.rounding is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._compute(x, (self,))

    def _compute(self, x: torch.Tensor, layers: "tuple[QuantLinear, ...]") -> torch.Tensor:
        """The outputs of layers like this one (itself the first), side by side."""
        device = x.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
        if not (self.quantization and self.recipe.quantizes and x.numel()):
            # Outside autocast too the weight follows the input, so that FP32 master weights serve BF16 activations.
            weight = _stacked([layer.weight.to(dtype) for layer in layers])
            return torch.nn.functional.linear(x, weight, self.bias if self.bias is None else self.bias.to(dtype))
        # Autocast stays on: where a product must be FP32 (rotate, gemm on a CPU), it is off around it. A context around
        # the whole would be traced by torch.compile into the backward, which CUDA's autocast does not survive.
        rows = x.reshape(-1, self.in_features)
        weights = [layer.weight for layer in layers]
        xq = _quantized_input(self, x, rows)
        wq = self.weight_operand if len(layers) == 1 else self.stacked_operand
        factor = self.feedback_factor if wq is None else None
        grad_enabled = torch.is_grad_enabled()
        y = _QuantLinear.apply(
            rows, self.recipe, dtype, self.per_token, grad_enabled, xq, wq, factor, self.outliers, *weights
        )
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"


def unsupported_reason(linear: torch.nn.Linear, recipe: Recipe) -> str | None:
    """Why this layer cannot be computed with this recipe, or None."""
    if not recipe.quantizes:
        return None
    for name, size in (("in_features", linear.in_features), ("out_features", linear.out_features)):
        if size % recipe.block:
            return f"{name} is {size}, expected a multiple of {recipe.block}"
    return None


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
        and [getattr(linear, name, None) for name in ("recipe", "quantization", "per_token")]
        == [getattr(first, name, None) for name in ("recipe", "quantization", "per_token")]
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
    if head_dim is None:
        return y.split(sizes, dim=-1)
    return y.unflatten(-1, (-1, head_dim)).split([size // head_dim for size in sizes], dim=-2)


def quantized_weights(groups: Sequence[Sequence[QuantLinear]]) -> list[NVFP4Tensor | TwoTerms | None]:
    """The weight operand of the output GEMM of each group of layers that are computed as one; None where it is not the
    same in each pass. Those with feedback are rounded together where shape and rounding are alike."""
    operands: list[NVFP4Tensor | TwoTerms | None] = [None] * len(groups)
    alike: dict[tuple, dict[int, torch.Tensor]] = {}
    for i, layers in enumerate(groups):
        recipe = layers[0].recipe
        if not recipe.fixed_weight:
            continue
        weight = _stacked([layer.weight.detach() for layer in layers])
        if layers[0].feedback_factor is not None:
            alike.setdefault((weight.shape, weight.dtype, recipe.output.b.rounding), {})[i] = weight
            continue
        _, for_w = _operands(recipe.output, OUTPUT, None, None, weight.device)
        with torch.no_grad():
            operands[i] = _forward_operand(weight, for_w, layers[0].outliers)
        for term in terms(operands[i]):
            term.decoded = None  # four times the memory of the codes
    for (_, _, rounding), weights in alike.items():
        factors = torch.stack([groups[i][0].feedback_factor for i in weights])
        rounded = round_with_feedback(torch.stack(list(weights.values())), factors, rounding)
        for i, operand in zip(weights, rounded):
            operands[i] = operand
    return operands
