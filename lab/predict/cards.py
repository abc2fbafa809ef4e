"""What four cards are expected to do, with the band, and what would make it wrong: the table in docs/published.md.

python -m lab.predict.cards      # its last line is a hash of the model's constants, which are frozen by a test
"""

import hashlib
import itertools

from nanochat_fp4 import step_time
from nanochat_fp4.errors import run_main
from nanochat_fp4.step_time import MACHINES, SPEEDRUN, Shape, run_hours, tokens_per_second

CARDS = ("rtx5090", "rtxpro6000", "b200", "gb10")
METHODS, HOURS = ("bf16", "fp8", "fp8_tuned", "clover", "clover_feedback_late"), ("bf16", "fp8_tuned", "clover")


def fingerprint() -> str:
    """Of every constant that a prediction is made of."""
    known = sorted((name, repr(value)) for name, value in vars(step_time).items() if name.isupper())
    return hashlib.sha256(repr(known).encode()).hexdigest()[:12]


def cards() -> str:
    """Markdown: thousand tokens/s, expected and (worst to best), and hours of the speedrun."""
    lines = [f"| thousand tokens/s | {' | '.join(METHODS)} | {' | '.join(f'hours: {m}' for m in HOURS)} |"]
    lines.append("|---" * (1 + len(METHODS) + len(HOURS)) + "|")
    for card, depth in itertools.product(CARDS, (20, 26, 32)):
        machine, shape, cells = MACHINES[card], Shape(depth), []
        batch = {"micro_batch": 16384 if card == "b200" else 8192}
        for method in METHODS:
            v = {band: speed / 1e3 for band, speed in tokens_per_second(shape, method, machine, **batch).items()}
            band = f" ({v['worst']:.1f} to {v['best']:.1f})" if v["worst"] != v["best"] else ""
            cells.append(f"{v['']:.1f}{band}")
        for method in HOURS:
            cells.append(f"{run_hours(shape, method, machine, 20 * shape.parameters, SPEEDRUN, **batch)[''][0]:.3g}")
        lines.append(f"| d{depth}, {machine.name} | {' | '.join(cells)} |")
    lines += ["", *(f"- {MACHINES[card].name}: {MACHINES[card].doubt}" for card in CARDS)]
    return "\n".join([*lines, f"- Constants of the model: {fingerprint()}"])


if __name__ == "__main__":
    run_main(lambda: print(cards()))
