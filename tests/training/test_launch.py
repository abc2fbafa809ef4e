"""launch.py, torchrun for the pipeline: errors of all processes are said once, with a status that tells."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nanochat_fp4

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = Path(nanochat_fp4.__file__).with_name("console.py")
BAD = f"import runpy, sys; runpy.run_path({str(CONSOLE)!r})['print_error']('no data'); sys.exit(2)"


@pytest.fixture
def launch(fork_server):
    """Starts two processes of a command."""

    def start(*command: str, program: tuple[str, str] = ("-m", "nanochat_fp4.training.launch")) -> subprocess.Popen:
        argv = [str(fork_server.python), *program, "--standalone", "--nproc_per_node=2", "--no-python", *command]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_what_the_user_did_wrong_is_said_once(launch):
    """All processes fail alike: rank 0 says it, the status is its own, and nothing of torchrun's follows."""
    process = launch(sys.executable, "-c", BAD)
    assert process.communicate(timeout=120)[1] == "error: no data\n" and process.returncode == 2


def test_a_wrong_number_of_processes_is_one_line(launch):
    process = launch("--nproc_per_node=x", sys.executable)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 2 and err == "error: Unsupported nproc_per_node value: x\n"


def test_torchrun_repeats_it_last(launch):
    torchrun = "import nanochat_fp4, torch.distributed.run as run; run.main()"
    process = launch(sys.executable, "-c", BAD, program=("-c", torchrun))
    err = process.communicate(timeout=120)[1]
    assert "error: no data" in err.splitlines()[-2] and "error (rank 1)" not in err and process.returncode == 1


def test_a_process_that_was_killed_is_named(launch):
    process = launch("bash", "-c", "[ $RANK = 0 ] && sleep 60; kill -9 $BASHPID")
    err = process.communicate(timeout=120)[1]
    assert err.startswith("error: rank 1 (process ") and err.endswith("was ended by SIGKILL\n")
    assert process.returncode == 137


@pytest.mark.parametrize("number, status", [(signal.SIGUSR1, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_reaches_all(launch, number, status):
    process = launch(
        "bash", "-c", f"trap 'echo saved; exit {status}' {number}; echo ready; while :; do sleep 0.02; done"
    )
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    assert process.communicate(timeout=120)[0] == "saved\n" * 2 and process.returncode == status


def test_a_hangup_that_nohup_ignores_stays_ignored(fork_server):
    code = """
import signal
from nanochat_fp4.training import launch
signal.signal(signal.SIGHUP, signal.SIG_IGN)
command = ["bash", "-c", "kill -HUP $PPID; sleep 0.3; echo went on"]
launch.main(["--standalone", "--nproc_per_node=1", "--no-python", *command])
"""
    assert fork_server.run_ranks(code, 1) == ["went on\n"]


# ----------------------------------------------------------------------------------------------------------------------
# Signals while a program is still starting

STARTING = [(signal.SIGINT, -2), (signal.SIGTERM, -15), (signal.SIGHUP, -1), (signal.SIGUSR1, 0)]


@pytest.fixture
def slow_import(tmp_path):
    """An environment where `import torch` says so and takes a minute."""
    (tmp_path / "torch.py").write_text("import os, time\nos.write(1, b'importing\\n')\ntime.sleep(60)\n")
    path = os.pathsep.join(map(str, [tmp_path, ROOT, ROOT / "kernels"]))
    return {k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONPATH": path}


@pytest.mark.parametrize("module", ["scripts.base_train", "scripts.chat_eval", "nanochat_fp4.training.launch"])
@pytest.mark.parametrize("number, status", STARTING)
def test_a_signal_while_a_program_imports(slow_import, module, number, status):
    process = subprocess.Popen(
        [sys.executable, "-m", module], env=slow_import, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    assert process.communicate(timeout=300) == ("", "") and process.returncode == status


@pytest.mark.parametrize("number, status", STARTING)
def test_a_signal_while_ranks_import(launch, slow_import, number, status):
    """To the launcher and its ranks, as a terminal sends it."""
    rank = f"PYTHONPATH={slow_import['PYTHONPATH']} exec {sys.executable} -m scripts.base_train"
    process = launch("bash", "-c", f"echo $BASHPID; {rank}")
    lines = [process.stdout.readline() for _ in range(4)]
    assert lines.count("importing\n") == 2
    for pid in (line for line in lines if line != "importing\n"):
        os.kill(int(pid), number)
    process.send_signal(number)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == (128 - status if status else 0), err
    assert len(err.splitlines()) <= 1 and "Traceback" not in err, err


def test_another_program_keeps_its_signals(slow_import):
    """Who imports the package still gets a KeyboardInterrupt."""
    code = "try: import nanochat_fp4\nexcept KeyboardInterrupt: print('interrupted')"
    process = subprocess.Popen([sys.executable, "-c", code], env=slow_import, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[0] == "interrupted\n" and process.returncode == 0
