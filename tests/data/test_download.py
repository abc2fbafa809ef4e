"""Downloads: a server that misbehaves in every way that is asked of it."""

import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from _server import Server, hub

from nanochat_fp4.cli import UserError
from nanochat_fp4.data import download
from nanochat_fp4.data.dataset import DATASET
from nanochat_fp4.data.download import download_file, download_file_with_lock, within

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(download, "BACKOFF_SECONDS", 0)
    with contextlib.closing(Server({"/f": DATA})) as server:
        yield server
        server.shutdown()


@pytest.mark.parametrize("wrong", [[], ["500"], ["cut"], ["chunked"], ["500", "cut"]], ids="-".join)
def test_a_file_arrives_whole_or_not_at_all(server, tmp_path, wrong):
    server.bad["/f"] = list(wrong)
    assert download_file(server.url("/f"), tmp_path / "f") == str(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA and os.listdir(tmp_path) == ["f"]
    assert len(server.requests) == 1 + len([w for w in wrong if w != "chunked"])


@pytest.mark.parametrize(
    "path, wrong, kwargs, text, requests",
    [
        ("/f", ["cut"] * 9, {"attempts": 2}, r"150000 .*300000 \(2 attempts\); the way", 2),
        ("/nothing", [], {}, r"404 \(1 attempt\); the way", 1),
        ("/f", ["stall"] * 9, {"deadline": 0.4, "timeout": 0.3}, "0.4 seconds .*; the way", None),
        ("/f", [], {"limit": 100_000}, "f is larger than the 97.7 KB .*; the way", 1),
        ("/f", ["a petabyte"] * 9, {"limit": 100_000}, "f is larger than the 97.7 KB .*; the way", 1),
        ("/f", ["chunked"] * 9, {"limit": 100_000}, "f is larger than the 97.7 KB .*; the way", 1),
        ("/f", ["no length"] * 9, {"attempts": 1}, "no length", 1),
        ("/f", ["negative length"] * 9, {"attempts": 1}, "no length", 1),
        ("/f", ["two lengths"] * 9, {"attempts": 1}, "no length", 1),
        ("/f", ["206"] * 9, {"attempts": 1}, "206", 1),
        ("/f", ["cut head"] * 9, {"attempts": 1}, "no length", 1),
        ("/f", ["cut chunks"] * 9, {"attempts": 1}, "could not download", 1),
        ("/f", ["chunks and length"] * 9, {"attempts": 1}, "beside chunks", 1),
        ("/f", ["gzip"] * 9, {"attempts": 1}, "'gzip'", 1),
        ("/f", ["to ftp"] * 9, {"attempts": 1}, "ftp", 1),
        ("/f", ["to file"] * 9, {"attempts": 1}, "could not download", 1),
    ],
)
def test_failures_name_the_way_around_and_leave_nothing(server, tmp_path, path, wrong, kwargs, text, requests):
    server.bad[path] = wrong
    with pytest.raises(UserError, match=text):
        download_file(server.url(path), tmp_path / "f", hint="the way around", **kwargs)
    assert os.listdir(tmp_path) == [] and requests in (None, len(server.requests))


def test_remains_and_links_are_neither_used_nor_followed(server, tmp_path):
    """What a killed process left, or someone planted: in earlier versions the file began with the bytes of f.part."""
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    (tmp_path / "f.download").mkdir()
    (tmp_path / "f.download" / "f").write_bytes(b"x" * 1000)
    (tmp_path / "mine").write_bytes(b"my own")
    (tmp_path / "f").symlink_to(tmp_path / "mine")
    download_file(server.url("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA and not (tmp_path / "f").is_symlink()
    assert (tmp_path / "mine").read_bytes() == b"my own" and server.requests == [("/f", None)]
    (tmp_path / "mine.d").mkdir()
    (tmp_path / "g.download").symlink_to(tmp_path / "mine.d")
    with pytest.raises(UserError, match="exists"):
        download_file(server.url("/f"), tmp_path / "g")
    assert os.listdir(tmp_path / "mine.d") == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "data:text/plain,x", "ftp://127.0.0.1/f"])
def test_only_http(tmp_path, url):
    with pytest.raises(UserError, match="https"):
        download_file(url, tmp_path / "f")


def test_work_that_hangs_is_left_alone():
    """A look-up of a host's name ignores every timeout."""
    with pytest.raises(TimeoutError):
        within(0.1, lambda: time.sleep(5))
    stop = threading.Event()
    stop.set()
    with pytest.raises(TimeoutError, match="stopped"):
        within(60, lambda: time.sleep(5), stop)
    with pytest.raises(KeyError):
        within(60, lambda: {}["x"])
    assert within(60, lambda: 3) == 3


def test_the_lock_downloads_once(server, base_dir):
    seen = []

    def fetch():
        download_file_with_lock(server.url("/f"), "words.txt", lambda path: seen.append(os.path.exists(path)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fetch(), range(4)))
    assert len(server.requests) == 1 and seen == [True]
    assert (base_dir / "words.txt").read_bytes() == DATA


# ----------------------------------------------------------------------------------------------------------------------
# The hub


@pytest.mark.parametrize("wrong", ["", "cut", "flip", "500"])
def test_a_file_of_the_hub_has_the_published_hash(monkeypatch, tmp_path, wrong):
    """A cut is huggingface_hub's to mend. Flip, of every byte: the hash differs, and the file comes again."""
    with hub(monkeypatch, {"f": DATA}) as server:
        server.bad[server.prefix + "f"] = [wrong] if wrong else []
        download_file("f", tmp_path / "f", dataset=DATASET)
        assert (tmp_path / "f").read_bytes() == DATA and os.listdir(tmp_path) == ["f"]
        assert len(server.requests) == 1 + bool(wrong)


def test_failures_of_the_hub(monkeypatch, tmp_path):
    with hub(monkeypatch, {"f": DATA}) as server:
        server.bad[server.prefix + "f"] = ["flip"] * 9
        with pytest.raises(UserError, match=r"SHA-256 .*2 attempts"):
            download_file("f", tmp_path / "f", dataset=DATASET, attempts=2, hint="the way around")
        with pytest.raises(UserError, match=r"/nothing: .* 404 \(1 attempt"):
            download_file("nothing", tmp_path / "f", dataset=DATASET)
        with pytest.raises(UserError, match="97.7 KB"):
            download_file("f", tmp_path / "f", dataset=DATASET, limit=100_000)
        server.bad[server.prefix + "f"] = ["stall"] * 9
        with pytest.raises(UserError, match="0.5 seconds"):
            download_file("f", tmp_path / "f", dataset=DATASET, deadline=0.5)
    assert os.listdir(tmp_path) == []
