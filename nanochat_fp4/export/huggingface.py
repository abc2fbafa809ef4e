"""The folder that transformers, and servers built on it, read: safetensors and config.json, with quantized weights in
the format compressed-tensors.

A tensor of a file is a part of the model, but not always under the model's name. `describe` has the file's names for
this project's models, and `places_in` asks transformers for those of its own models. A model of transformers 5 stacks
all experts of a layer in one parameter, and may hold apart what a file holds as one tensor, or the other way round.
transformers converts one form into the other, but codes cannot pass through the conversion. `places_in` therefore
gives it a number for each row of a weight, and the numbers in its result show where each row belongs. save.py and
load.py read the same places in the two directions.

The rotary embedding of Llama in transformers turns the pairs (x_i, x_{i + D/2}) in the opposite direction, which is the
same as swapping the two elements. The two halves of each head's rows of q and k are therefore swapped. A row keeps its
codes and scales.
"""

import json
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanochat_fp4.export.weights import check_values, in_eight_bits
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.elementwise import NORM_EPS
from nanochat_fp4.models.gpt import GPT, ROTARY_BASE, SOFTCAP
from nanochat_fp4.models.llama import NORM_EPS as LLAMA_NORM_EPS
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.nvfp4.experts import LINEARS, is_transposed, layout_of, slice_name
from nanochat_fp4.nvfp4.format import NVFP4Tensor

MODELING_FILE = "modeling_nanochat_fp4.py"
WEIGHTS_FILE = "model.safetensors"
# The names in compressed-tensors for NVFP4, for FP8, and for both in one model.
FOUR_BITS, EIGHT_BITS, MIXED = "nvfp4-pack-quantized", "float-quantized", "mixed-precision"

_LAYER = {"attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj", "attn.c_v": "self_attn.v_proj",
          "attn.c_proj": "self_attn.o_proj"}  # fmt: skip
_LLAMA = _LAYER | {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
                   "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}  # fmt: skip
_GPT = _LAYER | {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
_OUTSIDE = {"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"}


class Rows(NamedTuple):
    """A part of a file's tensor: its rows `there` are the rows `here` of the model's tensor `name`.

    Rows are numbers, int64 (N,), or ... for the whole tensor.
    """

    name: str
    here: Any = ...
    there: Any = ...


Places = Mapping[str, list[Rows]]  # the name of a file's tensor -> its parts


def folder_of(function: str, model: nn.Module, folder: str | Path) -> Path:
    """The folder that a public function was given after the model. Raises ValueError for arguments of other types, and
    for a model whose quantized weights transformers has read, which neither loads nor saves here."""
    if not isinstance(model, nn.Module) or not isinstance(folder, str | Path):
        got = f"{type(model).__name__} and {type(folder).__name__}"
        raise ValueError(f"{function}: got {got}, expected a model and then the folder; swap the two or name both")
    if any(hasattr(layer, "quantization_scheme") for layer in model.modules()):
        problem = f"{function}: compressed-tensors has read this model, so that it was not converted and cannot be"
        raise ValueError(f"{problem}; build the model by from_config, and read the folder with nf.load_quantized")
    return Path(folder).expanduser()


def describe(model: GPT | Llama) -> tuple[dict[str, Any], Places]:
    """Returns config.json, without the entries of the format and the tokenizer, and the places of the file's tensors in
    one of this project's models.

    The class is LlamaForCausalLM for our Llama, transformers' own NanoChatForCausalLM if it computes this GPT, and
    otherwise the one in MODELING_FILE, which is written beside the weights.
    """
    about, llama = model.config, isinstance(model, Llama)
    names = {ours: theirs for ours, theirs in _OUTSIDE.items() if llama or ours != "transformer.ln_f"}
    for i in range(about.n_layer):
        for ours, theirs in (_LLAMA if llama else _GPT).items():
            names[f"transformer.h.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    places = {f"{theirs}.weight": [Rows(f"{ours}.weight")] for ours, theirs in names.items()}
    moved = dict.fromkeys(("transformer.wte", "lm_head"), torch.arange(about.vocab_size))  # It is padded here.
    for ours, layer in model.named_modules() if llama else ():
        if ours.endswith((".c_q", ".c_k")):
            halves = torch.arange(layer.out_features).unflatten(0, (-1, 2, about.head_dim // 2))
            moved[ours] = halves.flip(1).flatten()
    places |= {f"{names[ours]}.weight": [Rows(f"{ours}.weight", rows)] for ours, rows in moved.items()}
    base = float(about.rope_base if llama else ROTARY_BASE)
    config = {
        "vocab_size": about.vocab_size,
        "hidden_size": about.n_embd,
        "intermediate_size": model.transformer.h[0].mlp.c_fc.out_features,
        "num_hidden_layers": about.n_layer,
        "num_attention_heads": about.n_head,
        "num_key_value_heads": about.n_kv_head,
        "max_position_embeddings": about.sequence_len,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
    }
    if llama:
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": about.head_dim,
                  "hidden_act": "silu", "rms_norm_eps": LLAMA_NORM_EPS, "mlp_bias": False}  # fmt: skip
        return config | family, places
    config |= {"hidden_act": "relu2", "rms_norm_eps": NORM_EPS, "final_logit_softcapping": SOFTCAP}
    windows = [left for left, _ in model.window_sizes]
    lambdas = {name: getattr(model, name).detach().float().tolist() for name in ("resid_lambdas", "x0_lambdas")}
    # NanoChatForCausalLM has only full windows, and none of this GPT's scalars, so these must have no effect.
    plain = set(lambdas["resid_lambdas"]) == {1.0} and set(lambdas["x0_lambdas"]) == {0.0}
    if plain and min(windows) >= about.sequence_len:
        return config | {"architectures": ["NanoChatForCausalLM"], "model_type": "nanochat"}, places
    del config["rope_parameters"]
    code = Path(MODELING_FILE).stem
    own = {"AutoConfig": f"{code}.NanoChatFP4Config", "AutoModelForCausalLM": f"{code}.NanoChatFP4ForCausalLM"}
    config |= {"architectures": ["NanoChatFP4ForCausalLM"], "model_type": "nanochat_fp4", "auto_map": own}
    return config | {"head_dim": about.head_dim, "windows": windows, **lambdas}, places


# ----------------------------------------------------------------------------------------------------------------------
# Models of transformers

ROWS = 2**40  # Row r of the tensor with number i has the number i * ROWS + r.


def stacked_experts(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Returns for the name of each parameter that stacks experts, for each expert, the name that the weight of its
    ExpertLinear would have, and its matrix (N, K), which is a view of the parameter."""
    found = {}
    for path, module in model.named_modules():
        layout, before = layout_of(module), f"{path}." if path else ""
        for name in layout.parameters if layout else ():
            whole = getattr(module, name).mT if is_transposed(module) else getattr(module, name)
            linears = f"{before}{LINEARS}.{name}"
            found[before + name] = {f"{linears}.{slice_name(i)}.weight": part for i, part in enumerate(whole)}
    return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors that places name: parameters, persistent buffers, and the matrices of experts."""
    stacks = stacked_experts(model).values()
    return model.state_dict(keep_vars=True) | {name: t for matrices in stacks for name, t in matrices.items()}


def as_in_checkpoints(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns a state dict with the names and shapes that the tensors have in a checkpoint. Before transformers 5 these
    are the same as in the model."""
    loading = sys.modules.get("transformers.core_model_loading")
    if loading is None or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return state
    return loading.revert_weight_conversion(model, state)


def places_in(model: nn.Module) -> Places:
    """Returns the places of a checkpoint's tensors in a model of transformers, or of any other project.

    An expert's matrix has the name that the weight of its ExpertLinear would have. A tensor of the checkpoint that does
    not consist of rows of the model's tensors has no place.
    """
    experts, tensors = stacked_experts(model), tensors_of(model)
    names, numbered = [*tensors], {}
    for i, (name, tensor) in enumerate(tensors.items(), 1):
        rows = torch.arange(len(tensor) if tensor.dim() else 1) + i * ROWS
        numbered[name] = rows.view(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() else rows[0]
    for name, matrices in experts.items():
        whole = torch.stack([numbered.pop(matrix) for matrix in matrices])
        numbered[name] = whole.mT if is_transposed(model.get_submodule(name.rpartition(".")[0])) else whole
    places: dict[str, list[Rows]] = {}
    for theirs, value in as_in_checkpoints(model, numbered).items():
        same = [name for name in experts if torch.equal(numbered[name], value)]
        if same or not value.numel() or value.numel() > value.shape[:1].numel() or int(value.min()) < ROWS:
            if same:  # Experts that the checkpoint stacks as the model does.
                places[theirs] = [Rows(same[0])]
            continue
        numbers = value.flatten()
        sources = numbers // ROWS
        for i in sources.unique().tolist():
            there = (sources == i).nonzero().flatten()
            name, here = names[i - 1], numbers[there] % ROWS
            size = tensors[name].shape[:1].numel()
            whole = len(here) == len(numbers) == size and bool((here.diff() == 1).all())
            places.setdefault(theirs, []).append(Rows(name) if whole else Rows(name, here, there))
    return places


# ----------------------------------------------------------------------------------------------------------------------
# Writing


def compressed_tensors(layer: str, weight: NVFP4Tensor, input_scale: float | None) -> dict[str, Tensor]:
    """Returns a layer's tensors in the format, by their names.

    In NVFP4, values are divided by weight_global_scale, and inputs are multiplied by input_global_scale. In FP8, values
    are multiplied by weight_scale, and a server computes an input scale for each token by itself.
    """
    scale = weight.tensor_scale.reshape(1)
    if in_eight_bits(weight):
        parts = {"weight": weight.codes, "weight_scale": scale.clone()}
    else:
        parts = {"weight_packed": weight.codes, "weight_scale": weight.scales, "weight_global_scale": 1 / scale}
        parts |= {} if input_scale is None else {"input_global_scale": torch.tensor([input_scale])}
    return {f"{layer}.{part}": value for part, value in parts.items()}


def quantization_config(
    ignore: list[str], input_scales: Mapping[str, float] | None, layers: Mapping[bool, Collection[str]]
) -> dict[str, Any]:
    """Returns the entry `quantization_config` of config.json.

    ignore:       the names of the linear layers in 16 bits
    input_scales: as in `write`
    layers:       the names of the layers in NVFP4 (False), and of the layers in FP8 with one scale (True)
    """
    operand = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
               "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}  # fmt: skip
    number = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    rounded = {"dynamic": False, "observer": "memoryless_minmax"}
    by_token = None if input_scales is None else number | {"strategy": "token", "dynamic": True}
    static = operand | {"dynamic": "local", "observer": "static_minmax"} if input_scales else None
    kinds = (EIGHT_BITS, layers[True], number, by_token), (FOUR_BITS, layers[False], operand, static)
    groups = [
        {
            "targets": list(names) if layers[True] else ["Linear"],
            "weights": weights | rounded,
            "input_activations": inputs,
            "format": layout,
        }
        for layout, names, weights, inputs in kinds
        if names
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": MIXED if len(groups) > 1 else groups[0]["format"],
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": ignore,
    }


def write(
    model: nn.Module,
    folder: Path,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    places: Places,
    plain: Mapping[str, Tensor],
    weights: Mapping[str, NVFP4Tensor],
    input_scales: Mapping[str, float] | None = None,
    in_fp32: Collection[str] = (),
) -> None:
    """Writes model.safetensors and config.json into an existing folder.

    config:       config.json without the entries of the format
    dtype:        the dtype of the tensors that are not quantized. config.json says BF16 if others have 4 bits.
    plain:        these tensors, by their names in the file
    weights:      the quantized weights, by the model's names of the layers
    input_scales: the input scale of each layer in 4 bits, by the same names. If there are none, servers compute those
                  layers with inputs in 16 bits. With None they do so in layers in FP8, too, whose inputs otherwise have
                  a scale for each token that needs no measurement.
    in_fp32:      patterns of the model's names of tensors that stay in FP32

    Raises ValueError for values that dtype cannot hold. Needs the package safetensors.
    """
    from safetensors.torch import save_file

    # transformers compares with the names of its modules, and other readers with those of the file.
    own = isinstance(model, GPT | Llama)
    modules = dict(model.named_modules())
    left = (name for name, module in modules.items() if isinstance(module, nn.Linear) and name not in weights)
    ignore = dict.fromkeys(() if own else left)
    layers: dict[bool, dict[str, None]] = {False: {}, True: {}}  # whether in 8 bits -> names
    tensors: dict[str, Tensor] = {}
    kept = re.compile("|".join(pattern.replace("*", ".*") for pattern in in_fp32) or "(?!)")
    for theirs, [(name, rows, _), *_] in places.items():
        layer, ours = (n.removesuffix(".weight") for n in (theirs, name))
        if ours in weights:
            weight = rows_of(weights[ours], rows)
            tensors |= compressed_tensors(layer, weight, (input_scales or {}).get(ours))
            layers[in_eight_bits(weight)] |= dict.fromkeys((layer,) if own else (layer, ours))
    for theirs, value in plain.items():
        layer, ours = theirs.removesuffix(".weight"), places[theirs][0].name if theirs in places else theirs
        written = torch.float32 if kept.search(ours) else dtype
        check_values({theirs: value}, written)
        tensors[theirs] = value.to(written) if value.is_floating_point() else value
        if value.dim() == 2 and layer != theirs and not isinstance(modules.get(ours[:-7]), nn.Embedding):
            ignore[layer] = None
    on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(on_cpu, folder / WEIGHTS_FILE, {"format": "pt"})
    # transformers decodes 4-bit codes to BF16, and multiplies them with inputs in the dtype that config.json says.
    name = str(torch.bfloat16 if layers[False] else dtype).removeprefix("torch.")
    config = {**config, "dtype": name, "torch_dtype": name}  # Releases of transformers before 5 read the second one.
    if weights:
        config["quantization_config"] = quantization_config([*ignore], input_scales, layers)
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")


def write_own(
    model: GPT | Llama,
    folder: Path,
    dtype: torch.dtype,
    weights: Mapping[str, NVFP4Tensor] = {},
    input_scales: Mapping[str, float] | None = None,
    config: Mapping[str, Any] = {},
) -> None:
    """Writes one of this project's models as `write` does, and MODELING_FILE where transformers needs it. config has
    additional entries of config.json."""
    about, places = describe(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name.endswith(".weight")}
    if unknown := ", ".join(sorted(set(state) ^ {rows.name for [rows] in places.values()})):
        raise ValueError(f"the export does not know {unknown}, or the model lacks it")
    plain = {theirs: state[n][rows] for theirs, [(n, rows, _)] in places.items() if n[:-7] not in weights}
    write(model, folder, {**about, **config}, dtype, places, plain, weights, input_scales)
    if "auto_map" in about:
        atomic_write(folder / MODELING_FILE, Path(__file__).with_name(MODELING_FILE).read_bytes())


def rows_of(weight: NVFP4Tensor, rows: Any) -> NVFP4Tensor:
    """Returns some rows of a quantized weight. Tensors of 8-bit floats are indexed as bytes."""
    codes, scales = (t.view(torch.uint8)[rows].view(t.dtype) for t in (weight.codes, weight.scales))
    return NVFP4Tensor(codes, scales, weight.tensor_scale)
