"""Rows beside nf.METHODS that tests need: operands that no row of the table has, alone or together.

conftest.py imports this file. A command that a test starts reads it with --recipes.
"""

from dataclasses import replace

import torch

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.methods import METHODS
from nanochat_fp4.nvfp4.philox import Noise
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both


def eight_bit_integers(x: torch.Tensor, rounding: nf.Rounding, noise: Noise) -> nf.NVFP4Tensor:
    """A format of its own: from -grid_max to grid_max, with an FP32 scale for each block."""
    blocks = x.unflatten(-1, (-1, rounding.block))
    scale = (2 * blocks.abs().amax(-1) / rounding.grid_max).clamp(min=1e-30)  # The tensor's scale is 1/2.
    shift = noise.elements(0, *x.shape, 0, x.device).view(blocks.shape) - 0.5 if rounding.stochastic else 0.0
    codes = torch.round(2 * blocks / scale.unsqueeze(-1) + shift).clamp(-rounding.grid_max, rounding.grid_max)
    return nf.NVFP4Tensor(codes.flatten(-2).to(torch.int8), scale, torch.full((), 0.5, device=x.device))


nf.ROUNDINGS["integers"] = nf.Rounding(grid_max=127.0, quantize=eight_bit_integers, block=32, element="int8")
nf.ROUNDINGS["integers_sr"] = replace(nf.ROUNDINGS["integers"], stochastic=True)

NVIDIA, CLOVER = nf.get_recipe("nvidia"), nf.get_recipe("clover")
as_used, rtn, sr, raw_rtn = Operand(), Operand("rtn"), Operand("sr"), Operand("rtn", raw=True)
four_over_six, integers = Operand("four_over_six"), Operand("integers")
eight_bits_kept_in_4 = Operand("e4m3", kept="four_over_six")
eden, search, rotated_sr = both("ms_eden", 128), both("ms_eden_search", 128), both("sr", 128)
CLOVER_SEARCH = replace(
    CLOVER, name="clover_search", output=both("scale_search"), grad_input=search, grad_weight=search
)

ROWS = {
    row.name: row
    for row in (
        Recipe("fig1a_sr", grad_weight=rotated_sr),
        Recipe("fig1b_sr", grad_input=Gemm(sr, as_used)),
        Recipe("fig1e_sr", grad_input=rotated_sr, grad_weight=rotated_sr),
        Recipe("fig1e_ms_eden", grad_input=eden, grad_weight=eden),
        Recipe("fig2_1x16_rtn", output=both("rtn")),
        Recipe("fig2_1x16_four_over_six", output=both("four_over_six")),
        Recipe(
            "four_over_six_biased",
            output=Gemm(four_over_six, Operand("four_over_six_16x16")),
            grad_input=Gemm(Operand("sr_four_over_six"), as_used),
            grad_weight=Gemm(Operand("sr_four_over_six"), Operand("four_over_six", raw=True), 16),
        ),
        replace(NVIDIA, name="nvidia_fixed_signs", grad_weight=replace(NVIDIA.grad_weight, fixed_signs=True)),
        replace(NVIDIA, name="nvidia_1d", output=both("rtn"), grad_input=Gemm(sr, raw_rtn)),
        replace(NVIDIA, name="nvidia_no_sr", grad_input=Gemm(rtn, as_used), grad_weight=Gemm(rtn, raw_rtn, 16)),
        Recipe(
            "integers",
            output=both("integers"),
            grad_input=Gemm(integers, as_used),
            grad_weight=Gemm(integers, Operand("integers", raw=True)),
        ),
        Recipe("rotated_integers", grad_input=both("integers_sr", 64), grad_weight=both("integers_sr", 64)),
        Recipe(
            "chmiel",
            output=both("rtn"),
            grad_input=Gemm(sr, raw_rtn),
            grad_weight=Gemm(sr, Operand("sr", raw=True)),
        ),
        Recipe("clover_input", output=Gemm(four_over_six, Operand())),
        Recipe("clover_weight", output=Gemm(Operand(), four_over_six)),
        CLOVER_SEARCH,
        replace(CLOVER, name="clover_late", late=(0.7, CLOVER_SEARCH)),
        replace(CLOVER, name="clover_later", late=(0.97, CLOVER_SEARCH)),
        replace(CLOVER, name="clover_integer_input", output=Gemm(integers, four_over_six)),
        replace(CLOVER, name="clover_fp8_forward_4bit", output=Gemm(eight_bits_kept_in_4, eight_bits_kept_in_4)),
    )
}
for _row in ROWS.values():
    nf.register(_row)
METHOD_TABLE = METHODS | ROWS
