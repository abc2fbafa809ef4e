"""The pictures of the report. Each stage has a file with the losses of all runs."""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanochat_fp4.evaluation import plots
from nanochat_fp4.evaluation.report_runs import finite_number

_LOSS = "training loss, nats per token (smoothed)"
_PLOTS = {  # For each file name: the title, the title of the y axis, the stage, the event, and the key of the values.
    "loss": ("Pre-training", _LOSS, "base", "train", "smoothed_loss"),
    "bpb": ("Pre-training: validation text", "bits per byte", "base", "val", "bpb"),
    "loss_mid": ("Mid-training", _LOSS, "mid", "train", "smoothed_loss"),
    "loss_sft": ("Supervised fine-tuning", _LOSS, "sft", "train", "smoothed_loss"),
    "reward_rl": ("Reinforcement learning", "mean reward of the answers", "rl", "train", "reward"),
}

# For the name of each line, (x, y) of each of its runs. Runs that differ only in their seed share a line.
Lines = dict[str, list[tuple[list[float], list[float]]]]


def draw_plots(
    report_dir: Path, stages: dict[str, dict[str, list[dict]]], runs: list[dict], notes: list[str]
) -> list[str]:
    """Draws the files of _PLOTS, with a line for every run. Returns the names of the files.

    Runs with another tokenizer or validation text get separate pictures: bpb.png, then bpb_2.png and so on. `stages`
    are base, mid, sft and rl, each with the records of metrics.jsonl by tag. A note says if nothing can be drawn.
    """
    groups: dict[tuple, list[dict]] = {}
    for run in runs:
        records = stages["base"].get(run["model_tag"], [])
        groups.setdefault((run["tokenizer"], _newest_text(records)), []).append(run)
    written: list[str] = []
    for place, group in enumerate(groups.values(), start=1):
        ending = f"_{place}" if place > 1 else ""
        names_of_runs = f" ({', '.join(run['model_tag'] for run in group)})" if len(groups) > 1 else ""
        name_of = _names_of_lines(group)
        baseline_of = {run["config_key"]: run["model_tag"] for run in group if run["method"] == "bf16"}
        baselines = {name_of[tag] for tag in baseline_of.values()}
        others = [name for name in dict.fromkeys(name_of.values()) if name not in baselines]
        colors = dict.fromkeys(baselines, plots.BASELINE) | dict(zip(others, itertools.cycle(plots.COLORS)))
        for name, (title, axis, stage, event, key) in _PLOTS.items():
            lines: Lines = {}
            gaps: Lines = {}
            forwards: Lines = {}
            points_of: dict[str, tuple[list[float], list[float]]] = {}  # The points of each tag.
            for tag in (run["model_tag"] for run in group):
                records = [r for r in _of_one_text(stages[stage].get(tag, [])) if r.get("event") == event]
                if points := _points(records, lambda r, k=key: finite_number(r.get(k))):
                    points_of[tag] = points
                    lines.setdefault(name_of[tag], []).append(points)
                if event == "val" and name_of[tag] not in baselines and (points := _points(records, _own_over_bf16)):
                    forwards.setdefault(name_of[tag], []).append(points)
            for run in group:
                tag, base = run["model_tag"], baseline_of.get(run["config_key"])
                if name_of[tag] in baselines or not {tag, base} <= points_of.keys():
                    continue
                if (points := _over(points_of[tag], points_of[base])) and not key.startswith("reward"):
                    gaps.setdefault(name_of[tag], []).append(points)
            if not lines:
                continue
            # A baseline is a wide line under the others, so that a line on top of it can be seen.
            lines = {name: lines[name] for name in sorted(lines, key=lambda name: name not in baselines)}
            panels = [functools.partial(_draw, lines=lines, axis=axis, colors=colors)]
            for below, differences in (("over the bf16\nrun, %", gaps), ("own over BF16\nforward, %", forwards)):
                if differences:
                    panels.append(functools.partial(_draw, lines=differences, axis=below, colors=colors))
            try:
                plots.draw(report_dir / f"{name}{ending}.png", title + names_of_runs, *panels)
            except ImportError as e:
                notes.append(f"no plots: matplotlib cannot be imported ({e})")
                return written
            written.append(f"{name}{ending}.png")
    return written


def _names_of_lines(runs: list[dict]) -> dict[str, str]:
    """Returns the name of the line of each tag. Runs that differ only in their seed have the same name."""
    lengths: dict[str, set] = {}
    for run in runs:
        lengths.setdefault(plots.SEED.sub("", run["model_tag"]), set()).add(run["num_iterations"])
    names = {}
    for run in runs:
        name = plots.SEED.sub("", run["model_tag"])
        steps = f", {run['num_iterations'] or 0:,.0f} steps"
        names[run["model_tag"]] = name + (steps if len(lengths[name]) > 1 else "")
    return names


def _newest_text(records: list[dict]) -> Any:
    """Returns the validation text of the last start in the log, because a resumed run may have another text than
    before."""
    return next((r.get("val_text") for r in reversed(records) if r.get("event") == "start"), None)


def _of_one_text(records: list[dict]) -> list[dict]:
    """Returns the log without validations on other texts than the newest one."""
    remaining, text, newest = [], None, _newest_text(records)
    for record in records:
        text = record.get("val_text") if record.get("event") == "start" else text
        if record.get("event") != "val" or text == newest:
            remaining.append(record)
    return remaining


def _points(records: list[dict], value: Callable[[dict], float | None]) -> tuple[list[float], list[float]] | None:
    """Returns (steps, values) of the records that have both, or None."""
    pairs = [(finite_number(record.get("step")), value(record)) for record in records]
    pairs = [(step, y) for step, y in pairs if step is not None and y is not None]
    return ([x for x, _ in pairs], [y for _, y in pairs]) if pairs else None


def _over(points: tuple[list[float], list[float]], base: tuple[list[float], list[float]]) -> tuple[list, list] | None:
    """Returns (steps, percent), by how much a run is above its baseline at the steps that both have, or None."""
    base_values = dict(zip(*base))
    pairs = [(x, 100 * (y / base_values[x] - 1)) for x, y in zip(*points) if base_values.get(x)]
    return ([x for x, _ in pairs], [y for _, y in pairs]) if pairs else None


def _own_over_bf16(record: dict) -> float | None:
    """Returns by how much the loss with the method's own forward pass is above that of the same weights in BF16, in
    percent."""
    own, bf16 = finite_number(record.get("bpb")), finite_number(record.get("bpb_bf16"))
    return 100 * (own / bf16 - 1) if own is not None and bf16 else None


def _draw(axes: Any, lines: Lines, axis: str, colors: dict[str, str]) -> None:
    for name, runs in lines.items():
        plots.curve(axes, name, runs, "-", colors[name], wide=colors[name] == plots.BASELINE)
    axes.set(xlabel="step", ylabel=axis)
