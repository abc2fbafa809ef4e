"""Numbers as text, and progress on a terminal and in a log."""

import argparse
import ast
import io
import re
import threading
from pathlib import Path

import pytest

from nanochat_fp4 import console
from nanochat_fp4.console import ArgumentParser, Progress, format_bytes, format_seconds, progress_iter

ROOT = Path(__file__).resolve().parent.parent


def test_formats():
    assert [format_bytes(n) for n in (12, 1536, 5 << 20, 3 << 40)] == ["12 bytes", "1.5 KB", "5.0 MB", "3.0 TB"]
    assert [format_seconds(s) for s in (3, 75, 7500)] == ["3s", "1m15s", "2h05m"]


def test_flags_are_not_abbreviated_and_slips_are_one_line(capsys):
    parser = ArgumentParser(prog="base_train")
    parser.add_argument("--depth", type=int)
    commands = parser.add_subparsers()
    commands.add_parser("run").add_argument("--seconds", type=float)
    for argv, expected in (
        (["--dept=1"], "error: unrecognized arguments: --dept=1; did you mean --depth? (see base_train --help)"),
        (
            ["--depth", "--x"],
            "error: argument --depth: expected one argument; one that begins with a dash is given as --depth=... "
            "(see base_train --help)",
        ),
        (["--xyz"], "error: unrecognized arguments: --xyz (see base_train --help)"),
        (["--depth=x"], "error: argument --depth: invalid int value: 'x' (see base_train --help)"),
    ):
        with pytest.raises(SystemExit) as e:
            parser.parse_args(argv)
        assert e.value.code == 2 and capsys.readouterr().err == expected + "\n"
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--sec=1"])


def test_no_number_of_a_flag_is_nan():
    for folder in ("nanochat_fp4", "scripts", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"\btype=float\b", file.read_text()), f"{file.name}: parse_finite refuses NaN"


def test_no_command_abbreviates_flags():
    files = [
        f for folder in ("nanochat_fp4", "scripts", "eval", "lab", "examples") for f in (ROOT / folder).rglob("*.py")
    ]
    made = 0
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("argparse.ArgumentParser", "_Parser"):
                made += 1
                assert "allow_abbrev=False" in ast.unparse(node), f"{file.name}:{node.lineno}"
    assert made  # those that do not import console.ArgumentParser


def test_the_time_left_is_that_of_recent_steps():
    progress = Progress(total=100, desc="train", unit="step", every=1e9, file=io.StringIO())
    for seconds in (60, 1, 1):  # the first one compiles
        progress.last_update -= seconds
        progress.update()
        assert ("ETA" in progress.line()) == (progress.n == 3)
    for seconds in (1, 30, 1):  # an evaluation
        progress.last_update -= seconds
        progress.update()
    assert 94 <= progress.seconds_left() < 95
    for _ in range(50):  # it has become faster
        progress.last_update -= 0.5
        progress.update()
    assert "ETA 22s" in progress.line()
    progress.update(44)
    assert progress.seconds_left() is None and "elapsed" in progress.line()


def test_progress_in_a_log_is_plain_lines():
    out = io.StringIO()
    with Progress(total=200, desc="train", unit="step", every=0, file=out) as progress:
        progress.start -= 10  # as if ten seconds had passed
        progress.update(50, loss="2.31")
    first, last = out.getvalue().splitlines()
    assert re.fullmatch(r"train: 50/200 \(25%\) step \| [45][.\d]* step/s \| ETA 30s \| loss 2.31", first), first
    assert last.startswith("train: 50/200") and "\r" not in out.getvalue()


def test_long_work_between_two_units_says_how_far_it_is():
    out = io.StringIO()
    with Progress(every=60, file=out) as progress:
        assert list(progress.meanwhile("ab", 2, "evaluation")) == ["a", "b"] and not out.getvalue()
        progress.every = 0
        assert list(progress.meanwhile("abc", 3, "evaluation")) == ["a", "b", "c"] and progress.n == 0
    assert out.getvalue().startswith("evaluation: 0/3 batches\nevaluation: 1/3 batches\nevaluation: 2/3 batches\n")


def test_progress_is_quiet_between_lines_and_on_other_ranks(monkeypatch):
    out = io.StringIO()
    with Progress(total=1000, every=60, file=out) as progress:
        for _ in range(1000):
            progress.update()
    assert len(out.getvalue().splitlines()) == 1
    monkeypatch.setenv("RANK", "1")
    with Progress(total=3, every=0, file=out) as progress:
        progress.update(3)
        progress.write("no")
    assert len(out.getvalue().splitlines()) == 1


def test_progress_on_a_terminal_is_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    with Progress(total=4, desc="work", file=out) as progress:
        progress.update(4, loss="1.0")
        progress.write("a line")
    assert "work" in out.getvalue() and "\r" in out.getvalue() and "a line\n" in out.getvalue()


def test_progress_counts_from_several_threads():
    progress = Progress(total=8000, every=1e9, file=io.StringIO())
    threads = [threading.Thread(target=lambda: [progress.update() for _ in range(1000)]) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert progress.n == 8000


def test_progress_iter():
    out = io.StringIO()
    assert list(progress_iter([1, 2, 3], desc="x", file=out)) == [1, 2, 3]
    assert out.getvalue().startswith("x: 3/3 (100%)")


@pytest.mark.parametrize(
    "parse, good, bad",
    [
        (console.parse_finite, ["-1", "0.5"], ["nan", "inf", "x"]),
        (console.parse_rate, ["0", "2"], ["-0.1", "nan"]),
        (console.parse_share, ["0", "1"], ["1.1", "-0.1", "inf"]),
        (console.parse_beta, ["0", "0.95"], ["1", "-0.1", "x"]),
    ],
)
def test_numbers_of_flags_have_ranges(parse, good, bad):
    assert [parse(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=f"'{text}' is n"):
            parse(text)
