"""Measures the speed and memory of training steps of whole models, with methods beside BF16 in the same run: tokens/s,
MFU, peak memory, the largest micro-batch, the time by operation (the paper's Table 7), and recompilations.

    python -m lab.bench steps                                          # d26; BF16, FP8, clover, clover_fp8_forward
    python -m lab.bench steps --memory-cap 32GiB --recompute none,mlp  # as if on an RTX 5090
    python -m lab.bench steps --depth 20,26,32 --methods clover,nvidia --micro-batch 8
    python -m lab.bench steps --depth 20 --orthogonalizer newton_schulz    # its update_ms, in the JSON
    python -m lab.bench steps --methods bf16:32,clover:64,clover:32    # each with a micro-batch of its own
    python -m lab.bench steps --depth 20 --methods "" --micro-batch 16 --nanochat ~/nanochat   # with its --fp8
    python -m lab.bench steps --methods fp8,clover --micro-batch 8 --cuda-graph --nanochat ~/nanochat
    python -m lab.bench steps --methods none --micro-batch 16 --nanochat ~/nanochat   # where two models do not fit
    python -m lab.bench steps --depth 2 --head-dim 64 --seq-len 64 --vocab-size 256 --total-batch-size 256 \\
        --micro-batch 2 --rounds 2                                         # a trial on a CPU

There is one model with one set of weights and optimizers. A method is a recipe of its layers, and the methods take
turns. A step is that of scripts.base_train on random tokens: it accumulates gradients over micro-batches, makes the
codes of the weights once, and updates with Muon and AdamW. The times of a micro-batch, of making the codes and of the
update are medians over all rounds, and

    tokens/s = total batch / (micro-batches * micro-batch time + codes + update)

What is timed is what base_train trains by default: the output head of each method (FP8 or BF16), sliding windows, the
attention that this machine has (NANOCHAT_ATTENTION names another), and CUDA graphs where the memory suffices by count.
--head, --window-pattern and --[no-]cuda-graph fix them for all methods, and the JSON records them. nanochat's
micro-batches are launched as usual. A variant captures its graphs at the beginning of each of its turns, which is not
timed, and frees their memory at the end.

With --table7 a variant is profiled twice after all rounds. The first profile has one micro-batch and update without
graphs, and gives the time by operation (the paper's Table 7). The second one has --calls micro-batches as they are
timed. The GPU waits in the time that they take beyond their kernels.

Peak memory is that of a whole step, including gradients and optimizer states. The largest micro-batch is found by
running steps. Steps of 1 and 2 rows predict it, and the prediction is tried out. The difference of the first and the
last peak gives the memory that is kept for a token. --memory-cap is a hard limit on PyTorch's allocator.

Rows are printed, and the JSON is written, after each search and each round of turns. All methods are measured with the
first value of --recompute first. If a variant fails, its row says why, the others go on, and the exit status is 2.
"""

import os

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # PyTorch reads it when CUDA starts.

import argparse
import functools
import gc
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

import nanochat_fp4 as nf
from lab.bench import common, step
from lab.bench.step import GraphedSubject, Stopwatch, Subject, Variant, has_graphs
from nanochat_fp4.cli import UserError, format_bytes, is_out_of_memory, one_line
from nanochat_fp4.common import print0
from nanochat_fp4.doctor import layer_problem
from nanochat_fp4.hardware import get_peak_flops, gpu_memory
from nanochat_fp4.models import flash_attention
from nanochat_fp4.models.cross_entropy import HEADS, default_head
from nanochat_fp4.models.gpt import GPT, RECOMPUTE, config_from_depth
from nanochat_fp4.models.optim import ORTHOGONALIZERS
from nanochat_fp4.models.optim8bit import STATES
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.training.graphed import graphs_problem
from nanochat_fp4.training.memory import plan_accumulation

UNKNOWN = (
    "micro_batch", "micro_batches", "micro_batch_ms", "codes_ms", "update_ms", "tokens_per_second", "ratio",
    "mfu", "peak_bytes", "bytes_per_token", "memory_ratio", "rounds", "recompiles", "wall_ms", "kernel_ms", "launches",
    "problem",
)  # fmt: skip
COLUMNS = {
    "": ("depth", "d{}"), "variant": ("variant", ""), "head": ("head", ""), "micro-batch": ("micro_batch", "{}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"), "x BF16": ("ratio", "{:.2f}"), "MFU": ("mfu", "{:.1f}%"),
    "peak GiB": ("peak", "{:.2f}"), "MB/token": ("mb", "{:.3f}"), "x BF16 ": ("memory_ratio", "{:.2f}"),
}  # fmt: skip


class Report(common.Results):
    """The results. There is a record for each variant of a depth, with None for numbers that are not known yet, and
    there are records of the time by operation."""

    def add(self, depth: int, variant: Variant, **known: object) -> dict:
        """Adds the record of a variant, and returns it."""
        record = {"depth": depth, "variant": str(variant), "method": variant.method, "recompute": variant.recompute}
        record |= {"head": variant.head, "graph": variant.graph}
        self.records.append(record | dict.fromkeys(UNKNOWN) | known)
        return self.records[-1]

    @contextmanager
    def attempt(self, record: dict, what: str) -> Iterator[None]:
        """A context in which an error becomes the record's problem, and is printed and written."""
        gc.collect()  # Memory that an error of the attempt before keeps alive can be freed only now.
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


def add_ratios(records: list[dict]) -> None:
    """Adds ratios to BF16 without recomputation to the records, if it was measured."""
    base = next((r for r in records if (r["method"], r["recompute"]) == ("bf16", "none")), {})
    for ratio, key in (("ratio", "tokens_per_second"), ("memory_ratio", "bytes_per_token")):
        for r in records:
            r[ratio] = r[key] / base[key] if r[key] and base.get(key) else None


def show(records: Iterable[dict]) -> str:
    """Returns the records as a table. A variant that failed is marked."""
    scaled = []
    for r in records:
        peak, kept, failed = r["peak_bytes"], r["bytes_per_token"], " FAILED" if r["problem"] else ""
        scaled.append(r | {"variant": r["variant"] + failed, "peak": peak and peak / 2**30, "mb": kept and kept / 1e6})
    return common.show(scaled, COLUMNS)


# ----------------------------------------------------------------------------------------------------------------------
# The benchmark


def time_in_turns(args: argparse.Namespace, subjects: dict[Variant, Subject], records: dict, results: Report) -> None:
    """Times the variants that have no problem, one after the other, round by round. The first round warms up. Their
    records change together after each round, so that all times always come from the same rounds."""
    watches: dict[Variant, Stopwatch] = {}
    if all(records[v]["problem"] for v in subjects):
        return
    for i in range(args.rounds + 1):
        for variant, subject in subjects.items():
            record = records[variant]
            if record["problem"]:
                continue
            if i < 2:
                watches[variant] = Stopwatch(subject.device)
            graphs = step.compiled_graphs()
            with results.attempt(record, f"round {i}"):
                subject.become(variant)
                try:
                    step.run_steps(subject, record["micro_batch"], args.calls, watches[variant])
                finally:
                    subject.release()  # The next variant may be another model, which needs the memory.
                if i:
                    record["recompiles"] = (record["recompiles"] or 0) + step.compiled_graphs() - graphs
        if i == 0:
            continue
        for variant, subject in subjects.items():
            if records[variant]["problem"] is None:
                add_times(args, records[variant], watches[variant].medians(), subject)
                records[variant]["rounds"] = i
        add_ratios(list(records.values()))
        results.write()
        print0(f"after round {i} of {args.rounds}:\n{show(records.values())}", flush=True)


def add_times(args: argparse.Namespace, record: dict, ms: dict[str, float], subject: Subject) -> None:
    """Puts the median times of a variant, and the tokens/s and MFU that follow from them, into its record."""
    times = args.total_batch_size // args.seq_len // record["micro_batch"]
    step_ms = times * ms["micro-batch"] + ms["codes"] + ms["update"]
    speed = times * record["micro_batch"] * args.seq_len / step_ms * 1e3
    cuda = subject.device.type == "cuda"
    peak_flops = get_peak_flops(torch.cuda.get_device_name(subject.device)) if cuda else None
    record |= {
        "micro_batches": times, "micro_batch_ms": ms["micro-batch"], "codes_ms": ms["codes"],
        "update_ms": ms["update"], "tokens_per_second": speed,
        "mfu": 100 * record["flops_per_token"] * speed / peak_flops if peak_flops else None,
    }  # fmt: skip


def bench_depth(args: argparse.Namespace, depth: int, device: torch.device, results: Report) -> None:
    """Measures all variants of one depth: memory first, then times in turns, and then the time by operation."""
    sizes = args.vocab_size, args.seq_len, args.head_dim, args.aspect_ratio, args.window_pattern
    config = config_from_depth(depth, *sizes)
    with torch.device("meta"):
        shape = GPT(config)
    what = f"d{depth}: {shape.num_scaling_params():,} parameters, width {config.n_embd}, {args.seq_len} tokens a row"
    print0(f"{what}, windows {config.window_pattern}")
    known = {"width": config.n_embd, "flops_per_token": shape.estimate_flops()}
    ours = None
    # As in base_train, graphs are for where the memory suffices by count. Beside nanochat's model that is not known.
    by_count = args.cuda_graph is None and has_graphs(device) and not args.nanochat
    if args.variants:
        if args.cuda_graph and not has_graphs(device):
            print0(f"no CUDA graphs: the model is on {device}")
        kind = GraphedSubject if has_graphs(device) and (args.cuda_graph or by_count) else Subject
        ours = kind(config, device, args.compile, args.state, args.orthogonalizer)
        results.settings["attention"] = flash_attention.setup(device.type, "S" in config.window_pattern.upper())
    graph = bool(args.cuda_graph and has_graphs(device))
    subjects: dict[Variant, Subject] = {}
    records: dict[Variant, dict] = {}
    theirs = step.nanochat_variants(args.nanochat) if args.nanochat else []
    checkout = functools.cache(lambda: step.NanochatSubject(args.nanochat, config, device, args.compile))
    for recompute in args.recompute:
        added = [Variant(m, recompute, rows, args.head or default_head(m), graph) for m, rows in args.variants]
        added += [] if subjects else theirs
        records |= {v: results.add(depth, v, **known, problem=args.problems.get(v.method)) for v in added}
        for variant in added:
            record = records[variant]
            if record["problem"]:
                continue
            with results.attempt(record, "micro-batch"):
                subjects[variant] = subject = checkout() if variant in theirs else ours
                subject.become(variant)
                find_memory(args, record, subject, variant.rows or args.micro_batch)
                if by_count and subject is ours and may_have_graphs(args, record, subject):
                    variant.graph = True
                    record |= {"variant": str(variant), "graph": True}
                    subject.become(variant)
                    record["peak_bytes"] = max(step.peaks_of_a_step(subject, record["micro_batch"]))
                add_ratios(list(records.values()))
                results.write()
                print0(show([record]), flush=True)
        time_in_turns(args, subjects, records, results)

    for variant, subject in subjects.items():
        record = records[variant]
        if args.table7 and record["problem"] is None:
            with results.attempt(record, "time by operation"):
                subject.become(variant)
                found = step.time_by_operation(subject, record["micro_batch"])
                results.records += [{"depth": depth, "variant": str(variant), **r} for r in found]
                results.write()
                title = f"d{depth}, {variant}, micro-batch {record['micro_batch']}"
                print0(step.show_table_7(title, found), flush=True)
                if device.type == "cuda":
                    record |= step.time_of_gaps(subject, record["micro_batch"], args.calls)
                    results.write()
                    print0(show_gaps(record), flush=True)
                print0(flush=True)


def may_have_graphs(args: argparse.Namespace, record: dict, subject: Subject) -> bool:
    """Returns whether base_train would keep this micro-batch as a CUDA graph, also under the cap. If not, prints the
    reason."""
    problem = graphs_problem(subject.model, record["micro_batch"], args.seq_len, cap=args.memory_cap)
    if problem:
        print0(f"{record['variant']}: no CUDA graphs: {problem}")
    return problem is None


def show_gaps(record: dict) -> str:
    """Returns a line with the time in which the GPU waits in a micro-batch."""
    wall, kernels = record["wall_ms"], record["kernel_ms"]
    if wall is None:
        return "A micro-batch in a profile: the profiler saw no kernel of the GPU"
    of_them = f"{kernels:.1f} ms of kernels and {wall - kernels:.1f} ms of gaps, {record['launches']:.0f} launches"
    return f"A micro-batch in a profile: {wall:.1f} ms, that is {of_them}"


def find_memory(args: argparse.Namespace, record: dict, subject: Subject, size: int | str) -> None:
    """Puts the micro-batch of a variant, its peak, and the bytes for each token into the record, as far as they can be
    measured."""
    passes, update = {}, 0
    if size == "auto":
        size, passes, update = step.find_micro_batch(subject, args.total_batch_size // args.seq_len, args.budget)
    else:
        subject.passes(size)
        subject.update()  # It makes the optimizers' states.
        subject.release()
        # With nanochat there are two models at once, whose memory would mean nothing.
        if subject.device.type == "cuda" and not (args.nanochat and args.variants):
            passes[size], update = step.peaks_of_a_step(subject, size)
    record["micro_batch"] = size
    record["peak_bytes"] = max(passes[size], update) if size in passes else None
    if len(passes) > 1:
        a, b = min(passes), max(passes)
        record["bytes_per_token"] = (passes[b] - passes[a]) / (b - a) / args.seq_len


# ----------------------------------------------------------------------------------------------------------------------
# Command line


def parse_bytes(text: str) -> int:
    """A type of argparse that reads an amount of memory, such as 32GiB, 24GB or 512MiB, as bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B?", text, re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory; write for example 32GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2].upper()) + 1))


def parse_variant(text: str) -> tuple[str, int | None]:
    """Reads a method with or without the rows of its micro-batch: "clover" or "clover:64". Raises UserError for
    anything else."""
    name, colon, rows = text.partition(":")
    if colon and (not rows.isdecimal() or int(rows) < 1):
        raise UserError(f"--methods: {text!r}, expected a method, or one with the rows of its micro-batch: clover:64")
    try:
        return get_recipe(name).name, int(rows) if colon else None
    except ValueError as error:
        raise UserError(f"--methods: {error}") from None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = common.argument_parser(__doc__.partition(":")[0].replace("\n", " "))
    add = parser.add_argument
    add("--depth", default="26", help="depths, with commas")
    text = "of nf.METHODS or lab/recipes.py, with commas; bf16 is always there. clover:64: in micro-batches of 64 rows"
    text += ". none: only nanochat"
    add("--methods", default="fp8,clover,clover_fp8_forward", help=text)
    add("--recompute", default="none", help=f"of {', '.join(RECOMPUTE)}, with commas: what is computed twice")
    add("--state", choices=STATES, default="fp32", help="of weights, gradients and moments, as base_train's")
    add("--orthogonalizer", choices=ORTHOGONALIZERS, default="polar_express", help="of Muon; its time is update_ms")
    add("--head", choices=HEADS, help="products of the output head (default: each method's, as in base_train)")
    add("--micro-batch", default="auto", help="rows, or auto for the largest that fits (needs a GPU)")
    add("--memory-cap", type=parse_bytes, help="hard limit on the GPU's memory, e.g. 32GiB")
    add("--total-batch-size", type=int, default=524288, help="tokens of an optimizer step")
    add("--seq-len", type=int, default=2048)
    add("--vocab-size", type=int, default=65536)
    add("--aspect-ratio", type=int, default=64, help="width = depth * aspect_ratio")
    add("--head-dim", type=int, default=128)
    add("--window-pattern", default="SSSL", help="sliding windows of the layers in turn, as base_train's")
    add("--rounds", type=int, default=4, help="times that the variants take turns, after one to warm up")
    add("--calls", type=int, default=4, help="timed micro-batches of a variant in a round")
    add("--compile", action=argparse.BooleanOptionalAction, default=None, help="(default: on a GPU only)")
    text = "replay our micro-batches as CUDA graphs (default: as base_train, where the memory suffices by count; with "
    text += "--nanochat never)"
    add("--cuda-graph", action=argparse.BooleanOptionalAction, default=None, help=text)
    text = "profiles: time by operation, and on a GPU the micro-batch's time minus its kernels'"
    add("--table7", action=argparse.BooleanOptionalAction, default=True, help=text)
    add(
        "--nanochat",
        default="",
        help="a checkout of nanochat (f5425245f or later) to time as well, and its --fp8",
    )
    args = parser.parse_args(argv)

    args.depth = [int(d) if d.isdigit() else 0 for d in args.depth.split(",") if d]
    if not args.depth or min(args.depth) < 1:
        raise UserError("--depth must be one or several positive whole numbers, with commas")
    args.variants = []
    if args.methods != "none":
        args.variants = [parse_variant(text) for text in args.methods.split(",") if text]
        if "bf16" not in [method for method, _ in args.variants]:
            args.variants.append(("bf16", None))
    elif not args.nanochat:
        raise UserError(
            "--methods=none leaves nothing to time; name methods, or give --nanochat a checkout of nanochat"
        )
    args.variants = sorted(dict.fromkeys(args.variants), key=lambda v: v[0] != "bf16")  # The baseline comes first.
    args.recompute = common.some_of("--recompute", args.recompute, RECOMPUTE)
    if args.micro_batch != "auto":
        if not args.micro_batch.isdigit() or int(args.micro_batch) < 1:
            raise UserError(f"--micro-batch is {args.micro_batch!r}, expected 'auto' or a positive whole number")
        args.micro_batch = int(args.micro_batch)
    if min(args.rounds, args.calls, args.seq_len, args.vocab_size, args.total_batch_size) < 1:
        raise UserError("--rounds, --calls, --seq-len, --vocab-size and --total-batch-size must be at least 1")
    if args.nanochat and args.variants and (args.micro_batch == "auto" or args.memory_cap):
        problem = "--nanochat holds two models at once; give --micro-batch a number, and no --memory-cap"
        raise UserError(f"{problem}; or time nanochat alone, with --methods=none")
    for rows in (1 if args.micro_batch == "auto" else args.micro_batch, *(rows for _, rows in args.variants if rows)):
        plan_accumulation(args.total_batch_size, rows, args.seq_len, 1, "--micro-batch")
    return args


def set_up_device(args: argparse.Namespace) -> torch.device:
    """Returns the device, whose memory is limited to the cap. Sets args.budget, and args.compile if the flag was not
    given."""
    cuda = torch.cuda.is_available()
    args.compile = cuda if args.compile is None else args.compile
    args.budget = 0
    if not cuda:
        if args.memory_cap or (args.micro_batch == "auto" and not all(rows for _, rows in args.variants)):
            todo = "give --micro-batch a number, and small sizes (see the top of lab/bench/steps.py)"
            problem = f"there is no CUDA device, so there is no memory to measure: {todo}"
            raise UserError(f"{problem}")
        return torch.device("cpu")
    free, total = gpu_memory()
    args.budget = min(args.memory_cap or free, free)
    if args.memory_cap:
        if args.memory_cap > free:
            wanted = format_bytes(args.memory_cap)
            print0(f"of --memory-cap {wanted} only {format_bytes(free)} are free: that is the cap")
        args.memory_cap = args.budget
        torch.cuda.set_per_process_memory_fraction(args.memory_cap / total)
    torch.set_float32_matmul_precision("high")
    return torch.device("cuda")


def method_problem(device: torch.device, method: str) -> str | None:
    """Returns the reason why a method is not timed, if its layer is wrong or does not run, and otherwise None."""
    try:
        problem = layer_problem(device, method)
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {one_line(error)}"
    if problem:
        print0(f"FAILED {method}: not timed, because the result is wrong: {problem}", flush=True)
    return problem and f"wrong result: {problem}"


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    settings = {k: v for k, v in vars(args).items() if k != "json"}
    device = set_up_device(args)
    settings["memory_cap"] = args.memory_cap
    results = Report("bench_train", args.json, settings)
    info = results.environment
    cap = f", at most {format_bytes(args.memory_cap)}" if args.memory_cap else ""
    settings["hardware"] = f"{info['gpu'] or info['cpu']}{cap}; torch {info['torch']}; {nf.backend()}"
    print0(settings["hardware"], flush=True)
    methods = dict.fromkeys(method for method, _ in args.variants if method != "bf16")
    args.problems = {m: p for m in methods if (p := method_problem(device, m))}
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
    records = [r for r in results.records if "problem" in r]
    print0(show(records))
    print0(f"recompilations after the warm-up: {sum(r['recompiles'] or 0 for r in records)}")
    results.finish()
    if failed := [f"d{r['depth']} {r['variant']}: {r['problem']}" for r in records if r["problem"]]:
        raise UserError(f"{len(failed)} of {len(records)} variants failed: {'; '.join(failed)}")
