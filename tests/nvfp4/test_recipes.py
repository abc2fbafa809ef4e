"""The method table against the one of the design, written down a second time; impossible rows; how to add a row."""

import dataclasses

import pytest
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4 import methods
from nanochat_fp4.nvfp4.methods import METHOD_TABLE, get_recipe
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both

NONE = "- x -"
# method: (output, grad_input, grad_weight), each "a x b, rotation". "raw": quantized from the unquantized tensor;
# "-": the values that the forward GEMM used, or grad_output as it is.
DESIGN = {
    "bf16": (NONE, NONE, NONE),
    "nvidia": ("rtn x rtn_16x16", "sr x -", "sr x raw rtn, RHT-16"),
    "four_over_six": (
        "four_over_six x four_over_six_16x16",
        "sr x -",
        "sr x raw rtn, RHT-16",
    ),
    "four_over_six_biased": (
        "four_over_six x four_over_six_16x16",
        "sr_four_over_six x -",
        "sr_four_over_six x raw four_over_six, RHT-16",
    ),
    "tetrajet_v2": ("rtn x rtn", "sr x sr, RHT-32", "sr x sr, RHT-32"),
    "tetrajet_v2_rht128": ("rtn x rtn", "sr x sr, RHT-128", "sr x sr, RHT-128"),
    "clover": ("four_over_six x four_over_six", "ms_eden x ms_eden, RHT-128", "ms_eden x ms_eden, RHT-128"),
    "clover_search": (
        "scale_search x scale_search",
        "ms_eden_search x ms_eden_search, RHT-128",
        "ms_eden_search x ms_eden_search, RHT-128",
    ),
    # Figure 1: (a) wgrad; (b) dgrad without, (c) with the weight; (d) = (a) + (b); (e) = (a) + (c).
    "fig1a_sr": (NONE, NONE, "sr x sr, RHT-128"),
    "fig1b_sr": (NONE, "sr x -", NONE),
    "fig1c_sr": (NONE, "sr x sr, RHT-128", NONE),
    "fig1d_sr": (NONE, "sr x -", "sr x sr, RHT-128"),
    "fig1e_sr": (NONE, "sr x sr, RHT-128", "sr x sr, RHT-128"),
    "fig1a_ms_eden": (NONE, NONE, "ms_eden x ms_eden, RHT-128"),
    "fig1c_ms_eden": (NONE, "ms_eden x ms_eden, RHT-128", NONE),
    "fig1e_ms_eden": (NONE, "ms_eden x ms_eden, RHT-128", "ms_eden x ms_eden, RHT-128"),
    # Figure 2: forward only; 1x16 or 16x16 weight blocks.
    "fig2_1x16_rtn": ("rtn x rtn", NONE, NONE),
    "fig2_16x16_rtn": ("rtn x rtn_16x16", NONE, NONE),
    "fig2_1x16_four_over_six": ("four_over_six x four_over_six", NONE, NONE),
    "fig2_16x16_four_over_six": ("four_over_six x four_over_six_16x16", NONE, NONE),
    # NVIDIA's recipe with one ingredient changed; the other systems that the sources name.
    "nvidia_1d": ("rtn x rtn", "sr x raw rtn", "sr x raw rtn, RHT-16"),
    "nvidia_no_rht": ("rtn x rtn_16x16", "sr x -", "sr x raw rtn"),
    "nvidia_no_sr": ("rtn x rtn_16x16", "rtn x -", "rtn x raw rtn, RHT-16"),
    "mxfp4_nvidia": ("mxfp4 x mxfp4_32x32", "mxfp4_sr x -", "mxfp4_sr x raw mxfp4, RHT-16"),
    "tseng": (
        NONE,
        "mxfp4_sr_prescaled x mxfp4_sr_prescaled, RHT-64",
        "mxfp4_sr_prescaled x mxfp4_sr_prescaled, RHT-64",
    ),
    "chmiel": ("rtn x rtn", "sr x raw rtn", "sr x raw sr"),
    "nvidia_v2": ("rtn x rtn", "ms_eden_by_16 x rtn, RHT-128", "ms_eden_by_16 x raw rtn, RHT-128"),
    "fp8": ("e4m3 x e4m3", "e5m2 x -", "e5m2 x -"),
    "fp8_blocks": ("e4m3_1x128 x e4m3_128x128", "e4m3_1x128 x -", "e4m3_1x128 x raw e4m3_1x128"),
    "mxfp8": ("mxfp8 x mxfp8", "mxfp8 x raw mxfp8", "mxfp8 x raw mxfp8"),
}


@pytest.mark.parametrize("method", DESIGN)
def test_row_is_the_designs(method):
    r = get_recipe(method)
    assert r.name == method and r.summary
    assert (str(r.output), str(r.grad_input), str(r.grad_weight)) == DESIGN[method]
    assert not any(g.fixed_signs for g in (r.output, r.grad_input, r.grad_weight))


def test_what_else_sets_a_system_apart():
    fixed = get_recipe("nvidia_fixed_signs")
    assert dataclasses.replace(fixed.grad_weight, fixed_signs=False) == get_recipe("nvidia").grad_weight
    assert fixed.grad_weight.fixed_signs and fixed.output == get_recipe("nvidia").output
    full = get_recipe("nvidia_full")
    assert dataclasses.replace(full, name=fixed.name, summary=fixed.summary, late=None, kept_blocks=0.0) == fixed
    assert str(full).endswith("the last 15% of the blocks in BF16; nvidia_full_end from 82% of the steps on")
    end = full.final
    assert (str(end.output), str(end.grad_input)) == (NONE, "sr x raw rtn_16x16")
    assert (end.grad_weight, end.kept_blocks) == (full.grad_weight, full.kept_blocks)
    requant = get_recipe("nvidia_v1_requant")
    assert (str(requant.output), str(requant.grad_input)) == ("rtn x rtn", "sr x rtn")
    assert requant.grad_weight == fixed.grad_weight


def test_remedies_are_clover_with_something_changed():
    clover = get_recipe("clover")
    remedies = [r for r in METHOD_TABLE.values() if r.name.startswith("clover_") and r.grad_input.a.rounding]
    assert len(remedies) >= 8
    for r in remedies:
        fields = [f.name for f in dataclasses.fields(r) if f.name not in ("name", "summary")]
        changed = {f for f in fields if getattr(r, f) != getattr(clover, f)}
        everything = ("clover_search", "clover_search_feedback")
        two = ("clover_search_backward", "clover_feedback_late")
        expected = 3 if r.name in everything else 2 if r.name in two else 1
        assert len(changed) == expected, (r.name, changed)


def test_names():
    assert set(DESIGN) <= {*nf.METHODS, *nf.ABLATIONS}
    assert (*nf.METHODS, *nf.ABLATIONS) == (*methods.METHODS, *methods.ALIASES, *methods.ABLATIONS) and len(
        nf.METHODS
    ) <= 12
    assert nf.METHODS[0] == "bf16" and len(set(nf.METHODS)) == len(nf.METHODS)
    assert get_recipe("quartet2") is get_recipe("clover")


def test_unknown_method_lists_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown method 'cloover'; use one of: bf16, fp8, .*quartet2; .*; did you mean clover\?$"
    ) as e:
        get_recipe("cloover")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("method", (None, ["clover"], 4))
def test_another_type_is_refused_in_one_line(method):
    expected = "^method is .*, expected a name of nanochat_fp4.METHODS or a Recipe$"
    with pytest.raises(ValueError, match=expected):
        get_recipe(method)
    with pytest.raises(ValueError, match=expected):
        nf.QuantLinear(32, 16, method=method)
    with pytest.raises(ValueError, match=expected):
        nf.convert(nn.Linear(32, 16), method)


def test_a_removed_method_names_the_last_commit_that_has_it():
    assert methods.REMOVED["quartet"] == "880d786" and methods.REMOVED["tetrajet_v2_outcontrol"] == "c116c2a"
    for method, commit in methods.REMOVED.items():
        with pytest.raises(ValueError, match=f"^method '{method}' was .* removed; the last commit .* is {commit}$"):
            get_recipe(method)


def test_forward_only_keeps_the_forward():
    for method in DESIGN:
        r = get_recipe(method)
        f = r.forward_only()
        assert f.output == r.output and f.grad_input == Gemm()
        assert f.grad_weight == Gemm(b=Operand(raw=r.grad_weight.b.raw))  # nvidia's takes the raw input in both
        assert not f.draws_in_backward
    late = get_recipe("clover_feedback_late")  # which ends so as well
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
    r = get_recipe(method)
    assert (r.draws_in_forward, r.draws_in_backward) == (forward, backward)
    assert r.quantizes == (method != "bf16")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"grad_input": Gemm(Operand("ms_eden"), Operand("ms_eden"))}, "grad_input: ms_eden .* rht_dim=128"),
        ({"grad_weight": Gemm(Operand("ms_eden"), Operand("ms_eden"), 16)}, "grad_weight: ms_eden .* rht_dim=128"),
        ({"grad_input": Gemm(Operand("ms_eden"), Operand(), 128)}, "grad_input: a rotation needs both operands"),
        ({"output": Gemm(rht_dim=128)}, "output: a rotation needs both operands"),
        ({"output": both("ms_eden", 128)}, "output: a rotated forward keeps no values for the backward; set raw=True"),
        ({"grad_weight": Gemm(Operand("sr"), Operand("sr"), 48)}, "grad_weight: rht_dim is 48, expected 0, 16, 32"),
        ({"grad_weight": Gemm(Operand("sr", raw=True), Operand("sr"))}, "grad_weight: raw only means something"),
        ({"output": Gemm(Operand("rtn"), Operand("rtn", raw=True))}, "output: raw only means something"),
        ({"grad_input": Gemm(Operand("sr"), Operand("rtn", terms=2))}, "grad_input: two terms .* got 2 for rtn"),
        ({"output": Gemm(Operand("sr", terms=2), Operand("rtn"))}, "output: two terms are for .* got 2 for sr"),
        ({"output": Gemm(Operand("mxfp4", terms=2))}, "output: two terms are for .* got 2 for mxfp4"),
        ({"output": Gemm(Operand(terms=2))}, "output: two terms are for .* got 2 for None"),
        ({"output": Gemm(Operand("rtn", terms=3))}, "output: two terms are for .* got 3 for rtn"),
        ({"output": Gemm(Operand("rtn", feedback=True))}, "output: feedback is for the weight .* got it for rtn"),
        (
            {"output": Gemm(b=Operand("rtn_16x16", feedback=True))},
            "output: feedback is for the weight .* for rtn_16x16",
        ),
        ({"output": Gemm(b=Operand("sr", feedback=True))}, "output: feedback is for .* draws nothing, .* for sr"),
        ({"output": Gemm(b=Operand("rtn", terms=2, feedback=True))}, "output: feedback is for .* second term"),
        ({"grad_input": Gemm(b=Operand("rtn", feedback=True))}, "grad_input: feedback is for the weight in output"),
        ({"output": both("mxfp4_sr_prescaled")}, "output: a prescaled rounding is for backward operands"),
    ],
)
def test_impossible_rows_name_the_gemm(fields, message):
    with pytest.raises(ValueError, match=f"recipe 'mine'(, |: ){message}"):
        Recipe("mine", **fields)


def test_unknown_rounding_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown rounding 'srr'; known: rtn, "):
        Operand("srr")


def test_print_shows_the_whole_row():
    assert str(get_recipe("nvidia")) == (
        "nvidia: output rtn x rtn_16x16; grad_input sr x -; grad_weight sr x raw rtn, RHT-16"
    )
