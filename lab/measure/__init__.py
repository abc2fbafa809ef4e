"""Benchmarks: time, memory and traffic on this machine, and comparisons with checkouts of other projects.

Each bench_*.py is a command: `python -m lab.measure.bench_linear`. bench_common, bench_step and bench_results serve the
others. This folder may import everything but lab.study.
"""
