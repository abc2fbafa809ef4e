"""The NVFP4 format: constants, the container, packing, decoding and the tensor-core scale layout.

    value = e2m1(code) * e4m3(scale) * tensor_scale

* code is E2M1 of 4 bits, with the sign in bit 3 and magnitudes 0 .5 1 1.5 2 3 4 6. A byte holds two codes, the even
  index in the low nibble.
* scale is one E4M3 number (`torch.float8_e4m3fn`) for each BLOCK = 16 values along the last dimension, which is the
  contraction dimension. E4M3 has no infinity and a maximum of 448.
* tensor_scale is one FP32 number per tensor, or per row for generation, and brings the scales into E4M3's range.

The container also holds the formats of other systems, for comparison:

* MXFP4 and MXFP8 (quantizers.MX_ROUNDINGS), of the Open Compute Project, have one power of two for each 32 values
  (E8M0, `torch.float8_e8m0fnu`). MXFP4 has the codes above, and MXFP8 E4M3 numbers. tensor_scale is a constant.
* FP8 (quantizers.FP8_ROUNDINGS) has E4M3 or E5M2 numbers, with tensor_scale alone, or with an FP32 scale for each block
  of 128 values.

E2M1 x E4M3 has a 6-bit significand, so `decode` (everything but tensor_scale) is exact in BF16. A BF16 GEMM on decoded
operands, with the tensor scales applied to its FP32 accumulator, is therefore the same arithmetic as a Blackwell's
NVFP4 GEMM. Only the order of summation differs.

Shape legend: R rows, K contraction dimension, G = K / 16 blocks.
"""

from dataclasses import dataclass

import torch

BLOCK = 16  # values that share one E4M3 scale, as in the hardware's 1x16 block scaling
BYTES = 1 / 2 + 1 / BLOCK  # of an element: its code, and its part of a block scale
TILE_ROWS, TILE_COLUMNS = 128, 4  # of the scales that FP4 tensor cores read together (swizzle_scales)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_EXPONENT = -6  # exponent of the smallest normal; subnormals have a spacing of 2^-9
E4M3_MANTISSA_BITS = 3
# Below 2^-116 the products scale * tensor_scale leave FP32's normal range, which some GPU instructions flush to zero.
# An all-zero tensor gets this value, so that nothing divides by zero.
TENSOR_SCALE_MIN = 2.0**-116

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass
class NVFP4Tensor:
    """A tensor in NVFP4; rows are the flattened leading dimensions, blocks run along the last one.

    codes:        uint8 `(..., K/2)`, two E2M1 codes a byte, even index in the low nibble.
                  MXFP8 and FP8 have float8_e4m3fn or float8_e5m2 `(..., K)`.
    scales:       float8_e4m3fn `(..., K/16)`, row-major. Operands of FP4 tensor cores have them flat, in the layout of
                  swizzle_scales.
                  MXFP4 and MXFP8 have float8_e8m0fnu `(..., K/32)`.
                  FP8 has float32 `(..., K/128)`, or `(..., 0)` with tensor_scale alone.
    tensor_scale: float32 (), or `(..., 1)` if quantized per token.
    decoded:      Optional cache of the result of `decode`, for a GEMM that follows at once. Never saved.

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
        """Bytes of codes, scales and tensor_scale: 4.5 bits an element, and the tensor scale."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.tensor_scale))

    def decode(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code * scale, without tensor_scale, (..., K): exact in BF16 and in FP32."""
        if self.decoded is not None:
            return self.decoded.to(dtype)
        return decode(self.codes, self.scales, dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """code * scale * tensor_scale, (..., K), rounded once to dtype. In rotated space for the ms_eden roundings."""
        return (self.decode(torch.float32) * self.tensor_scale).to(dtype)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 (..., K) -> bytes (..., K/2), even index in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """bytes (..., K/2) -> uint8 codes 0..15 (..., K)."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def encode_e2m1(q: torch.Tensor) -> torch.Tensor:
    """Values that are already on the E2M1 grid, float32 (..., K) -> uint8 codes 0..15; -0.0 keeps its sign bit."""
    magnitude = q.abs()
    # The grid's spacing is 1/2 up to 2, 1 up to 4 and 2 up to 6. Each spacing gives a line; the lowest is the code.
    code = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4).to(torch.uint8)
    return code | (torch.signbit(q).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 -> float32 values."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.to(torch.int32)]


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Codes and scales of an NVFP4Tensor -> code * scale (..., K), exact in BF16 and FP32."""
    scales = row_major_scales(codes, scales)
    values = decode_e2m1(unpack(codes)) if codes.dtype == torch.uint8 else codes.to(torch.float32)
    if not scales.shape[-1]:
        return values.to(dtype)
    values = values.unflatten(-1, (scales.shape[-1], -1))
    return (values * scales.to(torch.float32).unsqueeze(-1)).flatten(-2).to(dtype)


def transpose_square(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of the transposed tensor. A scale must hold for a block of 16x16 values.

    codes uint8 (R, K/2), scales float8_e4m3fn (R, K/16) -> uint8 (K, R/2), float8_e4m3fn (K, R/16). Nothing is rounded.
    R and K are multiples of 16. Scales stay in the layout that they have.
    """
    of_blocks = row_major_scales(codes, scales).view(torch.uint8)[::BLOCK].T.repeat_interleave(BLOCK, dim=0)
    to_scales = of_blocks.view(scales.dtype)
    return pack(unpack(codes).T), swizzle_scales(to_scales) if scales.dim() < codes.dim() else to_scales


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Row-major scales (R, G) -> the layout that cuBLAS and the tensor cores read, flat (R', G') padded with zeros.

    Rows are padded to 128 and columns to 4. Each 128x4 tile is stored as (32, 4, 4): row r and column c of the tile are
    at byte r % 32 * 16 + r // 32 * 4 + c. Source: cuBLAS, "1D block scaling factors layout". Returns a flat tensor of
    R' * G' scales, same dtype.
    """
    rows, cols = scales.shape
    padded_rows, padded_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    padded = torch.zeros(padded_rows, padded_cols, dtype=torch.uint8, device=scales.device)
    padded[:rows, :cols] = scales.view(torch.uint8)
    tiles = padded.view(padded_rows // 128, 4, 32, padded_cols // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scales.dtype)


def row_major_scales(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(R, K/16), of scales in either layout: those of swizzle_scales are flat."""
    flat = scales.dim() < codes.dim()
    return unswizzle_scales(scales, codes.shape[0], codes.shape[1] // 8) if flat else scales


def unswizzle_scales(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of swizzle_scales, without the padding: (rows, cols)."""
    padded_rows, padded_cols = -(-rows // 128) * 128, -(-cols // 4) * 4
    tiles = swizzled.view(torch.uint8).view(padded_rows // 128, padded_cols // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_cols)[:rows, :cols].contiguous().view(swizzled.dtype)
