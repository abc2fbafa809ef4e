"""
Conversations to train on. This module defines tasks, mixtures of tasks, and the tasks that exist only for training.

A task is a list of conversations {"messages": [{"role", "content"}, ...], ...}. A benchmark in eval/ is a task that
also judges answers. Order and content are nanochat's, so a mixture here is the same as nanochat's mixture.
"""

import functools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import aligned, say_once
from nanochat_fp4.data.sources import (
    EVAL_FOLDER,
    MissingDataError,
    Source,
    download_file_with_lock,
    load_rows,
    read_folder,
    read_rows,
    rows_of,
)
from nanochat_fp4.data.tokenizer import checked_messages
from nanochat_fp4.files import git_hash

MIXTURE_SEED = 42

# ----------------------------------------------------------------------------------------------------------------------
# Tasks and mixtures


class Task:
    """
    A dataset of conversations. start, stop and step select conversations as a slice does.

    Subclasses set `rows`, one for each conversation, and define get_example(i). Benchmarks also define
    evaluate(conversation, answer) -> bool and eval_type. The type "categorical" is the choice of a letter from
    conversation["letters"], and "generative" is any text. VERSION is raised whenever prompts, order or scoring change.
    Raises ValueError for a slice that selects nothing.
    """

    VERSION = 1
    rows: Sequence[Any]
    eval_type: str

    def __init__(self, start: int = 0, stop: int | None = None, step: int = 1):
        if start < 0 or step < 1 or (stop is not None and stop < start):
            raise ValueError(f"[{start}:{stop}:{step}] selects nothing; use 0 <= start <= stop and step >= 1")
        self.start, self.stop, self.step = start, stop, step

    def num_examples(self) -> int:
        """Returns the number of conversations before slicing."""
        return len(self.rows)

    def get_example(self, index: int) -> dict[str, Any]:
        """Returns conversation `index` of those before slicing."""
        raise NotImplementedError

    def evaluate(self, conversation: dict[str, Any], answer: str) -> bool:
        """Returns whether `answer` solves the problem of the conversation."""
        raise NotImplementedError

    @property
    def judges(self) -> dict[str, Callable[[dict[str, Any], str], bool]]:
        """The ways to judge an answer. The score of evaluate() has no name of its own; others stand beside it."""
        return {"": self.evaluate}

    def _range(self) -> range:
        return range(self.num_examples())[self.start : self.stop : self.step]

    def __len__(self) -> int:
        return len(self._range())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.get_example(self._range()[index])


TEST_SEED_OFFSET = 10_000_000


class DrawnTask(Task):
    """
    A task of `size` conversations that make(rng) draws. Conversation i is drawn with the seed i in the split train, and
    with the seed TEST_SEED_OFFSET + i in the split test. Raises ValueError for another split.
    """

    def __init__(self, size: int = 1000, split: str = "train", **kwargs: Any):
        super().__init__(**kwargs)
        if split not in ("train", "test"):
            raise ValueError(f"{type(self).__name__} has the splits train and test, not {split!r}")
        self.rows, self.first_seed = range(size), 0 if split == "train" else TEST_SEED_OFFSET

    def get_example(self, index: int) -> dict[str, Any]:
        return self.make(random.Random(self.first_seed + index))

    def make(self, rng: random.Random) -> dict[str, Any]:
        """Draws one conversation with `rng`."""
        raise NotImplementedError


class TaskMixture(Task):
    """All conversations of several tasks in one fixed random order. A task that is given twice counts twice."""

    def __init__(self, tasks: Sequence[Task], **kwargs: Any):
        super().__init__(**kwargs)
        self.rows = [(task, i) for task in tasks for i in range(len(task))]
        random.Random(MIXTURE_SEED).shuffle(self.rows)

    def get_example(self, index: int) -> dict[str, Any]:
        task, i = self.rows[index]
        return task[i]


# ----------------------------------------------------------------------------------------------------------------------
# General conversations


def check_conversation(row: Any) -> None:
    """Raises ValueError for a conversation, or a list of messages, that cannot be trained on."""
    checked_messages(row if isinstance(row, dict) else {"messages": row}, answered=True)


SMOLTALK = "HuggingFaceTB/smol-smoltalk"


class SmolTalk(Task):
    """
    The dataset HuggingFaceTB/smol-smoltalk of general conversations (460K in train, 24K in test). Some conversations
    begin with a system message.

    sft_dir names a folder that replaces the dataset. It has train and test as .jsonl, .jsonl.gz or .parquet files, in
    which a row is {"messages": [...]}.
    """

    def __init__(self, split: str, sft_dir: str | os.PathLike | None = None, **kwargs: Any):
        super().__init__(**kwargs)
        read = functools.partial(read_folder, sft_dir, "") if sft_dir else functools.partial(load_rows, SMOLTALK, None)
        self.rows = read(split, check=check_conversation, flag="--sft-dir")

    def get_example(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"messages": row["messages"] if isinstance(row, dict) else row}


class CustomJSON(SmolTalk):
    """The conversations of a JSONL file, in which a line is a list of messages or {"messages": [...]}. Raises
    UserError for a conversation that cannot be trained on, and for a file without any."""

    def __init__(self, filepath: str | os.PathLike, **kwargs: Any):
        Task.__init__(self, **kwargs)
        self.rows = read_rows(filepath, check_conversation)
        if not self.rows:
            raise UserError(f"{filepath} holds no conversation; write one list of messages a line")


IDENTITY_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/identity_conversations.jsonl"
# A small file of this project, for runs without a network.
LOCAL_IDENTITY = Path(__file__).with_name("identity_conversations.jsonl")


def identity_conversations() -> str:
    """
    Returns the path of nanochat's 1000 conversations about itself, <base dir>/identity_conversations.jsonl. If the file
    does not exist, it is downloaded.

    Another file under this name is used as it is. Raises MissingDataError if the download fails.
    """
    return download_file_with_lock(IDENTITY_URL, "identity_conversations.jsonl", CustomJSON)


# ----------------------------------------------------------------------------------------------------------------------
# Spelling

# This is the last commit of the repository. git names a file by the SHA-1 of its content.
WORD_LIST_COMMIT = "20f5cc9b3f0ccc8ce45d814c532b7c2031bba31c"
WORD_LIST_BLOB = "d3a119e7ce57d068c3f3c9cbd694fc2ff14571ab"
WORD_LIST_URL = f"https://raw.githubusercontent.com/dwyl/english-words/{WORD_LIST_COMMIT}/words_alpha.txt"
LETTERS = "abcdefghijklmnopqrstuvwxyz"

# The wordings are nanochat's (MIT licence), to the letter and in their order, because prompts are a part of a
# benchmark.
SPELLING_QUESTIONS = Path(__file__).with_name("spelling_questions.txt").read_text(encoding="utf-8").splitlines()
# These words are for runs without the word list. They are enough for practice, and are not a benchmark.
LOCAL_WORDS = Path(__file__).with_name("local_words.txt").read_text(encoding="utf-8").split()


def load_words(eval_dir: str | os.PathLike | None = None) -> list[str]:
    """
    Returns about 370,000 English words. They come from <eval_dir>/words/words_alpha.txt if an eval_dir is given,
    otherwise from the list in the base directory, which is downloaded if it does not exist. Raises MissingDataError if
    the list cannot be had, and UserError if it is empty.
    """
    path = Path(eval_dir, "words/words_alpha.txt") if eval_dir else None
    path = path or Path(download_file_with_lock(WORD_LIST_URL, "words_alpha.txt", _check_words))
    words = "".join(row["text"] for _, row, _ in rows_of(path, column="text")).split()
    if not words:
        raise UserError(f"{path} is empty; get it again from {WORD_LIST_URL}")
    return words


def _check_words(path: str) -> None:
    """Raises UserError if a downloaded file is not the word list."""
    if git_hash(path) != WORD_LIST_BLOB:
        raise UserError("it is not the list of words that it should be")


def counting_conversation(words: Sequence[str], rng: random.Random) -> dict[str, Any]:
    """Draws a conversation like 'How many r are in strawberry?' with `rng`. The answer spells the word, counts by
    hand, and checks the count with Python."""
    word = rng.choice(words)  # The order of the draws is a part of the format.
    letter = rng.choice(word) if rng.random() < 0.9 else rng.choice(LETTERS)
    question = rng.choice(SPELLING_QUESTIONS)
    if rng.random() < 0.3:
        question = question.lower()
    quotes = ("", "'", '"')
    letter_quote, word_quote = rng.choice(quotes), rng.choice(quotes)
    question = question.format(letter=letter_quote + letter + letter_quote, word=word_quote + word + word_quote)
    if rng.random() < 0.5:
        question += "?"

    text = (
        f"We are asked to find the number '{letter}' in the word '{word}'. Let me try a manual approach first.\n\n"
        f"First spell the word out:\n{word}:{','.join(word)}\n\nThen count the occurrences of '{letter}':\n"
    )
    count = 0
    for i, char in enumerate(word, 1):
        count += char == letter
        # There is no space after the colon, because " a" and "a" are different tokens.
        text += f"{i}:{char}" + (f" hit! count={count}\n" if char == letter else "\n")
    text += f"\nThis gives us {count}."
    answer = [
        {"type": "text", "text": text},
        {"type": "text", "text": "\n\nLet me double check this using Python:\n\n"},
        {"type": "python", "text": f"'{word}'.count('{letter}')"},
        {"type": "python_output", "text": str(count)},
        {"type": "text", "text": f"\n\nPython gives us {count}.\n\nMy final answer is:\n\n#### {count}"},
    ]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


class SimpleSpelling(DrawnTask):
    """A task that teaches the letters of tokens: 'Spell the word: apple' is answered by 'apple:a,p,p,l,e'. It is
    used for training only."""

    def __init__(self, size: int = 1000, split: str = "train", words: Sequence[str] | None = None, **kwargs: Any):
        super().__init__(size, split, **kwargs)
        self.words = list(words) if words is not None else load_words()
        # The order differs from SpellingBee's, so that the same seed draws another word.
        random.Random(42).shuffle(self.words)

    def make(self, rng: random.Random) -> dict[str, Any]:
        word = rng.choice(self.words)
        return {
            "messages": [
                {"role": "user", "content": f"Spell the word: {word}"},
                {"role": "assistant", "content": f"{word}:{','.join(word)}"},
            ]
        }


# ----------------------------------------------------------------------------------------------------------------------
# Sources of mixtures


def smoltalk(split: str, sft_dir: str | None, flag: str, **kwargs: Any) -> Source:
    """Returns the source of a split of SmolTalk, or of the conversations in sft_dir. `flag` is the flag with which a
    user names such a folder."""
    name = f"conversations of {sft_dir}" if sft_dir else "SmolTalk"
    make = functools.partial(SmolTalk, split, sft_dir=sft_dir, **kwargs)
    remedy = f"{flag}=folder with train.jsonl and test.jsonl"
    return Source(name, make, "" if sft_dir else SMOLTALK, remedy, vital=True)


def identity() -> Source:
    """Returns the source of nanochat's conversations about itself."""
    return Source("identity conversations", lambda: CustomJSON(identity_conversations()), IDENTITY_URL)


def words_source(name: str, task: Callable[..., Task], eval_dir: str | None, **kwargs: Any) -> Source:
    """Returns the source of a task that draws from the list of words."""
    url = "" if eval_dir else WORD_LIST_URL
    return Source(name, lambda: task(words=load_words(eval_dir), **kwargs), url, EVAL_FOLDER)


def load_sources(sources: list[Source], allow_missing: bool, what: str) -> TaskMixture:
    """Returns the mixture of all sources that can be loaded. A missing source raises UserError, or with
    allow_missing it is named and left out. `what` names the mixture."""
    for source in sources:
        try:
            source.task = source.make()
        except MissingDataError as e:
            if not allow_missing:
                raise UserError(f"{source.name}: {e}; or add --allow-missing, or --data local") from e
            source.missing = str(e)
    if what == "training" or any(source.missing for source in sources):
        say_once(f"{what} mixture:\n{aligned(describe_sources(sources))}")
    return TaskMixture([source.task for source in sources if source.task is not None])


def describe_sources(sources: list[Source]) -> dict[str, str]:
    """Returns a line for each source by its name: the number of its rows, or why it is missing. Rows of a source
    that is given twice are added up."""
    rows = Counter()
    for source in sources:
        rows[source.name] += len(source.task or ())
    return {s.name: f"{rows[s.name]:,} conversations" if s.task else f"left out: {s.missing}" for s in sources}
