"""Turns the linear layers of any model into QuantLinear, in place.

A converted layer is the same object as before, with the same Parameters, hooks and names. Only its class and its recipe
change. Optimizers, checkpoints and references to the module therefore stay valid, and a converted model has the state
dict of the unconverted one.
"""

import contextlib
import fnmatch
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.experts import ExpertLinear, as_quantized_experts, routers, stacked_linears
from nanochat_fp4.nvfp4.heads import is_conv1d, is_linear, linear_layers, output_heads, sizes_of, some
from nanochat_fp4.nvfp4.layer import COMPUTE_DTYPES, QuantLinear, other_dtype
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.recipes import Recipe

ADAPTER_PARTS = {"lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}  # peft's
# Reasons for which weights stay in high precision on purpose. SKIPPED is followed by the pattern.
HEAD = "the output head keeps its own precision"
ROUTER = "a router stays in full precision"
ADAPTER = "an adapter's low-rank factor"
KEPT = "in a first or last block kept in full precision"
SKIPPED = "skip pattern"
QUANTIZED = "quantized"
# The report warns if less than this share is quantized of the weights that were not meant to stay in high precision.
ENOUGH = 0.9
PATIENCE = 6  # The number of optimizer steps before a warning of watch_first_steps. A short trial must get it, too.


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
               part, and nf.set_progress makes the change.
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
    its names. The config of a model of transformers loses quantization_config, if its weights are not quantized.

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

    report, converted = ConvertReport(recipe), []
    for layer, names in layers.items():
        reason = HEAD if layer in heads else ROUTER if layer in of_experts else None
        reason = reason or _reason_to_leave(layer, names, recipe, skip, kept_blocks)
        if reason is None:
            quantized = as_quantized(layer)
            quantized.per_token_in_eval = per_token_in_eval
            quantized.set_recipe(recipe)
            converted.append(quantized)
            report.converted.append(names[0])
        else:
            report.left_alone.append((names[0], reason))
            if isinstance(layer, QuantLinear):  # converted before, to another method
                layer.set_recipe(get_recipe("bf16"))
    report.count(model)
    if not converted:
        why = "; ".join(report.not_converted()[:4]) or "the model has none"
        raise ValueError(f"convert: no linear layer could be converted ({why})")

    refused = {layer.weight.dtype for layer in converted} - set(COMPUTE_DTYPES)
    if recipe.quantizes and refused:
        dtypes = sorted(str(dtype).removeprefix("torch.") for dtype in refused)
        report.notes.append(
            f"warning: weights are in {', '.join(dtypes)}, and the first forward will refuse them; layers compute in "
            f"float32 or bfloat16; {other_dtype(dtypes)}"
        )
    if any(layer.weight.requires_grad and layer.weight.dtype.itemsize == 2 for layer in converted):
        report.notes.append("weights to train are in 16 bits: small updates are lost; load with dtype=torch.float32")
    if stacks := sum(bool(stacked_linears(module)) for module in model.modules()):
        report.notes.append(f"experts of {stacks} layer(s): each computes its own GEMMs, one after the other")
    if recipe.quantizes and any(isinstance(layer, QuantConv1D) for layer in converted):
        report.notes.append("nf.save_quantized cannot write Conv1D layers; model.save_pretrained does, unquantized")
    if recipe.quantizes and (slow := call_every_layer(model)):
        report.notes.append(f"switched off: the fast path in eval mode of {some(slow)}, which does not call its layers")
    for part in model.modules():  # converted before, by itself
        vars(part).pop("nf_report", None)
    model.nf_report = report
    forget_quantization(model)
    if recipe.quantizes:
        watch_first_steps(model)
    if verbose and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        with contextlib.suppress(OSError):  # a log that nobody takes is no reason to end a run
            print(report)
    return model


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


def forget_quantization(model: nn.Module) -> None:
    """Removes `quantization_config` from the configs of a model of transformers, which may be built from the config of
    a quantized folder. Otherwise save_pretrained would write it beside weights that are not quantized, from which
    from_pretrained would make others. A model whose quantized weights transformers has read keeps it."""
    modules = [*model.modules()]
    if not any(getattr(module, "hf_quantizer", None) or hasattr(module, "quantization_scheme") for module in modules):
        for config in (getattr(module, "config", None) for module in modules):
            if "quantization_config" in getattr(config, "__dict__", ()):
                del config.quantization_config


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


def _end_blocks(model: nn.Module, recipe: Recipe, first: int, last: int) -> list[str]:
    """Returns the names of the blocks to leave alone. Raises ValueError if the model has fewer blocks."""
    # The blocks are the entries of the nn.ModuleList that holds the most linear layers.
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    stack = max(stacks, key=lambda name: sum(map(is_linear, stacks[name].modules())), default="")
    names = [f"{stack}.{i}" for i in range(len(stacks[stack]))] if stacks else []
    if not last and recipe.kept_blocks and names:  # A share of the blocks is at least one block, but not all.
        last = min(len(names) - 1, max(1, round(recipe.kept_blocks * len(names))))
    if first == last == 0:
        return []
    if not names:
        raise ValueError("convert: keep_first_blocks and keep_last_blocks need a model with an nn.ModuleList of blocks")
    if not 0 <= first + last <= len(names) or min(first, last) < 0:
        raise ValueError(f"convert: cannot keep {first} first and {last} last of {len(names)} blocks")
    return names[:first] + (names[-last:] if last else [])


def _reason_to_leave(
    linear: nn.Module, names: Sequence[str], recipe: Recipe, skip: Sequence[str], kept_blocks: Sequence[str]
) -> str | None:
    """Why the linear layer with these names stays in high precision, or None."""
    for pattern in skip:
        if any(_in_pattern(name, pattern) for name in names):
            return f"{SKIPPED} {pattern!r}"
    if any(ADAPTER_PARTS.intersection(name.split(".")) for name in names):
        return ADAPTER
    if problem := _subclass_reason(linear):
        return problem
    if hasattr(linear, "quantization_scheme"):  # compressed-tensors, which transformers calls, sets it.
        return (
            "its weight was read in few bits by compressed-tensors; build the model without quantization_config, and "
            "read the folder with nf.load_quantized"
        )
    if "weight" not in linear._parameters and not isinstance(linear, ExpertLinear):
        return "its weight is computed from other parameters (weight norm and the like)"
    if "forward" in vars(linear) and not isinstance(linear, QuantLinear):
        return "its forward was replaced, and would not call the new one; convert before that (accelerate and the like)"
    if problem := recipe.problem_with_sizes(*sizes_of(linear)):
        return problem
    in_kept_block = any(name.startswith(block + ".") for name in names for block in kept_blocks)
    return KEPT if in_kept_block else None


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
    quantized: float = 1.0  # the share of the weights that the converted layers hold
    quantized_without_heads: float = 1.0  # the same share if output heads are not counted
    others: dict[str, float] = field(default_factory=dict)  # reason to stay in high precision -> share of the weights
    notes: list[str] = field(default_factory=list)  # further lines for the user
    progress: float | None = None  # the share of the run's steps that set_progress was told last

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
        on_purpose = (HEAD, ROUTER, ADAPTER, KEPT, SKIPPED)
        missed = sum(share for why, share in self.others.items() if not why.startswith(on_purpose))
        if self.recipe.quantizes and self.quantized < ENOUGH * (self.quantized + missed):
            lines.append(
                f"warning: nobody asked for {100 * missed:.1f}% of the weights in matrix products to stay in high "
                "precision; the lines below name them"
            )
        return "\n".join(lines + self.notes + self.not_converted())

    def not_converted(self) -> list[str]:
        """A line for each reason not to convert weights: their share of all weights, and their layers."""
        lines = []
        for reason, share in self.others.items():
            names = [name or "the model itself" for name, why in self.left_alone if why == reason]
            line = f"not converted, {100 * share:.1f}% of the weights in matrix products: {reason}"
            lines.append(f"{line} ({some(names)})" if names else line)
        return lines

    def count(self, model: nn.Module) -> None:
        """Computes the shares.

        Weights of embeddings and norms are not counted, because they take part in no matrix product. A head is counted
        even if it shares its weight with an embedding.
        """
        kinds = dict(self.left_alone) | dict.fromkeys(self.converted, QUANTIZED)  # name of a linear layer -> its kind
        counted: dict[int, tuple[str, int]] = {}  # id of a parameter, or of an expert -> (kind, elements)
        # If several modules share a weight, the last module in this order decides the weight's kind.
        rank = {kind: i for i, kind in enumerate((None, *kinds.values(), QUANTIZED, HEAD))}
        for name, module in sorted(model.named_modules(), key=lambda item: rank[kinds.get(item[0])]):
            if isinstance(module, ExpertLinear):
                counted[id(module)] = kinds[name], module.in_features * module.out_features
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            experts = stacked_linears(module)
            for of, parameter in module.named_parameters(recurse=False):
                if nn.parameter.is_lazy(parameter) or parameter.dim() < 2 or of in experts or "bias" in of:
                    continue  # The biases of stacked experts have a row for each expert.
                if parameter.dim() > 2 and parameter.shape[0] == 1 and not isinstance(module, nn.modules.conv._ConvNd):
                    continue  # added to each row of a batch, as the position embeddings of a vision transformer are
                kind = kinds.get(name) or _kind_of_weight(module, of, parameter.dim())
                counted[id(parameter)] = kind, parameter.numel()
        sums = Counter(dict.fromkeys((reason for _, reason in self.left_alone), 0))
        for kind, elements in counted.values():
            sums[kind] += elements
        total, quantized = sums.total() or 1, sums.pop(QUANTIZED, 0)
        self.quantized, self.quantized_without_heads = quantized / total, quantized / max(1, total - sums[HEAD])
        self.others = {kind: elements / total for kind, elements in sums.items()}


def _kind_of_weight(module: nn.Module, name: str, dim: int) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight of nn.MultiheadAttention, which is no layer of its own: not supported"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions: not supported"
    if "router" in type(module).__name__.lower():
        return ROUTER
    if dim == 3:
        return f"3-D weights ({type(module).__name__}.{name}), experts for example: not supported"
    return f"{type(module).__name__}.{name}, no linear layer: not supported"


# ----------------------------------------------------------------------------------------------------------------------
# What a training loop does with a converted model


def uncalled(model: nn.Module) -> str:
    """Returns a sentence that names the quantized layers that no forward pass has called, and the share of the
    quantized layers' weights that they hold. It is "" if there are none.

    Such a layer is unused, or a function reads its weight and multiplies it in high precision. An expert without tokens
    counts as called if another expert of its module was. Compiled code is not watched: the result is "" if no layer was
    called, and if torch.compile has compiled anything in this process.
    """
    names = {m: name for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.recipe.quantizes}
    called = {layer for group in groups_of(model, names.__contains__) if group[0].called for layer in group}
    experts = {layer.experts for layer in called if isinstance(layer, ExpertLinear)}
    left = [layer for layer in names if layer not in called and getattr(layer, "experts", None) not in experts]
    compiled = "torch._dynamo" in sys.modules and torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if not called or not left or compiled:
        return ""
    part, whole = (sum(layer.in_features * layer.out_features for layer in layers) for layers in (left, names))
    of = f"{len(left)} of {len(names)} quantized layers, which hold {100 * part / whole:.0f}% of their weights"
    which = some(names[layer] for layer in left)
    why = "they are unused, or a function reads their weights and computes in high precision"
    return f"no forward pass has called {of} ({which}); {why}"


def watch_first_steps(model: nn.Module) -> None:
    """Warns after PATIENCE optimizer steps of the parameters of a converted model. There are two reasons: layers that
    no forward pass has called, and a method that changes late in a run (Recipe.late) without a call of set_progress."""
    report, reference, steps = model.nf_report, weakref.ref(model), 0

    def after_step(optimizer: torch.optim.Optimizer, *_) -> None:
        nonlocal steps
        model = reference()
        # The report of a model that was converted again, or as a part of another one, is not this one.
        if steps == PATIENCE or getattr(model, "nf_report", None) is not report or torch.compiler.is_compiling():
            return
        own = {id(p) for p in model.parameters()}
        steps += any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if steps < PATIENCE:
            return
        if what := uncalled(model):
            warnings.warn(f"{what}; leave them out, nanochat_fp4.convert(model, skip=[...])", stacklevel=2)
        if report.recipe.late and report.progress is None:
            when = f"from {100 * report.recipe.late[0]:.0f}% of the steps on"
            call = f"{PATIENCE} steps have not called nanochat_fp4.set_progress(model, done)"
            warnings.warn(f"{report.recipe.name} changes {when}, and {call}; the change is missed", stacklevel=2)

    weakref.finalize(model, register_optimizer_step_post_hook(after_step).remove)
