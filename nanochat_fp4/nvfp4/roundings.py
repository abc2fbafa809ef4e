"""ROUNDINGS, the table of the roundings that operands can have. A rounding (`Rounding`) is a row of constants.

quantizers.py computes the roundings, and its docstring has the formulas. A user adds rows of constants here.
"""

import difflib
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, E4M3_MAX, NVFP4Tensor
from nanochat_fp4.nvfp4.identity import identity

if TYPE_CHECKING:
    import torch

    from nanochat_fp4.nvfp4.philox import Noise

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

# A limit between 6 * 17/15, the largest element that a rounded normal scale can cause, and 7, which would round to 8.
E2M1_OVERFLOW = 6.875
E5M2_MAX = 57344.0


@dataclass(frozen=True)
class Rounding:
    """How one operand is rounded: to NVFP4, to FP8 with one scale a tensor, or by a function. quantizers.py has the
    formulas in its docstring.

    grid_max:   s, the value that a block's amax is mapped to with the candidate 1
    scale_cap:  cap, the largest block scale with the candidate 1
    candidates: the multiples of the block scale that are tried
    stochastic: whether elements are rounded stochastically (SR). Otherwise they are rounded to nearest, ties to even
                (RTN).
    block_rows: the number of rows that share a scale: 1, or 16 for square blocks
    ms_eden:    whether to rotate by an RHT of 128, correct the scales by S, and round the scales stochastically
    element:    the format of an element: "e2m1" (NVFP4), or "e4m3" or "e5m2" (FP8 with one scale a tensor, rounded to
                nearest)
    quantize:   a function for another format. quantize(x, rounding, noise) rounds x, float32 (R, K), and returns an
                NVFP4Tensor, whose values a layer multiplies in BF16. x is rotated already if its GEMM has a rotation,
                and noise (philox.Noise) has the random numbers. The fields above are the function's arguments. Results
                of a row may not depend on other rows, except for those of its own square blocks. The NVFP4Tensor has
                - codes (R, K): the elements themselves, in any dtype but uint8, which is two E2M1 codes a byte. A
                  codebook gives its values, and no indices.
                - scales (R, blocks of a row) and tensor_scale (): an element stands for code * scale * tensor_scale
                - decoded, float32 (R, K) or None: code * scale. It saves the layers this product, and must equal it.
    block:      the number of values in a row that share a scale: 16, or another number for a function
    name:       the key in ROUNDINGS

    The other fields follow from these: the function's identity (function), whether the result depends on the seed
    (random), whether the format is FP8 with one scale a tensor (fp8), and whether the Triton kernels can compute the
    rounding (has_kernels). The other roundings run as this reference everywhere.

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
    element: str = "e2m1"
    # A file of recipes that runs again makes new functions, so functions are compared by their identity.
    quantize: "Callable[[torch.Tensor, Rounding, Noise], NVFP4Tensor] | None" = field(default=None, compare=False)
    block: int = BLOCK
    name: str = field(default="", compare=False)
    function: str = field(default="", init=False, repr=False)
    random: bool = field(default=False, init=False, repr=False, compare=False)
    fp8: bool = field(default=False, init=False, repr=False, compare=False)
    has_kernels: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        largest, limit = self.grid_max * self.scale_cap, (E2M1_MAX if self.stochastic else E2M1_OVERFLOW) * E4M3_MAX
        if self.element == "e2m1" and not self.quantize and not 0 < largest <= limit:
            raise ValueError(
                f"grid_max * scale_cap is {largest:g}, but a block of NVFP4 holds at most {limit:g} (its largest "
                f"element times E4M3's {E4M3_MAX:g}); lower one of them, as in Rounding(grid_max=8, scale_cap=256)"
            )
        object.__setattr__(self, "function", identity(self.quantize) if self.quantize else "")
        object.__setattr__(self, "random", self.stochastic or self.ms_eden)
        object.__setattr__(self, "fp8", self.element != "e2m1" and not self.quantize)
        without = self.fp8 or self.quantize or (self.random and self.block_rows > 1)
        object.__setattr__(self, "has_kernels", not without)

    @property
    def label(self) -> str:
        """The name for tables and messages. It says so if the package's row of this name has other constants, and if a
        row of the package has the constants of a name of yours."""
        if self.name in OF_THE_PACKAGE:
            return self.name + ("" if OF_THE_PACKAGE[self.name] == self else " with other constants")
        known = [name for name, row in OF_THE_PACKAGE.items() if self.name and row == self]
        return (self.name or "unnamed") + (f" (equals {known[0]})" if known else "")


OF_THE_PACKAGE: dict[str, Rounding] = {
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
    # FP8 has one scale per tensor, as nanochat's --fp8 has.
    "e4m3": Rounding(grid_max=E4M3_MAX, scale_cap=1.0, element="e4m3"),
    "e5m2": Rounding(grid_max=E5M2_MAX, scale_cap=1.0, element="e5m2"),
}
# The names without a number try 3 candidates. With 6 candidates the error is another 5% lower, but a step on an H200
# takes 1.5 times as long.
OF_THE_PACKAGE["scale_search"] = OF_THE_PACKAGE["scale_search_3"]
OF_THE_PACKAGE["ms_eden_search"] = OF_THE_PACKAGE["ms_eden_search_3"]
OF_THE_PACKAGE = {name: replace(rounding, name=name) for name, rounding in OF_THE_PACKAGE.items()}


class Roundings(UserDict[str, Rounding]):
    """The rows of the package, and those that a user has added, which another process does not have.

    A row gets its key as its name. Raises ValueError for another row under a name of the package, because the package's
    methods are made of these names, and for a value that is no Rounding.
    """

    def __setitem__(self, name: str, row: Rounding) -> None:
        row = replace(get_rounding(row), name=name)
        if row != OF_THE_PACKAGE.get(name, row):
            raise ValueError(f"ROUNDINGS[{name!r}] is a row that the package's methods use; give yours a new name")
        self.data[name] = row

    def __ior__(self, rows: Mapping[str, Rounding]) -> "Roundings":
        self.update(rows)  # UserDict's own goes past __setitem__.
        return self


def get_rounding(name: str | Rounding) -> Rounding:
    """Returns the Rounding with this name. A Rounding is returned as it is.

    Raises ValueError for an unknown name, and for an argument of another type.
    """
    if isinstance(name, str) and name not in ROUNDINGS:
        alike = difflib.get_close_matches(name.lower(), ROUNDINGS, n=1)
        known = f"did you mean {alike[0]}? Known" if alike else "known"
        raise ValueError(
            f"unknown rounding {name!r}; {known}: {', '.join(ROUNDINGS)}; to add a row: nanochat_fp4.ROUNDINGS"
            f"[{name!r}] = nanochat_fp4.Rounding(...), see CONTRIBUTING.md"
        )
    row = ROUNDINGS[name] if isinstance(name, str) else name
    if not isinstance(row, Rounding):
        raise ValueError(
            f"the rounding {name!r} is a {type(row).__name__}, expected a Rounding, which is a row of constants "
            "(nanochat_fp4.Rounding(...)); other arithmetic is its argument `quantize`, see CONTRIBUTING.md"
        )
    return row


ROUNDINGS = Roundings(OF_THE_PACKAGE)
