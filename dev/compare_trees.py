"""
Trains the same models with two versions of this project and prints how far their losses are apart.

    git worktree add ../before b75c0cd
    python dev/compare_trees.py --before ../before --base ~/.cache/nanochat --seeds 1 2 3 --jobs 3 --out curves \\
        -- --depth=12 --window-pattern=L --num-iterations=500 --device-batch-size=8 --total-batch-size=32768

What follows -- goes to scripts.base_train of both. The same seed means the same weights at the start and the same text
in the same order, so that losses are compared in pairs; rotations and stochastic rounding differ. A run that is done
in --out is not repeated: the same command again goes on, and prints the table.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from nanochat_fp4.report import read_jsonl  # noqa: E402
from scripts.sweep_results import estimate  # noqa: E402
from scripts.sweep_scheduler import visible_devices  # noqa: E402

Curve = dict[int, float]  # step -> loss


def losses(run: Path) -> Curve:
    """The training losses of a run so far."""
    return {
        r["step"]: r["loss"]
        for path in run.glob("base_checkpoints/*/metrics.jsonl")
        for r in read_jsonl(path)
        if r.get("event") == "train" and isinstance(r.get("loss"), float)
    }


def train(tree: Path, run: Path, seed: int, device: str, args: argparse.Namespace) -> str | None:
    """One run of one tree in the folder `run`, unless it is there. Returns what went wrong, or None."""
    if (run / "complete").exists():
        return None
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    for entry in ("tokenizer", "base_data"):
        if (args.base / entry).exists():
            (run / entry).symlink_to((args.base / entry).resolve())
    env = os.environ | {"NANOCHAT_BASE_DIR": str(run.resolve()), "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'kernels'}"}
    if device != "cpu":
        env["CUDA_VISIBLE_DEVICES"] = device
    never = [f"--{name}-every=-1" for name in ("eval", "core-metric", "sample")]
    command = [sys.executable, "-m", "scripts.base_train", f"--seed={seed}", *never, *args.more]
    with open(run / "log", "w") as log:
        status = subprocess.run(command, cwd=tree, env=env, stdout=log, stderr=log).returncode
    for folder in run.glob("base_checkpoints/*/*"):
        if folder.name != "metrics.jsonl":  # checkpoints: gigabytes
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    if status:
        last = (run / "log").read_text(errors="replace").strip().splitlines()[-1:]
        return f"{run.name}: exit status {status}: {''.join(last)[:200]}"
    (run / "complete").touch()
    return None


def table(before: dict[int, Curve], after: dict[int, Curve], every: int, window: int) -> str:
    """Losses (seed -> curve) averaged over `window` steps up to every so many, and the difference of the pairs."""

    def at(curve: Curve, step: int) -> float | None:
        steps = range(step - window, step)
        return sum(curve[s] for s in steps) / window if all(s in curve for s in steps) else None

    last = max((step + 1 for curve in (*before.values(), *after.values()) for step in curve), default=0)
    lines = [
        f"mean loss of the {window} steps up to a step; after - before: mean and 95% interval of the pairs",
        f"{'step':>5} {'pairs':>5} {'before':>9} {'after':>9} {'sd of seeds':>11} {'after - before':>20}   each pair",
    ]
    for step in range(every, last + 1, every):
        pairs = [(at(before[seed], step), at(after[seed], step)) for seed in sorted(before.keys() & after.keys())]
        pairs = [pair for pair in pairs if None not in pair]
        if not pairs:
            continue
        differences = [b - a for a, b in pairs]
        mean = [sum(column) / len(pairs) for column in zip(*pairs)]
        spread = (sum((a - mean[0]) ** 2 for a, _ in pairs) / max(1, len(pairs) - 1)) ** 0.5
        gap = estimate(differences)
        lines.append(
            f"{step:5} {len(pairs):5} {mean[0]:9.4f} {mean[1]:9.4f} {spread:11.4f} {gap.mean:+10.4f} ± {gap.half:7.4f}"
            f"   {' '.join(f'{d:+.4f}' for d in differences)}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--before", type=Path, required=True, help="folder with the other version of this project")
    add("--base", type=Path, required=True, help="folder with a tokenizer (and base_data, without a DATA_DIR)")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--jobs", type=int, default=1, help="runs at a time on each device")
    add("--out", type=Path, default=Path("compare_trees"), help="folder for logs and losses")
    add("--every", type=int, default=100, help="a row of the table every so many steps")
    add("--window", type=int, default=25, metavar="STEPS", help="steps that a row averages over")
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:cut])
    args.more = argv[cut + 1 :]
    if min(args.every, args.window, args.jobs) < 1:
        parser.error("--every, --window and --jobs must be at least 1")
    trees = {"before": args.before.resolve(), "after": ROOT}
    if not (trees["before"] / "scripts" / "base_train.py").is_file():
        sys.exit(f"error: {args.before} is no version of this project: it has no scripts/base_train.py")

    devices: queue.Queue[str] = queue.Queue()
    names = visible_devices(args.jobs)
    for name in names:
        devices.put(name)

    def one(task: tuple[str, int]) -> str | None:
        (version, seed), device = task, devices.get()
        try:
            return train(trees[version], args.out / f"{version}_{seed}", seed, device, args)
        finally:
            devices.put(device)

    with ThreadPoolExecutor(len(names)) as pool:  # pairs first: whatever ends this early leaves pairs
        problems = [p for p in pool.map(one, [(v, s) for s in args.seeds for v in trees]) if p]
    curves = {v: {s: losses(args.out / f"{v}_{s}") for s in args.seeds} for v in trees}
    print(table(curves["before"], curves["after"], args.every, args.window))
    if problems:
        sys.exit("error: " + "; ".join(problems))


if __name__ == "__main__":
    main()
