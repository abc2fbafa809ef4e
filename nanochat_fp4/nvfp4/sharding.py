"""Lets FSDP2 gather weights as 4-bit codes: 4.5 bits an element, where FSDP2 itself sends 16 or 32.

    nf.convert(model, method)
    for block in model.blocks:
        fully_shard(block, ...)
    fully_shard(model, ...)
    nf.gather_codes(model)          # then the optimizer, as always with FSDP2

A rank holds some rows of each weight in FP32. Blocks of 1x16 lie along in_features, so a rank can quantize its rows as
soon as it knows the amax of the whole weight. With blocks of 16x16, a rank's rows must consist of whole blocks.

Codes are made before the first gather that follows a change of the weights. A change is a step of a
torch.optim.Optimizer, or a change in place that PyTorch counts. First one all-reduce, of 4 bytes a layer, finds the
amaxes of all weights. Then each rank makes the codes of its rows. The codes are those that a single process would make,
to the bit. Every gather until the next change sends the same codes. Layers that fused_linear computes as one share a
tensor_scale, so they also share the amax.

The GEMMs of both passes read the buffers that FSDP gathers into. FSDP frees the buffers after the layer's forward pass
and fills them again before the layer's backward pass, so no process keeps the whole weight. While a weight is gathered,
FSDP replaces the sharded Parameter by another one that has the whole weight's shape and dtype and receives the
gradient. The values are in the buffers, so this Parameter takes no memory. All its elements are a single NaN, and code
that reads it by mistake computes NaN and is noticed.

Some layers need the weight itself and gather it in raw_dtype. These are layers inside full_precision, and layers with
one of three kinds of methods: the forward leaves the weight unquantized or rounds it at random, a backward operand is
made of the unquantized weight, or the weight has another format than NVFP4, such as FP8.
gather_codes returns the names of these layers.

FSDP2's hooks (fsdp_pre_all_gather, fsdp_post_all_gather) are meant for tensor subclasses. FSDP2 looks for them on the
rank's local tensor, so this module sets them there as attributes. For optimizers and checkpoints the local tensor stays
a plain tensor.
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

from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.format import BLOCK, TILE_ROWS
from nanochat_fp4.nvfp4.gemm import Quantized, quantize_operand
from nanochat_fp4.nvfp4.layer import QuantLinear


class ShardedLinear(QuantLinear):
    """A QuantLinear whose weight FSDP gathers, as codes or as values, into buffers beside the Parameter.

    gathered: the operand in these buffers. It holds the weight while FSDP's placeholder is the layer's Parameter.
    """

    stackable = True
    gathered: Quantized | None = None

    @property
    def is_gathered(self) -> bool:
        """Whether the Parameter is FSDP's placeholder for the weight in the buffers. A placeholder has the stride 0."""
        return self.gathered is not None and not self.weight.stride(0)

    @property
    def matrix(self) -> torch.Tensor:
        if self.is_gathered and self.gathered.codes is None:
            return _Gathered.apply(self.weight, self.gathered.decoded)
        return self.weight

    def gathered_weight(self, layers: "Sequence[ShardedLinear]") -> Sequence[Quantized] | None:
        """Returns the gathered codes, or the gathered values if the pass does not quantize the weight. None means that
        the layer has to make the operand from its weight.

        Raises ValueError if codes were gathered and the pass is in full precision.
        """
        if not self.is_gathered or (self.quantizes and self.gathered.codes is None):
            return None
        if not self.quantizes and self.gathered.codes is not None:
            raise ValueError("QuantLinear: FSDP gathered the codes alone; enter full_precision around unsharded")
        # The parts stay in FSDP's buffers, because a copy would hold memory after FSDP has freed the buffers.
        return tuple(layer.gathered for layer in layers)

    def is_plain(self, x: torch.Tensor, layers: Sequence[QuantLinear]) -> bool:
        return super().is_plain(x, layers) and not self.is_gathered


class _Gathered(torch.autograd.Function):
    """Returns the values of a gathered weight and passes their gradient to the placeholder Parameter."""

    @staticmethod
    def forward(ctx, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def gather_codes(model: nn.Module, raw_dtype: torch.dtype | None = None) -> list[str]:
    """Makes the converted layers of a model that fully_shard has sharded gather their weights as codes.

    Returns the names of the layers that gather the weight itself, because their present method needs it.

    Call this function on all ranks, after the last fully_shard and before the first forward pass and before the
    optimizer is made. Call it again after model.to(), which makes new local tensors. With one rank nothing is gathered,
    and the model stays as it is.

    raw_dtype is the dtype in which a weight is gathered that is not gathered as codes. The default is the param_dtype
    of the MixedPrecisionPolicy, or the weight's dtype if the policy has none. Gradients have the policy's param_dtype,
    or the weight's dtype, and are reduced in the policy's reduce_dtype.

    Raises ValueError for a model that is not sharded, for a Conv1D or a layer that tensor parallelism divides, and for
    a weight whose rows, or rows of blocks, cannot be divided equally among the ranks.

    >>> nf.gather_codes(nf.QuantLinear(32, 16))
    Traceback (most recent call last):
    ValueError: gather_codes: nothing of the model is sharded; call fully_shard on it first
    """
    from torch.distributed.fsdp import FSDPModule

    params = {}  # the layer's Parameter -> FSDP's record of it
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            params |= {id(p.sharded_param): p for group in groups if group for p in group.fsdp_params}
    if not params:
        raise ValueError("gather_codes: nothing of the model is sharded; call fully_shard on it first")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear) and id(m.weight) in params}
    shards = _Shards(model)
    stacked = [name for name, layer in layers.items() if layer.weight.dim() > 2]  # FSDP divides them by experts
    for name, layer in layers.items():
        fsdp_param = params[id(layer.weight)]
        if name not in stacked and fsdp_param.shard_mesh.size() > 1:
            shards.all.append(_Shard(name, layer, fsdp_param, shards, raw_dtype))
    return [shard.name for shard in shards.all if not gathers_codes(shard.layer)] + stacked


class _Shard:
    """The rows of a layer's weight that this rank holds. `before` and `after` are FSDP's hooks around a gather."""

    def __init__(
        self, name: str, layer: QuantLinear, fsdp_param: Any, shards: "_Shards", raw_dtype: torch.dtype | None
    ):
        self.name, self.layer, self.fsdp_param, self.shards, self.raw_dtype = name, layer, fsdp_param, shards, raw_dtype
        self.group = fsdp_param.shard_mesh.get_group()
        size, rows = fsdp_param.shard_mesh.size(), layer.weight.shape[0]
        block_rows = layer.recipe.output.b.rounding.block_rows if gathers_codes(layer) else 1
        if not layer.stackable or layer.largest is not None:
            raise ValueError(
                f"gather_codes: {name} is a {type(layer).__name__}, and codes are gathered for plain converted layers "
                "alone (a Conv1D's rows are in_features); shard it without codes"
            )
        layer.__class__ = ShardedLinear
        if rows % (size * block_rows):
            blocks = f" in blocks of {block_rows}" if block_rows > 1 else ""
            raise ValueError(
                f"gather_codes: the {rows} rows of {name}{blocks} do not divide by {size} processes; use a number of "
                "processes that divides them, or leave the layer out of fully_shard"
            )
        self.local: torch.Tensor = layer.weight._local_tensor
        self.version: tuple | None = None  # version_now() at the time when the codes were made
        self.codes: Quantized | None = None
        self.tensor_scale = torch.empty((), dtype=torch.float32, device=self.local.device)
        self.gathered_as_codes: bool | None = None  # None before the first gather
        self.local.fsdp_pre_all_gather = functools.partial(self.before)
        self.local.fsdp_pre_all_gather.__signature__ = _SIGNATURE
        self.local.fsdp_post_all_gather = self.after

    def version_now(self) -> tuple:
        """Returns a tuple that changes whenever the weight or its rounding changes.

        A weight changes in a step of any optimizer, or by a change in place of the DTensor or of the local tensor.
        """
        layer, sharded = self.layer, self.fsdp_param.sharded_param
        return self.shards.steps, sharded._version, self.local._version, layer.recipe

    def before(self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, policy: Any) -> tuple:
        """Returns the tensors that this rank sends: the codes and scales of its rows, or the rows themselves."""
        in_backward = torch._C._current_graph_task_id() != -1
        as_codes = self.gathered_as_codes if in_backward else gathers_codes(self.layer)
        if as_codes != self.gathered_as_codes:
            # Codes and rows need buffers of different shapes. FSDP makes the buffers and their Parameter anew if they
            # are missing, so they are removed here.
            self.fsdp_param.all_gather_outputs = []
            vars(self.fsdp_param).pop("_unsharded_param", None)
            self.gathered_as_codes = as_codes
        if not as_codes:
            return (self.local.to(self.raw_dtype or policy.param_dtype or self.local.dtype),), None
        if self.version != self.version_now():
            self.shards.refresh()
        return (self.codes.codes, self.codes.scales), None

    def after(self, outputs: tuple, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        """Gives the layer the buffers. FSDP fills the same tensors at each later gather, so this is done once."""
        if out is not None:
            return None
        columns = self.layer.in_features
        if self.gathered_as_codes:
            square = self.layer.recipe.output.b.rounding.block_rows == BLOCK
            self.layer.gathered = Quantized(*outputs, self.tensor_scale, length=columns, square=square)
        else:
            self.layer.gathered = Quantized(decoded=outputs[0], length=columns, plain=True)
        return torch.full((), torch.nan, dtype=param_dtype, device=self.local.device).as_subclass(_Unread), ()


# FSDP asks for the signature at each gather. Computing it would take longer than all of this module's work.
_SIGNATURE = inspect.signature(_Shard.before.__get__(object()))


class _Shards:
    """All shards of a model."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.all: list[_Shard] = []
        self.steps = 0  # steps of all optimizers, because fused kernels change weights without a new version
        itself = weakref.ref(self)

        def after_step(*_: Any) -> None:
            if (shards := itself()) is not None:
                shards.steps += 1

        register_optimizer_step_post_hook(after_step)

    @torch.no_grad()
    def refresh(self) -> None:
        """Makes the codes of all weights anew. All ranks call this together, because a weight changes on all ranks."""
        shards = [s for s in self.all if gathers_codes(s.layer)]
        # The maximum is taken of the amaxes' bits. The bits of non-negative floats have the order of the floats, and
        # NaN is above all of them, so that the reduction cannot lose a NaN.
        of_layer: dict[QuantLinear, torch.Tensor] = {}
        for ranks in dict.fromkeys(s.group for s in shards):
            of_ranks = [s for s in shards if s.group is ranks]
            amaxes = torch.stack([torch.linalg.vector_norm(s.local, torch.inf) for s in of_ranks])
            amaxes = amaxes.float().view(torch.int32)
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=ranks)
            of_layer |= zip((s.layer for s in of_ranks), amaxes.unbind())
        for group in groups_of(self.model):
            if len(group) > 1 and all(layer in of_layer for layer in group):
                together = torch.stack([of_layer[layer] for layer in group]).amax()
                of_layer |= dict.fromkeys(group, together)
        for shard in shards:
            amax = of_layer[shard.layer].view(torch.float32)
            how = shard.layer.weight_quantization(shard.local.device)._replace(amax=amax)
            if shard.local.shape[0] % TILE_ROWS:
                # Row-major scales can be gathered by joining the ranks' scales. Tiles of 128 rows that a rank's rows
                # do not fill cannot.
                how = how._replace(tiles=False)
            codes = quantize_operand(shard.local, how, keep_codes=True).without_cache()
            shard.tensor_scale.copy_(codes.tensor_scale)
            shard.codes, shard.version = codes, shard.version_now()


class _Unread(torch.Tensor):
    """A tensor of one number that can be seen in any shape. FSDP views it in the weight's shape by as_strided, and gets
    a tensor whose elements all are this number."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        plain = args[0].as_subclass(torch.Tensor)
        if function is torch.as_strided:
            return plain.expand(args[1])
        with torch._C.DisableTorchFunctionSubclass():
            return function(plain, *args[1:], **(kwargs or {}))


def gathers_codes(layer: QuantLinear) -> bool:
    """Whether the layer reads its weight at the moment only as NVFP4 codes that a rank can make from its own rows and
    the tensor's amax. With blocks of 16x16 the rows must be whole rows of blocks."""
    recipe = layer.recipe
    return (
        layer.quantizes and recipe.fixed_weight and not recipe.grad_input.b.raw and recipe.output.b.rounding.has_kernels
    )
