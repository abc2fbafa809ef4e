"""What several benchmarks share: loading rows, the wording of a multiple-choice question, and reading the final number
of an answer."""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any

from nanochat_fp4.data.chat_data import Task
from nanochat_fp4.data.sources import EVAL_FOLDER, Check, Source, load_rows


def resolve_eval_dir(flag: str | os.PathLike | None) -> str | None:
    """Returns the folder of benchmark files: the flag --eval-dir, or else $NANOCHAT_EVAL_DIR. None means that rows come
    from the hub."""
    return str(flag) if flag else os.environ.get("NANOCHAT_EVAL_DIR") or None


class RowTask(Task):
    """A task whose conversations are made from the rows of one published split."""

    dataset: str  # The data set's name on the hub, which each task defines.

    def __init__(self, config: str, split: str, check: Check, eval_dir: str | os.PathLike | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        self.rows = load_rows(self.dataset, config, split, folder=resolve_eval_dir(eval_dir), check=check)


def source_of(name: str, task: type[RowTask], subset: str, split: str, eval_dir: str | None, **kwargs: Any) -> Source:
    """Returns a part of a mixture that is made of a published split. kwargs are passed to the task."""
    folder = resolve_eval_dir(eval_dir)
    make = functools.partial(task, subset, split, eval_dir=folder, **kwargs)
    return Source(name, make, "" if folder else task.dataset, EVAL_FOLDER)


def one_of(what: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; use one of {', '.join(allowed)}")


def wrong_field(row: dict, **types: type) -> str | None:
    """Checks the types of a row's fields. Returns a description of the first field that is missing or has another type,
    or None."""
    for name, expected in types.items():
        if name not in row:
            return f"the field {name!r} is missing (there are {', '.join(map(repr, row)) or 'none'})"
        # Python counts bool as an int, but in data it is a different type.
        if not isinstance(row[name], expected) or isinstance(row[name], bool):
            return f"the field {name!r} is {type(row[name]).__name__}, expected {expected.__name__}"
    return None


LETTERS = ("A", "B", "C", "D")


def message_pair(question: str, answer: Any) -> dict[str, Any]:
    """Returns a conversation of one question and its answer."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def same_letter(conversation: dict[str, Any], answer: str) -> bool:
    """Returns True if `answer` is the letter of the conversation's own answer."""
    return answer == conversation["messages"][-1]["content"]


def render_mc(question: str, letters: Sequence[str], choices: Sequence[str]) -> str:
    """
    Returns a multiple-choice question in nanochat's wording.

    The letter follows its choice, because small models associate the two better in this order. No space separates "="
    and the letter, because the answer is "A", and "A" and " A" are different tokens.
    """
    options = "".join(f"- {choice}={letter}\n" for letter, choice in zip(letters, choices))
    return f"Multiple Choice question: {question}\n{options}\nRespond only with the letter of the correct answer."


FINAL_NUMBER = re.compile(r"#### (\-?[0-9\.\,]+)")


def extract_answer(text: str) -> str | None:
    """Returns the number after the first "####", without thousands separators, as GSM8K's own code reads it. Returns
    None if there is no such number."""
    match = FINAL_NUMBER.search(text)
    return match.group(1).strip().replace(",", "") if match else None


def same_final_number(conversation: dict[str, Any], answer: str) -> bool:
    """Returns True if the final number of `answer` equals the final number of the conversation's own answer."""
    expected = extract_answer(conversation["messages"][-1]["content"][-1]["text"])
    return expected is not None and extract_answer(answer) == expected
