"""The number of steps that a CPU run chooses, and its speed beside busy processes."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_fp4.plan import cpu_steps
from scripts import base_train

ROOT = Path(__file__).resolve().parents[2]
MOST, MINUTES, VOCABULARY = 120, 5, 300
SHAPE = (
    "--depth=1 --aspect-ratio=128 --head-dim=64 --max-seq-len=32 --device-batch-size=2 --total-batch-size=128 "
    "--method=clover"
).split()


def steps_for(base_dir, *flags, look=False):
    """What the plan of a run with these flags of base_train chooses."""
    args = base_train.parse_args([*SHAPE, *flags])
    return cpu_steps.steps_for(args, VOCABULARY, MOST, MINUTES, base_dir, look)


@pytest.fixture
def choose(base_dir, monkeypatch):
    """choose(seconds, *flags): the choice where a step takes so many seconds; None: where no probe may run."""

    def choose(seconds, *flags, look=False):
        monkeypatch.setattr(
            cpu_steps, "probe", lambda args, vocabulary: seconds if seconds else pytest.fail("a probe ran")
        )
        return steps_for(base_dir, *flags, look=look)

    return choose


@pytest.mark.parametrize("seconds, steps", [(0.01, 120), (1.2, 60), (9, 30)])
def test_the_choice_is_stored(choose, seconds, steps):
    assert choose(None, look=True) is None
    chosen = choose(seconds)
    assert chosen[0] == steps and "in a probe" in chosen[1]
    assert choose(None) == choose(None, look=True) == choose(None, "--method=bf16") == chosen
    assert choose(0.01, "--depth=3")[0] == 120  # another model has a choice of its own
    assert choose(None) == chosen


def test_slower_steps_never_mean_more_of_them():
    chosen = [cpu_steps.choose_steps(120, seconds / 10, 5) for seconds in range(1, 60)]
    assert chosen == sorted(chosen, reverse=True) and set(chosen) == {120, 60, 30}


def test_runs_of_before_keep_their_number(choose, base_dir):
    (base_dir / "base_checkpoints" / "d1_clover_steps77").mkdir(parents=True)  # of somebody's NUM_ITERATIONS
    (base_dir / "base_checkpoints" / "d1_four_over_six").mkdir()
    steps, why = choose(None)
    assert steps == 120 and "d1_four_over_six" in why
    assert choose(None, look=True) == (steps, why)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"d1_120": 5}', '{"d1_120": {"steps": 7, "why": "no"}}'])
def test_a_damaged_file_means_another_probe(choose, base_dir, text):
    base_dir.mkdir()
    (base_dir / "cpu_steps.json").write_text(text)
    assert choose(9)[0] == 30
    assert json.loads((base_dir / "cpu_steps.json").read_text())["d1_120"]["steps"] == 30


@pytest.mark.parametrize("batch", ["2", "auto"])
def test_the_probe_trains(base_dir, batch):
    assert steps_for(base_dir, f"--device-batch-size={batch}")[0] in (120, 60, 30)
    assert json.loads((base_dir / "cpu_steps.json").read_text())["d1_120"]["seconds_per_step"] > 0


def tokens_per_second(base: Path, tag: str, cpus: set[int]) -> float:
    """Of the speedrun's model on these CPUs: the median of its steps after the first two."""
    flags = (
        "--method=clover --depth=2 --aspect-ratio=64 --head-dim=64 --max-seq-len=256 --window-pattern=L "
        "--device-batch-size=8 --total-batch-size=2048 --num-iterations=10 --eval-every=-1 --eval-tokens=2048 "
        "--sample-every=-1 --core-metric-every=-1"
    ).split()
    unset = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "TRITON_"))}
    environment = unset | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "NANOCHAT_BASE_DIR": str(base)}
    subprocess.run(
        [sys.executable, "-m", "scripts.base_train", f"--model-tag={tag}", *flags], cwd=ROOT, env=environment,
        check=True, capture_output=True, timeout=600, preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )  # fmt: skip
    records = map(json.loads, (base / "base_checkpoints" / tag / "metrics.jsonl").read_text().splitlines())
    return statistics.median([r["tok_per_sec"] for r in records if r["event"] == "train"][2:])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_training_beside_two_busy_processes_has_two_fifths_of_its_speed(tiny_base):
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    alone = [tokens_per_second(tiny_base, "alone", cpus)]
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.sched_setaffinity(0, cpus))
        for _ in range(len(cpus))
    ]
    try:
        beside = tokens_per_second(tiny_base, "beside", cpus)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    alone.append(tokens_per_second(tiny_base, "again", cpus))  # whatever else this machine does may have changed
    print(f"tokens/s alone {alone[0]:,.0f} and {alone[1]:,.0f}, beside {len(cpus)} busy processes {beside:,.0f}")
    assert beside >= 0.4 * min(alone)
