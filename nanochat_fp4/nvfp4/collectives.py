"""What processes exchange, under names that all supported releases of torch have, and their part of a DTensor."""

from typing import Any

import torch
import torch.distributed as dist


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The part of a DTensor that this process has; of other tensors, all."""
    return getattr(tensor, "_local_tensor", tensor)


# torch 2.13 renamed these two functions. The old names warn there, and the new names do not exist before. Each call
# looks the name up, so that communication.counted sees the call.


def all_gather(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, source, **kwargs)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, source, **kwargs)


def process_group(name: str) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)
