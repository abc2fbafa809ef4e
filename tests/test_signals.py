"""Signals to a run."""

import os
import signal

import pytest

from nanochat_fp4.signals import StopRequested, StopSignals


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
