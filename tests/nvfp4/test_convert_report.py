"""What convert keeps in full precision wherever it is defined, and what it says of a model."""

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf


class HeadFirst(nn.Module):
    def __init__(self, tie: bool = False, bias: bool = False):
        super().__init__()
        self.emb = nn.Embedding(256, 64)
        self.unembed = nn.Linear(64, 256, bias=bias)
        if tie:
            self.unembed.weight = self.emb.weight
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(2))
        self.project = nn.Linear(64, 64)


@pytest.mark.parametrize("tie, bias", [(False, False), (True, False), (False, True), (True, True)])
def test_an_output_head_is_kept_wherever_it_is_defined(tie, bias):
    report = nf.convert(HeadFirst(tie, bias), verbose=False).nf_report
    assert "unembed" in dict(report.left_alone)
    assert {"blocks.0.0", "blocks.1.2"} <= set(report.converted)


def test_a_tied_weight_stays_without_a_stack_of_blocks():
    model = nn.ModuleDict({"emb": nn.Embedding(64, 32), "out": nn.Linear(32, 64), "mlp": nn.Linear(32, 32)})
    model["out"].weight = model["emb"].weight
    assert nf.convert(model, verbose=False).nf_report.converted == ["mlp"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_convert_says_at_once_that_a_dtype_will_be_refused(dtype, capsys):
    nf.convert(nn.Sequential(nn.Linear(64, 64)).to(dtype))
    assert str(dtype).removeprefix("torch.") in capsys.readouterr().out


def test_a_report_is_one_short_line_in_a_notebook():
    report = nf.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), verbose=False).nf_report
    assert "\n" not in repr(report)
    assert len(repr(report)) < 120


def test_a_method_is_suggested_in_any_case():
    with pytest.raises(ValueError, match="did you mean clover"):
        nf.get_recipe("CLOVER")


class Adapted(nn.Module):
    """A layer of a stack with an adapter that is as large as the layer."""

    def __init__(self, rank: int = 64):
        super().__init__()
        self.base_layer = nn.Linear(64, 64)
        self.lora_A, self.lora_B = nn.Linear(64, rank, bias=False), nn.Linear(rank, 64, bias=False)
        self.gate = nn.Linear(64, 12)


@pytest.mark.parametrize("skip, warned", [(["gate"], False), ([], True)])
def test_only_weights_that_nobody_asked_to_keep_are_worth_a_warning(skip, warned):
    """Adapters, and layers that skip= names, stay in high precision on purpose; a layer of 12 columns does not."""
    report = nf.convert(Adapted(), skip=skip, verbose=False).nf_report
    assert ("warning" in str(report)) == warned
    assert "converted 1 linear layer:" in str(report)
    assert report.quantized + sum(report.others.values()) == pytest.approx(1)


def test_blocks_that_are_kept_on_purpose_are_not_worth_a_warning():
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(4))})
    assert "warning" not in str(nf.convert(model, keep_last_blocks=2, verbose=False).nf_report)
