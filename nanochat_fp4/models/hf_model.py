"""Language models of transformers with the interface of this project's models, for bits per byte and CORE.

transformers is optional (pip install -e '.[export]'). The path of a model is a name on the hub, or a folder. Code that
belongs to the model is not run.
"""

import argparse
import hashlib
import os
import re
import textwrap
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat_fp4.cli import UserError, one_line, require
from nanochat_fp4.common import resolve_method
from nanochat_fp4.data.tokenizer_files import byte_characters

LONGEST = 1024  # The largest number of tokens in a sequence: nanochat's choice, and the context of GPT-2.
BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # SentencePiece writes a byte that is no character in this form.
WHAT_TO_GIVE = "give a folder with config.json and weights, or the name of a model on the hub"
_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)  # transformers raises these for a wrong model.


class HuggingFaceModel(torch.nn.Module):
    """A causal language model that returns the losses of (tokens, targets), or the logits of tokens, like gpt.GPT.

    sequence_len is the length of sequences for bits per byte. max_seq_len is the fixed context of GPT-2, and None for
    other models. precision names the format of weights that are stored quantized, or what the products are computed in.
    """

    def __init__(self, model: torch.nn.Module, precision: str = "fp32"):
        super().__init__()
        self.model = model
        self.precision = precision
        self.max_seq_len = getattr(model.config, "n_positions", None)
        self.sequence_len = min(LONGEST, getattr(model.config, "max_position_embeddings", None) or LONGEST)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        logits = self.model(idx).logits.float()
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=loss_reduction)


class HuggingFaceTokenizer:
    """A tokenizer of transformers, with the methods of data.tokenizer's that evaluations and their data call."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if bos is None:
            raise UserError("the tokenizer has no eos_token to end a document with; set one and save it again")
        self.bos = bos

    def get_bos_token_id(self) -> int:
        return self.bos

    def encode(
        self, text: str | list[str], prepend: int | None = None, num_threads: int = 1
    ) -> list[int] | list[list[int]]:
        """Returns the ids of a text, or a list of ids for each text of a list, which may be empty."""
        texts, before = [text] if isinstance(text, str) else text, [] if prepend is None else [prepend]
        ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        rows = [[*before, *of_one] for of_one in ids]
        return rows[0] if isinstance(text, str) else rows

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


class Described(NamedTuple):
    """What is read of a model before its weights."""

    path: str
    config: dict[str, Any]  # the entries of config.json
    tokenizer: HuggingFaceTokenizer


def describe(path: str, asked: str = "") -> Described:
    """Reads a model's config and its tokenizer. `asked` is a flag that needs unquantized weights. Raises UserError if
    there is no such model or no tokenizer, and for quantized weights with `asked`, and ModuleNotFoundError if
    transformers is not installed."""
    config = _read_config(path)
    if asked and config.get("quantization_config"):
        raise UserError(
            f"{asked}: the weights in {path} are quantized already, and are evaluated as they are; leave the flag out, "
            "or name the folder of the unquantized model"
        )
    return Described(path, config, _read_tokenizer(path))


def check_hf_flags(args: argparse.Namespace) -> tuple[str, Described]:
    """Returns the name of the method of --method, by default bf16, and the description of the model of --hf-path.

    The scripts call this before they download anything large, because only the model's config and tokenizer are read.
    Raises UserError as describe does, and for flags that do not fit a model of transformers.
    """
    for flag, value in (("model-tag", args.model_tag), ("step", args.step)):
        if value is not None:
            raise UserError(
                f"--{flag}={value} is for a model that was trained here, and --hf-path={args.hf_path} names one of "
                "transformers; leave one of the two out"
            )
    method = resolve_method(args.method or "bf16")
    asked = f"--method={method}" if method != "bf16" else ""
    asked = asked or ("--precision=bf16" if getattr(args, "precision", "") == "bf16" else "")
    return method, describe(args.hf_path, asked)


def _read_config(path: str) -> dict[str, Any]:
    """Returns the entries of a model's config.json."""
    require("transformers")
    from transformers import PretrainedConfig

    a_folder = os.path.isabs(path) or path.startswith(".") or path.count("/") > 1  # owner/name is of the hub.
    if a_folder and not os.path.isdir(path):
        raise UserError(f"--hf-path={path}: there is no such folder; {WHAT_TO_GIVE}")
    try:
        config, _ = PretrainedConfig.get_config_dict(path)
    except _ERRORS as e:
        raise UserError(f"--hf-path={path}: transformers cannot read its config ({_short(e)}); {WHAT_TO_GIVE}") from e
    if not config:
        raise UserError(f"--hf-path={path}: there is no config.json; {WHAT_TO_GIVE}")
    classes = config.get("auto_map")
    if isinstance(classes, dict) and any("modeling_nanochat_fp4" in str(place) for place in classes.values()):
        raise UserError(
            f"--hf-path={path}: this is an exported GPT of nanochat_fp4, whose own model file would have to run; "
            "evaluate the checkpoint that it was exported from (--model-tag)"
        )
    return config


def _read_tokenizer(path: str) -> HuggingFaceTokenizer:
    """Returns a model's tokenizer. transformers makes one without any token for some models that have no tokenizer."""
    from transformers import AutoTokenizer

    remedy = "copy the tokenizer's files there (tokenizer.save_pretrained, or tokenizer= in nf.save_quantized)"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except _ERRORS as e:
        raise UserError(f"--hf-path={path}: transformers cannot load its tokenizer ({_short(e)}); {remedy}") from e
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise UserError(f"--hf-path={path}: its tokenizer has no tokens, as if it had no tokenizer's files; {remedy}")
    return HuggingFaceTokenizer(tokenizer)


def load_hf_model(described: Described, device: torch.device) -> HuggingFaceModel:
    """Loads a model in FP32. A model with quantized weights is loaded in the dtype of its config, because transformers
    multiplies its decoded weights in this dtype alone.

    Raises UserError if the model needs code of its own, and if weights are missing, unused or of another shape.
    transformers would replace such weights by random ones. A package that reads them may not be installed.
    Experts are refused unless they are in FP8, because transformers reads those in NVFP4 wrong. This is seen by the
    shapes of the config's model, before weights are read.
    """
    path = described.path
    stored = described.config.get("quantization_config")
    if stored and stored.get("quant_method") == "compressed-tensors":
        require("compressed_tensors")
    precision = "bf16" if device.type == "cuda" else "fp32"  # as models.gpt.autocast
    precision = str(stored.get("format") or stored.get("quant_method") or "quantized") if stored else precision
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if stored and precision != "float-quantized":
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(path, trust_remote_code=False)
                empty = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            if any("experts" in name and p.dim() > 2 for name, p in empty.named_parameters()):
                raise UserError(
                    f"--hf-path={path}: transformers reads quantized experts right in FP8 (float-quantized) alone, not "
                    f"in {precision}; load the folder with nf.load_quantized into an unquantized model, and evaluate "
                    "what its save_pretrained and its tokenizer's write"
                )
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype="auto" if stored else torch.float32,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except _ERRORS as e:
        own_code = "auto_map" in described.config
        remedy = "give a model that needs no code of its own, which is not run" if own_code else WHAT_TO_GIVE
        raise UserError(f"--hf-path={path}: transformers cannot load it ({_short(e)}); {remedy}") from e
    for kind, names in found.items():
        if names:
            first = ", ".join(map(str, list(names)[:3]))
            raise UserError(
                f"--hf-path={path}: its weights do not fit its config.json ({kind.replace('_', ' ')}: {first[:200]}); "
                "give a whole model"
            )
    return HuggingFaceModel(model.to(device).eval(), precision)


def _short(error: BaseException) -> str:
    """Returns the message of an error of transformers on one line, of at most 200 characters and whole words."""
    return textwrap.shorten(one_line(error), 200, placeholder=" ...")
