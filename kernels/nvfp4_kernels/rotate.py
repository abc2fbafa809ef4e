"""Makes the operands of the backward GEMMs: rotates a tensor along the contraction dimension and quantizes it.

The input is grad_output (BF16 or FP32), or the 4-bit codes of an operand. One launch makes the operand that is
contracted over the columns ("row"), the operand that is contracted over the rows ("col"), or both. From grad_output,
row is dgrad's E and col is wgrad's E^T. From codes, col is dgrad's W^T or wgrad's X^T. Tensor cores rotate, by one
matrix product. MS-EDEN reads and rotates nothing twice, by post hoc range alignment (the paper, Section 7).

There are three kinds of output:

* EDEN           Codes, pseudo-scales (E8M3, stored as BF16), EDEN's correction S for each group of 128, and the amax.
                 `scales.finish` makes the E4M3 scales afterwards.
* EDEN_EMULATED  The finished operand in BF16, with its tensor_scale multiplied in, in the same pass. This is possible
                 because tensor_scale is a power of two: above E4M3's subnormal range, the rounding of S times a
                 pseudo-scale does not depend on it. `scales.repair` rounds the blocks in the subnormal range again. In
                 a tile without such blocks it only has to read the scales.
* ALIGNED        Codes and scales, or the BF16 values, of roundings that need tensor_scale first (SR, RTN). A launch of
                 kind AMAX finds the amax before.

Several processes may have parts of a tensor whose ALIGNED operands need the amax of all parts. The function `largest`,
which is passed to `rotate_quantize`, finds it.
"""

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton

from nvfp4_kernels import _math as m
from nvfp4_kernels._ops import NO_FUSION, empty_scales, operator
from nvfp4_kernels.quantize import hardware
from nvfp4_kernels.rotate_kernel import (
    ALIGNED,
    AMAX,
    EDEN,
    EDEN_EMULATED,
    TILE,
    Buffers,
    Constants,
    rotate_quantize_kernel,
)
from nvfp4_kernels.scales import finish, repair, tensor_scale_kernel


@functools.cache
def _launch_options() -> dict:
    """Returns the options of a launch: warps, stages and the largest number of registers of a thread.

    With 128 registers four programs fit a multiprocessor, so that three compute while one waits for memory. On sm_12x
    the compiler would spill with 128. Without a limit three programs fit there."""
    arch = 90 if m.INTERPRETED.value else triton.runtime.driver.active.get_current_target().arch
    return {"num_warps": 4, "num_stages": 1, "maxnreg": None if arch // 10 == 12 else 128, **NO_FUSION}


def programs_of(kernel: Any, device: torch.device) -> int:
    """Returns how many programs of a compiled kernel the GPU holds at once, rounded down to a multiple of 4.

    Strips are dealt out before the launch, so programs of a second wave would run alone. In the interpreter there is no
    compiled kernel, and the number is 4."""
    if kernel is None:
        return 4
    kernel.run  # noqa: B018 - it loads the kernel, and so finds out its registers
    gpu = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    # Registers are given out by 8, and each program takes 1 KiB of shared memory more. Tensor memory has 512 columns.
    of_registers = gpu["max_num_regs"] // (32 * kernel.metadata.num_warps * (-(-kernel.n_regs // 8) * 8))
    of_shared_memory = (gpu["max_shared_mem"] + 1024) // (kernel.metadata.shared + 1024)
    of_tensor_memory = 512 // (getattr(kernel.metadata, "tmem_size", None) or 1)
    resident = min(of_registers, of_shared_memory, of_tensor_memory)
    return max(resident * gpu["multiprocessor_count"] // 4 * 4, 4)


@functools.cache
def rotates_by_butterflies() -> bool:
    """Returns True if H is computed by a 16 x 16 product and butterflies instead of a 128 x 128 product. This is so in
    the interpreter and on GPUs without the instructions wgmma (sm_90) and tcgen05 (sm_100 to sm_110)."""
    return m.INTERPRETED.value or triton.runtime.driver.active.get_current_target().arch // 10 not in (9, 10, 11)


@functools.cache
def _hadamard(dim: int, butterflies: bool, device: torch.device) -> torch.Tensor:
    """Returns Sylvester's Hadamard matrix of order dim, repeated along the diagonal up to 128: BF16 (128, 128). Its
    columns are permuted to the order that `rotate_kernel._blocks` undoes.

    With butterflies the matrix is (16, 16), for the bits 6, 5, 4 and 0 of the row and the column.
    """
    # Column c of a tensor-core accumulator holds element (c // 8 % 8) * 2 + c % 2 of block c // 2 % 4 * 2 + c // 64.
    k, c = torch.arange(TILE)[:, None], torch.arange(TILE)[None, :]
    j = (c // 2 % 4 * 2 + c // 64) * 16 + c // 8 % 8 * 2 + c % 2
    if butterflies:
        k, c = k[:16], c[:, :16]
        k, j = k // 2 * 16 + k % 2, (c // 2 % 4 * 2 + c // 8) * 16 + c % 2
    parity = sum(((k & j) >> bit) & 1 for bit in range(dim.bit_length() - 1)) % 2
    return ((1 - 2 * parity) * (k // dim == j // dim)).to(torch.bfloat16).to(device)


class RotatedOperand(NamedTuple):
    """Describes an operand to make: the fields of roundings.Rounding, its rotation and its streams of random numbers.

    rht_dim:   the size of the rotation, or 0 for none
    emulated:  the operand is made in BF16, for a GEMM that decodes, instead of codes and scales
    tiles:     the scales of an operand that is not emulated are in tiles of 128x4, flat (format.swizzle_scales)
    """

    grid_max: float = 6.0
    scale_cap: float = 448.0
    candidates: tuple[float, ...] = (1.0,)
    stochastic: bool = False
    ms_eden: bool = False
    rht_dim: int = 128
    stream: int = 0
    rht_stream: int = 0
    emulated: bool = True
    tiles: bool = False

    def padded(self, contraction: int) -> int:
        """Returns the contraction dimension rounded up to a multiple of the rotation, or of 16 without a rotation."""
        multiple = self.rht_dim or 16
        return -(-contraction // multiple) * multiple

    @property
    def divisor(self) -> float:
        """The largest product of a code and a block scale. amax divided by it is the tensor_scale."""
        return self.grid_max * self.scale_cap


@functools.cache
def constants_of(operand: RotatedOperand | None, columns: int, amax_only: bool) -> Constants | None:
    """Returns the kernel's compile-time arguments for one operand. It returns None if there is no operand, and for
    MS-EDEN in a launch that only finds the amax, because MS-EDEN finds its amax while it rounds. `columns` is the
    operand's padded contraction dimension.
    """
    if operand is None or (amax_only and operand.ms_eden):
        return None
    o = operand
    kind = AMAX if amax_only else (EDEN_EMULATED if o.emulated else EDEN) if o.ms_eden else ALIGNED
    return Constants(
        KIND=kind.value,
        RHT_DIM=o.rht_dim,
        NORM=float(o.rht_dim) ** -0.5 if o.rht_dim else 1.0,
        DIVISOR=o.divisor,
        GRID_MAX=o.grid_max,
        INVERSE=m.inverse(o.grid_max),
        CANDIDATES=o.candidates,
        STOCHASTIC=o.stochastic,
        STORE_CODES=not o.emulated and not amax_only,
        PADDING=0 if columns % TILE == 0 else o.rht_dim or 16,
        TILES=o.tiles and not o.emulated,
    )


def _empty(operand: RotatedOperand, rows: int, contraction: int, x: torch.Tensor) -> list[torch.Tensor]:
    """Allocates the tensors of one operand (R, K), where K is padded.

    The first one is for codes, uint8 (R, K/2), or for BF16 values (R, K) if the operand is emulated. For MS-EDEN follow
    pseudo-scales BF16 (R, K/16) and S float32 (R, K/128). For other roundings follow the scales of the codes,
    float8_e4m3fn (R, K/16) or flat in tiles, unless the operand is emulated, and tensor_scale float32 ().
    """
    k = operand.padded(contraction)
    empty = functools.partial(torch.empty, device=x.device)
    if operand.emulated:
        values = empty(rows, k, dtype=torch.bfloat16)
    else:
        values = empty(rows, k // 2, dtype=torch.uint8)
    if operand.ms_eden:
        pseudo = empty(rows, k // 16, dtype=torch.bfloat16)
        return [values, pseudo, empty(rows, -(-k // TILE), dtype=torch.float32)]
    tensor_scale = empty((), dtype=torch.float32)
    if operand.emulated:
        return [values, tensor_scale]
    return [values, empty_scales(rows, k // 16, operand.tiles, x).view(torch.float8_e4m3fn), tensor_scale]


class _Side(NamedTuple):
    """One operand of inputs of one shape, with everything that is the same in all of its launches."""

    operand: RotatedOperand
    rows: int
    contraction: int
    hadamard: torch.Tensor | None
    constants: Constants
    constants_for_amax: Constants | None


class _Launches(NamedTuple):
    """How the kernel is launched for inputs of one shape and kind.

    strips:   the number of strips of one operand
    programs: the number of programs, which the first launch finds, by whether it only finds the amax
    """

    sides: tuple[_Side | None, _Side | None]
    needs_amax: bool
    strips: int
    programs: dict[bool, int]
    options: dict[str, Any]
    butterflies: bool


@functools.lru_cache(maxsize=1024)  # It is limited, because conversations have any number of tokens.
def launches_of(
    row: str, col: str, rows: int, columns: int, of_codes: bool, butterflies: bool, device: torch.device
) -> _Launches:
    """Returns the launches for an input of this shape. row and col are the arguments of the operators. of_codes says
    whether the input is codes. Raises ValueError for operands that the kernel cannot make."""
    if (of_codes and row) or (col and not _operand(col).rht_dim):
        raise ValueError("nvfp4::rotate_quantize: a col operand must be rotated, and codes are requantized as col only")
    sides: list[_Side | None] = []
    for text, r, k in ((row, rows, columns), (col, columns, rows)):
        if not text:
            sides.append(None)
            continue
        operand = _operand(text)
        padded = operand.padded(k)
        hadamard = None
        if operand.rht_dim:
            hadamard = _hadamard(operand.rht_dim, butterflies, device).view(torch.int16)
        constants = [constants_of(operand, padded, amax_only) for amax_only in (False, True)]
        sides.append(_Side(operand, r, k, hadamard, *constants))
    needs_amax = any(side and side.constants_for_amax for side in sides)
    strips = 2 * triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE)
    return _Launches(tuple(sides), needs_amax, strips, {}, _launch_options(), butterflies)


class _Input(NamedTuple):
    """An input in the form that the kernel takes, the seeds of both sides, and its launches."""

    x: torch.Tensor
    scales: torch.Tensor
    tensor_scale: torch.Tensor
    seeds: tuple[tuple[torch.Tensor | None, torch.Tensor | None], ...]
    launches: _Launches
    of_codes: bool
    of_tiles: bool

    @classmethod
    def of(cls, x, x_scales, x_tensor_scale, row, row_seed, row_rht_seed, col, col_seed, col_rht_seed) -> "_Input":
        """Makes the input from the arguments of the operators."""
        of_codes = x.dtype == torch.uint8
        x, (rows, columns) = x.contiguous(), x.shape
        columns = columns * 2 if of_codes else columns
        launches = launches_of(row, col, rows, columns, of_codes, rotates_by_butterflies(), x.device)
        scales, tensor_scale = (x_scales.view(torch.uint8), x_tensor_scale) if of_codes else (x, x)
        seeds = (row_seed, row_rht_seed), (col_seed, col_rht_seed)
        return cls(x, scales, tensor_scale, seeds, launches, of_codes, of_codes and x_scales.dim() == 1)

    def find_amax(self) -> torch.Tensor:
        """Returns the amaxes of row and col as the bits of float32, int32 (2,). An entry is 0 for MS-EDEN, which does
        not need the amax before it rounds, and for an operand that is not there."""
        amax = torch.zeros(2, dtype=torch.int32, device=self.x.device)
        if self.launches.needs_amax:
            self._launch(amax.unbind(), ([], []), amax_only=True)
        return amax

    def quantize(self, amax: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
        """Returns the tensors of `_empty` for row and for col, filled. `amax` holds the two numbers of find_amax. The
        kernel writes MS-EDEN's amaxes there."""
        sides = self.launches.sides
        made = [_empty(side.operand, side.rows, side.contraction, self.x) if side else [] for side in sides]
        self._launch(amax, made, amax_only=False)
        for side, tensors, own in zip(sides, made, amax):
            if side is not None and not side.operand.ms_eden:
                tensor_scale_kernel[(1,)](own, tensors[-1], side.operand.divisor, False, **NO_FUSION)
        return made

    def _launch(self, amax: tuple[torch.Tensor, ...], made: Sequence[list[torch.Tensor]], amax_only: bool) -> None:
        launches, (row, col) = self.launches, self.launches.sides
        buffers = [
            self._buffers(side, seeds, own, tensors)
            for side, seeds, own, tensors in zip(launches.sides, self.seeds, amax, made)
        ]
        columns = self.x.shape[1] * 2 if self.of_codes else self.x.shape[1]
        arguments = (self.x, self.scales, self.tensor_scale, self.x.shape[0], columns, *buffers)
        made_of = [side and (side.constants_for_amax if amax_only else side.constants) for side in (row, col)]
        settings = {
            "FROM_CODES": self.of_codes,
            "FROM_TILES": self.of_tiles,
            "FP32": self.x.dtype == torch.float32,
            "HARDWARE": hardware(),
            "BUTTERFLIES": launches.butterflies,
            "ROW": made_of[0],
            "COL": made_of[1],
            **launches.options,
        }
        kernel = rotate_quantize_kernel
        if amax_only not in launches.programs:
            compiled = None if m.INTERPRETED.value else kernel.run(*arguments, grid=(1,), warmup=True, **settings)
            most, strips = programs_of(compiled, self.x.device), launches.strips * (2 - made_of.count(None))
            launches.programs[amax_only] = min(strips, most)
        kernel[(launches.programs[amax_only],)](*arguments, **settings)

    def _buffers(self, side: _Side | None, seeds: tuple, amax: torch.Tensor, made: list[torch.Tensor]) -> Buffers:
        """Returns the kernel's tensors of one side. x is passed in the place of each tensor that the kernel does not
        use."""
        x = self.x
        if side is None:
            return Buffers(x, x, amax, x, x, x, x, x, 0, 0)
        operand = side.operand
        codes = scales = correction = decoded = x
        if made and operand.emulated:
            decoded = made[0]
        elif made and made[0].numel():  # Without rows nothing is written.
            codes = made[0].view(torch.int32)
        if made and operand.ms_eden:
            _, scales, correction = made
        elif made and not operand.emulated:
            scales = made[1].view(torch.uint8)
        seed, rht_seed = (x if s is None else s for s in seeds)
        hadamard = x if side.hadamard is None else side.hadamard
        return Buffers(
            hadamard, rht_seed, amax, seed, codes, scales, correction, decoded, operand.stream, operand.rht_stream
        )


def rotate_quantize(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    x_tensor_scale: torch.Tensor | None,
    row: RotatedOperand | None,
    row_seed: torch.Tensor | None,
    row_rht_seed: torch.Tensor | None,
    col: RotatedOperand | None,
    col_seed: torch.Tensor | None,
    col_rht_seed: torch.Tensor | None,
    largest: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Makes one or both operands of a tensor (R, C): "row", contracted over C, and "col", contracted over R.

    x:        BF16 or FP32 (R, C), or codes uint8 (R, C/2). Codes come with x_scales, float8_e4m3fn (R, C/16) or flat in
              tiles of 128x4, and with x_tensor_scale.
    row, col: the operands to make, or None for an operand that is not wanted
    seeds:    int64 (). The rht seeds are those of the rotation's signs.
    largest:  a function from the amaxes of row and col, float32 (2,), to those over all processes that have a part of
              the tensor, or None. MS-EDEN does not ask for it, because its scales are random anyway.
    Returns the tensors of row (R, C') and then those of col (C, R'). C' and R' are padded to a multiple of the
    rotation, or of 16. The tensors are
    * [codes uint8, scales float8_e4m3fn, tensor_scale] for an operand,
    * [decoded BF16, tensor_scale] for an emulated operand,
    * [decoded BF16] for an emulated MS-EDEN operand, with its tensor_scale multiplied in.
    Raises ValueError if x holds codes and row is wanted, and if col has no rotation.
    """
    arguments = x, x_scales, x_tensor_scale, text_of(row), row_seed, row_rht_seed, text_of(col), col_seed, col_rht_seed
    amax = None
    if largest is not None and not all(operand.ms_eden for operand in (row, col) if operand):
        amax = largest(rotated_amax(*arguments))
    return rotate_quantize_sides(*arguments, amax)


# ----------------------------------------------------------------------------------------------------------------------
# The operators. A schema cannot express a record, and each argument of an operator costs time in every call. An operand
# is therefore passed as its text, from which `_operand` makes the record again, once for all calls.


def text_of(operand: RotatedOperand | None) -> str:
    """Returns the text of an operand. An empty text stands for no operand."""
    return "" if operand is None else _text(tuple(operand))


@functools.lru_cache(maxsize=1024)
def _repr(fields: tuple) -> str:
    return repr(fields)


def _text(fields: tuple) -> str:
    return _repr(fields)


# torch.compile calls a function with this mark while it traces, and takes the result as a constant of the graph.
_text._dynamo_marked_constant = True


@functools.lru_cache(maxsize=1024)
def _operand(text: str) -> RotatedOperand:
    return RotatedOperand(*ast.literal_eval(text))


_SIDES = ", ".join(f"str {s}, Tensor? {s}_seed, Tensor? {s}_rht_seed" for s in ("row", "col"))
_INPUT = f"Tensor x, Tensor? x_scales, Tensor? x_tensor_scale, {_SIDES}"


@operator(f"rotated_amax({_INPUT}) -> Tensor")
def rotated_amax(*arguments) -> torch.Tensor:
    """Returns the amaxes of row and col after their rotations, float32 (2,). An entry is 0 for an MS-EDEN operand and
    for an operand that is not there."""
    return _Input.of(*arguments).find_amax().view(torch.float32)


@rotated_amax.register_fake
def _(x, *arguments):
    return x.new_empty(2, dtype=torch.float32)


@operator(f"rotate_quantize_sides({_INPUT}, Tensor? amax) -> Tensor[]")
def rotate_quantize_sides(*arguments) -> list[torch.Tensor]:
    """The operator of rotate_quantize. amax is the result of rotated_amax, or of `largest`. It is found if it is
    None."""
    *arguments, amax = arguments
    given = _Input.of(*arguments)
    amax = (given.find_amax() if amax is None else amax.view(torch.int32).clone()).unbind()
    result, repaired = [], [None, None]
    for i, (side, seeds, tensors, own) in enumerate(zip(given.launches.sides, given.seeds, given.quantize(amax), amax)):
        if side is not None and side.operand.ms_eden and side.operand.emulated:
            repaired[i] = (*tensors, own, seeds[0], side.operand)
            tensors = tensors[:1]
        elif side is not None and side.operand.ms_eden:
            tensors = [tensors[0], *finish(*tensors[1:], own, seeds[0], side.operand)]
        result += tensors
    if any(repaired):
        repair(*repaired)
    return result


@rotate_quantize_sides.register_fake
def _(x, x_scales, x_tensor_scale, row, row_seed, row_rht_seed, col, *others):
    rows, columns = x.shape[0], x.shape[1] * (2 if x.dtype == torch.uint8 else 1)
    result = []
    for text, r, c in ((row, rows, columns), (col, columns, rows)):
        if not text:
            continue
        operand = _operand(text)
        values, *scales_of = _empty(operand, r, c, x)
        if operand.ms_eden and operand.emulated:
            scales_of = []
        elif operand.ms_eden:
            scales = empty_scales(*scales_of[0].shape, operand.tiles, scales_of[0])
            scales_of = [scales.view(torch.float8_e4m3fn), scales_of[1].new_empty(())]
        result += [values, *scales_of]
    return result
