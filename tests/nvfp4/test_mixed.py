"""Recipes by kind of layer (clover_mixed): which layer gets which, what its passes compute, and what is kept."""

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from _assertions import relative_square_error
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.models.gpt import GPT, GPTConfig
from nanochat_fp4.models.llama import Llama, LlamaConfig
from nanochat_fp4.nvfp4 import dispatch
from nanochat_fp4.nvfp4.makers import Quantization, quantize_operand
from nanochat_fp4.nvfp4.phases import MethodPlan
from nanochat_fp4.nvfp4.places import layer_kind
from nanochat_fp4.nvfp4.roundings import ROUNDINGS

MIXED = nf.get_recipe("clover_mixed")


@pytest.mark.parametrize(
    "name, kind",
    [
        *((f"transformer.h.0.attn.{leaf}", "attention") for leaf in ("c_q", "c_k", "c_v", "c_proj", "c_attn")),
        *((f"model.layers.1.self_attn.{leaf}_proj", "attention") for leaf in "qkvo"),
        *((f"transformer.h.0.mlp.{leaf}", "mlp_up") for leaf in ("c_fc", "c_gate")),
        ("transformer.h.0.mlp.c_proj", "mlp_down"),
        *((f"model.layers.1.mlp.{leaf}_proj", "mlp_up") for leaf in ("up", "gate", "gate_up")),
        ("model.layers.1.mlp.down_proj", "mlp_down"),
        ("model.layers.1.mlp.experts.linears.gate_up_proj.3", "mlp_up"),
        ("model.layers.1.block_sparse_moe.experts.0.w2", "mlp_down"),
        ("bert.encoder.layer.0.attention.self.query", "attention"),
        ("bert.encoder.layer.0.attention.output.dense", "attention"),
        ("bert.encoder.layer.0.intermediate.dense", "mlp_up"),
        ("bert.encoder.layer.0.output.dense", "mlp_down"),
        ("decoder.layers.0.fc1", "mlp_up"),
        ("decoder.layers.0.fc2", "mlp_down"),
        ("blocks.0.attn.qkv", "attention"),
        ("blocks.0.attn.proj", "attention"),
        ("encoder.block.0.layer.1.DenseReluDense.wo", "mlp_down"),
        ("encoder.block.0.layer.0.SelfAttention.o", "attention"),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer", "attention"),
        ("base_model.model.transformer.h.0.mlp.c_proj.base_layer", "mlp_down"),
        ("base_model.model.bert.encoder.layer.0.output.dense.modules_to_save.default", "mlp_down"),
        ("_orig_mod.blocks.0._checkpoint_wrapped_module.attn.proj._orig_mod", "attention"),
        ("base_model.model.lm_head.base_layer", None),
        ("lm_head", None),
        ("0", None),
        ("", None),
    ],
)
def test_the_kind_of_a_layer_is_told_by_its_place(name, kind):
    assert layer_kind(name) == kind


class Adapted(nn.Module):
    """A linear layer with an adapter, under the names of peft."""

    def __init__(self, base_layer: nn.Linear):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 16, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(16, base_layer.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


@pytest.mark.parametrize("adapted", [["q_proj", "down_proj"], ["q_proj", "k_proj", "down_proj", "lm_head"]])
def test_a_layer_with_an_adapter_computes_as_its_place_says(adapted):
    """An adapter's wrapper changes neither the arithmetic of a layer in clover_mixed nor what counts as a head."""
    names = ("q_proj", "k_proj", "down_proj", "lm_head")
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in names} | {"table": nn.Embedding(7, 32)})
    for name in adapted:
        model[name] = Adapted(model[name])
    report = nf.convert(model, "clover_mixed", verbose=False).nf_report
    layers = {name: model[name].base_layer if name in adapted else model[name] for name in names}
    for name in names[:3]:
        assert layers[name].recipe == MIXED.of(layer_kind(name)), name
    assert not isinstance(layers["lm_head"], nf.QuantLinear)
    assert set(report.kinds.values()) == {"attention", "mlp_down"}


def gpt() -> nn.Module:
    model = GPT(GPTConfig(sequence_len=32, vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=128))
    model.init_weights()
    return model


def llama() -> nn.Module:
    return Llama(LlamaConfig(sequence_len=32, vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=128))


@pytest.mark.parametrize("make", [gpt, llama])
def test_each_layer_of_a_model_has_the_recipe_of_its_kind(make):
    model = nf.convert(make(), "clover_mixed", verbose=False)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nf.QuantLinear)}
    assert {layer_kind(n) for n in layers} == {"attention", "mlp_up", "mlp_down"}
    for name, layer in layers.items():
        assert layer.recipe == MIXED.of(layer_kind(name)), name
        assert layer.recipe.output.b.feedback == (layer_kind(name) == "mlp_down")
    assert "layers by kind: 4 attention, " in str(model.nf_report)
    assert nf.convert(model, "clover", verbose=False) and {m.recipe.name for m in layers.values()} == {"clover"}


def test_layers_of_no_kind_are_told():
    layers = {"up_proj": nn.Linear(32, 32), "other": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)}
    model = nf.convert(nn.Sequential(OrderedDict(layers)), "clover_mixed", verbose=False)
    assert "1 layers of no known kind" in str(model.nf_report)
    assert model.other.recipe == MIXED.of(None) and model.up_proj.recipe == MIXED.of("mlp_up")


def test_a_pass_without_a_quantized_backward_keeps_8_bits_and_no_codes():
    forward = MIXED.forward_only()
    for kind in ("attention", "mlp_up"):
        assert forward.of(kind).output == nf.Gemm(nf.Operand("e4m3"), nf.Operand("e4m3"))
        assert forward.of(kind).grad_input == forward.of(kind).grad_weight == nf.Gemm()
    assert forward.of("mlp_down").output == MIXED.output


@pytest.mark.parametrize("name", ["clover_mixed", "fp8"])
def test_training_with_weights_made_once_and_gradients_added_is_the_same(name):
    """To the bit on a CPU, with and without the contexts, and compiled."""
    results = []
    for once in (False, True):
        torch.manual_seed(0)
        model = nf.convert(gpt(), name, verbose=False)
        tokens = torch.randint(64, (2, 32))
        with nf.accumulate_gradients(model) if once else nf.quantize_weights_once(model):
            for _ in range(2):
                model(tokens, tokens).backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_compiled_layers_compute_the_same(backend):
    """8 bits forward and 4 kept, and two rotations: with rounding to nearest, of which a compiler has less to trace."""
    twice = nf.Gemm(nf.Operand("rtn"), nf.Operand("rtn"), 128, rotations=2)
    recipe = replace(MIXED.of("mlp_up"), name="rtn_twice", grad_input=twice, grad_weight=twice)
    layer = nf.QuantLinear(128, 128, method=recipe)
    compiled, results = torch.compile(layer, backend=backend, fullgraph=True), []
    x = torch.randn(64, 128, requires_grad=True)
    for f in (layer, compiled):
        torch.manual_seed(3)
        y = f(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.weight))))
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_a_plan_changes_each_kind_to_its_own_recipe():
    late = replace(MIXED, name="mixed_of_test", late=(0.5, replace(nf.get_recipe("clover"), name="end_of_test")))
    model = nf.convert(gpt(), late, verbose=False)
    fc = model.transformer.h[0].mlp.c_fc
    plan = MethodPlan.parse(late, layers="*.c_q=fp8")
    assert plan.apply(model, 0.0) and model.transformer.h[0].attn.c_q.recipe == nf.get_recipe("fp8")
    assert fc.recipe == late.of("mlp_up") and not plan.apply(model, 0.4)
    assert plan.apply(model, 0.6) and fc.recipe == late.final
    assert nf.set_progress(nf.convert(model, late, verbose=False), 0.7) and fc.recipe == late.final
    work = MethodPlan.parse(MIXED).work(nf.convert(gpt(), MIXED, verbose=False))
    assert work == pytest.approx({4: 1 - 8 / 36, 8: 8 / 36, 16: 0})  # the forward of 8 squares of the width, of 12


@pytest.mark.gpu
@pytest.mark.parametrize("k", [512, 2048, 8192])
def test_fp8_tensor_cores_add_with_the_error_that_is_stated(k):
    """dispatch.mm_fp8. FP8's own rounding has a relative square error of 7e-4."""
    x, w = (torch.randn(256, k, device="cuda").bfloat16() for _ in range(2))
    a, b = (quantize_operand(t, Quantization(ROUNDINGS["e4m3"])) for t in (x, w))
    product = a.on_tensor_cores(b, torch.float32, dispatch.FIRST_RIGHT)
    if product is None:
        pytest.skip("no FP8 tensor cores here")
    want = a.dequantize().double() @ b.dequantize().double().T
    assert relative_square_error(product.result(torch.float32).double(), want) < 1e-5
