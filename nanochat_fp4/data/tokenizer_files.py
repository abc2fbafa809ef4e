"""The tokenizer in the form of other programs: tokenizer.json of the tokenizers library, its configuration, and a
chat template.

Both tiktoken and the tokenizers library are byte-pair encoders, but they describe a tokenizer in different ways.
tiktoken has ranks: of all neighbours, the two that together have the lowest rank become one token. The tokenizers
library has pairs, so each way to put a token together from two others is written as a pair, in the order of ranks. The
ids of a text are the same, which tests compare.
"""

import json
from pathlib import Path
from typing import Any

from nanochat_fp4.data.tokenizer import RustBPETokenizer

# This template writes a conversation as RustBPETokenizer.render_conversation does. A system message is put in front of
# the first user message.
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")


def byte_characters() -> list[str]:
    """Returns the printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def vocabulary(tokenizer: RustBPETokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """Returns the tokens without the special ones, in the order of their ids, and the pairs that become one token,
    in the order of ranks. Both are written in byte characters."""
    characters = byte_characters()
    tokens = [token.decode("latin-1").translate(characters) for token in tokenizer.token_bytes_by_rank()]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    pairs = []
    for token in tokens:
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in splits if a in ranks and b in ranks]
        pairs += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return tokens, pairs


def special_tokens(tokenizer: RustBPETokenizer) -> dict[str, int]:
    """Returns the ids of the special tokens by name, in the order of ids."""
    return dict(sorted(tokenizer.enc._special_tokens.items(), key=lambda item: item[1]))


def tokenizer_json(tokenizer: RustBPETokenizer) -> dict[str, Any]:
    """Returns the content of tokenizer.json, which describes this tokenizer to the tokenizers library."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens, pairs = vocabulary(tokenizer)
    # A piece of text that is a token is not merged from parts, as in tiktoken.
    file = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=True))
    file.add_special_tokens(list(special_tokens(tokenizer)))
    split = pre_tokenizers.Split(Regex(tokenizer.enc._pat_str), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    file.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    file.decoder = decoders.ByteLevel()
    bos = "<|bos|>"
    begins = [(bos, tokenizer.get_bos_token_id())]
    file.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", begins)
    return json.loads(file.to_str())


def end_tokens(tokenizer: RustBPETokenizer, chat: bool) -> list[str]:
    """Returns the tokens that end a text: the first token of the next document, and in a chat also the assistant's
    last token."""
    return ["<|assistant_end|>", "<|bos|>"] if chat else ["<|bos|>"]


def tokenizer_config(tokenizer: RustBPETokenizer, chat: bool, model_max_length: int) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json."""
    end = end_tokens(tokenizer, chat)[0]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    return config | ({"chat_template": CHAT_TEMPLATE} if chat else {})
