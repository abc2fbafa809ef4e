"""Measurements of a GPU's memory and time."""

import statistics
import sys
from collections.abc import Callable

import torch

from nanochat_fp4.hardware import available_memory

# These cycles take at least 20 ms. During this time the longest operator here can be launched some twenty times.
HOST_AHEAD_CYCLES = 40_000_000


def gpu_memory(device: torch.device | None = None) -> tuple[int, int]:
    """Returns the free and the total bytes of a GPU. An integrated GPU (GB10) counts the page cache as used. Linux
    gives the page cache up if memory is needed, so it is counted as free here."""
    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        free = min(total, max(free, available_memory()))
    return free, total


def median_ms(function: Callable[[], object], repeats: int = 20) -> float:
    """Returns the median GPU time of a call in milliseconds, measured with events.

    The GPU waits until all calls are queued. Otherwise the result for a call with short kernels would be the time of
    their launches.
    """
    for _ in range(3):  # The first calls compile kernels.
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    torch.cuda._sleep(HOST_AHEAD_CYCLES)
    for start, end in events:
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def peak_memory(device: torch.device) -> int:
    """Returns the peak bytes of CUDA's allocator, or without a GPU those of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # Windows does not have this module.

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
