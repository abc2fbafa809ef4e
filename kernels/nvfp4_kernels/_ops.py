"""Registration of the kernels as torch operators of the namespace nvfp4.

`torch.library.custom_op` would do, but checks and wraps every call for 30 to 50 microseconds; a layer makes eight
of them per step. Here the schema is written by hand and the function is the operator's only kernel.
"""

from collections.abc import Callable

import torch

# For every launch: a fused multiply-add rounds once where the reference rounds twice.
NO_FUSION = {"enable_fp_fusion": False}


def is_captured(device: torch.device | str = "cuda") -> bool:
    """Whether the device's current stream records a CUDA graph: what is launched then does not run."""
    gpu = torch.device(device).type == "cuda" and torch.cuda.is_available()
    return gpu and torch.cuda.is_current_stream_capturing()


def empty_scales(rows: int, groups: int, tiles: bool, like: torch.Tensor) -> torch.Tensor:
    """Memory for E4M3 scales, uint8 (R, G), or flat for tiles of 128x4. Padding is 0: NaN there would be read."""
    if not tiles:
        return like.new_empty(rows, groups, dtype=torch.uint8)
    size = -(-rows // 128) * -(-groups // 4) * 512
    return (like.new_zeros if rows % 128 or groups % 4 else like.new_empty)(size, dtype=torch.uint8)


_library = torch.library.Library("nvfp4", "FRAGMENT")


def operator(schema: str) -> Callable[[Callable], Callable]:
    """Decorator: registers the function for CUDA (and CPU, for Triton's interpreter) under the schema's name.

    The result is the operator, with `.register_fake`. An operator may not return an input or a view of one.
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
