"""The chunked loss against torch's own on full logits: values and gradients, for every reduction and dtype."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nanochat_fp4 as nf
import nanochat_fp4.models.cross_entropy as module
from nanochat_fp4.models.cross_entropy import linear_cross_entropy
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

REDUCTIONS = ("mean", "sum", "none")


def reference(x, weight, targets, vocab_size, softcap, reduction):
    logits = (x @ weight[:vocab_size].T).float()
    capped = softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(capped.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction=reduction)


def case(tokens=37, width=16, vocab=50, rows=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, width, generator=generator).requires_grad_()
    # Logits of up to 30, so that the soft cap at 15 is felt.
    weight = (2 * torch.randn(rows, width, generator=generator)).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    targets[3], targets[-1] = -1, -1
    return x, weight, targets


def set_chunk(monkeypatch, num_tokens):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS_ELSEWHERE", num_tokens * 64)  # case() has 64 rows
    monkeypatch.setattr(module, "MIN_CHUNK_TOKENS", 1)


def gradients(loss, x, weight):
    weights = torch.linspace(0.5, 2, loss.numel()).view_as(loss)  # "none" gets different weights per token
    return torch.autograd.grad((loss * weights).sum(), (x, weight))


# 37 tokens: uneven, a last chunk of one, one chunk
@pytest.mark.parametrize("reduction, chunk_tokens", [("mean", 10), ("sum", 36), ("none", 1000), ("none", 10)])
def test_value_and_gradients(reduction, chunk_tokens, monkeypatch):
    set_chunk(monkeypatch, chunk_tokens)
    x, weight, targets = case()
    loss = linear_cross_entropy(x, weight, targets, 50, 15.0, reduction)
    expected = reference(x, weight, targets, 50, 15.0, reduction)
    assert loss.dtype == torch.float32 and loss.shape == expected.shape
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for got, want in zip(gradients(loss, x, weight), gradients(expected, x, weight)):
        # FP32 sums over chunks in another order.
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_bf16_is_as_close_to_the_truth_as_torch_is(reduction):
    x, weight, targets = case(tokens=200, width=64)
    x = x.detach().bfloat16().requires_grad_()
    truth = reference(x.double(), weight.double(), targets, 50, 15.0, reduction)
    truth_grads = gradients(truth, x, weight)
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(x, weight, targets, 50, 15.0, reduction)
        theirs = reference(x, weight, targets, 50, 15.0, reduction)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)
    for got, plain, want in zip(gradients(ours, x, weight), gradients(theirs, x, weight), truth_grads):
        assert got.dtype == want.dtype
        error, plain_error = ((t.double() - want.double()).norm() / want.double().norm() for t in (got, plain))
        # Both round logits and their gradients to BF16 (2^-9); ours must not add to that.
        assert error <= 1.1 * plain_error + 1e-3


class LargestTensor(TorchDispatchMode):
    """The most elements of a tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(t.numel() for t in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(t))]
        )
        return result


def test_no_logits_stand_whole(monkeypatch):
    set_chunk(monkeypatch, 10)
    x, weight, targets = case(tokens=200)
    with LargestTensor() as ours:
        linear_cross_entropy(x, weight, targets).backward()
    assert ours.elements == 200 * 16  # x's gradient; a chunk of logits has 10 * 64


@pytest.mark.parametrize("head, products", [("bf16", "_Products"), ("fp8", "_FP8Products")])
def test_the_logits_of_one_chunk_stand_at_a_time(head, products, monkeypatch):
    set_chunk(monkeypatch, 32)
    original, made = getattr(module, products).logits, []

    def logits(self, part):
        assert not any(earlier() is not None for earlier in made)
        result = original(self, part)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(getattr(module, products), "logits", logits)
    x, weight, targets = case(tokens=200)
    linear_cross_entropy(x, weight, targets, head=head).backward()
    assert len(made) > 4


def test_a_batch_without_targets_is_zero_not_nan():
    x, weight, targets = case()
    loss = linear_cross_entropy(x, weight, torch.full_like(targets, -1), 50)
    assert loss == 0
    assert not any(g.any() for g in gradients(loss, x, weight))


@pytest.mark.parametrize("softcap", [5.0, 60.0, 1e4])  # the last one is above SAFE_SOFTCAP
def test_exponentials_neither_overflow_nor_vanish(softcap):
    """Every logit at the cap, or at 200 where there is none to speak of, whose exponential is not finite."""
    x, weight = torch.full((3, 8), 5.0, requires_grad=True), torch.full((64, 8), 5.0)
    weight[1::2] *= -1
    weight.requires_grad_()
    targets = torch.tensor([0, 1, 2])
    loss = linear_cross_entropy(x, weight, targets, 64, softcap, "none")
    expected = reference(x, weight, targets, 64, softcap, "none")
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    for got, want in zip(gradients(loss, x, weight), gradients(expected, x, weight)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-4)  # 200 has 24 bits, so its exponential fewer


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocab_size", [64, 50])
def test_gradients_of_a_chunk_take_the_place_of_its_logits(vocab_size, compiled):
    """The memory of a chunk is its logits, and only once: no copy in FP32, no gradient beside them."""
    chunk_losses, chunk_gradient = (
        torch.compile(f, fullgraph=True) if compiled else f for f in (module.chunk_losses, module.chunk_gradient)
    )
    generator = torch.Generator().manual_seed(0)
    logits = (8 * torch.randn(5, 64, generator=generator)).bfloat16()
    targets, token_weight = torch.tensor([4, -1, 0, 49, 7]), torch.linspace(0.5, 2, 5)
    ours = logits.clone()
    losses, logsumexp = chunk_losses(ours, targets, vocab_size, 15.0)
    assert torch.equal(ours, logits)
    chunk_gradient(ours, targets, logsumexp, token_weight, vocab_size, 15.0)
    wanted = logits.float().requires_grad_()
    expected = F.cross_entropy(15 * torch.tanh(wanted[:, :vocab_size] / 15), targets, ignore_index=-1, reduction="none")
    torch.testing.assert_close(losses, expected.detach())
    (gradient,) = torch.autograd.grad((expected * token_weight).sum(), wanted)
    torch.testing.assert_close(ours, gradient.bfloat16(), rtol=2**-8, atol=1e-6)


def test_without_grad_nothing_is_prepared(monkeypatch):
    x, weight, targets = case()
    set_chunk(monkeypatch, 10)
    seen = []
    original = module.chunk_losses
    monkeypatch.setattr(module, "chunk_losses", lambda *a: seen.append(len(a[0])) or original(*a))
    monkeypatch.setattr(module, "chunk_gradient", None)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets, 50)
    assert seen == [10, 10, 10, 7] and not loss.requires_grad
    torch.testing.assert_close(loss, reference(x, weight, targets, 50, 15.0, "mean").detach())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_operator_is_well_formed(reduction):
    """torch's own checks: schema, fake implementation, autograd registration."""
    x, weight, targets = case(tokens=5)
    if reduction == "none":
        args = (
            torch.ops.nanochat_fp4.linear_cross_entropy_none.default,
            (x, weight, targets, 50, 15.0, torch.float32, False),
        )
    else:
        args = (
            torch.ops.nanochat_fp4.linear_cross_entropy_sum.default,
            (x, weight, targets, torch.ones(5), 50, 15.0, torch.float32, False, True),
        )
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(*args, test_utils=checks)


def rounded(t, element, amax=None):
    """To FP8 with one scale, as numbers."""
    found = quantize_reference(t.detach(), Quantization(ROUNDINGS[element], amax=amax))
    return found.codes.float() * found.tensor_scale


@pytest.mark.parametrize("reduction, softcap", [("mean", 15.0), ("none", 15.0), ("sum", 1e4)])
@pytest.mark.parametrize("chunk_tokens", [16, 1000])
def test_an_fp8_head_is_three_products_of_rounded_operands(reduction, softcap, chunk_tokens, monkeypatch):
    """Written out on whole tensors: x and weight in E4M3, the logits' gradient in E5M2 by a scale of the weights."""
    set_chunk(monkeypatch, 2 * chunk_tokens)  # half as many tokens in FP8
    x, weight, targets = case()
    weights = torch.linspace(0.5, 2, 37) if reduction == "none" else torch.ones(37)
    weights = weights / 35 if reduction == "mean" else weights
    loss = linear_cross_entropy(x, weight, targets, 50, softcap, reduction, head="fp8")
    got = torch.autograd.grad((loss * weights).sum() if reduction == "none" else loss, (x, weight))

    x8, weight8 = rounded(x, "e4m3"), rounded(weight, "e4m3")
    logits = (x8 @ weight8.T).requires_grad_()
    capped = softcap * torch.tanh(logits[:, :50] / softcap)
    losses = F.cross_entropy(capped, targets, ignore_index=-1, reduction="none")
    expected = losses if reduction == "none" else (losses * weights).sum()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=2e-5)
    (grad,) = torch.autograd.grad((losses * weights).sum(), logits)
    grad8 = rounded(grad, "e5m2", amax=weights.max())
    assert not torch.equal(grad8, grad)
    for ours, want in zip(got, (grad8 @ weight8, grad8.T @ x8)):
        # An element on the edge of two E5M2 numbers may be rounded the other way.
        assert (ours - want).norm() < 2e-3 * want.norm()


def test_an_fp8_head_evaluates_the_loss_that_it_trains():
    x, weight, targets = case()
    with torch.no_grad():
        fp8, plain = (linear_cross_entropy(x, weight, targets, 50, head=head) for head in ("fp8", "bf16"))
    trained = linear_cross_entropy(x, weight, targets, 50, head="fp8").detach()
    assert torch.equal(fp8, trained) and not torch.equal(fp8, plain)
    loss = checkpoint(linear_cross_entropy, x, weight, targets, 50, 15.0, "mean", "fp8", use_reentrant=True)
    assert torch.equal(loss.detach(), trained)
    empty = linear_cross_entropy(x[:0], weight, targets[:0], 50, head="fp8")
    assert empty == 0


def test_a_head_is_in_fp8_outside_of_full_precision_alone():
    x, weight, targets = case()
    head = module.Head(16, 64)
    head.weight, model = torch.nn.Parameter(weight), torch.nn.ModuleDict({"lm_head": head})
    plain, loss = head(x), head.losses(x, targets, 50, 15.0, "sum")
    head.precision = "fp8"
    x8, weight8 = rounded(x, "e4m3"), rounded(weight, "e4m3")
    torch.testing.assert_close(head(x), x8 @ weight8.T)
    want = linear_cross_entropy(x, weight, targets, 50, 15.0, "sum", head="fp8")
    assert torch.equal(head.losses(x, targets, 50, 15.0, "sum"), want) and want != loss
    with nf.full_precision(model):
        assert not head.quantizes and not copy.deepcopy(model).lm_head.contexts
        assert torch.equal(head(x), plain) and torch.equal(head.losses(x, targets, 50, 15.0, "sum"), loss)
    # In an evaluation the logits of a token do not depend on the other tokens.
    head.eval()
    with torch.no_grad():
        torch.testing.assert_close(head(torch.cat([x[:2], 1000 * x[2:3]]))[:2], head(x[:2]), rtol=1e-6, atol=1e-6)
    assert not torch.equal(head(x), plain)
