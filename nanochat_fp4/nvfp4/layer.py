"""QuantLinear: a linear layer whose three GEMMs take their operands from a Recipe.

    output       Y  = Qx(X) . Qw(W)^T          contracted over in_features      _Linear.forward
    grad_input   dX = Qe(E) . Qwt(W^T)^T       contracted over out_features     _Linear.backward
    grad_weight  dW = Qet(E^T) . Qxt(X^T)^T    contracted over tokens           _Linear.backward

These are the products of the paper's Section 6. M is the number of tokens (all leading dimensions of the input), K is
in_features, and N is out_features. gemm.py makes the operands and multiplies them.

The backward pass keeps the codes of input and weight, 4.5 bits an element (the paper, Section 5). A tensor that the
forward does not quantize is kept as it is. The backward GEMMs use the values that the forward used.

Each pass of a layer draws one 64-bit seed from torch's default generator of the layer's device. A run that saves and
restores torch's generators therefore resumes with the same rotations and roundings, to the bit. Passes without
gradients draw nothing. All state is in the layers, so threads may call different layers at the same time.

Each other feature reaches a layer in one place: contexts.py through `contexts`, sharding.py through `gathered_weight`,
experts.py through `matrix`, and tensor_parallel.py through `outputs` and `largest`. epilogue.py has operations before
and after the product that are differentiated together with it (Pass.before, Pass.after).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.checkpointing import gradients_are_wanted, inside_checkpoint
from nanochat_fp4.nvfp4.collectives import version_of
from nanochat_fp4.nvfp4.format import row_major_scales
from nanochat_fp4.nvfp4.gemm import (
    Quantized,
    after,
    gemm,
    joined,
    once_differentiable,
    put_together,
    quantize_grad_output,
    quantize_operand,
    taken_apart,
)
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.philox import new_seed
from nanochat_fp4.nvfp4.quantizers import Quantization
from nanochat_fp4.nvfp4.recipes import GRAD_OUTPUT, GRAD_OUTPUT_T, INPUT, INPUT_T, WEIGHT, WEIGHT_T, Recipe

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)
UNQUANTIZED = Recipe("bf16")
WEIGHTS_CHANGED = (
    "quantize_weights_once: weights changed inside the context, so gradients would be computed for the old ones; leave "
    "it before optimizer.step()"
)


class Pass(NamedTuple):
    """The settings of one forward pass of a layer and of its backward pass, besides the tensors that autograd
    differentiates.

    recipe:       the recipe of this pass
    dtype:        the dtype of the output, in which unquantized operands are multiplied
    grad_enabled: the caller's torch.is_grad_enabled(). It is stored because needs_input_grad ignores torch.no_grad.
    weights:      the number of weights, which stand one below the other
    per_token:    whether each row of the input has a tensor_scale of its own
    amax:         max |input|, float32 (), if the caller knows it
    nonnegative:  whether the caller knows that no input is negative, as after ReLU^2 (dispatch.mm)
    prepared:     the parts of the weight operand of the output GEMM, if they were made before this pass
    gradient:     the memory that the gradient of the weights is added to, float32 (N, K), or None. If it is given,
                  backward returns no gradient of the weights. It is stored here and not by autograd, because autograd
                  refuses saved tensors that change.
    largest:      a function from an amax to that over all processes that have a part of the layer, or None
    input:        the input operand, if it was made before this pass. The gradient is that of the tensor that it is of.
    before:       an operation that makes the input operand, or None. before.forward(x, how) makes the operand of x
                  (M, K). before.backward(grad) returns the gradient of x, for the gradient of the tensor that the
                  operand stands for.
    after:        an operation that follows the product, or None. after.forward(y, *others) takes the product y (M, N).
                  It returns its results, further results that have no gradients, and tensors to keep. If
                  after.recomputes is true, after.backward(y, kept, *grads) returns the gradients of y and of each of
                  `others`. The backward pass computes y again, by one more GEMM of the layer's two operands, which it
                  keeps anyway. Under torch.compile, everything that after.backward computes again must depend on
                  `grads`. Otherwise the compiler would move the computation into the forward pass and keep its result
                  (gemm.after). If after.recomputes is false, the kept tensors are the factors with which
                  gemm.quantize_grad_output makes the gradient of y of that of the first result.
    """

    recipe: Recipe
    dtype: torch.dtype
    grad_enabled: bool
    weights: int = 1
    per_token: bool = False
    amax: Tensor | None = None
    nonnegative: bool = False
    prepared: Sequence[Quantized] | None = None
    gradient: Tensor | None = None
    largest: Callable[[Tensor], Tensor] | None = None
    input: Quantized | None = None
    before: Any = None
    after: Any = None

    def how(self, operand: int, seed: Tensor | None, signs: Tensor | None, device: torch.device) -> Quantization:
        """Says how an operand (recipes.INPUT to INPUT_T) is made.

        seed is the seed of the operand's noise, and signs is the seed of its rotation, both int64 (). Both operands of
        a GEMM draw their signs from the stream of the first one, so that they are rotated alike. A GEMM that draws
        random numbers although there is no seed has the seed 0.
        """
        gemm = (self.recipe.output, self.recipe.grad_input, self.recipe.grad_weight)[operand // 2]
        own = (gemm.a, gemm.b)[operand % 2]
        if gemm.fixed_signs or (seed is None and gemm.random):
            signs = torch.zeros((), dtype=torch.int64, device=device)
            seed = signs if seed is None else seed
        is_input = operand == INPUT
        # A rounding that is a user's own function finds the amax itself.
        knows_amax = is_input and own.rounding and not (own.rounding.quantize or gemm.rht_dim or self.per_token)
        return Quantization(
            own.rounding,
            seed=seed,
            stream=operand,
            rht_dim=gemm.rht_dim,
            rht_seed=signs,
            rht_stream=operand - operand % 2,
            per_token=self.per_token and is_input,
            amax=self.amax if knows_amax else None,
            tiles=dispatch.native_gemm(device.type) is not None,
            largest=self.largest,
            kept=own.kept,
        )


class _Linear(torch.autograd.Function):
    """The three products of x (M, K) and W (N, K). `tensors` has the weights (N_i, K) that W consists of, and then the
    arguments of p.after besides the product."""

    @staticmethod
    def forward(ctx, p: Pass, x: Tensor, *tensors: Tensor):
        weights, others, device = tensors[: p.weights], tensors[p.weights :], x.device
        dgrad, wgrad = p.recipe.grad_input, p.recipe.grad_weight
        needs_x = p.grad_enabled and ctx.needs_input_grad[1]
        needs_w = p.grad_enabled and any(ctx.needs_input_grad[2 : 2 + p.weights])
        drawn = p.recipe.output.random or any(gemm.b.raw and gemm.random for gemm in (dgrad, wgrad))
        seed = new_seed(device) if drawn and (needs_x or needs_w or inside_checkpoint()) else None

        how, weight = p.how(INPUT, seed, seed, device), stacked(weights) if p.prepared is None or dgrad.b.raw else None
        xq = p.input or (p.before.forward(x, how) if p.before else quantize_operand(x, how, keep_codes=True))
        wq = p.prepared or [quantize_operand(weight, p.how(WEIGHT, seed, seed, device), keep_codes=True)]
        w = joined(wq).depending_on(seed)
        y = gemm(xq, w, compute_dtype=p.dtype, out_dtype=p.dtype, nonnegative=p.nonnegative)

        # The backward GEMMs use the values of this GEMM. A raw operand is instead quantized now from the unquantized
        # tensor.
        kept_w, kept_x = [w.kept or w for w in wq] if needs_x else [], [xq.kept or xq] if needs_w else []
        if needs_x and dgrad.b.raw:
            how = p.how(WEIGHT_T, seed, seed, device)
            kept_w = [quantize_operand(weight, how, transpose=True, keep_codes=True)]
        if needs_w and wgrad.b.raw:
            how = p.how(INPUT_T, seed, seed, device)
            kept_x = [quantize_operand(x, how, transpose=True, keep_codes=True)]

        results, made, of_after = p.after.forward(y, *others) if p.after is not None else ((y,), (), ())
        operands = [kept_w, kept_x, [xq, *wq] if p.after is not None and p.after.recomputes else []]
        ctx.about, kept = taken_apart([operand for some in operands for operand in some])
        ctx.p, ctx.counts, ctx.needs = p, [len(some) for some in operands], (needs_x, needs_w)
        ctx.rows, ctx.dtypes = [w.shape[0] for w in weights], (x.dtype, weights[0].dtype)
        ctx.save_for_backward(*kept, seed, *of_after)
        ctx.mark_non_differentiable(*made)
        return *results, *made

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):
        p, (needs_x, needs_w) = ctx.p, ctx.needs
        dgrad, wgrad = p.recipe.grad_input, p.recipe.grad_weight
        operands, (forward_seed, *factors) = put_together(ctx.about, ctx.saved_tensors)
        weights, inputs = operands[: ctx.counts[0]], operands[ctx.counts[0] : ctx.counts[0] + ctx.counts[1]]
        e, grad_others = grads[0], ()
        if ctx.counts[2]:
            # The compiler would otherwise see that the forward pass has computed this product, and would keep it.
            xq, *wq = operands[-ctx.counts[2] :]
            xq, wq = xq.depending_on(e), joined(wq).depending_on(e)
            y = gemm(xq, wq, compute_dtype=p.dtype, out_dtype=p.dtype, nonnegative=p.nonnegative)
            (e, *grad_others), factors = p.after.backward(y, factors, *grads), ()

        device, grad_x, grad_w = e.device, None, [None] * p.weights
        seed = new_seed(device) if dgrad.random or wgrad.random else None
        if seed is not None and torch.compiler.is_compiling():
            seed = after(seed, e)
        # If the forward pass has rotated operand b of a GEMM, operand a is rotated with the same signs.
        signs, signs_t = (forward_seed if gemm.b.raw else seed for gemm in (dgrad, wgrad))
        eq, eq_t = quantize_grad_output(
            e,
            p.how(GRAD_OUTPUT, seed, signs, device) if needs_x else None,
            p.how(GRAD_OUTPUT_T, seed, signs_t, device) if needs_w else None,
            factors,
        )
        if needs_x:
            wt = joined(weights)
            if not dgrad.b.raw:
                wt = quantize_operand(wt, p.how(WEIGHT_T, seed, signs, device), transpose=True)
            grad_x = gemm(eq, wt, compute_dtype=p.dtype, out_dtype=ctx.dtypes[0])
        if needs_w:
            (xt,) = inputs
            if not wgrad.b.raw:
                xt = quantize_operand(xt, p.how(INPUT_T, seed, signs_t, device), transpose=True)
            if p.gradient is None:
                grad_w = gemm(eq_t, xt, compute_dtype=p.dtype, out_dtype=ctx.dtypes[1]).split(ctx.rows)
            else:
                gemm(eq_t, xt, compute_dtype=p.dtype, into=p.gradient)
        if p.before is not None and needs_x:
            grad_x = p.before.backward(grad_x)
        return None, grad_x, *grad_w, *grad_others


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Returns the weights (N_i, K) stacked one below the other, (N, K)."""
    return weights[0] if len(weights) == 1 else torch.cat(weights)


# ----------------------------------------------------------------------------------------------------------------------
# The input


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which nn.Linear would multiply x: autocast's dtype if autocast is on, otherwise x's."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if not x.is_meta and torch.is_autocast_enabled(device) else x.dtype


def other_dtype(refused: Collection[str]) -> str:
    """Returns words for what a user does about weights in these dtypes. Autocast does not change float64."""
    if "float64" in refused:
        return "use model.float() or model.bfloat16()"
    return "use model.bfloat16(), model.float(), or autocast to bfloat16"


def check_input(x: Tensor, features: int) -> None:
    """Raises ValueError if x is not (..., features) or has no floating-point dtype."""
    right = x.dim() and x.shape[-1] == features
    if not right or not x.is_floating_point():
        dtype = str(x.dtype).removeprefix("torch.")
        remedy = "convert it with x.float(), or embed token ids first" if right else "give it the layer's in_features"
        raise ValueError(
            f"QuantLinear: the input is {tuple(x.shape)} in {dtype}, expected (..., {features}) in float32 or "
            f"bfloat16; {remedy}"
        )


# ----------------------------------------------------------------------------------------------------------------------
# What contexts set (contexts.py)


class MadeFor(NamedTuple):
    """What a context has made for weights that stand one below the other: their operand of the output GEMM, with the
    weights' versions and the recipe at that time, or the memory that their gradient is added to.

    A layer may compute with another weight in between (torch.func.functional_call, a parametrization). So this is used
    for these Parameters only.
    """

    weights: tuple[Tensor, ...]
    value: Quantized | Tensor
    versions: tuple[tuple[int, int], ...] = ()
    recipe: Recipe | None = None


class LayerContext(NamedTuple):
    """What a context changes in a layer that is inside of it.

    full_precision: whether the layer computes like nn.Linear
    per_token:      whether each row of the input has a tensor_scale of its own
    weights:        the operands of this layer's weight, and of the fused groups of layers that begin with this layer
    gradients:      the gradient memory of this layer, and of the same groups
    """

    full_precision: bool = False
    per_token: bool = False
    weights: tuple[MadeFor, ...] = ()
    gradients: tuple[MadeFor, ...] = ()


class InContext(torch.nn.Module):
    """A module that full_precision and per_token_scale change. `contexts` are those that it is inside of."""

    contexts: tuple[LayerContext, ...] = ()

    def __getstate__(self) -> dict:
        """Leaves the contexts out, so that a copy or a pickle that is made inside a context is outside of it."""
        return {name: value for name, value in vars(self).items() if name != "contexts"}


# ----------------------------------------------------------------------------------------------------------------------
# The layer


class QuantLinear(InContext, torch.nn.Linear):
    """An nn.Linear, with the same parameters and state-dict keys, whose GEMMs are computed with a method.

    method is a name of METHODS, or a Recipe. in_features and out_features must be multiples of 16 (or of the block of a
    rounding of one's own) unless the method quantizes nothing. Input (..., in_features) and weight are FP32 or BF16,
    with autocast on or off. The output (..., out_features) has the input's dtype, or autocast's. device and dtype are
    those of nn.Linear. Raises ValueError for an unknown method, for sizes that are no such multiples, and for an input
    of another size or dtype.

    >>> layer = nf.QuantLinear(64, 32, method="nvidia")
    >>> x = torch.randn(2, 3, 64, requires_grad=True)
    >>> layer(x).square().mean().backward()
    >>> x.grad.shape, layer.weight.grad.shape
    (torch.Size([2, 3, 64]), torch.Size([32, 64]))
    """

    recipe: Recipe
    per_token_in_eval = False  # whether each row has its own tensor_scale in eval mode without gradients (convert)
    # from an amax to that over all processes that have a part of the layer (tensor_parallel.py)
    largest: Callable[[Tensor], Tensor] | None = None
    called = False  # whether a forward pass that is not compiled has called the layer (convert.uncalled)
    stackable = True  # whether fused_linear may stack the weight with another layer's. Each subclass must say it anew.

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

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.stackable = vars(cls).get("stackable", False)

    def set_recipe(self, recipe: Recipe) -> None:
        """Gives the layer the recipe. Raises ValueError if the layer's sizes do not suit it."""
        if problem := recipe.problem_with_sizes(self.in_features, self.out_features):
            raise ValueError(f"QuantLinear: {problem}; use nn.Linear here, or skip this layer in convert")
        self.recipe = recipe

    @property
    def matrix(self) -> Tensor:
        """The weight that this process has, (out_features, in_features). Its gradient flows to the Parameter."""
        return self.weight

    @property
    def quantizes(self) -> bool:
        """Whether any operand of any GEMM is quantized at the moment."""
        return self.recipe.quantizes and not any(context.full_precision for context in self.contexts)

    @property
    def quantizes_input(self) -> bool:
        """Whether the forward GEMM quantizes the input, so that the backward pass need not keep the input itself."""
        return self.quantizes and self.recipe.output.a.rounding is not None

    @property
    def scales_each_token(self) -> bool:
        """Whether each row of the input has a tensor_scale of its own at the moment."""
        asked = any(context.per_token for context in self.contexts)
        return asked or (self.per_token_in_eval and not (self.training or gradients_are_wanted()))

    def is_like(self, other: "QuantLinear") -> bool:
        """Whether fused_linear may compute another layer of this class together with this one."""
        of = [(layer.recipe, layer.quantizes, layer.scales_each_token) for layer in (self, other)]
        return of[0] == of[1]

    def weight_quantization(self, device: torch.device) -> Quantization:
        """Says how the weight operand of the output GEMM is made, for recipes that make it alike in each pass."""
        return Pass(self.recipe, torch.float32, False, largest=self.largest).how(WEIGHT, None, None, device)

    def gathered_weight(self, layers: "Sequence[QuantLinear]") -> Sequence[Quantized] | None:
        """The parts of the weight operand of these layers, if FSDP has gathered them (sharding.py). This layer is the
        first of them."""
        return None

    def made(self, what: str, layers: "Sequence[QuantLinear]") -> MadeFor | None:
        """What a context has made for the weights of these layers, of which this is the first. `what` is the field of
        LayerContext, "weights" or "gradients"."""
        weights = [layer.weight for layer in layers]
        for made in (made for context in self.contexts for made in getattr(context, what)):
            if len(made.weights) == len(weights) and all(a is b for a, b in zip(made.weights, weights)):
                return made
        return None

    def prepared_weight(self, layers: "Sequence[QuantLinear]") -> Sequence[Quantized] | None:
        """The parts of the weight operand of the output GEMM of these layers, of which this is the first, if they were
        made before. Raises RuntimeError if a weight has changed since."""
        made = self.made("weights", layers) if self.quantizes else None
        if made is None or made.recipe != self.recipe:
            return self.gathered_weight(layers)
        # A graph has no versions. The context compares them when it is left.
        if not torch.compiler.is_compiling() and made.versions != tuple(version_of(w) for w in made.weights):
            raise RuntimeError(WEIGHTS_CHANGED)
        return (made.value,)

    def forward(self, x: Tensor, amax: Tensor | None = None, nonnegative: bool = False) -> Tensor:
        """Computes the layer: x (..., in_features) gives (..., out_features).

        amax is max |x|, float32 (), if the operation that made x has computed it. The layer then need not read x an
        additional time. nonnegative says that no x is negative: FP8 tensor cores then sum exactly, because their fast
        sums of such an input are wrong by up to 1.6% of their square (dispatch.mm).
        """
        return self.outputs(x, (self,), amax=amax, nonnegative=nonnegative)

    def outputs(
        self,
        x: Tensor,
        layers: "Sequence[QuantLinear]",
        others: Sequence[Tensor] = (),
        add_bias: bool = True,
        **settings,
    ):
        """Computes x . W^T + bias of x (..., K). W consists of the weights of these layers, which are alike, and of
        which this is the first. settings are fields of Pass. Returns (..., N), or the results of settings["after"],
        which `others` are arguments of. Layers with settings["after"] have no bias.

        Raises ValueError for an input of another size, and for a dtype that quantized layers do not compute in.
        """
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and dispatch.stays_eager(x.device.type):
            # A C++ compiler takes minutes for the many small operations of two layers. NVFP4_COMPILE=1 compiles them.
            return torch.compiler.disable(QuantLinear.outputs)(self, x, layers, others, add_bias, **settings)
        check_input(x, self.in_features)
        dtype, weights = compute_dtype(x), [layer.matrix for layer in layers]
        bias = self.bias.to(dtype) if add_bias and self.bias is not None else None
        around = settings.keys() & {"input", "before", "after"}
        if not around and (not x.numel() or self.is_plain(x, layers)):
            # Without autocast, too, the weight is cast to the input's dtype, so that FP32 master weights can be used
            # with BF16 activations.
            return torch.nn.functional.linear(x, stacked([w.to(dtype) for w in weights]), bias)
        if dtype not in COMPUTE_DTYPES:
            name = str(dtype).removeprefix("torch.")
            raise ValueError(f"QuantLinear computes in float32 or bfloat16 and got {name}; {other_dtype([name])}")
        if not torch.compiler.is_compiling():  # torch.compile refuses the change inside of a checkpoint.
            self.called = True
        # Autocast stays on here. Products that must be FP32 (rotate, gemm on a CPU) switch it off around themselves.
        # torch.compile would trace a context around the whole pass into the backward, where CUDA's autocast fails.
        gradient = self.made("gradients", layers)
        p = Pass(
            # Inside full_precision the recipe is the unquantized one.
            self.recipe if self.quantizes else UNQUANTIZED,
            dtype,
            torch.is_grad_enabled(),
            len(weights),
            per_token=self.scales_each_token,
            prepared=self.prepared_weight(layers),
            gradient=gradient and gradient.value,
            largest=self.largest,
            **settings,
        )
        rows = x.reshape(-1, x.shape[-1])
        # An input that is not quantized is kept for the backward pass, so it is converted here.
        y, *results = _Linear.apply(p, rows if p.recipe.quantizes else rows.to(dtype), *weights, *others)
        if p.after is not None:
            return y, *results
        # The processes of tensor parallelism may have gathered tokens, so their number is left open.
        y = y.view(*x.shape[:-2], -1, y.shape[-1]) if x.dim() > 1 else y.view(-1)
        return y if bias is None else y + bias

    def is_plain(self, x: Tensor, layers: "Sequence[QuantLinear]") -> bool:
        """Whether nn.Linear computes this pass, because it neither quantizes nor adds to gradient memory. A pass on the
        meta device is plain, because it only has shapes."""
        adds = not self.recipe.quantizes and torch.is_grad_enabled() and compute_dtype(x) in COMPUTE_DTYPES
        return x.is_meta or not (self.quantizes or (adds and self.made("gradients", layers) is not None))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, method={self.recipe.name}"


@torch.no_grad()
def quantized_weight(layers: Sequence[QuantLinear], tiles: bool = False) -> Quantized | None:
    """Returns the weight operand of the output GEMM of layers that are computed as one, without cached values. None
    means that the operand is not the same in each pass, because its rounding is random.

    tiles: whether the block scales are laid out in the order in which this machine's FP4 tensor cores read them
    """
    first = layers[0]
    if not first.recipe.fixed_weight:
        return None
    if (gathered := first.gathered_weight(layers)) is not None:
        operand = joined(gathered)
        return operand if tiles else replace(operand, scales=row_major_scales(operand.codes, operand.scales))
    weight = stacked([layer.matrix.detach() for layer in layers])
    how = first.weight_quantization(weight.device)
    return quantize_operand(weight, how._replace(tiles=tiles and how.tiles), keep_codes=True).without_cache()
