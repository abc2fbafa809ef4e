"""What other programs' packages read in the exports of this project's models. Each test needs such a package."""

import json
import re

import numpy as np
import pytest
import torch
from _exporting import read_safetensors, save_small, swapped

import nanochat_fp4 as nf
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.export.gguf_file import pack_blocks
from nanochat_fp4.export.huggingface import describe
from nanochat_fp4.export.weights import forward_weights, served
from nanochat_fp4.nvfp4.format import pack
from scripts import export

TEXTS = ["the capital of gold planets", "1234567 12.5 a\n\n  b\tc", "Ünïcödé \U0001f600 日本語 don't  ", "aaaa bb"]
ROWS = {"attn.c_q": "attn_q", "attn.c_k": "attn_k", "attn.c_v": "attn_v", "attn.c_proj": "attn_output",
        "mlp.c_gate": "ffn_gate", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}  # fmt: skip


def run(tmp_path, *flags: str):
    argv = ["--source=base", f"--out={tmp_path / 'out'}", "--eval-tokens=0", "--calibration-tokens=64"]
    export.main([*argv, *flags])
    return tmp_path / "out"


def logits_of_transformers(folder, ids: torch.Tensor, dtype: torch.dtype, **quantization) -> torch.Tensor:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    if quantization:
        config.quantization_config = {**config.quantization_config, **quantization}
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, trust_remote_code=True, dtype=dtype).eval()
    with torch.no_grad():
        return model(ids).logits.float()


@pytest.mark.parametrize("family", ["gpt", "llama-gqa"])
def test_transformers_computes_tokenizes_and_generates(tiny_base, tmp_path, family):
    """The same logits and ids. Generation with a cache is the sequence that our own engine continues greedily."""
    transformers = pytest.importorskip("transformers")
    model, ours = save_small(tiny_base, family, "clover"), get_tokenizer()
    folder = run(tmp_path, "--format=safetensors", "--dtype=float32")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text)["input_ids"] == [ours.get_bos_token_id(), *ids] and theirs.decode(ids) == text
    with torch.no_grad():
        ids = prompt = torch.tensor([ours.encode("the capital of gold", prepend="<|bos|>")])
        torch.testing.assert_close(logits_of_transformers(folder, ids, torch.float32), model(ids), rtol=0, atol=1e-4)
        for _ in range(20):
            ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    read = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    mask = torch.ones_like(prompt)
    got = read.generate(prompt, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert got.tolist() == ids.tolist()


@pytest.mark.parametrize("family, method", [("gpt", "clover"), ("llama", "nvidia"), ("llama", "clover_fp8_forward")])
def test_transformers_reads_the_quantized_weights(tiny_base, tmp_path, family, method):
    """Decoded, with inputs in 16 bits, and with the inputs that compressed-tensors rounds."""
    pytest.importorskip("compressed_tensors"), pytest.importorskip("transformers")
    model = save_small(tiny_base, family, method)
    folder = run(tmp_path, "--format=compressed-tensors")
    nf.convert(model, method, verbose=False)
    weights, ids = forward_weights(model)[0], torch.arange(48).view(2, 24)
    tensors = read_safetensors(folder / "model.safetensors")
    input_scales = dict.fromkeys(weights)
    for theirs, [(ours, *_)] in describe(model)[1].items():
        if scale := tensors.get(f"{theirs[:-7]}.input_global_scale"):
            input_scales[ours[:-7]] = float(scale[1][0])
    assert all(scale is None for scale in input_scales.values()) == (method == "clover_fp8_forward")
    with torch.no_grad(), served(model, weights) as exact, served(model, weights, input_scales) as rounded:
        exact, rounded = exact(ids), rounded(ids)
    got = logits_of_transformers(folder, ids, torch.bfloat16, dequantize=True)
    assert (got - exact).norm() < 0.02 * exact.norm()
    got = logits_of_transformers(folder, ids, torch.bfloat16)
    # The dtypes differ, so inputs near the middle of two codes go the other way. 1.41 were two unlike roundings.
    assert (got - rounded).norm() < 1.25 * (exact - rounded).norm()


@pytest.mark.parametrize("family, file_format", [("gpt", "compressed-tensors"), ("llama", "safetensors")])
@pytest.mark.parametrize("source, checkpoints", [("base", "base_checkpoints"), ("sft", "chatsft_checkpoints")])
def test_the_lines_of_the_card_generate(
    tiny_base, tmp_path, capsys, monkeypatch, family, file_format, source, checkpoints
):
    pytest.importorskip("compressed_tensors"), pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    save_small(tiny_base, family, "clover")
    (tiny_base / "base_checkpoints").rename(tiny_base / checkpoints)
    folder = run(tmp_path, f"--source={source}", f"--format={file_format}")
    lines = (folder / "README.md").read_text().partition("## Use")[2]
    capsys.readouterr()
    monkeypatch.chdir(folder)
    exec(re.sub("^    ", "", lines, flags=re.M), {})
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("family, method", [("gpt", "nvidia"), ("llama", "clover")])
def test_compressed_tensors_decodes_the_codes(tiny_base, tmp_path, family, method):
    """The package's own unpacking of every layer gives the weights of the forward pass."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    model = save_small(tiny_base, family, method)
    folder = run(tmp_path, "--format=compressed-tensors", "--weights-only")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor, tensors = BaseCompressor.get_value_from_registry(scheme.format), load_file(folder / "model.safetensors")
    back, read = nf.load_quantized(type(model)(model.config), folder), 0
    for i, block in enumerate(back.transformer.h):
        for ours, theirs in (("attn.c_v", "self_attn.v_proj"), ("attn.c_proj", "self_attn.o_proj")):
            parts = {part: tensors[f"model.layers.{i}.{theirs}.{part}"]
                     for part in ("weight_packed", "weight_scale", "weight_global_scale")}  # fmt: skip
            got = compressor.decompress(parts, scheme)["weight"]
            torch.testing.assert_close(got.float(), block.get_submodule(ours).weight.detach(), rtol=2**-7, atol=0)
            read += 1
    assert read == 2 * model.config.n_layer


# ----------------------------------------------------------------------------------------------------------------------
# GGUF


def test_blocks_of_gguf():
    """64 values: four scale bytes, then for each 16 values 8 bytes, first half in the low nibbles."""
    codes = torch.arange(64, dtype=torch.uint8).remainder(16).view(1, 64)
    t = nf.NVFP4Tensor(pack(codes), torch.tensor([[1.0, 2.0, 448.0, 0.0]]).to(torch.float8_e4m3fn), torch.tensor(3.0))
    data = pack_blocks(t)
    assert data[0, :4].tolist() == [0x38, 0x40, 0x7E, 0]
    assert data[0, 4:12].tolist() == [i | (i + 8) << 4 for i in range(8)] and data.shape == (1, 36)


@pytest.mark.parametrize("method", ["clover", "clover_fp8_forward", None])
def test_gguf_reads_the_weights(tiny_base, tmp_path, capsys, method):
    """Decoded by the gguf package: NVFP4 to the bit; FP8 in GGUF's own 8-bit type; BF16 where nothing is quantized."""
    gguf = pytest.importorskip("gguf")
    model = save_small(tiny_base, "llama-gqa", method or "clover")
    folder = run(tmp_path, "--format=gguf" if method else "--format=gguf-bf16")
    assert "calibration" not in capsys.readouterr().err
    reader = gguf.GGUFReader(folder / "model.gguf")
    fields, tensors = reader.fields, {t.name: t for t in reader.tensors}
    assert not any(name.endswith("input_scale") for name in tensors)  # llama.cpp finds its own.
    kind = {"clover": "NVFP4", "clover_fp8_forward": "Q8_0", None: "BF16"}[method]
    assert fields["general.file_type"].contents() == gguf.LlamaFileType[f"MOSTLY_{kind}"]
    assert ("nvfp4]" in (folder / "README.md").read_text()) == (method == "clover")
    assert fields["general.architecture"].contents() == "llama" and fields["llama.rope.freq_base"].contents() == 500
    assert fields["llama.attention.head_count_kv"].contents() == 1 and fields["llama.block_count"].contents() == 2
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == "<|output_end|>"
    assert ("Q8_0" in (folder / "README.md").read_text()) == (method == "clover_fp8_forward")
    weights = forward_weights(nf.convert(model, method, verbose=False))[0] if method else {}
    for i, block in enumerate(model.transformer.h):
        for ours, theirs in ROWS.items():
            weight = block.get_submodule(ours).weight.detach().bfloat16()
            want = (weights[f"transformer.h.{i}.{ours}"].dequantize() if method else weight.float()).numpy()
            if heads := {"attn.c_q": 2, "attn.c_k": 1}.get(ours):  # transformers' order, and then llama.cpp's pairs
                want = swapped(want, heads)
                want = want.reshape(heads, 2, -1, want.shape[1]).swapaxes(1, 2).reshape(want.shape)
            t = tensors[f"blk.{i}.{theirs}.weight"]
            got = gguf.dequantize(t.data, t.tensor_type)
            if method == "clover":
                got = got * tensors[f"blk.{i}.{theirs}.scale"].data[0]
            close = 0.01 * np.abs(want).max() if method == "clover_fp8_forward" else 0
            np.testing.assert_allclose(got, want, rtol=2**-22, atol=close, err_msg=ours)
    assert np.array_equal(tensors["output_norm.weight"].data, model.transformer.ln_f.weight.detach().numpy())
