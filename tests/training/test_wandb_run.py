"""wandb without an account, without an answer, not installed."""

import importlib.machinery
import importlib.util
import json
import os
import sqlite3
import sys
import types

import pytest

from nanochat_fp4.cli import UserError
from nanochat_fp4.training.wandb_run import NO_TRACKER, setup_tracker


class FakeWandb(types.ModuleType):
    """Records the modes of init; fails in those given."""

    def __init__(self, fail=()):
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.fail, self.modes = fail, []

    @staticmethod
    def Settings(**kwargs):
        assert kwargs["init_timeout"] > 0
        return kwargs

    def init(self, mode, settings, **kwargs):
        self.modes.append(mode)
        if mode in self.fail:
            raise RuntimeError(f"{mode} failed")
        return types.SimpleNamespace(mode=mode, dir=os.path.join(kwargs["dir"], "wandb", "run-1", "files"))


@pytest.fixture
def no_account(monkeypatch, tmp_path, base_dir):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


@pytest.mark.parametrize("run, rank", [("dummy", "0"), ("", "0"), (None, "0"), ("run", "1")])
def test_no_wandb_unless_asked_for(run, rank, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    monkeypatch.setenv("RANK", rank)
    wandb_run = setup_tracker(run, "nanochat", {})
    assert wandb_run is NO_TRACKER
    wandb_run.log({"loss": 1, "step": 1}, step=1)
    wandb_run.finish()
    assert fake.modes == []


def test_without_an_account_wandb_is_offline(no_account, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    assert setup_tracker("run", "nanochat", {}).mode == "offline"
    assert fake.modes == ["offline"] and "wandb sync" in capsys.readouterr().out


def test_with_an_account_wandb_is_online(no_account, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123\n")
    assert setup_tracker("run", "nanochat", {}).mode == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    setup_tracker("run", "nanochat", {})
    assert fake.modes == ["online", "disabled"]


def test_wandb_that_does_not_answer_does_not_stop_the_run(no_account, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "x")
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb(fail=["online"]))
    assert setup_tracker("run", "nanochat", {}).mode == "offline" and fake.modes == ["online", "offline"]
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(fail=["online", "offline"]))
    assert setup_tracker("run", "nanochat", {}) is NO_TRACKER


def test_wandb_asked_for_but_not_installed(no_account, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install .*\[train\]', or set WANDB_RUN=dummy"):
        setup_tracker("run", "nanochat", {})


# ----------------------------------------------------------------------------------------------------------------------
# trackio


def test_trackio_keeps_the_run_on_this_machine(base_dir, monkeypatch, capsys):
    """The real package, where it is installed: the values, by step, are in its file under the base directory."""
    if importlib.util.find_spec("trackio") is None:  # its import would fix its folder
        pytest.skip("trackio is not installed")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setenv("TRACKER", "trackio")
    run = setup_tracker("d2_clover", "nanochat", {"method": "clover"})
    for step in (0, 10):
        values = {
            "train/loss": 5.0 - step / 10,
            "within layers/h.0/output_error": 0.1,
            "total_training_tokens": 512 * step,
        }
        run.log({"step": step, **values}, step=step)
    run.finish()
    assert "trackio show" in capsys.readouterr().out
    monkeypatch.delenv("TRACKIO_DIR")
    rows = sqlite3.connect(next((base_dir / "trackio").glob("nanochat*.db"))).execute(
        "select step, metrics from metrics where run_name = 'd2_clover' order by step"
    )
    values = [(step, json.loads(metrics)) for step, metrics in rows]
    assert [(step, v["train/loss"]) for step, v in values] == [(0, 5.0), (10, 4.0)]
    assert max(values[0][1]) == "within layers/h.0/output_error"  # the last section of the page


def test_a_trackio_that_does_not_start_stops_nothing(base_dir, monkeypatch):
    def init(**kwargs):
        raise RuntimeError("no space left")

    monkeypatch.setitem(
        sys.modules,
        "trackio",
        types.SimpleNamespace(init=init, __spec__=importlib.machinery.ModuleSpec("trackio", None)),
    )
    monkeypatch.setenv("TRACKER", "trackio")
    assert setup_tracker("run", "nanochat", {}) is NO_TRACKER
    monkeypatch.setenv("RANK", "1")
    assert setup_tracker("run", "nanochat", {}) is NO_TRACKER


def test_trackers_that_are_not_there(base_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setenv("TRACKER", "trackio")
    with pytest.raises(UserError, match=r"pip install .*\[trackio\]'"):
        setup_tracker("run", "nanochat", {})
    assert setup_tracker("dummy", "nanochat", {}) is NO_TRACKER
    monkeypatch.setenv("TRACKER", "trackoi")
    with pytest.raises(UserError, match="TRACKER=trackoi"):
        setup_tracker("run", "nanochat", {})
