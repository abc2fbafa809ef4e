"""The randomized Hadamard transform (RHT): y = H diag(signs) x / sqrt(d), on groups of d along the last dimension.

H is Sylvester's matrix of order d: H[i, j] = (-1)^popcount(i & j). The transform is orthonormal. Two operands rotated
with the same signs along the contraction dimension of a GEMM leave the result unchanged, so no inverse is needed. Every
group of a tensor uses the same signs (the paper, Appendix A, point 2), so the transform is one small GEMM.
"""

import torch

from nanochat_fp4.nvfp4.philox import random_signs

RHT_DIM = 128  # Source: the paper, Section 3.3 and Appendix A. A power of two, at most 128 (one Philox call of signs).


def _sylvester(dim: int) -> torch.Tensor:
    """Sylvester's symmetric matrix of +-1, float32 (dim, dim)."""
    h = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while h.shape[0] < dim:
        h = torch.cat((torch.cat((h, h), dim=1), torch.cat((h, -h), dim=1)))
    return h


def rotation_matrix(
    seed: torch.Tensor | int, *, dim: int = RHT_DIM, stream: int = 0, vector: int = 0, device="cpu"
) -> torch.Tensor:
    """diag(signs) H, entries +-1, float32 (dim, dim): rotate(x) = x @ rotation_matrix / sqrt(dim) on each group.

    vector: of random_signs.
    """
    signs = random_signs(seed, dim, stream, torch.device(device), vector)
    # Not cached: a matrix made inside FakeTensorMode would break all later calls outside.
    return signs.unsqueeze(1) * _sylvester(dim).to(device)


def rotate(x: torch.Tensor, seed: torch.Tensor | int, *, dim: int = RHT_DIM, stream: int = 0) -> torch.Tensor:
    """The RHT of x (..., K), K % dim == 0, in FP32; seed is an int or an int64 tensor ().

    `quantize(x, "ms_eden", seed)` quantizes rotate(x, seed). Raises ValueError if K is not a multiple of dim. The
    rotation is orthogonal, so products of two tensors that are rotated with one seed stay what they were.

    >>> a, b = torch.randn(3, 256), torch.randn(5, 256)
    >>> torch.allclose(nf.rotate(a, 1) @ nf.rotate(b, 1).T, a @ b.T, atol=1e-4)
    True
    """
    return rotated_sums(x, seed, dim=dim, stream=stream) * dim**-0.5


def rotated_sums(
    x: torch.Tensor, seed: torch.Tensor | int, *, dim: int = RHT_DIM, stream: int = 0, rotations: int = 1
) -> torch.Tensor:
    """`rotate` without its factor 1/sqrt(dim), which quantization applies once a block; once for each rotation.

    rotations: 2 for a second RHT of the result, with signs of its own. One RHT takes a group with a single large value
    to numbers of one magnitude, two do not (arXiv 2605.06014). What the second one reads is rounded to BF16, as tensor
    cores take it. That error is 2^-9 of a value at most; those of 4 bits are 50 times larger.
    """
    if x.shape[-1] % dim:
        raise ValueError(
            f"rotate: the last dimension is {x.shape[-1]}, expected a multiple of {dim}; pad it with zeros"
        )
    groups = x.to(torch.float32).unflatten(-1, (-1, dim))  # signs and H are +-1, so only the sum rounds
    with torch.autocast(x.device.type, enabled=False):  # autocast would make this a BF16 product
        for vector in range(rotations):
            groups = groups.to(torch.bfloat16).float() if vector else groups
            groups = groups @ rotation_matrix(seed, dim=dim, stream=stream, vector=vector, device=x.device)
        return groups.flatten(-2)
