"""Models of other people: what of them is converted, what is said of the rest, and that nothing is skipped silently."""

import functools
import warnings

import pytest
import torch
from _models import conv1d
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.export.weights import forward_weights
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4.convert import uncalled


def converted(model, method="clover", **kw):
    return nf.convert(model, method, verbose=False, **kw)


def calls(model, *args) -> set[str]:
    """Names of the quantized layers that a forward pass calls."""
    seen = set()
    hooks = [
        m.register_forward_pre_hook(lambda m, a, name=name: seen.add(name))
        for name, m in model.named_modules()
        if isinstance(m, nf.QuantLinear)
    ]
    model(*args)
    for hook in hooks:
        hook.remove()
    return seen


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def test_what_is_no_linear_layer_is_named_with_its_share():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2)
            self.layers = nn.ModuleList([Block(16)])
            self.experts = nn.Parameter(torch.zeros(8, 64, 64))
            self.embedding = nn.Embedding(1000, 16)

    report = converted(Mixture()).nf_report
    text = str(report)
    assert "warning: " in text
    assert "3-D weights (Mixture.experts)" in text
    assert "in_proj_weight of nn.MultiheadAttention" in text and "Embedding" not in text
    assert report.quantized + sum(report.others.values()) == pytest.approx(1)


def test_the_encoder_layer_of_torch_computes_in_eval_mode_what_it_trains():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model.load_state_dict(plain.state_dict())
    model = converted(model).eval()
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        assert calls(model, x) == set(model.nf_report.converted)
        assert not torch.allclose(model(x), plain(x), atol=1e-3)
    assert "fast path in eval mode of layers.0, layers.1" in str(model.nf_report)


def test_blocks_of_conv1d_count():
    """The stack with the most of them has the blocks that keep_last_blocks keeps."""
    blocks = nn.ModuleList(nn.Sequential(conv1d(nn.Linear(32, 32))) for _ in range(3))
    model = nn.ModuleDict({"tower": nn.ModuleList([nn.Linear(32, 32)]), "h": blocks})
    report = nf.convert(model, keep_last_blocks=1, verbose=False).nf_report
    assert report.converted == ["h.0.0", "h.1.0"], report.left_alone


def test_transformers_conv1d_is_a_linear_layer():
    """GPT-2's own class: the same outputs and gradients as the nn.Linear with the transposed weight."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    model = converted(nn.Sequential(conv1d(linear)))
    other = converted(nn.Sequential(linear))
    assert model.nf_report.converted == ["0"] and model.nf_report.quantized == 1
    assert ["save_pretrained" in str(m.nf_report) for m in (model, other)] == [True, False]
    x = torch.randn(16, 64)
    grads = []
    for m in (model, other):
        torch.manual_seed(1)
        y = m(x)
        y.square().sum().backward()
        grads.append((y, m[0].weight.grad))
    assert torch.equal(grads[0][0], grads[1][0]) and torch.equal(grads[0][1], grads[1][1].T)
    assert list(model.state_dict()) == ["0.weight", "0.bias"] and model[0].weight.shape == (64, 32)
    with nf.full_precision(model):
        assert torch.allclose(model(x), torch.nn.functional.linear(x, linear.weight, linear.bias), atol=1e-5)
    with nf.quantize_weights_once(model):
        assert torch.equal(model(x), grads[0][0])


def test_adapters_and_computed_weights_are_left_alone():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(32, 32)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16, bias=False)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(16, 32, bias=False)})

    computed = nn.Linear(32, 32)
    computed.weight_v = nn.Parameter(computed.weight.detach())
    del computed.weight
    computed.weight = computed.weight_v.detach()  # as torch.nn.utils.weight_norm leaves it
    hooked = nn.Linear(32, 32)
    hooked.forward = functools.partial(hooked.forward)  # as accelerate's hooks do
    model = nn.ModuleList([Adapted(), computed, hooked])
    left = dict(converted(model).nf_report.left_alone)
    assert model.nf_report.converted == ["0.base_layer"]
    assert left["0.lora_A.default"] == left["0.lora_B.default"] == "an adapter's low-rank factor"
    assert "weight norm" in left["1"] and "forward" in left["2"]


def test_a_head_with_an_adapter_is_a_head():
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base_layer = nn.Linear(32, 32)

    model = nn.ModuleDict({name: Adapted() for name in ("q_proj", "lm_head")} | {"table": nn.Embedding(7, 32)})
    assert converted(model).nf_report.converted == ["q_proj.base_layer"]


def test_a_row_does_not_depend_on_its_neighbours_in_eval_mode_unless_asked_to():
    torch.manual_seed(0)
    weights = nn.Linear(64, 64).state_dict()
    x = torch.randn(4, 64)
    loud = torch.cat([x[:3], 100 * x[3:]])
    for per_token in (True, False):
        model = converted(nn.Sequential(nn.Linear(64, 64)), per_token_in_eval=per_token)
        model[0].load_state_dict(weights)
        assert not torch.equal(model(x)[0], model(loud)[0])  # training has the method's scales
        with torch.no_grad():
            assert torch.equal(model.eval()(x)[0], model(loud)[0]) == per_token
        assert not torch.equal(model(x)[0], model(loud)[0])  # nor has a pass in eval mode that is differentiated


# ----------------------------------------------------------------------------------------------------------------------
# Methods that change in the course of a run


def train(model, steps, each=lambda done: None, forward=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(1)
    losses = []
    for step in range(steps):
        each(step / steps)
        loss = (forward or model)(torch.randn(8, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_phases_happen_in_a_foreign_loop_and_forgetting_them_is_said():
    def fresh(method):
        torch.manual_seed(0)
        return converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), method)

    model = fresh("clover_late")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        late = train(model, 10, lambda done: nf.set_progress(model, done))
    assert model[0].recipe.name == nf.get_recipe("clover_late").final.name
    assert fresh("clover_late")[0].recipe.name == "clover_late"
    clover = train(fresh("clover"), 10)
    assert late[:7] == clover[:7] and late[7] != clover[7]  # 70% of ten steps
    for compiled in (False, True):
        model = fresh("clover_late")
        with pytest.warns(UserWarning, match="clover_late .* nanochat_fp4.set_progress") as seen:
            train(model, 15, forward=torch.compile(model, backend="eager") if compiled else None)
        assert len(seen) == 1


# ----------------------------------------------------------------------------------------------------------------------
# Layers that are converted and not called


class ReadByAFunction(Block):
    """Two thirds of its quantized weights are those of `up`, which no forward pass calls."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(32, 32)

    def forward(self, x):
        up = nn.functional.linear(x, self.up.weight, self.up.bias)
        return self.last(self.down(up.relu()))


@pytest.fixture
def nothing_compiled():
    """The process as it is without the compiled code of other tests."""
    torch._dynamo.utils.counters.clear()


def test_weights_read_elsewhere_are_said_once_and_by_the_export(nothing_compiled):
    model = converted(ReadByAFunction())
    with pytest.warns(UserWarning, match=r"1 of 3 .* 40% .*\(up\).*skip") as seen:
        train(model, 15)
    assert len(seen) == 1
    assert any("(up)" in note for note in forward_weights(model)[1])
    model = converted(ReadByAFunction(), skip=["up"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, 7)
    assert not forward_weights(model)[1]


def test_layers_that_are_called_are_not_complained_of(nothing_compiled):
    """q, k and v as one layer, a layer that is compiled, and models that were converted again or trained by nobody."""
    gpt = converted(GPT(GPTConfig(sequence_len=8, vocab_size=64, n_layer=2, n_head=2, n_kv_head=2, n_embd=32)))
    gpt.init_weights()
    ids = torch.randint(64, (2, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(converted(nn.Sequential(converted(Block()))), 7)
        train(gpt, 7, forward=lambda x: gpt(ids, ids))
    assert not uncalled(gpt) and not uncalled(converted(ReadByAFunction()))
    model = converted(ReadByAFunction())
    model(torch.randn(8, 32))
    assert "(up)" in uncalled(model)
    torch.compile(model.last, backend="eager")(torch.randn(8, 32))  # Perhaps `up` was called in what is compiled.
    assert not uncalled(model)


def test_progress_is_checked():
    model = converted(nn.Sequential(nn.Linear(32, 32)), "clover_late")
    with pytest.raises(ValueError, match="from 0 to 1"):
        nf.set_progress(model, 50)
    for wrong in ("0.5", None, [0.5], torch.tensor([0.1, 0.2])):
        with pytest.raises(ValueError, match="set_progress: progress is "):
            nf.set_progress(model, wrong)
    assert nf.set_progress(model, 0.5) is False and nf.set_progress(model, 0.9) is True


def test_progress_reaches_a_model_inside_another():
    """DistributedDataParallel, torch.compile and averages of weights hold what was converted."""
    model = converted(nn.Sequential(nn.Linear(32, 32)), "clover_late")
    average = torch.optim.swa_utils.AveragedModel(model)
    for holder, inner in ((torch.compile(model), model), (nn.ModuleDict({"module": model}), model), (average, None)):
        layer = (inner or average.module)[0]
        for done in (0.9, 0.1):
            assert nf.set_progress(holder, done)
            assert layer.recipe.name == {0.9: "clover_search", 0.1: "clover_late"}[done]


def test_layers_of_another_method_keep_it():
    """Converted again in part, left out the second time, or added since."""

    def names(model, done):
        nf.set_progress(model, done)
        return [layer.recipe.name for layer in model.modules() if isinstance(layer, nf.QuantLinear)]

    def model():
        return converted(nn.Sequential(nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32))), "clover_later")

    left_out, part, late_part, added = (model() for _ in range(4))
    nf.convert(left_out, "clover_later", skip="1.0", verbose=False)
    nf.convert(part[1], "nvidia", verbose=False)
    nf.convert(late_part[1], "clover_late", verbose=False)
    added[1][0] = nf.QuantLinear(32, 32, method="fp8")
    for changed, name in ((left_out, "bf16"), (part, "nvidia"), (added, "fp8")):
        assert names(changed, 0.99) == ["clover_search", name]
        assert names(changed, 0.5) == ["clover_later", name]
    assert names(late_part, 0.8) == ["clover_later", "clover_search"]  # 70% and 97%
    assert names(late_part, 0.6) == ["clover_later", "clover_late"]
    nf.convert(late_part, "clover_later", verbose=False)  # all of it again
    assert names(late_part, 0.8) == ["clover_later", "clover_later"]
