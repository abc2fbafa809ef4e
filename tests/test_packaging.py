"""The house: imports run one way, everything imports without a GPU, and `import kernels` stays Hugging Face's."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the top of the house to its foundation; each layer may import itself and what stands below it.
LAYERS = ("lab", "scripts", "eval", "nanochat_fp4", "nanochat_fp4.nvfp4", "nvfp4_kernels")
# The rooms of nanochat_fp4, likewise. Its flat modules are the ground floor, but for those that serve a user directly.
ROOMS = ("export", "training", "evaluation", "generation", "models", "data")
COMMANDS = ("upstream", "doctor", "__main__")
MOST_MODULES = {
    "nanochat_fp4": 13,
    "nanochat_fp4.nvfp4": 33,
    "nanochat_fp4.training": 20,
    "kernels.nvfp4_kernels": 15,
}  # of a folder; of all others:
MOST_MODULES_ELSEWHERE = 14
FOLDERS = {
    "lab": ROOT / "lab",
    "scripts": ROOT / "scripts",
    "eval": ROOT / "eval",
    "nanochat_fp4": ROOT / "nanochat_fp4",
    "nvfp4_kernels": ROOT / "kernels" / "nvfp4_kernels",
}


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the project."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in sorted(folder.rglob("*.py")):
            if file.name.startswith("modeling_"):  # copied beside exported models, for transformers; nothing imports it
                continue
            if file.parent.name == "sandbox" and file.name != "__init__.py":  # run by its path, in processes of its own
                continue
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def layer(module: str) -> int | None:
    """Index into LAYERS, or None for other people's packages."""
    fitting = [i for i, name in enumerate(LAYERS) if module == name or module.startswith(name + ".")]
    return max(fitting, default=None)


@functools.cache
def imports(module: str) -> set[str]:
    """Names of the modules that a module imports anywhere, inside functions and for type checkers too; our own ones
    down to the module."""
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            names |= {f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base for a in node.names}
    return names


def test_there_is_something_to_check():
    assert {"nanochat_fp4.nvfp4.quantizers", "nanochat_fp4.models.gpt", "nvfp4_kernels", "scripts.base_train"} <= set(
        MODULES
    )
    assert "nanochat_fp4.nvfp4.quantizers" in imports("nanochat_fp4.nvfp4.gemm")
    assert any(name.startswith("nvfp4_kernels") for name in imports("nanochat_fp4.nvfp4.gemm"))
    assert layer("nanochat_fp4.models.gpt") == 3 and layer("nanochat_fp4.nvfp4.format") == 4 and layer("torch") is None


def room(module: str) -> int | None:
    """Index into ROOMS, len(ROOMS) for a flat module of nanochat_fp4; None elsewhere."""
    first, _, rest = module.partition(".")
    inner = rest.partition(".")[0]
    if first != "nanochat_fp4" or inner == "nvfp4" or inner in COMMANDS or not rest:
        return None
    return ROOMS.index(inner) if inner in ROOMS else len(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module):
    """lab -> scripts -> eval -> nanochat_fp4 -> nanochat_fp4.nvfp4 -> nvfp4_kernels, and never back up. The rooms:
    export -> training -> evaluation -> generation -> models -> data -> the flat modules."""
    for place in (layer, room):
        placed = {n: place(n) for n in imports(module)} if place(module) is not None else {}
        upwards = sorted(n for n, at in placed.items() if at is not None and at < place(module))
        assert not upwards, f"{module} imports {', '.join(upwards)}, which stands above it"


def test_folders_are_small_and_say_what_is_in_them():
    folders = {file.parent for file in MODULES.values()} - {ROOT / "scripts"}
    assert len(folders) > 10
    for folder in folders:
        name = ".".join(folder.relative_to(ROOT).parts)
        count = len([file for file in folder.glob("*.py") if file.name != "__init__.py"])
        assert count <= MOST_MODULES.get(name, MOST_MODULES_ELSEWHERE), f"{name} has {count} modules"
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), f"{name}/__init__.py says nothing"


def test_no_cycles():
    graph = {m: {n for n in imports(m) if n in MODULES and n != m} for m in MODULES}
    done, path = set(), []

    def visit(module):
        assert module not in path, "import cycle: " + " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for needed in sorted(graph[module]):
            visit(needed)
        path.pop()
        done.add(module)

    for module in sorted(graph):
        visit(module)


@pytest.mark.parametrize("module", [m for m in MODULES if layer(m) >= 4])
def test_the_numerics_need_torch_alone(module):
    """nvfp4 and its kernels can be taken elsewhere: torch, Triton and the standard library."""
    foreign = {n.partition(".")[0] for n in imports(module)} - {"nanochat_fp4", "nvfp4_kernels"}
    foreign -= {"torch", "triton", *sys.stdlib_module_names}
    assert not foreign
    assert "importlib.import_module" not in MODULES[module].read_text(), "an import that this test does not see"


def tomllib(path: Path) -> dict:
    """The file's content; tomllib came with Python 3.11."""
    module = pytest.importorskip("tomllib")
    return module.loads(path.read_text())


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs the interpreter in the repository's root, without a GPU. Layers are not compiled: see conftest.py."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NVFP4_COMPILE": "0", **environment}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


IMPORTS = """
import importlib, os, sys, torch
sys.path.insert(1, "kernels")

def works_without(missing, modules):
    sys.modules[missing] = None
    for module in modules:
        importlib.import_module(module)
    import nanochat_fp4 as nf
    assert "reference" in str(nf.backend()), nf.backend()
    nf.QuantLinear(128, 128)(torch.randn(2, 128)).sum().backward()

pid = os.fork()
if pid == 0:
    works_without("nvfp4_kernels", [])
    sys.exit()
assert os.waitpid(pid, 0)[1] == 0, "without nvfp4_kernels"
works_without("triton", {ours})
for name in [name for name in sys.modules if name == "triton" or name.partition(".")[0] in {packages}]:
    del sys.modules[name]
for module in {everything}:
    importlib.import_module(module)
"""


def test_everything_imports_without_a_gpu_and_without_the_kernels():
    """macOS has no Triton, and a clone that is not installed no kernels: all imports, and the reference takes over.

    One process: other people's packages take the time, and are imported once."""
    everything, packages = sorted(MODULES), sorted(FOLDERS)
    ours = [m for m in everything if layer(m) < 5]  # the kernels need triton themselves
    result = python("-c", IMPORTS.format(ours=ours, packages=packages, everything=everything))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "", "importing a module printed something"


def test_the_library_needs_torch_triton_and_numpy_alone():
    """`pip install nanochat_fp4` without extras: what the extras bring is not there, and convert works. The import
    takes nothing that takes long and is not needed yet: torch's compiler, Triton, what plots and loads data. A model is
    made without the compiler, too."""
    project = tomllib(ROOT / "pyproject.toml")["project"]
    names = {"compressed-tensors": "compressed_tensors", "muon-optimizer": "muon"}
    extras = {re.split(r"[<>=;]", d)[0] for k, v in project["optional-dependencies"].items() if k != "dev" for d in v}
    assert len(extras) > 10 and {"datasets", "wandb", "matplotlib", "fastapi"} <= extras
    code = (
        f"import sys\nfor m in {sorted(names.get(e, e) for e in extras)}: sys.modules[m] = None\n"
        "import torch; before = set(sys.modules)\n"
        "import nanochat_fp4 as nf\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "assert not new & {'triton', 'sympy', 'wandb', 'datasets', 'matplotlib', 'pyarrow', 'tiktoken', 'muon'}, new\n"
        "from nanochat_fp4.models.gpt import GPT, GPTConfig\n"
        "with torch.device('meta'): GPT(GPTConfig(n_layer=1))\n"
        "assert not {'torch._dynamo', 'torch._inductor'} & set(sys.modules), 'the compiler was imported'\n"
        "model = nf.convert(torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 8)), skip='1')\n"
        "model(torch.randn(2, 128)).sum().backward()\n"
        "assert nf.__version__ and 'load_quantized' in nf.__all__\n"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr


def test_kernels_is_somebody_elses_package(tmp_path):
    """nanochat imports Hugging Face's `kernels` for FlashAttention-3 and swallows the error, so a folder of ours with
    an __init__.py would take FA3 away without a word. Under `python -m pytest` the root comes first on sys.path; still
    a package named kernels at its very end must be found, here one made for the occasion."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("get_kernel = 'theirs'\n")
    probe = tmp_path / "test_probe.py"
    probe.write_text(
        "import importlib.util, sys\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "def test_probe():\n"
        "    from pathlib import Path\n"
        "    import nvfp4_kernels\n"
        f"    root = Path({str(ROOT)!r})\n"
        "    assert '' in sys.path or str(root) in sys.path\n"
        "    assert Path(nvfp4_kernels.__file__).is_relative_to(root)\n"
        "    spec = importlib.util.find_spec('kernels')\n"
        "    assert spec.origin and not Path(spec.origin).is_relative_to(root), spec\n"
        "    from kernels import get_kernel\n"
    )
    result = python("-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-p", "no:cacheprovider", str(probe))
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (ROOT / "kernels" / "__init__.py").exists()
    # And where theirs is not installed, ours does not pretend to be it.
    result = python("-c", "from kernels import get_kernel")
    if importlib.util.find_spec("kernels").origin is None:
        assert "ImportError" in result.stderr


def test_the_mark_of_constants_is_torchs_own():
    """dispatch.constant_when_compiled does without the import what torch.compiler.assume_constant_result does."""
    import torch

    from nanochat_fp4.nvfp4.dispatch import constant_when_compiled

    def theirs():
        return 1

    def ours():
        return 1

    assert vars(torch.compiler.assume_constant_result(theirs)) == vars(constant_when_compiled(ours)) != {}
