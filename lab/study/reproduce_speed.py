"""Figure 6 and Tables 6, 7: speed of linear layers, and time by operation, as lab.measure times them."""

import subprocess
import sys
from pathlib import Path

import torch

from lab import ROOT
from lab.measure import bench_linear
from lab.predict import measured, step_time
from lab.predict.machines import MACHINES
from lab.study.reproduce_common import Context, Outcome
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError


def benchmark(path: str | Path, name: str) -> tuple[list[dict], dict]:
    """(records, environment) of a file that this benchmark wrote. Raises UserError."""
    part = next((part for part in measured.read(path) if part["benchmark"] == name), {"records": []})
    if not part["records"]:
        raise UserError(f"{path} has no results of {name}; give its JSON file")
    return part["records"], part["environment"]


def run_benchmark(context: Context, name: str, flags: list[str]) -> list[dict]:
    """The records of a benchmark, run in a process of its own. Raises UserError."""
    path = context.folder / f"{name}.json"
    command = [sys.executable, "-m", f"lab.measure.{name}", f"--json={path}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{name} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return benchmark(path, name)[0]


# ----------------------------------------------------------------------------------------------------------------------
# Figure 6, Table 6: speed of linear layers


def fig6(context: Context) -> Outcome:
    records, environment, rows, numbers = None, None, [], {}
    if context.args.results:
        records, environment = benchmark(context.args.results, "bench_linear")
    on_gpu = bool(records) or (torch.cuda.is_available() and not context.quick)
    models, passes = context.args.models or ("800M,3B,7B" if on_gpu else "800M,3B,7B,22B"), "forward+backward"
    if on_gpu:
        gpu = environment["gpu"] if environment else torch.cuda.get_device_name()
        flags = [f"--models={models}", f"--passes={passes}"]
        numbers[gpu] = records or context.piece(
            "fig6", {"models": models, "machine": gpu}, lambda: run_benchmark(context, "bench_linear", flags)
        )
    for machine in () if on_gpu else ("rtx5090", "h200"):
        of = models.split(","), ["bf16", *bench_linear.METHODS], step_time.TOKENS, [passes]
        numbers[f"predicted, {machine}"] = bench_linear.predict(MACHINES[machine], *of)
    for label, found in numbers.items():
        for r in found:
            if r["pass"] == passes and r["method"] != "bf16" and r["ratio"]:
                paper = "up to 4.2 (RTX 5090)" if r["method"] == "clover" else "-"
                where = label if r["mode"] in ("predicted", "eager") else f"{label}, {r['mode']}"
                rows.append([where, r["model"], r["method"], paper, round(1 / r["ratio"], 2), round(r["ms"], 2)])
    notes = ["the paper: more than 4x over BF16, and about 70% more than Quartet's kernels, on an RTX 5090"]
    counts = "PREDICTIONS from byte, instruction and FLOP counts (lab.measure.bench_linear --roofline), no measurement"
    notes += [] if on_gpu else [counts]
    header = ["machine", "model", "method", "paper, x", "here, x BF16", "ms"]
    title = "Figure 6, Table 6: speed of the linear layers of Llama-like models, forward + backward"
    what = "8 x 2048 tokens, the paper's Table 6 shapes"
    return Outcome(title, header, rows, notes, numbers, None, what, environment)


# ----------------------------------------------------------------------------------------------------------------------
# Table 7: time by operation

# kind of work as lab.measure.bench_train names it: (forward, backward), percent of the pass; the paper's Table 7, whose
# rows of one kind are added up: LM head and loss; grad quant. and act. requant.
TABLE_7 = {
    "GEMM": (24, 19),
    "attention": (21, 18),
    "LM head and loss": (18, 13),
    "quantize": (8, None),
    "rotate and quantize": (None, 21),
    "abs-max": (5, None),
    "ReLU^2": (7, 4),
    "RMSNorm": (6, 7),
    "gradient accumulation": (None, 3),
}


def table7(context: Context) -> Outcome:
    path = context.args.results
    stored, environment = benchmark(path, "bench_train") if path else (None, None)
    on_gpu = bool(stored) or (torch.cuda.is_available() and not context.quick)
    flags = ["--depth=26", "--methods=clover", "--total-batch-size=524288"]
    if not on_gpu:
        small = "--seq-len=64 --vocab-size=256 --total-batch-size=128 --micro-batch=2 --rounds=1 --calls=1"
        flags = ["--depth=2", "--methods=clover", "--head-dim=64", *small.split()]
    settings = {"flags": flags, "gpu": environment_info()["gpu"]}
    records = stored or context.piece("table7", settings, lambda: run_benchmark(context, "bench_train", flags))
    timed = [r for r in records if "phase" in r and r["variant"].split(",")[0] == "clover"]  # maybe in several sizes
    if not timed:
        raise UserError(f"{path} has no times by operation of clover; run bench_train with clover and --table7")
    ms = {(r["phase"], r["kind"]): r["ms"] for r in timed if r["variant"] == timed[0]["variant"]}
    sums = {phase: sum(v for (p, _), v in ms.items() if p == phase) for phase in ("forward", "backward")}
    rows = []
    for kind in (*TABLE_7, *sorted({k for p, k in ms if p in sums} - set(TABLE_7))):
        shares = [f"{100 * ms.get((p, kind), 0.0) / sums[p]:.0f}" for p in sums]
        forward, backward = TABLE_7.get(kind, (None, None))
        rows.append([kind, forward or "-", shares[0], backward or "-", shares[1]])
    title = "Table 7: time by operation, clover, % of the pass (paper: 1.1B parameters on an RTX 5090)"
    header = ["operation", "forward, paper", "here", "backward, paper", "here"]
    notes = [f"forward {sums['forward']:.1f} ms, backward {sums['backward']:.1f} ms a micro-batch"]
    what = "d26, micro-batch as large as fits" if on_gpu else "a model of two layers: a check of the command"
    return Outcome(title, header, rows, notes, {"records": records}, None, what, environment)
