"""One optimizer step, in parts: the loop calls them, and lab.bench steps times each of them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.profiler import record_function

import nanochat_fp4 as nf
from nanochat_fp4.models.gpt import autocast
from nanochat_fp4.models.optim8bit import LeanState
from nanochat_fp4.nvfp4.quantized_training import QuantizedTraining

Batch = tuple[Tensor, ...]  # tokens, targets (negative: none), and whatever else the loss takes


class TrainingStep:
    """One optimizer step in parts: the weights' codes made once, micro-batches whose gradients add up, the update.

    model: not compiled. forward: the compiled model, or the model itself. dtype: of matrix products (gpt.autocast).
    loss: (model or its compiled form, *batch) -> mean loss of a micro-batch, ().
    lean: of --state=lean. Else gradients are added where they are made (nf.accumulate_gradients).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        forward: Callable[..., Tensor] | None = None,
        quantized: QuantizedTraining | None = None,
        dtype: torch.dtype | None = None,
        loss: Callable[..., Tensor] = lambda forward, x, y: forward(x, y),
        lean: LeanState | None = None,
    ):
        self.model, self.optimizers, self.dtype, self.loss, self.lean = model, list(optimizers), dtype, loss, lean
        self.forward = model if forward is None else forward
        self.quantized = quantized or QuantizedTraining(model)
        self.device = model.get_device()

    @property
    def compiled(self) -> bool:
        return self.forward is not self.model

    def autocast(self) -> contextlib.AbstractContextManager:
        return autocast(self.device.type, self.dtype)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def weights_once(self, passes: int) -> contextlib.AbstractContextManager:
        return self.quantized.weights_once(passes)

    @contextlib.contextmanager
    def micro_batches(self, count: int, step: int = 0) -> Iterator[None]:
        """A block around the micro-batches of one step, in which their common work is done once."""
        if self.lean is not None:
            adding = self.lean.gradients(count, step)
        else:
            adding = nf.accumulate_gradients(self.model) if count > 1 else contextlib.nullcontext()
        with self.weights_once(count), adding:
            yield

    def micro_batch(self, *batch: Tensor, count: int = 1) -> Tensor:
        """Adds the gradients of one of `count` micro-batches, weighted by 1 / count. Returns its mean loss, ()."""
        with record_function("phase: forward"), self.autocast():
            loss = self.loss(self.forward, *batch)
        with record_function("phase: backward"):
            (loss / count).backward()
        return loss.detach()

    def update(self) -> None:
        """Makes the optimizers' steps and drops the gradients."""
        with record_function("phase: update"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)


@dataclass
class Attempt:
    """An optimizer step of the loop, and its result over all ranks. A step with bad numbers has updated nothing."""

    save_before: Callable[[], bool]  # saves the run as it was before this step
    batches: list[tuple[Batch, dict[str, Tensor]]] = field(default_factory=list)  # with the generators before each
    loss: float = 0.0
    grad_norm: float = 0.0
    rate: float | None = None  # the learning rates' multiplier; None where nothing was updated
    tokens: int = 0
    consumed: float = 0.0  # conversations so far, of all ranks
    progress: float = 0.0  # of the run, after this step: from 0 to 1
    bad: bool = False  # a number of any rank is not finite
    bad_here: bool = False
    seconds: float = 0.0
    shown: dict[str, str] = field(default_factory=dict)  # beside the progress bar
