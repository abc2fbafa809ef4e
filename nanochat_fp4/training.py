"""
What the training scripts (base_train, mid_train, chat_sft) share and no model needs to know: the method and the run's
name, the micro-batch, schedules, random state, signals, non-finite numbers, metrics on disk, telemetry.

Every helper works under torchrun; those that talk to other ranks say so and must be called on all of them.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nanochat_fp4.checkpoint_manager import NoCheckpointError, find_last_step, finish_killed_saves, list_steps
from nanochat_fp4.common import autodetect_device_type, compute_cleanup, compute_init, is_ddp_initialized, print0
from nanochat_fp4.console import format_bytes, logger
from nanochat_fp4.engine import Engine
from nanochat_fp4.errors import UserError, is_out_of_memory, one_line
from nanochat_fp4.files import atomic_write
from nanochat_fp4.gpt import autocast
from nanochat_fp4.hardware import physical_memory
from nanochat_fp4.nvfp4.convert import full_precision, per_token_scale, quantize_weights_once
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.quantizers import quantize
from nanochat_fp4.report import read_jsonl
from nanochat_fp4.run_folder import release_runs

# ----------------------------------------------------------------------------------------------------------------------
# A stage as a program


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that every training stage has, with the same meaning and default."""
    add = parser.add_argument
    # Logging
    add(
        "--run",
        default=os.environ.get("WANDB_RUN") or "dummy",
        help="wandb run name (default: $WANDB_RUN; 'dummy' disables wandb logging)",
    )
    add(
        "--telemetry-every",
        type=int,
        default=-1,
        help="measure each layer's quantization error every N steps (-1 = disable)",
    )
    # Runtime
    add("--device-type", default="", help="cuda|cpu|mps (empty = autodetect)")
    add(
        "--on-nonfinite",
        choices=("stop", "skip"),
        default="stop",
        help="NaN or infinity in loss or gradient: save and stop, or skip the update",
    )
    # Checkpoints
    add("--save-every", type=int, default=-1, help="save checkpoints every N steps (-1 = only at end)")
    add("--keep-last", type=int, default=2, help="keep so many of the newest checkpoints (-1 = all)")
    add(
        "--resume-from-step",
        type=_step_or_latest,
        default=-1,
        help="resume from this step, or from the 'latest' intact checkpoint if there is one (-1 = disable)",
    )
    add("--overwrite", action="store_true", help="start over although this stage has checkpoints under the model tag")


def _step_or_latest(text: str) -> int | str:
    return text if text == "latest" else int(text)


def run_stage(args: argparse.Namespace, train: Callable[[torch.device, int, int, "StopSignals"], None]) -> None:
    """Calls train(device, rank, world_size, signals) in the process group that torchrun asks for, if it does.

    Exits with the status of the signal that stopped it, if one did.
    """
    _, rank, _, world_size, device = compute_init(args.device_type or autodetect_device_type(), args.seed)
    try:
        with StopSignals() as signals:
            train(device, rank, world_size, signals)
    finally:
        release_runs()
        compute_cleanup()
    if signals.exit_code:
        sys.exit(signals.exit_code)


# ----------------------------------------------------------------------------------------------------------------------
# Method and name of a run


def resolve_method(flag: str | None) -> str:
    """The QAT method: the --method flag, else $QAT_METHOD, else clover. An alias comes back as the method it names.

    Raises UserError that lists the methods.
    """
    name = flag or os.environ.get("QAT_METHOD") or "clover"
    try:
        return get_recipe(name).name
    except ValueError as e:
        raise UserError(f"{'--method' if flag else 'QAT_METHOD'}: {e}") from None


def default_model_tag(depth: int, method: str) -> str:
    """Folder of a run's checkpoints: nanochat's d20, and the method, so that methods do not overwrite one another."""
    return f"d{depth}_{method}"


# ----------------------------------------------------------------------------------------------------------------------
# Micro-batch


def plan_accumulation(total_batch_size: int, device_batch_size: int, seq_len: int, world_size: int) -> int:
    """Micro-batches per step, so that a step sees total_batch_size tokens whatever fits a device. Raises UserError."""
    tokens = device_batch_size * seq_len * world_size
    if tokens <= 0 or total_batch_size < tokens or total_batch_size % tokens:
        raise UserError(
            f"--total-batch-size={total_batch_size} is not a multiple of {tokens} tokens ({device_batch_size} rows of "
            f"{seq_len} on {world_size} device(s)); choose a multiple, or another --device-batch-size"
        )
    return total_batch_size // tokens


def parse_device_batch_size(text: str) -> int | str:
    """argparse type of --device-batch-size: 'auto' or a positive whole number."""
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a positive whole number")
    return int(text)


def largest_micro_batch(
    rows: int, peak_bytes: Callable[[int], int], budget: int, limit: int = 1024, below: int | None = None
) -> int | None:
    """
    The largest micro-batch that fits, for `rows` rows per device and step; None where not even one row fits.

    peak_bytes(size) runs a forward and backward pass of that many rows and returns the peak memory in bytes, or runs
    out of memory. Candidates are the divisors of `rows` up to `limit` (and smaller than `below`), so that gradient
    accumulation comes out even. Memory is a constant plus a part proportional to the size: two small passes give both,
    the prediction is then tried out, and the next smaller size taken as long as it does not hold.
    """

    def measure(size: int) -> int | None:
        try:
            return peak_bytes(size)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            return None
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    sizes = [n for n in range(1, min(rows, limit) + 1) if rows % n == 0 and (below is None or n < below)]
    measured = {size: measure(size) for size in sizes[:2]}
    fits = [size for size, peak in measured.items() if peak is not None and peak <= budget]
    if len(fits) < 2:
        return fits[0] if fits else None
    (a, peak_a), (b, peak_b) = measured.items()
    per_row = max(1.0, (peak_b - peak_a) / (b - a))
    predicted = [size for size in sizes[2:] if peak_b + per_row * (size - b) <= budget]
    for size in reversed(predicted):
        peak = measure(size)
        if peak is not None and peak <= budget:
            return size
    return b


def optimizer_bytes(model: nn.Module) -> int:
    """
    Memory that the optimizers will take and that a trial pass does not show yet: Muon keeps one moment of each matrix
    and AdamW two of everything else, and a Muon step works on some FP32 copies of the largest stack of matrices.
    """
    matrices = [p for p in model.parameters() if p.ndim == 2]
    moments = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    return moments + 8 * max((p.numel() for p in matrices), default=0) * 4


def auto_device_batch_size(
    forward_backward: Callable[[int], None],
    model: nn.Module,
    rows: int,
    device: torch.device,
    cpu_row_bytes: int,
    below: int | None = None,
) -> int:
    """
    --device-batch-size=auto: the largest micro-batch for this device; on all ranks the same. Raises UserError.

    forward_backward(size) runs one pass on made-up tokens; its gradients are dropped here. On a CPU, where running out
    of memory ends the process, nothing is tried: up to 32 rows (nanochat's default) of `cpu_row_bytes` each that take
    no more than a quarter of the memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        taken_by_others = total - free - torch.cuda.memory_reserved(device)
        budget = int(0.94 * (total - taken_by_others)) - optimizer_bytes(model)  # 6% for fragmentation and libraries

        def peak_bytes(size: int) -> int:
            torch.cuda.reset_peak_memory_stats(device)
            try:
                forward_backward(size)
                return torch.cuda.max_memory_allocated(device)
            finally:
                model.zero_grad(set_to_none=True)

        size = largest_micro_batch(rows, peak_bytes, budget, below=below) or 0
    else:
        budget = physical_memory() // 4
        candidates = [n for n in range(1, min(rows, 32) + 1) if rows % n == 0 and (below is None or n < below)]
        size = max((n for n in candidates if n == 1 or n * cpu_row_bytes <= budget), default=0)
    if is_ddp_initialized():
        smallest = torch.tensor(size, device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        size = int(smallest)
    if size == 0:
        raise UserError(
            f"not even one row fits into the {format_bytes(budget)} that are left for it; "
            "lower --max-seq-len or --depth, or use a device with more memory"
        )
    return size


# ----------------------------------------------------------------------------------------------------------------------
# Schedules of pre-training (nanochat's)


def lr_multiplier(
    step: int, num_iterations: int, warmup_ratio: float = 0.0, warmdown_ratio: float = 0.4, final_lr_frac: float = 0.0
) -> float:
    """Linear warm-up over the first part, 1, linear warm-down to final_lr_frac over the last part."""
    warmup, warmdown = round(warmup_ratio * num_iterations), round(warmdown_ratio * num_iterations)
    if step < warmup:
        return (step + 1) / warmup
    if step <= num_iterations - warmdown:
        return 1.0
    left = (num_iterations - step) / warmdown
    return left + (1 - left) * final_lr_frac


def muon_momentum(step: int) -> float:
    """0.85 to 0.95 over the first 300 steps."""
    return 0.85 + 0.10 * min(step / 300, 1.0)


def weight_decay_at(step: int, num_iterations: int, initial: float) -> float:
    """Linear to zero over the run."""
    return initial * (1 - step / num_iterations)


# ----------------------------------------------------------------------------------------------------------------------
# Random state. Rotations and stochastic rounding draw from torch's default generators, so these two functions around a
# checkpoint make a resumed run draw the same numbers.


def get_rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of torch's generators on the CPU and on `device`, as CPU tensors (for torch.save). No GPU sync."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what get_rng_state returned. A state of another kind of device is left out: it means nothing here."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    elif device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"].cpu())


@contextlib.contextmanager
def preserved_rng(device: torch.device) -> Iterator[None]:
    """Evaluations, samples and telemetry inside draw what they like; training goes on as if they had not happened."""
    state = get_rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


# ----------------------------------------------------------------------------------------------------------------------
# Signals


class StopRequested(Exception):
    """Raised inside an evaluation that a signal cuts short."""


class StopSignals:
    """
    SIGTERM, SIGINT (Ctrl-C) and SIGUSR1 ask the run to save and stop; nothing is interrupted half-way.

        with StopSignals() as signals:
            for step in ...:
                if signals.received(device): save and leave
        sys.exit(signals.exit_code)

    Exit status: 143 after SIGTERM and 130 after Ctrl-C, as a shell has it, and 0 after SIGUSR1, which a scheduler sends
    to have the job saved and queued again. A second Ctrl-C, two seconds or more after the first, stops at once without
    saving (checkpoints are replaced in one piece, so those on disk stay good).
    """

    HANDLED = (signal.SIGTERM, signal.SIGINT) + ((signal.SIGUSR1,) if hasattr(signal, "SIGUSR1") else ())

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        for number in self.HANDLED:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self.signum is None:
            self.signum, self.since = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self.since >= 2.0:
            raise KeyboardInterrupt

    def received(self, device: torch.device | None = None) -> bool:
        """Whether any rank got a signal. Under torchrun all ranks must call this together, and all agree."""
        if is_ddp_initialized():
            number = torch.tensor(self.signum or 0, device=device)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            self.signum = int(number) or None
        return self.signum is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name if self.signum is not None else "no signal"

    @property
    def exit_code(self) -> int:
        if self.signum is None or self.signum == getattr(signal, "SIGUSR1", None):
            return 0
        return 128 + self.signum

    def watch(self, batches: Iterator, device: torch.device | None = None) -> Iterator:
        """`batches`, until a signal comes: then StopRequested. So that a long evaluation does not delay the stop."""
        for batch in batches:
            if self.received(device):
                raise StopRequested
            yield batch


# ----------------------------------------------------------------------------------------------------------------------
# Loss: averaging, smoothing, spikes, non-finite numbers


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean of a small tensor over the ranks (all must call); as it is without torchrun."""
    if is_ddp_initialized():
        values = values.clone()
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
        values /= dist.get_world_size()
    return values


MAX_SKIPPED_IN_A_ROW = 10  # --on-nonfinite=skip gives up after so many


class LossMonitor:
    """
    Smoothed loss (an exponential average over 10 steps, unbiased at the start) and a watch for spikes.

    A spike is a loss more than 6 standard deviations (an exponential estimate over 50 steps) and more than 5% above
    the average, after the first 50 steps. `state` goes into checkpoints and comes back by `LossMonitor(state)`.
    """

    BETA, SPIKE_BETA, SPIKE_SIGMAS, SPIKE_FRACTION, SPIKE_AFTER = 0.9, 0.98, 6.0, 0.05, 50

    def __init__(self, state: dict[str, float] | None = None):
        self.state = {"count": 0, "average": 0.0, "mean": 0.0, "variance": 0.0, "spikes": 0, "skipped": 0}
        self.state.update(state or {})

    def update(self, loss: float) -> bool:
        """Take in the loss of a step. True if it is a spike."""
        s = self.state
        spread = max(s["variance"], 0.0) ** 0.5
        spike = (
            s["count"] >= self.SPIKE_AFTER
            and loss > s["mean"] + self.SPIKE_SIGMAS * spread
            and loss > s["mean"] * (1 + self.SPIKE_FRACTION)
        )
        s["count"] += 1
        s["average"] = self.BETA * s["average"] + (1 - self.BETA) * loss
        rate = max(1 - self.SPIKE_BETA, 1 / s["count"])
        deviation = loss - s["mean"]
        s["mean"] += rate * deviation
        s["variance"] = (1 - rate) * (s["variance"] + rate * deviation**2)
        s["spikes"] += int(spike)
        return spike

    @property
    def smoothed(self) -> float:
        count = self.state["count"]
        return self.state["average"] / (1 - self.BETA**count) if count else float("nan")


def gradient_norm(model: nn.Module) -> torch.Tensor:
    """2-norm of all gradients on this rank, a scalar on their device; not finite if any of them is not."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads).float()


def _is_bad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all())


def name_nonfinite(model: nn.Module, forward_backward: Callable[[], None]) -> str:
    """
    Where the first NaN or infinity comes from: 'weight of ...', 'output of ...', 'gradient computed by ...'.

    forward_backward() repeats the pass that went wrong (the same tokens and random state; the model uncompiled).
    Hooks on every module then see the first bad output, and on the modules without children the first bad gradient.
    Gradients are dropped. This runs once, when a run is about to stop or skip, so it may be slow.
    """
    for name, p in model.named_parameters():
        if _is_bad(p):
            return f"weight of {name}"
    found: list[str] = []  # in the order of time

    def on_forward(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            if any(_is_bad(o) for o in outputs):
                found.append(f"output of {name}")

        return hook

    def on_backward(name: str) -> Callable:
        def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> None:
            if any(_is_bad(g) for g in grad_output):
                found.append(f"gradient that reaches {name}")
            elif any(_is_bad(g) for g in grad_input):
                found.append(f"gradient computed by {name}")

        return hook

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(on_forward(name)))
            if not any(True for _ in module.children()):
                handles.append(module.register_full_backward_hook(on_backward(name)))
    try:
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # embeddings have no gradient to give
            forward_backward()
        if not found:
            found += [
                f"gradient of {name}" for name, p in model.named_parameters() if p.grad is not None and _is_bad(p.grad)
            ]
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return (found or ["the loss itself (every layer is finite when the step is repeated)"])[0]


def first_message(message: str | None) -> str | None:
    """The message of the lowest rank that has one. All ranks must call this together."""
    if not is_ddp_initialized():
        return message
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return next((f"{m} (rank {rank})" for rank, m in enumerate(messages) if m), None)


# ----------------------------------------------------------------------------------------------------------------------
# Metrics on disk


class MetricsLog:
    """
    metrics.jsonl beside the checkpoints: one JSON object a line, so that curves survive whatever ends the run.

    A line is appended by a single write, so a reader or a kill leaves at most one incomplete line, which readers skip
    and `rewind` removes. Records carry "event" (start, train, val, core, sample, telemetry, spike, skip) and "step".
    """

    def __init__(self, folder: str | os.PathLike, enabled: bool = True):
        self.path = Path(folder) / "metrics.jsonl"
        self.enabled = enabled
        self.torn = False  # the last line could not be written, or not as a whole

    def append(self, event: str, step: int, **values: Any) -> None:
        if not self.enabled:
            return
        record = {"event": event, "step": step, **values}
        line = ("\n" * self.torn + json.dumps(record, default=str) + "\n").encode("utf-8")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                complete = os.write(fd, line) == len(line)
            finally:
                os.close(fd)
            problem = None if complete else "the disk is full"
        except OSError as e:  # a curve with a gap is better than no run
            problem = one_line(e)
        if problem and not self.torn:
            logger.warning(f"{self.path} cannot be written ({problem}); the curves will have a gap")
        self.torn = problem is not None

    def rewind(self, step: int) -> None:
        """
        Forget what happened after the checkpoint of `step`, so that a resumed run does not log a step twice; step 0
        forgets everything. A "train", "spike" or "skip" record of step s is made by the step that leads to checkpoint
        s + 1; any other record of step s is made before step s is trained, when checkpoint s may already hold its
        result: kept.
        """
        if not self.enabled or not self.path.exists():
            return
        if step == 0:
            self.path.unlink()
            return

        def happened(record: dict[str, Any]) -> bool:
            at = record.get("step")
            in_step = record.get("event") in ("train", "spike", "skip")
            return isinstance(at, int) and at < step + (not in_step)

        kept = [record for record in read_jsonl(self.path) if happened(record)]
        atomic_write(self.path, "".join(json.dumps(r) + "\n" for r in kept))


# ----------------------------------------------------------------------------------------------------------------------
# Samples

PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)


def draw_samples(model: nn.Module, tokenizer: Any, prompts: Sequence[str] = PROMPTS, max_tokens: int = 16) -> list[str]:
    """Each prompt with its greedy continuation, in the precision that the model has at the moment."""
    engine = Engine(model, tokenizer)
    device = model.get_device()
    samples = []
    with preserved_rng(device), autocast(device.type), per_token_scale(model), quantize_weights_once(model):
        for prompt in prompts:
            tokens = tokenizer(prompt, prepend="<|bos|>")
            rows, _ = engine.generate_batch(tokens, num_samples=1, max_tokens=max_tokens, temperature=0)
            samples.append(tokenizer.decode(rows[0][1:]))  # without <|bos|>
    return samples


# ----------------------------------------------------------------------------------------------------------------------
# Telemetry: how much quantization hurts, layer by layer


def layer_telemetry(
    model: nn.Module, forward_backward: Callable[[], None], max_tokens: int = 512
) -> dict[str, dict[str, float]]:
    """
    {layer: numbers} for every quantized layer of `model`, from one pass that forward_backward() runs.

    On up to max_tokens tokens of the pass, each layer is computed once as its method says and once exactly:
    output_error, grad_input_error, grad_weight_error are relative errors (norm of the difference over the norm),
    grad_input_cosine and grad_weight_cosine the cosines; input_zeros and input_saturated are the shares of the input's
    elements that round to zero, and that take the largest magnitude of the format, in blocks that are not all zero.
    A number that cannot be had (the exact gradient is zero) is left out. Gradients of the pass are dropped.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear) and m.recipe.quantizes}
    captured: dict[str, dict[str, torch.Tensor]] = {name: {} for name in layers}

    def keep(name: str) -> Callable:
        def take(key: str, value: torch.Tensor) -> None:
            captured[name][key] = value.detach().reshape(-1, value.shape[-1])[:max_tokens]

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            take("x", args[0])
            output.register_hook(lambda grad: take("grad", grad))

        return hook

    handles = [m.register_forward_hook(keep(name)) for name, m in layers.items()]
    try:
        forward_backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)

    def run(layer: QuantLinear, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x)
        grad_x, grad_w = torch.autograd.grad(y, (x, layer.weight), grad.to(y.dtype))
        return [t.detach().float() for t in (y, grad_x, grad_w)]

    telemetry = {}
    for name, layer in layers.items():
        if set(captured[name]) != {"x", "grad"}:
            continue
        x, grad = captured[name]["x"], captured[name]["grad"]
        with torch.enable_grad():
            quantized = run(layer, x, grad)
            with full_precision(layer):
                exact = run(layer, x, grad)
        numbers = {}
        for key, q, e in zip(("output", "grad_input", "grad_weight"), quantized, exact):
            if float(e.norm()) == 0:
                continue  # as at the start of a run, when the projections are zero: there is nothing to compare with
            numbers[f"{key}_error"] = float((q - e).norm() / e.norm())
            if key != "output":
                numbers[f"{key}_cosine"] = float(nn.functional.cosine_similarity(q.flatten(), e.flatten(), dim=0))
        telemetry[name] = _input_shares(layer, x) | numbers
    return telemetry


def _input_shares(layer: QuantLinear, x: torch.Tensor) -> dict[str, float]:
    rounding = layer.recipe.output.a.rounding
    if rounding is None:
        return {}
    t = quantize(x.float(), rounding, seed=0)
    magnitude = torch.stack([t.codes & 7, (t.codes >> 4) & 7])  # E2M1 codes without sign: 0 is zero, 7 the largest
    used = (t.scales.float() > 0).repeat_interleave(8, dim=-1).expand_as(magnitude)
    count = used.sum().clamp_min(1)
    return {
        "input_zeros": float(((magnitude == 0) & used).sum() / count),
        "input_saturated": float(((magnitude == 7) & used).sum() / count),
    }


def summarize_telemetry(telemetry: dict[str, dict[str, float]]) -> str:
    """One line: the mean over layers of each number, and the layer whose weight gradient is worst."""
    if not telemetry:
        return "no quantized layer"
    values: dict[str, list[float]] = {}
    for numbers in telemetry.values():
        for key, value in numbers.items():
            values.setdefault(key, []).append(value)
    text = ", ".join(f"{key.replace('_', ' ')} {sum(v) / len(v):.3f}" for key, v in values.items())
    cosines = {name: t["grad_weight_cosine"] for name, t in telemetry.items() if "grad_weight_cosine" in t}
    if cosines:
        worst = min(cosines, key=cosines.get)
        text += f" (lowest {cosines[worst]:.3f} in {worst})"
    return text


# ----------------------------------------------------------------------------------------------------------------------
# Resuming


def find_resume_step(args: argparse.Namespace, checkpoint_dir: Path, rank: int) -> int | None:
    """
    The step whose checkpoint to go on from; None to start anew. All ranks must call this together.

    args: has resume_from_step (-1, a step, or 'latest') and overwrite. Raises UserError where a new run would mix with
    one that is there.
    """
    wanted = args.resume_from_step
    if wanted == -1 and int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0:
        wanted = "latest"  # torchrun starts all ranks again after one of them died
    if wanted != -1:
        if rank == 0:
            finish_killed_saves(checkpoint_dir)
        if is_ddp_initialized():
            dist.barrier()  # nobody reads before files have their names
        if wanted != "latest":
            return wanted
        try:
            return find_last_step(checkpoint_dir)
        except NoCheckpointError:
            return None
    if args.overwrite:
        if rank == 0:
            shutil.rmtree(checkpoint_dir, ignore_errors=True)
            if list_steps(checkpoint_dir):  # else the new run's "latest" would be one of the old one's
                raise UserError(f"--overwrite cannot delete {checkpoint_dir}; delete it, or choose another --model-tag")
    elif steps := list_steps(checkpoint_dir):
        raise UserError(
            f"{checkpoint_dir} already holds a run (checkpoint of step {steps[0]}); go on with --resume-from-step "
            "latest, start over with --overwrite, or choose another --model-tag"
        )
    if is_ddp_initialized():
        dist.barrier()  # nobody saves before everybody has looked
    return None


def check_same_run(now: dict[str, Any], before: Any, checkpoint_dir: str | os.PathLike) -> None:
    """Raise UserError, naming what differs, unless a checkpoint's settings that decide the bits are this run's."""
    if not isinstance(before, dict):
        raise UserError(
            f"the checkpoint in {checkpoint_dir} does not say how it was trained (nanochat's own?), so it cannot be "
            "resumed; choose another --model-tag for a new run"
        )
    different = [f"{k} was {before.get(k)!r} and is now {v!r}" for k, v in now.items() if before.get(k) != v]
    if different:
        raise UserError(
            f"the checkpoint in {checkpoint_dir} belongs to another run: {'; '.join(different)}. Resume it with the "
            "settings it has, or choose another --model-tag"
        )


def restore_state(
    optimizers: Sequence[torch.optim.Optimizer],
    rank_state: Any,
    device: torch.device,
    checkpoint_dir: str | os.PathLike,
) -> None:
    """
    Put the optimizers and torch's generators where a checkpoint left them; the optimizers' options (rates, betas, ...)
    stay this run's. Raises UserError where it holds something else: its checksums only say that it is what was written.
    """
    try:
        for optimizer, state in zip(optimizers, rank_state["optimizers"], strict=True):
            groups = getattr(optimizer, "param_groups", ())
            options = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            optimizer.load_state_dict(state)
            for group, own in zip(getattr(optimizer, "param_groups", ()), options):
                group.update(own)
        set_rng_state(rank_state["rng"], device)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as e:
        raise UserError(
            f"the optimizer state of the checkpoint in {checkpoint_dir} is not one of this run "
            f"({type(e).__name__}: {one_line(e)[:150]}); resume from another step"
        ) from e


def restore_dict(new: dict[str, Any], meta: dict[str, Any], key: str, checkpoint_dir: str | os.PathLike) -> dict:
    """
    `new`, the state of a run that begins, updated with meta[key] of a checkpoint. Raises UserError where a value there
    is not of the kind that `new` has (None stands for a number that is not known yet).
    """

    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def fits(value: Any, like: Any) -> bool:
        if like is None:
            return value is None or is_number(value)
        return is_number(value) if is_number(like) else type(value) is type(like)

    saved = meta.get(key)
    if not isinstance(saved, dict) or not all(fits(saved[k], like) for k, like in new.items() if k in saved):
        raise UserError(
            f"the {key} in the metadata of the checkpoint in {checkpoint_dir} is not one of this run; resume from "
            "another step"
        )
    return new | {k: saved[k] for k in new if k in saved}


def forget_later_checkpoints(checkpoint_dir: str | os.PathLike, step: int) -> None:
    """
    Delete the checkpoints after `step`: they belong to a run that was continued from an earlier step instead, and
    'latest' must not find them. The manifest goes first, so that what is half deleted no longer counts.
    """
    folder = Path(checkpoint_dir)
    for later in (s for s in list_steps(folder) if s > step):
        for kind in ("manifest", "model", "optim", "meta"):
            for path in folder.glob(f"{kind}_{later:06d}*"):
                path.unlink(missing_ok=True)


def announce(lines: dict[str, Any]) -> None:
    """`name: value` lines, aligned; on rank 0."""
    width = max(map(len, lines), default=0)
    for name, value in lines.items():
        print0(f"  {name:<{width}}  {value}")
