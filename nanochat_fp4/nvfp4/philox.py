"""Counter-based random numbers: Philox4x32-10 (Salmon et al., 2011), with the bits that Triton's `tl.philox` computes.

A random number is a function of seed, purpose, stream and index, and of nothing else. The same seed therefore gives the
same codes in the PyTorch reference and in the kernels, with any block size of a kernel, and after a resume. Every
element and every scale has an index of its own, so rows share no noise.

    counter = (index mod 2^32, index div 2^32, purpose, stream)        key = (low, high 32 bits of seed)
"""

from typing import NamedTuple

import torch

MASK = 0xFFFFFFFF
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
ROUNDS = 10

# The purposes of random numbers, which are the third word of the counter. Candidate c of a stochastic search draws with
# the purpose SR_ELEMENT + c.
SIGN, SCALE, SR_ELEMENT = 0, 1, 2


def philox(
    seed: torch.Tensor | int, index: torch.Tensor, purpose: int, stream: torch.Tensor | int = 0
) -> tuple[torch.Tensor, ...]:
    """Returns four random 32-bit words for each index, as four int64 tensors with values in [0, 2^32).

    index: int64, of any shape, which is also the shape of the results
    seed:  a Python int of 64 bits, signed or unsigned (torch.initial_seed() is unsigned), or an int64 tensor that is
           a scalar or has index's shape
    stream: an int of 32 bits, or an int64 tensor ()
    """
    if isinstance(seed, int) and seed >= 2**63:
        seed -= 2**64
    seed = torch.as_tensor(seed, dtype=torch.int64, device=index.device)
    k0, k1 = seed & MASK, (seed >> 32) & MASK
    c0, c1 = index & MASK, (index >> 32) & MASK
    c2, c3 = torch.full_like(index, purpose), torch.zeros_like(index) + stream
    for _ in range(ROUNDS):
        # Products in int64 wrap around, and their 64 bits are those of the unsigned product.
        high, low = c2 * ROUND_B, c0 * ROUND_A
        c0, c1 = ((high >> 32) & MASK) ^ c1 ^ k0, high & MASK
        c2, c3 = ((low >> 32) & MASK) ^ c3 ^ k1, low & MASK
        k0, k1 = (k0 + KEY_A) & MASK, (k1 + KEY_B) & MASK
    return c0, c1, c2, c3


class Noise(NamedTuple):
    """The random numbers of an operand (R, C), determined by a seed, an int or an int64 tensor (), and a stream."""

    seed: torch.Tensor | int
    stream: int = 0

    def elements(self, row: int, rows: int, columns: int, candidate: int, device: torch.device) -> torch.Tensor:
        """Returns uniforms in (0, 1) for the stochastic rounding of the elements of the rows row to row + rows, float32
        (rows * columns,). candidate is the number of the candidate scale that the elements are rounded with.

        The number of columns must be a multiple of 8, because one call of Philox makes eight uniforms, low halves of
        the words first. A uniform is (k + 1/2) / 2^16 for 16 random bits k. Rounding probabilities are therefore exact
        to 2^-17. No average over a feasible number of draws can see the difference.
        """
        calls = torch.arange(row * columns // 8, (row + rows) * columns // 8, device=device, dtype=torch.int64)
        words = torch.stack(philox(self.seed, calls, SR_ELEMENT + candidate, self.stream), dim=-1)
        halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
        return (halves.flatten().to(torch.float32) + 0.5) * 2.0**-16

    def scales(self, rows: int, blocks: int, device: torch.device) -> torch.Tensor:
        """Returns uniforms in [0, 1) of 24 bits for the stochastic rounding of the operand's scales, float32 (rows,
        blocks). The number of blocks must be even.

        One call makes four uniforms: for two neighbouring blocks in each of two rows that are 8 apart. In a kernel, one
        thread holds these four values of a tensor core's result, so that no thread draws numbers that another one
        needs.
        """
        calls = torch.arange(-(-rows // 16) * 8 * (blocks // 2), device=device, dtype=torch.int64)
        words = torch.stack(philox(self.seed, calls, SCALE, self.stream), dim=-1)
        words = words.view(-1, 8, blocks // 2, 2, 2).permute(0, 3, 1, 2, 4).reshape(-1, blocks)[:rows]
        return (words >> 8).to(torch.float32) * 2.0**-24


def random_signs(seed: torch.Tensor | int, count: int, stream: int, device: torch.device) -> torch.Tensor:
    """Returns random signs +1 and -1, float32 (count,), for a count of at most 128.

    One call of Philox makes all signs. Sign j is -1 if bit j % 32 of word j // 32 is set.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    words = torch.stack(philox(seed, index, SIGN, stream)).view(4)
    j = torch.arange(count, device=device)
    bits = (words[j // 32] >> (j % 32)) & 1
    return 1.0 - 2.0 * bits.to(torch.float32)


def new_seed(device: torch.device) -> torch.Tensor:
    """Returns 64 random bits from torch's generator of the device, int64 (). The call does not synchronize with the
    host, and each replay of a CUDA graph draws new bits."""
    return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
