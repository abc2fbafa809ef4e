"""A plan as the functions of dev/pipeline.sh that it calls, and as JSON."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanochat_fp4.plan.plan import Plan
from nanochat_fp4.plan.stages import LeftOut, Stage


def calls(plan: Plan) -> str:
    """One call of `stage` for each stage: name, what it needs, section, source, kept, title, processes, module, flags.

    A call without a section is made even if the stage's section is there. kept: what to say where a model is there that
    was trained with other flags.
    """
    base_dir, lines = plan.settings.base_dir, []
    for place, s in enumerate(plan.stages):
        section, kept = s.section, ""
        now = sorted(s.command[1:])
        before = flags_before(base_dir, s, now)
        if s.output and not any((base_dir / s.output).rglob("meta_*.json")):
            section = ""  # somebody has deleted the model
        elif before != now and s.output:
            kept = kept_with(before, now, folders_after(base_dir, plan.stages[place:]))
        elif before != now and re.match("chat-evaluation|base-model-(loss|evaluation)", Path(s.section).stem):
            section = ""  # a measurement is quick to make again, for example on more tokens
        words = [
            s.name.replace(" ", ":"),
            " ".join(n.replace(" ", ":") for n in s.needs),
            section,
            s.source,
            kept,
            s.title,
            str(s.processes),
        ]
        lines.append(shlex.join(["beside" if s.beside else "stage", *words, *s.command]))
    # The report comes last, and says what is missing.
    lines.sort(key=lambda line: line.startswith("stage report"))
    return "\n".join(lines) + "\n"


def flags_before(base_dir: Path, stage: Stage, now: list[str]) -> list[str]:
    """The flags that the stage's section was made with, sorted. A section of an earlier version does not name its
    flags, and counts as one made with the flags of now."""
    try:
        return sorted(json.loads((base_dir / stage.section).read_text("utf-8"))["arguments"])
    except (OSError, ValueError, KeyError, TypeError):
        return now


def folders_after(base_dir: Path, stages: list[Stage]) -> list[Path]:
    """The folders of the first stage's model, and of the later models of the same run, which began with it."""
    tag = Path(stages[0].output).name
    folders = [base_dir / s.output for s in stages if s.output and Path(s.output).name == tag]
    return [folder for folder in folders if folder.is_dir()]


def kept_with(before: list[str], now: list[str], folders: list[Path]) -> str:
    """How the flags of a model differ from the plan's, and how to have the plan's model: finished work is not lost."""
    old, new = (shlex.join(word for word in a if word not in b) for a, b in ((before, now), (now, before)))
    remedy = f"to train it anew: {shlex.join(['rm', '-r', *map(str, folders)])}, and the same command again"
    return f"made with {old or 'fewer flags'}, where the plan has {new or 'fewer flags'}; {remedy}"


def line_of(left: LeftOut) -> str:
    return f"{left.what}, because {left.why}. To have it: {'; '.join(left.remedies)}"


def as_json(plan: Plan) -> dict[str, Any]:
    s = plan.settings
    return {
        "run": s.run,
        "machine": {
            "gpus": [card.name for card in plan.machine.cards],
            "cpus": plan.machine.cpus,
            "here": plan.machine.here,
        },
        "gib": plan.machine.card.gib if plan.machine.card else None,
        "processes": plan.processes,
        "methods": s.methods,
        "numbers": s.numbers,
        "args": s.args,
        "set_by_user": s.set_by_user,
        "text": plan.facts.text,
        "runs": [
            {
                "method": base.method,
                "tag": base.tag,
                "parameters": base.parameters,
                "steps": base.steps,
                "tokens": base.tokens,
                "memory": [asdict(way) | {"peak": way.peak, "flags": way.flags} for way in base.ways],
                "hours": asdict(found) if found else None,
            }
            for base, found in zip(plan.bases, plan.hours)
        ],
        "stages": [asdict(stage) for stage in plan.stages],
        "left_out": [asdict(left) for left in plan.left_out],
        "text_bytes": plan.text_bytes,
        "checkpoint_bytes": plan.checkpoint_bytes,
    }
