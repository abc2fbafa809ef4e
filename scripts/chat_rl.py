"""
Trains a chat model by reinforcement learning on GSM8K, which is nanochat's optional last stage. The model answers
problems, and right answers become likelier.

    python -m scripts.chat_rl
    torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl

A CPU can train a tiny model without a network:

    python -m scripts.chat_rl --data local --num-iterations=2 --examples-per-step=2 --max-new-tokens=16

As in nanochat, there is no reference model, no probability ratio and no clipping, because the weights that gave an
answer train on it once. The loss of a micro-batch is -sum(advantage * log p) over its tokens, divided by their number.
The learning rates fall linearly to zero.

In 4 bits the forward passes of sampling and training differ. An answer is drawn with a tensor scale for each token, so
that no token depends on other answers in the batch. Training has one tensor scale for the micro-batch, as in SFT.
"""

import argparse
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eval.common import resolve_eval_dir
from eval.gsm8k import GSM8K
from eval.local import LocalArithmetic
from eval.run import longest_prompt
from nanochat_fp4.cli import ArgumentParser, UserError, parse_finite, run_main
from nanochat_fp4.common import get_dist_info, is_ddp_initialized, mean_over_ranks
from nanochat_fp4.data.chat_data import describe_sources, load_sources
from nanochat_fp4.data.dataloader import rollouts
from nanochat_fp4.data.sources import Source
from nanochat_fp4.data.tokenizer import without_end
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.nvfp4.contexts import per_token_scale
from nanochat_fp4.training.flags import (
    add_common_arguments,
    add_data_flags,
    changed_flags,
    parse_steps,
    steps_of_epochs,
)
from nanochat_fp4.training.later_stage import LaterStage
from nanochat_fp4.training.trainer import due, run_stage


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Reinforcement learning on GSM8K")
    add_common_arguments(parser, init_lr_frac=0.05)
    add_data_flags(parser, "--data", "--eval-dir")
    parser.set_defaults(save_every=60)
    add = parser.add_argument
    add("--source", default="sft", choices=("mid", "sft"), help="mid|sft - which checkpoint to load from")
    # Training horizon
    add("--num-epochs", type=int, default=1, help="number of epochs over GSM8K")
    add("--num-iterations", type=parse_steps, default=-1, help="override number of iterations (-1 = use num_epochs)")
    # Batch sizes and sampling
    add("--device-batch-size", type=int, default=8, help="max batch size per forward pass")
    add("--examples-per-step", type=int, default=16, help="examples per optimization step across all ranks")
    add("--num-samples", type=int, default=16, help="number of samples per example")
    # Generation
    add("--max-new-tokens", type=int, default=256, help="max tokens to generate per sample")
    add("--temperature", type=parse_finite, default=1.0, help="sampling temperature")
    add("--top-k", type=int, default=50, help="top-k sampling (0 = disabled)")
    # Evaluation
    add("--eval-every", type=int, default=60, help="evaluate pass@k every N steps (-1 = disable)")
    add("--eval-examples", type=int, default=400, help="number of examples for pass@k evaluation")
    return parser.parse_args(argv)


def source(args: argparse.Namespace, split: str) -> Source:
    """Returns the source of the problems: GSM8K, or with --data=local the generated ones."""
    if args.data == "local":
        return Source("Local-Arithmetic", lambda: LocalArithmetic(size=500, split=split))
    return Source("GSM8K", lambda: GSM8K("main", split, eval_dir=args.eval_dir))


def policy_loss(forward, x: Tensor, y: Tensor, advantages: Tensor) -> Tensor:
    """Returns -sum(advantage * log p) divided by the number of tokens. Both count the targets y (B, T) that are not
    negative. advantages has one entry for each row (B,)."""
    losses = forward(x, y, loss_reduction="none").view_as(y)  # This is -log p, and 0 for targets that do not count.
    return (losses * advantages.unsqueeze(-1)).sum() / (y >= 0).sum().clamp(min=1)


def means_of(seen: list[tuple[float, float]], device: torch.device) -> dict[str, float]:
    """Returns the mean reward and the mean number of tokens of the answers of all ranks, and forgets them. All ranks
    must call this function together."""
    means = torch.tensor(seen, device=device).mean(0)
    seen.clear()
    return dict(zip(("reward", "sequence_length"), mean_over_ranks(means).tolist()))


class ChatRL(LaterStage):
    """The run of this stage."""

    ahead = False
    loss = staticmethod(policy_loss)

    def __init__(self, args: argparse.Namespace, until_exit: contextlib.ExitStack):
        B, samples, examples = args.device_batch_size, args.num_samples, args.examples_per_step
        world_size = get_dist_info()[3]
        if min(B, samples, examples) < 1 or samples % B or examples % world_size:
            raise UserError(
                f"--num-samples={samples} must be a multiple of --device-batch-size={B}, and "
                f"--examples-per-step={examples} of the number of processes, {world_size}"
            )
        if min(args.eval_examples, args.max_new_tokens) < 1 or args.temperature <= 0 or args.top_k < 0:
            raise UserError(
                f"--eval-examples={args.eval_examples} and --max-new-tokens={args.max_new_tokens} must be at least 1, "
                f"--temperature={args.temperature:g} above 0, and --top-k={args.top_k} not negative"
            )
        if args.parallel != "ddp":
            raise UserError("reinforcement learning generates on each process by itself; leave --parallel out")
        super().__init__("rl", args.source, args, until_exit)
        self.rows, self.seq_len = B, self.model.config.sequence_len
        self.micro_batches = samples // B * (examples // world_size)
        train_part = source(args, "train")
        val_part = source(args, "test")
        for part, what in ((train_part, "training"), (val_part, "validation")):
            load_sources([part], False, what)
        self.task, self.val_task = train_part.task, val_part.task
        self.longest = longest_prompt(self.model, args.max_new_tokens)  # A longer prompt is cut, as in chat_eval.
        self.sources, self.conversations = describe_sources([train_part]), len(self.task)
        self.num_steps = steps_of_epochs(args, self.conversations, "problems", "--examples-per-step", examples)
        self.engine = Engine(self.model, self.tokenizer)
        self.seen: list[tuple[float, float]] = []  # the reward and the number of tokens of each answer of a step
        batch = {
            "examples_per_step": examples, "num_samples": samples, "device_batch_size": B,
            "max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_k": args.top_k,
        }  # fmt: skip
        self.finetune(batch, lambda progress: 1.0 - progress)

    def batches(self, position: Any) -> Iterator:
        how = self.rows, self.args.num_samples, self.device, self.seen, self.args.seed, self.longest, position
        return rollouts(self.task, self.tokenizer, self.answers, *how)

    def further_numbers(self) -> Mapping[str, float]:
        return means_of(self.seen, self.device)

    @torch.no_grad()
    def answers(self, prompt: list[int], rows: int, seed: int, temperature: float | None = None):
        """Lets the model answer a problem. Returns `rows` sequences of tokens and their masks."""
        args, was_training = self.args, self.model.training
        self.model.eval()
        try:
            # The weights are quantized once for the answer, and not anew for each token.
            once = self.training_step.weights_once(args.max_new_tokens)
            with self.training_step.autocast(), per_token_scale(self.model), once:
                return self.engine.generate_batch(
                    prompt, rows, max_tokens=args.max_new_tokens, top_k=args.top_k, seed=seed,
                    temperature=args.temperature if temperature is None else temperature,
                )  # fmt: skip
        finally:
            self.model.train(was_training)

    def evaluate(self, last: bool) -> dict[str, float]:
        """Returns pass@k for k up to --device-batch-size: the share of the first --eval-examples problems that at least
        one of the first k answers solves. Answers are drawn at temperature 1. All ranks call this function together. It
        raises StopRequested after a signal."""
        args, rows, task = self.args, self.rows, self.val_task
        if not due(args.eval_every, self.step, last):
            return {}
        count = min(len(task), args.eval_examples)
        solved = torch.zeros(rows, device=self.device)
        with self.evaluating(), self.training_step.weights_once(count):
            problems = range(0, count, self.world_size)
            watched = self.signals.watch(iter(problems), self.device)
            for first in self.progress.meanwhile(watched, len(problems), "evaluation"):
                index = first + self.rank
                if index < count:
                    problem = task[index]
                    prompt = self.tokenizer.render_for_completion(problem, self.longest)
                    sequences, _ = self.answers(prompt, rows, args.seed + index, temperature=1.0)
                    said = (without_end(row[len(prompt) :], self.tokenizer) for row in sequences)
                    right = [bool(task.evaluate(problem, self.tokenizer.decode(answer))) for answer in said]
                    solved += torch.tensor([any(right[: k + 1]) for k in range(rows)], device=self.device)
        if is_ddp_initialized():
            dist.all_reduce(solved)
        return {f"pass@{k}": value for k, value in enumerate((solved / count).tolist(), 1)}

    def report(self) -> None:
        args = self.args
        setup = {"Flags": changed_flags(args, parse_args([])), "Training problems": self.conversations}
        setup |= {"Problems per step": args.examples_per_step, "Answers to a problem": args.num_samples}
        self.log_stage("Chat RL", setup)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.eval_dir = resolve_eval_dir(args.eval_dir)
    run_stage(args, ChatRL)


if __name__ == "__main__":
    run_main(main)
