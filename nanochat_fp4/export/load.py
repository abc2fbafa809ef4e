"""Back in: the formats that are exported, and the same formats as others write them, into a model.

Nothing but torch is needed, except for GGUF (the gguf package).
"""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from nanochat_fp4.errors import UserError, one_line
from nanochat_fp4.export import gguf_file, huggingface, safetensors_file
from nanochat_fp4.export.verify import needs
from nanochat_fp4.export.weights import Weights
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.linear import groups_computed_as_one
from nanochat_fp4.nvfp4.operands import Codes


@torch.no_grad()
def load_quantized(model: nn.Module, folder: str | Path, codes: bool = False) -> nn.Module:
    """Loads the weights of an exported folder (safetensors, compressed-tensors, modelopt or GGUF), in place.

    model: a GPT or Llama of the folder's shapes; or, for folders that are not GGUF, any module whose layers have the
           file's names, as transformers' own. Converted or not.
    codes: False: 4-bit weights arrive decoded, in the parameters, for further training or for any inference.
           True: converted layers compute with the very codes of the file from now on, for inference: what is in their
           parameters no longer matters, and they are frozen.
    Returns the model. Raises UserError for a folder that holds none of the formats, other shapes, missing tensors, or
    codes=True with layers that are not converted (nf.convert), or that are computed as one with different scales.
    """
    folder = Path(folder)
    about = huggingface.describe(model) if isinstance(model, GPT | Llama) else None
    if (folder / gguf_file.FILE_NAME).exists():
        if about is None:
            raise UserError(f"{folder} is GGUF, which only a nanochat_fp4 Llama can be loaded from")
        plain, weights = _read_gguf(folder, about)
    else:
        plain, weights = _read_safetensors(folder, about)
    modules = dict(model.named_modules())
    vocab = getattr(getattr(model, "config", None), "vocab_size", None)
    expected = {n.removesuffix(".weight") for n, _ in model.named_parameters() if n.endswith(".weight")}
    if missing := sorted(expected - set(plain) - set(weights.tensors)):
        raise UserError(
            f"{folder} has no weights for {', '.join(missing[:4])}; load it into the model it was made from"
        )
    for name in expected:
        weight = modules[name].weight
        value = weights.tensors[name].dequantize() if name in weights.tensors else plain[name]
        rows = vocab if about and name in ("transformer.wte", "lm_head") else weight.shape[0]
        if value.shape != (rows, *weight.shape[1:]):
            raise UserError(f"{folder}: {name} is {tuple(value.shape)}, expected {(rows, *weight.shape[1:])}")
        weight[:rows].copy_(value)
    if isinstance(model, GPT):
        config = json.loads((folder / "config.json").read_text())
        for name, neutral in (("resid_lambdas", 1.0), ("x0_lambdas", 0.0)):
            scalars = getattr(model, name)
            scalars.copy_(torch.tensor(config.get(name, [neutral] * len(scalars))))
    if codes:
        _compute_with(model, weights)
    return model


def _compute_with(model: nn.Module, weights: Weights) -> None:
    """The operands of converted layers, from now on."""
    names = {layer: name for name, layer in model.named_modules()}
    groups = groups_computed_as_one(model)
    if unconverted := set(weights.tensors) - {names[layer] for group in groups for layer in group}:
        raise UserError(f"codes=True: {sorted(unconverted)[0]} is not converted; call nf.convert(model, method) first")
    for layers in groups:
        parts = [weights.tensors[names[layer]] for layer in layers if names[layer] in weights.tensors]
        if not parts:
            continue
        if len(parts) < len(layers) or any(not torch.equal(p.tensor_scale, parts[0].tensor_scale) for p in parts):
            raise UserError(
                f"codes=True: {names[layers[0]]} is computed as one with {len(layers) - 1} others, which have another "
                "tensor scale in this folder; load it with codes=False"
            )
        device = layers[0].weight.device
        operand = Codes(
            torch.cat([p.codes for p in parts]).to(device),
            torch.cat([p.scales.view(torch.uint8) for p in parts]).view(torch.float8_e4m3fn).to(device),
            parts[0].tensor_scale.to(device),
        )
        layers[0].packed = {len(layers): operand}
        for layer in layers:
            layer.weight.requires_grad_(False)


def _read_safetensors(folder: Path, about: huggingface.Description | None) -> tuple[dict[str, Tensor], Weights]:
    """(unquantized weights, 4-bit ones), by our names and with our rows."""
    tensors = safetensors_file.load(folder / huggingface.WEIGHTS_FILE)
    ours = {theirs: name for name, theirs in about.names.items()} if about else {}
    plain: dict[str, Tensor] = {}
    weights = Weights()
    for key in tensors:
        theirs, _, part = key.rpartition(".")
        name = ours.get(theirs, theirs)

        def rows(t: Tensor, name: str = name) -> Tensor:
            return about.rows(name, t) if about else t

        if part == "weight_packed":
            scale = tensors[f"{theirs}.weight_global_scale"].reciprocal().reshape(())
        elif part == "weight" and f"{theirs}.weight_scale_2" in tensors:
            scale = tensors[f"{theirs}.weight_scale_2"].reshape(())
        elif part == "weight":
            plain[name] = rows(tensors[key])
            continue
        else:
            continue
        weights.tensors[name] = NVFP4Tensor(rows(tensors[key]), rows(tensors[f"{theirs}.weight_scale"]), scale)
    return plain, weights


def _read_gguf(folder: Path, about: huggingface.Description) -> tuple[dict[str, Tensor], Weights]:
    needs("gguf")
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    try:
        read = {t.name: t for t in GGUFReader(folder / gguf_file.FILE_NAME).tensors}
    except (ValueError, IndexError, KeyError) as e:
        raise UserError(f"{folder / gguf_file.FILE_NAME} is not a whole GGUF file ({one_line(e)[:100]})") from e
    plain: dict[str, Tensor] = {}
    weights = Weights()
    for ours, theirs in gguf_file.names(about).items():
        tensor = read.get(f"{theirs}.weight")
        if tensor is None:
            continue
        if tensor.tensor_type != GGMLQuantizationType.NVFP4:
            value = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
            plain[ours] = gguf_file.rows_back(about, ours, value)
            continue
        scale = torch.tensor(read[f"{theirs}.scale"].data).reshape(()) if f"{theirs}.scale" in read else torch.ones(())
        t = gguf_file.unpack_blocks(torch.tensor(tensor.data), scale)
        weights.tensors[ours] = NVFP4Tensor(
            gguf_file.rows_back(about, ours, t.codes), gguf_file.rows_back(about, ours, t.scales), scale
        )
    return plain, weights
