"""Makes 8-bit numbers for the forward product and 4-bit codes for the backward pass, and reads the tensor once for
both.

The 8-bit numbers are E4M3 with one scale for the tensor. The codes are NVFP4 in blocks of 1x16, rounded to nearest. The
arithmetic is that of nanochat_fp4.nvfp4.quantizers, bit for bit. Per BF16 element the kernel reads 2 bytes, and writes
1 and 0.5625.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, empty_scales, operator
from nvfp4_kernels.quantize import check, fit_blocks, hardware, load_blocks, store_blocks

AMAX_MIN = tl.constexpr(1e-30)  # This is quantizers.FP8_AMAX_MIN.
LARGEST_SCALE = tl.constexpr(448.0 / 1e-30)


@triton.jit
def fp8_with_codes_kernel(
    x_ptr,
    amax_ptr,
    numbers_ptr,
    number_scale_ptr,
    codes_ptr,
    scales_ptr,
    tensor_scale_ptr,
    blocks,
    columns,
    DIVISOR: tl.constexpr,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HARDWARE: tl.constexpr,
    TILES: tl.constexpr,
    NB: tl.constexpr,
    PER_PROGRAM: tl.constexpr,
):
    """Rounds PER_PROGRAM times NB blocks of 16 contiguous elements."""
    amax = m.from_bits(tl.load(amax_ptr))
    # The reference divides in FP64 and rounds to FP32. For FP32 operands this gives the quotient that is rounded once.
    factor = tl.where(amax < AMAX_MIN, LARGEST_SCALE, tl.math.div_rn(m.E4M3_MAX, amax))
    tensor_scale = m.tensor_scale_of(amax, DIVISOR, False)
    inverse = tl.math.div_rn(1.0, tensor_scale)
    if tl.program_id(0) == 0:
        tl.store(number_scale_ptr, tl.math.div_rn(1.0, factor))
        tl.store(tensor_scale_ptr, tensor_scale)
    for i in range(PER_PROGRAM):
        block = (tl.program_id(0).to(tl.int64) * PER_PROGRAM + i) * NB + tl.arange(0, NB)
        mask = block < blocks
        x = load_blocks(x_ptr, block * 16, mask)
        element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(numbers_ptr + element, m.to_e4m3(x * factor, HARDWARE), mask=mask[:, None])
        _, _, scale, codes = fit_blocks(
            x, tl.max(tl.abs(x), axis=1) * inverse, inverse, 0, block, 0,
            GRID_MAX, INVERSE, CANDIDATES, False, False, HARDWARE, NB, 16,
        )  # fmt: skip
        store_blocks(codes_ptr, scales_ptr, codes, scale, block, mask, columns, TILES, HARDWARE)


@operator(
    "fp8_with_codes(Tensor x, Tensor amax, float grid_max, float scale_cap, float[] candidates, bool tiles) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def fp8_with_codes(
    x: torch.Tensor, amax: torch.Tensor, grid_max: float, scale_cap: float, candidates: list[float], tiles: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes x to 8 bits and to 4 bits. Returns (numbers, number_scale, codes, scales, tensor_scale).

    x:            FP32 or BF16 (R, K), K a multiple of 16
    amax:         max |x|, () in FP32 or x's dtype
    grid_max, scale_cap, candidates: the fields of roundings.Rounding for the codes
    tiles:        whether the scales of the codes are in tiles, flat (format.swizzle_scales)
    numbers:      float8_e4m3fn (R, K), x / number_scale
    number_scale: float32 ()
    codes:        uint8 (R, K/2)
    scales:       float8_e4m3fn (R, K/16), or flat in tiles
    tensor_scale: float32 ()
    Raises ValueError for another shape or dtype of x.
    """
    check(x, 1)
    x = x.contiguous()
    rows, columns = x.shape
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=x.device)
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=x.device)
    scales = empty_scales(rows, columns // 16, tiles, x)
    number_scale, tensor_scale = (torch.empty((), dtype=torch.float32, device=x.device) for _ in range(2))
    blocks = rows * columns // 16
    nb, per_program = 128, 2 if m.INTERPRETED.value else 8  # The same numbers as in quantize.quantize_with.
    fp8_with_codes_kernel[(max(1, triton.cdiv(blocks, nb * per_program)),)](
        x,
        amax.float().view(torch.int32),
        numbers,
        number_scale,
        codes.view(torch.int32),
        scales,
        tensor_scale,
        blocks,
        columns,
        DIVISOR=grid_max * scale_cap,
        GRID_MAX=grid_max,
        INVERSE=m.inverse(grid_max),
        CANDIDATES=tuple(candidates),
        HARDWARE=hardware(),
        TILES=tiles,
        NB=nb,
        PER_PROGRAM=per_program,
        num_warps=4,
        **NO_FUSION,
    )
    eight = torch.float8_e4m3fn
    return numbers.view(eight), number_scale, codes, scales.view(eight), tensor_scale


@fp8_with_codes.register_fake
def _(x, amax, grid_max, scale_cap, candidates, tiles):
    rows, columns = x.shape
    number_scale, tensor_scale = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    return (
        x.new_empty(rows, columns, dtype=torch.float8_e4m3fn),
        number_scale,
        x.new_empty(rows, columns // 2, dtype=torch.uint8),
        empty_scales(rows, columns // 16, tiles, x).view(torch.float8_e4m3fn),
        tensor_scale,
    )
