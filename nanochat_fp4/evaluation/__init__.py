"""What a model is worth: bits per byte, the CORE metric, the sandbox for code that a model wrote, and the report.

execution runs such code in processes of its own; the folder sandbox holds these processes' side. Modules of this folder
may import generation, models, data, nvfp4 and the flat modules of nanochat_fp4.
"""
