"""Benchmarks that measure this machine: layers, training steps and memory. `python -m lab.bench` lists them."""
