"""The leaderboard: what runs took to reach a stated loss on a stated text.

    python -m lab.record BASE/base_checkpoints/d2_clover --to 2.6              # a finished run's folder
    python -m lab.record docs/results/d6_fresh.json --to 1.27 --seed 3         # the whole runs of a sweep
    python -m lab.record --table                                               # docs/leaderboard.md

A record is docs/records/<name>.json, beside it the log of losses and seconds. A folder whose log and checkpoint
disagree is refused. The place where a run reaches the loss is interpolated between two validations.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab import ROOT
from lab.study.sweep_results import stored
from nanochat_fp4.console import ArgumentParser, format_seconds, parse_finite
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.evaluation.report import gpu_dollars
from nanochat_fp4.files import atomic_write
from nanochat_fp4.training.checkpoint_manager import load_checkpoint

KEPT = ("event", "step", "loss", "dt", "bpb", "bpb_bf16")  # of the log; the rest names folders of a machine


def reached(curve: Sequence[Sequence[float]], target: float) -> float | None:
    """The step at which the loss first is `target`, of a curve of (step, loss, ...); None if it never is."""
    for i, (step, loss, *_) in enumerate(curve):
        if loss <= target:
            before, higher = curve[i - 1][:2] if i else (step, loss)
            return step if higher == loss else before + (step - before) * (higher - target) / (higher - loss)
    return None


def check(records: list[dict[str, Any]], meta: dict[str, Any], parameters: int, folder: Path) -> dict[str, Any]:
    """The log's start record. Raises UserError where the log and the checkpoint are of different runs or incomplete."""
    starts = [r for r in records if r.get("event") == "start"]
    config, loop = meta.get("user_config"), meta.get("loop_state", {})
    if not starts or not isinstance(config, dict) or "run_config" not in meta:
        raise UserError(f"{folder} is not a folder of base_train of this version; train the run again")
    steps = config["num_iterations"]
    train = [r for r in records if r["event"] == "train"]
    last = [r for r in records if r["event"] == "val"][-1:]
    ours = {
        "stage": ("base", starts[-1]["stage"]),
        "method": (config["method"], starts[-1]["method"]),
        "number of steps": (steps, starts[-1]["num_iterations"]),
        "seed": (config["seed"], starts[-1]["config"]["seed"]),
        "tokens of a step": (meta["run_config"]["total_batch_size"], starts[-1]["total_batch_size"]),
        "number of parameters": (parameters, starts[-1]["num_params"]),
        "step of the newest checkpoint": (meta["step"], steps),
        "trained steps": (list(range(steps)), [r["step"] for r in train]),
        "training seconds": (round(loop.get("training_seconds", 0.0), 3), round(sum(r["dt"] for r in train), 3)),
        "last validation": ([steps, meta.get("val_bpb")], [last[0]["step"], last[0]["bpb"]] if last else None),
    }
    for what, (saved, logged) in ours.items():
        if saved != logged:
            both = f"the checkpoint's {what} is {str(saved)[-60:]}, the log's {str(logged)[-60:]}"
            raise UserError(f"{folder}: {both}; record a run that ended, with its own metrics.jsonl")
    return starts[-1]


def of_folder(folder: Path, target: float) -> tuple[dict[str, Any], str]:
    """(record, log) of a finished base_train. Raises UserError."""
    if not (folder / "metrics.jsonl").is_file():
        raise UserError(f"{folder} has no metrics.jsonl; give the folder of a run, or a sweep's JSON file")
    records = [r for r in read_jsonl(folder / "metrics.jsonl") if isinstance(r.get("event"), str)]
    weights, _, meta = load_checkpoint(folder, None, "cpu")
    start = check(records, meta, sum(w.numel() for w in weights.values()), folder)
    config, seconds = meta["user_config"], [r["dt"] for r in records if r["event"] == "train"]
    text = f"{Path(meta['tunable']['data_dir']).name} ({meta['tunable']['val_data'][:12]})"
    step = reached([(r["step"], r["bpb"]) for r in records if r["event"] == "val"], target)
    whole = math.floor(step or 0)
    record = {
        "name": folder.name, "method": config["method"], "seed": config["seed"], "text": text, "to": target,
        "parameters": start["num_params"], "steps": len(seconds),
        "bpb": meta["val_bpb"], "card": start["environment"]["gpu"] or start["environment"]["cpu"],
        "cards": start["environment"]["gpu_count"], "commit": meta["commit"] or "", "note": "",
        "log": f"records/{folder.name}.jsonl",
        "tokens": None if step is None else round(step * start["total_batch_size"]),
        "seconds": None if step is None else sum(seconds[:whole]) + (step - whole) * (seconds + [0.0])[whole],
    }  # fmt: skip
    kept = [{k: r[k] for k in KEPT if k in r} for r in records if r["event"] in ("train", "val")]
    return record, "".join(json.dumps(r) + "\n" for r in kept)


def of_sweep(path: Path, target: float, seed: int) -> list[tuple[dict[str, Any], str]]:
    """(record, no log) of a sweep's runs with that seed that were trained from their first step. Raises UserError."""
    content = stored(path)
    environment, found = content["environment"], []
    for run in content["results"]:
        if run["seed"] != seed or any(flag.startswith("--branch-from") for flag in run["flags"]):
            continue
        step = reached(run["curve"], target)
        record = {
            "name": f"{path.stem}_{run['method']}_s{seed}", "method": run["method"], "seed": seed, "to": target,
            "text": content["data"], "parameters": run["num_params"],
            "steps": run["steps"], "bpb": run["val_bpb"], "card": environment["gpu"], "cards": 1,
            "commit": environment["commit"] or "", "log": f"results/{path.name}",
            "note": "seconds of a mean step; a sweep may share its card",
            "tokens": None if step is None else round(step * run["tokens"] / run["steps"]),
            "seconds": None if step is None else step * run["training_seconds"] / run["steps"],
        }  # fmt: skip
        found.append((record, ""))
    if not found:
        raise UserError(f"{path}: no run with seed {seed} was trained from its first step; choose another --seed")
    return found


def page(records: list[dict[str, Any]]) -> str:
    """The Markdown of docs/leaderboard.md."""
    lines = [
        "# Leaderboard\n\nHow long does a method take to a stated loss? Made by `python -m lab.record --table`;",
        "`python -m lab.record FOLDER --to LOSS` adds a run. Losses are bits per byte of validation text, own forward.",
        "Times are measured, dollars are hours times the rates of `nanochat_fp4/evaluation/report.py`; a CPU has none.",
        "A note says why a time is no fair comparison.",
    ]
    tracks: dict[tuple, list[dict[str, Any]]] = {}
    for r in records:
        tracks.setdefault((r["to"], r["text"], r["seed"], r["parameters"]), []).append(r)
    for (target, text, seed, parameters), runs in sorted(tracks.items(), key=lambda t: str(t[0])):
        lines += ["", f"## {target:g} bits per byte: {text}, seed {seed}, {parameters / 1e6:.3g}M parameters", ""]
        lines += ["| method | tokens | time | dollars | at the end | card | commit | log | note |", "|---" * 9 + "|"]
        notes = list(dict.fromkeys(r["note"] for r in runs if r["note"]))
        for r in sorted(runs, key=lambda r: (r["tokens"] is None, r["tokens"], r["seconds"])):
            cells = ["not reached", "-", "-"]
            if r["tokens"] is not None:
                environment = {"gpu": r["card"], "gpu_count": r["cards"]}
                dollars = gpu_dollars(environment, r["seconds"]) if r["cards"] else None
                cells = [f"{r['tokens']:,}", format_seconds(r["seconds"]), f"{dollars:.2f}" if dollars else "-"]
            card = f"{r['cards']} x {r['card']}" if r["cards"] else r["card"]
            commit, _, changes = r["commit"].partition("+")
            commit = (commit[:7] or "unknown") + (changes and " and changes")
            cells = [f"`{r['method']}`", *cells, f"{r['bpb']:.4f}", card, commit]
            note = str(notes.index(r["note"]) + 1) if r["note"] else ""
            lines += ["| " + " | ".join([*cells, f"[log]({r['log']})", note]) + " |"]
        lines += ["", *(f"{i}. {note}" for i, note in enumerate(notes, 1))] if notes else []
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("run", nargs="?", type=Path, help="folder of a finished base_train, or a sweep's JSON file")
    add("--to", type=parse_finite, help="the loss, bits per byte of validation text")
    add("--seed", type=int, default=1, help="of a sweep's runs")
    add("--note", default="", help="why the time is no fair comparison, if it is not")
    add("--commit", default="", help="of a run whose machine had no git")
    add("--table", action="store_true", help="write the page from all records")
    add("--docs", type=Path, default=ROOT / "docs", help="its folder records/ and its page")
    args = parser.parse_args(argv)
    folder = args.docs / "records"
    if bool(args.run) == args.table or (args.run and args.to is None):
        raise UserError("give either a run with --to=LOSS, or --table")
    if args.table:
        paths = sorted(folder.glob("*.json"))
        atomic_write(args.docs / "leaderboard.md", page([json.loads(p.read_text()) for p in paths]))
        print(f"written to {args.docs / 'leaderboard.md'}: {len(paths)} records")
        return
    folder.mkdir(parents=True, exist_ok=True)
    sweep = args.run.suffix == ".json"
    for record, log in of_sweep(args.run, args.to, args.seed) if sweep else [of_folder(args.run, args.to)]:
        record |= {"note": args.note or record["note"], "commit": record["commit"] or args.commit}
        path = folder / f"{record['name']}.json"
        atomic_write(path, json.dumps(record, indent=1) + "\n")
        if log:
            atomic_write(args.docs / record["log"], log)
        print(f"written to {path}: {record['tokens']} tokens to {args.to:g}")


if __name__ == "__main__":
    run_main(main)
