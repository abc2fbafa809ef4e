"""The tables of pages: each is what the command above it prints from the stored runs."""

import pytest

from lab import pages
from nanochat_fp4.cli import UserError
from nanochat_fp4.nvfp4 import methods

PAGE = """A question, and its answer.

    python -m lab.reproduce losses --results d6_mixed --columns "method | seed 21: own; BF16" --rows "bf16 | clover"

| old | table |
|---|---|
| 1 | 2 |

Text of a hand.

    python -m lab.reproduce table1

| of a hand |
|---|
"""


def test_a_table_below_a_command_is_made_again_and_nothing_else():
    page = PAGE.replace("seed 21: own; BF16", "seed 21, own")
    with pytest.raises(UserError, match="--columns: .*'seed 21, own'"):
        pages.filled(page)
    page = PAGE.replace('"method | seed 21: own; BF16"', "method")
    before, _, after = page.partition("| old | table |\n|---|---|\n| 1 | 2 |\n")
    assert pages.filled(page) == before + "| method |\n|---|\n| bf16 |\n| clover |\n" + after


def test_a_command_that_does_not_work_is_named():
    page = PAGE.replace("d6_mixed", "d5").replace("losses", "gaps")
    with pytest.raises(UserError, match="--results d5 .*'d5'"):
        pages.filled(page)
    with pytest.raises(UserError, match="--rows: no row of the table has 'clovr'"):
        pages.table("gaps --results d6_mixed --rows clovr")


@pytest.mark.parametrize("path", pages.pages(), ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_stored_runs(path):
    text = path.read_text(encoding="utf-8")
    assert pages.filled(text) == text, "run python -m lab.pages"


def test_tables_of_stored_runs_need_none_of_their_methods(monkeypatch):
    """A row may change or leave, and its stored runs stay."""
    commands = "extra_steps --results d6_longer", "equal_time --results d6_mixed", "methods --results d6_mixed"
    before = [pages.table(command) for command in commands]
    monkeypatch.setattr(methods, "METHODS", {})
    monkeypatch.setattr(methods, "REGISTERED", {})
    assert [pages.table(command) for command in commands] == before
