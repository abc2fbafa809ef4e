"""The patch layer: turns the linear layers of any model into QuantLinear, in place, and back for an evaluation.

A layer keeps its identity, its Parameters, hooks and names: only its class and recipe change. So optimizers,
checkpoints and references to the module stay valid, and state dicts of converted and unconverted models are the same.
"""

import contextlib
import fnmatch
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nanochat_fp4.nvfp4.coverage import (
    ENOUGH,
    call_every_layer,
    is_conv1d,
    linear_layers,
    output_heads,
    reason_to_leave,
    shares,
)
from nanochat_fp4.nvfp4.gram import gram_state
from nanochat_fp4.nvfp4.linear import (
    QuantLinear,
    as_quantized,
    can_be_fused,
    quantized_weights,
    unsupported_reason,
)
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.part import local
from nanochat_fp4.nvfp4.plan import MethodPlan
from nanochat_fp4.nvfp4.recipes import Recipe


@dataclass
class ConvertReport:
    """What convert did: names of the converted layers, and (name, reason) of those left alone."""

    recipe: Recipe
    converted: list[str] = field(default_factory=list)
    left_alone: list[tuple[str, str]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # of those, for nothing but the block that they are in
    without_gram_matrices: bool = False  # feedback or outliers are asked for, and no layer has a Gram matrix yet
    quantized: float = 1.0  # share of all weights in matrix products that the converted layers hold
    quantized_without_heads: float = 1.0
    others: dict[str, float] = field(default_factory=dict)  # what else such weights are: kind -> share
    slow_paths: list[str] = field(default_factory=list)  # layers whose fast path was switched off

    def __str__(self) -> str:
        share = f"{100 * self.quantized:.1f}% of the weights in matrix products"
        if round(self.quantized, 3) != round(self.quantized_without_heads, 3):
            share += f", {100 * self.quantized_without_heads:.1f}% without the output head"
        lines = [f"QAT method {self.recipe}", f"converted {len(self.converted)} linear layers: {share}"]
        if self.recipe.quantizes and self.quantized_without_heads < ENOUGH:
            lines.append(
                f"warning: that is less than {100 * ENOUGH:.0f}%; most of this model may stay in high precision"
            )
        lines += [f"not reached, {100 * share:.1f}% of these weights: {kind}" for kind, share in self.others.items()]
        if self.slow_paths:
            lines.append(
                f"switched off: the fast path in eval mode of {_some(self.slow_paths)}, which does not call its layers"
            )
        if self.without_gram_matrices:
            what = (
                "weights are rounded without feedback" if self.recipe.output.b.feedback else "no channel is an outlier"
            )
            lines.append(f"{what} until training has looked at the layers' inputs")
        reasons: dict[str, list[str]] = {}
        for name, reason in self.left_alone:
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            lines.append(f"left alone ({reason}): {shown}")
        return "\n".join(lines)


def convert(
    model: nn.Module,
    method: str | Recipe = "clover",
    skip: Sequence[str] = (),
    backward: bool = True,
    keep_first_blocks: int = 0,
    keep_last_blocks: int = 0,
    verbose: bool = True,
    per_token_in_eval: bool = True,
) -> nn.Module:
    """Computes every nn.Linear (and transformers' Conv1D) of the model as the method says, in place; returns the model.

    method:    a name of METHODS, or a Recipe; one that changes late in a run (Recipe.late) computes as it begins, and
               plan.MethodPlan changes it
    skip:      glob patterns of module names to leave alone, of linear layers ("*.c_proj") or of what holds them
               ("transformer.h.0"); the output head and adapters always are (coverage.py)
    backward:  False leaves the backward pass unquantized (post-training; the paper, Appendix C)
    keep_first_blocks, keep_last_blocks: leaves so many blocks at either end alone, as NVIDIA's recipe does; blocks
               are the entries of the nn.ModuleList that holds the most linear layers. keep_last_blocks 0: as many as
               the method says (Recipe.kept_blocks), at least one and not all, in a model with such a list
    verbose:   print the report
    per_token_in_eval: in eval mode without gradients every token has a scale of its own (per_token_scale), so that
               generation and validation of a row do not depend on the rows beside it

    What was converted, and what was not and why, is in `model.nf_report`. Works on meta or real tensors, before
    torch.compile; converting again changes the method. Subclasses of nn.Linear are converted if they override forward
    alone (dtype handling). Raises ValueError for arguments of other types, an unknown method, a pattern that matches
    nothing, or a model in which nothing can be converted.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"convert: got {type(model).__name__} for the model, expected a torch.nn.Module")
    skip = (skip,) if isinstance(skip, str) else skip
    if not isinstance(skip, Iterable) or not all(isinstance(pattern, str) for pattern in skip):
        raise ValueError(f'convert: skip is {skip!r}, expected glob patterns of module names, for example ["*.c_proj"]')
    if not all(isinstance(number, Integral) for number in (keep_first_blocks, keep_last_blocks)):
        kept = f"{keep_first_blocks!r} and {keep_last_blocks!r}"
        raise ValueError(f"convert: keep_first_blocks and keep_last_blocks are {kept}, expected numbers of blocks")
    recipe = get_recipe(method)
    if not backward:
        recipe = recipe.forward_only()
    linears = linear_layers(model)
    heads = output_heads(model, linears)
    for pattern in skip:
        if not any(_in_pattern(name, pattern) for name in linears):
            raise ValueError(
                f"convert: the skip pattern {pattern!r} matches no linear layer; there are: {_some(linears)}"
            )
    keep_last_blocks = keep_last_blocks or _kept_blocks(model, recipe)
    kept_blocks = _end_blocks(model, keep_first_blocks, keep_last_blocks)
    report = ConvertReport(recipe)
    for name, linear in linears.items():
        head = "the output head stays in full precision" if name in heads else None
        named = head or _skip_reason(name, skip)
        reason = named or _subclass_reason(linear)
        reason = reason or reason_to_leave(name, linear) or unsupported_reason(linear, recipe)
        if any(name.startswith(block + ".") for block in kept_blocks):
            if not reason:
                report.kept.append(name)
            reason = named or "in a first or last block kept in full precision"
        if reason:
            report.left_alone.append((name, reason))
            if isinstance(linear, QuantLinear):  # of a method before this one
                linear.set_recipe(get_recipe("bf16"))
            continue
        as_quantized(linear)
        linear.per_token_in_eval = per_token_in_eval
        linear.set_recipe(recipe)
        report.converted.append(name)
    if not report.converted:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in report.left_alone[:4])
        raise ValueError(f"convert: no linear layer could be converted ({reasons or 'the model has none'})")
    known = any(linears[name].gram_matrix is not None for name in report.converted)
    report.without_gram_matrices = recipe.looks_at_inputs and not known
    report.quantized, report.quantized_without_heads, report.others = shares(model, report.converted, heads)
    report.slow_paths = call_every_layer(model) if recipe.quantizes else []
    for part in model.modules():  # converted before, by itself
        vars(part).pop("nf_report", None)
    model.nf_report = report
    expect_calls(model, recipe if backward else None)
    if verbose and not (_distributed() and dist.get_rank()):
        with contextlib.suppress(OSError):  # a log that nobody takes is no reason to end a run
            print(report)
    return model


def _skip_reason(name: str, skip: Sequence[str]) -> str | None:
    return next((f"skip pattern {pattern!r}" for pattern in skip if _in_pattern(name, pattern)), None)


def _in_pattern(name: str, pattern: str) -> bool:
    """Whether the pattern matches this module's name or that of a module it is in."""
    parts = name.split(".")
    return any(fnmatch.fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def _subclass_reason(linear: nn.Linear) -> str | None:
    """A subclass is safe to replace if it only overrides forward: it then has no state or behaviour to lose."""
    if isinstance(linear, QuantLinear) or is_conv1d(linear):
        return None
    for cls in type(linear).__mro__[: type(linear).__mro__.index(nn.Linear)]:
        if cls is nn.modules.linear.NonDynamicallyQuantizableLinear:
            return "nn.MultiheadAttention takes its weight and does not call it"
        extra = [k for k in vars(cls) if not (k.startswith("__") and k.endswith("__")) and k != "forward"]
        if "__init__" in vars(cls) or extra:
            return f"{type(linear).__name__} changes more of nn.Linear than forward"
    return None


def _blocks(model: nn.Module) -> list[str]:
    """Names of the blocks of the model's largest stack; none if it has no stack."""
    stacks = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}

    def count(name: str) -> int:
        return sum(isinstance(m, nn.Linear) for m in stacks[name].modules())

    stack = max(stacks, key=count, default="")
    return [f"{stack}.{i}" for i in range(len(stacks[stack]))] if stacks else []


def _kept_blocks(model: nn.Module, recipe: Recipe) -> int:
    """How many of the model's last blocks the recipe leaves in BF16: its share, at least one, but not all."""
    count = len(_blocks(model))
    return min(count - 1, max(1, round(recipe.kept_blocks * count))) if recipe.kept_blocks and count else 0


def _end_blocks(model: nn.Module, first: int, last: int) -> list[str]:
    """Names of the first and last blocks of the model's largest stack."""
    if first == last == 0:
        return []
    names = _blocks(model)
    if not names:
        raise ValueError("convert: keep_first_blocks and keep_last_blocks need a model with an nn.ModuleList of blocks")
    if not 0 <= first + last <= len(names) or min(first, last) < 0:
        raise ValueError(f"convert: cannot keep {first} first and {last} last of {len(names)} blocks")
    return names[:first] + (names[-last:] if last else [])


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _some(names) -> str:
    names = list(names)
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


@contextlib.contextmanager
def _override(model: nn.Module, name: str, value: bool) -> Iterator[None]:
    layers = [m for m in model.modules() if isinstance(m, QuantLinear)]
    before = [getattr(m, name) for m in layers]
    outermost = [layer for layer in layers if name not in layer.outside]
    for layer, old in zip(layers, before):
        layer.outside = {name: old} | layer.outside
        setattr(layer, name, value)
    try:
        yield
    finally:
        for layer, old in zip(layers, before):
            setattr(layer, name, old)
        for layer in outermost:
            layer.outside = {k: v for k, v in layer.outside.items() if k != name}


def full_precision(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside this context the converted layers compute like nn.Linear: to evaluate a model in BF16.

    This and the next two are of the layers, not of the thread; they may be nested; copies and pickles that are made
    inside are of the layers as they are outside."""
    return _override(model, "quantization", False)


def per_token_scale(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside this context every token has a tensor_scale of its own, so its result does not depend on the other tokens
    of the batch: what generation needs, where a token is computed alone, in a prompt, or next to strangers."""
    return _override(model, "per_token", True)


def groups_computed_as_one(model: nn.Module) -> list[tuple[QuantLinear, ...]]:
    """The layers that quantize, each with those that fused_linear computes as one with it, or alone."""
    return _groups(model, lambda m: m.quantization and m.recipe.quantizes)


def _groups(model: nn.Module, wanted: Callable[[QuantLinear], bool]) -> list[tuple[QuantLinear, ...]]:
    """The layers that are wanted, each with those that fused_linear computes as one with it, or alone.

    Layers that are computed as one are found by their parent's attribute `fused_linears`, a tuple of names.
    """
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and wanted(m)]
    parents = [[getattr(m, name) for name in getattr(m, "fused_linears", ())] for m in model.modules()]
    groups = [tuple(g) for g in parents if g and set(layers).issuperset(g) and can_be_fused(g)]
    fused = {layer for group in groups for layer in group}
    return groups + [(layer,) for layer in layers if layer not in fused]


def _version(weight: torch.Tensor) -> tuple[int, int, int]:
    """Another one after every change that PyTorch counts, and where other memory takes the weight's place."""
    weight = local(weight)
    return id(weight), weight._version, 0 if weight.is_meta else weight.untyped_storage().data_ptr()


_CHANGED = (
    "quantize_weights_once: weights changed inside the context, so gradients would be computed for the old ones; leave "
    "it before optimizer.step()"
)


@contextlib.contextmanager
def quantize_weights_once(model: nn.Module) -> Iterator[None]:
    """Inside this context the weights' forward codes are those made at its beginning: for the micro-batches of one
    optimizer step. Outputs and gradients are the same bits as without it.

    Takes 4.5 bits a weight while it lasts, which autograd keeps of each forward pass anyway. Nothing of it is in state
    dicts. Works with torch.compile (the codes are inputs of the graph, made anew for each step; compiled code cannot
    look at the version of a parameter itself). Inside another such context it does nothing. Raises RuntimeError where
    an optimizer is about to change a weight inside, and at the end if one changed otherwise or was exchanged; a change
    in place through .data, which PyTorch does not count, is not seen.
    """
    # Codes that were loaded (export/load.py) stay.
    groups = [g for g in groups_computed_as_one(model) if g[0].weight_operand is g[0].stacked_operand is None]
    # FSDP's codes are made by sharding.py.
    groups = [g for g in groups if g[0].shard or not any(hasattr(layer.weight, "device_mesh") for layer in g)]
    versions = {layer: _version(layer.weight) for layers in groups for layer in layers}
    operands = quantized_weights(groups)
    names = ["weight_operand" if len(layers) == 1 else "stacked_operand" for layers in groups]
    ids = {id(layer.weight) for layer in versions}

    def before_step(optimizer: torch.optim.Optimizer, *_) -> None:
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(_CHANGED)

    handle = register_optimizer_step_pre_hook(before_step)  # a fused one counts no version
    try:
        for layers, name, operand in zip(groups, names, operands):
            setattr(layers[0], name, operand)
            layers[0].outside = layers[0].outside | {name: None}
        yield
    finally:
        handle.remove()
        for layers, name in zip(groups, names):
            vars(layers[0]).pop(name, None)  # one that is None another such context may have removed
            layers[0].outside = {k: v for k, v in layers[0].outside.items() if k != name}
    if any(_version(layer.weight) != version for layer, version in versions.items()):
        raise RuntimeError(_CHANGED)


@contextlib.contextmanager
def accumulate_gradients(model: nn.Module) -> Iterator[None]:
    """Inside this context, for the micro-batches of one optimizer step, converted layers add the gradient of their
    weight to weight.grad in the GEMM that computes it (gemm.gemm_add); autograd gets no tensor to add.

    weight.grad stays what it is to everybody else: float32, of the parameter's shape, made of zeros where there was
    none, and after the context what autograd would have made of the same backward passes. So clipping, all-reducing,
    GradScaler, optimizers and zero_grad() outside of the context need to know nothing, and retain_graph, activation
    checkpointing and a layer that is called twice add as often as they are computed. Gradients of layers that are
    computed as one are slices of one tensor. docs/gradients.md says what is equal to the bit.

    Left to autograd, in the same context: weights that are not float32, are frozen, have hooks or are those of several
    layers; Conv1D; and FSDP2's (it never sees a gradient that backward does not return). torch.autograd.grad of a
    loss for the weights of the other layers is not possible inside. Inside another such context it does nothing.

    Raises ValueError for a model inside DistributedDataParallel, whose reduction waits for gradients that autograd
    accumulates, and RuntimeError at the end if a weight's grad was dropped or exchanged inside.
    """
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise ValueError(
            "accumulate_gradients: DistributedDataParallel reduces gradients while autograd accumulates them, and "
            "would not see these; average weight.grad over the ranks after the last micro-batch, or leave this out"
        )
    owners = Counter(m.weight for m in model.modules() if isinstance(m, QuantLinear))
    groups = _groups(model, lambda m: m.grad_buffer is None and owners[m.weight] == 1 and _takes_gradients(m))
    buffers = [_make_gradients([layer.weight for layer in layers]) for layers in groups]
    layers = [layer for group in groups for layer in group]
    made = [layer.weight.grad for layer in layers]
    attributes = [(layer, "grad_buffer", local(grad).data) for layer, grad in zip(layers, made)]
    attributes += [(group[0], "stacked_grad_buffer", b.data) for group, b in zip(groups, buffers) if len(group) > 1]
    try:
        for layer, name, tensor in attributes:
            setattr(layer, name, tensor)
            layer.outside = layer.outside | {name: None}
        yield
    finally:
        for layer, name, _ in attributes:
            vars(layer).pop(name, None)
            layer.outside = {k: v for k, v in layer.outside.items() if k != name}
    if any(layer.weight.grad is not grad for layer, grad in zip(layers, made)):
        raise RuntimeError(
            "accumulate_gradients: the gradients of weights were dropped or exchanged inside the context, which adds "
            "to those that it found; leave it before zero_grad()"
        )


def _takes_gradients(layer: QuantLinear) -> bool:
    """Whether the layer's gradient may be added to weight.grad without autograd."""
    weight = layer.weight
    grad = local(weight.grad)
    plain = type(layer) is QuantLinear and (type(weight) is nn.Parameter or layer.shard is not None)
    plain = plain and (
        grad is None or (type(grad) is torch.Tensor and grad.dtype == weight.dtype and not grad.is_sparse)
    )
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return plain and weight.dtype == torch.float32 and weight.requires_grad and not hooks


def _make_gradients(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """Makes the gradients of these weights slices of one tensor, which it returns; they keep their values."""
    values, grads = [local(weight.detach()) for weight in weights], [local(weight.grad) for weight in weights]
    rows = [value.shape[0] for value in values]
    first = grads[0]
    if first is not None and len(weights) > 1 and first._base is not None and first._base.shape[0] == sum(rows):
        slices = first._base.split(rows)
        if all(grad is not None and grad.data_ptr() == s.data_ptr() for grad, s in zip(grads, slices)):
            return first._base
    if len(weights) == 1 and first is not None and first.is_contiguous():
        return first
    together = values[0].new_zeros(sum(rows), *values[0].shape[1:])
    for weight, grad, part in zip(weights, grads, together.split(rows)):
        if grad is not None:
            part.copy_(grad)
        if type(weight) is nn.Parameter:
            weight.grad = part
        else:
            weight.grad = type(weight).from_local(part, weight.device_mesh, weight.placements)
    return together


def set_progress(model: nn.Module, progress: float) -> bool:
    """For a training loop of a method that changes in the course of a run (clover_feedback_late, clover_late): before
    each step, its place.

    model:    what was converted, or anything that holds it (DistributedDataParallel, a compiled model, an average)
    progress: from 0 to 1, steps done over steps of the run. Gives the layers the method of that phase; returns whether
    one changed, and makes torch.compile look at the layers again then. Methods without phases ignore it, and so do
    layers that were given another method since. Raises ValueError for a progress outside 0 to 1 and a model that was
    not converted.
    """
    converted = [m for m in model.modules() if "nf_report" in vars(m)] if isinstance(model, nn.Module) else []
    if not converted:
        raise ValueError("set_progress: the model was not converted; call nanochat_fp4.convert(model, method) first")
    number = isinstance(progress, Real) or (isinstance(progress, torch.Tensor) and progress.numel() == 1)
    if not number or not 0 <= progress <= 1:
        raise ValueError(f"set_progress: progress is {progress!r}, expected the share of the run's steps, from 0 to 1")
    was_called(model, "set_progress")
    phases = {}  # layer -> its method, and what that is now; of parts within parts the innermost, which comes last
    for part in converted:
        method = part.nf_report.recipe
        phase = method, MethodPlan.parse(method).at(progress)
        phases |= {m: phase for m in part.modules() if isinstance(m, QuantLinear)}
    changed = False
    for layer, (method, recipe) in phases.items():
        if layer.recipe != recipe and layer.recipe in (method, method.final):
            layer.set_recipe(recipe)
            changed = True
    if not changed:
        return False
    if torch.compiler.is_dynamo_compiling() or "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # recipes are constants of compiled code
    return True


PATIENCE = 100  # steps without the call that a method wants, before it is said
_reminders: "weakref.WeakKeyDictionary[nn.Module, _Reminder]" = weakref.WeakKeyDictionary()


class _Reminder:
    """A hook after any optimizer's step, for those of the model's parameters: says once that training goes on without a
    call that the method needs. A hook of the model would be compiled with it, and not count."""

    def __init__(self, model: nn.Module, recipe: Recipe):
        self.model, self.recipe, self.steps = weakref.ref(model), recipe, 0
        self.missing = {}  # call -> what of the method asks for it
        if recipe.late:
            self.missing["set_progress(model, done)"] = f"changes from {100 * recipe.late[0]:.0f}% of the steps on"
        if recipe.looks_at_inputs:
            self.missing["update_gram_matrices(model, lambda: model(x))"] = "looks at the layers' inputs"
        self.handle = register_optimizer_step_post_hook(self)
        weakref.finalize(model, self.handle.remove)

    def __call__(self, optimizer: torch.optim.Optimizer, *_) -> None:
        model = self.model()
        if model is None or self.steps == PATIENCE or torch.compiler.is_compiling():
            return
        own = {id(p) for p in model.parameters()}
        self.steps += any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        if self.steps != PATIENCE:
            return
        for call, what in self.missing.items():
            if call.startswith("set_progress") or not gram_state(model):
                warnings.warn(
                    f"{self.recipe.name} {what}, and {PATIENCE} steps have not called nanochat_fp4.{call}: "
                    "what is trained is the method without it",
                    stacklevel=2,
                )


def expect_calls(model: nn.Module, recipe: Recipe | None) -> None:
    """Reminds of the calls that this recipe wants of a training loop; None: no longer."""
    was_called(model, "")
    if recipe is not None and (recipe.late or recipe.looks_at_inputs):
        _reminders[model] = _Reminder(model, recipe)


def was_called(model: nn.Module, name: str) -> None:
    """Reminds no longer of the call of that name; "": of none."""
    for module in model.modules() if _reminders else ():
        if reminder := _reminders.get(module):
            reminder.missing = {c: what for c, what in reminder.missing.items() if not c.startswith(name)}
            if not reminder.missing:
                reminder.handle.remove()
                del _reminders[module]
