"""
Pre-trains the base model, with NVFP4 or any other method. From the root of the repository:

    python -m scripts.base_train
    torchrun --standalone --nproc_per_node=8 -m scripts.base_train

A CPU can train a much smaller model:

    python -m scripts.base_train --depth=4 --aspect-ratio=32 --head-dim=64 --max-seq-len=256 --device-batch-size=8 \\
        --total-batch-size=2048 --eval-tokens=8192 --core-metric-every=-1 --num-iterations=20

The flags are nanochat's. --method names the method of quantization. Without it the method is $QAT_METHOD, or else
clover. A checkpoint holds everything that training needs to go on. A run that is resumed with `--resume-from-step
latest` therefore ends with the same bits as a run that was never interrupted.
"""

import argparse
import functools
import os
from dataclasses import asdict, fields
from typing import Any

import nanochat_fp4 as nf
from nanochat_fp4.cli import (
    ArgumentParser,
    UserError,
    one_line,
    parse_beta,
    parse_finite,
    parse_rate,
    parse_share,
    run_main,
)
from nanochat_fp4.common import announce, print0, resolve_method
from nanochat_fp4.data.dataloader import Text, evaluation_rows, text_batches
from nanochat_fp4.data.dataset import ensure_data, open_shards, validation_text
from nanochat_fp4.data.tokenizer import RustBPETokenizer, get_token_bytes, get_tokenizer
from nanochat_fp4.evaluation import report
from nanochat_fp4.evaluation.core_metric import evaluate_model
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.generation.engine import draw_samples
from nanochat_fp4.models import families
from nanochat_fp4.models.optim import ORTHOGONALIZERS, PretrainingOptions
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.parallel import unsharded
from nanochat_fp4.self_check import self_check
from nanochat_fp4.training import loop
from nanochat_fp4.training.checkpoint_manager import check_model_tag
from nanochat_fp4.training.extras import evaluating
from nanochat_fp4.training.flags import (
    add_compile_argument,
    add_method_arguments,
    add_run_arguments,
    changed_flags,
)
from nanochat_fp4.training.graphed import GraphedStep
from nanochat_fp4.training.load_model import checkpoint_folder, register_stored_recipes
from nanochat_fp4.training.micro_batch import auto_device_batch_size, parse_device_batch_size, plan_accumulation
from nanochat_fp4.training.new_model import (
    check_machine,
    comparison_key,
    make_model,
    resolve_horizon,
    run_settings,
)
from nanochat_fp4.training.report_run import report_run
from nanochat_fp4.training.run import Data, Evaluation, Process, Run, Size, due, run_stage
from nanochat_fp4.training.startup import start_compiler
from nanochat_fp4.training.step import TrainingStep


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description="Pretrain base model",
        epilog="SIGTERM, Ctrl-C and SIGHUP save a checkpoint and stop within one step; the exit status is then "
        "143, 130 and 129. Bad input and numerical trouble end in one line and exit status 2.",
    )
    add = parser.add_argument
    add_run_arguments(parser)
    add_compile_argument(parser)
    text = "replay each micro-batch as a CUDA graph: equal bits, less work for the CPU, more memory; one GPU"
    add("--cuda-graph", action="store_true", help=text)
    add("--seed", type=int, default=42, help="seed of weights, rotations and stochastic rounding")
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
    families.add_arguments(parser)
    # Training horizon. Only one of these is used. Earlier ones take precedence.
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
    """Evaluates the CORE metric before each step at which it is due. If its data cannot be read, a warning says so, and
    the metric is left out from then on."""

    def __init__(self, tokenizer: RustBPETokenizer, every: int, max_per_task: int):
        self.tokenizer, self.every, self.max_per_task = tokenizer, every, max_per_task
        self.value: float | None = None

    def __call__(self, run: Run, last: bool) -> None:
        if not due(self.every, run.step, last) or run.step == 0 or (run.before_step_is_done and not last):
            return
        try:
            with evaluating(run), unsharded(run.model), run.training_step.weights_once(1), run.training_step.autocast():
                results = evaluate_model(run.model, self.tokenizer, run.device, max_per_task=self.max_per_task)
        except (UserError, ValueError) as e:
            run.progress.write(f"warning: no CORE metric from here on: {one_line(e)}")
            self.every = -1
            return
        self.value = results["core_metric"]
        for note in results["notes"]:
            run.progress.write(f"note: {note}")
        run.progress.write(f"step {run.step:05d} | CORE metric {self.value:.4f}")
        run.metrics.append("core", run.step, core_metric=self.value)
        run.tracker.log({"step": run.step, "core_metric": self.value})


class Samples:
    """Prints continuations of a few prompts before each step at which they are due."""

    def __init__(self, tokenizer: RustBPETokenizer, every: int):
        self.tokenizer, self.every = tokenizer, every
        self.newest: list[str] = []

    def __call__(self, run: Run, last: bool) -> None:
        if not due(self.every, run.step, last) or run.step == 0 or (run.before_step_is_done and not last):
            return
        with evaluating(run), unsharded(run.model):
            if run.process.rank:
                return
            self.newest = draw_samples(run.model, self.tokenizer)
        for sample in self.newest:
            run.progress.write(f"  {sample}")
        run.metrics.append("sample", run.step, samples=self.newest)


class Validation:
    """Measures the bits per byte of the validation text with the method's own forward pass, and in BF16 (FP32 on a
    CPU)."""

    def __init__(self, run: Run, text: Text, rows: int, seq_len: int, tokens: int):
        self.run, self.text, self.rows, self.seq_len = run, text, rows, seq_len
        self.num_rows, self.steps = evaluation_rows(tokens, rows, seq_len, run.process.world_size)
        self.token_bytes = get_token_bytes(device=run.device)

    def __call__(self, step: int, last: bool) -> dict[str, float]:
        run = self.run
        with run.training_step.weights_once(1):
            bpb = bpb_bf16 = self.measure(run.forward)
        if run.quantized.quantizes():
            # This forward pass is not compiled, because it would cost a second compilation of the same layers.
            with nf.full_precision(run.model):
                bpb_bf16 = self.measure(run.model)
        return {"val_bpb": bpb, "val_bpb_bf16": bpb_bf16}

    def measure(self, forward: Any) -> float:
        """Returns the bits per byte with this forward pass."""
        run = self.run
        what = run.tokenizer, self.rows, self.seq_len, "val", self.text, run.device
        batches = text_batches(*what, num_rows=self.num_rows)
        with run.training_step.autocast():
            batches = run.progress.meanwhile(run.process.signals.watch(batches, run.device), self.steps, "evaluation")
            return evaluate_bpb(forward, batches, self.steps, self.token_bytes)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check_model_tag(args.model_tag)
    if args.resume_from_step != -1:  # A row that the run's own checkpoints hold needs no --recipes.
        name = families.family_of_flags(args).run_name(args)
        tag = args.model_tag or f"{name}_{args.method or os.environ.get('QAT_METHOD')}"
        register_stored_recipes(checkpoint_folder("base", tag))
    method = resolve_method(args.method)
    run_stage(args, functools.partial(train, args, method))


def train(args: argparse.Namespace, method: str, process: Process) -> None:
    """Sets up the run, trains, and writes the report at the end."""
    run, world_size, T = Run("base", args, process), process.world_size, args.max_seq_len
    start_compiler(process.device)
    data_dir = ensure_data(args.data_dir)
    tokenizer = get_tokenizer()
    process.phases.end("data, tokenizer")

    # The model, its folder, and the checkpoint with which training goes on
    model, name = make_model(args, tokenizer.get_vocab_size(), process.device)
    flops, num_params = model.estimate_flops(), model.num_scaling_params()
    steps = resolve_horizon(args, flops, num_params)
    check_machine(args, process.device, flops * args.total_batch_size * steps)
    settings = run_settings(args, method, model, tokenizer)
    all_rows = plan_accumulation(args.total_batch_size, 1, T, world_size)
    if args.device_batch_size != "auto":
        plan_accumulation(args.total_batch_size, args.device_batch_size, T, world_size)
    # The default tag has the method's name, so that no method overwrites the run of another one.
    run.open_folder(f"{name}_{method}" if args.model_tag is None else args.model_tag, args.branch_from)
    run.adopt(model, tokenizer, settings, steps)

    # The method, and the micro-batch that fits
    plan = MethodPlan.parse(method, args.layer_methods, args.method_phases)
    run.convert(method, method, plan, steps)
    backend = str(nf.backend())
    if method != "bf16":
        # The self-check ends the run if kernels or GEMMs compute something wrong on this machine.
        backend += f"; {self_check(process.device, method, model)}"
    rows = args.device_batch_size
    if rows == "auto":
        # A resumed run keeps its micro-batch. Rows of a micro-batch share tensor scales, so the result depends on it.
        rows = run.trained.device_batch_size or auto_device_batch_size(model, all_rows, T)
    micro_batches = plan_accumulation(args.total_batch_size, rows, T, world_size)
    run.divide(args.compile if args.compile is not None else process.device.type == "cuda")
    run.size = Size(rows, T, micro_batches, steps, args.total_batch_size)
    announce_run(run, plan, backend)

    # Data and optimizers
    text = Text(data_dir, data_seed=args.data_seed, shuffle_documents=args.shuffle_documents)
    val_text, val_data = Text(shards=open_shards("val", data_dir)), validation_text(data_dir)
    options = PretrainingOptions(**{f.name: getattr(args, f.name) for f in fields(PretrainingOptions)})
    optimizers, schedule = model.setup_pretraining(options, args.total_batch_size, steps, run.lean)
    run.make_step(optimizers, schedule, GraphedStep if args.cuda_graph else TrainingStep)

    def make_loader(position: Any) -> Any:
        how = {"micro_batches": micro_batches * world_size, "position": position}
        return text_batches(tokenizer, rows, T, "train", text, process.device, **how)

    run.data = Data(make_loader)
    validation = Validation(run, val_text, rows, T, args.eval_tokens)
    run.evaluation = Evaluation(validation, functools.partial(due, args.eval_every), validation.num_rows * T)
    core = CoreMetric(tokenizer, args.core_metric_every, args.core_metric_max_per_task)
    samples = Samples(tokenizer, args.sample_every)
    run.before_step += [core, samples]
    run.rate_flags = "the learning rates (--matrix-lr, --embedding-lr)"

    # What checkpoints and metrics.jsonl record of the run
    batch = {"device_batch_size": rows}
    tunable = {**asdict(options), "num_iterations": steps, "data_dir": str(data_dir)}
    run.record_settings(
        settings,
        plan.recipes,
        batch | {"num_iterations": steps},
        tunable={**tunable, **batch, "recompute": args.recompute, "val_data": val_data},
        max_seq_len=T,
        **batch,
    )
    spread = {"world_size": world_size, "parallel": args.parallel}
    run.start_record = {
        "backend": backend,
        "total_batch_size": args.total_batch_size,
        "num_params": num_params,
        "flops_per_token": flops,
        "vocab_size": model.config.vocab_size,
        "gemm_work": plan.work(model),
        "recipes": {r.name: {gemm: str(getattr(r, gemm)) for gemm in report.GEMMS} for r in plan.recipes},
        "config_key": comparison_key(settings | tunable | spread),
        "val_text": val_data,
        "tokenizer": tokenizer.fingerprint(),
        **batch,
    }
    if loop.train(run):
        write_report(run, backend, core, samples)


def announce_run(run: Run, plan: MethodPlan, backend: str) -> None:
    """Prints the model, the steps and the batch."""
    config, num_params, flops = run.model.config, run.model.num_scaling_params(), run.flops_per_token
    size = run.size
    total_tokens = run.args.total_batch_size * size.steps
    print0(f"Training {run.model_tag}:")
    announce(
        {
            "model": f"{num_params:,} parameters: {config.n_layer} layers, width {config.n_embd}, "
            f"{config.n_head} heads, vocabulary {config.vocab_size:,}",
            "steps": f"{size.steps:,} of {run.args.total_batch_size:,} tokens: {total_tokens:,} tokens, "
            f"{total_tokens / num_params:.2f} per parameter, {flops * total_tokens:.2e} FLOPs",
            "batch": f"{size.rows} x {size.seq_len} tokens, {run.process.world_size} process(es), "
            f"{size.micro_batches} micro-batch(es) a step",
            "GEMM work": ", ".join(f"{100 * s:.1f}% in {bits} bits" for bits, s in plan.work(run.model).items() if s),
            "backend": backend,
            "output": run.folder,
        }
    )


def write_report(run: Run, backend: str, core: CoreMetric, samples: Samples) -> None:
    """Prints the results and writes them into the report."""
    num_params, numbers = run.model.num_scaling_params(), run.loop.numbers
    total_tokens = run.args.total_batch_size * run.size.steps
    about = {
        "Flags": changed_flags(run.args, parse_args([])),
        "Number of parameters": num_params,
        "Number of FLOPs per token": run.flops_per_token,
        "Number of training tokens": total_tokens,
        "Tokens : Params ratio": total_tokens / num_params,
        "Device batch size": run.size.rows,
        "Backend": backend,
    }
    outcome = {
        "Minimum validation bpb": run.loop.best.get("val_bpb"),
        "Final validation bpb": numbers.get("val_bpb"),
        "Final validation bpb, BF16 forward": numbers.get("val_bpb_bf16"),
        "CORE metric estimate": core.value,
        "MFU %": f"{run.mfu:.2f}%" if run.mfu is not None else None,
        "Total training FLOPs": f"{run.flops_per_token * total_tokens:.2e}",
    }
    seconds = run.loop.training_seconds
    results = {key: numbers.get(key) for key in ("val_bpb", "val_bpb_bf16")} | {
        "tokens_per_second": total_tokens / seconds if seconds else None,
        "samples": samples.newest,
    }
    report_run(run, "Base model training", about, outcome, results)


if __name__ == "__main__":
    run_main(main)
