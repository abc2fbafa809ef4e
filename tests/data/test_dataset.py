"""Where training text comes from: own folders, the hub, the embedded corpus; and what damaged shards lead to."""

import codecs
import gzip
import json
import os
import random
import re
import shutil
import time
import types
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _server import hub as serve_hub

from nanochat_fp4.cli import UserError
from nanochat_fp4.data import corpus, dataset, download, rows
from nanochat_fp4.data.corpus import build_embedded_corpus
from nanochat_fp4.data.dataset import (
    download_shards,
    ensure_data,
    list_parquet_files,
    open_shards,
    parquets_iter_batched,
    validation_text,
)
from nanochat_fp4.data.shards import cut_text, data_lock, index_to_filename, open_shard
from nanochat_fp4.data.tokenizer import RustBPETokenizer

VAL = "shard_01822.parquet"
WORDS = "the model reads a row of tokens and learns what comes next in many small steps".split()


def prose(seed, paragraphs):
    """Paragraphs of made-up sentences, each of which names its seed and number, so that pieces can be traced."""
    rng = random.Random(seed)
    return "\n\n".join(f"[{seed}.{i}] " + " ".join(rng.choices(WORDS, k=60)) + "." for i in range(paragraphs))


def write_shard(path, texts, row_group_size=4):
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=row_group_size)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    for s in range(3):
        write_shard(folder / f"shard_{s:05d}.parquet", [f"document {s}.{i}" for i in range(10)])
    return folder


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def texts(folder):
    """A folder of 25 text files."""
    for i in range(25):
        (folder / f"{i}.txt").write_text(prose(i, 12))
    return str(folder)


def texts_of(folder, split):
    return [text for batch in parquets_iter_batched(split, data_dir=folder) for text in batch]


# ----------------------------------------------------------------------------------------------------------------------
# Reading


def test_the_last_shard_is_validation(shards):
    assert texts_of(shards, "train") == [f"document {s}.{i}" for s in range(2) for i in range(10)]
    assert texts_of(shards, "val") == [f"document 2.{i}" for i in range(10)]
    assert [os.path.basename(p) for p in list_parquet_files(shards)] == [index_to_filename(i) for i in range(3)]
    assert [s.rows for s in open_shards("train", shards)] == [(4, 4, 2)] * 2
    batches = [list(parquets_iter_batched("train", start, 2, data_dir=shards)) for start in (0, 1)]
    assert [len(b) for b in batches] == [4, 2]
    dealt = sorted(text for b in batches for batch in b for text in batch)
    assert dealt == sorted(texts_of(shards, "train"))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_of_every_layout_is_read(tmp_path, kind):
    """pandas' category, polars' Categorical, string_view of newer writers."""
    texts = ["one", None, "two", "one"]
    for i in range(2):
        column = pa.array(texts).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array(texts)
        pq.write_table(pa.table({"text": column.cast(kind)}), tmp_path / f"{i}.parquet")
    assert ensure_data(str(tmp_path)) == str(tmp_path)
    assert texts_of(tmp_path, "train") == ["one", "", "two", "one"]


def test_a_footer_is_read_once(tmp_path, monkeypatch):
    """A row group in 8,000 takes as long as one in 80: reading the footer for each took 33 s a step."""
    write_shard(tmp_path / "a.parquet", [f"{i}" for i in range(8000)], row_group_size=1)
    shard = open_shard(tmp_path / "a.parquet")

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


# ----------------------------------------------------------------------------------------------------------------------
# A folder of one's own


def test_cut_text_loses_nothing_and_ends_at_paragraphs():
    text = prose(0, 120)
    pieces = cut_text(text, random.Random(0))
    assert re.sub(r"\s", "", "".join(pieces)) == re.sub(r"\s", "", text)
    assert all(800 <= len(p) <= 5200 for p in pieces[:-1]) and len({len(p) for p in pieces}) > 5
    assert all(p.startswith("[0.") and p.endswith(".") for p in pieces)
    assert cut_text(" \n\n ", random.Random(0)) == []
    assert "".join(cut_text("x" * 20_000, random.Random(0))) == "x" * 20_000  # no place to cut
    copied = []

    class Noted(str):
        def __getitem__(self, place):
            copied.append(len(part := super().__getitem__(place)))
            return part

    text = Noted("word " * 100_000)
    assert sum(map(len, cut_text(text, random.Random(0)))) > 0.99 * len(text)
    assert max(copied) <= 5200  # the rest of the text is not copied at each cut


def test_parquet_folders_are_used_as_they_are(shards, base_dir, monkeypatch, capsys):
    """DATA_DIR, and before it the flag."""
    monkeypatch.setenv("DATA_DIR", str(shards))
    assert ensure_data() == str(shards) and "DATA_DIR" in capsys.readouterr().out
    assert list_parquet_files() == list_parquet_files(shards)  # without an argument: what training would use
    monkeypatch.setenv("DATA_DIR", "/nowhere")
    assert ensure_data(str(shards)) == str(shards)
    assert not base_dir.exists() or os.listdir(base_dir) == []


def test_text_files_become_shards(tmp_path, base_dir, monkeypatch):
    folder = tmp_path / "my texts"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text(prose(1, 60))
    (folder / "sub" / "b.md").write_text(prose(2, 60))
    with gzip.open(folder / "c.json.gz", "wt") as f:  # as C4 has them
        f.writelines(json.dumps({"text": prose(3, 60)}) + "\n\n" for _ in range(1))
    made = ensure_data(str(folder))
    train, val = texts_of(made, "train"), texts_of(made, "val")
    # Every paragraph is there once, and in one split.
    found = [re.findall(r"\[\d+\.\d+\]", "".join(split)) for split in (train, val)]
    assert sorted(found[0] + found[1]) == sorted(f"[{s}.{i}]" for s in (1, 2, 3) for i in range(60))
    # Three documents are too few to keep one back: the end of each is the validation split.
    assert 0 < len(val) < len(train) / 4 and {tag[1] for tag in found[1]} <= {"1", "2", "3"}
    assert all(len(s.rows) >= min(8, s.num_rows) for s in open_shards("train", made))

    times = [os.stat(path).st_mtime_ns for path in list_parquet_files(made)]
    assert ensure_data(str(folder)) == made  # made once
    assert [os.stat(path).st_mtime_ns for path in list_parquet_files(made)] == times
    (folder / "a.txt").write_text(prose(1, 60).swapcase())
    assert ensure_data(str(folder)) != made  # and again when the text changes, even if its size does not
    (folder / "a.txt").write_text(prose(1, 60))
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "other"))
    again = ensure_data(str(folder))  # the same on another machine
    assert again != made and (texts_of(again, "train"), texts_of(again, "val")) == (train, val)


@pytest.mark.parametrize("name", ["book.txt", "rows.jsonl"])
def test_one_text_file_is_as_its_folder(base_dir, tmp_path, name):
    folder = tmp_path / "texts"
    folder.mkdir()
    text = prose(1, 60)
    (folder / name).write_text(text if name == "book.txt" else json.dumps({"text": text}) + "\n")
    alone, together = ensure_data(str(folder / name)), ensure_data(str(folder))
    for split in ("train", "val"):
        assert texts_of(alone, split) == texts_of(together, split) and texts_of(alone, split)
    assert ensure_data(str(folder / name)) == alone


def test_a_base_directory_inside_the_folder_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(prose(1, 60))
    made = ensure_data(".")
    (tmp_path / "base" / "report.md").write_text("A report of the run.")
    (tmp_path / "base" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert ensure_data(".") == made and len(list((tmp_path / "base" / "converted_data").iterdir())) == 1
    assert ensure_data(str(Path(made))) == made  # shards in the base directory


def test_null_is_an_empty_document_in_every_format(tmp_path, base_dir):
    texts = [prose(i, 12) if i % 2 else None for i in range(20)]
    made = []
    for name in ("a.jsonl", "a.parquet"):
        (folder := tmp_path / name[2:]).mkdir()
        if name == "a.jsonl":
            (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            write_shard(folder / name, texts)
        made.append({split: texts_of(ensure_data(str(folder)), split) for split in ("train", "val")})
    assert made[0] == made[1] and made[0]["train"]


def test_a_small_file_that_unpacks_to_gigabytes_is_stopped(tmp_path, base_dir, monkeypatch):
    """When the text is more than the disk has room for, or a line is longer than any document."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3_000_000))
    line = json.dumps({"text": "0" * 1000}).encode() + b"\n"
    for name, content in (("lines", line * 10_000), ("line", b'{"text": "' + b"0" * 10**7)):
        (folder := tmp_path / name).mkdir()
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(content))
        assert (folder / "a.jsonl.gz").stat().st_size < len(content) / 400
        with pytest.raises(UserError, match="a.jsonl.gz, line .*room"):
            ensure_data(str(folder))
        monkeypatch.setattr(rows, "LONGEST_LINE", 10**6)
    for i in range(3):  # none of them alone is too much
        (tmp_path / "lines" / f"{i}.jsonl.gz").write_bytes(gzip.compress(line * 1500))
    (tmp_path / "lines" / "a.jsonl.gz").unlink()
    with pytest.raises(UserError, match="2.9 MB"):
        ensure_data(str(tmp_path / "lines"))
    assert not list(base_dir.glob("converted_data/*"))
    monkeypatch.setattr(rows, "physical_memory", lambda: 10**6)
    with pytest.raises(UserError, match="more text than"):  # benchmarks are kept in memory
        rows.read_rows(tmp_path / "lines" / "0.jsonl.gz")


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/urandom", "."])
def test_a_link_to_a_device_is_no_text(tmp_path, base_dir, target):
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.txt", "c.parquet"):
        (tmp_path / "data" / name).symlink_to(target)
    with pytest.raises(UserError, match="holds no data"):
        ensure_data(str(tmp_path / "data"))
    with pytest.raises(UserError, match="a device"):
        rows.read_rows(tmp_path / "data" / "a.jsonl")
    (tmp_path / "data" / "tokenizer.json").symlink_to(target)
    with pytest.raises(UserError, match="a device"):
        RustBPETokenizer.from_directory(tmp_path / "data")


def test_many_documents_are_split_as_wholes(folder, base_dir):
    documents = [prose(i, 10 + i % 20) for i in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    made = ensure_data(str(folder))
    found = [set(re.findall(r"\[(\d+)\.", "".join(texts_of(made, split)))) for split in ("train", "val")]
    assert not found[0] & found[1] and len(found[0] | found[1]) == 60 and len(found[1]) == 3


def test_a_single_parquet_file_is_split(folder, base_dir):
    write_shard(folder / "all.parquet", [prose(i, 4) for i in range(100)])
    made = ensure_data(str(folder))
    assert made != str(folder) and len(texts_of(made, "val")) >= 5
    assert len(texts_of(made, "val")) + len(texts_of(made, "train")) >= 100


def test_lone_surrogates_and_bad_utf8_do_not_stop_the_conversion(folder, base_dir):
    (folder / "a.txt").write_bytes(b"\xfe bad bytes " + prose(1, 60).encode())
    mark = codecs.BOM_UTF8
    (folder / "b.jsonl").write_bytes(mark + b'{"text": "lone \\ud800 surrogate"}\n')
    (folder / "c.txt").write_bytes(mark + b"A line of Windows.")
    text = "".join(texts_of(ensure_data(str(folder)), "train"))
    assert "lone ? surrogate" in text and "A line of Windows." in text and "\ufeff" not in text


def test_bytes_that_are_not_utf8_are_said(folder, base_dir, capsys):
    """Once, with their share, by file. The text itself may have the character that replaces them."""
    german = "Größe " * 200 + prose(1, 60)
    (folder / "latin.txt").write_bytes(german.encode("latin-1"))
    (folder / "web.jsonl").write_bytes(b'{"text": "na\xefve"}\n' + b'{"text": "plain"}\n' * 99)
    (folder / "good.txt").write_text("\ufffd" * 500 + prose(2, 60), encoding="utf-8")
    (folder / "short.md").write_bytes(b"\xfc\xfc")
    assert "Gr\ufffd\ufffde Gr" in "".join(texts_of(ensure_data(str(folder)), "train"))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "UTF-8" in line]
    assert said.startswith("warning: 3 files hold bytes that are not UTF-8 text: ") and "good.txt" not in said
    assert f"{folder / 'short.md'} (100%), {folder / 'latin.txt'} (" in said
    assert f"latin.txt ({40000 / len(german):.2g}%), {folder / 'web.jsonl'} (0.056%); convert" in said


def test_shards_written_here_notice_every_flipped_byte(texts, base_dir):
    path = list_parquet_files(ensure_data(texts))[0]

    def all_texts():
        shard = open_shard(path)
        return [text for k in range(len(shard.rows)) for text in shard.read(k)]

    whole = all_texts()
    good, rng, refused = open(path, "rb").read(), random.Random(0), 0
    for _ in range(40):
        data = bytearray(good)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with open(path, "wb") as f:
            f.write(data)
        try:
            assert whole == all_texts()
        except UserError:
            refused += 1
    assert refused > 20


# ----------------------------------------------------------------------------------------------------------------------
# The embedded corpus


def test_embedded_corpus(base_dir, tmp_path, monkeypatch):
    made = build_embedded_corpus(0.4)
    train, val = texts_of(made, "train"), texts_of(made, "val")
    assert 400_000 <= sum(map(len, train + val)) < 600_000
    assert 0.02 < sum(map(len, val)) / sum(map(len, train)) < 0.25
    assert all(len(text) <= 4000 and text.strip() for text in train + val)
    assert not set(train) & set(val)
    for split in ("train", "val"):
        # As many pieces for validation as this Python's library gives: 11 with 3.11.7, 7 with 3.13.0.
        assert all(len(shard.rows) >= min(8, sum(shard.rows)) for shard in open_shards(split, made))
    assert build_embedded_corpus() == made and build_embedded_corpus(0.4) == made
    (Path(made) / index_to_filename(0)).unlink()
    assert texts_of(build_embedded_corpus(0.4), "train") == train
    (Path(made) / index_to_filename(0)).unlink()
    assert texts_of(build_embedded_corpus(), "train") == train

    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "again"))  # the same on every machine
    again = build_embedded_corpus(0.4)
    assert again != made and texts_of(again, "train") == train and texts_of(again, "val") == val


def test_embedded_prose_and_code():
    source = (
        'import os\n\n\nclass A:\n    """Says a."""\n\n    def f(self, x=1):\n        "Says f."\n        return os\n'
    )
    text, code = corpus.docstrings_and_code(source, "pkg.mod")
    assert text == "pkg.mod.A\n\nSays a.\n\npkg.mod.A.f(self, x=1)\n\nSays f."
    assert code == "import os\n\n\nclass A:\n\n    def f(self, x=1):\n        return os"


def test_embedded_modules_are_on_one_side_of_the_split(base_dir, monkeypatch):
    modules = [f"m{i}" for i in range(80)]
    documents = [(m, f"{m}! prose " * 300) for m in modules] + [(m, f"{m}! code " * 300) for m in modules]
    monkeypatch.setattr(corpus, "embedded_documents", lambda: iter(documents))
    made = build_embedded_corpus(100)
    train, val = (set(re.findall(r"m\d+!", "".join(texts_of(made, split)))) for split in ("train", "val"))
    assert not train & val and len(train | val) == 80 and 2 <= len(val) <= 16
    shutil.rmtree(made)
    monkeypatch.setattr(corpus, "embedded_documents", lambda: iter([("a", "b")]))
    with pytest.raises(UserError, match="no library sources.*DATA_DIR"):  # as in a Python without them
        build_embedded_corpus()
    assert not (base_dir / "embedded_data").exists()


# ----------------------------------------------------------------------------------------------------------------------
# The hub


@pytest.fixture
def hub(shards, base_dir, monkeypatch):
    """A hub with the training shards 0 to 2 and the validation shard."""
    files = {p.name: p.read_bytes() for p in shards.iterdir()}
    write_shard(last := shards.parent / VAL, [f"validation {i}" for i in range(10)])
    with serve_hub(monkeypatch, files | {VAL: last.read_bytes()}) as server:
        yield server


def served(hub):
    return [path.removeprefix(hub.prefix) for path, _ in hub.requests]


def test_download_shards(hub, shards, base_dir, capsys):
    folder = download_shards(1)
    assert folder == str(base_dir / "base_data")
    assert sorted(served(hub)) == ["shard_00000.parquet", VAL]
    out = capsys.readouterr().out
    assert "190.7 MB" in out and "free" in out  # the space is stated first
    text = validation_text(folder)
    download_shards(3)
    assert len(hub.requests) == 4  # only what was missing
    download_shards(3)
    assert len(hub.requests) == 4 and "All 3 training shards" in capsys.readouterr().out
    # More training text is no other validation text.
    assert texts_of(folder, "val") == [f"validation {i}" for i in range(10)] and validation_text(folder) == text
    assert len(texts_of(folder, "train")) == 30


def test_shards_of_an_earlier_version_are_used_as_they_are(hub, shards, base_dir, capsys):
    """It downloaded no validation shard of a fixed name. A run that goes on needs its split."""
    shutil.copytree(shards, base_dir / "base_data")
    folder = ensure_data()
    assert texts_of(folder, "val") == [f"document 2.{i}" for i in range(10)] and hub.requests == []
    assert "validation split is shard_00002.parquet" in capsys.readouterr().out
    before = validation_text(folder)
    download_shards(3)
    assert f"{VAL} becomes the validation split" in capsys.readouterr().out
    assert validation_text(folder) != before


def test_a_shard_that_is_no_parquet_is_not_kept(hub, base_dir):
    hub.files[hub.prefix + "shard_00001.parquet"] = b"<html>please log in</html>"
    with pytest.raises(UserError, match="shard_00001.parquet.*3 attempts.*--embedded"):
        download_shards(2, num_workers=1)
    assert sorted(os.listdir(base_dir / "base_data")) == ["shard_00000.parquet", VAL]


def test_one_failure_stops_the_others(hub, base_dir):
    """Shard 3 is not there; shard 4 would never end, and whoever loads it stops when shard 3 has failed."""
    hub.files[endless := hub.prefix + "shard_00004.parquet"] = b"x"
    hub.bad[endless] = ["endless"]
    with pytest.raises(UserError, match="shard_00003.parquet: .*404"):
        download_shards(400, num_workers=2)
    assert set(served(hub)) <= {VAL, *(index_to_filename(i) for i in range(5))} and len(hub.requests) <= 6


def test_bad_numbers(base_dir):
    for num_files, num_workers in ((0, 4), (-2, 4), (3, 0)):
        with pytest.raises(UserError, match="1 to 1822"):
            download_shards(num_files, num_workers)
    for size in (0, -3, 0.1, 1e9, float("nan")):
        with pytest.raises(UserError, match="0.2 to 100"):
            build_embedded_corpus(size)


def test_disk_space_is_checked_before(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=150_000_000))
    with pytest.raises(UserError, match="286.1 MB .*143.1 MB .*NANOCHAT_BASE_DIR"):
        download_shards(2)
    assert hub.requests == []


def test_no_network_names_the_ways_around(base_dir, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="http://127.0.0.1:9.*DATA_DIR.*--embedded") as e:
        download_shards(2)
    assert "\n" not in str(e.value)


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    # Name look-ups ignore timeouts; a question that takes forever stands for one.
    monkeypatch.setattr(download, "hub_metadata", lambda *args: time.sleep(5))
    assert "within 0.2 seconds" in download.hub_problem("x/y", "z", 0.2)


@pytest.mark.parametrize("status", [401, 404, 503])
def test_a_file_that_the_hub_refuses_is_missing_for_a_plan(monkeypatch, status):
    """The hub is there all the same, and may offer other files."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    refused = urllib.error.HTTPError("https://x", status, "no", None, None)
    monkeypatch.setattr(download, "hub_metadata", lambda *args: (_ for _ in ()).throw(refused))
    assert download.hub_problem("x/y", "z") is None and f"answers {status} for x/y/z" in download.file_problem(
        "x/y", "z"
    )
    assert f"answers {status}" in rows.rows_problem("x/y", "main", "test", None, "--eval-dir")


def test_a_benchmark_without_a_network_blames_the_network(monkeypatch):
    """And not the training text, whose shards are asked for first."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    rows.benchmarks_problem.cache_clear()
    try:
        with pytest.raises(rows.MissingDataError, match="openai/gsm8k .*http://127.0.0.1:9 ") as e:
            rows.load_rows("openai/gsm8k", "main", "test")
    finally:
        rows.benchmarks_problem.cache_clear()
    assert "fineweb" not in str(e.value) and "\n" not in str(e.value) and "--eval-dir" in str(e.value)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_the_column_with_the_text_can_be_named(folder, base_dir, monkeypatch, suffix):
    for i in range(2):
        texts = [prose(10 * i + j, 4) for j in range(12)]
        if suffix == "parquet":
            pq.write_table(pa.table({"title": ["x"] * 12, "content": texts}), folder / f"{i}.parquet", row_group_size=4)
        else:
            lines = [json.dumps({"title": "x", "content": text}) for text in texts]
            (folder / f"{i}.jsonl").write_text("\n".join(lines))
    with pytest.raises(UserError, match="--text-column"):
        ensure_data(str(folder))
    with pytest.raises(UserError, match="body.*--text-column"):
        ensure_data(str(folder), column="body")
    made = ensure_data(str(folder), column="content")
    found = [text for batch in parquets_iter_batched("train", data_dir=made, column="content") for text in batch]
    assert prose(3, 4)[:40] in "".join(found) and "x" not in found
    with pytest.raises(UserError, match="--text-column"):
        ensure_data(str(folder))  # nothing of the process remembers the column
    monkeypatch.setenv("TEXT_COLUMN", "content")
    assert ensure_data(str(folder)) == made and texts_of(made, "train") == found
    with pytest.raises(UserError, match="add --data-dir"):
        ensure_data()


# ----------------------------------------------------------------------------------------------------------------------
# The choice


def test_offline_means_the_embedded_corpus(base_dir, capsys):
    folder = ensure_data(embedded_mb=0.3)
    assert folder == str(base_dir / "embedded_data")
    assert "embedded corpus" in (out := capsys.readouterr().out) and "HF_HUB_OFFLINE is set" in out
    assert ensure_data() == folder == ensure_data(make=False)


def test_what_was_begun_with_stays(hub, base_dir, monkeypatch, capsys):
    """A run that started on the embedded corpus must not find other data when the network is back."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = ensure_data(embedded_mb=0.3)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert ensure_data() == folder and hub.requests == []
    assert "python -m nanochat_fp4.data.dataset -n 8" in capsys.readouterr().out  # how to change one's mind
    download_shards(2)
    assert ensure_data() == str(base_dir / "base_data")
    assert "FineWeb-Edu" in capsys.readouterr().out


def test_a_rank_that_comes_late_waits_for_all_shards(shards, base_dir, monkeypatch):
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    folder = base_dir / "base_data"
    folder.mkdir(parents=True)
    names = [Path(path).name for path in list_parquet_files(shards)]
    with ThreadPoolExecutor(1) as pool:
        with data_lock():  # rank 0 downloads
            for name in names[:2]:
                shutil.copy(shards / name, folder / name)
            late = pool.submit(lambda: len(list_parquet_files(ensure_data())))
            with pytest.raises(TimeoutError):
                late.result(0.3)
            shutil.copy(shards / names[2], folder / names[2])
        assert late.result() == 3


def test_a_broken_hub_means_the_embedded_corpus(hub, base_dir, capsys):
    hub.files = {hub.prefix + "shard_00000.parquet": b"no parquet"}
    assert ensure_data(embedded_mb=0.3) == str(base_dir / "embedded_data")
    assert " 404" in capsys.readouterr().out


def test_nothing_there(base_dir):
    with pytest.raises(UserError, match="no training text.*--ensure.*DATA_DIR"):
        ensure_data(make=False)
    with pytest.raises(UserError, match="no training text"):
        list_parquet_files()


def test_command_line(hub, shards, base_dir, capsys, tmp_path, monkeypatch):
    for flags, variable in ((["--data-dir", str(shards)], ""), ([], str(shards))):
        monkeypatch.setenv("DATA_DIR", variable)
        dataset.main(flags)
        assert "train: 2 shards, 6 row groups, 20 documents" in capsys.readouterr().out
    dataset.main(["-n", "2", "-w", "1"])
    out = capsys.readouterr().out
    assert "train: 2 shards" in out and "val: 1 shards, 3 row groups, 10 documents" in out
    monkeypatch.delenv("DATA_DIR")
    dataset.main(["--ensure"])
    assert "downloaded before" in capsys.readouterr().out
    dataset.main(["--embedded", "--size-mb", "0.3"])
    assert "embedded_data: train: 4 shards" in capsys.readouterr().out
