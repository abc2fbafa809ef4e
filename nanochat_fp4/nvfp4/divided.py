"""A layer that several processes compute together: which part of it one has, and what travels between them.

What QuantLinear does where it is divided. How it comes to be divided, and all the shapes: tensor_parallel.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from nanochat_fp4.nvfp4.format import BLOCK
from nanochat_fp4.nvfp4.operands import Codes
from nanochat_fp4.nvfp4.part import Part, all_gather, process_group, reduce_scatter
from nanochat_fp4.nvfp4.recipes import Recipe


class Shard(NamedTuple):
    """Which part of a layer a process has.

    group, rank, size: the processes that compute it together, by the group's name, and this one
    dim:       of the weight (out_features, in_features) that is divided
    sequence:  inputs of column-parallel and outputs of row-parallel layers are divided along the sequence, dimension -2
    extent:    in a pass: of the divided dimension in this process, of all layers that are computed as one
    sequences: in a pass: of how many sequences the input is gathered as codes; 0: it is not
    """

    group: str
    rank: int
    size: int
    dim: int
    sequence: bool
    extent: int = 0
    sequences: int = 0

    def problem(self, recipe: Recipe, features: int) -> str | None:
        """Why a layer whose divided dimension is so large cannot be computed with this recipe, or None."""
        gemms = recipe.output, recipe.grad_input, recipe.grad_weight
        operands = [o for gemm in gemms for o in (gemm.a, gemm.b)]
        if recipe.looks_at_inputs or any(o.outer for o in operands):
            what = "feedback" if recipe.output.b.feedback else "outliers" if recipe.outliers else "scales by 128"
            return f"{recipe.name} has {what}, which is not divided among processes; use another method"
        roundings = [o.rounding for o in operands if o.rounding]
        unit = max([BLOCK, *(g.rht_dim for g in gemms), *(max(r.block, r.block_rows) for r in roundings)])
        unit = unit if recipe.quantizes else 1
        if features % (self.size * unit):
            name = ("out_features", "in_features")[self.dim]
            return f"{name} is {features}, expected a multiple of {self.size} x {unit} for {self.size} processes"
        return None

    def of_pass(self, x: torch.Tensor, recipe: Recipe, weights: list[torch.Tensor]) -> "Shard":
        """recipe: that of this pass; weights: of this process, of all layers that are computed as one."""
        extent = sum(w.shape[0] for w in weights) if self.dim == 0 else weights[0].shape[1]
        as_codes = self.dim == 0 and self.sequence and input_is_codes(recipe)
        return self._replace(extent=extent, sequences=x.shape[:-2].numel() if as_codes else 0)

    def parts(self, operands: Sequence[str]) -> list[Part | None]:
        """Which parts the operands of a GEMM are here; None: each process has all of it.

        operands: the rows and the contracted dimension of each, of M tokens, K in_features and N out_features: "MK".
        """
        divided, at = "NK"[self.dim], self.rank * self.extent
        result: list[Part | None] = []
        for rows, contracted in operands:
            if contracted == divided:
                result.append(Part(self.group, column=at, columns=self.size * self.extent))
            elif rows == divided:
                result.append(Part(self.group, row=at))
            else:
                result.append(Part(self.group) if self.sequences and (rows, contracted) == ("M", "K") else None)
        return result

    # What travels around the product, differentiable

    def enter(self, x: torch.Tensor, amax: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The input (..., T, K) of the product, and what is known of its largest magnitude."""
        if self.dim == 1 or self.sequences:
            return x, amax
        if not self.sequence:
            return _Exchange.apply(x, self, "", "sum"), amax
        return _Exchange.apply(x, self, "gather", "scatter"), None

    def leave(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The layer's output from the product's."""
        if self.dim == 1:
            y = _Exchange.apply(y, self, *(("scatter", "gather") if self.sequence else ("sum", "")))
        if bias is None:
            return y
        bias = bias.to_local().to(y.dtype)
        return y + (_Exchange.apply(bias, self, "", "sum") if self.dim == 1 and self.sequence else bias)

    # and inside it

    def leading(self, shape: torch.Size) -> tuple[int, ...]:
        """The product's leading dimensions, of an input (..., T, K)."""
        return (*shape[:-2], shape[-2] * self.size) if self.sequences else tuple(shape[:-1])

    def gathered_codes(self, x: Codes) -> Codes:
        """Codes of all tokens, of those of this process, where the input travels as codes."""
        if not self.sequences:
            return x
        packed = torch.cat((x.codes, x.scales.view(torch.uint8)), dim=1)
        packed = _gather(packed.unflatten(0, (self.sequences, -1)), self.group, self.size).flatten(0, 1)
        codes, scales = (t.contiguous() for t in packed.split((x.codes.shape[1], x.scales.shape[1]), dim=1))
        return Codes(codes, scales.view(x.scales.dtype), x.tensor_scale)

    def scattered_gradient(self, grad_x: torch.Tensor) -> torch.Tensor:
        """Its gradient for the tokens of this process."""
        if not self.sequences:
            return grad_x
        return _scatter(grad_x.unflatten(0, (self.sequences, -1)), self.group, self.size).flatten(0, 1)

    def exchanged(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """gather: of (..., T / W, C) all of (..., T, C); scatter: the other way, added up; sum: added up."""
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


def input_is_codes(recipe: Recipe) -> bool:
    """Whether all that a recipe takes of its input are the NVFP4 codes of its forward GEMM, which a row and the
    tensor's amax determine."""
    output, a = recipe.output, recipe.output.a
    plain = a.terms == 1 and not (a.outer or output.rht_dim or recipe.grad_weight.b.raw)
    return plain and a.rounding is not None and a.rounding.has_kernels and not a.rounding.random


class _Exchange(torch.autograd.Function):
    """Shard.exchanged, with another exchange in the backward pass."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, shard: Shard, forth: str, back: str) -> torch.Tensor:
        ctx.shard, ctx.back = shard, back
        return shard.exchanged(x, forth)

    @staticmethod
    def backward(ctx, grad_y: torch.Tensor):
        return ctx.shard.exchanged(grad_y, ctx.back), None, None, None


# ----------------------------------------------------------------------------------------------------------------------
# Collectives as operators, which torch.compile does not look into.


@torch.library.custom_op("nanochat_fp4::gather_sequences", mutates_args=())
def _gather(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """(B, T / W, C) -> (B, T, C)"""
    out = x.new_empty(size, *x.shape)
    all_gather(out.flatten(0, 1), x.contiguous(), group=process_group(group))
    return out.movedim(0, 1).flatten(1, 2).contiguous()


@_gather.register_fake
def _(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], size * x.shape[1], x.shape[2])


@torch.library.custom_op("nanochat_fp4::scatter_sequences", mutates_args=())
def _scatter(x: torch.Tensor, group: str, size: int) -> torch.Tensor:
    """(B, T, C) -> (B, T / W, C), the sum over the processes"""
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
