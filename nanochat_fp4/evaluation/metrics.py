"""The numbers of a run: metrics.jsonl beside its checkpoints, and a monitor of its loss."""

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nanochat_fp4.cli import logger, one_line
from nanochat_fp4.files import atomic_write

USUAL_TOKENS, FEW_TOKENS = 20, 2  # for each parameter


def few_tokens(tokens: float | None, parameters: float | None) -> str | None:
    """Returns a clause about a model that has read far too little text to give sensible answers, otherwise None."""
    if not tokens or not parameters or tokens >= FEW_TOKENS * parameters:
        return None
    each = f"{tokens / parameters:.2g} for each parameter, where {USUAL_TOKENS} are usual"
    return f"this model has read {tokens:,.0f} tokens, {each}: expect nonsense"


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the records of a metrics.jsonl. Lines that are not a record are skipped, because a killed process may
    leave half a line. A pipe or a device has no records, and reading it might never end."""
    records: list[dict[str, Any]] = []
    if not os.path.isfile(path):
        return records
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
    The file metrics.jsonl beside the checkpoints. It has one JSON object in each line, so that the curves survive any
    end of the run.

    A single write appends a line. A kill therefore leaves at most one incomplete line, which readers skip and `rewind`
    removes. Records have "step" and "event". Training writes `start, train, val, core, sample, telemetry, spike, skip`,
    and an evaluation of a checkpoint `part, base_loss, benchmarks` (kept.py).
    """

    def __init__(self, folder: str | os.PathLike, enabled: bool = True):
        self.path = Path(folder) / "metrics.jsonl"
        self.enabled = enabled
        self.torn = False  # The last line was not written completely.

    def append(self, event: str, step: int, **values: Any) -> None:
        """Appends a record. If the file cannot be written, a warning says so, and the run goes on."""
        if not self.enabled:
            return
        record = {"event": event, "step": step, **values}
        line = ("\n" * self.torn + json.dumps(record, default=str) + "\n").encode("utf-8")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # O_NONBLOCK makes opening a pipe that nobody reads an error. Otherwise it would wait for a reader.
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
            try:
                complete = os.write(fd, line) == len(line)
            finally:
                os.close(fd)
            problem = None if complete else "the disk is full"
        except OSError as e:  # A curve with a gap is better than no run.
            problem = one_line(e)
        if problem and not self.torn:
            logger.warning(f"{self.path} cannot be written ({problem}); the curves will have a gap")
        self.torn = problem is not None

    def rewind(self, step: int | None, undone: Collection[str] = ()) -> None:
        """
        Removes the records after the checkpoint of `step`, so that a resumed run does not log a step twice.

        None removes everything. A "train", "spike" or "skip" record of step s belongs to the step that leads to
        checkpoint s + 1. Any other record of step s is written before step s is trained, and is kept unless its event
        is one of `undone`, whose results the checkpoint of `step` does not contain yet.
        """
        if not self.enabled or not self.path.exists():
            return
        if step is None:
            self.path.unlink()
            return

        def happened(record: dict[str, Any]) -> bool:
            record_step = record.get("step")
            not_yet = record.get("event") in ("train", "spike", "skip", *undone)
            return isinstance(record_step, int) and record_step < step + (not not_yet)

        records = [record for record in read_jsonl(self.path) if happened(record)]
        atomic_write(self.path, "".join(json.dumps(r) + "\n" for r in records))


# ----------------------------------------------------------------------------------------------------------------------
# The loss: smoothing and spikes


class LossMonitor:
    """
    The smoothed loss, which is an exponential average over 10 steps without bias at the start, and a detector of
    spikes.

    A spike is a loss more than 6 standard deviations (an exponential estimate over 50 steps) and more than 5% above the
    average, after the first 50 steps. Checkpoints keep `state`, and `LossMonitor(state)` restores it.
    """

    BETA, SPIKE_BETA, SPIKE_SIGMAS, SPIKE_FRACTION, SPIKE_AFTER = 0.9, 0.98, 6.0, 0.05, 50

    def __init__(self, state: dict[str, float] | None = None):
        self.state = {"count": 0, "average": 0.0, "mean": 0.0, "variance": 0.0, "spikes": 0, "skipped": 0}
        self.state.update(state or {})

    def update(self, loss: float) -> bool:
        """Adds the loss of a step to the average. Returns whether the loss is a spike."""
        s = self.state
        spread = max(s["variance"], 0.0) ** 0.5
        limit = max(s["mean"] + self.SPIKE_SIGMAS * spread, s["mean"] * (1 + self.SPIKE_FRACTION))
        spike = s["count"] >= self.SPIKE_AFTER and loss > limit
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
        """The smoothed loss, or NaN before the first step."""
        count = self.state["count"]
        return self.state["average"] / (1 - self.BETA**count) if count else float("nan")
