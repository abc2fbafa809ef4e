"""A pre-training run up to its first step: model, settings, what it goes on from; and what it looks at besides."""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import announce, print0, set_cpu_threads
from nanochat_fp4.console import parse_finite
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.generation.engine import draw_samples
from nanochat_fp4.models import llama
from nanochat_fp4.models.gpt import GPT, config_from_depth
from nanochat_fp4.models.optim import PretrainingOptions
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.methods import OSCIRESET_COMMIT, removed
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.parallel import unsharded
from nanochat_fp4.training.checkpoint_manager import (
    SWITCHES,
    check_model_fits,
    check_model_tag,
    config_record,
    load_checkpoint,
    load_weights,
)
from nanochat_fp4.training.resume import Start, check_same_run, find_resume_step
from nanochat_fp4.training.run_folder import check_writable, held_run, save_bytes
from nanochat_fp4.training.stage import Process
from nanochat_fp4.training.trainer import Trainer, due

# Flags that a run which branches from another one may have of its own. "oscillation" is a removed flag.
METHOD_CHANGES = (
    "layer_methods", "method_phases", "oscillation", "branch_from", "separate_qkv", "exact_relu_squared"
)  # fmt: skip
MAX_STEPS = 10**9  # more is a slip of the finger
CPU_FLOPS = 1e11  # a second, of a CPU, generously
CPU_TOO_MUCH = 1e15  # hours


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device) -> tuple[torch.nn.Module, str]:
    """(the model with its first weights, what its runs are called before the method)."""
    if args.llama:
        cls, config = llama.Llama, llama.config_from_size(args.llama, vocab_size, args.max_seq_len)
        name = f"llama-{args.llama}"
    else:
        cls, name = GPT, f"d{args.depth}"
        config = config_from_depth(
            args.depth, vocab_size, args.max_seq_len, args.head_dim, args.aspect_ratio, args.window_pattern
        )
        config = replace(config, separate_qkv=args.separate_qkv, exact_relu_squared=args.exact_relu_squared)
    unfit = {"--recompute": args.recompute != "none", "--separate-qkv": args.separate_qkv}
    unfit["--exact-relu-squared"] = args.exact_relu_squared
    if args.llama and any(unfit.values()):
        raise UserError(f"{next(k for k in unfit if unfit[k])} is not for the --llama models; leave one of them out")
    check_model_fits(config, device)
    set_cpu_threads(device, config.n_embd)
    with torch.device("meta"):
        model = cls(config)
    model.to_empty(device=device)
    model.init_weights()
    model.recompute = args.recompute
    return model, name


@dataclass(frozen=True)
class Settings:
    """What a run is. run_config: what a checkpoint must agree with; tunable: what may change in a resume, with a note;
    config_key: the same for two runs that differ in the method only, or in how they are spread over devices."""

    num_iterations: int
    options: PretrainingOptions
    run_config: dict[str, Any]
    tunable: dict[str, Any]
    config_key: str


def make_settings(
    args: argparse.Namespace,
    method: str,
    model: torch.nn.Module,
    tokenizer: RustBPETokenizer,
    data_dir: Path,
    world: int,
) -> Settings:
    num_iterations = resolve_horizon(args, model.estimate_flops(), model.num_scaling_params())
    check_machine(args, model.get_device(), model.estimate_flops() * args.total_batch_size * num_iterations)
    options = PretrainingOptions(**{f.name: getattr(args, f.name) for f in fields(PretrainingOptions)})
    run_config = {
        "method": method,
        **{k: v for k, v in config_record(model.config).items() if k not in SWITCHES},
        "total_batch_size": args.total_batch_size,
        "seed": args.seed,
        "data_seed": args.data_seed or None,
        "shuffle_documents": args.shuffle_documents or None,
        **({"schedule": "OneCycleLR"} if args.llama else {}),  # earlier versions had another one
        "tokenizer": tokenizer.fingerprint(),
        **{k: getattr(args, k) or None for k in METHOD_CHANGES},
    }
    tunable = {**asdict(options), "num_iterations": num_iterations, "data_dir": str(data_dir)}
    tunable |= {"world_size": world, "parallel": args.parallel}
    order = [key for key in ("data_seed", "shuffle_documents") if not getattr(args, key)]  # as stored
    apart = ("method", "world_size", "parallel", *METHOD_CHANGES, *order)
    comparable = {k: v for k, v in (run_config | tunable).items() if k not in apart}
    key = hashlib.sha256(json.dumps(comparable, sort_keys=True).encode()).hexdigest()[:12]
    return Settings(num_iterations, options, run_config, tunable, key)


def find_start(
    args: argparse.Namespace, settings: Settings, folder: Path, model: torch.nn.Module, process: Process
) -> Start:
    """What the run goes on from; the model gets its weights."""
    branch = branch_point(args.branch_from, folder) if args.branch_from else None
    process.held.enter_context(held_run(folder))
    step = find_resume_step(folder, args.resume_from_step, args.overwrite, process.rank)
    source, same = folder, settings.run_config
    if step is None and branch:
        source, step = branch
        same = {k: v for k, v in same.items() if k not in ("method", *METHOD_CHANGES)}
    start = Start(folder)
    if step is not None:
        weights, rank_state, meta = load_checkpoint(
            source, step, process.device, load_optimizer=True, rank=process.rank
        )
        if "schedule" in same and "schedule" not in (meta.get("run_config") or {}):
            raise UserError(
                f"the checkpoint in {source} is of an earlier version (commit {meta.get('commit') or 'unknown'}), with "
                "another schedule, and q, k, v, up and gate computed one by one; go on with that version, or choose "
                "another --model-tag"
            )
        check_same_run(same, meta.get("run_config"), source)
        load_weights(model, weights, source, step)
        start = Start(folder, source, step, rank_state, meta)
    if start.step > settings.num_iterations:
        raise UserError(
            f"the checkpoint of step {step} in {source} is beyond this run's {settings.num_iterations} steps; lengthen "
            "the run (--num-iterations), or begin at an earlier step"
        )
    check_writable(folder, save_bytes(model), args.overwrite)
    return start


class _Oscillation(argparse.Action):
    """A flag that was removed. Checkpoints have its value, and must still agree with it."""

    def __call__(self, parser: argparse.ArgumentParser, *_) -> None:
        parser.error(f"--oscillation: OsciReset {removed(OSCIRESET_COMMIT)}; leave the flag out")


def add_method_arguments(parser: argparse.ArgumentParser) -> None:
    """How to quantize."""
    add = parser.add_argument
    add(
        "--method",
        default=None,
        help=f"QAT method (default: $QAT_METHOD, else clover): {', '.join(nf.METHODS)}; or an ablation (nf.ABLATIONS)",
    )
    add(
        "--layer-methods",
        default="",
        help="methods of single layers, 'pattern=method,...', for example '*.c_fc=fp8'",
    )
    add(
        "--method-phases",
        default="",
        help="changes of the method in the course of the run, 'fraction of the steps=method,...': '0.85=bf16'",
    )
    add(
        "--oscillation",
        default="",
        action=_Oscillation,
        help=argparse.SUPPRESS,
    )
    add(
        "--separate-qkv",
        action="store_true",
        help="quantize q, k and v as three layers, each with a tensor scale, as the paper's nanochat runs did "
        "(default: as one layer, which is faster)",
    )
    add(
        "--exact-relu-squared",
        action="store_true",
        help="keep relu(x) for the derivative of ReLU^2 as it is, not in 8 bits: more memory, as in the paper's runs",
    )


def add_horizon_arguments(parser: argparse.ArgumentParser) -> None:
    """How long a run is: only one is used, in order of precedence."""
    add = parser.add_argument
    add("--num-iterations", type=int, default=-1, help="explicit number of optimization steps (-1 = disable)")
    add(
        "--target-flops",
        type=parse_finite,
        default=-1.0,
        help="calculate num_iterations to reach target_flops (-1 = disable)",
    )
    add(
        "--target-param-data-ratio",
        type=parse_finite,
        default=8,
        help="calculate num_iterations to maintain data:param ratio (Chinchilla=20, -1 = disable)",
    )


def resolve_horizon(args: argparse.Namespace, flops_per_token: float, num_params: int) -> int:
    """Number of optimizer steps from --num-iterations, --target-flops or --target-param-data-ratio."""
    if args.num_iterations > MAX_STEPS:
        raise UserError(f"--num-iterations={args.num_iterations} is more than {MAX_STEPS:,} steps; lower it")
    if args.num_iterations > 0:
        return args.num_iterations
    if args.total_batch_size < 1:
        raise UserError(f"--total-batch-size={args.total_batch_size} is less than one token; raise it")
    if args.target_flops > 0:
        steps, what = round(args.target_flops / (flops_per_token * args.total_batch_size)), "--target-flops"
    elif args.target_param_data_ratio > 0:
        tokens = int(args.target_param_data_ratio * num_params)
        steps, what = tokens // args.total_batch_size, "--target-param-data-ratio"
    else:
        raise UserError("no training horizon; set --num-iterations, --target-flops or --target-param-data-ratio")
    if steps < 1:
        raise UserError(f"{what} asks for less than one step of {args.total_batch_size} tokens; raise it")
    if steps > MAX_STEPS:
        raise UserError(f"{what} asks for {float(steps):.3g} steps of {args.total_batch_size} tokens; lower it")
    return steps


def check_machine(args: argparse.Namespace, device: torch.device, flops: float) -> None:
    """Raises UserError where a machine without a GPU would begin what it will not end, and nobody asked for that."""
    if device.type == "cpu" and not args.device_type and flops > CPU_TOO_MUCH:
        raise UserError(
            f"there is no GPU here, and this run takes {flops:.1e} FLOPs, {flops / CPU_FLOPS / 3600:,.0f} hours or "
            "more on a CPU; train less (--depth, --max-seq-len, --total-batch-size, --num-iterations: see --help), or "
            "say --device-type=cpu to begin all the same"
        )


def branch_point(text: str, checkpoint_dir: Path) -> tuple[Path, int]:
    """(folder, step) of --branch-from, of a run beside that of checkpoint_dir. Raises UserError."""
    tag, at, step = text.rpartition("@")
    if not (tag and at and step.isdecimal()):
        raise UserError(f"--branch-from={text!r}: expected '<model tag>@<step>', for example d20_bf16@5000")
    check_model_tag(tag)
    if tag == checkpoint_dir.name:
        raise UserError(f"--branch-from={text!r} is this run itself; give the new run a --model-tag of its own")
    return checkpoint_dir.parent / tag, int(step)


def describe(
    args: argparse.Namespace, model_tag: str, model: torch.nn.Module, num_iterations: int, device_batch_size: int,
    grad_accum_steps: int, plan: MethodPlan, backend: str, folder: Path, process: Process,
) -> None:  # fmt: skip
    """What is going to be trained."""
    config, num_params, flops_per_token = model.config, model.num_scaling_params(), model.estimate_flops()
    total_tokens = args.total_batch_size * num_iterations
    print0(f"Training {model_tag}:")
    announce(
        {
            "model": f"{num_params:,} parameters: {config.n_layer} layers, width {config.n_embd}, "
            f"{config.n_head} heads, vocabulary {config.vocab_size:,}",
            "steps": f"{num_iterations:,} of {args.total_batch_size:,} tokens: {total_tokens:,} tokens, "
            f"{total_tokens / num_params:.2f} per parameter, {flops_per_token * total_tokens:.2e} FLOPs",
            "batch": f"{device_batch_size} x {args.max_seq_len} tokens, {process.world_size} process(es), "
            f"{grad_accum_steps} micro-batch(es) a step",
            "GEMM work": ", ".join(f"{100 * s:.1f}% in {bits} bits" for bits, s in plan.work(model).items() if s)
            + f" ({matmul_shares(model)})",
            "backend": backend,
            "output": folder,
        }
    )


def matmul_shares(model: torch.nn.Module) -> str:
    """What part of a step's matrix products the layers make that methods quantize, and what the rest is."""
    flops = {"the quantized layers": 0, "the output head": 0, "other layers": 0}
    for layer in (m for m in model.modules() if isinstance(m, torch.nn.Linear)):
        head, quantized = layer is model.lm_head, isinstance(layer, QuantLinear)
        kind = "the output head" if head else "the quantized layers" if quantized else "other layers"
        flops[kind] += 6 * layer.weight.numel()
    flops["attention"] = model.estimate_flops() - sum(flops.values())
    parts = [f"{100 * count / model.estimate_flops():.1f}% {kind}" for kind, count in flops.items() if count > 0]
    return f"of all matrix products: {', '.join(parts)}"


class CoreMetric:
    """evaluation() is evaluate_model of scripts/base_eval.py, a later stage, which this package does not know."""

    def __init__(self, evaluation: Callable[[], Callable], tokenizer: RustBPETokenizer, every: int, max_per_task: int):
        self.evaluation, self.tokenizer, self.every, self.max_per_task = evaluation, tokenizer, every, max_per_task
        self.value: float | None = None

    def __call__(self, trainer: Trainer, last: bool) -> None:
        if not (due(self.every, trainer.step, last) and trainer.step > 0):
            return
        try:
            with (
                trainer.evaluating(),
                unsharded(trainer.model),
                trainer.parts.weights_once(1),
                trainer.parts.autocast(),
            ):
                results = self.evaluation()(
                    trainer.model, self.tokenizer, trainer.device, max_per_task=self.max_per_task
                )
        except (UserError, ValueError) as e:  # its data is not to be had: no reason to end a training run
            trainer.progress.write(f"warning: no CORE metric from here on: {one_line(e)}")
            self.every = -1
            return
        self.value = results["core_metric"]
        trainer.progress.write(f"step {trainer.step:05d} | CORE metric {self.value:.4f}")
        trainer.metrics.append("core", trainer.step, core_metric=self.value)
        trainer.wandb_run.log({"step": trainer.step, "core_metric": self.value})


class Samples:
    def __init__(self, tokenizer: RustBPETokenizer, every: int):
        self.tokenizer, self.every = tokenizer, every
        self.newest: list[str] = []

    def __call__(self, trainer: Trainer, last: bool) -> None:
        if not due(self.every, trainer.step, last) or trainer.step == 0:
            return
        with trainer.evaluating(), unsharded(trainer.model):
            if trainer.process.rank:
                return
            self.newest = draw_samples(trainer.model, self.tokenizer)
        for sample in self.newest:
            trainer.progress.write(f"  {sample}")
        trainer.metrics.append("sample", trainer.step, samples=self.newest)
