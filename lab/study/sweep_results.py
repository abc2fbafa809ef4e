"""Summarizes the results of a sweep: a table, and the differences from the paper's runs."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from lab.statistics import by_seed, difference, gap
from lab.study.sweep_runs import data_key, flag_values

# The line below the table of a sweep.
LEGEND = (
    "val BPB: the mean of the seeds that all methods have; gap to bf16: with the run's own forward; BF16 fwd: the gap "
    "of the same weights without quantization; minus clover: in points. All are paired by seed, with 95% intervals "
    "from two seeds on"
)


def summary(results: Sequence[dict], methods: Sequence[str], sizes: Sequence[str]):
    """Returns (header, rows) of the table, with the bits per byte, the gap to bf16 and the difference to clover, both
    paired by seed. The bits per byte are of the seeds that all rows of a size have, which are named while a row has
    others, and "-" while there are none: means over different seeds would compare seeds, not methods."""
    header = ["size", "method", "seeds", "val BPB", "gap to bf16, %", "BF16 fwd", "minus clover"]
    rows = []
    for size in sizes:
        of = {method: by_seed(results, size, method) for method in methods}
        known = [set(bpb) for bpb in of.values() if bpb]
        common = set.intersection(*known) if known else set()
        for method, bpb in of.items():
            if not bpb:
                continue
            mean = f"{statistics.fmean(bpb[seed] for seed in common):.4f}" if common else "-"
            if common and common != {*bpb}:
                mean += f" (seed{'s' * (len(common) > 1)} {', '.join(map(str, sorted(common)))})"
            row = [size, method, len(bpb), mean]
            for value, missing in (
                (gap(results, size, method), method == "bf16"),
                (gap(results, size, method, "val_bpb_bf16"), method == "bf16"),
                (difference(results, size, method, "clover"), method == "clover"),
            ):
                row.append("-" if missing or not value.n else str(value))
            rows.append(row)
    return header, rows


def other_lengths(results: Sequence[dict], size: str) -> str:
    """Returns a note that names the methods whose number of steps is not bf16's, or ""."""
    steps = {r["method"]: r["steps"] for r in results if r["size"] == size}
    usual = steps.get("bf16")
    others = [f"{method} {n:,}" for method, n in steps.items() if usual and n != usual]
    said = f"of other lengths than bf16's {usual:,} steps, compared with it at their ends: " if others else ""
    return said + ", ".join(others)


def evaluated_on(results: Sequence[dict]) -> str:
    """Says on how many tokens of the validation text runs are evaluated."""
    tokens = sorted({r["eval_tokens"] for r in results if r.get("eval_tokens")})
    return f"evaluated on {'/'.join(f'{t:,}' for t in tokens) or 'an unknown number'}"


def of_one_seed(results: Sequence[dict], size: str) -> str:
    """Returns a note that names the methods of one seed, whose gaps have no interval, or ""."""
    mine = [r for r in results if r["size"] == size]
    single = [m for m in dict.fromkeys(r["method"] for r in mine) if m != "bf16" and gap(mine, size, m).n == 1]
    said = f"{size}: nothing is ranked, for there is one seed and no interval, {evaluated_on(mine)} tokens: "
    return said + ", ".join(single) if single else ""


def data_name(data_dir: str) -> str:
    """Returns the name of a text in tables: the name of its folder, and its data_key."""
    return f"{Path(data_dir).name} ({data_key(data_dir)})"


# The paper's runs, by its published code and nanochat's speedrun: the text, the beginning of its folder's name here,
# the size of the vocabulary, and flags of base_train. The micro-batch is among them, because its rows share a
# tensor_scale. The micro-batch of the paper's nanochat runs is not published.
PAPER_RUNS = {
    "llama": ("C4", "c4_", 32_000, {"total-batch-size": 262144, "max-seq-len": 512, "device-batch-size": 128}),
    "nanochat": (
        "FineWeb-Edu", "base_data", 65_536, {"total-batch-size": 524288, "max-seq-len": 2048, "window-pattern": "SSSL"}
    ),
}  # fmt: skip


def difference_from_paper(result: dict, data: str) -> str:
    """Returns the differences from the paper's run of the same kind of model, in words. `data` is the data_name of the
    text."""
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
