"""What convert says of a model: the layers that it converted, the layers that it left alone and why, and the share of
the weights that compute in few bits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from nanochat_fp4.nvfp4.experts import LINEARS, stacked_linears
from nanochat_fp4.nvfp4.heads import is_linear
from nanochat_fp4.nvfp4.layer import other_dtype
from nanochat_fp4.nvfp4.recipes import Recipe

# Kinds of weights that are meant to stay in high precision.
ON_PURPOSE = (AS_ASKED, ADAPTERS, ROUTERS) = ("left out as asked", "adapters' factors", "routers")
LEFT_ALONE = "linear layers left alone for the reasons below"
# The report warns if less than this share is quantized of the weights that were not meant to stay in high precision.
ENOUGH = 0.9


@dataclass(repr=False)
class ConvertReport:
    """The result of convert: the names of the converted layers, and (name, reason) for each layer left alone.

    Shares are fractions of the weights that take part in matrix products.
    """

    recipe: Recipe
    converted: list[str] = field(default_factory=list)
    left_alone: list[tuple[str, str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # layers left alone because their whole block stays in BF16
    quantized: float = 1.0  # the share of the weights that the converted layers hold
    quantized_without_heads: float = 1.0  # the same share if output heads are not counted
    others: dict[str, float] = field(default_factory=dict)  # kind of weights in high precision -> their share
    slow_paths: list[str] = field(default_factory=list)  # layers whose fast path in eval mode was switched off
    experts: int = 0  # number of modules whose stacked experts were converted
    progress: float | None = None  # the share of the run's steps that set_progress was told last
    refused_dtypes: list[str] = field(default_factory=list)  # dtypes of converted weights that layers cannot compute in

    def __repr__(self) -> str:
        return f"<ConvertReport {self.recipe.name}: {len(self.converted)} converted, {len(self.left_alone)} left alone>"

    def __str__(self) -> str:
        share = f"{100 * self.quantized:.1f}% of the weights in matrix products"
        if round(self.quantized, 3) != round(self.quantized_without_heads, 3):
            share += f", {100 * self.quantized_without_heads:.1f}% without the output head"
        layers = f"{len(self.converted)} linear layer{'' if len(self.converted) == 1 else 's'}"
        done = "converted" if self.recipe.quantizes else "left in BF16, as the method says,"
        lines = [f"QAT method {self.recipe.name}", f"{done} {layers}: {share}"]
        if self.recipe.quantizes and not self.recipe.quantizes_backward:
            lines.append("the backward pass is not quantized: gradients stay in 16 or 32 bits")
        if self.recipe.random_output:
            lines.append(
                "the forward pass draws its rounding anew in each training pass, and with one fixed seed in an "
                "evaluation; its weights cannot be exported"
            )
        missed = sum(share for kind, share in self.others.items() if kind not in ON_PURPOSE)
        if self.recipe.quantizes and self.quantized < ENOUGH * (self.quantized + missed):
            lines.append(
                f"warning: nobody asked for {100 * missed:.1f}% of the weights in matrix products to stay in high "
                "precision; the lines below name them"
            )
        if self.refused_dtypes:
            lines.append(
                f"warning: weights are in {', '.join(self.refused_dtypes)}, and the first forward will refuse them; "
                f"layers compute in float32 or bfloat16; {other_dtype(self.refused_dtypes)}"
            )
        lines += [
            f"in high precision, {100 * share:.1f}% of the weights in matrix products: {kind}"
            for kind, share in self.others.items()
        ]
        if self.experts:
            lines.append(f"experts of {self.experts} layers: each computes its own GEMMs, one after the other")
        if self.slow_paths:
            lines.append(
                f"switched off: the fast path in eval mode of {some(self.slow_paths)}, which does not call its layers"
            )
        for reason, names in names_by_reason(self.left_alone).items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            lines.append(f"left alone ({reason}): {shown}")
        return "\n".join(lines)


def names_by_reason(left_alone: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Returns the names of the layers that were left alone for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_alone:
        reasons.setdefault(reason, []).append(name)
    return reasons


def some(names: Iterable[str]) -> str:
    """Returns at most six of the names as text."""
    names = list(names)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def shares(
    model: nn.Module, converted: Iterable[str], heads: set[nn.Module], meant: Mapping[str, str] | None = None
) -> tuple[float, float, dict[str, float]]:
    """Returns three numbers: the share of the weights in matrix products that the converted layers hold, the same share
    if output heads are not counted, and a dictionary with the share of each other kind of weights.

    Weights of embeddings and norms are not counted, because they take part in no matrix product. A head is counted even
    if it shares its weight with an embedding. `meant` maps the names of linear layers that stay in high precision on
    purpose to their kind, one of ON_PURPOSE.
    """
    converted, meant = set(converted), meant or {}
    counted: dict[int, tuple[str, int]] = {}  # id of a parameter -> (kind, elements)
    # If several modules share a weight, the last module in this order decides the weight's kind.
    rank = lambda item: (is_linear(item[1]), item[1] in heads, item[0] in converted)  # noqa: E731
    for name, module in sorted(model.named_modules(), key=rank):
        linear = is_linear(module)
        experts = stacked_linears(module)
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if nn.parameter.is_lazy(parameter) or parameter.dim() < 2:
                continue
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if "bias" in parameter_name:
                continue  # the biases of stacked experts, one row for each expert
            if parameter.dim() > 2 and parameter.shape[0] == 1 and not isinstance(module, nn.modules.conv._ConvNd):
                continue  # added to each row of a batch, as the position embeddings of a vision transformer are
            kind = _kind_of_weight(module, parameter_name, parameter.dim())
            if linear:
                kind = "quantized" if name in converted else "head" if module in heads else meant.get(name, LEFT_ALONE)
            elif parameter_name in experts:
                slices = {f"{name}.{LINEARS}.{parameter_name}.{i}" for i in range(len(experts[parameter_name]))}
                kind = "quantized" if slices <= converted else "experts left alone"
            counted[id(parameter)] = (kind, parameter.numel())
    sums: dict[str, int] = {}
    for kind, elements in counted.values():
        sums[kind] = sums.get(kind, 0) + elements
    total = sum(sums.values()) or 1
    quantized, head = sums.pop("quantized", 0), sums.pop("head", 0)
    return quantized / total, quantized / max(1, total - head), {kind: n / total for kind, n in sums.items()}


def _kind_of_weight(module: nn.Module, name: str, dim: int) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight of nn.MultiheadAttention, which is no layer of its own: not supported"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions: not supported"
    if "router" in type(module).__name__.lower():
        return ROUTERS
    if dim == 3:
        return f"3-D weights ({type(module).__name__}.{name}), experts for example: not supported"
    return f"{type(module).__name__}.{name}, no linear layer: not supported"
