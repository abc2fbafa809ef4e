"""Makes the operands of the backward GEMMs: rotates a tensor along the contraction dimension and quantizes it.

The input is grad_output (BF16 or FP32), or an operand of the forward pass: 4-bit codes, or E4M3 numbers. One launch
makes the operand that is contracted over the columns ("row"), the operand that is contracted over the rows ("col"), or
both. From grad_output, row is dgrad's E and col is wgrad's E^T. From an operand, col is dgrad's W^T or wgrad's X^T.
Tensor cores rotate, by one matrix product. MS-EDEN reads and rotates nothing twice, by post hoc range alignment (the
paper, Section 7).

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


@functools.cache
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


class _Side(NamedTuple):
    """One operand (R, K) of an input. K is padded."""

    operand: RotatedOperand
    rows: int
    contraction: int
    seed: torch.Tensor | None
    rht_seed: torch.Tensor | None

    def empty(self, device: torch.device) -> list[torch.Tensor]:
        """Allocates the operand's tensors.

        The first one is for codes, uint8 (R, K/2), or for BF16 values (R, K) if the operand is emulated. For MS-EDEN
        follow pseudo-scales BF16 (R, K/16) and S float32 (R, K/128). For other roundings follow the scales of the
        codes, float8_e4m3fn (R, K/16) or flat in tiles, unless the operand is emulated, and tensor_scale float32 ().
        """
        operand, rows, k = self.operand, self.rows, self.contraction
        empty = functools.partial(torch.empty, device=device)
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
        return [values, empty_scales(rows, k // 16, operand.tiles, values).view(torch.float8_e4m3fn), tensor_scale]

    def buffers(self, x: torch.Tensor, amax: torch.Tensor, made: list[torch.Tensor]) -> Buffers:
        """Returns the kernel's tensors. x is passed in the place of each tensor that the kernel does not use."""
        operand = self.operand
        hadamard = codes = scales = correction = decoded = x
        if operand.rht_dim:
            hadamard = _hadamard(operand.rht_dim, rotates_by_butterflies(), x.device).view(torch.int16)
        if made and operand.emulated:
            decoded = made[0]
        elif made and made[0].numel():  # Without rows nothing is written.
            codes = made[0].view(torch.int32)
        if made and operand.ms_eden:
            _, scales, correction = made
        elif made and not operand.emulated:
            scales = made[1].view(torch.uint8)
        seed, rht_seed = (x if s is None else s for s in (self.seed, self.rht_seed))
        streams = operand.stream, operand.rht_stream
        return Buffers(hadamard, rht_seed, amax, seed, codes, scales, correction, decoded, *streams)


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

    x:        BF16 or FP32 (R, C), float8_e4m3fn (R, C), or codes uint8 (R, C/2). Codes come with x_scales,
              float8_e4m3fn (R, C/16) or flat in tiles of 128x4, and both come with x_tensor_scale. If x is the gradient
              of relu(y)^2 in BF16 or FP32, x_scales may be kept, uint8 (R, C), and x_tensor_scale step, float32 (R, 1),
              of y (relu_squared.py). The operands are then those of the gradient of y, which is not written.
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
    if (row and x.dtype == torch.uint8) or (col and not col.rht_dim):
        raise ValueError("nvfp4::rotate_quantize: a col operand must be rotated, and codes are requantized as col only")
    sides = *(row or NONE), row_seed, row_rht_seed, *(col or NONE), col_seed, col_rht_seed
    amax = None
    if not all(operand.ms_eden for operand in (row, col) if operand):
        amax = rotated_amax(x, x_scales, x_tensor_scale, *sides)
        amax = amax if largest is None else largest(amax)
    return rotate_quantize_sides(x, x_scales, x_tensor_scale, *sides, amax)


# ----------------------------------------------------------------------------------------------------------------------
# The operators. A schema cannot express a record, so the arguments of an operand are its fields and its seeds.

NONE = RotatedOperand(candidates=())  # stands for an operand that is not wanted
_FIELDS = """float {0}_grid_max, float {0}_scale_cap, float[] {0}_candidates, bool {0}_stochastic, bool {0}_ms_eden,
    int {0}_rht_dim, int {0}_stream, int {0}_rht_stream, bool {0}_emulated, bool {0}_tiles,
    Tensor? {0}_seed, Tensor? {0}_rht_seed"""
_INPUT = f"Tensor x, Tensor? x_scales, Tensor? x_tensor_scale, {_FIELDS.format('row')}, {_FIELDS.format('col')}"


def _columns(x: torch.Tensor) -> int:
    return x.shape[1] * (2 if x.dtype == torch.uint8 else 1)


def _sides(x: torch.Tensor, fields: Sequence) -> list[_Side | None]:
    """Returns row and col of an input from the arguments of the operators that follow the input."""
    sides: list[_Side | None] = []
    half, rows, columns = len(fields) // 2, x.shape[0], _columns(x)
    for (*values, seed, rht_seed), r, k in ((fields[:half], rows, columns), (fields[half:], columns, rows)):
        operand = RotatedOperand(*values)
        operand = operand._replace(candidates=tuple(operand.candidates))
        sides.append(_Side(operand, r, operand.padded(k), seed, rht_seed) if operand.candidates else None)
    return sides


def _launch(
    x: torch.Tensor,
    x_scales: torch.Tensor | None,
    x_tensor_scale: torch.Tensor | None,
    sides: Sequence[_Side | None],
    amax: Sequence[torch.Tensor],
    made: Sequence[list[torch.Tensor]] | None = None,
) -> None:
    """Launches the kernel, which fills the tensors `made` of each side. Without them it only finds the amaxes."""
    of_codes, of_e4m3, columns = x.dtype == torch.uint8, x.dtype == torch.float8_e4m3fn, _columns(x)
    x = (x.view(torch.uint8) if of_e4m3 else x).contiguous()
    scales = x if x_scales is None else x_scales.view(torch.uint8)
    tensor_scale = x if x_tensor_scale is None else x_tensor_scale
    buffers, constants = [], []
    for side, own, tensors in zip(sides, amax, made or ([], [])):
        buffers.append(side.buffers(x, own, tensors) if side else Buffers(x, x, own, x, x, x, x, x, 0, 0))
        constants.append(constants_of(side.operand, side.contraction, made is None) if side else None)
    factors = x_scales is not None and not of_codes
    inputs = of_codes, of_codes and x_scales.dim() == 1, of_e4m3, factors, x.dtype == torch.float32
    settings = *inputs, hardware(), rotates_by_butterflies(), *constants
    arguments = (x, scales, tensor_scale, x.shape[0], columns, *buffers, *settings)
    compiled, options = None, _launch_options()
    if not m.INTERPRETED.value:
        compiled = rotate_quantize_kernel.run(*arguments, grid=(1,), warmup=True, **options)
    strips = 2 * -(-x.shape[0] // TILE) * -(-columns // TILE) * (2 - constants.count(None))
    grid = min(strips, programs_of(compiled, x.device)), 1, 1
    if compiled is None:
        rotate_quantize_kernel[grid](*arguments, **options)
    else:  # It is launched itself, because Triton would look it up again in 14 microseconds.
        compiled[grid](*arguments)


@operator(f"rotated_amax({_INPUT}) -> Tensor")
def rotated_amax(*arguments) -> torch.Tensor:
    """Returns the amaxes of row and col after their rotations, float32 (2,). An entry is 0 for an MS-EDEN operand and
    for an operand that is not there."""
    x, x_scales, x_tensor_scale, *fields = arguments
    amax = torch.zeros(2, dtype=torch.int32, device=x.device)
    _launch(x, x_scales, x_tensor_scale, _sides(x, fields), amax.unbind())
    return amax.view(torch.float32)


@rotated_amax.register_fake
def _(x, *arguments):
    return x.new_empty(2, dtype=torch.float32)


@operator(f"rotate_quantize_sides({_INPUT}, Tensor? amax) -> Tensor[]")
def rotate_quantize_sides(*arguments) -> list[torch.Tensor]:
    """The operator of rotate_quantize. amax is the result of rotated_amax, or of `largest`. MS-EDEN finds its own."""
    x, x_scales, x_tensor_scale, *fields, amax = arguments
    sides = _sides(x, fields)
    if amax is None:
        amax = torch.zeros(2, dtype=torch.int32, device=x.device)
    elif any(side and side.operand.ms_eden for side in sides):
        amax = amax.clone()  # The kernel writes MS-EDEN's amax there.
    amax = amax.view(torch.int32).unbind()
    made = [side.empty(x.device) if side else [] for side in sides]
    _launch(x, x_scales, x_tensor_scale, sides, amax, made)
    result, repaired = [], [None, None]
    for i, (side, tensors, own) in enumerate(zip(sides, made, amax)):
        if side is None:
            continue
        if not side.operand.ms_eden:
            tensor_scale_kernel[(1,)](own, tensors[-1], side.operand.divisor, False, **NO_FUSION)
        elif side.operand.emulated:
            repaired[i] = (*tensors, own, side.seed, side.operand)
            tensors = tensors[:1]
        else:
            tensors = [tensors[0], *finish(*tensors[1:], own, side.seed, side.operand)]
        result += tensors
    if any(repaired):
        repair(*repaired)
    return result


@rotate_quantize_sides.register_fake
def _(x, x_scales, x_tensor_scale, *fields):
    result = []
    for side in _sides(x, fields[:-1]):
        if side is None:
            continue
        values, *scales_of = side.empty(x.device)
        if side.operand.ms_eden and side.operand.emulated:
            scales_of = []
        elif side.operand.ms_eden:
            scales = empty_scales(*scales_of[0].shape, side.operand.tiles, scales_of[0])
            scales_of = [scales.view(torch.float8_e4m3fn), scales_of[1].new_empty(())]
        result += [values, *scales_of]
    return result
