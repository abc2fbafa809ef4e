"""
Rows of T+1 tokens, packed from documents. Any number of processes packs the same rows in the same order.

A row takes the longest buffered document that fits, again and again. When none fits, one is cropped to fill the row.
There is no padding, and the rest of a cropped document is not used. This best fit is nanochat's.

The rows of a run are numbered, and `lanes` independent packers make them: row k is row k // lanes of lane k % lanes. A
step takes the next rows of the run, dealt to its micro-batches one by one, as far as lanes allow: with
stride = gcd(micro-batches of a step, lanes), a micro-batch has every stride-th row. Rank r of W processes computes the
micro-batches r, r + W, r + 2 W, ... For 4 lanes and steps of 2 micro-batches of 4 rows:

    row            0  1  2  3   4  5  6  7 |  8  9 10 11  12 13 14 15 |
    lane           0  1  2  3   0  1  2  3 |  0  1  2  3   0  1  2  3 |   row % 4
    micro-batch    0  1  0  1   0  1  0  1 |  2  3  2  3   2  3  2  3 |   every second row
    1 process      0  0  0  0   0  0  0  0 |  0  0  0  0   0  0  0  0 |
    2 processes    0  1  0  1   0  1  0  1 |  0  1  0  1   0  1  0  1 |   rank 0 packs lanes 0 and 2
                   ---------- round ------   ---------- round -------

Three processes have 3 micro-batches a step, or 6, ..., so the stride is 1 and each rank meets all lanes. Then each rank
packs all rows and drops those of the others. After each micro-batch every rank has packed as many rows of a lane as all
ranks have used, so the state of a lane is the same wherever it is kept.

Resuming is exact, also with another number of processes. The state that comes with each batch names the documents in
the buffers, not only the place in the files. The state is small (some 10 KB) and goes through JSON unchanged. Every
rank has a state of its own, and merge_states joins them.
"""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch

from nanochat_fp4.common import get_dist_info
from nanochat_fp4.errors import UserError, one_line

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


@dataclass(frozen=True)
class Deal:
    """
    How the rows of a run are dealt to its processes.

    lanes: independent packers of the run. Default: those of the state that a loader goes on from, else 8.
    micro_batches: of a step, over all processes; a multiple of their number. Default: one for each process.
    rank, world_size: default: those of this process.
    """

    lanes: int | None = None
    micro_batches: int | None = None
    rank: int | None = None
    world_size: int | None = None

    def filled(self, state: Any = None) -> "Deal":
        """The same with numbers for all defaults. state: what the loader goes on from. Raises ValueError."""
        _, rank, _, world_size = get_dist_info()
        if self.rank is not None and self.world_size is not None:
            rank, world_size = self.rank, self.world_size
        lanes = _lanes_of(state) if self.lanes is None else self.lanes
        micro_batches = world_size if self.micro_batches is None else self.micro_batches
        if micro_batches < 1 or micro_batches % world_size:
            raise ValueError(f"{micro_batches} micro-batches are no multiple of the number of processes, {world_size}")
        at_least_one(lanes=lanes)
        return replace(self, lanes=lanes, micro_batches=micro_batches, rank=rank, world_size=world_size)


THIS_PROCESS = Deal()


def _lanes_of(state: Any) -> int:
    """The lanes of the run that a state belongs to; DEFAULT_LANES without a state."""
    lanes = state.get("lanes") if isinstance(state, dict) else None
    return lanes if isinstance(lanes, int) and 0 < lanes <= MAX_LANES else DEFAULT_LANES


class RowOrder:
    """
    The rows of this rank, and the lanes that pack them. The top of this file has the rule and a picture.

    A round is the fewest micro-batches of all ranks that together take consecutive rows of the run.
    """

    def __init__(self, B: int, deal: Deal):
        """deal: filled."""
        self.B, self.lanes, self.rank, self.world_size = B, deal.lanes, deal.rank, deal.world_size
        self.stride = math.gcd(deal.micro_batches, deal.lanes)
        self.round_length = self.stride // math.gcd(self.stride, deal.world_size)  # in micro-batches of one rank
        self.round_start = 0  # the run's first row of this round
        self.done = 0  # micro-batches of each rank in this round
        # The rows of a rank are in lanes that differ by multiples of `apart`, for both the micro-batches of a rank and
        # the rows of a micro-batch do.
        apart = math.gcd(deal.world_size, deal.lanes)
        my_lanes = range(deal.rank % apart, deal.lanes, apart)
        self.packed = dict.fromkeys(my_lanes, 0)  # lane -> rows that this rank has packed
        self.used = dict.fromkeys(my_lanes, 0)  # lane -> rows in micro-batches that all ranks have done

    def rows_of(self, micro_batch: int) -> range:
        """The rows of a micro-batch of any rank. Its number counts from the beginning of the round."""
        turn, offset = divmod(micro_batch, self.stride)
        first = self.round_start + turn * self.stride * self.B + offset
        return range(first, first + self.stride * self.B, self.stride)

    def next_rows(self, pack: Callable[[int], Row]) -> list[tuple[int, Row]]:
        """(number in the run, row) of this rank's next micro-batch. pack(lane): the next row of a lane."""
        first_of_all = self.done * self.world_size
        rows = []
        for k in self.rows_of(first_of_all + self.rank):
            lane, place = k % self.lanes, k // self.lanes
            self._pack_until(place, lane, pack)
            rows.append((k, pack(lane)))
            self.packed[lane] += 1
        self._use(range(first_of_all, first_of_all + self.world_size))
        for lane, count in self.used.items():
            self._pack_until(count, lane, pack)
        self.done += 1
        if self.done == self.round_length:
            self.round_start += self.round_length * self.world_size * self.B
            self.done = 0
        return rows

    def _pack_until(self, count: int, lane: int, pack: Callable[[int], Any]) -> None:
        """Packs rows of other ranks and drops them, until `count` rows of the lane are packed."""
        while self.packed[lane] < count:
            pack(lane)
            self.packed[lane] += 1

    def _use(self, micro_batches: range) -> None:
        """Counts the rows of these micro-batches of all ranks as used."""
        for lane in (k % self.lanes for number in micro_batches for k in self.rows_of(number)):
            if lane in self.used:
                self.used[lane] += 1

    def state(self) -> dict[str, int]:
        """row: rows that all ranks have used. micro_batch: of each rank in this round; no such key at its beginning."""
        row = self.round_start + self.done * self.world_size * self.B
        return {"row": row, **({"micro_batch": self.done} if self.done else {})}

    def restore(self, state: dict[str, Any]) -> bool:
        """False where no such loader comes to this place."""
        done = int(state.get("micro_batch", 0))
        start = int(state["row"]) - done * self.world_size * self.B
        if start < 0 or start % self.stride or not 0 <= done < self.round_length:
            return False
        self.round_start, self.done = start, done
        self.used = {lane: len(range(lane, start, self.lanes)) for lane in self.used}
        self._use(range(done * self.world_size))
        self.packed = dict(self.used)
        return True


class Lane:
    """
    One packer and its stream of documents: groups lane, lane + lanes, ... of the endless sequence of epochs.

    A document is known by (g, i): document i of group g, where g counts on through the epochs. The buffer is sorted by
    (length, g, i), so that a binary search finds the longest that fits and the shortest. Documents of one length leave
    in the order in which they came, as a scan in the order of arrival would take them.

    loader: has lanes, T, lane_buffer (documents to hold back), refill (documents to tokenize at a time), read(g) ->
        texts of a group, and encode(texts) -> int32 arrays.
    """

    def __init__(self, loader: Any, lane: int):
        self.loader = loader
        self.g, self.i = lane, 0  # the next document to be read
        self.texts: list[str] | None = None  # of group g; None until it is needed
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

    Subclasses define config(), the values that decide which rows a state means.
    lane: the class of a packer. num_rows: targets of the run's rows from this number on are -1, so that they do not
        count. None: all count. lane_buffer: documents that a lane holds back; at least one.
    """

    def __init__(
        self,
        lane: type[Lane],
        B: int,
        T: int,
        device: str | torch.device,
        deal: Deal,
        num_rows: int | None,
        lane_buffer: int,
    ):
        self.B, self.T, self.device = B, T, torch.device(device)
        self.order, self.lanes = RowOrder(B, deal), deal.lanes
        self.num_rows, self.lane_buffer = num_rows, max(1, lane_buffer)
        self.my_lanes = {number: lane(self, number) for number in self.order.packed}
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

    def config(self) -> dict[str, Any]:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rows still to come depend on (besides the arguments); goes through JSON unchanged."""
        lane_states = {str(lane): packer.state() for lane, packer in self.my_lanes.items()}
        config = {key: value for key, value in self.config().items() if value}
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


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """
    One state for all ranks, from the states that the ranks saved at the same step, in any order.

    For PackedRows and the loaders of chat_loader, whose "consumed" becomes the sum over all ranks. Raises UserError.
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
