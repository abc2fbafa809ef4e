"""Random numbers: Philox's published vectors, Triton's implementation, and how words become uniforms and signs."""

import _scalar_reference as scalar
import pytest
import torch

from nanochat_fp4.nvfp4 import philox as px

CPU = torch.device("cpu")
# Known answers of Philox4x32-10 from Random123's kat_vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(w, 16) for w in text.split()]


def signed(value: int) -> int:
    """64 bits as the int64 that holds them."""
    return value - 2**64 if value >= 2**63 else value


@pytest.mark.parametrize("counter, key, result", KNOWN)
def test_published_vectors(counter, key, result):
    c, k, want = words(counter), words(key), words(result)
    index = torch.tensor([signed(c[0] | c[1] << 32)])
    got = px.philox(signed(k[0] | k[1] << 32), index, purpose=c[2], stream=c[3])
    assert [int(w) for w in got] == want
    assert list(scalar.philox(tuple(c), tuple(k))) == want  # the tests' own implementation, used below


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF])
def test_any_seed_index_purpose_and_stream(seed):
    index = torch.tensor([[0, 1, 2**31], [2**32 - 1, 2**32, 2**45 + 12345]])
    for purpose, stream in ((0, 0), (7, 5)):
        got = torch.stack(px.philox(seed, index, purpose, stream), dim=-1)
        want = [[list(scalar.draw(seed, int(i), purpose, stream)) for i in row] for row in index]
        assert got.tolist() == want
        for same in (torch.tensor(seed), torch.tensor([seed]), seed % 2**64):
            assert torch.equal(torch.stack(px.philox(same, index, purpose, stream), dim=-1), got)


def test_elements_take_16_bits_each_low_half_first():
    got = px.Noise(42, 3).elements(2, 3, 8, candidate=1, device=CPU)
    assert got.tolist() == [float(scalar.element_uniform(42, e, 3, 1)) for e in range(16, 40)]
    assert 0 < got.min() and got.max() < 1


def test_scales_take_the_upper_24_bits():
    got = px.Noise(42, 3).scales(21, 6, CPU)  # rows that are no multiple of the 16 of a call's words
    assert got.tolist() == [[float(scalar.scale_uniform(42, r, b, 6, 3)) for b in range(6)] for r in range(21)]


def test_signs_are_the_bits_of_one_call():
    first = scalar.draw(42, 0, 0, 3)
    want = [-1.0 if first[j // 32] >> (j % 32) & 1 else 1.0 for j in range(128)]
    assert px.random_signs(42, 128, 3, CPU).tolist() == want
    assert px.random_signs(42, 16, 3, CPU).tolist() == want[:16]


def test_a_part_of_the_sequence_is_that_part():
    """What makes results independent of how a tensor is cut into blocks."""
    whole = px.Noise(9).elements(0, 4, 1024, 0, CPU)
    parts = [px.Noise(9).elements(row, 1, 1024, 0, CPU) for row in range(4)]
    assert torch.equal(torch.cat(parts), whole)
