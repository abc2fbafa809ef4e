"""Writes GGUF files for llama.cpp and programs built on it, with the gguf package. The models are Llama-like, in BF16
or in NVFP4 (GGUF's type 40).

A row in NVFP4 consists of groups of 64 values. A group has four block scales (E4M3 without a sign), and then 8 bytes
for each block of 16 values. The low nibbles are the first half of the block, and the high nibbles the second half. The
tensor scale is the separate tensor NAME.scale. Codes and block scales are those of the forward pass, to the bit. A file
may also have NAME.input_scale. None is written, because llama.cpp computes the scales of inputs by itself.

The rotary embedding of llama.cpp takes the pairs (x_2i, x_{2i+1}), where transformers takes (x_i, x_{i + D/2}). The
rows of q and k are therefore put into another order than for transformers.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.data.tokenizer_files import CHAT_TEMPLATE, special_tokens, vocabulary
from nanochat_fp4.export.huggingface import describe, rows_of
from nanochat_fp4.export.weights import in_eight_bits
from nanochat_fp4.models.llama import NORM_EPS, Llama
from nanochat_fp4.nvfp4.format import BLOCK, NVFP4Tensor, unpack

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


def pack_blocks(tensor: NVFP4Tensor) -> Tensor:
    """Returns the bytes in GGUF, uint8 (N, K / 64 * 36), of an NVFP4 tensor (N, K). K must be a multiple of 64."""
    rows, groups = tensor.codes.shape[0], tensor.codes.shape[1] * 2 // GROUP
    codes = unpack(tensor.codes).view(rows, groups, GROUP // BLOCK, 2, BLOCK // 2)
    nibbles = (codes[..., 0, :] | (codes[..., 1, :] << 4)).flatten(-2)
    scales = tensor.scales.view(torch.uint8).view(rows, groups, GROUP // BLOCK) & 0x7F
    return torch.cat((scales, nibbles), dim=-1).flatten(-2)


def write(
    model: Llama,
    tokenizer: RustBPETokenizer,
    folder: Path,
    weights: Mapping[str, NVFP4Tensor] = {},
    chat: bool = True,
    name: str = "",
) -> list[str]:
    """Writes model.gguf into an existing folder. Returns sentences about what the format cannot hold.

    weights: the quantized weights. Without them all matrices are written in BF16. A 4-bit weight whose rows are no
             multiple of 64 values is decoded and written in BF16. GGUF has no FP8, so an FP8 weight is rounded again,
             to Q8_0 (whole numbers up to 127, with an FP16 scale for 32 of them). Norms are in FP32.
    chat:    whether the model is for chats. The file then has a chat template.
    name:    the model's name in the file

    Needs the package gguf.
    """
    import gguf

    writer = gguf.GGUFWriter(folder / FILE_NAME, "llama")
    writer.add_name(name)
    four_bits = not all(map(in_eight_bits, weights.values()))
    kind = "NVFP4" if four_bits else "Q8_0" if weights else "BF16"
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    _add_config(writer, model)
    _add_tokenizer(writer, tokenizer, chat)
    notes = _add_tensors(writer, model, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return notes


def _add_config(writer: Any, model: Llama) -> None:
    config = model.config
    writer.add_context_length(config.sequence_len)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(model.transformer.h[0].mlp.c_fc.out_features)
    writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_kv_head)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_base)
    writer.add_vocab_size(config.vocab_size)


def _add_tensors(writer: Any, model: Llama, weights: Mapping[str, NVFP4Tensor]) -> list[str]:
    """Adds all tensors of the model, those of `weights` in the types that `write` describes. Returns sentences about
    the tensors whose type is not their own."""
    import gguf

    types = gguf.GGMLQuantizationType
    config, places = describe(model)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    state, decoded, again = model.state_dict(), 0, 0
    for theirs, [(ours, rows, _)] in places.items():
        layer, name = ours.removesuffix(".weight"), known.get_name(theirs.removesuffix(".weight"))
        if layer.endswith((".c_q", ".c_k")):  # From halves of a head's rows to pairs.
            rows = rows.unflatten(0, (-1, 2, model.config.head_dim // 2)).mT.flatten()
        tensor = rows_of(weights[layer], rows) if layer in weights else None
        columns = tensor.shape[1] if tensor else 0
        if tensor and in_eight_bits(tensor) and columns % 32 == 0:
            numbers = gguf.quantize(tensor.dequantize().numpy(), types.Q8_0)
            writer.add_tensor(f"{name}.weight", numbers, raw_dtype=types.Q8_0)
            again += 1
        elif tensor and not in_eight_bits(tensor) and columns % GROUP == 0:
            writer.add_tensor(f"{name}.weight", _array(pack_blocks(tensor)), raw_dtype=types.NVFP4)
            writer.add_tensor(f"{name}.scale", _array(tensor.tensor_scale.reshape(1)))
        else:
            value = tensor.dequantize() if tensor else state[ours].detach()[rows]
            decoded += tensor is not None
            if value.ndim == 1:
                writer.add_tensor(f"{name}.weight", _array(value.float()))
            else:
                writer.add_tensor(f"{name}.weight", _array(value.bfloat16().view(torch.uint8)), raw_dtype=types.BF16)
    notes = []
    if again:
        notes.append(f"{again} layers in FP8 were rounded again, to Q8_0, the 8-bit type that GGUF has.")
    if decoded:
        notes.append(f"{decoded} layers have rows that do not divide into blocks and are in BF16, decoded.")
    return notes


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().contiguous().numpy()


def _add_tokenizer(writer: Any, tokenizer: RustBPETokenizer, chat: bool) -> None:
    import gguf

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


def other_ids(tokenizer: RustBPETokenizer, texts: list[str]) -> tuple[int, int]:
    """Returns the number of token ids that change if PRE_TOKENIZER splits the texts, and the number of all token
    ids."""
    theirs = tokenizer.from_parts(PRE_TOKENIZER_PATTERN, tokenizer.enc._mergeable_ranks)
    changed = total = 0
    for text in texts:
        a, b = tokenizer.encode(text), theirs.encode(text)
        same = sum(m.size for m in difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks())
        changed, total = changed + len(a) - same, total + len(a)
    return changed, total
