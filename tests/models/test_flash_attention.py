"""Each attention backend against a loop over positions, and against each other."""

import math
import sys
import types

import pytest
import torch

from nanochat_fp4.models import flash_attention
from nanochat_fp4.models.flash_attention import flash_attn_func, flash_attn_with_kvcache
from nanochat_fp4.models.gpt import GPT, GPTConfig

# FP32 in another order; values are of size 1.
TOLERANCE = dict(rtol=1e-5, atol=2e-6)


def qkv(batch=2, length=20, heads=4, kv_heads=4, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, length, h, dim, generator=generator) for h in (heads, kv_heads, kv_heads))


def loop(q, k, v, left):
    """Position by position: i sees i - left .. i."""
    k, v = (t.repeat_interleave(q.size(2) // t.size(2), dim=2) for t in (k, v))
    out = torch.empty_like(q)
    for t in range(q.size(1)):
        first = max(0, t - left) if left >= 0 else 0
        scores = torch.einsum("bhd,bkhd->bhk", q[:, t], k[:, first : t + 1]) / math.sqrt(q.size(-1))
        out[:, t] = torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), v[:, first : t + 1])
    return out


# Uncompiled FlexAttention warns that it is slow, which is all right here.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(params=["sdpa", "flex"])
def backend(request):
    with flash_attention.use(request.param):
        yield request.param


@pytest.mark.parametrize("kv_heads, left", [(4, -1), (2, 0), (4, 7), (2, 18), (4, 19)])
def test_forward(backend, kv_heads, left):
    q, k, v = qkv(kv_heads=kv_heads)
    torch.testing.assert_close(flash_attn_func(q, k, v, left), loop(q, k, v, left), **TOLERANCE)


@pytest.mark.parametrize("kv_heads, left", [(4, -1), (2, 7)])
def test_gradients(kv_heads, left):
    inputs = [t.requires_grad_() for t in qkv(kv_heads=kv_heads)]
    weights = torch.randn(2, 20, 4, 16)
    got = torch.autograd.grad((flash_attn_func(*inputs, left) * weights).sum(), inputs)
    want = torch.autograd.grad((loop(*inputs, left) * weights).sum(), inputs)
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads, left", [(4, -1), (2, 0), (2, 7)])
@pytest.mark.parametrize("steps", [[20], [12, 1, 1, 1, 5]])  # at once, or a prompt and then tokens
def test_cache_gives_what_the_whole_sequence_gives(kv_heads, left, steps):
    q, k, v = qkv(kv_heads=kv_heads)
    caches = [torch.full((2, 32, kv_heads, 16), torch.nan) for _ in range(2)]  # what is not written must not be read
    position, outputs = 0, []
    for n in steps:
        part = slice(position, position + n)
        seqlens = torch.full((2,), position, dtype=torch.int32)
        outputs.append(flash_attn_with_kvcache(q[:, part], k[:, part], v[:, part], *caches, seqlens, position, left))
        position += n
    torch.testing.assert_close(torch.cat(outputs, 1), loop(q, k, v, left), **TOLERANCE)
    assert torch.equal(caches[0][:, :20], k) and torch.equal(caches[1][:, :20], v)


def test_flex_compiles_in_one_graph():
    q, k, v = qkv()
    with flash_attention.use("flex"), torch.no_grad():
        compiled = torch.compile(flash_attn_func, fullgraph=True, backend="eager")
        out = compiled(q, k, v, 7)
    torch.testing.assert_close(out, loop(q, k, v, 7), **TOLERANCE)


@pytest.mark.parametrize("length", [1, 20, 128, 300, 1024])
def test_flexs_blocks_are_those_of_create_block_mask(length):
    """Of which flex's kernel would compute the same bits, but which takes a second to trace for each window."""
    from torch.nn.attention.flex_attention import create_block_mask

    what = ("num_blocks", "indices")
    for left in (0, 7, 127, 128, 129, 255, 511, length):
        mask = create_block_mask(
            lambda b, h, q, k, left=left: (k <= q) & (q - k <= left), None, None, length, length, "cpu"
        )
        want = [getattr(mask, f"{name}_{t}") for name in ("kv", "full_kv", "q", "full_q") for t in what]
        for got, wanted in zip(flash_attention.flex_blocks(length, left, torch.device("cpu")), want, strict=True):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted), left


def test_the_flash_kernel_is_asked_for_the_window():
    """What the calls are, forward and backward; the values: test_gpu_backends_agree_with_sdpa."""
    from torch.utils._python_dispatch import TorchDispatchMode

    calls = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_flash_attention" in str(function):
                given = dict(zip((a.name for a in function._schema.arguments), args)) | (kwargs or {})
                calls.append([given[k] for k in ("max_q", "max_k", "is_causal", "dropout_p")])
                calls[-1] += [given["window_size_left"], given["window_size_right"]]
            return function(*args, **(kwargs or {}))

    inputs = [torch.empty(2, 20, h, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for h in (4, 2, 2)]
    with Record():
        y, *_ = flash_attention.flash_kernel(*inputs, 7)
        grads = torch.autograd.grad(y, inputs, torch.ones_like(y))
    assert [t.shape for t in (y, *grads)] == [t.shape for t in (inputs[0], *inputs)]
    assert calls == [[20, 20, True, 0.0, 7, 0]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fa3", "flash", "flex"])
@pytest.mark.parametrize("left", [-1, 700])
def test_gpu_backends_agree_with_sdpa(name, left):
    flash_attention.setup("cuda", windowed=True)
    if reason := flash_attention.unavailable_reason(name):
        pytest.skip(reason)
    inputs = [t.cuda().bfloat16().requires_grad_() for t in qkv(length=1024, heads=4, kv_heads=2, dim=128)]
    results = {}
    for backend in (name, "sdpa"):
        with flash_attention.use(backend):
            out = torch.compile(flash_attn_func, fullgraph=True)(*inputs, left)
            results[backend] = (out, *torch.autograd.grad(out.float().square().sum(), inputs))
    with flash_attention.use(name):  # between two compiled functions
        out = flash_attn_func(*inputs, left, compiled=True)
    alone = out, *torch.autograd.grad(out.float().square().sum(), inputs)
    for got, want in zip((*results[name], *alone), results["sdpa"] * 2):
        # BF16 scores in different orders: 2^-8 of the typical size, some of which adds up in the gradients.
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm()


@pytest.mark.parametrize(
    "sm, has_flash, deterministic, compiled, eager",
    [
        (9, True, False, "flex", "flash"),  # as measured on an H200
        (9, True, True, "flash", "flash"),
        (9, False, False, "flex", "sdpa"),
        (10, True, False, "flash", "flash"),  # nobody has measured
        (12, False, False, "flex", "sdpa"),
        (7, False, True, "flex", "sdpa"),
    ],
)
def test_windows_have_a_backend_for_each_gpu_and_full_context_has_sdpa(
    sm, has_flash, deterministic, compiled, eager, monkeypatch
):
    q = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, size=lambda i: (2, 64, 4, 128)[i])
    for name, value in (("fa3_module", None), ("fa3_reason", "none"), ("forced_backend", None)):
        monkeypatch.setattr(flash_attention, name, value)
    monkeypatch.setattr(flash_attention, "_flash_reason", lambda: None if has_flash else "none")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (sm, 0))
    names = {"flash": "flash kernel", "flex": "FlexAttention"}
    assert names[compiled] in flash_attention.setup("cuda", True)
    assert flash_attention.setup("cuda") == "attention: SDPA (FlashAttention-3: none)"
    for compiling, chosen in ((True, compiled), (False, eager)):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        assert [flash_attention.chosen_backend(q, left) for left in (31, 62, 63, 64, -1)] == [chosen] * 2 + ["sdpa"] * 3
        assert flash_attention.chosen_backend(q, 31, compiled=True) == compiled  # between two compiled functions
        q.dtype = torch.float32  # the flash kernel has no FP32
        others = {"flash": "flex" if compiling else "sdpa"}
        assert flash_attention.chosen_backend(q, 31) == others.get(chosen, chosen)
        q.dtype = torch.bfloat16


def test_a_model_says_whether_it_has_windows(monkeypatch):
    asked = []
    monkeypatch.setattr(flash_attention, "setup", lambda *how: asked.append(how))
    for pattern in ("SL", "L"):
        shape = dict(sequence_len=64, vocab_size=64, n_layer=4, n_head=4, n_kv_head=2, n_embd=64)
        GPT(GPTConfig(**shape, window_pattern=pattern)).init_weights()
    assert asked == [("cpu", True), ("cpu", False)]


def test_at_most_65535_tokens_at_once_on_sm_120(monkeypatch):
    """From 65,536 on SDPA gave NaN on an RTX PRO 6000."""
    q, k, v = qkv(batch=5, length=12, kv_heads=2)
    want, real, seen = flash_attn_func(q, k, v, 3), flash_attention.sdpa_attention, []
    monkeypatch.setattr(flash_attention, "MOST_TOKENS", 30)
    assert torch.equal(flash_attn_func(q, k, v, 3), want)
    monkeypatch.setattr(flash_attention, "limits_tokens", lambda device_type: True)
    monkeypatch.setattr(flash_attention, "sdpa_attention", lambda *a: seen.append(a[0].size(0)) or real(*a))
    torch.testing.assert_close(flash_attn_func(q, k, v, 3), want)
    assert seen == [2, 2, 1]
    with pytest.raises(ValueError, match="32 tokens.* 30"):
        flash_attn_func(*qkv(length=32))


def test_says_what_it_uses_once_and_what_it_costs(capsys):
    line = flash_attention.setup("cpu", windowed=True)
    assert "SDPA" in line and "as much as" in line
    assert flash_attention.setup("cpu", windowed=True) == line
    assert capsys.readouterr().out.count(line) == 1
    assert "costs" not in flash_attention.setup("cpu", windowed=False)


def test_forcing_what_is_not_there_is_an_error(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("may be there")
    assert flash_attention.available("sdpa") and not flash_attention.available("fa3")
    with pytest.raises(ValueError, match="fa3 .*NANOCHAT_ATTENTION=sdpa"):
        with flash_attention.use("fa3"):
            pass
    monkeypatch.setenv("NANOCHAT_ATTENTION", "fa3")
    with pytest.raises(ValueError, match="fa3 cannot run"):
        flash_attention.setup("cpu")
    monkeypatch.setenv("NANOCHAT_ATTENTION", "fa9")
    with pytest.raises(ValueError, match="'fa9'.*sdpa"):
        flash_attention.setup("cpu")


def test_a_failing_load_is_reported_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(flash_attention, "fa3_module", None)
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    (tmp_path / "nothing" / "kernels").mkdir(parents=True)  # as this repository has it: a folder that is no package
    (tmp_path / "fails" / "kernels").mkdir(parents=True)
    (tmp_path / "fails" / "kernels" / "__init__.py").write_text("raise OSError('no network')\n")
    for folder, words in (
        ("nothing", "the package kernels is not installed"),
        ("fails", "failed: OSError: no network"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", [str(tmp_path / folder)])
            patch.setattr(flash_attention, "fa3_reason", flash_attention.NOT_TRIED)
            assert words in flash_attention.setup("cuda", windowed=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(flash_attention, "fa3_reason", flash_attention.NOT_TRIED)
    assert "this is sm_120" in flash_attention.setup("cuda", windowed=True)
