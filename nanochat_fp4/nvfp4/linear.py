"""QuantLinear: a linear layer whose three GEMMs take their operands from a Recipe.

    output       Y  = Qx(X) . Qw(W)^T          contracted over in_features      `output`
    grad_input   dX = Qe(E) . Qwt(W^T)^T       contracted over out_features     `gradients`
    grad_weight  dW = Qet(E^T) . Qxt(X^T)^T    contracted over tokens           `gradients`

These are the products of the paper's Section 6. M is the number of tokens (all leading dimensions of the input), K is
in_features, and N is out_features. operands.py has the kinds of operand, and makers.py makes them. layer_pass.py has
the settings of a pass.

The backward pass keeps the codes of input and weight, 4.5 bits an element (the paper, Section 5). A tensor that the
forward does not quantize is kept as it is. The backward GEMMs use the values that the forward used.

Each pass of a layer draws one 64-bit seed from torch's default generator of the layer's device. A run that saves and
restores torch's generators therefore resumes with the same rotations and roundings, to the bit. Passes without
gradients draw nothing. All state is in the layers, so threads may call different layers at the same time.

Each other feature reaches a layer in one place: contexts.py through `context`,
sharding.py through `gathered_weight`, and experts.py through `matrix`. tensor_parallel.py overrides `outputs` and
`largest`. relu_squared.py and epilogue.py have autograd functions of their own that call
`output` and `gradients`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from nanochat_fp4.nvfp4.checkpointing import gradients_are_wanted
from nanochat_fp4.nvfp4.dispatch import stays_eager
from nanochat_fp4.nvfp4.gemm import GemmOperand, gemm, gemm_add, once_differentiable
from nanochat_fp4.nvfp4.layer_context import InContext
from nanochat_fp4.nvfp4.layer_pass import (
    COMPUTE_DTYPES,
    UNQUANTIZED,
    Pass,
    backward_seed,
    check_compute_dtype,
    check_input,
    compute_dtype,
    needing,
)
from nanochat_fp4.nvfp4.makers import Quantization, quantize_grad_output, quantize_operand
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.operands import KeptOperand, operands_of, stacked, tensors_of
from nanochat_fp4.nvfp4.recipes import GRAD_OUTPUT, GRAD_OUTPUT_T, INPUT_T, WEIGHT, WEIGHT_T, Recipe


class ForBackward(NamedTuple):
    """The state that `output` hands to `gradients` besides tensors.

    kept:  how the operands of weight and input are made again from the tensors that autograd keeps
    rows:  the number of rows of each weight
    needs: whether the gradients of x and of the weights are wanted
    """

    p: Pass
    kept: list[KeptOperand | None]
    rows: list[int]
    x_dtype: torch.dtype
    weight_dtype: torch.dtype
    needs: tuple[bool, bool]


def output(
    p: Pass,
    needs: tuple[bool, bool],
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    seed: torch.Tensor | None,
    xq: GemmOperand | None = None,
) -> tuple[torch.Tensor, tuple[GemmOperand, GemmOperand], ForBackward, list[torch.Tensor | None]]:
    """Computes Y = Qx(X) . Qw(W)^T. X is x (M, K), and W (N, K) is made of the weights (N_i, K), stacked one below the
    other.

    needs: whether the gradients of x and of the weights are wanted
    seed:  the seed that p.forward_seed has drawn
    xq:    the input operand, if the caller has made it already
    Returns Y (M, N) in p.dtype, the two operands of Y, and the state and the tensors that `gradients` takes.
    """
    dgrad, wgrad = p.recipe.grad_input, p.recipe.grad_weight
    weight = stacked(weights) if p.prepared_weight is None or dgrad.b.raw else None

    if xq is None:
        xq = quantize_operand(x, p.of_input(seed, x.device), keep_codes=True)
    if (wq := p.prepared_weight) is None:
        wq = quantize_operand(weight, p.of_weight(seed, x.device), keep_codes=True)
    y = gemm(xq, needing(wq, seed), compute_dtype=p.dtype, out_dtype=p.dtype)

    # The backward GEMMs use the values of this GEMM. A raw operand is instead quantized now from the unquantized
    # tensor.
    kept_w = wq.for_backward() if needs[0] else None
    kept_x = xq.for_backward() if needs[1] else None
    if needs[0] and dgrad.b.raw:
        how = p.quantization(WEIGHT_T, seed, seed, x.device)
        kept_w = quantize_operand(weight, how, transpose=True, keep_codes=True)
    if needs[1] and wgrad.b.raw:
        how = p.quantization(INPUT_T, seed, seed, x.device)
        kept_x = quantize_operand(x, how, transpose=True, keep_codes=True)
    kept, tensors = tensors_of(kept_w, kept_x)
    state = ForBackward(p, kept, [w.shape[0] for w in weights], x.dtype, weights[0].dtype, needs)
    return y, (xq, wq), state, [*tensors, seed]


def gradients(
    state: ForBackward, tensors: Sequence[torch.Tensor | None], grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, Sequence[torch.Tensor | None]]:
    """Computes dX = Qe(E) . Qwt(W^T)^T and dW = Qet(E^T) . Qxt(X^T)^T. E is grad_output (M, N).

    Returns dX (M, K) and the gradient of each weight. A gradient is None if it is not wanted. The weights' gradients
    are also None if they have been added to p.gradient.
    """
    p, (needs_dgrad, needs_wgrad), device = state.p, state.needs, grad_output.device
    of, dgrad, wgrad = p.quantization, p.recipe.grad_input, p.recipe.grad_weight
    (w, x), (forward_seed,) = operands_of(state.kept, tensors)
    seed = backward_seed(grad_output) if p.recipe.draws_in_backward else None
    # If the forward pass has rotated operand b of a GEMM, operand a is rotated with the same signs.
    signs = forward_seed if dgrad.b.raw else seed
    signs_t = forward_seed if wgrad.b.raw else seed
    e, et = quantize_grad_output(
        grad_output,
        of(GRAD_OUTPUT, seed, signs, device) if needs_dgrad else None,
        of(GRAD_OUTPUT_T, seed, signs_t, device) if needs_wgrad else None,
    )
    grad_x, grad_weights = None, [None] * len(state.rows)
    if needs_dgrad:
        wt = w if dgrad.b.raw else quantize_operand(w, of(WEIGHT_T, seed, signs, device), transpose=True)
        grad_x = gemm(e, wt, compute_dtype=p.dtype, out_dtype=state.x_dtype)
    if needs_wgrad:
        xt = x if wgrad.b.raw else quantize_operand(x, of(INPUT_T, seed, signs_t, device), transpose=True)
        if p.gradient is None:
            dw = gemm(et, xt, compute_dtype=p.dtype, out_dtype=state.weight_dtype)
            grad_weights = dw.split(state.rows)
        else:
            gemm_add(et, xt, p.gradient, compute_dtype=p.dtype)
    return grad_x, grad_weights


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p: Pass, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        needs = p.needs(*ctx.needs_input_grad[1:])
        y, _, ctx.state, saved = output(p, needs, x, weights, p.forward_seed(needs, x.device))
        ctx.save_for_backward(*saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        grad_x, grad_weights = gradients(ctx.state, ctx.saved_tensors, grad_output)
        return None, grad_x, *grad_weights


def quantized_linear(p: Pass, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Applies `output` to x (..., K) and weights (N_i, K), with `gradients` as its backward. Returns (M, N) in
    p.dtype."""
    return _QuantizedLinear.apply(p, p.rows(x), *weights)


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
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None
    called = False  # whether a forward pass that is not compiled has called the layer (first_steps.py)
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
        if problem := self.problem_with(recipe):
            raise ValueError(f"QuantLinear: {problem}; use nn.Linear here, or skip this layer in convert")
        self.recipe = recipe

    def problem_with(self, recipe: Recipe) -> str | None:
        """Returns the reason why this layer cannot be computed with the recipe, or None."""
        return recipe.problem_with_sizes(self.in_features, self.out_features)

    @property
    def matrix(self) -> torch.Tensor:
        """The weight that this process has, (out_features, in_features). Its gradient flows to the Parameter."""
        return self.weight

    @property
    def quantizes(self) -> bool:
        """Whether any operand of any GEMM is quantized at the moment."""
        return self.recipe.quantizes and not self.context.full_precision

    @property
    def present_recipe(self) -> Recipe:
        """The recipe of a pass at the moment. Inside full_precision (contexts.py) it is the unquantized one."""
        return self.recipe if self.quantizes else UNQUANTIZED

    @property
    def quantizes_input(self) -> bool:
        """Whether the forward GEMM quantizes the input, so that the backward pass need not keep the input itself."""
        return self.quantizes and self.recipe.output.a.rounding is not None

    @property
    def scales_each_token(self) -> bool:
        """Whether each row of the input has a tensor_scale of its own at the moment."""
        return self.context.per_token or (self.per_token_in_eval and not (self.training or gradients_are_wanted()))

    def is_like(self, other: "QuantLinear") -> bool:
        """Whether fused_linear may compute another layer of this class together with this one."""
        same_recipe = self.recipe == other.recipe and self.quantizes == other.quantizes
        return same_recipe and self.context.per_token == other.context.per_token

    def weight_quantization(self, device: torch.device) -> Quantization:
        """Says how the weight operand of the output GEMM is made, for recipes that make it alike in each pass."""
        how = self.recipe.quantization(WEIGHT, None, None, device)
        return how._replace(largest=self.largest)

    def gathered_weight(self, layers: "Sequence[QuantLinear]") -> GemmOperand | None:
        """The weight operand of these layers, if FSDP has gathered one (sharding.py). This layer is the first of
        them."""
        return None

    def prepared_weight(self, layers: "Sequence[QuantLinear]") -> GemmOperand | None:
        """The weight operand of the output GEMM of these layers, of which this is the first, if it was made before."""
        weights = [layer.weight for layer in layers]
        made = self.context.weight_of(weights, self.recipe)
        return self.gathered_weight(layers) if made is None else made

    def gradient_memory(self, layers: "Sequence[QuantLinear]") -> torch.Tensor | None:
        """The memory for these layers' weight gradients, float32 (N, K), inside contexts.accumulate_gradients."""
        return self.context.gradient_of([layer.weight for layer in layers])

    def forward(self, x: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """Computes the layer: x (..., in_features) gives (..., out_features).

        amax is max |x|, float32 (), if the operation that made x has computed it. The layer then need not read x an
        additional time.
        """
        return self.compute(x, (self,), amax)

    def compute(
        self, x: torch.Tensor, layers: "Sequence[QuantLinear]", amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Computes several layers that are alike, of which this is the first, as one. Returns their outputs side by
        side, (..., sum of out_features). amax is forward's."""
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and stays_eager(x.device.type):
            # A C++ compiler takes minutes for the many small operations of two layers. NVFP4_COMPILE=1 compiles them.
            return torch.compiler.disable(type(self).outputs)(self, x, layers, amax)
        return self.outputs(x, layers, amax)

    def outputs(
        self, x: torch.Tensor, layers: "Sequence[QuantLinear]", amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Does the work of `compute`, compiled or not."""
        check_input(x, self.in_features)
        dtype = compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        if not x.numel() or self.is_plain(x, layers):
            # Without autocast, too, the weight is cast to the input's dtype, so that FP32 master weights can be used
            # with BF16 activations.
            return torch.nn.functional.linear(x, stacked([layer.matrix.to(dtype) for layer in layers]), bias)
        y = quantized_linear(self.new_pass(x, layers, amax), x, [layer.matrix for layer in layers])
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if bias is None else y + bias

    def is_plain(self, x: torch.Tensor, layers: "Sequence[QuantLinear]") -> bool:
        """Whether nn.Linear computes this pass, because it neither quantizes nor adds to gradient memory. A pass on the
        meta device is plain, because it only has shapes."""
        adds = not self.recipe.quantizes and torch.is_grad_enabled() and compute_dtype(x) in COMPUTE_DTYPES
        return x.is_meta or not (self.quantizes or (adds and self.gradient_memory(layers) is not None))

    def new_pass(
        self,
        x: torch.Tensor,
        layers: "Sequence[QuantLinear]",
        amax: torch.Tensor | None = None,
    ) -> Pass:
        """Makes the Pass of x (..., in_features) through these layers.

        Raises ValueError for a dtype that quantized layers do not compute in.
        """
        dtype = compute_dtype(x)
        check_compute_dtype(dtype)
        if not torch.compiler.is_compiling():  # torch.compile refuses the change inside of a checkpoint.
            self.called = True
        prepared = self.prepared_weight(layers) if self.quantizes else self.gathered_weight(layers)
        # Autocast stays on here. Products that must be FP32 (rotate, gemm on a CPU) switch it off around themselves.
        # torch.compile would trace a context around the whole pass into the backward, where CUDA's autocast fails.
        return Pass(
            self.present_recipe,
            dtype,
            torch.is_grad_enabled(),
            self.scales_each_token,
            amax,
            prepared,
            self.gradient_memory(layers),
            self.largest,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.recipe}"
