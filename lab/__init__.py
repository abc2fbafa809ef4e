"""The laboratory: programs that measure and study the package, and the runs on which its claims rest. The wheel does
not contain it.

`lab.bench` times layers and training steps. `lab.study.sweep` trains many models, and `lab.runs` stores their runs.
`lab.reproduce` makes the paper's tables and figures, and every table of a page, from the stored runs or from new ones.
`python -m lab.reproduce list` names them. The laboratory may import everything, and nothing outside of it imports it.
"""

from pathlib import Path

import nanochat_fp4  # noqa: F401  first, so that a missing package ends in one line (nanochat_fp4.cli)

ROOT = Path(__file__).resolve().parents[1]  # The root of the repository.
RESULTS = ROOT / "lab/results"


def table(header: list[str], rows: list[list[object]]) -> str:
    """Returns the lines of a table with aligned columns, in which numbers are on the right."""
    cells = [header, *[[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    numeric = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]

    def line(row: list[str]) -> str:
        return "  ".join(v.rjust(w) if n else v.ljust(w) for v, w, n in zip(row, widths, numeric)).rstrip()

    return "\n".join([line(cells[0]), "  ".join("-" * w for w in widths), *map(line, cells[1:])])
