"""One token a row: what a transformer does between its matrix products, and products with a weight in codes.

In generation a layer is a chain of small steps:

* `row`: residual, norm, ReLU^2, quantization per token.
* `codes_matmul`: a few rows times a weight, which is read as codes of 4.5 bits an element.
* `attention`: rotation, norm and attention of one new position, whose number is read on the device.

No step waits for the host or allocates by a value on the device, so a CUDA graph can capture the chain.

Values are rounded to the dtype of the residual stream (BF16, or FP32 on a CPU) where the model outside of these kernels
rounds them; sums are FP32, in another order. Codes and scales of a row are those of nvfp4's quantize(per_token=True).
"""

import functools
import math

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION
from nvfp4_kernels.quantize import fit_blocks, hardware

TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@triton.jit
def _sum_of_parts(ptr, at, mask, stride, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Float32, rounded to dtype: the sum of PARTS partial products that lie `stride` elements apart."""
    value = tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(ptr + part * stride + at, mask=mask, other=0.0).to(tl.float32)
    return m.rounded_to(value, dtype).to(tl.float32)


@triton.jit
def row_kernel(
    y_ptr,
    x_ptr,
    x0_ptr,
    x_factor_ptr,
    x0_factor_ptr,
    norm_weight_ptr,
    out_ptr,
    out_scale_ptr,
    rows,
    columns,
    eps,
    PRODUCT: tl.constexpr,
    PARTS: tl.constexpr,
    ADD: tl.constexpr,
    MIX: tl.constexpr,
    NORM: tl.constexpr,
    NORM_WEIGHT: tl.constexpr,
    RELU2: tl.constexpr,
    SILU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    DIVISOR: tl.constexpr,
    GRID_MAX: tl.constexpr,
    INVERSE: tl.constexpr,
    CANDIDATES: tl.constexpr,
    HARDWARE: tl.constexpr,
    NB: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, NB)[:, None] * 16 + tl.arange(0, 16)[None, :]
    column, mask = at, at < columns
    at += row * columns
    if SILU:  # a row of gates, then what they let through
        both = row * 2 * columns + column
        gate = _sum_of_parts(y_ptr, both, mask, rows * 2 * columns, PARTS, PRODUCT)
        gate = m.rounded_to(gate / (1.0 + tl.exp(-gate)), PRODUCT).to(tl.float32)
        v = gate * _sum_of_parts(y_ptr, both + columns, mask, rows * 2 * columns, PARTS, PRODUCT)
        v = m.rounded_to(v, PRODUCT).to(tl.float32)
    else:
        v = _sum_of_parts(y_ptr, at, mask, rows * columns, PARTS, PRODUCT)
    if ADD:
        v = m.rounded_to(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32) + v, dtype).to(tl.float32)
    if MIX:
        x0 = tl.load(x0_ptr + at, mask=mask, other=0.0).to(tl.float32)
        factor = m.rounded_to(tl.load(x_factor_ptr).to(tl.float32), dtype).to(tl.float32)
        x0_factor = m.rounded_to(tl.load(x0_factor_ptr).to(tl.float32), dtype).to(tl.float32)
        v = m.rounded_to(factor * v, dtype).to(tl.float32) + m.rounded_to(x0_factor * x0, dtype).to(tl.float32)
        v = m.rounded_to(v, dtype).to(tl.float32)
    if ADD or MIX:
        tl.store(x_ptr + at, v.to(dtype), mask=mask)
    if NORM:
        mean = tl.sum(tl.sum(v * v, axis=1), axis=0) / columns
        v = v * tl.math.rsqrt(mean + eps)
        if NORM_WEIGHT:
            v = v * tl.load(norm_weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        v = m.rounded_to(v, dtype).to(tl.float32)
    if RELU2:
        v = tl.maximum(v, 0.0, propagate_nan=tl.PropagateNan.ALL)
        v = m.rounded_to(v * v, PRODUCT).to(tl.float32)
    if QUANTIZE:
        amax = m.max_with_nan(v)
        if m.INTERPRETED:
            largest = m.from_bits(tl.max(m.bits(amax), axis=0))
        else:
            largest = tl.reduce(amax, 0, m._larger)
        scale = m.tensor_scale_of(largest, DIVISOR, False)
        inverse = tl.math.div_rn(1.0, scale)
        q, _, block_scale, _ = fit_blocks(
            v, amax * inverse, inverse, 0, 0, 0, GRID_MAX, INVERSE, CANDIDATES, False, False, HARDWARE, NB, 16
        )
        tl.store(out_scale_ptr + row, scale)
        even, odd = tl.split(tl.reshape(q * block_scale[:, None], (NB, 8, 2)))
        at = tl.arange(0, NB)[:, None] * 8 + tl.arange(0, 8)[None, :]
        mask = at < columns // 2
        tl.store(out_ptr + row * columns + at, even.to(tl.float16), mask=mask)
        tl.store(out_ptr + row * columns + columns // 2 + at, odd.to(tl.float16), mask=mask)
    else:
        tl.store(out_ptr + at, m.rounded_to(v, out_ptr.dtype.element_ty), mask=mask)


ROW_BLOCKS = 8  # blocks of 16 columns in a warp


def row(
    y: torch.Tensor,
    x: torch.Tensor | None = None,
    mix: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    dtype: torch.dtype,
    add: bool = False,
    norm_eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
    activation: str | None = None,
    rounding: tuple[float, float, tuple[float, ...]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The next product's input from a product's parts: (values (R, K), scales (R, 1)).

    y:        (P, R, K), P parts, which are summed. K is a multiple of 16.
    dtype:    the dtype of products. y is rounded to dtype.
    x:        the residual stream (R, K), in a dtype of its own
    add:      x + y goes on instead of y. With add or mix, x is set to the new stream.
    mix:      (x0 (R, K), factor (), x0_factor ()). The sum becomes factor * x + x0_factor * x0.
    norm_eps: the epsilon of an RMSNorm that follows, times norm_weight (K,) if given
    activation: "relu2", or "silu". With "silu", y is (P, R, 2 K): gates, then their factors.
    rounding: (grid_max, scale_cap, candidates) of a quantization per token to 1x16 blocks. Values are then exact
              products code * scale in float16, even columns first, and scales are float32. None: values are in dtype,
              and there are no scales.
    """
    parts, rows, columns = y.shape
    columns //= 2 if activation == "silu" else 1
    values = torch.empty(rows, columns, dtype=torch.float16 if rounding else dtype, device=y.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=y.device) if rounding else None
    x = torch.empty((), dtype=dtype, device=y.device) if x is None else x
    x0, factor, x0_factor = mix or (x, x, x)
    grid_max, cap, candidates = rounding or (1.0, 1.0, (1.0,))
    nb = triton.next_power_of_2(columns // 16)
    row_kernel[(rows,)](
        y, x, x0, factor, x0_factor, x if norm_weight is None else norm_weight, values,
        values if scales is None else scales, rows, columns, norm_eps or 0.0,
        PRODUCT=TRITON_TYPES[dtype], PARTS=parts, ADD=add, MIX=mix is not None, NORM=norm_eps is not None,
        NORM_WEIGHT=norm_weight is not None, RELU2=activation == "relu2", SILU=activation == "silu",
        QUANTIZE=rounding is not None, DIVISOR=grid_max * cap, GRID_MAX=grid_max, INVERSE=m.inverse(grid_max),
        CANDIDATES=tuple(candidates), HARDWARE=hardware(), NB=nb, num_warps=max(4, min(16, nb // ROW_BLOCKS)),
        **NO_FUSION,
    )  # fmt: skip
    return values, scales


# ----------------------------------------------------------------------------------------------------------------------
# Products


@triton.jit
def _decode_halves(code, scale, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """code * scale / 128 of the low and of the high nibbles, float16 (ROWS, BYTES) each.

    code:  bytes (ROWS, BYTES)
    scale: bytes (ROWS, BYTES / 8)
    The products are exact: multiples of 2^-17 with 6 significant bits, below 32.
    """
    # An E4M3 number's bits, two places lower, are those of the float16 number 2^-8 as large. An E2M1 number's bits on
    # top of the mantissa are those of the float16 number 2^-14 as large. Both hold for subnormal numbers.
    half = (scale.to(tl.int32) & 0x7F) << 7
    half = tl.where(half == 0x3F80, 0x7E00, half)  # NaN
    pair = tl.reshape(tl.broadcast_to((half | (half << 16))[:, :, None], (ROWS, BYTES // 8, 8)), (ROWS, BYTES))
    if m.INTERPRETED:
        factor = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 2.0
        code = code.to(tl.int32)
        low, high = m.decode_e2m1(code & 0xF) * factor, m.decode_e2m1(code >> 4) * factor
        return low.to(tl.float16), high.to(tl.float16)
    # A thread has four bytes at once. The third and fourth byte of a wgmma's operand lie eight rows below the first,
    # and have another scale.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 r, s, p, q, u, v, w, x;
        mov.b32 x, 0x78007800;
        mul.rn.f16x2 s, $5, x;
        mul.rn.f16x2 r, $7, x;
        prmt.b32 p, $4, 0, 0x4140;
        prmt.b32 q, $4, 0, 0x4342;
        shl.b32 u, p, 9;  shl.b32 v, p, 12;  and.b32 u, u, 0x0E000E00;  lop3.b32 u, v, 0x80008000, u, 0xEA;
        mul.rn.f16x2 $0, u, s;
        shl.b32 w, q, 9;  shl.b32 x, q, 12;  and.b32 w, w, 0x0E000E00;  lop3.b32 w, x, 0x80008000, w, 0xEA;
        mul.rn.f16x2 $1, w, r;
        shl.b32 u, p, 5;  shl.b32 v, p, 8;  and.b32 u, u, 0x0E000E00;  lop3.b32 u, v, 0x80008000, u, 0xEA;
        mul.rn.f16x2 $2, u, s;
        shl.b32 w, q, 5;  shl.b32 x, q, 8;  and.b32 w, w, 0x0E000E00;  lop3.b32 w, x, 0x80008000, w, 0xEA;
        mul.rn.f16x2 $3, w, r;
        }""",
        "=r,=r,=r,=r,r,r,r,r,r",
        [code, pair],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def codes_matmul_kernel(
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scales_ptr,
    tensor_scale_ptr,
    out_ptr,
    M,
    N,
    units,
    per_part,
    UNIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The transposed product (N, M): the weight has the many rows that tensor cores want, and x the few columns.

    A row of the weight has units * UNIT blocks. The compiler then knows a divisor of the row's length, and may read
    codes and scales several bytes at once and ahead of time. Single bytes would be read only when they are needed.
    """
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    row = tl.arange(0, BM)
    byte, group = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    groups, half = units * UNIT, units * (UNIT * 8)
    accumulator = tl.zeros((BN, BM), tl.float32)
    weight_row = n.to(tl.int64)[:, None]
    for step in range(part * per_part, tl.minimum((part + 1) * per_part, tl.cdiv(half, BK // 2))):
        at, group_at = step * (BK // 2) + byte, step * (BK // 16) + group
        inside = at < half
        mask = (n < N)[:, None] & inside[None, :]
        code = tl.load(codes_ptr + weight_row * half + at[None, :], mask=mask, other=0)
        mask = (n < N)[:, None] & (group_at < groups)[None, :]
        scale = tl.load(scales_ptr + weight_row * groups + group_at[None, :], mask=mask, other=0)
        x_at = row[None, :] * (2 * half) + at[:, None]
        mask = (row < M)[None, :] & inside[:, None]
        even, odd = tl.load(x_ptr + x_at, mask=mask, other=0.0), tl.load(x_ptr + x_at + half, mask=mask, other=0.0)
        low, high = _decode_halves(code, scale, BN, BK // 2)
        if m.INTERPRETED:
            accumulator += tl.dot(low.to(tl.float32), even.to(tl.float32), input_precision="ieee")
            accumulator += tl.dot(high.to(tl.float32), odd.to(tl.float32), input_precision="ieee")
        else:
            accumulator = tl.dot(low, even, accumulator)
            accumulator = tl.dot(high, odd, accumulator)
    alpha = tl.load(tensor_scale_ptr) * tl.load(x_scale_ptr + row, mask=row < M, other=0.0) * 128.0
    out = m.rounded_to(accumulator * alpha[None, :], out_ptr.dtype.element_ty)
    at = (part * M + row[None, :]) * N + n[:, None]
    tl.store(out_ptr + at, out, mask=(row < M)[None, :] & (n < N)[:, None])


@triton.jit
def one_row_kernel(
    x_ptr,
    x_scale_ptr,
    codes_ptr,
    scales_ptr,
    tensor_scale_ptr,
    out_ptr,
    N,
    K,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
):
    """One row of x, without tensor cores: all of K for BN rows of the weight, read at once."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    byte, group = tl.arange(0, BYTES), tl.arange(0, BYTES // 8)
    weight_row, inside = n.to(tl.int64)[:, None], byte < K // 2
    mask = (n < N)[:, None] & inside[None, :]
    code = tl.load(codes_ptr + weight_row * (K // 2) + byte[None, :], mask=mask, other=0)
    mask = (n < N)[:, None] & (group < K // 16)[None, :]
    scale = tl.load(scales_ptr + weight_row * (K // 16) + group[None, :], mask=mask, other=0)
    even = tl.load(x_ptr + byte, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + K // 2 + byte, mask=inside, other=0.0).to(tl.float32)
    low, high = _decode_halves(code, scale, BN, BYTES)
    product = low.to(tl.float32) * even[None, :] + high.to(tl.float32) * odd[None, :]
    out = tl.sum(product, axis=1) * (tl.load(tensor_scale_ptr) * tl.load(x_scale_ptr) * 128.0)
    tl.store(out_ptr + n, m.rounded_to(out, out_ptr.dtype.element_ty), mask=n < N)


# ONE_ROW: bytes of codes that a program reads, warps. TILE, for several rows: rows and columns of a tile of the weight,
# enough programs, warps, stages.
ONE_ROW, TILE = (4096, 4), (32, 128, 528, 2, 4)


def codes_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    tensor_scale: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The parts (P, M, N) of x . weight^T. Their sum is the product. The weight is read as codes.

    x:       float16 (M, K) of `row`, M at most 64
    x_scale: float32 (M, 1) of `row`
    codes:   uint8 (N, K/2)
    scales:  float8_e4m3fn (N, K/16)
    tensor_scale: float32 ()
    P is 1, and the part is in out_dtype, where N alone gives enough programs. Otherwise the parts are float32, each
    over a share of K. The products are exact, the sums float32.
    """
    (rows, k), n = x.shape, codes.shape[0]
    scales = scales.view(torch.uint8)
    if rows == 1 and k <= 2 * ONE_ROW[0]:
        per_row = triton.next_power_of_2(k // 2)
        bn = max(1, ONE_ROW[0] // per_row)
        out = torch.empty(1, 1, n, dtype=out_dtype, device=x.device)
        one_row_kernel[(triton.cdiv(n, bn),)](
            x, x_scale, codes, scales, tensor_scale, out, n, k, BN=bn, BYTES=per_row, num_warps=ONE_ROW[1], **NO_FUSION
        )
        return out
    bn, bk, enough, warps, stages = TILE
    steps, unit = triton.cdiv(k, bk), math.gcd(k // 16, 16)
    per_part = triton.cdiv(steps, max(1, min(16, enough // triton.cdiv(n, bn), steps)))
    parts = triton.cdiv(steps, per_part)
    out = torch.empty(parts, rows, n, dtype=out_dtype if parts == 1 else torch.float32, device=x.device)
    codes_matmul_kernel[(triton.cdiv(n, bn), parts)](
        x, x_scale, codes, scales, tensor_scale, out, rows, n, k // 16 // unit, per_part, UNIT=unit,
        BM=max(16, triton.next_power_of_2(rows)), BN=bn, BK=bk, num_warps=warps, num_stages=stages, **NO_FUSION,
    )  # fmt: skip
    return out


@functools.cache
def product_problem(device: torch.device) -> str | None:
    """The fault of codes_matmul on this GPU, or None: a known product must come out on one row and on 32 rows."""
    generator = torch.Generator().manual_seed(4)
    n, k = 48, 560
    codes = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, k // 16), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).int()
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    weight = torch.where(nibbles > 7, -table[nibbles & 7], table[nibbles & 7])
    weight = weight * scales.double().repeat_interleave(16, dim=1)
    one = torch.ones(())
    try:
        for rows in (1, 32):
            x = torch.randint(-12, 13, (rows, k), generator=generator).double() / 2
            halves = torch.cat((x[:, 0::2], x[:, 1::2]), dim=1).half()
            arguments = (t.to(device) for t in (halves, torch.ones(rows, 1), codes, scales, one))
            got = codes_matmul(*arguments, torch.float32).double().sum(0).cpu()
            want = x @ weight.T
            if not float((got - want).square().sum() / want.square().sum()) < 1e-10:
                return f"the product of {rows} row(s) with codes is wrong on this GPU"
    except Exception as error:  # whatever a compiler raises
        return f"the product with codes raises {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# Attention


@triton.jit
def _rotated_and_normalized(
    ptr,
    at,
    stride,
    cos,
    sin,
    eps,
    PARTS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    dtype: tl.constexpr,
    rotated: tl.constexpr,
):
    """The two halves of a head, float32 (HALF,) each, rotated (in the dtype `rotated`) and divided by their root mean
    square."""
    d = tl.arange(0, HALF)
    a = _sum_of_parts(ptr, at + d, d < HALF, stride, PARTS, dtype)
    b = _sum_of_parts(ptr, at + HALF + d, d < HALF, stride, PARTS, dtype)
    first = m.rounded_to(a * cos, rotated).to(tl.float32) + m.rounded_to(b * sin, rotated).to(tl.float32)
    second = m.rounded_to(b * cos, rotated).to(tl.float32) - m.rounded_to(a * sin, rotated).to(tl.float32)
    first, second = m.rounded_to(first, dtype).to(tl.float32), m.rounded_to(second, dtype).to(tl.float32)
    if NORM:
        r = tl.math.rsqrt(tl.sum(first * first + second * second, axis=0) / (2 * HALF) + eps)
        first, second = m.rounded_to(first * r, dtype).to(tl.float32), m.rounded_to(second * r, dtype).to(tl.float32)
    return first, second


@triton.jit
def attention_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    position_ptr,
    out_ptr,
    rows,
    positions,
    heads,
    kv_heads,
    left,
    scale,
    eps,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    BT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One head of one row: rotates and normalizes its query and key, puts key and value into the caches, attends.

    BT positions are read at a time. Each has a softmax of its own over every BTth position, so threads sum nothing but
    the score together. The softmaxes are joined at the end.
    """
    dtype: tl.constexpr = k_cache_ptr.dtype.element_ty
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_head = head // (heads // kv_heads)
    position = tl.load(position_ptr + row)
    d, whole = tl.arange(0, HALF), tl.arange(0, 2 * HALF)
    cos = tl.load(cos_ptr + position * HALF + d).to(tl.float32)
    sin = tl.load(sin_ptr + position * HALF + d).to(tl.float32)
    width: tl.constexpr = 2 * HALF
    columns = (heads + 2 * kv_heads) * width
    base, stride = row * columns, rows * columns
    at_q = base + head * width
    q1, q2 = _rotated_and_normalized(qkv_ptr, at_q, stride, cos, sin, eps, PARTS, HALF, NORM, dtype, ROTATED)
    at_k = base + (heads + kv_head) * width
    k1, k2 = _rotated_and_normalized(qkv_ptr, at_k, stride, cos, sin, eps, PARTS, HALF, NORM, dtype, ROTATED)
    at_v = base + (heads + kv_heads + kv_head) * width + whole
    v = _sum_of_parts(qkv_ptr, at_v, whole < width, stride, PARTS, dtype)
    cache = row * positions * kv_heads * width + kv_head * width
    new = cache + position.to(tl.int64) * kv_heads * width
    if head % (heads // kv_heads) == 0:
        tl.store(k_cache_ptr + new + d, k1.to(dtype))
        tl.store(k_cache_ptr + new + HALF + d, k2.to(dtype))
        tl.store(v_cache_ptr + new + whole, v.to(dtype))

    own = tl.sum(q1 * k1 + q2 * k2, axis=0) * scale
    q = tl.reshape(tl.trans(tl.join(q1, q2)), (1, width))
    lane = tl.arange(0, BT)
    largest = tl.zeros((BT,), tl.float32) + own
    total = tl.zeros((BT,), tl.float32)
    result = tl.zeros((BT, width), tl.float32)
    start = position * 0
    if left >= 0:
        start = tl.maximum(start, position - left)
    for t in tl.range(start, position, BT, num_stages=STAGES):
        seen = t + lane < position
        at = cache + (t + lane).to(tl.int64)[:, None] * kv_heads * width + whole[None, :]
        keys = tl.load(k_cache_ptr + at, mask=seen[:, None], other=0.0).to(tl.float32)
        values = tl.load(v_cache_ptr + at, mask=seen[:, None], other=0.0).to(tl.float32)
        score = tl.where(seen, tl.sum(keys * q, axis=1) * scale, float("-inf"))
        larger = tl.maximum(largest, score)
        weight, shrink = tl.exp(score - larger), tl.exp(largest - larger)
        total = total * shrink + weight
        result = tl.fma(weight[:, None], values, result * shrink[:, None])
        largest = larger
    at_most = tl.max(largest, axis=0)
    weight, own = tl.exp(largest - at_most), tl.exp(own - at_most)
    total = tl.sum(total * weight, axis=0) + own
    result = tl.sum(result * weight[:, None], axis=0) + v * own
    tl.store(out_ptr + (row * heads + head) * width + whole, m.rounded_to(result / total, dtype))


# Positions read at a time, warps, stages.
ATTENTION = (16, 4, 4)


def attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    position: torch.Tensor,
    heads: int,
    left: int,
    eps: float | None,
) -> torch.Tensor:
    """Attention of one new position a row -> (1, B, H * D) in the caches' dtype; its key and value go into the caches.

    qkv:      (P, B, (H + 2 H_kv) * D), parts of queries, keys and values
    cos, sin: (positions, D / 2). Queries and keys are rotated in this dtype, if it is wider than the caches'.
    eps:      of the norm after the rotation; None for no norm
    caches:   (B, T, H_kv, D), D twice a power of two and at least 16
    position: int32 (B,), of the new token
    left:     a window of left + 1 positions, negative for none
    Only the device knows positions, so nobody checks that they lie in caches and tables.
    Raises ValueError for a position of another shape or dtype.
    """
    parts, rows, _ = qkv.shape
    if position.shape != (rows,) or position.dtype != torch.int32:
        raise ValueError(f"position must be int32 ({rows},), not {position.dtype} {tuple(position.shape)}")
    _, positions, kv_heads, width = k_cache.shape
    out = torch.empty(1, rows, heads * width, dtype=k_cache.dtype, device=qkv.device)
    attention_kernel[(rows, heads)](
        qkv, cos, sin, k_cache, v_cache, position, out, rows, positions, heads, kv_heads, left, width**-0.5, eps or 0.0,
        PARTS=parts, NORM=eps is not None,
        ROTATED=TRITON_TYPES[torch.promote_types(cos.dtype, k_cache.dtype)],
        HALF=width // 2, BT=ATTENTION[0], num_warps=ATTENTION[1], STAGES=ATTENTION[2], **NO_FUSION,
    )  # fmt: skip
    return out
