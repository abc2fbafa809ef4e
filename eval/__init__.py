"""Benchmarks, one in each file (README.md). Classes are imported from the files: `from eval.arc import ARC`."""

import nanochat_fp4  # noqa: F401  first, so that a missing package ends in one line (nanochat_fp4.cli)
