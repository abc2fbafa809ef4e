"""Progress on a terminal and in a log."""

import io
import re
import sys

import pytest

from nanochat_fp4.progress import Progress


def test_a_log_has_plain_lines(capsys):
    with Progress(total=200, desc="train", unit="step", every=0) as progress:
        progress.update(50, loss="2.31")
        progress.write("step 50 | from here on bf16")
    err = capsys.readouterr().err
    first, said = err.splitlines()
    assert re.fullmatch(r"train: 50/200 \(25%\) step \| +\S+ step/s \| 00:00<.*, loss=2.31", first), first
    assert said == "step 50 | from here on bf16" and "\r" not in err


def test_short_work_leaves_one_line_and_other_ranks_none(capsys, monkeypatch):
    with Progress(desc="read", unit="char", every=60) as progress:
        for _ in range(1000):
            progress.update(20)
    progress.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("read: 20.0k char |")
    monkeypatch.setenv("RANK", "1")
    with Progress(total=3, every=0) as progress:
        progress.update(3)
        progress.write("no")
    assert capsys.readouterr().err == ""


def test_long_work_between_two_units_says_how_far_it_is(capsys):
    progress = Progress(every=60)
    assert list(progress.meanwhile("ab", 2, "evaluation")) == ["a", "b"] and not capsys.readouterr().err
    progress.every = 0
    assert list(progress.meanwhile("abc", 3, "evaluation")) == ["a", "b", "c"]
    assert capsys.readouterr().err == "".join(f"evaluation: {i}/3 batches\n" for i in range(3))


@pytest.mark.parametrize("broken", [False, True])
def test_a_terminal_has_a_bar_which_may_break(monkeypatch, broken):
    monkeypatch.setattr(sys, "stderr", err := io.StringIO())

    def write(text):
        raise OSError("closed")

    err.isatty = lambda: True
    with Progress(total=4, desc="work") as progress:
        if broken:
            err.write = write
        progress.update(4, loss="1.0")
        progress.write("a line")
    assert broken or ("work" in err.getvalue() and "\r" in err.getvalue() and "a line\n" in err.getvalue())


def test_the_last_line_comes_before_the_result_and_no_line_says_nothing(capsys):
    """A total that is not known, or that was too low, is no "?" with 0% and 00:00."""
    with Progress(total=2, desc="train", unit="step", every=60) as progress:
        progress.update()
        progress.update()
        progress.write("the result")
    with Progress(total=2, desc="text", unit="char", every=0) as progress:
        progress.update(3)
    with Progress(total=5, desc="nothing"):
        pass
    line, result, beyond = capsys.readouterr().err.splitlines()
    assert line.startswith("train: 2/2 (100%)") and result == "the result"
    assert beyond.startswith("text: 3") and "?" not in beyond.split("|")[0] and "%" not in beyond


def test_an_iterable_has_its_length(capsys):
    assert list(Progress([1, 2, 3], desc="x")) == [1, 2, 3]
    assert capsys.readouterr().err.startswith("x: 3/3 (100%)")
