"""Writes the report as a page in Markdown."""

import json
import math
import re
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat_fp4.cli import UserError, format_seconds
from nanochat_fp4.common import default_base_dir
from nanochat_fp4.environment import environment_info
from nanochat_fp4.evaluation.metrics import few_tokens, plain_json
from nanochat_fp4.evaluation.report_plots import draw_plots
from nanochat_fp4.evaluation.report_runs import (
    add_gaps,
    as_text,
    finite_number,
    read_metrics,
    read_sections,
    summarize_run,
    tokens_measured,
)
from nanochat_fp4.files import atomic_write

# The columns of the benchmark table, in the order of the paper's Table 5. Other tasks follow.
TASKS = ["ARC-Easy", "ARC-Challenge", "GSM8K", "HumanEval", "MMLU", "SpellingBee", "CORE", "ChatCORE"]

# The stages whose models can chat, in the order of training, and the folders of their checkpoints.
CHAT_STAGES = {"mid": "mid_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}

CHECK_TOKENS = 1e9  # A run with fewer tokens only checks that the stages work.


def generate(report_dir: Path) -> str:
    """Writes report.md, report.json and the plots, and prints the table of runs. Returns the path of report.md.

    Raises UserError if there is nothing to report.
    """
    notes: list[str] = []
    sections = read_sections(report_dir, notes)
    metrics = read_metrics(report_dir.parent / "base_checkpoints", notes)
    if not sections and not metrics:
        raise UserError(f"nothing to report in {report_dir}; run bash speedrun_fp4.sh first, or a stage of it")
    tags = dict.fromkeys([s["model_tag"] for s in sections if s["model_tag"]] + list(metrics))
    sections_of = {tag: [s for s in sections if s["model_tag"] == tag] for tag in tags}
    runs = [summarize_run(tag, sections_of[tag], metrics.get(tag, [])) for tag in tags]
    add_gaps(runs, notes)
    stages = {"base": metrics}
    for stage, folder in CHAT_STAGES.items():
        stages[stage] = read_metrics(report_dir.parent / folder, notes)
    stages = {stage: {tag: logs_of[tag] for tag in tags if tag in logs_of} for stage, logs_of in stages.items()}
    metrics = stages["base"]
    pictures = draw_plots(report_dir, stages, runs, notes)

    left_out = _left_out(report_dir)
    summary_lines = summary(runs, stages, report_dir.parent)
    markdown = render(runs, sections, metrics, pictures, notes, left_out, summary_lines)
    report_dir.mkdir(parents=True, exist_ok=True)
    document = {"runs": runs, "sections": sections, "notes": notes, "plots": pictures, "left_out": left_out}
    atomic_write(report_dir / "report.json", json.dumps(plain_json(document), indent=2))
    path = report_dir / "report.md"
    atomic_write(path, markdown.encode("utf-8", "replace"))
    print("\n".join([*runs_table(runs), "", *summary_lines, "report:"]))
    return str(path)


def _left_out(report_dir: Path) -> list[str]:
    """Returns what the run did without, one line each. The plan of the run and dev/pipeline.sh write these lines
    into left_out.txt."""
    try:
        return [as_text(line) for line in (report_dir / "left_out.txt").read_text("utf-8").splitlines() if line]
    except (OSError, UnicodeError):
        return []


def _cell(value: Any, form: str = "{:.4f}") -> str:
    return "-" if value is None else form.format(value)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return [head, "|" + "---|" * len(header), *body]


def _measured_on(runs: list[dict]) -> dict[str, str]:
    """Returns what stands behind the val BPB of each run, by model tag: nothing if all runs were measured on as many
    tokens, otherwise how many. A loss on fewer tokens is of another text, so it cannot be compared."""
    of_runs = {r["model_tag"]: tokens_measured(r) for r in runs if r["val_bpb"] is not None}
    alike = len(set(of_runs.values())) < 2
    return {tag: "" if alike else f" ({tokens or 'tokens not known'})" for tag, tokens in of_runs.items()}


def runs_table(runs: list[dict]) -> list[str]:
    """Returns the lines of a table with one row for each run."""
    header = ["run", "method", "steps", "tokens", "val BPB", "val BPB, BF16 forward"]
    header += ["gap to BF16", "gap, BF16 forward", "tokens/s", "training time"]
    rows, measured_on = [], _measured_on(runs)
    for r in runs:
        steps = _cell(r["step"], "{:,}")
        if not r["finished"] and r["num_iterations"]:
            steps += f" of {r['num_iterations']:,.0f}, unfinished"
        gaps = [_cell(r.get(key), "{:+.2f}%") for key in ("gap_percent", "gap_percent_bf16")]
        gaps = ["baseline", "baseline"] if r["method"] == "bf16" else gaps
        seconds = r["training_seconds"]
        row = [r["model_tag"], r["method"] or "-", steps, _cell(r.get("tokens"), "{:,}")]
        row += [_cell(r["val_bpb"]) + measured_on.get(r["model_tag"], "")]
        row += [_cell(r["val_bpb_bf16"]), *gaps, _cell(r["tokens_per_second"], "{:,.0f}")]
        rows.append([*row, "-" if seconds is None else format_seconds(seconds)])
    return _table(header, rows)


_OF_FINE_TUNING = (
    "The losses of mid-training and SFT are of conversations, which are other data than the text of pre-training. They "
    "compare neither with its loss nor with each other. Each batch of SFT has other tasks, so in a run of few steps "
    "the loss follows the tasks, up and down. A model that was tuned on few kinds of conversations predicts plain text "
    "worse than its base model."
)


def _explanations(runs: list[dict]) -> list[str]:
    """Returns lines that explain the numbers in the table of runs, and how far chance moves them."""
    lines = [
        "- val BPB: bits per byte of the validation text, lower is better, with the forward pass of the method. The "
        "next column has the same weights in BF16.",
        "- The loss stage measures on more text than training does on the way, so val BPB differs from the last value "
        "of the training log. A run without that stage shows the training's value.",
    ]
    if any(run.get("gap_percent") is not None for run in runs):
        lines.append(
            "- gap: increase of val BPB over the BF16 run of the same configuration (`COMPARE=1`), on the same text. "
            "In the first column the run has the forward pass of its method, in the second BF16. It is a gap of one "
            "seed. Two runs of one seed differ by 0.4% on a small CPU run and by 0.1% at 160M tokens (d6), so a "
            "smaller gap may be chance. `python -m lab.study.sweep` trains several seeds."
        )
    return lines


def summary(runs: list[dict], stages: Mapping[str, Mapping[str, list[dict]]], base_dir: Path) -> list[str]:
    """Returns lines about each run that has ended: what was trained, how good it is, where it is, and how to chat
    with it. `stages` has the records of metrics.jsonl by stage and tag."""
    lines = []
    for r in (r for r in runs if r["finished"]):
        steps = {stage: _newest_step(base_dir / folder / r["model_tag"]) for stage, folder in CHAT_STAGES.items()}
        stage = next((stage for stage in reversed(CHAT_STAGES) if steps[stage] is not None), "base")
        where = base_dir / CHAT_STAGES.get(stage, "base_checkpoints") / r["model_tag"]
        quality = f"{_cell(r['val_bpb'])} bits per byte of validation text"
        quality += "" if r["method"] == "bf16" else f", {_cell(r['val_bpb_bf16'])} with a BF16 forward"
        if r["untrained_bpb"] is not None:
            quality += f" ({r['untrained_bpb']:.2f} before training)"
        if r.get("gap_percent") is not None:
            quality += f"; {r['gap_percent']:+.2f}% over the BF16 run"
        lines += [f"{r['model_tag']}: {r['method']}, {r['step']:,} steps, {_cell(r.get('tokens'), '{:,}')} tokens"]
        lines += [f"  how good:   {quality}", f"  where:      {where}"]
        if stage != "base":
            if done := _part_done(stages[stage].get(r["model_tag"], []), steps[stage]):
                lines += [f"  so far:     {stage} has done {done}; its command goes on with --resume-from-step latest"]
            # The shell that types the command may not have the variable.
            usual = base_dir == default_base_dir()
            variable = "" if usual else f"NANOCHAT_BASE_DIR={shlex.quote(str(base_dir))} "
            command = f"{variable}python -m nanochat_fp4 chat_web -i {stage} --model-tag {r['model_tag']}"
            lines += [f"  talk to it: {command}"]
            if problem := few_tokens(r.get("tokens"), r["num_params"]):
                lines += [f"  note:       {problem}"]
    return lines


def _newest_step(folder: Path) -> int | None:
    """Returns the step of the newest checkpoint in a folder, or None if there is none."""
    steps = [re.match(r"model_(\d+)\.", file.name) for file in folder.glob("model_*")]
    return max((int(step[1]) for step in steps if step), default=None)


def _part_done(records: list[dict], step: int) -> str | None:
    """Returns in words how much of a stage its checkpoint of this step has done, or None if it has done all or if
    the stage's log does not say."""
    total = next((finite_number(r.get("num_iterations")) for r in reversed(records) if r.get("event") == "start"), 0)
    if total and total > 0:
        return f"{step:,} of {total:,.0f} steps" if step < total else None
    logged = {r.get("step"): finite_number(r.get("progress")) for r in records if r.get("event") == "train"}
    progress = logged.get(step - 1)  # The log counts steps from 0.
    return f"{step:,} steps, {100 * progress:.0f}% of its epoch" if progress and progress < 1 else None


def _benchmark_table(runs: list[dict]) -> list[str]:
    """Returns a table like the paper's Table 5. It has a row for each run and stage, and a column for each task, in
    percent with 2 sigma."""
    scored = [(r, stage, scores) for r in runs for stage, scores in r["benchmarks"].items() if scores]
    tasks = list(dict.fromkeys(task for _, _, scores in scored for task in scores))
    tasks.sort(key=lambda t: TASKS.index(t) if t in TASKS else len(TASKS))
    rows, measured_on = [], _measured_on(runs)
    for run, stage, scores in scored:
        row = [run["model_tag"], run["method"] or "-", stage]
        row += [_cell(run["val_bpb"]) + measured_on.get(run["model_tag"], "")]
        for task in tasks:
            score = scores.get(task)
            text = "-" if score is None else f"{100 * score['accuracy']:.2f}"
            if score and score["interval"] is not None:
                text += f" ± {100 * score['interval']:.2f}"
            row.append(text)
        rows.append(row)
    guessing = {task: score["guessing"] for _, _, scores in scored for task, score in scores.items()}
    names = [task if guessing[task] is None else f"{task} (guessing: {100 * guessing[task]:.0f})" for task in tasks]
    return _table(["run", "method", "after", "val BPB of the base model", *names], rows) if rows else []


_UNITS = {"gb": "GB", "seconds": "s"}


def _label(key: Any) -> str:
    """Turns a key into words: gpu_memory_gb -> gpu memory, GB."""
    *words, unit = as_text(key).split("_")
    return " ".join(words) + f", {_UNITS[unit]}" if words and unit in _UNITS else " ".join([*words, unit])


def _list(values: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value. Empty values are left out."""
    return [f"- {_label(key)}: {_format_value(value)}" for key, value in values.items() if value not in (None, "")]


def _format_value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        if abs(value) >= 10000:
            return f"{value:,.0f}"
        return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 1e-3 or value == 0 else f"{value:.3e}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10000:
        return f"{value:,}"
    return as_text(value)


def _environment_lines(sections: list[dict], runs: list[dict]) -> list[str]:
    environments = [s["environment"] for s in sections]
    environment = environments[-1] if environments else environment_info()
    lines = _list({key: value for key, value in environment.items() if value != 0})
    lines += [f"- backend ({r['model_tag']}): {r['backend']}" for r in runs if r["backend"]]
    commits = sorted({as_text(e.get("commit"))[:12] for e in environments})
    if len(commits) > 1:
        lines.append(f"- sections were made at different commits: {', '.join(commits)}")
    return lines


def _time_table(sections: list[dict]) -> list[str]:
    rows, total = [], 0.0
    for s in sections:
        seconds = finite_number(s.get("wall_seconds"))
        if seconds is None:
            continue
        total += seconds
        rows.append([s["section"], s["model_tag"] or "all runs", format_seconds(seconds), s["timestamp"]])
    if not rows:
        return []
    rows.append(["**total**", "", format_seconds(total), ""])
    return _table(["stage", "run", "time", "finished"], rows)


def _telemetry_lines(metrics: dict[str, list[dict]]) -> list[str]:
    """Returns tables of the newest telemetry of each run (--telemetry-every=N). A row is the mean over the blocks
    for one kind of layer."""
    lines = []
    for tag, records in metrics.items():
        newest = next((r for r in reversed(records) if r.get("event") == "telemetry"), {})
        kinds: dict[str, dict[str, list[float]]] = {}
        for layer, numbers in newest.get("layers", {}).items() if isinstance(newest.get("layers"), dict) else ():
            kind = re.sub(r"^.*\.\d+\.", "", as_text(layer))  # This turns transformer.h.3.mlp.c_fc into mlp.c_fc.
            for name, value in numbers.items() if isinstance(numbers, dict) else ():
                if finite_number(value) is not None:
                    kinds.setdefault(kind, {}).setdefault(as_text(name), []).append(value)
        names = list(dict.fromkeys(name for values in kinds.values() for name in values))
        if not names:
            continue
        mean = {k: {n: sum(v) / len(v) for n, v in values.items()} for k, values in kinds.items()}
        rows = [[kind, *(_cell(values.get(n), "{:.3f}") for n in names)] for kind, values in mean.items()]
        lines += [f"**{tag}**, step {as_text(newest.get('step'))}", ""]
        lines += [*_table(["layer", *(n.replace("_", " ") for n in names)], rows), ""]
    return lines


def _sample_lines(sections: list[dict], runs: list[dict]) -> list[str]:
    """Returns the samples that the loss stage drew, one list for each run."""
    small = {run["model_tag"]: run["tokens"] for run in runs if run.get("tokens", CHECK_TOKENS) < CHECK_TOKENS}
    stages = ("base-model-training", "base-model-loss")  # The samples of the second stage replace those of the first.
    sampled = {s["model_tag"]: s["results"].get("samples") for s in sections if s["slug"] in stages}
    lines = []
    for tag, samples in sampled.items():
        if isinstance(samples, list) and samples:
            lines += [f"**{tag}**", ""]
            if tokens := small.get(tag):
                lines += [f"This model read {tokens / 1e6:,.2f}M tokens. Its samples show that the stages work."]
                lines += ["They do not show what 4-bit training can do.", ""]
            lines += [f"- `{_format_value(sample).replace('`', chr(39))}`" for sample in samples] + [""]
    return lines


def render(
    runs: list[dict], sections: list[dict], metrics: dict[str, list[dict]], plots: list[str], notes: list[str],
    left_out: list[str], summary_lines: list[str],
) -> str:  # fmt: skip
    """Returns the whole report in Markdown."""
    lines = ["# nanochat_fp4 report", "", f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}.", ""]
    lines += ["```", *summary_lines, "```", ""] if summary_lines else []
    if runs:
        lines += [*runs_table(runs), "", *_explanations(runs), ""]
    lines += [f"![{Path(plot).stem}]({plot})" for plot in plots] + [""] * bool(plots)
    if any(plot.startswith(("loss_mid", "loss_sft")) for plot in plots):
        lines += [_OF_FINE_TUNING, ""]
    for title, body in (
        ("Benchmarks (accuracy in percent, 2-sigma interval)", _benchmark_table(runs)),
        ("Quantization error, mean over the blocks", _telemetry_lines(metrics)),
        ("Samples", _sample_lines(sections, runs)),
        ("Time", _time_table(sections)),
        ("Environment", _environment_lines(sections, runs)),
        ("Left out", [f"- {line}" for line in left_out]),
        ("Notes", [f"- {note}" for note in notes]),
    ):
        if body:
            lines += [f"## {title}", "", *body, ""]
    lines += ["## Stages", ""] if sections else []
    for s in sections:
        lines += [f"### {s['section']}" + (f": {s['model_tag']}" if s["model_tag"] else ""), ""]
        for item in s["data"]:
            if isinstance(item, dict):
                lines += _list(item)
            else:
                lines += ["", *str(item).strip().splitlines(), ""]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"
