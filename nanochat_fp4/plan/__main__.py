"""
What a run will do, before anything is made: how long, does it fit, what does it gain, which method.

    python -m nanochat_fp4.plan speedrun                          # in words; run1000 likewise
    GPU=rtx5090 DEPTH=26 python -m nanochat_fp4.plan speedrun     # of a GPU that is not here
    python -m nanochat_fp4.plan speedrun --json                   # for programs

Variables say what differs from the defaults, as for speedrun_fp4.sh. Everything that a later stage would refuse or miss
is said here.
"""

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.data.dataset import check_own_data, ensure_data
from nanochat_fp4.data.needs import look_for
from nanochat_fp4.files import atomic_write
from nanochat_fp4.plan import cpu_steps, shell, words
from nanochat_fp4.plan import machine as this
from nanochat_fp4.plan.base import Base
from nanochat_fp4.plan.cards import with_measurements
from nanochat_fp4.plan.machine import Facts, Machine
from nanochat_fp4.plan.plan import Plan, disk_problem, make_plan, settle
from nanochat_fp4.plan.settings import RUNS, Settings, read
from nanochat_fp4.plan.stages import MADE_BY, needs, wanted
from nanochat_fp4.plan.variables import problem
from nanochat_fp4.training.wandb_run import check_tracker


def look(settings: Settings, machine: Machine, bases: list[Base]) -> Facts:
    """Returns what this machine has and what it can download. Nothing is known of another machine, so everything counts
    as being there."""
    if not machine.here:
        return Facts(text="folder" if settings.data_dir else "hub", disk_free=float("inf"))
    text, why, shards = this.text_source(settings)
    own_bytes = this.own_bytes(check_own_data(settings.data_dir)) if settings.data_dir else 0
    size, asked = this.tokenizer_sizes(settings.base_dir)
    kinds = {kind: needs(settings, kind) for kind in wanted(settings)}
    found = {missing.what: missing for missing in look_for([need for of_kind in kinds.values() for need in of_kind])}
    missing = {kind: [found[need.what] for need in of_kind if need.what in found] for kind, of_kind in kinds.items()}
    folders = [settings.base_dir / place / base.tag for base in bases for place in MADE_BY.values()]
    files = [f for folder in folders for f in folder.rglob("*.pt")]
    held = sum(f.stat().st_size for f in files)  # that the run will replace, or has made already
    made = this.made(settings.base_dir, [base.tag for base in bases])
    return Facts(text, why, shards, own_bytes, size, asked, this.disk_free(settings.base_dir) + held, missing, made)


def plan_of(run: str, environment: Mapping[str, str]) -> Plan:
    """Returns the plan of a run with these variables on this machine. Raises UserError for anything that a stage would
    refuse."""
    if wrong := problem(set(environment)):
        raise UserError(wrong)
    machine = this.this_machine(environment.get("GPU", ""), environment.get("GPU_MEMORY", ""))
    settings = read(run, environment, bool(machine.cards))
    machine = replace(machine, cards=tuple(with_measurements(card, settings.base_dir) for card in machine.cards))
    if settings.gpu and not settings.plan_only:
        raise UserError(f"GPU={settings.gpu} is for plans of a machine that is not here; set PLAN_ONLY=1 as well")
    if machine.here:
        check_tracker(environment.get("TRACKER", ""), environment.get("WANDB_RUN", ""))
    if settings.data_dir and machine.here:
        if settings.plan_only:
            check_own_data(settings.data_dir)
        else:
            ensure_data(settings.data_dir)  # text is cut into shards, and a folder that cannot be trained on ends here

    def steps(base: Base) -> tuple[int, str] | None:
        only_look = settings.plan_only or "base" not in settings.stages
        most = int(settings.defaults["NUM_ITERATIONS"])
        vocabulary = int(settings.numbers["VOCAB_SIZE"])
        return cpu_steps.steps_for(base.args, vocabulary, most, settings.cpu_minutes, settings.base_dir, only_look)

    bases = settle(settings, machine, steps)
    plan = make_plan(settings, machine, bases, look(settings, machine, bases))
    if full := disk_problem(plan):
        raise UserError(full)
    return plan


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=list(RUNS), help="the run")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="also write the calls that dev/pipeline.sh makes")
    args = parser.parse_args(argv)
    plan = plan_of(args.run, {**os.environ, **({} if args.calls else {"PLAN_ONLY": "1"})})
    print(json.dumps(shell.as_json(plan), indent=1) if args.json else words.page(plan))
    if args.calls:
        args.calls.write_text(shell.calls(plan))
        report = plan.settings.base_dir / "report"
        report.mkdir(parents=True, exist_ok=True)
        atomic_write(report / "left_out.txt", "".join(shell.line_of(left) + "\n" for left in plan.left_out))


if __name__ == "__main__":
    run_main(main)
