"""Experiments: sweeps of training runs, their statistics, and the paper's tables and figures (reproduce_*.py).

`python -m lab.study.sweep` trains. `python -m lab.reproduce NAME` makes a table or figure. This folder may import
everything.
"""

import nanochat_fp4  # noqa: F401  first: a package that is missing is one line (nanochat_fp4.signals)
