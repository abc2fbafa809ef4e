"""Warns once, after a model's first optimizer steps, if its training loop trains something else than convert reported.

Steps of an optimizer are counted and not calls of the model, because a hook of the model would be compiled with the
model and could not count.
"""

import sys
import warnings
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.experts import ExpertLinear
from nanochat_fp4.nvfp4.heads import some
from nanochat_fp4.nvfp4.layer import QuantLinear

PATIENCE = 6  # The number of optimizer steps before the warning. A short trial must get it, too.


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
