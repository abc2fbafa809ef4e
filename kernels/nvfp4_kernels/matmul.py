"""NVFP4 GEMMs on the FP4 tensor cores of sm_100 and later. They compute C = A . B^T from codes, block scales and tensor
scales.

    dot_scaled  a Triton kernel. It needs Triton 3.6 or later, and on sm_121 a release after 3.8.0.
    scaled_mm   torch's function, which calls cuBLAS
    mm_fp4      flashinfer's function, if that package is installed

cublaslt.py calls cuBLAS without torch. All of them read block scales in tiles of 128x4 (format.swizzle_scales).
Row-major scales are brought into tiles first. The tensor scales multiply the FP32 accumulator.

Nobody has run these GEMMs on a Blackwell yet. The tests compile and interpret `dot_scaled`, and check the arguments of
the others.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, operator


@triton.jit
def _decode_block(codes, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decodes codes, bytes (ROWS, COLUMNS / 2), with scales, bytes (ROWS, COLUMNS / 16), to float32 (ROWS, COLUMNS)."""
    code = codes.to(tl.int32)
    value = m.decode_e2m1(tl.reshape(tl.join(code & 0xF, code >> 4), (ROWS, COLUMNS // 16, 16)))
    return tl.reshape(value * m.decode_e4m3(scales)[:, :, None], (ROWS, COLUMNS))


@triton.jit
def _scale_tiles(scales_ptr, block, k, rows, K, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Loads the scales, uint8 (ROWS, COLUMNS / 16), of the rows from block * ROWS on and the columns from k on.

    Tiles of 128x4 scales are read whole, each as 512 consecutive bytes. Their padding holds zeros.
    """
    columns = tl.cdiv(K, 64)  # The number of tiles side by side.
    row = block * (ROWS // 128) + tl.arange(0, ROWS // 128)
    column = k // 64 + tl.arange(0, COLUMNS // 64)
    tile = row.to(tl.int64)[:, None, None] * columns + column[None, :, None]
    there = (row * 128 < rows)[:, None, None] & (column < columns)[None, :, None]
    scales = tl.load(scales_ptr + tile * 512 + tl.arange(0, 512)[None, None, :], mask=there, other=0)
    scales = tl.permute(tl.reshape(scales, (ROWS // 128, COLUMNS // 64, 32, 4, 4)), (0, 3, 2, 1, 4))
    return tl.reshape(scales, (ROWS, COLUMNS // 16))


@triton.jit
def dot_scaled_kernel(
    a_ptr,
    a_scales_ptr,
    a_tensor_scale_ptr,
    b_ptr,
    b_scales_ptr,
    b_tensor_scale_ptr,
    out_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Computes one block (BM, BN) of the product. The tensor scales multiply the FP32 accumulator."""
    # Programs that run at the same time should share rows of A and B in the cache. Programs therefore go through eight
    # row blocks before the next column block.
    row_blocks, column_blocks = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    group = program // (8 * column_blocks)
    height = tl.minimum(row_blocks - group * 8, 8)
    row_block = group * 8 + program % (8 * column_blocks) % height
    column_block = program % (8 * column_blocks) // height

    r = row_block * BM + tl.arange(0, BM)
    c = column_block * BN + tl.arange(0, BN)
    byte = tl.arange(0, BK // 2)
    a_row, b_row = r.to(tl.int64)[:, None], c.to(tl.int64)[:, None]
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        in_bytes = (k // 2 + byte < K // 2)[None, :]
        a_at, b_at = a_row * (K // 2) + k // 2 + byte[None, :], b_row * (K // 2) + k // 2 + byte[None, :]
        a = tl.load(a_ptr + a_at, mask=(r < M)[:, None] & in_bytes, other=0)
        b = tl.load(b_ptr + b_at, mask=(c < N)[:, None] & in_bytes, other=0)
        a_scale = _scale_tiles(a_scales_ptr, row_block, k, M, K, BM, BK)
        b_scale = _scale_tiles(b_scales_ptr, column_block, k, N, K, BN, BK)
        if m.INTERPRETED:  # The interpreter has no dot_scaled.
            a, b = _decode_block(a, a_scale, BM, BK), _decode_block(b, b_scale, BN, BK)
            accumulator = tl.dot(a, tl.trans(b), accumulator, input_precision="ieee")
        else:
            a_scale, b_scale = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
            accumulator = tl.dot_scaled(a, a_scale, "e2m1", tl.trans(b), b_scale, "e2m1", accumulator)
    alpha = tl.load(a_tensor_scale_ptr) * tl.load(b_tensor_scale_ptr)
    out = (accumulator * alpha).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + a_row * N + c[None, :], out, mask=(r < M)[:, None] & (c < N)[None, :])


def gemm_operator(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator that registers a GEMM as an operator. a_factor and b_factor are the operands' tensor scales."""
    operands = ", ".join(f"Tensor {o}, Tensor {o}_scales, Tensor {o}_factor" for o in "ab")
    call = operator(f"{function.__name__}({operands}, ScalarType out_dtype) -> Tensor")(function)
    call.register_fake(lambda a, x, y, b, z, w, dtype: a.new_empty(a.shape[0], b.shape[0], dtype=dtype))
    return call


@gemm_operator
def dot_scaled(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Returns a . b^T, (M, N) in out_dtype, which is BF16 or FP32.

    a, b:    codes uint8 (M, K/2) and (N, K/2)
    scales:  float8_e4m3fn, flat in tiles of 128x4, or row-major (M, K/16) and (N, K/16)
    factors: the tensor scales, float32 ()
    """
    rows, columns, k = a.shape[0], b.shape[0], a.shape[1] * 2
    out = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    bm, bn, bk = 128, 128, 128
    dot_scaled_kernel[(triton.cdiv(rows, bm) * triton.cdiv(columns, bn),)](
        a.contiguous(),
        in_tiles(a_scales).view(torch.uint8),
        a_factor,
        b.contiguous(),
        in_tiles(b_scales).view(torch.uint8),
        b_factor,
        out,
        rows,
        columns,
        k,
        BM=bm,
        BN=bn,
        BK=bk,
        num_warps=8,
        num_stages=3,
        **NO_FUSION,
    )
    return out


@triton.jit
def swizzle_kernel(scales_ptr, swizzled_ptr, rows, columns, column_tiles, TILES: tl.constexpr):
    """Brings the scales of 128 rows and of TILES tiles side by side into tiles of 128x4."""
    lane = tl.arange(0, 128)
    r = tl.program_id(0).to(tl.int64) * 128 + lane
    c = tl.program_id(1) * (4 * TILES) + tl.arange(0, 4 * TILES)
    mask = (r < rows)[:, None] & (c < columns)[None, :]
    scale = tl.load(scales_ptr + r[:, None] * columns + c[None, :], mask=mask, other=0)
    tile = tl.program_id(0).to(tl.int64) * column_tiles + c // 4
    within = (lane % 32 * 16 + lane // 32 * 4)[:, None] + (c % 4)[None, :]
    tl.store(swizzled_ptr + tile[None, :] * 512 + within, scale, mask=(c // 4 < column_tiles)[None, :])


def swizzle(scales: torch.Tensor) -> torch.Tensor:
    """Brings row-major scales, float8_e4m3fn (R, G), into the layout of format.swizzle_scales, flat."""
    rows, columns = scales.shape
    row_tiles, column_tiles, tiles = triton.cdiv(rows, 128), triton.cdiv(columns, 4), 16
    swizzled = torch.empty(row_tiles * column_tiles * 512, dtype=torch.uint8, device=scales.device)
    grid = (row_tiles, triton.cdiv(column_tiles, tiles))
    source = scales.contiguous().view(torch.uint8)
    swizzle_kernel[grid](source, swizzled, rows, columns, column_tiles, TILES=tiles, **NO_FUSION)
    return swizzled.view(scales.dtype)


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Returns scales in tiles, flat. Flat scales are in tiles already, and row-major ones (R, G) are brought there."""
    return swizzle(scales) if scales.dim() == 2 else scales


@gemm_operator
def scaled_mm(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Returns the same product as dot_scaled. K must be a multiple of 32, and N of 16.

    torch could multiply by the tensor scales itself. But up to torch 2.13 it keeps their product in one buffer of the
    process (ATen's get_user_alpha_ptr), which a second stream or thread overwrites. Therefore the product is made in
    FP32 and scaled afterwards. This gives the same bits, and costs one more pass over the output.
    """
    from torch.nn.functional import ScalingType, SwizzleType

    codes = a.contiguous().view(torch.float4_e2m1fn_x2), b.contiguous().view(torch.float4_e2m1fn_x2).T
    recipe, layout = [ScalingType.BlockWise1x16], [SwizzleType.SWIZZLE_32_4_4]
    scales = [in_tiles(a_scales)], [in_tiles(b_scales)]
    options = {"swizzle_a": layout, "swizzle_b": layout, "output_dtype": torch.float32}
    product = torch.nn.functional.scaled_mm(*codes, scales[0], recipe, scales[1], recipe, **options)
    return product.mul_(a_factor * b_factor).to(out_dtype)


@gemm_operator
def mm_fp4(
    a: Tensor, a_scales: Tensor, a_factor: Tensor, b: Tensor, b_scales: Tensor, b_factor: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Returns the same product as scaled_mm, by flashinfer. alpha is an argument of each call, so several streams may
    multiply at the same time. Raises NotImplementedError for another out_dtype than BF16.

    flashinfer.gemm.mm_fp4 takes b and its scales column-major, and scales in two dimensions with their padding.
    """
    import flashinfer  # This package is optional. dispatch.py asks whether it is installed.

    if out_dtype != torch.bfloat16:
        raise NotImplementedError(f"flashinfer's mm_fp4 makes BF16, got {out_dtype}")
    padded = triton.cdiv(a.shape[1], 32) * 4
    a_scales, b_scales = (in_tiles(scales).view(-1, padded) for scales in (a_scales, b_scales))
    alpha = (a_factor * b_factor).reshape(1)
    codes = a.contiguous(), b.contiguous().T
    return flashinfer.mm_fp4(*codes, a_scales, b_scales.T, alpha, out_dtype, block_size=16, use_8x4_sf_layout=False)
