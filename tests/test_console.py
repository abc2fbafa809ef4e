"""Flags, and numbers as text."""

import argparse
import ast
import re
import sys
from pathlib import Path

import pytest

from nanochat_fp4 import console
from nanochat_fp4.console import ArgumentParser, format_bytes, format_seconds

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


def test_a_wrong_flag_is_named_before_those_that_are_missing(capsys):
    """And --dept is not like --help or --step, only because all flags begin with dashes."""
    parser = ArgumentParser(prog="export")
    parser.add_argument("--format", required=True)
    parser.add_argument("--step")
    for argv, expected in (
        (["--dept=3"], "unrecognized arguments: --dept=3"),
        (["--fromat=x"], "unrecognized arguments: --fromat=x; did you mean --format?"),
        (["--step=3"], "the following arguments are required: --format"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(argv)
        assert capsys.readouterr().err == f"error: {expected} (see export --help)\n"


@pytest.mark.parametrize(
    "program", ["scripts.tok_train", "nanochat_fp4.data.tokenizer", "nanochat_fp4.plan", "lab.bench layers", "lab.runs"]
)
def test_an_error_names_a_command_that_can_be_typed(program, fork_server):
    module, *words = program.split()
    done = fork_server.run(module, [*(words or ["speedrun"]), "--nope"], as_main=True)
    assert done.status == 2 and done.log.endswith(f"(see python -m {program} --help)\n"), done.log


def test_a_file_that_is_run_names_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["mine/train.py"])
    with pytest.raises(SystemExit):
        ArgumentParser().parse_args(["--nope"])
    assert capsys.readouterr().err.endswith("(see python mine/train.py --help)\n")


def test_no_number_of_a_flag_is_nan():
    for folder in ("nanochat_fp4", "scripts", "eval"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"\btype=float\b", file.read_text()), f"{file.name}: parse_finite refuses NaN"


def test_no_command_abbreviates_flags():
    files = [
        f for folder in ("nanochat_fp4", "scripts", "eval", "lab", "examples") for f in (ROOT / folder).rglob("*.py")
    ]
    with_parsers = [file for file in files if "Parser" in file.read_text()]
    assert len(with_parsers) > 20
    for file in with_parsers:
        for node in ast.walk(ast.parse(file.read_text())):
            # console.ArgumentParser refuses abbreviations by itself.
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("argparse.ArgumentParser", "_Parser"):
                assert "allow_abbrev=False" in ast.unparse(node), f"{file.name}:{node.lineno}"


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
