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
    input             (M / W, K), gathered as codes; or (M, K)   (M, K / W)
    output            (M, N / W)                                 (M / W, N) of the sum; or (M, N), the sum
    grad_input        (M / W, K) of the sum; or (M, K), the sum  (M, K / W)
    grad_output       (M, N / W)                                 (M / W, N), gathered as it is; or (M, N)

A gathered input is sent as codes and scales, 4.5 bits an element. Each process quantizes its own tokens with the
tensor_scale of all tokens, for which the group first reduces one number. The gathered codes are kept for grad_weight,
so they are sent only once, and each process holds 4.5 bits for each element of the whole input. Some methods do not
multiply plain codes of the input, and gather the input itself in its own dtype: bf16, FP8, MX, methods with two terms,
nvidia (for its grad_weight), and layers with a scale per token.

For every divided operand the group reduces the largest magnitude, and each process draws the random numbers that belong
to its part of the whole operand (Part). The codes of the forward therefore have the bits that a single process would
compute. The codes of a given grad_output have them too, up to the order in which a rotation is summed. Fused q, k and v
are an exception, because a single process has their rows in another order and draws for this order. grad_output itself
differs in the order in which partial products are added. All processes of a group must draw the same seeds. They need
the same states of torch's generators, and must compute the same passes.

With a divided sequence, gradients are those of the sum of the processes' losses. Otherwise all processes compute the
same loss. Weights and their gradients are DTensors. Two things are refused with an error: parts that do not consist of
whole blocks and whole rotation groups (16, 32 or 128 elements), and error feedback, which would need the inputs of all
processes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded
from torch.distributed.tensor.parallel import ParallelStyle

from nanochat_fp4.nvfp4.collectives import all_gather, process_group, reduce_scatter
from nanochat_fp4.nvfp4.format import BLOCK, TILE_ROWS
from nanochat_fp4.nvfp4.gemm import GemmOperand
from nanochat_fp4.nvfp4.layer_pass import UNQUANTIZED, check_input, compute_dtype
from nanochat_fp4.nvfp4.linear import QuantLinear, quantized_linear
from nanochat_fp4.nvfp4.makers import Quantization
from nanochat_fp4.nvfp4.operands import Codes, stacked
from nanochat_fp4.nvfp4.philox import uniforms_of_elements, uniforms_of_scales
from nanochat_fp4.nvfp4.recipes import INPUT, WEIGHT, Recipe

# The rows and the contracted dimension of each operand from INPUT to INPUT_T, with the letters of the docstring above.
DIMENSIONS = ("MK", "NK", "MN", "KN", "NM", "KM")


class Part(NamedTuple):
    """The place of a process's operand (R, C) in the whole operand that the processes of a group have together.

    group:       the name of the group
    row, column: the place of this operand's first element in the whole operand, both multiples of 16
    columns:     the number of columns of the whole operand. 0 means that all columns are here.
    """

    group: str
    row: int = 0
    column: int = 0
    columns: int = 0

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """Returns the maximum of the processes' amaxes, float32, in amax's shape."""
        return largest_over_ranks(amax.float(), self.group)

    def noise(self, seed: torch.Tensor | int, stream: int) -> "PartNoise":
        return PartNoise(self, seed, stream)


class PartNoise(NamedTuple):
    """The random numbers that philox.Noise has for the whole operand, restricted to a part of it."""

    part: Part
    seed: torch.Tensor | int
    stream: int

    def elements(self, row: int, rows: int, columns: int, candidate: int, device: torch.device) -> torch.Tensor:
        first = self.part.row + row + torch.arange(rows, device=device, dtype=torch.int64).unsqueeze(1)
        index = first * ((self.part.columns or columns) // 8) + self.part.column // 8
        index = index + torch.arange(columns // 8, device=device)
        return uniforms_of_elements(self.seed, index.flatten(), self.stream, candidate)

    def scales(self, rows: int, blocks: int, device: torch.device) -> torch.Tensor:
        line = torch.arange(-(-rows // 16) * 8, device=device, dtype=torch.int64).unsqueeze(1)
        line = self.part.row // 16 * 8 + line
        calls = line * ((self.part.columns // BLOCK or blocks) // 2) + self.part.column // BLOCK // 2
        calls = calls + torch.arange(blocks // 2, device=device)
        return uniforms_of_scales(self.seed, calls, rows, self.stream)


class Shard(NamedTuple):
    """A process's part of a layer.

    group, rank, size: the name of the group that computes the layer together, this process's number in it, and the
               number of its processes
    dim:       the divided dimension of the weight (out_features, in_features)
    sequence:  whether the inputs of column-parallel layers and the outputs of row-parallel layers are divided along the
               sequence, which is dimension -2

    The other fields are set for a pass (of_pass):

    extent:    the size of the divided dimension in this process, summed over all layers that are computed as one
    sequences: the number of sequences whose input is gathered as codes, or 0
    tiles:     whether scales can be gathered in tiles, because each process has whole tiles
    """

    group: str
    rank: int
    size: int
    dim: int
    sequence: bool
    extent: int = 0
    sequences: int = 0
    tiles: bool = False

    def problem(self, recipe: Recipe, features: int) -> str | None:
        """Returns the reason why a layer cannot be computed with this recipe, or None. `features` is the size of the
        layer's divided dimension."""
        gemms = recipe.output, recipe.grad_input, recipe.grad_weight
        operands = [o for gemm in gemms for o in (gemm.a, gemm.b)]
        if recipe.uses_feedback:
            return f"{recipe.name} has feedback, which is not divided among processes; use another method"
        roundings = [o.rounding for o in operands if o.rounding]
        unit = max([BLOCK, *(g.rht_dim for g in gemms), *(max(r.block, r.block_rows) for r in roundings)])
        unit = unit if recipe.quantizes else 1
        if features % (self.size * unit):
            name = ("out_features", "in_features")[self.dim]
            return f"{name} is {features}, expected a multiple of {self.size} x {unit} for {self.size} processes"
        return None

    def of_pass(self, x: torch.Tensor, recipe: Recipe, weights: list[torch.Tensor]) -> "Shard":
        """Returns the shard for a pass of the input x. recipe is the recipe of this pass, and weights are this
        process's parts of the weights of all layers that are computed as one."""
        extent = sum(w.shape[0] for w in weights) if self.dim == 0 else weights[0].shape[1]
        as_codes = self.dim == 0 and self.sequence and recipe.input_is_codes
        sequences = x.shape[:-2].numel() if as_codes else 0
        return self._replace(extent=extent, sequences=sequences, tiles=x.shape[-2] % TILE_ROWS == 0)

    def part_of(self, operand: int) -> Part | None:
        """Returns the part of an operand (INPUT to INPUT_T) that this process has. None means that each process has the
        whole operand."""
        (rows, contracted), divided, at = DIMENSIONS[operand], "NK"[self.dim], self.rank * self.extent
        if contracted == divided:
            return Part(self.group, column=at, columns=self.size * self.extent)
        if rows == divided:
            return Part(self.group, row=at)
        return Part(self.group) if self.sequences and operand == INPUT else None

    # The differentiable exchanges around the product

    def enter(self, x: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the input (..., T, K) of the product for the layer's input x, and its amax if it is known."""
        if self.dim == 1 or self.sequences:
            return x, amax
        if not self.sequence:
            return _Exchange.apply(x, self, "", "sum"), amax
        return _Exchange.apply(x, self, "gather", "scatter"), None

    def leave(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns the layer's output for the product's output y: adds up partial sums, and adds the bias."""
        if self.dim == 1:
            y = _Exchange.apply(y, self, *(("scatter", "gather") if self.sequence else ("sum", "")))
        if bias is None:
            return y
        bias = bias.to_local().to(y.dtype)
        return y + (_Exchange.apply(bias, self, "", "sum") if self.dim == 1 and self.sequence else bias)

    # The exchanges inside the product

    def leading(self, shape: torch.Size) -> tuple[int, ...]:
        """Returns the leading dimensions of the product's output for an input (..., T, K)."""
        return (*shape[:-2], shape[-2] * self.size) if self.sequences else tuple(shape[:-1])

    def gathered_codes(self, x: Codes) -> Codes:
        """Gathers the codes of all tokens from the codes of each process's tokens."""
        scales = x.scales.view(torch.uint8).view(x.codes.shape[0], -1)
        packed = torch.cat((x.codes, scales), dim=1)
        packed = _gather(packed.unflatten(0, (self.sequences, -1)), self.group, self.size).flatten(0, 1)
        codes, scales = (t.contiguous() for t in packed.split((x.codes.shape[1], scales.shape[1]), dim=1))
        scales = scales.flatten() if x.scales.dim() == 1 else scales
        return Codes(codes, scales.view(x.scales.dtype), x.tensor_scale)

    def scattered_gradient(self, grad_x: torch.Tensor) -> torch.Tensor:
        """Adds up the processes' gradients (M, K) of all tokens, and returns the sum for this process's tokens,
        (M / W, K)."""
        return _scatter(grad_x.unflatten(0, (self.sequences, -1)), self.group, self.size).flatten(0, 1)

    def exchanged(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Exchanges x among the processes. `how` is one of four: "gather" makes (..., T, C) from the processes'
        (..., T / W, C), "scatter" adds up the processes' (..., T, C) and returns a part (..., T / W, C), "sum" adds up
        and returns all, and "" exchanges nothing."""
        if how == "":
            return x.view_as(x)
        if how == "sum":
            return _add_up(x, self.group)
        if how == "scatter" and x.shape[-2] % self.size:
            raise ValueError(
                f"{x.shape[-2]} tokens do not divide by {self.size} processes; give sequences that do, or use "
                "sequence_parallel=False"
            )
        sequences = x.reshape(-1, *x.shape[-2:])
        y = (_gather if how == "gather" else _scatter)(sequences, self.group, self.size)
        return y.view(*x.shape[:-2], *y.shape[-2:])


class _Exchange(torch.autograd.Function):
    """Applies Shard.exchanged, with the exchange `back` in the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shard: Shard, forth: str, back: str) -> torch.Tensor:
        ctx.shard, ctx.back = shard, back
        return shard.exchanged(x, forth)

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor):
        return ctx.shard.exchanged(grad_y, ctx.back), None, None, None


class DividedOperands(NamedTuple):
    """The layer_pass.LayerOperands of a process that has a part of a layer."""

    recipe: Recipe
    shard: Shard

    def quantization(
        self, operand: int, seed: torch.Tensor | None, signs: torch.Tensor | None, device: torch.device
    ) -> Quantization:
        how = self.recipe.quantization(operand, seed, signs, device)._replace(part=self.shard.part_of(operand))
        if operand == INPUT and self.shard.sequences:
            how = how._replace(tiles=how.tiles and self.shard.tiles)
        return how

    def gathered(self, xq: GemmOperand) -> GemmOperand:
        return self.shard.gathered_codes(xq) if self.shard.sequences else xq

    def scattered(self, grad_x: torch.Tensor) -> torch.Tensor:
        return self.shard.scattered_gradient(grad_x) if self.shard.sequences else grad_x


class DividedLinear(QuantLinear):
    """A QuantLinear of which this process has a part. in_features and out_features are those of the whole layer."""

    stackable = True
    shard: Shard

    @property
    def part_number(self) -> int:
        return self.shard.rank

    @property
    def matrix(self) -> torch.Tensor:
        return self.weight.to_local()

    def problem_with(self, recipe: Recipe) -> str | None:
        problem = super().problem_with(recipe)
        return problem or self.shard.problem(recipe, self.weight.shape[self.shard.dim])

    def weight_quantization(self, device: torch.device) -> Quantization:
        shard = self.shard._replace(extent=self.matrix.shape[self.shard.dim])
        how = DividedOperands(self.recipe, shard).quantization(WEIGHT, None, None, device)
        return how._replace(factor=self.feedback_factor)

    def is_like(self, other: QuantLinear) -> bool:
        return super().is_like(other) and self.shard == other.shard

    def outputs(self, x: torch.Tensor, layers: Sequence[QuantLinear], amax: torch.Tensor | None = None) -> torch.Tensor:
        features = self.in_features if self.shard.dim == 0 else self.in_features // self.shard.size
        check_input(x, features)
        weights = [layer.matrix for layer in layers]
        shard = self.shard.of_pass(x, UNQUANTIZED if self.scales_each_token else self.present_recipe, weights)
        x, amax = shard.enter(x, amax)
        if not x.numel() or self.is_plain(x, layers):
            weight = stacked([w.to(compute_dtype(x)) for w in weights])
            return shard.leave(nn.functional.linear(x, weight), self.bias)
        p = self.new_pass(x, layers, amax, DividedOperands(self.present_recipe, shard))
        y = quantized_linear(p, x, weights)
        return shard.leave(y.view(*shard.leading(x.shape), y.shape[-1]), self.bias)


class _Style(ParallelStyle):
    dim: int  # the weight's divided dimension

    def __init__(self, *, sequence_parallel: bool = True):
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if type(module) is not QuantLinear:
            what = "a layer that is parallel already" if isinstance(module, DividedLinear) else type(module).__name__
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
        module.__class__, module.shard = DividedLinear, shard
        return module


class ColwiseParallel(_Style):
    """A ParallelStyle for parallelize_module that divides a quantized layer by its out_features among W processes.

    The input is (..., T / W, in_features), or (..., T, in_features) with sequence_parallel=False. The output is
    (..., T, out_features / W). For layers that fused_linear computes as one (q, k, v), the input is gathered and
    quantized once. parallelize_module raises ValueError for a layer that is not converted or is parallel already, for a
    mesh of several dimensions, for a size that cannot be divided, and for a method with error feedback.

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


# ----------------------------------------------------------------------------------------------------------------------
# Collectives as operators that torch.compile does not trace


@torch.library.custom_op("nanochat_fp4::gather_sequences", mutates_args=())
def _gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Gathers (B, T, C) from the processes' (B, T / W, C)."""
    out = x.new_empty(size, *x.shape)
    all_gather(out.flatten(0, 1), x.contiguous(), group=process_group(group))
    return out.movedim(0, 1).flatten(1, 2).contiguous()


@_gather.register_fake
def _(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], size * x.shape[1], x.shape[2])


@torch.library.custom_op("nanochat_fp4::scatter_sequences", mutates_args=())
def _scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """Adds up the processes' (B, T, C) and returns this process's part of the sum, (B, T / W, C)."""
    parts = x.unflatten(1, (size, -1)).movedim(1, 0).contiguous()
    out = torch.empty_like(parts[0])
    reduce_scatter(out, parts.flatten(0, 1), group=process_group(group))
    return out


@_scatter.register_fake
def _(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // size, x.shape[2])


@torch.library.custom_op("nanochat_fp4::add_up", mutates_args=())
def _add_up(x: torch.Tensor, group: str) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=process_group(group))
    return total


@_add_up.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("nanochat_fp4::largest", mutates_args=())
def largest_over_ranks(amax: torch.Tensor, group: str) -> torch.Tensor:
    """Returns the maximum of the processes' amaxes. It is taken of the bits, which have the order of non-negative
    floats with NaN above all numbers, so that a NaN cannot get lost."""
    bits = amax.clone().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=process_group(group))
    return bits.view(torch.float32)


@largest_over_ranks.register_fake
def _(amax: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(amax)
