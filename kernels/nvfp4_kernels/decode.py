"""Codes and scales to BF16: exact, 0.5625 bytes read and 2 written per element."""

import torch
import triton
import triton.language as tl

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, operator


@triton.jit
def decode_kernel(codes_ptr, scales_ptr, values_ptr, blocks, NB: tl.constexpr):
    block = tl.program_id(0).to(tl.int64) * NB + tl.arange(0, NB)
    mask = block < blocks
    scale = m.decode_e4m3(tl.load(scales_ptr + block, mask=mask, other=0))
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    code = tl.load(codes_ptr + byte, mask=mask[:, None], other=0).to(tl.int32)
    value = m.decode_e2m1(tl.reshape(tl.join(code & 0xF, code >> 4), (NB, 16))) * scale[:, None]
    element = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(values_ptr + element, value.to(tl.bfloat16), mask=mask[:, None])


@operator("decode(Tensor codes, Tensor scales) -> Tensor")
def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """code * scale, BF16 (R, K), without tensor_scale.

    codes:  uint8 (R, K/2)
    scales: float8_e4m3fn (R, K/16)
    """
    values = torch.empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16, device=codes.device)
    nb = 256
    blocks = scales.numel()
    decode_kernel[(triton.cdiv(blocks, nb),)](codes, scales.view(torch.uint8), values, blocks, nb, **NO_FUSION)
    return values


@decode.register_fake
def _(codes, scales):
    return codes.new_empty(codes.shape[0], codes.shape[1] * 2, dtype=torch.bfloat16)
