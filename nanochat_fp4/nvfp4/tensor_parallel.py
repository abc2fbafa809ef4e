"""Tensor and sequence parallelism: a quantized layer that several processes compute together, through DTensor's styles.

    nf.convert(model, method)
    mesh = init_device_mesh("cuda", (2,))                    # or one dimension of a larger mesh
    styles = {f"attn.{name}": nf.ColwiseParallel() for name in "qkv"} | {"attn.o": nf.RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, styles | {"mlp.up": nf.ColwiseParallel(), "mlp.down": nf.RowwiseParallel()})

W processes, M tokens, K in_features, N out_features. What is between the layers (norms, residual stream) is divided
along the sequence (sequence_parallel, the default), or whole in each process.

                      ColwiseParallel                            RowwiseParallel
    weight            N / W rows                                 K / W columns
    input             (M / W, K), gathered as codes; or (M, K)   (M, K / W)
    output            (M, N / W)                                 added up, (M / W, N) of it here; or all (M, N)
    grad_input        added up, (M / W, K) of it; or all (M, K)  (M, K / W)
    grad_output       (M, N / W)                                 (M / W, N), gathered as it is; or (M, N)

A process quantizes its tokens with the tensor_scale of all, for which the group reduces one number, and what it sends
are codes and scales, 4.5 bits an element. They are kept for wgrad as they were gathered: nothing is sent twice, at 4.5
bits for each element of the whole input in each process. Methods whose input is not plain codes (bf16, FP8, MX, two
terms, nvidia's wgrad of the raw input, a scale per token) gather the input itself, in its own dtype.

Of every operand that is divided the largest magnitude is reduced over the group, and each process draws the random
numbers of its place in the whole (part.py). So forward codes are those of one process, to the bit. So are backward
codes, made of the same grad_output, up to the order in which a rotation is summed; but not those of q, k and v, of
which one process has another order of rows, and draws accordingly. grad_output itself differs by the order in which
partial products are added. All processes of a group must draw the same seeds: the same state of torch's generators,
and the same passes.

Gradients are those of the sum of the processes' losses where the sequence is divided, else of the one loss that all
have. Weights and their gradients are DTensors. Refused in one line: shards that are not whole blocks and rotation
groups (16, 32, 128), feedback and outliers (a process does not see all inputs) and scales by 128.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.parallel import ParallelStyle

from nanochat_fp4.nvfp4.divided import Shard
from nanochat_fp4.nvfp4.linear import QuantLinear


class _Style(ParallelStyle):
    dim: int  # of the weight that is divided

    def __init__(self, *, sequence_parallel: bool = True):
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if type(module) is not QuantLinear or module.shard is not None:
            what = "a layer that is parallel already" if hasattr(module, "shard") else type(module).__name__
            raise ValueError(f"{name} is for layers that nanochat_fp4.convert has converted; got {what}")
        if device_mesh.ndim != 1:
            raise ValueError(f"{name}: the mesh has {device_mesh.ndim} dimensions, expected one; take mesh['tp'] of it")
        group = device_mesh.get_group()
        shard = Shard(
            group.group_name, device_mesh.get_local_rank(), device_mesh.size(), self.dim, self.sequence_parallel
        )
        features = module.weight.shape[self.dim]
        for recipe in (module.recipe, module.recipe.final):
            problem = shard.problem(recipe, features)
            if problem:
                raise ValueError(f"{name}: {problem}")
        for key, param in list(module.named_parameters()):
            placement = Sharded(self.dim) if key == "weight" or self.dim == 0 else Replicate()
            local = distribute_tensor(param.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank)
            setattr(module, key, nn.Parameter(local, requires_grad=param.requires_grad))
        module.shard = shard
        return module


class ColwiseParallel(_Style):
    """A ParallelStyle for parallelize_module: a quantized layer by its out_features; see the top of this file.

    Input (..., T / W, in_features), or (..., T, in_features) with sequence_parallel=False; output (..., T,
    out_features / W). Layers that fused_linear computes as one (q, k, v) are gathered and quantized as one.
    Raises ValueError for a layer that is not converted, a size that does not divide, a method that is refused.
    """

    dim = 0


class RowwiseParallel(_Style):
    """A ParallelStyle for parallelize_module: a quantized layer by its in_features; see the top of this file.

    Input (..., T, in_features / W); output (..., T / W, out_features), or (..., T, out_features) with
    sequence_parallel=False. Raises ValueError as ColwiseParallel does.
    """

    dim = 1
