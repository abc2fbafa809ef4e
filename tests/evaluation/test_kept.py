"""Evaluations that are killed go on where they were, with the numbers of one that was not; two at once lose nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _samples import make_bundle, save_base

from nanochat_fp4.evaluation import core_eval
from nanochat_fp4.evaluation.kept import Kept
from nanochat_fp4.evaluation.metrics import read_jsonl
from scripts import base_eval, base_loss, chat_eval

EVALUATIONS = {  # script, flags, module and function that measure a part, number of parts, event of the result
    "CORE": (base_eval, ["--max-per-task=3"], core_eval, "evaluate_task", 3, "benchmarks"),
    "bits per byte": (
        base_loss,
        ["--device-batch-size=2", "--split-tokens=512"],
        base_loss,
        "evaluate_bpb",
        4,
        "base_loss",
    ),
    "benchmarks": (
        chat_eval,
        "-i base -a Local-Choice|Local-Arithmetic -x 4 -m 2 --precision=both".split(),
        chat_eval,
        "run_task",
        4,
        "benchmarks",
    ),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_what_is_killed_goes_on(name, tiny_base, tmp_path, monkeypatch):
    script, flags, module, measures, parts, event = EVALUATIONS[name]
    save_base(tiny_base, n_layer=1)
    flags = [*flags, "--device-type=cpu"]
    if name == "CORE":
        flags.append(f"--bundle-dir={make_bundle(tmp_path / 'bundle')}")
    log = tiny_base / "base_checkpoints" / "d2_clover" / "metrics.jsonl"

    def results():
        return [record for record in read_jsonl(log) if record["event"] == event]

    script.main(flags)
    real, calls = getattr(module, measures), []

    def killed_at_the_third(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(module, measures, killed_at_the_third)
    with pytest.raises(MemoryError):
        script.main(flags)
    assert len(calls) == 3 and len(results()) == 1
    script.main(flags)
    assert len(calls) == 3 + parts - 2  # two were kept
    assert len(results()) == 2 and results()[0] == results()[1]
    script.main(flags)  # what is finished is measured anew where it is asked for again
    assert len(calls) == 3 + parts - 2 + parts


def test_bits_per_byte_of_other_batches_are_measured_anew(tiny_base, monkeypatch):
    save_base(tiny_base, n_layer=1)
    flags, calls = ["--device-type=cpu", "--split-tokens=512"], []

    def killed_at_the_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return 1.0

    monkeypatch.setattr(base_loss, "evaluate_bpb", killed_at_the_second)
    with pytest.raises(MemoryError):
        base_loss.main([*flags, "--device-batch-size=100"])
    base_loss.main([*flags, "--device-batch-size=200"])  # as many rows and steps, in other batches
    assert len(calls) == 2 + 4


def test_parts_of_other_weights_are_not_used(tmp_path):
    key = {"weights": "aa", "tokens": 1.5}
    kept = Kept(tmp_path, 5, key)
    assert kept.part("x", lambda: [0.1, 1e-300]) == [0.1, 1e-300]
    assert Kept(tmp_path, 5, dict(reversed(key.items()))).part("x", lambda: None) == [0.1, 1e-300]
    assert Kept(tmp_path, 5, {**key, "weights": "bb"}).part("x", lambda: 2) == 2
    kept.log.rewind(4)  # the run goes on from an earlier checkpoint, and has other weights at step 5
    assert Kept(tmp_path, 5, key).part("x", lambda: 3) == 3


def test_two_evaluations_at_once_lose_no_task(tmp_path: Path):
    def evaluate(names):
        kept = Kept(tmp_path, 5, {})
        for name in names:
            kept.part(name, lambda: 1)

    names = [f"task {i}" for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(evaluate, [names[i::4] for i in range(4)]))
    assert set(Kept(tmp_path, 5, {}).parts) == set(names)
