"""
CORE is the metric of the DCLM paper (https://arxiv.org/abs/2406.11794). It has 22 tasks for a base model, which has not
learned to chat. A few solved examples come before each question. CORE is the mean over the tasks of the accuracy,
rescaled so that guessing is 0.

    results = evaluate_model(model, tokenizer, device)
    results["core_metric"], results["results"]["hellaswag"], ...

Likelihood decides the answers of all three kinds of tasks, in one forward pass for each question:

    multiple_choice     query + each choice     the choice with the lowest mean loss on its own tokens
    schema              each context + ending   the context after which the ending has the lowest mean loss
    language_modeling   context + continuation  every token of the continuation must be the most likely one

The prompts are those of nanochat at f5425245f, which makes them from Jinja templates. nanochat's eval bundle has
core.yaml, eval_meta_data.csv and eval_data/.
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
from collections.abc import Callable, Sequence
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError, one_line
from nanochat_fp4.common import get_base_dir, get_dist_info, is_ddp_initialized
from nanochat_fp4.data.sources import MissingDataError, download_file_with_lock, read_rows
from nanochat_fp4.generation.engine import check_finite
from nanochat_fp4.progress import Progress

EVAL_BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SHUFFLE_SEED = 1337
NOT_WHOLE = "questions were cropped to their end or, where the answer does not fit or begins inside a token, are wrong"
FEWSHOT_SEED = 1234  # Question i draws its few-shot examples with the seed FEWSHOT_SEED + i.
# The fields of a question, by kind of task.
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}

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
            raise MissingDataError(f"CORE needs the eval bundle: {one_line(e)}, or set --bundle-dir") from e
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
            if task["task_type"] not in FIELDS or task["num_fewshot"] < 0 or not 0 <= task["chance"] < 1:
                raise ValueError(str(task))
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, RecursionError, csv.Error) as e:
        problem = f"core.yaml or eval_meta_data.csv in {folder} is damaged ({type(e).__name__}: {one_line(e)[:100]})"
        raise UserError(f"{problem}; unpack the bundle again") from e
    for task in tasks:
        data = read_rows(task.pop("file"), lambda row: fault_of(row, task["task_type"]))  # noqa: B023
        random.Random(SHUFFLE_SEED).shuffle(data)
        task["data"], shots = data[:max_per_task] if max_per_task > 0 else data, task["num_fewshot"]
        if len(task["data"]) <= shots:
            shows = f"{task['label']} shows {shots} other questions before each of its {len(task['data'])}"
            raise UserError(f"{shows}; raise --max-per-task (--core-metric-max-per-task) to {shots + 1}")
    return tasks


def fault_of(item: dict[str, Any], kind: str) -> str | None:
    """Returns the fault of a question of this kind of task, or None."""
    for name, expected in FIELDS[kind].items():
        value = item.get(name)
        if not isinstance(value, expected) or (expected is list and not all(isinstance(text, str) for text in value)):
            return f"{name!r} is missing or no {'list of strings' if expected is list else expected.__name__}"
    options = item.get("choices", item.get("context_options", ()))
    if "gold" in FIELDS[kind] and not 0 <= item["gold"] < len(options):
        return f"'gold' is {item['gold']}, expected 0 to {len(options) - 1}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Prompts


def render_prompts_mc(item: dict, delimiter: str, fewshot: Sequence[dict] = ()) -> list[str]:
    """Returns one prompt for each choice. The prompts differ in their endings."""
    head = "".join(f"{e['query']}{delimiter}{e['choices'][e['gold']]}\n\n" for e in fewshot)
    return [f"{head}{item['query']}{delimiter}{choice}" for choice in item["choices"]]


def render_prompts_schema(item: dict, delimiter: str, fewshot: Sequence[dict] = ()) -> list[str]:
    """Returns one prompt for each context. The prompts have the same ending."""
    head = "".join(f"{e['context_options'][e['gold']]}{delimiter}{e['continuation']}\n\n" for e in fewshot)
    return [f"{head}{context}{delimiter}{item['continuation']}" for context in item["context_options"]]


def render_prompts_lm(item: dict, delimiter: str, fewshot: Sequence[dict] = ()) -> list[str]:
    """
    Returns [the prompt without the continuation, the prompt with it].

    White space at the end of the first prompt is removed. Otherwise a trailing space would belong to the next token of
    the second prompt, and the tokens of the first prompt would not be the beginning of those of the second.
    """
    head = "".join(f"{e['context'].strip()}{delimiter}{e['continuation']}\n\n" for e in fewshot)
    prompt = f"{head}{item['context'].strip()}{delimiter}"
    return [prompt.strip(), f"{prompt}{item['continuation']}"]


PROMPTS = dict(zip(FIELDS, (render_prompts_mc, render_prompts_schema, render_prompts_lm)))


def render_question(
    item: dict, tokenizer: Any, task_meta: dict[str, Any], fewshot: Sequence[dict]
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Returns the token sequences of a question, and the span [start, end) of each sequence that is judged. The span of
    an answer that does not begin at a token is empty."""
    kind, delimiter = task_meta["task_type"], task_meta["continuation_delimiter"]
    sequences = tokenizer(PROMPTS[kind](item, delimiter, fewshot), prepend=tokenizer.get_bos_token_id())
    if kind == "multiple_choice":
        start = len(commonprefix(sequences))
        return sequences, [(start, len(s)) for s in sequences]
    if kind == "schema":
        length = len(commonprefix([s[::-1] for s in sequences]))
        return sequences, [(len(s) - length, len(s)) for s in sequences]
    prompt, full = sequences
    return [full], [(len(prompt), len(full) if full[: len(prompt)] == prompt else 0)]


# ----------------------------------------------------------------------------------------------------------------------
# Judging


@torch.no_grad()
def evaluate_example(
    index: int, model: Any, tokenizer: Any, data: Sequence[dict], device: torch.device | str, task_meta: dict[str, Any]
) -> tuple[bool, bool]:
    """Puts question `index` to the model, after few-shot examples that are drawn from the other questions. Returns
    whether the answer is right, and whether the model has read all of the question.

    The model reads the last tokens of a prompt that is longer than its context, which is max_seq_len (GPT-2's fixed
    one) or the length of the rotary tables. An answer that does not fit, or does not begin at a token, counts as wrong.

    Raises ValueError for logits that are not finite, and for more few-shot examples than there are other questions."""
    item, others = data[index], [i for i in range(len(data)) if i != index]
    chosen = random.Random(FEWSHOT_SEED + index).sample(others, task_meta["num_fewshot"])
    sequences, spans = render_question(item, tokenizer, task_meta, [data[i] for i in chosen])
    longest = getattr(model, "max_seq_len", None) or getattr(model, "rotary_seq_len", None) or max(map(len, sequences))
    surplus = [max(0, len(s) - longest) for s in sequences]
    spans = [(start - cut, end - cut) for (start, end), cut in zip(spans, surplus)]
    if not all(1 <= start < end for start, end in spans):
        return False, False
    sequences = [s[cut:] for s, cut in zip(sequences, surplus)]

    padding = tokenizer.get_bos_token_id()  # The padding is at the end, where no judged token sees it.
    width = max(map(len, sequences))
    ids = torch.tensor([s + [padding] * (width - len(s)) for s in sequences], device=device)
    logits = model(ids)
    # For each sequence the logits that judge it, and the tokens that they should predict.
    judged = [
        (check_finite(logits[row, start - 1 : end - 1].float(), model), ids[row, start:end])
        for row, (start, end) in enumerate(spans)
    ]
    if task_meta["task_type"] == "language_modeling":
        predicted, expected = judged[0]
        return bool((predicted.argmax(-1) == expected).all()), not any(surplus)
    losses = [float(F.cross_entropy(*pair)) for pair in judged]
    return losses.index(min(losses)) == item["gold"], not any(surplus)


def evaluate_task(
    model: Any,
    tokenizer: Any,
    data: Sequence[dict],
    device: torch.device | str,
    task_meta: dict[str, Any],
    done: Any = lambda: None,
) -> tuple[float, int]:
    """Returns the share of right answers over all questions of a task, and the number of questions of which the model
    has not read all. All ranks must call this function together. done() is called after each question."""
    _, rank, _, world_size = get_dist_info()
    counts = torch.zeros(2, device=device)
    for index in range(rank, len(data), world_size):
        right, whole = evaluate_example(index, model, tokenizer, data, device, task_meta)
        counts += torch.tensor([right, not whole], device=device)
        done()
    if is_ddp_initialized():
        dist.all_reduce(counts)
    right, not_whole = counts.tolist()
    return right / len(data), int(not_whole)


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
    that guessing is 0, and "core_metric" is their mean. "notes" says how many questions were not read whole.

    Only the first max_per_task questions of each task count. All files are read and checked before the first question.
    part(name, measure) returns the numbers of a task: the result of measure(), or the one that was stored before
    (evaluation/kept.py). The name has a hash of the task and its questions.
    """
    tasks = read_tasks(bundle_dir, max_per_task)
    results, centered, notes = {}, {}, []
    _, rank, _, world_size = get_dist_info()
    mine = sum(len(range(rank, len(task["data"]), world_size)) for task in tasks)
    progress = Progress(total=mine, desc="CORE", unit="question")
    with nf.per_token_scale(model), progress:
        for task in tasks:
            start, label, data, chance = time.monotonic(), task["label"], task["data"], task["chance"]
            meta = {key: task[key] for key in ("task_type", "num_fewshot", "continuation_delimiter")}
            # Parts of three numbers, which an earlier version has stored, have the hash of [meta, data].
            asked = hashlib.sha256(json.dumps([data, meta], sort_keys=True).encode()).hexdigest()[:12]
            measure = lambda: evaluate_task(model, tokenizer, data, device, meta, progress.update)  # noqa: B023, E731
            accuracy, not_whole = part(f"{label} {asked}", measure)
            notes += [f"{label}: {not_whole} {NOT_WHOLE}"] * (not_whole > 0)
            results[label], centered[label] = accuracy, (accuracy - chance) / (1 - chance)
            progress.write(f"{label}: {accuracy:.3f} ({time.monotonic() - start:.0f} s)")
    core = sum(centered.values()) / len(centered)
    return {"results": results, "centered_results": centered, "core_metric": core, "notes": notes}
