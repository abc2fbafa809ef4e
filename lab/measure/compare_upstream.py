"""
Trains real nanochat checkouts through nanochat_fp4.upstream with several methods and prints the losses side by side.

Where there is a network or a corpus folder (parquet shards with a column `text`; the last one is validation):

    python -m lab.measure.compare_upstream prepare --corpus CORPUS --checkout ~/nanochat --base prepared

fills `prepared` with some shards and a tokenizer that the checkout's own scripts.tok_train makes. Then, here or on a
machine without a network to which this repository, the checkouts and `prepared` were carried:

    python -m lab.measure.compare_upstream run --base prepared ~/nanochat-f5425245f ~/nanochat

trains one after the other and prints the losses of all logs in --out. So runs may be started apart, each on a GPU of
its own (--methods): the last to end prints all.

It needs what the checkouts import: torch, tiktoken, pyarrow, requests, filelock, pyyaml, jinja2. wandb, rustbpe, psutil
and tokenizers are replaced by empty modules where they are missing: pre-training does not call them.
"""

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.errors import UserError, run_main

ROOT = Path(__file__).resolve().parents[2]
STUBS = {"wandb": (), "rustbpe": (), "psutil": (), "tokenizers": ("models", "trainers")}
STEP_LINE = re.compile(r"^step (\d+)/\d+ .*?\| loss: ([\d.naif]+) .*?\| dt: ([\d.]+)ms", re.M)
BPB_LINE = re.compile(r"^Step (\d+) \| Validation bpb: ([\d.naif]+)", re.M)


def make_stubs(folder: Path) -> list[str]:
    """Empty modules for those packages of STUBS that are not installed. Returns their names."""
    missing = [name for name in STUBS if importlib.util.find_spec(name) is None]
    for name in missing:
        (folder / name).mkdir(parents=True)
        for module in ("__init__", *STUBS[name]):
            (folder / name / f"{module}.py").write_text("def __getattr__(name):\n    return object\n")
    return missing


def environment(checkout: Path, base: Path, stubs: Path) -> dict[str, str]:
    """What a script of `checkout` runs under: this source tree, `base` as NANOCHAT_BASE_DIR, no wandb."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""), str(stubs)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in paths if p),
        "NANOCHAT_DIR": str(checkout.resolve()),
        "NANOCHAT_BASE_DIR": str(base),
        "PYTHONUNBUFFERED": "1",
        "WANDB_RUN": "dummy",
    }


def upstream(arguments: Sequence[str], env: dict[str, str], log: Path, nproc: int = 1) -> str:
    """Runs nanochat_fp4.upstream with its output in `log`; returns that output. Raises UserError if it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"] if nproc > 1 else []
    command = [sys.executable, *launcher, "-m", "nanochat_fp4.upstream", *arguments]
    print(f"\n$ NANOCHAT_DIR={env['NANOCHAT_DIR']} {' '.join(command[1:])}\n  log: {log}", flush=True)
    started = time.monotonic()
    with open(log, "w") as f:
        status = subprocess.run(command, env=env, stdout=f, stderr=subprocess.STDOUT, cwd=ROOT).returncode
    text = log.read_text(errors="replace")
    for line in text.splitlines():
        if line.startswith("nanochat_fp4:") or " bpb: " in line or line.startswith("Peak memory"):
            print(f"  {line}")
    if status:
        print("\n".join(text.splitlines()[-25:]))
        raise UserError(f"exit status {status} after {time.monotonic() - started:.0f} s; all of it is in {log}")
    print(f"  {time.monotonic() - started:.0f} s", flush=True)
    return text


def prepare(args: argparse.Namespace) -> None:
    shards = sorted(args.corpus.glob("*.parquet"))
    if len(shards) < 2:
        raise UserError(f"{args.corpus} holds {len(shards)} .parquet files; two are needed, the last to validate")
    data = args.base / "base_data"
    data.mkdir(parents=True, exist_ok=True)
    for shard in [*shards[:-1][: args.shards], shards[-1]]:
        shutil.copyfile(shard, data / shard.name)
    newest = args.base / "base_data_climbmix"  # the newest revision's name for the folder of shards
    if not newest.is_symlink():
        newest.symlink_to("base_data")
    with tempfile.TemporaryDirectory() as temporary:
        env = environment(args.checkout, args.base.resolve(), Path(temporary))
        make_stubs(Path(temporary))
        options = [f"--max-chars={args.max_chars}", f"--vocab-size={args.vocab_size}"]
        upstream(["--method=bf16", "scripts.tok_train", "--", *options], env, args.base / "tok_train.log")
    print(f"\n{args.base} is ready; carry it whole, links as links, with this repository and the checkouts")


def train(args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    flags = {  # that both revisions know
        "depth": args.depth,
        "max-seq-len": args.seq_len,
        "window-pattern": "L",  # the only one that does not crawl without FlashAttention-3
        "device-batch-size": args.device_batch_size,
        "total-batch-size": args.total_batch_size,
        "num-iterations": args.steps,
        "eval-every": args.steps,
        "eval-tokens": args.eval_tokens,
        "core-metric-every": -1,
        "sample-every": -1,
    }
    options = ["scripts.base_train", "--", *(f"--{name}={value}" for name, value in flags.items()), *args.more]
    with tempfile.TemporaryDirectory() as temporary:
        stubs = Path(temporary) / "stubs"
        if missing := make_stubs(stubs):
            print(f"not installed, replaced by empty modules: {', '.join(missing)}")
        for checkout, method in itertools.product(args.checkouts, args.methods):
            name = f"{checkout.name}_{method}"
            base = Path(temporary) / name  # so that runs share nothing but their data
            base.mkdir()
            for entry in ("tokenizer", "base_data", "base_data_climbmix"):
                (base / entry).symlink_to((args.base / entry).resolve())
            env = environment(checkout, base, stubs)
            upstream([f"--method={method}", *options], env, args.out.resolve() / f"{name}.log", args.nproc)
            shutil.rmtree(base)  # checkpoints: gigabytes
    print("\n" + side_by_side(args.out, args.every))


def side_by_side(folder: Path, every: int) -> str:
    """A column for each log in the folder: loss every so many steps and last, validation BPB, time of a step."""
    results = {log.stem: log.read_text(errors="replace") for log in sorted(folder.glob("*.log"))}
    losses = {run: {int(s): loss for s, loss, _ in STEP_LINE.findall(text)} for run, text in results.items()}
    bpb = {run: {int(s): value for s, value in BPB_LINE.findall(text)} for run, text in results.items()}
    last = max((step for column in losses.values() for step in column), default=0)
    shown = [step for step in range(last + 1) if step % every == 0 or step == last]
    rows = [[f"step {step}", *(column.get(step, "-") for column in losses.values())] for step in shown]
    for step in sorted({s for column in bpb.values() for s in column}):
        rows.append([f"val bpb {step}", *(column.get(step, "-") for column in bpb.values())])
    times = [[float(dt) for _, _, dt in STEP_LINE.findall(text)] for text in results.values()]
    rows.append(["ms (median)", *(f"{statistics.median(ms):.1f}" if ms else "-" for ms in times)])
    return table(["", *results], rows)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = ArgumentParser(description=__doc__.strip().split("\n")[0], epilog="After --: arguments of base_train.")
    commands = parser.add_subparsers(required=True, metavar="prepare|run")
    sub = commands.add_parser("prepare", help="shards and a tokenizer, for `run`")
    sub.set_defaults(function=prepare)
    sub.add_argument("--corpus", type=Path, required=True, help="folder of parquet shards; the last is validation")
    sub.add_argument("--checkout", type=Path, required=True, help="the nanochat checkout that trains the tokenizer")
    sub.add_argument("--base", type=Path, required=True, help="folder to fill")
    sub.add_argument("--shards", type=int, default=1, help="how many training shards to copy")
    sub.add_argument("--vocab-size", type=int, default=32768)
    sub.add_argument("--max-chars", type=int, default=50_000_000, help="characters the tokenizer is trained on")
    sub = commands.add_parser("run", help="train every checkout with every method")
    sub.set_defaults(function=train)
    sub.add_argument("checkouts", type=Path, nargs="+")
    sub.add_argument("--base", type=Path, required=True, help="what `prepare` made")
    sub.add_argument("--out", type=Path, default=Path("compare_upstream_logs"), help="folder for the logs")
    sub.add_argument("--methods", nargs="+", default=["bf16", "clover"])
    sub.add_argument("--steps", type=int, default=50)
    sub.add_argument("--depth", type=int, default=12)
    sub.add_argument("--seq-len", type=int, default=2048)
    sub.add_argument("--device-batch-size", type=int, default=16)
    sub.add_argument("--total-batch-size", type=int, default=131072, help="tokens a step")
    sub.add_argument("--eval-tokens", type=int, default=524288)
    sub.add_argument("--nproc", type=int, default=1, help="processes (GPUs), through torchrun")
    sub.add_argument("--every", type=int, default=5, help="print the loss of every so many steps")
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.more = argv[cut + 1 :]
    args.function(args)


if __name__ == "__main__":
    run_main(main)
