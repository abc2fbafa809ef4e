"""
ARC (Clark et al., 2018) has grade-school science questions with 3 to 5 choices, in an easy and a challenging part.

The data set is https://huggingface.co/datasets/allenai/ai2_arc. Its rows have the fields question, choices {text,
label} and answerKey.
"""

from typing import Any

from eval.common import RowTask, message_pair, one_of, render_mc, same_letter, wrong_field


def row_problem(row: dict) -> str | None:
    """Returns a description of the first fault in a row, or None."""
    if problem := wrong_field(row, question=str, choices=dict, answerKey=str):
        return problem
    if problem := wrong_field(row["choices"], text=list, label=list):
        return f"in 'choices': {problem}"
    if len(row["choices"]["text"]) != len(row["choices"]["label"]):
        return "'choices' has not as many labels as texts"
    if row["answerKey"] not in row["choices"]["label"]:
        return f"'answerKey' {row['answerKey']!r} is none of the labels {row['choices']['label']}"
    return None


class ARC(RowTask):
    """ARC-Easy or ARC-Challenge. An answer is the letter of a choice."""

    dataset = "allenai/ai2_arc"
    eval_type = "categorical"
    evaluate = staticmethod(same_letter)

    def __init__(self, subset: str, split: str, **kwargs: Any):
        one_of("the ARC subset", subset, ("ARC-Easy", "ARC-Challenge"))
        one_of("the ARC split", split, ("train", "validation", "test"))
        super().__init__(subset, split, row_problem, **kwargs)

    def get_example(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        letters = row["choices"]["label"]  # They are mostly A to D, and sometimes 1 to 4.
        question = render_mc(row["question"], letters, row["choices"]["text"])
        return message_pair(question, row["answerKey"]) | {"letters": letters}
