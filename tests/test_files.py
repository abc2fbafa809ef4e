"""Files that are whole or not there at all."""

import os
import threading

import pytest

from nanochat_fp4.files import atomic_open, atomic_write


def test_atomic_write_replaces_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "a.json"
    atomic_write(path, "old")
    atomic_write(path, b"n\xc3\xa9w")
    assert path.read_text(encoding="utf-8") == "néw"
    assert os.listdir(tmp_path) == ["a.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_atomic_open_keeps_the_old_content_on_an_exception(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(RuntimeError):
        with atomic_open(path) as f:
            f.write(b"half")
            raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["a"]


def test_a_reader_never_sees_a_part(tmp_path):
    path, size = tmp_path / "a", 200_000
    atomic_write(path, b"0" * size)
    seen, done = set(), threading.Event()

    def read():
        while not done.is_set():
            data = path.read_bytes()
            seen.add((len(data), len(set(data))))

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(60):
        atomic_write(path, bytes([48 + i % 10]) * size)
    done.set()
    thread.join()
    assert seen == {(size, 1)}
