"""
Evaluates a chat model on the benchmarks of eval/.

    python -m scripts.chat_eval -i sft
    python -m scripts.chat_eval -i mid -a "ARC-Easy|GSM8K" -x 200
    torchrun --nproc_per_node=8 -m scripts.chat_eval -- -i sft
    python -m scripts.chat_eval -i sft -a local            three small tasks without a network, which are no benchmarks

Results are written to the report and to metrics.jsonl beside the checkpoint, with the outcome of each problem. Each
accuracy comes with two standard deviations. It also comes with its forward pass, which --precision chooses: the
method's own (nvfp4), BF16, or both.
"""

import argparse
import contextlib
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

import nanochat_fp4 as nf
from eval.arc import ARC
from eval.common import EVAL_FOLDER, resolve_eval_dir
from eval.gsm8k import GSM8K
from eval.humaneval import HumanEval
from eval.local import LocalArithmetic, LocalChoice, LocalCode
from eval.mmlu import MMLU
from eval.run import Score, run_task
from eval.spellingbee import SpellingBee
from nanochat_fp4.cli import ArgumentParser, UserError, one_line, parse_finite, run_main
from nanochat_fp4.common import joined_processes, print0, say_once
from nanochat_fp4.data.chat_data import WORD_LIST_URL, Task
from nanochat_fp4.data.sources import MissingDataError, Source
from nanochat_fp4.evaluation.execution import SandboxError, describe_sandbox
from nanochat_fp4.evaluation.kept import Kept, key_of
from nanochat_fp4.evaluation.report import FOLDERS, get_report
from nanochat_fp4.generation.chat import compute_dtype
from nanochat_fp4.models.gpt import ROTARY_FACTOR
from nanochat_fp4.training.flags import add_data_flags, add_model_arguments, changed_flags
from nanochat_fp4.training.load_model import checkpoint_folder, checkpoint_method, load_for_inference

TASKS: dict[str, Callable[[str | None], Task]] = {
    "ARC-Easy": lambda eval_dir: ARC("ARC-Easy", "test", eval_dir=eval_dir),
    "ARC-Challenge": lambda eval_dir: ARC("ARC-Challenge", "test", eval_dir=eval_dir),
    "MMLU": lambda eval_dir: MMLU("all", "test", eval_dir=eval_dir),
    "GSM8K": lambda eval_dir: GSM8K("main", "test", eval_dir=eval_dir),
    "HumanEval": lambda eval_dir: HumanEval(eval_dir=eval_dir),
    "SpellingBee": lambda eval_dir: SpellingBee(size=256, split="test", eval_dir=eval_dir),
}
LOCAL_TASKS: dict[str, Callable[[str | None], Task]] = {
    "Local-Choice": lambda _: LocalChoice(size=256, split="test"),
    "Local-Arithmetic": lambda _: LocalArithmetic(size=64, split="test"),
    "Local-Code": lambda _: LocalCode(size=64, split="test"),
}
# The accuracy that guessing reaches. It is 0 for tasks that are not listed.
GUESSING = {"ARC-Easy": 0.25, "ARC-Challenge": 0.25, "MMLU": 0.25, "Local-Choice": 0.25}
RUNS_CODE = ("HumanEval", "Local-Code")
# The arguments of run_task that are flags here.
SETTINGS = ("batch_size", "num_samples", "max_new_tokens", "temperature", "top_k", "max_problems", "seed")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Evaluate the chat model")
    add = parser.add_argument
    add("-i", "--source", required=True, choices=tuple(FOLDERS), help="Source of the model: sft|mid|rl")
    text = "Task name. Default = all tasks. Use | to split multiple tasks; 'local' is the tasks that need no files"
    add("-a", "--task-name", default=None, help=text)
    add("-d", "--dtype", default="bfloat16", choices=("float32", "bfloat16"), help="of what is not quantized, on a GPU")
    add("-t", "--temperature", type=parse_finite, default=0.0)
    add("-m", "--max-new-tokens", type=int, default=512)
    add("-n", "--num-samples", type=int, default=1)
    add("-k", "--top-k", type=int, default=50)
    add("-b", "--batch-size", type=int, default=8, help="Problems at a time")
    add("-x", "--max-problems", type=int, default=None, help="Max problems to evaluate")
    add_model_arguments(parser, "nvfp4", "bf16", "both")
    add_data_flags(parser, "--eval-dir", "--allow-missing")
    add("--seed", type=int, default=42, help="seed of sampling (temperature > 0)")
    return parser.parse_args(argv)


def chosen_tasks(names: str | None) -> list[str]:
    """Returns the names of the chosen tasks, in order and each once. None chooses all benchmarks. Raises UserError for
    an unknown name."""
    if names is None:
        return list(TASKS)
    known, chosen = {**TASKS, **LOCAL_TASKS}, []
    for name in filter(None, (n.strip() for n in names.split("|"))):
        chosen += LOCAL_TASKS if name == "local" else [name]
    problems = [f"unknown task {name!r}" for name in chosen if name not in known]
    if problems or not chosen:
        problem = problems[0] if problems else f"no task in -a {names!r}"
        raise UserError(f"{problem}; use one or several (with |) of {', '.join(known)}, local")
    return list(dict.fromkeys(chosen))


def needs(args: argparse.Namespace) -> list[Source]:
    """Returns the inputs that the chosen tasks need, for a plan. They are not marked as vital, because --allow-missing
    leaves out a task whose rows or sandbox are missing."""
    datasets = {
        "ARC-Easy": ARC.dataset,
        "ARC-Challenge": ARC.dataset,
        "MMLU": MMLU.dataset,
        "GSM8K": GSM8K.dataset,
        "HumanEval": HumanEval.dataset,
        "SpellingBee": WORD_LIST_URL,
    }
    names = chosen_tasks(args.task_name)
    folder = resolve_eval_dir(args.eval_dir)
    found = [
        Source(n, functools.partial(TASKS[n], folder), "" if folder else datasets[n], EVAL_FOLDER)
        for n in names
        if n in datasets
    ]
    if code := [name for name in names if name in RUNS_CODE]:
        found.append(Source("a sandbox", find_sandbox, "", f"leave out {' and '.join(code)} (EVAL_ARGS=-a ...)"))
    return found


def find_sandbox() -> None:
    """Raises MissingDataError if code cannot be run in a sandbox here."""
    try:
        describe_sandbox()
    except SandboxError as e:
        raise MissingDataError(one_line(e)) from e


def check_flags(args: argparse.Namespace, sequence_len: int | None = None, processes: int = 1) -> None:
    """Raises UserError for values that this stage cannot use. The plan calls this function, too, before any stage runs.

    sequence_len: the number of tokens in a row of the base model, if it is known
    """
    if args.max_problems is not None and args.max_problems < 1:
        raise UserError(f"--max-problems={args.max_problems} leaves nothing to evaluate; use at least 1")
    if args.temperature < 0:
        raise UserError(f"--temperature={args.temperature} is negative; use 0 for the most likely answer")
    if min(args.batch_size, args.num_samples, args.max_new_tokens) < 1:
        flags = f"--batch-size={args.batch_size}, --num-samples={args.num_samples}"
        raise UserError(f"{flags} and --max-new-tokens={args.max_new_tokens} must be at least 1")
    positions = sequence_len and ROTARY_FACTOR * sequence_len
    if positions and args.max_new_tokens > positions - 2:
        problem = f"--max-new-tokens={args.max_new_tokens} leaves no room for a prompt"
        raise UserError(f"{problem} in the model's {positions} positions; lower --max-new-tokens")


def chatcore(scores: dict[str, Score]) -> float | None:
    """Returns ChatCORE: the mean accuracy of nanochat's six tasks, each rescaled so that guessing is 0 and a perfect
    score is 1. Returns None unless all six tasks are there."""
    if not all(name in scores for name in TASKS):
        return None
    centered = [(scores[n].accuracy - GUESSING.get(n, 0.0)) / (1 - GUESSING.get(n, 0.0)) for n in TASKS]
    return sum(centered) / len(centered)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    names = chosen_tasks(args.task_name)
    check_flags(args)
    with joined_processes(args.device_type, args.seed) as (_, _, device):
        evaluate(args, names, device)


def evaluate(args: argparse.Namespace, names: list[str], device: torch.device) -> None:
    """Evaluates the tasks with each forward pass, and writes the results and the report."""
    # The tasks load their data first, so that missing data fails before anything is computed.
    tasks: dict[str, Task] = {}
    eval_dir, sandbox = resolve_eval_dir(args.eval_dir), None
    for name in names:
        try:
            if name in RUNS_CODE:
                sandbox = describe_sandbox()
            tasks[name] = {**TASKS, **LOCAL_TASKS}[name](eval_dir)
        except (MissingDataError, SandboxError) as e:
            if not args.allow_missing:
                others = "To evaluate the others add --allow-missing; without any network, -a local"
                raise UserError(f"{name}: {e}. {others}") from e
            print0(f"{name} is left out: {e}")
    if not tasks:
        raise UserError("none of the tasks is to be had; use --eval-dir, or -a local without a network")
    if sandbox:
        say_once(sandbox)

    model, tokenizer, meta, method = load_for_inference(args.source, device, args)
    precisions = ["nvfp4", "bf16"] if args.precision == "both" else [args.precision]
    if method == "bf16":
        precisions = ["bf16"]
    model_tag, step = meta["model_tag"], meta["step"]
    what = f"{args.source} model {model_tag}, step {step}"
    print0(f"Evaluating the {what}")

    dtype = compute_dtype(device, args.dtype)
    key = key_of(model, tokenizer) | {"method": method, "dtype": str(dtype)}
    kept = Kept(checkpoint_folder(args.source, model_tag), step, key)
    settings = {flag: getattr(args, flag) for flag in SETTINGS}
    scores: dict[str, dict[str, Score]] = {precision: {} for precision in precisions}
    for precision in precisions:
        forward = f"{method} forward" if precision == "nvfp4" else "BF16 forward"
        if precision == "bf16" and device.type == "cpu":
            forward = "FP32 forward (a CPU computes in FP32 what a GPU computes in BF16)"
        print0(f"\n{forward}:")
        for name, task in tasks.items():
            asked = hashlib.sha256(json.dumps([settings, task.VERSION, list(task)]).encode()).hexdigest()[:12]
            measure = lambda: asdict(run_task(task, model, tokenizer, name, dtype=dtype, **settings))  # noqa: B023, E731
            try:
                with nf.full_precision(model) if precision == "bf16" else contextlib.nullcontext():
                    score = Score(**kept.part(f"{name} {asked}, {forward}", measure))
            except SandboxError as e:
                raise UserError(f"{name}: the sandbox worked before and fails now: {e}; start again") from e
            scores[precision][name] = score
            others = "".join(f"; {judge}: {Score(outcomes)}" for judge, outcomes in score.others.items())
            print0(f"{name}: {score}{others}")

    results: dict[str, Any] = {}
    lines = {"Model": what, "Method": method, "Precision": ", ".join(precisions)}
    lines["Sandbox"] = sandbox and sandbox.removeprefix("sandbox: ")
    lines["Flags"] = changed_flags(args, parse_args(["-i", args.source]))
    for precision, by_task in scores.items():
        # Results of the forward pass that the model was trained with have the plain names, and others a suffix.
        forward = "bf16" if precision == "bf16" else method
        suffix = "" if forward == checkpoint_method(meta) else f", {forward.replace('bf16', 'BF16')} forward"
        judged = {
            f"{name}, {judge}" if judge else name: (Score(outcomes), GUESSING.get(name, 0.0))
            for name, score in by_task.items()
            for judge, outcomes in {"": score.outcomes, **score.others}.items()
        }
        for name, (score, guessing) in judged.items():
            numbers = {"accuracy": score.accuracy, "count": score.count, "interval": score.interval, "text": str(score)}
            results[name + suffix] = numbers | {"guessing": guessing}
        if (core := chatcore(by_task)) is not None:
            results["ChatCORE" + suffix] = {"accuracy": core}
            print0(f"ChatCORE{suffix}: {core:.4f}")
    lines = {k: v for k, v in lines.items() if v is not None}
    kept.finish("benchmarks", scores=results)
    get_report(model_tag).log(f"Chat evaluation {args.source}", [lines])


if __name__ == "__main__":
    run_main(main)
