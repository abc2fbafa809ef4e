"""
Training losses of a few runs in one picture, from the metrics.jsonl in their folders: to see that they are one run.

    python dev/plot_losses.py docs/results/scale_d12.png "1 GPU=one/metrics.jsonl" "2, ddp=two/metrics.jsonl"

Prints how far each is from the first at the most, and on average over the last 50 steps.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from nanochat_fp4 import plots  # noqa: E402
from nanochat_fp4.errors import UserError, run_main  # noqa: E402
from nanochat_fp4.metrics import read_jsonl  # noqa: E402


def losses(path: Path) -> dict[int, float]:
    """step -> loss. Raises UserError for a file without any."""
    found = {r["step"]: r["loss"] for r in read_jsonl(path) if r.get("event") == "train"} if path.is_file() else {}
    if not found:
        raise UserError(f"{path} has no losses of training steps; give the metrics.jsonl of a run")
    return found


def main(argv: list[str] | None = None) -> None:
    picture, *runs = (sys.argv[1:] if argv is None else argv) or [""]
    if not runs or not all("=" in run for run in runs):
        raise UserError('give a picture and runs: plot_losses.py out.png "name=metrics.jsonl" ...')
    curves = {name: losses(Path(path)) for name, path in (run.split("=", 1) for run in runs)}
    first = next(iter(curves.values()))
    for name, curve in curves.items():
        apart = [abs(curve[step] - first[step]) for step in sorted(curve.keys() & first.keys())]
        if not apart:
            raise UserError(f"{name} has no step that {next(iter(curves))} has, too")
        last = apart[-50:]
        print(f"{name}: {len(apart)} steps, at most {max(apart):.4f} apart, {sum(last) / len(last):.4f} in the last 50")

    def plot(axes: Any) -> None:
        for style, (name, curve) in zip(("-", "--", ":", "-."), curves.items()):
            plots.curve(axes, name, [(list(curve), list(curve.values()))], style)
        axes.set_xlabel("step")
        axes.set_ylabel("training loss, nats a token")

    plots.draw(Path(picture), "Training loss of the same run on different numbers of processes", plot)


if __name__ == "__main__":
    run_main(main)
