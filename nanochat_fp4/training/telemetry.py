"""Measurements inside of the layers: the errors that quantization causes in each of them, and the source of the
first number that is not finite."""

import warnings
from collections.abc import Callable
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
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.recipe.quantizes}
    captured: dict[str, dict[str, torch.Tensor]] = {name: {} for name in layers}

    def keep(name: str) -> Callable:
        def take(key: str, value: torch.Tensor) -> None:
            captured[name][key] = value.detach().reshape(-1, value.shape[-1])[:max_tokens]

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            take("x", args[0])
            output.register_hook(lambda grad: take("grad", grad))

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in layers.items()]
    try:
        forward_backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)

    def run(layer: QuantLinear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x)
        grad_x, grad_w = torch.autograd.grad(y, (x, layer.weight), grad.to(y.dtype))
        return [t.detach().float() for t in (y, grad_x, grad_w)]

    telemetry = {}
    for name, layer in layers.items():
        if set(captured[name]) != {"x", "grad"}:
            continue
        x, grad = captured[name]["x"], captured[name]["grad"]
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
    if not telemetry:
        return "no quantized layer"
    values: dict[str, list[float]] = {}
    for numbers in telemetry.values():
        for key, value in numbers.items():
            values.setdefault(key, []).append(value)
    text = ", ".join(f"{key.replace('_', ' ')} {sum(v) / len(v):.3f}" for key, v in values.items())
    cosines = {name: t["grad_weight_cosine"] for name, t in telemetry.items() if "grad_weight_cosine" in t}
    if cosines:
        worst = min(cosines, key=cosines.get)
        text += f" (lowest {cosines[worst]:.3f} in {worst})"
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Numbers that are not finite


def _is_bad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())


def name_nonfinite(model: nn.Module, forward_backward: Callable[[], None]) -> str:
    """
    Returns the source of the first NaN or infinity: 'weight of ...', 'output of ...' or 'gradient computed by ...'.

    forward_backward() must repeat the pass that had such a number, with the same tokens and random state, on the model
    that is not compiled. Hooks on every module find the first bad output. Hooks on the modules without children find
    the first bad gradient. Gradients are dropped. The hooks are slow, but a run calls this function once, before it
    stops or skips a step.
    """
    if bad := next((name for name, p in model.named_parameters() if _is_bad(p)), None):
        return f"weight of {bad}"
    sources: list[str] = []  # in the order in which they were found
    handles = []

    def look(what: str, name: str, tensors: Any) -> None:
        if any(map(_is_bad, tensors if isinstance(tensors, (tuple, list)) else (tensors,))):
            sources.append(f"{what} {name}")

    def on_backward(name: str, grad_input: Any, grad_output: Any) -> None:
        look("gradient that reaches", name, grad_output)
        look("gradient computed by", name, grad_input)

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(lambda *of, name=name: look("output of", name, of[2])))
            if not any(True for _ in module.children()):
                handles.append(module.register_full_backward_hook(lambda *of, name=name: on_backward(name, *of[1:])))
    try:
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            # torch warns because embeddings have no gradient of their input.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            forward_backward()
        for name, p in model.named_parameters():
            look("gradient of", name, p.grad)
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return (sources or ["the loss itself (every layer is finite when the step is repeated)"])[0]
