"""Turns the sections and the metrics.jsonl of a run into one row of numbers, and computes the gaps between runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat_fp4.evaluation.metrics import accuracy_interval, read_jsonl, section_files

# The order of the stages in the report. Other sections follow in the order of their time.
SECTIONS = [
    "tokenizer-training",
    "tokenizer-evaluation",
    "base-model-training",
    "base-model-loss",
    "base-model-evaluation",
    "midtraining",
    "chat-evaluation-mid",
    "chat-sft",
    "chat-evaluation-sft",
    "chat-rl",
    "chat-evaluation-rl",
]
MEASURES = {  # For each section of measurements, the section of the training whose model it measures.
    "base-model-loss": "base-model-training",
    "base-model-evaluation": "base-model-training",
    "chat-evaluation-mid": "midtraining",
    "chat-evaluation-sft": "chat-sft",
    "chat-evaluation-rl": "chat-rl",
}


def read_sections(report_dir: Path, notes: list[str]) -> list[dict]:
    """Returns the sections in the order of their stages. A note names each section that is left out."""
    sections = []
    for path in section_files(report_dir):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            kinds = {"section": str, "data": list, "results": dict, "environment": dict, "timestamp": str}
            if not all(isinstance(record[key], kind) for key, kind in kinds.items()):
                raise ValueError("not a section")
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            notes.append(f"{path} is not readable as a section and was left out; run its stage again to replace it")
            continue
        record["model_tag"] = path.parent.name if path.parent != report_dir else None
        record |= {"slug": path.stem, "section": as_text(record["section"]), "timestamp": as_text(record["timestamp"])}
        sections.append(record)
    place = {slug: i for i, slug in enumerate(SECTIONS)}
    sections.sort(key=lambda s: (place.get(s["slug"], len(place)), s["timestamp"]))
    trained = {(s["model_tag"], s["slug"]): s["timestamp"] for s in sections}
    old = [s for s in sections if s["timestamp"] < trained.get((s["model_tag"], MEASURES.get(s["slug"])), "")]
    notes += [
        f"{s['section']} of {s['model_tag']} measured a model that has been trained anew since, and was left out; "
        "run its stage again"
        for s in old
    ]
    return [s for s in sections if s not in old]


def read_metrics(checkpoints: Path, notes: list[str]) -> dict[str, list[dict]]:
    """Returns the records of metrics.jsonl by run, the run that was written last at the end. A note names each
    unreadable file."""
    metrics = {}
    for path in sorted(checkpoints.glob("*/metrics.jsonl"), key=lambda p: p.stat().st_mtime):
        try:
            records = read_jsonl(path)
        except OSError as e:
            notes.append(f"{path} cannot be read ({e.strerror})")
            continue
        if records:
            metrics[path.parent.name] = records
    return metrics


def finite_number(value: Any) -> float | None:
    """Returns `value` if it is a finite number, otherwise None. The files may contain anything."""
    is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_finite else None


def as_text(value: Any) -> str:
    """Returns `value` as one line without lone surrogates, which JSON can contain although they are not valid
    Unicode text."""
    return " ".join(str(value).encode("utf-8", "replace").decode("utf-8").split())


# The results that a run's summary takes over. Other results stay in their section.
_TEXTS = ("method", "config_key", "backend", "tokenizer")
_NUMBERS = ("num_iterations", "total_batch_size", "num_params", "tokens_per_second", "training_seconds")
# One measurement of the validation loss: with the method's own forward pass and in BF16, on which text, on how many
# tokens. These numbers are taken together, because a loss means nothing with the text of another measurement.
MEASUREMENT = ("val_bpb", "val_bpb_bf16", "val_text", "val_tokens")


def summarize_run(tag: str, sections: list[dict], metrics: list[dict]) -> dict:
    """Returns the numbers of one run as a flat dict. Values that were not logged are None."""
    keys = ("step", "untrained_bpb", *_TEXTS, *_NUMBERS, *MEASUREMENT)
    run: dict[str, Any] = {key: None for key in keys} | {"model_tag": tag, "benchmarks": {}}

    def measured(values: Mapping[str, Any]) -> None:
        if finite_number(values.get("val_bpb")) is not None:
            run.update({k: finite_number(values.get(k)) for k in MEASUREMENT if k != "val_text"})
            run["val_text"] = values.get("val_text")

    def take(values: Mapping[str, Any]) -> None:
        run.update({k: as_text(values[k]) for k in _TEXTS if isinstance(values.get(k), str)})
        run.update({k: finite_number(values[k]) for k in _NUMBERS if finite_number(values.get(k)) is not None})

    val_text = None
    for record in metrics:
        event, step = record.get("event"), finite_number(record.get("step"))
        if event == "start":
            take(record)
            val_text = record.get("val_text")
        elif event == "train" and step is not None:
            run["step"] = int(step) + 1
            take({"tokens_per_second": record.get("tok_per_sec")})
        elif event == "val" and step == 0:
            run["untrained_bpb"] = finite_number(record.get("bpb"))
        elif event == "val":
            names = {"val_bpb": "bpb", "val_bpb_bf16": "bpb_bf16", "val_tokens": "tokens"}
            measured({key: record.get(name) for key, name in names.items()} | {"val_text": val_text})
    unfinished = metrics and run["num_iterations"] and (run["step"] or 0) < run["num_iterations"]
    if unfinished and any(s["slug"] == "base-model-training" for s in sections):
        # Training writes its section at its end, so an earlier run with this tag wrote this one.
        sections = [s for s in sections if not s["slug"].startswith("base-model-")]
    for section in sections:
        if section["slug"].startswith("chat-evaluation-") or section["slug"] == "base-model-evaluation":
            stage = section["slug"].removeprefix("chat-evaluation-").removesuffix("-model-evaluation")
            scored = {as_text(task): _score(value) for task, value in section["results"].items()}
            run["benchmarks"][stage] = {task: score for task, score in scored.items() if score}
        elif section["slug"] == "base-model-training":
            take(section["results"])
            if run["val_bpb"] is None:
                measured(section["results"])
        elif section["slug"] == "base-model-loss":
            # The loss stage comes after training and measures on more tokens. Its result replaces that of the training
            # loop, unless it belongs to another step.
            take(section["results"])
            if section["results"].get("step") in (None, run["step"]):
                measured(section["results"])
    if run["step"] and run["total_batch_size"]:
        run["tokens"] = int(run["total_batch_size"] * run["step"])
    run["finished"] = run["step"] is not None and run["step"] == run["num_iterations"]
    return run


def _score(value: Any) -> dict[str, float | None] | None:
    """Returns the dict of "accuracy", "interval" (2 sigma) and "guessing" (the accuracy of guesses) for an accuracy or
    for the dict of an evaluation. Both are None if they are not known. Returns None if there is no accuracy."""
    score = value if isinstance(value, dict) else {"accuracy": value}
    keys = ("accuracy", "count", "interval", "guessing")
    accuracy, count, interval, guessing = (finite_number(score.get(key)) for key in keys)
    if accuracy is None:
        return None
    if count is not None and count > 0 and 0 <= accuracy <= 1:
        interval = accuracy_interval(accuracy, count)  # The interval in an older file may be 0 if no answer was right.
    return {"accuracy": accuracy, "interval": interval, "guessing": guessing}


def tokens_measured(run: dict) -> str | None:
    """Returns the number of tokens of a run's validation loss in words, or None if it is not known."""
    return None if run["val_tokens"] is None else f"{run['val_tokens']:,.0f} tokens"


def add_gaps(runs: list[dict], notes: list[str]) -> None:
    """Adds the increase of validation BPB over the BF16 baseline that was trained with the same configuration, in
    percent.

    There are two gaps: gap_percent has the method's own forward pass, and gap_percent_bf16 the BF16 forward pass. A
    note names the runs that have no gap because they were validated on different texts, with different tokenizers or on
    different numbers of tokens.
    """
    finished = [r for r in runs if r["finished"] and r["val_bpb"]]
    baselines = {r["config_key"]: r for r in finished if r["method"] == "bf16"}
    for run in finished:
        base = baselines.get(run["config_key"])
        if not base or base is run:
            continue
        different = [key for key in ("val_text", "tokenizer") if run[key] != base[key] or not run[key]]
        if different:
            words = " and ".join({"val_text": "validation texts", "tokenizer": "tokenizers"}[key] for key in different)
            names = f"{run['model_tag']} and {base['model_tag']}"
            difference = (
                "differ" if all(run[key] and base[key] for key in different) else "may differ: a log does not say"
            )
            notes.append(f"no gap between {names}: {words} {difference}")
        elif run["val_tokens"] == base["val_tokens"]:
            # The loss stage measures on more tokens than the training loop, so measurements on other numbers of tokens
            # differ.
            run["gap_percent"] = 100 * (run["val_bpb"] / base["val_bpb"] - 1)
            if run["val_bpb_bf16"] and base["val_bpb_bf16"]:
                run["gap_percent_bf16"] = 100 * (run["val_bpb_bf16"] / base["val_bpb_bf16"] - 1)
        else:
            sizes = " and ".join(
                f"{r['model_tag']} on {tokens_measured(r) or 'an unknown number of tokens'}" for r in (run, base)
            )
            notes.append(
                f"no gap, because {sizes} were validated; measure both on as many tokens with python -m "
                "scripts.base_loss --model-tag=... --split-tokens=..."
            )
