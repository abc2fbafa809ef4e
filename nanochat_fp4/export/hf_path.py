"""scripts/export.py with --hf-path: a model of transformers is converted and written. Also every export's batches."""

import argparse
from pathlib import Path
from typing import Any

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import print0
from nanochat_fp4.data.dataloader import tokenizing_distributed_data_loader_bos_bestfit
from nanochat_fp4.data.dataset import ensure_data
from nanochat_fp4.models.hf_model import load_hf_model
from nanochat_fp4.nvfp4.methods import get_recipe

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_hf(args: argparse.Namespace, device: torch.device, out: Path) -> None:
    """A model of transformers, by nf.save_quantized. Training text gives input scales, and inputs for feedback."""
    model, tokenizer = load_hf_model(args.hf_path, device)
    recipe, text = get_recipe(args.method or "clover"), []
    nf.convert(model.model, recipe)
    if recipe.looks_at_inputs or not args.weights_only:
        text = [x for x, _ in batches(args, tokenizer, model.sequence_len, device, "train", args.calibration_tokens)]
    if recipe.looks_at_inputs:
        nf.update_gram_matrices(model.model, lambda: [model(x) for x in text])
    inputs = () if args.weights_only else text
    form = args.format, tokenizer.tokenizer, inputs, DTYPES[args.dtype], args.overwrite
    for lost in nf.save_quantized(model.model, out, *form):
        print0(f"Lost, because the format cannot hold it: {lost}.")
    print0(f"Exported {args.hf_path} as {args.format} to {out}: {recipe.name}")


def batches(
    args: argparse.Namespace, tokenizer: Any, length: int, device: torch.device, split: str, tokens: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = args.device_batch_size
    loader = tokenizing_distributed_data_loader_bos_bestfit(
        tokenizer, rows, length, split, device=device, data_dir=ensure_data(args.data_dir)
    )
    return [batch for batch, _ in zip(loader, range(max(1, round(tokens / (rows * length)))))]
