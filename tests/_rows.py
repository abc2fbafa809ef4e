"""Rows beside nf.METHODS that tests need: operands that no row of the table has, alone or together.

conftest.py imports this file. A command that a test starts reads it with --recipes.
"""

from dataclasses import replace

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.methods import METHODS
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both

NVIDIA, CLOVER, REFINED = (nf.get_recipe(name) for name in ("nvidia", "clover", "clover_refined"))
as_used, rtn, sr, raw_rtn = Operand(), Operand("rtn"), Operand("sr"), Operand("rtn", raw=True)
four_over_six, mxfp8, mxfp4_sr = Operand("four_over_six"), Operand("mxfp8"), Operand("mxfp4_sr")
eden, search, rotated_sr = both("ms_eden", 128), both("ms_eden_search", 128), both("sr", 128)

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
            "mxfp4_nvidia",
            output=Gemm(Operand("mxfp4"), Operand("mxfp4_32x32")),
            grad_input=Gemm(mxfp4_sr, as_used),
            grad_weight=Gemm(mxfp4_sr, Operand("mxfp4", raw=True), 16),
        ),
        Recipe("tseng", grad_input=both("mxfp4_sr_prescaled", 64), grad_weight=both("mxfp4_sr_prescaled", 64)),
        Recipe(
            "chmiel",
            output=both("rtn"),
            grad_input=Gemm(sr, raw_rtn),
            grad_weight=Gemm(sr, Operand("sr", raw=True)),
        ),
        Recipe(
            "fp8_blocks",
            output=Gemm(Operand("e4m3_1x128"), Operand("e4m3_128x128")),
            grad_input=Gemm(Operand("e4m3_1x128"), as_used),
            grad_weight=Gemm(Operand("e4m3_1x128"), Operand("e4m3_1x128", raw=True)),
        ),
        Recipe(
            "mxfp8",
            output=both("mxfp8"),
            grad_input=Gemm(mxfp8, Operand("mxfp8", raw=True)),
            grad_weight=Gemm(mxfp8, Operand("mxfp8", raw=True)),
        ),
        Recipe("clover_input", output=Gemm(four_over_six, Operand())),
        Recipe("clover_weight", output=Gemm(Operand(), four_over_six)),
        replace(CLOVER, name="clover_search", output=both("scale_search"), grad_input=search, grad_weight=search),
        replace(CLOVER, name="clover_late", late=(0.7, REFINED)),
        replace(CLOVER, name="clover_fp8_input", output=Gemm(mxfp8, four_over_six)),
        replace(CLOVER, name="clover_fp8_forward_8bit", output=both("e4m3")),
    )
}
for _row in ROWS.values():
    nf.register(_row)
METHOD_TABLE = METHODS | ROWS
