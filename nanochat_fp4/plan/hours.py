"""How long a base training takes: measured on this GPU by earlier runs or dev/measure.sh, else estimated from published
rates."""

import statistics
from dataclasses import dataclass
from pathlib import Path

from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.plan.base import Base
from nanochat_fp4.plan.cards import Card, Rate, is_measured, same_gpu, speed_of

MEASURED_STEPS = 20  # A run's speed counts when it has made so many steps.


@dataclass(frozen=True)
class Hours:
    """A range of hours, and of speeds in training tokens a second of all GPUs together.

    kind: "measured" or "estimated"
    models: weights in products of the models that they were scaled from
    single: whether an estimate was widened, because one model alone was timed
    """

    kind: str
    low: float
    high: float
    speed_low: float
    speed_high: float
    sources: tuple[str, ...]
    models: tuple[float, ...] = ()
    single: bool = False


def evaluated_tokens(base: Base) -> float:
    """How many tokens of training cost as much as all validations. A forward pass is a third of a step's work, and a
    method that quantizes is validated twice, the second time in BF16."""
    every = base.args.eval_every
    if every < 1:
        return 0.0
    passes = 1 if base.method == "bf16" else 2
    return (base.steps // every + 1) * base.args.eval_tokens * passes / 3


def hours(base: Base, card: Card, processes: int, base_dir: Path) -> Hours | None:
    """How long the base training takes with its validations, on `processes` GPUs of this kind.

    It is None where no run was measured and no rate is published.
    """
    rate, kind = measured(base, card, base_dir), "measured"
    if rate is None:
        rate = speed_of(card, base.method, base.weights * base.more_flops, base.work)
        kind = "measured" if is_measured(card, base.method) else "estimated"
    if rate is None:
        return None
    tokens = base.tokens + evaluated_tokens(base)
    low, high = rate.low * processes, rate.high * processes
    return Hours(kind, tokens / high / 3600, tokens / low / 3600, low, high, rate.sources, rate.models, rate.single)


def measured(base: Base, card: Card, base_dir: Path) -> Rate | None:
    """The speeds that runs of this method had on this GPU, scaled by FLOPs. Their logs are in the base directory."""
    speeds, sources, models = [], [], []
    for path in sorted(base_dir.glob("base_checkpoints/*/metrics.jsonl")):
        records = [r for r in read_jsonl(path) if isinstance(r, dict)]
        start = next((r for r in reversed(records) if r.get("event") == "start"), {})
        gpu = (start.get("environment") or {}).get("gpu") or ""
        if not same_gpu(gpu, card.name) or start.get("method") != base.method:
            continue
        steps = [r["tok_per_sec"] for r in records if r.get("event") == "train" and r.get("tok_per_sec")]
        if len(steps) < MEASURED_STEPS or not start.get("flops_per_token"):  # Earlier versions did not record it.
            continue
        each = statistics.median(steps[MEASURED_STEPS // 2 :]) / max(1, start.get("world_size", 1))
        size = start["flops_per_token"] / base.flops
        speeds.append(each * size)
        models.append(base.weights * size)
        sources.append(f"{path.parent.name}, {len(steps)} steps on this GPU")
    return Rate(min(speeds), max(speeds), tuple(sources), tuple(models)) if speeds else None
