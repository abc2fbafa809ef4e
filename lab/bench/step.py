"""A model whose training step is measured with any method: its largest micro-batch, its memory, the time of its parts,
and the time by operation."""

import copy
import functools
import gc
import importlib
import itertools
import json
import math
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanochat_fp4 as nf
from lab import table
from lab.bench.common import new_model
from nanochat_fp4.cli import UserError, format_bytes, is_out_of_memory, one_line
from nanochat_fp4.models.cross_entropy import head_problem
from nanochat_fp4.models.gpt import GPTConfig, compile_layers
from nanochat_fp4.models.optim8bit import LeanState, set_state
from nanochat_fp4.nvfp4.layer import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.training.graphed import GraphedStep
from nanochat_fp4.training.step import TrainingStep


@dataclass(eq=False)
class Variant:
    """A way to train that is measured: a method, the tensors that are computed twice, the rows of the micro-batch if it
    has a size of its own, the precision of the output head, and whether the micro-batch is replayed as a CUDA graph."""

    method: str
    recompute: str = "none"
    rows: int | None = None
    head: str = "bf16"
    graph: bool = False

    def __str__(self) -> str:
        rows = f", {self.rows} rows" if self.rows else ""
        again = "" if self.recompute == "none" else f", {self.recompute} again"
        return self.method + rows + again + (", graph" if self.graph else "")


class Subject(TrainingStep):
    """The training step of base_train on random tokens. It becomes one variant after the other."""

    def __init__(
        self,
        config: GPTConfig,
        device: torch.device,
        compiled: bool,
        state: str = "fp32",
        orthogonalizer: str = "polar_express",
    ):
        model = new_model(config, device)
        set_state(model, state)
        nf.convert(model, "bf16", verbose=False)
        lean = LeanState(model, seed=0) if state == "lean" else None
        optimizers = model.setup_optimizers(lean=lean, orthogonalizer=orthogonalizer)
        super().__init__(model, optimizers, compile_layers(model) if compiled else None, lean=lean)
        self.sequence_len, self.vocab_size = config.sequence_len, config.vocab_size

    def become(self, variant: Variant) -> None:
        """Makes the model train as this variant."""
        recipe = get_recipe(variant.method)
        for module in self.model.modules():
            if isinstance(module, QuantLinear):
                module.set_recipe(recipe)
        self.model.recompute = variant.recompute
        if problem := head_problem(variant.head, *self.model.lm_head.weight.shape):
            raise UserError(f"--head: {problem}")
        self.model.lm_head.precision = variant.head
        self.release()  # A variant that failed in the middle of a step may have left gradients.

    def release(self) -> None:
        """Frees the memory that a variant keeps between its steps."""
        self.model.zero_grad(set_to_none=True)

    def prepare(self, rows: int) -> None:
        """Prepares a turn. This work is not timed."""

    def bytes_for_replays(self) -> int:
        """Returns the bytes that are reserved for replays although nothing uses them now."""
        return 0

    def tokens(self, rows: int) -> torch.Tensor:
        """Returns random token ids for a micro-batch of so many rows."""
        return torch.randint(self.vocab_size, (rows, self.sequence_len), device=self.device)

    def passes(self, rows: int) -> None:
        """Runs two micro-batches, of which the second one adds to gradients."""
        ids = self.tokens(rows)
        with self.micro_batches(2):
            for _ in range(2):
                self.micro_batch(ids, ids)


def has_graphs(device: torch.device) -> bool:
    """Returns whether micro-batches can be CUDA graphs on this device."""
    return device.type == "cuda"


class GraphedSubject(Subject, GraphedStep):
    """A Subject that replays the micro-batches of variants with graphs, by the code of base_train --cuda-graph.

    Only the graphs of one variant are kept at a time, because they take as much memory as a micro-batch.
    """

    graph = False  # of the variant that it is

    def become(self, variant: Variant) -> None:
        super().become(variant)
        self.graph = variant.graph

    def micro_batches(self, count: int, step: int = 0) -> AbstractContextManager:
        return super().micro_batches(count, step) if self.graph else TrainingStep.micro_batches(self, count, step)

    def release(self) -> None:
        super().release()
        self.drop_graphs()

    def passes(self, rows: int) -> None:
        """Runs micro-batches without graphs, which compile, and then micro-batches that capture graphs, if any."""
        if self.graph:
            self.release()
            super().passes(rows)
            self.model.zero_grad(set_to_none=True)
        super().passes(rows)

    def prepare(self, rows: int) -> None:
        if self.graph:
            self.passes(rows)

    def bytes_for_replays(self) -> int:
        """Returns the bytes in the pool of the captured graphs that a replay will use. Other work cannot use this
        memory in between."""
        if self.captured is None:
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def nanochat_variants(folder: str) -> list[Variant]:
    """Returns the variants of a nanochat checkout: BF16, and nanochat's --fp8 with its FP8 head, if it has that."""
    fp8 = [Variant("nanochat --fp8", head="fp8")] if (Path(folder) / "nanochat/fp8.py").is_file() else []
    return [Variant("nanochat"), *fp8]


def has_fp8(module: nn.Module, _: str) -> bool:
    """Returns whether nanochat's --fp8 converts a module."""
    sizes = (module.in_features, module.out_features) if isinstance(module, nn.Linear) else (1,)
    return min(sizes) >= 128 and all(size % 16 == 0 for size in sizes)


class NanochatSubject(Subject):
    """The model and optimizers of a nanochat checkout: f5425245f, or a later one, which needs no autocast."""

    def __init__(self, folder: str, config: GPTConfig, device: torch.device, compiled: bool):
        sys.path.insert(0, folder)
        try:
            theirs = importlib.import_module("nanochat.gpt")
        except ImportError as error:
            raise UserError(f"--nanochat: no nanochat.gpt can be imported from {folder} ({one_line(error)})") from None
        finally:
            sys.path.remove(folder)
        fields = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")
        with torch.device("meta"):
            model = theirs.GPT(theirs.GPTConfig(**{name: getattr(config, name) for name in fields}))
        model.to_empty(device=device)
        model.init_weights()
        set_up = getattr(model, "setup_optimizers", None) or model.setup_optimizer
        optimizers = set_up()
        optimizers = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        TrainingStep.__init__(self, model, optimizers)
        self.sequence_len, self.vocab_size = config.sequence_len, config.vocab_size
        self.casts_by_itself = hasattr(theirs, "COMPUTE_DTYPE")
        self.compiled, self.forwards = compiled, {}

    def become(self, variant: Variant) -> None:
        """Makes the model compute in BF16 or as nanochat's --fp8, with the same parameters."""
        if variant.method not in self.forwards:
            model = self.model
            if variant.head == "fp8":
                model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
                importlib.import_module("nanochat.fp8").convert_to_float8_training(model, module_filter_fn=has_fp8)
            self.forwards[variant.method] = torch.compile(model, dynamic=False) if self.compiled else model
        self.forward = self.forwards[variant.method]

    def autocast(self) -> AbstractContextManager:
        return nullcontext() if self.casts_by_itself else super().autocast()

    def weights_once(self, passes: int) -> AbstractContextManager:
        return nullcontext()


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def peaks_of_a_step(subject: Subject, rows: int) -> tuple[int, int]:
    """Returns the bytes at the peak of two micro-batches, and at the peak of the update that follows them. Raises
    torch.OutOfMemoryError if they do not fit."""

    def peak(work: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    try:
        return peak(lambda: subject.passes(rows)), subject.bytes_for_replays() + peak(subject.update)
    finally:
        subject.release()
        gc.collect()
        torch.cuda.empty_cache()


def predicted_micro_batch(rows: int, peak_bytes: Callable[[int], int], budget: int) -> int | None:
    """Returns the result of training.memory.largest_micro_batch after few trials, because every size has to be
    compiled.

    Memory is a constant plus a part proportional to the size, and two small passes determine both. A trial then checks
    the predicted size. While trials fail, the next smaller size is tried.
    """

    def measure(size: int) -> float:
        try:
            return peak_bytes(size)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            return math.inf
        finally:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    sizes = [n for n in range(1, rows + 1) if rows % n == 0]
    measured = {size: measure(size) for size in sizes[:2]}
    fitting_sizes = [size for size, peak in measured.items() if peak <= budget]
    if len(fitting_sizes) < 2:
        return fitting_sizes[0] if fitting_sizes else None
    (a, peak_a), (b, peak_b) = measured.items()
    per_row = max(1.0, (peak_b - peak_a) / (b - a))
    predicted = [size for size in sizes[2:] if peak_b + per_row * (size - b) <= budget]
    return next((size for size in reversed(predicted) if measure(size) <= budget), b)


def find_micro_batch(
    subject: Subject, rows: int, budget: int, peaks: Callable = peaks_of_a_step
) -> tuple[int, dict[int, int], int]:
    """Finds the largest micro-batch whose step fits into `budget`, for steps of `rows` rows. Returns (this micro-batch,
    the peak of the passes for each micro-batch that fits, the peak of the update). The last one does not depend on the
    micro-batch.

    The candidates are the divisors of `rows`. Few of them are tried, because every size has to be compiled. Raises
    UserError if not even one row fits.
    """
    passes, update = {}, 0

    def peak(size: int) -> int:
        nonlocal update
        found, update = peaks(subject, size)
        if found <= budget:
            passes[size] = found
        return found

    def steps(size: int) -> int:
        # With one row two steps run, because the first one makes the optimizers' states.
        return (peak(size), peak(size))[1] if size == 1 else peak(size)

    size = predicted_micro_batch(rows, steps, budget)
    if size is None:
        problem = f"not even one row of {subject.sequence_len} tokens fits into {format_bytes(budget)}"
        raise UserError(f"{problem}; lower --depth or --seq-len, or raise --memory-cap")
    return size, passes, update


# ----------------------------------------------------------------------------------------------------------------------
# Time


class Stopwatch:
    """Measures pieces of work in milliseconds, by CUDA events or by the CPU's clock."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.times: dict[str, list[Callable[[], float]]] = {}

    def time(self, name: str, function: Callable[[], object]) -> None:
        """Runs the function and measures its time under this name."""
        start = self.now()
        function()
        end = self.now()
        elapsed = (lambda: start.elapsed_time(end)) if self.cuda else (lambda: (end - start) * 1e3)
        self.times.setdefault(name, []).append(elapsed)

    def now(self) -> Any:
        """Returns the present moment: an event on a GPU, or the CPU's clock."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def medians(self) -> dict[str, float]:
        """Returns the median time of each name, in milliseconds."""
        if self.cuda:
            torch.cuda.synchronize()
        return {name: statistics.median(ms() for ms in of) for name, of in self.times.items()}


def compiled_graphs() -> int:
    """Returns the number of graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run_steps(subject: Subject, rows: int, micro_batches: int, watch: Stopwatch) -> None:
    """Runs one optimizer step with a few micro-batches, and times its parts."""
    subject.prepare(rows)
    ids = subject.tokens(rows)
    codes = subject.micro_batches(2)
    watch.time("codes", codes.__enter__)
    try:
        for _ in range(micro_batches):
            watch.time("micro-batch", lambda: subject.micro_batch(ids, ids))
    finally:
        codes.__exit__(None, None, None)
    watch.time("update", subject.update)


# ----------------------------------------------------------------------------------------------------------------------
# Time by operation (the paper's Table 7), from a trace of PyTorch's profiler

# Kinds of work, by parts of the name of a kernel or of the operators that launched it. The first kind that fits counts.
KINDS = (
    ("LM head and loss", ("linear_cross_entropy", "_chunk_loss", "chunk_loss", "losses_kernel")),
    ("attention", ("flash", "fmha", "attention", "flex", "sdpa")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "splitk", "mm_alpha", "codes_matmul", "one_row")),
    ("ReLU^2", ("relu_squared",)),
    ("abs-max", ("amax_kernel", "nvfp4::amax")),
    ("decode", ("decode_kernel", "nvfp4::decode", "transpose_square")),
    ("rotate and quantize", ("rotate_quantize", "repair", "prepare_kernel", "finish_kernel", "nvfp4::rotate")),
    ("quantize", ("convert_kernel", "quantize", "tensor_scale", "nvfp4::",
                  "swizzle", "row_kernel")),
    ("GEMM", ("_mm", "::mm", "::addmm", "::bmm", "::matmul")),
    ("RMSNorm", ("rms_norm", "_Norm")),
    ("ReLU^2", ("relu", "ReluSquared", "uint8")),
    ("embedding", ("embedding",)),
    ("gradient accumulation", ("AccumulateGrad",)),
    ("communication and copies", ("memcpy", "memset", "copy_", "::cat", "::clone", "nccl")),
)  # fmt: skip
OTHER = "other element-wise"
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # The categories of a trace's events that run on the GPU.


def kind_of(names: list[str]) -> str:
    """Returns the kind of work of a kernel. `names` are its own name, and then those of the operators that launched it,
    from the inside out."""
    first = min(map(first_fit, names), default=len(KINDS))
    return KINDS[first][0] if first < len(KINDS) else OTHER


@functools.cache  # A trace has thousands of events and few names.
def first_fit(name: str) -> int:
    """Returns the index of the first of KINDS that the name fits, or the number of KINDS if there is none."""
    if name.startswith("triton_"):  # torch.compile also puts the names of casts and of later operators into such names.
        name = re.sub("(rotate_)?quantize|tensor_scale|_to_copy", "", name)
    name = name.replace("_QuantizedLinear", "")  # The layer's own function does all kinds of work.
    fits = (any(part.lower() in name.lower() for part in parts) for _, parts in KINDS)
    return next((i for i, fit in enumerate(fits) if fit), len(KINDS))


def time_by_operation(subject: Subject, rows: int) -> list[dict]:
    """Returns the milliseconds of a micro-batch and an update by phase and kind of work. On a GPU they are those of
    kernels, and on a CPU those of operators."""
    cuda = subject.device.type == "cuda"
    ids = subject.tokens(rows)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as profile:
        with subject.micro_batches(2):
            subject.micro_batch(ids, ids)
        subject.update()
        subject.synchronize()
    return summarize(events_of(profile))


def time_of_gaps(subject: Subject, rows: int, micro_batches: int) -> dict[str, float | None]:
    """Returns wall_and_kernels of a micro-batch, as the mean of several that a GPU runs one after the other."""
    subject.prepare(rows)
    ids = subject.tokens(rows)
    with subject.micro_batches(2):
        subject.micro_batch(ids, ids)
        subject.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(micro_batches):
                subject.micro_batch(ids, ids)
            subject.synchronize()
    subject.release()
    return {name: value and value / micro_batches for name, value in wall_and_kernels(events_of(profile)).items()}


def events_of(profile: torch.profiler.profile) -> list[dict]:
    """Returns the events of a profile's trace."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def wall_and_kernels(trace: list[dict]) -> dict[str, float | None]:
    """Returns {wall_ms, kernel_ms, launches}: the time from the start of the first kernel or copy to the end of the
    last one, the part of this time in which at least one of them ran, and their number. The difference of the two times
    is the time in which the GPU waits. All three are None if the profiler saw no kernel."""
    spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in trace if e.get("cat") in ON_GPU)
    if not spans:
        return dict.fromkeys(("wall_ms", "kernel_ms", "launches"))
    busy, end = 0.0, spans[0][0]
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return {"wall_ms": (end - spans[0][0]) / 1e3, "kernel_ms": busy / 1e3, "launches": len(spans)}


def summarize(trace: list[dict]) -> list[dict]:
    """Summarizes the events of a trace as records {phase, kind, ms}. A kernel belongs to the phase and to the operators
    that launched it. If there are no kernels, as on a CPU, the operators' own time counts."""
    events = [e for e in trace if e.get("ph") == "X"]
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("phase: ")]
    kernels: dict[int, list[dict]] = {}
    for e in events:
        if e.get("cat") in ON_GPU:
            kernels.setdefault(e["args"]["correlation"], []).append(e)
    threads: dict[object, list[dict]] = {}  # The operators and launches of each thread.
    for e in events:
        launch = e.get("cat") in ("cuda_runtime", "cuda_driver") and e.get("args", {}).get("correlation") in kernels
        if launch or e.get("cat") == "cpu_op":
            threads.setdefault(e["tid"], []).append(e)
    total: Counter[tuple[str, str]] = Counter()

    def add(moment: float, names: list[str], microseconds: float) -> None:
        """Adds the time to the phase and the kind of work. `names` are from the inside out."""
        phase = next((e["name"][7:] for e in spans if e["ts"] <= moment <= e["ts"] + e["dur"]), None)
        if phase is not None:
            total[phase, kind_of(names)] += microseconds / 1e3

    for thread in threads.values():
        around: list[dict] = []  # The operators around an event, from the outside in.
        for e in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= e["ts"]:
                around.pop()
            names = [o["name"] for o in reversed(around)]
            if e["cat"] != "cpu_op":
                for kernel in kernels[e["args"]["correlation"]]:
                    add(e["ts"], [kernel["name"], *names], kernel["dur"])
                continue
            if not kernels:
                add(e["ts"], [e["name"], *names], e["dur"])
                if around:
                    add(around[-1]["ts"], names, -e["dur"])
            around.append(e)
    return [{"phase": p, "kind": k, "ms": ms} for (p, k), ms in total.most_common() if ms > 0]


def show_table_7(title: str, records: list[dict]) -> str:
    """Returns a table of forward and backward side by side, in percent of both together, as in the paper, and a line
    with the time of the update."""
    sums = {p: sum(r["ms"] for r in records if r["phase"] == p) for p in ("forward", "backward", "update")}
    whole = (sums["forward"] + sums["backward"]) or 1.0
    columns: dict[str, list[list[str]]] = {"forward": [], "backward": []}
    for r in records:
        if r["phase"] in columns and r["ms"] > 0.005 * whole:
            columns[r["phase"]].append([r["kind"], f"{100 * r['ms'] / whole:.0f}%", f"{r['ms']:.2f}"])
    rows = [[*a, *b] for a, b in itertools.zip_longest(*columns.values(), fillvalue=[""] * 3)]
    shown = table(["forward", "share", "ms", "backward", "share", "ms"], rows)
    untouched = sum(r["ms"] for r in records if r["phase"] != "update" and r["kind"] != "GEMM") / whole
    said = ", ".join(f"{phase} {ms:.1f} ms" for phase, ms in sums.items())
    rest = f"{100 * untouched:.0f}% of forward and backward is not in the layers' GEMMs"
    return f"Time by operation, {title}: {said}; {rest}\n{shown}"
