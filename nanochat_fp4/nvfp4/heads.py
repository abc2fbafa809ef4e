"""Finds the linear layers of a model with all of their names, and its output heads.

All recipes keep output heads in BF16, because a head's error reaches the loss without any averaging. Heads are
recognized by names, shared parameters and shapes. The order in which the model defines its layers matters only if these
say nothing. The model is not run.
"""

import re
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

# A head and the embedding may differ in their number of rows by this share, because vocabularies are padded.
PADDING = 1 / 8


# Modules that a program puts around a layer, which then has a longer name: those of peft, torch.compile, FSDP1, and
# torch's activation checkpointing.
_WRAPPER = re.compile(
    r"(^|\.)(base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)"
    r"(?=\.|$)"
)


def without_wrappers(name: str) -> str:
    """Returns the name that a layer has in the model itself, without the parts that wrappers around the layer add.

    >>> without_wrappers("model.layers.0.self_attn.q_proj.base_layer")
    'model.layers.0.self_attn.q_proj'
    """
    return _WRAPPER.sub("", name).removeprefix(".")


def is_conv1d(module: nn.Module) -> bool:
    """Whether the module is a Conv1D of transformers: the linear layer of GPT-2, whose weight is (in, out)."""
    return any(f"{c.__module__}.{c.__name__}" == "transformers.pytorch_utils.Conv1D" for c in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Whether convert can replace a layer of this type: nn.Linear, its subclasses and transformers' Conv1D."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def sizes_of(linear: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    return linear.weight.shape[0], linear.weight.shape[1]


def product_shapes(model: nn.Module, tokens: int) -> list[tuple[int, int, int]]:
    """Returns the distinct shapes (M, N, K) of the products (M, K) . (N, K)^T that this number of tokens takes in the
    model's linear layers: forward, dgrad and wgrad. Layers that fused_linear computes as one count as one."""
    sizes = {sizes_of(layer)[::-1] for layer in linear_layers(model)}
    for module in model.modules():
        together = [sizes_of(getattr(module, name)) for name in getattr(module, "fused_linears", ())]
        sizes |= {(sum(size[1] for size in together), together[0][0])} if together else set()
    return sorted({shape for n, k in sizes for shape in ((tokens, n, k), (tokens, k, n), (n, k, tokens))})


def some(names: Iterable[str]) -> str:
    """Returns four of the names as text, and the number of the others."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def linear_layers(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Returns each linear layer of the model with all of its names. A layer that the model holds at several places has
    several names."""
    names: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, path: tuple[str, ...], above: frozenset[nn.Module]) -> None:
        if is_linear(module):
            names.setdefault(module, []).append(".".join(path))
        for name, child in module._modules.items():
            if child is not None and child not in above:  # A module may hold a module that contains it.
                visit(child, (*path, name), above | {child})

    visit(model, (), frozenset({model}))
    return names


def output_heads(model: nn.Module) -> set[nn.Module]:
    """Returns the linear layers that compute the model's output.

    These layers are output heads:

    - a layer with the name lm_head, and a layer that the method get_output_embeddings() of a module returns
    - a layer whose weight is the weight of an embedding. For a layer outside of the blocks, the weight may also belong
      to any other module that is no linear layer, such as an embedding that a model defines by itself.
    - the last layer outside of the blocks, if its shape is an embedding's up to the vocabulary's padding (PADDING).
      A hidden layer can have this shape by chance, so the shape of other layers says nothing.
    - a layer that shares its weight with one of these

    If a model has blocks and none of these layers, its heads are the layers outside of the blocks whose in_features are
    the blocks' width and whose out_features are not, such as a classifier. If there is no such layer either, the head
    is the last layer outside of the blocks that does not lead into them.
    """
    layers = linear_layers(model)
    modules = list(model.modules())
    blocks = blocks_of(model)
    inside = {layer for block in blocks for layer in block.modules() if layer in layers}
    inside |= {m.out_proj for m in modules if isinstance(m, nn.MultiheadAttention)}
    outside = [layer for layer in layers if layer not in inside]
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    looked_up = [m._parameters.values() for m in modules if not is_linear(m) and m not in embeddings]

    heads = {
        layer for layer, names in layers.items() for name in names if without_wrappers(name).split(".")[-1] == "lm_head"
    }
    heads |= {m.get_output_embeddings() for m in modules if hasattr(m, "get_output_embeddings")} & set(layers)
    heads |= {layer for layer in layers if _holds(layer, (table.weight for table in embeddings))}
    heads |= {layer for layer in outside if any(_holds(layer, parameters) for parameters in looked_up)}
    heads |= {layer for layer in outside[-1:] if any(_has_shape_of(layer, table) for table in embeddings)}
    if not heads and blocks:
        heads = _by_width(blocks, outside)
    return heads | {layer for layer in layers if _holds(layer, (head._parameters.get("weight") for head in heads))}


def _by_width(blocks: list[nn.Module], outside: list[nn.Module]) -> set[nn.Module]:
    """Returns the layers outside of the blocks that lead from the blocks' width to another one. The width of a block is
    the in_features of its first layer."""
    widths = {sizes_of(next(iter(linear_layers(block))))[0] for block in blocks}
    reading = [layer for layer in outside if sizes_of(layer)[0] in widths]
    leading_out = {layer for layer in reading if sizes_of(layer)[1] not in widths}
    elsewhere = [layer for layer in outside if layer in reading or sizes_of(layer)[1] not in widths]
    return leading_out or set(elsewhere[-1:])


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of the model. These are the entries of its lists of modules, and other modules of their
    classes. In a model without such lists, they are the modules of any class that the model has several instances of.

    A linear layer by itself is no block, and a module without linear layers is none.
    """
    modules = list(model.modules())
    stacks = [m.children() for m in modules if m is not model and _is_stack(m)]
    blocks = [child for stack in stacks for child in stack]
    kinds = {type(block) for block in blocks} or {kind for kind, n in Counter(map(type, modules)).items() if n > 1}
    blocks += [m for m in modules if type(m) in kinds and not type(m).__module__.startswith("torch.nn.")]
    return [block for block in blocks if not is_linear(block) and linear_layers(block)]


def _is_stack(module: nn.Module) -> bool:
    """Whether this module is a list of blocks. An nn.ModuleDict is one only if its entries have the same class, because
    some models keep all of their parts in an nn.ModuleDict."""
    with_layers = [child for child in module.children() if not is_linear(child) and linear_layers(child)]
    if isinstance(module, nn.ModuleDict):
        return len(with_layers) > 1 and len({type(child) for child in module.children()}) == 1
    return isinstance(module, nn.ModuleList | nn.Sequential) and bool(with_layers)


def _holds(layer: nn.Module, parameters: Iterable[torch.Tensor | None]) -> bool:
    """Whether the layer's weight is one of these parameters. A weight that is computed (a parametrization) is not."""
    weight = layer._parameters.get("weight")
    return weight is not None and any(weight is parameter for parameter in parameters)


def _has_shape_of(layer: nn.Module, table: nn.Module) -> bool:
    width, outputs = sizes_of(layer)
    rows = table.num_embeddings
    return width == table.embedding_dim and abs(outputs - rows) <= PADDING * rows
