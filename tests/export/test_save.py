"""nf.save_quantized: a model of transformers, converted and trained elsewhere, as a folder in 4 bits and back."""

import json

import pytest
import torch
from _exporting import Mixture, as_in_a_checkpoint
from _models import Foreign
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.export import huggingface
from nanochat_fp4.export.load import load_safetensors
from nanochat_fp4.export.weights import forward_weights
from nanochat_fp4.models.llama import Llama, LlamaConfig

pytest.importorskip("safetensors")
from safetensors.torch import save_file


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nf.convert(Foreign(), "clover", verbose=False)


@pytest.mark.parametrize("inputs", [False, True])
def test_codes_of_the_trained_forward_go_out_and_come_back(model, tmp_path, inputs):
    text = [torch.randint(50, (2, 16))] if inputs else None
    notes = nf.save_quantized(model, tmp_path / "out", calibration=text)
    assert [note[:21] for note in notes[:-1]] == ["inputs of 2 layers st"] * (not inputs) and "tokenizer" in notes[-1]
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "README.md", "export.json"} <= files
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # a server's user reads them all
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Foreign"] and config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    tensors = load_safetensors(tmp_path / "out")
    assert "lm_head.weight" not in tensors and tensors["embed.weight"].dtype == torch.bfloat16
    assert ("layers.0.input_global_scale" in tensors) == inputs
    read = nf.load_quantized(Foreign(), tmp_path / "out")
    for name, t in forward_weights(model)[0].items():  # compressed-tensors keeps a tensor scale's reciprocal
        torch.testing.assert_close(read.get_submodule(name).weight.detach(), t.dequantize(), rtol=2e-7, atol=0)


class Retied(Foreign):
    def tie_weights(self) -> None:
        self.lm_head.weight = self.embed.weight


def test_a_tie_that_accelerate_broke_is_made_again(model, tmp_path):
    """init_empty_weights gives a meta parameter to each name. A tie that somebody broke on purpose stays broken."""
    nf.save_quantized(model, tmp_path / "out")
    with torch.device("meta"):
        empty = Retied()
        empty.lm_head.weight = nn.Parameter(empty.embed.weight.clone())
    read = nf.load_quantized(empty, tmp_path / "out")
    assert read.lm_head.weight is read.embed.weight and read.embed.weight.isfinite().all()
    untied = Retied()
    untied.lm_head.weight = nn.Parameter(untied.embed.weight.clone())
    with pytest.raises(ValueError, match="lm_head.weight"):
        nf.load_quantized(untied, tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_config_json_says_the_dtype_in_which_transformers_decodes(model, tmp_path, dtype):
    for method, want in (("clover", torch.bfloat16), ("fp8", dtype)):
        nf.save_quantized(nf.convert(model, method, verbose=False), tmp_path / method, dtype=dtype)
        config = json.loads((tmp_path / method / "config.json").read_text())
        assert {config["dtype"], config["torch_dtype"]} == {str(want).removeprefix("torch.")}
        assert load_safetensors(tmp_path / method)["embed.weight"].dtype == dtype


@pytest.mark.parametrize("mixed", [False, True])
def test_calibration_is_for_4_bits_alone(model, tmp_path, monkeypatch, mixed):
    """A model in FP8 is not run, and one line says that calibration= has no effect. An FP8 layer of a mixed model that
    reads nothing needs no line."""
    method = "clover" if mixed else "fp8"
    model.more = nf.QuantLinear(32, 32, method="fp8")
    nf.convert(model.layers, method, verbose=False)
    if not mixed:
        monkeypatch.setattr(Foreign, "forward", None)
    notes = nf.save_quantized(model, tmp_path / "out", calibration=[torch.randint(50, (2, 16))])
    assert [note[:29] for note in notes[:-1]] == ["calibration= has no effect: n"] * (not mixed)
    assert ("layers.0.input_global_scale" in load_safetensors(tmp_path / "out")) == mixed


@pytest.mark.parametrize("mixed", [False, True])
def test_inputs_of_fp8_layers_have_a_scale_for_each_token_without_calibration(model, tmp_path, mixed):
    model.layers.append(nf.QuantLinear(32, 32, method="fp8"))
    if not mixed:
        nf.convert(model, "fp8", verbose=False)
    notes = nf.save_quantized(model, tmp_path / "out")
    assert [note.startswith("inputs of 2 layers stay") for note in notes] == [True] * mixed + [False]
    groups = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["config_groups"].values()
    inputs = {group["format"]: group["input_activations"] for group in groups}
    by_token = inputs.pop("float-quantized")
    assert by_token["strategy"] == "token" and by_token["dynamic"] is True and by_token["num_bits"] == 8
    assert inputs == ({"nvfp4-pack-quantized": None} if mixed else {})


def test_a_layer_that_reads_nothing_stays_in_16_bits(model, tmp_path):
    """One layer without tokens does not refuse a calibrated export."""
    model.more = nn.Linear(32, 32)
    nf.convert(model, "clover", verbose=False)
    notes = nf.save_quantized(model, tmp_path / "out", calibration=[torch.randint(50, (2, 16))])
    assert len(notes) == 2 and notes[0].endswith("bfloat16: 1, such as more")
    tensors = load_safetensors(tmp_path / "out")
    assert tensors["more.weight"].dtype == torch.bfloat16 and "layers.0.weight_packed" in tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head", "more"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_class_keeps_in_fp32_stays_in_fp32(model, tmp_path, dtype):
    """transformers keeps some of these tensors in FP32 in a model in FP16 alone."""
    model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules = {"embed"}, ["layers.0"]
    nf.save_quantized(model, tmp_path / "out", dtype=dtype)
    tensors = load_safetensors(tmp_path / "out")
    assert tensors["embed.weight"].dtype == torch.float32
    assert tensors["layers.0.bias"].dtype == (torch.float32 if dtype == torch.float16 else torch.bfloat16)


def test_a_compiled_model_is_saved_under_its_own_names(model, tmp_path):
    nf.save_quantized(torch.compile(model), tmp_path / "out")
    assert "layers.0.weight_packed" in load_safetensors(tmp_path / "out")


def test_what_the_folder_lacks_is_said_once_and_the_tokenizer_last(model, tmp_path, caplog):
    """Many programs drop the lines that save_quantized returns."""
    notes = nf.save_quantized(model, tmp_path / "out")
    lines, card = [record.message for record in caplog.records], (tmp_path / "out" / "README.md").read_text()
    assert lines == [f"save_quantized: {note}" for note in notes] and "calibration=" in lines[0]
    assert "tokenizer=" in lines[-1] and all(f"\n- {note}\n" in card for note in notes)


def test_a_card_says_what_the_folder_is(model, tmp_path):
    """The method, and what is not quantized. A model that generates nothing has its own class, and no task."""
    for method, kind in (("clover", "NVFP4"), ("fp8", "FP8")):
        nf.save_quantized(nf.convert(model, method, verbose=False), tmp_path / method)
        card = (tmp_path / method / "README.md").read_text()
        assert f"| QAT method | {method} |" in card and f"tags: [{kind.lower()}]" in card and "lm_head |" in card
        assert "Foreign.from_pretrained(folder)  # Pass no dtype" in card and "text-generation" not in card
        assert str(tmp_path) not in card


@pytest.mark.parametrize("method", ["clover", "four_over_six", "clover_fp8_forward"])
@pytest.mark.parametrize("seed", range(4))
def test_codes_and_block_scales_are_made_again_of_what_was_decoded(tmp_path, method, seed):
    """The amax of decoded weights is rounded, and divided again. Only tensor scales can show that."""
    torch.manual_seed(seed)
    model = nf.convert(Foreign(), method, verbose=False)
    nf.save_quantized(model, tmp_path / "out", dtype=torch.float32, share_scales=False)
    read = nf.convert(nf.load_quantized(Foreign(), tmp_path / "out"), method, verbose=False)
    got, want = forward_weights(read)[0], forward_weights(model)[0]
    for name, tensor in want.items():
        for part in ("codes", "scales"):
            assert torch.equal(getattr(got[name], part).view(torch.uint8), getattr(tensor, part).view(torch.uint8))
        bits = [t.tensor_scale.view(torch.int32) for t in (got[name], tensor)]
        assert abs(bits[0] - bits[1]) <= 2


def test_inputs_that_training_did_not_round_are_no_loss(tmp_path):
    recipe = nf.Recipe("own", output=nf.Gemm(nf.Operand(), nf.Operand("rtn")), summary="weights alone")
    (line,) = nf.save_quantized(nf.convert(Foreign(), recipe, verbose=False), tmp_path / "out")
    assert "tokenizer" in line


@pytest.mark.parametrize("calibration", [3, torch.zeros(1, 4, dtype=torch.long), [], iter(())])
def test_calibration_that_is_no_list_of_token_ids_is_refused(model, tmp_path, calibration):
    with pytest.raises(ValueError, match="calibration"):
        nf.save_quantized(model, tmp_path / "out", calibration=calibration)
    assert not (tmp_path / "out").exists()


RANKS = """
import sys, pathlib, torch, torch.distributed as dist, nanochat_fp4 as nf
from _models import Foreign
from nanochat_fp4.export import save
dist.init_process_group("gloo")
folder, rank, written = pathlib.Path({folder!r}), dist.get_rank(), []
whole = save.new_export
def counted(out, overwrite):
    written.append(out.name)
    return whole(out, overwrite)
save.new_export = counted
torch.manual_seed(0)
model = nf.convert(Foreign(), "clover", verbose=False)
model.more = torch.nn.Linear(32, 32)
nf.convert(model, "clover", verbose=False)
text = [torch.zeros(1, 4, dtype=torch.long)]
for _ in range(2):
    notes = nf.save_quantized(model, folder / "all", calibration=text, overwrite=True)
    assert len(notes) == 2 and (folder / "all" / "model.safetensors").exists()
    dist.barrier()  # or another rank replaces the folder while this one looks
nf.save_quantized(model, folder / f"own_{{rank}}")
if rank == 0:
    nf.save_quantized(model, folder / "one")
try:
    nf.save_quantized(model, folder / "all")
except ValueError as e:
    print("is there already" in str(e), *written)
dist.barrier()  # rank 0 has the group's store
"""


def test_every_rank_may_call_and_one_writes(tmp_path, run_ranks):
    """The others wait for the same result, or the same error. A rank that calls alone waits for nobody."""
    printed = [out.split() for out in run_ranks(RANKS.format(folder=str(tmp_path)))]
    assert [words[0] for words in printed] == ["True", "True"]
    names = sorted(name for words in printed for name in words[1:])
    assert names == ["all", "all", "all", "one", "own_0", "own_1"]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("inputs", [False, True])
def test_experts_go_out_one_by_one(tmp_path, monkeypatch, transposed, inputs):
    torch.manual_seed(0)
    monkeypatch.setattr(huggingface, "as_in_checkpoints", as_in_a_checkpoint)
    mixture = nf.convert(Mixture(transposed), "clover", verbose=False)
    text = [torch.randint(50, (2, 64))] if inputs else None
    nf.save_quantized(mixture, tmp_path / "out", calibration=text)
    tensors, want = load_safetensors(tmp_path / "out"), forward_weights(mixture)[0]
    for e in range(2):
        up, down = (want[f"experts.expert_linears.{name}.expert_{e}"] for name in ("gate_up_proj", "down_proj"))
        for part, t, rows in (("w1", up, slice(48)), ("w3", up, slice(48, 96)), ("w2", down, slice(32))):
            layer = f"experts.{e}.{part}"
            assert torch.equal(tensors[f"{layer}.weight_packed"], t.codes[rows])
            assert torch.equal(tensors[f"{layer}.weight_scale"].float(), t.scales[rows].float())
            assert tensors[f"{layer}.weight_global_scale"] == 1 / t.tensor_scale
            assert (f"{layer}.input_global_scale" in tensors) == inputs
    assert "router.weight" in tensors and not any("proj" in name for name in tensors)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "gate", "router"]  # by the module's name and by the file's


@pytest.fixture(params=[False, True], ids=["", "transposed"])
def mixture(tmp_path, monkeypatch, request) -> nn.Module:
    """A model with experts, and its folder tmp_path / "out"."""
    torch.manual_seed(0)
    monkeypatch.setattr(huggingface, "as_in_checkpoints", as_in_a_checkpoint)
    model = nf.convert(Mixture(request.param), "clover", verbose=False).eval()
    nf.save_quantized(model, tmp_path / "out", dtype=torch.float32)
    return model


def test_experts_come_back(mixture, tmp_path):
    """Decoded, into a model that nobody converted."""
    transposed, want = mixture.experts.is_transposed, forward_weights(mixture)[0]
    read = nf.load_quantized(Mixture(transposed), tmp_path / "out")
    for name in ("gate_up_proj", "down_proj"):
        for e, part in enumerate(getattr(read.experts, name)):
            decoded = want[f"experts.expert_linears.{name}.expert_{e}"].dequantize()
            torch.testing.assert_close(part.T if transposed else part, decoded, rtol=1e-6, atol=0)
    assert torch.equal(read.gate.weight, mixture.gate.weight)


def test_an_expert_without_tokens_takes_its_neighbours_range(tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(huggingface, "as_in_checkpoints", as_in_a_checkpoint)
    mixture = nf.convert(Mixture(), "clover", verbose=False)
    with torch.no_grad():
        mixture.gate.bias = nn.Parameter(torch.tensor([100.0, 0.0]))  # all tokens go to the first expert
    notes = nf.save_quantized(mixture, tmp_path / "out", calibration=[torch.randint(50, (2, 8))])
    assert len(notes) == 3 and notes[0].startswith(
        "experts without calibration text have the range of the others: experts."
    )
    tensors = load_safetensors(tmp_path / "out")
    for part in ("w1", "w2", "w3"):
        first, other = (tensors[f"experts.{e}.{part}.input_global_scale"] for e in range(2))
        assert first == other and first.isfinite()


def test_parts_of_an_expert_may_have_tensor_scales_of_their_own(mixture, tmp_path):
    good = load_safetensors(tmp_path / "out")
    scale = good["experts.1.w3.weight_global_scale"] / 2  # values are divided by it
    decoded = []
    for tensors in (good, good | {"experts.1.w3.weight_global_scale": scale}):
        save_file(tensors, tmp_path / "out" / "model.safetensors")
        expert = nf.load_quantized(Mixture(mixture.experts.is_transposed), tmp_path / "out").experts.gate_up_proj[1]
        decoded.append(expert.T if mixture.experts.is_transposed else expert)
    assert torch.equal(decoded[1][:48], decoded[0][:48]) and torch.equal(decoded[1][48:], 2 * decoded[0][48:])


def test_experts_in_full_precision_come_back(mixture, tmp_path):
    nf.convert(mixture, "clover", skip=["experts"], verbose=False)
    nf.save_quantized(mixture, tmp_path / "out", dtype=torch.float32, overwrite=True)
    read = nf.load_quantized(nf.convert(Mixture(mixture.experts.is_transposed), verbose=False), tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(read.experts.parameters(), mixture.experts.parameters()))


def test_bit_for_bit_what_scripts_export_writes(tmp_path):
    """The project's Llama, and the same weights in a module with the names that transformers has."""
    torch.manual_seed(0)
    ours = Llama(LlamaConfig(32, 64, n_layer=1, n_head=1, n_kv_head=1, n_embd=64), pad_vocab_size_to=64)
    ours.init_weights()
    (tmp_path / "ours").mkdir()
    huggingface.write_own(ours, tmp_path / "ours", torch.float32)
    theirs = nn.Module()
    theirs.config = Foreign.config
    for name, value in load_safetensors(tmp_path / "ours").items():
        parent = theirs
        *path, last, _ = name.split(".")
        for child in path:
            if not hasattr(parent, child):
                parent.register_module(child, nn.ModuleList() if child == "layers" else nn.Module())
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
    huggingface.write_own(ours, tmp_path / "ours", torch.bfloat16, forward_weights(ours)[0])
    nf.save_quantized(theirs, tmp_path / "theirs")
    want, got = load_safetensors(tmp_path / "ours"), load_safetensors(tmp_path / "theirs")
    assert set(want) == set(got) and sum("packed" in name for name in want) == 7
    for name, tensor in want.items():
        assert tensor.dtype == got[name].dtype and torch.equal(tensor.view(torch.uint8), got[name].view(torch.uint8))


def test_another_format_is_named_in_words(tmp_path):
    """The line for the reader has no name of a class."""
    own = nf.Operand("integers")
    recipe = nf.Recipe("own", output=nf.Gemm(own, own), summary="integers in the forward")
    notes = nf.save_quantized(nf.convert(Foreign(), recipe, verbose=False), tmp_path / "out")
    assert notes[0] == "operands in another format than NVFP4: the weights are rounded again, to nearest"
    assert len(notes) == 3 and "calibration" in notes[1]
