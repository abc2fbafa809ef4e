"""wandb without an account, without an answer, not installed."""

import importlib.machinery
import os
import sys
import types

import pytest

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
    with pytest.raises(ModuleNotFoundError, match="wandb is not installed"):
        setup_tracker("run", "nanochat", {})
