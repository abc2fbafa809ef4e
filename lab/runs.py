"""Stores the training runs of sweeps. lab/results/runs.parquet has a row for each run, and curves.parquet has the
losses along the runs.

    python -m lab.runs                              # lists the studies (text, sizes, runs, ...) and their groups
    python -m lab.runs d6_mixed                     # lists the runs of a study, a group or a sweep's file
    python -m lab.runs add results/d8_mixed.json    # makes a study of a sweep's file, or replaces the study of its name

A study is the set of runs that one sweep trained. The columns of runs.parquet are:

    study, label           the name of the sweep, and the label of the run in the sweep
    method, flags          the method with which the run begins, and all its flags of base_train
    computed               the key of what the method computes (lab.study.sweep_runs.computed). Labels that compute the
                           same have one key. It is the label if layers have several methods.
    size, seed             the values that lab.study.sweep takes
    text, val_text         the name and data_key of the text; the hash of its validation shard, or "" if it is not known
    eval_tokens            the number of tokens of the validation text that are evaluated
    tokenizer, vocab_size  the tokenizer's hash, or "" if the run stored none; its number of tokens
    steps, tokens, num_params
    work_4, work_8, work_16   shares of the GEMM work by bits. Their sum is above 1 if operands have second terms.
    head                   the precision of the output head, whose GEMMs count as work. It is null for a run that was
                           stored with the work of its blocks alone. Such a run has a BF16 head, or a flag for it.
    val_bpb, val_bpb_bf16  bits per byte at the end, evaluated with the run's own forward and without quantization
    val_bpb_one_term       the same in plain NVFP4, for a run that ends in two terms. It is null if it was not measured.
    forwards               bits per byte of the last weights in the forwards of other methods (lab.study.forwards)
    train_loss             the mean over the last twentieth of the steps, in nats per token
    card, cards, torch, backend
    commit                 the commit of the code that trained the run. The runs of a study may have several.

curves.parquet repeats study, label, size and seed. A "validation" point has the bits per byte with both forwards at a
step. A "training" point has the mean loss of the steps since the point before, in nats per token.

Seconds are not stored. The runs of a sweep share their card, so the seconds of a run say nothing about its method.
"""

import fnmatch
import io
import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from lab import RESULTS, table
from lab.study.sweep_runs import gives_its_tokens, left_code
from nanochat_fp4.cli import ArgumentParser, UserError, did_you_mean, one_line, run_main
from nanochat_fp4.common import add_recipes_argument, print0
from nanochat_fp4.files import atomic_write

# Groups of studies that tables take together. They have one text and one length, and differ in methods or seeds.
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
        ("method", TEXT), ("flags", pa.list_(TEXT)), ("computed", TEXT),
        ("text", TEXT), ("val_text", TEXT), ("eval_tokens", WHOLE), ("tokenizer", TEXT), ("vocab_size", WHOLE),
        ("steps", WHOLE), ("tokens", WHOLE), ("num_params", WHOLE),
        ("work_4", REAL), ("work_8", REAL), ("work_16", REAL), ("head", TEXT),
        ("val_bpb", REAL), ("val_bpb_bf16", REAL), ("val_bpb_one_term", REAL),
        ("forwards", pa.map_(TEXT, REAL)), ("train_loss", REAL),
        ("card", TEXT), ("cards", WHOLE), ("torch", TEXT), ("commit", TEXT), ("backend", TEXT),
    ]
)  # fmt: skip
CURVE_SCHEMA = pa.schema([*KEY, ("text", TEXT), ("step", WHOLE), ("loss", REAL), ("loss_bf16", REAL)])

# The fields of a run that every table needs, and their types.
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
    """Converts the content of a sweep's file. Returns (rows of runs.parquet, rows of curves.parquet)."""
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
        row |= {"torch": environment["torch"], "commit": r.get("commit") or environment.get("commit") or ""}
        runs.append(row)
        for step, own, bf16 in r["curve"]:
            points.append(key | {"text": "validation", "step": step, "loss": own, "loss_bf16": bf16})
        for step, loss in r.get("loss_curve", ()):
            points.append(key | {"text": "training", "step": step, "loss": loss, "loss_bf16": None})
    return runs, points


def read(path: Path, studies: Iterable[str]) -> list[dict]:
    """Returns the rows of some studies, in the order of the file."""
    return pq.read_table(path, filters=[("study", "in", list(studies))]).to_pylist()


def study(name: str) -> dict[str, Any]:
    """Returns a study in the form of a sweep's file, with "data", "environment" and "results". Raises UserError for an
    unknown name."""
    rows = read(RUNS, [name])
    if not rows:
        meant = did_you_mean(name, [*studies(), *GROUPS])
        file = "a sweep of yours is given by the path of its file, which it prints at its end."
        raise UserError(f"no study is named {name!r}; {meant or file} python -m lab.runs lists the studies")
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
    environment["commit"] = ", ".join(dict.fromkeys(shown_commit(r["commit"]) for r in rows))
    return {"name": name, "data": first["text"], "environment": environment, "results": results}


def pooled(contents: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the machines, the releases of torch and the commits of studies, or of parts of bench.json, each as text,
    for the line below a table."""
    machines, versions, commits = [], [], []
    for content in contents:
        of = content["environment"]
        machines.append(f"{of['gpu_count']} x {of['gpu']}" if of["gpu"] else of["cpu"])
        versions.append(of["torch"])
        commits += [shown_commit(r.get("commit") or of.get("commit")) for r in content.get("results", [{}])]
    every = {"machines": machines, "torch": versions, "commit": commits}
    return {name: ", ".join(dict.fromkeys(values)) for name, values in every.items()}


def shown_commit(commit: str | None) -> str:
    """Returns a run's commit, or several, with eight digits each, as git shows them."""
    return re.sub(r"\b([0-9a-f]{8})[0-9a-f]+", r"\1", commit or "not recorded")


def names_of(text: str) -> list[str]:
    """Returns the studies and files that a value of --results names. It holds names separated by commas. A name may be
    that of a group, or a pattern such as ladder_*."""
    known, found = studies() if "*" in text else [], []
    for part in filter(None, text.split(",")):
        found += fnmatch.filter(known, part) if "*" in part else GROUPS.get(part, (part,))
    return found


def stored(name: str) -> dict[str, Any]:
    """Returns a study of runs.parquet, or the content of a sweep's file if the name is a path. Raises UserError if
    there is no such study, and for a file that is damaged, empty or has a run twice."""
    if not name.endswith(".json") and "/" not in name:
        return study(name)
    try:
        content = json.loads(Path(name).read_text())
        for run in content["results"]:
            check_run(run)
        if content["results"] and content["data"]:
            _ = [content["environment"][key] for key in ("gpu", "gpu_count", "torch")]  # The line below a table.
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        why = e.strerror if isinstance(e, OSError) else f"{type(e).__name__}: {one_line(e)[:80]}"
        problem = "is not there" if isinstance(e, FileNotFoundError) else f"is not a file of lab.study.sweep ({why})"
        mend = "give <folder>/<name>.json of a sweep, or a study of python -m lab.runs"
        raise UserError(f"{name} {problem}; {mend}") from None
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
    """Returns the names of all studies, sorted."""
    return sorted(set(pq.read_table(RUNS, columns=["study"])["study"].to_pylist()))


def write(path: Path, schema: pa.Schema, rows: list[dict]) -> None:
    """Writes rows, sorted by study. The runs of a study keep their order."""
    file = io.BytesIO()
    rows = sorted(rows, key=lambda row: row["study"])
    pq.write_table(pa.Table.from_pylist(rows, schema), file, compression="zstd", compression_level=19)
    atomic_write(path, file.getvalue())


def add(files: Iterable[str]) -> None:
    """Adds the runs of sweeps' files to the two tables. Studies with the same names are replaced."""
    contents = {Path(file).stem: stored(file) for file in files}
    for path, schema, i in ((RUNS, RUN_SCHEMA, 0), (CURVES, CURVE_SCHEMA, 1)):
        old = pq.read_table(path).to_pylist() if path.exists() else []
        new = [row for name, content in contents.items() for row in rows_of(name, content)[i]]
        write(path, schema, [row for row in old if row["study"] not in contents] + new)


def listed(names: Iterable[str] = ()) -> str:
    """Returns a table of some studies, or one of all and one of their groups, as text."""
    rows: dict[str, list[dict]] = {}
    for row in read(RUNS, names or studies()):
        rows.setdefault(row["study"], []).append(row)
    lines = []
    for name, runs in sorted(rows.items()):
        values = {k: list(dict.fromkeys(str(r[k]) for r in runs)) for k in ("text", "size", "seed", "card", "commit")}
        commits = ", ".join(map(shown_commit, values["commit"]))
        again = sum(not left_code(r["flags"]) and gives_its_tokens(r) for r in runs)
        line = [name, *values["size"], len(runs), again, len({r["label"] for r in runs}), ", ".join(values["seed"])]
        lines.append([*line, *values["text"], *values["card"], commits])
    header = ["study", "size", "runs", "again", "methods", "seeds", "text", "card", "commit"]
    if names:
        return table(header, lines)
    groups = [[name, ", ".join(of)] for name, of in GROUPS.items()]
    again = "again: the runs that sweep --again can train on their text; docs/texts.md: anyone can make d6_public's"
    again += f". All runs are in {RUNS}"
    return "\n\n".join([table(header, lines), again, table(["group of studies", "which tables take together"], groups)])


def listed_runs(names: str) -> str:
    """Returns a table of the runs of the studies, groups and files that `names` names, as text. Raises UserError."""
    rows = []
    for name in names_of(names):
        content = stored(name)
        for r in content["results"]:
            bits = [f"{r[value]:.4f}" for value in ("val_bpb", "val_bpb_bf16")]
            rows.append([name, r["method"], r["size"], r["seed"], *bits, r.get("head") or "-"])
            rows[-1].append(shown_commit(r.get("commit") or content["environment"].get("commit")))
    header = ["study", "label", "size", "seed", "bits per byte", "BF16 forward", "head", "commit"]
    return f"{table(header, rows)}\n\nhead -: stored without its head, which is in BF16 unless the label says otherwise"


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="The runs that this project keeps")
    text = "list (the default): the studies; add: make studies of FILEs; or studies, groups or files whose runs are "
    parser.add_argument("what", nargs="?", default="list", help=text + "listed, with commas")
    parser.add_argument("files", nargs="*", metavar="FILE", help="for add: JSON files of lab.study.sweep")
    add_recipes_argument(parser)
    args = parser.parse_args(argv)
    if bool(args.files) != (args.what == "add"):
        raise UserError("python -m lab.runs lists the studies, python -m lab.runs add FILE.json ... adds some")
    if args.files:
        add(args.files)
        print0(f"added to {RUNS}:\n\n{listed([Path(file).stem for file in args.files])}")
        return
    print0(listed() if args.what == "list" else listed_runs(args.what))


if __name__ == "__main__":
    run_main(main)
