"""What the chat in the terminal and the chat page share: the text of an answer, and the precision of its
computation.

AnswerText turns the tokens that an Engine yields into text. compute_dtype chooses the dtype of matrix products, which
scripts.chat_eval uses as well, and prepare rounds the weights to this dtype once.
"""

import itertools
from typing import Any

import torch

from nanochat_fp4.data.tokenizer import SPECIAL_TOKENS


class AnswerText:
    """
    The text of an answer, token by token.

    A character whose bytes are spread over several tokens is shown when it is complete. A tool call with its result
    appears as "[12*3 = 36]", and a call without a result as "[1/0]". Other special tokens, which a model may say in the
    wrong place, are left out of the text.
    """

    MARKERS = {"python_start": "[", "python_end": "]", "output_start": "[", "output_end": "]"}

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        ids = {name: tokenizer.encode_special(f"<|{name}|>") for name in self.MARKERS}
        self.call_end, self.answered = ids["python_end"], [ids["python_end"], ids["output_start"]]
        # The keys are ids, because a model may also write "<|python_end|>" in ordinary tokens.
        self.readable = {ids[name]: text for name, text in self.MARKERS.items()}
        self.silent = {tokenizer.encode_special(name) for name in SPECIAL_TOKENS} - set(self.readable)
        self.tokens: list[int] = []
        self.pending: list[int] = []

    def add(self, token: int) -> str:
        """Adds a token. Returns the text that has become complete with it."""
        self.tokens.append(token)
        if token in self.silent:
            return self.rest()
        self.pending.append(token)
        # After the end of a call, the next token decides whether " = " or "]" follows.
        incomplete = token == self.call_end or self.tokenizer.decode(self.pending).endswith("\ufffd")
        return "" if incomplete else self.rest()

    def rest(self) -> str:
        """Returns the text that add() has held back."""
        pending, self.pending, result = self.pending, [], ""
        if pending[-2:] == self.answered:
            pending, result = pending[:-2], " = "
        groups = [(marker, list(ids)) for marker, ids in itertools.groupby(pending, self.readable.get)]
        return "".join(len(ids) * marker if marker else self.tokenizer.decode(ids) for marker, ids in groups) + result


def compute_dtype(device: torch.device, wanted: str = "bfloat16") -> torch.dtype:
    """Returns the dtype of the computation: BF16 on CUDA unless "float32" is wanted, and FP32 on other devices."""
    return torch.bfloat16 if device.type == "cuda" and wanted != "float32" else torch.float32


@torch.no_grad()
def prepare(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """Rounds the weights of linear layers to dtype, in place, if they have more bits. Returns the model.

    Otherwise autocast would round these weights again for each token, to the same values. Layers that quantize at the
    moment keep their weights, because their codes are those of the weights as they were trained.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not getattr(module, "quantizes", False):
            if module.weight.element_size() > dtype.itemsize:
                module.weight = torch.nn.Parameter(module.weight.to(dtype), requires_grad=False)
    return model
