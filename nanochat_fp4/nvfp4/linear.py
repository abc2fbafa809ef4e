"""QuantLinear: a linear layer whose three GEMMs take their operands from a Recipe, by one autograd function for all.

    output       Y  = Qx(X) . Qw(W)^T
    grad_input   dX = Qe(E) . Qwt(W^T)^T
    grad_weight  dW = Qet(E^T) . Qxt(X^T)^T

Shapes: M tokens (all leading dimensions of the input), K in_features, N out_features. operands.py has the kinds of
operand: how each is made, kept and multiplied.

The backward pass keeps the codes of input and weight, 4.5 bits an element (the paper, Section 5). A tensor that the
recipe's forward does not quantize is kept itself.

The backward GEMMs take the values that the forward used. An operand of two terms, X ~ X1 + X2, is requantized to one
term. With Y = X1 W1^T + X1 W2^T + X2 W1^T this gives dX = E (W1 + W2) and dW = E^T (X1 + X2), the gradients of this Y.
Rounding counts as the identity in a gradient: X1 = Q(X) and X2 = Q(X - X1) give dX1/dX = 1 and dX2/dX = 1 - 1 = 0.
dY/dX1 is all of W1 + W2.

contexts.quantize_weights_once makes the weights' forward codes once for several passes. The factor of error feedback
(feedback.py) is None until training has made it (training.update_gram_matrices).

Any number of tokens works. Tokens are the contraction dimension of wgrad, and out_features that of dgrad. Both are
padded with zeros to a multiple of the rotation's group (128), or of 16. Zeros add nothing to a product. A rotated group
that holds some is quantized like any other, so SR stays unbiased. MS-EDEN needs a rotation that mixes many values, and
is unbiased from about 24 values a group on. A group of 2 to 16 tokens gets a gradient whose mean is off by up to 0.5%
of its square, a quarter of the noise of a single step. One token is exact.

Each layer and pass draws one 64-bit seed from the default generator of the layer's device. Saving and restoring torch's
generators therefore resumes rotations and roundings to the bit. Passes without gradients draw nothing. All state is in
the layers, so threads may call them side by side.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from nanochat_fp4.nvfp4.dispatch import left_out_of_graphs, native_gemm
from nanochat_fp4.nvfp4.feedback import set_gram_matrix
from nanochat_fp4.nvfp4.gemm import GemmOperand, after, gemm, gemm_add
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.operands import (
    Codes,
    Quantization,
    Stacked,
    quantize_grad_output,
    quantize_operand,
    quantize_relu_squared,
)
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.recipes import Gemm, Recipe
from nanochat_fp4.nvfp4.relu_squared import once_differentiable, relu_squared_gradient

# One stream of random numbers for each operand, so that no two share noise: a of a GEMM has this one, b the next.
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = 0, 2, 4
COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
UNQUANTIZED = Recipe("bf16")


class Gemms(NamedTuple):
    """How a recipe's operands are made, in a layer that one process computes alone.

    tensor_parallel.DividedGemms has the same methods, for a layer that several processes compute together.
    """

    recipe: Recipe

    def operands(
        self, spec: Gemm, stream: int, seed: torch.Tensor | None, rht_seed: torch.Tensor | None, device: torch.device
    ) -> tuple[Quantization, Quantization]:
        """The operands a and b of a GEMM: the same signs, different noise; without a seed, those of 0."""
        if spec.fixed_signs or (seed is None and spec.random):
            rht_seed = torch.zeros((), dtype=torch.int64, device=device)
            seed = rht_seed if seed is None else seed
        tiles = native_gemm(device.type) is not None
        a, b = (
            Quantization(
                o.rounding,
                seed,
                stream + i,
                spec.rht_dim,
                rht_seed,
                stream,
                o.terms,
                tiles=tiles,
                make=o.make,
                rotations=spec.rotations,
                kept=o.kept,
            )  # fmt: skip
            for i, o in enumerate((spec.a, spec.b))
        )
        return a, b

    def input_of_all(self, x: GemmOperand) -> GemmOperand:
        """The input operand of all tokens, from that of this process's tokens."""
        return x

    def own_gradient(self, grad_x: torch.Tensor) -> torch.Tensor:
        """The gradient of this process's tokens, from that of all."""
        return grad_x

    gemm = staticmethod(gemm)


class Then(Protocol):
    """A function of a layer's output that the backward pass computes again: it keeps no tensor that depends on y alone.

    Under torch.compile the gradients given to `backward` must decide all that it computes again (`after`).
    """

    def forward(
        self, y: torch.Tensor, *more: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """y (M, N) -> (results, what is kept for the gradient)."""
        ...

    def backward(
        self, y: torch.Tensor, kept: Sequence[torch.Tensor], *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of y and of each of `more`."""
        ...


class _Pass(NamedTuple):
    """_QuantLinear's arguments besides input and weights.

    gemms:        the recipe's operands
    dtype:        in which unquantized operands are multiplied, and of the output
    grad_enabled: the caller's torch.is_grad_enabled(). needs_input_grad does not know of no_grad.
    per_token:    each row of the input has a tensor_scale of its own
    factor:       of the weight's error feedback, FP16 (K, K), or None
    weight:       the weight operand of the output GEMM where it was made already (quantize_weights_once)
    gradients:    float32 (N, K), to which the gradient of all weights is added (accumulate_gradients). Autograd then
                  gets none. Not saved by it: it takes no tensor that changes.
    values:       the weights where they are not the function's arguments, which only get the gradients (sharding.py)
    amax:         max |input|, FP32 (), where the caller knows it
    squares:      the input is relu(x)^2 of the x that is given, if not "". The gradient is that of x with "derivative",
                  from 8 bits of relu(x), and that of relu(x)^2 with "straight".
    then:         what follows the product. The product is then computed again, from the operands, in the backward pass.
    more:         the number of tensors that `then` takes besides the product
    """

    gemms: Gemms
    dtype: torch.dtype
    grad_enabled: bool
    per_token: bool
    factor: torch.Tensor | None
    weight: GemmOperand | None
    gradients: torch.Tensor | None
    values: tuple[torch.Tensor, ...] | None
    amax: torch.Tensor | None
    squares: str
    then: Then | None = None
    more: int = 0


class _State(NamedTuple):
    """What the backward pass of a layer knows besides tensors. kinds: of the kept operands, and each one's tensors."""

    this: _Pass
    kinds: list[tuple[type[GemmOperand] | None, int]]
    rows: list[int]
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    needs: tuple[bool, bool]


def _forward(this: _Pass, needs: tuple[bool, bool], x: torch.Tensor, *tensors: torch.Tensor):
    """x (M, K), weights (N_i, K), N = sum of N_i -> (M, N) in this.dtype, or the results of this.then; then what
    _backward takes. tensors: the weights, and what this.then takes besides. needs: gradients of x, of weights."""
    gemms, device, layers = this.gemms, x.device, len(tensors) - this.more
    weights, recipe, (needs_dgrad, needs_wgrad) = tensors[:layers], gemms.recipe, needs
    square_seed = new_seed(device) if this.squares else None
    seed = new_seed(device) if recipe.draws_in_forward and (needs_dgrad or needs_wgrad) else None
    weight = _stacked(this.values or weights) if this.weight is None or recipe.grad_input.b.raw else None
    for_x, for_w = gemms.operands(recipe.output, OUTPUT, seed, seed, device)
    knows_amax = for_x.rounding and for_x.rounding.takes_amax and not (for_x.rht_dim or this.per_token)
    for_x = for_x._replace(per_token=this.per_token, amax=this.amax if knows_amax else None)
    square = ()
    if this.squares:
        xq, *square = quantize_relu_squared(x, for_x, square_seed)
        square = square if this.squares == "derivative" else ()
    else:
        xq = quantize_operand(x, for_x, keep_codes=True)
    xq, wq = gemms.input_of_all(xq), this.weight
    if wq is None:
        wq = quantize_operand(weight, for_w._replace(factor=this.factor), keep_codes=True)

    # The backward GEMMs take the values used here, or ("raw") codes made now of the unquantized tensor.
    backward_w = wq.for_backward() if needs_dgrad else None
    backward_x = xq.for_backward() if needs_wgrad else None
    if needs_dgrad and recipe.grad_input.b.raw:
        _, for_w = gemms.operands(recipe.grad_input, GRAD_INPUT, seed, seed, device)
        backward_w = quantize_operand(weight, for_w, transpose=True, keep_codes=True)
    if needs_wgrad and recipe.grad_weight.b.raw:
        _, for_x = gemms.operands(recipe.grad_weight, GRAD_WEIGHT, seed, seed, device)
        backward_x = quantize_operand(x, for_x, transpose=True, keep_codes=True)
    again, kept = (), ()
    results = gemms.gemm(xq, _output_needs(seed, wq), compute_dtype=this.dtype, out_dtype=this.dtype)
    if this.then is not None:
        again, (results, kept) = (xq, wq), this.then.forward(results, *tensors[layers:])
    operands = backward_w, backward_x, *again
    parts = [() if operand is None else operand.tensors() for operand in operands]
    kinds = [(type(operand), len(part)) for operand, part in zip(operands, parts)]
    state = _State(this, kinds, [w.shape[0] for w in weights], x.dtype, weights[0].dtype, needs)
    return results, state, [*itertools.chain.from_iterable(parts), seed, *square, *kept]


def _backward(state: _State, tensors: Sequence[torch.Tensor | None], grad_output: torch.Tensor, *grads: torch.Tensor):
    """(gradient of x, those of the weights and of what this.then took besides, square of x).

    A square is kept and step of relu_squared, where the gradient of x is that of relu(x)^2."""
    this, gemms, device = state.this, state.this.gemms, grad_output.device
    dtype, dgrad, wgrad = this.dtype, gemms.recipe.grad_input, gemms.recipe.grad_weight
    (w, x, *again), (forward_seed, *kept) = _operands(state.kinds, tensors)
    grad_more = [None] * this.more
    if this.then is not None:
        a, b = (_again(operand, grad_output) for operand in again)
        y = gemms.gemm(a, b, compute_dtype=dtype, out_dtype=dtype)
        grad_output, *grad_more = this.then.backward(y, kept, grad_output, *grads)
        kept = ()
    seed = _backward_seed(grad_output) if gemms.recipe.draws_in_backward else None
    # A GEMM whose b was rotated in the forward pass goes on with that pass's signs.
    for_e, for_w = gemms.operands(dgrad, GRAD_INPUT, seed, forward_seed if dgrad.b.raw else seed, device)
    for_et, for_x = gemms.operands(wgrad, GRAD_WEIGHT, seed, forward_seed if wgrad.b.raw else seed, device)
    needs_dgrad, needs_wgrad = state.needs
    e, et = quantize_grad_output(grad_output, for_e if needs_dgrad else None, for_et if needs_wgrad else None)
    grad_x, grad_ws = None, [None] * len(state.rows)
    if needs_dgrad:
        wt = w if dgrad.b.raw else quantize_operand(w, for_w, transpose=True)
        grad_x = gemms.gemm(e, wt, compute_dtype=dtype, out_dtype=state.x_dtype)
    if needs_wgrad:
        xt = x if wgrad.b.raw else quantize_operand(x, for_x, transpose=True)
        if this.gradients is None:
            grad_ws = gemms.gemm(et, xt, compute_dtype=dtype, out_dtype=state.weight_dtype).split(state.rows)
        else:
            gemm_add(et, xt, this.gradients, compute_dtype=dtype)
    return grad_x, [*grad_ws, *grad_more], kept


class _QuantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, this: _Pass, x: torch.Tensor, *tensors: torch.Tensor):
        needs = [wanted and this.grad_enabled for wanted in ctx.needs_input_grad[1:]]
        results, ctx.state, saved = _forward(this, (needs[0], any(needs[1 : len(needs) - this.more])), x, *tensors)
        ctx.save_for_backward(*saved)
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: torch.Tensor):
        grad_x, more, square = _backward(ctx.state, ctx.saved_tensors, *grads)
        if grad_x is not None:
            grad_x = relu_squared_gradient(grad_x, *square) if square else grad_x
            grad_x = ctx.state.this.gemms.own_gradient(grad_x)
        return None, grad_x, *more


# torch.compile chooses anew which operation runs in which pass. A seed may be drawn in both passes, if neither the
# forward's outputs nor the backward's inputs seem to need the seed. The two operands of a GEMM would then be rotated
# with different signs, and the result would be noise. Under a compiler, therefore, the output depends on the forward's
# seed, and the backward's seed on grad_output.


def _output_needs(seed: torch.Tensor | None, wq: GemmOperand) -> GemmOperand:
    return wq if seed is None or not torch.compiler.is_compiling() else wq.depending_on(seed)


def _backward_seed(grad_output: torch.Tensor) -> torch.Tensor:
    seed = new_seed(grad_output.device)
    return after(seed, grad_output) if torch.compiler.is_compiling() else seed


def _again(operand: GemmOperand, grad_output: torch.Tensor) -> GemmOperand:
    return operand.depending_on(grad_output) if torch.compiler.is_compiling() else operand


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(weights)


def _operands(
    kinds: Sequence[tuple[type, int]], saved: Sequence[torch.Tensor | None]
) -> tuple[list[GemmOperand | None], list[torch.Tensor | None]]:
    """The operands, and what more was saved."""
    tensors = iter(saved)
    parts = [(kind, list(itertools.islice(tensors, count))) for kind, count in kinds]
    return [kind.from_tensors(*part) if part else None for kind, part in parts], list(tensors)


@dataclass
class LayerContext:
    """The settings of a layer by the contexts of contexts.py. Outside of all contexts: the defaults. Never changed,
    only replaced.

    full_precision: compute like nn.Linear
    per_token:      each row of the input has a tensor_scale of its own
    weights:        number of layers that fused_linear computes as one, this one first -> their weight operand in the
                    output GEMM
    gradients:      number of such layers -> float32 (N, K), to which the gradient of their weights is added
    entered:        each context that was entered and not left -> the fields above that it asks for
    """

    full_precision: bool = False
    per_token: bool = False
    weights: dict[int, GemmOperand] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    entered: dict[object, dict[str, Any]] = field(default_factory=dict)


_CONTEXT_LOCK = threading.Lock()  # threads enter and leave contexts of one model side by side


class QuantLinear(torch.nn.Linear):
    """nn.Linear with the same parameters and state-dict keys, computed as `method` says.

    method: a name of METHODS or a Recipe. in_features and out_features must be multiples of 16 unless the method
    quantizes nothing. Input (..., in_features) and weights are in FP32 or BF16, with autocast on or off. The output
    (..., out_features) has the input's dtype, or autocast's. device and dtype are nn.Linear's.
    Raises ValueError for an unknown method or dimensions that do not divide.

    >>> layer = nf.QuantLinear(64, 32, method="nvidia")
    >>> x = torch.randn(2, 3, 64, requires_grad=True)
    >>> layer(x).square().mean().backward()
    >>> x.grad.shape, layer.weight.grad.shape
    (torch.Size([2, 3, 64]), torch.Size([32, 64]))
    """

    recipe: Recipe
    kind: str | None = None  # of places.KINDS, where convert can tell it
    per_token_in_eval = False  # in eval mode without gradients each row has a tensor_scale of its own (convert)
    context = LayerContext()
    gathered: GemmOperand | None = None  # the weight in FSDP's buffers (sharding.py)
    gram_matrix: torch.Tensor | None = None  # of the inputs (feedback.py), where it is known
    feedback_factor: torch.Tensor | None = None  # feedback.factor_for of the Gram matrix
    divided = False  # several processes have a part of the layer each (tensor_parallel.py)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        method: str | Recipe = "clover",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.set_recipe(get_recipe(method))

    def set_recipe(self, recipe: Recipe) -> None:
        """Changes the recipe in place to the one that `recipe` has for this layer's kind. Inside quantize_weights_once
        the layer then makes its weight's codes in each pass. Raises ValueError if the dimensions do not allow it."""
        recipe = recipe.of(self.kind)
        reason = unsupported_reason(self, recipe)
        if reason:
            raise ValueError(f"QuantLinear: {reason}; use nn.Linear here, or skip this layer in convert")
        if self.context.weights and self.recipe != recipe:
            self.change_context(lambda entered: {c: asked | {"weights": {}} for c, asked in entered.items()})
        self.recipe = recipe
        if self.gram_matrix is not None:
            set_gram_matrix(self, self.gram_matrix)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight that this process has, as (out_features, in_features)."""
        return self.weight

    @property
    def by_rows(self) -> bool:
        """Whether the weight's rows are output features, and nobody's subclass changes what is computed."""
        return type(self) is QuantLinear

    @property
    def rank(self) -> int:
        """This process's number among those that compute this layer together."""
        return 0

    def division_problem(self, recipe: Recipe) -> str | None:
        """Why the processes that compute this layer together cannot have this recipe, or None."""
        return None

    def weight_quantization(self, device: torch.device) -> Quantization:
        """How the weight operand of the output GEMM is made, where that is the same in each pass."""
        _, how = self._gemms().operands(self.recipe.output, OUTPUT, None, None, device)
        return how._replace(factor=self.feedback_factor)

    def _gemms(self) -> Gemms:
        return Gemms(self.recipe)

    def _apply(self, fn, recurse: bool = True) -> "QuantLinear":
        super()._apply(fn, recurse)
        if self.gram_matrix is not None and self.gram_matrix.device != self.weight.device:
            set_gram_matrix(self, self.gram_matrix)
        return self

    @property
    def quantizes(self) -> bool:
        """Whether any operand of any GEMM is quantized at the moment."""
        return self.recipe.quantizes and not self.context.full_precision

    @property
    def quantizes_input(self) -> bool:
        """Whether codes of the input are kept for the backward pass and not the input itself."""
        return self.quantizes and self.recipe.output.a.rounding is not None

    def made_weight(self, layers: int) -> GemmOperand | None:
        """The weight operand of the output GEMM where it was made before: of so many layers that fused_linear computes
        as one, this one first."""
        return self.context.weights.get(layers)

    def change_context(self, change: Callable[[dict], dict]) -> None:
        """change: of LayerContext.entered, to another dict."""
        with _CONTEXT_LOCK:
            entered = change(self.context.entered)
            asked = {name: value for fields in entered.values() for name, value in fields.items()}
            if entered:
                vars(self)["context"] = LayerContext(**asked, entered=entered)
            else:
                vars(self).pop("context", None)

    def __getstate__(self) -> dict:
        """A copy or pickle that is made inside a context is outside of it."""
        return {name: value for name, value in vars(self).items() if name != "context"}

    def forward(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features) -> (..., out_features). amax: max |x|, float32 (), where the maker of x has found it.
        x need then not be read once more."""
        return self._compute(x, (self,), amax)

    def _compute(
        self,
        x: torch.Tensor,
        layers: "tuple[QuantLinear, ...]",
        amax: torch.Tensor | None = None,
        squares: str = "",
    ) -> torch.Tensor:
        """The outputs of layers like this one (itself the first), side by side."""
        device = x.device.type
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and left_out_of_graphs(device):
            # A C++ compiler takes minutes for the many small operations of two layers (NVFP4_COMPILE=1 waits for it).
            return torch.compiler.disable(QuantLinear._compute)(self, x, layers)
        return self._output(x, layers, amax, squares)

    def _output(
        self, x: torch.Tensor, layers: "tuple[QuantLinear, ...]", amax: torch.Tensor | None, squares: str
    ) -> torch.Tensor:
        dtype = _compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        if not x.numel() or self._is_plain(layers, dtype):
            # Outside autocast too the weight follows the input, so that FP32 master weights serve BF16 activations.
            return torch.nn.functional.linear(x, _stacked([layer.matrix.to(dtype) for layer in layers]), bias)
        y = self._product(x, layers, amax=amax, squares=squares)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    def _recipe_now(self) -> Recipe:
        return self.recipe if self.quantizes else UNQUANTIZED

    def _gemms_now(self) -> Gemms:
        return Gemms(self._recipe_now())

    def _is_plain(self, layers: "tuple[QuantLinear, ...]", dtype: torch.dtype) -> bool:
        """Whether nn.Linear computes this pass: nothing is quantized, added to gradients, or gathered by FSDP."""
        accumulates = (
            len(layers) in self.context.gradients
            and torch.is_grad_enabled()
            and not self.recipe.quantizes
            and dtype in COMPUTE_DTYPES
        )
        return not (self.quantizes or accumulates or self._gathered(layers) is not None)

    def _product(
        self,
        x: torch.Tensor,
        layers: "tuple[QuantLinear, ...]",
        then: Then | None = None,
        more: Sequence[torch.Tensor] = (),
        **known: Any,
    ) -> Any:
        """x (..., K) -> (M, N), without bias; or the results of then(it, *more). known: for _pass."""
        this, rows = self._pass(x, layers, then=then, more=len(more), **known)
        return _QuantLinear.apply(this, rows, *[layer.matrix for layer in layers], *more)

    def _pass(
        self,
        x: torch.Tensor,
        layers: "tuple[QuantLinear, ...]",
        amax: torch.Tensor | None = None,
        squares: str = "",
        then: Then | None = None,
        more: int = 0,
        gemms: Gemms | None = None,
    ) -> tuple[_Pass, torch.Tensor]:
        """_QuantLinear's settings, and x (M, K)."""
        gemms, dtype = gemms or self._gemms_now(), _compute_dtype(x)
        if dtype not in COMPUTE_DTYPES:
            raise ValueError(
                f"QuantLinear computes in float32 or bfloat16 and got {str(dtype).removeprefix('torch.')}; use "
                "model.bfloat16(), model.float(), or autocast to bfloat16"
            )
        # Autocast stays on: where a product must be FP32 (rotate, gemm on a CPU), it is off around it. A context around
        # the whole would be traced by torch.compile into the backward, which CUDA's autocast does not survive.
        rows, quantizes = x.reshape(-1, x.shape[-1]), gemms.recipe.quantizes
        operand, values = self._weight_now(layers, quantizes)
        grad_enabled, gradients = torch.is_grad_enabled(), self.context.gradients.get(len(layers))
        per_token, factor = self._per_token_now(grad_enabled), self.feedback_factor
        settings = dtype, grad_enabled, per_token, factor, operand, gradients, values, amax, squares, then, more
        return _Pass(gemms, *settings), (rows if quantizes else rows.to(dtype))  # kept, where it is not quantized

    def _weight_now(
        self, layers: "tuple[QuantLinear, ...]", quantizes: bool
    ) -> tuple[GemmOperand | None, tuple[torch.Tensor, ...] | None]:
        """_Pass.weight and _Pass.values."""
        operand, gathered = self.made_weight(len(layers)), self._gathered(layers)
        if gathered is None:
            return operand, None
        whole = gathered if len(layers) > 1 else self.gathered
        if not isinstance(gathered.parts[0], Codes):
            return (operand, gathered.values) if quantizes else (whole, None)
        if not quantizes:
            raise ValueError("QuantLinear: FSDP gathered the codes alone; enter full_precision around unsharded")
        return (whole if operand is None else operand), None

    def _per_token_now(self, grad_enabled: bool) -> bool:
        return self.context.per_token or (self.per_token_in_eval and not (self.training or grad_enabled))

    def _gathered(self, layers: "tuple[QuantLinear, ...]") -> Stacked | None:
        """The weights of these layers where FSDP has gathered them and the Parameters are not to be read."""
        if self.gathered is None or self.weight.stride(0):
            return None
        return Stacked.of(tuple(layer.gathered for layer in layers))

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
    return linear.division_problem(recipe) if isinstance(linear, QuantLinear) else None
