"""
The calculator that a chat model calls: a small grammar over Python's syntax tree, and nothing is ever executed.

    expression := number | (expression) | +expression | -expression
                | expression (+ | - | * | / | // | **) expression
                | "text".count("text")

Numbers are Python's: 7 / 2 is 3.5 and 7 // 2 is 3.

No deadline is needed. The text has at most MAX_LENGTH characters, so the tree is small. Integers stay below 2^MAX_BITS,
so each operation is quick. An exponent is checked before the power is taken.
"""

import ast
import math
import operator
import warnings

MAX_LENGTH = 256  # characters, while the calls of GSM8K's training set have fewer than 100
MAX_BITS = 256  # of an integer, 77 digits (str(int) refuses 4300)
MAX_EXPONENT = 64

_ARITHMETIC = frozenset("0123456789*+-/.() ")

BINARY_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class _Refused(Exception):
    """Not in the grammar, or out of bounds."""


def _number(value: object) -> int | float:
    """`value` if it is an int or a finite float within bounds (a power can be complex, and bool is an int)."""
    if type(value) is int and value.bit_length() <= MAX_BITS:
        return value
    if type(value) is float and math.isfinite(value):
        return value
    raise _Refused


def _arithmetic(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant):
        return _number(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _number(_UNARY[type(node.op)](_arithmetic(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY_OPERATORS:
        left, right = _arithmetic(node.left), _arithmetic(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise _Refused
        return _number(BINARY_OPERATORS[type(node.op)](left, right))
    raise _Refused


def _count(node: ast.expr) -> int:
    """The value of "text".count("text")."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "count":
        arguments = [node.func.value, *node.args]
        texts = [a.value for a in arguments if isinstance(a, ast.Constant) and type(a.value) is str]
        if len(arguments) == len(texts) == 2 and not node.keywords:
            return texts[0].count(texts[1])
    raise _Refused


def use_calculator(expr: str) -> int | float | None:
    """
    The value of `expr` if it is in the grammar above, else None: whatever a model writes, this never raises.

    Thousands separators are taken out of arithmetic ("1,000 * 2" is 2000), as nanochat does.
    """
    expr = expr.strip()
    if len(expr) > MAX_LENGTH:
        return None
    plain = expr.replace(",", "")
    is_arithmetic = set(plain) <= _ARITHMETIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd literals warn before they fail
            tree = ast.parse(plain if is_arithmetic else expr, mode="eval").body
        return _arithmetic(tree) if is_arithmetic else _count(tree)
    except (_Refused, SyntaxError, ValueError, ArithmeticError, MemoryError, RecursionError):
        return None
