"""lab.moe: a small model with experts learns in BF16 and in 4 bits, and the runs become a table."""

import json

import pytest
import torch

import nanochat_fp4 as nf
from lab import moe
from nanochat_fp4.errors import UserError


def test_runs_and_their_table(tiny_base, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(moe, "LENGTH", 16)
    monkeypatch.setattr(moe, "LEARNING_RATE", 0.01)
    size = "--steps=20 --layers=1 --width=64 --rows=4 --eval-batches=2"
    for method in ("bf16", "clover"):
        moe.main(["train", f"--method={method}", f"--out={tmp_path / method}.json", *size.split()])
    runs = {m: json.loads((tmp_path / f"{m}.json").read_text()) for m in ("bf16", "clover")}
    for run in runs.values():
        assert list(run["curve"]) == [str(step) for step in range(2, 21, 2)] and run["tokens"] == 20 * 4 * 16
        assert run["bpb"] < 0.9 * run["curve"]["2"]
    assert runs["bf16"]["bpb"] == runs["bf16"]["bpb_bf16"] and runs["clover"]["bpb"] != runs["clover"]["bpb_bf16"]
    capsys.readouterr()
    moe.main(["table", *(str(tmp_path / f"{m}.json") for m in runs)])
    table = capsys.readouterr().out
    assert f"{runs['clover']['bpb']:.4f} +- 0.0000" in table
    runs["bf16"]["curve"].pop("2")
    (tmp_path / "bf16.json").write_text(json.dumps(runs["bf16"]))
    with pytest.raises(UserError, match="have other steps"):
        moe.report([tmp_path / f"{m}.json" for m in runs])


def test_the_experts_are_converted_and_choose_as_before():
    torch.manual_seed(0)
    model = moe.build(1, 64, 128, 64, torch.device("cpu"))
    torch.manual_seed(0)
    converted = nf.convert(moe.build(1, 64, 128, 64, torch.device("cpu")), "clover", verbose=False)
    report = converted.nf_report
    assert sum("expert_linears" in name for name in report.converted) == 2 * moe.EXPERTS
    assert any("router" in name for name, _ in report.left_alone)
    x = torch.randint(64, (2, 16))
    with nf.full_precision(converted):
        torch.testing.assert_close(converted(x), model(x))
    assert 0.9 < model.transformer.h[0].mlp.balance.item() < 2
