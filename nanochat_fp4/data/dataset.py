"""
Training text is a folder of parquet shards with a string column `text`. The last shard is the validation split.

The folder is the first of these sources that exists. ensure_data prints the choice and its reason.

1. --data-dir or DATA_DIR. Parquet shards are used as they are. Other files (.txt, .md, .jsonl, .jsonl.gz, .json.gz) are
   cut into documents. Their shards are written once, into the base directory. --text-column or TEXT_COLUMN names the
   column or JSON field of the text (default: text).
2. FineWeb-Edu shards that were downloaded before, in nanochat's folder <base dir>/base_data.
3. The embedded corpus, if it was built before.
4. FineWeb-Edu from the hub, if the hub answers within a few seconds.
5. The embedded corpus, which is built now from Python's standard library (corpus.py).

FineWeb-Edu's validation split is its shard 1822, whatever the number of downloaded training shards, so that losses of
runs with different amounts of text can be compared.

    python -m nanochat_fp4.data.dataset -n 240       download shards 0 to 239 and shard 1822 (resumable)
    python -m nanochat_fp4.data.dataset --embedded   build the embedded corpus
    python -m nanochat_fp4.data.dataset --ensure     choose a source as above
"""

import argparse
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from nanochat_fp4.cli import ArgumentParser, UserError, format_bytes, one_line, parse_finite, run_main
from nanochat_fp4.common import get_base_dir, get_dist_info, print0
from nanochat_fp4.data.corpus import EMBEDDED_MB, TEXT_SUFFIXES, build_embedded_corpus, convert, files_below
from nanochat_fp4.data.download import check_space, download_file, hub_problem
from nanochat_fp4.data.shards import Shard, data_lock, digest_of, index_to_filename, open_shard, text_column

# This is FineWeb-Edu 100B, which nanochat's author shuffled and cut into parquet shards.
DATASET = "karpathy/fineweb-edu-100b-shuffle"
MAX_SHARD = 1822  # This is the last shard. Its name sorts last, so it is the validation split.
SHARD_BYTES = 100_000_000  # An estimate of the size of a shard.

NO_NETWORK_HINT = (
    "without a network set DATA_DIR to a folder of text or parquet files, or use the embedded corpus: "
    "python -m nanochat_fp4.data.dataset --embedded"
)


def list_parquet_files(data_dir: str | os.PathLike | None = None) -> list[str]:
    """Returns the sorted paths of the shards in `data_dir`, or in the folder that training would use. Raises
    UserError if it is not a folder."""
    data_dir = Path(data_dir) if data_dir is not None else Path(ensure_data(make=False))
    if not data_dir.is_dir():
        raise UserError(f"{data_dir} is not a folder; set DATA_DIR (--data-dir) to a folder of text or parquet files")
    return [str(p) for p in sorted(data_dir.iterdir()) if p.suffix == ".parquet" and p.is_file()]


def open_shards(split: str, data_dir: str | os.PathLike | None = None, column: str = "") -> list[Shard]:
    """
    Opens and checks the shards of a split: all but the last for 'train', and the last for 'val'. They have at least one
    row.

    `column` is that of shards.text_column. Raises UserError for data that cannot be used, and ValueError for another
    split.
    """
    if split not in ("train", "val"):
        raise ValueError(f"split must be 'train' or 'val', not {split!r}")
    paths = list_parquet_files(data_dir)
    if len(paths) < 2:
        place = data_dir or "the folder"
        raise UserError(f"{place} has {len(paths)} shards; expected 2, the last for validation; {NO_NETWORK_HINT}")
    shards = [open_shard(path, column) for path in (paths[:-1] if split == "train" else paths[-1:])]
    if sum(shard.num_rows for shard in shards) == 0:
        raise UserError(f"the {split} shards in {Path(paths[0]).parent} hold no rows; put text into them")
    return shards


def validation_text(data_dir: str | os.PathLike, column: str = "") -> str:
    """Returns a name of the validation text of a folder. Two runs have the same name only if they validate on the
    same text."""
    digest, column = digest_of(list_parquet_files(data_dir)[-1]), text_column(column)
    return digest if column == "text" else f"{digest} {column}"


def parquets_iter_batched(
    split: str, start: int = 0, step: int = 1, data_dir: str | os.PathLike | None = None, column: str = ""
) -> Iterator[list[str]]:
    """
    Yields the row groups of a split ('train' or 'val') once, each as a list of documents.

    `start` and `step` deal the row groups of each shard to ranks, for example with start=rank and step=world_size.
    """
    for shard in open_shards(split, data_dir, column):
        for index in range(start, len(shard.rows), step):
            yield shard.read(index)


# ----------------------------------------------------------------------------------------------------------------------
# The user's folder


def check_own_data(data_dir: str, column: str = "") -> list[Path]:
    """Looks at DATA_DIR, a folder or a single text file, without reading its text. Returns the files that must become
    shards; none where the folder has shards that are used as they are. Raises UserError if there is no text that can be
    used."""
    column = text_column(column)
    folder = Path(data_dir).expanduser()
    if folder.is_file() and folder.name.lower().endswith(TEXT_SUFFIXES):
        return [folder]
    if not folder.is_dir():
        problem = "a file of another kind" if folder.exists() else "not there"
        expected = f"a folder of text or parquet files, or a text file ({', '.join(TEXT_SUFFIXES)})"
        raise UserError(f"DATA_DIR (--data-dir) {data_dir} is {problem}; it must be {expected}")
    shards = list_parquet_files(folder)
    below = files_below(folder)
    texts = [path for path in below if path.suffix.lower() != ".parquet"]
    deeper = (path.parent for path in below if path.suffix.lower() == ".parquet" and path.parent != folder)
    without_column = next((path for path in shards if open_shard(path, column).column != column), None)
    # Shards that were written here have the column text, whatever the user names.
    if without_column and not folder.is_relative_to(get_base_dir()):
        raise UserError(f"{without_column} has no column named {column}; correct --text-column (TEXT_COLUMN)")
    if len(shards) >= 2:
        first, last = os.path.basename(shards[0]), os.path.basename(shards[-1])
        if last.startswith("train") and not first.startswith("train"):
            raise UserError(
                f"{folder}: {last} would be the validation split, which has the last name; rename the files"
            )
        for split in ("train", "val"):
            # This reads the footers of all shards now, so that a damaged one is not found hours into a run.
            open_shards(split, folder, column)
        if texts:
            print0(f"{folder}: using its {len(shards)} parquet shards, not its {len(texts)} text files")
        return []
    if not shards and not texts:
        accepted = f".parquet files with a text column, or {', '.join(TEXT_SUFFIXES)} files"
        raise UserError(f"DATA_DIR (--data-dir) {data_dir} holds no data; expected {accepted}")
    if parquet_folder := next(deeper, None):
        raise UserError(
            f"{folder} is not read, because {parquet_folder} has parquet files; name that folder, or move them"
        )
    return [Path(p) for p in shards] + texts


def _own_data(data_dir: str, column: str = "") -> str:
    """Returns the folder of shards for DATA_DIR, which is this folder itself or the converted copy of its text.
    Raises UserError if the folder has no text that can be used."""
    folder, files = Path(data_dir).expanduser(), check_own_data(data_dir, column)
    return str(convert(folder, files, text_column(column)) if files else folder)


# ----------------------------------------------------------------------------------------------------------------------
# The hub


def download_shards(num_files: int = -1, num_workers: int = 4, deadline: float = 1800.0) -> str:
    """
    Downloads the training shards 0 to num_files - 1 (-1: all 1822) and the validation shard into <base dir>/base_data.
    Returns this folder.

    `num_workers` shards are downloaded at a time. Existing shards are kept. The needed space is printed, and compared
    with the free space, first. `deadline` is for each shard, in seconds. Raises UserError if a download fails, and
    complete shards stay.
    """
    if num_files < -1 or num_files == 0 or num_workers < 1:
        raise UserError(f"-n {num_files} -w {num_workers}: expected 1 to {MAX_SHARD} files, or -1; 1 worker")
    num = MAX_SHARD if num_files == -1 else min(num_files, MAX_SHARD)
    folder = Path(get_base_dir()) / "base_data"
    folder.mkdir(parents=True, exist_ok=True)
    names = list(map(index_to_filename, [MAX_SHARD, *range(num)]))
    missing = [name for name in names if not (folder / name).exists()]
    if not missing:
        print0(f"All {num} training shards and the validation shard are in {folder}")
        return str(folder)
    if names[0] in missing and (shards_before := list_parquet_files(folder)):
        last = Path(shards_before[-1]).name
        print0(f"Note: {names[0]} becomes the validation split; {last} was it, and is trained on from now on")
    needed, free = len(missing) * SHARD_BYTES, format_bytes(shutil.disk_usage(folder).free)
    sizes = f"about {format_bytes(needed)}; {free} free"
    print0(f"Downloading {len(missing)} of {len(names)} shards ({sizes}) into {folder}")
    check_space(folder, needed, f"{len(missing)} shards")
    if problem := hub_problem(DATASET, index_to_filename(0)):
        raise UserError(f"cannot download the dataset: {problem}; {NO_NETWORK_HINT}")
    stop = threading.Event()

    def fetch(name: str) -> None:
        if not (stop.is_set() or (folder / name).exists()):
            download_file(
                name, folder / name, dataset=DATASET, deadline=deadline, hint=NO_NETWORK_HINT, validate=open_shard,
                stop=stop,
            )  # fmt: skip

    with data_lock(), ThreadPoolExecutor(num_workers) as pool:
        try:
            for job in as_completed([pool.submit(fetch, name) for name in missing]):
                job.result()
        finally:
            stop.set()  # After a failure or Ctrl-C this ends the other threads within a second.
    print0(f"Done: {num} training shards and the validation shard in {folder}")
    return str(folder)


# ----------------------------------------------------------------------------------------------------------------------
# The choice


def ensure_data(
    data_dir: str | None = None,
    *,
    column: str = "",
    num_shards: int = 8,
    embedded_mb: float | None = None,
    make: bool = True,
) -> str:
    """
    Returns the folder of shards to train on. It is chosen as the docstring of this module says, and made or downloaded
    if necessary.

    - data_dir: the value of --data-dir. None or "" means DATA_DIR.
    - column: the value of --text-column, which every reader of the folder needs, too. "" means TEXT_COLUMN.
    - num_shards: the number of training shards to download from the hub
    - embedded_mb: the size of the embedded corpus. None means the existing corpus, or the default size.
    - make: False only looks for data and prints nothing. Even then, text in DATA_DIR is converted.

    Every rank may call this function at the same time. Raises UserError if DATA_DIR cannot be used, or if there is no
    data and make is False.
    """
    data_dir = data_dir or os.environ.get("DATA_DIR")
    if not data_dir and text_column(column) != "text":
        raise UserError("--text-column (TEXT_COLUMN) is for text of your own; add --data-dir (DATA_DIR)")
    say = print0 if make else (lambda line: None)
    if data_dir:
        folder = _own_data(data_dir, column)
        say(f"Data: {folder} (DATA_DIR)")
        return folder
    base = Path(get_base_dir())
    downloaded, embedded = base / "base_data", base / "embedded_data"
    # Another rank may be downloading. This rank waits for it, because otherwise it would train on fewer shards.
    with data_lock() if get_dist_info()[3] > 1 and downloaded.is_dir() else contextlib.nullcontext():
        shards = list_parquet_files(downloaded) if downloaded.is_dir() else []
    if len(shards) >= 2:
        say(f"Data: {len(shards)} FineWeb-Edu shards in {downloaded} (downloaded before)")
        fixed, last = index_to_filename(MAX_SHARD), Path(shards[-1]).name
        if last != fixed:
            say(f"Note: without {fixed} the validation split is {last}, the last of these shards")
        return str(downloaded)
    if (embedded / "manifest.json").is_file():
        # If another size is asked for, the corpus is built again.
        folder = build_embedded_corpus(embedded_mb) if make else str(embedded)
        say(f"Data: the embedded corpus in {folder} (for FineWeb-Edu: python -m nanochat_fp4.data.dataset -n 8)")
        return folder
    if not make:
        hint = "run python -m nanochat_fp4.data.dataset --ensure, or set DATA_DIR to a folder of text"
        raise UserError(f"there is no training text in {base} yet; {hint}")
    problem = hub_problem(DATASET, index_to_filename(0))
    if problem is None:
        try:
            folder = download_shards(max(1, num_shards))
            say(f"Data: FineWeb-Edu shards in {folder}")
            return folder
        except UserError as e:
            problem = one_line(e).removesuffix(f"; {NO_NETWORK_HINT}")
    folder = build_embedded_corpus(embedded_mb)
    say(f"Data: the embedded corpus in {folder} ({problem})")
    return folder


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
    parser.add_argument(
        "-n", "--num-files", type=int, default=None, help="number of training shards to download (-1 = all 1822)"
    )
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="parallel downloads (default: 4)")
    parser.add_argument(
        "--deadline", type=parse_finite, default=1800, help="seconds after which a shard's download gives up"
    )
    add_data_arguments(parser, "as the other flags say")
    parser.add_argument("--embedded", action="store_true", help="build the embedded corpus instead")
    parser.add_argument("--size-mb", type=parse_finite, default=None, help=f"its size (default: {EMBEDDED_MB:g})")
    parser.add_argument(
        "--ensure", action="store_true", help="DATA_DIR, downloaded shards, the hub or the embedded corpus"
    )
    args = parser.parse_args(argv)
    chosen = args.embedded or args.ensure or args.num_files is not None
    args.num_files = -1 if args.num_files is None else args.num_files
    if data_dir := args.data_dir or (not chosen and os.environ.get("DATA_DIR")):
        folder = ensure_data(data_dir, column=args.text_column)
    elif args.embedded:
        folder = build_embedded_corpus(args.size_mb)
    elif args.ensure:
        count = MAX_SHARD if args.num_files == -1 else args.num_files
        folder = ensure_data(num_shards=count, embedded_mb=args.size_mb)
    else:
        folder = download_shards(args.num_files, args.num_workers, args.deadline)
    for split in ("train", "val"):
        shards = open_shards(split, folder, args.text_column)
        groups, documents = sum(len(s.rows) for s in shards), sum(s.num_rows for s in shards)
        print0(f"{folder}: {split}: {len(shards)} shards, {groups} row groups, {documents:,} documents")


if __name__ == "__main__":
    run_main(main)
