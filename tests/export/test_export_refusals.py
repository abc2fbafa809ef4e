"""What is not exported and what is not loaded: (call, a word of the message). Each is one line, and changes nothing."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from _exporting import Mixture, as_in_a_checkpoint, save_small
from _models import Foreign, conv1d
from torch import nn

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.export import huggingface
from nanochat_fp4.models.gpt import GPT
from scripts import export

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

F8, INT = torch.float8_e4m3fn, torch.int64


def refused(call, word: str, flags: bool = False) -> None:
    """A library's message names arguments; a script's may name flags."""
    with pytest.raises((UserError, ValueError) if flags else ValueError, match=word) as e:
        call()
    assert "\n" not in str(e.value) and (flags or "--" not in str(e.value)), e.value


# ----------------------------------------------------------------------------------------------------------------------
# Out: save_quantized


def poked(name: str, value: float):
    """A converted model with this value in a tensor; of a whole tensor for name*."""

    def make() -> nn.Module:
        model = nf.convert(Foreign(), "clover", verbose=False)
        tensor = model.get_parameter(name.rstrip("*"))
        with torch.no_grad():
            tensor.fill_(value) if name.endswith("*") else tensor.view(-1)[3].fill_(value)
        return model

    return make


def converted() -> nn.Module:
    return nf.convert(Foreign(), "clover", verbose=False)


def with_adapter() -> nn.Module:
    model = converted()
    model.layers[0] = nn.ModuleDict({"base_layer": model.layers[0]})
    return model


def with_tied_head_in_4_bits() -> nn.Module:
    model = converted()
    model.layers[0].weight = nn.Parameter(torch.randn(50, 32))
    model.embed.weight = model.layers[0].weight
    return model


def with_conv1d() -> nn.Module:
    model = Foreign()
    model.layers = nn.ModuleList(map(conv1d, model.layers))
    return nf.convert(model, "clover", verbose=False)


def some_experts() -> nn.Module:
    return nf.convert(Mixture(), "clover", skip=["*.gate_up_proj.expert_1"], verbose=False)


def random_forward() -> nf.Recipe:
    return nf.Recipe("mine", output=nf.Gemm(nf.Operand("sr"), nf.Operand("sr")))


def late_bf16() -> nf.Recipe:
    return replace(nf.get_recipe("clover"), name="mine", late=(0.5, nf.get_recipe("bf16")))


def ended(method: str | nf.Recipe = "nvidia_full") -> nn.Module:
    """A model at the end of its run, when the forward of nvidia_full is in BF16."""
    model = nf.convert(Foreign(), method, verbose=False)
    nf.set_progress(model, 1.0)
    return model


def divided() -> nn.Module:
    """As DeepSpeed's ZeRO-3 leaves weights between steps."""
    model = converted()
    model.layers[1].weight = nn.Parameter(torch.empty(0))
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return converted()


SAVES = [
    (converted, {"dtype": "bfloat16"}, "bfloat16"),
    (converted, {"dtype": torch.int8}, "torch.int8"),
    (converted, {"dtype": torch.complex64}, "torch.complex64"),
    (converted, {"dtype": torch.float8_e4m3fn}, "float8"),
    (converted, {"tokenizer": "folder"}, "tokenizer"),
    (converted, {"calibration": [{"input_ids": [[0]]}]}, "a list, expected token ids"),
    (converted, {"calibration": {"labels": torch.zeros(1, 4, dtype=INT)}}, "NoneType"),
    (converted, {"calibration": [torch.zeros(4, dtype=INT)]}, r"\(4,\)"),
    (converted, {"calibration": torch.zeros(1, 4, dtype=INT)}, "calibration is a Tensor, expected a list with"),
    (converted, {"calibration": [torch.zeros(1, 4)]}, "torch.float32"),
    (converted, {"calibration": [torch.full((1, 4), 50)]}, "50"),
    (converted, {"calibration": [torch.full((1, 4), -1)]}, "-1"),
    (converted, {"calibration": [torch.zeros(0, 4, dtype=INT)]}, "no layer"),
    (lambda: nn.Linear(16, 16), {}, "Linear"),
    (Foreign, {}, "not converted.*nf.convert"),
    (lambda: nf.convert(Foreign(), "bf16", verbose=False), {}, "bf16 quantizes nothing.*model.save_pretrained"),
    (lambda: nf.convert(Foreign(), random_forward(), verbose=False), {}, "mine rounds anew in each pass"),
    (ended, {}, "nvidia_full ends, quantizes nothing, and model.save_pretrained .*convert.*nvidia_full"),
    (lambda: ended(late_bf16()), {}, "bf16, with which mine ends, quantizes nothing"),
    (lambda: nf.convert(Mixture(), "clover", verbose=False), {}, "Mixture"),
    (with_adapter, {}, "merge_and_unload"),
    (with_tied_head_in_4_bits, {}, "layers.0 "),
    (with_conv1d, {}, "layers.0, layers.1: no Conv1D in compressed-tensors; model.save_pretrained"),
    (on_meta, {}, "meta"),
    (divided, {}, "layers.1.weight "),
    (poked("layers.0.weight", torch.nan), {}, "layers.0.weight "),
    (poked("layers.1.bias", torch.inf), {}, "layers.1.bias "),
    (poked("embed.weight", -torch.inf), {}, "embed.weight "),
    (poked("embed.weight", 1e6), {"dtype": torch.float16}, "torch.float16"),
    (poked("embed.weight", 3.4e38), {}, "torch.bfloat16"),
    (poked("layers.0.bias*", 1e-9), {"dtype": torch.float16}, "1e-09"),
]


@pytest.mark.parametrize("make, arguments, word", SAVES, ids=[word for *_, word in SAVES])
def test_save_quantized_refuses(tmp_path, make, arguments, word):
    torch.manual_seed(0)
    model = make()
    refused(lambda: nf.save_quantized(model, tmp_path / "out", **arguments), word)
    assert not list(tmp_path.iterdir())  # nor a lock


@pytest.mark.parametrize("dtype", [F8, torch.float8_e5m2])
def test_a_model_with_eight_bit_weights_was_not_converted(tmp_path, dtype):
    """Some quantizers of transformers leave FP8 weights, for which torch has no isfinite."""
    model = Foreign()
    model.layers[0].weight = nn.Parameter(model.layers[0].weight.to(dtype), requires_grad=False)
    refused(lambda: nf.save_quantized(model, tmp_path), "not converted")


def test_a_folder_that_is_there_names_the_argument_that_replaces_it(tmp_path):
    (tmp_path / "mine").touch()
    refused(lambda: nf.save_quantized(converted(), tmp_path), "overwrite=True")


@pytest.mark.parametrize("function", [nf.save_quantized, nf.load_quantized])
def test_swapped_or_missing_arguments_are_named(tmp_path, function):
    refused(lambda: function(str(tmp_path), converted()), f"{function.__name__}: got str and Foreign")
    refused(lambda: function(converted(), None), f"{function.__name__}: got Foreign and NoneType")


# ----------------------------------------------------------------------------------------------------------------------
# In: load_quantized. The changes of a file's tensors (None: without it), and of its description

NO = torch.zeros
HEAD = {"lm_head.weight_packed": NO(50, 16).byte(), "lm_head.weight_scale": torch.ones(50, 2).to(F8)}
HEAD["lm_head.weight_global_scale"] = torch.ones(1)
NO_CODES = dict.fromkeys(f"layers.0.weight_{part}" for part in ("packed", "scale", "global_scale"))
EIGHT = {"layers.0.weight": NO(32, 32).to(F8), "layers.0.weight_scale": torch.ones(1)}
FILES = [
    ({"layers.0.bias": None}, "layers.0.bias; download .* again"),
    ({"layers.0.more": torch.ones(1)}, "layers.0.more "),
    ({"embed.weight": torch.ones(1, 32)}, r"\(50, 32\)"),
    ({"embed.weight": torch.full((50, 32), torch.nan)}, "finite"),
    ({"embed.weight": torch.full((50, 32), 1e300, dtype=torch.float64)}, "torch.float32"),
    ({"embed.weight": torch.ones(50, 32).to(INT)}, "torch.int64"),
    ({"embed.weight": torch.ones(50, 32).to(torch.int8)}, "torch.int8"),
    ({"embed.weight": torch.ones(50, 32).to(F8)}, "torch.float8_e4m3fn"),
    ({"layers.0.bias": torch.ones(32).bool()}, "torch.bool"),
    ({"layers.0.bias": torch.ones(32) * 1j}, "torch.complex64"),
    ({"layers.0.weight": torch.ones(32, 32)}, "layers.0 "),
    ({"layers.0.weight_scale": torch.ones(32, 1).to(F8)}, r"\(32, 1\)"),
    ({"layers.0.weight_scale": None}, "layers.0.weight_scale"),
    ({"layers.0.weight_scale": torch.full((32, 2), -1.0).to(F8)}, "negative"),
    ({"layers.0.weight_scale": torch.full((32, 2), torch.nan).to(F8)}, "finite"),
    ({"layers.0.weight_global_scale": None}, "layers.0.weight_global_scale"),
    ({"layers.0.weight_global_scale": torch.ones(4)}, "layers.0.weight_global_scale"),
    ({"layers.0.weight_global_scale": torch.ones(1).to(INT)}, "layers.0.weight_global_scale"),
    ({"layers.0.weight_global_scale": NO(1)}, "layers.0.weight_global_scale"),
    ({"layers.0.weight_global_scale": -torch.ones(1)}, "layers.0.weight_global_scale"),
    ({"layers.0.weight_packed": NO(16, 16).byte()}, r"\(16, 16\)"),
    ({"layers.0.weight_packed": NO(16, 16).byte(), "layers.0.weight_scale": NO(16, 2).to(F8)}, r"\(32, 32\)"),
    ({"layers.0.weight_packed": NO(32, 4).int()}, "torch.int32"),
    ({"layers.0.weight_packed": torch.ones(32, 16)}, "torch.float32"),
    ({"layers.0.weight_scale": torch.ones(32, 2).byte()}, "scales .* torch.uint8"),
    ({"layers.0.weight_zero_point": NO(1)}, "weight_zero_point"),
    ({"lm_head.weight": torch.ones(50, 32)}, "tie_word_embeddings"),
    (HEAD, "tie_word_embeddings"),
    ({**NO_CODES, "layers.0.weight": NO(32, 32).to(F8)}, "torch.float8_e4m3fn"),
    ({**NO_CODES, **EIGHT, "layers.0.weight_scale": NO(1)}, "layers.0.weight_scale"),
    ({**NO_CODES, **EIGHT, "layers.0.weight_scale": torch.ones(2)}, "layers.0.weight_scale"),
    ({**NO_CODES, **EIGHT, "layers.0.weight": NO(31, 32).to(F8)}, r"\(31, 32\)"),
]
DESCRIPTIONS = [
    ({"format": "mxfp4-pack-quantized"}, "mxfp4"),
    ({"format": None, "quant_method": "gptq"}, "gptq"),
    ({"format": None, "quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
    ({"transform_config": {"config_groups": {"R1": {}}}}, "rotated"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved") / "out"
    nf.save_quantized(converted(), folder)
    return folder


def changed(saved, tmp_path, tensors=(), **description):
    """A copy of the folder with other tensors, and another description of its format."""
    folder = shutil.copytree(saved, tmp_path / "out")
    found = {name: t for name, t in (load_file(folder / "model.safetensors") | dict(tensors)).items() if t is not None}
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= description
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("tensors, word", FILES)
def test_load_quantized_refuses_files(saved, tmp_path, tensors, word):
    folder, model = changed(saved, tmp_path, tensors), Foreign()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    refused(lambda: nf.load_quantized(model, folder), word)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@pytest.mark.parametrize("description, word", DESCRIPTIONS, ids=[word for _, word in DESCRIPTIONS])
def test_load_quantized_refuses_formats(saved, tmp_path, description, word):
    folder = changed(saved, tmp_path, **description)
    refused(lambda: nf.load_quantized(Foreign(), folder), word)


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b"\xff" * 100])
def test_load_quantized_refuses_damaged_files(saved, tmp_path, damage):
    path = changed(saved, tmp_path) / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refused(lambda: nf.load_quantized(Foreign(), path.parent), "safetensors")
    refused(lambda: nf.load_quantized(Foreign(), tmp_path / "nowhere"), "is not there")


def test_a_model_that_transformers_read_in_few_bits_names_how_to_build_it(saved):
    """Its layers have codes in the place of weights, and in FP8 a scale beside them."""
    model = converted()
    model.layers[0].quantization_scheme = object()  # compressed-tensors sets it
    for function in (nf.load_quantized, nf.save_quantized):
        refused(lambda function=function: function(model, saved), "compressed-tensors.*from_config.*nf.load_quantized")


@pytest.mark.parametrize("described", [True, False])
def test_a_folder_that_is_not_quantized_is_refused(tmp_path, described):
    """Whoever typed a wrong folder would otherwise train on weights of another run."""
    state = {name: tensor.clone() for name, tensor in Foreign().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    if described:
        (tmp_path / "config.json").write_text(Foreign.config.to_json_string())
    refused(lambda: nf.load_quantized(Foreign(), tmp_path), "no quantized weights.*from_pretrained")


def test_a_file_in_the_place_of_its_folder_is_named(saved):
    refused(lambda: nf.load_quantized(Foreign(), saved / "model.safetensors"), f"is a file.*{saved}$")


def test_load_quantized_refuses_two_files_of_weights(saved, tmp_path):
    folder = changed(saved, tmp_path)
    (folder / "model.safetensors.index.json").write_text("{}")
    refused(lambda: nf.load_quantized(Foreign(), folder), "both")


def test_what_is_equal_or_not_for_the_model_is_taken(saved, tmp_path):
    """A head that the file has as well as the embedding, and scales of a server's cache."""
    same = load_file(saved / "model.safetensors")["embed.weight"].clone()
    folder = changed(saved, tmp_path, {"lm_head.weight": same, "layers.0.k_scale": torch.ones(1)})
    assert torch.equal(nf.load_quantized(Foreign(), folder).embed.weight, same.float())


def test_models_that_cannot_hold_the_values_are_refused(saved, tmp_path):
    large = changed(saved, tmp_path, {"embed.weight": torch.full((50, 32), 1e6)})
    refused(lambda: nf.load_quantized(Foreign().half(), large), "torch.float16")
    with torch.device("meta"):
        model = converted()
        model.register_buffer("inv_freq", torch.ones(4), persistent=False)
    refused(lambda: nf.load_quantized(model, saved), "inv_freq")
    assert model.embed.weight.is_meta


EXPERTS = [
    (["experts.1.w3.weight"], {}, "experts.1.w3.weight"),
    (["w3.weight_scale"], {}, "w3.weight_scale"),
    ([], {"experts.1.w3.weight_packed": NO(16, 16).byte()}, r"\(16, 16\)"),
    ([], {"experts.2.w2.weight": torch.ones(32, 48)}, "experts.2.w2.weight "),
    ([], {"experts.down_proj": torch.ones(2, 32, 48)}, "experts.down_proj "),
]


def test_some_experts_in_4_bits_and_some_not_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "as_in_checkpoints", as_in_a_checkpoint)
    refused(lambda: nf.save_quantized(some_experts(), tmp_path / "out"), "gate_up_proj.expert_1.weight")


def test_load_quantized_refuses_experts(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface, "as_in_checkpoints", as_in_a_checkpoint)
    torch.manual_seed(0)
    nf.save_quantized(nf.convert(Mixture(), "clover", verbose=False), tmp_path / "saved")
    good = load_file(tmp_path / "saved" / "model.safetensors")
    for i, (without, tensors, word) in enumerate(EXPERTS):
        gone = dict.fromkeys(name for name in good if any(part in name for part in without))
        folder = changed(tmp_path / "saved", tmp_path / str(i), gone | tensors)
        refused(lambda folder=folder: nf.load_quantized(Mixture(), folder), word)


# ----------------------------------------------------------------------------------------------------------------------
# The project's own models


def exported(tmp_path, family: str, *flags: str):
    export.main(["--source=base", f"--model-tag={family}", f"--out={tmp_path / family}", "--eval-tokens=0",
                 "--format=safetensors", *flags])  # fmt: skip
    return tmp_path / family


def fresh(model: nn.Module, **changes) -> nn.Module:
    config = type(model.config)(**{**vars(model.config), **changes})
    return type(model)(config)


def test_a_folder_of_another_model_is_refused(tiny_base, tmp_path):
    """What no tensor shows: the base of the rotation, and GPT's scalars and windows."""

    def change(folder, **entries):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | entries))
        return config

    model = save_small(tiny_base, "llama", "clover")
    folder = exported(tmp_path, "llama")
    for entries in ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"rms_norm_eps": 1e-6},
                    {"rope_scaling": {"factor": 2.0}}, {"num_attention_heads": 4}):  # fmt: skip
        before = change(folder, **entries)
        refused(lambda: nf.load_quantized(fresh(model), folder), "model")
        (folder / "config.json").write_text(json.dumps(before))
    change(folder, tie_word_embeddings=True)
    refused(lambda: nf.load_quantized(fresh(model), folder), "tie_word_embeddings")
    gpt = save_small(tiny_base, "gpt", "clover")
    folder = exported(tmp_path, "gpt")
    for value in ([1.0], [float("nan")] * 3):
        before = change(folder, resid_lambdas=value)
        refused(lambda: nf.load_quantized(fresh(gpt), folder), "resid_lambdas ")
        (folder / "config.json").write_text(json.dumps(before))
    nf.load_quantized(fresh(gpt, sequence_len=64), folder)
    refused(lambda: nf.load_quantized(fresh(gpt, window_pattern="L"), folder), "windows ")
    refused(lambda: nf.load_quantized(fresh(model), folder), "model")
    assert isinstance(gpt, GPT)


SCRIPT = [
    (["--format=compressed-tensors", "--method=bf16"], "--method=clover"),
    (["--format=compressed-tensors", "--model-tag=nan"], "finite"),
    (["--format=compressed-tensors", "--model-tag=full"], "nvidia_full_end has no quantized .*--format=safetensors"),
    (["--weights-only"], "--weights-only"),
    (["--model-tag=other"], "checkpoint other"),
    (["--out={}"], "is there already.*--overwrite"),
    (["--out={}", "--overwrite"], "is not an export"),
    (["--format=gguf"], "Llama"),  # and no package to install first
    (["--format=gguf", "--dtype=float32"], "GGUF"),
]


def test_a_gpt_has_no_gguf_which_is_said_before_it_is_loaded(tiny_base, tmp_path, monkeypatch):
    save_small(tiny_base, "gpt", "clover")
    monkeypatch.setattr(export, "load_for_inference", None)
    refused(lambda: exported(tmp_path, "gpt", "--format=gguf"), "Llama", flags=True)


@pytest.mark.parametrize("flags, word", SCRIPT, ids=[word for _, word in SCRIPT])
def test_the_script_refuses(tiny_base, tmp_path, flags, word):
    save_small(tiny_base, "gpt", "clover")
    if "--model-tag=full" in flags:
        save_small(tiny_base, "gpt", "nvidia_full", tag="full")
    if "--model-tag=nan" in flags:
        save_small(tiny_base, "gpt", "clover", tag="nan", poke=torch.nan)
    (tmp_path / "mine").touch()
    refused(lambda: exported(tmp_path, "gpt", *(flag.format(tmp_path) for flag in flags)), word, flags=True)
    assert not (tmp_path / "gpt").exists() and (tmp_path / "mine").exists()
