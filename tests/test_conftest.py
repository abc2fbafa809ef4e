"""The poison of conftest.py is really there: a forgotten write in a kernel or a checkpoint must not look like zero."""

import os
import tempfile
from pathlib import Path

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_are_nan(dtype):
    for t in (
        torch.empty(3, 5, dtype=dtype),
        torch.empty_like(torch.zeros(4, dtype=dtype)),
        torch.zeros(2, dtype=dtype).new_empty(7),
        torch.empty_strided((2, 3), (3, 1), dtype=dtype),
    ):
        assert t.float().isnan().all()


def test_codes_are_ff_and_integers_negative():
    assert (torch.empty(9, dtype=torch.uint8) == 0xFF).all()
    assert (torch.zeros(2, dtype=torch.uint8).new_empty(3) == 0xFF).all()
    assert (torch.empty(9, dtype=torch.int64) == -1).all()


def test_empty_still_returns_what_was_asked_for():
    t = torch.empty(2, 3, device="meta", dtype=torch.bfloat16)
    assert t.shape == (2, 3) and t.dtype == torch.bfloat16 and t.is_meta
    assert torch.empty(0).shape == (0,)
    assert torch.empty(2, requires_grad=True).requires_grad


def test_no_test_touches_the_home_directory():
    base = Path(os.environ["NANOCHAT_BASE_DIR"]).resolve()
    assert base.is_dir() and base.parent == Path(tempfile.gettempdir()).resolve()
    assert base.name.startswith("nanochat_fp4_tests_")
