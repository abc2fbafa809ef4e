"""The number of steps that a CPU run chooses, and its speed beside busy processes."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_fp4.training import cpu_steps

ROOT = Path(__file__).resolve().parents[2]
SHAPE = (
    "--depth=1 --aspect-ratio=128 --head-dim=64 --max-seq-len=32 --vocab-size=300 --device-batch-size=2 "
    "--total-batch-size=128"
).split()


@pytest.fixture
def choose(base_dir, monkeypatch, capsys):
    """choose(seconds, *flags): what main prints where a step takes so many seconds; None: where no probe may run."""
    base_dir.mkdir()

    def choose(seconds, *flags):
        monkeypatch.setattr(cpu_steps, "probe", lambda args: seconds if seconds else pytest.fail("a probe ran"))
        cpu_steps.main(["--steps=120", *SHAPE, *flags])
        return capsys.readouterr().out

    return choose


@pytest.mark.parametrize("seconds, steps", [(0.01, 120), (1.2, 60), (9, 30)])
def test_the_choice_is_stored(choose, base_dir, seconds, steps):
    assert choose(None, "--look") == ""
    said = choose(seconds)
    assert said.startswith(f"{steps} ") and "in a probe" in said and len(said.splitlines()) == 1
    assert choose(None) == choose(None, "--look") == choose(None, "--method=bf16") == said
    assert choose(0.01, "--depth=3").startswith("120 ")  # another model has a choice of its own
    assert choose(None) == said


def test_slower_steps_never_mean_more_of_them():
    chosen = [cpu_steps.choose_steps(120, seconds / 10, 5) for seconds in range(1, 60)]
    assert chosen == sorted(chosen, reverse=True) and set(chosen) == {120, 60, 30}


def test_runs_of_before_keep_their_number(choose, base_dir):
    (base_dir / "base_checkpoints" / "d1_clover_steps77").mkdir(parents=True)  # of somebody's NUM_ITERATIONS
    (base_dir / "base_checkpoints" / "d1_four_over_six").mkdir()
    assert choose(None).startswith("120 as the run d1_four_over_six")
    assert choose(None, "--look").startswith("120 ")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"d1_120": 5}', '{"d1_120": {"steps": 7, "why": "no"}}'])
def test_a_damaged_file_means_another_probe(choose, base_dir, text):
    (base_dir / "cpu_steps.json").write_text(text)
    assert choose(9).startswith("30 ")
    assert json.loads((base_dir / "cpu_steps.json").read_text())["d1_120"]["steps"] == 30


@pytest.mark.parametrize("batch", ["2", "auto"])
def test_the_probe_trains(base_dir, capsys, batch):
    base_dir.mkdir()
    cpu_steps.main(["--steps=120", *SHAPE, f"--device-batch-size={batch}"])
    out = capsys.readouterr().out
    assert out.split()[0] in ("120", "60", "30") and len(out.splitlines()) == 1, out
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
