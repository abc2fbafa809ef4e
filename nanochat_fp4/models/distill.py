"""Distillation: a model in 4 bits learns the next-token distribution of a teacher (QAD).

The logits of neither model ever stand whole. A hook at the output head takes the head's input and lets the head compute
nothing. linear_kl_divergence then multiplies by both heads, some tokens at a time.
"""

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanochat_fp4.errors import UserError
from nanochat_fp4.models.cross_entropy import linear_kl_divergence
from nanochat_fp4.models.gpt import GPT, SOFTCAP
from nanochat_fp4.models.llama import NO_SOFTCAP
from nanochat_fp4.nvfp4.contexts import full_precision
from nanochat_fp4.nvfp4.convert import ADAPTER_PARTS, linear_layers, output_heads

# Entries of transformers' configs that scale logits after the head.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")


class _Head(NamedTuple):
    linear: nn.Module
    vocab_size: int
    softcap: float


def _head(model: nn.Module) -> _Head:
    """The output head. Raises UserError unless a soft cap is all that follows the head's product."""
    linears = linear_layers(model)
    names = output_heads(model, linears)
    if len(names) != 1:
        raise UserError(f"distillation_loss: {type(model).__name__} has {len(names)} output heads, expected one")
    (name,) = names
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    if linears[name].bias is not None or any(getattr(c, k, None) not in (None, 1) for c in configs for k in _SCALES):
        raise UserError(f"distillation_loss: {name} has a bias, or its logits are scaled; only a soft cap is known")
    softcap = next((c.final_logit_softcapping for c in configs if getattr(c, "final_logit_softcapping", None)), None)
    if any(isinstance(m, GPT) for m in model.modules()):
        softcap = SOFTCAP
    sizes = [c.vocab_size for c in configs if hasattr(c, "vocab_size")] or [linears[name].out_features]
    return _Head(linears[name], sizes[0], softcap or NO_SOFTCAP)


def _input_of(head: nn.Module, model: nn.Module, ids: Tensor, inputs: dict[str, Any]) -> Tensor:
    """The head's input (B, T, D) in the model's forward pass."""
    seen = []

    def look(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        seen.append(args[0])
        return args[0][..., :0, :]  # no token: the head makes no logits

    hook = head.register_forward_pre_hook(look)
    try:
        model(ids, **inputs)
    finally:
        hook.remove()
    return seen[0]


def distillation_loss(
    model: nn.Module, teacher: nn.Module, ids: Tensor, targets: Tensor | None = None, **inputs: Any
) -> Tensor:
    """The mean KL divergence of the model's next token from the teacher's, in nats, FP32 (); it has a gradient.

    model, teacher: causal language models with one vocabulary: the project's, of transformers, or any module that makes
                    its logits by a last linear layer without bias. The teacher gets no gradient; call its eval().
                    If all but adapters is frozen, the teacher may be the model itself. It then computes in full
                    precision, without peft's adapters.
    ids:            (B, T) int64
    targets:        (B, T) int64. A token with a negative target does not count. None: all tokens count
    inputs:         further arguments of both, as attention_mask

    Logits are made and dropped some tokens at a time. Raises UserError for a model whose logits are scaled or biased,
    another vocabulary, and a model that is its own teacher although its weights are trained.

    >>> import copy
    >>> from collections import OrderedDict
    >>> layers = {"embed": torch.nn.Embedding(50, 32), "block": torch.nn.Linear(32, 32)}
    >>> layers["lm_head"] = torch.nn.Linear(32, 50, bias=False)
    >>> teacher = torch.nn.Sequential(OrderedDict(layers))
    >>> model = nf.convert(copy.deepcopy(teacher), verbose=False)
    >>> loss = nf.distillation_loss(model, teacher, torch.arange(20).view(2, 10))
    >>> loss.backward()
    >>> bool(loss > 0)
    True
    """
    wanted, head = _head(teacher), _head(model)
    if wanted.vocab_size != head.vocab_size:
        raise UserError(
            f"distillation_loss: the teacher has {wanted.vocab_size} tokens and the model {head.vocab_size}; "
            "take a teacher with the same tokenizer"
        )
    itself = contextlib.nullcontext()
    if teacher is model:
        if any(p.requires_grad and not ADAPTER_PARTS.intersection(n.split(".")) for n, p in model.named_parameters()):
            raise UserError(
                "distillation_loss: the model is its own teacher, but weights besides adapters are trained; give a "
                "copy of the model as the teacher"
            )
        itself = getattr(model, "disable_adapter", contextlib.nullcontext)()
    with torch.no_grad(), full_precision(teacher) if teacher is model else itself, itself:
        teacher_x = _input_of(wanted.linear, teacher, ids, inputs)
    x = _input_of(head.linear, model, ids, inputs)
    return linear_kl_divergence(
        x,
        head.linear.weight,
        teacher_x,
        wanted.linear.weight,
        torch.zeros_like(ids) if targets is None else targets,
        head.vocab_size,
        head.softcap,
        wanted.softcap,
    )
