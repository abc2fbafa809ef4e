"""Evaluates checkpoints of a sweep with forward passes other than their own, on one validation text.

    python -m lab.study.sweep --methods bf16,clover,clover_search --keep bf16,clover,clover_search ...
    python -m lab.study.forwards --folder FOLDER
    python -m lab.reproduce forwards --results FOLDER/NAME.json       # after the sweep again: gaps, shares, targets

A method's gap to BF16 has two parts: training found other weights, and the forward pass that is evaluated rounds.
Evaluating the same weights with several forward passes tells the parts apart. The default ones are clover's own and
BF16. The results are written to <folder>/forwards/<tag>.json.
"""

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from lab import table
from lab.study.sweep_results import data_name
from lab.study.sweep_scheduler import base_directory
from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.common import add_recipes_argument, autodetect_device_type, print0
from nanochat_fp4.data.dataloader import Documents, evaluation_rows, packed_rows
from nanochat_fp4.data.dataset import Survey, ensure_data, open_text
from nanochat_fp4.data.tokenizer import get_token_bytes
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import environment_info
from nanochat_fp4.models.cross_entropy import default_head
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.training.checkpoint_manager import list_steps, read_meta
from nanochat_fp4.training.load_model import load_model
from scripts.base_train import look_back

FORWARDS = "clover,bf16"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Evaluates checkpoints of a sweep with several forward passes")
    add = parser.add_argument
    add_recipes_argument(parser)
    add("--folder", type=Path, required=True, help="of the sweep (lab.study.sweep --folder)")
    add("--tags", default="*", help="glob pattern of the runs' tags")
    add("--forwards", default=FORWARDS, help="methods whose forward pass is taken")
    text = "the text that the sweep trained on (default: DATA_DIR, else the folder that the first run read)"
    add("--data-dir", default=None, help=text)
    text = "rows of a batch, which have one tensor scale (default: those of the run)"
    add("--device-batch-size", type=int, default=0, help=text)
    add("--eval-tokens", type=int, default=0, help="tokens of the validation text (default: those of the run)")
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    return parser.parse_args(argv)


def evaluate(run: Path, args: argparse.Namespace, device: torch.device, text: Survey, before: dict) -> dict[str, Any]:
    """Returns the record of a run: "bpb", the validation bits per byte of its newest checkpoint for each forward pass,
    "eval_tokens", and "rows" of a batch. `run` is its folder in the current base directory. `before` is an earlier
    record, whose values are taken if it is of as many tokens and rows."""
    meta = read_meta(run, list_steps(run)[0])
    length, config = meta["model_config"]["sequence_len"], meta["user_config"]
    wanted, _ = evaluation_rows(args.eval_tokens or config["eval_tokens"], 1, length, 1)
    # Batches of equal size end with the last row.
    rows = math.gcd(wanted, args.device_batch_size or config["device_batch_size"])
    how = {"eval_tokens": wanted * length, "rows": rows}
    results = dict(before["bpb"]) if how.items() <= before.items() else {}
    lacks = [name for name in args.forwards.split(",") if name not in results]
    if lacks:
        model, tokenizer, _ = load_model("base", device, "eval", run.name)
    for name in lacks:
        nf.convert(model, name, backward=False, per_token_in_eval=False, verbose=False)
        model.lm_head.precision = default_head(name)
        batches = packed_rows(Documents(tokenizer, length, open_text("val", text)), rows, device)
        with autocast(device.type), torch.no_grad(), nf.quantize_weights_once(model):
            results[name] = evaluate_bpb(model, batches, wanted // rows, get_token_bytes(device=device))
    return {"tag": run.name, **how, "bpb": results, "environment": environment_info()}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    names = args.forwards.split(",")
    for name in names:
        nf.get_recipe(name)
    device = torch.device(args.device_type or autodetect_device_type())
    checkpoints = args.folder / "base_checkpoints"
    tags = sorted({path.parents[1].name for path in checkpoints.glob(f"{args.tags}/step_*/model_*")})
    if not tags:
        problem = f"no checkpoint in {checkpoints} is named {args.tags}"
        raise UserError(f"{problem}; train with lab.study.sweep --keep METHOD")
    rows = []
    with base_directory(args.folder):
        first = checkpoints / tags[0]
        trained_on = read_meta(first, list_steps(first)[0])["user_config"]["data_dir"]
        text = ensure_data(args.data_dir or os.environ.get("DATA_DIR") or trained_on)
        print0(f"evaluates {len(tags)} runs on {data_name(str(text.folder))}")
        for tag in tags:
            if problem := look_back(checkpoints / tag, data_dir=text):
                mend = "give the text of its sweep with --data-dir, and choose its runs with --tags"
                raise UserError(f"{data_name(str(text.folder))} is not the text of {tag}: {problem}; {mend}")
        (args.folder / "forwards").mkdir(exist_ok=True)
        for i, tag in enumerate(tags, 1):
            path = args.folder / "forwards" / f"{tag}.json"
            print0(f"run {i} of {len(tags)}: {tag}", flush=True)
            record = evaluate(
                checkpoints / tag, args, device, text, json.loads(path.read_text()) if path.is_file() else {}
            )
            atomic_write(path, json.dumps(record, indent=1) + "\n")
            rows.append([tag, *(f"{record['bpb'][name]:.5f}" for name in names)])
            print0(" ".join(rows[-1]))
    print0(table(["run", *names], rows))


if __name__ == "__main__":
    run_main(main)
