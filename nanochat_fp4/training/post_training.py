"""
What mid-training, SFT and RL share: flags, the model that they begin with, and the report.

Post-training keeps the forward pass of the method that the base model was trained with and leaves the backward pass
unquantized (the paper, Appendix C); --quantization changes that.
"""

import argparse
import os
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import announce, print0
from nanochat_fp4.console import format_seconds, parse_finite
from nanochat_fp4.errors import UserError
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.training import QuantizedTraining
from nanochat_fp4.parallel import check_parallel, shard
from nanochat_fp4.training.checkpoint_manager import build_model, checkpoint_folder, config_record, load_checkpoint
from nanochat_fp4.training.resume import Start, check_same_run, find_resume_step, starts_over
from nanochat_fp4.training.run_folder import check_writable, held_run, save_bytes
from nanochat_fp4.training.stage import (
    Process,
    RunOptions,
    add_run_arguments,
    find_model_tag,
    load_stage_model,
    resolve_method,
    weights_digest,
)
from nanochat_fp4.training.trainer import Stage, Trainer, TrainingStep

QUANTIZATIONS = ("forward", "full", "none")


def add_common_arguments(parser: argparse.ArgumentParser, init_lr_frac: float) -> None:
    """nanochat's flags that these stages have, and ours."""
    add = parser.add_argument
    add_run_arguments(parser)
    add(
        "--dtype",
        default="bfloat16",
        choices=("float32", "bfloat16"),
        help="matrix products in float32|bfloat16 on a GPU (a CPU has float32)",
    )
    add("--seed", type=int, default=42, help="seed of rotations and stochastic rounding (--quantization full)")
    # Quantization
    add(
        "--method",
        default=None,
        help=f"QAT method (default: the one the model was trained with): {', '.join(nf.METHODS)}; "
        "or an ablation (nf.ABLATIONS)",
    )
    add(
        "--quantization",
        default="forward",
        choices=QUANTIZATIONS,
        help="quantize the forward pass only, forward and backward, or nothing",
    )
    # Model loading
    add("--model-tag", default=None, help="model tag to load from, and to save under")
    add("--model-step", type=int, default=None, help="model step to load from")
    # Data
    add(
        "--data",
        default="nanochat",
        choices=("nanochat", "local"),
        help="nanochat's mixture, or a small one made on the spot without a network (no benchmark numbers)",
    )
    add("--sft-dir", default=None, help="folder with train.jsonl and test.jsonl of conversations, in place of SmolTalk")
    add(
        "--eval-dir",
        default=None,
        help="folder of benchmark files (default: $NANOCHAT_EVAL_DIR, else the hub); see eval/README.md",
    )
    add("--allow-missing", action="store_true", help="leave out a dataset that is not to be had, instead of stopping")
    # Optimization
    add("--embedding-lr", type=parse_finite, default=0.2, help="learning rate for embedding parameters (Adam)")
    add("--unembedding-lr", type=parse_finite, default=0.004, help="learning rate for unembedding parameters (Adam)")
    add("--matrix-lr", type=parse_finite, default=0.02, help="learning rate for matrix parameters (Muon)")
    add("--weight-decay", type=parse_finite, default=0.0, help="weight decay of the matrix parameters (Muon)")
    add("--init-lr-frac", type=parse_finite, default=init_lr_frac, help="initial LR as fraction of base LR")


class PostTraining:
    """
    A run of a stage up to its first step: the model it starts from, or goes on with, and what its folder holds.

    name, source: of this stage and of the one before it. Raises UserError.
    """

    def __init__(self, name: str, source: str, args: argparse.Namespace, process: Process):
        self.name, self.source, self.args, self.process = name, source, args, process
        self.options = RunOptions.of(args)
        if name == "rl" and args.parallel != "ddp":
            raise UserError("reinforcement learning generates on each process by itself; leave --parallel out")
        sharded = check_parallel(args)
        self.model_tag = find_model_tag(source, None) if args.model_tag is None else args.model_tag
        folder = checkpoint_folder(name, self.model_tag)
        step = None
        if not self.options.dry_run:
            process.held.enter_context(held_run(folder))
            step = find_resume_step(folder, args.resume_from_step, args.overwrite, process.rank)
        self.start = Start(folder)
        if step is None:
            self.begin_anew()
        else:
            self.go_on(step)
        if not self.options.dry_run:
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

    def begin_anew(self) -> None:
        """With the model of the stage before."""
        self.model, self.tokenizer, self.parent_meta = load_stage_model(
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
        _, rank_state, _ = load_checkpoint(folder, step, device, load_optimizer=True, rank=rank)
        self.start = Start(folder, folder, step, rank_state, meta)
        self.parent_meta, self.parent = meta, meta.get("parent") or {}
        before = self.parent.get("weights_sha256")
        now = weights_digest(checkpoint_folder(self.source, self.model_tag), self.parent.get("step"))
        if before is not None and now is not None and before != now:
            raise UserError(
                f"the run in {folder} began with another {self.source} model than {self.model_tag} is now; start it "
                "over with --overwrite"
            )

    @property
    def dtype(self) -> torch.dtype | None:
        """Of matrix products: see gpt.autocast."""
        return torch.float32 if self.args.dtype == "float32" else None

    @property
    def rates(self) -> dict[str, float]:
        return {
            name: getattr(self.args, name) for name in ("unembedding_lr", "embedding_lr", "matrix_lr", "weight_decay")
        }

    def trainer(
        self, parts: TrainingStep, sources: dict[str, str], batch_config: dict[str, Any], **stage: Any
    ) -> Trainer:
        """stage: of trainer.Stage, what is the stage's own. sources: what the mixture is made of; batch_config: what
        decides the batches besides. Raises UserError where a checkpoint is of another run."""
        args = self.args
        run_config = {
            "stage": self.name,
            "method": self.method,
            "quantization": args.quantization,
            **config_record(self.config),
            **batch_config,
            "num_iterations": stage["num_iterations"],
            "sources": sources,
            "seed": args.seed,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        if self.start.source is not None:
            check_same_run(run_config, self.start.meta.get("run_config"), self.start.folder)
        made = Stage(
            name=self.name,
            method=self.method,
            user_config={**vars(args), "method": self.method, "device_batch_size": stage["device_batch_size"]},
            meta={
                "model_config": config_record(self.config),
                "run_config": run_config,
                "tunable": {"world_size": self.process.world_size, "parallel": args.parallel},
                "parent": self.parent,
            },
            start_record={"quantization": args.quantization, "sources": sources},
            lower="--init-lr-frac",
            seed=args.seed,
            **stage,
        )
        return Trainer(made, parts, self.options, self.process, self.start)

    def parts(self, optimizers: list[torch.optim.Optimizer], forward: Any, **loss: Any) -> TrainingStep:
        return TrainingStep(self.model, optimizers, forward, QuantizedTraining(self.model), self.dtype, **loss)

    def report(self, trainer: Trainer, section: str, setup: dict[str, Any], sources: dict[str, str]) -> None:
        """What came out: to the screen, and under `section` into the report, with `setup`."""
        step, loop, monitor = trainer.step, trainer.loop, trainer.monitor
        if self.start.resumed_step == step:
            print0(f"Nothing to do: {self.model_tag} is through this stage ({step} steps)")
            if get_report(self.model_tag).has(section):
                return  # else it was killed after its last save, before it could report
        gpu = self.process.device.type == "cuda"
        outcome = {
            "Number of iterations": step,
            "DDP world size": self.process.world_size,
            "Training time": format_seconds(loop["training_seconds"]),
            "Peak memory usage": f"{torch.cuda.max_memory_allocated() / 2**20:.2f}MiB" if gpu else None,
            "Training loss (smoothed)": monitor.smoothed,
            **{f"Best {key}": value for key, value in loop["best"].items()},
            "Loss spikes": monitor.state["spikes"],
            "Skipped updates": monitor.state["skipped"],
            "Quantization error": trainer.telemetry,
        }
        outcome = {k: v for k, v in outcome.items() if v is not None}
        announce({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in outcome.items()})
        if self.options.dry_run:
            return
        results = {
            "method": self.method,
            "quantization": self.args.quantization,
            "train_loss": monitor.smoothed,
            "training_seconds": loop["training_seconds"],
            **loop["numbers"],
        }
        lines = {
            "Model": f"{self.source} model {self.model_tag}, step {self.parent.get('step')}",
            "Layers": " / ".join(str(self.model.nf_report).splitlines()),
            **setup,
            **{f"Data: {name}": rows for name, rows in sources.items()},
        }
        get_report(self.model_tag).log(section, [lines | outcome], results)
