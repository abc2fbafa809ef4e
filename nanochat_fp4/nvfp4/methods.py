"""METHODS, the table of the methods that a user can choose from. A method is a row of this table.

QAT_METHOD takes the name of a row, or an alias. Further rows are added with `register`, as lab/recipes.py does for the
figures of the paper. A registered row is used by its name, like a row of the table: it trains, evaluates and exports.
"""

import difflib
import re
from dataclasses import replace

from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.heads import some
from nanochat_fp4.nvfp4.recipes import Gemm, Operand, Recipe, both

NVIDIA_RHT_DIM = 16  # NVIDIA et al. (2025) rotate groups of 16, which can be fused into any quantization kernel.
# The paper's runs of TetraJet-v2 had groups of 32: this is the default of its class in the Quartet-II repository, and
# the sweep there does not change it.
TETRAJET_RHT_DIM = 32

# Operands and GEMMs that several rows share.
as_used = Operand()  # A backward operand with the values that the forward GEMM used, not rounded again.
rtn, sr, raw_rtn = Operand("rtn"), Operand("sr"), Operand("rtn", raw=True)
square_rtn, square_four_over_six = Operand("rtn_16x16"), Operand("four_over_six_16x16")
four_over_six = Operand("four_over_six")
eden = both("ms_eden", RHT_DIM)
nvidia_wgrad = Gemm(sr, raw_rtn, NVIDIA_RHT_DIM)
fixed_signs = replace(nvidia_wgrad, fixed_signs=True)  # One sign vector for the whole run.

# Recipes from which other rows are made, and one with which another row ends a run.
NVIDIA = Recipe(
    "nvidia",
    output=Gemm(rtn, square_rtn),
    grad_input=Gemm(sr, as_used),
    grad_weight=nvidia_wgrad,
    summary="NVIDIA et al. (2025): square weight blocks, reused in dgrad; SR on gradients, RHT-16 in wgrad",
)
# Only the backward pass is in 4 bits, so it makes the square blocks of the unquantized weight itself.
NVIDIA_FULL_END = Recipe(
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
    summary="the paper (Quartet II): 4/6 forward, MS-EDEN backward from the forward's codes",
)
# The advice which row to use. --help and the documents print all of it, and the plan of a run what concerns its GPU.
ON_A_BLACKWELL = (
    "On a Blackwell, time fp8 and clover_fp8_forward, and take the one that ends with the lower loss after the hours "
    "that you have."
)
FOR_THE_PAPER = "To reproduce the paper take clover, the default."
WHICH = f"{ON_A_BLACKWELL} On an older GPU take fp8, or bf16 if the GPU is older than sm_89 (Ada). {FOR_THE_PAPER}"
METHODS: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("bf16", summary="no quantization: the baseline"),
        Recipe(
            "fp8",
            output=both("e4m3"),
            grad_input=Gemm(Operand("e5m2"), as_used),
            grad_weight=Gemm(Operand("e5m2"), as_used),
            summary="the FP8 baseline, nanochat's --fp8: a scale per tensor; E4M3 for input and weight, E5M2 gradients",
        ),
        NVIDIA,
        # NVIDIA's own recipe has more parts than the paper's comparison with it. In a model of 62 blocks, NVIDIA keeps
        # the first 2 and the last 8 in BF16, which are 16%. The last blocks are the sensitive ones, so this row keeps
        # only blocks at the end.
        replace(
            NVIDIA,
            name="nvidia_full",
            grad_weight=fixed_signs,
            kept_blocks=0.15,
            late=(0.82, NVIDIA_FULL_END),
            summary="NVIDIA's recipe in full: the last 15% of the blocks in BF16, fixed signs, and the forward in BF16 "
            "for the last 18% of the steps",
        ),
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
        replace(
            CLOVER,
            name="clover_fp8_forward",
            output=both("e4m3"),
            summary="clover with its forward in FP8, one scale a tensor; the backward pass rounds these 8-bit numbers "
            "to 4 bits, as clover's",
        ),
    )
}
ALIASES = {"quartet2": "clover"}  # the paper's public name

REGISTERED: dict[str, Recipe] = {}  # The rows that `register` has added.


def register(recipe: Recipe) -> None:
    """Adds a recipe to the known methods, for the rest of this process. The same recipe may be registered again.

    Raises ValueError for an argument that is no Recipe, for a name that another recipe has already, and for a name that
    cannot be a part of a folder's name and of a flag.

    >>> nf.register(nf.Recipe("weights_only", output=nf.Gemm(b=nf.Operand("four_over_six"))))
    >>> nf.QuantLinear(32, 16, method="weights_only")(torch.randn(4, 32)).shape
    torch.Size([4, 16])
    """
    if not isinstance(recipe, Recipe):
        raise ValueError(f"register: got {type(recipe).__name__}, expected a nanochat_fp4.Recipe")
    for part in (recipe, recipe.final):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", part.name):
            raise ValueError(
                f"register: {part.name!r} is no good name; use letters, digits, _, ., + and -, because folders and "
                "flags will have the name"
            )
        known = _known().get(ALIASES.get(part.name, part.name))
        if known is not None and known != part:
            raise ValueError(
                f"register: the name {part.name!r} stands for another recipe in this process already ({known!r}, and "
                f"this is {part!r}); give this one another name, or start the process again"
            )
    REGISTERED[recipe.name] = recipe


def _known() -> dict[str, Recipe]:
    """Returns all rows, and the recipes with which their runs end, by name."""
    return {part.name: part for row in (*REGISTERED.values(), *METHODS.values()) for part in (row, row.final)}


def get_recipe(method: str | Recipe) -> Recipe:
    """Returns the Recipe of a name: a row of METHODS, an alias, or a registered row. A Recipe is returned as it is.

    Raises ValueError for an unknown name, and for an argument of another type.

    >>> print(nf.get_recipe("quartet2").output)
    four_over_six x four_over_six
    """
    if isinstance(method, Recipe):
        return method
    if not isinstance(method, str):
        raise ValueError(f"method is {method!r}, expected a name of nanochat_fp4.METHODS or a Recipe")
    rows, name = _known(), ALIASES.get(method, method)
    if name in rows:
        return rows[name]
    alike = sorted(r for r in rows if r.startswith(name)) or difflib.get_close_matches(name.lower(), (*rows, *ALIASES))
    known = f"did you mean {alike[0]}? Use" if alike else "use"
    # A file of the user registers its rows after those of lab.
    registered = some(name for name in reversed(REGISTERED) if name not in METHODS)
    usable = ", ".join(filter(None, (*METHODS, *ALIASES, registered)))
    raise ValueError(
        f"unknown method {method!r}; {known} one of: {usable}; or register its recipe "
        "(nf.register, or --recipes=FILE.py)"
    )
