"""
How reproducible a run is on this machine's GPU, as it is and with --runtime=deterministic: one table.

    python -m lab.measure.determinism                                  # d6, clover; under 3 minutes on an H100 or H200
    python -m lab.measure.determinism --method=bf16 --steps=100
    python -m lab.measure.determinism --out=runs.json                  # the numbers as JSON as well

For both modes: the same run twice (do losses and final weights agree to the bit?), a run that is killed by SIGKILL
after its second checkpoint and resumed, tokens/s of a run that has the GPU to itself, and the operations of one step of
training that give other bits when they are given the same bits again. The runs are scripts.base_train's, compiled, on
the embedded corpus, in a temporary folder; the operations are those of the model not compiled. Nothing is downloaded.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat_fp4.common import use_deterministic_kernels
from nanochat_fp4.errors import UserError, run_main

ROOT = Path(__file__).resolve().parents[2]
MODES = ("default", "deterministic")
ALONE_WARM_UP = 10  # steps before the throughput counts
VOCAB_SIZE = 4096


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How reproducible a run is on this machine's GPU", allow_abbrev=False)
    add = parser.add_argument
    add("--method", default="clover", help="QAT method")
    add("--depth", type=int, default=6)
    add("--max-seq-len", type=int, default=1024)
    add("--device-batch-size", type=int, default=32)
    add("--micro-batches", type=int, default=2, help="of a step")
    add("--steps", type=int, default=60)
    add("--passes", type=int, default=4, help="of one training step, whose operations are compared")
    add("--device-type", default="cuda")
    add("--out", default="", help="write the numbers here as JSON")
    add("--operations-of", choices=MODES, help=argparse.SUPPRESS)  # in a process of its own
    return parser.parse_args(argv)


# ----------------------------------------------------------------------------------------------------------------------
# Operations that give other bits from the same bits


def digest(value: Any, floats: bool = False) -> int:
    """
    64 bits that depend on every bit of every tensor in `value` (floats: of those of floating-point numbers); exact sums
    of integers, so the same each time.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() == 0 or value.device.type == "meta" or value.layout != torch.strided:
            return 0
        if floats and not value.is_floating_point():
            return 0
        kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        bits = value.detach().contiguous().view(-1).view(kinds[value.element_size()])
        total = 0
        for start in range(0, bits.numel(), 1 << 25):
            part = bits[start : start + (1 << 25)].to(torch.int64)
            weights = torch.arange(start, start + part.numel(), device=part.device) * 0x5851F42D4C957F2D + 1
            total = hash((total, int((part * weights).sum())))
        return total
    parts = value.values() if isinstance(value, dict) else value
    return hash(tuple(digest(v, floats) for v in parts)) if isinstance(value, dict | list | tuple) else 0


class Recorder(TorchDispatchMode):
    """Notes (name, phase, digest of what goes in, digest of what comes out) of every operation inside."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, str, int, int]] = []
        self.phase = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removesuffix(".default")
        # Attention's forward pass hands a random state to its backward: integers that nobody writes without dropout.
        floats = "attention" in name
        before = digest((args, kwargs), floats)
        out = func(*args, **kwargs)
        if "empty" not in name:  # whatever was in that memory
            after = digest((args, kwargs, out), floats)  # args: some are written to
            self.calls.append((name, self.phase, before, after))
        return out


def compare_calls(passes: list[list[tuple[str, str, int, int]]]) -> dict[str, Any]:
    """
    What differs between passes over the same step. sources: operation -> how many of its calls gave other bits from
    the same bits; first: the first call whose results differ; calls: of one pass.
    """
    sources: Counter = Counter()
    first = None
    for position, calls in enumerate(zip(*passes)):
        name, phase, before, after = calls[0]
        if any(c[0] != name for c in calls):
            raise UserError(f"the passes are not the same operations: {sorted({c[0] for c in calls})} at {position}")
        if any(c[3] != after for c in calls):
            first = first or f"{name} in the {phase}, call {position + 1} of {len(passes[0])}"
            known: dict[int, int] = {}
            if any(known.setdefault(c[2], c[3]) != c[3] for c in calls):
                sources[name] += 1
    return {"sources": dict(sources.most_common()), "first": first, "calls": len(passes[0])}


def operations(args: argparse.Namespace) -> dict[str, Any]:
    """compare_calls of a training step of the model, not compiled, repeated from the same state."""
    import nanochat_fp4 as nf
    from nanochat_fp4.models.gpt import GPT, autocast, config_from_depth

    device = torch.device(args.device_type)
    torch.manual_seed(1)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = GPT(config_from_depth(args.depth, VOCAB_SIZE, args.max_seq_len, 64, 64, "SSSL"))
    model.init_weights()
    with torch.no_grad():  # the projections are zero at first; with them nothing before them would have a gradient
        for p in model.transformer.h.parameters():
            p += 0.02 * torch.randn_like(p)
    nf.convert(model, args.method, verbose=False)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.randint(VOCAB_SIZE, (min(8, args.device_batch_size), args.max_seq_len + 1), device=device)
    passes = []
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(1 + args.passes):  # the first makes tables that the others find
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(weights[name])
            model.zero_grad(set_to_none=True)
            optimizers = model.setup_optimizers()
            torch.manual_seed(2)
            with Recorder() as recorder:
                recorder.phase = "forward pass"
                with autocast(device.type):
                    loss = model(tokens[:, :-1], tokens[:, 1:].contiguous())
                recorder.phase = "backward pass"
                loss.backward()
                recorder.phase = "update"
                for optimizer in optimizers:
                    optimizer.step()
            passes.append(recorder.calls)
    return compare_calls(passes[1:])


# ----------------------------------------------------------------------------------------------------------------------
# Runs


class Runs:
    """Runs of scripts.base_train in a base directory of their own."""

    def __init__(self, args: argparse.Namespace, base: Path):
        self.args, self.base = args, base
        self.env = {k: v for k, v in os.environ.items() if k not in ("DATA_DIR", "QAT_METHOD")}
        self.env |= {"NANOCHAT_BASE_DIR": str(base), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        batch = args.device_batch_size * args.micro_batches * args.max_seq_len
        flags = f"""--method={args.method} --depth={args.depth} --head-dim=64 --max-seq-len={args.max_seq_len}
            --device-batch-size={args.device_batch_size} --total-batch-size={batch} --num-iterations={args.steps}
            --eval-every=-1 --core-metric-every=-1 --sample-every=-1 --device-type={args.device_type}"""
        self.flags = flags.split()

    def folder(self, tag: str) -> Path:
        return self.base / "base_checkpoints" / tag

    def program(self, *arguments: str, log: str, **env: str) -> subprocess.Popen:
        with open(self.base / f"{log}.log", "ab") as f:
            return subprocess.Popen(
                [sys.executable, *arguments], env=self.env | env, stdout=f, stderr=f, stdin=subprocess.DEVNULL, cwd=ROOT
            )

    def wait(self, process: subprocess.Popen, log: str) -> None:
        if process.wait() != 0:
            raise UserError(f"a run ended with status {process.returncode}; its log ends with: {self.log(log)[-1500:]}")

    def log(self, name: str) -> str:
        return (self.base / f"{name}.log").read_text(errors="replace")

    def start(self, tag: str, mode: str, *flags: str) -> subprocess.Popen:
        chosen = ["--runtime=deterministic"] if mode == "deterministic" else []
        module = ["-m", "scripts.base_train"]
        return self.program(*module, *self.flags, *chosen, f"--model-tag={tag}", *flags, log=tag)

    def prepare(self) -> None:
        tokenizer = f"scripts.tok_train --vocab-size={VOCAB_SIZE} --max-chars=2000000"
        for module in ("nanochat_fp4.data.dataset --embedded --size-mb=4", tokenizer):
            self.wait(self.program("-m", *module.split(), log="prepare"), "prepare")

    def kill_after_a_checkpoint(self, running: dict[str, subprocess.Popen], step: int) -> None:
        """SIGKILL for each, by tag, as soon as it is three steps past its checkpoint of `step`."""
        while running:
            for tag, process in list(running.items()):
                if process.poll() is not None:
                    raise UserError(f"the run that was to be killed had ended ({process.returncode}); raise --steps")
                if (self.folder(tag) / f"manifest_{step:06d}.json").exists() and len(self.losses(tag)) > step + 3:
                    process.send_signal(signal.SIGKILL)
                    running.pop(tag).wait()
            time.sleep(0.005)

    def records(self, tag: str) -> list[dict[str, Any]]:
        path = self.folder(tag) / "metrics.jsonl"
        lines = path.read_text(errors="replace").splitlines(keepends=True) if path.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]  # not the one just being written
        return [r for r in records if r.get("event") == "train"]

    def losses(self, tag: str) -> dict[int, float]:
        return {r["step"]: r["loss"] for r in self.records(tag)}

    def throughput(self, tag: str) -> float:
        """Median tokens a second of the steps after the first ones, which compile."""
        return statistics.median(r["tok_per_sec"] for r in self.records(tag)[ALONE_WARM_UP:])

    def compare(self, a: str, b: str) -> dict[str, Any]:
        """The first step whose losses differ, how many weights do at the end, and by how much."""
        losses_a, losses_b = self.losses(a), self.losses(b)
        steps = sorted(losses_a.keys() | losses_b.keys())
        step = next((s for s in steps if losses_a.get(s) != losses_b.get(s)), None)
        name = f"model_{self.args.steps:06d}.pt"
        x, y = (torch.load(self.folder(tag) / name, map_location="cpu", weights_only=True) for tag in (a, b))
        different = [k for k in x if not torch.equal(x[k], y[k])]
        relative = [float((x[k].float() - y[k].float()).norm() / x[k].float().norm()) for k in different]
        known = {"first_loss_that_differs": step, "tensors": len(x), "tensors_that_differ": len(different)}
        return known | {"largest_relative_difference": max(relative, default=0.0)}


def measure(args: argparse.Namespace, base: Path) -> dict[str, Any]:
    runs = Runs(args, base)
    runs.prepare()
    for mode in MODES:  # alone, for the throughput
        runs.wait(runs.start(f"{mode}_1", mode), f"{mode}_1")
    every = args.steps // 4
    beside = {mode: runs.start(f"{mode}_2", mode) for mode in MODES}
    killed = {f"{mode}_killed": runs.start(f"{mode}_killed", mode, f"--save-every={every}") for mode in MODES}
    runs.kill_after_a_checkpoint(killed, 2 * every)
    resumed = {mode: runs.start(f"{mode}_killed", mode, "--resume-from-step=latest") for mode in MODES}
    asked = {}
    for mode in MODES:
        me = [
            "-m",
            "lab.measure.determinism",
            *sys.argv[1:],
            f"--operations-of={mode}",
            f"--out={base / f'{mode}.json'}",
        ]
        asked[mode] = runs.program(*me, log=f"operations_{mode}", TORCHDYNAMO_DISABLE="1")
    for mode in MODES:
        runs.wait(beside[mode], f"{mode}_2")
        runs.wait(resumed[mode], f"{mode}_killed")
        runs.wait(asked[mode], f"operations_{mode}")
    numbers: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if args.device_type == "cuda" else "CPU", "torch": torch.__version__,
        "method": args.method, "depth": args.depth, "steps": args.steps, "killed_after": 2 * every,
    }  # fmt: skip
    for mode in MODES:
        text = runs.log(f"{mode}_killed")
        if f"Resuming from step {2 * every}" not in text:
            raise UserError(f"the killed run did not go on from step {2 * every}; its log ends with: {text[-1500:]}")
        numbers[mode] = {
            "twice": runs.compare(f"{mode}_1", f"{mode}_2"),
            "resumed": runs.compare(f"{mode}_1", f"{mode}_killed"),
            "tokens_per_second": runs.throughput(f"{mode}_1"),
            "operations": json.loads((base / f"{mode}.json").read_text()),
        }
    return numbers


# ----------------------------------------------------------------------------------------------------------------------
# The table


def describe_comparison(c: dict[str, Any]) -> str:
    if not c["tensors_that_differ"] and c["first_loss_that_differs"] is None:
        return f"the same bits ({c['tensors']} tensors, every loss)"
    step = c["first_loss_that_differs"]
    losses = "all losses equal" if step is None else f"losses from step {step} on"
    share = f"{c['tensors_that_differ']} of {c['tensors']} tensors"
    return f"{losses}; {share}, by up to {c['largest_relative_difference']:.1e}"


def table(numbers: dict[str, Any]) -> str:
    columns = [numbers[mode] for mode in MODES]
    price = columns[1]["tokens_per_second"] / columns[0]["tokens_per_second"]
    named = [", ".join(f"{name} ({n})" for name, n in c["operations"]["sources"].items()) for c in columns]
    sources = [text or f"none of {c['operations']['calls']}" for text, c in zip(named, columns)]
    rates = [f"{c['tokens_per_second']:,.0f}" for c in columns]
    killed = f"killed after step {numbers['killed_after']}, resumed"
    rows = [
        ("the same run twice", *(describe_comparison(c["twice"]) for c in columns)),
        (killed, *(describe_comparison(c["resumed"]) for c in columns)),
        ("tokens/s", rates[0], f"{rates[1]} ({price:.3f}x)"),
        ("operations with other bits from the same bits", *sources),
        ("the first call that differs", *(c["operations"]["first"] or "none" for c in columns)),
    ]
    run = f"{numbers['method']} d{numbers['depth']}, {numbers['steps']} steps"
    head = f"{numbers['gpu']}, torch {numbers['torch']}, {run}"
    lines = [head, "", "| | as it is | --runtime=deterministic |", "|---|---|---|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def main() -> None:
    args = parse_args()
    if args.operations_of:
        if args.operations_of == "deterministic":
            use_deterministic_kernels()
        Path(args.out).write_text(json.dumps(operations(args)))
        return
    if args.device_type == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no GPU here; --device-type=cpu --depth=1 --max-seq-len=64 tries the script out")
    if args.steps < 2 * ALONE_WARM_UP:
        raise UserError(f"--steps={args.steps} is too short; use at least {2 * ALONE_WARM_UP}")
    base = Path(tempfile.mkdtemp(prefix="nanochat_determinism_"))
    began = time.monotonic()
    try:
        numbers = measure(args, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    if args.out:
        Path(args.out).write_text(json.dumps(numbers, indent=2) + "\n")
    print(table(numbers))
    print(f"\n{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    run_main(main)
