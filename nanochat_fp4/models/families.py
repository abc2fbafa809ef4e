"""The families of models that base_train trains: nanochat's GPT, and the paper's Llama-like models.

Everything else trains, saves and evaluates a model without asking for its family. The model and its config have the
attributes and methods of gpt.GPT and gpt.GPTConfig that training calls. A family here says what is left: which flags
make its config, what its runs are called, how a checkpoint names it, and what it cannot do. A new family is a file with
the model, a subclass of Family, and an entry of FAMILIES.
"""

import argparse
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import nn

from nanochat_fp4.cli import UserError
from nanochat_fp4.models import flash_attention, llama
from nanochat_fp4.models.gpt import GPT, GPTConfig, config_from_depth


class Family:
    """The interface of a family."""

    # The value of "family" in a checkpoint's model config. It is also a field of the config, unless it is "".
    name: str
    model: type[nn.Module]
    config: type
    # Settings of a pre-training run that follow from the family and decide the run's bits.
    settings: dict[str, Any] = {}
    # Whether training/memory.py counts the memory that a step of such a model takes.
    memory_is_counted = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags of base_train that only this family has."""

    def is_chosen(self, args: argparse.Namespace) -> bool:
        """Whether the flags of base_train ask for this family."""
        raise NotImplementedError

    def config_from_flags(self, args: argparse.Namespace, vocab_size: int) -> Any:
        """Returns the config that the flags of base_train describe. Raises UserError if they contradict each other."""
        raise NotImplementedError

    def run_name(self, args: argparse.Namespace) -> str:
        """Returns the first part of the names of runs with these flags, such as d20 or llama-tiny."""
        raise NotImplementedError

    def complete(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        """Adds to the config and the weights of a checkpoint what older revisions did not have, in place."""

    def recompute_problem(self, recompute: str, config: Any, device_type: str) -> str | None:
        """Returns the reason why a model of this config cannot be trained with this --recompute, and what to do
        instead. Returns None if it can. The value is not "none", which every model can be trained with."""
        return None


class GPTFamily(Family):
    """nanochat's GPT. Its checkpoints name no family, because nanochat's do not."""

    name, model, config = "", GPT, GPTConfig
    memory_is_counted = True

    def is_chosen(self, args: argparse.Namespace) -> bool:
        return True

    def config_from_flags(self, args: argparse.Namespace, vocab_size: int) -> GPTConfig:
        shape = args.depth, vocab_size, args.max_seq_len, args.head_dim, args.aspect_ratio, args.window_pattern
        return replace(config_from_depth(*shape), separate_qkv=args.separate_qkv)

    def run_name(self, args: argparse.Namespace) -> str:
        return f"d{args.depth}"

    def complete(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        # Before nanochat had windows and per-layer scalars, all layers saw the full context. The scalars added here
        # change nothing.
        config.setdefault("window_pattern", "L")
        weights.setdefault("resid_lambdas", torch.ones(config.get("n_layer", 0)))
        weights.setdefault("x0_lambdas", torch.zeros(config.get("n_layer", 0)))

    def recompute_problem(self, recompute: str, config: GPTConfig, device_type: str) -> str | None:
        if not recompute.startswith("codes"):
            return None
        reason = config.separate_qkv and "it needs q, k and v as one layer, without --separate-qkv"
        reason = reason or flash_attention.unkept_reason(device_type, config.head_dim)
        return reason and f"{reason}; use --recompute=mlp or --recompute=all"


class LlamaFamily(Family):
    """The paper's Llama-like models (llama.py)."""

    name, model, config = "llama", llama.Llama, llama.LlamaConfig
    settings = {"schedule": "OneCycleLR"}

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        text = f"instead of nanochat's GPT one of the paper's Llama-like models ({', '.join(llama.SIZES)}), with its "
        text += "optimizer, rates and schedule; the paper has --max-seq-len=512 --total-batch-size=262144"
        parser.add_argument("--llama", default="", help=text)

    def is_chosen(self, args: argparse.Namespace) -> bool:
        return bool(args.llama)

    def config_from_flags(self, args: argparse.Namespace, vocab_size: int) -> llama.LlamaConfig:
        if args.separate_qkv:
            raise UserError("--separate-qkv is not for the --llama models; leave one of them out")
        return llama.config_from_size(args.llama, vocab_size, args.max_seq_len)

    def run_name(self, args: argparse.Namespace) -> str:
        return f"llama-{args.llama}"

    def recompute_problem(self, recompute: str, config: llama.LlamaConfig, device_type: str) -> str | None:
        return "it is not for the --llama models; leave it out"


FAMILIES = (LlamaFamily(), GPTFamily())  # The first family that the flags choose is taken, and GPT is the default.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of base_train that choose another family than nanochat's GPT."""
    for family in FAMILIES:
        family.add_arguments(parser)


def family_of_flags(args: argparse.Namespace) -> Family:
    """Returns the family that the flags of base_train choose."""
    return next(family for family in FAMILIES if family.is_chosen(args))


def family_of_config(config: Any) -> Family:
    """Returns the family of a model's config."""
    return next(family for family in FAMILIES if isinstance(config, family.config))


def recompute_problem(recompute: str, config: Any, device: torch.device) -> str | None:
    """Returns the reason why the device cannot train a model of this config with this --recompute, and what to do
    instead. Returns None if it can."""
    if recompute == "none":
        return None
    return family_of_config(config).recompute_problem(recompute, config, device.type)


def config_record(config: Any) -> dict[str, Any]:
    """Returns a model's config as a checkpoint has it. Switches that are off are left out, so that nanochat can read
    the config."""
    return {key: value for key, value in asdict(config).items() if value is not False}


def config_from_record(record: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """Returns the config that a checkpoint's model config describes. What older revisions of nanochat did not have is
    added to the weights.

    A record that names no family, or an unknown one, is taken for a GPT's. Raises TypeError or ValueError for a record
    that is not one of the family.
    """
    record = {key: value for key, value in record.items() if value is not False}  # as config_record leaves them out
    name = record.pop("family", "")
    family = next((family for family in FAMILIES if family.name == name), GPTFamily())
    family.complete(record, weights)
    config = family.config(**record)
    numbers, switches = (
        {field.name: getattr(config, field.name) for field in fields(config) if field.type is kind}
        for kind in (int, bool)
    )
    if not all(isinstance(value, bool) for value in switches.values()):
        raise ValueError(f"{' and '.join(switches)} must be true or false")
    if not all(isinstance(value, int) and value > 0 for value in numbers.values()):
        raise ValueError(f"these must be positive whole numbers: {numbers}")
    return config
