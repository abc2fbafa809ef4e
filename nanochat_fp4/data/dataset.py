"""
Training text: a folder of parquet shards with a string column `text`, the last shard being the validation split.

Where the folder comes from, first match wins (ensure_data prints which and why):

1. --data-dir or DATA_DIR: parquet shards are used as they are; .txt, .md, .jsonl and .jsonl.gz files are cut into
   documents and written as shards into the base directory, once.
   --text-column or TEXT_COLUMN names the column, or the JSON field, that holds the text (default: text).
2. FineWeb-Edu shards that were downloaded before: <base dir>/base_data, nanochat's folder.
3. The embedded corpus, if it was built before.
4. FineWeb-Edu from the hub, if it answers within a few seconds.
5. The embedded corpus, built on the spot from Python's standard library: its documentation strings and language
   reference first, then its sources. It needs no network and is the same on every machine with the same Python.

    python -m nanochat_fp4.data.dataset -n 240       download shards 0 to 239 (resumable)
    python -m nanochat_fp4.data.dataset --embedded   build the embedded corpus
    python -m nanochat_fp4.data.dataset --c4 -n 5    download C4 (5 of its files) and print what to set DATA_DIR to
    python -m nanochat_fp4.data.dataset --ensure     whatever of the above applies
"""

import argparse
import ast
import contextlib
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock

from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import ArgumentParser, Progress, format_bytes, parse_finite
from nanochat_fp4.data.download import download_file
from nanochat_fp4.errors import UserError, one_line, run_main

# FineWeb-Edu 100B, shuffled and re-cut into parquet shards by nanochat's author.
DATASET = "karpathy/fineweb-edu-100b-shuffle"
MAX_SHARD = 1822  # the last one is shard_01822.parquet
# The text of the paper's Llama-like runs: files of about 320 MB (gzip, JSON lines), 360,000 documents each.
C4, C4_FILES, C4_BYTES = "allenai/c4", 1024, 320_000_000
SHARD_BYTES = (
    100_000_000  # a shard holds about 250M characters in a little under 100 MB: for the estimate of disk space
)

NO_NETWORK_HINT = (
    "without a network set DATA_DIR to a folder of text or parquet files, or use the embedded corpus: "
    "python -m nanochat_fp4.data.dataset --embedded"
)
TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".jsonl.gz")


def index_to_filename(index: int) -> str:
    return f"shard_{index:05d}.parquet"


def hub_url() -> str:
    """HF_ENDPOINT names another host (a mirror), as for Hugging Face's own tools."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def base_url(dataset: str = DATASET) -> str:
    """Where the shards are."""
    return f"{hub_url()}/datasets/{dataset}/resolve/main"


# ----------------------------------------------------------------------------------------------------------------------
# Reading shards


@dataclass(frozen=True)
class Shard:
    """A parquet file that was opened and found to have a string column with the text."""

    path: str
    rows: tuple[int, ...]  # documents in each row group
    column: str = "text"

    @property
    def num_row_groups(self) -> int:
        return len(self.rows)

    @property
    def num_rows(self) -> int:
        return sum(self.rows)


def text_column() -> str:
    """The name that the user gives to the column with the text."""
    return os.environ.get("TEXT_COLUMN") or "text"


def _column_of(names: list[str]) -> str:
    """Of a shard's columns the one to read: shards of ours and FineWeb-Edu's have `text` whatever the user's have."""
    return text_column() if text_column() in names else "text"


def open_shard(path: str | os.PathLike) -> Shard:
    """Read a shard's footer. Raises UserError where it is not parquet, is cut short or has no text column."""
    path = str(path)
    try:
        with pq.ParquetFile(path) as f:
            schema = f.schema_arrow
            rows = tuple(f.metadata.row_group(i).num_rows for i in range(f.metadata.num_row_groups))
    except (pa.ArrowException, OSError, ValueError) as e:
        raise UserError(
            f"{path} is not a readable parquet file ({one_line(e)[:150]}); it may be cut short: delete it and download "
            "or copy it again"
        ) from e
    name = _column_of(schema.names)
    if name not in schema.names:
        raise UserError(
            f"{path} has no column named {text_column()} (it has: {', '.join(schema.names[:10]) or 'none'}); name the "
            "one that holds the text with --text-column (TEXT_COLUMN)"
        )
    text_type = schema.field(name).type
    if not (pa.types.is_string(text_type) or pa.types.is_large_string(text_type)):
        raise UserError(f"{path}: the column {name} holds {text_type}, not strings; convert it")
    return Shard(path, rows, name)


def read_row_group(path: str | os.PathLike, index: int) -> list[str]:
    """The documents of one row group; a null becomes the empty string. Raises UserError where the data is damaged."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as f:  # where the shard has checksums
            name = _column_of(f.schema_arrow.names)
            column = f.read_row_group(index, columns=[name]).column(name)
        return [text if text is not None else "" for text in column.to_pylist()]
    except (pa.ArrowException, OSError, ValueError) as e:
        raise UserError(
            f"{path}: row group {index} cannot be read ({one_line(e)[:150]}); the shard is damaged: delete it and "
            "download or copy it again"
        ) from e


DIGEST_BLOCKS, DIGEST_BLOCK = 32, 4096


def shard_digest(path: str | os.PathLike) -> str:
    """
    16 hex digits of a shard's content, quick to have: of all of it up to 1 MB; of a larger one its size, its footer
    (which has the compressed size of each row group) and 32 blocks of 4 KB spread over it.

    A shard written anew with other text is noticed. A few letters changed in a large one may not be: they leave the
    sizes as they are, now and then, and lie between the blocks. Raises UserError where the file cannot be read.
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
                footer = min(int.from_bytes(f.read(4), "little") + 8, size)
                for start, length in [(size - footer, footer)] + [
                    (size * i // DIGEST_BLOCKS, DIGEST_BLOCK) for i in range(DIGEST_BLOCKS)
                ]:
                    f.seek(start)
                    digest.update(f.read(length))
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); check its permissions, or copy it again") from e
    return digest.hexdigest()[:16]


def list_parquet_files(data_dir: str | os.PathLike | None = None) -> list[str]:
    """Sorted paths of the shards in `data_dir`; without it, in the folder that training would use."""
    data_dir = Path(data_dir) if data_dir is not None else Path(ensure_data(make=False))
    if not data_dir.is_dir():
        raise UserError(f"{data_dir} is not a folder; set DATA_DIR (--data-dir) to a folder of text or parquet files")
    return [str(p) for p in sorted(data_dir.iterdir()) if p.suffix == ".parquet" and p.is_file()]


def open_shards(split: str, data_dir: str | os.PathLike | None = None) -> list[Shard]:
    """The shards of a split, 'train' (all but the last) or 'val' (the last), opened and checked; at least one row."""
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        where = data_dir if data_dir is not None else "the data folder"
        raise UserError(
            f"{where} holds {len(paths)} parquet shard(s), but at least 2 are needed (the last is the validation "
            f"split); {NO_NETWORK_HINT}"
        )
    shards = [open_shard(path) for path in (paths[:-1] if split == "train" else paths[-1:])]
    if sum(shard.num_rows for shard in shards) == 0:
        raise UserError(f"the {split} shards in {Path(paths[0]).parent} hold no rows; put text into them")
    return shards


def parquets_iter_batched(
    split: str, start: int = 0, step: int = 1, data_dir: str | os.PathLike | None = None
) -> Iterator[list[str]]:
    """
    One pass over a split ('train' or 'val'), a row group (a list of documents) at a time.

    `start` and `step` deal the row groups of each shard to ranks, e.g. start=rank, step=world_size.
    """
    for shard in open_shards(split, data_dir):
        for index in range(start, shard.num_row_groups, step):
            yield read_row_group(shard.path, index)


# ----------------------------------------------------------------------------------------------------------------------
# Writing shards

SHARD_CHARS = 100_000_000  # of text in a shard that is written here
VAL_CHARS = 25_000_000  # a validation split needs no more
ROW_GROUP = 1024
MIN_ROW_GROUPS = 8  # row groups are dealt to ranks


def cut_text(text: str, rng: random.Random, shortest: int = 1600, longest: int = 5200) -> list[str]:
    """
    Cut a long document into pieces of at most `longest` characters, at paragraph ends where there are any.

    The best-fit loader throws away what does not fit into a row, so a book in one piece would be mostly lost. The
    length limit of each piece is drawn between the two bounds, because pieces of many lengths pack better than equal
    ones. Nothing is lost but white space at the cuts; pieces of white space are dropped.
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


class _ShardWriter:
    """Collects pieces of text and writes them as shard_00000.parquet, shard_00001.parquet, ...; validation last."""

    def __init__(self, folder: Path, shard_chars: int = SHARD_CHARS):
        self.folder, self.shard_chars = folder, shard_chars
        self.train: list[str] = []
        self.val: list[str] = []
        self.buffered = self.val_chars = self.total_chars = self.num_shards = self.num_pieces = 0

    def add(self, piece: str, val: bool = False) -> None:
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
        # Shuffled, so that neighbouring rows of a batch do not come from one document. A seed of its own per shard.
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
        """Write what is left, then the manifest. Raises UserError where there is not enough for both splits."""
        if not self.val and len(self.train) > 1:
            self.val.append(self.train.pop())
        if self.train:
            self._write(self.train)
        if not self.val or self.num_shards == 0:
            raise UserError(
                f"{info['source']} holds too little text ({self.total_chars:,} characters) for a training and a "
                "validation split; add more"
            )
        self._write(self.val)
        info |= {"characters": self.total_chars, "documents": self.num_pieces, "shards": self.num_shards}
        (self.folder / "manifest.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _new_folder(path: Path) -> Iterator[Path]:
    """A temporary folder that becomes `path` when the block ends, so that a folder of that name is always complete."""
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # left by a killed process; the caller holds the lock
    tmp.mkdir(parents=True)
    try:
        yield tmp
        shutil.rmtree(path, ignore_errors=True)
        tmp.rename(path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _data_lock() -> FileLock:
    """Held while data is made or downloaded, so that the ranks of a node (or two runs) do not do it twice."""
    return FileLock(os.path.join(get_base_dir(), "data.lock"))


# ----------------------------------------------------------------------------------------------------------------------
# A folder of the user's own text


def _text_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.name.lower().endswith(TEXT_SUFFIXES) and p.is_file())


def _documents(path: Path) -> Iterator[str]:
    """The documents of one file: a text file is one, a JSON-lines file or a parquet shard has one a row."""
    name, field = path.name.lower(), text_column()
    if name.endswith(".parquet"):
        for index in range(open_shard(path).num_row_groups):
            yield from read_row_group(path, index)
    elif name.endswith((".jsonl", ".jsonl.gz")):
        opener = gzip.open if name.endswith(".gz") else open
        try:
            with opener(path, "rt", encoding="utf-8", errors="replace") as f:
                for number, line in enumerate(f, 1):
                    if not line.strip():
                        continue
                    try:
                        row = json.loads(line)
                    except (ValueError, RecursionError):
                        row = None
                    if not isinstance(row, dict) or not isinstance(row.get(field), str):
                        raise UserError(
                            f'{path}, line {number}: expected a JSON object like {{"{field}": "..."}}; name the field '
                            "that holds the text with --text-column (TEXT_COLUMN)"
                        )
                    # A lone surrogate (JSON can spell one) is no text and could not be written as UTF-8.
                    yield row[field].encode("utf-8", "replace").decode("utf-8")
        except (OSError, EOFError, gzip.zlib.error) as e:
            raise UserError(f"{path} cannot be read ({one_line(e)}); it may be cut short: copy it again") from e
    else:
        try:
            yield path.read_text(encoding="utf-8", errors="replace")
        except OSError as e:
            raise UserError(f"{path} cannot be read ({e.strerror}); check its permissions") from e


def _convert(folder: Path, files: list[Path]) -> Path:
    """Write the documents of `files` as shards; returns the folder, which is made again only when the files change."""
    key = hashlib.sha256(b"conversion 1" if text_column() == "text" else f"conversion 1 of {text_column()}".encode())
    size = 0
    for path in files:
        stat = path.stat()
        size += stat.st_size
        key.update(f"{path.relative_to(folder)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "replace"))
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", folder.resolve().name)[:40] or "data"
    target = Path(get_base_dir()) / "converted_data" / f"{name}_{key.hexdigest()[:12]}"
    with _data_lock():
        if target.is_dir():
            return target
        print0(f"Writing the text of {folder} ({len(files)} files, {format_bytes(size)}) as shards into {target}")
        _check_space(target.parent, 2 * size, f"the shards of {folder}")
        num_documents = num_chars = 0
        with Progress(desc="count", unit="char") as progress:
            for text in (text for path in files for text in _documents(path)):
                num_documents += 1
                num_chars += len(text)
                progress.update(len(text))
        with _new_folder(target) as tmp, Progress(total=num_chars, desc="convert", unit="char") as progress:
            writer = _ShardWriter(tmp)
            index = 0
            for path in files:
                for text in _documents(path):
                    pieces = cut_text(text, random.Random(index))
                    # Validation: every 20th document as a whole. With so few documents that this leaves (nearly)
                    # none, the last tenth of each longer one, which is adjacent to training text but shares none of it.
                    tail = max(1, len(pieces) // 10) if len(pieces) >= 4 else 0
                    for i, piece in enumerate(pieces):
                        val = index % 20 == 7 if num_documents >= 20 else i >= len(pieces) - tail
                        writer.add(piece, val)
                        progress.update(len(piece))
                    progress.update(len(text) - sum(map(len, pieces)))  # the white space at the cuts
                    index += 1
            writer.finish({"source": str(folder), "files": len(files)})
    return target


def _own_data(data_dir: str) -> str:
    """The folder of shards for DATA_DIR: itself, or the converted copy of its text."""
    folder = Path(data_dir).expanduser()
    if not folder.is_dir():
        what = "a file" if folder.exists() else "not there"
        raise UserError(f"DATA_DIR (--data-dir) {data_dir} is {what}; it must be a folder of text or parquet files")
    shards = list_parquet_files(folder)
    texts = _text_files(folder)
    other = next((s.path for s in map(open_shard, shards) if s.column != text_column()), None)
    if other and not folder.is_relative_to(get_base_dir()):  # where our own shards are
        raise UserError(f"{other} has no column named {text_column()}; correct --text-column (TEXT_COLUMN)")
    if len(shards) >= 2:
        for split in ("train", "val"):
            open_shards(split, folder)  # every footer is looked at now, not hours into a run
        if texts:
            print0(f"{folder}: using its {len(shards)} parquet shards, not its {len(texts)} text files")
        return str(folder)
    if not shards and not texts:
        raise UserError(
            f"DATA_DIR (--data-dir) {data_dir} holds no data; expected .parquet files with a text column, or "
            f"{', '.join(TEXT_SUFFIXES)} files"
        )
    return str(_convert(folder, [Path(p) for p in shards] + texts))


# ----------------------------------------------------------------------------------------------------------------------
# The embedded corpus

EMBEDDED_MB = 10.0  # default: the standard library without its tests is about that much
# Code pages are tables of numbers; pydoc_data is the language reference, which is read as text instead.
_EMBEDDED_SKIP = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib-dynload"}


def _spread(key: str) -> int:
    """A number that has nothing to do with the alphabet, the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")


def _docstrings_and_code(source: str, module: str) -> tuple[str, str]:
    """A module's documentation strings as prose, each under its qualified name, and its source without them."""
    tree = ast.parse(source)
    prose: list[str] = []
    dropped: set[int] = set()

    def visit(node: ast.AST, name: str) -> None:
        doc = ast.get_docstring(node)
        if doc:
            signature = (
                f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
            )
            prose.append(f"{name}{signature}\n\n{doc}")
            dropped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{name}.{child.name}")

    visit(tree, module)
    code = "\n".join(line for i, line in enumerate(source.splitlines(), 1) if i not in dropped)
    return "\n\n".join(prose), re.sub(r"\n{4,}", "\n\n\n", code)


def _embedded_documents() -> Iterator[tuple[str, str]]:
    """(key, text), prose first: the language reference, documentation strings, sources, the library's own tests."""
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        for name in sorted(topics, key=_spread):
            yield f"topic {name}", topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not _EMBEDDED_SKIP & set(p.relative_to(root).parts)]
    files.sort(key=lambda p: _spread(p.relative_to(root).as_posix()))
    tests = [p for p in files if {"test", "tests", "idle_test"} & set(p.relative_to(root).parts)]
    files = [p for p in files if p not in set(tests)]
    parsed: dict[Path, tuple[str, str]] = {}

    def read(path: Path) -> tuple[str, str]:
        try:
            return path.relative_to(root).with_suffix("").as_posix().replace("/", "."), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return "", ""

    for path in files:
        key, source = read(path)
        try:
            parsed[path] = _docstrings_and_code(source, key)
        except (SyntaxError, ValueError, RecursionError):  # Python ships a few that are broken on purpose
            continue
        yield key, parsed[path][0]
    for path in parsed:
        yield read(path)[0], parsed[path][1]
    for path in tests:
        yield read(path)


def build_embedded_corpus(size_mb: float | None = None) -> str:
    """
    Build (or find) the embedded corpus of about `size_mb` million characters; returns its folder.

    The same size on the same Python version gives the same documents in the same order. Documents are whole modules
    on one side of the split: no sentence of the validation shard is a training document's neighbour.
    """
    wanted = EMBEDDED_MB if size_mb is None else float(size_mb)
    if not 0.2 <= wanted <= 100:
        raise UserError(f"--size-mb {wanted:g}: the embedded corpus can have 0.2 to 100 MB")
    target = Path(get_base_dir()) / "embedded_data"
    info = {
        "source": "the standard library of Python",
        "python": ".".join(map(str, sys.version_info[:3])),
        "size_mb": wanted,
        "version": 1,
    }
    with _data_lock():
        if target.is_dir():
            with contextlib.suppress(OSError, ValueError):
                manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
                same = {k: manifest.get(k) for k in info} == info
                if same or size_mb is None:
                    return str(target)
        print0(f"Building the embedded corpus from Python's standard library in {target}")
        _check_space(target.parent, int(wanted * 1e6), "the embedded corpus")
        with _new_folder(target) as tmp, Progress(total=int(wanted * 1e6), desc="embedded", unit="char") as progress:
            pieces: list[tuple[str, bool]] = []
            total = 0
            for key, text in _embedded_documents():
                val = _spread("split " + key) % 12 == 0
                # Short pieces: this corpus trains small models, whose rows are short.
                for piece in cut_text(text, random.Random(_spread(key)), shortest=400, longest=4000):
                    pieces.append((piece, val))
                    total += len(piece)
                    progress.update(len(piece))
                if total >= wanted * 1e6:
                    break
            if total < 200_000:
                raise UserError(
                    f"this Python has no library sources in {sysconfig.get_paths()['stdlib']}; set DATA_DIR to a "
                    "folder of text"
                )
            random.Random(0).shuffle(pieces)  # prose and code must not come one after the other
            train_chars = sum(len(piece) for piece, val in pieces if not val)
            writer = _ShardWriter(tmp, shard_chars=train_chars // 4 + 4000)  # four training shards
            for piece, val in pieces:
                writer.add(piece, val)
            writer.finish(info)
    return str(target)


# ----------------------------------------------------------------------------------------------------------------------
# FineWeb-Edu from the hub


def _check_space(folder: Path, needed: int, what: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{what} need about {format_bytes(needed)}, but {folder} has {format_bytes(free)} left; free some space, "
            "ask for less, or set NANOCHAT_BASE_DIR to a larger disk"
        )


def hub_problem(deadline: float = 8.0, url: str | None = None) -> str | None:
    """Why the hub cannot be used, or None if it answers within `deadline` seconds (name look-up included).

    url: what to ask for (default: the first shard of the training text)."""
    if os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false"):
        return "HF_HUB_OFFLINE is set"
    url = url or f"{base_url()}/{index_to_filename(0)}"
    result = [f"no answer from {hub_url()} within {deadline:g} seconds"]

    def probe() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=deadline):
                result[0] = ""
        except urllib.error.HTTPError as e:
            result[0] = f"{url}: {one_line(e)}"
        except Exception as e:  # any failure means the same to the caller
            result[0] = f"{hub_url()} cannot be reached: {one_line(getattr(e, 'reason', e))}"

    # A thread, because a look-up of the host's name ignores every timeout.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(deadline)
    return result[0] or None


def download_shards(num_files: int = -1, num_workers: int = 4, deadline: float = 1800.0) -> str:
    """
    Download shards 0 .. num_files-1 (-1: all 1823) into <base dir>/base_data, `num_workers` at a time.

    What is there is kept, what was begun is continued. States the disk space first and checks it. `deadline` is for
    one shard, in seconds. Returns the folder. Raises UserError; shards that are complete stay.
    """
    if num_files < -1 or num_files == 0:
        raise UserError(f"-n {num_files}: expected a number of shards from 1 to {MAX_SHARD + 1}, or -1 for all")
    if num_workers < 1:
        raise UserError(f"-w {num_workers}: expected at least one worker")
    num = MAX_SHARD + 1 if num_files == -1 else min(num_files, MAX_SHARD + 1)
    folder = Path(get_base_dir()) / "base_data"
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in map(index_to_filename, range(num)) if not (folder / name).exists()]
    if not missing:
        print0(f"All {num} shards are in {folder}")
        return str(folder)
    begun = sum((folder / f"{name}.part").stat().st_size for name in missing if (folder / f"{name}.part").exists())
    needed = max(0, len(missing) * SHARD_BYTES - begun)
    print0(
        f"Downloading {len(missing)} of {num} shards (about {format_bytes(needed)}; "
        f"{format_bytes(shutil.disk_usage(folder).free)} free) into {folder}"
    )
    _check_space(folder, needed, f"{len(missing)} shards")
    if problem := hub_problem():
        raise UserError(f"cannot download the dataset: {problem}; {NO_NETWORK_HINT}")
    stop = threading.Event()
    failures: list[BaseException] = []  # the first one is the cause, the others were told to stop

    def fetch(name: str) -> None:
        if stop.is_set():
            return
        try:
            download_file(
                f"{base_url()}/{name}",
                folder / name,
                deadline=deadline,
                hint=NO_NETWORK_HINT,
                validate=open_shard,
                progress=progress,
                stop=stop,
            )
        except BaseException as e:
            failures.append(e)
            stop.set()  # one shard that cannot be had after all attempts: the others would fare no better

    with (
        _data_lock(),
        Progress(total=needed, desc="download", unit="bytes") as progress,
        ThreadPoolExecutor(num_workers) as pool,
    ):
        jobs = [pool.submit(fetch, name) for name in missing if not (folder / name).exists()]
        try:
            for job in jobs:
                job.result()
        except BaseException:  # Ctrl-C: the threads end at their next chunk
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    if failures:
        raise failures[0]
    print0(f"Done: {num} shards in {folder}")
    return str(folder)


def download_c4(num_files: int, deadline: float = 3600.0) -> str:
    """
    Download the first num_files files of C4's English part into <base dir>/c4 and write them as shards; their folder.

    A twentieth of the documents is the validation split, where the paper's runs had 0.05%, drawn at random. What is
    there is kept. Raises UserError.
    """
    if not 1 <= num_files <= C4_FILES:
        raise UserError(f"-n {num_files}: expected a number of C4's files from 1 to {C4_FILES}")
    folder = Path(get_base_dir()) / "c4"
    names = {f"c4-train.{i:05d}-of-{C4_FILES:05d}.json.gz": f"c4-train.{i:05d}.jsonl.gz" for i in range(num_files)}
    missing = {theirs: ours for theirs, ours in names.items() if not (folder / ours).exists()}
    if missing:
        _check_space(folder, 4 * C4_BYTES * len(missing), f"{len(missing)} files of C4 and the shards made of them")
        if problem := hub_problem():
            raise UserError(f"cannot download C4: {problem}; {NO_NETWORK_HINT}")
        for theirs, ours in missing.items():
            url = f"{base_url(C4)}/en/{theirs}"
            download_file(url, folder / ours, deadline=deadline, hint=NO_NETWORK_HINT)
    return _own_data(str(folder))


# ----------------------------------------------------------------------------------------------------------------------
# The choice


def ensure_data(
    data_dir: str | None = None,
    *,
    column: str | None = None,
    num_shards: int = 8,
    embedded_mb: float | None = None,
    make: bool = True,
) -> str:
    """
    The folder of shards to train on, chosen as the head of this file says; made or downloaded where necessary.

    data_dir: --data-dir; None or "" means DATA_DIR. column: --text-column, for this process; None or "" means
    TEXT_COLUMN. num_shards: how many shards to download where it comes to that.
    embedded_mb: size of the embedded corpus where it comes to that (None: the one that is there, or the default).
    make=False only looks at what is there, silently; text in DATA_DIR is converted even so.
    Raises UserError: bad DATA_DIR; nothing there and make=False.
    Every rank may call it at the same time.
    """
    data_dir = data_dir or os.environ.get("DATA_DIR")
    if column:
        os.environ["TEXT_COLUMN"] = column  # of all that this process reads from now on
    if not data_dir and text_column() != "text":
        raise UserError(
            "--text-column (TEXT_COLUMN) is for text of your own; add --data-dir (DATA_DIR), or leave it out"
        )
    say = print0 if make else (lambda line: None)
    if data_dir:
        folder = _own_data(data_dir)
        say(f"Data: {folder} (DATA_DIR)")
        return folder
    base = Path(get_base_dir())
    downloaded, embedded = base / "base_data", base / "embedded_data"
    if downloaded.is_dir() and len(shards := list_parquet_files(downloaded)) >= 2:
        say(f"Data: {len(shards)} FineWeb-Edu shards in {downloaded} (downloaded before)")
        return str(downloaded)
    if (embedded / "manifest.json").is_file():
        folder = build_embedded_corpus(embedded_mb) if make else str(embedded)  # rebuilt where another size is wanted
        say(
            f"Data: the embedded corpus in {folder} (for FineWeb-Edu instead: python -m nanochat_fp4.data.dataset -n 8)"
        )
        return folder
    if not make:
        raise UserError(
            f"there is no training text in {base} yet; run python -m nanochat_fp4.data.dataset --ensure, or set "
            "DATA_DIR to a folder of text or parquet files"
        )
    problem = hub_problem()
    if problem is None:
        try:
            folder = download_shards(max(2, num_shards))
            say(f"Data: FineWeb-Edu shards in {folder}")
            return folder
        except UserError as e:
            problem = one_line(e).removesuffix(f"; {NO_NETWORK_HINT}")
    folder = build_embedded_corpus(embedded_mb)
    say(f"Data: the embedded corpus in {folder} ({problem})")
    return folder


def add_data_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """--data-dir and --text-column, for ensure_data. default: where text comes from without them, in words."""
    parser.add_argument(
        "--data-dir", default="", help=f"folder of parquet shards or text (default: $DATA_DIR, else {default})"
    )
    parser.add_argument(
        "--text-column", default="", help="its column, or JSON field, with the text (default: $TEXT_COLUMN, else text)"
    )


def corpus_size(shards: Iterable[Shard]) -> str:
    """'3 shards, 24 row groups, 2,345 documents': for the log."""
    shards = list(shards)
    return (
        f"{len(shards)} shards, {sum(s.num_row_groups for s in shards)} row groups, "
        f"{sum(s.num_rows for s in shards):,} documents"
    )


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Download, build or check the training text")
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="number of shards to download (-1 = all 1823)")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="parallel downloads (default: 4)")
    parser.add_argument(
        "--deadline", type=parse_finite, default=1800, help="seconds after which a shard's download gives up"
    )
    add_data_arguments(parser, "as the other flags say")
    parser.add_argument("--c4", action="store_true", help="download -n files of C4, the paper's text, instead")
    parser.add_argument("--embedded", action="store_true", help="build the embedded corpus instead")
    parser.add_argument("--size-mb", type=parse_finite, default=None, help=f"its size (default: {EMBEDDED_MB:g})")
    parser.add_argument(
        "--ensure", action="store_true", help="DATA_DIR, downloaded shards, the hub or the embedded corpus"
    )
    args = parser.parse_args(argv)
    if args.data_dir:
        folder = ensure_data(args.data_dir, column=args.text_column)
    elif args.c4:
        folder = download_c4(args.num_files, args.deadline)
        print0(f"to train on it: DATA_DIR={folder}, or --data-dir={folder}")
    elif args.embedded:
        folder = build_embedded_corpus(args.size_mb)
    elif args.ensure:
        folder = ensure_data(
            num_shards=MAX_SHARD + 1 if args.num_files == -1 else args.num_files, embedded_mb=args.size_mb
        )
    else:
        folder = download_shards(args.num_files, args.num_workers, args.deadline)
        if len(list_parquet_files(folder)) < 2:
            print0("Note: training needs at least 2 shards, the last being the validation split")
            return
    for split in ("train", "val"):
        print0(f"{folder}: {split}: {corpus_size(open_shards(split, folder))}")


if __name__ == "__main__":
    run_main(main)
