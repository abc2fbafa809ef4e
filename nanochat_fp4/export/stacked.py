"""The names and rows that experts have in a checkpoint, where a model of transformers 5 stacks them.

In the model all experts of a layer are one parameter. In a checkpoint each expert and projection is a tensor of its
own. transformers' revert_weight_conversion maps the first to the second. Codes cannot pass through it, so it gets a
number for each row of a 4-bit weight instead. The numbers come out at the place of their rows, and the codes follow
them: out in save.py, and back in in load.py.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from nanochat_fp4.errors import UserError
from nanochat_fp4.nvfp4.experts import LINEARS, is_transposed, layout_of
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.operands import FP8

ROWS = 2**40  # row r of the layer with number i is i * ROWS + r, i from 1 on


def stacked_parameters(model: nn.Module) -> Iterator[tuple[str, list[str], bool]]:
    """(name, names of its ExpertLinears once converted, whether it is transposed) of each parameter of experts."""
    for name, module in model.named_modules():
        layout, before = layout_of(module), f"{name}." if name else ""
        for parameter in layout.parameters if layout else ():
            count = getattr(module, parameter).shape[0]
            layers = [f"{before}{LINEARS}.{parameter}.{i}" for i in range(count)]
            yield before + parameter, layers, is_transposed(module)


def numbered_rows(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Name of each parameter of these layers -> numbers of its rows, int64 (N, 1). Experts have (E, N, 1) or (E, 1, N).

    sizes: layer -> its number of rows. Raises UserError for some experts of a layer without the others.
    """
    rows = {name: torch.arange(n).unsqueeze(1) + i * ROWS for i, (name, n) in enumerate(sizes.items(), 1)}
    numbered = {}
    for path, layers, transposed in stacked_parameters(model):
        if not set(layers) & set(rows):
            continue
        if missing := [layer for layer in layers if layer not in rows]:
            raise UserError(f"save_quantized: {missing[0]} is not in 4 bits, and others are; skip all of them or none")
        whole = torch.stack([rows.pop(layer) for layer in layers])
        numbered[path] = whole.mT if transposed else whole
    return numbered | {f"{name}.weight": value for name, value in rows.items()}


def as_in_checkpoints(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict with the names and rows of checkpoints. Before transformers 5 they are the model's."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return state
    return loading.revert_weight_conversion(model, state)


def are_rows(value: Tensor) -> bool:
    return value.dtype == torch.int64 and value.numel() > 0 and int(value.min()) >= ROWS


def source_of(name: str, value: Tensor, sizes: Mapping[str, int]) -> tuple[str, Tensor] | None:
    """(layer, its rows) that make the checkpoint's tensor `name`, read from the numbers in its place. None if the
    tensor is not the weight of one layer."""
    numbers = (value // ROWS).unique()
    if value.shape[1:] != (1,) or len(numbers) > 1 or not name.endswith(".weight"):
        return None
    return list(sizes)[int(numbers) - 1], value.flatten() % ROWS


# ----------------------------------------------------------------------------------------------------------------------
# Back in


def places(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, Tensor | None]]:
    """Name of a checkpoint's tensor -> (name in the model, None), or (an expert's layer, its rows there, (N,)).

    shapes: name -> shape of the model's tensors. The checkpoint's shapes are added.
    """
    columns, sizes, names = {}, {}, list(shapes)
    for path, layers, transposed in stacked_parameters(model):
        rows, width = shapes[path][:0:-1] if transposed else shapes[path][1:]
        sizes |= dict.fromkeys(layers, rows)
        columns |= dict.fromkeys(layers, width)
    numbered = numbered_rows(model, sizes)
    state = {name: torch.full((1,), -1 - i) for i, name in enumerate(names) if name not in numbered} | numbered
    found: dict[str, tuple[str, Tensor | None]] = {}
    own = dict(shapes)
    for theirs, value in as_in_checkpoints(model, state).items():
        place = source_of(theirs, value, sizes) if are_rows(value) else (names[-1 - int(value[0])], None)
        if place is not None:
            layer, rows = found[theirs] = place
            shapes[theirs] = own[layer] if rows is None else (len(rows), columns[layer])
    return found


def into_model(
    path: Path, model: nn.Module, found: Mapping[str, tuple[str, Tensor | None]], plain: dict[str, Tensor],
    codes: dict[str, NVFP4Tensor | FP8],
) -> None:  # fmt: skip
    """Renames the tensors that were read to the model's names, and puts experts together. Changes `plain` and `codes`.

    found: the result of `places`
    codes: name of a layer -> its codes
    An expert whose parts have several tensor scales gets a tensor scale for each row, (N, 1).
    Raises UserError where an expert is missing, or a tensor is there twice.
    """
    pieces: dict[str, list[tuple[Tensor, NVFP4Tensor | Tensor]]] = {}
    read = plain | {f"{layer}.weight": t for layer, t in codes.items()}
    plain.clear(), codes.clear()
    for theirs, value in read.items():
        ours, rows = found.get(theirs, (theirs, None))
        if ours in plain or ours.removesuffix(".weight") in codes:
            raise UserError(f"{path}: {theirs} is there under two names; export or download it again")
        if rows is not None:
            pieces.setdefault(ours, []).append((rows, value))
        elif isinstance(value, NVFP4Tensor | FP8):
            codes[ours.removesuffix(".weight")] = value
        else:
            plain[ours] = value
    missing = {layer: theirs for theirs, (layer, _) in found.items() if theirs not in read}
    for name, layers, transposed in stacked_parameters(model):
        if not pieces.keys() & set(layers):
            continue
        if name in plain:
            raise UserError(f"{path} has {name} whole and one by one, expected one of them; export it again")
        if lost := [missing[layer] for layer in layers if layer in missing]:
            raise UserError(f"{path} has no {lost[0]}, and other experts of {name}; download or export it again")
        whole = {layer: _joined(pieces[layer]) for layer in layers}
        if all(isinstance(value, NVFP4Tensor) for value in whole.values()):
            codes |= whole
        else:
            plain[name] = stacked(whole, layers, transposed)


def stacked(values: Mapping[str, NVFP4Tensor | Tensor], layers: list[str], transposed: bool) -> Tensor:
    """The parameter that stacks these experts, decoded to FP32."""
    parts = (values[layer] for layer in layers)
    whole = torch.stack([_decoded(t) for t in parts])
    return whole.mT if transposed else whole


def _decoded(value: NVFP4Tensor | FP8 | Tensor) -> Tensor:
    return value.float() if isinstance(value, Tensor) else value.dequantize()


def _joined(pieces: list[tuple[Tensor, NVFP4Tensor | FP8 | Tensor]]) -> NVFP4Tensor | Tensor:
    """An expert's weight from rows of it."""
    order, values = torch.cat([rows for rows, _ in pieces]).argsort(), [value for _, value in pieces]
    if not all(isinstance(value, NVFP4Tensor) for value in values):
        return torch.cat([_decoded(t) for t in values])[order]
    scale = torch.cat([t.tensor_scale.expand(len(t.codes)) for t in values])[order]
    scale = scale[0] if bool((scale == scale[0]).all()) else scale.unsqueeze(1)
    scales = torch.cat([t.scales.view(torch.uint8) for t in values])[order].view(torch.float8_e4m3fn)
    return NVFP4Tensor(torch.cat([t.codes for t in values])[order], scales, scale)
