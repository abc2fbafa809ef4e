"""A Llama-like model that somebody else trained: weights, tokenizer and chat format.

The source is a GGUF file, a folder of transformers, or the name of a model on the hub. Weights in 4 to 8 bits are
decoded. Tied embeddings become two matrices.

Ids change. First come the 256 bytes, then the tokens in the order of their merges, then the special tokens. The rows of
embedding and head move with their tokens. Some of nanochat's special tokens are not in the model. They get the rows of
a reserved token, which no text contains.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.data.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, RustBPETokenizer
from nanochat_fp4.data.tokenizer_files import byte_characters
from nanochat_fp4.errors import UserError, one_line, require
from nanochat_fp4.export import gguf_file
from nanochat_fp4.export.huggingface import describe
from nanochat_fp4.export.load import check_config, load_safetensors, read_config, read_weights
from nanochat_fp4.models.llama import Llama, LlamaConfig

# Digits one by one, then GPT-2's pattern on the text between them.
_SMOLLM = r"""\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"""
# llama.cpp's names of split patterns. scripts.export writes the first name for nanochat's pattern, too.
PATTERNS = {gguf_file.PRE_TOKENIZER: gguf_file.PRE_TOKENIZER_PATTERN, "smollm": _SMOLLM}
# ChatML: the model's names of nanochat's special tokens. A token without a name here keeps its own.
CHATML_NAMES = {"<|endoftext|>": "<|bos|>", "<|im_end|>": "<|assistant_end|>"}
CHATML = {
    "<|bos|>": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|assistant_end|>\n",
    "<|user_start|>": "<|im_start|>user\n",
    "<|user_end|>": "<|assistant_end|>\n",
    "<|assistant_start|>": "<|im_start|>assistant\n",
    "<|assistant_end|>": "<|assistant_end|>\n",
}
# The entries of config.json that are known: sizes, values that this package computes, entries without effect.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "max_position_embeddings", "head_dim")  # fmt: skip
_COMPUTED = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "mlp_bias": False,
             "attention_bias": False, "attention_dropout": 0, "rope_scaling": None, "pretraining_tp": 1,
             "rope_interleaved": False}  # fmt: skip
_CHECKED = {"rms_norm_eps", "rope_theta", "rope_parameters", "tie_word_embeddings", "quantization_config"}
_WITHOUT_EFFECT = {"_name_or_path", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "is_llama_config",
                   "pad_token_id", "torch_dtype", "transformers_version", "use_cache"}  # fmt: skip
LARGEST = 1 << 24  # of a size: products of three fit into 64 bits with room to spare
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Imported(NamedTuple):
    config: LlamaConfig
    state: dict[str, Tensor]  # FP32
    tokenizer: RustBPETokenizer
    about: dict[str, Any]  # name, license, types: how many tensors are of which type


class _Vocabulary(NamedTuple):
    pattern: str
    normal: dict[bytes, int]  # token -> row
    special: dict[str, int]
    merges: list[bytes]  # what each pair becomes


def read_llama(source: str | Path, sequence_len: int = 2048) -> Imported:
    """Reads the model. sequence_len is that of training and evaluation from now on.

    Supported: Llama's architecture with this package's shapes, and the split patterns and chat formats above. Raises
    UserError for any other entry, tensor, shape, pattern and token, and where safetensors or gguf is not installed.
    """
    path = Path(source)
    if not path.exists() and HUB_NAME.fullmatch(str(source)):
        path = _from_hub(str(source))
    file = gguf_file.read(path) if path.is_file() else None
    config = file.config if file else read_config(path)
    model_config = _llama_config(path, config, sequence_len)
    keys = {k: t.tensor_type.name for k, t in file.tensors.items()} if file else {
        k: str(t.dtype).removeprefix("torch.") for k, t in load_safetensors(path).items()
    }  # fmt: skip
    if model_config.n_layer > len(keys) // 9:
        raise UserError(f"{path}: {model_config.n_layer} layers, but {len(keys)} tensors; download it again")
    with torch.device("meta"):
        model = Llama(model_config)
    about = describe(model)
    check_config(path, config, about)
    vocabulary = _of_gguf(path, file.fields) if file else _of_folder(path)
    tokenizer, order = _tokenizer(path, vocabulary, model_config.vocab_size)
    plain, weights = read_weights(file or path, model, about, tied=bool(config.get("tie_word_embeddings")))
    state = {name: tensor.float() for name, tensor in plain.items()}
    state |= {f"{name}.weight": tensor.dequantize() for name, tensor in weights.tensors.items()}
    model_config = replace(model_config, vocab_size=tokenizer.get_vocab_size())
    with torch.device("meta"):
        padded = Llama(model_config).lm_head.out_features
    for name in ("transformer.wte.weight", "lm_head.weight"):
        rows = torch.zeros(padded, model_config.n_embd)
        rows[: len(order)] = state[name][order]
        state[name] = rows
    fields = file.fields if file else {}
    named = {"name": fields.get("general.name", path.stem), "license": fields.get("general.license")}
    about = {**named, "types": dict(sorted(Counter(keys.values()).items()))}
    return Imported(model_config, {name: state[name] for name in model.state_dict()}, tokenizer, about)


def _from_hub(name: str) -> Path:
    require("huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))
    except (OSError, ValueError, RuntimeError) as e:  # no network, no such model, gated
        raise UserError(f"{name} is no file or folder, nor can it be had from the hub ({one_line(e)[:150]})") from e


def _llama_config(path: Path, config: Mapping[str, Any], sequence_len: int) -> LlamaConfig:
    """The shapes that config.json describes. Raises UserError for an entry that is not known, or another model's."""
    for key, value in config.items():
        if key in _COMPUTED and value != _COMPUTED[key]:
            found = f"{key} is {str(value)[:60]!r}, expected {_COMPUTED[key]!r}"
            raise UserError(f"{path}: {found}; only Llama's own architecture is read")
        if key not in _COMPUTED and key not in _SIZES and key not in _CHECKED | _WITHOUT_EFFECT:
            raise UserError(f"{path}: {key} is not known; only Llama's own architecture is read")
    sizes = {key: config[key] for key in _SIZES if config.get(key) is not None}
    for key, value in sizes.items():
        if type(value) is not int or not 0 < value < LARGEST:
            raise UserError(f"{path}: {key} is {str(value)[:60]!r}, expected a number from 1 to {LARGEST - 1}")
    if missing := sorted({*_SIZES[:5], "rms_norm_eps"} - set(config)):
        raise UserError(f"{path} does not say {', '.join(missing)}; download it again")
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000)}
    if not isinstance(rope, dict) or set(rope) - {"rope_type", "rope_theta"}:
        raise UserError(f"{path}: rope_parameters is {str(rope)[:80]}; expected rope_theta alone")
    theta, heads = rope.get("rope_theta"), sizes["num_attention_heads"]
    if type(theta) not in (int, float) or not 1 <= theta < LARGEST or theta != int(theta):
        raise UserError(f"{path}: rope_theta is {str(theta)[:60]}, expected a whole number below {LARGEST}")
    kv_heads, width = sizes.get("num_key_value_heads", heads), sizes["hidden_size"]
    if width % (2 * heads) or heads % kv_heads:
        raise UserError(f"{path}: {heads} heads of width {width} with {kv_heads} for keys and values do not divide")
    vocab, layers = sizes["vocab_size"], sizes["num_hidden_layers"]
    return LlamaConfig(sequence_len, vocab, layers, heads, kv_heads, width, rope_base=int(theta))


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer


def _bytes(path: Path, text: Any) -> bytes:
    try:
        return bytes(_BYTE_OF[c] for c in text)
    except (KeyError, TypeError) as e:
        raise UserError(f"{path}: the token {str(text)[:40]!r} is not of a byte-level vocabulary") from e


_BYTE_OF = {c: b for b, c in enumerate(byte_characters())}


def _of_gguf(path: Path, fields: Mapping[str, Any]) -> _Vocabulary:
    kind, name = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or name not in PATTERNS:
        raise UserError(f"{path} splits text by {name!r} of {kind!r}; known are {', '.join(PATTERNS)} of 'gpt2'")
    tokens, kinds, merges = (fields.get(f"tokenizer.ggml.{k}") for k in ("tokens", "token_type", "merges"))
    if not all(isinstance(part, list) for part in (tokens, kinds, merges)) or len(tokens) != len(kinds):
        raise UserError(f"{path}: tokens, token_type and merges are not three lists that fit; download it again")
    if fields.get("tokenizer.ggml.add_space_prefix"):
        raise UserError(f"{path}: add_space_prefix is true; this package adds no space")
    special = {text: i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind != 1}
    normal = {_bytes(path, text): i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind == 1}
    pattern = SPLIT_PATTERN if _is_ours(special) else PATTERNS[name]
    if len(special) + len(normal) != len(tokens):
        raise UserError(f"{path}: some token is there twice; download it again")
    return _Vocabulary(pattern, normal, special, [_merged(path, m) for m in merges])


def _of_folder(path: Path) -> _Vocabulary:
    file = path / "tokenizer.json"
    try:
        about = json.loads(file.read_bytes())
        model, split = about["model"], about["pre_tokenizer"]
        special = {t["content"]: t["id"] for t in about["added_tokens"]}
        vocab, merges = model["vocab"], model["merges"]
        ids = {**vocab, **special}
        if any(type(i) is not int for i in ids.values()) or len(set(ids.values())) != len(ids):
            raise ValueError("ids are not one for each token")
        pattern = _split_pattern(split)
        plain = {"type": "BPE", "dropout": None, "byte_fallback": False}
        empty = ("continuing_subword_prefix", "end_of_word_suffix")
        if about.get("normalizer") or any(model.get(k, v) != v for k, v in plain.items()) or any(map(model.get, empty)):
            raise UserError(f"{file} is no plain byte-level BPE; only those are read")
    except FileNotFoundError as e:
        raise UserError(f"{file} is not there; name a folder with a tokenizer of the tokenizers library") from e
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{file} is damaged ({one_line(e)[:100]}); download it again") from e
    if pattern is None:
        raise UserError(f"{file} splits text by an unknown pattern; known are nanochat's, {', '.join(PATTERNS)}")
    normal = {_bytes(path, text): i for text, i in vocab.items() if text not in special}
    return _Vocabulary(pattern, normal, special, [_merged(file, m) for m in merges])


def _split_pattern(split: Any) -> str | None:
    """The split pattern of tokenizer.json's pre_tokenizer; None for one that is not known."""
    steps = split["pretokenizers"] if split["type"] == "Sequence" else [split]
    first, last = steps[0], steps[-1]
    if len(steps) != 2 or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    if first["type"] == "Digits" and first["individual_digits"] and last.get("use_regex", True):
        return _SMOLLM
    known = first["type"] == "Split" and first["behavior"] == "Isolated" and not first.get("invert")
    pattern = first["pattern"].get("Regex") if known and not last.get("use_regex", True) else None
    return pattern if pattern in (SPLIT_PATTERN, *PATTERNS.values()) else None


def _merged(path: Path, merge: Any) -> bytes:
    """A merge, "a b" or ["a", "b"] -> ab."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if not isinstance(parts, list) or len(parts) != 2:
        raise UserError(f"{path}: the merge {str(merge)[:40]!r} is no pair; download it again")
    return _bytes(path, parts[0]) + _bytes(path, parts[1])


def _is_ours(special: Mapping[str, int]) -> bool:
    return set(SPECIAL_TOKENS) <= set(special)


def _tokenizer(path: Path, found: _Vocabulary, vocab_size: int) -> tuple[RustBPETokenizer, Tensor]:
    """(the tokenizer, int64: which row of the file's embedding each of its ids takes)."""
    ours, special, normal = _is_ours(found.special), found.special, found.normal
    if not ours and not set(CHATML_NAMES) <= set(special):
        raise UserError(f"{path} has no {' and '.join(CHATML_NAMES)}; only ChatML is known as a chat format")
    if bad := [i for i in (*normal.values(), *special.values()) if not 0 <= i < vocab_size]:
        raise UserError(f"{path}: a token has the id {bad[0]}, but the embedding has {vocab_size} rows")
    tokens = dict.fromkeys([bytes([byte]) for byte in range(256)] + found.merges)
    if unknown := [t for t in tokens if len(t) > 1 and t not in normal]:
        raise UserError(f"{path}: {len(unknown)} merges give no token, as {unknown[0]!r}; download it again")
    if left := set(normal) - set(tokens):
        raise UserError(f"{path}: {len(left)} tokens are no merge of others, as {min(left)!r}")
    unused = max(special.values())  # a reserved token, which no text has
    order = [normal.get(token, unused) for token in tokens]
    names = {CHATML_NAMES.get(name, name): i for name, i in special.items()}
    names |= {name: unused for name in SPECIAL_TOKENS if name not in names}
    ranks = {token: i for i, token in enumerate(tokens)}
    ids = {name: len(ranks) + i for i, name in enumerate(names)}
    markers = None if ours else CHATML
    return RustBPETokenizer._from_parts(found.pattern, ranks, ids, markers), torch.tensor([*order, *names.values()])
