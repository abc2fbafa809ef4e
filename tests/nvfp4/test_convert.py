"""The patch layer: what is converted, what is left alone and said to be, shared parameters, contexts, added methods."""

import copy
import io
import pickle

import pytest
import torch
from _assertions import relative_square_error
from _samples import Fused
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import layer
from nanochat_fp4.nvfp4.recipes import WEIGHT


class CastingLinear(nn.Linear):
    """A subclass that only changes dtype handling, as nanochat's own does."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.c_attn = CastingLinear(width, width, bias=False)
        self.gate = nn.Linear(12, 2, bias=False)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x):
        x = x + self.c_attn(x) * self.gate(x[..., :12]).mean(-1, keepdim=True).sigmoid()
        return x + self.mlp["c_proj"](self.mlp["c_fc"](x).relu().square())


class Model(nn.Module):
    """The layout of a small GPT."""

    def __init__(self, blocks=3, width=64):
        super().__init__()
        self.wte = nn.Embedding(16, width)
        self.h = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.lm_head = nn.Linear(width, 16, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(nn.functional.rms_norm(x, (x.shape[-1],)))


TOKENS = torch.arange(32).view(2, 16) % 16
GATE = "in_features is 12, expected a multiple of 16"
HEAD = "the output head keeps its own precision"


def converted(model, *args, **kw):
    return nf.convert(model, *args, verbose=False, **kw)


def kinds(model):
    return {name for name, m in model.named_modules() if isinstance(m, nf.QuantLinear)}


def in_block(*blocks):
    return {f"h.{i}.{name}" for i in blocks for name in ("c_attn", "mlp.c_fc", "mlp.c_proj")}


# --------------------------------------------------------------------------------------------------------------------
# What is converted, and what is not.


def test_converts_in_place_and_reports_the_rest(capsys):
    model = Model()
    assert nf.convert(model, "clover") is model
    assert kinds(model) == set(model.nf_report.converted) == in_block(0, 1, 2)
    assert dict(model.nf_report.left_alone) == {"lm_head": HEAD, **{f"h.{i}.gate": GATE for i in range(3)}}
    assert type(model.lm_head) is nn.Linear and type(model.h[0].gate) is nn.Linear
    printed = capsys.readouterr().out
    assert printed.strip() == str(model.nf_report)
    assert "9 linear layers" in printed and f"{HEAD} (lm_head)" in printed
    assert f"{GATE} (h.0.gate, h.1.gate, h.2.gate)" in printed
    converted(model, "clover")
    assert capsys.readouterr().out == ""


def test_print_model_shows_the_recipe():
    assert "bias=False, method=clover)" in repr(converted(Model()))


def test_parameters_are_the_same_objects():
    """So that an optimizer made before convert goes on working."""
    model = Model()
    before = dict(model.named_parameters())
    modules = dict(model.named_modules())
    converted(model)
    assert {k: id(v) for k, v in model.named_parameters()} == {k: id(v) for k, v in before.items()}
    assert all(m is modules[name] for name, m in model.named_modules())
    optimizer = torch.optim.SGD(before.values(), lr=0.1)
    old = model.h[1].mlp["c_fc"].weight.detach().clone()
    model(TOKENS).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.h[1].mlp["c_fc"].weight, old)


@pytest.mark.parametrize("skip", [["h.0.*"], "h.0*", ("h.0.c_attn", "h.0.mlp")])
def test_skip_patterns_name_layers_or_what_holds_them(skip):
    model = converted(Model(), skip=skip)
    assert kinds(model) == in_block(1, 2)
    assert "skip pattern 'h.0" in dict(model.nf_report.left_alone)["h.0.mlp.c_fc"]
    assert kinds(converted(Model(blocks=11), skip=("h.1",))) == in_block(*range(11)) - in_block(1)  # and not h.10


@pytest.mark.parametrize("pattern", ["h.3", "c_proj", ""])
def test_a_pattern_that_matches_no_linear_layer_is_an_error(pattern):
    model = Model()
    with pytest.raises(ValueError, match=f"skip pattern '{pattern}' .* h.0") as e:
        converted(model, skip=("h.0", pattern))
    assert "\n" not in str(e.value)
    assert not kinds(model)  # nothing half done


@pytest.mark.parametrize("first, last, left", [(1, 0, {1, 2}), (0, 1, {0, 1}), (1, 1, {1}), (0, 0, {0, 1, 2})])
def test_first_and_last_blocks_stay(first, last, left):
    model = converted(Model(), "nvidia", keep_first_blocks=first, keep_last_blocks=last)
    assert kinds(model) == in_block(*left)
    if first:
        assert "first or last block" in dict(model.nf_report.left_alone)["h.0.c_attn"]


def test_a_method_can_keep_the_last_blocks():
    """nvidia_full: 15% of the blocks, the last, at least one and not all, also where they were converted before."""
    for blocks, left in ((1, 1), (2, 1), (3, 2), (8, 7), (20, 17)):
        model = converted(converted(Model(blocks=blocks), "clover"), "nvidia_full")
        quantized = {n for n, m in model.named_modules() if isinstance(m, nf.QuantLinear) and m.recipe.quantizes}
        assert quantized == in_block(*range(left)), blocks
    assert kinds(converted(Model(), "nvidia_full", keep_last_blocks=2)) == in_block(0)
    assert isinstance(converted(nn.Sequential(nn.Linear(16, 16)), "nvidia_full")[0], nf.QuantLinear)


def test_blocks_are_those_of_the_largest_stack():
    model = nn.ModuleDict({"small": nn.ModuleList([nn.Linear(16, 16)]), "model": Model(blocks=12)})
    converted(model, keep_first_blocks=2, keep_last_blocks=1)
    kept = {name for name, reason in model.nf_report.left_alone if "block" in reason}
    assert kept == {f"model.{n}" for i in (0, 1, 11) for n in in_block(i)}  # and not 10


@pytest.mark.parametrize("first, last", [(2, 2), (-1, 0), (0, 4)])
def test_more_blocks_than_there_are(first, last):
    with pytest.raises(ValueError, match="cannot keep"):
        converted(Model(), keep_first_blocks=first, keep_last_blocks=last)


class Scaled(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


class Lazy(CastingLinear):
    def helper(self):
        return 1


def test_subclasses():
    """Replaced if they override forward alone; anything with state or methods of its own is left alone."""
    model = nn.ModuleDict(
        {
            "casting": CastingLinear(16, 16, bias=False),
            "scaled": Scaled(16, 16),
            "helper": Lazy(16, 16),
            "attention": nn.MultiheadAttention(16, 2),
            "weight_norm": nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
            "bilinear": nn.Bilinear(16, 16, 16),
        }
    )
    converted(model)
    assert kinds(model) == {"casting"}
    reasons = dict(model.nf_report.left_alone)
    assert set(reasons) == {"scaled", "helper", "attention.out_proj", "weight_norm"}
    assert "does not call it" in reasons.pop("attention.out_proj")
    assert all("nn.Linear" in reason for reason in reasons.values())


def test_a_shared_layer_is_converted_once():
    model = nn.ModuleDict({"a": nn.Linear(16, 16)})
    model["b"] = model["a"]
    assert converted(model).nf_report.converted == ["a"]


def test_converting_again_changes_the_method():
    model = converted(Model(), "clover")
    converted(model, "bf16")
    assert {m.recipe.name for m in model.modules() if isinstance(m, nf.QuantLinear)} == {"bf16"}
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, nf.QuantLinear):
            module.__class__ = nn.Linear
    assert torch.equal(model(TOKENS), plain(TOKENS))


# --------------------------------------------------------------------------------------------------------------------
# State dicts, copies, meta tensors.


def test_state_dicts_are_interchangeable():
    plain, ours = Model(), converted(Model())
    assert list(plain.state_dict()) == list(ours.state_dict())
    ours.load_state_dict(plain.state_dict())
    with nf.full_precision(ours):
        assert torch.equal(ours(TOKENS), plain(TOKENS))
    back = Model()
    back.load_state_dict(ours.state_dict())
    assert torch.equal(back(TOKENS), plain(TOKENS))


def test_a_converted_model_survives_saving_and_copying():
    model = converted(Model())
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    for twin in (torch.load(whole, weights_only=False), pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(TOKENS), model(TOKENS)) and kinds(twin) == kinds(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(TOKENS), model(TOKENS))


def test_meta_tensors():
    """nanochat builds its model on the meta device, then gives it memory and weights."""
    with torch.device("meta"):
        model = Model()
    converted(model)
    assert kinds(model) == in_block(0, 1, 2)
    assert all(p.is_meta for p in model.parameters())
    source = converted(Model())
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    assert torch.equal(model(TOKENS), source(TOKENS))


def test_hooks_and_training_mode_survive():
    model, calls = Model().eval(), []
    model.h[0].c_attn.register_forward_hook(lambda *_: calls.append(1))
    converted(model)
    model(TOKENS)
    assert calls and not model.h[0].c_attn.training


# --------------------------------------------------------------------------------------------------------------------
# Methods, contexts.


def test_full_precision_is_a_context():
    model = converted(Model())
    plain = Model()
    plain.load_state_dict(model.state_dict())
    quantized, exact = model(TOKENS), plain(TOKENS)
    assert not torch.equal(quantized, exact)
    with nf.full_precision(model):
        assert torch.equal(model(TOKENS), exact)
    with pytest.raises(KeyError), nf.full_precision(model):
        raise KeyError
    assert torch.equal(model(TOKENS), quantized)


def test_full_precision_with_master_weights():
    """FP32 weights under BF16 activations, without autocast: the weights follow, as in nanochat's newest."""
    model = converted(Model())
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    layer = model.h[0].c_attn
    with nf.full_precision(model):
        assert torch.equal(layer(x), nn.functional.linear(x, layer.weight.bfloat16()))


def test_per_token_scale_makes_tokens_independent():
    """A token alone, in a prompt, or next to a stranger with values 1000 times larger: the same result."""
    model = converted(nn.Linear(64, 64, bias=False), "clover")
    x = torch.randn(5, 64)
    batch = torch.cat((x, 1000 * torch.randn(3, 64)))
    with nf.per_token_scale(model), torch.no_grad():
        together = model(batch)[:5]
        alone = torch.cat([model(x[i : i + 1]) for i in range(5)])
    # The same codes; a matrix library may sum one row in another order than eight.
    assert torch.allclose(together, alone, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(batch)[:5], model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("method, backward", [("clover", True), ("clover", False), ("fp8", True), ("nvidia", True)])
def test_gradients_with_a_scale_per_token(monkeypatch, kernels, method, backward):
    """The gradient of the weight knows each token's scale. Of E^T X with X of 1 and 1000 it was off by a factor."""
    monkeypatch.setenv("NVFP4_KERNELS", kernels)
    model = converted(nn.Linear(64, 48, bias=False), method, backward=backward)
    x, e = torch.randn(32, 64), torch.randn(32, 48)
    x[1:] *= 1000
    with nf.per_token_scale(model):
        model(x).backward(e)
    # Squares of the errors of two operands of 4 bits are 0.03 together, of a wrong scale 1 and more.
    assert relative_square_error(model.weight.grad, e.T @ x) < 0.1


# --------------------------------------------------------------------------------------------------------------------
# Weights quantized once for several passes.


def passes(model, forward, count=3):
    """Outputs and accumulated gradients of `count` passes."""
    torch.manual_seed(1)
    model.zero_grad()
    outputs = [forward(torch.randn(32, 64)) for _ in range(count)]
    for y in outputs:
        y.square().mean().backward()
    return [*outputs, *(p.grad.clone() for p in model.parameters())]


def counted(monkeypatch):
    """How often a weight is quantized: the operands with as many rows as a layer has output features."""
    calls, real = [], layer.quantize_operand

    def count(value, how, **kw):
        if isinstance(value, torch.Tensor) and value.shape[0] in (64, 96) and not kw.get("transpose"):
            if how.stream == WEIGHT:
                calls.append(value.shape)
        return real(value, how, **kw)

    monkeypatch.setattr(layer, "quantize_operand", count)
    return calls


@pytest.mark.parametrize("method", ["clover", "clover_fp8_forward", "fp8", "nvidia", "tetrajet_v2", "fig1e_sr", "bf16"])
def test_weights_quantized_once_change_no_bit(method, monkeypatch):
    model = converted(Fused(), method)
    want = passes(model, model)
    calls = counted(monkeypatch)
    with nf.quantize_weights_once(model):
        got = passes(model, model)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert len(calls) == (2 if nf.get_recipe(method).output.b.rounding else 0 if method == "bf16" else 6)


@pytest.mark.parametrize("how", ["add", "exchange", "replace", "data", "fused step"])
def test_weights_that_change_within_once_are_told(how):
    model = converted(Fused())
    owner = next(m for m in model.modules() if isinstance(m, nf.QuantLinear))
    weight = owner.weight
    with pytest.raises(RuntimeError, match="optimizer.step"):
        with nf.quantize_weights_once(model), torch.no_grad():
            if how == "add":
                weight += 1
            elif how == "exchange":
                torch.utils.swap_tensors(weight, torch.nn.Parameter(weight + 1))
            elif how == "replace":
                owner.weight = torch.nn.Parameter(weight + 1)
            elif how == "fused step":  # which counts no version
                torch.optim.SGD(torch.nn.Linear(8, 8).parameters(), lr=1.0).step()  # of another model
                torch.optim.AdamW(model.parameters(), fused=True).step()
            else:
                weight.data = weight + 1
    assert not model.q.contexts


def test_weights_made_in_inference_mode_are_quantized_once_too():
    """Inference tensors count no changes, and PyTorch raises an error for the question."""
    with torch.inference_mode():
        model = converted(Fused())
        want = model(torch.ones(2, 64))
        with nf.quantize_weights_once(model):
            assert torch.equal(model(torch.ones(2, 64)), want)


@pytest.mark.parametrize(
    "method, backend",
    [("fig2_1x16_four_over_six", "eager"), pytest.param("clover_search", "eager", marks=pytest.mark.slow)],
)
def test_compiled_code_takes_the_weights_of_each_step_and_is_not_compiled_again(method, backend):
    """Nor does code that is not compiled take those of the step before."""
    model = converted(Fused(), method)
    before = model.state_dict().keys()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            with nf.quantize_weights_once(model):
                results = passes(model, compiled), passes(model, model)
                assert model.state_dict().keys() == before
            want = passes(model, model)
            assert all(torch.equal(a, b) for got in results for a, b in zip(got, want))
            torch.optim.SGD(model.parameters(), lr=1.0).step()


def test_weights_quantized_once_take_four_and_a_half_bits():
    model = converted(Fused())
    with nf.quantize_weights_once(model):
        operands = [*model.q.prepared_weight((model.q, model.k)), *model.out.prepared_weight((model.out,))]
        assert [m.prepared_weight((m,)) for m in (model.q, model.k)] == [None, None]
        assert all(operand.decoded is None for operand in operands)
        assert sum(operand.nbytes for operand in operands) == 96 * 64 * 2 * 9 // 16 + 2 * 4
