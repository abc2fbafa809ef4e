"""lab/epoch.py: the tokens of an epoch by hand, and pieces that are the text of their documents."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _samples import BYTE_TOKENIZER

from lab import epoch
from nanochat_fp4.errors import UserError

WORDS = [f"{i:04d} " + "word " * (20 + 7 * i) for i in range(40)]


@pytest.fixture
def text(tmp_path, monkeypatch):
    """Documents of 100 to 1,500 characters, a token each."""
    monkeypatch.setattr(epoch, "get_tokenizer", lambda: BYTE_TOKENIZER)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    (tmp_path / "text").mkdir()
    for k in range(3):
        pq.write_table(pa.table({"text": WORDS}), tmp_path / f"text/{k}.parquet", row_group_size=5)
    return tmp_path / "text"


def test_pieces_hold_the_text_and_an_epoch_of_rows_most_of_it(text, tmp_path, capsys):
    out = tmp_path / "pieces"
    epoch.main([f"--data-dir={text}", "--max-seq-len=128", f"--cut-to={out}"])
    *said, last = capsys.readouterr().out.splitlines()
    assert sorted(p.name for p in out.glob("*")) == ["0.parquet", "1.parquet", "2.parquet"]
    pieces = pq.read_table(out / "0.parquet")["text"].to_pylist()
    assert "".join(pieces).replace(" ", "") == "".join(WORDS).replace(" ", "") and len(pieces) > 150
    assert max(map(len, pieces)) <= 128 and any(f"{len(pieces)} pieces of at most 12" in line for line in said)
    tokens, cropped = epoch.epoch(BYTE_TOKENIZER, str(out), 128)
    assert f"an epoch has about {tokens:,} tokens; {cropped}" == last
    whole = 2 * sum(len(p) + 1 for p in pieces)
    assert 0.75 * whole < tokens < 1.1 * whole


def test_long_documents_lose_what_does_not_fit_into_a_row(text, capsys):
    """Hardly a document fits into 64 tokens: an epoch has a row for each, whatever its length."""
    epoch.main([f"--data-dir={text}", "--max-seq-len=64"])
    said = capsys.readouterr().out.splitlines()[-1]
    tokens = int(said.partition("about ")[2].partition(" tokens")[0].replace(",", ""))
    assert abs(tokens - 80 * 64) <= 64 * 64  # to a batch of 64 rows
    assert 85 < int(said.partition("crop away ")[2].partition("%")[0]) < 95


def test_wrong_arguments_are_refused(text, tmp_path):
    with pytest.raises(UserError, match="--max-seq-len=0: expected at least 1 token"):
        epoch.main([f"--data-dir={text}", "--max-seq-len=0"])
    with pytest.raises(UserError, match="has shards; choose an empty folder, or remove them"):
        epoch.main([f"--data-dir={text}", "--max-seq-len=64", f"--cut-to={text}"])
    with pytest.raises(UserError, match="expected 2, the last for validation"):
        epoch.main([f"--data-dir={tmp_path}", "--max-seq-len=64"])


def test_of_a_cut_that_is_interrupted_nothing_is_left(text, tmp_path, monkeypatch):
    """Some of the shards would be another text, with training text as its validation."""
    written = []

    def stop(groups):
        written.append(groups)
        if len(written) == 2:
            raise KeyboardInterrupt
        return b"a shard"

    monkeypatch.setattr(epoch, "parquet", stop)
    with pytest.raises(KeyboardInterrupt):
        epoch.main([f"--data-dir={text}", "--max-seq-len=64", f"--cut-to={tmp_path / 'pieces'}"])
    assert {p.name for p in tmp_path.iterdir()} == {"text"}


def test_a_folder_with_other_files_is_not_replaced(text, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").touch()
    for place in ("notes", "notes/mine.txt"):
        with pytest.raises(UserError, match="has something else; choose an empty folder, or remove them"):
            epoch.main([f"--data-dir={text}", "--max-seq-len=64", f"--cut-to={tmp_path / place}"])
    assert (tmp_path / "notes/mine.txt").exists()
