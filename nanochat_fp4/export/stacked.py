"""The tensors of a checkpoint, where transformers 5 keeps them otherwise in its models.

The experts of a layer are one parameter there, where a checkpoint has a tensor for each expert and projection. Its
revert_weight_conversion knows the names and rows of checkpoints. Here it gets numbers of rows in place of weights in 4
bits, and the codes follow their rows out (save.py).
"""

import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from nanochat_fp4.errors import UserError
from nanochat_fp4.nvfp4.experts import LINEARS, stacked_linears

ROWS = 2**40  # row r of the layer with number i is i * ROWS + r, i from 1 on


def stacked_parameters(model: nn.Module) -> Iterator[tuple[str, list[str], bool]]:
    """Of each parameter of experts: its name, the names of its ExpertLinears, and whether it is transposed."""
    for name, module in model.named_modules():
        for parameter, linears in stacked_linears(module).items():
            before = f"{name}." if name else ""
            layers = [f"{before}{LINEARS}.{parameter}.{i}" for i in range(len(linears))]
            yield before + parameter, layers, linears[0].transposed


def numbered_rows(model: nn.Module, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Name of each parameter of these layers -> its rows' numbers, int64 (N, 1), of experts (E, N, 1) or (E, 1, N).

    sizes: layer -> its number of rows. Raises UserError for some experts of a layer without the others.
    """
    rows = {name: torch.arange(n).unsqueeze(1) + i * ROWS for i, (name, n) in enumerate(sizes.items(), 1)}
    numbered = {}
    for path, layers, transposed in stacked_parameters(model):
        if not set(layers) & set(rows):
            continue
        if missing := [layer for layer in layers if layer not in rows]:
            raise UserError(f"save_quantized: {missing[0]} is not in 4 bits, and others are; skip all of them or none")
        stacked = torch.stack([rows.pop(layer) for layer in layers])
        numbered[path] = stacked.mT if transposed else stacked
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
    """(layer, its rows) that a checkpoint's tensor `name` has, by the numbers in its place. None where it is not the
    weight of one layer."""
    numbers = (value // ROWS).unique()
    if value.shape[1:] != (1,) or len(numbers) > 1 or not name.endswith(".weight"):
        return None
    return list(sizes)[int(numbers) - 1], value.flatten() % ROWS
