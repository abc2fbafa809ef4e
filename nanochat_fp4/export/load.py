"""Loads the weights of an exported folder into a model.

Every tensor of a file must have a place in the model, and have the place's shape and finite values. Otherwise the file
is refused, and the model stays as it was.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from nanochat_fp4.cli import UserError, one_line, require
from nanochat_fp4.export import gguf_file, huggingface
from nanochat_fp4.export.stacked import into_model, places, stacked, stacked_parameters
from nanochat_fp4.export.weights import Weights, check_values
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, FP8, NVFP4Tensor

INDEX_FILE = f"{huggingface.WEIGHTS_FILE}.index.json"  # transformers writes it if the weights are in several files.
LAMBDAS = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}  # GPT's scalars in config.json, and values that have no effect.
FORMATS = (huggingface.FOUR_BITS, huggingface.EIGHT_BITS, huggingface.MIXED)
CODES = ("weight_packed", "weight_scale", "weight_global_scale")
# Scales that only servers use: those of inputs, and those of a cache of keys and values.
FOR_SERVERS = {"input_global_scale", "k_scale", "v_scale"}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def load_quantized(model: M, folder: str | Path, device: torch.device | str = "cpu") -> M:
    """Loads the weights of an exported folder (safetensors, compressed-tensors or GGUF) into a model, in place. Returns
    the model.

    Quantized weights are decoded into the parameters, so the model can be trained further or used in any way. All
    tensors of the folder are checked before the first one is loaded.

    model:  a GPT or a Llama of this project, converted or not, with the folder's shapes. A folder that is not GGUF can
            also be loaded into any module that has the file's names, such as a model of transformers. Its experts are
            read one by one, as in checkpoints of transformers.
    device: the device for parameters that are on the meta device

    Raises UserError if safetensors or gguf is not installed, if the folder has another format or belongs to another
    model, and if a tensor is unknown, has another shape or dtype, or has a value that is not finite in the parameter's
    dtype. It is also an error if a parameter with two names (tied embeddings) has two different values in the file.

    >>> nf.load_quantized(torch.nn.Linear(32, 16), "nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nanochat_fp4.cli.UserError: ...nowhere...
    """
    if not isinstance(model, nn.Module) or not isinstance(folder, str | Path):
        got = f"{type(model).__name__} and {type(folder).__name__}"
        raise UserError(f"load_quantized: got {got}, expected a model and then the folder; swap the two or name both")
    folder = Path(folder).expanduser()
    about = huggingface.describe(model) if isinstance(model, GPT | Llama) else None
    file = _gguf_file(folder, model)
    config = file.config if file else read_config(folder) if about else {}
    check_config(folder, config, about)
    plain, weights = read_weights(file or folder, model, about, tied=bool(config.get("tie_word_embeddings")))
    if isinstance(model, GPT):
        plain = _lambdas(folder, config, model) | plain
    state = model.state_dict(keep_vars=True)
    _check_dtypes(state, plain, weights)
    _check_places(model, state, plain, computed={"cos", "sin"} if about else set())
    _fill(model, state, plain, weights, device)
    if about and model.cos.is_meta:
        model.prepare()
    return model


def _gguf_file(folder: Path, model: nn.Module) -> gguf_file.File | None:
    """Returns the folder's GGUF file, if it has one. Raises UserError if the folder has several files of weights, and
    if the model cannot be loaded from GGUF."""
    weight_files = (gguf_file.FILE_NAME, huggingface.WEIGHTS_FILE, INDEX_FILE)
    if len(both := [name for name in weight_files if (folder / name).exists()]) > 1:
        raise UserError(f"{folder} has {' and '.join(both)}, which both are weights; keep one of them")
    if not (folder / gguf_file.FILE_NAME).exists():
        return None
    file = gguf_file.read(folder / gguf_file.FILE_NAME)
    if not isinstance(model, Llama):
        raise UserError(f"{file.path} can be loaded into a nanochat_fp4 Llama alone; export another format")
    return file


def _lambdas(folder: Path, config: dict[str, Any], model: GPT) -> dict[str, Tensor]:
    """Returns the scalars of a GPT's layers, which the folder's config has. Models without them have neutral ones."""
    lambdas = {}
    for name, neutral in LAMBDAS.items():
        lambdas[name] = torch.tensor(config.get(name, [neutral] * model.config.n_layer), dtype=torch.float32)
        _check_tensor(folder, name, lambdas[name], getattr(model, name).shape)
    return lambdas


def _check_places(
    model: nn.Module, state: Mapping[str, Tensor], plain: Mapping[str, Tensor], computed: set[str]
) -> None:
    """Raises UserError for parameters that are divided among processes, and for buffers on the meta device that
    neither the file has nor the model computes."""
    if divided := next((name for name, t in state.items() if hasattr(t, "device_mesh")), None):
        raise UserError(f"{divided} is divided among processes; load the weights before fully_shard")
    if left := [name for name, b in model.named_buffers() if b.is_meta and name not in computed | set(plain)]:
        raise UserError(
            f"{left[0]} is on the meta device, and no file has it; build the model inside "
            "accelerate.init_empty_weights(), which leaves buffers where they are"
        )


def _fill(
    model: nn.Module, state: Mapping[str, Tensor], plain: Mapping[str, Tensor], weights: Weights,
    device: torch.device | str,
) -> None:  # fmt: skip
    """Gives the model's parameters, which are in `state`, the values of the file. A parameter on the meta device is
    replaced by one on `device`."""
    experts = {name: rest for name, *rest in stacked_parameters(model) if rest[0][0] in weights.tensors}
    on_meta: dict[int, list[str]] = {}  # id of a parameter on the meta device -> its names
    for name, parameter in state.items():
        if parameter.is_meta:
            on_meta.setdefault(id(parameter), []).append(name)
    for name, parameter in state.items():
        layer = name.removesuffix(".weight")
        if name in experts:
            value = stacked(weights.tensors, *experts[name])
        elif layer in weights.tensors:
            value = weights.tensors[layer].dequantize()
        else:
            value = plain.get(name)
        if value is not None and parameter.is_meta:
            _replace(model, on_meta[id(parameter)], value.to(device, parameter.dtype))
        elif value is not None:
            parameter[: len(value)].copy_(value) if parameter.ndim else parameter.copy_(value)


def _replace(model: nn.Module, names: list[str], value: Tensor) -> None:
    """Replaces a parameter or a buffer on the meta device. A tied parameter has several names."""
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        owner, _, name = name.rpartition(".")
        module = model.get_submodule(owner)
        if name in module._parameters:
            module._parameters[name] = parameter.requires_grad_(module._parameters[name].requires_grad)
        else:
            module._buffers[name] = value


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the entries of a folder's config.json. Raises UserError if the file is missing or damaged."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("no object")
        return config
    except FileNotFoundError as e:
        raise UserError(f"{path} is not there; name a folder that scripts.export or transformers wrote") from e
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{path} is damaged ({one_line(e)[:100]}); export it again") from e


def check_config(path: Path, config: Mapping[str, Any], about: huggingface.Description | None) -> None:
    """Raises UserError if config describes another model. Missing entries are not compared."""
    if about is None:
        return
    rope = config.get("rope_parameters")
    found = {**config, **(rope if isinstance(rope, dict) else {})}
    # These entries may differ: a GPT has one of two classes, which have different arguments.
    free = {"architectures", "auto_map", "model_type", "windows", *LAMBDAS}
    free |= {"max_position_embeddings", "rope_parameters", "tie_word_embeddings"}
    for key, want in {**about.config, "rope_type": "default", "rope_scaling": None}.items():
        if key in found and found[key] != want and key not in free:
            raise UserError(f"{path}: {key} is {str(found[key])[:60]}, expected {want}; use the model it was made from")

    def narrow(entries: Mapping[str, Any]) -> list[bool]:
        """Whether each layer's window is shorter than the longest sequence. The windows' sizes are not compared,
        because the longest sequence may change."""
        longest, windows = entries.get("max_position_embeddings"), entries.get("windows")
        layers = about.config["num_hidden_layers"]
        return [w != longest for w in windows] if isinstance(windows, list) else [False] * layers

    if narrow(config) != narrow(about.config):
        raise UserError(f"{path}: windows are {config.get('windows')}; use the model it was made from")


def read_weights(
    source: Path | gguf_file.File, model: nn.Module, about: huggingface.Description | None, tied: bool = False
) -> tuple[dict[str, Tensor], Weights]:
    """Reads the weights of a file. Returns the unquantized tensors by their names in the model, and the quantized
    weights by their layers' names. The rows are in the model's order, and the tensors are on the CPU.

    source: a folder with safetensors, or a GGUF file that was read
    model:  the model that the tensors belong to, on any device, which may be the meta device
    about:  the model's description, or None for a model of another project
    tied:   whether the embedding is used for a missing lm_head

    Raises UserError unless the file has one finite value of the right shape for each tensor of the model, and no
    others.
    """
    targets = {k: t for k, t in model.state_dict(keep_vars=True).items() if k not in LAMBDAS or about is None}
    shapes = {name: tuple(t.shape) for name, t in targets.items()}
    no_floats = {name: t.dtype for name, t in targets.items() if not t.is_floating_point()}
    for name in ("transformer.wte.weight", "lm_head.weight") if about else ():
        shapes[name] = (model.config.vocab_size, *shapes[name][1:])
    if isinstance(source, gguf_file.File):
        path, (plain, weights) = source.path, _read_gguf(source, shapes, about)
    else:
        found = {} if about else places(model, shapes)
        path, (plain, weights) = source, _read_safetensors(source, shapes, about, no_floats)
        into_model(path, model, found, plain, weights.tensors)
    names: dict[int, list[str]] = {}  # id of a parameter -> its names, of which a tied parameter has several
    for name, parameter in targets.items():
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for other in others:
            _check_equal(path, first, other, plain, weights)
    if tied and about and "transformer.wte.weight" in plain:
        _check_equal(path, "transformer.wte.weight", "lm_head.weight", plain, weights)
        plain.setdefault("lm_head.weight", plain["transformer.wte.weight"])
    read = {*plain, *(f"{layer}.weight" for layer in weights.tensors)}
    read |= {name for name, layers, _ in stacked_parameters(model) if layers[0] in weights.tensors}
    there = {id(t) for name, t in targets.items() if name in read}
    if missing := sorted(name for name, t in targets.items() if id(t) not in there):
        raise UserError(f"{path} has no {', '.join(missing[:4])}; load it into the model it was made from")
    return plain, weights


def _value(name: str, plain: Mapping[str, Tensor], weights: Weights) -> Tensor | None:
    """Returns the tensor that was read for a parameter, decoded, or None."""
    codes = weights.tensors.get(name.removesuffix(".weight"))
    return plain.get(name) if codes is None else codes.dequantize()


def _check_equal(path: Path, one: str, other: str, plain: Mapping[str, Tensor], weights: Weights) -> None:
    """Raises UserError if the file has two tensors for two names of one parameter, and they differ."""
    a, b = (_value(name, plain, weights) for name in (one, other))
    if a is not None and b is not None and not torch.equal(a.float(), b.float()):
        raise UserError(
            f"{path}: {one} and {other} are one parameter of the model and differ in the file; build the model with "
            "tie_word_embeddings=False"
        )


def _check_dtypes(state: Mapping[str, Tensor], plain: Mapping[str, Tensor], weights: Weights) -> None:
    """Raises UserError if a parameter's dtype cannot hold the values that were read for it."""
    for name, parameter in state.items():
        if name in plain or parameter.dtype == torch.float16:  # Quantized weights always fit into other dtypes.
            value = _value(name, plain, weights)
            check_values({} if value is None else {name: value}, parameter.dtype)


def _check_tensor(
    path: Path, name: str, tensor: Tensor, shape: tuple[int, ...] | None, dtype: torch.dtype | None = None
) -> None:
    """Raises UserError unless the tensor belongs to the model (shape is not None), has this shape and dtype, and is
    finite. Without dtype, any of FLOATS is right."""
    if shape is None:
        raise UserError(f"{path}: {name} is not of this model; load it into the model it was made from")
    if tuple(tensor.shape) != tuple(shape):
        raise UserError(f"{path}: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}; use the model it is of")
    if tensor.dtype != dtype if dtype else tensor.dtype not in FLOATS:
        expected = dtype or "floating-point numbers of at least 16 bits"
        raise UserError(f"{path}: {name} is in {tensor.dtype}, expected {expected}; export or download it again")
    if not bool(torch.isfinite(tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor).all()):
        raise UserError(f"{path}: {name} has values that are not finite; export or download it again")


def _check_codes(path: Path, name: str, t: NVFP4Tensor, shape: tuple[int, ...] | None) -> None:
    if t.codes.dtype != torch.uint8 or t.scales.dtype != torch.float8_e4m3fn:
        raise UserError(
            f"{path}: {name} has codes in {t.codes.dtype} and scales in {t.scales.dtype}, which is not NVFP4; expected "
            "torch.uint8 and torch.float8_e4m3fn"
        )
    rows, columns = shape if shape and len(shape) == 2 else (0, 0)
    if rows and len(t.scales.shape) == 2 and t.scales.shape[1] * BLOCK != columns == 2 * t.codes.shape[1]:
        raise UserError(
            f"{path}: {name} has {t.scales.shape[1]} scales in {columns} columns, expected {columns // BLOCK}; "
            f"only groups of {BLOCK} are read"
        )
    _check_tensor(path, f"{name}, its codes,", t.codes, shape and (rows, columns // 2), torch.uint8)
    _check_tensor(path, f"{name}, its scales,", t.scales, (rows, columns // BLOCK), torch.float8_e4m3fn)
    largest = t.scales.float() * (E2M1_MAX * t.tensor_scale)
    _check_tensor(path, f"{name}, its values,", largest, t.scales.shape)
    if bool((largest < 0).any()):
        raise UserError(f"{path}: {name} has negative scales, which is not NVFP4; export or download it again")


def load_safetensors(folder: Path) -> dict[str, Tensor]:
    """Returns all tensors of a folder's safetensors files by their names. Raises UserError if a file is missing or
    damaged, or if safetensors is not installed."""
    require("safetensors")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / huggingface.WEIGHTS_FILE
    try:
        files = {path.name}
        if not path.exists() and (folder / INDEX_FILE).exists():
            path = folder / INDEX_FILE
            files = set(json.loads(path.read_bytes())["weight_map"].values())
        tensors: dict[str, Tensor] = {}
        for path in (folder / Path(name).name for name in sorted(files)):
            for name, tensor in load_file(path).items():
                if name in tensors:
                    raise ValueError(f"{name} is there twice")
                tensors[name] = tensor
        return tensors
    except FileNotFoundError as e:
        raise UserError(f"{path} is not there; name a folder that scripts.export or transformers wrote") from e
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{path} is not a whole safetensors file ({one_line(e)[:100]}); export it again") from e


def _check_quantization(folder: Path) -> None:
    """Raises UserError if config.json describes a quantization that cannot be read. NVFP4 and FP8 with one scale in the
    format compressed-tensors can be read."""
    about = read_config(folder).get("quantization_config") if (folder / "config.json").exists() else None
    if not isinstance(about, dict):
        return
    groups = about.get("config_groups")
    groups = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    sizes = {g.get("group_size") for g in (about, *groups) if isinstance(g, dict)} - {None, BLOCK}
    name = about.get("format") or about.get("quant_algo") or about.get("quant_method")
    problem = f"is in {str(name)[:60]!r}" if name not in FORMATS else ""
    eight = [g for g in groups if isinstance(g, dict) and g.get("num_bits") == 8]
    if not problem and any((g.get("type"), g.get("strategy")) != ("float", "tensor") for g in eight):
        problem = "has 8-bit weights that are not FP8 with one scale for a tensor"
    problem = problem or (f"has groups of {str(max(sizes, key=str))[:20]}" if sizes else "")
    problem = problem or ("has rotated weights (transform_config)" if about.get("transform_config") else "")
    if problem:
        raise UserError(
            f"{folder} {problem}; expected {huggingface.FOUR_BITS} (compressed-tensors) with groups of {BLOCK}"
        )


def _read_safetensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    about: huggingface.Description | None,
    no_floats: Mapping[str, torch.dtype],
) -> tuple[dict[str, Tensor], Weights]:
    """Reads the weights of a folder with safetensors. Arguments and results are those of read_weights, and no_floats
    has the dtypes of the model's tensors that hold no floating-point numbers."""
    ours = {theirs: name for name, theirs in about.names.items()} if about else {}
    layers: dict[str, dict[str, Tensor]] = {}
    _check_quantization(folder)
    for key, tensor in load_safetensors(folder).items():
        theirs, _, part = key.rpartition(".")
        layers.setdefault(theirs, {})[part] = tensor
    plain: dict[str, Tensor] = {}
    weights = Weights()
    for theirs, parts in layers.items():
        name = ours.get(theirs, "" if about else theirs)
        quantized = set(CODES) <= set(parts)
        weight = parts.get("weight")
        if weight is not None and weight.dtype == torch.float8_e4m3fn and "weight_scale" in parts and name:
            bias = {"bias": parts.pop("bias")} if "bias" in parts else {}
            weights.tensors[name] = _read_fp8(folder, theirs, parts, shapes.get(f"{name}.weight"))
            if about:
                weights.tensors[name].codes = about.rows(name, weight)
            parts = bias
        if not quantized and "weight_packed" in parts:
            raise UserError(
                f"{folder}: {theirs} has codes without {', '.join(sorted(set(CODES) - set(parts)))}; expected NVFP4 of "
                "compressed-tensors; download or export it again"
            )
        if quantized and "weight" in parts:
            raise UserError(f"{folder}: {theirs} has codes and a weight, expected one of them; export it again")
        for part in sorted(set(parts) - FOR_SERVERS - set(CODES if quantized else ())):
            full = f"{name}.{part}" if name else part
            known = shapes.get(full) if name or not about else None
            _check_tensor(folder, f"{theirs}.{part}", parts[part], known, no_floats.get(full))
            plain[full] = about.rows(name, parts[part]) if about else parts[part]
        if not quantized:
            continue
        codes, scales, scale = (parts[part] for part in CODES)
        for part in {"weight_global_scale", "input_global_scale"} & set(parts):
            if parts[part].dtype not in FLOATS or parts[part].numel() != 1 or not parts[part].isfinite():
                raise UserError(f"{folder}: {theirs}.{part} is not one finite value; export or download it again")
        read = NVFP4Tensor(codes, scales, scale.float().reshape(()).reciprocal())
        _check_codes(folder, theirs, read, shapes.get(f"{name}.weight"))
        if about:
            read = NVFP4Tensor(about.rows(name, codes), about.rows(name, scales), read.tensor_scale)
        weights.tensors[name] = read
    return plain, weights


def _read_fp8(folder: Path, name: str, parts: Mapping[str, Tensor], shape: tuple[int, ...] | None) -> FP8:
    """Returns a weight in E4M3 with one scale. Raises UserError if its tensors are not those of such a weight."""
    scale = parts["weight_scale"]
    if set(parts) - FOR_SERVERS - {"weight", "weight_scale", "input_scale"} or scale.numel() != 1:
        raise UserError(
            f"{folder}: {name} has {', '.join(sorted(parts))}, expected an FP8 weight with one weight_scale; "
            "download or export it again"
        )
    if scale.dtype not in FLOATS or not scale.isfinite() or not scale > 0:
        raise UserError(f"{folder}: {name}.weight_scale is no positive finite value; export or download it again")
    _check_tensor(folder, f"{name}.weight", parts["weight"], shape, torch.float8_e4m3fn)
    return FP8(parts["weight"], scale.float().reshape(()))


def _read_gguf(
    file: gguf_file.File, shapes: Mapping[str, tuple[int, ...]], about: huggingface.Description
) -> tuple[dict[str, Tensor], Weights]:
    from gguf import GGMLQuantizationType, dequantize

    ours = {theirs: name for name, theirs in gguf_file.names(about).items()}
    path, read = file.path, file.tensors
    plain: dict[str, Tensor] = {}
    weights = Weights()
    for key, tensor in read.items():
        theirs, _, part = key.rpartition(".")
        name = ours.get(theirs, "")
        shape = shapes.get(f"{name}.weight")
        four_bits = f"{theirs}.weight" in read and read[f"{theirs}.weight"].tensor_type == GGMLQuantizationType.NVFP4
        if part in ("scale", "input_scale") and four_bits:
            _check_tensor(path, key, torch.tensor(tensor.data), (1,))  # Only servers use an input scale.
            continue
        if shape is None or part != "weight" or tuple(tensor.shape[::-1].tolist()) != shape:
            found = tuple(tensor.shape[::-1].tolist())
            raise UserError(f"{path}: {key} is {found}, expected {shape if part == 'weight' and shape else 'no such'}")
        if not four_bits:
            try:
                value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
            except (NotImplementedError, ValueError) as e:
                raise UserError(f"{path}: {key} is {tensor.tensor_type.name}, which gguf cannot decode") from e
            _check_tensor(path, key, value, shape)
            plain[f"{name}.weight"] = gguf_file.rows(about, name, value, back=True)
            continue
        scale = torch.ones(())
        if f"{theirs}.scale" in read:
            scale = torch.tensor(read[f"{theirs}.scale"].data).float()
            _check_tensor(path, f"{theirs}.scale", scale, (1,))
            scale = scale[0]
        t = gguf_file.unpack_blocks(torch.tensor(tensor.data), scale)
        _check_codes(path, key, t, shape)
        weights.tensors[name] = NVFP4Tensor(
            gguf_file.rows(about, name, t.codes, back=True), gguf_file.rows(about, name, t.scales, back=True), scale
        )
    return plain, weights
