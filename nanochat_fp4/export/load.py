"""Loads the weights of an exported folder into a model.

Every tensor of a file must have a place in the model, and have the place's shape and finite values. Otherwise the file
is refused, and the model stays as it was.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanochat_fp4.cli import one_line, require
from nanochat_fp4.export import huggingface
from nanochat_fp4.export.weights import check_values
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.nvfp4.convert import forget_quantization
from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, NVFP4Tensor

INDEX_FILE = f"{huggingface.WEIGHTS_FILE}.index.json"  # transformers writes it if the weights are in several files.
LAMBDAS = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}  # GPT's scalars in config.json, and values that have no effect.
FORMATS = (huggingface.FOUR_BITS, huggingface.EIGHT_BITS, huggingface.MIXED)
CODES = ("weight_packed", "weight_scale", "weight_global_scale")
# Scales that only servers use: those of inputs, and those of a cache of keys and values.
FOR_SERVERS = {"input_global_scale", "input_scale", "k_scale", "v_scale"}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def load_quantized(model: M, folder: str | Path, device: torch.device | str = "cpu") -> M:
    """Loads the weights of an exported folder (compressed-tensors, and for this project's models also safetensors)
    into a model, in place. Returns the model.

    Quantized weights are decoded into the parameters, so the model can be trained further or used in any way. In FP32
    parameters they are exact, where transformers decodes to BF16. All tensors of the folder are checked before the
    first one is loaded. The model's config loses its quantization_config, so that save_pretrained writes what it holds.

    model:  a GPT or a Llama of this project, converted or not, with the folder's shapes, or any module that has the
            file's names, such as a model of transformers. Its experts are read one by one, as in checkpoints of
            transformers.
    device: the device for parameters that are on the meta device

    Raises ValueError if the folder has another format or belongs to another model, and if it has no quantized weights,
    which from_pretrained reads. Raises ValueError if a tensor is unknown, has another shape or dtype, or has a value
    that is not finite in the parameter's dtype. It is also an error if a parameter with two names (tied embeddings) has
    two different values in the file. Raises ModuleNotFoundError if safetensors is not installed.

    >>> nf.load_quantized(torch.nn.Linear(32, 16), "nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: ...nowhere...
    """
    folder = huggingface.folder_of("load_quantized", model, folder)
    if folder.is_file():
        raise ValueError(f"load_quantized: {folder} is a file; pass its folder, {folder.parent}")
    own = isinstance(model, GPT | Llama)
    if hasattr(model, "tie_weights") and any(p.is_meta for p in model.parameters()):
        model.tie_weights()  # accelerate.init_empty_weights() gives two names of a parameter two parameters.
    config = _read(folder / "config.json", _entries) if own or (folder / "config.json").exists() else {}
    if isinstance(about := config.get("quantization_config"), dict):
        name = about.get("format") or about.get("quant_algo") or about.get("quant_method")
        if name not in FORMATS or about.get("transform_config"):
            rotated = " with rotated weights (transform_config)" if about.get("transform_config") else ""
            raise ValueError(f"{folder} is in {str(name)[:60]!r}{rotated}; expected {FORMATS[0]} of compressed-tensors")
    values = read_values(folder)
    if own:
        about, places = huggingface.describe(model)
        _check_config(folder, config, about)
    else:
        kinds = [config.get("model_type"), getattr(getattr(model, "config", None), "model_type", None)]
        if all(kinds) and kinds[0] != kinds[1]:
            raise ValueError(f"{folder} is of a {str(kinds[0])[:60]}, expected a {kinds[1]}; use the model it is of")
        if not any(isinstance(value, NVFP4Tensor) for value in values.values()):
            raise ValueError(f"{folder} has no quantized weights; name one of save_quantized, or use from_pretrained")
        places = huggingface.places_in(model)
    if isinstance(model, GPT):
        # A model without these scalars in its config has neutral ones.
        for name, neutral in LAMBDAS.items():
            values[name] = torch.tensor(config.get(name, [neutral] * model.config.n_layer), dtype=torch.float32)
        places = {**places, **{name: [huggingface.Rows(name)] for name in LAMBDAS}}
    _check_tensors(folder, model, values, places)
    _materialize(model, device)
    targets = huggingface.tensors_of(model)
    for theirs, value in values.items():
        decoded = _decoded(value)
        for name, here, there in places[theirs]:
            targets[name][here] = decoded[there].to(targets[name])
    if own and model.cos.is_meta:
        model.prepare()
    forget_quantization(model)
    return model


def _decoded(value: Tensor | NVFP4Tensor) -> Tensor:
    return value.dequantize() if isinstance(value, NVFP4Tensor) else value


def _materialize(model: nn.Module, device: torch.device | str) -> None:
    """Replaces parameters and buffers on the meta device by empty ones on `device`. Tied parameters stay tied."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if tensor not in made:
                        empty = torch.empty_like(tensor, device=device)
                        parameter = isinstance(tensor, nn.Parameter)
                        made[tensor] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
                    tensors[name] = made[tensor]


def _check_tensors(
    folder: Path, model: nn.Module, values: Mapping[str, Tensor | NVFP4Tensor], places: huggingface.Places
) -> None:
    """Raises ValueError unless the file has one finite value of the right shape and kind for each tensor of the model,
    and no others."""
    targets = huggingface.tensors_of(model)
    if divided := next((name for name, t in targets.items() if hasattr(t, "device_mesh")), None):
        raise ValueError(f"{divided} is divided among processes; load the weights before fully_shard")
    computed = {"cos", "sin"} if isinstance(model, GPT | Llama) else set()
    if left := [name for name, b in model.named_buffers() if b.is_meta and name not in computed | set(targets)]:
        raise ValueError(
            f"{left[0]} is on the meta device, and no file has it; build the model inside "
            "accelerate.init_empty_weights(), which leaves buffers where they are"
        )

    def key(part: huggingface.Rows) -> tuple[int, int]:
        """The same for two names of a tied parameter."""
        return id(targets[part.name]), 0 if part.here is ... else int(part.here[0])

    found: dict[tuple[int, int], str] = {}
    for theirs, value in values.items():
        where = f"{folder}: {theirs}"
        if theirs not in places:
            raise ValueError(f"{where} is not of this model; load it into the model it was made from")
        parts, target = places[theirs], targets[places[theirs][0].name]
        rows = () if parts[0].here is ... else (sum(len(part.here) for part in parts),)
        shape = (*rows, *target.shape[len(rows) :])
        if tuple(value.shape) != shape:
            raise ValueError(f"{where} is {tuple(value.shape)}, expected {shape}; use the model it is of")
        if isinstance(value, NVFP4Tensor):
            four_bits = value.codes.dtype == torch.uint8
            largest = value.scales.float() * E2M1_MAX if four_bits else value.codes.float()
            check_values({where: largest * value.tensor_scale}, target.dtype)
        elif value.dtype not in FLOATS if target.is_floating_point() else value.dtype != target.dtype:
            raise ValueError(f"{where} is in {value.dtype}, expected {target.dtype}; export or download it again")
        else:
            check_values({where: value}, target.dtype)
        for part in parts:
            other = found.setdefault(key(part), theirs)
            if other != theirs and not torch.equal(_decoded(value).float(), _decoded(values[other]).float()):
                raise ValueError(
                    f"{folder}: {other} and {theirs} are one parameter of the model and differ in the file; build the "
                    "model with tie_word_embeddings=False"
                )
    computed = getattr(model, "_keys_to_ignore_on_save", None) or ()
    for theirs, parts in places.items():
        if any(key(part) not in found and part.name not in computed for part in parts):
            raise ValueError(f"{folder} has no {theirs}; download or export it again, or use the model it is of")


def _check_config(folder: Path, config: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Raises ValueError if config describes another model. Missing entries are not compared."""

    def compared(entries: Mapping[str, Any]) -> dict[str, Any]:
        """What must be equal. The longest sequence may change, so of a window only counts whether it is shorter."""
        windows, longest = entries.get("windows"), entries.get("max_position_embeddings")
        windows = windows if isinstance(windows, list) else [longest] * about["num_hidden_layers"]
        # A GPT has one of two classes, which have different arguments.
        free = {"architectures", "auto_map", "model_type", "max_position_embeddings", "rope_parameters", *LAMBDAS}
        kept = {key: value for key, value in entries.items() if key not in free}
        return kept | {"windows": [window != longest for window in windows]}

    rope = config.get("rope_parameters")
    found = compared({**config, **(rope if isinstance(rope, dict) else {})})
    for key, want in (compared(about) | {"rope_type": "default", "rope_scaling": None}).items():
        if key in found and found[key] != want:
            raise ValueError(f"{folder}: {key} is {str(found[key])[:60]}, expected {want}; use the model it is of")


T = TypeVar("T")


def _read(path: Path, read: Callable[[Path], T]) -> T:
    if not path.is_file():
        raise ValueError(f"{path} is not there; name a folder that scripts.export or transformers wrote")
    try:
        return read(path)
    except Exception as e:  # Whatever a package says of a damaged file.
        raise ValueError(f"{path} is not whole ({one_line(e)[:100]}); export or download it again") from e


def _entries(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes()))


def load_safetensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder's safetensors files by their names. Raises ValueError if a file is missing or
    damaged, and ModuleNotFoundError if safetensors is not installed."""
    require("safetensors")
    from safetensors.torch import load_file

    path, index = folder / huggingface.WEIGHTS_FILE, folder / INDEX_FILE
    if path.exists() and index.exists():
        raise ValueError(f"{folder} has {path.name} and {index.name}, which both are weights; keep one of them")
    files = {path}
    if index.exists():
        files = _read(index, lambda path: {folder / Path(name).name for name in _entries(path)["weight_map"].values()})
    tensors: dict[str, Tensor] = {}
    for path in sorted(files):
        found = _read(path, load_file)
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{folder} has {twice[0]} twice; export or download it again")
        tensors |= found
    return tensors


def read_values(folder: Path) -> dict[str, Tensor | NVFP4Tensor]:
    """Returns the tensors of a folder's safetensors files by their names. The tensors of a quantized weight become one
    value, under the name of the weight. Scales that only servers use are left out.

    Raises ValueError as load_safetensors does, and if a quantized weight is not one that export writes.
    """
    tensors = {name: t for name, t in load_safetensors(folder).items() if name.rpartition(".")[2] not in FOR_SERVERS}
    values: dict[str, Tensor | NVFP4Tensor] = {}
    for name in list(tensors):
        layer, _, part = name.rpartition(".")
        if part == "weight_packed":
            names = [f"{layer}.{part}" for part in CODES]
        elif part == "weight" and tensors[name].dtype == torch.float8_e4m3fn and f"{layer}.weight_scale" in tensors:
            names = [name, f"{layer}.weight_scale"]
        else:
            continue
        if f"{layer}.weight" in tensors and part == "weight_packed" or not set(names) <= set(tensors):
            raise ValueError(f"{folder}: {layer} needs {', '.join(names)} and no weight; download or export it again")
        codes, *scales, scale = (tensors.pop(name) for name in names)
        scales = scales[0] if scales else codes[..., :0]
        columns = codes.shape[-1] * 2 // BLOCK if codes.dtype == torch.uint8 else 0
        kinds = (torch.uint8 if part == "weight_packed" else torch.float8_e4m3fn, torch.float8_e4m3fn)
        if (codes.dtype, scales.dtype) != kinds or scales.shape != (*codes.shape[:1], columns):
            raise ValueError(
                f"{folder}: {layer} has codes {tuple(codes.shape)} in {codes.dtype} and scales {tuple(scales.shape)} "
                f"in {scales.dtype}, expected NVFP4: torch.uint8 (N, K/2) and torch.float8_e4m3fn (N, K/{BLOCK})"
            )
        if scale.dtype not in FLOATS or scale.numel() != 1 or not 0 < float(scale) < float("inf"):
            raise ValueError(f"{folder}: {names[-1]} is not one positive finite value; export or download it again")
        if bool((scales.float() < 0).any()):
            raise ValueError(f"{folder}: {layer} has negative scales, which is not NVFP4; download it again")
        scale = scale.float().reshape(())
        values[f"{layer}.weight"] = NVFP4Tensor(codes, scales, scale.reciprocal() if columns else scale)
    return values | tensors
