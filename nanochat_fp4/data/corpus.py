"""
Shards that this program makes itself, from the user's text files or as the embedded corpus.

The embedded corpus is Python's standard library. Its documentation strings and the language reference come first, then
its sources. The corpus needs no network, and it is the same on every machine with the same version of Python.
"""

import ast
import codecs
import contextlib
import hashlib
import itertools
import json
import random
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from nanochat_fp4.cli import UserError, format_bytes
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.data.download import check_space
from nanochat_fp4.data.rows import read_lines
from nanochat_fp4.data.shards import (
    ShardWriter,
    cut_text,
    data_lock,
    new_folder,
    open_shard,
    read_manifest,
    whole_manifest,
)
from nanochat_fp4.locks import running_runs
from nanochat_fp4.progress import Progress

JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
TEXT_SUFFIXES = (".txt", ".md", *JSON_LINES)

# ----------------------------------------------------------------------------------------------------------------------
# The user's text


def files_below(folder: Path) -> list[Path]:
    """Returns the user's text and parquet files in a folder. A base directory inside of the folder is left out,
    because it has reports and logs."""
    resolved, base = folder.resolve(), Path(get_base_dir()).resolve()
    own_folder = folder / base.relative_to(resolved) if resolved in base.parents else None
    paths = (p for p in folder.rglob("*") if p.name.lower().endswith((*TEXT_SUFFIXES, ".parquet")) and p.is_file())
    return sorted(p for p in paths if own_folder is None or not p.is_relative_to(own_folder))


# A file is refused if more than this share of it, and more than so many bytes, are not UTF-8 text. Western text in
# Latin-1 has a few percent of such bytes, and random bytes have half.
NOT_TEXT, NOT_TEXT_BYTES = 0.1, 100
_UNDECODED = re.compile("[\udc80-\udcff]")  # The characters by which errors="surrogateescape" stands for bytes.


class _Decoder:
    """Decodes the text of one file, and counts its bytes that are not UTF-8 text, NUL among them. The file is read
    with errors="surrogateescape"."""

    def __init__(self, path: Path):
        self.path, self.bad, self.characters = path, 0, 0

    def __call__(self, text: str) -> str:
        """Returns the text with U+FFFD in the place of bytes that are not UTF-8."""
        undecoded = len(text) - len(_UNDECODED.sub("", text)) if _UNDECODED.search(text) else 0
        self.bad, self.characters = self.bad + undecoded + text.count("\0"), self.characters + len(text)
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if undecoded else text

    @property
    def share(self) -> float:
        return self.bad / max(1, self.characters)

    def __str__(self) -> str:
        return f"{100 * self.share:.0f}%" if self.share > 0.1 else f"{100 * self.share:.2g}%"

    def check(self) -> None:
        """Raises UserError if the file is no text."""
        if self.share > NOT_TEXT and self.bad > NOT_TEXT_BYTES:
            raise UserError(
                f"{self.path} is not UTF-8 text: {self} of it are other bytes; convert the file (iconv -f ENCODING -t "
                "UTF-8), or remove it"
            )


def _documents(path: Path, field: str, most: int, decoders: dict[Path, _Decoder]) -> Iterator[str]:
    """Yields the documents of one file. A text file is one document. A JSON-lines file or a parquet shard has a
    document in each row, and a null is an empty document. `most` limits the characters of a JSON-lines file. The
    decoder of the file is put into `decoders`."""
    name = path.name.lower()
    decode = decoders[path] = _Decoder(path)
    if name.endswith(".parquet"):
        shard = open_shard(path, field)
        for index in range(len(shard.rows)):
            yield from shard.read(index)
    elif name.endswith(JSON_LINES):
        for number, line in read_lines(path, "surrogateescape", most):
            try:
                row = json.loads(decode(line))
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict) and field in row and row[field] is None:
                yield ""
                continue
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                raise UserError(
                    f'{path}, line {number}: expected a JSON object like {{"{field}": "..."}}; name the field that '
                    "holds the text with --text-column (TEXT_COLUMN)"
                )
            # JSON can have a lone surrogate, which cannot be written as UTF-8.
            yield row[field].encode("utf-8", "replace").decode("utf-8")
        decode.check()
    else:
        try:
            with path.open("rb") as f:
                mark = f.read(2)
            if mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                problem = f"{path} is text in UTF-16"
                raise UserError(f"{problem}; convert it to UTF-8 (iconv -f UTF-16 -t UTF-8), or remove it")
            text = decode(path.read_text(encoding="utf-8-sig", errors="surrogateescape"))
        except OSError as e:
            raise UserError(f"{path} cannot be read ({e.strerror}); check its permissions") from e
        decode.check()
        yield text


def _say_what_is_not_text(decoders: dict[Path, _Decoder]) -> None:
    """Prints a warning that names the files with bytes that are not UTF-8 text, if there are any."""
    bad = sorted((d for d in decoders.values() if d.bad), key=lambda d: -d.share)
    if bad:
        names = ", ".join(f"{d.path} ({d})" for d in bad[:4]) + (", ..." if len(bad) > 4 else "")
        files = f"{len(bad)} file{' holds' if len(bad) == 1 else 's hold'}"
        print0(
            f"warning: {files} bytes that are not UTF-8 text: {names}; convert them with iconv -f ENCODING -t UTF-8, "
            "or each such byte is trained on as the character U+FFFD"
        )


def convert(folder: Path, files: list[Path], column: str) -> Path:
    """Writes the documents of `files` as shards, and returns the folder of the shards. They are made again only if
    the files have changed. `column` is the column of parquet files, and the field of JSON lines, that has the text.

    Raises UserError for a file that cannot be read or is no text, and for more text than the disk has room for.
    """
    key = hashlib.sha256(b"conversion 1" if column == "text" else f"conversion 1 of {column}".encode())
    size = 0
    for path in files:
        stat = path.stat()
        size += stat.st_size
        key.update(f"{path.relative_to(folder)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "replace"))
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", folder.resolve().name)[:40] or "data"
    target = Path(get_base_dir()) / "converted_data" / f"{name}_{key.hexdigest()[:12]}"
    with data_lock():
        if whole_manifest(target) is not None:
            return target
        print0(f"Writing the text of {folder} ({len(files)} files, {format_bytes(size)}) as shards into {target}")
        check_space(target.parent, 2 * size, f"the shards of {folder}")
        # A compressed file can hold any amount of text, so the text is limited by the free disk space.
        room = shutil.disk_usage(target.parent).free
        decoders: dict[Path, _Decoder] = {}
        counted = itertools.islice((1 for path in files for _ in _documents(path, column, room, decoders)), 20)
        has_twenty_documents = sum(counted) == 20
        with new_folder(target) as tmp, Progress(desc="convert", unit="char") as progress:
            writer = ShardWriter(tmp)
            texts = (text for path in files for text in _documents(path, column, room, decoders))
            for index, text in enumerate(texts):
                if writer.total_chars > room:
                    raise UserError(
                        f"{folder} holds more than the {format_bytes(room)} of text that {target.parent} has room for; "
                        "remove files, or set NANOCHAT_BASE_DIR to a larger disk"
                    )
                pieces = cut_text(text, random.Random(index))
                # Every 20th document is validation text as a whole. With fewer than 20 documents, the last tenth of
                # each longer document is validation text instead, although it is adjacent to training text.
                tail = max(1, len(pieces) // 10) if len(pieces) >= 4 else 0
                for i, piece in enumerate(pieces):
                    writer.add(piece, index % 20 == 7 if has_twenty_documents else i >= len(pieces) - tail)
                progress.update(len(text))
            writer.finish({"source": str(folder), "files": len(files)})
        _say_what_is_not_text(decoders)
    return target


# ----------------------------------------------------------------------------------------------------------------------
# The embedded corpus

EMBEDDED_MB = 10.0  # This is the size of the standard library without its tests.

# Encodings are left out, because they are tables of numbers. The language reference in pydoc_data is read as text
# instead.
_EMBEDDED_SKIP = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "lib-dynload"}


def _spread(key: str) -> int:
    """Returns a hash of the key. It sorts keys in an order that is not alphabetical, the same one on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "replace")).digest()[:8], "big")


def docstrings_and_code(source: str, module: str) -> tuple[str, str]:
    """Returns a module's documentation strings as prose, each under its qualified name, and its source without them."""
    tree = ast.parse(source)
    prose: list[str] = []
    dropped: set[int] = set()

    def visit(node: ast.AST, name: str) -> None:
        doc = ast.get_docstring(node)
        if doc:
            signature = f"({ast.unparse(node.args)})" if hasattr(node, "args") else ""
            prose.append(f"{name}{signature}\n\n{doc}")
            dropped.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visit(child, f"{name}.{child.name}")

    visit(tree, module)
    code = "\n".join(line for i, line in enumerate(source.splitlines(), 1) if i not in dropped)
    return "\n\n".join(prose), re.sub(r"\n{4,}", "\n\n\n", code)


def embedded_documents() -> Iterator[tuple[str, str]]:
    """Yields (key, text) of the language reference, of all documentation strings, of all sources, and of the
    library's tests, in this order."""
    with contextlib.suppress(ImportError):
        from pydoc_data.topics import topics

        for name in sorted(topics, key=_spread):
            yield f"topic {name}", topics[name]
    root = Path(sysconfig.get_paths()["stdlib"])
    places = [p.relative_to(root) for p in root.rglob("*.py")]
    places = sorted((p for p in places if not _EMBEDDED_SKIP & set(p.parts)), key=lambda p: _spread(p.as_posix()))
    tests = dict.fromkeys(p for p in places if {"test", "tests", "idle_test"} & set(p.parts))
    codes = []
    for place in (p for p in places if p not in tests):
        key = place.with_suffix("").as_posix().replace("/", ".")
        # A few sources are broken on purpose.
        with contextlib.suppress(OSError, SyntaxError, ValueError, RecursionError):
            prose, code = docstrings_and_code((root / place).read_text(encoding="utf-8"), key)
            codes.append((key, code))
            yield key, prose
    yield from codes
    for place in tests:
        with contextlib.suppress(OSError, ValueError):
            key = place.with_suffix("").as_posix().replace("/", ".")
            yield key, (root / place).read_text(encoding="utf-8")


def build_embedded_corpus(size_mb: float | None = None) -> str:
    """
    Builds the embedded corpus of about `size_mb` million characters if it does not exist. Returns its folder.

    The same size on the same version of Python gives the same documents in the same order. A module belongs to one
    split as a whole, so no sentence of the validation shard is next to a sentence of a training document. Raises
    UserError if the size is not from 0.2 to 100, if a run may be reading a corpus of another size, and if Python has no
    library sources.
    """
    size = EMBEDDED_MB if size_mb is None else float(size_mb)
    if not 0.2 <= size <= 100:
        raise UserError(f"--size-mb {size:g}: the embedded corpus can have 0.2 to 100 MB")
    target = Path(get_base_dir()) / "embedded_data"
    size_before = read_manifest(target).get("size_mb")
    if size_mb is None and isinstance(size_before, (int, float)) and 0.2 <= size_before <= 100:
        size = float(size_before)  # A lost shard is made again with the text that it had.
    python = ".".join(map(str, sys.version_info[:3]))
    info = {"source": "the standard library of Python", "python": python, "size_mb": size, "version": 1}
    with data_lock():
        manifest = whole_manifest(target)
        if manifest is not None and (size_mb is None or manifest == manifest | info):
            return str(target)
        if target.is_dir() and (users := running_runs(target.parent)):
            raise UserError(f"{', '.join(users)} may be reading {target}, which would be replaced; wait, or stop it")
        print0(f"Building the embedded corpus from Python's standard library in {target}")
        check_space(target.parent, int(size * 1e6), "the embedded corpus")
        with new_folder(target) as tmp, Progress(total=int(size * 1e6), desc="embedded", unit="char") as progress:
            pieces: list[tuple[str, bool]] = []  # Each piece is stored with whether it is validation text.
            total = 0
            for key, text in embedded_documents():
                val = _spread("split " + key) % 12 == 0
                # The pieces are short, because this corpus trains small models with short rows.
                for piece in cut_text(text, random.Random(_spread(key)), shortest=400, longest=4000):
                    pieces.append((piece, val))
                    total += len(piece)
                    progress.update(len(piece))
                if total >= size * 1e6:
                    break
            if total < 200_000:
                place = sysconfig.get_paths()["stdlib"]
                raise UserError(f"this Python has no library sources in {place}; set DATA_DIR to a folder of text")
            random.Random(0).shuffle(pieces)  # Without this shuffle all prose would come before all code.
            train_chars = sum(len(piece) for piece, val in pieces if not val)
            writer = ShardWriter(tmp, shard_chars=train_chars // 4 + 4000)  # This makes four training shards.
            for piece, val in pieces:
                writer.add(piece, val)
            writer.finish(info)
    return str(target)
