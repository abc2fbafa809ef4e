"""The second step of post hoc range alignment (the paper, Section 7): it touches scales only.

`finish` aligns the pseudo-scales with the amax that the first kernel found, applies EDEN's correction S, and rounds
them stochastically to E4M3: 2.5 bytes read and 1 written per 16 elements. `repair` is its counterpart where the first
kernel has already written the BF16 operand: it reads the same, and rounds again only the blocks whose scale falls into
E4M3's subnormal range, which the first kernel could not know.
"""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION


@triton.jit
def tensor_scale_kernel(amax_ptr, tensor_scale_ptr, DIVISOR: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    scale = m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, POWER_OF_TWO)
    tl.store(tensor_scale_ptr, scale)


@triton.jit
def finish_kernel(
    pseudo_ptr,
    correction_ptr,
    amax_ptr,
    seed_ptr,
    scales_ptr,
    tensor_scale_ptr,
    blocks,
    stream,
    DIVISOR: tl.constexpr,
    NB: tl.constexpr,
):
    tensor_scale = m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, True)
    if tl.program_id(0) == 0:
        tl.store(tensor_scale_ptr, tensor_scale)
    first = tl.program_id(0).to(tl.int64) * NB
    block = first + tl.arange(0, NB)
    corrected = _corrected(pseudo_ptr, correction_ptr, m.power_of_two_reciprocal(tensor_scale), block, blocks)
    uniform = m.scale_uniforms(tl.load(seed_ptr), first // 4 + tl.arange(0, NB // 4), stream, NB)
    tl.store(scales_ptr + block, m.encode_e4m3(m.stochastic_round_e4m3(corrected, uniform)), mask=block < blocks)


@triton.jit
def repair_kernel(
    decoded_ptr,
    pseudo_ptr,
    correction_ptr,
    amax_ptr,
    seed_ptr,
    blocks,
    stream,
    DIVISOR: tl.constexpr,
    NB: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """NB blocks a program. Most find nothing to do, and the rare work is done in parts, which need few registers."""
    tensor_scale = m.tensor_scale_of(m.from_bits(tl.load(amax_ptr)), DIVISOR, True)
    shift = m.power_of_two_reciprocal(tensor_scale)
    first = tl.program_id(0).to(tl.int64) * NB
    corrected = _corrected(pseudo_ptr, correction_ptr, shift, first + tl.arange(0, NB), blocks)
    subnormal = (corrected > 0) & (corrected < m.E4M3_MIN_NORMAL)
    if tl.max(subnormal.to(tl.int32), axis=0) > 0:
        for start in range(0, NB, CHUNK):
            block = first + start + tl.arange(0, CHUNK)
            corrected_again = _corrected(pseudo_ptr, correction_ptr, shift, block, blocks)
            index = (first + start) // 4 + tl.arange(0, CHUNK // 4)
            uniform = m.scale_uniforms(tl.load(seed_ptr), index, stream, CHUNK)
            # What the first kernel rounded to, free of E4M3's range, and what it should have been.
            e = tl.maximum(m.power_of_two_floor(corrected_again), m.TENSOR_SCALE_MIN)
            before = m.stochastic_round_m3(corrected_again, e, uniform)
            after = m.stochastic_round_e4m3(corrected_again, uniform)
            wrong = (block < blocks) & (before != after)
            element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
            value = tl.load(decoded_ptr + element, mask=wrong[:, None], other=0.0).to(tl.float32)
            # decoded / before is the E2M1 value times tensor_scale: both divisions are exact.
            q = tl.math.div_rn(value, tl.where(wrong, before, 1.0)[:, None])
            tl.store(decoded_ptr + element, (q * after[:, None]).to(tl.bfloat16), mask=wrong[:, None])


@triton.jit
def _corrected(pseudo_ptr, correction_ptr, shift, block, blocks):
    """Pseudo-scales, aligned and corrected."""
    mask = block < blocks
    pseudo = tl.load(pseudo_ptr + block, mask=mask, other=0.0).to(tl.float32)
    return pseudo * shift * tl.load(correction_ptr + block // 8, mask=mask, other=1.0)


def finish(pseudo: torch.Tensor, correction: torch.Tensor, amax: torch.Tensor, seed: torch.Tensor, operand):
    """pseudo BF16 (R, K/16), correction float32 (R, K/128), amax int32 (), the bits of a float32 ->
    (scales float8_e4m3fn (R, K/16), tensor_scale float32 (), a power of two)."""
    scales = torch.empty(pseudo.shape, dtype=torch.uint8, device=pseudo.device)
    tensor_scale = torch.empty((), dtype=torch.float32, device=pseudo.device)
    nb = 1024
    finish_kernel[(triton.cdiv(pseudo.numel(), nb),)](
        pseudo,
        correction,
        amax,
        seed,
        scales,
        tensor_scale,
        pseudo.numel(),
        operand.stream,
        DIVISOR=operand.divisor,
        NB=nb,
        **NO_FUSION,
    )
    return scales.view(torch.float8_e4m3fn), tensor_scale


def repair(decoded, pseudo, correction, amax, seed, operand) -> None:
    """decoded BF16 (R, K), in place; the others as for finish."""
    nb = 1024
    repair_kernel[(triton.cdiv(pseudo.numel(), nb),)](
        decoded,
        pseudo,
        correction,
        amax,
        seed,
        pseudo.numel(),
        operand.stream,
        DIVISOR=operand.divisor,
        NB=nb,
        CHUNK=128,
        **NO_FUSION,
    )
