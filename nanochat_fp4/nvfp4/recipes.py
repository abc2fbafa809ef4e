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

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.quantizers import get_rounding

RHT_DIMS = (0, 16, 32, 64, 128)
OUTLIER_MULTIPLE = 32  # channels that an MXFP8 scale is for
NVIDIA_RHT_DIM = 16  # NVIDIA et al. (2025): rotate in blocks of 16, which fuse into any quantization kernel


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is rounded.

    rounding: a name of ROUNDINGS, or None: the value that the forward GEMM used, or grad_output itself
    terms:    2 for the sum of two quantized tensors, the second of what the first one leaves (input and weight in the
              output GEMM only): an error like FP8's from products of 4-bit operands, of which there are more
    raw:      taken from the unquantized tensor although the forward GEMM used a quantized one (input and weight in the
              backward GEMMs only); then it is quantized during the forward pass, so that only its codes are kept
    feedback: rounded so that the error of the layer's output is small, for the inputs it has had (feedback.py; the
              weight in the output GEMM only)
    outer:    a tensor_scale for each 128 values along the contraction dimension instead of one for the tensor
              (TetraJet-v2's outer blocks); kept for the backward pass in 16 bits an element, not as codes
    """

    rounding: str | None = None
    raw: bool = False
    terms: int = 1
    feedback: bool = False
    outer: bool = False

    def __post_init__(self) -> None:
        if self.rounding is not None:
            get_rounding(self.rounding)

    def __str__(self) -> str:
        text = ("raw " if self.raw else "") + (self.rounding or "-") + (" + rest" if self.terms == 2 else "")
        return text + (" with feedback" if self.feedback else "") + (" by 128" if self.outer else "")


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
    # From this fraction of a run's steps on, the row of this name (plan.py).
    late: tuple[float, str] | None = None
    # Share of in_features, those with the largest inputs, that output and grad_weight multiply in MXFP8.
    outliers: float = 0.0
    summary: str = ""

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(f"recipe {self.name!r}{problem}")

    @property
    def block(self) -> int:
        """What in_features and out_features must be multiples of."""
        operands = (o.rounding for g in (self.output, self.grad_input, self.grad_weight) for o in (g.a, g.b))
        blocks = (get_rounding(r).block for r in operands if r)
        return max((OUTLIER_MULTIPLE if self.outliers else 0, *blocks))

    @property
    def output_products(self) -> int:
        """How many products of 4-bit (or other) operands the output GEMM is: one more for each second term."""
        return self.output.a.terms + self.output.b.terms - 1

    def outlier_channels(self, in_features: int) -> int:
        """How many channels are outliers: their share in multiples of 32, an MXFP8 block, but at least 32."""
        if not self.outliers:
            return 0
        count = round(self.outliers * in_features / OUTLIER_MULTIPLE) * OUTLIER_MULTIPLE
        return min(in_features, max(OUTLIER_MULTIPLE, count))

    @property
    def looks_at_inputs(self) -> bool:
        """Whether the layers compute with the second moments of their inputs (convert.update_second_moments)."""
        return self.output.b.feedback or self.outliers > 0

    @property
    def fixed_weight(self) -> bool:
        """Whether the forward's weight is rounded, and alike in each pass: it can be made once for several."""
        return bool(self.output.b.rounding) and not self.output.random

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

    @property
    def final(self) -> "Recipe":
        """What a run of this method ends with, and its model is evaluated and used with."""
        return get_recipe(self.late[1]) if self.late else self

    def forward_only(self) -> "Recipe":
        """The same forward with an unquantized backward: the paper's post-training (Appendix C)."""
        return replace(self, grad_input=Gemm(), grad_weight=Gemm())

    def __str__(self) -> str:
        text = f"{self.name}: output {self.output}; grad_input {self.grad_input}; grad_weight {self.grad_weight}"
        text += f"; {100 * self.outliers:g}% of the channels in MXFP8" if self.outliers else ""
        return text + (f"; {self.late[1]} from {100 * self.late[0]:.0f}% of the steps on" if self.late else "")


def _problems(recipe: Recipe) -> Iterator[str]:
    """Why a recipe cannot be computed: a line for each reason, to go behind its name."""
    output, wgrad = recipe.output, recipe.grad_weight
    forward = [get_rounding(o.rounding) for o in (output.a, output.b) if o.rounding]
    for name in ("output", "grad_input", "grad_weight"):
        gemm = getattr(recipe, name)
        yield from (f", {name}: {problem}" for problem in _problems_of_gemm(gemm, is_output=name == "output"))
        if gemm.rht_dim not in RHT_DIMS:
            yield f", {name}: rht_dim is {gemm.rht_dim}, expected 0, 16, 32, 64 or 128"
    if output.b.feedback and output.rht_dim:
        yield ", output: feedback does not go with a rotation"
    if recipe.outliers and not (
        0 < recipe.outliers <= 1
        and output.a.outer
        and output.b.outer
        and not any(r.random for r in forward)
        and not (output.rht_dim or wgrad.b.raw)
    ):
        yield (
            ": outliers, a share from 0 to 1, need two operands with scales by 128 in output that draw nothing, and a "
            f"grad_weight of the same input; got {recipe.outliers}"
        )


def _problems_of_gemm(gemm: Gemm, is_output: bool) -> Iterator[str]:
    operands = (gemm.a, gemm.b)
    roundings = [get_rounding(o.rounding) for o in operands if o.rounding]

    def draws_nothing(o: Operand) -> bool:
        """A rounding of NVFP4 without random numbers."""
        return bool(o.rounding) and get_rounding(o.rounding).has_kernels and not get_rounding(o.rounding).random

    if gemm.rht_dim and len(roundings) < 2:
        yield "a rotation needs both operands quantized; set rht_dim=0 or give both a rounding"
    if any(r.ms_eden for r in roundings) and gemm.rht_dim != RHT_DIM:
        yield f"ms_eden works on rotated operands; set rht_dim={RHT_DIM} and quantize both"
    if any(o.rounding and get_rounding(o.rounding).prescale != 1 for o in operands if is_output or o.raw):
        yield "a prescaled rounding is for backward operands that are not raw"
    if gemm.a.raw or (gemm.b.raw and is_output):
        yield "raw only means something for input and weight in the backward GEMMs"
    for o in operands:
        if o.terms != 1 and not (o.terms == 2 and is_output and draws_nothing(o)):
            yield (
                "two terms are for operands of output with an NVFP4 rounding that draws nothing; "
                f"got {o.terms} for {o.rounding}"
            )
        native = draws_nothing(o) and get_rounding(o.rounding).block_rows == 1
        if o.feedback and not (is_output and o is gemm.b and native and o.terms == 1):
            yield (
                "feedback is for the weight in output, with an NVFP4 rounding of 1x16 blocks that draws nothing, "
                f"without a second term; got it for {o.rounding}"
            )
    if any(o.outer for o in operands) and (
        any(r.ms_eden or r.block_rows > 1 or not r.has_kernels for r in roundings)
        or any(o.terms > 1 or o.feedback or (o.outer and not o.rounding) for o in operands)
    ):
        yield "scales by 128 are for NVFP4 roundings of 1x16 blocks but ms_eden, without second terms or feedback"


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


def _other_systems() -> list[Recipe]:
    """What the sources compare with, and NVIDIA's recipe with one ingredient changed at a time."""
    rtn, sr, unquantized = Operand("rtn"), Operand("sr"), Operand()
    raw_rtn, square = Operand("rtn", raw=True), Operand("rtn_16x16")
    nvidia_wgrad = Gemm(sr, raw_rtn, NVIDIA_RHT_DIM)

    def nvidia(name: str, summary: str, **changes: Gemm) -> Recipe:
        gemms = {"output": Gemm(rtn, square), "grad_input": Gemm(sr, unquantized), "grad_weight": nvidia_wgrad}
        return Recipe(f"nvidia_{name}", **(gemms | changes), summary=f"nvidia {summary}")

    mx, mx_sr, tseng_sr = "mxfp4", Operand("mxfp4_sr"), "mxfp4_sr_prescaled"
    rtn_by_128, sr_by_128 = Operand("rtn", outer=True), Operand("sr", outer=True)
    tetrajet_backward = Gemm(sr_by_128, sr_by_128, 16)
    return [
        # Of the full TetraJet-v2 (arXiv 2510.27527, and its authors' code, thu-ml/TetraJet-v2-NVFP4Training) all but
        # OsciReset, which the variant tetrajet_v2_full of scripts/sweep.py adds. As there: FP32 scales for outer blocks
        # of 128; RHT-16 in both backward GEMMs; the 10% of the input channels with the largest L2 norms rounded to
        # MXFP8 in output (both operands) and grad_weight (E^T to nearest, unrotated, and X^T from its forward values);
        # grad_input all in 4 bits, from the forward's values. Different from there:
        # * The channels are chosen every 10 steps, by the running average of squares (update_second_moments), from the
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
        nvidia(
            "fixed_signs",
            "with one sign vector for the whole run, as published",
            grad_weight=replace(nvidia_wgrad, fixed_signs=True),
        ),
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
            grad_input=Gemm(rtn, unquantized),
            grad_weight=Gemm(rtn, raw_rtn, NVIDIA_RHT_DIM),
        ),
        Recipe(
            "mxfp4_nvidia",
            output=Gemm(Operand(mx), Operand("mxfp4_32x32")),
            grad_input=Gemm(mx_sr, unquantized),
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
            "fp8",
            output=both("mxfp8"),
            grad_input=Gemm(Operand("mxfp8"), Operand("mxfp8", raw=True)),
            grad_weight=Gemm(Operand("mxfp8"), Operand("mxfp8", raw=True)),
            summary="the FP8 baseline: MXFP8, E4M3 for all operands, each from the unquantized tensor",
        ),
    ]


def _variations() -> list[Recipe]:
    """Parts of clover, to see what its gap is made of, and remedies for it."""
    four_over_six, search, fp8 = "four_over_six", "scale_search", Operand("mxfp8")
    eden, eden_search = both("ms_eden", RHT_DIM), both("ms_eden_search", RHT_DIM)
    clover = {"output": both(four_over_six), "grad_input": eden, "grad_weight": eden}
    x = weight = Operand(four_over_six)
    feedback = Operand("scale_search_6", feedback=True)

    def remedy(name: str, summary: str, **changes) -> Recipe:
        return Recipe(f"clover_{name}", **(clover | changes), summary=f"clover {summary}")

    return [
        Recipe("clover_input", output=Gemm(x, Operand()), summary="clover's input in the forward, nothing else"),
        Recipe("clover_weight", output=Gemm(Operand(), weight), summary="clover's weight in the forward, nothing else"),
        remedy("search_forward", "with scale search in the forward alone", output=both(search)),
        remedy(
            "search_backward",
            "with scale search in the backward alone",
            grad_input=eden_search,
            grad_weight=eden_search,
        ),
        remedy(
            "weight_search",
            "with scale search for the forward's weight, which a step pays once",
            output=Gemm(x, Operand(search)),
        ),
        remedy(
            "feedback",
            "with a search over block scales and error feedback for the forward's weight, which a step pays once",
            output=Gemm(x, feedback),
        ),
        remedy(
            "search_feedback",
            "with scale search in both passes, and error feedback for the forward's weight",
            output=Gemm(Operand(search), feedback),
            grad_input=eden_search,
            grad_weight=eden_search,
        ),
        remedy(
            "refined",
            "with two terms of 4 bits for both operands of its forward: three 4-bit GEMMs in the place of one",
            output=Gemm(Operand(four_over_six, terms=2), Operand(four_over_six, terms=2)),
        ),
        remedy(
            "late",
            "with two terms for both operands of its forward in the last 30% of the steps: all in 4 bits, 20% more "
            "GEMM work, half of its gap to BF16 (docs/results.md)",
            late=(0.7, "clover_refined"),
        ),
        remedy("fp8_input", "with the forward's input in FP8: 1/3 of the work in 8 bits", output=Gemm(fp8, weight)),
        remedy("fp8_weight", "with the forward's weight in FP8: 1/3 of the work in 8 bits", output=Gemm(x, fp8)),
        remedy("fp8_forward", "with its forward in FP8: 1/3 of the work in 8 bits", output=both("mxfp8")),
    ]


METHOD_TABLE: dict[str, Recipe] = {r.name: r for r in (*_rows(), *_other_systems(), *_variations())}
ALIASES = {"quartet2": "clover"}  # the paper's public name
# What was measured and lost (dev/LOG.md), and the last commit that trains with it.
REMOVED = (
    "clover_dithered", "clover_hot", "clover_masked", "clover_rotated", "clover_search_dithered", "clover_shifted",
    "clover_shifted_feedback", "quartet",
)  # fmt: skip
REMOVED_AFTER = "880d786"


def method_names() -> tuple[str, ...]:
    """Every name that QAT_METHOD accepts."""
    return (*METHOD_TABLE, *ALIASES)


def removed() -> str:
    """What to say of a method that was removed."""
    return f"was measured, lost and removed; the last commit that trains with it is {REMOVED_AFTER}"


def get_recipe(method: str | Recipe) -> Recipe:
    """The Recipe of a method name; a Recipe is returned as it is. Raises ValueError with the known names."""
    if isinstance(method, Recipe):
        return method
    name = ALIASES.get(method, method)
    if name in REMOVED:
        raise ValueError(f"method {name!r} {removed()}")
    if name not in METHOD_TABLE:
        raise ValueError(f"unknown method {method!r}; use one of: {', '.join(method_names())}")
    return METHOD_TABLE[name]
