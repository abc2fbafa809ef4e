"""Language models of transformers with the interface of this project's models, for bits per byte and CORE.

transformers is optional (pip install -e '.[export]'). The path of a model is a name on the hub, or a folder. Code that
belongs to the model is not run.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_fp4.data.tokenizer_files import byte_characters
from nanochat_fp4.errors import UserError, one_line, require

LONGEST = 1024  # The largest number of tokens in a sequence: nanochat's choice, and the context of GPT-2.
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # SentencePiece writes a byte that is no character in this form.


class HuggingFaceModel(torch.nn.Module):
    """A causal language model that returns the losses of (tokens, targets), or the logits of tokens, like gpt.GPT.

    sequence_len is the length of sequences for bits per byte. max_seq_len is the fixed context of GPT-2, and None for
    other models.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model
        self.max_seq_len = getattr(model.config, "n_positions", None)
        self.sequence_len = min(LONGEST, getattr(model.config, "max_position_embeddings", None) or LONGEST)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        logits = self.model(idx).logits.float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction)


class HuggingFaceTokenizer:
    """A tokenizer of transformers, with the methods that the data loader calls."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if bos is None:
            raise UserError("this tokenizer has neither a token that begins a document nor one that ends it")
        self.bos = bos

    def get_bos_token_id(self) -> int:
        return self.bos

    def encode(self, texts: Sequence[str], prepend: int, num_threads: int = 1) -> list[list[int]]:
        rows = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return [[prepend, *row] for row in rows]

    __call__ = encode

    def fingerprint(self) -> str:
        """Returns 16 hex digits of a hash of the vocabulary."""
        return hashlib.sha256(repr(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()[:16]

    def token_bytes(self, device: torch.device) -> Tensor:
        """Returns the number of bytes of text of each token, int32, with 0 for special tokens.

        nanochat decodes each token by itself. It therefore counts three bytes for a token that is no whole character.
        """
        vocabulary, special = self.tokenizer.get_vocab(), set(self.tokenizer.all_special_tokens)
        as_written = set(self.tokenizer.get_added_vocab())
        alphabet = set(byte_characters())
        by_bytes = all(set(token) <= alphabet for token in vocabulary.keys() - special - as_written)
        lengths = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.int32)
        for token, number in vocabulary.items():
            if token in special:
                continue
            if token in as_written:
                lengths[number] = len(token.encode())
            elif by_bytes:
                lengths[number] = len(token)
            else:
                lengths[number] = 1 if BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())
        return lengths.to(device)


def load_hf_model(path: str, device: torch.device) -> tuple[HuggingFaceModel, HuggingFaceTokenizer]:
    """Loads a model in FP32, and its tokenizer.

    Raises UserError if transformers is not installed, if there is no such model, if the model needs code of its own,
    and if weights are missing, unused or of another shape. transformers would replace such weights by random ones.
    """
    require("transformers")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as e:
        raise UserError(
            f"--hf-path={path}: transformers cannot load it ({one_line(e)[:200]}); give a folder, or the name of a "
            "model on the hub"
        ) from e
    for kind, names in found.items():
        if names:
            first = ", ".join(map(str, list(names)[:3]))
            raise UserError(
                f"--hf-path={path}: its weights do not fit its config.json ({kind.replace('_', ' ')}: {first[:200]}); "
                "give a whole model"
            )
    return HuggingFaceModel(model.to(device).eval()), HuggingFaceTokenizer(tokenizer)
