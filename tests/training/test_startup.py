"""The start of a run: torch's compiler starts early, and kernels are not launched in several threads."""

import ast
from pathlib import Path

import pytest
import torch

from nanochat_fp4.training.trainer import start_compiler

ROOT = Path(__file__).parents[2]
THREADS = {"ThreadPoolExecutor", "Thread", "ThreadPool"}
# Modules whose functions launch kernels, directly or by a compiled graph.
LAUNCHING = ("nvfp4_kernels", "nanochat_fp4.nvfp4", "triton")


def names_and_imports(source):
    """The names that a module uses, and the modules that it imports."""
    names, imports = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imports.add(node.module or "")
            names |= {alias.name for alias in node.names}
        elif isinstance(node, (ast.Name, ast.Attribute)):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names, imports


def test_no_module_that_launches_kernels_makes_threads():
    """Triton fills the one module object of its launchers' common name anew with each launcher that it loads. Between
    this and the look at `launch`, another thread may load another kernel's launcher, and the kernel then writes wrong
    memory."""
    files = [p for folder in ("nanochat_fp4", "kernels", "scripts") for p in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    wrong = []
    for path in files:
        names, imports = names_and_imports(path.read_text())
        if names & THREADS and any(module.startswith(LAUNCHING) for module in imports):
            wrong.append(str(path.relative_to(ROOT)))
    assert not wrong


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_torch_starts_its_compiling_processes_for_a_gpu(device, monkeypatch):
    started = []
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: started.append(True))
    start_compiler(torch.device(device))
    assert started == ([True] if device == "cuda" else [])
