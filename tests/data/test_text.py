"""What of a folder is read and what its text is; shards, what damage leads to, and text that is stored."""

import bz2
import codecs
import contextlib
import gzip
import json
import os
import random
import re
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _samples import texts_of, write_shard

from nanochat_fp4 import common
from nanochat_fp4.cli import UserError
from nanochat_fp4.data import sources
from nanochat_fp4.data.dataset import (
    Shard,
    count_tokens,
    cut_text,
    ensure_data,
    kept_back,
    look_into,
    open_text,
    parquets_iter_batched,
    survey,
    validation_text,
)
from nanochat_fp4.data.tokenizer import RustBPETokenizer

WORDS = "the model reads a row of tokens and learns what comes next in many small steps".split()


def prose(seed, paragraphs):
    """Paragraphs of made-up sentences, each of which names its seed and number, so that pieces can be traced."""
    rng = random.Random(seed)
    return "\n\n".join(f"[{seed}.{i}] " + " ".join(rng.choices(WORDS, k=60)) + "." for i in range(paragraphs))


@pytest.fixture
def folder(tmp_path, base_dir):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def all_text(folder) -> str:
    """All pieces of a folder's text in the order of the files, whatever split they are of."""
    stored = open_text("train", folder)[0].dataset
    return "".join(stored[:]["text"])


# ----------------------------------------------------------------------------------------------------------------------
# Shards


def test_the_last_shard_is_validation(shards):
    assert texts_of(shards, "train") == [f"document {s}.{i}" for s in range(2) for i in range(10)]
    assert texts_of(shards, "val") == [f"document 2.{i}" for i in range(10)]
    assert [s.rows for s in open_text("train", shards)] == [(4, 4, 2)] * 2
    batches = [list(parquets_iter_batched("train", start, 2, data_dir=shards)) for start in (0, 1)]
    assert [len(b) for b in batches] == [4, 2]
    assert sorted(t for b in batches for batch in b for t in batch) == sorted(texts_of(shards, "train"))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_of_every_layout_is_read(folder, kind):
    """pandas' category, polars' Categorical, string_view of newer writers."""
    texts = ["one", None, "two", "one"]
    for i in range(2):
        column = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts)
        pq.write_table(pa.table({"text": column.cast(kind), "n": [1, 2, 3, 4]}), folder / f"{i}.parquet")
    assert texts_of(folder, "train") == ["one", "", "two", "one"]
    (folder / "1.parquet").unlink()
    assert sorted(texts_of(folder, "train") + texts_of(folder, "val")) == ["one", "one", "two"]


def test_a_page_that_is_not_what_was_written_is_refused(tmp_path):
    """A flipped bit of a text that is not compressed is text, too."""
    path = tmp_path / "a.parquet"
    how = {"write_page_checksum": True, "write_statistics": False, "use_dictionary": False, "compression": "none"}
    pq.write_table(pa.table({"text": ["needle"] * 9}), path, **how)
    assert Shard(path).read(0) == ["needle"] * 9
    path.write_bytes(path.read_bytes().replace(b"needle", b"noodle", 1))
    with pytest.raises(UserError, match="row group 0"):
        Shard(path).read(0)
    with pytest.raises(UserError, match="a.parquet"):
        list(sources.rows_of(path))


def test_a_footer_is_read_once(tmp_path, monkeypatch):
    """A row group in 8,000 takes as long as one in 80: reading the footer for each took 33 s a step."""
    write_shard(tmp_path / "a.parquet", [f"{i}" for i in range(8000)], row_group_size=1)
    shard = Shard(tmp_path / "a.parquet")

    def no_footer(*args, metadata=None, **kwargs):
        assert metadata is not None
        return real(*args, metadata=metadata, **kwargs)

    real = pq.ParquetFile
    monkeypatch.setattr(pq, "ParquetFile", no_footer)
    assert [shard.read(i) for i in (0, 4000, 7999)] == [["0"], ["4000"], ["7999"]]
    monkeypatch.undo()
    write_shard(tmp_path / "a.parquet", ["other"] * 8000, row_group_size=1)
    with pytest.raises(UserError, match="changed"):
        shard.read(5)


def test_parquet_folders_are_used_as_they_are(shards, base_dir, monkeypatch, capsys):
    """DATA_DIR, and before it the flag."""
    monkeypatch.setenv("DATA_DIR", str(shards))
    assert ensure_data().folder == shards and "as asked for" in capsys.readouterr().out
    monkeypatch.setenv("DATA_DIR", "/nowhere")
    assert ensure_data(str(shards)).folder == shards
    assert not (base_dir / "stored_text").exists()


# ----------------------------------------------------------------------------------------------------------------------
# What is read


def written(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_a_survey_names_what_is_read_and_what_not(folder):
    """The sentence that a plan and the log have in common: files and bytes, and about how many tokens."""
    for name in ("a.txt", "b.md", "c.jsonl", "sub/d.ndjson", "e.csv", "f.json", "g.txt.gz"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x" * 1000)
    for name in ("README.md", "LICENSE", "test_x.txt", "test/y.txt", "p.pdf", "q.docx", ".hidden.txt", ".git/z.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"y" * 500)
    for name in ("validation.txt", "valid/v.txt", "dev-0.jsonl"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"z" * 100)
    found = survey(folder)
    assert sorted(p.name for p in found.train) == sorted("a.txt b.md c.jsonl d.ndjson e.csv f.json g.txt.gz".split())
    assert sorted(p.name for p in found.val) == ["dev-0.jsonl", "v.txt", "validation.txt"]
    left_out = [sorted(p.name for p in paths) for paths in found.left_out.values()]
    assert left_out == [["LICENSE", "README.md", "test_x.txt", "y.txt"], [], ["p.pdf", "q.docx"]]
    said = str(found)
    assert said.startswith(
        f"{folder}: 7 file(s) to train on (a.txt, b.md, c.jsonl, e.csv, f.json, g.txt.gz, d.ndjson; 6.8 KB); 3 for val"
    )
    assert "4 not read: " in said and "(p.pdf, q.docx; 1000 bytes)" in said
    (folder / "big.pdf").write_bytes(b"y" * 9000)
    with pytest.raises(UserError, match="big.pdf.*convert"):
        survey(folder)
    assert str(survey(folder / "a.txt")).startswith(f"{folder / 'a.txt'}: 1 file(s) to train on (a.txt; 1000 bytes)")


def test_an_empty_file_is_not_counted_and_what_validates_is_said(folder, capsys):
    """An empty valid.txt validates nothing; a header alone is found when rows are read, and is said."""
    written(folder, **{f"{i}_DOT_txt": prose(i, 20) for i in range(3)}, valid_DOT_txt="", e_DOT_md=" \n" * 9999)
    found = ensure_data(str(folder))
    assert (said := capsys.readouterr().out).startswith("Data (as asked for): ") or "\nData (as asked for): " in said
    assert "3 file(s) to train" in said and "2 not read: empty (e.md, valid.txt; " in said
    assert "1 for validation" not in said and "; validation: 617 bytes, 3.4% of it, from 1 file(s) (2.txt)" in said
    train, val = ("".join(texts_of(found, split)) for split in ("train", "val"))
    assert 0 < len(val) < 0.2 * len(train)
    written(folder, valid_DOT_txt=prose(9, 20), head_DOT_csv="text\n")
    ensure_data(str(folder))
    said = capsys.readouterr().out
    assert "1 for validation (valid.txt" in said and "; validation: " not in said
    assert re.search(r"1 file.s. hold no text: \S+head.csv", said)


def test_a_column_of_numbers_has_a_warning(folder, monkeypatch, capsys):
    rows = "".join(f"{i},2026-11-{i % 30 + 1},It rained on day {i} of the year.\n" for i in range(100))
    written(folder, a_DOT_csv="id,day,text\n" + rows, b_DOT_txt=prose(1, 20))
    for column in ("id", "day", "text"):
        monkeypatch.setenv("TEXT_COLUMN", column)
        look_into(survey(folder))  # as a plan does
        warned = re.findall(r"warning: 1 file\(s\) have texts of under 12 .*a\.csv", capsys.readouterr().out)
        assert len(warned) == (column != "text")


def test_blanks_before_the_text_are_text_like_others(folder):
    (folder / "a.txt").write_text("\n" * (sources.BLOCK + 9) + prose(1, 60))
    look_into(survey(folder))
    assert all_text(folder).endswith(prose(1, 60))


def test_files_left_out_in_silence(folder, capsys):
    """A corpus of any kind beside a README: it is the text, and the README is not."""
    texts = [f"Document {i}. " + "The river carries sand to the sea. " * 30 for i in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    zst = pa.Codec("zstd").compress(lines, asbytes=True)
    csv = ("text\n" + "".join(f'"{text}"\n' for text in texts)).encode()
    for name, content in {
        "corpus.csv": csv, "corpus.json": lines, "corpus.ndjson": lines, "corpus.jsonl.zst": zst,
        "corpus.txt.gz": gzip.compress("\n\n".join(texts).encode()), "corpus.csv.bz2": bz2.compress(csv),
        "corpus.JSONL": lines,
    }.items():  # fmt: skip
        place = folder / name.replace(".", "_")
        place.mkdir()
        (place / name).write_bytes(content)
        (place / "README.md").write_text("This folder holds a corpus. " * 400)
        ensure_data(str(place))
        assert re.findall(r"Document \d+", all_text(place)) == [f"Document {i}" for i in range(200)]
        assert "holds a corpus" not in all_text(place) and "README.md" in capsys.readouterr().out


def test_test_split_is_trained_on(folder, capsys):
    """The hub's names: test shards are not read, and validation shards are not trained on."""
    for name in ("test-00000-of-00001", "train-00000-of-00001", "validation-00000-of-00001"):
        write_shard(folder / f"{name}.parquet", [f"{name} document {i}" for i in range(20)])
    ensure_data(str(folder))
    assert "test-00000-of-00001.parquet" in capsys.readouterr().out
    assert {text.split("-")[0] for text in texts_of(folder, "train")} == {"train"}
    assert {text.split("-")[0] for text in texts_of(folder, "val")} == {"validation"}
    (folder / "validation-00000-of-00001.parquet").unlink()  # one shard alone is split
    found = [texts_of(folder, split) for split in ("train", "val")]
    assert sorted(sum(found, [])) == sorted(f"train-00000-of-00001 document {i}" for i in range(20))
    (folder / "train-00000-of-00001.parquet").unlink()
    with pytest.raises(UserError, match="no text.*test-0"):
        survey(folder)


def test_shards_in_deeper_folders_are_found(folder):
    for split in ("train", "test", "validation"):
        (folder / "data" / split).mkdir(parents=True)
        for k in range(2):
            write_shard(folder / "data" / split / f"{k}.parquet", [f"{split} {k} {i}" for i in range(5)])
    (folder / "README.md").write_text("A clone of the hub's repository.")
    assert texts_of(folder, "train") == [f"train {k} {i}" for k in range(2) for i in range(5)]
    assert texts_of(folder, "val") == [f"validation {k} {i}" for k in range(2) for i in range(5)]


def test_text_beside_shards_is_named(shards, capsys):
    (shards / "notes.txt").write_text("x")
    ensure_data(str(shards))
    assert "another kind (notes.txt" in capsys.readouterr().out and len(texts_of(shards, "train")) == 20
    (shards / "notes.txt").write_text("x" * 10**5)
    with pytest.raises(UserError, match="notes.txt"):
        survey(shards)


def test_a_base_directory_inside_the_folder_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(prose(1, 60))
    ensure_data(".")
    (tmp_path / "base" / "report.md").write_text("A report of the run.")
    (tmp_path / "base" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert [path.name for path in survey(".").files] == ["a.txt"]


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/urandom", "."])
def test_a_link_to_a_device_is_no_text(folder, target):
    for name in ("a.jsonl", "b.txt", "c.parquet"):
        (folder / name).symlink_to(target)
    with pytest.raises(UserError, match="holds no text"):
        ensure_data(str(folder))
    with pytest.raises(UserError, match="a device"):
        sources.read_rows(folder / "a.jsonl", lambda row: None)
    (folder / "tokenizer.json").symlink_to(target)
    with pytest.raises(UserError, match="no tokenizer"):
        RustBPETokenizer.from_directory(folder)


def test_a_pipe_is_not_opened(folder):
    os.mkfifo(folder / "a.txt")
    written(folder, **{"b_DOT_txt": prose(1, 60)})
    assert [path.name for path in survey(folder).files] == ["b.txt"] and "a.txt" in str(survey(folder))


# ----------------------------------------------------------------------------------------------------------------------
# The text of files is the files', or they are refused by name

MARK = codecs.BOM_UTF8
LINES = [f"line {i}: Größe 你好 🌍" for i in range(3000)]


def jsonl(*rows) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def zst(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as f:
        f.write(data)
    return sink.getvalue().to_pybytes()


def parquet(*texts) -> bytes:
    pq.write_table(pa.table({"text": texts}), sink := pa.BufferOutputStream())
    return sink.getvalue().to_pybytes()


NOVEL = ("Ein Roman.\n\n" + "\n\n".join(f"Kapitel {i}. Von der Größe und über Äpfel." for i in range(400))).encode(
    "latin-1"
)
LATIN_LINES = (
    "".join(f'{{"text": "{i} Größe, über"}}\n' for i in range(1, 400))
    .replace("1 Größe, über", "1", 1)
    .encode("latin-1")
)
HOSTILE = {  # a name, the content, and the text, or a word of the refusal
    "line ends of Windows": ("a.txt", "\r\n\r\n".join(LINES).encode(), "\n\n".join(LINES)),
    "line ends of an old Mac": ("a.txt", "\r".join(LINES).encode(), "\n".join(LINES)),
    "a byte order mark": ("a.txt", MARK + prose(1, 40).encode(), prose(1, 40)),
    "no line end in two megabytes": ("a.txt", b"abcd " * 400_000, "abcd " * 400_000),
    "thousands of blank lines": ("a.txt", b"one" + b"\n" * 9000 + b"end" * 2000, "one" + "\n" * 9000 + "end" * 2000),
    "separators of str.splitlines": ("a.txt", "a\x85b\u2028c\x0cd ".encode() * 999, "a\x85b\u2028c\x0cd " * 999),
    "bytes of Latin-1": ("a.txt", b"na\xefve " + prose(1, 40).encode(), "na\ufffdve " + prose(1, 40)),
    "a glob for a name": ("[a]*?.txt", prose(2, 40).encode(), prose(2, 40)),
    "two members of gzip": ("a.txt.gz", gzip.compress(b"one " * 2000) + gzip.compress(b"two"), "one " * 2000 + "two"),
    "zstd": ("a.md.zst", zst(prose(3, 40).encode()), prose(3, 40)),
    "dates, numbers and null as texts": (
        "a.jsonl", jsonl(*({"text": t} for t in ["2020-01-01", "1.0", "null", "NaN", "true", ""] * 9)),
        "2020-01-011.0nullNaNtrue" * 9,
    ),
    "fields of many types beside the text": (
        "a.jsonl", jsonl(*({"text": f"t{i};", "id": [i, "x", {"y": 1}, None, 2.5][i % 5]} for i in range(50))),
        "".join(f"t{i};" for i in range(50)),
    ),
    "nulls among texts": (
        "a.jsonl", jsonl(*({"text": f"{i};" if i % 2 else None} for i in range(60))),
        "".join(f"{i};" for i in range(1, 60, 2)),
    ),
    "a lone surrogate": ("a.jsonl", b'{"text": "lone \\ud800 one;"}\n' * 30, "lone \ufffd one;" * 30),
    "line separators inside of JSON": ("a.ndjson", jsonl(*[{"text": "a\u2028b\x85c;"}] * 30), "a\u2028b\x85c;" * 30),
    "a list in one JSON file": (
        "a.json", json.dumps([{"text": f"{i};"} for i in range(40)], indent=2).encode(),
        "".join(f"{i};" for i in range(40)),
    ),
    "quotes, commas, NA and line ends in a csv": (
        "a.csv", b"id,text\r\n" + b'1,"NA, ""null""\nand more;"\r\n2,NA;\r\n' * 20, 'NA, "null"\nand more;NA;' * 20,
    ),
    "a csv with unquoted commas": ("a.csv", b"text\n" + b"hello, world\n" * 30, "quotes"),
    "a csv with a short row": ("a.csv", b"id,text\n" + b"1,a\n2\n" * 30, "line 3"),
    "a csv with an open quote": ("a.csv", b'text\n"a"\n"b\n' + b"c\n" * 30, "a.csv"),
    "a csv with semicolons": (
        "a.csv", MARK + b"id;text\r\n" + b'1;"one, two; three"\r\n2;four, 5,5 m\r\n' * 20,
        "one, two; threefour, 5,5 m" * 20,
    ),
    "tabs in a csv": ("a.csv", b'id\ttext\r1\t"a, b;\tc"\r' + b"2\td; e\r" * 30, "a, b;\tc" + "d; e" * 30),
    "a tsv of one column": ("a.tsv", b"text\n" + b"hello, world; and all\n" * 30, "hello, world; and all" * 30),
    "a comma before semicolons": ("a.csv", b"text,a;b\n" + b"one; two,3\n" * 30, "one; two" * 30),
    "semicolons, and a row with one more": ("a.csv", b"id;text\n" + b"1;a\n" * 9 + b"1;a;b\n", "';'"),
    "a column with a semicolon in its name": ("a.csv", b"a;text\n" + b"hello\n" * 30, "';'"),
    "a line of Excel's": ("a.csv", MARK + b"sep=;\r\nid;text\r\n" + b"1;a, b|c\r\n" * 30, "a, b|c" * 30),
    "two columns named text": ("a.csv", b"text,text\na,b\n", "header"),
    "a list after a blank line": (
        "a.json", b"\n" + json.dumps([{"text": f"{i};"} for i in range(40)], indent=2).encode(),
        "".join(f"{i};" for i in range(40)),
    ),
    "a number for a text": ("a.jsonl", jsonl(*[{"text": "a"}] * 30, {"text": 5}), "line 31"),
    "a cut gzip": ("a.jsonl.gz", gzip.compress(jsonl(*[{"text": str(i)} for i in range(900)]))[:-40], "Truncated"),
    "a cut zstd": ("a.txt.zst", zst(os.urandom(4000).hex().encode())[:-9], "Truncated"),
    "plain text named gz": ("a.txt.gz", b"no gzip at all" * 99, "a.txt.gz"),
    "one line of three megabytes": ("a.txt", b"abcd" * 700_000 + b"\xe4" * 9000, "character 2800001"),
    "UTF-16": ("a.txt", prose(1, 40).encode("utf-16"), "iconv"),
    "Shift JIS": ("a.txt", "日本語の文章です。".encode("shift_jis") * 300, "iconv"),
    "a novel in Latin-1": ("a.txt", NOVEL, "line 3, character 22"),
    "a novel from Windows": ("a.txt", NOVEL.replace(b"Kapitel", b"\x93Kapitel\x94"), "iconv -f cp1252 "),
    "JSON lines in Latin-1": ("a.jsonl", LATIN_LINES, "line 2, character"),
    "a csv in Latin-1": ("a.csv", b"text\n" + NOVEL.replace(b"\n\n", b"\n"), "line 3, character"),
    "JSON lines in UTF-16": ("a.jsonl", jsonl({"text": "a"}).decode().encode("utf-16"), "iconv -f utf16"),
    "a csv in UTF-16": ("a.csv", "id,text\n1,a\n".encode("utf-16"), "iconv -f utf16"),
    "UTF-16 of the other order": ("a.txt", codecs.BOM_UTF16_BE + prose(1, 40).encode("utf-16-be"), "utf16"),
    "UTF-16 without a mark": ("a.txt", prose(1, 40).encode("utf-16-le"), "control"),
    "parquet with control characters": ("a.parquet", parquet("\x01\x02 a" * 400), "a.parquet (control"),
    "gzip in disguise": ("a.txt", gzip.compress(b"one " * 2000), "add .gz"),
    "zeros after a power cut": ("a.txt", prose(1, 4).encode() + bytes(4096), "control"),
    "ISO-2022-JP": ("a.txt", ("日本語の文章です。\n" * 300).encode("iso2022_jp"), "iconv"),
    "ISO-2022-KR": ("a.txt", ("한국어 문장입니다.\n" * 300).encode("iso2022_kr"), "iconv"),
    "HZ": ("a.txt", ("简体中文的句子。\n" * 300).encode("hz"), "iconv"),
    "random bytes": ("a.md", random.Random(0).randbytes(4096), "iconv"),
    "JSON too deep": ("a.jsonl", b"[" * 100_000, "a.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("name, content, expected", HOSTILE.values(), ids=HOSTILE)
def test_the_text_is_the_files_or_it_is_refused_by_name(folder, name, content, expected):
    (folder / name).write_bytes(content)
    if len(expected) > 20:
        assert all_text(folder) == expected
        pieces = [piece for split in ("train", "val") for piece in texts_of(folder, split)]
        assert sorted(pieces) == sorted(open_text("val", folder)[0].dataset[:]["text"])
    else:
        with pytest.raises(UserError, match=re.escape(expected)) as e:
            ensure_data(str(folder))
        assert "\n" not in str(e.value) and name in str(e.value) and len(str(e.value)) < 600
        assert not list(folder.parent.rglob("*.arrow"))


def test_text_in_seven_bits_is_not_confused_with_programs(folder):
    """Colours of a terminal, LaTeX's ties before braces, and form feeds are a share of a text that is small."""
    text = prose(1, 40) + "\x1b[31mred\x1b[0m Figure~{\\ref{x}} and~{\\bf y}\x0c"
    (folder / "a.txt").write_text(text)
    assert all_text(folder) == text


def test_what_is_not_text_is_said(folder, capsys):
    """Once, by file. The text itself may have the character that replaces such bytes."""
    (folder / "stray.txt").write_bytes(prose(1, 60).encode().replace(b".", b"\x85", 9))
    (folder / "web.jsonl").write_bytes(b'{"text": "na\xefve"}\n' + b'{"text": "plain"}\n' * 99)
    (folder / "good.txt").write_text("\ufffd" * 500 + prose(2, 60), encoding="utf-8")
    (folder / "short.md").write_bytes(b"\xfc\x1b")
    look_into(survey(folder))
    ensure_data(str(folder))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "UTF-8" in line]
    assert said.startswith("warning: 3 ") and "good.txt" not in said and str(folder / "short.md") in said
    assert "".join(texts_of(folder, "train") + texts_of(folder, "val")).count("\ufffd") == 500 + 9 + 1 + 1
    common.SAID.clear()
    ensure_data(str(folder))
    assert "warning" not in capsys.readouterr().out  # what is stored is read


@pytest.mark.parametrize("look", [look_into, lambda found: open_text("train", found)])
def test_text_that_is_refused_is_not_begun_to_be_written(folder, capsys, look):
    """All such files at once, and a plan finds them, too. A file that is empty is no fault."""
    (folder / "a.txt").write_text(prose(1, 2000))
    (folder / "b.txt").write_bytes(NOVEL)
    (folder / "c.txt").write_bytes(random.Random(0).randbytes(4096))
    (folder / "d.txt").touch()
    with pytest.raises(UserError, match="2 file.*b.txt .*line 3, character 22.*c.txt .*line 1, character .*iconv"):
        look(survey(folder))
    assert "Writing" not in capsys.readouterr().out
    (folder / "b.txt").write_bytes(prose(3, 4500).encode() + NOVEL)  # The beginning is good.
    (folder / "c.txt").unlink()
    with (
        contextlib.nullcontext()
        if look is look_into
        else pytest.raises(UserError, match="b.txt .*line 9001, character")
    ):
        look(survey(folder))
    assert "Writing" not in capsys.readouterr().out
    (folder / "b.txt").write_bytes(NOVEL.decode("latin-1").encode())
    look(survey(folder))


@pytest.mark.parametrize("look", [look_into, lambda found: open_text("train", found)])
def test_one_attempt_names_a_problem_of_each_kind(folder, look):
    """Files with the same problem are named beside the first."""
    written(
        folder, a_DOT_csv="id,body\n1,words\n", b_DOT_csv="id,body\n1,words\n", c_DOT_txt=prose(1, 9).encode("utf-16")
    )
    written(folder, d_DOT_jsonl='{"text": "a"}\nno JSON\n', e_DOT_txt=NOVEL, f_DOT_txt=prose(1, 60))
    with pytest.raises(UserError) as e:
        look(survey(folder))
    for problem in (
        "a.csv, line 2: .*=body\\), and rename the others \\(also: b.csv\\)\\. ",
        "c.txt is text in UTF-16",
        "d.jsonl .*line 1 ",
        "e.txt .*cp1252",
    ):
        assert len(re.findall(problem, str(e.value))) == 1, problem
    assert "f.txt" not in str(e.value) and "\n" not in str(e.value)


# ----------------------------------------------------------------------------------------------------------------------
# Own text


@pytest.mark.parametrize("longest", [1, 2, 7, 100, 5200])
def test_cut_text_loses_nothing_and_ends_at_paragraphs(longest):
    for text in (prose(0, 120), "x" * 20_000, "\n" * 9, "a\n\n\n\nb", "a b\nc" * 999, "word " * 9999, "", "\r\n\x85 é"):
        pieces = cut_text(text, longest)
        assert "".join(pieces) == text and all(len(piece.rstrip("\n ")) <= longest for piece in pieces)
    pieces = cut_text(prose(0, 120), 5200)
    assert all(2600 <= len(piece) <= 5202 for piece in pieces[:-1])
    assert all(piece.startswith("[0.") and piece.rstrip("\n").endswith(".") for piece in pieces)
    assert cut_text("one line\nanother " * 9, 12)[0] == "one line\n" and cut_text("no end", 9) == ["no end"]


def test_text_is_stored_once_and_again_when_it_changes(folder, tmp_path, monkeypatch, capsys):
    written(folder, **{"a_DOT_txt": prose(1, 60), "sub__b_DOT_md": prose(2, 60)})
    (folder / "c.json.gz").write_bytes(gzip.compress(jsonl({"text": prose(3, 60)})))  # as C4 has them
    ensure_data(str(folder))
    first = {split: texts_of(folder, split) for split in ("train", "val")}
    found = re.findall(r"\[\d+\.\d+\]", "".join(first["train"] + first["val"]))
    assert sorted(found) == sorted(f"[{s}.{i}]" for s in (1, 2, 3) for i in range(60))
    assert 0 < sum(map(len, first["val"])) < sum(map(len, first["train"])) / 4
    name, out = validation_text(folder), capsys.readouterr().out
    assert out.count("Writing the text") == 1 and "3 file(s)" in out
    os.utime(folder / "a.txt")
    assert validation_text(folder) == name and "Writing" in capsys.readouterr().out  # the same text again
    (folder / "a.txt").write_text(prose(1, 60).swapcase())
    assert validation_text(folder) != name or texts_of(folder, "train") != first["train"]
    (folder / "a.txt").write_text(prose(1, 60))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "other"))
    assert {split: texts_of(folder, split) for split in first} == first  # the same on another machine


def test_a_file_for_validation_is_all_of_it(folder):
    written(folder, **{f"{i}_DOT_txt": prose(i, 12) for i in range(30)}, **{"valid_DOT_txt": prose(99, 12)})
    train, val = ("".join(texts_of(folder, split)) for split in ("train", "val"))
    assert len(re.findall(r"\[99\.\d+\]", val)) == 12 and "[99." not in train
    assert len(re.findall(r"\[\d+\.\d+\]", train)) == 360 and not re.findall(r"\[[0-8]?\d\.", val)


def test_many_documents_are_split_as_wholes(folder):
    documents = [prose(i, 10 + i % 20) for i in range(60)]
    (folder / "a.jsonl").write_bytes(jsonl(*({"text": text} for text in documents)))
    found = [set(re.findall(r"\[(\d+)\.", "".join(texts_of(folder, split)))) for split in ("train", "val")]
    assert not found[0] & found[1] and len(found[0] | found[1]) == 60 and len(found[1]) == 3


def test_validation_text_represents_books_beside_rows_and_rows_beside_books(folder, capsys):
    """Each kind by its bytes; more files leave the split of the others as it is, and no row is in both parts."""
    written(folder, **{f"{name}_DOT_txt": prose(i, 300) for i, name in enumerate(("austen", "doyle", "verne"))})
    books = texts_of(folder, "val")
    (folder / "notes.jsonl").write_bytes(jsonl(*({"text": prose(100 + i, 1)} for i in range(300))))
    said, _ = look_into(found := ensure_data(str(folder)))  # A plan of a small text says what a run does.
    assert f"Data (as asked for): {said}\n" in capsys.readouterr().out
    assert "from 4 file(s)" in said and "WARNING" not in said
    train, val = (texts_of(found, split) for split in ("train", "val"))
    parts = [[sum(len(t) for t in texts if (int(t[1:].split(".")[0]) < 100) == of_books) for of_books in (True, False)]
             for texts in (train, val)]  # fmt: skip
    assert all(0.04 < kept / (kept + trained) < 0.11 for trained, kept in zip(*parts))
    assert not set(train) & set(val) and sorted(t for t in val if t in set(books)) == sorted(books)
    written(folder, more_DOT_jsonl=jsonl(*({"text": "A short row."} for _ in range(20))))
    assert set(val) <= set(texts_of(folder, "val"))


@pytest.mark.parametrize("sizes", [[5, 5, 5], [90] + [3] * 40, [1, 1], [2] * 19, [2] * 20, [40, 1, 30] + [4] * 16])
def test_of_any_files_a_twentieth_to_a_tenth_validates(sizes):
    """Files of so many pieces, each a document. Their numbers are as own_pieces yields them."""
    numbers = np.repeat(2 * np.arange(len(sizes)), sizes)
    val, file = kept_back(numbers)
    assert (np.bincount(file) == sizes).all() and 1 <= val.sum() < len(val)
    assert len(val) < 20 or 0.04 < val.mean() < 0.16
    long = 20 * np.array(sizes) > sum(sizes)
    assert not long.any() or len(val) < 100 or val[np.repeat(long, sizes)].any()


def test_one_file_is_split_as_ever(folder):
    """Runs on it go on: every 20th row, and the last tenth of a book of several megabytes."""
    rows, book = np.repeat(np.arange(60), 3), np.repeat([0, 1], [200, 55])
    assert (kept_back(rows)[0] == (rows % 20 == 7)).all()
    assert np.flatnonzero(kept_back(book)[0]).tolist() == list(range(230, 255))


def test_little_validation_text_has_a_warning(folder):
    (folder / "a.jsonl").write_bytes(jsonl(*({"text": prose(i, 1 if i % 20 == 7 else 30)} for i in range(40))))
    assert "WARNING" in look_into(survey(folder))[0]


@pytest.mark.parametrize("name", ["book.txt", "rows.jsonl", "test.txt", "README.md"])
def test_one_file_is_as_its_folder(folder, name):
    """And a file that is named is read whatever its name is."""
    content = jsonl({"text": prose(1, 60)}) if name == "rows.jsonl" else prose(1, 60).encode()
    (folder / name).write_bytes(content)
    alone = {split: texts_of(folder / name, split) for split in ("train", "val")}
    assert ensure_data(str(folder / name)).folder == folder / name and all(alone.values())
    if name in ("book.txt", "rows.jsonl"):
        assert {split: texts_of(folder, split) for split in ("train", "val")} == alone


def test_a_line_that_never_ends_is_stopped(folder, monkeypatch):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"0" * 10**7))
    monkeypatch.setattr(sources, "LONGEST", 10**6)
    with pytest.raises(UserError, match="a.jsonl.gz .*too long"):
        ensure_data(str(folder))
    assert not list(folder.parent.rglob("*.arrow"))


def test_a_full_disk_leaves_nothing_half_made(folder, monkeypatch):
    import errno

    written(folder, **{"a_DOT_txt": prose(1, 60)})

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("datasets.arrow_writer.ArrowWriter.write_rows_on_file", full, raising=False)
        m.setattr("datasets.arrow_writer.ArrowWriter.write_examples_on_file", full)
        with pytest.raises(OSError, match="No space left"):  # which run_main makes a line
            ensure_data(str(folder))
    assert not list(folder.parent.rglob("*.arrow")) and texts_of(folder, "train")


def test_the_tokens_of_own_text_are_counted_in_a_sample(folder):
    (folder / "a.txt").write_text(prose(1, 200))
    tokenizer = types.SimpleNamespace(encode=lambda texts: [text.split(" ") for text in texts])
    tokens = sum(len(text.split(" ")) for text in texts_of(folder, "train"))
    assert abs(count_tokens(open_text("train", folder), tokenizer) / tokens - 1) < 0.1
    for k in range(2):
        write_shard(folder / f"{k}.parquet", ["x"] * 10)
    (folder / "a.txt").unlink()
    assert count_tokens(open_text("train", folder), tokenizer) is None


@pytest.mark.parametrize("names", [["a.txt"], [f"{i}.md" for i in range(40)], ["a.txt", "valid.txt"]], ids=len)
def test_a_plan_counts_the_text_that_a_run_trains_on(folder, names):
    """Not what is kept for validation, so that it says as often as the run how often the text is read."""
    for i, name in enumerate(names):
        (folder / name).write_text(prose(i, 2400 // len(names)))
    counted = count_tokens(
        open_text("train", folder), types.SimpleNamespace(encode=lambda texts: [t[::4] for t in texts])
    )
    assert 0.95 < look_into(survey(folder))[1] / counted < 1.15  # Without such files a part of the text is kept.
    before = look_into(survey(folder))[1]
    (folder / "test.csv").write_text("x" * 99)  # These do not count.
    (folder / "valid.txt.gz").write_bytes(gzip.compress(b"kept for validation"))
    assert look_into(survey(folder))[1] == before


@pytest.mark.parametrize("documents", [40, 8000], ids=["small", "several megabytes"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json", "a.parquet", "a.jsonl.GZ", "a.txt.bz2", "shards"])
def test_a_plan_counts_the_column_of_the_text_and_not_the_file(folder, name, documents):
    """The other column is as large. Of a large file the beginning is read, and of compressed ones in large blocks."""
    texts = [prose(i, 1) for i in range(documents)]
    rows = [{"note": text[::-1], "text": text} for text in texts]
    if name in ("a.parquet", "shards"):
        for k in range(1 + 2 * (name == "shards")):
            pq.write_table(pa.Table.from_pylist(rows), folder / f"{k}.parquet", row_group_size=512)
        texts *= 1 + (name == "shards")  # The last shard validates.
    else:
        table = "note,text\n" + "".join(f"{row['note']},{row['text']}\n" for row in rows)
        content = {"csv": table.encode(), "jsonl": jsonl(*rows), "json": json.dumps(rows).encode()}
        content |= {"jsonl.GZ": gzip.compress(content["jsonl"]), "txt.bz2": bz2.compress("".join(texts).encode())}
        (folder / name).write_bytes(content[name.partition(".")[2]])
    share = look_into(survey(folder))[1] / (sum(map(len, texts)) / 4)
    assert (0.6 if name.endswith(("GZ", "bz2")) else 0.95) < share < 1.1


@pytest.mark.parametrize("named", ["text", "Text"])
@pytest.mark.parametrize("shards", [False, True])
def test_a_column_that_differs_in_capitals_alone_is_the_column(folder, monkeypatch, shards, named):
    """An exact name counts first. Files may differ, as a table of Excel and a file of JSON lines do."""
    monkeypatch.setenv("TEXT_COLUMN", named)
    texts, both = [prose(i, 1) for i in range(40)], {"text": prose(98, 1), "Text": prose(99, 1)}
    if shards:
        for name, column in (("a", "Text"), ("b", "text"), ("c", "Text")):
            pq.write_table(pa.table({"note": texts, column: texts}), folder / f"{name}.parquet")
    else:
        (folder / "a.csv").write_text("Id;Title;Text\n" + "".join(f"{i};x;{text}\n" for i, text in enumerate(texts)))
        (folder / "b.jsonl").write_bytes(jsonl(*({"text": text, "n": 1} for text in texts), both))
        pq.write_table(pa.table({"note": texts, "TEXT": texts}), folder / "c.parquet")
    tokens = look_into(survey(folder))[1]
    assert tokens / ((3 - shards) * sum(map(len, texts)) / 4) == pytest.approx(1, abs=0.1)
    if shards:
        assert texts_of(folder, "train") == 2 * texts and texts_of(folder, "val") == texts
    else:
        assert all_text(folder) == "".join([*texts, *texts, both[named], *texts])


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", "csv"])
def test_the_column_with_the_text_can_be_named(folder, monkeypatch, suffix):
    for i in range(2):
        texts = [prose(10 * i + j, 4) for j in range(12)]
        if suffix == "parquet":
            pq.write_table(pa.table({"title": ["x"] * 12, "content": texts}), folder / f"{i}.parquet", row_group_size=4)
        elif suffix == "csv":
            (folder / f"{i}.csv").write_text("title,content\n" + "".join(f'x,"{text}"\n' for text in texts))
        else:
            (folder / f"{i}.jsonl").write_bytes(jsonl(*({"title": "x", "content": text} for text in texts)))
    for column in ("", "body"):
        with pytest.raises(UserError, match="--text-column"):
            ensure_data(str(folder), column=column)
    found = ensure_data(str(folder), column="content")
    found = [text for batch in parquets_iter_batched("train", data_dir=found, column="content") for text in batch]
    assert prose(3, 4)[:40] in "".join(found) and "x" not in found
    with pytest.raises(UserError, match="--text-column"):
        ensure_data(str(folder))  # nothing of the process remembers the column
    monkeypatch.setenv("TEXT_COLUMN", "content")
    ensure_data(str(folder))
    assert texts_of(folder, "train") == found
    with pytest.raises(UserError, match="add DATA_DIR"):
        ensure_data()
    assert ensure_data(str(folder)).folder == folder
