"""
GSM8K (Cobbe et al., 2021) has grade-school word problems. They are solved in words, with a calculator for the
arithmetic.

The data set is https://huggingface.co/datasets/openai/gsm8k. Its rows have the fields question and answer. In an
answer, "<<48/2=24>>" is a call of the calculator with its result, and "#### 72" is the final number. During generation
the engine answers the calls.
"""

import re
from typing import Any

from eval.common import RowTask, extract_answer, message_pair, one_of, same_final_number, wrong_field

CALL = re.compile(r"(<<[^>]+>>)")


def row_problem(row: dict) -> str | None:
    """Returns a description of the first fault in a row, or None."""
    if problem := wrong_field(row, question=str, answer=str):
        return problem
    if extract_answer(CALL.split(row["answer"])[-1]) is None:
        return "'answer' does not end in '#### <number>'"
    return None


def answer_parts(answer: str) -> list[dict[str, str]]:
    """Divides an answer into parts of a message: text, and for each call of the calculator the expression and its
    result."""
    parts = []
    for piece in CALL.split(answer):
        if piece.startswith("<<") and piece.endswith(">>"):
            expression, equals, result = piece[2:-2].rpartition("=")
            if not equals:
                expression, result = result, ""
            parts.append({"type": "python", "text": expression})
            parts.append({"type": "python_output", "text": result})
        else:
            parts.append({"type": "text", "text": piece})
    return parts


class GSM8K(RowTask):
    """Problems of GSM8K. An answer is right if its final number is."""

    dataset = "openai/gsm8k"
    eval_type = "generative"
    evaluate = staticmethod(same_final_number)

    def __init__(self, subset: str, split: str, **kwargs: Any):
        one_of("the GSM8K subset", subset, ("main", "socratic"))
        one_of("the GSM8K split", split, ("train", "test"))
        super().__init__(subset, split, row_problem, **kwargs)

    def get_example(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return message_pair(row["question"], answer_parts(row["answer"]))
