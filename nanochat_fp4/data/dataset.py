"""
The text of a run. It is the first of these sources that exists; ensure_data prints the choice and its reason.

1. --data-dir or DATA_DIR, a folder or a file of the user. --text-column or TEXT_COLUMN names the column or
   field of the text (default: text).
2. FineWeb-Edu shards that were downloaded before, in nanochat's folder <base dir>/base_data.
3. The embedded corpus, if it was built before.
4. FineWeb-Edu from the hub, if the hub answers within a few seconds.
5. The embedded corpus, which is built now from Python's standard library.

FineWeb-Edu's validation split is its shard 1822, whatever the number of downloaded training shards, so that losses of
runs with different amounts of text can be compared.

    python -m nanochat_fp4.data.dataset -n 240       download shards 0 to 239 and shard 1822 (resumable)
    python -m nanochat_fp4.data.dataset --embedded   build the embedded corpus
    python -m nanochat_fp4.data.dataset --ensure     choose a source as above

What a run reads of a folder or a file:

    print(survey("my_texts"))  # my_texts: 1 file(s) to train on (a.txt; 3.4 MB); 1 not read: ...
    train = open_text("train", "my_texts")     # each has name, column, rows, read(group), digest() and whole

Two or more parquet files are shards, which are read as they are, in their row groups. All other text is written once
into the base directory, where each document can be read at once. A row of a JSON, csv, tsv or parquet file is a
document, and so is each megabyte of a text file. Long documents are cut into pieces at the ends of paragraphs. Rows
of tokens use all of this text: what is longer than a row goes on in the next one.
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nanochat_fp4.cli import ArgumentParser, UserError, format_bytes, one_line, parse_finite, run_main
from nanochat_fp4.common import base_dir_of, base_dir_variable, get_base_dir, of_all_ranks, print0, say_once
from nanochat_fp4.data import sources
from nanochat_fp4.data.sources import BLOCK, CONVERT, KINDS, first_foreign, hub_url, kind_of, rows_of, url_problem
from nanochat_fp4.files import atomic_write
from nanochat_fp4.locks import locked
from nanochat_fp4.progress import Progress

STRINGS = ("string", "large_string", "string_view")  # Arrow's types of text.
ENCODED = pa.DictionaryType | pa.RunEndEncodedType  # Those whose values may be text.
NO_TEXT = ("readme", "license", "licence", "dataset_info", "dataset_dict")  # The beginnings of names, in lower case.
OTHER_KINDS, NAMED, EMPTY = "not read: of another kind", "not read: by its name", "not read: empty"
BYTES_PER_TOKEN = 4  # By and large. Of own text nothing is known before it is read.


def text_column(column: str = "") -> str:
    """Returns the name of the column with the text, which is `column`, or else TEXT_COLUMN, or else text."""
    return column or os.environ.get("TEXT_COLUMN") or "text"


# ----------------------------------------------------------------------------------------------------------------------
# What is read


def size_of(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:10], *["..."] * (len(names) > 10)])


def is_blank(path: Path) -> bool:
    """Whether a file has nothing but blanks. A file with text is read up to its first letter."""
    with undamaged(path, "cannot be read"), open(path, "rb") as f:
        return not any(block.strip() for block in iter(lambda: f.read(4096), b""))


@dataclass(frozen=True)
class Survey:
    """
    What of the user's text is read, and what not. As a str it is a sentence for a plan or a log.

    - train, val: the files of both splits. Without files for validation, a part of the training text is kept back.
    - are_shards: the files are parquet shards, which are read as they are
    - left_out: the files that are not read, by the reason
    """

    folder: Path
    train: list[Path]
    val: list[Path] = field(default_factory=list)
    are_shards: bool = False
    left_out: dict[str, list[Path]] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """All files that are read."""
        return self.train + self.val

    def __str__(self) -> str:
        groups = []
        for what, paths in ({"file(s) to train on": self.train, "for validation": self.val} | self.left_out).items():
            names = listed([path.name for path in paths])
            groups += [f"{len(paths)} {what} ({names}; {format_bytes(size_of(paths))})"] * bool(paths)
        return f"{self.folder}: {'; '.join(groups) or 'no files'}"


def survey(data_dir: "str | os.PathLike | Survey") -> Survey:
    """
    Says which files of DATA_DIR, a folder or a single file, are read. A Survey is returned as it is, so that a process
    looks at a folder once.

    Of a folder all files below it are looked at. What is named valid* or dev* is validation text, and of shards without
    such names the last one is. What is named test* is not read, and neither are hidden files, READMEs, licences, files
    of blanks alone and files of other kinds. Raises UserError if there is no training text, and if most bytes are not
    read.
    """
    if isinstance(data_dir, Survey):
        return data_dir
    folder = Path(data_dir).expanduser()
    if folder.is_file() and kind_of(folder):
        return Survey(folder, [folder])
    if not folder.is_dir():
        problem = "a file of another kind" if folder.exists() else "not there"
        expected = f"a folder of text or parquet files, or such a file ({', '.join(KINDS)})"
        raise UserError(f"DATA_DIR (--data-dir) {data_dir} is {problem}; it must be {expected}")
    found: dict[str, list[Path]] = {what: [] for what in ("train", "val", NAMED, EMPTY, OTHER_KINDS)}
    base = base_dir_of().resolve()
    own = base if folder.resolve() in base.parents else None  # A base directory in it has reports and logs.
    for path in sorted(folder.rglob("*")):
        names = [name.lower() for name in path.relative_to(folder).parts]
        hidden = any(name.startswith(".") for name in names)
        if path.is_dir() or hidden or (own and path.resolve().is_relative_to(own)):
            continue
        why = "val" if any(name.startswith(("valid", "dev")) for name in names) else "train"
        if names[-1].startswith(NO_TEXT) or any(name.startswith("test") for name in names):
            why = NAMED
        elif not kind_of(path) or not path.is_file():
            why = OTHER_KINDS
        elif kind_of(path) != "parquet" and is_blank(path):  # A parquet file without a byte is damaged.
            why = EMPTY
        found[why].append(path)
    train, val = found.pop("train"), found.pop("val")
    shards = [[path for path in paths if kind_of(path) == "parquet"] for paths in (train, val)]
    if are_shards := len(shards[0]) > (not shards[1]):
        found[OTHER_KINDS] += [path for path in train + val if kind_of(path) != "parquet"]
        train, val = shards if shards[1] else (shards[0][:-1], shards[0][-1:])
    of_folder = Survey(folder, train, val, are_shards, found)
    if not train or size_of(found[OTHER_KINDS]) > size_of(of_folder.files):
        problem = "is not read for the most part" if train else "holds no text to train on"
        remedy = f"expected {', '.join(KINDS)} files with text; convert the others, or move them away"
        raise UserError(f"DATA_DIR (--data-dir) {problem} ({of_folder}); {remedy}")
    return of_folder


def open_text(split: str, data_dir: str | os.PathLike | Survey, column: str = "") -> "Parts":
    """
    Opens and checks the text of a split, 'train' or 'val', in parts that have at least one document. Own text is stored
    first, if that has not been done or a file has changed. `column` is that of text_column.

    Raises UserError for text that cannot be used, and ValueError for another split.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    found, column = survey(data_dir), text_column(column)
    if not found.are_shards:
        return [own_text(found, column)[split]]
    shards = [Shard(path, column) for path in (found.train if split == "train" else found.val)]
    if not any(map(sum, (shard.rows for shard in shards))):
        raise UserError(f"the {split} shards in {found.folder} hold no rows; put text into them")
    return shards


# ----------------------------------------------------------------------------------------------------------------------
# Shards


@contextlib.contextmanager
def undamaged(path: str | os.PathLike, problem: str) -> Iterator[None]:
    """A context in which a file is read. An error becomes a UserError that says `problem`."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError) as e:
        raise UserError(f"{path} {problem} ({one_line(e)[:150]}); delete it and download or copy it again") from e


class Shard:
    """
    A parquet file with the text in a column of strings. `rows` has the number of documents in each row group.

    The footer is read here. Raises UserError if the file is not parquet, is cut short or has no such column.
    """

    whole = False

    def __init__(self, path: str | os.PathLike, column: str = "text"):
        self.path, self.name = str(path), os.path.basename(path)
        with undamaged(path, "is not a readable parquet file"):
            self.version = version_of(self.path)
            # The time of a footer for each row group would grow with the square of the number of row groups.
            with pq.ParquetFile(path) as f:
                schema, self.footer = f.schema_arrow, f.metadata
        self.column = sources.column_among(schema.names, column)
        types = [f.type.value_type if isinstance(f.type, ENCODED) else f.type for f in schema if f.name == self.column]
        if [str(kind) in STRINGS for kind in types] != [True]:
            has = f"not one column of strings named {column} ({', '.join(map(str, types)) or schema.names[:10]})"
            raise UserError(f"{path} has {has}; correct TEXT_COLUMN (--text-column), or rename or convert it")
        self.rows = tuple(self.footer.row_group(i).num_rows for i in range(self.footer.num_row_groups))

    def read(self, index: int) -> list[str]:
        """Returns the documents of a row group. A null becomes the empty string. Raises UserError if the data are
        damaged, or if the file has changed."""
        with undamaged(self.path, f"cannot be read in row group {index}"):
            if self.version != version_of(self.path):
                raise UserError(f"{self.path} changed while it was being read; start again")
            with pq.ParquetFile(self.path, metadata=self.footer, page_checksum_verification=True) as f:
                texts = f.read_row_group(index, columns=[self.column]).column(self.column).to_pylist()
        return [text if text is not None else "" for text in texts]

    def digest(self) -> str:
        """Returns a hash of the content, as digest_of computes it."""
        return digest_of(self.path)


def version_of(path: str | os.PathLike) -> tuple[int, ...]:
    """Returns numbers that change when the file is written again."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def digest_of(path: str | os.PathLike) -> str:
    """
    Returns 16 hex digits of a hash of a file's content, which is quick to compute. Raises UserError if the file cannot
    be read.

    A file of at most 1 MB is hashed as a whole. Of a larger file the hash has its size, 32 blocks of 4 KB at equal
    distances, and of a parquet file the footer, which includes the compressed sizes of row groups. A few changed
    letters in a large file may therefore not change the hash.
    """
    digest = hashlib.sha256()
    with undamaged(path, "cannot be read"), open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        blocks = [(0, size)]
        if size > 1 << 20:
            f.seek(size - 8)
            length, mark = int.from_bytes(f.read(4), "little") + 8, f.read(4)
            footer = min(length, size) if mark == b"PAR1" else 0
            blocks = [(size - footer, footer), *((size * i // 32, 4096) for i in range(32))]
        digest.update(size.to_bytes(8, "little"))
        for start, length in blocks:
            f.seek(start)
            digest.update(f.read(length))
    return digest.hexdigest()[:16]


# ----------------------------------------------------------------------------------------------------------------------
# Stored documents

GROUP = 256  # The number of documents that are read at a time.
MIN_GROUPS = 64  # A small text has at least so many groups, because groups are dealt to packers.


class Stored:
    """Documents of a Dataset with a column `text`, in the order of the numbers in `order`. `name` names them in
    messages, and `whole` says that rows of tokens use all of them."""

    column = "text"

    def __init__(self, dataset: Any, order: np.ndarray, name: str, whole: bool):
        self.dataset, self.order, self.name, self.whole = dataset, order, name, whole
        self.size = max(1, min(GROUP, len(order) // MIN_GROUPS))
        self.rows = tuple(min(self.size, len(order) - i) for i in range(0, len(order), self.size))

    def read(self, index: int) -> list[str]:
        """Returns the documents of a group."""
        return self.dataset[self.order[index * self.size :][: self.size].tolist()]["text"]

    def digest(self) -> str:
        """Returns 16 hex digits of a hash of the documents and their order."""
        files = "".join(digest_of(file["filename"]) for file in self.dataset.cache_files)
        return hashlib.sha256(files.encode() + self.order.tobytes()).hexdigest()[:16]


def store(key: Any, title: str, rows: Callable[[], Iterator[dict[str, Any]]], **columns: str) -> Any:
    """
    Returns a Dataset of the rows, which are {"text": str, **other columns}. It is written once for each key into the
    base directory, and mapped into memory from there.

    `title` says what is written, and `columns` the types of the other columns, in Arrow's words. Raises UserError if
    the stored files are damaged, and all exceptions of rows().
    """
    import datasets

    folder = Path(get_base_dir()) / "stored_text"

    def written() -> Iterator[dict[str, Any]]:
        for _ in Progress(rows(), desc="check", unit="document"):
            pass  # All of it, so that nothing is written of a text that is refused.
        print0(f"Writing {title} into {folder}")
        yield from Progress(rows(), desc="write", unit="document")

    datasets.disable_progress_bars()
    features = datasets.Features({n: datasets.Value(t) for n, t in ({"text": "large_string"} | columns).items()})
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    with locked(folder / "lock"):
        try:
            return datasets.Dataset.from_generator(written, features=features, cache_dir=str(folder), fingerprint=name)
        except datasets.exceptions.DatasetGenerationError as e:
            raise (e.__cause__ or e) from None
        except (pa.ArrowException, ValueError, KeyError) as e:
            problem = f"the text in {folder} is damaged ({one_line(e)[:100]})"
            raise UserError(f"{problem}; delete that folder and start again") from e


Parts = Sequence[Shard | Stored]


def in_random_order(parts: Parts, seed: int) -> Stored:
    """Returns the documents of all parts of a split in one random order, which is that of the seed on every machine.
    Documents that are not stored yet are stored, once for all seeds."""
    stored = parts[0]
    if isinstance(stored, Shard):
        key = [(shard.name, shard.column, shard.rows, shard.digest()) for shard in parts]
        texts = lambda: ({"text": t} for shard in parts for k in range(len(shard.rows)) for t in shard.read(k))  # noqa: E731
        dataset = store(key, f"a copy of {len(parts)} shards for --shuffle-documents", texts)
        stored = Stored(dataset, np.arange(len(dataset)), "shards in random order", False)
    # NumPy does not change the permutations of RandomState. The third number separates this use of a seed from others.
    order = stored.order[np.random.RandomState([seed, 0, 1]).permutation(len(stored.order))]
    return Stored(stored.dataset, order, stored.name, stored.whole)


# ----------------------------------------------------------------------------------------------------------------------
# Own text

# What is no text: bytes that are not UTF-8 (which errors="surrogateescape" makes surrogates), text in the seven bits of
# ISO-2022 and HZ, and control characters.
SPOILED = re.compile(
    "[\ud800-\udfff]+|\x1b\\$[^\x1b\n]*|\x0e[^\x0f\n]*|~\\{(?:[!-}][!-~])+~\\}|[\x00-\x08\x0b\x0e-\x1f\x7f]"
)
ODD = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f\ud800-\udfff]")  # All that begins so but HZ, found four times as fast.
FOREIGN = re.compile("[\udc80-\udcff]")  # The bytes alone.
# The largest number of characters in a piece. Of small texts pieces are smaller, so that there are some to deal.
MIN_PIECE, MAX_PIECE, PIECES = 2_000, 36_000, 256
SHORT = 12  # Texts of fewer characters, by and large, may be of a column of numbers or dates.


def cut_text(text: str, longest: int) -> list[str]:
    """Cuts a text into pieces of at most `longest` characters and the line ends or the space behind them, at the ends
    of paragraphs if possible, otherwise of lines or words. The pieces together are the text."""
    some = f".{{{longest // 2},{longest}}}"
    return re.findall(rf"(?s).{{1,{longest}}}\Z|{some}\n\n+|{some}\n+|{some} |.{{1,{longest}}}", text)


def no_column(path: Path, row: Any, column: str, others: bool) -> str:
    """What is wrong with a row without text in the column, and what to do. others: other rows have the column."""
    texts = {str(k): v for k, v in row.items() if isinstance(v, str)} if isinstance(row, dict) else {}
    names = [name[:40] + "..." * (len(name) > 40) for name in map(one_line, texts)]
    likely = max(texts, key=lambda name: len(texts[name]), default="NAME")  # that of the longest text
    likely = shlex.quote(likely) if len(likely) <= 40 else "NAME"
    remedy = f"name it, TEXT_COLUMN={likely} (--text-column={likely})"
    if others:
        remedy = f"other texts have it; rename this column to {column!r}, or {remedy}, and rename the others"
    if kind_of(path) in ("csv", "tsv"):
        header = f"add a header above it ({column}, or a name for each column), or save that column as .txt"
        remedy = f"if the first line is text, {header}; if not, {remedy}"
    return f"there is no text in a column {column!r} (with texts: {listed(names) or 'none'}); {remedy}"


def own_pieces(found: Survey, column: str, held: Counter[Path], most: float = math.inf) -> Iterator[dict[str, Any]]:
    """Yields the pieces of all documents, or of about `most` characters of each file, with the number of the document,
    which is -1 in files for validation. Without such files a number is left out at the beginning of each file but the
    first, for kept_back. `held` gets the bytes of each file's text, in proportion if it is not read to its end.

    Raises UserError at the end: for a file of each kind of problem, which is a row without the column of the text or
    what is damaged or no text, and if there is too little for both splits."""
    longest = min(max(MIN_PIECE, size_of(found.files) // PIECES), MAX_PIECE)
    # Of each file its characters, and its pieces with text; and of each kind of problem its files and messages.
    number, strange, refused, characters, filled, problems, lacking = 0, [], [], Counter(), Counter(), {}, {}
    for place_of_file, path in enumerate(found.files):
        odd, share = {FOREIGN: 0, SPOILED: 0}, 1.0
        number += place_of_file > 0 and not found.val
        try:
            for place, row, share in rows_of(path, "surrogateescape", column):
                text = row.get(sources.column_among(row, column), 0) if isinstance(row, dict) else 0
                if not isinstance(text, str | None):
                    lacking[path] = place, row
                    break
                text = text or ""
                characters[path] += len(text)
                if ODD.search(text) or "~{" in text:
                    odd = {kind: n + sum(map(len, kind.findall(text))) for kind, n in odd.items()}
                    text = re.sub("[\ud800-\udfff]", "\ufffd", text)
                held[path] += len(text.encode())
                for piece in cut_text(text, longest):
                    filled[path] += not piece.isspace()
                    yield {"text": piece, "document": number if place_of_file < len(found.train) else -1}
                number += bool(text)
                if characters[path] >= most and filled[path] and share < 1:
                    break
        except UserError as e:
            problems.setdefault(re.sub(r"\d+|\(.*", "", str(e).removeprefix(str(path))), {})[path.name] = str(e)
        held[path] /= share
        # In Latin-1 some percent of a novel in German or French are bytes that are not UTF-8, its letters with accents.
        # Logs and programs have some control characters.
        if odd[FOREIGN] > max(10, characters[path] / 1000) or odd[SPOILED] > max(100, characters[path] / 10):
            refused.append(f"{path} ({first_foreign(path) if odd[FOREIGN] else 'control characters'})")
        elif odd[SPOILED]:
            strange.append(str(path))
    how = column, any(characters[path] for path in found.files if kind_of(path) not in ("txt", "md"))
    lack = {path.name: f"{path}, {place}: {no_column(path, row, *how)}" for path, (place, row) in lacking.items()}
    said = [f"{len(refused)} file(s) are not UTF-8 text: {listed(refused)}; {CONVERT}"] * bool(refused)
    for (_, first), *others in (of.items() for of in (lack, *problems.values()) if of):
        said.append(first + f" (also: {listed([name for name, _ in others])})" * bool(others))
    if said:
        raise UserError(". ".join(said))
    blank = [str(path) for path in found.files if not filled[path]]
    train, val = (sum(filled[path] for path in paths) for paths in (found.train, found.val))
    if not train or not (val if found.val else train > 1):
        problem = f"{found.folder} holds {'too little' if train else 'no'} text for a training and a validation split"
        raise UserError(f"{problem} ({train + val} piece(s){', none of ' * bool(blank)}{listed(blank)}); add more")
    short = [str(path) for path in found.files if characters[path] < SHORT * filled[path]]
    for what, paths, remedy in (
        ("have a few bytes that are not UTF-8, which become U+FFFD, or control characters", strange, CONVERT),
        ("hold no text", blank, "add some, or remove them"),
        (f"have texts of under {SHORT} characters on average", short, f"is {column!r} the TEXT_COLUMN to train on?"),
    ):
        if paths:
            say_once(f"warning: {len(paths)} file(s) {what}: {listed(paths)}; {remedy}")


def kept_back(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Returns which pieces are validation text, bool (pieces,), and the places of their files, from the numbers of their
    documents as own_pieces yields them.

    Of a file with at least 20 documents it is every 20th. The other files are taken together: a file of more than a
    twentieth of them gives its last tenth, and if they have 20 documents in all, so does such a document; of the rest
    every 20th is taken. If that is nothing, it is their last tenth.
    """
    file = np.cumsum(np.maximum(np.diff(numbers, prepend=-1) - 1, 0))
    document = np.unique(numbers, return_inverse=True)[1]
    _, first, of_file, pieces = np.unique(file, return_index=True, return_inverse=True, return_counts=True)
    place = document - document[first][of_file]
    many = place[first + pieces - 1][of_file] >= 19
    val, few = many & (place % 20 == 7), np.flatnonzero(~many)
    unit = document[few] if len(np.unique(document[few])) >= 20 else file[few]
    _, unit, size = np.unique(unit, return_inverse=True, return_counts=True)
    to_its_end = np.cumsum(size)[unit] - np.arange(len(few))
    val[few] = np.where(20 * size[unit] > len(few), to_its_end <= size[unit] // 10, unit % 20 == 7)
    if not val[few].any():
        val[few[len(few) - max(not many.any(), len(few) // 10) :]] = True
    return val, file


def described(found: Survey, numbers: np.ndarray, sizes: np.ndarray) -> str:
    """Returns what is read of own text, and what of its pieces is kept back, from the numbers of their documents and
    their sizes in bytes. There is a warning if it is little."""
    val, file = kept_back(numbers)
    kept, files = int(sizes[val].sum()), np.unique(file[val])
    names = f" ({listed([found.train[k].name for k in files])})" * (len(files) < len(found.train))
    few = "; WARNING: so little says little of the rest; name some files valid*" * bool(kept < 0.02 * sizes.sum())
    share = f"{format_bytes(kept)}, {kept / sizes.sum():.1%} of it"
    return f"{found}; validation: {share}, from {len(files)} file(s){names}{few}"


def look_into(found: Survey) -> tuple[str, int]:
    """
    Returns what is read, with what validates of a small text, and about how many tokens there are to train on.

    Raises UserError as own_pieces does, for the beginnings of files. Of each about a megabyte is read, of shards the
    footers, and nothing is stored.
    """
    if found.are_shards:
        shards, _ = (open_text(split, found) for split in ("train", "val"))
        groups = [(s, s.footer.row_group(k)) for s in shards for k in range(len(s.rows))]
        sizes = [g.column(s.footer.schema.names.index(s.column)).total_uncompressed_size for s, g in groups]
        return str(found), sum(sizes) // BYTES_PER_TOKEN
    held: Counter[Path] = Counter()
    of_all = own_pieces(found, text_column(), held, BLOCK)
    numbers, sizes = np.array([(piece["document"], len(piece["text"].encode())) for piece in of_all]).T
    whole = sum(held.values()) == sizes.sum()
    said = described(found, numbers, sizes) if whole and not found.val else str(found)
    return said, int(sum(held[path] for path in found.train)) // BYTES_PER_TOKEN


def own_text(found: Survey, column: str) -> dict[str, Stored]:
    """
    Returns the training and the validation text of files that are no shards. Without files for validation, it is what
    kept_back says. Raises UserError as own_pieces does.
    """
    files = [(str(path.relative_to(found.folder)), *version_of(path)[1:], path in found.val) for path in found.files]
    rows, title = lambda: own_pieces(found, column, Counter()), f"the text of {found.folder}"
    dataset = store(["own text 4", column, files], title, rows, document="int32")
    document = dataset.data.column("document").to_numpy()
    val = document < 0 if found.val else kept_back(document)[0]
    order = np.random.RandomState(0).permutation(len(document))
    places = {"train": order[~val[order]], "val": order[val[order]]}
    return {split: Stored(dataset, places[split], found.folder.name, True) for split in places}


# ----------------------------------------------------------------------------------------------------------------------
# The text of a run


def validation_text(data_dir: str | os.PathLike | Survey, column: str = "") -> str:
    """Returns a name of the validation text of a folder. Two runs have the same name only if they validate on the
    same text."""
    column = text_column(column)
    return " ".join([part.digest() for part in open_text("val", data_dir, column)] + [column] * (column != "text"))


def parquets_iter_batched(
    split: str, start: int = 0, step: int = 1, data_dir: str | os.PathLike | Survey | None = None, column: str = ""
) -> Iterator[list[str]]:
    """
    Yields the row groups of a split ('train' or 'val') once, each as a list of documents. Own text has groups, too.

    `start` and `step` deal the row groups of each shard to ranks, for example with start=rank and step=world_size.
    """
    for part in open_text(split, data_dir or ensure_data(), column):
        yield from map(part.read, range(start, len(part.rows), step))


def count_tokens(parts: Parts, tokenizer: Any) -> int | None:
    """Returns about how many tokens the split of own text has, which is counted in a sample of it. Returns None for
    parquet shards."""
    if isinstance(own := parts[0], Shard):
        return None
    sample = [text for k in range(0, len(own.rows), -(-len(own.rows) // 8)) for text in own.read(k)]
    return len(own.order) * sum(map(len, tokenizer.encode(sample))) // len(sample)


# ----------------------------------------------------------------------------------------------------------------------
# The embedded corpus: the language reference and the sources of Python's standard library

EMBEDDED_MB = 10.0  # This is the size of the standard library without its tests.

# Encodings are left out, because they are tables of numbers. The language reference in pydoc_data is read as text
# instead.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib-dynload"}


def spread(key: str) -> int:
    """Returns a hash of the key. It sorts keys in an order that is not alphabetical, the same one on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")


def embedded_documents() -> Iterator[str]:
    """Yields the language reference, all sources, and the library's tests, in this order."""
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics, key=spread))
    root = Path(sysconfig.get_paths()["stdlib"])
    keys = [path.relative_to(root).as_posix() for path in root.rglob("*.py")]
    keys = [key for key in keys if not SKIPPED & set(key.split("/"))]
    for key in sorted(keys, key=lambda key: (bool({"test", "tests", "idle_test"} & set(key.split("/"))), spread(key))):
        with contextlib.suppress(OSError, ValueError):  # A few sources are broken on purpose.
            yield (root / key).read_text(encoding="utf-8")


def data_lock() -> contextlib.AbstractContextManager[None]:
    """Returns the lock to have while data are made or downloaded, so that the ranks of a node, or two runs, do not
    do so twice."""
    return locked(Path(get_base_dir(), "data.lock"))


def build_embedded_corpus(size_mb: float = EMBEDDED_MB) -> str:
    """
    Builds the embedded corpus of about `size_mb` million characters if it does not exist. Returns its file, of JSON
    lines. A corpus of another size stays where it is.

    The same size on the same version of Python gives the same documents in the same order. Raises UserError if the size
    is not from 0.2 to 100, and if Python has no library sources.
    """
    if not 0.2 <= size_mb <= 100:
        raise UserError(f"--size-mb {size_mb:g}: the embedded corpus can have 0.2 to 100 MB")
    path = Path(get_base_dir(), "embedded_data", f"{size_mb:g}_mb_of_python_{platform.python_version()}.jsonl")
    with data_lock():
        if path.exists():
            return str(path)
        print0(f"Building the embedded corpus from Python's standard library: {path}")
        lines, total = [], 0
        for text in embedded_documents():
            lines.append(json.dumps({"text": text}) + "\n")
            total += len(text)
            if total >= size_mb * 1e6:
                break
        if total < 200_000:
            raise UserError("this Python has no library sources; set DATA_DIR to a folder of text")
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, "".join(lines))
    return str(path)


# ----------------------------------------------------------------------------------------------------------------------
# The choice

# This is FineWeb-Edu 100B, which nanochat's author shuffled and cut into parquet shards.
DATASET = "karpathy/fineweb-edu-100b-shuffle"
MAX_SHARD = 1822  # This is the last shard. Its name sorts last, so it is the validation split.
SHARD_BYTES = 100_000_000  # An estimate of the size of a shard.

NO_NETWORK_HINT = "set DATA_DIR to a folder of text, or say --embedded in place of -n"


def index_to_filename(index: int) -> str:
    """Returns the name of a shard's file."""
    return f"shard_{index:05d}.parquet"


def download_shards(num_files: int = -1, num_workers: int = 4, deadline: float = 1800.0) -> str:
    """
    Downloads the training shards 0 to num_files - 1 (-1: all 1822) and the validation shard into <base dir>/base_data.
    Returns this folder.

    `num_workers` shards are downloaded at a time. Existing shards are kept, and a download that was cut goes on where
    it was. The needed space is printed, and compared with the free space, first. `deadline` is for each shard, in
    seconds. Raises UserError if a download fails, and complete shards stay.
    """
    if num_files < -1 or num_files == 0 or num_workers < 1:
        raise UserError(f"-n {num_files} -w {num_workers}: expected 1 to {MAX_SHARD} files, or -1; 1 worker")
    folder = Path(get_base_dir()) / "base_data"
    names = list(map(index_to_filename, [MAX_SHARD, *range(num_files if num_files > 0 else MAX_SHARD)[:MAX_SHARD]]))
    with data_lock():
        names = [name for name in names if not (folder / name).exists()]
        if not names:
            return str(folder)
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = len(names) * SHARD_BYTES, shutil.disk_usage(folder).free
        sizes = f"{len(names)} shards (about {format_bytes(needed)}; {format_bytes(free)} free) into {folder}"
        print0(f"Downloading {sizes}")
        if needed > free:
            raise UserError(f"cannot download {sizes}; free some, ask for less, or choose a larger NANOCHAT_BASE_DIR")
        if problem := url_problem(hub_url(DATASET, names[0])):
            raise UserError(f"{hub_url(DATASET, names[0])}: {problem}; {NO_NETWORK_HINT}")
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        how = {"repo_type": "dataset", "local_dir": folder, "endpoint": hub_url()}
        # Leaving the pool neither starts further downloads nor waits for those that run.
        with ThreadPool(num_workers) as pool, Progress(total=len(names), desc="download", unit="shard") as progress:
            for name, job in [(name, pool.apply_async(hf_hub_download, (DATASET, name), how)) for name in names]:
                try:
                    job.get(deadline)
                except Exception as e:  # Several libraries raise errors here. That of the deadline has no text.
                    problem = one_line(str(e.__cause__ or e))[:200] or f"not finished within {deadline:g} seconds"
                    raise UserError(f"could not download {hub_url(DATASET, name)}: {problem}; {NO_NETWORK_HINT}") from e
                progress.update(1)
    return str(folder)


def found_data() -> str | None:
    """Returns the text in the base directory: the folder of FineWeb-Edu shards, or else the file of the embedded corpus
    that was built last, or None."""
    downloaded, corpora = (base_dir_of() / name for name in ("base_data", "embedded_data"))
    if len(list(downloaded.glob("*.parquet"))) >= 2:
        return str(downloaded)
    return max(map(str, corpora.glob("*_mb_of_python_*.jsonl")), key=os.path.getmtime, default=None)


def ensure_data(data_dir: str | None = None, *, column: str = "", num_shards: int = 8) -> Survey:
    """
    Returns what is read of the folder or file of text to train on, which the functions of this module take. It is
    chosen as the docstring of this module says, and made or downloaded if necessary. Text of the user's is looked at,
    and stored if need be.

    - data_dir: the value of --data-dir. None or "" means DATA_DIR.
    - column: the value of --text-column, which every reader of the folder needs, too. "" means TEXT_COLUMN.
    - num_shards: the number of training shards to download from the hub

    All ranks must call this function together. The first of them chooses. Raises UserError if DATA_DIR cannot be used,
    and if the ranks have different text.
    """
    folder, what = data_dir or os.environ.get("DATA_DIR"), "as asked for"
    if data_dir and Path(data_dir).parent.name == "embedded_data":
        what = "the embedded corpus"
    if not folder and text_column(column) != "text":
        raise UserError("TEXT_COLUMN (--text-column) is for text of your own; add DATA_DIR (--data-dir)")
    if not folder:
        with data_lock():  # What another program downloads now counts as a whole.
            folder = found_data()
        folder, what = of_all_ranks(folder)[0], "FineWeb-Edu"
        if not folder:
            try:
                folder = download_shards(max(1, num_shards))
            except UserError as e:
                what = f"the embedded corpus; {one_line(e).removesuffix(f'; {NO_NETWORK_HINT}')}"
                folder = build_embedded_corpus()
        elif Path(folder).suffix:
            variable = base_dir_variable(base_dir_of())
            what = f"the embedded corpus; for FineWeb-Edu: {variable}python -m nanochat_fp4.data.dataset -n 8"
    found = survey(folder)
    if len(texts := set(of_all_ranks(str(found)))) > 1:
        raise UserError(f"the processes have different text ({' | '.join(sorted(texts))}); give all nodes the same")
    for split in ("train", "val"):  # A damaged file must not be found hours into a run.
        parts = open_text(split, found, column)
    said = str(found)
    if not found.val:
        stored = parts[0].dataset.data
        said = described(found, stored["document"].to_numpy(), pc.binary_length(stored["text"]).to_numpy())
    say_once(f"Data ({what}): {said}")
    return found


def add_data_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --data-dir and --text-column, for ensure_data. `default` says where text comes from without them, for
    --help."""
    add = parser.add_argument
    add("--data-dir", default="", help=f"folder of parquet shards or text (default: $DATA_DIR, else {default})")
    add("--text-column", default="", help="its column, or JSON field, with the text (default: $TEXT_COLUMN, else text)")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Download, build or check the training text")
    add = parser.add_argument
    add("-n", "--num-files", type=int, default=None, help="number of training shards to download (-1 = all 1822)")
    add("-w", "--num-workers", type=int, default=4, help="parallel downloads (default: 4)")
    add("--deadline", type=parse_finite, default=1800, help="seconds after which a shard's download gives up")
    add_data_arguments(parser, "as the other flags say")
    add("--embedded", action="store_true", help="build the embedded corpus instead")
    add("--size-mb", type=parse_finite, default=EMBEDDED_MB, help=f"its size (default: {EMBEDDED_MB:g})")
    add("--ensure", action="store_true", help="DATA_DIR, downloaded shards, the hub or the embedded corpus")
    args = parser.parse_args(argv)
    folder, count = args.data_dir, MAX_SHARD if args.num_files in (None, -1) else args.num_files
    if not folder and args.embedded:
        folder = build_embedded_corpus(args.size_mb)
    elif not folder and not args.ensure and (args.num_files is not None or not os.environ.get("DATA_DIR")):
        folder = download_shards(count, args.num_workers, args.deadline)
    ensure_data(folder, column=args.text_column, num_shards=count)


if __name__ == "__main__":
    run_main(main)
