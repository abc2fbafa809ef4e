"""The public API: types, docstrings with examples, help."""

import ast
import builtins
import doctest
import importlib.util
import inspect
import json
import pydoc
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanochat_fp4 as nf

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "typing" / "uses_api.py"
MISUSES = SCRIPT.with_name("misuses_api.py")
CONSTANTS = {"METHODS", "ROUNDINGS"}


@pytest.mark.parametrize("name", sorted(set(nf.__all__) - CONSTANTS))
def test_docstrings_have_examples_that_run(name):
    thing = getattr(nf, name)
    (found,) = doctest.DocTestFinder(recurse=False).find(thing, name, globs={"nf": nf, "torch": torch})
    assert found.examples, f"nf.{name} has no example"
    said = []
    doctest.DocTestRunner(verbose=False).run(found, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", sorted(set(nf.__all__) - CONSTANTS))
def test_a_program_can_catch_what_a_docstring_says_is_raised(name):
    """By names of Python's, as nf has no class of errors."""
    named = set(re.findall(r"\b[A-Z]\w*Error\b", inspect.getdoc(getattr(nf, name))))
    assert all(hasattr(builtins, error) for error in named), named


def test_the_package_imports_no_torch_by_itself():
    """A command's --help, and a wrong command, are answered at once."""
    code = "import nanochat_fp4, sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT)
    assert done.returncode == 0


def test_tab_completes_the_public_names():
    assert dir(nf) == sorted(nf.__all__)


def test_help_is_a_page():
    """help(nf) tells what each name is for; no page has a name that is not there."""
    page = inspect.getdoc(nf)
    assert all(re.search(rf"\b{name}\b", page) for name in nf.__all__), page
    assert all(hasattr(nf, name) for name in re.findall(r"\bnf\.(?!nf_)(\w+)", page))
    assert "convert(model" in pydoc.plain(pydoc.render_doc(nf))


def test_the_script_uses_all_and_runs(capsys):
    text = SCRIPT.read_text()
    assert [name for name in nf.__all__ if f"nf.{name}" not in text] == []
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.count("torch.Size([8, 32])") == 2
    with pytest.raises(AttributeError, match="module 'nanochat_fp4' has no attribute 'nonsense'"):
        nf.nonsense  # noqa: B018


def test_type_checkers_read_the_same_names():
    tree = ast.parse((ROOT / "nanochat_fp4" / "__init__.pyi").read_text())
    names = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert names - {"__version__"} == set(nf.__all__)
    (listed,) = (ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign))
    assert listed == nf.__all__


def mypy(*files: Path) -> set[tuple[str, int]]:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed (the extra lint)")
    flags = ["--strict", "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run([sys.executable, "-m", "mypy", *flags, *files], cwd=ROOT, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    print(done.stdout)
    found = re.findall(r"^(.+?):(\d+): error", done.stdout, re.M)
    return {(Path(file).name, int(line)) for file, line in found}


def pyright(*files: Path) -> set[tuple[str, int]]:
    program = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("pyright is not installed (the extra lint)")
    flags = ["--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([program, *flags, *files], cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-4000:])
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {(Path(d["file"]).name, d["range"]["start"]["line"] + 1) for d in found}


@pytest.mark.slow
@pytest.mark.parametrize("checker", [mypy, pyright])
def test_strict_type_checkers(checker):
    """No complaint about the documented forms, and one about each misuse."""
    lines = MISUSES.read_text().splitlines()
    wrong = {(MISUSES.name, i) for i, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) == 7 and checker(SCRIPT, MISUSES) == wrong
