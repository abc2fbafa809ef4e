"""Maps the experts of a model of transformers 5 to the tensors of a checkpoint, and back.

In such a model all experts of a layer are stacked in one parameter. In a checkpoint each expert and each projection is
a tensor of its own. revert_weight_conversion of transformers converts the first form into the second one, but codes
cannot pass through it. It is therefore given a number for each row of a 4-bit weight. In its result the numbers show
where each row belongs, and the codes of the rows are then put there. save.py and load.py do this in the two directions.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from nanochat_fp4.cli import UserError
from nanochat_fp4.nvfp4.experts import LINEARS, is_transposed, layout_of, slice_name
from nanochat_fp4.nvfp4.format import FP8, NVFP4Tensor

ROWS = 2**40  # Row r of the layer with number i has the number i * ROWS + r. The first layer has the number 1.


def stacked_parameters(model: nn.Module) -> Iterator[tuple[str, list[str], bool]]:
    """Yields three values for each parameter that stacks experts: its name, the names that its ExpertLinears have in a
    converted model, and whether it is transposed."""
    for name, module in model.named_modules():
        layout, before = layout_of(module), f"{name}." if name else ""
        for parameter in layout.parameters if layout else ():
            count = getattr(module, parameter).shape[0]
            layers = [f"{before}{LINEARS}.{parameter}.{slice_name(i)}" for i in range(count)]
            yield before + parameter, layers, is_transposed(module)


def numbered_rows(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns the numbers of the rows of each of these layers' parameters, by the parameter's name. They are int64 (N,
    1) for a linear layer, and (E, N, 1), or transposed (E, 1, N), for a parameter that stacks E experts.

    sizes maps the name of a layer to its number of rows N. Raises UserError if it has some experts of a layer but not
    the others.
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
    """Returns a state dict with the names and shapes that the tensors have in a checkpoint. Before transformers 5 these
    are the same as in the model."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return state
    return loading.revert_weight_conversion(model, state)


def are_rows(value: Tensor) -> bool:
    return value.dtype == torch.int64 and value.numel() > 0 and int(value.min()) >= ROWS


def source_of(name: str, value: Tensor, sizes: Mapping[str, int]) -> tuple[str, Tensor] | None:
    """Returns the layer whose rows form the checkpoint's tensor `name`, and the numbers of these rows. `value` has the
    numbers that stand in the place of the tensor. None means that the tensor is not the weight of a single layer."""
    numbers = (value // ROWS).unique()
    if value.shape[1:] != (1,) or len(numbers) > 1 or not name.endswith(".weight"):
        return None
    return list(sizes)[int(numbers) - 1], value.flatten() % ROWS


# ----------------------------------------------------------------------------------------------------------------------
# Reading checkpoints


def places(model: nn.Module, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[str, Tensor | None]]:
    """Returns the place in the model of each tensor of a checkpoint, by the tensor's name. A place is (name in the
    model, None), or for experts (the expert's layer, the numbers of the tensor's rows in the layer, int64 (N,)).

    shapes maps the names of the model's tensors to their shapes. The shapes of the checkpoint's tensors are added to
    it.
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
    """Gives the tensors that were read their names in the model, and stacks experts. `plain` and `codes` are changed in
    place.

    found: the result of `places`
    plain: the unquantized tensors by their names
    codes: the quantized weights by the names of their layers

    If the parts of an expert have several tensor scales, the expert gets a tensor scale for each row, (N, 1). Raises
    UserError if an expert is missing, or if a tensor is there twice.
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
    """Returns the parameter that stacks these experts, decoded, in FP32."""
    parts = (values[layer] for layer in layers)
    whole = torch.stack([_decoded(t) for t in parts])
    return whole.mT if transposed else whole


def _decoded(value: NVFP4Tensor | FP8 | Tensor) -> Tensor:
    return value.float() if isinstance(value, Tensor) else value.dequantize()


def _joined(pieces: list[tuple[Tensor, NVFP4Tensor | FP8 | Tensor]]) -> NVFP4Tensor | Tensor:
    """Puts an expert's weight together from pieces. Each piece is (the numbers of its rows, their values or codes)."""
    order, values = torch.cat([rows for rows, _ in pieces]).argsort(), [value for _, value in pieces]
    if not all(isinstance(value, NVFP4Tensor) for value in values):
        return torch.cat([_decoded(t) for t in values])[order]
    scale = torch.cat([t.tensor_scale.expand(len(t.codes)) for t in values])[order]
    scale = scale[0] if bool((scale == scale[0]).all()) else scale.unsqueeze(1)
    scales = torch.cat([t.scales.view(torch.uint8) for t in values])[order].view(torch.float8_e4m3fn)
    return NVFP4Tensor(torch.cat([t.codes for t in values])[order], scales, scale)
