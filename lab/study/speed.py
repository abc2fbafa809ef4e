"""Makes Tables 3, 4, 6 and 7 and Figure 6: the models of the paper, and speed as lab.bench measures it."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from lab import RESULTS, ROOT, cards
from lab import runs as kept_runs
from lab.study.context import Context, Outcome
from lab.study.sweep_runs import flag_values, size_flags
from nanochat_fp4.cli import UserError
from nanochat_fp4.hardware import environment_info
from nanochat_fp4.models import llama
from scripts import plan


def benchmark(name: str) -> tuple[list[dict], dict]:
    """Reads a file of lab.bench, or a part of lab/results/bench.json. Returns (records, environment). Raises UserError
    if there is no such file or part."""
    try:
        kept = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
        content = kept[name] if name in kept else json.loads(Path(name).read_text(encoding="utf-8"))
        return content["records"], content["environment"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        problem = f"{name} is {'not there' if isinstance(e, FileNotFoundError) else 'no file of lab.bench'}"
        raise UserError(f"{problem}; give its JSON, or a part of lab/results/bench.json: {', '.join(kept)}") from None


def run_benchmark(context: Context, what: str, flags: list[str]) -> list[dict]:
    """Runs a benchmark in a process of its own and returns its records. Raises UserError if it fails."""
    path = context.folder / f"bench_{what}.json"
    command = [sys.executable, "-m", "lab.bench", what, f"--json={path}", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"lab.bench {what} failed: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return benchmark(str(path))[0]


def measured(context: Context) -> Outcome:
    """Makes a table of all measured layers and steps of lab/results/bench.json, or of one part of it."""
    kept = json.loads((RESULTS / "bench.json").read_text(encoding="utf-8"))
    if (wanted := context.args.results) not in ("", *kept):
        raise UserError(f"--results={wanted}: lab/results/bench.json has no such part; it has {', '.join(kept)}")
    rows, parts = [], {name: of for name, of in kept.items() if isinstance(of, dict) and wanted in ("", name)}
    for name, part in parts.items():
        card = part["environment"]["gpu"].removeprefix("NVIDIA ").split()[0]
        windows = part["settings"].get("window_pattern", "L")
        for r in part["records"]:
            if r.get("pass") == "forward+backward":
                rows.append([card, f"{r['model']}, layers", r["method"], f"{r['ms']:.4g} ms", name])
            elif r.get("tokens_per_second"):
                what = f"d{r['depth']}, {r['micro_batch']} rows" + ("" if windows == "L" else f", windows {windows}")
                what += ", FP8 head" if r.get("head") == "fp8" else ""
                what += ", CUDA graphs" if r.get("graph") else ""
                peak = f"{r['peak_bytes'] / 2**30:.1f} GiB" if r.get("peak_bytes") else "-"
                rows.append([card, what, r["method"], f"{r['tokens_per_second']:,.0f} tokens/s; {peak}", name])
    title = "Measured: linear layers (forward and backward, 8 x 2,048 tokens) and training steps"
    notes = ["a row of a micro-batch has 2,048 tokens; the memory is the peak of a whole step"]
    header, environment = ["card", "what", "method", "measured", "part of bench.json"], kept_runs.pooled(parts.values())
    return Outcome(title, header, rows, notes, {}, None, "", environment)


def published(context: Context) -> Outcome:
    """Makes a table of the whole steps of others from which the plan computes hours (lab/results/published_steps.json).

    A ratio to BF16 stands where the precisions were tuned alike and had the same micro-batch.
    """
    rows = []
    for card in cards.published():
        for step in (step for step in card["rates"] if "part" not in step):
            speeds = {key: step.get(key, []) for key in cards.PRECISIONS}
            said = [" to ".join(f"{n:,}" for n in of) if isinstance(of, list) else f"{of:,}" for of in speeds.values()]
            ratios = []
            for key in cards.PRECISIONS[1:]:
                alike = {key, "bf16"} <= set(step["equal"])
                of, bf16 = (cards.both_ends(step, k) if alike else () for k in (key, "bf16"))
                ends = dict.fromkeys(f"{a / b:.2f}" for a, b in zip(of, reversed(bf16)))
                ratios.append(" to ".join(ends) or "-")
            count = f"{step['gpus']} x " if step["gpus"] > 1 else ""
            what = f"{step['model']}; {step['note']}"
            rows.append([f"{count}{card['name']}", what, *(text or "-" for text in said), *ratios, step["source"]])
    header = ["card", "what", "BF16", "FP8", "NVFP4", "FP8 / BF16", "NVFP4 / BF16", "measured by"]
    notes = ["tokens/s of all GPUs of a row together; 8 bits are FP8 or MXFP8"]
    return Outcome("Whole steps of others, from which the plan computes hours", header, rows, notes, {})


def hours(context: Context) -> Outcome:
    """Makes a table of the hours of base training on one RTX 5090, as the plan of a run computes them."""
    rows, methods = [], plan.ADVISED[:2] + plan.ADVISED[:1:-1]
    for depth, run in ((12, ""), (20, ", the speedrun"), (26, ""), (32, ", run1000")):
        cells = []
        for method in methods:
            of = {"GPU": "rtx5090", "PLAN_ONLY": "1", "NANOCHAT_BASE_DIR": str(context.folder / "no measurements")}
            s = plan.Settings("speedrun", of | {"DEPTH": str(depth), "QAT_METHOD": method})
            cells.append(plan.span(*plan.hours(s, plan.Base(s, method))[:2]))
        rows.append([f"d{depth}{run}", *cells])
    notes = ["the validations are counted, and recomputation is not"]
    return Outcome("Hours of base training on one RTX 5090", ["", *(f"`{m}`" for m in methods)], rows, notes, {})


# ----------------------------------------------------------------------------------------------------------------------
# Tables 3 and 4: the Llama-like models

TABLE_3 = {  # The paper's layers, width, heads and learning rate.
    "30M": (6, 640, 5, 0.0012), "50M": (7, 768, 6, 0.0012), "100M": (8, 1024, 8, 0.0009),
    "200M": (10, 1280, 10, 0.00072),
}  # fmt: skip
TABLE_4 = {  # The paper's value, and a function that returns the one of this package.
    "sequence length": (512, lambda flags: int(flags["max-seq-len"])),
    "batch, sequences": (512, lambda flags: int(flags["total-batch-size"]) // int(flags["max-seq-len"])),
    "warm-up, share of the steps": (0.1, lambda flags: 1 / llama.WARMUP_SHARE),
    "gradient clipping": (1.0, lambda flags: llama.CLIP_NORM),
    "weight decay": (0.1, lambda flags: llama.WEIGHT_DECAY),
}


def table3(context: Context) -> Outcome:
    """Makes Table 3: the sizes of the Llama-like models."""
    rows = [[size, *(f"{a:g}; {b:g}" for a, b in zip(of, llama.SIZES[size]))] for size, of in TABLE_3.items()]
    header = ["model", *(f"{name}: paper; here" for name in ("layers", "width", "heads", "learning rate"))]
    return Outcome("Table 3: the Llama-like models", header, rows, [], {})


def table4(context: Context) -> Outcome:
    """Makes Table 4: the settings with which the Llama-like models train."""
    flags = flag_values(size_flags("llama-30M"))
    rows = [[name, f"{paper:g}", f"{here(flags):g}"] for name, (paper, here) in TABLE_4.items()]
    notes = ["AdamW with a cosine schedule, optimizer and accumulators in FP32, as in the paper"]
    return Outcome("Table 4: how the Llama-like models train", ["setting", "paper", "here"], rows, notes, {})


# ----------------------------------------------------------------------------------------------------------------------
# Figure 6, Table 6: speed of linear layers


def fig6(context: Context) -> Outcome:
    """Makes Figure 6 and Table 6: the speed of the linear layers, forward and backward."""
    header = ["machine", "model", "method", "paper, x", "here, x BF16", "ms"]
    context.chosen_columns(header)
    on_gpu, models = torch.cuda.is_available() and not context.quick, context.args.models or "800M,3B,7B"
    stored = context.args.results or ("" if on_gpu else "bench_linear")
    if stored:
        records, environment = benchmark(stored)
    else:
        flags, environment = [f"--models={models}", "--passes=forward+backward"], environment_info()
        settings = {"models": models, "machine": environment["gpu"]}
        records = context.piece("fig6", settings, lambda: run_benchmark(context, "layers", flags))
    rows = []
    for r in records:
        if r["pass"] == "forward+backward" and r["method"] != "bf16" and r["ratio"]:
            paper = "up to 4.2 (RTX 5090)" if r["method"] == "clover" else "-"
            where = f"{environment['gpu']}, {r['mode']}"
            rows.append([where, r["model"], r["method"], paper, f"{1 / r['ratio']:.2f}", f"{r['ms']:.2f}"])
    notes = ["the paper: more than 4x over BF16, and about 70% more than Quartet's kernels, on an RTX 5090"]
    title = "Figure 6, Table 6: speed of the linear layers of Llama-like models, forward + backward"
    what = "8 x 2048 tokens, the paper's Table 6 shapes"
    return Outcome(title, header, rows, notes, {"records": records}, None, what, environment)


# ----------------------------------------------------------------------------------------------------------------------
# Table 7: time by operation

# The paper's Table 7: kind of work, as lab.bench steps names it -> (forward, backward) in percent of the pass. Rows of
# one kind are added up, which are LM head and loss, and grad quant. and act. requant.
TABLE_7 = {
    "GEMM": (24, 19),
    "attention": (21, 18),
    "LM head and loss": (18, 13),
    "quantize": (8, None),
    "rotate and quantize": (None, 21),
    "abs-max": (5, None),
    "ReLU^2": (7, 4),
    "RMSNorm": (6, 7),
    "gradient accumulation": (None, 3),
}


def table7(context: Context) -> Outcome:
    """Makes Table 7: the time of a training step by operation."""
    header = ["operation", "forward, paper", "here", "backward, paper", "here"]
    context.chosen_columns(header)
    name, environment = context.args.results, None
    on_gpu = bool(name) or (torch.cuda.is_available() and not context.quick)
    if name:
        records, environment = benchmark(name)
    else:
        flags = ["--depth=26", "--methods=clover", "--total-batch-size=524288"]
        if not on_gpu:
            small = "--seq-len=64 --vocab-size=256 --total-batch-size=128 --micro-batch=2 --rounds=1 --calls=1"
            flags = ["--depth=2", "--methods=clover", "--head-dim=64", *small.split()]
        settings = {"flags": flags, "gpu": environment_info()["gpu"]}
        records = context.piece("table7", settings, lambda: run_benchmark(context, "steps", flags))
    # There may be records of several sizes, of which the first is taken.
    timed = [r for r in records if "phase" in r and r["variant"].split(",")[0] == "clover"]
    if not timed:
        raise UserError(f"{name} has no times by operation of clover; run lab.bench steps with clover and --table7")
    ms = {(r["phase"], r["kind"]): r["ms"] for r in timed if r["variant"] == timed[0]["variant"]}
    sums = {phase: sum(v for (p, _), v in ms.items() if p == phase) for phase in ("forward", "backward")}
    rows = []
    for kind in (*TABLE_7, *sorted({k for p, k in ms if p in sums} - set(TABLE_7))):
        shares = [f"{100 * ms.get((p, kind), 0.0) / sums[p]:.0f}" for p in sums]
        forward, backward = TABLE_7.get(kind, (None, None))
        rows.append([kind, forward or "-", shares[0], backward or "-", shares[1]])
    title = "Table 7: time by operation, clover, % of the pass (paper: 1.1B parameters on an RTX 5090)"
    notes = [f"forward {sums['forward']:.1f} ms, backward {sums['backward']:.1f} ms a micro-batch"]
    what = "d26, micro-batch as large as fits" if on_gpu else "a model of two layers: a check of the command"
    return Outcome(title, header, rows, notes, {"records": records}, None, what, environment)
