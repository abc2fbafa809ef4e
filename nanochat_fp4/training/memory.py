"""
Counts the memory of a GPT's training step. The training loop, the advice of its out-of-memory errors, and the plan of a
run use these numbers.

    with torch.device("meta"):
        model = nf.convert(GPT(config), "clover", verbose=False)
    count(model, rows=8, recompute="codes").peak        # bytes
    choose(model, 32 * 2**30, [1, 2, 4, 8])[0].flags    # how to train this model on a GPU of 32 GiB

A step has two peaks. The first is at the end of a micro-batch's forward pass, when the loss is computed. The second is
in the update, when the activations are gone. docs/memory.md explains every number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from nanochat_fp4.models.cross_entropy import CHUNK_ELEMENTS
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.models.optim import STACK_BYTES, STACK_ELEMENTS
from nanochat_fp4.models.optim8bit import STATES, STEP_BYTES, state_bytes
from nanochat_fp4.nvfp4.format import BYTES
from nanochat_fp4.nvfp4.recipes import Operand, Recipe

SHARE = 0.94  # The fraction of a GPU's memory that tensors may take. Fragments and libraries take the rest.
BF16, FP32 = 2.0, 4.0
# The bytes of each weight of the head while the loss is computed: its gradient twice, and a BF16 copy of the weight.
HEAD_BYTES = 2 * FP32 + BF16
# Rounding with error feedback takes so many bytes for each element, and rounds at most so many elements at once (d26 on
# an H200: 3.65 GiB).
FEEDBACK_BYTES, FEEDBACK_ELEMENTS = 15.0, 2**28
# A look at the layers' inputs takes so many bytes for each element of the Gram matrices, which are their new sums, and
# so many more for each element of the largest one, whose factor is computed (d26 and d32 on an H100).
LOOK_BYTES, FACTOR_BYTES = 4.0, 28.0
BF16_RECIPE = Recipe("bf16")  # of layers that are not converted
GOOD_ROWS = 4  # With fewer rows in a micro-batch a GEMM is too small for a large GPU.


@dataclass(frozen=True)
class Memory:
    """A way to train a run, and the bytes that it takes on one GPU, by use.

    - codes are those of the weights, as the products read them, and grams the Gram matrices of error feedback.
    - activations are those that one micro-batch keeps for its backward pass.
    - loss is what the loss takes in addition, and update what the largest work between two micro-batches takes: the
      optimizers' update, rounding with error feedback, or a look at the layers' inputs after the update, when the
      gradients are gone.

    The CUDA context and the buffers of communication between processes are not counted.
    """

    rows: int
    state: str
    recompute: str
    weights: float
    gradients: float
    moments: float
    codes: float
    grams: float
    activations: float
    loss: float
    update: float

    @property
    def peak(self) -> float:
        """The bytes at the larger of both peaks."""
        at_rest = self.weights + self.gradients + self.moments + self.codes + self.grams
        return at_rest + max(self.activations + self.loss, self.update)

    @property
    def flags(self) -> list[str]:
        """The flags of base_train that train a run in this way, without --device-batch-size."""
        state = [] if self.state == "fp32" else [f"--state={self.state}"]
        return state + ([] if self.recompute == "none" else [f"--recompute={self.recompute}"])


def operand_bytes(operand: Operand) -> float:
    """Returns the bytes of one element of an operand that is kept for the backward pass."""
    return BF16 if operand.rounding is None else operand.terms * (BYTES if operand.rounding.element == "e2m1" else 1.0)


def _recipes(layer: nn.Module) -> tuple[Recipe, Recipe]:
    """Returns the recipes with which a layer begins and ends a run. They may be the same."""
    recipe = getattr(layer, "recipe", None) or BF16_RECIPE
    return recipe, recipe.final


def _input(layer: nn.Module) -> tuple[float, bool]:
    """Returns the bytes of one element of the input that the layer keeps, and whether the layer keeps other values
    than those that the forward pass multiplied."""
    kept = [r.grad_weight.b if r.grad_weight.b.raw else r.output.a for r in _recipes(layer)]
    return max(map(operand_bytes, kept)), any(o.raw and o.rounding for o in kept)


def activation_bytes(model: GPT, recompute: str) -> float:
    """Returns the bytes for each token that a forward pass keeps for the backward pass. `recompute` is one of
    gpt.RECOMPUTE.

    A BF16 tensor of the model's width takes two bytes for each token and column. A block keeps the residual stream
    three times: before the scalar that multiplies the stream, and before each of the two norms.
    """
    width, heads = model.config.n_embd, model.config.n_head
    total = 3 * BF16 * width + 16  # These bytes are kept outside of the blocks.
    for block in model.transformer.h:
        (qkv, qkv_again), (out, out_again) = _input(block.attn.c_q), _input(block.attn.c_proj)
        (up, up_again), (down, _) = _input(block.mlp.c_fc), _input(block.mlp.c_proj)
        # Without a fused layer each of three layers quantizes the common input.
        qkv *= 1 if block.attn.fused_linears or qkv == BF16 else 3
        # This is the result of attention, and the input of c_proj if it is quantized.
        out = BF16 + (out if out < BF16 else 0.0)
        # relu(x), which is four times as wide as the model, is then kept in 8 bits.
        eight_bits = down < BF16
        relu = 4.0 if eight_bits else 0.0
        stream, attention, mlp = BF16, 3 * BF16 + qkv + out, up + 4 * down + relu
        if recompute == "none":
            total += width * (3 * stream + attention + mlp) + 12 * heads + 8 + 4 * eight_bits
        elif recompute == "mlp":
            total += width * (3 * stream + attention) + 12 * heads + 4
        elif recompute == "all":
            total += width * 3 * stream
        else:
            # The tensors are computed from codes. A layer whose gradient uses other values keeps codes for this purpose
            # alone.
            total += width * (stream + qkv + out + mlp + BYTES * (qkv_again + out_again)) + 4 * heads + 8
            total += width * (BYTES * up_again - relu) if recompute == "codes-mlp" else 4 * eight_bits
    return total


def count(model: GPT, rows: int, state: str = "fp32", recompute: str = "none", seq_len: int = 0) -> Memory:
    """Counts the memory of a step with micro-batches of `rows` rows on a GPU. The model is converted, and may be on
    the meta device.

    `seq_len` is the number of tokens in a row, by default the model's. In lean state Muon's stack fills the memory that
    is free. This function counts a stack of one matrix, which is the smallest one.
    """
    of_state, blocks = state_bytes(model, state, gpu=True), model.transformer.h
    linears = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
    codes = sum(m.weight.numel() * max(operand_bytes(r.output.b) for r in _recipes(m)) for m in linears)
    with_feedback = [m for m in linears if any(r.uses_feedback for r in _recipes(m))]
    # These layers have the input of c_q.
    same_input = {m for block in blocks for m in (block.attn.c_k, block.attn.c_v)}
    grams = [m.in_features**2 for m in with_feedback if m not in same_input]
    stack = STACK_BYTES * min(STACK_ELEMENTS, sum(m.weight.numel() for m in linears))
    if state == "lean":
        stack = STEP_BYTES * max(m.weight.numel() for m in linears)
    rounding = FEEDBACK_BYTES * min(FEEDBACK_ELEMENTS, sum(m.weight.numel() for m in with_feedback))
    look = LOOK_BYTES * sum(grams) + FACTOR_BYTES * max(grams, default=0) - of_state["gradients"]
    tokens, head = rows * (seq_len or model.config.sequence_len), model.lm_head.weight
    return Memory(
        rows, state, recompute, of_state["weights"], of_state["gradients"], of_state["moments"], codes,
        grams=2 * BF16 * sum(grams),
        activations=tokens * activation_bytes(model, recompute),
        loss=HEAD_BYTES * head.numel() + BF16 * min(CHUNK_ELEMENTS["cuda"], tokens * len(head)),
        update=max(stack, rounding, look),
    )  # fmt: skip


def largest(model: GPT, total: float, sizes: Sequence[int], state: str, recompute: str, seq_len: int = 0) -> Memory:
    """Counts the memory with the largest micro-batch that fits a GPU of `total` bytes. `sizes` are the possible
    numbers of rows in rising order. If none fits, the result has rows = 0, and its other numbers are those of the first
    size."""
    for rows in reversed(sizes):
        way = count(model, rows, state, recompute, seq_len)
        if way.peak <= SHARE * total:
            return way
    return replace(way, rows=0)


def choose(model: GPT, total: float, sizes: Sequence[int], states: Sequence[str] = STATES) -> list[Memory]:
    """Returns the ways to train the model on a GPU with `total` bytes, each with its largest micro-batch, the best
    one first.

    FP32 state comes before lean state, because lean state rounds the weights to BF16. Less recomputation comes before
    more. The best way is the first one with GOOD_ROWS rows. If there is none, it is the first one with the most rows.
    If not even one row fits in any way, it is the way with the lowest peak.
    """
    ways = [
        largest(model, total, sizes, state, recompute)
        for state in states for recompute in ("none", "codes", "codes-mlp")
    ]  # fmt: skip
    most_rows = max(way.rows for way in ways)
    if not most_rows:
        best = min(ways, key=lambda way: way.peak)
    else:
        best = next(way for way in ways if way.rows >= min(GOOD_ROWS, most_rows))
    return [best, *(way for way in ways if way is not best)]


def next_lever(model: GPT, rows: int, state: str, seq_len: int = 0) -> str:
    """Returns how much memory one more row takes, and the next flag of base_train that lowers the peak, with the
    bytes saved."""
    now = count(model, rows, state, model.recompute, seq_len)
    row = now.activations / rows / 2**30
    for other_state, recompute in ((state, "codes"), (state, "codes-mlp"), ("lean", model.recompute), (state, "all")):
        other = count(model, rows, other_state, recompute, seq_len)
        if (saved := now.peak - other.peak) > 0.01 * now.peak:
            flag = f"--state={other_state}" if other_state != state else f"--recompute={recompute}"
            return f"one more row takes {row:.2f} GiB, and {flag} saves {saved / 2**30:.1f} GiB"
    return f"one more row takes {row:.2f} GiB"
