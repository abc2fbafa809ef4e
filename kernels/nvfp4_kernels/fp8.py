"""A tensor in 8 bits for the forward product and in 4-bit codes for the backward pass, read once for both.

The arithmetic is that of nanochat_fp4.nvfp4.quantizers, bit for bit: E4M3 with one scale, and NVFP4 in blocks of 1x16
rounded to nearest. Bytes per element of BF16: 2 read, 1 and 0.5625 written.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, empty_scales, operator
from nvfp4_kernels.quantize import check, fit_blocks, hardware, load_blocks, store_blocks

AMAX_MIN = tl.constexpr(1e-30)  # quantizers.FP8_AMAX_MIN
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
    """PER_PROGRAM times NB blocks of 16 contiguous elements a program."""
    amax = m.from_bits(tl.load(amax_ptr))
    # A quotient of FP32 numbers that is rounded to FP64 and then to FP32, as in the reference, is rounded once.
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
    """Returns (numbers, number_scale, codes, scales, tensor_scale) of x.

    x:            FP32 or BF16 (R, K), K a multiple of 16
    amax:         max |x|, () in FP32 or x's dtype
    grid_max, scale_cap, candidates: fields of the codes' quantizers.Rounding
    tiles:        the codes' scales as format.swizzle_scales has them, flat
    numbers:      float8_e4m3fn (R, K), x / number_scale, with number_scale float32 ()
    codes:        uint8 (R, K/2), with scales float8_e4m3fn (R, K/16) and tensor_scale float32 ()
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
    nb, per_program = 128, 2 if m.INTERPRETED.value else 8  # as quantize.quantize_with
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
