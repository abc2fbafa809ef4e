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
from nanochat_fp4.export.stacked import are_rows, as_in_checkpoints, numbered_rows, source_of
from nanochat_fp4.export.weights import calibrate, forward_weights
from nanochat_fp4.files import atomic_write
from nanochat_fp4.nvfp4.format import NVFP4Tensor
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

    Codes and block scales are the trained forward pass's, to the bit. scripts.export writes the same for the project's
    own models. transformers and vLLM read compressed-tensors.

    model:       a converted PreTrainedModel, with nn.Linear layers and experts in 4 bits
    folder:      a new folder. With overwrite, an earlier export is replaced whole
    format:      "compressed-tensors"
    tokenizer:   transformers' tokenizer, saved beside the weights
    calibration: token ids (B, T) on which input scales are found. None: weights in 4 bits, inputs in 16
    dtype:       of what is not in 4 bits
    Returns a line for each thing that the format cannot hold. Raises UserError for another format, and for a model that
    is not of transformers or not converted. Conv1D layers and gpt-oss's experts are refused, too. So is a folder that
    no export wrote. safetensors must be installed.

    >>> nf.save_quantized(torch.nn.Linear(32, 16), "folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nanochat_fp4.errors.UserError: save_quantized: Linear is no model of transformers; ...
    """
    if format != "compressed-tensors":
        raise UserError(f"save_quantized: the format is {format!r}, expected 'compressed-tensors'")
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_json_string"):
        raise UserError(
            f"save_quantized: {type(model).__name__} is no model of transformers; scripts.export writes nanochat_fp4's"
        )
    for name, layer in model.named_modules():
        if isinstance(layer, QuantConv1D) and layer.quantizes:
            raise UserError(
                f"save_quantized: {name} is transposed (Conv1D), which {format} has no name for; skip it in nf.convert"
            )
    out = Path(folder).resolve()
    folders.prepare(out, overwrite)  # before what takes minutes
    weights = forward_weights(model)
    batches = list(calibration)
    input_scales = calibrate(model, weights, batches) if batches else None
    if unseen := sorted(set(weights.tensors) - set(input_scales or weights.tensors)):
        raise UserError(f"save_quantized: {unseen[0]} read nothing of the calibration text; give more of it, or none")
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and f"{n}.weight" in tied]
    sizes, tensors = {name: len(t.codes) for name, t in weights.tensors.items()}, {}
    for name, value in as_in_checkpoints(model, state | numbered_rows(model, sizes)).items():
        layer = name.removesuffix(".weight")
        if are_rows(value):
            found = source_of(name, value, sizes)
            if found is None:
                raise UserError(
                    f"save_quantized: checkpoints of {type(model).__name__} have one {name} for all experts, which "
                    f"{format} has no codes for; skip it in nf.convert"
                )
            source, rows = found
            t = weights.tensors[source]
            scales = t.scales.view(torch.uint8)[rows].view(t.scales.dtype)
            scale = None if input_scales is None else input_scales[source]
            parts = huggingface.compressed_tensors(NVFP4Tensor(t.codes[rows], scales, t.tensor_scale), scale)
            tensors |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
        else:
            tensors[name] = value.to(dtype) if value.is_floating_point() else value
            if layer != name and value.dim() == 2 and value.data_ptr() not in embeddings:
                ignored.append(layer)
    with folders.fresh_folder(out) as part:
        huggingface.save_tensors(part, tensors)
        config = json.loads(model.config.to_json_string()) | huggingface.dtype_entries(dtype)
        config["architectures"] = [type(model).__name__]
        config["quantization_config"] = huggingface.quantization_config(ignored, weights_only=input_scales is None)
        atomic_write(part / "config.json", json.dumps(config, indent=2) + "\n")
        if (generation := getattr(model, "generation_config", None)) is not None:
            atomic_write(part / "generation_config.json", generation.to_json_string())
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        folders.publish(part, out, overwrite)
    return [weights.lost] if weights.lost else []
