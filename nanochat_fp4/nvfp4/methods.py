"""The table of methods: METHODS, what a user should choose from, and ABLATIONS, what else can be trained.

A method is a row of one of these tables, nothing else. QAT_METHOD takes the names of both, and the aliases.
"""

import difflib
from dataclasses import replace

from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both

NVIDIA_RHT_DIM = 16  # NVIDIA et al. (2025): rotate in blocks of 16, which fuse into any quantization kernel
TETRAJET_RHT_DIM = 32  # of the paper's runs: its class has 32, and its sweep passes no other (Quartet-II repository)

# Operands and GEMMs that several rows have.
as_used = Operand()  # in the backward pass: as the forward GEMM used it, not rounded again
rtn, sr, raw_rtn = Operand("rtn"), Operand("sr"), Operand("rtn", raw=True)
square_rtn, square_four_over_six = Operand("rtn_16x16"), Operand("four_over_six_16x16")
four_over_six, two_terms = Operand("four_over_six"), Operand("four_over_six", terms=2)
search, feedback = Operand("scale_search"), Operand("scale_search_6", feedback=True)
mxfp8, raw_mxfp8 = Operand("mxfp8"), Operand("mxfp8", raw=True)
eden, eden_search = both("ms_eden", RHT_DIM), both("ms_eden_search", RHT_DIM)
nvidia_wgrad = Gemm(sr, raw_rtn, NVIDIA_RHT_DIM)
fixed_signs = replace(nvidia_wgrad, fixed_signs=True)  # one sign vector for the run

# Recipes that other rows are made of, and two with which a run ends.
NVIDIA = Recipe(
    "nvidia",
    output=Gemm(rtn, square_rtn),
    grad_input=Gemm(sr, as_used),
    grad_weight=nvidia_wgrad,
    summary="NVIDIA et al. (2025): square weight blocks, reused in dgrad; SR on gradients, RHT-16 in wgrad",
)
NVIDIA_FULL_END = Recipe(  # in 4 bits the backward pass alone, which then makes square blocks of the raw weight
    "nvidia_full_end",
    grad_input=Gemm(sr, Operand("rtn_16x16", raw=True)),
    grad_weight=fixed_signs,
    kept_blocks=0.15,
    summary="how nvidia_full ends: only the backward is quantized",
)
CLOVER = Recipe(
    "clover",
    output=both("four_over_six"),
    grad_input=eden,
    grad_weight=eden,
    summary="the paper (Quartet II): 4/6 forward, unbiased MS-EDEN backward from the forward's codes",
)
CLOVER_REFINED = replace(
    CLOVER,
    name="clover_refined",
    output=Gemm(two_terms, two_terms),
    summary="clover with two terms of 4 bits for both operands of its forward: three 4-bit GEMMs in the place of one",
)


def _table(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


def _nvidia(name: str, summary: str, **changes: Gemm) -> Recipe:
    return replace(NVIDIA, name=f"nvidia_{name}", summary=f"nvidia {summary}", **changes)


def _clover(name: str, summary: str, **changes) -> Recipe:
    return replace(CLOVER, name=f"clover_{name}", summary=f"clover {summary}", **changes)


METHODS: dict[str, Recipe] = _table(
    Recipe("bf16", summary="no quantization: the baseline"),
    Recipe(
        "fp8",
        output=both("e4m3"),
        grad_input=Gemm(Operand("e5m2"), as_used),
        grad_weight=Gemm(Operand("e5m2"), as_used),
        summary="the FP8 baseline, nanochat's --fp8: a scale per tensor; E4M3 for input and weight, E5M2 gradients",
    ),
    NVIDIA,
    Recipe(
        "four_over_six",
        output=Gemm(four_over_six, square_four_over_six),
        grad_input=Gemm(sr, as_used),
        grad_weight=nvidia_wgrad,
        summary="nvidia with Four-over-Six in the forward, as the paper's runs had it",
    ),
    Recipe(
        "tetrajet_v2",
        output=both("rtn"),
        grad_input=both("sr", TETRAJET_RHT_DIM),
        grad_weight=both("sr", TETRAJET_RHT_DIM),
        summary="Chen et al. (2025), the base the paper compares with: 1x16 blocks, SR and RHT-32 in the backward",
    ),
    CLOVER,
    Recipe(
        "clover_search",
        output=both("scale_search"),
        grad_input=eden_search,
        grad_weight=eden_search,
        summary="ours: Clover with a search over block scales in both passes, still unbiased",
    ),
    # NVIDIA's own recipe has more than the paper's comparison. Of 62 blocks the last 8 and the first 2 stay in BF16,
    # 16%. The last ones are the sensitive ones; here all are at the end.
    replace(
        NVIDIA,
        name="nvidia_full",
        grad_weight=fixed_signs,
        kept_blocks=0.15,
        late=(0.82, NVIDIA_FULL_END),
        summary="NVIDIA's recipe in full: the last 15% of the blocks in BF16, fixed signs, and the forward in BF16 for "
        "the last 18% of the steps",
    ),
    _clover(
        "feedback",
        "with a search over block scales and error feedback for the forward's weight, which a step pays once",
        output=Gemm(four_over_six, feedback),
    ),
    _clover(
        "feedback_late",
        "with error feedback for the forward's weight, and two terms for both operands in the last 3% of the steps: "
        "2% more GEMM work, and a forward of three products at inference, or BF16 (docs/results.md)",
        output=Gemm(four_over_six, feedback),
        late=(0.97, CLOVER_REFINED),
    ),
    _clover(
        "late",
        "with two terms for both operands of its forward in the last 30% of the steps: all in 4 bits, 20% more "
        "GEMM work, half of its gap to BF16 (docs/results.md)",
        late=(0.7, CLOVER_REFINED),
    ),
)

ABLATIONS: dict[str, Recipe] = _table(
    # The paper's Figure 1: selected backward operands only. (b) and (d) leave the weight alone, so nothing is rotated
    # there. MS-EDEN needs both operands rotated, and has no such rows.
    Recipe("fig1a_sr", grad_weight=both("sr", RHT_DIM), summary="Figure 1 (a): wgrad only"),
    Recipe("fig1c_sr", grad_input=both("sr", RHT_DIM), summary="Figure 1 (c): dgrad only, weight requantized"),
    Recipe(
        "fig1e_sr",
        grad_input=both("sr", RHT_DIM),
        grad_weight=both("sr", RHT_DIM),
        summary="Figure 1 (e): both backward GEMMs",
    ),
    Recipe("fig1a_ms_eden", grad_weight=eden, summary="Figure 1 (a): wgrad only"),
    Recipe("fig1c_ms_eden", grad_input=eden, summary="Figure 1 (c): dgrad only, weight requantized"),
    Recipe("fig1e_ms_eden", grad_input=eden, grad_weight=eden, summary="Figure 1 (e): both backward GEMMs"),
    Recipe("fig1b_sr", grad_input=Gemm(sr, as_used), summary="Figure 1 (b): dgrad only, weight left alone"),
    Recipe(
        "fig1d_sr",
        grad_input=Gemm(sr, as_used),
        grad_weight=both("sr", RHT_DIM),
        summary="Figure 1 (d): (a) and (b)",
    ),
    # Figure 2: the forward GEMM only.
    Recipe("fig2_1x16_rtn", output=both("rtn"), summary="Figure 2: forward, native blocks"),
    Recipe("fig2_16x16_rtn", output=Gemm(rtn, square_rtn), summary="Figure 2: square weight blocks"),
    Recipe("fig2_1x16_four_over_six", output=both("four_over_six"), summary="Figure 2: forward, native blocks"),
    Recipe(
        "fig2_16x16_four_over_six",
        output=Gemm(four_over_six, square_four_over_six),
        summary="Figure 2: square weight blocks",
    ),
    # Other systems, and NVIDIA's recipe with one ingredient changed at a time.
    Recipe(
        "four_over_six_biased",
        output=Gemm(four_over_six, square_four_over_six),
        grad_input=Gemm(Operand("sr_four_over_six"), as_used),
        grad_weight=Gemm(Operand("sr_four_over_six"), Operand("four_over_six", raw=True), NVIDIA_RHT_DIM),
        summary="Cook et al. (2025): nvidia with Four-over-Six in both passes: biased gradients (Figure 9)",
    ),
    Recipe(
        "tetrajet_v2_rht128",
        output=both("rtn"),
        grad_input=both("sr", RHT_DIM),
        grad_weight=both("sr", RHT_DIM),
        summary="tetrajet_v2 rotated in groups of 128, as clover is",
    ),
    # NVIDIA's staff try two recipes in torchao (rdspring1/ao, nvfp4_training/nvfp4_recipe.py, 2026). Both have 1x16
    # weights, which dgrad rounds again from the forward's codes. V1_REQUANT is nvidia in all else. V2 rotates by 128
    # and has MS-EDEN of grad_output alone. There V2's signs are redrawn every step in dgrad, here at every backward.
    _nvidia(
        "v1_requant",
        "with 1x16 weight blocks, rounded again in dgrad from the forward's codes, and fixed signs",
        output=both("rtn"),
        grad_input=Gemm(sr, rtn),
        grad_weight=fixed_signs,
    ),
    _nvidia(
        "v2",
        "with 1x16 weight blocks, RHT-128 in both backward GEMMs, and MS-EDEN by 16 of grad_output alone",
        output=both("rtn"),
        grad_input=Gemm(Operand("ms_eden_by_16"), rtn, RHT_DIM),
        grad_weight=Gemm(Operand("ms_eden_by_16"), raw_rtn, RHT_DIM),
    ),
    _nvidia("fixed_signs", "with one sign vector for the whole run, as published", grad_weight=fixed_signs),
    NVIDIA_FULL_END,
    _nvidia(
        "1d",
        "without square weight blocks: 1x16, rounded again along the other dimension for dgrad",
        output=both("rtn"),
        grad_input=Gemm(sr, raw_rtn),
    ),
    _nvidia("no_rht", "without the rotation in wgrad", grad_weight=Gemm(sr, raw_rtn)),
    _nvidia(
        "no_sr",
        "with gradients rounded to nearest",
        grad_input=Gemm(rtn, as_used),
        grad_weight=Gemm(rtn, raw_rtn, NVIDIA_RHT_DIM),
    ),
    Recipe(
        "mxfp4_nvidia",
        output=Gemm(Operand("mxfp4"), Operand("mxfp4_32x32")),
        grad_input=Gemm(Operand("mxfp4_sr"), as_used),
        grad_weight=Gemm(Operand("mxfp4_sr"), Operand("mxfp4", raw=True), NVIDIA_RHT_DIM),
        summary="nvidia in MXFP4: 32 values a scale, a power of two rounded up, 32x32 weight blocks",
    ),
    Recipe(
        "tseng",
        grad_input=both("mxfp4_sr_prescaled", 64),
        grad_weight=both("mxfp4_sr_prescaled", 64),
        summary="Tseng et al. (2025): BF16 forward; MXFP4 backward with SR and RHT-64",
    ),
    Recipe(
        "chmiel",
        output=both("rtn"),
        grad_input=Gemm(sr, raw_rtn),
        grad_weight=Gemm(sr, Operand("sr", raw=True)),
        summary="Chmiel et al. (2025): NVFP4, RTN forward; SR of gradients, and of the input in wgrad; no rotation",
    ),
    Recipe(
        "fp8_blocks",
        output=Gemm(Operand("e4m3_1x128"), Operand("e4m3_128x128")),
        grad_input=Gemm(Operand("e4m3_1x128"), as_used),
        grad_weight=Gemm(Operand("e4m3_1x128"), Operand("e4m3_1x128", raw=True)),
        summary="NVIDIA's FP8 baseline (2025), as DeepSeek-V3's: E4M3, 128x128 weight blocks, 1x128 for the others",
    ),
    Recipe(
        "mxfp8",
        output=both("mxfp8"),
        grad_input=Gemm(mxfp8, raw_mxfp8),
        grad_weight=Gemm(mxfp8, raw_mxfp8),
        summary="MXFP8, E4M3 for all operands, each from the unquantized tensor",
    ),
    # Parts of clover: its gap's causes, and remedies.
    Recipe(
        "clover_input", output=Gemm(four_over_six, Operand()), summary="clover's input in the forward, nothing else"
    ),
    Recipe(
        "clover_weight", output=Gemm(Operand(), four_over_six), summary="clover's weight in the forward, nothing else"
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
        output=Gemm(four_over_six, search),
    ),
    _clover(
        "search_feedback",
        "with scale search in both passes, and error feedback for the forward's weight",
        output=Gemm(search, feedback),
        grad_input=eden_search,
        grad_weight=eden_search,
    ),
    CLOVER_REFINED,
    _clover(
        "fp8_input", "with the forward's input in FP8: 1/3 of the work in 8 bits", output=Gemm(mxfp8, four_over_six)
    ),
    _clover(
        "fp8_weight", "with the forward's weight in FP8: 1/3 of the work in 8 bits", output=Gemm(four_over_six, mxfp8)
    ),
    _clover("fp8_forward", "with its forward in FP8: 1/3 of the work in 8 bits", output=both("mxfp8")),
)
METHOD_TABLE: dict[str, Recipe] = METHODS | ABLATIONS
ALIASES = {"quartet2": "clover"}  # the paper's public name

OSCIRESET_COMMIT = "c116c2a"
ZERO_MEAN_COMMIT = "7af49f5"
# Methods that were measured, and lost (dev/LOG.md): name -> the last commit that trains with it.
REMOVED = {
    "clover_dithered": "880d786",
    "clover_dithered_weight": "6d6e051",
    "clover_fresh_rotation": ZERO_MEAN_COMMIT,
    "clover_hot": "880d786",
    "clover_masked": "880d786",
    "clover_rotated": "880d786",
    "clover_search_dithered": "880d786",
    "clover_shifted": "880d786",
    "clover_shifted_feedback": "880d786",
    "clover_sr_weight": ZERO_MEAN_COMMIT,
    "quartet": "880d786",
    "clover_reset": OSCIRESET_COMMIT,
    "tetrajet_v2_full": OSCIRESET_COMMIT,
    "tetrajet_v2_outcontrol": OSCIRESET_COMMIT,
}


def removed(commit: str) -> str:
    """What to say of a method that was removed after this commit."""
    return f"was measured, lost and removed; the last commit that trains with it is {commit}"


def get_recipe(method: str | Recipe) -> Recipe:
    """The Recipe of a name of METHODS, ABLATIONS or ALIASES; a Recipe is returned as it is.

    Raises ValueError with the names of METHODS, for another type, or for a method that was removed.

    >>> print(nf.get_recipe("quartet2").output)
    four_over_six x four_over_six
    """
    if isinstance(method, Recipe):
        return method
    if not isinstance(method, str):
        raise ValueError(f"method is {method!r}, expected a name of nanochat_fp4.METHODS or a Recipe")
    name = ALIASES.get(method, method)
    if name in REMOVED and name not in METHOD_TABLE:
        raise ValueError(f"method {name!r} {removed(REMOVED[name])}")
    if name not in METHOD_TABLE:
        known = ", ".join((*METHODS, *ALIASES))
        alike = difflib.get_close_matches(name, (*METHOD_TABLE, *ALIASES), n=1)
        meant = f"; did you mean {alike[0]}?" if alike else ""
        raise ValueError(
            f"unknown method {method!r}; use one of: {known}; or one of the ablations, nf.ABLATIONS{meant}"
        )
    return METHOD_TABLE[name]
