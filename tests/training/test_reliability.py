"""
What a long run meets, done to small ones: kills at any moment, full and read-only disks, signals, logs that nobody
reads, bad numbers, leaks; and the same seed twice. docs/reliability.md says which promise each test holds.
"""

import contextlib
import gc
import os
import random
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from _assertions import assert_same, final_state, wait_until
from _forking import ForkServer, Run
from _samples import save_base
from _server import Server
from _training import MID, SFT, STAGES

import nanochat_fp4 as nf
from eval.local import LocalArithmetic
from nanochat_fp4.cli import UserError
from nanochat_fp4.data import chat_data
from nanochat_fp4.data.sources import MissingDataError, Source
from nanochat_fp4.evaluation import metrics, report
from nanochat_fp4.evaluation.metrics import read_jsonl
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.training import trainer
from nanochat_fp4.training.checkpoint_manager import find_last_step, list_steps
from scripts import base_loss, base_train, chat_cli, chat_eval, chat_sft, mid_train, tok_train

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")

STEPS = 3
TAG = "run"
SHORT = {"base": [], "mid": ["--total-batch-size=256", "--eval-tokens=256"], "sft": []}  # of rows of 64 tokens


class Case:
    """A stage with a method, its undisturbed run (one for all tests), and a base directory to disturb it in."""

    undisturbed: dict[tuple, tuple[Run, dict]] = {}

    def __init__(self, server: ForkServer, tiny_base: Path, stage: str, method: str, *flags: str, steps: int = STEPS):
        self.module, arguments, place, parent = STAGES[stage]
        self.server, self.steps = server, steps
        arguments = [*arguments, *SHORT.get(stage, [])]
        self.argv = [*arguments, f"--model-tag={TAG}", f"--num-iterations={steps}", "--save-every=1", *flags]
        self.argv += [f"--method={method}"] if stage == "base" else []
        if parent:
            length = 64 if stage == "mid" else 128
            save_base(tiny_base, tag=TAG, method=method, source=parent, n_layer=1, sequence_len=length)
        self.base, self.folder = tiny_base, tiny_base / place / TAG
        key = (stage, method, flags, steps)
        if key not in self.undisturbed:
            run = self.run()
            assert run.status == 0, run.log
            self.undisturbed[key] = run, final_state(self.folder, steps)
            self.start_over()
        self.whole, self.expected = self.undisturbed[key]
        assert len([r for r in self.expected["records"] if r["event"] == "train"]) == steps

    def run(self, *flags: str, base: Path | None = None, **job) -> Run:
        return self.server.run(
            self.module, [*self.argv, *flags], env={"NANOCHAT_BASE_DIR": str(base or self.base)}, **job
        )

    def assert_as_undisturbed(self) -> None:
        assert_same(final_state(self.folder, self.steps), self.expected)
        assert not list(self.folder.glob("*.tmp"))

    def start_over(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


# ----------------------------------------------------------------------------------------------------------------------
# SIGKILL. The soak kills every method. Every file operation of a save: test_checkpoint_manager.py.

KILLS = {  # (stage, method, flags): how many. FP32 weights in base training: two ranks, below.
    ("base", "clover", "--method-phases=0.5=bf16", "--shuffle-documents", "--data-seed=1", "--state=lean"): 3,
    ("mid", "clover", "--quantization=full"): 2,
    ("sft", "clover"): 2,
}
SOAKED = [("base", method) for method in nf.METHODS if nf.get_recipe(method).name == method]
SOAKED += [("base", "clover", "--method-phases=0.5=bf16"), ("mid", "clover"), ("mid", "clover", "--quantization=full")]
SOAKED += [("sft", "clover"), ("sft", "clover", "--quantization=full")]


def kill_until_enough(case: Case, kills: int, rng: random.Random) -> dict[str, int]:
    """
    Runs that are killed, every other time inside a save, and resumed until they are through; then again from the start,
    until there were `kills` kills and a checkpoint was resumed. Each that comes through must equal the undisturbed one
    to the bit.
    """
    seen = {"kills": 0, "inside a save": 0, "resumed": 0, "runs": 0}
    inside = True
    while True:
        enough = seen["kills"] >= kills and seen["resumed"] > 0
        if enough:
            how = {}
        elif inside:
            how = {"operation": rng.randint(1, case.whole.operations)}
        else:
            how = {"after": rng.uniform(0.05, 1.0) * case.whole.seconds}
        run = case.run("--resume-from-step=latest", **how)
        seen["resumed"] += "Resuming from step" in run.log
        if run.status == -signal.SIGKILL:
            seen["kills"] += 1
            seen["inside a save"] += inside
            inside = not inside
            continue
        assert run.status == 0, run.log
        case.assert_as_undisturbed()
        seen["runs"] += 1
        if enough:
            return seen
        case.start_over()


@pytest.mark.parametrize("what", KILLS, ids=lambda what: what[0])
def test_a_killed_run_ends_with_the_same_bits(fork_server, tiny_base, what):
    seed = int.from_bytes(os.urandom(4), "little")  # other moments in every run of the tests
    print(f"seed {seed}")
    case = Case(fork_server, tiny_base, *what)
    assert case.whole.operations > 30  # so the saves were watched
    seen = kill_until_enough(case, KILLS[what], random.Random(seed))
    assert seen["kills"] >= KILLS[what] and seen["inside a save"] >= KILLS[what] // 2


@pytest.mark.soak
@pytest.mark.parametrize("what", SOAKED, ids="-".join)
def test_runs_killed_many_times_end_with_the_same_bits(fork_server, tiny_base, what):
    """200 kills in all, at least half of them inside a save."""
    seed, kills = int.from_bytes(os.urandom(4), "little"), 2 * -(-100 // len(SOAKED))
    seen = kill_until_enough(Case(fork_server, tiny_base, *what, steps=4), kills, random.Random(seed))
    print(f"seed {seed}", *what, seen)
    assert seen["kills"] >= kills and seen["inside a save"] >= kills // 2


# ----------------------------------------------------------------------------------------------------------------------
# Disks


@pytest.mark.parametrize("stage, fault", [("base", "read_only"), ("sft", "disk_full")])
def test_a_disk_that_fails_for_a_while_costs_checkpoints_and_nothing_else(fork_server, tiny_base, stage, fault):
    """The kernel refuses to write from step 1 to 3: two saves fail with a warning, the run ends as it would have."""
    case = Case(fork_server, tiny_base, stage, "bf16", steps=4)
    run = case.run(fault=(fault, str(case.folder), 1, 3))
    assert run.status == 0, run.log
    reason = {"disk_full": "is the disk full", "read_only": "Permission denied"}[fault]
    lost = re.findall(rf"checkpoint of step (\d) NOT saved in .*{reason}.*older checkpoints are as they were", run.log)
    assert lost == ["2", "3"], run.log
    case.assert_as_undisturbed()


def test_a_disk_that_stays_full_is_an_error_at_the_end(fork_server, tiny_base):
    case = Case(fork_server, tiny_base, "base", "bf16")
    run = case.run(fault=("disk_full", str(case.folder), 2, 99))
    assert run.status == 2 and run.log.splitlines()[-1].startswith(f"error: step {STEPS} "), run.log
    assert "Traceback" not in run.log and find_last_step(case.folder) == 2
    assert case.run("--resume-from-step=latest").status == 0
    case.assert_as_undisturbed()


@pytest.mark.parametrize("how", ["pipe", "full"])
def test_a_log_that_nobody_takes_does_not_stop_the_run(fork_server, tiny_base, how):
    case = Case(fork_server, tiny_base, "base", "bf16")
    assert case.run(fault=("log_is_gone", how)).status == 0
    case.assert_as_undisturbed()


# ----------------------------------------------------------------------------------------------------------------------
# Signals from outside, at any moment


@pytest.mark.parametrize(
    "stage, number, status",
    [
        ("base", signal.SIGTERM, 143),
        ("base", signal.SIGINT, 130),
        ("mid", signal.SIGHUP, 129),
        ("sft", signal.SIGTERM, 143),
    ],
)
def test_a_signal_at_any_moment_saves_within_a_step(fork_server, tiny_base, stage, number, status):
    case = Case(fork_server, tiny_base, stage, "bf16")
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    seconds = case.whole.seconds
    for _ in range(20):
        run = case.run(after=rng.uniform(0.3, 0.9) * seconds, number=int(number))
        if re.search(rf"stopped at step (?!{STEPS}\b)", run.log):
            break
        # It came before the script had taken the signals over, or in the last step: test_base_train.py has that one.
        assert run.status in (0, status, -number), run.log
        seconds = run.seconds if run.status == 0 else seconds  # the machine was busier before
        case.start_over()
    assert run.status == status, run.log
    step = int(re.search(r"stopped at step (\d+)", run.log).group(1))
    trained = [r["step"] for r in read_jsonl(case.folder / "metrics.jsonl") if r["event"] == "train"]
    assert find_last_step(case.folder) == step and trained == list(range(step))
    assert case.run("--resume-from-step=latest").status == 0
    case.assert_as_undisturbed()


def test_a_third_interrupt_ends_a_run_at_once(fork_server, tiny_base):
    """The first Ctrl-C saves after the step, and so does a second; a third does not wait for the end of the step."""
    case = Case(fork_server, tiny_base, "base", "bf16")
    run = case.run(fault=("signals", signal.SIGINT, 1, 0.4, 2.6))
    assert run.status == -signal.SIGINT and "stopped at step" not in run.log, run.log
    assert list_steps(case.folder) == [1] and run.log.count("again") == 1


# ----------------------------------------------------------------------------------------------------------------------
# Two processes: gloo between two forks


def test_one_of_two_ranks_is_killed_and_both_go_on(fork_server, tiny_base):
    """Rank 0 dies at any moment, rank 1 inside a save; whoever starts both again gets the same bits."""
    case = Case(fork_server, tiny_base, "base", "bf16")
    two = tiny_base.with_name("two")
    shutil.copytree(tiny_base, two)
    whole = case.run(base=two, ranks=2, rank=1)
    assert whole.status == 0, whole.log
    expected = final_state(two / "base_checkpoints" / TAG, STEPS)
    assert len(expected["ranks"]) == 2
    rng = random.Random(int.from_bytes(os.urandom(4), "little"))
    killed = resumed = 0
    while True:
        how = {}
        if killed < 2 or not resumed:
            how = {"rank": killed % 2}
            if killed % 2:
                how["operation"] = rng.randint(1, whole.operations)
            else:
                how["after"] = rng.uniform(0.2, 1.0) * whole.seconds
        run = case.run("--resume-from-step=latest", ranks=2, **how)
        resumed += "Resuming from step" in run.log
        if run.status == 0:
            assert_same(final_state(case.folder, STEPS), expected)
            if not how:
                return
            case.start_over()
        else:
            assert run.status == -signal.SIGKILL, run.log
            killed += 1


@pytest.mark.parametrize("stage", ["base", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("mid", "sft"))])
@pytest.mark.parametrize("ranks", [(2, 1, 2), pytest.param((3, 1, 3, 2), marks=pytest.mark.slow)], ids=str)
def test_any_number_of_processes_goes_on_with_what_others_saved(fork_server, tiny_base, stage, ranks):
    """Of the first processes, with shards where there are two, one is killed. Others go on and are stopped in turn."""
    six = {"base": "--total-batch-size=384", "mid": "--total-batch-size=1536", "sft": "--target-examples-per-step=12"}
    case = Case(
        fork_server, tiny_base, stage, "clover" if stage == "base" else "bf16",
        *([six[stage], "--eval-every=1"] if 3 in ranks else []), steps=len(ranks),
    )  # fmt: skip
    shards = "--parallel=ddp" if 3 in ranks else "--parallel=fsdp"  # the vocabulary does not divide by 3
    killed = case.run("--save-every=1", shards, ranks=ranks[0], fault=("signals", signal.SIGKILL, 1), rank=1)
    assert killed.status == -signal.SIGKILL and find_last_step(case.folder) == 1, killed.log
    for before, now in zip(ranks, ranks[1:-1]):
        stopped = case.run("--resume-from-step=latest", ranks=now, fault=("signals", signal.SIGTERM, 0))
        assert stopped.status == 143 and f"world_size was {before} " in stopped.log, stopped.log
    assert case.run("--resume-from-step=latest", ranks=ranks[-1]).status == 0
    for a, b in zip(final_state(case.folder, case.steps)["records"], case.expected["records"], strict=True):
        assert a["event"] == b["event"]
        for key in ("loss", "bpb"):
            assert a.get(key, 0) == pytest.approx(b.get(key, 0), rel=1e-3)


@pytest.mark.soak
def test_forty_kills_in_sharded_saves_and_resumes_by_others(fork_server, tiny_base):
    """Each attempt has 1, 2 or 4 processes, with shards or without, of which one dies inside a save."""
    seed = int.from_bytes(os.urandom(4), "little")
    rng, kills, through, changed = random.Random(seed), 0, 0, 0
    case = Case(fork_server, tiny_base, "base", "clover", "--device-batch-size=1")
    while kills < 40 or not through:
        ranks = rng.choice([1, 2, 4])
        flags = ["--resume-from-step=latest", "--save-every=1", *(["--parallel=fsdp"] if rng.random() < 0.7 else [])]
        last = case.whole.operations // (1 if ranks == 1 else 2)  # other ranks than the first do less
        how = {"rank": rng.randrange(ranks), "operation": rng.randint(1, last)} if kills < 40 else {}
        before = list_steps(case.folder)
        run = case.run(*flags, ranks=ranks, **how)
        changed += "world_size was" in run.log
        assert run.status in (0, -signal.SIGKILL), f"seed {seed}: {run.log}"
        assert not before or find_last_step(case.folder) >= max(before), f"seed {seed}: a checkpoint was lost"
        kills += run.status != 0
        if run.status == 0:
            for a, b in zip(final_state(case.folder, STEPS)["records"], case.expected["records"], strict=True):
                assert a["event"] == b["event"] and a.get("loss", 0) == pytest.approx(b.get("loss", 0), rel=1e-3), seed
            through += 1
            case.start_over()
    print(f"{kills} kills, {changed} resumes by another number of processes, {through} runs through")
    assert changed > 5


@pytest.mark.parametrize("method, tolerance, parallel", [("bf16", 1e-4, "ddp"), ("clover", 1e-3, "fsdp")])
def test_one_process_and_two_agree(fork_server, tiny_base, method, tolerance, parallel):
    """
    The same rows in each step. Without quantization only the order of sums differs (FP32, 1e-7, of which Muon makes
    1e-4 where a gradient has small singular values). So with it: one process and two draw the same noise for the same
    micro-batch. Then a weight may round to another code. The stages after it: the test of any number of processes.
    """
    case = Case(fork_server, tiny_base, "base", method)
    two = case.run(f"--parallel={parallel}", ranks=2)
    assert two.status == 0, two.log
    state = final_state(case.folder, STEPS)
    records = state["records"]
    assert len(records) == len(case.expected["records"])
    pairs = [(a.double(), case.expected["model"][name].double()) for name, a in state["model"].items()]
    distance = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
    assert distance.sqrt() < 1e-4, distance  # noise of a process's own, in place of the micro-batch's, is 9e-4
    for a, b in zip(records, case.expected["records"]):
        keys = {"loss", "bpb"} & a.keys()
        assert a["event"] == b["event"] and keys
        assert {k: a[k] for k in keys} == pytest.approx({k: b[k] for k in keys}, rel=tolerance), (a, b)


# ----------------------------------------------------------------------------------------------------------------------
# Reproducibility


def test_the_same_seed_gives_the_same_bits_and_another_does_not(fork_server, tiny_base):
    """Two processes, the same command; every method was also compared so in the tests of kills."""
    case = Case(fork_server, tiny_base, "base", "clover")
    assert case.run("--deterministic").status == 0  # on a CPU it changes nothing
    case.assert_as_undisturbed()
    case.start_over()
    assert case.run("--seed=43").status == 0
    other = final_state(case.folder, STEPS)
    losses = [[r["loss"] for r in state["records"] if r["event"] == "train"] for state in (case.expected, other)]
    assert all(a != b for a, b in zip(*losses))


# ----------------------------------------------------------------------------------------------------------------------
# Numbers


class Recorder:
    """Stands for a wandb run."""

    def __init__(self):
        self.logged: dict[str, list] = {}

    def log(self, values, step):
        for key, value in values.items():
            self.logged.setdefault(key, []).append(value)

    def finish(self):
        pass


def run_stage(stage: str, base: Path, *flags: str, steps: int = 4) -> Path:
    """A stage in this process; returns the folder of its checkpoints."""
    _, arguments, place, parent = STAGES[stage]
    if parent and not (base / parent / TAG).exists():
        save_base(base, tag=TAG, source=parent, n_layer=1)
    main = {"base": base_train, "mid": mid_train}[stage].main
    main([*arguments, f"--model-tag={TAG}", f"--num-iterations={steps}", *flags])
    return base / place / TAG


def test_telemetry_of_every_layer_is_logged_and_reported(tiny_base, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(trainer, "setup_tracker", lambda *args: recorder)
    folder = run_stage("base", tiny_base, "--telemetry-every=2", "--eval-every=-1", steps=3)
    names = {"train/loss", "train/lrm", "train/dt", "train/tok_per_sec", "train/grad_norm", "total_training_time"}
    assert names <= recorder.logged.keys()  # nanochat's, in every stage
    records = [r for r in read_jsonl(folder / "metrics.jsonl") if r["event"] == "telemetry"]
    assert [r["step"] for r in records] == [0, 2] and len(records[1]["layers"]) == 6
    numbers = {f"{gemm}_error" for gemm in ("output", "grad_input", "grad_weight")}
    numbers |= {"grad_input_cosine", "grad_weight_cosine"}
    for layer, measured in records[1]["layers"].items():
        assert set(measured) == numbers, layer
        assert 0.02 < measured["output_error"] < 0.4, layer
        assert 0.8 < measured["grad_weight_cosine"] < 1 and 0.8 < measured["grad_input_cosine"] < 1, layer
        for name, value in measured.items():
            assert recorder.logged[f"within layers/{layer}/{name}"][-1] == value
    text = report.generate(tiny_base / "report").read_text()
    assert "Quantization error: step 2" in text
    observed = losses(folder)
    run_stage("base", tiny_base, "--eval-every=-1", "--overwrite", steps=3)
    assert losses(folder) == observed  # looking does not change the run


def losses(folder: Path) -> list[float]:
    return [r["loss"] for r in read_jsonl(folder / "metrics.jsonl") if r["event"] == "train"]


class Damage:
    """GPT.forward whose loss, in one step of training, is multiplied by `factor`."""

    def __init__(self, monkeypatch, step: int, factor: float):
        self.real, self.calls, self.step, self.factor = GPT.forward, 0, step, factor
        monkeypatch.setattr(GPT, "forward", lambda model, *args, **kwargs: self.forward(model, *args, **kwargs))

    def forward(self, model, *args, **kwargs):
        out = self.real(model, *args, **kwargs)
        if model.training and torch.is_grad_enabled():
            self.calls += 1
            if (self.calls - 1) // 2 == self.step:  # of two micro-batches
                return out * self.factor
        return out


def test_after_bad_numbers_a_run_goes_on_as_it_would_have(tiny_base, monkeypatch):
    """NaN in one step: the run stops before it; resumed where the fault does not come again, it is as undisturbed.

    By epoch, where learning rates depend on how much was consumed.
    """
    few = lambda args: [Source("few", lambda: LocalArithmetic(size=60))]  # noqa: E731
    monkeypatch.setattr(mid_train, "train_sources", few)
    flags = ["--eval-every=-1", "--total-batch-size=512", "--device-batch-size=2"]
    folder = run_stage("mid", tiny_base, *flags, steps=-1)
    last = list_steps(folder)[0]
    assert last > 4
    expected = final_state(folder, last)
    with monkeypatch.context() as m:
        Damage(m, last - 1, float("nan"))
        with pytest.raises(UserError, match=f"step {last - 1}: loss nan, .*--on-nonfinite skip"):
            run_stage("mid", tiny_base, "--overwrite", *flags, steps=-1)
    assert list_steps(folder) == [last - 1]
    run_stage("mid", tiny_base, "--resume-from-step=latest", *flags, steps=-1)
    resumed = final_state(folder, last)
    resumed["records"] = [r for r in resumed["records"] if r["event"] != "skip"]
    assert_same(resumed, expected)


def test_bad_gradients_of_shards_are_dropped_with_their_step(tiny_base, monkeypatch):
    """There the layer is not looked for, whose search would drop them."""
    monkeypatch.setattr(trainer, "is_sharded", lambda model: True)
    Damage(monkeypatch, 1, float("nan"))
    folder = run_stage("base", tiny_base, "--eval-every=-1", "--method=bf16", "--on-nonfinite=skip", steps=4)
    events = [r["event"] for r in read_jsonl(folder / "metrics.jsonl") if r["event"] != "val"]
    assert events == ["start", "train", "skip", "train", "train"]


def test_bad_numbers_can_be_skipped_and_spikes_are_seen(tiny_base, monkeypatch, capsys):
    monkeypatch.setattr(metrics.LossMonitor, "SPIKE_AFTER", 3)
    flags = ["--eval-every=-1", "--method=bf16"]
    with monkeypatch.context() as m:
        Damage(m, 2, float("nan"))
        folder = run_stage("base", tiny_base, *flags, "--on-nonfinite=skip", steps=4)
    events = [(r["event"], r["step"]) for r in read_jsonl(folder / "metrics.jsonl") if r["event"] != "val"]
    assert events == [("start", 0), ("train", 0), ("train", 1), ("skip", 2), ("train", 3)]
    captured = capsys.readouterr()
    assert "warning: step 2: loss nan" in captured.err and re.search(r"Skipped updates +1\n", captured.out)
    with monkeypatch.context() as m:
        Damage(m, 4, 30.0)
        run_stage("base", tiny_base, *flags, "--overwrite", steps=6)
    spikes = [r for r in read_jsonl(folder / "metrics.jsonl") if r["event"] == "spike"]
    assert [r["step"] for r in spikes] == [4] and spikes[0]["loss"] > 2 * spikes[0]["average"]
    captured = capsys.readouterr()
    assert "warning: step 4: loss" in captured.err and re.search(r"Loss spikes +1\n", captured.out)


# ----------------------------------------------------------------------------------------------------------------------
# What a stage leaves behind in its process


def children() -> list[str]:
    """Living processes that this one started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has just ended
            found += (task / "children").read_text().split()
    return found


def test_stages_leave_no_open_files_and_no_processes(tiny_base, monkeypatch, capsys):
    evaluate = "-i sft -a local -x 2 -m 4 -b 2 --device-type cpu".split()
    stages = {
        "tok_train": lambda: tok_train.main(["--vocab-size=290", "--max-chars=50000"]),
        "base": lambda: run_stage("base", tiny_base, "--max-seq-len=128", "--total-batch-size=256", steps=2),
        "base_loss": lambda: base_loss.main(["--device-batch-size=2", "--split-tokens=256", "--device-type=cpu"]),
        "mid": lambda: mid_train.main([*MID, *SHORT["mid"], f"--model-tag={TAG}", "--num-iterations=1"]),
        "sft": lambda: chat_sft.main([*SFT, f"--model-tag={TAG}", "--num-iterations=1"]),
        "chat_eval": lambda: chat_eval.main(evaluate),
        "chat_cli": lambda: chat_cli.main(["-p", "hi", "--device-type=cpu", "--max-tokens=4"]),
        "report": lambda: report.main([]),
    }
    server_and_the_like = children()

    def let_batches_end():
        gc.collect()
        wait_until(lambda: not any("ThreadPoolExecutor" in thread.name for thread in threading.enumerate()))

    let_batches_end()  # those that tests before this one have left
    for name, stage in stages.items():
        if name == "report":
            stage()  # matplotlib keeps its fonts open from its first plot on
        files = sorted(os.listdir("/proc/self/fd"))
        stage()
        let_batches_end()
        assert sorted(os.listdir("/proc/self/fd")) == files, name
        assert children() == server_and_the_like, name


# ----------------------------------------------------------------------------------------------------------------------
# Disk space


def test_downloads_are_looked_at(base_dir, monkeypatch):
    """What has no published hash, too: this is neither words nor conversations, as a log-in page would be."""
    with contextlib.closing(Server({"/words.txt": bytes(300_000)})) as server:
        monkeypatch.setattr(chat_data, "WORD_LIST_URL", server.url("/words.txt"))
        monkeypatch.setattr(chat_data, "IDENTITY_URL", server.url("/words.txt"))
        loads = {chat_data.load_words: "list of words", chat_data.identity_conversations: "cannot be downloaded"}
        for load, problem in loads.items():
            with pytest.raises(MissingDataError, match=problem):
                load()
        assert not [p for p in base_dir.iterdir() if p.suffix in (".txt", ".jsonl")]
        server.shutdown()
