"""Gradients added where they are made (nf.accumulate_gradients): the bits that autograd's sums have, and who else sees
them."""

import contextlib
import copy

import pytest
import torch
from _samples import Fused
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanochat_fp4 as nf


class Recomputed(Fused):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def model(method="clover", cls=Fused):
    torch.manual_seed(0)
    return nf.convert(cls(), method, verbose=False)


def backward(m, times=3, retain=False):
    """Gradients by name after so many passes; the same numbers are drawn each time."""
    torch.manual_seed(1)
    for _ in range(times):
        loss = m(torch.randn(32, 64)).square().mean()
        loss.backward(retain_graph=retain)
        if retain:
            loss.backward()
    return {name: p.grad.clone() for name, p in m.named_parameters()}


def same(got, want):
    return all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("method", ["clover", "nvidia", "clover_fp8_forward", "fp8", "bf16"])
def test_sums_are_autograds_to_the_bit(method):
    want = backward(model(method))
    m = model(method)
    with nf.accumulate_gradients(m):
        got = backward(m)
        buffer, alone = m.q.made("gradients", (m.q, m.k)).value, m.out.made("gradients", (m.out,)).value
        assert buffer.shape == (96, 64) and alone.data_ptr() == m.out.weight.grad.data_ptr()
    assert same(got, want)
    # q's and k's are slices of the one tensor that their GEMM adds to, and nothing of the context is left.
    assert [p.grad.data_ptr() - buffer.data_ptr() for p in (m.q.weight, m.k.weight)] == [0, 64 * 64 * 4]
    assert not any(layer.contexts for layer in (m.q, m.k, m.out))


def test_a_second_context_adds_to_the_gradients_that_are_there():
    twice = model()
    backward(twice)
    want = backward(twice)
    m = model()
    backward(m)  # by autograd: separate tensors, whose values are taken over
    for _ in range(2):
        with nf.accumulate_gradients(m), nf.accumulate_gradients(m):
            pass
    with nf.accumulate_gradients(m):
        assert same(backward(m), want)


@pytest.mark.parametrize("how", ["retain_graph", "checkpoint", "called twice", "full_precision"])
def test_what_adds_more_than_once_adds_as_often_as_autograd(how):
    cls = Recomputed if how == "checkpoint" else Fused

    def run(m, context):
        inside = nf.full_precision(m) if how == "full_precision" else contextlib.nullcontext()
        if how == "called twice":
            whole = nn.Sequential(m, m)
            whole.named_parameters = m.named_parameters
        else:
            whole = m
        with context, inside:
            return backward(whole, retain=how == "retain_graph")

    want = run(model(cls=cls), contextlib.nullcontext())
    m = model(cls=cls)
    assert same(run(m, nf.accumulate_gradients(m)), want)


@pytest.mark.parametrize("how", ["hook", "post hook", "frozen", "tied", "bf16 weights", "conv1d"])
def test_what_is_left_to_autograd(how):
    def made():
        m = model()
        seen = []
        if how == "hook":
            m.out.weight.register_hook(seen.append)
        elif how == "post hook":
            m.out.weight.register_post_accumulate_grad_hook(seen.append)
        elif how == "frozen":
            m.out.weight.requires_grad_(False)
        elif how == "bf16 weights":
            m.out.weight = nn.Parameter(m.out.weight.detach().bfloat16())
        elif how == "tied":
            m.other = copy.copy(m.out)
            m.other._parameters = dict(m.out._parameters)
        return m, seen

    if how == "conv1d":
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        m = nf.convert(nn.Sequential(transformers.pytorch_utils.Conv1D(32, 64)), verbose=False)
        with nf.accumulate_gradients(m):
            assert not m[0].contexts
            backward(m)
        return
    other, calls = made()
    names = [name for name, p in other.named_parameters() if p.requires_grad]
    torch.manual_seed(1)
    for _ in range(2):
        other(torch.randn(32, 64)).square().mean().backward()
    m, seen = made()
    with nf.accumulate_gradients(m):
        assert not m.out.contexts and m.q.contexts
        torch.manual_seed(1)
        for _ in range(2):
            m(torch.randn(32, 64)).square().mean().backward()
    want = dict(other.named_parameters())
    assert all(torch.equal(p.grad, want[name].grad) for name, p in m.named_parameters() if name in names)
    assert len(seen) == len(calls) == (2 if "hook" in how else 0)


def test_fsdp2_gets_its_gradients_from_autograd():
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        got = {}
        for accumulate in (True, False):
            m = model()
            fully_shard(m, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
            with nf.accumulate_gradients(m) if accumulate else contextlib.nullcontext():
                assert not (m.out.contexts or m.q.contexts)
                got[accumulate] = backward(m)
        assert all(torch.equal(got[True][n].full_tensor(), g.full_tensor()) for n, g in got[False].items())
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_that_go_inside_are_told():
    m = model()
    with pytest.raises(RuntimeError, match="zero_grad"):
        with nf.accumulate_gradients(m):
            m.zero_grad()
    assert not m.out.contexts
    with nf.accumulate_gradients(m):
        m.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match="to not have been used"):  # autograd's own words
            torch.autograd.grad(m(torch.randn(32, 64)).sum(), m.out.weight)


def test_distributed_data_parallel_is_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        m = nn.parallel.DistributedDataParallel(model())
        with pytest.raises(ValueError, match="average weight.grad"):
            with nf.accumulate_gradients(m):
                pass
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1664, 4992, 4096), (96, 64, 32), (130, 48, 136)])
@pytest.mark.parametrize("alpha", [None, 0.37])
def test_cublas_adds_to_the_accumulator(m, n, k, alpha):
    """To zeros: the bits of the product. To a sum: that of both, rounded once instead of twice."""
    from nvfp4_kernels.cublas import mm_alpha, mm_alpha_add

    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    alpha = None if alpha is None else torch.tensor(alpha, device="cuda")
    product, zeros = mm_alpha(a, b, alpha, torch.float32), torch.zeros(m, n, device="cuda")
    mm_alpha_add(a, b, alpha, zeros)
    assert torch.equal(zeros, product)
    before = torch.randn(m, n, device="cuda") * product.std()
    after = before.clone()
    mm_alpha_add(a, b, alpha, after)
    unit = 2.0**-23 * torch.maximum(product.abs(), before.abs())
    assert ((after - (before + product)).abs() <= 2 * unit).all()
    with pytest.raises(ValueError, match="contiguous"):
        mm_alpha_add(a, b, alpha, before.T.contiguous().T)
