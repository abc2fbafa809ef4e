"""The reference on a CPU, left out of torch.compile's graphs: imported where one is made, since it needs the compiler.

Many small operations: to compile two layers takes a C++ compiler minutes. What is around them is compiled as always.
"""

import torch


@torch.compiler.disable(
    reason="the 4-bit reference on a CPU would take minutes to compile; NVFP4_COMPILE=1 compiles it all the same"
)
def compute(layer, x: torch.Tensor, layers: tuple) -> torch.Tensor:
    return layer._compute(x, layers)
