"""Memory by count, against what autograd keeps of real forward passes, and what it means for cards."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import nanochat_fp4 as nf
from nanochat_fp4.models import gpt
from nanochat_fp4.models.gpt import GPT, RECOMPUTE, config_from_depth
from nanochat_fp4.training.memory import activation_bytes, choose, count, next_lever

VOCABULARY, GIB, SIZES = 65536, 2**30, [1, 2, 4, 8, 16, 32]


def on_meta(depth: int, method: str = "clover", vocabulary: int = VOCABULARY, **changes) -> GPT:
    config = config_from_depth(depth, vocabulary)
    for name, value in changes.items():
        setattr(config, name, value)
    with torch.device("meta"):
        return nf.convert(GPT(config), method, verbose=False)


def kept_per_token(depth: int, method: str, recompute: str, **changes) -> float:
    """Bytes that autograd keeps for each token of a forward pass as on a GPU. Nothing is computed."""
    tokens = 32
    config = config_from_depth(depth, 64, tokens)
    for name, value in changes.items():
        setattr(config, name, value)
    with FakeTensorMode(), torch.random.fork_rng(devices=[]):
        model = GPT(config)
        model.init_weights()
        wte = model.transformer.wte
        wte.weight = torch.nn.Parameter(wte.weight.detach().bfloat16())  # as on CUDA
        nf.convert(model, method, verbose=False)
        model.recompute = recompute
        sizes = []
        for rows in (1, 2):
            kept = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
            parameters = sum(s.nbytes() for s in kept.values())

            def pack(t, kept=kept):
                kept.setdefault(t.untyped_storage()._cdata, t.untyped_storage())
                return t

            ids = torch.zeros(rows, tokens, dtype=torch.int64)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), gpt.autocast("cpu", torch.bfloat16):
                model(ids, ids)
            sizes.append(sum(s.nbytes() for s in kept.values()) - parameters)
    return (sizes[1] - sizes[0]) / tokens


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("method", ["bf16", "fp8", "nvidia", "clover", "clover_fp8_forward"])
def test_activations_are_what_autograd_keeps(method, recompute):
    assert kept_per_token(2, method, recompute) == activation_bytes(on_meta(2, method, 64), recompute)


@pytest.mark.parametrize("method", ["bf16", "clover"])
def test_activations_of_three_layers_for_q_k_and_v(method):
    changes = {"separate_qkv": True}
    assert kept_per_token(2, method, "none", **changes) == activation_bytes(on_meta(2, method, 64, **changes), "none")


@pytest.mark.parametrize("depth, rows, peak", [(26, 8, 31.4), (32, 2, 31.3)])
def test_the_peak_is_what_the_document_adds_up(depth, rows, peak):
    assert count(on_meta(depth), rows).peak / 1e9 == pytest.approx(peak, abs=0.05)


def test_cards_train_what_they_should():
    for depth, gib in (20, 6), (26, 10), (32, 16), (40, 32):
        assert choose(on_meta(depth), gib * GIB, SIZES)[0].rows >= 1, depth
    best = choose(on_meta(20), 139 * GIB, SIZES)[0]
    assert best.flags == [] and best.rows == 32  # nothing is given up where everything fits
    assert choose(on_meta(20), 8 * GIB, SIZES)[0].flags == ["--state=lean", "--recompute=codes"]
    assert all(way.rows == 0 for way in choose(on_meta(40), 8 * GIB, SIZES))


def test_more_recomputation_and_lean_state_never_take_more():
    model = on_meta(26)
    peaks = {
        way: count(model, 4, *way).peak
        for way in itertools.product(("fp32", "lean"), ("none", "codes", "codes-mlp", "all"))
    }
    for state in ("fp32", "lean"):
        assert sorted(peaks[state, r] for r in ("none", "codes", "codes-mlp", "all"))[::-1] == [
            peaks[state, r] for r in ("none", "codes", "codes-mlp", "all")
        ]
    assert all(peaks["lean", r] < peaks["fp32", r] for r in ("none", "codes"))


def test_graphs_keep_the_activations_beside_the_update():
    """In GiB, of clover: what the update of the default takes comes on top, so a card filled to its count has no room
    for it. With graphs fewer matrices are updated at a time."""
    for depth, rows, without, with_graphs in ((20, 16, 25.7, 27.0), (26, 8, 29.3, 30.5)):
        counted = count(on_meta(depth), rows)
        assert counted.peak / GIB == pytest.approx(without, abs=0.1), depth
        assert counted.graphed_peak / GIB == pytest.approx(with_graphs, abs=0.1), depth
        assert counted.parts["update"] - counted.parts["graphed_update"] == 20 * (2**28 - 2**26)


def test_several_processes_send_all_gradients_before_an_update():
    model = on_meta(20)
    elements = sum(p.numel() for p in model.transformer.h.parameters() if p.ndim == 2)
    more = count(model, 4, processes=2).parts["update"] - count(model, 4).parts["update"]
    assert more == 4 * elements * 1.5


def test_the_next_lever_follows_what_is_on_already():
    model = on_meta(26)
    assert next_lever(model, 8).startswith("one more row takes 1.84 GiB, and --recompute=codes ")
    model.recompute = "codes-mlp"
    assert "--state=lean saves " in next_lever(model, 8)
    assert "--recompute=all saves " in next_lever(model, 8, state="lean")
