"""The ways to spread a run over its processes: --parallel ddp or fsdp.

    ddp    Every process has all weights. The optimizers average the gradients and divide their own work (optim.py).
    fsdp   Every process has some rows of each matrix, of its gradient and of its moments (PyTorch's FSDP2). Quantized
           weights are sent as codes (nvfp4/sharding.py).

Both deal micro-batches to processes in the same way and make the same run. The codes of the forward pass have the same
bits. Gradients agree up to the order of their sums. Both compute, reduce and add up the gradients of the blocks in
FP32. On a GPU, fsdp computes the gradients of embedding and head in BF16 and reduces them in FP32 after each
micro-batch, while ddp averages the sum over all micro-batches.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanochat_fp4.cli import UserError
from nanochat_fp4.common import is_ddp_initialized, print0
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.sharding import gather_codes

MODES = ("ddp", "fsdp")


def check_parallel(args: argparse.Namespace) -> bool:
    """Returns whether the run is sharded. Raises UserError for flags that a sharded run cannot have."""
    if args.parallel != "fsdp":
        return False
    if not (is_ddp_initialized() and dist.get_world_size() > 1):
        print0("note: one process has nobody to share weights with: --parallel=fsdp is --parallel=ddp")
        return False
    if args.device_batch_size == "auto" or args.telemetry_every > 0:
        flag = "--device-batch-size=auto" if args.device_batch_size == "auto" else "--telemetry-every"
        raise UserError(f"{flag} does not go with --parallel=fsdp; leave it out, or use --parallel=ddp")
    return True


def shard(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Shards a converted GPT or Llama over all processes, in place. Call it before compiling and before making the
    optimizers.

    Matrices are sharded by rows. Vectors and scalars are not sharded, and the optimizers average their gradients as in
    ddp. `dtype` is the dtype of the output head's gradient, and of gathered weights that are not codes. None keeps
    their own. Returns the number of layers whose weights are gathered as codes. Raises UserError if the rows of a
    matrix do not divide by the number of processes.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    size = dist.get_world_size()
    for name, p in model.named_parameters():
        if p.ndim > 1 and p.shape[0] % size:
            problem = f"--parallel=fsdp: the {p.shape[0]} rows of {name} do not divide by {size} processes"
            raise UserError(f"{problem}; use a number of processes that divides them, or --parallel=ddp")
    mesh = dist.device_mesh.init_device_mesh(model.get_device().type, (size,))
    not_sharded = {p for p in model.parameters() if p.ndim < 2}
    plain = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    head = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=plain, ignored_params=not_sharded)
    fully_shard(model.transformer.wte, mesh=mesh, mp_policy=head, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=head, ignored_params=not_sharded)
    name = str(dtype or torch.float32).removeprefix("torch.")
    raw = gather_codes(model, dtype)
    coded = sum(isinstance(m, QuantLinear) for m in model.modules()) - len(raw)
    print0(f"FSDP over {size} processes: the weights of {coded} layers are gathered as codes, all others in {name}")
    return coded


def is_sharded(value: Any) -> bool:
    """Returns whether a tensor, or any parameter of a model, is sharded (a DTensor)."""
    if isinstance(value, nn.Module):
        return any(is_sharded(p) for p in value.parameters())
    return hasattr(value, "device_mesh")


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """A context in which every process has all weights of a sharded model. It may evaluate and generate by itself,
    uncompiled.

    All processes must enter it together. A model that is not sharded stays as it is. Each weight is gathered once, in
    the form that forward passes take on entry, and codes take 4.5 bits an element. A precision context
    (nf.full_precision) must therefore be around this context, and not inside. The gathered weights are freed at the
    end, and training goes on with the same bits. This context is not for backward passes.
    """
    if not hasattr(model, "unshard"):  # Only FSDP adds this method.
        yield
        return
    blocks = list(model.transformer.h)
    parts = [*blocks, model.transformer.wte, model]
    try:
        for block in blocks:
            block.set_reshard_after_forward(False)
        for part in parts:
            part.unshard()
        # Otherwise each shape of a batch, and each position of a cache, would be compiled again.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for block in blocks:
            block.set_reshard_after_forward(True)
        for part in parts:
            part.reshard()


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Returns model.state_dict(). If the model is sharded, rank 0 gets whole tensors on the CPU, and the others get
    nothing. All processes must call this function together."""
    if not is_sharded(model):
        return model.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
