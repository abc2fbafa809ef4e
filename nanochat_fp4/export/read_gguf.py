"""A Llama-like model that somebody else trained, out of a GGUF file: weights, tokenizer and chat format.

Weights in 4 to 8 bits are decoded by the gguf package; what is measured of such a model is measured of those weights.
Tied embeddings become two matrices, which are the same until training moves them apart.

Ids change: tokens come in the order of their merges, then the bytes that the vocabulary has no token for, then special
tokens. The rows of embedding and head move with them. What nanochat has a special token for and the model has not gets
the rows of a token that text never has, so that it is as unlikely.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanochat_fp4.console import progress_iter
from nanochat_fp4.data.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, RustBPETokenizer
from nanochat_fp4.data.tokenizer_files import byte_characters
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.export import gguf_file
from nanochat_fp4.export.huggingface import describe
from nanochat_fp4.export.verify import needs
from nanochat_fp4.models.llama import NORM_EPS, Llama, LlamaConfig

# The split patterns of llama.cpp's names for them, of the models that were tried. Ours (gguf_file.py) is exported under
# another's name, for want of one.
PATTERNS = {
    gguf_file.PRE_TOKENIZER: SPLIT_PATTERN,
    # Digits one by one, then GPT-2's pattern on what lies between them.
    "smollm": r"""\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+""",
}
# ChatML: nanochat's special tokens in the words of the model; the ones that stand for themselves have another name.
CHATML_NAMES = {"<|endoftext|>": "<|bos|>", "<|im_end|>": "<|assistant_end|>"}
CHATML = {
    "<|bos|>": "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|assistant_end|>\n",
    "<|user_start|>": "<|im_start|>user\n",
    "<|user_end|>": "<|assistant_end|>\n",
    "<|assistant_start|>": "<|im_start|>assistant\n",
    "<|assistant_end|>": "<|assistant_end|>\n",
}


class Imported(NamedTuple):
    model: Llama
    tokenizer: RustBPETokenizer
    about: dict[str, Any]  # name, license, types: how many tensors are of which type


def read_llama(path: str | Path, sequence_len: int = 2048) -> Imported:
    """Reads the file; sequence_len: of training and evaluation from now on. Raises UserError for what is not supported.

    Supported: the architecture llama with this package's shapes, and the split patterns and chat formats above.
    """
    needs("gguf")
    from gguf import GGUFReader, dequantize

    try:
        reader = GGUFReader(path)
    except FileNotFoundError as e:
        raise UserError(f"{path} is not there; name a GGUF file") from e
    except (ValueError, IndexError, KeyError) as e:
        raise UserError(f"{path} is not a whole GGUF file ({one_line(e)[:100]})") from e
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise UserError(f"{path} is of the architecture {fields.get('general.architecture')!r}; only llama is read")
    if abs(fields["llama.attention.layer_norm_rms_epsilon"] - NORM_EPS) > 1e-9:
        raise UserError(f"{path}: eps is {fields['llama.attention.layer_norm_rms_epsilon']:.1e}, expected {NORM_EPS}")
    tokenizer, order = _tokenizer(path, fields)
    heads = fields["llama.attention.head_count"]
    config = LlamaConfig(
        sequence_len=sequence_len,
        vocab_size=tokenizer.get_vocab_size(),
        n_layer=fields["llama.block_count"],
        n_head=heads,
        n_kv_head=fields.get("llama.attention.head_count_kv", heads),
        n_embd=fields["llama.embedding_length"],
        rope_base=int(fields.get("llama.rope.freq_base", 10000)),
    )
    if config.hidden != fields["llama.feed_forward_length"]:
        raise UserError(
            f"{path}: the MLP is {fields['llama.feed_forward_length']} wide, expected {config.hidden} for "
            f"{config.n_embd} (2/3 of 4 widths, rounded up to 256)"
        )
    model = Llama(config)
    model.init_weights()
    tensors = {t.name: t for t in reader.tensors}
    about, types = describe(model), [t.tensor_type.name for t in reader.tensors]
    with torch.no_grad():
        names = gguf_file.names(about)
        for ours, theirs in progress_iter(names.items(), len(names), desc="read", unit="tensor"):
            found = tensors.get(f"{theirs}.weight") or tensors["token_embd.weight"]  # no head: the embedding's
            value = torch.tensor(dequantize(found.data, found.tensor_type))
            if f"{theirs}.scale" in tensors:  # of NVFP4
                value *= torch.tensor(tensors[f"{theirs}.scale"].data)
            weight = model.get_submodule(ours).weight
            if ours in ("transformer.wte", "lm_head"):
                weight.zero_()
                weight[: len(order)].copy_(value[order])
            else:
                weight.copy_(gguf_file.rows_back(about, ours, value))
    counts = {name: types.count(name) for name in sorted(set(types))}
    named = {"name": fields.get("general.name", Path(path).stem), "license": fields.get("general.license")}
    return Imported(model.eval(), tokenizer, {**named, "types": counts})


def _tokenizer(path: str | Path, fields: dict[str, Any]) -> tuple[RustBPETokenizer, Tensor]:
    """(the tokenizer, int64: which row of the file's embedding each of its ids takes)."""
    pattern = PATTERNS.get(fields.get("tokenizer.ggml.pre"))
    if fields.get("tokenizer.ggml.model") != "gpt2" or pattern is None:
        raise UserError(
            f"{path} splits text by {fields.get('tokenizer.ggml.pre')!r}; known are {', '.join(PATTERNS)} (add its "
            "pattern to PATTERNS in read_gguf.py)"
        )
    of_character = {c: b for b, c in enumerate(byte_characters())}
    normal = {}  # bytes of a token -> its id in the file
    special = {}
    for i, (text, kind) in enumerate(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"])):
        if kind == 1:
            normal[bytes(of_character[c] for c in text)] = i
        else:
            special[text] = i
    ours = set(SPECIAL_TOKENS) <= set(special)
    if not ours and not set(CHATML_NAMES) <= set(special):
        raise UserError(f"{path} has no {' and '.join(CHATML_NAMES)}; only ChatML is known as a chat format")
    ranks: dict[bytes, int] = {}
    order: list[int] = []
    unused = max(special.values())  # a reserved token, which no text has

    def add(token: bytes) -> None:
        if token not in ranks:
            ranks[token] = len(ranks)
            order.append(normal.get(token, unused))

    for byte in range(256):
        add(bytes([byte]))
    for merge in fields["tokenizer.ggml.merges"]:
        add(bytes(of_character[c] for c in merge.replace(" ", "")))
    if left := set(normal) - set(ranks):
        raise UserError(f"{path}: {len(left)} tokens are no merge of others, as {min(left)!r}")
    names = {CHATML_NAMES.get(name, name): i for name, i in special.items()}
    names |= {name: unused for name in SPECIAL_TOKENS if name not in names}
    ids = {name: len(ranks) + i for i, name in enumerate(names)}
    markers = None if ours else CHATML
    return RustBPETokenizer._from_parts(pattern, ranks, ids, markers), torch.tensor([*order, *names.values()])
