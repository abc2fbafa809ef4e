"""Collective operations under names that work in all supported releases of torch, and what a tensor is in memory: the
local part of a DTensor, and the version of a weight."""

from typing import Any

import torch
import torch.distributed as dist


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the part of a DTensor that this process has. Any other tensor is returned as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def version_of(weight: torch.Tensor) -> tuple[int, int]:
    """Returns PyTorch's version counter of the weight and the address of its memory. A weight with the same two numbers
    has not changed.

    There are two exceptions. PyTorch does not count changes of an inference tensor, nor changes through `.data`.
    """
    weight = local(weight)
    changes = 0 if weight.is_inference() else weight._version
    return changes, 0 if weight.is_meta else weight.untyped_storage().data_ptr()


# torch 2.13 renamed these two functions. The old names give a warning there, and older releases do not have the new
# names. The name is looked up in each call, so that the tests can replace the functions and count the calls.


def all_gather(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, source, **kwargs)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, source, **kwargs)
