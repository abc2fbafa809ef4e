"""Makes the texts of the stored runs again, and measures how long an epoch of a text is, and what it has in common with
its validation text.

    python -m lab.texts make 1db8be907300 --corpus CORPUS --code CODE --out folder
    python -m lab.texts make --public --sdists archives --out folder            # from PyPI (lab/public_text.py)
    python -m lab.texts epoch --data-dir folder --max-seq-len 256               # with the base directory's tokenizer
    python -m lab.texts cut --data-dir folder --max-seq-len 256 --out pieces    # documents cut to fit into the rows
    python -m lab.texts overlap --data-dir folder                               # of training and validation text

A text is named by its data_key, a hash of its shards' names and sizes. lab/private_texts.txt names the sources of
CORPUS and CODE, and their licences. Other texts need no command, because --data-dir takes a folder of text files.

A row of T + 1 tokens takes whole documents while they fit. The rest of the row is filled by a document that is cropped.
The cropped part is not read, in this epoch or another. Long documents in short rows therefore lose most of their text.
"""

import argparse
import contextlib
import hashlib
import io
import itertools
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lab import public_text
from lab.study.sweep_runs import data_key
from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.common import print0
from nanochat_fp4.data.dataloader import Documents, packed_rows
from nanochat_fp4.data.dataset import open_text
from nanochat_fp4.data.tokenizer import get_tokenizer

# The shards of each text, by its data_key: the name of a shard -> the shard of CORPUS or CODE that it is a copy of.
PROSE, CODE = ([f"{folder}/shard_0000{i}.parquet" for i in range(3)] for folder in ("corpus", "code"))
# Half of this shard is prose of corpus/shard_00003.parquet, and half is code that is in no other shard.
MIXED = "code/val_mixed.parquet"
TEXTS = {
    "0ca8b83e6a47": {f"shard_0000{i}.parquet": f"corpus/shard_0000{i}.parquet" for i in range(4)},
    "1db8be907300": {
        f"shard_0000{i}.parquet": shard
        for i, shard in enumerate([*(shard for pair in zip(PROSE, CODE) for shard in pair), MIXED])
    },
    "6c479da8d6f0": {f"shard_0000{i}.parquet": shard for i, shard in enumerate([*PROSE, CODE[0], MIXED])},
    "86aa8225160f": {f"shard_0000{i}.parquet": shard for i, shard in enumerate([*PROSE, *CODE, MIXED])},
    # The training text of this one contains the prose of its validation text, half of which is thus not held out.
    "b02ca4613600": {
        **{shard.replace("code/shard", "code"): shard for shard in CODE},
        **{f"prose_0000{i}.parquet": f"corpus/shard_0000{i}.parquet" for i in range(4)},
        "val_mixed.parquet": MIXED,
    },
}
SHARD = 100_000_000  # The characters of a shard of the public text.
WORDS = 13  # Two documents have a passage in common if they share so many words in a row.
GROUP = 1024  # The number of documents in a row group.
# The number of documents of a shard that are tokenized to find its characters per token, and the length of the shortest
# piece as a share of the longest.
SAMPLE, SHORTEST_PIECE = 1000, 0.25


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder that becomes `path` when the block ends, so that a folder of that name is always
    complete."""
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)  # A killed process may have left it.
    tmp.mkdir(parents=True)
    try:
        yield tmp
        shutil.rmtree(path, ignore_errors=True)
        tmp.rename(path)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def make(name: str, corpus: Path, code: Path, out: Path) -> None:
    """Copies the shards of a text to `out` under their names in the text. Raises UserError if a shard is missing or is
    another one."""
    if name not in TEXTS:
        raise UserError(f"no text is named {name}; use one of {', '.join(TEXTS)} (docs/texts.md)")
    folders = {"corpus": corpus, "code": code}
    with new_folder(out) as folder:
        for target, source in TEXTS[name].items():
            kind, _, shard = source.partition("/")
            try:
                shutil.copyfile(folders[kind] / shard, folder / target)
            except OSError as e:
                raise UserError(f"--{kind}: {e.strerror}: {folders[kind] / shard}; see docs/texts.md") from None
        if (found := data_key(str(folder))) != name:
            raise UserError(f"the shards are those of {found}, not of {name}; give the folders of docs/texts.md")


def make_public(sdists: Path, out: Path) -> None:
    """Writes the public text to `out`: training shards of about SHARD characters, and a last one for validation."""
    training, validation = public_text.documents(sdists)
    ends = zip(itertools.accumulate(map(len, training)), training)
    shards = [[text for _, text in of] for _, of in itertools.groupby(ends, key=lambda of: (of[0] - 1) // SHARD)]
    with new_folder(out) as folder:
        for i, texts in enumerate([*shards, validation]):
            (folder / f"shard_{i:05d}.parquet").write_bytes(parquet(texts))
    for name, texts in (("training", training), ("validation", validation)):
        said = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
        print0(f"{name}: {len(texts):,} documents, {sum(map(len, texts)):,} characters, sha256 {said}")
    print0(f"data_key {data_key(str(out))}")


def parquet(texts: list[str]) -> bytes:
    """Returns a parquet file with these texts, as bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    options = {"compression": "zstd", "compression_level": 12, "use_dictionary": False, "data_page_size": 1 << 26}
    pq.write_table(pa.table({"text": texts}), file, row_group_size=GROUP, **options)
    return file.getvalue()


# ----------------------------------------------------------------------------------------------------------------------
# An epoch


def epoch(tokenizer, data_dir: str, T: int) -> tuple[int, str]:
    """Measures an epoch of shuffled documents. Returns (the number of tokens that rows of T tokens train on before the
    text begins again, the end of a sentence on what they crop)."""
    source = Documents(tokenizer, T, open_text("train", data_dir), seed=1, shuffle=True)
    position = next(position for _, _, position in packed_rows(source, 64, "cpu") if position["epoch"] > 1)
    _, tokens, kept = (sum(counts) for counts in zip(*(lane["used"] for lane in position["lanes"].values())))
    share = 1 - kept / tokens
    crops = f"; rows of {T + 1:,} tokens crop away {share:.0%} of their documents" if share else ""
    return position["row"] * T, crops


def cut_text(text: str, rng: random.Random, shortest: int, longest: int) -> list[str]:
    """
    Cuts a text into pieces of at most `longest` characters and the line ends behind them, at the ends of paragraphs if
    possible. The pieces together are the text.

    The length limit of each piece is drawn between the two bounds, because pieces of many lengths pack better than
    equal ones.
    """
    pieces = []
    start, end = 0, len(text)
    while start < end:
        limit = rng.randint(shortest, longest)
        cut = end
        if end - start > limit:
            cuts = (text.rfind(sep, start + limit // 2, start + limit) for sep in ("\n\n", "\n", " "))
            cut = next((i for i in cuts if i > start), start + limit)
        while cut < end and text[cut] == "\n":
            cut += 1
        pieces.append(text[start:cut])
        start = cut
    return pieces


def cut(tokenizer, data_dir: str, out: Path, T: int) -> None:
    """Writes each shard of data_dir to the folder `out`, with its documents cut into pieces of at most about T
    tokens."""
    for shard in [*open_text("train", data_dir), *open_text("val", data_dir)]:
        texts = [text for k in range(len(shard.rows)) for text in shard.read(k)]
        sample = texts[:SAMPLE]
        tokens = sum(map(len, tokenizer.encode(sample)))
        longest = max(2, int(0.98 * T * sum(map(len, sample)) / max(1, tokens)))
        name = shard.name
        rng = random.Random(name)
        pieces = [p for text in texts for p in cut_text(text, rng, max(1, int(SHORTEST_PIECE * longest)), longest)]
        pieces = [piece.strip("\n") for piece in pieces if piece.strip()]
        (out / name).write_bytes(parquet(pieces))
        print0(f"{name}: {len(texts):,} documents, {len(pieces):,} pieces of at most {longest} characters")


# ----------------------------------------------------------------------------------------------------------------------
# What training and validation text have in common


def runs_of_words(text: str) -> np.ndarray:
    """Returns a hash of each run of WORDS words of a document. Case and punctuation do not count. Hashes can be
    compared within a process."""
    words = np.fromiter(map(hash, re.findall(r"\w+", text.lower())), np.int64).view(np.uint64)
    runs = np.zeros(max(0, len(words) - WORDS + 1), np.uint64)
    for i in range(WORDS):
        runs = runs * np.uint64(0x9E3779B97F4A7C15) + words[i : i + len(runs)]
    return runs


def overlap(data_dir: str) -> dict[str, float]:
    """Returns what the validation text has in common with the training text: "documents", their number; "same", the
    share of them that are training documents word for word; "some" and "half", the shares in which some and more than
    half of the runs of WORDS words are in the training text; "runs", the share of all those runs."""

    def texts(split: str) -> Iterator[str]:
        return (text for shard in open_text(split, data_dir) for k in range(len(shard.rows)) for text in shard.read(k))

    validation = [(hash(text), runs_of_words(text)) for text in texts("val")]
    wanted = np.unique(np.concatenate([runs for _, runs in validation]))
    found, whole = np.zeros(len(wanted) + 1, bool), set()  # The last is for hashes beyond all wanted ones.
    for text in texts("train"):
        runs = runs_of_words(text)
        at = np.searchsorted(wanted, runs)
        found[at[wanted[np.minimum(at, len(wanted) - 1)] == runs]] = True
        whole.add(hash(text))
    shares = [found[np.searchsorted(wanted, runs)].mean() if len(runs) else 0.0 for _, runs in validation]
    sizes = [len(runs) for _, runs in validation]
    return {
        "documents": len(validation),
        "same": float(np.mean([key in whole for key, _ in validation])),
        "some": float(np.mean([share > 0 for share in shares])),
        "half": float(np.mean([share > 0.5 for share in shares])),
        "runs": float(np.average(shares, weights=sizes)),
    }


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("make", "epoch", "cut", "overlap"))
    add("name", nargs="?", default="", help="make: the text's data_key")
    add("--public", action="store_true", help="make: a text from source distributions of PyPI, mostly code")
    add("--sdists", type=Path, help="make --public: folder for the source distributions, kept for the next time")
    add("--out", type=Path, help="an empty folder, or none yet")
    add("--corpus", type=Path, help="make: folder of prose (docs/texts.md)")
    add("--code", type=Path, help="make: folder of code")
    add("--data-dir", help="epoch, cut, overlap: folder of parquet shards, the last for validation")
    add("--max-seq-len", type=int, default=0, help="epoch, cut: tokens of a row")
    args = parser.parse_args(argv)
    needed = {"make": ("corpus", "code", "out"), "epoch": ("data_dir",), "cut": ("data_dir", "out")}
    needed |= {"make": ("sdists", "out")} if args.public else {}
    needed |= {"overlap": ("data_dir",)}
    if missing := [name for name in needed[args.what] if not getattr(args, name)]:
        raise UserError(f"lab.texts {args.what} needs --{missing[0].replace('_', '-')}")
    if args.what in ("epoch", "cut") and args.max_seq_len < 1:
        raise UserError(f"--max-seq-len={args.max_seq_len}: expected at least 1 token")
    if args.out and args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise UserError(f"--out={args.out} has something already; choose an empty folder, or remove it")
    if args.public:
        make_public(args.sdists, args.out)
    elif args.what == "overlap":
        of = overlap(args.data_dir)
        print0(f"{of['documents']:,} validation documents; {of['same']:.2%} of them are training documents")
        print0(f"{of['runs']:.1%} of their runs of {WORDS} words are in the training text")
        print0(f"{of['some']:.1%} of them have such a run, in {of['half']:.1%} more than half of the runs are such")
    elif args.what == "make":
        make(args.name, args.corpus, args.code, args.out)
    else:
        tokenizer = get_tokenizer()
        if args.what == "cut":
            # new_folder leaves all shards or none. Of some shards the last one would be taken for validation.
            with new_folder(args.out) as folder:
                cut(tokenizer, args.data_dir, folder, args.max_seq_len)
        tokens, lost = epoch(tokenizer, str(args.out or args.data_dir), args.max_seq_len)
        print0(f"an epoch has about {tokens:,} tokens{lost}")


if __name__ == "__main__":
    run_main(main)
