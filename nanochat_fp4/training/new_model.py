"""Turns the flags of pre-training into a new model, a number of steps, and the settings that decide the run's bits."""

import argparse
import hashlib
import json
from typing import Any

import torch

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import set_cpu_threads
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.models.cross_entropy import default_head, head_problem
from nanochat_fp4.models.families import config_record, family_of_config, family_of_flags, recompute_problem
from nanochat_fp4.models.optim8bit import set_state
from nanochat_fp4.training.flags import check_iterations
from nanochat_fp4.training.load_model import check_model_fits
from nanochat_fp4.training.resume import BRANCH_SETTINGS

MAX_STEPS = 10**9  # A larger number is a typing error.
CPU_FLOPS = 1e11  # A generous estimate of how many FLOPs a CPU computes in a second.
CPU_TOO_MUCH = 1e15  # A run with more FLOPs takes a CPU hours.


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device, method: str) -> torch.nn.Module:
    """Returns the model with its first weights and the method's output head. Raises UserError if the device cannot
    train it in the way that the flags ask for."""
    family = family_of_flags(args)
    config = family.config_from_flags(args, vocab_size)
    if reason := recompute_problem(args.recompute, config, device):
        raise UserError(f"--recompute={args.recompute}: {reason}")
    check_model_fits(config, device)
    set_cpu_threads(device, config.n_embd)
    with torch.device("meta"):
        model = family.model(config)
    model.lm_head.precision = args.head or default_head(method)
    if problem := head_problem(model.lm_head.precision, *model.lm_head.weight.shape):
        raise UserError(f"--head: {problem}")
    set_state(model, args.state)
    model.to_empty(device=device)
    model.init_weights()
    model.recompute = args.recompute
    return model


def run_settings(
    args: argparse.Namespace, method: str, model: torch.nn.Module, tokenizer: RustBPETokenizer
) -> dict[str, Any]:
    """Returns the settings of a pre-training run that decide its bits. A run can only be resumed with the same
    settings."""
    return {
        "method": method,
        **{k: v for k, v in config_record(model.config).items() if k not in BRANCH_SETTINGS},
        "total_batch_size": args.total_batch_size,
        "seed": args.seed,
        "data_seed": args.data_seed or None,
        "shuffle_documents": args.shuffle_documents or None,
        **family_of_config(model.config).settings,
        "tokenizer": tokenizer.fingerprint(),
        **{k: getattr(args, k) or None for k in BRANCH_SETTINGS},
        **head_setting(model),
    }


def head_setting(model: torch.nn.Module) -> dict[str, Any]:
    """Returns the setting of a run that says in which precision the output head of its model is."""
    return {"head": None if model.lm_head.precision == "bf16" else model.lm_head.precision}


def comparison_key(settings: dict[str, Any]) -> str:
    """Returns a key that is the same for two runs if they differ only in the method or in how they are spread over
    devices."""
    apart = {"method", "world_size", "parallel", "head", *BRANCH_SETTINGS}
    # Without these settings the text is read in the order in which it is stored.
    apart |= {key for key in ("data_seed", "shuffle_documents") if not settings[key]}
    # Runs from before this setting existed used Polar Express. They stay comparable.
    apart |= {"orthogonalizer"} if settings["orthogonalizer"] == "polar_express" else set()
    comparable = {k: v for k, v in settings.items() if k not in apart}
    return hashlib.sha256(json.dumps(comparable, sort_keys=True).encode()).hexdigest()[:12]


def resolve_horizon(args: argparse.Namespace, flops_per_token: float, num_params: int) -> int:
    """Returns the number of optimizer steps that --num-iterations, --target-flops or --target-param-data-ratio asks
    for. Raises UserError if it is less than one step or more than MAX_STEPS, or if no flag is set."""
    check_iterations(args.num_iterations)
    if args.num_iterations > MAX_STEPS:
        raise UserError(f"--num-iterations={args.num_iterations} is more than {MAX_STEPS:,} steps; lower it")
    if args.num_iterations > 0:
        return args.num_iterations
    if args.total_batch_size < 1:
        raise UserError(f"--total-batch-size={args.total_batch_size} is less than one token; raise it")
    if args.target_flops > 0:
        steps, flag = round(args.target_flops / (flops_per_token * args.total_batch_size)), "--target-flops"
    elif args.target_param_data_ratio > 0:
        tokens = int(args.target_param_data_ratio * num_params)
        steps, flag = tokens // args.total_batch_size, "--target-param-data-ratio"
    else:
        raise UserError("no training horizon; set --num-iterations, --target-flops or --target-param-data-ratio")
    if steps < 1:
        raise UserError(f"{flag} asks for less than one step of {args.total_batch_size} tokens; raise it")
    if steps > MAX_STEPS:
        raise UserError(f"{flag} asks for {float(steps):.3g} steps of {args.total_batch_size} tokens; lower it")
    return steps


def check_machine(args: argparse.Namespace, device: torch.device, flops: float) -> None:
    """Raises UserError if the run would take hours on this machine, which has no GPU. --device-type=cpu allows it."""
    if device.type == "cpu" and not args.device_type and flops > CPU_TOO_MUCH:
        raise UserError(
            f"there is no GPU here, and this run takes {flops:.1e} FLOPs, {flops / CPU_FLOPS / 3600:,.0f} hours or "
            "more on a CPU; train less (--depth, --max-seq-len, --total-batch-size, --num-iterations: see --help), or "
            "say --device-type=cpu to begin all the same"
        )
