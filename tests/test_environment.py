"""Which environment variables tell the code what to do."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
READERS = ("os.getenv", "os.environ.get", "environment.get", "switched_on")


def variables_read(code: str) -> set[str]:
    """The names in os.environ[...], READERS(...), os.environ.setdefault(...) and `... in os.environ`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(code)) if re.search("environ|getenv|switched_on", code) else ():
        names: list[ast.expr] = []
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            names = [node.slice] if isinstance(node.ctx, ast.Load) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in READERS:
            names = node.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.setdefault":
            names = node.args[:1]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            names = [node.left]
        found |= {name.value for name in names if isinstance(name, ast.Constant) and str(name.value).isupper()}
    return found


def test_the_page_of_variables_lists_those_that_the_code_reads():
    page = (ROOT / "docs/environment.md").read_text()
    listed = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", page))
    python = [f for d in ("nanochat_fp4", "kernels", "scripts", "eval") for f in (ROOT / d).rglob("*.py")]
    code = "\n".join(f.read_text() for f in python)
    read = set().union(*(variables_read(f.read_text()) for f in python))
    assert "NANOCHAT_BASE_DIR" in read and not read - listed, f"not on the page: {sorted(read - listed)}"
    shell = "\n".join(f.read_text() for f in (*ROOT.glob("*.sh"), *(ROOT / "dev").glob("*.sh")))
    gone = {name for name in listed if not re.search(rf"\b{name}\b", code + shell)}
    assert not gone, f"on the page, and nobody reads it: {sorted(gone)}"
