"""Where training text comes from: the hub, the embedded corpus, and the choice between them."""

import os
import re
import shutil
import types
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from _samples import texts_of, write_shard
from _server import hub as serve_hub

from nanochat_fp4 import common
from nanochat_fp4.cli import UserError
from nanochat_fp4.data import dataset
from nanochat_fp4.data.dataset import (
    build_embedded_corpus,
    data_lock,
    download_shards,
    ensure_data,
    found_data,
    index_to_filename,
    open_text,
    survey,
    validation_text,
)

VAL = "shard_01822.parquet"


# ----------------------------------------------------------------------------------------------------------------------
# The embedded corpus


def test_embedded_corpus(base_dir, tmp_path, monkeypatch):
    made = build_embedded_corpus(0.4)
    train, val = texts_of(made, "train"), texts_of(made, "val")
    assert 400_000 <= sum(map(len, train + val)) < 700_000
    assert 0.01 < sum(map(len, val)) / sum(map(len, train)) < 0.25
    assert not set(train) & set(val)
    time = os.path.getmtime(made)
    assert build_embedded_corpus(0.4) == made == found_data() and os.path.getmtime(made) == time  # made once
    other = build_embedded_corpus(0.5)  # a run may be reading the first one
    assert texts_of(other, "train") != train == texts_of(made, "train") and found_data() == other
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "again"))  # the same on every machine
    again = build_embedded_corpus(0.4)
    assert again != made and texts_of(again, "train") == train and texts_of(again, "val") == val


def test_the_embedded_corpus_is_called_by_its_name(base_dir, capsys):
    """Also where the plan has it built, and nobody has named a folder."""
    dataset.main(["--embedded", "--size-mb=0.4"])
    assert "the embedded corpus" in (said := capsys.readouterr().out) and "as asked for" not in said


def test_embedded_modules_are_on_one_side_of_the_split(base_dir, monkeypatch):
    documents = [f"m{i}! text " * 300 for i in range(80)]
    monkeypatch.setattr(dataset, "embedded_documents", lambda: iter(documents * 2))
    made = build_embedded_corpus(100)
    train, val = (re.findall(r"m\d+!", "".join(texts_of(made, split))) for split in ("train", "val"))
    assert len(train + val) == 160 * 300 and all(n % 300 == 0 for n in Counter(val).values())
    assert 4 <= len(val) / 300 <= 16
    monkeypatch.setattr(dataset, "embedded_documents", lambda: iter("b"))
    with pytest.raises(UserError, match="no library sources.*DATA_DIR"):  # as in a Python without them
        build_embedded_corpus()
    assert found_data() == made


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
    assert len(hub.requests) == 4 and capsys.readouterr().out
    download_shards(3)
    assert len(hub.requests) == 4 and not capsys.readouterr().out
    # More training text is no other validation text.
    assert texts_of(folder, "val") == [f"validation {i}" for i in range(10)] and validation_text(folder) == text
    assert len(texts_of(folder, "train")) == 30


def test_shards_of_an_earlier_version_are_used_as_they_are(hub, shards, base_dir, capsys):
    """It downloaded no validation shard of a fixed name. A run that goes on needs its split."""
    shutil.copytree(shards, base_dir / "base_data")
    folder = ensure_data().folder
    assert texts_of(folder, "val") == [f"document 2.{i}" for i in range(10)] and hub.requests == []
    assert "1 for validation (shard_00002.parquet" in capsys.readouterr().out


def test_a_cut_download_goes_on(hub, base_dir):
    hub.bad[hub.prefix + "shard_00000.parquet"] = ["cut"]
    assert len(texts_of(download_shards(1), "train")) == 10


def test_a_shard_that_is_no_parquet_is_named(hub, base_dir):
    hub.files[hub.prefix + "shard_00001.parquet"] = b"<html>please log in</html>"
    with pytest.raises(UserError, match="shard_00001.parquet .*delete it"):
        open_text("train", download_shards(2, num_workers=1))


def test_one_failure_stops_the_others(hub, base_dir):
    """Shard 3 is not there; shard 4 would never end, and nobody waits for it."""
    hub.files[endless := hub.prefix + "shard_00004.parquet"] = b"x"
    hub.bad[endless] = ["endless"]
    with pytest.raises(UserError, match="shard_00003.parquet: .*404"):
        download_shards(400, num_workers=2)
    assert set(served(hub)) <= {VAL, *(index_to_filename(i) for i in range(6))}


def test_a_download_has_a_deadline(hub, base_dir):
    hub.bad[hub.prefix + VAL] = ["stall"] * 9
    with pytest.raises(UserError, match=f"{VAL}: not finished within 0.5 seconds.*--embedded"):
        download_shards(1, deadline=0.5)


def test_bad_numbers(base_dir):
    for num_files, num_workers in ((0, 4), (-2, 4), (3, 0)):
        with pytest.raises(UserError, match="1 to 1822"):
            download_shards(num_files, num_workers)
    for size in (0, -3, 0.1, 1e9, float("nan")):
        with pytest.raises(UserError, match="0.2 to 100"):
            build_embedded_corpus(size)


def test_disk_space_is_checked_before(hub, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=150_000_000))
    with pytest.raises(UserError, match="286.1 MB.*143.1 MB.*NANOCHAT_BASE_DIR"):
        download_shards(2)
    assert hub.requests == []


def test_no_network_names_the_ways_around(base_dir, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="http://127.0.0.1:9.*DATA_DIR.*--embedded") as e:
        download_shards(2)
    assert "\n" not in str(e.value) and "refused" in str(e.value) and not re.search("urlopen|Errno", str(e.value))


# ----------------------------------------------------------------------------------------------------------------------
# The choice


@pytest.fixture
def small_corpus(monkeypatch):
    monkeypatch.setattr(build_embedded_corpus, "__defaults__", (0.3,))


def test_offline_means_the_embedded_corpus(base_dir, small_corpus, capsys):
    assert found_data() is None
    folder = str(ensure_data().folder)
    assert Path(folder).parent == base_dir / "embedded_data"
    assert "embedded corpus" in (out := capsys.readouterr().out) and "HF_HUB_OFFLINE is set" in out
    assert str(ensure_data().folder) == folder == found_data()


def test_what_was_begun_with_stays(hub, base_dir, small_corpus, monkeypatch, capsys):
    """A run that started on the embedded corpus must not find other data when the network is back."""
    folder = build_embedded_corpus()
    assert str(ensure_data().folder) == folder and hub.requests == []
    assert "python -m nanochat_fp4.data.dataset -n 8" in capsys.readouterr().out  # how to change one's mind
    download_shards(2)
    assert str(ensure_data().folder) == str(base_dir / "base_data") == found_data()
    assert "FineWeb-Edu" in capsys.readouterr().out


def test_the_first_rank_chooses(shards, base_dir, small_corpus, monkeypatch):
    """Another rank that comes later would find the shards that the first one is downloading."""
    corpus, downloaded = build_embedded_corpus(), base_dir / "base_data"
    shutil.copytree(shards, downloaded)
    first = [corpus, str(survey(corpus))]
    monkeypatch.setattr(dataset, "of_all_ranks", lambda value: [first.pop(0), value])
    assert str(ensure_data().folder) == corpus and first == []
    first[:] = [str(downloaded), "2 files"]  # On another node, more shards were there.
    with pytest.raises(UserError, match="different text"):
        ensure_data()


def test_a_rank_that_comes_late_waits_for_all_shards(shards, base_dir):
    folder = base_dir / "base_data"
    folder.mkdir(parents=True)
    names = sorted(os.listdir(shards))
    with ThreadPoolExecutor(1) as pool:
        with data_lock():  # rank 0 downloads
            for name in names[:2]:
                shutil.copy(shards / name, folder / name)
            late = pool.submit(lambda: len(open_text("train", ensure_data())))
            with pytest.raises(TimeoutError):
                late.result(0.3)
            assert found_data() == str(folder)  # A plan does not wait.
            shutil.copy(shards / names[2], folder / names[2])
        assert late.result() == 2


def test_a_broken_hub_means_the_embedded_corpus(hub, small_corpus, capsys):
    hub.files = {hub.prefix + VAL: b"x"}
    assert str(ensure_data().folder) == build_embedded_corpus()
    assert "404" in capsys.readouterr().out


def test_command_line(hub, shards, base_dir, capsys, tmp_path, monkeypatch):
    for flags, variable in ((["--data-dir", str(shards)], ""), ([], str(shards))):
        monkeypatch.setenv("DATA_DIR", variable)
        common.SAID.clear()
        dataset.main(flags)
        out = capsys.readouterr().out
        assert "2 file(s) to train" in out and "1 for validation" in out and str(shards) in out
    dataset.main(["-n", "2", "-w", "1"])
    out = capsys.readouterr().out
    assert "2 file(s) to train" in out and "base_data" in out and VAL in out
    monkeypatch.delenv("DATA_DIR")
    dataset.main(["--ensure"])
    assert "FineWeb-Edu" in capsys.readouterr().out
    dataset.main(["--embedded", "--size-mb", "0.3"])
    assert "embedded_data" in capsys.readouterr().out
    assert [path.name[:7] for path in (base_dir / "embedded_data").iterdir()] == ["0.3_mb_"]
