"""What mid-training, SFT and RL have in common: a run that begins with the model of another stage."""

import argparse
import contextlib
import os
from collections.abc import Callable
from typing import Any

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import print0, resolve_method
from nanochat_fp4.models.cross_entropy import default_head
from nanochat_fp4.models.families import config_record, recompute_problem
from nanochat_fp4.models.optim8bit import set_state
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.training.checkpoint_manager import load_checkpoint, weights_digest
from nanochat_fp4.training.load_model import check_same_run, checkpoint_folder, find_model_tag, model_of
from nanochat_fp4.training.trainer import Trainer


class LaterStage(Trainer):
    """A run of the stage `stage`, whose model is loaded, converted, and spread over the processes. `source` is the
    stage whose model the run begins with. A subclass sets `sources`, the numbers of rows by name of data set."""

    sources: dict[str, str]
    rate_flags = "--init-lr-frac"

    def __init__(self, stage: str, source: str, args: argparse.Namespace, until_exit: contextlib.ExitStack):
        super().__init__(stage, args, until_exit)
        self.begin_with_model_of(source)
        method = resolve_method(args.method or self.trained_with("method", "bf16"))
        # In a speedrun with COMPARE=1 the variable is that of the other model.
        variable = None if os.environ.get("NANOCHAT_BEGAN") else os.environ.get("QAT_METHOD")
        if variable and not args.method and resolve_method(None) != method:
            print0(f"note: the model was trained with {method}, so QAT_METHOD={variable} is not used (--method is)")
        recipe = "bf16" if args.quantization == "none" else get_recipe(method).final
        if args.method or args.quantization == "none":  # Otherwise the head is that of the model.
            self.model.lm_head.precision = default_head("bf16" if args.quantization == "none" else method)
        self.convert(method, recipe, backward=args.quantization == "full", verbose=False)
        forward_only = get_recipe(recipe).quantizes and args.quantization != "full"
        print0(f"QAT method {get_recipe(recipe).name}" + "; the backward pass is not quantized" * forward_only)

    def begin_with_model_of(self, source: str) -> None:
        """Loads the run's own checkpoint, or the model of the stage `source` if no checkpoint is resumed.

        Raises UserError if the model of `source` was trained again after this run had begun with it.
        """
        args = self.args
        self.open_folder(find_model_tag(source, None) if args.model_tag is None else args.model_tag)
        folder = checkpoint_folder(source, self.model_tag)
        if self.source is None:
            find_model_tag(source, self.model_tag)
            weights, _, self.trained = load_checkpoint(folder, args.model_step, self.device)
            step = self.trained["step"]
            self.parent = {"stage": source, "model_tag": self.model_tag, "step": step}
            self.parent |= {"weights_sha256": weights_digest(folder, step)}
        else:
            weights, self.parent = self.loaded.pop(0), self.trained.get("parent", {})
            before, now = self.parent.get("weights_sha256"), weights_digest(folder, self.parent.get("step"))
            if before is not None and now is not None and before != now:
                began = f"the run in {self.folder} began with another {source} model than {self.model_tag} is now"
                raise UserError(f"{began}; start it over with --overwrite")
        where = f"checkpoint of step {self.trained['step']} in {self.source or folder}"
        self.model, self.tokenizer = model_of(weights, self.trained, where, self.device, "train")
        del weights
        set_state(self.model, self.lean_or_fp32, self.trained_with("state", "fp32"))
        self.model.recompute = args.recompute or self.trained_with("recompute", "none")
        if reason := recompute_problem(self.model.recompute, self.model.config, self.device):
            if args.recompute:
                raise UserError(f"--recompute={args.recompute}: {reason}")
            print0(f"note: the model was trained with --recompute={self.model.recompute}, not used here: {reason}")
            self.model.recompute = "none"

    def finetune(
        self,
        batch_settings: dict[str, Any],
        lr_multiplier: Callable[[float], float],
        momentum: Callable[[int], float] | None = None,
        scalar_lr: float = 0.5,
    ) -> None:
        """Gives the run the optimizers and the schedule of nanochat's later stages, and sets what checkpoints will say
        of the run. `batch_settings` are settings that decide the batches, and scalar_lr is the learning rate of the
        layers' scalars. Raises UserError if the checkpoint that is resumed belongs to another run."""
        args = self.args
        orthogonalizer = args.orthogonalizer or self.trained_with("orthogonalizer", "polar_express")
        names = ("unembedding_lr", "embedding_lr", "matrix_lr", "weight_decay")
        rates = {name: getattr(args, name) for name in names} | {"scalar_lr": scalar_lr}
        how = args.init_lr_frac, lr_multiplier, momentum, orthogonalizer, self.lean
        self.make_step(lambda: self.model.setup_finetuning(rates, *how))
        settings = {
            "stage": self.stage,
            "method": self.method,
            "quantization": args.quantization,
            "head": None if self.model.lm_head.precision == "bf16" else self.model.lm_head.precision,
            **config_record(self.model.config),
            **batch_settings,
            "num_iterations": self.num_steps,
            "sources": self.sources,
            "seed": args.seed,
            "tokenizer": self.tokenizer.fingerprint(),
        }
        if self.resumes:
            check_same_run(settings, self.trained.get("run_config", {}), self.folder)
        changes = {
            "state": self.lean_or_fp32,
            "recompute": self.model.recompute,
            "orthogonalizer": orthogonalizer,
            "device_batch_size": self.rows,
        }
        self.record(settings, [get_recipe(self.method)], changes, parent=self.parent)
        self.start_record = {"quantization": args.quantization, "sources": self.sources}

    def log_stage(self, section: str, setup: dict[str, Any]) -> None:
        """Prints the results, and writes them together with `setup` into the report under `section`."""
        bests = {f"Best {key}": value for key, value in self.state["best"].items()}
        model = f"{self.parent.get('stage')} model {self.model_tag}, step {self.parent.get('step')}"
        self.log_report(section, {"Model": model, **setup}, bests)
