"""--hf-path: what is checked before a download, and which forward is measured. A stand-in for transformers reads the
folders, so these tests run where transformers is not installed."""

import importlib.util
import json
import re
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.tokenizer import RustBPETokenizer
from nanochat_fp4.models.hf_model import HuggingFaceTokenizer
from nanochat_fp4.nvfp4.layer import QuantLinear
from scripts import base_eval, base_loss

FOUR_BITS = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


class Causal(nn.Module):
    """A causal model with one linear layer and a head, as AutoModelForCausalLM returns it."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=32)
        self.embed, self.up_proj, self.lm_head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.to(dtype)

    def forward(self, ids):
        return SimpleNamespace(logits=self.lm_head(self.up_proj(self.embed(ids))))


class Words:
    """A tokenizer as AutoTokenizer returns it."""

    bos_token_id, all_special_tokens = 0, ["<bos>"]
    words = ("a", "b", "c")

    def get_vocab(self):
        return {"<bos>": 0, **{word: i + 1 for i, word in enumerate(self.words)}}

    def get_added_vocab(self):
        return {"<bos>": 0}

    def __call__(self, texts, **_):
        return {"input_ids": [[1 + ord(letter) % 3 for letter in text] for text in texts]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config, and a stand-in for transformers that reads it."""
    stand_ins, find = ("transformers", "compressed_tensors"), importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *more: ModuleSpec(name, None) if name in stand_ins else find(name, *more),
    )
    transformers = ModuleType("transformers")
    transformers.asked = []

    def config_of(path):
        return json.loads((tmp_path / path / "config.json").read_text()), {}

    def model_of(path, **how):
        transformers.asked.append(how["dtype"])
        return Causal(torch.bfloat16 if how["dtype"] == "auto" else how["dtype"]), {"missing_keys": []}

    transformers.PretrainedConfig = SimpleNamespace(get_config_dict=config_of)
    transformers.AutoConfig = SimpleNamespace(from_pretrained=lambda path, **_: path)
    empty = {"from_config": lambda config, **_: Causal(torch.bfloat16)}
    transformers.AutoModelForCausalLM = SimpleNamespace(from_pretrained=model_of, **empty)
    transformers.AutoTokenizer = SimpleNamespace(from_pretrained=lambda path, **_: Words())
    monkeypatch.setitem(__import__("sys").modules, "transformers", transformers)
    (tmp_path / "hf").mkdir()
    write_config(tmp_path / "hf")
    return tmp_path / "hf"


def write_config(folder, **entries):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **entries}))


@pytest.fixture
def no_download(monkeypatch):
    def download(*_, **__):
        raise AssertionError("downloaded before the model was checked")

    monkeypatch.setattr(base_eval, "find_bundle", download)
    monkeypatch.setattr(base_loss, "ensure_data", download)


@pytest.fixture
def core_of(folder, monkeypatch, tiny_base, capsys):
    """core_of(flags): the model whose CORE base_eval computes, and the text that it prints."""
    seen = []

    def evaluate_model(model, *_, **__):
        layer = model.model.up_proj
        quantized = isinstance(layer, QuantLinear) and layer.quantizes
        seen.append(quantized)
        assert model(torch.zeros(1, 4, dtype=torch.long)).dtype == torch.float32
        return {"results": {}, "centered_results": {}, "core_metric": 0.5, "notes": []}

    monkeypatch.setattr(base_eval, "evaluate_model", evaluate_model)
    monkeypatch.setattr(base_eval, "find_bundle", lambda _: None)

    def run(*flags):
        base_eval.main([f"--hf-path={folder}", "--device-type=cpu", *flags])
        return seen.pop(), capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "flags, quantized, words",
    [
        ((), False, "fp32 forward"),
        (("--method=clover",), True, "clover forward"),
        (("--method=clover", "--precision=bf16"), False, "bf16 forward"),
    ],
)
def test_core_is_of_the_asked_method(core_of, flags, quantized, words):
    computed, said = core_of(*flags)
    assert computed == quantized and words in said


@pytest.mark.parametrize("flags", [(), ("--method=clover",)])
def test_config_and_tokenizer_are_read_once(core_of, monkeypatch, flags):
    """On the hub each reading asks the network whether the file has changed."""
    transformers, read = __import__("transformers"), []
    for name in ("PretrainedConfig", "AutoTokenizer"):
        (what, function), *_ = vars(getattr(transformers, name)).items()

        def counted(*args, name=name, function=function, **how):
            read.append(name)
            return function(*args, **how)

        setattr(getattr(transformers, name), what, counted)
    core_of(*flags)
    assert sorted(read) == ["AutoTokenizer", "PretrainedConfig"]


def test_core_of_quantized_weights(core_of, folder):
    """transformers computes with decoded weights in the dtype of the config alone, and nothing is converted."""
    write_config(folder, quantization_config=FOUR_BITS)
    quantized, said = core_of()
    assert not quantized and "nvfp4-pack-quantized forward" in said
    assert __import__("transformers").asked == ["auto"]


@pytest.mark.parametrize("script", [base_eval, base_loss])
def test_a_tilde_is_the_home(monkeypatch, tmp_path, script):
    """A shell does not expand it behind an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert script.parse_args(["--hf-path=~/hf"]).hf_path == str(tmp_path / "hf")


@pytest.mark.parametrize("stored", [None, FOUR_BITS])
def test_bits_per_byte_convert_only_for_a_method(folder, tiny_base, monkeypatch, capsys, stored):
    """Linear layers that convert cannot take, as the decoded ones of compressed-tensors are, are no obstacle."""
    write_config(folder, **({"quantization_config": stored} if stored else {}))
    monkeypatch.setattr("nanochat_fp4.convert", lambda *_, **__: pytest.fail("nothing asked for another method"))
    base_loss.main(["--device-type=cpu", f"--hf-path={folder}", "--device-batch-size=2", "--split-tokens=128"])
    done = capsys.readouterr()
    said = stored["format"] if stored else "fp32"
    assert re.search(rf"val bpb: [\d.]+ \({said} forward\)\n", done.out) and f"val bpb, {said}" in done.err


def test_bits_per_byte_of_a_text_file_are_stored(folder, tiny_base, tmp_path, monkeypatch):
    """The tokens of own text are counted after the measurement, by the same tokenizer."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("\n\n".join(f"abc abc {i} cab" * 20 for i in range(60)))
    flags = [f"--hf-path={folder}", f"--data-dir={tmp_path / 'text'}", "--device-batch-size=2", "--split-tokens=128"]
    base_loss.main(["--device-type=cpu", *flags])
    (stored,) = (tiny_base / "base_loss").rglob("metrics.jsonl")
    events = [json.loads(line) for line in stored.read_text().splitlines()]
    assert events[-1]["val_text_tokens"] > 0 and events[-1]["bpb"] > 0


def test_both_kinds_of_tokenizers_are_called_in_the_same_ways():
    words, own = HuggingFaceTokenizer(Words()), signature(RustBPETokenizer.encode).parameters
    for name, parameter in signature(HuggingFaceTokenizer.encode).parameters.items():
        assert parameter.kind == own[name].kind and (parameter.default is own[name].default or name == "num_threads")
    assert words.encode("ab") == words.encode(["ab", "c"])[0] == words("ab", prepend=7)[1:] == [2, 3]


@pytest.mark.parametrize("script", [base_eval, base_loss])
@pytest.mark.parametrize(
    "flag, config, words",
    [
        ("--method=clover", {"quantization_config": FOUR_BITS}, "are quantized already.*leave the flag out"),
        ("--model-tag=d4", {}, "is for a model that was trained here.*leave one of the two out"),
        ("--step=3", {}, "is for a model that was trained here"),
        ("--method=clovr", {}, "did you mean"),
        (None, {"auto_map": {"AutoConfig": "modeling_nanochat_fp4.Class"}}, r"checkpoint.*\(--model-tag\)"),
    ],
)
def test_flags_are_refused_before_a_download(folder, tiny_base, no_download, script, flag, config, words):
    write_config(folder, **config)
    with pytest.raises(UserError, match=words):
        script.main(["--device-type=cpu", f"--hf-path={folder}", *([flag] if flag else [])])


@pytest.mark.parametrize("script", [base_eval, base_loss])
def test_a_flag_that_quantized_weights_refuse_is_named_before_a_missing_tokenizer(folder, tiny_base, script):
    """Whoever copied the tokenizer there would only then hear that it does not help."""
    write_config(folder, quantization_config=FOUR_BITS)
    __import__("transformers").AutoTokenizer.from_pretrained = lambda *_, **__: pytest.fail("too early")
    with pytest.raises(UserError, match="are quantized already"):
        script.main(["--device-type=cpu", f"--hf-path={folder}", "--method=clover"])


def test_bf16_forward_of_quantized_weights_is_refused(core_of, folder):
    write_config(folder, quantization_config=FOUR_BITS)
    with pytest.raises(UserError, match="--precision=bf16: .* are quantized already"):
        core_of("--precision=bf16")


@pytest.mark.parametrize("script", [base_eval, base_loss])
def test_a_missing_model_is_named_before_a_download(folder, tiny_base, no_download, script):
    for path in (f"{folder}/nowhere", "../nowhere", "my/own/nowhere"):
        with pytest.raises(UserError, match="there is no such folder; give a folder with config.json"):
            script.main(["--device-type=cpu", f"--hf-path={path}"])
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="there is no config.json"):
        script.main(["--device-type=cpu", f"--hf-path={folder}"])
    with pytest.raises(UserError, match="there is no base checkpoint"):
        script.main(["--device-type=cpu"])


@pytest.mark.parametrize("script", [base_eval, base_loss])
def test_a_tokenizer_without_tokens_is_refused(folder, tiny_base, no_download, monkeypatch, script):
    monkeypatch.setattr(Words, "words", ())
    with pytest.raises(UserError, match="its tokenizer has no tokens.*copy the tokenizer's files there"):
        script.main(["--device-type=cpu", f"--hf-path={folder}"])


def test_a_long_error_ends_after_a_word(folder):
    from nanochat_fp4.models.hf_model import describe, load_hf_model

    def refuse(*_, **__):
        raise ValueError("word " * 100)

    __import__("transformers").AutoModelForCausalLM.from_pretrained = refuse
    with pytest.raises(UserError, match=r"word \.\.\.\); give a folder"):
        load_hf_model(describe(str(folder)), torch.device("cpu"))
    write_config(folder, auto_map={"AutoConfig": "other.Class"})
    with pytest.raises(UserError, match="needs no code of its own"):
        load_hf_model(describe(str(folder)), torch.device("cpu"))
