"""In the place of a CUDA graph on a CPU: operators are recorded, and computed again."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorded(TorchDispatchMode):
    """In the place of a CUDA graph: records operators, and computes them again into the memory of their results."""

    def __enter__(self):
        self.calls, self.before, self.generator, self.replays = [], [], torch.get_rng_state(), 0
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        torch.set_rng_state(self.generator)  # a capture computes nothing
        for changed, before in reversed(self.before):
            changed.copy_(before)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for argument, given in zip(function._schema.arguments, args):
            if argument.is_write and isinstance(given, torch.Tensor):
                self.before.append((given, given.clone()))
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for function, args, kwargs, result in self.calls:
            for made, now in zip(tree_leaves(result), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(made, torch.Tensor) and made.data_ptr() != now.data_ptr():
                    made.copy_(now)

    def pool(self):
        return None


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """From now on CUDA's graphs are recorded operators. Returns the list that the graphs are put into."""
    made: list[Recorded] = []

    def graph() -> Recorded:
        made.append(Recorded())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    return made
