"""What the kernels refuse: (call, a word of the message)."""

import pytest
import torch

pytest.importorskip("triton")

from nvfp4_kernels.accumulate import round_into
from nvfp4_kernels.decode import decode
from nvfp4_kernels.quantize import quantize
from nvfp4_kernels.relu_squared import relu_squared
from nvfp4_kernels.rotate import RotatedOperand, rotate_quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BF16, U8, F8 = torch.bfloat16, torch.uint8, torch.float8_e4m3fn
SEED = torch.tensor(1, device=DEVICE)
ROW, COL = (RotatedOperand(stochastic=True, rht_dim=dim) for dim in (16, 0))


def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, device=DEVICE).to(dtype)


def quantized(x: torch.Tensor, block_rows: int = 1, per_token: bool = False):
    return lambda: quantize(x, None, None, 0, 6.0, 448.0, [1.0], False, block_rows, True, per_token)


REFUSED = [
    (quantized(of(4, 24)), "expected FP32 or BF16"),
    (quantized(of(4, 32, dtype=torch.half)), "expected FP32 or BF16"),
    (quantized(of(32)), "expected FP32 or BF16"),
    (quantized(of(4, 32), block_rows=4), "block_rows is 4"),
    (quantized(of(32, 32), block_rows=16, per_token=True), "blocks of 16 rows"),
    # A slice's neighbours were taken for its codes.
    (lambda: decode(of(32, 64, dtype=U8)[:, :32], of(32, 4, dtype=F8)), "contiguous"),
    (lambda: decode(of(32, 32, dtype=U8), of(32, 8, dtype=F8)[:, :4]), "contiguous"),
    (lambda: rotate_quantize(of(16, 32), None, None, None, None, None, COL, SEED, SEED), "col operand"),
    (lambda: rotate_quantize(of(16, 16, dtype=U8), of(16, 2, dtype=F8), of(), ROW, SEED, SEED, None, None, None),
     "as col only"),
    (lambda: relu_squared(of(3), SEED), "expected FP32 or BF16"),
    (lambda: relu_squared(of(2, 2, dtype=torch.float64), SEED), "expected FP32 or BF16"),
    (lambda: round_into(of(4, 8), of(4, 8, dtype=BF16), SEED, SEED, 0, False), "expected BF16"),
    (lambda: round_into(of(4, 8, dtype=BF16)[:, :4], of(4, 4, dtype=BF16), SEED, SEED, 0, False), "contiguous"),
]  # fmt: skip


@pytest.mark.parametrize("call, word", REFUSED)
def test_refused(call, word):
    with pytest.raises(ValueError, match=word):
        call()
