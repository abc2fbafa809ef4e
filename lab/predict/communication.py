"""Counts and predicts the bytes that processes send to one another.

    with counted() as sent:         # {"all_gather": bytes, ...} that this process sends
        step()

Collectives are counted as rings of W processes. In an all-gather a process sends its own part W - 1 times. In a
reduce-scatter and an all-to-all it sends (W - 1) / W of its input, in an all-reduce twice as much.
"""

import contextlib
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
# The cost model: docs/scale.md

MODES = ("ddp", "fsdp_bf16", "fsdp_codes")
CODE_BYTES = 4.5 / 8  # bytes per element: an E2M1 code, and an E4M3 scale for 16
NVLINK = 450e9  # bytes/s from an H200 to the GPUs of its host
NETWORK = 400e9 / 8  # bytes/s between hosts: 400 Gb/s for each GPU
GPUS_OF_A_HOST = 8
CLOVER_FLOPS = 463e12  # FLOP/s of d26 with clover on an H200 (71,172 tokens/s; docs/results.md)


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
    layers: int = 0
    width: int = 0

    @classmethod
    def of(cls, model: nn.Module) -> "Sizes":
        matrices = Counter(tuple(p.shape) for p in model.transformer.h.parameters() if p.ndim == 2)
        embedding = model.transformer.wte.weight
        vectors = sum(p.numel() for p in model.parameters() if p.ndim < 2)
        gathered = 2 if model.get_device().type == "cuda" else 4
        head = model.lm_head.weight.numel()
        shape = len(model.transformer.h), embedding.shape[1]
        return cls(dict(matrices), head, embedding.numel(), vectors, gathered, embedding.element_size(), *shape)

    @classmethod
    def of_shape(cls, layers: int, width: int, vocab_size: int = 65536) -> "Sizes":
        """nanochat's GPT. A layer has four square matrices, and two of an MLP four times as wide."""
        matrices = {(width, width): 4 * layers, (4 * width, width): layers, (width, 4 * width): layers}
        return cls(matrices, vocab_size * width, vocab_size * width, 2 * layers, layers=layers, width=width)

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


# Amaxes that the processes of a divided block reduce with clover. The block has four products (q, k, v are one). In a
# micro-batch: 4 inputs, 2 grad_outputs of column-parallel products twice each, 4 weights for dgrad, 2 inputs of
# row-parallel products for wgrad. In a step: 4 weights.
AMAXES, AMAXES_OF_WEIGHTS = 4 + 4 + 4 + 2, 4


def predicted_tensor_parallel_bytes(
    sizes: Sizes, world_size: int, micro_batches: int, tokens: int, divided: int, codes: bool
) -> tuple[float, float]:
    """Bytes that each process sends in a step: (in its group of `divided` processes, to update the weights).

    tokens: of a micro-batch of a group
    codes:  the method is clover, otherwise bf16

    A layer gathers two inputs (as codes, or in the activations' dtype) and two gradients. It reduces and scatters two
    outputs and two gradients.
    """
    if world_size == 1:
        return 0.0, 0.0
    activation = sizes.gathered_bytes
    element = CODE_BYTES if codes else activation
    inputs = bytes_sent("all_gather", 2 * (element + activation) * tokens * sizes.width / divided, divided)
    outputs = bytes_sent("reduce_scatter", 4 * activation * tokens * sizes.width, divided)
    amaxes = codes * sizes.layers * 4 * (micro_batches * AMAXES + AMAXES_OF_WEIGHTS)
    norm = 4
    table = 4 * sizes.head + sizes.embedding_bytes * sizes.embedding
    update = (
        3 * bytes_sent("all_to_all", 4 * sizes.muon(world_size) / divided, world_size)
        + bytes_sent("reduce_scatter", table, world_size)
        + bytes_sent("all_gather", table / world_size, world_size)
        + bytes_sent("all_reduce", 4 * sizes.vectors, world_size)
    )
    group = micro_batches * sizes.layers * (inputs + outputs) + bytes_sent("all_reduce", amaxes + norm, divided)
    return group, update


def state_bytes(sizes: Sizes, mode: str, world_size: int, divided: int = 1) -> float:
    """Bytes of a process's weights, gradients and moments. All but the embedding are FP32. Muon has one moment, AdamW
    two."""
    if divided > 1:
        blocks = 2 * 4 * sizes.blocks * (1 - 1 / divided)
        return state_bytes(sizes, "ddp", world_size) - blocks
    blocks, head, embedding = 4 * sizes.blocks, 4 * sizes.head, sizes.embedding_bytes * sizes.embedding
    moments = 4 * sizes.muon(world_size) + 2 * (head + embedding)
    here = 2 * (blocks + head + embedding)
    return (here if mode == "ddp" else here / world_size) + moments / world_size


EXPOSED = 150e9  # bytes/s of tensor parallelism: small parts, no computation meanwhile (measured)
SMALL_REDUCTION = 20e-6  # seconds of an all-reduce of one or two numbers in a host (assumed)
REDUCTIONS = 4 + 2 + 4 + 2  # all-reduces of AMAXES: a kernel finds both amaxes of a grad_output
SEQ_LEN = 2048
BF16_TIME = 0.84  # BF16's time over clover's, d26, as measured when this was predicted


def tensor_parallel_prediction(layers: int, width: int, world_size: int, rows: int, codes: bool) -> dict[str, float]:
    """`prediction` in a host, with the seconds of small reductions and the tokens/s of all GPUs."""
    sizes, tokens, divided = Sizes.of_shape(layers, width), 2**19, 2
    micro_batches = tokens * divided // (world_size * rows * SEQ_LEN)
    step = world_size, micro_batches, rows * SEQ_LEN, divided, codes
    sent = sum(predicted_tensor_parallel_bytes(sizes, *step))
    computing = prediction(layers, width, world_size, 1)["ddp"]["computing"]
    computing *= 1 if codes else BF16_TIME
    small = codes * micro_batches * layers * REDUCTIONS * SMALL_REDUCTION
    speed = tokens / (computing + sent / EXPOSED + small)
    held = state_bytes(sizes, "ddp", world_size, divided) / 2**30
    return {
        "GB": sent / 1e9, "sending": sent / EXPOSED, "small": small, "computing": computing, "tokens/s": speed,
        "GiB": held,
    }  # fmt: skip


def prediction(layers: int, width: int, world_size: int, rows: int) -> dict[str, dict[str, float]]:
    """For each mode the gigabytes that a GPU sends in a step, and its seconds of sending and of computing.

    A step has 2^19 tokens, or one micro-batch of `rows` for each GPU if these are more.
    """
    sizes = Sizes.of_shape(layers, width)
    tokens = max(2**19, world_size * rows * SEQ_LEN)
    micro_batches = tokens // (world_size * rows * SEQ_LEN)
    flops = 6 * (sizes.blocks + sizes.head) + 12 * width * layers * SEQ_LEN * 5 // 8  # windows of SSSL
    speed = NVLINK if world_size <= GPUS_OF_A_HOST else NETWORK
    result = {}
    for mode in MODES:
        sent = predicted_bytes(sizes, mode, world_size, micro_batches)
        computing = flops * tokens / world_size / CLOVER_FLOPS
        held = state_bytes(sizes, mode, world_size) / 2**30
        result[mode] = {"GB": sent / 1e9, "sending": sent / speed, "computing": computing, "GiB": held}
    return result
