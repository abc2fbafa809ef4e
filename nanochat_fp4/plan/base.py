"""The base training of a plan: flags as base_train's own parser reads them, steps, memory and hours."""

import argparse
import contextlib
import importlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.models.families import family_of_flags
from nanochat_fp4.models.optim8bit import state_bytes
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.plan.cards import PUBLISHED, Card
from nanochat_fp4.plan.settings import Settings
from nanochat_fp4.training.memory import Memory, choose, largest
from nanochat_fp4.training.micro_batch import plan_accumulation
from nanochat_fp4.training.new_model import check_machine, resolve_horizon

# Flags of base_train that variables set. A message about a flag names the variable.
FLAGS = {
    "DEPTH": "--depth", "ASPECT_RATIO": "--aspect-ratio", "HEAD_DIM": "--head-dim", "SEQ_LEN": "--max-seq-len",
    "WINDOW_PATTERN": "--window-pattern", "NUM_ITERATIONS": "--num-iterations",
    "DATA_RATIO": "--target-param-data-ratio", "TOTAL_BATCH": "--total-batch-size", "MATRIX_LR": "--matrix-lr",
    "EMBEDDING_LR": "--embedding-lr", "UNEMBEDDING_LR": "--unembedding-lr", "DEVICE_BATCH": "--device-batch-size",
    "EVAL_EVERY": "--eval-every", "EVAL_TOKENS": "--eval-tokens", "SAMPLE_EVERY": "--sample-every",
    "CORE_EVERY": "--core-metric-every", "SAVE_EVERY": "--save-every", "SEED": "--seed",
}  # fmt: skip
TOKENIZER_FLAGS = {"VOCAB_SIZE": "--vocab-size", "TOK_CHARS": "--max-chars"}  # of tok_train
LOSS_FLAGS = {"EVAL_BATCH": "--device-batch-size", "SPLIT_TOKENS": "--split-tokens"}  # of base_loss
COMPARED = ("bf16", "fp8", "clover", "clover_feedback", "clover_mixed")  # methods that every plan compares
DEPTHS = (40, 36, 32, 28, 26, 24, 20, 16, 12, 8, 4)  # that a card too small for the default may get


@dataclass(frozen=True)
class Base:
    """One base training."""

    method: str
    tag: str
    argv: list[str]  # of base_train
    args: argparse.Namespace
    parameters: int
    weights: int  # of matrix products
    work: dict[int, float]  # shares of the multiply-adds in 4, 8 and 16 bits
    flops: int  # of a token, attention included
    more_flops: float  # the same over those of a token in rows as PUBLISHED has them
    steps: int
    tokens: int
    checkpoint_bytes: float
    ways: list[Memory]  # how it can train on the card, its own way first; empty on a CPU


def parse(script: str, argv: list[str], variable: str, names: Mapping[str, str] = {}) -> argparse.Namespace:
    """The flags as the stage's own parser reads them. variable: what a user would have to change, in words. names: the
    variables that set flags of this stage. An error about one of their values begins with the variable."""
    module = importlib.import_module(f"scripts.{script}")  # by name: the package stands below the scripts
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            return module.parse_args(argv)
    except SystemExit:
        lines = said.getvalue().strip().splitlines() or ["--help prints no plan"]
        line = re.sub(r" \(see [^()]+ --help\)$", f" (see python -m scripts.{script} --help)", lines[-1])
        message = in_variables(line.removeprefix("error: "), names)
    except UserError as e:
        message = in_variables(str(e), names)
    raise UserError(message if message.startswith(tuple(names)) else f"{variable}: {message}")


def in_variables(message: str, names: Mapping[str, str]) -> str:
    """A message about flags, for somebody who has set variables. A flag that is a part of a longer word stays, because
    the user has typed that word."""
    for name, flag in names.items():
        message = re.sub(rf"(?<![\w-])(argument )?{flag}(?![\w-])", name, message)
    return message


def describe(settings: Settings, method: str, card: Card | None, processes: int, states: Sequence[str]) -> Base:
    """The base training with a method. card: None on a CPU. Raises UserError for what base_train would refuse."""
    how = method, card, processes, states
    try:
        return _describe(settings, *how)
    except (UserError, ValueError) as e:  # a ValueError is of the model's config
        message = in_variables(str(e), _names(settings))
    changed = {k: v for k, v in settings.set_by_user.items() if k in FLAGS}
    if settings.args["BASE_ARGS"]:
        changed["BASE_ARGS"] = repr(settings.args["BASE_ARGS"])
    if not any(name in message for name in changed):  # the model knows neither flags nor variables
        blamed = [name for name in changed if _passes(settings.without(name), *how)]
        if blamed or not any(name in message for name in FLAGS):
            message = f"{', '.join(f'{k}={changed[k]}' for k in blamed or changed) or settings.run}: {message}"
    raise UserError(message)


def _passes(settings: Settings, *how: Any) -> bool:
    try:
        _describe(settings, *how)
    except (UserError, ValueError):
        return False
    return True


def _names(settings: Settings) -> dict[str, str]:
    """The variables of FLAGS whose flags the user has not typed in BASE_ARGS, where the last one counts. A flag that an
    error offers and that has no variable is given in BASE_ARGS."""
    names = FLAGS | {"BASE_ARGS=--device-type": "--device-type"}
    return {name: flag for name, flag in names.items() if flag not in settings.flags_of("BASE_ARGS")}


def _describe(settings: Settings, method: str, card: Card | None, processes: int, states: Sequence[str]) -> Base:
    own, tag = settings.words_of("BASE_ARGS"), settings.tag(method)
    argv = [f"{flag}={settings.numbers[name]}" for name, flag in FLAGS.items()]
    argv = [f"--method={method}", f"--model-tag={tag}", *argv, "--resume-from-step=latest"]
    args = parse("base_train", argv + own, "BASE_ARGS" if own else settings.run, _names(settings))
    model, work = make_model(args, int(settings.numbers["VOCAB_SIZE"]), method)
    flops = usual = model.estimate_flops()
    if not PUBLISHED.items() <= vars(args).items():
        as_published = argparse.Namespace(**vars(args) | PUBLISHED)
        usual = make_model(as_published, int(settings.numbers["VOCAB_SIZE"]), "bf16")[0].estimate_flops()
    steps = resolve_horizon(args, flops, model.num_scaling_params())
    rows = plan_accumulation(args.total_batch_size, 1, args.max_seq_len, processes)
    sizes = [n for n in range(1, min(rows, 1024) + 1) if rows % n == 0]
    if args.device_batch_size != "auto":
        plan_accumulation(args.total_batch_size, args.device_batch_size, args.max_seq_len, processes)
        sizes = [args.device_batch_size]
    if card is None:
        check_machine(args, torch.device("cpu"), flops * args.total_batch_size * steps)
    ways: list[Memory] = []
    if card is not None and family_of_flags(args).memory_is_counted:
        total = card.gib * 2**30
        chosen_by_user = {"--state", "--recompute"} & settings.flags_of("BASE_ARGS")
        if chosen_by_user or processes > 1:  # several processes share moments, which is not counted
            ways = [largest(model, total, sizes, args.state, args.recompute)]
        else:
            ways = choose(model, total, sizes, states)
            argv += ways[0].flags
            args = parse("base_train", argv + own, "BASE_ARGS")
    parameters, embedding = model.num_scaling_params(), model.transformer.wte.weight.numel()
    saved = sum(state_bytes(model, args.state, gpu=card is not None)[key] for key in ("weights", "moments"))
    tokens = steps * args.total_batch_size
    counts = parameters, parameters - embedding, work, flops, flops / usual
    return Base(method, tag, argv + own, args, *counts, steps, tokens, saved, ways)


def make_model(args: argparse.Namespace, vocab_size: int, method: str) -> tuple[Any, dict[int, float]]:
    """The model on the meta device, converted as the run will convert it, and the run's work in 4, 8 and 16 bits."""
    family = family_of_flags(args)
    config = family.config_from_flags(args, vocab_size)
    with contextlib.redirect_stdout(io.StringIO()), torch.device("meta"):
        model = family.model(config)
    nf.convert(model, method, verbose=False)
    plan = MethodPlan.parse(method, args.layer_methods, args.method_phases)
    plan.apply(model, 0.0)
    return model, plan.work(model)


def deepest(settings: Settings, card: Card, states: Sequence[str]) -> int | None:
    """The largest of DEPTHS below the default whose base training fits the card with all methods; None where none does,
    where the default fits, or where the user has chosen a depth or a micro-batch."""
    wanted, chosen = settings.numbers["DEPTH"], {"DEPTH", "DEVICE_BATCH"} & set(settings.set_by_user)
    chosen |= {"--depth", "--device-batch-size"} & settings.flags_of("BASE_ARGS")
    if chosen or _fits(settings, card, states):
        return None
    for depth in (d for d in DEPTHS if d < int(wanted)):
        smaller = replace(settings, numbers=settings.numbers | {"DEPTH": depth})
        if _fits(smaller, card, states):
            return depth
    return None


def fitting_methods(settings: Settings, card: Card, processes: int, states: Sequence[str]) -> list[str]:
    """Those of COMPARED with which a micro-batch of this model fits the card."""
    found = [(method, describe(settings, method, card, processes, states).ways) for method in COMPARED]
    return [method for method, ways in found if ways and ways[0].rows]


def roomiest(settings: Settings, base: Base, card: Card, processes: int, states: Sequence[str]) -> Memory:
    """The way to train with the largest micro-batch that fits the card; it has 0 rows where not even one fits."""
    any_rows = f"{settings.args['BASE_ARGS']} --device-batch-size=auto"  # the last flag counts
    free = replace(settings, args=settings.args | {"BASE_ARGS": any_rows})
    return max(describe(free, base.method, card, processes, states).ways, key=lambda way: way.rows)


def _fits(settings: Settings, card: Card, states: Sequence[str]) -> bool:
    found = [describe(settings, method, card, 1, states).ways for method in settings.methods]
    return all(not ways or ways[0].rows for ways in found)
