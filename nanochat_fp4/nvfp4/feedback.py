"""Error feedback (GPTQ): a weight is rounded so that the error of the layer's output is small, not that of the weight.

S = E[x x^T] is the Gram matrix of the layer's inputs. The output's error E |(W - Q) x|^2 is tr((W - Q) S (W - Q)^T).
Rounding to nearest minimizes |W - Q|^2, as if S were the identity. Here blocks of 16 columns are rounded one after the
other. Before a block is rounded, a correction for the errors of all earlier blocks is added to its weights:

    S + damping = R R^T, R upper triangular        T = R blockdiag(R)^-1, in blocks of 16 x 16
    Q_b = round(W_b + (W - Q)_{<b} T_{<b, b})

The method is GPTQ (Frantar et al., 2023) in the form of QuIP's LDLQ (Chee et al., 2023). Blocks have one NVFP4 scale. A
block's scale is chosen after the feedback. The weights' errors grow in directions that the inputs hardly reach. A
gradient that goes back through the weight sees |W - Q|^2, so the damping bounds the weights' errors.

The feedback can push a block beyond the tensor's amax. The block's scale then uses the room above scale_cap. Values
beyond the largest scale are clipped, and the clipping is fed back like any other error.

The Gram matrix of a layer's inputs, E[x x^T] (GPTQ's H), is state of the training, not of the model. Layers hold it
beside their parameters and buffers. State dicts, EMA copies and `model.to(dtype)` leave it out.
training.update_gram_matrices makes the matrices; gram_state and load_gram_state save and load them. The dtype is FP16.
The unit is the inputs' mean square, so no entry is beyond K. docs/memory.md has the size, and the reason against blocks
of channels.
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
from nanochat_fp4.nvfp4.quantizers import Rounding, block_scale_rounding, divide, get_rounding, search_scales

STEP = 0.2  # Step of the exponential average of Gram matrices, over about five looks at the inputs.
COLUMNS = 128  # Columns that are rounded before their errors reach all later columns.
DAMPING = 0.3  # In units of the mean of S's diagonal.


def products_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """The sum of x x^T over rows (T, K), float32 (K, K)."""
    with torch.autocast(rows.device.type, enabled=False):
        rows = rows.float()
        return rows.T @ rows


def gram_matrix(mean: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """The Gram matrix `before`, moved a STEP of the way to the mean of x x^T (K, K).

    A mean that is not finite changes nothing.
    """
    new = in_units_of_its_mean(mean)
    moved = new if before is None else before.float().lerp(new, STEP)
    return torch.where(torch.isfinite(mean).all(), moved, 0.0 if before is None else before).half()


def in_units_of_its_mean(gram: torch.Tensor) -> torch.Tensor:
    return gram / gram.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)


def factor_for(gram: torch.Tensor) -> torch.Tensor:
    """The layer's feedback factor, FP16 `(K, K)`, from gram_matrix's result, `(K, K)`. No host sync."""
    return feedback_factor(gram.float()).half()


def gram_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name of a layer -> Gram matrix of its inputs, float16 (K, K). Empty if the method has none, or none yet.

    A run that goes on needs this state besides state dicts. Layers that read the same tensor share a matrix, also after
    torch.save and torch.load.

    >>> nf.gram_state(nf.QuantLinear(32, 16, method="clover_feedback"))  # before update_gram_matrices
    {}
    """
    return {n: m.gram_matrix for n, m in model.named_modules() if getattr(m, "gram_matrix", None) is not None}


def load_gram_state(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Gives the layers the result of gram_state, on the device of their weights. Call it before or after convert.

    Raises ValueError for a state of another kind, for a missing layer, and for a layer with inputs of another size.

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
    """gram is gram_matrix's result, or FP32 in any units.

    A quantized layer derives its recipe's factor from gram. Another layer keeps gram until it is converted.
    """
    gram = gram.to(layer.weight.device)
    layer.gram_matrix = gram if gram.dtype == torch.float16 else in_units_of_its_mean(gram.float()).half()
    if hasattr(layer, "recipe"):
        wanted = layer.recipe.uses_feedback
        layer.feedback_factor = factor_for(layer.gram_matrix) if wanted else None


@torch.no_grad()
def feedback_factor(gram: torch.Tensor) -> torch.Tensor:
    """S `(K, K)` float32, K % 16 == 0 -> the strictly block upper triangular part of T, `(K, K)` float32.

    If S is zero or not finite, S + damping has no Cholesky factor, and the result is zeros: no feedback. No host sync.
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
    """weights `(L, N, K)` FP32 or BF16, and L factors `(K, K)` of feedback_factor -> L NVFP4Tensors `(N, K)`.

    COLUMNS get the errors of the columns before them by one product. The errors are the largest tensor to read, and
    are read once for eight blocks. Within COLUMNS a kernel goes from block to block.

    spec has blocks of 1x16 and draws no random numbers. If the weights are some rows of larger tensors, amaxes (L,) are
    the amaxes of the whole tensors. Each weight has quantize's tensor_scale. With factors of zeros the result is
    quantize's, to the bit. tiles: scales in the layout of swizzle_scales.
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
    """Memory for the scales of weights (..., N, K): uint8 (..., N, K/16), or flat in tiles, where padding is 0."""
    *layers, rows, columns = weights.shape
    if tiles:
        count = -(-rows // TILE_ROWS) * -(-columns // (TILE_COLUMNS * BLOCK))
        return weights.new_zeros(*layers, count * TILE_ROWS * TILE_COLUMNS, dtype=torch.uint8)
    return weights.new_empty(*layers, rows, columns // BLOCK, dtype=torch.uint8)


def _round_group(weights, inverse, before, factor, missed, codes, scales, start, grid_max, candidates) -> None:
    """The reference of nvfp4_kernels.feedback.round_group, whose docstring has shapes and dtypes.

    Each element receives the errors of the earlier columns of its group, one column after the other. Product and sum
    are rounded separately.
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
    weight: torch.Tensor, factor: torch.Tensor, rounding: str, amax: torch.Tensor | None = None, tiles: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """round_with_feedback of one weight: codes, scales, tensor_scale. torch.compile must not trace the long loop."""
    amaxes = None if amax is None else amax.unsqueeze(0)
    t = round_with_feedback(weight.unsqueeze(0), [factor], get_rounding(rounding), amaxes, tiles)[0]
    return t.codes, t.scales, t.tensor_scale


@with_feedback.register_fake
def _(
    weight: torch.Tensor, factor: torch.Tensor, rounding: str, amax: torch.Tensor | None = None, tiles: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    return (
        weight.new_empty(rows, columns // 2, dtype=torch.uint8),
        _empty_scales(weight, tiles).view(torch.float8_e4m3fn),
        weight.new_empty((), dtype=torch.float32),
    )
