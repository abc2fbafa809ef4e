"""
Batches of conversations, for the stages after pre-training.

- PackedConversations (mid-training) has rows of T+1 tokens, which best fit fills as in pre-training. Every token counts
  in the loss.
- ConversationBatches (SFT) has one padded conversation in each row. Only the tokens of the assistant count.
- Rollouts (RL) has the model's own answers to a problem.

All of them are endless and deterministic, and they resume exactly. The rows of a step do not depend on the number of
processes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import mean_over_ranks
from nanochat_fp4.data.chat_data import Task
from nanochat_fp4.data.packing import THIS_PROCESS, Deal, Lane, PackedRows, at_least_one, check_position
from nanochat_fp4.data.tokenizer import without_end

IGNORE = -1  # A target with this value does not count in the loss.
CONTENT_SAMPLES = 256


def _check(dataset: Task, **sizes: int) -> None:
    if len(dataset) == 0:
        raise UserError("there is no conversation to train on; check the data folders and --allow-missing")
    at_least_one(**sizes)


def _tokens(tokenizer: Any, dataset: Task, index: int, max_tokens: int) -> tuple[list[int], list[int]]:
    try:
        return tokenizer.render_conversation(dataset[index], max_tokens=max_tokens)
    except ValueError as e:
        raise UserError(f"conversation {index} of the mixture cannot be used: {e}; correct its source") from e


class _Lane(Lane):
    """One packer, which gets the conversations lane, lane + lanes, ... of the endlessly repeated dataset."""

    def _read(self, number: int) -> None:
        loader = self.loader
        ids, _ = _tokens(loader.tokenizer, loader.dataset, number % len(loader.dataset), loader.T)
        self.insert(number, 0, np.array(ids, dtype=np.int32))

    def refill(self) -> None:
        self._read(self.g)
        self.g += self.loader.lanes

    def cropped(self) -> int:
        """Returns the place of the conversation to crop, which is the oldest, as in nanochat's mid-training."""
        return min(range(len(self.keys)), key=lambda place: self.keys[place][1])

    def state(self) -> dict[str, Any]:
        return {"next": self.g, "buffer": sorted(number for _, number, _ in self.keys)}

    def restore(self, state: dict[str, Any]) -> None:
        self.g = int(state["next"])
        for number in state["buffer"]:
            self._read(int(number))


class PackedConversations(PackedRows):
    """
    Packed rows of conversations: an endless iterator over (inputs, targets, state). inputs and targets are int64 (B,
    T).

    - buffer_size: the number of conversations that a lane holds back to choose from. It is at most a quarter of the
      lane's share of the dataset. nanochat holds back 100 in each process.
    - deal, num_rows: see PackedRows
    - state["consumed"]: the number of conversations in this rank's rows so far. Its sum over all ranks is the progress
      in the epoch.

    Raises UserError if there is no conversation, if one cannot be rendered, and for a state of another run.
    """

    def __init__(
        self,
        dataset: Task,
        tokenizer: Any,
        B: int,
        T: int,
        device: torch.device | str,
        deal: Deal = THIS_PROCESS,
        buffer_size: int = 100,
        state: dict[str, Any] | None = None,
        num_rows: int | None = None,
    ):
        _check(dataset, B=B, T=T, buffer_size=buffer_size)
        self.dataset, self.tokenizer, self.content = dataset, tokenizer, _content(dataset)
        deal = deal.filled(state)
        super().__init__(_Lane, B, T, device, deal, num_rows, min(buffer_size, len(dataset) // (4 * deal.lanes)))
        if state is not None:
            check_position(state, self.config())
            self.restore(state)
            self.consumed = int(state["consumed"])

    def config(self) -> dict[str, Any]:
        """Returns the values that decide which rows a state means."""
        config = {"conversations": len(self.dataset), "content": self.content}
        return config | {"T": self.T, "lanes": self.lanes, "lane_buffer": self.lane_buffer}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of PackedRows, with the number of conversations in this rank's rows so far."""
        return super().state_dict() | {"consumed": self.consumed}


class _Dealt:
    """An endless iterator whose item n goes to rank n % world_size. KEY is the name under which the state has the
    number of the item that rank 0 takes next."""

    KEY = ""

    def __init__(
        self,
        dataset: Task,
        tokenizer: Any,
        B: int,
        device: torch.device | str,
        rank: int,
        world_size: int,
        state: dict[str, Any] | None,
        **sizes: int,
    ):
        _check(dataset, B=B, **sizes)
        self.dataset, self.tokenizer, self.B, self.device = dataset, tokenizer, B, torch.device(device)
        self.config = {"conversations": len(dataset), "content": _content(dataset), "B": B, **sizes}
        self.rank, self.world_size, self.number = rank, world_size, rank
        if state is not None:
            check_position(state, self.config)
            self.number = int(state[self.KEY]) + rank

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self

    def state_dict(self) -> dict[str, Any]:
        return self.config | {self.KEY: self.number - self.rank}

    def padded(self, rows: list[list[int]], masks: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Returns (inputs, targets), which are int64 (rows, length of the longest row - 1). A target is IGNORE where
        the mask is 0, and in the padding."""
        longest, padding = max(map(len, rows)), self.tokenizer.encode_special("<|assistant_end|>")
        ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
        mask = torch.tensor([row + [0] * (longest - len(row)) for row in masks])
        return ids[:, :-1].contiguous(), torch.where(mask[:, 1:] == 1, ids[:, 1:], IGNORE)


class ConversationBatches(_Dealt):
    """
    An endless iterator over (inputs, targets, state). inputs and targets are int64 (B, length of the longest
    conversation - 1).

    Micro-batch m of the run has the conversations m * B to (m + 1) * B - 1 of the repeated dataset, each cut to
    max_tokens. Rank m % world_size gets this micro-batch. A target is -1 where the mask of render_conversation is 0,
    and in the padding. If the cut leaves nothing to learn in a conversation, the next one that has something replaces
    it.

    Raises UserError if no conversation has anything to learn, and for a state of another run.
    """

    KEY = "micro_batch"

    def __init__(
        self,
        dataset: Task,
        tokenizer: Any,
        B: int,
        device: torch.device | str,
        rank: int = 0,
        world_size: int = 1,
        max_tokens: int = 2048,
        state: dict[str, Any] | None = None,
    ):
        self.max_tokens = max_tokens
        super().__init__(dataset, tokenizer, B, device, rank, world_size, state, max_tokens=max_tokens)

    def _conversation(self, number: int) -> tuple[list[int], list[int]]:
        for i in range(number, number + len(self.dataset)):
            ids, mask = _tokens(self.tokenizer, self.dataset, i % len(self.dataset), self.max_tokens)
            if any(mask[1:]):
                return ids, mask
        problem = f"no conversation has anything to learn in {self.max_tokens} tokens"
        raise UserError(f"{problem}; train the base model with a larger --max-seq-len")

    def __next__(self) -> tuple[Tensor, Tensor, dict[str, Any]]:
        first = self.number * self.B
        rows, masks = zip(*(self._conversation(number) for number in range(first, first + self.B)))
        self.number += self.world_size
        inputs, targets = self.padded(rows, masks)
        return inputs.to(self.device), targets.to(self.device), self.state_dict()


class Rollouts(_Dealt):
    """
    An endless iterator over (inputs, targets, advantages, state), with the model's answers to one problem after the
    other.

    generate(prompt, rows, seed) -> (sequences, masks) computes answers as engine.Engine.generate_batch does. Each
    problem is answered num_samples times, B at a time, which makes num_samples / B micro-batches.

    - inputs and targets are int64 (B, length of the problem's longest sequence - 1). A target is -1 in the prompt, in
      the answers of the calculator, and in the padding. The end token that the model chose is a target like its other
      tokens, so that the model learns when to stop.
    - advantages are FP32 (B,). The advantage of an answer is its reward minus the mean reward of all answers to the
      problem. This is nanochat's choice: GRPO without the division by the standard deviation.

    The answers to a problem are made when the first of its micro-batches is asked for, by the model as it is then.
    Problem n of the run goes to rank n % world_size, and its seeds depend on n alone.
    """

    KEY = "number"

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        generate: Callable[[list[int], int, int], tuple[list[list[int]], list[list[int]]]],
        B: int,
        num_samples: int,
        device: torch.device | str,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 42,
        state: dict[str, Any] | None = None,
        longest_prompt: int = 2048,
    ):
        super().__init__(task, tokenizer, B, device, rank, world_size, state, num_samples=num_samples)
        self.generate, self.num_samples, self.seed, self.longest_prompt = generate, num_samples, seed, longest_prompt
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        # The rewards, and the lengths of answers in tokens, since numbers() was last called.
        self.rewards: list[float] = []
        self.lengths: list[int] = []

    def __next__(self) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        if not self.waiting:
            self.waiting = self._answer(self.number)
            self.number += self.world_size
        return *self.waiting.pop(0), self.state_dict()

    def _answer(self, number: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        problem = self.dataset[number % len(self.dataset)]
        prompt = self.tokenizer.render_for_completion(problem, self.longest_prompt)
        rows: list[list[int]] = []
        masks: list[list[int]] = []
        for first in range(0, self.num_samples, self.B):
            seed = int.from_bytes(hashlib.sha256(f"{self.seed} {number} {first}".encode()).digest()[:4], "big") // 2
            for part, generated in zip((rows, masks), self.generate(prompt, self.B, seed)):
                part += generated
        answers = [self.tokenizer.decode(without_end(row[len(prompt) :], self.tokenizer)) for row in rows]
        rewards = torch.tensor([float(self.dataset.evaluate(problem, answer)) for answer in answers])
        self.rewards += rewards.tolist()
        self.lengths += [len(row) - len(prompt) for row in rows]
        inputs, targets = self.padded(rows, masks)
        tensors = [t.to(self.device) for t in (inputs, targets, rewards - rewards.mean())]
        return list(zip(*(t.split(self.B) for t in tensors)))

    def numbers(self) -> dict[str, float]:
        """Returns the means over the answers of all ranks since the last call. All ranks must call this method
        together."""
        means = torch.tensor([sum(v) / max(1, len(v)) for v in (self.rewards, self.lengths)], device=self.device)
        self.rewards, self.lengths = [], []
        return dict(zip(("reward", "sequence_length"), mean_over_ranks(means).tolist()))


def _content(dataset: Task) -> str:
    """Returns 16 hex digits of a hash of the conversations. Of a large dataset, 256 conversations are hashed, at
    equal distances."""
    digest = hashlib.sha256()
    samples = min(len(dataset), CONTENT_SAMPLES)
    for conversation in (dataset[i * len(dataset) // samples] for i in range(samples)):
        digest.update(json.dumps(conversation, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]
