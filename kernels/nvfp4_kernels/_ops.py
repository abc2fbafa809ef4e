"""Registers the kernels as torch operators of the namespace nvfp4.

`torch.library.custom_op` would do the same, but it checks and wraps each call, which takes 30 to 50 microseconds, and a
layer makes eight calls in each step. Here the schema is written by hand, and the function is the operator's only
kernel.
"""

from collections.abc import Callable

import torch

# Options of every launch. A fused multiply-add would round once where the reference rounds twice.
NO_FUSION = {"enable_fp_fusion": False}


def is_captured(device: torch.device | str = "cuda") -> bool:
    """Returns True while the device's current stream records a CUDA graph. A kernel that is launched at that time is
    recorded, and does not run."""
    gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return gpu and torch.cuda.is_current_stream_capturing()


def empty_scales(rows: int, groups: int, tiles: bool, like: torch.Tensor) -> torch.Tensor:
    """Allocates memory for E4M3 scales: uint8 (R, G), or flat for tiles of 128x4. The padding of tiles is filled with
    zeros, because a GEMM reads it, and uninitialized bytes may be NaN."""
    if not tiles:
        return like.new_empty(rows, groups, dtype=torch.uint8)
    size = -(-rows // 128) * -(-groups // 4) * 512
    return (like.new_zeros if rows % 128 or groups % 4 else like.new_empty)(size, dtype=torch.uint8)


_library = torch.library.Library("nvfp4", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable], Callable]:
    """A decorator that registers the function under the schema's name, for CUDA, and for the CPU, on which Triton's
    interpreter runs.

    The result calls the operator and has the method `.register_fake`. An operator must not return an input or a view of
    one.
    """

    def register(function: Callable) -> Callable:
        name = _library.define(schema)
        for key in ("CUDA", "CPU"):
            _library.impl(name.split("::")[-1], function, key)
        op = getattr(torch.ops.nvfp4, name.split("::")[-1]).default

        def call(*args):
            return op(*args)

        call.__doc__, call.__name__ = function.__doc__, function.__name__
        call.register_fake = lambda fake: torch.library.register_fake(f"nvfp4::{call.__name__}", fake, lib=_library)
        return call

    return register
