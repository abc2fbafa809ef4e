"""The table of methods: METHODS, what a user should choose from, and ABLATIONS, what else can be trained.

A method is a row of one of these tables, nothing else. QAT_METHOD takes the names of both, and the aliases.
"""

from dataclasses import replace

from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both

NVIDIA_RHT_DIM = 16  # NVIDIA et al. (2025): rotate in blocks of 16, which fuse into any quantization kernel
TETRAJET_RHT_DIM = 32  # of the paper's runs: its class has 32, and its sweep passes no other (Quartet-II repository)

rtn, sr = Operand("rtn"), Operand("sr")
as_used = Operand()  # in the backward pass: as the forward GEMM used it, not rounded again


def _rows(*recipes: Recipe) -> dict[str, Recipe]:
    return {recipe.name: recipe for recipe in recipes}


METHODS: dict[str, Recipe] = _rows(
    Recipe("bf16", summary="no quantization: the baseline"),
    Recipe(
        "fp8",
        output=both("e4m3"),
        grad_input=Gemm(Operand("e5m2"), as_used),
        grad_weight=Gemm(Operand("e5m2"), as_used),
        summary="the FP8 baseline, nanochat's --fp8: a scale per tensor; E4M3 for input and weight, E5M2 gradients",
    ),
    Recipe(
        "nvidia",
        output=Gemm(rtn, Operand("rtn_16x16")),
        grad_input=Gemm(sr, as_used),
        grad_weight=Gemm(sr, Operand("rtn", raw=True), NVIDIA_RHT_DIM),
        summary="NVIDIA et al. (2025): square weight blocks, reused in dgrad; SR on gradients, RHT-16 in wgrad",
    ),
    Recipe(
        "four_over_six",
        output=Gemm(Operand("four_over_six"), Operand("four_over_six_16x16")),
        grad_input=Gemm(sr, as_used),
        grad_weight=Gemm(sr, Operand("rtn", raw=True), NVIDIA_RHT_DIM),
        summary="nvidia with Four-over-Six in the forward, as the paper's runs had it",
    ),
    Recipe(
        "tetrajet_v2",
        output=both("rtn"),
        grad_input=both("sr", TETRAJET_RHT_DIM),
        grad_weight=both("sr", TETRAJET_RHT_DIM),
        summary="Chen et al. (2025), the base the paper compares with: 1x16 blocks, SR and RHT-32 in the backward",
    ),
    Recipe(
        "clover",
        output=both("four_over_six"),
        grad_input=both("ms_eden", RHT_DIM),
        grad_weight=both("ms_eden", RHT_DIM),
        summary="the paper (Quartet II): 4/6 forward, unbiased MS-EDEN backward from the forward's codes",
    ),
    Recipe(
        "clover_search",
        output=both("scale_search"),
        grad_input=both("ms_eden_search", RHT_DIM),
        grad_weight=both("ms_eden_search", RHT_DIM),
        summary="ours: Clover with a search over block scales in both passes, still unbiased",
    ),
)


# NVIDIA's own recipe: nvidia with what the paper's comparison leaves out. There 16% of the blocks stay in BF16, the
# last 8 and the first 2 of 62, of which the last are the sensitive ones: here all are at the end. One sign vector for
# the run. The forward in BF16 for the last 18% of the steps; the backward goes on in 4 bits, and then makes square
# blocks of the raw weight.
_fixed_signs = replace(METHODS["nvidia"].grad_weight, fixed_signs=True)
_nvidia_full_end = Recipe(
    "nvidia_full_end",
    grad_input=Gemm(sr, Operand("rtn_16x16", raw=True)),
    grad_weight=_fixed_signs,
    kept_blocks=0.15,
    summary="how nvidia_full ends: only the backward is quantized",
)
METHODS |= _rows(
    replace(
        METHODS["nvidia"],
        name="nvidia_full",
        grad_weight=_fixed_signs,
        kept_blocks=0.15,
        late=(0.82, _nvidia_full_end),
        summary="NVIDIA's recipe in full: the last 15% of the blocks in BF16, fixed signs, and the forward in BF16 for "
        "the last 18% of the steps",
    )
)


def _clover(name: str, summary: str, **changes) -> Recipe:
    return replace(METHODS["clover"], name=f"clover_{name}", summary=f"clover {summary}", **changes)


_refined = _clover(
    "refined",
    "with two terms of 4 bits for both operands of its forward: three 4-bit GEMMs in the place of one",
    output=Gemm(Operand("four_over_six", terms=2), Operand("four_over_six", terms=2)),
)
_feedback = Operand("scale_search_6", feedback=True)
METHODS |= _rows(
    _clover(
        "feedback",
        "with a search over block scales and error feedback for the forward's weight, which a step pays once",
        output=Gemm(Operand("four_over_six"), _feedback),
    ),
    _clover(
        "feedback_late",
        "with error feedback for the forward's weight, and two terms for both operands in the last 3% of the steps: "
        "2% more GEMM work, and a forward of three products at inference, or BF16 (docs/results.md)",
        output=Gemm(Operand("four_over_six"), _feedback),
        late=(0.97, _refined),
    ),
    _clover(
        "late",
        "with two terms for both operands of its forward in the last 30% of the steps: all in 4 bits, 20% more "
        "GEMM work, half of its gap to BF16 (docs/results.md)",
        late=(0.7, _refined),
    ),
)


def _figures() -> list[Recipe]:
    """The rows of the paper's Figures 1 and 2."""
    rows = []
    # Figure 1: quantization of selected backward operands only; (b) and (d) leave the weight alone, so no rotation
    # there, and MS-EDEN, which needs both operands rotated, has no such rows.
    for name, operand in (("sr", sr), ("ms_eden", Operand("ms_eden"))):
        pair = Gemm(operand, operand, RHT_DIM)
        rows.append(Recipe(f"fig1a_{name}", grad_weight=pair, summary="Figure 1 (a): wgrad only"))
        rows.append(Recipe(f"fig1c_{name}", grad_input=pair, summary="Figure 1 (c): dgrad only, weight requantized"))
        rows.append(
            Recipe(f"fig1e_{name}", grad_input=pair, grad_weight=pair, summary="Figure 1 (e): both backward GEMMs")
        )
    only_e = Gemm(sr, as_used)
    rows.append(Recipe("fig1b_sr", grad_input=only_e, summary="Figure 1 (b): dgrad only, weight left alone"))
    rows.append(
        Recipe("fig1d_sr", grad_input=only_e, grad_weight=Gemm(sr, sr, RHT_DIM), summary="Figure 1 (d): (a) and (b)")
    )
    # Figure 2: quantization of the forward GEMM only.
    for rounding in ("rtn", "four_over_six"):
        native, square = Operand(rounding), Operand(f"{rounding}_16x16")
        rows.append(
            Recipe(f"fig2_1x16_{rounding}", output=Gemm(native, native), summary="Figure 2: forward, native blocks")
        )
        rows.append(
            Recipe(f"fig2_16x16_{rounding}", output=Gemm(native, square), summary="Figure 2: square weight blocks")
        )
    return rows


def _other_systems() -> list[Recipe]:
    """What the sources compare with, and NVIDIA's recipe with one ingredient changed at a time."""
    nvidia_wgrad = METHODS["nvidia"].grad_weight
    raw_rtn = nvidia_wgrad.b

    def nvidia(name: str, summary: str, **changes: Gemm) -> Recipe:
        return replace(METHODS["nvidia"], name=f"nvidia_{name}", summary=f"nvidia {summary}", **changes)

    mx, mx_sr, tseng_sr = "mxfp4", Operand("mxfp4_sr"), "mxfp4_sr_prescaled"
    rtn_by_128, sr_by_128 = Operand("rtn", outer=True), Operand("sr", outer=True)
    tetrajet_backward = Gemm(sr_by_128, sr_by_128, 16)
    return [
        # Of the full TetraJet-v2 (arXiv 2510.27527, and its authors' code, thu-ml/TetraJet-v2-NVFP4Training) all but
        # OsciReset, which tetrajet_v2_full of lab/study/sweep_runs.py adds. As there: FP32 scales for outer blocks
        # of 128; RHT-16 in both backward GEMMs; the 10% of the input channels with the largest L2 norms rounded to
        # MXFP8 in output (both operands) and grad_weight (E^T to nearest, unrotated, and X^T from its forward values);
        # grad_input all in 4 bits, from the forward's values. Different from there:
        # * The channels are chosen every 10 steps, by the running average of squares (update_gram_matrices), from the
        #   first step on; there once, after 50 steps from step 501 (of 12,505 to 50,500), by the sum of the norms.
        # * Their number is a multiple of 32, the nearest to 10%; the authors' kernels take multiples of 128, rounded
        #   up. The others keep their order, with zeros for the outliers; there they are sorted by their norm.
        # * SR scales blocks so that nothing is clipped (6 * 16/17), for which there RTN of the scale may clip a little.
        # * On a GPU the dequantized values, scale and all, are rounded to BF16 before the product (at most 2^-9 of a
        #   value, 1e-6 of its square; 4 bits leave 9e-3), for which the authors scale each partial sum of 128 in FP32.
        Recipe(
            "tetrajet_v2_outcontrol",
            output=Gemm(rtn_by_128, rtn_by_128),
            grad_input=tetrajet_backward,
            grad_weight=tetrajet_backward,
            outliers=0.1,
            summary="tetrajet_v2 with its authors' OutControl, scales by 128 and RHT-16: 10% of the channels in 8 bits",
        ),
        Recipe(
            "four_over_six_biased",
            output=Gemm(Operand("four_over_six"), Operand("four_over_six_16x16")),
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
        # What NVIDIA's staff try next in torchao (rdspring1/ao, nvfp4_training/nvfp4_recipe.py, 2026): 1x16 weights,
        # which dgrad rounds again from the forward's codes; V1_REQUANT is nvidia in all else, V2 rotates by 128 and has
        # MS-EDEN of grad_output alone. There V2's signs are redrawn every step in dgrad, here at every backward.
        nvidia(
            "v1_requant",
            "with 1x16 weight blocks, rounded again in dgrad from the forward's codes, and fixed signs",
            output=both("rtn"),
            grad_input=Gemm(sr, rtn),
            grad_weight=_fixed_signs,
        ),
        nvidia(
            "v2",
            "with 1x16 weight blocks, RHT-128 in both backward GEMMs, and MS-EDEN by 16 of grad_output alone",
            output=both("rtn"),
            grad_input=Gemm(Operand("ms_eden_by_16"), rtn, RHT_DIM),
            grad_weight=Gemm(Operand("ms_eden_by_16"), raw_rtn, RHT_DIM),
        ),
        nvidia("fixed_signs", "with one sign vector for the whole run, as published", grad_weight=_fixed_signs),
        _nvidia_full_end,
        nvidia(
            "1d",
            "without square weight blocks: 1x16, rounded again along the other dimension for dgrad",
            output=both("rtn"),
            grad_input=Gemm(sr, raw_rtn),
        ),
        nvidia("no_rht", "without the rotation in wgrad", grad_weight=Gemm(sr, raw_rtn)),
        nvidia(
            "no_sr",
            "with gradients rounded to nearest",
            grad_input=Gemm(rtn, as_used),
            grad_weight=Gemm(rtn, raw_rtn, NVIDIA_RHT_DIM),
        ),
        Recipe(
            "mxfp4_nvidia",
            output=Gemm(Operand(mx), Operand("mxfp4_32x32")),
            grad_input=Gemm(mx_sr, as_used),
            grad_weight=Gemm(mx_sr, Operand(mx, raw=True), NVIDIA_RHT_DIM),
            summary="nvidia in MXFP4: 32 values a scale, a power of two rounded up, 32x32 weight blocks",
        ),
        Recipe(
            "tseng",
            grad_input=both(tseng_sr, 64),
            grad_weight=both(tseng_sr, 64),
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
            grad_input=Gemm(Operand("mxfp8"), Operand("mxfp8", raw=True)),
            grad_weight=Gemm(Operand("mxfp8"), Operand("mxfp8", raw=True)),
            summary="MXFP8, E4M3 for all operands, each from the unquantized tensor",
        ),
    ]


def _parts_of_clover() -> list[Recipe]:
    """To see what its gap is made of, and what else can be done about it."""
    search, fp8 = "scale_search", Operand("mxfp8")
    eden_search = both("ms_eden_search", RHT_DIM)
    x = weight = Operand("four_over_six")
    return [
        Recipe("clover_input", output=Gemm(x, Operand()), summary="clover's input in the forward, nothing else"),
        Recipe("clover_weight", output=Gemm(Operand(), weight), summary="clover's weight in the forward, nothing else"),
        _clover("search_forward", "with scale search in the forward alone", output=both(search)),
        _clover(
            "search_backward",
            "with scale search in the backward alone",
            grad_input=eden_search,
            grad_weight=eden_search,
        ),
        _clover(
            "weight_search",
            "with scale search for the forward's weight, which a step pays once",
            output=Gemm(x, Operand(search)),
        ),
        _clover(
            "search_feedback",
            "with scale search in both passes, and error feedback for the forward's weight",
            output=Gemm(Operand(search), _feedback),
            grad_input=eden_search,
            grad_weight=eden_search,
        ),
        _refined,
        _clover("fp8_input", "with the forward's input in FP8: 1/3 of the work in 8 bits", output=Gemm(fp8, weight)),
        _clover("fp8_weight", "with the forward's weight in FP8: 1/3 of the work in 8 bits", output=Gemm(x, fp8)),
        _clover("fp8_forward", "with its forward in FP8: 1/3 of the work in 8 bits", output=both("mxfp8")),
    ]


ABLATIONS: dict[str, Recipe] = _rows(*_figures(), *_other_systems(), *_parts_of_clover())
METHOD_TABLE: dict[str, Recipe] = METHODS | ABLATIONS
ALIASES = {"quartet2": "clover"}  # the paper's public name

# What was measured and lost (dev/LOG.md), and the last commit that trains with it.
REMOVED = (
    "clover_dithered", "clover_hot", "clover_masked", "clover_rotated", "clover_search_dithered", "clover_shifted",
    "clover_shifted_feedback", "quartet",
)  # fmt: skip
REMOVED_AFTER = "880d786"


def removed() -> str:
    """What to say of a method that was removed."""
    return f"was measured, lost and removed; the last commit that trains with it is {REMOVED_AFTER}"


def get_recipe(method: str | Recipe) -> Recipe:
    """The Recipe of a name of METHODS, ABLATIONS or ALIASES; a Recipe is returned as it is.

    Raises ValueError with the names of METHODS, for another type, or for a method that was removed.
    """
    if isinstance(method, Recipe):
        return method
    if not isinstance(method, str):
        raise ValueError(f"method is {method!r}, expected a name of nanochat_fp4.METHODS or a Recipe")
    name = ALIASES.get(method, method)
    if name in REMOVED:
        raise ValueError(f"method {name!r} {removed()}")
    if name not in METHOD_TABLE:
        known = ", ".join((*METHODS, *ALIASES))
        raise ValueError(f"unknown method {method!r}; use one of: {known}; or one of the ablations, nf.ABLATIONS")
    return METHOD_TABLE[name]
