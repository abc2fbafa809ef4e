"""A converted layer computes with the input, the weight and the setting that are there, or refuses them."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanochat_fp4 as nf


@pytest.mark.parametrize("given", [16, 48, 80, 128])
@pytest.mark.parametrize("method", nf.METHODS)
def test_an_input_of_another_size_is_refused(method, given):
    layer = nf.QuantLinear(64, 32, method=method)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError)):
        layer(torch.randn(4, given))
    layer.requires_grad_(False)
    with pytest.raises((ValueError, RuntimeError)):
        layer(torch.randn(4, given))


def test_a_compiled_layer_refuses_an_input_of_another_size():
    layer = torch.compile(nf.QuantLinear(64, 32), backend="eager")
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError)):
        layer(torch.randn(4, 80))


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    return nf.convert(layers, "clover", verbose=False)


def test_contexts_leave_other_weights_alone(model):
    x = torch.randn(32, 64)
    others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    wanted = torch.func.functional_call(model, others, (x,))
    with nf.quantize_weights_once(model):
        assert torch.equal(torch.func.functional_call(model, others, (x,)), wanted)
    with nf.accumulate_gradients(model):
        torch.func.functional_call(model, others, (x,)).sum().backward()
    assert others["0.weight"].grad is not None
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())


def test_parametrized_weights_get_their_gradients(model):
    class Twice(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    nn.utils.parametrize.register_parametrization(model[0], "weight", Twice())
    x = torch.randn(32, 64)
    original = model[0].parametrizations.weight.original
    wanted = model(x)
    with nf.quantize_weights_once(model):
        assert torch.equal(model(x), wanted)
        with torch.no_grad():
            original.mul_(-1)
        changed = model(x)
    assert torch.equal(changed, model(x))
    with nf.accumulate_gradients(model):
        model(x).sum().backward()
    assert original.grad.any()


@pytest.mark.parametrize("context", [nf.full_precision, nf.per_token_scale])
def test_a_checkpoint_computes_again_what_it_computed(model, context):
    def gradient(backward_inside: bool) -> torch.Tensor:
        x = torch.ones(40, 64).cumsum(1).sin().requires_grad_()
        torch.manual_seed(1)
        with context(model):
            loss = checkpoint(model, x, use_reentrant=True).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        return x.grad

    assert torch.equal(gradient(True), gradient(False))


def test_each_checkpoint_has_random_numbers_of_its_own():
    torch.manual_seed(0)
    # Stochastic rounding in the forward pass: nvidia rotates and rounds the kept input there.
    layer = nf.QuantLinear(128, 128, method="nvidia")
    x = torch.randn(64, 128)
    state = torch.get_rng_state()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for block in inputs:
        checkpoint(layer, block, use_reentrant=True)
    assert not torch.equal(torch.get_rng_state(), state)


class HeadFirst(nn.Module):
    def __init__(self, tie: bool = False, bias: bool = False):
        super().__init__()
        self.emb = nn.Embedding(256, 64)
        self.unembed = nn.Linear(64, 256, bias=bias)
        if tie:
            self.unembed.weight = self.emb.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2))
        self.project = nn.Linear(64, 64)


@pytest.mark.parametrize("tie, bias", [(False, False), (True, False), (False, True), (True, True)])
def test_an_output_head_is_kept_wherever_it_is_defined(tie, bias):
    report = nf.convert(HeadFirst(tie, bias), verbose=False).nf_report
    assert "unembed" in dict(report.left_alone)
    assert {"blocks.0.0", "blocks.1.2"} <= set(report.converted)


def test_a_tied_weight_stays_without_a_stack_of_blocks():
    model = nn.ModuleDict({"emb": nn.Embedding(64, 32), "out": nn.Linear(32, 64), "mlp": nn.Linear(32, 32)})
    model["out"].weight = model["emb"].weight
    assert nf.convert(model, verbose=False).nf_report.converted == ["mlp"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_convert_says_at_once_that_a_dtype_will_be_refused(dtype, capsys):
    nf.convert(nn.Sequential(nn.Linear(64, 64)).to(dtype))
    assert str(dtype).removeprefix("torch.") in capsys.readouterr().out


def test_shapes_are_inferred_on_the_meta_device():
    with torch.device("meta"):
        assert nf.QuantLinear(64, 32)(torch.empty(2, 3, 64)).shape == (2, 3, 32)


def test_a_report_is_one_short_line_in_a_notebook(model):
    assert "\n" not in repr(model.nf_report)
    assert len(repr(model.nf_report)) < 120


def test_a_method_is_suggested_in_any_case():
    with pytest.raises(ValueError, match="did you mean clover"):
        nf.get_recipe("CLOVER")
