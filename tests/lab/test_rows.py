"""The rows of lab, written down a second time: the paper's figures, other systems, remedies of clover's gap."""

import dataclasses
from importlib.util import find_spec

import pytest
import torch

import nanochat_fp4 as nf
from lab.recipes import RECIPES
from nanochat_fp4 import doctor

NONE = "- x -"
# method: (output, grad_input, grad_weight), as in tests/nvfp4/test_recipes.py
DESIGN = {
    "four_over_six_biased": (
        "four_over_six x four_over_six_16x16",
        "sr_four_over_six x -",
        "sr_four_over_six x raw four_over_six, RHT-16",
    ),
    "tetrajet_v2_rht128": ("rtn x rtn", "sr x sr, RHT-128", "sr x sr, RHT-128"),
    "clover_search": (
        "scale_search x scale_search",
        "ms_eden_search x ms_eden_search, RHT-128",
        "ms_eden_search x ms_eden_search, RHT-128",
    ),
    "fig1a_sr": (NONE, NONE, "sr x sr, RHT-128"),
    "fig1b_sr": (NONE, "sr x -", NONE),
    "fig1c_sr": (NONE, "sr x sr, RHT-128", NONE),
    "fig1d_sr": (NONE, "sr x -", "sr x sr, RHT-128"),
    "fig1e_sr": (NONE, "sr x sr, RHT-128", "sr x sr, RHT-128"),
    "fig1a_ms_eden": (NONE, NONE, "ms_eden x ms_eden, RHT-128"),
    "fig1c_ms_eden": (NONE, "ms_eden x ms_eden, RHT-128", NONE),
    "fig1e_ms_eden": (NONE, "ms_eden x ms_eden, RHT-128", "ms_eden x ms_eden, RHT-128"),
    "fig2_1x16_rtn": ("rtn x rtn", NONE, NONE),
    "fig2_16x16_rtn": ("rtn x rtn_16x16", NONE, NONE),
    "fig2_1x16_four_over_six": ("four_over_six x four_over_six", NONE, NONE),
    "fig2_16x16_four_over_six": ("four_over_six x four_over_six_16x16", NONE, NONE),
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
    "fp8_blocks": ("e4m3_1x128 x e4m3_128x128", "e4m3_1x128 x -", "e4m3_1x128 x raw e4m3_1x128"),
    "fp8_e4m3_rows": ("e4m3 x e4m3", "e4m3_rows x -", "e4m3_rows x -"),
    "clover_fp8_forward_4bit": (
        "e4m3, four_over_six kept x e4m3, four_over_six kept",
        "ms_eden x ms_eden, RHT-128",
        "ms_eden x ms_eden, RHT-128",
    ),
    "clover_fp8_forward_4bit_input": (
        "e4m3, four_over_six kept x e4m3",
        "ms_eden x ms_eden, RHT-128",
        "ms_eden x ms_eden, RHT-128",
    ),
    "clover_fp8_forward_dgrad": ("e4m3, four_over_six kept x e4m3", "e5m2 x -", "ms_eden x ms_eden, RHT-128"),
    "clover_fp8_forward_wgrad": ("e4m3 x e4m3, four_over_six kept", "ms_eden x ms_eden, RHT-128", "e5m2 x -"),
    "mxfp8": ("mxfp8 x mxfp8", "mxfp8 x raw mxfp8", "mxfp8 x raw mxfp8"),
}


def test_every_system_is_written_twice():
    """A row that is no remedy of clover has its design here; the two others are compared with nvidia's below."""
    systems = {name for name in RECIPES if not name.startswith("clover_")}
    missing = systems - set(DESIGN) - {"nvidia_fixed_signs", "nvidia_v1_requant"}
    assert not missing, f"add {missing} to DESIGN in this file (CONTRIBUTING, a method)"


@pytest.mark.parametrize("method", DESIGN)
def test_row_is_the_designs(method):
    r = nf.get_recipe(method)
    assert r.name == method and r.summary
    assert (str(r.output), str(r.grad_input), str(r.grad_weight)) == DESIGN[method]
    assert not any(g.fixed_signs for g in (r.output, r.grad_input, r.grad_weight))


def test_what_else_sets_a_system_apart():
    nvidia, fixed, requant = (nf.get_recipe(name) for name in ("nvidia", "nvidia_fixed_signs", "nvidia_v1_requant"))
    assert fixed == dataclasses.replace(nvidia, name=fixed.name, grad_weight=fixed.grad_weight)
    assert fixed.grad_weight == dataclasses.replace(nvidia.grad_weight, fixed_signs=True) == requant.grad_weight
    assert (str(requant.output), str(requant.grad_input)) == ("rtn x rtn", "sr x rtn")


@pytest.mark.parametrize("method", ["tetrajet_v2_rht128", "mxfp8", "fp8_blocks"])
def test_the_doctor_blames_no_machine_for_a_row(method, monkeypatch):
    """Neither for the order of a rotation's sums, nor for blocks that are larger than its layers' remainders."""
    if find_spec("triton"):
        monkeypatch.setenv("NVFP4_KERNELS", "triton")
    problems = doctor.problems(torch.device("cpu"), nf.get_recipe(method), doctor.SMALL_LAYER, 0, "bf16", every=True)
    assert not any(problems)


def test_gradients_in_e4m3_with_a_scale_a_row_have_a_quarter_of_e5m2s_error():
    """Whatever the magnitudes of the rows are: one scale of E4M3 would lose the small ones."""

    def gradients(method):
        torch.manual_seed(0)
        layer, x = nf.QuantLinear(64, 128, method=method), torch.randn(256, 64, requires_grad=True)
        g = torch.randn(256, 128) * torch.logspace(-6, 3, 256)[torch.randperm(256)].unsqueeze(-1)
        return torch.autograd.grad(layer(x), (x, layer.weight), g)

    forward = nf.Recipe("forward_alone", output=nf.get_recipe("fp8").output)
    exact, e5m2, rows = map(gradients, (forward, "fp8", "fp8_e4m3_rows"))
    for e, a, b in zip(exact, e5m2, rows):
        errors = [((got - e).norm(dim=-1) / e.norm(dim=-1)).square().median() for got in (a, b)]
        assert 3 < errors[0] / errors[1] < 6


def test_remedies_are_clover_with_something_changed():
    clover = nf.get_recipe("clover")
    of_fp8 = "clover_fp8_forward_dgrad", "clover_fp8_forward_wgrad"
    remedies = [r for r in RECIPES.values() if r.name.startswith("clover_") and r.grad_input.a.rounding]
    assert len(remedies) >= 8
    for r in remedies:
        changed = {f.name for f in dataclasses.fields(r) if f.init and getattr(r, f.name) != getattr(clover, f.name)}
        expected = 3 if r.name == "clover_search" else 2 if r.name in ("clover_search_backward", *of_fp8) else 1
        changed -= {"name", "summary"}
        assert len(changed) == expected, f"{r.name} changes {changed}, expected {expected} of clover's fields"
