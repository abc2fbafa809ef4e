"""Error feedback (GPTQ): rounds a weight so that the error of the layer's output is small, and not the weight's error.

S = E[x x^T] is the Gram matrix of the layer's inputs x. The mean square error of the output, E |(W - Q) x|^2, is
tr((W - Q) S (W - Q)^T). Rounding to nearest minimizes |W - Q|^2 instead, as if S were the identity. With feedback,
blocks of 16 columns are rounded one after the other. Before a block is rounded, a correction for the errors of all
earlier blocks is added to its weights:

    S + damping = R R^T, R upper triangular        T = R blockdiag(R)^-1, in blocks of 16 x 16
    Q_b = round(W_b + (W - Q)_{<b} T_{<b, b})

The method is GPTQ (Frantar et al., 2023) in the form of QuIP's LDLQ (Chee et al., 2023). A block is the group of values
that share an NVFP4 scale, and its scale is chosen after the correction. The weight's error grows in directions that the
inputs hardly reach. The gradient that goes back through the weight sees |W - Q|^2, however, so a damping term bounds
the weight's error.

The correction can push values of a block beyond the tensor's amax. The block's scale can then grow above scale_cap, up
to the largest E4M3 number. Values beyond that are clipped, and the clipping is corrected like any other error.

The Gram matrix of a layer's inputs (GPTQ's H) is state of the training and not of the model. A layer holds it beside
its parameters and buffers, so state dicts and `model.to(dtype)` do not contain it.
gram_matrices.update_gram_matrices measures the matrices, and gram_state and load_gram_state save and load them. They
are FP16. Their unit is the inputs' mean square, so that no entry is larger than K and FP16 cannot overflow.
docs/memory.md gives their size, and says why they are not divided into blocks of channels.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.format import (
    BLOCK,
    E2M1_MAX,
    E4M3_MAX,
    TENSOR_SCALE_MIN,
    TILE_COLUMNS,
    TILE_ROWS,
    NVFP4Tensor,
    encode_e2m1,
    pack,
    swizzle_scales,
)
from nanochat_fp4.nvfp4.quantizers import block_scale_rounding, divide, search_scales
from nanochat_fp4.nvfp4.roundings import Rounding

STEP = 0.2  # The step of the exponential average of Gram matrices, which averages over about five measurements.
COLUMNS = 128  # The number of columns that are rounded before their errors are passed to all later columns.
DAMPING = 0.3  # The damping that is added to the diagonal of S, in units of the diagonal's mean.


def products_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Returns the sum of x x^T over the rows x of a tensor (T, K), float32 (K, K)."""
    with torch.autocast(rows.device.type, enabled=False):
        rows = rows.float()
        return rows.T @ rows


def gram_matrix(mean: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the Gram matrix `before`, moved by STEP towards the mean of x x^T, float16 (K, K).

    mean is float32 (K, K). Without `before`, the result is the mean in units of its diagonal's mean. A mean that is not
    finite leaves `before` as it is, or gives zeros.
    """
    new = in_units_of_its_mean(mean)
    moved = new if before is None else before.float().lerp(new, STEP)
    return torch.where(torch.isfinite(mean).all(), moved, 0.0 if before is None else before).half()


def in_units_of_its_mean(gram: torch.Tensor) -> torch.Tensor:
    return gram / gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)


def factor_for(gram: torch.Tensor) -> torch.Tensor:
    """Returns the layer's feedback factor, float16 (K, K), from the Gram matrix that gram_matrix returns. The call does
    not synchronize with the host."""
    return feedback_factor(gram.float()).half()


def gram_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns the Gram matrices of the layers' inputs by the layers' names, each float16 (K, K). The dictionary is
    empty if the method uses no Gram matrices, and before the first update_gram_matrices.

    A run that is resumed needs this state besides the state dicts. Layers that read the same tensor share a matrix.
    They still share it after torch.save and torch.load.

    >>> nf.gram_state(nf.QuantLinear(32, 16, method="clover_feedback"))  # before update_gram_matrices
    {}
    """
    return {n: m.gram_matrix for n, m in model.named_modules() if getattr(m, "gram_matrix", None) is not None}


def load_gram_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Gives the layers the Gram matrices of `state`, which gram_state returned, on the device of their weights. The
    model may be converted before or afterwards.

    Raises ValueError if state is not a dictionary of tensors, or names a layer that the model does not have or whose
    in_features differ.

    >>> model = nf.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "four_over_six", verbose=False)
    >>> nf.load_gram_state(model, {"0": torch.eye(32)})
    >>> nf.gram_state(model)["0"].shape
    torch.Size([32, 32])
    """
    layers = dict(model.named_modules())
    if not isinstance(state, Mapping) or not all(isinstance(gram, torch.Tensor) for gram in state.values()):
        raise ValueError(
            f"load_gram_state: got {type(state).__name__}, expected what gram_state returned, tensors by name of layer"
        )
    for name, gram in state.items():
        size = getattr(layers.get(name), "in_features", None)
        if not isinstance(size, int) or not gram.is_floating_point() or gram.shape != (size, size):
            raise ValueError(
                f"load_gram_state: {name!r} has {str(gram.dtype).removeprefix('torch.')} {tuple(gram.shape)}, expected "
                + (f"float16 {(size, size)}" if isinstance(size, int) else "the name of a linear layer of this model")
            )
    for name, gram in state.items():
        set_gram_matrix(layers[name], gram)


def set_gram_matrix(layer: nn.Module, gram: torch.Tensor) -> None:
    """Gives a layer the Gram matrix of its inputs, (K, K): the float16 result of gram_matrix, or another dtype in any
    unit.

    A converted layer computes its feedback factor at once, if its recipe has feedback. Any other layer keeps the matrix
    until it is converted.
    """
    gram = gram.to(layer.weight.device)
    layer.gram_matrix = gram if gram.dtype == torch.float16 else in_units_of_its_mean(gram.float()).half()
    if hasattr(layer, "recipe"):
        wanted = layer.recipe.uses_feedback
        layer.feedback_factor = factor_for(layer.gram_matrix) if wanted else None


@torch.no_grad()
def feedback_factor(gram: torch.Tensor) -> torch.Tensor:
    """Returns the strictly block upper triangular part of T (see the top of this file), float32 (K, K), from S, float32
    (K, K), with K a multiple of 16.

    If S is zero or not finite, S + damping has no Cholesky factor. The result is then zero, which means no feedback.
    The call does not synchronize with the host.
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
    weights: torch.Tensor,
    factors: Sequence[torch.Tensor],
    spec: Rounding,
    amaxes: torch.Tensor | None = None,
    tiles: bool = False,
) -> list[NVFP4Tensor]:
    """Rounds L weights of the same shape with feedback and returns L NVFP4Tensors (N, K).

    weights: FP32 or BF16 (L, N, K)
    factors: L results of feedback_factor or factor_for, each (K, K)
    spec:    a rounding with blocks of 1x16 that draws no random numbers
    amaxes:  float32 (L,), the amaxes of the whole tensors, if the weights are some rows of larger tensors
    tiles:   whether the scales are laid out as swizzle_scales does

    Each weight has the tensor_scale that quantizers.quantize gives it. With factors of zeros the whole result has the
    bits of quantizers.quantize.

    The columns are rounded in groups of COLUMNS. One matrix product gives a group the errors of all columns before it,
    so that the errors, the largest tensor to read, are read once for eight blocks. Inside a group a kernel goes from
    block to block.
    """
    weights = weights.contiguous()
    layers, rows, columns = weights.shape
    amaxes = weights.abs().amax((1, 2)).float() if amaxes is None else amaxes
    tensor_scale = divide(amaxes, spec.grid_max * spec.scale_cap).clamp(min=TENSOR_SCALE_MIN)
    inverse = 1.0 / tensor_scale
    missed = weights.new_empty(layers, columns, rows, dtype=torch.float32)  # (W - Q)^T in units of tensor_scale
    codes = weights.new_empty(layers, rows, columns // 2, dtype=torch.uint8)
    kernels, round_group = use_kernels(weights.device), _round_group
    scales = _empty_scales(weights, tiles and kernels)
    if kernels:
        from nvfp4_kernels.feedback import round_group
    with torch.autocast(weights.device.type, enabled=False):
        for start in range(0, columns, COLUMNS):
            end = min(start + COLUMNS, columns)
            factor = torch.stack([f[:end, start:end] for f in factors]).float()
            before = torch.bmm(missed[:, :start].mT, factor[:, :start])  # zeros for the first columns
            round_group(weights, inverse, before, factor, missed, codes, scales, start, spec.grid_max, spec.candidates)
    scales = scales.view(torch.float8_e4m3fn)
    if tiles and not kernels:
        scales = torch.stack([swizzle_scales(s) for s in scales])
    return [NVFP4Tensor(codes[i], scales[i], tensor_scale[i].clone()) for i in range(layers)]


def _empty_scales(weights: torch.Tensor, tiles: bool) -> torch.Tensor:
    """Returns memory for the scales of weights (..., N, K): uint8 (..., N, K/16), or uint8 (..., size) for scales in
    tiles, whose padding must be zero."""
    *layers, rows, columns = weights.shape
    if tiles:
        count = -(-rows // TILE_ROWS) * -(-columns // (TILE_COLUMNS * BLOCK))
        return weights.new_zeros(*layers, count * TILE_ROWS * TILE_COLUMNS, dtype=torch.uint8)
    return weights.new_empty(*layers, rows, columns // BLOCK, dtype=torch.uint8)


def _round_group(weights, inverse, before, factor, missed, codes, scales, start, grid_max, candidates) -> None:
    """The reference of nvfp4_kernels.feedback.round_group, whose docstring gives the shapes and dtypes.

    Each element receives the corrections for the earlier columns of its group one column after the other. The product
    and the sum are rounded separately, as in the kernel.
    """
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
        q, scale = search_scales(x.reshape(-1, 1, BLOCK), spec, block_scale_rounding(spec))
        codes[..., (start + done) // 2 :][..., : BLOCK // 2] = pack(encode_e2m1(q.view(layers, rows, BLOCK)))
        scales[..., (start + done) // BLOCK] = scale.view(layers, rows).to(torch.float8_e4m3fn).view(torch.uint8)
        error = u[..., block] - (q * scale.unsqueeze(-1)).view(layers, rows, BLOCK)
        missed[:, start + done : start + done + BLOCK] = error.mT
        for k in range(BLOCK):
            wanted[..., done + BLOCK :] += error[..., k : k + 1] * near[:, done + k : done + k + 1, done + BLOCK :]


@torch.library.custom_op("nanochat_fp4::with_feedback", mutates_args=())
def with_feedback(
    weight: torch.Tensor, factor: torch.Tensor, grid_max: float, scale_cap: float, candidates: list[float],
    amax: torch.Tensor | None = None, tiles: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Applies round_with_feedback to one weight and returns (codes, scales, tensor_scale).

    It is an operator, so that torch.compile does not trace the long loop. An operator takes numbers and no Rounding, so
    it has the three constants of a rounding that feedback can use.
    """
    amaxes = None if amax is None else amax.unsqueeze(0)
    rounding = Rounding(grid_max, scale_cap, tuple(candidates))
    t = round_with_feedback(weight.unsqueeze(0), [factor], rounding, amaxes, tiles)[0]
    return t.codes, t.scales, t.tensor_scale


@with_feedback.register_fake
def _(
    weight: torch.Tensor, factor: torch.Tensor, grid_max: float, scale_cap: float, candidates: list[float],
    amax: torch.Tensor | None = None, tiles: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    rows, columns = weight.shape
    return (
        weight.new_empty(rows, columns // 2, dtype=torch.uint8),
        _empty_scales(weight, tiles).view(torch.float8_e4m3fn),
        weight.new_empty((), dtype=torch.float32),
    )
