"""Prints the results of a run at its end, and writes them into the report."""

from typing import Any

import torch

from nanochat_fp4.cli import format_seconds
from nanochat_fp4.common import announce, print0
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.training.run import Run


def report_run(run: Run, section: str, about: dict[str, Any], outcome: dict[str, Any], results: dict[str, Any]) -> None:
    """Prints the outcome of a run, and writes it together with `about` and the results into the report under
    `section`."""
    done_before = run.resumed_step == run.step
    if done_before:
        print0(f"Nothing to do: {run.model_tag} is through this stage ({run.step} steps)")
    gpu, seconds = run.device.type == "cuda", run.loop.training_seconds
    outcome = outcome | {
        "Number of iterations": run.step,
        "DDP world size": run.process.world_size,
        "Training time": format_seconds(seconds),
        "Peak memory usage": f"{torch.cuda.max_memory_allocated() / 2**20:.2f}MiB" if gpu else None,
        "Training loss (smoothed)": run.monitor.smoothed,
        "Loss spikes": run.monitor.state["spikes"],
        "Skipped updates": run.monitor.state["skipped"],
        "Quantization error": run.telemetry,
    }
    outcome = {k: v for k, v in outcome.items() if v is not None}
    announce({k: f"{v:.6f}" if isinstance(v, float) else v for k, v in outcome.items()})
    report = get_report(run.model_tag)
    evaluated = run.loop.evaluated_at != run.evaluated_before
    # Otherwise the run was killed before it could report, or was stopped before its last evaluation.
    if run.dry_run or (done_before and report.path(section).exists() and not evaluated):
        return
    about = {"Layers": str(run.model.nf_report).splitlines()} | about
    about |= {"FP4 GEMMs": " / ".join(run.gemms.lines())} if run.gemms else {}
    report.log(section, [about | outcome])
