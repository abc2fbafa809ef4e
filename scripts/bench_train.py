"""Training throughput and memory of whole models, methods against BF16 in the same run: tokens/s, MFU, peak memory, the
largest micro-batch, where the time goes (the paper's Table 7), recompilations.

    python -m scripts.bench_train                                          # d26, BF16 and clover, no cap
    python -m scripts.bench_train --memory-cap 32GiB --recompute none,mlp  # as if on an RTX 5090
    python -m scripts.bench_train --depth 20,26,32 --methods clover,nvidia --micro-batch 8
    python -m scripts.bench_train --depth 20 --methods "" --micro-batch 16 --nanochat ~/nanochat   # BF16, both
    python -m scripts.bench_train --roofline rtx5090                       # from which width 4 bits pay; no GPU
    python -m scripts.bench_train --depth 2 --head-dim 64 --seq-len 64 --vocab-size 256 --total-batch-size 256 \\
        --micro-batch 2 --rounds 2                                         # on a CPU: does it work

One model, one set of weights and optimizers: a method is a recipe of its layers, and the methods take turns. A step is
that of scripts.base_train on made-up tokens: accumulation over micro-batches, the weights' codes made once, Muon and
AdamW. The times of a micro-batch, of making the codes and of the update are medians over all rounds, and

    tokens/s = total batch / (micro-batches * micro-batch time + codes + update)

Peak memory is that of a whole step, gradients and optimizer states included. The largest micro-batch is found by steps
that are run: what 1 and 2 rows take without torch.compile predicts it, then one row and the prediction are tried out,
compiled. The difference of these two peaks is what a token keeps in memory. --memory-cap is a hard limit on PyTorch's
allocator.

Nothing that was measured is lost: rows are printed, and the JSON is written, after each search and each round of turns
(by --recompute: first all methods with the first of its values, then again with those of the next). A variant that
fails is a row that says why, the others go on, and the exit status is 2.
"""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # read when CUDA starts

import argparse
import functools
import gc
import importlib
import json
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

import nanochat_fp4 as nf
from nanochat_fp4.common import print0
from nanochat_fp4.console import format_bytes
from nanochat_fp4.doctor import layer_problem
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, is_out_of_memory, one_line, run_main
from nanochat_fp4.gpt import GPT, autocast, compile_layers, config_from_depth
from nanochat_fp4.hardware import get_peak_flops
from nanochat_fp4.nvfp4.linear import QuantLinear
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.roofline import MACHINES, TOKENS, Machine, predict
from scripts import bench_common as common

RECOMPUTE = ("none", "mlp", "all")


# ----------------------------------------------------------------------------------------------------------------------
# What is compared


@dataclass(frozen=True)
class Variant:
    """A method, and what it computes twice."""

    method: str
    recompute: str = "none"

    def __str__(self) -> str:
        return self.method + ("" if self.recompute == "none" else f", {self.recompute} again")


class Trainer:
    """A model with its optimizers that can do the parts of a training step, as any of the variants."""

    def __init__(self, config, device: torch.device, compiled: bool):
        with torch.device("meta"):
            model = GPT(config)
        model.to_empty(device=device)
        model.init_weights()
        self.device, self.model = device, nf.convert(model, "bf16", verbose=False)
        self.optimizers = model.setup_optimizers()
        self.sequence_len, self.vocab_size = config.sequence_len, config.vocab_size
        self.flops_per_token, self.num_params = model.estimate_flops(), model.num_scaling_params()
        self.forward = compile_layers(model) if compiled else model

    def become(self, variant: Variant) -> None:
        recipe = get_recipe(variant.method)
        for module in self.model.modules():
            if isinstance(module, QuantLinear):
                module.set_recipe(recipe)
        self.model.recompute = variant.recompute

    def weights_once(self):
        return nf.quantize_weights_once(self.model)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        compiled, self.forward = self.forward, self.model
        try:
            yield
        finally:
            self.forward = compiled

    def tokens(self, rows: int) -> torch.Tensor:
        return torch.randint(self.vocab_size, (rows, self.sequence_len), device=self.device)

    def micro_batch(self, ids: torch.Tensor) -> None:
        with torch.profiler.record_function("phase: forward"), autocast(self.device.type):
            loss = self.forward(ids, ids)
        with torch.profiler.record_function("phase: backward"):
            loss.backward()

    def update(self) -> None:
        with torch.profiler.record_function("phase: update"):
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad(set_to_none=True)

    def passes(self, rows: int) -> None:
        """Two micro-batches: the second one finds gradients to add to."""
        ids = self.tokens(rows)
        with self.weights_once():
            for _ in range(2):
                self.micro_batch(ids)


class NanochatTrainer(Trainer):
    """The model and optimizers of a real checkout, of the revision that this project is compatible with."""

    def __init__(self, folder: str, config, device: torch.device, compiled: bool):
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
        self.device, self.model = device, model
        set_up = getattr(model, "setup_optimizers", None) or model.setup_optimizer
        optimizers = set_up()
        self.optimizers = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
        self.sequence_len, self.vocab_size = config.sequence_len, config.vocab_size
        self.forward = torch.compile(model, dynamic=False) if compiled else model

    def become(self, variant: Variant) -> None:
        pass

    def weights_once(self):
        return nullcontext()


# ----------------------------------------------------------------------------------------------------------------------
# Memory


def parse_bytes(text: str) -> int:
    """argparse type: 32GiB, 24GB, 512MiB."""
    match = re.fullmatch(r"([\d.]+)\s*([KMGT])(i?)B?", text, re.IGNORECASE)
    try:
        number = float(match.group(1)) if match else 0.0
    except ValueError:
        number = 0.0
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory; write for example 32GiB")
    power = "KMGT".index(match.group(2).upper()) + 1
    return int(number * (1024 if match.group(3) else 1000) ** power)


@dataclass
class Memory:
    """Peaks of the steps that fit, in bytes: of the passes by rows of a micro-batch, and of the update, which does not
    depend on them."""

    passes: dict[int, int] = field(default_factory=dict)
    update: int = 0

    def peak(self, rows: int) -> int | None:
        return max(self.passes[rows], self.update) if rows in self.passes else None

    def per_row(self) -> float | None:
        """Bytes that a row more of a micro-batch takes, from the smallest and the largest size that fit."""
        if len(self.passes) < 2:
            return None
        a, b = min(self.passes), max(self.passes)
        return (self.passes[b] - self.passes[a]) / (b - a)


def peaks_of_a_step(trainer: Trainer, rows: int) -> tuple[int, int]:
    """Bytes at the peak of two micro-batches and of the update. torch.OutOfMemoryError where they do not fit."""

    def peak(work: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    try:
        return peak(lambda: trainer.passes(rows)), peak(trainer.update)
    finally:
        trainer.model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def find_micro_batch(trainer: Trainer, rows: int, budget: int, peaks: Callable = peaks_of_a_step) -> tuple[int, Memory]:
    """(the largest micro-batch whose step fits, the peaks of those that were tried), for `rows` rows a step.

    Sizes are the divisors of `rows`. Every size has to be compiled, so few are tried: one row, and what 1 and 2 rows
    without torch.compile predict. From there it goes down while a size does not fit, or up while the compiled peaks say
    that the next one does. Raises UserError where not even one row fits.
    """

    def measure(size: int, memory: Memory) -> bool:
        try:
            peak, memory.update = peaks(trainer, size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        if peak <= budget:
            memory.passes[size] = peak
        return size in memory.passes

    memory, trial, sizes = Memory(), Memory(), [n for n in range(1, rows + 1) if rows % n == 0]
    if not (measure(1, memory) and measure(1, memory)):  # the first step makes the optimizers' states
        raise UserError(
            f"not even one row of {trainer.sequence_len} tokens fits into {format_bytes(budget)}; lower --depth or "
            "--seq-len, or raise --memory-cap"
        )
    with trainer.uncompiled():
        for size in (1, 2):
            measure(size, trial)
    per_row = max(1.0, trial.per_row() or budget)
    predicted = [i for i, n in enumerate(sizes) if memory.passes[1] + per_row * (n - 1) <= budget]
    i = min(max(1, *predicted), len(sizes) - 1)
    if i and measure(sizes[i], memory):
        while i + 1 < len(sizes):
            more = memory.per_row() * (sizes[i + 1] - sizes[i])
            if memory.passes[sizes[i]] + more > budget or not measure(sizes[i + 1], memory):
                break
            i += 1
    else:
        i = max(0, i - 1)
        while i and not measure(sizes[i], memory):
            i -= 1
    return sizes[i], memory


# ----------------------------------------------------------------------------------------------------------------------
# Time


class Stopwatch:
    """Milliseconds of pieces of work, by CUDA events or the CPU's clock."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.pending: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self.times: dict[str, list[float]] = {}

    def time(self, name: str, function: Callable[[], object]) -> object:
        if not self.cuda:
            start = time.perf_counter()
            result = function()
            self.times.setdefault(name, []).append((time.perf_counter() - start) * 1e3)
            return result
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = function()
        end.record()
        self.pending.append((name, start, end))
        return result

    def medians(self) -> dict[str, float]:
        if self.pending:
            torch.cuda.synchronize()
        for name, start, end in self.pending:
            self.times.setdefault(name, []).append(start.elapsed_time(end))
        self.pending.clear()
        return {name: statistics.median(values) for name, values in self.times.items()}


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def run_steps(trainer: Trainer, rows: int, micro_batches: int, watch: Stopwatch) -> None:
    """One optimizer step of a few timed micro-batches."""
    ids = trainer.tokens(rows)
    codes = trainer.weights_once()
    watch.time("codes", codes.__enter__)
    try:
        for _ in range(micro_batches):
            watch.time("micro-batch", lambda: trainer.micro_batch(ids))
    finally:
        codes.__exit__(None, None, None)
    watch.time("update", trainer.update)


# ----------------------------------------------------------------------------------------------------------------------
# Table 7: where the time goes

# Kinds of work, by parts of the names of a kernel or of the operators that launched it; the first that fits counts.
KINDS = (
    ("LM head and loss", ("linear_cross_entropy", "_chunk_loss", "chunk_loss")),
    ("attention", ("flash", "fmha", "attention", "flex", "sdpa")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "splitk", "mm_alpha", "dot_scaled_kernel")),  # also inside operators of ours
    ("ReLU^2", ("relu_squared",)),
    ("abs-max", ("amax_kernel", "nvfp4::amax")),
    ("decode", ("decode_kernel", "nvfp4::decode")),
    ("rotate and quantize", ("rotate_quantize", "repair", "prepare_kernel", "finish_kernel", "nvfp4::rotate")),
    ("quantize", ("quantize", "tensor_scale", "nvfp4::", "swizzle")),
    ("GEMM", ("_mm", "::mm", "::addmm", "::bmm", "::matmul")),
    ("RMSNorm", ("rms_norm", "_Norm")),
    ("ReLU^2", ("relu", "_ReluSquared", "uint8")),
    ("embedding", ("embedding",)),
    ("gradient accumulation", ("AccumulateGrad",)),
    ("communication and copies", ("memcpy", "memset", "copy_", "::cat", "::clone", "nccl")),
)  # fmt: skip
OTHER = "other element-wise"
PHASES = ("forward", "backward", "update")


def kind_of(names: list[str]) -> str:
    """The kind of work of a kernel: names are its own, then those of what launched it, inside out."""
    first = min(map(first_fit, names), default=len(KINDS))
    return KINDS[first][0] if first < len(KINDS) else OTHER


@functools.cache  # a trace has thousands of events and few names
def first_fit(name: str) -> int:
    """Index of the first of KINDS that one name fits; their number if none does."""
    if name.startswith("triton_"):  # by torch.compile, which names operators that only read the result, and casts
        name = re.sub("(rotate_)?quantize|tensor_scale|_to_copy", "", name)
    fits = (any(part.lower() in name.lower() for part in parts) for _, parts in KINDS)
    return next((i for i, fit in enumerate(fits) if fit), len(KINDS))


def time_by_operation(trainer: Trainer, rows: int) -> list[dict]:
    """Milliseconds by phase and kind of work, of a micro-batch and an update: a GPU's kernels, or a CPU's operators."""
    cuda = trainer.device.type == "cuda"
    ids = trainer.tokens(rows)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities) as profile:
            with trainer.weights_once():
                trainer.micro_batch(ids)
            trainer.update()
            if cuda:
                torch.cuda.synchronize()
        profile.export_chrome_trace(str(path))
        return summarize(json.loads(path.read_text())["traceEvents"])


def summarize(trace: list[dict]) -> list[dict]:
    """Records {phase, kind, ms} of a trace's events. A kernel belongs to the phase and to the operators that launched
    it; where there are none, as on a CPU, the operators' own time counts."""
    events = [e for e in trace if e.get("ph") == "X"]
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("phase: ")]
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    operators: dict[object, list[dict]] = {}
    for e in events:
        if e.get("cat") == "cpu_op":
            operators.setdefault(e["tid"], []).append(e)

    def phase_at(moment: float) -> str | None:
        return next((e["name"][7:] for e in spans if e["ts"] <= moment <= e["ts"] + e["dur"]), None)

    work: list[tuple[float, list[str], float]] = []  # (moment of the launch, names from the inside out, microseconds)
    if kernels:
        for ops in operators.values():
            ops.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_at: dict[object, tuple[int, list[dict]]] = {}  # thread: (operators seen, those that are open)
        pairs = ((launches.get(k.get("args", {}).get("correlation")), k) for k in kernels)
        for launch, kernel in sorted((p for p in pairs if p[0] is not None), key=lambda p: p[0]["ts"]):
            moment, ops = launch["ts"], operators.get(launch["tid"], [])
            seen, around = open_at.get(launch["tid"], (0, []))
            while seen < len(ops) and ops[seen]["ts"] <= moment:
                around.append(ops[seen])
                seen += 1
            around = [e for e in around if moment <= e["ts"] + e["dur"]]
            open_at[launch["tid"]] = seen, around
            work.append((moment, [kernel["name"], *(e["name"] for e in reversed(around))], kernel["dur"]))
    else:
        for thread in operators.values():
            open_ones: list[dict] = []
            own = {id(e): e["dur"] for e in thread}
            for e in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
                while open_ones and open_ones[-1]["ts"] + open_ones[-1]["dur"] <= e["ts"]:
                    open_ones.pop()
                if open_ones:
                    own[id(open_ones[-1])] -= e["dur"]
                open_ones.append(e)
                work.append((e["ts"], [o["name"] for o in reversed(open_ones)], e))
            work = [(ts, names, own[id(e)] if isinstance(e, dict) else e) for ts, names, e in work]

    total: dict[tuple[str, str], float] = {}
    for moment, names, microseconds in work:
        phase = phase_at(moment)
        if phase is not None:
            key = (phase, kind_of(names))
            total[key] = total.get(key, 0.0) + microseconds / 1e3
    return [{"phase": p, "kind": k, "ms": ms} for (p, k), ms in sorted(total.items(), key=lambda item: -item[1])]


def show_table_7(title: str, records: list[dict]) -> str:
    """Forward and backward side by side, in percent of both together, as the paper has it; and the update."""
    sums = {p: sum(r["ms"] for r in records if r["phase"] == p) for p in PHASES}
    whole = (sums["forward"] + sums["backward"]) or 1.0
    columns = [[r for r in records if r["phase"] == p and r["ms"] > 0.005 * whole] for p in ("forward", "backward")]
    rows = []
    for i in range(max(map(len, columns), default=0)):
        row = []
        for column in columns:
            r = column[i] if i < len(column) else None
            row += [r["kind"], f"{100 * r['ms'] / whole:.0f}%", f"{r['ms']:.2f}"] if r else ["", "", ""]
        rows.append(row)
    table = common.table(["forward", "share", "ms", "backward", "share", "ms"], rows)
    untouched = sum(r["ms"] for r in records if r["phase"] != "update" and r["kind"] != "GEMM") / whole
    return (
        f"Time by operation, {title}: forward {sums['forward']:.1f} ms, backward {sums['backward']:.1f} ms, update "
        f"{sums['update']:.1f} ms; {100 * untouched:.0f}% of forward and backward is not in the layers' GEMMs\n{table}"
    )


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark


class Results:
    """What was measured so far: a record for each variant of a depth, and those of time by operation."""

    def __init__(self, settings: dict, path: str):
        self.settings, self.path, self.environment = settings, path, environment_info()
        self.records: list[dict] = []
        self.operations: list[dict] = []

    def add(self, depth: int, variant: Variant, **known: object) -> dict:
        """A new record; what is not known yet is None."""
        unknown = (
            "micro_batch", "micro_batches", "micro_batch_ms", "codes_ms", "update_ms", "tokens_per_second", "ratio",
            "mfu", "peak_bytes", "bytes_per_token", "memory_ratio", "rounds", "recompiles", "problem",
        )  # fmt: skip
        record = {"depth": depth, "variant": str(variant), "method": variant.method, "recompute": variant.recompute}
        self.records.append(record | dict.fromkeys(unknown) | known)
        return self.records[-1]

    def write(self) -> Path:
        records = [*self.records, *self.operations]
        return common.write_json("bench_train", self.path, self.settings, records, self.environment)

    @contextmanager
    def attempt(self, record: dict, what: str) -> Iterator[None]:
        """An error inside becomes the record's problem, and is printed and written."""
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                record["problem"] = f"{what}: out of memory; lower --micro-batch, --depth or --seq-len"
            elif isinstance(error, UserError | ValueError):
                record["problem"] = f"{what}: {one_line(error)}"
            else:
                traceback.print_exc()
                record["problem"] = f"{what}: {type(error).__name__}: {one_line(error)}"
            print0(f"FAILED d{record['depth']} {record['variant']}, {record['problem']}", flush=True)
            self.write()
        gc.collect()


def time_in_turns(args: argparse.Namespace, trainers: dict[Variant, Trainer], records: dict, results: Results) -> None:
    """The variants that have no problem, one after the other, round by round; the first round warms up. Their records
    change together, after each round, so that their times always come from the same rounds."""
    watches: dict[Variant, Stopwatch] = {}
    if all(records[v]["problem"] for v in trainers):
        return
    for i in range(args.rounds + 1):
        for variant, trainer in trainers.items():
            record = records[variant]
            if record["problem"]:
                continue
            device = trainer.device
            watch = Stopwatch(device) if i == 0 else watches.setdefault(variant, Stopwatch(device))
            graphs = compiled_graphs()
            with results.attempt(record, f"round {i}"):
                trainer.become(variant)
                run_steps(trainer, record["micro_batch"], args.calls, watch)
                if i:
                    record["recompiles"] = (record["recompiles"] or 0) + compiled_graphs() - graphs
        if i == 0:
            continue
        for variant, trainer in trainers.items():
            if records[variant]["problem"] is None:
                add_times(args, records[variant], watches[variant].medians(), trainer)
                records[variant]["rounds"] = i
        add_ratios(list(records.values()))
        results.write()
        print0(f"after round {i} of {args.rounds}:\n{show(list(records.values()))}", flush=True)


def add_times(args: argparse.Namespace, record: dict, ms: dict[str, float], trainer: Trainer) -> None:
    size = record["micro_batch"]
    count = args.total_batch_size // args.seq_len // size
    step_ms = count * ms["micro-batch"] + ms["codes"] + ms["update"]
    speed = count * size * args.seq_len / step_ms * 1e3
    cuda = trainer.device.type == "cuda"
    peak_flops = get_peak_flops(torch.cuda.get_device_name(trainer.device)) if cuda else None
    record |= {
        "micro_batches": count, "micro_batch_ms": ms["micro-batch"], "codes_ms": ms["codes"],
        "update_ms": ms["update"], "tokens_per_second": speed,
        "mfu": 100 * record["flops_per_token"] * speed / peak_flops if peak_flops else None,
    }  # fmt: skip


def add_ratios(records: list[dict]) -> None:
    """To BF16 that computes nothing twice, where it was measured."""
    base = next((r for r in records if r["variant"] == "bf16"), {})
    for ratio, key in (("ratio", "tokens_per_second"), ("memory_ratio", "bytes_per_token")):
        for r in records:
            r[ratio] = r[key] / base[key] if r[key] and base.get(key) else None


def bench_depth(args: argparse.Namespace, depth: int, device: torch.device, results: Results) -> None:
    config = config_from_depth(
        depth, args.vocab_size, args.seq_len, args.head_dim, args.aspect_ratio, args.window_pattern
    )
    rows_per_step = args.total_batch_size // args.seq_len
    ours = Trainer(config, device, args.compile)
    print0(f"d{depth}: {ours.num_params:,} parameters, width {config.n_embd}, {config.sequence_len} tokens a row")
    known = {"width": config.n_embd, "flops_per_token": ours.flops_per_token}
    trainers: dict[Variant, Trainer] = {}
    records: dict[Variant, dict] = {}
    for recompute in args.recompute:
        added: dict[Variant, Trainer] = {Variant(method, recompute): ours for method in args.methods}
        nanochat = Variant("nanochat")
        if args.nanochat and not trainers:
            added[nanochat] = ours
        for variant in added:
            problem = args.problems.get(variant.method)
            records[variant] = results.add(depth, variant, **known, problem=problem)
        for variant, trainer in added.items():
            record = records[variant]
            if record["problem"]:
                continue
            with results.attempt(record, "micro-batch"):
                if variant == nanochat:
                    trainer = NanochatTrainer(args.nanochat, config, device, args.compile)
                trainers[variant] = trainer
                trainer.become(variant)
                find_memory(args, record, trainer, rows_per_step)
                add_ratios(list(records.values()))
                results.write()
                print0(f"{variant}: {describe_memory(record)}", flush=True)
        time_in_turns(args, trainers, records, results)

    for variant, trainer in trainers.items():
        record = records[variant]
        if args.table7 and record["problem"] is None:
            with results.attempt(record, "time by operation"):
                trainer.become(variant)
                found = time_by_operation(trainer, record["micro_batch"])
                results.operations += [{"depth": depth, "variant": str(variant), **r} for r in found]
                results.write()
                title = f"d{depth}, {variant}, micro-batch {record['micro_batch']}"
                print0(show_table_7(title, found) + "\n", flush=True)


def find_memory(args: argparse.Namespace, record: dict, trainer: Trainer, rows: int) -> None:
    """The micro-batch of a variant, its peak, and what a token takes, as far as they can be had."""
    memory = Memory()
    if args.micro_batch == "auto":
        record["micro_batch"], memory = find_micro_batch(trainer, rows, args.budget)
    else:
        size = record["micro_batch"] = args.micro_batch
        trainer.passes(size)
        trainer.update()  # makes the optimizers' states
        if trainer.device.type == "cuda" and not args.nanochat:  # two models at once: their memory would mean nothing
            memory.passes[size], memory.update = peaks_of_a_step(trainer, size)
    per_row = memory.per_row()
    record["peak_bytes"] = memory.peak(record["micro_batch"])
    record["bytes_per_token"] = per_row and per_row / args.seq_len


def describe_memory(record: dict) -> str:
    text = f"micro-batch {record['micro_batch']}"
    if record["peak_bytes"]:
        text += f", peak {record['peak_bytes'] / 2**30:.2f} GiB"
    if record["bytes_per_token"]:
        text += f", {record['bytes_per_token'] / 1e6:.3f} MB/token"
    return text


def show(records: list[dict]) -> str:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else form.format(value)

    header = ["", "variant", "micro-batch", "tokens/s", "x BF16", "MFU", "peak GiB", "MB/token", "x BF16 "]
    rows = [
        [
            f"d{r['depth']}", r["variant"] + (" FAILED" if r["problem"] else ""), cell(r["micro_batch"], "{}"),
            cell(r["tokens_per_second"], "{:.0f}"), cell(r["ratio"], "{:.2f}"), cell(r["mfu"], "{:.1f}%"),
            cell(r["peak_bytes"] and r["peak_bytes"] / 2**30, "{:.2f}"),
            cell(r["bytes_per_token"] and r["bytes_per_token"] / 1e6, "{:.3f}"), cell(r["memory_ratio"], "{:.2f}"),
        ]
        for r in records
    ]  # fmt: skip
    return common.table(header, rows)


def plot(records: list[dict], hardware: str, target: Path) -> None:
    """Bars: tokens/s, and the largest micro-batch, of each variant."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = [f"d{r['depth']} {r['variant']}" for r in records]
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.5 + 0.4 * len(records)), sharey=True)
    for axis, key, title in zip(axes, ("tokens_per_second", "micro_batch"), ("tokens/s", "micro-batch, rows")):
        values = [r[key] for r in records]
        bars = axis.barh(labels, values, color=["0.6" if r["variant"] == "bf16" else "tab:green" for r in records])
        axis.bar_label(bars, [f"{v:,.0f}" for v in values], padding=3)
        axis.set_xlabel(title)
        axis.margins(x=0.15)
    axes[0].invert_yaxis()
    figure.suptitle(hardware, fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    plt.close(figure)


# ----------------------------------------------------------------------------------------------------------------------
# Prediction: at which width 4 bits begin to pay


def show_prediction(machine: Machine, records: list[dict]) -> str:
    gemm = "native NVFP4 GEMM" if machine.fp4 else "emulated: decode to BF16, BF16 GEMM"
    lines = [
        f"PREDICTION for {machine.name}, not a measurement: {gemm}; {machine.source}. Time of a block's linear layers "
        f"over BF16's, {records[0]['tokens']} tokens; launches and everything outside of them left out"
    ]
    widths = list(records[0]["ratios"])
    rows = [[r["method"], *(f"{r['ratios'][w]:.2f}" for w in widths), r["width"] or "none"] for r in records]
    lines.append(common.table(["method", *(f"width {w}" for w in widths), "faster from width"], rows))
    return "\n".join(lines)


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    add = parser.add_argument
    add("--depth", default="26", help="depths, with commas")
    add("--methods", default="clover", help="of nf.METHODS or nf.ABLATIONS, with commas; bf16 is always there")
    add("--recompute", default="none", help=f"of {', '.join(RECOMPUTE)}, with commas: what is computed twice")
    add("--micro-batch", default="auto", help="rows, or auto for the largest that fits (needs a GPU)")
    add("--memory-cap", type=parse_bytes, help="hard limit on the GPU's memory, e.g. 32GiB")
    add("--total-batch-size", type=int, default=524288, help="tokens of an optimizer step")
    add("--seq-len", type=int, default=2048)
    add("--vocab-size", type=int, default=65536)
    add("--aspect-ratio", type=int, default=64, help="width = depth * aspect_ratio")
    add("--head-dim", type=int, default=128)
    add("--window-pattern", default="SSSL")
    add("--rounds", type=int, default=4, help="times that the variants take turns, after one to warm up")
    add("--calls", type=int, default=4, help="timed micro-batches of a variant in a round")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="(default: on a GPU only)")
    add("--table7", action=argparse.BooleanOptionalAction, default=True, help="profile: time by operation")
    add("--nanochat", default="", help="a checkout of nanochat to time as well, in BF16 (revision f5425245f)")
    add("--tokens", type=int, default=TOKENS, help="tokens of a micro-batch, for --roofline")
    common.add_common_arguments(parser)
    args = parser.parse_args(argv)

    args.depth = [int(d) if d.isdigit() else 0 for d in args.depth.split(",") if d]
    if not args.depth or min(args.depth) < 1:
        raise UserError("--depth must be one or several positive whole numbers, with commas")
    try:
        names = [get_recipe(m).name for m in args.methods.split(",") if m]
    except ValueError as error:
        raise UserError(f"--methods: {error}") from None
    args.methods = list(dict.fromkeys(["bf16", *names]))
    args.recompute = [r for r in args.recompute.split(",") if r]
    if not args.recompute or not set(args.recompute) <= set(RECOMPUTE):
        raise UserError(f"--recompute must be some of {', '.join(RECOMPUTE)}, with commas")
    if args.micro_batch != "auto":
        if not args.micro_batch.isdigit() or int(args.micro_batch) < 1:
            raise UserError(f"--micro-batch is {args.micro_batch!r}, expected 'auto' or a positive whole number")
        args.micro_batch = int(args.micro_batch)
    if min(args.rounds, args.calls, args.seq_len, args.vocab_size, args.total_batch_size, args.tokens) < 1:
        raise UserError("--rounds, --calls, --seq-len, --vocab-size, --total-batch-size, --tokens must be at least 1")
    rows = 1 if args.micro_batch == "auto" else args.micro_batch
    if args.nanochat and (args.micro_batch == "auto" or args.memory_cap):
        raise UserError("--nanochat holds two models at once; give --micro-batch a number, and no --memory-cap")
    if args.total_batch_size % (rows * args.seq_len):
        raise UserError(
            f"--total-batch-size {args.total_batch_size} is not a multiple of a micro-batch of {rows} rows of "
            f"{args.seq_len} tokens; choose a multiple"
        )
    return args


def set_up_device(args: argparse.Namespace) -> torch.device:
    """The device, its memory limited to the cap; sets args.budget and the default of args.compile."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    args.compile = cuda if args.compile is None else args.compile
    args.budget = 0
    if not cuda:
        if args.memory_cap or args.micro_batch == "auto":
            raise UserError(
                "there is no CUDA device, so there is no memory to measure: give --micro-batch a number, and small "
                f"sizes (see the top of scripts/bench_train.py), or predict: --roofline {'|'.join(MACHINES)}"
            )
        return device
    free, total = torch.cuda.mem_get_info()
    args.budget = free
    if args.memory_cap:
        if args.memory_cap > free:
            raise UserError(
                f"--memory-cap {format_bytes(args.memory_cap)} is more than the {format_bytes(free)} that are free on "
                "this GPU; lower it, or leave it out"
            )
        torch.cuda.set_per_process_memory_fraction(args.memory_cap / total)
        args.budget = args.memory_cap
    torch.set_float32_matmul_precision("high")
    return device


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    settings = {k: v for k, v in vars(args).items() if k not in ("json",)}
    if args.roofline:
        machine = MACHINES[args.roofline]
        settings["prediction_for"] = asdict(machine)
        records = predict(machine, args.methods[1:] or ["clover"], args.tokens)
        print0(show_prediction(machine, records))
        name = f"bench_train_{args.roofline}_predicted"
        print0(f"written to {common.write_json(name, args.json, settings, records)}")
        return

    device = set_up_device(args)
    info = environment_info()
    cap = f", at most {format_bytes(args.memory_cap)}" if args.memory_cap else ""
    hardware = f"{info['gpu'] or info['cpu']}{cap}; torch {info['torch']}; {nf.backend()}"
    print0(hardware, flush=True)
    settings["hardware"] = hardware
    results = Results(settings, args.json)
    args.problems = {m: p for m in args.methods if m != "bf16" and (p := method_problem(device, m))}
    for depth in args.depth:
        try:
            bench_depth(args, depth, device, results)
        except (ValueError, torch.OutOfMemoryError) as error:
            advice = "out of memory; lower --depth" if is_out_of_memory(error) else one_line(error)
            results.add(depth, Variant("bf16"), problem=advice)
        gc.collect()
        if device.type == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()
    records = results.records
    print0(show(records))
    print0(f"recompilations after the warm-up: {sum(r['recompiles'] or 0 for r in records)}")
    target = results.write()
    print0(f"written to {target}")
    timed = [r for r in records if r["tokens_per_second"]]
    if timed:
        plot(timed, hardware, target.with_suffix(".png"))
        print0(f"written to {target.with_suffix('.png')}")
    failed = [f"d{r['depth']} {r['variant']}: {r['problem']}" for r in records if r["problem"]]
    if failed:
        raise UserError(f"{len(failed)} of {len(records)} variants failed: {'; '.join(failed)}")


def method_problem(device: torch.device, method: str) -> str | None:
    """Why a method is not timed, if its layer is wrong or does not run."""
    try:
        problem = layer_problem(device, method)
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {one_line(error)}"
    if problem:
        print0(f"FAILED {method}: not timed, because the result is wrong: {problem}", flush=True)
    return problem and f"wrong result: {problem}"


if __name__ == "__main__":
    run_main(main)
