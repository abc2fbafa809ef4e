"""Evaluates checkpoints of a sweep with forward passes other than their own, on one validation text.

    python -m lab.study.sweep --methods bf16,clover,clover_feedback --keep bf16,clover,clover_feedback ...
    python -m lab.study.forwards --folder FOLDER
    python -m lab.reproduce forwards --results FOLDER/NAME.json       # after the sweep again: gaps, shares, targets

A method's gap to BF16 has two parts. The weights have learned something else, and the forward that is evaluated rounds.
The same weights in several forwards tell the parts apart. The default forwards are the plain one of clover (4/6, one
term), the one with error feedback, the one of two terms, and BF16. The results go to <folder>/forwards/<tag>.json.
"""

import argparse
import json
from pathlib import Path

import torch

import nanochat_fp4 as nf
from lab.study import long_runs
from lab.study import statistics as stats
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_horizon import judge, shown_p
from lab.study.sweep_scheduler import base_directory
from nanochat_fp4.common import autodetect_device_type, print0
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.data.dataloader import Text, tokenizing_distributed_data_loader_bos_bestfit
from nanochat_fp4.data.dataset import ensure_data
from nanochat_fp4.data.tokenizer import get_token_bytes
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.training.load_model import load_model

FORWARDS = "clover,clover_feedback,clover_refined,bf16"
GRAM_BATCHES = 8  # of training text, for the Gram matrices that error feedback needs
# A column of the table, and the method whose forward pass it is.
IN_FORWARD = {"4/6, one term": "clover", "feedback, one term": "clover_feedback", "two terms": "clover_refined"}
# What is wanted, the share of clover's gap, and what a run calls its bits per byte. "deployed" is one term: the own
# forward, or that of feedback where the method ends in two terms.
TARGETS = ("both in BF16", 0.5, "val_bpb_bf16"), ("deployed in plain NVFP4", 0.6, "deployed")
WITH_TARGETS = "clover_feedback", "clover_search_feedback", "clover_feedback_late"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Evaluates checkpoints of a sweep with several forward passes")
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="of the sweep (lab.study.sweep --folder)")
    add("--tags", default="*", help="glob pattern of the runs' tags")
    add("--forwards", default=FORWARDS, help="methods whose forward pass is taken")
    add("--data-dir", default=None, help="the text that the sweep trained on")
    add("--device-batch-size", type=int, default=32, help="rows of a batch")
    add("--eval-tokens", type=int, default=2**20, help="tokens of the validation text")
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    return parser.parse_args(argv)


def evaluate(tag: str, args: argparse.Namespace, device: torch.device, data_dir: str) -> dict[str, float]:
    """Validation bits per byte of a run's newest checkpoint, by forward. Of the base directory of the moment."""
    model, tokenizer, meta = load_model("base", device, "eval", tag)
    rows, length = args.device_batch_size, meta["model_config"]["sequence_len"]
    steps = args.eval_tokens // (rows * length)
    if not steps:
        raise UserError(f"--eval-tokens={args.eval_tokens} is less than a batch of {rows * length}; raise it")

    def batches(split: str):
        make = tokenizing_distributed_data_loader_bos_bestfit
        return make(tokenizer, rows, length, split, device=device, text=Text(data_dir))

    def look() -> None:
        for _, (x, _) in zip(range(GRAM_BATCHES), batches("train")):
            model(x)

    results = {}
    for name in args.forwards.split(","):
        nf.convert(model, name, backward=False, per_token_in_eval=False, verbose=False)
        with autocast(device.type), torch.no_grad():
            if nf.get_recipe(name).looks_at_inputs:
                nf.update_gram_matrices(model, look)
            with nf.quantize_weights_once(model):
                results[name] = evaluate_bpb(model, batches("val"), steps, get_token_bytes(device=device))
    return results


# ----------------------------------------------------------------------------------------------------------------------
# The table, from --results of lab.reproduce


def with_value(runs: list[dict], name: str) -> list[dict]:
    """The runs that have bits per byte in a forward, as r[name]. BF16's runs, which gaps are to, keep their own."""
    found = [r | {name: r["forwards"][name]} for r in runs if r["method"] != "bf16" and name in r.get("forwards", ())]
    return found + [r | {name: r["val_bpb"]} for r in runs if r["method"] == "bf16"]


def with_deployed(runs: list[dict]) -> list[dict]:
    """The runs that can be deployed in one term, as r["deployed"]."""
    feedback = with_value(runs, "clover_feedback")
    two_terms = {m for m in long_runs.methods_of(runs) if long_runs.ends_in_two_terms(runs, m)}
    one_term = [r | {"deployed": r["val_bpb"]} for r in runs if r["method"] not in two_terms]
    return one_term + [r | {"deployed": r["clover_feedback"]} for r in feedback if r["method"] in two_terms]


def rounded_afterwards(runs: list[dict], name: str) -> str:
    """The gap of BF16's weights in another forward, paired by seed; "-" where no run has it."""
    base = [r for r in runs if r["method"] == "bf16" and name in r.get("forwards", ())]
    gaps = [100 * (r["forwards"][name] / r["val_bpb"] - 1) for r in base]
    return stats.estimate(gaps).shown(2) if gaps else "-"


def forwards(context: Context) -> Outcome:
    """Gaps of each method's weights in each forward, and the targets of these, with one correction by Holm."""
    runs, content = long_runs.stored_runs(context)
    (size,), methods = {r["size"] for r in runs}, long_runs.methods_of(runs)
    values = {"own": "val_bpb", **IN_FORWARD, "BF16": "val_bpb_bf16"}
    cells = {m: {} for m in methods}
    for column, name in values.items():
        having = runs if name.startswith("val_bpb") else with_value(runs, name)
        for method, gap in stats.pooled_differences(having, size, "bf16", value=name).items():
            if method != "bf16":
                cells[method][column] = f"{gap.shown(2)} [{gap.n}]"
    if not any(column in cells[m] for m in methods for column in IN_FORWARD):
        raise UserError("no run of --results was evaluated in several forwards; run lab.study.forwards, then its sweep")
    steps, shown = long_runs.steps_of(runs), ("own", *IN_FORWARD, "BF16")
    rows = [[m, *long_runs.cost_cells(runs, m, steps), *(cells[m].get(c, "-") for c in shown)] for m in methods]
    afterwards = (rounded_afterwards(runs, name) for name in IN_FORWARD.values())
    rows.insert(0, ["bf16", *long_runs.cost_cells(runs, "bf16", steps), "0", *afterwards, "0"])
    found = []
    for what, target, value in TARGETS:
        having = with_deployed(runs) if value == "deployed" else runs
        beside_clover = stats.pooled_differences(having, size, "clover", value=value)
        tested = [m for m in WITH_TARGETS if m in beside_clover] if stats.has_gap(having, value) else []
        for method in tested:
            share, half, p = stats.against_target(having, method, target, value)
            found.append({"method": method, "what": what, "target": target, "share": share, "half": half, "p": p})
    judge(found)
    notes = []
    for of in found:
        share = stats.with_half(of["share"], of["half"], 3)
        said = f"share {share}, target {of['target']:.2f}, p by Holm {shown_p(of['p_holm'])}: {of['verdict']}"
        notes.append(f"{of['method']}, {of['what']}: {said}")
    notes += [
        f"{len(found)} targets are tested together, two-sided, with the pooled scatter of a run; shares are of "
        "clover's gap with the same forward. Intervals are 95%, without the correction",
        "deployed in plain NVFP4: the own forward, or feedback of one term for a method that ends in two; clover's is "
        "4/6, its own",
        "gaps in percent of BF16's bits per byte, [seeds]; bf16: its weights, rounded after training",
        long_runs.TIME_NOTE,
    ]
    header = ["weights of", "GEMM work", long_runs.TIME, *shown]
    title = "The same weights in several forward passes"
    return long_runs.outcome(runs, content, title, header, rows, notes, {"gaps": cells, "targets": found})


# ----------------------------------------------------------------------------------------------------------------------
# The command


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    names = args.forwards.split(",")
    for name in names:
        nf.get_recipe(name)
    device = torch.device(args.device_type or autodetect_device_type())
    checkpoints = args.folder / "base_checkpoints"
    tags = sorted({path.parent.name for path in checkpoints.glob(f"{args.tags}/model_*")})
    if not tags:
        problem = f"no checkpoint in {checkpoints} is named {args.tags}"
        raise UserError(f"{problem}; train with lab.study.sweep --keep METHOD")
    rows = []
    with base_directory(args.folder):
        data_dir = ensure_data(args.data_dir)
        (args.folder / "forwards").mkdir(exist_ok=True)
        for tag in tags:
            path = args.folder / "forwards" / f"{tag}.json"
            if not path.is_file():
                bpb = evaluate(tag, args, device, data_dir)
                record = {"tag": tag, "eval_tokens": args.eval_tokens, "bpb": bpb, "environment": environment_info()}
                atomic_write(path, json.dumps(record, indent=1) + "\n")
            bpb = json.loads(path.read_text())["bpb"]
            rows.append([tag, *(f"{bpb[name]:.5f}" if name in bpb else "-" for name in names)])
            print0(" ".join(rows[-1]))
    print0(table(["run", *names], rows))


if __name__ == "__main__":
    run_main(main)
