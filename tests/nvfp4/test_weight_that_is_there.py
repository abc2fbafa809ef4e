"""A layer computes with the weight, the settings and the seeds of the pass itself, and refuses other inputs."""

import os

import pytest
import torch
from _samples import Fused
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.epilogue import fused_linear


def mlp(method="clover") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return nf.convert(model, method, verbose=False)


# ----------------------------------------------------------------------------------------------------------------------
# The input


@pytest.mark.parametrize("method", nf.METHODS)
@pytest.mark.parametrize("features", [16, 48, 80, 128])
def test_an_input_of_another_size_is_refused(method, features):
    """Eagerly, without gradients, with a frozen weight, in full precision, without tokens and on the meta device."""
    layer = nf.QuantLinear(64, 32, method=method)
    frozen = nf.QuantLinear(64, 32, method=method).requires_grad_(False)
    x, message = torch.randn(4, features), rf"\(4, {features}\) in float32, expected \(\.\.\., 64\)"
    for run in (layer, frozen, torch.no_grad()(layer), lambda x: fused_linear(x, layer, layer)):
        with pytest.raises(ValueError, match=message):
            run(x)
    with nf.full_precision(layer), pytest.raises(ValueError, match=message):
        layer(x)
    on_meta = nf.QuantLinear(64, 32, method=method, device="meta")
    for run, x in (
        (layer, torch.randn(0, features)),
        (layer, torch.tensor(1.0)),
        (on_meta, torch.randn(4, features, device="meta")),
    ):
        with pytest.raises(ValueError, match=r"expected \(\.\.\., 64\)"):
            run(x)


@pytest.mark.parametrize("in_graphs", ["0", "1"])
def test_a_compiled_layer_refuses_an_input_of_another_size(monkeypatch, in_graphs):
    """Left out of the compiler's graphs, as on a CPU by default, and inside of them."""
    monkeypatch.setitem(os.environ, "NVFP4_COMPILE", in_graphs)
    compiled = torch.compile(nf.QuantLinear(64, 32), backend="eager")
    assert compiled(torch.randn(4, 64)).shape == (4, 32)
    for features in (16, 48, 80, 128):
        with pytest.raises(ValueError, match=r"expected \(\.\.\., 64\)"):
            compiled(torch.randn(4, features))


def test_shapes_are_inferred_on_the_meta_device():
    model = mlp().to("meta")
    x = torch.empty(2, 3, 64, device="meta", requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == (2, 3, 64) and y.is_meta
    with torch.device("meta"):
        assert nf.QuantLinear(64, 32)(torch.empty(2, 3, 64)).shape == (2, 3, 32)


# ----------------------------------------------------------------------------------------------------------------------
# The weight


def others(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", ["clover", "nvidia", "clover_fp8_forward", "bf16"])
def test_other_weights_are_computed_with_inside_contexts(method):
    """torch.func.functional_call, with layers alone and computed as one."""
    torch.manual_seed(0)
    model, x = nf.convert(Fused(), method, verbose=False), torch.randn(32, 64)

    def passes(weights):
        torch.manual_seed(1)
        y = functional_call(model, weights, (x,))
        y.square().sum().backward()
        return [y.detach(), *(w.grad for w in weights.values())]

    want, own = passes(others(model)), [p.detach().clone() for p in model.parameters()]
    for context in (nf.quantize_weights_once, nf.accumulate_gradients):
        with context(model):
            got = passes(others(model))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), context
        assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), own))


def passes_of(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight):
        return self.scale * weight


def test_a_parametrized_weight_is_made_anew_inside_contexts():
    model, x = mlp(), torch.randn(32, 64)
    parametrize.register_parametrization(model[0], "weight", Scaled())

    want = passes_of(model, x)
    for context in (nf.quantize_weights_once, nf.accumulate_gradients):
        model.zero_grad()
        with context(model):
            got = passes_of(model, x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), context
    with nf.quantize_weights_once(model):
        with torch.no_grad():
            model[0].parametrizations.weight[0].scale.mul_(3)
        other = model(x).detach()
    assert torch.equal(other, model(x)) and not torch.equal(other, want[0])


def test_a_weight_that_changed_is_refused_where_it_is_used():
    """Before, old codes were multiplied until the end of the context."""
    model, x = mlp(), torch.randn(4, 64)
    with pytest.raises(RuntimeError, match="weights changed inside"), nf.quantize_weights_once(model):
        with torch.no_grad():
            model[2].weight.mul_(2)
        model(x)
        pytest.fail("a pass with old codes")


# ----------------------------------------------------------------------------------------------------------------------
# The pass


def test_a_checkpoint_of_an_evaluated_model_has_one_scale_in_both_runs():
    """In eval mode a pass without gradients has a scale for each token, and a checkpoint's first run has none."""
    model = mlp().eval()
    x = torch.randn(8, 64) * torch.logspace(-2, 2, 8)[:, None]
    results = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=True)):
        torch.manual_seed(1)
        results.append(run(x.clone().requires_grad_()).detach())
    assert torch.equal(*results)


@pytest.mark.parametrize("method", ["nvidia", "four_over_six"])
def test_checkpoints_draw_seeds_of_their_own(method):
    """With the weights' gradients of no checkpoint; one state of the generator would give each layer the same seed."""
    blocks = nn.ModuleList(mlp(method) for _ in range(3))
    x = torch.randn(32, 64)

    def gradients(run):
        blocks.zero_grad()
        torch.manual_seed(1)
        y = x.clone().requires_grad_()
        for block in blocks:
            y = run(block, y)
        after = torch.get_rng_state()
        torch.manual_seed(2)
        y.square().sum().backward()
        return after, [p.grad.clone() for p in blocks.parameters()]

    state, _ = gradients(lambda block, y: block(y))
    checkpointed, grads = gradients(lambda block, y: checkpoint(block, y, use_reentrant=True))
    assert torch.equal(state, checkpointed), "as many seeds are drawn as without checkpoints"
    # All three blocks have one weight and, in a first layer of its own input, one seed where the generator stood still.
    assert len({float(g.sum()) for g in grads[::4]}) == 3
