"""Turns the linear layers of any model into QuantLinear, in place.

A converted layer is the same object as before, with the same Parameters, hooks and names. Only its class and its recipe
change. Optimizers, checkpoints and references to the module therefore stay valid, and a converted model has the state
dict of the unconverted one.
"""

import contextlib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.nvfp4.experts import LINEARS, ExpertLinear, as_quantized_experts, routers, slice_name, stacked_linears
from nanochat_fp4.nvfp4.first_steps import watch_first_steps
from nanochat_fp4.nvfp4.heads import is_conv1d, is_linear, linear_layers, output_heads, sizes_of, some
from nanochat_fp4.nvfp4.layer import COMPUTE_DTYPES, QuantLinear, other_dtype
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Recipe

ADAPTER_PARTS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}  # peft's
ADAPTER = "an adapter's low-rank factor"
# Kinds of weights that are meant to stay in high precision.
ON_PURPOSE = (AS_ASKED, ADAPTERS, ROUTERS) = ("left out as asked", "adapters' factors", "routers")
LEFT_ALONE = "linear layers left alone for the reasons below"
# The report warns if less than this share is quantized of the weights that were not meant to stay in high precision.
ENOUGH = 0.9


M = TypeVar("M", bound=nn.Module)


def convert(
    model: M,
    method: str | Recipe = "clover",
    skip: Sequence[str] = (),
    backward: bool = True,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    verbose: bool = True,
    per_token_in_eval: bool = True,
) -> M:
    """Makes every nn.Linear, and every Conv1D of transformers, compute with the method. The model is changed in place
    and returned.

    Experts that are stored as slices of one parameter count as linear layers, if their layout is known (experts.py).
    Output heads, routers and adapters stay in full precision (heads.output_heads).

    method:    a name of METHODS, or a Recipe. A method that changes late in a run (Recipe.late) starts with its first
               part, and phases.MethodPlan makes the change.
    skip:      glob patterns of the names of modules to leave alone. A pattern names linear layers ("*.c_proj"), or a
               module that contains linear layers ("transformer.h.0").
    backward:  False leaves the backward pass unquantized, for post-training (the paper, Appendix C)
    keep_first_blocks, keep_last_blocks: the numbers of blocks at the model's beginning and at its end to leave alone,
               as NVIDIA's recipe does. The blocks are the entries of the nn.ModuleList that holds the most linear
               layers. If keep_last_blocks is 0, the method decides (Recipe.kept_blocks): it may keep a share of the
               blocks, but at least one and not all.
    verbose:   whether to print the report
    per_token_in_eval: whether every token has a scale of its own (per_token_scale) in eval mode without gradients.
               Generation and validation of a row then do not depend on the other rows of the batch.

    `model.nf_report` (a ConvertReport) names the converted layers, and each layer left alone with the reason. The model
    may be on the meta device. Convert it before torch.compile. Converting a model again changes its method. A subclass
    of nn.Linear is converted if it overrides nothing but forward, and if its forward computes x . weight^T + bias in
    any dtype, which convert tries on a small layer. A layer that the model holds at several places is matched by all of
    its names.

    Raises ValueError for arguments of wrong types, an unknown method, a pattern that matches no linear layer, numbers
    of blocks that the model does not have, and a model in which no layer can be converted.

    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 5))
    >>> model = nf.convert(model, "clover", verbose=False)
    >>> model.nf_report.converted, model.nf_report.left_alone
    (['0'], [('2', 'out_features is 5, expected a multiple of 16')])
    """
    skip = _checked(model, skip, keep_first_blocks, keep_last_blocks)
    recipe = get_recipe(method)
    if not backward:
        recipe = recipe.forward_only()
    if recipe.quantizes:
        as_quantized_experts(model)
    layers = linear_layers(model)  # layer -> all of its names
    _check_patterns(skip, layers)
    kept_blocks = _end_blocks(model, recipe, keep_first_blocks, keep_last_blocks)
    heads, of_experts = output_heads(model), routers(model)

    report = ConvertReport(recipe)
    converted: dict[str, QuantLinear] = {}
    kinds_left_alone: dict[str, str] = {}
    for layer, names in layers.items():
        if layer in heads:
            left = "the output head stays in full precision", LEFT_ALONE, False
        elif layer in of_experts:
            left = "a router stays in full precision", ROUTERS, False
        else:
            left = _reason_and_kind(layer, names, recipe, skip, kept_blocks)
        if left:
            reason, kinds_left_alone[names[0]], only_for_its_block = left
            report.left_alone.append((names[0], reason))
            if only_for_its_block:
                report.kept.append(names[0])
            if isinstance(layer, QuantLinear):  # converted before, to another method
                layer.set_recipe(get_recipe("bf16"))
        else:
            quantized = converted[names[0]] = as_quantized(layer)
            quantized.per_token_in_eval = per_token_in_eval
            quantized.set_recipe(recipe)
    if not converted:
        reasons_of = names_by_reason(report.left_alone)
        why = [f"{some(name or 'the model itself' for name in names)}: {why}" for why, names in reasons_of.items()][:4]
        why += [kind for kind in shares(model, (), heads)[2] if "not supported" in kind]
        raise ValueError(f"convert: no linear layer could be converted ({'; '.join(why) or 'the model has none'})")

    report.converted = list(converted)
    refused = {layer.weight.dtype for layer in converted.values()} - set(COMPUTE_DTYPES)
    report.refused_dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in refused) if recipe.quantizes else []
    report.quantized, report.quantized_without_heads, report.others = shares(model, converted, heads, kinds_left_alone)
    report.slow_paths = call_every_layer(model) if recipe.quantizes else []
    report.experts = sum(bool(stacked_linears(module)) for module in model.modules())
    for part in model.modules():  # converted before, by itself
        vars(part).pop("nf_report", None)
    model.nf_report = report
    if recipe.quantizes:
        watch_first_steps(model)
    if verbose and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        with contextlib.suppress(OSError):  # a log that nobody takes is no reason to end a run
            print(report)
    return model


def _reason_and_kind(
    layer: nn.Module, names: Sequence[str], recipe: Recipe, skip: Sequence[str], kept_blocks: Sequence[str]
) -> tuple[str, str, bool] | None:
    """Why the layer with these names stays in high precision, the kind of its weights in the report, and whether only
    its block is the reason; or None."""
    for pattern in skip:
        if any(_in_pattern(name, pattern) for name in names):
            return f"skip pattern {pattern!r}", AS_ASKED, False
    problem = _subclass_reason(layer) or reason_to_leave(names, layer) or recipe.problem_with_sizes(*sizes_of(layer))
    if any(name.startswith(block + ".") for name in names for block in kept_blocks):
        return "in a first or last block kept in full precision", AS_ASKED, not problem
    return (problem, ADAPTERS if problem == ADAPTER else LEFT_ALONE, False) if problem else None


def _checked(model: nn.Module, skip: Sequence[str], keep_first_blocks: int, keep_last_blocks: int) -> Sequence[str]:
    """The patterns of skip, also where it is a single one. Raises ValueError for arguments of other types."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"convert: got {type(model).__name__} for the model, expected a torch.nn.Module")
    skip = (skip,) if isinstance(skip, str) else skip
    if not isinstance(skip, Iterable) or not all(isinstance(pattern, str) for pattern in skip):
        raise ValueError(f'convert: skip is {skip!r}, expected glob patterns of module names, for example ["*.c_proj"]')
    if not all(isinstance(number, Integral) for number in (keep_first_blocks, keep_last_blocks)):
        kept = f"{keep_first_blocks!r} and {keep_last_blocks!r}"
        raise ValueError(f"convert: keep_first_blocks and keep_last_blocks are {kept}, expected numbers of blocks")
    return skip


def _check_patterns(skip: Sequence[str], all_names: Mapping[nn.Module, Sequence[str]]) -> None:
    """Raises ValueError for a pattern that matches no layer. all_names: each linear layer -> all of its names"""
    for pattern in skip:
        if not any(_in_pattern(name, pattern) for names in all_names.values() for name in names):
            there = [names[0] for names in all_names.values()]
            anywhere = f"*.{pattern}"  # Other programs take the last part of a name alone.
            hint = f"did you mean {anywhere!r}? " if any(_in_pattern(name, anywhere) for name in there) else ""
            raise ValueError(
                f"convert: the skip pattern {pattern!r} matches no linear layer; {hint}there are: {some(there)}"
            )


class QuantConv1D(QuantLinear):
    """A Conv1D of transformers, whose weight is (in_features, out_features), computed as a QuantLinear."""

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight.T.contiguous()


def as_quantized(linear: nn.Module) -> QuantLinear:
    """Turns an nn.Linear or a Conv1D into a QuantLinear with the same parameters, in place, and returns it. The result
    has no recipe yet."""
    if isinstance(linear, QuantLinear):
        return linear
    if isinstance(linear, nn.Linear):
        linear.__class__ = QuantLinear
    else:
        linear.in_features, linear.out_features = linear.weight.shape
        linear.__class__ = QuantConv1D
    return linear


def _in_pattern(name: str, pattern: str) -> bool:
    """Whether the pattern matches the name of this module or of a module that contains it."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _subclass_reason(linear: nn.Linear) -> str | None:
    """Returns the reason why a subclass of nn.Linear cannot be replaced, or None.

    A subclass can be replaced if it overrides only forward, and if this forward computes a linear layer. It then has no
    other state or behaviour that would be lost.
    """
    if isinstance(linear, QuantLinear) or is_conv1d(linear):
        return None
    if nn.parameter.is_lazy(linear._parameters.get("weight")):
        return "its sizes are not known before the model's first call; call the model, then convert it"
    for cls in type(linear).__mro__[: type(linear).__mro__.index(nn.Linear)]:
        if cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
            return "nn.MultiheadAttention takes its weight and does not call it"
        extra = [k for k in vars(cls) if not (k.startswith("__") and k.endswith("__")) and k != "forward"]
        if "__init__" in vars(cls) or extra:
            return f"{type(linear).__name__} changes more of nn.Linear than forward"
    if type(linear).forward is not nn.Linear.forward and not _is_weight_times_input(linear):
        return f"the forward of {type(linear).__name__} computes something else than x . weight^T + bias"
    return None


def _is_weight_times_input(linear: nn.Linear) -> bool:
    """Whether the forward of a subclass computes x . weight^T + bias, in any dtype. It is tried on a small layer that
    has the attributes of this one."""
    values = torch.linspace(-1, 1, 16 * 16, device="cpu").view(16, 16)
    x, weight, bias = values[:4].sin(), values.cos(), None if linear.bias is None else 8 + values[5]
    small = object.__new__(type(linear))
    vars(small).update(vars(linear), in_features=16, out_features=16, _parameters={"weight": weight, "bias": bias})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            got = type(linear).forward(small, x).float()
    except Exception:  # Code that we do not know may raise anything. A forward that cannot be tried is not replaced.
        return False
    want = nn.functional.linear(x, weight, bias)
    return got.shape == want.shape and bool((got - want).abs().max() < 0.02 * want.abs().max())


def _blocks(model: nn.Module) -> list[str]:
    """Returns the names of the blocks: the entries of the nn.ModuleList that holds the most linear layers."""
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}

    def count(name: str) -> int:
        return sum(isinstance(m, nn.Linear) for m in stacks[name].modules())

    stack = max(stacks, key=count, default="")
    return [f"{stack}.{i}" for i in range(len(stacks[stack]))] if stacks else []


def _end_blocks(model: nn.Module, recipe: Recipe, first: int, last: int) -> list[str]:
    """Returns the names of the blocks to leave alone (_blocks). Raises ValueError if the model has fewer blocks."""
    names = _blocks(model)
    if not last and recipe.kept_blocks and names:  # A share of the blocks is at least one block, but not all.
        last = min(len(names) - 1, max(1, round(recipe.kept_blocks * len(names))))
    if first == last == 0:
        return []
    if not names:
        raise ValueError("convert: keep_first_blocks and keep_last_blocks need a model with an nn.ModuleList of blocks")
    if not 0 <= first + last <= len(names) or min(first, last) < 0:
        raise ValueError(f"convert: cannot keep {first} first and {last} last of {len(names)} blocks")
    return names[:first] + (names[-last:] if last else [])


def reason_to_leave(names: Sequence[str], linear: nn.Module) -> str | None:
    """Returns the reason why a linear layer with these names cannot be replaced by a QuantLinear, or None."""
    if any(ADAPTER_PARTS.intersection(name.split(".")) for name in names):
        return ADAPTER
    if hasattr(linear, "quantization_scheme"):  # compressed-tensors, which transformers calls, sets it.
        return (
            "its weight was read in few bits by compressed-tensors; build the model without quantization_config, and "
            "read the folder with nf.load_quantized"
        )
    if "weight" not in linear._parameters and not isinstance(linear, ExpertLinear):
        return "its weight is computed from other parameters (weight norm and the like)"
    if "forward" in vars(linear) and not isinstance(linear, QuantLinear):
        return "its forward was replaced, and would not call the new one; convert before that (accelerate and the like)"
    return None


def call_every_layer(model: nn.Module) -> list[str]:
    """Switches off the fast path that nn.TransformerEncoderLayer takes in eval mode. The fast path reads the weights
    and does not call the layers, so a validation would measure the unquantized model. Returns the names of the modules
    that were changed."""
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer) and module.activation_relu_or_gelu:
            # nn.TransformerEncoderLayer sets 0 for an activation that its fast path does not support.
            module.activation_relu_or_gelu = 0
            changed.append(name)
    return changed


# ----------------------------------------------------------------------------------------------------------------------
# The report: what was converted, what was left alone and why, and the share of the weights that compute in few bits


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
        if self.recipe.output.random:
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
                slices = {
                    f"{name}.{LINEARS}.{parameter_name}.{slice_name(i)}" for i in range(len(experts[parameter_name]))
                }
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
