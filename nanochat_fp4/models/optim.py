"""
Muon for matrices, and AdamW for all other parameters. Each is one class, for one process and for several.

In a process group of several ranks the optimizers also average the gradients, so the model is not wrapped in DDP. Each
rank updates a part of the parameters and keeps the state of this part only (optim_ranks.py says which). The result is
that of one process on the averaged gradients. Each rank has a state dict of its own. `resharded` turns the state dicts
of a run with one number of processes into those for another number.

Muon is by Keller Jordan (https://kellerjordan.github.io/posts/muon/), here with the additions of nanochat at revision
f5425245f. For a matrix W (M, N) with gradient G:

    m  <- momentum * m + (1 - momentum) * G                                       momentum
    G' =  momentum * m + (1 - momentum) * G                                       Nesterov
    O  =  orthogonalize(G')                          singular values to about 1: see ORTHOGONALIZERS
    v  <- beta2 * v + (1 - beta2) * mean(O^2 along the shorter side)              variance reduction as in NorMuon,
    U  =  O / sqrt(v), rescaled to the Frobenius norm of O                        arXiv 2510.05491
    W  <- W - lr * sqrt(max(1, M / N)) * (U + weight_decay * W where U * W >= 0)  cautious weight decay

One thing differs from the revision. Here the hyper-parameters, the variance reduction and the update are FP32. The
revision rounds them to BF16, so that its lr of 0.02 is in effect 0.02002, and its beta2 of 0.95 is 0.949.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from nanochat_fp4.models.optim8bit import LeanState, is_lean, load_state, new_moment
from nanochat_fp4.models.optim_ranks import (
    matrices_of_a_rank,
    own_rows,
    owners_of,
    rank_and_world_size,
    send_row_gradients,
    send_rows,
)
from nanochat_fp4.nvfp4.collectives import local
from nanochat_fp4.parallel import is_sharded

# The coefficients (a, b, c) of the five steps X <- a X + (b A + c A^2) X with A = X X^T, for a safety factor of 0.02
# and a cushion of 2. Source: arXiv 2505.16932.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

# The number of elements that Muon updates at a time, as a stack of whole matrices of one shape. An update takes some 20
# bytes of memory for each element, for stacked FP32 weights and gradients and for the orthogonalization. This is 5 GiB
# at every depth.
STACK_ELEMENTS = 2**28
STACK_BYTES = 20  # The bytes of memory that an update takes for each element of the stack.


def _gradients(params: list[Tensor]) -> list[Tensor]:
    missing = sum(p.grad is None for p in params)
    if missing:
        raise ValueError(
            f"{missing} of {len(params)} parameters of shape {tuple(params[0].shape)} have no gradient; run backward() "
            "first, and give the optimizer only parameters that the loss depends on"
        )
    return [p.grad for p in params]


def gradient_norm(model: torch.nn.Module) -> torch.Tensor:
    """Returns the 2-norm of all gradients on this rank, a scalar on their device. It is not finite if any gradient is
    not finite.

    All shards of sharded gradients count, so the ranks that hold the shards must call this function together.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([g for g in grads if not is_sharded(g)]).float()
    shards = [g for g in grads if is_sharded(g)]
    if not shards:
        return norm
    square = torch.nn.utils.get_total_norm([local(g) for g in shards]).float().square()
    dist.all_reduce(square, group=shards[0].device_mesh.get_group())
    return (norm.square() + square).sqrt()


# ----------------------------------------------------------------------------------------------------------------------
# Schedules. Each model makes its own (setup_pretraining, setup_finetuning).

# A schedule maps (step, progress of the run from 0 to 1) to the multiplier of all learning rates in this step. A call
# also sets the learning rates, momentum and weight decay of the optimizers' groups.
Schedule = Callable[[int, float], float]


@dataclass(frozen=True)
class PretrainingOptions:
    """The options of pre-training with the names of nanochat's flags. They are scaled to the batch size and the model
    later (setup_pretraining)."""

    embedding_lr: float = 0.3
    unembedding_lr: float = 0.004
    matrix_lr: float = 0.02
    scalar_lr: float = 0.5
    weight_decay: float = 0.2
    adam_beta1: float = 0.8
    adam_beta2: float = 0.95
    warmup_ratio: float = 0.0
    warmdown_ratio: float = 0.4
    final_lr_frac: float = 0.0
    orthogonalizer: str = "polar_express"


def set_learning_rates(optimizers: Iterable[torch.optim.Optimizer], multiplier: float) -> None:
    """Sets the learning rate of each group to its initial_lr times the multiplier."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier


def lr_multiplier(
    step: int, num_iterations: int, warmup_ratio: float = 0.0, warmdown_ratio: float = 0.4, final_lr_frac: float = 0.0
) -> float:
    """Returns nanochat's multiplier of the learning rates: it rises linearly during the warm-up, is then 1, and falls
    linearly to final_lr_frac during the warm-down. The ratios are shares of the run's steps."""
    warmup, warmdown = round(warmup_ratio * num_iterations), round(warmdown_ratio * num_iterations)
    if step < warmup:
        return (step + 1) / warmup
    if step <= num_iterations - warmdown:
        return 1.0
    left = (num_iterations - step) / warmdown
    return left + (1 - left) * final_lr_frac


def muon_momentum(step: int) -> float:
    """Returns Muon's momentum, which rises from 0.85 to 0.95 over the first 300 steps."""
    return 0.85 + 0.10 * min(step / 300, 1.0)


def weight_decay_at(step: int, num_iterations: int, initial: float) -> float:
    """Returns the weight decay, which falls linearly from its initial value to zero over the run."""
    return initial * (1 - step / num_iterations)


# ----------------------------------------------------------------------------------------------------------------------
# Muon


def polar_express(g: Tensor) -> Tensor:
    """
    Returns roughly the nearest semi-orthogonal matrix U V^T of each g = U S V^T, `(..., M, N)`, in g's dtype.

    Singular values above 1/1000 of the norm become values between 0.84 and 1.15. Smaller ones become less than that.
    """
    tall = g.size(-2) > g.size(-1)
    x = g.mT if tall else g
    # The coefficients need singular values below 1. The 2% are a margin for BF16's rounding.
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


def newton_schulz(g: Tensor) -> Tensor:
    """
    Orthogonalizes like polar_express, but by the five Newton-Schulz steps of Keller Jordan's package muon-optimizer.

    The result is BF16 for any dtype of g. Its singular values are between about 0.7 and 1.2, because the package's
    coefficients are chosen to raise small values fast and do not converge to 1. Raises ModuleNotFoundError if the
    package is not installed.
    """
    from muon import zeropower_via_newtonschulz5

    return zeropower_via_newtonschulz5(g, steps=5)


# The functions from (..., M, N) to (..., M, N) that --orthogonalizer chooses from.
ORTHOGONALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "polar_express": polar_express,  # nanochat's orthogonalizer. Each step has its own coefficients.
    "newton_schulz": newton_schulz,
}


def muon_update(
    params: Tensor,
    grads: Tensor,
    momentum_buffer: Tensor,
    second_momentum_buffer: Tensor,
    momentum: Tensor,
    beta2: Tensor,
    lr: Tensor,
    weight_decay: Tensor,
    dtype: torch.dtype,
    orthogonalize: Callable[[Tensor], Tensor] = polar_express,
) -> None:
    """
    Updates K matrices of one shape in one step. params, both buffers and grads are changed in place. grads has no
    meaning afterwards.

    params, grads and momentum_buffer are `(K, M, N)`. second_momentum_buffer is `(K, M, 1)` if M >= N, otherwise
    `(K, 1, N)`. The hyper-parameters are tensors (), so that a change of their values causes no new compilation. lr
    includes the factor for the shape. orthogonalize is one of ORTHOGONALIZERS, and its argument is cast to dtype.
    """
    momentum_buffer.lerp_(grads, 1 - momentum)
    g = grads.lerp_(momentum_buffer, momentum)
    update = orthogonalize(g.to(dtype)).float()
    along = -1 if second_momentum_buffer.size(-1) == 1 else -2
    mean_square = update.square().mean(dim=along, keepdim=True)
    second_momentum_buffer.lerp_(mean_square.to(second_momentum_buffer.dtype), 1 - beta2)
    scale = second_momentum_buffer.float().clamp_min(1e-10).rsqrt()
    before = mean_square.sum(dim=(-2, -1), keepdim=True).sqrt()
    after = (mean_square * scale.square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    update = update * (scale * (before / after.clamp_min(1e-10)))
    agrees = (update * params) >= 0
    params.sub_((lr * (update + weight_decay * params * agrees)).to(params.dtype))


@functools.cache
def _compiled_muon_update() -> Callable[..., None]:
    """Compiles muon_update at its first use, because the compiler is slow to import. Each shape gets a graph."""
    return torch.compile(muon_update, dynamic=False, fullgraph=True)


class _SharedOptimizer(torch.optim.Optimizer):
    """An optimizer whose state is divided among the ranks, and whose state dict knows their number."""

    moment: str  # the key of the moment whose shape says which part of a parameter the state belongs to

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], lean: LeanState | None):
        self.lean = lean
        self.rank, self.world_size = rank_and_world_size()
        super().__init__(params, defaults | {"world_size": self.world_size})

    def resharded(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns the state dict of this rank, from those of all ranks of a run with another number of ranks, in
        order."""
        groups, state = states[0]["param_groups"], {}
        for group, saved in zip(self.param_groups, groups, strict=True):
            self._reshard(group, saved["params"], [s["state"] for s in states], state)
        return {"state": state, "param_groups": [{**group, "world_size": self.world_size} for group in groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state exactly. Raises ValueError for the state of another model or number of processes."""
        saved = {group.get("world_size", self.world_size) for group in state_dict["param_groups"]}
        if saved != {self.world_size}:
            raise ValueError(
                f"the optimizer state was saved with {max(saved)} processes and this run has {self.world_size}; resume "
                f"with --nproc_per_node={max(saved)}, or start from the weights alone"
            )
        for group, numbers in zip(self.param_groups, (g["params"] for g in state_dict["param_groups"])):
            for p, number in zip(group["params"], numbers):
                moment = state_dict["state"].get(number, {}).get(self.moment)
                expected = self._moment_shape(group, p)
                if moment is not None and tuple(moment.shape) != expected:
                    raise ValueError(
                        f"the saved {self.moment} is {tuple(moment.shape)} and {expected} is needed; resume with the "
                        "same model and the same number of processes"
                    )
        load_state(self, state_dict)
        for group in self.param_groups:  # a state saved by nanochat lacks some of these keys
            group.update({key: value for key, value in self.defaults.items() if key == "fused" or key not in group})

    def _moment_shape(self, group: dict[str, Any], p: Tensor) -> tuple[int, ...]:
        raise NotImplementedError

    def _reshard(self, group: dict[str, Any], numbers: list[int], states: list[dict], state: dict) -> None:
        """Adds this rank's state of the parameters `numbers` to `state`."""
        raise NotImplementedError


class Muon(_SharedOptimizer):
    """
    Muon for matrices. The formula is at the top of this file.

    Parameters of one shape form a group, and groups are in the order of their shapes. As many matrices of a group as
    stack_elements allows are updated together. Callers set "lr", "momentum" and "weight_decay" of the groups before
    each step.

    Args:
        params: the matrices, of a floating-point dtype
        momentum, beta2: the decay rates of the first and the second moment
        weight_decay: the weight decay, which is applied only to elements where it has the sign of the update
        stack_elements: the number of elements that are updated at a time. A step's memory is proportional to it.
        orthogonalizer: a name of ORTHOGONALIZERS. It is stored in a checkpoint's metadata, and not in state dicts.
        lean: the LeanState of a run whose weights are BF16 and whose momentum has 8 bits, otherwise None. Its
            stack_elements is an upper bound for the argument of this name.

    Raises ValueError for parameters that are not matrices and for an unknown orthogonalizer. step() raises ValueError
    if gradients are missing. Raises ModuleNotFoundError for "newton_schulz" if the package muon-optimizer is not
    installed.
    """

    moment = "momentum_buffer"

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.02,
        momentum: float = 0.95,
        beta2: float = 0.95,
        weight_decay: float = 0.0,
        stack_elements: int = STACK_ELEMENTS,
        orthogonalizer: str = "polar_express",
        lean: LeanState | None = None,
    ):
        params = list(params)
        if orthogonalizer not in ORTHOGONALIZERS:
            raise ValueError(f"unknown orthogonalizer {orthogonalizer!r}; use one of {', '.join(ORTHOGONALIZERS)}")
        self.orthogonalize = ORTHOGONALIZERS[orthogonalizer]
        self.orthogonalize(torch.eye(2))  # A missing package causes an error here and not only in the first step.
        for p in params:
            if p.ndim != 2:
                raise ValueError(f"Muon is for matrices, not for shape {tuple(p.shape)}; give this one to AdamW")
        self.stack_elements = stack_elements if lean is None else min(stack_elements, lean.stack_elements)
        shapes = sorted({tuple(p.shape) for p in params})  # Sorting gives the same order on all ranks.
        groups = [dict(params=[p for p in params if tuple(p.shape) == shape]) for shape in shapes]
        super().__init__(groups, dict(lr=lr, momentum=momentum, beta2=beta2, weight_decay=weight_decay), lean)

    @torch.no_grad()
    def step(self) -> None:
        if self.world_size == 1:
            for group, grads in [(g, _gradients(g["params"])) for g in self.param_groups]:
                params = group["params"]
                for part in self.parts(params):
                    stack = torch.stack(params[part])
                    self._update_part(group, stack, torch.stack(grads[part]), part)
                    torch._foreach_copy_(params[part], list(stack.unbind(0)))
            return
        owners = [owners_of(group["params"], self.rank, self.world_size) for group in self.param_groups]
        for shape in owners:
            shape.send_gradients(_gradients(shape.params))
        for group, shape in zip(self.param_groups, owners):
            grads, stack = shape.gradients_and_weights()
            for part in self.parts(shape.own):
                self._update_part(group, stack[part], grads[part], part)
            shape.send_weights(stack)
        for shape in owners:
            shape.write_weights()

    def _owned(self, group: dict[str, Any]) -> int:
        """Returns the number of matrices of a group that a rank owns. Each rank has state for this number of matrices,
        although the last ranks may own fewer."""
        return matrices_of_a_rank(len(group["params"]), self.world_size)

    def parts(self, params: list[Tensor]) -> list[slice]:
        """Divides the parameters of a group into parts that are updated together. All parts have the same size, so that
        only one graph is compiled."""
        count = len(params)
        sizes = [n for n in range(1, count + 1) if count % n == 0 and n * params[0].numel() <= self.stack_elements]
        size = max(sizes, default=1)
        return [slice(i, i + size) for i in range(0, count, size)]

    def _update_part(self, group: dict[str, Any], stack: Tensor, grads: Tensor, part: slice) -> None:
        """Updates a part of the matrices that this rank owns, in place. grads is changed as well."""
        _, rows, columns = stack.shape
        # A group's state is stored under its first parameter, as in nanochat.
        state, chunk = self.state[group["params"][0]], self._owned(group)
        lean = self.lean if is_lean(stack[0]) else None
        dtype = stack.dtype if lean is None else torch.float32
        if "momentum_buffer" not in state:
            new_moment(state, "momentum_buffer", stack[:1].expand(chunk, -1, -1), lean is not None)
            shape = (chunk, rows, 1) if rows >= columns else (chunk, 1, columns)
            state["second_momentum_buffer"] = stack.new_zeros(shape, dtype=dtype)
        options = {name: group[name] for name in ("momentum", "beta2", "lr", "weight_decay")}
        options["lr"] *= max(1.0, rows / columns) ** 0.5
        update = functools.partial(
            _compiled_muon_update() if stack.is_cuda else muon_update,
            second_momentum_buffer=state["second_momentum_buffer"][part],
            **{name: torch.tensor(value, dtype=torch.float32) for name, value in options.items()},
            dtype=torch.bfloat16 if stack.is_cuda else dtype,  # BF16 products can be very slow on other devices.
            orthogonalize=self.orthogonalize,
        )
        if lean is None:
            update(stack, grads, state["momentum_buffer"][part])
        else:
            own = group["params"][self.rank * chunk :][part]
            lean.update(update, state, ["momentum_buffer"], part, own, stack, grads)

    def _moment_shape(self, group: dict[str, Any], p: Tensor) -> tuple[int, ...]:
        return self._owned(group), *p.shape

    def _reshard(self, group: dict[str, Any], numbers: list[int], states: list[dict], state: dict) -> None:
        chunk, count, first = self._owned(group), len(group["params"]), numbers[0]
        mine = slice(self.rank * chunk, (self.rank + 1) * chunk)
        parts = [of_rank[first] for of_rank in states if first in of_rank]
        for key in parts[0] if parts and self.rank * chunk < count else ():
            whole = torch.cat([part[key] for part in parts])[:count][mine]
            missing = whole.new_zeros(chunk - len(whole), *whole.shape[1:])
            state.setdefault(first, {})[key] = torch.cat((whole, missing))


# ----------------------------------------------------------------------------------------------------------------------
# AdamW


class AdamW(_SharedOptimizer):
    """
    AdamW by torch's fused kernel. The ranks share its state and its work: each rank updates some rows of a parameter.

    If a parameter has fewer than 1024 elements, or if its rows cannot be divided equally among the ranks, each rank
    updates the whole parameter. On one process this class is torch.optim.AdamW(fused=True), with the same state dict.
    lean is the LeanState of a run whose matrices are BF16 and whose moments have 8 bits, otherwise None. step() raises
    ValueError if gradients are missing.
    """

    moment = "exp_avg"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        lean: LeanState | None = None,
    ):
        # "fused" is a key of torch, with which loading a state keeps the step count on the device.
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True), lean)

    @torch.no_grad()
    def step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        where = self.rank, self.world_size
        sent = {p: send_row_gradients(p, grad, *where) for p in params for grad in _gradients([p])}
        gathers = []
        for group in self.param_groups:
            for p in group["params"]:
                work, grad = sent.pop(p)
                if work is not None:
                    work.wait()
                    grad = grad / self.world_size
                own = self._own_rows(p)
                self._update(group, p, own, grad)
                gathers.append(send_rows(p, own, self.world_size))
        for work in filter(None, gathers):
            work.wait()

    def _own_rows(self, p: Tensor) -> Tensor:
        return own_rows(p, self.rank, self.world_size)

    def _update(self, group: dict[str, Any], p: Tensor, own: Tensor, grad: Tensor) -> None:
        state = self.state[p]
        lean = self.lean if is_lean(p) else None
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            new_moment(state, "exp_avg", own, lean is not None)
            new_moment(state, "exp_avg_sq", own, lean is not None)

        def apply(weights: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
            beta1, beta2 = group["betas"]
            adamw(
                [weights], [grad], [exp_avg], [exp_avg_sq], [], [state["step"]], fused=True, amsgrad=False,
                beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                maximize=False,
            )  # fmt: skip

        if lean is None:
            apply(own, grad, state["exp_avg"], state["exp_avg_sq"])
            return
        first_row = 0 if len(own) == len(p) else self.rank * len(own)
        before, rows = state["step"].clone(), max(1, lean.stack_elements // own.shape[1])
        for part in (slice(i, i + rows) for i in range(0, len(own), rows)):
            state["step"].copy_(before)
            lean.update(apply, state, ["exp_avg", "exp_avg_sq"], part, [p], own[part], grad[part], first_row)

    def _moment_shape(self, group: dict[str, Any], p: Tensor) -> tuple[int, ...]:
        return tuple(self._own_rows(p).shape)

    def _reshard(self, group: dict[str, Any], numbers: list[int], states: list[dict], state: dict) -> None:
        for p, number in zip(group["params"], numbers, strict=True):
            rows = self._own_rows(p).shape[:1]
            for key, part in states[0].get(number, {}).items():
                if part.ndim and len(part) < len(p):  # each rank saved some of the rows
                    part = torch.cat([of_rank[number][key] for of_rank in states])
                if part.ndim and rows[0] < len(p):
                    part = part[self.rank * rows[0] : (self.rank + 1) * rows[0]].clone()
                state.setdefault(number, {})[key] = part
