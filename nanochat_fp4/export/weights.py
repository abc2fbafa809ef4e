"""Collects the weights of the trained forward pass for an export, and the input scales that a server needs.

`forward_weights` returns the weight operands of the output GEMM, with the codes and block scales that training computed
with. The formats of other programs cannot hold every operand. Other kinds of operands are rounded again, and
`Weights.lost` then says what was lost.

A server does not round inputs as training does. It rounds to nearest, with a constant scale for each layer. `calibrate`
finds this scale on some text. `served` computes like such a server on any machine, so that the loss from the difference
can be measured.
"""

import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from nanochat_fp4.cli import UserError
from nanochat_fp4.nvfp4.contexts import full_precision, quantized_weight
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.first_steps import uncalled
from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, E4M3_MAX, FP8, NVFP4Tensor
from nanochat_fp4.nvfp4.gemm import Quantized
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.quantizers import quantize, round_e2m1, round_e4m3, to_fp8

AGAIN = "rtn"  # The rounding of operands that are no NVFP4 tensors.
SMALLEST_AMAX = 2.0**-100  # A lower bound of inputs' amax, with which 448 * 6 / amax is finite in FP32.


@dataclass
class Weights:
    """The quantized weights of a model.

    tensors: the weight of each layer, by the layer's name, on the CPU. A 4-bit weight has codes (N, K/2), scales
             (N, K/16) and tensor_scale (). Layers that are computed as one have the same tensor_scale. The weight of a
             layer whose forward is in FP8 with one scale has E4M3 numbers (N, K) and tensor_scale ().
    lost:    one line that says which part of the trained forward pass the tensors leave out, or ""
    """

    tensors: dict[str, NVFP4Tensor | FP8] = field(default_factory=dict)
    lost: str = ""

    @property
    def eight_bits(self) -> set[str]:
        """The names of the layers in FP8."""
        return {name for name, tensor in self.tensors.items() if isinstance(tensor, FP8)}

    def separate(self, groups: Iterable[Sequence[str]]) -> list[tuple[Sequence[str], float]]:
        """Returns the groups of layers whose tensor scales differ, each with the ratio of its largest tensor scale to
        its smallest one."""
        found = []
        for names in groups:
            scales = [float(self.tensors[name].tensor_scale) for name in names if name in self.tensors]
            if scales and max(scales) != min(scales):
                found.append((names, max(scales) / min(scales)))
        return found


def _why_there_are_no_weights(model: nn.Module) -> str:
    """Returns the line for a model whose forward pass has no quantized weights that a file could hold."""
    if not hasattr(model, "nf_report"):
        return 'a model that is not converted has no 4-bit weights; convert it first, nf.convert(model, "clover")'
    recipe = model.nf_report.recipe
    if recipe.output.random:
        return (
            f"the method {recipe.name} draws the forward pass's rounding anew in each training pass, so it has no "
            "weights that a file can hold; convert the model to a method that rounds to nearest there, for example "
            'nf.convert(model, "clover")'
        )
    return (
        f"the method {recipe.name} has no 4-bit weights in its forward pass; "
        'convert the model to another one first, nf.convert(model, "clover")'
    )


@torch.no_grad()
def forward_weights(model: nn.Module, together: Iterable[Sequence[str]] = ()) -> Weights:
    """Returns the weights of a converted model as its forward pass multiplies them.

    together: groups of names of layers that a server fuses, although the model computes the layers one by one. The
              layers of a group are rounded together, with one tensor_scale. Their codes are then not those of training.

    Raises UserError for a model whose forward pass has no quantized weights.
    """
    names = {layer: name for name, layer in model.named_modules() if isinstance(layer, QuantLinear)}
    modules = {name: layer for layer, name in names.items()}
    groups = groups_of(model)
    forced = [tuple(modules[name] for name in group if name in modules) for group in together]
    if forced:
        in_forced = {layer for group in forced for layer in group}
        groups = [g for g in forced if g] + [g for g in groups if not in_forced.intersection(g)]
    operands = [quantized_weight(group) for group in groups]
    if not groups or any(operand is None for operand in operands):
        raise UserError(_why_there_are_no_weights(model))
    result, lost = Weights(), {uncalled(model)}
    for layers, operand in zip(groups, operands):
        stacked, what = _as_stored(operand)
        lost.add(what)
        start = 0
        for layer in layers:
            rows = slice(start, start := start + layer.out_features)
            scale = stacked.tensor_scale.float().cpu()
            if isinstance(stacked, FP8):
                result.tensors[names[layer]] = FP8(stacked.codes[rows].cpu(), scale)
            else:
                result.tensors[names[layer]] = NVFP4Tensor(stacked.codes[rows].cpu(), stacked.scales[rows].cpu(), scale)
    result.tensors = {name: result.tensors[name] for name in modules if name in result.tensors}
    result.lost = "; ".join(sorted(lost - {""}))
    return result


def _as_stored(operand: Quantized) -> tuple[NVFP4Tensor | FP8, str]:
    """Returns the operand as a tensor of NVFP4 or FP8, and words for the part of the operand that is lost, or ""."""
    if operand.is_fp8 and operand.codes.dtype == torch.float8_e4m3fn:
        return FP8(operand.codes, operand.tensor_scale), ""
    if operand.scales is not None and operand.tensor_scale.numel() == 1:
        return operand, ""
    what = "operands in another format than NVFP4: the weights are rounded again, to nearest"
    return quantize(operand.dequantize().float(), AGAIN), what


def check_values(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
    """Raises UserError for the first tensor that has NaN or infinity, or a value that dtype cannot hold.

    dtype is the dtype in which the tensors will be written. A tensor that would become zero is refused, too.
    """
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if value.is_meta:
            raise UserError(f"{name} is on the meta device, so it has no values; load the weights first")
        largest = torch.stack(torch.aminmax(value.detach().float() if value.element_size() == 1 else value.detach()))
        largest = largest.abs().max()  # NaN stays NaN
        if not bool(largest.isfinite()):
            raise UserError(f"{name} has values that are not finite; export the weights of an earlier step")
        there = largest.to(dtype or value.dtype)
        if not bool(there.isfinite()) or (bool(largest > 0) and not bool(there > 0)):
            raise UserError(
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
    weights: Weights,
    input_scales: Mapping[str, float | None] | None = None,
    dtype: torch.dtype = torch.float32,
    decoded: torch.dtype = torch.float32,
) -> Iterator[nn.Module]:
    """Gives a copy of the model that computes like a server with an export, in the precision of autocast.

    weights:      the quantized weights, which the copy uses decoded and rounded to the dtype `decoded`
    input_scales: for each layer whose inputs are rounded, 448 * 6 / amax of its input, or None to use the amax of each
                  token. Inputs of layers in FP8 are rounded to E4M3 with a scale for each token. Without input_scales,
                  inputs are not rounded.
    dtype:        the dtype that all other weights are rounded to
    """
    copied = copy.deepcopy(model)
    layers, eight_bits = dict(copied.named_modules()), weights.eight_bits
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            if name.endswith(".weight"):  # Other parameters stay in FP32.
                parameter.copy_(parameter.to(dtype))
        for name, tensor in weights.tensors.items():
            getattr(layers[name], "part", layers[name].weight).copy_(tensor.dequantize(decoded))

    def rounded(name: str):
        constant = input_scales[name]

        def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            x = args[0]
            if name in eight_bits:
                scale = x.float().abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX) / E4M3_MAX
                return ((to_fp8(x.float() / scale, "e4m3").float() * scale).to(x.dtype), *args[1:])
            if constant is None:
                scale = E4M3_MAX * E2M1_MAX / x.float().abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_AMAX)
            else:
                scale = torch.tensor(constant, dtype=torch.float32, device=x.device)
            return (static_quantize(x, scale).to(x.dtype), *args[1:])

        return hook

    for name in input_scales or ():
        layers[name].register_forward_pre_hook(rounded(name))
    with full_precision(copied):
        yield copied


@torch.no_grad()
def calibrate(model: nn.Module, weights: Weights, batches: Iterable[Tensor]) -> dict[str, float]:
    """Returns 448 * 6 / amax of the input of each quantized layer, by the layer's name. The amax is taken over all
    batches, which are token ids (B, T).

    Meanwhile the model computes with its quantized weights and unquantized inputs. The result leaves out layers that
    were not called with any token. Raises UserError if an input is not finite.
    """
    amax: dict[str, Tensor] = {}

    def look(name: str):
        def hook(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0].numel():  # Some models call experts that get no tokens.
                amax[name] = torch.maximum(amax.get(name, args[0].new_zeros(())), args[0].abs().amax())

        return hook

    with served(model, weights) as copied:
        copied.eval()
        device = next(copied.parameters()).device
        for name, layer in copied.named_modules():
            if name in weights.tensors:
                layer.register_forward_pre_hook(look(name))
        for ids in batches:
            copied(ids.to(device))
    scales = {}
    for name, value in amax.items():
        largest = float(value)
        if not largest < float("inf"):
            raise UserError(f"the input of {name} is not finite on the calibration text; export another step")
        scales[name] = E4M3_MAX * E2M1_MAX / max(largest, SMALLEST_AMAX) if largest > 0 else 1.0
    return scales


def with_unread_experts(scales: Mapping[str, float], names: Iterable[str]) -> dict[str, float]:
    """Returns the input scales, completed for experts that no token has reached. Such an expert gets the smallest scale
    of the other experts of its layer.

    The smallest scale belongs to the largest input. The experts of a layer read the same activations, so the expert
    gets the widest range that any of them needed.
    """
    smallest: dict[str, float] = {}
    for name, scale in scales.items():
        smallest[_layer_of(name)] = min(scale, smallest.get(_layer_of(name), scale))
    found = {name: scales.get(name, smallest.get(_layer_of(name))) for name in names}
    return {name: scale for name, scale in found.items() if scale is not None}


_EXPERT = re.compile(r"(\b(?:experts|expert_linears)\.(?:\w*[a-z_]\w*\.)*?)(?:expert_)?\d+(?=\.|$)")


def _layer_of(name: str) -> str:
    """Returns an expert's name with a star for its number, such as mlp.experts.*.up_proj, and any other name as it
    is."""
    return _EXPERT.sub(r"\1*", name)
