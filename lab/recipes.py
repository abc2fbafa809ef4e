"""Methods of the laboratory that are not in nf.METHODS: those of the paper's figures, other systems, and parts of
methods that were compared.

A program that is given this file can train, evaluate and export them by their names:

    python -m scripts.base_train --recipes=lab/recipes.py --method=clover_search

Importing or running this module registers all of them in the process. dev/LOG.md has the measurements of each.

The roundings of other systems are functions of this file, and rows of nf.ROUNDINGS.

* MXFP4 and MXFP8 of the Open Compute Project have a power of two as the scale of 32 values. MXFP4 has E2M1 elements,
  and MXFP8 has E4M3 elements. tensor_scale is a constant.
* FP8 in blocks has E4M3 elements, and an FP32 scale for each block of 128 values. In a weight, 128 rows share it as
  well (DeepSeek-V3, Section 3.3.2).
* FP8 in rows has E4M3 elements, and an FP32 scale for each row.
"""

from dataclasses import replace

import torch

import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.format import TENSOR_SCALE_MIN, encode_e2m1, pack
from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.philox import Noise
from nanochat_fp4.nvfp4.quantizers import (
    block_amax,
    divide,
    power_of_two_ceil,
    power_of_two_floor,
    round_e2m1,
    stochastic_round_e2m1,
    to_fp8,
)
from nanochat_fp4.nvfp4.recipes import both
from nanochat_fp4.nvfp4.roundings import E4M3_MAX

# ----------------------------------------------------------------------------------------------------------------------
# The formats of other systems


def in_blocks(
    x: torch.Tensor, rounding: nf.Rounding, noise: Noise, round_scale, dtype=torch.float32, prescale: float = 1.0
) -> nf.NVFP4Tensor:
    """Rounds x * prescale, float32 (R, K), in blocks. round_scale maps wanted scales to scales of this dtype."""
    blocks = x.unflatten(-1, (-1, rounding.block))
    amax = block_amax(blocks, rounding.block_rows) * prescale
    scale = round_scale(divide(amax, rounding.grid_max)).clamp(min=TENSOR_SCALE_MIN)
    y = blocks * (1.0 / scale * prescale).unsqueeze(-1)
    if rounding.element != "e2m1":
        codes = to_fp8(y, rounding.element)
        q = codes.float()
    else:
        draws = noise.elements(0, *x.shape, 0, x.device).view(y.shape) if rounding.stochastic else None
        q = round_e2m1(y) if draws is None else stochastic_round_e2m1(y, draws)
        codes = pack(encode_e2m1(q.flatten(-2)))
    tensor_scale = torch.full((), 1 / prescale, device=x.device)
    # Values are not decoded from the E8M0 tensor, because compilers hardly support this dtype.
    return nf.NVFP4Tensor(codes, scale.to(dtype), tensor_scale, (q * scale.unsqueeze(-1)).flatten(-2))


def mx_up(x: torch.Tensor, rounding: nf.Rounding, noise: Noise) -> nf.NVFP4Tensor:
    """Rounds scales up (NVIDIA). Nothing is clipped, but the largest value of a block can be as small as 3."""
    return in_blocks(x, rounding, noise, power_of_two_ceil, torch.float8_e8m0fnu)


def mx_down(x: torch.Tensor, rounding: nf.Rounding, noise: Noise) -> nf.NVFP4Tensor:
    """Rounds scales down, as OCP specifies. The largest value of a block can be almost 8 and is clipped to 6."""
    return in_blocks(x, rounding, noise, power_of_two_floor, torch.float8_e8m0fnu)


def mx_prescaled(x: torch.Tensor, rounding: nf.Rounding, noise: Noise) -> nf.NVFP4Tensor:
    """Rounds scales down and multiplies values by 3/4 before rounding (Tseng et al.), so that nothing is clipped."""
    return in_blocks(x, rounding, noise, power_of_two_floor, torch.float8_e8m0fnu, 3 / 4)


def fp8_in_blocks(x: torch.Tensor, rounding: nf.Rounding, noise: Noise) -> nf.NVFP4Tensor:
    return in_blocks(x, rounding, noise, lambda scale: scale)


def fp8_in_rows(x: torch.Tensor, rounding: nf.Rounding, noise: Noise) -> nf.NVFP4Tensor:
    """Rounds each row with an FP32 scale of its own."""
    scale = divide(x.abs().amax(-1, keepdim=True), rounding.grid_max).clamp(min=TENSOR_SCALE_MIN)
    codes = to_fp8(x * (1.0 / scale), rounding.element)
    return nf.NVFP4Tensor(codes, scale, torch.ones((), device=x.device), codes.float() * scale)


nf.ROUNDINGS |= {
    "mxfp4_ocp": nf.Rounding(grid_max=4.0, quantize=mx_down, block=32),  # 4: the largest power of two of E2M1
    "mxfp4": nf.Rounding(quantize=mx_up, block=32),
    "mxfp4_32x32": nf.Rounding(quantize=mx_up, block=32, block_rows=32),
    "mxfp4_sr": nf.Rounding(quantize=mx_up, block=32, stochastic=True),
    "mxfp4_sr_prescaled": nf.Rounding(grid_max=3.0, quantize=mx_prescaled, block=32, stochastic=True),
    "mxfp8": nf.Rounding(grid_max=E4M3_MAX, quantize=mx_up, block=32, element="e4m3"),
    "e4m3_1x128": nf.Rounding(grid_max=E4M3_MAX, quantize=fp8_in_blocks, block=128, element="e4m3"),
    "e4m3_128x128": nf.Rounding(grid_max=E4M3_MAX, quantize=fp8_in_blocks, block=128, block_rows=128, element="e4m3"),
    "e4m3_rows": nf.Rounding(grid_max=E4M3_MAX, quantize=fp8_in_rows, element="e4m3"),
}

# ----------------------------------------------------------------------------------------------------------------------
# The methods

NVIDIA, CLOVER = nf.get_recipe("nvidia"), nf.get_recipe("clover")

as_used = nf.Operand()  # In the backward pass this is the forward GEMM's operand, which is not rounded again.
rtn, sr, raw_rtn = nf.Operand("rtn"), nf.Operand("sr"), nf.Operand("rtn", raw=True)
square_rtn, square_four_over_six = nf.Operand("rtn_16x16"), nf.Operand("four_over_six_16x16")
four_over_six = nf.Operand("four_over_six")
eight_bits_kept_in_4, of_fp8 = nf.Operand("e4m3", kept="four_over_six"), nf.Gemm(nf.Operand("e5m2"), as_used)
search = nf.Operand("scale_search")
mxfp8, raw_mxfp8 = nf.Operand("mxfp8"), nf.Operand("mxfp8", raw=True)
eden, eden_search, rotated_sr = both("ms_eden", RHT_DIM), both("ms_eden_search", RHT_DIM), both("sr", RHT_DIM)
fixed_signs = replace(NVIDIA.grad_weight, fixed_signs=True)  # The rotation has one sign vector for the whole run.


def _nvidia(name: str, summary: str, **changes: nf.Gemm) -> nf.Recipe:
    return replace(NVIDIA, name=f"nvidia_{name}", summary=f"nvidia {summary}", **changes)


def _clover(name: str, summary: str, **changes) -> nf.Recipe:
    return replace(CLOVER, name=f"clover_{name}", summary=f"clover {summary}", **changes)


# The paper's Figure 1 quantizes only some operands of the backward pass. In (b) and (d) dgrad's weight is left alone,
# so nothing is rotated there. MS-EDEN needs both operands rotated, and therefore has no such rows.
FIGURE_1 = (
    nf.Recipe("fig1a_sr", grad_weight=rotated_sr, summary="Figure 1 (a): wgrad only"),
    nf.Recipe("fig1c_sr", grad_input=rotated_sr, summary="Figure 1 (c): dgrad only, weight requantized"),
    nf.Recipe("fig1e_sr", grad_input=rotated_sr, grad_weight=rotated_sr, summary="Figure 1 (e): both backward GEMMs"),
    nf.Recipe("fig1a_ms_eden", grad_weight=eden, summary="Figure 1 (a): wgrad only"),
    nf.Recipe("fig1c_ms_eden", grad_input=eden, summary="Figure 1 (c): dgrad only, weight requantized"),
    nf.Recipe("fig1e_ms_eden", grad_input=eden, grad_weight=eden, summary="Figure 1 (e): both backward GEMMs"),
    nf.Recipe("fig1b_sr", grad_input=nf.Gemm(sr, as_used), summary="Figure 1 (b): dgrad only, weight left alone"),
    nf.Recipe("fig1d_sr", grad_input=nf.Gemm(sr, as_used), grad_weight=rotated_sr, summary="Figure 1 (d): (a) and (b)"),
)

# Figure 2 quantizes only the forward GEMM.
FIGURE_2 = (
    nf.Recipe("fig2_1x16_rtn", output=both("rtn"), summary="Figure 2: forward, native blocks"),
    nf.Recipe("fig2_16x16_rtn", output=nf.Gemm(rtn, square_rtn), summary="Figure 2: square weight blocks"),
    nf.Recipe("fig2_1x16_four_over_six", output=both("four_over_six"), summary="Figure 2: forward, native blocks"),
    nf.Recipe(
        "fig2_16x16_four_over_six",
        output=nf.Gemm(four_over_six, square_four_over_six),
        summary="Figure 2: square weight blocks",
    ),
)

# Other systems, and NVIDIA's recipe with one part of it changed at a time.
OTHER_SYSTEMS = (
    nf.Recipe(
        "four_over_six_biased",
        output=nf.Gemm(four_over_six, square_four_over_six),
        grad_input=nf.Gemm(nf.Operand("sr_four_over_six"), as_used),
        grad_weight=nf.Gemm(
            nf.Operand("sr_four_over_six"), nf.Operand("four_over_six", raw=True), NVIDIA.grad_weight.rht_dim
        ),
        summary="Cook et al. (2025): nvidia with Four-over-Six in both passes: biased gradients (Figure 9)",
    ),
    nf.Recipe(
        "tetrajet_v2_rht128",
        output=both("rtn"),
        grad_input=rotated_sr,
        grad_weight=rotated_sr,
        summary="tetrajet_v2 rotated in groups of 128, as clover is",
    ),
    # NVIDIA's staff try this recipe in torchao (rdspring1/ao, nvfp4_training/nvfp4_recipe.py, 2026). Its weights have
    # 1x16 blocks, and dgrad rounds them again from the forward's codes. Everything else is as in `nvidia`.
    _nvidia(
        "v1_requant",
        "with 1x16 weight blocks, rounded again in dgrad from the forward's codes, and fixed signs",
        output=both("rtn"),
        grad_input=nf.Gemm(sr, rtn),
        grad_weight=fixed_signs,
    ),
    _nvidia("fixed_signs", "with one sign vector for the whole run, as published", grad_weight=fixed_signs),
    _nvidia(
        "1d",
        "without square weight blocks: 1x16, rounded again along the other dimension for dgrad",
        output=both("rtn"),
        grad_input=nf.Gemm(sr, raw_rtn),
    ),
    _nvidia("no_rht", "without the rotation in wgrad", grad_weight=nf.Gemm(sr, raw_rtn)),
    _nvidia(
        "no_sr",
        "with gradients rounded to nearest",
        grad_input=nf.Gemm(rtn, as_used),
        grad_weight=nf.Gemm(rtn, raw_rtn, NVIDIA.grad_weight.rht_dim),
    ),
    nf.Recipe(
        "mxfp4_nvidia",
        output=nf.Gemm(nf.Operand("mxfp4"), nf.Operand("mxfp4_32x32")),
        grad_input=nf.Gemm(nf.Operand("mxfp4_sr"), as_used),
        grad_weight=nf.Gemm(nf.Operand("mxfp4_sr"), nf.Operand("mxfp4", raw=True), NVIDIA.grad_weight.rht_dim),
        summary="nvidia in MXFP4: 32 values a scale, a power of two rounded up, 32x32 weight blocks",
    ),
    nf.Recipe(
        "tseng",
        grad_input=both("mxfp4_sr_prescaled", 64),
        grad_weight=both("mxfp4_sr_prescaled", 64),
        summary="Tseng et al. (2025): BF16 forward; MXFP4 backward with SR and RHT-64",
    ),
    nf.Recipe(
        "chmiel",
        output=both("rtn"),
        grad_input=nf.Gemm(sr, raw_rtn),
        grad_weight=nf.Gemm(sr, nf.Operand("sr", raw=True)),
        summary="Chmiel et al. (2025): NVFP4, RTN forward; SR of gradients, and of the input in wgrad; no rotation",
    ),
    nf.Recipe(
        "fp8_blocks",
        output=nf.Gemm(nf.Operand("e4m3_1x128"), nf.Operand("e4m3_128x128")),
        grad_input=nf.Gemm(nf.Operand("e4m3_1x128"), as_used),
        grad_weight=nf.Gemm(nf.Operand("e4m3_1x128"), nf.Operand("e4m3_1x128", raw=True)),
        summary="NVIDIA's FP8 baseline (2025), as DeepSeek-V3's: E4M3, 128x128 weight blocks, 1x128 for the others",
    ),
    nf.Recipe(
        "fp8_e4m3_rows",
        output=both("e4m3"),
        grad_input=nf.Gemm(nf.Operand("e4m3_rows"), as_used),
        grad_weight=nf.Gemm(nf.Operand("e4m3_rows"), as_used),
        summary="fp8 with gradients in E4M3 and a scale a row, in the place of E5M2 and one scale",
    ),
    nf.Recipe(
        "mxfp8",
        output=both("mxfp8"),
        grad_input=nf.Gemm(mxfp8, raw_mxfp8),
        grad_weight=nf.Gemm(mxfp8, raw_mxfp8),
        summary="MXFP8, E4M3 for all operands, each from the unquantized tensor",
    ),
)

# Parts of clover, which show the causes of its gap, and remedies.
OF_CLOVER = (
    nf.Recipe(
        "clover_input",
        output=nf.Gemm(four_over_six, nf.Operand()),
        summary="clover's input in the forward, nothing else",
    ),
    nf.Recipe(
        "clover_weight",
        output=nf.Gemm(nf.Operand(), four_over_six),
        summary="clover's weight in the forward, nothing else",
    ),
    _clover(
        "search",
        "with a search over block scales in both passes",
        output=both("scale_search"),
        grad_input=eden_search,
        grad_weight=eden_search,
    ),
    _clover("search_forward", "with scale search in the forward alone", output=both("scale_search")),
    _clover(
        "search_backward",
        "with scale search in the backward alone",
        grad_input=eden_search,
        grad_weight=eden_search,
    ),
    _clover(
        "weight_search",
        "with scale search for the forward's weight, which a step pays once",
        output=nf.Gemm(four_over_six, search),
    ),
    _clover(
        "fp8_input",
        "with the forward's input in FP8: 1/3 of the work in 8 bits",
        output=nf.Gemm(mxfp8, four_over_six),
    ),
    _clover(
        "fp8_weight",
        "with the forward's weight in FP8: 1/3 of the work in 8 bits",
        output=nf.Gemm(four_over_six, mxfp8),
    ),
    _clover(
        "fp8_forward_4bit",
        "with its forward in FP8, of which the backward pass keeps 4-bit codes: 4.5 bits an element for 8",
        output=nf.Gemm(eight_bits_kept_in_4, eight_bits_kept_in_4),
    ),
    _clover(
        "fp8_forward_4bit_input",
        "with its forward in FP8; the backward pass keeps 4-bit codes of the input, and the weight's 8-bit codes",
        output=nf.Gemm(eight_bits_kept_in_4, nf.Operand("e4m3")),
    ),
    # FP8 in one of the two backward GEMMs, whose other operand is the forward's 8-bit codes.
    _clover(
        "fp8_forward_dgrad",
        "with its forward and dgrad in FP8; wgrad is from 4-bit codes of the input",
        output=nf.Gemm(eight_bits_kept_in_4, nf.Operand("e4m3")),
        grad_input=of_fp8,
    ),
    _clover(
        "fp8_forward_wgrad",
        "with its forward and wgrad in FP8; dgrad is from 4-bit codes of the weight",
        output=nf.Gemm(nf.Operand("e4m3"), eight_bits_kept_in_4),
        grad_weight=of_fp8,
    ),
)

RECIPES = {recipe.name: recipe for recipe in (*FIGURE_1, *FIGURE_2, *OTHER_SYSTEMS, *OF_CLOVER)}
for _recipe in RECIPES.values():
    nf.register(_recipe)
