"""
The report of a base directory: report.md and curves.png. Beside nanochat's own report.md it is report_fp4.md.

    get_report(model_tag).log("Midtraining", [{...}, ...])     # a stage says what the report shows of it
    python -m nanochat_fp4.evaluation.report generate          # at the end; --model-tag names the run to begin with

A stage's section is <base dir>/report/<model tag>/midtraining.json. The tokenizer belongs to every run, so its sections
have no tag. A stage that runs again replaces its section.

The numbers in tables and plots come from the metrics.jsonl of a run's stages alone, which live and die with its
checkpoints. A cell that a log does not have is "-". The report also shows runs that were interrupted or still go on.
Runs are compared with each other only if they were validated on the same text, with the same tokenizer and on as many
tokens.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nanochat_fp4.cli import STAGE, ArgumentParser, UserError, format_seconds, run_main
from nanochat_fp4.common import base_dir_variable, get_base_dir, get_dist_info
from nanochat_fp4.evaluation import plots
from nanochat_fp4.evaluation.metrics import USUAL_TOKENS, read_jsonl
from nanochat_fp4.files import atomic_write
from nanochat_fp4.hardware import about_versions, environment_info

# The stages in the order of training, and the folders of their checkpoints.
FOLDERS = {
    "base": "base_checkpoints",
    "mid": "mid_checkpoints",
    "sft": "chatsft_checkpoints",
    "rl": "chatrl_checkpoints",
}
UNITS = {"bpb": "bits per byte", "loss": "nats per token of answers", "pass@1": "pass@1"}  # of what stages validate
# What a backward GEMM takes where its recipe rounds nothing anew.
GEMMS = {"output": "-", "grad_input": "the forward's weight", "grad_weight": "the forward's input"}
TITLE = "# nanochat_fp4 report"
TIME = "%Y-%m-%d %H:%M:%S"

_PROCESS_START = time.time()


class Report(NamedTuple):
    """The sections of a report in one folder. `model_tag` is the run to which this process's sections belong, if
    any. Ranks other than 0 log nothing."""

    folder: Path
    model_tag: str | None = None

    def path(self, section: str) -> Path:
        """Returns the file of a section: 'Chat evaluation sft' is in chat-evaluation-sft.json."""
        slug = re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")
        return self.folder / (self.model_tag or "") / f"{slug}.json"

    def log(self, section: str, data: Iterable[Any]) -> None:
        """Stores a section, with the command line of this process. `data` has strings (Markdown), dicts (shown as a
        list of "key: value") and None (skipped), as in nanochat."""
        if get_dist_info()[1]:
            return
        record = {
            "section": section,
            "arguments": sys.argv[1:],
            "timestamp": time.strftime(TIME),
            "wall_seconds": round(time.time() - _PROCESS_START, 1),
            # When the command began to which this stage belongs: dev/pipeline.sh, or this process.
            "began": float(os.environ.get("NANOCHAT_BEGAN") or _PROCESS_START),
            "data": [item for item in data if item],
        }
        path = self.path(section)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(record, indent=2, default=lambda v: v.item() if hasattr(v, "item") else str(v)))

    def read(self, notes: list[str]) -> list[dict[str, Any]]:
        """Returns all sections in the order of their time. A note names each one that is not readable."""
        sections = []
        for path in (*self.folder.glob("*.json"), *self.folder.glob("*/*.json")):
            try:
                s = json.loads(path.read_text("utf-8"))
                s["finished"], s["seconds"] = time.mktime(time.strptime(s["timestamp"], TIME)), int(s["wall_seconds"])
                s["began"] = int(s.get("began", s["finished"] - s["seconds"]))
                s["run"] = path.parent.name if path.parent != self.folder else "all runs"
                s |= {"section": str(s["section"]), "data": list(s["data"])}
                sections.append(s)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                notes.append(f"{path} is not readable as a section and was left out; run its stage again to replace it")
        return sorted(sections, key=lambda section: section["finished"])


def get_report(model_tag: str | None = None) -> Report:
    """Returns the report of this base directory."""
    return Report(Path(get_base_dir()) / "report", model_tag)


# ----------------------------------------------------------------------------------------------------------------------
# Runs


def _of(records: list[dict], *events: str) -> list[dict]:
    return [record for record in records if record.get("event") in events]


def _newest(records: list[dict], *events: str) -> dict[str, Any]:
    return next(iter(reversed(_of(records, *events))), {})


def read_stage(records: list[dict]) -> dict[str, Any]:
    """Returns how far a stage of a run has come, its validations, and the scores of its newest evaluated model."""
    start, last, evaluated = _newest(records, "start"), _newest(records, "train"), _of(records, "benchmarks")
    total, step = start.get("num_iterations", 0), last["step"] + 1 if last else None
    scores: dict[str, dict] = {}
    for record in evaluated:
        scores |= record["scores"] if record["step"] == evaluated[-1]["step"] else {}
    return {
        "start": start,
        "step": step,
        # A stage without a number of steps trains for an epoch.
        "num_iterations": total if total > 0 else None,
        "finished": step == total if total > 0 else last.get("progress", 0) >= 1,
        "validations": [(r[key], unit) for r in _of(records, "val") for key, unit in UNITS.items() if key in r],
        "scores": scores,
    }


def read_run(tag: str, base_dir: Path) -> dict[str, Any]:
    """Returns the numbers of a run, from the metrics.jsonl of its stages. What was not logged is None, or missing in
    "start" (the newest record of the base training's start) and in "measured" (its newest validation loss)."""
    logs = {stage: read_jsonl(base_dir / folder / tag / "metrics.jsonl") for stage, folder in FOLDERS.items()}
    stages = {stage: read_stage(records) for stage, records in logs.items()}
    records, text, validated = logs["base"], None, []
    for record in _of(records, "start", "val"):
        if record["event"] == "val":
            validated.append(record | {"val_text": text})
        elif record.get("val_text") != text:  # A resumed run can have other validation text than before.
            text, validated = record.get("val_text"), []
    # The newest validation is that of the last step. base_loss measures on more text than training does.
    measured = [r for r in validated if r["step"] > 0] + _of(records, "base_loss")
    trained, base = [r for r in _of(records, "train") if "tokens" in r], stages["base"]
    seconds, batch = sum(r["dt"] for r in trained), base["start"].get("total_batch_size")
    return base | {
        "model_tag": tag,
        "text": [base["start"].get(key) for key in ("tokenizer", "val_text")],
        "text_folder": base["start"].get("config", {}).get("data_dir"),
        "method": str(base["start"].get("method", "-")),
        "tokens": base["step"] * batch if base["step"] and batch else None,
        "seconds": seconds or None,
        "tokens_per_second": sum(r["tokens"] for r in trained) / seconds if seconds else None,
        "measured": max(reversed(measured), key=lambda r: r["step"], default={}),
        "samples": _newest(records, "sample", "base_loss").get("samples", []),
        "stages": stages,
        "curves": {
            "loss": [(r["step"], r["smoothed_loss"]) for r in trained if "smoothed_loss" in r],
            "bpb": [(r["step"], r["bpb"]) for r in validated],
            "forwards": [(r["step"], _percent_over(r["bpb"], r["bpb_bf16"])) for r in validated if "bpb_bf16" in r],
        },
    }


def _percent_over(value: float | None, base: float | None) -> float | None:
    return 100 * (value / base - 1) if value and base else None


def add_gaps(runs: list[dict]) -> None:
    """
    Adds the increase of validation BPB over the BF16 baseline that was trained with the same configuration, in
    percent: the curve "gap" over the steps, "gap" of the result with the method's own forward pass, and "gap_bf16" with
    the BF16 forward pass. There is none between runs that were trained or measured on different text, with different
    tokenizers or on different numbers of tokens, or whose logs do not say on what they were measured.
    """
    whole = sorted(runs, key=lambda run: run["finished"])  # Of two baselines the one that is finished counts.
    baselines = {r["start"].get("config_key"): r for r in whole if r["method"] == "bf16"}
    texts = [r["start"]["text"] for r in runs if "text" in r["start"]]
    for run in runs:
        run["old_text"] = run["start"].get("text") not in (None, *texts[-1:])
        base = baselines.get(run["start"].get("config_key"), run)
        if base is run:
            continue
        below = dict(base["curves"]["bpb"]) if run["text"] == base["text"] else {}
        run["curves"]["gap"] = [(x, _percent_over(y, below[x])) for x, y in run["curves"]["bpb"] if below.get(x)]
        on, on_base = ([r["text"][0], *(r["measured"].get(k) for k in ("val_text", "tokens"))] for r in (run, base))
        names = ("tokenizer", "validation text", "number of tokens")
        other = [name for name, mine, its in zip(names, on, on_base) if mine != its or not mine]
        if len({r["start"]["text"] for r in (run, base) if "text" in r["start"]}) > 1:
            other.insert(0, "training text")
        if other:
            run["no_gap"] = f"{base['model_tag']} has not the same {' and '.join(other)}"
        elif run["finished"] and base["finished"]:
            for gap, bpb in (("gap", "bpb"), ("gap_bf16", "bpb_bf16")):
                run[gap] = _percent_over(run["measured"].get(bpb), base["measured"].get(bpb))


# ----------------------------------------------------------------------------------------------------------------------
# The page


def _cell(value: Any, form: str = "{:.4f}") -> str:
    return "-" if value is None else form.format(value)


def _steps(of: dict[str, Any]) -> str:
    whole = "" if of["finished"] or not of["num_iterations"] else f" of {of['num_iterations']:,}"
    return _cell(of["step"], "{:,}") + whole


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table, or none without rows."""
    head, *body = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return [head, "|" + "---|" * len(header), *body] if rows else []


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.5g}"
    return f"{value:,}" if type(value) is int and value >= 10000 else " ".join(str(value).split())


def _list(values: Mapping[str, Any]) -> list[str]:
    """A line for each value, and a line below for each entry of a list. Empty values are left out."""
    lines = []
    for key, value in values.items():
        label = key.replace("_", " ").replace(" gb", ", GB")
        if isinstance(value, list):
            lines += [f"- {label}:", *(f"  - {_format(entry)}" for entry in value)]
        elif value not in (None, ""):
            lines.append(f"- {label}: {_format(value)}")
    return lines


def _emulated(start: dict[str, Any]) -> bool:
    work, backend = start.get("gemm_work", {}), start.get("backend", "")
    # What nf.backend() says where there is no FP4 GEMM, and base_train where there is no FP8 GEMM.
    return any(work.get(bits) and words in backend for bits, words in (("4", "decode "), ("8", "products: decoded")))


def runs_table(runs: list[dict]) -> list[str]:
    """Returns the lines of a table with one row for each run, and of what it says of this machine's speed."""
    header = ["run", "method", "steps", "tokens", "val tokens", "val BPB", "val BPB, BF16 forward"]
    header += ["gap to BF16", "gap, BF16 forward", "tokens/s", "training time"]
    rows = []
    for r in runs:
        measured, gaps = r["measured"], [_cell(r.get(key), "{:+.2f}%") for key in ("gap", "gap_bf16")]
        row = [r["model_tag"], r["method"], _steps(r) + ("" if r["finished"] else ", unfinished")]
        read, held = measured.get("tokens"), measured.get("val_text_tokens") or r["start"].get("val_text_tokens")
        again = f"{held:,}, read {read / held:.1f} times" if held and read and read > held else _cell(read, "{:,}")
        row += [_cell(r["tokens"], "{:,}"), again, _cell(measured.get("bpb")), _cell(measured.get("bpb_bf16"))]
        row += ["baseline", "baseline"] if r["method"] == "bf16" else gaps
        row += [_cell(r["tokens_per_second"], "{:,.0f}"), "-" if r["seconds"] is None else format_seconds(r["seconds"])]
        rows.append(row)
    lines = _table(header, rows)
    read = sorted(r["tokens"] / r["start"]["num_params"] for r in runs if r["tokens"] and r["start"].get("num_params"))
    few = [f"{each:.3g}" for each in read if round(each, 1) < USUAL_TOKENS]
    notes = SMALL.format(USUAL_TOKENS, " to ".join(dict.fromkeys(few[:1] + few[-1:]))) * bool(few)
    notes += EMULATION * any(_emulated(r["start"]) for r in runs)
    notes += BPB + GAP + SCATTER * any(r.get("gap") for r in runs) + "\n"
    if old := [r["model_tag"] for r in runs if r.get("old_text")]:
        notes += f"- trained on another text than the newest run: {', '.join(old)}\n"
    notes += "".join(f"- no gap of {r['model_tag']}: {r['no_gap']}\n" for r in runs if "no_gap" in r and r["measured"])
    return [*lines, "", *notes.splitlines()]


SMALL = (
    "- a small run shows that everything works, and ranks no method: it read {1} tokens a parameter; {0} are usual\n"
)
EMULATION = "- tokens/s: this machine emulates products of few bits, so its speed ranks no method\n"
BPB = "- val BPB: bits per byte of the validation text with the forward pass of the method; lower is better\n"
GAP = "- gap: increase of val BPB over the BF16 run of the same configuration and text, which `COMPARE=1` trains too"
# Of clover in d6_mixed and d6_fp8_forward, and in d4_40m. One seed gives the same bits again on a CPU (reliability.md).
SCATTER = "; of one seed: clover's of nine seeds lie 0.3 points apart at d6 (160M tokens), of four 1.3 at d4 (40M)"


def summary(runs: list[dict], base_dir: Path) -> list[str]:
    """Returns lines about each run that has ended: where it is, and how to use it."""
    lines = []
    variable = base_dir_variable(base_dir)
    for r in (r for r in runs if r["finished"]):
        tag, stages = r["model_tag"], r["stages"]
        there = [s for s in FOLDERS if any((base_dir / FOLDERS[s] / tag).rglob("model_*"))]
        stage = there[-1] if there else "base"
        lines += [f"{tag}: {base_dir / FOLDERS[stage] / tag}"]
        validated = {s: stages[s]["validations"] for s in stages if s != "base"}
        for s, ((first, unit), *_, (last, _)) in ((s, v) for s, v in validated.items() if len(v) > 1):
            worse = ", worse than before" * (last < first if unit == "pass@1" else last > first)
            lines += [f"  validation on conversations: {s} {first:.2f} -> {last:.2f} {unit}{worse}"]
        if stages[stage]["step"] and not stages[stage]["finished"]:
            done = f"{stage} has done {_steps(stages[stage])} steps"
            lines += [f"  so far:     {done}; its command goes on with --resume-from-step latest"]
        own = r["text_folder"] and base_dir not in Path(r["text_folder"]).parents
        if "base" in there and (own or stage == "base"):
            command = f"{variable}{STAGE}chat_cli -i base --model-tag {tag}"
            why = "  # the model of your text; later stages have conversations of their own"
            lines += [f'  continue a text: {command} -p "Once upon a time"' + why * (stage != "base")]
        if stage != "base":
            lines += [f"  talk to it: {variable}{STAGE}chat_web -i {stage} --model-tag {tag}"]
        kind = "safetensors" if r["method"] == "bf16" else "compressed-tensors"
        command = f"{variable}{STAGE}export --source {stage} --model-tag {tag} --format {kind} --out exported"
        is_llama = r["start"].get("config", {}).get("llama")
        read = "transformers alone reads it; of base_train --llama also vLLM (not run) and llama.cpp"
        read = "transformers reads it, and vLLM should (not run); llama.cpp reads --format gguf" if is_llama else read
        lines += [f"  export it:  {command}  # {read}"] * bool(there)
    return lines


def _text_of(r: dict[str, Any]) -> str:
    train, val = (f"{r['start'][key]:,}" if r["start"].get(key) else "" for key in ("text_tokens", "val_text_tokens"))
    return r["text_folder"] + (f", about {train} tokens to train on and {val} to validate" if train and val else "")


def _benchmarks(runs: list[dict]) -> list[str]:
    scored = [(r, stage, s["scores"]) for r in runs for stage, s in r["stages"].items() if s["scores"]]
    chances = {task: score.get("guessing") for _, _, scores in scored for task, score in scores.items()}
    names = [task if chance is None else f"{task} (guessing: {100 * chance:.0f})" for task, chance in chances.items()]
    rows = []
    for r, stage, scores in scored:
        row = [r["model_tag"], r["method"], stage, _cell(r["measured"].get("bpb"))]
        for score in (scores.get(task, {}) for task in chances):
            row.append(score.get("text") or (f"{100 * score['accuracy']:.2f}%" if "accuracy" in score else "-"))
        rows.append(row)
    few = min((s["count"] for _, _, scores in scored for s in scores.values() if "count" in s), default=100)
    note = ["", f"As few as {few} problems tell nothing of a model: they show that the evaluation works."] * (few < 100)
    return _table(["run", "method", "after", "val BPB of the base model", *names], rows) + note


def _samples(runs: list[dict]) -> list[str]:
    lines = []
    for run in (run for run in runs if run["samples"]):
        samples = [f"- `{_format(sample).replace('`', chr(39))}`" for sample in run["samples"]]
        lines += [f"**{run['model_tag']}**", "", *samples, ""]
    return lines[:-1]


def _stages(sections: list[dict], runs: list[dict]) -> list[str]:
    """The sections, with their times, and the conversations of all runs. The total is that of the commands that ran the
    stages, which also start Python, write the text and wait."""
    ends: dict[float, float] = {}
    for s in sections:
        ends[s["began"]] = max(ends.get(s["began"], 0), s["finished"])
    whole = format_seconds(sum(ends.values()) - sum(ends))
    lines = [f"In all {whole} by the clock on the wall, without calls that were interrupted."]
    lines += ["", "<details><summary>Each stage: its time, its flags, and what the tables do not have</summary>", ""]
    mixtures = [(kind, s["start"].get("sources")) for run in runs for kind, s in run["stages"].items()]
    lines += dict.fromkeys(f"- {k} trains on {'; '.join(map(': '.join, m.items()))}" for k, m in mixtures if m)
    for s in sections:
        lines += ["", f"### {s['section']}: {s['run']}", ""]
        lines += [f"- time of the last call: {format_seconds(s['seconds'])}, finished {s['timestamp']}"]
        for item in s["data"]:
            lines += _list(item) if isinstance(item, dict) else ["", *str(item).strip().splitlines(), ""]
    return [*lines, "", "</details>"] if sections else []


def _environment(runs: list[dict]) -> list[str]:
    starts = [stage["start"] for run in runs for stage in run["stages"].values()]
    environments = [start["environment"] for start in starts if "environment" in start]
    environment = (environments or [environment_info()])[-1]
    lines = _list({key: value for key, value in environment.items() if value != 0})
    lines += [f"- {pair}" for pair in [about_versions(environment)] if pair]
    lines += [f"- backend ({r['model_tag']}): {r['start']['backend']}" for r in runs if "backend" in r["start"]]
    commits = sorted({str(environment.get("commit"))[:12] for environment in environments})
    return lines + [f"- stages were run at different commits: {', '.join(commits)}"] * (len(commits) > 1)


def _page(
    base_dir: Path, about: list[str], runs: list[dict], sections: list[dict], picture: str, notes: list[str]
) -> str:
    recipes = {name: gemms for run in runs for name, gemms in run["start"].get("recipes", {}).items()}
    methods = []
    for name, gemms in recipes.items():
        said = {g: gemms[g].replace("- x -", "high precision") for g in GEMMS}
        methods.append([name, *(said[g].replace(" x -", f" x {what}") for g, what in GEMMS.items())])
    left_out = base_dir / "report" / "left_out.txt"  # The plan and dev/pipeline.sh write it.
    without = left_out.read_text("utf-8", "replace").splitlines() if left_out.is_file() else []
    lines = [TITLE, "", f"Written {time.strftime(TIME)}.", ""]
    lines += [f"Text: {text}\n" for text in dict.fromkeys(_text_of(r) for r in runs if r["text_folder"])]
    lines += ["```", *about, "```", ""] if about else []
    lines += [*runs_table(runs), ""] if runs else []
    lines += [f"![curves of pre-training]({picture})"] if picture else []
    for title, body in (
        ("Benchmarks (accuracy, 2-sigma interval)", _benchmarks(runs)),
        ("Methods", _table(["method", *GEMMS], methods)),
        ("Samples", _samples(runs)),
        ("Environment", _environment(runs)),
        ("Left out", [f"- {line}" for line in without]),
        ("Notes", [f"- {note}" for note in notes]),
        ("Stages", _stages(sections, runs)),
    ):
        lines += ["", f"## {title}", "", *body] if body else []
    return "\n".join(lines) + "\n"


def generate(folder: Path, model_tag: str | None = None) -> Path:
    """Writes report.md and curves.png, and prints the table of runs. Returns the path of report.md. `model_tag` is the
    run whose commands it offers and which the printed table begins with; of all runs if it is not finished.

    Raises UserError if there is nothing to report.
    """
    base_dir, notes, runs = folder.parent, [], []
    sections = Report(folder).read(notes)
    logs = [sorted((base_dir / f).glob("*/metrics.jsonl")) for f in FOLDERS.values()]
    logs = [sorted(of, key=lambda path: path.stat().st_mtime) for of in logs]  # by name within one tick of the clock
    for tag in dict.fromkeys(path.parent.name for of_stage in logs for path in of_stage):
        try:
            run = read_run(tag, base_dir)
            runs_table([run])  # This and the next line find a number that is none.
            summary([run], base_dir)
            runs.append(run)
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as e:
            notes.append(f"a metrics.jsonl of {tag} cannot be read, so the run was left out ({type(e).__name__}: {e})")
    if not sections and not runs:
        raise UserError(f"nothing to report in {folder}; run {base_dir_variable(base_dir)}bash speedrun_fp4.sh first")
    add_gaps(runs)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.md"
    if path.exists() and not path.read_bytes().startswith(TITLE.encode()):
        path = folder / "report_fp4.md"  # The other one is nanochat's.
    picture = "curves.png" if plots.draw_runs(folder / "curves.png", runs, notes) else ""
    about = summary([run for run in runs if run["model_tag"] == model_tag], base_dir) or summary(runs, base_dir)
    atomic_write(path, _page(base_dir, about, runs, sections, picture, notes).encode("utf-8", "replace"))
    runs.sort(key=lambda run: run["model_tag"] != model_tag)
    print("\n".join([*runs_table(runs), "", *about, "report:"]))
    return path


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Put the report together from what the stages logged.")
    parser.add_argument("command", nargs="?", default="generate", choices=["generate"])
    parser.add_argument("--model-tag", help="the run whose commands it offers (default: every run)")
    print(generate(get_report().folder, parser.parse_args(argv).model_tag))


if __name__ == "__main__":
    run_main(main)
