"""ROUNDINGS, the table of the roundings that operands can have. A rounding (`Rounding`) is a row of constants.

quantizers.py computes the roundings, and its docstring has the formulas. A user adds rows of constants here.
"""

import difflib
from dataclasses import dataclass, field, replace

from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, E4M3_MAX

# Rounding a scale to nearest lowers it by a factor of 16/17 at most. With this grid maximum, elements are at most 6
# after that, so that stochastic rounding never clips.
SR_GRID_MAX = 6.0 * 16 / 17
# The largest scale is below E4M3's maximum of 448, because 4/6 multiplies scales by up to 1.5, the search by up to
# 1.625, and EDEN's correction increases them as well (the paper, Section 3.3).
SEARCH_SCALE_CAP = 256.0
# The grid maximum whose clipping minimizes MS-EDEN's error with one candidate. Source: the paper's code. The tests
# compute it again.
MS_EDEN_GRID_MAX = 6.0 / (17 / 16 * 0.93)

# Four-over-Six (Cook et al., 2025): a block's amax is mapped to 6, or to 4 by a scale that is 1.5 times larger.
FOUR_OVER_SIX = (1.0, 3 / 2)
SEARCH_3 = (1.0, 3 / 2, 15 / 16)
SEARCH_6 = (1.0, 3 / 2, 15 / 16, 11 / 8, 13 / 8, 17 / 16)

# The number of values that share a power of two in MXFP4 and MXFP8. Source: Open Compute Project, MX 1.0.
MX_BLOCK = 32
# The number of values that share a scale in FP8 with blocks. In a weight, 128 rows share it as well. Source:
# DeepSeek-V3, Section 3.3.2.
FP8_BLOCK = 128
E5M2_MAX = 57344.0


@dataclass(frozen=True)
class Rounding:
    """How one operand is rounded to NVFP4, or to a format for comparison. quantizers.py has the formulas in its
    docstring.

    grid_max:   s, the value that a block's amax is mapped to with the candidate 1
    scale_cap:  cap, the largest block scale with the candidate 1
    candidates: the multiples of the block scale that are tried
    stochastic: whether elements are rounded stochastically (SR). Otherwise they are rounded to nearest, ties to even
                (RTN).
    block_rows: the number of rows that share a scale: 1, or as many as `block` for square blocks
    ms_eden:    whether to rotate by an RHT of 128, correct the scales by S, and round the scales stochastically
    mx:         "" for the scales of NVFP4. "floor" and "ceil" are the powers of two below and above amax / s.
    fp8:        "" if the format is not FP8. "tensor" is FP8 with only tensor_scale, and "block" is FP8 with an FP32
                scale for each block.
    block:      the number of values in a row that share a scale: 16 for NVFP4, 32 for MXFP4 and MXFP8, and 128 for FP8
                with blocks. The last two may have other multiples of 16.
    prescale:   the factor by which elements are multiplied before rounding and divided afterwards (mx only)
    element:    the format of an element: "e2m1", "e4m3" (mx and fp8), or "e5m2" (fp8). The 8-bit formats are rounded to
                nearest.
    name:       the key in ROUNDINGS

    >>> row = nf.Rounding(grid_max=4.0)  # The largest value of a block becomes 4 times the block's scale.
    >>> nf.quantize(torch.tensor([[4.0, 2.9] + [0.0] * 14]), row).dequantize()[0, :2].round(decimals=3).tolist()
    [4.0, 3.0]
    """

    grid_max: float = E2M1_MAX
    scale_cap: float = E4M3_MAX
    candidates: tuple[float, ...] = (1.0,)
    stochastic: bool = False
    block_rows: int = 1
    ms_eden: bool = False
    mx: str = ""
    fp8: str = ""
    block: int = BLOCK
    prescale: float = 1.0
    element: str = "e2m1"
    name: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """The name for tables and messages. It says so if the package's row of this name has other constants."""
        of_the_package = OF_THE_PACKAGE.get(self.name, self)
        return (self.name or "unnamed") + ("" if of_the_package == self else " with other constants")

    @property
    def has_kernels(self) -> bool:
        """Whether the Triton kernels can compute this rounding. The other roundings run as this reference
        everywhere."""
        return not (self.mx or self.fp8 or (self.random and self.block_rows > 1))

    @property
    def takes_amax(self) -> bool:
        """Whether the amax of an input that is not rotated can be given by the kernel that makes the input."""
        return self.has_kernels or self.fp8 == "tensor"

    @property
    def random(self) -> bool:
        """Whether the result depends on the seed."""
        return self.stochastic or self.ms_eden


ROUNDINGS: dict[str, Rounding] = {
    "rtn": Rounding(),
    "four_over_six": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=FOUR_OVER_SIX),
    "rtn_16x16": Rounding(block_rows=16),
    "four_over_six_16x16": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=FOUR_OVER_SIX, block_rows=16),
    "sr": Rounding(grid_max=SR_GRID_MAX, stochastic=True),
    "sr_four_over_six": Rounding(SR_GRID_MAX, SEARCH_SCALE_CAP, FOUR_OVER_SIX, stochastic=True),
    "ms_eden": Rounding(MS_EDEN_GRID_MAX, SEARCH_SCALE_CAP, ms_eden=True),
    "scale_search_3": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_3),
    "scale_search_6": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_6),
    "ms_eden_search_3": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_3, ms_eden=True),
    "ms_eden_search_6": Rounding(scale_cap=SEARCH_SCALE_CAP, candidates=SEARCH_6, ms_eden=True),
}
# Formats of other systems. If scales are rounded down, the largest value of a block can be almost 8 and is clipped to
# 6. Tseng et al. therefore multiply values by 3/4 before stochastic rounding. If scales are rounded up (NVIDIA),
# nothing is clipped, but the largest value of a block can be as small as 3.
_UP = {"mx": "ceil", "block": MX_BLOCK}
MX_ROUNDINGS: dict[str, Rounding] = {
    "mxfp4_ocp": Rounding(grid_max=4.0, mx="floor", block=MX_BLOCK),  # 4: the largest power of two of E2M1
    "mxfp4": Rounding(**_UP),
    "mxfp4_32x32": Rounding(**_UP, block_rows=MX_BLOCK),
    "mxfp4_sr": Rounding(**_UP, stochastic=True),
    "mxfp4_sr_prescaled": Rounding(grid_max=3.0, mx="floor", block=MX_BLOCK, stochastic=True, prescale=3 / 4),
    "mxfp8": Rounding(grid_max=E4M3_MAX, **_UP, element="e4m3"),
}
ROUNDINGS |= MX_ROUNDINGS
# FP8 has one scale per tensor (nanochat's --fp8), or FP32 scales for blocks of 1x128 and 128x128 (DeepSeek-V3).
_BLOCKS = {"grid_max": E4M3_MAX, "fp8": "block", "element": "e4m3", "block": FP8_BLOCK}
FP8_ROUNDINGS: dict[str, Rounding] = {
    "e4m3": Rounding(grid_max=E4M3_MAX, scale_cap=1.0, fp8="tensor", element="e4m3"),
    "e5m2": Rounding(grid_max=E5M2_MAX, scale_cap=1.0, fp8="tensor", element="e5m2"),
    "e4m3_1x128": Rounding(**_BLOCKS),
    "e4m3_128x128": Rounding(**_BLOCKS, block_rows=FP8_BLOCK),
}
ROUNDINGS |= FP8_ROUNDINGS
# The names without a number try 3 candidates. With 6 candidates the error is another 5% lower, but a step on an H200
# takes 1.5 times as long.
ROUNDINGS["scale_search"] = ROUNDINGS["scale_search_3"]
ROUNDINGS["ms_eden_search"] = ROUNDINGS["ms_eden_search_3"]
ROUNDINGS = {name: replace(rounding, name=name) for name, rounding in ROUNDINGS.items()}
# The package's own rows. A user may add rows to ROUNDINGS, and another process does not have those.
OF_THE_PACKAGE = dict(ROUNDINGS)


def get_rounding(name: str | Rounding) -> Rounding:
    """Returns the Rounding with this name, whose name is then its key in ROUNDINGS. A Rounding is returned as it is.

    Raises ValueError for an unknown name, for an argument of another type, and for a row that is no Rounding.
    """
    if isinstance(name, Rounding):
        return name
    if not isinstance(name, str):
        raise ValueError(f"the rounding is {name!r}, expected a name of nanochat_fp4.ROUNDINGS or one of its rows")
    if name not in ROUNDINGS:
        alike = difflib.get_close_matches(str(name).lower(), ROUNDINGS, n=1)
        known = f"did you mean {alike[0]}? Known" if alike else "known"
        raise ValueError(
            f"unknown rounding {name!r}; {known}: {', '.join(ROUNDINGS)}; to add a row: nanochat_fp4.ROUNDINGS"
            f"[{name!r}] = nanochat_fp4.Rounding(...), see CONTRIBUTING.md"
        )
    row = ROUNDINGS[name]
    if not isinstance(row, Rounding):
        raise ValueError(
            f"ROUNDINGS[{name!r}] is a {type(row).__name__}, expected a Rounding, which is a row of constants "
            "(nanochat_fp4.Rounding(...)); new arithmetic is a new field of Rounding, see CONTRIBUTING.md"
        )
    return row if row.name == name else replace(row, name=name)
