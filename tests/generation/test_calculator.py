"""The calculator computes what nanochat's does on what models write, and refuses the rest. No operation is large."""

import ast
import operator
import subprocess
import sys

import pytest

from nanochat_fp4.generation import calculator
from nanochat_fp4.generation.calculator import use_calculator


@pytest.mark.parametrize(
    "expr, value",
    [
        ("1+1", 2),
        ("48/2", 24.0),
        ("7//2", 3),
        (" 3 * (4 - 10) ", -18),
        ("-2.5*-4", 10.0),
        ("1,234 + 1", 1235),
        ("0.1+0.2", 0.1 + 0.2),
        (".5*2", 1.0),
        ("+7", 7),
        ("2**10", 1024),
        ("2**-1", 0.5),
        ("2**2**3", 256),
        ("10**64 - 1", 10**64 - 1),
        ("'strawberry'.count('r')", 3),
        ('"strawberry".count("rr")', 1),
        ("('abc').count('z')", 0),
        ("'a,b,c'.count(',')", 2),
    ],
)
def test_values(expr, value):
    result = use_calculator(expr)
    assert result == value and type(result) is type(value)


# One a line, so that they can be read.
NOT_AN_EXPRESSION = """
1 2
%
x
True
1j
0x10
1e5
007
5 % 3
1<2
(1)(2)
lambda: 1
"""
NOT_IN_THE_GRAMMAR = """
__import__('os').system('true')
().__class__
print(1)
'a'.count
'a'.count()
'a'.count('a', 0)
'a'.count(sub='a')
'a'.count(*'a')
'a'.join('b').count('b')
f'{1}'.count('1')
b'a'.count(b'a')
'a'.count(x)
1 .count('1')
'a'.format.count('a')
'a' 'b'
"""
OUT_OF_BOUNDS = """
1/0
0**-1
(-8)**.5
10**78
9**65
9**9**9
2.0**64**9
"""
REFUSED = (NOT_AN_EXPRESSION + NOT_IN_THE_GRAMMAR + OUT_OF_BOUNDS).split("\n")
REFUSED += [" ", "1\n+1", "\0", "'\ud800'.count('a')", "-" + "9" * 80, "1." + "0" * 300, "9" * 300, "(10**60)*(10**60)"]


@pytest.mark.parametrize("expr", sorted(set(REFUSED)))
def test_refuses(expr):
    assert use_calculator(expr) is None


@pytest.mark.parametrize(
    "expr",
    [
        "(" * 128 + "1" + ")" * 127,
        "-" * 255 + "1",
        "2" + "**2" * 80,
        "9" * 70 + "**64",
        "(" + "9" * 70 + "*1)**64",
        "9**64" + "*9**64" * 40,
        "'" + "a" * 200 + "'.count('" + "a" * 40 + "')",
        "(" * 10**6,
        "9**9**" * 10**5,
        "9.9**64**64**64",
    ],
)
def test_no_text_and_no_number_is_large_whatever_it_is_given(expr, monkeypatch):
    def small(operation):
        def checked(a, b):
            assert max(abs(a), abs(b)) < 2**256 and (operation is not operator.pow or abs(b) <= 64)
            return operation(a, b)

        return checked

    def parse(text, mode, parse=ast.parse):
        assert len(text) <= 256
        return parse(text, mode=mode)

    monkeypatch.setattr(
        calculator, "BINARY_OPERATORS", {kind: small(f) for kind, f in calculator.BINARY_OPERATORS.items()}
    )
    monkeypatch.setattr(ast, "parse", parse)
    use_calculator(expr)


def test_deep_nesting_does_not_crash_the_process():
    """In a process of its own, because a parser overflowing its stack would take the tests with it."""
    code = (
        # By its path: importing the package would import torch.
        f"import runpy; f = runpy.run_path({calculator.__file__!r})['use_calculator']\n"
        "import sys; sys.setrecursionlimit(150)\n"
        "print([f(s) for s in ('-'*255+'1', '('*120+'1'+')'*120, '1'+'+1'*127, '2'+'**2'*84)][2])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ("128", "None")
