"""
Trains the tokenizer on the training split. It is a byte-pair encoding, made by the package rustbpe.

    python -m scripts.tok_train --max-chars=2000000000 --vocab-size=65536

The program writes tokenizer.json and token_bytes.pt into <base dir>/tokenizer. token_bytes.pt holds the number of bytes
of text for each token, by which a loss per token becomes bits per byte. Only --overwrite replaces a tokenizer that is
nanochat's, that cannot be read, or that checkpoints in <base dir> were made with.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nanochat_fp4.cli import ArgumentParser, UserError, format_seconds, run_main
from nanochat_fp4.common import base_dir_variable, get_base_dir, print0
from nanochat_fp4.data.dataset import Survey, add_data_arguments, ensure_data, parquets_iter_batched
from nanochat_fp4.data.tokenizer import (
    FILE_NAME,
    PICKLE_NAME,
    SPECIAL_TOKENS,
    RustBPETokenizer,
    get_tokenizer,
    get_tokenizer_dir,
    save_token_bytes,
    tokenizer_lock,
)
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.locks import running_runs
from nanochat_fp4.progress import Progress
from nanochat_fp4.training.flags import changed_flags
from nanochat_fp4.training.load_model import checkpoints_made_with

ROUND_TRIP_TEXT = "Hello world! It's a test: 123, 4567, 89.\n\tTabs,  spaces\r\n@#$%^&*() naïve 你好世界 🌍 <|bos|>"
MAX_VOCAB_SIZE = 2**24  # Ids are 32-bit numbers, and no text yields this many tokens.


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Train a BPE tokenizer")
    add = parser.add_argument
    add("--max-chars", type=int, default=10_000_000_000, help="characters to train on (default: 10B)")
    add("--doc-cap", type=int, default=10_000, help="characters per document (default: 10,000)")
    add("--vocab-size", type=int, default=32768, help="vocabulary size (default: 32768 = 2^15)")
    add_data_arguments(parser, "as for training")
    add("--overwrite", action="store_true", help="replace the tokenizer although checkpoints were made with it")
    args = parser.parse_args(argv)
    if args.max_chars < 1 or args.doc_cap < 1:
        raise UserError("--max-chars and --doc-cap must be at least 1")
    least, most = 256 + len(SPECIAL_TOKENS), min(MAX_VOCAB_SIZE, args.max_chars)
    if not least <= args.vocab_size <= most:
        raise UserError(
            f"--vocab-size={args.vocab_size}: expected {least} to {most}, with --max-chars={args.max_chars}"
        )
    return args


def documents(survey: Survey, column: str, max_chars: int, doc_cap: int, progress: Progress) -> Iterator[str]:
    """Yields the training documents, each cut to `doc_cap` characters, until there were `max_chars` characters."""
    seen = 0
    for batch in parquets_iter_batched("train", data_dir=survey, column=column):
        for text in batch:
            text = text[:doc_cap]
            seen += len(text)
            progress.update(len(text))
            yield text
            if seen > max_chars:
                return


def check_own(tokenizer_dir: str | os.PathLike) -> None:
    """Raises UserError if a folder holds the tokenizer of nanochat, whose bits per byte would be wrong with another
    token_bytes.pt. The plan calls this function, too."""
    if Path(tokenizer_dir, PICKLE_NAME).exists():
        convert = f"{base_dir_variable(Path(tokenizer_dir).parent)}python -m nanochat_fp4.data.tokenizer --allow-pickle"
        raise UserError(
            f"{tokenizer_dir} holds nanochat's tokenizer, and another one would replace files of it; set another "
            f"NANOCHAT_BASE_DIR, or train with this one: {convert}, then set VOCAB_SIZE to what it prints"
        )


def check_replaceable(overwrite: bool) -> None:
    """Raises UserError if the present tokenizer must not be replaced.

    This is so while a run trains with it, and without `overwrite` if it is nanochat's, if it cannot be read, or if
    checkpoints were made with it, because they fit no other tokenizer.
    """
    folder = Path(get_tokenizer_dir())
    if users := running_runs(get_base_dir()):
        raise UserError(
            f"{', '.join(users)} trains with the tokenizer in {folder}; wait for it or stop it, or train the new one "
            "under another NANOCHAT_BASE_DIR"
        )
    if overwrite:
        return
    check_own(folder)
    if not (folder / FILE_NAME).exists():
        return
    try:
        made = checkpoints_made_with(get_tokenizer())
    except UserError as e:
        raise UserError(f"{e}, with --overwrite to replace this file") from e
    if made:
        more = f" and {len(made) - 8} more" if len(made) > 8 else ""
        raise UserError(
            f"{folder} holds the tokenizer of {', '.join(made[:8])}{more}, which fit no other; keep it, train the new "
            "one under another NANOCHAT_BASE_DIR, or give these up with --overwrite"
        )


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_replaceable(args.overwrite)
    print0(f"max_chars: {args.max_chars:,}\ndoc_cap: {args.doc_cap:,}\nvocab_size: {args.vocab_size:,}")
    survey = ensure_data(args.data_dir, column=args.text_column)

    start = time.monotonic()
    with Progress(desc="read", unit="char") as progress:
        texts = documents(survey, args.text_column, args.max_chars, args.doc_cap, progress)
        tokenizer = RustBPETokenizer.train_from_iterator(texts, args.vocab_size)
    train_time = time.monotonic() - start
    vocab_size = tokenizer.get_vocab_size()
    print0(f"Training time: {train_time:.2f}s")
    if vocab_size < args.vocab_size:
        print0(f"Note: the text yields only {vocab_size:,} tokens, fewer than --vocab-size {args.vocab_size:,}")
    # Every text must come back unchanged, even if training never saw some of its bytes or names of tokens.
    if tokenizer.decode(tokenizer.encode(ROUND_TRIP_TEXT)) != ROUND_TRIP_TEXT:
        raise UserError("the new tokenizer does not give a text back as it was; not saved. Try another --vocab-size")

    tokenizer_dir = get_tokenizer_dir()
    with tokenizer_lock():
        check_replaceable(args.overwrite)  # A run may have begun meanwhile.
        tokenizer.save(tokenizer_dir, asked_tokens=args.vocab_size)
        token_bytes = save_token_bytes(tokenizer, tokenizer_dir)

    lengths = token_bytes[token_bytes > 0].float()
    about = {
        "Flags": changed_flags(args, parse_args([])),
        "Data": survey.folder,
        "Tokens": vocab_size,
        "Special tokens": len(tokenizer.get_special_tokens()),
        "Bytes of the vocabulary's tokens": f"{lengths.mean():.2f} ± {lengths.std():.2f}, at most {lengths.max():.0f}",
        "Fingerprint": tokenizer.fingerprint(),
        "Training time": format_seconds(train_time),
    }
    get_report().log(section="Tokenizer training", data=[about])


if __name__ == "__main__":
    run_main(main)
