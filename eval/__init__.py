"""Benchmarks, one file each; see README.md. Import from the files: `from eval.arc import ARC`."""

import nanochat_fp4  # noqa: F401  first: a package that is missing is one line (nanochat_fp4.signals)
