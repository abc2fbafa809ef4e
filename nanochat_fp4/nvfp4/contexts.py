"""The context managers of a converted model. They change how its layers compute for an evaluation, for generation, or
for the micro-batches of one optimizer step.

A context belongs to the layers and not to a thread, because autograd runs backward passes in threads of its own. One
thread enters and leaves the contexts of a model. A context that ends takes away what it has set itself, and nothing of
the other contexts. Contexts may therefore end in any order, as those of generators that are left unfinished do. A copy
or a pickle of a model that is made inside a context does not have the context's settings.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanochat_fp4.nvfp4.collectives import local, version_of
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.layer import WEIGHTS_CHANGED, InContext, LayerContext, MadeFor, QuantLinear, quantized_weight


@contextlib.contextmanager
def _inside(asked: dict[InContext, LayerContext]) -> Iterator[None]:
    """Adds a LayerContext to each of these layers until the end of the context."""
    for layer, context in asked.items():
        layer.contexts += (context,)
    try:
        yield
    finally:
        for layer, own in asked.items():
            layer.contexts = tuple(context for context in layer.contexts if context is not own)


def _layers(model: nn.Module, context: str, kind: type[InContext] = QuantLinear, stacklevel: int = 0) -> list[Any]:
    """The model's converted layers. Raises ValueError if it is no torch module, and with stacklevel warns of none."""
    if not callable(getattr(model, "modules", None)):
        raise ValueError(f"{context}: got {type(model).__name__}, expected a torch.nn.Module; pass the converted model")
    layers = [m for m in model.modules() if isinstance(m, kind)]
    if stacklevel and not any(isinstance(layer, QuantLinear) or layer.quantizes for layer in layers):
        problem = f"{context}: no layer of this {type(model).__name__} is converted, so nothing changes"
        warnings.warn(f"{problem}; pass the model that nf.convert was given", stacklevel=stacklevel)
    return layers


def full_precision(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside this context the converted layers, and an FP8 head, compute like nn.Linear. A model is evaluated in BF16
    this way.

    Warns if the model has no converted layer. Raises ValueError if model is no torch.nn.Module.

    >>> layer = nf.QuantLinear(32, 16)
    >>> x = torch.randn(4, 32)
    >>> with nf.full_precision(layer):
    ...     bool((layer(x) == torch.nn.functional.linear(x, layer.weight)).all())
    True
    """
    layers = _layers(model, "full_precision", InContext, stacklevel=3)
    return _inside({layer: LayerContext(full_precision=True) for layer in layers})


def per_token_scale(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside this context every token has a tensor_scale of its own, so that a token's result does not depend on the
    other tokens of the batch. Generation needs this, because the same token may be computed alone, inside a prompt, or
    in a batch with other conversations.

    Raises ValueError if model is no torch.nn.Module.

    >>> layer, x = nf.QuantLinear(32, 16), torch.randn(4, 32)
    >>> with torch.no_grad(), nf.per_token_scale(layer):
    ...     torch.allclose(layer(x)[:1], layer(x[:1]), atol=1e-5)
    True
    """
    return _inside({layer: LayerContext(per_token=True) for layer in _layers(model, "per_token_scale")})


@contextlib.contextmanager
def quantize_weights_once(model: nn.Module) -> Iterator[None]:
    """Quantizes the weights for the forward pass once, when the context is entered. The micro-batches of one optimizer
    step share these codes, because weights change only between steps. Outputs and gradients have the same bits as
    without the context.

    The codes take 4.5 bits a weight while the context lasts. This is little extra memory, because autograd keeps the
    codes of each forward pass for the backward pass anyway. State dicts do not contain the codes. The context works
    with torch.compile: the codes are inputs of the compiled graph and are made anew for each step. A context inside
    another one uses the outer one's codes. If a layer's method changes inside, the layer quantizes its weight in each
    pass from then on.

    Raises RuntimeError when an optimizer is about to change a weight inside the context, and at the end of the context
    if a weight was changed in another way or was replaced. A change in place through `.data` is not noticed, because
    PyTorch does not count such changes. Warns if the model has no converted layer. Raises ValueError if model is no
    torch.nn.Module.

    >>> layer = nf.QuantLinear(32, 16)
    >>> with nf.quantize_weights_once(layer):
    ...     for rows in torch.randn(2, 4, 32):  # two micro-batches of 4 tokens
    ...         layer(rows).sum().backward()
    """
    _layers(model, "quantize_weights_once", stacklevel=4)
    made = {}
    for group in groups_of(model):
        # sharding.py makes the codes of weights that FSDP shards. A parametrization computes a new weight at each
        # access, which each pass has to quantize.
        sharded = any(hasattr(layer.weight, "device_mesh") and layer.largest is None for layer in group)
        if sharded or group[0].gathered_weight(group) or any(layer.weight is not layer.weight for layer in group):
            continue
        outer = group[0].prepared_weight(group)  # A context inside another one takes the outer one's codes.
        operand = outer[0] if outer else quantized_weight(group, tiles=True)
        if operand is not None:
            weights = tuple(layer.weight for layer in group)
            made[group] = MadeFor(weights, operand, tuple(map(version_of, weights)), group[0].recipe)
    ids = {id(weight) for record in made.values() for weight in record.weights}

    def before_step(optimizer: torch.optim.Optimizer, *_) -> None:
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError(WEIGHTS_CHANGED)

    # The versions below do not show the step of a fused optimizer, which changes weights without counting it.
    handle = register_optimizer_step_pre_hook(before_step)
    try:
        with _inside({group[0]: LayerContext(weights=(record,)) for group, record in made.items()}):
            yield
    finally:
        handle.remove()
    for group, record in made.items():
        for layer, weight, version in zip(group, record.weights, record.versions):
            if layer.weight is not weight or version_of(weight) != version:
                raise RuntimeError(WEIGHTS_CHANGED)


@contextlib.contextmanager
def accumulate_gradients(model: nn.Module) -> Iterator[None]:
    """Inside this context a converted layer adds its weight's gradient to weight.grad in the GEMM that computes the
    gradient (gemm.gemm). Autograd would otherwise write each micro-batch's gradient to a tensor of its own and add
    that in a second pass over memory.

    weight.grad keeps its usual form, float32 in the parameter's shape. Where there is none, the context makes one of
    zeros. After the context, weight.grad holds the sum that autograd would have made of the same backward passes.
    Gradient clipping, all-reduce, optimizers, GradScaler, and zero_grad() outside of the context therefore work
    unchanged. With retain_graph, activation checkpointing, or a layer that is called twice, each backward computation
    adds once. Layers that are computed as one have gradients that are slices of one tensor. docs/gradients.md says
    which sums equal autograd's to the bit.

    Autograd still adds the gradients of some weights: weights that are not float32, are frozen, have hooks, or belong
    to several layers, the weights of Conv1D, and the weights of FSDP2, which sees only the gradients that backward
    returns. For all other weights, torch.autograd.grad does not work inside the context. A context inside another one
    adds to the outer one's gradients.

    Raises ValueError for a model inside DistributedDataParallel, whose reduction waits for gradients that autograd
    accumulates. Raises RuntimeError at the end of the context if a weight's grad was set to None or replaced inside.

    >>> layer = nf.QuantLinear(32, 16)
    >>> with nf.accumulate_gradients(layer):
    ...     for rows in torch.randn(2, 4, 32):  # two micro-batches of 4 tokens
    ...         layer(rows).sum().backward()
    >>> layer.weight.grad.shape, layer.weight.grad.dtype
    (torch.Size([16, 32]), torch.float32)
    """
    layers = _layers(model, "accumulate_gradients")
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise ValueError(
            "accumulate_gradients: DistributedDataParallel reduces gradients while autograd accumulates them, and "
            "would not see these; average weight.grad over the ranks after the last micro-batch, or leave this out"
        )
    made = {layer: layer.weight.grad for layer in layers if layer.made("gradients", [layer])}  # by the context around
    owners, asked = Counter(layer.weight for layer in layers), {}
    for group in groups_of(model, lambda m: m not in made and owners[m.weight] == 1 and _takes_gradients(m)):
        weights = tuple(layer.weight for layer in group)
        together = (MadeFor(weights, _make_gradients(weights).data),)
        for layer in group:
            alone = MadeFor((layer.weight,), local(layer.weight.grad).data)
            asked[layer] = LayerContext(gradients=(alone, *together))
            made[layer], together = layer.weight.grad, ()
    with _inside(asked):
        yield
    if any(layer.weight.grad is not grad for layer, grad in made.items()):
        raise RuntimeError(
            "accumulate_gradients: the gradients of weights were dropped or exchanged inside the context, which adds "
            "to those that it found; leave it before zero_grad()"
        )


def _takes_gradients(layer: QuantLinear) -> bool:
    """Whether the layer's gradient may be added to weight.grad without autograd."""
    weight = layer.weight
    grad = local(weight.grad)
    plain = layer.stackable and (type(weight) is nn.Parameter or layer.largest is not None)
    alike = type(grad) is torch.Tensor and grad.dtype == weight.dtype and not grad.is_sparse
    hooks = weight._backward_hooks or weight._post_accumulate_grad_hooks
    return plain and (grad is None or alike) and weight.dtype == torch.float32 and weight.requires_grad and not hooks


def _make_gradients(weights: Sequence[nn.Parameter]) -> torch.Tensor:
    """Makes the gradients of these weights slices of one tensor and returns this tensor, float32 (sum of rows, K). The
    gradients keep their values."""
    values, grads = [local(weight.detach()) for weight in weights], [local(weight.grad) for weight in weights]
    rows = [value.shape[0] for value in values]
    whole = grads[0] if len(weights) == 1 or grads[0] is None else grads[0]._base
    if whole is not None and whole.is_contiguous() and whole.shape[0] == sum(rows):
        if all(grad is not None and grad.data_ptr() == part.data_ptr() for grad, part in zip(grads, whole.split(rows))):
            return whole
    together = values[0].new_zeros(sum(rows), *values[0].shape[1:])
    for weight, grad, part in zip(weights, grads, together.split(rows)):
        if grad is not None:
            part.copy_(grad)
        if type(weight) is nn.Parameter:
            weight.grad = part
        else:
            weight.grad = type(weight).from_local(part, weight.device_mesh, weight.placements)
    return together
