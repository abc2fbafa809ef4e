"""Predictions beside measured and published times, and the bytes that processes exchange.

`python -m lab.predict.blackwell` compares with others' GPUs, `python -m lab.predict.measured` with our benchmarks. The
predictions themselves are lab.predict.step_time. Of lab.study this folder takes the statistics, and the flags of runs.
"""
