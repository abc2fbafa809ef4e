"""
What a stage loads: rows of files, data sets of the Hugging Face hub, and three files at addresses of their own.

    load_rows("openai/gsm8k", "main", "test", None, check)                  the hub (or its cache, without a network)
    load_rows("openai/gsm8k", "main", "test", "my_eval_dir", check)         my_eval_dir/openai/gsm8k/main/test.jsonl.gz
    look_for([Source(...), ...])                                            the sources that cannot be had, for a plan

What comes over the network has a deadline, because looking up the name of a host ignores every timeout. Files are read
here and not by `datasets`, which loses the first fields of a csv with unquoted commas, takes dates and numbers among
JSON texts for other types, and refuses a whole folder for a byte that is not UTF-8.
"""

import codecs
import csv
import functools
import io
import itertools
import json
import multiprocessing
import os
import re
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_fp4.cli import UserError, missing_package, one_line, switched_on
from nanochat_fp4.common import base_dir_of, get_base_dir, print0
from nanochat_fp4.locks import locked

KINDS = ("txt", "md", "csv", "tsv", "json", "jsonl", "ndjson", "parquet")
COMPRESSED = {"gz": "gzip", "bz2": "bz2", "zst": "zstd", "lz4": "lz4"}  # by ending, in the words of pyarrow
LONGEST = 1 << 28  # The largest number of characters in a line, and in a JSON value of several lines.
BLOCK = 1 << 20  # The number of characters of a text file that are a row, by and large.
UTF16 = "text in UTF-16, not in UTF-8; convert it (iconv -f utf16 -t utf8)"
BEGINNINGS = {codecs.BOM_UTF16_LE: UTF16, codecs.BOM_UTF16_BE: UTF16, b"\x1f\x8b": "compressed; add .gz to its name"}
CONVERT = "convert such text (iconv -f cp1252 -t utf8, if it is from Windows or in Latin-1), or remove it"
SHUFFLE_SEED = 42  # That of nanochat, in the shuffle of the package datasets.
EVAL_FOLDER = "NANOCHAT_EVAL_DIR=folder (eval/README.md says which files)"
ASK_SECONDS, LOAD_SECONDS = 8.0, 1800.0  # The time for a question to a server, and for a data set.

# The commits of the datasets' repositories on the hub. They are fixed, because numbers on a dataset that changes cannot
# be compared.
REVISIONS = {
    "HuggingFaceTB/smol-smoltalk": "f73fe857d519ff6ac5af2ea67c4d3834da7b8bcc",
    "allenai/ai2_arc": "210d026faf9955653af8916fad021475a3f00453",
    "cais/mmlu": "c30699e8356da336a370243923dbaf21066bb9fe",
    "openai/gsm8k": "740312add88f781978c0658806c59bc2815b9866",
    "openai/openai_humaneval": "7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
}
T = TypeVar("T")
Check = Callable[[dict], str | None]  # Returns the fault of a row ("field x ..."), raises it as ValueError, or neither.


class MissingDataError(UserError):
    """The error for data that do not exist here and cannot be had now. With --allow-missing a run goes on without
    them."""


# ----------------------------------------------------------------------------------------------------------------------
# Files


def kind_of(path: Path) -> str:
    """Returns the kind of a file by its name, without the ending of a compressed file. It is "" for a file that is not
    read."""
    name, _, kind = path.name.lower().rpartition(".")
    if kind in COMPRESSED:
        kind = name.rpartition(".")[2].replace("parquet", "")
    return kind if kind in KINDS else ""


def column_among(names: Collection[str], column: str) -> str:
    """Returns the name that is the column: exactly, or else the only one that differs from it in capitals alone."""
    # Most rows have it, of which a text may have millions.
    alike = [] if column in names else [name for name in names if name.casefold() == column.casefold()]
    return alike[0] if len(alike) == 1 else column


def rows_of(path: Path, errors: str = "strict", column: str | None = None) -> Iterator[tuple[str, Any, float]]:
    """
    Yields ("line 3", value, share) for the rows of a file, of which a share from 0 to 1 has been read by then. A row of
    a csv, tsv or parquet file is a dict, and so is each megabyte of a text file, {column: text}. A file named .json has
    a row in each line, or it is a list of rows or a single row.

    `errors` is that of open(), for bytes that are not UTF-8. Of a parquet file only `column` is read, if it has one.
    Raises MissingDataError if the file does not exist, and UserError, which names the file and the place, if it cannot
    be read.
    """
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is a folder or a device, not a file; remove it")
    place = "its beginning"
    try:
        if kind_of(path) == "parquet":
            f = pq.ParquetFile(path, page_checksum_verification=True)
            name = column_among(f.schema_arrow.names, column or "")
            batches = f.iter_batches(columns=[name] if name in f.schema_arrow.names else None)
            rows = ((f"row {i}", row) for i, row in enumerate(row for batch in batches for row in batch.to_pylist()))
            read, size = itertools.count(1).__next__, f.metadata.num_rows
        else:
            of_disk = pa.OSFile(str(path))
            read, size = of_disk.tell, of_disk.size()
            f = io.BufferedReader(pa.input_stream(of_disk, COMPRESSED.get(path.suffix.lower()[1:])))
            if kind := BEGINNINGS.get(f.peek(2)[:2]):
                raise UserError(f"{path} is {kind}")
            f = io.TextIOWrapper(f, encoding="utf-8-sig", errors=errors, newline="" if "sv" in kind_of(path) else None)
            rows = TEXT_READERS.get(kind_of(path), _json_lines)(f)
        with f:
            for place, row in rows:
                yield place, {column: row} if isinstance(row, str) and column else row, read() / size
    except FileNotFoundError as e:
        raise MissingDataError(f"{path} is not there; check the path") from e
    except (OSError, ValueError, RecursionError, csv.Error, pa.ArrowException) as e:
        if isinstance(e, UnicodeDecodeError) and kind_of(path) != "parquet":
            raise UserError(f"{path} is not UTF-8 ({first_foreign(path)}); {CONVERT}") from e
        problem = f"{path} cannot be read past {place} ({one_line(e)[:160]})"
        raise UserError(f"{problem}; correct it, or copy it again") from e


def first_foreign(path: Path) -> str:
    """Returns the place of the first byte that is not UTF-8 in a text file that has one, and what is around it."""
    number, before = 1, 0  # The line of a piece, and the characters before it. A line may be as long as the file.
    with io.TextIOWrapper(pa.input_stream(str(path)), "utf-8", "surrogateescape", newline="\n") as f:
        for piece in iter(lambda: f.readline(BLOCK), ""):
            if found := re.search("[\udc80-\udcff]", piece):
                around = piece[max(0, found.start() - 9) : found.start() + 9].encode(errors="surrogateescape")
                return f"line {number}, character {before + found.start() + 1}: {around!r}"
            number, before = (number + 1, 0) if piece.endswith("\n") else (number, before + len(piece))


def _json_lines(f: TextIO, first: str = "") -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(itertools.chain([first] * bool(first), iter(lambda: f.readline(LONGEST), "")), 1):
        if len(line) == LONGEST:
            raise ValueError(f"line {number} is too long; split the file")
        if line.strip():
            yield f"line {number}", json.loads(line)


def _json(f: TextIO) -> Iterator[tuple[str, Any]]:
    first = f.readline(LONGEST)
    if not first or first.strip()[:1] + first.strip()[-1:] == "{}":
        return _json_lines(f, first)
    value = json.loads(first + f.read(LONGEST))
    return ((f"row {i}", row) for i, row in enumerate(value if isinstance(value, list) else [value]))


def _csv(f: TextIO, separators: str = ",;\t|") -> Iterator[tuple[str, Any]]:
    csv.field_size_limit(LONGEST)
    # The header shows what separates. Excel writes semicolons in countries whose numbers have a comma.
    lines = [f.readline(LONGEST)]
    if of_excel := re.match('"?sep=(.)', lines[0], re.IGNORECASE):  # a line above the header that Excel does not show
        lines, separators = [*lines, f.readline(LONGEST)], of_excel[1]
    by = next((s for s in separators if len(next(csv.reader(lines[-1:], delimiter=s), [])) > 1), separators[0])
    rows = csv.reader(itertools.chain(lines, f), delimiter=by, strict=True)
    header, first = [next(rows, []) for _ in lines][-1], rows.line_num + 1
    for row in rows:
        if row and len(row) != len(set(header)):
            counts = f"{len(row)} field(s), and the header {len(set(header))} name(s), separated by {by!r}"
            raise ValueError(f"line {first} has {counts}; put texts with it into quotes, or save them as .txt")
        if row:  # An empty line is no row.
            yield f"line {first}", dict(zip(header, row))
        first = rows.line_num + 1


def _text(f: TextIO) -> Iterator[tuple[str, Any]]:
    blocks = iter(lambda: f.read(BLOCK) + f.readline(BLOCK), "")
    return ((f"megabyte {number}", block) for number, block in enumerate(blocks, 1))


TEXT_READERS = {"csv": _csv, "tsv": functools.partial(_csv, separators="\t"), "json": _json, "md": _text, "txt": _text}


def read_rows(path: str | os.PathLike, check: Check) -> list[Any]:
    """Returns the rows of a file. Raises UserError, which names the file and the place, for a file that cannot be read
    and for a row with a fault."""
    rows = []
    for place, row, _ in rows_of(Path(path)):
        try:
            problem = check(row)
        except (LookupError, TypeError, ValueError, AttributeError) as e:
            problem = one_line(e) if type(e) is ValueError else f"unexpected content ({one_line(repr(e))[:100]})"
        if problem:
            raise UserError(f"{path}, {place}: {problem}; correct the file, or get it again")
        rows.append(row)
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# Downloads


def within(seconds: float, work: Callable[[], T]) -> T:
    """Returns the result of work(), which runs in a thread. Raises TimeoutError after `seconds`, when the thread is
    left alone, and all exceptions of `work`."""
    with ThreadPool(1) as pool:  # Leaving it does not wait for the thread.
        try:
            return pool.apply_async(work).get(seconds)
        except multiprocessing.TimeoutError:
            raise TimeoutError(f"not finished within {seconds:g} seconds") from None


def hub_url(dataset: str = "", name: str = "README.md") -> str:
    """Returns the address of a file of a dataset on Hugging Face's hub, or without a dataset that of the hub.
    HF_ENDPOINT names another hub, as for Hugging Face's own tools."""
    hub = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    return f"{hub}/datasets/{dataset}/resolve/main/{name}" if dataset else hub


@functools.cache
def url_problem(url: str) -> str | None:
    """Returns the reason why a server does not offer a file, or None. It makes one request without a body, once in each
    process, because without a network that takes seconds."""
    if url.startswith(hub_url()) and switched_on("HF_HUB_OFFLINE"):
        return "the download fails (HF_HUB_OFFLINE is set)"
    request = urllib.request.Request(url, method="HEAD")  # noqa: S310 The addresses are http.
    try:
        within(ASK_SECONDS, lambda: urllib.request.urlopen(request, timeout=ASK_SECONDS).close())  # noqa: S310
    except Exception as e:  # Several libraries raise errors here.
        return f"the download fails ({one_line(e)[:120]})"
    return None


def download_file_with_lock(
    url: str, filename: str, postprocess_fn: Callable[[str], Any] | None = None, deadline: float = 120.0
) -> str:
    """
    Returns the path of `filename` in the base directory. If the file does not exist, it is downloaded from `url` within
    `deadline` seconds, and only once even if all ranks call this function together.

    postprocess_fn(temporary path) may raise UserError to reject the content. Raises MissingDataError if the file cannot
    be had.
    """
    path = Path(get_base_dir(), filename)
    part = path.with_name(f"{filename}.part")
    with locked(path.with_name(f"{filename}.lock")):
        if not path.exists():
            print0(f"Downloading {url} ...")
            try:
                part.write_bytes(within(deadline, lambda: urllib.request.urlopen(url, timeout=30).read()))  # noqa: S310
                if postprocess_fn is not None:
                    postprocess_fn(str(part))
                part.rename(path)
            except Exception as e:  # Several libraries raise errors here.
                problem = f"{url} cannot be downloaded ({one_line(e)[:150]})"
                raise MissingDataError(f"{problem}; put it at {path}, or check the network") from e
            finally:
                part.unlink(missing_ok=True)
    return str(path)


# ----------------------------------------------------------------------------------------------------------------------
# Published datasets


def is_here(remote: str) -> bool:
    """Returns whether a dataset of the hub, or the file of an address, was downloaded before."""
    if "://" in remote:
        return Path(base_dir_of(), remote.rpartition("/")[2]).exists()
    from datasets.config import HF_DATASETS_CACHE

    return Path(HF_DATASETS_CACHE, remote.replace("/", "___")).is_dir()


def load_rows(
    dataset: str, config: str | None, split: str, folder: str | None, check: Check, flag: str = "--eval-dir"
) -> Sequence[dict[str, Any]]:
    """
    Returns the rows of one split, shuffled, from a folder or, without one, from the hub. `flag` is the flag that names
    `folder`, for messages.

    `check` is called with every row of a file. The hub is asked for one revision, whose rows are known. Raises
    MissingDataError if there is no such file or dataset, or no network. Raises UserError for a damaged file and for a
    wrong field. Messages name the file, the place in it and the remedy.
    """
    if folder:
        rows = read_folder(folder, "/".join(filter(None, (dataset, config))), split, check, flag)
        return [rows[i] for i in np.random.default_rng(SHUFFLE_SEED).permutation(len(rows))]
    try:
        # If there is a cache, the package datasets finds out by itself that there is no network.
        if not is_here(dataset) and (problem := url_problem(hub_url(dataset))):
            raise MissingDataError(f"{hub_url(dataset)}: {problem}")
        import datasets

        how = {"split": split, "revision": REVISIONS.get(dataset)}
        return within(LOAD_SECONDS, lambda: datasets.load_dataset(dataset, config, **how)).shuffle(seed=SHUFFLE_SEED)
    except Exception as e:  # Several libraries raise errors here: not found, gated, cut connection, not in the cache.
        problem = f"cannot be loaded from the hub ({missing_package(e) or one_line(e)[:150]})"
        remedy = f"give a folder that holds it with {flag}, or check the network"
        raise MissingDataError(f"{dataset} ({config}, {split}) {problem}; {remedy}") from e


def read_folder(
    folder: str | os.PathLike, inside: str, split: str, check: Check, flag: str = "--eval-dir"
) -> list[dict[str, Any]]:
    """Returns all rows of <folder>/<inside>/<split>.*, or of its parts, in the order of the files. Raises the errors of
    load_rows."""
    place = Path(folder, inside)
    if not Path(folder).is_dir():
        raise UserError(f"{flag} {folder} is not a folder; name one that holds {Path(inside, split)}.jsonl")
    paths = [path for path in sorted(place.glob(f"{split}.*")) if kind_of(path)][:1]
    parts = sorted(place.glob(f"{split}-*-of-*.parquet"))
    if not paths and parts and parts[0].stem.rpartition("-")[2] != f"{len(parts):05d}":
        raise UserError(f"{place} has {len(parts)} of the parts of {split}; copy the missing ones")
    rows = [row for path in paths or parts for row in read_rows(path, check)]
    if not rows:
        present = ", ".join(sorted(p.name for p in place.iterdir())[:8]) if place.is_dir() else ""
        problem = f"{place / split}.jsonl is missing or has no rows ({place} has {present or 'nothing'})"
        raise MissingDataError(f"{problem}; put it there, or leave out {flag} to load it from the hub")
    return rows


# ----------------------------------------------------------------------------------------------------------------------
# What a plan looks for


@dataclass
class Source:
    """
    One part of a mixture, or another thing that a stage needs. make() loads it.

    - remote: the dataset of the hub, or the address of the file, that make() downloads. "" means that it does not.
    - remedy: what a user can do if it is missing
    - vital: the stage cannot do without it
    - task: what make() has returned
    - missing: the reason why it was left out, or cannot be had
    - is_damaged: it is here, and no stage can read it, not even with --allow-missing
    """

    name: str
    make: Callable[[], Any]
    remote: str = ""
    remedy: str = ""
    vital: bool = False
    task: Any = None
    missing: str | None = None
    is_damaged: bool = False

    def problem(self) -> str | None:
        """Returns the reason why this cannot be had, or None. What is here is loaded as the stage will load it, because
        a damaged file would end the stage after hours. For everything else one request, with a deadline, tells."""
        if self.remote and not is_here(self.remote):
            return url_problem(self.remote if "://" in self.remote else hub_url(self.remote))
        try:
            self.task = self.make()
        except (UserError, ImportError) as e:
            self.is_damaged = not isinstance(e, MissingDataError | ImportError)
            return one_line(e)
        return None


def look_for(sources: Sequence[Source]) -> list[Source]:
    """Returns those of the sources that cannot be had, with the reason in `missing`. All are looked for at once."""
    with ThreadPool(16) as pool:
        for source, problem in zip(sources, pool.map(Source.problem, sources)):
            source.missing = problem
    return [source for source in sources if source.missing]
