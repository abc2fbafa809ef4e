"""The style of the project's pictures: a title, units, whole steps, and colours for colour-blind readers.

Only this module imports matplotlib, and only when it draws a picture. Callers explain an ImportError to the user.
"""

import functools
import itertools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanochat_fp4.files import atomic_open

# These are the colours of Okabe and Ito (jfly.uni-koeln.de/color) without black and yellow. Black is the colour of the
# baseline, and yellow is too light for lines on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")

BASELINE = "black"
# The seed in the name of a run of the pipeline, or of a sweep.
SEED = re.compile(r"_seed\d+(?=_|$)|_s\d+_[0-9a-f]{8}$")


def draw(path: Path, title: str, *panels: Callable[[Any], None]) -> bool:
    """Writes a PNG. Each panel is called with its axes. The first panel is the tallest, and all have the same x
    axis. Returns False, and writes nothing, if no panel draws anything.

    The legend of the first panel is below the picture, where it hides no lines, unless the panel has made its own.
    """
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot

    style = {"axes.prop_cycle": cycler(color=COLORS), "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style | {"axes.grid": True, "grid.alpha": 0.3, "font.size": 9}):
        heights = [3, *[1] * (len(panels) - 1)]
        size = (7, 4.5 * sum(heights) / 3)
        figure, column = pyplot.subplots(
            len(panels), squeeze=False, sharex=True, figsize=size, layout="constrained", height_ratios=heights
        )
        axes = column[0, 0]
        try:
            for panel, below in zip(panels, column[:, 0]):
                panel(below)
                below.set_axisbelow(True)
                below.label_outer()
                if below.get_xlabel() == "step":
                    below.xaxis.get_major_locator().set_params(integer=True)
            if not any(part.has_data() for part in (*column[:, 0], *axes.child_axes)):
                return False
            axes.set_title("\n".join(textwrap.wrap(title, 75)), fontsize=10)
            lines = axes.get_legend_handles_labels()
            if axes.get_legend() is None and lines[0]:
                widest = max(map(len, lines[1]))
                columns = 1 if widest > 50 else 3 if widest <= 30 and len(lines[0]) > 4 else 2
                figure.legend(*lines, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path) as f:
                figure.savefig(f, format="png", dpi=150)
            return True
        finally:
            pyplot.close(figure)


def curve(
    axes: Any, label: str, runs: list[tuple[list, list]], style: str = "-", color: str | None = None, wide: bool = False
) -> None:
    """Draws one run as a line of (x, y). For several runs, of different seeds, it draws their mean and a band.

    `style` is a line style of matplotlib, and "none" draws points alone. `wide` draws a pale, wide line, which stays
    visible under another one.
    """
    common = sorted(set.intersection(*(set(x) for x, _ in runs)))
    values = [[dict(zip(x, y))[position] for x, y in runs] for position in common]
    mean = [sum(v) / len(v) for v in values]
    if len(runs) > 1:
        label = f"{label}, mean and range of {len(runs)} seeds"
    width, size, alpha = (5, 8, 0.25) if wide else (1.4, 3, 1)
    marker = None if len(common) >= 15 else "s" if style == "--" else "o"
    (line,) = axes.plot(
        common, mean, linestyle=style, label=label, color=color, linewidth=width, alpha=alpha, marker=marker,
        markersize=size if style == "none" else 3,
    )  # fmt: skip
    if len(runs) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        if style == "none":
            axes.vlines(common, low, high, color=line.get_color())
        else:
            axes.fill_between(common, low, high, color=line.get_color(), alpha=0.12, linewidth=0)


# ----------------------------------------------------------------------------------------------------------------------
# The pictures of the report

_LOSS = "training loss, nats per token (smoothed)"
PICTURES = {  # The name of a file and of the curve of a run that it shows: the title, and that of the y axis.
    "loss": ("Pre-training", _LOSS),
    "bpb": ("Pre-training: validation text", "bits per byte"),
    "loss_mid": ("Mid-training", _LOSS),
    "loss_sft": ("Supervised fine-tuning", _LOSS),
    "reward_rl": ("Reinforcement learning", "mean reward of the answers"),
}
FEW_POINTS = 10  # So few points are no curve, and are drawn without a line between them.

Points = list[tuple[float, float]]


def draw_runs(folder: Path, runs: list[dict[str, Any]], notes: list[str]) -> list[str]:
    """Draws the files of PICTURES, with a line for every run of report.read_run. Returns the names of the files.

    Runs with another tokenizer or validation text get separate pictures: bpb.png, then bpb_2.png and so on. Runs that
    differ only in their seed share a line. Panels below show the gap to the BF16 run of the same configuration, and the
    gap between the two forward passes of each run. A note says if nothing can be drawn.
    """
    groups: dict[tuple, list[dict]] = {}
    # The baseline comes first, as a wide line, so that a line on top of it can be seen.
    for run in sorted(runs, key=lambda run: run["method"] != "bf16"):
        groups.setdefault((run["start"].get("tokenizer"), run["start"].get("val_text")), []).append(run)
    written: list[str] = []
    for place, group in enumerate(groups.values(), start=1):
        of_runs = f" ({', '.join(run['model_tag'] for run in group)})" if len(groups) > 1 else ""
        baselines = {run["start"].get("config_key"): run for run in group if run["method"] == "bf16"}
        steps = {run["model_tag"]: f"{run['num_iterations'] or 0:,} steps" for run in group}
        names = {tag: f"{SEED.sub('', tag)}, {length}" for tag, length in steps.items()}
        colors = dict(zip(names.values(), itertools.cycle(COLORS)))
        colors |= {names[run["model_tag"]]: BASELINE for run in baselines.values()}
        for picture, (title, axis) in PICTURES.items():
            panels: dict[str, dict[str, list[Points]]] = {}
            for run in group:
                name, points = names[run["model_tag"]], run["curves"][picture]
                base = baselines.get(run["start"].get("config_key"))
                shown = {axis: points}
                if base and base is not run and picture != "reward_rl":
                    below = dict(base["curves"][picture])
                    shown["over the bf16\nrun, %"] = [(x, 100 * (y / below[x] - 1)) for x, y in points if below.get(x)]
                if picture == "bpb" and run["method"] != "bf16":
                    shown["own over BF16\nforward, %"] = run["curves"]["forwards"]
                for words, of in shown.items():
                    if of:
                        panels.setdefault(words, {}).setdefault(name, []).append(of)
            if not panels:
                continue
            drawings = [functools.partial(_draw_lines, colors=colors, panel=panel) for panel in panels.items()]
            file = f"{picture}_{place}.png" if place > 1 else f"{picture}.png"
            try:
                draw(folder / file, title + of_runs, *drawings)
            except ImportError as e:
                notes.append(f"no plots: matplotlib cannot be imported ({e})")
                return written
            written.append(file)
    return written


def _draw_lines(axes: Any, colors: dict[str, str], panel: tuple[str, dict[str, list[Points]]]) -> None:
    words, lines = panel
    for name, of in lines.items():
        runs = [([x for x, _ in points], [y for _, y in points]) for points in of]
        style = "-" if max(map(len, of)) >= FEW_POINTS else "none"
        curve(axes, name, runs, style, colors[name], wide=colors[name] == BASELINE)
    axes.set(xlabel="step", ylabel=words)
