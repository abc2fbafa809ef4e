"""Counts the bytes that processes send to one another, beside those that follow from the sizes of a model.

    with counted() as sent:         # {"all_gather": bytes, ...} that this process sends
        step()

Collectives are counted as rings of W processes. In an all-gather a process sends its own part W - 1 times. In a
reduce-scatter and an all-to-all it sends (W - 1) / W of its input, in an all-reduce twice as much.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Names in torch.distributed -> (kind, position of the input, its keyword). torch 2.13 renamed some.
_COLLECTIVES = {
    "all_gather_into_tensor": ("all_gather", 1, "input_tensor"),
    "all_gather_single": ("all_gather", 1, "input_tensor"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "all_reduce": ("all_reduce", 0, "tensor"),
}


def bytes_sent(kind: str, nbytes: float, world_size: int) -> float:
    """Bytes that each process sends in a collective. nbytes: the input of each process."""
    share = (world_size - 1) / world_size
    return {"all_gather": world_size, "reduce_scatter": 1, "all_to_all": 1, "all_reduce": 2}[kind] * share * nbytes


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Adds up the bytes that this process sends, by kind of collective.

    Not counted: collectives of objects (checkpoints, errors), and calls of a collective that was imported by name.
    """
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


# ----------------------------------------------------------------------------------------------------------------------
# What follows from the sizes

CODE_BYTES = 4.5 / 8  # bytes per element: an E2M1 code, and an E4M3 scale for 16


@dataclass(frozen=True)
class Sizes:
    """The parts of a GPT that processes send.

    matrices:                 of the blocks, {shape: number}
    head, embedding, vectors: elements
    gathered_bytes:           per element of a gathered head or embedding, and of activations
    embedding_bytes:          per element of the stored embedding
    """

    matrices: dict[tuple[int, int], int]
    head: int
    embedding: int
    vectors: int
    gathered_bytes: int = 2
    embedding_bytes: int = 2

    @classmethod
    def of(cls, model: nn.Module) -> "Sizes":
        matrices = Counter(tuple(p.shape) for p in model.transformer.h.parameters() if p.ndim == 2)
        embedding = model.transformer.wte.weight
        vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
        gathered = 2 if model.get_device().type == "cuda" else 4
        head = model.lm_head.weight.numel()
        return cls(dict(matrices), head, embedding.numel(), vectors, gathered, embedding.element_size())

    @property
    def blocks(self) -> int:
        return sum(rows * columns * count for (rows, columns), count in self.matrices.items())

    def muon(self, world_size: int) -> int:
        """Elements of the blocks, padded. Muon gives each rank the same number of whole matrices of a shape."""
        padded = {s: -(-count // world_size) * world_size for s, count in self.matrices.items()}
        return sum(rows * columns * padded[rows, columns] for rows, columns in padded)


def predicted_bytes(sizes: Sizes, mode: str, world_size: int, micro_batches: int) -> float:
    """Bytes that each process sends in a step. micro_batches: of each process."""
    if world_size == 1:
        return 0.0

    def sent(kind: str, nbytes: float) -> float:
        return bytes_sent(kind, nbytes, world_size)

    muon, own = 4 * sizes.muon(world_size), sizes.embedding_bytes
    whole = sent("all_reduce", 4 * sizes.vectors)
    if mode == "ddp":  # Gradients go to their owners, updated weights to all.
        table = 4 * sizes.head + own * sizes.embedding
        return sent("reduce_scatter", muon + table) + sent("all_gather", (muon + table) / world_size) + whole
    element = CODE_BYTES if mode == "fsdp_codes" else sizes.gathered_bytes
    ends = sizes.gathered_bytes * sizes.head + min(sizes.gathered_bytes, own) * sizes.embedding
    gathers = sent("all_gather", (2 * element * sizes.blocks + ends) / world_size)  # blocks forward and backward
    gradients = sent("reduce_scatter", 4 * (sizes.blocks + sizes.head + sizes.embedding))
    amaxes = 4 * sum(sizes.matrices.values()) if mode == "fsdp_codes" else 0
    update = 3 * sent("all_to_all", muon / world_size) + whole + sent("all_reduce", 4 + amaxes)
    return micro_batches * (gathers + gradients) + update


# ----------------------------------------------------------------------------------------------------------------------
# A step whose bytes are counted


def write_counted_step(
    path: str, *, method: str, mode: str, gather: str = "codes", depth: int, width: int, head_dim: int,
    rows: int, length: int = 32, total: int = 128, vocabulary: int = 256,
) -> None:  # fmt: skip
    """Trains nanochat's GPT for two steps of made-up tokens in this process group, and appends a JSON line of the
    second one to `path`: mode, micro_batches, loss, state_gib, sent and sent_bytes, predicted_bytes.

    mode: "ddp" or "fsdp"
    """
    import nanochat_fp4 as nf
    from lab.bench.parallel import shard_weights
    from nanochat_fp4.common import compute_cleanup, compute_init
    from nanochat_fp4.models.gpt import GPT, GPTConfig
    from nanochat_fp4.models.optim import PretrainingOptions
    from nanochat_fp4.nvfp4.collectives import local
    from nanochat_fp4.parallel import shard
    from nanochat_fp4.training.step import TrainingStep

    _, rank, _, world_size, device = compute_init("cpu")
    heads = width // head_dim
    with torch.device("meta"):
        model = GPT(GPTConfig(length, vocabulary, depth, heads, heads, width))
    model.to_empty(device=device)
    model.init_weights()
    nf.convert(model, method, verbose=False)
    name = mode
    if mode == "fsdp":
        name = "fsdp_codes" if (shard if gather == "codes" else shard_weights)(model, None) else "fsdp_bf16"
    optimizers, schedule = model.setup_pretraining(PretrainingOptions(), total, 1000)
    schedule(500, 0.5)
    step = TrainingStep(model, optimizers, model)
    micro_batches = total // (rows * length * world_size)
    ids = torch.randint(vocabulary, (rows, length + 1), device=device)
    torch.manual_seed(rank)  # noise of its own
    for _ in range(2):  # the first makes the codes
        with counted() as sent:
            with step.micro_batches(micro_batches):
                for _ in range(micro_batches):
                    loss = step.micro_batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), count=micro_batches)
            step.model.clip_gradients()
            step.update()
    predicted = predicted_bytes(Sizes.of(model), name, world_size, micro_batches)
    states = (t for o in optimizers for s in o.state.values() for t in s.values())
    held = sum(2 * local(p).nbytes for p in model.parameters()) + sum(t.nbytes for t in states if torch.is_tensor(t))
    row = {"mode": name, "micro_batches": micro_batches, "loss": float(loss), "state_gib": held / 2**30}
    row |= {"sent": dict(sent), "sent_bytes": sum(sent.values()), "predicted_bytes": predicted}
    compute_cleanup()
    if rank == 0:
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
