"""The kinds of operand that a GEMM takes. A kind defines how an operand is kept for the backward pass and multiplied.

    Plain                   a tensor in a float dtype, which is cast to the layer's compute dtype when it is multiplied
    Codes                   4-bit codes and their scales (NVFP4)
    SquareCodes             codes whose scales belong to blocks of 16x16, so that they can be transposed
    Stacked                 codes, or tensors, of several weights, stacked one below the other
    FP8                     8-bit numbers with one scale
    FP8WithCodes            8-bit numbers for the forward product, and 4-bit codes for the backward pass
    Decoded                 the exact values of codes, for a product that follows at once, or of a user's own format

Every operand is a matrix (R, K), and a product contracts it over K, its last dimension. makers.py makes operands.

A kind has these methods and properties:
    tensors(), from_tensors(...)   the tensors to keep for the backward pass, and the operand made again from them
    multiplied                     the operand that a product multiplies
    matrix(dtype), tensor_scale    the two factors of an operand in a dense product
    on_tensor_cores(b, dtype, ...) the product with b, if tensor cores of this machine can compute it, or None
    for_backward()                 the operand that the backward pass uses: the codes of an FP8WithCodes, else itself
    source()                       the tensor to quantize again: FP32 or BF16 values, or codes that a kernel can read
    transposed()                   the same values, contracted over the other dimension, without another rounding
    depending_on(seed)             the same operand, in a form that a compiler takes for a function of the seed

To add a kind, write a class here and its maker in makers.py. linear.py and gemm.py know none of them by name.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch

from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.dispatch import (
    has_fp8_tensor_cores,
    kernels_unavailable_reason,
    native_gemm,
    use_kernels,
)
from nanochat_fp4.nvfp4.format import BLOCK, NVFP4Tensor, row_major_scales, transpose_square
from nanochat_fp4.nvfp4.gemm import Decoded, GemmOperand, Plain, TensorCoreProduct, after
from nanochat_fp4.nvfp4.roundings import Rounding


@dataclass
class Codes(NVFP4Tensor, GemmOperand):
    """NVFP4 codes, scales and tensor_scale: 4.5 bits an element."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.scales, self.tensor_scale

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns code * scale (R, K), which is exact: in BF16 on a GPU, and in FP32 on a CPU."""
        if not self.codes.is_cuda:
            return self.decode(torch.float32)
        if self.decoded is None and kernels_unavailable_reason() is None:
            from nvfp4_kernels.decode import decode

            return decode(self.codes, self.scales)
        return self.decode(torch.bfloat16)

    def source(self) -> torch.Tensor | NVFP4Tensor:
        # The kernels that quantize codes again can read only a single tensor_scale.
        return self.fp32() if self.tensor_scale.dim() else self

    def on_tensor_cores(self, b: GemmOperand, out_dtype: torch.dtype) -> TensorCoreProduct | None:
        if native_gemm(self.codes.device.type) is None:
            return None
        if isinstance(b, Stacked):
            b = b.joined  # This copies 4.5 bits an element. Decoding would write 16.
        name = isinstance(b, Codes) and dispatch.implementation(self, b)
        return dispatch.FP4Product(self, b, name) if name else None

    def transposed(self) -> GemmOperand:
        # Scales of rows cannot be applied after a product that contracts the rows, so they are multiplied in.
        per_token = self.tensor_scale.dim()
        return Plain(self.fp32().T) if per_token else Decoded(self.matrix(torch.float32).T, self.tensor_scale)

    def without_cache(self) -> "Codes":
        return replace(self, decoded=None)  # The decoded values take four times the memory of the codes.

    def row_major(self) -> "Codes":
        """Returns the same codes with row-major scales."""
        return replace(self, scales=row_major_scales(self.codes, self.scales))

    def fp32(self) -> torch.Tensor:
        """Returns the values code * scale * tensor_scale, float32 (R, K), rounded once."""
        return self.matrix(torch.float32).float() * self.tensor_scale

    def depending_on(self, seed: torch.Tensor) -> "Codes":
        # Both tensors are marked, because a kernel that decodes does not read tensor_scale, and a product of values
        # that are decoded already does not read the scales.
        return replace(self, scales=after(self.scales, seed), tensor_scale=after(self.tensor_scale, seed))


@dataclass
class SquareCodes(Codes):
    """Codes in which 16 neighbouring rows share their scales. Their columns therefore consist of blocks as well."""

    def transposed(self) -> GemmOperand:
        """Returns codes if FP4 tensor cores can multiply them, otherwise decoded values. Both are the same numbers."""
        device = self.codes.device
        if self.tensor_scale.dim() or self.codes.shape[0] % BLOCK or native_gemm(device.type) is None:
            return super().transposed()
        transpose = transpose_square
        if use_kernels(device):
            from nvfp4_kernels.decode import transpose_square as transpose
        return SquareCodes(*transpose(self.codes, self.scales), self.tensor_scale)


def codes_of(rounding: Rounding) -> type[Codes]:
    """Returns the kind of codes that this rounding makes: SquareCodes for blocks of 16x16, otherwise Codes."""
    return SquareCodes if rounding.block_rows == BLOCK else Codes


@dataclass
class Stacked(GemmOperand):
    """Several weights that are multiplied as one: Codes with a common tensor_scale, or Plain tensors. The parts stay in
    FSDP's buffers, because a copy would hold memory after FSDP has freed the buffers."""

    parts: tuple[GemmOperand, ...]
    codes_type: ClassVar[type[Codes]] = Codes

    @property
    def shape(self) -> torch.Size:
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    @staticmethod
    def of(parts: tuple[GemmOperand, ...]) -> "Stacked":
        return (SquareStacked if isinstance(parts[0], SquareCodes) else Stacked)(parts)

    @property
    def joined(self) -> GemmOperand:
        first = self.parts[0]
        if len(self.parts) == 1:
            return first
        if isinstance(first, Plain):
            return Plain(torch.cat([part.values for part in self.parts]))
        # Older releases of torch cannot join E4M3 tensors, so their bytes are joined.
        codes, scales = (
            torch.cat([t.view(torch.uint8) for t in some]) for some in zip(*(p.tensors()[:2] for p in self.parts))
        )
        return type(first)(codes, scales.view(first.scales.dtype), first.tensor_scale)

    @property
    def values(self) -> tuple[torch.Tensor, ...]:
        return tuple(part.values for part in self.parts)

    @property
    def exact(self) -> bool:
        return self.parts[0].exact

    @property
    def tensor_scale(self) -> torch.Tensor | None:
        return self.parts[0].tensor_scale

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors())

    @classmethod
    def from_tensors(cls, *tensors: torch.Tensor) -> "Stacked":
        kind, size = (cls.codes_type, 3) if tensors[0].dtype == torch.uint8 else (Plain, 1)
        return cls(tuple(kind(*tensors[i : i + size]) for i in range(0, len(tensors), size)))

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.joined.matrix(dtype)

    def source(self) -> torch.Tensor | NVFP4Tensor:
        return self.joined.source()

    def transposed(self) -> GemmOperand:
        return self.joined.transposed()

    def depending_on(self, seed: torch.Tensor) -> GemmOperand:
        return self.joined.depending_on(seed)


class SquareStacked(Stacked):
    """Several weights of SquareCodes that are multiplied as one."""

    codes_type = SquareCodes


@dataclass
class FP8(GemmOperand):
    """8-bit numbers, float8_e4m3fn or float8_e5m2 (R, K), with a tensor_scale, float32 (), or (R, 1) per token."""

    codes: torch.Tensor
    tensor_scale: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.codes, self.tensor_scale

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        return self.codes.to(torch.bfloat16 if self.codes.is_cuda else torch.float32)

    def source(self) -> torch.Tensor:
        return self.dequantize()

    def transposed(self) -> GemmOperand:
        if self.tensor_scale.dim():
            return Plain(self.dequantize().T)
        # FP8 tensor cores contract both operands over their last dimension, so the codes are moved.
        return FP8(self.codes.T.contiguous(), self.tensor_scale)

    def on_tensor_cores(self, b: GemmOperand, out_dtype: torch.dtype) -> TensorCoreProduct | None:
        if not (isinstance(b, FP8) and has_fp8_tensor_cores(self.codes.device.type)):
            return None
        pair = (self.codes, self.tensor_scale, b.codes, b.tensor_scale)
        return dispatch.FP8Product(*pair) if dispatch.takes_fp8(*pair) else None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (self.codes.to(torch.float32) * self.tensor_scale).to(dtype)

    def depending_on(self, seed: torch.Tensor) -> "FP8":
        return replace(self, tensor_scale=after(self.tensor_scale, seed))


@dataclass
class FP8WithCodes(GemmOperand):
    """8-bit numbers for the forward product, and 4-bit codes of the same tensor for the backward pass.

    The backward pass keeps only the codes, 4.5 bits an element, and not the 8-bit numbers.
    """

    numbers: FP8
    kept: Codes

    @property
    def multiplied(self) -> GemmOperand:
        return self.numbers

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return *self.numbers.tensors(), *self.kept.tensors()

    @classmethod
    def from_tensors(cls, *tensors: torch.Tensor) -> "FP8WithCodes":
        return cls(FP8(*tensors[:2]), Codes(*tensors[2:]))

    def for_backward(self) -> Codes:
        return self.kept

    def without_cache(self) -> "FP8WithCodes":
        return replace(self, kept=self.kept.without_cache())

    def depending_on(self, seed: torch.Tensor) -> "FP8WithCodes":
        return replace(self, numbers=self.numbers.depending_on(seed))


def stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the weights (N_i, K) stacked one below the other, (N, K)."""
    return weights[0] if len(weights) == 1 else torch.cat(weights)


class KeptOperand(NamedTuple):
    """The data, besides its tensors, from which an operand is made again in the backward pass.

    tensors is the number of the operand's tensors, and length is the number of contracted elements without padding.
    """

    kind: type[GemmOperand]
    tensors: int
    length: int


def tensors_of(*operands: GemmOperand | None) -> tuple[list[KeptOperand | None], list[torch.Tensor]]:
    """Takes operands apart for autograd. Returns a KeptOperand for each, and a list of all their tensors in order."""
    parts = [() if operand is None else operand.tensors() for operand in operands]
    kept = [None if o is None else KeptOperand(type(o), len(part), o.length) for o, part in zip(operands, parts)]
    return kept, list(itertools.chain.from_iterable(parts))


def operands_of(
    kept: Sequence[KeptOperand | None], tensors: Sequence[torch.Tensor | None]
) -> tuple[list[GemmOperand | None], list[torch.Tensor | None]]:
    """Makes the operands again that tensors_of has taken apart. Returns them, and the tensors that follow theirs."""
    rest = iter(tensors)
    operands = [
        None if one is None else one.kind.from_tensors(*itertools.islice(rest, one.tensors)).padded_from(one.length)
        for one in kept
    ]
    return operands, list(rest)
