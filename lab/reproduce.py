"""The tables and figures of the paper, each by one command, its numbers beside ours; and what goes beyond it.

    python -m lab.reproduce table1
    python -m lab.reproduce fig4 --sizes llama-30M,llama-50M --ratio 25 --seeds 3 --data-dir folder
    python -m lab.reproduce all --quick            # everything in small, about a minute each on two CPU cores
    python -m lab.reproduce list
    python -m lab.reproduce attribution           # where Clover's gap comes from; also: operands, remedies, systems

    python -m lab.reproduce table5 --results d6                      # from that sweep's runs, without training
    python -m lab.reproduce horizon --results d6_stored              # long runs: gaps; see OF_RESULTS
    python -m lab.reproduce fig6 --results bench_linear              # from that benchmark; table7: bench_train's

Each prints a table, writes <folder>/<name>.json, .md and .png, and says on what hardware, data, tokens, seeds and
commit it was measured. What is done is kept, piece by piece, so that the same command goes on where it was interrupted.
Figures that need training runs share them (lab/study/sweep.py). lab/study/reproduce_*.py make them.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lab.leaderboard import leaderboard
from lab.study import sweep, sweep_scheduler
from lab.study.forwards import forwards
from lab.study.reproduce_common import Context, Outcome
from lab.study.reproduce_concentration import fig9
from lab.study.reproduce_horizon import claims, frontier, horizon
from lab.study.reproduce_numerics import candidates, operands, table1, table2
from lab.study.reproduce_speed import fig6, table7
from lab.study.reproduce_time import equal_time, extra_steps
from lab.study.reproduce_training import made
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.console import ArgumentParser, table
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.evaluation import plots
from nanochat_fp4.files import atomic_write

ITEMS: dict[str, Callable[[Context], Outcome]] = {
    **{item.__name__: item for item in (table1, table2)},
    **{name: partial(made, name) for name in ("fig1", "fig2", "fig4", "fig5", "table5")},
    **{item.__name__: item for item in (fig6, table7, fig9)},
    **{name: partial(made, name) for name in ("systems", "attribution")},
    "operands": operands,
    "candidates": candidates,
    "remedies": partial(made, "remedies"),
}
OF_RESULTS: dict[str, Callable[[Context], Outcome]] = {  # of --results alone
    item.__name__: item for item in (horizon, frontier, claims, forwards, equal_time, extra_steps, leaderboard)
}
SAME = {"table6": "fig6"}


def footer(context: Context, measured_on: str, info: dict[str, Any]) -> str:
    """Hardware, data, commit: what a number needs beside it."""
    hardware = f"{info['gpu_count']} x {info['gpu']}" if info["gpu"] else info["cpu"]
    quick = "QUICK: small sizes, a check of the command" if context.quick else ""
    parts = quick, hardware, measured_on, f"torch {info['torch']}", f"commit {info['commit'] or 'unknown'}"
    return "; ".join(filter(None, parts))


def save(context: Context, name: str, outcome: Outcome) -> None:
    """Prints the item and writes its JSON, its Markdown and its plot."""
    info = outcome.environment or environment_info()
    last = footer(context, outcome.measured_on, info)
    lines = [f"\n{outcome.title}", table(outcome.header, outcome.rows), *[f"- {note}" for note in outcome.notes], last]
    print0("\n".join(lines))
    content = {"name": name, "quick": context.quick, "title": outcome.title, "table": [outcome.header, *outcome.rows]}
    content |= {"notes": outcome.notes, "measured_on": last, "environment": info, "numbers": outcome.numbers}
    path = context.folder / f"{name}.json"
    atomic_write(path, json.dumps(content, indent=1) + "\n")
    atomic_write(path.with_suffix(".md"), page(content))
    if outcome.plot:
        title = outcome.title + (" (quick: a check of the command)" if context.quick else "")
        plots.draw(path.with_suffix(".png"), title, outcome.plot)
    print0(f"written to {path}")


def page(content: dict[str, Any]) -> str:
    """The Markdown of what `save` wrote as JSON: title, table, notes, and what it was measured on."""

    def line(row: list[Any]) -> str:
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    header, *rows = content["table"]
    made = f"Made by `reproduce {content['name']}`, not by hand."
    lines = [f"# {content['title']}", "", made, "", line(header), "|---" * len(header) + "|", *map(line, rows), ""]
    lines += [*[f"- {note}" for note in content["notes"]], "", content["measured_on"]]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add, known = parser.add_argument, ", ".join([*ITEMS, *OF_RESULTS, *SAME])
    add("name", help=f"all, list, or one of {known}")
    add("--quick", action="store_true", help="small sizes, on a CPU: a check of the command")
    add("--samples", type=int, default=0, help="table1: numbers that are rounded")
    add("--draws", type=int, default=0, help="table1: products; fig9: backward passes that are averaged")
    add("--models", default="", help="fig6: of 800M,3B,7B,22B")
    text = "train and time nothing: take the runs from this study of lab.runs, or JSON file of lab.study.sweep (fig6, "
    text += "table7: of a benchmark; fig9: own_forward or both_forwards); with commas from several: "
    text += ", ".join(OF_RESULTS)
    add("--results", default="", help=text)
    sweep.add_sweep_arguments(parser)
    parser.set_defaults(seeds=0)
    args = parser.parse_args(argv)
    if args.name == "list":
        print0("\n".join([*ITEMS, *OF_RESULTS, *[f"{a} (= {b})" for a, b in SAME.items()]]))
        return
    names = list(ITEMS) if args.name == "all" else [SAME.get(args.name, args.name)]
    if names[0] not in ITEMS | OF_RESULTS:
        raise UserError(f"{args.name!r} is no table or figure; use all, list, or one of {known}")
    if min(args.seeds, args.samples) < 0 or args.jobs < 1 or (args.draws and args.draws < 4):
        raise UserError("--seeds and --samples cannot be negative, --jobs is at least 1 and --draws at least 4")
    default = Path(get_base_dir()) / ("reproduce_quick" if args.quick else "reproduce")
    context = Context(Path(args.folder) if args.folder else default, args.quick, args)
    sweep.make_folder(context.folder)
    for name in names:
        try:
            save(context, name, (ITEMS | OF_RESULTS)[name](context))
        except sweep_scheduler.Interrupted as e:
            sweep.stopped(e)


if __name__ == "__main__":
    run_main(main)
