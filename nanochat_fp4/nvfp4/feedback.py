"""Error feedback (GPTQ): a weight is rounded so that the error of the layer's output is small, not that of the weight.

With S = E[x x^T], the Gram matrix of the layer's inputs, the output's error E |(W - Q) x|^2 is tr((W - Q) S (W - Q)^T).
Rounding to nearest minimizes |W - Q|^2, as if S were the identity. Here blocks of 16 columns are rounded one after the
other, and each block first takes over what the errors of the blocks before it can be made up for with:

    S + damping = R R^T, R upper triangular        T = R blockdiag(R)^-1, in blocks of 16 x 16
    Q_b = round(W_b + (W - Q)_{<b} T_{<b, b})

This is GPTQ (Frantar et al., 2023) in the form of LDLQ (Chee et al., 2023, QuIP), in blocks of one NVFP4 scale: a
block's scale is chosen after the feedback. The errors of the weights grow where the inputs hardly reach, so the damping
keeps an eye on |W - Q|^2, which is what a gradient that goes back through the weight sees.

The feedback can push a block beyond the tensor's amax. Its scale then uses the room above scale_cap, and what is beyond
the largest scale is clipped and fed back like any other error.
"""

from collections.abc import Sequence

import torch

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.format import BLOCK, E2M1_MAX, E4M3_MAX, TENSOR_SCALE_MIN, NVFP4Tensor, encode_e2m1, pack
from nanochat_fp4.nvfp4.quantizers import Rounding, _round_block_scale, _search, divide

COLUMNS = 128  # that are rounded before what they missed reaches all after them
DAMPING = 0.3  # in units of the mean of S's diagonal


@torch.no_grad()
def feedback_factor(gram: torch.Tensor) -> torch.Tensor:
    """S (K, K) float32, K % 16 == 0 -> the strictly block upper triangular part of T, (K, K) float32.

    Zeros, that is no feedback, where S + damping has no Cholesky factor: S is zero, or not finite. No host sync.
    """
    blocks = gram.shape[0] // BLOCK
    damped = gram.clone()
    damped.diagonal().add_(DAMPING * gram.diagonal().mean())
    lower, info = torch.linalg.cholesky_ex(damped.flip(0, 1))
    upper = lower.flip(0, 1)
    columns = upper.view(-1, blocks, BLOCK).transpose(0, 1)  # (G, K, 16)
    diagonal = columns.view(blocks, blocks, BLOCK, BLOCK).diagonal().permute(2, 0, 1)  # (G, 16, 16)
    t = torch.linalg.solve_triangular(diagonal, columns, upper=True, left=False).transpose(0, 1)
    before = torch.arange(blocks, device=t.device)
    keep = (before[:, None] < before).repeat_interleave(BLOCK, 0).unsqueeze(-1)  # (K, G, 1)
    keep = keep & (info == 0) & torch.isfinite(t).all()
    return torch.where(keep, t, 0.0).reshape(gram.shape)


@torch.no_grad()
def round_with_feedback(
    weights: torch.Tensor, factors: Sequence[torch.Tensor], spec: Rounding, amaxes: torch.Tensor | None = None
) -> list[NVFP4Tensor]:
    """weights (L, N, K) FP32 or BF16, L factors (K, K) of feedback_factor -> an NVFP4Tensor (N, K) for each of the L.

    What blocks of columns get from those more than COLUMNS before is one product for all of COLUMNS: what was missed in
    all columns so far, the largest thing there is to read, is read once for eight blocks and not for each.

    spec: with blocks of 1x16, drawing no random numbers. amaxes (L,): of the tensors that the weights are rows of,
    where they are not all of them. Each weight has the tensor_scale that quantize gives it; with factors of zeros the
    result is quantize's, to the bit.
    """
    layers, rows, columns = weights.shape
    weights = weights.float()
    limit = spec.grid_max * spec.scale_cap
    amaxes = weights.abs().amax((1, 2)) if amaxes is None else amaxes
    tensor_scale = divide(amaxes, limit).clamp(min=TENSOR_SCALE_MIN)
    u = weights * (1.0 / tensor_scale).view(-1, 1, 1)
    one = torch.full((), limit, device=u.device)  # the amax with which tensor_scale is 1
    missed = torch.empty_like(u)  # W - Q
    codes, scales = [], []
    with torch.autocast(u.device.type, enabled=False):
        for start in range(0, columns, COLUMNS):
            end = min(start + COLUMNS, columns)
            factor = torch.stack([f[:end, start:end] for f in factors]).float()
            group = u[..., start:end]
            if start:
                group = torch.baddbmm(group, missed[..., :start], factor[:, :start])
            for done in range(start, end, BLOCK):
                block = slice(done, done + BLOCK)
                wanted = group[..., done - start : done - start + BLOCK]
                if done > start:
                    near = factor[:, start:done, done - start : done - start + BLOCK]
                    wanted = torch.baddbmm(wanted, missed[..., start:done], near)
                wanted = wanted.clamp(-E2M1_MAX * E4M3_MAX, E2M1_MAX * E4M3_MAX)
                code, scale, values = _round_blocks(wanted.reshape(-1, BLOCK), spec, one)
                torch.sub(u[..., block], values.view(layers, rows, BLOCK), out=missed[..., block])
                codes.append(code.view(layers, rows, -1))
                scales.append(scale.view(layers, rows, 1).view(torch.uint8))  # older releases cannot join E4M3 tensors
    codes, scales = torch.cat(codes, -1), torch.cat(scales, -1).view(torch.float8_e4m3fn)
    return [NVFP4Tensor(codes[i], scales[i], tensor_scale[i].clone()) for i in range(layers)]


def _round_blocks(u: torch.Tensor, spec: Rounding, one: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """u (R, 16) float32, in units of tensor_scale -> codes (R, 8), E4M3 scales (R, 1), values code * scale (R, 16)."""
    if use_kernels(u.device):
        from nvfp4_kernels.quantize import quantize

        constants = (spec.grid_max, spec.scale_cap, list(spec.candidates), False, spec.block_rows)
        codes, scales, _, values = quantize(u, one, None, 0, *constants, True)
        return codes, scales, values
    q, scale = _search(u.unsqueeze(1), spec, _round_block_scale(spec))
    return pack(encode_e2m1(q.squeeze(1))), scale.to(torch.float8_e4m3fn), q.squeeze(1) * scale
