"""The parts that mid-training, SFT and RL have in common. Their Run begins with the model of another stage."""

import argparse
from collections.abc import Callable
from typing import Any

from nanochat_fp4.models.families import config_record
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.training.report_run import report_run
from nanochat_fp4.training.run import Process, Run


def begin(stage: str, source: str, args: argparse.Namespace, process: Process, compiled: bool = False) -> Run:
    """Returns a Run whose model is loaded, converted, and spread over the processes. `source` is the stage whose
    model the run begins with."""
    run = Run(stage, args, process)
    run.begin_with_model_of(source)
    method = run.method_of_model()
    recipe = "bf16" if args.quantization == "none" else get_recipe(method).final
    run.convert(method, recipe, backward=args.quantization == "full", verbose=process.rank == 0)
    run.divide(compiled)
    run.rate_flags = "--init-lr-frac"
    return run


def finetune(
    run: Run,
    lr_multiplier: Callable[[float], float],
    momentum: Callable[[int], float] | None = None,
    scalar_lr: float = 0.5,
    **loss: Any,
) -> None:
    """Gives the run the optimizers and the schedule of nanochat's later stages. scalar_lr is the learning rate of the
    layers' scalars, and `loss` is the argument of TrainingStep."""
    names = ("unembedding_lr", "embedding_lr", "matrix_lr", "weight_decay")
    rates = {name: getattr(run.args, name) for name in names} | {"scalar_lr": scalar_lr}
    options = {"orthogonalizer": run.orthogonalizer, "lean": run.lean}
    run.make_step(*run.model.setup_finetuning(rates, run.args.init_lr_frac, lr_multiplier, momentum, **options), **loss)


def record_settings(run: Run, sources: dict[str, str], batch_settings: dict[str, Any]) -> None:
    """Sets what checkpoints will say of the run. run.size must be known.

    `sources` are the numbers of rows by name of data set, and `batch_settings` are further settings that decide the
    batches. Raises UserError if the checkpoint that is resumed belongs to another run.
    """
    args = run.args
    settings = {
        "stage": run.stage,
        "method": run.method,
        "quantization": args.quantization,
        **config_record(run.model.config),
        **batch_settings,
        "num_iterations": run.size.steps,
        "sources": sources,
        "seed": args.seed,
        "tokenizer": run.tokenizer.fingerprint(),
    }
    changes = {
        "state": run.state,
        "recompute": run.model.recompute,
        "orthogonalizer": run.orthogonalizer,
        "device_batch_size": run.size.rows,
    }
    run.record_settings(settings, [get_recipe(run.method)], changes, parent=run.parent)
    run.start_record = {"quantization": args.quantization, "sources": sources}


def report(run: Run, section: str, setup: dict[str, Any], sources: dict[str, str]) -> None:
    """Prints the results, and writes them together with `setup` into the report under `section`."""
    bests = {f"Best {key}": value for key, value in run.loop.best.items()}
    about = {
        "Model": f"{run.parent.get('stage')} model {run.model_tag}, step {run.parent.get('step')}",
        **setup,
        **{f"Data: {name}": rows for name, rows in sources.items()},
    }
    results = {"quantization": run.args.quantization, "train_loss": run.monitor.smoothed}
    report_run(run, section, about, bests, results | run.loop.numbers)
