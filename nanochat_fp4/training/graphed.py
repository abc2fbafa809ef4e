"""Micro-batches of a training run as one CUDA graph. GraphedStep is a subclass of TrainingStep for base_train's
--cuda-graph.

A micro-batch of a 4-bit method launches some three thousand kernels. Python needs about as long to launch them as a GPU
needs to run them, and on a busy host it needs longer. A CUDA graph launches all of them with one call. The first step
runs without graphs and compiles the model. The second step captures two graphs, and all later steps replay them:

    codes        makes the weights' codes, once a step, in memory that the graph owns
    micro-batch  computes the forward and backward pass. It reads the batch and adds the gradients at fixed addresses.

The results have the same bits as without graphs. Seeds are drawn on the device by torch's generator. A replay takes the
generator's seed and offset from the generator itself, so each replay draws the numbers that a pass without graphs would
draw.

The graphs are captured again if something that they contain has changed: the layers' methods (when a phase begins), the
memory of the parameters, or the number of micro-batches. Work between micro-batches runs without graphs: evaluation,
the search for the layer of a NaN, and the optimizers. The memory of a micro-batch's activations stays allocated between
replays.
"""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError, format_bytes, is_out_of_memory, one_line
from nanochat_fp4.hardware import gpu_memory
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.optim import Muon
from nanochat_fp4.models.optim8bit import is_lean
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.parallel import is_sharded
from nanochat_fp4.training.memory import GRAPHED_STACK_ELEMENTS, SHARE, count, state_now
from nanochat_fp4.training.step import TrainingStep


def graphs_problem(
    model: torch.nn.Module, rows: int = 0, seq_len: int = 0, processes: int = 1, cap: int | None = None
) -> str | None:
    """Returns the reason why micro-batches of this model should not be kept as CUDA graphs, or None. Without `rows`
    memory is no reason. A step may take `cap` bytes, or without a cap those of the GPU."""
    if model.get_device().type != "cuda":
        return f"the model is on {model.get_device()}, expected a CUDA device"
    if is_sharded(model):
        return "--parallel=fsdp gathers weights inside a micro-batch"
    if rows and not isinstance(model, GPT):
        return "the memory of this family of models is not counted"
    total = cap or gpu_memory(model.get_device())[1]
    need = count(model, rows, state_now(model), model.recompute, seq_len, processes).graphed_peak if rows else 0
    if need > SHARE * total:
        return f"with them a step needs {format_bytes(need)} of {format_bytes(total)}, by count"
    return None


class GraphedStep(TrainingStep):
    """A TrainingStep that captures CUDA graphs in the second step and replays them in later steps. Its arguments are
    those of TrainingStep.

    Raises UserError if a capture fails.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # Both graphs, and the tensors at the addresses that the graphs contain.
        self.captured: SimpleNamespace | None = None
        self.seen: tuple | None = None  # What the last step without graphs has found.
        self.with_grads: list[torch.nn.Parameter] = []
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):  # The activations stay in memory beside its stacks.
                optimizer.stack_elements = min(optimizer.stack_elements, GRAPHED_STACK_ELEMENTS)

    def drop_graphs(self) -> bool:
        """Gives the graphs' memory back. The next step runs without graphs, and the step after it captures new ones."""
        had, self.captured, self.seen = self.captured is not None, None, None
        return had

    def _layers(self) -> list[QuantLinear]:
        return [m for m in self.model.modules() if isinstance(m, QuantLinear)]

    @contextlib.contextmanager
    def micro_batches(self, count: int, step: int = 0) -> Iterator[None]:
        """A context for the micro-batches of one step, which captures or replays the graph of the weights' codes."""
        addresses = tuple(p.data_ptr() for p in self.model.parameters())
        holds = count, addresses, [layer.recipe for layer in self._layers()]  # what a captured graph takes for granted
        try:
            if holds != self.seen:
                self.captured, self.seen = None, holds
                with super().micro_batches(count, step):
                    yield
                self.with_grads = [p for p in self.model.parameters() if p.grad is not None]
            elif self.captured is None:
                with self._first_with_graphs(count, step):
                    yield
            else:
                for parameter, grad in self.captured.grads:
                    parameter.grad = grad
                torch._foreach_zero_([grad for _, grad in self.captured.grads])
                if self.lean is not None:
                    self.lean.begin(step)
                if self.captured.codes is not None:
                    self.captured.codes.replay()
                yield
        except Exception:
            # The graphs may be captured only in part, and if memory ran out, their memory is needed.
            self.drop_graphs()
            raise

    @contextlib.contextmanager
    def _first_with_graphs(self, count: int, step: int) -> Iterator[None]:
        """The context of the step that captures. Its gradients keep their addresses in later steps."""
        with contextlib.ExitStack() as stack:
            captured = SimpleNamespace(grads=[], codes=None, micro_batch=None)
            # Contexts are entered in the order of the step before, whose compiled layers have guards on it. Nothing may
            # be compiled in a capture: the timing of a kernel's configurations waits for the device.
            if count > 1 and groups_of(self.model):
                captured.codes = torch.cuda.CUDAGraph()
                with _capture(captured.codes):
                    stack.enter_context(self.weights_once(count))
                captured.codes.replay()
            sums = {p: torch.zeros_like(p) for p in self.with_grads if self.lean and count > 1 and is_lean(p)}
            if self.lean is not None:
                stack.enter_context(self.lean.gradients(count, step, sums))
            elif count > 1:
                stack.enter_context(nf.accumulate_gradients(self.model))
            for p in (p for p in self.with_grads if p not in sums):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            captured.grads = [(p, sums.get(p, p.grad)) for p in self.with_grads]
            # The operands of the weights must stay alive as long as the graphs.
            captured.made = [layer.contexts for layer in self._layers()]
            self.captured = captured
            yield

    def micro_batch(self, *batch: Tensor, count: int = 1) -> Tensor:
        """Does the work of TrainingStep.micro_batch, in the capturing step and later ones by a replay of the graph."""
        captured = self.captured
        if captured is None:
            return super().micro_batch(*batch, count=count)
        if captured.micro_batch is None:
            captured.batch = tuple(t.clone() for t in batch)
            graph = torch.cuda.CUDAGraph()
            with _capture(graph, captured.codes and captured.codes.pool()):
                captured.loss = super().micro_batch(*captured.batch, count=count)
            captured.micro_batch = graph
        for captured_part, part in zip(captured.batch, batch, strict=True):
            captured_part.copy_(part)
        captured.micro_batch.replay()
        return captured.loss.clone()


@contextlib.contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None = None) -> Iterator[None]:
    """Captures the kernels that are launched in this context. Other threads may go on to use CUDA."""
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise  # The training loop catches this error and names the micro-batch that fits.
        raise UserError(
            f"a micro-batch could not be captured as a CUDA graph ({one_line(error)}); train with --no-cuda-graph"
        ) from error
