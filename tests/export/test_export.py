"""scripts.export: bytes as the formats have them, the tokenizer, what was measured, and what comes back."""

import json
import shutil
from dataclasses import replace

import jinja2
import numpy as np
import pytest
import regex
import torch
from _assertions import assert_same_bits
from _exporting import exported_code, read_safetensors, save_small, swapped
from _samples import make_bundle
from _training import BASE, MID, SFT

pytest.importorskip("safetensors")
from safetensors.torch import load_file

import nanochat_fp4 as nf
from nanochat_fp4.cli import UserError
from nanochat_fp4.data.dataset import build_embedded_corpus
from nanochat_fp4.data.tokenizer import get_tokenizer
from nanochat_fp4.data.tokenizer_files import CHAT_TEMPLATE, tokenizer_json
from nanochat_fp4.evaluation.report import read_run
from nanochat_fp4.export.weights import forward_weights, served, static_quantize
from nanochat_fp4.models.gpt import GPT
from nanochat_fp4.nvfp4.epilogue import groups_of
from nanochat_fp4.nvfp4.quantizers import Quantization, quantize_reference
from nanochat_fp4.nvfp4.roundings import get_rounding
from nanochat_fp4.training.checkpoint_manager import load_checkpoint
from nanochat_fp4.training.load_model import load_model
from scripts import base_eval, base_loss, base_train, chat_cli, chat_sft, export, mid_train

OUTSIDE = {"gpt": 2, "llama": 3}  # tensors that are in no layer: embedding, head; Llama's last norm

NAMES = {"attn.c_q": "self_attn.q_proj", "attn.c_k": "self_attn.k_proj", "attn.c_v": "self_attn.v_proj",
         "attn.c_proj": "self_attn.o_proj"}  # fmt: skip
MLP = {"gpt": {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"},
       "llama": {"mlp.c_gate": "mlp.gate_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}}  # fmt: skip
QKV = ("attn.c_q", "attn.c_k", "attn.c_v")
FUSED = {"gpt": (QKV,), "llama": (QKV, ("mlp.c_gate", "mlp.c_fc"))}  # computed as one layer


def run(tmp_path, *flags: str, out: str = "out"):
    """The export of a tag, measured on nothing; returns the folder."""
    export.main(["--source=base", f"--out={tmp_path / out}", "--eval-tokens=0", "--calibration-tokens=64", *flags])
    return tmp_path / out


def fresh(model: torch.nn.Module) -> torch.nn.Module:
    """A model of the same shapes with other weights."""
    other = type(model)(model.config)
    other.init_weights()
    return other.eval()


@pytest.mark.parametrize(
    "family, method, rounding", [("gpt", "nvidia", "rtn_16x16"), ("llama", "clover", "four_over_six")]
)
def test_the_codes_of_the_forward_pass(tiny_base, tmp_path, family, method, rounding):
    """Every layer's codes, block scales and 1 / tensor_scale; q, k and v are one layer, and Llama's gate and up."""
    model = save_small(tiny_base, family, method)
    folder = run(tmp_path, f"--model-tag={family}", "--format=compressed-tensors")
    tensors = read_safetensors(folder / "model.safetensors")
    quantized = 0
    for i, block in enumerate(model.transformer.h):
        for ours, theirs in (NAMES | MLP[family]).items():
            weight = block.get_submodule(ours).weight.detach()
            rows = slice(0, len(weight))
            for group in FUSED[family]:
                if ours in group:
                    parts = [block.get_submodule(name).weight for name in group]
                    start = sum(len(p) for p in parts[: group.index(ours)])
                    rows, weight = slice(start, start + len(weight)), torch.cat(parts)
            want = nf.quantize(weight, rounding)
            codes, scales = want.codes[rows].numpy(), want.scales.view(torch.uint8)[rows].numpy()
            if family == "llama" and ours in ("attn.c_q", "attn.c_k"):
                codes, scales = (swapped(x, model.config.n_head) for x in (codes, scales))
            name = f"model.layers.{i}.{theirs}"
            for part, dtype, array in (
                ("weight_packed", "U8", codes),
                ("weight_scale", "F8_E4M3", scales),
                ("weight_global_scale", "F32", (1 / want.tensor_scale).reshape(1).numpy()),
            ):
                got_dtype, got = tensors[f"{name}.{part}"]
                assert got_dtype == dtype and got.shape == array.shape and (got == array).all(), f"{name}.{part}"
            assert tensors[f"{name}.input_global_scale"][1].shape == (1,)
            quantized += 1
    config = json.loads((folder / "config.json").read_text())
    norms = 4 if family == "llama" else 0
    assert len(tensors) == 4 * quantized + norms + OUTSIDE[family]
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    head = model.lm_head.weight.detach()[: config["vocab_size"]].bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert tensors["lm_head.weight"][0] == "BF16" and (tensors["lm_head.weight"][1] == head).all()


def test_the_exported_code_computes_what_was_trained(tiny_base, tmp_path):
    """The bits of gpt.py's logits, of a model through base, mid and SFT, at positions where BF16 angles are close."""
    base_train.main([*BASE, "--depth=1", "--max-seq-len=256", "--total-batch-size=512", "--eval-tokens=512",
                     "--model-tag=small", "--num-iterations=2"])  # fmt: skip
    mid_train.main([*MID, "--num-iterations=2"])
    chat_sft.main([*SFT, "--num-iterations=2"])
    folder = run(tmp_path, "--source=sft", "--format=safetensors", "--dtype=float32")
    model, _, _ = load_model("sft", "cpu", "eval")
    exported = exported_code(folder)
    assert bool((model.x0_lambdas != 0).any())
    ids = torch.randint(model.config.vocab_size, (2, 600))
    with torch.no_grad():
        assert_same_bits("logits", exported(ids).logits, model(ids))


def test_inputs_as_a_server_rounds_them():
    """With the constant of the tensor's own amax that is rtn; larger values are clipped, as a server must."""
    x = torch.randn(5, 64)
    t = nf.quantize(x, "rtn")
    assert torch.allclose(static_quantize(x, 448 * 6 / x.abs().max()), t.dequantize(), rtol=1e-6)
    by_token = static_quantize(x, 448 * 6 / x.abs().amax(dim=-1, keepdim=True))
    assert torch.allclose(
        by_token, quantize_reference(x, Quantization(get_rounding("rtn"), per_token=True)).dequantize(), rtol=1e-6
    )
    clipped = static_quantize(torch.full((1, 16), 3.0), torch.tensor(448 * 6 / 2.0))
    assert torch.allclose(clipped, torch.tensor(2.0))
    assert_same_bits("zeros", static_quantize(torch.zeros(1, 16), torch.tensor(1.0)), torch.zeros(1, 16))


def test_a_lean_training_is_exported_evaluated_and_talked_to(tiny_base, tmp_path, capsys):
    """Weights are BF16 in the checkpoint, and the same bits in the file."""
    base_train.main([*BASE, "--method=clover", "--state=lean", "--num-iterations=2", "--model-tag=lean"])
    trained, _, _ = load_checkpoint(tiny_base / "base_checkpoints" / "lean", 2, "cpu")
    for file_format in "compressed-tensors", "safetensors":
        folder = run(tmp_path, "--model-tag=lean", f"--format={file_format}", "--overwrite")
    exported = load_file(folder / "model.safetensors")
    for ours, theirs in (NAMES | MLP["gpt"]).items():
        assert_same_bits(ours, exported[f"model.layers.0.{theirs}.weight"], trained[f"transformer.h.0.{ours}.weight"])
    base_loss.main(["--model-tag=lean", "--device-batch-size=2", "--split-tokens=256"])
    chat_cli.main(["-i", "base", "-g", "lean", "-p", "Hello", "--device-type=cpu"])
    assert "\nHello" in capsys.readouterr().out


def test_what_is_lost_and_what_was_measured(tiny_base, tmp_path, capsys):
    """8-bit integers: rounded again to NVFP4, and what that costs stands in the model card."""
    nf.register(replace(nf.get_recipe("clover"), name="ends_in_integers", late=(0.7, nf.get_recipe("integers"))))
    save_small(tiny_base, "gpt", "ends_in_integers")
    folder = run(tmp_path, "--format=compressed-tensors", "--eval-tokens=128")
    out, card = capsys.readouterr().out, (folder / "README.md").read_text()
    for text in (out, card):
        assert "rounded again" in text
    rows = {c[1].strip(): c[2].strip() for c in (r.split("|") for r in card.splitlines()) if len(c) == 4}
    assert rows["forward pass exported"] == "integers" and rows["steps"] == "7"
    names = ["trained: integers", "FP32 weights and inputs"]
    inputs = ("FP32 inputs", "NVFP4 inputs with a scale for each token", "NVFP4 inputs with static scales")
    names += [f"exported: NVFP4 weights, {what}" for what in inputs]
    trained, exact, weights, by_token, inputs = (float(rows[name]) for name in names)
    assert card.count("logits move by") == 2
    # Random weights: the order of the four is chance, but 4 bits must be further from FP32 than 8.
    assert abs(trained - exact) < abs(weights - exact) and len({weights, by_token, inputs}) == 3


def test_evaluations_make_weights_once(tiny_base, tmp_path, monkeypatch, capsys):
    """No batch of an evaluation quantizes weights. Each evaluation says how far it is."""
    save_small(tiny_base, "gpt", "clover")
    made_anew, forward = [], GPT.forward

    def watched(model, *args, **kwargs):
        groups = groups_of(model)
        made_anew.append(any(not any(c.weights for c in g[0].contexts) for g in groups))
        return forward(model, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", watched)
    bundle = make_bundle(tmp_path / "bundle")
    measured = ["--eval-tokens=256", "--calibration-tokens=256"]
    flags = {
        export: ["--source=base", "--format=compressed-tensors", f"--out={tmp_path / 'out'}", *measured],
        base_loss: ["--device-batch-size=2", "--split-tokens=128"],
        base_eval: [f"--bundle-dir={bundle}", "--max-per-task=3"],
    }
    lines = {
        export: ("calibration: 2/2", "bits per byte, trained: clover: 2/2", "static scales: 2/2"),
        base_loss: ("train bpb, clover: 2/2", "val bpb, FP32 forward: 2/2"),
        base_eval: ("CORE: 9/9",),
    }
    for script, argv in flags.items():
        made_anew.clear()
        script.main([*argv, "--device-type=cpu"])
        assert made_anew and not any(made_anew), f"{script.__name__}: {sum(made_anew)} of {len(made_anew)} passes"
        err = capsys.readouterr().err
        assert all(line in err for line in lines[script]), err


def test_texts_to_compare_tokenizers_on_are_documents(tiny_base, tmp_path, monkeypatch):
    save_small(tiny_base, "gpt", "clover")
    one = export.Export(export.parse_args(["--source=base", f"--out={tmp_path}", "--format=safetensors"]), "cpu")
    bos, text = one.tokenizer.get_bos_token_id(), one.tokenizer.encode("gold planets")
    monkeypatch.setattr(one, "batches", lambda *_: [(torch.tensor([[bos, *text, bos, *text[:-1], bos]]), None)])
    assert one.validation_texts() == ["gold planets", one.tokenizer.decode(text[:-1])]


@pytest.mark.parametrize("shared", [True, False])
def test_flags_of_the_scales(tiny_base, tmp_path, capsys, shared):
    """Weights alone; and layers that servers compute as one, where the model computes them one by one."""
    model = save_small(tiny_base, "gpt", "clover", separate_qkv=True)
    flags = [] if shared else ["--no-share-scales"]
    folder = run(tmp_path, "--format=compressed-tensors", "--weights-only", *flags)
    for text in (capsys.readouterr().out, (folder / "README.md").read_text()):
        assert ("common tensor scales" in text) == shared and "vLLM" not in text
    tensors = read_safetensors(folder / "model.safetensors")
    assert not any(name.endswith("input_global_scale") for name in tensors)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"] is None
    weights = [getattr(model.transformer.h[1].attn, f"c_{n}").weight for n in "qkv"]
    together = nf.quantize(torch.cat(weights), "four_over_six")
    codes = together.codes.split([len(w) for w in weights])
    alone = [nf.quantize(w, "four_over_six") for w in weights]
    for i, n in enumerate("qkv"):
        name = f"model.layers.1.self_attn.{n}_proj"
        scale = (together if shared else alone[i]).tensor_scale
        assert tensors[f"{name}.weight_global_scale"][1][0] == (1 / scale).item()
        assert (tensors[f"{name}.weight_packed"][1] == (codes[i] if shared else alone[i].codes).numpy()).all()


@pytest.mark.parametrize("family, flags", [("gpt", ()), ("llama", ("--weights-only",))])
def test_layers_in_8_bits_go_out_and_come_back(tiny_base, tmp_path, capsys, family, flags):
    model = save_small(tiny_base, family, "clover_fp8_forward")
    folder = run(tmp_path, "--format=compressed-tensors", *flags)
    assert "calibration" not in capsys.readouterr().err  # Scales of each token need none.
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    assert config["format"] == "float-quantized" and config["ignore"] == ["lm_head"]
    inputs = group["input_activations"]
    assert inputs is None if flags else (inputs["strategy"], inputs["dynamic"]) == ("token", True)
    nf.convert(model, "clover_fp8_forward", backward=False, verbose=False)
    back = nf.load_quantized(fresh(model), folder)
    for name, tensor in forward_weights(model)[0].items():
        assert_same_bits(name, back.get_submodule(name).weight.detach(), tensor.dequantize())


@pytest.mark.parametrize(
    "file_format, method, tags",
    [
        ("compressed-tensors", "clover", "nvfp4"),
        ("compressed-tensors", "fp8", "fp8"),
        ("safetensors", "bf16", ""),
        ("safetensors", "clover", ""),
    ],
)
def test_the_card_names_what_is_in_the_folder(tiny_base, tmp_path, capsys, file_format, method, tags):
    """Bits in words and tags; no path of this machine; and that a quantized folder is read without dtype."""
    save_small(tiny_base, "gpt", method, data_dir=str(tmp_path / "embedded_data" / "10_mb.jsonl"))
    folder = run(tmp_path, f"--format={file_format}", "--eval-tokens=64")
    card, out = (folder / "README.md").read_text(), capsys.readouterr().out
    assert f"tags: [{', '.join(filter(None, ('nanochat', tags)))}]" in card
    for text in (card, out.replace(str(folder), "")):
        assert "4 bits" not in text and "4-bit" not in text and str(tmp_path) not in text
        assert ("NVFP4 weights" in text) == (tags == "nvfp4") and ("FP8 weights" in text) == (tags == "fp8")
    assert "| data | 10_mb.jsonl |" in card and ("no dtype" in card) == bool(tags)
    assert ("| forward pass exported | not quantized" in card) != bool(tags) and "measured it | 1.5000 |" in card


def test_a_model_is_measured_on_the_text_of_its_run(tiny_base, tmp_path, monkeypatch, capsys):
    """Without DATA_DIR and --data-dir, also a model of a later stage. Any other text is named."""
    mine, wiki = tmp_path / "mytexts", tmp_path / "wiki"
    for folder, what in ((mine, "gold planets"), (wiki, "wrong dogs")):
        folder.mkdir()
        (folder / "a.txt").write_text("\n\n".join(f"Of {what}, paragraph {i}." for i in range(600)))
    monkeypatch.delenv("DATA_DIR")
    base_train.main([*BASE, "--model-tag=small", "--num-iterations=1", f"--data-dir={mine}"])
    mid_train.main([*MID, "--model-tag=small", "--num-iterations=1"])
    scores = ["--device-batch-size=2", "--split-tokens=64"]

    def measured(*flags: str) -> str:
        folder = run(tmp_path, "--format=compressed-tensors", "--eval-tokens=64", "--overwrite", *flags)
        card = (folder / "README.md").read_text()
        assert str(tmp_path) not in card and "not known" not in card
        return card

    capsys.readouterr()
    for source, row in (("base", "| data | mytexts |"), ("mid", "| data of the base training | mytexts |")):
        card = measured(f"--source={source}")
        assert "validation tokens of mytexts, on" in card and row in card and "This is" not in card
        assert ("measured it on conversations |" in card) == (source == "mid")
    base_loss.main(scores)
    assert f"on {mine}" in (out := capsys.readouterr().out) and "This is" not in out
    before = read_run("small", tiny_base)["measured"]
    other = "This is measured on wiki, and small was trained on mytexts"
    assert f"- {other}.\n" in (card := measured(f"--data-dir={wiki}")) and "tokens of wiki, on" in card
    assert f"\n{other}; give the text of its training with --data-dir" in capsys.readouterr().out
    monkeypatch.setenv("DATA_DIR", str(wiki))
    base_loss.main(scores)  # The report keeps the loss on the run's text.
    assert read_run("small", tiny_base)["measured"] == before and before["event"] == "base_loss"
    assert (tiny_base / "report/small/base-model-loss-on-wiki.json").is_file()
    monkeypatch.delenv("DATA_DIR")
    (mine / "b.txt").write_text("One more file.")
    assert "trained on mytexts with other files, another split or" in measured()
    shutil.rmtree(mine)
    for script, flags in (
        (run, [tmp_path, "--format=safetensors", "--eval-tokens=64", "--overwrite"]),
        (base_loss.main, [scores]),
    ):
        with pytest.raises(
            UserError, match="mytexts, the text of small, is not there; give it or another with --data-dir"
        ):
            script(*flags)
    shutil.rmtree(tiny_base / "base_checkpoints")
    run(tmp_path, "--source=mid", "--format=safetensors", "--eval-tokens=64", "--overwrite", f"--data-dir={wiki}")
    assert "small was trained on a text that is not known" in capsys.readouterr().out


def test_the_text_of_a_base_directory_that_was_moved_is_found_in_it(tiny_base, monkeypatch, capsys):
    monkeypatch.delenv("DATA_DIR")
    monkeypatch.setattr(base_train, "text_of_base", lambda tag: ("/gone/embedded_data/10_mb_of_python_3.jsonl", None))
    corpus = build_embedded_corpus(0.2)
    assert str(base_train.text_to_measure("small", None)[0].folder) == corpus


def test_a_server_rounds_the_inputs_of_8_bit_layers_to_8_bits(tiny_base):
    """As an evaluation does, with a scale for each token."""
    model = save_small(tiny_base, "gpt", "clover_fp8_forward")
    nf.convert(model, "clover_fp8_forward", backward=False, verbose=False)
    ids = torch.arange(64).view(2, 32) % model.config.vocab_size
    with torch.no_grad():
        own, (weights, _) = model(ids), forward_weights(model)
        with served(model, weights, dict.fromkeys(weights)) as copied:
            got = copied(ids)
        with served(model, weights) as copied:
            exact = copied(ids)
    assert (got - own).norm() < 0.1 * (exact - own).norm()


# ----------------------------------------------------------------------------------------------------------------------
# The tokenizer

TEXTS = ["the capital of gold planets", "1234567 12.5 a\n\n  b\tc", "Ünïcödé \U0001f600 日本語 don't  ", "aaaa bb",
         "was tomorrow\r\n\r\nopposite<|bos|>symbol"]  # fmt: skip


def encode(file: dict, text: str) -> list[int]:
    """The ids that a byte-level BPE of the tokenizers library gives a text without special tokens, by its rules."""
    split, byte_level = file["pre_tokenizer"]["pretokenizers"]
    assert byte_level["add_prefix_space"] is False and file["model"]["ignore_merges"]
    vocab, order = file["model"]["vocab"], {tuple(pair): i for i, pair in enumerate(file["model"]["merges"])}
    characters = [c for c in range(256) if chr(c).isprintable() and not chr(c).isspace() and c != 0xAD]
    others = iter(range(256, 512))
    table = [chr(b if b in characters else next(others)) for b in range(256)]
    ids = []
    for piece in regex.findall(split["pattern"]["Regex"], text):
        symbols = [table[b] for b in piece.encode()]
        if "".join(symbols) in vocab:
            symbols = ["".join(symbols)]
        while pairs := [(order[p], i) for i, p in enumerate(zip(symbols, symbols[1:])) if p in order]:
            _, i = min(pairs)
            symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
        ids += [vocab[s] for s in symbols]
    return ids


def test_tokenizer_json_gives_the_same_ids(tiny_base):
    tokenizer = get_tokenizer()
    file = tokenizer_json(tokenizer)
    for text in TEXTS[:-1]:
        assert encode(file, text) == tokenizer.encode(text), text
    assert {t["content"]: t["id"] for t in file["added_tokens"]} == tokenizer.enc._special_tokens


CONVERSATION = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "the capital?"},
    {"role": "assistant", "content": [
        {"type": "text", "text": "hot "}, {"type": "python", "text": "12+3"},
        {"type": "python_output", "text": "15"}, {"type": "text", "text": "\n planets"}]},
    {"role": "user", "content": " gold\n"},
    {"role": "assistant", "content": "dog"},
]  # fmt: skip


def test_the_chat_template_is_what_training_rendered(tiny_base):
    tokenizer = get_tokenizer()
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    want, _ = tokenizer.render_conversation({"messages": CONVERSATION})
    text = template.render(messages=CONVERSATION, add_generation_prompt=False)
    assert tokenizer.enc.encode(text, allowed_special="all") == want
    primed = tokenizer.render_for_completion({"messages": CONVERSATION})
    text = template.render(messages=CONVERSATION[:-1], add_generation_prompt=True)
    assert tokenizer.enc.encode(text, allowed_special="all") == primed


# ----------------------------------------------------------------------------------------------------------------------
# Back in


@pytest.mark.parametrize(
    "family, file_format",
    [("gpt", "safetensors"), ("llama", "safetensors"), ("llama", "compressed-tensors"), ("gpt", "compressed-tensors")],
)
def test_what_was_exported_comes_back(tiny_base, tmp_path, family, file_format):
    """Decoded weights to train on."""
    model = save_small(tiny_base, family, "clover")
    folder = run(tmp_path, "--format", file_format, "--dtype=float32")
    ids = torch.randint(300, (2, 24))
    loaded = nf.load_quantized(fresh(model), folder)
    if file_format == "safetensors":
        assert_same_bits("logits", loaded(ids), model(ids))
        return
    want = nf.quantize(model.transformer.h[1].mlp.c_proj.weight, "four_over_six").dequantize()
    assert torch.allclose(loaded.transformer.h[1].mlp.c_proj.weight, want, rtol=1e-6)
    nf.convert(loaded, "clover", verbose=False)
    loaded(ids, ids).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in loaded.parameters() if p.ndim > 1)
