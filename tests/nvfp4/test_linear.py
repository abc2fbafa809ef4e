"""QuantLinear: every method by hand, one in the mean, what is saved, dtypes, shapes, randomness, compiling."""

import contextlib
import copy
import math
import warnings
from typing import NamedTuple

import pytest
import torch
from _assertions import assert_unbiased, concentrate, relative_square_error
from _rows import METHOD_TABLE

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.epilogue import EightBitReluSquared, fused_linear, relu_squared_linear
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize, quantize_reference
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both

TRAINING = ["nvidia", "four_over_six", "tetrajet_v2", "clover", "clover_search"]


def layer(method, in_features=128, out_features=128, **kw) -> nf.QuantLinear:
    torch.manual_seed(1)
    return nf.QuantLinear(in_features, out_features, method=method, **kw)


def backward(linear, x, e, seed=7):
    """(output, grad_input, grad_weight) of one forward and backward pass."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = linear(x)
    return y.detach(), *torch.autograd.grad(y, (x, linear.weight), e)


def draw_seed() -> torch.Tensor:
    """What a layer draws: 64 bits from torch's default generator."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)


# --------------------------------------------------------------------------------------------------------------------
# The definition, by hand.


class Factors(NamedTuple):
    """An operand of a product: the values that are multiplied, and the scale that is applied to the result."""

    values: torch.Tensor
    scale: torch.Tensor | float = 1.0

    @property
    def T(self) -> "Factors":
        return Factors(self.values.T, self.scale)

    @property
    def whole(self) -> torch.Tensor:
        return self.values * self.scale


def product(a: Factors, b: Factors) -> torch.Tensor:
    """a . b^T of two operands, one of which may be padded with zeros."""
    length = min(a.values.shape[1], b.values.shape[1])
    return (a.values[:, :length] @ b.values[:, :length].T) * (a.scale * b.scale)


def rounded(x: torch.Tensor, rounding, **random) -> Factors:
    """Quantized along the last dimension, padded with zeros to whole blocks or groups."""
    if rounding is None:
        return Factors(x)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % max(random.get("rht_dim", 0), rounding.block)))
    quantized = quantize_reference(x, Quantization(rounding, **random))
    return Factors(quantized.decode(), quantized.tensor_scale)


def forward_operand(x: torch.Tensor, operand: Operand) -> tuple[Factors, Factors]:
    """What the output GEMM multiplies, and what the backward pass uses in its place."""
    multiplied = rounded(x, operand.rounding)
    return multiplied, rounded(x, operand.kept) if operand.kept else multiplied


def backward_product(gemm: Gemm, stream: int, seeds, e: torch.Tensor, raw: torch.Tensor, used: Factors):
    """grad_input or grad_weight. stream: of the noise of the first operand, and of the signs of both. The second has
    the next one. seeds: of the forward pass, which rounds a raw operand, and of the backward pass."""
    seed = seeds[not gemm.b.raw]
    signs = {"rht_dim": gemm.rht_dim, "rht_seed": 0 if gemm.fixed_signs else seed, "rht_stream": stream}
    a = rounded(e, gemm.a.rounding, seed=seeds[1], stream=stream, **signs)
    if not (gemm.b.raw or gemm.b.rounding):
        return product(a, used)
    random = {"seed": seed, "stream": stream + 1} | signs
    return product(a, rounded(raw if gemm.b.raw else used.whole, gemm.b.rounding, **random))


def by_hand(recipe: Recipe, x, w, e, seed):
    """output, grad_input, grad_weight. A pass that needs random numbers draws one seed."""
    torch.manual_seed(seed)
    gemms = recipe.grad_input, recipe.grad_weight
    in_forward = recipe.output.random or any(gemm.random for gemm in gemms if gemm.b.raw)
    seeds = [draw_seed() if draws else 0 for draws in (in_forward, any(gemm.random for gemm in gemms))]
    (xq, x_used), (wq, w_used) = forward_operand(x, recipe.output.a), forward_operand(w, recipe.output.b)
    y = product(xq, wq)
    grad_input = backward_product(recipe.grad_input, 2, seeds, e, w.T, w_used.T)
    return y, grad_input, backward_product(recipe.grad_weight, 4, seeds, e.T, x.T, x_used.T)


# Rounding to nearest under signs of the whole run: nothing is random, whether or not another GEMM draws a seed.
FIXED = Gemm(Operand("rtn"), Operand("rtn"), 16, fixed_signs=True)
EIGHT_BITS = Recipe("eight_bits", output=Gemm(*2 * (Operand("e4m3", kept="four_over_six"),)))
RECIPES = [
    *(row for method in METHOD_TABLE.values() for row in (method, method.final)),
    *(nf.get_recipe(name).forward_only() for name in ("clover", "four_over_six", "clover_fp8_forward")),
    EIGHT_BITS,
    Recipe("fixed", output=both("rtn"), grad_weight=FIXED),
    Recipe("fixed_beside_sr", output=both("rtn"), grad_input=Gemm(Operand("sr")), grad_weight=FIXED),
]


@pytest.mark.parametrize("tokens", [100, 1])
@pytest.mark.parametrize("recipe", dict.fromkeys(RECIPES), ids=lambda recipe: recipe.name)
def test_gradients_are_those_of_the_recipe_by_hand(recipe, tokens):
    """wgrad's contraction, over the tokens, is padded to whole groups, and so is dgrad's where that is needed."""
    out_features = 144 if recipe.block <= 16 else 160
    linear = layer(recipe, 128, out_features)
    x, e, w = torch.randn(tokens, 128), torch.randn(tokens, out_features), linear.weight.detach()
    got = backward(linear, x, e, seed=3)
    state = torch.get_rng_state()
    want = by_hand(recipe, x, w, e, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    for name, g, h, exact in zip(("output", "grad_input", "grad_weight"), got, want, (x @ w.T, e @ w, e.T @ x)):
        # Kernels, and products of one row, may sum in another order; the reference on a CPU runs the same products.
        assert relative_square_error(g, h) < 1e-12, name
        if nf.backend().quantize == "PyTorch reference" and tokens > 1:
            assert torch.equal(g, h), name
        assert g.shape == exact.shape and relative_square_error(g, exact) < 0.15, name  # two SR roundings, few entries


def test_bf16_is_nn_linear():
    """Of any dimensions."""
    linear, x, e = layer("bf16", 120, 24, bias=True), torch.randn(7, 120), torch.randn(7, 24)
    plain = torch.nn.Linear(120, 24)
    plain.load_state_dict(linear.state_dict())
    for got, want in zip(backward(linear, x, e), backward(plain, x, e)):
        assert torch.equal(got, want)


# --------------------------------------------------------------------------------------------------------------------
# Unbiasedness (the paper, Appendix A): the mean of many backward passes against the gradients of the same quantized
# forward. By hand it is shown above for every method that its backward is the recipe's, noise and all, and in
# test_quantizers.py that products of these roundings are unbiased. Here is one method in whole.


def gradients(tokens: int, draws: int):
    """Concentration of clover's grad_input and grad_weight."""
    linear = layer("clover", 32, 128)
    x, e = torch.randn(tokens, 32, requires_grad=True), torch.randn(tokens, 128)
    xq, wq = (quantize(t.detach(), "four_over_six").dequantize().double() for t in (x, linear.weight))
    y = linear(x)  # draws nothing
    targets = e.double() @ wq, e.double().T @ xq
    return concentrate(lambda b: torch.autograd.grad(y, (x, linear.weight), e, retain_graph=True), targets, draws)


@pytest.mark.parametrize("draws", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_backward_passes_are_unbiased(draws):
    for name, gradient in zip(("grad_input", "grad_weight"), gradients(128, draws)):
        assert_unbiased(name, gradient)


def test_the_bias_of_few_tokens_is_small():
    """MS-EDEN needs groups with many values that are not zero. With 2 to about 16 tokens in all the gradient of the
    weight has the bias that gemm.py states, at most 0.5% of its square."""
    grad_input, grad_weight = gradients(7, 64)
    assert_unbiased("grad_input", grad_input)
    assert grad_weight.errors[64] < 0.005, str(grad_weight)


# --------------------------------------------------------------------------------------------------------------------
# Shapes, dtypes, autocast, what needs a gradient.


@pytest.mark.parametrize("method, shape", [("clover", (128,)), ("nvidia", (2, 3, 128))])
def test_leading_dimensions_are_tokens(method, shape):
    linear = layer(method, 128, 64, bias=True)
    x, e = torch.randn(shape), torch.randn(*shape[:-1], 64)
    got = backward(linear, x, e)
    want = backward(linear, x.reshape(-1, 128), e.reshape(-1, 64))
    assert got[0].shape == (*shape[:-1], 64) and got[1].shape == shape
    for g, w in zip(got, want):
        assert torch.equal(g.reshape(w.shape), w)


@pytest.mark.parametrize("method", ["clover", "nvidia", "bf16"])
def test_no_tokens(method):
    linear, shape = layer(method, 128, 64), (2, 0, 128)
    y, grad_input, grad_weight = backward(linear, torch.randn(shape), torch.randn(*shape[:-1], 64))
    assert y.shape == (*shape[:-1], 64) and grad_input.shape == shape and (grad_weight == 0).all()


def test_bias():
    linear, x, e = layer("clover", bias=True), torch.randn(6, 128), torch.randn(6, 128)
    torch.nn.init.normal_(linear.bias)
    y = linear(x)
    without = copy.deepcopy(linear)
    without.bias = None
    assert torch.equal(y, without(x) + linear.bias)
    (grad_bias,) = torch.autograd.grad(y, linear.bias, e)
    assert torch.allclose(grad_bias, e.sum(0), atol=1e-5)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("weight, x, autocast", [(FP32, BF16, False), (BF16, FP32, False), (FP32, FP32, True)])
@pytest.mark.parametrize("method", ["clover", "nvidia", "bf16"])
def test_dtypes(method, weight, x, autocast):
    """As nn.Linear under autocast; without it, the output has the input's dtype and the weight follows."""
    linear = layer(method, bias=True).to(weight)
    inputs, e = torch.randn(32, 128).to(x), torch.randn(32, 128)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        dtype = torch.bfloat16 if autocast else x
        y, grad_input, grad_weight = backward(linear, inputs, e.to(dtype))
    assert (y.dtype, grad_input.dtype, grad_weight.dtype) == (dtype, x, weight)
    y32, gx32, gw32 = backward(linear.float(), inputs.float(), e.to(dtype).float())
    # The same codes: only roundings of the results to BF16, 2^-9 relative, and of the operands that stay unquantized.
    for got, want in ((y, y32), (grad_input, gx32), (grad_weight, gw32)):
        assert relative_square_error(got, want) < 2e-5


@pytest.mark.parametrize("method", ["clover", "nvidia"])
def test_autocast_reaches_neither_the_rotations_nor_the_products(method):
    linear, x, e = layer(method), torch.randn(32, 128, requires_grad=True), torch.randn(32, 128)

    def run(autocast):
        torch.manual_seed(1)
        y = linear(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(y, (x, linear.weight), e)

    for got, want in zip(run(True), run(False)):
        assert torch.equal(got, want)


@pytest.mark.parametrize("method", TRAINING)
def test_gradients_do_not_depend_on_which_are_wanted(method):
    x, e = torch.randn(32, 128), torch.randn(32, 128)
    _, grad_input, grad_weight = backward(layer(method), x, e)
    frozen = layer(method)
    frozen.weight.requires_grad_(False)
    torch.manual_seed(7)
    inputs = x.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(frozen(inputs), inputs, e)[0], grad_input)
    first = layer(method)
    torch.manual_seed(7)
    assert torch.equal(torch.autograd.grad(first(x), first.weight, e)[0], grad_weight)


@pytest.mark.parametrize("loss", [lambda y: y.square().sum(), lambda y: y.sum()])
@pytest.mark.parametrize("relu_squared", [False, True])
def test_no_second_derivative(loss, relu_squared):
    """Silently zero would be worse than an error: beside another loss, a penalty of the gradient would do nothing."""
    linear, x = layer("clover"), torch.randn(16, 128, requires_grad=True)
    y = EightBitReluSquared.apply(x)[0] if relu_squared else linear(x)
    (grad,) = torch.autograd.grad(loss(y), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (linear.weight.sum() + grad.sum()).backward()


# --------------------------------------------------------------------------------------------------------------------
# Memory.


@pytest.mark.parametrize(
    "recipe",
    [*map(nf.get_recipe, (*TRAINING, "fig2_1x16_four_over_six", "fp8")), EIGHT_BITS],
    ids=lambda recipe: recipe.name,
)
def test_only_codes_are_kept_for_the_backward_pass(recipe):
    """4.5 bits for each element of input and weight, 8 in FP8 without codes; 1% for the rest (tensor scales, seed)."""
    linear, x = layer(recipe, 256, 512), torch.randn(384, 256, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(x)
    assert all(t.dtype in (torch.uint8, torch.float8_e4m3fn, torch.int64) or t.dim() == 0 for t in saved)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    operand = recipe.output.a
    bits = 8 if operand.rounding.fp8 and not operand.kept else 4.5
    assert sum(storages.values()) <= bits / 8 * (x.numel() + linear.weight.numel()) * 1.01


def test_nothing_is_kept_that_no_gradient_needs():
    linear = layer("clover", 256, 256)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(torch.randn(64, 256))  # the first layer: no grad_input, so no weight
        first = sum(t.numel() for t in saved)
        linear.weight.requires_grad_(False)
        saved.clear()
        linear(torch.randn(64, 256, requires_grad=True))  # a frozen layer: no grad_weight, so no input
    assert first == 64 * 256 * 9 // 16 + 1
    assert sum(t.numel() for t in saved) == 256 * 256 * 9 // 16 + 1


# --------------------------------------------------------------------------------------------------------------------
# Layers that share an input.


def qkv(method, sizes=(128, 64, 64)):
    return [layer(method, 64, size) for size in sizes]


def stacked(layers, method):
    """One layer whose weight is the others', one below the other."""
    linear = nf.QuantLinear(64, sum(m.out_features for m in layers), method=method)
    with torch.no_grad():
        linear.weight.copy_(torch.cat([m.weight for m in layers]))
    return linear


def run_with(function, x, weights, e, seed=3):
    torch.manual_seed(seed)
    y = function(x)
    return y.detach(), *torch.autograd.grad(y, (x, *weights), e)


@pytest.mark.parametrize("method", ["bf16", "nvidia", "clover", "clover_fp8_forward"])
def test_fused_layers_are_one_layer_to_the_bit(method):
    layers, x, e = qkv(method), torch.randn(32, 64, requires_grad=True), torch.randn(32, 256)
    one = stacked(layers, method)
    got = run_with(lambda x: torch.cat(fused_linear(x, *layers), -1), x, [m.weight for m in layers], e)
    want = run_with(one, x, [one.weight], e)
    for name, g, w in zip(("output", "grad_input", "grad_weight"), (*got[:2], torch.cat(got[2:])), want):
        assert torch.equal(g, w), name


def test_fused_plain_layers_are_those_layers():
    layers = [torch.nn.Linear(64, n, bias=False) for n in (128, 64)]
    x = torch.randn(2, 16, 64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = fused_linear(x, *layers), [m(x) for m in layers]
    for g, w in zip(got, want):
        assert g.dtype == torch.bfloat16 and g.shape == w.shape
        assert relative_square_error(g, w) < 1e-5  # sums in another order, rounded to BF16


def entered(context):
    context.__enter__()
    return context


@pytest.mark.parametrize(
    "change",
    [
        lambda layers: layers[1].set_recipe(nf.get_recipe("nvidia")),
        lambda layers: layers[2].register_parameter("bias", torch.nn.Parameter(torch.randn(64))),
        lambda layers: layers[0].register_forward_hook(lambda m, args, y: y * 2),
        lambda layers: entered(nf.full_precision(layers[1])),
        lambda layers: entered(nf.per_token_scale(layers[1])),
        lambda layers: setattr(layers[1], "forward", lambda x: x),
    ],
    ids=["recipe", "bias", "hook", "full precision", "per token", "forward"],
)
def test_layers_that_are_not_alike_are_computed_one_by_one(change):
    layers, x = qkv("clover"), torch.randn(32, 64)
    held = change(layers)  # noqa: F841  A context that nobody holds is left.
    for got, linear in zip(fused_linear(x, *layers), layers):
        assert torch.equal(got, linear(x))
    for got, linear in zip(fused_linear(x, *layers, head_dim=32), layers):
        assert got.shape[1:] == (linear.out_features // 32, 32) and torch.equal(got.flatten(1), linear(x))


# --------------------------------------------------------------------------------------------------------------------
# Randomness.


@pytest.mark.parametrize("method", METHOD_TABLE)
def test_evaluation_draws_nothing(method):
    """Or an evaluation between two steps would change the run."""
    linear, x = layer(method), torch.randn(16, 128, requires_grad=True)
    trained, state = linear(x).detach(), torch.get_rng_state()
    with torch.no_grad():
        want = linear(x)
    assert linear.recipe.output.random or torch.equal(trained, want)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(linear(x), want)
        assert torch.equal(torch.get_rng_state(), state)


# --------------------------------------------------------------------------------------------------------------------
# Bad values, bad layers, what is printed.


@pytest.mark.parametrize("method", TRAINING)
def test_bad_values_reach_the_loss(method):
    linear = layer(method)
    for bad in (math.nan, math.inf):
        x, e = torch.randn(16, 128), torch.randn(16, 128)
        x[3, 5] = e[0, 0] = bad
        assert not torch.isfinite(linear(x)).any()
        _, grad_input, grad_weight = backward(linear, torch.randn(16, 128), e)
        assert not torch.isfinite(grad_input).any() and not torch.isfinite(grad_weight).any()


@pytest.mark.parametrize("method", [*TRAINING, "fp8", "clover_fp8_forward"])
def test_zero_weights_inputs_and_gradients(method):
    """nanochat starts its output projections at zero."""
    linear = layer(method)
    torch.nn.init.zeros_(linear.weight)
    x, e = torch.randn(16, 128), torch.randn(16, 128)
    y, grad_input, grad_weight = backward(linear, x, e)
    assert (y == 0).all() and (grad_input == 0).all()
    assert relative_square_error(grad_weight, e.T @ x) < 0.15
    y, grad_input, grad_weight = backward(layer(method), torch.zeros(16, 128), torch.zeros(16, 128))
    assert (y == 0).all() and (grad_input == 0).all() and (grad_weight == 0).all()


# --------------------------------------------------------------------------------------------------------------------
# torch.compile.


def compiled_and_eager(method, backend, layers, autocast):
    model = torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.ReLU(), layer(method, bias=True))])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(48, 128)

    def run(f):
        torch.manual_seed(3)
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = f(x)
        y.float().square().sum().backward()
        return [y, *[p.grad.clone() for p in model.parameters()]]

    return run(compiled), run(model)


@pytest.mark.parametrize(
    "method, backend, layers, autocast",
    [
        ("nvidia", "aot_eager", 1, True),
        pytest.param("clover", "aot_eager", 2, False, marks=pytest.mark.slow),
        (EIGHT_BITS, "eager", 1, False),
        pytest.param("clover_search", "eager", 1, True, marks=pytest.mark.slow),
    ],
)
def test_compiles_into_one_graph_with_the_same_bits(method, backend, layers, autocast):
    """aot_eager also traces the backward pass, under the autocast of the forward, which must not reach the rotations;
    and it decides which draws belong to which pass, which must not draw the same seed twice."""
    got, want = compiled_and_eager(method, backend, layers, autocast)
    for i, (a, b) in enumerate(zip(got, want)):
        assert torch.equal(a, b), f"{i}: relative square error {relative_square_error(a, b):.1e}"


def test_a_cpu_leaves_the_layers_out_of_the_graph_and_says_so(monkeypatch):
    """To compile two takes a C++ compiler minutes. What is around them is compiled; the numbers are the same."""
    monkeypatch.setenv("NVFP4_COMPILE", "")
    dispatch.say_what_is_left_out.cache_clear()
    torch.compiler.reset()
    model = torch.nn.ModuleList([nf.QuantLinear(32, 64), nf.QuantLinear(64, 32)])

    def function(x):
        return model[1]((model[0](2 * x)).relu()).sin()

    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    compiled = torch.compile(function, backend=backend)
    results = []
    for each in (function, compiled):
        torch.manual_seed(0)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            y = each(x)
        y.square().sum().backward()
        told = sum("leaves the quantized layers alone" in str(w.message) for w in said)
        results.append((y.detach(), model[0].weight.grad, told))
        model.zero_grad()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert (results[0][2], results[1][2]) == (0, 1)
    assert sorted(graphs) == [["<built-in function mul>"], ["relu"], ["sin"]]
    torch.compiler.reset()


def test_compiled_layers_follow_full_precision_and_a_new_recipe():
    model = torch.nn.Sequential(layer("fig2_1x16_rtn"))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(16, 128)
    quantized = compiled(x)
    with nf.full_precision(compiled):
        plain = compiled(x)
    assert torch.equal(plain, torch.nn.functional.linear(x, model[0].weight))
    assert torch.equal(compiled(x), quantized) and not torch.equal(plain, quantized)
    model[0].set_recipe(nf.get_recipe("fig2_1x16_four_over_six"))
    assert torch.equal(compiled(x), model(x)) and not torch.equal(compiled(x), quantized)


@pytest.mark.parametrize("method", ["fp8", "clover"])
def test_the_largest_value_of_an_input_may_come_from_its_maker(method):
    """The right one changes no bit, and a wrong one shows that it is taken."""
    torch.manual_seed(0)
    linear, x = nf.QuantLinear(64, 32, method=method), torch.randn(16, 64)
    want, amax = linear(x), x.abs().amax()
    assert torch.equal(linear(x, amax), want) and not torch.equal(linear(x, 3 * amax), want)


# --------------------------------------------------------------------------------------------------------------------
# Faults that no other test finds


@pytest.mark.parametrize("method", ["clover", "fp8"])
def test_gradients_are_rounded_to_the_dtypes_of_their_tensors_alone(method):
    """Under autocast to BF16 the gradients of FP32 tensors are the FP32 sums of the GEMMs."""
    linear, x, e = layer(method), torch.randn(40, 128).requires_grad_(), torch.randn(40, 128).bfloat16()
    sums = []
    for context in (contextlib.nullcontext(), nf.accumulate_gradients(linear)):
        linear.weight.grad = x.grad = None
        torch.manual_seed(7)
        with context, torch.autocast("cpu", dtype=torch.bfloat16):
            linear(x).backward(e)
        sums.append(linear.weight.grad)
    assert torch.equal(*sums)
    for grad in (sums[0], x.grad):
        assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float())


@pytest.mark.parametrize("method", ["clover", "fp8", "nvidia"])
def test_scales_of_tokens_do_not_take_the_amax_of_the_input(method):
    linear, x = layer(method), torch.randn(8, 128) * torch.logspace(-3, 3, 8)[:, None]
    first, y = torch.nn.Identity(), torch.relu(x).square()
    with nf.per_token_scale(linear), torch.no_grad():
        assert torch.equal(linear(x, x.abs().amax()), linear(x))
        assert torch.equal(relu_squared_linear(x, first, linear), linear(y))
        assert torch.equal(linear(x)[0], linear(x[:1])[0])


@pytest.mark.parametrize("which", ["grad_input", "grad_weight"])
def test_raw_operands_are_rotated_like_their_partners(which):
    """An operand that the forward pass has rotated, and the grad_output that the backward pass rotates."""
    rotated = Gemm(Operand("sr"), Operand("rtn", raw=True), 128)
    linear, x, e = layer(Recipe("raw_rotated", **{which: rotated})), torch.randn(256, 128), torch.randn(256, 128)
    _, grad_x, grad_w = backward(linear, x, e)
    got, want = (grad_x, e @ linear.weight) if which == "grad_input" else (grad_w, e.T @ x)
    assert relative_square_error(got, want) < 0.1
