"""What the tables and figures of lab.reproduce share: the type of their result, the folder and the command line, and a
trained model."""

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.study import sweep, sweep_runs, sweep_scheduler
from nanochat_fp4.cli import UserError, did_you_mean
from nanochat_fp4.common import print0
from nanochat_fp4.data.dataloader import Documents, packed_rows
from nanochat_fp4.data.dataset import open_text
from nanochat_fp4.files import atomic_write
from nanochat_fp4.training.load_model import build_model


@dataclass
class Outcome:
    """The result of a table or figure: a table, which may hold the paper's numbers, notes, all numbers, and a plot."""

    title: str
    header: list[str]
    rows: list[list[Any]]
    notes: list[str]
    numbers: dict[str, Any]
    plot: Callable[[Any], None] | None = None  # It draws into a matplotlib Axes.
    measured_on: str = ""  # The data, the tokens and the seeds, for the line below the table.
    environment: dict[str, Any] | None = None  # The machine that measured, if it is not this one.


@dataclass
class Context:
    """The folder of results and the command line. Defaults depend on --quick."""

    folder: Path
    quick: bool
    args: argparse.Namespace

    def piece(self, name: str, settings: dict, compute: Callable[[], Any]) -> Any:
        """Returns compute(), or the value that it returned before with the same settings. Values are stored as JSON in
        <folder>/pieces."""
        key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        path = self.folder / "pieces" / f"{name}_{key}.json"
        try:
            return json.loads(path.read_text())["value"]
        except (OSError, ValueError, KeyError):
            pass
        value = compute()
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps({"settings": settings, "value": value}) + "\n")
        return value

    def chosen_rows(self, names: Sequence[str]) -> list[str]:
        """Returns the names of rows that --rows chooses, or all. Raises UserError for a name that the table will not
        have, before its rows are computed."""
        asked = [name.strip() for name in self.args.rows.split("|") if name.strip()]
        if unknown := [name for name in asked if name not in names]:
            meant = did_you_mean(unknown[0], names)
            problem = " ".join(filter(None, [f"no row of the table is named {unknown[0]!r};", meant]))
            raise UserError(f"--rows: {problem} Its rows are {' | '.join(names)}")
        return asked or list(names)

    def chosen_columns(self, header: Sequence[str]) -> list[str]:
        """Returns the columns of a table that --columns chooses, or all. Raises UserError for a name that the header
        lacks, so what trains or times asks before."""
        asked = [name.strip() for name in self.args.columns.split("|") if name.strip()]
        if missing := [name for name in asked if name not in header]:
            raise UserError(f"--columns: the table has no {missing[0]!r}; its columns are {' | '.join(header)}")
        return asked or list(header)

    def trained_on(self) -> dict[str, Any]:
        """Returns the settings of a piece that is measured on trained_model."""
        names = ("sizes", "extra", "tokens", "ratio", "data_dir")
        return {"quick": self.quick} | {name: getattr(self.args, name) for name in names}

    def sweep(self, methods: Sequence[str], size: str, ratio: float) -> tuple[sweep_scheduler.Sweep, list]:
        """Returns a sweep and its runs of some methods. `size` and `ratio` (tokens per parameter) are used unless the
        command line sets others."""
        args, quick, until = self.args, self.quick, self.args.bf16_until
        sizes = args.sizes.split(",") if args.sizes else ["tiny" if quick else size]
        options = sweep.plan_options(args)
        if quick:
            options |= {"tokens": options["tokens"] or 10 * 512, "ratio": 0.0}
            options["extra"] = ["--eval-every=5", *options["extra"]]
        elif not options["tokens"]:
            options["ratio"] = options["ratio"] or ratio
        seeds = range(args.first_seed, args.first_seed + (args.seeds or (2 if quick else 3)))
        length = f"{options['tokens']:,} tokens" if options["tokens"] else f"{options['ratio']:g} tokens per parameter"
        print0(f"trains {', '.join(sizes)} for {length}, {len(seeds)} x {', '.join(sweep_runs.labels(methods))}")
        where = sweep.prepare(self.folder, args.data_dir, args.vocab_size or 512 * quick, 1.0 if quick else None)
        early = [m for m in methods if not sweep_runs.begins_late(sweep_runs.method_flags(m), until)]
        if early:
            print0(f"left out, for they change before {until:g} of the steps: {', '.join(sweep_runs.labels(early))}")
        methods = [m for m in methods if m not in early]
        plan = sweep_runs.plan(methods, sizes, seeds, data=sweep_runs.data_key(where), **options)
        devices = ["cpu"] if quick and not args.sizes else sweep_scheduler.visible_devices(args.jobs)
        return sweep_scheduler.Sweep(self.folder, where, devices, recipes=args.recipes), plan


def trained_model(context: Context, size: str) -> tuple[Any, str, str]:
    """Returns ((a bf16 model of that size on this machine's device, inputs x, targets y of validation text), the tag of
    its checkpoint, the folder of the text). If there is no such model, it is trained first."""
    where, plan = context.sweep(["bf16"], size, ratio=2.0)
    where, run = replace(where, keep=("bf16",)), plan[0]
    checkpoints = where.folder / "base_checkpoints"
    if not list((checkpoints / run.tag).glob("step_*/model_*")):
        where.result_path(run).unlink(missing_ok=True)
    sweep.run_sweep(where, "trained_model", [run])
    device = torch.device("cpu" if where.devices == ["cpu"] else "cuda")
    with sweep_scheduler.base_directory(where.folder):
        model, tokenizer, _ = build_model(checkpoints / run.tag, None, device, "train")
        source = Documents(tokenizer, model.config.sequence_len, open_text("val", where.data_dir))
        x, y, _ = next(packed_rows(source, 4, device))
    # Everything is computed in FP32. BF16 would round activations and gradients, which limits the measured errors from
    # below.
    return (model.float(), x, y), run.tag, where.data_dir
