"""
Optimizers that need half the memory (--state=lean). Matrices and their gradients are BF16, and moments have 8 bits.

    lean = LeanState(model, seed)
    optimizers, schedule = model.setup_pretraining(..., lean=lean)
    for step in ...:
        with lean.gradients(micro_batches, step):   # forward and backward passes
            ...
        for optimizer in optimizers:                # each optimizer calls lean.update
            optimizer.step()

- Weights. An update is computed in FP32, and the new weight is rounded to BF16 stochastically. Updates far below half
  an ulp therefore add up on average.
- Gradients. The gradient of each micro-batch is added to the sum in FP32, and the sum is rounded to BF16
  stochastically.
- Moments. A block is a part of a row and has an FP32 scale, its largest value. Codes are equal steps of the square root
  (with sign). For AdamW's second moment, which spans more magnitudes, they are steps of the fourth root. Rounding is
  stochastic and right on average, so that a moment that decays by less than a step still decays.

Parameters with fewer than two dimensions stay FP32. Random numbers come from Philox. They depend only on the run's
seed, the step, the parameter's name and the row, so they are the same after a resume and on any number of processes.
FP32 copies exist for only one of Muon's stacks at a time.
"""

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanochat_fp4.common import get_dist_info
from nanochat_fp4.nvfp4.collectives import local
from nanochat_fp4.nvfp4.dispatch import use_kernels
from nanochat_fp4.nvfp4.format import BYTES
from nanochat_fp4.nvfp4.philox import SR_ELEMENT, philox

STATES = ("fp32", "lean")
BLOCK = 256  # The largest number of elements that share a scale.
# The streams of a parameter's random numbers. Gradients use GRADIENT and all numbers above it.
WEIGHT, MOMENT, SECOND_MOMENT, GRADIENT = range(4)
MOMENTS = {"momentum_buffer": MOMENT, "exp_avg": MOMENT, "exp_avg_sq": SECOND_MOMENT}  # The keys of optimizers' states.
SCALES = "_scales"  # The scales of a moment are stored under its key with this ending.
STEP_BYTES = 32  # The bytes of memory that an update takes for each element of Muon's stack.


# ----------------------------------------------------------------------------------------------------------------------
# Stochastic rounding


def _random_halves(seeds: Tensor, first_row: int, rows: int, columns: int, stream: Tensor | int) -> Tensor:
    """Returns 16 random bits for each element, int64 (K, rows, columns). One call of Philox makes the bits of 8
    elements, and each row begins with a new call."""
    calls = -(-columns // 8)
    index = torch.arange(first_row * calls, (first_row + rows) * calls, device=seeds.device)
    words = torch.stack(philox(seeds[:, None], index, SR_ELEMENT, stream), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    return halves.reshape(len(seeds), rows, 8 * calls)[..., :columns]


def round_into(into: Tensor, x: Tensor, seed: Tensor, stream: Tensor, first_row: int = 0, add: bool = False) -> None:
    """Writes x, or with `add` the sum into + x, to `into`. It is rounded stochastically to one of the two neighbouring
    BF16 numbers, so that the mean is exact.

    into is BF16 (R, C) and contiguous, x is FP32 or BF16 (R, C), and seed and stream are int64 (). first_row is the
    number of into's first row in the parameter.
    """
    if use_kernels(into.device):
        from nvfp4_kernels.accumulate import round_into as kernel

        kernel(into, x.contiguous(), seed, stream, first_row, add)
        return
    exact = x.float() + into.float() if add else x.float()
    halves = _random_halves(seed[None], first_row, *into.shape, stream)[0]
    bits = (exact.view(torch.int32) + halves.to(torch.int32)) & -65536
    into.copy_(torch.where(torch.isfinite(exact), bits.view(torch.float32), exact))


def drawn(weight: Tensor, fill: Callable[..., Tensor], *args: float) -> None:
    """Calls fill(weight, *args), where fill is a function like nn.init.normal_. A BF16 weight is drawn in FP32 and
    rounded to nearest, so that the same random numbers are drawn for both dtypes."""
    if weight.dtype == torch.float32:
        fill(weight, *args)
    else:
        weight.copy_(fill(torch.empty_like(weight, dtype=torch.float32), *args))


# ----------------------------------------------------------------------------------------------------------------------
# Moments in 8 bits


def block_size(columns: int) -> int:
    """Returns the largest divisor of columns that is at most BLOCK."""
    return next(n for n in range(min(BLOCK, columns), 0, -1) if columns % n == 0)


def encode(x: Tensor, seeds: Tensor, first_row: int = 0, stream: int = MOMENT) -> tuple[Tensor, Tensor]:
    """Encodes moments x, FP32 (K, R, C), with seeds int64 (K,). Returns codes (K, R, C) and scales, FP32
    (K, R, C / block).

    Codes of the square root are int8. For the stream SECOND_MOMENT they are uint8 codes of the fourth root, and x must
    not be negative.
    """
    signed = stream == MOMENT
    steps, root, power = (127, torch.sqrt, 2) if signed else (255, lambda y: y.sqrt().sqrt(), 4)
    blocks = x.unflatten(-1, (-1, block_size(x.shape[-1])))
    scales = blocks.abs().amax(-1)
    y = blocks.abs() / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    low = (root(y) * steps).floor().clamp_max(steps - 1)
    below, above = (low / steps).pow(power), ((low + 1) / steps).pow(power)
    uniform = (_random_halves(seeds, first_row, *x.shape[1:], stream).float() + 0.5) * 2.0**-16
    q = low + (uniform.view_as(y) < (y - below) / (above - below))
    # A second moment that is not 0 must not become 0, because AdamW divides by it.
    q = torch.where(blocks < 0, -q, q) if signed else torch.where(y > 0, q.clamp_min(1), q)
    return q.to(torch.int8 if signed else torch.uint8).flatten(-2), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the values of the codes and scales that encode has made, FP32 (..., C)."""
    q = codes.unflatten(-1, (scales.shape[-1], -1)).float()
    y = q * q.abs() / 127**2 if codes.dtype == torch.int8 else (q / 255).pow(4)
    return (y * scales.unsqueeze(-1)).flatten(-2)


@functools.cache
def _fused(function: Callable, gpu: bool) -> Callable:
    """Returns the function, compiled if it is for a GPU. This turns some twenty passes over FP32 copies into one."""
    return torch.compile(function, dynamic=False, fullgraph=True) if gpu else function


def new_moment(state: dict[str, Any], key: str, like: Tensor, lean: bool) -> None:
    """Adds a moment of zeros for a parameter with the shape of `like` (..., C) to an optimizer's state."""
    if not lean:
        state[key] = like.new_zeros(like.shape)
        return
    blocks = like.shape[-1] // block_size(like.shape[-1])
    state[key] = like.new_zeros(like.shape, dtype=torch.int8 if MOMENTS[key] == MOMENT else torch.uint8)
    state[key + SCALES] = like.new_zeros(*like.shape[:-1], blocks, dtype=torch.float32)


def _write(state: dict[str, Any], key: str, part: slice, value: Tensor, seeds: Tensor, first_row: int = 0) -> None:
    """Encodes `value`, FP32 (K, R, C), or (R, C) with one seed, and writes it to a part of the moment `key`."""
    stacked = value if value.ndim == 3 else value[None]
    codes, scales = _fused(encode, value.is_cuda)(stacked, seeds, first_row, MOMENTS[key])
    state[key][part] = codes.view(value.shape)
    state[key + SCALES][part] = scales.view(*value.shape[:-1], -1)


def _recoded(state: dict[str, Any], lean: bool, device: torch.device) -> dict[str, Any]:
    """Returns a parameter's state, which is in FP32 or in 8 bits, in the form that `lean` asks for, on the device."""
    result = {}
    for key, value in state.items():
        if key.endswith(SCALES):
            if lean:
                result[key] = value.to(device)
        elif not lean and key in MOMENTS and value.dtype in (torch.int8, torch.uint8):
            result[key] = decode(value, state[key + SCALES])
        elif lean and key in MOMENTS and value.is_floating_point() and value.ndim > 1:
            new_moment(result, key, torch.empty((), device=device).expand(value.shape), True)
            # Some rows are converted at a time, so that the device never has an FP32 copy of the whole moment.
            rows = 1 if value.ndim == 3 else max(1, 2**24 // value.shape[1])
            for i in range(0, len(value), rows):
                part = slice(i, i + rows)
                _write(result, key, part, value[part].to(device, torch.float32), torch.full((1,), i, device=device))
        else:
            result[key] = value.to(device) if isinstance(value, Tensor) else value
    return result


# ----------------------------------------------------------------------------------------------------------------------
# The state of a run


class LeanState:
    """The state that the optimizers of a run with --state=lean share: seeds, and the way to update a part of a
    parameter. The model's matrices must already be BF16 (set_state)."""

    def __init__(self, model: nn.Module, seed: int):
        self.seed, self.step = seed, -1
        self.stack_elements = stack_that_fits(model)
        self.names = [name for name, _ in model.named_parameters()]
        self.numbers = {p: i for i, p in enumerate(model.parameters())}
        # They lie on the device, because CUDA graphs read them there.
        self.seeds = torch.zeros(len(self.names), dtype=torch.int64, device=model.get_device())
        self.weight_stream, self.gradient_stream = torch.full_like(self.seeds[:2], WEIGHT).unbind()
        self.begin(0)

    def begin(self, step: int) -> None:
        """Computes the seeds of this step, and the stream of its first micro-batch."""
        self.gradient_stream.fill_(GRADIENT + get_dist_info()[1])
        if step != self.step:
            texts = [f"nanochat_fp4 seed {self.seed} step {step} parameter {name}" for name in self.names]
            digests = [hashlib.sha256(text.encode()).digest()[:8] for text in texts]
            self.seeds.copy_(torch.tensor([int.from_bytes(d, "little", signed=True) for d in digests]))
            self.step = step

    def update(
        self, apply: Callable[..., None], state: dict[str, Any], keys: list[str], part: slice,
        params: Sequence[Tensor], weights: Tensor, grads: Tensor, first_row: int = 0,
    ) -> None:  # fmt: skip
        """Calls apply(weights, grads, *moments) with FP32 copies, and rounds the new weights and moments
        stochastically into their places.

        weights are BF16: (K, R, C) for K whole matrices, which are the entries `part` of the state's moments, or (R, C)
        for some rows of one matrix. These are the rows `part` of the state's moments, and the state's first row is the
        row first_row of the matrix. params are the parameters that the weights belong to.
        """
        seeds = self.seeds[[self.numbers[p] for p in params]]
        exact = weights.float()
        moments = [_fused(decode, weights.is_cuda)(state[key][part], state[key + SCALES][part]) for key in keys]
        apply(exact, grads.float(), *moments)
        first = first_row + (part.start if weights.ndim == 2 else 0)
        for key, moment in zip(keys, moments):
            _write(state, key, part, moment, seeds, first)
        stacks = (t.view(len(seeds), -1, weights.shape[-1]) for t in (weights, exact))
        for into, new, seed in zip(*stacks, seeds):
            round_into(into, new, seed, self.weight_stream, first)

    @contextlib.contextmanager
    def gradients(self, micro_batches: int, step: int, sums: dict[Tensor, Tensor] | None = None) -> Iterator[None]:
        """A context for the micro-batches of a step. Inside, the gradients of matrices are added up in BF16 with
        stochastic rounding.

        `sums` are zeros for the sums of all matrices, as CUDA graphs need them. Without them the first micro-batch's
        gradients become the sums. Both have the same bits. next_micro_batch is called after each micro-batch.
        """
        self.begin(step)
        sums = {} if sums is None else sums

        def add(p: Tensor) -> None:
            grad, p.grad = p.grad, None
            if p in sums:
                into, addend, seed = local(sums[p]), local(grad), self.seeds[self.numbers[p]]
                round_into(into, addend.view(into.shape), seed, self.gradient_stream, add=True)
            else:
                sums[p] = grad.contiguous() if type(grad) is Tensor else grad

        hooks = [p.register_post_accumulate_grad_hook(add) for p in self.numbers if micro_batches > 1 and is_lean(p)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for p, total in sums.items():
            p.grad = total

    def next_micro_batch(self) -> None:
        """Lets the next micro-batch of this step draw other numbers."""
        self.gradient_stream += get_dist_info()[3]


def is_lean(p: Tensor) -> bool:
    return p.ndim == 2 and p.dtype == torch.bfloat16


def load_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Loads a state dict in FP32 or with moments in 8 bits into an optimizer of either kind. Unlike torch's
    Optimizer.load_state_dict, it does not convert moments to the dtype of the weights."""
    indices = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    lean = optimizer.lean is not None
    state = {}
    for index, p in zip(indices, params, strict=True):
        if index in state_dict["state"]:
            state[index] = _recoded(state_dict["state"][index], lean and is_lean(p), p.device)
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {} if lean else state})
    if lean:
        optimizer.state.update({p: state[index] for index, p in zip(indices, params) if index in state})


@torch.no_grad()
def set_state(model: nn.Module, state: str, before: str = "fp32") -> None:
    """Converts the model's matrices from the dtype of the state `before` to that of `state`, one matrix after the
    other. Both are names of STATES.

    The embedding of a GPT is BF16 on a GPU in both states (bf16_embedding_on_gpu).
    """
    if (state, before) == ("fp32", "fp32"):
        return
    bf16_embedding = model.get_device().type == "cuda" and model.bf16_embedding_on_gpu
    for p in model.parameters():
        if p.ndim == 2:
            bf16 = state == "lean" or (bf16_embedding and p is model.transformer.wte.weight)
            p.data = p.data.to(torch.bfloat16 if bf16 else torch.float32)


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def state_bytes(model: nn.Module, state: str, gpu: bool = False, processes: int = 1) -> dict[str, float]:
    """Returns the bytes of memory that one process needs between the passes of a step, for "weights", "gradients",
    "moments" and "codes". The model may be on the meta device.

    Muon keeps one moment of the matrices in a GPT's blocks, and AdamW keeps two moments of all other parameters.
    "codes" are those of the blocks' matrices, for a method that keeps 4.5 bits a weight. `gpu` says whether the model
    is for a GPU, where a GPT's embedding is BF16. Each of several processes has its share of the moments.
    """
    total = dict.fromkeys(("weights", "gradients", "moments", "codes"), 0.0)
    blocks = set(model.transformer.h.parameters())
    for p in model.parameters():
        n, small = local(p).numel(), state == "lean" and p.ndim == 2
        muon = p in blocks and model.muon_trains_blocks
        bf16_embedding = gpu and model.bf16_embedding_on_gpu and p is model.transformer.wte.weight
        size = 2 if small or bf16_embedding else 4
        moment = 1 + 4 / block_size(p.shape[-1]) if small else size
        total["weights"] += n * size
        total["gradients"] += n * size
        # Muon's variance reduction has one number for each row or column.
        total["moments"] += (n * moment + 4 * max(p.shape) if muon else 2 * n * moment) / processes
        total["codes"] += BYTES * n if p in blocks and p.ndim == 2 else 0
    return total


def stack_that_fits(model: nn.Module) -> int:
    """Returns the number of elements of Muon's stack that fits on this device. It depends on the memory of the whole
    device and not on the memory that is free. The latter may differ after a resume, and other stacks would be summed in
    another order."""
    device = model.get_device()
    if device.type != "cuda":
        return 2**24
    total = torch.cuda.get_device_properties(device).total_memory
    fraction = getattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    at_rest = state_bytes(model, "lean")
    return max(1, int((0.92 * fraction * total - sum(at_rest.values()) + at_rest["codes"]) / STEP_BYTES))
