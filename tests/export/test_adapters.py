"""Adapters beside weights that are 4-bit codes alone: what is kept, what is computed, and how they are merged."""

import copy
import json

import pytest
import torch
from _models import Foreign
from safetensors.torch import load_file, save_file
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.errors import UserError
from nanochat_fp4.export.adapters import keep_codes_alone
from nanochat_fp4.export.weights import forward_weights
from nanochat_fp4.models.llama import Llama, LlamaConfig

F8 = torch.float8_e4m3fn
IDS = torch.arange(40).view(2, 20)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    nf.save_quantized(nf.convert(Foreign(), "clover", verbose=False), tmp_path / "out")
    return tmp_path / "out"


def codes_alone(folder) -> nn.Module:
    with torch.device("meta"):
        model = nf.convert(Foreign(), "clover", verbose=False)
    return nf.load_quantized(model, folder, codes=True)


class Adapter(nn.Module):
    """A low-rank sum as peft has it, around a layer."""

    active_adapters = ("default",)

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    def get_delta_weight(self, name: str) -> torch.Tensor:
        return self.lora_B.weight @ self.lora_A.weight


def adapted(folder) -> nn.Module:
    model = codes_alone(folder).requires_grad_(False)
    for i, layer in enumerate(model.layers):
        model.layers[i] = Adapter(layer)
    return model


def test_a_step_keeps_codes_adapters_and_nothing_of_16_bits(folder):
    model = adapted(folder)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = model(IDS).square().mean()
    loss.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 4 and all(p.grad.any() for p in trained.values())
    torch.optim.AdamW(trained.values(), lr=1e-2).step()
    for layer in model.layers:
        base = layer.base_layer
        (operand,) = base.packed.values()
        kept_bytes = sum(t.untyped_storage().nbytes() for t in operand.tensors())
        assert kept_bytes == 32 * 32 // 2 + 32 * 2 + 4  # 0.5625 bytes a weight and one tensor scale
        assert base.weight.untyped_storage().nbytes() == 4 and base.weight.grad is None
        assert base.weight.isnan().all()  # nobody takes it for a weight
    weights = [t for t in kept if t.shape == (32, 32) and t.is_floating_point() and t.untyped_storage().nbytes() > 4]
    assert not [t for t in weights if t.dtype not in (torch.uint8, torch.float8_e4m3fn)], "a decoded weight is kept"


def test_merged_adapters_are_codes_again_with_a_known_error(folder, tmp_path):
    model = adapted(folder)
    whole = nf.load_quantized(Foreign(), folder)  # in 32 bits
    want = {}
    for i, layer in enumerate(model.layers):
        want[f"layers.{i}"] = whole.layers[i].weight.detach() + layer.get_delta_weight("default").detach()
    errors = nf.merge_adapter(model)
    assert set(errors) == {"layers.0.base_layer", "layers.1.base_layer"}
    for i, layer in enumerate(model.layers):
        model.layers[i] = layer.base_layer  # as peft's unload()
    for name, t in forward_weights(model).tensors.items():
        error = (t.dequantize() - want[name]).norm() / want[name].norm()
        layer, _, number = name.partition(".")
        assert 0.02 < error < 0.12 and errors[f"{layer}.{number}.base_layer"] == pytest.approx(float(error), rel=1e-5)
    nf.save_quantized(model, tmp_path / "merged")
    again = codes_alone(tmp_path / "merged")
    assert torch.equal(again.layers[1].packed[1].codes, model.layers[1].packed[1].codes)
    with pytest.raises(UserError, match="no layer has codes alone and an adapter"):
        nf.merge_adapter(again)


def test_layers_computed_as_one_are_also_computed_apart():
    """With an adapter at one of q, k and v, and none at the others."""
    config = LlamaConfig(sequence_len=32, vocab_size=50, n_layer=1, n_head=2, n_kv_head=2, n_embd=32)
    torch.manual_seed(0)
    model = Llama(config)
    model.init_weights()
    nf.convert(model, "clover", backward=False, verbose=False)
    whole = model(IDS).detach()
    alone = copy.deepcopy(model)
    keep_codes_alone(alone)
    assert torch.equal(alone(IDS), whole)
    attention = alone.transformer.h[0].attn
    hook = attention.c_k.register_forward_hook(lambda layer, args, output: output)
    torch.testing.assert_close(alone(IDS), whole, rtol=1e-4, atol=1e-5)
    hook.remove()
    deltas = {f"transformer.h.0.attn.c_{n}": torch.full((32, 32), 0.01) for n in "qv"}
    before = attention.c_k.packed[1].dequantize()
    errors = nf.merge_adapter(alone, deltas)
    assert len(errors) == 3 and len(attention.c_q.packed) == 2  # one tensor scale for the three
    after = attention.c_k.packed[1].dequantize()
    assert (after - before).norm() < 0.1 * before.norm()


def change(folder, **tensors) -> None:
    found = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        name = name.replace("__", ".")
        found.pop(name) if value is None else found.update({name: value})
    save_file(found, folder / "model.safetensors", {"format": "pt"})


def described(folder, **entries) -> None:
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    for name, value in entries.items():
        (group if name == "group_size" else config["quantization_config"])[name] = value
    (folder / "config.json").write_text(json.dumps(config))


BAD_FILES = {
    "groups of 32": (change, {"layers__0__weight_scale": torch.ones(32, 1).to(F8)}, "only groups of 16"),
    "no block scales": (change, {"layers__0__weight_scale": None}, "layers.0 has codes without weight_scale; ex"),
    "no tensor scale": (change, {"layers__0__weight_global_scale": None}, "has codes without weight_global_scale"),
    "another shape": (change, {"layers__0__weight_packed": torch.zeros(16, 16).byte()}, "expected .32, 16."),
    "MXFP4": (change, {"layers__0__weight_scale": torch.ones(32, 2).byte()}, "scales in torch.uint8, which is not"),
    "INT4": (change, {"layers__0__weight_packed": torch.zeros(32, 4).int()}, "codes in torch.int32"),
    "negative scales": (change, {"layers__0__weight_global_scale": -torch.ones(1)}, "layers.0 has negative scales"),
    "a zero point": (change, {"layers__0__weight_zero_point": torch.zeros(1)}, "weight_zero_point is not of this"),
    "said to be MXFP4": (described, {"format": "mxfp4-pack-quantized"}, "is in 'mxfp4-pack-quantized'; expected nvfp4"),
    "said to be GPTQ": (described, {"format": None, "quant_method": "gptq"}, "is in 'gptq'"),
    "said to have groups of 32": (described, {"group_size": 32}, "has groups of 32; expected"),
    "rotated": (described, {"transform_config": {"config_groups": {"R1": {}}}}, "has rotated weights"),
}  # fmt: skip


def test_a_file_without_codes_is_refused(folder):
    nf.save_quantized(nf.convert(Foreign(), skip=["layers.0"], verbose=False), folder, overwrite=True)
    assert [bool(layer.packed) for layer in codes_alone(folder).layers] == [False, True]
    change(folder, **{f"layers__1__weight_{part}": None for part in ("packed", "scale", "global_scale")})
    change(folder, layers__1__weight=torch.ones(32, 32))
    with pytest.raises(UserError, match="out has no weights in NVFP4 codes; load it with codes=False"):
        codes_alone(folder)


@pytest.mark.parametrize("how", BAD_FILES)
def test_bad_files_are_one_line(how, folder):
    edit, changes, message = BAD_FILES[how]
    edit(folder, **changes)
    with pytest.raises(UserError, match=message) as e:
        codes_alone(folder)
    assert "\n" not in str(e.value) and ";" in str(e.value)


def test_scales_of_a_servers_cache_are_left_out(folder):
    change(folder, layers__0__k_scale=torch.ones(1))
    codes_alone(folder)


def test_a_buffer_that_no_file_has_is_named(folder):
    with torch.device("meta"):
        model = nf.convert(Foreign(), "clover", verbose=False)
        model.register_buffer("inv_freq", torch.ones(4), persistent=False)
    with pytest.raises(UserError, match="inv_freq is on the meta device, and no file has it; build the model inside"):
        nf.load_quantized(model, folder, codes=True)
