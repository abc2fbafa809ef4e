"""
The needs of a stage besides a model, which are rows of data sets, single files, and packages. A plan looks for them
before the first step.

    missing = look_for([Need("GSM8K", "NANOCHAT_EVAL_DIR=folder", lambda: rows_problem(...)), ...])

A file that exists needs no network. It is read in the way in which the stage will read it, because a damaged file would
end the stage after hours. For everything else one request, with a deadline, tells whether it can be had.
"""

import functools
import importlib.util
import os
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanochat_fp4.cli import UserError, install_command, one_line
from nanochat_fp4.common import default_base_dir
from nanochat_fp4.data.chat_data import IDENTITY_URL, WORD_LIST_URL, CustomJSON, SmolTalk, load_words
from nanochat_fp4.data.download import http_opener, within
from nanochat_fp4.data.rows import rows_problem

DEADLINE = 8.0  # The deadline of a request, in seconds.
SMOLTALK = "HuggingFaceTB/smol-smoltalk"
EVAL_FOLDER = "NANOCHAT_EVAL_DIR=folder (eval/README.md says which files)"


@dataclass(frozen=True)
class Need:
    """Something that a stage needs, and the remedy if it is missing. find_problem() returns the reason why it cannot
    be had, or None. If it is vital, the stage cannot do without it."""

    what: str
    remedy: str
    find_problem: Callable[[], str | None]
    vital: bool = False


@dataclass(frozen=True)
class Missing:
    """A need that cannot be had, and the reason why."""

    what: str
    remedy: str
    why: str
    vital: bool


def look_for(needs: Sequence[Need]) -> list[Missing]:
    """Returns those of the needs that cannot be had. All are looked for at the same time, and each only once."""
    unique = {need.what: need for need in needs}
    with ThreadPoolExecutor(16) as pool:
        problems = pool.map(lambda need: need.find_problem(), unique.values())
        results = zip(unique.values(), problems)
        return [Missing(need.what, need.remedy, reason, need.vital) for need, reason in results if reason]


def problem_of(read: Callable[[], Any]) -> str | None:
    """Returns the message of the UserError that read() raises, in one line, or None."""
    try:
        read()
    except UserError as e:
        return one_line(e)
    return None


def rows(dataset: str, config: str, split: str, eval_dir: str | None, read: Callable[[], Any]) -> Need:
    """Returns the need for the rows of a split. They are in the folder of benchmark files, where read() loads them,
    or else on the hub."""
    folder = eval_dir or os.environ.get("NANOCHAT_EVAL_DIR") or None

    def find_problem() -> str | None:
        return rows_problem(dataset, config, split, folder, "--eval-dir") or (problem_of(read) if folder else None)

    return Need(f"{dataset} ({config}, {split})", EVAL_FOLDER, find_problem)


def smoltalk(sft_dir: str | None, flag: str) -> list[Need]:
    """Returns the needs for both splits of SmolTalk, or for the conversations in sft_dir. `flag` is the flag with
    which a user names such a folder."""
    dataset, name = (SMOLTALK, "SmolTalk") if not sft_dir else ("", f"conversations in {sft_dir}")

    def find_problem(split: str) -> str | None:
        problem = rows_problem(dataset, None, split, sft_dir, "--sft-dir")
        return problem or (problem_of(lambda: SmolTalk(split, sft_dir=sft_dir)) if sft_dir else None)

    remedy = f"{flag}=folder with train.jsonl and test.jsonl"
    splits = ("train", "test")
    return [Need(f"{name} ({split})", remedy, functools.partial(find_problem, split), vital=True) for split in splits]


def identity_conversations() -> Need:
    """Returns the need for nanochat's conversations about itself."""
    path = base_dir() / "identity_conversations.jsonl"
    return file_or_url(
        "the identity conversations", f"a JSONL file at {path}", path, IDENTITY_URL, lambda: CustomJSON(path)
    )


def words(eval_dir: str | None) -> Need:
    """Returns the need for the list of English words of the spelling tasks."""
    folder = eval_dir or os.environ.get("NANOCHAT_EVAL_DIR")
    name, read = "the list of words", lambda: load_words(folder)
    if folder:
        path = Path(folder, "words/words_alpha.txt")
        return file_or_url(name, f"{WORD_LIST_URL} in {folder}/words", path, "", read)
    return file_or_url(name, EVAL_FOLDER, base_dir() / "words_alpha.txt", WORD_LIST_URL, read)


def base_dir() -> Path:
    """Returns the path that common.get_base_dir returns, without making the folder."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or default_base_dir())


def file_or_url(what: str, remedy: str, path: Path, url: str, read: Callable[[], Any], vital: bool = False) -> Need:
    """Returns the need for a file or folder. If it exists, read() loads it. Otherwise it is downloaded from `url`,
    unless `url` is empty."""

    def find_problem() -> str | None:
        if path.exists():
            return problem_of(read)
        return url_problem(url) if url else f"{path} is missing"

    return Need(what, remedy, find_problem, vital)


def package(module: str, needed_for: str) -> Need:
    """Returns the need for a Python package."""

    def find_problem() -> str | None:
        return None if importlib.util.find_spec(module) else "it is not installed"

    return Need(
        f"the package {module} for {needed_for}", install_command(module) or f"pip install {module}", find_problem
    )


def url_problem(url: str) -> str | None:
    """Returns the reason why a server does not offer this file, or None. It makes one request without a body."""

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 The opener accepts http and https only.
        http_opener().open(request, timeout=DEADLINE).close()

    try:
        within(DEADLINE, ask)
    except TimeoutError:
        return f"no answer from {url} within {DEADLINE:g} seconds"
    except Exception as e:  # Several libraries raise errors here.
        return f"{url} cannot be had: {one_line(e)[:120]}"
    return None
