"""Small checkpoints to export, and readers of what is written that owe nothing to the package."""

import importlib.util
import json
import os
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from _models import Foreign
from torch import nn

from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.export.save import LIST, new_export
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.models.llama import Llama, LlamaConfig
from nanochat_fp4.training.checkpoint_manager import save_checkpoint

CONFIGS = {
    "gpt": GPTConfig(sequence_len=32, vocab_size=300, n_layer=3, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SL"),
    "llama": LlamaConfig(sequence_len=32, vocab_size=300, n_layer=2, n_head=2, n_kv_head=2, n_embd=64),
    "llama-gqa": LlamaConfig(
        sequence_len=32, vocab_size=300, n_layer=2, n_head=2, n_kv_head=1, n_embd=64, rope_base=500
    ),
}


def save_small(
    base: Path, family: str, method: str, tag: str = "", poke: float | None = None, data_dir: str = "", **changes
) -> torch.nn.Module:
    """Saves a base checkpoint of random weights, step 7, as if trained with the method; returns the model.

    poke: a value for one weight of the second block."""
    config = replace(CONFIGS[family], vocab_size=get_tokenizer().get_vocab_size(), **changes)
    model = (GPT if family == "gpt" else Llama)(config)
    model.init_weights()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
        if poke is not None:
            model.transformer.h[1].mlp.c_fc.weight[0, 0] = poke
    meta = {"model_config": asdict(config), "user_config": {"method": method, "data_dir": data_dir}, "val_bpb": 1.5,
            "tokenizer": get_tokenizer().fingerprint()}  # fmt: skip
    assert save_checkpoint(base / "base_checkpoints" / (tag or family), 7, model.state_dict(), None, meta)
    return model.eval()


# ----------------------------------------------------------------------------------------------------------------------
# A model with experts, as transformers has them


class Experts(nn.Module):
    """As transformers has them, two of them, with the arguments that its forward takes."""

    def __init__(self, transposed: bool = False):
        super().__init__()
        self.is_transposed, self.act_fn = transposed, nn.functional.silu
        up, down = (2, 96, 32), (2, 32, 48)
        self.gate_up_proj = nn.Parameter(torch.randn(up).mT.contiguous() if transposed else torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down).mT.contiguous() if transposed else torch.randn(down))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


class Mixture(Foreign):
    def __init__(self, transposed: bool = False):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 2, bias=False), Experts(transposed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(1)
        return self.lm_head(self.layers[1](self.layers[0](x + self.experts(x, chosen, weights))))


def as_in_a_checkpoint(model: nn.Module, state: dict) -> dict:
    """Instead of transformers' revert_weight_conversion, which --slow tests ask: a tensor for each expert and part."""
    result = {}
    for name, value in state.items():
        if name not in ("experts.gate_up_proj", "experts.down_proj"):
            result[name.replace("gate.", "router.")] = value
            continue
        value = value.mT if model.experts.is_transposed else value
        for e, rows in enumerate(value):
            parts = zip(("w1", "w3"), rows.chunk(2)) if "gate_up" in name else [("w2", rows)]
            result |= {f"experts.{e}.{part}.weight": piece for part, piece in parts}
    return result


# ----------------------------------------------------------------------------------------------------------------------
# Readers

_DTYPES = {"F32": "<f4", "BF16": "<u2", "U8": "u1", "F8_E4M3": "u1"}


def read_safetensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """{name: (dtype, its bytes as an array)} of a safetensors file; 16- and 8-bit floats as integers."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert length % 8 == 0
    header, tensors, end = json.loads(data[8 : 8 + length]), {}, 0
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert start == end, f"{name}: a gap before it"
        end = stop
        array = np.frombuffer(data[8 + length + start : 8 + length + stop], _DTYPES[entry["dtype"]])
        tensors[name] = entry["dtype"], array.reshape(entry["shape"])
    assert 8 + length + end == len(data)
    return tensors


def swapped(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k with the halves of each head exchanged: Llama's rotation, elsewhere, turns the other way."""
    return np.concatenate([half for head in np.split(rows, heads) for half in np.split(head, 2)[::-1]])


class _Config:
    def __init__(self, **entries):
        vars(self).update(entries)


class _Model(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def post_init(self):
        pass


def exported_code(folder: Path) -> torch.nn.Module:
    """The model that the folder's own modeling file builds of its config.json and weights, in FP32.

    Stand-ins take the place of transformers, so that its version, or its absence, changes nothing.
    """
    transformers, outputs = ModuleType("transformers"), ModuleType("transformers.modeling_outputs")
    transformers.DynamicCache, transformers.GenerationMixin = type("DynamicCache", (), {}), type("Mixin", (), {})
    transformers.PretrainedConfig, transformers.PreTrainedModel = _Config, _Model
    outputs.CausalLMOutputWithPast = SimpleNamespace
    spec = importlib.util.spec_from_file_location("exported_modeling", folder / "modeling_nanochat_fp4.py")
    code = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as m:
        m.setitem(sys.modules, "transformers", transformers)
        m.setitem(sys.modules, "transformers.modeling_outputs", outputs)
        spec.loader.exec_module(code)
    config = json.loads((folder / "config.json").read_text())
    model = code.NanoChatFP4ForCausalLM(code.NanoChatFP4Config(**config))
    tensors = read_safetensors(folder / "model.safetensors")
    assert {dtype for dtype, _ in tensors.values()} == {"F32"}
    model.load_state_dict({name: torch.tensor(array) for name, (_, array) in tensors.items()})
    return model.eval()


def write_value(out: Path, value: int, overwrite: bool = True) -> None:
    """An export of two files, and of a third where the value is even."""
    with new_export(out, overwrite) as part:
        for name in ("README.md", "config.json", "tokenizer.json")[: 3 - value % 2]:
            atomic_write(part / name, str(value))


def value_of(out: Path) -> int:
    """The value of an export, whole; AssertionError where files of two are mixed."""
    files = {path.name: path.read_text() for path in out.iterdir()}
    value = int(files["README.md"])
    assert len(files) == 4 - value % 2 and {v for k, v in files.items() if k != LIST} == {str(value)}
    return value


def names_beside(folder: Path) -> set[str]:
    """The names in a folder, without the file of the lock, which stays after a kill."""
    return {name for name in os.listdir(folder) if ".out.lock" not in name}
