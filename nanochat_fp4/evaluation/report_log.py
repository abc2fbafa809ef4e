"""
The numbers that every stage logs for the report of a run, as JSON.

    get_report(model_tag).log("Base model loss", [{...}, ...], results={"val_bpb": 1.02})

writes <base dir>/report/<model tag>/base-model-loss.json. Without a tag the file is report/base-model-loss.json. The
tokenizer has such a section, because it belongs to every run. A stage that runs again replaces its section. report.py
makes the report from these files.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanochat_fp4.common import get_base_dir, get_dist_info
from nanochat_fp4.environment import environment_info
from nanochat_fp4.evaluation.metrics import plain_json, section_files
from nanochat_fp4.files import atomic_write

_PROCESS_START = time.time()


def slugify(text: str) -> str:
    """Turns a title into a file name: 'Chat evaluation sft' -> 'chat-evaluation-sft'."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


class Report:
    """The sections of a report in one folder. `model_tag` is the run to which this process's sections belong, if
    any."""

    def __init__(self, report_dir: str | os.PathLike, model_tag: str | None = None):
        self.report_dir = Path(report_dir)
        self.model_tag = model_tag

    def log(self, section: str, data: Iterable[Any], results: Mapping[str, Any] | None = None) -> str:
        """
        Stores one section, with the command line of this process. Returns its path.

        - data: strings (Markdown), dicts (shown as a list of "key: value") or None (skipped), as in nanochat
        - results: the results for the tables. A stage gives `val_bpb`, `val_bpb_bf16`, `tokens_per_second` and so on.
          The numbers that belong to a `val_bpb` are in report_runs.MEASUREMENT. An evaluation gives task -> accuracy in
          [0, 1] or `task -> {"accuracy": a, "count": n, "interval": 2 sigma}`.
        """
        record = {
            "section": section,
            "model_tag": self.model_tag,
            "arguments": sys.argv[1:],
            "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
            "wall_seconds": round(time.time() - _PROCESS_START, 1),
            "data": [plain_json(item) for item in data if item],
            "results": plain_json(results or {}),
            "environment": plain_json(environment_info()),
        }
        path = self._path(section)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(record, indent=2))
        return str(path)

    def has(self, section: str) -> bool:
        """Returns whether this section was logged."""
        return self._path(section).exists()

    def _path(self, section: str) -> Path:
        return self.report_dir / (self.model_tag or "") / f"{slugify(section)}.json"

    def reset(self) -> None:
        """Deletes all sections, report.md, report.json and the plots. Checkpoints and metrics stay."""
        for path in [
            *section_files(self.report_dir),
            *self.report_dir.glob("report.*"),
            *self.report_dir.glob("*.png"),
        ]:
            path.unlink(missing_ok=True)


class DummyReport:
    """The report of all ranks but 0, which does nothing."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        pass

    def has(self, section: str) -> bool:
        return True


def get_report(model_tag: str | None = None) -> Report | DummyReport:
    """Returns the report of this base directory on rank 0, and a DummyReport on all other ranks."""
    _, rank, _, _ = get_dist_info()
    return Report(Path(get_base_dir()) / "report", model_tag) if rank == 0 else DummyReport()
