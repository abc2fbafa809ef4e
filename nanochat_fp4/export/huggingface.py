"""Writes a model as a folder that transformers, and servers built on it, can read: safetensors, with quantized weights
in the format compressed-tensors.

`describe` chooses the class of transformers for a model, and with it the names of the tensors and config.json.
`compressed_tensors` names the codes and scales of a layer in the format. scripts.export writes the tokenizer and the
model card.

The rotary embedding of Llama in transformers turns the pairs (x_i, x_{i + D/2}) in the opposite direction, which is the
same as swapping the two elements. The two halves of each head's rows of q and k are therefore swapped. A row keeps its
codes and scales.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat_fp4.cli import UserError, require
from nanochat_fp4.export.weights import Weights
from nanochat_fp4.files import atomic_write
from nanochat_fp4.models.elementwise import NORM_EPS
from nanochat_fp4.models.gpt import GPT, ROTARY_BASE, SOFTCAP
from nanochat_fp4.models.llama import NORM_EPS as LLAMA_NORM_EPS
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.nvfp4.format import FP8, NVFP4Tensor

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


@dataclass
class Description:
    """A model in the terms of transformers. In this package "our" names are those of this project's models.

    config:    config.json without the entries of the format and the tokenizer
    names:     the name in transformers of each module with a weight, by our name
    swapped:   the modules in which halves of each head's rows are swapped: our name -> the number of rows of a half
    fused:     groups of modules that servers compute as one, by our names
    remote:    whether MODELING_FILE is written beside the weights
    """

    config: dict[str, Any]
    names: dict[str, str]
    swapped: dict[str, int] = field(default_factory=dict)
    fused: list[tuple[str, ...]] = field(default_factory=list)
    remote: bool = False

    def rows(self, name: str, tensor: Tensor) -> Tensor:
        """Puts the rows of our module `name` into transformers' order. The function is its own inverse."""
        half = self.swapped.get(name)
        if not half:
            return tensor
        data = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return data.unflatten(0, (-1, 2, half)).flip(1).flatten(0, 2).view(tensor.dtype)


def describe(model: GPT | Llama) -> Description:
    """Chooses the class of transformers for a model, and describes the model in its terms.

    The class is LlamaForCausalLM for our Llama, transformers' own NanoChatForCausalLM if it computes this GPT, and
    otherwise the one in MODELING_FILE, which is written beside the weights.
    """
    config = model.config
    common = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.n_kv_head,
        "max_position_embeddings": config.sequence_len,
        "tie_word_embeddings": False,
    }
    llama = isinstance(model, Llama)
    names = {ours: theirs for ours, theirs in _OUTSIDE.items() if llama or ours != "transformer.ln_f"}
    for i in range(config.n_layer):
        for ours, theirs in (_LLAMA if llama else _GPT).items():
            names[f"transformer.h.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
    blocks = [f"transformer.h.{i}" for i in range(config.n_layer)]
    fused = [tuple(f"{block}.attn.c_{n}" for n in "qkv") for block in blocks]
    base = float(config.rope_base if llama else ROTARY_BASE)
    rope = {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    if llama:
        fused += [(f"{block}.mlp.c_gate", f"{block}.mlp.c_fc") for block in blocks]
        swapped = {f"{block}.attn.c_{n}": config.head_dim // 2 for block in blocks for n in "qk"}
        hidden = model.transformer.h[0].mlp.c_fc.out_features
        family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": hidden,
                  "head_dim": config.head_dim, "hidden_act": "silu", "rms_norm_eps": LLAMA_NORM_EPS,
                  "attention_bias": False, "mlp_bias": False}  # fmt: skip
        return Description(family | common | rope, names, swapped, fused)
    family = {"intermediate_size": model.transformer.h[0].mlp.c_fc.out_features, "hidden_act": "relu2",
              "rms_norm_eps": NORM_EPS, "final_logit_softcapping": SOFTCAP, "attention_bias": False}  # fmt: skip
    lambdas = {name: getattr(model, name).detach().float().tolist() for name in ("resid_lambdas", "x0_lambdas")}
    windows = [left for left, _ in model.window_sizes]
    if is_hf_compatible(model):
        family |= {"architectures": ["NanoChatForCausalLM"], "model_type": "nanochat"}
        return Description(family | common | rope, names, fused=fused)
    family |= {
        "architectures": ["NanoChatFP4ForCausalLM"],
        "model_type": "nanochat_fp4",
        "auto_map": {
            "AutoConfig": f"{Path(MODELING_FILE).stem}.NanoChatFP4Config",
            "AutoModelForCausalLM": f"{Path(MODELING_FILE).stem}.NanoChatFP4ForCausalLM",
        },
        "windows": windows,
        **lambdas,
    }
    del rope["rope_parameters"]
    return Description(family | common | rope, names, fused=fused, remote=True)


def is_hf_compatible(model: GPT) -> bool:
    """Whether NanoChatForCausalLM of transformers computes the same function. It has only full windows, and none of the
    scalars of this GPT, so these must have no effect."""
    full = all(left >= model.config.sequence_len for left, _ in model.window_sizes)
    return full and bool((model.resid_lambdas == 1).all()) and bool((model.x0_lambdas == 0).all())


# ----------------------------------------------------------------------------------------------------------------------
# Codes and scales as compressed-tensors stores them


def compressed_tensors(tensor: NVFP4Tensor | FP8, input_scale: float | None) -> dict[str, Tensor]:
    """Returns a layer's tensors in the format, by the last part of their names.

    In NVFP4, values are divided by weight_global_scale, and inputs are multiplied by input_global_scale. In FP8, values
    are multiplied by weight_scale, and a server computes an input scale for each token by itself.
    """
    if isinstance(tensor, FP8):
        return {"weight": tensor.codes, "weight_scale": tensor.tensor_scale.reshape(1).clone()}
    parts = {
        "weight_packed": tensor.codes,
        "weight_scale": tensor.scales,
        "weight_global_scale": tensor.tensor_scale.reshape(1).reciprocal(),
    }
    return parts if input_scale is None else parts | {"input_global_scale": torch.tensor([input_scale])}


def quantization_config(
    ignore: list[str], weights_only: bool, four_bits: Sequence[str] = (), eight_bits: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the entry `quantization_config` of config.json.

    ignore:       the names of the linear layers in 16 bits
    weights_only: whether servers compute with inputs in 16 bits
    four_bits, eight_bits: the names of the layers in NVFP4 and of the layers in FP8 with one scale. Without eight_bits,
                  all layers that are not ignored are in NVFP4.
    """
    operand = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True,
               "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}  # fmt: skip
    inputs = None if weights_only else operand | {"dynamic": "local", "observer": "static_minmax"}
    group = {
        "targets": ["Linear"],
        "weights": operand | {"dynamic": False, "observer": "memoryless_minmax"},
        "input_activations": inputs,
        "output_activations": None,
        "format": FOUR_BITS,
    }
    groups, layout = {"group_0": group}, FOUR_BITS
    if eight_bits:
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        eight = {
            "targets": list(eight_bits),
            "weights": number | {"strategy": "tensor", "dynamic": False, "observer": "memoryless_minmax"},
            "input_activations": None if weights_only else number | {"strategy": "token", "dynamic": True},
            "output_activations": None,
            "format": EIGHT_BITS,
        }
        groups, layout = {"group_0": eight}, EIGHT_BITS
        if four_bits:
            groups, layout = groups | {"group_1": group | {"targets": list(four_bits)}}, MIXED
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "config_groups": groups, "ignore": ignore, "kv_cache_scheme": None,
            "global_compression_ratio": None}  # fmt: skip


def write(
    model: GPT | Llama,
    folder: Path,
    dtype: torch.dtype,
    weights: Weights | None = None,
    input_scales: Mapping[str, float] | None = None,
    config: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Writes model.safetensors, config.json and, if it is needed, MODELING_FILE into an existing folder. Returns the
    entries of config.json.

    dtype:        the dtype of the weights that are not quantized
    weights:      the quantized weights, which are written as compressed-tensors. Without them all weights are in dtype.
    input_scales: the input scale of each layer in 4 bits, by our name. Without them inputs stay in 16 bits.
    config:       additional entries of config.json

    Raises UserError for a model with unknown or missing weights, and if safetensors is not installed.
    """
    about = describe(model)
    state = {name.removesuffix(".weight"): t for name, t in model.state_dict().items() if name.endswith(".weight")}
    if missing := sorted(set(state) ^ set(about.names)):
        raise UserError(f"this model has weights that the export does not know or lacks some: {', '.join(missing[:4])}")
    vocab = model.config.vocab_size
    tensors: dict[str, Tensor] = {}
    quantized = weights.tensors if weights is not None else {}
    for ours, theirs in about.names.items():
        if ours in quantized:
            t = quantized[ours]
            codes = about.rows(ours, t.codes)
            if isinstance(t, FP8):
                moved, scale = FP8(codes, t.tensor_scale), None
            else:
                moved = NVFP4Tensor(codes, about.rows(ours, t.scales), t.tensor_scale)
                scale = None if input_scales is None else input_scales[ours]
            parts = compressed_tensors(moved, scale)
            tensors |= {f"{theirs}.{part}": value for part, value in parts.items()}
        else:
            rows = state[ours][:vocab] if ours in ("transformer.wte", "lm_head") else state[ours]
            tensors[f"{theirs}.weight"] = about.rows(ours, rows).to(dtype)
    linears = [ours for ours in about.names if state[ours].ndim == 2 and ours != "transformer.wte"]
    ignore = [about.names[ours] for ours in linears if ours not in quantized]
    save_tensors(folder, tensors)
    written = {**about.config, **dtype_entries(dtype), **config}
    if quantized:
        eight_bits = [about.names[ours] for ours in quantized if ours in weights.eight_bits]
        four_bits = [about.names[ours] for ours in quantized if ours not in weights.eight_bits]
        written["quantization_config"] = quantization_config(ignore, input_scales is None, four_bits, eight_bits)
    atomic_write(folder / "config.json", _json(written))
    if about.remote:
        atomic_write(folder / MODELING_FILE, Path(__file__).with_name(MODELING_FILE).read_bytes())
    return written


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes model.safetensors. Raises UserError if safetensors is not installed."""
    require("safetensors")
    from safetensors.torch import save_file

    on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    save_file(on_cpu, folder / WEIGHTS_FILE, {"format": "pt"})


def dtype_entries(dtype: torch.dtype) -> dict[str, str]:
    """Returns the entries of config.json for the dtype of weights that are not quantized. Releases of transformers
    before 5 read the second one."""
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
