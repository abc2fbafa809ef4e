"""
Counts the memory of a GPT's training step, and chooses the rows of a micro-batch that fit. The training loop, the
advice of its out-of-memory errors, and the plan of a run use these numbers.

    with torch.device("meta"):
        model = nf.convert(GPT(config), "clover", verbose=False)
    count(model, rows=8, recompute="codes").peak        # bytes
    choose(model, 32 * 2**30, [1, 2, 4, 8])[0].flags    # how to train this model on a GPU of 32 GiB

A step has two peaks. The first is at the end of a micro-batch's forward pass, when the loss is computed. The second is
in the update, when the activations are gone. A CUDA graph keeps the activations, so both come together. docs/memory.md
explains every number.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from nanochat_fp4.cli import UserError, format_bytes, is_out_of_memory
from nanochat_fp4.common import of_all_ranks, print0
from nanochat_fp4.hardware import gpu_memory, physical_memory
from nanochat_fp4.models.cross_entropy import CHUNK_ELEMENTS
from nanochat_fp4.models.gpt import GPT, autocast
from nanochat_fp4.models.optim import STACK_BYTES, STACK_ELEMENTS
from nanochat_fp4.models.optim8bit import STATES, STEP_BYTES, is_lean, stack_that_fits, state_bytes
from nanochat_fp4.nvfp4.format import BYTES
from nanochat_fp4.nvfp4.recipes import Operand, Recipe

SHARE = 0.94  # The fraction of a GPU's memory that tensors may take. Fragments and libraries take the rest.
BF16, FP32 = 2.0, 4.0
# The bytes of each weight of the head while the loss is computed: its gradient twice, and a BF16 copy of the weight.
HEAD_BYTES = 2 * FP32 + BF16
BF16_RECIPE = Recipe("bf16")  # of layers that are not converted
GOOD_ROWS = 4  # With fewer rows in a micro-batch a GEMM is too small for a large GPU.
# Beside a graph's activations Muon updates so few elements at a time: 1.25 GiB, for 5 GiB without graphs.
GRAPHED_STACK_ELEMENTS = 2**26


@dataclass(frozen=True)
class Memory:
    """A way to train a run, and the bytes that it takes on one GPU, by use (`parts`).

    - weights, gradients, moments
    - codes are those of the weights, as the products read them.
    - activations are those that one micro-batch keeps for its backward pass.
    - loss is what the loss takes in addition.
    - update is what the optimizers' update takes, and graphed_update the same beside CUDA graphs.

    The CUDA context and the buffers of communication between processes are not counted.
    """

    rows: int
    state: str
    recompute: str
    parts: dict[str, float]

    @property
    def peak(self) -> float:
        """The bytes at the larger of both peaks."""
        p = self.parts
        return self.at_rest + max(p["activations"] + p["loss"], p["update"])

    @property
    def graphed_peak(self) -> float:
        """The bytes at the peak of a step with CUDA graphs."""
        return self.at_rest + sum(self.parts[part] for part in ("activations", "loss", "graphed_update"))

    @property
    def at_rest(self) -> float:
        """The bytes between two micro-batches."""
        return sum(self.parts[part] for part in ("weights", "gradients", "moments", "codes"))

    @property
    def flags(self) -> list[str]:
        """The flags of base_train that train a run in this way, without --device-batch-size."""
        state = [] if self.state == "fp32" else [f"--state={self.state}"]
        return state + ([] if self.recompute == "none" else [f"--recompute={self.recompute}"])


def operand_bytes(operand: Operand) -> float:
    """Returns the bytes of one element of an operand that is kept for the backward pass."""
    rounding = operand.kept or operand.rounding
    return BF16 if rounding is None else (BYTES if rounding.element == "e2m1" else 1.0)


def _recipes(layer: nn.Module) -> tuple[Recipe, Recipe]:
    """Returns the recipes with which a layer begins and ends a run. They may be the same."""
    recipe = getattr(layer, "recipe", None) or BF16_RECIPE
    return recipe, recipe.final


def _input(layer: nn.Module) -> tuple[float, float]:
    """Returns the bytes of one element of the input that the layer keeps, and those of the codes that the forward pass
    multiplied if they are others."""
    kept = [r.grad_weight.b if r.grad_weight.b.raw else r.output.a for r in _recipes(layer)]
    multiplied = [BYTES if o.raw and o.rounding else 1.0 if o.kept else 0.0 for o in kept]
    return max(map(operand_bytes, kept)), max(multiplied)


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
            total += width * (stream + qkv + out + mlp + qkv_again + out_again) + 4 * heads + 8
            total += width * (up_again - relu) if recompute == "codes-mlp" else 4 * eight_bits
    return total


def count(
    model: GPT, rows: int, state: str = "fp32", recompute: str = "none", seq_len: int = 0, processes: int = 1
) -> Memory:
    """Counts the memory of a step with micro-batches of `rows` rows on a GPU. The model is converted, and may be on
    the meta device.

    `seq_len` is the number of tokens in a row, by default the model's. In lean state Muon's stack fills the memory that
    is free. This function counts a stack of one matrix, which is the smallest one. Several processes send the gradients
    of all matrices in FP32 before the first is updated.
    """
    layers = [m for m in model.transformer.h.modules() if isinstance(m, nn.Linear)]
    sizes = [m.weight.numel() for m in layers]
    elements = sum(sizes)
    sent = FP32 * elements * (1 + 1 / processes) if processes > 1 else 0.0
    if state == "lean":
        update = graphed_update = STEP_BYTES * max(sizes)
    else:
        update, graphed_update = (STACK_BYTES * min(n, elements) for n in (STACK_ELEMENTS, GRAPHED_STACK_ELEMENTS))
    tokens, head = rows * (seq_len or model.config.sequence_len), model.lm_head.weight
    parts = {
        **state_bytes(model, state, gpu=True, processes=processes),
        "codes": sum(n * max(operand_bytes(r.output.b) for r in _recipes(m)) for n, m in zip(sizes, layers)),
        "activations": tokens * activation_bytes(model, recompute),
        "loss": HEAD_BYTES * head.numel() + BF16 * min(CHUNK_ELEMENTS["cuda"], tokens * len(head)),
        "update": update + sent,
        "graphed_update": graphed_update + sent,
    }
    return Memory(rows, state, recompute, parts)


def largest(model: GPT, total: float, sizes: Sequence[int], state: str, recompute: str, processes: int = 1) -> Memory:
    """Counts the memory with the largest micro-batch that fits a GPU of `total` bytes. `sizes` are the possible
    numbers of rows in rising order. If none fits, the result has rows = 0, and its other numbers are those of the first
    size."""
    for rows in reversed(sizes):
        way = count(model, rows, state, recompute, processes=processes)
        if way.peak <= SHARE * total:
            return way
    return replace(way, rows=0)


def choose(
    model: GPT, total: float, sizes: Sequence[int], states: Sequence[str] = STATES, processes: int = 1
) -> list[Memory]:
    """Returns the ways to train the model on a GPU with `total` bytes, each with its largest micro-batch, the best
    one first.

    FP32 state comes before lean state, because lean state rounds the weights to BF16. Less recomputation comes before
    more. The best way is the first one with GOOD_ROWS rows. If there is none, it is the first one with the most rows.
    If not even one row fits in any way, it is the way with the lowest peak.
    """
    ways = [
        largest(model, total, sizes, state, recompute, processes)
        for state in states for recompute in ("none", "codes", "codes-mlp")
    ]  # fmt: skip
    most_rows = max(way.rows for way in ways)
    if not most_rows:
        best = min(ways, key=lambda way: way.peak)
    else:
        best = next(way for way in ways if way.rows >= min(GOOD_ROWS, most_rows))
    return [best, *(way for way in ways if way is not best)]


def next_lever(model: nn.Module, rows: int, seq_len: int = 0, state: str = "") -> str:
    """Returns how much memory one more row takes, and the next flag of base_train that lowers the peak, with the
    bytes saved. `state` is by default that of the model's weights. The result is "" for models whose memory is not
    counted."""
    if not isinstance(model, GPT):
        return ""
    state = state or state_now(model)
    now = count(model, rows, state, model.recompute, seq_len)
    row = f"one more row takes {now.parts['activations'] / rows / 2**30:.2f} GiB"
    for other_state, recompute in ((state, "codes"), (state, "codes-mlp"), ("lean", model.recompute), (state, "all")):
        other = count(model, rows, other_state, recompute, seq_len)
        if (saved := now.peak - other.peak) > 0.01 * now.peak:
            flag = f"--state={other_state}" if other_state != state else f"--recompute={recompute}"
            return f"{row}, and {flag} saves {saved / 2**30:.1f} GiB"
    return row


def state_now(model: nn.Module) -> str:
    """Returns the --state of the model's weights."""
    return "lean" if any(map(is_lean, model.transformer.h.parameters())) else "fp32"


# ----------------------------------------------------------------------------------------------------------------------
# The rows of a micro-batch


def plan_accumulation(
    total_batch_size: int, device_batch_size: int, seq_len: int, world_size: int, flag: str = "--device-batch-size"
) -> int:
    """Returns the number of micro-batches in a step of total_batch_size tokens. Raises UserError, which names
    `flag`, if the tokens cannot be divided into micro-batches of this size."""
    tokens = device_batch_size * seq_len * world_size
    if tokens <= 0 or total_batch_size < tokens or total_batch_size % tokens:
        near = f" such as {max(1, round(total_batch_size / tokens)) * tokens}" if tokens > 0 else ""
        raise UserError(
            f"--total-batch-size={total_batch_size} is not a multiple of {tokens} tokens ({device_batch_size} row(s) "
            f"of {seq_len} on {world_size} device(s)); choose a multiple{near}, or another {flag} or length of rows"
        )
    return total_batch_size // tokens


def largest_micro_batch(sizes: Iterable[int], peak_bytes: Callable[[int], float], budget: float) -> int | None:
    """
    Returns the first of these numbers of rows that fits in a micro-batch, or None if none fits.

    peak_bytes(size) runs a forward and backward pass of `size` rows and returns the peak of memory in bytes, or runs
    out of memory. The peak may be at most `budget` bytes.
    """
    for size in sizes:
        try:
            if peak_bytes(size) <= budget:
                return size
        except Exception as e:
            if not is_out_of_memory(e):
                raise
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    return None


def try_micro_batch(model: nn.Module, size: int, seq_len: int, dtype: torch.dtype | None = None) -> None:
    """Computes a forward and backward pass of `size` rows of random tokens. The gradients stay."""
    device = model.get_device()
    with autocast(device.type, dtype):
        tokens = torch.randint(model.config.vocab_size, (size, seq_len), device=device)
        model(tokens, tokens).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()


def update_bytes(model: nn.Module) -> int:
    """Returns the memory that the update itself takes when the activations are gone."""
    elements = min(STACK_ELEMENTS, sum(p.numel() for p in model.parameters() if p.ndim == 2))
    lean = state_now(model) == "lean"
    return STEP_BYTES * min(elements, stack_that_fits(model)) if lean else STACK_BYTES * elements


def auto_device_batch_size(
    model: nn.Module, rows: int, seq_len: int, dtype: torch.dtype | None = None, below: int | None = None
) -> int:
    """
    Returns the largest micro-batch that fits this device, for --device-batch-size=auto. The result is the same on all
    ranks. Raises UserError if not even one row fits.

    - model: a gpt.GPT that is not compiled. Its gradients are dropped.
    - rows: the number of rows of a device in a step. The size is a divisor of it, so that all micro-batches have the
      same size.
    - below: the size must be smaller than this number

    On a CPU nothing is tried, because the process would be killed if memory ran out. There the result is at most 32
    rows, nanochat's default, that take no more than a quarter of the memory by estimate.
    """
    device, config, on_gpu = model.get_device(), model.config, model.get_device().type == "cuda"
    if on_gpu:
        free, total = gpu_memory(device)
        taken_by_others = total - free - torch.cuda.memory_reserved(device)
        # A trial does not use the gradients of earlier micro-batches, and the moments.
        of_state = state_bytes(model, state_now(model), gpu=True)
        budget = int(SHARE * (total - taken_by_others) - of_state["gradients"] - of_state["moments"])
    else:
        budget = physical_memory() // 4

    def peak_bytes(size: int) -> float:
        if not on_gpu:
            row_bytes = 4 * seq_len * (40 * config.n_layer * config.n_embd + 4 * config.vocab_size)
            return size * row_bytes if size > 1 else 0
        torch.cuda.reset_peak_memory_stats(device)
        in_update = torch.cuda.memory_allocated(device) + update_bytes(model)
        try:
            try_micro_batch(model, size, seq_len, dtype)
            return max(torch.cuda.max_memory_allocated(device), in_update)
        finally:
            model.zero_grad(set_to_none=True)

    most = min(rows, 1024 if on_gpu else 32, rows if below is None else below - 1)
    size = largest_micro_batch((n for n in range(most, 0, -1) if rows % n == 0), peak_bytes, budget) or 0
    size = min(of_all_ranks(size))
    lever = next_lever(model, max(size, 1), seq_len)
    if size == 0:
        raise UserError(
            f"not even one row fits into the {format_bytes(budget)} that are left for it; "
            f"{lever or 'lower --max-seq-len or --depth, or use a device with more memory'}"
        )
    if on_gpu and lever:
        print0(f"micro-batch: {size} rows of {seq_len} tokens; by count, {lever}")
    return size
