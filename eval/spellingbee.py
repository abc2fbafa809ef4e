"""
SpellingBee (nanochat): how often a letter occurs in a word, counted by hand and checked with the Python tool.

Made on the spot from a list of English words (chat_data.py); the last line of the answer is "#### <count>".
"""

import os
from collections.abc import Sequence
from typing import Any

from eval.common import resolve_eval_dir, same_final_number
from nanochat_fp4.data.chat_data import Task, counting_conversation, load_words, spelling_seed


class SpellingBee(Task):
    """`size` conversations. The splits draw different words. words is the list to draw from, by default load_words'."""

    VERSION = 1
    eval_type = "generative"

    def __init__(
        self,
        size: int = 1000,
        split: str = "train",
        words: Sequence[str] | None = None,
        eval_dir: str | os.PathLike | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        spelling_seed(0, split)  # an unknown split is reported here
        self.size, self.split = size, split
        self.words = words if words is not None else load_words(resolve_eval_dir(eval_dir))

    def num_examples(self) -> int:
        return self.size

    def get_example(self, index: int) -> dict[str, Any]:
        return counting_conversation(self.words, spelling_seed(index, self.split))

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        return same_final_number(conversation, answer)
