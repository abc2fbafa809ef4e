"""The bytes that processes send one another: counted, and predicted.

    with counted() as sent:         # {"all_gather": bytes, ...} that this process sends
        step()

A collective sends what its ring algorithm has each process send, of W: an all-gather W - 1 times its own part, a
reduce-scatter and an all-to-all (W - 1) / W of their input, an all-reduce twice that.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

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


# ----------------------------------------------------------------------------------------------------------------------
# The cost model: docs/scale.md

MODES = ("ddp", "fsdp_bf16", "fsdp_codes")
CODE_BYTES = 4.5 / 8  # of an element: E2M1 codes and an E4M3 scale for 16
NVLINK = 450e9  # bytes a second that an H200 sends to the GPUs of its host
NETWORK = 400e9 / 8  # and its share of what the host sends to others: 400 Gb/s for each GPU
GPUS_OF_A_HOST = 8
CLOVER_FLOPS = 463e12  # a second that an H200 trained d26 with (clover: 71,172 tokens/s; docs/results.md)


@dataclass(frozen=True)
class Sizes:
    """What of a GPT is communicated: its matrices in blocks, {shape: how many}; elements of head, embedding, vectors;
    bytes of an element of head and embedding where they are gathered (and of activations), and of the embedding's own;
    layers and width."""

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
        """nanochat's GPT: four square matrices a layer and two of an MLP of four times the width."""
        matrices = {(width, width): 4 * layers, (4 * width, width): layers, (width, 4 * width): layers}
        return cls(matrices, vocab_size * width, vocab_size * width, 2 * layers, layers=layers, width=width)

    @property
    def blocks(self) -> int:
        return sum(rows * columns * count for (rows, columns), count in self.matrices.items())

    def muon(self, world_size: int) -> int:
        """Elements of the blocks as Muon deals them: whole matrices of a shape, as many to each rank."""
        padded = {s: -(-count // world_size) * world_size for s, count in self.matrices.items()}
        return sum(rows * columns * padded[rows, columns] for rows, columns in padded)


def predicted_bytes(sizes: Sizes, mode: str, world_size: int, micro_batches: int) -> float:
    """What each of world_size processes sends in a step of so many micro-batches of its own."""
    if world_size == 1:
        return 0.0

    def sent(kind: str, nbytes: float) -> float:
        return bytes_sent(kind, nbytes, world_size)

    muon, own = 4 * sizes.muon(world_size), sizes.embedding_bytes
    whole = sent("all_reduce", 4 * sizes.vectors)
    if mode == "ddp":  # gradients to their owners, updated weights to all, once
        table = 4 * sizes.head + own * sizes.embedding
        return sent("reduce_scatter", muon + table) + sent("all_gather", (muon + table) / world_size) + whole
    element = CODE_BYTES if mode == "fsdp_codes" else sizes.gathered_bytes
    ends = sizes.gathered_bytes * sizes.head + min(sizes.gathered_bytes, own) * sizes.embedding
    gathers = sent("all_gather", (2 * element * sizes.blocks + ends) / world_size)  # blocks forward and backward
    gradients = sent("reduce_scatter", 4 * (sizes.blocks + sizes.head + sizes.embedding))
    amaxes = 4 * sum(sizes.matrices.values()) if mode == "fsdp_codes" else 0
    update = 3 * sent("all_to_all", muon / world_size) + whole + sent("all_reduce", 4 + amaxes)
    return micro_batches * (gathers + gradients) + update


# Largest magnitudes that the processes of a divided block reduce, with clover: in a micro-batch of the inputs of its
# four products (q, k, v are one), of grad_output twice in the two column-parallel ones, of the weights for dgrad, and
# of the two row-parallel ones' inputs for wgrad; in a step, of the weights.
AMAXES, AMAXES_OF_WEIGHTS = 4 + 4 + 4 + 2, 4


def predicted_tensor_parallel_bytes(
    sizes: Sizes, world_size: int, micro_batches: int, tokens: int, divided: int = 2, codes: bool = True
) -> tuple[float, float]:
    """What each process sends in a step, (in its group of `divided` processes, to update the weights): micro-batches of
    so many tokens for each group. codes: the method is clover; else bf16.

    In each layer two inputs are gathered, as codes or in the activations' dtype, and two gradients; two outputs and
    two gradients are added up and scattered.
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
    """Weights, gradients and moments of a process: FP32, but for the embedding; Muon has one moment, AdamW two."""
    if divided > 1:
        blocks = 2 * 4 * sizes.blocks * (1 - 1 / divided)
        return state_bytes(sizes, "ddp", world_size) - blocks
    blocks, head, embedding = 4 * sizes.blocks, 4 * sizes.head, sizes.embedding_bytes * sizes.embedding
    moments = 4 * sizes.muon(world_size) + 2 * (head + embedding)
    here = 2 * (blocks + head + embedding)
    return (here if mode == "ddp" else here / world_size) + moments / world_size


EXPOSED = 150e9  # bytes a second where nothing is computed meanwhile, and parts are small: tensor parallelism, measured
SMALL_REDUCTION = 20e-6  # seconds of an all-reduce of one or two numbers between GPUs of a host: assumed
REDUCTIONS = 4 + 2 + 4 + 2  # of AMAXES: kernels find the two of grad_output together
BF16_TIME = 0.84  # of clover's, d26, as it was measured when this was predicted


def tensor_parallel_prediction(
    layers: int, width: int, world_size: int, rows: int, codes: bool = True, seq_len: int = 2048, divided: int = 2
) -> dict[str, float]:
    """As prediction, within a host; and the seconds of small reductions, and tokens a second of all GPUs."""
    sizes, tokens = Sizes.of_shape(layers, width), 2**19
    micro_batches = tokens * divided // (world_size * rows * seq_len)
    step = world_size, micro_batches, rows * seq_len, divided, codes
    sent = sum(predicted_tensor_parallel_bytes(sizes, *step))
    computing = prediction(layers, width, world_size, 1, seq_len)["ddp"]["computing"]
    computing *= 1 if codes else BF16_TIME
    small = codes * micro_batches * layers * REDUCTIONS * SMALL_REDUCTION
    speed = tokens / (computing + sent / EXPOSED + small)
    held = state_bytes(sizes, "ddp", world_size, divided) / 2**30
    return {
        "GB": sent / 1e9, "sending": sent / EXPOSED, "small": small, "computing": computing, "tokens/s": speed,
        "GiB": held,
    }  # fmt: skip


def prediction(layers: int, width: int, world_size: int, rows: int, seq_len: int = 2048) -> dict[str, dict[str, float]]:
    """For each mode: gigabytes that a GPU sends in a step, and its seconds for sending and for computing.

    A step is of 2^19 tokens, or of one micro-batch of `rows` for each GPU if that is more.
    """
    sizes = Sizes.of_shape(layers, width)
    tokens = max(2**19, world_size * rows * seq_len)
    micro_batches = tokens // (world_size * rows * seq_len)
    flops = 6 * (sizes.blocks + sizes.head) + 12 * width * layers * seq_len * 5 // 8  # windows of SSSL
    speed = NVLINK if world_size <= GPUS_OF_A_HOST else NETWORK
    result = {}
    for mode in MODES:
        sent = predicted_bytes(sizes, mode, world_size, micro_batches)
        computing = flops * tokens / world_size / CLOVER_FLOPS
        held = state_bytes(sizes, mode, world_size) / 2**30
        result[mode] = {"GB": sent / 1e9, "sending": sent / speed, "computing": computing, "GiB": held}
    return result
