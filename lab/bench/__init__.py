"""Benchmarks of this machine: layers, training steps, memory. `python -m lab.bench` lists them."""

import nanochat_fp4  # noqa: F401  first: a package that is missing is one line (nanochat_fp4.signals)
