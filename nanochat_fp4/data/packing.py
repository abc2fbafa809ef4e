"""
Rows of T+1 tokens, packed from documents. Any number of processes packs the same rows in the same order.

A row takes the longest buffered document that fits, again and again. When none fits, one is cropped to fill the row.
There is no padding, and the rest of a cropped document is not used. This best fit is nanochat's.

The rows of a run are numbered, and `lanes` independent packers make them: row k is row k // lanes of lane k % lanes. A
step takes the next rows of the run. They are dealt to its micro-batches one by one, as far as lanes allow: with stride
= gcd(micro-batches of a step, lanes), a micro-batch has every stride-th row. Rank r of W processes computes the
micro-batches r, r + W, r + 2 W, ... For 4 lanes and steps of 2 micro-batches of 4 rows:

    row          0  1  2  3   4  5  6  7 |  8  9 10 11  12 13 14 15 |
    lane         0  1  2  3   0  1  2  3 |  0  1  2  3   0  1  2  3 |   row % 4
    micro-batch  0  1  0  1   0  1  0  1 |  2  3  2  3   2  3  2  3 |   every second row
    1 process    0  0  0  0   0  0  0  0 |  0  0  0  0   0  0  0  0 |
    2 processes  0  1  0  1   0  1  0  1 |  0  1  0  1   0  1  0  1 |   rank 0 packs lanes 0 and 2
                 ---------- round ------    ---------- round -------

Three processes have 3 micro-batches in a step, or 6, ..., so the stride is 1 and each rank has rows of all lanes. Each
rank then packs all rows and drops those of the others. After each micro-batch every rank has packed as many rows of a
lane as all ranks have used, so the state of a lane is the same on all ranks that have it.

Resuming is exact, also with another number of processes. The state that comes with each batch names the documents in
the buffers, and not only the place in the files. The state is small (some 10 KB) and can be stored as JSON. Every rank
has a state of its own, and merge_states joins them.
"""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch

from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.common import get_dist_info

DEFAULT_LANES = 8  # With 1, 2, 4 or 8 processes no lane is shared.
MAX_LANES = 1 << 16  # A state with more lanes than this is not believed.

REMEDIES = {  # What a user can do about an entry of a data position that differs.
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

    - lanes: the number of independent packers of the run. The default is that of the state that a loader resumes from,
      or else DEFAULT_LANES.
    - micro_batches: the number of micro-batches of a step, over all processes. It is a multiple of the number of
      processes, and by default equal to it.
    - rank, world_size: by default those of this process
    """

    lanes: int | None = None
    micro_batches: int | None = None
    rank: int | None = None
    world_size: int | None = None

    def filled(self, state: Any = None) -> "Deal":
        """Returns the same deal with numbers for all defaults. `state` is the state that the loader resumes from.
        Raises ValueError for numbers that do not fit together."""
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
    """Returns the number of lanes of the run that a state belongs to, or DEFAULT_LANES without a state."""
    lanes = state.get("lanes") if isinstance(state, dict) else None
    return lanes if isinstance(lanes, int) and 0 < lanes <= MAX_LANES else DEFAULT_LANES


class RowOrder:
    """
    The rows of this rank, and the lanes that pack them. The docstring of the module has the rule and a picture.

    A round is the smallest number of micro-batches of all ranks that together take consecutive rows of the run.
    """

    def __init__(self, B: int, deal: Deal):
        """The deal must be the result of Deal.filled."""
        self.B, self.lanes, self.rank, self.world_size = B, deal.lanes, deal.rank, deal.world_size
        self.stride = math.gcd(deal.micro_batches, deal.lanes)
        # The micro-batches of one rank in a round.
        self.round_length = self.stride // math.gcd(self.stride, deal.world_size)
        self.round_start = 0  # The first row of this round in the run.
        self.done = 0  # The number of micro-batches that each rank has done in this round.
        # The rows of a rank are in lanes whose numbers differ by multiples of `apart`. This holds for the micro-batches
        # of a rank and for the rows of a micro-batch.
        apart = math.gcd(deal.world_size, deal.lanes)
        my_lanes = range(deal.rank % apart, deal.lanes, apart)
        self.packed = dict.fromkeys(my_lanes, 0)  # For each lane, the number of rows that this rank has packed.
        # For each lane, the number of rows in micro-batches that all ranks have done.
        self.used = dict.fromkeys(my_lanes, 0)

    def rows_of(self, micro_batch: int) -> range:
        """Returns the rows of a micro-batch of any rank. The number of the micro-batch counts from the beginning of
        the round."""
        turn, offset = divmod(micro_batch, self.stride)
        first = self.round_start + turn * self.stride * self.B + offset
        return range(first, first + self.stride * self.B, self.stride)

    def next_rows(self, pack: Callable[[int], Row]) -> list[tuple[int, Row]]:
        """Returns (number in the run, row) for the rows of this rank's next micro-batch. pack(lane) makes the next
        row of a lane."""
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
        """Returns "row", the number of rows that all ranks have used, and "micro_batch", the number of micro-batches
        that each rank has done in this round. The latter is left out if it is 0."""
        row = self.round_start + self.done * self.world_size * self.B
        return {"row": row, **({"micro_batch": self.done} if self.done else {})}

    def restore(self, state: dict[str, Any]) -> bool:
        """Goes on from a state. Returns False if a loader with this deal never has this state."""
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
    One packer and its stream of documents, which are the groups lane, lane + lanes, ... of the endless sequence of
    epochs.

    A document is known by (g, i), as document i of group g, where g counts on through the epochs. The buffer is sorted
    by (length, g, i), so that a binary search finds the longest document that fits, and the shortest one. Documents of
    the same length leave the buffer in the order in which they came, as if a scan took them in the order of arrival.

    `loader` has lanes, T, lane_buffer (the number of documents to hold back), refill (the number of documents to
    tokenize at a time), read(g), which returns the texts of a group, and encode(texts), which returns int32 arrays.
    """

    def __init__(self, loader: Any, lane: int):
        self.loader = loader
        self.g, self.i = lane, 0  # The next document to be read.
        self.texts: list[str] | None = None  # The texts of group g, or None until they are needed.
        self.keys: list[tuple[int, int, int]] = []  # The keys of the buffered documents, sorted.
        self.tokens: list[np.ndarray] = []  # The tokens of the same documents in the same order, int32.
        # `taken` counts the tokens of the documents in this lane's rows, and `kept` those of them that were not cropped
        # away.
        self.taken = self.kept = 0

    def insert(self, g: int, i: int, tokens: np.ndarray) -> None:
        """Puts the tokens of document (g, i) into the buffer."""
        key = (len(tokens), g, i)
        place = bisect.bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.tokens.insert(place, tokens)

    def refill(self) -> None:
        """Reads the next documents into the buffer."""
        while self.texts is None or self.i >= len(self.texts):
            if self.texts is not None:
                self.g, self.i = self.g + self.loader.lanes, 0
            self.texts = self.loader.read(self.g)
        batch = self.texts[self.i : self.i + self.loader.refill]
        for offset, tokens in enumerate(self.loader.encode(batch)):
            self.insert(self.g, self.i + offset, tokens)
        self.i += len(batch)

    def cropped(self) -> int:
        """Returns the place of the document to crop if none fits, which is the shortest one."""
        return 0

    def next_row(self) -> tuple[np.ndarray, int]:
        """Returns one packed row, int32 (T+1,), and the number of documents that went into it."""
        room = self.loader.T + 1
        parts = []
        while room > 0:
            while len(self.keys) < self.loader.lane_buffer:
                self.refill()
            # The documents that fit are those before (room + 1, 0, 0). Of the longest of them, the first to arrive is
            # taken.
            fitting = bisect.bisect_left(self.keys, (room + 1,))
            place = bisect.bisect_left(self.keys, (self.keys[fitting - 1][0],)) if fitting else self.cropped()
            self.keys.pop(place)
            document = self.tokens.pop(place)
            parts.append(document[:room])
            room -= len(parts[-1])
            self.taken, self.kept = self.taken + len(document), self.kept + len(parts[-1])
        return np.concatenate(parts), len(parts)

    def state(self) -> dict[str, Any]:
        """Returns the next document to be read, and the documents in the buffer."""
        return {"next": [self.g, self.i], "buffer": sorted([g, i] for _, g, i in self.keys)}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state. The documents of the buffer are read again."""
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
    An endless iterator over (inputs, targets, state) of the rows that lanes pack. The docstring of the module has its
    promises.

    - lane is the class of a packer.
    - num_rows: the targets of rows with this number in the run or a larger one are -1, so that they do not count. None
      means that all rows count.
    - lane_buffer is the number of documents that a lane holds back, at least one.

    Subclasses define config(), which returns the values that decide which rows a state means.
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
        self.consumed = 0  # The number of documents in this rank's rows.

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        rows = self.order.next_rows(lambda lane: self.my_lanes[lane].next_row())
        self.consumed += sum(used for _, (_, used) in rows)
        batch = torch.from_numpy(np.stack([row for _, (row, _) in rows])).long()
        # clone copies, while contiguous() of a single row would be a view.
        inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].clone()
        if self.num_rows is not None:
            targets[[k >= self.num_rows for k, _ in rows]] = -1
        if self.device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return *(t.to(self.device, non_blocking=True) for t in (inputs, targets)), self.state_dict()

    def config(self) -> dict[str, Any]:
        """Returns the values that decide which rows a state means. Values of 0 are left out of states."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the following rows depend on, besides the arguments. It can be stored as JSON."""
        lane_states = {str(lane): packer.state() for lane, packer in self.my_lanes.items()}
        config = {key: value for key, value in self.config().items() if value}
        return config | self.order.state() | {"lane_states": lane_states}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on after the batch that came with this state. The state must have passed check_position. Raises
        UserError if the state is damaged or belongs to other ranks."""
        try:
            lane_states = state["lane_states"]
            if self.order.restore(state) and all(str(lane) in lane_states for lane in self.my_lanes):
                for lane, packer in self.my_lanes.items():
                    packer.restore(lane_states[str(lane)])
                return
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
            problem = f"{type(e).__name__}: {one_line(e)[:80]}"
            raise UserError(f"the data position is damaged ({problem}); resume from an older one") from e
        raise UserError(
            f"the data position is not that of rank {self.order.rank} of {self.order.world_size}; resume with the same "
            "number of processes, or from the merged states of all ranks"
        )


def at_least_one(**sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")


def check_position(state: Any, config: dict[str, Any]) -> None:
    """Raises UserError unless `state` is the data position of a loader with this config. Values of 0 may be missing
    in it."""
    if not isinstance(state, dict):
        raise UserError("the data position in the checkpoint is damaged; resume from an older checkpoint")
    for key, value in config.items():
        if state.get(key, 0) != value:
            remedy = REMEDIES.get(key, "resume with the data and arguments that the run began with")
            raise UserError(f"the data position does not fit: {key} was {state.get(key)}, is {value}; {remedy}")


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """
    Returns one state for all ranks, from the states that the ranks saved at the same step, in any order.

    It merges states of PackedRows and of the loaders in chat_loader. "consumed" becomes the sum over all ranks. Raises
    UserError if the states do not belong together.
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
