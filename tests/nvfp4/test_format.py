"""The NVFP4 container: exact values, nibble order, exactness in BF16, the tensor-core scale layout."""

import math
from fractions import Fraction

import pytest
import torch
from _assertions import assert_same_bits
from _scalar_reference import E2M1, E4M3, minifloat

from nanochat_fp4.nvfp4 import format as fmt


def e4m3_value(byte: int) -> float:
    """From the definition of the format: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7F and 0xFF are NaN."""
    if byte & 0x7F == 0x7F:
        return math.nan
    return math.copysign(float(minifloat(byte & 0x7F, 4, 3)), -1.0 if byte & 0x80 else 1.0)


def test_grids_are_those_of_the_formats():
    assert [float(v) for v in E2M1] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert E4M3[1] == Fraction(1, 512) and E4M3[8] == Fraction(1, 64) and E4M3[-1] == 448
    assert fmt.E2M1_MAX == 6 and fmt.E4M3_MAX == 448 and fmt.BLOCK == 16
    assert [math.copysign(1, v) for v in fmt.E2M1_VALUES] == [1.0] * 8 + [-1.0] * 8
    assert [abs(v) for v in fmt.E2M1_VALUES] == [float(v) for v in E2M1] * 2


def test_every_code_round_trips_through_its_value():
    codes = torch.arange(16, dtype=torch.uint8)
    values = fmt.decode_e2m1(codes)
    want = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert_same_bits("values", values, want)
    assert_same_bits("codes", fmt.encode_e2m1(values), codes)


def test_even_index_is_the_low_nibble():
    codes = torch.tensor([[0x1, 0x2, 0xF, 0x0]], dtype=torch.uint8)
    assert fmt.pack(codes).tolist() == [[0x21, 0x0F]]
    assert fmt.unpack(torch.tensor([[0x21, 0x0F]], dtype=torch.uint8)).tolist() == [[0x1, 0x2, 0xF, 0x0]]


@pytest.mark.parametrize("shape", [(16,), (3, 32), (2, 3, 64), (0, 16)])
def test_pack_and_unpack_are_inverse(shape):
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = fmt.pack(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert_same_bits("codes", fmt.unpack(packed), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_pair_of_code_and_scale_decodes_exactly(dtype):
    """All 16 x 256 of them: E2M1 x E4M3 has 6 significant bits and BF16 has 8, so nothing may be rounded."""
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    codes = fmt.pack(torch.arange(16, dtype=torch.uint8)).repeat(256, 1)
    got = fmt.decode(codes, scales.view(torch.float8_e4m3fn), dtype)
    assert got.dtype == dtype
    want = torch.tensor([[c * e4m3_value(b) for c in fmt.E2M1_VALUES] for b in range(256)], dtype=torch.float64)
    finite = ~torch.isnan(want)
    assert (~finite).sum() == 2 * 16  # the two NaN scales
    assert torch.isnan(got[~finite]).all()
    assert_same_bits("decoded", got.double()[finite], want[finite])


def test_dequantize_applies_tensor_scale_and_rounds_once():
    scales = torch.tensor([[1.75]]).to(torch.float8_e4m3fn)
    codes = fmt.pack(torch.full((1, 16), 3, dtype=torch.uint8))  # 1.5
    tensor_scale = torch.tensor(0.3)
    t = fmt.NVFP4Tensor(codes, scales, tensor_scale)
    assert t.shape == (1, 16)
    assert t.decode()[0, 0] == 2.625
    exact = 2.625 * float(tensor_scale)
    for dtype in (torch.float32, torch.bfloat16):
        assert t.dequantize(dtype)[0, 0] == torch.tensor(exact, dtype=torch.float64).to(torch.float32).to(dtype)
    per_row = fmt.NVFP4Tensor(codes.repeat(2, 1), scales.repeat(2, 1), torch.tensor([[1.0], [2.0]]))
    assert per_row.dequantize()[:, 0].tolist() == [2.625, 5.25]


def test_size_is_four_and_a_half_bits_an_element():
    t = fmt.NVFP4Tensor(
        torch.zeros(3, 64, 32, dtype=torch.uint8), torch.zeros(3, 64, 4).to(torch.float8_e4m3fn), torch.tensor(1.0)
    )
    assert t.shape == (3, 64, 64)
    assert t.nbytes == 3 * 64 * 64 * 4.5 / 8 + 4


@pytest.mark.parametrize("rows, cols", [(1, 1), (128, 4), (300, 13)])
def test_swizzle_puts_every_scale_where_cublas_looks_for_it(rows, cols):
    """cuBLAS, "1D block scaling factors layout": tiles of 128 x 4, row-major; inside a tile, scale (r, c) is byte
    (r % 32) * 16 + (r // 32) * 4 + c."""
    scales = torch.randint(1, 0x7F, (rows, cols), dtype=torch.uint8)
    swizzled = fmt.swizzle_scales(scales.view(torch.float8_e4m3fn))
    assert swizzled.dtype == torch.float8_e4m3fn and swizzled.dim() == 1
    tiles_across = math.ceil(cols / 4)
    want = torch.zeros(math.ceil(rows / 128) * tiles_across * 512, dtype=torch.uint8)
    for r in range(rows):
        for c in range(cols):
            tile, r_in, c_in = r // 128 * tiles_across + c // 4, r % 128, c % 4
            want[tile * 512 + r_in % 32 * 16 + r_in // 32 * 4 + c_in] = scales[r, c]
    assert_same_bits("swizzled", swizzled.view(torch.uint8), want)
    back = fmt.unswizzle_scales(swizzled, rows, cols)
    assert_same_bits("and back", back.view(torch.uint8), scales)
