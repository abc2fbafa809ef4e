"""
Documents that are read in groups: shards, which are parquet files with a string column, and documents that were stored
once in the base directory, where each can be read at once. A loader reads both in the same way: name, column, rows (the
number of documents in each group), read(group), digest() and whole.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from nanochat_fp4.cli import UserError, format_bytes, one_line
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.data.download import check_space
from nanochat_fp4.progress import Progress


def index_to_filename(index: int) -> str:
    """Returns the name of a shard's file."""
    return f"shard_{index:05d}.parquet"


def text_column(column: str = "") -> str:
    """Returns the name of the column with the text, which is `column`, or else TEXT_COLUMN, or else text."""
    return column or os.environ.get("TEXT_COLUMN") or "text"


@dataclass(frozen=True)
class Shard:
    """A parquet file that was opened and has a string column with the text. `rows` has the number of documents in
    each row group."""

    path: str
    rows: tuple[int, ...]
    column: str = "text"
    # The footer, and the version of the file that it was read from. If the footer were read again for each row group,
    # the time would grow with the square of the number of row groups.
    footer: Any = field(default=None, repr=False, compare=False)
    version: tuple[int, ...] = ()
    whole = False  # Rows crop its documents.

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def num_rows(self) -> int:
        return sum(self.rows)

    def read(self, index: int) -> list[str]:
        """Returns the documents of a row group. A null becomes the empty string. Raises UserError if the data are
        damaged, or if the file has changed."""
        try:
            if self.version != _version(self.path):
                raise UserError(f"{self.path} changed while it was being read; start again")
            with pq.ParquetFile(self.path, metadata=self.footer, page_checksum_verification=True) as f:
                texts = f.read_row_group(index, columns=[self.column]).column(self.column).to_pylist()
        except (pa.ArrowException, OSError, ValueError, KeyError) as e:
            problem = f"row group {index} cannot be read ({one_line(e)[:150]})"
            raise UserError(f"{self.path}: {problem}; delete it and download or copy it again") from e
        if len(texts) != self.rows[index]:
            raise UserError(f"{self.path} changed while it was being read; start again")
        return [text if text is not None else "" for text in texts]

    def digest(self) -> str:
        """Returns a hash of the content, as digest_of computes it."""
        return digest_of(self.path)


def open_shard(path: str | os.PathLike, column: str = "") -> Shard:
    """
    Reads the footer of a shard. Raises UserError if the file is not parquet, is cut short or has no text column.

    `column` is that of text_column. A shard without this column is read from its column `text`, which this project
    writes.
    """
    path, column = str(path), text_column(column)
    try:
        version = _version(path)
        with pq.ParquetFile(path) as f:
            schema, footer = f.schema_arrow, f.metadata
            rows = tuple(footer.row_group(i).num_rows for i in range(footer.num_row_groups))
    except (pa.ArrowException, OSError, ValueError) as e:
        problem = f"is not a readable parquet file ({one_line(e)[:150]})"
        raise UserError(f"{path} {problem}; delete it and download or copy it again") from e
    name = column if column in schema.names else "text"
    if name not in schema.names:
        has = ", ".join(schema.names[:10]) or "none"
        raise UserError(f"{path} has no column named {column} (it has: {has}); correct --text-column (TEXT_COLUMN)")
    if (count := schema.names.count(name)) > 1:
        raise UserError(f"{path} has {count} columns named {name}; write it again with one")
    if not _is_text(text_type := schema.field(name).type):
        raise UserError(f"{path}: the column {name} holds {text_type}, not strings; convert it")
    return Shard(path, rows, name, footer, version)


def _version(path: str) -> tuple[int, ...]:
    """Returns numbers that change when the file is written again."""
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _is_text(kind: pa.DataType) -> bool:
    """Returns whether values of this Arrow type are read as str. These are strings of any layout, encoded by a
    dictionary or not."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_text(kind.storage_type)
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


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
            digest.update(size.to_bytes(8, "little"))
            if size <= 1 << 20:
                digest.update(f.read())
            else:
                f.seek(size - 8)
                length, mark = int.from_bytes(f.read(4), "little") + 8, f.read(4)
                footer = min(length, size) if mark == b"PAR1" else 0
                blocks = [(size * i // DIGEST_BLOCKS, DIGEST_BLOCK) for i in range(DIGEST_BLOCKS)]
                for start, length in [(size - footer, footer), *blocks]:
                    f.seek(start)
                    digest.update(f.read(length))
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); check its permissions, or copy it again") from e
    return digest.hexdigest()[:16]


# ----------------------------------------------------------------------------------------------------------------------
# Stored documents

GROUP = 256  # The number of documents that are read at a time.
MIN_GROUPS = 64  # A small text has at least so many groups, because groups are dealt to packers.
TEXT_PER_BYTE = 4  # The bytes of text in a byte of a compressed file, for estimates of disk space.


class Stored:
    """Documents of a Dataset with a column `text`, in the order of the numbers in `order`. `name` names them in
    messages, and `whole` says that rows use all of each document (see dataloader.Packer)."""

    column = "text"

    def __init__(self, dataset: Any, order: np.ndarray, name: str, whole: bool):
        self.dataset, self.order, self.name, self.whole = dataset, order, name, whole
        size = max(1, min(GROUP, len(order) // MIN_GROUPS))
        self.groups = [order[i : i + size] for i in range(0, len(order), size)]
        self.rows, self.num_rows = tuple(map(len, self.groups)), len(order)

    def read(self, index: int) -> list[str]:
        """Returns the documents of a group."""
        return self.dataset[self.groups[index].tolist()]["text"]

    def digest(self) -> str:
        """Returns 16 hex digits of a hash of the documents and their order."""
        files = "".join(digest_of(file["filename"]) for file in self.dataset.cache_files)
        return hashlib.sha256(files.encode() + self.order.tobytes()).hexdigest()[:16]


def store(key: str, title: str, size: int, rows: Callable[[], Iterator[dict[str, Any]]], **columns: str) -> Any:
    """
    Returns a Dataset of the rows, which are {"text": str, **other columns}. It is written once for each key into the
    base directory, and mapped into memory from there.

    `title` says what is written, `size` how many bytes it may take, and `columns` the types of the other columns, in
    Arrow's words. Raises UserError if the disk is full or the stored files are damaged, and all exceptions of rows().
    """
    import datasets

    folder = Path(get_base_dir()) / "stored_text"

    def written() -> Iterator[dict[str, Any]]:
        print0(f"Writing {title} (about {format_bytes(size)}) into {folder}")
        check_space(folder, size, title)
        yield from Progress(rows(), desc="write", unit="document")

    datasets.disable_progress_bars()
    features = datasets.Features({n: datasets.Value(t) for n, t in ({"text": "large_string"} | columns).items()})
    try:
        return datasets.Dataset.from_generator(written, features=features, cache_dir=str(folder), fingerprint=key)
    except datasets.exceptions.DatasetGenerationError as e:
        raise (e.__cause__ or e) from None
    except (pa.ArrowException, ValueError, KeyError) as e:
        problem = f"the text in {folder} is damaged ({one_line(e)[:100]})"
        raise UserError(f"{problem}; delete that folder and start again") from e


def in_random_order(shards: Sequence[Shard | Stored], seed: int) -> Stored:
    """Returns the documents of all shards in one random order, which is that of the seed on every machine. Documents
    that are not stored yet are stored, once for all seeds."""
    first = shards[0]
    if isinstance(first, Stored):
        dataset, order, name = first.dataset, first.order, first.name
    else:
        names = "\n".join(f"{shard.name} {shard.column} {shard.rows} {shard.digest()}" for shard in shards)
        name, count = hashlib.sha256(names.encode()).hexdigest()[:16], sum(shard.num_rows for shard in shards)
        size = TEXT_PER_BYTE * sum(os.path.getsize(shard.path) for shard in shards)
        texts = lambda: ({"text": t} for s in shards for k in range(len(s.rows)) for t in s.read(k))  # noqa: E731
        title = f"a copy of {len(shards)} shards for --shuffle-documents"
        dataset, order = store(name, title, size, texts), np.arange(count)
    # NumPy does not change the permutations of RandomState. The third number separates this use of a seed from others.
    order = order[np.random.RandomState([seed, 0, 1]).permutation(len(order))]
    return Stored(dataset, order, name, first.whole)


# ----------------------------------------------------------------------------------------------------------------------
# Writing

SHARD_CHARS = 100_000_000  # The number of characters in a shard.
VAL_CHARS = 25_000_000  # The largest number of characters of validation text.
ROW_GROUP = 1024  # The largest number of documents in a row group.
MIN_ROW_GROUPS = 8  # A shard has several row groups, because they are dealt to lanes.


def cut_text(text: str, rng: random.Random, shortest: int = 1600, longest: int = 5200) -> list[str]:
    """
    Cuts a long document into pieces of at most `longest` characters, at the ends of paragraphs if possible.

    The best-fit loader crops documents to a row, so most of a book in one piece would be lost. The length limit of each
    piece is drawn between the two bounds, because pieces of many lengths pack better than equal ones. White space at
    the cuts is lost, and pieces that are only white space are dropped.
    """
    pieces = []
    start, end = 0, len(text)
    while start < end:
        limit = rng.randint(shortest, longest)
        cut = end
        if end - start > limit:
            cuts = (text.rfind(sep, start + limit // 2, start + limit) for sep in ("\n\n", "\n", " "))
            cut = next((i for i in cuts if i > start), start + limit)
        piece = text[start:cut].strip("\n")
        if piece.strip():
            pieces.append(piece)
        start = cut
        while start < end and text[start] == "\n":
            start += 1
    return pieces


class ShardWriter:
    """Collects pieces of text and writes them as shard_00000.parquet, shard_00001.parquet, ... The validation shard
    is the last one."""

    def __init__(self, folder: Path, shard_chars: int = SHARD_CHARS):
        self.folder, self.shard_chars = folder, shard_chars
        self.train: list[str] = []
        self.val: list[str] = []
        self.buffered = self.val_chars = self.total_chars = self.num_shards = self.num_pieces = 0

    def add(self, piece: str, val: bool = False) -> None:
        """Adds a piece of text to the training text, or with `val` to the validation text if that is not full."""
        self.total_chars += len(piece)
        self.num_pieces += 1
        if val and self.val_chars < VAL_CHARS:
            self.val.append(piece)
            self.val_chars += len(piece)
            return
        self.train.append(piece)
        self.buffered += len(piece)
        if self.buffered >= self.shard_chars:
            self._write(self.train)
            self.train, self.buffered = [], 0

    def _write(self, pieces: list[str]) -> None:
        # The pieces are shuffled, so that neighbouring rows of a batch do not come from one document. Each shard has
        # its own seed.
        random.Random(self.num_shards).shuffle(pieces)
        pq.write_table(
            pa.table({"text": pa.array(pieces, pa.string())}),
            self.folder / index_to_filename(self.num_shards),
            row_group_size=min(ROW_GROUP, max(1, len(pieces) // MIN_ROW_GROUPS)),
            compression="zstd",
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )
        self.num_shards += 1

    def finish(self, info: dict) -> None:
        """Writes the remaining pieces, and then the manifest. Raises UserError if there is not enough text for both
        splits."""
        if not self.val and len(self.train) > 1:
            self.val.append(self.train.pop())
        if self.train:
            self._write(self.train)
        if not self.val or self.num_shards == 0:
            problem = f"too little text ({self.total_chars:,} characters)"
            raise UserError(f"{info['source']} holds {problem} for a training and a validation split; add more")
        self._write(self.val)
        info |= {"characters": self.total_chars, "documents": self.num_pieces, "shards": self.num_shards}
        (self.folder / "manifest.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder that becomes `path` when the block ends, so that a folder of that name is always
    complete."""
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # A killed process may have left it. The caller has the lock.
    tmp.mkdir(parents=True)
    try:
        yield tmp
        shutil.rmtree(path, ignore_errors=True)
        tmp.rename(path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def read_manifest(folder: Path) -> dict:
    """Returns the manifest of a folder of shards, or an empty dict if it has none."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def whole_manifest(folder: Path) -> dict | None:
    """Returns the manifest of a folder that was made here, or None if some of its shards are missing."""
    manifest = read_manifest(folder)
    return manifest if manifest.get("shards") == len(list(folder.glob("shard_*.parquet"))) else None


def data_lock() -> FileLock:
    """Returns the lock to have while data are made or downloaded, so that the ranks of a node, or two runs, do not
    do so twice."""
    return FileLock(os.path.join(get_base_dir(), "data.lock"))
