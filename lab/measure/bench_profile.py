"""Where the time of a training step goes, by operation (the paper's Table 7), from a trace of PyTorch's profiler."""

import functools
import json
import re
import tempfile
from pathlib import Path

import torch

from lab.measure import bench_common as common
from lab.measure.bench_step import Subject

# Kinds of work, by parts of the names of a kernel or of the operators that launched it; the first that fits counts.
KINDS = (
    ("LM head and loss", ("linear_cross_entropy", "_chunk_loss", "chunk_loss")),
    ("attention", ("flash", "fmha", "attention", "flex", "sdpa")),
    ("GEMM", ("gemm", "nvjet", "cutlass", "splitk", "mm_alpha", "dot_scaled_kernel", "codes_matmul", "one_row")),
    ("ReLU^2", ("relu_squared",)),
    ("abs-max", ("amax_kernel", "nvfp4::amax")),
    ("decode", ("decode_kernel", "nvfp4::decode")),
    ("rotate and quantize", ("rotate_quantize", "repair", "prepare_kernel", "finish_kernel", "nvfp4::rotate")),
    ("quantize", ("convert_kernel", "feedback_kernel", "quantize", "tensor_scale", "nvfp4::", "swizzle", "row_kernel")),
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


def time_by_operation(subject: Subject, rows: int) -> list[dict]:
    """Milliseconds by phase and kind of work, of a micro-batch and an update: a GPU's kernels, or a CPU's operators."""
    cuda = subject.device.type == "cuda"
    ids = subject.tokens(rows)
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with torch.profiler.profile(activities=activities) as profile:
            with subject.micro_batches(2):
                subject.micro_batch(ids, ids)
            subject.update()
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
