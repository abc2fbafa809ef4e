"""The bytes that processes send one another: counted, and predicted.

    with counted() as sent:         # {"all_gather": bytes, ...} that this process sends
        step()

A collective sends what its ring algorithm has each process send, of W: an all-gather W - 1 times its own part, a
reduce-scatter and an all-to-all (W - 1) / W of their input, an all-reduce twice that.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

# What torch.distributed calls them: torch 2.13 gave some new names. (kind, which argument is the input, its keyword)
_COLLECTIVES = {
    "all_gather_into_tensor": ("all_gather", 1, "input_tensor"),
    "all_gather_single": ("all_gather", 1, "input_tensor"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "all_reduce": ("all_reduce", 0, "tensor"),
}


def bytes_sent(kind: str, nbytes: float, world_size: int) -> float:
    """What each of world_size processes sends in a collective whose input, on each, is nbytes."""
    share = (world_size - 1) / world_size
    return {"all_gather": world_size, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[kind] * share * nbytes


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Inside, what this process sends is added up, by kind of collective: FSDP's, the optimizers', the amaxes'. Objects
    (checkpoints, errors) and whoever imported a collective by its name are not seen."""
    sent: Counter[str] = Counter()
    functions = {name: getattr(dist, name) for name in _COLLECTIVES if hasattr(dist, name)}

    def counting(name: str, function: Callable) -> Callable:
        kind, position, keyword = _COLLECTIVES[name]

        def collective(*args: Any, **kwargs: Any) -> Any:
            tensor: torch.Tensor = kwargs[keyword] if keyword in kwargs else args[position]
            sent[kind] += bytes_sent(kind, tensor.nbytes, dist.get_world_size(kwargs.get("group")))
            return function(*args, **kwargs)

        return collective

    try:
        for name, function in functions.items():
            setattr(dist, name, counting(name, function))
        yield sent
    finally:
        for name, function in functions.items():
            setattr(dist, name, function)
