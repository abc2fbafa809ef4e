"""The stages of training and evaluation. Each one is a program, for example `python -m scripts.base_train`."""

import os

import nanochat_fp4  # noqa: F401  before torch: nanochat_fp4.cli.begin_program

# OpenMP threads that spin while they wait are very slow on a busy machine. libgomp reads this when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
