"""launch.py, torchrun for the pipeline: errors of all processes are said once, with a status that tells."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nanochat_fp4

CONSOLE = Path(nanochat_fp4.__file__).with_name("console.py")
BAD = f"import runpy, sys; runpy.run_path({str(CONSOLE)!r})['print_error']('no data'); sys.exit(2)"


@pytest.fixture
def launch(fork_server):
    """Starts two processes of a command."""

    def start(*command: str, module: str = "nanochat_fp4.training.launch") -> subprocess.Popen:
        argv = [str(fork_server.python), "-m", module, "--standalone", "--nproc_per_node=2", "--no-python", *command]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return start


def test_what_the_user_did_wrong_is_said_once(launch):
    """All processes fail alike: rank 0 says it, the status is its own, and nothing of torchrun's follows."""
    process = launch(sys.executable, "-c", BAD)
    assert process.communicate(timeout=120)[1] == "error: no data\n" and process.returncode == 2


def test_torchrun_repeats_it_last(launch):
    process = launch(sys.executable, "-c", BAD, module="torch.distributed.run")
    err = process.communicate(timeout=120)[1]
    assert "error: no data" in err.splitlines()[-2] and "error (rank 1)" not in err and process.returncode == 1


def test_a_process_that_was_killed_is_named(launch):
    process = launch("bash", "-c", "[ $RANK = 0 ] && sleep 60; kill -9 $BASHPID")
    err = process.communicate(timeout=120)[1]
    assert err.startswith("error: rank 1 (process ") and err.endswith("was ended by SIGKILL\n")
    assert process.returncode == 137


@pytest.mark.parametrize("number, status", [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_a_signal_reaches_all(launch, number, status):
    process = launch(
        "bash", "-c", f"trap 'echo saved; exit {status}' {number}; echo ready; while :; do sleep 0.02; done"
    )
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    assert process.communicate(timeout=120)[0] == "saved\n" * 2 and process.returncode == status
