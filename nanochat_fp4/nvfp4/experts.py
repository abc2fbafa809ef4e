"""Quantizes experts whose weights are slices of parameters with three dimensions, as in transformers 5 and torchtitan.

Each slice becomes an ExpertLinear, which is a QuantLinear without a parameter of its own. Contexts, methods
and reports therefore treat experts like linear layers. The model keeps its Parameters and its state dict.

Tokens are sorted by expert. Each expert computes GEMMs of its own tokens, with its own codes and tensor scales. The
result has the bits that a QuantLinear with the expert's slice would compute for these tokens. An expert without tokens
computes nothing, and its gradient is zero. One call of torch's grouped_mm for all products was slower on an H200
(dev/LOG.md, 2026-11-24).
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe

# The name of the child that holds a module's ExpertLinears: a ModuleDict from a parameter's name to its Slices.
LINEARS = "expert_linears"


class ExpertLinear(QuantLinear):
    """One expert's slice of a stacked parameter, computed as a QuantLinear.

    experts:    the module that holds the parameter
    parameter:  the name of the parameter, which is (E, out_features, in_features) for E experts
    index:      the number of the expert
    transposed: whether the parameter is (E, in_features, out_features) instead
    """

    def __init__(self, experts: nn.Module, parameter: str, index: int, transposed: bool):
        nn.Module.__init__(self)
        self.experts = (experts,)  # The tuple hides the module, which would otherwise become a child of this one.
        self.parameter, self.index, self.transposed = parameter, index, transposed
        rows, columns = self.weight.shape[1:]
        self.out_features, self.in_features = (columns, rows) if transposed else (rows, columns)
        self.register_parameter("bias", None)
        self.set_recipe(get_recipe("bf16"))

    @property
    def weight(self) -> Tensor:
        """The stacked parameter."""
        return getattr(self.experts[0], self.parameter)

    @property
    def part(self) -> Tensor:
        """The expert's slice, (out_features, in_features), which is a view of the parameter."""
        return self._turned(self.weight[self.index])

    @property
    def matrix(self) -> Tensor:
        return self.part.contiguous()

    def _turned(self, part: Tensor) -> Tensor:
        return part.T if self.transposed else part

    def apply(self, fn: Callable[[nn.Module], None]) -> "ExpertLinear":
        """Does nothing, because nn.Module.apply also visits the module that holds the parameter. Otherwise fn would
        change the whole parameter once for each expert."""
        return self

    def forward(self, x: Tensor, part: Tensor) -> Tensor:
        """Computes the expert: x (M, in_features) gives (M, out_features). part is this expert's slice from
        parameter.unbind(). It is not taken here by indexing, because the gradient of each indexing is as large as the
        whole parameter."""
        return self.outputs(x, (_Slice(self._turned(part).contiguous(), self.weight),))


class Slices(nn.ModuleDict):
    """The ExpertLinears of one stacked parameter, from `slice_name` of each expert to its layer.

    peft finds them with target_modules="all-linear". An adapter around a slice would be merged into all experts, so it
    is refused. The names are no plain numbers, because peft matches the end of a name, and "0" is also a block.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name in vars(self).get("_modules", ()):
            raise ValueError(
                "no adapter can stand around one expert, which is a slice of a stacked parameter; name the layers that "
                'get adapters, for example target_modules=["q_proj", "v_proj"]'
            )
        super().__setattr__(name, value)


def slice_name(index: int) -> str:
    return f"expert_{index}"


class _Slice(NamedTuple):
    """The two attributes of a layer that QuantLinear.outputs reads: the weight as a matrix (out_features, in_features),
    and the Parameter that contains it."""

    matrix: Tensor
    weight: Tensor


class Layout(NamedTuple):
    """How an architecture stores its experts.

    parameters: the names of the stacked parameters
    arguments:  the tuples of names that the arguments of the module's forward have in the supported releases
    forward:    the function that computes the experts. It takes the module and these arguments.
    """

    parameters: tuple[str, ...]
    arguments: set[tuple[str, ...]]
    forward: Callable[..., Tensor]


def _project(experts: nn.Module, parameter: str, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Computes one linear layer of all experts. x (T, K) is sorted by expert, and counts has the number of tokens of
    each expert. Returns (T, N)."""
    linears = list(getattr(experts, LINEARS)[parameter].values())
    bias = getattr(experts, f"{parameter}_bias", None)
    parts = [(e, rows) for e, rows in enumerate(x.split(counts)) if len(rows)]
    weights = getattr(experts, parameter).unbind()
    outputs = [linears[e](rows, weights[e]) for e, rows in parts]
    if bias is not None:
        outputs = [y + bias[e].to(y.dtype) for y, (e, _) in zip(outputs, parts)]
    return torch.cat(outputs) if outputs else x.new_zeros(0, linears[0].out_features)


def _routed(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of experts in transformers. hidden_states is (T, K), top_k_index is (T, k), and top_k_weights is (T,
    k) or (T, E). Returns (T, K)."""
    experts, choices = self.gate_up_proj.shape[0], top_k_index.shape[-1]
    chosen = top_k_index.flatten()
    if top_k_weights.shape != top_k_index.shape:
        top_k_weights = top_k_weights.gather(-1, top_k_index)
    order = chosen.argsort(stable=True)
    # Numbers from E on mark tokens of experts that other processes compute.
    counts = chosen.bincount(minlength=experts)[:experts].tolist()
    order = order[: sum(counts)]
    token = order // choices
    y = _project(self, "gate_up_proj", hidden_states[token], counts)
    if hasattr(self, "_apply_gate"):
        y = self._apply_gate(y)
    else:
        gate, up = y.chunk(2, dim=-1)
        y = self.act_fn(gate) * up
    y = _project(self, "down_proj", y, counts) * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states).index_add_(0, token, y.to(hidden_states.dtype))


def _sorted(self: nn.Module, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
    """The forward of experts in torchtitan. x (T, K) is sorted by expert. Rows beyond the sum of num_tokens_per_expert
    are padding. Returns (T, K)."""
    gate, down, up = getattr(self, LINEARS)
    counts = num_tokens_per_expert.tolist()
    rows = x[: sum(counts)]
    hidden = silu(_project(self, gate, rows, counts)) * _project(self, up, rows, counts)
    y = _project(self, down, hidden, counts).to(x.dtype)
    return torch.cat([y, x.new_zeros(len(x) - len(y), y.shape[-1])])


_SORTED = {("x", "num_tokens_per_expert"), ("x_RD", "num_tokens_per_expert_E")}
LAYOUTS = (
    Layout(
        ("gate_up_proj", "down_proj"),
        {
            ("hidden_states", "top_k_index", "top_k_weights"),
            ("hidden_states", "router_indices", "routing_weights"),  # gpt-oss
        },
        _routed,
    ),
    Layout(("w1", "w2", "w3"), _SORTED, _sorted),
    Layout(("w1_EFD", "w2_EDF", "w3_EFD"), _SORTED, _sorted),  # torchtitan 0.3
)


def layout_of(module: nn.Module) -> Layout | None:
    """Returns the layout of a module that holds experts, or None if the module holds none or its layout is unknown. The
    layout is recognized by the module's parameters and the arguments of its forward.

    A module with further children has no known layout, because the layout's forward would not call these children. They
    may be a norm, or experts that are the identity.
    """
    parameters = dict(module.named_parameters(recurse=False))
    children = {name for name, _ in module.named_children()}
    if any(map(nn.parameter.is_lazy, parameters.values())) or not children <= {"act_fn", LINEARS}:
        return None
    stacked = {name for name, parameter in parameters.items() if parameter.dim() == 3}
    for layout in LAYOUTS:
        known = {*layout.parameters, *(f"{name}_bias" for name in layout.parameters)}
        fits = stacked == set(layout.parameters) and parameters.keys() <= known
        if fits and tuple(inspect.signature(type(module).forward).parameters)[1:] in layout.arguments:
            return layout
    return None


def is_transposed(module: nn.Module) -> bool:
    """Whether the experts of a known layout have weights (E, in_features, out_features)."""
    # The attribute has the first name in transformers 5.0, and the second name in later releases.
    return getattr(module, "is_transposed", getattr(module, "experts_are_transposed", False))


def stacked_linears(module: nn.Module) -> dict[str, list[ExpertLinear]]:
    """Returns the ExpertLinears that read each stacked parameter, by the parameter's name. The dictionary is empty if
    as_quantized_experts has not changed the module."""
    return {name: list(linears.values()) for name, linears in getattr(module, LINEARS, {}).items()}


def as_quantized_experts(model: nn.Module) -> None:
    """Adds an ExpertLinear for each slice to each module of the model that holds experts of a known layout, in place.

    The layers compute in full precision until convert gives them a recipe. Besides, only the module's class changes: it
    becomes a subclass of the class that it had.
    """
    for module in list(model.modules()):
        layout = None if hasattr(module, LINEARS) else layout_of(module)
        if layout is None:
            continue
        transposed = is_transposed(module)
        linears = nn.ModuleDict()
        for name in layout.parameters:
            count = getattr(module, name).shape[0]
            linears[name] = Slices({slice_name(i): ExpertLinear(module, name, i, transposed) for i in range(count)})
        module.add_module(LINEARS, linears)
        module.__class__ = _quantized_class(type(module), layout.parameters)


@functools.cache
def _quantized_class(base: type[nn.Module], parameters: tuple[str, ...]) -> type[nn.Module]:
    """Returns the subclass of `base`, a class of experts, that has the forward of the layout with these parameters."""
    layout = next(layout for layout in LAYOUTS if layout.parameters == parameters)

    def reduce(self: nn.Module, protocol: int) -> tuple:
        _, _, *state = base.__reduce_ex__(self, max(2, protocol))
        # Pickle cannot find this class by its name, so a function makes the class again.
        return _without_state, (base, parameters), *state

    # The number of an expert's tokens changes from step to step, so that compiled code would be compiled again.
    forward = torch.compiler.disable(layout.forward)
    return type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduce})


def _without_state(base: type[nn.Module], parameters: tuple[str, ...]) -> nn.Module:
    """Makes a module of experts without its state, which pickle adds afterwards."""
    cls = _quantized_class(base, parameters)
    return cls.__new__(cls)


def routers(model: nn.Module) -> set[nn.Module]:
    """Returns the linear layers that choose experts. A router is a sibling of the module of experts and has one output
    for each expert."""
    found = set()
    for parent in model.modules():
        children = list(parent.children())
        sizes = {len(parts) for child in children for parts in stacked_linears(child).values()}
        found |= {child for child in children if getattr(child, "out_features", None) in sizes}
    return found
