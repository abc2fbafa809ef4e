"""Experiments: sweeps of training runs, and what the tables and figures of `lab.reproduce` are made of.

`sweep` trains many models and `forwards` evaluates them in other forwards. `gaps` makes any table of gaps, and
`questions` what one such table does not answer. `numerics` and `speed` have the paper's tables without training runs.
"""

import nanochat_fp4  # noqa: F401  first: a package that is missing is one line (nanochat_fp4.signals)
