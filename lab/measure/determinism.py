"""
How reproducible a run is on this machine's GPU, as it is and with --runtime=deterministic: one table.

    python -m lab.measure.determinism                                  # d6, clover; some minutes on an H100 or H200
    python -m lab.measure.determinism --method=bf16 --steps=100
    python -m lab.measure.determinism --out=runs.json                  # the numbers as JSON as well

For both modes: the same run twice (do losses and final weights agree to the bit?), a run that is killed by SIGKILL
after its second checkpoint and resumed, and tokens/s. The runs are scripts.base_train's, compiled, on the embedded
corpus, one after the other, in a temporary folder. Nothing is downloaded.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.console import ArgumentParser
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.files import atomic_write

ROOT = Path(__file__).resolve().parents[2]
MODES = {"default": [], "deterministic": ["--runtime=deterministic"]}
WARM_UP = 10  # steps before the throughput counts
VOCAB_SIZE = 4096


class Runs:
    """Runs of scripts.base_train in a base directory of their own."""

    def __init__(self, args: argparse.Namespace, base: Path):
        self.args, self.base, self.every = args, base, args.steps // 4
        self.env = {k: v for k, v in os.environ.items() if k not in ("DATA_DIR", "QAT_METHOD")}
        self.env |= {"NANOCHAT_BASE_DIR": str(base), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        batch = args.device_batch_size * args.micro_batches * args.max_seq_len
        flags = f"""--method={args.method} --depth={args.depth} --head-dim=64 --max-seq-len={args.max_seq_len}
            --device-batch-size={args.device_batch_size} --total-batch-size={batch} --num-iterations={args.steps}
            --eval-every=-1 --core-metric-every=-1 --sample-every=-1 --device-type={args.device_type}"""
        self.train = ["scripts.base_train", *flags.split()]

    def folder(self, tag: str) -> Path:
        return self.base / "base_checkpoints" / tag

    def start(self, *command: str, tag: str = "prepare") -> subprocess.Popen:
        with open(self.base / f"{tag}.log", "ab") as f:
            return subprocess.Popen(
                [sys.executable, "-m", *command], env=self.env, stdout=f, stderr=f, stdin=subprocess.DEVNULL, cwd=ROOT
            )

    def finish(self, *command: str, tag: str = "prepare") -> str:
        """Runs it; returns its log. Raises UserError."""
        status = self.start(*command, tag=tag).wait()
        log = (self.base / f"{tag}.log").read_text(errors="replace")
        if status:
            raise UserError(f"a run ended with status {status}; its log ends with: {log[-1500:]}")
        return log

    def records(self, tag: str) -> list[dict[str, Any]]:
        path = self.folder(tag) / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]  # not the one just being written
        return [r for r in records if r.get("event") == "train"]

    def kill_and_resume(self, mode: str) -> None:
        """SIGKILL as soon as the run is three steps past its second checkpoint; then it goes on from there."""
        command = (*self.train, *MODES[mode], f"--model-tag={mode}_killed")
        process, step = self.start(*command, f"--save-every={self.every}", tag=f"{mode}_killed"), 2 * self.every
        manifest = self.folder(f"{mode}_killed") / f"manifest_{step:06d}.json"
        while not (manifest.exists() and len(self.records(f"{mode}_killed")) > step + 3):
            if process.poll() is not None:
                raise UserError(f"the run that was to be killed had ended ({process.returncode}); raise --steps")
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        log = self.finish(*command, "--resume-from-step=latest", tag=f"{mode}_killed")
        if f"Resuming from step {step}" not in log:
            raise UserError(f"the killed run did not go on from step {step}; its log ends with: {log[-1500:]}")

    def compare(self, a: str, b: str) -> dict[str, Any]:
        """The first step whose losses differ, how many weights do at the end, and by how much."""
        losses_a, losses_b = ({r["step"]: r["loss"] for r in self.records(tag)} for tag in (a, b))
        steps = sorted(losses_a.keys() | losses_b.keys())
        name = f"model_{self.args.steps:06d}.pt"
        x, y = (torch.load(self.folder(tag) / name, map_location="cpu", weights_only=True) for tag in (a, b))
        different = [k for k in x if not torch.equal(x[k], y[k])]
        relative = [float((x[k].float() - y[k].float()).norm() / x[k].float().norm()) for k in different]
        return {
            "first_loss_that_differs": next((s for s in steps if losses_a.get(s) != losses_b.get(s)), None),
            "tensors": len(x), "tensors_that_differ": len(different),
            "largest_relative_difference": max(relative, default=0.0),
        }  # fmt: skip


def measure(args: argparse.Namespace, base: Path) -> dict[str, Any]:
    runs = Runs(args, base)
    runs.finish("nanochat_fp4.data.dataset", "--embedded", "--size-mb=4")
    runs.finish("scripts.tok_train", f"--vocab-size={VOCAB_SIZE}", "--max-chars=2000000")
    gpu = torch.cuda.get_device_name() if args.device_type == "cuda" else "CPU"
    run = f"{args.method} d{args.depth}, {args.steps} steps"
    numbers: dict[str, Any] = {"run": f"{gpu}, torch {torch.__version__}, {run}", "killed_after": 2 * runs.every}
    for mode, flags in MODES.items():
        for tag in (f"{mode}_1", f"{mode}_2"):
            runs.finish(*runs.train, *flags, f"--model-tag={tag}", tag=tag)
        runs.kill_and_resume(mode)
        speeds = [r["tok_per_sec"] for r in runs.records(f"{mode}_1")[WARM_UP:]]  # the first steps compile
        numbers[mode] = {
            "twice": runs.compare(f"{mode}_1", f"{mode}_2"),
            "resumed": runs.compare(f"{mode}_1", f"{mode}_killed"),
            "tokens_per_second": statistics.median(speeds),
        }
    return numbers


def describe_comparison(c: dict[str, Any]) -> str:
    if not c["tensors_that_differ"] and c["first_loss_that_differs"] is None:
        return f"the same bits ({c['tensors']} tensors, every loss)"
    step = c["first_loss_that_differs"]
    losses = "all losses equal" if step is None else f"losses from step {step} on"
    share = f"{c['tensors_that_differ']} of {c['tensors']} tensors"
    return f"{losses}; {share}, by up to {c['largest_relative_difference']:.1e}"


def show(numbers: dict[str, Any]) -> str:
    columns = [numbers[mode] for mode in MODES]
    a, b = (c["tokens_per_second"] for c in columns)
    rows = [
        ("the same run twice", *(describe_comparison(c["twice"]) for c in columns)),
        (
            f"killed after step {numbers['killed_after']}, resumed",
            *(describe_comparison(c["resumed"]) for c in columns),
        ),
        ("tokens/s", f"{a:,.0f}", f"{b:,.0f} ({b / a:.3f}x)"),
    ]
    lines = [numbers["run"], "", "| | as it is | --runtime=deterministic |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="How reproducible a run is on this machine's GPU")
    add = parser.add_argument
    add("--method", default="clover", help="QAT method")
    add("--depth", type=int, default=6)
    add("--max-seq-len", type=int, default=1024)
    add("--device-batch-size", type=int, default=32)
    add("--micro-batches", type=int, default=2, help="of a step")
    add("--steps", type=int, default=60)
    add("--device-type", default="cuda")
    add("--out", default="", help="write the numbers here as JSON")
    args = parser.parse_args(argv)
    if args.device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU here; --device-type=cpu --depth=1 --max-seq-len=64 tries the script out")
    if args.steps < 2 * WARM_UP:
        raise UserError(f"--steps={args.steps} is too short; use at least {2 * WARM_UP}")
    if args.out and not Path(args.out).absolute().parent.is_dir():
        raise UserError(f"--out={args.out}: its folder is not there; make it, or name another file")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nanochat_determinism_") as base:
        numbers = measure(args, Path(base))
    if args.out:
        atomic_write(args.out, json.dumps(numbers, indent=2) + "\n")
    print(f"{show(numbers)}\n\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    run_main(main)
