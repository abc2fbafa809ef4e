"""An import is a run like any other; a model tag is checked in one place by every script."""

import importlib
import os

import pytest
import torch
from _exporting import CONFIGS

from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.errors import UserError
from nanochat_fp4.export.read_llama import Imported
from nanochat_fp4.models.llama import Llama
from nanochat_fp4.training.checkpoint_manager import load_checkpoint
from nanochat_fp4.training.resume import held_run
from scripts import import_model

ABOUT = {"name": "a model", "license": "none", "types": {"F32": 1}}


@pytest.fixture
def imported(tiny_base, tmp_path, monkeypatch):
    """imported(*flags): a model whose head is full of the number of the import, from 1."""
    file, count = tmp_path / "model.gguf", 0
    file.touch()

    def read_llama(*_):
        nonlocal count
        count += 1
        model = Llama(CONFIGS["llama"])
        model.init_weights()
        torch.nn.init.constant_(model.lm_head.weight, count)
        return Imported(model.config, model.state_dict(), get_tokenizer(), ABOUT)

    monkeypatch.setattr(import_model, "read_llama", read_llama)
    return lambda *flags: import_model.main([str(file), *flags])


def value_of(base, stage: str) -> float:
    weights, _, meta = load_checkpoint(base / f"{stage}_checkpoints" / "tag", 0, "cpu")
    assert meta["imported"]["name"] == "a model"
    return float(weights["lm_head.weight"].mean())


def test_a_run_is_replaced_with_overwrite_alone(imported, tiny_base, capsys):
    imported("--model-tag=tag", "--stages=base,mid,base")
    assert value_of(tiny_base, "base") == value_of(tiny_base, "mid") == 1
    for stages in ("base", "sft,mid"):
        with pytest.raises(
            UserError, match=r"already holds a run \(checkpoint of step 0\); replace it with --overw"
        ) as e:
            imported("--model-tag=tag", f"--stages={stages}")
        assert "\n" not in str(e.value)
    assert not (tiny_base / "chatsft_checkpoints" / "tag").exists()
    imported("--model-tag=tag", "--stages=mid", "--overwrite")
    assert value_of(tiny_base, "base") == 1 and value_of(tiny_base, "mid") == 2


def test_the_folder_of_a_run_is_nobody_elses(imported, tiny_base):
    with held_run(tiny_base / "mid_checkpoints" / "tag"):
        with pytest.raises(UserError, match="another run is training in"):
            imported("--model-tag=tag", "--overwrite")
    assert not (tiny_base / "base_checkpoints" / "tag").exists()
    imported("--model-tag=tag")
    assert value_of(tiny_base, "base") == 1


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
    "import_model": ["some.gguf"],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_tags_are_names_of_one_folder(script, tiny_base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.gguf").touch()
    module = importlib.import_module(f"scripts.{script}")
    before = os.listdir(tmp_path)
    for tag in ("../../x", "/tmp/x", ".", "..", "", "a/b", "a\nb"):
        with pytest.raises(UserError, match="is not the name of one folder; use up to") as refused:
            module.main([*SCRIPTS[script], f"--model-tag={tag}"])
        assert "\n" not in str(refused.value)
    assert set(os.listdir(tmp_path)) - {".out.lock"} == set(before)
