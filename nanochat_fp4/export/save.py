"""Out again: a converted model of transformers as a folder that transformers and servers read."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nanochat_fp4.errors import UserError
from nanochat_fp4.export import folder as folders
from nanochat_fp4.export import huggingface
from nanochat_fp4.export.weights import calibrate, forward_weights
from nanochat_fp4.files import atomic_write
from nanochat_fp4.nvfp4.experts import ExpertLinear
from nanochat_fp4.nvfp4.linear import QuantConv1D


@torch.no_grad()
def save_quantized(
    model: nn.Module,
    folder: str | Path,
    format: str = "compressed-tensors",  # noqa: A002
    tokenizer: Any = None,
    calibration: Iterable[Tensor] = (),
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> list[str]:
    """Writes a model of transformers that nf.convert has changed as NVFP4, with its config and tokenizer.

    The codes and block scales are those that the trained forward pass multiplies, to the bit, as scripts.export writes
    them for the project's own models. transformers and vLLM read compressed-tensors; TensorRT-LLM and vLLM modelopt.

    model:       a converted PreTrainedModel, with nn.Linear layers in 4 bits
    folder:      a new one, or one that an export wrote, with overwrite; it is replaced whole
    format:      "compressed-tensors" or "modelopt"
    tokenizer:   of transformers; saved beside the weights
    calibration: token ids (B, T) on which input scales are found. None: weights in 4 bits, inputs in 16
    dtype:       of what is not in 4 bits
    Returns what the format cannot hold, a line each. Raises UserError for another format, a model that is not of
    transformers or not converted, experts in stacked parameters, Conv1D layers, a folder that is not to be replaced,
    and where safetensors is not installed.

    >>> nf.save_quantized(torch.nn.Linear(32, 16), "folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nanochat_fp4.errors.UserError: save_quantized: Linear is no model of transformers; ...
    """
    if format not in huggingface.FORMATS:
        raise UserError(f"save_quantized: the format is {format!r}, expected one of {', '.join(huggingface.FORMATS)}")
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_json_string"):
        raise UserError(
            f"save_quantized: {type(model).__name__} is no model of transformers; scripts.export writes nanochat_fp4's"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, ExpertLinear | QuantConv1D) and layer.quantizes:
            kind = "an expert" if isinstance(layer, ExpertLinear) else "transposed (Conv1D)"
            raise UserError(f"save_quantized: {name} is {kind}, which {format} has no name for; skip it in nf.convert")
    out = Path(folder).resolve()
    folders.prepare(out, overwrite)  # before what takes minutes
    weights = forward_weights(model)
    batches = list(calibration)
    input_scales = calibrate(model, weights, batches) if batches else None
    if unseen := sorted(set(weights.tensors) - set(input_scales or weights.tensors)):
        raise UserError(f"save_quantized: {unseen[0]} read nothing of the calibration text; give more of it, or none")
    tied, tensors = set(getattr(model, "all_tied_weights_keys", None) or ()), {}
    for name, tensor in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if layer in weights.tensors:
            scale = None if input_scales is None else input_scales[layer]
            parts = huggingface.FORMATS[format](weights.tensors[layer], scale)
            tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
        elif name not in tied:
            tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    with folders.fresh_folder(out) as part:
        huggingface.save_tensors(part, tensors)
        linears = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in weights.tensors]
        config = json.loads(model.config.to_json_string()) | huggingface.dtype_entries(dtype)
        config["architectures"] = [type(model).__name__]
        config |= huggingface.quantization_entries(part, format, linears, weights_only=input_scales is None)
        atomic_write(part / "config.json", json.dumps(config, indent=2) + "\n")
        if (generation := getattr(model, "generation_config", None)) is not None:
            atomic_write(part / "generation_config.json", generation.to_json_string())
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        folders.publish(part, out, overwrite)
    return [weights.lost] if weights.lost else []
