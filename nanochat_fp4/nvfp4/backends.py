"""Dispatch: which implementation quantizes an operand on this machine, and why.

The reference (quantizers.py) runs everywhere; the Triton kernels, which are compared with it, take over on CUDA. The
environment variable NVFP4_KERNELS=reference|triton asks for one of them (on a CPU triton needs TRITON_INTERPRET=1);
what cannot run raises with the reason instead of falling back.
"""

import functools
import os
from dataclasses import dataclass

import torch

from nanochat_fp4.nvfp4 import native
from nanochat_fp4.nvfp4.format import BLOCK, NVFP4Tensor, TwoTerms
from nanochat_fp4.nvfp4.gemm import (
    Decoded,
    Value,
    cublas_unavailable_reason,
    decoded_codes,
    kernels_unavailable_reason,
)
from nanochat_fp4.nvfp4.hadamard import rotate
from nanochat_fp4.nvfp4.quantizers import Rounding, get_rounding, quantize_reference

OUTER_BLOCK = 128  # values along the contraction dimension that share a tensor_scale in Operand.outer


@dataclass(frozen=True)
class Backend:
    """What this machine uses for each operation; str() is one line for logs and the report."""

    quantize: str
    gemm: str
    reason: str

    def __str__(self) -> str:
        return f"quantize: {self.quantize}; GEMM: {self.gemm} ({self.reason})"


def backend() -> Backend:
    """Which kernels this machine uses, and why. On a Blackwell this runs the probe of its FP4 GEMMs (native.py).

    Raises ValueError if NVFP4_KERNELS or NVFP4_GEMM asks for what cannot run here.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kernels = use_kernels(device)
    name, why_not = native.choice(device.type)
    if device.type == "cpu":
        reason = "no CUDA device" + (", kernels under Triton's interpreter" if kernels else "")
        return Backend("Triton" if kernels else "PyTorch reference", "decode + FP32 matmul", reason)
    major, minor = torch.cuda.get_device_capability()
    reason = f"{torch.cuda.get_device_name()}, sm_{major}{minor}" + (f"; {why_not}" if why_not else "")
    if name:
        gemm = f"FP4 tensor cores ({name})"
    else:
        why = cublas_unavailable_reason()
        after = " with the tensor scales as alpha" if why is None else f", scaled after ({why})"
        gemm = f"decode to BF16 + cuBLAS{after}"
    return Backend("Triton" if kernels else "PyTorch reference", gemm, reason)


def use_kernels(device: torch.device) -> bool:
    """Whether operands on this device are quantized by the Triton kernels."""
    return _use_kernels(device.type)


@torch.compiler.assume_constant_result
def _use_kernels(device_type: str) -> bool:
    wanted = os.environ.get("NVFP4_KERNELS", "auto")
    if wanted not in ("auto", "reference", "triton"):
        raise ValueError(f"NVFP4_KERNELS is {wanted!r}, expected auto, reference or triton")
    reason = _kernels_unavailable_reason(device_type)
    if wanted == "triton" and reason:
        raise ValueError(f"NVFP4_KERNELS=triton, but {reason}; unset it, or set NVFP4_KERNELS=reference")
    return wanted == "triton" or (wanted == "auto" and reason is None and device_type == "cuda")


@functools.cache
def _kernels_unavailable_reason(device_type: str) -> str | None:
    reason = kernels_unavailable_reason()
    if reason:
        return reason
    if device_type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        return "the GPU is older than sm_80, which the kernels need for BF16"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no CUDA device (on a CPU they run under TRITON_INTERPRET=1)"
    return None


def new_seed(device: torch.device) -> torch.Tensor:
    """64 random bits from torch's generator of the device, int64 (): no host sync, fresh at each CUDA graph replay."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)


def quantize_operand(
    value: Value,
    rounding: str | None,
    *,
    terms: int = 1,
    outer: bool = False,
    transpose: bool = False,
    keep_codes: bool = False,
    seed: torch.Tensor | None = None,
    stream: int = 0,
    rht_dim: int = 0,
    rht_seed: torch.Tensor | None = None,
    rht_stream: int = 0,
    per_token: bool = False,
) -> Value:
    """One operand of a GEMM, contracted over its last dimension: value (R, C), or (C, R) with transpose.

    rounding None returns the value as it is (transposed). Otherwise the contraction dimension is padded with zeros to a
    multiple of 16, or of rht_dim: zeros add nothing to a product, and a rotated group that holds some is quantized like
    any other, so the result stays unbiased for any number of tokens.
    keep_codes: the codes will be saved; otherwise the kernels make only what the GEMM of this machine reads: codes on
    FP4 tensor cores, and the decoded BF16 operand elsewhere.
    terms: 2 for the sum of two quantized tensors: that of the value, and that of what it leaves of the value. A value
    of two terms is quantized, or returned with rounding None, as the FP32 tensor that it is.
    outer: a tensor_scale for each 128 values (recipes.Operand); the values, in BF16 on a GPU and in FP32 elsewhere.
    """
    if isinstance(value, TwoTerms):
        value = _float(value.first) + _float(value.rest)
    if terms == 2:
        one = {"keep_codes": keep_codes, "seed": seed, "stream": stream, "per_token": per_token}
        first = quantize_operand(value, rounding, **one)
        return TwoTerms(first, quantize_operand(value.float() - _float(first), rounding, **one))
    if rounding is None:
        return _transposed(value) if transpose else value
    spec = get_rounding(rounding)
    if outer:
        return _quantize_by_128(value, spec, transpose, seed, stream, rht_dim, rht_seed, rht_stream)
    device = value.codes.device if isinstance(value, NVFP4Tensor) else value.device
    if use_kernels(device) and spec.has_kernels and not (per_token and (rht_dim or spec.block_rows > 1)):
        if rht_dim and not (isinstance(value, NVFP4Tensor) and not transpose):
            arguments = {"rounding": rounding, "stream": stream, "rht_dim": rht_dim, "rht_stream": rht_stream}
            arguments |= {"seed": seed, "rht_seed": rht_seed}
            row, col = (None, arguments) if transpose else (arguments, None)
            emulated = not keep_codes and native.implementation(device.type) is None
            return _rotate_quantize(value, row, col, emulated)[1 if transpose else 0]
        if not rht_dim:
            return _quantize_rows(_contracted_last(value, transpose, BLOCK), spec, seed, stream, per_token)
    t = quantize_reference(
        _contracted_last(value, transpose, max(rht_dim, spec.block)),
        spec,
        seed=0 if seed is None else seed,
        stream=stream,
        rht_dim=rht_dim,
        rht_seed=rht_seed,
        rht_stream=rht_stream,
        per_token=per_token,
    )
    if spec.fp8 == "block":  # as in _quantize_by_128, the padding must not reach the backward pass's operands
        return _values(t, spec)[:, : value.shape[0 if transpose else 1]]
    return _values(t, spec) if spec.mx else t


def _float(t: NVFP4Tensor) -> torch.Tensor:
    """Its values, FP32 (R, K): exact products of code and scale, times tensor_scale, rounded once."""
    return decoded_codes(t).float() * t.tensor_scale


def _values(t: NVFP4Tensor, spec: Rounding) -> Value:
    """MXFP4, MXFP8 and FP8 in blocks exist to be compared with: no kernels, no GEMM of their own; their values are
    exact in BF16, but for those of FP8 in blocks, whose scales are FP32 numbers: these are rounded to it on a GPU."""
    values = t.decoded.to(torch.bfloat16) if t.decoded.is_cuda else t.decoded
    return values if spec.prescale == 1 else Decoded(values, t.tensor_scale)


def _quantize_by_128(
    value: NVFP4Tensor | torch.Tensor,
    spec: Rounding,
    transpose: bool,
    seed: torch.Tensor | None,
    stream: int,
    rht_dim: int,
    rht_seed: torch.Tensor | None,
    rht_stream: int,
) -> torch.Tensor:
    """The values of an operand each 128 of which have a tensor_scale: to the quantizers these are rows of their own."""
    x = _contracted_last(value, transpose, OUTER_BLOCK)
    if rht_dim:
        x = rotate(x, seed if rht_seed is None else rht_seed, dim=rht_dim, stream=rht_stream)
    rows = x.reshape(-1, OUTER_BLOCK)
    if use_kernels(x.device):
        t = _quantize_rows(rows, spec, seed, stream, per_token=True)
    else:
        t = quantize_reference(rows, spec, seed=0 if seed is None else seed, stream=stream, per_token=True)
    values = t.dequantize().view(x.shape)
    values = values.to(torch.bfloat16) if values.is_cuda else values
    # In the forward pass the padding must not reach the operands that the backward pass takes from this one.
    return values if rht_dim else values[:, : value.shape[0 if transpose else 1]]


def quantize_grad_output(e: torch.Tensor, for_dgrad: dict | None, for_wgrad: dict | None) -> tuple[Value, Value]:
    """grad_output (M, N) as the dgrad operand E (M, N) and as the wgrad operand E^T (N, M); None where not wanted.

    The arguments are those of quantize_operand. The kernels read grad_output once for both.
    """
    roundings = [a["rounding"] for a in (for_dgrad, for_wgrad) if a]
    if len(roundings) == 2 and len(set(roundings)) == 1 and roundings[0] and get_rounding(roundings[0]).fp8 == "tensor":
        quantized = quantize_operand(e, **for_dgrad)
        return quantized, _transposed(quantized)
    if len(roundings) == 2 and all(r and get_rounding(r).has_kernels for r in roundings) and use_kernels(e.device):
        if for_wgrad["rht_dim"] and not (for_dgrad.get("outer") or for_wgrad.get("outer")):
            return _rotate_quantize(e, for_dgrad, for_wgrad, native.implementation(e.device.type) is None)
    return (
        None if for_dgrad is None else quantize_operand(e, **for_dgrad),
        None if for_wgrad is None else quantize_operand(e, transpose=True, **for_wgrad),
    )


def _transposed(value: Value) -> Value:
    """The unrounded operand the other way round; of codes their exact values, with the tensor_scale beside them."""
    if isinstance(value, torch.Tensor):
        return value.T
    if value.is_fp8:  # FP8 tensor cores contract over the last dimension of both
        codes = value.codes.T.contiguous()
        return NVFP4Tensor(codes, codes.new_empty(codes.shape[0], 0), value.tensor_scale)
    return Decoded(decoded_codes(value).T, value.tensor_scale)


def _contracted_last(value: Value, transpose: bool, multiple: int) -> torch.Tensor:
    x = value.dequantize() if isinstance(value, NVFP4Tensor) else value
    x = x.T if transpose else x
    missing = -x.shape[-1] % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x  # pad copies even where it adds nothing


def _quantize_rows(
    x: torch.Tensor, spec: Rounding, seed: torch.Tensor | None, stream: int, per_token: bool
) -> NVFP4Tensor:
    from nvfp4_kernels.quantize import quantize

    constants = (spec.grid_max, spec.scale_cap, list(spec.candidates), spec.stochastic, spec.block_rows)
    decode = per_token or native.implementation(x.device.type) is None
    codes, scales, tensor_scale, decoded = quantize(x, None, seed, stream, *constants, decode, per_token)
    return NVFP4Tensor(codes, scales, tensor_scale, decoded if decode else None)


@torch.compiler.assume_constant_result
def _packed(rounding: str, stream: int, rht_dim: int, rht_stream: int, emulated: bool) -> list[float]:
    """The kernel's description of an operand."""
    from nvfp4_kernels.rotate import Operand

    spec = get_rounding(rounding)
    limits = (spec.grid_max, spec.scale_cap, spec.candidates)
    return Operand(*limits, spec.stochastic, spec.ms_eden, rht_dim, stream, rht_stream, emulated).packed()


def _rotate_quantize(value: Value, row: dict | None, col: dict | None, emulated: bool) -> tuple[Value, Value]:
    """The operands contracted over the last ("row") and over the first dimension ("col"), or None for either.

    row, col: arguments of quantize_operand; emulated: as Decoded, for the emulated GEMM alone.
    """
    from nvfp4_kernels.rotate import rotate_quantize

    arguments = (
        [value.codes, value.scales, value.tensor_scale] if isinstance(value, NVFP4Tensor) else [value, None, None]
    )
    for spec in (row, col):
        if spec is None:
            arguments += [[], None, None]
        else:
            packed = _packed(spec["rounding"], spec["stream"], spec["rht_dim"], spec["rht_stream"], emulated)
            arguments += [packed, spec["seed"], spec["rht_seed"]]
    tensors = rotate_quantize(*arguments)
    results: list[Value | None] = []
    for spec in (row, col):
        if spec is None:
            results.append(None)
        elif not emulated:
            results.append(NVFP4Tensor(*tensors[:3]))
            tensors = tensors[3:]
        elif get_rounding(spec["rounding"]).ms_eden:  # its tensor_scale is a power of two, and multiplied in
            results.append(Decoded(tensors[0]))
            tensors = tensors[1:]
        else:
            results.append(Decoded(tensors[0], tensors[1]))
            tensors = tensors[2:]
    return results[0], results[1]
