"""nf.save_quantized: a model of transformers, converted and trained elsewhere, as a folder in 4 bits and back."""

import copy
import json
import types

import pytest
import torch
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.export.load import load_safetensors
from nanochat_fp4.export.weights import forward_weights

pytest.importorskip("safetensors")


class Foreign(nn.Module):
    """What save_quantized asks of a PreTrainedModel: a config that becomes JSON, and a tied head."""

    config = types.SimpleNamespace(to_json_string=lambda: '{"model_type": "foreign", "dtype": null}')
    all_tied_weights_keys = {"lm_head.weight": "embed.weight"}

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.lm_head = nn.Linear(32, 50, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.lm_head(x)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nf.convert(Foreign(), "clover", verbose=False)


@pytest.mark.parametrize("file_format", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("inputs", [False, True])
def test_codes_of_the_trained_forward_go_out_and_come_back(model, tmp_path, file_format, inputs):
    text = [torch.randint(50, (2, 16))] if inputs else ()
    assert nf.save_quantized(model, tmp_path / "out", file_format, calibration=text) == []
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "export.json"} <= files
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Foreign"] and config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    tensors = load_safetensors(tmp_path / "out")
    assert "lm_head.weight" not in tensors and tensors["embed.weight"].dtype == torch.bfloat16
    scale = "input_global_scale" if file_format == "compressed-tensors" else "input_scale"
    assert (f"layers.0.{scale}" in tensors) == inputs
    read = nf.load_quantized(nf.convert(Foreign(), "clover", verbose=False), tmp_path / "out", codes=True)
    want, got = forward_weights(model), {f"layers.{i}": layer.packed[1] for i, layer in enumerate(read.layers)}
    for name, t in want.tensors.items():
        assert torch.equal(got[name].codes, t.codes) and torch.equal(got[name].scales.float(), t.scales.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_alone_compute_and_are_not_trained(model, tmp_path, dtype):
    """A model on the meta device: no memory for 4-bit weights, forward and input gradients as with them."""
    nf.save_quantized(model, tmp_path / "out")
    whole = nf.convert(Foreign().to(dtype), "clover", verbose=False)
    with torch.device("meta"):
        alone = nf.convert(Foreign().to(dtype), "clover", verbose=False)
    for read in (whole, alone):
        nf.load_quantized(read, tmp_path / "out", codes=True)
    weights = [layer.weight for layer in alone.layers]
    assert all(w.untyped_storage().nbytes() == dtype.itemsize and w.dtype == dtype for w in weights)
    assert alone.lm_head.weight is alone.embed.weight and alone.embed.weight.requires_grad
    results = []
    for read in (whole, alone):
        torch.manual_seed(1)
        y = read(torch.arange(40).view(2, 20))
        y.float().square().sum().backward()
        results.append((y.detach(), read.embed.weight.grad, read.layers[0].bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    with pytest.raises(ValueError, match="of this weight only the codes were kept"), nf.full_precision(alone):
        alone(torch.zeros(1, 4, dtype=torch.long))
    with pytest.raises(UserError, match="an optimizer holds weights that are 4-bit codes alone"):
        torch.optim.SGD(alone.parameters(), lr=1.0).step()
    torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], lr=1.0).step()
    raw = next(m for m in nf.ABLATIONS if nf.get_recipe(m).grad_input.b.raw)
    with torch.device("meta"):
        anew = nf.convert(Foreign(), raw, verbose=False)
    with pytest.raises(UserError, match="rounds a weight anew in each pass"):
        nf.load_quantized(anew, tmp_path / "out", codes=True)


def test_what_cannot_be_written_is_one_line(model, tmp_path):
    unconverted, out = Foreign(), tmp_path / "out"
    experts = copy.deepcopy(model)
    experts.experts = _experts()
    nf.convert(experts, "clover", verbose=False)
    unseen = copy.deepcopy(model)
    unseen.more = nn.Linear(32, 32)
    nf.convert(unseen, "clover", verbose=False)
    for arguments, message in (
        ((model, out, "gguf"), "expected one of compressed-tensors, modelopt"),
        ((nn.Linear(16, 16), out), "Linear is no model of transformers"),
        ((unconverted, out), "is not converted"),
        ((experts, out), "is an expert, which compressed-tensors has no name for"),
        ((unseen, out, "modelopt", None, [torch.zeros(1, 4, dtype=torch.long)]), "more read nothing of the"),
    ):
        with pytest.raises(UserError, match=message):
            nf.save_quantized(*arguments)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not an export"):
        nf.save_quantized(model, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def _experts() -> nn.Module:
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = (nn.Parameter(torch.zeros(2, 32, 32)) for _ in range(2))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    return Experts()
