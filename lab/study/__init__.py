"""Experiments: sweeps of training runs, and the tables and figures that `lab.reproduce` makes of them.

`sweep` trains many models, and `forwards` evaluates them with other forward passes. `gaps` makes tables of gaps, and
`questions` makes the tables that need more than that. `numerics` and `speed` make the paper's tables that need no
training runs.
"""

import nanochat_fp4  # noqa: F401  first, so that a missing package ends in one line (nanochat_fp4.signals)
