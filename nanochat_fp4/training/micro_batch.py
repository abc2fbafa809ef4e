"""The size of micro-batches: how many micro-batches make a step, and how many rows fit the memory of a device."""

import argparse
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.cli import UserError, format_bytes, is_out_of_memory
from nanochat_fp4.common import is_ddp_initialized, preserved_rng, print0
from nanochat_fp4.hardware import gpu_memory, physical_memory
from nanochat_fp4.models.gpt import GPT, autocast
from nanochat_fp4.models.optim import STACK_BYTES, STACK_ELEMENTS
from nanochat_fp4.models.optim8bit import STEP_BYTES, is_lean, stack_that_fits, state_bytes
from nanochat_fp4.training.memory import SHARE, next_lever


def plan_accumulation(
    total_batch_size: int, device_batch_size: int, seq_len: int, world_size: int, flag: str = "--device-batch-size"
) -> int:
    """Returns the number of micro-batches in a step of total_batch_size tokens. Raises UserError, which names
    `flag`, if the tokens cannot be divided into micro-batches of this size."""
    row = seq_len * world_size
    tokens = device_batch_size * row
    if tokens <= 0 or total_batch_size < tokens or total_batch_size % tokens:
        one_row_divides = 0 < row <= total_batch_size and total_batch_size % row == 0
        other = f"another {flag}" if one_row_divides else "another length of rows"
        near = f" such as {max(1, round(total_batch_size / tokens)) * tokens}" if tokens > 0 else ""
        rows = "1 row" if device_batch_size == 1 else f"{device_batch_size} rows"
        raise UserError(
            f"--total-batch-size={total_batch_size} is not a multiple of {tokens} tokens ({rows} of {seq_len} on "
            f"{world_size} device(s)); choose a multiple{near}, or {other}"
        )
    return total_batch_size // tokens


def parse_device_batch_size(text: str) -> int | str:
    """The argparse type of --device-batch-size, which is 'auto' or a positive whole number."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a positive whole number")
    return int(text)


def largest_micro_batch(
    rows: int, peak_bytes: Callable[[int], int], budget: int, limit: int = 1024, below: int | None = None
) -> int | None:
    """
    Returns the largest number of rows that fits in a micro-batch, or None if not even one row fits. `rows` is the
    number of rows of this device in a step.

    peak_bytes(size) runs a forward and backward pass of `size` rows and returns the peak of memory in bytes, or runs
    out of memory. The peak may be at most `budget` bytes. Candidates are the divisors of `rows` up to `limit` and
    smaller than `below`, so that all micro-batches of a step have the same size.

    Memory is a constant plus a part proportional to the size, and two small passes determine both. A trial then checks
    the predicted size. While trials fail, the next smaller size is tried.
    """

    def measure(size: int) -> int | None:
        try:
            return peak_bytes(size)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            return None
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    sizes = [n for n in range(1, min(rows, limit) + 1) if rows % n == 0 and (below is None or n < below)]
    measured = {size: measure(size) for size in sizes[:2]}
    fitting_sizes = [size for size, peak in measured.items() if peak is not None and peak <= budget]
    if len(fitting_sizes) < 2:
        return fitting_sizes[0] if fitting_sizes else None
    (a, peak_a), (b, peak_b) = measured.items()
    per_row = max(1.0, (peak_b - peak_a) / (b - a))
    predicted = [size for size in sizes[2:] if peak_b + per_row * (size - b) <= budget]
    for size in reversed(predicted):
        peak = measure(size)
        if peak is not None and peak <= budget:
            return size
    return b


def optimizer_bytes(model: nn.Module) -> float:
    """Returns the memory of a step that a trial pass does not use: the gradients of earlier micro-batches, and the
    moments."""
    of_state = state_bytes(model, state_now(model), gpu=model.get_device().type == "cuda")
    return of_state["gradients"] + of_state["moments"]


def update_bytes(model: nn.Module) -> int:
    """Returns the memory that the update itself takes when the activations are gone. For Muon in FP32 state this is
    STACK_BYTES for each element of a stack."""
    elements = min(STACK_ELEMENTS, sum(p.numel() for p in model.parameters() if p.ndim == 2))
    if state_now(model) == "lean":
        return STEP_BYTES * min(elements, stack_that_fits(model))
    return STACK_BYTES * elements


def try_micro_batch(model: nn.Module, size: int, seq_len: int, dtype: torch.dtype | None = None) -> None:
    """Computes a forward and backward pass of `size` rows of random tokens. The gradients stay, and the states of
    the random generators do not change."""
    device = model.get_device()
    with preserved_rng(device), autocast(device.type, dtype):
        tokens = torch.randint(model.config.vocab_size, (size, seq_len), device=device)
        model(tokens, tokens).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()


def auto_device_batch_size(
    model: nn.Module, rows: int, seq_len: int, dtype: torch.dtype | None = None, below: int | None = None
) -> int:
    """
    Returns the largest micro-batch that fits this device, for --device-batch-size=auto. The result is the same on all
    ranks. Raises UserError if not even one row fits.

    - model: a gpt.GPT that is not compiled. Its gradients are dropped.
    - rows: the number of rows of a device in a step, of which the size is a divisor
    - below: the size must be smaller than this number

    On a CPU nothing is tried, because the process would be killed if memory ran out. There the result is at most 32
    rows, nanochat's default, that take no more than a quarter of the memory by estimate.
    """
    device, config = model.get_device(), model.config
    if device.type == "cuda":
        free, total = gpu_memory(device)
        taken_by_others = total - free - torch.cuda.memory_reserved(device)
        budget = int(SHARE * (total - taken_by_others) - optimizer_bytes(model))

        def peak_bytes(size: int) -> int:
            torch.cuda.reset_peak_memory_stats(device)
            in_update = torch.cuda.memory_allocated(device) + update_bytes(model)
            try:
                try_micro_batch(model, size, seq_len, dtype)
                return max(torch.cuda.max_memory_allocated(device), in_update)
            finally:
                model.zero_grad(set_to_none=True)

        size = largest_micro_batch(rows, peak_bytes, budget, below=below) or 0
    else:
        budget = physical_memory() // 4
        row_bytes = 4 * seq_len * (40 * config.n_layer * config.n_embd + 4 * config.vocab_size)
        candidates = [n for n in range(1, min(rows, 32) + 1) if rows % n == 0 and (below is None or n < below)]
        size = max((n for n in candidates if n == 1 or n * row_bytes <= budget), default=0)
    if is_ddp_initialized():
        smallest = torch.tensor(size, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        size = int(smallest)
    lever = memory_lever(model, max(size, 1), seq_len)
    if size == 0:
        raise UserError(
            f"not even one row fits into the {format_bytes(budget)} that are left for it; "
            f"{lever or 'lower --max-seq-len or --depth, or use a device with more memory'}"
        )
    if device.type == "cuda" and lever:
        print0(f"micro-batch: {size} rows of {seq_len} tokens; by count, {lever}")
    return size


def memory_lever(model: nn.Module, rows: int, seq_len: int) -> str:
    """Returns next_lever of a GPT in its present state, or "" for models whose memory is not counted."""
    return next_lever(model, rows, state_now(model), seq_len) if isinstance(model, GPT) else ""


def state_now(model: nn.Module) -> str:
    """Returns the --state of the model's weights."""
    return "lean" if any(map(is_lean, model.transformer.h.parameters())) else "fp32"
