"""lab.measure.accuracy on a tiny checkpoint: every row, twice, and bad input."""

import json

import pytest
from _samples import save_base

from lab.measure import accuracy
from nanochat_fp4.errors import UserError

SMALL = "--steps=2 --device-batch-size=2 --seq-len=32 --eval-batches=2 --device-type=cpu --lr=1e-3".split()


def test_every_row_of_the_table(tiny_base, tmp_path, capsys):
    save_base(tiny_base, n_layer=1)
    out = tmp_path / "table.json"
    run = [f"--model={tiny_base}/base_checkpoints/d2_clover", f"--out={out}", *SMALL]
    accuracy.main([*run, "--rows=bf16"])
    accuracy.main(run)
    lines = {(n["row"], n["inputs"]): n for n in json.loads(out.read_text())["lines"]}
    assert len(lines) == 2 + 2 * 3 and all(n["memory_gib"] > 0 for n in lines.values())
    assert lines["bf16", "-"]["kl"] == 0 and lines["bf16", "-"]["top1"] == 1
    assert all(n["kl"] > 0 for key, n in lines.items() if key != ("bf16", "-"))
    bpb = [n["bpb"] for n in lines.values()]
    assert len(set(bpb)) == len(bpb) and max(bpb) < 1.2 * min(bpb)
    assert lines["ptq", "W4A16"]["kl"] < lines["ptq", "W4A4"]["kl"]  # inputs in 16 bits
    assert "W4A16" in capsys.readouterr().out.splitlines()[-1]


def test_bad_input_is_one_line(tiny_base, tmp_path):
    save_base(tiny_base)
    out = tmp_path / "table.json"
    out.write_text(json.dumps({"setup": {"steps": 9}, "lines": []}))
    model = f"--model={tiny_base}/base_checkpoints/d2_clover"
    for flags, message in (
        ([model, "--rows=gptq"], "--rows is 'gptq', expected some of bf16"),
        ([model, "--rows=qat"], "results of other settings"),
        ([f"--model={tmp_path}/nothing"], "nothing|not installed"),  # the second without transformers
    ):
        with pytest.raises(UserError, match=message) as e:
            accuracy.main([*flags, f"--out={out}" if flags[-1] == "--rows=qat" else f"--out={tmp_path}/new", *SMALL])
        assert "\n" not in str(e.value)
