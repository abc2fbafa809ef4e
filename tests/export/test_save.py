"""nf.save_quantized: a model of transformers, converted and trained elsewhere, as a folder in 4 bits and back."""

import copy
import json

import pytest
import torch
from _models import Foreign
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.export import huggingface, save, stacked
from nanochat_fp4.export.load import load_safetensors
from nanochat_fp4.export.weights import forward_weights
from nanochat_fp4.models.llama import Llama, LlamaConfig

pytest.importorskip("safetensors")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nf.convert(Foreign(), "clover", verbose=False)


@pytest.mark.parametrize("inputs", [False, True])
def test_codes_of_the_trained_forward_go_out_and_come_back(model, tmp_path, inputs):
    text = [torch.randint(50, (2, 16))] if inputs else ()
    assert nf.save_quantized(model, tmp_path / "out", calibration=text) == []
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "export.json"} <= files
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Foreign"] and config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    tensors = load_safetensors(tmp_path / "out")
    assert "lm_head.weight" not in tensors and tensors["embed.weight"].dtype == torch.bfloat16
    assert ("layers.0.input_global_scale" in tensors) == inputs
    read = nf.load_quantized(Foreign(), tmp_path / "out")
    for name, t in forward_weights(model).tensors.items():  # compressed-tensors keeps a tensor scale's reciprocal
        torch.testing.assert_close(read.get_submodule(name).weight.detach(), t.dequantize(), rtol=2e-7, atol=0)


def test_what_cannot_be_written_is_one_line(model, tmp_path):
    unconverted, out = Foreign(), tmp_path / "out"
    experts = copy.deepcopy(model)
    experts.experts = Experts()
    nf.convert(experts, "clover", verbose=False)
    some = nf.convert(copy.deepcopy(experts), "clover", skip=["*.gate_up_proj.1"], verbose=False)
    unseen = copy.deepcopy(model)
    unseen.more = nn.Linear(32, 32)
    nf.convert(unseen, "clover", verbose=False)
    for arguments, message in (
        ((model, out, "gguf"), "expected 'compressed-tensors'"),
        ((nn.Linear(16, 16), out), "Linear is no model of transformers"),
        ((unconverted, out), "is not converted"),
        ((experts, out), "checkpoints of Foreign have one experts.gate_up_proj for all experts, which compressed"),
        ((some, out), "experts.expert_linears.gate_up_proj.1 is not in 4 bits, and others are"),
        ((unseen, out, "compressed-tensors", None, [torch.zeros(1, 4, dtype=torch.long)]), "more read nothing of the"),
    ):
        with pytest.raises(UserError, match=message):
            nf.save_quantized(*arguments)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an export"):
        nf.save_quantized(model, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


class Experts(nn.Module):
    """As transformers has them, two of them, with the arguments that its forward takes."""

    def __init__(self, transposed: bool = False):
        super().__init__()
        self.is_transposed, self.act_fn = transposed, nn.functional.silu
        up, down = (2, 96, 32), (2, 32, 48)
        self.gate_up_proj = nn.Parameter(torch.randn(up).mT.contiguous() if transposed else torch.randn(up))
        self.down_proj = nn.Parameter(torch.randn(down).mT.contiguous() if transposed else torch.randn(down))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


class Mixture(Foreign):
    def __init__(self, transposed: bool = False):
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 2, bias=False), Experts(transposed)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).flatten(0, 1)
        weights, chosen = self.gate(x).softmax(-1).topk(1)
        return self.lm_head(self.layers[1](self.layers[0](x + self.experts(x, chosen, weights))))


def _as_in_a_checkpoint(model: nn.Module, state: dict) -> dict:
    """Instead of transformers' revert_weight_conversion, which --slow tests ask: a tensor for each expert and part."""
    result = {}
    for name, value in state.items():
        if name not in ("experts.gate_up_proj", "experts.down_proj"):
            result[name.replace("gate.", "router.")] = value
            continue
        value = value.mT if model.experts.is_transposed else value
        for e, rows in enumerate(value):
            parts = zip(("w1", "w3"), rows.chunk(2)) if "gate_up" in name else [("w2", rows)]
            result |= {f"experts.{e}.{part}.weight": piece for part, piece in parts}
    return result


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inputs", [False, True])
def test_experts_go_out_one_by_one(tmp_path, monkeypatch, transposed, inputs):
    torch.manual_seed(0)
    monkeypatch.setattr(save, "as_in_checkpoints", _as_in_a_checkpoint)
    mixture = nf.convert(Mixture(transposed), "clover", verbose=False)
    text = [torch.randint(50, (2, 64))] if inputs else ()
    nf.save_quantized(mixture, tmp_path / "out", calibration=text)
    tensors, want = load_safetensors(tmp_path / "out"), forward_weights(mixture).tensors
    for e in range(2):
        up, down = (want[f"experts.expert_linears.{name}.{e}"] for name in ("gate_up_proj", "down_proj"))
        for part, t, rows in (("w1", up, slice(48)), ("w3", up, slice(48, 96)), ("w2", down, slice(32))):
            layer = f"experts.{e}.{part}"
            assert torch.equal(tensors[f"{layer}.weight_packed"], t.codes[rows])
            assert torch.equal(tensors[f"{layer}.weight_scale"].float(), t.scales[rows].float())
            assert tensors[f"{layer}.weight_global_scale"] == 1 / t.tensor_scale
            assert (f"{layer}.input_global_scale" in tensors) == inputs
    assert "router.weight" in tensors and not any("proj" in name for name in tensors)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "router"]


@pytest.fixture(params=[False, True], ids=["", "transposed"])
def mixture(tmp_path, monkeypatch, request) -> nn.Module:
    """A model with experts, and its folder tmp_path / "out"."""
    torch.manual_seed(0)
    for module in (save, stacked):
        monkeypatch.setattr(module, "as_in_checkpoints", _as_in_a_checkpoint)
    model = nf.convert(Mixture(request.param), "clover", verbose=False).eval()
    nf.save_quantized(model, tmp_path / "out", dtype=torch.float32)
    return model


def test_experts_come_back(mixture, tmp_path):
    """Decoded, into a model that nobody converted."""
    transposed, want = mixture.experts.is_transposed, forward_weights(mixture).tensors
    read = nf.load_quantized(Mixture(transposed), tmp_path / "out")
    for name in ("gate_up_proj", "down_proj"):
        for e, part in enumerate(getattr(read.experts, name)):
            decoded = want[f"experts.expert_linears.{name}.{e}"].dequantize()
            torch.testing.assert_close(part.T if transposed else part, decoded, rtol=1e-6, atol=0)
    assert torch.equal(read.gate.weight, mixture.gate.weight)


def test_experts_in_full_precision_come_back(mixture, tmp_path):
    nf.convert(mixture, "clover", skip=["experts"], verbose=False)
    nf.save_quantized(mixture, tmp_path / "out", dtype=torch.float32, overwrite=True)
    read = nf.load_quantized(nf.convert(Mixture(mixture.experts.is_transposed), verbose=False), tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(read.experts.parameters(), mixture.experts.parameters()))


def test_bad_files_of_experts_are_one_line(mixture, tmp_path):
    nf.save_quantized(mixture, tmp_path / "out", dtype=torch.float32, overwrite=True)
    good = load_safetensors(tmp_path / "out")
    part = "experts.1.w3.weight"
    without = {name: [n for n in good if name in n] for name in (part, "experts.", "w3.weight_scale")}

    def load(changes: dict) -> nn.Module:
        huggingface.save_tensors(tmp_path / "out", {n: t for n, t in (good | changes).items() if t is not None})
        model = nf.convert(Mixture(mixture.experts.is_transposed), "clover", verbose=False)
        return nf.load_quantized(model, tmp_path / "out")

    scales = {f"{part}_global_scale": good[f"{part}_global_scale"] / 2}  # values are divided by it
    for changes, message in (
        (dict.fromkeys(without[part]), f"has no {part}, and other experts of experts.gate_up_proj"),
        (dict.fromkeys(without["experts."]), "has no experts.down_proj, experts.gate_up_proj"),
        (dict.fromkeys(without["w3.weight_scale"]), "experts.0.w3 has codes without weight_scale"),
        ({f"{part}_packed": good[f"{part}_packed"][:16]}, r"w3, its codes, is \(16, 16\), expected \(48, 16\)"),
        ({"experts.2.w2.weight": torch.ones(32, 48)}, "experts.2.w2.weight is not of this model"),
    ):
        with pytest.raises(UserError, match=message) as e:
            load(changes)
        assert "\n" not in str(e.value)
    whole, other = (load(changes).experts.gate_up_proj[1] for changes in ({}, scales))
    whole, other = (t.T if mixture.experts.is_transposed else t for t in (whole, other))
    assert torch.equal(other[:48], whole[:48]) and torch.equal(other[48:], 2 * whole[48:])


def test_bit_for_bit_what_scripts_export_writes(tmp_path):
    """The project's Llama, and the same weights in a module with the names that transformers has."""
    torch.manual_seed(0)
    ours = Llama(LlamaConfig(32, 64, n_layer=1, n_head=1, n_kv_head=1, n_embd=64), pad_vocab_size_to=64)
    ours.init_weights()
    (tmp_path / "ours").mkdir()
    huggingface.write(ours, tmp_path / "ours", torch.float32)
    theirs = nn.Module()
    theirs.config = Foreign.config
    for name, value in load_safetensors(tmp_path / "ours").items():
        parent = theirs
        *path, last, _ = name.split(".")
        for child in path:
            if not hasattr(parent, child):
                parent.register_module(child, nn.Module())
            parent = getattr(parent, child)
        kind = nn.Embedding(*value.shape) if "embed" in name else nn.LayerNorm(1, bias=False)
        layer = nn.Linear(*value.shape[::-1], bias=False) if "proj" in name or "head" in name else kind
        layer.weight = nn.Parameter(value)
        parent.register_module(last, layer)
    block = theirs.get_submodule("model.layers.0")
    block.self_attn.fused_linears = ("q_proj", "k_proj", "v_proj")  # our Llama computes these as one
    block.mlp.fused_linears = ("gate_proj", "up_proj")
    for model in (ours, theirs):
        nf.convert(model, "clover", verbose=False)
    huggingface.write(ours, tmp_path / "ours", torch.bfloat16, forward_weights(ours))
    nf.save_quantized(theirs, tmp_path / "theirs")
    want, got = load_safetensors(tmp_path / "ours"), load_safetensors(tmp_path / "theirs")
    assert set(want) == set(got) and sum("packed" in name for name in want) == 7
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype and torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8))
