"""Models of transformers leave as NVFP4: their folders, their experts, as their packages read them. Nothing is loaded
from a hub."""

import copy
import json

import _models
import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.export.load import load_safetensors
from nanochat_fp4.export.weights import forward_weights

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
READ_BACK = {
    "Llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES)),
    "Qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(**SIZES, head_dim=16)),
    "tied Llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "Mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SIZES, **EXPERTS)),
}
WITH_EXPERTS = ["Mixtral", "Qwen3-MoE", "DeepSeek-V3", "OLMoE"]


@pytest.mark.parametrize("name", READ_BACK)
def test_transformers_reads_the_same_weights(tmp_path, name):
    """Every tensor, decoded to BF16, is the one that nf.load_quantized reads, to the bit. The rows of nf.convert's
    layers are 4-bit codes in the file. Experts are read without their weight_global_scale by transformers 5.23 and 5.24
    (docs/models.md); this test fails on the version that mends it."""
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    nf.save_quantized(nf.convert(READ_BACK[name](transformers), "clover", verbose=False), tmp_path / "out")
    ours = nf.load_quantized(READ_BACK[name](transformers), tmp_path / "out").state_dict()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    config.quantization_config = {**config.quantization_config, "dequantize": True}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=config).state_dict()
    assert set(ours) == set(theirs)
    other = [key for key, value in ours.items() if not torch.equal(value.bfloat16(), theirs[key])]
    assert other == [key for key in ours if "experts" in key]


@pytest.mark.parametrize("kept", [0, 1])
def test_transformers_reads_the_layers_that_were_left_alone(tmp_path, kept):
    """Qwen2-VL's files have other names than its modules. With the file's names alone in `ignore`, transformers left
    each layer in high precision uninitialised (the case renamed_head)."""
    pytest.importorskip("compressed_tensors")
    text = {**SIZES, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    tower = {"depth": 1, "embed_dim": 64, "num_heads": 4, "hidden_size": 64, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=tower)
    cls = transformers.Qwen2VLForConditionalGeneration
    model = nf.convert(cls(config).eval(), "clover", keep_last_blocks=kept, verbose=False)
    nf.save_quantized(model, tmp_path / "out")
    read, info = cls.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    for name, _ in model.nf_report.left_alone:
        assert torch.equal(read.get_submodule(name).weight.float(), model.get_submodule(name).weight.bfloat16().float())


@pytest.mark.slow
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


@pytest.mark.slow
def test_gpt_oss_has_no_names(tmp_path):
    model = nf.convert(_models.MODELS["gpt-oss (transformers)"]().model, "clover", verbose=False)
    with pytest.raises(UserError, match="GptOssForCausalLM .*gate_up_proj"):
        nf.save_quantized(model, tmp_path / "out")
    nf.convert(model, "clover", skip=["*.experts"], verbose=False)
    nf.save_quantized(model, tmp_path / "out")
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_safetensors(tmp_path / "out")
