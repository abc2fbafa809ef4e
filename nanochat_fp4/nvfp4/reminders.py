"""Warns if a training loop does not make the calls that its method needs.

A method that changes late in a run needs set_progress, and a method with error feedback needs update_gram_matrices.
Without these calls the run would silently train another method.
"""

import warnings
import weakref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanochat_fp4.nvfp4.feedback import gram_state
from nanochat_fp4.nvfp4.recipes import Recipe

PATIENCE = 6  # The number of steps without a needed call before the warning. A short trial must get it, too.
_reminders: "weakref.WeakKeyDictionary[nn.Module, _Reminder]" = weakref.WeakKeyDictionary()


class _Reminder:
    """Warns once if PATIENCE optimizer steps pass without a call that the method needs.

    The steps of an optimizer are counted and not calls of the model, because a hook of the model would be compiled with
    the model and could not count.
    """

    def __init__(self, model: nn.Module, recipe: Recipe):
        self.model, self.recipe, self.steps = weakref.ref(model), recipe, 0
        self.missing = {}  # needed call -> the reason why the method needs it
        if recipe.late:
            self.missing["set_progress(model, done)"] = f"changes from {100 * recipe.late[0]:.0f}% of the steps on"
        if recipe.uses_feedback:
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
    """Starts the reminder of the calls that this recipe needs from a training loop. None ends all reminders."""
    was_called(model, "")
    if recipe is not None and (recipe.late or recipe.uses_feedback):
        _reminders[model] = _Reminder(model, recipe)


def was_called(model: nn.Module, name: str) -> None:
    """Ends the reminder of the call with this name, or of all calls if the name is ""."""
    for module in model.modules() if _reminders else ():
        if reminder := _reminders.get(module):
            reminder.missing = {c: what for c, what in reminder.missing.items() if not c.startswith(name)}
            if not reminder.missing:
                reminder.handle.remove()
                del _reminders[module]
