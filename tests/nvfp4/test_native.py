"""NVFP4 GEMMs on a machine that has none: the choice of a library, and what each library is given.

The hardware is simulated once, by _cublaslt.SimulatedCublasLt behind nvfp4_kernels.cublas. torch's scaled_mm is a
function that checks what it gets.
"""

import contextlib
import sys
from dataclasses import replace

import _cublaslt
import pytest
import torch
from _assertions import relative_square_error
from _cublaslt import NOT_SUPPORTED, SimulatedCublasLt, multiply

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.nvfp4 import dispatch, probe
from nanochat_fp4.nvfp4.format import decode, unswizzle_scales
from nanochat_fp4.nvfp4.gemm import Quantized, quantize_operand

pytest.importorskip("triton")
from nvfp4_kernels import cublas  # noqa: E402
from nvfp4_kernels import decode as decoding

on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="simulates the hardware, in Triton's interpreter")
pytestmark = [on_a_cpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32


def forget():
    dispatch.VERDICTS.clear()
    cublas.plan_of.cache_clear()


@pytest.fixture
def library(monkeypatch):
    """cuBLASLt of a machine that seems to have FP4 tensor cores; the reference quantizes."""
    simulated = SimulatedCublasLt()
    monkeypatch.setattr(cublas, "library", lambda: simulated)
    monkeypatch.setattr(cublas, "handle_and_stream", lambda device: (1, 7))
    monkeypatch.setattr(dispatch, "no_tensor_cores_reason", lambda device_type: None)
    monkeypatch.setattr(probe, "SHAPES", ((128, 128, 128), (144, 48, 96)))
    monkeypatch.setattr(probe, "LAUNCHES", 1)
    monkeypatch.setenv("NVFP4_KERNELS", "reference")  # faster than Triton's interpreter
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    forget()
    yield simulated
    forget()


def step(method, tokens=32, in_features=64, out_features=96, dtype=FP32):
    torch.manual_seed(0)
    layer = nf.QuantLinear(in_features, out_features, method=method)
    x = torch.randn(tokens, in_features).to(dtype).requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y, (x, layer.weight), torch.randn(tokens, out_features).to(dtype))


def emulated(monkeypatch, *args, **kw):
    """step without FP4 tensor cores."""
    monkeypatch.setenv("NVFP4_GEMM", "emulated")
    forget()
    result = step(*args, **kw)
    monkeypatch.delenv("NVFP4_GEMM")
    forget()
    return result


def assert_same_step(got, want, bound):
    for g, w in zip(got, want):
        assert relative_square_error(g.detach(), w.detach()) < bound


# --------------------------------------------------------------------------------------------------------------------
# What each library is given


def simulated_scaled_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, output_dtype):
    """torch's own checks of shapes and layouts, on meta tensors, and the product of these bytes."""

    def meta(t):
        return [v.to("meta") for v in t] if isinstance(t, list) else t.to("meta")

    checked = REAL_SCALED_MM(
        meta(a), meta(b.T).T, meta(scale_a), recipe_a, meta(scale_b), recipe_b,
        swizzle_a=swizzle_a, swizzle_b=swizzle_b, output_dtype=output_dtype,
    )  # fmt: skip
    assert a.is_contiguous() and b.T.is_contiguous()
    product = multiply(a.view(torch.uint8), scale_a[0], b.T.view(torch.uint8), scale_b[0], 1.0).to(output_dtype)
    assert (product.shape, product.dtype) == (checked.shape, checked.dtype)
    return product


REAL_SCALED_MM = getattr(torch.nn.functional, "scaled_mm", None)


@pytest.fixture
def all_libraries(library, monkeypatch):
    if REAL_SCALED_MM is None:
        pytest.skip("torch before 2.10")
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", simulated_scaled_mm)
    return library


def flat_row_major(scales):
    rows, columns = scales.shape
    flat = torch.zeros(-(-rows // 128) * 128 * (-(-columns // 4) * 4), dtype=torch.uint8)
    flat[: scales.numel()] = scales.view(torch.uint8).flatten()
    return flat.view(scales.dtype)


@pytest.mark.parametrize("name", dispatch.LIBRARIES)
def test_each_library_multiplies_what_it_is_given(all_libraries, monkeypatch, name):
    """Scales in tiles and row-major, tails in every dimension. Row-major scales that are taken for tiles, which
    libraries accept without an error, give another product."""
    a, b = (probe.fp4_operand(CPU, rows, 96) for rows in (144, 160))
    want = a.dequantize().double() @ b.dequantize().double().T
    for pair in ((a, b), [replace(t, scales=unswizzle_scales(t.scales, len(t.codes), 6)) for t in (a, b)]):
        for dtype in (BF16, FP32):
            got = dispatch.mm(*pair, dtype, name)
            assert got.dtype == dtype and relative_square_error(got, want) < (2e-5 if dtype == BF16 else 1e-12)
    assert probe.problem_of(name, CPU, probe.SHAPES) is None
    monkeypatch.setattr(probe, "swizzle_scales", flat_row_major)
    monkeypatch.setattr(probe.NVFP4Tensor, "dequantize", lambda t: values_of_row_major(t))
    assert "relative square error" in probe.problem_of(name, CPU, probe.SHAPES)


def values_of_row_major(t):
    rows, columns = len(t.codes), t.codes.shape[1] // 8
    scales = t.scales.view(torch.uint8)[: rows * columns].view(rows, columns).view(t.scales.dtype)
    return decode(t.codes, scales) * t.tensor_scale


@pytest.mark.parametrize("name", dispatch.LIBRARIES)
def test_products_are_added_to_a_gradient(all_libraries, name):
    """cuBLASLt adds in the GEMM, with one rounding; scaled_mm writes a product first. A NaN that was there stays."""
    a, b = (probe.fp4_operand(CPU, rows, 96) for rows in (144, 160))
    into = torch.randn(144, 160)
    into[3, 5] = torch.nan
    want = into + dispatch.mm(a, b, FP32, name)
    all_libraries.calls.clear()
    dispatch.mm_add(a, b, into, name)
    torch.testing.assert_close(into, want, equal_nan=True)
    assert [call[4] for call in all_libraries.calls] == ([1.0] if name == "cublaslt" else [])


def test_every_stream_and_thread_has_its_own_alpha(library, monkeypatch):
    """A benchmark multiplies on the default stream, warms up on a second one and captures a graph on a third. Each
    product is one call, in the dtype that was asked for, with the operands' own tensor scales."""
    for stream in (0, 8, 9):
        monkeypatch.setattr(cublas, "handle_and_stream", lambda device, stream=stream: (1, stream))
        a, b = (probe.fp4_operand(CPU, 16, 64) for _ in range(2))
        dispatch.mm(a, b, BF16, "cublaslt")
        alpha = float(a.tensor_scale * b.tensor_scale)
        assert library.calls == [(stream or None, (16, 16, 64), BF16, alpha, 0.0)]
        library.calls.clear()


def test_a_constant_of_a_graph_is_not_kept(monkeypatch):
    """What fills it is recorded, not run: a product outside of the graph would read memory that nobody has written."""
    monkeypatch.setattr(cublas, "is_captured", lambda device: True)
    cublas.constant(0.625, CPU).fill_(torch.nan)
    monkeypatch.setattr(cublas, "is_captured", lambda device: False)
    assert cublas.constant(0.625, CPU) == 0.625 and cublas.constant(0.625, CPU) is cublas.constant(0.625, CPU)


# --------------------------------------------------------------------------------------------------------------------
# Layers


# Which products of a step (forward and backward) are not FP4 products, with every tensor core there: the first ones,
# which are BF16 or FP8. The second terms of late methods come at the end of a run.
OTHERS = dict.fromkeys(nf.METHODS, 0) | {"bf16": 3, "fp8": 3, "clover_fp8_forward": 1}


@pytest.mark.parametrize("method", nf.METHODS)
def test_what_runs_on_tensor_cores(library, monkeypatch, method):
    """Y = X W^T, dX = E W, dW = E^T X of codes, with the emulated layer's results. Gradients of weights are FP32."""
    want = emulated(monkeypatch, method, tokens=128, out_features=128, dtype=BF16)
    got = step(method, tokens=128, out_features=128, dtype=BF16)
    products = [((128, 128, 64), BF16), ((128, 64, 128), BF16), ((128, 64, 128), FP32)]
    calls = [(shape, dtype) for _, shape, dtype, *_ in library.calls if shape in dict(products)]
    assert calls[-3:] == products[OTHERS[method] :]
    assert_same_step(got, want, 1e-5)  # MS-EDEN's tensor_scale is applied after the rounding to BF16, not before


@pytest.mark.parametrize("shape, products", [({"tokens": 150}, 3), ({"in_features": 48}, 2)])
def test_a_layer_with_ragged_edges(library, monkeypatch, shape, products):
    """150 tokens: tiles that end inside of a matrix, padded groups in wgrad. 48 numbers are no whole rows of 16 bytes
    of codes: the forward is emulated."""
    want = emulated(monkeypatch, "clover", **shape)
    assert dispatch.native_gemm("cpu") == "cublaslt"  # the test's own products are not counted
    library.calls.clear()
    assert_same_step(step("clover", **shape), want, 1e-12)
    assert len(library.calls) == products


@pytest.mark.parametrize("rows, k, taken", [(32, 64, True), (24, 64, False), (32, 48, False), (16, 32, True)])
def test_tensor_cores_take_whole_tiles_of_16(library, rows, k, taken):
    """Other products are emulated, such as that of an output head of 24 tokens."""
    a, b = (nf.quantize(torch.randn(n, k), "rtn") for n in (8, rows))
    assert dispatch.library(a, b) == ("cublaslt" if taken else None)


def test_micro_batches_add_to_the_gradient_in_the_gemm(library, monkeypatch):
    def gradient():
        torch.manual_seed(0)
        layer = nf.QuantLinear(64, 96, method="clover")
        with nf.accumulate_gradients(layer):
            for x in torch.randn(3, 32, 64):
                layer(x).square().mean().backward()
        return layer.weight.grad

    monkeypatch.setenv("NVFP4_GEMM", "emulated")
    want = gradient()
    monkeypatch.delenv("NVFP4_GEMM")
    forget()
    assert dispatch.native_gemm("cpu") == "cublaslt"
    library.calls.clear()
    assert relative_square_error(gradient(), want) < 1e-12
    assert [beta for *_, beta in library.calls] == [0.0, 1.0] * 3  # an output, and a weight gradient


def test_compiled_layers_multiply_and_add_alike(library):
    """torch.compile takes a product, and one that is added to a gradient, for operators of one graph."""
    rtn = nf.Gemm(nf.Operand("rtn"), nf.Operand("rtn"))  # without random numbers, which take long to trace
    recipe = nf.Recipe("rtn_everywhere", output=rtn, grad_input=rtn, grad_weight=rtn)
    layer, x, results = nf.QuantLinear(64, 128, method=recipe), torch.randn(32, 64), []
    for forward in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        assert dispatch.native_gemm("cpu") == "cublaslt"
        library.calls.clear()
        torch.manual_seed(0)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        with nf.accumulate_gradients(layer):
            forward(leaf).square().sum().backward()
        results.append((leaf.grad, layer.weight.grad.clone()))
        assert [beta for *_, beta in library.calls] == [0.0, 0.0, 1.0]  # forward, dgrad, and wgrad into the gradient
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("method, kv", [("clover", 32), ("nvidia", 32), ("clover", 128)])
def test_weights_that_fsdp_gathered_are_multiplied_as_codes(library, method, kv):
    """q, k, v of one tensor_scale, each in a buffer of its own, are one product, and the bits of one weight's.

    Weights of whole tiles have their scales in them, one weight's tiles after the other's.
    """
    from nanochat_fp4.nvfp4.epilogue import fused_linear
    from nanochat_fp4.nvfp4.sharding import ShardedLinear

    torch.manual_seed(0)
    layers = [nf.QuantLinear(64, rows, bias=False, method=method) for rows in (2 * kv, kv, kv)]
    x, e = torch.randn(64, 64), torch.randn(64, 4 * kv)
    amax = max(layer.weight.detach().abs().max() for layer in layers)

    def result():
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = torch.cat(fused_linear(leaf, *layers), dim=-1)
        return y.detach(), *torch.autograd.grad(y, (leaf, *(layer.weight for layer in layers)), e)

    assert dispatch.native_gemm("cpu") == "cublaslt"
    library.calls.clear()
    want = result()
    once, library.calls = [shape for _, shape, *_ in library.calls], []
    for layer in layers:
        how = layer.weight_quantization(CPU)._replace(amax=amax, tiles=kv == 128)
        layer.__class__ = ShardedLinear
        layer.gathered = quantize_operand(layer.weight.detach(), how, keep_codes=True).without_cache()
        layer.weight = torch.nn.Parameter(torch.full((), torch.nan).expand(layer.weight.shape))  # as sharding.py's
    attention = torch.nn.ModuleDict(dict(zip("qkv", layers)))
    attention.fused_linears = ("q", "k", "v")
    for inside in (contextlib.nullcontext(), nf.quantize_weights_once(attention)):
        library.calls.clear()
        with inside:
            got = result()
        assert len(once) == 3 and [shape for _, shape, *_ in library.calls] == once
        assert all(torch.equal(g, w) for g, w in zip(got, want))


def test_weights_made_once_have_their_scales_in_tiles(library, monkeypatch):
    """No pass of its own brings scales into tiles, in no pass of a step."""
    assert dispatch.native_gemm("cpu") == "cublaslt"
    monkeypatch.setattr(decoding, "swizzle", None)
    model = torch.nn.Sequential(nf.QuantLinear(64, 128, method="clover"))
    with nf.quantize_weights_once(model):
        model(torch.randn(32, 64)).sum().backward()


# --------------------------------------------------------------------------------------------------------------------
# The choice


def zeros(*operands):
    return 0 * multiply(*operands)


def without_tensor_scales(*operands):
    return multiply(*operands[:4], 1.0)


def rows_swapped(*operands):
    return multiply(*operands).flip(0)


def no_subnormal_scales(a, a_scales, *rest):
    scales = a_scales.view(torch.uint8)
    flushed = torch.where(scales < 8, torch.zeros_like(scales), scales).view(torch.float8_e4m3fn)
    return multiply(a, flushed, *rest)


def ignores_layouts(a, a_scales, b, b_scales, alpha):
    def row_major(codes, scales):
        rows, columns = codes.shape[0], codes.shape[1] // 8
        return scales.view(torch.uint8)[: rows * columns].view(rows, columns).view(scales.dtype)

    return alpha * (decode(a, row_major(a, a_scales)) @ decode(b, row_major(b, b_scales)).T)


def raises(*operands):
    raise RuntimeError(f"cublasLtMatmul returned status {NOT_SUPPORTED}\nand a long story")


FAULTS = {
    zeros: "returns zeros",
    without_tensor_scales: "has a relative square error",
    rows_swapped: "has a relative square error",
    ignores_layouts: "has a relative square error",
    no_subnormal_scales: "returns zeros",
    raises: "raises cublasLtMatmul returned status 15",
}


@pytest.mark.parametrize("fault, reason", FAULTS.items(), ids=lambda f: getattr(f, "__name__", ""))
def test_a_library_that_is_wrong_is_not_used(all_libraries, monkeypatch, fault, reason):
    all_libraries.multiply = fault
    assert dispatch.native_gemm("cpu") == "scaled_mm"  # the next one
    why = dispatch.verdict("cpu").reason
    assert why.startswith(f"cublaslt {reason}") and "\n" not in why
    # Asked for, it is refused instead.
    forget()
    monkeypatch.setenv("NVFP4_GEMM", "cublaslt")
    with pytest.raises(ValueError, match=f"NVFP4_GEMM=cublaslt, but cublaslt {reason}.*NVFP4_GEMM=emulated"):
        dispatch.native_gemm("cpu")


def test_a_library_that_is_wrong_in_one_launch_of_twenty_is_not_used(library, monkeypatch):
    """A missing fence shows in some launches alone, and the first may be right."""
    launches = []

    def tips(*operands):
        launches.append(1)
        product = multiply(*operands)
        product[0, 0] *= 1.1 if len(launches) == 13 else 1
        return product

    monkeypatch.setattr(probe, "LAUNCHES", 20)
    library.multiply = tips
    assert "some of 20 launches" in probe.problem_of("cublaslt", CPU, probe.SHAPES)


def test_nothing_works(all_libraries, monkeypatch):
    """A run that did not ask for FP4 by name goes on, and hears what that costs."""
    all_libraries.multiply = zeros
    monkeypatch.delattr(torch.nn.functional, "scaled_mm")
    with pytest.warns(UserWarning, match="slower than method bf16"):
        assert dispatch.native_gemm("cpu") is None
    why = dispatch.verdict("cpu").reason
    assert "cublaslt returns zeros" in why and "scaled_mm is not in torch" in why
    assert all(torch.isfinite(t).all() and t.any() for t in step("clover"))


@pytest.mark.parametrize(
    "value, text",
    [("fast", "NVFP4_GEMM is 'fast', .*auto, emulated, cublaslt"),
     ("cublaslt", "NVFP4_GEMM=cublaslt, .*CUDA")],
)  # fmt: skip
def test_a_wish_that_cannot_be_met(monkeypatch, value, text):
    monkeypatch.setenv("NVFP4_GEMM", value)
    forget()
    with pytest.raises(ValueError, match=text):
        nf.backend()
    forget()


def test_an_empty_wish_is_none(library, monkeypatch):
    monkeypatch.setenv("NVFP4_GEMM", "")
    monkeypatch.setenv("NVFP4_KERNELS", "")
    assert dispatch.native_gemm("cpu") == "cublaslt"


def test_the_doctor_runs_through_it(library, monkeypatch):
    """Forward and backward of a layer against the reference; a fault that the libraries' own test does not meet."""
    from nanochat_fp4 import doctor

    monkeypatch.setattr(doctor, "LAYER", (48, 96, 64))
    assert "passed" in doctor.self_check("cpu", "clover")
    library.multiply = lambda *operands: multiply(*operands) * (operands[2].shape[0] != 96)
    with pytest.raises(UserError, match="grad_input is all zeros"):
        doctor.self_check("cpu", "clover")


def test_a_large_product_is_sampled_in_every_tile(library):
    """1024 x 768 in tiles of 128: a fault in one tile alone is found."""
    shapes, state = [(1024, 768, 64)], torch.get_rng_state()
    assert probe.problem_of("cublaslt", CPU, shapes) is None

    def one_tile_is_wrong(*operands):
        y = multiply(*operands)
        y[896:1024, 384:512] *= -1
        return y

    library.multiply = one_tile_is_wrong
    assert "relative square error" in probe.problem_of("cublaslt", CPU, shapes)
    assert torch.equal(torch.get_rng_state(), state)


def test_shapes_that_a_library_does_not_take_are_not_tested(library):
    assert probe.problem_of("cublaslt", CPU, [(64, 24, 64), (64, 32, 48)]) is None and not library.calls


# --------------------------------------------------------------------------------------------------------------------
# The child process, and the ranks


SHAPES = [(128, 64, 96)]


def child(monkeypatch, lines, problem=""):
    """Stands in for the child process: what it prints, and how it ends. Returns the commands."""
    commands = []
    monkeypatch.setattr(probe, "run_child", lambda command: commands.append(command) or (lines, problem))
    monkeypatch.setattr(probe, "problem_of", lambda name, device, shapes: commands.append((name, device)))
    return commands


CUDA = torch.device("cuda", 3)
RIGHT, WRONG = '["cublaslt", null]', '["cublaslt", "returns zeros"]'


def test_one_child_process_tests_all_products(monkeypatch):
    commands = child(monkeypatch, ["[]", WRONG, '["scaled_mm", null]'])
    found = probe.examine(["cublaslt", "scaled_mm"], CUDA, SHAPES)
    assert found == ({"cublaslt": "returns zeros", "scaled_mm": None}, "") and len(commands) == 1
    assert commands[0][1:3] == ["-m", "nanochat_fp4.nvfp4.probe"] and '"cuda:3"' in commands[0][3]


def test_a_library_that_ends_the_child_process_is_named(monkeypatch):
    """And those after it are not tested, by no process."""
    commands = child(monkeypatch, ["[]"], "ended its process with status -11 (Segmentation fault)")
    found, note = probe.examine(["cublaslt", "scaled_mm"], CUDA, SHAPES)
    assert "Segmentation" in found["cublaslt"] and "scaled_mm" not in found and not note and len(commands) == 1


@pytest.mark.parametrize(
    "lines, problem",
    [
        ([], "ended its process with status 1 (CUDA-capable device(s) is/are busy or unavailable)"),
        (["[]"], "ended its process with status 1 (torch.OutOfMemoryError: CUDA out of memory)"),
    ],
)
def test_a_child_that_cannot_use_the_gpu_is_replaced_by_this_process(monkeypatch, lines, problem):
    """A GPU for one process, and one of 8 GB. The line says so."""
    commands = child(monkeypatch, lines, problem)
    found, note = probe.examine(["cublaslt"], CUDA, SHAPES)
    assert found == {"cublaslt": None} and commands[1:] == [("cublaslt", CUDA)]
    assert "in this process" in note and problem in note


def test_the_child_process_is_a_program(library):
    """It prints [] first, and a line for each product until an FP4 library is right."""
    job = '{"names": ["cublaslt", "scaled_mm"], "device": "cpu", "shapes": [[16, 16, 24]]}'
    command = [sys.executable, "-m", "nanochat_fp4.nvfp4.probe"]
    assert probe.run_child([*command, job]) == (["[]", '["cublaslt", null]'], "")  # K is 24: nothing is multiplied
    lines, problem = probe.run_child([*command, "{}"])
    assert not lines and "status 1 (KeyError" in problem


def test_a_child_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(probe, "SECONDS", 0.5)
    code = "import time; print([], flush=True); time.sleep(60)"
    lines, problem = probe.run_child([sys.executable, "-c", code])
    assert "no result after" in problem and lines in ([], ["[]"])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0), (12, 1)])
@pytest.mark.parametrize("first", [None, "returns zeros"])
@pytest.mark.parametrize("second", [None, "raises nothing known"])
def test_the_choice_on_each_gpu(monkeypatch, capability, first, second):
    """A Hopper starts no child. On sm_12x MXFP8 is tested for each pair of elements in the same child."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dispatch, "missing_reason", lambda name: None)
    monkeypatch.delenv("NVFP4_GEMM", raising=False)
    asked, states = [], {"cublaslt": first, "scaled_mm": second}
    wrong = dispatch.MXFP8[2]

    def examine(names, device, shapes):
        asked.append((names, shapes))
        return {name: states.get(name, "raises" if name == wrong else None) for name in names}, ""

    monkeypatch.setattr(probe, "examine", examine)
    forget()
    dispatch.decide("cuda", SHAPES)
    found = dispatch.verdict("cuda")
    if capability < (10, 0):
        assert found == (None, "sm_90 has no FP4 tensor cores", ()) and not asked
        return
    slow = capability[0] == 12
    assert asked == [(["cublaslt", "scaled_mm", *dispatch.MXFP8 * slow], SHAPES)]
    assert found.library == next((name for name, problem in states.items() if problem is None), None)
    assert all(problem in found.reason for problem in states.values() if problem and not found.library)
    assert found.mxfp8 == (dispatch.MXFP8[:2] if slow else ())
    assert found.library or ("CUDA 13.4" in found.reason) == (capability == (12, 1))
    for name, problem in states.items():
        monkeypatch.setenv("NVFP4_GEMM", name)
        forget()
        refused = pytest.raises(ValueError, match=f"NVFP4_GEMM={name}, .*NVFP4_GEMM=emulated")
        with refused if problem else contextlib.nullcontext():
            assert dispatch.native_gemm("cuda") == name
    forget()


def ranks(capabilities, wish):
    """Rank 0 alone tests; all ranks have its verdict, its refusal, or hear that their GPUs differ."""
    import os

    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ["NVFP4_GEMM"] = wish
    torch.cuda.get_device_capability = lambda *device: capabilities[rank]
    torch.cuda.current_device = lambda: 0
    dispatch.missing_reason = lambda name: None
    probe.examine = lambda names, device, shapes: ({name: 1 / (rank == 0) and FOUND.get(name) for name in names}, "")
    try:
        if len(set(capabilities)) > 1 or wish == "cublaslt":
            with pytest.raises(ValueError, match="differ" if wish == "auto" else "NVFP4_GEMM=cublaslt, but"):
                dispatch.decide("cuda", SHAPES)
        else:
            dispatch.decide("cuda", SHAPES)
            assert dispatch.native_gemm("cuda") == "scaled_mm"
    finally:
        dist.destroy_process_group()


FOUND = {"cublaslt": "returns zeros"}


@pytest.mark.parametrize("second, wish", [((10, 0), "auto"), ((9, 0), "auto"), ((10, 0), "cublaslt")])
def test_ranks_take_the_verdict_of_the_first(run_ranks, second, wish):
    run_ranks(f"import test_native; test_native.ranks({[(10, 0), second]}, {wish!r})")


def test_a_triton_that_is_known_to_be_wrong_is_refused(monkeypatch):
    """3.8.0 on sm_12x, in one line that names it; other GPUs and releases are not."""
    import triton

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = torch.device("cuda")
    for capability, version, refused in (((12, 0), "3.8.0", True), ((9, 0), "3.8.0", False), ((12, 0), "3.7.1", False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device, c=capability: c)
        monkeypatch.setattr(triton, "__version__", version)
        for wish in ("", "triton"):
            monkeypatch.setenv("NVFP4_KERNELS", wish)
            dispatch.no_kernels_reason.cache_clear()
            error = pytest.raises(ValueError, match="Triton 3.8.0 .*sm_12x")
            with error if refused else contextlib.nullcontext():
                assert dispatch.use_kernels(gpu)
        monkeypatch.setenv("NVFP4_KERNELS", "reference")
        assert not dispatch.use_kernels(gpu)
        assert bool(dispatch.triton_problem()) == refused  # torch.compile asks as well
    dispatch.no_kernels_reason.cache_clear()


def test_the_backend_says_which_path_runs(library, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (12, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "RTX")
    monkeypatch.setattr(dispatch, "verdict", lambda device: dispatch.Verdict("cublaslt"))
    assert "FP4 tensor cores (cublaslt" in nf.backend().gemm


# ----------------------------------------------------------------------------------------------------------------------
# FP8 on a GPU that multiplies one layout alone, as a Hopper does


@pytest.fixture
def fp8(library, monkeypatch):
    """FP8 tensor cores that take a row-major times a column-major matrix. The fixture is the list of their products."""
    calls = []

    def scaled_mm(a, b, scale_a, scale_b, out_dtype, use_fast_accum):
        if not (a.is_contiguous() and b.T.is_contiguous()):
            raise RuntimeError("only row-major and column-major")
        calls.append((out_dtype, use_fast_accum))
        return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(dispatch, "has_fp8_tensor_cores", lambda device_type: True)
    return calls


OPERANDS = [(gemm, side) for gemm in ("output", "grad_input", "grad_weight") for side in "ab"]
EIGHT_BITS = {
    **{name: nf.get_recipe(name) for name in ("fp8", "clover_fp8_forward")},
    **{f"{gemm}.{side} in FP8": (gemm, side) for gemm, side in OPERANDS},
    "FP8 dgrad": (nf.Operand("e4m3", kept="four_over_six"), nf.Operand("e4m3"), "grad_input"),
    "FP8 wgrad": (nf.Operand("e4m3"), nf.Operand("e4m3", kept="four_over_six"), "grad_weight"),
}


def with_eight_bits(what) -> nf.Recipe:
    """Clover with one operand in FP8, or with its forward and one backward GEMM in FP8."""
    clover = nf.get_recipe("clover")
    if isinstance(what, nf.Recipe):
        return what
    if len(what) == 3:
        a, b, gemm = what
        changes = {"output": nf.Gemm(a, b), gemm: nf.Gemm(nf.Operand("e5m2"), nf.Operand())}
        return replace(clover, name="eight", **changes)
    gemm, side = what
    return replace(clover, name="eight", **{gemm: replace(getattr(clover, gemm), **{side: nf.Operand("e4m3")})})


# The products that FP8 tensor cores compute, and whether their sums may be fast: those of gradients are exact. An
# operand in FP8 beside one in NVFP4 is decoded.
FORWARD, DGRAD, WGRAD = (BF16, True), (BF16, False), (FP32, False)
ON_FP8 = {
    "fp8": [FORWARD, DGRAD, WGRAD],
    "clover_fp8_forward": [FORWARD],
    "FP8 dgrad": [FORWARD, DGRAD],
    "FP8 wgrad": [FORWARD, WGRAD],
}


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_8_and_4_bits_may_be_mixed_in_any_operand(fp8, monkeypatch, name):
    recipe, sizes = with_eight_bits(EIGHT_BITS[name]), {"tokens": 128, "out_features": 128, "dtype": BF16}
    with monkeypatch.context() as m:
        m.setattr(dispatch, "has_fp8_tensor_cores", lambda device_type: False)
        want = emulated(m, recipe, **sizes)
    assert not fp8
    got = step(recipe, **sizes)
    assert fp8 == ON_FP8.get(name, [])
    assert_same_step(got, want, 1e-5)


@pytest.mark.parametrize("method", ["fp8", "clover_fp8_forward"])
def test_the_product_of_relu_squared_has_exact_sums(fp8, method):
    """In training, in a block that is recomputed, for a layer with a hook, and without gradients."""
    block = nf.convert(GPT(GPTConfig(32, 64, 1, 1, 1, 64)), method, verbose=False).transformer.h[0]
    x, remove = torch.randn(128, 64), block.mlp.c_proj.register_forward_pre_hook(lambda _, args: None).remove
    block.mlp(x)
    remove()
    block.mlp(x)
    torch.no_grad()(block.mlp)(x)
    block.mlp(x, recompute=True)
    assert fp8 == 4 * [(FP32, True), (FP32, False)]


# ----------------------------------------------------------------------------------------------------------------------
# FP8 on a GPU whose FP8 is slow: MXFP8 with block scales of 1


@pytest.fixture
def slow_fp8(library, monkeypatch):
    monkeypatch.setattr(dispatch, "fp8_is_slow", lambda device_type: True)
    monkeypatch.setattr(dispatch, "has_fp8_tensor_cores", lambda device_type: True)
    return library


@pytest.mark.parametrize("pair", dispatch.MXFP8)
def test_mxfp8_with_scales_of_one_is_the_product_of_fp8(slow_fp8, monkeypatch, pair):
    """Of two E4M3 operands, and of a gradient in E5M2 and an E4M3 operand."""
    dtypes = [getattr(torch, name) for name in pair.split()[1:]]
    assert dispatch.uses_mxfp8("cpu", *dtypes)
    for out_dtype in (BF16, FP32):
        a, b = (torch.randn(rows, 96).to(dtype) for rows, dtype in zip((33, 64), dtypes))
        x, y = Quantized(a, tensor_scale=torch.tensor(0.37)), Quantized(b, tensor_scale=torch.tensor(1.9))
        slow_fp8.calls.clear()
        got = dispatch.mm(x, y, out_dtype, dispatch.library(x, y))
        want = (a.double() @ b.double().T * x.tensor_scale * y.tensor_scale).to(out_dtype)
        assert got.dtype == out_dtype and relative_square_error(got.float(), want.float()) < 1e-5
        assert [call[1] for call in slow_fp8.calls] == [(33, 64, 96)]
    monkeypatch.setattr(torch, "full", None)  # the block scales are made once for a shape
    assert torch.equal(dispatch.mm(x, y, out_dtype, "mxfp8"), got)


def test_all_products_of_fp8_are_mxfp8(slow_fp8):
    """Forward, dgrad and wgrad: E5M2 gradients with E4M3 operands."""
    assert dispatch.native_gemm("cpu") == "cublaslt"
    slow_fp8.calls.clear()
    step("fp8", tokens=128, out_features=128, dtype=BF16)
    assert [call[1] for call in slow_fp8.calls] == [(128, 128, 64), (128, 64, 128), (128, 64, 128)]


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (lambda x, xs, y, ys, alpha: torch.zeros(len(x), len(y)), "returns zeros"),
        (lambda x, xs, y, ys, alpha: x.float() @ y.float().T, "relative square error"),
        (lambda x, xs, y, ys, alpha: 1 / 0, "raises division by zero"),
    ],
)
def test_mxfp8_that_is_wrong_is_not_used(slow_fp8, monkeypatch, wrong, problem):
    monkeypatch.setattr(_cublaslt, "multiply_8_bits", wrong)
    assert problem in probe.problem_of(dispatch.MXFP8[0], CPU, probe.SHAPES)
    assert dispatch.verdict("cpu").mxfp8 == () and dispatch.native_gemm("cpu") == "cublaslt"
    assert not dispatch.uses_mxfp8("cpu", torch.float8_e4m3fn, torch.float8_e4m3fn)


def test_mxfp8_is_for_gpus_whose_fp8_is_slow(library):
    assert not dispatch.uses_mxfp8("cpu", torch.float8_e4m3fn, torch.float8_e4m3fn)
