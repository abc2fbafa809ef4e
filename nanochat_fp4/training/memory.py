"""
The memory of a training step of the GPT, by count: for the training loop, its out-of-memory advice, and a plan.

    with torch.device("meta"):
        model = nf.convert(GPT(config), "clover", verbose=False)
    count(model, rows=8, recompute="codes").peak        # bytes
    choose(model, 32 * 2**30, [1, 2, 4, 8])[0].flags    # how to train this model on a GPU of 32 GiB

A step has two peaks. The first is at the end of a micro-batch's forward pass, beside the loss. The second is in the
update, when the activations are gone. docs/memory.md explains every number.
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

SHARE = 0.94  # of a GPU's memory may be taken by tensors; the rest is for fragments and libraries
BF16, FP32 = 2.0, 4.0
HEAD_BYTES = 2 * FP32 + BF16  # a weight of the head beside the loss: its gradient twice, and a cast of the weight
# Rounding with error feedback takes so many bytes for each element that is rounded at once (d26, H200: 3.65 GiB).
FEEDBACK_BYTES, FEEDBACK_ELEMENTS = 15.0, 2**28
GOOD_ROWS = 4  # of a micro-batch; with fewer a GEMM is too small for a large GPU


@dataclass(frozen=True)
class Memory:
    """How a run trains, and its bytes on one GPU. The CUDA context and messages of processes are not counted."""

    rows: int
    state: str
    recompute: str
    weights: float
    gradients: float
    moments: float
    codes: float  # of the weights, as the products read them; with error feedback the Gram matrices as well
    activations: float  # that one micro-batch keeps for its backward pass
    loss: float
    update: float

    @property
    def peak(self) -> float:
        at_rest = self.weights + self.gradients + self.moments + self.codes
        return at_rest + max(self.activations + self.loss, self.update)

    @property
    def flags(self) -> list[str]:
        """The flags of base_train that make a run train so, besides --device-batch-size."""
        state = [] if self.state == "fp32" else [f"--state={self.state}"]
        return state + ([] if self.recompute == "none" else [f"--recompute={self.recompute}"])


def operand_bytes(operand: Operand) -> float:
    """Bytes of an element of an operand that is kept."""
    return BF16 if operand.rounding is None else operand.terms * (BYTES if operand.rounding.element == "e2m1" else 1.0)


def _recipes(layer: nn.Module) -> set[Recipe]:
    """The recipes that a layer has in the course of a run."""
    recipe = getattr(layer, "recipe", None) or Recipe("bf16")
    return {recipe, recipe.final}


def _input(layer: nn.Module) -> tuple[float, bool]:
    """(bytes of an element of the input that the layer keeps; whether that is not what the forward multiplied)."""
    kept = [r.grad_weight.b if r.grad_weight.b.raw else r.output.a for r in _recipes(layer)]
    return max(map(operand_bytes, kept)), any(o.raw and o.rounding for o in kept)


def activation_bytes(model: GPT, recompute: str) -> float:
    """Bytes of a token that a forward pass keeps for the backward pass. recompute: one of gpt.RECOMPUTE.

    A BF16 tensor of the model's width takes two bytes a token and column. A block keeps the residual stream three
    times: before the scalar that multiplies the stream, and before each of the two norms.
    """
    width, heads, exact = model.config.n_embd, model.config.n_head, model.config.exact_relu_squared
    total = 3 * BF16 * width + 16  # outside of the blocks
    for block in model.transformer.h:
        (qkv, qkv_again), (out, out_again) = _input(block.attn.c_q), _input(block.attn.c_proj)
        (up, up_again), (down, _) = _input(block.mlp.c_fc), _input(block.mlp.c_proj)
        qkv *= 1 if block.attn.fused_linears or qkv == BF16 else 3  # three layers quantize their common input
        out = BF16 + (out if out < BF16 else 0.0)  # attention's result, and c_proj's input where that is quantized
        eight_bits = down < BF16 and not exact  # of relu(x), which has four widths
        relu = 4.0 if eight_bits else 4 * BF16 if exact else 0.0
        stream, attention, mlp = BF16, 3 * BF16 + qkv + out, up + 4 * down + relu
        if recompute == "none":
            total += width * (3 * stream + attention + mlp) + 12 * heads + 8 + 4 * eight_bits
        elif recompute == "mlp":
            total += width * (3 * stream + attention) + 12 * heads + 4
        elif recompute == "all":
            total += width * 3 * stream
        else:  # from codes, which a layer keeps for this alone where its gradient has others
            total += width * (stream + qkv + out + mlp + BYTES * (qkv_again + out_again)) + 4 * heads + 8
            total += width * (BYTES * up_again - relu) if recompute == "codes-mlp" else 4 * eight_bits
    return total


def count(model: GPT, rows: int, state: str = "fp32", recompute: str = "none", seq_len: int = 0) -> Memory:
    """The memory of a step in micro-batches of so many rows, on a GPU. The model is converted, and may be on meta.

    seq_len: of a row (default: the model's). In lean state Muon's stack fills the memory that is free; here it has one
    matrix, the least.
    """
    of_state, blocks = state_bytes(model, state, gpu=True), model.transformer.h
    linears = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
    codes = sum(m.weight.numel() * max(operand_bytes(r.output.b) for r in _recipes(m)) for m in linears)
    with_feedback = [m for m in linears if any(r.uses_feedback for r in _recipes(m))]
    same_input = {m for block in blocks for m in (block.attn.c_k, block.attn.c_v)}  # as c_q
    codes += sum(2 * BF16 * m.in_features**2 for m in with_feedback if m not in same_input)
    stack = STACK_BYTES * min(STACK_ELEMENTS, sum(m.weight.numel() for m in linears))
    if state == "lean":
        stack = STEP_BYTES * max(m.weight.numel() for m in linears)
    rounding = FEEDBACK_BYTES * min(FEEDBACK_ELEMENTS, sum(m.weight.numel() for m in with_feedback))
    tokens, head = rows * (seq_len or model.config.sequence_len), model.lm_head.weight
    return Memory(
        rows, state, recompute, of_state["weights"], of_state["gradients"], of_state["moments"], codes,
        activations=tokens * activation_bytes(model, recompute),
        loss=HEAD_BYTES * head.numel() + BF16 * min(CHUNK_ELEMENTS["cuda"], tokens * len(head)),
        update=max(stack, rounding),
    )  # fmt: skip


def largest(model: GPT, total: float, sizes: Sequence[int], state: str, recompute: str, seq_len: int = 0) -> Memory:
    """With the largest micro-batch of these sizes, in order, that fits a GPU of so many bytes. Where none fits, rows is
    0, and the bytes are those of the first size."""
    counted = [count(model, rows, state, recompute, seq_len) for rows in sizes]
    fitting = [way for way in counted if way.peak <= SHARE * total]
    return fitting[-1] if fitting else replace(counted[0], rows=0)


def choose(model: GPT, total: float, sizes: Sequence[int], states: Sequence[str] = STATES) -> list[Memory]:
    """Ways to train the model on a GPU of so many bytes, each with its largest micro-batch; the best one first.

    FP32 state comes before lean state, because lean state rounds the weights to BF16, and less recomputation comes
    before more. The best way is the first one with GOOD_ROWS rows, or else the first one with the most rows. Where not
    one row fits, it is the way with the lowest peak.
    """
    ways = [
        largest(model, total, sizes, state, recompute)
        for state in states for recompute in ("none", "codes", "codes-mlp")
    ]  # fmt: skip
    most = max(way.rows for way in ways)
    if not most:
        best = min(ways, key=lambda way: way.peak)
    else:
        best = next(way for way in ways if way.rows >= min(GOOD_ROWS, most))
    return [best, *(way for way in ways if way is not best)]


def next_lever(model: GPT, rows: int, state: str, seq_len: int = 0) -> str:
    """What one more row takes, and the flag of base_train that lowers the peak next, with the bytes that it saves."""
    now = count(model, rows, state, model.recompute, seq_len)
    row = now.activations / rows / 2**30
    for other_state, recompute in ((state, "codes"), (state, "codes-mlp"), ("lean", model.recompute), (state, "all")):
        other = count(model, rows, other_state, recompute, seq_len)
        if (saved := now.peak - other.peak) > 0.01 * now.peak:
            flag = f"--state={other_state}" if other_state != state else f"--recompute={recompute}"
            return f"one more row takes {row:.2f} GiB, and {flag} saves {saved / 2**30:.1f} GiB"
    return f"one more row takes {row:.2f} GiB"
