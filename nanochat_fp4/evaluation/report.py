"""
The report of a run: every stage logs its numbers as JSON, and `generate` makes one report.md of them.

    get_report(model_tag).log("Base model loss", [{...}, ...], results={"val_bpb": 1.02})

writes <base dir>/report/<model tag>/base-model-loss.json. Without a tag the file is report/base-model-loss.json, as for
the tokenizer, which belongs to every run. A stage that runs again replaces its section.

`python -m nanochat_fp4.evaluation.report generate` reads all sections and every run's metrics.jsonl. The command writes
report.md, report.json and the plots beside them. A run that was interrupted, or is still going on, appears with the
numbers that it has.

Runs are compared with each other only if they were validated on the same text, with the same tokenizer, on as many
tokens and with the same forward pass. Otherwise there is no gap between them, and no picture shows both.
"""

import functools
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nanochat_fp4.common import get_base_dir, get_dist_info
from nanochat_fp4.console import ArgumentParser, format_seconds
from nanochat_fp4.environment import environment_info
from nanochat_fp4.errors import UserError, run_main
from nanochat_fp4.evaluation import plots
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.files import atomic_write

# Order of the stages in the report; sections with other names follow in the order of their time.
SECTIONS = [
    "tokenizer-training",
    "tokenizer-evaluation",
    "base-model-training",
    "base-model-loss",
    "base-model-evaluation",
    "midtraining",
    "chat-evaluation-mid",
    "chat-sft",
    "chat-evaluation-sft",
    "chat-rl",
    "chat-evaluation-rl",
]
MEASURES = {  # section -> the section of the training whose model it measures
    "base-model-loss": "base-model-training",
    "base-model-evaluation": "base-model-training",
    "chat-evaluation-mid": "midtraining",
    "chat-evaluation-sft": "chat-sft",
    "chat-evaluation-rl": "chat-rl",
}
# Columns of the benchmark table, in the order of the paper's Table 5. Other tasks follow.
TASKS = ["ARC-Easy", "ARC-Challenge", "GSM8K", "HumanEval", "MMLU", "SpellingBee", "CORE", "ChatCORE"]

CHECK_TOKENS = 1e9  # a run of fewer tokens only checks the stages

_PROCESS_START = time.time()


def slugify(text: str) -> str:
    """'Chat evaluation sft' -> 'chat-evaluation-sft': a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _plain(value: Any) -> Any:
    """`value` as strict JSON: tensors and paths become numbers and strings, NaN and infinity become strings."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


class Report:
    """The sections in one folder. `model_tag` is the run that this process's sections belong to, if any."""

    def __init__(self, report_dir: str | os.PathLike, model_tag: str | None = None):
        self.report_dir = Path(report_dir)
        self.model_tag = model_tag

    def log(self, section: str, data: Iterable[Any], results: Mapping[str, Any] | None = None) -> str:
        """
        Store one section. Returns its path.

        data: strings (Markdown), dicts (shown as a list of "key: value") or None (skipped), as in nanochat.
        results: numbers for the tables. A stage gives `val_bpb`, `val_bpb_bf16`, `tokens_per_second` and so on. What
            goes with a `val_bpb` is in MEASUREMENT. An evaluation gives task -> accuracy in [0, 1] or
            `task -> {"accuracy": a, "count": n, "interval": 2 sigma}`.
        """
        record = {
            "section": section,
            "model_tag": self.model_tag,
            "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
            "wall_seconds": round(time.time() - _PROCESS_START, 1),
            "data": [_plain(item) for item in data if item],
            "results": _plain(results or {}),
            "environment": _plain(environment_info()),
        }
        path = self._path(section)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(record, indent=2))
        return str(path)

    def has(self, section: str) -> bool:
        """Whether that section was logged."""
        return self._path(section).exists()

    def _path(self, section: str) -> Path:
        return self.report_dir / (self.model_tag or "") / f"{slugify(section)}.json"

    def reset(self) -> None:
        """Forget all sections and remove report.md. Checkpoints and metrics stay."""
        for path in [*self._section_files(), *self.report_dir.glob("report.*"), *self.report_dir.glob("*.png")]:
            path.unlink(missing_ok=True)

    def _section_files(self) -> list[Path]:
        files = [*self.report_dir.glob("*.json"), *self.report_dir.glob("*/*.json")]
        return sorted(p for p in files if p != self.report_dir / "report.json")

    def generate(self) -> str:
        """Write report.md, report.json and the plots, and print the table of runs; returns the path of report.md."""
        notes: list[str] = []
        sections = list(self._read_sections(notes))
        metrics = _read_metrics(self.report_dir.parent / "base_checkpoints", notes)
        if not sections and not metrics:
            raise UserError(f"nothing to report in {self.report_dir}; run bash speedrun_fp4.sh first, or a stage of it")
        tags = dict.fromkeys([s["model_tag"] for s in sections if s["model_tag"]] + list(metrics))
        own = {tag: [s for s in sections if s["model_tag"] == tag] for tag in tags}
        runs = [_summarize_run(tag, own[tag], metrics.get(tag, [])) for tag in tags]
        _add_gaps(runs, notes)
        stages = {"base": metrics}
        for stage, folder in (("mid", "mid_checkpoints"), ("sft", "chatsft_checkpoints"), ("rl", "chatrl_checkpoints")):
            stages[stage] = _read_metrics(self.report_dir.parent / folder, notes)
        stages = {stage: {tag: found[tag] for tag in tags if tag in found} for stage, found in stages.items()}
        metrics = stages["base"]
        plots = _plot(self.report_dir, stages, runs, notes)

        left_out = self._left_out()
        markdown = _render(runs, sections, metrics, plots, notes, left_out)
        self.report_dir.mkdir(parents=True, exist_ok=True)
        document = {"runs": runs, "sections": sections, "notes": notes, "plots": plots, "left_out": left_out}
        atomic_write(self.report_dir / "report.json", json.dumps(_plain(document), indent=2))
        path = self.report_dir / "report.md"
        atomic_write(path, markdown.encode("utf-8", "replace"))
        print("\n".join(_runs_table(runs)))
        return str(path)

    def _left_out(self) -> list[str]:
        """What the run went without, a line each: its plan and dev/pipeline.sh write left_out.txt."""
        try:
            return [_text(line) for line in (self.report_dir / "left_out.txt").read_text("utf-8").splitlines() if line]
        except (OSError, UnicodeError):
            return []

    def _read_sections(self, notes: list[str]) -> Iterable[dict]:
        found = []
        for path in self._section_files():
            try:
                record = json.loads(path.read_text(encoding="utf-8"))
                kinds = {"section": str, "data": list, "results": dict, "environment": dict, "timestamp": str}
                if not all(isinstance(record[key], kind) for key, kind in kinds.items()):
                    raise ValueError("not a section")
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                notes.append(f"{path} is not readable as a section and was left out; run its stage again to replace it")
                continue
            record["model_tag"] = path.parent.name if path.parent != self.report_dir else None
            record |= {"slug": path.stem, "section": _text(record["section"]), "timestamp": _text(record["timestamp"])}
            found.append(record)
        place = {slug: i for i, slug in enumerate(SECTIONS)}
        found.sort(key=lambda s: (place.get(s["slug"], len(place)), s["timestamp"]))
        trained = {(s["model_tag"], s["slug"]): s["timestamp"] for s in found}
        old = [s for s in found if s["timestamp"] < trained.get((s["model_tag"], MEASURES.get(s["slug"])), "")]
        notes += [
            f"{s['section']} of {s['model_tag']} measured a model that has been trained anew since, and was left out; "
            "run its stage again"
            for s in old
        ]
        return [s for s in found if s not in old]


class DummyReport:
    """The report of ranks other than 0, which does nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def has(self, section: str) -> bool:
        return True


def get_report(model_tag: str | None = None) -> Report | DummyReport:
    """The report of this base directory; on ranks other than 0, one that does nothing."""
    _, rank, _, _ = get_dist_info()
    return Report(Path(get_base_dir()) / "report", model_tag) if rank == 0 else DummyReport()


# ----------------------------------------------------------------------------------------------------------------------
# From sections and metrics to one row per run


def _read_metrics(checkpoints: Path, notes: list[str]) -> dict[str, list[dict]]:
    metrics = {}
    for path in sorted(checkpoints.glob("*/metrics.jsonl"), key=lambda p: p.stat().st_mtime):
        try:
            records = read_jsonl(path)
        except OSError as e:
            notes.append(f"{path} cannot be read ({e.strerror})")
            continue
        if records:
            metrics[path.parent.name] = records
    return metrics


def _number(value: Any) -> float | None:
    """`value` if it is a finite number, else None. Files may hold anything."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if good else None


def _text(value: Any) -> str:
    """`value` on one line, without half surrogate pairs: JSON can spell them, but they are no Unicode text."""
    return " ".join(str(value).encode("utf-8", "replace").decode("utf-8").split())


# The results that a run's summary takes. Other results stay in their section.
_TEXTS = ("method", "config_key", "backend", "tokenizer")
_NUMBERS = ("num_iterations", "total_batch_size", "tokens_per_second", "training_seconds")
# One measurement of the validation loss: with the method's own forward pass and in BF16, on which text, on how many
# tokens. It is taken as a whole, because a loss means nothing beside another measurement's text.
MEASUREMENT = ("val_bpb", "val_bpb_bf16", "val_text", "val_tokens")


def _summarize_run(tag: str, sections: list[dict], metrics: list[dict]) -> dict:
    """One run as a flat dict; values that were not logged are None."""
    keys = ("step", *_TEXTS, *_NUMBERS, *MEASUREMENT)
    run: dict[str, Any] = {key: None for key in keys} | {"model_tag": tag, "benchmarks": {}}

    def measured(values: Mapping[str, Any]) -> None:
        if _number(values.get("val_bpb")) is not None:
            run.update({k: _number(values.get(k)) for k in MEASUREMENT if k != "val_text"})
            run["val_text"] = values.get("val_text")

    def take(values: Mapping[str, Any]) -> None:
        run.update({k: _text(values[k]) for k in _TEXTS if isinstance(values.get(k), str)})
        run.update({k: _number(values[k]) for k in _NUMBERS if _number(values.get(k)) is not None})

    val_text = None
    for record in metrics:
        event, step = record.get("event"), _number(record.get("step"))
        if event == "start":
            take(record)
            val_text = record.get("val_text")
        elif event == "train" and step is not None:
            run["step"] = int(step) + 1
            take({"tokens_per_second": record.get("tok_per_sec")})
        elif event == "val":
            names = {"val_bpb": "bpb", "val_bpb_bf16": "bpb_bf16", "val_tokens": "tokens"}
            measured({key: record.get(name) for key, name in names.items()} | {"val_text": val_text})
    unfinished = metrics and run["num_iterations"] and (run["step"] or 0) < run["num_iterations"]
    if unfinished and any(s["slug"] == "base-model-training" for s in sections):
        # Training writes its section at its end, so an earlier run of this tag wrote it.
        sections = [s for s in sections if not s["slug"].startswith("base-model-")]
    for section in sections:
        if section["slug"].startswith("chat-evaluation-") or section["slug"] == "base-model-evaluation":
            stage = section["slug"].removeprefix("chat-evaluation-").removesuffix("-model-evaluation")
            scored = {_text(task): _score(value) for task, value in section["results"].items()}
            run["benchmarks"][stage] = {task: score for task, score in scored.items() if score}
        elif section["slug"] == "base-model-training":
            take(section["results"])
            if run["val_bpb"] is None:
                measured(section["results"])
        elif section["slug"] == "base-model-loss":
            # The loss stage comes after training and measures on more tokens. Its BPB replaces the training loop's,
            # unless it is another step's.
            take(section["results"])
            if section["results"].get("step") in (None, run["step"]):
                measured(section["results"])
    if run["step"] and run["total_batch_size"]:
        run["tokens"] = int(run["total_batch_size"] * run["step"])
    run["finished"] = run["step"] is not None and run["step"] == run["num_iterations"]
    return run


def _score(value: Any) -> dict[str, float | None] | None:
    """The dict of "accuracy" and "interval" (2 sigma, None if unknown) from an accuracy or an evaluation's dict."""
    given = value if isinstance(value, dict) else {"accuracy": value}
    accuracy, count, interval = (_number(given.get(key)) for key in ("accuracy", "count", "interval"))
    if accuracy is None:
        return None
    if interval is None and count is not None and count > 0:
        interval = 2 * math.sqrt(max(0.0, accuracy * (1 - accuracy)) / count)
    return {"accuracy": accuracy, "interval": interval}


def _add_gaps(runs: list[dict], notes: list[str]) -> None:
    """Increase of validation BPB over the BF16 baseline that was trained with the same configuration, in percent.

    There are two, by the forward pass: gap_percent of the own forward, gap_percent_bf16 of the BF16 forward. A note
    names the runs that have no gap because another text was validated.
    """
    finished = [r for r in runs if r["finished"] and r["val_bpb"]]
    baselines = {r["config_key"]: r for r in finished if r["method"] == "bf16"}
    for run in finished:
        base = baselines.get(run["config_key"])
        if not base or base is run:
            continue
        different = [key for key in ("val_text", "tokenizer") if run[key] != base[key] or not run[key]]
        if different:
            words = " and ".join({"val_text": "validation text", "tokenizer": "tokenizer"}[key] for key in different)
            names = f"{run['model_tag']} and {base['model_tag']}"
            notes.append(f"no gap between {names}, whose {words} is not known to be the same")
        # The loss stage measures on more tokens than the training loop.
        elif run["val_tokens"] == base["val_tokens"]:
            run["gap_percent"] = 100 * (run["val_bpb"] / base["val_bpb"] - 1)
            if run["val_bpb_bf16"] and base["val_bpb_bf16"]:
                run["gap_percent_bf16"] = 100 * (run["val_bpb_bf16"] / base["val_bpb_bf16"] - 1)


# ----------------------------------------------------------------------------------------------------------------------
# Rendering


def _cell(value: Any, form: str = "{:.4f}") -> str:
    return "-" if value is None else form.format(value)


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return [head, "|" + "---|" * len(header), *body]


def _runs_table(runs: list[dict]) -> list[str]:
    header = ["run", "method", "steps", "tokens", "val BPB", "val BPB, BF16 forward"]
    header += ["gap to BF16", "gap, BF16 forward", "tokens/s", "training time"]
    rows = []
    for r in runs:
        steps = _cell(r["step"], "{:,}")
        if not r["finished"] and r["num_iterations"]:
            steps += f" of {r['num_iterations']:,.0f}, unfinished"
        gaps = [_cell(r.get(key), "{:+.2f}%") for key in ("gap_percent", "gap_percent_bf16")]
        gaps = ["baseline", "baseline"] if r["method"] == "bf16" else gaps
        seconds = r["training_seconds"]
        row = [r["model_tag"], r["method"] or "-", steps, _cell(r.get("tokens"), "{:,}"), _cell(r["val_bpb"])]
        row += [_cell(r["val_bpb_bf16"]), *gaps, _cell(r["tokens_per_second"], "{:,.0f}")]
        rows.append([*row, "-" if seconds is None else format_seconds(seconds)])
    return _table(header, rows)


def _explanations(runs: list[dict]) -> list[str]:
    """Explains the numbers of the runs' table, and how far chance moves them."""
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


def _benchmark_table(runs: list[dict]) -> list[str]:
    """Like the paper's Table 5, with a row for each run and stage, a column for each task, and percent with 2 sigma."""
    scored = [(r, stage, scores) for r in runs for stage, scores in r["benchmarks"].items() if scores]
    tasks = list(dict.fromkeys(task for _, _, scores in scored for task in scores))
    tasks.sort(key=lambda t: TASKS.index(t) if t in TASKS else len(TASKS))
    rows = []
    for run, stage, scores in scored:
        row = [run["model_tag"], run["method"] or "-", stage, _cell(run["val_bpb"])]
        for task in tasks:
            score = scores.get(task)
            text = "-" if score is None else f"{100 * score['accuracy']:.2f}"
            if score and score["interval"] is not None:
                text += f" ± {100 * score['interval']:.2f}"
            row.append(text)
        rows.append(row)
    return _table(["run", "method", "after", "val BPB", *tasks], rows) if rows else []


_UNITS = {"gb": "GB", "seconds": "s"}


def _label(key: Any) -> str:
    """A key as words: gpu_memory_gb -> gpu memory, GB."""
    *words, unit = _text(key).split("_")
    return " ".join(words) + f", {_UNITS[unit]}" if words and unit in _UNITS else " ".join([*words, unit])


def _list(values: Mapping[str, Any]) -> list[str]:
    """A line for each value. Empty values are left out."""
    return [f"- {_label(key)}: {_format_value(value)}" for key, value in values.items() if value not in (None, "")]


def _format_value(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        if abs(value) >= 10000:
            return f"{value:,.0f}"
        return f"{value:.4f}".rstrip("0").rstrip(".") if abs(value) >= 1e-3 or value == 0 else f"{value:.3e}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10000:
        return f"{value:,}"
    return _text(value)


def _environment_lines(sections: list[dict], runs: list[dict]) -> list[str]:
    environments = [s["environment"] for s in sections]
    environment = environments[-1] if environments else environment_info()
    lines = _list({key: value for key, value in environment.items() if value != 0})
    lines += [f"- backend ({r['model_tag']}): {r['backend']}" for r in runs if r["backend"]]
    commits = sorted({_text(e.get("commit"))[:12] for e in environments})
    if len(commits) > 1:
        lines.append(f"- sections were made at different commits: {', '.join(commits)}")
    return lines


def _time_table(sections: list[dict]) -> list[str]:
    rows, total = [], 0.0
    for s in sections:
        seconds = _number(s.get("wall_seconds"))
        if seconds is None:
            continue
        total += seconds
        rows.append([s["section"], s["model_tag"] or "all runs", format_seconds(seconds), s["timestamp"]])
    if not rows:
        return []
    rows.append(["**total**", "", format_seconds(total), ""])
    return _table(["stage", "run", "time", "finished"], rows)


def _telemetry_lines(metrics: dict[str, list[dict]]) -> list[str]:
    """The newest telemetry of each run (--telemetry-every=N): the mean over the blocks, for each kind of layer."""
    lines = []
    for tag, records in metrics.items():
        newest = next((r for r in reversed(records) if r.get("event") == "telemetry"), {})
        kinds: dict[str, dict[str, list[float]]] = {}
        for layer, numbers in newest.get("layers", {}).items() if isinstance(newest.get("layers"), dict) else ():
            kind = re.sub(r"^.*\.\d+\.", "", _text(layer))  # transformer.h.3.mlp.c_fc -> mlp.c_fc
            for name, value in numbers.items() if isinstance(numbers, dict) else ():
                if _number(value) is not None:
                    kinds.setdefault(kind, {}).setdefault(_text(name), []).append(value)
        names = list(dict.fromkeys(name for values in kinds.values() for name in values))
        if not names:
            continue
        mean = {k: {n: sum(v) / len(v) for n, v in values.items()} for k, values in kinds.items()}
        rows = [[kind, *(_cell(values.get(n), "{:.3f}") for n in names)] for kind, values in mean.items()]
        lines += [f"**{tag}**, step {_text(newest.get('step'))}", ""]
        lines += [*_table(["layer", *(n.replace("_", " ") for n in names)], rows), ""]
    return lines


def _sample_lines(sections: list[dict], runs: list[dict]) -> list[str]:
    """The samples that the loss stage drew, one list for each run."""
    small = {run["model_tag"]: run["tokens"] for run in runs if run.get("tokens", CHECK_TOKENS) < CHECK_TOKENS}
    stages = ("base-model-training", "base-model-loss")  # the second one's samples replace the first one's
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


def _render(
    runs: list[dict], sections: list[dict], metrics: dict[str, list[dict]], plots: list[str], notes: list[str],
    left_out: list[str],
) -> str:  # fmt: skip
    lines = ["# nanochat_fp4 report", "", f"Written {time.strftime('%Y-%m-%d %H:%M:%S')}.", ""]
    if runs:
        lines += [*_runs_table(runs), "", *_explanations(runs), ""]
    lines += [f"![{Path(plot).stem}]({plot})" for plot in plots] + [""] * bool(plots)
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


_LOSS = "training loss, nats per token (smoothed)"
_PLOTS = {  # file name -> title, title of the y axis, stage, event, key of its lines
    "loss": ("Pre-training", _LOSS, "base", "train", "smoothed_loss"),
    "bpb": ("Pre-training: validation text", "bits per byte", "base", "val", "bpb"),
    "loss_mid": ("Mid-training", _LOSS, "mid", "train", "smoothed_loss"),
    "loss_sft": ("Supervised fine-tuning", _LOSS, "sft", "train", "smoothed_loss"),
    "reward_rl": ("Reinforcement learning", "mean reward of the answers", "rl", "train", "reward"),
}

# name of a line -> (x, y) of each of its runs; runs that differ by their seed alone are one line
Lines = dict[str, list[tuple[list[float], list[float]]]]


def _plot(report_dir: Path, stages: dict[str, dict[str, list[dict]]], runs: list[dict], notes: list[str]) -> list[str]:
    """Draws the files of _PLOTS, with a line for every run. Returns the names of the written files.

    Runs of another tokenizer or validation text get pictures of their own: bpb.png, then bpb_2.png and so on.
    stages: base, mid, sft and rl, each with tag -> records of metrics.jsonl.
    """
    alike: dict[tuple, list[dict]] = {}
    for run in runs:
        records = stages["base"].get(run["model_tag"], [])
        alike.setdefault((run["tokenizer"], _newest_text(records)), []).append(run)
    written: list[str] = []
    for number, group in enumerate(alike.values(), start=1):
        ending = f"_{number}" if number > 1 else ""
        about = f" ({', '.join(run['model_tag'] for run in group)})" if len(alike) > 1 else ""
        name_of = _names_of_lines(group)
        baselines = {name_of[run["model_tag"]] for run in group if run["method"] == "bf16"}
        others = [name for name in dict.fromkeys(name_of.values()) if name not in baselines]
        colors = dict.fromkeys(baselines, plots.BASELINE) | dict(zip(others, itertools.cycle(plots.COLORS)))
        for name, (title, axis, stage, event, key) in _PLOTS.items():
            lines: Lines = {}
            differences: Lines = {}
            for tag in (run["model_tag"] for run in group):
                records = [r for r in _of_one_text(stages[stage].get(tag, [])) if r.get("event") == event]
                if points := _points(records, lambda r, k=key: _number(r.get(k))):
                    lines.setdefault(name_of[tag], []).append(points)
                if event == "val" and name_of[tag] not in baselines and (points := _points(records, _own_over_bf16)):
                    differences.setdefault(name_of[tag], []).append(points)
            if not lines:
                continue
            panels = [functools.partial(_draw, lines=lines, axis=axis, colors=colors)]
            if differences:
                below = "own over BF16\nforward, %"
                panels.append(functools.partial(_draw, lines=differences, axis=below, colors=colors))
            try:
                plots.draw(report_dir / f"{name}{ending}.png", title + about, *panels)
            except ImportError as e:
                notes.append(f"no plots: matplotlib cannot be imported ({e})")
                return written
            written.append(f"{name}{ending}.png")
    return written


def _names_of_lines(runs: list[dict]) -> dict[str, str]:
    """tag -> the name of its line. Runs that differ by their seed alone have one name."""
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
    """The validation text of the log's last start. A resume may have changed it."""
    return next((r.get("val_text") for r in reversed(records) if r.get("event") == "start"), None)


def _of_one_text(records: list[dict]) -> list[dict]:
    """The log without the validations on another text than the newest one."""
    kept, text, newest = [], None, _newest_text(records)
    for record in records:
        text = record.get("val_text") if record.get("event") == "start" else text
        if record.get("event") != "val" or text == newest:
            kept.append(record)
    return kept


def _points(records: list[dict], value: Callable[[dict], float | None]) -> tuple[list[float], list[float]] | None:
    """(steps, values) of the records that have both."""
    pairs = [(step, y) for r in records if (step := _number(r.get("step"))) is not None and (y := value(r)) is not None]
    return ([x for x, _ in pairs], [y for _, y in pairs]) if pairs else None


def _own_over_bf16(record: dict) -> float | None:
    """By how much the loss with the own forward pass is above that of the same weights in BF16, in percent."""
    own, bf16 = _number(record.get("bpb")), _number(record.get("bpb_bf16"))
    return 100 * (own / bf16 - 1) if own is not None and bf16 else None


def _draw(axes: Any, lines: Lines, axis: str, colors: dict[str, str]) -> None:
    for name, runs in lines.items():
        plots.curve(axes, name, runs, "-", colors[name])
    axes.set(xlabel="step", ylabel=axis)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Put the report together from what the stages logged, or forget it.")
    parser.add_argument("command", nargs="?", default="generate", choices=["generate", "reset"])
    args = parser.parse_args(argv)
    report = get_report()
    if isinstance(report, DummyReport):
        return
    if args.command == "reset":
        report.reset()
        print(f"report: sections in {report.report_dir} removed")
    else:
        print(report.generate())


if __name__ == "__main__":
    run_main(main)
