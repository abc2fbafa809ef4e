"""speedrun_fp4.sh, run1000_fp4.sh and dev/setup.sh: plans, bad input, reuse. The training is that of a toy."""

import contextlib
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOY = {
    "DEPTH": "1", "ASPECT_RATIO": "128", "HEAD_DIM": "64", "SEQ_LEN": "32", "VOCAB_SIZE": "300", "TOTAL_BATCH": "128",
    "NUM_ITERATIONS": "2", "DEVICE_BATCH": "2", "EVAL_EVERY": "2", "EVAL_TOKENS": "64", "SAVE_EVERY": "1",
    "EVAL_BATCH": "2", "SPLIT_TOKENS": "64", "STAGES": "tok base loss report",
}  # fmt: skip

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def environment(tiny_base, tmp_path, fork_server):
    """A Python that is forked as VENV, no GPU (a nvidia-smi that finds none), the toy's text and tokenizer."""
    venv, fake = tmp_path / "venv", tmp_path / "bin"
    (venv / "bin").mkdir(parents=True)
    fake.mkdir()
    shutil.copy(fork_server.python, venv / "bin" / "python")
    (fake / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (fake / "nvidia-smi").chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if k not in TOY and k not in ("PYTHONPATH", "VENV", "STAGES")}
    return kept | {"VENV": str(venv), "PATH": f"{fake}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def bash(script: str, environment: dict, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", script], cwd=ROOT, env=environment | variables, capture_output=True, text=True, timeout=900
    )


SHELL = "set -euo pipefail; ROOT=$PWD; source dev/setup.sh; "
PIPELINE = f"cd {ROOT}; {SHELL}source dev/pipeline.sh; "


def shell(command: str, environment: dict, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """The command where the functions of dev/setup.sh, or those of PIPELINE too, are known."""
    command = ["bash", "-c", command]
    return subprocess.run(command, cwd=cwd, env=environment | variables, capture_output=True, text=True, timeout=300)


def plan(done: subprocess.CompletedProcess) -> dict[str, str]:
    """The numbers that a plan prints."""
    assert done.returncode == 0, done.stderr
    return {name: value.strip('"') for name, value in re.findall(r'(?<=  )([A-Z_]+)=("[^"]*"|\S+)', done.stdout)}


# ----------------------------------------------------------------------------------------------------------------------
# Plans


def test_the_plan_of_a_gpu_that_is_not_here_has_its_hours(environment):
    done = bash("run1000_fp4.sh", environment, PLAN_ONLY="1", GPU="rtx5090", QAT_METHOD="fp8")
    assert plan(done)["DEPTH"] == "32" and plan(done)["DEVICE_BATCH"] == "auto"
    assert re.search(
        r"RTX 5090, d32, fp8: [0-9,]+ tokens/s predicted, \d+ hours for 37\.6B tokens, "
        r"[\d.]+ of them validation and [\d.]+ checkpoints; a day has",
        done.stdout,
    )
    assert "machine   1 x rtx5090, 1 process(es); not this machine" in done.stdout and "no GPU" not in done.stdout
    assert "stages    tok base loss core mid sft report" in done.stdout
    assert "on one GPU, without mid-training, SFT and benchmarks" in done.stdout
    assert re.search(r"memory: 2\d\.\d GiB for weights.* disk: 120 GB of text, [\d.]+ GB for each", done.stdout)
    small = bash("run1000_fp4.sh", environment, PLAN_ONLY="1", GPU="rtx5060", DATA_DIR="")  # 8 GiB
    assert plan(small)["DEPTH"] == "24" and "\n  runs      d24_clover\n" in small.stdout
    assert re.search(r"d32 on 8 GiB: needs [\d.]+ GiB; d24 fits, so DEPTH=24\n", small.stdout)
    assert "flags:\n    d24 on 8 GiB: 2 rows, " in small.stdout and "set by you" not in small.stdout
    usual, four = (
        bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", GPU="rtx5090", **v) for v in ({}, {"DEVICE_BATCH": "4"})
    )
    speeds = [re.search(r"d20, clover: ([0-9,]+) tokens/s predicted", done.stdout)[1] for done in (usual, four)]
    assert re.search(rf"\n    fp32 +none +16 +[\d.]+ +{speeds[0]}\n", usual.stdout) and speeds[0] > speeds[1]
    unknown = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", GPU="rtx9090")
    assert unknown.returncode == 2 and "GPU=rtx9090: nothing is predicted for rtx9090; use one of" in unknown.stderr
    done = bash("speedrun_fp4.sh", environment, GPU="rtx5090")
    assert done.returncode == 2 and "GPU=rtx5090 is for plans of a machine that is not here" in done.stderr


@pytest.mark.parametrize("script", ["speedrun_fp4.sh", "run1000_fp4.sh", "dev/measure.sh"])
def test_help_is_what_the_script_says_of_itself(script):
    done, wrong = (shell(f"bash {script} {flag}", dict(os.environ)) for flag in ("--help", "--depth=4"))
    assert done.returncode == 0 and "PLAN_ONLY=1" in done.stdout and "source dev" not in done.stdout, done
    assert wrong.returncode == 2 and "takes no arguments, and got '--depth=4'" in wrong.stderr


def test_relative_folders_are_the_callers(environment, tmp_path):
    """The scripts work in their own folder. A relative DATA_DIR there keeps its text, which is in the run's name."""
    for cwd, data in ((tmp_path, f"{tmp_path}/text"), (ROOT, "text")):
        done = shell(f"{PIPELINE} env", environment, cwd, DATA_DIR="text")
        assert f"\nDATA_DIR={data}\n" in done.stdout, done.stderr
        assert f"\nNANOCHAT_BASE_DIR={environment['NANOCHAT_BASE_DIR']}\n" in done.stdout  # absolute, as it was


@pytest.mark.parametrize(
    "variables, expected",
    [({}, "1 PASSIVE"), ({"OMP_NUM_THREADS": "7"}, "7 PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "1 ACTIVE")],
)
def test_one_thread_that_does_not_spin(environment, variables, expected):
    unset = {k: v for k, v in environment.items() if not k.startswith("OMP_")}
    done = shell(f'{PIPELINE} echo "$OMP_NUM_THREADS $OMP_WAIT_POLICY"', unset, **variables)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.parametrize(
    "visible, machine",
    [
        ("1", "1 x NVIDIA X, 1 process(es)"),
        ("2,0", "2 x NVIDIA X, 2 process(es)"),
        ("", "no GPU, "),
        ("-1", "no GPU, "),
    ],
)
def test_only_visible_gpus_count(environment, visible, machine):
    smi(environment, 'case "$1" in -L) seq -f "GPU %g: X" 0 2;; *) echo "NVIDIA X";; esac')
    assert shell(f'{PIPELINE} echo "$MACHINE"', environment, CUDA_VISIBLE_DEVICES=visible).stdout.startswith(machine)


def test_names_of_runs_say_what_differs(environment, tmp_path):
    script = f"{PIPELINE} choose DEPTH=2 NUM_ITERATIONS=120 EVAL_EVERY=40 SEED=42 MATRIX_LR=0.32; "
    script += 'CONFIG+="DATA_DIR=$DATA_DIR BASE_ARGS=$BASE_ARGS"; DEFAULTS+="DATA_DIR= BASE_ARGS="; tag_of clover'

    def name(**variables):
        done = shell(script, environment, **{"DATA_DIR": "", "BASE_ARGS": ""} | variables)
        return done.stdout.strip() or pytest.fail(done.stderr)

    mine = {"NUM_ITERATIONS": "77", "DATA_DIR": f"{tmp_path}/my books", "BASE_ARGS": "--weight-decay=0.1 --llama=30M"}
    assert name() == "d2_clover" and name(EVAL_EVERY="7", DEPTH="3") == "d3_clover"
    assert name(NUM_ITERATIONS="77", MATRIX_LR="0.1", SEED="2") == "d2_clover_steps77_seed2_matrix-lr0.1"
    assert re.fullmatch(r"d2_clover_steps77_data-my-books-\d+_weight-decay-0.1-llama-30M", name(**mine))
    assert name(**mine | {"DATA_DIR": f"{tmp_path}/other/my books"}) != name(**mine)
    long = name(BASE_ARGS="--weight-decay=0.1 " * 9)
    assert re.fullmatch(r"d2_clover_[\w.-]+-\d+", long) and len(long) < 100


@pytest.mark.parametrize("name, meant", [("NUM_ITERATION", "NUM_ITERATIONS"), ("DETPH", "DEPTH"), ("NPROCS", "NPROC")])
def test_a_name_that_is_nearly_one_of_ours_is_refused(environment, name, meant):
    done = bash("speedrun_fp4.sh", environment, **{"PLAN_ONLY": "1", name: "3"})
    assert done.returncode == 2 and f"{name} is set" in done.stderr and f"did you mean {meant}?" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name, value", [("EVAL_EVERY", "1.5"), ("TOTAL_BATCH", "5e5"), ("NUM_ITERATIONS", "1e3")])
def test_whole_numbers_are_asked_for(environment, name, value):
    done = bash("speedrun_fp4.sh", environment, **{"PLAN_ONLY": "1", "GPU": "rtx5090", name: value})
    assert done.returncode == 2 and f"{name}={value}: expected a whole number" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_plan_without_a_ratio_has_the_hours_of_its_steps(environment):
    ratios = {"DATA_RATIO": "-1", "NUM_ITERATIONS": "1000"}
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", GPU="rtx5090", **ratios)
    assert done.returncode == 0 and "hours" in done.stdout and "for 0.524B tokens" in done.stdout
    wrong = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", GPU="rtx5090", DEVICE_BATCH="0")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: --depth and --micro-batch must be at least 1")


def test_plan_on_a_cpu(environment):
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", NUM_ITERATIONS="77")
    shown = plan(done)
    assert shown["NUM_ITERATIONS"] == "77"
    assert re.search(r"set by you: NUM_ITERATIONS=77 \(default: \d+\)", done.stdout)
    assert re.search(r"methods +clover ", done.stdout) and "no GPU" in done.stdout
    assert int(shown["DEPTH"]) <= 8 and int(shown["VOCAB_SIZE"]) <= 8192  # a small model
    assert not list((Path(environment["NANOCHAT_BASE_DIR"])).glob("base_checkpoints"))  # nothing was started
    deeper = plan(bash("run1000_fp4.sh", environment, PLAN_ONLY="1"))
    assert int(shown["DEPTH"]) < int(deeper["DEPTH"]) <= 8


def test_steps_chosen_for_a_cpu(environment):
    """The stored number shrinks the run and its later stages, and is in its name. NUM_ITERATIONS overrides it."""
    base, environment = Path(environment["NANOCHAT_BASE_DIR"]), environment | {"DATA_DIR": ""}
    runs = lambda done: re.search(r"^  runs +(.*)$", done.stdout, re.M).group(1).split()  # noqa: E731
    first = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1")
    assert runs(first) == ["d2_clover"] and "NUM_ITERATIONS=120 (a probe before training may" in first.stdout
    assert not (base / "cpu_steps.json").exists()
    (base / "cpu_steps.json").write_text(
        '{"d2_120": {"steps": 60, "why": "slow"}, "d4_160": {"steps": 40, "why": "-"}}'
    )
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", COMPARE="1")
    shown = plan(done)
    assert "chosen for a CPU: NUM_ITERATIONS=60 (slow)" in done.stdout and "set by you" not in done.stdout
    assert runs(done) == ["d2_clover_steps60", "d2_bf16_steps60"] and shown["NUM_ITERATIONS"] == "60"
    assert shown["SPLIT_TOKENS"] == "32768" and "--max-problems=16 " in shown["EVAL_ARGS"]
    assert "--num-iterations=30" in shown["MID_ARGS"] and "--num-iterations=10 " in shown["SFT_ARGS"]
    mine = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", NUM_ITERATIONS="120")
    assert runs(mine) == ["d2_clover"] and "chosen for a CPU" not in mine.stdout
    assert "--num-iterations=60" in plan(mine)["MID_ARGS"] and plan(mine)["SPLIT_TOKENS"] == "65536"
    large = plan(bash("run1000_fp4.sh", environment, PLAN_ONLY="1", SFT_ARGS="--num-iterations=9", SPLIT_TOKENS="512"))
    assert large["NUM_ITERATIONS"] == "40" and large["SFT_ARGS"] == "--num-iterations=9"
    assert large["SPLIT_TOKENS"] == "512" and "--num-iterations=15" in large["MID_ARGS"]


def smi(environment: dict, script: str) -> None:
    (Path(environment["PATH"].split(":")[0]) / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")


def test_plan_on_gpus_is_nanochats(environment):
    smi(environment, 'case "$1" in -L) echo "GPU 0: X"; echo "GPU 1: X";; *) echo "NVIDIA X";; esac')
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", COMPARE="1", QAT_METHOD="quartet2")
    shown = plan(done)
    expected = {
        "DEPTH": "20", "ASPECT_RATIO": "64", "HEAD_DIM": "128", "SEQ_LEN": "2048", "VOCAB_SIZE": "65536",
        "TOTAL_BATCH": "524288", "DATA_RATIO": "20", "DEVICE_BATCH": "auto", "NUM_SHARDS": "370",
    }  # fmt: skip
    assert {k: shown[k] for k in expected} == expected
    assert "2 x NVIDIA X, 2 process(es)" in done.stdout and "clover bf16" in done.stdout
    shown = plan(bash("run1000_fp4.sh", environment, PLAN_ONLY="1", QAT_METHOD=""))  # empty means the default
    assert (shown["DEPTH"], shown["DEVICE_BATCH"], shown["DATA_RATIO"]) == ("32", "auto", "20")


# ----------------------------------------------------------------------------------------------------------------------
# Bad input: one line on stderr, a status that is not 0, and nothing begun


@pytest.mark.parametrize(
    "script, variables, message",
    [
        ("speedrun_fp4.sh", {"QAT_METHOD": "fp3"}, "error: QAT_METHOD: unknown method 'fp3'; use one of: bf16"),
        ("speedrun_fp4.sh", {"DEPTH": "abc"}, "error: DEPTH=abc: expected a number, such as the default 2"),
        ("speedrun_fp4.sh", {"STAGES": "tok fly"}, "error: STAGES: there is no stage 'fly'"),
        ("speedrun_fp4.sh", {"NPROC": "2x"}, "error: NPROC='2x' is not a number of processes"),
        ("run1000_fp4.sh", {"NPROC": "0"}, "error: NPROC='0' is not a number of processes"),
        ("speedrun_fp4.sh", {"VENV": "/nowhere"}, "error: VENV=/nowhere has no bin/python"),
        ("speedrun_fp4.sh", {"NANOCHAT_BASE_DIR": "/dev/null/x"}, "error: cannot create /dev/null/x"),
        ("speedrun_fp4.sh", {"DATA_DIR": "/nowhere", "STAGES": "base"}, "error: .*/nowhere is not there"),
        ("speedrun_fp4.sh", {"VOCAB_SIZE": "999"}, "error: .* holds a tokenizer of 300 tokens, this run wants 999"),
    ],
)
def test_bad_input(environment, script, variables, message):
    done = bash(script, environment, **TOY | variables)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if re.match(message, line)]
    assert len(errors) == 1 and "Traceback" not in done.stderr, done.stderr
    assert not list(Path(environment["NANOCHAT_BASE_DIR"]).glob("base_checkpoints/*/model*"))


def test_environment_without_a_module(environment):
    Path(environment["VENV"], "bin", "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1")
    assert done.returncode == 2 and re.match(r"error: VENV=\S+ lacks: torch .*; install them there", done.stderr)


@pytest.mark.parametrize(
    "gpu, message",
    [
        ("570.86, 12.0", "the NVIDIA driver 570.86 is older than 580, and torch for it knows no Blackwell; install"),
        ("550.1, 9.0", "the NVIDIA driver 550.1 is older than 580, which torch's default build needs; install a newer"),
        ("580.65, 12.1", ""),
        ("NVIDIA X", ""),
    ],
)
def test_a_driver_that_is_too_old(environment, gpu, message):
    """Said before torch is installed, which would see no GPU."""
    smi(environment, f'case "$1" in -L) echo "GPU 0: X";; *) echo "{gpu}";; esac')
    done = shell(f"{SHELL} check_driver", environment)
    assert done.returncode == (2 if message else 0) and done.stdout == ""
    assert done.stderr.startswith(f"error: {message}" if message else "") and done.stderr.count("\n") == bool(message)


@pytest.mark.parametrize(
    "tools, include, plan, message",
    [
        ([], "there", "0", "Triton needs a C compiler and there is no gcc; install it"),
        (["gcc"], "nowhere", "0", "Triton needs Python.h, which "),
        (["clang"], "there", "0", ""),
        ([], "nowhere", "1", ""),
    ],
)
def test_no_compiler(environment, tmp_path, tools, include, plan, message):
    """Triton's own message comes an hour later, after the download."""
    bin_, headers = tmp_path / "only", tmp_path / include
    bin_.mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "Python.h").touch()
    for name in tools:
        (bin_ / name).write_text("#!/bin/sh\n")
        (bin_ / name).chmod(0o755)
    (bin_ / "sitecustomize.py").write_text(f"import sysconfig\nsysconfig.get_path = lambda name: {str(headers)!r}\n")
    unset = {k: v for k, v in environment.items() if k != "CC"} | {"PY": sys.executable, "PLAN_ONLY": plan}
    done = shell(f"export PATH={bin_} PYTHONPATH={bin_}; {SHELL} check_compiler", unset)
    assert done.returncode == (2 if message else 0), done.stderr
    assert done.stderr.startswith(f"error: {message}" if message else "")


def test_no_python_that_fits(environment, tmp_path):
    clone = tmp_path / "clone"
    for name in ("dev/setup.sh", "requirements.txt", "constraints.txt", "pyproject.toml"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, clone / name)
    environment = {k: v for k, v in environment.items() if k != "VENV"}
    done = shell(f'{SHELL} setup_environment; echo "$PY"', environment, clone, PYTHON="python-that-is-not")
    assert done.returncode == 2 and done.stderr.startswith("error: PYTHON=python-that-is-not is not a Python 3.10")
    assert not (clone / ".venv").exists()


# ----------------------------------------------------------------------------------------------------------------------
# The run


def test_speedrun_compare_reuse_and_second_method(environment):
    base = Path(environment["NANOCHAT_BASE_DIR"])
    shutil.rmtree(base / "tokenizer")
    first = bash("speedrun_fp4.sh", environment, COMPARE="1", **TOY)
    assert first.returncode == 0, first.stderr[-2000:]
    path = Path(first.stdout.splitlines()[-1])
    assert path == base / "report" / "report.md" and path.is_file()
    tags = [p.name for p in (base / "base_checkpoints").iterdir()]
    clover, bf16 = (next(tag for tag in tags if tag.startswith(f"d1_{m}")) for m in ("clover", "bf16"))
    text = path.read_text()
    gap = re.search(rf"\| {clover} \|.*?([+-]\d+\.\d\d%)", text)
    assert gap and f"| {bf16} |" in text and gap.group(1) in first.stdout and "## Samples" in text

    made = [p for p in base.rglob("*") if p.suffix in (".pt", ".json") and "report.json" not in p.name]
    state = {p: p.stat().st_mtime_ns for p in made}
    # Another method: the same tokenizer and baseline, a run of its own.
    toy = TOY | {"STAGES": "tok base report", "COMPARE": "1", "QAT_METHOD": "nvidia"}
    second = bash("speedrun_fp4.sh", environment, **toy)
    assert second.returncode == 0 and second.stdout.splitlines()[-1] == str(path), second.stderr[-2000:]
    assert {p: p.stat().st_mtime_ns for p in state} == state  # nothing was made again
    assert second.stdout.count("reusing") == 2 and "base training, nvidia" in second.stdout
    text = path.read_text()
    assert "| d1_nvidia" in text and f"| {clover} |" in text  # every run of the folder


def test_every_stage(environment):
    """Through mid-training, SFT and both evaluations; a second time nothing is left to do.

    A probe chooses the steps before the first run. Later runs take them, whatever the machine does meanwhile.
    """
    base = Path(environment["NANOCHAT_BASE_DIR"])
    toy = TOY | {
        "STAGES": "",
        "NUM_ITERATIONS": "",
        "SAVE_EVERY": "-1",
        "EVAL_EVERY": "-1",
        "QAT_METHOD": "bf16",
        "ASPECT_RATIO": "64",
        "SEQ_LEN": "64",
        "SPLIT_TOKENS": "128",
        "MID_ARGS": "--data=local --device-batch-size=2 --total-batch-size=128 --eval-tokens=128 --num-iterations=2",
        "SFT_ARGS": "--data=local --num-iterations=2 --target-examples-per-step=4 --eval-metrics-every=-1",
        "EVAL_ARGS": "--task-name=local --max-problems=4 --max-new-tokens=4",
    }
    first = bash("speedrun_fp4.sh", environment, **toy)
    assert first.returncode == 0, first.stderr[-2000:]
    text = Path(first.stdout.splitlines()[-1]).read_text()
    titles = ("Midtraining", "Chat SFT", "Chat evaluation mid", "Chat evaluation sft")
    assert all(f"### {title}" in text for title in titles) and "## Bench" in text
    record = json.loads((base / "cpu_steps.json").read_text())["d1_120"]
    assert f"NUM_ITERATIONS={record['steps']} (a step took " in first.stdout
    (run,) = (p.name for p in (base / "base_checkpoints").iterdir() if p.is_dir())
    assert ("_steps" in run) == (record["steps"] != 120)
    second = bash("speedrun_fp4.sh", environment, **toy)
    assert second.returncode == 0 and second.stdout.count("done before") == 4, second.stdout
    assert f"reusing {base}/base_checkpoints/{run}" in second.stdout


def test_torchrun_takes_every_stage(environment, tmp_path):
    """torchrun's parser looks at the flags of the script, too: --run=name it took for a beginning of its --run-path."""
    from torch.distributed.run import parse_args

    python, calls = Path(environment["VENV"]) / "bin" / "python", tmp_path / "calls"
    python.rename(python.with_name("real"))
    python.write_text(
        f'#!/bin/bash\n[ "$2" != torch.distributed.run ] || {{ echo "${{@:3}}" >> {calls}; exit; }}\n'
        'exec "$(dirname "$0")/real" "$@"\n'
    )
    python.chmod(0o755)
    toy = TOY | {"STAGES": "base loss core mid sft"}
    done = bash("speedrun_fp4.sh", environment, **toy, NPROC="2", QAT_METHOD="bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    taken = [parse_args(line.split()) for line in calls.read_text().splitlines()]
    expected = ["base_train", "base_loss", "base_eval", "mid_train", "chat_eval", "chat_sft", "chat_eval"]
    assert [t.training_script for t in taken] == [f"scripts.{name}" for name in expected]
    assert {t.nproc_per_node for t in taken} == {"2"}


# ----------------------------------------------------------------------------------------------------------------------
# Signals


STUB = """
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$ROOT"
source dev/setup.sh
source dev/pipeline.sh
"""
# `timeout` sends a signal to its child and to the group. A stage may get it twice, and saves once, as signals.py does.
STAGE = """exec 2>/dev/null
trap 'trap "" TERM; sleep 0.1; echo saved; exit 143' TERM
trap 'trap "" HUP; echo saved; exit 129' HUP
"""
STAGE += "echo ready; while :; do sleep 0.02; done"


@pytest.fixture
def script(tmp_path):
    """Starts a script with the shell functions of the repository, in a process group of its own."""
    processes = []

    def start(text: str, *before: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen:
        (tmp_path / "dev").mkdir()
        for name in ("dev/setup.sh", "dev/pipeline.sh"):
            shutil.copy(ROOT / name, tmp_path / name)
        (tmp_path / "script.sh").write_text(STUB + text)

        def dispositions() -> None:
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        processes.append(
            subprocess.Popen(
                [*before, "bash", "script.sh"], cwd=tmp_path, env=os.environ | {"STAGE": STAGE}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=dispositions,
            )
        )  # fmt: skip
        assert processes[0].stdout.readline() == "ready\n"
        return processes[0]

    yield start
    with contextlib.suppress(ProcessLookupError):
        os.killpg(processes[0].pid, signal.SIGKILL)


def end(process: subprocess.Popen, number: int) -> tuple[int, str, str]:
    """Status, stdout, stderr after a signal to the script alone; nothing of it is left."""
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    assert_all_ended(process)
    return process.returncode, out, err


def assert_all_ended(process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 10
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, 0)
            time.sleep(0.01)
        pytest.fail("a process of the script's is left")


WAYS = {
    "foreground": {},
    "background": {"ignored": (signal.SIGINT,)},  # of a shell that is not interactive
    "timeout": {"before": ("timeout", "60")},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_a_script_reaches_the_stage(script, way, number, status):
    """In the second stage: what bash does with a signal changed after the first one."""
    how = WAYS[way]
    process = script('run true\nrun bash -c "$STAGE"', *how.get("before", ()), ignored=how.get("ignored", ()))
    line = f"stopped (exit status {status}); the same command again goes on from here\n"
    assert end(process, number) == (status, "saved\n", line)


def test_a_script_under_nohup_outlives_its_terminal(script):
    process = script('run bash -c "$STAGE"', ignored=(signal.SIGHUP, signal.SIGINT))
    os.killpg(process.pid, signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    assert end(process, signal.SIGINT)[:2] == (130, "saved\n")


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_download_and_an_installation_end_with_the_script(script, number, status):
    install = "exec 3>&1\nSETUP_LOG=log quietly installing bash -c 'echo ready >&3; exec sleep 62'"
    assert end(script(f"sleep 61 &\n{install} >/dev/null"), number)[:2] == (status, "")


def test_a_download_ends_with_a_script_that_fails(script):
    process = script("sleep 61 &\necho ready; sleep 0.2; die 'no disk'")
    assert process.communicate(timeout=300) == ("", "error: no disk\n") and process.returncode == 2
    assert_all_ended(process)


def test_a_closed_terminal_saves_and_the_same_command_goes_on(environment):
    """All processes of the terminal get SIGHUP. Nothing can be written any more."""
    base = Path(environment["NANOCHAT_BASE_DIR"])
    variables = TOY | {"NUM_ITERATIONS": "60", "QAT_METHOD": "bf16", "STAGES": "base report"}
    variables |= {"SAVE_EVERY": "1000", "EVAL_EVERY": "-1"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe("bash", ["bash", "speedrun_fp4.sh"], environment | variables)
    deadline = time.monotonic() + 300
    while not any('"step": 5,' in p.read_text() for p in base.glob("base_checkpoints/*/metrics.jsonl")):
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 129
    (manifest,) = base.glob("base_checkpoints/*/manifest_*.json")
    stopped = int(manifest.stem.partition("_")[2])
    done = bash("speedrun_fp4.sh", environment, **variables)
    assert done.returncode == 0 and f"Resuming from step {stopped}" in done.stdout, done.stderr
    records = [json.loads(line) for line in (manifest.parent / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["event"] == "train"] == list(range(60)) and stopped < 60


# ----------------------------------------------------------------------------------------------------------------------
# Facts that are kept twice


def test_every_pin_is_within_pyproject_and_constraints():
    """requirements.txt pins what pyproject.toml asks for, and constraints.txt says the same."""
    from packaging.requirements import Requirement

    lines = lambda name: [x.split("#")[0].strip() for x in (ROOT / name).read_text().splitlines()]  # noqa: E731
    pins = [Requirement(line) for line in lines("requirements.txt") if line]
    constraints = [Requirement(line) for line in lines("constraints.txt") if line]
    section = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S).group(1)
    for text in re.findall(r'"([^"]+)"', section):
        wanted = Requirement(text)
        own = [p for p in pins if p.name == wanted.name]
        assert own, f"{wanted.name} is not in requirements.txt"
        for pin in own:
            version = next(iter(pin.specifier)).version
            assert wanted.specifier.contains(version), f"{pin} is not within {wanted}"
    for pin in pins:
        same = [c for c in constraints if c.name == pin.name and c.specifier == pin.specifier]
        assert same, f"{pin} is not in constraints.txt"
