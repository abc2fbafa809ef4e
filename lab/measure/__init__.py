"""Benchmarks: time, memory and traffic on this machine, and comparisons with checkouts of other projects.

Each module is a command, `python -m lab.measure.bench_linear`, but two: bench_common is the harness of the benchmarks,
bench_step the training step that bench_train times. This folder may import everything but lab.study.
"""
