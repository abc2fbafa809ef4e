"""The second step of post hoc range alignment (kernels/nvfp4_kernels/scales.py) alone, against the reference."""

import pytest
import torch
from _assertions import assert_same_bits

pytest.importorskip("triton")

from nvfp4_kernels.rotate import RotatedOperand  # noqa: E402
from nvfp4_kernels.scales import finish, repair  # noqa: E402

from nanochat_fp4.nvfp4.format import TENSOR_SCALE_MIN  # noqa: E402
from nanochat_fp4.nvfp4.philox import Noise  # noqa: E402
from nanochat_fp4.nvfp4.quantizers import (  # noqa: E402
    divide,
    finish_scales,
    power_of_two_ceil,
    power_of_two_floor,
    stochastic_round_e4m3,
)
from nanochat_fp4.nvfp4.roundings import ROUNDINGS  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value)::triton.runtime.interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EDEN = ROUNDINGS["ms_eden"]
OPERAND = RotatedOperand(EDEN.grid_max, EDEN.scale_cap, EDEN.candidates, False, True, 128, stream=4)
SEED = 99


def pseudo_scales(rows, groups, low=-20.0, high=2.0) -> torch.Tensor:
    """E8M3 values in BF16, (rows, 8 groups); a tenth of them zero."""
    exponent = torch.empty(rows, groups * 8).uniform_(low, high).floor()
    value = (1 + torch.randint(0, 8, exponent.shape) / 8) * 2.0**exponent
    return (value * (torch.rand(exponent.shape) > 0.1)).bfloat16()


def corrections(rows, groups) -> torch.Tensor:
    return 1 + 0.05 * torch.randn(rows, groups)


def tensor_scale_of(amax) -> torch.Tensor:
    scale = divide(torch.tensor(amax), EDEN.grid_max * EDEN.scale_cap).clamp(min=TENSOR_SCALE_MIN)
    return power_of_two_ceil(scale)


def run_finish(pseudo, correction, amax, seed=SEED):
    bits = torch.tensor(amax, dtype=torch.float32).view(torch.int32).to(DEVICE)
    arguments = (pseudo.to(DEVICE), correction.to(DEVICE), bits, torch.tensor(seed, device=DEVICE), OPERAND)
    return [t.cpu() for t in finish(*arguments)]


# A program takes 16 rows and 8 groups.
@pytest.mark.parametrize("rows, groups, amax", [(1, 1, 4.0), (18, 9, 3e-5), (18, 9, 1e30), (7, 3, 1553.0)])
def test_finish_bit_for_bit(rows, groups, amax):
    """Also scales far above 448 (which saturate) and far below 2^-9."""
    pseudo, correction = pseudo_scales(rows, groups, -24, 12), corrections(rows, groups)
    scales, tensor_scale = run_finish(pseudo, correction, amax)
    want_scale = tensor_scale_of(amax)
    repeated = correction.repeat_interleave(8, -1)
    want = finish_scales(pseudo.float(), repeated, EDEN, want_scale, Noise(SEED, OPERAND.stream))
    assert_same_bits("tensor_scale", tensor_scale, want_scale)
    assert_same_bits("scales", scales, want)


def test_a_tensor_scale_is_a_power_of_two_and_never_zero():
    pseudo, correction = torch.zeros(2, 8, dtype=torch.bfloat16), torch.ones(2, 1)
    for amax in (0.0, 1e-38, 1.0, EDEN.grid_max * 256 * 0.5):
        scales, tensor_scale = run_finish(pseudo, correction, amax)
        assert tensor_scale >= TENSOR_SCALE_MIN and power_of_two_floor(tensor_scale) == tensor_scale
        assert not scales.view(torch.uint8).any()


def test_nan_in_the_amax_comes_out():
    """It is what carries a NaN of the tensor (the scales' own saturates)."""
    for amax in (float("nan"), float("inf")):
        _, tensor_scale = run_finish(pseudo_scales(2, 1), corrections(2, 1), amax)
        assert not torch.isfinite(tensor_scale)


# --------------------------------------------------------------------------------------------------------------------


# A program takes 16 rows and 16 groups.
@pytest.mark.parametrize("rows, groups", [(18, 9), (3, 19)])
def test_repair_turns_free_rounding_into_e4m3(rows, groups):
    """decoded = q * (what S * p was rounded to without E4M3's limits) in; q * (its E4M3 rounding, shifted) out."""
    amax = 4.0
    pseudo, correction = pseudo_scales(rows, groups, -20, -1), corrections(rows, groups)
    tensor_scale = tensor_scale_of(amax)
    q = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6]).expand(rows, groups * 8, 16)
    corrected = pseudo.float() * (1 / tensor_scale) * correction.repeat_interleave(8, -1)
    uniform = Noise(SEED, OPERAND.stream).scales(*pseudo.shape, torch.device("cpu"))
    e = power_of_two_floor(corrected).clamp(min=TENSOR_SCALE_MIN)
    n = corrected / e * 8
    free = (n.floor() + (uniform < n - n.floor()).float()) * e / 8
    final = stochastic_round_e4m3(corrected, uniform).float()
    decoded = (q * free[..., None] * tensor_scale).flatten(-2).bfloat16()
    want = (q * final[..., None] * tensor_scale).flatten(-2).bfloat16()
    assert (decoded != want).float().mean() > 0.1  # there is something to repair

    bits = torch.tensor(amax).view(torch.int32).to(DEVICE)
    on_device = [t.to(DEVICE) for t in (decoded, pseudo, correction)]
    repair((*on_device, bits, torch.tensor(SEED, device=DEVICE), OPERAND), None)
    assert_same_bits("decoded", on_device[0].cpu().float() + 0.0, want.float() + 0.0)
    # What is normal is left alone: with a tensor_scale 2^20 times smaller, all of it.
    untouched, bits = decoded.to(DEVICE), torch.tensor(amax * 2.0**-20).view(torch.int32).to(DEVICE)
    repair(None, (untouched, *on_device[1:], bits, torch.tensor(SEED, device=DEVICE), OPERAND))
    assert_same_bits("untouched", untouched.cpu(), decoded)
