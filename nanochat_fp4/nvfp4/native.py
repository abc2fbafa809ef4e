"""GEMMs of tensor cores: NVFP4 (a Blackwell's) and its implementations, and FP8 with one scale; what each takes.

Which of them this machine has, and may be trusted with, is dispatch.py's to say.
"""

import torch

from nanochat_fp4.nvfp4.format import NVFP4Tensor

IMPLEMENTATIONS = ("scaled_mm", "dot_scaled")  # torch's (cuBLAS), Triton's


def takes(a: NVFP4Tensor, b: NVFP4Tensor) -> bool:
    """Whether tensor cores multiply these operands: one tensor_scale each, whole 16-byte rows, N a multiple of 16."""
    same_k = a.codes.shape[1] == b.codes.shape[1]
    return same_k and a.codes.shape[1] % 16 == 0 and b.codes.shape[0] % 16 == 0 and a.tensor_scale.dim() == 0


def mm(a: NVFP4Tensor, b: NVFP4Tensor, out_dtype: torch.dtype, name: str) -> torch.Tensor:
    """a (M, K) . b (N, K)^T by the implementation `name` -> (M, N) in out_dtype, BF16 or FP32."""
    from nvfp4_kernels import matmul

    function = {"scaled_mm": matmul.scaled_mm, "dot_scaled": matmul.dot_scaled}[name]
    return function(a.codes, a.scales, a.tensor_scale, b.codes, b.scales, b.tensor_scale, out_dtype)


def takes_fp8(a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor) -> bool:
    """Whether FP8 tensor cores multiply these: one scale each, K and N multiples of 16, not both E5M2."""
    one_scale = a_scale.dim() == b_scale.dim() == 0 and a.shape[1] == b.shape[1]
    e4m3 = torch.float8_e4m3fn in (a.dtype, b.dtype)
    return one_scale and e4m3 and not (a.shape[1] % 16 or b.shape[0] % 16)


def mm_fp8(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a (M, K) . b (N, K)^T in FP8 -> (M, N) in out_dtype.

    Where both are E4M3, as in the forward alone, sums are a little less exact: as nanochat's fp8.py has it.
    """
    fast = a.dtype == b.dtype
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=out_dtype, use_fast_accum=fast)
