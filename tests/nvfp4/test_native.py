"""The choice of a native NVFP4 GEMM, and what it is given, on a machine that has none: the hardware is simulated.

torch's scaled_mm is replaced by a function that first asks torch's own shape checks (on meta tensors), then computes
the product from what it got: swizzled scales, transposed codes. So a layer through it must equal the emulated layer.
"""

import pytest
import torch
from _assertions import relative_square_error

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.nvfp4 import dispatch
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
    product = ((x @ y.T) * (scale_a[1] * scale_b[1])).to(output_dtype)
    assert (product.shape, product.dtype) == (checked.shape, checked.dtype)
    return product


REAL_SCALED_MM = getattr(torch.nn.functional, "scaled_mm", None)


def forget():
    dispatch.native_choice.cache_clear()
    dispatch._look.cache_clear()


@pytest.fixture
def blackwell(monkeypatch):
    """As if the CPU had FP4 tensor cores, reached through torch's scaled_mm; kernels in Triton's interpreter."""
    monkeypatch.setattr(dispatch, "no_tensor_cores_reason", lambda device_type: None)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", simulated_scaled_mm)
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    forget()
    yield monkeypatch
    forget()


def step(method, tokens=64, in_features=64, out_features=96, dtype=torch.float32):
    torch.manual_seed(0)
    layer = nf.QuantLinear(in_features, out_features, method=method)
    x = torch.randn(tokens, in_features).to(dtype).requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y, (x, layer.weight), torch.randn(tokens, out_features).to(dtype))


@pytest.mark.parametrize(
    "name, method, native_gemms",
    [
        ("scaled_mm", "clover", 3),
        ("scaled_mm", "tetrajet_v2", 3),
        ("dot_scaled", "clover", 3),
        ("dot_scaled", "nvidia", 3),
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
    [("fast", "NVFP4_GEMM is 'fast', expected auto, emulated, scaled_mm or dot_scaled"),
     ("scaled_mm", "NVFP4_GEMM=scaled_mm, but no CUDA device")],
)  # fmt: skip
def test_a_wish_that_cannot_be_met(monkeypatch, value, text):
    monkeypatch.setenv("NVFP4_GEMM", value)
    forget()
    with pytest.raises(ValueError, match=text):
        nf.backend()
    forget()


def test_the_doctor_runs_through_it(blackwell):
    """Forward and backward of a layer against the reference; a fault that the GEMM's own probe does not meet."""
    from nanochat_fp4 import doctor

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


@pytest.mark.parametrize("method", ["clover", "nvidia"])
def test_weights_that_fsdp_gathered_are_multiplied_as_codes(blackwell, method):
    """q, k, v of one tensor_scale, each in a buffer of its own, are one product, and the bits of one weight's."""
    from nanochat_fp4.nvfp4.linear import fused_linear
    from nanochat_fp4.nvfp4.operands import quantize_operand

    torch.manual_seed(0)
    layers = [nf.QuantLinear(64, rows, bias=False, method=method) for rows in (64, 32, 32)]
    x, e = torch.randn(64, 64), torch.randn(64, 128)
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
        how = layer.weight_quantization(torch.device("cpu"))._replace(amax=amax)
        layer.gathered = quantize_operand(layer.weight.detach(), how, keep_codes=True).without_cache()
        layer.weight = torch.nn.Parameter(torch.full((), torch.nan).expand(layer.weight.shape))  # as sharding.py's
    got = result()
    assert len(once) == 3 and calls == once
    assert all(torch.equal(g, w) for g, w in zip(got, want))


def refuses_odd_sizes(a, b, *args, **kw):
    if a.shape[1] * 2 % 128:
        raise NotImplementedError("CUBLAS_STATUS_NOT_SUPPORTED")
    return simulated_scaled_mm(a, b, *args, **kw)


def test_a_refused_shape_alone_is_emulated(blackwell):
    """One refused shape had taken FP4 away everywhere."""
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


def test_row_major_scales_give_another_product(blackwell):
    """The negative control: libraries accept them without an error."""
    from nvfp4_kernels import matmul

    def unswizzled(scales):
        rows, columns = scales.shape
        size = -(-rows // 128) * 128 * (-(-columns // 4) * 4)
        flat = torch.zeros(size, dtype=torch.uint8)
        flat[: scales.numel()] = scales.view(torch.uint8).flatten()
        return flat.view(scales.dtype)

    blackwell.setattr(matmul, "swizzle", unswizzled)
    multiple, problem = dispatch.probe_implementation("cpu", "scaled_mm")
    assert multiple is None and "relative square error" in problem


def test_a_crash_ends_a_child_process_alone():
    multiple, problem = dispatch.in_child("__import__('os').abort()")
    assert multiple is None and problem.startswith("ended its process with status -6")
    assert dispatch.in_child("(128, 'raises x')") == (128, "raises x")
    assert dispatch.in_child("__import__('time').sleep(60)", timeout=0.01) == (None, "had no result after 0 s")


def test_a_gpu_is_probed_in_a_child_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dispatch, "in_child", lambda call: (64, call))
    forget()
    assert dispatch._look("cuda", "dot_scaled") == (64, "probe_implementation('cuda:3', 'dot_scaled')")
    forget()


# Which products of a step (forward and backward) are FP4 products, with every tensor core there. The rest is BF16:
# what is not quantized, and FP8. The second terms of late methods come at the end of a run.
PRODUCTS = dict.fromkeys(nf.METHODS, 3) | {"bf16": 0, "fp8": 0}


@pytest.mark.parametrize("method", nf.METHODS)
def test_what_runs_on_tensor_cores(blackwell, method):
    """The operator that was called, the layouts it was given, and a product computed from these bytes."""
    from torch.nn.functional import ScalingType, SwizzleType

    assert dispatch.native_choice("cpu")[0] == "scaled_mm"
    calls = []

    def recorded(a, b, scale_a, recipe_a, scale_b, recipe_b, **kw):
        calls.append((tuple(a.shape), tuple(b.shape)))
        for codes, scales, recipe in ((a, scale_a, recipe_a), (b.T, scale_b, recipe_b)):
            assert codes.dtype == torch.float4_e2m1fn_x2 and codes.is_contiguous()
            tiles = -(-codes.shape[0] // 128) * -(-codes.shape[1] // 32)  # of 128 x 4 scales
            assert scales[0].dtype == torch.float8_e4m3fn and scales[0].numel() == 512 * tiles
            assert recipe == [ScalingType.BlockWise1x16, ScalingType.TensorWise] and scales[1].dim() == 0
        assert kw["swizzle_a"] == kw["swizzle_b"] == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        return simulated_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, **kw)

    blackwell.setattr(torch.nn.functional, "scaled_mm", recorded)
    got = step(method, tokens=128, in_features=64, out_features=128)
    # Y = X W^T, dX = E W, dW = E^T X: rows of a, then of b, in bytes of codes.
    shapes = [((128, 32), (32, 128)), ((128, 64), (64, 64)), ((128, 64), (64, 64))]
    assert calls == shapes[: PRODUCTS[method]]
    blackwell.setenv("NVFP4_GEMM", "emulated")
    forget()
    for g, w in zip(got, step(method, tokens=128, in_features=64, out_features=128)):
        assert relative_square_error(g.detach(), w.detach()) < 1e-12


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
    monkeypatch.setattr(dispatch, "_look", lambda device, name: FOUND[{"scaled_mm": scaled_mm}.get(name, dot_scaled)])
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    choose = dispatch.native_choice.__wrapped__  # without the cache
    if capability < (10, 0):
        assert choose("cuda") == (None, "sm_90 has no FP4 tensor cores")
        return
    usable = [name for name, how in (("scaled_mm", scaled_mm), ("dot_scaled", dot_scaled)) if how == "present"]
    name, why = choose("cuda")
    assert name == (usable[0] if usable else None)
    assert (FOUND[scaled_mm][1] in why) and (name or FOUND[dot_scaled][1] in why)
    for asked, how in (("scaled_mm", scaled_mm), ("dot_scaled", dot_scaled)):
        monkeypatch.setenv("NVFP4_GEMM", asked)
        if how == "present":
            assert choose("cuda")[0] == asked
        else:
            with pytest.raises(ValueError, match=f"NVFP4_GEMM={asked}, but .*; unset it, or set NVFP4_GEMM=emulated"):
                choose("cuda")
