"""
Evaluates a base model: bits per byte of train and validation text, and a few samples. From the root of the
repository:

    python -m scripts.base_loss
    torchrun --standalone --nproc_per_node=8 -m scripts.base_loss
    python -m scripts.base_loss --hf-path openai-community/gpt2     # a causal model of transformers, on the same text

The text is the run's, unless --data-dir or DATA_DIR names another. The rows are the first ones of each split, as in
nanochat. Both splits are evaluated twice: with the forward pass of the method that the model was trained with, and with
the same weights in BF16 (FP32 on a CPU).
"""

import argparse
import contextlib
from os.path import expanduser
from pathlib import Path

import torch

import nanochat_fp4 as nf
from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.common import get_base_dir, joined_processes, print0, resolve_method
from nanochat_fp4.data.dataloader import Documents, evaluation_rows, packed_rows
from nanochat_fp4.data.dataset import add_data_arguments, count_tokens, ensure_data, open_text, validation_text
from nanochat_fp4.data.tokenizer import get_token_bytes
from nanochat_fp4.evaluation.kept import Kept, key_of
from nanochat_fp4.evaluation.loss_eval import evaluate_bpb
from nanochat_fp4.evaluation.report import get_report
from nanochat_fp4.generation.engine import check_finite, draw_samples
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.hf_model import check_hf_flags, load_hf_model
from nanochat_fp4.progress import Progress
from nanochat_fp4.training.flags import add_model_arguments
from nanochat_fp4.training.load_model import checkpoint_folder, choose_method, load_model
from scripts.base_train import text_to_measure

SPLIT_TOKENS = 40 * 524288
# A CPU would need many minutes for as many tokens as a GPU evaluates, for a model of any size.
SPLIT_TOKENS_CPU = 2**16
# A short run has seen these, and nothing else, so that train BPB below val BPB is no sign of too many epochs.
TRAIN_ROWS = "the text's first rows, which training in stored order reads first"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(description="Evaluate loss on train/val splits and sample from model")
    add = parser.add_argument
    add("--device-batch-size", type=int, default=32, help="per-device batch size")
    default = f"{SPLIT_TOKENS:,} on a GPU, {SPLIT_TOKENS_CPU:,} elsewhere"
    add("--split-tokens", type=int, help=f"number of tokens to evaluate per split (default: {default})")
    add_model_arguments(parser)
    add_data_arguments(parser, "the run's, for --hf-path as in training")
    add("--hf-path", type=expanduser, help="HuggingFace model path (e.g. openai-community/gpt2), or a folder")
    return parser.parse_args(argv)


def check_flags(args: argparse.Namespace, sequence_len: int, processes: int) -> None:
    """Raises UserError for values that this stage cannot use. The plan calls this function, too, before any stage has
    run."""
    if args.split_tokens <= 0 or args.split_tokens % sequence_len:
        problem = f"--split-tokens={args.split_tokens} is not a multiple of {sequence_len}, the tokens of a row"
        raise UserError(f"{problem}; choose a multiple")
    if args.device_batch_size < 1:
        raise UserError(f"--device-batch-size={args.device_batch_size} has no row; use at least 1")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with joined_processes(args.device_type) as (rank, world_size, device):
        if args.split_tokens is None:
            args.split_tokens = SPLIT_TOKENS if device.type == "cuda" else SPLIT_TOKENS_CPU
        evaluate(args, device, rank, world_size)


def evaluate(args: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    """Evaluates both splits with both forward passes, draws samples, and writes the report."""
    if args.hf_path:
        method, described = check_hf_flags(args)  # A cheap check comes before the download of text.
        survey, other = ensure_data(args.data_dir, column=args.text_column), ""
        model, tokenizer = load_hf_model(described, device), described.tokenizer
        sequence_len, token_bytes, model_tag = model.sequence_len, tokenizer.token_bytes(device), None
        step, trained, name = 0, model.precision, args.hf_path
    else:
        model, tokenizer, meta = load_model("base", device, "eval", args.model_tag, args.step)
        sequence_len, token_bytes = meta["model_config"]["sequence_len"], get_token_bytes(device=device)
        step, trained = meta["step"], resolve_method(meta.get("user_config", {}).get("method", "bf16"))
        method = choose_method(model, meta, args.method)  # This is the method at the end of the run.
        model_tag = meta["model_tag"]
        survey, other = text_to_measure(model_tag, args.data_dir, args.text_column)
        name = f"base model {model_tag} (step {step})"
    check_flags(args, sequence_len, world_size)
    if method != "bf16" or not args.hf_path:
        nf.convert(model, method, per_token_in_eval=False, verbose=bool(args.hf_path or args.method))
    forward = trained if args.hf_path and method == "bf16" else method  # This is the forward's name in the output.
    print0(f"Evaluating {name} on {survey.folder}")

    exact = "BF16" if device.type == "cuda" else "FP32"  # as models.gpt.autocast
    num_rows, steps = evaluation_rows(args.split_tokens, args.device_batch_size, sequence_len, world_size)

    text = {split: open_text(split, survey, args.text_column) for split in ("train", "val")}

    def bpb(split: str, what: str) -> float:
        source = Documents(tokenizer, sequence_len, text[split])
        loader = packed_rows(source, args.device_batch_size, device, num_rows=num_rows)
        progress = Progress(total=steps, desc=f"{split} bpb, {what}", unit="batch")
        once = nf.quantize_weights_once(model) if hasattr(model, "nf_report") else contextlib.nullcontext()
        with progress, autocast(device.type), once:
            measured = evaluate_bpb(model, loader, steps, token_bytes, progress.update)
        return float(check_finite(torch.tensor(measured), model, "bits per byte"))

    key = key_of(model, tokenizer) | {
        "rows": num_rows,
        "steps": steps,
        "batch": (args.device_batch_size, world_size),  # It counts because the rows of a batch share tensor scales.
        "text": [(part.digest(), part.column) for parts in text.values() for part in parts],
    }
    folder = checkpoint_folder("base", model_tag) if model_tag else Path(get_base_dir()) / "base_loss"
    kept = Kept(folder, step, key)

    results = {}
    for split in ("train", "val"):
        measured = kept.part(f"{split} bpb, {forward}", lambda: bpb(split, forward))  # noqa: B023
        results[f"{split}_bpb"] = measured
        if forward == "bf16":
            results[f"{split}_bpb_bf16"] = measured
        if method != "bf16" or (not args.hf_path and model.lm_head.quantizes):
            with nf.full_precision(model):
                measured = kept.part(f"{split} bpb, {exact} forward", lambda: bpb(split, f"{exact} forward"))  # noqa: B023
            results[f"{split}_bpb_bf16"] = measured
        line = f"{split} bpb: {results[f'{split}_bpb']:.4f} ({exact if forward == 'bf16' else forward + ' forward'})"
        line += f", {results[f'{split}_bpb_bf16']:.4f} ({exact})" if method != "bf16" else ""
        print0(line + f" on {TRAIN_ROWS}" * (split == "train"))

    samples = draw_samples(model, tokenizer) if rank == 0 and not args.hf_path else []
    for sample in samples:
        print0(f"  {sample}")
    lines = {"model": name, "method": trained, "forward": forward, "tokens per split": args.split_tokens}
    lines["train BPB is of"] = TRAIN_ROWS
    lines |= {key.replace("_bpb_bf16", " BPB, BF16 forward").replace("_bpb", " BPB"): v for key, v in results.items()}
    section = "Base model loss"
    section += f" of {name}" if args.hf_path else f", {method} forward" if args.method else ""
    section += f", on {survey.folder.name}" * bool(other)
    validated = {"val_text": validation_text(survey, args.text_column), "tokens": args.split_tokens}
    validated["val_text_tokens"] = count_tokens(text["val"], tokenizer)
    # The report's val BPB of a run is that of its own forward pass and text.
    event = "other_forward" if args.method or other else "base_loss"
    kept.finish(event, **{key.removeprefix("val_"): v for key, v in results.items()}, **validated, samples=samples)
    get_report(model_tag).log(section, [lines])


if __name__ == "__main__":
    run_main(main)
