"""
Runs a benchmark. The problems of a task are divided among the processes, and each process answers several at a time.

A categorical task takes one forward pass per batch, and compares the logits of the letters where the answer begins. In
a generative task the engine answers several prompts side by side, and the text is judged. A problem's result does not
depend on the other problems in its batch, for three reasons: padding comes after a prompt, each problem draws its own
random numbers, and quantized activations have a scale for each token (engine.py).
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from nanochat_fp4.common import get_dist_info, is_ddp_initialized, print0
from nanochat_fp4.data.chat_data import Task
from nanochat_fp4.data.tokenizer import without_end
from nanochat_fp4.generation.engine import Engine, check_finite
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.nvfp4.contexts import per_token_scale, quantize_weights_once
from nanochat_fp4.progress import Progress


@dataclass
class Score:
    """The result of one task. outcomes[i] says whether problem i was solved, and others[name][i] whether it was by the
    judge of this name (Task.judges)."""

    outcomes: list[bool]
    version: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    others: dict[str, list[bool]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of problems."""
        return len(self.outcomes)

    @property
    def accuracy(self) -> float:
        """The share of problems that were solved."""
        return sum(self.outcomes) / self.count

    @property
    def interval(self) -> float:
        """
        Two standard deviations of the accuracy, if the problems are regarded as drawn at random, as in the paper's
        Table 5.

        If none or all of the answers are right, the standard deviation is 0. The distance to the other end of Wilson's
        interval (1927) then takes its place. No right answer among 32 means that the accuracy is below 11%, and not
        that it is 0.
        """
        spread = self.accuracy * (1 - self.accuracy)
        return 2 * math.sqrt(spread / self.count) if spread > 0 else 4 / (self.count + 4)

    def __str__(self) -> str:
        """'38.82% ± 2.85% (455/1172)', or '0 of 8' where the interval would leave 0 to 100%."""
        if self.interval > min(self.accuracy, 1 - self.accuracy):
            return f"{sum(self.outcomes)} of {self.count}"
        return f"{100 * self.accuracy:.2f}% ± {100 * self.interval:.2f}% ({sum(self.outcomes)}/{self.count})"


def run_task(
    task: Task, model: torch.nn.Module, tokenizer: Any, name: str = "", batch_size: int = 8, num_samples: int = 1,
    max_new_tokens: int = 512, temperature: float = 0.0, top_k: int | None = 50, max_problems: int | None = None,
    seed: int = 42, interrupted: Callable[[], bool] = lambda: False, dtype: torch.dtype | None = None,
) -> Score:  # fmt: skip
    """
    Evaluates a model on a task. All ranks call this function together. The model is evaluated as it is: quantized, or
    in BF16 inside of full_precision.

    Only the first max_problems problems of a fixed, shuffled order are evaluated. Each problem gets num_samples
    answers, of which one must be right. Answers differ only if the temperature is above 0. Before each batch
    interrupted() is called. If it returns True, the evaluation ends early, and the remaining problems count as wrong.
    dtype is the dtype of operations that are not quantized, by default BF16 on CUDA and FP32 elsewhere. Raises
    ValueError if there is nothing to evaluate, for arguments that do not fit the task or the model, and for logits that
    are not finite.
    """
    count, what = len(task) if max_problems is None else min(len(task), max_problems), name or type(task).__name__
    if count < 1:
        raise ValueError(f"{what} has no problem to evaluate; check --max-problems and the files")
    if min(batch_size, num_samples, max_new_tokens) < 1:
        flags = f"--batch-size {batch_size}, --num-samples {num_samples} and --max-new-tokens {max_new_tokens}"
        raise ValueError(f"{flags} must be at least 1")
    _, rank, _, world_size = get_dist_info()
    device = model.get_device()
    outcomes = {name: torch.zeros(count, dtype=torch.int32, device=device) for name in task.judges}
    cropped = torch.zeros((), dtype=torch.int32, device=device)
    settings: dict[str, Any] = {}
    if task.eval_type == "categorical":
        evaluate: Callable = lambda batch: _choose(batch, model, tokenizer)  # noqa: E731
    elif task.eval_type == "generative":
        settings = {"num_samples": num_samples, "max_new_tokens": max_new_tokens, "temperature": temperature}
        settings |= {"top_k": top_k, "seed": seed} if temperature else {}
        sampling = {"max_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        evaluate = lambda batch: _answer(batch, task, model, tokenizer, num_samples, sampling)  # noqa: E731
    else:
        raise ValueError(f"{name}: unknown eval_type {task.eval_type!r}; use categorical or generative")

    longest = longest_prompt(model, max_new_tokens if task.eval_type == "generative" else 0)
    was_training = model.training
    model.eval()
    mine = range(rank, count, world_size)
    done = right = 0
    desc = what + (f", process 1 of {world_size}" if world_size > 1 else "")
    try:
        with (
            Progress(total=len(mine), desc=desc, unit="problem") as progress,
            torch.no_grad(),
            autocast(torch.device(device).type, dtype),
            per_token_scale(model),
            quantize_weights_once(model),
        ):
            for batch in _batches(task, mine, tokenizer, batch_size, longest):
                if interrupted():
                    break
                cropped += sum(len(problem.prompt) > longest for problem in batch)
                for problem, answers in zip(batch, evaluate(batch)):
                    for judge, evaluate_answer in task.judges.items():
                        solved = any(evaluate_answer(problem.conversation, answer) for answer in answers)
                        outcomes[judge][problem.index] = int(solved)
                    done, right = done + 1, right + int(outcomes[""][problem.index])
                # The line after the last batch is the result, with its interval.
                said = {"accuracy": f"{100 * right / done:.1f}%"} if done < len(mine) else {}
                progress.set_postfix(said, refresh=False)
                progress.update(len(batch))
    finally:
        model.train(was_training)
    if is_ddp_initialized():
        for tensor in (*outcomes.values(), cropped):
            dist.all_reduce(tensor)
    if cropped:
        print0(f"note: {what}: {int(cropped)} prompts were cut after {longest:,} tokens, more than the model can read")
    others = {judge: tensor.bool().tolist() for judge, tensor in outcomes.items()}
    return Score(others.pop(""), task.VERSION, settings, others)


class _Problem(NamedTuple):
    index: int
    conversation: dict[str, Any]
    prompt: list[int]


NANOCHATS_LIMIT = 2048  # nanochat's limit for the tokens before the assistant's opening token.


def longest_prompt(model: torch.nn.Module, max_new_tokens: int) -> int:
    """Returns the largest number of tokens in a prompt, before the assistant's opening token, that leaves room for the
    answer. Raises ValueError if there is no room."""
    positions = getattr(model, "rotary_seq_len", None)
    room = NANOCHATS_LIMIT if positions is None else positions - max_new_tokens - 1
    if room < 1:
        problem = f"--max-new-tokens={max_new_tokens} leaves no room for a prompt in the model's {positions} positions"
        raise ValueError(f"{problem}; lower --max-new-tokens")
    return min(NANOCHATS_LIMIT, room)


def _batches(
    task: Task, indices: range, tokenizer: Any, batch_size: int, longest: int, pool: int = 64
) -> Iterator[list[_Problem]]:
    """Yields batches of problems of similar length. They are sorted by length within pools of `pool` batches. `longest`
    is the largest number of tokens in a prompt."""
    for start in range(0, len(indices), pool * batch_size):
        conversations = [(i, task[i]) for i in indices[start : start + pool * batch_size]]
        problems = [_Problem(i, c, tokenizer.render_for_completion(c, longest)) for i, c in conversations]
        problems.sort(key=lambda p: len(p.prompt))
        for j in range(0, len(problems), batch_size):
            yield problems[j : j + batch_size]


# ----------------------------------------------------------------------------------------------------------------------
# Choices


@contextlib.contextmanager
def _head_only_at(model: torch.nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """In this context the output head computes only one position of each row. The logits are `(B, 1, V)`, which saves
    gigabytes compared with `(B, T, V)`."""
    rows = torch.arange(len(positions), device=positions.device)
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: (args[0][rows, positions].unsqueeze(1),))
    try:
        yield
    finally:
        handle.remove()


def _letter_id(letter: str, tokenizer: Any) -> int:
    ids = tokenizer.encode(letter)
    if len(ids) != 1:
        problem = f"the answer {letter!r} is {len(ids)} tokens in this tokenizer"
        raise ValueError(f"{problem}; choices must be one token each")
    return ids[0]


def _choose(batch: list[_Problem], model: torch.nn.Module, tokenizer: Any) -> list[list[str]]:
    """Returns for each problem the letter that is the most likely first token of the answer."""
    longest = max(len(p.prompt) for p in batch)
    padding = tokenizer.get_bos_token_id()  # Padding comes after the prompt, where no compared position sees it.
    device = model.get_device()
    ids = torch.tensor([p.prompt + [padding] * (longest - len(p.prompt)) for p in batch], device=device)
    last = torch.tensor([len(p.prompt) - 1 for p in batch], device=device)
    with _head_only_at(model, last):
        logits = check_finite(model(ids)[:, 0], model)
    answers = []
    for row, problem in zip(logits, batch):
        letters = problem.conversation["letters"]
        best = int(row[[_letter_id(letter, tokenizer) for letter in letters]].argmax())
        answers.append([letters[best]])
    return answers


# ----------------------------------------------------------------------------------------------------------------------
# Free answers


def _answer(
    batch: list[_Problem], task: Task, model: torch.nn.Module, tokenizer: Any, num_samples: int, sampling: dict
) -> list[list[str]]:
    """Returns num_samples answers to each problem, as text. The text holds the calculator's special tokens, but not the
    end token."""
    engine = Engine(model, tokenizer)
    results = engine.generate_many([p.prompt for p in batch], num_samples=num_samples, **sampling)
    return [
        [tokenizer.decode(without_end(tokens[len(p.prompt) :], tokenizer)) for tokens in samples]
        for p, samples in zip(batch, results)
    ]
