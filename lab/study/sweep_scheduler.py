"""Runs the runs of a sweep: one process for each GPU, or one after another in this process, with what each has left.

Nothing here knows a method: a run is a tag, a list of flags of scripts.base_train and, where it branches from another
run, the checkpoint it waits for. A run that is done is one JSON file, made of its metrics.
"""

import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lab import ROOT
from lab.runs import check_run
from lab.study.sweep_runs import Run
from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.files import atomic_write
from nanochat_fp4.training.checkpoint_manager import list_steps


class Interrupted(Exception):
    """A signal asked for a stop; what runs has saved itself (or was killed by a second one)."""


@dataclass
class Sweep:
    """Where the runs of a sweep lie, what they read and what they run on.

    folder: of this sweep. It is the base directory of its runs, too.
    devices: "cpu" (in this process), or names of GPUs, one for each run at a time.
    data_dir: as ensure_data returned it.
    keep: methods whose checkpoints stay.
    """

    folder: Path
    data_dir: str
    devices: Sequence[str]
    keep: Sequence[str] = ()
    needed: set[str] = field(default_factory=set)  # tags of runs that others branch from

    def result_path(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.tag}.json"

    def result(self, run: Run) -> dict | None:
        """What a run that is done has written, or None. A file that is damaged, or another run's, counts as none."""
        try:
            result = json.loads(self.result_path(run).read_text())
            check_run(result)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        own = (result["method"], result["size"], result["seed"]) == (run.method, run.size, run.seed)
        return result if own else None

    def results(self, runs: Iterable[Run]) -> list[dict]:
        return [r for r in map(self.result, runs) if r is not None]

    def arguments(self, run: Run) -> list[str]:
        device = "cpu" if "cpu" in self.devices else "cuda"
        where = [f"--model-tag={run.tag}", f"--data-dir={self.data_dir}", f"--device-type={device}"]
        return [*run.flags, *where, "--resume-from-step=latest"]

    def has_checkpoint(self, tag: str, step: int) -> bool:
        return step in list_steps(self.folder / "base_checkpoints" / tag)

    def finish(self, run: Run) -> dict | None:
        """The result of a run from its metrics, stored; None where it is not complete, or has no loss at its end."""
        checkpoint = self.folder / "base_checkpoints" / run.tag
        records = read_jsonl(checkpoint / "metrics.jsonl") if (checkpoint / "metrics.jsonl").is_file() else []
        starts = [r for r in records if r["event"] == "start"]
        values = [r for r in records if r["event"] == "val"]
        if not starts or not values or values[-1]["step"] != starts[-1]["num_iterations"]:
            return None
        start, losses = starts[-1], [r for r in records if r["event"] == "train"]
        last, steps = values[-1], start["num_iterations"]
        if not math.isfinite(last["bpb"] + last["bpb_bf16"]):
            return None
        result = {
            "method": run.method, "size": run.size, "seed": run.seed, "flags": list(run.flags),
            "val_bpb": last["bpb"], "val_bpb_bf16": last["bpb_bf16"],
            "curve": [[r["step"], r["bpb"], r["bpb_bf16"]] for r in values],
            "loss_curve": thinned(losses, steps),
            "train_loss": statistics.fmean(r["loss"] for r in losses[-max(1, len(losses) // 20) :]),
            "steps": steps, "tokens": steps * start["total_batch_size"], "num_params": start["num_params"],
            "vocab_size": start.get("vocab_size"), "eval_tokens": last["tokens"],
            "tokenizer": start["tokenizer"], "val_text": start["val_text"],
        }  # fmt: skip
        result |= {name: start[name] for name in ("gemm_work", "backend", "environment")}
        self.result_path(run).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.result_path(run), json.dumps(result, indent=1) + "\n")
        if run.method not in self.keep and run.tag not in self.needed:
            self.delete_checkpoints(run.tag)
        return result

    def delete_checkpoints(self, tag: str) -> None:
        for path in (self.folder / "base_checkpoints" / tag).glob("*"):
            if path.name != "metrics.jsonl":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def log_path(self, run: Run) -> Path:
        path = self.folder / "logs" / f"{run.tag}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def train(self, runs: Sequence[Run], progress=lambda: None) -> None:
        """Trains what is not done. Raises Interrupted after a signal, UserError naming the runs that failed."""
        branches = {r.branch for r in runs if r.branch and self.result(r) is None}
        missing = {tag for tag, step in branches if not self.has_checkpoint(tag, step)}
        self.needed |= {tag for tag, _ in branches}
        waiting = [r for r in runs if self.result(r) is None or r.tag in missing]
        failed = self._here(waiting, progress) if "cpu" in self.devices else self._on_gpus(waiting, progress)
        for run in runs:
            if run.tag in self.needed and run.method not in self.keep and not failed:
                self.delete_checkpoints(run.tag)
        if failed:
            raise UserError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}; run again to repeat them")

    def _here(self, waiting: Sequence[Run], progress) -> list[str]:
        from scripts import base_train

        failed, threads = [], torch.get_num_threads()
        torch.set_num_threads(1)  # what fits a CPU is too small for more
        try:
            for run in waiting:
                log, problem = self.log_path(run), "it ended early, or diverged"
                with open(log, "a") as f, base_directory(self.folder):
                    try:
                        with contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
                            base_train.main(self.arguments(run))
                    except (UserError, ValueError) as e:
                        problem = one_line(e)
                    except SystemExit as e:  # a signal: the run has saved itself
                        raise Interrupted(e.code) from None
                failed += [] if self.finish(run) else [f"{run.tag} ({problem}; see {log})"]
                progress()
        finally:
            torch.set_num_threads(threads)
        return failed

    def _on_gpus(self, waiting: Sequence[Run], progress) -> list[str]:
        waiting, failed = list(waiting), []
        running: dict[int, tuple[Run, subprocess.Popen]] = {}

        def can_start(run: Run) -> bool:
            """Not while the run that it branches from has not come that far."""
            if not run.branch or self.has_checkpoint(*run.branch):
                return True
            return run.branch[0] not in {r.tag for r in [*waiting, *(r for r, _ in running.values())]}

        with caught_signals() as signals:
            while (waiting and not signals) or running:
                for slot, device in enumerate(self.devices):
                    if slot in running or signals:
                        continue
                    if run := next(filter(can_start, waiting), None):
                        waiting.remove(run)
                        running[slot] = (run, self._start(run, device))
                for _, process in running.values() if signals else ():
                    if process.poll() is None:
                        process.send_signal(signal.SIGTERM if len(signals) == 1 else signal.SIGKILL)
                for slot, (run, process) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[slot]
                    if self.finish(run) is None and not signals:
                        last = self.log_path(run).read_text(errors="replace").strip().splitlines()[-1:]
                        failed.append(f"{run.tag} (status {process.returncode}: {''.join(last)[:200]})")
                    progress()
                time.sleep(0.2)
        if signals:
            raise Interrupted(128 + signals[0])
        return failed

    def _start(self, run: Run, device: str) -> subprocess.Popen:
        environment = os.environ | {"NANOCHAT_BASE_DIR": str(self.folder), "CUDA_VISIBLE_DEVICES": device}
        environment["RECIPES"] = str(ROOT / "lab/recipes.py")
        with open(self.log_path(run), "a") as f:
            # A session of its own: Ctrl-C reaches this process alone, which passes it on.
            return subprocess.Popen(
                [sys.executable, "-m", "scripts.base_train", *self.arguments(run)],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=f, stderr=f, start_new_session=True,
            )  # fmt: skip


@contextlib.contextmanager
def base_directory(folder: Path) -> Iterator[None]:
    """NANOCHAT_BASE_DIR inside the block."""
    before = os.environ.get("NANOCHAT_BASE_DIR")
    os.environ["NANOCHAT_BASE_DIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["NANOCHAT_BASE_DIR"]
        else:
            os.environ["NANOCHAT_BASE_DIR"] = before


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """A list that SIGINT, SIGTERM and SIGHUP append their number to. An ignored SIGHUP (nohup) stays ignored."""
    seen: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: seen.append(number)) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def visible_devices(jobs: int = 1) -> list[str]:
    """The name of each GPU, as CUDA_VISIBLE_DEVICES takes it, `jobs` times; or ["cpu"]."""
    if not torch.cuda.is_available():
        return ["cpu"]
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]) * jobs


def thinned(losses: Sequence[dict], steps: int, points: int = 50) -> list[list[float]]:
    """ "train" records -> [step behind it, mean training loss] of `points` equal parts of a run of so many steps, or of
    each step. The part in which the records begin is left out where it is not whole."""
    size = -(-steps // points)
    parts = [list(part) for _, part in itertools.groupby(losses, lambda r: r["step"] // size)]
    if parts and parts[0][0]["step"] % size:
        del parts[0]
    return [[part[-1]["step"] + 1, round(statistics.fmean(r["loss"] for r in part), 5)] for part in parts]
