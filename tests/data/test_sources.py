"""Downloads from a server that misbehaves, questions to it, rows of files and data sets, and what a plan looks for."""

import contextlib
import gzip
import json
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from _server import Server

from nanochat_fp4.cli import UserError
from nanochat_fp4.data import sources
from nanochat_fp4.data.sources import (
    MissingDataError,
    Source,
    download_file_with_lock,
    hub_url,
    load_rows,
    look_for,
    rows_of,
    url_problem,
    within,
)

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture
def server(base_dir):
    url_problem.cache_clear()
    with contextlib.closing(Server({"/f": DATA})) as server:
        yield server
        server.shutdown()
    url_problem.cache_clear()


# ----------------------------------------------------------------------------------------------------------------------
# Downloads


@pytest.mark.parametrize("wrong", ["", "chunked"])
def test_a_file_arrives_whole(server, base_dir, wrong):
    server.bad["/f"] = [wrong]
    assert download_file_with_lock(server.url("/f"), "f") == str(base_dir / "f")
    assert (base_dir / "f").read_bytes() == DATA and download_file_with_lock("http://127.0.0.1:9/", "f")


@pytest.mark.parametrize(
    "path, wrong, word",
    [
        ("/f", "cut", "150000 .*150000"), ("/f", "500", "500"), ("/nothing", "", "404"),
        ("/f", "stall", "0.5 seconds"), ("/f", "cut chunks", "downloaded"), ("/f", "to file", "file"),
    ],
)  # fmt: skip
def test_or_not_at_all(server, base_dir, path, wrong, word):
    server.bad[path] = [wrong]
    with pytest.raises(MissingDataError, match=word) as e:
        download_file_with_lock(server.url(path), "f", deadline=0.5)
    assert "\n" not in str(e.value) and not (base_dir / "f").exists()
    if wrong != "stall":  # whose thread goes on
        assert sorted(os.listdir(base_dir)) in ([], ["f.lock"])


def test_what_the_check_refuses_is_not_kept(server, base_dir):
    def refuse(path):
        assert Path(path).read_bytes() == DATA
        raise UserError("it is a log-in page")

    with pytest.raises(MissingDataError, match="log-in page.*put it at"):
        download_file_with_lock(server.url("/f"), "f", refuse)
    assert not [name for name in os.listdir(base_dir) if not name.endswith(".lock")]


def test_the_lock_downloads_once(server, base_dir):
    seen = []

    def fetch():
        download_file_with_lock(server.url("/f"), "words.txt", lambda path: seen.append(os.path.exists(path)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch(), range(4)))
    assert len(server.requests) == 1 and seen == [True]
    assert (base_dir / "words.txt").read_bytes() == DATA


def test_work_that_hangs_is_left_alone():
    """A look-up of a host's name ignores every timeout."""
    started, before, end = time.monotonic(), threading.active_count(), threading.Event()
    with pytest.raises(TimeoutError, match="0.1 seconds"):
        within(0.1, lambda: end.wait(60))
    assert time.monotonic() - started < 30 and threading.active_count() <= before + 1
    end.set()
    with pytest.raises(KeyError):
        within(60, lambda: {}["x"])
    assert within(60, lambda: 3) == 3


def test_questions(server, monkeypatch):
    assert url_problem(server.url("/f")) is None and "404" in url_problem(server.url("/nothing"))
    assert "refused" in (one := url_problem("http://127.0.0.1:9/f"))
    assert url_problem("http://127.0.0.1:9/g") == one  # so that a plan says it once for all files
    monkeypatch.setenv("HF_ENDPOINT", server.url(""))
    for offline, word in (("0", "404"), ("1", "HF_HUB_OFFLINE")):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        url_problem.cache_clear()
        assert word in url_problem(hub_url("x/y", "z"))
    monkeypatch.setattr(sources, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(sources.urllib.request, "urlopen", lambda *args, **kwargs: time.sleep(5))
    assert "0.2 seconds" in url_problem("http://never.answers/f")


# ----------------------------------------------------------------------------------------------------------------------
# Rows


def fine(row):
    return None


def write_jsonl(path: Path, items, gz=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(item) + "\n" for item in items)
    with gzip.open(path, "wt") if gz else open(path, "w") as f:
        f.write(text)


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet", "parts"])
def test_rows_of_every_form_come_in_the_order_of_datasets(tmp_path, form):
    items = [{"n": i} for i in range(23)]
    place = tmp_path / "org" / "set" / "main"
    place.mkdir(parents=True)
    if form == "parts":
        pq.write_table(pa.Table.from_pylist(items[:10]), place / "test-00000-of-00002.parquet")
        pq.write_table(pa.Table.from_pylist(items[10:]), place / "test-00001-of-00002.parquet")
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(items), place / "test.parquet")
    else:
        write_jsonl(place / f"test.{form}", items, gz=form.endswith("gz"))
    loaded = load_rows("org/set", "main", "test", tmp_path, fine)
    assert [r["n"] for r in loaded] == np.random.default_rng(42).permutation(23).tolist()


def test_shuffle_is_that_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    expected = datasets.Dataset.from_list([{"n": i} for i in range(101)]).shuffle(seed=42)["n"]
    write_jsonl(tmp_path / "org" / "set" / "main" / "test.jsonl", [{"n": i} for i in range(101)])
    assert [r["n"] for r in load_rows("org/set", "main", "test", tmp_path, fine)] == list(expected)


def test_the_hub_is_asked_for_one_revision(monkeypatch):
    import re

    import datasets

    asked = {}

    def load_dataset(name, config, split, revision):
        asked[name] = revision
        return datasets.Dataset.from_list([{"x": 1}])

    monkeypatch.setattr(sources, "url_problem", lambda url: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in sources.REVISIONS:
        assert list(load_rows(name, None, "test", None, fine)) == [{"x": 1}]
    assert asked == sources.REVISIONS and all(re.fullmatch("[0-9a-f]{40}", revision) for revision in asked.values())
    root = Path(sources.__file__).parents[2]
    used = "\n".join(p.read_text() for p in [root / "nanochat_fp4/data/chat_data.py", *(root / "eval").glob("*.py")])
    assert {name for name in re.findall(r'"([\w-]+/[\w-]+)"', used)} == set(sources.REVISIONS)


def test_a_benchmark_without_a_network_blames_the_network(monkeypatch):
    """And names the flag that does without it."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    url_problem.cache_clear()
    with pytest.raises(MissingDataError, match="openai/gsm8k .*http://127.0.0.1:9/.*--eval-dir") as e:
        load_rows("openai/gsm8k", "main", "test", None, fine)
    assert "\n" not in str(e.value)
    url_problem.cache_clear()


def test_a_row_is_what_its_file_says(tmp_path):
    pq.write_table(pa.table({"a": [1, 2], "b": ["x", None]}), tmp_path / "a.parquet")
    assert list(rows_of(tmp_path / "a.parquet")) == [
        ("row 0", {"a": 1, "b": "x"}, 0.5),
        ("row 1", {"a": 2, "b": None}, 1),
    ]
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n[2]\n')
    assert list(rows_of(tmp_path / "a.jsonl")) == [("line 1", {"a": 1}, 1), ("line 3", [2], 1)]
    (tmp_path / "a.json").write_text('{\n"a": 1}\n')
    assert list(rows_of(tmp_path / "a.json")) == [("row 0", {"a": 1}, 1)]
    (tmp_path / "a.csv").write_text('a,b\n1,"x\ny"\n\n2,\n')
    assert list(rows_of(tmp_path / "a.csv")) == [
        ("line 2", {"a": "1", "b": "x\ny"}, 1),
        ("line 5", {"a": "2", "b": ""}, 1),
    ]
    (tmp_path / "a.csv").write_text("sep=;\na;b\n1;x\n")  # Excel's own line
    assert [row for *row, _ in rows_of(tmp_path / "a.csv")] == [["line 3", {"a": "1", "b": "x"}]]
    for name in ("a.json", "a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(b"")
        assert list(rows_of(tmp_path / name)) == []
    with pytest.raises(MissingDataError, match="is not there"):
        list(rows_of(tmp_path / "none.jsonl"))


# ----------------------------------------------------------------------------------------------------------------------
# What a plan looks for


def test_sources_say_their_own_problems(server, base_dir, monkeypatch):
    """What is here is loaded, because a damaged file would end a stage after hours; for the rest a server is asked."""

    def damaged():
        raise UserError("line 3: not JSON")

    base_dir.mkdir()
    (base_dir / "g").write_text("x")
    found = look_for(
        [
            Source("good", lambda: 1),
            Source("damaged", damaged),
            Source("on the server", damaged, server.url("/f")),
            Source("not on the server", lambda: 1, server.url("/nothing"), "a remedy", vital=True),
            Source("downloaded before", damaged, server.url("/g")),
        ]
    )
    assert [source.name for source in found] == ["damaged", "not on the server", "downloaded before"]
    assert found[0].missing == found[2].missing == "line 3: not JSON" and "404" in found[1].missing
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", server.url(""))
    (missing,) = look_for([Source("of the hub", lambda: 1, "org/set")])
    assert missing.missing == "the download fails (HF_HUB_OFFLINE is set)"
