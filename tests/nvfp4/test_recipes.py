"""The method table against the one of the design, written down a second time; impossible rows; how to add a row."""

import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys

import pytest
import torch
from _rows import METHOD_TABLE

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.identity import identity
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both, from_record, to_record

NONE = "- x -"
# method: (output, grad_input, grad_weight), each "a x b, rotation". "raw": quantized from the unquantized tensor;
# "-": the values that the forward GEMM used, or grad_output as it is.
DESIGN = {
    "bf16": (NONE, NONE, NONE),
    "nvidia": ("rtn x rtn_16x16", "sr x -", "sr x raw rtn, RHT-16"),
    "four_over_six": ("four_over_six x four_over_six_16x16", "sr x -", "sr x raw rtn, RHT-16"),
    "tetrajet_v2": ("rtn x rtn", "sr x sr, RHT-32", "sr x sr, RHT-32"),
    "clover": ("four_over_six x four_over_six", "ms_eden x ms_eden, RHT-128", "ms_eden x ms_eden, RHT-128"),
    "clover_fp8_forward": ("e4m3 x e4m3", "ms_eden x ms_eden, RHT-128", "ms_eden x ms_eden, RHT-128"),
    "fp8": ("e4m3 x e4m3", "e5m2 x -", "e5m2 x -"),
}


@pytest.mark.parametrize("method", DESIGN)
def test_row_is_the_designs(method):
    r = get_recipe(method)
    assert r.name == method and r.summary
    assert (str(r.output), str(r.grad_input), str(r.grad_weight)) == DESIGN[method]
    assert not any(g.fixed_signs for g in (r.output, r.grad_input, r.grad_weight))


def test_what_sets_nvidia_full_apart():
    full, nvidia = get_recipe("nvidia_full"), get_recipe("nvidia")
    assert full.grad_weight == dataclasses.replace(nvidia.grad_weight, fixed_signs=True)
    assert (full.output, full.grad_input) == (nvidia.output, nvidia.grad_input)
    assert str(full).endswith("the last 15% of the blocks in BF16; nvidia_full_end from 82% of the steps on")
    end = full.final
    assert (str(end.output), str(end.grad_input)) == (NONE, "sr x raw rtn_16x16")
    assert (end.grad_weight, end.kept_blocks) == (full.grad_weight, full.kept_blocks)


def test_names():
    missing = set(methods.METHODS) - set(DESIGN) - {"nvidia_full"}  # whose test is its own
    assert not missing, f"add {missing} to DESIGN in this file (CONTRIBUTING, a method)"
    assert nf.METHODS == (*methods.METHODS, *methods.ALIASES)
    assert nf.METHODS[0] == "bf16" and len({*nf.METHODS}) == len(nf.METHODS) and len(methods.METHODS) <= 8
    assert get_recipe("quartet2") is get_recipe("clover")


def test_a_registered_row_is_a_method_and_its_name_stands_for_it_alone():
    row = Recipe("of_mine", output=both("rtn"), late=(0.5, Recipe("end_of_mine", output=both("sr"))))
    nf.register(row)
    nf.register(dataclasses.replace(row, summary="other words"))
    assert get_recipe("of_mine") == row and get_recipe("end_of_mine") == row.final
    assert "of_mine" not in nf.METHODS
    for other in (
        dataclasses.replace(row, output=both("sr")),
        dataclasses.replace(row, name="other", late=(0.5, dataclasses.replace(row.final, output=both("rtn")))),
        dataclasses.replace(row, name="clover"),
        dataclasses.replace(row, name="quartet2"),
    ):
        with pytest.raises(ValueError, match="give this one another name, or start"):
            nf.register(other)
    with pytest.raises(ValueError, match=r"already \(of_mine: output rtn x rtn; .* this is of_mine: output sr x sr; "):
        nf.register(dataclasses.replace(row, output=both("sr")))
    with pytest.raises(ValueError, match="got str, .*nanochat_fp4.Recipe"):
        nf.register("clover")


@pytest.mark.parametrize("name", METHOD_TABLE)
def test_a_recipe_comes_back_from_json(name):
    record = json.loads(json.dumps(to_record(get_recipe(name))))
    assert from_record(record) == get_recipe(name) and from_record(record).summary == get_recipe(name).summary


def test_a_rounding_of_ones_own_comes_back_from_json_without_the_table_that_had_it(monkeypatch):
    rows = dict(nf.ROUNDINGS)
    monkeypatch.setitem(nf.ROUNDINGS, "rounding_of_mine", dataclasses.replace(rows["rtn"], candidates=(1.0, 1.5)))
    changed = Operand(dataclasses.replace(rows["sr"], scale_cap=256.0))
    mine = Recipe("mine", output=Gemm(Operand("rounding_of_mine")), grad_input=Gemm(changed))
    record, of_the_package = json.dumps(to_record(mine)), Gemm(Operand(rows["sr"]))
    assert from_record({"name": "other", "grad_input": {"a": {"rounding": "sr"}}}).grad_input == of_the_package
    monkeypatch.undo()
    assert from_record(json.loads(record)) == mine and from_record(json.loads(record)).grad_input != of_the_package


def test_a_function_is_stored_as_its_identity_and_needs_its_file(monkeypatch):
    record = json.loads(json.dumps(to_record(get_recipe("integers"))))
    assert record["output"]["a"]["rounding"]["quantize"].startswith("eight_bit_integers 3.")
    again = from_record(record)
    assert again == get_recipe("integers") and again.output.a.rounding.quantize is nf.ROUNDINGS["integers"].quantize
    assert again.output.a.rounding != dataclasses.replace(again.output.a.rounding, quantize=lambda x, r, n: x)
    for name in ("integers", "integers_sr"):
        monkeypatch.delitem(nf.ROUNDINGS, name)
    with pytest.raises(LookupError, match="eight_bit_integers"):
        from_record(record)


FUNCTION = """from functools import lru_cache, partial
import torch

TABLE = torch.linspace(-1, 1, 5000)
LARGEST = {"a": 7}

class Grid:
    def __init__(self, top):
        self.top = top

def scaled(blocks, by=1.0):
    return blocks * by

@lru_cache
def bits():
    return 4

def steps(top, names):
    return 2 * top

def make(top, grid, step):
    def quantize(x, rounding, noise, shift=0.5):
        "Rounds."
        here = TABLE[0] if rounding.name in {"one", "two", "three"} else LARGEST["a"]  # a comment
        found = [scaled(block, 2.0) / top + shift for block in x]
        return found + [here, bits(), grid.top, step(), *map(lambda y: y + 1, x)]
    return quantize

quantize = make(3, Grid(5), partial(steps, 6, names=()))
"""


def identity_in(text):
    run = {}
    exec(compile(text, "mine.py", "exec"), run)
    return identity(run["quantize"])


@pytest.mark.parametrize(
    "old, new",
    [
        ("/ top", "* top"),  # the code
        ("scaled(block, 2.0)", "scaled(block, 3.0)"),  # a constant
        ("y + 1", "y + 2"),  # of a function within it
        ("shift=0.5", "shift=0.25"),
        ("make(3,", "make(4,"),  # a variable of the function around it
        ("blocks * by", "blocks - by"),  # a function of the file
        ("by=1.0", "by=2.0"),
        ("-1, 1, 5000", "-1, 1, 4999"),  # a tensor
        ('"a": 7', '"a": 6'),
        ("return 4", "return 5"),  # a function with a cache
        ("Grid(5)", "Grid(6)"),
        ("steps, 6", "steps, 8"),
        ("2 * top", "2 + top"),
    ],
)
def test_a_functions_identity_is_what_it_computes(old, new):
    assert old in FUNCTION and identity_in(FUNCTION) != identity_in(FUNCTION.replace(old, new))
    for old, new in (("  # a comment", ""), ("Rounds.", "Rounds x."), ("import torch", "import torch\n\nOTHER = 3")):
        assert identity_in(FUNCTION) == identity_in(FUNCTION.replace(old, new))


def test_functions_identities_are_alike_in_all_processes():
    code = f"FUNCTION = {FUNCTION!r}\nfrom nanochat_fp4.nvfp4.identity import identity\nrun = {{}}\n"
    code += "exec(compile(FUNCTION, 'other.py', 'exec'), run)\nprint(identity(run['quantize']))"
    for seed in ("1", "2"):
        process = [sys.executable, "-c", code]
        told = subprocess.run(process, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True)
        assert told.stdout.strip() == identity_in(FUNCTION), told.stderr


def integers(bits):
    """Functions of one name, of which each has its own number of bits."""

    def quantize(x, rounding, noise):
        return nf.NVFP4Tensor((x * 2**bits).round(), torch.ones(len(x), 1), torch.full((), 2.0**-bits))

    return nf.Rounding(quantize=quantize)


def test_functions_of_one_name_are_two(monkeypatch):
    monkeypatch.setattr(nf.ROUNDINGS, "data", dict(nf.ROUNDINGS))
    recipes = {}
    for bits in (2, 3, 8):
        nf.ROUNDINGS[f"int{bits}"] = integers(bits)
        recipes[bits] = Recipe("of_integers", output=both(f"int{bits}"))
    assert nf.ROUNDINGS["int2"] != nf.ROUNDINGS["int3"] and nf.ROUNDINGS["int2"] == integers(2)
    assert len({*recipes.values()}) == 3
    for recipe in recipes.values():
        record = json.loads(json.dumps(to_record(recipe)))
        row = record["output"]["a"]["rounding"]
        for stored in (row["quantize"], "quantize", "quantize 2.7 0123456789ab"):  # now, before, of another Python
            record["output"]["a"]["rounding"] = record["output"]["b"]["rounding"] = row | {"quantize": stored}
            assert from_record(record) == recipe, stored
        row["quantize"] = row["quantize"][:-12] + "0123456789ab"
        record["output"]["a"]["rounding"] = row
        with pytest.raises(LookupError, match="quantize as it was"):
            from_record(record)
        assert copy.deepcopy(recipe) == recipe


@pytest.mark.parametrize("function", [functools.partial(max), torch.nn.Identity(), [].append])
def test_a_callable_that_is_no_function_is_refused(function):
    with pytest.raises(ValueError, match="a def or a lambda"):
        nf.Rounding(quantize=function)


def test_forward_only_keeps_the_forward():
    for method in DESIGN:
        r = get_recipe(method)
        f = r.forward_only()
        kept = (
            dataclasses.replace(r.output.a, kept=None),
            dataclasses.replace(r.output.b, kept=None),
        )  # nothing in 4 bits
        assert f.output == Gemm(*kept) and f.grad_input == Gemm()
        assert f.grad_weight == Gemm(b=Operand(raw=r.grad_weight.b.raw))  # nvidia's takes the raw input in both
        assert not f.grad_input.random and not f.grad_weight.random
    late = get_recipe("clover_late")  # which ends so as well
    assert late.forward_only().final == late.final.forward_only() != late.final


@pytest.mark.parametrize(
    "method, forward, backward",
    [
        ("bf16", False, False),
        ("nvidia", True, True),  # X^T is rotated in the forward pass, so that only its codes are kept
        ("tetrajet_v2", False, True),
        ("clover", False, True),
        ("clover_search", False, True),
        ("fig1b_sr", False, True),
        ("fig2_1x16_rtn", False, False),
    ],
)
def test_which_passes_draw_random_numbers(method, forward, backward):
    layer, states = nf.QuantLinear(128, 128, method=method), [torch.get_rng_state()]
    y = layer(torch.randn(16, 128, generator=torch.Generator().manual_seed(0)))
    states.append(torch.get_rng_state())
    y.sum().backward()
    states.append(torch.get_rng_state())
    drawn = [not torch.equal(before, after) for before, after in zip(states, states[1:])]
    assert drawn == [forward, backward]
    assert get_recipe(method).quantizes == (method != "bf16")


def test_print_shows_the_whole_row():
    nvidia = get_recipe("nvidia")
    assert (
        str(nvidia)
        == repr(nvidia)
        == ("nvidia: output rtn x rtn_16x16; grad_input sr x -; grad_weight sr x raw rtn, RHT-16")
    )
    assert repr(nvidia.forward_only()) == "nvidia: output rtn x rtn_16x16; backward in high precision"
    assert repr(nf.get_recipe("bf16")) == "bf16: high precision"
    assert repr(nf.QuantLinear(64, 128, method="clover")) == "QuantLinear(64, 128, bias=False, method=clover)"
