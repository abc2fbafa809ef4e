"""A text that anyone can make: sources, documentation and manuals from source distributions of PyPI.

lab/public_text.txt pins each package by its sha256 and names its licence. pip downloads it from the index that the user
has set. The text is mostly Python code. A document is a file. Validation documents come from other packages than
training documents, and a file that is in both is in the validation text alone.
"""

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from lab import ROOT
from nanochat_fp4.cli import UserError
from nanochat_fp4.common import print0

LIST = ROOT / "lab/public_text.txt"
PIECES = "a6d7c5d3eefb"  # The data_key of its pieces for rows of 1,024 tokens (docs/texts.md).
LINE = re.compile(r"(\S+) --hash=sha256:([0-9a-f]{64})  # (.+?)(; validation)?")
KINDS = frozenset(
    ".py .pyx .pxd .pyi .c .h .cc .cpp .hpp .rs .go .java .js .ts .sh .rb .lua .sql .rst .txt .md .tex .html".split()
)
SIZES = range(400, 200_001)  # In bytes. Smaller files say little, and most larger ones are tables that a program wrote.
MOST = 130_000_000  # Characters of one package. Of a larger one a sample of the files is taken.


class Source(NamedTuple):
    """A source distribution: "name==version", its sha256, the licence, and whether it is for the validation text."""

    requirement: str
    sha256: str
    licence: str
    validation: bool


def sources() -> list[Source]:
    """Returns the packages of the list, those of the validation text first."""
    lines = (line for line in LIST.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#"))
    found = [Source(*match.groups()[:3], bool(match[4])) for match in map(LINE.fullmatch, lines)]
    return sorted(found, key=lambda source: not source.validation)


def archives(wanted: Sequence[Source], folder: Path) -> list[Path]:
    """Returns the archives of the packages. Those that are not in `folder` are downloaded to it. Raises UserError if
    pip cannot download one."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {hashlib.sha256(path.read_bytes()).hexdigest(): path for path in folder.glob("*.tar.gz")}
    for source in (source for source in wanted if source.sha256 not in known):
        print0(f"downloading {source.requirement}")
        with tempfile.TemporaryDirectory(dir=folder) as tmp:
            line = Path(tmp, "requirements.txt")
            line.write_text(f"{source.requirement} --hash=sha256:{source.sha256}\n")
            options = "--quiet --no-deps --no-binary=:all: --require-hashes --ignore-requires-python".split()
            command = [sys.executable, "-m", "pip", "download", *options, f"--dest={tmp}", f"--requirement={line}"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if "ERROR" in line] or ["no output"]
                problem = f"pip has not downloaded {source.requirement} ({said[0][:200]})"
                raise UserError(f"{problem}; put its source distribution into --sdists, or mend pip and go on")
            (archive,) = Path(tmp).glob("*.tar.gz")
            known[source.sha256] = archive.rename(folder / archive.name)
    return [known[source.sha256] for source in wanted]


def files(archive: Path) -> Iterator[str]:
    """Returns the files of a source distribution that are text. Nothing is unpacked."""
    with tarfile.open(archive) as members:
        for member in members:
            if member.isfile() and member.size in SIZES and PurePath(member.name).suffix.lower() in KINDS:
                try:
                    yield members.extractfile(member).read().decode()
                except UnicodeDecodeError:
                    continue


def documents(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the documents (of the training text, of the validation text), in the order of their hashes. No document
    is in both, or twice. Raises UserError if a package is missing and cannot be downloaded."""
    wanted, texts = sources(), ({}, {})
    for source, archive in zip(wanted, archives(wanted, folder)):
        known = {hashlib.sha256(text.encode()).hexdigest(): text for text in files(archive)}
        size = 0
        for key in sorted(known.keys() - texts[1].keys()):
            size += len(known[key])
            if size > MOST:
                break
            texts[source.validation][key] = known[key]
    training, validation = ([texts[key] for key in sorted(texts)] for texts in texts)
    return training, validation
