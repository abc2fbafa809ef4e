"""
Mid-trains the base model on packed conversations, which teach it the tokens of conversations, multiple choice and
tools.

    python -m scripts.mid_train
    torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device-batch-size=16

A CPU can train a tiny model without a network:

    python -m scripts.mid_train --data local --device-batch-size=8 --total-batch-size=2048 --eval-tokens=8192 \\
        --num-iterations=50

The flags and the mixture of data are nanochat's. The loss counts every token, including those of the user.
"""

import argparse
import contextlib
from typing import Any

from eval.common import resolve_eval_dir, source_of
from eval.gsm8k import GSM8K
from eval.local import LocalArithmetic, LocalChoice, training_sources
from eval.mmlu import MMLU
from eval.spellingbee import SpellingBee
from nanochat_fp4.cli import ArgumentParser, run_main
from nanochat_fp4.common import print0
from nanochat_fp4.data import chat_data
from nanochat_fp4.data.chat_data import LOCAL_WORDS, SimpleSpelling, identity, smoltalk, words_source
from nanochat_fp4.data.dataloader import Batches, Conversations, evaluation_rows, packed_rows
from nanochat_fp4.data.sources import Source
from nanochat_fp4.data.tokenizer import get_token_bytes
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.models.gpt import batch_scale
from nanochat_fp4.models.optim import muon_momentum
from nanochat_fp4.training.flags import (
    add_common_arguments,
    add_compile_argument,
    add_data_flags,
    changed_flags,
    parse_steps,
)
from nanochat_fp4.training.later_stage import LaterStage
from nanochat_fp4.training.memory import plan_accumulation
from nanochat_fp4.training.trainer import due, run_stage


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Midtrain the model")
    add_common_arguments(parser, init_lr_frac=1.0)
    add_data_flags(parser)
    add_compile_argument(parser)
    add = parser.add_argument
    # Training horizon
    add("--num-iterations", type=parse_steps, default=-1, help="number of optimization steps (-1 = full epoch)")
    # Batch sizes
    add("--max-seq-len", type=int, default=None, help="max context length (default: that of the base model)")
    text = "per-device batch size (default: 32, or that of the base training if it is smaller)"
    add("--device-batch-size", type=int, default=None, help=text)
    add("--total-batch-size", type=int, default=524288, help="total batch size in tokens")
    # Evaluation
    add("--eval-every", type=int, default=150, help="evaluate val bpb every N steps (-1 = disable)")
    add("--eval-tokens", type=int, default=20 * 524288, help="number of tokens to evaluate val loss on")
    # Output
    add("--dry-run", action="store_true", help="log to wandb but skip checkpoints/report")
    return parser.parse_args(argv)


def train_sources(args: argparse.Namespace) -> list[Source]:
    """Returns the mixture of conversations for training."""
    talk = smoltalk("train", args.sft_dir, "MID_ARGS=--sft-dir")
    if args.data == "local":
        local = training_sources(choice=2000, arithmetic=2000, code=500, spelling=2000, bee=1000)
        return local + [talk] * bool(args.sft_dir)
    eval_dir = resolve_eval_dir(args.eval_dir)
    return [
        talk,
        source_of("MMLU auxiliary_train", MMLU, "auxiliary_train", "train", args.eval_dir),
        source_of("GSM8K", GSM8K, "main", "train", args.eval_dir),
        # These are listed twice, for two epochs of them.
        identity(),
        identity(),
        words_source("SimpleSpelling", SimpleSpelling, eval_dir, size=200_000),
        words_source("SpellingBee", SpellingBee, eval_dir, size=80_000),
    ]


def needs(args: argparse.Namespace) -> list[Source]:
    """Returns the mixtures for training and validation, for a plan."""
    return [*train_sources(args), *val_sources(args)]


def batch_sizes(args: argparse.Namespace, sequence_len: int, processes: int, most: int = 32) -> tuple[int, int, int]:
    """Returns (rows of a device's micro-batch, rows of an evaluation, batches of an evaluation). Raises UserError for
    flags that do not go together.

    sequence_len: the number of tokens in a row of the base model
    most:         the largest number of rows for a device if no flag sets it
    """
    T, total = args.max_seq_len or sequence_len, args.total_batch_size
    B = args.device_batch_size
    if B is None:
        B = next((B for B in range(min(32, most), 1, -1) if total > 0 and total % (B * T * processes) == 0), 1)
    plan_accumulation(total, B, T, processes)
    return B, *evaluation_rows(args.eval_tokens, B, T, processes)


def check_flags(args: argparse.Namespace, sequence_len: int, processes: int) -> None:
    """Raises UserError for values that this stage cannot use. The plan calls this function, too, before any stage has
    run."""
    batch_sizes(args, sequence_len, processes)


def val_sources(args: argparse.Namespace) -> list[Source]:
    """Returns the mixture of conversations for validation."""
    talk = smoltalk("test", args.sft_dir, "MID_ARGS=--sft-dir")
    if args.data == "local":
        return [
            *[talk] * bool(args.sft_dir),
            Source("Local-Choice", lambda: LocalChoice(size=200, split="test")),
            Source("Local-Arithmetic", lambda: LocalArithmetic(size=200, split="test")),
            Source("SpellingBee (local words)", lambda: SpellingBee(size=100, split="test", words=LOCAL_WORDS)),
        ]
    return [
        talk,
        # The limits give these the same proportions as in the training mixture.
        source_of("MMLU", MMLU, "all", "test", args.eval_dir, stop=5200),
        source_of("GSM8K", GSM8K, "main", "test", args.eval_dir, stop=420),
    ]


def lr_multiplier(progress: float) -> float:
    """Returns the factor of the learning rates: 1 for the first 80% of the run, and then a linear decay to 0."""
    return 1.0 if progress < 0.8 else max(0.0, (1 - progress) / 0.2)


def scalar_lr(total_batch_size: int) -> float:
    """Returns the learning rate of the layers' scalars, which is 0.5 for nanochat's batches of 2^19 tokens.

    It is scaled to the batch as in pre-training, because Adam's first step is as large as the rate. With 0.5 for
    batches of 2,048 tokens the loss of a small model rose from 7.2 to 12.4 at once (dev/LOG.md, 2026-11-27).
    """
    return 0.5 * batch_scale(total_batch_size)


class MidTraining(LaterStage):
    """The run of this stage."""

    def __init__(self, args: argparse.Namespace, until_exit: contextlib.ExitStack):
        super().__init__("mid", "base", args, until_exit)
        sequence_len, world_size = self.model.config.sequence_len, self.world_size
        pretrained_with = self.trained_with("device_batch_size")
        check_flags(args, sequence_len, world_size)
        self.rows, self.num_rows, self.eval_steps = batch_sizes(args, sequence_len, world_size, pretrained_with or 32)
        if pretrained_with and self.rows > pretrained_with:
            print0(f"note: the base model trained with --device-batch-size={pretrained_with}; {self.rows} may not fit")
        self.seq_len, self.num_steps = args.max_seq_len or sequence_len, args.num_iterations
        self.step_tokens, self.eval_tokens = args.total_batch_size, self.num_rows * self.seq_len
        self.micro_batches = args.total_batch_size // (self.rows * self.seq_len * world_size)
        train_parts = train_sources(args)
        self.dataset = chat_data.load_sources(train_parts, args.allow_missing, "training")
        self.val_dataset = chat_data.load_sources(val_sources(args), args.allow_missing, "validation")
        self.sources, self.conversations = chat_data.describe_sources(train_parts), len(self.dataset)
        self.token_bytes = get_token_bytes(device=self.device)
        batch = {"total_batch_size": args.total_batch_size, "max_seq_len": self.seq_len}
        self.finetune(batch, lr_multiplier, muon_momentum, scalar_lr(args.total_batch_size))

    def batches(self, position: Any) -> Batches:
        conversations = Conversations(self.dataset, self.tokenizer, self.seq_len)
        micro_batches = self.micro_batches * self.world_size
        return packed_rows(conversations, self.rows, self.device, micro_batches, position)

    def evaluate(self, last: bool) -> dict[str, float]:
        if not due(self.args.eval_every, self.step, last):
            return {}
        conversations = Conversations(self.val_dataset, self.tokenizer, self.seq_len)
        batches = packed_rows(conversations, self.rows, self.device, num_rows=self.num_rows)
        with self.evaluating(), self.training_step.autocast():
            batches = self.signals.watch(batches, self.device)
            batches = self.progress.meanwhile(batches, self.eval_steps, "evaluation")
            return {"val_bpb": evaluate_bpb(self.training_step.forward, batches, self.eval_steps, self.token_bytes)}

    def report(self) -> None:
        setup = {"Flags": changed_flags(self.args, parse_args([])), "Training conversations": self.conversations}
        self.log_stage("Midtraining", setup | {"Tokens per step": self.args.total_batch_size})


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    args.eval_dir = resolve_eval_dir(args.eval_dir)
    run_stage(args, MidTraining)


if __name__ == "__main__":
    run_main(main)
