"""
Batches for pre-training. The documents of a split are packed into rows of T+1 tokens, and each document begins with the
BOS token.

packing.py packs the rows and deals them to the processes. This file decides which documents there are, and in which
order they are read. The shards, the tokenizer and the arguments determine the batches, so every method and seed of a
comparison can read the same rows.

Row groups are numbered through all shards and epochs, and then dealt to lanes. Any number of row groups will do. If
there are fewer row groups than lanes, each is cut into one piece for each lane, because lanes with the same text would
pack the same rows.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import print0
from nanochat_fp4.data.dataset import open_shards
from nanochat_fp4.data.packing import THIS_PROCESS, Deal, Lane, PackedRows, at_least_one, check_position
from nanochat_fp4.data.shards import Shard, shard_digest
from nanochat_fp4.data.shuffled import ShuffledDocuments

STATE_VERSION = 1


def evaluation_rows(tokens: int, B: int, T: int, world_size: int) -> tuple[int, int]:
    """Returns how many rows of T tokens an evaluation on `tokens` has, at least one, and how many batches of B rows
    each process takes."""
    rows = max(1, tokens // T)
    return rows, -(-rows // (B * world_size))


@dataclass(frozen=True)
class Text:
    """
    The text that is read, and its order.

    - data_dir: a folder of shards. The default is the folder that dataset.ensure_data finds.
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
    shards: list[Shard] | None = None


AS_STORED = Text()


class Documents:
    """
    The documents of a split in groups, as an endless sequence. The numbers of groups count on through the epochs.

    `lanes` is the number of the loader's lanes. Raises UserError for a data_seed out of range, and if the shards cannot
    be used.
    """

    def __init__(self, split: str, text: Text, lanes: int):
        if not 0 <= text.data_seed < 2**32:
            raise UserError(f"--data-seed={text.data_seed} is not a number from 0 to {2**32 - 1}; choose one")
        self.data_seed = text.data_seed
        self.shards = open_shards(split, text.data_dir, text.column) if text.shards is None else text.shards
        self.digests = [shard_digest(shard.path) for shard in self.shards]
        self.count = sum(shard.num_rows for shard in self.shards)
        # pieces is the number of pieces into which each row group is cut. 0 means that they are not cut.
        self.shuffled, self.pieces = None, 0
        if text.shuffle_documents:
            self.shuffled = ShuffledDocuments(self.shards, self.digests, text.data_seed)
            self.groups = [(0, k, 0, 0) for k in range(len(self.shuffled))]
            return
        # Empty row groups are left out, because a lane that met only these would look for a document forever.
        groups = [(s, k, n) for s, shard in enumerate(self.shards) for k, n in enumerate(shard.rows) if n > 0]
        self.pieces = lanes if len(groups) < lanes else 0
        cut = self.pieces or 1
        pieces = [(s, k, n * p // cut, n * (p + 1) // cut) for s, k, n in groups for p in range(cut)]
        # A group consists of shard, row group, first document, and end.
        self.groups = [piece for piece in pieces if piece[2] < piece[3]]
        if self.data_seed:
            self.groups = [self.groups[k] for k in self._permutation(0, len(self.groups))]
        self._last_read: tuple[tuple[int, int], list[str]] = (-1, -1), []

    def __len__(self) -> int:
        """Returns the number of groups in an epoch."""
        return len(self.groups)

    def read(self, g: int) -> list[str]:
        """Returns the documents of group g."""
        shard, index, start, stop = self.groups[g % len(self)]
        if self.shuffled:
            return self.shuffled.read(index)
        texts = self._row_group(shard, index)[start:stop]
        return [texts[k] for k in self._permutation(1 + g % len(self), len(texts))] if self.data_seed else texts

    def _row_group(self, shard: int, index: int) -> list[str]:
        """Returns the documents of a row group. If lanes have pieces of it, the next piece does not read it from the
        disk again."""
        if not self.pieces:
            return self.shards[shard].read(index)
        if self._last_read[0] != (shard, index):
            self._last_read = (shard, index), self.shards[shard].read(index)
        return self._last_read[1]

    def _permutation(self, number: int, n: int) -> np.ndarray:
        """Returns the permutation of n things that has this number. It is always the same one, because NumPy does
        not change the numbers of RandomState."""
        return np.random.RandomState([self.data_seed, number]).permutation(n)

    def names(self) -> str:
        """Returns a hash of the shards' names and rows, so that a state is not resumed on other data."""
        text = "\n".join(f"{os.path.basename(s.path)} {s.rows}" for s in self.shards)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def state(self) -> dict[str, Any]:
        """Returns the part of a data position that describes the text: the contents of the shards, and the column."""
        return {"content": self.digests, "column": self.shards[0].column}

    def check(self, state: dict[str, Any]) -> None:
        """Raises UserError if a data position belongs to shards of other contents or to another column."""
        here = self.shards[0].column
        if (before := state.get("column", here)) != here:
            problem = f"the data position does not fit: the text was in the column {before}, not {here}"
            raise UserError(f"{problem}; correct --text-column (TEXT_COLUMN)")
        if (content := state.get("content")) != self.digests:
            known_digests = str(content)
            changed = [os.path.basename(s.path) for s, d in zip(self.shards, self.digests) if d not in known_digests]
            raise UserError(
                f"the data position does not fit: the text of {', '.join(changed[:3])} is not the one that the run has "
                "been trained on; put the old file back, or start a new run"
            )


class BestFitLoader(PackedRows):
    """
    Packed rows of a split's documents: an endless iterator over (inputs, targets, state).

    inputs and targets are int64 (B, T) on `device`, and targets are inputs shifted by one. Copies to a GPU do not
    block. state is a dict that can be stored as JSON. A loader with this `resume_state_dict` yields the batch *after*
    this one. A training loop that fetches a batch ahead must keep the state of the last batch that it trained on. For
    the log the state says how far this rank has read at least: "epoch" (from 1), "pq_idx", "rg_idx".

    - tokenizer: has encode(list of str, prepend=, num_threads=) and get_bos_token_id()
    - buffer_size: the number of documents held back to choose from, in all lanes together. With more documents fewer
      tokens are cropped. A lane holds back at most a quarter of its share of an epoch, so that a small corpus is not
      read several times before its first batch.
    - num_rows: see PackedRows. The other arguments are nanochat's.

    Raises UserError for data that cannot be used and for a state that does not fit, and ValueError for the arguments.
    """

    def __init__(
        self,
        tokenizer: Any,
        B: int,
        T: int,
        split: str,
        tokenizer_threads: int = 4,
        tokenizer_batch_size: int = 128,
        device: str | torch.device = "cuda",
        resume_state_dict: dict[str, Any] | None = None,
        buffer_size: int = 1000,
        text: Text = AS_STORED,
        deal: Deal = THIS_PROCESS,
        num_rows: int | None = None,
    ):
        at_least_one(B=B, T=T, buffer_size=buffer_size, tokenizer_batch_size=tokenizer_batch_size)
        deal = deal.filled(resume_state_dict)
        self.tokenizer, self.split, self.tokenizer_threads = tokenizer, split, tokenizer_threads
        self.bos = tokenizer.get_bos_token_id()
        self.documents = Documents(split, text, deal.lanes)
        share = self.documents.count // deal.lanes
        super().__init__(Lane, B, T, device, deal, num_rows, min(-(-buffer_size // deal.lanes), share // 4))
        self.refill = min(tokenizer_batch_size, self.lane_buffer)
        self.told = True
        if resume_state_dict is not None:
            check_position(resume_state_dict, self.config())
            self.documents.check(resume_state_dict)
            self.restore(resume_state_dict)
        # An evaluation reads its text again each time. If a resumed run has read its text before, its log already says
        # so.
        self.told = split == "val" or any(lane.g >= len(self.documents) for lane in self.my_lanes.values())

    def read(self, g: int) -> list[str]:
        """Returns the documents of group g. Prints once that the text begins again."""
        if g >= len(self.documents) and not self.told:
            self.told = True
            print0(f"the text begins again after about {self.order.state()['row'] * self.T:,} tokens; {self.cropped()}")
        return self.documents.read(g)

    def cropped(self) -> str:
        """Returns a sentence that says how much of the documents was cropped away in the rows of this rank's lanes
        so far."""
        taken, kept = (sum(counts) for counts in zip(*((lane.taken, lane.kept) for lane in self.my_lanes.values())))
        return f"rows of {self.T + 1:,} tokens crop away {1 - kept / max(1, taken):.0%} of their documents"

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the tokens of the texts, int32 each, with the BOS token in front."""
        rows = self.tokenizer.encode(texts, prepend=self.bos, num_threads=self.tokenizer_threads)
        return [np.array(row, dtype=np.int32) for row in rows]

    def config(self) -> dict[str, Any]:
        """Returns the values that decide which rows a state means."""
        return {
            "version": STATE_VERSION,
            "split": self.split,
            "data": self.documents.names(),
            "T": self.T,
            "lanes": self.lanes,
            "lane_buffer": self.lane_buffer,
            "refill": self.refill,
            "data_seed": self.documents.data_seed,
            "shuffle_documents": self.documents.shuffled is not None,
            "pieces": self.documents.pieces,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of PackedRows, with the contents of the shards and the place up to which this rank has
        read."""
        begun = [lane.g for lane in self.my_lanes.values() if lane.i > 0] or [0]
        epoch, position = divmod(min(begun), len(self.documents))
        place = dict(zip(("pq_idx", "rg_idx"), self.documents.groups[position]))
        return super().state_dict() | self.documents.state() | {"epoch": 1 + epoch, **place}


def tokenizing_distributed_data_loader_with_state_bos_bestfit(*args: Any, **kwargs: Any) -> BestFitLoader:
    """Makes a BestFitLoader, under nanochat's name. It yields (inputs, targets, state)."""
    return BestFitLoader(*args, **kwargs)


def tokenizing_distributed_data_loader_bos_bestfit(
    *args: Any, **kwargs: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Makes a BestFitLoader, under nanochat's name, that yields (inputs, targets) without the state."""
    # The loader is made here and not in the generator, so that wrong arguments are reported at the call.
    loader = BestFitLoader(*args, **kwargs)
    return ((inputs, targets) for inputs, targets, _ in loader)
