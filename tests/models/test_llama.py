"""The Llama-like family: the paper's sizes, the function against a second implementation, training, checkpoints."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from _damage import edit_meta

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.generation.engine import KVCache
from nanochat_fp4.models import llama
from nanochat_fp4.models.llama import Llama, LlamaConfig, config_from_size
from nanochat_fp4.training.load_model import load_model
from scripts import base_train


def make(**changes) -> Llama:
    model = Llama(LlamaConfig(**{"sequence_len": 16, "vocab_size": 100, "n_layer": 2, "n_head": 2, "n_kv_head": 2,
                                 "n_embd": 64, **changes}))  # fmt: skip
    model.init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return model


@pytest.mark.parametrize("size, parameters", [("30M", 30.5e6), ("200M", 203.2e6)])
def test_sizes_are_the_papers(size, parameters):
    """Table 3 names them by their parameters without embeddings; heads have 128 dimensions."""
    config = config_from_size(size, 50304)
    with torch.device("meta"):
        model = Llama(config)
    assert model.num_scaling_params() == pytest.approx(parameters, rel=0.005)
    assert config.head_dim == 128 and config.sequence_len == 512


def reference(model: Llama, idx: torch.Tensor) -> torch.Tensor:
    """Llama 2 in FP64, written for reading: rotations as complex numbers, attention with its full matrix."""
    w = {name: p.detach().double() for name, p in model.named_parameters()}
    heads, dim = model.config.n_head, model.config.head_dim

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def rotated(x):  # (B, T, H, D): dimension i is paired with i + D/2
        pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
        position = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None]
        rate = 10000.0 ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)
        turned = pairs * torch.polar(torch.ones(1, dtype=torch.float64), -position * rate)
        return torch.cat((turned.real, turned.imag), -1)

    x = w["transformer.wte.weight"][idx]
    for i in range(model.config.n_layer):
        p = f"transformer.h.{i}."
        h = norm(x, w[p + "ln_1.weight"])
        q, k, v = ((h @ w[p + f"attn.c_{n}.weight"].T).unflatten(-1, (heads, dim)) for n in "qkv")
        scores = torch.einsum("bqhd,bkhd->bhqk", rotated(q), rotated(k)) / math.sqrt(dim)
        scores = scores.masked_fill(~torch.ones(idx.shape[1], idx.shape[1]).tril().bool(), -torch.inf)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)
        x = x + y @ w[p + "attn.c_proj.weight"].T
        h = norm(x, w[p + "ln_2.weight"])
        gate, up = h @ w[p + "mlp.c_gate.weight"].T, h @ w[p + "mlp.c_fc.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.c_proj.weight"].T
    return (norm(x, w["transformer.ln_f.weight"]) @ w["lm_head.weight"].T)[..., : model.config.vocab_size]


def test_the_function():
    model, idx = make(), torch.randint(100, (2, 16))
    want = reference(model, idx)
    assert torch.allclose(model(idx).double(), want, atol=1e-4)  # FP32 against FP64
    targets = idx.roll(-1, 1)
    loss = F.cross_entropy(want.flatten(0, 1), targets.flatten())
    assert model(idx, targets).item() == pytest.approx(float(loss), rel=1e-5)
    each = model(idx, targets, loss_reduction="none")
    assert each.shape == (32,) and each.mean().item() == pytest.approx(float(loss), rel=1e-5)


def test_the_cache_continues_a_sequence():
    model, idx = make(), torch.randint(100, (1, 12))
    cache = KVCache(
        batch_size=1, num_heads=2, seq_len=12, head_dim=32, num_layers=2, device=idx.device, dtype=torch.float32
    )
    with torch.no_grad():
        parts = [model(idx[:, :5], kv_cache=cache), *(model(idx[:, i : i + 1], kv_cache=cache) for i in range(5, 12))]
        assert torch.allclose(torch.cat(parts, 1), model(idx), atol=1e-5)


@pytest.mark.parametrize("steps", [1, 25, 300])
def test_schedule_is_the_published_one(steps):
    """torch's own, with the arguments of the authors' main.py and their warm-up of ITERATIONS / 10 steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2.0, steps, pct_start=(steps // 10) / steps, cycle_momentum=False, div_factor=1e2,
        final_div_factor=0.1,
    )  # fmt: skip
    for step in range(steps):
        assert llama.lr_multiplier(step, steps) == pytest.approx(one_cycle.get_last_lr()[0] / 2), step
        optimizer.step()
        if step < steps - 1:
            one_cycle.step()
    assert llama.lr_multiplier(steps - 1, steps) == pytest.approx(0.1)


@torch.no_grad()
def test_what_reads_the_same_input_is_one_quantized_layer():
    """As the published c_attn and w12: the weights side by side have one tensor_scale, here that of the larger ones."""
    model = nf.convert(make(n_layer=1), "clover", verbose=False)
    block, x = model.transformer.h[0], torch.randn(16, 1, 64)
    block.attn.c_q.weight *= 1.7
    block.mlp.c_fc.weight *= 1.7

    def one(*layers):
        layer = nf.QuantLinear(64, sum(layer.out_features for layer in layers), method="clover")
        layer.weight.copy_(torch.cat([layer.weight for layer in layers]))
        return layer(x).split([layer.out_features for layer in layers], -1)

    attn, mlp = block.attn, block.mlp
    v = one(attn.c_q, attn.c_k, attn.c_v)[2]  # of a sequence of one token the attention's result is its value
    assert torch.equal(attn(x, (model.cos[:, :1], model.sin[:, :1]), None), attn.c_proj(v))
    gate, up = one(mlp.c_gate, mlp.c_fc)
    assert torch.equal(mlp(x), mlp.c_proj(F.silu(gate) * up))
    assert not torch.equal(v, attn.c_v(x)) and not torch.equal(gate, mlp.c_gate(x))


def test_weight_decay_is_for_matrices():
    (adamw,) = make().setup_optimizers(0.0012)
    decayed, others = adamw.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0) and decayed["betas"] == (0.9, 0.95)
    assert len(decayed["params"]) == 2 * 7 + 1 and len(others["params"]) == 1 + 2 * 2 + 1  # wte and norms
    assert decayed["initial_lr"] == 0.0012


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_clipping(factor):
    model, idx = make(), torch.randint(100, (2, 16))
    model(idx, idx).backward()
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    for p in model.parameters():
        p.grad *= factor / norm
    assert float(model.clip_gradients()) == pytest.approx(factor, rel=1e-4)
    after = math.sqrt(sum(float(p.grad.double().square().sum()) for p in model.parameters()))
    assert after == pytest.approx(min(factor, 1.0), rel=1e-4)


def test_training_checkpoints_and_resuming(tiny_base):
    flags = (
        "--llama=tiny --method=bf16 --max-seq-len=32 --device-batch-size=4 --total-batch-size=128 --eval-tokens=256 "
        "--eval-every=20 --core-metric-every=-1 --sample-every=-1 --device-type=cpu --num-iterations=20"
    ).split()
    base_train.main([*flags, "--save-every=9", "--keep-last=-1"])
    model, _, meta = load_model("base", "cpu", "eval", "llama-tiny_bf16")
    assert isinstance(model, Llama) and meta["model_config"]["family"] == "llama"
    want = {name: p.clone() for name, p in model.named_parameters()}
    assert meta["loop_state"]["numbers"]["val_bpb"] < 0.7 * 3.3  # from 3.3 bits a byte: it learns
    base_train.main([*flags, "--resume-from-step=9", "--keep-last=-1"])
    again = load_model("base", "cpu", "eval", "llama-tiny_bf16")[0]
    assert all(torch.equal(p, want[name]) for name, p in again.named_parameters())
    # A run with another schedule is evaluated but not trained on.
    path = tiny_base / "base_checkpoints" / "llama-tiny_bf16"
    run_config = json.loads((path / "step_000009/meta_000009.json").read_text())["run_config"]
    edit_meta(path, 9, run_config={k: v for k, v in run_config.items() if k != "schedule"}, commit="abc1234")
    with pytest.raises(UserError, match="schedule was None .*'OneCycleLR'"):
        base_train.main([*flags, "--resume-from-step=9"])
    assert load_model("base", "cpu", "eval", "llama-tiny_bf16", step=9)[2]["commit"] == "abc1234"


BAD_RANK = """
import os
from nanochat_fp4.training.step import TrainingStep
from scripts import base_train
real = TrainingStep.micro_batch
def micro_batch(parts, *batch, count=1):
    layer = parts.model.transformer.h[1].mlp.c_proj
    if os.environ["RANK"] == "1":
        layer.register_forward_hook(lambda layer, args, output: output * float("nan"))
    return real(parts, *batch, count=count)
TrainingStep.micro_batch = micro_batch
base_train.main({!r})
"""


def test_bad_numbers_are_named_on_the_rank_that_made_them(run_ranks, tiny_base):
    """The average has carried them to all ranks before they are seen."""
    argv = (
        "--llama=tiny --method=bf16 --max-seq-len=32 --device-batch-size=2 --total-batch-size=128 --eval-every=-1 "
        "--core-metric-every=-1 --sample-every=-1 --device-type=cpu --num-iterations=1 --on-nonfinite=skip"
    ).split()
    run_ranks(BAD_RANK.format(argv), env={"NANOCHAT_BASE_DIR": str(tiny_base)})
    records = read_jsonl(tiny_base / "base_checkpoints" / "llama-tiny_bf16" / "metrics.jsonl")
    assert [r["place"] for r in records if r["event"] == "skip"] == ["output of transformer.h.1.mlp.c_proj (rank 1)"]


def test_fine_tuning_moves_all_parameters_at_one_rate():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(sequence_len=8, vocab_size=64, n_layer=1, n_head=2, n_kv_head=1, n_embd=32))
    model.init_weights()
    before = [p.detach().clone() for p in model.parameters()]
    (adamw,), schedule = model.setup_finetuning({"unembedding_lr": 4e-3, "matrix_lr": 9.0}, 0.5, lambda done: 1 - done)
    with pytest.raises(ValueError, match="AdamW"):
        model.setup_finetuning({"unembedding_lr": 4e-3}, 0.5, lambda done: 1 - done, orthogonalizer="newton_schulz")
    ids = torch.randint(0, 64, (2, 8))
    model(ids, ids).backward()
    assert schedule(3, 0.75) == 0.25
    assert {group["lr"] for group in adamw.param_groups} == {4e-3 * 0.5 * 0.25}
    adamw.step()
    moved = [float((p.detach() - b).abs().max()) for p, b in zip(model.parameters(), before)]
    assert all(0 < m < 6e-4 for m in moved), moved
