"""Collects the weights of the trained forward pass for an export, and the input scales that a server needs.

`forward_weights` returns the weights as the output GEMM multiplies them, with the codes and block scales of training.
What the formats of other programs cannot hold is rounded again, and a line of text says so.

A server computes some layers as one, and does not round inputs as training does. It rounds to nearest, with a constant
scale for each layer. `calibrate` finds this scale on some text. `served` computes like such a server on any machine, so
that the loss from the difference can be measured.
"""

import contextlib
import copy
import functools
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.nvfp4.contexts import full_precision
from nanochat_fp4.nvfp4.convert import uncalled
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.experts import ExpertLinear
from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, E4M3_MAX, NVFP4Tensor
from nanochat_fp4.nvfp4.layer import QuantLinear, quantized_weight
from nanochat_fp4.nvfp4.quantizers import quantize, round_e2m1, round_e4m3, to_fp8

SMALLEST_AMAX = 2.0**-100  # A lower bound of inputs' amax, with which 448 * 6 / amax is finite in FP32.
# The children of a module that vLLM and SGLang compute as one layer, with a single tensor_scale.
SERVED_AS_ONE = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"), ("gate_proj", "up_proj"), ("w1", "w3"),
    ("c_q", "c_k", "c_v"), ("c_gate", "c_fc"),
)  # fmt: skip


def in_eight_bits(weight: NVFP4Tensor) -> bool:
    """Whether a weight has FP8 numbers, and not 4-bit codes."""
    return weight.codes.dtype != torch.uint8


def in_servers(model: nn.Module) -> list[list[nn.Linear]]:
    """Returns the linear layers, quantized or not, that a server computes as one (SERVED_AS_ONE)."""
    children = [dict(module.named_children()) for module in model.modules()]
    found = (
        [c[name] for name in names if isinstance(c.get(name), nn.Linear)] for c in children for names in SERVED_AS_ONE
    )
    return [layers for layers in found if len(layers) > 1]


def served_as_one(model: nn.Module) -> list[tuple[QuantLinear, ...]]:
    """Returns the groups of quantized layers that a server computes as one. The layers of a group have the same recipe,
    so that they can be rounded together."""
    groups = []
    for layers in in_servers(model):
        alike: dict[tuple, list[QuantLinear]] = {}
        for layer in layers:
            if isinstance(layer, QuantLinear) and layer.quantizes:
                alike.setdefault((layer.recipe, layer.in_features), []).append(layer)
        groups += [tuple(layers) for layers in alike.values() if len(layers) > 1]
    return groups


@torch.no_grad()
def forward_weights(model: nn.Module, share_scales: bool = True) -> tuple[dict[str, NVFP4Tensor], list[str]]:
    """Returns the weights of a converted model as its forward pass multiplies them, and what is to be said of them.

    share_scales: whether layers that a server computes as one are rounded together, with one tensor_scale. The codes of
                  layers that the model computes one by one are then not those of training, and a line says how far
                  both lie from the weights.

    The weights are on the CPU, by the names of their layers. A 4-bit weight has codes (N, K/2), scales (N, K/16) and
    tensor_scale (). The weight of a layer whose forward pass is in FP8 has E4M3 numbers (N, K), no scales (N, 0), and
    tensor_scale (). Layers that are computed as one have the same tensor_scale.

    Raises ValueError for a model whose forward pass has no quantized weights.
    """
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    groups, notes = groups_of(model), {uncalled(model)}
    alone = {group[0] for group in groups if len(group) == 1} if share_scales else set()
    together = [group for group in served_as_one(model) if alone.issuperset(group)]
    shared = {layer: names[layer] for group in together for layer in group}
    groups = [group for group in groups if group[0] not in shared] + together
    operands = [quantized_weight(group) for group in groups]
    if not groups or any(operand is None for operand in operands):
        problem, method = "this model was not converted", "clover"
        if hasattr(model, "nf_report"):
            layers = [group[0] for group, operand in zip(groups, operands) if operand is None] or [*names]
            began, recipe = model.nf_report.recipe, layers[0].recipe
            ends = "" if recipe == began else f", with which {began.name} ends,"  # It has changed late in the run.
            method = began.name if ends else method
            why = "rounds anew in each pass" if recipe.output.random else "quantizes nothing"
            problem = f"the forward pass of {recipe.name}{ends} {why}, and model.save_pretrained writes the model"
        raise ValueError(f'{problem}; convert it, for example nf.convert(model, "{method}"), which rounds it')
    found = {}
    for layers, operand in zip(groups, operands):
        if operand.is_fp8 and operand.codes.dtype == torch.float8_e4m3fn:
            whole = NVFP4Tensor(operand.codes, operand.codes[:, :0], operand.tensor_scale)
        elif operand.scales is not None and operand.tensor_scale.numel() == 1:
            whole = operand
        else:
            whole = quantize(operand.dequantize(), "rtn")
            notes.add("operands in another format than NVFP4: the weights are rounded again, to nearest")
        rows = [layer.out_features for layer in layers]
        for layer, codes, scales in zip(layers, whole.codes.split(rows), whole.scales.split(rows)):
            found[names[layer]] = NVFP4Tensor(codes.cpu(), scales.cpu(), whole.tensor_scale.float().cpu())
    if shared:
        squares = torch.zeros(3)  # Of the errors with common scales, of those with training's, and of the weights.
        for layer, name in shared.items():
            full, own = layer.matrix.float().cpu(), quantized_weight((layer,)).dequantize().cpu()
            squares += torch.stack([t.square().sum() for t in (found[name].dequantize() - full, own - full, full)])
        common, own = (squares[:2] / squares[2].clamp(min=1e-30)).sqrt().tolist()
        notes.add(
            f"{len(shared)} layers, such as {names[together[0][0]]}, have common tensor scales, for readers that fuse "
            f"them: rounded again from the full weights, they differ from them by {common:.2%} (root mean square), "
            f"and by {own:.2%} with training's scales"
        )
    quantized = {layer for group in groups for layer in group}
    for layers in () if isinstance(model, GPT) else in_servers(model):
        if len({layer.recipe if layer in quantized else None for layer in layers}) > 1:
            name = next(names[layer] for layer in layers if layer in quantized)
            notes.add(
                f"vLLM computes {name} as one with layers that are quantized otherwise or not, and refuses the folder; "
                "skip all of them in nf.convert, or none"
            )
            break
    return {name: found[name] for name in names.values() if name in found}, sorted(notes - {""})


def check_values(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Raises ValueError for the first tensor that has NaN or infinity, or a value that dtype cannot hold.

    dtype is the dtype in which the tensors will be written. A tensor that would become zero is refused, too.
    """
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if value.is_meta:
            raise ValueError(f"{name} is on the meta device, so it has no values; load the weights first")
        largest = torch.stack(torch.aminmax(value.detach().float() if value.element_size() == 1 else value.detach()))
        largest = largest.abs().max()  # NaN stays NaN
        if not bool(largest.isfinite()):
            raise ValueError(f"{name} has values that are not finite; take an earlier step, or download it again")
        there = largest.to(dtype or value.dtype).float()  # FP8 has no isfinite.
        if not bool(there.isfinite()) or (bool(largest > 0) and not bool(there > 0)):
            raise ValueError(
                f"{name} has values up to {float(largest):.3g}, which {dtype} does not hold; use another dtype"
            )


# ----------------------------------------------------------------------------------------------------------------------
# The rounding of inputs in a server


def static_quantize(x: Tensor, global_scale: Tensor) -> Tensor:
    """Rounds x (..., K) to NVFP4 as a server does, with a given 1 / tensor_scale, () or (..., 1). Returns the rounded
    values, float32.

    A block's scale is amax / 6, rounded to nearest. Values beyond the range of global_scale are clipped.
    """
    blocks = (x.float() * global_scale).unflatten(-1, (-1, BLOCK))
    scale = round_e4m3(blocks.abs().amax(dim=-1, keepdim=True) / E2M1_MAX).float()
    codes = round_e2m1(torch.where(scale > 0, blocks / scale, 0.0))
    return (codes * scale).flatten(-2) / global_scale


@contextlib.contextmanager
def served(
    model: nn.Module,
    weights: Mapping[str, NVFP4Tensor],
    input_scales: Mapping[str, float | None] | None = None,
) -> Iterator[nn.Module]:
    """Gives a copy of the model that computes like a server with an export, in the precision of autocast.

    weights:      the quantized weights, which the copy uses decoded
    input_scales: for each layer whose inputs are rounded, 448 * 6 / amax of its input, or None to use the amax of each
                  token. Inputs of layers in FP8 are rounded to E4M3 with a scale for each token. Without input_scales,
                  inputs are not rounded.
    """
    copied = copy.deepcopy(model)
    layers = dict(copied.named_modules())
    with torch.no_grad():
        for name, tensor in weights.items():
            layer = layers[name]  # The weight of an expert is that of all experts.
            (layer.part if isinstance(layer, ExpertLinear) else layer.weight).copy_(tensor.dequantize())

    def rounded(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x, constant = args[0], input_scales[name]
        amax = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX)
        if in_eight_bits(weights[name]):
            scale = amax / E4M3_MAX
            return ((to_fp8(x.float() / scale, "e4m3").float() * scale).to(x.dtype), *args[1:])
        scale = E4M3_MAX * E2M1_MAX / amax if constant is None else torch.full_like(amax, constant)
        return (static_quantize(x, scale).to(x.dtype), *args[1:])

    for name in input_scales or ():
        layers[name].register_forward_pre_hook(functools.partial(rounded, name))
    with full_precision(copied):
        yield copied


@torch.no_grad()
def calibrate(
    model: nn.Module, weights: Mapping[str, NVFP4Tensor], batches: Iterable[Tensor], share_scales: bool = True
) -> dict[str, float]:
    """Returns 448 * 6 / amax of the input of each quantized layer, by the layer's name. The amax is taken over all
    batches, which are token ids (B, T).

    Meanwhile the model computes with its quantized weights and unquantized inputs. The result leaves out layers that
    were not called with any token. With share_scales, layers that a server computes as one get the widest range that
    any of them needs. Raises ValueError if an input is not finite.
    """
    amax: dict[str, Tensor] = {}

    def look(name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].numel():  # Some models call experts that get no tokens.
            amax[name] = torch.maximum(amax.get(name, args[0].new_zeros(())), args[0].abs().amax())

    with served(model, weights) as copied:
        copied.eval()
        device = next(copied.parameters()).device
        for name, layer in copied.named_modules():
            if name in weights:
                layer.register_forward_pre_hook(functools.partial(look, name))
        for ids in batches:
            copied(ids.to(device))
    scales = {}
    for name, value in amax.items():
        largest = float(value)
        if not largest < float("inf"):
            raise ValueError(f"the input of {name} is not finite on the calibration text; export another step")
        scales[name] = E4M3_MAX * E2M1_MAX / max(largest, SMALLEST_AMAX) if largest > 0 else 1.0
    names = {layer: name for name, layer in model.named_modules()}
    for group in served_as_one(model) if share_scales else ():
        read = [names[layer] for layer in group if names[layer] in scales]
        scales |= dict.fromkeys(read, min((scales[name] for name in read), default=1.0))
    return scales


_EXPERT = re.compile(r"(\b(?:experts|expert_linears)\.(?:\w*[a-z_]\w*\.)*?)(?:expert_)?\d+(?=\.|$)")


def with_unread_experts(scales: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Returns the input scales, completed for experts that no token has reached. Such an expert gets the smallest scale
    of the other experts of its layer.

    The smallest scale belongs to the largest input. The experts of a layer read the same activations, so the expert
    gets the widest range that any of them needed.
    """
    smallest: dict[str, float] = {}
    for name, scale in scales.items():
        layer = _EXPERT.sub(r"\1*", name)  # mlp.experts.*.up_proj
        smallest[layer] = min(scale, smallest.get(layer, scale))
    found = {name: scales.get(name, smallest.get(_EXPERT.sub(r"\1*", name))) for name in names}
    return {name: scale for name, scale in found.items() if scale is not None}
