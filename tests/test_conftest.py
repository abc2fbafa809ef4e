"""The poison of conftest.py is really there: a forgotten write in a kernel or a checkpoint must not look like zero.
And no test changes what those after it run under."""

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


def test_a_test_that_changes_the_environment_fails(run_ranks, tmp_path):
    (tmp_path / "test_probe.py").write_text(
        "import os\n"
        "def test_sets(): os.environ.update(QAT_METHOD='clover', NVFP4_COMPILE='0')\n"
        "def test_unsets(): del os.environ['NVFP4_COMPILE']\n"
        "def test_has_what_was(): assert os.environ['NVFP4_COMPILE'] == '1' and 'QAT_METHOD' not in os.environ\n"
        "def test_undoes(monkeypatch): monkeypatch.setenv('QAT_METHOD', 'clover')\n"
    )
    options = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-p", "conftest"]
    (out,) = run_ranks(f"import pytest; pytest.main({[*options, str(tmp_path)]!r})", ranks=1)
    assert "changed: NVFP4_COMPILE (was 1, is 0), QAT_METHOD (was not set, is clover); use monkeypatch.setenv" in out
    assert "changed: NVFP4_COMPILE (was 1, is not set); use" in out
    assert "4 passed, 2 errors" in out
