"""
Pre-training batches: documents packed into rows of T+1 tokens, every row beginning with the BOS token.

Packing is nanochat's best fit. A row takes the longest buffered document that fits, again and again. When none fits,
the shortest one is cropped to fill the row. There is no padding, and the rest of a cropped document is not used.

The promises:

- Deterministic. The shards, the tokenizer and the arguments decide the batches. Every method and seed of a comparison
  can read the same rows.
- Any number of processes reads the same rows in the same order. Row groups are dealt to `lanes` independent packers,
  and row k of the run is row k // lanes of lane k % lanes. A process packs the lanes of its rows. Processes share lanes
  where their number does not divide `lanes`. Then each packs the rows of the others too and drops them.
- Rows belong to micro-batches. A step has `micro_batches` of them, over all processes. Let g be the greatest common
  divisor of `micro_batches` and `lanes`. Micro-batch m has rows k = m (mod g). Rank r computes m = r, r + W, ...
- Resume is exact, also with another number of processes. The state that comes with each batch names the documents in
  the buffers, not only the place in the files. The state is small (some 10 KB) and goes through JSON unchanged. Every
  rank has a state of its own, and merge_states joins them.
- Any number of row groups will do. Row groups are numbered through all shards and epochs before they are dealt. Fewer
  row groups than lanes are cut into one piece for each lane, because lanes with the same text pack the same rows.
"""

import bisect
import hashlib
import math
import os
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch

from nanochat_fp4.common import get_dist_info, print0
from nanochat_fp4.data.dataset import open_shards
from nanochat_fp4.data.shards import Shard, shard_digest
from nanochat_fp4.data.shuffled import ShuffledDocuments
from nanochat_fp4.errors import UserError, one_line

STATE_VERSION = 1
DEFAULT_LANES = 8  # 1, 2, 4 or 8 processes share no lane
MAX_LANES = 1 << 16  # of a state that is believed

REMEDIES = {  # for an entry of a data position that differs
    "version": "start a new run, or load only the weights",
    "pieces": "start a new run, or load only the weights",
    "split": "resume the same split",
    "data": "resume with the shards that the run began with (DATA_DIR, number of downloaded shards)",
    "T": "resume with the same --max-seq-len",
}

Row = TypeVar("Row")


def _split_fingerprint(shards: list[Shard]) -> str:
    """Names the shards of a split, so that a state is not resumed on other data."""
    text = "\n".join(f"{os.path.basename(s.path)} {s.rows}" for s in shards)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def lanes_of(state: Any) -> int:
    """The lanes of the run that a state belongs to; DEFAULT_LANES without a state."""
    lanes = state.get("lanes") if isinstance(state, dict) else None
    return lanes if isinstance(lanes, int) and 0 < lanes <= MAX_LANES else DEFAULT_LANES


def evaluation_rows(tokens: int, B: int, T: int, world_size: int) -> tuple[int, int]:
    """(rows of T tokens, at least one; batches of B rows that each process takes) of an evaluation on `tokens`."""
    rows = max(1, tokens // T)
    return rows, -(-rows // (B * world_size))


class RowOrder:
    """
    The next rows of this rank, and their lanes. The top of this file has the rule.

    start: rows of the run before this rank's first counted micro-batch.
    done: micro-batches that this rank has counted.
    Raises ValueError for micro_batches that the ranks cannot share.
    """

    def __init__(self, B: int, lanes: int, rank: int, world_size: int, micro_batches: int | None = None):
        micro_batches = world_size if micro_batches is None else micro_batches
        if micro_batches < 1 or micro_batches % world_size:
            raise ValueError(f"{micro_batches} micro-batches are no multiple of the number of processes, {world_size}")
        self.B, self.lanes, self.rank, self.world_size = B, lanes, rank, world_size
        self.classes = math.gcd(micro_batches, lanes)
        self.period = self.classes // math.gcd(self.classes, world_size)  # micro-batches of a rank in a round
        self.start = self.done = 0
        step = math.gcd(world_size, lanes)
        self.packed = dict.fromkeys(range(rank % step, lanes, step), 0)  # lane of this rank -> rows that it packed

    def next_rows(self, pack: Callable[[int], Row]) -> list[tuple[int, Row]]:
        """(number in the run, row) of the next micro-batch. pack(lane): the next row of a lane."""
        turn, number = divmod(self.rank + self.done * self.world_size, self.classes)
        first = self.start + number + turn * self.B * self.classes
        rows = []
        for k in range(first, first + self.B * self.classes, self.classes):
            self._skip(k % self.lanes, k // self.lanes, pack)
            rows.append((k, pack(k % self.lanes)))
            self.packed[k % self.lanes] += 1
        self.done += 1
        for lane in self.packed:  # rows of other ranks, so that all ranks have the same state of a lane
            self._skip(lane, self._taken(lane), pack)
        return rows

    def _skip(self, lane: int, count: int, pack: Callable[[int], Row]) -> None:
        while self.packed[lane] < count:
            pack(lane)
            self.packed[lane] += 1

    def _taken(self, lane: int) -> int:
        """Rows of a lane in the micro-batches that all ranks have done when this one has done `done`."""
        number, place = lane % self.classes, lane // self.classes
        turns = max(0, -(-(self.done * self.world_size - number) // self.classes))
        rows = self.start // self.classes + turns * self.B  # taken, in this lane's class
        return max(0, -(-(rows - place) // (self.lanes // self.classes)))

    def state(self) -> dict[str, int]:
        """row: rows that all ranks have yielded. micro_batch: micro-batches of this rank in an incomplete round of the
        classes. The end of a step completes a round and has no such key."""
        part = self.done % self.period
        row = self.start + self.done * self.world_size * self.B
        return {"row": row, **({"micro_batch": part} if part else {})}

    def restore(self, state: dict[str, Any]) -> bool:
        """False where no such loader comes to this place."""
        part = int(state.get("micro_batch", 0))
        start = int(state["row"]) - part * self.world_size * self.B
        if start < 0 or start % self.classes or not 0 <= part < self.period:
            return False
        self.start, self.done = start, part
        self.packed = {lane: self._taken(lane) for lane in self.packed}
        return True


class Lane:
    """
    One packer and its stream of documents: row groups lane, lane + lanes, ... of the endless sequence of epochs.

    A document is known by (g, i): row i of row group g, where g counts on through the epochs. The buffer is sorted by
    (length, g, i), so that a binary search finds the longest that fits and the shortest. Documents of one length leave
    in the order in which they came, as a scan in the order of arrival would take them.
    """

    def __init__(self, loader: Any, lane: int):
        self.loader = loader
        self.g, self.i = lane, 0  # the next document to be read
        self.texts: list[str] | None = None  # of row group g; None until it is needed
        self.keys: list[tuple[int, int, int]] = []  # sorted
        self.tokens: list[np.ndarray] = []  # in the order of keys; int32
        self.taken = self.kept = 0  # tokens of the documents in its rows, and those of them that were not cropped away

    def insert(self, g: int, i: int, tokens: np.ndarray) -> None:
        key = (len(tokens), g, i)
        place = bisect.bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.tokens.insert(place, tokens)

    def refill(self) -> None:
        while self.texts is None or self.i >= len(self.texts):
            if self.texts is not None:
                self.g, self.i = self.g + self.loader.lanes, 0
            self.texts = self.loader.read(self.g)
        batch = self.texts[self.i : self.i + self.loader.refill]
        for offset, tokens in enumerate(self.loader.encode(batch)):
            self.insert(self.g, self.i + offset, tokens)
        self.i += len(batch)

    def cropped(self) -> int:
        """The place of the document to crop where none fits: the shortest."""
        return 0

    def next_row(self) -> tuple[np.ndarray, int]:
        """(one packed row, int32 (T+1,); documents that went into it)."""
        room = self.loader.T + 1
        parts = []
        while room > 0:
            while len(self.keys) < self.loader.lane_buffer:
                self.refill()
            # Documents that fit are those before (room + 1, 0, 0); of the longest of them, take the first to arrive.
            fitting = bisect.bisect_left(self.keys, (room + 1,))
            place = bisect.bisect_left(self.keys, (self.keys[fitting - 1][0],)) if fitting else self.cropped()
            self.keys.pop(place)
            document = self.tokens.pop(place)
            parts.append(document[:room])
            room -= len(parts[-1])
            self.taken, self.kept = self.taken + len(document), self.kept + len(parts[-1])
        return np.concatenate(parts), len(parts)

    def state(self) -> dict[str, Any]:
        return {"next": [self.g, self.i], "buffer": sorted([g, i] for _, g, i in self.keys)}

    def restore(self, state: dict[str, Any]) -> None:
        self.g, self.i = (int(n) for n in state["next"])
        documents = sorted((int(g), int(i)) for g, i in state["buffer"])
        for g, group in groupby(documents, key=lambda d: d[0]):
            rows = [i for _, i in group]
            texts = self.loader.read(g)
            for i, tokens in zip(rows, self.loader.encode([texts[i] for i in rows])):
                self.insert(g, i, tokens)
        if self.i > 0:
            self.texts = self.loader.read(self.g)


class PackedRows:
    """
    Endless iterator over (inputs, targets, state) of the rows that lanes pack. The top of this file has the promises.

    Subclasses define _config(), the values that decide which rows a state means. num_rows: as for BestFitLoader.
    """

    def __init__(
        self,
        lane: type[Lane],
        B: int,
        T: int,
        device: str | torch.device,
        order: RowOrder,
        num_rows: int | None,
        lane_buffer: int,
    ):
        self.B, self.T, self.device = B, T, torch.device(device)
        self.order, self.lanes, self.num_rows, self.lane_buffer = order, order.lanes, num_rows, max(1, lane_buffer)
        self.my_lanes = {number: lane(self, number) for number in order.packed}
        self.consumed = 0  # documents in this rank's rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        rows = self.order.next_rows(lambda lane: self.my_lanes[lane].next_row())
        self.consumed += sum(used for _, (_, used) in rows)
        batch = torch.from_numpy(np.stack([row for _, (row, _) in rows])).long()
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].clone()  # one row's contiguous() would be a view
        if self.num_rows is not None:
            targets[[k >= self.num_rows for k, _ in rows]] = -1
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return *(t.to(self.device, non_blocking=True) for t in (inputs, targets)), self.state_dict()

    def _config(self) -> dict[str, Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rows still to come depend on (besides the arguments); goes through JSON unchanged."""
        lane_states = {str(lane): packer.state() for lane, packer in self.my_lanes.items()}
        config = {key: value for key, value in self._config().items() if value}
        return config | self.order.state() | {"lane_states": lane_states}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the batch that the state came with. The state has passed check_position. Raises UserError."""
        try:
            lane_states = state["lane_states"]
            if self.order.restore(state) and all(str(lane) in lane_states for lane in self.my_lanes):
                for lane, packer in self.my_lanes.items():
                    packer.restore(lane_states[str(lane)])
                return
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
            what = f"{type(e).__name__}: {one_line(e)[:80]}"
            raise UserError(f"the data position is damaged ({what}); resume from an older one") from e
        raise UserError(
            f"the data position is not that of rank {self.order.rank} of {self.order.world_size}; resume with the same "
            "number of processes, or from the merged states of all ranks"
        )


def at_least_one(**sizes: int) -> None:
    """Raise ValueError for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def check_position(state: Any, config: dict[str, Any]) -> None:
    """Raise UserError unless `state` is the data position of a loader with this config. Values of 0 may be missing."""
    if not isinstance(state, dict):
        raise UserError("the data position in the checkpoint is damaged; resume from an older checkpoint")
    for key, value in config.items():
        if state.get(key, 0) != value:
            remedy = REMEDIES.get(key, "resume with the data and arguments that the run began with")
            raise UserError(f"the data position does not fit: {key} was {state.get(key)}, is {value}; {remedy}")


class BestFitLoader(PackedRows):
    """
    Packed rows of a split's documents.

    inputs, targets: int64 (B, T) on `device`. Targets are inputs shifted by one. Copies to a GPU do not block.
    state: a dict that goes through JSON. A loader with this `resume_state_dict` yields the batch *after* this one. A
    training loop that fetches a batch ahead must keep the state of the last batch that it trained on. For the log the
    state says how far this rank has read at least: "epoch" (from 1), "pq_idx", "rg_idx".

    tokenizer: has encode(list of str, prepend=, num_threads=) and get_bos_token_id().
    buffer_size: documents held back to choose from, in all lanes together. More documents leave fewer tokens cropped.
        A lane holds back at most a quarter of its share of an epoch, so that a small corpus is not read several times
        before its first batch.
    lanes: independent packers of the run. Default: the state's lanes, else 8.
    num_rows: targets of the run's rows from this number on are -1, so that they do not count. Default: all count.
    micro_batches: of a step, over all ranks, a multiple of the world size. Default: one a rank.
    data_dir: a folder of shards. Default: the folder that dataset.ensure_data finds.
    data_seed: 0 keeps the order in which the text is stored. Another number shuffles the row groups and the documents
        of each, in every epoch alike.
    shuffle_documents: all documents in one random order, which data_seed chooses, in every epoch the same.
    text_column: column with the text, as for shards.text_column.
    Raises UserError (data, state that does not fit), ValueError (arguments).
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
        lanes: int | None = None,
        data_dir: str | os.PathLike | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        data_seed: int = 0,
        micro_batches: int | None = None,
        num_rows: int | None = None,
        shuffle_documents: bool = False,
        text_column: str = "",
    ):
        if not 0 <= data_seed < 2**32:
            raise UserError(f"--data-seed={data_seed} is not a number from 0 to {2**32 - 1}; choose one")
        if rank is None or world_size is None:
            _, rank, _, world_size = get_dist_info()
        lanes = lanes_of(resume_state_dict) if lanes is None else lanes
        at_least_one(B=B, T=T, buffer_size=buffer_size, tokenizer_batch_size=tokenizer_batch_size, lanes=lanes)
        self.tokenizer, self.split, self.tokenizer_threads = tokenizer, split, tokenizer_threads
        self.shards = open_shards(split, data_dir, text_column)
        self.content = [shard_digest(shard.path) for shard in self.shards]
        self.shuffled = ShuffledDocuments(self.shards, self.content, data_seed) if shuffle_documents else None
        # Empty row groups are left out: a lane that met no others would look for a document forever.
        groups = [(s, k, n) for s, shard in enumerate(self.shards) for k, n in enumerate(shard.rows) if n > 0]
        self.pieces = lanes if len(groups) < lanes and not shuffle_documents else 0  # of each row group; 0: not cut
        cut = self.pieces or 1
        pieces = [(s, k, n * p // cut, n * (p + 1) // cut) for s, k, n in groups for p in range(cut)]
        self.row_groups = [piece for piece in pieces if piece[2] < piece[3]]
        self.data_seed = data_seed
        if self.shuffled:
            self.row_groups = [(0, k, 0, 0) for k in range(len(self.shuffled))]
        elif data_seed:
            self.row_groups = [self.row_groups[k] for k in self._shuffled(0, len(self.row_groups))]
        self.fingerprint = _split_fingerprint(self.shards)
        share = sum(shard.num_rows for shard in self.shards) // lanes
        self.bos = tokenizer.get_bos_token_id()
        order = RowOrder(B, lanes, rank, world_size, micro_batches)
        super().__init__(Lane, B, T, device, order, num_rows, min(-(-buffer_size // lanes), share // 4))
        self.refill = min(tokenizer_batch_size, self.lane_buffer)
        self.told = True
        if resume_state_dict is not None:
            check_position(resume_state_dict, self._config())
            here = self.shards[0].column
            if (before := resume_state_dict.get("column", here)) != here:
                problem = f"the data position does not fit: the text was in the column {before}, not {here}"
                raise UserError(f"{problem}; correct --text-column (TEXT_COLUMN)")
            content = resume_state_dict.get("content")
            if content != self.content:
                known = str(content)
                changed = [os.path.basename(s.path) for s, d in zip(self.shards, self.content) if d not in known]
                raise UserError(
                    f"the data position does not fit: the text of {', '.join(changed[:3])} is not the one that the run "
                    "has been trained on; put the old file back, or start a new run"
                )
            self.restore(resume_state_dict)
        # An evaluation reads its text anew each time, and of a resumed run the checkpoint's log has said it.
        self.told = split == "val" or any(lane.g >= len(self.row_groups) for lane in self.my_lanes.values())

    def read(self, g: int) -> list[str]:
        """The documents of row group g of the endless sequence. Says once that the text begins again."""
        if g >= len(self.row_groups) and not self.told:
            self.told = True
            print0(f"the text begins again after about {self.order.state()['row'] * self.T:,} tokens; {self.cropped()}")
        shard, index, start, stop = self.row_groups[g % len(self.row_groups)]
        if self.shuffled:
            return self.shuffled.read(index)
        texts = self.shards[shard].read(index)[start:stop]
        return [texts[k] for k in self._shuffled(1 + g % len(self.row_groups), len(texts))] if self.data_seed else texts

    def cropped(self) -> str:
        """What the rows so far have lost of their documents, by the lanes of this rank."""
        taken, kept = (sum(of) for of in zip(*((lane.taken, lane.kept) for lane in self.my_lanes.values())))
        return f"rows of {self.T + 1:,} tokens crop away {1 - kept / max(1, taken):.0%} of their documents"

    def _shuffled(self, number: int, n: int) -> np.ndarray:
        """The permutation of n things that has this number; NumPy promises that RandomState's stay the same."""
        return np.random.RandomState([self.data_seed, number]).permutation(n)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        rows = self.tokenizer.encode(texts, prepend=self.bos, num_threads=self.tokenizer_threads)
        return [np.array(row, dtype=np.int32) for row in rows]

    def _config(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "split": self.split,
            "data": self.fingerprint,
            "T": self.T,
            "lanes": self.lanes,
            "lane_buffer": self.lane_buffer,
            "refill": self.refill,
            "data_seed": self.data_seed,
            "shuffle_documents": self.shuffled is not None,
            "pieces": self.pieces,
        }

    def state_dict(self) -> dict[str, Any]:
        """As PackedRows', with the contents of the shards and the place that this rank has read to."""
        begun = [lane.g for lane in self.my_lanes.values() if lane.i > 0] or [0]
        epoch, position = divmod(min(begun), len(self.row_groups))
        place = dict(zip(("pq_idx", "rg_idx"), self.row_groups[position]))
        text = {"content": self.content, "column": self.shards[0].column}
        return super().state_dict() | text | {"epoch": 1 + epoch, **place}


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """
    One state for all ranks, from the states that the ranks saved at the same step, in any order.

    For this loader and those of chat_loader, whose "consumed" becomes the sum over all ranks. Raises UserError.
    """
    merged = dict(states[0])
    merged["lane_states"] = {lane: s for state in states for lane, s in state.get("lane_states", {}).items()}
    if "consumed" in merged:
        merged["consumed"] = sum(state["consumed"] for state in states)
    differing = [k for k in merged if k not in ("lane_states", "epoch", "pq_idx", "rg_idx", "consumed")
                 and any(state.get(k) != merged[k] for state in states)]  # fmt: skip
    if differing or len(merged["lane_states"]) != merged.get("lanes", 0):
        raise UserError(
            f"the ranks' data positions do not belong together ({', '.join(differing) or 'a rank is missing'}); resume "
            "from another checkpoint"
        )
    return merged


def tokenizing_distributed_data_loader_with_state_bos_bestfit(*args: Any, **kwargs: Any) -> BestFitLoader:
    """nanochat's name for BestFitLoader: yields (inputs, targets, state)."""
    return BestFitLoader(*args, **kwargs)


def tokenizing_distributed_data_loader_bos_bestfit(
    *args: Any, **kwargs: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same without the state: yields (inputs, targets)."""
    loader = BestFitLoader(*args, **kwargs)  # here, not in the generator: bad arguments are reported at the call
    return ((inputs, targets) for inputs, targets, _ in loader)
