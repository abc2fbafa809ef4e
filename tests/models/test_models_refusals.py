"""What models, attention, the loss and the engine refuse: (call, a word of the one line)."""

import pytest
import torch
from _samples import byte_tokenizer

from nanochat_fp4.cli import UserError
from nanochat_fp4.generation.engine import Engine
from nanochat_fp4.models.cross_entropy import linear_cross_entropy
from nanochat_fp4.models.flash_attention import flash_attn_with_kvcache
from nanochat_fp4.models.gpt import GPT, GPTConfig, config_from_depth
from nanochat_fp4.models.llama import config_from_size
from nanochat_fp4.models.optim import Muon

SHAPE = dict(sequence_len=32, vocab_size=262, n_layer=1, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SL")
MODEL = GPT(GPTConfig(**SHAPE))  # of 320 positions
Q, K, V = torch.zeros(3, 2, 20, 4, 16)
CACHES, LENGTHS = [torch.zeros(2, 8, 4, 16) for _ in range(2)], torch.zeros(2, dtype=torch.int32)
X, WEIGHT, TARGETS = torch.zeros(5, 16), torch.zeros(64, 16), torch.zeros(5, dtype=torch.int64)


def tokens(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.int64)


def generated(prompt: list[int], **how):
    return lambda: next(Engine(MODEL, byte_tokenizer()).generate(prompt, **how))


def matrices(count: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(24, 24)) for _ in range(count)]


REFUSED = [
    (lambda: GPTConfig(**SHAPE | {"n_head": 5}), "head dimension"),
    (lambda: GPTConfig(**SHAPE | {"n_head": 64, "n_kv_head": 64}), "even head dimension"),
    (lambda: GPTConfig(**SHAPE | {"n_kv_head": 3}), "multiple of n_kv_head"),
    (lambda: GPTConfig(**SHAPE | {"window_pattern": "SXL"}), "'SXL' .* S and L"),
    (lambda: GPTConfig(**SHAPE | {"window_pattern": ""}), "S and L"),
    (lambda: config_from_depth(0, vocab_size=10), "at least 1"),
    (lambda: config_from_size("7B", 100), "'7B'.* 30M"),
    (lambda: MODEL(tokens(321)), "320 positions"),
    (lambda: MODEL(tokens(4).to("meta")), "on meta"),
    (generated([]), "prompt is empty"),
    (generated([1], num_samples=0), "at least 1"),
    (generated([1] * 32), "33 tokens"),
    (generated([1] * 32, max_tokens=289), "has 320"),
    (generated([1], temperature=-1), "temperature -1"),
    (lambda: flash_attn_with_kvcache(Q, K, V, *CACHES, LENGTHS, 0), "8 positions and 20"),
    (lambda: flash_attn_with_kvcache(Q, K, V, *(c.bfloat16() for c in CACHES), LENGTHS, 0), "KV cache"),
    (lambda: linear_cross_entropy(X, WEIGHT, TARGETS, 50, 15.0, "max"), "'max'"),
    (lambda: linear_cross_entropy(X, WEIGHT, TARGETS, 50, softcap=0.0), "softcap"),
    (lambda: linear_cross_entropy(X, WEIGHT, TARGETS, 50, softcap=float("nan")), "softcap"),
    (lambda: linear_cross_entropy(X, WEIGHT, TARGETS, 50, softcap=float("inf")), "softcap"),
    (lambda: linear_cross_entropy(X, WEIGHT, TARGETS[:-1], 50), "target"),
    (lambda: linear_cross_entropy(X, WEIGHT, TARGETS, 50, head="fp4"), "'fp4'.*fp8"),
    (lambda: linear_cross_entropy(X, WEIGHT[:50], TARGETS, 50, head="fp8"), "50 x 16"),
    (lambda: Muon([torch.nn.Parameter(torch.zeros(7))]), r"matrices, .*\(7,\)"),
    (lambda: Muon(matrices(2), orthogonalizer="svd"), "unknown orthogonalizer 'svd'"),
]


@pytest.mark.parametrize("call, word", REFUSED)
def test_refused_in_one_line(call, word):
    with pytest.raises((ValueError, UserError), match=word) as e:
        call()
    assert "\n" not in str(e.value)
