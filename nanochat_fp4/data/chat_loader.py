"""
Batches of conversations, for the stages after pre-training.

- packed_conversations (mid-training) has rows of T+1 tokens, which best fit fills as in pre-training. Every token
  counts in the loss.
- padded_conversations (SFT) has one padded conversation in each row. Only the tokens of the assistant count.
- rollouts (RL) has the model's own answers to a problem.

All of them are endless and deterministic, and a position resumes them exactly. The rows of a step do not depend on the
number of processes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import get_dist_info
from nanochat_fp4.data.chat_data import Task
from nanochat_fp4.data.dataloader import LANES, VERSION, Batches, check_position, packed_rows
from nanochat_fp4.data.tokenizer import without_end

IGNORE = -1  # A target with this value does not count in the loss.
CONTENT_SAMPLES = 256


def describe(dataset: Task, **settings: int) -> dict[str, Any]:
    """What a position says of its loader: the settings, and a hash of 256 conversations at equal distances. Raises
    UserError if there is no conversation."""
    if len(dataset) == 0:
        raise UserError("there is no conversation to train on; check the data folders and --allow-missing")
    digest, samples = hashlib.sha256(), min(len(dataset), CONTENT_SAMPLES)
    for conversation in (dataset[i * len(dataset) // samples] for i in range(samples)):
        digest.update(json.dumps(conversation, sort_keys=True, default=str).encode())
    return {"version": VERSION, "conversations": len(dataset), "content": digest.hexdigest()[:16], **settings}


def render(tokenizer: Any, dataset: Task, number: int, max_tokens: int) -> tuple[list[int], list[int]]:
    """The tokens and the mask of conversation `number` of the repeated dataset."""
    index = number % len(dataset)
    try:
        return tokenizer.render_conversation(dataset[index], max_tokens=max_tokens)
    except ValueError as e:
        raise UserError(f"conversation {index} of the mixture cannot be used: {e}; correct its source") from e


class Conversations:
    """Conversations as a source of dataloader.Packer, one in each group."""

    refill, whole, says_again = 1, False, False

    def __init__(self, dataset: Task, tokenizer: Any, T: int, buffer_size: int):
        self.dataset, self.tokenizer, self.T = dataset, tokenizer, T
        self.buffer = max(1, min(buffer_size, len(dataset) // (4 * LANES)))
        self.about = describe(dataset, T=T, buffer=self.buffer)

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, g: int) -> list[int]:
        return [g]

    def encode(self, numbers: list[int]) -> list[np.ndarray]:
        return [np.array(render(self.tokenizer, self.dataset, n, self.T)[0], dtype=np.int32) for n in numbers]

    def filler(self, keys: list[tuple[int, int, int, int]]) -> int:
        """The oldest conversation, as in nanochat's mid-training."""
        return min(range(len(keys)), key=lambda place: keys[place][1])


def packed_conversations(
    dataset: Task, tokenizer: Any, B: int, T: int, device: torch.device | str, buffer_size: int = 100, **how: Any
) -> Batches:
    """
    Returns packed rows of conversations. `how` are further arguments of dataloader.packed_rows.

    - buffer_size: the number of conversations that a packer holds back to choose from. It is at most a quarter of the
      packer's share of the dataset. nanochat holds back 100 in each process.
    - position["consumed"]: the number of conversations in the rows so far, divided among the ranks. Its sum over all
      ranks is the progress in the epoch.

    Raises UserError if there is no conversation, if one cannot be rendered, and for a position of another run.
    """
    return packed_rows(Conversations(dataset, tokenizer, T, buffer_size), B, device, **how)


def padded(tokenizer: Any, rows: list[list[int]], masks: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Returns (inputs, targets), which are int64 (rows, length of the longest row - 1). A target is IGNORE where the
    mask is 0, and in the padding."""
    longest, padding = max(map(len, rows)), tokenizer.encode_special("<|assistant_end|>")
    ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows])
    mask = torch.tensor([row + [0] * (longest - len(row)) for row in masks])
    return ids[:, :-1].contiguous(), torch.where(mask[:, 1:] == 1, ids[:, 1:], IGNORE)


def padded_conversations(
    dataset: Task,
    tokenizer: Any,
    B: int,
    device: torch.device | str,
    max_tokens: int = 2048,
    position: dict[str, Any] | None = None,
    ranks: tuple[int, int] | None = None,
) -> Batches:
    """
    Yields (inputs, targets, position) for ever. inputs and targets are int64 (B, length of the longest conversation -
    1).

    Micro-batch m of the run has the conversations m * B to (m + 1) * B - 1 of the repeated dataset, each cut to
    max_tokens. Rank m % world_size gets this micro-batch. A target is -1 where the mask of render_conversation is 0,
    and in the padding. If the cut leaves nothing to learn in a conversation, the next one that has something replaces
    it.

    - ranks: (rank, world size), by default of this process

    Raises UserError if no conversation has anything to learn, and for a position of another run.
    """
    rank, world_size = ranks or get_dist_info()[1::2]
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
        rows, masks = zip(*(learnable(n) for n in range(first, first + B)))
        number += world_size
        yield *(t.to(device) for t in padded(tokenizer, rows, masks)), about | {"micro_batch": number}


def rollouts(
    task: Task,
    tokenizer: Any,
    generate: Callable[[list[int], int, int], tuple[list[list[int]], list[list[int]]]],
    B: int,
    num_samples: int,
    device: torch.device | str,
    seen: list[tuple[float, float]],
    seed: int = 42,
    longest_prompt: int = 2048,
    position: dict[str, Any] | None = None,
    ranks: tuple[int, int] | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, dict[str, Any]]]:
    """
    Yields (inputs, targets, advantages, position) for ever, with the model's answers to one problem after the other.

    generate(prompt, rows, seed) -> (sequences, masks) computes answers as engine.Engine.generate_batch does. Each
    problem is answered num_samples times, B at a time, which makes num_samples / B micro-batches. The reward and the
    number of tokens of each answer are appended to `seen`.

    - inputs and targets are int64 (B, length of the problem's longest sequence - 1). A target is -1 in the prompt, in
      the answers of the calculator, and in the padding. The end token that the model chose is a target like its other
      tokens, so that the model learns when to stop.
    - advantages are FP32 (B,). The advantage of an answer is its reward minus the mean reward of all answers to the
      problem. This is nanochat's choice: GRPO without the division by the standard deviation.
    - ranks: (rank, world size), by default of this process

    The answers to a problem are made when the first of its micro-batches is asked for, by the model as it is then.
    Problem n of the run goes to rank n % world_size, and its seeds depend on n alone.
    """
    rank, world_size = ranks or get_dist_info()[1::2]
    about = describe(task, B=B, num_samples=num_samples)
    check_position(position, about)
    number = position["number"] if position else 0
    while True:
        problem = task[(number + rank) % len(task)]
        prompt = tokenizer.render_for_completion(problem, longest_prompt)
        rows: list[list[int]] = []
        masks: list[list[int]] = []
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
