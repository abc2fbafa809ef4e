"""
What a stage will need besides a model: rows of data sets, single files. A plan looks for them before the first step.

    missing = look_for([Need("GSM8K", "NANOCHAT_EVAL_DIR=folder", lambda: rows_problem(...)), ...])

A file that is here needs no network, and is read as the stage will read it: a damaged one would end the stage after
hours. For everything else one request tells whether it can be had, with a deadline.
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

from nanochat_fp4.data.chat_data import IDENTITY_URL, WORD_LIST_URL, CustomJSON, SmolTalk, load_words
from nanochat_fp4.data.download import http_opener, within
from nanochat_fp4.data.rows import rows_problem
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.packages import install_command

DEADLINE = 8.0  # seconds, of a request
SMOLTALK = "HuggingFaceTB/smol-smoltalk"
EVAL_FOLDER = "NANOCHAT_EVAL_DIR=folder (eval/README.md says which files)"


@dataclass(frozen=True)
class Need:
    """One thing. look() says why it cannot be had, or returns None. vital: nothing works without it."""

    what: str
    remedy: str
    look: Callable[[], str | None]
    vital: bool = False


@dataclass(frozen=True)
class Missing:
    what: str
    remedy: str
    why: str
    vital: bool


def look_for(needs: Sequence[Need]) -> list[Missing]:
    """Those of the needs that cannot be had. All are looked for at once, each one time."""
    unique = {need.what: need for need in needs}
    with ThreadPoolExecutor(16) as pool:
        problems = pool.map(lambda need: need.look(), unique.values())
        found = zip(unique.values(), problems)
        return [Missing(need.what, need.remedy, why, need.vital) for need, why in found if why]


def problem_of(read: Callable[[], Any]) -> str | None:
    """The UserError of read() in one line, or None."""
    try:
        read()
    except UserError as e:
        return one_line(e)
    return None


def rows(dataset: str, config: str, split: str, eval_dir: str | None, read: Callable[[], Any]) -> Need:
    """The rows of a split, in the folder of benchmark files, where read() loads them, or on the hub."""
    folder = eval_dir or os.environ.get("NANOCHAT_EVAL_DIR") or None

    def look() -> str | None:
        return rows_problem(dataset, config, split, folder, "--eval-dir") or (problem_of(read) if folder else None)

    return Need(f"{dataset} ({config}, {split})", EVAL_FOLDER, look)


def smoltalk(sft_dir: str | None, flag: str) -> list[Need]:
    """SmolTalk's two splits, or the conversations in their place. flag: how a user names a folder of them."""
    inside, what = (SMOLTALK, "SmolTalk") if not sft_dir else ("", f"conversations in {sft_dir}")

    def look(split: str) -> str | None:
        problem = rows_problem(inside, None, split, sft_dir, "--sft-dir")
        return problem or (problem_of(lambda: SmolTalk(split, sft_dir=sft_dir)) if sft_dir else None)

    remedy = f"{flag}=folder with train.jsonl and test.jsonl"
    splits = ("train", "test")
    return [Need(f"{what} ({split})", remedy, functools.partial(look, split), vital=True) for split in splits]


def identity_conversations() -> Need:
    path = base_dir() / "identity_conversations.jsonl"
    return file_or_url(
        "the identity conversations", f"a JSONL file at {path}", path, IDENTITY_URL, lambda: CustomJSON(path)
    )


def words(eval_dir: str | None) -> Need:
    """The list of English words of the spelling tasks."""
    folder = eval_dir or os.environ.get("NANOCHAT_EVAL_DIR")
    what, read = "the list of words", lambda: load_words(folder)
    if folder:
        path = Path(folder, "words/words_alpha.txt")
        return file_or_url(what, f"{WORD_LIST_URL} in {folder}/words", path, "", read)
    return file_or_url(what, EVAL_FOLDER, base_dir() / "words_alpha.txt", WORD_LIST_URL, read)


def base_dir() -> Path:
    """common.get_base_dir without making it."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache/nanochat")


def file_or_url(what: str, remedy: str, path: Path, url: str, read: Callable[[], Any], vital: bool = False) -> Need:
    """A file or folder that is here, where read() loads it, or can be downloaded from the address if there is one."""

    def look() -> str | None:
        if path.exists():
            return problem_of(read)
        return url_problem(url) if url else f"{path} is missing"

    return Need(what, remedy, look, vital)


def package(module: str, needed_for: str) -> Need:
    there = lambda: None if importlib.util.find_spec(module) else "it is not installed"  # noqa: E731
    return Need(f"the package {module} for {needed_for}", install_command(module) or f"pip install {module}", there)


def url_problem(url: str) -> str | None:
    """Why a server does not offer this file, or None. One request without a body."""

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 the opener knows http and https alone
        http_opener().open(request, timeout=DEADLINE).close()

    try:
        within(DEADLINE, ask)
    except TimeoutError:
        return f"no answer from {url} within {DEADLINE:g} seconds"
    except Exception as e:  # of several libraries
        return f"{url} cannot be had: {one_line(e)[:120]}"
    return None
