"""Benchmarks, one file each; see README.md. Import from the files: `from eval.arc import ARC`."""
