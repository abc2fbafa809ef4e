"""Operands of which several processes have a part each: rounded as the whole would be.

What a part needs to know of the others is the largest magnitude of the whole, and where in it its own rows and columns
are: which random numbers they draw. And what all that is divided among processes has in common: local parts and
collectives.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist


class Part(NamedTuple):
    """Where an operand (R, C) is in the one that the processes of a group have together.

    group:       its name
    row, column: of the first element there, multiples of 16
    columns:     of the whole; 0: as many as here
    """

    group: str
    row: int = 0
    column: int = 0
    columns: int = 0

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest of the processes' amaxes, non-negative numbers: float32, of amax's shape."""
        return _largest(amax.float(), self.group)


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The part of a DTensor that this process has; of other tensors, all."""
    return getattr(tensor, "_local_tensor", tensor)


# torch 2.13 gave these two new names; the old ones warn there, the new ones do not exist before. Looked up at each
# call, so that communication.counted sees them.


def all_gather(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, source, **kwargs)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, source, **kwargs)


def process_group(name: str) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


@torch.library.custom_op("nanochat_fp4::largest", mutates_args=())
def _largest(amax: torch.Tensor, group: str) -> torch.Tensor:
    """As the bits of a float32: of non-negative numbers their order is that of the numbers, NaN on top."""
    bits = amax.clone().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=process_group(group))
    return bits.view(torch.float32)


@_largest.register_fake
def _(amax: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(amax)
