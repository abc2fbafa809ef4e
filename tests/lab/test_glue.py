"""The count of glue: distinct elements of a kernel's indices, the stored counts, and a block's schedule."""

import importlib
import json
from collections import namedtuple

import numpy as np
import pytest

from lab import RESULTS
from nanochat_fp4 import step_time
from nanochat_fp4.errors import UserError
from nanochat_fp4.training import fits

Dep = namedtuple("Dep", "index var_names size")


@pytest.fixture(scope="module")
def glue():
    return importlib.import_module("lab.predict.glue")  # with Inductor, which takes seconds


def test_an_element_counts_once_however_often_it_is_read(glue):
    import sympy

    token, column = sympy.symbols("d0 d1", integer=True)
    whole = Dep(64 * token + column, (token, column), (256, 64))
    half = Dep(64 * token + column % 32 + 32, (token, column), (256, 64))
    every, share = glue._addresses(whole)
    upper, same = glue._addresses(half)
    assert share == same == glue.SHARE and every.size * share == 256 * 64
    assert upper.size * 2 == every.size == np.union1d(every, upper).size
    flat = Dep(token, (token,), (256 * 64,))
    assert np.array_equal(glue._addresses(flat)[0], every)
    batch = Dep(64 * 128 * token + column, (token, column), (2, 128 * 64))
    assert np.array_equal(glue._addresses(batch)[0], every)
    assert glue._addresses(Dep(sympy.Integer(3), (), ()))[0].tolist() == [3]


@pytest.mark.parametrize("name", ["glue_d20_sm120", "glue_d26_sm90"])
def test_the_model_of_a_step_has_the_counted_bytes(name):
    found = json.loads((RESULTS / f"{name}.json").read_text())["kernels"]
    of_glue = {m: sum(k["bytes"] for k in kernels if k["kind"] == "glue") for m, kernels in found.items()}
    # Inductor writes FP8 in kernels of glue. step_time counts FP8_ELEMENT for 7 widths of inputs and 9 of gradients.
    quantizers = sum(k["bytes"] for k in found["fp8"] if k["kind"] == "quantizer")
    assert of_glue.pop("fp8") + quantizers - 16 * step_time.FP8_ELEMENT == pytest.approx(step_time.GLUE["fp8"], abs=6)
    # ReLU^2's kernel reads its input a first time for the largest value, and keeps 8 bits of it.
    (square,) = (k for k in found["clover"] if "quantize_relu_squared" in k["of"])
    assert max(square["read"].values()) == 8 and 4 in square["written"].values()
    kind = "rotated" if name.endswith("sm120") else "codes"  # with ReLU^2's derivative where c_fc's gradient is rotated
    of_glue[kind] = of_glue.pop("clover") + 8 + 4
    assert of_glue == pytest.approx({m: step_time.GLUE[m] for m in ("bf16", kind)}, abs=1)


def test_what_recomputation_moves_is_counted():
    found = json.loads((RESULTS / "glue_codes_d26_sm120.json").read_text())["kernels"]
    moved = {method: sum(k["bytes"] for k in kernels) for method, kernels in found.items()}
    for recompute in "codes", "codes-mlp":
        expected = sum(fits.AGAIN[tensor][2] for tensor in fits.OF_RECOMPUTE[recompute])
        assert moved[f"clover:{recompute}"] - moved["clover"] == pytest.approx(expected, abs=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("method, expected", [("bf16", 110), ("clover", 92)])
def test_a_blocks_schedule(glue, method, expected):
    kernels = [k for k in glue.count(method, 8, 1, 90) if k["kind"] == "glue"]
    assert sum(k["bytes"] for k in kernels) == pytest.approx(expected, abs=2)
    amax = [k for k in kernels if "amax" in k["of"] and k["bytes"] > 1]
    assert len(amax) == (3 if method == "clover" else 0)  # both norms with theirs, and attention's output
    assert sorted(round(k["bytes"]) for k in amax) == ([2, 6, 10] if amax else [])


def test_bad_input(glue):
    for arguments in (["--depth", "3"], ["--rows", "0"]):
        with pytest.raises(UserError, match="--depth must be even, --rows at least 1"):
            glue.main(arguments)
