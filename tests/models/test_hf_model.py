"""Models of transformers: no code of theirs runs, and weights that do not fit are refused."""

import json

import pytest
import torch
from _samples import make_bundle

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from scripts import base_eval, base_loss

transformers = pytest.importorskip("transformers")

from nanochat_fp4.models.hf_model import describe, load_hf_model  # noqa: E402

CODE = """
from pathlib import Path
Path({ran!r}).touch()
from transformers import {base} as Class
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A GPT-2 of one layer with a tokenizer."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    from tokenizers import ByteLevelBPETokenizer

    words = ByteLevelBPETokenizer()
    words.train_from_iterator(["the capital of gold planets"] * 3, vocab_size=300, special_tokens=["<|bos|>"])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, bos_token="<|bos|>")
    tokenizer.save_pretrained(tmp_path / "hf")
    config = transformers.GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("base, name", [("GPT2Config", "config"), ("PreTrainedTokenizerFast", "tokenizer_config")])
def test_no_code_of_a_folder_runs(folder, tmp_path, monkeypatch, base, name):
    """Nobody is asked whether to trust the folder: an answer on stdin changes nothing."""
    assert base_eval.load_hf_model is base_loss.load_hf_model is load_hf_model
    (folder / "code.py").write_text(CODE.format(ran=str(tmp_path / "ran"), base=base))
    classes = {"AutoConfig": "code.Class", "AutoModelForCausalLM": "code.Class"}
    classes = classes if name == "config" else {"AutoTokenizer": ["code.Class", "code.Class"]}
    rewrite(folder / f"{name}.json", auto_map=classes, model_type="x", architectures=["X"], tokenizer_class="X")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    try:
        load_hf_model(describe(str(folder)), torch.device("cpu"))  # where transformers finds a class of its own
    except UserError as refused:
        assert "transformers" in str(refused) and "\n" not in str(refused)
    assert not (tmp_path / "ran").exists()


def test_no_texts_have_no_ids(folder):
    """transformers' own tokenizers raise IndexError for an empty list."""
    tokenizer = describe(str(folder)).tokenizer
    assert tokenizer.encode([], prepend=1) == [] and tokenizer.encode([""], prepend=1) == [[1]]


def test_weights_that_do_not_fit_are_refused(folder):
    from safetensors.torch import load_file, save_file

    load_hf_model(describe(str(folder)), torch.device("cpu"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("mlp.c_fc.weight"))
    short = {**tensors, name: torch.ones(3, 3)}
    for kind, changed in (
        ("missing keys", {k: t for k, t in tensors.items() if k != name}),
        ("unexpected keys", {**tensors, "transformer.h.0.attn.more.weight": torch.ones(2)}),
        ("mismatched keys", short),
    ):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=rf"do not fit its config.json \({kind}: .*; give a whole model") as refused:
            load_hf_model(describe(str(folder)), torch.device("cpu"))
        assert "\n" not in str(refused.value)


def test_core_of_a_model_of_transformers(folder, tiny_base, tmp_path, capsys):
    bundle = make_bundle(tmp_path / "bundle")
    base_eval.main([f"--hf-path={folder}", f"--bundle-dir={bundle}", "--max-per-task=3", "--device-type=cpu"])
    assert f"CORE of {folder}, fp32 forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    "method, said", [("clover", "nvfp4-pack-quantized"), ("clover_fp8_forward", "float-quantized")]
)
def test_quantized_folder_is_evaluated(folder, tiny_base, tmp_path, capsys, method, said):
    """CORE and bits per byte of a folder of nf.save_quantized. Bits per byte are those of its decoded weights."""
    pytest.importorskip("compressed_tensors")
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    nf.save_quantized(nf.convert(model, method, verbose=False), tmp_path / "four", tokenizer=tokenizer)
    nf.load_quantized(decoded := transformers.LlamaForCausalLM(config), tmp_path / "four")
    decoded.save_pretrained(tmp_path / "decoded")
    tokenizer.save_pretrained(tmp_path / "decoded")
    bundle = make_bundle(tmp_path / "bundle")
    flags = [f"--bundle-dir={bundle}", "--max-per-task=3", "--device-type=cpu"]
    base_eval.main([f"--hf-path={tmp_path / 'four'}", *flags])
    assert f"{said} forward" in capsys.readouterr().out
    bpb = {}
    for name in ("four", "decoded"):
        base_loss.main(
            ["--device-type=cpu", f"--hf-path={tmp_path / name}", "--device-batch-size=2", "--split-tokens=128"]
        )
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("val bpb: ")]
        bpb[name] = float(lines[0].split()[2])
    assert bpb["four"] == pytest.approx(bpb["decoded"], rel=2e-3)  # BF16 against FP32


def test_experts_in_nvfp4_are_refused_before_they_are_loaded(folder, tmp_path, monkeypatch):
    """transformers reads them without their weight_global_scale, and says nothing. It reads those in FP8 right."""
    pytest.importorskip("compressed_tensors")
    config = transformers.Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model, tokenizer = transformers.Qwen3MoeForCausalLM(config), transformers.AutoTokenizer.from_pretrained(folder)
    nf.save_quantized(nf.convert(model, "fp8", verbose=False), tmp_path / "eight", tokenizer=tokenizer)
    load_hf_model(describe(str(tmp_path / "eight")), torch.device("cpu"))
    nf.save_quantized(nf.convert(model, "clover", verbose=False), tmp_path / "moe", tokenizer=tokenizer)
    rows = [torch.randint(300, (2, 8))]
    nf.save_quantized(model, tmp_path / "inputs", tokenizer=tokenizer, calibration=rows)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("too late"))
    for name in ("moe", "inputs"):
        with pytest.raises(UserError, match="experts right in FP8 .* alone.*; load the folder with"):
            load_hf_model(describe(str(tmp_path / name)), torch.device("cpu"))
    card = (tmp_path / "moe/README.md").read_text()
    code = "\n".join(line[4:] for line in card.partition("## Use")[2].splitlines() if line.startswith("    "))
    spoken: dict = {}
    exec(code.replace('"."', repr(str(tmp_path / "moe"))), spoken)
    weights = [m.model.layers[0].mlp.experts.down_proj for m in (spoken["model"], model)]
    assert torch.nn.functional.cosine_similarity(*(w.detach().flatten() for w in weights), dim=0) > 0.98
