"""
Batches of packed rows, for pre-training and mid-training. Any number of processes computes the same micro-batches, and
resumes them exactly.

A row of T+1 tokens takes the longest buffered document that fits, again and again. When none fits, one fills the row.
There is no padding. This best fit is nanochat's. Each document begins with the BOS token, and so does each row.

The rows of a run are numbered, and row k is row k // LANES of packer k % LANES. A step takes the next rows of the run.
They are dealt to its micro-batches one by one, as far as the packers allow: with stride = gcd(micro-batches of a step,
LANES), a micro-batch has every stride-th row. Rank r of W computes the micro-batches r, r + W, r + 2 W, ... For 4
packers and steps of 2 micro-batches of 4 rows:

    row          0  1  2  3   4  5  6  7 |  8  9 10 11  12 13 14 15 |
    packer       0  1  2  3   0  1  2  3 |  0  1  2  3   0  1  2  3 |   row % 4
    micro-batch  0  1  0  1   0  1  0  1 |  0  1  0  1   0  1  0  1 |   every second row
    1 process    0  0  0  0   0  0  0  0 |  0  0  0  0   0  0  0  0 |
    2 processes  0  1  0  1   0  1  0  1 |  0  1  0  1   0  1  0  1 |   rank 0 has packers 0 and 2

Three processes have 3 micro-batches in a step, or 6, ..., so the stride is 1 and each rank has all packers. A rank
packs all rows of its packers and drops those of other ranks, so the state of a packer is the same on all ranks that
have it. A whole step is packed at once, in a thread, while the step before is computed.

A position exists between two steps. It names the documents in the buffers, and not only the place in the files. It is
small (some 20 KB) and can be stored as JSON. Every rank has its own, and join_positions makes one of them.
"""

import bisect
import functools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.common import get_dist_info, print0
from nanochat_fp4.data.dataset import open_shards
from nanochat_fp4.data.shards import Shard, Stored, in_random_order

LANES = 8  # The number of packers. With 1, 2, 4 or 8 processes none is shared.
VERSION = 2  # The version of a position.

Batches = Iterator[tuple[Tensor, Tensor, dict[str, Any]]]


def evaluation_rows(tokens: int, B: int, T: int, world_size: int) -> tuple[int, int]:
    """Returns how many rows of T tokens an evaluation on `tokens` has, at least one, and how many batches of B rows
    each process takes."""
    rows = max(1, tokens // T)
    return rows, -(-rows // (B * world_size))


# ----------------------------------------------------------------------------------------------------------------------
# Packing


def part(document: np.ndarray, first: int, length: int) -> np.ndarray:
    """The BOS token, and up to length - 1 tokens of the document from token `first` after its own BOS token on."""
    return np.concatenate([document[:1], document[1 + first : first + length]])


class Packer:
    """
    Best fit over the groups lane, lane + LANES, ... of `source`, whose groups count on through the epochs.

    A source has T, `buffer` (the number of documents to hold back), `refill` (the number to tokenize at a time),
    read(g), which returns the documents of a group, and encode(documents), which returns int32 arrays with the BOS
    token in front. If no buffered document fits, source.filler(keys) fills the row, and the rest of it is not used. If
    the source is `whole`, everything is used: T tokens of a longer document are a piece for themselves, and the rest of
    a filler becomes a piece again, each with another BOS token.

    A piece in the buffer has the key (length, g, i, first) for part(document i of group g, first, length). The buffer
    is sorted, so a binary search finds the longest piece that fits. Pieces of the same length leave the buffer in the
    order in which they came.
    """

    def __init__(self, source: Any, lane: int, state: dict[str, Any] | None = None):
        self.source, self.g, self.i = source, lane, 0  # The document to be read next.
        self.documents: list[Any] | None = None  # The documents of group g, or None until they are needed.
        self.keys: list[tuple[int, int, int, int]] = []
        self.pieces: list[np.ndarray] = []  # The pieces of the same keys in the same order, int32.
        self.used = [0, 0, 0]  # Of what is in rows: documents, their tokens, and how many of these were not cropped.
        if state is None:
            return
        (self.g, self.i), (documents, tokens, kept) = state["next"], state["used"]
        self.used, places = [documents, tokens, kept], sorted(map(tuple, state["buffer"]))
        if self.g % LANES != lane or min(self.g, self.i, *(n for place in places for n in place)) < 0:
            raise ValueError(f"it is not of packer {lane}")
        for g, group in groupby(places, key=lambda place: place[0]):
            texts, of_group = source.read(g), list(group)
            numbers = sorted({i for _, i, _, _ in of_group})
            encoded = dict(zip(numbers, source.encode([texts[i] for i in numbers])))
            for _, i, first, length in of_group:
                self.insert(part(encoded[i], first, length), g, i, first)

    def insert(self, piece: np.ndarray, g: int, i: int, first: int) -> None:
        key = (len(piece), g, i, first)
        place = bisect.bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.pieces.insert(place, piece)

    def refill(self) -> None:
        """Reads the next documents into the buffer."""
        while self.documents is None or self.i >= len(self.documents):
            if self.documents is not None:
                self.g, self.i = self.g + LANES, 0
            self.documents = self.source.read(self.g)
        batch, T = self.source.encode(self.documents[self.i : self.i + self.source.refill]), self.source.T
        for i, document in enumerate(batch, self.i):
            if self.source.whole:
                for first in range(0, max(1, len(document) - 1), T):
                    self.insert(part(document, first, T + 1), self.g, i, first)
            else:
                self.insert(document, self.g, i, 0)
        self.i += len(batch)

    def next_row(self) -> np.ndarray:
        """Packs one row, int32 (T+1,)."""
        room, row = self.source.T + 1, []
        while room > 0:
            while len(self.keys) < self.source.buffer:
                self.refill()
            fitting = bisect.bisect_left(self.keys, (room + 1,))
            if fitting:  # Of the longest pieces that fit, the first to arrive.
                place = bisect.bisect_left(self.keys, (self.keys[fitting - 1][0],))
            else:
                place = self.source.filler(self.keys)
            (length, g, i, first), piece = self.keys.pop(place), self.pieces.pop(place)
            row.append(piece[:room])
            kept = len(row[-1])
            if self.source.whole and kept < length:
                self.insert(part(piece, kept - 1, length), g, i, first + kept - 1)
                length = kept
            room -= kept
            self.used = [n + more for n, more in zip(self.used, (1, length, kept))]
        return np.concatenate(row)

    def state(self) -> dict[str, Any]:
        buffer = sorted([g, i, first, length] for length, g, i, first in self.keys)
        return {"next": [self.g, self.i], "used": self.used, "buffer": buffer}


def packed_rows(
    source: Any,
    B: int,
    device: str | torch.device,
    micro_batches: int | None = None,
    position: dict[str, Any] | None = None,
    num_rows: int | None = None,
    ranks: tuple[int, int] | None = None,
) -> Batches:
    """
    Packs the rows of a source (see Packer) for ever, and returns an iterator over (inputs, targets, position).

    inputs and targets are int64 (B, T) on `device`, and targets are inputs shifted by one. Copies to a GPU do not
    block. The position is that after the step; with it the rows of the next step come first.

    - micro_batches: the number of micro-batches of a step, over all processes. It is a multiple of their number, and by
      default equal to it.
    - num_rows: the targets of rows with this number in the run or a larger one are -1, so that they do not count
    - ranks: (rank, world size), by default of this process

    Raises UserError for a position that is of another text, and ValueError for the other arguments.
    """
    rank, world_size = ranks or get_dist_info()[1::2]
    M, T = micro_batches or world_size, source.T
    if M % world_size or min(B, T) < 1:
        raise ValueError(f"{M} micro-batches of {B} x {T} tokens cannot be dealt to {world_size} processes")
    stride, apart = math.gcd(M, LANES), math.gcd(world_size, LANES)
    check_position(position, source.about)
    first, epoch, states = 0, 1, dict.fromkeys(map(str, range(LANES)))
    try:
        if position is not None:
            first, epoch, states = position["row"], position["epoch"], position["lanes"]
        lanes = range(rank % apart, LANES, apart)
        packers = {n: Packer(source, n, states[str(n)]) for n in lanes}
        if first < 0 or first % stride:
            raise ValueError(f"row {first} does not begin a step")
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
        problem = f"the data position is damaged or of another rank ({type(e).__name__}: {one_line(e)[:80]})"
        raise UserError(f"{problem}; resume from an older checkpoint") from e

    def pack(first: int) -> tuple[dict[int, np.ndarray], dict[str, Any]]:
        rows = {k: packers[k % LANES].next_row() for k in range(first, first + M * B) if k % LANES in packers}
        groups = [packer.g for packer in packers.values() if packer.i] or [0]
        used = sum(packer.used[0] for packer in packers.values())
        return rows, source.about | {
            "row": first + M * B,
            "lanes": {str(n): packer.state() for n, packer in packers.items()},
            "epoch": 1 + min(groups) // len(source),  # from 1; how far this rank has read at least
            "consumed": used * apart / world_size,  # the sum over the ranks is the number of documents in all rows
        }

    def batches(first: int, epoch: int) -> Batches:
        with ThreadPoolExecutor(1) as ahead:
            job = ahead.submit(pack, first)
            while True:
                rows, position = job.result()
                job = ahead.submit(pack, position["row"])
                if position["epoch"] > epoch == 1 and source.says_again:
                    print0(f"the text begins again after about {position['row'] * T:,} tokens{cropped(position, T)}")
                epoch = position["epoch"]
                for m in range(rank, M, world_size):
                    turn, offset = divmod(m, stride)
                    start = first + turn * stride * B + offset
                    numbers = range(start, start + stride * B, stride)
                    batch = torch.from_numpy(np.stack([rows[k] for k in numbers])).long()
                    # clone copies, while contiguous() of a single row would be a view.
                    inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].clone()
                    if num_rows is not None:
                        targets[[k >= num_rows for k in numbers]] = -1
                    if torch.device(device).type == "cuda":
                        inputs, targets = inputs.pin_memory(), targets.pin_memory()
                    yield *(t.to(device, non_blocking=True) for t in (inputs, targets)), position
                first = position["row"]

    return batches(first, epoch)


def cropped(position: dict[str, Any], T: int) -> str:
    """Returns the end of a sentence that says how much of the documents in the rows of a position was cropped away, or
    "" if nothing was."""
    _, tokens, kept = (sum(counts) for counts in zip(*(lane["used"] for lane in position["lanes"].values())))
    share = 1 - kept / max(1, tokens)
    return f"; rows of {T + 1:,} tokens crop away {share:.0%} of their documents" if share else ""


def check_position(position: Any, about: dict[str, Any]) -> None:
    """Raises UserError unless a position (None for the beginning) is of a loader that `about` describes."""
    if position is None:
        return
    if not isinstance(position, dict):
        raise UserError("the data position in the checkpoint is damaged; resume from an older checkpoint")
    for key, value in about.items():
        if position.get(key) != value:
            remedy = "resume with the text and the flags that the run began with, or start a new run"
            if key == "version":
                remedy = "finish the run with the release that began it, or start a new run"
            raise UserError(f"the data position does not fit: {key} was {position.get(key)}, is {value}; {remedy}")


def join_positions(positions: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns one position for any number of ranks, from those that the ranks saved at the same step, in any order.
    Raises UserError if they do not belong together."""
    joined, of_a_rank = dict(positions[0]), ("lanes", "epoch", "consumed")
    differing = [k for k in joined if k not in of_a_rank and any(p.get(k) != joined[k] for p in positions)]
    if "lanes" in joined:
        joined["lanes"] = {n: state for position in positions for n, state in position["lanes"].items()}
        differing += [] if len(joined["lanes"]) == LANES else ["a rank is missing"]
    if differing:
        why = ", ".join(differing)
        raise UserError(f"the ranks' data positions do not belong together ({why}); resume from another checkpoint")
    return joined


# ----------------------------------------------------------------------------------------------------------------------
# Text


@dataclass(frozen=True)
class Text:
    """
    The text that is read, and its order.

    - data_dir: a folder of text, as in dataset.open_shards. The default is the one that dataset.ensure_data finds.
    - column: the column with the text, as in shards.text_column
    - data_seed: 0 keeps the order in which the text is stored. Another number, up to 2^32 - 1, shuffles the row groups
      and the documents of each, in the same way in every epoch.
    - shuffle_documents: all documents come in one random order, which data_seed chooses and which is the same in every
      epoch
    - shards: the shards of the split, if they are already open. A run then validates on the same ones from its
      beginning to its end, whatever is downloaded into the folder meanwhile.
    """

    data_dir: str | os.PathLike | None = None
    column: str = ""
    data_seed: int = 0
    shuffle_documents: bool = False
    shards: Sequence[Shard | Stored] | None = None


class Documents:
    """The documents of a split in groups, as a source of Packer. Row groups are the groups. If there are fewer row
    groups than packers, each is cut into one piece for each packer, because packers with the same text would pack the
    same rows. Raises UserError for a data_seed out of range, and if the text cannot be used."""

    def __init__(self, tokenizer: Any, T: int, split: str, text: Text, buffer_size: int, batch: int, threads: int):
        if not 0 <= text.data_seed < 2**32:
            raise UserError(f"--data-seed={text.data_seed} is not a number from 0 to {2**32 - 1}; choose one")
        self.tokenizer, self.T, self.threads, self.says_again = tokenizer, T, threads, split == "train"
        shards = open_shards(split, text.data_dir, text.column) if text.shards is None else text.shards
        self.whole, count = shards[0].whole, sum(shard.num_rows for shard in shards)
        digests = {f"the text of {shard.name}": shard.digest() for shard in shards}
        column, self.seed = shards[0].column, text.data_seed
        if text.shuffle_documents:
            shards, self.seed = [in_random_order(shards, text.data_seed)], 0
        self.shards = shards
        # Empty row groups are left out, because a packer that met only these would look for a document forever.
        row_groups = [(s, k, n) for s, shard in enumerate(shards) for k, n in enumerate(shard.rows) if n > 0]
        cut = LANES if len(row_groups) < LANES else 1
        pieces = [(s, k, n * p // cut, n * (p + 1) // cut) for s, k, n in row_groups for p in range(cut)]
        self.groups = [piece for piece in pieces if piece[2] < piece[3]]
        if self.seed:
            self.groups = [self.groups[k] for k in self._permutation(0, len(self.groups))]
        # A packer holds back at most a quarter of its share of an epoch, so that a small text is not read several times
        # before its first batch.
        self.buffer = max(1, min(-(-buffer_size // LANES), count // LANES // 4))
        self.refill = min(batch, self.buffer)
        self.row_group = functools.lru_cache(1 if cut > 1 else 0)(lambda shard, k: self.shards[shard].read(k))
        self.about = {"version": VERSION, "split": split, "T": T, "column": column, "documents": count, **digests}
        self.about |= {"data_seed": text.data_seed, "shuffle_documents": text.shuffle_documents, "pieces": cut}
        self.about |= {"buffer": self.buffer, "refill": self.refill, "whole": self.whole}

    def __len__(self) -> int:
        """The number of groups in an epoch."""
        return len(self.groups)

    def read(self, g: int) -> list[str]:
        shard, k, start, stop = self.groups[g % len(self)]
        texts = self.row_group(shard, k)[start:stop]
        return [texts[i] for i in self._permutation(1 + g % len(self), len(texts))] if self.seed else texts

    def _permutation(self, number: int, n: int) -> np.ndarray:
        """The permutation of n things with this number. NumPy does not change the numbers of RandomState."""
        return np.random.RandomState([self.seed, number]).permutation(n)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        rows = self.tokenizer.encode(texts, prepend=self.tokenizer.get_bos_token_id(), num_threads=self.threads)
        return [np.array(row, dtype=np.int32) for row in rows]

    def filler(self, keys: list[tuple[int, int, int, int]]) -> int:
        """The shortest document, of which least is lost."""
        return 0


def text_batches(
    tokenizer: Any,
    B: int,
    T: int,
    split: str,
    text: Text = Text(),
    device: str | torch.device = "cuda",
    *,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,
    buffer_size: int = 1000,
    **how: Any,
) -> Batches:
    """
    Returns the packed rows of a split's documents, endlessly. `how` are further arguments of packed_rows. The text, the
    tokenizer and the arguments determine the batches, so every method and seed of a comparison can read the same rows.

    - tokenizer: has encode(list of str, prepend=, num_threads=) and get_bos_token_id()
    - buffer_size: the number of documents held back to choose from, by all packers together. With more documents fewer
      tokens are cropped.

    Raises UserError for text that cannot be used and for a position that does not fit.
    """
    source = Documents(tokenizer, T, split, text, buffer_size, tokenizer_batch_size, tokenizer_threads)
    return packed_rows(source, B, device, **how)
