"""What a block keeps, counted on a CPU: the sizes by hand, the targets, and that the documents say the same."""

from dataclasses import replace

import pytest
import torch

from lab.measure import bench_memory
from nanochat_fp4.models import gpt

WIDTH = 128
CONFIG = replace(gpt.config_from_depth(2, vocab_size=64), n_head=1)


@pytest.fixture(scope="module")
def records():
    found = bench_memory.account(CONFIG, ["bf16", "clover"])
    return {(r["method"], r["recompute"]): r for r in found}


def test_bytes_per_token_are_those_of_the_tensors(records):
    """In units of the width: 2 of a BF16 tensor, 9/16 of codes and scales; and FP32 numbers, one a row or head."""
    bf16, codes, number = 2 * WIDTH, WIDTH * 9 / 16, 4
    assert list(records["clover", "none"]["tensors"].values()) == [
        bf16,  # residual stream, for the gradient of its lambda
        bf16 + number,  # the same after the lambda, and 1 / rms
        codes,  # input of q, k, v
        2 * (bf16 + number),  # queries and keys
        2 * bf16 + number,  # values, result, log-sum-exp
        codes,  # input of c_proj
        bf16 + number,
        codes,  # input of c_fc
        4 * WIDTH + number + 4 * codes,  # relu in 8 bits, its step, and the input of the MLP's c_proj
    ]
    plain = records["bf16", "none"]
    assert plain["tensors"]["input of c_q, c_k, c_v"] == plain["tensors"]["input of c_fc"] == bf16
    assert plain["tensors"]["for the derivative of ReLU^2"] == 4 * bf16
    # Nothing is kept beside another: attention's result and the hidden layer are c_proj's inputs too.
    assert not {"input of attention's c_proj", "input of the MLP's c_proj"} & plain["tensors"].keys()
    assert plain["block"] == 26 * WIDTH + 5 * number
    assert list(records["clover", "codes-mlp"]["tensors"].values()) == [
        bf16 + number,  # residual stream before the lambdas, 1 / rms after them
        codes + bf16 + number,  # input of q, k, v; result and log-sum-exp of attention
        codes + number,  # input of c_proj, 1 / rms of the stream into the MLP
        codes,  # input of c_fc
        4 * codes,  # input of the MLP's c_proj
    ]


def test_ratios_to_bf16(records):
    assert records["bf16", "none"]["ratio"] == 1
    assert records["clover", "none"]["ratio"] < 0.87
    assert records["clover", "mlp"]["ratio"] < 0.6
    assert records["clover", "codes"]["ratio"] < 0.5 and records["clover", "codes-mlp"]["ratio"] < 0.4  # the targets
    assert records["clover", "all"]["ratio"] <= 0.40  # BF16 computed twice keeps as little
    for recompute in bench_memory.RECOMPUTE:
        assert records["clover", recompute]["block"] <= records["bf16", recompute]["block"]


def test_every_kept_tensor_has_a_name(records):
    for r in records.values():
        assert set(r["tensors"]) <= set(bench_memory.NAMES.values()), r


def test_every_storage_is_counted_once():
    model = torch.nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def forward():
        y = model(x)
        z = y * y[:2].repeat(2, 1)  # keeps y and a copy
        return (z.exp() + z.exp()).sum()  # two results of exp

    lines = bench_memory.kept_bytes(model, forward)
    assert lines == {"outside of gpt.py": (x.numel() + 2 * 32 + 2 * 32) * 4}


def test_prints_what_it_writes(base_dir, monkeypatch, capsys, records):
    monkeypatch.setattr(bench_memory, "account", lambda config, methods: list(records.values()))
    bench_memory.main(["--depth", "2"])
    out = capsys.readouterr().out
    assert "| **ratio to BF16** | **1.00** |" in out
    assert (base_dir / "bench" / "bench_memory.json").exists() and "bench_memory.json" in out
    for argv, message in (["--methods", "clever"], "unknown method 'clever'"), (["--depth", "0"], "be at least 1"):
        with pytest.raises(ValueError, match=message):  # run_main makes a line of it
            bench_memory.main(argv)
