"""Rounding with error feedback: against GPTQ's own formula, where it is plain rounding, and as a layer's weight."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import gram_matrices
from nanochat_fp4.nvfp4.feedback import (
    COLUMNS,
    DAMPING,
    factor_for,
    feedback_factor,
    products_of_rows,
    round_with_feedback,
)
from nanochat_fp4.nvfp4.format import swizzle_scales
from nanochat_fp4.nvfp4.fused import fused_linear
from nanochat_fp4.nvfp4.makers import Quantization, make_with_feedback, quantize_operand
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

NAMES = ["rtn", "four_over_six", "scale_search_6"]


def correlated(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs with a mean and a falling spectrum, as those of a trained layer have."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=generator) / torch.arange(1, width + 1)[:, None] ** 0.5
    return torch.randn(tokens, width, generator=generator) @ mix + torch.randn(width, generator=generator)


def same(a, b) -> bool:
    pairs = zip(
        (a.codes, a.scales.view(torch.uint8), a.tensor_scale), (b.codes, b.scales.view(torch.uint8), b.tensor_scale)
    )
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("rounding", NAMES)
def test_uncorrelated_inputs_give_plain_rounding_to_the_bit(rounding):
    weights = torch.randn(2, 48, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 3.3]).view(
        2, 1, 1
    )
    factor = feedback_factor(2.5 * torch.eye(64))
    rounded = round_with_feedback(weights, torch.stack([factor, factor]), ROUNDINGS[rounding])
    assert all(same(got, nf.quantize(w, rounding)) for got, w in zip(rounded, weights))


@pytest.mark.parametrize("columns", [80, 2 * COLUMNS + 16])
def test_it_is_gptq(columns):
    """The published form: what is left of the weight is updated after each block, by a Cholesky factor of H^-1."""
    w = torch.randn(32, columns, generator=torch.Generator().manual_seed(1))
    w[0, 0] = 8.0  # amax, also of what feedback makes of the rest
    s = products_of_rows(correlated(500, columns)) / 500
    h = (s + DAMPING * s.diagonal().mean() * torch.eye(columns)).double()
    u = torch.linalg.cholesky(torch.linalg.inv(h)).mT  # H^-1 = U^T U
    left, want = w.double(), torch.zeros(32, columns)
    for b in range(0, columns, 16):
        with_amax = torch.cat([left[:, b : b + 16].float(), torch.full((32, 16), 8.0)], 1)
        want[:, b : b + 16] = nf.quantize(with_amax, "four_over_six").dequantize()[:, :16]
        error = (left[:, b : b + 16] - want[:, b : b + 16]) @ torch.linalg.inv(u[b : b + 16, b : b + 16])
        left[:, b + 16 :] -= error @ u[b : b + 16, b + 16 :]
    got = round_with_feedback(w[None], feedback_factor(s)[None], ROUNDINGS["four_over_six"])[0].dequantize()
    torch.testing.assert_close(got, want)


def test_the_outputs_error_is_halved_on_inputs_it_has_not_seen():
    x, new = correlated(4096, 128)[:2048], correlated(4096, 128)[2048:]
    w = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    factor = feedback_factor(products_of_rows(x) / len(x))
    with_feedback = round_with_feedback(w[None], factor[None], ROUNDINGS["rtn"])[0].dequantize()
    plain = nf.quantize(w, "rtn").dequantize()
    assert (new @ (with_feedback - w).T).norm() ** 2 < 0.5 * (new @ (plain - w).T).norm() ** 2
    assert (with_feedback - w).norm() ** 2 < 1.6 * (plain - w).norm() ** 2


def test_what_grows_beyond_the_largest_scale_is_clipped():
    factor = torch.zeros(32, 32)
    factor[:16, 16:] = 1e4
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    t = round_with_feedback(w[None], factor[None], ROUNDINGS["rtn"])[0]
    assert torch.isfinite(t.dequantize()).all() and t.dequantize().abs().max() <= w.abs().max() * 1.001


@pytest.mark.parametrize("broken", [0.0, float("nan"), float("inf")])
def test_without_a_gram_matrix_there_is_no_feedback(broken):
    assert not feedback_factor(torch.full((32, 32), broken)).any()


class Model(nn.Module):
    fused_linears = ("q", "k")

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(128, 64, bias=False), nn.Linear(128, 64, bias=False)
        self.out = nn.Linear(128, 128, bias=False)

    def forward(self, x):
        return self.out(torch.cat(fused_linear(x, self.q, self.k), -1).relu())


def passes(model, forward, count=2):
    torch.manual_seed(1)
    model.zero_grad()
    outputs = [forward(x) for x in correlated(64, 128).view(count, -1, 128)]
    for y in outputs:
        y.square().mean().backward()
    return [*outputs, *(p.grad.clone() for p in model.parameters())]


def trained_model() -> nn.Module:
    torch.manual_seed(0)
    model = nf.convert(Model(), "clover_feedback", verbose=False)
    nf.update_gram_matrices(model, lambda: model(correlated(512, 128)))
    return model


def test_layers_use_it_with_and_without_weights_quantized_once():
    model = trained_model()
    want = passes(model, model)
    with nf.quantize_weights_once(model):
        got = passes(model, model)
        q = model.q.prepared_weight((model.q, model.k)).dequantize()
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    w = torch.cat([model.q.weight, model.k.weight]).detach()
    plain = nf.quantize(w, "scale_search_6").dequantize()
    x = correlated(512, 128)
    assert (x @ (q - w).T).norm() ** 2 < 0.6 * (x @ (plain - w).T).norm() ** 2


def test_a_row_of_ones_own_is_used_also_under_a_name_of_the_table():
    own = replace(ROUNDINGS["rtn"], candidates=(1.0, 1.5, 0.75))
    w, factor = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)), feedback_factor(torch.eye(64))
    how = Quantization(own, factor=factor, make=make_with_feedback)
    want = round_with_feedback(w[None], factor[None], own)[0].dequantize()
    assert torch.equal(quantize_operand(w, how, keep_codes=True).fp32(), want)
    assert not torch.equal(want, nf.quantize(w, "rtn").dequantize())


def test_compiled_layers_use_it_and_are_not_compiled_again_for_new_moments():
    """Nor does a look through compiled code compile anything."""
    recipe = nf.Recipe("feedback_alone", output=nf.get_recipe("clover_feedback").output)
    model, other = (nf.convert(nn.Sequential(nn.Linear(32, 32)), recipe, verbose=False) for _ in range(2))
    torch._dynamo.reset()
    graphs, x, outputs = [], correlated(32, 32), []
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (3, 4):
            for looked_at, forward in ((model, compiled), (other, other)):
                inputs = [correlated(64, 32, seed), correlated(32, 32)]
                nf.update_gram_matrices(looked_at, lambda f=forward, inputs=inputs: [f(x) for x in inputs])
            assert torch.equal(model[0].gram_matrix, other[0].gram_matrix)
            with nf.quantize_weights_once(model):
                outputs.append(compiled(x).detach())
                assert torch.equal(outputs[-1], model(x)) and len(graphs) == 1
    assert not torch.equal(*outputs)
    assert torch.equal(compiled(x), model(x))  # makes the codes itself


def test_moments_are_an_average_and_inputs_that_are_not_finite_leave_it():
    model = nf.convert(Model(), "clover_feedback", verbose=False)
    assert "until training" in str(model.nf_report)
    x = [correlated(64, 128, seed) for seed in range(2)]
    for inputs in (*x, torch.full((16, 128), float("nan"))):
        nf.update_gram_matrices(model, lambda inputs=inputs: model(inputs))
    a, b = (products_of_rows(inputs) / len(inputs) / inputs.square().mean() for inputs in x)
    torch.testing.assert_close(model.q.gram_matrix.float(), 0.8 * a + 0.2 * b, rtol=1e-3, atol=1e-3)  # in FP16
    assert nf.gram_state(model).keys() == {"q", "out"}
    other = nf.convert(Model(), "clover", verbose=False)
    nf.update_gram_matrices(other, lambda: other(x[0]))
    assert not nf.gram_state(other)


def test_a_look_frees_the_sums_of_layers_one_after_the_other(monkeypatch):
    """At d32 the sums of all layers take 8 GiB, and the new matrices as much."""
    sums, alive = [], []

    def products(rows: torch.Tensor) -> torch.Tensor:
        made = products_of_rows(rows)
        sums.append(weakref.ref(made))
        return made

    def factor(gram: torch.Tensor) -> torch.Tensor:
        alive.append(sum(made() is not None for made in sums))
        return factor_for(gram)

    monkeypatch.setattr(gram_matrices, "products_of_rows", products)
    monkeypatch.setattr(gram_matrices, "factor_for", factor)
    model = nf.convert(nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), "clover_feedback", verbose=False)
    for _ in range(2):
        nf.update_gram_matrices(model, lambda: model(correlated(64, 32)))
    assert alive == 2 * [4, 3, 2, 1]


def test_all_calls_of_a_layer_count_by_their_tokens():
    """A model called on several batches, and a layer that a model calls twice; inputs that are shared stay shared."""

    class Apart(Model):
        fused_linears = ()

        def forward(self, x):
            return self.out(torch.cat([self.q(x), self.k(x)], -1))

    batches = [correlated(48, 128), 3 * correlated(16, 128, 1)]
    model, whole = (nf.convert(Apart(), "clover_feedback", verbose=False) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    nf.update_gram_matrices(model, lambda: [model(x) for x in (*batches, batches[0][:0])])
    nf.update_gram_matrices(whole, lambda: whole(torch.cat(batches)))
    assert model.q.gram_matrix is model.k.gram_matrix and model.q.feedback_factor is model.k.feedback_factor
    for name, gram in nf.gram_state(model).items():
        # in FP16, of products that are added up in another order
        torch.testing.assert_close(gram, nf.gram_state(whole)[name], rtol=2e-3, atol=2e-3)


TWO_RANKS = """
import torch, nanochat_fp4 as nf
from nanochat_fp4.common import compute_cleanup, compute_init
_, rank, _, _, _ = compute_init("cpu")
model = nf.convert(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), "clover_feedback", verbose=False)
nf.update_gram_matrices(model, lambda: model(torch.tensor(16 * [1.0] + 16 * [[1.0, 3.0][rank]]).expand(16, 32)))
print((3 * model[0].gram_matrix.float()).round(decimals=2).unique().tolist())
experts = nf.convert(torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4)), "clover_feedback", verbose=False)
x = torch.eye(32)
def routed():
    experts[0](x[:16])
    experts[1 + rank](x[rank : rank + 1])  # the second for the first rank, the third for the other
nf.update_gram_matrices(experts, routed)
print([torch.nonzero(e.gram_matrix.diagonal()).flatten().tolist() for e in experts[:3]], experts[3].gram_matrix)
compute_cleanup()
"""


def test_moments_are_the_mean_over_ranks(run_ranks):
    """Of 1, 1, 1 and 1, 3, 9, where the mean square is 3. A layer that one rank alone has called is that rank's."""
    want = ["[1.0, 2.0, 5.0]", f"[{list(range(16))}, [0], [1]] None"]
    assert [out.strip().splitlines() for out in run_ranks(TWO_RANKS)] == 2 * [want]


def test_a_look_at_the_inputs_wants_a_function_that_calls_the_model():
    model = nf.convert(nn.Sequential(nn.Linear(32, 32)), "clover_feedback", verbose=False)
    x = correlated(64, 32)
    for wrong in ((model, x), (model, None), (None, lambda: model(x))):
        with pytest.raises(ValueError, match="update_gram_matrices: got "):
            nf.update_gram_matrices(*wrong)
    with pytest.raises(ValueError, match="none of the 1 layers"):
        nf.update_gram_matrices(model, lambda: x)
    assert not nf.gram_state(model)
    for wrong in (None, [x], {"0": 3.0}):
        with pytest.raises(ValueError, match="load_gram_state: got .* gram_state"):
            nf.load_gram_state(model, wrong)


def test_the_gram_matrices_are_saved_and_loaded_apart_from_the_model(tmp_path):
    model = trained_model()
    assert model.state_dict().keys() == Model().state_dict().keys() and not list(model.buffers())
    torch.save([model.state_dict(), nf.gram_state(model)], tmp_path / "saved.pt")
    weights, gram = torch.load(tmp_path / "saved.pt")
    want = passes(model, model)
    for order in (0, 1):  # before and after convert
        other = Model()
        for step in (order, 1 - order):
            if step:
                nf.convert(other, "clover_feedback", verbose=False)
            else:
                nf.load_gram_state(other, gram)
        other.load_state_dict(weights)
        assert all(torch.equal(a, b) for a, b in zip(passes(other, other), want))
    nf.update_gram_matrices(other, lambda: other(correlated(64, 128)))
    nf.update_gram_matrices(model, lambda: model(correlated(64, 128)))
    assert all(torch.equal(a, b) for a, b in zip(passes(other, other), passes(model, model)))
    assert torch.equal(gram["q"], torch.load(tmp_path / "saved.pt")[1]["q"])  # not changed in place
    for wrong in ({"nobody": gram["q"]}, {"q": gram["q"][:, :16]}, {"q": gram["q"].long()}):
        with pytest.raises(ValueError, match="load_gram_state: '(q|nobody)' has "):
            nf.load_gram_state(other, wrong)


@pytest.mark.parametrize(
    "rounding, dtype, tiles", [("rtn", torch.bfloat16, True), ("scale_search_6", torch.float32, False)]
)
def test_the_kernel_equals_the_reference_to_the_bit(rounding, dtype, tiles, monkeypatch):
    """Of two layers, one row more than a program has, and two groups of columns of which the last is not whole (both
    smaller than in use, for the interpreter takes seconds for 128 columns)."""
    pytest.importorskip("triton")
    from nvfp4_kernels.feedback import ROWS

    monkeypatch.setattr("nanochat_fp4.nvfp4.feedback.COLUMNS", 48)
    columns, rounding = 80, ROUNDINGS[rounding]
    w = torch.randn(2, ROWS + 1, columns, generator=torch.Generator().manual_seed(4)).to(dtype)
    factors = [feedback_factor(products_of_rows(correlated(500, columns, seed)) / 500).half() for seed in (0, 1)]
    factors[0] *= 300.0  # beyond the largest scale
    results = []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        results.append(round_with_feedback(w, factors, rounding, tiles=tiles))
    assert all(same(got, want) for got, want in zip(*results))
    if tiles:  # of 33 x 5 scales
        row_major = round_with_feedback(w, factors, rounding)
        assert all(
            torch.equal(r.scales.float(), swizzle_scales(v.scales).float()) for r, v in zip(results[1], row_major)
        )
        assert results[0][1].scales.shape == (1024,)


def test_the_first_factor_is_no_reason_to_compile_again(monkeypatch):
    """A step makes the weights' codes outside of the graph. The first Gram matrix is there after the first step."""
    from torch._dynamo.testing import CompileCounter

    monkeypatch.setenv("NVFP4_COMPILE", "1")
    layer, x, graphs = nf.QuantLinear(32, 16, method="clover_feedback"), torch.randn(64, 32), CompileCounter()
    compiled = torch.compile(layer, backend=graphs)
    for _ in range(3):
        with nf.quantize_weights_once(layer), torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
        nf.update_gram_matrices(layer, lambda: layer(x))
    assert graphs.frame_count == 1
