"""The calls that a training loop makes for the quantized layers of its model, gathered in one object.

quantized = QuantizedTraining(model, plan, num_steps)
for step in ...:
    quantized.set_progress(step)                    # the methods of this step
    with quantized.weights_once(micro_batches):     # forward and backward passes
        ...
    ...                                             # the optimizers' steps
"""

import contextlib
import sys
from numbers import Real

import torch
from torch import nn

from nanochat_fp4.nvfp4.contexts import quantize_weights_once
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.phases import MethodPlan


class QuantizedTraining:
    """The quantized layers of a model in a training loop, as the top of this file shows.

    plan says which method each layer has at each point of the run. None, for post-training, leaves the layers' methods
    as they are. num_steps is the number of steps of the whole run.
    """

    def __init__(self, model: nn.Module, plan: MethodPlan | None = None, num_steps: int = 0):
        self.model, self.plan, self.num_steps = model, plan, num_steps

    def set_progress(self, step: int) -> str | None:
        """Gives the layers their methods for this step.

        Returns a description of the new method if any layer's method changed, otherwise None. Compiled code contains
        methods as constants, so it is out of date after a change.
        """
        if self.plan is None:
            return None
        self.model.nf_report.progress = step / self.num_steps
        if not self.plan.apply(self.model, step / self.num_steps):
            return None
        return str(self.plan.at(step / self.num_steps))

    def quantizes(self) -> bool:
        """Whether any layer quantizes at the moment."""
        return any(isinstance(m, QuantLinear) and m.recipe.quantizes for m in self.model.modules())

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        """Returns a context that makes the weights' codes once for `passes` passes, if there are several."""
        return quantize_weights_once(self.model) if passes > 1 else contextlib.nullcontext()


def set_progress(model: nn.Module, progress: float) -> bool:
    """Gives the layers the method of the present phase. A training loop calls this function before each step if its
    method changes in the course of a run (nvidia_full).

    model:    the converted model, or a module that contains it (DistributedDataParallel, a compiled model, an average)
    progress: the number of steps done divided by the number of steps of the run, from 0 to 1

    Returns whether any layer's method changed. If so, compiled code is discarded and compiled again. For methods
    without phases the call does nothing. It also leaves alone layers that have been given another method since convert.
    Raises ValueError for a progress outside 0 to 1, and for a model that was not converted.

    >>> model = nf.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "nvidia_full", verbose=False)
    >>> nf.set_progress(model, 0.5), nf.set_progress(model, 0.9)  # nvidia_full changes from 82% of the steps on
    (False, True)
    """
    converted = [m for m in model.modules() if "nf_report" in vars(m)] if isinstance(model, nn.Module) else []
    if not converted:
        raise ValueError("set_progress: the model was not converted; call nanochat_fp4.convert(model, method) first")
    number = isinstance(progress, Real) or (isinstance(progress, torch.Tensor) and progress.numel() == 1)
    if not number or not 0 <= progress <= 1:
        raise ValueError(f"set_progress: progress is {progress!r}, expected the share of the run's steps, from 0 to 1")
    # Each layer's method, and the method of its present phase. Of nested parts that were converted, the innermost one
    # comes last and decides.
    phases = {}
    for part in converted:
        part.nf_report.progress, method = float(progress), part.nf_report.recipe
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
        torch.compiler.reset()  # Compiled code contains recipes as constants.
    return True
