"""
What a stage will need besides a model: rows of data sets, single files. A plan looks for them before the first step.

    missing = look_for([Need("GSM8K", "NANOCHAT_EVAL_DIR=folder", lambda: rows_problem(...)), ...])

A file that is here needs no network. For everything else one request tells whether it can be had, with a deadline.
"""

import importlib.util
import os
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from nanochat_fp4.data.chat_data import IDENTITY_URL, WORD_LIST_URL
from nanochat_fp4.data.download import within
from nanochat_fp4.data.rows import rows_problem
from nanochat_fp4.errors import one_line
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


def rows(dataset: str, config: str, split: str, eval_dir: str | None, vital: bool = False) -> Need:
    """The rows of a split, in the folder of benchmark files or on the hub."""
    folder = eval_dir or os.environ.get("NANOCHAT_EVAL_DIR") or None
    look = lambda: rows_problem(dataset, config, split, folder, "--eval-dir")  # noqa: E731
    return Need(f"{dataset} ({config}, {split})", EVAL_FOLDER, look, vital)


def smoltalk(sft_dir: str | None, flag: str) -> list[Need]:
    """SmolTalk's two splits, or the conversations in their place. flag: how a user names a folder of them."""
    inside, what = (SMOLTALK, "SmolTalk") if not sft_dir else ("", f"conversations in {sft_dir}")
    look = {
        split: lambda split=split: rows_problem(inside, None, split, sft_dir, "--sft-dir")
        for split in ("train", "test")
    }
    remedy = f"{flag}=folder with train.jsonl and test.jsonl"
    return [Need(f"{what} ({split})", remedy, look[split], vital=True) for split in look]


def identity_conversations() -> Need:
    path = base_dir() / "identity_conversations.jsonl"
    return file_or_url("the identity conversations", f"a JSONL file at {path}", path, IDENTITY_URL)


def words(eval_dir: str | None) -> Need:
    """The list of English words of the spelling tasks."""
    folder = eval_dir or os.environ.get("NANOCHAT_EVAL_DIR")
    if folder:
        return file_or_url(
            "the list of words", f"{WORD_LIST_URL} in {folder}/words", Path(folder, "words/words_alpha.txt")
        )
    return file_or_url("the list of words", EVAL_FOLDER, base_dir() / "words_alpha.txt", WORD_LIST_URL)


def base_dir() -> Path:
    """common.get_base_dir without making it."""
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache/nanochat")


def file_or_url(what: str, remedy: str, path: Path, url: str = "", vital: bool = False) -> Need:
    """A file or folder that is here, or can be downloaded from the address if there is one."""

    def look() -> str | None:
        if path.exists():
            return None
        return url_problem(url) if url else f"{path} is missing"

    return Need(what, remedy, look, vital)


def package(module: str, needed_for: str) -> Need:
    there = lambda: None if importlib.util.find_spec(module) else "it is not installed"  # noqa: E731
    return Need(f"the package {module} for {needed_for}", install_command(module) or f"pip install {module}", there)


def url_problem(url: str) -> str | None:
    """Why a server does not offer this file, or None. One request without a body."""

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD")  # noqa: S310 (an address of this package)
        urllib.request.urlopen(request, timeout=DEADLINE).close()  # noqa: S310 (an address of this package)

    try:
        within(DEADLINE, ask)
    except TimeoutError:
        return f"no answer from {url} within {DEADLINE:g} seconds"
    except Exception as e:  # of several libraries
        return f"{url} cannot be had: {one_line(e)[:120]}"
    return None
