"""Writes exports: the folder, which is complete at any moment or absent, and the models of transformers in it."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanochat_fp4.cli import logger, one_line, require
from nanochat_fp4.export import huggingface
from nanochat_fp4.export.weights import calibrate, check_values, forward_weights, in_eight_bits, with_unread_experts
from nanochat_fp4.files import atomic_write, new_folder
from nanochat_fp4.nvfp4.convert import QuantConv1D
from nanochat_fp4.nvfp4.heads import some
from nanochat_fp4.nvfp4.layer import QuantLinear

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LIST = "export.json"  # The names of an export's files. Only folders with this list are ever replaced.
FORMAT = "nanochat_fp4 export, version 1"


# ----------------------------------------------------------------------------------------------------------------------
# The folder


@contextlib.contextmanager
def new_export(out: str | os.PathLike, overwrite: bool = False) -> Iterator[Path]:
    """Gives an empty folder to write an export into. At the end of the context the folder gets the name `out`.

    out:       the folder of the export. It must be missing or empty. With `overwrite` it may be an earlier export,
               which is then replaced.

    If an exception is raised inside the context, `out` stays as it was. Raises ValueError if `out` must not be
    replaced, and if another process is writing it.
    """
    from nanochat_fp4.locks import lock_of, locked  # nf is imported where filelock is not installed.

    out = Path(out).expanduser().resolve()  # If `out` is a link, the folder that it points to is replaced.
    busy = f"another export is writing {out}; wait until it ends, or choose another folder"
    with locked(lock_of(out), busy, 0):
        try:
            with new_folder(out) as part:
                check_replaceable(out, overwrite)
                yield part
                names = sorted(path.relative_to(part).as_posix() for path in part.rglob("*"))
                atomic_write(part / LIST, json.dumps({"format": FORMAT, "files": names}, indent=2) + "\n")
                check_replaceable(out, overwrite)  # Somebody may have put a file there meanwhile.
        finally:
            with contextlib.suppress(OSError):  # Windows deletes no open file.
                lock_of(out).unlink()


def check_replaceable(out: Path, overwrite: bool, how: str = "overwrite=True") -> None:
    """Raises ValueError unless `out` is missing, is an empty folder, or is an export and overwrite is true. An export
    has a list of its files, and holds no others. `how` is what the caller's user types to overwrite."""
    if os.path.ismount(out):
        raise ValueError(f"{out} is a mount point, which cannot be renamed; choose a folder inside it")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ValueError(f"{out} is there already; choose another folder, or replace it with {how}")
    listed: set[str] = set()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        about = json.loads((out / LIST).read_bytes()) if (out / LIST).is_file() else {}
        listed = {LIST, *about["files"]} if about["format"] == FORMAT else listed
    if not listed:
        raise ValueError(f"{out} is not an export, so it is not overwritten; choose another folder, or remove it")
    found = {path.relative_to(out).as_posix() for path in out.rglob("*")}
    if strangers := ", ".join(sorted(found - listed)[:4]):
        raise ValueError(f"{out} holds {strangers}, not of the export, so it is not overwritten; move the file")


# ----------------------------------------------------------------------------------------------------------------------
# The model card


EXPERTS = "transformers 5.24 reads experts wrong, without weight_global_scale; use nf.load_quantized"
IMPORT = "import nanochat_fp4 as nf  # pip install git+https://github.com/OWNER/nanochat_fp4"


def reading_lines(folder: Path, chat: bool, notes: Sequence[str] = ()) -> list[str]:
    """Returns the lines of Python that load an exported folder with transformers, as its config.json demands, and
    generate with it if it holds a causal language model. `chat`: whether the tokenizer has a chat template. What
    transformers reads wrong, as `notes` say, is read by nf.load_quantized."""
    config = json.loads((folder / "config.json").read_bytes())
    remote = ", trust_remote_code=True" if "auto_map" in config else ""
    decoded = f"  # Pass no dtype: quantized weights are decoded to {config['dtype']}."
    no_dtype = decoded if "quantization_config" in config else ""
    own = config["architectures"][0]
    causal = own.endswith("ForCausalLM")
    name = "AutoModelForCausalLM" if causal else "AutoModel" if remote else own
    load = f"model = {name}.from_pretrained(folder{remote}){no_dtype}"
    lines = [f"from transformers import {name}", "", 'folder = "."  # where this file is', load]
    if EXPERTS in notes:
        load = f"model = nf.load_quantized({own}(AutoConfig.from_pretrained(folder)).eval(), folder)"
        lines = [IMPORT, f"from transformers import AutoConfig, {own}", *lines[1:3], load]
    if not causal:
        return lines
    prompt = 'tokenizer("The capital of France is", return_tensors="pt")'
    if chat:
        prompt = (
            'tokenizer.apply_chat_template([{"role": "user", "content": "Why is the sky blue?"}], '
            'add_generation_prompt=True, return_tensors="pt", return_dict=True)'
        )
    lines[-4] += ", AutoTokenizer"
    generate = "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))"
    return [*lines, f"tokenizer = AutoTokenizer.from_pretrained(folder{remote})", f"prompt = {prompt}", generate]


def model_card(
    title: str,
    made: str,
    tags: Sequence[str],
    rows: Mapping[str, Any],
    notes: Sequence[str],
    use: Sequence[str],
    measured: Mapping[str, float] = {},
    measured_on: str = "",
) -> str:
    """Returns the text of README.md: Markdown with the front matter that model hubs read.

    made:     a sentence on how the folder was made
    rows:     what is known of the model; a row without a value is left out
    notes:    what a reader of the folder has to know
    use:      the lines that load the model
    measured: bits per byte of forward passes, and with measured_on a sentence on how they were measured
    """
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value not in (None, ""))
    task = "" if "from_pretrained" in use[-1] else "pipeline_tag: text-generation\n"  # The last line generates.
    parts = [
        f"---\nlibrary_name: transformers\n{task}tags: [{', '.join(map(str.lower, tags))}]\n---",
        f"# {title}",
        made,
        f"| | |\n|---|---|\n{table}",
    ]
    if measured:
        lines = "\n".join(f"| {what} | {value:.4f} |" for what, value in measured.items())
        parts += ["## Bits per byte", f"| forward pass | bits per byte |\n|---|---|\n{lines}", measured_on]
    if notes:
        parts += ["## What to know", "\n".join(f"- {note}" for note in notes)]
    parts += ["## Use", "\n".join(f"    {line}".rstrip() for line in use)]
    return "\n\n".join(parts) + "\n"


# ----------------------------------------------------------------------------------------------------------------------
# Models of transformers


@torch.no_grad()
def save_quantized(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Any = None,
    calibration: Iterable[Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    overwrite: bool = False,
    share_scales: bool = True,
) -> list[str]:
    """Writes a model of transformers that nf.convert has changed as NVFP4, or as FP8 if that is its forward pass, with
    its config, its tokenizer, a model card, and the Python file of a model that is not a part of transformers
    (trust_remote_code), in the format compressed-tensors.

    The written codes and scales are those of the trained forward pass, to the bit, except for layers that servers
    compute as one (share_scales). scripts.export writes this format, GGUF and others for this project's own models.
    docs/export.md lists the servers that read them, and says which were tried.

    model:       a converted PreTrainedModel whose nn.Linear layers and experts are in 4 bits or in FP8
    folder:      a new or an empty folder. With overwrite it may be an earlier export, which is replaced.
    tokenizer:   the model's tokenizer (of transformers), which is saved beside the weights
    calibration: a list of token ids (B, T), or of what a tokenizer returns, whose input_ids are taken: a tensor, or a
                 list of whole numbers, which is one row. The range of each layer's inputs is measured on them. An
                 expert that no token reaches gets the input range of the other experts of its layer. Without
                 calibration only weights are in 4 bits, and servers compute with inputs in 16 bits, which a returned
                 line says. Layers in FP8 need no calibration, because servers give the inputs of these layers a scale
                 for each token. If no layer is in 4 bits, a line says that calibration has no effect.
    dtype:       the dtype of all tensors that are not quantized: torch.bfloat16, torch.float16 or torch.float32. What
                 the model's class keeps in FP32 stays in FP32. In BF16 the embedding and the output head are rounded,
                 and 4-bit inputs amplify the difference. With torch.float32 and share_scales=False a model that
                 nf.load_quantized fills and nf.convert changes again has the same codes and block scales.
    share_scales: whether layers that servers compute as one, such as q, k and v, are rounded together, with one tensor
                 scale. vLLM keeps a single scale for them. They are as near to the full weights as in training, with
                 other codes, and a returned line says how near. With False the layers keep the codes of training, and a
                 server that fuses them computes something else.

    The folder appears complete, or not at all. All ranks of torchrun may call this function: the first one writes, and
    the others wait for it.

    Returns a line of text for each thing that the folder cannot hold, or holds in another way than the model. Each line
    is also logged as a warning, and stands in the model card. Raises ValueError for other arguments, for a model that
    is not one of transformers or was not converted, for values that are not finite or that dtype cannot hold, for
    Conv1D layers, experts of gpt-oss, adapters, and weights that FSDP has divided, and for a folder that is not an
    export or that another process is writing. Raises ModuleNotFoundError if safetensors or filelock is not installed.

    >>> nf.save_quantized(torch.nn.Linear(32, 16), "folder")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: save_quantized: Linear is no model of transformers; ...
    """
    out = huggingface.folder_of("save_quantized", model, folder).resolve()
    if dtype not in DTYPES:
        raise ValueError(f"save_quantized: dtype is {dtype!r}, expected one of {', '.join(map(str, DTYPES))}")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ValueError(f"save_quantized: tokenizer is a {type(tokenizer).__name__}, expected one of transformers")
    batches = [calibration] if isinstance(calibration, Mapping) else calibration  # what a tokenizer returns
    batches = [*batches] if isinstance(batches, Iterable) and not isinstance(batches, Tensor) else []
    batches = [ids.get("input_ids") if isinstance(ids, Mapping) else ids for ids in batches]
    batches = [torch.tensor([ids]) if isinstance(ids, list) and {*map(type, ids)} == {int} else ids for ids in batches]
    if calibration is not None and not batches:
        got = type(calibration).__name__
        raise ValueError(f"save_quantized: calibration is a {got}, expected a list with token ids (B, T), or None")
    model = getattr(model, "_orig_mod", model)  # The model inside of torch.compile's module.
    for problem in _problems(model, batches):
        raise ValueError(f"save_quantized: {problem}")
    require("filelock", "safetensors")

    def write() -> list[str]:
        with new_export(out, overwrite) as part:  # This refuses a wrong folder before minutes of work.
            notes = _write(model, part, batches, dtype, share_scales)
            if tokenizer is None:
                notes.append("no tokenizer is in the folder; pass tokenizer=, or copy its files there")
            else:
                tokenizer.save_pretrained(part)
            _write_card(model, part, notes, getattr(tokenizer, "chat_template", None) is not None)
        for line in notes:
            logger.warning(f"save_quantized: {line}")
        return notes

    return _once_of_all_ranks(str(out), write)


def _problems(model: nn.Module, batches: Sequence[Tensor]) -> Iterator[str]:
    """Yields what of a model, or of its calibration text, cannot be written in this format."""
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        yield f"{type(model).__name__} is no model of transformers; scripts.export writes nanochat_fp4's"
    if conv1d := [n for n, m in model.named_modules() if isinstance(m, QuantConv1D) and m.quantizes]:
        yield f"{some(conv1d)}: no Conv1D in compressed-tensors; model.save_pretrained writes them, unquantized"
    embeddings = {id(m.weight): n for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    for name, layer in model.named_modules():
        if hasattr(layer, "base_layer"):  # A layer of peft.
            yield f"{name} has an adapter; merge it into the weights first (merge_and_unload), and save the result"
        elif isinstance(layer, QuantLinear) and layer.quantizes and id(layer.weight) in embeddings:
            other = embeddings[id(layer.weight)]
            yield f"{name} is in 4 bits and shares its weight with {other}, which is not; skip it in nf.convert"
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh") or not parameter.numel():  # Divided by FSDP2, or by DeepSpeed.
            yield f"{name} is divided; gather all weights in one process (get_model_state_dict with full_state_dict)"
    table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(table, "num_embeddings", 2**31)
    for ids in batches:
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
            got = f"{tuple(ids.shape)} in {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
            yield f"calibration has {got}, expected token ids (B, T): ids[None], or return_tensors='pt'"
        elif ids.numel() and not (0 <= int(ids.min()) and int(ids.max()) < rows):
            got = f"token ids from {int(ids.min())} to {int(ids.max())}"
            yield f"calibration has {got}, expected 0 to {rows - 1}; take the model's own tokenizer"


def _write(
    model: nn.Module, folder: Path, calibration: list[Tensor], dtype: torch.dtype, share_scales: bool
) -> list[str]:
    """Writes weights and configs into an empty folder. Returns the lines that save_quantized returns."""
    state = model.state_dict()
    check_values(state)
    weights, notes = forward_weights(model, share_scales)
    input_scales: dict[str, float] = {}
    four_bits = {name for name, tensor in weights.items() if not in_eight_bits(tensor)}
    if not calibration and any(model.get_submodule(name).recipe.output.a.rounding for name in four_bits):
        notes.append(f"inputs of {len(four_bits)} layers stay in 16 bits, and training rounded them: pass calibration=")
    if calibration and not four_bits:
        notes.append("calibration= has no effect: no layer is in 4 bits, and FP8 inputs have a scale for each token")
    elif calibration:
        read = calibrate(model, weights, calibration, share_scales)
        if not read:
            raise ValueError("save_quantized: no layer read anything of the calibration text; give other token ids")
        input_scales = with_unread_experts(read, four_bits)
        if guessed := sorted(input_scales.keys() - read.keys()):
            notes.append(f"experts without calibration text have the range of the others: {some(guessed)}")
        if unread := sorted(four_bits - set(input_scales)):
            notes.append(f"layers that read no calibration text stay in {dtype}: {len(unread)}, such as {unread[0]}")
            weights = {name: t for name, t in weights.items() if name not in unread}
    places, stacks = huggingface.places_in(model), huggingface.stacked_experts(model)
    done = {f"{layer}.weight" for layer in weights}
    if missing := sorted(done - {parts[0].name for parts in places.values() if len(parts) == 1}):
        raise ValueError(
            f"save_quantized: checkpoints of {type(model).__name__} have no tensor for {missing[0]} alone, which its "
            "codes need; skip it in nf.convert"
        )
    quantized = [name for name, matrices in stacks.items() if done & set(matrices)]
    if left := sorted(set().union(*(stacks[name] for name in quantized)) - done):
        raise ValueError(f"save_quantized: {left[0]} is not in 4 bits, and others are; skip all of them or none")
    if any(f"{layer}.weight" in stacks[name] for name in quantized for layer in four_bits):
        notes.append(EXPERTS)

    # What the model's class keeps in FP32, and what it keeps out of files.
    in_fp32 = {*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())}
    in_fp32 |= {*(getattr(model, "_keep_in_fp32_modules", None) or ())} if dtype == torch.float16 else set()
    done |= {*quantized, *(getattr(model, "all_tied_weights_keys", None) or ())}
    done |= {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    rest = {name: tensor for name, tensor in state.items() if name not in done}
    plain = huggingface.as_in_checkpoints(model, rest)
    config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    for part in (model.config, model):
        if getattr(part, "_auto_class", None):  # Its class stands in a file beside the weights (trust_remote_code).
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(part, folder, config)
    huggingface.write(model, folder, config, dtype, places, plain, weights, input_scales, in_fp32)
    if (generation := getattr(model, "generation_config", None)) is not None:
        atomic_write(folder / "generation_config.json", generation.to_json_string())
    return notes


def _write_card(model: nn.Module, folder: Path, notes: list[str], chat: bool) -> None:
    """Writes the model card of a folder that has all other files."""
    about = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    groups = about["config_groups"].values()
    kinds = sorted({"FP8" if group["format"] == huggingface.EIGHT_BITS else "NVFP4" for group in groups})
    inputs = any(group["input_activations"] for group in groups)
    rows = {
        "QAT method": model.nf_report.recipe.name if hasattr(model, "nf_report") else "",
        "quantized": "weights and inputs" if inputs else "weights",
        "not quantized": ", ".join(["embeddings, norms", *about["ignore"][:4]]) + " ..." * (len(about["ignore"]) > 4),
        "parameters": f"{sum(p.numel() for p in model.parameters()):,}",
    }
    named = " and ".join(kinds)
    made = f"Written by nanochat_fp4 (`nf.save_quantized`) as `compressed-tensors` in {named}."
    use = reading_lines(folder, chat, notes)
    card = model_card(f"{type(model).__name__} in {named}", made, kinds, rows, notes, use)
    atomic_write(folder / "README.md", card)


_calls: Counter[str] = Counter()  # The number of calls of save_quantized in this process for each folder.


def _once_of_all_ranks(folder: str, write: Callable[[], list[str]]) -> list[str]:
    """Lets the first rank that calls this function for the folder run write(). The other ranks wait for the result, or
    the error. If only one rank calls, as rank 0 does in many programs, it does not wait for the others."""
    if not (dist.is_available() and dist.is_initialized()):
        return write()
    store = dist.distributed_c10d._get_default_store()
    key = f"nanochat_fp4.save_quantized/{folder}/{_calls[folder]}"
    _calls[folder] += 1
    result: list[str] | str = ""
    try:
        if store.add(f"{key}/callers", 1) > 1:
            store.wait([key], timedelta(days=1))
            result = json.loads(store.get(key))
            if isinstance(result, str):
                raise ValueError(f"save_quantized: another rank could not write {folder}: {result}")
            return result
    except dist.DistError as e:
        raise ValueError(f"save_quantized: rank 0 has ended; let all ranks end together, and look for {folder}") from e
    try:
        result = write()
        return result
    except BaseException as e:
        result = one_line(e)
        raise
    finally:
        store.set(key, json.dumps(result))
