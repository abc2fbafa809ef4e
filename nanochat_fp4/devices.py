"""Memory and time of a GPU, measured."""

import statistics
import sys
from collections.abc import Callable

import torch

from nanochat_fp4.hardware import available_memory

HOST_AHEAD_CYCLES = 40_000_000  # At least 20 ms, in which the longest operator here is launched some twenty times.


def gpu_memory(device: torch.device | None = None) -> tuple[int, int]:
    """(free, total) bytes of a GPU. An integrated one (GB10) counts the page cache as used, which Linux gives up."""
    free, total = torch.cuda.mem_get_info(device)
    if torch.cuda.get_device_properties(device).is_integrated:
        free = min(total, max(free, available_memory()))
    return free, total


def median_ms(function: Callable[[], object], repeats: int = 20, warm_up: int = 3) -> float:
    """Median GPU time of a call in milliseconds, by events.

    The GPU waits until all calls are queued. Otherwise a call with short kernels would show the time of its launches.
    """
    for _ in range(warm_up):
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
    """Peak bytes of CUDA's allocator, or of this process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
