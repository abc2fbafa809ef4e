"""The kernels of kernels/nvfp4_kernels/quantize.py and decode.py against the reference, bit for bit.

Without a GPU they run in Triton's interpreter; with one, for real, on the same tensors and on larger ones.
"""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels import _math as m  # noqa: E402
from nvfp4_kernels import quantize as quantize_module  # noqa: E402
from nvfp4_kernels.decode import decode, transpose_square  # noqa: E402
from nvfp4_kernels.quantize import amax, conversion_problem, quantize  # noqa: E402

from nanochat_fp4.nvfp4.format import (  # noqa: E402
    NVFP4Tensor,
    encode_e2m1,
    pack,
)
from nanochat_fp4.nvfp4.format import transpose_square as transpose_square_reference  # noqa: E402
from nanochat_fp4.nvfp4.gemm import Quantized, quantize_operand  # noqa: E402
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference, round_e2m1  # noqa: E402
from nanochat_fp4.nvfp4.roundings import ROUNDINGS  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
UNROTATED = [name for name, r in ROUNDINGS.items() if not r.ms_eden and r.has_kernels and name != "scale_search"]
SEED, STREAM = 5, 3


def kernel(x, name, amax_of=None, seed=SEED, want_decoded=True, per_token=False) -> NVFP4Tensor:
    r = ROUNDINGS[name]
    constants = (r.grid_max, r.scale_cap, list(r.candidates), r.stochastic, r.block_rows, want_decoded, per_token)
    out = quantize(x.to(DEVICE), amax_of, torch.tensor(seed, device=DEVICE), STREAM, *constants)
    return NVFP4Tensor(*(t.cpu() for t in out[:4]))


def assert_as_reference(label, x, name, seed=SEED, per_token=False) -> NVFP4Tensor:
    got = kernel(x, name, seed=seed, per_token=per_token)
    want = quantize_reference(x, Quantization(ROUNDINGS[name], seed=seed, stream=STREAM, per_token=per_token))
    assert_same_bits(f"{label}: tensor_scale", got.tensor_scale, want.tensor_scale)
    assert_same_bits(f"{label}: scales", got.scales, want.scales)
    assert_same_bits(f"{label}: codes", got.codes, want.codes)
    assert got.decoded.dtype == torch.bfloat16
    assert_same_bits(f"{label}: decoded", got.decoded.float() + 0.0, want.decoded + 0.0)  # a zero may lose its sign
    return got


def uneven(rows, columns) -> torch.Tensor:
    """Blocks of magnitudes from 1e-18 to 1e4, that is, with subnormal scales; two rows and a block of zeros."""
    x = torch.randn(rows, columns) * torch.exp(3 * torch.randn(rows, columns))
    x[0] = x[-1] = 0
    x[1 % rows, :16] *= 1e-12
    x[2 % rows, 16:32] = 0
    return x * torch.logspace(-6, 0, columns // 16).repeat_interleave(16)


def ties() -> torch.Tensor:
    """Values exactly between E2M1's, in BF16: blocks of amax 6 s, tensor_scale 1; and scales exactly between E4M3's."""
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    line = torch.cat((between, -between))
    powers = 2.0 ** torch.arange(-9, 9)
    scale_ties = torch.tensor([1 + k / 16 for k in range(1, 16, 2)])  # halfway between two E4M3 significands
    rows = [s * line for s in powers] + [s * line for s in scale_ties] + [torch.full((16,), 6 * 448.0)]
    x = torch.stack(rows).view(1, -1)
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(-1, 32)


pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value)::triton.runtime.interpreter")


@pytest.mark.parametrize("name", UNROTATED)
def test_random_tensors(name):
    got = assert_as_reference(name, uneven(33, 64), name)
    scales = got.scales.float()
    assert (scales == 0).any() and ((scales > 0) & (scales < 2.0**-6)).any()  # the test reaches both
    for shape in [(7, 48)] + ([(1024, 2048), (333, 4112), (4097, 528)] if ON_GPU else []):
        assert_as_reference(f"{name} {shape}", uneven(*shape).bfloat16(), name)


@pytest.mark.parametrize("name", UNROTATED)
def test_ties(name):
    x = ties()
    assert torch.equal(x.bfloat16().float(), x)
    assert_as_reference(name, x.bfloat16(), name)


@pytest.mark.parametrize("name", ["four_over_six", "sr"])
def test_a_tensor_scale_per_token(name):
    """As generation wants it: rows of very different magnitudes, of zeros, and one with a NaN, which stays alone."""
    for shape in [(33, 64)] + ([(4, 4096), (513, 528)] if ON_GPU else []):
        x = uneven(*shape) * torch.logspace(-10, 10, shape[0]).unsqueeze(1)
        got = assert_as_reference(f"{name} {shape}", x, name, per_token=True)
        assert got.tensor_scale.shape == (shape[0], 1)
    x = torch.randn(3, 32)
    x[1, 5] = float("nan")
    assert kernel(x, name, per_token=True).tensor_scale.isfinite().flatten().tolist() == [True, False, True]


@pytest.mark.parametrize("name", ["rtn_16x16", pytest.param("sr", marks=pytest.mark.slow)])
def test_every_finite_bf16_value(name):
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[torch.isfinite(x.float())].view(-1, 256)
    assert_as_reference(f"{name} in order", x, name)  # with subnormal values
    x = x.float()
    x = x[x.abs() < 1e4]
    x = x[torch.randperm(len(x))][: len(x) // 64 * 64].view(-1, 64)
    assert_as_reference(f"{name} shuffled", (x * (x.abs() > 1e-4)).bfloat16(), name)


@pytest.mark.parametrize("name", ["sr", "four_over_six_16x16"])
def test_special_tensors(name):
    zeros = torch.zeros(5, 32)
    outlier = torch.randn(5, 32) * 1e-3
    outlier[3, 17] = -1e4
    for label, x in {
        "zeros": torch.stack((zeros, -zeros)).flatten(0, 1),
        "outlier": outlier,
        "constant": zeros + 0.3,
        "large": torch.randn(5, 32) * 1e37,
        "small": torch.randn(5, 32) * 1e-37,
        "subnormal": torch.randn(5, 32) * 1e-40,
    }.items():
        assert_as_reference(f"{name} {label}", x, name)


@pytest.mark.parametrize(
    "name, value", [("rtn", float("nan")), ("sr_four_over_six", -float("inf")), ("four_over_six_16x16", float("nan"))]
)
def test_nan_and_inf_travel_into_everything_that_is_computed(name, value):
    x = torch.randn(5, 32)
    x[2, 20] = value
    got = kernel(x.bfloat16(), name)
    assert not torch.isfinite(got.tensor_scale)
    assert not torch.isfinite(got.decoded.float() * got.tensor_scale).any()


def test_amax():
    for shape in [(1, 16), (33, 64), (7, 4096)]:
        x = torch.randn(shape)
        x[-1, -1] = -50
        for t in (x, x.bfloat16()):
            assert float(amax(t.to(DEVICE))) == 50
    assert float(amax(torch.zeros(3, 16, device=DEVICE))) == 0
    x[-1, 3] = float("inf")
    assert float(amax(x.to(DEVICE))) == float("inf")
    x[0, 0] = -float("nan")
    assert torch.isnan(amax(x.to(DEVICE)))


@pytest.mark.parametrize("name", ["rtn", "four_over_six_16x16"])
def test_a_given_amax_is_used(name):
    x = torch.randn(9, 48)
    known = kernel(x, name, amax_of=amax(x.to(DEVICE)))
    for field in ("codes", "scales", "tensor_scale", "decoded"):
        assert_same_bits(field, getattr(known, field), getattr(kernel(x, name), field))
    twice = kernel(x, name, amax_of=2 * amax(x.to(DEVICE)))
    assert twice.tensor_scale == 2 * known.tensor_scale


@pytest.mark.parametrize("name", ["rtn", "sr"])
def test_blocks_that_fill_a_part_of_a_program(name):
    """404 blocks are more than one program of the interpreter takes, and no multiple of it."""
    assert_as_reference(name, uneven(101, 64), name)


def test_without_decode():
    x = torch.randn(9, 48)
    for name in ("rtn", "rtn_16x16"):
        bare, full = kernel(x, name, want_decoded=False), kernel(x, name)
        assert bare.decoded.shape == (0,)
        assert_same_bits("codes", bare.codes, full.codes)
        assert_same_bits("scales", bare.scales, full.scales)


def test_a_transposed_view():
    x = torch.randn(48, 32)
    for t in (x.T, x[:, ::2]):
        assert_as_reference("view", t, "rtn")


def test_any_seed():
    for seed in (-1, 2**63 - 1, -(2**63)):
        assert_as_reference(f"seed {seed}", torch.randn(9, 64), "sr", seed=seed)


def test_decode_of_every_code_and_scale():
    """All 16 codes with each of the 127 scales, NaN (0x7F) among them."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 32, 8).repeat(4, 1, 1).view(128, 8)
    scales = torch.arange(128, dtype=torch.uint8).view(128, 1)
    shuffled = torch.stack([codes.roll(i, 0) for i in range(32)]).view(-1, 8)  # each block of bytes with each scale
    scales = scales.repeat(32, 1).view(torch.float8_e4m3fn)
    got = decode(shuffled.to(DEVICE), scales.to(DEVICE)).cpu()
    want = NVFP4Tensor(shuffled, scales, torch.ones(())).decode(torch.bfloat16)
    nan = scales.view(torch.uint8).flatten() == 127
    assert torch.isnan(got[nan]).all()
    assert_same_bits("decoded", got[~nan], want[~nan])


# --------------------------------------------------------------------------------------------------------------------
# The dispatch.


@pytest.mark.parametrize("name, transpose", [("four_over_six_16x16", False), ("sr", True)])
def test_dispatch_pads_the_contraction_dimension(name, transpose, monkeypatch):
    x = torch.randn(40, 64) if transpose else torch.randn(9, 40)
    seed = torch.tensor(11, device=DEVICE)
    how = Quantization(ROUNDINGS[name], seed, stream=2)
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    got = quantize_operand(x.to(DEVICE), how, transpose=transpose)
    monkeypatch.setenv("NVFP4_KERNELS", "reference")
    want = quantize_operand(x.to(DEVICE), how, transpose=transpose)
    assert got.shape == ((64, 48) if transpose else (9, 48))
    for field in ("codes", "scales", "tensor_scale"):
        assert_same_bits(field, getattr(got, field).cpu(), getattr(want, field).cpu())


def test_dispatch_requantizes_codes_that_are_not_rotated(monkeypatch):
    """Unrotated, codes go through their BF16-exact values: the kernel must see what the reference sees."""
    first = quantize_reference(torch.randn(48, 32), Quantization(ROUNDINGS["four_over_six"]))
    parts = (t.to(DEVICE) for t in (first.codes, first.scales, first.tensor_scale))
    codes = Quantized(*parts, length=32)
    results = []
    for wanted in ("triton", "reference"):
        monkeypatch.setenv("NVFP4_KERNELS", wanted)
        results.append(quantize_operand(codes, Quantization(ROUNDINGS["rtn"]), transpose=True))
    for field in ("codes", "scales", "tensor_scale"):
        assert_same_bits(field, *(getattr(t, field).cpu() for t in results))


@pytest.mark.parametrize("name", ["rtn", "sr", "rtn_16x16", "ms_eden"])
def test_a_tensor_without_rows_has_the_scale_of_zeros(name, monkeypatch):
    """No program runs that would write it. It had been whatever the memory held."""
    monkeypatch.setenv("NVFP4_KERNELS", "triton")
    zeros, none = torch.zeros(16, 128, device=DEVICE), torch.zeros(0, 128, device=DEVICE)
    seed = torch.tensor(3, device=DEVICE)
    for rht_dim in (128,) if name == "ms_eden" else (0, 128) if name == "sr" else (0,):
        how = Quantization(ROUNDINGS[name], seed=seed, rht_dim=rht_dim, rht_seed=seed)
        got, want = (quantize_operand(x, how, keep_codes=True) for x in (none, zeros))
        assert got.tensor_scale == want.tensor_scale and got.codes.shape == (0, 64) and got.scales.shape == (0, 8)


# --------------------------------------------------------------------------------------------------------------------
# The instruction of sm_100a and sm_120a that rounds to E2M1.


@pytest.mark.skipif(ON_GPU, reason="for machines that lack the instruction")
def test_a_conversion_that_does_not_work_is_not_used(monkeypatch):
    assert "raises" in conversion_problem("cpu")
    monkeypatch.setattr(quantize_module, "architecture", lambda: 120)
    monkeypatch.setattr(quantize_module, "conversion_problem", lambda: "rounds 5 to 6")
    quantize_module.compared_conversion.cache_clear()
    with pytest.warns(UserWarning, match="conversion to E2M1, which rounds 5 to 6"):
        assert quantize_module.hardware() == m.CONVERTS_E4M3.value
    quantize_module.compared_conversion.cache_clear()


@pytest.mark.skipif(ON_GPU, reason="for machines that lack the instruction")
def test_a_graph_does_not_decide_on_the_conversion(monkeypatch):
    """The comparison needs results, which a capture does not have. It had switched the instruction off for good."""
    monkeypatch.setattr(quantize_module, "architecture", lambda: 120)
    monkeypatch.setattr(quantize_module, "conversion_problem", lambda: None)
    quantize_module.compared_conversion.cache_clear()
    for captured, conversion in ((True, m.CONVERTS_E4M3), (False, m.CONVERTS_E2M1), (True, m.CONVERTS_E2M1)):
        monkeypatch.setattr(quantize_module, "is_captured", lambda captured=captured: captured)
        assert quantize_module.hardware() == conversion.value
    quantize_module.compared_conversion.cache_clear()


@pytest.mark.parametrize("wrong", [None, "tie", "zero", "nan", "infinity", "neighbour"])
def test_the_probe_of_the_conversion_sees_a_wrong_code(wrong, monkeypatch):
    """With the arithmetic in the place of the instruction, right, and wrong at a tie, in the sign of zero, for what is
    no number, and for a number beside it."""

    def launch(y, codes, values, hardware, blocks, **_):
        q = round_e2m1(y.nan_to_num(7.0).clamp(-6.9, 6.9))
        if hardware and wrong in ("nan", "infinity"):
            q = torch.where(y.isnan() if wrong == "nan" else y.isinf(), 0.0, q)
        if hardware and wrong == "neighbour":
            q = torch.where(y.isnan().roll(1), 6.0, q)
        if hardware and wrong == "tie":
            q = torch.where(y == 2.5, 3.0, q)
        if hardware and wrong == "zero":
            q = q + 0.0
        codes.copy_(pack(encode_e2m1(q)).view(torch.int32))
        values.copy_(q)

    monkeypatch.setattr(quantize_module, "convert_kernel", {(1,): launch})
    assert (conversion_problem("cpu") is None) == (wrong is None)


# --------------------------------------------------------------------------------------------------------------------
# Only on a GPU.


@pytest.mark.gpu
def test_on_a_side_stream():
    x = torch.randn(2048, 2048, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)  # so that work on the wrong stream would run before
        got = kernel(x * 2, "four_over_six")
    side.synchronize()
    want = quantize_reference(x.cpu() * 2, Quantization(ROUNDINGS["four_over_six"]))
    assert_same_bits("codes", got.codes, want.codes)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rtn", "sr", "rtn_16x16"])
def test_more_than_2_to_the_31_elements(name):
    """The last rows as in a tensor of their own under the same amax (the noise of SR follows the position)."""
    rows, columns = 2**15 + 16, 2**16
    x = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_()
    r = ROUNDINGS[name]
    constants = (r.grid_max, r.scale_cap, list(r.candidates), r.stochastic, r.block_rows, True)
    seed = torch.tensor(SEED, device="cuda")
    largest = amax(x)
    assert float(largest) == float(x.abs().amax())
    codes, scales, _, decoded, *_ = quantize(x, largest, seed, STREAM, *constants)
    want = quantize(x[-16:], largest, seed, STREAM, *constants)
    if not r.stochastic:
        assert_same_bits("codes", codes[-16:], want[0])
        assert_same_bits("decoded", decoded[-16:], want[3])
    assert_same_bits("scales", scales[-16:], want[1])
    step = scales[-16:].float().repeat_interleave(16, 1) * 2 * want[2]
    assert ((decoded[-16:].float() * want[2] - x[-16:].float()).abs() <= step).all()


def test_square_blocks_are_transposed_as_codes():
    """To the bit what decoding and transposing gives: random bytes, so signed zeros and scales of every kind."""
    rows, columns = 80, 144  # a program takes 64 x 128
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    blocks = torch.randint(0, 127, (rows // 16, columns // 16), dtype=torch.uint8)
    scales = blocks.repeat_interleave(16, dim=0).view(torch.float8_e4m3fn)
    want = transpose_square_reference(codes, scales)
    one = torch.ones(())
    decoded, transposed = NVFP4Tensor(codes, scales, one).decode(), NVFP4Tensor(*want, one).decode()
    assert_same_bits("values", transposed, decoded.T.contiguous())
    got = [t.cpu() for t in transpose_square(codes.to(DEVICE), scales.to(DEVICE))]
    assert all(torch.equal(g.view(torch.uint8), w.view(torch.uint8)) for g, w in zip(got, want))
