"""Finds the kind of a linear layer of a Transformer from the layer's name and the names of the modules around it.

    attention   the projections of attention: queries, keys, values and the output
    mlp_up      the first matrix of an MLP, and the matrix of its gate
    mlp_down    the second matrix of an MLP

A recipe may treat the kinds differently (Recipe.kinds). The known names are those of this project's GPT and Llama, of
nanochat, and of the models in transformers. A layer with an unknown name has no kind.
"""

import re

KINDS = ("attention", "mlp_up", "mlp_down")

_UP = r"c_fc|c_gate|fc1|fc_in|up_proj|gate_proj|gate_up_proj|w1|w3|lin1|linear1|wi|wi_0|wi_1|dense_h_to_4h"
_DOWN = r"fc2|fc_out|down_proj|w2|lin2|linear2|dense_4h_to_h"
_ATTENTION = r"c_[qkv]|c_attn|[qkvo]_proj|qkv_proj|qkv|Wqkv|in_proj|out_proj|query_key_value|query|key|value|w[qkv]"
_ATTENTION_MODULE = re.compile(r"attn|attention", re.IGNORECASE)
_MLP_MODULE = re.compile(r"mlp|ffn|feed_?forward|experts?|DenseReluDense", re.IGNORECASE)
_BY_NAME = {
    kind: re.compile(pattern) for kind, pattern in (("mlp_up", _UP), ("mlp_down", _DOWN), ("attention", _ATTENTION))
}
# These names do not tell the kind, some because the last matrices of an MLP and of attention share them. The names of
# the modules around the layer decide.
_LAST = re.compile(r"c_proj|wo|dense|proj|output|[qkvo]")

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


def layer_kind(name: str) -> str | None:
    """Returns the kind of the layer with this name, one of KINDS, or None if the kind is not known. The name is the one
    that named_modules gives, also for a layer inside of a wrapper such as an adapter of peft.

    >>> layer_kind("transformer.h.3.attn.c_proj"), layer_kind("model.layers.0.mlp.gate_proj"), layer_kind("lm_head")
    ('attention', 'mlp_up', None)
    """
    *around, own = [part for part in without_wrappers(name).split(".") if not part.isdecimal()] or [""]
    for kind, pattern in _BY_NAME.items():
        if pattern.fullmatch(own):
            return kind
    if not _LAST.fullmatch(own):
        return None
    if around and around[-1] == "intermediate":  # BERT
        return "mlp_up"
    for module in reversed(around):
        if _ATTENTION_MODULE.search(module):
            return "attention"
        if _MLP_MODULE.search(module):
            return "mlp_down"
    return "mlp_down" if around and around[-1] == "output" else None  # BERT
