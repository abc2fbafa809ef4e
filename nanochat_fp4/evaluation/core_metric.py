"""
The CORE metric on nanochat's eval bundle. It is the mean over the tasks of the accuracy, rescaled so that guessing is
0.

    results = evaluate_model(model, tokenizer, device)
    results["core_metric"], results["results"]["hellaswag"], ...

The bundle has core.yaml, eval_meta_data.csv and eval_data/. core_eval.py judges single questions.
"""

import contextlib
import csv
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError, format_bytes, one_line
from nanochat_fp4.common import get_base_dir, get_dist_info
from nanochat_fp4.data.download import download_file_with_lock
from nanochat_fp4.data.rows import MissingDataError, read_rows
from nanochat_fp4.evaluation.core_eval import TASK_TYPES, evaluate_task, fault_of, longest_input
from nanochat_fp4.progress import Progress

EVAL_BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
# The limits for unpacking. The bundle has some 60 files and 160 MB in compressed form.
MAX_FILES, MAX_BYTES = 10_000, 4 << 30
MAX_YAML_BYTES = 1 << 20
SHUFFLE_SEED = 1337

# ----------------------------------------------------------------------------------------------------------------------
# The bundle


def _unpack(zip_path: str) -> None:
    """Unpacks the bundle beside its final place, and moves it there in one step. Raises UserError if it is not the
    bundle or is too large."""
    base_dir = get_base_dir()
    with tempfile.TemporaryDirectory(dir=base_dir) as folder:
        try:
            with zipfile.ZipFile(zip_path) as archive:
                size, count = sum(i.file_size for i in archive.infolist()), len(archive.infolist())
                if size > min(MAX_BYTES, shutil.disk_usage(folder).free) or count > MAX_FILES:
                    raise UserError(
                        f"{EVAL_BUNDLE_URL} would unpack to {count:,} files of {format_bytes(size)}, more than the "
                        "eval bundle has or the disk has room for; free some space, or use --bundle-dir"
                    )
                archive.extractall(folder)
            os.replace(os.path.join(folder, "eval_bundle"), os.path.join(base_dir, "eval_bundle"))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, FileNotFoundError) as e:
            raise UserError(f"{EVAL_BUNDLE_URL} is not the eval bundle ({one_line(e)}); use --bundle-dir") from e


def find_bundle(bundle_dir: str | os.PathLike | None = None) -> Path:
    """Returns the folder of the eval bundle. Raises MissingDataError if the bundle cannot be had or is incomplete."""
    folder = Path(bundle_dir) if bundle_dir else Path(get_base_dir()) / "eval_bundle"
    if not bundle_dir and not folder.is_dir():
        try:
            path = download_file_with_lock(
                EVAL_BUNDLE_URL, "eval_bundle.zip", postprocess_fn=_unpack, deadline=1800, timeout=10, attempts=2
            )
            if not folder.is_dir():  # The archive exists, but its unpacked folder does not.
                _unpack(path)
        except UserError as e:
            problem = f"CORE needs the eval bundle, which is not in {folder} and cannot be downloaded"
            remedy = f"unpack {EVAL_BUNDLE_URL} somewhere and name the folder with --bundle-dir"
            raise MissingDataError(f"{problem} ({one_line(e)[:150]}); {remedy}") from e
    for name, exists in (("core.yaml", Path.is_file), ("eval_meta_data.csv", Path.is_file), ("eval_data", Path.is_dir)):
        if not exists(folder / name):
            problem = f"{folder / name} is missing, so {folder} is no eval bundle"
            raise MissingDataError(f"{problem}; unpack {EVAL_BUNDLE_URL} there")
    return folder


def read_bundle(folder: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns the tasks of core.yaml, and the accuracy of guessing in percent by label. Raises UserError for damaged
    files."""
    import yaml  # datasets and wandb bring this package along.

    try:
        with open(folder / "core.yaml", encoding="utf-8") as f:
            text = f.read(MAX_YAML_BYTES + 1)
        if len(text) > MAX_YAML_BYTES:
            raise ValueError(f"more than {format_bytes(MAX_YAML_BYTES)}")
        tasks = yaml.safe_load(text)["icl_tasks"]
        for task in tasks:
            texts, shots = (task["label"], task["icl_task_type"], task["dataset_uri"]), task["num_fewshot"][0]
            if not all(isinstance(word, str) for word in texts) or not isinstance(shots, int):
                raise ValueError(f"a task with {texts} and num_fewshot {shots!r}")
        if not tasks:
            raise ValueError("no task")
    except (OSError, yaml.YAMLError, KeyError, TypeError, IndexError, ValueError, RecursionError) as e:
        raise UserError(f"{folder / 'core.yaml'} is damaged ({one_line(e)[:100]}); unpack the bundle again") from e
    try:
        with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as f:
            guessing = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(f)}
        if invalid := [chance for chance in guessing.values() if not 0 <= chance < 100]:
            raise ValueError(f"a random baseline of {invalid[0]} percent")
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as e:
        damaged = f"{folder / 'eval_meta_data.csv'} is damaged ({one_line(e)[:100]})"
        raise UserError(f"{damaged}; unpack the bundle again") from e
    return tasks, guessing


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


def read_questions(
    folder: Path, task: dict[str, Any], guessing: dict[str, float], max_per_task: int
) -> list[dict[str, Any]]:
    """Returns the questions of a task, shuffled. Raises UserError for any fault that would end the evaluation later."""
    label, kind, shots = task["label"], task["icl_task_type"], task["num_fewshot"][0]
    if label not in guessing:
        raise UserError(f"{folder / 'eval_meta_data.csv'} has no row for {label!r}; unpack the bundle again")
    if kind not in TASK_TYPES:
        raise UserError(f"{folder / 'core.yaml'}: {label} is {kind!r}, expected one of {', '.join(TASK_TYPES)}")
    if not isinstance(shots, int) or shots < 0:
        raise UserError(f"{folder / 'core.yaml'}: {label} has num_fewshot {shots!r}, expected a number")
    data = read_rows(folder / "eval_data" / task["dataset_uri"], lambda row: fault_of(row, kind))
    random.Random(SHUFFLE_SEED).shuffle(data)
    data = data[:max_per_task] if max_per_task > 0 else data
    if len(data) <= shots:
        raise UserError(
            f"{label} shows {shots} other questions before each of its {len(data)}; raise --max-per-task "
            f"(--core-metric-max-per-task) to {shots + 1}"
        )
    return data


def read_all_questions(
    bundle_dir: str | os.PathLike | None, max_per_task: int = -1
) -> tuple[list[dict[str, Any]], dict[str, float], dict[str, list[dict[str, Any]]]]:
    """Returns the tasks of a bundle, the accuracy of guessing by label, and the questions by label. Raises UserError
    for any fault of the bundle."""
    folder = find_bundle(bundle_dir)
    tasks, guessing = read_bundle(folder)
    return tasks, guessing, {task["label"]: read_questions(folder, task, guessing, max_per_task) for task in tasks}


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


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
    tasks, guessing, questions = read_all_questions(bundle_dir, max_per_task)
    results, centered, notes = {}, {}, []
    _, rank, _, world_size = get_dist_info()
    mine = sum(len(range(rank, len(data), world_size)) for data in questions.values())
    with contextlib.ExitStack() as stack:
        if isinstance(model, torch.nn.Module):
            stack.enter_context(nf.per_token_scale(model))
            stack.enter_context(nf.quantize_weights_once(model))
        progress = stack.enter_context(Progress(total=mine, desc="CORE", unit="question"))
        for task in tasks:
            start, label = time.monotonic(), task["label"]
            meta = {"task_type": task["icl_task_type"], "num_fewshot": task["num_fewshot"][0]}
            meta["continuation_delimiter"] = task.get("continuation_delimiter", " ")
            measure = lambda: list(evaluate_task(model, tokenizer, questions[label], device, meta, progress.update))  # noqa: B023, E731
            accuracy, cropped, not_judged = part(f"{label} {_hash([meta, questions[label]])}", measure)
            if cropped:
                notes.append(f"{label}: {cropped} prompts were cropped to their last {longest_input(model):,} tokens")
            if not_judged:
                notes.append(
                    f"{label}: {not_judged} questions count as wrong, whose answer does not fit or has no own token"
                )
            chance = guessing[label] / 100
            results[label], centered[label] = accuracy, (accuracy - chance) / (1 - chance)
            progress.write(f"{label}: {accuracy:.3f} ({time.monotonic() - start:.0f} s)")
    core = sum(centered.values()) / len(centered) if centered else 0.0
    return {"results": results, "centered_results": centered, "core_metric": core, "notes": notes}
