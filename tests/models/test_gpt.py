"""
The GPT is nanochat's of revision f5425245f: same state dict, function and sizes; and it keeps little for backward.

What is nanochat's is pinned here as data (keys, shapes, parameter counts, FLOPs, learning rates were read off the real
one), and the function is compared with a second implementation, written for reading, in double precision.
"""

import functools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import nanochat_fp4 as nf
from nanochat_fp4.models.elementwise import NORM_EPS, apply_rotary_emb, norm
from nanochat_fp4.models.gpt import GPT, RECOMPUTE, GPTConfig, autocast, compile_layers, config_from_depth
from nanochat_fp4.nvfp4.philox import new_seed

TINY = dict(sequence_len=24, vocab_size=300, n_layer=5, n_head=4, n_kv_head=2, n_embd=64, window_pattern="SSSL")


def make(seed=0, **changes):
    """A tiny model with weights that are nowhere zero, so that every path contributes."""
    model = GPT(GPTConfig(**{**TINY, **changes}))
    model.init_weights()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator)
    return model


def tokens(batch, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY["vocab_size"], (batch, length), generator=generator)


# ----------------------------------------------------------------------------------------------------------------------
# Interchange with nanochat


def test_state_dict_has_nanochats_keys_and_shapes():
    width, kv = 64, 32
    expected = {
        "resid_lambdas": (5,),
        "x0_lambdas": (5,),
        "transformer.wte.weight": (320, width),  # 300 padded to a multiple of 64
        "lm_head.weight": (320, width),
    }
    for i in range(5):
        expected |= {
            f"transformer.h.{i}.attn.c_q.weight": (width, width),
            f"transformer.h.{i}.attn.c_k.weight": (kv, width),
            f"transformer.h.{i}.attn.c_v.weight": (kv, width),
            f"transformer.h.{i}.attn.c_proj.weight": (width, width),
            f"transformer.h.{i}.mlp.c_fc.weight": (4 * width, width),
            f"transformer.h.{i}.mlp.c_proj.weight": (width, 4 * width),
        }
    state = make().state_dict()
    assert {k: tuple(v.shape) for k, v in state.items()} == expected
    assert all(v.dtype == torch.float32 for v in state.values())


def test_init_weights_draws_in_nanochats_order():
    model = GPT(GPTConfig(**TINY))
    torch.manual_seed(7)
    model.init_weights()
    torch.manual_seed(7)
    state = model.state_dict()
    assert torch.equal(state["transformer.wte.weight"], torch.empty(320, 64).normal_(0, 1))
    assert torch.equal(state["lm_head.weight"], torch.empty(320, 64).normal_(0, 0.001))
    bound = math.sqrt(3) / math.sqrt(64)
    for i in range(5):
        for name, rows in (("attn.c_q", 64), ("attn.c_k", 32), ("attn.c_v", 32), ("mlp.c_fc", 256)):
            drawn = torch.empty(rows, 64).uniform_(-(3**0.5) * 64**-0.5, 3**0.5 * 64**-0.5)
            assert torch.equal(state[f"transformer.h.{i}.{name}.weight"], drawn)
            assert drawn.abs().max() <= bound
        assert not state[f"transformer.h.{i}.attn.c_proj.weight"].any()
        assert not state[f"transformer.h.{i}.mlp.c_proj.weight"].any()
    assert torch.equal(state["resid_lambdas"], torch.ones(5)) and not state["x0_lambdas"].any()


def test_the_first_loss_does_not_depend_on_the_scalars_so_rounding_decides_the_signs_of_their_first_step():
    model = GPT(GPTConfig(**TINY)).double()
    model.init_weights()
    ids = torch.arange(48).view(2, 24)
    loss = model(ids, ids.roll(1))
    loss.backward()
    assert model.x0_lambdas.grad.abs().max() < 1e-7 < model.lm_head.weight.grad.abs().max()
    with torch.no_grad():
        model.x0_lambdas.fill_(0.5)
        assert torch.allclose(model(ids, ids.roll(1)), loss, rtol=1e-6)
        model.x0_lambdas.fill_(-0.5)  # The stream of five layers has the other sign.
        assert not torch.allclose(model(ids, ids.roll(1)), loss, rtol=1e-5)


def test_meta_device_then_memory_then_weights():
    with torch.device("meta"):
        model = GPT(GPTConfig(**TINY))
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_weights()
    torch.manual_seed(3)
    direct = GPT(GPTConfig(**TINY))
    torch.manual_seed(3)
    direct.init_weights()
    for name, value in model.state_dict().items():
        assert torch.equal(value, direct.state_dict()[name]), name
    assert torch.equal(model.cos, direct.cos) and model.cos.dtype == torch.bfloat16


# Read off nanochat f5425245f at sequence length 2048 and vocabulary 65536.
@pytest.mark.parametrize(
    "depth, width, heads, params, flops",
    [
        (20, 1280, 10, 560_988_200, 3_255_828_480),
        (32, 2048, 16, 1_879_048_256, 11_475_615_744),
    ],
)
def test_sizes_of_nanochats_depths(depth, width, heads, params, flops):
    config = config_from_depth(depth, vocab_size=65536)
    assert (config.n_embd, config.n_head, config.n_kv_head, config.head_dim) == (width, heads, heads, 128)
    with torch.device("meta"):
        model = GPT(config)
    assert model.num_scaling_params() == params
    assert model.estimate_flops() == flops
    assert config_from_depth(13, vocab_size=65536).n_embd == 896  # an odd depth keeps whole heads of 128


def test_windows():
    model = make()
    assert model.window_sizes == [(12, 0), (12, 0), (12, 0), (24, 0), (24, 0)]  # SSSL tiled, the last layer long
    assert make(window_pattern="sl").window_sizes == [(12, 0), (24, 0), (12, 0), (24, 0), (24, 0)]


def test_optimizer_groups_are_nanochats():
    model = make(n_embd=192, n_head=6, n_kv_head=6)
    adamw, muon = model.setup_optimizers(weight_decay=0.1)
    # nanochat: rates for width 768 times (192/768)^-0.5 = 2
    expected = [(320, 192, 0.008), (320, 192, 0.4), (5, 0.005), (5, 0.5)]
    assert [(*g["params"][0].shape, g["lr"]) for g in adamw.param_groups] == expected
    assert adamw.param_groups[0]["params"][0] is model.lm_head.weight
    assert adamw.param_groups[2]["params"][0] is model.resid_lambdas
    for group in adamw.param_groups:
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.95), 1e-10, 0.0)
    shapes = [(tuple(g["params"][0].shape), len(g["params"])) for g in muon.param_groups]
    assert shapes == [((192, 192), 20), ((192, 768), 5), ((768, 192), 5)]
    for group in muon.param_groups:
        assert (group["lr"], group["momentum"], group["weight_decay"], group["beta2"]) == (0.02, 0.95, 0.1, 0.95)
    assert all(g["initial_lr"] == g["lr"] for opt in (adamw, muon) for g in opt.param_groups)


# ----------------------------------------------------------------------------------------------------------------------
# The function


def reference_logits(state, config, ids):
    """Logits in double precision, one sequence and one head at a time, from the definition."""
    w = {k: v.double() for k, v in state.items()}
    head_dim, length = config.n_embd // config.n_head, len(ids)

    def rms(x):
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()

    freq = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * freq
    cos, sin = angle.cos().bfloat16().double(), angle.sin().bfloat16().double()

    def rotate(x):
        a, b = x[:, : head_dim // 2], x[:, head_dim // 2 :]
        return torch.cat((a * cos + b * sin, b * cos - a * sin), 1)

    x = x0 = rms(w["transformer.wte.weight"][ids])
    for i in range(config.n_layer):
        x = w["resid_lambdas"][i] * x + w["x0_lambdas"][i] * x0
        layer = {k.split(".", 3)[3]: v for k, v in w.items() if k.startswith(f"transformer.h.{i}.")}
        short = config.window_pattern[i % len(config.window_pattern)] == "S" and i < config.n_layer - 1
        window = config.sequence_len // (2 if short else 1)
        h, heads = rms(x), []
        for head in range(config.n_head):
            shared = head // (config.n_head // config.n_kv_head)
            q, k, v = (
                h @ layer[f"attn.{name}.weight"][n * head_dim : (n + 1) * head_dim].T
                for name, n in (("c_q", head), ("c_k", shared), ("c_v", shared))
            )
            q, k = rms(rotate(q)), rms(rotate(k))
            out = torch.zeros(length, head_dim, dtype=torch.float64)
            for t in range(length):
                first = max(0, t - window)
                weights = torch.softmax(k[first : t + 1] @ q[t] / math.sqrt(head_dim), 0)
                out[t] = weights @ v[first : t + 1]
            heads.append(out)
        x = x + torch.cat(heads, 1) @ layer["attn.c_proj.weight"].T
        hidden = (rms(x) @ layer["mlp.c_fc.weight"].T).clamp_min(0).square()
        x = x + hidden @ layer["mlp.c_proj.weight"].T
    logits = rms(x) @ w["lm_head.weight"][: config.vocab_size].T
    return 15 * torch.tanh(logits / 15)


@pytest.mark.parametrize("length", [1, 40])  # 40: longer than sequence_len, where even L layers are windows
def test_logits_are_those_of_the_definition(length):
    model = make()
    ids = tokens(2, length)
    logits = model(ids)
    assert logits.shape == (2, length, 300) and logits.dtype == torch.float32
    expected = reference_logits(model.state_dict(), model.config, ids[1])
    # FP32 against FP64 through five layers; logits are of size 1 to 10.
    torch.testing.assert_close(logits[1].double(), expected, atol=2e-5, rtol=0)


def test_loss_is_the_cross_entropy_of_the_logits():
    model, ids = make(), tokens(2, 24)
    targets = ids.roll(-1, 1)
    targets[:, -1] = -1
    logits = model(ids).flatten(0, 1)
    for reduction in ("mean", "sum", "none"):
        expected = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)
        torch.testing.assert_close(model(ids, targets, loss_reduction=reduction), expected)


def test_gradients_are_those_of_plain_autograd():
    """Against the same model with everything that saves memory taken out."""
    model, ids = make(), tokens(2, 24)
    targets = ids.roll(-1, 1)
    model(ids, targets).backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    for block in model.transformer.h:
        block.mlp.forward = lambda x, mlp=block.mlp: mlp.c_proj(F.relu(mlp.c_fc(x)).square())
    F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    for name, p in model.named_parameters():
        # FP32 sums in another order.
        assert (got[name] - p.grad).norm() <= 1e-5 * p.grad.norm(), name


def test_norm_keeps_the_dtype_under_autocast():
    x = torch.randn(3, 8)
    with autocast("cpu", torch.bfloat16):
        assert norm(x.bfloat16()).dtype == torch.bfloat16
        assert norm(x).dtype == torch.float32
    # A row of a thousandth is normalized with FP32's epsilon in BF16 too (2^-8 of rounding).
    small = norm(torch.full((1, 8), 1e-3, dtype=torch.bfloat16))
    torch.testing.assert_close(small.float(), norm(torch.full((1, 8), 1e-3)), rtol=2**-7, atol=0)


def test_autocast_computes_in_bf16_and_returns_fp32():
    model, ids = make(), tokens(2, 24)
    exact, loss = model(ids), model(ids, ids.roll(-1, 1))
    with autocast("cpu", torch.bfloat16):
        logits = model(ids)
        assert logits.dtype == torch.float32
        # Five layers of BF16 products on logits of size up to 10: some percent, but not nothing.
        assert 1e-4 < (logits - exact).norm() / exact.norm() < 0.05
        assert abs(model(ids, ids.roll(-1, 1)) - loss) < 0.05
    with autocast("cpu"):
        assert torch.equal(model(ids), exact)


# ----------------------------------------------------------------------------------------------------------------------
# What is kept for the backward pass, and torch.compile


def saved_bytes(model, function):
    """{shape: number of distinct storages} and bytes of the activations that autograd keeps during function()."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            storages[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = function()
    return list(storages.values()), result


def test_quantized_relu_squared_keeps_eight_bits():
    """And c_proj the codes of its input: nothing of the hidden layer is kept in 16 or 32 bits."""
    model, ids = nf.convert(make(), "clover", verbose=False), tokens(2, 24)
    saved, _loss = saved_bytes(model, lambda: model(ids, ids.roll(-1, 1)))
    hidden = [t for t in saved if t.numel() == 2 * 24 * 4 * 64]
    assert len(hidden) == model.config.n_layer and all(t.dtype == torch.uint8 for t in hidden)
    saved, _logits = saved_bytes(model, lambda: torch.no_grad()(model)(ids))
    assert not saved


@pytest.mark.parametrize("dtype, tolerance, keep_output", [(torch.float32, 1e-6, True), (torch.bfloat16, 6e-3, False)])
def test_gradient_of_norm(dtype, tolerance, keep_output):
    """FP32: sums in another order. BF16: y (2^-9) and the gradient (2^-9) are rounded."""
    x, grad = (3 * torch.randn(6, 5, 32)).to(dtype), torch.randn(6, 5, 32).to(dtype)
    x[0, 0] *= 1e-6  # where the epsilon counts
    leaf = x.clone().requires_grad_()
    y = norm(leaf, keep_output)
    torch.testing.assert_close(y, F.rms_norm(x, (32,), eps=NORM_EPS), rtol=1e-6, atol=0)
    (got,) = torch.autograd.grad(y, leaf, grad)
    exact = x.double().requires_grad_()
    (want,) = torch.autograd.grad(F.rms_norm(exact, (32,), eps=NORM_EPS), exact, grad.double())
    assert got.dtype == y.dtype == dtype
    assert ((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max() < tolerance  # of each row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_the_rotation(dtype):
    x, grad = (torch.randn(2, 24, 3, 16, dtype=dtype) for _ in range(2))
    cos, sin = make().cos[:, :24], make().sin[:, :24]
    x.requires_grad_()
    (got,) = torch.autograd.grad(apply_rotary_emb(x, cos, sin), x, grad)
    a, b = x.chunk(2, dim=-1)
    (want,) = torch.autograd.grad(torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1), x, grad)
    assert torch.equal(got, want)


def test_queries_and_keys_are_kept_once():
    model, ids = make(n_kv_head=4, window_pattern="L"), tokens(2, 24)
    saved, _loss = saved_bytes(model, lambda: model(ids, ids.roll(-1, 1)))
    heads = [t for t in saved if t.shape[-1] == 16 and t.numel() == 2 * 24 * 64]
    assert len(heads) == 3 * model.config.n_layer  # queries, keys and values; what attention gives is c_proj's input
    assert all(t.untyped_storage().nbytes() == 4 * t.numel() for t in heads)  # none is a view of something larger


@pytest.mark.parametrize("method", ["bf16", "clover", "nvidia", "clover_late", "fp8"])
def test_recomputing_changes_no_bit_and_keeps_less(method):
    model, ids = nf.convert(make(n_layer=3), method, verbose=False), tokens(2, 24)
    model.lm_head.precision = "fp8" if method in ("clover", "fp8") else "bf16"
    results, kept = {}, {}
    for model.recompute in ("none", "mlp", "all", "codes", "codes-mlp"):
        model.zero_grad()
        torch.manual_seed(4)
        saved, loss = saved_bytes(model, lambda: model(ids, ids.roll(-1, 1)))
        kept[model.recompute] = sum(t.untyped_storage().nbytes() for t in saved)
        loss.backward()
        results[model.recompute] = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    for name in ("mlp", "all", "codes"):
        assert all(torch.equal(a, b) for a, b in zip(results[name], results["none"])), name
    assert kept["all"] < 0.6 * kept["mlp"] < 0.6 * 0.9 * kept["none"]
    assert kept["codes-mlp"] <= kept["codes"] < 0.75 * kept["none"]
    assert torch.equal(results["codes-mlp"][0], results["none"][0])


@pytest.mark.parametrize("method, recompute", [("clover", "none"), ("nvidia", "none"), ("nvidia", "codes-mlp")])
def test_blocks_in_reentrant_checkpoints_draw_as_they_do_without(method, recompute):
    """Such a checkpoint puts the generator back before it runs a block again. A block that draws more in the second run
    than in the first one repeats the next block's random numbers."""
    model, ids = nf.convert(make(n_layer=2), method, verbose=False), tokens(2, 24)
    model.recompute = recompute

    def checkpointed(block, *args):
        return checkpoint(functools.partial(type(block).forward, block), *args, use_reentrant=True)

    states = []
    for layer in (type(model.transformer.h[0]).forward, checkpointed):
        torch.manual_seed(4)
        model(ids, ids.roll(-1, 1), layer=layer)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("method", ["clover", "nvidia"])
def test_a_hidden_layer_from_codes_has_the_gradients_of_relu_squared_itself(method):
    block = nf.convert(make(n_layer=1), method, verbose=False).transformer.h[0]

    def itself(x):
        hidden = block.mlp.c_fc(x)
        new_seed(x.device)  # of 8 bits of relu(x)
        return block.mlp.c_proj(F.relu(hidden).square())

    results = []
    for function in (itself, functools.partial(block.mlp, recompute=True)):
        block.zero_grad()
        torch.manual_seed(4)
        x = torch.randn(2, 24, 64, requires_grad=True)
        y = function(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad.clone() for p in block.mlp.parameters())])
    assert all(map(torch.equal, *results))


def test_separate_qkv_is_three_layers():
    model = nf.convert(make(n_layer=1, separate_qkv=True), "clover", verbose=False)
    attn, x = model.transformer.h[0].attn, torch.randn(2, 24, 64)
    with torch.no_grad():
        attn.c_q.weight *= 1.7  # so that the three have different tensor scales
        cos_sin = model.cos[:, :24], model.sin[:, :24]
        q, k, v = (layer(x).unflatten(-1, (-1, attn.head_dim)) for layer in (attn.c_q, attn.c_k, attn.c_v))
        q, k = (norm(apply_rotary_emb(t, *cos_sin)) for t in (q, k))
        assert all(map(torch.equal, attn.qkv(x, cos_sin), (q, k, v)))
        with nf.quantize_weights_once(model):
            assert [len(layer.contexts[0].weights) for layer in (attn.c_q, attn.c_k, attn.c_v)] == [1, 1, 1]


def test_the_gradient_of_relu_squared_is_that_of_its_input_in_eight_bits():
    mlp = nf.convert(make(n_layer=1), "clover", verbose=False).transformer.h[0].mlp
    seen = {}
    mlp.c_fc.register_forward_hook(lambda _, args, y: y.retain_grad() or seen.update(before=y))
    mlp.c_proj.register_forward_pre_hook(lambda _, args: args[0].retain_grad() or seen.update(after=args[0]))
    with torch.no_grad():
        mlp.c_proj.weight.normal_()
    mlp(torch.randn(24, 64)).square().sum().backward()
    before, after = seen["before"], seen["after"]
    want = 2 * before.detach().relu() * after.grad
    error = (before.grad - want).norm() / want.norm()
    assert 1e-4 < error < 1e-2


@pytest.mark.parametrize("recompute", ["none", "mlp", "codes-mlp"])
def test_layers_of_all_windows_share_their_graphs(monkeypatch, recompute):
    """A model with two windows has the graphs of a model with one, in any step. Layers that compute attention's tensors
    again have a graph for each window. The loss and the gradients are the same."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **kw: real(function, **kw, backend="aot_eager"))
    ids, graphs = tokens(2, 24), {}
    for pattern in ("L", "SSSL"):
        model = nf.convert(make(n_layer=4, window_pattern=pattern), "bf16", verbose=False)
        model.recompute = recompute
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled, graphs[pattern] = compile_layers(model), []
        for _ in range(2):
            model.zero_grad()
            expected = model(ids, ids.roll(-1, 1))
            expected.backward()
            grads = {n: p.grad.clone() for n, p in model.named_parameters()}
            model.zero_grad()
            loss = compiled(ids, ids.roll(-1, 1))
            loss.backward()
            assert torch.equal(loss, expected)
            for name, p in model.named_parameters():
                torch.testing.assert_close(p.grad, grads[name], msg=name)
            graphs[pattern].append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        torch.testing.assert_close(compiled(ids), model(ids))  # no targets: logits
    more = int(recompute == "codes-mlp")
    assert graphs["SSSL"] == [n + more for n in graphs["L"]]


def test_graphs_of_layers_are_cached_by_torch(monkeypatch):
    """Otherwise a warm start differentiates them again, as it did in torch 2.13, where autocast was the reason."""
    from torch._functorch._aot_autograd.autograd_cache import check_cacheable

    graphs, real = [], torch.compile
    backend = lambda graph, example_inputs: graphs.append(graph) or graph  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda function, **kw: real(function, **kw, backend=backend))
    model, ids = nf.convert(make(n_layer=1), "clover", verbose=False), tokens(2, 24)
    torch._dynamo.reset()
    compile_layers(model)(ids, ids.roll(-1, 1)).backward()
    assert len(graphs) == 3
    for graph in graphs:
        check_cacheable(graph)


def test_nothing_else_has_to_import_the_compiler():
    """In a process of its own, because most tests import it. On a GPU base_train ended here with an AttributeError."""
    code = "from nanochat_fp4.models import gpt; gpt.compile_layers(gpt.GPT(gpt.GPTConfig(32, 64, 1, 1, 1, 32)))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:torch.compile leaves the quantized layers alone")
def test_layers_that_are_left_out_break_the_graph(monkeypatch):
    """On a CPU, where the compiler leaves them to the reference: base_train --compile."""
    monkeypatch.delenv("NVFP4_COMPILE", raising=False)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **kw: real(function, **kw, backend="eager"))
    model, ids = nf.convert(make(n_layer=1), "clover", verbose=False), tokens(2, 24)
    torch._dynamo.reset()
    assert torch.isfinite(compile_layers(model)(ids, ids.roll(-1, 1)))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_compiles_with_aot_autograd(recompute):
    model, ids = nf.convert(make(n_layer=2), "bf16", verbose=False), tokens(2, 24)
    model.recompute = recompute
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    for reduction in ("mean", "none"):
        model.zero_grad()
        model(ids, ids.roll(-1, 1), loss_reduction=reduction).sum().backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        compiled(ids, ids.roll(-1, 1), loss_reduction=reduction).sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, grads[name], msg=name)


def test_rates_after_pretraining_keep_their_fraction():
    """The schedule multiplies initial_lr, so init_lr_frac must be in it: a stage would train at 1 / frac times its
    rate."""
    model = make(n_layer=1)
    rates = {"unembedding_lr": 0.004, "embedding_lr": 0.2, "matrix_lr": 0.02}
    optimizers, schedule = model.setup_finetuning(rates, 0.5, lambda progress: 1 - progress)
    scale = (model.config.n_embd / 768) ** -0.5
    want = [0.004 * scale, 0.2 * scale, 0.5 * 0.01, 0.5, *[0.02] * len(optimizers[1].param_groups)]
    for progress in (0.0, 0.5):
        schedule(0, progress)
        got = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        assert got == pytest.approx([rate * 0.5 * (1 - progress) for rate in want])
