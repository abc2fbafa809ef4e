"""
Batches of all stages. They are endless and deterministic, and a position resumes them exactly. Any number of processes
computes the same micro-batches.

- packed_rows(Documents(...)) in pre-training and packed_rows(Conversations(...)) in mid-training have packed rows of
  T+1 tokens. A row takes the longest buffered document that fits, again and again. When none fits, one fills the row.
  There is no padding. This best fit is nanochat's. Each document begins with the BOS token, and so does each row.
- padded_conversations (SFT) has one padded conversation in each row. Only the tokens of the assistant count.
- rollouts (RL) has the model's own answers to a problem.

The packed rows of a run are numbered, and row k is row k // LANES of packer k % LANES. A step takes the next rows of
the run. They are dealt to its micro-batches one by one, as far as the packers allow: with stride = gcd(micro-batches of
a step, LANES), a micro-batch has every stride-th row. Rank r of W computes the micro-batches r, r + W, r + 2 W, ... For
4 packers and steps of 2 micro-batches of 4 rows:

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
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import get_dist_info, print0
from nanochat_fp4.data.dataset import Parts, in_random_order
from nanochat_fp4.data.tokenizer import without_end

LANES = 8  # The number of packers. With 1, 2, 4 or 8 processes none is shared.
VERSION = 2  # The version of a position.
IGNORE = -1  # A target with this value does not count in the loss.
CONTENT_SAMPLES = 256

Position = dict[str, Any]
Piece = tuple[tuple[int, int, int, int], np.ndarray]  # The key of Packer, and the tokens.
Batches = Iterator[tuple[Tensor, Tensor, Position]]
Device = torch.device | str


def evaluation_rows(tokens: int, B: int, T: int, world_size: int) -> tuple[int, int]:
    """Returns how many rows of T tokens an evaluation on `tokens` has, at least one, and how many batches of B rows
    each process takes."""
    rows = max(1, tokens // T)
    return rows, -(-rows // (B * world_size))


# ----------------------------------------------------------------------------------------------------------------------
# Positions


def check_position(position: Position | None, about: dict[str, Any]) -> None:
    """Raises UserError unless a position (None for the beginning) is of a loader that `about` describes."""
    for key, value in about.items() if position is not None else ():
        if position.get(key) != value:
            with_what = "the release" if key == "version" else "the text and the flags"
            remedy = f"resume with {with_what} that the run began with, or start a new run"
            raise UserError(f"the data position does not fit: {key} was {position.get(key)}, is {value}; {remedy}")


def join_positions(positions: list[Position]) -> Position:
    """Returns one position for any number of ranks, from those that the ranks saved at the same step, in any order.
    Raises UserError if they do not belong together."""
    joined, of_a_rank = dict(positions[0]), ("lanes", "epoch", "consumed")
    fit = all(p.get(key) == joined[key] for p in positions for key in joined if key not in of_a_rank)
    if "lanes" in joined:
        joined["lanes"] = {n: state for position in positions for n, state in position["lanes"].items()}
    if not fit or len(joined.get("lanes", range(LANES))) < LANES:
        raise UserError("the ranks' data positions do not belong together; resume from another checkpoint")
    return joined


# ----------------------------------------------------------------------------------------------------------------------
# Packing


def part(document: np.ndarray, first: int, length: int) -> np.ndarray:
    """The BOS token, and up to length - 1 tokens of the document from token `first` after its own BOS token on."""
    return np.concatenate([document[:1], document[1 + first : first + length]])


class Packer:
    """
    Best fit over the groups lane, lane + LANES, ... of `source`, whose groups count on through the epochs.

    A source has T, `buffer` (the number of documents to hold back), `refill` (the number to tokenize at a time), and
    tokens(g, i, count), which returns the tokens of documents i, i + 1, ... of group g with the BOS token in front, as
    int32 arrays. If no buffered document fits, source.filler(buffer) fills the row, and the rest of it is not used. If
    the source is `whole`, everything is used: T tokens of a longer document are a piece for themselves, and the rest of
    a filler becomes a piece again, each with another BOS token.

    A piece in the buffer has the key (length, g, i, first) for part(document i of group g, first, length). The buffer
    is sorted, so a binary search finds the longest piece that fits. Pieces of the same length leave the buffer in the
    order in which they came.
    """

    def __init__(self, source: Any, lane: int, state: dict[str, Any] | None = None):
        self.source, self.g, self.i = source, lane, 0  # The document to be read next.
        self.buffer: list[Piece] = []
        self.used = [0, 0, 0]  # Of what is in rows: documents, their tokens, and how many of these were not cropped.
        if state is not None:
            (self.g, self.i), self.used = state["next"], state["used"]
            for length, g, i, first in sorted(state["buffer"], key=lambda key: key[1:]):
                (document,) = source.tokens(g, i, 1)
                self.insert(part(document, first, length), g, i, first)

    def insert(self, piece: np.ndarray, g: int, i: int, first: int) -> None:
        bisect.insort(self.buffer, ((len(piece), g, i, first), piece))

    def refill(self) -> None:
        """Reads the next documents into the buffer."""
        documents = self.source.tokens(self.g, self.i, self.source.refill)
        for i, document in enumerate(documents, self.i):
            longest = self.source.T if self.source.whole else len(document)
            for first in range(0, max(1, len(document) - 1), longest):
                self.insert(part(document, first, longest + 1), self.g, i, first)
        self.g, self.i = (self.g, self.i + len(documents)) if documents else (self.g + LANES, 0)

    def next_row(self) -> np.ndarray:
        """Packs one row, int32 (T+1,)."""
        room, row = self.source.T + 1, []
        while room > 0:
            while len(self.buffer) < self.source.buffer:
                self.refill()
            fitting = bisect.bisect_left(self.buffer, ((room + 1,),))
            # Of the longest pieces that fit, the first to arrive.
            longest = bisect.bisect_left(self.buffer, ((self.buffer[fitting - 1][0][0],),))
            (length, g, i, first), piece = self.buffer.pop(longest if fitting else self.source.filler(self.buffer))
            row.append(piece[:room])
            kept = len(row[-1])
            if self.source.whole and kept < length:
                self.insert(part(piece, kept - 1, length), g, i, first + kept - 1)
                length = kept
            room -= kept
            self.used = [n + more for n, more in zip(self.used, (1, length, kept))]
        return np.concatenate(row)

    def state(self) -> dict[str, Any]:
        return {"next": [self.g, self.i], "used": self.used, "buffer": [key for key, _ in self.buffer]}


def packed_rows(
    source: Any, B: int, device: Device, micro_batches: int = 0, position: Position | None = None, num_rows: int = 0
) -> Batches:
    """
    Packs the rows of a source (see Packer) for ever, and returns an iterator over (inputs, targets, position).

    inputs and targets are int64 (B, T) on `device`, and targets are inputs shifted by one. Copies to a GPU do not
    block. The position is that after the step; with it the rows of the next step come first. For the log it says how
    far this rank has read at least ("epoch", from 1), and the number of documents in the rows of all ranks, divided
    among the ranks ("consumed").

    - micro_batches: the number of micro-batches of a step, over all processes. It is a multiple of their number, and by
      default equal to it.
    - num_rows: the targets of rows with this number in the run or a larger one are -1, so that they do not count. 0
      means that all rows count.

    Raises UserError for a position that is of another text, and ValueError for the other arguments.
    """
    _, rank, _, world_size = get_dist_info()
    M, T = micro_batches or world_size, source.T
    stride, apart = math.gcd(M, LANES), math.gcd(world_size, LANES)
    check_position(position, source.about)
    position = position or {"row": 0, "epoch": 1, "lanes": dict.fromkeys(map(str, range(LANES)))}
    first, epoch = position["row"], position["epoch"]
    if M % world_size or min(B, T) < 1 or first % stride:
        steps = f"steps of {M} micro-batches of {B} x {T} tokens"
        raise ValueError(f"{steps} cannot be dealt to {world_size} processes from row {first} on")
    lanes = {n: Packer(source, n, position["lanes"][str(n)]) for n in range(rank % apart, LANES, apart)}

    def pack(first: int) -> tuple[dict[int, np.ndarray], Position]:
        rows = {k: lanes[k % LANES].next_row() for k in range(first, first + M * B) if k % LANES in lanes}
        begun = [packer.g for packer in lanes.values() if packer.i] or [0]
        return rows, source.about | {
            "row": first + M * B,
            "lanes": {str(n): packer.state() for n, packer in lanes.items()},
            "epoch": 1 + min(begun) // source.groups_of_an_epoch,
            "consumed": sum(packer.used[0] for packer in lanes.values()) * apart / world_size,
        }

    def batches(first: int, epoch: int) -> Batches:
        ahead = ThreadPoolExecutor(1)  # Its thread ends with it. Nobody waits for the batch that it makes then.
        job = ahead.submit(pack, first)
        while True:
            rows, position = job.result()
            job = ahead.submit(pack, position["row"])
            if position["epoch"] > epoch == 1 and micro_batches:  # An evaluation reads its text again each time.
                print0(f"the text begins again after about {position['row'] * T:,} tokens")
            epoch = position["epoch"]
            for m in range(rank, M, world_size):
                start = first + m // stride * stride * B + m % stride
                numbers = range(start, start + stride * B, stride)
                batch = torch.from_numpy(np.stack([rows[k] for k in numbers])).long()
                # clone copies, while contiguous() of a single row would be a view.
                inputs, targets = batch[:, :-1].contiguous(), batch[:, 1:].clone()
                targets[[0 < num_rows <= k for k in numbers]] = IGNORE
                if torch.device(device).type == "cuda":
                    inputs, targets = inputs.pin_memory(), targets.pin_memory()
                yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True), position
            first = position["row"]

    return batches(first, epoch)


# ----------------------------------------------------------------------------------------------------------------------
# Text


class Documents:
    """
    The documents of a split in groups, as a source of Packer. The text, the tokenizer and the arguments determine the
    rows, so every method and seed of a comparison can read the same ones.

    - tokenizer: has encode(list of str, prepend=, num_threads=) and get_bos_token_id()
    - parts: the text of a split, from dataset.open_text. Their row groups are the groups. If there are fewer of them
      than packers, each is cut into one group for each packer, because packers with the same text would pack the same
      rows.
    - seed: 0 keeps the order in which the text is stored. Another number, up to 2^32 - 1, shuffles the row groups and
      the documents of each, in the same way in every epoch.
    - shuffle: all documents come in one random order, which the seed chooses and which is the same in every epoch
    - buffer: the number of documents held back to choose from, by all packers together. With more documents fewer
      tokens are cropped.

    Raises UserError for text that cannot be used.
    """

    def __init__(self, tokenizer: Any, T: int, parts: Parts, seed: int = 0, shuffle: bool = False, buffer: int = 1000):
        if not 0 <= seed < 2**32:
            raise UserError(f"--data-seed={seed} is not a number from 0 to {2**32 - 1}; choose one")
        self.tokenizer, self.T, self.whole = tokenizer, T, parts[0].whole
        count, digests = sum(sum(part.rows) for part in parts), {f"the text of {p.name}": p.digest() for p in parts}
        self.about = {"version": VERSION, "T": T, "column": parts[0].column, "documents": count, **digests}
        self.seed, self.parts = (0, [in_random_order(parts, seed)]) if shuffle else (seed, parts)
        # Empty row groups are left out, because a packer that met only these would look for a document forever.
        row_groups = [(p, k, n) for p, part in enumerate(self.parts) for k, n in enumerate(part.rows) if n > 0]
        cut = LANES if len(row_groups) < LANES else 1
        groups = [(p, k, n * c // cut, n * (c + 1) // cut) for p, k, n in row_groups for c in range(cut)]
        self.groups = [(p, k, start, stop) for p, k, start, stop in groups if start < stop]
        if self.seed:
            self.groups = [self.groups[k] for k in self._permutation(0, len(self.groups))]
        self.groups_of_an_epoch = len(self.groups)
        # A packer holds back at most a quarter of its share of an epoch, so that a small text is not read several times
        # before its first batch.
        self.buffer = max(1, min(-(-buffer // LANES), count // LANES // 4))
        self.refill = min(128, self.buffer)
        self.about |= {"data_seed": seed, "shuffle_documents": shuffle, "cut": cut, "buffer": self.buffer}
        self.read = functools.lru_cache(2 * LANES)(lambda p, k: self.parts[p].read(k))

    def tokens(self, g: int, i: int, count: int) -> list[np.ndarray]:
        p, k, start, stop = self.groups[g % len(self.groups)]
        texts = self.read(p, k)[start:stop]
        if self.seed:
            texts = [texts[place] for place in self._permutation(1 + g % len(self.groups), len(texts))]
        if not (texts := texts[i : i + count]):  # A tokenizer of transformers cannot encode an empty list.
            return []
        rows = self.tokenizer.encode(texts, prepend=self.tokenizer.get_bos_token_id(), num_threads=4)
        return [np.array(row, dtype=np.int32) for row in rows]

    def _permutation(self, number: int, n: int) -> np.ndarray:
        """The permutation of n things with this number. NumPy does not change the numbers of RandomState."""
        return np.random.RandomState([self.seed, number]).permutation(n)

    def filler(self, buffer: list[Piece]) -> int:
        """The shortest document, of which least is lost."""
        return 0


# ----------------------------------------------------------------------------------------------------------------------
# Conversations


def describe(dataset: Sequence, **settings: int) -> dict[str, Any]:
    """What a position says of its loader: the settings, and a hash of 256 conversations at equal distances. Raises
    UserError if there is no conversation."""
    if len(dataset) == 0:
        raise UserError("there is no conversation to train on; check the data folders and --allow-missing")
    digest, samples = hashlib.sha256(), min(len(dataset), CONTENT_SAMPLES)
    for conversation in (dataset[i * len(dataset) // samples] for i in range(samples)):
        digest.update(json.dumps(conversation, sort_keys=True, default=str).encode())
    return {"version": VERSION, "conversations": len(dataset), "content": digest.hexdigest()[:16], **settings}


def render(tokenizer: Any, dataset: Sequence, number: int, max_tokens: int) -> tuple[list[int], list[int]]:
    """The tokens and the mask of conversation `number` of the repeated dataset."""
    index = number % len(dataset)
    try:
        return tokenizer.render_conversation(dataset[index], max_tokens=max_tokens)
    except ValueError as e:
        raise UserError(f"conversation {index} of the mixture cannot be used: {e}; correct its source") from e


class Conversations:
    """
    Conversations as a source of Packer, one in each group.

    `buffer` is the number of conversations that a packer holds back to choose from, at most a quarter of its share of
    the dataset. nanochat holds back 100 in each process. Raises UserError if there is no conversation, and later if one
    cannot be rendered.
    """

    refill, whole = 1, False

    def __init__(self, dataset: Sequence, tokenizer: Any, T: int, buffer: int = 100):
        self.dataset, self.tokenizer, self.T, self.groups_of_an_epoch = dataset, tokenizer, T, len(dataset)
        self.buffer = max(1, min(buffer, len(dataset) // (4 * LANES)))
        self.about = describe(dataset, T=T, buffer=self.buffer)

    def tokens(self, g: int, i: int, count: int) -> list[np.ndarray]:
        return [] if i else [np.array(render(self.tokenizer, self.dataset, g, self.T)[0], dtype=np.int32)]

    def filler(self, buffer: list[Piece]) -> int:
        """The oldest conversation, as in nanochat's mid-training."""
        return min(range(len(buffer)), key=lambda place: buffer[place][0][1])


def padded(tokenizer: Any, rows: list[list[int]], masks: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns (inputs, targets), which are int64 (rows, length of the longest row - 1). A target is IGNORE where the
    mask is 0, and in the padding."""
    longest, padding = max(map(len, rows)), tokenizer.encode_special("<|assistant_end|>")
    ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
    mask = torch.tensor([row + [0] * (longest - len(row)) for row in masks])
    return ids[:, :-1].contiguous(), torch.where(mask[:, 1:] == 1, ids[:, 1:], IGNORE)


def padded_conversations(
    dataset: Sequence, tokenizer: Any, B: int, device: Device, max_tokens: int = 2048, position: Position | None = None
) -> Batches:
    """
    Yields (inputs, targets, position) for ever. inputs and targets are int64 (B, length of the longest conversation -
    1).

    Micro-batch m of the run has the conversations m * B to (m + 1) * B - 1 of the repeated dataset, each cut to
    max_tokens. Rank m % world_size gets this micro-batch. A target is -1 where the mask of render_conversation is 0,
    and in the padding. If the cut leaves nothing to learn in a conversation, the next one that has something replaces
    it. Raises UserError if no conversation has anything to learn, and for a position of another run.
    """
    _, rank, _, world_size = get_dist_info()
    about = describe(dataset, B=B, max_tokens=max_tokens)
    check_position(position, about)

    def learnable(number: int) -> tuple[list[int], list[int]]:
        for i in range(number, number + len(dataset)):
            ids, mask = render(tokenizer, dataset, i, max_tokens)
            if any(mask[1:]):
                return ids, mask
        problem = f"no conversation has anything to learn in {max_tokens} tokens"
        raise UserError(f"{problem}; train the base model with a larger --max-seq-len")

    number = position["micro_batch"] if position else 0
    while True:
        first = (number + rank) * B
        rows, masks = zip(*map(learnable, range(first, first + B)))
        number += world_size
        yield *(t.to(device) for t in padded(tokenizer, rows, masks)), about | {"micro_batch": number}


def rollouts(
    task: Any,
    tokenizer: Any,
    generate: Callable[[list[int], int, int], tuple[list[list[int]], list[list[int]]]],
    B: int,
    num_samples: int,
    device: Device,
    seen: list[tuple[float, float]],
    seed: int = 42,
    longest_prompt: int = 2048,
    position: Position | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Position]]:
    """
    Yields (inputs, targets, advantages, position) for ever, with the model's answers to one problem after the other of
    `task` (chat_data.Task).

    generate(prompt, rows, seed) -> (sequences, masks) computes answers as engine.Engine.generate_batch does. Each
    problem is answered num_samples times, B at a time, which makes num_samples / B micro-batches. The reward and the
    number of tokens of each answer are appended to `seen`.

    - inputs and targets are int64 (B, length of the problem's longest sequence - 1). A target is -1 in the prompt, in
      the answers of the calculator, and in the padding. The end token that the model chose is a target like its other
      tokens, so that the model learns when to stop.
    - advantages are FP32 (B,). The advantage of an answer is its reward minus the mean reward of all answers to the
      problem. This is nanochat's choice: GRPO without the division by the standard deviation.

    The answers to a problem are made when the first of its micro-batches is asked for, by the model as it is then.
    Problem n of the run goes to rank n % world_size, and its seeds depend on n alone.
    """
    _, rank, _, world_size = get_dist_info()
    about = describe(task, B=B, num_samples=num_samples)
    check_position(position, about)
    number = position["number"] if position else 0
    while True:
        problem = task[(number + rank) % len(task)]
        prompt = tokenizer.render_for_completion(problem, longest_prompt)
        rows, masks = [], []
        for first in range(0, num_samples, B):
            name = f"{seed} {number + rank} {first}".encode()
            sequences, learned = generate(prompt, B, int.from_bytes(hashlib.sha256(name).digest()[:4], "big") // 2)
            rows, masks = rows + sequences, masks + learned
        answers = [tokenizer.decode(without_end(row[len(prompt) :], tokenizer)) for row in rows]
        rewards = torch.tensor([float(task.evaluate(problem, answer)) for answer in answers])
        seen += [(reward, len(row) - len(prompt)) for reward, row in zip(rewards.tolist(), rows)]
        number += world_size
        tensors = [t.to(device).split(B) for t in (*padded(tokenizer, rows, masks), rewards - rewards.mean())]
        for batch in zip(*tensors):
            yield *batch, about | {"number": number}
