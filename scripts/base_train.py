"""
Pre-train the base model, in NVFP4 or any other method. From the root of the repository:

    python -m scripts.base_train
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train

On a CPU a much smaller model:

    python -m scripts.base_train --depth=4 --aspect-ratio=32 --head-dim=64 --max-seq-len=256 --device-batch-size=8 \\
        --total-batch-size=2048 --eval-tokens=8192 --core-metric-every=-1 --num-iterations=20

nanochat's flags, and the method: --method, else $QAT_METHOD, else clover. Everything that training needs to go on is in
the checkpoint, so `--resume-from-step latest` ends with the same bits as a run that was never interrupted.
"""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when CUDA starts

import argparse
import contextlib
import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4 import llama
from nanochat_fp4.checkpoint_manager import (
    check_model_fits,
    check_model_tag,
    check_step,
    load_checkpoint,
    load_weights,
    prune_checkpoints,
    save_checkpoint,
)
from nanochat_fp4.common import get_base_dir, print0, seed_everything
from nanochat_fp4.console import Progress, format_seconds, parse_finite
from nanochat_fp4.dataloader import (
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from nanochat_fp4.dataset import ensure_data
from nanochat_fp4.doctor import probe
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, is_out_of_memory, one_line, run_main
from nanochat_fp4.gpt import GPT, autocast, compile_layers, config_from_depth
from nanochat_fp4.hardware import get_peak_flops
from nanochat_fp4.loss_eval import evaluate_bpb
from nanochat_fp4.nvfp4 import oscillation
from nanochat_fp4.nvfp4.convert import rounds_with_feedback
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.report import get_report
from nanochat_fp4.run_folder import check_writable, claim_run, save_bytes
from nanochat_fp4.tokenizer import get_token_bytes, get_tokenizer
from nanochat_fp4.training import (
    MAX_SKIPPED_IN_A_ROW,
    LossMonitor,
    MetricsLog,
    StopRequested,
    StopSignals,
    add_run_arguments,
    announce,
    auto_device_batch_size,
    check_same_run,
    default_model_tag,
    draw_samples,
    find_resume_step,
    first_message,
    forget_later_checkpoints,
    get_rng_state,
    gradient_norm,
    layer_telemetry,
    lr_multiplier,
    mean_over_ranks,
    muon_momentum,
    name_nonfinite,
    parse_device_batch_size,
    plan_accumulation,
    preserved_rng,
    resolve_method,
    restore_dict,
    restore_state,
    run_stage,
    set_rng_state,
    summarize_telemetry,
    weight_decay_at,
)
from nanochat_fp4.wandb_run import setup_wandb

REFERENCE_BATCH_SIZE = 2**19  # tokens; nanochat's learning rates are tuned for it
REFERENCE_DEPTH = 12  # and its weight decay for this
METHOD_CHANGES = ("layer_methods", "method_phases", "oscillation", "branch_from")
MOMENTS_EVERY, MOMENTS_TOKENS = 10, 8192  # steps between looks at the layers' inputs, and how many tokens of a rank
MAX_STEPS = 10**9  # more is a slip of the finger


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain base model",
        epilog="SIGTERM, Ctrl-C and SIGUSR1 save a checkpoint and stop within one step; the exit status is then 143, "
        "130 and 0. Bad input and numerical trouble end in one line and exit status 2.",
    )
    add = parser.add_argument
    add_run_arguments(parser)
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile the model (default: on a GPU only)",
    )
    add("--seed", type=int, default=42, help="seed of weights, rotations and stochastic rounding")
    add(
        "--data-dir",
        default=None,
        help="folder of parquet shards or text (default: $DATA_DIR, else FineWeb-Edu, else a small embedded corpus)",
    )
    # Quantization
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
        help=f"a remedy for weights that oscillate between two 4-bit values: {oscillation.FORM}",
    )
    # Model architecture
    add("--depth", type=int, default=20, help="depth of the Transformer model")
    add("--aspect-ratio", type=int, default=64, help="model_dim = depth * aspect_ratio")
    add("--head-dim", type=int, default=128, help="target head dimension for attention")
    add("--max-seq-len", type=int, default=2048, help="max context length")
    add(
        "--window-pattern",
        default="SSSL",
        help="sliding window pattern tiled across layers: L=full, S=half context (e.g. 'SSL')",
    )
    add(
        "--llama",
        default="",
        help=f"instead of nanochat's GPT one of the paper's Llama-like models ({', '.join(llama.SIZES)}), with its "
        "optimizer, rates and schedule; the paper has --max-seq-len=512 --total-batch-size=262144",
    )
    # Training horizon (only one used, in order of precedence)
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
    # Optimization
    add(
        "--device-batch-size",
        type=parse_device_batch_size,
        default=32,
        help="per-device batch size, or 'auto' for the largest that fits; the total batch stays the same",
    )
    add(
        "--recompute",
        choices=("none", "mlp", "all"),
        default="none",
        help="compute the MLP, or attention as well, again in the backward pass instead of keeping it: less memory",
    )
    add("--total-batch-size", type=int, default=524288, help="total batch size in tokens")
    add("--embedding-lr", type=parse_finite, default=0.3, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_finite, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add(
        "--weight-decay",
        type=parse_finite,
        default=0.2,
        help="cautious weight decay for the Muon optimizer (for weights)",
    )
    add("--matrix-lr", type=parse_finite, default=0.02, help="learning rate for matrix parameters (Muon)")
    add("--scalar-lr", type=parse_finite, default=0.5, help="learning rate for scalars (resid_lambdas, x0_lambdas)")
    add("--adam-beta1", type=parse_finite, default=0.8, help="Adam beta1 for embedding/unembedding")
    add("--adam-beta2", type=parse_finite, default=0.95, help="Adam beta2 for embedding/unembedding")
    add("--warmup-ratio", type=parse_finite, default=0.0, help="ratio of iterations for LR warmup")
    add("--warmdown-ratio", type=parse_finite, default=0.4, help="ratio of iterations for LR warmdown")
    add("--final-lr-frac", type=parse_finite, default=0.0, help="final LR as fraction of initial LR")
    # Evaluation
    add("--eval-every", type=int, default=250, help="evaluate val bpb every N steps (-1 = disable)")
    add("--eval-tokens", type=int, default=20 * 524288, help="number of tokens to evaluate val loss on")
    add("--core-metric-every", type=int, default=2000, help="evaluate CORE metric every N steps (-1 = disable)")
    add("--core-metric-max-per-task", type=int, default=500, help="examples per task for CORE metric")
    add("--sample-every", type=int, default=2000, help="sample from model every N steps (-1 = disable)")
    add(
        "--branch-from",
        default="",
        help="begin with this method at a checkpoint of another run, of the same model, data and schedule: "
        "'<model tag>@<step>'; --save-every and --keep-last=-1 make such checkpoints",
    )
    add(
        "--model-tag",
        default=None,
        help="checkpoint directory name (default: d<depth>_<method>, so that methods do not overwrite one another)",
    )
    return parser.parse_args(argv)


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


def branch_point(text: str, checkpoint_dir: Path) -> tuple[Path, int]:
    """(folder, step) of --branch-from, of a run beside that of checkpoint_dir. Raises UserError."""
    tag, at, step = text.rpartition("@")
    check_model_tag(tag)
    if not (tag and at and step.isdecimal()):
        raise UserError(f"--branch-from={text!r}: expected '<model tag>@<step>', for example d20_bf16@5000")
    if tag == checkpoint_dir.name:
        raise UserError(f"--branch-from={text!r} is this run itself; give the new run a --model-tag of its own")
    return checkpoint_dir.parent / tag, int(step)


def core_evaluation() -> Callable:
    """evaluate_model of scripts/base_eval.py, a later stage."""
    from scripts.base_eval import evaluate_model

    return evaluate_model


def out_of_memory(step: int, device_batch_size: int, fits: int | None, saved: bool) -> UserError:
    """The line that ends a run whose memory ran out, naming the micro-batch that fits."""
    size = (
        f"--device-batch-size={fits} fits (the total batch stays the same)" if fits else "no smaller batch fits either"
    )
    go_on = "; go on with it and --resume-from-step latest" if saved else ""
    return UserError(f"out of memory at step {step} with --device-batch-size={device_batch_size}; {size}{go_on}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    method = resolve_method(args.method)
    check_model_tag(args.model_tag)
    if args.llama and args.recompute != "none":
        raise UserError("--recompute is not for the --llama models; leave one of them out")
    run_stage(args, functools.partial(train, args, method))


def train(
    args: argparse.Namespace, method: str, device: torch.device, rank: int, world_size: int, signals: StopSignals
) -> None:
    master = rank == 0
    ctx = lambda: autocast(device.type)  # noqa: E731
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    # ------------------------------------------------------------------------------------------------------------------
    # Data, tokenizer, model
    data_dir = ensure_data(args.data_dir)
    tokenizer = get_tokenizer()
    token_bytes = get_token_bytes(device=device)
    config = config_from_depth(
        args.depth, tokenizer.get_vocab_size(), args.max_seq_len, args.head_dim, args.aspect_ratio, args.window_pattern
    )
    if args.llama:
        config = llama.config_from_size(args.llama, tokenizer.get_vocab_size(), args.max_seq_len)
    else:
        check_model_fits(config, device)
    with torch.device("meta"):
        model = llama.Llama(config) if args.llama else GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    num_params, flops_per_token = model.num_scaling_params(), model.estimate_flops()
    num_iterations = resolve_horizon(args, flops_per_token, num_params)
    run_config = {
        "method": method,
        **asdict(config),
        "total_batch_size": args.total_batch_size,
        "world_size": world_size,
        "seed": args.seed,
        "tokenizer": tokenizer.fingerprint(),
    }
    run_config |= {k: getattr(args, k) or None for k in METHOD_CHANGES}
    tunable = {k: v for k, v in vars(args).items() if k.endswith(("_lr", "_decay", "_beta1", "_beta2", "_frac"))}
    tunable |= {"warmup_ratio": args.warmup_ratio, "warmdown_ratio": args.warmdown_ratio}
    tunable |= {"num_iterations": num_iterations, "data_dir": str(data_dir)}
    # Two runs with the same key differ in the method only (or in how they are spread over devices).
    comparable = {k: v for k, v in (run_config | tunable).items() if k not in ("method", "world_size", *METHOD_CHANGES)}
    config_key = hashlib.sha256(json.dumps(comparable, sort_keys=True).encode()).hexdigest()[:12]

    # Before --overwrite deletes anything
    rows = plan_accumulation(args.total_batch_size, 1, args.max_seq_len, world_size)
    if args.device_batch_size != "auto":
        plan_accumulation(args.total_batch_size, args.device_batch_size, args.max_seq_len, world_size)

    # ------------------------------------------------------------------------------------------------------------------
    # Checkpoint to go on from
    default_tag = f"llama-{args.llama}_{method}" if args.llama else default_model_tag(args.depth, method)
    model_tag = args.model_tag or default_tag
    checkpoint_dir = Path(get_base_dir()) / "base_checkpoints" / model_tag
    branch = branch_point(args.branch_from, checkpoint_dir) if args.branch_from else None
    if branch and args.overwrite:
        check_step(*branch)
    claim_run(checkpoint_dir)
    check_writable(checkpoint_dir, save_bytes(model), args.overwrite)
    resumed_step = find_resume_step(args, checkpoint_dir, rank)
    source, step, same = checkpoint_dir, resumed_step, run_config
    if resumed_step is None and branch:
        source, step = branch
        same = {k: v for k, v in run_config.items() if k not in ("method", *METHOD_CHANGES)}
    metrics = MetricsLog(checkpoint_dir, enabled=master)
    meta: dict[str, Any] = {}
    rank_state: dict[str, Any] = {}
    if step is not None:
        model_data, rank_state, meta = load_checkpoint(source, step, device, load_optimizer=True, rank=rank)
        check_same_run(same, meta.get("run_config"), source)
        load_weights(model, model_data, source, step)
        del model_data
    metrics.rewind(resumed_step or 0)
    step = step or 0
    if step > num_iterations:
        raise UserError(
            f"the checkpoint of step {step} in {source} is beyond this run's {num_iterations} steps; lengthen the run "
            "(--num-iterations), or begin at an earlier step"
        )

    nf.convert(model, method)
    plan = MethodPlan.parse(method, args.layer_methods, args.method_phases)
    plan.apply(model, step / num_iterations)
    steadiers = oscillation.remedies(args.oscillation, model, num_iterations)
    model.recompute = args.recompute
    raw_model = model  # for state dicts and whatever changes shape from call to call
    seed_everything(args.seed, rank)  # from here on each rank draws its own rotations and noise

    # ------------------------------------------------------------------------------------------------------------------
    # Micro-batch
    def try_micro_batch(size: int) -> None:
        with preserved_rng(device), ctx():
            tokens = torch.randint(config.vocab_size, (size, config.sequence_len), device=device)
            raw_model(tokens, tokens).backward()
        synchronize()

    row_bytes = 4 * config.sequence_len * (40 * config.n_layer * config.n_embd + 4 * config.vocab_size)

    device_batch_size = args.device_batch_size
    if device_batch_size == "auto":
        # The same one after a resume: it decides what shares a tensor scale, hence the bits of the result.
        device_batch_size = meta.get("device_batch_size") or auto_device_batch_size(
            try_micro_batch, raw_model, rows, device, row_bytes
        )

    def smaller_batch_size() -> int | None:
        try:
            return auto_device_batch_size(try_micro_batch, raw_model, rows, device, row_bytes, below=device_batch_size)
        except UserError:
            return None

    tunable["device_batch_size"] = device_batch_size
    tunable["recompute"] = args.recompute
    grad_accum_steps = plan_accumulation(args.total_batch_size, device_batch_size, args.max_seq_len, world_size)
    tokens_per_micro_batch = device_batch_size * args.max_seq_len * world_size
    eval_steps = max(1, args.eval_tokens // tokens_per_micro_batch)

    peak_flops = get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    compiled = args.compile if args.compile is not None else device.type == "cuda"
    if compiled:
        model = compile_layers(model)
    backend = str(nf.backend())
    if method != "bf16":
        backend += f"; {probe(device, method)}"  # a silent fault of kernels or GEMMs ends the run here
    total_tokens = args.total_batch_size * num_iterations
    work = plan.work(raw_model)
    print0(f"Training {model_tag}:")
    announce(
        {
            "model": f"{num_params:,} parameters: {config.n_layer} layers, width {config.n_embd}, "
            f"{config.n_head} heads, vocabulary {config.vocab_size:,}",
            "steps": f"{num_iterations:,} of {args.total_batch_size:,} tokens: {total_tokens:,} tokens, "
            f"{total_tokens / num_params:.2f} per parameter, {flops_per_token * total_tokens:.2e} FLOPs",
            "batch": f"{device_batch_size} x {args.max_seq_len} tokens, {world_size} process(es), "
            f"{grad_accum_steps} micro-batch(es) a step",
            "GEMM work": ", ".join(f"{100 * share:.1f}% in {bits} bits" for bits, share in work.items() if share),
            "backend": backend,
            "output": checkpoint_dir,
        }
    )

    # ------------------------------------------------------------------------------------------------------------------
    # Optimizers: learning rates are for batches of 2^19 tokens, the weight decay is for depth 12
    batch_lr_scale = (args.total_batch_size / REFERENCE_BATCH_SIZE) ** 0.5
    weight_decay = args.weight_decay * (REFERENCE_DEPTH / args.depth) ** 2
    hyperparameters = {
        "unembedding_lr": args.unembedding_lr * batch_lr_scale,
        "embedding_lr": args.embedding_lr * batch_lr_scale,
        "matrix_lr": args.matrix_lr * batch_lr_scale,
        "weight_decay": weight_decay,
        "adam_betas": (args.adam_beta1, args.adam_beta2),
        "scalar_lr": args.scalar_lr * batch_lr_scale,
    }
    if args.llama:
        hyperparameters = {"lr": llama.SIZES[args.llama].learning_rate}
    optimizers = raw_model.setup_optimizers(**hyperparameters)

    # ------------------------------------------------------------------------------------------------------------------
    # State of the loop: new, or as it was
    loop = {"val_bpb": None, "val_bpb_bf16": None, "min_val_bpb": None, "evaluated_at": -1, "training_seconds": 0.0}
    loader_state = None
    monitor = LossMonitor()
    if meta:
        # A remedy that this run adds to the one that it branches from begins without a state.
        known = optimizers + steadiers if source == checkpoint_dir else optimizers
        restore_state(known, rank_state, device, source)
        loader_state = rank_state.get("dataloader")
        loop = restore_dict(loop, meta, "loop_state", source)
        monitor = LossMonitor(restore_dict(monitor.state, meta, "loss_state", source))
        changed = {k: v for k, v in meta.get("tunable", {}).items() if v != tunable.get(k)}
        print0(f"Resuming from step {step}" + (f" of {source.name}" if source != checkpoint_dir else ""))
        for name, value in changed.items():
            print0(f"  note: {name} was {value} so far and is {tunable.get(name)} from here on")
    rank_state.clear()
    skipped_in_a_row = 0

    loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        tokenizer,
        device_batch_size,
        args.max_seq_len,
        "train",
        device=device,
        resume_state_dict=loader_state,
        data_dir=data_dir,
    )
    x, y, next_loader_state = next(loader)

    user_config = {
        **vars(args),
        "method": method,
        "device_batch_size": device_batch_size,
        "num_iterations": num_iterations,
    }
    wandb_run = setup_wandb(args.run, "nanochat", user_config)
    metrics.append(
        "start", step, method=method, num_iterations=num_iterations, total_batch_size=args.total_batch_size,
        num_params=num_params, gemm_work=work, config_key=config_key, backend=backend, world_size=world_size,
        device_batch_size=device_batch_size, config=user_config, environment=environment_info() if master else None,
    )  # fmt: skip

    def save(at_step: int, rng: dict[str, torch.Tensor], loader_position: Any) -> bool:
        saved = save_checkpoint(
            checkpoint_dir,
            at_step,
            raw_model.state_dict(),
            {
                "optimizers": [o.state_dict() for o in optimizers + steadiers],
                "rng": rng,
                "dataloader": loader_position,
            },
            {
                "step": at_step,
                "val_bpb": loop["val_bpb"],
                "model_config": asdict(config),
                "user_config": user_config,
                "run_config": run_config,
                "tunable": tunable,
                "device_batch_size": device_batch_size,
                "max_seq_len": args.max_seq_len,
                "loop_state": loop,
                "loss_state": monitor.state,
            },
            rank=rank,
        )
        if saved and master:
            if args.resume_from_step != "latest":
                forget_later_checkpoints(checkpoint_dir, at_step)  # of the run that this one left at an earlier step
            prune_checkpoints(checkpoint_dir, args.keep_last)
        return saved

    def validation_bpb(forward: Callable[..., torch.Tensor]) -> float:
        batches = tokenizing_distributed_data_loader_bos_bestfit(
            tokenizer, device_batch_size, args.max_seq_len, "val", device=device, data_dir=data_dir
        )
        with ctx():
            return evaluate_bpb(forward, signals.watch(batches, device), eval_steps, token_bytes)

    def weights_once(passes: int) -> contextlib.AbstractContextManager:
        """The weights' codes made once for so many passes, where making them for each is more work."""
        often = passes > 1 or rounds_with_feedback(raw_model)
        return nf.quantize_weights_once(raw_model) if often else contextlib.nullcontext()

    def forward_of_few() -> None:
        rows = max(1, MOMENTS_TOKENS // args.max_seq_len)
        raw_model(x[:rows], y[:rows])

    def evaluate() -> None:
        """Validation BPB with the method's own forward pass, and in BF16 (FP32 on a CPU)."""
        raw_model.eval()
        quantizes = any(isinstance(m, nf.QuantLinear) and m.recipe.quantizes for m in raw_model.modules())
        with preserved_rng(device):
            with weights_once(1):
                bpb = bpb_bf16 = validation_bpb(model)
            if quantizes:
                # Not compiled: the same layers compiled for another forward would be a second compilation.
                with nf.full_precision(raw_model):
                    bpb_bf16 = validation_bpb(raw_model)
        raw_model.train()
        loop.update(val_bpb=bpb, val_bpb_bf16=bpb_bf16, evaluated_at=step)
        loop["min_val_bpb"] = bpb if loop["min_val_bpb"] is None else min(loop["min_val_bpb"], bpb)
        text = f"step {step:05d} | validation bpb {bpb:.4f}"
        progress.write(text + (f" | with a BF16 forward {bpb_bf16:.4f}" if quantizes else ""))
        metrics.append("val", step, bpb=bpb, bpb_bf16=bpb_bf16, tokens=eval_steps * tokens_per_micro_batch)
        wandb_run.log(
            {"step": step, "val/bpb": bpb, "val/bpb_bf16": bpb_bf16, "total_training_time": loop["training_seconds"]}
        )

    def show_samples() -> list[str]:
        raw_model.eval()
        samples = draw_samples(raw_model, tokenizer)
        raw_model.train()
        for sample in samples:
            progress.write(f"  {sample}")
        metrics.append("sample", step, samples=samples)
        return samples

    def measure_core() -> float | None:
        raw_model.eval()
        try:
            with preserved_rng(device), weights_once(1), ctx():
                results = core_evaluation()(raw_model, tokenizer, device, max_per_task=args.core_metric_max_per_task)
        except (UserError, ValueError) as e:  # its data is not to be had: no reason to end a training run
            progress.write(f"warning: no CORE metric from here on: {one_line(e)}")
            args.core_metric_every = -1
            return None
        finally:
            raw_model.train()
        value = results["core_metric"]
        progress.write(f"step {step:05d} | CORE metric {value:.4f}")
        metrics.append("core", step, core_metric=value)
        wandb_run.log({"step": step, "core_metric": value})
        return value

    def measure_layers() -> None:
        def forward_backward() -> None:
            with ctx():
                raw_model(x[:1], y[:1]).backward()

        with preserved_rng(device):
            telemetry = layer_telemetry(raw_model, forward_backward)
        progress.write(f"step {step:05d} | {summarize_telemetry(telemetry)}")
        metrics.append("telemetry", step, layers=telemetry)
        wandb_run.log({"step": step, **{f"telemetry/{n}/{k}": v for n, t in telemetry.items() for k, v in t.items()}})

    def name_the_layer(micro_batches: list, micro_rng: list) -> str:
        for (mx, my), rng in zip(micro_batches, micro_rng):

            def forward_backward(mx=mx, my=my, rng=rng) -> None:
                set_rng_state(rng, device)
                with ctx():
                    raw_model(mx, my).backward()

            with preserved_rng(device):
                place = name_nonfinite(raw_model, forward_backward)
            if not place.startswith("the loss itself"):
                break
        return place

    # ------------------------------------------------------------------------------------------------------------------
    # The loop runs num_iterations + 1 times, the last time only to evaluate and save
    samples: list[str] = []
    core_metric = None
    tokens_per_second = mfu = None
    progress = Progress(total=num_iterations, desc="train", unit="step", initial=step)
    while True:
        last_step = step == num_iterations
        stopping = signals.received(device)
        due = lambda every, s=step, last=last_step: every > 0 and (last or s % every == 0)  # noqa: E731
        if not stopping and loop["evaluated_at"] != step and due(args.eval_every):
            try:
                evaluate()
            except StopRequested:
                raw_model.train()
                stopping = True
        if not stopping and due(args.core_metric_every) and step > 0:
            core_metric = measure_core()
        if not stopping and master and due(args.sample_every) and step > 0:
            samples = show_samples()
        if not stopping and not last_step and step != resumed_step and due(args.telemetry_every) and method != "bf16":
            measure_layers()
        if step != resumed_step and (
            last_step or stopping or (step > 0 and args.save_every > 0 and step % args.save_every == 0)
        ):
            if not save(step, get_rng_state(device), loader_state) and (last_step or stopping):
                progress.close()
                raise UserError(
                    f"step {step} could not be saved (see the warning above); free some disk space and go on from the "
                    "checkpoint before it with --resume-from-step latest"
                )
        if last_step or stopping:
            break

        if plan.apply(raw_model, step / num_iterations):
            progress.write(f"step {step:05d} | from here on {plan.at(step / num_iterations)}")
            if compiled:
                torch._dynamo.reset()  # recipes are constants of compiled code
        synchronize()
        t0 = time.monotonic()
        rng_before, loader_before = get_rng_state(device), loader_state
        micro_batches, micro_rng, losses = [], [], []
        try:
            with weights_once(grad_accum_steps):
                for _ in range(grad_accum_steps):
                    micro_batches.append((x, y))
                    micro_rng.append(get_rng_state(device))
                    with ctx():
                        loss = model(x, y)
                    losses.append(loss.detach())
                    (loss / grad_accum_steps).backward()  # gradients add up, so each micro-batch counts with its share
                    loader_state = next_loader_state
                    x, y, next_loader_state = next(loader)  # made on the CPU while the GPU works
            grad_norm = llama.clip_gradients(raw_model) if args.llama else gradient_norm(raw_model)
            step_loss = torch.stack(losses).mean()
            bad = ~(torch.isfinite(step_loss) & torch.isfinite(grad_norm))
            step_loss, any_bad = mean_over_ranks(torch.stack([step_loss, bad.float()])).tolist()
            if any_bad == 0:
                lrm = lr_multiplier(step, num_iterations, args.warmup_ratio, args.warmdown_ratio, args.final_lr_frac)
                if args.llama:
                    lrm = llama.lr_multiplier(step, num_iterations)
                for optimizer in optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = group["initial_lr"] * lrm
                for group in () if args.llama else optimizers[-1].param_groups:
                    group["momentum"] = muon_momentum(step)
                    group["weight_decay"] = weight_decay_at(step, num_iterations, weight_decay)
                with contextlib.ExitStack() as around:
                    for steadier in steadiers:
                        around.enter_context(steadier.optimizer_step(step))
                    for optimizer in optimizers:
                        optimizer.step()
                raw_model.zero_grad(set_to_none=True)
                if step % MOMENTS_EVERY == 0:
                    with ctx():
                        nf.update_second_moments(raw_model, forward_of_few)
        except Exception as e:
            if not is_out_of_memory(e) or world_size > 1:
                raise
            x = y = loss = None
            micro_batches.clear()
            raw_model.zero_grad(set_to_none=True)
            progress.close()
            saved = save(step, rng_before, loader_before)
            raise out_of_memory(step, device_batch_size, smaller_batch_size(), saved) from None
        synchronize()
        dt = time.monotonic() - t0

        if any_bad > 0:
            place = first_message(name_the_layer(micro_batches, micro_rng) if bad else None)
            what = f"step {step}: loss {step_loss:.4g}, first not finite: {place}"
            raw_model.zero_grad(set_to_none=True)
            skipped_in_a_row += 1
            monitor.state["skipped"] += 1
            metrics.append("skip", step, place=place, loss=str(step_loss))
            if args.on_nonfinite == "stop" or skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
                progress.close()
                monitor.state["skipped"] -= 1
                save(step, rng_before, loader_before)
                raise UserError(
                    f"{what}. Saved as it was before this step in {checkpoint_dir}; lower the learning rates "
                    "(--matrix-lr, --embedding-lr) and start over, or skip such steps: --resume-from-step latest "
                    "--on-nonfinite skip"
                )
            progress.write(f"warning: {what}; update skipped")
            step += 1
            progress.update(1)
            continue

        skipped_in_a_row = 0
        average = monitor.state["mean"]
        if monitor.update(step_loss):
            progress.write(f"warning: step {step}: loss {step_loss:.4f} is a spike (average {average:.4f})")
            metrics.append("spike", step, loss=step_loss, average=average)
        tokens_per_second = args.total_batch_size / dt
        mfu = 100 * flops_per_token * tokens_per_second / (peak_flops * world_size) if peak_flops else None
        loop["training_seconds"] += dt
        shown = {"loss": f"{monitor.smoothed:.4f}", "lrm": f"{lrm:.2f}", "tok/s": f"{tokens_per_second:,.0f}"}
        shown |= {"mfu": f"{mfu:.1f}%"} if mfu is not None else {}
        metrics.append(
            "train", step, loss=step_loss, smoothed_loss=monitor.smoothed, lr_multiplier=lrm,
            grad_norm=float(grad_norm), seconds=dt, tokens_per_second=tokens_per_second, mfu=mfu,
        )  # fmt: skip
        if step % 10 == 0:
            wandb_run.log(
                {
                    "step": step, "train/loss": monitor.smoothed, "train/lrm": lrm, "train/dt": dt,
                    "train/tok_per_sec": tokens_per_second, "train/grad_norm": float(grad_norm),
                    "train/spikes": monitor.state["spikes"], "train/skipped": monitor.state["skipped"],
                    "total_training_flops": flops_per_token * args.total_batch_size * step,
                    "total_training_time": loop["training_seconds"], **({"train/mfu": mfu} if mfu is not None else {}),
                }
            )  # fmt: skip
        step += 1
        progress.update(1, **shown)
    progress.close()

    # ------------------------------------------------------------------------------------------------------------------
    # Say what happened
    if stopping and not last_step:
        print0(f"{signals.name}: stopped at step {step} of {num_iterations}, saved in {checkpoint_dir}")
        print0("go on with: --resume-from-step latest")
        wandb_run.finish()
        return
    if resumed_step == num_iterations:
        print0(f"Nothing to do: {model_tag} is already trained ({num_iterations} steps)")
    results = {
        "method": method,
        "val_bpb": loop["val_bpb"],
        "val_bpb_bf16": loop["val_bpb_bf16"],
        "tokens_per_second": total_tokens / loop["training_seconds"] if loop["training_seconds"] else None,
        "training_seconds": loop["training_seconds"],
        "samples": samples,
    }
    outcome = {
        "Minimum validation bpb": loop["min_val_bpb"],
        "Final validation bpb": loop["val_bpb"],
        "Final validation bpb, BF16 forward": loop["val_bpb_bf16"],
        "CORE metric estimate": core_metric,
        "MFU %": f"{mfu:.2f}%" if mfu is not None else None,
        "Total training flops": f"{flops_per_token * total_tokens:e}",
        "Total training time": format_seconds(loop["training_seconds"]),
        "Peak memory usage": f"{torch.cuda.max_memory_allocated() / 2**20:.2f}MiB" if device.type == "cuda" else None,
        "Loss spikes": monitor.state["spikes"],
        "Skipped updates": monitor.state["skipped"],
    }
    outcome = {k: v for k, v in outcome.items() if v is not None}
    announce({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in outcome.items()})
    report = get_report(model_tag)
    if resumed_step != num_iterations or not report.has("Base model training"):  # or it was killed before this line
        flags = {k: v for k, v in vars(args).items() if v != getattr(parse_args([]), k) and k != "resume_from_step"}
        lines = {
            "Layers": " / ".join(str(raw_model.nf_report).splitlines()),
            "Flags": " ".join(f"--{k.replace('_', '-')}={v}" for k, v in flags.items()),
            "Number of parameters": num_params,
            "Number of FLOPs per token": f"{flops_per_token:e}",
            "Calculated number of iterations": num_iterations,
            "Number of training tokens": total_tokens,
            "Tokens : Params ratio": total_tokens / num_params,
            "DDP world size": world_size,
            "Device batch size": device_batch_size,
            "Backend": backend,
        }
        report.log("Base model training", [lines | outcome], results)
    wandb_run.finish()


if __name__ == "__main__":
    run_main(main)
