"""
MMLU (Hendrycks et al., 2021) has multiple-choice questions on 57 subjects, with four choices each. They are asked
without examples.

The data set is https://huggingface.co/datasets/cais/mmlu. Its rows have the fields question, choices (4 texts), answer
(0 to 3) and subject. The subset auxiliary_train, with questions of ARC, MC_TEST, OBQA and RACE, is for training.
"""

from typing import Any

from eval.common import LETTERS, RowTask, message_pair, one_of, render_mc, same_letter, wrong_field


def unwrap(row: dict) -> dict:
    """Returns the row itself. On the hub each row of auxiliary_train is nested in a field "train"."""
    return row["train"] if isinstance(row.get("train"), dict) else row


def row_problem(row: dict) -> str | None:
    """Returns a description of the first fault in a row, or None."""
    row = unwrap(row)
    if problem := wrong_field(row, question=str, choices=list, answer=int, subject=str):
        return problem
    if len(row["choices"]) != len(LETTERS):
        return f"'choices' has {len(row['choices'])} entries, expected {len(LETTERS)}"
    if not 0 <= row["answer"] < len(LETTERS):
        return f"'answer' is {row['answer']}, expected 0 to {len(LETTERS) - 1}"
    return None


class MMLU(RowTask):
    """Questions of MMLU, or of its training subset auxiliary_train. An answer is the letter of a choice."""

    dataset = "cais/mmlu"
    eval_type = "categorical"
    evaluate = staticmethod(same_letter)

    def __init__(self, subset: str, split: str, **kwargs: Any):
        one_of("the MMLU subset", subset, ("all", "auxiliary_train"))
        one_of("the MMLU split", split, ("train",) if subset == "auxiliary_train" else ("validation", "dev", "test"))
        super().__init__(subset, split, row_problem, **kwargs)

    def get_example(self, index: int) -> dict[str, Any]:
        row = unwrap(self.rows[index])
        question = render_mc(row["question"], LETTERS, row["choices"])
        return message_pair(question, LETTERS[row["answer"]]) | {"subject": row["subject"], "letters": LETTERS}
