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
    # The size of the letters is for a width of 400 pixels, too.
    with matplotlib.rc_context(style | {"axes.grid": True, "grid.alpha": 0.3, "font.size": 12}):
        heights = [3, *[1] * (len(panels) - 1)]
        size = {"figsize": (7, 1.5 * sum(heights)), "height_ratios": heights}
        figure, column = pyplot.subplots(len(panels), squeeze=False, sharex=True, layout="constrained", **size)
        axes = column[0, 0]
        try:
            for panel, below in zip(panels, column[:, 0]):
                panel(below)
                below.set_axisbelow(True)
                below.label_outer()
                if below.get_xlabel() == "step":
                    below.xaxis.get_major_locator().set_params(integer=True)
            parts = (*column[:, 0], *axes.child_axes)
            if not any(part.has_data() for part in parts):
                return False
            axes.set_title("\n".join(textwrap.wrap(title, 58)), fontsize=13)
            lines = axes.get_legend_handles_labels()
            if axes.get_legend() is None and lines[0]:
                widest = max(map(len, lines[1]))
                look = {"ncols": 1 if widest > 37 else 3 if widest <= 20 and len(lines[0]) > 4 else 2, "fontsize": 10}
                bands = any(name.endswith(" seeds") for name in lines[1]) and any(part.collections for part in parts)
                about = "mean and range of the seeds" if bands else None
                figure.legend(*lines, loc="outside lower center", title=about, frameon=False, **look)
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_open(path) as f:
                figure.savefig(f, format="png", dpi=150)
            return True
        finally:
            pyplot.close(figure)


def curve(
    axes: Any, label: str, runs: list[tuple[Any, Any]], style: str = "-", color: str | None = None, width: float = 1.4
) -> None:
    """Draws one run as a line of (x, y). For several runs, of different seeds, it draws their mean and, as a band,
    their range. `style` is a line style of matplotlib, and "none" draws points alone."""
    common = sorted(set.intersection(*(set(x) for x, _ in runs)))
    values = [[dict(zip(x, y))[position] for x, y in runs] for position in common]
    mean = [sum(v) / len(v) for v in values]
    if len(runs) > 1:
        label = f"{label}, {len(runs)} seeds"
    marker = None if len(common) >= 15 else "s" if style == "--" else "o"
    look = {"linestyle": style, "linewidth": width, "marker": marker, "markersize": max(3, width), "color": color}
    (line,) = axes.plot(common, mean, label=label, **look)
    if len(runs) > 1:
        low, high = [min(v) for v in values], [max(v) for v in values]
        if style == "none":
            axes.vlines(common, low, high, color=line.get_color())
        else:
            axes.fill_between(common, low, high, color=line.get_color(), alpha=0.12, linewidth=0)


# ----------------------------------------------------------------------------------------------------------------------
# The picture of the report

PANELS = {  # A curve of report.read_run, and the title of its y axis.
    "bpb": "validation text,\nbits per byte",
    "gap": "over the bf16\nrun, %",
    "forwards": "own over BF16\nforward, %",
    "loss": "training loss,\nnats per token",
}
FEW_POINTS = 10  # So few points are no curve, and are drawn without a line between them.


def draw_runs(path: Path, runs: list[dict[str, Any]], notes: list[str]) -> bool:
    """Draws the pre-training of the runs of report.read_run, a panel for each of PANELS. Returns whether there is
    anything to draw.

    Runs with another tokenizer or validation text than the last one are left out, as a note says. Runs that differ only
    in their seed share a line. A note says if matplotlib is missing.
    """
    panels: dict[str, dict[str, list[tuple]]] = {curve: {} for curve in PANELS}
    colors, others = itertools.cycle(COLORS), []
    of_line: dict[str, str] = {}
    # The baseline comes first, as a wide line, so that a line on top of it can be seen.
    for run in sorted(runs, key=lambda run: run["method"] != "bf16"):
        if run["text"] != runs[-1]["text"]:
            others.append(run["model_tag"])
            continue
        name = f"{SEED.sub('', run['model_tag'])}, {run['num_iterations'] or 0:,} steps"
        of_line[name] = BASELINE if run["method"] == "bf16" else of_line.get(name) or next(colors)
        for curve_name, points in run["curves"].items():
            if points:
                panels[curve_name].setdefault(name, []).append(tuple(zip(*points)))

    def panel(curve_name: str, axes: Any) -> None:
        for name, of in panels[curve_name].items():
            style = "-" if max(len(x) for x, _ in of) >= FEW_POINTS else "none"
            curve(axes, name, of, style, of_line[name], 4 if of_line[name] == BASELINE else 1.4)
        axes.set(xlabel="step", ylabel=PANELS[curve_name])

    if others:
        notes.append(f"the picture is of runs on one text with one tokenizer, without {', '.join(others)}")
    try:
        shown = [functools.partial(panel, name) for name in PANELS if panels[name]]
        return bool(shown) and draw(path, "Pre-training", *shown)
    except ImportError as e:
        notes.append(f"no picture: matplotlib cannot be imported ({e})")
        return False
