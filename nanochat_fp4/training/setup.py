"""
The set-up of a training run up to its first step, and the report after its last one.

    run_stage(args, train)                     # a stage as a program: processes, signals, exit status
    model, name = make_model(args, ...)        # pre-training: see scripts/base_train.py
    run = PostTraining("mid", "base", args, process)    # the stages that begin with another stage's model
"""

import argparse
import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import (
    announce,
    autodetect_device_type,
    compute_cleanup,
    compute_init,
    print0,
    resolve_method,
    set_cpu_threads,
    use_deterministic_kernels,
)
from nanochat_fp4.console import format_seconds
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.errors import UserError, require
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.locks import held_run
from nanochat_fp4.models import flash_attention, llama
from nanochat_fp4.models.cross_entropy import head_problem
from nanochat_fp4.models.gpt import GPT, RECOMPUTE, config_from_depth
from nanochat_fp4.models.optim import ORTHOGONALIZERS
from nanochat_fp4.models.optim8bit import LeanState, set_state, state_of
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.nvfp4.recipes import to_record
from nanochat_fp4.nvfp4.training import QuantizedTraining
from nanochat_fp4.parallel import check_parallel, shard
from nanochat_fp4.signals import StopSignals
from nanochat_fp4.training.checkpoint_manager import check_model_tag, load_checkpoint, weights_digest
from nanochat_fp4.training.flags import BRANCH_SETTINGS, check_iterations
from nanochat_fp4.training.load_model import (
    SWITCHES,
    build_model,
    check_model_fits,
    checkpoint_folder,
    config_record,
    find_model_tag,
    load_model,
    load_weights,
    register_recipes,
)
from nanochat_fp4.training.resume import (
    Start,
    check_same_run,
    check_tokenizer,
    check_writable,
    find_resume_step,
    save_bytes,
    starts_over,
)
from nanochat_fp4.training.startup import Phases, rare_collections
from nanochat_fp4.training.trainer import Process, RunSpec, Trainer, TrainingStep

# ----------------------------------------------------------------------------------------------------------------------
# Flags and processes


def run_stage(args: argparse.Namespace, train: Callable[[Process], None]) -> None:
    """Calls train in the process group that torchrun asks for, if it does.

    Exits with the status of the signal that stopped it, if one did.
    """
    phases = Phases()
    if args.orthogonalizer == "newton_schulz":
        require("muon")  # said before the data are made
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when CUDA starts
    if args.deterministic:
        use_deterministic_kernels()
    _, rank, _, world_size, device = compute_init(args.device_type or autodetect_device_type(), args.seed)
    try:
        with contextlib.ExitStack() as held, StopSignals() as signals, contextlib.ExitStack() as starting:
            starting.enter_context(rare_collections())
            train(Process(device, rank, world_size, signals, held, starting, phases))
    finally:
        compute_cleanup()
    if signals.exit_code:
        sys.exit(signals.exit_code)


# ----------------------------------------------------------------------------------------------------------------------
# Pre-training

MAX_STEPS = 10**9  # more is a slip of the finger
CPU_FLOPS = 1e11  # a second, of a CPU, generously
CPU_TOO_MUCH = 1e15  # hours


def model_config(args: argparse.Namespace, vocab_size: int) -> tuple[type[torch.nn.Module], Any, str]:
    """(class and config of the model that the flags describe, what its runs are called before the method)."""
    if args.llama:
        if unfit := next((switch for switch in SWITCHES if getattr(args, switch)), None):
            raise UserError(f"--{unfit.replace('_', '-')} is not for the --llama models; leave one of them out")
        return llama.Llama, llama.config_from_size(args.llama, vocab_size, args.max_seq_len), f"llama-{args.llama}"
    config = config_from_depth(
        args.depth, vocab_size, args.max_seq_len, args.head_dim, args.aspect_ratio, args.window_pattern
    )
    config = replace(config, separate_qkv=args.separate_qkv, exact_relu_squared=args.exact_relu_squared)
    return GPT, config, f"d{args.depth}"


def make_model(args: argparse.Namespace, vocab_size: int, device: torch.device) -> tuple[torch.nn.Module, str]:
    """(the model with its first weights, what its runs are called before the method)."""
    cls, config, name = model_config(args, vocab_size)
    if reason := recompute_problem(args.recompute, config, device):
        raise UserError(f"--recompute={args.recompute}: {reason}")
    check_model_fits(config, device)
    set_cpu_threads(device, config.n_embd)
    with torch.device("meta"):
        model = cls(config)
    if problem := head_problem(args.head, *model.lm_head.weight.shape, device.type):
        raise UserError(f"--head: {problem}")
    set_state(model, args.state)
    model.to_empty(device=device)
    model.init_weights()
    model.recompute, model.head = args.recompute, args.head
    return model, name


def recompute_problem(recompute: str, config: Any, device: torch.device) -> str | None:
    """Why a model of this config cannot recompute so on the device, and what can be done; or None."""
    reason = None
    if isinstance(config, llama.LlamaConfig) and recompute != "none":
        return "it is not for the --llama models; leave it out"
    if recompute.startswith("codes"):
        reason = config.separate_qkv and "it needs q, k and v as one layer, without --separate-qkv"
        reason = reason or flash_attention.unkept_reason(device.type, config.head_dim)
    return reason and f"{reason}; use --recompute=mlp or --recompute=all"


def run_settings(
    args: argparse.Namespace, method: str, model: torch.nn.Module, tokenizer: RustBPETokenizer
) -> dict[str, Any]:
    """A pre-training run's settings that decide its bits. A checkpoint must agree with them."""
    return {
        "method": method,
        **{k: v for k, v in config_record(model.config).items() if k not in SWITCHES},
        "total_batch_size": args.total_batch_size,
        "seed": args.seed,
        "data_seed": args.data_seed or None,
        "shuffle_documents": args.shuffle_documents or None,
        **({"schedule": "OneCycleLR"} if args.llama else {}),
        "tokenizer": tokenizer.fingerprint(),
        **{k: getattr(args, k) or None for k in BRANCH_SETTINGS},
        "head": None if args.head == "bf16" else args.head,
    }


def comparison_key(settings: dict[str, Any]) -> str:
    """The same for two runs that differ only in the method, or in how they are spread over devices."""
    apart = {"method", "world_size", "parallel", "head", *BRANCH_SETTINGS}
    apart |= {key for key in ("data_seed", "shuffle_documents") if not settings[key]}  # the text as it is stored
    # Runs from before the setting existed had Polar Express, and stay comparable.
    apart |= {"orthogonalizer"} if settings["orthogonalizer"] == "polar_express" else set()
    comparable = {k: v for k, v in settings.items() if k not in apart}
    return hashlib.sha256(json.dumps(comparable, sort_keys=True).encode()).hexdigest()[:12]


def find_start(
    args: argparse.Namespace, same: dict[str, Any], steps: int, folder: Path, model: torch.nn.Module, process: Process
) -> Start:
    """The beginning of a run of so many steps. The model gets its weights. same: of run_settings. Raises UserError."""
    branch = branch_point(args.branch_from, folder) if args.branch_from else None
    process.held.enter_context(held_run(folder))
    check_tokenizer(same["tokenizer"])
    step = find_resume_step(folder, args.resume_from_step, args.overwrite)
    source = folder
    if step is None and branch:
        source, step = branch
        same = {k: v for k, v in same.items() if k not in ("method", "head", *BRANCH_SETTINGS)}
    start = Start(folder)
    if step is not None:
        where = "cpu" if args.state == "lean" else process.device
        weights, rank_state, meta = load_checkpoint(source, step, where, load_optimizer=True, rank=process.rank)
        if source == folder:
            register_recipes(meta, f"checkpoint of step {step} in {folder}")
        check_same_run(same, meta.get("run_config"), source)
        load_weights(model, weights, source, step)
        set_state(model, args.state, state_of(meta))
        model.to(process.device)
        start = Start(folder, source, step, rank_state, meta)
    if start.step > steps:
        raise UserError(
            f"the checkpoint of step {step} in {source} is beyond this run's {steps} steps; lengthen the run "
            "(--num-iterations), or begin at an earlier step"
        )
    check_writable(folder, save_bytes(model), args.overwrite)
    return start


def resolve_horizon(args: argparse.Namespace, flops_per_token: float, num_params: int) -> int:
    """Number of optimizer steps from --num-iterations, --target-flops or --target-param-data-ratio."""
    check_iterations(args.num_iterations)
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
    check_model_tag(tag, "--branch-from")
    if tag == checkpoint_dir.name:
        raise UserError(f"--branch-from={text!r} is this run itself; give the new run a --model-tag of its own")
    return checkpoint_dir.parent / tag, int(step)


def describe(
    args: argparse.Namespace, model_tag: str, model: torch.nn.Module, num_iterations: int, device_batch_size: int,
    grad_accum_steps: int, plan: MethodPlan, backend: str, folder: Path, process: Process,
) -> None:  # fmt: skip
    """Prints the model, the steps and the batch of a pre-training run."""
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
            "GEMM work": ", ".join(f"{100 * s:.1f}% in {bits} bits" for bits, s in plan.work(model).items() if s),
            "backend": backend,
            "output": folder,
        }
    )


# ----------------------------------------------------------------------------------------------------------------------
# Mid-training, SFT and RL


class PostTraining:
    """
    A run of a stage up to its first step: the model it starts from, or goes on with, and what its folder holds.

    stage, source: of this stage and of the one before it. Raises UserError.
    """

    def __init__(self, stage: str, source: str, args: argparse.Namespace, process: Process):
        self.stage, self.source, self.args, self.process = stage, source, args, process
        self.dry_run = getattr(args, "dry_run", False)
        if stage == "rl" and args.parallel != "ddp":
            raise UserError("reinforcement learning generates on each process by itself; leave --parallel out")
        if args.data == "local" and args.sft_dir:
            raise UserError("--sft-dir takes SmolTalk's place, which is not in --data=local; leave out one of the two")
        sharded = check_parallel(args)
        self.model_tag = find_model_tag(source, None) if args.model_tag is None else args.model_tag
        folder = checkpoint_folder(stage, self.model_tag)
        step = None
        if not self.dry_run:
            process.held.enter_context(held_run(folder))
            step = find_resume_step(folder, args.resume_from_step, args.overwrite)
        self.start = Start(folder)
        if step is None:
            self.begin_anew()
        else:
            self.go_on(step)
        if not self.dry_run:
            check_tokenizer(self.tokenizer.fingerprint())
        set_state(self.model, self.state, state_of(self.parent_meta))
        self.set_recompute(args.recompute)
        if not self.dry_run:
            check_writable(folder, save_bytes(self.model), starts_over(args.resume_from_step, args.overwrite))
        self.config = self.model.config
        # Resuming, the method is the run's own; nothing but --method changes it, and that is refused.
        self.method = resolve_method(args.method or (self.parent_meta.get("user_config") or {}).get("method") or "bf16")
        wished = os.environ.get("QAT_METHOD")
        if wished and not args.method and resolve_method(wished) != self.method:
            print0(f"note: the model was trained with {self.method}, so QAT_METHOD={wished} is not used (--method is)")
        nf.convert(
            self.model,
            "bf16" if args.quantization == "none" else get_recipe(self.method).final,
            backward=args.quantization == "full",
            verbose=process.rank == 0,
            per_token_in_eval=False,
        )
        if sharded:
            shard(self.model, torch.bfloat16 if process.device.type == "cuda" and self.dtype is None else None)

    @property
    def state(self) -> str:
        """--state, or that of the model's checkpoint."""
        return self.args.state or state_of(self.parent_meta)

    @functools.cached_property
    def lean(self) -> LeanState | None:
        """For the optimizers of a run with --state=lean."""
        return LeanState(self.model, self.args.seed) if self.state == "lean" else None

    @property
    def orthogonalizer(self) -> str:
        """--orthogonalizer, or that of the model's checkpoint."""
        trained = (self.parent_meta.get("user_config") or {}).get("orthogonalizer")
        return self.args.orthogonalizer or (trained if trained in ORTHOGONALIZERS else "polar_express")

    def set_recompute(self, wished: str | None) -> None:
        """As the flag says, or as the model was trained, where that is possible on this machine."""
        recompute = wished or (self.parent_meta.get("user_config") or {}).get("recompute")
        recompute = recompute if recompute in RECOMPUTE else "none"
        if reason := recompute_problem(recompute, self.model.config, self.process.device):
            if wished:
                raise UserError(f"--recompute={wished}: {reason}")
            print0(f"note: the model was trained with --recompute={recompute}, which is not used here: {reason}")
            recompute = "none"
        self.model.recompute = recompute

    @property
    def trained_rows(self) -> int | None:
        """Rows of a micro-batch that the checkpoint was trained with, if it says so."""
        rows = (self.parent_meta.get("user_config") or {}).get("device_batch_size")
        rows = self.parent_meta.get("device_batch_size") or rows
        return rows if isinstance(rows, int) and rows > 0 else None

    def begin_anew(self) -> None:
        """With the model of the stage before."""
        self.model, self.tokenizer, self.parent_meta = load_model(
            self.source, self.process.device, "train", self.model_tag, self.args.model_step
        )
        step = self.parent_meta.get("step")
        digest = weights_digest(checkpoint_folder(self.source, self.model_tag), step)
        tag = {"stage": self.source, "model_tag": self.model_tag}
        self.parent = {**tag, "step": step, "weights_sha256": digest}

    def go_on(self, step: int) -> None:
        """From the run's own checkpoint, unless the model that it began with has been trained anew in the meantime."""
        folder, device, rank = self.start.folder, self.process.device, self.process.rank
        self.model, self.tokenizer, meta = build_model(folder, step, device, "train")
        self.parent_meta, self.parent = meta, meta.get("parent") or {}
        where = "cpu" if self.state == "lean" else device
        _, rank_state, _ = load_checkpoint(folder, step, where, load_optimizer=True, rank=rank)
        self.start = Start(folder, folder, step, rank_state, meta)
        before = self.parent.get("weights_sha256")
        now = weights_digest(checkpoint_folder(self.source, self.model_tag), self.parent.get("step"))
        if before is not None and now is not None and before != now:
            raise UserError(
                f"the run in {folder} began with another {self.source} model than {self.model_tag} is now; start it "
                "over with --overwrite"
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """The type of matrix products (gpt.autocast)."""
        return torch.float32 if self.args.dtype == "float32" else None

    @property
    def rates(self) -> dict[str, float]:
        return {
            name: getattr(self.args, name) for name in ("unembedding_lr", "embedding_lr", "matrix_lr", "weight_decay")
        }

    def trainer(
        self, parts: TrainingStep, sources: dict[str, str], batch_config: dict[str, Any], **spec: Any
    ) -> Trainer:
        """spec: fields of RunSpec. sources: name of a dataset -> its rows. batch_config: further settings that decide
        the batches. Raises UserError where a checkpoint is of another run."""
        args = self.args
        run_config = {
            "stage": self.stage,
            "method": self.method,
            "quantization": args.quantization,
            **config_record(self.config),
            **batch_config,
            "num_iterations": spec["num_iterations"],
            "sources": sources,
            "seed": args.seed,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        if self.start.source is not None:
            check_same_run(run_config, self.start.meta.get("run_config"), self.start.folder)
        made = RunSpec(
            stage=self.stage,
            method=self.method,
            user_config={
                **vars(args),
                "method": self.method,
                "state": self.state,
                "recompute": self.model.recompute,
                "orthogonalizer": self.orthogonalizer,
                "device_batch_size": spec["device_batch_size"],
            },
            meta={
                "model_config": config_record(self.config),
                "run_config": run_config,
                "tunable": {"world_size": self.process.world_size, "parallel": args.parallel},
                "parent": self.parent,
                "recipes": [to_record(get_recipe(self.method))],
            },
            start_record={"quantization": args.quantization, "sources": sources},
            lower="--init-lr-frac",
            seed=args.seed,
            **spec,
        )
        return Trainer(made, parts, self.args, self.process, self.start)

    def parts(self, optimizers: list[torch.optim.Optimizer], forward: Any, **loss: Any) -> TrainingStep:
        quantized = QuantizedTraining(self.model)
        return TrainingStep(self.model, optimizers, forward, quantized, self.dtype, lean=self.lean, **loss)

    def report(self, trainer: Trainer, section: str, setup: dict[str, Any], sources: dict[str, str]) -> None:
        """Prints the results, and writes them with `setup` into the report under `section`."""
        bests = {f"Best {key}": value for key, value in trainer.loop["best"].items()}
        about = {
            "Model": f"{self.source} model {self.model_tag}, step {self.parent.get('step')}",
            **setup,
            **{f"Data: {name}": rows for name, rows in sources.items()},
        }
        results = {"quantization": self.args.quantization, "train_loss": trainer.monitor.smoothed}
        report_run(trainer, self.model_tag, section, about, bests, results | trainer.loop["numbers"])


def report_run(
    trainer: Trainer,
    model_tag: str,
    section: str,
    about: dict[str, Any],
    outcome: dict[str, Any],
    results: dict[str, Any],
) -> None:
    """Prints the outcome of a run, and writes it with `about` and the results into the report under `section`."""
    step, seconds, monitor = trainer.step, trainer.loop["training_seconds"], trainer.monitor
    done_before = trainer.start.resumed_step == step
    if done_before:
        print0(f"Nothing to do: {model_tag} is through this stage ({step} steps)")
    gpu = trainer.device.type == "cuda"
    outcome = outcome | {
        "Number of iterations": step,
        "DDP world size": trainer.process.world_size,
        "Training time": format_seconds(seconds),
        "Peak memory usage": f"{torch.cuda.max_memory_allocated() / 2**20:.2f}MiB" if gpu else None,
        "Training loss (smoothed)": monitor.smoothed,
        "Loss spikes": monitor.state["spikes"],
        "Skipped updates": monitor.state["skipped"],
        "Quantization error": trainer.telemetry,
    }
    outcome = {k: v for k, v in outcome.items() if v is not None}
    announce({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in outcome.items()})
    report = get_report(model_tag)
    evaluated = trainer.loop["evaluated_at"] != trainer.start.meta.get("loop_state", {}).get("evaluated_at")
    # Else the run was killed before it could report, or stopped before its last evaluation.
    if trainer.dry_run or (done_before and report.has(section) and not evaluated):
        return
    about = {"Layers": " / ".join(str(trainer.model.nf_report).splitlines())} | about
    about |= {"FP4 GEMMs": " / ".join(trainer.gemms.lines())} if trainer.gemms else {}
    results = {"method": trainer.spec.method, "training_seconds": seconds} | results
    report.log(section, [about | outcome], results)
