"""Predictions beside published measurements: other people's Blackwells, and the bytes that processes exchange.

`python -m lab.predict.blackwell` compares. The predictions themselves are nanochat_fp4.step_time and
nanochat_fp4.step_time. This folder may import everything but lab.study.
"""
