"""Every script that reads or writes a model refuses a tag that is no name of one folder."""

import importlib
import os

import pytest

from nanochat_fp4.errors import UserError

SCRIPTS = {
    "base_train": ["--depth=1", "--device-type=cpu"],
    "mid_train": ["--data=local"],
    "chat_sft": ["--data=local"],
    "chat_rl": [],
    "base_loss": [],
    "chat_eval": ["-i", "sft", "-a", "local"],
    "chat_cli": [],
    "chat_web": [],
    "export": ["--format=safetensors", "--out=out"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_tags_are_names_of_one_folder(script, tiny_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(f"scripts.{script}")
    before = os.listdir(tmp_path)
    for tag in ("../../x", "/tmp/x", ".", "..", "", "a/b", "a\nb"):
        with pytest.raises(UserError, match="is not the name of one folder; use up to") as refused:
            module.main([*SCRIPTS[script], f"--model-tag={tag}"])
        assert "\n" not in str(refused.value)
    assert set(os.listdir(tmp_path)) - {".out.lock"} == set(before)
