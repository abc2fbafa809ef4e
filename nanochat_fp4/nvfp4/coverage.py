"""What of a model convert reaches: its output heads and adapters, parents that compute without calling their layers,
and the share of its weights in matrix products that is quantized.

Everything here looks at types, names and shapes; nothing of the model is run.
"""

import fnmatch
from collections.abc import Iterable

from torch import nn

# Output heads by name: their error reaches the loss without any averaging, and all recipes keep them in BF16.
HEAD_NAMES = ("lm_head", "*.lm_head")
ADAPTER_PARTS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}  # peft's
ENOUGH = 0.9  # a smaller share of quantized weights is worth a warning


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is the linear layer of transformers' GPT-2, Conv1D: weight (in, out), not (out, in)."""
    return any(f"{c.__module__}.{c.__name__}" == "transformers.pytorch_utils.Conv1D" for c in type(module).__mro__)


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of all that can be converted by its type: nn.Linear and transformers' Conv1D."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) or is_conv1d(m)}


def output_heads(model: nn.Module, linears: Iterable[str]) -> set[str]:
    """Names of the linear layers that make the model's output.

    By name; else what get_output_embeddings() of the model, or of a model in it, returns; else the last linear layer,
    where it comes after a stack of blocks and is in no block: a classifier.
    """
    linears = list(linears)
    named = {name for name in linears if any(fnmatch.fnmatchcase(name, pattern) for pattern in HEAD_NAMES)}
    if named:
        return named
    modules = dict(model.named_modules())
    outputs = [m.get_output_embeddings() for m in modules.values() if hasattr(m, "get_output_embeddings")]
    if embedded := {name for name in linears if any(modules[name] is output for output in outputs)}:
        return embedded
    stacks = [
        name
        for name, m in modules.items()
        if isinstance(m, nn.ModuleList | nn.Sequential)
        and any(not isinstance(child, nn.Linear) and list(linear_layers(child)) for child in m)
        and name
    ]
    inside = {name for name in linears if any(name.startswith(stack + ".") for stack in stacks)}
    return {linears[-1]} if inside and linears[-1] not in inside else set()


def reason_to_leave(name: str, linear: nn.Module) -> str | None:
    """Why a linear layer cannot be replaced by one that only computes differently, or None."""
    if ADAPTER_PARTS.intersection(name.split(".")):
        return "an adapter's low-rank factor"
    if "weight" not in linear._parameters:
        return "its weight is computed from other parameters (weight norm and the like)"
    return None


def call_every_layer(model: nn.Module) -> list[str]:
    """Switches off what computes without calling the layers: the fast path that nn.TransformerEncoderLayer takes in
    eval mode, which would validate another model than the one that was trained. Returns the names of the layers."""
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module.activation_relu_or_gelu:
            module.activation_relu_or_gelu = 0  # its own note that the fast path does not know the activation
            changed.append(name)
    return changed


def shares(model: nn.Module, converted: Iterable[str], heads: set[str]) -> tuple[float, float, dict[str, float]]:
    """(share of the weights in matrix products that converted layers hold, the same without the output heads, and what
    else there is: kind -> share). Weights of embeddings and norms are in no product and are not counted; a head that
    shares its weight with an embedding is."""
    converted = set(converted)
    modules = dict(model.named_modules())
    counted: dict[int, tuple[str, int]] = {}  # id of a parameter -> (kind, elements)
    for name, module in modules.items():
        linear = isinstance(module, nn.Linear) or is_conv1d(module)
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if parameter.dim() > 2 and parameter.shape[0] == 1 and not isinstance(module, nn.modules.conv._ConvNd):
                continue  # added to each row of a batch: a vision transformer's positions
            kind = _kind(module, parameter_name, parameter.dim())
            if linear:
                kind = "quantized" if name in converted else "head" if name in heads else "linear layers left alone"
            counted[id(parameter)] = (kind, parameter.numel())
    sums: dict[str, int] = {}
    for kind, elements in counted.values():
        sums[kind] = sums.get(kind, 0) + elements
    total = sum(sums.values()) or 1
    quantized, head = sums.pop("quantized", 0), sums.pop("head", 0)
    return quantized / total, quantized / max(1, total - head), {kind: n / total for kind, n in sums.items()}


def _kind(module: nn.Module, name: str, dim: int) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight of nn.MultiheadAttention, which is no layer of its own: not supported"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions: not supported"
    if dim == 3:
        return f"3-D weights ({type(module).__name__}.{name}), experts for example: not supported"
    return f"{type(module).__name__}.{name}, no linear layer: not supported"
