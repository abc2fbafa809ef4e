"""
SpellingBee (nanochat) asks how often a letter occurs in a word. The answer counts by hand, and checks the number with
the Python tool.

The problems are generated from a list of English words (chat_data.py). The last line of an answer is "#### <count>".
"""

import os
import random
from collections.abc import Sequence
from typing import Any

from eval.common import resolve_eval_dir, same_final_number
from nanochat_fp4.data.chat_data import DrawnTask, counting_conversation, load_words


class SpellingBee(DrawnTask):
    """A task of `size` conversations. The splits draw different words. `words` is the list that they draw from. By
    default load_words reads it."""

    eval_type = "generative"
    evaluate = staticmethod(same_final_number)

    def __init__(
        self,
        size: int = 1000,
        split: str = "train",
        words: Sequence[str] | None = None,
        eval_dir: str | os.PathLike | None = None,
        **kwargs: Any,
    ):
        super().__init__(size, split, **kwargs)
        self.words = words if words is not None else load_words(resolve_eval_dir(eval_dir))

    def make(self, rng: random.Random) -> dict[str, Any]:
        return counting_conversation(self.words, rng)
