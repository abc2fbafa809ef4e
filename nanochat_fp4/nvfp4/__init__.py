"""The contribution: the NVFP4 numerics, the methods as rows of a table, and the patch layer.

format, hadamard, philox and quantizers are the reference, which reads like the paper. roundings, recipes and methods
say what a method is. gemm and layer compute it. convert patches a model. Modules of this folder import torch and
nvfp4_kernels, never a model or a script.
"""
