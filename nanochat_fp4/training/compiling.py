"""Compiles the kernels that a run needs while Python reads data and makes the model.

Most of a compilation's time is spent outside of Python, in LLVM and ptxas. A kernel is compiled by its first launch.
Threads therefore launch each kernel of a training step once on small made-up operands. The self-check and the first
step then find the kernels compiled.

torch.compile has its kernels compiled by processes of its own, which need some seconds to start. Until they answer, it
compiles one kernel after the other in this process. The processes are therefore started first, and the compiler's
modules are imported while the threads compile.
"""

import concurrent.futures
import contextlib
import importlib
from collections.abc import Callable, Iterator

import torch

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.makers import Quantization, quantize_grad_output, quantize_operand, quantize_relu_squared
from nanochat_fp4.nvfp4.recipes import GRAD_OUTPUT, GRAD_OUTPUT_T, INPUT, INPUT_T, WEIGHT, Recipe

# The size of the made-up operands. The sizes of a model are multiples of 128, too, and are wide enough for the same
# tiles.
ROWS, COLUMNS = 256, 2048


@contextlib.contextmanager
def compiled_meanwhile(device: torch.device, recipe: Recipe) -> Iterator[Callable[[], None]]:
    """Compiles the kernels of a method in threads, and starts torch's compiler, for a run on a GPU. Yields a function
    that waits for the threads.

    A compilation that fails here fails again, with its reason, where the kernel is needed. The states of torch's random
    generators do not change.
    """
    pool = concurrent.futures.ThreadPoolExecutor(8, thread_name_prefix="compiling")
    if device.type == "cuda":
        start_processes_of_compiler()
    if device.type == "cuda" and recipe.quantizes and use_kernels(device):
        for launch in (launch for part in recipe.parts for launch in launches(part, device)):
            pool.submit(_on, device, launch)
    try:
        if device.type == "cuda":
            # Not in a thread: where two threads import a package in a circle, one of them may find it half imported.
            importlib.import_module("torch._inductor.compile_fx")
        yield pool.shutdown
    finally:
        pool.shutdown(cancel_futures=True)


def start_processes_of_compiler() -> None:
    """Starts the processes that compile kernels for torch.compile, as its first call would do. A release of torch
    without this function starts them then."""
    with contextlib.suppress(ImportError):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


def _on(device: torch.device, launch: Callable[[], object]) -> None:
    """Calls launch() with this GPU as the current one. Every thread has a current GPU of its own, which at first is
    GPU 0."""
    with torch.cuda.device(device):
        launch()


def launches(recipe: Recipe, device: torch.device) -> list[Callable[[], object]]:
    """Returns one function for each kernel of a layer's forward and backward pass, which launches this kernel."""
    seed = torch.zeros((), dtype=torch.int64, device=device)
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)

    def how(operand: int) -> Quantization:
        drawn = recipe.draws_in_forward if operand in (INPUT, WEIGHT) else True
        return recipe.quantization(operand, *((seed, seed) if drawn else (None, None)), device)

    def of_relu_squared() -> object:
        if recipe.input_is_codes:
            return quantize_relu_squared(x, how(INPUT), seed)
        from nvfp4_kernels.relu_squared import relu_squared

        return relu_squared(x, seed)

    def transposed_input() -> object:
        if recipe.grad_weight.b.raw:
            return quantize_operand(x, how(INPUT_T), transpose=True, keep_codes=True)
        kept = quantize_operand(x, how(INPUT), keep_codes=True).for_backward()
        return quantize_operand(kept.without_cache(), how(INPUT_T), transpose=True)

    return [
        lambda: quantize_grad_output(x, how(GRAD_OUTPUT), how(GRAD_OUTPUT_T)),
        transposed_input,  # This launches the kernel of the transposed weight as well.
        lambda: quantize_operand(x, how(INPUT), keep_codes=True),
        lambda: quantize_operand(x.float(), how(WEIGHT), keep_codes=True),
        of_relu_squared,
    ]
