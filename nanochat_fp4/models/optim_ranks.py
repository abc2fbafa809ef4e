"""
How the ranks share the optimizers' work: who owns what, and what is sent when.

Matrices that every rank has whole (MatrixOwners). Each rank owns some matrices of a shape. A reduce-scatter adds up the
gradients of a matrix on its owner, and an all-gather sends the updated matrices to everybody: ZeRO-2.

    rank 0   g0 g1 g2 g3              g0+g0'  g1+g1'   -> update ->   w0 w1           w0 w1 w2 w3
    rank 1   g0'g1'g2'g3'  scatter            g2+g2' g3+g3'                 w2 w3  gather  w0 w1 w2 w3

Matrices of which each rank has a shard, by FSDP (ShardOwners). Muon needs whole matrices. Each
rank receives all shards of its own matrices, gradients and weights, and sends the updated shards back, in three
all-to-alls. Gradients that FSDP has sharded come averaged.

AdamW works on rows. Each rank owns some rows of a parameter, or all rows of its own shard.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat_fp4.nvfp4.collectives import all_gather, local, reduce_scatter
from nanochat_fp4.parallel import is_sharded


def rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def matrices_of_a_rank(count: int, world_size: int) -> int:
    """How many of `count` matrices a rank owns. Rank r's begin at r times this number; the last own fewer or none."""
    return -(-count // world_size)


# ----------------------------------------------------------------------------------------------------------------------
# Whole matrices to their owners and back


def owners_of(params: list[Tensor], rank: int, world_size: int) -> "MatrixOwners":
    """The object that brings matrices of one shape to their owners and back, in one step of the optimizer."""
    return (ShardOwners if is_sharded(params[0]) else MatrixOwners)(params, rank, world_size)


class MatrixOwners:
    """
    Matrices of one shape in one step of the optimizer. The methods are called in the order in which they stand here;
    between two of them, data of other shapes are on the way.

    own: the parameters that this rank owns.
    """

    def __init__(self, params: list[Tensor], rank: int, world_size: int):
        self.params, self.world_size = params, world_size
        self.count = matrices_of_a_rank(len(params), world_size)
        self.own = params[rank * self.count : (rank + 1) * self.count]
        self.work: Any = None  # what is on the way
        self.received = torch.empty(0)

    def send_gradients(self, grads: list[Tensor]) -> None:
        stack = self._padded(torch.stack(grads))
        self.received = torch.empty_like(stack[: self.count])
        self.work = reduce_scatter(self.received, stack, async_op=True)

    def gradients_and_weights(self) -> tuple[Tensor, Tensor]:
        """The averaged gradients (count, M, N) and the weights (len(own), M, N) of the own matrices.

        The caller may change both.
        """
        self.work.wait()
        grads = self.received
        grads /= self.world_size
        return grads, torch.stack(self.own) if self.own else grads[:0]

    def send_weights(self, stack: Tensor) -> None:
        """stack: the own matrices after the update, (len(own), M, N)."""
        padded = torch.cat((stack, stack.new_zeros(self.count - len(self.own), *stack.shape[1:])))
        self.received = padded.new_empty(self.count * self.world_size, *padded.shape[1:])
        self.work = all_gather(self.received, padded, async_op=True)

    def write_weights(self) -> None:
        """Writes what all owners have sent into the parameters."""
        if self.work is not None:
            self.work.wait()
        params = [local(p) for p in self.params]
        torch._foreach_copy_(params, [new.view(p.shape) for p, new in zip(params, self.received)])

    def _padded(self, stack: Tensor) -> Tensor:
        """The stack, followed by zeros for the matrices that the last ranks lack."""
        missing = self.count * self.world_size - len(stack)
        return torch.cat((stack, stack.new_zeros(missing, *stack.shape[1:]))) if missing else stack


class ShardOwners(MatrixOwners):
    """The same for matrices of which each rank has a shard, by rows or by columns."""

    def send_gradients(self, grads: list[Tensor]) -> None:
        self.work, self.received = self._to_owners([local(g) for g in grads])

    def gradients_and_weights(self) -> tuple[Tensor, Tensor]:
        weights_work, weights = self._to_owners([local(p) for p in self.params])
        self.work.wait()
        grads = self._whole(self.received, average=True)
        weights_work.wait()
        return grads, self._whole(weights, average=False)

    def send_weights(self, stack: Tensor) -> None:
        size, elements = self.params[0].device_mesh.size(), local(self.params[0]).numel()
        shards = stack.new_zeros(size, self.count, elements)  # the last ranks own fewer matrices
        for i, (p, matrix) in enumerate(zip(self.own, stack)):
            for shard, into in zip(matrix.chunk(size, p.placements[0].dim), shards[:, i]):
                into.view(shard.shape).copy_(shard)
        shards = shards.repeat(self.world_size // size, 1, 1).flatten(0, 1)
        self.received = torch.empty_like(shards)
        self.work = dist.all_to_all_single(self.received, shards, async_op=True)

    def _to_owners(self, shards: list[Tensor]) -> tuple[Any, Tensor]:
        """Sends this rank's shard of each matrix to its owner; (work, received `(W * count, elements of a shard)`)."""
        stack = self._padded(torch.stack([shard.flatten() for shard in shards]))
        received = torch.empty_like(stack)
        return dist.all_to_all_single(received, stack, async_op=True), received

    def _whole(self, received: Tensor, average: bool) -> Tensor:
        """The own matrices `(len(own), M, N)`, put together from the shards that _to_owners received.

        If several ranks have the same shard, the result takes their average, or the first rank's shard.
        """
        size, matrices = self.params[0].device_mesh.size(), []
        for p, shards in zip(self.own, received.unflatten(0, (self.world_size, -1)).unbind(1)):
            shards = shards.unflatten(0, (-1, size))  # ranks of one mesh follow each other
            shards = shards.mean(0) if average else shards[0]
            matrices.append(torch.cat([s.view(local(p).shape) for s in shards], p.placements[0].dim))
        return torch.stack(matrices) if self.own else received.new_empty(0, *self.params[0].shape)


# ----------------------------------------------------------------------------------------------------------------------
# Rows of a parameter


def is_split(p: Tensor, world_size: int) -> bool:
    """Whether the ranks share the rows of p. Few elements, and rows that do not divide, are updated by every rank."""
    return world_size > 1 and p.numel() >= 1024 and p.size(0) % world_size == 0


def own_rows(p: Tensor, rank: int, world_size: int) -> Tensor:
    """A view of the part of p that this rank updates."""
    if is_sharded(p):
        return local(p)
    if not is_split(p, world_size):
        return p
    rows = p.size(0) // world_size
    return p[rank * rows : (rank + 1) * rows]


def send_row_gradients(p: Tensor, grad: Tensor, rank: int, world_size: int) -> tuple[Any, Tensor]:
    """(work, gradient of the own rows, summed over the ranks once `work` is done). No work: the gradient is there."""
    if world_size == 1 or is_sharded(p):
        return None, local(grad)
    if is_split(p, world_size):
        own = torch.empty_like(own_rows(p, rank, world_size))
        return reduce_scatter(own, grad.contiguous(), async_op=True), own
    total = grad.clone()
    return dist.all_reduce(total, async_op=True), total


def send_rows(p: Tensor, own: Tensor, world_size: int) -> Any:
    """Sends the updated own rows to everybody; the work, or None where nobody else has them."""
    if is_split(p, world_size) and not is_sharded(p):
        return all_gather(p, own, async_op=True)
    return None
