"""
How many steps a plan trains on a CPU: all, half or a quarter, by a probe of a few steps before the first run.

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
from nanochat_fp4.common import set_cpu_threads
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import GPT, config_from_depth
from nanochat_fp4.models.optim import PretrainingOptions
from nanochat_fp4.training.micro_batch import plan_accumulation
from nanochat_fp4.training.step import TrainingStep

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


def minutes_of(steps: int, later: int, work: float, most: int, minutes: float, methods: int = 1) -> float:
    """
    Returns the minutes of a run by FLOPs.

    - steps: of the base training
    - later: the steps of a base training whose later stages would be as long as those of this run
    - work: of a step, over that of the model whose whole run of `most` steps takes `minutes`
    - methods: the number of methods that the run trains with
    """
    usual = most * (1 + LATER_SHARE) + OTHER_STEPS
    return methods * minutes * ((steps + later * LATER_SHARE) * work + OTHER_STEPS) / usual


def probe(args: argparse.Namespace, vocab_size: int) -> float:
    """Seconds that a training step of the run that base_train's flags describe takes now: a mean, without the first."""
    device = torch.device("cpu")
    batch, seq_len, tokens = args.device_batch_size, args.max_seq_len, args.total_batch_size
    batch = tokens // seq_len if batch == "auto" else batch
    config = config_from_depth(args.depth, vocab_size, seq_len, args.head_dim, args.aspect_ratio, "L")
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
                x = torch.randint(vocab_size, (batch, seq_len + 1))
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


def steps_for(
    args: argparse.Namespace, vocab_size: int, most: int, minutes: float, base_dir: Path, look: bool
) -> tuple[int, str] | None:
    """(steps, the reason): stored, or else chosen now by a probe and stored; look: None instead of a probe.

    args: base_train's flags. most: the steps where there is time for all.
    """
    path, name = base_dir / "cpu_steps.json", f"d{args.depth}_{most}"
    records, record = stored(path, name, most)
    if record is None and look:
        return None
    if record is None:
        runs = [p.name for p in sorted((base_dir / "base_checkpoints").glob(f"d{args.depth}_*")) if p.is_dir()]
        runs = [run for run in runs if "_steps" not in run]  # a number of the user's
        if runs:
            record = {"steps": most, "why": f"as the run {runs[0]} has them"}
        else:
            with contextlib.redirect_stdout(io.StringIO()):  # the training will print convert's report
                seconds = probe(args, vocab_size)
            steps = choose_steps(most, seconds, minutes)
            why = f"a step took {seconds:.2g} s in a probe; the whole run is to take {minutes:g} minutes"
            record = {"steps": steps, "why": why, "seconds_per_step": seconds}
        base_dir.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(records | {name: record}, indent=1) + "\n")
    return record["steps"], record["why"]
