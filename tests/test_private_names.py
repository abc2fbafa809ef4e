"""A name that begins with an underscore belongs to its file."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("nanochat_fp4", "nvfp4_kernels", "scripts", "lab", "eval")
FOLDERS = ("nanochat_fp4", "kernels", "scripts", "eval", "lab", "examples", "tests")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(source: str) -> set[str]:
    """The private names of other files that a file takes: imported, or as an attribute of what it imports."""
    tree, imported, found = ast.parse(source), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ROOMS:
            # A private module of a package belongs to the whole package.
            found |= {a.name for a in node.names if is_private(a.name) and "." in node.module}
            imported |= {a.asname or a.name for a in node.names}
        elif isinstance(node, ast.Import):
            names = [a for a in node.names if a.name.split(".")[0] in ROOMS]
            imported |= {a.asname or a.name.split(".")[0] for a in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            owner = node.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in imported:
                found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "from nanochat_fp4.nvfp4.quantizers import _search",
        "from nanochat_fp4.nvfp4 import quantizers\nquantizers._search",
        "import nanochat_fp4.nvfp4.quantizers\nnanochat_fp4.nvfp4.quantizers._search",
        "import lab.sweep as sweep\nsweep._plan",
    ],
)
def test_a_private_name_is_found(source):
    assert private_names(source)


def test_no_file_takes_a_private_name_of_another():
    listed = subprocess.run(["git", "ls-files", *FOLDERS], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    files = [name for name in listed.stdout.split() if name.endswith(".py") and (ROOT / name).exists()]
    found = {name: names for name in files if (names := private_names((ROOT / name).read_text()))}
    assert files and not found
