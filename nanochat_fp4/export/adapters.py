"""Adapters beside weights that are 4-bit codes alone: the codes of a model, and adapters merged into them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nanochat_fp4.errors import UserError
from nanochat_fp4.export.load import compute_with, give_codes, without_memory
from nanochat_fp4.export.weights import forward_weights
from nanochat_fp4.nvfp4.experts import ExpertLinear
from nanochat_fp4.nvfp4.format import NVFP4Tensor
from nanochat_fp4.nvfp4.fused import groups_computed_as_one
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.quantizers import quantize


@torch.no_grad()
def keep_codes_alone(model: nn.Module) -> None:
    """Frees the weights of converted layers but for the codes of their forward pass, as load_quantized leaves them."""
    weights = forward_weights(model)
    for name in weights.tensors:
        layer = model.get_submodule(name)
        empty = nn.Parameter(without_memory(layer.weight, layer.weight.device), requires_grad=False)
        setattr(*((layer.experts[0], layer.parameter) if isinstance(layer, ExpertLinear) else (layer, "weight")), empty)
    compute_with(model, weights)


@torch.no_grad()
def merge_adapter(model: nn.Module, deltas: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """Adds adapters to weights that are 4-bit codes alone and rounds the sums to codes again, in place.

    model:  of load_quantized(codes=True), with adapters of peft. Take them off afterwards: model.unload()
    deltas: without peft, name of a layer -> the change of its weight, (out_features, in_features)
    Layers are decoded one after the other. peft's own merge_and_unload would add to weights that are not there.
    Returns the error of each changed weight, |Q(W + D) - (W + D)| / |W + D|. Raises UserError for a model that holds
    no such layer.

    >>> nf.merge_adapter(torch.nn.Linear(32, 16))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    nanochat_fp4.errors.UserError: merge_adapter: no layer has codes alone and an adapter; ...
    """
    names = {layer: name for name, layer in model.named_modules()}
    changes = {} if deltas is None else {model.get_submodule(name): delta for name, delta in deltas.items()}
    for module in model.modules() if deltas is None else ():
        if isinstance(getattr(module, "base_layer", None), QuantLinear) and hasattr(module, "get_delta_weight"):
            changes[module.base_layer] = sum(module.get_delta_weight(name) for name in module.active_adapters)
    errors = {}
    for group in groups_computed_as_one(model):
        if not group[0].packed or not changes.keys() & set(group):
            continue
        old = [layer.packed[1].dequantize() for layer in group]
        new = [w + changes[layer].float() if layer in changes else w for layer, w in zip(group, old)]
        whole = quantize(torch.cat(new), group[0].recipe.output.b.rounding)  # one tensor scale, as before
        starts = torch.tensor([0, *(len(w) for w in new)]).cumsum(0).tolist()
        parts = [
            NVFP4Tensor(whole.codes[a:b], whole.scales[a:b], whole.tensor_scale) for a, b in zip(starts, starts[1:])
        ]
        give_codes(group, parts)
        for layer, part, want in zip(group, parts, new):
            errors[names[layer]] = float((part.dequantize() - want).norm() / want.norm())
    if not errors:
        raise UserError(
            "merge_adapter: no layer has codes alone and an adapter; load the model with load_quantized(codes=True)"
        )
    return errors
