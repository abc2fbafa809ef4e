"""The records that describe a method: a Recipe has three Gemms, and a Gemm has two Operands.

A linear layer has three GEMMs and six operands. Each operand is contracted over its last dimension:

    output       Y  = X   . W^T       input (tokens, in)        weight (out, in)          contraction over in_features
    grad_input   dX = E   . W         grad_output (tokens, out) weight^T (in, out)        contraction over out_features
    grad_weight  dW = E^T . X         grad_output^T (out, tok.) input^T (in, tokens)      contraction over tokens

For each operand, a Recipe says how it is rounded (one of roundings.ROUNDINGS, or None for no rounding) and from which
tensor it is made. For each GEMM, the Recipe says whether both operands are first rotated along the contraction
dimension by a random Hadamard transform (RHT). Both operands of a GEMM are rotated with the same signs, because only
then does the rotation cancel in the product. The signs are drawn anew in every backward pass.

By default the backward GEMMs use the values that the forward GEMM used: the dequantized 4-bit codes of input and
weight. By the chain rule, the results are then the gradients of the quantized forward.

The table of the methods is in methods.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import FunctionType
from typing import Any

from nanochat_fp4.nvfp4.hadamard import RHT_DIM
from nanochat_fp4.nvfp4.identity import PYTHON, identity
from nanochat_fp4.nvfp4.roundings import OF_THE_PACKAGE, ROUNDINGS, Rounding, get_rounding

RHT_DIMS = (0, 16, 32, 64, 128)
# The six operands, two of each GEMM. The number of an operand is also the number of its random stream, so that no two
# operands share noise.
INPUT, WEIGHT, GRAD_OUTPUT, WEIGHT_T, GRAD_OUTPUT_T, INPUT_T = range(6)


@dataclass(frozen=True)
class Operand:
    """How one operand of a GEMM is rounded.

    rounding: One of ROUNDINGS, or its name. With None the operand is not rounded: a backward GEMM takes the value that
              the forward GEMM used, or grad_output itself.
    raw:      If true, the operand is made of the unquantized tensor, although the forward GEMM used a quantized one.
              It is quantized during the forward pass, so that only codes are kept. This is for the input and the weight
              in the backward GEMMs only.
    kept:     One of ROUNDINGS, or its name. The forward GEMM multiplies the operand in FP8, and the backward pass takes
              4-bit codes of the same unquantized tensor with this rounding. This is for the input and the weight in the
              output GEMM only, if their rounding is FP8 with one scale.

    Raises ValueError for an unknown rounding.

    >>> print(nf.Operand("sr"), nf.Operand("rtn", raw=True), nf.Operand())
    sr raw rtn -
    """

    rounding: Rounding | str | None = None  # A name becomes its row.
    raw: bool = False
    kept: Rounding | str | None = None

    def __post_init__(self) -> None:
        for name in ("rounding", "kept"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, get_rounding(getattr(self, name)))

    def __str__(self) -> str:
        text = ("raw " if self.raw else "") + (self.rounding.label if self.rounding else "-")
        return text + (f", {self.kept.label} kept" if self.kept else "")


@dataclass(frozen=True)
class Gemm:
    """The two operands of one GEMM, in the order of the table at the top of this file, and the rotation of both.

    rht_dim:     the size of the groups along the contraction dimension that the RHT rotates: 16, 32, 64 or 128. With 0
                 nothing is rotated.
    fixed_signs: if true, the whole run uses one sign vector, as NVIDIA's own recipe does. Otherwise each backward pass
                 draws a new one.
    random:      whether a product depends on a seed, which follows from the others

    >>> print(nf.Gemm(nf.Operand("ms_eden"), nf.Operand("ms_eden"), rht_dim=128))
    ms_eden x ms_eden, RHT-128
    """

    a: Operand = field(default_factory=Operand)
    b: Operand = field(default_factory=Operand)
    rht_dim: int = 0
    fixed_signs: bool = False
    random: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rounds = any(o.rounding.random for o in (self.a, self.b) if o.rounding)
        object.__setattr__(self, "random", rounds or (self.rht_dim > 0 and not self.fixed_signs))

    def __str__(self) -> str:
        return f"{self.a} x {self.b}" + (f", RHT-{self.rht_dim}" if self.rht_dim else "")


@dataclass(frozen=True, repr=False)
class Recipe:
    """A method: one Gemm for each of the three products of a linear layer. `quantizes` says whether any operand is
    quantized, and in_features and out_features must be multiples of `block`.

    Raises ValueError for a combination that would train something else than it says.

    >>> weights_only = nf.Recipe("weights_only", output=nf.Gemm(b=nf.Operand("four_over_six")))
    >>> nf.QuantLinear(32, 16, method=weights_only)(torch.randn(4, 32)).shape
    torch.Size([4, 16])
    >>> nf.Recipe("wrong", output=nf.Gemm(nf.Operand("ms_eden"), nf.Operand("ms_eden")))
    Traceback (most recent call last):
    ValueError: recipe 'wrong', output: ms_eden works on rotated operands; set rht_dim=128 and quantize both
    """

    name: str
    output: Gemm = field(default_factory=Gemm)
    grad_input: Gemm = field(default_factory=Gemm)
    grad_weight: Gemm = field(default_factory=Gemm)
    # (fraction of a run's steps, the method from that step on). phases.MethodPlan makes the change.
    late: "tuple[float, Recipe] | None" = None
    # The share of a model's blocks, counted from its end, that convert leaves in BF16. At least one block is left.
    kept_blocks: float = 0.0
    summary: str = field(default="", compare=False)
    block: int = field(default=0, init=False, compare=False)
    quantizes: bool = field(default=False, init=False, compare=False)

    def __post_init__(self) -> None:
        operands = [o for g in (self.output, self.grad_input, self.grad_weight) for o in (g.a, g.b)]
        object.__setattr__(self, "block", max((o.rounding.block for o in operands if o.rounding), default=0))
        object.__setattr__(self, "quantizes", self.block > 0)
        for problem in _problems(self):
            raise ValueError(f"recipe {self.name!r}{problem}")

    def problem_with_sizes(self, in_features: int, out_features: int) -> str | None:
        """Why a layer of these sizes cannot be computed with this recipe, or None."""
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if self.quantizes and size % self.block:
                return f"{name} is {size}, expected a multiple of {self.block}"
        return None

    @property
    def input_is_codes(self) -> bool:
        """Whether the input reaches the GEMMs only as NVFP4 codes, and the codes of a row depend only on the row and on
        the tensor's amax. Parts of such an input can be quantized separately."""
        rounding, raw = self.output.a.rounding, self.grad_weight.b.raw
        plain = rounding is not None and rounding.has_kernels and not rounding.random
        return plain and not (self.output.rht_dim or raw)

    @property
    def fixed_weight(self) -> bool:
        """Whether the forward rounds the weight alike in each pass, so that several passes can share its codes."""
        return bool(self.output.b.rounding) and not self.output.random

    @property
    def quantizes_backward(self) -> bool:
        """Whether any operand of a backward GEMM is quantized anew."""
        return any(o.rounding for g in (self.grad_input, self.grad_weight) for o in (g.a, g.b))

    @property
    def final(self) -> "Recipe":
        """The method at the end of a run. The trained model is evaluated and used with this method."""
        return self.late[1] if self.late else self

    def forward_only(self) -> "Recipe":
        """Returns a recipe with the same forward and an unquantized backward, as in the paper's post-training
        (Appendix C).

        If this recipe's grad_weight is made of the raw input, the result's grad_weight takes the raw input as well, as
        in Quartet II's code. If this recipe keeps 4-bit codes of an FP8 operand for its backward pass, the result keeps
        the FP8 operand itself.
        """
        late = self.late and (self.late[0], self.late[1].forward_only())
        output = replace(self.output, a=replace(self.output.a, kept=None), b=replace(self.output.b, kept=None))
        weight, x = (Operand(raw=raw) for raw in (self.output.rht_dim > 0, self.grad_weight.b.raw))
        return replace(self, output=output, grad_input=Gemm(b=weight), grad_weight=Gemm(b=x), late=late)

    def __repr__(self) -> str:
        backward = "backward in high precision"
        if self.quantizes_backward:
            backward = f"grad_input {self.grad_input}; grad_weight {self.grad_weight}"
        text = f"{self.name}: " + (f"output {self.output}; {backward}" if self.quantizes else "high precision")
        text += f"; the last {100 * self.kept_blocks:g}% of the blocks in BF16" if self.kept_blocks else ""
        return text + (f"; {self.late[1].name} from {100 * self.late[0]:.0f}% of the steps on" if self.late else "")


def _problems(recipe: Recipe) -> Iterator[str]:
    """Yields the contradictions with which a recipe would train something else than it says, and nothing would fail."""
    for name in ("output", "grad_input", "grad_weight"):
        gemm, is_output = getattr(recipe, name), name == "output"
        yield from (f", {name}: {problem}" for problem in _problems_of_gemm(gemm, is_output))
    if recipe.output.rht_dim and not (recipe.grad_input.b.raw and recipe.grad_weight.b.raw):
        yield ", output: a rotated forward keeps no values for the backward; set raw=True for its weight and input"
    if not 0 <= recipe.kept_blocks < 1 or (recipe.late and not 0 <= recipe.late[0] <= 1):
        yield ": kept_blocks and the beginning of late are fractions, from 0 to 1"


def _problems_of_gemm(gemm: Gemm, is_output: bool) -> Iterator[str]:
    operands = (gemm.a, gemm.b)
    roundings = [o.rounding for o in operands if o.rounding]
    if gemm.rht_dim not in RHT_DIMS:
        yield f"rht_dim is {gemm.rht_dim}, expected 0, 16, 32, 64 or 128"
    if gemm.rht_dim and len(roundings) < 2:
        yield "a rotation needs both operands quantized; set rht_dim=0 or give both a rounding"
    if any(r.ms_eden for r in roundings) and gemm.rht_dim != RHT_DIM:
        yield f"ms_eden works on rotated operands; set rht_dim={RHT_DIM} and quantize both"
    if gemm.a.raw or (gemm.b.raw and is_output):
        yield "raw only means something for input and weight in the backward GEMMs"
    for o in operands:
        if o.kept and not (is_output and o.rounding and o.rounding.fp8):
            yield "kept is for operands of output in FP8 with one scale; leave it out, or use e4m3"
        if o.kept and not (o.kept.has_kernels and not o.kept.random):
            yield f"kept is a rounding of NVFP4 that draws nothing; got {o.kept.label}"


def both(rounding: str, rht_dim: int = 0) -> Gemm:
    """Returns a Gemm whose two operands have the same rounding."""
    return Gemm(Operand(rounding), Operand(rounding), rht_dim)


# ----------------------------------------------------------------------------------------------------------------------
# Recipes as JSON. A checkpoint stores its recipe, so that it can be read without the file that registered the method.


def to_record(value: Any) -> Any:
    """Returns a Recipe as JSON data, with the fields that differ from their defaults.

    A rounding of the package is stored as its name. A row that a user has added to ROUNDINGS is stored in full, because
    the process that reads the record may not have the row. Its function is stored as its identity.
    """
    if isinstance(value, Rounding) and OF_THE_PACKAGE.get(value.name) == value:
        return value.name
    if is_dataclass(value):
        own = [f for f in fields(value) if f.init]
        required = {f.name for f in own if f.default is f.default_factory}  # both are MISSING
        plain = type(value)(**{name: getattr(value, name) for name in required})
        changed = (f.name for f in own if f.name in required or getattr(value, f.name) != getattr(plain, f.name))
        return {name: to_record(getattr(value, name)) for name in changed}
    if isinstance(value, tuple):
        return [to_record(item) for item in value]
    return identity(value) if callable(value) else value


def from_record(record: Mapping[str, Any]) -> Recipe:
    """Returns the Recipe that to_record has made `record` of. Raises ValueError if `record` describes no recipe, and
    LookupError if one of its roundings has a function that no row of ROUNDINGS has."""
    try:
        return Recipe(**{name: _field(name, value) for name, value in record.items()})
    except (AttributeError, KeyError, TypeError) as e:
        raise ValueError(f"this is no recipe of this version ({e})") from None


def _field(name: str, value: Any) -> Any:
    """The value of a field of a Recipe, a Gemm, an Operand or a Rounding that to_record has stored."""
    if isinstance(value, Mapping):
        kind = Rounding if name in ("rounding", "kept") else Operand if name in ("a", "b") else Gemm
        row = value.get("name")
        return kind(**{k: _function(v, row) if k == "quantize" else _field(k, v) for k, v in value.items()})
    if name == "late" and value:
        return float(value[0]), from_record(value[1])
    return tuple(value) if isinstance(value, list) else value


def _function(stored: str, row: str | None) -> FunctionType:
    # A record of before has the name alone, and digests of another version of Python say nothing. The row with the
    # record's name is then the first choice.
    name, _, digest = stored.partition(" ")
    whole = digest.startswith(PYTHON + " ")
    for known in sorted(ROUNDINGS.values(), key=lambda known: known.name != row):
        if (known.function if whole else known.function.partition(" ")[0]) == (stored if whole else name):
            return known.quantize
    raise LookupError(f"no row of ROUNDINGS has the function {name} as it was")
