"""What a training loop does for the quantized layers of its model, whatever their method needs.

quantized = QuantizedTraining(model, plan, num_steps)
for step in ...:
    quantized.set_progress(step)                    # the methods of this step
    with quantized.weights_once(micro_batches):     # forward and backward passes
        ...
    with quantized.update(step):                    # the optimizers
        ...
    quantized.after_update(step, forward)           # a look at the inputs, for methods that want one
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from nanochat_fp4.nvfp4 import oscillation
from nanochat_fp4.nvfp4.convert import (
    expect_calls,
    quantize_weights_once,
    rounds_with_feedback,
    update_gram_matrices,
)
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.plan import MethodPlan

LOOK_EVERY = 10  # steps between looks at the layers' inputs


class QuantizedTraining:
    """
    plan:      which method each layer has when; None leaves the layers as they are, and also what their method has
               learned of their inputs (post-training)
    num_steps: of the whole run, for the plan and the remedy
    remedy:    what --oscillation asks for, of oscillation.FORM
    Raises ValueError for a plan or remedy that does not fit.
    """

    def __init__(self, model: nn.Module, plan: MethodPlan | None = None, num_steps: int = 0, remedy: str = ""):
        self.model, self.plan, self.num_steps = model, plan, num_steps
        expect_calls(model, None)  # what a method wants of a training loop is done here
        self.remedies = oscillation.remedies(remedy, model, num_steps)  # with state_dict() and load_state_dict()

    def set_progress(self, step: int) -> str | None:
        """Gives the layers the methods of this step. What they are from here on, if one changed: compiled code, in
        which they are constants, is then out of date."""
        if self.plan is None or not self.plan.apply(self.model, step / self.num_steps):
            return None
        return str(self.plan.at(step / self.num_steps))

    def quantizes(self) -> bool:
        """Whether any layer quantizes at the moment."""
        return any(isinstance(m, QuantLinear) and m.recipe.quantizes for m in self.model.modules())

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        """The weights' codes made once for so many passes, where making them for each is more work."""
        often = passes > 1 or rounds_with_feedback(self.model)
        return quantize_weights_once(self.model) if often else contextlib.nullcontext()

    @contextlib.contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Around the optimizers' steps."""
        with contextlib.ExitStack() as stack:
            for remedy in self.remedies:
                stack.enter_context(remedy.optimizer_step(step))
            yield

    def after_update(self, step: int, forward: Callable[[], object]) -> None:
        """forward() calls the model on some thousand tokens. All ranks must call this together."""
        if self.plan is not None and step % LOOK_EVERY == 0:
            update_gram_matrices(self.model, forward)
