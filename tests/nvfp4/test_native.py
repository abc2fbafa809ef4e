"""The choice of a native NVFP4 GEMM, and what it is given, on a machine that has none: the hardware is simulated.

torch's scaled_mm is replaced by a function that first asks torch's own shape checks (on meta tensors), then computes
the product from what it got: swizzled scales, transposed codes. flashinfer is a module with such a function, which
checks what flashinfer's documentation wants. Triton's dot_scaled runs in the interpreter. So a layer through each of
them must equal the emulated layer.
"""

import contextlib
import functools
import importlib.machinery
import sys
import types

import pytest
import torch
from _assertions import relative_square_error

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.nvfp4 import dispatch, probe
from nanochat_fp4.nvfp4.format import decode, unswizzle_scales

pytest.importorskip("triton")
needs_scaled_mm = pytest.mark.skipif(not hasattr(torch.nn.functional, "scaled_mm"), reason="torch before 2.10")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates the hardware, in Triton's interpreter")
pytestmark = [needs_scaled_mm, on_a_cpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def simulated_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
    def meta(t):
        return [v.to("meta") for v in t] if isinstance(t, list) else t.to("meta")

    checked = REAL_SCALED_MM(
        meta(a), meta(b.T).T, meta(scale_a), recipe_a, meta(scale_b), recipe_b,
        swizzle_a=swizzle_a, swizzle_b=swizzle_b, output_dtype=output_dtype,
    )  # fmt: skip
    x, y = (
        decode(codes.view(torch.uint8), unswizzle_scales(scales, codes.shape[0], codes.shape[1] // 8))
        for codes, scales in ((a, scale_a[0]), (b.T, scale_b[0]))
    )
    assert a.is_contiguous() and b.T.is_contiguous()
    alpha = scale_a[1] * scale_b[1] if len(scale_a) == 2 else 1.0
    product = ((x @ y.T) * alpha).to(output_dtype)
    assert (product.shape, product.dtype) == (checked.shape, checked.dtype)
    return product


REAL_SCALED_MM = getattr(torch.nn.functional, "scaled_mm", None)


def simulated_mm_fp4(a, b, a_descale, b_descale, alpha, out_dtype, *, block_size, use_8x4_sf_layout):
    """flashinfer.gemm.mm_fp4, as its documentation has the arguments: b and b_descale are column-major."""
    assert block_size == 16 and not use_8x4_sf_layout and out_dtype == torch.bfloat16 and alpha.numel() == 1
    (m, k), n = a.shape, b.shape[1]
    groups = -(-k // 32) * 4
    assert a.dtype == b.dtype == torch.uint8 and a.is_contiguous() and b.T.is_contiguous() and b.shape[0] == k
    assert a_descale.dtype == b_descale.dtype == torch.float8_e4m3fn
    assert a_descale.shape == (-(-m // 128) * 128, groups) and b_descale.shape == (groups, -(-n // 128) * 128)
    assert a_descale.is_contiguous() and b_descale.T.is_contiguous()
    x, y = (
        decode(codes, unswizzle_scales(scales.reshape(-1), codes.shape[0], k // 8))
        for codes, scales in ((a, a_descale), (b.T, b_descale.T))
    )
    return ((x @ y.T) * alpha).to(out_dtype)


def install_flashinfer(monkeypatch, function):
    module = types.ModuleType("flashinfer")
    module.__spec__, module.mm_fp4 = importlib.machinery.ModuleSpec("flashinfer", None), function
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def forget():
    dispatch.native_choice.cache_clear()
    dispatch._look.cache_clear()
    dispatch.use_choice({})


@pytest.fixture
def blackwell(monkeypatch):
    """As if the CPU had FP4 tensor cores, reached through torch's scaled_mm; kernels in Triton's interpreter."""
    monkeypatch.setattr(dispatch, "no_tensor_cores_reason", lambda device_type: None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # not installed, whatever this machine has
    shapes = {128: (128, 128, 128), 64: (128, 64, 64), 1: (144, 48, 96)}  # small ones: Triton's interpreter is slow
    monkeypatch.setattr(probe, "PROBE_SHAPES", shapes)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", simulated_scaled_mm)
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    forget()
    yield monkeypatch
    forget()


def step(method, tokens=32, in_features=64, out_features=96, dtype=torch.float32):
    torch.manual_seed(0)
    layer = nf.QuantLinear(in_features, out_features, method=method)
    x = torch.randn(tokens, in_features).to(dtype).requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y, (x, layer.weight), torch.randn(tokens, out_features).to(dtype))


@pytest.mark.parametrize(
    "name, method, native_gemms",
    [
        ("dot_scaled", "clover", 3),
        ("scaled_mm", "tetrajet_v2", 3),
        ("scaled_mm", "nvidia", 3),
        ("scaled_mm", "four_over_six", 3),
    ],
)
def test_a_layer_is_the_emulated_layer(blackwell, name, method, native_gemms):
    """Same codes, same products; FP32 sums in another order, and MS-EDEN's tensor_scale applied after, not before."""
    blackwell.setenv("NVFP4_GEMM", "emulated")
    want = step(method)
    blackwell.setenv("NVFP4_GEMM", name)
    forget()
    assert dispatch.native_choice("cpu")[0] == name  # the probe's own products are not counted
    calls, real = [], dispatch.mm
    blackwell.setattr(dispatch, "mm", lambda *a: calls.append(a[3]) or real(*a))
    got = step(method)
    assert calls == [name] * native_gemms
    for g, w in zip(got, want):
        assert relative_square_error(g.detach(), w.detach()) < 1e-12


def test_the_choice_and_its_reasons(blackwell):
    assert dispatch.native_choice("cpu") == ("scaled_mm", "")
    assert dispatch.native_gemm("cpu") == "scaled_mm"


def zeros(*args, **kw):
    return 0 * simulated_scaled_mm(*args, **kw)


def without_tensor_scales(a, b, scale_a, recipe_a, scale_b, *args, **kw):
    one = torch.ones(())
    return simulated_scaled_mm(a, b, [scale_a[0], one], recipe_a, [scale_b[0], one], *args, **kw)


def rows_swapped(*args, **kw):
    return simulated_scaled_mm(*args, **kw).flip(0)


def raises(*args, **kw):
    raise NotImplementedError("CUBLAS_STATUS_NOT_SUPPORTED\nand a long story")


@pytest.mark.parametrize(
    "fault, reason",
    [
        (zeros, "scaled_mm returns zeros"),
        (without_tensor_scales, "scaled_mm has a relative square error of"),
        (rows_swapped, "scaled_mm has a relative square error of"),
        (raises, "scaled_mm raises CUBLAS_STATUS_NOT_SUPPORTED"),
    ],
)
def test_a_library_that_is_wrong_is_not_used(blackwell, fault, reason):
    blackwell.setattr(torch.nn.functional, "scaled_mm", fault)
    if fault is raises:  # all of them take this way, by test_the_choice_on_each_gpu
        name, why = dispatch.native_choice("cpu")
        assert name == "dot_scaled" and why.startswith(reason) and "\n" not in why
    # Asked for, it is refused instead.
    blackwell.setenv("NVFP4_GEMM", "scaled_mm")
    forget()
    with pytest.raises(ValueError, match=f"NVFP4_GEMM=scaled_mm, but {reason}.*NVFP4_GEMM=emulated"):
        dispatch.native_choice("cpu")


def test_nothing_works(blackwell):
    """A run that did not ask for FP4 by name goes on, and hears what that costs."""
    blackwell.setattr(dispatch, "mm", lambda a, b, dtype, name: torch.zeros(a.codes.shape[0], b.codes.shape[0]))
    with pytest.warns(UserWarning, match="no FP4 GEMM works on this GPU.*slower than method bf16"):
        name, why = dispatch.native_choice("cpu")
    assert name is None and why.startswith("scaled_mm returns zeros") and "; dot_scaled returns zeros" in why
    assert why.endswith("; flashinfer is not installed (pip install flashinfer-python)")
    assert all(torch.isfinite(t).all() and t.any() for t in step("clover"))


def test_operands_that_tensor_cores_do_not_take(blackwell):
    """K = 48 is no whole number of 16-byte rows of codes: the forward is emulated, and its result the same."""
    got = step("clover", in_features=48)
    blackwell.setenv("NVFP4_GEMM", "emulated")
    forget()
    for g, w in zip(got, step("clover", in_features=48)):
        assert relative_square_error(g.detach(), w.detach()) < 1e-12


@pytest.mark.parametrize(
    "value, text",
    [("fast", "NVFP4_GEMM is 'fast', expected auto, emulated, scaled_mm, dot_scaled, flashinfer"),
     ("scaled_mm", "NVFP4_GEMM=scaled_mm, but no CUDA device")],
)  # fmt: skip
def test_a_wish_that_cannot_be_met(monkeypatch, value, text):
    monkeypatch.setenv("NVFP4_GEMM", value)
    forget()
    with pytest.raises(ValueError, match=text):
        nf.backend()
    forget()


def test_an_empty_wish_is_none(blackwell):
    blackwell.setenv("NVFP4_GEMM", "")
    blackwell.setenv("NVFP4_KERNELS", "")
    forget()
    assert dispatch.native_choice("cpu")[0] == "scaled_mm"


def test_the_doctor_runs_through_it(blackwell):
    """Forward and backward of a layer against the reference; a fault that the GEMM's own probe does not meet."""
    from nanochat_fp4 import doctor

    blackwell.setattr(doctor, "LAYER", (48, 96, 64))
    assert "passed" in doctor.probe("cpu", "clover")

    def wrong_where_n_is_96(a, b, *args, **kw):
        y = simulated_scaled_mm(a, b, *args, **kw)
        return 0 * y if y.shape[1] == 96 else y

    blackwell.setattr(torch.nn.functional, "scaled_mm", wrong_where_n_is_96)
    forget()
    with pytest.raises(UserError, match="grad_input is all zeros"):
        doctor.probe("cpu", "clover")


@pytest.mark.parametrize("m, n, k", [(16384, 9216, 3072), (7, 48, 64), (33, 144, 96), (129, 272, 32), (1, 16, 128)])
def test_torchs_shape_checks_take_our_layout(m, n, k):
    """The operator itself on meta tensors: large shapes, and the smallest ones."""
    from torch.nn.functional import ScalingType, SwizzleType

    from nanochat_fp4.nvfp4.format import swizzle_scales

    def operand(rows):
        codes = torch.empty(rows, k // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(rows, k // 16, dtype=torch.float8_e4m3fn, device="meta")
        return codes.view(torch.float4_e2m1fn_x2), [swizzle_scales(scales), torch.empty((), device="meta")]

    (a, a_scales), (b, b_scales) = operand(m), operand(n)
    recipe = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    layout = {"swizzle_a": [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]}
    layout["swizzle_b"] = layout["swizzle_a"]
    for dtype in (torch.bfloat16, torch.float32):
        y = REAL_SCALED_MM(a, b.T, a_scales, recipe, b_scales, recipe, **layout, output_dtype=dtype)
        assert y.shape == (m, n) and y.dtype == dtype


@pytest.mark.parametrize("method, kv", [("clover", 32), ("nvidia", 32), ("clover", 128)])
def test_weights_that_fsdp_gathered_are_multiplied_as_codes(blackwell, method, kv):
    """q, k, v of one tensor_scale, each in a buffer of its own, are one product, and the bits of one weight's.

    Weights of whole tiles have their scales in them, one weight's tiles after the other's.
    """
    blackwell.setenv("NVFP4_KERNELS", "reference")  # faster than Triton's interpreter
    from nanochat_fp4.nvfp4.fused import fused_linear
    from nanochat_fp4.nvfp4.operands import quantize_operand

    torch.manual_seed(0)
    layers = [nf.QuantLinear(64, rows, bias=False, method=method) for rows in (2 * kv, kv, kv)]
    x, e = torch.randn(64, 64), torch.randn(64, 4 * kv)
    amax = max(layer.weight.detach().abs().max() for layer in layers)

    def result():
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = torch.cat(fused_linear(leaf, *layers), dim=-1)
        return y.detach(), *torch.autograd.grad(y, (leaf, *(layer.weight for layer in layers)), e)

    assert dispatch.native_choice("cpu")[0] == "scaled_mm"
    calls, real = [], dispatch.mm
    blackwell.setattr(dispatch, "mm", lambda a, b, *rest: calls.append((a.shape, b.shape)) or real(a, b, *rest))
    want = result()
    once, calls[:] = list(calls), []
    for layer in layers:
        how = layer.weight_quantization(torch.device("cpu"))._replace(amax=amax, tiles=kv == 128)
        layer.gathered = quantize_operand(layer.weight.detach(), how, keep_codes=True).without_cache()
        layer.weight = torch.nn.Parameter(torch.full((), torch.nan).expand(layer.weight.shape))  # as sharding.py's
    attention = torch.nn.ModuleDict(dict(zip("qkv", layers)))
    attention.fused_linears = ("q", "k", "v")
    for inside in (contextlib.nullcontext(), nf.quantize_weights_once(attention)):
        calls.clear()
        with inside:
            got = result()
        assert len(once) == 3 and calls == once
        assert all(torch.equal(g, w) for g, w in zip(got, want))


def refuses_odd_sizes(a, b, *args, **kw):
    if a.shape[1] * 2 % 128:
        raise NotImplementedError("CUBLAS_STATUS_NOT_SUPPORTED")
    return simulated_scaled_mm(a, b, *args, **kw)


def test_a_refused_shape_alone_is_emulated(blackwell):
    """One refused shape had taken FP4 away everywhere."""
    blackwell.setenv("NVFP4_KERNELS", "reference")  # faster than Triton's interpreter
    blackwell.setattr(torch.nn.functional, "scaled_mm", refuses_odd_sizes)
    with pytest.warns(UserWarning, match="scaled_mm multiplies shapes of multiples of 128 alone here"):
        assert dispatch.native_choice("cpu")[0] == "scaled_mm"
    calls, real = [], dispatch.mm
    blackwell.setattr(dispatch, "mm", lambda *a: calls.append(a[3]) or real(*a))
    step("clover", tokens=128, in_features=128, out_features=128)
    assert calls == ["scaled_mm"] * 3
    step("clover", tokens=128, in_features=96, out_features=128)
    assert len(calls) == 3
    # A run that asked for FP4 by name is told instead.
    blackwell.setenv("NVFP4_GEMM", "scaled_mm")
    with pytest.raises(ValueError, match="do not multiply 128 x 128 x 96 right.*or unset NVFP4_GEMM"):
        step("clover", tokens=128, in_features=96, out_features=128)


def no_subnormal_scales(a, b, scale_a, *args, **kw):
    scales = scale_a[0].view(torch.uint8)
    flushed = torch.where(scales < 8, torch.zeros_like(scales), scales).view(torch.float8_e4m3fn)
    return simulated_scaled_mm(a, b, [flushed, scale_a[1]], *args, **kw)


def finite(*args, **kw):
    return simulated_scaled_mm(*args, **kw).nan_to_num()


@pytest.mark.parametrize(
    "fault, reason", [(no_subnormal_scales, "returns zeros with subnormal scales"), (finite, "has NaN where none")]
)
def test_unusual_scales_are_in_the_probe(blackwell, fault, reason):
    blackwell.setattr(torch.nn.functional, "scaled_mm", fault)
    assert reason in dispatch.probe_implementation("cpu", "scaled_mm")[1]


def flat_row_major(scales):
    rows, columns = scales.shape
    flat = torch.zeros(-(-rows // 128) * 128 * (-(-columns // 4) * 4), dtype=torch.uint8)
    flat[: scales.numel()] = scales.view(torch.uint8).flatten()
    return flat.view(scales.dtype)


@pytest.mark.parametrize("name", dispatch.IMPLEMENTATIONS)
def test_row_major_scales_give_another_product(blackwell, name):
    """The negative control: libraries accept them without an error."""
    install_flashinfer(blackwell, simulated_mm_fp4)
    assert dispatch.probe_implementation("cpu", name) == (1, "")
    blackwell.setattr(probe, "swizzle_scales", flat_row_major)
    multiple, problem = dispatch.probe_implementation("cpu", name)
    assert multiple is None and "relative square error" in problem


def ignores_layouts(a, b, scale_a, recipe_a, scale_b, *args, **kw):
    def row_major(scales, codes):
        rows, columns = codes.shape[0], codes.shape[1] // 8
        return scales.view(torch.uint8)[: rows * columns].view(rows, columns).view(scales.dtype)

    x, y = (
        decode(codes.view(torch.uint8), row_major(scales[0], codes)) for codes, scales in ((a, scale_a), (b.T, scale_b))
    )
    return ((x @ y.T) * (scale_a[1] * scale_b[1])).to(kw["output_dtype"])


def test_a_library_that_ignores_the_layout_is_not_used(blackwell):
    blackwell.setattr(torch.nn.functional, "scaled_mm", ignores_layouts)
    multiple, problem = dispatch.probe_implementation("cpu", "scaled_mm")
    assert multiple is None and "relative square error" in problem


def test_a_large_product_is_sampled_in_every_tile(blackwell):
    """1024 x 768 in tiles of 128: a fault in one tile alone is found."""
    mm = dispatch.mm
    shape, device = (1024, 768, 64), torch.device("cpu")
    right = lambda a, b, dtype: mm(a, b, dtype, "scaled_mm")  # noqa: E731
    assert probe.problem_of_shape(device, right, shape) is None

    def one_tile_is_wrong(a, b, dtype):
        y = right(a, b, dtype)
        y[896:1024, 384:512] *= -1
        return y

    state = torch.get_rng_state()
    assert "relative square error" in probe.problem_of_shape(device, one_tile_is_wrong, shape)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_crash_ends_a_child_process_alone():
    found, problem = probe.in_child(dispatch.__name__, "(IMPLEMENTATIONS[n] for n in (0, 1, 9))")
    assert found == ["scaled_mm", "dot_scaled"] and problem.startswith("ended its process with status 1 (IndexError")
    # Of a module that is imported faster.
    found, problem = probe.in_child("os", "(n if n < 2 else abort() for n in range(4))")
    assert found == [0, 1] and problem.startswith("ended its process with status -6")
    assert probe.in_child("os", "[(128, 'raises x')]") == ([[128, "raises x"]], "")
    found, problem = probe.in_child("os", "[__import__('os')._exit(3)]")
    assert not found and problem.startswith("ended its process with status 3")
    assert probe.in_child("time", "[sleep(60)]", timeout=0.01) == ([], "had no result after 0 s")


def test_a_gpu_is_probed_in_a_child_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(probe, "in_child", lambda module, call: ([(64, call)], ""))
    forget()
    assert dispatch._look("cuda", "dot_scaled") == (64, "[probe_implementation('cuda:3', 'dot_scaled')]")
    forget()
    monkeypatch.setattr(probe, "in_child", lambda module, call: ([], "ended its process"))
    assert dispatch._look("cuda", "dot_scaled") == (None, "ended its process")
    forget()


def test_other_streams_do_not_share_the_buffer_of_alpha(blackwell):
    """torch copies alpha into one buffer of the process. Elsewhere the FP32 product is scaled, to the same bits."""
    from nvfp4_kernels import matmul

    recipes = []

    def recorded(a, b, scale_a, recipe_a, *rest, **kw):
        recipes.append((len(recipe_a), kw["output_dtype"]))
        return simulated_scaled_mm(a, b, scale_a, recipe_a, *rest, **kw)

    blackwell.setattr(torch.nn.functional, "scaled_mm", recorded)
    device = torch.device("cpu")
    a, b = (probe.tiled(probe.random_operand(device, rows, 96)) for rows in (144, 160))
    for dtype in probe.OUTPUT_DTYPES:
        first = dispatch.mm(a, b, dtype, "scaled_mm")
        with blackwell.context() as patch:
            patch.setattr(matmul, "_may_give_alpha", lambda device: False)
            assert torch.equal(dispatch.mm(a, b, dtype, "scaled_mm"), first) and first.dtype == dtype
    assert recipes == [(2, torch.bfloat16), (1, torch.float32), (2, torch.float32), (1, torch.float32)]


def test_the_buffer_of_alpha_is_the_first_streams(monkeypatch):
    from nvfp4_kernels import matmul

    here = types.SimpleNamespace(device_index=0, cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(matmul, "_alphas_place", None)
    gpu = torch.device("cuda")
    assert matmul._may_give_alpha(gpu) and matmul._may_give_alpha(gpu)
    for other in ((0, 8), (1, 7)):
        here.device_index, here.cuda_stream = other
        assert not matmul._may_give_alpha(gpu)
    here.device_index, here.cuda_stream = 0, 7
    assert matmul._may_give_alpha(gpu)


# Which products of a step (forward and backward) are FP4 products, with every tensor core there. The rest is BF16:
# what is not quantized, and FP8. The second terms of late methods come at the end of a run.
PRODUCTS = dict.fromkeys(nf.METHODS, 3) | {"bf16": 0, "fp8": 0}


def check_operands(a, b):
    """Codes in rows, scales in tiles: what every implementation is given."""
    for codes, scales, tensor_scale in (a, b):
        assert codes.dtype == torch.uint8
        tiles = -(-codes.shape[0] // 128) * -(-codes.shape[1] // 32)  # of 128 x 4 scales
        assert scales.dtype == torch.float8_e4m3fn and scales.shape == (512 * tiles,) and tensor_scale.dim() == 0


@pytest.fixture
def recorded(blackwell):
    """All three implementations are there; calls has (operator, M, N, K, output dtype) of each product."""
    from nvfp4_kernels import matmul

    calls = []
    install_flashinfer(blackwell, simulated_mm_fp4)
    blackwell.setattr(dispatch, "_look", functools.cache(lambda device, name: (1, "")))
    operators = {name: getattr(matmul, name) for name in ("scaled_mm", "dot_scaled", "mm_fp4")}
    for operator, real in operators.items():

        def record(*operands, operator=operator, real=real):
            check_operands(operands[:3], operands[3:6])
            a, b = operands[0], operands[3]
            calls.append((operator, a.shape[0], b.shape[0], a.shape[1] * 2, operands[6]))
            return real(*operands)

        blackwell.setattr(matmul, operator, record)

    def run(method, gemm, tokens=128):
        blackwell.setenv("NVFP4_GEMM", gemm)
        forget()
        calls.clear()
        return step(method, tokens=tokens, in_features=64, out_features=128, dtype=torch.bfloat16), list(calls)

    return run


@pytest.mark.parametrize("method", nf.METHODS)
def test_what_runs_on_tensor_cores(recorded, blackwell, method):
    """The operator that was called for each product, the layouts it was given, the product made of these bytes.

    The reference quantizes here, which is faster than Triton's interpreter.
    """
    blackwell.setenv("NVFP4_KERNELS", "reference")
    want, none = recorded(method, "emulated")
    assert none == []
    bf16, fp32 = torch.bfloat16, torch.float32
    # Y = X W^T, dX = E W, dW = E^T X; gradients of FP32 weights are FP32.
    products = [(128, 128, 64, bf16), (128, 64, 128, bf16), (128, 64, 128, fp32)][: PRODUCTS[method]]
    for gemm, operator in (("scaled_mm", "scaled_mm"), ("dot_scaled", "dot_scaled"), ("flashinfer", "mm_fp4")):
        got, calls = recorded(method, gemm)
        # flashinfer makes BF16 alone: FP32 is the next one's.
        operators = ["scaled_mm" if gemm == "flashinfer" and p[3] == fp32 else operator for p in products]
        assert calls == [(name, *p) for name, p in zip(operators, products)]
        for g, w in zip(got, want):
            assert relative_square_error(g.detach(), w.detach()) < 3e-5  # the interpreter truncates to BF16


def test_where_flashinfer_alone_works_fp32_is_emulated(recorded, blackwell):
    blackwell.setattr(
        dispatch, "_look", functools.cache(lambda device, name: (1, "") if name == "flashinfer" else (None, "is wrong"))
    )
    blackwell.setenv("NVFP4_KERNELS", "reference")
    _, calls = recorded("clover", "auto")
    assert [(name, dtype) for name, *_, dtype in calls] == [("mm_fp4", torch.bfloat16)] * 2


@pytest.mark.parametrize("name, kernels", [("scaled_mm", "reference"), ("dot_scaled", "triton")])
def test_a_layer_with_ragged_edges(recorded, blackwell, name, kernels):
    """150 tokens: tiles that end inside of a matrix, padded groups in wgrad."""
    blackwell.setenv("NVFP4_KERNELS", kernels)
    want, _ = recorded("clover", "emulated", tokens=150)
    got, calls = recorded("clover", name, tokens=150)
    assert [c[0] for c in calls] == [name] * 3 and calls[2][1:4] == (128, 64, 256)
    for g, w in zip(got, want):
        assert relative_square_error(g.detach(), w.detach()) < 3e-5


def test_weights_made_once_have_their_scales_in_tiles(recorded, blackwell):
    """No pass of its own brings scales into tiles, in no pass of a step."""
    from nvfp4_kernels import matmul

    blackwell.setenv("NVFP4_GEMM", "scaled_mm")
    forget()
    blackwell.setattr(matmul, "swizzle", None)
    model = torch.nn.Sequential(nf.QuantLinear(64, 128, method="clover"))
    with nf.quantize_weights_once(model):
        (weight,) = model[0].context.weights.values()
        assert weight.scales.dim() == 1
        model(torch.randn(32, 64)).sum().backward()


FOUND = {
    "present": (1, ""),
    "wrong": (None, "returns zeros on 512 x 384 x 1024"),
    "absent": (None, "raises no module"),
    "crashing": (None, "ended its process with status -11 (Segmentation fault)"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize("scaled_mm", FOUND)
@pytest.mark.parametrize("dot_scaled", FOUND)
def test_the_choice_on_each_gpu(monkeypatch, capability, scaled_mm, dot_scaled):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    choose = dispatch.native_choice.__wrapped__  # without the cache
    for flashinfer in FOUND:
        states = {"scaled_mm": scaled_mm, "dot_scaled": dot_scaled, "flashinfer": flashinfer}
        monkeypatch.setattr(dispatch, "_look", lambda device, name: FOUND[states[name]])  # noqa: B023
        if capability < (10, 0):
            assert choose("cuda") == (None, "sm_90 has no FP4 tensor cores")
            continue
        usable = [name for name, how in states.items() if how == "present"]
        name, why = choose("cuda")
        assert name == (usable[0] if usable else None)
        assert all(FOUND[how][1] in why for other, how in states.items() if name is None or other == name)
        for asked, how in states.items():
            monkeypatch.setenv("NVFP4_GEMM", asked)
            refused = pytest.raises(ValueError, match=f"NVFP4_GEMM={asked}, but .*or set NVFP4_GEMM=emulated")
            with contextlib.nullcontext() if how == "present" else refused:
                assert choose("cuda")[0] == asked
        monkeypatch.delenv("NVFP4_GEMM")


@pytest.mark.parametrize("triton_version, cuda, missing", [("3.7.1", "13.0", True), ("3.9.0", "13.4", False)])
def test_what_is_known_of_sm_121(monkeypatch, triton_version, cuda, missing):
    import triton

    monkeypatch.setattr(dispatch, "_sm_121", lambda: True)
    monkeypatch.setattr(triton, "__version__", triton_version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    asked = []
    monkeypatch.setattr(probe, "in_child", lambda module, call: asked.append(call) or ([(None, "returns zeros")], ""))
    forget()
    (_, dot), (_, scaled) = (dispatch._look("cuda", name) for name in ("dot_scaled", "scaled_mm"))
    forget()
    assert dot == ("has no FP4 for sm_121 in Triton 3.7.1; install one after 3.8.0" if missing else "returns zeros")
    assert len(asked) == (1 if missing else 2)
    assert scaled.startswith("returns zeros") and ("CUDA 13.4" in scaled) == missing
