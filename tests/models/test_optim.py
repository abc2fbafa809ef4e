"""
AdamW against torch's, Muon against the package muon-optimizer, and two processes against one.
"""

import copy

import muon
import pytest
import torch
import torch.distributed as dist
from _training import MATRICES, OTHERS, make, parameters

from nanochat_fp4.models.optim import ORTHOGONALIZERS, AdamW, Muon, polar_express


def set_grads(params, seed):
    generator = torch.Generator().manual_seed(1000 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


# ----------------------------------------------------------------------------------------------------------------------
# AdamW


def test_adamw_is_torchs():
    ours, theirs = parameters(OTHERS), parameters(OTHERS)
    kwargs = dict(lr=0.01, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.1)
    a, b = AdamW(ours, **kwargs), torch.optim.AdamW(theirs, foreach=False, fused=False, **kwargs)
    for step in range(10):
        set_grads(ours, step)
        set_grads(theirs, step)
        a.step()
        b.step()
    for p, q in zip(ours, theirs):
        # Ten FP32 steps, computed in another order.
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    b.load_state_dict(a.state_dict())  # the same state, by the same names
    assert b.state[theirs[0]]["step"] == 10


# ----------------------------------------------------------------------------------------------------------------------
# Muon


def assert_nearly_semi_orthogonal(x, g):
    """
    The range of the five polynomials on singular values from 1/1000 of the norm up is 0.847 to 1.141 (computed on a
    grid); BF16 adds about a percent. What was smaller than that stays small.
    """
    values, before = torch.linalg.svdvals(x), torch.linalg.svdvals(g)
    assert values.max() < 1.16
    kept = (before > 1.1e-3 * g.norm()).sum()
    assert kept >= 0.9 * len(before)
    # Sorted on both sides, but the polynomials are not monotonic: only the number that must be large is known.
    assert (values > 0.83).sum() >= kept


@pytest.mark.parametrize(
    "shape, dtype", [((32, 32), torch.bfloat16), ((20, 50), torch.float32), ((64, 16), torch.bfloat16)]
)
def test_polar_express_is_nearly_semi_orthogonal(shape, dtype):
    g = torch.randn(shape) * 1e-3  # the scale does not matter
    x = polar_express(g.to(dtype)).float()
    assert x.shape == g.shape
    assert_nearly_semi_orthogonal(x, g)
    u, _, vh = torch.linalg.svd(g, full_matrices=False)
    assert (x - u @ vh).norm() < 0.15 * x.norm()  # and the directions are those of the nearest orthogonal matrix


def test_the_size_of_the_stacks_changes_nothing():
    """One matrix at a time, two of six, and all; with their states taken over from one another."""
    params = [parameters([(24, 16)] * 6 + [(8, 40)] * 3) for _ in range(3)]
    muons = [Muon(p, weight_decay=0.1, stack_elements=n) for p, n in zip(params, (1, 2 * 24 * 16, 2**28))]
    assert [[len(m.parts(g["params"])) for g in m.param_groups] for m in muons] == [[3, 6], [3, 3], [1, 1]]
    for step in range(3):
        for p, optimizer in zip(params, muons):
            set_grads(p, step)
            optimizer.step()
        states = [optimizer.state_dict() for optimizer in muons]
        for optimizer, state in zip(muons, states[1:] + states[:1]):
            optimizer.load_state_dict(copy.deepcopy(state))
    for p, q, r in zip(*params):
        torch.testing.assert_close(p, r, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(q, r, rtol=1e-5, atol=1e-6)


def test_muon_is_the_packages():
    """Keller Jordan's own optimizer has neither variance reduction (beta2=1 makes it constant) nor cautious decay."""
    ours, theirs = parameters(MATRICES), parameters(MATRICES)
    a = Muon(ours, lr=0.1, momentum=0.9, beta2=1.0, orthogonalizer="newton_schulz")
    b = muon.SingleDeviceMuon(theirs, lr=0.1, momentum=0.9)
    for step in range(4):
        set_grads(ours, step)
        set_grads(theirs, step)
        before = [p.grad.clone() for p in ours]
        a.step()
        b.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(ours, before))  # gradients are not scratch
    for start, p, q in zip(parameters(MATRICES), ours, theirs):
        # The package rounds an update and its factor for the shape to BF16, and takes one matrix at a time.
        assert (p - q).norm() < 0.01 * (q - start).norm(), p.shape


def test_variance_reduction_makes_the_rows_of_a_tall_update_equally_long():
    """beta2=0 keeps the last second moment alone, so each row (column, of a wide matrix) is divided by its own norm."""
    for shape, along in (((48, 16), 1), ((16, 48), 0), ((24, 24), 1)):
        start, plain, reduced = parameters([shape] * 3)
        with torch.no_grad():
            plain.copy_(start), reduced.copy_(start)
        for p, beta2 in ((plain, 1.0), (reduced, 0.0)):
            set_grads([p], 0)
            Muon([p], lr=0.1, beta2=beta2).step()
        norms = (reduced - start).norm(dim=along)
        torch.testing.assert_close(norms, norms.mean().expand_as(norms), rtol=1e-4, atol=0)
        torch.testing.assert_close((reduced - start).norm(), (plain - start).norm(), rtol=1e-4, atol=0)


def test_weight_decay_is_cautious():
    start, plain, decayed = parameters([(16, 48)] * 3)
    with torch.no_grad():
        plain.copy_(start), decayed.copy_(start)
    for p, weight_decay in ((plain, 0.0), (decayed, 0.5)):
        set_grads([p], 0)
        Muon([p], lr=0.1, weight_decay=weight_decay).step()
    agrees = (start - plain) * start >= 0  # the update makes the weight smaller
    torch.testing.assert_close(plain - decayed, 0.1 * 0.5 * start * agrees, rtol=1e-4, atol=1e-6)


def test_group_values_take_effect_at_the_next_step():
    p = torch.nn.Parameter(torch.ones(4, 8))
    optimizer = Muon([p], lr=0.02, weight_decay=0.1)
    set_grads([p], 0)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(4, 8))
    optimizer.param_groups[0].update(lr=0.02, momentum=0.0)
    optimizer.step()
    assert torch.equal(optimizer.state[p]["momentum_buffer"][0], p.grad)  # momentum 0 keeps the last gradient only
    assert not torch.equal(p.detach(), torch.ones(4, 8))


# ----------------------------------------------------------------------------------------------------------------------
# Both: state and errors


def test_nanochats_own_state_can_be_loaded():
    """nanochat's groups know neither our keys nor a world size; its buffers have the same names and shapes."""
    params = parameters([(8, 8)] * 3)
    ours = Muon(params, weight_decay=0.1)
    set_grads(params, 0)
    ours.step()
    state = copy.deepcopy(ours.state_dict())
    for group in state["param_groups"]:
        del group["world_size"]
    fresh = Muon(params)
    fresh.load_state_dict(state)
    fresh.step()
    assert fresh.param_groups[0]["weight_decay"] == 0.1
    assert set(state["state"][0]) == {"momentum_buffer", "second_momentum_buffer"}
    assert state["state"][0]["momentum_buffer"].shape == (3, 8, 8)


def test_bad_input_is_named():
    params = parameters(MATRICES + OTHERS)
    optimizers = make(params)
    set_grads(params, 0)
    params[1].grad = None
    with pytest.raises(ValueError, match=r"1 of 5 .*\(24, 24\)"):
        optimizers[0].step()
    set_grads(params, 0)
    for o in optimizers:
        o.step()
        state = copy.deepcopy(o.state_dict())
        for group in state["param_groups"]:
            group["world_size"] = 8
        with pytest.raises(ValueError, match="--nproc_per_node=8"):
            o.load_state_dict(state)
    fewer = Muon(params[:2])
    state = optimizers[0].state_dict()
    state["param_groups"] = state["param_groups"][2:3]
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:2]
    with pytest.raises(ValueError, match="same model"):
        fewer.load_state_dict(state)


# ----------------------------------------------------------------------------------------------------------------------
# Two processes


def one_rank(results, orthogonalizer):
    """Four steps, saved and restored after two, with gradients whose average is set_grads'."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        params = parameters(MATRICES + OTHERS)
        optimizers = make(params, orthogonalizer)
        for step in range(4):
            if step == 2:
                states = copy.deepcopy([o.state_dict() for o in optimizers])
                optimizers = make(params, orthogonalizer)
                for o, state in zip(optimizers, states):
                    o.load_state_dict(state)
            set_grads(params, step)
            for i, p in enumerate(params):
                # Opposite noise of the size of the gradient: no rank has the average, and the sum of both is exact.
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).round()
                p.grad = p.grad + (noise if rank == 0 else -noise)
            for o in optimizers:
                o.step()
        torch.save(
            [[p.detach() for p in params], *(o.state_dict()["state"] for o in optimizers)], f"{results}/{rank}.pt"
        )
    finally:
        dist.destroy_process_group()


def assert_same_state(a, b):
    assert a.keys() == b.keys()
    for index in a:
        assert a[index].keys() == b[index].keys() and all(torch.equal(a[index][k], b[index][k]) for k in a[index])


def test_two_processes_orthogonalize_by_the_package(run_ranks, tmp_path):
    run_ranks(f"import test_optim; test_optim.one_rank({str(tmp_path)!r}, 'newton_schulz')")
    a, b = (torch.load(tmp_path / f"{r}.pt", weights_only=True)[0] for r in (0, 1))
    assert all(torch.equal(p, q) for p, q in zip(a, b))
    alone = {name: parameters(MATRICES + OTHERS) for name in ORTHOGONALIZERS}
    optimizers = {name: make(params, name)[0] for name, params in alone.items()}
    for step in range(4):
        for name, params in alone.items():
            set_grads(params, step)
            optimizers[name].step()
    for start, p, *others in zip(parameters(MATRICES), a, *alone.values()):
        other, same = ((p - q).norm() / (q - start).norm() for q in others)
        assert same < 0.01 and other > 0.05, p.shape  # BF16 rounds the last bits of the average in two ways


def test_two_processes_do_what_one_does_on_the_averaged_gradients(run_ranks, tmp_path):
    run_ranks(f"import test_optim; test_optim.one_rank({str(tmp_path)!r}, 'polar_express')")
    ranks = [torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in (0, 1)]
    assert all(torch.equal(p, q) for p, q in zip(ranks[0][0], ranks[1][0]))  # the ranks agree to the bit

    params = parameters(MATRICES + OTHERS)
    optimizers = make(params)
    for step in range(4):
        set_grads(params, step)
        for o in optimizers:
            o.step()
    for i, (p, q) in enumerate(zip(ranks[0][0], params)):
        # (g + n + g - n) / 2 is g up to FP32 rounding, which Adam's first steps amplify where g is small.
        torch.testing.assert_close(p, q.detach(), rtol=1e-4, atol=1e-5, msg=lambda m, i=i: f"parameter {i}: {m}")
    # Both updates are blind to the scale of the gradients, the state is not; and each rank must hold only its part.
    for number, optimizer in enumerate(optimizers, start=1):
        for index, state in optimizer.state_dict()["state"].items():
            for key, whole in state.items():
                parts = [rank[number][index][key] for rank in ranks if index in rank[number]]
                if whole.ndim and len(parts) == 2 and parts[0].size(0) < whole.size(0):
                    parts = [torch.cat(parts)[: whole.size(0)]]
                for part in parts:
                    torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: f"{k}: {m}")
    # Of the states of two processes one makes its own, and of its own each of four; bit for bit what was saved.
    for number, optimizer in enumerate(optimizers, start=1):
        saved = [
            {
                "state": rank[number],
                "param_groups": [{**g, "world_size": 2} for g in optimizer.state_dict()["param_groups"]],
            }
            for rank in ranks
        ]
        alone = optimizer.resharded(saved)
        optimizer.load_state_dict(alone)
        for world_size in (2, 4):
            optimizer.world_size = world_size
            parts = []
            for optimizer.rank in range(world_size):
                parts.append(optimizer.resharded([alone]))
                optimizer.load_state_dict(copy.deepcopy(parts[-1]))
            if world_size == 2:
                for got, rank in zip(parts, ranks):
                    assert_same_state(got["state"], rank[number])
            optimizer.rank, optimizer.world_size = 0, 1
            assert_same_state(optimizer.resharded(parts)["state"], alone["state"])
    muon_state, adamw_state = ranks[0][1:]
    # Groups of (6, 40), (16, 48), (24, 24), (48, 16): 1, 3, 5 and 2 matrices, under their first parameter's number.
    assert [muon_state[i]["momentum_buffer"].size(0) for i in (0, 1, 4, 9)] == [1, 2, 3, 1]
    assert [tuple(adamw_state[i]["exp_avg"].shape) for i in range(3)] == [(32, 32), (33, 32), (7,)]
