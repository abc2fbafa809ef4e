"""TetraJet-v2's OutControl and scales by 128: the definition by hand, its gradients, and the layers around it."""

import pytest
import torch
from _assertions import assert_unbiased, concentrate, relative_square_error
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.linear import fused_linear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.operands import Quantization, quantize_operand
from nanochat_fp4.nvfp4.oscillation import OsciReset
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.nvfp4.quantizers import ROUNDINGS, quantize, quantize_reference

METHOD = "tetrajet_v2_outcontrol"
LARGE = slice(7, None, 20)  # channels of the inputs that are ten times the others


def inputs(tokens: int, width: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    x[:, LARGE] *= 10
    return x


class Model(nn.Module):
    fused_linears = ("q", "k")

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(160, 64, bias=False), nn.Linear(160, 64, bias=False)
        self.out = nn.Linear(128, 96, bias=False)

    def forward(self, x):
        return self.out(torch.cat(fused_linear(x, self.q, self.k), -1).relu())


def trained(model: nn.Module, width: int, seed: int = 0) -> nn.Module:
    """The model when its layers have seen inputs."""
    nf.convert(model, METHOD, verbose=False)
    nf.update_gram_matrices(model, lambda: model(inputs(256, width, seed)))
    return model


def linear(in_features: int = 160, out_features: int = 96) -> nf.QuantLinear:
    torch.manual_seed(1)
    return trained(nn.Sequential(nn.Linear(in_features, out_features, bias=False)), in_features)[0]


def backward(layer, x, e, seed=7):
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, layer.weight), e)


def by_128(x, rounding, **random):
    """Each run of 128 values, of which the last is padded with zeros, quantized as a tensor of its own."""
    x = torch.nn.functional.pad(x, (0, -x.shape[1] % 128))
    if random:
        x = rotate(x, random["seed"], dim=16, stream=random["rht_stream"])
    if not random:
        return torch.cat([torch.stack([quantize(r, rounding).dequantize() for r in p]) for p in x.split(128, 1)], 1)
    t = quantize_reference(
        x.reshape(-1, 128), ROUNDINGS[rounding], seed=random["seed"], stream=random["stream"], per_token=True
    )
    return t.dequantize().view(x.shape)


def test_outliers_are_the_largest_channels_in_multiples_of_32():
    layer = linear(640, 32)
    assert len(layer.statistics.channels) == 64 and set(range(640)[LARGE]) < set(layer.statistics.channels.tolist())
    assert [get_recipe(METHOD).outlier_channels(k) for k in (32, 384, 512, 1536)] == [32, 32, 64, 160]
    assert nf.QuantLinear(640, 32, method=METHOD).statistics.channels is None  # has seen no inputs yet


@pytest.mark.parametrize("tokens", [128, 100])
def test_output_and_gradients_by_hand(tokens):
    layer, x, e = linear(), inputs(tokens, 160, 1), torch.randn(tokens, 96)
    got = backward(layer, x, e, seed=3)
    w, hot = layer.weight.detach(), layer.statistics.channels
    cold = torch.tensor([i for i in range(160) if i not in set(hot.tolist())])

    def forward(v):
        return by_128(v.index_fill(1, hot, 0.0), "rtn")[:, :160], quantize(v[:, hot], "mxfp8").dequantize()

    (x4, x8), (w4, w8) = forward(x), forward(w)
    torch.manual_seed(3)
    s = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64)
    dgrad, wgrad = {"seed": s, "rht_stream": 2}, {"seed": s, "rht_stream": 4}
    xs, ws = x4.index_add(1, hot, x8), w4.index_add(1, hot, w8)
    grad_x = by_128(e, "sr", stream=2, **dgrad) @ by_128(ws.T, "sr", stream=3, **dgrad).T
    grad_w = by_128(e.T, "sr", stream=4, **wgrad) @ by_128(xs.T, "sr", stream=5, **wgrad).T
    e8, xt8 = (quantize(nn.functional.pad(v.T, (0, -tokens % 32)), "mxfp8").dequantize() for v in (e, x8))
    for name, g, want in (
        ("output", got[0], x4 @ w4.T + x8 @ w8.T),
        ("grad_input", got[1], grad_x),
        ("grad_weight", got[2][:, cold], grad_w[:, cold]),
        ("grad_weight of the outliers", got[2][:, hot], e8 @ xt8.T),
    ):
        error = relative_square_error(g, want)
        assert error < 1e-11, f"{name}: {error:.1e}"


def test_gradients_are_unbiased_where_they_are_in_4_bits():
    """grad_input everywhere, grad_weight but for the outliers, which are rounded to nearest in 8 bits."""
    layer, x, e = linear(), inputs(32, 160, 1), torch.randn(32, 96)
    hot = layer.statistics.channels
    cold = torch.tensor([i for i in range(160) if i not in set(hot.tolist())])
    w = layer.weight.detach()
    xq, wq = (
        by_128(v.index_fill(1, hot, 0.0), "rtn")[:, :160].index_add(1, hot, quantize(v[:, hot], "mxfp8").dequantize())
        for v in (x, w)
    )

    def draw(b):
        _, grad_x, grad_w = backward(layer, x, e, b)
        return grad_x, grad_w[:, cold]

    for name, c in zip(
        ("grad_input", "grad_weight"), concentrate(draw, ((e @ wq).double(), (e.T @ xq)[:, cold].double()), 128)
    ):
        assert_unbiased(name, c)
    assert relative_square_error(backward(layer, x, e)[2][:, hot], (e.T @ xq)[:, hot]) < 2e-3


@pytest.mark.parametrize("rounding, transpose, rht", [("rtn", False, 0), ("sr", True, 16), ("sr", False, 128)])
def test_kernels_make_the_same_operands_as_the_reference(monkeypatch, rounding, transpose, rht):
    pytest.importorskip("triton")
    x = inputs(144, 160) * torch.logspace(-6, 0, 144).unsqueeze(1)
    how = Quantization(ROUNDINGS[rounding], torch.tensor(5), stream=3, rht_dim=rht, outer=True)
    operands = []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        operands.append(quantize_operand(x.bfloat16(), how, transpose=transpose).values)
    assert torch.equal(*operands)


def passes(model, forward, count=2):
    torch.manual_seed(1)
    model.zero_grad()
    outputs = [forward(x) for x in inputs(96, 160, 2).view(count, -1, 160)]
    for y in outputs:
        y.square().mean().backward()
    return [*outputs, *(p.grad.clone() for p in model.parameters())]


def test_weights_quantized_once_and_after_a_checkpoint_are_the_same_bits():
    torch.manual_seed(0)
    model = trained(Model(), 160)
    want = passes(model, model)
    with nf.quantize_weights_once(model):
        assert all(torch.equal(a, b) for a, b in zip(passes(model, model), want))
    other = nf.convert(Model(), METHOD, verbose=False)
    other.load_state_dict(model.state_dict())
    nf.load_gram_state(other, nf.gram_state(model))
    assert all(torch.equal(a, b) for a, b in zip(passes(other, other), passes(model, model)))


def test_compiled_layers_have_the_same_bits_and_are_not_compiled_again_for_new_outliers():
    layer, e = linear(160, 32), torch.randn(48, 32)
    model, before = nn.Sequential(layer), layer.statistics.channels
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (1, 2):
            x = inputs(48, 160, seed)
            torch.manual_seed(3)
            y = compiled(x)
            got = torch.autograd.grad(y, layer.weight, e)[0]
            want = backward(layer, x, e, seed=3)
            assert torch.equal(y, want[0]) and torch.equal(got, want[2])
            nf.update_gram_matrices(model, lambda: layer(inputs(256, 160, 5).flip(1) * 9))
    assert not torch.equal(layer.statistics.channels, before)


def test_reset_leaves_the_outliers_alone():
    """Weights that go to and fro over an edge of their grid: those in 4 bits are reset, those in 8 bits are not."""
    layer = linear()
    model, hot = nn.Sequential(layer), layer.statistics.channels
    cold = next(i for i in range(160) if i % 16 and i not in set(hot.tolist()))
    last = int(hot[hot % 16 > 0][0])
    layer.weight.data.zero_()
    layer.weight.data[:, ::16] = 6.0
    layer.weight.data[:, cold], layer.weight.data[:, last] = 2.48, 2.36  # E4M3's edge: 2.375
    reset = OsciReset(model, num_steps=10, period=1.0, window=1.0, start=0.0)
    for step in range(10):
        with reset.optimizer_step(step), torch.no_grad():
            layer.weight[:, cold] += 0.04 * (-1) ** step
            layer.weight[:, last] += 0.02 * (-1) ** step
            moved = layer.weight[0, last].clone()
    assert layer.weight[0, cold] in (2.0, 3.0) and layer.weight[0, last] == moved


def test_their_work_is_in_8_bits():
    """Of two GEMMs of three, 64 of 640 channels."""
    work = MethodPlan.parse(METHOD).work(nn.Sequential(nf.QuantLinear(640, 32, method=METHOD)))
    assert work == pytest.approx({4: 2.8 / 3, 8: 0.2 / 3, 16: 0.0})
