"""tok_train and tok_eval from the command line: what they write, print and report, and how they fail."""

import json
import os
import pickle
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiktoken
import torch
from _samples import save_base

from nanochat_fp4.cli import UserError
from nanochat_fp4.data import tokenizer
from nanochat_fp4.data.dataset import open_text
from nanochat_fp4.data.tokenizer import SPLIT_PATTERN, RustBPETokenizer, get_token_bytes, get_tokenizer
from nanochat_fp4.evaluation import report
from nanochat_fp4.evaluation.report import get_report
from scripts import base_train, tok_eval, tok_train
from scripts.plan import Plan

WORDS = "training a tokenizer needs text, some of it long and some of it short; 12 345 words or so".split()


@pytest.fixture
def data(tmp_path, base_dir):
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    for s in range(2):
        texts = [" ".join(rng.choices(WORDS, k=rng.randint(5, 200))) + "." for _ in range(60)]
        pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), folder / f"{s}.parquet", row_group_size=20)
    return folder


def test_train_then_eval(data, base_dir, capsys):
    tok_train.main(["--vocab-size=300", f"--data-dir={data}", "--max-chars=100000", "--doc-cap=500"])
    out = capsys.readouterr().out
    assert "vocab_size: 300" in out and "max_chars: 100,000" in out and "Training time" in out
    tokenizer = get_tokenizer()
    assert tokenizer.get_vocab_size() == 300
    assert torch.equal(get_token_bytes(), tokenizer.token_bytes())

    tok_eval.main(["--no-compare", f"--data-dir={data}"])
    out = capsys.readouterr().out
    rows = {line.split("|")[1].strip(): line.split("|")[2:5] for line in out.splitlines() if line.startswith("| ")}
    names = {f"data-{split} ({data.name})" for split in ("train", "val")}
    assert {"news", "korean", "code", "math", "science"} | names <= set(rows)
    text = "\n".join(open_text("val", data)[0].read(0))
    size, tokens, ratio = (field.strip().replace(",", "") for field in rows[f"data-val ({data.name})"])
    assert int(size) == len(text) and int(tokens) == len(tokenizer.encode(text))
    assert float(ratio) == pytest.approx(len(text) / int(tokens), abs=0.006)

    sections = {}
    for name in os.listdir(base_dir / "report"):
        record = json.loads((base_dir / "report" / name).read_text())
        sections[record["section"]] = json.dumps(record["data"])
    assert set(sections) == {"Tokenizer training", "Tokenizer evaluation"}
    assert tokenizer.fingerprint() in sections["Tokenizer training"]
    assert f"data-val ({data.name})" in sections["Tokenizer evaluation"]


def test_caps_are_obeyed(data, base_dir, monkeypatch):
    """--doc-cap cuts each document, --max-chars ends the reading, as in nanochat (the last document is still taken)."""
    seen = []

    def train(texts, vocab_size):
        seen.extend(texts)
        raise UserError("enough")

    monkeypatch.setattr(tok_train.RustBPETokenizer, "train_from_iterator", train)
    with pytest.raises(UserError, match="enough"):
        tok_train.main([f"--data-dir={data}", "--doc-cap=40", "--max-chars=1000", "--vocab-size=300"])
    lengths = list(map(len, seen))
    assert max(lengths) == 40 and sum(lengths) > 1000 >= sum(lengths[:-1])


def test_a_vocabulary_larger_than_the_text_has(data, capsys):
    tok_train.main(["--vocab-size=50000", f"--data-dir={data}"])
    assert "--vocab-size 50,000" in capsys.readouterr().out


def test_comparison_with_published_tokenizers(data, capsys, caplog, monkeypatch):
    tok_train.main(["--vocab-size=300", f"--data-dir={data}"])
    ranks = {bytes([b]): b for b in range(256)}
    enc = tiktoken.Encoding("x", pat_str=r"\s|\S+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})

    def get_encoding(name):
        if name == "gpt2":
            return enc
        raise OSError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", get_encoding)
    capsys.readouterr()
    tok_eval.main([f"--data-dir={data}"])
    out = capsys.readouterr().out
    assert "### Comparison with GPT-2 (257 tokens)" in out and "Comparison with GPT-4" not in out
    assert "no comparison with GPT-4: tokenizer cl100k_base cannot be had (no network)" in caplog.text


def test_a_tokenizer_that_checkpoints_need_is_kept(tiny_base):
    before = (tiny_base / "tokenizer" / "tokenizer.json").read_bytes()
    train = ["--vocab-size=290", "--max-chars=20000"]
    save_base(tiny_base, tag="d2_clover", n_layer=1)
    save_base(tiny_base, tag="d2_clover", source="chatsft_checkpoints", n_layer=1)
    with pytest.raises(
        UserError, match="tokenizer of base_checkpoints/d2_clover, chatsft_checkpoints/d2_clover, which"
    ):
        tok_train.main(train)
    assert (tiny_base / "tokenizer" / "tokenizer.json").read_bytes() == before
    tok_train.main([*train, "--overwrite"])
    assert (tiny_base / "tokenizer" / "tokenizer.json").read_bytes() != before
    tok_train.main(train)  # these checkpoints are lost already


@pytest.fixture
def nanochats(base_dir):
    """A base directory of nanochat's, with a tokenizer, a model and a report: its files and their bytes."""
    pickled = RustBPETokenizer.from_parts(SPLIT_PATTERN, {bytes([b]): b for b in range(256)})
    for name in ("tokenizer/tokenizer.pkl", "tokenizer/token_bytes.pt", "report/report.md", "base_eval/gpt2.csv"):
        (base_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (base_dir / name).write_text(f"nanochat's {name}\n")
    (base_dir / "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(pickled.enc))
    (base_dir / "base_checkpoints/d12").mkdir(parents=True)
    for name, content in (("model", {"lm_head.weight": torch.ones(265, 4)}), ("optim", {})):
        torch.save(content, base_dir / f"base_checkpoints/d12/{name}_007080{'_rank0' * (name == 'optim')}.pt")
    meta = {"step": 7080, "model_config": {"vocab_size": pickled.get_vocab_size()}}
    (base_dir / "base_checkpoints/d12/meta_007080.json").write_text(json.dumps(meta))
    return {path: path.read_bytes() for path in base_dir.rglob("*") if path.is_file()}


def test_no_file_of_nanochats_is_replaced(nanochats, data, base_dir, capsys):
    """Also after the conversion of its tokenizer, which a run then keeps."""

    def kept() -> bool:
        return {path: path.read_bytes() for path in nanochats} == nanochats

    variables = {"NANOCHAT_BASE_DIR": str(base_dir), "DATA_DIR": str(data), "VOCAB_SIZE": "265"}
    for attempt in (
        lambda: tok_train.main(["--vocab-size=300", f"--data-dir={data}"]),
        lambda: Plan("speedrun", variables),
    ):
        with pytest.raises(UserError, match=f": NANOCHAT_BASE_DIR={base_dir} python -m .* --allow-pickle, then"):
            attempt()
        assert kept() and not (base_dir / "stored_text").exists()
    with pytest.raises(UserError, match="--overwrite"):
        base_train.main(["--model-tag=d12", "--depth=1", f"--data-dir={data}"])
    tokenizer.main(["--allow-pickle"])
    assert kept() and Plan("speedrun", variables | {"PLAN_ONLY": "1"}).tokenizer
    with pytest.raises(UserError, match="nanochat's"):
        tok_train.main(["--vocab-size=300", f"--data-dir={data}"])
    get_report("d1_bf16").log("Base model training", [{"Layers": 1}])
    report.main([])
    assert kept() and capsys.readouterr().out.splitlines()[-1].endswith("report_fp4.md")


def test_a_tokenizer_that_cannot_be_read_is_replaced_if_asked(data, base_dir):
    (path := base_dir / "tokenizer/tokenizer.json").parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer .* --overwrite"):
        tok_train.main(["--vocab-size=300", f"--data-dir={data}"])
    assert path.read_text() == "{}"
    tok_train.main(["--vocab-size=300", f"--data-dir={data}", "--overwrite"])
    assert get_tokenizer().get_vocab_size() == 300


def test_eval_without_a_tokenizer(data):
    with pytest.raises(UserError, match="scripts.tok_train"):
        tok_eval.main([f"--data-dir={data}"])
