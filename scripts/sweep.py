"""Trains methods x sizes x seeds with scripts.base_train and compares them, with error bars.

    python -m scripts.sweep --methods bf16,nvidia,clover --sizes d6,d8 --seeds 3 --tokens 100M --data-dir folder
    python -m scripts.sweep ... the same again          # goes on where it was interrupted; what is done is skipped

One process for each GPU takes run after run; without a GPU one after another in this process. Within a seed all
methods have the same initialization and the same data in the same order, so that differences are paired; with
--bf16-until they also have the first part of the training in common, that of the seed's BF16 run, and scatter far
less. With --share-until 0.7, methods that compute the same up to 70% of the steps and differ later train that part
once. A run that is done is one small JSON file, <folder>/runs/<size>_<method>_s<seed>_<key>.json, with its validation
curve; the key stands for all its flags and the text, so that sweeps of one folder share runs. The table is printed
again after every run, and written with all numbers to <folder>/<name>.json and .md; scripts.reproduce --results makes
its tables and plots of it.

--sizes: d<depth> is a nanochat of that depth, llama-30M to llama-200M the family of the paper's Tables 3 and 4, tiny a
model for a CPU. --methods: names of nf.METHODS, nf.ABLATIONS or VARIANTS, or --variant "label: flags of base_train".
"""

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
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

import nanochat_fp4 as nf
from nanochat_fp4 import llama
from nanochat_fp4.checkpoint_manager import list_steps
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import format_seconds
from nanochat_fp4.dataset import build_embedded_corpus, ensure_data
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, one_line, run_main
from nanochat_fp4.files import atomic_write
from nanochat_fp4.metrics import read_jsonl
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.nvfp4.recipes import Recipe
from scripts import tok_train
from scripts.bench_common import table

ROOT = Path(__file__).resolve().parent.parent

# Names of the layers of one kind, in both families of models.
LAYER_KINDS = {"qkv": "*.attn.c_[qkv]", "out": "*.attn.c_proj", "up": "*.mlp.c_[fg]*", "down": "*.mlp.c_proj"}


def changed(method: str, layers: str = "", phases: str = "", *more: str) -> tuple[str, ...]:
    """Flags of base_train for a method with changes between layers and in time (nanochat_fp4/nvfp4/plan.py)."""
    flags = [f"--method={method}", f"--layer-methods={layers}" if layers else "", *more]
    return tuple(f for f in [*flags, f"--method-phases={phases}" if phases else ""] if f)


# What can be trained besides the rows of the method table: label -> flags of base_train. What a remedy costs is the
# share of the GEMM work that is not in 4 bits, or that is done on top of it; base_train prints it, and the results have
# it.
VARIANTS: dict[str, tuple[str, ...]] = {
    "clover_late_bf16": changed("clover", phases="0.85=bf16"),
    "clover_late_forward": changed("clover", phases="0.85=fig1e_ms_eden"),  # that row quantizes the backward alone
    "clover_late_backward": changed("clover", phases="0.85=fig2_1x16_four_over_six"),  # and that one the forward
    "clover_late_fp8": changed("clover", phases="0.7=clover_fp8_forward"),  # a tenth of the GEMM work in 8 bits
    "clover_late_refined_bf16": changed("clover", phases="0.7=clover_refined,0.85=bf16"),  # clover_late, ending in BF16
    "clover_feedback_late_bf16": changed("clover_feedback", phases="0.85=bf16"),
    "clover_late_refined": changed("clover", phases="0.85=clover_refined"),  # clover_late changes at 0.7
    "clover_warmup": changed("bf16", phases="0.1=clover"),
    "clover_up_fp8": changed("clover", f"{LAYER_KINDS['up']}=clover_fp8_forward"),
    "clover_qkv_fp8": changed("clover", f"{LAYER_KINDS['qkv']}=clover_fp8_forward"),
    "clover_up_bf16": changed("clover", f"{LAYER_KINDS['up']}=fig1e_ms_eden"),
    "clover_rates_up": changed("clover", "", "", "--matrix-lr=0.025"),  # nanochat's is 0.02
    "clover_rates_down": changed("clover", "", "", "--matrix-lr=0.016"),
    "clover_less_decay": changed("clover", "", "", "--weight-decay=0.1"),  # nanochat's is 0.2
    # (nanochat_fp4/nvfp4/oscillation.py)
    "clover_reset": changed("clover", "", "", "--oscillation=reset"),
    "nvidia_late_forward": changed("nvidia", phases="0.82=fig1d_sr"),  # NVIDIA's 18%, with SR in the backward
    # TetraJet-v2 in full: methods.py says how its OutControl differs from the authors'. OsciReset as in their smallest
    # run, 12,505 steps: from step 8,000 on, every 200 steps, after a window of 50, as fractions of the steps; a shorter
    # run has as many resets, in shorter windows. At the end of a period, not at the beginning; ratio > 8, not >= 8.
    "tetrajet_v2_full": changed("tetrajet_v2_outcontrol", "", "", "--oscillation=reset:0.016:0.004:0.64"),
}


def parse_number(text: str) -> int:
    """'100M' -> 100,000,000; K, M and B. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not match:
        raise UserError(f"{text!r} is not a number of tokens; write for example 100M")
    return round(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2]])


def size_flags(size: str) -> list[str]:
    """Flags of base_train that make a model of that size, its batch and its sequence length. Raises UserError."""
    if match := re.fullmatch(r"d(\d+)", size):
        shape = [f"--depth={match[1]}", "--max-seq-len=1024", "--window-pattern=L", "--total-batch-size=65536"]
        return [*shape, "--eval-tokens=2097152"]
    if size.startswith("llama-"):  # Table 4: sequences of 512, 512 of them a step
        name = size.removeprefix("llama-")
        llama.config_from_size(name, vocab_size=1)
        shape = [f"--llama={name}", "--max-seq-len=512", "--total-batch-size=262144"]
        return [*shape, "--eval-tokens=2097152"]
    if size == "tiny":  # two layers of width 128, the smallest whose every GEMM can be rotated in groups of 128
        return (
            "--depth=2 --aspect-ratio=64 --head-dim=64 --max-seq-len=64 --window-pattern=L --device-batch-size=8 "
            "--total-batch-size=512 --matrix-lr=0.32 --embedding-lr=4.8 --unembedding-lr=0.064 --eval-tokens=2048"
        ).split()
    raise UserError(f"unknown size {size!r}; use d<depth>, llama-30M, llama-50M, llama-100M, llama-200M or tiny")


def method_flags(method: str) -> tuple[str, ...]:
    """Flags of base_train for a method, a variant or "label: flags". Raises UserError."""
    if ":" in method:
        return tuple(method.partition(":")[2].split())
    if method in VARIANTS:
        return VARIANTS[method]
    try:
        nf.get_recipe(method)
    except ValueError as e:
        raise UserError(f"{e}; or a variant: {', '.join(VARIANTS)}; or --variant") from None
    return (f"--method={method}",)


def begins_late(flags: tuple[str, ...], fraction: float) -> bool:
    """Whether a method changes nothing before that fraction of the steps, so that it can branch from a run there."""
    phases = [f.partition("=")[2] for f in flags if f.startswith("--method-phases=")]
    return not fraction or fraction <= min([1.0, *(float(phase.partition("=")[0]) for phase in phases)])


def until(own: tuple[str, ...], fraction: float) -> tuple:
    """What a method computes before that fraction of the steps; two methods with the same are the same run so far."""
    value = {name: v for name, _, v in (flag.partition("=") for flag in own)}
    names = ("--layer-methods", "--method-phases")
    plan = MethodPlan.parse(value.get("--method", "clover"), *(value.get(name, "") for name in names))

    def computation(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, name="", summary="", late=None)

    phases = [(0.0, plan.method), *plan.phases]
    recipes = [(start, computation(recipe)) for start, recipe in phases if start < fraction]
    layers = [(pattern, computation(recipe)) for pattern, recipe in plan.layers]
    others = tuple(flag for flag in own if flag.partition("=")[0] not in ("--method", *names))
    return recipes, [layer for layer in layers if len(recipes) > 1 or layer[1] != recipes[0][1]], others


@dataclass(frozen=True)
class Run:
    """One training run: label of the method, size, seed, all flags of base_train but the tag, and data_key's value."""

    method: str
    size: str
    seed: int
    flags: tuple[str, ...]
    data: str = ""

    @property
    def tag(self) -> str:
        key = hashlib.sha256("\n".join([*self.flags, self.data]).encode()).hexdigest()[:8]
        return f"{self.size}_{self.method}_s{self.seed}_{key}"

    @property
    def branch(self) -> tuple[str, int] | None:
        """(tag of the run, step) whose checkpoint this run begins at."""
        points = [f.partition("=")[2] for f in self.flags if f.startswith("--branch-from=")]
        tag, _, step = points[0].rpartition("@") if points else ("", "", "0")
        return (tag, int(step)) if tag else None


def plan(
    methods: Iterable[str],
    sizes: Iterable[str],
    seeds: Iterable[int],
    *,
    tokens: int = 0,
    ratio: float = 0.0,
    extra: Sequence[str] = (),
    data: str = "",
    bf16_until: float = 0.0,
    share_until: float = 0.0,
) -> list[Run]:
    """All runs, seed after seed, so that an interrupted sweep has whole seeds.

    tokens, ratio: how long a run is, in tokens or in tokens per parameter, exactly one of them; extra: flags of
    base_train for all; data: data_key of the text; bf16_until: the fraction of the steps that all runs of a seed have
    in common, those of its BF16 run: they branch from it, and differ in what follows alone; share_until: the fraction
    after which a method may branch from the first one that computes the same up to there. Raises UserError.
    """
    if bool(tokens) == bool(ratio):
        raise UserError("say how long a run is: either --tokens=100M or --ratio=20 (tokens per parameter)")
    for flag, fraction in (("--bf16-until", bf16_until), ("--share-until", share_until)):
        if fraction and not (0 < fraction < 1 and tokens):
            raise UserError(f"{flag}={fraction:g}: expected a fraction of the steps, between 0 and 1, and --tokens")
    if bf16_until and share_until:
        raise UserError("--bf16-until and --share-until exclude each other; leave one of them out")
    runs = []
    for seed in seeds:
        for size in sizes:
            shape = (*size_flags(size), "--core-metric-every=-1", "--sample-every=-1", *extra)
            batch = int([f for f in shape if f.startswith("--total-batch-size=")][-1].partition("=")[2])
            steps = max(1, tokens // batch)
            horizon = f"--num-iterations={steps}" if tokens else f"--target-param-data-ratio={ratio:g}"
            branch: tuple[str, ...] = ()
            if bf16_until:
                at = math.ceil(bf16_until * steps)
                flags = (*shape, horizon, "--method=bf16", f"--save-every={at}", "--keep-last=-1", f"--seed={seed}")
                runs.append(Run("bf16", size, seed, flags, data))
                branch = (f"--branch-from={runs[-1].tag}@{at}",)
            alike = [until(method_flags(m), share_until) if share_until else None for m in methods]
            trunks: dict[int, str] = {}  # index of a method that others branch from -> tag of its run
            for i, (label, own) in enumerate(zip(labels(methods), map(method_flags, methods))):
                if not begins_late(own, bf16_until):
                    raise UserError(f"--bf16-until={bf16_until:g}: {label} changes before that")
                if branch and own == ("--method=bf16",):
                    continue  # the run that the others branch from
                more = branch
                if share_until and alike.count(alike[i]) > 1:
                    at, first = math.ceil(share_until * steps), alike.index(alike[i])
                    more = (
                        (f"--branch-from={trunks[first]}@{at}",)
                        if first < i
                        else (f"--save-every={at}", "--keep-last=-1")
                    )
                flags = (*shape, horizon, *own, *more, f"--seed={seed}")
                runs.append(Run(label, size, seed, flags, data))
                trunks[i] = runs[-1].tag
    return runs


# ----------------------------------------------------------------------------------------------------------------------
# Running


class Interrupted(Exception):
    """A signal asked for a stop; what runs has saved itself (or was killed by a second one)."""


@dataclass
class Sweep:
    """Where the runs of a sweep lie, what they read and what they run on.

    folder: of this sweep, which is also the base directory of its runs; devices: "cpu" (in this process) or names of
    GPUs, one for each run at a time; data_dir: as ensure_data returned it. keep: methods whose checkpoints stay.
    """

    folder: Path
    data_dir: str
    devices: Sequence[str]
    keep: Sequence[str] = ()
    needed: set[str] = field(default_factory=set)  # tags of runs that others branch from

    def result_path(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.tag}.json"

    def result(self, run: Run) -> dict | None:
        """What a run that is done has written, or None. A file that is cut short counts as none."""
        try:
            return json.loads(self.result_path(run).read_text())
        except (OSError, ValueError):
            return None

    def results(self, runs: Iterable[Run]) -> list[dict]:
        return [r for r in map(self.result, runs) if r is not None]

    def arguments(self, run: Run) -> list[str]:
        device = "cpu" if "cpu" in self.devices else "cuda"
        where = [f"--model-tag={run.tag}", f"--data-dir={self.data_dir}", f"--device-type={device}"]
        return [*run.flags, *where, "--resume-from-step=latest"]

    def has_checkpoint(self, tag: str, step: int) -> bool:
        return step in list_steps(self.folder / "base_checkpoints" / tag)

    def finish(self, run: Run, started: float) -> dict | None:
        """The result of a run from its metrics, stored; None where it is not complete."""
        checkpoint = self.folder / "base_checkpoints" / run.tag
        records = read_jsonl(checkpoint / "metrics.jsonl") if (checkpoint / "metrics.jsonl").is_file() else []
        starts = [r for r in records if r["event"] == "start"]
        values = [r for r in records if r["event"] == "val"]
        if not starts or not values or values[-1]["step"] != starts[-1]["num_iterations"]:
            return None
        start, losses = starts[-1], [r for r in records if r["event"] == "train"]
        seconds = sum(r["dt"] for r in losses)
        result = {
            "method": run.method,
            "size": run.size,
            "seed": run.seed,
            "flags": list(run.flags),
            "val_bpb": values[-1]["bpb"],
            "val_bpb_bf16": values[-1]["bpb_bf16"],
            "curve": [[r["step"], r["bpb"], r["bpb_bf16"]] for r in values],
            "loss_curve": thinned(losses, start["num_iterations"]),
            "train_loss": statistics.fmean(r["loss"] for r in losses[-max(1, len(losses) // 20) :]),
            "steps": start["num_iterations"],
            "tokens": start["num_iterations"] * start["total_batch_size"],
            "num_params": start["num_params"],
            "eval_tokens": values[-1]["tokens"],
            "training_seconds": seconds,
            "wall_seconds": time.monotonic() - started,
            "gemm_work": start["gemm_work"],
            "backend": start["backend"],
            "environment": start["environment"],
        }
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
        failed, threads = [], torch.get_num_threads()
        torch.set_num_threads(1)  # what fits a CPU is too small for more
        try:
            for run in waiting:
                failed += self._one_here(run)
                progress()
        finally:
            torch.set_num_threads(threads)
        return failed

    def _one_here(self, run: Run) -> list[str]:
        from scripts import base_train

        started, log, problem = time.monotonic(), self.log_path(run), ""
        with open(log, "a") as f, base_directory(self.folder):
            try:
                with contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
                    base_train.main(self.arguments(run))
            except (UserError, ValueError) as e:
                problem = one_line(e)
            except SystemExit as e:  # a signal: the run has saved itself
                raise Interrupted(e.code) from None
        done = self.finish(run, started)
        return [] if done else [f"{run.tag} ({problem or 'it ended early'}; see {log})"]

    def _on_gpus(self, waiting: Sequence[Run], progress) -> list[str]:
        waiting, failed = list(waiting), []
        running: dict[int, tuple[Run, subprocess.Popen, float]] = {}

        def can_start(run: Run) -> bool:
            """Not while the run that it branches from has not come that far."""
            if not run.branch or self.has_checkpoint(*run.branch):
                return True
            return run.branch[0] not in {r.tag for r in [*waiting, *(r for r, _, _ in running.values())]}

        with caught_signals() as signals:
            while (waiting and not signals) or running:
                for slot, device in enumerate(self.devices):
                    if slot in running or signals:
                        continue
                    if run := next(filter(can_start, waiting), None):
                        waiting.remove(run)
                        running[slot] = (run, self._start(run, device), time.monotonic())
                for _, process, _ in running.values() if signals else ():
                    if process.poll() is None:
                        process.send_signal(signal.SIGTERM if len(signals) == 1 else signal.SIGKILL)
                for slot, (run, process, started) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[slot]
                    if self.finish(run, started) is None and not signals:
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
    """A list that SIGINT and SIGTERM append their number to."""
    seen: list[int] = []
    before = {s: signal.signal(s, lambda number, frame: seen.append(number)) for s in (signal.SIGINT, signal.SIGTERM)}
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


def prepare(folder: Path, data_dir: str | None, vocab_size: int, embedded_mb: float | None = None) -> str:
    """The folder of the data; and a tokenizer in `folder`: the base directory's, or a new one of vocab_size tokens.

    embedded_mb: instead of data_dir, so many MB of the embedded corpus, in `folder`, with a tokenizer of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with base_directory(folder):
        data = build_embedded_corpus(embedded_mb) if embedded_mb else None
    data = str(data or ensure_data(data_dir))
    if (folder / "tokenizer" / "token_bytes.pt").is_file():
        return data
    existing = Path(get_base_dir()) / "tokenizer"
    if not embedded_mb and (existing / "token_bytes.pt").is_file() and folder != Path(get_base_dir()):
        shutil.copytree(existing, folder / "tokenizer", dirs_exist_ok=True)
        return data
    with base_directory(folder):
        tok_train.main([f"--vocab-size={vocab_size or 32768}", f"--data-dir={data}", "--max-chars=200000000"])
    return data


def thinned(losses: Sequence[dict], steps: int, points: int = 50) -> list[list[float]]:
    """ "train" records -> [step behind it, mean training loss] of `points` equal parts of a run of so many steps, or of
    each step. The part in which the records begin is left out where it is not whole."""
    size = -(-steps // points)
    parts = [list(part) for _, part in itertools.groupby(losses, lambda r: r["step"] // size)]
    if parts and parts[0][0]["step"] % size:
        del parts[0]
    return [[part[-1]["step"] + 1, round(statistics.fmean(r["loss"] for r in part), 5)] for part in parts]


def data_key(data_dir: str) -> str:
    """Stands for the text in a folder, wherever it lies: names and sizes of its shards."""
    shards = sorted((p.name, p.stat().st_size) for p in Path(data_dir).glob("*.parquet"))
    return hashlib.sha256(json.dumps(shards).encode()).hexdigest()[:12]


# ----------------------------------------------------------------------------------------------------------------------
# Statistics

# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom (any table); 1.96 beyond.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """The mean of n numbers and half of its 95% interval (Student's t); the half is NaN for a single number."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.2f} ± {self.half:.2f}" if self.n > 1 else f"{self.mean:+.2f}"

    @property
    def decided(self) -> bool:
        """Whether the interval excludes zero."""
        return self.n > 1 and abs(self.mean) > self.half


def estimate(values: Sequence[float]) -> Estimate:
    n = len(values)
    if n < 2:
        return Estimate(values[0] if values else math.nan, math.nan, n)
    t = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    return Estimate(statistics.fmean(values), t * statistics.stdev(values) / n**0.5, n)


def by_seed(results: Iterable[dict], size: str, method: str, value: str = "val_bpb") -> dict[int, float]:
    return {r["seed"]: r[value] for r in results if r["size"] == size and r["method"] == method}


def gap(results: Sequence[dict], size: str, method: str, baseline: str = "bf16", value: str = "val_bpb") -> Estimate:
    """Increase of validation bits per byte over the baseline, percent of the baseline, paired by seed."""
    a, b = by_seed(results, size, method, value), by_seed(results, size, baseline)
    return estimate([100 * (a[s] / b[s] - 1) for s in sorted(a.keys() & b.keys())])


def difference(results: Sequence[dict], size: str, method: str, other: str, baseline: str = "bf16") -> Estimate:
    """Gap of method minus gap of other in percentage points, paired by seed."""
    a, b, base = (by_seed(results, size, m) for m in (method, other, baseline))
    return estimate([100 * (a[s] - b[s]) / base[s] for s in sorted(a.keys() & b.keys() & base.keys())])


def summary(results: Sequence[dict], methods: Sequence[str], sizes: Sequence[str], baseline: str, other: str):
    """(header, rows) of the table: BPB, gap to the baseline and paired difference to another method."""
    header = ["size", "method", "seeds", "val BPB", f"gap to {baseline}, %", "BF16 fwd", f"minus {other}", "minutes"]
    rows = []
    for size in sizes:
        for method in methods:
            mine = [r for r in results if r["size"] == size and r["method"] == method]
            if not mine:
                continue
            bpb = statistics.fmean(r["val_bpb"] for r in mine)
            minutes = statistics.fmean(r["training_seconds"] for r in mine) / 60
            row = [size, method, len(mine), f"{bpb:.4f}"]
            for value, missing in (
                (gap(results, size, method, baseline), method == baseline),
                (gap(results, size, method, baseline, "val_bpb_bf16"), method == baseline),
                (difference(results, size, method, other, baseline), method == other),
            ):
                row.append("-" if missing or not value.n else str(value))
            rows.append([*row, f"{minutes:.1f}"])
    return header, rows


def data_name(data_dir: str) -> str:
    """What a table says of its text: the folder's name, and data_key."""
    return f"{Path(data_dir).name} ({data_key(data_dir)})"


def stored(path: str | Path) -> dict:
    """What `report` wrote: at least "data", "environment" and "results". Raises UserError."""
    try:
        content = json.loads(Path(path).read_text())
        if content["results"] and content["environment"] and content["data"]:
            return content
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is not a file of scripts.sweep ({type(e).__name__}: {one_line(e)[:80]})") from None
    raise UserError(f"{path} holds no results; run its sweep first")


def labels(methods: Iterable[str]) -> list[str]:
    return [m.partition(":")[0].strip() for m in methods]


def report(sweep: Sweep, name: str, runs: Sequence[Run], baseline: str, other: str) -> str:
    """Writes <folder>/<name>.json and .md from what is done; returns the table."""
    results = sweep.results(runs)
    methods, sizes = (list(dict.fromkeys(getattr(r, f) for r in runs)) for f in ("method", "size"))
    header, rows = summary(results, methods, sizes, baseline, other)
    text = table(header, rows)
    content = {
        "name": name,
        "runs": len(runs),
        "done": len(results),
        "data": data_name(sweep.data_dir),
        "environment": environment_info(),
        "table": [header, *rows],
        "gaps": {f"{size} {m}": dataclasses.asdict(gap(results, size, m, baseline)) for size in sizes for m in methods},
        "results": [{k: v for k, v in r.items() if k != "environment"} for r in results],
    }
    runs_text = ",\n".join(json.dumps(r) for r in content["results"])  # a line for each
    lines = [f'"{k}": ' + (f"[\n{runs_text}\n]" if k == "results" else json.dumps(v)) for k, v in content.items()]
    atomic_write(sweep.folder / f"{name}.json", "{\n" + ",\n".join(lines) + "\n}\n")
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)]
    atomic_write(sweep.folder / f"{name}.md", "\n".join(lines) + "\n")
    return text


def run_sweep(
    sweep: Sweep, name: str, runs: Sequence[Run], baseline: str = "bf16", other: str = "clover"
) -> list[dict]:
    """Trains all, printing the table after every run; returns the results. Raises Interrupted, UserError."""
    start, before = time.monotonic(), len(sweep.results(runs))

    def progress() -> None:
        done = len(sweep.results(runs))
        elapsed = time.monotonic() - start
        left = elapsed / max(1, done - before) * (len(runs) - done)
        print0(
            f"\n{name}: {done} of {len(runs)} runs done, {format_seconds(elapsed)}, about {format_seconds(left)} left"
        )
        print0(report(sweep, name, runs, baseline, other), flush=True)

    if before < len(runs):
        print0(
            f"{name}: {len(runs)} runs, {before} of them done before; on {', '.join(sweep.devices)}; in {sweep.folder}"
        )
    try:
        sweep.train(runs, progress)
    finally:
        report(sweep, name, runs, baseline, other)
    return sweep.results(runs)


def stopped(interrupted: Interrupted) -> None:
    """Says how to go on, and exits with the signal's status."""
    print0("stopped; what runs has saved itself. The same command again goes on")
    sys.exit(interrupted.args[0])


def add_sweep_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--sizes", default="", help="d<depth>, llama-<size>, tiny; with commas")
    add("--seeds", type=int, default=3, help="number of seeds")
    add("--first-seed", type=int, default=1, help="the first of them: fresh seeds for what others were chosen on")
    add("--tokens", default="", help="training tokens of a run, for example 100M")
    add("--ratio", type=float, default=0.0, help="instead of --tokens: training tokens per parameter")
    add(
        "--bf16-until", type=float, default=0.0,
        help="branch all runs of a seed from its BF16 run at this fraction of the steps: smaller differences can be "
        "told apart (default: 0, no branches)",
    )  # fmt: skip
    add(
        "--share-until", type=float, default=0.0,
        help="train the part up to this fraction of the steps once for methods that compute the same there "
        "(default: 0, every method from its own beginning)",
    )  # fmt: skip
    add("--data-dir", default=None, help="folder of text or parquet files (default: as for base_train)")
    add("--vocab-size", type=int, default=0, help="of a new tokenizer, where the base directory has none (32768)")
    add("--folder", default="", help="where runs and results go (default: sweeps/ in the base directory)")
    add("--jobs", type=int, default=1, help="runs at the same time on each GPU: small models leave it idle")
    add("--extra", default="", help="further flags of base_train for all runs, in one string")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--name", default="sweep", help="of the table and its files")
    parser.add_argument("--methods", default="bf16,nvidia,four_over_six,tetrajet_v2,clover,clover_search")
    parser.add_argument("--variant", action="append", default=[], help='"label: flags of base_train"; may be repeated')
    parser.add_argument("--baseline", default="bf16")
    parser.add_argument("--other", default="clover", help="the method that the others are compared with")
    parser.add_argument("--keep", default="", help="methods whose checkpoints stay, with commas")
    parser.add_argument("--plan", action="store_true", help="list the runs and stop")
    add_sweep_arguments(parser)
    args = parser.parse_args(argv)
    methods = [*filter(None, args.methods.split(",")), *args.variant]
    sizes = [s for s in args.sizes.split(",") if s]
    if not sizes or not methods or min(args.seeds, args.jobs) < 1:
        raise UserError("--sizes, --methods, --seeds and --jobs must be at least one each")
    length = {"tokens": parse_number(args.tokens) if args.tokens else 0, "ratio": args.ratio}
    options = {"extra": args.extra.split(), "bf16_until": args.bf16_until, "share_until": args.share_until, **length}
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    plan(methods, sizes, seeds, **options)  # bad flags are refused before the data is made
    folder = Path(args.folder) if args.folder else Path(get_base_dir()) / "sweeps"
    data = prepare(folder, args.data_dir, args.vocab_size)
    runs = plan(methods, sizes, seeds, **options, data=data_key(data))
    if args.plan:
        for run in runs:
            print0(run.tag, *run.flags)
        return
    sweep = Sweep(folder, data, visible_devices(args.jobs), args.keep.split(","))
    try:
        results = run_sweep(sweep, args.name, runs, args.baseline, args.other)
    except Interrupted as e:
        stopped(e)
    if len(results) == len(runs):
        print0(f"\n{report(sweep, args.name, runs, args.baseline, args.other)}\nwritten to {folder / args.name}.json")


if __name__ == "__main__":
    run_main(main)
