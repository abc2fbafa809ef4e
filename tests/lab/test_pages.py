"""The tables of pages: each is what the command above it prints from the stored runs."""

import json
import shlex
import shutil

import pytest

from lab import pages, reproduce, runs
from nanochat_fp4.cli import UserError
from nanochat_fp4.nvfp4 import methods

PAGE = """A question, and its answer.

    python -m lab.reproduce losses --results d6_mixed --columns "method | seed 21: own; BF16" --rows "bf16 | clover"

| old | table |
|---|---|
| 1 | 2 |

Text of a hand.

    python -m lab.reproduce methodical

| of a hand |
|---|

    python -m lab.reproduce table1

| of a hand |
|---|
"""


WAITS = """<!-- when d6_fp8_forward is stored
    python -m lab.reproduce horizon --results d6_fp8_forward --columns "method | bytes kept | own: share"

|-|

    python -m lab.reproduce fp8_forward --results d6_fp8_forward

|-|
-->
"""


def test_a_table_below_a_command_is_made_again_and_nothing_else():
    page = PAGE.replace("seed 21: own; BF16", "seed 21, own")
    with pytest.raises(UserError, match="--columns: .*'seed 21, own'"):
        pages.filled(page)
    page = PAGE.replace('"method | seed 21: own; BF16"', "method")
    before, _, after = page.partition("| old | table |\n|---|---|\n| 1 | 2 |\n")
    assert pages.filled(page) == before + "| method |\n|---|\n| bf16 |\n| clover |\n" + after


def test_a_command_whose_source_is_always_the_same_names_no_study(monkeypatch):
    monkeypatch.setattr(pages, "table", lambda command: f"| {command} |\n")
    assert pages.filled("    python -m lab.reproduce hours --rows d12\n\n|-|\n").endswith("| hours --rows d12 |\n")
    page = "    python -m lab.reproduce methods\n\n|-|\n"
    assert pages.filled(page) == page.replace("|-|", "| methods |")


def test_a_command_that_does_not_work_is_named():
    page = PAGE.replace("d6_mixed", "d5")
    with pytest.raises(UserError, match="--results d5 .*'d5'"):
        pages.filled(page)
    with pytest.raises(UserError, match="--rows: no row of the table has 'clovr'"):
        pages.table("gaps --results d6_mixed --rows clovr")


def test_no_section_on_the_paper_says_more_than_its_commands():
    """Where they leave a claim of the paper undecided, the text beside the table says so."""
    sections = (pages.ROOT / "docs" / "paper.md").read_text(encoding="utf-8").split("\n## ")
    silent, undecided = [], 0
    for section in sections:
        notes = []
        for match in pages.COMMAND_AND_TABLE.finditer(section):
            args = reproduce.parse_args(shlex.split(match[1]))
            notes += reproduce.make(args, args.name)[1].notes
        if any("undecided" in note for note in notes):
            undecided += 1
            silent += [section.partition("\n")[0]] * ("undecided" not in pages.COMMAND_AND_TABLE.sub("", section))
    assert undecided >= 3 and not silent


def test_a_part_waits_for_its_study(monkeypatch):
    """It is neither shown nor made before, and is text with its tables afterwards."""
    page = f"Before.\n{WAITS}After.\n"
    monkeypatch.setattr(runs, "studies", list)
    assert pages.filled(page) == page
    monkeypatch.setattr(runs, "studies", lambda: ["d6_fp8_forward"])
    monkeypatch.setattr(pages, "table", lambda command: f"| {command.split()[0]} |\n")
    begin, *middle, end = WAITS.split("|-|\n")
    shown = begin.partition("\n")[2] + "| horizon |\n" + middle[0] + "| fp8_forward |\n" + end.removesuffix("-->\n")
    assert pages.filled(page) == f"Before.\n{shown}After.\n"


def test_the_parts_that_wait_become_pages(tmp_path, monkeypatch):
    """With runs of the study in the form of a sweep's file, `lab.runs add` and then `lab.pages` make its tables."""
    kept = runs.stored("d6_mixed")
    flags = [flag for flag in kept["results"][0]["flags"] if not flag.startswith(("--method", "--seed", "--data-seed"))]
    gaps = {"bf16": 0, "clover": 16, "clover_fp8_forward": 5, "clover_fp8_forward_4bit": 5, "fp8": 2}
    gaps |= {"clover_fp8_forward_dgrad": 3, "clover_fp8_forward_wgrad": 4}
    one = kept["results"][0] | {"head": "bf16", "val_text": "88339d463cdd65de", "loss_curve": []}
    results = []
    for i, (method, gap) in enumerate(gaps.items()):
        for seed in (41, 42, 43):
            bpb = 1.1 + seed / 1000 + gap / 900 + (i * seed % 5) / 9000 * (gap > 0)
            run = {"method": method, "seed": seed, "val_bpb": bpb, "val_bpb_bf16": bpb, "curve": []}
            results.append(one | run | {"flags": [*flags, f"--method={method}", f"--seed={seed}"]})
    path = tmp_path / "d6_fp8_forward.json"
    environment = kept["environment"] | {"commit": "80c3621"}
    path.write_text(json.dumps({"data": kept["data"], "environment": environment, "results": results}))
    for name in ("RUNS", "CURVES"):
        shutil.copy(getattr(runs, name), tmp_path)
        monkeypatch.setattr(runs, name, tmp_path / getattr(runs, name).name)
    runs.add([str(path)])
    for part in [WAITS, *(match[0] for page in pages.pages() for match in pages.WAITING.finditer(page.read_text()))]:
        made = pages.filled(part)
        assert made == pages.filled(made) and "<!--" not in made
        assert "| clover_fp8_forward_4bit | 0.5625 |" in made and "| clover_fp8_forward_wgrad | 1 |" in made
        assert "| share of clover_fp8_forward | own | 0.3" in made and "in wgrad, % | BF16 | -" in made


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
