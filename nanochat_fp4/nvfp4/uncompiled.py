"""The reference on a CPU, left out of torch.compile's graphs. Imported only to compile, since it needs the compiler.

A C++ compiler takes minutes for the many small operations of two layers. Code around the layers is compiled as always.
"""

import torch


@torch.compiler.disable(
    reason="the 4-bit reference on a CPU would take minutes to compile; NVFP4_COMPILE=1 compiles it all the same"
)
def compute(layer, x: torch.Tensor, layers: tuple) -> torch.Tensor:
    return layer._compute(x, layers)
