"""Downloads: a server that misbehaves in every way that is asked of it."""

import hashlib
import io
import os
import random
import threading

import pytest
from _server import Server

from nanochat_fp4.console import Progress
from nanochat_fp4.data.download import download_file, download_file_with_lock
from nanochat_fp4.errors import UserError


class NoWait(threading.Event):
    """A stop event whose wait costs nothing, and notes how long it was to be."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def wait(self, timeout=None):
        self.waits.append(timeout)
        return False


DATA = random.Random(0).randbytes(300_000)


@pytest.fixture
def server():
    server = Server({"/f": DATA})
    yield server
    server.shutdown()
    server.server_close()


def test_download(server, tmp_path):
    progress = Progress(total=len(DATA), unit="bytes", every=1e9, file=io.StringIO())
    assert download_file(server.url("/f"), tmp_path / "f", progress=progress) == str(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA and progress.n == len(DATA) and os.listdir(tmp_path) == ["f"]


def test_download_continues_what_was_begun(server, tmp_path):
    (tmp_path / "f.part").write_bytes(DATA[:123_456])
    download_file(server.url("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert server.requests == [("/f", "bytes=123456-")]


def test_download_of_a_complete_part_fetches_nothing(server, tmp_path):
    (tmp_path / "f.part").write_bytes(DATA)
    download_file(server.url("/f"), tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_drops_a_part_that_is_too_long(server, tmp_path):
    (tmp_path / "f.part").write_bytes(DATA + b"more")
    download_file(server.url("/f"), tmp_path / "f", stop=NoWait())
    assert (tmp_path / "f").read_bytes() == DATA


def test_download_from_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    server.bad["/f"] = ["cut", "cut"]
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    progress = Progress(total=len(DATA), unit="bytes", every=1e9, file=io.StringIO())
    download_file(server.url("/f"), tmp_path / "f", stop=NoWait(), progress=progress)
    assert (tmp_path / "f").read_bytes() == DATA and progress.n == len(DATA)


def test_download_survives_cuts_and_errors(server, tmp_path):
    server.bad["/f"] = ["500", "cut", "cut", "500"]
    stop = NoWait()
    progress = Progress(total=len(DATA), unit="bytes", every=1e9, file=io.StringIO())
    download_file(server.url("/f"), tmp_path / "f", stop=stop, progress=progress)
    assert (tmp_path / "f").read_bytes() == DATA and progress.n == len(DATA)
    assert stop.waits == [1, 2, 4, 8]  # backs off
    assert [r for _, r in server.requests] == [None, None, "bytes=150000-", "bytes=225000-", "bytes=225000-"]


def test_download_checks_size_and_hash(server, tmp_path):
    with pytest.raises(UserError, match="300000 bytes arrived instead of 300001"):
        download_file(server.url("/f"), tmp_path / "f", size=300_001, attempts=2, stop=NoWait())
    with pytest.raises(UserError, match="SHA-256"):
        download_file(server.url("/f"), tmp_path / "g", sha256="0" * 64, attempts=2, stop=NoWait())
    assert not (tmp_path / "f").exists() and not (tmp_path / "g").exists()


def test_download_checks_the_hash_that_a_hub_publishes_when_it_redirects(server, tmp_path):
    server.headers["/f"] = {"X-Linked-ETag": f'"{hashlib.sha256(DATA).hexdigest()}"', "X-Linked-Size": str(len(DATA))}
    server.bad["/real/f"] = ["flip"]
    stop = NoWait()
    download_file(server.url("/f"), tmp_path / "f", stop=stop)
    assert (tmp_path / "f").read_bytes() == DATA and stop.waits == [1]  # the flipped one was thrown away


def test_download_rejected_by_the_caller(server, tmp_path):
    def validate(path):
        raise UserError("not parquet")

    with pytest.raises(UserError, match="not parquet.*2 attempts.*set DATA_DIR"):
        download_file(
            server.url("/f"), tmp_path / "f", validate=validate, attempts=2, stop=NoWait(), hint="set DATA_DIR"
        )
    assert os.listdir(tmp_path) == []


def test_download_gives_up_at_once_where_trying_again_is_no_use(server, tmp_path):
    with pytest.raises(UserError, match=r"404 Not Found \(1 attempt\); use --embedded"):
        download_file(server.url("/nothing"), tmp_path / "f", hint="use --embedded")


def test_download_with_nobody_there(tmp_path):
    stop = NoWait()
    with pytest.raises(UserError, match="could not download http://127.0.0.1:9/f: .*refused.*3 attempts"):
        download_file("http://127.0.0.1:9/f", tmp_path / "f", attempts=3, stop=stop)
    assert len(stop.waits) == 2


def test_download_has_a_deadline(server, tmp_path):
    server.bad["/f"] = ["stall"] * 9
    with pytest.raises(UserError, match="not finished within 0.5 seconds"):
        download_file(server.url("/f"), tmp_path / "f", deadline=0.5, timeout=0.3, stop=NoWait())
    assert len(server.requests) < 9


def test_download_can_be_stopped(server, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(UserError, match="stopped"):
        download_file(server.url("/f"), tmp_path / "f", stop=stop)


def test_download_with_lock_downloads_once(server, base_dir):
    seen = []

    def fetch():
        download_file_with_lock(server.url("/f"), "words.txt", lambda path: seen.append(os.path.exists(path)))

    threads = [threading.Thread(target=fetch) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(server.requests) == 1 and seen == [True]
    assert (base_dir / "words.txt").read_bytes() == DATA


def test_download_with_lock_forgets_a_file_whose_postprocessing_failed(server, base_dir):
    def fail(path):
        raise UserError("bad archive")

    with pytest.raises(UserError, match="bad archive"):
        download_file_with_lock(server.url("/f"), "bundle.zip", fail)
    assert not (base_dir / "bundle.zip").exists()


@pytest.mark.parametrize("stated", [True, False])
def test_a_file_may_not_be_larger_than_its_limit(server, tmp_path, stated):
    """Whether the server says so or sends more and more."""
    server.bad["/f"] = [] if stated else ["endless"] * 20
    with pytest.raises(UserError, match="/f is larger than the 97.7 KB that it may have; the way around"):
        download_file(server.url("/f"), tmp_path / "f", limit=100_000, hint="the way around")
    assert os.listdir(tmp_path) == [] and len(server.requests) == 1
    server.bad["/f"] = []
    download_file(server.url("/f"), tmp_path / "f", limit=len(DATA))
