"""Evaluations that are killed go on where they were, with the numbers of one that was not; two at once lose nothing."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _samples import make_bundle, save_base

from nanochat_fp4.evaluation import core_metric
from nanochat_fp4.evaluation.kept import Kept
from scripts import base_eval, base_loss, chat_eval

EVALUATIONS = {  # script, flags, module and function that measure a part, number of parts, section of the report
    "CORE": (base_eval, ["--max-per-task=3"], core_metric, "evaluate_task", 3, "base-model-evaluation"),
    "bits per byte": (
        base_loss,
        ["--device-batch-size=2", "--split-tokens=512"],
        base_loss,
        "evaluate_bpb",
        4,
        "base-model-loss",
    ),
    "benchmarks": (
        chat_eval,
        "-i base -a Local-Choice|Local-Arithmetic -x 4 -m 2 --precision=both".split(),
        chat_eval,
        "run_task",
        4,
        "chat-evaluation-base",
    ),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_what_is_killed_goes_on(name, tiny_base, tmp_path, monkeypatch):
    script, flags, module, measures, parts, section = EVALUATIONS[name]
    save_base(tiny_base, n_layer=1)
    flags = [*flags, "--device-type=cpu"]
    if name == "CORE":
        flags.append(f"--bundle-dir={make_bundle(tmp_path / 'bundle')}")
    report = tiny_base / "report" / "d2_clover" / f"{section}.json"
    script.main(flags)
    whole = json.loads(report.read_text())["results"]
    report.unlink()

    real, calls = getattr(module, measures), []

    def killed_at_the_third(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(module, measures, killed_at_the_third)
    with pytest.raises(MemoryError):
        script.main(flags)
    assert len(calls) == 3 and not report.exists()
    script.main(flags)
    assert len(calls) == 3 + parts - 2  # two were kept
    assert json.loads(report.read_text())["results"] == whole
    assert not list(tiny_base.rglob("unfinished*"))
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


def test_parts_of_other_weights_and_damaged_files_are_not_used(tmp_path):
    path, key = tmp_path / "folder" / "unfinished.json", {"weights": "aa", "tokens": 1.5}
    kept = Kept(path, key)
    assert kept.part("x", lambda: [0.1, 1e-300]) == [0.1, 1e-300]
    assert Kept(path, dict(reversed(key.items()))).part("x", lambda: None) == [0.1, 1e-300]
    assert Kept(path, {**key, "weights": "bb"}).part("x", lambda: 2) == 2
    for damage in (b"[1]", b'{"x"', b"\xff", b"[" * 100_000):
        kept.path.write_bytes(damage)
        assert Kept(path, key).part("x", lambda: 3) == 3
    kept.finish()
    kept.finish()
    assert Kept(path, key).part("x", lambda: 4) == 4


def test_two_evaluations_at_once_lose_no_task(tmp_path: Path):
    path, weights = tmp_path / "eval_000005.json", {"weights_sha256": "aa"}

    def evaluate(names):
        for name in names:
            chat_eval.save_result(path, weights, weights | {"step": 5}, "nvfp4", name, chat_eval.Score([True]))

    names = [f"task {i}" for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(evaluate, [names[i::4] for i in range(4)]))
    assert set(chat_eval.read_results(path, weights)["results"]["nvfp4"]) == set(names)
