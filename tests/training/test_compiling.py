"""Kernels that are compiled while the data are read: those of a training step, so that the step compiles none."""

import contextlib
import threading

import pytest
import torch

from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.training import compiling

STEP = """
import json
from concurrent.futures import ThreadPoolExecutor
import torch
from _instructions import compiled_instead_of_launched

launched = compiled_instead_of_launched(90)
import nanochat_fp4 as nf
from nanochat_fp4.nvfp4.methods import get_recipe
from nanochat_fp4.nvfp4.relu_squared import relu_squared_linear
from nanochat_fp4.training.compiling import launches

recipes = get_recipe({method!r}).parts
with ThreadPoolExecutor(8) as pool:
    made = [pool.submit(launch) for recipe in recipes for launch in launches(recipe, torch.device("cpu"))]
[future.result() for future in made]
early = set(launched)
for recipe in recipes:
    for k, n in ((2048, 512), (2048, 1536)):
        linear = nf.QuantLinear(k, n, method=recipe)
        for layer in (linear, lambda x: relu_squared_linear(x, linear)):
            x = torch.zeros(512, k, dtype=torch.bfloat16, requires_grad=True)
            layer(x).backward(torch.zeros(512, n, dtype=torch.bfloat16))
print("LATE", json.dumps([launched[key]["kernel"] for key in set(launched) - early]))
"""


@pytest.mark.parametrize("method", ["clover", pytest.param("clover_mixed", marks=pytest.mark.slow)])
def test_a_step_finds_its_kernels_compiled(method, fork_server, tmp_path):
    pytest.importorskip("triton")
    environment = {"NVFP4_KERNELS": "triton", "TRITON_CACHE_DIR": str(tmp_path)}
    (out,) = fork_server.run_ranks(STEP.format(method=method), 1, env=environment)
    assert "LATE []" in out, out


def test_each_thread_launches_on_the_gpu_of_its_process(monkeypatch):
    here, found = threading.local(), []

    @contextlib.contextmanager
    def current(device):
        here.device = device
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(compiling, "use_kernels", lambda device: True)
    monkeypatch.setattr(compiling, "start_processes_of_compiler", lambda: None)
    launch = lambda: found.append(getattr(here, "device", None))  # noqa: E731
    monkeypatch.setattr(compiling, "launches", lambda recipe, device: [launch, launch])
    second = torch.device("cuda", 1)
    with compiling.compiled_meanwhile(second, get_recipe("clover")) as wait:
        wait()
    assert found and set(found) == {second}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_torch_starts_its_processes_before_a_kernel_is_compiled(device, monkeypatch):
    """They need seconds until they answer. On a CPU there are no kernels for them."""
    order = []
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: order.append("processes"))
    monkeypatch.setattr(compiling, "use_kernels", lambda device: True)
    monkeypatch.setattr(compiling, "launches", lambda *_: [lambda: order.append("kernel")])
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with compiling.compiled_meanwhile(torch.device(device), get_recipe("clover")) as wait:
        wait()
    assert order == (["processes", "kernel"] if device == "cuda" else [])
