"""nf.convert on a model of transformers, in their Trainer: the example of docs/export.md is what runs here."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import nanochat_fp4 as nf

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "export.md"


@pytest.mark.skipif(
    any(importlib.util.find_spec(p) is None for p in ("transformers", "accelerate")),
    reason="needs transformers, accelerate (pip install '.[export]' accelerate)",
)
def test_their_trainer(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(# A model of transformers.*?)```", EXAMPLE.read_text(), re.S).group(1)
    assert len(code.splitlines()) <= 20
    names: dict = {}
    exec(code, names)
    assert "converted 14 linear layers" in capsys.readouterr().out
    model, losses = names["model"], [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) == 20 and losses[-1] < 0.8 * losses[0]
    assert isinstance(model.model.layers[0].mlp.up_proj, nf.QuantLinear) and type(model.lm_head) is torch.nn.Linear
    assert (tmp_path / "trained" / "model.safetensors").stat().st_size > 0
