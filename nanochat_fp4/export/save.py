"""Writes a converted model of transformers as a folder that transformers and servers can read."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanochat_fp4.cli import UserError, logger, one_line, require
from nanochat_fp4.export import huggingface
from nanochat_fp4.export.folder import new_export
from nanochat_fp4.export.stacked import are_rows, as_in_checkpoints, numbered_rows, source_of
from nanochat_fp4.export.weights import Weights, calibrate, check_values, forward_weights, with_unread_experts
from nanochat_fp4.files import atomic_write
from nanochat_fp4.nvfp4.convert import QuantConv1D
from nanochat_fp4.nvfp4.format import FP8, NVFP4Tensor
from nanochat_fp4.nvfp4.layer import QuantLinear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.no_grad()
def save_quantized(
    model: nn.Module,
    folder: str | Path,
    format: str = "compressed-tensors",  # noqa: A002
    tokenizer: Any = None,
    calibration: Iterable[Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
) -> list[str]:
    """Writes a model of transformers that nf.convert has changed as NVFP4, with its config and its tokenizer.

    The written codes and block scales are those of the trained forward pass, to the bit. scripts.export writes the same
    format for this project's own models. docs/export.md lists the servers that read it, and says which were tried.

    model:       a converted PreTrainedModel whose nn.Linear layers and experts are in 4 bits
    folder:      a new or an empty folder. With overwrite it may be an earlier export, which is replaced.
    format:      "compressed-tensors"
    tokenizer:   the model's tokenizer (of transformers), which is saved beside the weights
    calibration: a list of token ids (B, T). The range of each layer's inputs is measured on them. An expert that no
                 token reaches gets the input range of the other experts of its layer. Without calibration only weights
                 are in 4 bits, and servers compute with inputs in 16 bits.
    dtype:       the dtype of all tensors that are not in 4 bits: torch.bfloat16, torch.float16 or torch.float32

    The folder appears complete, or not at all. All ranks of torchrun may call this function: the first one writes, and
    the others wait for it. If another process is writing to the folder, the function waits until it has finished.

    Returns a line of text for each thing that the folder cannot hold. Raises UserError for other arguments, for a model
    that is not one of transformers or was not converted, for values that are not finite or that dtype cannot hold, for
    Conv1D layers, experts of gpt-oss, adapters, and weights that FSDP has divided, for a folder that is not an export,
    and if safetensors is not installed.

    >>> nf.save_quantized(torch.nn.Linear(32, 16), "folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nanochat_fp4.cli.UserError: save_quantized: Linear is no model of transformers; ...
    """
    if format != "compressed-tensors":
        raise UserError(
            f"save_quantized: the format is {format!r}, expected 'compressed-tensors'; scripts.export writes GGUF and "
            "other formats, of models that were trained by this project"
        )
    if dtype not in DTYPES:
        raise UserError(f"save_quantized: dtype is {dtype!r}, expected one of {', '.join(map(str, DTYPES))}")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise UserError(f"save_quantized: tokenizer is a {type(tokenizer).__name__}, expected one of transformers")
    calibration = () if calibration is None else calibration
    if isinstance(calibration, Tensor) or not isinstance(calibration, Iterable):
        got = type(calibration).__name__
        raise UserError(f"save_quantized: calibration is a {got}, expected a list of token ids (B, T)")
    model = getattr(model, "_orig_mod", model)  # The model inside of torch.compile's module.
    _check_model(model)
    batches = list(calibration)
    _check_calibration(model, batches)
    require("safetensors")
    out = Path(folder).expanduser().resolve()

    def write() -> list[str]:
        with new_export(out, overwrite) as part:  # This refuses a wrong folder before minutes of work.
            notes = _write(model, part, batches, dtype)
            if tokenizer is not None:
                tokenizer.save_pretrained(part)
        if tokenizer is None:
            logger.warning(f"save_quantized: no tokenizer is in {out}; pass tokenizer=, or copy its files there")
        return notes

    return _once_of_all_ranks(str(out), write)


def _check_model(model: nn.Module) -> None:
    """Raises UserError for a model that cannot be written in this format."""
    if not isinstance(model, nn.Module) or not hasattr(getattr(model, "config", None), "to_json_string"):
        raise UserError(
            f"save_quantized: {type(model).__name__} is no model of transformers; scripts.export writes nanochat_fp4's"
        )
    others = {id(m.weight): n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantConv1D) and layer.quantizes:
            raise UserError(
                f"save_quantized: {name} is transposed (Conv1D), which compressed-tensors has no name for; skip it in "
                "nf.convert"
            )
        if isinstance(layer, QuantLinear) and layer.quantizes and id(layer.weight) in others:
            raise UserError(
                f"save_quantized: {name} is in 4 bits and shares its weight with {others[id(layer.weight)]}, which is "
                "not; skip it in nf.convert"
            )
        if hasattr(layer, "base_layer"):  # A layer of peft.
            raise UserError(
                f"save_quantized: {name} has an adapter; merge it into the weights first (merge_and_unload), and save "
                "the result"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or not parameter.numel():  # Divided by FSDP2, or by DeepSpeed.
            raise UserError(
                f"save_quantized: {name} is divided among processes; gather the weights (get_model_state_dict with "
                "full_state_dict) into a model of one process"
            )


def _check_calibration(model: nn.Module, batches: Sequence[Tensor]) -> None:
    """Raises UserError unless the batches are token ids (B, T) of the model's vocabulary."""
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(table, "num_embeddings", None)
    expected = "expected token ids (B, T), whole numbers"
    for ids in batches:
        if not isinstance(ids, Tensor):
            raise UserError(f"save_quantized: calibration has a {type(ids).__name__}, {expected}")
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            dtype = str(ids.dtype).removeprefix("torch.")
            raise UserError(
                f"save_quantized: calibration has {tuple(ids.shape)} in {dtype}, {expected}; make one row of a text "
                "with ids[None]"
            )
        if rows and ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < rows):
            raise UserError(
                f"save_quantized: calibration has token ids from {int(ids.min())} to {int(ids.max())}, expected 0 to "
                f"{rows - 1}; take the model's own tokenizer"
            )


def _write(model: nn.Module, folder: Path, calibration: list[Tensor], dtype: torch.dtype) -> list[str]:
    """Writes weights and configs into an empty folder. Returns the lines that save_quantized returns."""
    check_values(model.state_dict())
    weights = forward_weights(model)
    notes = [weights.lost] if weights.lost else []
    input_scales = None
    if calibration:
        input_scales, notes_of_scales = _input_scales(model, weights, calibration, dtype)
        notes += notes_of_scales
    tensors, layers = _tensors(model, weights, input_scales, dtype)
    huggingface.save_tensors(folder, tensors)
    config = json.loads(model.config.to_json_string()) | huggingface.dtype_entries(dtype)
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = huggingface.quantization_config(
        layers.ignored, input_scales is None, layers.four_bits, layers.eight_bits
    )
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")
    if (generation := getattr(model, "generation_config", None)) is not None:
        atomic_write(folder / "generation_config.json", generation.to_json_string())
    return notes


def _input_scales(
    model: nn.Module, weights: Weights, calibration: list[Tensor], dtype: torch.dtype
) -> tuple[dict[str, float], list[str]]:
    """Returns the input scale of each layer, and what is to be said of them. A layer that reads nothing of the
    calibration text stays in dtype: its weight leaves `weights`."""
    read, notes = calibrate(model, weights, calibration), []
    if not read:
        raise UserError("save_quantized: no layer read anything of the calibration text; give other token ids")
    input_scales = with_unread_experts(read, weights.tensors)
    if guessed := sorted(set(input_scales) - set(read)):
        notes.append(
            f"{len(guessed)} experts read nothing of the calibration text, {guessed[0]} among them; they have the "
            "input range of the experts beside them"
        )
    if unread := sorted(set(weights.tensors) - set(input_scales)):
        notes.append(f"{', '.join(unread[:4])} read nothing of the calibration text: {len(unread)} in {dtype}")
        weights.tensors = {name: t for name, t in weights.tensors.items() if name in input_scales}
    return input_scales, notes


class _Layers(NamedTuple):
    """The names of the layers in the folder."""

    ignored: list[str]  # These are in dtype.
    four_bits: list[str]
    eight_bits: list[str]


def _tensors(
    model: nn.Module, weights: Weights, input_scales: dict[str, float] | None, dtype: torch.dtype
) -> tuple[dict[str, Tensor], _Layers]:
    """Returns all tensors of the folder by their names in it, and the layers that they belong to."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    # transformers compares with the names of modules, and other readers with those of the file.
    ignored = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n not in weights.tensors]
    layers, tensors = _Layers(ignored, [], []), {}
    sizes = {name: len(t.codes) for name, t in weights.tensors.items()}
    rows = numbered_rows(model, sizes)
    if any(f"{name}.weight" not in rows for name in sizes):  # The model has stacked experts.
        logger.warning(
            "save_quantized: transformers 5.24 reads experts without their weight_global_scale, which is wrong; "
            "nf.load_quantized and the package compressed-tensors read them right"
        )
    check_values({name: tensor for name, tensor in state.items() if name not in rows}, dtype)
    for name, value in as_in_checkpoints(model, state | rows).items():
        layer = name.removesuffix(".weight")
        if not are_rows(value):
            tensors[name] = value.to(dtype) if value.is_floating_point() else value
            is_layer = layer != name and value.dim() == 2 and value.data_ptr() not in embeddings
            if is_layer and layer not in layers.ignored:
                layers.ignored.append(layer)
            continue
        found = source_of(name, value, sizes)
        if found is None:
            raise UserError(
                f"save_quantized: checkpoints of {type(model).__name__} have one {name} for all experts, which "
                "compressed-tensors has no codes for; skip it in nf.convert"
            )
        source, its_rows = found
        weight = _rows_of(weights.tensors[source], its_rows)
        (layers.eight_bits if isinstance(weight, FP8) else layers.four_bits).append(layer)
        parts = huggingface.compressed_tensors(weight, None if input_scales is None else input_scales[source])
        tensors |= {f"{layer}.{part}": tensor for part, tensor in parts.items()}
    return tensors, layers


def _rows_of(weight: NVFP4Tensor | FP8, rows: Tensor) -> NVFP4Tensor | FP8:
    """Returns some rows of a quantized weight. Tensors of 8-bit floats are indexed as bytes."""
    if isinstance(weight, FP8):
        return FP8(weight.codes.view(torch.uint8)[rows].view(weight.codes.dtype), weight.tensor_scale)
    scales = weight.scales.view(torch.uint8)[rows].view(weight.scales.dtype)
    return NVFP4Tensor(weight.codes[rows], scales, weight.tensor_scale)


_calls: Counter[str] = Counter()  # The number of calls of save_quantized in this process for each folder.


def _once_of_all_ranks(folder: str, write: Callable[[], list[str]]) -> list[str]:
    """Lets the first rank that calls this function for the folder run write(). The other ranks wait for the end, and
    all
    return the same result.

    If only one rank calls, as rank 0 does in many programs, it writes and does not wait for the others.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return write()
    store = dist.distributed_c10d._get_default_store()
    key = f"nanochat_fp4.save_quantized/{folder}/{_calls[folder]}"
    _calls[folder] += 1
    result: dict[str, Any] = {}
    try:
        if store.add(f"{key}/callers", 1) > 1:
            store.wait([key], timedelta(days=1))
            result = json.loads(store.get(key))
    except dist.DistError as e:
        raise UserError(
            f"save_quantized: rank 0, which keeps the group's store, has ended; see whether {folder} is there, and let "
            "all ranks end together (torch.distributed.barrier)"
        ) from e
    if "error" in result:
        raise UserError(f"save_quantized: another rank could not write {folder}: {result['error']}")
    if "notes" in result:
        return result["notes"]
    try:
        result["notes"] = write()
        return result["notes"]
    except BaseException as e:
        result["error"] = one_line(e)
        raise
    finally:
        store.set(key, json.dumps(result))
