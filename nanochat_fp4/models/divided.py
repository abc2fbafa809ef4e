"""Divides the blocks of a GPT among several processes, by tensor parallelism for the matrix products and by sequence
parallelism for the operations between them.

    model = ...             # a GPT on its device, converted
    divide(model, 2)        # two consecutive processes compute each block together

No training stage has a flag for this. lab.bench parallel uses it.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.parallel import parallelize_module

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import print0
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.nvfp4.tensor_parallel import ColwiseParallel, RowwiseParallel
from nanochat_fp4.parallel import TENSOR


class DividedGPT(GPT):
    """A GPT of which this process computes a part of each sequence. Layers that need the whole sequence gather it.

    sequence_part: (the number of this process's part, the number of parts)
    """

    sequence_part: tuple[int, int]

    def own_part(self, tokens: Tensor) -> Tensor:
        """Returns this process's part `(B, T / parts)` of tokens `(B, T)`. Raises ValueError if T cannot be divided."""
        part, parts = self.sequence_part
        if tokens.size(1) % parts:
            raise ValueError(f"{tokens.size(1)} tokens: expected a multiple of {parts}, by which they are divided")
        return tokens.chunk(parts, dim=1)[part]

    def forward(self, idx: Tensor, targets: Tensor | None = None, kv_cache: Any = None, **how: Any) -> Tensor:
        if kv_cache is not None:
            raise ValueError("a GPT that is divided among processes has no cache; generate with the whole model")
        return super().forward(idx, targets, **how)


def divide(model: GPT, size: int) -> None:
    """Divides the blocks of a converted GPT among each `size` consecutive processes, in place.

    Products and heads use tensor parallelism, and the operations between them sequence parallelism. Call it before
    compiling and before the optimizers. The `size` processes need the same tokens and the same state of torch's
    generators. Each returns the mean loss of its part of the sequence. Every process has the whole embedding, head and
    scalars, and their gradients are averaged over all processes, as in ddp. Raises UserError for numbers that do not
    divide, and for methods without a divided form.
    """
    world_size = dist.get_world_size()
    if world_size % size:
        raise UserError(f"--tensor-parallel={size} does not divide {world_size} processes; use a number that does")
    for heads in (model.config.n_head, model.config.n_kv_head):
        if heads % size:
            raise UserError(
                f"--tensor-parallel={size}: {heads} attention heads do not divide by {size}; use another depth (d32 "
                "has 16 heads), or --parallel=ddp"
            )
    names = ("data", TENSOR)
    mesh = dist.device_mesh.init_device_mesh(model.get_device().type, (world_size // size, size), mesh_dim_names=names)
    styles = {f"attn.{name}": ColwiseParallel() for name in ("c_q", "c_k", "c_v")}
    styles |= {"mlp.c_fc": ColwiseParallel(), "attn.c_proj": RowwiseParallel(), "mlp.c_proj": RowwiseParallel()}
    try:
        for block in model.transformer.h:
            parallelize_module(block, mesh[TENSOR], styles)
    except ValueError as e:
        raise UserError(f"--tensor-parallel={size}: {e}") from e
    model.__class__, model.sequence_part = DividedGPT, (mesh[TENSOR].get_local_rank(), size)
    print0(f"tensor and sequence parallel over {size} of {world_size} processes")
