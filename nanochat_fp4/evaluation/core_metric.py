"""
The CORE metric on nanochat's eval bundle. It is the mean over the tasks of the accuracy, rescaled so that guessing is
0.

    results = evaluate_model(model, tokenizer, device)
    results["core_metric"], results["results"]["hellaswag"], ...

The bundle has core.yaml, eval_meta_data.csv and eval_data/. core_eval.py judges single questions.
"""

import csv
import hashlib
import json
import os
import random
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.common import get_base_dir, get_dist_info
from nanochat_fp4.data.sources import MissingDataError, download_file_with_lock, read_rows
from nanochat_fp4.evaluation.core_eval import TASK_TYPES, evaluate_task, fault_of, longest_input
from nanochat_fp4.progress import Progress

EVAL_BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SHUFFLE_SEED = 1337

# ----------------------------------------------------------------------------------------------------------------------
# The bundle


def _unpack(zip_path: str) -> None:
    """Unpacks the bundle beside its final place, and moves it there in one step."""
    with tempfile.TemporaryDirectory(dir=get_base_dir()) as folder:
        try:
            with zipfile.ZipFile(zip_path) as archive:
                archive.extractall(folder)
            os.replace(os.path.join(folder, "eval_bundle"), os.path.join(get_base_dir(), "eval_bundle"))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, FileNotFoundError) as e:
            raise UserError(f"{EVAL_BUNDLE_URL} is not the eval bundle ({one_line(e)}); use --bundle-dir") from e


def find_bundle(bundle_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of the eval bundle. Raises MissingDataError if the bundle cannot be had or is incomplete."""
    folder = Path(bundle_dir) if bundle_dir else Path(get_base_dir()) / "eval_bundle"
    if not bundle_dir and not folder.is_dir():
        try:
            path = download_file_with_lock(EVAL_BUNDLE_URL, "eval_bundle.zip", postprocess_fn=_unpack, deadline=1800)
            if not folder.is_dir():  # The archive exists, but its unpacked folder does not.
                _unpack(path)
        except UserError as e:
            problem = f"CORE needs the eval bundle, which is not in {folder} and cannot be downloaded"
            remedy = f"unpack {EVAL_BUNDLE_URL} somewhere and name the folder with --bundle-dir"
            raise MissingDataError(f"{problem} ({one_line(e)[:150]}); {remedy}") from e
    if missing := [n for n in ("core.yaml", "eval_meta_data.csv", "eval_data") if not (folder / n).exists()]:
        problem = f"{folder} is no eval bundle, because {', '.join(missing)} is missing"
        raise MissingDataError(f"{problem}; unpack {EVAL_BUNDLE_URL} there")
    return folder


def read_tasks(bundle_dir: str | os.PathLike | None, max_per_task: int = -1) -> list[dict[str, Any]]:
    """Returns the tasks of a bundle: label, task_type, num_fewshot, continuation_delimiter, chance (the accuracy of
    guessing) and data (its questions, shuffled, at most max_per_task). Raises UserError for any fault of the bundle
    that would end the evaluation later."""
    import yaml  # datasets and wandb bring this package along.

    folder = find_bundle(bundle_dir)
    try:
        with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as f:
            guessing = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(f)}
        tasks = [
            {"label": task["label"], "task_type": task["icl_task_type"], "num_fewshot": task["num_fewshot"][0]}
            | {"continuation_delimiter": task.get("continuation_delimiter", " ")}
            | {"chance": guessing[task["label"]] / 100, "file": folder / "eval_data" / task["dataset_uri"]}
            for task in yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        ]
        for task in tasks or [{}]:
            if task["task_type"] not in TASK_TYPES or task["num_fewshot"] < 0 or not 0 <= task["chance"] < 1:
                raise ValueError(str(task))
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError, csv.Error) as e:
        problem = f"core.yaml or eval_meta_data.csv in {folder} is damaged ({type(e).__name__}: {one_line(e)[:100]})"
        raise UserError(f"{problem}; unpack the bundle again") from e
    for task in tasks:
        data = read_rows(task.pop("file"), lambda row: fault_of(row, task["task_type"]))  # noqa: B023
        random.Random(SHUFFLE_SEED).shuffle(data)
        task["data"], shots = data[:max_per_task] if max_per_task > 0 else data, task["num_fewshot"]
        if len(task["data"]) <= shots:
            raise UserError(
                f"{task['label']} shows {shots} other questions before each of its {len(task['data'])}; raise "
                f"--max-per-task (--core-metric-max-per-task) to {shots + 1}"
            )
    return tasks


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate_model(
    model: Any,
    tokenizer: Any,
    device: torch.device,
    max_per_task: int = -1,
    bundle_dir: str | os.PathLike | None = None,
    part: Callable[[str, Callable[[], list]], list] = lambda name, measure: measure(),
) -> dict[str, Any]:
    """
    Computes CORE. All ranks must call this function together, inside a context of the precision that they choose.

    The result is a dict. "results" has the accuracy of each task. "centered_results" has the same numbers, rescaled so
    that guessing is 0, and "core_metric" is their mean. "notes" says which questions were cropped or not judged.

    Only the first max_per_task questions of each task count. All files are read and checked before the first question.
    part(name, measure) returns the numbers of a task: the result of measure(), or the one that was stored before
    (evaluation/kept.py). The name has a hash of the task and its questions.
    """
    tasks = read_tasks(bundle_dir, max_per_task)
    results, centered, notes = {}, {}, []
    _, rank, _, world_size = get_dist_info()
    mine = sum(len(range(rank, len(task["data"]), world_size)) for task in tasks)
    progress = Progress(total=mine, desc="CORE", unit="question")
    with nf.per_token_scale(model), nf.quantize_weights_once(model), progress:
        for task in tasks:
            start, label, data, chance = time.monotonic(), task["label"], task["data"], task["chance"]
            meta = {key: task[key] for key in ("task_type", "num_fewshot", "continuation_delimiter")}
            asked = hashlib.sha256(json.dumps([meta, data], sort_keys=True).encode()).hexdigest()[:12]
            measure = lambda: evaluate_task(model, tokenizer, data, device, meta, progress.update)  # noqa: B023, E731
            accuracy, cropped, not_judged = part(f"{label} {asked}", measure)
            if cropped:
                notes.append(f"{label}: {cropped} prompts were cropped to their last {longest_input(model):,} tokens")
            if not_judged:
                notes.append(
                    f"{label}: {not_judged} questions count as wrong, whose answer does not fit or has no own token"
                )
            results[label], centered[label] = accuracy, (accuracy - chance) / (1 - chance)
            progress.write(f"{label}: {accuracy:.3f} ({time.monotonic() - start:.0f} s)")
    core = sum(centered.values()) / len(centered)
    return {"results": results, "centered_results": centered, "core_metric": core, "notes": notes}
