"""Trains the runs of a sweep: in one process for each GPU, or one after another in this process. Interrupted runs go
on from their checkpoints.

A run is a tag and a list of flags of scripts.base_train. If it branches from
another run, it waits for a checkpoint of that run. A finished run is one JSON file, which is made of its metrics.
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
from lab.study.sweep_runs import Run, computed, flag_values
from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.files import atomic_write
from nanochat_fp4.training.checkpoint_manager import list_steps


class Interrupted(Exception):
    """A signal asked the sweep to stop. The running runs have saved themselves, or were killed by a second signal."""


@dataclass
class Sweep:
    """The folder, the data and the devices of a sweep.

    folder:   the folder of the sweep, which is also the base directory of its runs
    data_dir: the folder of the text, as ensure_data returned it
    devices:  ["cpu"] for this process, or names of GPUs, one for each run at a time
    keep:     the methods whose checkpoints are not deleted
    recipes:  the files of --recipes, which the runs get beside lab/recipes.py
    """

    folder: Path
    data_dir: str
    devices: Sequence[str]
    keep: Sequence[str] = ()
    recipes: str = ""
    needed: set[str] = field(default_factory=set)  # The tags of runs from which others branch.

    def result_path(self, run: Run) -> Path:
        """Returns the path of a run's result."""
        return self.folder / "runs" / f"{run.tag}.json"

    def result(self, run: Run) -> dict | None:
        """Returns the result of a finished run, or None. A file that is damaged, or that is another run's, counts as
        None."""
        try:
            result = json.loads(self.result_path(run).read_text())
            check_run(result)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        own = (result["method"], result["size"], result["seed"]) == (run.method, run.size, run.seed)
        return result if own else None

    def results(self, runs: Iterable[Run]) -> list[dict]:
        """Returns the results of the runs that are finished."""
        return [r for r in map(self.result, runs) if r is not None]

    def arguments(self, run: Run) -> list[str]:
        """Returns the flags of base_train for a run. It resumes from its newest checkpoint if it has one."""
        device = "cpu" if "cpu" in self.devices else "cuda"
        where = [f"--model-tag={run.tag}", f"--data-dir={self.data_dir}", f"--device-type={device}"]
        files = [str(ROOT / "lab/recipes.py"), *filter(None, self.recipes.split(","))]
        recipes = ",".join(map(os.path.abspath, files))  # The processes start in another folder.
        # Tables and plots have a value at each tenth of a run. It trains the same without, so it is not in the tag.
        steps = int(flag_values(run.flags).get("num-iterations", 0))
        often = [f"--eval-every={max(1, steps // 10)}"] * (steps > 0)
        return [*often, *run.flags, *where, f"--recipes={recipes}", "--resume-from-step=latest"]

    def has_checkpoint(self, tag: str, step: int) -> bool:
        """Returns True if the run with this tag has a checkpoint of this step."""
        return step in list_steps(self.folder / "base_checkpoints" / tag)

    def finish(self, run: Run) -> dict | None:
        """Makes the result of a run from its metrics, and stores it. Returns None if the run is not complete, or has no
        finite loss at its end."""
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
            "computed": computed(run.method, run.flags), "commit": start["environment"].get("commit"),
            "val_bpb": last["bpb"], "val_bpb_bf16": last["bpb_bf16"],
            "curve": [[r["step"], r["bpb"], r["bpb_bf16"]] for r in values],
            "loss_curve": thinned(losses, steps),
            "train_loss": statistics.fmean(r["loss"] for r in losses[-max(1, len(losses) // 20) :]),
            "steps": steps, "tokens": steps * start["total_batch_size"], "num_params": start["num_params"],
            "vocab_size": start.get("vocab_size"), "eval_tokens": last["tokens"],
            "tokenizer": start["tokenizer"], "val_text": start["val_text"],
        }  # fmt: skip
        result |= {name: start[name] for name in ("gemm_work", "backend", "environment")}
        result |= {"head": start["head"]} if "head" in start else {}
        self.result_path(run).parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.result_path(run), json.dumps(result, indent=1) + "\n")
        if run.method not in self.keep and run.tag not in self.needed:
            self.delete_checkpoints(run.tag)
        return result

    def delete_checkpoints(self, tag: str) -> None:
        """Deletes the checkpoints of a run, and keeps its metrics."""
        for path in (self.folder / "base_checkpoints" / tag).glob("step_*"):
            shutil.rmtree(path)

    def log_path(self, run: Run) -> Path:
        """Returns the path of a run's log, and makes its folder."""
        path = self.folder / "logs" / f"{run.tag}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def train(self, runs: Sequence[Run], progress=lambda: None) -> None:
        """Trains the runs that are not finished. Raises Interrupted after a signal, and UserError, which names the runs
        that failed."""
        branches = {r.branch for r in runs if r.branch and self.result(r) is None}
        missing = {tag for tag, step in branches if not self.has_checkpoint(tag, step)}
        self.needed |= {tag for tag, _ in branches}
        waiting = [r for r in runs if self.result(r) is None or r.tag in missing]
        failed = self._here(waiting, progress) if "cpu" in self.devices else self._on_gpus(waiting, progress)
        for run in runs:
            if run.tag in self.needed and run.method not in self.keep and not failed:
                self.delete_checkpoints(run.tag)
        if failed:
            mend = "mend the cause, and the same command trains them"
            raise UserError(f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}; {mend}")

    def _here(self, waiting: Sequence[Run], progress) -> list[str]:
        from scripts import base_train

        failed, threads = [], torch.get_num_threads()
        torch.set_num_threads(1)  # Models that a CPU can train are too small for more threads.
        try:
            for run in waiting:
                log, problem = self.log_path(run), "it ended early, or diverged"
                with open(log, "a") as f, base_directory(self.folder):
                    try:
                        with contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
                            base_train.main(self.arguments(run))
                    except (UserError, ValueError) as e:
                        problem = one_line(e)
                    except SystemExit as e:  # There was a signal, and the run has saved itself.
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
            """Returns False while the run from which it branches has not reached the branch."""
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
        with open(self.log_path(run), "a") as f:
            # The run has a session of its own, so that Ctrl-C reaches only this process, which passes it on.
            return subprocess.Popen(
                [sys.executable, "-m", "scripts.base_train", *self.arguments(run)],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=f, stderr=f, start_new_session=True,
            )  # fmt: skip


@contextlib.contextmanager
def base_directory(folder: Path) -> Iterator[None]:
    """Sets NANOCHAT_BASE_DIR in this context."""
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
    """Yields a list to which SIGINT, SIGTERM and SIGHUP append their numbers. A SIGHUP that is ignored (nohup) stays
    ignored."""
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
    """Returns the name of each GPU, in the form of CUDA_VISIBLE_DEVICES, `jobs` times. Without a GPU it is ["cpu"]."""
    if not torch.cuda.is_available():
        return ["cpu"]
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]) * jobs


def thinned(losses: Sequence[dict], steps: int, points: int = 50) -> list[list[float]]:
    """Thins "train" records of a run of so many steps to `points` equal parts. Returns [step at the part's end, mean
    training loss] of each part. A run with fewer steps has a part for each step. The part in which the records begin is
    left out if it is not complete."""
    size = -(-steps // points)
    parts = [list(part) for _, part in itertools.groupby(losses, lambda r: r["step"] // size)]
    if parts and parts[0][0]["step"] % size:
        del parts[0]
    return [[part[-1]["step"] + 1, round(statistics.fmean(r["loss"] for r in part), 5)] for part in parts]
