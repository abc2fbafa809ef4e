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

    What COLUMNS get from those before them is one product: what was missed in all columns so far, the largest thing
    there is to read, is read once for eight blocks and not for each. Within COLUMNS a kernel goes from block to block.

    spec: with blocks of 1x16, drawing no random numbers. amaxes (L,): of the tensors that the weights are rows of,
    where they are not all of them. Each weight has the tensor_scale that quantize gives it; with factors of zeros the
    result is quantize's, to the bit.
    """
    weights = weights.contiguous()
    layers, rows, columns = weights.shape
    amaxes = weights.abs().amax((1, 2)).float() if amaxes is None else amaxes
    tensor_scale = divide(amaxes, spec.grid_max * spec.scale_cap).clamp(min=TENSOR_SCALE_MIN)
    inverse = 1.0 / tensor_scale
    missed = weights.new_empty(layers, columns, rows, dtype=torch.float32)  # (W - Q)^T, in units of tensor_scale
    codes = weights.new_empty(layers, rows, columns // 2, dtype=torch.uint8)
    scales = weights.new_empty(layers, rows, columns // BLOCK, dtype=torch.uint8)
    round_group = _round_group
    if use_kernels(weights.device):
        from nvfp4_kernels.feedback import round_group
    with torch.autocast(weights.device.type, enabled=False):
        for start in range(0, columns, COLUMNS):
            end = min(start + COLUMNS, columns)
            factor = torch.stack([f[:end, start:end] for f in factors]).float()
            before = torch.bmm(missed[:, :start].mT, factor[:, :start])  # zeros where there is nothing before
            round_group(weights, inverse, before, factor, missed, codes, scales, start, spec.grid_max, spec.candidates)
    scales = scales.view(torch.float8_e4m3fn)
    return [NVFP4Tensor(codes[i], scales[i], tensor_scale[i].clone()) for i in range(layers)]


def _round_group(weights, inverse, before, factor, missed, codes, scales, start, grid_max, candidates) -> None:
    """What nvfp4_kernels.feedback.round_group does, whose docstring has shapes and dtypes. Each element gets what was
    missed before it in its group one column after the other, product and sum rounded for themselves."""
    layers, rows, _ = weights.shape
    limit = E2M1_MAX * E4M3_MAX
    spec = Rounding(grid_max, candidates=tuple(candidates))
    end = start + before.shape[2]
    near = factor[:, start:]
    u = weights[..., start:end].float() * inverse.view(-1, 1, 1)
    wanted = u + before
    for done in range(0, end - start, BLOCK):
        block = slice(done, done + BLOCK)
        x = wanted[..., block].clamp(-limit, limit)
        q, scale = _search(x.reshape(-1, 1, BLOCK), spec, _round_block_scale(spec))
        codes[..., (start + done) // 2 :][..., : BLOCK // 2] = pack(encode_e2m1(q.view(layers, rows, BLOCK)))
        scales[..., (start + done) // BLOCK] = scale.view(layers, rows).to(torch.float8_e4m3fn).view(torch.uint8)
        error = u[..., block] - (q * scale.unsqueeze(-1)).view(layers, rows, BLOCK)
        missed[:, start + done : start + done + BLOCK] = error.mT
        for k in range(BLOCK):
            wanted[..., done + BLOCK :] += error[..., k : k + 1] * near[:, done + k : done + k + 1, done + BLOCK :]
