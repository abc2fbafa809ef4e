"""Makes the tables and figures of the paper, with its numbers beside ours, and tables that go beyond it.

    python -m lab.reproduce table1
    python -m lab.reproduce fig4 --sizes llama-30M,llama-50M --ratio 25 --seeds 3 --data-dir folder
    python -m lab.reproduce all --quick                     # everything in small, about a minute each on two CPU cores
    python -m lab.reproduce list                            # what there is, a line each

    python -m lab.reproduce table5 --results d8             # from stored runs (python -m lab.runs), without training
    python -m lab.reproduce horizon --results d6_stored     # whole runs: gaps along the run, both forwards
    python -m lab.reproduce fig6 --results bench_linear     # from lab/results/bench.json; table7: bench_train
    python -m lab.reproduce gaps --results d8_mixed --columns "method | own: gap"     # some columns of a table

Each command prints a table, writes <folder>/<name>.json, .md and .png, and says on what hardware, data, tokens, seeds
and commit it was measured. Finished parts are stored one by one, so that the same command goes on where it was
interrupted. Figures that need training runs share them (lab/study/sweep.py). ITEMS and RUNS list all tables and
figures.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab import runs, scaling, table
from lab.study import gaps, numerics, questions, sparse, speed, sweep, sweep_runs, sweep_scheduler
from lab.study.context import Context, Outcome
from lab.study.gaps import SYSTEMS, Claim, Item
from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.common import get_base_dir, print0
from nanochat_fp4.evaluation import plots
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import environment_info
from nanochat_fp4.models import llama

# ----------------------------------------------------------------------------------------------------------------------
# The paper's claims and numbers

NAMES = ("NVIDIA", "4/6", "TetraJet-v2", "4/6 (in both passes)", "TetraJet-v2 (rotated by 128)")
BEATS_ALL = [Claim(f"Clover beats {name}", "clover", method) for name, method in zip(NAMES, SYSTEMS)]
OF_WHOLE_RUNS = [
    *BEATS_ALL,
    Claim("4/6 beats NVIDIA", "four_over_six", "nvidia"),
    Claim("TetraJet-v2 beats NVIDIA", "tetrajet_v2", "nvidia"),
]
OF_FIGURE_1 = [
    Claim("(a) wgrad: MS-EDEN beats SR", "fig1a_ms_eden", "fig1a_sr"),
    Claim("(c) dgrad with weight requantization: MS-EDEN beats SR", "fig1c_ms_eden", "fig1c_sr"),
    Claim("(e) both GEMMs: MS-EDEN beats SR", "fig1e_ms_eden", "fig1e_sr"),
    Claim("MS-EDEN with weight requantization (e) beats SR without (d)", "fig1e_ms_eden", "fig1d_sr"),
    Claim("SR without weight requantization (b) beats SR with it (c)", "fig1b_sr", "fig1c_sr"),
]
OF_FIGURE_2 = [
    Claim("4/6 improves native 1x16 scales", "fig2_1x16_four_over_six", "fig2_1x16_rtn"),
    Claim("4/6 improves 16x16 weight scales", "fig2_16x16_four_over_six", "fig2_16x16_rtn"),
    Claim("native scales beat square blocks (RTN)", "fig2_1x16_rtn", "fig2_16x16_rtn"),
    Claim("native scales beat square blocks (4/6)", "fig2_1x16_four_over_six", "fig2_16x16_four_over_six"),
]
# The paper's Table 5: the validation BPB of bf16, and for the others the increase over it in percent.
NANOCHATS = ("d20 (560M, 11B tokens)", "d32 (1.9B, 38B tokens)")
TABLE_5 = {
    "bf16": (0.7693, 0.6925), "nvidia": (1.57, 1.92), "four_over_six": (1.52, 1.76), "tetrajet_v2": (1.56, 1.72),
    "clover": (1.22, 1.44),
}  # fmt: skip
# The increase of the validation loss over BF16 in percent, with 30M parameters on C4 (Quartet-II, for_plots/runs.json).
# Other sizes and lengths are in lab/results/paper_runs.json.
LLAMAS = ("30M, 25 tokens a parameter", "30M, 800")
FIGURE_1 = {
    "fig1a_sr": (0.19, 0.04), "fig1a_ms_eden": (0.03, 0.03), "fig1b_sr": (0.04, 0.11), "fig1c_sr": (0.19, 0.27),
    "fig1c_ms_eden": (0.0, 0.16), "fig1d_sr": (0.29, 0.30), "fig1e_sr": (0.44, 0.35), "fig1e_ms_eden": (0.19, 0.17),
}  # fmt: skip
FIGURE_2 = {
    "fig2_1x16_rtn": (1.19, 2.69), "fig2_1x16_four_over_six": (1.12, 2.36), "fig2_16x16_rtn": (1.43, 3.15),
    "fig2_16x16_four_over_six": (1.31, 2.98),
}  # fmt: skip
FIGURE_4 = {"nvidia": (1.60, 3.42), "four_over_six": (1.65, 3.27), "tetrajet_v2": (1.58, 2.86), "clover": (1.26, 2.45)}
OF_LLAMAS: dict[str, Any] = {
    "models": LLAMAS, "size": "llama-30M", "ratio": 25.0,
    "notes": [f"the paper: {' / '.join(LLAMAS)}; of another text and length, so not to be compared in magnitude"],
}  # fmt: skip

# ----------------------------------------------------------------------------------------------------------------------
# Methods

FULL_METHODS = ("bf16", "nvidia", "four_over_six", "tetrajet_v2", "clover", "clover_search")
OTHERS = (
    "four_over_six_biased", "tetrajet_v2_rht128", "nvidia_full", "clover_feedback", "clover_feedback_late",
    "clover_late",
)  # fmt: skip
OTHER_SYSTEMS = (
    "bf16", "fp8", "clover", "nvidia", "nvidia_fixed_signs", "nvidia_1d", "nvidia_no_rht", "nvidia_no_sr",
    "nvidia_full", "chmiel", "tetrajet_v2", "tetrajet_v2_rht128", "tseng", "mxfp4_nvidia", "mxfp8",
)  # fmt: skip
REMEDIES = (
    *FULL_METHODS, *OTHERS, "clover_search_forward", "clover_search_backward", "clover_weight_search",
    "clover_warmup", "clover_late_bf16", "clover_late_forward", "clover_late_backward", "clover_refined",
    "clover_late_mxfp8", "clover_up_mxfp8", "clover_fp8_input", "clover_fp8_weight", "clover_mxfp8_forward",
    "clover_less_decay", "clover_search_feedback", "clover_late_refined_bf16", "clover_feedback_late_bf16",
)  # fmt: skip


def depth_of(size: str) -> int:
    """Returns the number of blocks of a model of this size. Raises UserError for several sizes and an unknown one."""
    if "," in size:
        raise UserError(f"--sizes={size}: this item is of one size at a time, for example d8")
    sweep_runs.size_flags(size)
    return {"tiny": 2}.get(size) or (llama.SIZES[size[6:]].layers if size.startswith("llama-") else int(size[1:]))


def ends_in_bf16(method: str, size: str) -> str:
    """Returns the variant "label: flags" of a method that has its first and last block in BF16. NVIDIA keeps some
    blocks at both ends in BF16."""
    blocks = f"transformer.h.0.*=bf16,transformer.h.{depth_of(size) - 1}.*=bf16"
    return f"{method}_ends_bf16: {' '.join(sweep_runs.changed(method, blocks))}"


def clover_apart(size: str) -> list[str]:
    """Returns runs, as "label: flags", in which only a part of clover quantizes: an operand, a kind of layer, half of
    the depth, or a phase of the run. For each kind of layer, another run quantizes all layers but these."""
    forward, depth = "fig2_1x16_four_over_six", depth_of(size)  # This row is clover's forward alone.
    methods: dict[str, tuple[str, ...]] = {  # A label -> the method and its changes.
        "bf16": ("bf16",),
        "all": ("clover",),
        "forward": (forward,),
        "forward-input": ("clover_input",),
        "forward-weight": ("clover_weight",),
        "backward": ("fig1e_ms_eden",),
        "backward-dgrad": ("fig1c_ms_eden",),
        "backward-wgrad": ("fig1a_ms_eden",),
    }
    for kind, pattern in sweep_runs.LAYER_KINDS.items():
        methods[f"forward-{kind}"] = ("bf16", f"{pattern}={forward}")
        methods[f"input-{kind}"] = ("bf16", f"{pattern}=clover_input")
        methods[f"weight-{kind}"] = ("bf16", f"{pattern}=clover_weight")
        methods[f"all_but_{kind}"] = ("clover", f"{pattern}=bf16")
    for half, blocks in (("first", range(depth // 2)), ("second", range(depth // 2, depth))):
        methods[f"forward-{half}_half"] = ("bf16", ",".join(f"transformer.h.{i}.*={forward}" for i in blocks))
    for first, last in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0)):
        end = f",{last}=bf16" if last < 1 else ""
        methods[f"steps_{100 * first:.0f}-{100 * last:.0f}%"] = ("bf16", f"{first}=clover{end}")
    return [f"{label}: {' '.join(sweep_runs.changed(*how))}" for label, how in methods.items()]


# ----------------------------------------------------------------------------------------------------------------------
# The tables of all items

SHARES = ("own: minus", "own: share", "BF16: minus", "BF16: share")
AFTER_SFT = "the paper's rows after SFT come from the whole pipeline: COMPARE=1 QAT_METHOD=clover bash speedrun_fp4.sh"
RUNS = {  # Tables that are made of training runs.
    "fig1": Item(
        "Figure 1: quantization of selected operands of the backward pass",
        ["bf16", *[f"fig1{p}_sr" for p in "abcde"], *[f"fig1{p}_ms_eden" for p in "ace"]],
        claims=OF_FIGURE_1, paper=FIGURE_1, quick=("bf16", "fig1a_sr", "fig1a_ms_eden"), **OF_LLAMAS,
    ),
    "fig2": Item(
        "Figure 2: quantization of the forward pass",
        ["bf16", *[f"fig2_{b}_{r}" for r in ("rtn", "four_over_six") for b in ("1x16", "16x16")]],
        claims=OF_FIGURE_2, paper=FIGURE_2, quick=("bf16", "fig2_1x16_rtn", "fig2_1x16_four_over_six"), **OF_LLAMAS,
    ),
    "fig4": Item(
        "Figure 4: fully quantized Llama-like models", FULL_METHODS, claims=BEATS_ALL, paper=FIGURE_4, also=OTHERS,
        **OF_LLAMAS,
    ),
    "table5": Item(
        "Table 5: nanochat's validation BPB, increase over BF16 (paper: d20 / d32)", FULL_METHODS, claims=BEATS_ALL,
        paper=TABLE_5, models=NANOCHATS, notes=[AFTER_SFT], also=OTHERS,
    ),
    "systems": Item(
        "Other systems: FP8, NVIDIA's recipe piece by piece, Chmiel, Tseng, MXFP4",
        lambda size: [*OTHER_SYSTEMS, ends_in_bf16("nvidia", size)],
        ("BPB", "own: gap", "BF16: gap", "own: minus", "seeds"),
        claims=[Claim("NVFP4 has a smaller gap than MXFP4 (NVIDIA: 1.5% and 2.5%)", "nvidia", "mxfp4_nvidia")],
        quick=("bf16", "fp8", "clover", "nvidia", "mxfp4_nvidia", "nvidia_ends_bf16"),
    ),
    "attribution": Item(
        "Where Clover's gap comes from: only this part is quantized", clover_apart,
        ("BPB", "own: gap", "BF16: gap", "seeds", *SHARES), beside="all",
        quick=("bf16", "all", "forward-input", "forward-up", "all_but_up", "steps_75-100%"),
    ),
    "remedies": Item(
        "Remedies on top of Clover", lambda size: [*REMEDIES, ends_in_bf16("clover", size)],
        ("work in 4 / 8 / 16 bits, %", "BPB", "own: gap", "BF16: gap", "seeds", *SHARES),
        quick=("bf16", "clover", "clover_fp8_input", "clover_late_forward", "clover_up_fp8", "clover_ends_bf16"),
    ),
    "gaps": Item("Gaps to BF16", columns=("BPB", "own: gap", "BF16: gap", "seeds", *SHARES)),
    "horizon": Item(
        "Gaps to BF16 of whole runs, with two forwards",
        columns=("GEMM work", "bytes kept", "of seeds", *gaps.PARTS, "own: by seed", "training text", "own: gap",
                 *SHARES[:2], "BF16: gap", *SHARES[2:], "one term", "own: gap, pooled", "BF16: gap, pooled"),
        whole=True, claims=OF_WHOLE_RUNS,
    ),
}  # fmt: skip
ITEMS: dict[str, Callable[[Context], Outcome]] = {
    **{item.__name__: item for item in (numerics.table1, numerics.table2, numerics.eden, speed.table3, speed.table4)},
    **{name: partial(gaps.table, name=name, item=RUNS[name]) for name in ("fig1", "fig2", "fig4", "table5")},
    "fig5": partial(questions.along_the_run, item=RUNS["table5"]),
    **{item.__name__: item for item in (speed.fig6, speed.table7, numerics.fig9, sparse.averaging)},
    **{name: partial(gaps.table, name=name, item=RUNS[name]) for name in ("systems", "attribution", "remedies")},
}
OF_RESULTS: dict[str, Callable[[Context], Outcome]] = {  # Tables that need --results and train nothing.
    **{name: partial(gaps.table, name=name, item=RUNS[name]) for name in ("gaps", "horizon")},
    **{item.__name__: item for item in (
        questions.methods, questions.losses, questions.claims, questions.fp8_forward, questions.forwards,
        questions.extra_steps, questions.equal_time, questions.break_even, questions.ladder, questions.leaderboard,
        speed.measured, speed.published, speed.hours)},
    **{name: partial(questions.of_scaling, name=name) for name in scaling.TABLES},
}  # fmt: skip
SAME = {"table6": "fig6"}
OF_ONE_SOURCE = "table1", "table2", "table3", "table4", "eden", "averaging", "published", "hours"

# ----------------------------------------------------------------------------------------------------------------------
# The command


def footer(context: Context, measured_on: str, info: dict[str, Any]) -> str:
    """Returns the line below a table, which names the hardware, the data, the release of torch and the commit."""
    quick = "QUICK: small sizes, a check of the command" if context.quick else ""
    parts = quick, info["machines"], measured_on, f"torch {info['torch']}", f"commit {info['commit']}"
    return "; ".join(filter(None, parts))


def choose(context: Context, outcome: Outcome) -> Outcome:
    """Returns a table with the columns of --columns, and with the rows that have one of the names of --rows in any
    cell, in the order of the names. Raises UserError for a name that the table lacks."""
    rows = context.args.rows
    header, table_rows = outcome.header, outcome.rows
    if rows:
        names = [name.strip() for name in rows.split("|")]
        if missing := [name for name in names if not any(name in row for row in table_rows)]:
            raise UserError(f"--rows: no row of the table has {missing[0]!r}; print it once without --rows")
        table_rows = [row for name in names for row in table_rows if name in row]
    if context.args.columns:
        names = context.chosen_columns(header)
        header, table_rows = names, [[row[header.index(name)] for name in names] for row in table_rows]
    return replace(outcome, header=header, rows=table_rows)


def save(context: Context, outcome: Outcome, name: str) -> None:
    """Prints a table and writes it as JSON and as Markdown, and its plot if it has one."""
    info = outcome.environment or environment_info()
    info |= runs.pooled([{"environment": info}]) if "machines" not in info else {}
    last = footer(context, outcome.measured_on, info)
    lines = [f"\n{outcome.title}", table(outcome.header, outcome.rows), *[f"- {note}" for note in outcome.notes], last]
    print0("\n".join(lines))
    wide = sys.stdout.isatty() and lines[1].index("\n") > shutil.get_terminal_size().columns
    if wide and not context.args.columns:
        print0("this table is wider than the terminal: --columns and --rows choose some, with | between their names")
    content = {"name": name, "quick": context.quick, "title": outcome.title, "table": [outcome.header, *outcome.rows]}
    content |= {"notes": outcome.notes, "measured_on": last, "environment": info, "numbers": outcome.numbers}
    sweep.make_folder(context.folder)
    path = context.folder / f"{name}.json"
    atomic_write(path, json.dumps(content, indent=1, default=asdict) + "\n")
    atomic_write(path.with_suffix(".md"), page(content))
    if outcome.plot:
        title = outcome.title + (" (quick: a check of the command)" if context.quick else "")
        if plots.draw(path.with_suffix(".png"), title, outcome.plot):
            print0(f"drawn in {path.with_suffix('.png')}")
        else:
            print0("no picture: no run from scratch was evaluated on the way; fig5 draws those that branch, too")
    print0(f"written to {path}")


def markdown(header: list[str], *rows: list[Any]) -> list[str]:
    """Returns the lines of a Markdown table."""

    def line(row: list[Any]) -> str:
        cells = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|---" * len(header) + "|", *map(line, rows)]


def page(content: dict[str, Any]) -> str:
    """Returns as Markdown what `save` writes as JSON: the title, the table, the notes, and the line of `footer`."""

    made = f"Made by `reproduce {content['name']}`, not by hand."
    lines = [f"# {content['title']}", "", made, "", *markdown(*content["table"]), ""]
    lines += [*[f"- {note}" for note in content["notes"]], "", content["measured_on"]]
    return "\n".join(lines) + "\n"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line. Raises UserError for an unknown table and for numbers out of range."""
    parser = ArgumentParser(description=__doc__.split("\n")[0])
    add, known = parser.add_argument, ", ".join([*ITEMS, *OF_RESULTS, *SAME])
    add("name", help=f"all, list, or one of {known}")
    add("--quick", action="store_true", help="small sizes, on a CPU: a check of the command")
    add("--samples", type=int, default=0, help="table1: numbers that are rounded")
    add(
        "--draws",
        type=int,
        default=0,
        help="table1: products; fig9: backward passes that are averaged; averaging: draws",
    )
    add("--models", default="", help="fig6: of 800M,3B,7B,22B")
    text = "train and time nothing: take the runs from these studies of lab.runs, groups of them, or JSON files of "
    text += "lab.study.sweep, with commas (fig6, table7: a part of lab/results/bench.json; fig9: of fig9.json). "
    add("--results", default="", help=text + f"Never trained or timed are {', '.join(OF_RESULTS)}")
    add("--columns", default="", help="some columns of the table, with | between them, in this order")
    add("--rows", default="", help="the rows that have one of these names in a cell, with | between them")
    sweep.add_sweep_arguments(parser)
    parser.set_defaults(seeds=0)
    args = parser.parse_args(argv)
    if args.name not in ("list", "all", *ITEMS, *OF_RESULTS, *SAME):
        raise UserError(f"{args.name!r} is no table or figure; use all, list, or one of {known}")
    if args.results and args.name in OF_ONE_SOURCE:
        raise UserError(f"{args.name} takes no stored runs, because its source is always the same; leave out --results")
    if min(args.seeds, args.samples) < 0 or args.jobs < 1 or (args.draws and args.draws < 4):
        raise UserError("--seeds and --samples cannot be negative, --jobs is at least 1 and --draws at least 4")
    return args


def description(name: str) -> str:
    """Returns what a table or figure shows, in one line: its title, or the first sentence about its function."""
    if name in SAME:
        return f"the same as {SAME[name]}"
    if name in RUNS:
        return RUNS[name].title
    if name in scaling.TABLES:
        return scaling.TABLES[name][0]
    function = (ITEMS | OF_RESULTS)[name]
    function = function.func if isinstance(function, partial) else function
    return " ".join(function.__doc__.split()).split(". ")[0].removeprefix("Makes ").removesuffix(".")


def listing() -> str:
    """Returns the text of `lab.reproduce list`."""
    width = max(map(len, [*ITEMS, *OF_RESULTS]))

    def lines(names: Iterable[str]) -> list[str]:
        return [f"  {name:<{width}}  {description(name)}" for name in names]

    head, of_results = (
        "tables and figures, which train or measure:",
        "of stored runs or measurements alone, with --results STUDY:",
    )
    return "\n".join([head, *lines([*ITEMS, *SAME]), of_results, *lines(OF_RESULTS)])


def make(args: argparse.Namespace, name: str) -> tuple[Context, Outcome]:
    """Makes a table with the rows and columns that the command line asks for. Raises UserError if it cannot be made,
    and Interrupted after a signal."""
    default = Path(get_base_dir()) / ("reproduce_quick" if args.quick else "reproduce")
    context = Context(Path(args.folder) if args.folder else default, args.quick, args)
    return context, choose(context, (ITEMS | OF_RESULTS)[name](context))


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.name == "list":
        print0(listing())
        return
    if args.folder:
        sweep.make_folder(Path(args.folder))
    for name in list(ITEMS) if args.name == "all" else [SAME.get(args.name, args.name)]:
        try:
            save(*make(args, name), name)
        except sweep_scheduler.Interrupted as e:
            sweep.stopped(e)


if __name__ == "__main__":
    run_main(main)
