"""compare_quartet2.py, with a made-up checkout in the place of the published one: loading, checking, messages."""

import sys
import time
from pathlib import Path

import pytest
import torch

from lab.measure import bench_common as common
from lab.measure import bench_linear, compare_quartet2
from nanochat_fp4 import step_time
from nanochat_fp4.errors import UserError

# As the published module is, seen from outside: absolute imports, scipy, a linear with these options.
SCHEME = """
import torch
from scipy.linalg import hadamard
from models.quantization.quantizers.helper import FACTOR

class Quartet_II_Linear(torch.nn.Linear):
    def __init__(self, *args, hadamard_dim, delayed_amax, four_over_six, **kwargs):
        super().__init__(*args, **kwargs)
        assert hadamard(hadamard_dim).shape == (128, 128) and four_over_six
        self.delayed_amax = delayed_amax

    def forward(self, x):
        assert x.dim() == 3
        return torch.nn.functional.linear(x, self.weight) * (FACTOR if self.delayed_amax else 1)
"""


@pytest.fixture
def script():
    before = set(sys.modules)
    yield compare_quartet2
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("models", "scipy"):
            del sys.modules[name]


def checkout(folder: Path, scheme: str = SCHEME, factor: float = 1.0) -> Path:
    package = folder / "src" / "models" / "quantization"
    for name in ("schemes", "quantizers"):
        (package / name).mkdir(parents=True)
    for init in folder.rglob("*/"):
        (init / "__init__.py").write_text("import fast_hadamard_transform_that_nobody_has")
    (package / "quantizers" / "helper.py").write_text(f"FACTOR = {factor}")
    (package / "schemes" / "quartet_2.py").write_text(scheme)
    return folder


@pytest.fixture
def on_a_cpu(monkeypatch):
    def timed(function, calls):
        starts = [time.perf_counter()]
        for _ in range(calls):
            function()
            starts.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in zip(starts, starts[1:])]

    monkeypatch.setattr(common, "need_cuda", lambda script: torch.device("cpu"))
    monkeypatch.setattr(bench_linear, "LAYER_SETS", {"3B": {"up": (128, 256), "down": (256, 128)}})
    monkeypatch.setattr(step_time, "TOKENS", 256)
    monkeypatch.setattr(common, "timed", timed)


def test_what_is_right_is_timed(script, on_a_cpu, tmp_path):
    records, problems = script.compare(checkout(tmp_path, factor=2.0), "3B", 0.01)
    assert [r["name"] for r in records] == ["bf16", "clover", "published, exact amax"]
    for r in records:
        assert r["ratio"] == pytest.approx(r["ms"] / records[0]["ms"]) and r["settled"]
        assert r["times_clover"] == pytest.approx(r["ms"] / records[1]["ms"])
    assert "published, exact amax  " in script.show(records) and "never stops" not in script.show(records)
    assert "published, exact amax: torch.compile never" in script.show([records[2] | {"settled": False}])
    assert len(problems) == 1 and "published, delayed amax, 3B: output is off BF16" in problems[0]


def test_calls_are_settled_once_torch_compile_has_given_up(script):
    """As with the published code: a compiled function that no call finds fit, as a guarded number is always another."""
    calls = iter(range(100, 10**6))

    @torch.compile(backend="eager", dynamic=False)
    def again(y, call):
        return y + 0 * call

    x = torch.ones(2)
    assert script.settles(lambda: again(x, 1)) and script.settles(lambda: again(x, next(calls)))
    with torch._dynamo.config.patch(recompile_limit=10**6, accumulated_recompile_limit=10**6):
        assert not script.settles(lambda: again(x, next(calls)))


@pytest.mark.parametrize(
    "scheme, message",
    [
        ("import a_package_that_nobody_has", "quartet_2.py cannot be imported: .*a_package_that_nobody_has"),
        ("Quartet_III_Linear = None", "has no Quartet_II_Linear"),
    ],
)
def test_another_revision(script, tmp_path, scheme, message):
    with pytest.raises(UserError, match=message):
        script.load(checkout(tmp_path, scheme))


def test_no_checkout(script, tmp_path):
    with pytest.raises(UserError, match="is no checkout of IST-DASLab/Quartet-II: there is no .*quartet_2.py"):
        script.load(tmp_path)


def test_hadamard(script):
    h = torch.from_numpy(script.hadamard(128))
    assert torch.equal(h @ h.T, 128 * torch.eye(128, dtype=h.dtype)) and h.abs().eq(1).all() and h[0].eq(1).all()
