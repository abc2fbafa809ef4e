"""OsciReset, for weights that oscillate: that cross the edge between two values of the 4-bit grid again and again.

The optimizer moves a weight by a small part of the grid's spacing in a step, but whenever it crosses an edge the
forward pass sees a whole spacing. OsciReset (TetraJet-v2, Chen et al., 2025), for the layers whose weight has NVFP4
codes in the forward: weights whose code moves much more than they do are put on their grid value, half a spacing away
from both edges.

It is a context around the optimizer's step, and needs nothing else of a training loop. All ranks compute the same: what
comes out of the step is the same on each.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from nanochat_fp4.nvfp4.convert import groups_computed_as_one
from nanochat_fp4.nvfp4.linear import QuantLinear, quantized_weights
from nanochat_fp4.nvfp4.methods import removed


def has_grid(layer: QuantLinear) -> bool:
    """Whether the forward pass takes this layer's weight from one NVFP4 grid that it alone determines (its outliers,
    which have another, are no part of that)."""
    recipe, weight = layer.recipe, layer.recipe.output.b
    if not recipe.fixed_weight or weight.terms > 1 or weight.feedback:
        return False
    return weight.rounding.has_kernels


def _groups(model: nn.Module) -> list[tuple[QuantLinear, ...]]:
    return [group for group in groups_computed_as_one(model) if has_grid(group[0])]


def _weights(group: tuple[QuantLinear, ...]) -> list[torch.Tensor]:
    return [layer.weight.detach() for layer in group]


def _named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: m.weight.detach() for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def _restored(model: nn.Module, saved: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies beside the model's weights. Raises KeyError or RuntimeError for names or shapes that it does not have."""
    own = _named_weights(model)
    return {name: torch.empty_like(own[name]).copy_(tensor) for name, tensor in saved.items()}


def _quantized(group: tuple[QuantLinear, ...]) -> torch.Tensor:
    """The weights' quantized values, stacked; channels that are not in 4 bits as they are."""
    (operand,) = quantized_weights([group])
    values, channels = operand.dequantize(), group[0].statistics.channels
    if channels is None:
        return values
    return values.index_copy(1, channels, torch.cat(_weights(group)).float().index_select(1, channels))


class OsciReset:
    """Puts weights that oscillate on their grid value.

    Before the end of each period after `start`, for the steps of a window, what a weight's quantized value moves is
    summed, and what the weight itself moves; where the first sum is more than RATIO times the second, the weight is set
    to its quantized value. start, period, window: fractions of the run's steps (TetraJet-v2: 0.6, 200 steps, 50 steps,
    of long runs; here as fractions, so that a short run has as many). State only inside a window: 4 bytes a weight.
    """

    RATIO = 8

    def __init__(self, model: nn.Module, num_steps: int, period: float, window: float, start: float):
        self.model = model
        self.start, self.period = round(start * num_steps), max(1, round(period * num_steps))
        self.window = min(self.period, max(1, round(window * num_steps)))
        self.excess: dict[str, torch.Tensor] = {}

    @contextlib.contextmanager
    @torch.no_grad()
    def optimizer_step(self, step: int) -> Iterator[None]:
        """step: from 0, of the whole run."""
        left = self.period - 1 - (step - self.start) % self.period  # steps after this one in its period
        if step < self.start or left >= self.window:
            self.excess.clear()
            yield
            return
        groups = _groups(self.model)
        names = {m: name for name, m in self.model.named_modules() if isinstance(m, QuantLinear)}
        before = [(torch.cat(_weights(group)), _quantized(group)) for group in groups]
        yield
        for group, (weight, quantized) in zip(groups, before):
            new, new_quantized = torch.cat(_weights(group)), _quantized(group)
            excess = (new_quantized - quantized).abs() - self.RATIO * (new - weight).abs()
            rows = [len(layer.weight) for layer in group]
            for layer, part, value in zip(group, excess.split(rows), new_quantized.split(rows)):
                name = names[layer]
                self.excess[name] = self.excess[name] + part if name in self.excess else part
                if left == 0:
                    layer.weight.copy_(torch.where(self.excess[name] > 0, value, layer.weight))
        if left == 0:
            self.excess.clear()

    def state_dict(self) -> dict:
        return {"excess": self.excess}

    def load_state_dict(self, state: dict) -> None:
        """Raises KeyError, TypeError or RuntimeError for the state of something else."""
        self.excess = _restored(self.model, state["excess"])


FORM = "reset, with :period:window:start, fractions of the steps"


def remedies(text: str, model: nn.Module, num_steps: int) -> list[OsciReset]:
    """What --method-changes=reset asks for, of FORM: one, or none for "". Raises ValueError, in one line."""
    if not text:
        return []
    kind, *words = text.split(":")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        numbers = [-1.0]
    if kind in ("ema", "q_ema"):
        raise ValueError(f"oscillation: {text!r} {removed()}")
    if kind == "reset" and len(numbers) <= 3 and all(0 <= n <= 1 for n in numbers):
        return [OsciReset(model, num_steps, *numbers, *(0.05, 0.0125, 0.6)[len(numbers) :])]
    raise ValueError(f"oscillation: {text!r} is not {FORM}")
