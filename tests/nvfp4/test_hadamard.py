"""The randomized Hadamard transform: the matrix, its signs, and what surrounds a call."""

import pytest
import torch
from _assertions import relative_square_error
from torch._subclasses.fake_tensor import FakeTensorMode

from nanochat_fp4.nvfp4.hadamard import rotate, rotation_matrix
from nanochat_fp4.nvfp4.philox import random_signs

CPU = torch.device("cpu")


def explicit(x: torch.Tensor, seed: int, dim: int = 128, stream: int = 0) -> torch.Tensor:
    """H diag(signs) x / sqrt(dim) in FP64, with H[i, j] = (-1)^popcount(i & j) written out."""
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)], dtype=torch.float64)
    groups = x.double().unflatten(-1, (-1, dim)) * random_signs(seed, dim, stream, CPU).double()
    return (groups @ h.T / dim**0.5).flatten(-2)


@pytest.mark.parametrize("dim", [16, 32, 64, 128])
def test_is_the_formula(dim):
    x = torch.randn(5, 2 * dim)
    # FP32 sums of up to 128 terms: relative error about 1e-7, squared 1e-14.
    assert relative_square_error(rotate(x, 11, dim=dim, stream=4), explicit(x, 11, dim, 4)) < 1e-13


def test_seed_and_stream_choose_the_signs():
    x = torch.randn(2, 128)
    assert torch.equal(rotate(x, 1), rotate(x, torch.tensor([1])))
    assert not torch.equal(rotate(x, 1), rotate(x, 2))
    assert not torch.equal(rotate(x, 1), rotate(x, 1, stream=1))
    assert not torch.equal(rotate(x, 1), rotate(x, 1 + 2**32))


def test_autocast_does_not_make_it_a_bf16_product():
    x = torch.randn(4, 256)
    want = rotate(x, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = rotate(x, 1)
    assert got.dtype == torch.float32 and torch.equal(got, want)


def test_computes_in_fp32_whatever_comes_in():
    x = torch.randn(4, 128).bfloat16()
    assert rotate(x, 1).dtype == torch.float32
    assert torch.equal(rotate(x, 1), rotate(x.float(), 1))


def test_what_surrounds_a_call_does_not_stick():
    """A default device, a default dtype, or the fake tensors of an estimate of memory."""
    want = rotation_matrix(0, dim=32)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            assert torch.equal(rotation_matrix(0, dim=32), want)
    finally:
        torch.set_default_dtype(before)
    with FakeTensorMode():
        assert rotate(torch.ones(2, 128), 0).shape == (2, 128)
    assert torch.equal(rotation_matrix(0, dim=32), want) and rotate(torch.ones(2, 128), 0).isfinite().all()
