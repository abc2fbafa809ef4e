"""Models of transformers leave as NVFP4: their folders, their experts, as their packages read them. Nothing is loaded
from a hub."""

import copy
import json

import _models
import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.export.load import load_safetensors
from nanochat_fp4.export.weights import forward_weights

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")
WITH_EXPERTS = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "OLMoE"]


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_have_the_names_of_their_checkpoints(tmp_path, name):
    """Names are those of save_pretrained. compressed-tensors decodes each tensor to the forward pass's weight."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    torch.manual_seed(0)
    model = nf.convert(_models.MODELS[f"{name} (transformers)"]().model, "clover", verbose=False)
    weights, trained = forward_weights(model).tensors, copy.deepcopy(model)
    nf.save_quantized(model, tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():  # what transformers itself writes of these values
        for layer, t in weights.items():
            module = model.get_submodule(layer)
            getattr(module, "part", module.weight).copy_(t.dequantize())
    model.save_pretrained(tmp_path / "plain")
    want, got = load_safetensors(tmp_path / "plain"), load_safetensors(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor, packed = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized"), 0
    for key, value in want.items():
        layer = key.removesuffix(".weight")
        if f"{layer}.weight_packed" in got:
            parts = {p: got.pop(f"{layer}.{p}") for p in ("weight_packed", "weight_scale", "weight_global_scale")}
            torch.testing.assert_close(compressor.decompress(parts, scheme)["weight"].float(), value, rtol=0.01, atol=0)
            packed += 1
        else:
            assert torch.equal(got.pop(key), value)
    assert not got and packed > len(weights)  # gate and up are one weight in the model
    read = _models.MODELS[f"{name} (transformers)"]().model
    nf.save_quantized(trained, tmp_path / "out", dtype=torch.float32, overwrite=True)
    nf.load_quantized(read, tmp_path / "out")  # decoded, into a model that nobody converted
    for key, value in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[key], value, rtol=1e-6, atol=0)


def test_gpt_oss_has_no_names(tmp_path):
    model = nf.convert(_models.MODELS["gpt-oss (transformers)"]().model, "clover", verbose=False)
    with pytest.raises(UserError, match="checkpoints of GptOssForCausalLM have one .*gate_up_proj for all experts"):
        nf.save_quantized(model, tmp_path / "out")
    nf.convert(model, "clover", skip=["*.experts"], verbose=False)
    nf.save_quantized(model, tmp_path / "out")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_safetensors(tmp_path / "out")
