"""
The text of a run. It is the first of these sources that exists; ensure_data prints the choice and its reason.

1. --data-dir or DATA_DIR, a folder or a file of the user (text.py). --text-column or TEXT_COLUMN names the column or
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
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from filelock import FileLock

from nanochat_fp4.cli import ArgumentParser, UserError, format_bytes, one_line, parse_finite, run_main
from nanochat_fp4.common import get_base_dir, of_all_ranks, print0
from nanochat_fp4.data.sources import hub_url, url_problem
from nanochat_fp4.data.text import Parts, Shard, open_text, survey, text_column
from nanochat_fp4.files import atomic_write
from nanochat_fp4.progress import Progress

# This is FineWeb-Edu 100B, which nanochat's author shuffled and cut into parquet shards.
DATASET = "karpathy/fineweb-edu-100b-shuffle"
MAX_SHARD = 1822  # This is the last shard. Its name sorts last, so it is the validation split.
SHARD_BYTES = 100_000_000  # An estimate of the size of a shard.

NO_NETWORK_HINT = (
    "without a network set DATA_DIR to a folder of text or parquet files, or use the embedded corpus: "
    "python -m nanochat_fp4.data.dataset --embedded"
)


def index_to_filename(index: int) -> str:
    """Returns the name of a shard's file."""
    return f"shard_{index:05d}.parquet"


def validation_text(data_dir: str | os.PathLike, column: str = "") -> str:
    """Returns a name of the validation text of a folder. Two runs have the same name only if they validate on the
    same text."""
    column = text_column(column)
    return " ".join([part.digest() for part in open_text("val", data_dir, column)] + [column] * (column != "text"))


def parquets_iter_batched(
    split: str, start: int = 0, step: int = 1, data_dir: str | os.PathLike | None = None, column: str = ""
) -> Iterator[list[str]]:
    """
    Yields the row groups of a split ('train' or 'val') once, each as a list of documents. Own text has groups, too.

    `start` and `step` deal the row groups of each shard to ranks, for example with start=rank and step=world_size.
    """
    for part in open_text(split, data_dir or ensure_data(), column):
        for index in range(start, len(part.rows), step):
            yield part.read(index)


def how_often(parts: Parts, tokenizer: Any, tokens: int) -> str | None:
    """Returns a line that says how own text was cut, about how many tokens it has, and how often a run of so many
    tokens reads it. Returns None for parquet shards."""
    own = parts[0]
    if isinstance(own, Shard):
        return None
    sample = [text for k in range(0, len(own.rows), -(-len(own.rows) // 8)) for text in own.read(k)]
    held = len(own.order) * sum(map(len, tokenizer.encode(sample))) // len(sample)
    text = f"{own.name}: {len(own.order):,} training pieces, cut at the ends of paragraphs, with about {held:,} tokens"
    return f"{text}, which this run reads {tokens / held:.2g} times; what is longer than a row goes on in the next one"


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
    places = (path.relative_to(root) for path in root.rglob("*.py"))
    keys = [place.as_posix() for place in places if not SKIPPED & set(place.parts)]
    for key in sorted(keys, key=lambda key: (bool({"test", "tests", "idle_test"} & set(key.split("/"))), spread(key))):
        with contextlib.suppress(OSError, ValueError):  # A few sources are broken on purpose.
            yield (root / key).read_text(encoding="utf-8")


def data_lock() -> FileLock:
    """Returns the lock to have while data are made or downloaded, so that the ranks of a node, or two runs, do not
    do so twice."""
    return FileLock(Path(get_base_dir(), "data.lock"))


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
            place = sysconfig.get_paths()["stdlib"]
            raise UserError(f"this Python has no library sources in {place}; set DATA_DIR to a folder of text")
        path.parent.mkdir(exist_ok=True)
        atomic_write(path, "".join(lines))
    return str(path)


# ----------------------------------------------------------------------------------------------------------------------
# The choice


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
        if missing := [name for name in names if not (folder / name).exists()]:
            _download(folder, missing, num_workers, deadline)
    return str(folder)


def _download(folder: Path, names: list[str], num_workers: int, deadline: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = len(names) * SHARD_BYTES, shutil.disk_usage(folder).free
    sizes = f"{len(names)} shards (about {format_bytes(needed)}; {format_bytes(free)} free) into {folder}"
    print0(f"Downloading {sizes}")
    if needed > free:
        remedy = "free some space, ask for less, or set NANOCHAT_BASE_DIR to a larger disk"
        raise UserError(f"cannot download {sizes}; {remedy}")
    if problem := url_problem(hub_url(DATASET, names[0])):
        raise UserError(f"cannot download the dataset: {problem}; {NO_NETWORK_HINT}")
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


def found_data() -> str | None:
    """Returns the text in the base directory: the folder of FineWeb-Edu shards, or else the file of the embedded corpus
    that was built last, or None."""
    downloaded, corpora = (Path(get_base_dir(), name) for name in ("base_data", "embedded_data"))
    if len(list(downloaded.glob("*.parquet"))) >= 2:
        return str(downloaded)
    return max(map(str, corpora.glob("*_mb_of_python_*.jsonl")), key=os.path.getmtime, default=None)


def ensure_data(data_dir: str | None = None, *, column: str = "", num_shards: int = 8) -> str:
    """
    Returns the folder or file of text to train on. It is chosen as the docstring of this module says, and made or
    downloaded if necessary. Text of the user's is looked at, and stored if need be.

    - data_dir: the value of --data-dir. None or "" means DATA_DIR.
    - column: the value of --text-column, which every reader of the folder needs, too. "" means TEXT_COLUMN.
    - num_shards: the number of training shards to download from the hub

    All ranks must call this function together. The first of them chooses. Raises UserError if DATA_DIR cannot be used,
    and if the ranks have different text.
    """
    folder, what = data_dir or os.environ.get("DATA_DIR"), "as asked for"
    if not folder and text_column(column) != "text":
        raise UserError("--text-column (TEXT_COLUMN) is for text of your own; add --data-dir (DATA_DIR)")
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
            what = "the embedded corpus; for FineWeb-Edu: python -m nanochat_fp4.data.dataset -n 8"
    found = survey(folder)
    if len(texts := set(of_all_ranks(str(found)))) > 1:
        raise UserError(f"the processes have different text ({' | '.join(sorted(texts))}); give all nodes the same")
    for split in ("train", "val"):  # A damaged file must not be found hours into a run.
        open_text(split, folder, column)
    print0(f"Data: {found.folder} ({what}): {found}")
    return str(found.folder)


def add_data_arguments(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --data-dir and --text-column, for ensure_data. `default` says where text comes from without them, for
    --help."""
    parser.add_argument(
        "--data-dir", default="", help=f"folder of parquet shards or text (default: $DATA_DIR, else {default})"
    )
    parser.add_argument(
        "--text-column", default="", help="its column, or JSON field, with the text (default: $TEXT_COLUMN, else text)"
    )


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
