"""Reads and writes GGUF files for llama.cpp and programs built on it, with the gguf package. The models are Llama-like,
in BF16 or in NVFP4 (GGUF's type 40).

A row in NVFP4 consists of groups of 64 values. A group has four block scales (E4M3 without a sign), and then 8 bytes
for each block of 16 values. The low nibbles are the first half of the block, and the high nibbles the second half. The
tensor scale is the separate tensor NAME.scale, and the input's scale is NAME.input_scale. Codes and block scales are
those of the forward pass, to the bit.

The rotary embedding of llama.cpp takes the pairs (x_2i, x_{2i+1}), where transformers takes (x_i, x_{i + D/2}). The
rows of q and k are therefore put into another order than for transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanochat_fp4.cli import UserError, one_line, require
from nanochat_fp4.export.huggingface import Description, describe
from nanochat_fp4.export.weights import Weights
from nanochat_fp4.models.llama import Llama, LlamaConfig
from nanochat_fp4.nvfp4.format import BLOCK, FP8, NVFP4Tensor, pack, unpack

if TYPE_CHECKING:  # tiktoken is not needed for load_quantized
    from nanochat_fp4.data.tokenizer import RustBPETokenizer

FILE_NAME = "model.gguf"
GROUP = 64  # The number of values in a group.
# llama.cpp knows the patterns that split text only by name, and has no name for nanochat's pattern. The nearest pattern
# keeps three digits together instead of two, and several line ends instead of one. scripts.export reports how many
# token ids of a text differ.
PRE_TOKENIZER = "llama-bpe"
PRE_TOKENIZER_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The keys llama.* that are read, with the names of their values in config.json. _NOTHING has keys that are accepted
# only with a value that has no effect.
_CONFIG = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_NOTHING = {"rope.scaling.type": "none", "expert_count": 0, "expert_used_count": 0}
_TOKENIZER = {f"tokenizer.ggml.{k}" for k in ("model", "pre", "tokens", "token_type", "merges", "add_space_prefix",
              "add_bos_token", "add_eos_token", "bos_token_id", "eos_token_id", "eot_token_id", "padding_token_id",
              "unknown_token_id")} | {"tokenizer.chat_template"}  # fmt: skip
# The largest number of values and strings in the metadata. Each takes about 200 bytes while the package reads it.
MAX_PIECES = 5_000_000


class File(NamedTuple):
    """A GGUF file that was read. `config` has the values of its llama.* keys by their names in config.json."""

    path: Path
    config: dict[str, Any]
    fields: dict[str, Any]
    tensors: dict[str, Any]  # name -> gguf.ReaderTensor, not decoded


def read(path: Path) -> File:
    """Reads the keys and tensors of a GGUF file with the gguf package. A damaged file cannot make it use more memory
    than the file's size justifies.

    Raises UserError if the package is not installed, for a missing or a damaged file, for another architecture than
    llama, and for an unknown key.
    """
    require("gguf")
    from gguf import GGUFReader

    class Reader(GGUFReader):
        pieces = 0

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **named: Any) -> Any:
            """Reads values like the package's method, but raises an error for a read beyond the end of the file, so
            that the file's size bounds all counts."""
            self.pieces += 1
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data) or self.pieces > MAX_PIECES:
                raise ValueError("it ends too early, or has too many keys")
            return super()._get(offset, dtype, count, *rest, **named)

    try:
        reader = Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if sum(t.n_bytes for t in reader.tensors) > path.stat().st_size:
            raise ValueError("tensors overlap")
    except FileNotFoundError as e:
        raise UserError(f"{path} is not there; name a GGUF file") from e
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is not a whole GGUF file ({one_line(e)[:100]}); download it again") from e
    if fields.get("general.architecture") != "llama":
        raise UserError(f"{path} is of the architecture {fields.get('general.architecture')!r}; only llama is read")
    tensors = {t.name: t for t in reader.tensors}
    config: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in tensors}
    for key, value in fields.items():
        if key in _TOKENIZER or key.startswith(("GGUF.", "general.", "quantize.")):
            continue
        short = key.removeprefix("llama.") if key.startswith("llama.") else ""
        # The shortest decimal number is used, because 1e-5 in FP32 would otherwise be read as 9.99e-6.
        value = float(str(np.float32(value))) if isinstance(value, float) else value
        if short in _NOTHING and value == _NOTHING[short]:
            continue
        if short not in _CONFIG:
            raise UserError(f"{path}: {key} ({str(value)[:40]}) is not known; only plain Llama models are read")
        name = _CONFIG[short]
        if config.setdefault(name, value) != value:
            raise UserError(f"{path}: {key} is {str(value)[:40]}, but {name} is {config[name]}; download it again")
    if isinstance(tokens := fields.get("tokenizer.ggml.tokens"), list):
        if config.setdefault("vocab_size", len(tokens)) != len(tokens):
            raise UserError(f"{path}: {len(tokens)} tokens, but vocab_size is {config['vocab_size']}")
    return File(path, config, fields, tensors)


def pack_blocks(tensor: NVFP4Tensor) -> Tensor:
    """Returns the bytes in GGUF, uint8 (N, K / 64 * 36), of an NVFP4 tensor (N, K). K must be a multiple of 64."""
    rows, groups = tensor.codes.shape[0], tensor.codes.shape[1] * 2 // GROUP
    codes = unpack(tensor.codes).view(rows, groups, GROUP // BLOCK, 2, BLOCK // 2)
    nibbles = (codes[..., 0, :] | (codes[..., 1, :] << 4)).flatten(-2)
    scales = tensor.scales.view(torch.uint8).view(rows, groups, GROUP // BLOCK) & 0x7F
    return torch.cat((scales, nibbles), dim=-1).flatten(-2)


def unpack_blocks(data: Tensor, tensor_scale: Tensor) -> NVFP4Tensor:
    """Inverts pack_blocks: returns the NVFP4 tensor of the bytes, uint8 (N, K / 64 * 36), and a tensor scale."""
    groups = data.unflatten(-1, (-1, GROUP // BLOCK + GROUP // 2))
    scales, nibbles = groups.split((GROUP // BLOCK, GROUP // 2), dim=-1)
    halves = nibbles.unflatten(-1, (GROUP // BLOCK, BLOCK // 2))
    codes = torch.cat((halves & 0xF, halves >> 4), dim=-1).flatten(1)
    return NVFP4Tensor(pack(codes), scales.flatten(1).contiguous().view(torch.float8_e4m3fn), tensor_scale)


def names(about: Description) -> dict[str, str]:
    """Returns the name in GGUF of each module, by our name."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    known = get_tensor_name_map(MODEL_ARCH.LLAMA, about.config["num_hidden_layers"])
    return {ours: known.get_name(theirs) for ours, theirs in about.names.items()}


def rows(about: Description, name: str, tensor: Tensor, back: bool = False) -> Tensor:
    """Puts the rows of our module `name` into the order of llama.cpp. With `back`, puts them back into our order."""
    half = about.swapped.get(name)
    if not half:
        return tensor
    data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    halves = data.unflatten(0, (-1, half, 2)).transpose(1, 2) if back else data.unflatten(0, (-1, 2, half))
    moved = halves.flip(1) if back else halves.flip(1).transpose(1, 2)
    return moved.flatten(0, 2).view(tensor.dtype)


def write(
    model: Llama,
    tokenizer: "RustBPETokenizer",
    folder: Path,
    weights: Weights | None = None,
    input_scales: Mapping[str, float] | None = None,
    chat: bool = True,
    name: str = "",
) -> list[str]:
    """Writes model.gguf into an existing folder. Returns sentences about what the format cannot hold.

    weights:      the quantized weights. Without them all matrices are written in BF16. A 4-bit weight whose rows are no
                  multiple of 64 values is decoded and written in BF16. GGUF has no FP8, so an FP8 weight is rounded
                  again, to Q8_0 (whole numbers up to 127, with an FP16 scale for 32 of them). Norms are in FP32.
    input_scales: the input scale of each layer in 4 bits, by our name
    chat:         whether the model is for chats. The file then has a chat template.
    name:         the model's name in the file

    Raises UserError for any other model than Llama, and if the gguf package is not installed.
    """
    if not isinstance(model, Llama):
        raise UserError(
            "GGUF is for this project's Llama (base_train --llama=30M); llama.cpp does not know nanochat's GPT"
        )
    require("gguf")
    import gguf

    about = describe(model)
    writer = gguf.GGUFWriter(folder / FILE_NAME, "llama")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_NVFP4 if weights else gguf.LlamaFileType.MOSTLY_BF16)
    _add_config(writer, about, model.config)
    _add_tokenizer(writer, tokenizer, chat)
    notes = _add_tensors(writer, about, model, weights.tensors if weights else {}, input_scales)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return notes


def _add_config(writer: Any, about: Description, config: LlamaConfig) -> None:
    writer.add_context_length(config.sequence_len)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(about.config["intermediate_size"])
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(about.config["rms_norm_eps"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(about.config["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def _add_tensors(
    writer: Any,
    about: Description,
    model: Llama,
    quantized: Mapping[str, NVFP4Tensor | FP8],
    input_scales: Mapping[str, float] | None,
) -> list[str]:
    """Adds all tensors of the model, those of `quantized` in the types that `write` describes. Returns sentences about
    the tensors whose type is not their own."""
    import gguf

    types = gguf.GGMLQuantizationType
    state, decoded, again = model.state_dict(), 0, 0
    for ours, theirs in names(about).items():
        tensor = quantized.get(ours)
        if isinstance(tensor, FP8) and tensor.codes.shape[1] % 32 == 0:
            numbers = gguf.quantize(rows(about, ours, tensor.dequantize()).numpy(), types.Q8_0)
            writer.add_tensor(f"{theirs}.weight", numbers, raw_dtype=types.Q8_0)
            again += 1
        elif isinstance(tensor, NVFP4Tensor) and tensor.codes.shape[1] * 2 % GROUP == 0:
            moved = NVFP4Tensor(*(rows(about, ours, t) for t in (tensor.codes, tensor.scales)), tensor.tensor_scale)
            writer.add_tensor(f"{theirs}.weight", _array(pack_blocks(moved)), raw_dtype=types.NVFP4)
            writer.add_tensor(f"{theirs}.scale", _array(tensor.tensor_scale.float().reshape(1)))
            if input_scales is not None:
                writer.add_tensor(f"{theirs}.input_scale", _array(torch.tensor([1 / input_scales[ours]])))
        else:
            value = state[f"{ours}.weight"] if tensor is None else tensor.dequantize()
            decoded += tensor is not None
            value = value[: model.config.vocab_size] if ours in ("transformer.wte", "lm_head") else value
            value = rows(about, ours, value.detach())
            if value.ndim == 1:
                writer.add_tensor(f"{theirs}.weight", _array(value.float()))
            else:
                writer.add_tensor(f"{theirs}.weight", _array(value.bfloat16().view(torch.uint8)), raw_dtype=types.BF16)
    notes = []
    if again:
        notes.append(f"{again} layers in FP8 were rounded again, to Q8_0, the 8-bit type that GGUF has.")
    if decoded:
        notes.append(f"{decoded} layers have rows that do not divide into blocks and are in BF16, decoded.")
    return notes


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().numpy()


def _add_tokenizer(writer: Any, tokenizer: "RustBPETokenizer", chat: bool) -> None:
    import gguf

    from nanochat_fp4.data.tokenizer_files import CHAT_TEMPLATE, special_tokens, vocabulary

    tokens, pairs = vocabulary(tokenizer)
    special = special_tokens(tokenizer)
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(special)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list([*tokens, *special])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in pairs])
    bos = tokenizer.get_bos_token_id()
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(tokenizer.encode_special("<|assistant_end|>") if chat else bos)
    writer.add_add_bos_token(True)
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)


def other_ids(tokenizer: "RustBPETokenizer", texts: list[str]) -> tuple[int, int]:
    """Returns the number of token ids that change if PRE_TOKENIZER splits the texts, and the number of all token
    ids."""
    import difflib

    theirs = tokenizer.from_parts(PRE_TOKENIZER_PATTERN, tokenizer.enc._mergeable_ranks)
    changed = total = 0
    for text in texts:
        a, b = tokenizer.encode(text), theirs.encode(text)
        same = sum(m.size for m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
        changed, total = changed + len(a) - same, total + len(a)
    return changed, total
