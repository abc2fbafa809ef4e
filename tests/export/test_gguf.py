"""GGUF files come back into our Llama as scripts.export wrote them. Other files are refused by what is unknown."""

import struct

import numpy as np
import pytest
from _exporting import save_small

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.models.llama import Llama
from scripts import export

gguf = pytest.importorskip("gguf")
pytest.importorskip("safetensors")


@pytest.fixture
def exported(tiny_base, tmp_path):
    """(the folder of an export, a Llama of its shapes)"""
    model = save_small(tiny_base, "llama-gqa", "clover")
    export.main(["--source=base", f"--out={tmp_path / 'out'}", "--eval-tokens=0", "--format=gguf-bf16"])
    return tmp_path / "out", Llama(model.config)


def craft(source, target, keys: dict, tensors: dict) -> None:
    """A copy of a GGUF file with other keys and tensors; None leaves one out."""
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


F32 = np.float32
UNKNOWN = [
    ({"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type"),
    ({"llama.rope.scaling.factor": 4.0}, {}, "rope.scaling.factor"),
    ({"llama.expert_count": 8}, {}, "expert_count"),
    ({"llama.attention.sliding_window": 16}, {}, "sliding_window"),
    ({"llama.rope.dimension_count": 8}, {}, "head_dim"),
    ({"llama.rope.freq_base": 500.5}, {}, "rope_theta"),
    ({"llama.block_count": 10**6}, {}, "num_hidden_layers"),
    ({"llama.embedding_length": 128}, {}, "expected"),
    ({"llama.attention.layer_norm_rms_epsilon": 1e-6}, {}, "rms_norm_eps"),
    ({"llama.vocab_size": 7}, {}, "vocab_size"),
    ({"split.count": 2}, {}, "split.count"),
    ({}, {"rope_freqs.weight": np.ones(16, F32)}, "rope_freqs.weight"),
    ({}, {"blk.0.attn_q.bias": np.ones(64, F32)}, "attn_q.bias"),
    ({}, {"blk.2.ffn_up.weight": np.ones((256, 64), F32)}, "blk.2.ffn_up.weight"),
    ({}, {"blk.0.ffn_gate_exps.weight": np.ones((2, 8, 8), F32)}, "ffn_gate_exps"),
    ({}, {"blk.0.attn_norm.weight": np.ones(1, F32)}, r"attn_norm.weight is \(1,\), expected \(64,\)"),
    ({}, {"blk.0.attn_norm.weight": np.full(64, np.nan, F32)}, "not finite"),
    ({}, {"blk.1.ffn_down.weight": None}, "has no transformer.h.1.mlp.c_proj.weight"),
]


def test_files_that_are_not_known(exported):
    folder, model = exported
    nf.load_quantized(model, folder)
    good = (folder / "model.gguf").rename(folder / "good.gguf")
    for keys, tensors, message in UNKNOWN:
        craft(good, folder / "model.gguf", keys, tensors)
        with pytest.raises(UserError, match=message) as refused:
            nf.load_quantized(model, folder)
        assert "\n" not in str(refused.value)
    craft(good, folder / "model.gguf", {"llama.expert_count": 0, "general.author": "me"}, {})
    nf.load_quantized(model, folder)


def test_counts_are_bounded_by_the_size_of_the_file(exported):
    """A few bytes that promise much: refused at once, in one line; and every file that ends early."""
    folder, model = exported
    path, key = folder / "model.gguf", struct.pack("<Q1s", 1, b"k")
    whole = path.read_bytes()
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
            nf.load_quantized(model, folder)
        assert "\n" not in str(refused.value)
