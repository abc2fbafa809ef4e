"""
How many steps the shell scripts train on a CPU: all, half or a quarter, by a probe of a few steps before the first run.

    python -m nanochat_fp4.training.cpu_steps --steps 120 --depth 2 --aspect-ratio 64 ...  (dev/pipeline.sh)

The number is stored in the base directory, so that every method, resume and comparison there has the same one.
"""

import argparse
import contextlib
import io
import json
import time
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import get_base_dir, set_cpu_threads
from nanochat_fp4.console import ArgumentParser, parse_finite
from nanochat_fp4.errors import run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import GPT, config_from_depth
from nanochat_fp4.models.optim import PretrainingOptions
from nanochat_fp4.training.micro_batch import parse_device_batch_size, plan_accumulation
from nanochat_fp4.training.trainer import TrainingStep

# The time of the other stages, in units of a base training step. Both are estimates from one busy run (dev/LOG.md).
# LATER_SHARE is for each base step: evaluations, mid-training and SFT shrink with the base training.
# OTHER_STEPS is constant: ten starts of Python, the tokenizer, the first evaluation.
LATER_SHARE, OTHER_STEPS = 1.0, 60
PROBE_STEPS, PROBE_SECONDS = 4, 20


def choose_steps(most: int, seconds_per_step: float, minutes: float) -> int:
    """The largest of most, most / 2 and most / 4 steps whose whole run takes at most `minutes`; else the smallest."""
    for steps in (most, most // 2):
        if (steps * (1 + LATER_SHARE) + OTHER_STEPS) * seconds_per_step <= 60 * minutes:
            return steps
    return most // 4


def probe(args: argparse.Namespace) -> float:
    """Seconds that a training step of the run that main's flags describe takes now: a mean, without the first step."""
    device = torch.device("cpu")
    batch, seq_len, tokens = args.device_batch_size, args.max_seq_len, args.total_batch_size
    batch = tokens // seq_len if batch == "auto" else batch
    config = config_from_depth(args.depth, args.vocab_size, seq_len, args.head_dim, args.aspect_ratio, "L")
    set_cpu_threads(device, config.n_embd)
    model = GPT(config)
    model.init_weights()
    nf.convert(model, args.method)
    optimizers, _ = model.setup_pretraining(PretrainingOptions(), tokens, 1)
    step, count = TrainingStep(model, optimizers), plan_accumulation(tokens, batch, seq_len, 1)
    ends = []
    while len(ends) <= PROBE_STEPS and (len(ends) < 2 or ends[-1] - ends[0] < PROBE_SECONDS):
        with step.micro_batches(count):
            for _ in range(count):
                x = torch.randint(args.vocab_size, (batch, seq_len + 1))
                step.micro_batch(x[:, :-1], x[:, 1:], count=count)
        step.update()
        ends.append(time.monotonic())
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def stored(path: Path, name: str, most: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(all records of the file, the record of this run). A file that cannot be read counts as empty."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
        record = records.get(name)
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}, None
    known = isinstance(record, dict) and record.get("steps") in (most, most // 2, most // 4) and record.get("why")
    return records, record if known else None


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Chooses the number of training steps on a CPU; prints it and the reason")
    parser.add_argument("--method", default="clover")
    parser.add_argument("--minutes", type=parse_finite, default=5, help="of the whole run")
    parser.add_argument("--look", action="store_true", help="print what is stored, if anything; choose nothing")
    for name in ("steps", "depth", "aspect-ratio", "head-dim", "max-seq-len", "vocab-size", "total-batch-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device-batch-size", type=parse_device_batch_size, required=True)
    args = parser.parse_args(argv)
    base = Path(get_base_dir())
    path, name, most = base / "cpu_steps.json", f"d{args.depth}_{args.steps}", args.steps
    records, record = stored(path, name, most)
    if record is None and not args.look:
        runs = [p.name for p in sorted((base / "base_checkpoints").glob(f"d{args.depth}_*")) if p.is_dir()]
        runs = [run for run in runs if "_steps" not in run]  # a number of the user's
        if runs:
            record = {"steps": most, "why": f"as the run {runs[0]} has them"}
        else:
            with contextlib.redirect_stdout(io.StringIO()):  # the training will print convert's report
                seconds = probe(args)
            steps = choose_steps(most, seconds, args.minutes)
            why = f"a step took {seconds:.2g} s in a probe; the whole run is to take {args.minutes:g} minutes"
            record = {"steps": steps, "why": why, "seconds_per_step": seconds}
        atomic_write(path, json.dumps(records | {name: record}, indent=1) + "\n")
    if record is not None:
        print(record["steps"], record["why"])


if __name__ == "__main__":
    run_main(main)
