"""
The rows of a published dataset, from the Hugging Face hub or from a folder of files with the same fields.

    load_rows("openai/gsm8k", "main", "test")                               the hub (or its cache, without a network)
    load_rows("openai/gsm8k", "main", "test", folder="my_eval_dir")         my_eval_dir/openai/gsm8k/main/test.jsonl.gz

A folder has <dataset>/<config>/<split> as a .jsonl, .jsonl.gz or .parquet file. Parts with the hub's names
(test-00000-of-00001.parquet) will do as well, so a clone of the hub's repository works. If a folder is given, no
network is needed. The rows are in nanochat's order, which is the shuffle of `datasets` with seed 42.
"""

import functools
import gzip
import importlib.util
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanochat_fp4.cli import UserError, install_command, missing_package, one_line
from nanochat_fp4.data.download import file_problem, hub_problem, within
from nanochat_fp4.hardware import physical_memory

SHUFFLE_SEED = 42
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")

# The commits of the datasets' repositories on the hub. They are fixed, because numbers on a dataset that changes cannot
# be compared.
REVISIONS = {
    "HuggingFaceTB/smol-smoltalk": "f73fe857d519ff6ac5af2ea67c4d3834da7b8bcc",
    "allenai/ai2_arc": "210d026faf9955653af8916fad021475a3f00453",
    "cais/mmlu": "c30699e8356da336a370243923dbaf21066bb9fe",
    "openai/gsm8k": "740312add88f781978c0658806c59bc2815b9866",
    "openai/openai_humaneval": "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
}

Check = Callable[[dict], str | None]  # A function that returns the fault of a row ("field x ..."), or None.


class MissingDataError(UserError):
    """The error for a dataset that does not exist here and cannot be had now. With --allow-missing a run goes on
    without it."""


def load_rows(
    dataset: str,
    config: str | None,
    split: str,
    folder: str | os.PathLike | None = None,
    check: Check | None = None,
    flag: str = "--eval-dir",
) -> Sequence[dict[str, Any]]:
    """
    Returns the rows of one split, shuffled. `flag` is the flag that names `folder`, for messages.

    `check` is called with every row of a file, and with the first row from the hub. Raises MissingDataError if there is
    no such file or dataset, or no network. Raises UserError for a damaged file and for a wrong field. Messages name the
    file, the place in it and the remedy.
    """
    if folder:
        rows = read_folder(folder, "/".join(filter(None, (dataset, config))), split, check, flag)
        order = np.random.default_rng(SHUFFLE_SEED).permutation(len(rows))
        return [rows[i] for i in order]
    rows = _from_hub(dataset, config, split, flag)
    if check is not None and len(rows) and (problem := check(rows[0])):
        raise UserError(f"{dataset} ({split}) on the hub: {problem}; use {flag} with files in the known format")
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# From a folder


def read_folder(
    folder: str | os.PathLike, inside: str, split: str, check: Check | None = None, flag: str = "--eval-dir"
) -> list[dict[str, Any]]:
    """Returns all rows of <folder>/<inside>/<split>.* in the order of the file. Raises the errors of load_rows."""
    paths = files_of(Path(folder), inside, split, flag)
    rows = [row for path in paths for row in read_rows(path, check)]
    if not rows:
        raise UserError(f"{paths[0]} has no rows; copy it again")
    return rows


def files_of(folder: Path, inside: str, split: str, flag: str) -> list[Path]:
    """Returns the file <folder>/<inside>/<split>, or its parts in order. Raises MissingDataError if there is none,
    and UserError if `folder` is not a folder or parts are missing."""
    if not folder.is_dir():
        raise UserError(f"{flag} {folder} is not a folder; name one that holds {Path(inside, split)}.jsonl")
    place = folder / inside
    paths = [place / f"{split}{suffix}" for suffix in SUFFIXES if (place / f"{split}{suffix}").is_file()][:1]
    if not paths:
        paths = sorted(place.glob(f"{split}-*-of-*.parquet"))
        if paths and (total := paths[0].stem.rpartition("-")[2]).isdigit() and int(total) != len(paths):
            raise UserError(f"{place} has {len(paths)} of {total} parts of {split}; copy the missing ones")
    if not paths:
        present = ", ".join(sorted(p.name for p in place.iterdir())[:8]) if place.is_dir() else ""
        problem = f"{place / split}.jsonl (or .jsonl.gz, .parquet) is missing ({place} has {present or 'nothing'})"
        raise MissingDataError(f"{problem}; put it there, or leave out {flag} to load it from the hub")
    return paths


def read_rows(path: str | os.PathLike, check: Check | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a .jsonl, .jsonl.gz or .parquet file. Raises UserError, which names the file and the line."""
    path = Path(path)
    rows = []
    for where, row in _read_parquet(path) if path.suffix == ".parquet" else read_jsonl(path):
        if not isinstance(row, dict):
            raise UserError(f"{path}, {where}: expected an object with fields, found {type(row).__name__}; correct it")
        try:
            problem = check(row) if check else None
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as e:
            problem = f"unexpected content ({type(e).__name__}: {one_line(e)[:100]})"
        if problem:
            raise UserError(f"{path}, {where}: {problem}; correct the file, or get it again")
        rows.append(row)
    return rows


LONGEST_LINE = 1 << 28  # The largest number of characters in a line.


def read_lines(path: Path, errors: str = "strict", most: int | None = None) -> Iterator[tuple[int, str]]:
    """
    Yields (line number, text) for the non-empty lines of a text file, which may be compressed (.gz). `errors` is that
    of open(), for bytes that are not UTF-8.

    `most` limits the characters of the whole file, because a .gz of a few kilobytes can hold gigabytes. The default is
    a quarter of this machine's memory, for readers that keep all lines. Raises MissingDataError if the file does not
    exist, and UserError if it cannot be read or is too large.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder or a device, not a file; remove it")
    opener = gzip.open if path.suffix.lower() == ".gz" else open
    number, room = 0, physical_memory() // 4 if most is None else most
    try:
        with opener(path, "rt", encoding="utf-8-sig", errors=errors) as f:
            while line := f.readline(LONGEST_LINE + 1):
                number, room = number + 1, room - len(line)
                if len(line) > LONGEST_LINE or room < 0:
                    raise UserError(f"{path}, line {number}: more text than there is room for; split the file")
                if line.strip():
                    yield number, line
    except FileNotFoundError as e:
        raise MissingDataError(f"{path} is not there; check the path") from e
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read past line {number} ({one_line(e)[:100]}); copy it again") from e


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields ("line 3", value) for each line of a file of JSON lines. Raises UserError for a line that is not JSON."""
    for number, line in read_lines(path):
        try:
            yield f"line {number}", json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path}, line {number}: not JSON ({one_line(e)[:100]}); correct or copy it again") from e


def _read_parquet(path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} is not a readable parquet file ({one_line(e)[:100]}); copy it again") from e
    for i, row in enumerate(rows):
        yield f"row {i}", row


# ----------------------------------------------------------------------------------------------------------------------
# From the hub


LOAD_SECONDS = 1800.0  # The time limit for one dataset.


def _is_cached(dataset: str) -> bool:
    """Returns whether the package datasets has any version of a dataset in its cache."""
    from datasets.config import HF_DATASETS_CACHE

    return (Path(HF_DATASETS_CACHE) / dataset.replace("/", "___")).is_dir()


def _from_hub(dataset: str, config: str | None, split: str, flag: str) -> Sequence[dict[str, Any]]:
    name = f"{dataset} ({config or 'default'}, {split})"
    try:
        import datasets
    except ImportError as e:
        raise MissingDataError(f"{name}: {missing_package(e) or one_line(e)}") from e
    problem = benchmarks_problem()
    try:
        # If there is a cache, the package datasets finds out by itself that there is no network.
        if problem and not _is_cached(dataset):
            raise UserError(problem)
        load = functools.partial(datasets.load_dataset, dataset, config, split=split, revision=REVISIONS.get(dataset))
        return within(LOAD_SECONDS, load).shuffle(seed=SHUFFLE_SEED)
    except Exception as e:  # Several libraries raise errors here: not found, gated, cut connection, not in the cache.
        reason = problem or f"{type(e).__name__}: {one_line(e)[:150]}"
        hint = f"give a folder that holds it with {flag}, or check the network"
        raise MissingDataError(f"{name} cannot be loaded from the hub ({reason}); {hint}") from e


def rows_problem(dataset: str, config: str | None, split: str, folder: str | None, flag: str) -> str | None:
    """Returns the reason why load_rows could not load these rows, or None. It only looks for files in the folder, or
    asks the hub once."""
    if folder:
        try:
            files_of(Path(folder), "/".join(filter(None, (dataset, config))), split, flag)
            return None
        except UserError as e:
            return one_line(e)
    if importlib.util.find_spec("datasets") is None:
        return f"the package datasets is not installed ({install_command('datasets')})"
    return None if _is_cached(dataset) else file_problem(dataset, "README.md")


@functools.cache
def benchmarks_problem() -> str | None:
    """Returns the hub's problem, if any. The hub is asked once in each process, because without a network it takes
    seconds."""
    return hub_problem("openai/gsm8k", "README.md")
