"""FSDP2 with weights that travel as codes: 4.5 bits an element in place of 16 or 32.

    nf.convert(model, method)
    for block in model.blocks:
        fully_shard(block, ...)
    fully_shard(model, ...)
    nf.gather_codes(model)          # then the optimizer, as always with FSDP2

A rank holds some rows of each weight in FP32. Blocks of 1x16 lie along in_features, so these rows quantize by
themselves once all ranks know the tensor's amax; with 16x16 blocks, where they are whole rows of blocks. Before the
first gather after a change of the weights (a step of a torch.optim.Optimizer, or a change in place that PyTorch counts)
the amaxes of all weights are reduced, in one all-reduce of 4 bytes a layer, and each rank makes the codes of its rows:
the codes that one process would make, to the bit. Each gather until the next change sends these. Layers that
fused_linear computes as one share a tensor_scale, so they share the amax.

What a product takes, and what is saved for the backward pass, are the buffers that FSDP gathers into: it frees them
after the layer's forward pass and fills them again before its backward pass. The weight itself is nowhere in one
piece. The Parameter that FSDP puts in its place while it is gathered has its shape and dtype, receives its gradient,
and takes no memory: every element is the same NaN, so what should read it by mistake is heard of.

What needs the weight and not its codes gathers the weight, in raw_dtype: methods without a quantized forward, with
backward operands of the raw weight, two terms or FP8, and layers inside full_precision. gather_codes returns
the names of the layers of which that is so.

FSDP2's hooks for this (fsdp_pre_all_gather, fsdp_post_all_gather) are made for tensor subclasses; it looks for them on
the rank's local tensor, where they are put here as attributes. So the rows stay a plain tensor for optimizers and
checkpoints.
"""

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanochat_fp4.nvfp4.linear import QuantLinear, groups_computed_as_one
from nanochat_fp4.nvfp4.operands import Codes, Plain, codes_of, largest_magnitude, quantize_operand


def local(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The part of a DTensor that this process has; of other tensors, all."""
    return getattr(tensor, "_local_tensor", tensor)


# torch 2.13 gave these two new names; the old ones warn there, the new ones do not exist before. Looked up at each
# call, so that communication.counted sees them.


def all_gather(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(output, source, **kwargs)


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, **kwargs: Any) -> Any:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, source, **kwargs)


def process_group(name: str) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)


def gather_codes(model: nn.Module, raw_dtype: torch.dtype | None = None) -> list[str]:
    """Makes the converted layers of a model on which fully_shard was called gather their weights as codes. Returns the
    names of the layers that gather the weight itself, with the method that they have now.

    To be called on all ranks, after the last fully_shard and before the first forward pass and the optimizer; again
    after model.to(), which makes other local tensors. With one rank nothing is gathered, and nothing changes.
    raw_dtype: in which a weight travels that does not travel as codes; default: that of the MixedPrecisionPolicy, else
    the weight's own. Gradients have the policy's param_dtype, or else the weight's, and are reduced in
    its reduce_dtype.
    Raises ValueError for a model that is not sharded, or whose rows do not divide.
    """
    from torch.distributed.fsdp import FSDPModule

    params = {}  # the Parameter as the layer has it -> what FSDP knows of it
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            params |= {id(p.sharded_param): p for group in groups if group for p in group.fsdp_params}
    if not params:
        raise ValueError("gather_codes: nothing of the model is sharded; call fully_shard on it first")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear) and id(m.weight) in params}
    shards = _Shards(model)
    for name, layer in layers.items():
        fsdp_param = params[id(layer.weight)]
        if fsdp_param.shard_mesh.size() > 1:
            shards.all.append(_Shard(name, layer, fsdp_param, shards, raw_dtype))
    return [shard.name for shard in shards.all if not shard.as_codes()]


class _Shard:
    """The rows of a layer's weight that this rank holds: what FSDP calls before and after it gathers them."""

    def __init__(
        self, name: str, layer: QuantLinear, fsdp_param: Any, shards: "_Shards", raw_dtype: torch.dtype | None
    ):
        self.name, self.layer, self.fsdp_param, self.shards, self.raw_dtype = name, layer, fsdp_param, shards, raw_dtype
        self.group = fsdp_param.shard_mesh.get_group()
        size, rows = fsdp_param.shard_mesh.size(), layer.weight.shape[0]
        block_rows = _block_rows(layer)
        if not layer.by_rows:
            raise ValueError(f"gather_codes: {name} is a Conv1D, whose rows are in_features; shard it without codes")
        if rows % (size * block_rows):
            blocks = f" in blocks of {block_rows}" if block_rows > 1 else ""
            raise ValueError(
                f"gather_codes: the {rows} rows of {name}{blocks} do not divide by {size} processes; use a number of "
                "processes that divides them, or leave the layer out of fully_shard"
            )
        self.local: torch.Tensor = layer.weight._local_tensor
        self.version: tuple | None = None  # of what their codes were made of
        self.codes: Codes | None = None
        self.tensor_scale = torch.empty((), dtype=torch.float32, device=self.local.device)
        self.gathered_as_codes: bool | None = None  # None: not yet
        self.local.fsdp_pre_all_gather = functools.partial(self.before)
        self.local.fsdp_pre_all_gather.__signature__ = _SIGNATURE
        self.local.fsdp_post_all_gather = self.after

    def version_now(self) -> tuple:
        """Another one after every step of an optimizer and every other change of the DTensor or the local tensor, and
        of how they are rounded."""
        layer, sharded = self.layer, self.fsdp_param.sharded_param
        return self.shards.steps, sharded._version, self.local._version, layer.recipe, id(layer.feedback_factor)

    def as_codes(self) -> bool:
        """Whether the forward pass takes codes of the weight, and nothing takes the weight itself."""
        layer = self.layer
        return layer.quantizes and gathers_codes(layer)

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, policy: Any) -> tuple:
        """What this rank sends: codes and scales of its rows, or the rows."""
        in_backward = torch._C._current_graph_task_id() != -1
        as_codes = self.gathered_as_codes if in_backward else self.as_codes()
        if as_codes != self.gathered_as_codes:
            # Other buffers: FSDP makes them, and the Parameter that goes with them, where it finds none.
            self.fsdp_param.all_gather_outputs = []
            vars(self.fsdp_param).pop("_unsharded_param", None)
            self.gathered_as_codes = as_codes
        if not as_codes:
            return (self.local.to(self.raw_dtype or policy.param_dtype or self.local.dtype),), None
        if self.version != self.version_now():
            self.shards.refresh()
        return (self.codes.codes, self.codes.scales), None

    def after(self, outputs: tuple, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        """Shows the layer the buffers: once, since they stay the same tensors."""
        if out is not None:
            return None
        codes = codes_of(self.layer.recipe.output.b.rounding) if self.gathered_as_codes else None
        self.layer.gathered = codes(*outputs, self.tensor_scale) if codes else Plain(*outputs)
        return torch.full((), torch.nan, dtype=param_dtype, device=self.local.device).as_subclass(_Unread), ()


# FSDP asks for it at each gather; to find it out takes longer than all that is done here.
_SIGNATURE = inspect.signature(_Shard.before.__get__(object()))


class _Shards:
    """All of a model."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.all: list[_Shard] = []
        self.steps = 0  # of any optimizer: fused kernels change weights and count no version
        itself = weakref.ref(self)

        def after_step(*_: Any) -> None:
            if (shards := itself()) is not None:
                shards.steps += 1

        register_optimizer_step_post_hook(after_step)

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the codes of all weights anew: one has changed, and so on all ranks."""
        shards = [s for s in self.all if s.as_codes()]
        amaxes = _reduced([_amax(s.local) for s in shards], [s.group for s in shards])
        of_layer = {s.layer: amax for s, amax in zip(shards, amaxes)}
        for group in groups_computed_as_one(self.model):
            if len(group) > 1 and all(layer in of_layer for layer in group):
                together = torch.stack([of_layer[layer] for layer in group]).amax()
                of_layer |= dict.fromkeys(group, together)
        for shard in shards:
            amax = of_layer[shard.layer].view(torch.float32)
            how = shard.layer.weight_quantization(shard.local.device)._replace(amax=amax)
            codes = quantize_operand(shard.local, how, keep_codes=True).without_cache()
            shard.tensor_scale.copy_(codes.tensor_scale)
            shard.codes, shard.version = codes, shard.version_now()


class _Unread(torch.Tensor):
    """A number that stands for all elements of a tensor: FSDP asks for it in the weight's shape (as_strided)."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        plain = args[0].as_subclass(torch.Tensor)
        if function is torch.as_strided:
            return plain.expand(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return function(plain, *args[1:], **(kwargs or {}))


def gathers_codes(layer: QuantLinear) -> bool:
    """Whether the layer's recipe takes its weight as NVFP4 codes that a row, or a row of blocks, determines, and
    nothing else of it."""
    recipe = layer.recipe
    weight = recipe.output.b
    if not recipe.fixed_weight or recipe.grad_input.b.raw:
        return False
    return weight.rounding.has_kernels and weight.terms == 1


def _block_rows(layer: QuantLinear) -> int:
    return layer.recipe.output.b.rounding.block_rows if gathers_codes(layer) else 1


def _amax(x: torch.Tensor) -> torch.Tensor:
    """max |x| as the bits of a float32, int32 (): of non-negative numbers their order is that of the numbers, NaN on
    top, so that no reduction loses it."""
    return largest_magnitude(x).view(torch.int32)


def _reduced(amaxes: Sequence[torch.Tensor], groups: Sequence[Any]) -> list[torch.Tensor]:
    """Their maxima over the ranks: one all-reduce for all of a process group."""
    reduced = list(amaxes)
    for group in dict.fromkeys(groups):
        numbers = [i for i, g in enumerate(groups) if g is group]
        together = torch.stack([amaxes[i] for i in numbers])
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
        for i, amax in zip(numbers, together.unbind()):
            reduced[i] = amax
    return reduced
