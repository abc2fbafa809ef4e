"""How many tokens of training an epoch of a text holds, and shards whose documents are cut to fit into the rows.

    python -m lab.epoch --data-dir text --max-seq-len 256                  # with the base directory's tokenizer
    python -m lab.epoch --data-dir text --max-seq-len 256 --cut-to pieces  # writes the shards again, and counts theirs

A row of T + 1 tokens takes documents whole while they fit. What is left is filled by a document that is cropped. The
rest of that one is not read, in this epoch or another. Long documents in short rows lose most of their text. Runs that
must not read a text twice need an epoch of their length.
"""

import argparse
import random
from pathlib import Path

from lab.debian import GROUP, parquet
from nanochat_fp4.common import print0
from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.data.dataloader import BestFitLoader, Text
from nanochat_fp4.data.dataset import open_shards
from nanochat_fp4.data.shards import cut_text, new_folder
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.errors import UserError, run_main

SAMPLE = 1000  # documents of each shard, for the characters of a token
SHORTEST = 0.25  # a piece, of the longest


def epoch(tokenizer, data_dir: str, T: int) -> tuple[int, str]:
    """(tokens that rows of T train on before the text begins again, what they crop away), documents shuffled."""
    text = Text(data_dir, data_seed=1, shuffle_documents=True)
    loader = BestFitLoader(tokenizer, 64, T, "train", device="cpu", text=text)
    state = next(state for _, _, state in loader if state["epoch"] > 1)
    return state["row"] * T, loader.cropped()


def cut(tokenizer, data_dir: str, out: Path, T: int) -> None:
    """Writes each shard of data_dir to the folder out, its documents in pieces of at most about T tokens."""
    for shard in [*open_shards("train", data_dir), *open_shards("val", data_dir)]:
        texts = [text for k in range(shard.num_row_groups) for text in shard.read(k)]
        sample = texts[:SAMPLE]
        tokens = sum(map(len, tokenizer.encode(sample)))
        longest = max(2, int(0.98 * T * sum(map(len, sample)) / max(1, tokens)))
        name = Path(shard.path).name
        rng = random.Random(name)
        pieces = [p for text in texts for p in cut_text(text, rng, max(1, int(SHORTEST * longest)), longest)]
        (out / name).write_bytes(parquet([pieces[i : i + GROUP] for i in range(0, len(pieces), GROUP)]))
        print0(f"{name}: {len(texts):,} documents, {len(pieces):,} pieces of at most {longest} characters")


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, help="folder of parquet shards, the last for validation")
    parser.add_argument("--max-seq-len", type=int, required=True, help="tokens of a row")
    parser.add_argument("--cut-to", type=Path, help="folder for the same shards, with documents cut to fit")
    args = parser.parse_args(argv)
    if args.max_seq_len < 1:
        raise UserError(f"--max-seq-len={args.max_seq_len}: expected at least 1 token")
    tokenizer = get_tokenizer()
    if args.cut_to:
        if args.cut_to.exists() and (not args.cut_to.is_dir() or any(args.cut_to.iterdir())):
            what = "shards" if list(args.cut_to.glob("*.parquet")) else "something else"
            raise UserError(f"--cut-to={args.cut_to} has {what}; choose an empty folder, or remove them")
        with new_folder(args.cut_to) as folder:  # not some of the shards, of which the last would be for validation
            cut(tokenizer, args.data_dir, folder, args.max_seq_len)
    tokens, cropped = epoch(tokenizer, str(args.cut_to or args.data_dir), args.max_seq_len)
    print0(f"an epoch has about {tokens:,} tokens; {cropped}")


if __name__ == "__main__":
    run_main(main)
