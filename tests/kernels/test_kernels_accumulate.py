"""Stochastic rounding to BF16: the kernel against its reference, bit for bit; on a CPU in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from nvfp4_kernels.accumulate import round_into

from nanochat_fp4.models import optim8bit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("shape, dtype", [((3, 5), torch.float32), ((7, 320), torch.bfloat16)])
def test_kernel_is_the_reference(shape, dtype, add):
    torch.manual_seed(0)
    x = (torch.randn(shape) * torch.exp(4 * torch.randn(shape))).to(dtype)
    x[0, :3] = torch.tensor([0.0, float("inf"), float("-inf")])
    seed, before = torch.tensor(-(2**40) - 7), torch.randn(shape).bfloat16()
    for stream, first_row in ((0, 0), (70000, 3)):
        want, got = before.clone(), before.to(DEVICE)
        where = torch.tensor(stream)
        optim8bit.round_into(want, x, seed, where, first_row, add)
        round_into(got, x.to(DEVICE), seed.to(DEVICE), where.to(DEVICE), first_row, add)
        assert torch.equal(got.cpu(), want)
