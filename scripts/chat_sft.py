"""
Fine-tunes a model on conversations (SFT). Each row is one conversation, and the loss counts what the assistant says.

    python -m scripts.chat_sft
    torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft

A CPU can train a tiny model without a network:

    python -m scripts.chat_sft --data local --num-iterations=20

The flags, the mixture of data and the mask of the loss are nanochat's.
"""

import argparse
import contextlib
from typing import Any

import torch

from eval.arc import ARC
from eval.common import resolve_eval_dir, source_of
from eval.gsm8k import GSM8K
from eval.local import LocalArithmetic, LocalChoice, training_sources
from eval.mmlu import MMLU
from eval.run import run_task
from eval.spellingbee import SpellingBee
from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.common import mean_over_ranks
from nanochat_fp4.data import chat_data
from nanochat_fp4.data.chat_data import SimpleSpelling, identity, smoltalk, words_source
from nanochat_fp4.data.dataloader import Batches, padded_conversations
from nanochat_fp4.data.sources import Source
from nanochat_fp4.parallel import unsharded
from nanochat_fp4.signals import StopRequested
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
    parser = ArgumentParser(description="Supervised finetuning for chat")
    add_common_arguments(parser, init_lr_frac=0.02)
    add_data_flags(parser)
    add = parser.add_argument
    add("--source", default="mid", choices=("base", "mid"), help="base|mid - which checkpoint to load from")
    # Training horizon
    add("--num-epochs", type=int, default=1, help="number of epochs")
    add("--num-iterations", type=parse_steps, default=-1, help="override number of iterations (-1 = use num_epochs)")
    # Batch sizes
    text = "per-device batch size (default: 4, or that of the model's training if it is smaller)"
    add("--device-batch-size", type=int, default=None, help=text)
    add("--target-examples-per-step", type=int, default=32, help="target examples per optimization step")
    # Evaluation
    add("--eval-every", type=int, default=100, help="evaluate val loss every N steps")
    add("--eval-steps", type=int, default=100, help="batches for val loss evaluation, of all processes")
    add("--eval-metrics-every", type=int, default=200, help="evaluate accuracy metrics every N steps (-1 = disable)")
    add("--eval-metrics-max-problems", type=int, default=1024, help="max problems per metric evaluation")
    return parser.parse_args(argv)


def train_sources(args: argparse.Namespace) -> list[Source]:
    """Returns the mixture of conversations for training."""
    talk = smoltalk("train", args.sft_dir, "SFT_ARGS=--sft-dir", stop=None if args.sft_dir else 10_000)
    if args.data == "local":
        local = training_sources(choice=500, arithmetic=500, code=200, spelling=300, bee=300)
        return local + [talk] * bool(args.sft_dir)
    eval_dir = resolve_eval_dir(args.eval_dir)
    return [
        source_of("ARC-Easy", ARC, "ARC-Easy", "train", args.eval_dir),
        source_of("ARC-Challenge", ARC, "ARC-Challenge", "train", args.eval_dir),
        source_of("GSM8K", GSM8K, "main", "train", args.eval_dir),
        talk,
        identity(),
        words_source("SimpleSpelling", SimpleSpelling, eval_dir, size=300),
        words_source("SpellingBee", SpellingBee, eval_dir, size=300),
    ]


def needs(args: argparse.Namespace) -> list[Source]:
    """Returns the mixtures for training, validation and metrics, for a plan."""
    return [*train_sources(args), *val_sources(args), *metric_sources(args)]


def rows_of_micro_batch(args: argparse.Namespace, processes: int, most: int = 4) -> int:
    """Returns the rows of a device's micro-batch. `most` is the largest number if no flag sets it. Raises UserError for
    flags that do not go together."""
    examples, B = args.target_examples_per_step, args.device_batch_size
    if B is None:
        B = next((B for B in range(min(4, most), 1, -1) if examples % (B * processes) == 0), 1)
    if B < 1 or examples < 1 or examples % (B * processes):
        batch = f"{B * processes} (--device-batch-size {B} on {processes} device(s))"
        problem = f"--target-examples-per-step={examples} is not a multiple of {batch}"
        raise UserError(f"{problem}; choose a multiple, or another --device-batch-size")
    return B


def check_flags(args: argparse.Namespace, sequence_len: int, processes: int) -> None:
    """Raises UserError for values that this stage cannot use. The plan calls this function, too, before any stage has
    run."""
    if args.num_iterations == -1 and args.num_epochs < 1:
        raise UserError(f"--num-epochs={args.num_epochs} makes no step; use at least 1, or --num-iterations")
    rows_of_micro_batch(args, processes)
    if args.eval_steps < 1:
        raise UserError(f"--eval-steps={args.eval_steps} measures nothing; use at least 1")
    if args.eval_metrics_every > 0 and args.eval_metrics_max_problems < 1:
        problem = f"--eval-metrics-max-problems={args.eval_metrics_max_problems} measures nothing"
        raise UserError(f"{problem}; use at least 1, or --eval-metrics-every=-1")


def steps_of(args: argparse.Namespace, conversations: int) -> int:
    """Returns the number of steps with so many conversations, which the plan counts, too. Raises UserError if it is
    0."""
    per_step = "--target-examples-per-step", args.target_examples_per_step
    return steps_of_epochs(args, conversations, "conversations", *per_step)


def val_sources(args: argparse.Namespace) -> list[Source]:
    """Returns the conversations for the validation loss."""
    if args.data == "local" and not args.sft_dir:
        return [Source("Local-Arithmetic", lambda: LocalArithmetic(size=200, split="test"))]
    return [smoltalk("test", args.sft_dir, "SFT_ARGS=--sft-dir")]


def metric_sources(args: argparse.Namespace) -> list[Source]:
    """Returns the tasks whose accuracy is watched during training. They are multiple choice, which is quick to
    evaluate."""
    if args.data == "local":
        return [Source("local_choice_acc", lambda: LocalChoice(size=200, split="test"))]
    return [
        source_of("mmlu_acc", MMLU, "all", "test", args.eval_dir),
        source_of("arc_easy_acc", ARC, "ARC-Easy", "test", args.eval_dir),
    ]


class ChatSFT(LaterStage):
    """The run of this stage."""

    def __init__(self, args: argparse.Namespace, until_exit: contextlib.ExitStack):
        super().__init__("sft", args.source, args, until_exit)
        examples, world_size = args.target_examples_per_step, self.world_size
        self.seq_len = self.model.config.sequence_len
        check_flags(args, self.seq_len, world_size)
        self.rows = rows_of_micro_batch(args, world_size, self.trained_with("device_batch_size", 4))
        self.micro_batches = examples // (self.rows * world_size)
        train_parts = train_sources(args)
        self.dataset = chat_data.load_sources(train_parts, args.allow_missing, "training")
        self.val_dataset = chat_data.load_sources(val_sources(args), args.allow_missing, "validation")
        self.metrics_sources = metric_sources(args) if args.eval_metrics_every > 0 else []
        chat_data.load_sources(self.metrics_sources, args.allow_missing, "metrics")
        self.sources, self.conversations = chat_data.describe_sources(train_parts), len(self.dataset)
        self.num_steps = steps_of(args, self.conversations)
        batch = {"target_examples_per_step": examples, "device_batch_size": self.rows}
        self.finetune(batch, lambda progress: 1.0 - progress)

    def batches(self, position: Any) -> Batches:
        where = self.tokenizer, self.rows, self.device, self.seq_len
        return padded_conversations(self.dataset, *where, position)

    def evaluate(self, last: bool) -> dict[str, float]:
        args, numbers = self.args, {}
        with self.evaluating():
            if last or due(args.eval_every, self.step, last):
                numbers["val_loss"] = self.validation_loss()
            if due(args.eval_metrics_every, self.step, last) and (last or self.step > 0):
                for source in (source for source in self.metrics_sources if source.task is not None):
                    numbers[source.name] = self.accuracy(source)
        return numbers

    def validation_loss(self) -> float:
        """Returns the mean loss over --eval-steps micro-batches, which are dealt to the processes. All processes
        compute equally many micro-batches, and those beyond --eval-steps count as 0."""
        args, rank, world_size, losses = self.args, self.rank, self.world_size, []
        with torch.no_grad(), self.training_step.autocast():
            numbers = range(rank, args.eval_steps + rank, world_size)
            where = self.tokenizer, self.rows, self.device, self.seq_len
            batches = self.signals.watch(padded_conversations(self.val_dataset, *where), self.device)
            for number, (x, y, _) in zip(numbers, batches):
                losses.append(self.model(x, y) * (number < args.eval_steps))
        return float(mean_over_ranks(torch.stack(losses).sum() * world_size / args.eval_steps))

    def accuracy(self, source: Source) -> float:
        """Returns the accuracy of a metric source. Raises StopRequested after a signal."""
        signals = self.signals
        how = {
            "max_problems": self.args.eval_metrics_max_problems,
            "interrupted": lambda: signals.signum is not None,
            "batch_size": 2 * self.rows,  # Without gradients there is memory for more rows.
        }
        with unsharded(self.model):
            score = run_task(source.task, self.model, self.tokenizer, source.name, **how)
        if signals.received(self.device):
            raise StopRequested
        return score.accuracy

    def report(self) -> None:
        setup = {"Flags": changed_flags(self.args, parse_args([])), "Training rows": self.conversations}
        self.log_stage("Chat SFT", setup | {"Examples per step": self.args.target_examples_per_step})


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.eval_dir = resolve_eval_dir(args.eval_dir)
    run_stage(args, ChatSFT)


if __name__ == "__main__":
    run_main(main)
