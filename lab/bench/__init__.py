"""Benchmarks of this machine: layers, training steps, memory. `python -m lab.bench` lists them."""
