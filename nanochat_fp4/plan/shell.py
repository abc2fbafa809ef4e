"""A plan as the functions of dev/pipeline.sh that it calls, and as JSON."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanochat_fp4.evaluation.report_runs import MEASURES
from nanochat_fp4.plan.plan import Plan
from nanochat_fp4.plan.stages import LeftOut, Stage


def calls(plan: Plan) -> str:
    """One call of `stage` for each stage: name, what it needs, section, source, title, processes, module, flags.

    A call without a section is made even if the stage's section is there.
    """
    lines = []
    for s in plan.stages:
        section = "" if measured_with_other_flags(plan.settings.base_dir, s) else s.section
        words = [
            s.name.replace(" ", ":"),
            " ".join(n.replace(" ", ":") for n in s.needs),
            section,
            s.source,
            s.title,
            str(s.processes),
        ]
        lines.append(shlex.join(["beside" if s.beside else "stage", *words, *s.command]))
    # The report comes last, and says what is missing.
    lines.sort(key=lambda line: line.startswith("stage report"))
    return "\n".join(lines) + "\n"


def measured_with_other_flags(base_dir: Path, stage: Stage) -> bool:
    """Returns True if a user has made this measurement with other flags than the plan's, for example on fewer tokens.
    Sections of earlier versions do not name their flags, and count as the plan's."""
    path = base_dir / stage.section
    if path.stem not in MEASURES:
        return False
    try:
        arguments = json.loads(path.read_text("utf-8")).get("arguments", stage.command[1:])
    except (OSError, ValueError, AttributeError):
        return False
    return arguments != stage.command[1:]


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
