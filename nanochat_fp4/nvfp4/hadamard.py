"""The randomized Hadamard transform (RHT): y = H diag(signs) x / sqrt(d), on groups of d along the last dimension.

H is Sylvester's matrix of order d: H[i, j] = (-1)^popcount(i & j). The transform is orthonormal. If both operands of a
GEMM are rotated with the same signs along the contraction dimension, their product stays the same, so that no inverse
is needed. All groups of a tensor use the same signs (the paper, Appendix A, point 2), so the transform is one small
GEMM.
"""

import torch

from nanochat_fp4.nvfp4.philox import random_signs

RHT_DIM = 128  # Source: the paper, Section 3.3 and Appendix A. A power of two, at most 128 (one Philox call of signs).


def rotation_matrix(seed: torch.Tensor | int, *, dim: int = RHT_DIM, stream: int = 0, device="cpu") -> torch.Tensor:
    """Returns diag(signs) H, float32 (dim, dim), with entries +1 and -1. For each group, rotate(x) is
    x @ rotation_matrix / sqrt(dim).

    The signs are random_signs of seed and stream.
    """
    signs = random_signs(seed, dim, stream, torch.device(device))
    # The matrix is not cached, because one that is made inside FakeTensorMode would break all later calls outside.
    h = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while h.shape[0] < dim:
        h = torch.cat((torch.cat((h, h), dim=1), torch.cat((h, -h), dim=1)))
    return signs.unsqueeze(1) * h.to(device)


def rotate(x: torch.Tensor, seed: torch.Tensor | int, *, dim: int = RHT_DIM, stream: int = 0) -> torch.Tensor:
    """Returns the RHT of x (..., K) in groups of dim along the last dimension, float32 (..., K).

    seed is an int or an int64 tensor (). The rotation is orthogonal, so the product of two tensors that are rotated
    with the same seed stays the same. `quantize(x, "ms_eden", seed)` quantizes rotate(x, seed). Raises ValueError if K
    is not a multiple of dim.

    >>> a, b = torch.randn(3, 256), torch.randn(5, 256)
    >>> torch.allclose(nf.rotate(a, 1) @ nf.rotate(b, 1).T, a @ b.T, atol=1e-4)
    True
    """
    return rotated_sums(x, seed, dim=dim, stream=stream) * dim**-0.5


def rotated_sums(x: torch.Tensor, seed: torch.Tensor | int, *, dim: int = RHT_DIM, stream: int = 0) -> torch.Tensor:
    """Computes `rotate` without its factor 1/sqrt(dim), which quantization applies once a block instead."""
    if x.shape[-1] % dim:
        raise ValueError(
            f"rotate: the last dimension is {x.shape[-1]}, expected a multiple of {dim}; pad it with zeros"
        )
    groups = x.to(torch.float32).unflatten(-1, (-1, dim))  # The matrix has entries +-1, so only the sums are rounded.
    with torch.autocast(x.device.type, enabled=False):  # Autocast would compute the product in BF16.
        return (groups @ rotation_matrix(seed, dim=dim, stream=stream, device=x.device)).flatten(-2)
