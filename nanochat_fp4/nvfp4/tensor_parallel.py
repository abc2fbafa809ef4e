"""Tensor and sequence parallelism: several processes compute a quantized layer together, with parallelize_module.

    nf.convert(model, method)
    mesh = init_device_mesh("cuda", (2,))                    # or one dimension of a larger mesh
    styles = {f"attn.{name}": nf.ColwiseParallel() for name in "qkv"} | {"attn.o": nf.RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh, styles | {"mlp.up": nf.ColwiseParallel(), "mlp.down": nf.RowwiseParallel()})

In this text there are W processes, M tokens, K in_features and N out_features. Tensors between the parallel layers,
such as the residual stream, are divided along the sequence (sequence_parallel=True, the default), or each process has
all of them. The table gives the shapes in a process for a divided sequence, and after "or" for a whole one.

                      ColwiseParallel                            RowwiseParallel
    weight            N / W rows                                 K / W columns
    input             (M / W, K), gathered; or (M, K)            (M, K / W)
    output            (M, N / W)                                 (M / W, N) of the sum; or (M, N), the sum
    grad_input        (M / W, K) of the sum; or (M, K), the sum  (M, K / W)
    grad_output       (M, N / W)                                 (M / W, N), gathered; or (M, N)

A method that reads the input as plain codes gathers codes and scales, 4.5 bits an element, as TransformerEngine does.
The backward pass keeps the gathered codes. Other methods gather the input itself.

The amax of an operand is reduced over the processes, so rounding to nearest gives the codes of a single process.
Stochastic rounding and MS-EDEN draw numbers of each process's own. With a divided sequence, gradients are those of the
sum of the processes' losses. Otherwise all processes compute the same loss. Weights and their gradients are DTensors.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from nanochat_fp4.nvfp4.gemm import Quantized, quantize_operand
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.quantizers import Quantization


class DividedLinear(QuantLinear):
    """A QuantLinear of which this process has a part. in_features and out_features are those of the part."""

    stackable = True
    mesh: DeviceMesh
    dim: int  # the weight's divided dimension
    sequence: bool  # whether the tensors between the parallel layers are divided along the sequence

    @property
    def matrix(self) -> Tensor:
        return self.weight.to_local()

    def largest(self, amax: Tensor) -> Tensor:
        """The maximum of the processes' amaxes. It is taken of the bits, which have the order of non-negative floats
        with NaN above all numbers, so that a NaN cannot get lost."""
        return collectives.all_reduce(amax.float().view(torch.int32), "max", self.mesh).view(torch.float32)

    def is_like(self, other: QuantLinear) -> bool:
        same = (self.mesh, self.dim, self.sequence) == (other.mesh, other.dim, other.sequence)
        return super().is_like(other) and same

    def outputs(self, x: Tensor, layers: Sequence[QuantLinear], amax: Tensor | None = None, **known: bool) -> Tensor:
        settings, plain = {"amax": amax}, not x.numel() or self.is_plain(x, layers)
        if self.dim == 0:
            codes = self.quantizes and self.recipe.input_is_codes and not self.scales_each_token
            if self.sequence and codes and not plain:
                settings = {"before": _GatheredCodes(self.mesh, x.shape[:-2].numel())}
            else:
                whole = self._from_local(x, Shard(x.dim() - 2) if self.sequence else Replicate())
                x = whole.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
                settings = {"amax": None if self.sequence else amax}
        y = super().outputs(x, layers, add_bias=False, **settings, **known)
        return self._bias(self._sum(y) if self.dim == 1 else y)

    def _from_local(self, x: Tensor, placement: Replicate | Shard | Partial) -> DTensor:
        return DTensor.from_local(x, self.mesh, [placement], run_check=False)

    def _sum(self, y: Tensor) -> Tensor:
        """The sum of the processes' products, or this process's part of its sequence."""
        if self.sequence and y.shape[-2] % self.mesh.size():
            raise ValueError(
                f"{y.shape[-2]} tokens do not divide by {self.mesh.size()} processes; give sequences that do, or use "
                "sequence_parallel=False"
            )
        to = Shard(y.dim() - 2) if self.sequence else Replicate()
        return self._from_local(y, Partial()).redistribute(placements=[to]).to_local()

    def _bias(self, y: Tensor) -> Tensor:
        if self.bias is None:
            return y
        bias = self.bias
        if self.dim == 1:  # Each process adds the whole bias, to its part of the sequence or to all of it.
            bias = bias.redistribute(placements=[Replicate()])
            return y + bias.to_local(grad_placements=[Partial() if self.sequence else Replicate()]).to(y.dtype)
        return y + bias.to_local().to(y.dtype)


class _GatheredCodes(NamedTuple):
    """For Pass.before: gathers the codes of a column-parallel layer's input (sequences * T / W, K)."""

    mesh: DeviceMesh
    sequences: int

    def forward(self, x: Tensor, how: Quantization) -> Quantized:
        # Row-major scales can be gathered by joining those of the processes.
        xq = quantize_operand(x, how._replace(tiles=False), keep_codes=True)
        parts = torch.cat((xq.codes, xq.scales.view(torch.uint8)), dim=1).unflatten(0, (self.sequences, -1))
        parts = collectives.all_gather_tensor(parts, 1, self.mesh).flatten(0, 1)
        codes, scales = (part.contiguous() for part in parts.split((xq.codes.shape[1], xq.scales.shape[1]), dim=1))
        return Quantized(codes, scales.view(xq.scales.dtype), xq.tensor_scale, length=xq.length)

    def backward(self, grad: Tensor) -> Tensor:
        grad = collectives.reduce_scatter_tensor(grad.unflatten(0, (self.sequences, -1)), "sum", 1, self.mesh)
        return grad.flatten(0, 1)


class _Style(ParallelStyle):
    dim: int  # the weight's divided dimension

    def __init__(self, *, sequence_parallel: bool = True):
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name, size = type(self).__name__, device_mesh.size()
        if type(module) is not QuantLinear:
            what = "a layer that is parallel already" if isinstance(module, DividedLinear) else type(module).__name__
            raise ValueError(f"{name} is for layers that nanochat_fp4.convert has converted; got {what}")
        if device_mesh.ndim != 1:
            raise ValueError(f"{name}: the mesh has {device_mesh.ndim} dimensions, expected one; take mesh['tp'] of it")
        what = ("out_features", "in_features")[self.dim]
        features, block = getattr(module, what), max(1, module.recipe.block, module.recipe.final.block)
        if features % (size * block):
            raise ValueError(
                f"{name}: {what} is {features}, expected a multiple of {size} x {block} for {size} processes"
            )
        for key, param in list(module.named_parameters()):
            placement = Shard(self.dim) if key == "weight" or self.dim == 0 else Replicate()
            local = distribute_tensor(param.detach(), device_mesh, [placement], src_data_rank=self.src_data_rank)
            setattr(module, key, nn.Parameter(local, requires_grad=param.requires_grad))
        module.__class__, module.mesh, module.dim = DividedLinear, device_mesh, self.dim
        module.sequence = self.sequence_parallel
        setattr(module, what, features // size)
        return module


class ColwiseParallel(_Style):
    """A ParallelStyle for parallelize_module that divides a quantized layer by its out_features among W processes.

    The input is (..., T / W, in_features), or (..., T, in_features) with sequence_parallel=False. The output is
    (..., T, out_features / W). For layers that fused_linear computes as one (q, k, v), the input is gathered and
    quantized once. parallelize_module raises ValueError for a layer that is not converted or is parallel already, for a
    mesh of several dimensions, and for a size that cannot be divided.

    >>> styles = {name: nf.ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v")}  # for parallelize_module
    """

    dim = 0


class RowwiseParallel(_Style):
    """A ParallelStyle for parallelize_module that divides a quantized layer by its in_features among W processes.

    The input is (..., T, in_features / W). The output is (..., T / W, out_features), or (..., T, out_features) with
    sequence_parallel=False. Errors are those of ColwiseParallel.

    >>> styles = {"mlp.up": nf.ColwiseParallel(), "mlp.down": nf.RowwiseParallel()}  # for parallelize_module
    """

    dim = 1
