"""nf.load_quantized of folders in compressed-tensors' NVFP4 that are damaged, or of a similar format."""

import json

import pytest
import torch
from _models import Foreign
from safetensors.torch import load_file, save_file

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError

F8 = torch.float8_e4m3fn


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    nf.save_quantized(nf.convert(Foreign(), "clover", verbose=False), tmp_path / "out")
    return tmp_path / "out"


def change(folder, **tensors) -> None:
    found = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        name = name.replace("__", ".")
        found.pop(name) if value is None else found.update({name: value})
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def described(folder, **entries) -> None:
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for name, value in entries.items():
        (group if name == "group_size" else config["quantization_config"])[name] = value
    (folder / "config.json").write_text(json.dumps(config))


BAD_FILES = {
    "groups of 32": (change, {"layers__0__weight_scale": torch.ones(32, 1).to(F8)}, "only groups of 16"),
    "no block scales": (change, {"layers__0__weight_scale": None}, "layers.0 has codes without weight_scale; ex"),
    "no tensor scale": (change, {"layers__0__weight_global_scale": None}, "has codes without weight_global_scale"),
    "another shape": (change, {"layers__0__weight_packed": torch.zeros(16, 16).byte()}, "expected .32, 16."),
    "MXFP4": (change, {"layers__0__weight_scale": torch.ones(32, 2).byte()}, "scales in torch.uint8, which is not"),
    "INT4": (change, {"layers__0__weight_packed": torch.zeros(32, 4).int()}, "codes in torch.int32"),
    "negative scales": (change, {"layers__0__weight_global_scale": -torch.ones(1)}, "layers.0 has negative scales"),
    "a zero point": (change, {"layers__0__weight_zero_point": torch.zeros(1)}, "weight_zero_point is not of this"),
    "said to be MXFP4": (described, {"format": "mxfp4-pack-quantized"}, "is in 'mxfp4-pack-quantized'; expected nvfp4"),
    "said to be GPTQ": (described, {"format": None, "quant_method": "gptq"}, "is in 'gptq'"),
    "said to have groups of 32": (described, {"group_size": 32}, "has groups of 32; expected"),
    "rotated": (described, {"transform_config": {"config_groups": {"R1": {}}}}, "has rotated weights"),
}  # fmt: skip


@pytest.mark.parametrize("how", BAD_FILES)
def test_bad_files_are_one_line(how, folder):
    edit, changes, message = BAD_FILES[how]
    edit(folder, **changes)
    with pytest.raises(UserError, match=message) as e:
        nf.load_quantized(Foreign(), folder)
    assert "\n" not in str(e.value) and ";" in str(e.value)


def test_scales_of_a_servers_cache_are_left_out(folder):
    change(folder, layers__0__k_scale=torch.ones(1))
    nf.load_quantized(Foreign(), folder)


def test_a_buffer_that_no_file_has_is_named(folder):
    with torch.device("meta"):
        model = nf.convert(Foreign(), "clover", verbose=False)
        model.register_buffer("inv_freq", torch.ones(4), persistent=False)
    with pytest.raises(UserError, match="inv_freq is on the meta device, and no file has it; build the model inside"):
        nf.load_quantized(model, folder)
