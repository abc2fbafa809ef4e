"""Whoever has a lock keeps others out, and nobody waits for one that cannot be made. test_run_folder has held_run."""

import threading
from pathlib import Path

import pytest

from nanochat_fp4.cli import UserError
from nanochat_fp4.data.dataset import build_embedded_corpus, data_lock, download_shards, ensure_data
from nanochat_fp4.data.sources import download_file_with_lock, within
from nanochat_fp4.data.tokenizer import tokenizer_lock
from nanochat_fp4.export.save import new_export
from nanochat_fp4.locks import held_run, locked

DEADLINE = 60.0  # seconds, which nothing here comes near


def enter(context) -> None:
    with context:
        pass


USES = {
    "a run": lambda base: enter(held_run(base / "base_checkpoints" / "a")),
    "an export": lambda base: enter(new_export(base / "out")),
    "data": lambda base: enter(data_lock()),
    "the tokenizer": lambda base: enter(tokenizer_lock()),
    "a download": lambda base: download_file_with_lock("http://127.0.0.1:9/", "words.txt"),
    "the embedded corpus": lambda base: build_embedded_corpus(),
    "shards": lambda base: download_shards(1),
    "the choice of a text": lambda base: ensure_data(),
    "own text": lambda base: ensure_data(str(Path(__file__).parent.parent / "README.md")),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", ["/proc", "/proc/none", "/dev/null/more"])
def test_a_place_where_no_file_can_be_made_is_refused_at_once(monkeypatch, use, place):
    """There is no lock, so nobody has it."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", place)
    with pytest.raises((UserError, ValueError), match="NANOCHAT_BASE_DIR") as e:
        within(DEADLINE, lambda: USES[use](Path(place)))
    assert place.rpartition("/")[0] in str(e.value) and "\n" not in str(e.value)


def test_a_folder_outside_of_the_base_directory_is_not_called_so():
    with pytest.raises(ValueError, match="writable") as e:
        enter(new_export(Path("/proc/out")))
    assert "NANOCHAT_BASE_DIR" not in str(e.value)


def test_one_after_the_other(tmp_path):
    """In a folder that the first one makes. After a time that may be given, a wait ends with what the caller says."""
    file, order = tmp_path / "new" / "a.lock", []
    with locked(file):
        with pytest.raises(ValueError, match="busy"):
            within(DEADLINE, lambda: enter(locked(file, "busy", 0.01)))

        def late() -> None:
            with locked(file):
                order.append("late")

        thread = threading.Thread(target=late, daemon=True)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(DEADLINE)
    assert order == ["first", "late"]
