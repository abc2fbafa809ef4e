"""Deduplicated text of Debian packages, in parquet shards of at most 50 MiB: <out>/prose and <out>/code.

    python -m lab.debian --out text linux-source-6.1 golang-1.19-src sqlite3-doc postgresql-doc-15

Needs Debian's apt-get and dpkg-deb. Packages are fetched by `apt-get download`, one at a time, and read without being
installed; archives inside of them, such as the kernel's, are read as well. A document goes where more than half of its
long lines are new: copies, and copies with another header, are left out. The last shard of a folder is the validation
text of --data-dir.
"""

import argparse
import gzip
import hashlib
import io
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from nanochat_fp4.common import print0
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, run_main

PROSE = {".txt", ".md", ".rst", ".texi", ".html", ".htm", ".adoc"}
CODE = {".c", ".h", ".cc", ".cpp", ".hpp", ".py", ".go", ".rs", ".java", ".js", ".ts", ".pl", ".pm", ".rb", ".sh"}
CODE |= {".ml", ".hs", ".el", ".lua", ".php", ".s", ".sql", ".scala", ".tcl"}
SHORTEST, LONGEST, LONG_LINE = 500, 2_000_000, 30  # characters
LARGEST_SHARD = 50 * 2**20  # bytes
GROUP = 1024  # documents in a row group, fewer where they are an eighth of a shard before compression


class Text(HTMLParser):
    """The text of a page, without markup, scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.left_out = 0

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.left_out += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self.left_out -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self.left_out:
            self.parts.append(data)


def text_of(name: str, data: bytes) -> tuple[str, str] | None:
    """("prose" or "code", the text) of a file, or None."""
    if name.endswith(".gz"):
        name, data = name[:-3], gzip.decompress(data)
    suffix = Path(name).suffix.lower()
    kind = "prose" if suffix in PROSE else "code" if suffix in CODE else ""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if kind and suffix in (".html", ".htm"):
        page = Text()
        page.feed(text)
        text = re.sub(r"\n\s*\n+", "\n\n", "".join(page.parts)).strip()
    return (kind, text) if kind and SHORTEST <= len(text) <= LONGEST and "\0" not in text else None


def documents(archive: tarfile.TarFile) -> Iterator[tuple[str, str]]:
    """(kind, text) of each file of an archive, and of the archives in it. Links are left out."""
    for member in archive:
        if not member.isfile() or (file := archive.extractfile(member)) is None:
            continue
        if re.search(r"\.(tar\.(xz|gz|bz2)|tgz)$", member.name):
            with tarfile.open(fileobj=file) as inner:
                yield from documents(inner)
        elif member.size <= LONGEST:
            try:
                found = text_of(member.name, file.read())
            except (OSError, EOFError):  # not gzip, whatever its name says
                continue
            if found:
                yield found


def is_new(text: str, seen: set[bytes]) -> bool:
    """Whether most of the long lines were in no document before; they are from now on."""
    lines = {re.sub(r"\s+", " ", line).strip() for line in text.splitlines()}
    keys = {hashlib.blake2b(line.encode(), digest_size=8).digest() for line in lines if len(line) >= LONG_LINE}
    new = keys - seen
    seen |= new
    return 2 * len(new) > len(keys)


def package(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """(kind, text) of each file of a package. Raises UserError where apt-get cannot have it."""
    done = subprocess.run(["apt-get", "download", name], cwd=folder, capture_output=True, text=True)
    files = list(folder.glob("*.deb"))
    if done.returncode or not files:
        raise UserError(f"apt-get has no package {name} ({done.stderr.strip()[-120:]}); see apt-cache search")
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", files[0]], stdout=subprocess.PIPE) as tar:
        with tarfile.open(fileobj=tar.stdout, mode="r|") as archive:
            yield from documents(archive)
    files[0].unlink()


class Shards:
    """Writes documents to <folder>/shard_00000.parquet and so on, each of at most `limit` bytes."""

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        self.groups: list[list[str]] = []
        self.waiting: list[str] = []
        self.shards = self.size = self.documents = self.characters = self.in_group = 0

    def add(self, text: str) -> None:
        self.waiting.append(text)
        self.documents, self.characters = self.documents + 1, self.characters + len(text)
        self.in_group += len(text)
        if len(self.waiting) == GROUP or self.in_group > self.limit / 8:
            self.close_group()

    def close_group(self) -> None:
        if not self.waiting:
            return
        size = len(parquet([self.waiting]))  # of the whole file, a little more than of the group in one
        if self.groups and self.size + size > self.limit:
            self.write()
        self.groups.append(self.waiting)
        self.size, self.waiting, self.in_group = self.size + size, [], 0

    def write(self) -> None:
        if self.groups:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"shard_{self.shards:05d}.parquet").write_bytes(parquet(self.groups))
            self.shards, self.groups, self.size = self.shards + 1, [], 0


def parquet(groups: list[list[str]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    options = {"compression": "zstd", "compression_level": 12, "use_dictionary": False, "data_page_size": 1 << 26}
    with pq.ParquetWriter(file, pa.schema([("text", pa.string())]), **options) as writer:
        for group in groups:
            writer.write_table(pa.table({"text": group}), row_group_size=GROUP)
    return file.getvalue()


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", help="names of Debian packages: *-doc, *-source, *-dev")
    parser.add_argument("--out", type=Path, required=True, help="folder for prose/ and code/")
    args = parser.parse_args(argv)
    if list(args.out.glob("*/shard_*.parquet")):
        raise UserError(f"{args.out} has shards; choose an empty folder, or remove them")
    shards = {kind: Shards(args.out / kind, LARGEST_SHARD) for kind in ("prose", "code")}
    seen: set[bytes] = set()
    for name in args.packages:
        with tempfile.TemporaryDirectory() as folder:
            for kind, text in package(name, Path(folder)):
                if is_new(text, seen):
                    shards[kind].add(text)
        said = "; ".join(f"{k}: {s.documents:,} documents, {s.characters / 1e6:.1f} MB" for k, s in shards.items())
        print0(f"{name}: {said}", flush=True)
    for found in shards.values():
        found.close_group()
        found.write()
        print0(f"{found.folder}: {found.shards} shards")


if __name__ == "__main__":
    run_main(main)
