"""Assertions that several test files share. Every message has a label and says how much is wrong."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.training.checkpoint_manager import load_checkpoint

DRAWS = (1, 4, 16, 64, 256, 1024)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Waits for what goes on in the background, such as the rest of a slow removal."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor's bit patterns, so that -0 differs from 0 and NaN equals itself."""
    return t.contiguous().view(_BITS[t.element_size()])


def assert_same_bits(label: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape, f"{label}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{label}: {got.dtype}, expected {want.dtype}"
    wrong = bits(got) != bits(want)
    count = int(wrong.sum())
    if count:
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{label}: {count} of {got.numel()} differ, first at {first}: {got[first]}, expected {want[first]}"
        )


def assert_same_operand(label: str, got, want) -> None:
    """Two NVFP4Tensors with the same codes, scales and tensor_scale, to the bit."""
    assert_same_bits(f"{label}: codes", got.codes, want.codes)
    assert_same_bits(f"{label}: scales", got.scales, want.scales)
    assert_same_bits(f"{label}: tensor_scale", got.tensor_scale, want.tensor_scale)


def assert_within_ulps(label: str, got: torch.Tensor, want: torch.Tensor, ulps: int) -> None:
    """Two tensors of one floating-point dtype, finite, at most `ulps` representable numbers apart."""
    assert got.dtype == want.dtype, f"{label}: {got.dtype}, expected {want.dtype}"
    lowest = torch.iinfo(_BITS[got.element_size()]).min

    def ordered(t):  # sign-magnitude to a line of integers
        b = bits(t)
        return torch.where(b < 0, lowest - b, b).to(torch.int64)

    distance = (ordered(got) - ordered(want)).abs()
    assert int(distance.max()) <= ulps, f"{label}: {int(distance.max())} ulps apart, expected at most {ulps}"


def relative_square_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """|got - want|^2 / |want|^2, in FP64."""
    return float((got.double() - want.double()).square().sum() / want.double().square().sum())


@dataclass
class Concentration:
    """How the mean of many draws approaches its target.

    single: the error of one draw, averaged over all draws; errors: of the mean of the first B draws, B in DRAWS.
    All are |mean - target|^2 / |target|^2. Without a bias, errors fall as single / B; a bias is where they stop.
    """

    single: float
    errors: dict[int, float]

    @property
    def gain(self) -> float:
        """single / error at the largest B: B without a bias, up to the scatter of one experiment."""
        return self.single / self.errors[max(self.errors)]

    def __str__(self) -> str:
        return " ".join(f"B={b}: {e:.2e}" for b, e in self.errors.items()) + f"; gain {self.gain:.0f}"


def concentrate(
    draw: Callable[[int], tuple[torch.Tensor, ...]], targets: tuple[torch.Tensor, ...], draws: int = DRAWS[-1]
) -> list[Concentration]:
    """One Concentration for each of the tensors that draw(b) returns, b = 1 .. draws."""
    totals = [torch.zeros_like(t, dtype=torch.float64) for t in targets]
    singles = [0.0] * len(targets)
    errors: list[dict[int, float]] = [{} for _ in targets]
    for b in range(1, draws + 1):
        for i, (value, target) in enumerate(zip(draw(b), targets)):
            totals[i] += value
            singles[i] += relative_square_error(value, target)
            if b in DRAWS or b == draws:
                errors[i][b] = relative_square_error(totals[i] / b, target)
    return [Concentration(s / draws, e) for s, e in zip(singles, errors)]


def assert_unbiased(label: str, c: Concentration) -> None:
    # One experiment's error scatters by 2/sqrt(independent entries) around single / B: 10% to 20% with the thousands of
    # entries used here, which rotations correlate. 0.7 leaves room for that, and rejects a bias of half of single / B.
    draws = max(c.errors)
    assert c.gain > 0.7 * draws, f"{label}: the mean of {draws} draws is not {draws} times better: {c}"


# ----------------------------------------------------------------------------------------------------------------------
# Runs that must be the same


def final_state(folder: Path, step: int) -> dict[str, Any]:
    """Everything in a training run's checkpoint that decides how it goes on, and the records that led there."""
    model, _, meta = load_checkpoint(folder, step, "cpu")
    ranks = [torch.load(p, weights_only=True) for p in sorted(folder.rglob(f"optim_{step:06d}_rank*.pt"))]
    for optimizer in (optimizer for rank in ranks for optimizer in rank["optimizers"] if "param_groups" in optimizer):
        # Rates and the like are set before each step. A run that was stopped after its last step makes none any more.
        optimizer["param_groups"] = [group["params"] for group in optimizer["param_groups"]]
    timed = ("dt", "tok_per_sec", "mfu")
    records = [r for r in read_jsonl(folder / "metrics.jsonl") if r["event"] in ("train", "val", "skip", "spike")]
    return {
        "model": model,
        "ranks": ranks,
        "loop": {k: v for k, v in meta["loop_state"].items() if k != "training_seconds"},
        "loss": meta["loss_state"],
        "records": [{k: v for k, v in r.items() if k not in timed} for r in records],
    }


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Two nested structures of the same types and values, tensors to the bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{path} differs"
    else:
        assert a == b, f"{path}: {a} != {b}"
