"""The laboratory: what measures and studies the package, and the runs that its claims rest on. The wheel lacks it.

`lab.bench` times layers and training steps. `lab.study.sweep` trains many models, whose runs `lab.runs` keeps.
`lab.reproduce` makes the paper's tables and figures, and every table of a page, from the stored runs or anew.
`lab.golden` proves that a change of the code changes no result. The laboratory may import everything, and nothing
imports it. `python -m lab.reproduce list` names the tables and figures.
"""

from pathlib import Path

import nanochat_fp4  # noqa: F401  first: a package that is missing is one line (nanochat_fp4.signals)

ROOT = Path(__file__).resolve().parents[1]  # of the repository
RESULTS = ROOT / "lab/results"
