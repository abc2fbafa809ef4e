"""The kernel of kernels/nvfp4_kernels/rotate.py against the reference.

The arithmetic after the rotation is the reference's, operation for operation; the rotation is a sum of 128 FP32 terms,
which the tensor cores (and the interpreter's matrix product) add in an order of their own, so that a rotated value may
differ in its last bits and then, rarely, lie on the other side of a rounding boundary. Hence two kinds of test:

* inputs that are small integers times powers of two, whose rotation is exact in any order: bit for bit, everywhere;
* any input: at least 99.9% of the codes equal, the rest one E2M1 step apart.
"""

import pytest
import torch
from _assertions import assert_same_bits, relative_square_error

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from _rows import METHOD_TABLE  # noqa: E402
from nvfp4_kernels import _math as m  # noqa: E402
from nvfp4_kernels import rotate  # noqa: E402
from nvfp4_kernels.quantize import hardware  # noqa: E402
from nvfp4_kernels.rotate import RotatedOperand, rotate_quantize  # noqa: E402

import nanochat_fp4 as nf  # noqa: E402
from nanochat_fp4.nvfp4.format import NVFP4Tensor, unpack  # noqa: E402
from nanochat_fp4.nvfp4.gemm import quantize_grad_output, quantize_operand, relu_squared_gradient  # noqa: E402
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference  # noqa: E402
from nanochat_fp4.nvfp4.roundings import OF_THE_PACKAGE, ROUNDINGS, SR_GRID_MAX, Rounding  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
ROW_SEED, COL_SEED, ROW_RHT_SEED, COL_RHT_SEED = 77, -5, 2**40 + 1, 3
ROW_STREAM, COL_STREAM = 2, 4
# (row rounding, its rotation, column rounding, its rotation): each rounding once, MS-EDEN and others on either side.
EDEN_SR = ("ms_eden", 128, "sr", 32)
PAIRS = [
    EDEN_SR,
    ("sr", 0, "ms_eden_search_3", 128),
    ("ms_eden_search_6", 128, "sr_four_over_six", 16),
    ("rtn", 32, "sr", 128),
]
# Each other row with ms_eden that somebody adds.
PAIRS += [
    ("sr", 0, name, 128)
    for name, r in OF_THE_PACKAGE.items()
    if r.ms_eden and not any(r in (ROUNDINGS[pair[0]], ROUNDINGS[pair[2]]) for pair in PAIRS)
]


pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|All-NaN)::triton.runtime.interpreter")


def seed(value) -> torch.Tensor:
    return torch.tensor(value, device=DEVICE)


def operand(name, rht_dim, stream, emulated) -> RotatedOperand:
    r = ROUNDINGS[name]
    limits = r.grid_max, r.scale_cap, r.candidates, r.stochastic, r.ms_eden
    return RotatedOperand(*limits, rht_dim, stream, stream + 10, emulated)


def collect(tensors, made) -> list:
    """The list that the operator returns -> one NVFP4Tensor, or (decoded, tensor_scale or None), for each operand."""
    rest = iter([t.cpu() for t in tensors])
    out = []
    for o in made:
        if not o.emulated:
            out.append(NVFP4Tensor(next(rest), next(rest), next(rest)))
        else:
            out.append((next(rest), None if o.ms_eden else next(rest)))
    assert next(rest, None) is None
    return out


def kernel(x, pair, emulated) -> list:
    """Both operands of one tensor (R, C): contracted over C and over R."""
    row = operand(pair[0], pair[1], ROW_STREAM, emulated)
    col = operand(pair[2], pair[3], COL_STREAM, emulated)
    seeds = seed(ROW_SEED), seed(ROW_RHT_SEED), col, seed(COL_SEED), seed(COL_RHT_SEED)
    return collect(rotate_quantize(x.to(DEVICE), None, None, row, *seeds), (row, col))


def reference(x, pair) -> list[NVFP4Tensor]:
    out = []
    for t, name, dim, noise, rht_seed, stream in (
        (x, *pair[:2], ROW_SEED, ROW_RHT_SEED, ROW_STREAM),
        (x.T, *pair[2:], COL_SEED, COL_RHT_SEED, COL_STREAM),
    ):
        t = torch.nn.functional.pad(t.float(), (0, -t.shape[-1] % (dim or 16)))
        random = {"seed": noise, "stream": stream, "rht_dim": dim, "rht_seed": rht_seed, "rht_stream": stream + 10}
        out.append(quantize_reference(t, Quantization(ROUNDINGS[name], **random)))
    return out


def exact_input(rows, columns) -> torch.Tensor:
    """Small integers times powers of two of each row and column: exact in BF16, and rotated in FP32 exact but for the
    factor 1/sqrt(128)."""
    x = torch.randint(-8, 9, (rows, columns)).float()

    def exponents(n):  # within a rotation group of 128 at most 4 apart, so that a sum of 128 terms has 19 bits
        return torch.randint(0, 5, (n,)) - 13 * (torch.arange(n) // 128)

    x = x * 2.0 ** exponents(rows)[:, None] * 2.0 ** exponents(columns)
    x[rows // 2] = 0
    x[:, columns // 3] = 0
    return x


def graded(rows, columns) -> torch.Tensor:
    """Rows and columns of magnitudes from 1e-7 to 1: after either rotation some block scales lie in E4M3's subnormal
    range and some far below."""
    return torch.randn(rows, columns) * torch.logspace(-7, 0, rows)[:, None] * torch.logspace(-7, 0, columns)


def assert_same(label, got: NVFP4Tensor, want: NVFP4Tensor) -> None:
    for field in ("tensor_scale", "scales", "codes"):
        assert_same_bits(f"{label}: {field}", getattr(got, field), getattr(want, field))


def assert_close(label, got: NVFP4Tensor, want: NVFP4Tensor) -> None:
    """As the module's docstring says. Steps are counted where both blocks have the same scale: with another scale (also
    one in a thousand) a code may be any."""
    torch.testing.assert_close(got.tensor_scale, want.tensor_scale, rtol=2**-20, atol=0)
    same_scale = got.scales.view(torch.uint8) == want.scales.view(torch.uint8)
    assert same_scale.float().mean() >= 0.999, f"{label}: {(~same_scale).sum()} of {same_scale.numel()} scales differ"
    a, b = (unpack(t.codes) for t in (got, want))
    differ = a != b
    assert differ.float().mean() <= 0.001, f"{label}: {differ.sum()} of {differ.numel()} codes differ"

    def position(codes):  # on E2M1's line of 15 values
        return torch.where(codes >= 8, 8 - codes.int(), codes.int())

    steps = (position(a) - position(b)).abs() * same_scale.repeat_interleave(16, -1)
    assert steps.max() <= 1, f"{label}: codes {steps.max()} steps apart"
    assert relative_square_error(got.dequantize(), want.dequantize()) < 1e-3


@pytest.fixture(params=[True, False], ids=["butterflies", "products"])
def each_rotation(request, monkeypatch):
    """Both ways to rotate: 16 x 16 products and butterflies, and one 128 x 128 product."""
    monkeypatch.setattr(rotate, "rotates_by_butterflies", lambda: request.param)


# A tile of 128 x 128 takes the interpreter a third of a second. (130, 96) is one in rows and a bit.
LARGE = [(1024, 512), (333, 1040)] if ON_GPU else []
DTYPES = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("pair", PAIRS)
def test_exact_rotations_bit_for_bit(pair, each_rotation):
    for shape in [(130 if pair == EDEN_SR else 40, 96), *LARGE]:
        x = exact_input(*shape)
        assert torch.equal(x.bfloat16().float(), x)
        for dtype in DTYPES if ON_GPU else [DTYPES[PAIRS.index(pair) % 2]]:
            for side, got, want in zip(("row", "col"), kernel(x.to(dtype), pair, False), reference(x, pair)):
                assert_same(f"{pair} {side} {shape} {dtype}", got, want)


@pytest.mark.parametrize(
    "pair, dtype, magnitude, each_rotation",
    [(EDEN_SR, torch.float32, 1e30, True), (PAIRS[1], torch.bfloat16, 1e-30, False)],
    indirect=["each_rotation"],
)
def test_any_input(pair, dtype, magnitude, each_rotation):
    for shape in [(40, 144), *LARGE]:
        x = (torch.randn(shape) * torch.exp(2 * torch.randn(shape[0], 1)) * magnitude).to(dtype)
        x[5] = 0
        for side, got, want in zip(("row", "col"), kernel(x, pair, False), reference(x, pair)):
            assert_close(f"{pair} {side} {shape} {dtype}", got, want)


def test_how_many_programs_share_the_work_changes_nothing(monkeypatch):
    """A GPU of another size: the same bits, whether a program makes one strip or several."""
    x = graded(70, 140)
    want = kernel(x, EDEN_SR, True)
    monkeypatch.setattr(rotate, "programs_of", lambda kernel, device: 1000)
    for operands in zip(kernel(x, EDEN_SR, True), want):
        for name, got, first in zip(("values", "tensor_scale"), *operands):
            if first is not None:
                assert_same_bits(name, got, first)


@pytest.mark.parametrize("pair, shape", [(EDEN_SR, (40, 32)), (PAIRS[1], (40, 32))])
def test_an_emulated_operand_is_the_decode_of_the_codes(pair, shape):
    """MS-EDEN's one pass cannot know tensor_scale: scales that end in E4M3's subnormal range are repaired."""
    x = graded(*shape)
    for (decoded, tensor_scale), codes in zip(kernel(x, pair, True), kernel(x, pair, False)):
        assert decoded.dtype == torch.bfloat16
        want = codes.decode()
        if tensor_scale is None:
            want = want * codes.tensor_scale
            values = codes.scales.float()  # there is something to repair
            assert ((values > 0) & (values < 2.0**-6)).float().mean() > 0.02 and (values == 0).any()
        else:
            assert_same_bits("tensor_scale", tensor_scale, codes.tensor_scale)
        assert_same_bits(f"{pair} {shape}", decoded.float() + 0.0, want + 0.0)


def test_zero_tensor_and_single_outlier():
    zeros = torch.zeros(40, 112)
    for got, want in zip(kernel(zeros, EDEN_SR, False), reference(zeros, EDEN_SR)):
        assert_same("zeros", got, want)
        assert (got.dequantize() == 0).all()
    assert all((decoded == 0).all() for decoded, _ in kernel(zeros, EDEN_SR, True))
    zeros[17, 100] = -1e4
    for got, want in zip(kernel(zeros, EDEN_SR, False), reference(zeros, EDEN_SR)):
        torch.testing.assert_close(got.dequantize(), want.dequantize(), rtol=2**-20, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_inf_reach_every_product(value):
    """A GEMM with the operand gives no finite number where the value takes part (nor, from codes, anywhere)."""
    x = torch.randn(40, 32)
    x[7, 20] = value
    for t in kernel(x, EDEN_SR, False):
        assert not torch.isfinite(t.tensor_scale)
        assert not torch.isfinite(t.dequantize()).any()
    for (decoded, tensor_scale), line in zip(kernel(x, EDEN_SR, True), (7, 20)):
        product = decoded.float().sum(-1) * (1 if tensor_scale is None else tensor_scale)
        assert not torch.isfinite(product[line])


# --------------------------------------------------------------------------------------------------------------------
# Requantization from codes, one operand at a time, and the dispatch.


def col_of_codes(t: NVFP4Tensor, name, emulated):
    o = operand(name, 128, COL_STREAM, emulated)
    scales = t.scales.to(DEVICE) if t.scales.numel() else None
    arguments = (t.codes.to(DEVICE), scales, t.tensor_scale.to(DEVICE))
    out = rotate_quantize(*arguments, None, None, None, o, seed(COL_SEED), seed(COL_RHT_SEED))
    return collect(out, [o])[0]


def assert_requantized(codes: NVFP4Tensor, name: str) -> None:
    """Asserts that `codes` become the reference's column operand, bit for bit, as codes and emulated."""
    want = reference(codes.dequantize(), ("rtn", 0, name, 128))[1]
    got = col_of_codes(codes, name, False)
    assert_same(f"{name} {tuple(codes.shape)}", got, want)
    decoded, tensor_scale = col_of_codes(codes, name, True)
    value = got.decode() * (got.tensor_scale if tensor_scale is None else 1)
    assert_same_bits("emulated", decoded.float() + 0.0, value + 0.0)


@pytest.mark.parametrize(
    "name, each_rotation",
    [("ms_eden", True), ("ms_eden", False), ("sr", True), ("ms_eden_search_3", False)],
    indirect=["each_rotation"],
)
def test_requantization_from_codes(name, each_rotation):
    for shape in [(40, 144), *LARGE]:
        # Magnitudes within 2^4 and a tensor_scale that is a power of two: exact sums, so bit for bit.
        x = torch.randn(shape) * 2.0 ** torch.randint(-2, 3, (shape[0], 1))
        x[0, 0] = 6 * 448 / 2**6
        codes = quantize_reference(x.clamp(-42, 42), Quantization(ROUNDINGS["rtn"]))
        codes.scales = codes.scales.float().clamp(min=1).to(torch.float8_e4m3fn)
        codes.decoded = None
        assert codes.tensor_scale == 2.0**-6
        assert_requantized(codes, name)


@pytest.mark.parametrize("name", ["four_over_six", "e4m3"])
def test_requantization_from_any_codes_with_any_tensor_scale(name):
    codes = quantize_reference(torch.randn(40, 144) * torch.logspace(-4, 0, 144), Quantization(ROUNDINGS[name]))
    want = reference(codes.dequantize(), ("rtn", 0, "ms_eden", 128))[1]
    assert_close("any", col_of_codes(codes, "ms_eden", False), want)


@pytest.mark.parametrize(
    "name, each_rotation",
    [("ms_eden", True), ("ms_eden", False), ("sr", True), ("sr", False)],
    indirect=["each_rotation"],
)
def test_requantization_from_e4m3(name, each_rotation):
    for shape in [(40, 144), *LARGE]:
        # Small integers times powers of two, subnormal numbers among them, and a tensor_scale that is a power of two.
        values = torch.randint(-8, 9, shape) * 2.0 ** torch.randint(-9, -4, (shape[0], 1))
        codes = NVFP4Tensor(values.to(torch.float8_e4m3fn), torch.empty(*shape[:-1], 0), torch.tensor(2.0**-6))
        assert torch.equal(codes.codes.float(), values)
        assert_requantized(codes, name)


@triton.jit
def half_of_every_byte(byte_ptr, half_ptr, HARDWARE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(half_ptr + at, m.half_of_e4m3(tl.load(byte_ptr + at), HARDWARE))


def test_every_e4m3_number_is_exact_in_fp16():
    byte = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    half = torch.empty(256, dtype=torch.float16, device=DEVICE)
    want = byte.view(torch.float8_e4m3fn).float()
    for conversions in {0, hardware()}:
        half_of_every_byte[(1,)](byte, half, conversions)
        assert torch.equal(half.float().nan_to_num(7e4), want.nan_to_num(7e4))


def test_only_one_operand():
    """Row alone and column alone are what both together are."""
    x = torch.randn(40, 32)
    both = kernel(x, EDEN_SR, True)
    sides = (("ms_eden", 128, ROW_STREAM, ROW_SEED, ROW_RHT_SEED), ("sr", 32, COL_STREAM, COL_SEED, COL_RHT_SEED))
    for side, (name, rht_dim, stream, s, rht) in enumerate(sides):
        o = operand(name, rht_dim, stream, True)
        none, one = (None, None, None), (o, seed(s), seed(rht))
        arguments = (*one, *none) if side == 0 else (*none, *one)
        ((alone, _),) = collect(rotate_quantize(x.to(DEVICE), None, None, *arguments), [o])
        assert_same_bits(("row", "col")[side], alone, both[side][0])


@pytest.mark.parametrize("pair, dtype, emulated", [(EDEN_SR, torch.bfloat16, True), (PAIRS[1], torch.float32, False)])
def test_the_gradient_of_relu_squared_is_computed_in_the_load(pair, dtype, emulated):
    """To the bit what is made of the gradient that was written and rounded, also of a row of zeros and of a tile that
    is not full, whose next row and column belong to something else."""
    rows, columns = 131, 144
    e = graded(rows, columns).to(DEVICE, dtype)
    kept = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=DEVICE)
    step = torch.rand(rows, 1, device=DEVICE) * 0.01
    kept[5], step[6] = 0, 2.0**-126
    sides = []
    for name, rht_dim, stream, s in ((*pair[:2], ROW_STREAM, ROW_SEED), (*pair[2:], COL_STREAM, COL_SEED)):
        sides += [operand(name, rht_dim, stream, emulated), seed(s), seed(ROW_RHT_SEED)]
    got = rotate_quantize(e, kept, step, *sides)
    want = rotate_quantize(relu_squared_gradient(e, kept, step), None, None, *sides)
    for i, (t, w) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(f"tensor {i}", t.cpu(), w.cpu())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("names, emulated", [(("ms_eden", "sr"), True), (("sr", "ms_eden"), False)])
def test_the_amax_of_a_whole_comes_from_the_caller(names, emulated):
    """With its own amax an operand is the same, to the bit; the caller is asked before SR. Also in code that
    torch.compile captures whole, here with the passes that follow both."""
    x, asked = torch.randn(40, 32, device=DEVICE) * 1e-3, []
    x[:, :20] *= 1e-3  # blocks that `repair` rounds again
    seeds = seed(ROW_SEED), seed(ROW_RHT_SEED)
    row, col = ((operand(name, 128, ROW_STREAM, emulated), *seeds) for name in names)

    def largest(amax):
        asked.append(amax)
        return amax + 0.0

    def made(largest):
        return rotate_quantize(x, None, None, *row, *col, largest)

    want, got = made(None), made(largest)
    assert len(asked) == 1
    results = [got]
    if emulated:
        results.append(torch.compile(lambda: made(lambda amax: amax + 0.0), fullgraph=True, backend="aot_eager")())
    for tensors in results:
        assert len(tensors) == len(want)
        for i, (t, w) in enumerate(zip(tensors, want)):
            assert_same_bits(f"tensor {i}", t.cpu(), w.cpu())


def dequantized(value) -> torch.Tensor:
    return value.dequantize().cpu()


def test_a_length_that_changes_compiles_once_more_at_most():
    """Conversations have any number of tokens: with a kernel for each number of blocks in the last group, 30 steps of
    SFT of nvidia took three minutes on an H200."""
    operand = RotatedOperand(rht_dim=16, stochastic=True)
    lengths = {operand.padded(tokens) for tokens in range(1, 1025)}
    compiled = {rotate.constants_of(operand, length, False) for length in lengths}
    assert len(lengths) == 64 and len(compiled) == 2


@pytest.mark.parametrize(
    "rounding, rht_dim, keep_codes", [("ms_eden", 128, True), ("sr", 16, False), ("rtn_16x16", 32, True)]
)
def test_dispatch_pads_the_contraction_dimension(rounding, rht_dim, keep_codes, monkeypatch):
    """Rows and columns that are no multiples of the rotation: the rest of the tile is zeros and is not stored."""
    x = torch.randint(-8, 9, (40, 144)).float().to(DEVICE)
    how = Quantization(ROUNDINGS[rounding], seed(9), 3, rht_dim, seed(8), 2)
    for transpose in (False, True):
        k = x.shape[0] if transpose else x.shape[1]
        results = []
        for wanted in ("triton", "reference"):
            monkeypatch.setenv("NVFP4_KERNELS", wanted)
            value = quantize_operand(x, how, transpose=transpose, keep_codes=keep_codes)
            results.append(dequantized(value))
            if keep_codes:
                assert isinstance(value, NVFP4Tensor)
        assert results[0].shape == (x.numel() // k, -(-k // rht_dim) * rht_dim)
        assert_same_bits(f"{rounding} transpose={transpose}", results[0] + 0.0, results[1] + 0.0)


@pytest.mark.parametrize("rounding, rht_dim", [("rtn", 16), ("four_over_six", 0), ("e4m3", 0), ("ms_eden", 128)])
def test_the_amax_is_that_of_all_processes(rounding, rht_dim, monkeypatch):
    """A function that finds it makes the scale larger. MS-EDEN does not ask for it."""
    x = torch.randint(-8, 9, (32, 128)).float().to(DEVICE)
    how = Quantization(ROUNDINGS[rounding], seed(9), 3, rht_dim, seed(8), 2)
    for transpose in (False, True):
        results = []
        for wanted in ("triton", "reference"):
            monkeypatch.setenv("NVFP4_KERNELS", wanted)
            for largest in (None, lambda amax: amax * 4):
                value = quantize_operand(x, how._replace(largest=largest), transpose=transpose, keep_codes=True)
                results.append((dequantized(value), value.tensor_scale.cpu()))
        (_, own), (got, scale), (_, of_reference), (want, of_all) = results
        assert scale == of_all == own * (1 if rounding == "ms_eden" else 4) and own == of_reference
        assert_same_bits(f"{rounding} transpose={transpose}", got + 0.0, want + 0.0)


def test_square_blocks_that_are_rounded_stochastically_are_the_references(monkeypatch):
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    x, rounding = torch.randn(32, 32), Rounding(SR_GRID_MAX, stochastic=True, block_rows=16)
    got = quantize_operand(x.to(DEVICE), Quantization(rounding, seed(9)), keep_codes=True)
    assert_same_bits("codes", got.codes.cpu(), quantize_reference(x, Quantization(rounding, seed=9)).codes)


@pytest.mark.parametrize("pair", [("sr", "ms_eden"), ("rtn_16x16", "sr"), ("sr", "rtn_16x16")])
def test_dispatch_of_grad_output(pair, monkeypatch):
    """Both operands of one pass are those of two passes of the reference. The pass knows no square blocks."""
    e = torch.randint(-8, 9, (40, 32)).float().to(DEVICE)
    how = [
        Quantization(ROUNDINGS[name], seed(9), stream, rht_dim, seed(8), stream)
        for name, stream, rht_dim in zip(pair, (2, 4), (0, 128))
    ]
    results = []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        results.append([dequantized(v) for v in quantize_grad_output(e, *how)])
    for side, got, want in zip(("row", "col"), *results):
        assert_same_bits(side, got + 0.0, want + 0.0)


# --------------------------------------------------------------------------------------------------------------------
# A whole layer.


ROWS = {m: row for m, row in METHOD_TABLE.items() if m != "bf16" and row.block <= 32}
FAST = ("nvidia", "clover", "clover_fp8_forward", "fp8", "rotated_integers", "clover_integer_input")


@pytest.mark.parametrize("row", [pytest.param(r, marks=[pytest.mark.slow] * (r not in FAST)) for r in ROWS])
def test_quant_linear_with_kernels_is_the_reference(row, monkeypatch):
    """The same seeds give the same results: the output to the bit (nothing is rotated in the forward pass), gradients
    up to the few codes that the rotation's rounding tips. A user's format takes the reference beside kernels."""
    tokens, in_features, out_features = (520, 512, 784) if ON_GPU else (40, 64, 144)
    out_features += out_features % ROWS[row].block  # of a user's format
    torch.manual_seed(1)
    linear = nf.QuantLinear(in_features, out_features, method=ROWS[row]).to(DEVICE)
    bf16 = row in ("clover", "nvidia")
    x = torch.randn(tokens, in_features, device=DEVICE)
    e = torch.randn(tokens, out_features, device=DEVICE)
    if bf16:
        x, e = x.bfloat16(), e.bfloat16()
    results = []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        y = linear(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, (leaf, linear.weight), e)))
    for name, got, want in zip(("output", "grad_input", "grad_weight"), *results):
        assert got.dtype == want.dtype and got.shape == want.shape
        if name == "output" and not (ON_GPU or linear.recipe.output.rht_dim):
            assert_same_bits(name, got, want)
        else:
            # One BF16 ulp, where there is one, and codes that tip: 0.1% of them, by a step.
            assert relative_square_error(got, want) < 1e-4, name


SR_WEIGHT = nf.Gemm(nf.Operand("four_over_six"), nf.Operand("sr"))
RAW_EDEN = nf.Gemm(nf.Operand("ms_eden"), nf.Operand("ms_eden", raw=True), 128)
ROTATED = nf.Gemm(nf.Operand("ms_eden_search"), nf.Operand("ms_eden_search"), 128)


@pytest.mark.parametrize(
    "recipe",
    [nf.Recipe("sr_weight", SR_WEIGHT), nf.Recipe("rotated", ROTATED, grad_input=RAW_EDEN, grad_weight=RAW_EDEN)],
    ids=lambda recipe: recipe.name,
)
def test_a_random_forward_is_evaluated_by_the_references_numbers(recipe, monkeypatch):
    """No random numbers are drawn then: those of seed 0 are taken."""
    layer = nf.convert(torch.nn.Sequential(torch.nn.Linear(128, 32, bias=False)), recipe, verbose=False).to(DEVICE)
    x, results = torch.randn(8, 128).to(DEVICE), []
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("NVFP4_KERNELS", kernels)
        with torch.no_grad():
            results.append(layer(x))
    assert relative_square_error(*results) < 1e-4
