"""The style of the project's pictures: a title, units, whole steps, and colours for colour-blind readers.

Only this module imports matplotlib, and only when it draws a picture. Callers explain an ImportError to the user.
"""

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


def draw(path: Path, title: str, *panels: Callable[[Any], None]) -> None:
    """Writes a PNG. Each panel is called with its axes. The first panel is the tallest, and all have the same x
    axis.

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
            axes.set_title("\n".join(textwrap.wrap(title, 75)), fontsize=10)
            lines = axes.get_legend_handles_labels()
            if axes.get_legend() is None and lines[0]:
                widest = max(map(len, lines[1]))
                columns = 1 if widest > 50 else 3 if widest <= 30 and len(lines[0]) > 4 else 2
                figure.legend(*lines, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path) as f:
                figure.savefig(f, format="png", dpi=150)
        finally:
            pyplot.close(figure)


def curve(
    axes: Any, label: str, runs: list[tuple[list, list]], style: str = "-", color: str | None = None, wide: bool = False
) -> None:
    """Draws one run as a line of (x, y). For several runs, of different seeds, it draws their mean and a band.

    `wide` draws a pale, wide line, which stays visible under another one.
    """
    common = sorted(set.intersection(*(set(x) for x, _ in runs)))
    values = [[dict(zip(x, y))[position] for x, y in runs] for position in common]
    mean = [sum(v) / len(v) for v in values]
    if len(runs) > 1:
        label = f"{label}, mean and range of {len(runs)} seeds"
    (line,) = axes.plot(
        common, mean, style, label=label, color=color, linewidth=5 if wide else 1.4, alpha=0.25 if wide else 1,
        marker=None if len(common) >= 15 else "o" if style == "-" else "s", markersize=3,
    )  # fmt: skip
    if len(runs) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        axes.fill_between(common, low, high, color=line.get_color(), alpha=0.12, linewidth=0)


def names(axes: Any, points: list[tuple[float, float, str]]) -> None:
    """Writes the name of each point (x, y, name) to the right of the point. If other names are in the way, it is
    written above them."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    letter, height = 0.0058 * (right - left), 0.022 * (top - bottom)
    written: list[tuple[float, float, float]] = []
    box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0.3}  # With this box no line crosses a name out.
    for x, y, name in sorted(points, key=lambda p: p[1]):
        label_y, end = y, x + letter * (len(name) + 1)
        while any(x < other and start < end and abs(label_y - below) < height for start, other, below in written):
            label_y += height / 8
        written.append((x, end, label_y))
        axes.annotate(name, (x, label_y), fontsize=5, xytext=(3, 0), textcoords="offset points", va="center", bbox=box)
