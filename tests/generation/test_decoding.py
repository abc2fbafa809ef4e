"""Decoding by fused kernels, in Triton's interpreter, says what the model says; and what it cannot take it names."""

import contextlib
import copy

import pytest
import torch
from _assertions import relative_square_error

pytest.importorskip("triton")

from nvfp4_kernels.decode_step import attention, codes_matmul, product_problem, row  # noqa: E402

import nanochat_fp4 as nf  # noqa: E402
from lab.measure.bench_generate import weight_bytes  # noqa: E402
from nanochat_fp4.generation.decoding import Decoder, prepare, unsupported_reason  # noqa: E402
from nanochat_fp4.generation.engine import KVCache  # noqa: E402
from nanochat_fp4.models.gpt import GPT, GPTConfig, autocast, norm  # noqa: E402
from nanochat_fp4.models.llama import Llama, LlamaConfig  # noqa: E402
from nanochat_fp4.nvfp4.format import NVFP4Tensor  # noqa: E402
from nanochat_fp4.nvfp4.fused import groups_computed_as_one, quantized_weights  # noqa: E402
from nanochat_fp4.nvfp4.linear import QuantLinear  # noqa: E402
from nanochat_fp4.nvfp4.operands import Codes, Plain  # noqa: E402
from nanochat_fp4.nvfp4.quantizers import get_rounding, quantize_reference  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


@pytest.fixture(autouse=DEVICE.type == "cpu")
def in_bounds(monkeypatch):
    """Every address that a kernel reads or writes in the interpreter lies in a tensor that the kernel was given."""
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    given, prepare_arguments = [], GridExecutor._init_args_hst

    def remember(self, arguments, *rest):
        result = prepare_arguments(self, arguments, *rest)
        tensors = [t for t in result[0] if isinstance(t, torch.Tensor)]
        given[:] = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors]
        assert all(t.is_contiguous() for t in tensors)
        return result

    def checked(name, mask_at):
        original = getattr(InterpreterBuilder, name)

        def access(self, pointers, *arguments):
            size = pointers.get_element_ty().primitive_bitwidth // 8
            used = pointers.data[arguments[mask_at].data]
            inside = sum((used >= start) & (used + size <= end) for start, end in given)
            assert inside.all(), f"{name}: {(inside == 0).sum()} of {used.size} addresses are outside of all tensors"
            return original(self, pointers, *arguments)

        monkeypatch.setattr(InterpreterBuilder, name, access)

    monkeypatch.setattr(GridExecutor, "_init_args_hst", remember)
    checked("create_masked_load", 0)
    checked("create_masked_store", 1)


def make_model(method="clover", llama=False, layers=2):
    shape = dict(sequence_len=8, vocab_size=64, n_layer=layers, n_head=2, n_kv_head=1, n_embd=32)
    model = Llama(LlamaConfig(**shape)) if llama else GPT(GPTConfig(**shape, window_pattern="SL"))
    model.to(DEVICE).init_weights()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    return nf.convert(model, method, backward=False, verbose=False)


def cache_of(model, rows):
    c = model.config
    return KVCache(rows, c.n_kv_head, 24, c.head_dim, c.n_layer, DEVICE, DTYPE)


@pytest.mark.parametrize("name", ["rtn", "four_over_six", "scale_search_6"])
def test_row_quantizes_as_the_reference_per_token(name):
    """The codes' values and the scales to the bit; even columns first, then odd ones."""
    torch.manual_seed(0)
    rounding = get_rounding(name)
    y = torch.randn(2, 3, 48, device=DEVICE) * torch.tensor([1.0, 1e6, 1e-6], device=DEVICE)[:, None]
    values, scales = row(y, dtype=torch.float32, activation="relu2",
                         rounding=(rounding.grid_max, rounding.scale_cap, tuple(rounding.candidates)))  # fmt: skip
    want = quantize_reference(y.sum(0).cpu().relu().square(), rounding, per_token=True)
    got = torch.stack(values.float().cpu().chunk(2, dim=1), dim=-1).flatten(1)
    assert torch.equal(got, want.decode())
    assert torch.equal(scales.cpu(), want.tensor_scale)


def test_row_adds_mixes_and_normalizes():
    y, x, x0 = torch.randn(3, 5, 48, device=DEVICE).unbind()
    factor, x0_factor = torch.tensor(0.7, device=DEVICE), torch.tensor(-0.3, device=DEVICE)
    stream = x.clone()
    values, scales = row(y[None], stream, (x0, factor, x0_factor), dtype=torch.float32, add=True, norm_eps=1e-7)
    want = factor * (x + y) + x0_factor * x0
    assert scales is None
    torch.testing.assert_close(stream, want)
    torch.testing.assert_close(values, norm(want))


@pytest.mark.parametrize("rows, n, k", [(1, 80, 272), (1, 40, 4096), (5, 64, 1088)])
def test_product_with_codes(rows, n, k):
    """Tails in every dimension, several parts, every code and scale, zero and the smallest among them."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    weight = NVFP4Tensor(codes, scales, torch.tensor(3e-3))
    x = nf.quantize(torch.randn(rows, k), "four_over_six").decode()
    x_scale = torch.rand(rows, 1) + 0.5
    halves = torch.cat((x[:, 0::2], x[:, 1::2]), dim=1).to(torch.float16)
    tensors = (t.to(DEVICE) for t in (halves, x_scale, codes, scales, weight.tensor_scale))
    parts = codes_matmul(*tensors, torch.float32)
    assert parts.shape[1:] == (rows, n) and parts.dtype == torch.float32 and (rows == 1 or len(parts) > 1)
    want = (x.double() @ weight.decode().double().T) * x_scale.double() * weight.tensor_scale.double()
    assert relative_square_error(parts.sum(0).cpu(), want) < 1e-13


@pytest.mark.parametrize("parts, left, past", [(1, -1, 69), (3, 40, 69), (1, -1, 0)])
def test_attention_of_one_position(parts, left, past):
    """Against softmax, up to the last position of the caches; a score is of several blocks of positions, or of none."""
    torch.manual_seed(0)
    rows, heads, kv_heads, width = 2, 4, 2, 16
    k, v = torch.randn(2, rows, past + 1, kv_heads, width, device=DEVICE).to(DTYPE).unbind()
    qkv = torch.randn(parts, rows, (heads + 2 * kv_heads) * width, device=DEVICE)
    cos, sin = torch.randn(2, past + 1, width // 2, device=DEVICE).to(DTYPE).unbind()
    position = torch.full((rows,), past, dtype=torch.int32, device=DEVICE)
    got = attention(qkv, cos, sin, k, v, position, heads, left, None)

    q, key, value = qkv.sum(0).to(DTYPE).view(rows, -1, width).split((heads, kv_heads, kv_heads), dim=1)
    a, b = torch.cat((q, key), dim=1).chunk(2, dim=-1)
    q, key = torch.cat((a * cos[past] + b * sin[past], b * cos[past] - a * sin[past]), -1).split((heads, kv_heads), 1)
    for cache, new in ((k, key), (v, value)):
        torch.testing.assert_close(cache[:, past], new)
    seen = slice(max(0, past - left) if left >= 0 else 0, past + 1)
    keys, values = (t[:, seen].repeat_interleave(2, dim=2).transpose(1, 2).float() for t in (k, v))
    want = (q.float().unsqueeze(2) @ keys.transpose(2, 3) / width**0.5).softmax(-1) @ values
    bound = 1e-12 if DTYPE == torch.float32 else 1e-4
    assert relative_square_error(got[0].view(rows, heads, width).float(), want.squeeze(2)) < bound


def test_attention_wants_a_position_for_each_row():
    qkv, caches, table = torch.zeros(1, 2, 48), torch.zeros(2, 2, 4, 1, 16), torch.zeros(2, 4, 8)
    for position in (torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="position"):
            attention(qkv, *table, *caches, position, 1, -1, None)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter sees it")
def test_a_position_behind_the_caches_would_be_noticed():
    qkv, caches, table = torch.zeros(1, 2, 48), torch.zeros(2, 2, 4, 1, 16), torch.zeros(2, 5, 8)
    with pytest.raises(Exception, match="outside of all tensors"):
        attention(qkv, *table, *caches, torch.full((2,), 4, dtype=torch.int32), 1, -1, None)


def test_the_known_product_is_right_and_a_wrong_one_is_named(monkeypatch):
    assert product_problem(DEVICE) is None
    monkeypatch.setattr(torch.Tensor, "half", lambda x: 1.01 * x.to(torch.float16))
    assert "1 row(s) with codes is wrong" in product_problem.__wrapped__(DEVICE)


@pytest.mark.parametrize("llama", [False, True])
def test_decoder_says_what_the_model_says(llama):
    """Grouped heads, a window that the positions cross, a row's caches; test_engine.py has two rows, without codes."""
    torch.manual_seed(0)
    model = make_model(llama=llama)
    caches = [cache_of(model, 1) for _ in range(2)]
    ids = torch.randint(0, 64, (1, 7), device=DEVICE)
    bound = 1e-9 if DTYPE == torch.float32 else 5e-3  # in BF16 a sum that differs moves codes
    contexts = nf.per_token_scale(model), nf.quantize_weights_once(model), autocast(DEVICE.type)
    with torch.inference_mode(), contexts[0], contexts[1], contexts[2]:
        for cache in caches:
            model(ids, kv_cache=cache)
        want = model(ids[:, :1], kv_cache=caches[0])[:, -1]
        assert relative_square_error(Decoder(model, caches[1])(ids[:, 0]), want) < bound
    assert caches[0].get_pos() == caches[1].get_pos() == 8
    assert torch.equal(caches[0].cache_seqlens, caches[1].cache_seqlens)
    assert relative_square_error(caches[1].k_cache, caches[0].k_cache) < bound
    assert relative_square_error(caches[1].v_cache, caches[0].v_cache) < bound


@pytest.mark.parametrize("in_codes", [True, False])
def test_takes_codes_that_fsdp_has_gathered(in_codes):
    """As sharding.py leaves them: the weights are to be found in `gathered` alone."""
    torch.manual_seed(0)
    model = make_model(layers=1)
    ids = torch.randint(0, 64, (1, 3), device=DEVICE)
    caches = [cache_of(model, 1) for _ in range(2)]
    with torch.no_grad(), nf.per_token_scale(model), autocast(DEVICE.type):
        with nf.full_precision(model):
            full = model(ids)
        want = [Decoder(model, caches[0])(ids[:, 0]).clone(), model(ids)]
        for layers in groups_computed_as_one(model):
            codes, start = quantized_weights([layers])[0], 0
            for layer in layers:
                rows = slice(start, start := start + layer.out_features)
                part = Codes(codes.codes[rows], codes.scales[rows], codes.tensor_scale)
                layer.gathered = part if in_codes else Plain(layer.weight.detach())
        for layer in (m for m in model.modules() if isinstance(m, QuantLinear)):
            layer.weight = torch.nn.Parameter(torch.full((), torch.nan, device=DEVICE).expand(layer.weight.shape))
        assert torch.equal(Decoder(model, caches[1])(ids[:, 0]), want[0])
        with nf.quantize_weights_once(model):
            assert torch.equal(model(ids), want[1])
            with nf.full_precision(model):
                assert "FSDP has gathered the weights themselves" in unsupported_reason(model, caches[1])
                if in_codes:
                    with pytest.raises(ValueError, match="enter full_precision around unsharded"):
                        model(ids)
                else:
                    assert torch.equal(model(ids), full)


def test_prepared_weights_are_codes_and_give_the_same_bits():
    torch.manual_seed(0)
    model = make_model()
    ids = torch.randint(0, 64, (1, 5), device=DEVICE)
    with torch.inference_mode(), nf.per_token_scale(model), autocast(DEVICE.type):
        want = model(ids)
        both = prepare(copy.deepcopy(model), torch.float32, both=True)
        with nf.full_precision(model), nf.full_precision(both):
            assert torch.equal(both(ids), model(ids))
        blocks = sum(p.numel() for p in model.transformer.h.parameters())
        others = sum(p.numel() * p.element_size() for p in model.parameters()) - 4 * blocks
        prepare(model, torch.float32)
        assert torch.equal(model(ids), want)
        operands = 4 * 2  # four products in each of two layers have a tensor scale
        assert weight_bytes(model) == others + blocks * 9 // 16 + 4 * operands
        with nf.full_precision(model), pytest.raises(ValueError, match="only the codes were kept"):
            model(ids)


@pytest.mark.parametrize(
    "method, rows, per_token, reason",
    [
        ("clover", 1, False, "per token"),
        ("clover", 65, True, "65 rows"),
        ("clover_refined", 1, True, "another kind of input"),
        ("fp8", 1, True, "another kind"),
    ],
)
def test_what_it_cannot_take_is_named(method, rows, per_token, reason):
    model = make_model(method)
    with nf.per_token_scale(model) if per_token else contextlib.nullcontext():
        assert reason in unsupported_reason(model, cache_of(model, rows))
        with pytest.raises(ValueError, match=reason):
            Decoder(model, cache_of(model, rows))


def test_a_cache_that_is_full_or_longer_than_the_rotary_tables_is_refused():
    model = make_model("bf16")
    assert "rotary tables" in unsupported_reason(model, KVCache(1, 1, model.cos.shape[1] + 1, 16, 2, DEVICE, DTYPE))
    cache = cache_of(model, 1)
    cache.advance(24)
    with nf.per_token_scale(model), pytest.raises(ValueError, match="holds 24 positions"):
        Decoder(model, cache)(torch.zeros(1, dtype=torch.long, device=DEVICE))
