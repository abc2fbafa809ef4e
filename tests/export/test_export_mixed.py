"""Exports of a model with layers in FP8, alone and beside NVFP4: to the bit, read back here and by other packages."""

import importlib.util
import json

import pytest
import torch
from _exporting import save_small
from _models import Foreign

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.export.weights import forward_weights, served
from scripts import export


def run(tmp_path, *flags):
    export.main(["--source=base", f"--out={tmp_path / 'out'}", "--eval-tokens=64", "--calibration-tokens=64", *flags])
    return tmp_path / "out"


def mixed() -> Foreign:
    """One layer whose forward is in FP8, and one in NVFP4."""
    torch.manual_seed(0)
    model = nf.convert(Foreign(), "clover", verbose=False)
    nf.convert(model.layers[0], "clover_fp8_forward", verbose=False)
    return model


def test_both_kinds_of_layers_go_out_and_come_back(tmp_path):
    """compressed-tensors with two groups."""
    model, out = mixed(), tmp_path / "out"
    assert nf.save_quantized(model, out) == []
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    eight, four = (config["config_groups"][f"group_{i}"] for i in (0, 1))
    assert config["format"] == "mixed-precision" and config["ignore"] == ["lm_head"]
    assert (eight["format"], four["format"]) == ("float-quantized", "nvfp4-pack-quantized")
    assert (eight["targets"], four["targets"]) == (["layers.0"], ["layers.1"])
    weights = forward_weights(model)
    assert weights.eight_bits == {"layers.0"} and not weights.lost
    back = nf.load_quantized(Foreign(), out)
    for name, tensor in weights.tensors.items():
        torch.testing.assert_close(back.get_submodule(name).weight, tensor.dequantize(), rtol=2e-7, atol=0)
    tensors = load_file(out / "model.safetensors")
    assert tensors["layers.0.weight"].dtype == torch.float8_e4m3fn
    assert tensors["layers.1.weight_packed"].dtype == torch.uint8


@pytest.mark.parametrize("family, flags", [("gpt", ()), ("llama", ("--weights-only",))])
def test_layers_in_8_bits_go_out_and_come_back(tiny_base, tmp_path, family, flags):
    """--verify asks compressed-tensors itself, where it is installed."""
    model = save_small(tiny_base, family, "clover_fp8_forward")
    verify = ["--verify"] if importlib.util.find_spec("compressed_tensors") else []
    folder = run(tmp_path, f"--model-tag={family}", "--format=compressed-tensors", *flags, *verify)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (eight,) = config["config_groups"].values()
    assert config["format"] == "float-quantized" and config["ignore"] == ["lm_head"]
    inputs = eight["input_activations"]
    assert inputs is None if flags else (inputs["strategy"], inputs["dynamic"]) == ("token", True)
    nf.convert(model, "clover_fp8_forward", backward=False, verbose=False)
    weights = forward_weights(model)
    assert weights.eight_bits == set(weights.tensors) and not weights.lost
    back = nf.load_quantized(type(model)(model.config), folder)
    for name, tensor in weights.tensors.items():
        assert torch.equal(back.get_submodule(name).weight, tensor.dequantize()), name


def test_a_server_rounds_the_inputs_of_8_bit_layers_to_8_bits(tiny_base):
    """As an evaluation does, with a scale for each token."""
    model = save_small(tiny_base, "gpt", "clover_fp8_forward")
    nf.convert(model, "clover_fp8_forward", backward=False, verbose=False)
    ids = torch.arange(64).view(2, 32) % model.config.vocab_size
    model.eval()
    with torch.no_grad():
        own = model(ids)
        weights = forward_weights(model)
        with served(model, weights, dict.fromkeys(weights.tensors)) as copied:
            got = copied(ids)
        with served(model, weights) as copied:
            exact = copied(ids)
    assert (got - own).norm() < 0.1 * (exact - own).norm()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda parts: parts.pop("weight_scale"), "torch.float8_e4m3fn"),
        (lambda parts: parts.update(weight_scale=torch.tensor([0.0])), "weight_scale "),
        (lambda parts: parts.update(weight_scale=torch.ones(2)), "one weight_scale"),
        (lambda parts: parts.update(weight=parts["weight"][:-1]), "use the model"),
    ],
)
def test_a_damaged_layer_in_8_bits_is_refused_in_one_line(tiny_base, tmp_path, change, message):
    model = save_small(tiny_base, "gpt", "clover_fp8_forward")
    folder = run(tmp_path, "--model-tag=gpt", "--format=compressed-tensors", "--weights-only")
    tensors, layer = load_file(folder / "model.safetensors"), "model.layers.0.mlp.fc1"
    parts = {key.rpartition(".")[2]: tensors.pop(key) for key in [k for k in tensors if k.startswith(layer + ".")]}
    change(parts)
    save_file(tensors | {f"{layer}.{part}": t for part, t in parts.items()}, folder / "model.safetensors")
    with pytest.raises(UserError, match=message) as e:
        nf.load_quantized(type(model)(model.config), folder)
    assert "\n" not in str(e.value)


@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs gguf (pip install '.[export]')")
def test_gguf_has_the_8_bit_layers_in_its_own_8_bit_type(tiny_base, tmp_path):
    model = save_small(tiny_base, "llama", "clover_fp8_forward")
    folder = run(tmp_path, "--model-tag=llama", "--format=gguf", "--weights-only")
    assert "Q8_0" in (folder / "README.md").read_text()
    nf.convert(model, "clover_fp8_forward", backward=False, verbose=False)
    back = nf.load_quantized(type(model)(model.config), folder)
    for name, tensor in forward_weights(model).tensors.items():
        got, want = back.get_submodule(name).weight, tensor.dequantize()
        assert (got - want).norm() / want.norm() < 0.01, name
