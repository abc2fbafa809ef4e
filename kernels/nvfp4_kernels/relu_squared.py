"""ReLU^2, its largest value and, for its derivative, relu(x) in 8 bits, in one pass: nanochat_fp4.nvfp4.relu_squared,
bit for bit.

Bytes per element, for BF16: 2 are read, 2 + 1 written. A row is read twice, the second time from the cache.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, operator

ROUND_MAGIC = tl.constexpr(1.5 * 2.0**23)  # ulp 1 on [2^23, 2^24): the sum's low bits are the rounded integer
STEP_MIN = tl.constexpr(2.0**-126)


@triton.jit
def relu_squared_kernel(x_ptr, seed_ptr, y_ptr, kept_ptr, step_ptr, amax_ptr, columns, groups, NB: tl.constexpr):
    """One row a program, NB times 16 elements at a time; groups: ceil(columns / 16). amax: as amax_kernel's."""
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seed_ptr)
    lane = tl.arange(0, NB)
    largest = tl.zeros((NB, 16), tl.float32)
    for first in range(0, groups, NB):
        column = (first + lane)[:, None] * 16 + tl.arange(0, 16)[None, :]
        x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    # As integers, of which NaN is the largest: tl.max would pass over it.
    amax = m.from_bits(tl.max(tl.max(m.bits(largest) & 0x7FFFFFFF, axis=1), axis=0))
    step = tl.maximum(tl.math.div_rn(amax, 255.0), STEP_MIN, propagate_nan=tl.PropagateNan.ALL)
    tl.store(step_ptr + row, step)
    # Squaring and rounding keep the order: the largest y is that of the largest x.
    largest_y = m.rounded_to(amax * amax, y_ptr.dtype.element_ty).to(tl.float32)
    tl.atomic_max(amax_ptr, m.bits(largest_y) & 0x7FFFFFFF, sem="relaxed")
    inverse = tl.math.div_rn(1.0, step)
    for first in range(0, groups, NB):
        column = (first + lane)[:, None] * 16 + tl.arange(0, 16)[None, :]
        mask = column < columns
        x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0).to(tl.float32)
        positive = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        y = m.rounded_to(positive * positive, y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * columns + column, y, mask=mask)
        index = (row * groups + first + lane)[:, None] * 2 + tl.arange(0, 2)[None, :]
        noise = m.element_noise(seed, index, 0, 0, NB)
        rounded = tl.minimum(positive * inverse + noise, 255.0) + ROUND_MAGIC
        tl.store(kept_ptr + row * columns + column, m.bits(rounded).to(tl.uint8), mask=mask)


@operator("relu_squared(Tensor x, Tensor seed) -> (Tensor, Tensor, Tensor, Tensor)")
def relu_squared(x: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (R, C) FP32 or BF16, seed int64 () -> relu(x)^2 in x's dtype, relu(x) / step uint8 (R, C) rounded
    stochastically, step float32 (R, 1), 1/255 of the row's largest value, max relu(x)^2 float32 ().

    Raises ValueError for shapes and dtypes it cannot take.
    """
    if x.dim() != 2 or x.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"nvfp4::relu_squared: got {x.dtype} {tuple(x.shape)}, expected FP32 or BF16 (R, C)")
    x = x.contiguous()
    rows, columns = x.shape
    y, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.uint8)
    step = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    amax = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        groups = triton.cdiv(columns, 16)
        nb = min(128, triton.next_power_of_2(groups))
        relu_squared_kernel[(rows,)](x, seed, y, kept, step, amax, columns, groups, NB=nb, num_warps=4, **NO_FUSION)
    return y, kept, step, amax.view(torch.float32)


@relu_squared.register_fake
def _(x, seed):
    contiguous = x.new_empty(x.shape)
    step, amax = (x.new_empty(shape, dtype=torch.float32) for shape in ((x.shape[0], 1), ()))
    return contiguous, contiguous.new_empty(x.shape, dtype=torch.uint8), step, amax
