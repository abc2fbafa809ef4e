"""speedrun_fp4.sh, run1000_fp4.sh and dev/setup.sh: a toy's run, reuse, failing stages, signals. Plans: test_plan."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from _assertions import wait_until

from nanochat_fp4.cli import UserError, switched_on
from scripts.plan import Plan, calls

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


def run_bash(words: list[str], environment: dict, cwd: Path, seconds: float) -> subprocess.CompletedProcess:
    """bash in a process group of its own, which ends as a whole at the deadline. A process that it leaves behind has
    its output, so that is a file: of a pipe the end would be waited for."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        how = {"cwd": cwd, "env": environment, "stdout": out, "stderr": err, "start_new_session": True}
        process = subprocess.Popen(["bash", *words], **how)
        try:
            status = process.wait(seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            said = [file.read() for file in (out, err) if file.seek(0) == 0]
            print(*said, sep="\n")  # pytest shows it if the test fails
    return subprocess.CompletedProcess(words, status, *said)


def bash(script: str, environment: dict, **variables: str) -> subprocess.CompletedProcess:
    return run_bash([script], environment | variables, ROOT, 900)


SHELL = "set -euo pipefail; ROOT=$PWD; source dev/setup.sh; "
PIPELINE = f"cd {ROOT}; {SHELL}source dev/pipeline.sh; "


def shell(command: str, environment: dict, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """The command where the functions of dev/setup.sh, or those of PIPELINE too, are known."""
    return run_bash(["-c", command], environment | variables, cwd, 300)


def test_a_deadline_ends_what_bash_has_started(tmp_path):
    """Also what ignores a signal that asks. A pipe has its end when nobody is left who could write into it."""
    os.mkfifo(tmp_path / "held")
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(subprocess.TimeoutExpired):
        run_bash(["-c", "exec 9>held; trap '' TERM; sleep 600 & wait"], dict(os.environ), tmp_path, 2)

    def all_ended() -> bool:
        with contextlib.suppress(BlockingIOError):
            return os.read(reader, 1) == b""
        return False

    wait_until(all_ended)
    os.close(reader)


@pytest.mark.parametrize("script", ["speedrun_fp4.sh", "run1000_fp4.sh", "dev/measure.sh"])
def test_help_is_what_the_script_says_of_itself(script):
    done = shell(f"bash {script} --help", dict(os.environ))
    assert done.returncode == 0 and "PLAN_ONLY=1" in done.stdout and "source dev" not in done.stdout, done


@pytest.mark.parametrize("script", ["speedrun_fp4.sh", "run1000_fp4.sh"])
def test_another_shell_names_bash(script, tmp_path):
    """`sh` of Debian and Ubuntu is dash. A bash that is not told its version stands for it."""
    (tmp_path / "script.sh").write_text(f"unset BASH_VERSION\n{(ROOT / script).read_text()}")
    done = shell("bash script.sh", dict(os.environ), tmp_path)
    assert done.returncode == 2 and "bash" in done.stderr and done.stderr.count("\n") == 1, done


@pytest.mark.parametrize(
    "command, message",
    [
        ("speedrun_fp4.sh --depth=4", "DEPTH=4"),
        ("run1000_fp4.sh clover", "variables"),
        ("dev/measure.sh --limit=9", "--help"),
    ],
)
def test_a_flag_is_answered_with_what_the_script_accepts(command, message):
    wrong = shell(f"bash {command}", dict(os.environ))
    assert wrong.returncode == 2 and message in wrong.stderr and wrong.stderr.count("\n") == 1, wrong.stderr


@pytest.mark.parametrize("script", ["tests/run.sh", "dev/measure.sh"])
def test_help_from_any_folder_installs_and_runs_nothing(script):
    place = ROOT / script
    done = shell(f"bash {place.name} --help", dict(os.environ) | {"VENV": "/nowhere"}, cwd=place.parent)
    assert (done.returncode, done.stderr) == (0, ""), done
    assert {"tests/run.sh": "--slow", "dev/measure.sh": "PARTS="}[script] in done.stdout


@pytest.mark.parametrize(
    "words, message",
    [
        ("nosuch.py", "there is no nosuch.py in "),
        ("-x tests/nosuch.py::test_it", "there is no tests/nosuch.py in "),
        ("tests/nosuch", "there is no tests/nosuch in "),
        ("test_gpt.py", "did you mean tests/models/test_gpt.py?"),
        ("--junitxml tmp/new.xml -k a/b tests/models tests/test_files.py::test_it", ""),
    ],
)
def test_tests_that_are_not_there_are_named(words, message):
    """The processes of pytest-xdist swallow pytest's own line."""
    done = shell(f"bash tests/run.sh {words}", dict(os.environ) | {"VENV": "/nowhere"})
    assert done.returncode == 2 and done.stderr.startswith(f"error: {'' if message else 'VENV=/nowhere has no'}")
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_an_unformatted_line_is_said_to_have_kept_the_tests_from_running(tmp_path):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    answers = "*'ruff check'*) exit ;; *'ruff format'*) exit 1 ;; *pytest*) echo tested; exit ;;"
    python.write_text(f'#!/bin/sh\ncase "$*" in {answers} esac\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    done = shell("bash tests/run.sh", dict(os.environ) | {"VENV": str(tmp_path)})
    assert done.returncode == 2 and "tested" not in done.stdout, done
    assert "ruff format ." in done.stderr.splitlines()[-1], done


def smi(environment: dict, script: str) -> None:
    (Path(environment["PATH"].split(":")[0]) / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")


# ----------------------------------------------------------------------------------------------------------------------
# Bad input: one line on stderr, a status that is not 0, and nothing begun


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"DETPH": "3"}, "error: DETPH .*did you mean DEPTH"),
        ({"VENV": "/nowhere"}, "error: VENV=/nowhere .*bin/python"),
        ({"NANOCHAT_BASE_DIR": "/dev/null/x"}, "error: .*/dev/null/x"),
        ({"DATA_DIR": "/nowhere"}, "error: .*/nowhere "),
        ({"VOCAB_SIZE": "999"}, "error: .* 300 tokens, .*999"),
        ({"PLAN_ONLY": "maybe"}, "error: PLAN_ONLY=maybe: expected 1 .* or 0"),
        ({"COMPARE": "on"}, "error: COMPARE=on: expected 1 .* or 0"),
        ({"TOTAL_BATCH": "100"}, "error: TOTAL_BATCH=100 "),
        ({"GPU": "rtx5090"}, "error: GPU .*PLAN_ONLY=1"),
    ],
)
def test_bad_input_ends_before_anything_is_made(environment, variables, message):
    done = bash("speedrun_fp4.sh", environment, **TOY | variables)
    assert done.returncode == 2 and re.match(message, done.stderr) and len(done.stderr.splitlines()) == 1, done.stderr
    assert "==" not in done.stdout and not list(Path(environment["NANOCHAT_BASE_DIR"]).glob("base_checkpoints"))


def test_a_switch_of_the_scripts_understands_what_the_plan_does(monkeypatch):
    """bash and Python have a function each, which agree on every spelling."""
    for text in ("", "0", "1", "no", "Yes", "true", "falsE", "maybe", "2", "1 0"):
        monkeypatch.setenv("DRY_RUN", text)
        done = shell(SHELL + "if switched_on DRY_RUN; then echo on; else echo off; fi", dict(os.environ))
        try:
            expected = (0, "on\n" if switched_on("DRY_RUN") else "off\n", "")
        except UserError as e:
            expected = (2, "", f"error: {e}\n")
        assert (done.returncode, done.stdout, done.stderr) == expected, text


def test_relative_folders_are_the_callers(environment, tmp_path):
    """The scripts work in their own folder."""
    own = {"VOCAB_SIZE": "300", "PLAN_ONLY": "1", "DATA_DIR": "text"}
    done = shell(f"bash {ROOT}/speedrun_fp4.sh", environment, tmp_path, **own)
    assert f"DATA_DIR (--data-dir) {tmp_path}/text is not there" in done.stderr
    done = shell(f"bash {ROOT}/speedrun_fp4.sh", environment, tmp_path, **own | {"DATA_DIR": "~/text", "HOME": "/of"})
    assert "DATA_DIR (--data-dir) /of/text is not there" in done.stderr
    (tmp_path / "mine.py").write_text("print('mine')")
    done = shell(f"bash {ROOT}/speedrun_fp4.sh", environment, tmp_path, PLAN_ONLY="1", RECIPES="mine.py,lab/none.py")
    assert "mine\n" in done.stdout and f"RECIPES: there is no file {tmp_path}/lab/none.py" in done.stderr
    in_background = f"trap '' INT; bash {ROOT}/speedrun_fp4.sh"  # The script starts again, because SIGINT is ignored.
    done = shell(in_background, environment, tmp_path, **own)
    assert f"DATA_DIR (--data-dir) {tmp_path}/text is not there" in done.stderr


@pytest.mark.parametrize("gpu", ["", "rtx5090"])
def test_a_plan_makes_nothing(environment, tmp_path, gpu):
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1", GPU=gpu, NANOCHAT_BASE_DIR=str(tmp_path / "base"))
    assert done.returncode == 0 and "bash speedrun_fp4.sh" in done.stdout and not (tmp_path / "base").exists()


def test_environment_without_a_module(environment):
    Path(environment["VENV"], "bin", "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -I "$@"\n')
    done = bash("speedrun_fp4.sh", environment, PLAN_ONLY="1")
    assert done.returncode == 2 and re.match(r"error: VENV=\S+ lacks: torch ", done.stderr)


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


# ----------------------------------------------------------------------------------------------------------------------
# The set-up of a clone

SET_UP = f'{SHELL} setup_environment; echo "$PY"'
# A Python whose "venv" makes a copy of itself and whose "pip" logs its call in the clone.
FAKE_PYTHON = f"""#!/bin/bash
case "$1 $2" in
"-m venv") mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
"-m pip") echo "$*" >>calls.log; while [ -e hold ]; do sleep 0.02; done ;;
*) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def clone(environment, tmp_path):
    """(a folder with what a set-up reads, where all modules count as there; an environment with FAKE_PYTHON)."""
    folder, python = tmp_path / "clone", tmp_path / "python"
    requirements = ("requirements.txt", "requirements-gpu.txt", "constraints.txt")
    for name in ("dev/setup.sh", "dev/signals.sh", *requirements, "pyproject.toml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "dev/missing_modules.py").touch()
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    kept = {k: v for k, v in environment.items() if k != "VENV"}
    return folder, kept | {"PYTHON": str(python), "PIP_TORCH_ARGS": "-q"}


def test_no_python_that_fits(clone):
    folder, variables = clone
    done = shell(SET_UP, variables, folder, PYTHON="python-that-is-not")
    assert done.returncode == 2 and done.stderr.startswith("error: PYTHON=python-that-is-not ")
    assert not (folder / ".venv").exists()


def test_a_second_set_up_installs_nothing(clone):
    folder, variables = clone
    first, second = (shell(SET_UP, variables, folder) for _ in range(2))
    assert first.returncode == second.returncode == 0 and first.stdout.count("setup: installing") == 3, first.stderr
    assert second.stdout == f"{folder}/.venv/bin/python\n"


@pytest.mark.parametrize(
    "capability, torch", [("", "2.13.0"), ("9.0", "2.11.0"), ("12.0", "2.11.0"), ("10.0", "2.13.0"), ("12.1", "2.13.0")]
)
def test_a_gpu_gets_the_torch_that_was_measured_unless_it_needs_a_newer_one(clone, capability, torch):
    folder, variables = clone
    if capability:
        smi(variables, f'case "$1" in -L) echo "GPU 0: X";; *compute_cap*) echo "{capability}";; esac')
    done = shell(SET_UP, variables | {"CC": "cc"}, folder)
    assert f"installing torch=={torch} " in done.stdout, done.stderr
    requirements, constraints = (
        (folder / ".venv" / f"{name}.txt").read_text() for name in ("requirements", "constraints")
    )
    assert f"\ntorch=={torch}\n" in requirements and "tiktoken==" in requirements
    assert f"\ntorch=={torch}\n" in constraints and ("nvidia-nccl" in constraints) == (torch == "2.13.0")


def test_a_sign_of_life_ends_with_its_work_although_a_signal_was_lost(environment):
    """A signal that comes before the shell that prints it has its trap: it waited for ever, and so did the set-up."""
    lost = 'kill() { [ "$1" != -0 ] || builtin kill "$@"; }; sleep() { command sleep 0.1; }; SETUP_LOG=/dev/null'
    done = shell(
        f"set -euo pipefail; ROOT=$PWD; source dev/setup.sh; {lost}; quietly work true; echo ended", environment
    )
    assert done.stdout == "setup: work\nended\n", done


def test_a_plan_says_first_how_long_the_installation_takes(clone):
    folder, variables = clone
    first, second = (shell(SET_UP, variables, folder, PLAN_ONLY="1").stdout.splitlines() for _ in range(2))
    assert "minutes" in first[0] and len(second) == 1


def test_two_set_ups_at_once_install_once(clone):
    """The second one waits, says so in one line, and uses what the first one has installed."""
    folder, variables = clone
    (folder / "hold").touch()  # pip takes until this file is gone
    set_ups = []
    try:
        for expected in ("setup: installing torch", "setup: another command is installing into .venv; waiting"):
            command = ["bash", "-c", SET_UP]
            set_ups.append(subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True))
            lines = iter(set_ups[-1].stdout.readline, "")
            line = next(line for line in lines if "making .venv" not in line)
            assert line.startswith(expected)
    finally:
        (folder / "hold").unlink()
        rest = [process.communicate(timeout=300)[0] for process in set_ups]
    assert [process.returncode for process in set_ups] == [0, 0]
    assert rest[1] == f"{folder}/.venv/bin/python\n" and (folder / "calls.log").read_text().count("pip install") == 3


def test_a_set_up_that_waits_ends_at_a_signal(clone):
    folder, variables = clone
    with open(folder / ".venv.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = ["bash", "-c", SET_UP]
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True)
        assert "waiting" in process.stdout.readline()
        process.terminate()
        assert process.wait(60) == 143 and not (folder / ".venv").exists()


def test_nothing_is_installed_into_a_linked_environment(clone, tmp_path):
    """It may be another clone's, whose own copy of this package would be replaced. It is checked as VENV is."""
    folder, variables = clone
    others = tmp_path / "others"
    (folder / ".venv").symlink_to(others)
    done = shell(SET_UP, variables, folder)
    problem = f"error: .venv is a link to {others}, which has no bin/python; remove the link to have .venv made\n"
    assert (done.returncode, done.stderr) == (2, problem)
    (others / "bin").mkdir(parents=True)
    shutil.copy(variables["PYTHON"], others / "bin/python")
    done = shell(SET_UP, variables, folder)
    assert (done.returncode, done.stdout) == (0, f"{folder}/.venv/bin/python\n") and not (folder / "calls.log").exists()
    (folder / "dev/missing_modules.py").write_text("print('torch')\n")
    done = shell(SET_UP, variables, folder)
    assert done.returncode == 2 and "which lacks: torch; install them there, or remove the link" in done.stderr


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
    assert f"\n{clover}: " in first.stdout and f"\n{bf16}: " not in first.stdout  # whose commands are offered
    assert text.count("self-check passed") == 1  # under the environment of the method that quantizes

    made = [p for p in base.rglob("*") if p.suffix in (".pt", ".json")]
    state = {p: p.stat().st_mtime_ns for p in made}
    # Another method: the same tokenizer and baseline, a run of its own.
    toy = TOY | {"STAGES": "tok base report", "COMPARE": "1", "QAT_METHOD": "nvidia"}
    second = bash("speedrun_fp4.sh", environment, **toy)
    assert second.returncode == 0 and second.stdout.splitlines()[-1] == str(path), second.stderr[-2000:]
    assert {p: p.stat().st_mtime_ns for p in state} == state  # nothing was made again
    assert "base training, bf16: done before" in second.stdout and "base training, nvidia\n" in second.stdout
    text = path.read_text()
    assert "| d1_nvidia" in text and f"| {clover} |" in text  # every run of the folder


def test_two_runs_at_once_do_not_share_a_base_directory(environment):
    """The second one ends in one line, and leaves the files of the first one alone. A plan alone is made."""
    report = Path(environment["NANOCHAT_BASE_DIR"]) / "report"
    report.mkdir()
    for name in ("left_out.txt", "calls.sh"):
        (report / name).write_text("of the first run\n")
    command = ["bash", "-c", f"{PIPELINE} lock_base_dir; sleep 300 & echo $! ready; wait"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True) as first:
        try:
            orphan, ready = first.stdout.readline().split()
            assert ready == "ready"
            first.kill()
            first.wait()  # A stage goes on without its script, and has the lock.
            second = bash("speedrun_fp4.sh", environment, **TOY)
            plan = bash("speedrun_fp4.sh", environment, **TOY, PLAN_ONLY="1")
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    problem = f"error: another speedrun_fp4.sh or run1000_fp4.sh is at work in {report.parent}: process {first.pid} on "
    assert (second.returncode, second.stdout) == (2, "") and second.stderr.startswith(problem), second
    assert not Path("/proc/self/fd").exists() or re.search(rf"\b{orphan}\b", second.stderr), second.stderr
    assert second.stderr.count("\n") == 1 and plan.returncode == 0
    assert f"at work     process {first.pid} on " in plan.stdout and "after the end of what is at work: " in plan.stdout
    assert {p.read_text() for p in report.iterdir()} == {"of the first run\n"}
    assert shell(f"{PIPELINE} lock_base_dir", environment).returncode == 0


def test_a_stage_that_fails_takes_only_those_that_need_it(environment, tmp_path):
    """The script's status is that of the first failure. What was left out is listed for the report."""
    base = Path(environment["NANOCHAT_BASE_DIR"])
    (base / "report").mkdir()
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/bash\ncase $2 in bad) exit 3;; slow) sleep 0.3; echo late >$3;; *) echo "ran $*";; esac\n'
    )
    python.chmod(0o755)
    calls = f"""beside download '' '' '' Text 1 slow {tmp_path}/late
stage base:a '' '' '' 'base training, a' 1 bad
stage mid:a base:a '' '' 'mid-training, a' 1 mid
stage sft:a mid:a '' '' 'SFT, a' 1 sft
stage base:b download '' '' 'base training, b' 1 base --flag='two words'
stage report '' '' '' report 1 report
cat {tmp_path}/late; exit $STATUS"""
    done = shell(f"{PIPELINE} PY={python}; {calls}", environment)
    assert done.returncode == 3 and "ran -m base --flag=two words\n" in done.stdout, done.stdout + done.stderr
    assert "ran -m mid" not in done.stdout and "ran -m sft" not in done.stdout and "ran -m report" in done.stdout
    assert done.stdout.endswith("late\n") and "base training, a failed (exit status 3)" in done.stderr
    left = (base / "report/left_out.txt").read_text().splitlines()
    assert [line.partition(", because")[0] for line in left] == ["base training, a", "mid-training, a", "SFT, a"]


@pytest.mark.parametrize("weights, done", [(None, True), (-160, True), (-40, False)])
def test_a_stage_is_done_if_no_weights_are_newer_than_its_section(environment, weights, done):
    """weights: their time in seconds; the section's is -100. They lie in the folder of a step."""
    base = Path(environment["NANOCHAT_BASE_DIR"])
    (base / "mid.json").write_text("{}")
    os.utime(base / "mid.json", (time.time() - 100,) * 2)
    if weights is not None:
        file = base / "base_checkpoints/a/step_000001/model_000001.pt"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (time.time() + weights,) * 2)
    ran = shell(f"{PIPELINE} PY=true; stage mid:a '' mid.json base_checkpoints/a 'mid-training, a' 1 mid", environment)
    assert ran.returncode == 0 and ("done before" in ran.stdout) == done, ran.stdout + ran.stderr


@pytest.mark.parametrize("compare", ["0", "1"])
def test_each_stage_of_a_real_plan_fails_without_taking_others_along(environment, tmp_path, compare):
    """Only those whose needs, or the needs of those, have failed are left out; the report is always made."""
    variables = {"GPU": "h100", "PLAN_ONLY": "1", "COMPARE": compare, "STAGES": "", "EVAL_ARGS": "-a local"}
    plan = Plan("speedrun", variables)
    script, ran = tmp_path / "calls.sh", tmp_path / "ran"
    script.write_text(calls(plan.stages))
    (Path(environment["NANOCHAT_BASE_DIR"]) / "report").mkdir()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "$*" >> {ran}\n[ "$*" != "$FAILING" ]\n')
    python.chmod(0o755)
    assert len(plan.stages) >= 11
    for failing in plan.stages:
        gone = {failing.name}
        for stage in plan.stages:
            gone |= {stage.name} if gone & set(stage.needs.split()) else set()
        ran.unlink(missing_ok=True)
        command = f"{PIPELINE} PY={python}; source {script}; exit $STATUS"
        done = shell(command, environment, FAILING=" ".join(["-m", *failing.command]))
        expected = {s.name: " ".join(["-m", *s.command]) for s in plan.stages if s.name not in gone - {failing.name}}
        started = set(ran.read_text().splitlines())
        if "waiting for the download" not in done.stdout:  # Then the script may end before it has begun.
            started |= {expected["download"]} if "download" in expected else set()
        assert done.returncode == 1 and started == set(expected.values()), failing.name


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
    assert f"so there are {record['steps']} (NUM_ITERATIONS)" in first.stdout
    (run,) = (p.name for p in (base / "base_checkpoints").iterdir() if p.is_dir())
    assert "_steps" not in run  # as PLAN_ONLY prints it
    second = bash("speedrun_fp4.sh", environment, **toy)
    assert second.returncode == 0 and second.stdout.count("done before") == 6, second.stdout


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
        for name in ("dev/setup.sh", "dev/signals.sh", "dev/pipeline.sh", "dev/interruptible.py"):
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
    name = {130: "Ctrl-C (SIGINT)", 143: "SIGTERM", 129: "SIGHUP"}[status]  # what was sent
    line = f"stopped by {name} (exit status {status}); the same command again goes on from what is saved\n"
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


def test_a_download_that_no_stage_waits_for_has_its_end_and_its_status(environment, tmp_path):
    """STAGES=tok ends with the text in the background."""
    plan = "beside download '' '' '' text 1 nosuchmodule\n"
    folder = tmp_path / "base"
    command = f'{PIPELINE}run() {{ printf \'%s\' "$CALLS" >"${{@: -1}}"; }}; pipeline speedrun'
    done = shell(command, environment, CALLS=plan, NANOCHAT_BASE_DIR=str(folder))
    assert done.returncode == 1 and "download.log" in done.stderr and "left out: the download" in done.stdout, done
    assert "nosuchmodule" in (folder / "download.log").read_text()


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
    (meta,) = base.glob("base_checkpoints/*/step_*/meta_*.json")
    stopped = int(meta.stem.partition("_")[2])
    done = bash("speedrun_fp4.sh", environment, **variables)
    assert done.returncode == 0 and f"Resuming from step {stopped}" in done.stdout, done.stderr
    records = [json.loads(line) for line in (meta.parents[1] / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records if r["event"] == "train"] == list(range(60)) and stopped < 60


# What a step or a save takes on a large model. RECIPES runs it in the plan, too.
SLOW = """
import pathlib, time
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.training import checkpoint_manager
owner, name = {"step": (GPT, "clip_gradients"), "save": (checkpoint_manager, "save_checkpoint")}["PLACE"]
real = getattr(owner, name)
def slow(*args, **kwargs):
    pathlib.Path("MARK").touch()
    time.sleep(1.5)
    return real(*args, **kwargs)
setattr(owner, name, slow)
"""


@pytest.mark.parametrize("place", ["step", "save"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_saves_once(environment, tmp_path, place, number):
    """All processes of the script get it, as from a terminal; and each is passed on by bash."""
    mark, recipes = tmp_path / "mark", tmp_path / "slow.py"
    recipes.write_text(SLOW.replace("PLACE", place).replace("MARK", str(mark)))
    variables = TOY | {"QAT_METHOD": "bf16", "STAGES": "base", "NUM_ITERATIONS": "9", "EVAL_EVERY": "-1"}
    variables |= {"SAVE_EVERY": "1" if place == "save" else "1000", "RECIPES": str(recipes)}
    script = subprocess.Popen(
        ["bash", "speedrun_fp4.sh"], cwd=ROOT, env=environment | variables, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        wait_until(mark.exists)
        for _ in range(2):
            os.killpg(script.pid, number)
            time.sleep(0.4)
        out, err = script.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 128 + number, err
    metas = Path(environment["NANOCHAT_BASE_DIR"]).glob("base_checkpoints/*/step_*/meta_*.json")
    stopped = max(int(meta.stem.partition("_")[2]) for meta in metas)
    assert f"stopped at step {stopped} " in out and f"{number.name} saving" in err, out + err


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


@pytest.mark.parametrize("script", ["speedrun_fp4.sh", "run1000_fp4.sh", "dev/measure.sh"])
def test_a_variable_behind_the_script_is_refused_with_the_command_that_sets_it(environment, script):
    done = shell(f"bash {script} QAT_METHOD=fp8 'STAGES=tok base'", environment)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.endswith(f"in front of bash: QAT_METHOD=fp8 STAGES=tok\\ base bash {script}\n")
