"""What convert keeps in full precision wherever it is defined, and what it says of a model."""

import copy

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf


class Block(nn.Module):
    def __init__(self, width: int = 64):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


def model_of(**parts: nn.Module) -> nn.Module:
    """A model with these parts, in this order."""
    model = nn.Module()
    for name, part in parts.items():
        model.add_module(name, part)
    return model


def tied(layer: nn.Linear, other: nn.Module, parameter: str = "weight") -> nn.Linear:
    layer.weight = getattr(other, parameter)
    return layer


def blocks(stack=nn.ModuleList) -> nn.Module:
    children = [Block(), Block()]
    return stack({"0": children[0], "1": children[1]}) if stack is nn.ModuleDict else stack(children)


class Table(nn.Module):
    """An embedding of one's own."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(256, 64))


def tied_to_a_table():
    table = Table()
    return model_of(table=table, out=tied(nn.Linear(64, 256, bias=False), table, "rows"), blocks=blocks())


def tied_to_a_head_in_a_block():
    head, last = nn.Linear(64, 256), nn.ModuleDict({"block": Block(), "head": nn.Linear(64, 256)})
    tied(last["head"], head)
    return model_of(lm_head=head, blocks=blocks(), predictors=nn.ModuleList([last]))


def with_a_second_name():
    head = nn.Linear(64, 80)
    return model_of(project=head, lm_head=head, blocks=blocks())


def no_stack_of_blocks():
    return model_of(emb=nn.Embedding(256, 64), out=nn.Linear(64, 256), first=Block(), second=Block())


def embedded(rows: int, head: nn.Linear, table: type = nn.Embedding):
    return model_of(emb=table(rows, 64), unembed=head, blocks=blocks(), project=nn.Linear(64, 64))


def embedded_and_tied(bias: bool):
    table = nn.Embedding(256, 64)
    return model_of(emb=table, unembed=tied(nn.Linear(64, 256, bias=bias), table), blocks=blocks())


@pytest.mark.parametrize(
    "build, heads",
    [
        (lambda: embedded(256, nn.Linear(64, 256)), {"unembed"}),
        (lambda: embedded(256, nn.Linear(64, 256, bias=False), nn.EmbeddingBag), {"unembed"}),
        (lambda: embedded(250, nn.Linear(64, 256)), {"unembed"}),  # padded
        (lambda: embedded_and_tied(bias=False), {"unembed"}),
        (lambda: embedded_and_tied(bias=True), {"unembed"}),
        (tied_to_a_table, {"out"}),
        (tied_to_a_head_in_a_block, {"lm_head", "predictors.0.head"}),
        (with_a_second_name, {"project"}),
        (no_stack_of_blocks, {"out"}),
        (lambda: model_of(emb=nn.Embedding(256, 64), hidden=nn.Linear(64, 256), lm_head=nn.Linear(64, 80)),
         {"lm_head"}),
        (lambda: model_of(classes=nn.Linear(64, 16), blocks=blocks(), patches=nn.Linear(48, 64)), {"classes"}),
        (lambda: model_of(classes=nn.Linear(64, 32), blocks=blocks(nn.ModuleDict)), {"classes"}),
        (lambda: model_of(classes=nn.Linear(64, 10), blocks=nn.Sequential(Block(), Block())), {"classes"}),
        (lambda: model_of(blocks=blocks(), classes=nn.Linear(64, 64)), {"classes"}),
    ],
)  # fmt: skip
def test_an_output_head_is_kept_wherever_it_is_defined(build, heads):
    """In 4 bits its error would reach the loss without any averaging."""
    model = build()
    model.add_module("mlp", nn.ModuleList([Block()]))
    report = nf.convert(model, verbose=False).nf_report
    assert dict(report.left_alone) == dict.fromkeys(heads, "the output head keeps its own precision")


def test_a_hidden_layer_of_the_embeddings_shape_is_no_head():
    """256 -> 512 between an embedding of 512 rows and the layer that computes the output."""
    hidden = dict(emb=nn.Embedding(512, 256), up=nn.Linear(256, 512), down=nn.Linear(512, 256))
    report = nf.convert(model_of(**hidden, out=nn.Linear(256, 512)), verbose=False).nf_report
    assert report.converted == ["up", "down"] and [n for n, _ in report.left_alone] == ["out"]
    assert nf.convert(model_of(**hidden), verbose=False).nf_report.converted == ["up", "down"]


def test_the_share_in_4_bits_is_told_with_and_without_the_head():
    report = nf.convert(model_of(blocks=blocks(), classes=nn.Linear(64, 10)), verbose=False).nf_report
    assert report.quantized == pytest.approx(1 - 64 * 10 / (64 * 10 + 4 * 64 * 128))
    assert report.quantized_without_heads == 1 and "without the output head" in str(report)


def test_a_layer_at_two_places_of_a_model_has_both_names():
    """A pattern, or a block that is kept, holds for the layer wherever it stands."""
    block = Block()
    model = nn.ModuleDict({"h": nn.ModuleList([block, Block(), block]), "alias": nn.ModuleList([block.up])})
    block.whole = model  # and the names end although the model is a part of its part
    report = nf.convert(model, keep_last_blocks=1, verbose=False).nf_report
    assert report.converted == ["h.1.up", "h.1.down"]
    skipped = nf.convert(model, skip=["alias.*"], verbose=False).nf_report
    assert dict(skipped.left_alone) == {"h.0.up": "skip pattern 'alias.*'"}


@pytest.mark.parametrize("skipped", ["0", "1"])
def test_layers_that_share_weight_and_bias(skipped):
    """Each computes as its own method says, and their gradients add up; a shared weight counts as quantized."""
    layers = nn.Linear(64, 64), nn.Linear(64, 64)
    layers[1].weight, layers[1].bias = layers[0].weight, layers[0].bias
    model, x = nf.convert(nn.Sequential(*layers), skip=[skipped], verbose=False), torch.randn(16, 64)
    assert model.nf_report.quantized == 1
    apart = copy.deepcopy(model)
    for name in ("weight", "bias"):
        setattr(apart[1], name, nn.Parameter(getattr(model[0], name).detach().clone()))
    grads = []
    for m in (model, apart):
        torch.manual_seed(0)
        with nf.quantize_weights_once(m), nf.accumulate_gradients(m):
            m(x).square().sum().backward()
        grads.append([p.grad for p in m.parameters()])
    weight, bias, *others = grads[1]
    torch.testing.assert_close(grads[0], [weight + others[0], bias + others[1]])


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class WithoutItsBias(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype))


def test_a_forward_that_computes_something_else_is_left_alone():
    """Converted, the layer would lose the factor, or gain a bias, without a word."""
    parts = Halved(32, 32), WithoutItsBias(32, 32), WithoutItsBias(32, 32, bias=False), nn.LazyLinear(32)
    state = torch.get_rng_state()
    report = nf.convert(nn.Sequential(*parts), verbose=False).nf_report
    assert report.converted == ["2"] and torch.equal(torch.get_rng_state(), state)
    reasons = dict(report.left_alone)
    assert "Halved computes" in reasons["0"] and "WithoutItsBias computes" in reasons["1"]
    assert "sizes" in reasons["3"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_convert_says_at_once_that_a_dtype_will_be_refused(dtype, capsys):
    nf.convert(nn.Sequential(nn.Linear(64, 64)).to(dtype))
    said = capsys.readouterr().out
    assert str(dtype).removeprefix("torch.") in said
    assert ("autocast" in said) == (dtype == torch.float16)  # Autocast leaves float64 as it is.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("trains", [True, False])
def test_weights_in_16_bits_lose_small_updates_and_a_line_says_so(dtype, trains):
    model = model_of(out=nn.Linear(64, 64), in_=nn.Linear(64, 64).requires_grad_(trains)).to(dtype)
    model.out.requires_grad_(False)
    report = str(nf.convert(model, "clover", verbose=False).nf_report)
    assert ("small updates" in report) == (trains and dtype != torch.float32)


@pytest.mark.parametrize("method, words", [("bf16", "left in BF16, as the method says, 1"), ("clover", "converted 1")])
def test_the_report_says_whether_layers_are_in_few_bits(method, words):
    report = str(nf.convert(nn.Sequential(nn.Linear(64, 64)), method, verbose=False).nf_report)
    assert words in report and ("converted" in report) == (method != "bf16")


@pytest.mark.parametrize("method", ["clover", "clover_fp8_forward", "fp8"])
def test_the_report_says_that_the_backward_pass_is_not_quantized(method):
    model = model_of(mlp=model_of(up_proj=nn.Linear(64, 128), down_proj=nn.Linear(128, 64)))
    for backward in (True, False):
        nf.convert(model, method, backward=backward, verbose=False)
        assert ("the backward pass is not quantized" in str(model.nf_report)) == (not backward)
    nf.convert(model, "bf16", verbose=False)
    assert "backward pass" not in str(model.nf_report)


@pytest.mark.parametrize(("rounding", "random"), [("sr", True), ("rtn", False)])
def test_the_report_says_that_the_forward_pass_is_random(rounding, random):
    recipe = nf.Recipe("mine", output=nf.Gemm(nf.Operand("rtn"), nf.Operand(rounding)))
    report = str(nf.convert(nn.Sequential(nn.Linear(64, 64)), recipe, verbose=False).nf_report)
    assert ("draws its rounding anew in each training pass" in report) == random


def test_a_report_is_one_short_line_in_a_notebook():
    report = nf.convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), verbose=False).nf_report
    assert "\n" not in repr(report)
    assert len(repr(report)) < 120


@pytest.mark.parametrize("count, said", [(4, "0, 1, 2, 3"), (7, "0, 1, 2, 3 and 3 more")])
def test_four_layers_are_named_and_the_others_counted(count, said):
    model = nn.Sequential(*[nn.Linear(64, 5) for _ in range(count)], nn.Linear(64, 64))
    lines = str(nf.convert(model, verbose=False).nf_report).splitlines()
    assert lines[-1].endswith(f": out_features is 5, expected a multiple of 16 ({said})")


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
    assert "1 linear layer:" in str(report)
    assert report.quantized + sum(report.others.values()) == pytest.approx(1)


def test_blocks_that_are_kept_on_purpose_are_not_worth_a_warning():
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(4))})
    assert "warning" not in str(nf.convert(model, keep_last_blocks=2, verbose=False).nf_report)
