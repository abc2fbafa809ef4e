"""The results of a sweep: the table, the differences from the paper's runs, and the check of stored files."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from lab.study.statistics import difference, gap
from lab.study.sweep_runs import data_key, flag_values
from nanochat_fp4.errors import UserError, one_line


def summary(results: Sequence[dict], methods: Sequence[str], sizes: Sequence[str]):
    """(header, rows) of the table: BPB, gap to bf16 and paired difference to clover."""
    header = ["size", "method", "seeds", "val BPB", "gap to bf16, %", "BF16 fwd", "minus clover", "minutes"]
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
                (gap(results, size, method), method == "bf16"),
                (gap(results, size, method, "val_bpb_bf16"), method == "bf16"),
                (difference(results, size, method, "clover"), method == "clover"),
            ):
                row.append("-" if missing or not value.n else str(value))
            rows.append([*row, f"{minutes:.1f}"])
    return header, rows


def other_lengths(results: Sequence[dict], size: str) -> str:
    """A note with the methods whose number of steps is not bf16's, or ""."""
    steps = {r["method"]: r["steps"] for r in results if r["size"] == size}
    usual = steps.get("bf16")
    others = [f"{method} {n:,}" for method, n in steps.items() if usual and n != usual]
    said = f"of other lengths than bf16's {usual:,} steps, compared with it at their ends: " if others else ""
    return said + ", ".join(others)


def data_name(data_dir: str) -> str:
    """The name of a text in tables: the folder's name and data_key."""
    return f"{Path(data_dir).name} ({data_key(data_dir)})"


# The paper's runs by its published code and nanochat's speedrun: text, name of its folder here, vocabulary, flags of
# base_train. A micro-batch shares a tensor_scale. The micro-batch of the nanochat runs is not published.
PAPER_RUNS = {
    "llama": ("C4", "c4_", 32_000, {"total-batch-size": 262144, "max-seq-len": 512, "device-batch-size": 128}),
    "nanochat": (
        "FineWeb-Edu", "base_data", 65_536, {"total-batch-size": 524288, "max-seq-len": 2048, "window-pattern": "SSSL"}
    ),
}  # fmt: skip


def difference_from_paper(result: dict, data: str) -> str:
    """The differences from the paper's run of the same kind of model, in words. data: data_name of the text."""
    text, folder, vocabulary, wanted = PAPER_RUNS["llama" if result["size"].startswith("llama-") else "nanochat"]
    flags = flag_values(result["flags"])
    said = [] if data.startswith(folder) else [f"text {data.rpartition(' (')[0]}, not {text}"]
    if (size := result.get("vocab_size")) is not None and size != vocabulary:
        said.append(f"vocabulary {size:,}, not {vocabulary:,}")
    defaults = {"device-batch-size": "32", "window-pattern": "SSSL"}
    for name, value in wanted.items():
        if (mine := flags.get(name, defaults.get(name))) != str(value):
            said.append(f"{name} {mine}, not {value}")
    return "; ".join(said)


# The cost of a multiply-add by bits, over one in 4 bits. These are the rates of a B200's tensor cores.
COST = {"4": 1.0, "8": 2.0, "16": 4.0}

# Fields that every table needs.
NEEDED = {
    "method": str, "size": str, "seed": int, "flags": list, "steps": int, "tokens": int,
    "val_bpb": float, "val_bpb_bf16": float, "gemm_work": dict, "training_seconds": float,
}  # fmt: skip


def check_run(run: dict) -> None:
    """Raises ValueError, KeyError or TypeError if a field of a run is missing or wrong."""
    for name, kind in NEEDED.items():
        value = run[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(f"{name} is {value!r}, expected {kind.__name__}")
        if kind in (int, float) and name != "seed" and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, expected a positive number")


def stored(path: str | Path) -> dict:
    """A file of sweep.report. It has at least "data", "environment" and "results". Raises UserError."""
    try:
        content = json.loads(Path(path).read_text())
        for run in content["results"]:
            check_run(run)
        if content["results"] and content["data"]:
            itemgetter("gpu", "gpu_count", "torch")(content["environment"])  # for the line below a table
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        problem = f"{path} is not a file of lab.study.sweep ({type(e).__name__}: {one_line(e)[:80]})"
        raise UserError(f"{problem}; give <folder>/<name>.json of a sweep") from None
    if not content["results"] or not content["data"]:
        raise UserError(f"{path} holds no results; run its sweep first")
    runs = Counter((r["method"], r["size"], r["seed"]) for r in content["results"])
    (method, size, seed), count = runs.most_common(1)[0]
    if count > 1:
        raise UserError(f"{path} has {method} of size {size} and seed {seed} twice; leave one of them out")
    return content
