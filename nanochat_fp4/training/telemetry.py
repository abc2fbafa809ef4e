"""Measurements inside of the layers: the errors that quantization causes in each of them, and the source of the
first number that is not finite."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from nanochat_fp4.nvfp4.contexts import full_precision
from nanochat_fp4.nvfp4.layer import QuantLinear


def layer_telemetry(
    model: nn.Module, forward_backward: Callable[[], None], max_tokens: int = 512
) -> dict[str, dict[str, float]]:
    """
    Returns {layer: numbers by name} for every quantized layer of `model`. They come from one pass that
    forward_backward() computes. Each layer is computed twice on up to max_tokens tokens of this pass: by its method,
    and exactly.

    - output_error, grad_input_error, grad_weight_error: the relative error, which is the norm of the difference divided
      by the norm of the exact tensor
    - grad_input_cosine, grad_weight_cosine: the cosine between both gradients. If the exact tensor is zero, its numbers
      are left out.

    The gradients of the pass are dropped.
    """
    layers = {m: name for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.recipe.quantizes}
    inputs: dict[nn.Module, torch.Tensor] = {}
    grads: dict[nn.Module, torch.Tensor] = {}

    def some_rows(t: torch.Tensor) -> torch.Tensor:
        return t.detach().reshape(-1, t.shape[-1])[:max_tokens]

    def keep(layer: nn.Module, args: Any, output: torch.Tensor) -> None:
        inputs[layer] = some_rows(args[0])
        output.register_hook(lambda grad: grads.update({layer: some_rows(grad)}))

    with contextlib.ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(keep))
        forward_backward()
    model.zero_grad(set_to_none=True)

    def run(layer: QuantLinear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x)
        grad_x, grad_w = torch.autograd.grad(y, (x, layer.weight), grad.to(y.dtype))
        return [t.detach().float() for t in (y, grad_x, grad_w)]

    telemetry = {}
    for layer, name in layers.items():
        if layer not in grads:
            continue
        x, grad = inputs[layer], grads[layer]
        with torch.enable_grad():
            quantized = run(layer, x, grad)
            with full_precision(layer):
                exact = run(layer, x, grad)
        numbers = {}
        for key, q, e in zip(("output", "grad_input", "grad_weight"), quantized, exact):
            if float(e.norm()) == 0:
                continue  # At the start of a run the projections are zero, so there is nothing to compare with.
            numbers[f"{key}_error"] = float((q - e).norm() / e.norm())
            if key != "output":
                numbers[f"{key}_cosine"] = float(nn.functional.cosine_similarity(q.flatten(), e.flatten(), dim=0))
        telemetry[name] = numbers
    return telemetry


def summarize_telemetry(telemetry: dict[str, dict[str, float]]) -> str:
    """Returns one line with the mean of each number over the layers, and the layer whose weight gradient is the
    worst."""
    keys = dict.fromkeys(key for numbers in telemetry.values() for key in numbers)
    values = {key: [t[key] for t in telemetry.values() if key in t] for key in keys}
    text = ", ".join(f"{key.replace('_', ' ')} {sum(v) / len(v):.3f}" for key, v in values.items())
    cosines = {name: t["grad_weight_cosine"] for name, t in telemetry.items() if "grad_weight_cosine" in t}
    if cosines:
        worst = min(cosines, key=cosines.get)
        text += f" (lowest {cosines[worst]:.3f} in {worst})"
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite


def not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Yields the names of the tensors in nested dicts and lists that have a number which is not finite."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().float() if value.is_floating_point() and value.numel() else torch.zeros(1)
        if not all(number.isfinite() for number in numbers.aminmax()):
            yield name
    elif isinstance(value, dict | list | tuple):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(part, torch.Tensor | dict | list | tuple):
                yield from not_finite(part, f"{name}.{key}" if name else str(key))


def name_nonfinite(model: nn.Module, forward_backward: Callable[[], None]) -> str:
    """
    Returns the source of the first NaN or infinity: 'weight of ...', 'output of ...' or 'gradient computed by ...'.

    forward_backward() must repeat the pass that had such a number, with the same tokens and random state, on the model
    that is not compiled. Hooks on every module find the first bad output. Hooks on the modules without children find
    the first bad gradient. Gradients are dropped. The hooks are slow, but a run calls this function once, before it
    stops or skips a step.
    """
    if bad := next(not_finite(dict(model.named_parameters())), None):
        return f"weight of {bad}"
    sources: list[str] = []  # in the order in which they were found
    names = {module: name for name, module in model.named_modules() if name}

    def look(what: str, name: str, tensors: Any) -> None:
        if list(not_finite(tensors)):
            sources.append(f"{what} {name}")

    def on_forward(module: nn.Module, args: Any, output: Any) -> None:
        look("output of", names[module], output)

    def on_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
        look("gradient that reaches", names[module], grad_output)
        look("gradient computed by", names[module], grad_input)

    model.zero_grad(set_to_none=True)
    with contextlib.ExitStack() as stack:
        for module in names:
            stack.enter_context(module.register_forward_hook(on_forward))
            if not list(module.children()):
                stack.enter_context(module.register_full_backward_hook(on_backward))
        stack.enter_context(warnings.catch_warnings())
        # torch warns because embeddings have no gradient of their input.
        warnings.filterwarnings("ignore", "Full backward hook is firing")
        forward_backward()
    for name, p in model.named_parameters():
        look("gradient of", name, p.grad)
    model.zero_grad(set_to_none=True)
    return (sources or ["the loss itself (every layer is finite when the step is repeated)"])[0]
