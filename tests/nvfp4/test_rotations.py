"""Two rotations in a row (Gemm.rotations): MS-EDEN's mean is the operand itself, for sparse operands as well."""

import pytest
import torch

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.hadamard import RHT_DIM, rotated_sums, rotation_matrix
from nanochat_fp4.nvfp4.quantizers import quantize_reference
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

DRAWS, LIMIT = 10_000, 0.001


def one_outlier() -> torch.Tensor:
    return torch.cat((torch.ones(16, 1), 0.002 * torch.randn(16, RHT_DIM - 1)), dim=1)


def two_values() -> torch.Tensor:
    x = torch.zeros(16, RHT_DIM)
    x[:, 0], x[:, 1] = 1, 0.1
    return x


def mostly_zeros() -> torch.Tensor:
    return torch.randn(16, RHT_DIM) * (torch.rand(16, RHT_DIM) < 0.1)


def bias_over_error(x: torch.Tensor, rotations: int, draws: int) -> float:
    """|mean of the estimates of x - x|^2 over the squared error of one draw, without the noise of the mean.

    The draws are halved: the product of the two halves' mean errors has no noise in its mean.
    """
    sums, square = [torch.zeros(x.shape, dtype=torch.float64) for _ in range(2)], 0.0
    for seed in range(draws):
        rotation = rotated_sums(torch.eye(RHT_DIM), seed, rotations=rotations) * RHT_DIM ** (-0.5 * rotations)
        q = quantize_reference(x, ROUNDINGS["ms_eden"], seed=seed, rht_dim=RHT_DIM, rotations=rotations).dequantize()
        error = (q @ rotation.T).double() - x
        sums[seed % 2] += error
        square += float(error.square().sum()) / draws
    halves = [s / (draws // 2) for s in sums]
    return float((halves[0] * halves[1]).sum()) / square


@pytest.mark.parametrize(
    "operand", [one_outlier, *(pytest.param(o, marks=pytest.mark.slow) for o in (two_values, mostly_zeros))]
)
def test_two_rotations_have_no_bias_where_one_has(operand):
    """On 16 vectors. One rotation takes a large value to numbers of one magnitude, whose rounding is no noise."""
    torch.manual_seed(0)
    x = operand()
    assert bias_over_error(x, 1, 200) > 5 * LIMIT
    assert bias_over_error(x, 2, 600) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("operand", [one_outlier, two_values, mostly_zeros])
def test_two_rotations_have_no_bias_in_many_draws(operand):
    torch.manual_seed(0)
    assert abs(bias_over_error(operand(), 2, DRAWS)) < LIMIT


def test_a_second_rotation_is_a_rotation_of_the_first_ones_sums_with_other_signs():
    x = torch.randint(-8, 9, (3, 2 * RHT_DIM)).float()  # sums are exact, in BF16 as well where they are below 256
    first = rotated_sums(x / 8, 7)
    first = first.bfloat16().float()
    again = first.unflatten(-1, (2, RHT_DIM)) @ rotation_matrix(7, vector=1)
    assert torch.equal(rotated_sums(x / 8, 7, rotations=2), again.flatten(-2))
    assert not torch.equal(rotation_matrix(7, vector=1), rotation_matrix(7))


def test_products_of_operands_that_are_rotated_twice_stay_what_they_were():
    a, b = torch.randn(3, 256), torch.randn(5, 256)
    rotated = [rotated_sums(t, 1, rotations=2) / RHT_DIM for t in (a, b)]
    assert torch.allclose(rotated[0] @ rotated[1].T, a @ b.T, atol=0.15)  # what is between them is in BF16
    assert torch.allclose(nf.rotate(a, 1) @ nf.rotate(b, 1).T, a @ b.T, atol=1e-4)
