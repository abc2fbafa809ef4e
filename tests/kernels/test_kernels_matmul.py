"""The NVFP4 GEMM of kernels/nvfp4_kernels/matmul.py in Triton's interpreter, and the swizzle, against the reference."""

import pytest
import torch
from _assertions import relative_square_error

pytest.importorskip("triton")

from nvfp4_kernels.matmul import dot_scaled, swizzle  # noqa: E402

from nanochat_fp4.nvfp4.format import swizzle_scales  # noqa: E402
from nanochat_fp4.nvfp4.quantizers import quantize  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
no_fp4 = ON_GPU and torch.cuda.get_device_capability() < (10, 0)


@pytest.mark.skipif(no_fp4, reason="needs a GPU with FP4 tensor cores, or the interpreter")
@pytest.mark.parametrize("m, n, k", [(1, 16, 32), (130, 144, 272), (1100, 40, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dot_scaled(m, n, k, dtype):
    """More row blocks than the eight that share columns, tails in every dimension, tensor scales far from one."""
    a, b = quantize(torch.randn(m, k) * 1e20, "rtn"), quantize(torch.randn(n, k) * 1e-22, "four_over_six")
    operands = (t.to(DEVICE) for v in (a, b) for t in (v.codes, v.scales, v.tensor_scale))
    got = dot_scaled(*operands, dtype)
    assert got.shape == (m, n) and got.dtype == dtype
    want = (a.decode(torch.float64) @ b.decode(torch.float64).T) * (a.tensor_scale.double() * b.tensor_scale.double())
    # FP32 sums of exact products; one rounding to BF16 gives 3e-6, and the interpreter's, which truncates, 1.1e-5.
    assert relative_square_error(got.cpu(), want) < (1e-13 if dtype == torch.float32 else 2e-5)


@pytest.mark.parametrize("rows, columns", [(128, 4), (1, 1), (300, 70), (129, 8)])
def test_swizzle(rows, columns):
    scales = torch.randint(0, 127, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = swizzle(scales.to(DEVICE)).cpu()
    assert torch.equal(got.view(torch.uint8), swizzle_scales(scales).view(torch.uint8))
