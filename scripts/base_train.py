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

import argparse
import functools
import os
from dataclasses import asdict, fields
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import resolve_method
from nanochat_fp4.console import ArgumentParser, parse_beta, parse_finite, parse_rate, parse_share
from nanochat_fp4.data.dataloader import (
    Text,
    evaluation_rows,
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from nanochat_fp4.data.dataset import ensure_data, open_shards, validation_text
from nanochat_fp4.data.packing import Deal
from nanochat_fp4.data.tokenizer import RustBPETokenizer, get_token_bytes, get_tokenizer
from nanochat_fp4.doctor import self_check
from nanochat_fp4.errors import UserError, one_line, run_main
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.generation.engine import draw_samples
from nanochat_fp4.models import llama
from nanochat_fp4.models.gpt import compile_layers
from nanochat_fp4.models.optim import ORTHOGONALIZERS, PretrainingOptions
from nanochat_fp4.models.optim8bit import LeanState
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.nvfp4.recipes import to_record
from nanochat_fp4.nvfp4.training import QuantizedTraining
from nanochat_fp4.parallel import check_parallel, shard, unsharded
from nanochat_fp4.training import setup
from nanochat_fp4.training.checkpoint_manager import check_model_tag
from nanochat_fp4.training.flags import (
    add_compile_argument,
    add_method_arguments,
    add_run_arguments,
    changed_flags,
    parse_seed,
)
from nanochat_fp4.training.load_model import checkpoint_folder, config_record, register_stored_recipes
from nanochat_fp4.training.micro_batch import auto_device_batch_size, parse_device_batch_size, plan_accumulation
from nanochat_fp4.training.trainer import Process, RunSpec, Trainer, TrainingStep, due
from scripts.base_eval import evaluate_model


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description="Pretrain base model",
        epilog="SIGTERM, Ctrl-C and SIGHUP save a checkpoint and stop within one step; the exit status is then "
        "143, 130 and 129. Bad input and numerical trouble end in one line and exit status 2.",
    )
    add = parser.add_argument
    add_run_arguments(parser)
    add_compile_argument(parser)
    add("--seed", type=parse_seed, default=42, help="seed of weights, rotations and stochastic rounding")
    text = "folder of parquet shards or text (default: $DATA_DIR, else FineWeb-Edu, else a small embedded corpus)"
    add("--data-dir", default="", help=text)
    text = "seed of another order of the training text, from 1 to 4294967295 (default: as it is stored)"
    add("--data-seed", type=int, default=0, help=text)
    text = "train on all documents in one random order, which --data-seed chooses; takes a copy of the text on disk"
    add("--shuffle-documents", action="store_true", help=text)
    add_method_arguments(parser)
    # Model architecture
    add("--depth", type=int, default=20, help="depth of the Transformer model")
    add("--aspect-ratio", type=int, default=64, help="model_dim = depth * aspect_ratio")
    add("--head-dim", type=int, default=128, help="target head dimension for attention")
    add("--max-seq-len", type=int, default=2048, help="max context length")
    add("--window-pattern", default="SSSL", help="sliding windows of the layers in turn: L=full, S=half context")
    text = f"instead of nanochat's GPT one of the paper's Llama-like models ({', '.join(llama.SIZES)}), with its "
    text += "optimizer, rates and schedule; the paper has --max-seq-len=512 --total-batch-size=262144"
    add("--llama", default="", help=text)
    # Training horizon: only one is used, in order of precedence
    add("--num-iterations", type=int, default=-1, help="explicit number of optimization steps (-1 = disable)")
    add("--target-flops", type=parse_finite, default=-1.0, help="steps that reach these FLOPs (-1 = disable)")
    text = "steps that reach these tokens per parameter (Chinchilla=20, -1 = disable)"
    add("--target-param-data-ratio", type=parse_finite, default=8, help=text)
    # Optimization
    text = "per-device batch size, or 'auto' for the largest that fits; the total batch stays the same"
    add("--device-batch-size", type=parse_device_batch_size, default=32, help=text)
    add("--total-batch-size", type=int, default=524288, help="total batch size in tokens")
    add("--embedding-lr", type=parse_rate, default=0.3, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_rate, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add("--weight-decay", type=parse_rate, default=0.2, help="cautious weight decay of matrix parameters (Muon)")
    add("--matrix-lr", type=parse_rate, default=0.02, help="learning rate for matrix parameters (Muon)")
    text = "how Muon orthogonalizes its updates: nanochat's Polar Express, or the package muon-optimizer"
    add("--orthogonalizer", choices=ORTHOGONALIZERS, default="polar_express", help=text)
    add("--scalar-lr", type=parse_rate, default=0.5, help="learning rate for scalars (resid_lambdas, x0_lambdas)")
    add("--adam-beta1", type=parse_beta, default=0.8, help="Adam beta1 for embedding/unembedding")
    add("--adam-beta2", type=parse_beta, default=0.95, help="Adam beta2 for embedding/unembedding")
    add("--warmup-ratio", type=parse_share, default=0.0, help="ratio of iterations for LR warmup")
    add("--warmdown-ratio", type=parse_share, default=0.4, help="ratio of iterations for LR warmdown")
    add("--final-lr-frac", type=parse_rate, default=0.0, help="final LR as fraction of initial LR")
    # Evaluation
    add("--eval-every", type=int, default=250, help="evaluate val bpb every N steps (-1 = disable)")
    add("--eval-tokens", type=int, default=20 * 524288, help="number of tokens to evaluate val loss on")
    add("--core-metric-every", type=int, default=2000, help="evaluate CORE metric every N steps (-1 = disable)")
    add("--core-metric-max-per-task", type=int, default=500, help="examples per task for CORE metric")
    add("--sample-every", type=int, default=2000, help="sample from model every N steps (-1 = disable)")
    text = "'<model tag>@<step>': begin with this method at a checkpoint of a run of the same model, data and schedule"
    add("--branch-from", default="", help=text)
    add("--model-tag", default=None, help="checkpoint directory name (default: d<depth>_<method>)")
    return parser.parse_args(argv)


class CoreMetric:
    """The CORE metric before a step that is due. A metric whose data cannot be had is left out from then on."""

    def __init__(self, tokenizer: RustBPETokenizer, every: int, max_per_task: int):
        self.tokenizer, self.every, self.max_per_task = tokenizer, every, max_per_task
        self.value: float | None = None

    def __call__(self, trainer: Trainer, last: bool) -> None:
        if not (due(self.every, trainer.step, last) and trainer.step > 0):
            return
        try:
            parts = trainer.parts
            with trainer.evaluating(), unsharded(trainer.model), parts.weights_once(1), parts.autocast():
                results = evaluate_model(trainer.model, self.tokenizer, trainer.device, max_per_task=self.max_per_task)
        except (UserError, ValueError) as e:
            trainer.progress.write(f"warning: no CORE metric from here on: {one_line(e)}")
            self.every = -1
            return
        self.value = results["core_metric"]
        for note in results["notes"]:
            trainer.progress.write(f"note: {note}")
        trainer.progress.write(f"step {trainer.step:05d} | CORE metric {self.value:.4f}")
        trainer.metrics.append("core", trainer.step, core_metric=self.value)
        trainer.wandb_run.log({"step": trainer.step, "core_metric": self.value})


class Samples:
    """Continuations of prompts before a step that is due."""

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


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_model_tag(args.model_tag)
    if args.resume_from_step != -1:  # a row that the run's own checkpoints hold needs no --recipes
        name = f"llama-{args.llama}" if args.llama else f"d{args.depth}"
        tag = args.model_tag or f"{name}_{args.method or os.environ.get('QAT_METHOD')}"
        register_stored_recipes(checkpoint_folder("base", tag))
    method = resolve_method(args.method)
    setup.run_stage(args, functools.partial(train, args, method))


def train(args: argparse.Namespace, method: str, process: Process) -> None:
    device, world_size = process.device, process.world_size
    sharded = check_parallel(args)
    data_dir = ensure_data(args.data_dir)
    tokenizer = get_tokenizer()
    token_bytes = get_token_bytes(device=device)
    process.phases.end("data, tokenizer")
    model, name = setup.make_model(args, tokenizer.get_vocab_size(), device)
    flops, num_params = model.estimate_flops(), model.num_scaling_params()
    num_iterations = setup.resolve_horizon(args, flops, num_params)
    setup.check_machine(args, device, flops * args.total_batch_size * num_iterations)
    options = PretrainingOptions(**{f.name: getattr(args, f.name) for f in fields(PretrainingOptions)})
    run_config = setup.run_settings(args, method, model, tokenizer)
    # A resume notes a change of these.
    tunable = {**asdict(options), "num_iterations": num_iterations, "data_dir": str(data_dir)}
    tunable |= {"world_size": world_size, "parallel": args.parallel}
    rows = plan_accumulation(args.total_batch_size, 1, args.max_seq_len, world_size)
    if args.device_batch_size != "auto":
        plan_accumulation(args.total_batch_size, args.device_batch_size, args.max_seq_len, world_size)
    # Each method has a tag of its own, so that none overwrites another's run.
    model_tag = f"{name}_{method}" if args.model_tag is None else args.model_tag
    folder = checkpoint_folder("base", model_tag)
    start = setup.find_start(args, run_config, num_iterations, folder, model, process)

    nf.convert(model, method, per_token_in_eval=False)
    plan = MethodPlan.parse(method, args.layer_methods, args.method_phases)
    quantized = QuantizedTraining(model, plan, num_iterations)
    quantized.set_progress(max(start.step - 1, 0))  # of the step before: train_step changes it after the evaluation

    backend = str(nf.backend())
    if method != "bf16":
        backend += f"; {self_check(device, method)}"  # a silent fault of kernels or GEMMs ends the run here

    device_batch_size = args.device_batch_size
    if device_batch_size == "auto":
        # The same one after a resume: it decides what shares a tensor scale, hence the bits of the result.
        known = start.meta.get("device_batch_size")
        device_batch_size = known or auto_device_batch_size(model, rows, args.max_seq_len)
    grad_accum_steps = plan_accumulation(args.total_batch_size, device_batch_size, args.max_seq_len, world_size)
    num_rows, eval_steps = evaluation_rows(args.eval_tokens, device_batch_size, args.max_seq_len, world_size)

    if sharded:
        shard(model, torch.bfloat16 if device.type == "cuda" else None)
    compiled = args.compile if args.compile is not None else device.type == "cuda"
    forward = compile_layers(model) if compiled else model
    batches = num_iterations, device_batch_size, grad_accum_steps
    setup.describe(args, model_tag, model, *batches, plan, backend, folder, process)

    text = Text(data_dir, data_seed=args.data_seed, shuffle_documents=args.shuffle_documents)
    val_text, val_data = Text(shards=open_shards("val", data_dir)), validation_text(data_dir)
    lean = LeanState(model, args.seed) if args.state == "lean" else None
    optimizers, schedule = model.setup_pretraining(options, args.total_batch_size, num_iterations, lean)
    parts = TrainingStep(model, optimizers, forward, quantized, lean=lean)

    def make_loader(position: Any) -> Any:
        return tokenizing_distributed_data_loader_with_state_bos_bestfit(
            tokenizer, device_batch_size, args.max_seq_len, "train", device=device, resume_state_dict=position,
            text=text, deal=Deal(micro_batches=grad_accum_steps * world_size),
        )  # fmt: skip

    def validation_bpb(forward: Any) -> float:
        batches = tokenizing_distributed_data_loader_bos_bestfit(
            tokenizer, device_batch_size, args.max_seq_len, "val", device=device, text=val_text,
            deal=Deal(trainer.loader.lanes), num_rows=num_rows,
        )  # fmt: skip
        with parts.autocast():
            batches = trainer.progress.meanwhile(process.signals.watch(batches, device), eval_steps, "evaluation")
            return evaluate_bpb(forward, batches, eval_steps, token_bytes)

    def evaluate(step: int, last: bool) -> dict[str, float]:
        """Validation BPB with the method's own forward pass, and in BF16 (FP32 on a CPU)."""
        with parts.weights_once(1):
            bpb = bpb_bf16 = validation_bpb(forward)
        if quantized.quantizes():
            # Not compiled: the same layers compiled for another forward would be a second compilation.
            with nf.full_precision(model):
                bpb_bf16 = validation_bpb(model)
        return {"val_bpb": bpb, "val_bpb_bf16": bpb_bf16}

    core = CoreMetric(tokenizer, args.core_metric_every, args.core_metric_max_per_task)
    samples = Samples(tokenizer, args.sample_every)
    batch = {"device_batch_size": device_batch_size}
    spec = RunSpec(
        stage="base",
        method=method,
        make_loader=make_loader,
        schedule=schedule,
        device_batch_size=device_batch_size,
        seq_len=args.max_seq_len,
        grad_accum_steps=grad_accum_steps,
        num_iterations=num_iterations,
        seed=args.seed,
        evaluate=evaluate,
        evaluate_due=functools.partial(due, args.eval_every),
        also=(core, samples),
        tokens_per_step=args.total_batch_size,
        val_tokens=num_rows * args.max_seq_len,
        user_config={**vars(args), "method": method, **batch, "num_iterations": num_iterations},
        meta={
            "model_config": config_record(model.config),
            "run_config": run_config,
            "recipes": [to_record(recipe) for recipe in dict.fromkeys(plan.recipes)],
            "tunable": {**tunable, **batch, "recompute": args.recompute, "val_data": val_data},
            "max_seq_len": args.max_seq_len,
            **batch,
        },
        start_record={
            "backend": backend,
            "total_batch_size": args.total_batch_size,
            "num_params": num_params,
            "vocab_size": model.config.vocab_size,
            "gemm_work": plan.work(model),
            "config_key": setup.comparison_key(run_config | tunable),
            "val_text": val_data,
            "tokenizer": tokenizer.fingerprint(),
            **batch,
        },
        lower="the learning rates (--matrix-lr, --embedding-lr)",
    )
    trainer = Trainer(spec, parts, args, process, start)
    if trainer.run():
        write_report(args, model_tag, trainer, backend, core, samples)


def write_report(
    args: argparse.Namespace, model_tag: str, trainer: Trainer, backend: str, core: CoreMetric, samples: Samples
) -> None:
    """Prints the results and writes them into the report."""
    spec, loop, num_params = trainer.spec, trainer.loop, trainer.model.num_scaling_params()
    total_tokens, numbers = args.total_batch_size * spec.num_iterations, loop["numbers"]
    about = {
        "Flags": changed_flags(args, parse_args([])),
        "Number of parameters": num_params,
        "Number of FLOPs per token": trainer.flops_per_token,
        "Number of training tokens": total_tokens,
        "Tokens : Params ratio": total_tokens / num_params,
        "Device batch size": spec.device_batch_size,
        "Backend": backend,
    }
    outcome = {
        "Minimum validation bpb": loop["best"].get("val_bpb"),
        "Final validation bpb": numbers.get("val_bpb"),
        "Final validation bpb, BF16 forward": numbers.get("val_bpb_bf16"),
        "CORE metric estimate": core.value,
        "MFU %": f"{trainer.mfu:.2f}%" if trainer.mfu is not None else None,
        "Total training FLOPs": f"{trainer.flops_per_token * total_tokens:.2e}",
    }
    results = {key: numbers.get(key) for key in ("val_bpb", "val_bpb_bf16")} | {
        "tokens_per_second": total_tokens / loop["training_seconds"] if loop["training_seconds"] else None,
        "samples": samples.newest,
    }
    setup.report_run(trainer, model_tag, "Base model training", about, outcome, results)


if __name__ == "__main__":
    run_main(main)
