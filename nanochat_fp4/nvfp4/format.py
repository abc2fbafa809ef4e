"""The NVFP4 format: its constants, a container for NVFP4 tensors, packing, decoding, and the layout of scales that
tensor cores read.

    value = e2m1(code) * e4m3(scale) * tensor_scale

* code is a 4-bit E2M1 number, with the sign in bit 3. The magnitudes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6. A byte holds
  two codes, the one with the even index in the low nibble.
* scale is an E4M3 number (`torch.float8_e4m3fn`) for each BLOCK = 16 values along the last dimension, which is the
  contraction dimension. E4M3 has no infinity, and its maximum is 448.
* tensor_scale is one FP32 number for the tensor, or for each row in generation. It brings the scales into E4M3's range.

The container also holds FP8, which has E4M3 or E5M2 numbers and only tensor_scale, and what a user's own rounding makes
(roundings.Rounding.quantize).

The product of an E2M1 and an E4M3 number has a significand of 6 bits, so `decode`, which leaves out tensor_scale, is
exact in BF16. A BF16 GEMM of decoded operands whose FP32 sums are multiplied by the tensor scales is therefore the same
arithmetic as the NVFP4 GEMM of a Blackwell GPU. Only the order of summation differs.

In shapes, R is the number of rows, K the contraction dimension, and G = K / 16 the number of blocks in a row.
"""

from dataclasses import dataclass

import torch

BLOCK = 16  # The number of values that share an E4M3 scale, as in the hardware's 1x16 block scaling.
BYTES = 1 / 2 + 1 / BLOCK  # The bytes of an element: its code, and its share of a block scale.
TILE_ROWS, TILE_COLUMNS = 128, 4  # The size of a tile of scales in the layout of FP4 tensor cores (swizzle_scales).
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6  # The exponent of the smallest normal number. Subnormal numbers have a spacing of 2^-9.
E4M3_MANTISSA_BITS = 3
# With a smaller tensor_scale, products scale * tensor_scale could be below FP32's normal range, where some GPU
# instructions flush to zero. A tensor of zeros gets this value as well, so that there is no division by zero.
TENSOR_SCALE_MIN = 2.0**-116

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass
class NVFP4Tensor:
    """A tensor in NVFP4. Blocks lie along the last dimension.

    codes:        uint8 `(..., K/2)`, with two E2M1 codes a byte, the one with the even index in the low nibble. FP8
                  has float8_e4m3fn or float8_e5m2 `(..., K)`.
    scales:       float8_e4m3fn `(..., K/16)`, row-major. For FP4 tensor cores the scales are flat, in the layout of
                  swizzle_scales. FP8 has none: `(..., 0)`.
    tensor_scale: float32 (), or `(..., 1)` if each token has its own
    decoded:      the result of `decode` or None, as a cache for a GEMM that follows at once. It is never saved.

    >>> t = nf.quantize(torch.ones(2, 32), "rtn")
    >>> t.shape, t.codes.shape, t.scales.shape, t.tensor_scale.shape
    (torch.Size([2, 32]), torch.Size([2, 16]), torch.Size([2, 2]), torch.Size([]))
    >>> t.nbytes  # 64 values of 4 bits, 4 scales of 8, one of 32
    40
    """

    codes: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    decoded: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        per_code = 2 if self.codes.dtype == torch.uint8 else 1
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * per_code))

    @property
    def nbytes(self) -> int:
        """The number of bytes of codes, scales and tensor_scale. Codes and scales take 4.5 bits an element."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.tensor_scale))

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns code * scale (..., K), without tensor_scale. The result is exact in BF16 and in FP32."""
        if self.decoded is not None:
            return self.decoded.to(dtype)
        return decode(self.codes, self.scales, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Returns code * scale * tensor_scale (..., K), rounded to dtype. A tensor that was quantized with one of the
        ms_eden roundings stays rotated."""
        return (self.decode(torch.float32) * self.tensor_scale).to(dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes 0 to 15, uint8 (..., K), into bytes, uint8 (..., K/2). The even index is in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Unpacks bytes, uint8 (..., K/2), into codes 0 to 15, uint8 (..., K)."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_e2m1(q: torch.Tensor) -> torch.Tensor:
    """Returns the codes 0 to 15, uint8 (..., K), of values that are on the E2M1 grid, float32 (..., K). -0.0 keeps its
    sign."""
    magnitude = q.abs()
    # The grid's spacing is 1/2 up to 2, 1 up to 4, and 2 up to 6. Each spacing gives a linear function from magnitude
    # to code, and the smallest of the three is the code.
    code = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4).to(torch.uint8)
    return code | (torch.signbit(q).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Returns the values, float32, of codes 0 to 15, uint8 of any shape."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int32)]


def decode(codes: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns code * scale (..., K) of an NVFP4Tensor's codes and scales. Without scales the codes are FP8. The result
    is exact in BF16 and in FP32."""
    if scales is None or not scales.shape[-1]:
        return codes.to(dtype)
    scales = row_major_scales(codes, scales)
    values = decode_e2m1(unpack(codes)) if codes.dtype == torch.uint8 else codes.to(torch.float32)
    values = values.unflatten(-1, (scales.shape[-1], -1))
    return (values * scales.to(torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)


def transpose_square(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Transposes a tensor whose scales belong to blocks of 16x16 values. Nothing is rounded.

    codes are uint8 (R, K/2), and scales are float8_e4m3fn (R, K/16), with R and K multiples of 16. Returns codes, uint8
    (K, R/2), and scales, float8_e4m3fn (K, R/16). Scales in the layout of swizzle_scales are returned in this layout.
    """
    of_blocks = row_major_scales(codes, scales).view(torch.uint8)[::BLOCK].T.repeat_interleave(BLOCK, dim=0)
    to_scales = of_blocks.view(scales.dtype)
    return pack(unpack(codes).T), swizzle_scales(to_scales) if scales.dim() < codes.dim() else to_scales


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Brings row-major scales (R, G) into the layout that cuBLAS and the tensor cores read. Returns a flat tensor of
    the same dtype.

    The rows are padded with zeros to a multiple of 128, and the columns to a multiple of 4. Each tile of 128x4 scales
    is stored as (32, 4, 4): row r and column c of the tile are at byte r % 32 * 16 + r // 32 * 4 + c. Source: cuBLAS,
    "1D block scaling factors layout".
    """
    rows, cols = scales.shape
    padded_rows, padded_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    padded = torch.zeros(padded_rows, padded_cols, dtype=torch.uint8, device=scales.device)
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiles = padded.view(padded_rows // 128, 4, 32, padded_cols // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def row_major_scales(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns row-major scales (R, K/16) of scales in either layout. Flat scales have the layout of swizzle_scales."""
    flat = scales.dim() < codes.dim()
    return unswizzle_scales(scales, codes.shape[0], codes.shape[1] // 8) if flat else scales


def unswizzle_scales(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Inverts swizzle_scales. Returns (rows, cols), without the padding."""
    padded_rows, padded_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    tiles = swizzled.view(torch.uint8).view(padded_rows // 128, padded_cols // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_cols)[:rows, :cols].contiguous().view(swizzled.dtype)
