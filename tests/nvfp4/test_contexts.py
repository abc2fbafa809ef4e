"""The with-statements of a converted model: nested, left in the wrong order, a change of method inside; and threads."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from _samples import Fused

import nanochat_fp4 as nf

CONTEXTS = (nf.full_precision, nf.per_token_scale, nf.quantize_weights_once, nf.accumulate_gradients)
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def model(method="clover"):
    torch.manual_seed(0)
    return nf.convert(Fused(), method, verbose=False)


def step(m):
    """The output and the gradients of one pass; the same numbers are drawn each time."""
    torch.manual_seed(2)
    m.zero_grad(set_to_none=False)
    y = m(X)
    y.square().mean().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in m.parameters())]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


def layers(m):
    return [layer for layer in m.modules() if isinstance(layer, nf.QuantLinear)]


def outside(m):
    return not any(layer.contexts for layer in layers(m))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_setting_holds_until_the_outer_context_is_left(context):
    m = model()
    before = step(m)
    with context(m):
        inside = step(m)
        with context(m):
            assert equal(step(m), inside)
        assert equal(step(m), inside)
        copies = copy.deepcopy(m), pickle.loads(pickle.dumps(m))
        assert all(map(outside, copies))
    assert equal(step(m), before) and outside(m)


@pytest.mark.parametrize("context", CONTEXTS)
def test_an_error_inside_ends_the_context(context):
    m = model()
    before = step(m)
    with pytest.raises(KeyError), context(m):
        raise KeyError
    assert equal(step(m), before) and outside(m)


@pytest.mark.parametrize("context", [nf.full_precision, nf.quantize_weights_once])
def test_a_context_around_a_model_that_is_not_converted_is_warned_of(recwarn, context):
    """The model may be another one than the one that computes."""
    with pytest.warns(UserWarning, match=f"{context.__name__}: no layer of this Linear is converted") as warned:
        with context(torch.nn.Linear(32, 16)):
            pass
    assert warned[0].filename == __file__
    with context(nf.QuantLinear(32, 16, method="bf16")):
        assert not recwarn.list


@pytest.mark.parametrize("second", CONTEXTS)
@pytest.mark.parametrize("first", CONTEXTS)
def test_contexts_may_end_in_any_order(first, second):
    """As those of two generators do; a setting that nobody asks for any more would stay for ever."""
    m = model()
    before = step(m)
    with second(m):
        inside = step(m)
    contexts = first(m), second(m)
    for context in contexts:
        context.__enter__()
    contexts[0].__exit__(None, None, None)
    assert equal(step(m), inside)
    contexts[1].__exit__(None, None, None)
    assert equal(step(m), before) and outside(m)


@pytest.mark.parametrize("method", ["nvidia", "clover"])
def test_threads_get_the_outputs_of_their_own_inputs(method):
    layer, together = nf.QuantLinear(128, 128, method=method), threading.Barrier(4)
    inputs = torch.randn(4, 8, 4, 128)
    with torch.no_grad():
        expected = [[layer(x) for x in mine] for mine in inputs]

    def outputs(thread):
        together.wait()
        with torch.no_grad():
            return [layer(inputs[thread][i % 8]) for i in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for want, got in zip(expected, pool.map(outputs, range(4))):
            assert all(torch.equal(y, want[i % 8]) for i, y in enumerate(got))


@pytest.mark.parametrize("how", ["convert", "set_progress"])
def test_a_method_that_changes_inside_once_takes_effect(how):
    """New codes, or none that were made before; not the old method's."""
    m = model("clover_late" if how == "set_progress" else "nvidia")
    first = step(m)
    with nf.quantize_weights_once(m), nf.quantize_weights_once(m):
        assert equal(step(m), first)
        if how == "convert":
            nf.convert(m, "clover", verbose=False)
        else:
            nf.set_progress(m, 1.0)
        inside = step(m)
    assert equal(inside, step(m)) and not equal(inside, first)
    with nf.quantize_weights_once(m):
        assert m.out.prepared_weight((m.out,)) is not None and equal(step(m), inside)
