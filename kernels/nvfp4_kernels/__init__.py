"""Triton kernels of NVFP4 training: one source for every GPU. No autograd, no modules, no policy."""
