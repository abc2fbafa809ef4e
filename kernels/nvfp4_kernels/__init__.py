"""Triton kernels for NVFP4 training. One source serves every GPU.

The package has no autograd functions and no modules, and it does not decide which kernel a machine uses:
nanochat_fp4.nvfp4.dispatch does.
"""
