"""Signals to a run and to a program that is still starting; the last word under torchrun."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_fp4.signals import StopRequested, StopSignals

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signals_are_noted_and_handlers_put_back(number, status):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.received() and signals.exit_code == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun repeats itself; the first counts
        assert signals.received() and signals.exit_code == status and signals.name == signal.Signals(number).name
        with pytest.raises(StopRequested):
            list(signals.watch(iter([1, 2])))
    assert signal.getsignal(number) is before


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not signals.received()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_torchrun_repeats_an_interrupt_and_a_later_one_stops_at_once(monkeypatch):
    """Without torchrun: test_a_second_interrupt_ends_a_run_at_once."""
    monkeypatch.setenv("RANK", "0")
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        signals.since -= 3
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# ----------------------------------------------------------------------------------------------------------------------
# While a program is still starting


@pytest.fixture
def slow_import(tmp_path):
    """An environment where `import torch` says so and takes a minute."""
    (tmp_path / "torch.py").write_text("import os, time\nos.write(1, b'importing\\n')\ntime.sleep(60)\n")
    path = os.pathsep.join(map(str, [tmp_path, ROOT, ROOT / "kernels"]))
    return {k: v for k, v in os.environ.items() if k != "RANK"} | {"PYTHONPATH": path}


@pytest.mark.parametrize("module", ["scripts.base_train", "scripts.chat_eval"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_program_imports(slow_import, module, number):
    process = subprocess.Popen(
        [sys.executable, "-m", module], env=slow_import, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "importing\n"
    process.send_signal(number)
    assert process.communicate(timeout=300) == ("", "") and process.returncode == -number


def test_another_program_keeps_its_signals(slow_import):
    """Who imports the package still gets a KeyboardInterrupt."""
    code = "try: import nanochat_fp4\nexcept KeyboardInterrupt: print('interrupted')"
    process = subprocess.Popen([sys.executable, "-c", code], env=slow_import, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=300)[0] == "interrupted\n" and process.returncode == 0


# ----------------------------------------------------------------------------------------------------------------------
# torchrun


def test_torchrun_repeats_the_one_line_last(fork_server):
    """All processes fail alike: rank 0 says why, the other one does not, and torchrun's report ends with it."""
    # A busy machine may start rank 0 seconds later than rank 1, which waits long enough here.
    bad = "from nanochat_fp4 import console; console.OTHER_RANKS_WAIT = 200; console.print_error('no data')"
    bad += "; raise SystemExit(2)"
    code = "import nanochat_fp4, torch.distributed.run as run; run.main()"
    argv = [str(fork_server.python), "-c", code, "--standalone", "--nproc_per_node=2", "--no-python"]
    done = subprocess.run([*argv, str(fork_server.python), "-c", bad], capture_output=True, text=True, timeout=300)
    assert "error: no data" in done.stderr.splitlines()[-2] and "error (rank 1)" not in done.stderr
    assert done.returncode == 1
