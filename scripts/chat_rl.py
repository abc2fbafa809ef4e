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
import functools
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from eval.common import resolve_eval_dir
from eval.gsm8k import GSM8K
from eval.local import LocalArithmetic
from eval.run import longest_prompt
from nanochat_fp4.cli import ArgumentParser, UserError, parse_finite, run_main
from nanochat_fp4.common import is_ddp_initialized, mean_over_ranks
from nanochat_fp4.data.chat_data import Source, Task, describe_sources, load_sources
from nanochat_fp4.data.chat_loader import rollouts
from nanochat_fp4.data.tokenizer import without_end
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.nvfp4.contexts import per_token_scale
from nanochat_fp4.training import later_stage, loop
from nanochat_fp4.training.flags import (
    add_common_arguments,
    add_data_argument,
    add_eval_dir_argument,
    changed_flags,
    steps_of_epochs,
)
from nanochat_fp4.training.run import Data, Evaluation, Process, Run, Size, due, run_stage


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Reinforcement learning on GSM8K")
    add_common_arguments(parser, init_lr_frac=0.05)
    add_data_argument(parser)
    add_eval_dir_argument(parser)
    parser.set_defaults(save_every=60)
    add = parser.add_argument
    add("--source", default="sft", choices=("mid", "sft"), help="mid|sft - which checkpoint to load from")
    # Training horizon
    add("--num-epochs", type=int, default=1, help="number of epochs over GSM8K")
    add("--num-iterations", type=int, default=-1, help="override number of iterations (-1 = use num_epochs)")
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


class Answers:
    """Lets the model answer a problem. A call with (prompt, rows, seed) returns `rows` sequences of tokens and their
    masks."""

    def __init__(self, args: argparse.Namespace, run: Run):
        self.args, self.run, self.model, self.engine = args, run, run.model, Engine(run.model, run.tokenizer)

    @torch.no_grad()
    def __call__(self, prompt: list[int], rows: int, seed: int, temperature: float | None = None):
        args, was_training = self.args, self.model.training
        self.model.eval()
        try:
            # The weights are quantized once for the answer, and not anew for each token.
            once = self.run.training_step.weights_once(args.max_new_tokens)
            with self.run.training_step.autocast(), per_token_scale(self.model), once:
                return self.engine.generate_batch(
                    prompt, rows, max_tokens=args.max_new_tokens, top_k=args.top_k, seed=seed,
                    temperature=args.temperature if temperature is None else temperature,
                )  # fmt: skip
        finally:
            self.model.train(was_training)


def pass_at_k(args: argparse.Namespace, run: Run, answers: Answers, task: Task) -> dict[str, float]:
    """Returns pass@k for k up to --device-batch-size: the share of the first --eval-examples problems that at least one
    of the first k answers solves. Answers are drawn at temperature 1. All ranks call this function together. It raises
    StopRequested after a signal."""
    process, rows = run.process, args.device_batch_size
    longest = longest_prompt(run.model, args.max_new_tokens)
    count = min(len(task), args.eval_examples)
    solved = torch.zeros(rows, device=process.device)
    with run.training_step.weights_once(count):
        problems = range(0, count, process.world_size)
        watched = process.signals.watch(iter(problems), process.device)
        for first in run.progress.meanwhile(watched, len(problems), "evaluation"):
            index = first + process.rank
            if index < count:
                problem = task[index]
                prompt = run.tokenizer.render_for_completion(problem, longest)
                sequences, _ = answers(prompt, rows, args.seed + index, temperature=1.0)
                said = (without_end(row[len(prompt) :], run.tokenizer) for row in sequences)
                right = [bool(task.evaluate(problem, run.tokenizer.decode(answer))) for answer in said]
                solved += torch.tensor([any(right[: k + 1]) for k in range(rows)], device=process.device)
    if is_ddp_initialized():
        dist.all_reduce(solved)
    return {f"pass@{k}": value for k, value in enumerate((solved / count).tolist(), 1)}


def means_of(seen: list[tuple[float, float]], device: torch.device) -> dict[str, float]:
    """Returns the mean reward and the mean number of tokens of the answers of all ranks, and forgets them. All ranks
    must call this function together."""
    means = torch.tensor(seen, device=device).mean(0)
    seen.clear()
    return dict(zip(("reward", "sequence_length"), mean_over_ranks(means).tolist()))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.eval_dir = resolve_eval_dir(args.eval_dir)
    run_stage(args, functools.partial(train, args))


def train(args: argparse.Namespace, process: Process) -> None:
    """Sets up the run, trains, and writes the report at the end."""
    B, samples, examples, world_size = (
        args.device_batch_size, args.num_samples, args.examples_per_step, process.world_size
    )  # fmt: skip
    if min(B, samples, examples) < 1 or samples % B or examples % world_size:
        of_processes = f"--examples-per-step={examples} of the number of processes, {world_size}"
        raise UserError(f"--num-samples={samples} must be a multiple of --device-batch-size={B}, and {of_processes}")
    if min(args.eval_examples, args.max_new_tokens) < 1 or args.temperature <= 0 or args.top_k < 0:
        sizes = f"--eval-examples={args.eval_examples} and --max-new-tokens={args.max_new_tokens} must be at least 1"
        raise UserError(f"{sizes}, --temperature={args.temperature:g} above 0, and --top-k={args.top_k} not negative")
    run = later_stage.begin("rl", args.source, args, process)
    train_part, val_part = source(args, "train"), source(args, "test")
    task = load_sources([train_part], False, "training").tasks[0]
    val_task = load_sources([val_part], False, "validation").tasks[0]
    longest = longest_prompt(run.model, args.max_new_tokens)  # A longer prompt is cut, as in chat_eval.
    sources = describe_sources([train_part])
    steps = steps_of_epochs(args, len(task), "problems", "--examples-per-step", examples)
    later_stage.finetune(run, lambda progress: 1.0 - progress, loss=policy_loss)
    answers = Answers(args, run)
    seen: list[tuple[float, float]] = []

    def make_loader(position: dict | None) -> Iterator:
        return rollouts(task, run.tokenizer, answers, B, samples, process.device, seen, args.seed, longest, position)

    def evaluate(step: int, last: bool) -> dict[str, float]:
        return pass_at_k(args, run, answers, val_task)

    run.size = Size(B, run.model.config.sequence_len, samples // B * (examples // world_size), steps)
    run.data = Data(make_loader, ahead=False)
    run.evaluation = Evaluation(evaluate, functools.partial(due, args.eval_every))
    run.numbers = functools.partial(means_of, seen, process.device)
    batch = {
        "examples_per_step": examples, "num_samples": samples, "device_batch_size": B,
        "max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_k": args.top_k,
    }  # fmt: skip
    later_stage.record_settings(run, sources, batch)
    if loop.train(run):
        setup = {"Flags": changed_flags(args, parse_args([])), "Training problems": len(task)}
        setup |= {"Problems per step": examples, "Answers to a problem": samples}
        later_stage.report(run, "Chat RL", setup, sources)


if __name__ == "__main__":
    run_main(main)
