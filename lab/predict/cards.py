"""Predicts the speed of four cards, with a band and with what would make it wrong: the table in docs/published.md.

python -m lab.predict.cards      # The last line is a hash of the model's constants. A test freezes them.
"""

import hashlib
import itertools

from lab.predict import step_time
from lab.predict.machines import MACHINES
from lab.predict.step_time import Shape, run_hours, tokens_per_second
from nanochat_fp4.errors import run_main

# What would make a card's prediction wrong.
DOUBTS = {
    "rtx5090": "cuBLASLt's FP4 is slower than Triton's 874 TFLOP/s here, or if our rotating kernels issue less than "
    "0.7 of an H200's share. Neither was timed at these shapes.",
    "rtxpro6000": "its power limit slows its multiprocessors below the RTX 5090's. The model has no power.",
    "b200": "an H200's shares of a data sheet do not carry over. No time of a B200 was fitted.",
    "gb10": "its memory gives less than 0.7 of 273 GB/s, or if a cuBLASLt from CUDA 13.4 on multiplies FP4 faster than "
    "133 TFLOP/s. Others' d20 made 14,400 to 17,000 tokens/s in BF16 and NVFP4.",
}
SPEEDRUN = {"eval_every": 250 * 524288, "eval_tokens": 20 * 524288, "save_every": 1000 * 524288}  # of speedrun_fp4.sh
METHODS, HOURS = ("bf16", "fp8", "fp8_tuned", "clover", "clover_feedback_late"), ("bf16", "fp8_tuned", "clover")


def fingerprint() -> str:
    """A hash of all constants of the predictions."""
    known = sorted((name, repr(value)) for name, value in vars(step_time).items() if name.isupper())
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


def cards() -> str:
    """Markdown: thousand tokens/s, expected and (worst to best), and hours of the speedrun."""
    lines = [f"| thousand tokens/s | {' | '.join(METHODS)} | {' | '.join(f'hours: {m}' for m in HOURS)} |"]
    lines.append("|---" * (1 + len(METHODS) + len(HOURS)) + "|")
    for card, depth in itertools.product(DOUBTS, (20, 26, 32)):
        machine, shape, cells = MACHINES[card], Shape(depth), []
        batch = {"micro_batch": 16384 if card == "b200" else 8192}
        for method in METHODS:
            v = {band: speed / 1e3 for band, speed in tokens_per_second(shape, method, machine, **batch).items()}
            band = f" ({v['worst']:.1f} to {v['best']:.1f})" if v["worst"] != v["best"] else ""
            cells.append(f"{v['']:.1f}{band}")
        for method in HOURS:
            cells.append(f"{run_hours(shape, method, machine, 20 * shape.parameters, **SPEEDRUN, **batch)[''][0]:.3g}")
        lines.append(f"| d{depth}, {machine.name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {MACHINES[card].name}: Wrong if {doubt}" for card, doubt in DOUBTS.items())]
    return "\n".join([*lines, f"- Constants of the model: {fingerprint()}"])


if __name__ == "__main__":
    run_main(lambda: print(cards()))
