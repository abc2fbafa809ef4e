"""Evaluation of models: bits per byte, the CORE metric, the sandbox for code that a model wrote, and the report of a
run.

execution runs such code in separate processes, and the folder sandbox has the code that runs in these processes.
Modules of this folder may import generation, models, data, nvfp4 and the flat modules of nanochat_fp4.
"""
