"""Shared by several benchmarks: the place of the rows, the wording of a choice, the reading of a final number."""

import os
import re
from collections.abc import Sequence
from typing import Any

from nanochat_fp4.data import needs
from nanochat_fp4.data.chat_data import Source, Task
from nanochat_fp4.data.rows import Check, load_rows


def resolve_eval_dir(flag: str | os.PathLike | None) -> str | None:
    """The folder of benchmark files: --eval-dir, else $NANOCHAT_EVAL_DIR, else None (the hub)."""
    return str(flag) if flag else os.environ.get("NANOCHAT_EVAL_DIR") or None


class RowTask(Task):
    """A task whose conversations are made from the rows of one published split."""

    dataset: str  # its name on the hub; each task has one

    def __init__(self, config: str, split: str, check: Check, eval_dir: str | os.PathLike | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rows = load_rows(self.dataset, config, split, folder=resolve_eval_dir(eval_dir), check=check)

    def num_examples(self) -> int:
        return len(self.rows)


def source_of(name: str, task: type[RowTask], subset: str, split: str, eval_dir: str | None, **kwargs: Any) -> Source:
    """One part of a mixture, made of a published split, and the need of that split for a plan. kwargs: of the task."""
    make = lambda: task(subset, split, eval_dir=eval_dir, **kwargs)  # noqa: E731
    return Source(name, make, [needs.rows(task.dataset, subset, split, eval_dir, make)])


def one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; use one of {', '.join(allowed)}")


def wrong_field(row: dict, **types: type) -> str | None:
    """The first field of `row` that is missing or of another type, in words; None where all are as expected."""
    for name, expected in types.items():
        if name not in row:
            return f"the field {name!r} is missing (there are {', '.join(map(repr, row)) or 'none'})"
        # bool is an int in Python, but not in data
        if not isinstance(row[name], expected) or isinstance(row[name], bool):
            return f"the field {name!r} is {type(row[name]).__name__}, expected {expected.__name__}"
    return None


LETTERS = ("A", "B", "C", "D")


def message_pair(question: str, answer: Any) -> dict[str, Any]:
    """A conversation of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def same_letter(conversation: dict[str, Any], answer: str) -> bool:
    return answer == conversation["messages"][-1]["content"]


def render_mc(question: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """
    A multiple-choice question, in nanochat's wording.

    The letter comes after its choice, because small models bind the two better in this order. No space separates "="
    and the letter, because the answer is "A", and "A" and " A" are different tokens.
    """
    options = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices))
    return f"Multiple Choice question: {question}\n{options}\nRespond only with the letter of the correct answer."


FINAL_NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")


def extract_answer(text: str) -> str | None:
    """The number after the first "####", without thousands separators, as GSM8K's own code reads it; None without."""
    match = FINAL_NUMBER.search(text)
    return match.group(1).strip().replace(",", "") if match else None


def same_final_number(conversation: dict[str, Any], answer: str) -> bool:
    """Whether the final number of `answer` equals the one in the conversation's own last part."""
    expected = extract_answer(conversation["messages"][-1]["content"][-1]["text"])
    return expected is not None and extract_answer(answer) == expected
