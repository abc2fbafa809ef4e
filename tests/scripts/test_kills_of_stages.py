"""Random kills and signals in every stage of a run, from the tokenizer to the report; the results are those without."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from _assertions import assert_same, final_state
from _forking import ForkServer, Run
from _samples import make_bundle
from _training import BASE, MID, SFT

from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.evaluation.metrics import read_jsonl

TAG, STEPS = "run", 3
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
TRAINING = [f"--model-tag={TAG}", f"--num-iterations={STEPS}", "--save-every=1", "--resume-from-step=latest"]
RL = (
    "--data=local --device-type=cpu --device-batch-size=2 --num-samples=4 --examples-per-step=2 --max-new-tokens=3 "
    "--eval-examples=2 --eval-every=2 --init-lr-frac=1.0"
).split()


@dataclass
class Stage:
    """places: what it makes, deleted before it begins anew. state: its results, from the base directory."""

    name: str
    module: str
    argv: list[str]
    places: tuple[str, ...]
    state: Callable[[Path], Any]


def trained(stage: str, module: str, argv: list[str], place: str) -> Stage:
    return Stage(
        stage, f"scripts.{module}", [*argv, *TRAINING], (place,), lambda base: final_state(base / place / TAG, STEPS)
    )


def result(stage: str, event: str) -> Callable[[Path], Any]:
    """The newest result in metrics.jsonl of a stage, which an evaluation appends."""

    def newest(base: Path) -> Any:
        return [r for r in read_jsonl(base / stage / TAG / "metrics.jsonl") if r["event"] == event][-1]

    return newest


def tokenizer(base: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        return get_tokenizer().fingerprint()


def exported(base: Path) -> Any:
    return {path.name: path.read_bytes() for path in (base / "exported").iterdir() if path.name != "README.md"}


def losses_of_report(base: Path) -> Any:
    lines = (base / "report/report.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| {TAG} | clover | "))
    return row.split(" | ")[:9]  # without its speed and time


def stages(bundle: Path) -> list[Stage]:
    here = [f"--model-tag={TAG}", "--device-type=cpu"]
    loss = ["--device-batch-size=2", "--split-tokens=128", *here]
    core = [f"--bundle-dir={bundle}", "--max-per-task=3", *here]
    answers = ["-i", "rl", "-a", "Local-Choice|Local-Arithmetic", "-x", "4", "-m", "2", *here]
    export = ["--source=rl", "--format=safetensors", "--out=exported", "--overwrite", "--eval-tokens=0", *here]
    made = "report/run/"
    return [
        Stage("tok", "scripts.tok_train", ["--max-chars=20000", "--vocab-size=300"], ("tokenizer",), tokenizer),
        trained(
            "base",
            "base_train",
            [*BASE, *"--shuffle-documents --max-seq-len=128 --total-batch-size=256 --eval-tokens=256".split()],
            "base_checkpoints",
        ),
        Stage(
            "loss", "scripts.base_loss", loss, (f"{made}base-model-loss.json",), result("base_checkpoints", "base_loss")
        ),
        Stage(
            "core",
            "scripts.base_eval",
            core,
            (f"{made}base-model-evaluation.json",),
            result("base_checkpoints", "benchmarks"),
        ),
        trained("mid", "mid_train", [*MID, "--total-batch-size=256", "--eval-tokens=256"], "mid_checkpoints"),
        trained("sft", "chat_sft", SFT, "chatsft_checkpoints"),
        trained("rl", "chat_rl", RL, "chatrl_checkpoints"),
        Stage(
            "eval",
            "scripts.chat_eval",
            answers,
            (f"{made}chat-evaluation-rl.json",),
            result("chatrl_checkpoints", "benchmarks"),
        ),
        Stage("export", "scripts.export", export, ("exported",), exported),
        Stage(
            "report",
            "nanochat_fp4.evaluation.report",
            ["generate"],
            ("report/report.md",),
            losses_of_report,
        ),
    ]


def forget(base: Path, stage: Stage) -> None:
    for place in stage.places:
        shutil.rmtree(base / place) if (base / place).is_dir() else (base / place).unlink(missing_ok=True)


def through(server: ForkServer, base: Path, stage: Stage, **how: Any) -> Run:
    env = {"NANOCHAT_BASE_DIR": str(base)}
    argv = [word.replace("--out=", f"--out={base}/") for word in stage.argv]
    return server.run(stage.module, argv, env=env, **how)


def ended_by(status: int | None, number: int) -> bool:
    return status in (-number, 128 + number)


@pytest.mark.parametrize("kills", [pytest.param(20, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.soak)])
def test_all_stages_killed_at_random_end_with_the_same_bits(fork_server, tmp_path, kills):
    """Each stage is run, killed and run again until it has had its share of kills; a stage that ends begins anew."""
    seed = int(os.environ.get("KILLS_SEED") or int.from_bytes(os.urandom(4), "little"))
    rng, counts = random.Random(seed), {}
    bundle = make_bundle(tmp_path / "bundle")
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    whole.mkdir()
    disturbed.mkdir()
    for stage in stages(bundle):
        undisturbed = through(fork_server, whole, stage)
        assert undisturbed.status == 0, f"{stage.name}: {undisturbed.log}"
        expected, share = stage.state(whole), -(-kills // len(stages(bundle)))
        seen = dict.fromkeys([number.name for number in SIGNALS], 0) | {"ends": 0}
        while sum(seen.values()) - seen["ends"] < share:
            number = rng.choice(SIGNALS)
            run = through(
                fork_server, disturbed, stage, after=rng.uniform(0.02, 1) * undisturbed.seconds, number=int(number)
            )
            where = f"seed {seed}, {stage.name}, {number.name} {seen}"
            if run.status == 0:  # it was faster; or a signal came after the last step
                assert_same(stage.state(disturbed), expected, where)
                seen["ends"] += 1
                forget(disturbed, stage)
            else:
                assert ended_by(run.status, number), f"{where}: status {run.status}\n{run.log}"
                seen[number.name] += 1
        last = through(fork_server, disturbed, stage)
        assert last.status == 0, f"seed {seed}, {stage.name} {seen}: {last.log}"
        assert_same(stage.state(disturbed), expected, f"seed {seed}, {stage.name} {seen}")
        counts[stage.name] = seen
        print(f"seed {seed}, {stage.name}: {seen}, {undisturbed.seconds:.1f} s", flush=True)
    assert sum(sum(seen.values()) - seen["ends"] for seen in counts.values()) >= kills
