"""Calls of the library that are refused: (call, a word of the one line). What a refusal must leave as it was is tested
beside that."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both, from_record

EDEN = Operand("ms_eden")
CONTEXTS = (nf.full_precision, nf.per_token_scale, nf.quantize_weights_once, nf.accumulate_gradients)


def tensor(*values: float) -> torch.Tensor:
    """16 values: these, and ones."""
    return torch.tensor([[*values, *[1.0] * (16 - len(values))]])


TENSORS = [  # (tensor, rounding, word)
    (torch.zeros(2, 24), "rtn", r"\(2, 24\).*16; pad"),
    (torch.zeros(2, 64), "ms_eden", r"\(2, 64\).*128; pad"),
    (torch.zeros(2, 48), "mxfp4", r"\(2, 48\).*32; pad"),
    (torch.zeros(2, 48), "mxfp8", r"\(2, 48\).*32; pad"),
    (torch.zeros(2, 0), "rtn", "non-empty"),
    (torch.zeros(0, 16), "rtn", "non-empty"),
    (torch.tensor(1.0), "rtn", "non-empty"),
    (torch.zeros(2, 16, dtype=torch.int32), "rtn", r"torch.int32.*\.float\(\)"),
    (torch.zeros(2, 16, dtype=torch.bool), "rtn", "torch.bool"),
    (torch.zeros(2, 16, device="meta"), "rtn", "meta device"),
    ([[1.0] * 16], "rtn", "got list"),
    (tensor(math.nan), "rtn", "1 of 16 "),
    (tensor(math.inf, -math.inf), "sr", "2 of 16 "),
    (torch.full((1, 16), 1e300, dtype=torch.float64), "rtn", "16 of 16 .* FP32"),
    (torch.full((1, 128), 3e38), "ms_eden", "overflow when rotated"),
    (torch.zeros(2, 16), "rtm", "'rtm'; .*rtn, four_over_six"),
]
CONSTANTS = [  # (fields of a rounding, word)
    ({"candidates": ()}, "candidates is .*a tuple of one positive number or more"),
    ({"candidates": 1.2}, "candidates is 1.2, "),
    ({"candidates": (1.0, -1.5)}, "candidates is .*positive"),
    ({"candidates": (1.0, math.nan)}, "candidates is .*positive"),
    ({"grid_max": 0}, "grid_max is 0, expected a positive number"),
    ({"grid_max": "6"}, "grid_max is '6'"),
    ({"scale_cap": math.inf}, "scale_cap is inf"),
    ({"scale_cap": 1e9}, "scale_cap is .*at most 448"),
    ({"scale_cap": 1e-6}, "largest scale, .* is 1e-06, expected at least 0.002, .*; increase scale_cap or"),
    ({"candidates": (1e-9,)}, "largest scale, .* is 4.5e-07, expected at least 0.002"),
    ({"element": "e3m2"}, "element is 'e3m2', expected e2m1 in"),
    ({"mx": "ceil", "block": 32, "element": "e5m2"}, "element is 'e5m2', expected e2m1 or e4m3"),
    ({"fp8": "tensor"}, "element is 'e2m1', expected e4m3 or e5m2"),
    ({"mx": "up"}, "mx is 'up', expected one of '', 'floor', 'ceil'"),
    ({"mx": "ceil", "fp8": "tensor"}, "two formats"),
    ({"stochastic": 1}, "stochastic is 1, expected True or False"),
    ({"fp8": "tensor", "element": "e4m3", "stochastic": True}, "leave stochastic out"),
    ({"mx": "ceil", "block": 32, "ms_eden": True}, "ms_eden corrects"),
    ({"prescale": 0.5}, "prescale is for the formats of mx"),
    ({"ms_eden": True, "stochastic": True}, "ms_eden rounds elements to nearest; leave stochastic out"),
    ({"ms_eden": True, "block_rows": 16}, "ms_eden corrects the scales of each row; leave block_rows out"),
    ({"ms_eden": True, "grid_max": 8.0}, "grid_max is 8.0, expected at most 7.5 with ms_eden"),
    ({"grid_max": 6.5}, "grid_max is 6.5, expected at most 6, the largest E2M1 number"),
    ({"grid_max": 7, "stochastic": True}, "grid_max is 7, expected at most 6"),
    ({"mx": "ceil", "block": 32, "grid_max": 8}, "grid_max is 8, expected at most 6"),
    ({"fp8": "tensor", "element": "e4m3", "grid_max": 449}, "grid_max is 449, expected at most 448, the largest E4M3"),
    ({"fp8": "tensor", "element": "e4m3", "candidates": (1.0, 1.5)}, "fp8='tensor' has no blocks; leave candidates"),
    ({"fp8": "tensor", "element": "e4m3", "block_rows": 16}, "fp8='tensor' has no blocks; .* block_rows out"),
    ({"block_rows": 7}, "block_rows is 7, expected 1, or 16 for square blocks"),
    ({"block": 8}, "block is 8, expected 16 in this format"),
    ({"block": 32}, "block is 32, expected 16 in this format"),
    ({"mx": "ceil", "block": 40}, "block is 40, expected a multiple of 16"),
]
OPERANDS = [  # (arguments of Operand, word)
    ((5,), "rounding is 5, expected a name of nanochat_fp4.ROUNDINGS"),
    ((["rtn"],), "rounding is .'rtn'., expected a name"),
    (("rtn", 1), "Operand: raw is 1, expected True or False"),
    (("rtn", False, "2"), "Operand: terms is '2', expected a whole number"),
    (("rtn", False, 1, "yes"), "Operand: feedback is 'yes', expected True or False"),
    (("e4m3", False, 1, False, 4), "rounding is 4, expected a name"),
]
GEMMS = [  # (arguments of Gemm, word)
    (("rtn", "rtn"), r"Gemm: a is 'rtn', expected an Operand; write nanochat_fp4.Operand\('rtn'\)"),
    ((Operand(), nf.ROUNDINGS["sr"]), r"Gemm: b is a value of the type Rounding, .*write nanochat_fp4.Operand\('sr'\)"),
    ((Operand(), None), "Gemm: b is None, expected an Operand$"),
    ((Operand(), Operand(), "128"), "Gemm: rht_dim is '128', expected a whole number"),
    ((Operand(), Operand(), 128, 0), "Gemm: fixed_signs is 0, expected True or False"),
]
ROWS = [  # (fields of a recipe, the GEMM and a word)
    ({"grad_input": Gemm(EDEN, EDEN)}, "grad_input: ms_eden .* rht_dim=128"),
    ({"grad_weight": Gemm(EDEN, EDEN, 16)}, "grad_weight: ms_eden .* rht_dim=128"),
    ({"grad_input": Gemm(EDEN, Operand(), 128)}, "grad_input: a rotation"),
    ({"output": Gemm(rht_dim=128)}, "output: a rotation"),
    ({"output": both("ms_eden", 128)}, "output: a rotated forward .*raw=True"),
    ({"grad_weight": both("sr", 48)}, "grad_weight: rht_dim is 48, .* 0, 16, 32"),
    ({"grad_weight": replace(both("sr", 16), rotations=2)}, "grad_weight: rotations is 2, .*rht_dim=128$"),
    ({"grad_weight": replace(both("sr", 128), rotations=3)}, "grad_weight: rotations is 3, .*rht_dim=128$"),
    ({"grad_weight": replace(both("sr"), rotations=2)}, "grad_weight: rotations is 2, .*rht_dim=128$"),
    ({"grad_weight": Gemm(Operand("sr", raw=True), Operand("sr"))}, "grad_weight: raw "),
    ({"output": Gemm(Operand("rtn"), Operand("rtn", raw=True))}, "output: raw "),
    ({"grad_input": Gemm(Operand("sr"), Operand("rtn", terms=2))}, "grad_input: two terms .* got 2 for rtn"),
    ({"output": Gemm(Operand("sr", terms=2), Operand("rtn"))}, "output: two terms .* got 2 for sr"),
    ({"output": Gemm(Operand("mxfp4", terms=2))}, "output: two terms .* got 2 for mxfp4"),
    ({"output": Gemm(Operand(terms=2))}, "output: two terms .* got 2 for None"),
    ({"output": Gemm(Operand("rtn", terms=3))}, "output: two terms .* got 3 for rtn"),
    ({"output": Gemm(Operand("rtn", feedback=True))}, "output: feedback .* for rtn"),
    ({"output": Gemm(b=Operand("rtn_16x16", feedback=True))}, "output: feedback .* for rtn_16x16"),
    ({"output": Gemm(b=Operand("sr", feedback=True))}, "output: feedback .* draws nothing, .* for sr"),
    ({"output": Gemm(b=Operand("rtn", terms=2, feedback=True))}, "output: feedback .* second term"),
    ({"grad_input": Gemm(b=Operand("rtn", feedback=True))}, "grad_input: feedback "),
    ({"output": both("mxfp4_sr_prescaled")}, "output: a prescaled rounding"),
    ({"output": Gemm(Operand("rtn", kept="rtn"))}, "output: kept .*FP8"),
    ({"output": Gemm(Operand("e4m3", kept="sr"))}, "output: kept .*; got sr"),
    ({"grad_input": Gemm(b=Operand("e4m3", kept="rtn"))}, "grad_input: kept"),
    ({"kinds": (("mlp", get_recipe("fp8")),)}, "kinds has 'mlp', .*mlp_up, mlp_down"),
    ({"kinds": (("mlp_up", get_recipe("clover_mixed")),)}, "mlp_up has kinds"),
    ({"kinds": {"mlp_up": get_recipe("fp8")}}, r"kinds is .*a tuple of pairs, .'mlp_up', Recipe"),
    ({"kinds": ("mlp_up", get_recipe("fp8"))}, "kinds is .*a tuple of pairs"),
    ({"kinds": (("mlp_up", "fp8"),)}, "kinds is .*a tuple of pairs"),
    ({"output": "rtn"}, "output is 'rtn', expected a Gemm"),
    ({"grad_weight": Operand("rtn")}, "grad_weight is a value of the type Operand, expected a Gemm"),
    ({"late": 0.5}, r"late is 0.5, expected .0.85, Recipe"),
    ({"late": (0.5, "clover")}, "late is .*'clover'.*, expected .*get_recipe"),
    ({"late": (1.5, get_recipe("bf16"))}, "late begins at 1.5, expected a fraction"),
    ({"kept_blocks": "0.1"}, "kept_blocks is '0.1', expected a number"),
    ({"kept_blocks": 1}, "kept_blocks is a share"),
    ({"summary": None}, "summary is None, expected a text"),
]


def read_by_compressed_tensors() -> nn.Linear:
    """A layer as transformers reads it from a folder of that format: with codes, and a forward that decodes them."""
    layer = nn.Linear(32, 32)
    layer.quantization_scheme, layer.forward = object(), lambda x: x
    layer.weight_packed = nn.Parameter(layer._parameters.pop("weight").detach())
    return layer


ARGUMENTS = [  # (arguments of convert, word)
    ({"model": None}, "got NoneType"),
    ({"model": lambda: None}, "got function"),
    ({"skip": 3}, "skip is 3"),
    ({"skip": ["lm_head", None]}, "skip is .*None"),
    ({"keep_last_blocks": "1"}, "keep_last_blocks are 0 and '1'"),
    ({"keep_first_blocks": 1.5}, "1.5 and 0"),
    ({"keep_first_blocks": 1}, "nn.ModuleList"),
    ({"model": nn.Embedding(4, 4)}, "the model has none"),
    ({"model": nn.Sequential(nn.Linear(12, 16))}, "0: in_features is 12"),
    ({"model": nn.Sequential(nn.Linear(12, 16), nn.Linear(12, 16))}, r"\(0, 1: in_features is 12[^;]*\)"),
    ({"model": nn.Linear(17, 33)}, "the model itself: in_features is 17"),
    (
        {"model": nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(16, 16)})}), "skip": ["up"]},
        r"'up' matches no linear layer; did you mean '\*\.up'\? there are: mlp.up",
    ),
    ({"skip": ["up"]}, "matches no linear layer; there are: 0"),
    ({"model": read_by_compressed_tensors()}, "in few bits by compressed-tensors; .* with nf.load_quantized"),
    ({"model": nn.Sequential(nn.Linear(32, 32)), "method": "clover_mixed"}, "clover_mixed has recipes for attention"),
]
PLANS = [  # (arguments of MethodPlan.parse, word)
    ({"layers": "up"}, "layers: 'up' .*pattern=method"),
    ({"layers": "up=cloover"}, "unknown method 'cloover'"),
    ({"phases": "late=bf16"}, "phases: 'late'"),
    ({"phases": "1.5=bf16"}, "phases: '1.5'"),
    ({"phases": "nan=bf16"}, "phases: 'nan'"),
    ({"phases": "0.5=nvidia_full"}, "nvidia_full .*blocks"),
    ({"phases": "0.5=bf16,0.4=clover"}, "phases: '0.4' .*rising"),
]
A_METHOD = "^method is .*, expected a name of nanochat_fp4.METHODS or a Recipe$"
REFUSED = {  # name of the case: (call, word)
    **{f"quantize {i}": (lambda x=x, r=r: nf.quantize(x, r), word) for i, (x, r, word) in enumerate(TENSORS)},
    **{f"seed {s}": (lambda s=s: nf.quantize(torch.randn(2, 128), "rtn", seed=s), "int64")
       for s in (None, "0", 1.0, torch.tensor(1.0))},
    **{f"recipe {i}": (lambda f=fields: Recipe("mine", **f), f"recipe 'mine'.*{word}")
       for i, (fields, word) in enumerate(ROWS)},
    **{f"convert {i}": (lambda a=a: nf.convert(**{"model": nn.Sequential(nn.Linear(16, 16))} | a), word)
       for i, (a, word) in enumerate(ARGUMENTS)},
    **{f"plan {i}": (lambda a=a: MethodPlan.parse("clover", **a), word) for i, (a, word) in enumerate(PLANS)},
    **{f"record {r}": (lambda r=r: from_record(r), "no recipe")
       for r in ({}, {"name": "x", "of_later": 1}, {"name": "x", "output": 3}, 7, [1])},
    **{f"{c.__name__}": (lambda c=c: c(None).__enter__(), f"{c.__name__}: got NoneType") for c in CONTEXTS},
    **{f"get_recipe {m}": (lambda m=m: get_recipe(m), A_METHOD) for m in (None, ["clover"], 4)},
    **{f"rounding {i}": (lambda f=fields: replace(nf.ROUNDINGS["rtn"], name="mine", **f), f"^rounding 'mine': .*{word}")
       for i, (fields, word) in enumerate(CONSTANTS)},
    **{f"operand {i}": (lambda a=a: Operand(*a), word) for i, (a, word) in enumerate(OPERANDS)},
    **{f"gemm {i}": (lambda a=a: Gemm(*a), word) for i, (a, word) in enumerate(GEMMS)},
    **{f"register {n!r}": (lambda n=n: nf.register(Recipe(n)), "register: .* is no good name; use letters")
       for n in ("", "my/method", "two words", "a,b", "a=b", "-x", ".x", "a:b")},
    "name of a recipe": (lambda: Recipe(3), "recipe 3: name is 3, expected a text"),
    "name of the end": (lambda: nf.register(Recipe("of_good_name", late=(0.5, Recipe("a b")))), "'a b' is no good"),
    "method of a layer": (lambda: nf.QuantLinear(32, 16, method=4), A_METHOD),
    "method of convert": (lambda: nf.convert(nn.Linear(32, 16), 4), A_METHOD),
    "a typing error": (lambda: get_recipe("cloover"),
                       r"'cloover'; did you mean clover\? Use one of: bf16, fp8, .*quartet2[,;].* or "),
    "capitals": (lambda: get_recipe("CLOVER"), "did you mean clover"),
    "a row that left": (lambda: get_recipe("nvidia_v2"), "'nvidia_v2' .*40089ce"),
    "another row that left": (lambda: get_recipe("clover_dithered"), "'clover_dithered' .*40089ce"),
    "a rounding without a name": (lambda: nf.Rounding(grid_max=7.0), "^this rounding: grid_max is 7.0, expected "),
    "a shape for none": (lambda: nf.quantize(torch.zeros(2, 30), nf.Rounding()), "for this rounding, expected a non-"),
    "feedback of none": (lambda: Recipe("m", output=Gemm(Operand(nf.Rounding(), feedback=True))), "got it for unnamed"),
    "how to add a row": (lambda: Operand("x_y"), r"nanochat_fp4.ROUNDINGS\['x_y'\] = nanochat_fp4.Rounding\(...\), "),
    "rounding": (lambda: Operand("srr"), r"'srr'; did you mean sr\? Known: rtn, .*; to add a row: "),
    "a rounding like none": (lambda: Operand("qqqq"), "'qqqq'; known: rtn, "),
    "rotation": (lambda: rotate(torch.randn(2, 100), 0), "100, .*128; pad"),
    "in_features": (lambda: nf.QuantLinear(120, 128), "in_features is 120, .*16; use nn.Linear"),
    "out_features": (lambda: nf.QuantLinear(128, 24), "out_features is 24, .*16; use nn.Linear"),
    "in_features of MXFP8": (lambda: nf.QuantLinear(48, 64, method="mxfp8"), "in_features is 48, .*32"),
    "whole numbers": (lambda: nf.QuantLinear(64, 32)(torch.ones(4, 64, dtype=torch.int64)),
                      r"in int64, expected .*; convert it with x\.float\(\)"),
    "another width": (lambda: nf.QuantLinear(64, 32)(torch.ones(4, 32)), "give it the layer's in_features"),
    "FP16": (lambda: nf.QuantLinear(32, 32).half()(torch.randn(2, 32).half()), "got float16.*autocast"),
    "FP64": (lambda: nf.QuantLinear(32, 32).double()(torch.randn(2, 32).double()),
             r"got float64; use model.float\(\) or model.bfloat16\(\)$"),
    "Gram matrices without convert": (lambda: nf.update_gram_matrices(nn.Linear(32, 32), lambda: None),
                                      "update_gram_matrices: Linear was not converted"),
    "progress without convert": (lambda: nf.set_progress(nn.Linear(32, 32), 0.5), "was not converted"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name):
    call, word = REFUSED[name]
    with pytest.raises(ValueError, match=word) as e:
        call()
    assert "\n" not in str(e.value) and len(str(e.value)) < 600
