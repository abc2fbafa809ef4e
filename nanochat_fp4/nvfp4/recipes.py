"""The methods: one row each, nothing else differs between them.

A linear layer has three GEMMs and six operands, each contracted over its last dimension:

    output       Y  = X   . W^T       input (tokens, in)        weight (out, in)          contraction over in_features
    grad_input   dX = E   . W         grad_output (tokens, out) weight^T (in, out)        contraction over out_features
    grad_weight  dW = E^T . X         grad_output^T (out, tok.) input^T (in, tokens)      contraction over tokens

A Recipe says for each operand how it is rounded (a name of quantizers.ROUNDINGS; None leaves it alone) and from what it
is taken, and for each GEMM whether both operands are rotated first (RHT along the contraction dimension, the same signs
for both, redrawn at every backward). In the backward pass input and weight are, by default, the values that the forward
GEMM used (if it used 4-bit codes, those codes, dequantized): the gradients of the quantized forward, by the chain rule.

To add a method, add a row to METHOD_TABLE.
"""

from dataclasses import dataclass, field, replace

from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.quantizers import get_rounding

NVIDIA_RHT_DIM = 16  # NVIDIA et al. (2025): rotate in blocks of 16, which fuse into any quantization kernel


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is rounded.

    rounding: a name of ROUNDINGS, or None: the value that the forward GEMM used, or grad_output itself
    raw:      taken from the unquantized tensor although the forward GEMM used a quantized one (input and weight in the
              backward GEMMs only); then it is quantized during the forward pass, so that only its codes are kept
    """

    rounding: str | None = None
    raw: bool = False

    def __post_init__(self) -> None:
        if self.rounding is not None:
            get_rounding(self.rounding)

    def __str__(self) -> str:
        return ("raw " if self.raw else "") + (self.rounding or "-")


@dataclass(frozen=True)
class Gemm:
    """The two operands of one GEMM, in the order of the module's table, and the rotation of both.

    rht_dim:     0, or the RHT's group size along the contraction dimension
    fixed_signs: one sign vector for the whole run instead of a new one at every backward (NVIDIA's own recipe)
    """

    a: Operand = field(default_factory=Operand)
    b: Operand = field(default_factory=Operand)
    rht_dim: int = 0
    fixed_signs: bool = False

    @property
    def random(self) -> bool:
        roundings = [get_rounding(o.rounding).random for o in (self.a, self.b) if o.rounding]
        return any(roundings) or (self.rht_dim > 0 and not self.fixed_signs)

    def __str__(self) -> str:
        return f"{self.a} x {self.b}" + (f", RHT-{self.rht_dim}" if self.rht_dim else "")


@dataclass(frozen=True)
class Recipe:
    """A method: one Gemm for each of the three products. Raises ValueError for combinations that cannot be computed."""

    name: str
    output: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    summary: str = ""

    def __post_init__(self) -> None:
        for gemm_name in ("output", "grad_input", "grad_weight"):
            gemm = getattr(self, gemm_name)
            where = f"recipe {self.name!r}, {gemm_name}"
            roundings = [get_rounding(o.rounding) for o in (gemm.a, gemm.b) if o.rounding]
            if gemm.rht_dim and len(roundings) < 2:
                raise ValueError(
                    f"{where}: a rotation needs both operands quantized; set rht_dim=0 or give both a rounding"
                )
            if any(r.ms_eden for r in roundings) and gemm.rht_dim != RHT_DIM:
                raise ValueError(f"{where}: ms_eden works on rotated operands; set rht_dim={RHT_DIM} and quantize both")
            if gemm.a.raw or (gemm.b.raw and gemm_name == "output"):
                raise ValueError(f"{where}: raw only means something for input and weight in the backward GEMMs")
            if gemm.rht_dim not in (0, 16, 32, 64, 128):
                raise ValueError(f"{where}: rht_dim is {gemm.rht_dim}, expected 0, 16, 32, 64 or 128")

    @property
    def quantizes(self) -> bool:
        """Whether any operand of any GEMM is quantized."""
        return any(o.rounding for g in (self.output, self.grad_input, self.grad_weight) for o in (g.a, g.b))

    @property
    def draws_in_forward(self) -> bool:
        """Whether the forward pass needs random numbers: only raw operands, quantized there, are rotated or rounded
        stochastically in this pass."""
        raw = [g for g in (self.grad_input, self.grad_weight) if g.b.raw]
        return self.output.random or any(g.random for g in raw)

    @property
    def draws_in_backward(self) -> bool:
        return self.grad_input.random or self.grad_weight.random

    def forward_only(self) -> "Recipe":
        """The same forward with an unquantized backward: the paper's post-training (Appendix C)."""
        return replace(self, grad_input=Gemm(), grad_weight=Gemm())

    def __str__(self) -> str:
        return f"{self.name}: output {self.output}; grad_input {self.grad_input}; grad_weight {self.grad_weight}"


def both(rounding: str, rht_dim: int = 0) -> Gemm:
    """Both operands rounded alike."""
    return Gemm(Operand(rounding), Operand(rounding), rht_dim)


def _rows() -> list[Recipe]:
    rtn, sr, eden = Operand("rtn"), Operand("sr"), Operand("ms_eden")
    unquantized = Operand()  # in the backward pass: as the forward GEMM used it, not rounded again
    rows = [
        Recipe("bf16", summary="no quantization: the baseline"),
        Recipe(
            "nvidia",
            output=Gemm(rtn, Operand("rtn_16x16")),
            grad_input=Gemm(sr, unquantized),
            grad_weight=Gemm(sr, Operand("rtn", raw=True), NVIDIA_RHT_DIM),
            summary="NVIDIA et al. (2025): square weight blocks, reused in dgrad; SR on gradients, RHT-16 in wgrad",
        ),
        Recipe(
            "four_over_six",
            output=Gemm(Operand("four_over_six"), Operand("four_over_six_16x16")),
            grad_input=Gemm(Operand("sr_four_over_six"), unquantized),
            grad_weight=Gemm(Operand("sr_four_over_six"), Operand("four_over_six", raw=True), NVIDIA_RHT_DIM),
            summary="Cook et al. (2025): nvidia with Four-over-Six in both passes (biased gradients, as published)",
        ),
        Recipe(
            "tetrajet_v2",
            output=both("rtn"),
            grad_input=both("sr", RHT_DIM),
            grad_weight=both("sr", RHT_DIM),
            summary="Chen et al. (2025), the base the paper compares with: 1x16 blocks, SR and RHT-128 in the backward",
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
    ]
    # Figure 1: quantization of selected backward operands only; (b) and (d) leave the weight alone, so no rotation
    # there, and MS-EDEN, which needs both operands rotated, has no such rows.
    for name, operand in (("sr", sr), ("ms_eden", eden)):
        pair = Gemm(operand, operand, RHT_DIM)
        rows.append(Recipe(f"fig1a_{name}", grad_weight=pair, summary="Figure 1 (a): wgrad only"))
        rows.append(Recipe(f"fig1c_{name}", grad_input=pair, summary="Figure 1 (c): dgrad only, weight requantized"))
        rows.append(
            Recipe(f"fig1e_{name}", grad_input=pair, grad_weight=pair, summary="Figure 1 (e): both backward GEMMs")
        )
    only_e = Gemm(sr, unquantized)
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


METHOD_TABLE: dict[str, Recipe] = {recipe.name: recipe for recipe in _rows()}
ALIASES = {"quartet2": "clover"}  # the paper's public name


def method_names() -> tuple[str, ...]:
    """Every name that QAT_METHOD accepts."""
    return (*METHOD_TABLE, *ALIASES)


def get_recipe(method: str | Recipe) -> Recipe:
    """The Recipe of a method name; a Recipe is returned as it is. Raises ValueError with the known names."""
    if isinstance(method, Recipe):
        return method
    name = ALIASES.get(method, method)
    if name not in METHOD_TABLE:
        raise ValueError(f"unknown QAT method {method!r}; known: {', '.join(method_names())}")
    return METHOD_TABLE[name]
