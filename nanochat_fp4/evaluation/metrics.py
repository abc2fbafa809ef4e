"""A run's numbers: metrics.jsonl beside its checkpoints, and the watch over its loss."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanochat_fp4.console import logger
from nanochat_fp4.errors import one_line
from nanochat_fp4.files import atomic_write


def plain_json(value: Any) -> Any:
    """`value` as strict JSON: tensors and paths become numbers and strings, NaN and infinity become strings."""
    if isinstance(value, Mapping):
        return {str(k): plain_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(v) for v in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)


def accuracy_interval(accuracy: float, count: int) -> float:
    """Two standard deviations of an accuracy if `count` problems are drawn at random, as in the paper's Table 5.

    Where none or each is right, these are 0, and the distance to the other end of Wilson's interval (1927) takes their
    place: none right of 32 says that the accuracy is below 11%, and not that it is 0.
    """
    spread = accuracy * (1 - accuracy)
    return 2 * math.sqrt(spread / count) if spread > 0 else 4 / (count + 4)


def section_files(report_dir: Path) -> list[Path]:
    files = [*report_dir.glob("*.json"), *report_dir.glob("*/*.json")]
    return sorted(path for path in files if path != report_dir / "report.json")


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl. Lines that are no record are skipped: a killed process may leave half a line."""
    records = []
    with open(path, "rb") as f:
        for line in f:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                records.append(record)
    return records


class MetricsLog:
    """
    metrics.jsonl beside the checkpoints: one JSON object a line, so that curves survive any end of the run.

    A single write appends a line. A kill therefore leaves at most one incomplete line, which readers skip and `rewind`
    removes. Records carry "step" and "event" (`start, train, val, core, sample, telemetry, spike, skip`).
    """

    def __init__(self, folder: str | os.PathLike, enabled: bool = True):
        self.path = Path(folder) / "metrics.jsonl"
        self.enabled = enabled
        self.torn = False  # the last line could not be written, or not as a whole

    def append(self, event: str, step: int, **values: Any) -> None:
        if not self.enabled:
            return
        record = {"event": event, "step": step, **values}
        line = ("\n" * self.torn + json.dumps(record, default=str) + "\n").encode("utf-8")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                complete = os.write(fd, line) == len(line)
            finally:
                os.close(fd)
            problem = None if complete else "the disk is full"
        except OSError as e:  # a curve with a gap is better than no run
            problem = one_line(e)
        if problem and not self.torn:
            logger.warning(f"{self.path} cannot be written ({problem}); the curves will have a gap")
        self.torn = problem is not None

    def rewind(self, step: int | None) -> None:
        """
        Remove the records after the checkpoint of `step`, so that a resumed run does not log a step twice.

        None removes everything. A "train", "spike" or "skip" record of step s belongs to the step that leads to
        checkpoint s + 1. Any other record of step s is made before step s is trained. Checkpoint s may already hold its
        result, so the record is kept.
        """
        if not self.enabled or not self.path.exists():
            return
        if step is None:
            self.path.unlink()
            return

        def happened(record: dict[str, Any]) -> bool:
            at = record.get("step")
            in_step = record.get("event") in ("train", "spike", "skip")
            return isinstance(at, int) and at < step + (not in_step)

        kept = [record for record in read_jsonl(self.path) if happened(record)]
        atomic_write(self.path, "".join(json.dumps(r) + "\n" for r in kept))


# ----------------------------------------------------------------------------------------------------------------------
# Loss: smoothing, spikes


class LossMonitor:
    """
    Smoothed loss (an exponential average over 10 steps, unbiased at the start) and a watch for spikes.

    A spike is a loss more than 6 standard deviations (an exponential estimate over 50 steps) and more than 5% above
    the average, after the first 50 steps. `state` goes into checkpoints and comes back by `LossMonitor(state)`.
    """

    BETA, SPIKE_BETA, SPIKE_SIGMAS, SPIKE_FRACTION, SPIKE_AFTER = 0.9, 0.98, 6.0, 0.05, 50

    def __init__(self, state: dict[str, float] | None = None):
        self.state = {"count": 0, "average": 0.0, "mean": 0.0, "variance": 0.0, "spikes": 0, "skipped": 0}
        self.state.update(state or {})

    def update(self, loss: float) -> bool:
        """Adds the loss of a step to the average. True if the loss is a spike."""
        s = self.state
        spread = max(s["variance"], 0.0) ** 0.5
        spike = (
            s["count"] >= self.SPIKE_AFTER
            and loss > s["mean"] + self.SPIKE_SIGMAS * spread
            and loss > s["mean"] * (1 + self.SPIKE_FRACTION)
        )
        s["count"] += 1
        s["average"] = self.BETA * s["average"] + (1 - self.BETA) * loss
        rate = max(1 - self.SPIKE_BETA, 1 / s["count"])
        deviation = loss - s["mean"]
        s["mean"] += rate * deviation
        s["variance"] = (1 - rate) * (s["variance"] + rate * deviation**2)
        s["spikes"] += int(spike)
        return spike

    @property
    def smoothed(self) -> float:
        count = self.state["count"]
        return self.state["average"] / (1 - self.BETA**count) if count else float("nan")
