"""Writes the tables of README.md, docs/ and lab/results/tables.md. Below a command of lab.reproduce stands its table.

    python -m lab.pages             # makes all of these tables again from the stored runs
    python -m lab.pages --check     # changes nothing, names the pages that differ, and ends with status 2

A command is the only line of a code block, and names its runs with --results, or is one of ALONE. The table that
follows the block is the output of the command. Everything else on a page is written by hand. A part of a page can wait
for a study, as a comment "<!-- when STUDY is stored", which becomes text once the study is there.
"""

import re
import shlex
from pathlib import Path

from lab import RESULTS, ROOT, reproduce, runs
from nanochat_fp4.cli import ArgumentParser, UserError, run_main
from nanochat_fp4.common import print0
from nanochat_fp4.files import atomic_write

ALONE = "methods", "measured", "published", "hours"  # Tables whose source is always the same.
COMMAND = rf"^    python -m lab\.reproduce ((?:[^\n]*--results|(?:{'|'.join(ALONE)})\b)[^\n]*)\n\n"
COMMAND_AND_TABLE = re.compile(COMMAND + r"((?:\|[^\n]*\n)+)", re.MULTILINE)
WAITING = re.compile(r"^<!-- when (\S+) is stored\n(.*?)^-->\n", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Returns README.md, all pages of docs/, and the page of the tables that none of them has."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), RESULTS / "tables.md"]


def table(command: str) -> str:
    """Returns the Markdown table that a command line of lab.reproduce makes. Raises UserError if it cannot."""
    args = reproduce.parse_args(shlex.split(command, comments=True))
    _, outcome = reproduce.make(args, reproduce.SAME.get(args.name, args.name))
    return "\n".join(reproduce.markdown(outcome.header, *outcome.rows)) + "\n"


def filled(text: str) -> str:
    """Returns the text of a page with its tables made again, and with the parts that no longer wait for a study. Raises
    UserError, which names the command that failed."""
    stored = runs.studies()
    text = WAITING.sub(lambda match: match[2] if match[1] in stored else match[0], text)
    waiting = [match.span() for match in WAITING.finditer(text)]

    def again(match: re.Match) -> str:
        if any(begin < match.start() < end for begin, end in waiting):
            return match[0]
        try:
            return match[0].removesuffix(match[2]) + table(match[1])
        except UserError as e:
            raise UserError(f"python -m lab.reproduce {match[1]}: {e}") from None

    return COMMAND_AND_TABLE.sub(again, text)


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="Puts the tables of the stored runs into the pages")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page differs")
    args, differ = parser.parse_args(argv), []
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            tables = zip(*map(COMMAND_AND_TABLE.finditer, (text, new)))
            commands = [before[1] for before, after in tables if before[0] != after[0]]
            differ.append(f"{path.relative_to(ROOT)} ({'; '.join(commands)})")
            if not args.check:
                atomic_write(path, new)
    if differ and args.check:
        raise UserError(f"tables differ from the stored runs in {', '.join(differ)}; run python -m lab.pages")
    print0(f"changed: {', '.join(differ)}" if differ else "all tables are those of the stored runs")


if __name__ == "__main__":
    run_main(main)
