"""
The documents of a folder or a file of text.

    print(survey("my_texts"))                  # 12 files, 3.4 MB; 2 not read: of another kind (a.pdf, b.docx; 1.2 MB)
    train = open_text("train", "my_texts")     # each has name, column, rows, read(group), digest() and whole

Two or more parquet files are shards, which are read as they are, in their row groups. All other text is written once
into the base directory, where each document can be read at once. A row of a JSON, csv or parquet file is a document,
and so is each megabyte of a text file. Long documents are cut into pieces at the ends of paragraphs. Rows of tokens use
all of this text: what is longer than a row goes on in the next one.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_fp4.cli import UserError, format_bytes, one_line
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.data.sources import KINDS, kind_of, rows_of
from nanochat_fp4.progress import Progress

STRINGS = ("string", "large_string", "string_view")  # Arrow's types of text.
NO_TEXT = ("readme", "license", "licence", "dataset_info", "dataset_dict")  # The beginnings of names, in lower case.
OTHER_KINDS, BESIDE_SHARDS, NAMED = (f"not read: {why}" for why in ("of another kind", "beside shards", "by its name"))
BYTES_PER_TOKEN = 4  # By and large. Of own text nothing is known before it is read.


def text_column(column: str = "") -> str:
    """Returns the name of the column with the text, which is `column`, or else TEXT_COLUMN, or else text."""
    return column or os.environ.get("TEXT_COLUMN") or "text"


# ----------------------------------------------------------------------------------------------------------------------
# What is read


def size_of(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


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

    @property
    def tokens(self) -> int | None:
        """About how many tokens the text has. None if that is not known without reading it."""
        plain = all(path.suffix.lower()[1:] in KINDS and kind_of(path) != "parquet" for path in self.files)
        return size_of(self.files) // BYTES_PER_TOKEN if plain else None

    def __str__(self) -> str:
        text = f"{len(self.files)} file{'s' * (len(self.files) != 1)}, {format_bytes(size_of(self.files))}"
        for what, paths in ({"for validation": self.val} | self.left_out).items():
            names = ", ".join([path.name for path in paths[:3]] + ["..."] * (len(paths) > 3))
            text += f"; {len(paths)} {what} ({names}; {format_bytes(size_of(paths))})" if paths else ""
        return text


def survey(data_dir: str | os.PathLike) -> Survey:
    """
    Says which files of DATA_DIR, a folder or a single file, are read. Nothing is opened.

    Of a folder all files below it are looked at. What is named valid* or dev* is validation text, and of shards without
    such names the last one is. What is named test* is not read, and neither are hidden files, READMEs, licences and
    files of other kinds. Raises UserError if there is no training text, and if most bytes are not read.
    """
    folder = Path(data_dir).expanduser()
    if folder.is_file() and kind_of(folder):
        return Survey(folder, [folder])
    if not folder.is_dir():
        problem = "a file of another kind" if folder.exists() else "not there"
        expected = f"a folder of text or parquet files, or such a file ({', '.join(KINDS)})"
        raise UserError(f"DATA_DIR (--data-dir) {data_dir} is {problem}; it must be {expected}")
    found: dict[str, list[Path]] = {what: [] for what in ("train", "val", NAMED, OTHER_KINDS, BESIDE_SHARDS)}
    base = Path(get_base_dir()).resolve()
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
        found[why].append(path)
    train, val = found.pop("train"), found.pop("val")
    shards = [[path for path in paths if kind_of(path) == "parquet"] for paths in (train, val)]
    if are_shards := len(shards[0]) > (not shards[1]):
        found[BESIDE_SHARDS] = [path for path in train + val if kind_of(path) != "parquet"]
        train, val = shards if shards[1] else (shards[0][:-1], shards[0][-1:])
    of_folder = Survey(folder, train, val, are_shards, found)
    if not train or size_of(found[OTHER_KINDS] + found[BESIDE_SHARDS]) > size_of(of_folder.files):
        problem = "is not read for the most part" if train else "holds no data to train on"
        remedy = f"expected {', '.join(KINDS)} files; convert the others, or move them away"
        raise UserError(f"DATA_DIR (--data-dir) {data_dir} {problem} ({of_folder}); {remedy}")
    return of_folder


def open_text(split: str, data_dir: str | os.PathLike, column: str = "") -> "Parts":
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


class Shard:
    """
    A parquet file with the text in a column of strings. `rows` has the number of documents in each row group.

    The footer is read here. Raises UserError if the file is not parquet, is cut short or has no such column.
    """

    whole = False

    def __init__(self, path: str | os.PathLike, column: str = "text"):
        self.path, self.name, self.column = str(path), os.path.basename(path), column
        try:
            self.version = version_of(self.path)
            # The time of a footer for each row group would grow with the square of the number of row groups.
            with pq.ParquetFile(path) as f:
                schema, self.footer = f.schema_arrow, f.metadata
        except (pa.ArrowException, OSError, ValueError) as e:
            problem = f"is not a readable parquet file ({one_line(e)[:150]})"
            raise UserError(f"{path} {problem}; delete it and download or copy it again") from e
        types = [schema.field(i).type for i, name in enumerate(schema.names) if name == column]
        types = [
            kind.value_type if hasattr(kind, "ordered") or hasattr(kind, "run_end_type") else kind for kind in types
        ]
        if [str(kind) in STRINGS for kind in types] != [True]:
            has = f"not one column of strings named {column} ({', '.join(map(str, types)) or schema.names[:10]})"
            raise UserError(f"{path} has {has}; correct --text-column (TEXT_COLUMN), or convert the column")
        self.rows = tuple(self.footer.row_group(i).num_rows for i in range(self.footer.num_row_groups))

    def read(self, index: int) -> list[str]:
        """Returns the documents of a row group. A null becomes the empty string. Raises UserError if the data are
        damaged, or if the file has changed."""
        try:
            if self.version != version_of(self.path):
                raise UserError(f"{self.path} changed while it was being read; start again")
            with pq.ParquetFile(self.path, metadata=self.footer, page_checksum_verification=True) as f:
                texts = f.read_row_group(index, columns=[self.column]).column(self.column).to_pylist()
        except (pa.ArrowException, OSError, ValueError, KeyError) as e:
            problem = f"row group {index} cannot be read ({one_line(e)[:150]})"
            raise UserError(f"{self.path}: {problem}; delete it and download or copy it again") from e
        return [text if text is not None else "" for text in texts]

    def digest(self) -> str:
        """Returns a hash of the content, as digest_of computes it."""
        return digest_of(self.path)


def version_of(path: str) -> tuple[int, ...]:
    """Returns numbers that change when the file is written again."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


DIGEST_BLOCKS, DIGEST_BLOCK = 32, 4096


def digest_of(path: str | os.PathLike) -> str:
    """
    Returns 16 hex digits of a hash of a file's content, which is quick to compute. Raises UserError if the file cannot
    be read.

    A file of at most 1 MB is hashed as a whole. Of a larger file the hash has its size, 32 blocks of 4 KB at equal
    distances, and of a parquet file the footer, which includes the compressed sizes of row groups. A few changed
    letters in a large file may therefore not change the hash.
    """
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            blocks = [(0, size)]
            if size > 1 << 20:
                f.seek(size - 8)
                length, mark = int.from_bytes(f.read(4), "little") + 8, f.read(4)
                footer = min(length, size) if mark == b"PAR1" else 0
                blocks = [(size * i // DIGEST_BLOCKS, DIGEST_BLOCK) for i in range(DIGEST_BLOCKS)]
                blocks = [(size - footer, footer), *blocks]
            digest.update(size.to_bytes(8, "little"))
            for start, length in blocks:
                f.seek(start)
                digest.update(f.read(length))
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); check its permissions, or copy it again") from e
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
        print0(f"Writing {title} into {folder}")
        yield from Progress(rows(), desc="write", unit="document")

    datasets.disable_progress_bars()
    features = datasets.Features({n: datasets.Value(t) for n, t in ({"text": "large_string"} | columns).items()})
    name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
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
SURROGATE = re.compile("[\ud800-\udfff]")
# A file is refused if more than this share of it, and more than so many characters, are no text. Western text in
# Latin-1 has a few percent of such bytes, and random bytes have half.
NOT_TEXT, NOT_TEXT_CHARACTERS = 0.1, 100
# The largest number of characters in a piece. Of small texts pieces are smaller, so that there are some to deal.
MIN_PIECE, MAX_PIECE, PIECES = 2_000, 36_000, 256


def cut_text(text: str, longest: int) -> list[str]:
    """Cuts a text into pieces of at most `longest` characters and the line ends or the space behind them, at the ends
    of paragraphs if possible, otherwise of lines or words. The pieces together are the text."""
    some = f".{{{longest // 2},{longest}}}"
    return re.findall(rf"(?s).{{1,{longest}}}\Z|{some}\n\n+|{some}\n+|{some} |.{{1,{longest}}}", text)


def own_pieces(found: Survey, column: str) -> Iterator[dict[str, Any]]:
    """Yields the pieces of all documents, with the number of the document, which is -1 in files for validation. Raises
    UserError for a file that is no text."""
    longest = min(max(MIN_PIECE, size_of(found.files) // PIECES), MAX_PIECE)
    number, warnings = 0, []
    for path in found.files:
        spoiled = characters = 0
        for place, row in rows_of(path, "surrogateescape", column):
            text = row.get(column, 0) if isinstance(row, dict) else 0
            if not isinstance(text, str | None):
                remedy = f"name what holds the text by --text-column (TEXT_COLUMN), which is {column}"
                raise UserError(f"{path}, {place}: expected a row with a text; {remedy}")
            text = text or ""
            spoiled, characters = spoiled + sum(map(len, SPOILED.findall(text))), characters + len(text)
            for piece in cut_text(SURROGATE.sub("\ufffd", text), longest):
                yield {"text": piece, "document": number if path in found.train else -1}
            number += bool(text)
        share = spoiled / max(1, characters)
        if share > NOT_TEXT and spoiled > NOT_TEXT_CHARACTERS:
            problem = f"{path} is not UTF-8 text: {share:.0%} of it are other bytes or control characters"
            raise UserError(f"{problem}; convert it (iconv -f ENCODING -t UTF-8), or remove it")
        if spoiled:
            warnings.append(f"{path} ({100 * share:.2g}%)")
    if warnings:
        names = ", ".join(warnings[:4] + ["..."] * (len(warnings) > 4))
        print0(f"warning: {len(warnings)} file(s) have bytes that are not UTF-8, which become U+FFFD, or control "
               f"characters: {names}; convert them (iconv -f ENCODING -t UTF-8)")  # fmt: skip


def own_text(found: Survey, column: str) -> dict[str, Stored]:
    """
    Returns the training and the validation text of files that are no shards.

    Without files for validation, every 20th document is validation text, and with fewer than 20 documents the last
    tenth of the text. Raises UserError for a file that cannot be read or is no text, and if there is too little text.
    """
    files = [
        (str(path.relative_to(found.folder)), *version_of(str(path))[1:], path in found.val) for path in found.files
    ]
    title = f"the text of {found.folder} ({found})"
    dataset = store(["own text 1", column, files], title, lambda: own_pieces(found, column), document="int32")
    document = dataset.data.column("document").to_numpy()
    val = document < 0
    if not val.any():
        last = np.arange(len(document)) >= len(document) - max(1, len(document) // 10)
        val = document % 20 == 7 if document.max(initial=-1) >= 19 else last
    order = np.random.RandomState(0).permutation(len(document))
    splits = {"train": order[~val[order]], "val": order[val[order]]}
    if not all(map(len, splits.values())):
        problem = f"{found.folder} holds too little text for a training and a validation split"
        raise UserError(f"{problem} ({len(document)} pieces); add more")
    return {split: Stored(dataset, places, found.folder.name, True) for split, places in splits.items()}
