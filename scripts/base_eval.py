"""
Evaluates the CORE metric of a base model.

    python -m scripts.base_eval
    torchrun --nproc_per_node=8 -m scripts.base_eval

CORE needs nanochat's eval bundle of about 160 MB, which holds core.yaml, eval_meta_data.csv and eval_data/. The bundle
is read from --bundle-dir, or otherwise from <base dir>/eval_bundle. If it is missing there, it is downloaded. Without
the bundle the program ends with an error.
"""

import argparse
import contextlib
import functools
from os.path import expanduser
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, require, run_main
from nanochat_fp4.common import base_dir_of, get_base_dir, joined_processes, print0
from nanochat_fp4.data.sources import Source
from nanochat_fp4.evaluation.core_eval import EVAL_BUNDLE_URL, evaluate_model, find_bundle, read_tasks
from nanochat_fp4.evaluation.kept import Kept, key_of
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.hf_model import check_hf_flags, load_hf_model
from nanochat_fp4.training.flags import add_model_arguments
from nanochat_fp4.training.load_model import checkpoint_folder, checkpoint_method, find_model_tag, load_for_inference


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Evaluate the CORE metric of a base model")
    add = parser.add_argument
    add("--hf-path", type=expanduser, help="HuggingFace model path (e.g. openai-community/gpt2), or a folder")
    add("--max-per-task", type=int, default=-1, help="Max examples per task to evaluate (-1 = disable)")
    add_model_arguments(parser, "nvfp4", "bf16")
    text = "folder of the eval bundle (default: <base dir>/eval_bundle, downloaded)"
    add("--bundle-dir", type=expanduser, help=text)
    return parser.parse_args(argv)


def needs(args: argparse.Namespace) -> list[Source]:
    """Returns the inputs that this stage needs, for a plan: the eval bundle, and the package that reads it."""
    folder = Path(args.bundle_dir) if args.bundle_dir else base_dir_of() / "eval_bundle"
    url = "" if args.bundle_dir or folder.exists() else EVAL_BUNDLE_URL
    remedy = f"unpack {EVAL_BUNDLE_URL} into {folder.parent}, or CORE_ARGS=--bundle-dir=folder"
    read = functools.partial(read_tasks, args.bundle_dir, args.max_per_task)
    package = Source("the package yaml for CORE", functools.partial(require, "yaml"))
    return [Source("the eval bundle", read, url, remedy, vital=True), package]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with joined_processes(args.device_type) as (rank, _, device):
        evaluate(args, device, rank)


def evaluate(args: argparse.Namespace, device: torch.device, rank: int) -> None:
    """Evaluates CORE and writes the table and the report. Finished tasks are kept if it is interrupted."""
    # Cheap checks come before the download of the bundle, and a missing bundle fails before a model is loaded.
    if args.hf_path is not None:
        method, described = check_hf_flags(args)
    else:
        find_model_tag("base", args.model_tag)
    find_bundle(args.bundle_dir)
    precision: Any = contextlib.nullcontext()
    model_tag, step = None, 0
    if args.hf_path is not None:
        model, tokenizer = load_hf_model(described, device), described.tokenizer
        own = model.precision  # The forward of the model as it is stored.
        if method == "bf16":
            method = own
        else:
            nf.convert(model, method, backward=False)
        name, slug = args.hf_path, args.hf_path.replace("/", "-")
    else:
        model, tokenizer, meta, method = load_for_inference("base", device, args)
        own = checkpoint_method(meta)
        model_tag, step = meta["model_tag"], meta["step"]
        name, slug = f"base model {model_tag} (step {step})", f"base_model_{step:06d}"
    if args.precision == "bf16" and method not in ("bf16", "fp32"):
        precision, method = nf.full_precision(model), "bf16"
    elif hasattr(model, "nf_report"):
        precision = nf.quantize_weights_once(model)
    print0(f"CORE of {name}, {method} forward")
    folder = Path(get_base_dir()) / "base_eval" / (model_tag or "hf")  # nanochat's tables lie in base_eval itself.
    log_folder = checkpoint_folder("base", model_tag) if model_tag else folder
    kept = Kept(log_folder, step, key_of(model, tokenizer) | {"forward": method})
    with precision, autocast(device.type):
        out = evaluate_model(model, tokenizer, device, args.max_per_task, args.bundle_dir, part=kept.part)
    lines = [f"{'Task':<35}, {'Accuracy':<10}, {'Centered':<10}"]
    for label, accuracy in out["results"].items():
        lines.append(f"{label:<35}, {accuracy:<10.6f}, {out['centered_results'][label]:<10.6f}")
    lines.append(f"{'CORE':<35}, {'':<10}, {out['core_metric']:<10.6f}")
    print0("\n".join(lines))
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / f"{slug}.csv", "\n".join(lines) + "\n")
    print0("".join(f"note: {note}\n" for note in out["notes"]), end="")
    about = {"Model": name, "Forward": method, "CORE metric": out["core_metric"], "Max per task": args.max_per_task}
    about |= {"Notes": "; ".join(out["notes"])}
    # A forward pass that is not the method's own gets a column of its own in the report.
    column = "CORE" if method == own else f"CORE, {method} forward"
    kept.finish("benchmarks", scores={column: {"accuracy": out["core_metric"]}})
    get_report(model_tag).log("Base model evaluation", [about, out["centered_results"]])


if __name__ == "__main__":
    run_main(main)
