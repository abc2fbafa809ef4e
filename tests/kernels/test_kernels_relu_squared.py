"""The kernel of ReLU^2 against its reference, bit for bit; on a CPU in Triton's interpreter."""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels import quantize as quantize_module
from nvfp4_kernels.relu_squared import quantize_relu_squared, relu_squared

import nanochat_fp4 as nf
from nanochat_fp4.models.gpt import MLP, GPTConfig, norm
from nanochat_fp4.nvfp4 import epilogue as dispatch
from nanochat_fp4.nvfp4 import gemm
from nanochat_fp4.nvfp4.epilogue import relu_squared_linear, relu_squared_reference
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(rows, columns, dtype) -> torch.Tensor:
    torch.manual_seed(rows)
    x = torch.randn(rows, columns) * torch.exp(2 * torch.randn(rows, 1))
    x[0] = 0
    x[-1] = -x[-1].abs()  # nothing positive
    if rows > 4:
        x[1] *= 1e-30
        x[2] *= 1e15
        x[3] *= 1e-38 if dtype == torch.float32 else 1e-35  # the interpreter takes subnormal BF16 numbers for others
    return x.to(dtype)


# Less than a group of 16 elements, and a tile of 128 groups and a bit.
@pytest.mark.parametrize(
    "shape, dtype", [((1, 1), torch.bfloat16), ((6, 2049), torch.float32), ((6, 2049), torch.bfloat16)]
)
def test_kernel_is_the_reference(shape, dtype):
    x, seed = made(*shape, dtype), torch.tensor(-(2**40) - 7)
    results = relu_squared(x.to(DEVICE), seed.to(DEVICE))
    for name, got, want in zip(("y", "kept", "step", "amax"), results, relu_squared_reference(x, seed)):
        assert got.dtype == want.dtype and got.shape == want.shape, name
        got, want = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (got, want))
        assert torch.equal(got, want), name


PARTS = ("codes", "scales", "tensor_scale", "decoded", "numbers", "number_scale", "kept", "step")


@pytest.mark.parametrize(
    "name, dtype, shape", [("four_over_six", torch.float32, (9, 48)), ("rtn", torch.bfloat16, (6, 2064))]
)
def test_quantized_as_it_is_made_is_quantized_after(name, dtype, shape):
    """To the bit the references of both, one after the other. Also the 8-bit numbers, with and without codes."""
    x, seed, r = made(*shape, dtype), torch.tensor(11), ROUNDINGS[name]
    got = quantize_relu_squared(x.to(DEVICE), seed.to(DEVICE), r.grid_max, r.scale_cap, list(r.candidates), True)
    y, kept, step, _ = relu_squared_reference(x, seed)
    t = quantize_reference(y, Quantization(r))
    want = (t.codes, t.scales, t.tensor_scale, t.decoded.bfloat16(), None, None, kept, step)
    for part, a, b in zip(PARTS, got, want, strict=True):
        assert a.shape == (0,) if b is None else assert_same_bits(part, a.cpu(), b) is None, part
    eight = quantize_reference(y, Quantization(ROUNDINGS["e4m3"]))
    want = (t.codes, t.scales, t.tensor_scale, None, eight.codes, eight.tensor_scale, kept, step)
    for four in (True, False):
        constants = r.grid_max, r.scale_cap, list(r.candidates), False, False, 448.0, four
        for part, a, b in zip(PARTS, quantize_relu_squared(x.to(DEVICE), seed.to(DEVICE), *constants), want):
            if part in PARTS[: 4 if four else 0] + PARTS[4:] and b is not None:
                assert_same_bits(part, a.cpu(), b)
            elif part != "tensor_scale":
                assert not a.numel(), part
    x[-1, 3] = float("nan")
    _, _, tensor_scale, decoded, *_, step = quantize_relu_squared(
        x.to(DEVICE), seed.to(DEVICE), r.grid_max, r.scale_cap, list(r.candidates), True
    )
    assert tensor_scale.isnan() and decoded.isnan().any() and step.isnan().sum() == 1


def test_the_largest_value_is_kept_and_nothing_wraps():
    """A row of its largest value: 255 steps, with all noise; and what is no number, or infinite, shows in its row."""
    x = torch.exp(torch.randn(4, 1)).expand(4, 4096)  # one draw in 2^16 comes close enough to a half
    for function in (lambda x, s: relu_squared(x.to(DEVICE), s.to(DEVICE)), relu_squared_reference):
        _, kept, step, _ = function(x, torch.tensor(5))
        assert (kept >= 254).all() and (kept == 255).float().mean() > 0.999
        for bad in (float("nan"), float("inf")):
            broken = x[:, :64].clone()
            broken[3, 7] = bad
            y, _, step, amax = function(broken, torch.tensor(5))
            assert not torch.isfinite(y[3, 7]) and not torch.isfinite(step[3])
            torch.testing.assert_close(amax.cpu(), torch.tensor(bad), equal_nan=True)
            assert torch.isfinite(step).sum() == 3


def test_what_the_rounding_leaves_of_a_bias():
    """Of 2^20 draws of values that lie anywhere between two steps, also near 0 and 255: none but what chance leaves."""
    values = torch.tensor([1 / 512, 0.01, 0.25, 0.5, 3.999, 128.37, 254.99])
    x = torch.cat((torch.full((1,), 255.0), values.repeat_interleave(2**17)))[None]
    _, kept, step, _ = relu_squared_reference(x, torch.tensor(3))
    assert step == 1
    mean = kept[0, 1:].view(len(values), -1).double().mean(1)
    fraction = values.double() % 1
    standard_error = (fraction * (1 - fraction) / 2**17).sqrt()
    assert ((mean - values.double()).abs() < 4 * standard_error).all()


def test_dispatch(monkeypatch):
    """The same seed and numbers on either way, for any number of dimensions."""
    x = made(6, 40, torch.bfloat16).view(2, 3, 40).to(DEVICE)
    results = []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        torch.manual_seed(1)
        results.append(dispatch.relu_squared(x))
    for got, want, shape in zip(*results, ((2, 3, 40), (), (2, 3, 40), (2, 3, 1))):
        assert got.shape == shape and torch.equal(got, want)


@pytest.mark.parametrize("method", ["fig2_1x16_four_over_six", "fp8", "clover_fp8_forward_4bit", "nvidia"])
@pytest.mark.parametrize("dtype, compiled", [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
def test_who_makes_an_input_finds_its_largest_value(dtype, compiled, method, monkeypatch):
    """ReLU^2's kernel does, and under torch.compile whatever else makes one, here a norm: no kernel of ours reads the
    input once more for it. The forward pass's bits are the reference's, which looks for itself. ReLU^2 that is
    quantized as it is made, and whose gradient the rotating kernel computes as it reads, has the gradients of kernels
    one after the other, which layers with hooks get; also compiled."""
    torch.manual_seed(0)
    mlp = MLP(GPTConfig(n_head=1, n_kv_head=1, n_embd=32)).to(DEVICE, dtype)
    nf.convert(mlp, method, verbose=False)
    x, read = torch.randn(24, 32).to(DEVICE, dtype).requires_grad_(), []
    find, write, multiply = quantize_module.amax_bits, dispatch.relu_squared, gemm.relu_squared_gradient
    monkeypatch.setattr(quantize_module, "amax_bits", lambda x: read.append(tuple(x.shape)) or find(x))

    def forward(x):
        return mlp(norm(x))

    monkeypatch.setenv("NVFP4_KERNELS", "reference")
    want = forward(x)
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    written: list[torch.Size] = []  # relu(x)^2 itself
    products: list[torch.Size] = []  # the gradient of its input
    if not compiled:  # Dynamo refuses the lists.
        monkeypatch.setattr(dispatch, "relu_squared", lambda x: written.append(x.shape) or write(x))
        monkeypatch.setattr(gemm, "relu_squared_gradient", lambda e, *of: products.append(e.shape) or multiply(e, *of))
    torch.compiler.reset()
    results = []
    with nf.quantize_weights_once(mlp):
        for hooked in (None, mlp.c_proj, mlp.c_fc):
            if hooked is not None:
                hooked.register_forward_pre_hook(lambda _, args: None)
            torch.manual_seed(2)
            mlp.zero_grad()
            for calls in (read, written, products):
                calls.clear()
            eager = hooked or not compiled
            got = (forward if eager else torch.compile(forward, backend="aot_eager", fullgraph=True))(x)
            # The reference makes an input in 8 bits alone.
            assert torch.equal(got, want) and (hooked or read == ([] if compiled or method == "fp8" else [(24, 32)]))
            got.float().square().sum().backward()
            rotated = method in ("nvidia", "clover_fp8_forward_4bit") and hooked is not mlp.c_fc
            rotated &= gemm.dispatch.multiplies_as_it_rotates()
            # What nvidia's backward pass needs of the second layer's input is the input itself.
            assert compiled or len(written) == bool(hooked or method == "nvidia") and len(products) == (not rotated)
            results.append([t.grad.clone() for t in (x, *mlp.parameters())])
            x.grad = None
    for first, *others in zip(*results):
        assert all(torch.equal(first, other) for other in others)


def test_a_derivative_that_is_computed_again_keeps_nothing(monkeypatch):
    """Quantized as it is made, or relu(x)^2 for a layer with a hook: the same bits, gradients and random numbers."""
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    layers = nf.convert(torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2))), "clover").to(
        DEVICE
    )
    x, results = made(32, 64, torch.float32).to(DEVICE).clamp(-4, 4).requires_grad_(), []
    kept: list[torch.Tensor] = []
    for hooked in (False, True):
        if hooked:
            layers[1].register_forward_pre_hook(lambda _, args: None)
        torch.manual_seed(2)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = relu_squared_linear(x, *layers, recompute=True)
        assert not any(t.shape == x.shape for t in kept)
        leaves = x, layers[0].weight, layers[1].weight
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves), torch.rand(3)])
    assert all(torch.equal(*pair) for pair in zip(*results))
