"""Signals to a run."""

import os
import signal

import pytest

from nanochat_fp4.signals import StopRequested, StopSignals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_noted_and_handlers_put_back(number):
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert not signals.received() and signals.signum is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)  # torchrun repeats itself; the first counts
        assert signals.received() and signals.signum == number
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


def test_signals_that_are_repeated_at_once_are_said_once(capfd, monkeypatch):
    """By shells, `timeout` and torchrun. A third Ctrl-C that ends a run: test_a_third_interrupt_ends_a_run_at_once."""
    with StopSignals():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), number)
    assert capfd.readouterr().err.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    with StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""
