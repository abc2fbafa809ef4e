"""The runs that are kept: one row a run in lab/results/runs.parquet, their losses on the way in curves.parquet.

    python -m lab.runs                              # the studies: text, sizes, runs, methods, card, commits
    python -m lab.runs add results/d8_mixed.json    # a sweep's file becomes a study, or replaces the one of its name

A study is what one sweep trained. Columns of runs.parquet:

    study, label           the sweep's name, and what the sweep calls the run
    method, flags          the row of the method table that the run begins with; all its flags of base_train
    size, seed             as lab.study.sweep takes them
    text, val_text         name and data_key of the text; the hash of its validation shard, empty where it is not known
    eval_tokens            how many tokens of it are evaluated
    tokenizer, vocab_size  a hash, empty where the run stored none, and the number of tokens
    steps, tokens, num_params
    work_4, work_8, work_16   shares of the GEMM work by bits; their sum is above 1 with second terms
    val_bpb, val_bpb_bf16  bits per byte at the end, evaluated with the run's own forward and without quantization
    val_bpb_one_term       the same in plain NVFP4, of a run that ends in two terms; null where it was not measured
    forwards               bits per byte of the last weights in the forwards of other methods (lab.study.forwards)
    train_loss             mean of the last twentieth of the steps, in nats a token
    card, cards, torch, commit, backend

curves.parquet repeats study, label, size and seed. "validation" points are bits per byte with both forwards at a step,
"training" points the mean loss of the steps since the point before, in nats a token.

Seconds are not kept: the runs of a sweep share their card, so a run's seconds say nothing about its method.
"""

import fnmatch
import io
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lab import RESULTS
from nanochat_fp4.common import print0
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, one_line, run_main
from nanochat_fp4.files import atomic_write

# Studies that tables take together: of one text and one length, other methods or seeds.
GROUPS = {
    "d6_stored": ("d6_frontier", "d6_160m_baselines", "d6_controls", "d6_fresh", "d6_work"),
    "d6_shuffled": ("d6_forwards_s1", "d6_forwards_s2", "d6_forwards_s3"),
    "d4_shuffled": tuple(f"d4_forwards_s{seed}" for seed in range(1, 6)),
}

RUNS, CURVES = RESULTS / "runs.parquet", RESULTS / "curves.parquet"

TEXT, WHOLE, REAL = pa.string(), pa.int64(), pa.float64()
KEY = [("study", TEXT), ("label", TEXT), ("size", TEXT), ("seed", WHOLE)]
RUN_SCHEMA = pa.schema(
    [
        *KEY,
        ("method", TEXT), ("flags", pa.list_(TEXT)),
        ("text", TEXT), ("val_text", TEXT), ("eval_tokens", WHOLE), ("tokenizer", TEXT), ("vocab_size", WHOLE),
        ("steps", WHOLE), ("tokens", WHOLE), ("num_params", WHOLE),
        ("work_4", REAL), ("work_8", REAL), ("work_16", REAL),
        ("val_bpb", REAL), ("val_bpb_bf16", REAL), ("val_bpb_one_term", REAL),
        ("forwards", pa.map_(TEXT, REAL)), ("train_loss", REAL),
        ("card", TEXT), ("cards", WHOLE), ("torch", TEXT), ("commit", TEXT), ("backend", TEXT),
    ]
)  # fmt: skip
CURVE_SCHEMA = pa.schema([*KEY, ("text", TEXT), ("step", WHOLE), ("loss", REAL), ("loss_bf16", REAL)])

# Fields that every table needs.
NEEDED = {
    "method": str, "size": str, "seed": int, "flags": list, "steps": int, "tokens": int,
    "val_bpb": float, "val_bpb_bf16": float, "gemm_work": dict,
}  # fmt: skip


def check_run(run: dict) -> None:
    """Raises ValueError, KeyError or TypeError if a field of a run is missing or wrong."""
    for name, kind in NEEDED.items():
        value = run[name]
        if not isinstance(value, (int, float) if kind is float else kind):
            raise TypeError(f"{name} is {value!r}, expected {kind.__name__}")
        if kind in (int, float) and name != "seed" and not 0 < value < math.inf:
            raise ValueError(f"{name} is {value!r}, expected a positive number")


# ----------------------------------------------------------------------------------------------------------------------
# A study as rows, and back


def rows_of(study: str, content: dict[str, Any]) -> tuple[list[dict], list[dict]]:
    """(rows of runs.parquet, rows of curves.parquet) of the content of a sweep's file."""
    environment, runs, points = content["environment"], [], []
    for r in content["results"]:
        key = {"study": study, "label": r["method"], "size": r["size"], "seed": r["seed"]}
        begins = [flag.partition("=")[2] for flag in r["flags"] if flag.startswith("--method=")]
        row = {name: r.get(name) for name in RUN_SCHEMA.names} | key
        row |= {"method": begins[-1] if begins else r["method"], "text": content["data"]}
        row |= {f"work_{bits}": share for bits, share in r["gemm_work"].items()}
        row |= {"forwards": list(r.get("forwards", {}).items()), "tokenizer": r.get("tokenizer") or ""}
        row |= {"val_text": r.get("val_text") or ""}
        row |= {"card": environment["gpu"] or environment["cpu"], "cards": environment["gpu_count"]}
        row |= {"torch": environment["torch"], "commit": environment.get("commit") or ""}
        runs.append(row)
        for step, own, bf16 in r["curve"]:
            points.append(key | {"text": "validation", "step": step, "loss": own, "loss_bf16": bf16})
        for step, loss in r.get("loss_curve", ()):
            points.append(key | {"text": "training", "step": step, "loss": loss, "loss_bf16": None})
    return runs, points


def read(path: Path, studies: Iterable[str]) -> list[dict]:
    """Rows of some studies, in the order of the file."""
    return pq.read_table(path, filters=[("study", "in", list(studies))]).to_pylist()


def study(name: str) -> dict[str, Any]:
    """A study as the sweep's file had it: "data", "environment" and "results". Raises UserError for an unknown name."""
    rows = read(RUNS, [name])
    if not rows:
        raise UserError(f"no study is named {name!r}; python -m lab.runs lists them")
    curves: dict[tuple, dict[str, list]] = {}
    for p in read(CURVES, [name]):
        of = curves.setdefault((p["label"], p["size"], p["seed"]), {"validation": [], "training": []})
        values = (p["loss"], p["loss_bf16"]) if p["text"] == "validation" else (p["loss"],)
        of[p["text"]].append([p["step"], *values])
    results = []
    for r in rows:
        run = {k: v for k, v in r.items() if v is not None and k not in ("label", "work_4", "work_8", "work_16")}
        run |= {"method": r["label"], "gemm_work": {bits: r[f"work_{bits}"] for bits in ("4", "8", "16")}}
        points = curves.get((r["label"], r["size"], r["seed"]), {"validation": [], "training": []})
        run |= {"curve": points["validation"], "loss_curve": points["training"], "forwards": dict(r["forwards"])}
        results.append(run)
    first = rows[0]
    gpu = first["card"] if first["cards"] else None
    environment = {"gpu": gpu, "gpu_count": first["cards"], "cpu": first["card"], "torch": first["torch"]}
    environment["commit"] = first["commit"]
    return {"name": name, "data": first["text"], "environment": environment, "results": results}


def names_of(text: str) -> list[str]:
    """The studies and files in a value of --results: names with commas, a group's, or patterns such as ladder_*."""
    known, found = studies() if "*" in text else [], []
    for part in filter(None, text.split(",")):
        found += fnmatch.filter(known, part) if "*" in part else GROUPS.get(part, (part,))
    return found


def stored(name: str) -> dict[str, Any]:
    """A study of runs.parquet, or a sweep's file where the name is a path. Raises UserError."""
    if not name.endswith(".json") and "/" not in name:
        return study(name)
    try:
        content = json.loads(Path(name).read_text())
        for run in content["results"]:
            check_run(run)
        if content["results"] and content["data"]:
            _ = [content["environment"][key] for key in ("gpu", "gpu_count", "torch")]  # for the line below a table
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        problem = f"{name} is not a file of lab.study.sweep ({type(e).__name__}: {one_line(e)[:80]})"
        raise UserError(f"{problem}; give <folder>/<name>.json of a sweep, or a study of python -m lab.runs") from None
    if not content["results"] or not content["data"]:
        raise UserError(f"{name} holds no results; run its sweep first")
    runs = Counter((r["method"], r["size"], r["seed"]) for r in content["results"])
    (method, size, seed), count = runs.most_common(1)[0]
    if count > 1:
        raise UserError(f"{name} has {method} of size {size} and seed {seed} twice; leave one of them out")
    return content


# ----------------------------------------------------------------------------------------------------------------------
# The command


def studies() -> list[str]:
    """The names of all studies."""
    return sorted(set(pq.read_table(RUNS, columns=["study"])["study"].to_pylist()))


def write(path: Path, schema: pa.Schema, rows: list[dict]) -> None:
    """Writes rows, sorted by study; the runs of a study keep their order."""
    file = io.BytesIO()
    rows = sorted(rows, key=lambda row: row["study"])
    pq.write_table(pa.Table.from_pylist(rows, schema), file, compression="zstd", compression_level=19)
    atomic_write(path, file.getvalue())


def add(files: Iterable[str]) -> None:
    """Puts the runs of sweeps' files into the two tables. Studies of the same names are replaced."""
    contents = {Path(file).stem: stored(file) for file in files}
    for path, schema, i in ((RUNS, RUN_SCHEMA, 0), (CURVES, CURVE_SCHEMA, 1)):
        old = pq.read_table(path).to_pylist() if path.exists() else []
        new = [row for name, content in contents.items() for row in rows_of(name, content)[i]]
        write(path, schema, [row for row in old if row["study"] not in contents] + new)


def listed() -> str:
    """A table of the studies."""
    rows: dict[str, list[dict]] = {}
    for row in pq.read_table(RUNS).to_pylist():
        rows.setdefault(row["study"], []).append(row)
    lines = []
    for name, runs in sorted(rows.items()):
        values = {k: list(dict.fromkeys(str(r[k]) for r in runs)) for k in ("text", "size", "seed", "card", "commit")}
        commits = ", ".join(c[:7] for c in values["commit"])
        line = [name, *values["size"], len(runs), len({r["label"] for r in runs}), ", ".join(values["seed"])]
        lines.append([*line, *values["text"], *values["card"], commits or "unknown"])
    return table(["study", "size", "runs", "methods", "seeds", "text", "card", "commit"], lines)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="The runs that this project keeps")
    parser.add_argument("what", nargs="?", choices=("list", "add"), default="list")
    parser.add_argument("files", nargs="*", help="add: JSON files of lab.study.sweep")
    args = parser.parse_args(argv)
    if bool(args.files) != (args.what == "add"):
        raise UserError("python -m lab.runs lists the studies, python -m lab.runs add FILE.json ... adds some")
    if args.files:
        add(args.files)
    print0(listed())


if __name__ == "__main__":
    run_main(main)
