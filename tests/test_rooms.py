"""The table of code lines by room. A room grows beyond it only with a reason in dev/LOG.md."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = {
    "nvfp4": 2731, "kernels": 2100, "models": 2067, "training": 1678, "data": 1378, "evaluation": 1492, "export": 1046,
    "generation": 561, "nanochat_fp4": 2094, "scripts": 1854, "eval": 424, "dev": 249,
}  # fmt: skip
BLANK = {getattr(tokenize, name) for name in "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER".split()}


def code_lines(source: str) -> int:
    """Lines that hold code: no docstrings, comments or blank lines."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    owners = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and ast.get_docstring(node)]
    docs = {line for node in owners for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in BLANK)
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - docs)


def test_no_room_is_larger_than_its_place_in_the_table():
    """scripts/plan.py counts to the top level, for which it was budgeted."""
    lines: Counter[str] = Counter()
    for top in ("nanochat_fp4", "kernels", "scripts", "eval", "dev"):
        for path in (ROOT / top).rglob("*.py"):
            parts = path.relative_to(ROOT).parts
            of_top = parts == ("scripts", "plan.py") or (top == "nanochat_fp4" and len(parts) == 2)
            lines["nanochat_fp4" if of_top else parts[1] if top == "nanochat_fp4" else top] += code_lines(
                path.read_text()
            )
    assert lines.keys() == MOST.keys()
    assert not {room: (n, MOST[room]) for room, n in lines.items() if n > MOST[room]}
