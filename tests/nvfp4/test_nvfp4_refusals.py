"""Calls of the library that are refused: (call, a word of the one line). What a refusal must leave as it was is tested
beside that."""

import math

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
    (torch.zeros(2, 48), "integers", r"\(2, 48\).*32; pad"),
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
ROWS = [  # (fields of a recipe, the GEMM and a word)
    ({"grad_input": Gemm(EDEN, EDEN)}, "grad_input: ms_eden .* rht_dim=128"),
    ({"grad_weight": Gemm(EDEN, EDEN, 16)}, "grad_weight: ms_eden .* rht_dim=128"),
    ({"grad_input": Gemm(EDEN, Operand(), 128)}, "grad_input: a rotation"),
    ({"output": Gemm(rht_dim=128)}, "output: a rotation"),
    ({"output": both("ms_eden", 128)}, "output: a rotated forward .*raw=True"),
    ({"grad_weight": both("sr", 48)}, "grad_weight: rht_dim is 48, .* 0, 16, 32"),
    ({"grad_weight": Gemm(Operand("sr", raw=True), Operand("sr"))}, "grad_weight: raw "),
    ({"output": Gemm(Operand("rtn"), Operand("rtn", raw=True))}, "output: raw "),
    ({"output": Gemm(Operand("rtn", kept="rtn"))}, "output: kept .*FP8"),
    ({"output": Gemm(Operand("e4m3", kept="sr"))}, "output: kept .*; got sr"),
    ({"grad_input": Gemm(b=Operand("e4m3", kept="rtn"))}, "grad_input: kept"),
    ({"late": (1.5, get_recipe("bf16"))}, "fractions"),
    ({"kept_blocks": 1}, "fractions"),
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
    ({"model": nn.Sequential(nn.Linear(12, 16))}, r"in_features is 12.* \(0\)"),
    ({"model": nn.Sequential(nn.Linear(12, 16), nn.Linear(12, 16))}, r"in_features is 12[^;]* \(0, 1\)\)"),
    ({"model": nn.Linear(17, 33)}, r"in_features is 17.* \(the model itself\)"),
    (
        {"model": nn.ModuleDict({"mlp": nn.ModuleDict({"up": nn.Linear(16, 16)})}), "skip": ["up"]},
        r"'up' matches no linear layer; did you mean '\*\.up'\? there are: mlp.up",
    ),
    ({"skip": ["up"]}, "matches no linear layer; there are: 0"),
    ({"model": read_by_compressed_tensors()}, "in few bits by compressed-tensors; .* with nf.load_quantized"),
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
    **{f"register {n!r}": (lambda n=n: nf.register(Recipe(n)), "register: .* is no good name; use letters")
       for n in ("", "my/method", "two words", "a,b", "a=b", "-x", ".x", "a:b")},
    "name of the end": (lambda: nf.register(Recipe("of_good_name", late=(0.5, Recipe("a b")))), "'a b' is no good"),
    "method of a layer": (lambda: nf.QuantLinear(32, 16, method=4), A_METHOD),
    "method of convert": (lambda: nf.convert(nn.Linear(32, 16), 4), A_METHOD),
    "a typing error": (lambda: get_recipe("cloover"),
                       r"'cloover'; did you mean clover\? Use one of: bf16, fp8, .*quartet2[,;].* or "),
    "capitals": (lambda: get_recipe("CLOVER"), "did you mean clover"),
    "how to add a row": (lambda: Operand("x_y"), r"nanochat_fp4.ROUNDINGS\['x_y'\] = nanochat_fp4.Rounding\(...\), "),
    "rounding": (lambda: Operand("srr"), r"'srr'; did you mean sr\? Known: rtn, .*; to add a row: "),
    "a rounding like none": (lambda: Operand("qqqq"), "'qqqq'; known: rtn, "),
    "rotation": (lambda: rotate(torch.randn(2, 100), 0), "100, .*128; pad"),
    "in_features": (lambda: nf.QuantLinear(120, 128), "in_features is 120, .*16; use nn.Linear"),
    "out_features": (lambda: nf.QuantLinear(128, 24), "out_features is 24, .*16; use nn.Linear"),
    "in_features of blocks of 32": (lambda: nf.QuantLinear(48, 64, method="integers"), "in_features is 48, .*32"),
    "whole numbers": (lambda: nf.QuantLinear(64, 32)(torch.ones(4, 64, dtype=torch.int64)),
                      r"in int64, expected .*; convert it with x\.float\(\)"),
    "another width": (lambda: nf.QuantLinear(64, 32)(torch.ones(4, 32)), "give it the layer's in_features"),
    "FP16": (lambda: nf.QuantLinear(32, 32).half()(torch.randn(2, 32).half()), "got float16.*autocast"),
    "FP64": (lambda: nf.QuantLinear(32, 32).double()(torch.randn(2, 32).double()),
             r"got float64; use model.float\(\) or model.bfloat16\(\)$"),
    "progress without convert": (lambda: nf.set_progress(nn.Linear(32, 32), 0.5), "was not converted"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name):
    call, word = REFUSED[name]
    with pytest.raises(ValueError, match=word) as e:
        call()
    assert "\n" not in str(e.value) and len(str(e.value)) < 600
