"""One optimizer step in parts. The training loop calls these parts, and lab.bench steps times each of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import nanochat_fp4 as nf
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.optim8bit import LeanState

# A batch consists of tokens, targets (negative where a token has no target), and further arguments of the loss.
Batch = tuple[Tensor, ...]


def mean_loss(forward: Callable[..., Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Returns the model's own loss, the mean over the tokens with a target, ()."""
    return forward(x, y)


class TrainingStep:
    """One optimizer step in parts. The weights' codes are made once, the gradients of micro-batches add up, and the
    update follows.

    - model: the model, which is not compiled
    - forward: the compiled model, or the model itself
    - dtype: the dtype of matrix products (gpt.autocast)
    - loss: a function of (model or its compiled form, *batch) that returns the mean loss of a micro-batch, ()
    - lean: the state of --state=lean. Without it gradients are added where they are made (nf.accumulate_gradients).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        forward: Callable[..., Tensor] | None = None,
        dtype: torch.dtype | None = None,
        loss: Callable[..., Tensor] = mean_loss,
        lean: LeanState | None = None,
    ):
        self.model, self.optimizers, self.dtype, self.loss, self.lean = model, list(optimizers), dtype, loss, lean
        self.forward = model if forward is None else forward
        self.device = model.get_device()

    def autocast(self) -> contextlib.AbstractContextManager:
        """Returns the context in which passes compute with this step's dtype."""
        return autocast(self.device.type, self.dtype)

    def drop_graphs(self) -> bool:
        """Gives back the memory of CUDA graphs, and returns whether there were any. This class has none."""
        return False

    def synchronize(self) -> None:
        """Waits until the GPU has done all work, for measurements of time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        """Returns a context that makes the weights' codes once for so many passes, if there are several."""
        return nf.quantize_weights_once(self.model) if passes > 1 else contextlib.nullcontext()

    @contextlib.contextmanager
    def micro_batches(self, count: int, step: int = 0) -> Iterator[None]:
        """A context for the micro-batches of one step, in which their common work is done once."""
        if self.lean is not None:
            adding = self.lean.gradients(count, step)
        else:
            adding = nf.accumulate_gradients(self.model) if count > 1 else contextlib.nullcontext()
        with self.weights_once(count), adding:
            yield

    def micro_batch(self, *batch: Tensor, count: int = 1) -> Tensor:
        """Adds the gradients of one of `count` micro-batches, weighted by 1 / count. Returns the mean loss of this
        micro-batch, ()."""
        with record_function("phase: forward"), self.autocast():
            loss = self.loss(self.forward, *batch)
        with record_function("phase: backward"):
            (loss / count).backward()
            if self.lean is not None:
                self.lean.next_micro_batch()
        return loss.detach()

    def update(self) -> None:
        """Makes the steps of the optimizers, and drops the gradients."""
        with record_function("phase: update"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)
