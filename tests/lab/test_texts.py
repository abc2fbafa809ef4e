"""The tokens of an epoch by hand, pieces that are the text of their documents, and texts that are made again."""

import json
from hashlib import sha256

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _samples import BYTE_TOKENIZER

from lab import texts
from nanochat_fp4.cli import UserError

WORDS = [f"{i:04d} " + "word " * (20 + 7 * i) for i in range(40)]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Documents of 100 to 1,500 characters, a token each."""
    monkeypatch.setattr(texts, "get_tokenizer", lambda: BYTE_TOKENIZER)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    (tmp_path / "text").mkdir()
    for k in range(3):
        pq.write_table(pa.table({"text": WORDS}), tmp_path / f"text/{k}.parquet", row_group_size=5)
    return tmp_path / "text"


def test_pieces_hold_the_text_and_an_epoch_of_rows_most_of_it(text, tmp_path, capsys):
    out = tmp_path / "pieces"
    texts.main(["cut", f"--data-dir={text}", "--max-seq-len=128", f"--out={out}"])
    *said, last = capsys.readouterr().out.splitlines()
    assert sorted(p.name for p in out.glob("*")) == ["0.parquet", "1.parquet", "2.parquet"]
    pieces = pq.read_table(out / "0.parquet")["text"].to_pylist()
    assert "".join(pieces).replace(" ", "") == "".join(WORDS).replace(" ", "") and len(pieces) > 150
    assert max(map(len, pieces)) <= 128 and any(f"{len(pieces)} pieces of at most 12" in line for line in said)
    tokens, cropped = texts.epoch(BYTE_TOKENIZER, str(out), 128)
    assert f"an epoch has about {tokens:,} tokens{cropped}" == last
    whole = 2 * sum(len(p) + 1 for p in pieces)
    assert 0.75 * whole < tokens < 1.1 * whole


def test_long_documents_lose_what_does_not_fit_into_a_row(text, capsys):
    """Hardly a document fits into 64 tokens: an epoch has a row for each, whatever its length."""
    texts.main(["epoch", f"--data-dir={text}", "--max-seq-len=64"])
    said = capsys.readouterr().out.splitlines()[-1]
    tokens = int(said.partition("about ")[2].partition(" tokens")[0].replace(",", ""))
    assert abs(tokens - 80 * 64) <= 64 * 64  # to a batch of 64 rows
    assert 85 < int(said.partition("crop away ")[2].partition("%")[0]) < 95


def test_of_a_cut_that_is_interrupted_nothing_is_left(text, tmp_path, monkeypatch):
    """Some of the shards would be another text, with training text as its validation."""
    written = []

    def stop(pieces):
        written.append(pieces)
        if len(written) == 2:
            raise KeyboardInterrupt
        return b"a shard"

    monkeypatch.setattr(texts, "parquet", stop)
    with pytest.raises(KeyboardInterrupt):
        texts.main(["cut", f"--data-dir={text}", "--max-seq-len=64", f"--out={tmp_path / 'pieces'}"])
    assert not (tmp_path / "pieces").exists() and not (tmp_path / "pieces.tmp").exists()


def test_a_text_is_made_of_its_shards_alone(tmp_path, monkeypatch):
    """Another shard of the same name makes another text, which no stored run had."""
    for kind, size in (("corpus", 3), ("code", 5)):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "shard_00000.parquet").write_bytes(b"x" * size)
    names = {"a.parquet": "corpus/shard_00000.parquet", "b.parquet": "code/shard_00000.parquet"}
    key = sha256(json.dumps([["a.parquet", 3], ["b.parquet", 5]]).encode()).hexdigest()[:12]
    monkeypatch.setattr(texts, "TEXTS", {key: names})
    make = ["make", key, f"--corpus={tmp_path}/corpus", f"--code={tmp_path}/code", f"--out={tmp_path}/made"]
    texts.main(make)
    assert [p.read_bytes() for p in sorted((tmp_path / "made").iterdir())] == [b"xxx", b"xxxxx"]
    (tmp_path / "code/shard_00000.parquet").write_bytes(b"other")
    (tmp_path / "code/shard_00000.parquet").write_bytes(b"longer than before")
    with pytest.raises(UserError, match=f"the shards are those of .*, not of {key}"):
        texts.main([*make[:-1], f"--out={tmp_path}/again"])
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("epoch --data-dir=x", "--max-seq-len=0: expected at least 1 token"),
        ("cut --data-dir=x --max-seq-len=8", "lab.texts cut needs --out"),
        ("cut --data-dir=x --max-seq-len=8 --out={text}", "has something already; choose an empty folder"),
        ("epoch --data-dir={text}/none --max-seq-len=64", "not there"),
        (
            "make 0123 --corpus=x --code=x --out={text}/o",
            "no text is named 0123; use one of 0ca8b83e6a47, 1db8be907300",
        ),
        ("make 1db8be907300 --corpus=x --code=x --out={text}/o", "--corpus: No such file or directory: x/shard_00000"),
    ],
)
def test_wrong_arguments_are_refused(text, flags, problem):
    with pytest.raises(UserError, match=problem):
        texts.main(flags.format(text=text).split())
