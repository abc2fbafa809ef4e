"""Computes ReLU^2, its largest value, and relu(x) in 8 bits for the derivative, in one pass.

The arithmetic is that of nanochat_fp4.nvfp4.epilogue, bit for bit. Per BF16 element the kernel reads 2 bytes and
writes 2 + 1. It reads a row twice, the second time from the cache.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, operator
from nvfp4_kernels.quantize import check, empty_results, quantize_with

STEP_MIN = tl.constexpr(2.0**-126)


@triton.jit
def relu_squared_kernel(
    x_ptr, seed_ptr, y_ptr, kept_ptr, step_ptr, amax_ptr, columns, groups, NB: tl.constexpr, ONLY_STEP: tl.constexpr
):
    """Processes one row, NB times 16 elements at a time.

    groups:    ceil(columns / 16)
    amax:      the bits of a float32, as in amax_kernel
    ONLY_STEP: y and kept are not written
    """
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr)
    lane = tl.arange(0, NB)
    largest = tl.zeros((NB, 16), tl.float32)
    for first in range(0, groups, NB):
        column = (first + lane)[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    # The maximum is taken of the bits as integers, of which NaN is the largest. tl.max of floats would ignore NaN.
    amax = m.from_bits(tl.max(tl.max(m.bits(largest) & 0x7FFFFFFF, axis=1), axis=0))
    step = tl.maximum(tl.math.div_rn(amax, 255.0), STEP_MIN, propagate_nan=tl.PropagateNan.ALL)
    tl.store(step_ptr + row, step)
    # Squaring and rounding preserve the order, so the largest x gives the largest y.
    largest_y = m.rounded_to(amax * amax, y_ptr.dtype.element_ty).to(tl.float32)
    tl.atomic_max(amax_ptr, m.bits(largest_y) & 0x7FFFFFFF, sem="relaxed")
    if not ONLY_STEP:
        inverse = tl.math.div_rn(1.0, step)
        for first in range(0, groups, NB):
            column = (first + lane)[:, None] * 16 + tl.arange(0, 16)[None, :]
            mask = column < columns
            x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
            positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
            y = m.rounded_to(positive * positive, y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * columns + column, y, mask=mask)
            index = (row * groups + first + lane)[:, None] * 2 + tl.arange(0, 2)[None, :]
            kept = m.keep_eight_bits(positive, inverse, seed, index, NB)
            tl.store(kept_ptr + row * columns + column, kept, mask=mask)


@operator("relu_squared(Tensor x, Tensor seed) -> (Tensor, Tensor, Tensor, Tensor)")
def relu_squared(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes relu(x)^2, its largest value, and relu(x) in 8 bits for the derivative. Returns (y, kept, step, amax).

    x:    FP32 or BF16 (R, C)
    seed: int64 ()
    y:    relu(x)^2 in x's dtype
    kept: uint8 (R, C), relu(x) / step, rounded stochastically
    step: float32 (R, 1), 1/255 of the row's largest relu(x)
    amax: float32 (), max relu(x)^2
    Raises ValueError for another shape or dtype of x.
    """
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"nvfp4::relu_squared: got {x.dtype} {tuple(x.shape)}, expected FP32 or BF16 (R, C)")
    x = x.contiguous()
    y, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    step, amax = _launch(x, seed, y, kept)
    return y, kept, step, amax.view(torch.float32)


def _launch(
    x: torch.Tensor, seed: torch.Tensor, y: torch.Tensor | None, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launches the kernel, which writes y and kept unless they are None. Returns step, and amax as the bits of a
    float32."""
    rows, columns = x.shape
    step = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        groups = triton.cdiv(columns, 16)
        nb = min(128, triton.next_power_of_2(groups))
        written = (x, x) if y is None else (y, kept)
        options = dict(NB=nb, ONLY_STEP=y is None, num_warps=4, **NO_FUSION)
        relu_squared_kernel[(rows,)](x, seed, *written, step, amax, columns, groups, **options)
    return step, amax


@relu_squared.register_fake
def _(x, seed):
    contiguous = x.new_empty(x.shape)
    step, amax = (x.new_empty(shape, dtype=torch.float32) for shape in ((x.shape[0], 1), ()))
    return contiguous, contiguous.new_empty(x.shape, dtype=torch.uint8), step, amax


@operator(
    "quantize_relu_squared(Tensor x, Tensor seed, float grid_max, float scale_cap, float[] candidates, bool decode, "
    "bool tiles=False, float eight=0, bool four=True) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
def quantize_relu_squared(
    x: torch.Tensor,
    seed: torch.Tensor,
    grid_max: float,
    scale_cap: float,
    candidates: list[float],
    decode: bool,
    tiles: bool = False,
    eight: float = 0.0,
    four: bool = True,
) -> tuple[torch.Tensor, ...]:
    """Quantizes relu(x)^2 as quantize.quantize does, in blocks of 1x16, to nearest. relu(x)^2 itself is not written.

    x:    FP32 or BF16 (R, C), C a multiple of 16
    four: whether codes and scales are made. Without them their tensors are empty.
    Returns the six results of `quantize`, then kept and step as `relu_squared` does. Per BF16 element the first pass
    reads 2 bytes to find the largest values. The second pass reads 2 bytes, and writes 1 for kept, 1 for each number
    in 8 bits, and 0.5625 for codes and scales.
    Raises ValueError for another shape or dtype of x.
    """
    check(x, 1)
    x = x.contiguous()
    step, amax = _launch(x, seed, None, None)
    kept = torch.empty_like(x, dtype=torch.uint8)
    constants = (0, grid_max, scale_cap, candidates, False, 1, decode, False, tiles)
    return *quantize_with(x, amax, seed, *constants, eight, four, step, kept), kept, step


@quantize_relu_squared.register_fake
def _(x, seed, grid_max, scale_cap, candidates, decode, tiles=False, eight=0.0, four=True):
    kept, step = x.new_empty(x.shape, dtype=torch.uint8), x.new_empty(x.shape[0], 1, dtype=torch.float32)
    return *empty_results(x, decode, False, tiles, eight, four), kept, step
